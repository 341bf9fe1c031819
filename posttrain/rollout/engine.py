"""Which engine writes the turns of this model?  The one asked for, or the fastest that its self-test allows."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from posttrain.models import UNFIT, attends_to_all
from posttrain.rollout.engines.base import Sampler
from posttrain.rollout.engines.compiled import CompiledSampler
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
    compiled: bool = False,
) -> Sampler:
    """The engine asked for; `auto` takes the slot engine where a self-test on this very model proves it right, else
    the one that replays, which must pass the same test.

    longest: the tokens that no conversation exceeds, where that is known. vllm_memory: vLLM's share of the device.
    compiled: decode with the compiled step of the slot engine, and with nothing else.
    """
    if engine == "vllm":
        return VLLMSampler(model, stop_ids, longest, vllm_memory)
    name = type(model).__name__
    slots = CompiledSampler if compiled else SlotSampler
    cause = None if engine == "replay" else why_unfit(model, stop_ids, pad_id, slots)
    if cause is None and engine != "replay":
        return slots(model, stop_ids, pad_id, longest)
    if compiled:
        raise UserError(
            f"rollout.compile=true decodes with a kept KV cache, which {name} does not allow: {cause}. Leave"
            " rollout.compile out."
        )
    if engine == "slots":
        raise UserError(
            f"engine=slots keeps the KV cache across turns, which {name} does not allow: {cause}. Write engine=replay,"
            " or engine=auto to let the self-test choose."
        )
    if (wrong := why_unfit(model, stop_ids, pad_id, ReplaySampler)) is not None:
        also = "" if cause is None else f" Nor is there another way: {cause}."
        raise UserError(
            f"{name} cannot be sampled by replaying its history: {wrong}.{also} Take a model of another architecture."
        )
    if cause is not None:
        warnings.warn(
            f"{name} replays its history in every turn (slower), without a kept KV cache: {cause}", stacklevel=2
        )
    return ReplaySampler(model, stop_ids, pad_id)


def open_servers(policy: Policy, urls: Sequence[str], folder: Path) -> RemoteSampler:
    """vLLM's servers that play for this process: its share of them.

    folder: where weights may lie until vLLM has read them. A UserError where one is not there, or does not fit.
    """
    if few := launcher.servers_for(parallel.size(), list(urls)):
        raise UserError(few)
    mine = [VLLMServer(url) for url in urls[parallel.rank() :: parallel.size()]]
    servers = Servers(mine, policy, folder / f"weights-{parallel.rank()}")
    servers.connect()
    return RemoteSampler(servers)


def why_unfit(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine = SlotSampler) -> str | None:
    """Why this engine, ours with a kept cache or the one that replays, cannot be used for this model, in words.

    None where it can. What tells of the device and not of the model (no memory left, a CUDA error) is raised. A
    UserError where the model gives no numbers.
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
    how = "with a kept cache" if keeps else "in rows that are padded on the left"
    return f"{how} its log-probs differ from those of a full forward pass by up to {difference:.2g} nats"


def _compare(
    model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine = SlotSampler
) -> tuple[float, float]:
    """The largest difference of a log-prob in the self-test, and the largest that is rounding.

    Computed in float32, without autocast: bfloat16 alone makes differences of .2 nats. Of weights in half precision a
    copy is made, where the memory allows one.
    """
    with torch.autocast(model.device.type, enabled=False):
        if _can_copy(model):
            return _largest_difference(copy.deepcopy(model).float(), stop_ids, pad_id, engine), 1e-3
        return _largest_difference(model, stop_ids, pad_id, engine), 1e-3 if model.dtype == torch.float32 else 0.25


def _can_copy(model: PreTrainedModel) -> bool:
    """Whether these are weights in half precision of which there is room for a copy in float32."""
    if model.dtype not in (torch.bfloat16, torch.float16) or getattr(model, "is_quantized", False):
        return False
    if model.device.type != "cuda":
        return True
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())  # a copy, and another one while it grows
    return needed < torch.cuda.mem_get_info(model.device)[0]


def _largest_difference(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine) -> float:
    sampler = engine(model, stop_ids, pad_id)
    plain = [token for token in range(model.config.get_text_config().vocab_size) if token not in set(stop_ids)][:64]
    handles = sampler.open([plain[:5], plain[3:15], plain[:5]])
    params = SamplingParams(max_new_tokens=4)
    start = [5, 12, 5]
    spans: list[list[tuple[int, Completion]]] = [[], [], []]
    for turn in range(2):
        for row, done in enumerate(sampler.sample(handles, params, [turn * 3 + row for row in range(3)])):
            spans[row].append((start[row], done))
            reply = plain[7 : 10 + row]
            sampler.append(handles[row], reply)
            start[row] += len(done.ids) + len(reply)
    worst = [0.0]
    with torch.no_grad():
        for row, handle in enumerate(handles):
            ids_1T = torch.tensor([sampler._ids[handle]], device=model.device)
            logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(-1)
            if logprobs_TV.isnan().any():
                raise UserError(
                    f"{type(model).__name__} gives probabilities that are no numbers (NaN), so its weights are damaged:"
                    " a training that diverged leaves such ones. Take an earlier checkpoint, or another model."
                )
            for begin, done in spans[row]:
                for n, (token, logprob) in enumerate(zip(done.ids, done.logprobs, strict=True)):
                    difference = abs(logprobs_TV[begin + n - 1, token].item() - logprob)
                    worst.append(math.inf if math.isnan(difference) else difference)
    return max(worst)
