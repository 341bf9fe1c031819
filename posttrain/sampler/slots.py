"""How are turns sampled without reading the conversation again?  Every conversation owns a slot of one big KV cache.

Shapes: B rows taking part, S slots, H key-value heads, L cache length, D head size, Q query tokens, V vocabulary.

The one invariant: a token's index in its slot equals its position in the conversation. So the attention mask is
`index <= position` and nothing else: whatever lies beyond a row's length is invisible, padding on the right writes
where the next real token will overwrite it, and reusing a slot needs no clearing. The last token of a conversation is
never in the cache yet; it is what the next forward pass is fed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from posttrain.sampler.draw import draw, uniforms
from posttrain.types import Completion, SamplingParams

COMPACT_BELOW = 0.8  # move the living rows together once fewer than this share of the batch is still writing
PREFILL_TOKENS = 16384  # per forward pass, so that a long prompt batch cannot exhaust the memory


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [S, H, L, D], written at [row, position] and read as a view of some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = self.length = self.visible = 0
        self.rows = slice(0, 0)
        self.positions_BQ = torch.empty(0, 0, dtype=torch.long)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        kind = key_states.device.type  # under autocast, attention would convert the whole cache at every token
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else key_states.dtype

        def grown(old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
            new = like.new_zeros(self.slots, like.shape[1], self.length, like.shape[3], dtype=dtype)
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
        row_B1 = torch.arange(self.rows.start, self.rows.stop, device=key_states.device)[:, None]
        self.keys[row_B1, :, self.positions_BQ] = key_states.transpose(1, 2).to(self.keys.dtype)
        self.values[row_B1, :, self.positions_BQ] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys[self.rows, :, : self.visible], self.values[self.rows, :, : self.visible]

    def copy_rows(self, target_N: torch.Tensor, source_N: torch.Tensor, length: int) -> None:
        """target[i] <- source[i], all read before any is written; only the first `length` positions matter."""
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

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotSampler:
    """The KV cache stays across turns: a turn costs its new tokens, not its history.

    Rows that finish leave the batch; members of a group share one reading of their common prompt.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> None:
        self.model, self.stop_ids, self.pad_id = model, sorted(stop_ids), pad_id
        self._layers = [_SlotLayer() for _ in range(model.config.get_text_config().num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._ids: dict[int, list[int]] = {}
        self._cached: dict[int, int] = {}
        self._order: list[int] = []  # the handle in each slot
        self._next = 0

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        handles = list(range(self._next, self._next + len(prompts)))
        self._next += len(prompts)
        for handle, prompt in zip(handles, prompts, strict=True):
            assert len(prompt) > 0
            self._ids[handle], self._cached[handle] = list(prompt), 0
            self._order.append(handle)
        return handles

    def append(self, handle: int, ids: Sequence[int]) -> None:
        self._ids[handle].extend(ids)

    def close(self, handles: Sequence[int]) -> None:
        gone = set(handles)
        staying = [handle for handle in self._order if handle not in gone]
        self._arrange(staying)
        del self._order[len(staying) :]
        for handle in gone:
            del self._ids[handle], self._cached[handle]
        if not staying:
            for layer in self._layers:
                layer.forget()

    @torch.no_grad()
    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        if not handles:
            return []
        was_training = self.model.training
        self.model.eval()
        self._reserve(max(len(self._ids[handle]) for handle in handles) + params.max_new_tokens)
        self._prefill(handles)
        self._arrange(handles)
        completions = self._decode(dict(zip(handles, seeds, strict=True)), params)
        self.model.train(was_training)
        return [completions[handle] for handle in handles]

    # ------------------------------------------------------------------ the cache

    def _reserve(self, length: int) -> None:
        for layer in self._layers:
            layer.slots = max(layer.slots, len(self._order))
            if layer.length < length:
                layer.length = -(-max(length, layer.length * 3 // 2) // 64) * 64

    def _arrange(self, first: Sequence[int]) -> None:
        """Make these handles occupy the first slots, in any order, moving as few as possible."""
        wanted, count = set(first), len(first)
        strangers = [slot for slot in range(count) if self._order[slot] not in wanted]
        outside = [slot for slot in range(count, len(self._order)) if self._order[slot] in wanted]
        if strangers:
            self._swap(strangers, outside, max(self._cached[self._order[slot]] for slot in strangers + outside))

    def _swap(self, left: list[int], right: list[int], length: int) -> None:
        target_N, source_N = torch.tensor(left + right), torch.tensor(right + left)
        for layer in self._layers:
            layer.slots = max(layer.slots, len(self._order))
            layer.copy_rows(target_N, source_N, length)
        for a, b in zip(left, right, strict=True):
            self._order[a], self._order[b] = self._order[b], self._order[a]

    def _inputs(self, ids_BQ: torch.Tensor, positions_BQ: torch.Tensor, rows: slice, visible: int) -> dict[str, object]:
        for layer in self._layers:
            layer.rows, layer.positions_BQ, layer.visible = rows, positions_BQ, visible
        index_L = torch.arange(visible, device=ids_BQ.device)
        mask_B1QL = (index_L <= positions_BQ[:, :, None])[:, None]
        if self.model.config._attn_implementation == "eager":  # which adds its mask instead of selecting by it
            hidden = torch.finfo(self.model.dtype).min
            mask_B1QL = torch.where(mask_B1QL, 0.0, hidden).to(self.model.dtype)
        return {
            "input_ids": ids_BQ,
            "attention_mask": mask_B1QL,
            "position_ids": positions_BQ,
            "past_key_values": self._cache,
            "use_cache": True,
        }

    # ------------------------------------------------------------------ reading

    def _prefill(self, handles: Sequence[int]) -> None:
        """Bring all but the last token of each conversation into the cache; equal fresh prompts are read once."""
        leaders: dict[tuple[int, ...], int] = {}
        followers: list[tuple[int, int]] = []
        unread: list[int] = []
        for handle in handles:
            if self._cached[handle] == 0:
                leader = leaders.setdefault(tuple(self._ids[handle][:-1]), handle)
                if leader != handle:
                    followers.append((handle, leader))
                    continue
            if self._cached[handle] < len(self._ids[handle]) - 1:
                unread.append(handle)
        self._arrange(unread)
        start = 0
        while start < len(unread):
            stop = width = 0
            for stop in range(start + 1, len(unread) + 1):
                handle = self._order[stop - 1]
                wider = max(width, len(self._ids[handle]) - 1 - self._cached[handle])
                if stop > start + 1 and wider * (stop - start) > PREFILL_TOKENS:
                    stop -= 1
                    break
                width = wider
            self._read(slice(start, stop), width)
            start = stop
        if followers:
            slot_of = {handle: slot for slot, handle in enumerate(self._order)}
            target_N = torch.tensor([slot_of[handle] for handle, _ in followers])
            source_N = torch.tensor([slot_of[leader] for _, leader in followers])
            length = max(self._cached[leader] for _, leader in followers)
            for layer in self._layers:
                layer.copy_rows(target_N, source_N, length)
            for handle, leader in followers:
                self._cached[handle] = self._cached[leader]

    def _read(self, rows: slice, width: int) -> None:
        """One forward pass over the new tokens of some neighbouring slots; no logits are made."""
        handles = self._order[rows]
        ids_BQ = torch.full((len(handles), width), self.pad_id)
        positions_BQ = torch.empty((len(handles), width), dtype=torch.long)
        for i, handle in enumerate(handles):
            ids, cached = self._ids[handle], self._cached[handle]
            ids_BQ[i, : len(ids) - 1 - cached] = torch.tensor(ids[cached:-1])
            # padding writes where the last token, which is fed next, will overwrite it
            positions_BQ[i] = torch.arange(cached, cached + width).clamp_(max=len(ids) - 1)
            self._cached[handle] = len(ids) - 1
        device = self.model.device
        visible = int(positions_BQ.max()) + 1
        self.model.base_model(**self._inputs(ids_BQ.to(device), positions_BQ.to(device), rows, visible))

    # ------------------------------------------------------------------ writing

    def _decode(self, seed_of: dict[int, int], params: SamplingParams) -> dict[int, Completion]:
        count, device = len(seed_of), self.model.device
        handles = self._order[:count]  # output row i belongs to handles[i], whichever slot it moves to
        owner_B = torch.arange(count, device=device)
        seeds_B = torch.tensor([seed_of[handle] for handle in handles], device=device)
        token_B = torch.tensor([self._ids[handle][-1] for handle in handles], device=device)
        position_B = torch.tensor([len(self._ids[handle]) - 1 for handle in handles], device=device)
        alive_B = torch.ones(count, dtype=torch.bool, device=device)
        stop_ids = torch.tensor(self.stop_ids, device=device)
        tokens_BN = torch.zeros(count, params.max_new_tokens, dtype=torch.long, device=device)
        logprobs_BN = torch.zeros(count, params.max_new_tokens, device=device)
        length_B = torch.zeros(count, dtype=torch.long, device=device)
        seen_BV = self._seen(handles) if params.repetition_penalty != 1.0 else None
        visible = int(position_B.max()) + 1

        live = count
        for step in range(params.max_new_tokens):
            inputs = self._inputs(token_B[:live, None], position_B[:live, None], slice(0, live), visible + step)
            logits_BV = self.model(**inputs, logits_to_keep=1).logits[:, -1]
            seen = seen_BV[:live] if seen_BV is not None else None
            next_B, logprob_B = draw(logits_BV, params, uniforms(seeds_B[:live], step), seen)
            rows = owner_B[:live][alive_B[:live]]
            tokens_BN[rows, step] = next_B[alive_B[:live]]
            logprobs_BN[rows, step] = logprob_B[alive_B[:live]]
            length_B[rows] = step + 1
            token_B[:live] = next_B
            position_B[:live] += 1
            if seen_BV is not None:
                seen_BV[torch.arange(live, device=device), next_B] = True
            alive_B[:live] &= ~torch.isin(next_B, stop_ids)
            still = int(alive_B.sum())
            if still == 0:
                break
            if still < COMPACT_BELOW * live:
                alive = alive_B[:live].tolist()
                dead = [slot for slot in range(still) if not alive[slot]]
                late = [slot for slot in range(still, live) if alive[slot]]
                if dead:
                    self._swap(dead, late, visible + step)
                    target_N, source_N = torch.tensor(dead + late), torch.tensor(late + dead)
                    for row_state in (owner_B, seeds_B, token_B, position_B, alive_B, seen_BV):
                        if row_state is not None:
                            row_state[target_N] = row_state[source_N]
                live = still

        completions = {}
        stopped = set(self.stop_ids)
        columns = zip(handles, tokens_BN.tolist(), logprobs_BN.tolist(), length_B.tolist(), strict=True)
        for handle, tokens, logprobs, length in columns:
            ids = tokens[:length]
            completions[handle] = Completion(ids, logprobs[:length], ids[-1] in stopped)
            self._cached[handle] = len(self._ids[handle]) + length - 1
            self._ids[handle].extend(ids)
        return completions

    def _seen(self, handles: list[int]) -> torch.Tensor:
        size = self.model.config.get_text_config().vocab_size
        seen_BV = torch.zeros(len(handles), size, dtype=torch.bool, device=self.model.device)
        for row, handle in enumerate(handles):
            seen_BV[row, self._ids[handle]] = True
        return seen_BV


def supports(model: PreTrainedModel) -> bool:
    """Whether the one invariant can hold: every layer attends to everything before it."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is None


def agrees_with_full_forward(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> bool:
    """A self-test before a run: ragged rows, two turns, each sampled log-prob against one plain forward pass."""
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
    worst = 0.0
    with torch.no_grad():
        for row, handle in enumerate(handles):
            ids_1T = torch.tensor([sampler._ids[handle]], device=model.device)
            logprobs_TV = model(input_ids=ids_1T).logits[0].float().log_softmax(-1)
            for begin, done in spans[row]:
                for n, (token, logprob) in enumerate(zip(done.ids, done.logprobs, strict=True)):
                    worst = max(worst, abs(logprobs_TV[begin + n - 1, token].item() - logprob))
    return worst < (1e-3 if model.dtype == torch.float32 else 0.25)
