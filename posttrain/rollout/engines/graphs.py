"""How is a token decoded without waiting for Python?  A step of the slot engine is a CUDA graph, which is replayed.

A GPU takes less time for a decoding step of a small model than Python needs to launch its kernels; a CUDA graph
launches them all at once. A graph holds addresses. So the cache has its full length and all its slots from the start,
and it, the rows and the copies of weights stay where they are from rollout to rollout. A graph is recorded once in a
run for each number of rows (see `whole_rows`) and of positions (multiples of 256), and each kind of sampling. All use
one memory pool: one runs at a time, and what a step leaves behind is in tensors outside of it. A sampler that was not
told its length or its number of conversations grows, and records anew where it does.

Shapes: B rows of a step, S slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from posttrain.models import row_attention
from posttrain.rollout.engines.base import Then, TurnRequest
from posttrain.rollout.engines.slots import SlotSampler, Writing
from posttrain.runtime import runlog
from posttrain.types import SamplingParams, one_line

FEWEST_ROWS = 8
FEWEST_TOKENS = 64  # that a row has room for; more are powers of two
POSITIONS = 256  # a step reads a multiple of it
MOST_KINDS = 8  # of sampling parameters that have graphs
BY_LENGTH = False  # until `benchmarks/attention.py` has measured on a GPU that it pays

Step = Callable[[], object]


class Recorder(Protocol):
    """What records a step and gives its replay."""

    def record(self, step: Step) -> Step:
        """Record what a step does with its tensors, without doing it; return the replay."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, on a stream of their own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()  # that use the pool
        self._pool = torch.cuda.graph_pool_handle()
        self._written = torch.zeros(1, device="cuda")

    def record(self, step: Step) -> Step:
        """Record a step as `torch.cuda.graph` does; when it fails, leave nothing behind and raise why.

        `torch.cuda.graph` stays on its stream then, with the allocator in its pool, and raises a consequence.
        """
        if not self._graphs:  # a pool cannot be used again when all graphs in it are gone
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the pool cannot use what is cached outside of it
        with torch.cuda.stream(self._stream):
            try:
                graph = _capture(step, self._pool)
            except Exception:
                _leave_pool(self._stream.device_index, self._pool)
                # until torch 2.13, its random numbers stay in the capture, and no graph can be replayed, until one ends
                with suppress(RuntimeError):
                    _capture(self._written.zero_, torch.cuda.graph_pool_handle())
                raise
        self._graphs.add(graph)
        return graph.replay


def _capture(step: Step, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        step()
    except BaseException:
        with suppress(RuntimeError):  # a consequence, where the error has spoiled the capture
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


def _leave_pool(device: int, pool: tuple[int, int]) -> None:
    """Let the allocator leave the pool of a capture that has failed.

    Where the end of the capture fails, torch leaves the allocator there, which then frees no cached memory
    (pytorch/pytorch#180395). Until the oldest torch allowed leaves the pool itself.
    """
    with suppress(RuntimeError):  # it has left
        torch._C._cuda_endAllocateToPool(device, pool)  # pyright: ignore[reportPrivateUsage]


def whole_rows(count: int) -> int:
    """Return the rows of a step that spans `count` rows: the next multiple of an eighth of the next power of two.

    It depends on `count` alone, so that a resumed run rounds as one without a break.
    """
    unit = max(FEWEST_ROWS, (1 << (count - 1).bit_length()) // 8)
    return -(-count // unit) * unit


class _LateCounts:
    """Numbers from the device that are read a step late, while the device does the next step."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host_2 = torch.zeros(2, dtype=torch.long, pin_memory=on_gpu)
        self._arrived = (torch.cuda.Event(), torch.cuda.Event()) if on_gpu else None
        self._sent = 0

    def send(self, count: torch.Tensor) -> None:
        place = self._sent % 2
        self._host_2[place].copy_(count, non_blocking=True)
        if self._arrived is not None:
            self._arrived[place].record()
        self._sent += 1

    def before_the_last(self) -> int | None:
        """Return the number that was sent before the last one; None if there is none."""
        if self._sent < 2:
            return None
        place = self._sent % 2
        if self._arrived is not None:
            self._arrived[place].synchronize()
        return int(self._host_2[place])


@dataclass
class _Static:
    """The tensors that the steps of some sampling parameters read and write, and their graphs by rows and positions."""

    writing: Writing
    done_S: torch.Tensor
    going: torch.Tensor  # how many rows are not done, ()
    graphs: dict[tuple[int, int], Step] = field(default_factory=dict[tuple[int, int], Step])


class GraphSampler(SlotSampler):
    """The slot engine with replayed steps. Its operations are the same; more rows and positions may take part.

    Where a step cannot be recorded, a line says why, and steps are launched as the slot engine does; with `strict`,
    that raises ValueError.

    Args:
        recorder: records CUDA graphs unless another one is given.
        by_length: whether attention reads each row up to its own length, where `row_attention.has_kernel`, instead of
            all rows up to the longest one. Rounding differs.
        conversations: how many are open at a time at most, if known; the cache has a slot for each from the start.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Sequence[int],
        pad_id: int,
        longest: int | None = None,
        recorder: Recorder | None = None,
        by_length: bool | None = None,
        conversations: int | None = None,
    ) -> None:
        super().__init__(model, stop_ids, pad_id, longest)
        self.conversations = conversations
        self._by_length = BY_LENGTH if by_length is None else by_length
        self._recorder: Recorder | None = recorder or CudaRecorder()
        self._weights = {}
        self._static: dict[SamplingParams, _Static] = {}
        self._now: _Static | None = None
        self._seen: tuple[object, ...] = ()  # what recorded steps depend on, and rollouts may change
        self.recorded = 0  # graphs, in all rollouts
        self.strict = False

    @property
    def replays(self) -> bool:
        """Whether steps are recorded and replayed; not any more once one could not be recorded."""
        return self._recorder is not None

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        before, start = self.recorded, time.perf_counter()
        super().converse(turns, params, then)
        if made := self.recorded - before:
            runlog.say(
                f"Decoding: {made} CUDA graphs recorded in a rollout of {time.perf_counter() - start:.1f} s"
                f" ({self.recorded} in all)."
            )

    def writing_for(self, params: SamplingParams) -> Writing:
        kind = self.model.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        if (seen := ((autocast, self.model.dtype), *self._dependencies())) != self._seen:
            if self._seen and self._seen[0] != seen[0]:  # the cache has another precision
                super().free_cache()
                self._readers.clear()
                self._cached = dict.fromkeys(self._cached, 0)
            self._static, self._weights, self._seen = {}, {}, seen
        room = max(FEWEST_TOKENS, 1 << (params.max_new_tokens - 1).bit_length())
        static = self._static.pop(roomy := replace(params, max_new_tokens=room), None)
        if static is None:
            device = self.model.device
            done_S, going = torch.ones(0, dtype=torch.bool, device=device), torch.tensor(0, device=device)
            static = _Static(super().writing_for(roomy), done_S, going)
        self._static[roomy] = static  # as the latest
        if len(self._static) > MOST_KINDS:
            del self._static[next(iter(self._static))]
        static.writing.most = params.max_new_tokens
        static.writing.slots.clear()  # of a rollout that was interrupted
        self._now = static
        return static.writing

    def _dependencies(self) -> tuple[object, ...]:
        """Return the addresses of the weights, and the adapters that are in use."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        adapters = [
            (layer.merged, layer.disable_adapters, tuple(layer.active_adapters))
            for layer in self.model.modules()
            if isinstance(layer, BaseTunerLayer)
        ]
        return (*(each.data_ptr() for each in tensors), *adapters)

    def free_cache(self) -> None:
        """Keep the cache, whose addresses the graphs have."""

    def reserve(self, length: int) -> None:
        before = self._sizes()
        super().reserve(max(length, self.longest or 0))
        for layer in self._layers:
            layer.slots = whole_rows(max(layer.slots, self.conversations or 0))
            if self._by_length:
                layer.length = -(-layer.length // POSITIONS) * POSITIONS
        if self._sizes() != before:  # the cache moves at its next use
            for each in self._static.values():
                each.graphs.clear()
        slots, static = self._sizes()[0], self._now
        if static is not None and len(static.done_S) < slots:
            static.graphs.clear()
            static.writing.grow(slots)
            static.done_S = torch.ones(slots, dtype=torch.bool, device=static.done_S.device)

    def _sizes(self) -> tuple[int, int]:
        return self._layers[0].slots, self._layers[0].length

    def _width(self, writing: Writing) -> int:
        return whole_rows(writing.width)

    def _decode(self, writing: Writing, done_B: torch.Tensor, visible: int, enough: float) -> torch.Tensor:
        static = self._now
        assert static is not None and static.writing is writing
        length, rows, counts = self._sizes()[1], len(done_B), _LateCounts(done_B.device)
        static.done_S[:rows] = done_B
        going: int | None = None
        while going is None or going >= enough:
            self._advance(static, rows, min(-(-visible // POSITIONS) * POSITIONS, length))
            visible = min(visible + 1, length)
            counts.send(static.going)
            going = counts.before_the_last()
        return static.done_S[:rows]

    def _advance(self, static: _Static, rows: int, end: int) -> None:
        """Write one token in each of these rows that is not done."""
        if (replay := static.graphs.get((rows, end))) is not None:
            replay()
            return
        step = partial(self._static_step, static, rows, end)
        try:
            step()  # its kernels are loaded now, and the cache is where it stays
        except Exception as error:  # of a library, of the driver
            if not self._by_length:
                raise
            self._by_length = False
            runlog.say(f"Decoding reads all rows up to the longest one: attention by length fails ({one_line(error)}).")
            step()  # no token was written
        if self._recorder is None:
            return
        kind = self.model.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        try:  # a weight that autocast has copied for the step would be freed before the graph is
            with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
                static.graphs[rows, end] = self._recorder.record(step)
            self.recorded += 1
        except Exception as error:  # of the model's own code, of a library, of the driver
            self._recorder = None
            why = f"a step of {type(self.model).__name__} cannot be recorded ({one_line(error)})"
            if self.strict:
                raise ValueError(why) from error
            runlog.say(f"Decoding goes on without CUDA graphs: {why}.")

    def _static_step(self, static: _Static, rows: int, end: int) -> None:
        done_B, model = static.done_S[:rows], self.model
        kind = model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
        own = self._by_length and row_attention.has_kernel(model, dtype)
        position_B = static.writing.rows.position_B[:rows]
        with row_attention.by_length(position_B + 1, end) if own else nullcontext():
            done_B.copy_(self._step(static.writing, done_B, end))
        static.going.copy_((~done_B).sum())
