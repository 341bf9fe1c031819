"""Can the slot engine be used for this model?  Decided on the model itself, before a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from posttrain.policy import DEVICE_ERRORS, UNFIT, attends_to_all
from posttrain.sampler.slots import SlotSampler
from posttrain.types import Completion, SamplingParams, UserError


def agrees_with_full_forward(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> bool:
    """A self-test before a run: ragged rows, two turns, each sampled log-prob against one plain forward pass."""
    difference, tolerance = _compare(model, stop_ids, pad_id)
    return difference <= tolerance


def why_unfit(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> str | None:
    """Why the slot engine cannot be used for this model, in words; None where it can.

    What tells of the device and not of the model (no memory left, a CUDA error) is raised. A UserError where the model
    gives no numbers.
    """
    if not attends_to_all(model):
        return "not every layer attends to all tokens before it (sliding windows, or positions that depend on others)"
    was_training = model.training
    try:
        difference, tolerance = _compare(model, stop_ids, pad_id)
    except DEVICE_ERRORS:
        raise
    except UNFIT as error:
        return f"its self-test raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        model.train(was_training)
    if difference <= tolerance:
        return None
    return f"with a kept cache its log-probs differ from those of a full forward pass by up to {difference:.2g} nats"


def _compare(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> tuple[float, float]:
    """The largest difference of a log-prob in the self-test, and the largest that is rounding.

    Computed in float32, without autocast: bfloat16 alone makes differences of .2 nats. Of weights in half precision a
    copy is made, where the memory allows one.
    """
    with torch.autocast(model.device.type, enabled=False):
        if _can_copy(model):
            return _largest_difference(copy.deepcopy(model).float(), stop_ids, pad_id), 1e-3
        return _largest_difference(model, stop_ids, pad_id), 1e-3 if model.dtype == torch.float32 else 0.25


def _can_copy(model: PreTrainedModel) -> bool:
    """Whether these are weights in half precision of which there is room for a copy in float32."""
    if model.dtype not in (torch.bfloat16, torch.float16) or getattr(model, "is_quantized", False):
        return False
    if model.device.type != "cuda":
        return True
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())  # a copy, and another one while it grows
    return needed < torch.cuda.mem_get_info(model.device)[0]


def _largest_difference(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> float:
    sampler = SlotSampler(model, stop_ids, pad_id)
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
            logprobs_TV = model(input_ids=ids_1T).logits[0].float().log_softmax(-1)
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
