"""Do the alarms fire before a run is lost, stay silent on healthy ones, and survive a resume at any row?"""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.starpo import alarms
from posttrain.starpo.alarms import ADVICE, Alarm, rollback, watch

Row = dict[str, float]


def raised(rows: Iterable[Row], **limits: float) -> list[Alarm]:
    state: dict[str, Any] = {}
    found: list[Alarm] = []
    for step, row in enumerate(rows, 1):
        new, state = watch(state, step, row, limits)
        found += new
    return found


def names(rows: Iterable[Row]) -> list[str]:
    return [alarm.name for alarm in raised(rows)]


def repeat(row: Row, count: int) -> list[Row]:
    return [dict(row) for _ in range(count)]


def line(start: float, end: float, count: int) -> list[float]:
    return np.linspace(start, end, count).tolist()


HEALTHY: Row = {
    "rollout/in_group_std": 0.4,
    "rollout/success": 0.4,
    "rollout/invalid_turns": 0.02,
    "rollout/repeated_share": 0.1,
    "rollout/kept_groups": 8,
    "policy/entropy": 0.4,
    "policy/grad_norm": 0.2,
    "policy/kl_to_old": 0.005,
    "policy/clip_fraction": 0.01,
    "policy/sampler_gap": 2e-5,
    "policy/skipped_steps": 0,
}

# ------------------------------------------------------------------------------------------------- runs that collapse


def echo_trap() -> list[Row]:
    """As RAGEN draws it: the spread falls from step 20 on, reward from step 60 on, gradients burst after that."""
    std = line(0.4, 0.4, 20) + line(0.4, 0.04, 20) + line(0.04, 0.02, 60)
    success = line(0.3, 0.55, 40) + line(0.55, 0.55, 20) + line(0.55, 0.05, 40)
    entropy = line(0.5, 0.4, 20) + line(0.4, 0.05, 30) + line(0.05, 0.05, 50)
    norm = [0.2] * 70 + [5.0] + [0.2] * 29
    return [
        HEALTHY | {"rollout/in_group_std": s, "rollout/success": p, "policy/entropy": h, "policy/grad_norm": g}
        for s, p, h, g in zip(std, success, entropy, norm, strict=True)
    ]


def test_an_echo_trap_is_recognised_before_reward_falls() -> None:
    found = {alarm.name: alarm for alarm in raised(echo_trap())}
    assert next(iter(found)) == "variance_collapse"
    assert {"variance_gone", "entropy_collapse", "success_drop", "gradient_spike"} <= found.keys()
    first = found["variance_collapse"]
    assert 20 < first.step < 45 < 60 < found["success_drop"].step
    assert found["variance_gone"].severity == "stop" and found["variance_gone"].step < 60
    assert "std fell to 2" in first.message and " steps, with success at 5" in first.message
    assert "starpo-s" in first.remedy and "rollout.temperature" in first.remedy
    assert str(first).startswith(f"step {first.step}: In-group reward std fell to")


def test_the_words_say_how_far_and_how_fast() -> None:
    rows = repeat(HEALTHY, 20) + [HEALTHY | {"rollout/in_group_std": s} for s in [*line(0.36, 0.04, 9), 0.04]]
    (alarm,) = raised(rows)
    assert alarm.step == 30
    assert alarm.message.startswith("In-group reward std fell to 22% of its start in 6 steps, with success at 40%")


def test_template_collapse_is_varied_thoughts_without_a_prompt() -> None:
    def rows(scope: str, z: list[float], entropy: list[float]) -> Iterator[Row]:
        for a, b in zip(z, entropy, strict=True):
            yield {f"collapse/{scope}/mi_z_ema": a, f"collapse/{scope}/conditional_entropy_token": b} | HEALTHY
            yield from repeat(HEALTHY, 4)

    falling = line(2.0, 2.0, 4) + line(2.0, 0.2, 6)
    found = raised(rows("trajectory", falling, [1.0] * 10))
    assert [alarm.name for alarm in found] == ["template_collapse/trajectory"] and "top_p" in found[0].remedy
    assert names(rows("first_turn", falling, [1.0] * 10)) == ["template_collapse/first_turn"]
    assert names(rows("trajectory", falling, line(1.0, 0.1, 10))) == []  # entropy falls along: another regime
    assert names(rows("trajectory", [0.02, 0.03, 0.01, 0.0, -0.01, 0.0], [1.0] * 6)) == []  # never was any
    assert names(rows("trajectory", [2.0, 2.1, 1.9, 0.5, 2.0, 0.4, 1.8], [1.0] * 7)) == []  # one noisy measurement


RECORDED = json.loads((Path(__file__).parent / "data" / "alarms.json").read_text())  # runs of the quickstart's model


def recorded(kind: str, name: str) -> list[Row]:
    columns = RECORDED[kind][name]
    rows = zip(*columns.values(), strict=True)
    return [{key: value for key, value in zip(columns, row, strict=True) if value is not None} for row in rows]


@pytest.mark.parametrize("name", RECORDED["learning"])
def test_a_recorded_run_that_learns_raises_no_alarm(name: str) -> None:
    assert names(recorded("learning", name)) == []


@pytest.mark.parametrize("name", RECORDED["collapsing"])
def test_a_recorded_collapse_is_announced_before_success_falls(name: str) -> None:
    rows = recorded("collapsing", name)
    first = raised(rows)[0]
    success = [row["rollout/success"] for row in rows]
    means = [float(np.mean(success[n - 5 : n])) for n in range(5, len(success) + 1)]  # the first is of step 5
    halved = next(n for n, mean in enumerate(means, 5) if mean < 0.5 * max(means[: n - 4]))
    assert first.name in ("format_decay", "entropy_explosion") and first.step <= halved - 2


def test_one_token_with_an_unlikely_ratio_is_no_drift() -> None:
    rows = [*repeat(HEALTHY, 12), HEALTHY | {"policy/kl_to_old": 500.0}, *repeat(HEALTHY, 12)]
    assert names(rows) == []


SERIES = {
    "entropy_collapse": ("policy/entropy", [0.4] * 12 + line(0.4, 0.04, 20)),
    "entropy_explosion": ("policy/entropy", [0.3] * 12 + line(0.3, 1.31, 20)),
    "gradient_spike": ("policy/grad_norm", [0.2] * 12 + [4.0]),
    "repetition": ("rollout/repeated_share", [0.1] * 12 + line(0.1, 0.5, 20)),
    "format_decay": ("rollout/invalid_turns", [0.02] * 12 + line(0.02, 0.31, 20)),
    "success_drop": ("rollout/success", line(0.3, 0.6, 20) + line(0.6, 0.1, 20)),
    "kl_to_old": ("policy/kl_to_old", [0.005] * 12 + [0.15] * 5),
    "clip_fraction": ("policy/clip_fraction", [0.01] * 12 + [0.2] * 5),
    "sampler_gap": ("policy/sampler_gap", [2e-5] * 3 + [0.02]),
    "skipped_updates": ("policy/skipped_steps", [0.0] * 3 + [1.0, 0.0, 1.0, 0.0, 1.0]),
    "empty_steps": ("rollout/kept_groups", [8.0] * 3 + [0.0] * 5),
    "not_finite": ("policy/loss", [0.1, math.nan, 0.1]),
}


@pytest.mark.parametrize("name", SERIES)
def test_each_signal_has_its_alarm(name: str) -> None:
    key, values = SERIES[name]
    found = raised(HEALTHY | {key: value} for value in values)
    assert [alarm.name for alarm in found] == [name]
    assert found[0].severity == ("stop" if name == "empty_steps" else "warn")
    assert found[0].remedy == ADVICE[name][1]


def test_harder_levels_of_a_curriculum_are_no_loss() -> None:
    easy, hard = {"rollout/success": 0.8, "rollout/lake/stage": 0}, {"rollout/success": 0.2, "rollout/lake/stage": 1}
    assert names(repeat(HEALTHY | easy, 20) + repeat(HEALTHY | hard, 20)) == []
    fallen = {"rollout/success": 0.05, "rollout/lake/stage": 1}
    assert names(repeat(HEALTHY | hard, 20) + repeat(HEALTHY | fallen, 20)) == ["success_drop"]


def test_a_world_of_a_curriculum_that_is_not_played_in_every_step_silences_nothing() -> None:
    fallen = HEALTHY | {"rollout/in_group_std": 0.01, "rollout/success": 0.02}
    often = repeat(HEALTHY, 20) + repeat(fallen, 20)
    now_and_then = [row | ({"rollout/sokoban/stage": 0} if n % 2 else {}) for n, row in enumerate(often)]
    assert set(names(now_and_then)) == set(names(often)) >= {"variance_collapse", "success_drop", "variance_gone"}


def test_gradients_of_nothing_are_no_standard_for_the_others() -> None:
    """While a critic warms up the policy's gradient is 0; the usual scatter after it is no spike."""
    scatter = [0.2 * math.exp(0.7 * math.sin(7 * n)) for n in range(40)]
    rows = [HEALTHY | {"policy/grad_norm": norm} for norm in [0.0] * 5 + scatter]
    assert names(rows) == []


def test_verdicts_that_end_a_run() -> None:
    assert names(repeat({"evaluation/success": 0.0}, 4)) == []
    assert names([*repeat({"evaluation/success": 0.0}, 4), {"evaluation/success": 0.02}] * 3) == []
    # rows of training lie between two validations
    rows = [row for _ in range(5) for row in (*repeat(HEALTHY, 10), {"evaluation/success": 0.005})]
    (alarm,) = raised(rows)
    assert (alarm.name, alarm.severity, alarm.step) == ("validation", "stop", 55)
    empty = HEALTHY | {"rollout/kept_groups": 0}
    assert names([*repeat(empty, 4), HEALTHY] * 3) == []
    assert names(repeat(HEALTHY | {"policy/loss": math.inf}, 5)) == ["not_finite", "not_finite_for_long"]
    assert {name for name, (severity, _) in ADVICE.items() if severity == "stop"} == {
        "variance_gone", "validation", "empty_steps", "not_finite_for_long"
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------- runs that do not


def played(shape: str, groups: int, size: int, seed: int, steps: int = 120) -> list[Row]:
    """Win or loss of real draws: levels differ in their chances, the policy's mean chance follows the shape."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 1, steps)
    chance = {
        "flat": np.full(steps, 0.4),
        "slow": 0.2 + 0.4 * t,
        "solved": 0.3 + 0.695 / (1 + np.exp(-14 * (t - 0.35))),
        "nearly solved": 0.4 + 0.5 * np.minimum(1, 2 * t),
        "easy from the start": np.full(steps, 0.97),
        "hard": 0.03 + 0.25 * t,
        "up and down": 0.5 + 0.08 * np.sin(12 * t),
    }[shape]
    rows = []
    for step in range(steps):
        level_G = rng.beta(3 * chance[step], 3 * (1 - chance[step]), groups)
        wins_GK = rng.random((groups, size)) < level_G[:, None]
        jitter = rng.normal(1, 0.1, 6)
        rows.append(
            {
                "rollout/in_group_std": float(wins_GK.std(1, ddof=1).mean()),
                "rollout/success": float(wins_GK.mean()),
                "rollout/reward": float(wins_GK.mean()),
                "rollout/invalid_turns": float(rng.binomial(groups * size * 3, 0.02) / (groups * size * 3)),
                "rollout/repeated_share": 0.1 * jitter[0],
                "rollout/kept_groups": max(1, int((wins_GK.std(1) > 0).sum())),
                "policy/entropy": (0.45 - 0.3 * t[step]) * jitter[1],
                "policy/grad_norm": 0.2 * float(np.exp(rng.normal(0, 0.4))),
                "policy/kl_to_old": 0.006 * abs(jitter[2]),
                "policy/clip_fraction": 0.015 * abs(jitter[3]),
                "policy/sampler_gap": 3e-5,
                "policy/skipped_steps": 0.0,
            }
        )
        if step % 5 == 0:
            rows[-1] |= {
                "collapse/trajectory/mi_z_ema": 2.0 * jitter[4] * (1 - 0.25 * t[step]),
                "collapse/trajectory/conditional_entropy_token": (0.45 - 0.3 * t[step]) * jitter[5],
            }
    return rows


SHAPES = ("flat", "slow", "solved", "nearly solved", "easy from the start", "hard", "up and down")


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SHAPES), st.sampled_from([(16, 8), (32, 8), (16, 16)]), st.integers(0, 10_000))
def test_healthy_runs_are_left_alone(shape: str, size: tuple[int, int], seed: int) -> None:
    assert [str(alarm) for alarm in raised(played(shape, *size, seed))] == []


def test_a_solved_task_has_no_spread_and_no_alarm() -> None:
    """The same fall of the spread, told apart by success alone."""
    std = line(0.4, 0.4, 12) + line(0.4, 0.01, 30) + line(0.01, 0.0, 20)
    solved = line(0.4, 0.4, 12) + line(0.4, 0.99, 30) + line(0.99, 1.0, 20)
    lost = line(0.4, 0.4, 12) + line(0.4, 0.01, 30) + line(0.01, 0.0, 20)

    def rows(success: list[float]) -> list[Row]:
        pairs = zip(std, success, strict=True)
        return [HEALTHY | {"rollout/in_group_std": s, "rollout/success": p} for s, p in pairs]

    assert names(rows(solved)) == []
    assert {"variance_collapse", "variance_gone"} <= set(names(rows(lost)))
    assert {"variance_collapse", "variance_gone"} <= set(names(rows([0.5] * 62)))


def test_a_run_that_starts_without_spread_or_entropy_divides_by_nothing() -> None:
    silent = ("rollout/in_group_std", "rollout/success", "policy/entropy", "policy/grad_norm")
    row = HEALTHY | dict.fromkeys(silent, 0.0)
    assert names(repeat(row, 40)) == []


# ------------------------------------------------------------------------------------------------------ once, and again


def test_an_alarm_fires_once_and_again_after_a_recovery() -> None:
    def at(std: float, count: int) -> list[Row]:
        return repeat(HEALTHY | {"rollout/in_group_std": std}, count)

    assert names(at(0.4, 10) + at(0.08, 8) + at(0.12, 8) + at(0.08, 8)) == ["variance_collapse"]  # never past 40 %
    assert names(at(0.4, 10) + at(0.08, 8) + at(0.3, 8) + at(0.08, 8)) == ["variance_collapse"] * 2


def test_limits_can_be_set_but_not_invented() -> None:
    row = HEALTHY | {"policy/sampler_gap": 0.05}
    assert [alarm.name for alarm in raised([row])] == ["sampler_gap"]
    assert raised([row], sampler_gap=0.1) == []
    with pytest.raises(AssertionError, match="samplergap"):
        raised([row], samplergap=0.1)


values = st.sampled_from([0.0, 1e-3, 0.02, 0.1, 0.3, 0.4, 1.0, 5.0, math.nan, math.inf])
measured = ("collapse/trajectory/mi_z_ema", "collapse/trajectory/conditional_entropy_token")
keys = sorted({*HEALTHY, *measured, "evaluation/success"})
blocks = st.tuples(st.dictionaries(st.sampled_from(keys), values, min_size=1), st.integers(1, 12))


@settings(deadline=None, max_examples=60)
@given(st.lists(blocks, min_size=1, max_size=8), st.data())
def test_a_resume_anywhere_raises_the_same_alarms(parts: list[tuple[Row, int]], data: st.DataObject) -> None:
    rows = repeat(HEALTHY, 12) + [HEALTHY | change for change, count in parts for _ in range(count)]
    cut = data.draw(st.integers(0, len(rows)))
    state: dict[str, Any] = {}
    found: list[Alarm] = []
    for step, row in enumerate(rows, 1):
        if step == cut:
            state = json.loads(json.dumps(state, allow_nan=False))
        frozen = json.dumps(state)
        new, after = watch(state, step, row)
        assert json.dumps(state) == frozen  # pure: the old state is untouched
        found, state = found + new, after
    assert found == raised(rows)


# --------------------------------------------------------------------------------------------------------- intervention

CONFIG = {"trainer.learning_rate": 4e-6, "algorithm.filter.strategy": "none", "algorithm.entropy_coef": 0.0}


@pytest.mark.parametrize(
    ("name", "filtered", "change"),
    [
        ("success_drop", False, {"trainer.learning_rate": 2e-6}),
        ("variance_gone", False, {
            "algorithm.filter.strategy": "top_p", "algorithm.filter.value": 0.9, "algorithm.filter.keep_zero": False
        }),
        ("template_collapse/trajectory", True, {"trainer.learning_rate": 2e-6}),
        ("entropy_collapse", False, {"algorithm.entropy_coef": 0.001}),
        ("gradient_spike", False, {}),
        ("sampler_gap", False, {}),
    ],
)  # fmt: skip
def test_one_knob_for_each_reason_to_go_back(name: str, filtered: bool, change: dict[str, Any]) -> None:
    config = CONFIG | ({"algorithm.filter.strategy": "top_k"} if filtered else {})
    assert rollback([Alarm(name, "warn", "", "", 1)], config) == change


def test_a_policy_that_comes_apart_is_slowed_down_first() -> None:
    both = [Alarm("variance_collapse", "warn", "", "", 1), Alarm("entropy_explosion", "warn", "", "", 1)]
    assert rollback(both, CONFIG) == {"trainer.learning_rate": 2e-6}
    assert rollback([], CONFIG) == {}


def test_reasons_to_go_back_are_alarms_and_the_examples_run() -> None:
    assert ADVICE.keys() >= alarms.DIVERGING | alarms.LEVELLING
    assert doctest.testmod(alarms).failed == 0
