"""How do conversations become tokens?  One interface: the KV cache kept, the history replayed, or vLLM asked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from transformers import PreTrainedModel

from posttrain.policy import UNFIT, attends_to_all
from posttrain.sampler.base import Sampler, Turn
from posttrain.sampler.replay import ReplaySampler
from posttrain.sampler.slots import SlotSampler, agrees_with_full_forward
from posttrain.sampler.vllm import VLLMSampler
from posttrain.types import UserError

__all__ = [
    "ReplaySampler",
    "Sampler",
    "SlotSampler",
    "Turn",
    "VLLMSampler",
    "agrees_with_full_forward",
    "open_engine",
]


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
    if attends_to_all(model) and _passes(model, stop_ids, pad_id):
        return SlotSampler(model, stop_ids, pad_id, longest)
    if engine == "slots":
        raise UserError(
            f"engine=slots keeps the KV cache across turns, which {type(model).__name__} does not allow (sliding"
            " windows or a cache of its own). Write engine=replay, or engine=auto to let the self-test choose."
        )
    name = type(model).__name__
    warnings.warn(f"{name}: no standard KV cache; every turn replays its history (slower)", stacklevel=2)
    return ReplaySampler(model, stop_ids, pad_id)


def _passes(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> bool:
    """The self-test of the slot engine, failed as well by a model that it cannot even run."""
    was_training = model.training
    try:
        return agrees_with_full_forward(model, stop_ids, pad_id)
    except UNFIT:
        return False
    finally:
        model.train(was_training)
