"""What do rows with the same prefix cost?  Its prefill is computed once, and every row continues its keys and values.

Shapes: G prefixes of at most P tokens, B rows of at most Q tokens behind them, H key-value heads, D head size,
S trained tokens of all rows one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache, PreTrainedModel

from posttrain.compat import CacheLayer
from posttrain.config import StarPORun
from posttrain.policy import attention_mask, read, trained_states

Ids = Sequence[int]


def prefix_of(ids: Ids, mask: Sequence[bool]) -> tuple[int, ...]:
    """What a row reads before it predicts its first trained token."""
    return tuple(ids[: mask.index(True) - 1])


def can_share(cfg: StarPORun) -> bool:
    """Whether an update reads common prefixes once: not where layers are recomputed, or a critic reads for itself."""
    own_trunk = cfg.algorithm.critical and cfg.algorithm.critic.kind != "shared"
    return not cfg.trainer.gradient_checkpointing and not own_trunk


def worth_sharing(rows: Sequence[tuple[Ids, Sequence[bool]]], budget: float) -> list[tuple[int, ...]]:
    """Prefixes that several rows have in common, those that save most first, of at most `budget` tokens in all."""
    count: dict[tuple[int, ...], int] = {}
    for ids, mask in rows:
        key = prefix_of(ids, mask)
        count[key] = count.get(key, 0) + 1
    chosen = []
    for key in sorted(count, key=lambda key: -len(key) * (count[key] - 1)):
        if count[key] > 1 and 0 < len(key) <= budget:
            chosen.append(key)
            budget -= len(key)
    return chosen


class _Layer(CacheLayer):
    """Keys and values of one layer: of the prefixes, [G, H, P, D]; then those picked for each row, and the row's."""

    def __init__(self) -> None:
        super().__init__()
        self.read: tuple[torch.Tensor, torch.Tensor] | None = None  # as computed, with their graph
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None  # the same as leaves, which gather gradients
        self.pick_B = torch.empty(0, dtype=torch.long)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.given is None:
            self.read = (key_states, value_states)
            return self.read
        # Gradients of the rows of a group are added up in one order: indexing does on a GPU, index_select on a CPU.
        on_cpu = self.pick_B.device.type == "cpu"
        keys, values = (each.index_select(0, self.pick_B) if on_cpu else each[self.pick_B] for each in self.given)
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class Prefixes:
    """Prefixes that were prefilled once. `states` is `trained_states` for rows of which some continue them.

    With gradients: call `states` and the backward pass for one micro-batch after another, then `backward` once.
    """

    def __init__(self, model: PreTrainedModel, prefixes: Sequence[tuple[int, ...]]) -> None:
        self.model, self.number = model, {key: n for n, key in enumerate(prefixes)}
        self.width = max(map(len, prefixes), default=0)
        self.layers = [_Layer() for _ in range(model.config.get_text_config().num_hidden_layers)]
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
            layer.given = (keys, values)

    def states(self, rows: Sequence[Ids], masks: Sequence[Sequence[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output layer multiplies where a trained token is predicted, (S, D), and that token, (S,)."""
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
        for layer in self.layers:
            layer.pick_B = torch.tensor([self.number.get(key, 0) for key in keys], device=self.model.device)
        index_Q = torch.arange(width)
        before_B1P = torch.arange(self.width) < start_B[:, None, None]
        seen_BQK = torch.cat(
            [before_B1P.expand(-1, width, -1), (index_Q <= index_Q[:, None]).expand(len(rows), -1, -1)], dim=2
        )
        hidden_SD = self._run(ids_BQ, start_B[:, None] + index_Q, seen_BQK, mask_BQ.roll(-1, 1))
        return hidden_SD, ids_BQ[mask_BQ].to(self.model.device)

    def backward(self) -> None:
        """Hand the gradients that the rows left at the prefixes on to the weights."""
        ends = [
            (read, given.grad)
            for layer in self.layers
            if layer.read is not None and layer.given is not None
            for read, given in zip(layer.read, layer.given, strict=True)
            if given.grad is not None
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
        """The states that predict something, after everything that each token sees."""
        model, device = self.model, self.model.device
        if predicts_BQ is None:
            predicts_BQ = torch.zeros(ids_BQ.shape, dtype=torch.bool)
        return read(
            model,
            predicts_BQ.to(device),
            input_ids=ids_BQ.to(device),
            position_ids=positions_BQ.to(device),
            attention_mask=attention_mask(model, seen_BQK.to(device)),
            past_key_values=self.cache,
            use_cache=True,
        )
