"""How many operations does one decoded token cost?  Each is a kernel that Python launches, whatever the batch.

A rollout of the slot engine with eight more tokens a row, less one without them; counted by torch's dispatcher on the
CPU, in float32 and in bfloat16 autocast, of the model alone and with an adapter on all linear layers, as `model.lora`
puts it there. Views and `_unsafe_view`, which compute nothing, are not counted.
    python benchmarks/launches.py [--model convgpt-164m qwen2.5-0.5b] [--tuning full lora] [--json FILE]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

from posttrain import models
from posttrain.config.shared import ModelSection
from posttrain.plan.known_models import PUBLISHED
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.types import SamplingParams

ROWS, PROMPT, FEW, MORE = 4, 20, 2, 10  # conversations, tokens of each, tokens sampled in the two rollouts
VOCABULARY = 2048  # the number of operations does not depend on it
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "convgpt-164m": ("convgpt", {}),  # the defaults are the published checkpoint
    "qwen2.5-0.5b": (
        "qwen2",
        dict(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "smollm2-135m": PUBLISHED["HuggingFaceTB/SmolLM2-135M-Instruct"],
    "qwen3-0.6b": PUBLISHED["Qwen/Qwen3-0.6B"],
}
Tuning = Literal["full", "lora"]
TUNINGS: tuple[Tuning, ...] = get_args(Tuning)


def add_adapter(model: Any, tuning: Tuning) -> None:
    """Put the adapter of the defaults of `model.lora` on the layers of a model, in place; none for tuning full."""
    settings = models.peft_config(ModelSection(name_or_path="unused", tuning=tuning), model)
    if settings is not None:
        from peft import inject_adapter_in_model

        inject_adapter_in_model(settings, model)


class Dispatched(TorchDispatchMode):
    """Operations by name, as the dispatcher sees them: on a CPU `rms_norm` is five or six of them."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if not (self.paused or func.is_view or name == "_unsafe_view"):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


class Launched(TorchFunctionMode):
    """Beside `dispatched`: `rms_norm` is one operation, one kernel on CUDA, after a copy of what has gaps."""

    def __init__(self, dispatched: Dispatched) -> None:
        super().__init__()
        self.dispatched = dispatched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = func is torch.nn.functional.rms_norm
        self.dispatched.count["rms_norm"] += whole
        self.dispatched.count["contiguous"] += whole and not args[0].is_contiguous()
        self.dispatched.paused = whole
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.dispatched.paused = False


@contextmanager
def inside(model: Any, dispatched: Dispatched) -> Iterator[list[int]]:
    """The operations of each forward pass of the whole model."""
    found: list[int] = []

    def begin(*_: object) -> None:
        found.append(-dispatched.count.total())

    def end(*_: object) -> None:
        found[-1] += dispatched.count.total()

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def counted(model: Any, tokens: int, kernels: bool) -> tuple[Counter[str], int]:
    """Operations of a rollout by name, and how many of them the last forward pass took."""
    sampler = SlotSampler(model, [VOCABULARY], 0)  # nothing ends a turn early
    handles = sampler.open([list(range(5 + row, 5 + row + PROMPT)) for row in range(ROWS)])
    dispatched = Dispatched()
    with inside(model, dispatched) as forwards, dispatched:
        sample: Callable[[], object] = lambda: sampler.sample(handles, SamplingParams(tokens), range(ROWS))  # noqa: E731
        if kernels:
            with Launched(dispatched):
                sample()
        else:
            sample()
    sampler.close(handles)
    return dispatched.count, forwards[-1]


def a_token(model: Any, autocast: bool, kernels: bool) -> dict[str, Any]:
    """Operations of one decoded token: all of them, those of the model's forward, and each kind's share of all."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        counted(model, FEW, kernels)  # autocast keeps what it has made of a weight
        few, _ = counted(model, FEW, kernels)
        more, forward = counted(model, MORE, kernels)
    each = {name: (more[name] - few[name]) / (MORE - FEW) for name in sorted(more, key=lambda name: -more[name])}
    each = {name: count for name, count in each.items() if count}
    return {"all": sum(each.values()), "forward": forward, "each": each}


def of_model(name: str, tuning: Tuning) -> Iterator[dict[str, Any]]:
    """The rows of a model, alone or with an adapter: one for each precision."""
    kind, shape = SHAPES[name]
    model = _measure.model_of(kind, shape | _measure.ENDLESS | dict(vocab_size=VOCABULARY)).eval()
    add_adapter(model, tuning)
    for precision, autocast in (("float32", False), ("bfloat16 autocast", True)):
        row = {"model": name, "tuning": tuning, "layers": model.config.num_hidden_layers, "precision": precision}
        yield row | {what: a_token(model, autocast, what == "kernels") for what in ("dispatched", "kernels")}


def markdown(results: dict[str, Any]) -> str:
    header = ["model", "layers", "precision", "operations a token", "in the forward", "outside", "kernels on CUDA"]
    cells = []
    for row in results["rows"]:
        all_of_it, forward = row["dispatched"]["all"], row["dispatched"]["forward"]
        counts = (all_of_it, forward, all_of_it - forward, row["kernels"]["all"])
        name = row["model"] if row.get("tuning", "full") == "full" else f"{row['model']}, {row['tuning']}"
        cells.append([name, str(row["layers"]), row["precision"], *(f"{count:,.0f}" for count in counts)])
    return f"{_measure.told(results)}\n\n{_measure.table(header, cells)}"


def arguments(argv: Sequence[str]) -> Any:
    parser = _measure.parser(__doc__, repeats=False)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tuning", nargs="+", choices=TUNINGS, default=list(TUNINGS))
    return parser.parse_args(argv)


def main() -> None:
    given = arguments(sys.argv[1:])
    _measure.threads()
    rows = [row for name in given.model for tuning in given.tuning for row in of_model(name, tuning)]
    results = _measure.surroundings() | {"rows": rows}
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
