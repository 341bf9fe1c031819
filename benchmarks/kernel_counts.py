"""How many kernels does a layer launch in training, how many bytes do they move, and how exact are they?  Not timed.

Forward and backward pass of a known model under bfloat16 autocast, by torch's dispatcher on the CPU: a model of three
layers less a model of one, halved. Views are not counted; `rms_norm` is one operation, and its backward pass two where
its weight is trained, as on CUDA. A kernel reads its inputs and writes its outputs once. Bytes are counted without the
products with weights and with them: a product reads its weights once, so that more tokens are fewer bytes for each.
Errors are those of autocast beside float32, |x - y| / |y|: of the last states, and of gradients, the median over
parameters. With --tuning lora an adapter on all linear layers is trained, and the weights are frozen.
    python benchmarks/kernel_counts.py [--model convgpt smol qwen qwen3] [--tuning full lora] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure
import gpu
import launches

from posttrain.models import simplify_layers
from posttrain.plan.known_models import PUBLISHED

NOTHING = {"_unsafe_view", "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
PRODUCTS = ("mm", "addmm")  # with weights
VOCABULARY = 512  # no count depends on it
MODELS = gpu.MODELS | {"qwen3": PUBLISHED["Qwen/Qwen3-0.6B"]}


class Counted(TorchDispatchMode):
    """Operations and the bytes that they move, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.paused = False

    def add(self, name: str, *tensors: Any) -> None:
        self.count[name] += 1
        self.moved[name] += sum(each.nbytes for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if not (self.paused or func.is_view or name in NOTHING or not func._schema.returns):
            self.add(name, args, kwargs, made)
        return made

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


def norm_as_one(counted: Counted) -> Any:
    """Return `rms_norm` as one operation forward and as many backward as it has gradients."""
    whole = functional.rms_norm

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
            ctx.save_for_backward(x, weight)
            ctx.options = shape, eps
            with counted.pause():
                made = whole(x, shape, weight, eps)
            counted.add("rms_norm", x, weight, made)
            return made

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            shape, eps = ctx.options
            with counted.pause(), torch.enable_grad():
                inputs = [each.detach().requires_grad_() for each in (x, weight) if each is not None]
                made = whole(inputs[0], shape, inputs[1] if weight is not None else None, eps)
                found = torch.autograd.grad(made, inputs, grads[0])
            counted.add("rms_norm_backward", x, weight, *grads, found[0])
            if weight is not None:
                counted.add("rms_norm_backward", x, *grads, found[1])
            return found[0], None, found[1] if weight is not None else None, None

    return lambda x, shape, weight=None, eps=None: Norm.apply(x, shape, weight, eps)


def training_step(layers: int, tokens: int, name: str, tuning: launches.Tuning) -> tuple[Counted, int]:
    """Count a forward and backward pass of the decoder with so many layers over one row.

    Returns:
        Operations of both, and how many of them the forward pass takes.
    """
    kind, sizes = MODELS[name]
    model = _measure.model_of(kind, sizes | _measure.ENDLESS | dict(vocab_size=VOCABULARY, num_hidden_layers=layers))
    launches.add_adapter(model, tuning)
    simplify_layers(model)  # as every phase does
    ids = torch.zeros(1, tokens, dtype=torch.long)
    counted = Counted()
    with counted, patch.object(functional, "rms_norm", norm_as_one(counted)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        forward = counted.count.total()
        states.sum().backward()
    return counted, forward


def a_layer(tokens: int, name: str = "convgpt", tuning: launches.Tuning = "full") -> dict[str, Any]:
    """Operations of a layer, and the bytes that they move for each token, without and with those of the products."""
    (one, first), (three, third) = (training_step(layers, tokens, name, tuning) for layers in (1, 3))
    each = {name: (three.count[name] - one.count[name]) / 2 for name in three.count}
    moved = {name: (three.moved[name] - one.moved[name]) / 2 / tokens for name in three.moved}
    return {
        "model": name,
        "tuning": tuning,
        "kernels": sum(each.values()),
        "forward": (third - first) / 2,
        "KB_a_token_without_products": sum(moved[name] for name in moved if name not in PRODUCTS) / 1000,
        "KB_a_token_with_products": sum(moved.values()) / 1000,
        "each": {name: count for name, count in sorted(each.items(), key=lambda item: -item[1]) if count},
    }


def errors(name: str = "convgpt", seeds: int = 5) -> dict[str, float]:
    """Return the relative errors of states and gradients under autocast, the median over seeds and parameters."""
    kind, sizes = MODELS[name]
    states, gradients = list[float](), list[float]()
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = _measure.model_of(kind, sizes | _measure.ENDLESS | dict(vocab_size=VOCABULARY, num_hidden_layers=4))
        simplify_layers(model)
        with torch.no_grad():
            for each in model.parameters():
                if each.ndim == 1:  # norms, as if they had been trained
                    each.mul_(1 + 0.3 * torch.randn_like(each))
        ids = torch.randint(0, VOCABULARY, (2, 256))
        found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for autocast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                last = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
            if not found:
                weights = torch.randn_like(last)
            used = [each for each in model.base_model.parameters() if each.requires_grad]
            grads = torch.autograd.grad((last * weights).sum(), used, allow_unused=True)
            found.append((last.detach(), [each for each in grads if each is not None]))
        (exact, exact_grads), (rounded, rounded_grads) = found
        states.append(float((rounded - exact).norm() / exact.norm()))
        pairs = zip(rounded_grads, exact_grads, strict=True)
        gradients += [float((mine - right).norm() / right.norm()) for mine, right in pairs]
    return {"error_of_states": statistics.median(states), "error_of_gradients": statistics.median(gradients)}


def markdown(results: dict[str, Any]) -> str:
    names = ("_to_copy", "mul", "rms_norm", "rms_norm_backward", "mm")
    header = ["model", "kernels a layer", *names, "others", "KB a token, without products", "with products"]
    header += ["error of states", "of gradients"]
    lines = []
    for row in results["rows"]:
        each = row["each"]
        others = row["kernels"] - sum(each.get(name, 0) for name in names)
        cells = [row["kernels"], *(each.get(name, 0) for name in names), others]
        cells += [row["KB_a_token_without_products"], row["KB_a_token_with_products"]]
        line = [row["model"] if row["tuning"] == "full" else f"{row['model']}, {row['tuning']}"]
        line += [f"{cell:,.0f}" for cell in cells]
        line += [f"{100 * row[key]:.2f} %" if key in row else "" for key in ("error_of_states", "error_of_gradients")]
        lines.append(line)
    return f"{_measure.told(results)}\n\n{_measure.table(header, lines)}"


def main() -> None:
    parser = _measure.parser(__doc__, repeats=False)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["convgpt"])
    parser.add_argument("--tuning", nargs="+", choices=launches.TUNINGS, default=["full"])
    parser.add_argument("--tokens", type=int, default=1024)
    given = parser.parse_args()
    if given.tokens < 1:
        parser.error("--tokens: at least 1")
    _measure.threads()
    rows = []
    for name in given.model:
        for tuning in given.tuning:
            row = a_layer(given.tokens, name, tuning)
            # errors of a new adapter say nothing: half of its gradients are 0
            rows.append(row | (errors(name) if tuning == "full" else {}))
    results = _measure.surroundings() | {"rows": rows}
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
