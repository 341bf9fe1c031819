"""Are advantages, filters and losses what their papers say?  Each against a slow reference written as loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.starpo.advantages import group_moments, grpo
from posttrain.starpo.filters import keep_groups
from posttrain.starpo.losses import kl_k3, ppo_clip

rewards_and_groups = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=1, max_size=40)


def slow_grpo(rewards: list[float], groups: list[int], std: bool) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(siblings) / len(siblings)
        spread = math.sqrt(sum((r - mean) ** 2 for r in siblings) / max(1, len(siblings) - 1))
        out.append((reward - mean) / (spread + 1e-4) if std else reward - mean)
    return out


@given(rewards_and_groups, st.booleans())
def test_grpo_is_the_loop(rows: list[tuple[float, int]], std: bool) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    fast = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), std=std)
    assert np.allclose(fast.numpy(), slow_grpo(rewards, groups, std), atol=1e-6)


@given(rewards_and_groups, st.randoms(use_true_random=False))
def test_grpo_ignores_the_order_of_trajectories(rows: list[tuple[float, int]], random) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    groups = torch.tensor([g for _, g in rows])
    assert torch.allclose(grpo(rewards, groups)[order], grpo(rewards[order], groups[order]), atol=1e-9)


def test_equal_rewards_teach_nothing() -> None:
    rewards = torch.tensor([0.3, 0.3, 0.3, 0.9])
    assert grpo(rewards, torch.tensor([0, 0, 0, 1])).abs().max() < 1e-3
    assert group_moments(rewards, torch.tensor([0, 0, 0, 1]))[1].max() < 1e-6


def slow_top_p(scores: list[float], p: float) -> list[int]:
    kept, cumulative = [], 0.0
    for index in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if scores[index] <= 1e-10 or cumulative >= p * sum(scores) - 0.01:
            break
        kept.append(index)
        cumulative += scores[index]
    return kept


@given(st.lists(st.floats(0, 5).map(lambda x: round(x, 3)), min_size=1, max_size=20), st.floats(0.05, 1))
def test_top_p_is_the_loop(scores: list[float], p: float) -> None:
    fast = keep_groups(torch.tensor(scores, dtype=torch.float64), "top_p", p).tolist()
    slow = slow_top_p(scores, p)
    assert sorted(scores[i] for i in fast) == pytest.approx(sorted(scores[i] for i in slow))


@given(st.lists(st.floats(0, 5), min_size=1, max_size=20), st.floats(0.05, 1))
def test_top_k_keeps_the_best(scores: list[float], share: float) -> None:
    kept = keep_groups(torch.tensor(scores, dtype=torch.float64), "top_k", share).tolist()
    useful = [score for score in scores if score > 1e-10]
    assert len(kept) == min(len(useful), max(1, int(share * len(scores))))
    assert sorted((scores[i] for i in kept), reverse=True) == sorted(useful, reverse=True)[: len(kept)]


def test_constant_groups_can_be_kept_and_nothing_can_be_left() -> None:
    assert keep_groups(torch.zeros(3), "top_k", 1.0).tolist() == []
    assert keep_groups(torch.zeros(3), "none", 1.0, keep_zero=True).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="top_p"):
        keep_groups(torch.ones(3), "best", 0.5)


tokens = st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=30)


@given(tokens)
def test_ppo_clip_is_the_loop(rows: list[tuple[float, float, float]]) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    loss, bites = ppo_clip(new, old, advantage, 0.2, 0.28)
    for i, (n, o, a) in enumerate(rows):
        ratio = math.exp(n - o)
        inside = min(max(ratio, 0.8), 1.28)
        assert loss[i].item() == pytest.approx(-min(ratio * a, inside * a), abs=1e-9)
        assert bites[i].item() == (inside * a < ratio * a)


@given(tokens)
def test_clipped_tokens_have_no_gradient(rows: list[tuple[float, float, float]]) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new.requires_grad_()
    loss, bites = ppo_clip(new, old, advantage, 0.2, 0.28)
    loss.sum().backward()
    assert new.grad is not None
    assert (new.grad[bites] == 0).all()
    free = ~bites
    assert torch.allclose(new.grad[free], -((new - old).exp() * advantage).detach()[free])


@given(st.lists(st.floats(-5, 0), min_size=1, max_size=10))
def test_kl_is_zero_at_home_and_never_negative(logprobs: list[float]) -> None:
    here = torch.tensor(logprobs, dtype=torch.float64)
    assert (kl_k3(here, here) == 0).all()
    assert (kl_k3(here, here - 0.3) > 0).all() and (kl_k3(here, here + 0.3) > 0).all()
