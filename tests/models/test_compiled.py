"""Do compiled layers compute what the layers compute?  With a backend that keeps torch's own operations: to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from model_families import SIZES
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.models import compile_layers, compiled, convgpt, layers_are_compiled, trained_states

ROWS = [[3 + (7 * i + row) % 500 for i in range(9 + 4 * row)] for row in range(3)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget compiled code before and after: how many forms there are is counted."""
    forget()
    yield
    forget()


def forget() -> None:
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    counters.clear()


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "convgpt":
        sizes: Any = SIZES | {"hidden_size": 256}
        return convgpt.ConvGPTForCausalLM(convgpt.ConvGPTConfig(**sizes)).train()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | {"head_dim": 8})).train()


def gradients(model: Any, rows: list[list[int]] = ROWS, bf16: bool = True) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        states, _ = trained_states(model, rows, [[False] * 3 + [True] * (len(row) - 3) for row in rows])
        states.float().square().mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("kind", "recomputed"),
    [
        ("llama", False),
        ("convgpt", True),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("llama", True), ("convgpt", False), ("qwen3", True), ("gemma2", False), ("gemma2", True))
        ),
    ],
)
def test_gradients_are_those_of_the_layers(kind: str, recomputed: bool) -> None:
    plain = model_of(kind)
    if recomputed:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    net = copy.deepcopy(plain)
    compile_layers(net, backend="aot_eager")
    for rows in (ROWS, ROWS[:2], ROWS[:1]):
        assert equal(gradients(plain, rows), gradients(net, rows))
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert not counters["graph_break"], "a layer is compiled whole"


def test_layers_and_lengths_share_what_is_compiled() -> None:
    net = model_of("llama")
    compile_layers(net, backend="aot_eager")
    for length in (5, 8, 13, 20):
        gradients(net, [row[:length] for row in ROWS[1:]])
    assert counters["stats"]["unique_graphs"] == 1


def test_a_copy_has_its_own_weights() -> None:
    """The reference of phase 2 is a copy; compiled code must not read the weights of the first model."""
    net = model_of("llama")
    compile_layers(net, backend="aot_eager")
    gradients(net)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(0.5)
    plain = model_of("llama")
    with torch.no_grad():
        for each in plain.parameters():
            each.mul_(0.5)
    assert equal(gradients(other), gradients(plain))


def test_adapters_are_compiled_with_their_layers() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(compiles: bool) -> dict[str, torch.Tensor]:
        net: Any = get_peft_model(model_of("llama"), LoraConfig(r=2, target_modules="all-linear"))
        for name, each in net.named_parameters():
            if "lora_B" in name:
                torch.nn.init.ones_(each)
        if compiles:
            compile_layers(net, backend="aot_eager")
        return gradients(net.get_base_model())

    assert equal(adapted(True), adapted(False))


def test_generation_runs_the_layers_as_they_are() -> None:
    net = model_of("llama").eval()
    ids = torch.tensor([ROWS[0]])
    expected = net.generate(ids, max_new_tokens=4, do_sample=False)
    compile_layers(net, backend="aot_eager")
    assert torch.equal(net.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert not counters["stats"]


def test_layers_keep_their_names_and_are_compiled_once() -> None:
    """FSDP2's wrapping looks for classes by name."""
    net = model_of("llama")
    compile_layers(net, backend="aot_eager")
    kind = type(net.model.layers[0])
    compile_layers(net, backend="aot_eager")
    assert type(net.model.layers[0]) is kind
    assert kind.__name__ == "LlamaDecoderLayer"


def test_an_error_of_a_layer_is_its_own() -> None:
    net = model_of("llama")
    compile_layers(net, backend="aot_eager")
    net.model.layers[0].mlp.down_proj.weight.data = torch.zeros(32, 47)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gradients(net)


def test_where_compilation_fails_the_layers_run_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no such kernel")

    plain, net = model_of("llama"), model_of("llama")
    compile_layers(net, backend=broken)  # type: ignore[arg-type]
    assert equal(gradients(plain), gradients(net))
    gradients(net)
    said = capsys.readouterr()
    assert (said.out + said.err).count("LlamaDecoderLayer is not compiled") == 1
    assert "no such kernel" in said.out + said.err
    assert not layers_are_compiled(net)


def test_whether_layers_are_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model_of("llama")
    assert not layers_are_compiled(net)
    compile_layers(net, backend="aot_eager")
    gradients(net)
    assert layers_are_compiled(net) and layers_are_compiled(copy.deepcopy(net))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not layers_are_compiled(net)


def test_where_the_backward_pass_cannot_be_compiled_the_layers_run_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def as_it_is(graph: Any, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no such kernel")

    plain, net = model_of("llama"), model_of("llama")
    backend: Any = aot_autograd(fw_compiler=as_it_is, bw_compiler=broken)
    compile_layers(net, backend=backend)
    assert equal(gradients(plain), gradients(net))
    said = capsys.readouterr()
    assert (said.out + said.err).count("LlamaDecoderLayer is not compiled") == 1
    assert "no such kernel" in said.out + said.err


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "convgpt"])
def test_gradients_are_as_exact_as_those_of_the_layers(kind: str, device: str = "cpu") -> None:
    """Under autocast, beside float32: no parameter's error is larger but by chance.

    ConvGPT's `norm_emb.g` is a single number: its error is not a mean over many, so that there is more chance in it.
    """
    exact, plain, net = (model_of(kind).to(device) for _ in range(3))
    compile_layers(net, deterministic=True)
    errors: dict[str, list[tuple[float, float]]] = {}
    for shift in range(8):
        rows = [[3 + (token + 31 * shift) % 500 for token in row] for row in ROWS]
        truth, eager, fused = gradients(exact, rows, bf16=False), gradients(plain, rows), gradients(net, rows)
        for name, each in truth.items():
            pair = float((eager[name] - each).norm()), float((fused[name] - each).norm())
            errors.setdefault(name, []).append(pair)
    ratios = {
        name: (sum(f**2 for _, f in pairs) / sum(e**2 for e, _ in pairs)) ** 0.5 for name, pairs in errors.items()
    }
    assert counters["stats"]["unique_graphs"] > 0
    assert sorted(ratios.values())[len(ratios) // 2] <= 1.02, ratios
    alone = ratios.pop("model.norm_emb.g", 1.0)
    assert alone <= 3 and max(ratios.values()) <= 1.25, ratios
