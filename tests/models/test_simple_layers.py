"""Do simplified layers compute what transformers' layers compute, with fewer operations?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_families import SIZES
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.models import compile_layers, simplify_layers
from posttrain.models.layers import SIMPLE

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
IDS = torch.arange(3, 54).view(3, 17)
MASK = (torch.arange(17) >= torch.tensor([[0], [5], [2]])).long()


def pair(kind: str) -> tuple[Any, Any]:
    """A model as transformers makes it, and the same one simplified."""
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 8, "sliding_window": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).train()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    simple = copy.deepcopy(model)
    simplify_layers(simple)
    return model, simple


def run(model: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of a sum of them."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(IDS, attention_mask=MASK).logits.float()
    logits.log_softmax(-1).square().mean().backward()
    return logits.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("kind", FAMILIES)
def test_in_float32_every_number_is_the_same(kind: str) -> None:
    (logits, gradients), (ours, our_gradients) = map(run, pair(kind))
    assert torch.equal(ours, logits)
    for name, gradient in gradients.items():
        if kind == "qwen3":  # its norms of heads add up the same terms in another order
            torch.testing.assert_close(our_gradients[name], gradient)
        else:
            assert torch.equal(our_gradients[name], gradient), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_under_autocast_the_errors_are_not_larger(kind: str) -> None:
    """Beside float32, over all parameters."""
    model, simple = pair(kind)
    logits, gradients = run(model)

    def errors(other: Any) -> tuple[float, float]:
        rounded, rounded_gradients = run(other, torch.bfloat16)
        each = [(rounded_gradients[name] - g).norm() / g.norm() for name, g in gradients.items()]
        return float((rounded - logits).norm()), float(torch.stack(each).mean())

    for ours, theirs in zip(errors(simple), errors(model), strict=True):
        assert 0 < ours < 1.1 * theirs


class Counter(TorchDispatchMode):
    """Counts the operations of norms, rotations, conversions and sums, which read and write all hidden states."""

    names = ("aten.mul", "aten.add", "aten.neg", "aten.cat", "aten._to_copy", "aten.roll", "aten.pow", "aten.mean")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(self.names)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", FAMILIES)
def test_fewer_operations_run(kind: str) -> None:
    counts: list[int] = []
    for model in pair(kind):
        with Counter() as counter, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(IDS, attention_mask=MASK)
        counts.append(counter.count)
    assert counts[1] < 0.85 * counts[0]


def test_classes_keep_their_names_and_are_replaced_once() -> None:
    model, simple = pair("qwen2")
    before = [type(module) for module in simple.modules()]
    simplify_layers(simple)
    assert [type(module) for module in simple.modules()] == before
    assert [kind.__name__ for kind in before] == [type(module).__name__ for module in model.modules()]
    compile_layers(simple, backend="eager")
    simplify_layers(simple)  # a sampler of the model that is trained does it again
    assert all(hasattr(layer, "layer_is_compiled") for layer in simple.model.layers)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_they_compute_the_same(dtype: torch.dtype) -> None:
    """With a backend that keeps torch's own operations: to the bit."""
    _, simple = pair("qwen2")
    logits, gradients = run(simple, dtype)
    compile_layers(simple, backend="aot_eager")
    ours, our_gradients = run(simple, dtype)
    assert torch.equal(ours, logits) and all(torch.equal(our_gradients[name], g) for name, g in gradients.items())


def test_other_models_stay_as_they_are() -> None:
    _, simple = pair("gemma2")
    assert not any(hasattr(module, SIMPLE) for module in simple.modules())
