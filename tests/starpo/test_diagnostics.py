"""Are the figures of collapse what their papers say?  Each against a slow reference written as loops."""

from __future__ import annotations

import doctest
import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.starpo import diagnostics
from posttrain.starpo.diagnostics import information, regime, z_score


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int], list[int]]:
    """Scores, own columns, lengths, weights; few distinct scores, so that ties are common."""
    columns, rows = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    score = st.sampled_from([-0.5, -1.0, -3.0, -20.0, -400.0])
    return (
        draw(st.lists(st.lists(score, min_size=columns, max_size=columns), min_size=rows, max_size=rows)),
        draw(st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows)),
        draw(st.lists(st.integers(1, 300), min_size=rows, max_size=rows)),
        draw(st.lists(st.integers(1, 4), min_size=columns, max_size=columns)),
    )


def computed(scores, own, lengths, weights, scale: float | None = None) -> tuple[dict[str, float], float]:
    table = torch.tensor(scores, dtype=torch.float64)
    return information(table, torch.tensor(own), torch.tensor(lengths), torch.tensor(weights), scale)


def slow_marginal(scores: list[float], weights: list[int]) -> float:
    return float(np.logaddexp.reduce([s + math.log(w / sum(weights)) for s, w in zip(scores, weights, strict=True)]))


def slow_retrieval(scores: list[float], own: int, k: int) -> float:
    """Among all ways to line up the columns, best first: how often is the own one among the first k?"""
    orders = [o for o in permutations(range(len(scores))) if [scores[i] for i in o] == sorted(scores, reverse=True)]
    return sum(own in order[:k] for order in orders) / len(orders)


@settings(deadline=None, max_examples=60)
@given(batches())
def test_every_figure_is_the_loop(batch: tuple) -> None:
    scores, own, lengths, weights = batch
    row, scale = computed(*batch, scale=0.7)
    rows = list(zip(scores, own, lengths, strict=True))
    matched = [s[o] for s, o, _ in rows]
    marginal = [slow_marginal(s, weights) for s, _, _ in rows]
    token_matched = [s[o] / n for s, o, n in rows]
    token_marginal = [slow_marginal([x / n for x in s], weights) for s, _, n in rows]
    gained = float(np.mean(np.subtract(token_matched, token_marginal)))
    expected = {
        "mi": np.mean(np.subtract(matched, marginal)),
        "mi_token": np.mean([(a - b) / n for a, b, n in zip(matched, marginal, lengths, strict=True)]),
        "mi_tempered": gained,
        "mi_z": gained / (np.std(token_marginal) + 0.001),
        "mi_z_ema": gained / (0.9 * 0.7 + 0.1 * np.std(token_marginal) + 0.001),
        "conditional_entropy": -np.mean(matched),
        "conditional_entropy_token": -np.mean(token_matched),
        "marginal_entropy": -np.mean(marginal),
        "marginal_entropy_token": -np.mean([b / n for b, n in zip(marginal, lengths, strict=True)]),
        "retrieval_chance": 1 / len(weights),
    }
    for k in (1, 2, 4, 8):
        expected[f"retrieval_{k}"] = np.mean([slow_retrieval(s, o, k) for s, o, _ in rows])
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert scale == pytest.approx(0.9 * 0.7 + 0.1 * np.std(token_marginal))


@settings(deadline=None)
@given(batches())
def test_merged_prompts_change_no_information(batch: tuple) -> None:
    scores, own, lengths, weights = batch
    merged, _ = computed(*batch)
    wide = [[x for x, w in zip(row, weights, strict=True) for _ in range(w)] for row in scores]
    first = np.cumsum([0, *weights]).tolist()
    apart, _ = computed(wide, [first[o] for o in own], lengths, [1] * sum(weights))
    for name in merged:
        if not name.startswith("retrieval"):  # where a merged prompt is one answer, not several that look alike
            assert merged[name] == pytest.approx(apart[name], rel=1e-6, abs=1e-9), name


def test_the_scale_is_passed_on() -> None:
    torch.manual_seed(0)
    scale, slow = None, None
    for _ in range(4):
        matched, marginal = torch.randn(6), torch.randn(6) * 3
        sigma = float(np.std(marginal.numpy()))
        slow = sigma if slow is None else 0.9 * slow + 0.1 * sigma
        z, z_ema, scale = z_score(matched, marginal, scale)
        gained = float((matched - marginal).mean())
        assert (z, z_ema) == (pytest.approx(gained / (sigma + 1e-3)), pytest.approx(gained / (slow + 1e-3)))
    assert scale == pytest.approx(slow)


def test_the_four_regimes() -> None:
    start = {"start_entropy": 2.0, "start_mi": 1.0}
    assert regime(1.8, 0.9, **start) == "diverse"
    assert regime(1.8, 0.2, **start) == "template collapse"
    assert regime(0.3, 0.9, **start) == "compressed"
    assert regime(0.3, 0.2, **start) == "low-entropy collapse"
    assert regime(2.0, 0.0, start_entropy=2.0, start_mi=-0.1) == "template collapse"


def test_the_examples_run() -> None:
    assert doctest.testmod(diagnostics).failed == 0
