"""How are turns sampled without reading the conversation again?  Each conversation has a slot in one large KV cache.

Shapes: B rows taking part, S slots, H key-value heads, L cache length, D head size, Q query tokens, V vocabulary.

A token's index in its slot equals its position in the conversation. So the attention mask is `index <= position`:
what lies behind a row's length is invisible, padding on the right is overwritten by the next token, and a slot can be
used again without being cleared. The last token of a conversation is not in the cache yet: the next forward pass reads
it. A row that is done still takes part in forward passes and writes behind what its slot needs, until another turn
begins there or the rows are moved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from posttrain.models import Kept, attention_mask, backbone_states, fused_weights, simplify_layers, text_config
from posttrain.rollout.engines.base import Histories, Then, TurnRequest
from posttrain.rollout.engines.sampling import sample_tokens, uniforms
from posttrain.runtime import CacheLayer, floats, integers, widest
from posttrain.types import Completion, SamplingParams

REFILL_BELOW = 0.8  # turns that are done are replaced once fewer than this share of the batch is being written
PREFILL_TOKENS = 16384  # in a forward pass: a limit for the memory that many long prompts take


def whole_blocks(length: int) -> int:
    """Return how many positions the cache has for conversations of this length."""
    return -(-length // 64) * 64


class _SlotLayer(CacheLayer):
    """Keys and values of one layer, [S, H, L, D], written at [row, position]; adjacent rows are read as a view."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.slots = self.length = self.visible = 0
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.row_B1 = torch.empty(0, 1, dtype=torch.long)
        self.positions_BQ = torch.empty(0, 0, dtype=torch.long)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        kind = key_states.device.type  # otherwise attention would convert the whole cache at each token
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else key_states.dtype

        def grown(old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
            new = torch.zeros(self.slots, like.shape[1], self.length, like.shape[3], dtype=dtype, device=like.device)
            if old is not None:
                new[: old.shape[0], :, : old.shape[2]] = old
            return new

        self.keys, self.values = grown(self.keys, key_states), grown(self.values, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None or self.keys.shape[0] < self.slots or self.keys.shape[2] < self.length:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys[self.row_B1, :, self.positions_BQ] = key_states.transpose(1, 2).to(self.keys.dtype)
        self.values[self.row_B1, :, self.positions_BQ] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys[self.rows, :, : self.visible], self.values[self.rows, :, : self.visible]

    def copy_rows(self, target_N: torch.Tensor, source_N: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of row source[i] to row target[i]; all are read before any is written."""
        if self.keys is not None and self.values is not None:
            if self.keys.shape[0] < self.slots:
                self.lazy_initialization(self.keys, self.values)
            self.keys[target_N, :, :length] = self.keys[source_N, :, :length]
            self.values[target_N, :, :length] = self.values[source_N, :, :length]

    def forget(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.slots = self.length = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0


class SlotRows(NamedTuple):
    """A row for each slot: the token that the model reads next, and what it has written so far in this turn."""

    token_B: torch.Tensor
    position_B: torch.Tensor
    uniform_BN: torch.Tensor
    length_B: torch.Tensor
    most_B: torch.Tensor  # tokens that the turn may have
    tokens_BN: torch.Tensor
    logprobs_BN: torch.Tensor
    seen_BV: torch.Tensor  # no columns without a repetition penalty


def write_token(
    rows: SlotRows, done_B: torch.Tensor, logits_BV: torch.Tensor, params: SamplingParams, stop_ids: torch.Tensor
) -> torch.Tensor:
    """Write one more token into each row that is not done; return which rows are done now, (B,)."""
    place_B1 = rows.length_B[:, None]
    next_B, logprob_B = sample_tokens(logits_BV, params, rows.uniform_BN.gather(1, place_B1).squeeze(1), rows.seen_BV)
    rows.tokens_BN.scatter_(1, place_B1, next_B[:, None])
    rows.logprobs_BN.scatter_(1, place_B1, logprob_B[:, None])
    if rows.seen_BV.shape[1]:
        rows.seen_BV.scatter_(1, next_B[:, None], True)
    going_B = ~done_B
    rows.token_B.copy_(torch.where(done_B, rows.token_B, next_B))
    rows.position_B.add_(going_B)
    rows.length_B.add_(going_B)
    return done_B | torch.isin(next_B, stop_ids) | (rows.length_B == rows.most_B)


class Writing:
    """The turns that are being written; each is in the row of its slot.

    `most` limits the tokens of turns that begin from now on; rows have room for `params.max_new_tokens`.
    """

    def __init__(self, params: SamplingParams, vocabulary: int, stop_ids: list[int], device: torch.device) -> None:
        self.params, self.device, self.most = params, device, params.max_new_tokens
        self.seen_size = vocabulary if params.repetition_penalty != 1.0 else 0
        self.stop_ids = torch.tensor(stop_ids, device=device)
        self.rows = self._fresh(0)
        self.slots: set[int] = set()  # slots whose turn is not done

    def _fresh(self, count: int) -> SlotRows:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=self.device)

        size = self.params.max_new_tokens + 1  # a row that is done writes behind its turn
        written = zeros(size), zeros(size, dtype=torch.float32)
        uniform = zeros(size, dtype=widest(self.device))
        seen = zeros(self.seen_size, dtype=torch.bool)
        return SlotRows(zeros(), zeros(), uniform, zeros(), zeros(), *written, seen)

    @property
    def width(self) -> int:
        """How many rows the turns span."""
        return 1 + max(self.slots)

    def grow(self, count: int) -> None:
        missing = count - len(self.rows.token_B)
        if missing > 0:
            self.rows = SlotRows._make(map(torch.cat, zip(self.rows, self._fresh(missing), strict=True)))

    def begin(self, slots: Sequence[int], ids: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Begin a turn after these ids, in each of these slots."""
        self.grow(1 + max(slots))
        slot_N, rows = torch.tensor(slots, device=self.device), self.rows
        rows.token_B[slot_N] = torch.tensor([row[-1] for row in ids], device=self.device)
        rows.position_B[slot_N] = torch.tensor([len(row) - 1 for row in ids], device=self.device)
        seed_N1 = torch.tensor(seeds, device=self.device)[:, None]
        rows.uniform_BN[slot_N] = uniforms(seed_N1, torch.arange(rows.uniform_BN.shape[1], device=self.device))
        rows.length_B[slot_N], rows.most_B[slot_N] = 0, self.most
        rows.seen_BV[slot_N] = False
        if self.seen_size:
            for slot, row in zip(slots, ids, strict=True):
                rows.seen_BV[slot, row] = True
        self.slots |= set(slots)

    def ready(self, free: Sequence[int]) -> tuple[torch.Tensor, int]:
        """Prepare the first rows for a forward pass; return which are done, (B,), and how many positions they see.

        Args:
            free: for each row, the first position that its slot does not need; a row without a turn writes there.
        """
        width = len(free)
        self.grow(width)
        idle = [slot for slot in range(width) if slot not in self.slots]
        done_B = torch.zeros(width, dtype=torch.bool, device=self.device)
        done_B[idle] = True
        unneeded = torch.tensor([free[slot] for slot in idle], dtype=torch.long, device=self.device)
        self.rows.position_B[idle] = unneeded
        return done_B, int(self.rows.position_B[:width].max()) + 1

    def first(self, count: int) -> SlotRows:
        """Return views of the first rows."""
        return SlotRows._make(each[:count] for each in self.rows)

    def move(self, target: Sequence[int], source: Sequence[int]) -> None:
        """Move rows between slots."""
        target_N, source_N = torch.tensor(target, device=self.device), torch.tensor(source, device=self.device)
        for each in self.rows:
            each[target_N] = each[source_N]
        self.slots = (self.slots - set(source)) | set(target)

    def end(self, slots: Sequence[int]) -> list[Completion]:
        """End the turns in these slots and return them."""
        slot_N = torch.tensor(slots, device=self.device)
        lengths = integers(self.rows.length_B[slot_N])
        tokens_NT, logprobs_NT = self.rows.tokens_BN[slot_N].cpu(), self.rows.logprobs_BN[slot_N].cpu()
        self.slots -= set(slots)
        stop_ids = set(integers(self.stop_ids))
        completions: list[Completion] = []
        for length, tokens_T, logprobs_T in zip(lengths, tokens_NT, logprobs_NT, strict=True):
            ids, logprobs = integers(tokens_T[:length]), floats(logprobs_T[:length])
            completions.append(Completion(ids, logprobs, ids[-1] in stop_ids))
        return completions


class SlotSampler(Histories):
    """An engine that keeps the KV cache across turns: a turn costs its new tokens, not its history.

    Turns that are done are replaced by the next ones while the others go on. Conversations with the same prompt share
    one prefill of it. longest: tokens of the longest conversation, if known; the cache does not grow beyond it.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, longest: int | None = None
    ) -> None:
        super().__init__()
        simplify_layers(model)
        self.model, self.stop_ids, self.pad_id = model, sorted(stop_ids), pad_id
        self.longest = longest
        self._layers = [_SlotLayer() for _ in range(text_config(model).num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._cached: dict[int, int] = {}  # how many tokens of a conversation are in the cache
        self._slot: dict[int, int] = {}
        self._readers: dict[tuple[int, ...], int] = {}  # the conversation that has read this prefix first
        self._vacant: list[int] = []
        self._weights: Kept | None = None  # None: what `fused_weights` makes is freed after each rollout

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        assert all(len(prompt) > 0 for prompt in prompts)
        handles = super().open(prompts)
        for handle in handles:
            self._cached[handle] = 0
            self._slot[handle] = heappop(self._vacant) if self._vacant else len(self._slot)
        return handles

    def close(self, handles: Sequence[int]) -> None:
        super().close(handles)
        for handle in handles:
            heappush(self._vacant, self._slot.pop(handle))
            del self._cached[handle]
        gone = set(handles)
        self._readers = {ids: reader for ids, reader in self._readers.items() if reader not in gone}
        if not self._slot:
            self._vacant.clear()
            self.free_cache()

    def free_cache(self) -> None:
        """Free the cache, which no conversation needs any more."""
        for layer in self._layers:
            layer.forget()

    @torch.no_grad()
    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        was_training = self.model.training
        self.model.eval()
        writing = self.writing_for(params)
        with fused_weights(self.model, self._weights):  # which do not change before the last turn is written
            while turns or writing.slots:
                if turns:
                    handles = [handle for handle, _ in turns]
                    ids = [self._ids[handle] for handle in handles]
                    self.reserve(max(map(len, ids)) + params.max_new_tokens)
                    self._prefill(handles)
                    writing.begin([self._slot[handle] for handle in handles], ids, [seed for _, seed in turns])
                if len(writing.slots) < REFILL_BELOW * writing.width:
                    self._gather(writing)
                turns = then(self._write(writing))
        self.model.train(was_training)

    def writing_for(self, params: SamplingParams) -> Writing:
        """Return what holds the turns of a rollout with these parameters."""
        return Writing(params, text_config(self.model).vocab_size, self.stop_ids, self.model.device)

    # ------------------------------------------------------------------ the cache

    def reserve(self, length: int) -> None:
        """Let the cache grow at its next use: a slot for each conversation, with at least `length` positions."""
        for layer in self._layers:
            layer.slots = max(layer.slots, len(self._slot) + len(self._vacant))
            if layer.length < length:
                ahead = min(layer.length * 3 // 2, self.longest or sys.maxsize)
                layer.length = whole_blocks(max(length, ahead))

    def _copy(self, target: Sequence[int], source: Sequence[int], length: int) -> None:
        target_N, source_N = torch.tensor(target), torch.tensor(source)
        for layer in self._layers:
            layer.copy_rows(target_N, source_N, length)

    def _gather(self, writing: Writing) -> None:
        """Move the rows that are being written into the first slots, and swap the conversations that are there."""
        count = len(writing.slots)
        holes = [slot for slot in range(count) if slot not in writing.slots]
        late = sorted(slot for slot in writing.slots if slot >= count)
        owner = {slot: handle for handle, slot in self._slot.items()}
        moves = dict(zip(late, holes, strict=True))
        moves |= {hole: slot for slot, hole in moves.items() if hole in owner}
        length = max(len(self._ids[owner[slot]]) for slot in moves) + writing.params.max_new_tokens
        self._copy(list(moves.values()), list(moves), length)
        writing.move(holes, late)
        self._vacant = [slot for slot in self._vacant if slot not in moves.values()]
        self._vacant += [slot for slot in moves if slot not in moves.values()]
        heapify(self._vacant)
        for slot, to in moves.items():
            self._slot[owner[slot]] = to

    def _inputs(
        self, ids_BQ: torch.Tensor, positions_BQ: torch.Tensor, rows: slice | torch.Tensor, visible: int
    ) -> dict[str, object]:
        """Point the cache's layers at these rows and positions, and return the model's arguments."""
        device = ids_BQ.device
        row_B = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows
        for layer in self._layers:
            layer.rows, layer.row_B1, layer.positions_BQ, layer.visible = rows, row_B[:, None], positions_BQ, visible
        index_L = torch.arange(visible, device=device)
        return {
            "input_ids": ids_BQ,
            "attention_mask": attention_mask(self.model, index_L <= positions_BQ[:, :, None]),
            "position_ids": positions_BQ,
            "past_key_values": self._cache,
            "use_cache": True,
        }

    # ------------------------------------------------------------------ reading

    def _prefill(self, handles: Sequence[int]) -> None:
        """Read all but the last token of each conversation into the cache; equal prefixes are read once."""
        followers: list[tuple[int, int]] = []
        unread: list[int] = []
        for handle in handles:
            if self._cached[handle] == 0:
                leader = self._readers.setdefault(tuple(self._ids[handle][:-1]), handle)
                if leader != handle:
                    followers.append((handle, leader))
                    continue
            if self._cached[handle] < len(self._ids[handle]) - 1:
                unread.append(handle)
        batch: list[int] = []
        width = 0
        for handle in sorted(unread, key=self._slot.__getitem__):
            wider = max(width, len(self._ids[handle]) - 1 - self._cached[handle])
            if batch and wider * (len(batch) + 1) > PREFILL_TOKENS:
                self._read(batch, width)
                batch, wider = [], len(self._ids[handle]) - 1 - self._cached[handle]
            batch.append(handle)
            width = wider
        if batch:
            self._read(batch, width)
        if followers:
            target, source = ([self._slot[pair[end]] for pair in followers] for end in (0, 1))
            self._copy(target, source, max(len(self._ids[handle]) for handle, _ in followers) - 1)
        for handle, _ in followers:
            self._cached[handle] = len(self._ids[handle]) - 1

    def _read(self, handles: Sequence[int], width: int) -> None:
        """Read the new tokens of these conversations, at most `width` of each, in one forward pass without logits."""
        ids_BQ = torch.full((len(handles), width), self.pad_id)
        positions_BQ = torch.empty((len(handles), width), dtype=torch.long)
        for i, handle in enumerate(handles):
            ids, cached = self._ids[handle], self._cached[handle]
            ids_BQ[i, : len(ids) - 1 - cached] = torch.tensor(ids[cached:-1])
            # padding writes where the last token will overwrite it
            positions_BQ[i] = torch.arange(cached, cached + width).clamp_(max=len(ids) - 1)
            self._cached[handle] = len(ids) - 1
        device, slots = self.model.device, [self._slot[handle] for handle in handles]
        adjacent = slots[-1] - slots[0] == len(slots) - 1
        rows = slice(slots[0], slots[-1] + 1) if adjacent else torch.tensor(slots, device=device)
        visible = int(positions_BQ.max()) + 1
        nothing_BQ = torch.zeros(ids_BQ.shape, dtype=torch.bool)
        backbone_states(
            self.model, nothing_BQ, **self._inputs(ids_BQ.to(device), positions_BQ.to(device), rows, visible)
        )

    # ------------------------------------------------------------------ writing

    def _write(self, writing: Writing) -> list[tuple[int, Completion]]:
        """Write until many of the turns are done, and return these."""
        owner = {slot: handle for handle, slot in self._slot.items()}
        free = [self._cached[owner[slot]] if slot in owner else 0 for slot in range(self._width(writing))]
        done_B, visible = writing.ready(free)
        done_B = self._decode(writing, done_B, visible, max(1.0, REFILL_BELOW * len(writing.slots)))
        slots = [slot for slot, done in enumerate(integers(done_B)) if done and slot in writing.slots]
        finished = [(owner[slot], completion) for slot, completion in zip(slots, writing.end(slots), strict=True)]
        for handle, completion in finished:
            self._cached[handle] = len(self._ids[handle]) + len(completion.ids) - 1
            self._ids[handle].extend(completion.ids)
        return finished

    def _width(self, writing: Writing) -> int:
        """Return how many rows take part in a forward pass."""
        return writing.width

    def _decode(self, writing: Writing, done_B: torch.Tensor, visible: int, enough: float) -> torch.Tensor:
        """Write tokens while at least `enough` rows are not done; return which rows are done then, (B,)."""
        going = enough
        while going >= enough:
            done_B = self._step(writing, done_B, visible)
            going = len(done_B) - int(done_B.sum())
            visible = min(visible + 1, self._layers[0].length)
        return done_B

    def _step(self, writing: Writing, done_B: torch.Tensor, visible: int) -> torch.Tensor:
        """Write one token in each row that is not done; return which rows are done now, (B,)."""
        rows = writing.first(len(done_B))
        inputs = self._inputs(rows.token_B[:, None], rows.position_B[:, None], slice(0, len(done_B)), visible)
        logits_BV = self.model(**inputs, logits_to_keep=1).logits[:, -1]
        return write_token(rows, done_B, logits_BV, writing.params, writing.stop_ids)
