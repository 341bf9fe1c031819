"""Are advantages what their papers say?  Each against a slow reference written as loops, on ragged batches."""

from __future__ import annotations

import doctest
import math
import time
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from trl.trainer.utils import nanstd

from posttrain.starpo import advantages
from posttrain.starpo.advantages import (
    arpo,
    bilevel_gae,
    brpo,
    gae,
    gigpo,
    group_moments,
    grpo,
    reinforce_pp,
    returns_to_go,
    rloo,
    state_buckets,
    token_rewards,
    whiten,
)

few = settings(max_examples=40, deadline=None)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class Batch:
    """Two episodes of a group, the first of two turns: group [0, 0], tokens [[3, 1], [2]], rewards [[0, 1], [0]]."""

    group: list[int]  # [B]
    tokens: list[list[int]]  # [B][turns] sampled tokens of each turn
    rewards: list[list[float]]  # [B][turns]
    states: list[list[str]]  # [B][turns]
    values: list[list[list[float]]]  # [B][turns][tokens]

    def returns(self) -> list[float]:
        return [sum(rewards) for rewards in self.rewards]

    def tensors(self) -> dict[str, torch.Tensor]:
        turns = [(b, n) for b, row in enumerate(self.tokens) for n in range(len(row))]
        return {
            "rewards_B": tensor(self.returns()),
            "group_B": torch.tensor(self.group),
            "rewards_N": tensor([r for row in self.rewards for r in row]),
            "episode_N": torch.tensor([b for b, _ in turns], dtype=torch.long),
            "turn_S": torch.tensor([i for i, (b, n) in enumerate(turns) for _ in range(self.tokens[b][n])]),
            "episode_S": torch.tensor([b for b, n in turns for _ in range(self.tokens[b][n])]),
            "values_S": tensor([v for row in self.values for turn in row for v in turn]),
        }


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged episodes of interleaved groups; most turns have reward 0, as in FrozenLake."""
    group = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
    tokens = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)) for _ in group]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Batch(
        group=group,
        tokens=tokens,
        rewards=[[float(rng.choice([0, 0, 0, 1, -0.1, rng.normal()])) for _ in row] for row in tokens],
        states=[[str(rng.choice(["P _ _", "_ P _", "_ _ P"])) for _ in row] for row in tokens],
        values=[[rng.normal(size=count).tolist() for count in row] for row in tokens],
    )


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def same(fast: torch.Tensor, slow: object) -> bool:
    return np.allclose(fast.numpy(), np.array(slow), rtol=0, atol=1e-6)


def normalised(values: list[float], keys: list, std: bool) -> list[float]:
    """Each value less the mean of those with its key, over their sample deviation."""
    out = []
    for value, key in zip(values, keys, strict=True):
        samples = [v for v, k in zip(values, keys, strict=True) if k == key]
        mean = sum(samples) / len(samples)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in samples) / max(1, len(samples) - 1))
        out.append((value - mean) / (deviation + 1e-4) if std else value - mean)
    return out


def discounted(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma**k * r for k, r in enumerate(rewards[start:])) for start in range(len(rewards))]


def test_the_examples_hold() -> None:
    assert doctest.testmod(advantages).attempted >= 7 and doctest.testmod(advantages).failed == 0


# Per episode


@few
@given(batches(), st.booleans())
def test_grpo_and_brpo_are_the_loop(batch: Batch, std: bool) -> None:
    t, returns = batch.tensors(), batch.returns()
    assert same(grpo(t["rewards_B"], t["group_B"], std=std), normalised(returns, batch.group, std))
    assert same(brpo(t["rewards_B"], std=std), normalised(returns, [0] * len(returns), std))
    assert torch.equal(arpo(t["rewards_B"]), t["rewards_B"])
    env = [group % 2 for group in batch.group]
    assert same(brpo(t["rewards_B"], torch.tensor(env), std=std), normalised(returns, env, std))


def test_grpo_is_that_of_trl() -> None:
    rewards = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    assert torch.allclose(grpo(rewards.flatten(), torch.arange(6).repeat_interleave(4)), theirs.flatten(), atol=1e-9)


@few
@given(batches())
def test_rloo_is_the_loop(batch: Batch) -> None:
    t, returns = batch.tensors(), batch.returns()
    slow = []
    for b, group in enumerate(batch.group):
        others = [r for i, r in enumerate(returns) if i != b and batch.group[i] == group]
        slow.append(returns[b] - sum(others) / len(others) if others else 0.0)
    assert same(rloo(t["rewards_B"], t["group_B"]), slow)


@few
@given(batches(), st.booleans())
def test_reinforce_pp_whitens_over_the_tokens(batch: Batch, baseline: bool) -> None:
    t, scores = batch.tensors(), batch.returns()
    if baseline:
        scores = normalised(scores, batch.group, std=False)
    everywhere = [score for score, tokens in zip(scores, batch.tokens, strict=True) for _ in range(sum(tokens))]
    mean = sum(everywhere) / len(everywhere)
    variance = sum((s - mean) ** 2 for s in everywhere) / max(1, len(everywhere) - 1)
    slow = [(s - mean) / math.sqrt(variance + 1e-8) for s in everywhere]
    fast = reinforce_pp(t["rewards_B"], t["group_B"], t["episode_S"], baseline=baseline)
    assert np.allclose(fast.numpy(), slow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(reward=st.floats(-10, 10), size=st.integers(1, 16))
def test_equal_rewards_teach_exactly_nothing(dtype: torch.dtype, reward: float, size: int) -> None:
    rewards, group = torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.long)
    assert (group_moments(rewards, group)[1] == 0).all()
    tokens = torch.arange(size).repeat_interleave(torch.arange(1, size + 1))
    for advantage in (
        grpo(rewards, group), grpo(rewards, group, std=False), rloo(rewards, group), brpo(rewards),
        reinforce_pp(rewards, group, tokens, baseline=True),
    ):  # fmt: skip
        assert (advantage == 0).all()


def test_nothing_in_nothing_out_and_no_reward_is_missing() -> None:
    nothing, nobody = tensor([]), torch.tensor([], dtype=torch.long)
    for function in (grpo, rloo):
        assert function(nothing, nobody).shape == (0,)
    assert brpo(nothing).shape == returns_to_go(nothing, nobody, 1.0).shape == (0,)
    with pytest.raises(AssertionError):
        grpo(tensor([0.0, math.nan]), torch.tensor([0, 0]))


# Per turn


@few
@given(batches(), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_returns_to_go_is_the_loop(batch: Batch, gamma: float) -> None:
    t = batch.tensors()
    slow = flat([discounted(rewards, gamma) for rewards in batch.rewards])
    assert same(returns_to_go(t["rewards_N"], t["episode_N"], gamma), slow)
    gaps = t["episode_N"] * 3 + 5  # numbers of episodes need not be dense
    assert same(returns_to_go(t["rewards_N"], gaps, gamma), slow)


def test_turns_of_one_episode_stand_together() -> None:
    with pytest.raises(AssertionError, match="together"):
        returns_to_go(torch.zeros(3), torch.tensor([0, 1, 0]), 1.0)


@few
@given(batches(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_gigpo_is_the_loop(batch: Batch, std: bool, weight: float) -> None:
    t = batch.tensors()
    episode = normalised(batch.returns(), batch.group, std)
    keys = [(batch.group[b], state) for b, row in enumerate(batch.states) for state in row]
    step = normalised(flat([discounted(rewards, 0.95) for rewards in batch.rewards]), keys, std)
    slow = [episode[b] + weight * step[i] for i, b in enumerate(t["episode_N"].tolist())]
    bucket = state_buckets([s for row in batch.states for s in row], t["group_B"][t["episode_N"]])
    fast = gigpo(
        t["rewards_B"], t["group_B"], t["rewards_N"], t["episode_N"], bucket, weight=weight, gamma=0.95, std=std
    )
    assert same(fast, slow)


# Per token


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float, cut: bool = False) -> list[float]:
    """The sum of the definition: A_t = sum over k of (gamma lam)^k delta_t+k, where nothing follows the last token.

    cut: something would have followed, as much as makes the last token worth what was expected of it.
    """
    after = [*values[1:], (values[-1] - rewards[-1]) / gamma if cut and gamma else 0.0]
    delta = [r + gamma * v - value for r, v, value in zip(rewards, after, values, strict=True)]
    if cut and not gamma:  # nothing that follows counts at all
        delta[-1] = 0.0
    return discounted(delta, gamma * lam)


def turn_end_rewards(batch: Batch, b: int) -> list[list[float]]:
    """[turns][tokens] of one episode: the turn's reward on its last token."""
    rows = [[0.0] * count for count in batch.tokens[b]]
    for row, reward in zip(rows, batch.rewards[b], strict=True):
        row[-1] += reward
    return rows


factors = st.sampled_from([(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)])


@few
@given(batches(), factors, st.sampled_from([0.0, 0.5]), st.randoms(use_true_random=False))
def test_gae_is_the_loop_and_an_episode_that_is_cut_off_is_worth_what_the_critic_expects(
    batch: Batch, factor: tuple[float, float], share: float, random: Random
) -> None:
    t = batch.tensors()
    cut = [random.random() < share for _ in batch.group]
    rewards_S, cut_S = token_rewards(t["rewards_N"], t["turn_S"]), torch.tensor(cut)[t["episode_S"]]
    rewards = [flat(turn_end_rewards(batch, b)) for b in range(len(batch.group))]
    assert same(rewards_S, flat(rewards))
    slow = flat([slow_gae(r, flat(v), *factor, c) for r, v, c in zip(rewards, batch.values, cut, strict=True)])
    advantages_S, returns_S = gae(rewards_S, t["values_S"], t["episode_S"], *factor, cut_S if share else None)
    assert same(advantages_S, slow)
    assert same(returns_S, np.array(slow) + t["values_S"].numpy())


@few
@given(batches(), factors, st.sampled_from([1.0, 0.95]), st.booleans())
def test_bilevel_gae_is_the_loop(batch: Batch, factor: tuple[float, float], gamma_high: float, cut: bool) -> None:
    t = batch.tensors()
    slow = []
    for b, values in enumerate(batch.values):
        rewards = turn_end_rewards(batch, b)
        ends = [turn[-1] for turn in values]
        high = slow_gae([turn[-1] for turn in rewards], ends, gamma_high, factor[1], cut and b % 2 == 0)
        for turn, reward in enumerate(rewards):
            below = [*reward[:-1], high[turn] + ends[turn]]
            slow += slow_gae(below, values[turn], *factor)
    rewards_S = token_rewards(t["rewards_N"], t["turn_S"])
    advantages_S, returns_S = bilevel_gae(
        rewards_S, t["values_S"], t["turn_S"], t["episode_N"], gamma=factor[0], lam=factor[1], gamma_high=gamma_high,
        cut_S=t["episode_S"] % 2 == 0 if cut else None,
    )  # fmt: skip
    assert same(advantages_S, slow)
    assert same(returns_S, np.array(slow) + t["values_S"].numpy())


def test_a_turn_with_reward_zero_is_a_turn() -> None:
    """RAGEN takes turn ends from non-zero rewards: FrozenLake's only turn would be the last one."""
    turn_S, episode_N = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 0])
    values_S = tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    rewards_S = token_rewards(tensor([0.0, 0.0, 1.0]), turn_S)
    _, returns_S = bilevel_gae(rewards_S, values_S, turn_S, episode_N, gamma=1.0, gamma_high=0.5, lam=1.0)
    assert same(returns_S, [0.25, 0.25, 0.5, 0.5, 1.0, 1.0])  # the low level starts anew in every turn
    _, returns_S = bilevel_gae(0 * rewards_S, values_S, turn_S, episode_N, gamma=1.0, gamma_high=0.5, lam=0.0)
    assert same(returns_S, [0.2, 0.2, 0.4, 0.3, 0.6, 0.0])  # the value of the next turn's end reaches this turn's


def test_every_turn_has_a_token() -> None:
    with pytest.raises(AssertionError, match="every turn"):
        token_rewards(tensor([0.0, 1.0, 0.0]), torch.tensor([0, 0, 2]))
    with pytest.raises(AssertionError, match="every turn"):
        token_rewards(tensor([0.0, 1.0]), torch.tensor([0, 0]))


@few
@given(batches())
def test_whiten_is_the_loop(batch: Batch) -> None:
    values = [v for row in batch.values for turn in row for v in turn]
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    assert same(whiten(tensor(values)), [(v - mean) / math.sqrt(variance + 1e-8) for v in values])
    assert same(whiten(tensor([2.0, 2.0])), [0.0, 0.0])
    random = np.random.default_rng(len(values))
    trained, env = random.random(len(values)) < 0.7, random.integers(0, 2, len(values))
    slow = list(values)
    for i, value in enumerate(values):
        own = [v for v, on, e in zip(values, trained, env, strict=True) if on and e == env[i]]
        if trained[i]:
            mean = sum(own) / len(own)
            variance = sum((v - mean) ** 2 for v in own) / max(1, len(own) - 1)
            slow[i] = (value - mean) / math.sqrt(variance + 1e-8)
    assert np.allclose(whiten(tensor(values), torch.tensor(trained), torch.tensor(env)), slow, rtol=1e-5, atol=1e-5)


# Invariances


@few
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_trajectories_does_not_matter(batch: Batch, random) -> None:
    """Whatever is said of an episode, turn or token is said of it wherever it stands in the batch."""

    def everything(b: Batch) -> list[list[np.ndarray]]:
        """By episode: what each estimator gives it."""
        t = b.tensors()
        rewards_S = token_rewards(t["rewards_N"], t["turn_S"])
        bucket = state_buckets([s for row in b.states for s in row], t["group_B"][t["episode_N"]])
        per_episode = [
            grpo(t["rewards_B"], t["group_B"]), rloo(t["rewards_B"], t["group_B"]), brpo(t["rewards_B"]),
        ]  # fmt: skip
        per_turn = [gigpo(t["rewards_B"], t["group_B"], t["rewards_N"], t["episode_N"], bucket)]
        high = bilevel_gae(rewards_S, t["values_S"], t["turn_S"], t["episode_N"], gamma=0.9, gamma_high=0.8, lam=0.7)
        plus = reinforce_pp(t["rewards_B"], t["group_B"], t["episode_S"])
        per_token = [whiten(gae(rewards_S, t["values_S"], t["episode_S"], 0.9, 0.8)[0]), *high, plus]
        rows = [x[:, None] for x in per_episode]
        rows += [x.split([len(r) for r in b.rewards]) for x in per_turn]
        rows += [x.split([sum(r) for r in b.tokens]) for x in per_token]
        return [[row[i].numpy() for row in rows] for i in range(len(b.group))]

    order = list(range(len(batch.group)))
    random.shuffle(order)
    moved = Batch(*[[column[i] for i in order] for column in vars(batch).values()])
    here, there = everything(batch), everything(moved)
    for position, number in enumerate(order):
        for one, other in zip(here[number], there[position], strict=True):
            assert np.allclose(one, other, atol=1e-6)


def test_a_large_batch_is_cheap() -> None:
    rng = torch.Generator().manual_seed(0)
    episode_N = torch.arange(5000) * 1024 // 5000
    turn_S = torch.arange(100_000) // 20
    group_B = torch.arange(1024) // 16
    rewards_N, values_S = torch.randn(5000, generator=rng), torch.randn(100_000, generator=rng)
    start = time.process_time()
    rewards_S = token_rewards(rewards_N, turn_S)
    gae(rewards_S, values_S, episode_N[turn_S], 1.0, 0.95)
    bilevel_gae(rewards_S, values_S, turn_S, episode_N, gamma=1.0, gamma_high=0.95, lam=0.95)
    gigpo(rewards_N[:1024], group_B, rewards_N, episode_N, turn_S[:5000])
    grpo(rewards_N[:1024], group_B)
    assert time.process_time() - start < 2
