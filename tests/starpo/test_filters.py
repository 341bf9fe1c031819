"""Do filters keep what they promise?  Each against a slow reference written as loops."""

from __future__ import annotations

import doctest
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import train_phase3_starpo as phase3
from posttrain.config.starpo import StarPORun
from posttrain.starpo import filters
from posttrain.starpo.filters import divide, group_scores, keep_groups, soft_weights
from posttrain.starpo.monitoring.episodes import describe
from posttrain.types import Segment, Trajectory, derive_seed

few = settings(max_examples=60, deadline=None)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


rewards_and_groups = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=1, max_size=40)
scores = st.lists(st.floats(0, 5).map(lambda x: round(x, 3)), min_size=1, max_size=20)
# distinct ones have one order only; some negative, some zero
distinct = st.lists(st.floats(-2, 5).map(lambda x: round(x, 3)), min_size=1, max_size=20, unique=True)


def test_the_examples_hold() -> None:
    assert doctest.testmod(filters).attempted >= 3 and doctest.testmod(filters).failed == 0


# Scores


@few
@given(rewards_and_groups, st.sampled_from(["reward", "entropy", "length"]), st.sampled_from(["", "_std", "_variance"]))
def test_group_scores_are_the_loop(rows: list[tuple[float, int]], name: str, statistic: str) -> None:
    values, group = [v for v, _ in rows], torch.tensor([g for _, g in rows])
    source = {"reward": 0.0, "entropy": 1.0, "length": 2.0}
    columns = [tensor([v + shift for v in values]) * (1 + shift) for shift in source.values()]
    fast = group_scores(name + statistic, dict(zip(source, columns, strict=True)), group, groups=7)
    for number in range(7):
        mine = [
            (v + source[name]) * (1 + source[name]) for v, g in zip(values, group.tolist(), strict=True) if g == number
        ]
        if not mine:
            assert math.isnan(fast[number])
            continue
        mean = sum(mine) / len(mine)
        variance = sum((v - mean) ** 2 for v in mine) / max(1, len(mine) - 1)
        wanted = {"": mean, "_std": math.sqrt(variance), "_variance": variance}[statistic]
        assert fast[number].item() == pytest.approx(wanted, abs=1e-6)


def test_an_unknown_metric_or_one_without_numbers_is_an_error() -> None:
    group, rewards = torch.tensor([0, 0]), tensor([0.0, 1.0])
    for metric in ("variance", "reward_max", "entropy", "length_std"):
        with pytest.raises(ValueError, match="max" if metric == "reward_max" else metric):
            group_scores(metric, {"reward": rewards}, group, groups=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(reward=st.floats(-10, 10), size=st.integers(1, 16))
def test_a_group_of_equal_rewards_is_dropped(dtype: torch.dtype, reward: float, size: int) -> None:
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=dtype)
    group = torch.tensor([0] * size + [1, 1])
    for metric in ("reward_std", "reward_variance"):
        score = group_scores(metric, {"reward": rewards}, group, groups=2)
        assert score[0] == 0
        for strategy in ("none", "top_k", "top_p", "top_p_softmax", "min_p"):
            assert keep_groups(score, strategy, 1.0).tolist() == [1]


# Groups


def slow_order(values: list[float], smallest: bool, keep_zero: bool) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: values[i] if smallest else -values[i])
    return [i for i in order if keep_zero or abs(values[i]) > 1e-10]


@few
@given(distinct, st.floats(0.05, 1), st.booleans(), st.booleans())
def test_every_strategy_is_its_loop(values: list[float], value: float, smallest: bool, keep_zero: bool) -> None:
    order = slow_order(values, smallest, keep_zero)
    sign = -1 if smallest else 1
    linear, soft, cumulative, probability = [], [], 0.0, 0.0
    mass = sum(max(0.0, values[i]) for i in order)
    exponentials = sum(math.exp(sign * values[i]) for i in order)
    for i in order:
        if value >= 1 or cumulative < value * mass - 0.01:
            linear.append(i)
        if value >= 1 or probability < value:
            soft.append(i)
        cumulative += max(0.0, values[i])
        probability += math.exp(sign * values[i]) / exponentials
    best = values[order[0]] if order else 0.0
    slow = {
        "none": order,
        "top_k": order[: max(1, int(value * len(values)))],
        "top_k_abs": order[: max(1, int(10 * value))],
        "top_p": linear,
        "top_p_softmax": soft,
        "min_p": [i for i in order if (values[i] * value <= best if smallest else values[i] >= best * value)],
    }
    for strategy, wanted in slow.items():
        given_value = 10 * value if strategy == "top_k_abs" else value
        kept = keep_groups(tensor(values), strategy, given_value, smallest=smallest, keep_zero=keep_zero)
        assert kept.tolist() == wanted, strategy


@few
@given(st.permutations(range(6)), st.booleans(), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6))
def test_ties_are_broken_as_told(ties: list[int], smallest: bool, values: list[float]) -> None:
    order = sorted(ties, key=lambda i: values[i] if smallest else -values[i])
    kept = keep_groups(tensor(values), "top_k", 0.5, smallest=smallest, keep_zero=True, ties=ties)
    assert kept.tolist() == order[:3]


@pytest.mark.thorough
def test_alike_groups_are_kept_alike_often_and_a_seed_keeps_the_same() -> None:
    def kept(seed: int, step: int) -> list[int]:
        cfg = StarPORun.model_validate(
            {
                "output_dir": "unused",
                "seed": seed,
                "model": {"name_or_path": "unused"},
                "envs": ["frozen_lake"],
                "rollout": {"groups": 8},
                "algorithm": {"filter": {"strategy": "top_k", "value": 0.25}},
            }
        )
        rng = random.Random(derive_seed(seed, step))
        return phase3.score_and_filter(
            cfg,
            [
                [
                    Trajectory(
                        segments=[Segment([5, 5], [False, True], [0.0, 0.0], 0, [0], [1], [2])],
                        turn_rewards=[float(rng.random() < 0.5)],
                        turn_penalties=[0.0],
                        level_seed=derive_seed(seed, "level", step, group),
                    )
                    for _ in range(8)
                ]
                for group in range(8)
            ],
        ).kept

    chosen = [kept(seed, step) for seed in range(4) for step in range(100)]
    share = np.mean([[group < 4 for group in groups] for groups in chosen])
    assert 0.45 < share < 0.55  # two of eight groups, 400 times: standard error .02
    assert chosen == [kept(seed, step) for seed in range(4) for step in range(100)]


def test_constant_groups_can_be_kept_and_nothing_can_be_left() -> None:
    assert keep_groups(torch.zeros(3), "top_k", 1.0).tolist() == []
    assert keep_groups(torch.zeros(3), "none", 1.0, keep_zero=True).tolist() == [0, 1, 2]
    assert keep_groups(torch.full((3,), 1e-3), "top_p", 0.9).tolist() == []  # less than the tolerance
    with pytest.raises(ValueError, match="top_p"):
        keep_groups(torch.ones(3), "best", 0.5)


def test_a_group_without_a_score_is_never_kept() -> None:
    score = torch.tensor([float("nan"), 0.5, 0.0])
    for strategy in ("none", "top_k", "top_k_abs", "top_p", "top_p_softmax", "min_p"):
        for smallest in (True, False):
            kept = keep_groups(score, strategy, 0.5, smallest=smallest, keep_zero=True).tolist()
            assert 0 not in kept and kept
    assert keep_groups(score[:1], "none", 1.0, keep_zero=True).tolist() == []


# Environments

RANKED = [
    {"strategy": "none"}, {"strategy": "top_k", "value": 0.5}, {"strategy": "top_k_abs", "value": 4},
    {"strategy": "top_p", "value": 0.9}, {"strategy": "top_p_softmax", "value": 0.7},
    {"strategy": "min_p", "value": 0.8}, {"strategy": "soft"},
]  # fmt: skip


@pytest.mark.parametrize("chosen", RANKED, ids=lambda chosen: chosen["strategy"])
def test_environments_of_unequal_scale_both_keep_groups(chosen: dict[str, Any]) -> None:
    """FrozenLake gives 0 or 1 and Sokoban up to 10.9: by one raw deviation, only Sokoban's groups would be kept."""
    random_ = random.Random(1)
    groups = [
        [
            Trajectory(
                segments=[Segment([5, 5], [False, True], [0.0, 0.0], 0, [0], [1], [2])],
                turn_rewards=[scale * (member < wins) + 0.01 * random_.random()],
                turn_penalties=[0.0],
                env=env,
                level_seed=number,
            )
            for member in range(8)
        ]
        for number, (env, scale, wins) in enumerate(
            (env, scale, wins) for wins in (1, 2, 3, 4) for env, scale in (("frozen_lake", 1.0), ("sokoban", 10.9))
        )
    ]
    scored = phase3.score_and_filter(
        StarPORun.model_validate(
            {
                "output_dir": "unused",
                "model": {"name_or_path": "unused"},
                "envs": ["frozen_lake", "sokoban"],
                "rollout": {"groups": 8},
                "algorithm": {"filter": chosen},
            }
        ),
        groups,
    )
    kept = [groups[number][0].env for number in scored.kept]
    row = describe(groups, scored.std, scored.kept)
    for name in ("frozen_lake", "sokoban"):
        assert row[f"rollout/{name}/kept_groups"] == kept.count(name) > 0
    # softmax is not a matter of shares: a scale of its own keeps fewer
    assert kept.count("frozen_lake") == kept.count("sokoban") or chosen["strategy"] == "top_p_softmax"
    assert row["rollout/sokoban/in_group_std"] > 10 * row["rollout/frozen_lake/in_group_std"]
    lake, boxes = scored.weights[::2], scored.weights[1::2]
    assert lake == pytest.approx(boxes, abs=0.05)


@few
@given(distinct, st.floats(0.05, 1), st.booleans(), st.randoms(use_true_random=False))
def test_each_environment_is_filtered_as_if_it_were_alone(
    values: list[float], value: float, smallest: bool, random_: random.Random
) -> None:
    envs = [random_.randrange(3) for _ in values]
    for strategy in ("none", "top_p", "top_p_softmax", "min_p"):
        kept = keep_groups(tensor(values), strategy, value, smallest=smallest, env_G=envs).tolist()
        for env in set(envs):
            own = [i for i, e in enumerate(envs) if e == env]
            alone = keep_groups(tensor([values[i] for i in own]), strategy, value, smallest=smallest)
            assert [i for i in kept if envs[i] == env] == [own[i] for i in alone.tolist()], strategy
        one = keep_groups(tensor(values), strategy, value, smallest=smallest)
        same = keep_groups(tensor(values), strategy, value, smallest=smallest, env_G=[7] * len(envs))
        assert torch.equal(one, same)


@few
@given(distinct, st.integers(1, 12), st.randoms(use_true_random=False))
def test_top_k_keeps_the_best_of_each_environment(values: list[float], total: int, random_: random.Random) -> None:
    envs = [random_.randrange(3) for _ in values]
    useful = {env: [i for i in slow_order(values, False, False) if envs[i] == env] for env in envs}
    kept = keep_groups(tensor(values), "top_k_abs", total, env_G=envs).tolist()
    able = [env for env in useful if useful[env]]
    assert len(kept) == min(max(total, len(able)), sum(map(len, useful.values())))
    for env in able:
        own = [i for i in kept if envs[i] == env]
        assert own == useful[env][: len(own)] and own
    share = len(kept) / len(values)
    assert keep_groups(tensor(values), "top_k", share, env_G=envs).tolist() == kept or int(share * len(values)) < total


@few
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4), st.integers(1, 30))
def test_kept_groups_are_divided_by_the_highest_averages(counts: list[tuple[int, int]], total: int) -> None:
    played, candidates = [a for a, _ in counts], [min(a, b) for a, b in counts]
    averages = [
        (-(math.inf if kept == 0 else played[env] / (kept + 1)), kept, env)
        for env in range(len(played))
        for kept in range(candidates[env])
    ]
    chosen = [env for *_, env in sorted(averages)[: max(total, sum(c > 0 for c in candidates))]]
    found = divide(total, played, candidates)
    wanted = [chosen.count(env) for env in range(len(played))]
    assert sum(found) == len(chosen) and [n > 0 for n in found] == [n > 0 for n in wanted]
    # of equal averages another one may have been taken: what counts is which averages were
    assert sorted(played[e] / (k + 1) for e, n in enumerate(found) for k in range(1, n)) == pytest.approx(
        sorted(played[e] / (k + 1) for e, n in enumerate(wanted) for k in range(1, n))
    )


# Weights


@few
@given(scores)
def test_soft_weights_are_the_loop(values: list[float]) -> None:
    top = max(values)
    wanted = [v / top if top > 1e-10 else 0.0 for v in values]
    assert np.allclose(soft_weights(tensor(values)).numpy(), wanted, atol=1e-6)
    assert soft_weights(tensor([math.nan, 2.0, 1.0])).tolist() == [0.0, 1.0, 0.5]
    assert soft_weights(tensor([])).tolist() == []
    assert soft_weights(tensor([1.0, 2.0, 9.0, 3.0]), [0, 0, 1, 1]).tolist() == pytest.approx([0.5, 1, 1, 1 / 3])
