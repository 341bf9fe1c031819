"""Which engine writes the turns of this model?  The one asked for, or the fastest that its self-test allows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from transformers import PreTrainedModel

from posttrain.sampler import ReplaySampler, Sampler, SlotSampler, VLLMSampler
from posttrain.selftest import why_unfit
from posttrain.types import UserError


def open_engine(
    model: PreTrainedModel,
    stop_ids: Sequence[int],
    pad_id: int,
    engine: str = "auto",
    longest: int | None = None,
    vllm_memory: float = 0.3,
) -> Sampler:
    """The engine asked for; `auto` takes the slot engine where a self-test on this very model proves it right.

    longest: the tokens that no conversation exceeds, where that is known. vllm_memory: vLLM's share of the device.
    """
    if engine == "vllm":
        return VLLMSampler(model, stop_ids, longest, vllm_memory)
    if engine == "replay":
        return ReplaySampler(model, stop_ids, pad_id)
    cause = why_unfit(model, stop_ids, pad_id)
    if cause is None:
        return SlotSampler(model, stop_ids, pad_id, longest)
    name = type(model).__name__
    if engine == "slots":
        raise UserError(
            f"engine=slots keeps the KV cache across turns, which {name} does not allow: {cause}. Write engine=replay,"
            " or engine=auto to let the self-test choose."
        )
    warnings.warn(f"{name} replays its history in every turn (slower), without a kept KV cache: {cause}", stacklevel=2)
    return ReplaySampler(model, stop_ids, pad_id)
