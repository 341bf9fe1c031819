"""How is a token decoded without Python in between?  The whole step is compiled: forward pass, draw and bookkeeping.

One set of kernels (torch.compile, inductor) serves all sizes of the batch and of the cache. On a GPU a step is recorded
as a CUDA graph for each pair of sizes, and a token is one replay of it. So the rows of a step are padded to a power of
two, and the positions that it reads to a multiple of 128. A CUDA graph holds addresses: each rollout records its own.

Shapes: B rows of a step, L positions that it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from transformers import Cache, PreTrainedModel

from posttrain.models import attention_mask, converted_once
from posttrain.rollout.engines.base import Then, TurnRequest
from posttrain.rollout.engines.slots import SlotRows, SlotSampler, Writing, write_token
from posttrain.runtime import CacheLayer, grouped_queries, runlog
from posttrain.types import SamplingParams, UserError, one_line

POSITIONS = 128  # a step reads a multiple of it
BLIND_STEPS = 8  # on a GPU, between two synchronizations that count the rows that are done
MOST_GRAPHS = 64  # that torch keeps of one function; each temperature takes one or two

Step = Callable[[], object]


def _step(
    model: PreTrainedModel,
    kept: Cache,
    rows: SlotRows,
    index_L: torch.Tensor,
    done_B: torch.Tensor,
    params: SamplingParams,
    stop_ids: torch.Tensor,
) -> None:
    """Write one more token into each row that is not done; all tensors are read and written in place."""
    position_B1 = rows.position_B[:, None]
    logits_BV = model(
        input_ids=rows.token_B[:, None],
        attention_mask=attention_mask(model, index_L <= position_B1[:, :, None]),
        position_ids=position_B1,
        past_key_values=kept,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    done_B.copy_(write_token(rows, done_B, logits_BV, params, stop_ids))


class _Window(CacheLayer):
    """The part of a layer of the cache that a step reads and writes: its rows, up to its last position."""

    def __init__(self, whole: CacheLayer, position_B: torch.Tensor, index_L: torch.Tensor) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.keys, self.values = whole.keys, whole.values
        self.position_B, self.index_L = position_B, index_L
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        rows, visible = len(self.position_B), len(self.index_L)
        row_B1 = torch.arange(rows, device=self.keys.device)[:, None]
        self.keys[row_B1, :, self.position_B[:, None]] = key_states.transpose(1, 2).to(self.keys.dtype)
        self.values[row_B1, :, self.position_B[:, None]] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys[:rows, :, :visible], self.values[:rows, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.index_L), 0


@cache
def _compiled() -> Callable[..., None]:
    # not mode="reduce-overhead": its CUDA graphs are kept when the memory that they point at has been replaced
    return torch.compile(_step, fullgraph=True)  # pyright: ignore[reportUnknownMemberType]


def for_all_sizes(tensor: torch.Tensor, *dims: int) -> None:
    """Make torch.compile use one graph for all sizes of these dimensions."""
    from torch._dynamo import mark_dynamic

    mark_dynamic(tensor, list(dims))


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class CompiledSampler(SlotSampler):
    """The slot engine with compiled steps: the same tokens, except for the rounding of logits.

    Raises:
        UserError: the step cannot be compiled.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, longest: int | None = None
    ) -> None:
        super().__init__(model, stop_ids, pad_id, longest)
        self._gpu = model.device.type == "cuda"
        self._steps: dict[tuple[int, int], Step] = {}  # by the numbers of rows and positions
        self._rows: SlotRows | None = None  # that these steps write
        self._done_S = torch.empty(0, dtype=torch.bool)

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        try:
            with grouped_queries(), converted_once(self.model):
                super().converse(turns, params, then)
        finally:  # steps hold the cache, and on a GPU the addresses of weights
            self._steps.clear()
            self._rows = None

    def reserve(self, length: int) -> None:
        before = self._sizes()
        super().reserve(length)
        for layer in self._layers:
            layer.slots = max(layer.slots, 2)  # torch compiles a graph of its own for one row
        if self._sizes() != before:
            self._steps.clear()

    def _sizes(self) -> tuple[int, int]:
        return self._layers[0].slots, self._layers[0].length

    def _width(self, writing: Writing) -> int:
        return min(max(2, 1 << (writing.width - 1).bit_length()), self._layers[0].slots)

    def _decode(self, writing: Writing, done_B: torch.Tensor, visible: int, enough: float) -> torch.Tensor:
        slots, length = self._sizes()
        if any(layer.keys is None or layer.keys.shape[0::2] != (slots, length) for layer in self._layers):
            done_B = self._step(writing, done_B, visible)  # the cache grows in its first use, which is now
            visible = min(visible + 1, length)
        if self._rows is not writing.rows or len(self._done_S) < slots:
            self._steps.clear()
            self._rows, self._done_S = writing.rows, torch.ones(slots, dtype=torch.bool, device=self.model.device)
        rows = len(done_B)
        done_B = self._done_S[:rows].copy_(done_B)
        while rows - int(done_B.sum()) >= enough:
            end = min(-(-visible // POSITIONS) * POSITIONS, length)
            steps = min(BLIND_STEPS if self._gpu else 1, end - visible + 1)
            for _ in range(steps):
                self._advance(writing, rows, end)
            visible = min(visible + steps, length)
        return done_B

    def _advance(self, writing: Writing, rows: int, end: int) -> None:
        """Run one step of this many rows and positions; the first one compiles and, on a GPU, records it."""
        step = self._steps.get((rows, end))
        if step is not None:
            step()
            return
        from torch._dynamo import config

        step = self._prepared(writing, rows, end)
        before, start = compiled_graphs(), time.perf_counter()
        try:
            with config.patch(recompile_limit=MOST_GRAPHS):  # pyright: ignore[reportUnknownMemberType]
                step()
            self._steps[rows, end] = _recorded(step) if self._gpu else step
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # dynamo, inductor, the compiler, the driver: each fails in its own way
            cause = one_line(error).partition(" Set TORCHDYNAMO_VERBOSE")[0]
            raise UserError(
                f"rollout.compile=true: the decoding step of {type(self.model).__name__} cannot be compiled for"
                f" {self.model.device.type} ({cause}). It needs a C++ compiler on a CPU (`sudo apt-get"
                " install g++`), Triton and a C compiler on a GPU, and a model that torch.compile reads as one graph."
                " Without these leave rollout.compile out."
            ) from error
        if compiled_graphs() > before:
            runlog.say(
                f"The decoding step was compiled in {time.perf_counter() - start:.0f} s (graph {compiled_graphs()})."
            )

    def _prepared(self, writing: Writing, count: int, end: int) -> Step:
        """Return a step of the first `count` rows that reads up to position `end`."""
        rows, index_L, done_B = writing.first(count), torch.arange(end, device=self.model.device), self._done_S[:count]
        windows = [_Window(layer, rows.position_B, index_L) for layer in self._layers]
        for each in (*rows, index_L, done_B):
            for_all_sizes(each, 0)
        for each in (rows.uniform_BN, rows.tokens_BN, rows.logprobs_BN):
            for_all_sizes(each, 1)
        for window in windows:
            assert window.keys is not None and window.values is not None
            for_all_sizes(window.keys, 0, 2)
            for_all_sizes(window.values, 0, 2)
        kept = Cache(layers=list(windows))
        params = replace(writing.params, max_new_tokens=0)  # the shape of the rows limits the tokens
        return partial(_compiled(), self.model, kept, rows, index_L, done_B, params, writing.stop_ids)


def _recorded(step: Step) -> Step:
    """Record a step that has run before as a CUDA graph; return its replay, which keeps the step's tensors alive."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()

    def replay(_: Step = step) -> None:
        graph.replay()

    return replay
