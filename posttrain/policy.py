"""What does the policy say now about the tokens it sampled?  Their log-probs and entropies, and no others.

Shapes: B rows, T tokens of the longest row, S trained tokens of all rows one after another, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain import compat
from posttrain.head import head_logprobs


def microbatches(lengths: Sequence[int], token_budget: float) -> Iterator[list[int]]:
    """Indices of rows of similar length, each batch within `token_budget` padded tokens (a longer row goes alone)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def token_logprobs(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(token | everything before it) and the entropy there, both (S,), in row order, with gradient."""
    return head_logprobs(model, *trained_states(model, rows, masks), temperature)


def trained_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output layer multiplies where a trained token is predicted, (S, D), and that token, (S,).

    Rows are padded on the right, which a causal model cannot see, so no attention mask is needed.
    """
    width = max(map(len, rows))
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ids_BT[i, : len(row)] = torch.tensor(row)
        mask_BT[i, : len(row)] = torch.tensor(mask)
    assert not mask_BT[:, 0].any(), "the first token of a conversation is never sampled"
    ids_BT, mask_BT = ids_BT.to(model.device), mask_BT.to(model.device)
    return read(model, mask_BT.roll(-1, 1), input_ids=ids_BT, use_cache=False), ids_BT[mask_BT]


def read(model: PreTrainedModel, predicts_BT: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """One pass through the model up to its output layer; its states where something is predicted, (S, D)."""
    backbone: Any = model.base_model
    own_mask = "attention_mask" in inputs  # without one layers may be run again, outside this context
    with compat.grouped_queries() if own_mask else nullcontext():
        if getattr(backbone, "selects_positions", False):
            return backbone(**inputs, logits_to_keep=predicts_BT).last_hidden_state
        return backbone(**inputs).last_hidden_state[predicts_BT]


def attention_mask(model: PreTrainedModel, sees_BQK: torch.Tensor) -> torch.Tensor:
    """What a model takes as its mask, (B, 1, Q, K), where each token (Q) sees what is True (K) and nothing else."""
    sees_B1QK = sees_BQK[:, None]
    implementation = compat.attention_of(model.config)
    if implementation not in ("eager", "sdpa"):
        return sees_B1QK
    # Both add a mask instead of selecting by it; sdpa would convert it anew in every layer.
    device, dtype = sees_BQK.device, model.dtype
    if implementation == "sdpa" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    hidden = -torch.inf if implementation == "sdpa" else torch.finfo(dtype).min
    return torch.zeros(sees_B1QK.shape, dtype=dtype, device=device).masked_fill_(~sees_B1QK, hidden)
