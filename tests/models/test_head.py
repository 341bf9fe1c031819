"""Are the log-probs, entropies and gradients of the output layer in parts those of the whole softmax?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.models import output_layer

SIZES = {"states": 5, "vocabulary": 23}


def layer(bias: bool, dtype: torch.dtype = torch.float64, **sizes: int) -> torch.nn.Linear:
    torch.manual_seed(0)
    sizes = SIZES | sizes
    return torch.nn.Linear(sizes["states"], sizes["vocabulary"], bias=bias, dtype=dtype)


def model(output: torch.nn.Linear, cap: float | None, scale: float = 1.0) -> Any:
    """As much of a model as its output layer and what it does to the logits."""
    config = SimpleNamespace(final_logit_softcapping=cap, logit_scale=scale)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config, get_output_embeddings=lambda: output)


def plain(
    output: torch.nn.Linear, cap: float | None, scale: float, hidden: torch.Tensor, tokens: torch.Tensor, heat: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = output(hidden) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    table = (logits / heat).log_softmax(-1)
    return table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)


@given(
    tokens=st.lists(st.integers(0, SIZES["vocabulary"] - 1), max_size=9),
    columns=st.integers(1, 30),
    bias=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([1.0, 0.5]),
    heat=st.sampled_from([1.0, 0.6]),
    wanted=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)]),
    frozen=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
@settings(deadline=None)  # the first call in a process is slow
def test_equals_the_whole_softmax(
    tokens: list[int],
    columns: int,
    bias: bool,
    cap: float | None,
    scale: float,
    heat: float,
    wanted: tuple[float, float],
    frozen: bool,
    dtype: torch.dtype,
) -> None:
    """Values and gradients, in float32 whatever the parts are (by TRL); of frozen weights (LoRA) there are none."""
    output = layer(bias, dtype).requires_grad_(not frozen)
    index = torch.tensor(tokens, dtype=torch.long)
    pull = torch.linspace(-1, 2, len(tokens), dtype=dtype)
    found, tolerance = [], 1e-4 if dtype == torch.float32 else 1e-10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_layer, "VOCABULARY_CHUNK", {"cpu": columns, "cuda": columns})
        for own in (True, False):
            hidden = torch.randn(len(tokens), SIZES["states"], dtype=dtype, generator=torch.Generator())
            hidden.requires_grad_()
            output.zero_grad()
            if own:
                values = output_layer.head_logprobs(model(output, cap, scale), hidden, index, heat)
            else:
                values = plain(output, cap, scale, hidden, index, heat)
            loss: Any = sum(w * (value * pull).sum() for w, value in zip(wanted, values, strict=True) if w)
            loss.backward()
            found.append([*values, hidden.grad, *(p.grad for p in output.parameters() if not frozen)])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance / 10)


def test_large_logits_cost_the_entropy_no_precision() -> None:
    output = layer(False, torch.float32, states=64, vocabulary=5000)
    hidden, tokens = 40 * torch.randn(200, 64, generator=torch.Generator().manual_seed(1)), torch.arange(200)
    _, entropy = output_layer.head_logprobs(model(output, None), hidden, tokens)
    expected = plain(output.double(), None, 1.0, hidden.double(), tokens, 1.0)[1]
    assert (entropy - expected).abs().max() < 1e-4 < expected.max()
