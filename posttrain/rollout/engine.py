"""Which engine writes the turns of this model?  That of the config, or the fastest that passes a self-test."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from posttrain.models import UNFIT, attends_to_all, text_config
from posttrain.rollout.engines.base import Sampler
from posttrain.rollout.engines.graphs import GraphSampler
from posttrain.rollout.engines.remote import RemoteSampler, Servers
from posttrain.rollout.engines.replay import ReplaySampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.rollout.engines.vllm import VLLMSampler
from posttrain.rollout.engines.vllm_server import Policy, VLLMServer
from posttrain.runtime import DEVICE_ERRORS, launcher, parallel
from posttrain.types import Completion, SamplingParams, UserError, one_line

Engine = type[SlotSampler] | type[ReplaySampler]


def open_engine(
    model: PreTrainedModel,
    stop_ids: Sequence[int],
    pad_id: int,
    engine: str = "auto",
    longest: int | None = None,
    vllm_memory: float = 0.3,
    graphs: bool = True,
    conversations: int | None = None,
) -> Sampler:
    """Return an engine for a model; `auto` is the slot engine if it passes a self-test on this model, else replay.

    Args:
        longest: tokens of the longest conversation, if known.
        vllm_memory: the share of the device's memory that vLLM takes.
        graphs: whether the slot engine replays CUDA graphs on a GPU, if these pass the self-test, too.
        conversations: how many are open at a time at most, if known; CUDA graphs' cache has them from the start.

    Raises:
        UserError: the engine cannot sample from this model; `auto`: neither of the two engines can.
    """
    if engine == "vllm":
        return VLLMSampler(model, stop_ids, longest, vllm_memory)
    name = type(model).__name__
    cause = None if engine == "replay" else why_unfit(model, stop_ids, pad_id)
    if cause is None and engine != "replay":
        if graphs and model.device.type == "cuda":
            if (wrong := why_unfit(model, stop_ids, pad_id, GraphSampler)) is None:
                return GraphSampler(model, stop_ids, pad_id, longest, conversations=conversations)
            warnings.warn(f"{name} is decoded without CUDA graphs: {wrong}", stacklevel=2)
        return SlotSampler(model, stop_ids, pad_id, longest)
    if engine == "slots":
        raise UserError(
            f"engine=slots keeps the KV cache across turns, which {name} does not allow: {cause}. Write engine=replay,"
            " or engine=auto to let the self-test choose."
        )
    if (wrong := why_unfit(model, stop_ids, pad_id, ReplaySampler)) is not None:
        also = "" if cause is None else f" It cannot be sampled with a kept KV cache either: {cause}."
        raise UserError(
            f"{name} cannot be sampled by replaying its history: {wrong}.{also} Take a model of another architecture."
        )
    if cause is not None:
        warnings.warn(
            f"{name} replays its history in every turn (slower), without a kept KV cache: {cause}", stacklevel=2
        )
    return ReplaySampler(model, stop_ids, pad_id)


def open_servers(policy: Policy, urls: Sequence[str], folder: Path) -> RemoteSampler:
    """Return a sampler over this process's share of the vLLM servers at `urls`.

    folder: where weights are written for vLLM to read.

    Raises:
        UserError: a server does not answer, or does not fit the policy.
    """
    if few := launcher.servers_for(parallel.size(), list(urls)):
        raise UserError(few)
    mine = [VLLMServer(url) for url in urls[parallel.rank() :: parallel.size()]]
    servers = Servers(mine, policy, folder / f"weights-{parallel.rank()}")
    servers.connect()
    return RemoteSampler(servers)


def why_unfit(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine = SlotSampler) -> str | None:
    """Return the reason why an engine cannot sample from this model, worded to follow a colon; None if it can.

    Raises:
        UserError: the model's log-probs are NaN.
        RuntimeError: the device failed (out of memory, a CUDA error). This is not the model's fault.
    """
    keeps = issubclass(engine, SlotSampler)
    if keeps and not attends_to_all(model):
        return "not every layer attends to all tokens before it (sliding windows, or positions that depend on others)"
    was_training = model.training
    try:
        difference, tolerance = _compare(model, stop_ids, pad_id, engine)
    except DEVICE_ERRORS:
        raise
    except UNFIT as error:
        return f"its self-test raised {one_line(error)}"
    finally:
        model.train(was_training)
    if difference <= tolerance:
        return None
    how = "with a kept cache" if keeps else "in left-padded rows"
    return f"{how} its log-probs differ from those of a full forward pass by up to {difference:.2g} nats"


def _compare(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine) -> tuple[float, float]:
    """Return the largest difference of a log-prob in the self-test, and the tolerance for rounding.

    Computed in float32, without autocast: bfloat16 alone makes differences of 0.2 nats. Weights in half precision are
    copied if the memory allows it.
    """
    with torch.autocast(model.device.type, enabled=False):
        if _can_copy(model):
            in_float32 = copy.deepcopy(model).float()  # pyright: ignore[reportUnknownMemberType]
            return _largest_difference(in_float32, stop_ids, pad_id, engine), 1e-3
        return _largest_difference(model, stop_ids, pad_id, engine), 1e-3 if model.dtype == torch.float32 else 0.25


def _can_copy(model: PreTrainedModel) -> bool:
    """Return whether the weights are in half precision and a copy in float32 fits into the memory."""
    if model.dtype not in (torch.bfloat16, torch.float16) or getattr(model, "is_quantized", False):
        return False
    if model.device.type != "cuda":
        return True
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())  # the copy, and one more while it is made
    return needed < torch.cuda.mem_get_info(model.device)[0]


def _largest_difference(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine) -> float:
    """Sample two turns in three conversations; return the largest difference from a full forward pass, in nats."""
    sampler = engine(model, stop_ids, pad_id)
    if isinstance(sampler, GraphSampler):
        sampler.strict = True
    plain = [token for token in range(text_config(model).vocab_size) if token not in set(stop_ids)][:64]
    rows = [plain[:5], plain[3:15], plain[:5]]
    handles = sampler.open(rows)
    params = SamplingParams(max_new_tokens=4)
    turns: list[list[tuple[int, Completion]]] = [[], [], []]  # of each row: where each turn begins, and what it is
    for turn in range(2):
        for row, completion in enumerate(sampler.sample(handles, params, [turn * 3 + row for row in range(3)])):
            turns[row].append((len(rows[row]), completion))
            reply = plain[7 : 10 + row]
            sampler.append(handles[row], reply)
            rows[row] += completion.ids + reply
    differences = [0.0]
    with torch.no_grad():
        for row, ids in enumerate(rows):
            ids_1T = torch.tensor([ids], device=model.device)
            logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(-1)
            if logprobs_TV.isnan().any():
                raise UserError(
                    f"{type(model).__name__} gives probabilities that are not numbers (NaN), so its weights are"
                    " damaged, as by training that diverged. Take an earlier checkpoint, or another model."
                )
            for start, completion in turns[row]:
                for n, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
                    difference = abs(logprobs_TV[start + n - 1, token].item() - logprob)
                    differences.append(math.inf if math.isnan(difference) else difference)
    return max(differences)
