"""Where does a GPU's time go?  Decoding and training steps of known models, beside what the card can do.

One process, since each new one costs tens of seconds of imports; one JSON line for each measurement, as it is made.
The block stops taking up new measurements when its time is up.
    python benchmarks/gpu.py [--seconds 420] [--parts decode train profile] [--json FILE]
Without CUDA the same code runs with two layers and few rows: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

from posttrain import plan
from posttrain.config.shared import ModelSection
from posttrain.models import convgpt
from posttrain.plan import seconds as roofline
from posttrain.plan.known_models import PUBLISHED
from posttrain.rollout.engines.graphs import CudaRecorder, GraphSampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.runtime import hardware
from posttrain.runtime.compat import chunked_logprobs
from posttrain.types import SamplingParams, one_line

CUDA = torch.cuda.is_available()
KIND = "cuda" if CUDA else "cpu"
SMOL = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "convgpt": PUBLISHED["mkurman/ConvGPT-0.2B-SYNTH-250B-EC"],
    "qwen": PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"],
    "smol": ("llama", SMOL),
}
# Rows x tokens of training, rows x positions of decoding
TRAINING = {"convgpt": [(16, 2048), (4, 1024), (16, 417)], "qwen": [(8, 1024)], "smol": [(16, 1024)]}
DECODING = {"convgpt": [(128, 512)], "smol": [(256, 512)], "qwen": [(256, 512)]}
NEW_TOKENS = 64
if not CUDA:
    TRAINING = {name: [(2, 24)] for name in TRAINING}
    DECODING = {name: [(4, 40)] for name in DECODING}
    NEW_TOKENS = 4


class Report:
    """Prints rows as they come and knows how much time is left."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.start, self.seconds = time.perf_counter(), seconds

    def add(self, **row: Any) -> None:
        row["at_s"] = time.perf_counter() - self.start
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def over(self) -> bool:
        return time.perf_counter() - self.start > self.seconds


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds_of(action: Callable[[], object], warm: int = 2, repeats: int = 3) -> float:
    """Median seconds of an action, after some runs that are not counted."""
    for _ in range(warm):
        action()
    found = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        action()
        synchronize()
        found.append(time.perf_counter() - start)
    return median(found)


def limits() -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and FLOPs a second of a large product in bfloat16."""
    size, side = (1 << 31, 8192) if CUDA else (1 << 24, 256)
    source = torch.randint(0, 99, (size,), dtype=torch.int8, device=KIND)
    target = torch.empty_like(source)
    matrix = torch.randn(side, side, device=KIND, dtype=torch.bfloat16)
    return 2 * size / seconds_of(lambda: target.copy_(source)), 2 * side**3 / seconds_of(lambda: matrix @ matrix)


def model_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    small = {} if CUDA else {"num_hidden_layers": 2, "vocab_size": 1024}
    return _measure.model_of(kind, sizes | _measure.ENDLESS | small, KIND)


def layers_of(model: Any) -> Any:
    return next(part for part in model.base_model.modules() if isinstance(part, torch.nn.ModuleList))


def training_step(model: Any, rows: int, tokens: int) -> Callable[[], None]:
    """Forward and backward pass of all tokens under bfloat16 autocast, without the optimizer."""
    head = model.get_output_embeddings()
    ids = torch.randint(3, 1000, (rows, tokens), device=KIND)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(KIND, torch.bfloat16):
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
            logprobs, _ = chunked_logprobs(states, head.weight, None, ids[:, 1:].flatten(), columns=8192)
        (-logprobs.mean()).backward()

    return step


def profiled(action: Callable[[], object]) -> tuple[int, float, str]:
    """Kernels that ran, the seconds that the GPU was busy with them, and torch's table of the longest ones."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]) as found:
        action()
        synchronize()
    kernels = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    order = "self_cuda_time_total" if CUDA else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
    return len(kernels), sum(event.device_time for event in kernels) / 1e6, table


def _norm_in_its_precision(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


@contextmanager
def lean(on: bool) -> Iterator[None]:
    """ConvGPT's norms as one operation, queries and keys normed and rotated in bfloat16."""
    if not on:
        yield
        return
    whole = convgpt.rotary

    def rotary(config: Any, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return whole(config, position_ids, torch.bfloat16)

    with (
        patch.object(convgpt.ConvGPTRMSNorm, "forward", _norm_in_its_precision),
        patch.object(convgpt, "rotary", rotary),
    ):
        yield


def train(report: Report, peak: float, name: str) -> None:
    """Eager, lean and compiled layers; activations recomputed or kept; with and without deterministic algorithms."""
    ways = [("eager", True), ("eager", False), ("compiled", False)]
    ways += [("lean", False), ("lean compiled", False), ("compiled", True)] if name == "convgpt" else []
    for way, recomputed in ways:
        torch._dynamo.reset()
        gc.collect()
        with lean("lean" in way):
            model = model_of(name).train()
            shape = plan.Shape.of(model.config, ModelSection(name_or_path="x"))
            if recomputed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            if "compiled" in way:
                for layer in layers_of(model):
                    layer.compile(dynamic=True)
            for rows, tokens in TRAINING[name]:
                for deterministic in (True, False) if way == "eager" else (True,):  # each is compiled anew
                    if report.over():
                        return
                    what = {"what": "train", "model": name, "rows": rows, "tokens": tokens, "way": way}
                    what |= {"recomputed": recomputed, "deterministic": deterministic}
                    try:
                        with hardware.deterministic(deterministic):
                            report.add(**what, **_trained(shape, model, rows, tokens, peak))
                    except Exception as error:  # out of memory, the compiler, the driver: the others are still measured
                        report.add(**what, error=one_line(error)[:300])
                        model.zero_grad(set_to_none=True)
            del model


def _trained(shape: plan.Shape, model: Any, rows: int, tokens: int, peak: float) -> dict[str, Any]:
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = training_step(model, rows, tokens)
    start = time.perf_counter()
    step()
    synchronize()
    first = time.perf_counter() - start
    seconds = seconds_of(step)
    kernels, busy, _ = profiled(step)
    count = rows * tokens
    flops = 3 * (roofline.forward_flops(shape, count, tokens / 2) + roofline.head_flops(shape, count))
    return {
        "ms": seconds * 1e3,
        "tokens_per_s": count / seconds,
        "mfu": flops / seconds / peak,  # of the peak measured here; recomputation does not count as work
        "kernels": kernels,
        "busy": busy / seconds,
        "first_s": first,
        "peak_gib": _measure.peak(KIND),
    }


class TimedRecorder:
    """Records CUDA graphs, or on a CPU nothing, and notes the seconds of each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._recorder = CudaRecorder() if CUDA else None

    def record(self, step: Callable[[], object]) -> Callable[[], object]:
        synchronize()
        start = time.perf_counter()
        replay = step if self._recorder is None else self._recorder.record(step)
        synchronize()
        self.seconds.append(time.perf_counter() - start)
        return replay


def decode(report: Report, bandwidth: float, name: str) -> None:
    """Milliseconds a step of so many rows: launched from Python, and as a CUDA graph."""
    model = model_of(name).eval()
    shape = plan.Shape.of(model.config, ModelSection(name_or_path="x"))
    for rows, positions in DECODING[name]:
        for way in ("eager", "graph"):
            if report.over():
                return
            what = {"what": "decode", "model": name, "rows": rows, "positions": positions, "way": way}
            try:
                report.add(**what, **_decoded(shape, model, way == "graph", rows, positions, bandwidth))
            except Exception as error:
                report.add(**what, error=one_line(error)[:300])


def _decoded(
    shape: plan.Shape, model: Any, recorded: bool, rows: int, positions: int, bandwidth: float
) -> dict[str, Any]:
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    prompts = [[5 + (row * 7 + i) % 900 for i in range(positions - NEW_TOKENS // 2)] for row in range(rows)]
    recorder = TimedRecorder()
    given = (model, [shape.vocabulary], 0, positions + NEW_TOKENS)
    sampler = GraphSampler(*given, recorder) if recorded else SlotSampler(*given)

    def play(tokens: int) -> None:
        handles = sampler.open(prompts)
        sampler.sample(handles, SamplingParams(tokens), range(rows))
        sampler.close(handles)

    with torch.autocast(KIND, torch.bfloat16), torch.no_grad():
        start = time.perf_counter()
        play(NEW_TOKENS)
        synchronize()
        first = time.perf_counter() - start
        made, spent = len(recorder.seconds), sum(recorder.seconds)
        seconds = seconds_of(lambda: play(NEW_TOKENS), 0, 3)
        step = (seconds - seconds_of(lambda: play(1), 1, 3)) / (NEW_TOKENS - 1)
    reads = 2 * (shape.blocks + shape.top + rows * positions * shape.cache)
    return {
        "ms_a_step": step * 1e3,
        "tokens_per_s": rows / step,
        "bandwidth": reads / step / bandwidth,  # share of what a copy reaches
        "first_s": first,
        "captures": made,
        "capture_ms": spent / max(1, made) * 1e3,
        "peak_gib": _measure.peak(KIND),
    }


def profile_steps(report: Report) -> None:
    """Which kernels take the time of a training step of ConvGPT, eager and with compiled layers."""
    for way in ("eager", "compiled"):
        if report.over():
            return
        torch._dynamo.reset()
        model = model_of("convgpt").train()
        if way == "compiled":
            for layer in layers_of(model):
                layer.compile(dynamic=True)
        step = training_step(model, *((16, 1024) if CUDA else (2, 24)))
        seconds = seconds_of(step)
        kernels, busy, table = profiled(step)
        report.add(what="profile", way=way, kernels=kernels, busy_ms=busy * 1e3, ms=seconds * 1e3, table=table)


def markdown(results: dict[str, Any]) -> str:
    lines = [_measure.told(results)]
    lines.append(f"Copy {results['GB_s']:,.0f} GB/s, product {results['TFLOP_s']:,.0f} TFLOP/s.")
    for what in ("decode", "train"):
        rows = [
            {k: v for k, v in row.items() if k not in ("what", "at_s")}
            for row in results["rows"]
            if row["what"] == what
        ]
        keys = list(dict.fromkeys(key for row in rows for key in row if key != "error"))
        cells = [[f"{v:.3g}" if isinstance(v := row.get(key, ""), float) else str(v) for key in keys] for row in rows]
        lines += ["", _measure.table(keys, cells)] if rows else []
    return "\n".join(lines)


def main() -> None:
    parser = _measure.parser(__doc__, repeats=False)
    parser.add_argument("--seconds", type=float, default=420.0, help="no measurement begins after so many")
    parts = ["decode", "train", "profile"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="in this order")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    given = parser.parse_args()
    report = Report(given.seconds)
    bandwidth, peak = limits()
    for part in given.parts:
        if part == "profile":
            profile_steps(report)
            continue
        for name in given.models:
            if part == "train":
                train(report, peak, name)
            else:
                decode(report, bandwidth, name)
    results = _measure.surroundings(KIND) | {"GB_s": bandwidth / 1e9, "TFLOP_s": peak / 1e12, "rows": report.rows}
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
