"""What does a model say about tokens?  Log-probs and entropies of those that are trained, from one pass through it.

backbone_states, trained_states  the states that the output layer multiplies where a trained token is predicted
Prefixes                         rows with the same prefix, which is prefilled once and continued by every row

Shapes: B rows, T tokens of the longest row, S trained tokens of all rows one after another, D states; G prefixes of at
most P tokens, Q tokens of a row behind its prefix, H key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from posttrain.models.output_layer import head_logprobs
from posttrain.runtime import CacheLayer, compat, sent

Ids = Sequence[int]
# what a model raises where its cache or its attention is of another kind
UNFIT = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def microbatches(lengths: Sequence[int], token_budget: float) -> Iterator[list[int]]:
    """Yield indices of rows of similar length, at most `token_budget` padded tokens in each batch of several."""
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
    """Return the log-prob of each trained token and the entropy at its position, with gradient.

    Args:
        rows: token ids of each row.
        masks: True on the trained tokens of each row; never on its first token.
        temperature: divides the logits.

    Returns:
        Log-probs and entropies in nats, both (S,): the S trained tokens, row after row.
    """
    return head_logprobs(model, *trained_states(model, rows, masks), temperature)


def trained_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states from which trained tokens are predicted, and those tokens.

    Rows are padded on the right, which a causal model cannot see, so no attention mask is needed.

    Args:
        rows: token ids of each row.
        masks: True on the trained tokens of each row; never on its first token.

    Returns:
        Hidden states (S, D) before the output layer, and token ids (S,), row after row.
    """
    width = max(map(len, rows))
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ids_BT[i, : len(row)] = torch.tensor(row)
        mask_BT[i, : len(row)] = torch.tensor(mask)
    assert not mask_BT[:, 0].any(), "the first token of a conversation is never sampled"
    inputs = {"input_ids": sent(ids_BT, model.device), "use_cache": False}
    return backbone_states(model, mask_BT.roll(-1, 1), **inputs), sent(ids_BT[mask_BT], model.device)


def backbone_states(model: PreTrainedModel, predicts_BT: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the model's hidden states before the output layer at some positions.

    Args:
        predicts_BT: True at the positions to return; on the CPU, where a GPU need not be waited for.
        **inputs: of the model's forward, as `input_ids`.

    Returns:
        Hidden states (S, D), row after row.
    """
    backbone: Any = model.base_model
    own_mask = "attention_mask" in inputs  # without one layers may be run again, outside this context
    places = tuple(sent(each_S, model.device) for each_S in predicts_BT.nonzero(as_tuple=True))
    with compat.grouped_queries() if own_mask else nullcontext():
        if getattr(backbone, "selects_positions", False):
            return backbone(**inputs, logits_to_keep=places).last_hidden_state
        return backbone(**inputs).last_hidden_state[places]


def attention_mask(model: PreTrainedModel, sees_BQK: torch.Tensor) -> torch.Tensor:
    """Return an attention mask in the form that the model's attention implementation takes.

    Args:
        sees_BQK: True where a token (Q) attends to a key (K).

    Returns:
        The mask, (B, 1, Q, K): of numbers to add for eager and sdpa, of booleans otherwise.
    """
    sees_B1QK = sees_BQK[:, None]
    implementation = compat.attention_of(model.config)
    if implementation not in ("eager", "sdpa"):
        return sees_B1QK
    # Both add a mask instead of selecting by it; sdpa would convert it again in every layer.
    device, dtype = sees_BQK.device, model.dtype
    if implementation == "sdpa" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    hidden = -torch.inf if implementation == "sdpa" else torch.finfo(dtype).min
    return torch.zeros(sees_B1QK.shape, dtype=dtype, device=device).masked_fill_(~sees_B1QK, hidden)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of the language model, which is a part of the config of a model that also sees or hears."""
    return model.config.get_text_config()


def attends_to_all(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to everything before it, in the same way however long the rows are.

    Engines that keep a cache and shared prefixes need both.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if {"dynamic", "longrope"} & {rope.get("rope_type")}:  # there a token's rotation depends on the longest row
        return False
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is not None:
        return all(kind in ("full_attention", "global") for kind in kinds)
    windows = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
    return all(getattr(config, name, None) is None for name in windows)


# ----------------------------------------------------------------------------------------------- shared prefixes
def prefix_of(ids: Ids, mask: Sequence[bool]) -> tuple[int, ...]:
    """Return the tokens of a row before its first prediction of a trained token."""
    return tuple(ids[: mask.index(True) - 1])


def worth_sharing(rows: Sequence[tuple[Ids, Sequence[bool]]], budget: float) -> list[tuple[int, ...]]:
    """Return prefixes that several rows share, the largest savings first.

    Args:
        rows: token ids and mask of each row.
        budget: the largest number of tokens of all prefixes together, each padded to the longest.
    """
    count: dict[tuple[int, ...], int] = {}
    for ids, mask in rows:
        key = prefix_of(ids, mask)
        count[key] = count.get(key, 0) + 1
    chosen, width = [], 0
    for key in sorted(count, key=lambda key: -len(key) * (count[key] - 1)):
        if count[key] > 1 and key and max(width, len(key)) * (len(chosen) + 1) <= budget:
            chosen.append(key)
            width = max(width, len(key))
    return chosen


class _PrefixLayer(CacheLayer):
    """Keys and values of one layer: of the prefixes, (G, H, P, D); then those picked for each row, and the row's."""

    def __init__(self) -> None:
        super().__init__()
        self.read: tuple[torch.Tensor, torch.Tensor] | None = None  # as computed, with their graph
        self.leaves: tuple[torch.Tensor, torch.Tensor] | None = None  # detached copies, which gather gradients
        self.pick_B = torch.empty(0, dtype=torch.long)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.leaves is None:
            self.read = (key_states, value_states)
            return self.read
        # Gradients of the rows of a group are added up in one order: indexing does on a GPU, index_select on a CPU.
        on_cpu = self.pick_B.device.type == "cpu"
        keys, values = (each.index_select(0, self.pick_B) if on_cpu else each[self.pick_B] for each in self.leaves)
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class Prefixes:
    """Shared prefixes, each computed once. `states` is `trained_states` for rows of which some begin with a prefix.

    With gradients: call `states` and the backward pass for one micro-batch after another, then `backward` once.
    """

    def __init__(self, model: PreTrainedModel, prefixes: Sequence[tuple[int, ...]]) -> None:
        self.model, self.number = model, {key: n for n, key in enumerate(prefixes)}
        self.width = max(map(len, prefixes), default=0)
        self.layers = [_PrefixLayer() for _ in range(model.config.get_text_config().num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        if not prefixes:
            return
        ids_GP = torch.zeros(len(prefixes), self.width, dtype=torch.long)
        for n, key in enumerate(prefixes):
            ids_GP[n, : len(key)] = torch.tensor(key)
        position_P = torch.arange(self.width)
        seen_GPP = (position_P <= position_P[:, None]).expand(len(ids_GP), -1, -1)
        self._run(ids_GP, position_P.expand(ids_GP.shape), seen_GPP)
        for layer in self.layers:
            assert layer.read is not None, "every layer keeps keys and values"
            keys, values = (each.detach().requires_grad_(each.requires_grad) for each in layer.read)
            layer.leaves = (keys, values)

    def states(self, rows: Sequence[Ids], masks: Sequence[Sequence[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `trained_states` for these rows, whose prefixes are not computed again."""
        keys = [prefix_of(row, mask) for row, mask in zip(rows, masks, strict=True)]
        if not any(key in self.number for key in keys):
            return trained_states(self.model, rows, masks)
        start_B = torch.tensor([len(key) if key in self.number else 0 for key in keys])
        width = max(len(row) - start for row, start in zip(rows, start_B.tolist(), strict=True))
        ids_BQ = torch.zeros(len(rows), width, dtype=torch.long)
        mask_BQ = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, (row, mask, start) in enumerate(zip(rows, masks, start_B.tolist(), strict=True)):
            ids_BQ[i, : len(row) - start] = torch.tensor(row[start:])
            mask_BQ[i, : len(row) - start] = torch.tensor(mask[start:])
        pick_B = sent(torch.tensor([self.number.get(key, 0) for key in keys]), self.model.device)
        for layer in self.layers:
            layer.pick_B = pick_B
        index_Q = torch.arange(width)
        before_B1P = torch.arange(self.width) < start_B[:, None, None]
        seen_BQK = torch.cat(
            [before_B1P.expand(-1, width, -1), (index_Q <= index_Q[:, None]).expand(len(rows), -1, -1)], dim=2
        )
        hidden_SD = self._run(ids_BQ, start_B[:, None] + index_Q, seen_BQK, mask_BQ.roll(-1, 1))
        return hidden_SD, sent(ids_BQ[mask_BQ], self.model.device)

    def backward(self) -> None:
        """Add the gradients that the rows have left at the prefixes to the gradients of the weights."""
        ends = [
            (read, leaf.grad)
            for layer in self.layers
            if layer.read is not None and layer.leaves is not None
            for read, leaf in zip(layer.read, layer.leaves, strict=True)
            if leaf.grad is not None
        ]
        if ends:
            torch.autograd.backward([read for read, _ in ends], [grad for _, grad in ends])

    def _run(
        self,
        ids_BQ: torch.Tensor,
        positions_BQ: torch.Tensor,
        seen_BQK: torch.Tensor,
        predicts_BQ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states at `predicts_BQ`; a token attends to the keys that `seen_BQK` marks."""
        model, device = self.model, self.model.device
        if predicts_BQ is None:
            predicts_BQ = torch.zeros(ids_BQ.shape, dtype=torch.bool)
        return backbone_states(
            model,
            predicts_BQ,
            input_ids=sent(ids_BQ, device),
            position_ids=sent(positions_BQ, device),
            attention_mask=attention_mask(model, sent(seen_BQK, device)),
            past_key_values=self.cache,
            use_cache=True,
        )
