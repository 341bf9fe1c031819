"""Where does a GPU's time go, and do the phases come near what it can do?  Four blocks of eight minutes each.

A: decoding and training steps of known models; the last one may end later. B: the phases beside TRL and the plan. C:
the tests of a GPU and whole runs with CUDA graphs, killed and resumed. D: a real model through all phases. Figures are
written as they come.
    python benchmarks/gpu.py A [--parts decode train profile] [--models convgpt qwen smol]
    python benchmarks/gpu.py B [--steps sft dpo iteration device rollout]
    python benchmarks/gpu.py C
    python benchmarks/gpu.py D --model models/smollm2 --data data     # or --task gsm8k
    python benchmarks/gpu.py --needs [packages.txt]                   # what to bring to a machine without a network
Without CUDA the same code runs with tiny models and few rows: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _gpu_blocks
import _measure

from posttrain import plan
from posttrain.models import compile_layers, layers_are_compiled, simplify_layers
from posttrain.plan.known_models import PUBLISHED
from posttrain.rollout.engines.graphs import CudaRecorder, GraphSampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.runtime import hardware
from posttrain.runtime.compat import chunked_logprobs
from posttrain.types import SamplingParams, one_line

CUDA = torch.cuda.is_available()
KIND = "cuda" if CUDA else "cpu"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "convgpt": PUBLISHED["mkurman/ConvGPT-0.2B-SYNTH-250B-EC"],
    "qwen": PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"],
    "smol": PUBLISHED["HuggingFaceTB/SmolLM2-135M-Instruct"],
}
# Rows x tokens of training, rows x positions of decoding
TRAINING = {"convgpt": [(16, 2048), (4, 1024), (16, 417)], "qwen": [(8, 1024)], "smol": [(16, 1024)]}
DECODING = {"convgpt": [(128, 512)], "smol": [(256, 512)], "qwen": [(256, 512)]}
NEW_TOKENS = 64
if not CUDA:
    TRAINING = {name: [(2, 24)] for name in TRAINING}
    DECODING = {name: [(4, 40)] for name in DECODING}
    NEW_TOKENS = 4


NOT_COMPILED = "compilation failed, so that layers are not compiled"


class Report:
    """Prints rows and writes them to a file as they come, and knows how much time is left."""

    def __init__(self, seconds: float, file: Path) -> None:
        self.start, self.seconds, self.file = time.perf_counter(), seconds, file
        self.results = _measure.surroundings(KIND) | {"block": "A", "rows": []}

    def add(self, **row: Any) -> None:
        row["at_s"] = time.perf_counter() - self.start
        self.results["rows"].append(row)
        self.file.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row), flush=True)

    def over(self) -> bool:
        return time.perf_counter() - self.start > self.seconds


synchronize = partial(_measure.synchronize, KIND)


def seconds_of(action: Callable[[], object], warm: int = 2, repeats: int = 3) -> float:
    """Median seconds of an action, after some runs that are not counted."""
    for _ in range(warm):
        action()
    return median(_measure.seconds_of(action, KIND) for _ in range(repeats))


def model_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    small = {} if CUDA else {"num_hidden_layers": 2, "vocab_size": 1024}
    model = _measure.model_of(kind, sizes | _measure.ENDLESS | small, KIND)
    simplify_layers(model)  # as every phase does
    return model


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


def train(report: Report, peak: float, name: str) -> None:
    """Layers as they are or compiled; activations recomputed or kept; with and without deterministic algorithms."""
    ways = [("eager", True), ("eager", False), ("compiled", False)]
    ways += [("compiled", True)] if name == "convgpt" else []
    for way, recomputed in ways:
        torch._dynamo.reset()
        gc.collect()
        model = model_of(name).train()
        shape = _measure.shape_of(model.config)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if way == "compiled":
            compile_layers(model, deterministic=True)
        for rows, tokens in TRAINING[name]:
            for deterministic in (True, False) if way == "eager" else (True,):  # each is compiled anew
                if report.over():
                    return
                what = {"what": "train", "model": name, "rows": rows, "tokens": tokens, "way": way}
                what |= {"recomputed": recomputed, "deterministic": deterministic}
                try:
                    with hardware.deterministic(deterministic):
                        figures = _trained(shape, model, rows, tokens, peak)
                    if way == "compiled" and not layers_are_compiled(model):
                        raise RuntimeError(NOT_COMPILED)
                    report.add(**what, **figures)
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
    flops = 3 * _measure.forward_flops(shape, [tokens] * rows, count)
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
    shape = _measure.shape_of(model.config)
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
    if isinstance(sampler, GraphSampler):
        sampler.strict = True  # a step that cannot be recorded is an error

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
    of_one = _measure.episodes_of(rows, rows, rows, rows * positions, rows, rows * positions + rows)
    reads = _measure.decoding_bytes(shape, rows, of_one, size=2)
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
            compile_layers(model, deterministic=True)
        step = training_step(model, *((16, 1024) if CUDA else (2, 24)))
        seconds = seconds_of(step)
        kernels, busy, table = profiled(step)
        if way == "compiled" and not layers_are_compiled(model):
            report.add(what="profile", way=way, error=NOT_COMPILED)
            return
        report.add(what="profile", way=way, kernels=kernels, busy_ms=busy * 1e3, ms=seconds * 1e3, table=table)


def block_a(given: Any) -> dict[str, Any]:
    report = Report(given.seconds, given.out / "A.json")
    bandwidth, peak = found = _measure.limits(KIND, bf16=True)
    report.results |= found.told
    for part in given.parts:
        if part == "profile":
            profile_steps(report)
            continue
        for name in given.models:
            if part == "train":
                train(report, peak, name)
            else:
                decode(report, bandwidth, name)
    return report.results


# --------------------------------------------------------------------------------------------------- what is brought


THERE = {"torch"}  # with what it needs itself
UNUSED = {"bitsandbytes", "gradio", "gym", "openai", "trackio"}  # by the blocks
TESTS = ("pytest", "hypothesis")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def needs(python: str, packages: dict[str, str]) -> list[str]:
    """The pinned packages that the blocks need besides torch, as requirements.lock has them for Linux and this Python.

    Args:
        python: of the other machine, 3.12.
        packages: what is there already, by name; a version that every requirement allows need not be brought.
    """
    linux = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    linux |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    linux |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    place: Any = {**default_environment(), **linux}

    def read(file: str) -> list[Requirement]:
        lines = (line.partition("#")[0].strip(" \\\n") for line in (_gpu_blocks.ROOT / file).open(encoding="utf-8"))
        found = [Requirement(line) for line in lines if line and not line.startswith("--hash")]
        return [each for each in found if each.marker is None or each.marker.evaluate(place)]

    asked: dict[str, list[Requirement]] = {}
    coming = read("requirements.txt") + [each for each in read("requirements-dev.txt") if each.name in TESTS]
    for each in coming:  # grows
        if (name := canonicalize_name(each.name)) in THERE | UNUSED:
            continue
        asked.setdefault(name, []).append(each)
        if len(asked[name]) == 1:
            inner = [Requirement(line) for line in metadata.requires(name) or []]
            coming += [more for more in inner if more.marker is None or more.marker.evaluate(place)]
    locked: dict[str, str] = {canonicalize_name(each.name): str(each.specifier) for each in read("requirements.lock")}
    fits = {
        name
        for name, version in packages.items()
        if all(each.specifier.contains(version, prereleases=True) for each in asked.get(name, []))
    }
    return sorted(f"{name}{locked[name]}" for name in asked if name not in fits)


def print_needs(listed: str) -> None:
    """Say how the packages are brought, and which weights and data. listed: what `pip list` prints there, or ""."""
    pairs = [line.split("==") for line in listed.splitlines() if "==" in line]
    wheels = needs("3.12", {canonicalize_name(name): version.strip() for name, version in pairs})
    platforms = " ".join(f"--platform {each}_x86_64" for each in PLATFORMS)
    print(
        f"# Here: {len(wheels)} wheels. Those that are there already are left out by --needs FILE, with what"
        " `pip list --format=freeze` prints there.\n"
        "python -m pip download --dest wheels --no-deps --only-binary=:all: --python-version 3.12"
        f" --implementation cp {platforms} \\\n  {' '.join(wheels)}\n"
        "# There, beside torch:\n"
        "python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site"
        " HF_HUB_OFFLINE=1\n"
        f"# Weights and data\n{_gpu_blocks.BROUGHT}"
    )


def markdown(results: dict[str, Any]) -> str:
    if results.get("block", "A") != "A":
        return _gpu_blocks.markdown(results)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("block", nargs="?", choices="ABCD", default="A")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="the figures, as A.json to D.json; logs; runs"
    )
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="nothing begins after so many; in A what has begun goes on"
    )
    parts = ["decode", "train", "profile"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="A: in this order")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="A")
    parser.add_argument("--steps", nargs="+", help="B, C, D: these alone, by the names that the block prints")
    parser.add_argument("--model", help="D: a pretrained model's folder or GGUF file")
    parser.add_argument("--data", type=Path, help="D: a folder with gsm8k_train.jsonl, and demos.jsonl, best.jsonl")
    parser.add_argument("--task", choices=["chain", "gsm8k"], default="chain", help="D: all phases, or RL alone")
    parser.add_argument("--needs", nargs="?", const="", metavar="FILE", help="list what has to be brought, and end")
    given = parser.parse_args()
    if given.needs is not None:
        try:
            listed = Path(given.needs).read_text(encoding="utf-8") if given.needs else ""
        except (OSError, UnicodeError) as error:
            parser.error(f"--needs: {given.needs} cannot be read ({one_line(error)})")
        if given.needs and "==" not in listed:
            parser.error(f"--needs: {given.needs} has no line NAME==VERSION")
        print_needs(listed)
        return
    if not given.seconds > 0:
        parser.error(f"--seconds: {given.seconds:g} is not above 0")
    if given.block == "A" and given.steps:
        parser.error("--steps: block A has --parts and --models")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {given.out} cannot be written ({one_line(error)})")
    if given.block == "A":
        results = block_a(given)
    else:
        try:
            results = _gpu_blocks.run(given, KIND)
        except _gpu_blocks.Refused as refused:
            parser.error(str(refused))
    print(markdown(results))
    if not any(_measured(row) for row in results["rows" if given.block == "A" else "steps"]):
        parser.exit(1, f"{parser.prog}: block {given.block} measured nothing in its {given.seconds:g} seconds\n")


def _measured(row: dict[str, Any]) -> bool:
    """Whether a row of A has figures; whether a step of another block ended well, or left some all the same."""
    failed = row.keys() & {"error", "skipped", "tail"}
    return not failed or any(row.get("figures", {}).values())


if __name__ == "__main__":
    main()
