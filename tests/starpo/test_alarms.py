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
from hypothesis import given, settings, strategies as st

from benchmarks._alarm_runs import BATCHES, CELLS, COLLAPSING, EVERY, HEALTHY as HEALTHY_KINDS, STEPS, Cell, simulate
from benchmarks.alarms import false_alarms, watched
from posttrain.config.loading import resolve
from posttrain.config.starpo import StarPORun
from posttrain.metrics import wilson
from posttrain.starpo.monitoring import alarm_rules, alarm_series, alarms
from posttrain.starpo.monitoring.alarm_limits import ADVICE, HALF_PRECISION_GAP, Advice
from posttrain.starpo.monitoring.alarm_rules import RULES, Finding, Setting, Sizes
from posttrain.starpo.monitoring.alarms import Alarm, watch
from posttrain.starpo.run_state import AlarmState

Row = dict[str, float]


SIZES = Sizes(groups=32, samples=8)


def raised(rows: Iterable[Row], sizes: Sizes = SIZES, **limits: float) -> list[Alarm]:
    state: AlarmState = {}
    return [alarm for step, row in enumerate(rows, 1) for alarm in alarms.advance(state, step, row, sizes, limits)]


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
    "policy/clip_fraction": 0.01,
    "policy/sampler_gap": 2e-6,
    "policy/skipped_steps": 0,
}

# ------------------------------------------------------------------------------------------------- runs that collapse


def echo_trap() -> list[Row]:
    """As RAGEN draws it: the std falls from step 20 on, reward from step 60 on, gradients burst after that."""
    std = line(0.4, 0.4, 20) + line(0.4, 0.04, 20) + line(0.04, 0.02, 60)
    success = line(0.3, 0.55, 40) + line(0.55, 0.55, 20) + line(0.55, 0.05, 40)
    entropy = line(0.5, 0.4, 20) + line(0.4, 0.05, 30) + line(0.05, 0.05, 50)
    norm = [0.2] * 70 + [0.2 * 1.2**n for n in range(30)]
    return [
        HEALTHY | {"rollout/in_group_std": s, "rollout/success": p, "policy/entropy": h, "policy/grad_norm": g}
        for s, p, h, g in zip(std, success, entropy, norm, strict=True)
    ]


def test_an_echo_trap_is_recognised_before_reward_falls() -> None:
    found = {alarm.name: alarm for alarm in raised(echo_trap())}
    assert next(iter(found)) == "variance_collapse"
    assert {"variance_gone", "entropy_collapse", "success_drop", "gradient_growth"} <= found.keys()
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
    assert alarm.message.startswith("In-group reward std fell to 22% of its best in 6 steps, with success at 40%")


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


RECORDED = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "alarms.json").read_text()
)  # runs of the quickstart's model


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


SERIES = {
    "entropy_collapse": ("policy/entropy", [0.4] * 12 + line(0.4, 0.04, 20) + [0.04] * 5),
    "entropy_explosion": ("policy/entropy", [0.3] * 12 + line(0.3, 1.31, 20)),
    "gradient_growth": ("policy/grad_norm", [0.2] * 12 + [4.0] * 15),
    "repetition": ("rollout/repeated_share", [0.1] * 12 + line(0.1, 0.5, 20)),
    "format_decay": ("rollout/invalid_turns", [0.02] * 12 + line(0.02, 0.31, 20)),
    "success_drop": ("rollout/success", line(0.3, 0.6, 20) + line(0.6, 0.1, 20)),
    "clip_fraction": ("policy/clip_fraction", [0.01] * 12 + [0.2] * 5),
    "forgetting": ("evaluation/distillation_kl", [0.0, 0.0017, 0.0093, 0.018, 0.0334, 0.0451, 0.049]),
    "sampler_gap": ("policy/sampler_gap", [2e-6] * 3 + [0.002]),
    "skipped_updates": ("policy/skipped_steps", [0.0] * 3 + [1.0, 0.0, 1.0, 0.0, 1.0]),
    "empty_steps": ("rollout/kept_groups", [8.0] * 3 + [0.0] * 10),
    "not_finite": ("policy/loss", [0.1, math.nan, 0.1]),
}


@pytest.mark.parametrize("name", SERIES)
def test_each_signal_has_its_alarm(name: str) -> None:
    key, values = SERIES[name]
    found = raised(HEALTHY | {key: value} for value in values)
    assert [alarm.name for alarm in found] == [name]
    assert found[0].severity == ("stop" if name == "empty_steps" else "warn")
    assert found[0].remedy == ADVICE[name].words()


def test_gradients_of_nothing_are_no_standard_for_the_others() -> None:
    """While a critic warms up the policy's gradient is 0; the usual scatter after it is no spike."""
    scatter = [0.2 * math.exp(0.7 * math.sin(7 * n)) for n in range(40)]
    rows = [HEALTHY | {"policy/grad_norm": norm} for norm in [0.0] * 5 + scatter]
    assert names(rows) == []


def test_verdicts_that_end_a_run() -> None:
    assert names(repeat({"evaluation/success": 0.0}, 4)) == []
    assert names([*repeat({"evaluation/success": 0.0}, 4), {"evaluation/success": 0.02}] * 3) == []
    # rows of training lie between two validations
    rows = [row for _ in range(5) for row in (*repeat({"rollout/success": 0.0}, 10), {"evaluation/success": 0.0})]
    (alarm,) = raised(rows)
    assert (alarm.name, alarm.severity, alarm.step) == ("validation", "stop", 55)
    empty = HEALTHY | {"rollout/kept_groups": 0}
    assert names([*repeat(empty, 9), HEALTHY] * 3) == []
    assert names(repeat(HEALTHY | {"policy/loss": math.inf}, 5)) == ["not_finite", "not_finite_for_long"]
    assert {name for name, advice in ADVICE.items() if advice.severity == "stop"} == {
        "variance_gone", "validation", "empty_steps", "not_finite_for_long"
    }  # fmt: skip


def test_a_run_has_failed_while_its_last_rows_are_not_finite() -> None:
    broken, played, evaluated = {"policy/loss": math.nan}, {"rollout/success": 0.5}, {"evaluation/success": 0.5}

    def failed(*table: dict[str, float]) -> str:
        state: AlarmState = {}
        for step, row in enumerate(table, 1):
            _, state = alarms.watch(state, step, row)
            state = json.loads(json.dumps(state))
        return alarms.not_finite(state)

    assert failed() == failed(played, evaluated) == failed(broken, played) == ""
    assert failed(played, broken, broken, evaluated).startswith("since step 2 ") and "policy/loss" in failed(broken)
    assert "since step 2 " in failed(played, evaluated | {"evaluation/lake/logprob": -math.inf}, played)


# --------------------------------------------------------------------------------------------------- runs that do not


def judge_simulated(groups: int, samples: int, seeds: range) -> None:
    """At most 2 % of healthy runs raise a `stop`, at most 5 % anything; at least 95 % of collapses are announced.

    Announced is what is said after the collapse has begun and before the true chance of success is halved.
    """
    healthy = [
        watched(simulate(kind, groups, samples, seed), groups, samples) for kind in HEALTHY_KINDS for seed in seeds
    ]
    stopped = sum(any(alarm.severity == "stop" for alarm in found) for found in healthy)
    alarmed = sum(bool(found) for found in healthy)
    assert stopped <= 0.02 * len(healthy) and alarmed <= 0.05 * len(healthy), [
        str(a) for found in healthy for a in found
    ]
    missed: list[tuple[str, int]] = []
    for kind in COLLAPSING:
        for seed in seeds:
            run = simulate(kind, groups, samples, seed)
            if not any(run.begins <= alarm.step < run.halved for alarm in watched(run, groups, samples)):
                missed.append((kind, seed))
    assert len(missed) <= 0.05 * len(COLLAPSING) * len(seeds), missed


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [BATCHES[0], *(pytest.param(batch, marks=pytest.mark.slow) for batch in BATCHES[1:])])
def test_simulated_runs_are_told_apart(batch: tuple[int, int]) -> None:
    judge_simulated(*batch, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [*BATCHES, (12, 8), (64, 4)])
def test_many_simulated_runs_are_told_apart(batch: tuple[int, int]) -> None:
    judge_simulated(*batch, range(1000, 1060))


def judge_cells(cells: Iterable[Cell], runs: int) -> None:
    """No healthy run of any level of success is stopped, and nothing speaks against 5 % of them raising any alarm."""
    for cell in cells:
        found = false_alarms(cell, (cell.groups, cell.samples), runs)
        assert found["stop"] == 0 and wilson(found["any"], runs)[0] <= 0.05, found


@pytest.mark.thorough
def test_no_level_of_success_raises_alarms() -> None:
    """Where few samples differ: little is won, hardly anything is lost, and all that changes within a run."""
    levels = [(0.03, 0.03), (0.06, 0.06), (0.9, 1.0), (0.03, 1.0)]
    judge_cells([cell for cell in CELLS if cell.groups == 8 and cell[:2] in levels], 6)


@pytest.mark.slow
def test_no_level_of_success_raises_alarms_in_many_runs() -> None:
    judge_cells(CELLS, 60)


def test_the_simulation_has_the_noise_of_its_batch() -> None:
    """Success of a batch of 8 x 16 and of 32 x 8 scatters as the beta distribution of its levels says."""
    for groups, samples in BATCHES:
        runs = [simulate("flat", groups, samples, seed) for seed in range(8)]
        for run in runs:
            values = np.array([row["rollout/success"] for _, row in run.rows if "rollout/success" in row])
            p = values.mean()
            low, high = (
                math.sqrt(p * (1 - p) / groups * (share + (1 - share) / samples)) for share in (0.25, 0.5)
            )  # beta(3 p, 3 (1 - p)) and beta(p, 1 - p)
            assert 0.8 * low < values.std() < 1.2 * high
    rows = [row for seed in range(8) for _, row in simulate("pausing", 8, 16, seed).rows]
    assert {"rollout/sokoban/success" in row for row in rows if "rollout/success" in row} == {True, False}
    assert sum("evaluation/success" in row for row in rows) == 8 * STEPS // EVERY


@pytest.mark.parametrize("growth", [1.05, 1.1])
def test_gradients_that_grow_a_little_in_every_step_are_announced(growth: float) -> None:
    rows = [HEALTHY | {"policy/grad_norm": 0.2 * growth ** max(0, n - 30)} for n in range(100)]
    (alarm,) = raised(rows)
    assert alarm.name == "gradient_growth" and rows[alarm.step]["policy/grad_norm"] < 12 * 0.2


def test_gradients_that_grow_along_with_success_are_no_collapse() -> None:
    rows = [HEALTHY | {"policy/grad_norm": 0.05 * 1.03**n, "rollout/success": 0.05 * 1.03**n} for n in range(90)]
    assert names(rows) == []
    assert names([row | {"rollout/success": 0.4} for row in rows]) == ["gradient_growth"]


def test_limits_follow_from_the_size_of_the_batch() -> None:
    """The same fall of the success: told at 32 groups, within the noise of 4."""
    rng = np.random.default_rng(0)

    def rows(groups: int) -> list[Row]:
        chance = [0.25] * 30 + [0.12] * 12
        success = [float(np.mean(rng.random((groups, 8)) < rng.beta(p, 1 - p, (groups, 1)))) for p in chance]
        return [{"rollout/success": value} for value in success]

    told = {
        groups: sum(bool(raised(rows(groups), Sizes(groups=groups, samples=8))) for _ in range(20))
        for groups in (4, 128)
    }
    assert told[4] <= 1 and told[128] >= 19, told


def test_one_environment_is_lost_while_the_other_is_learned() -> None:
    def row(n: int) -> Row:
        lake, sokoban = max(0.1, 0.8 - 0.02 * max(0, n - 30)), min(0.9, 0.2 + 0.02 * max(0, n - 30))
        shown = {"rollout/lake/success": lake, "rollout/sokoban/success": sokoban}
        return HEALTHY | shown | {"rollout/success": (lake + sokoban) / 2}

    found = raised([row(n) for n in range(70)])
    assert [alarm.name for alarm in found] == ["success_drop/lake"] and "Success in lake fell to" in found[0].message


def test_std_is_of_one_environment() -> None:
    """Rewards of ten hide the std of rewards of one; the run is over when all environments are."""

    def row(lake: float, sokoban: float) -> Row:
        shown = {
            "rollout/lake/success": 0.4,
            "rollout/sokoban/success": 0.4,
            "rollout/in_group_std": (lake + sokoban) / 2,
        }
        return HEALTHY | shown | {"rollout/lake/in_group_std": lake, "rollout/sokoban/in_group_std": sokoban}

    first = repeat(row(0.4, 4.0), 20) + repeat(row(0.01, 4.0), 20)
    assert names(first) == ["variance_collapse/lake"]
    assert names(first + repeat(row(0.01, 0.1), 20)) == [
        "variance_collapse/lake", "variance_collapse/sokoban", "variance_gone"
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------ environments at zero


def new_environment(invalid: float, count: int, success: float = 0.0) -> list[Row]:
    shown = {"rollout/mine/success": success, "rollout/mine/invalid_turns": invalid, "rollout/success": success}
    return repeat(
        {"rollout/in_group_std": 0.03, "rollout/kept_groups": 8, "rollout/invalid_turns": invalid} | shown, count
    )


def test_an_environment_whose_answers_are_all_invalid_is_told_once() -> None:
    found = raised(new_environment(1.0, 60))
    assert [(alarm.name, alarm.step) for alarm in found] == [("all_invalid/mine", 5)]
    assert "100% of the answers are invalid" in found[0].message and "phase 1 with demonstrations" in found[0].remedy


def test_an_environment_in_which_nothing_is_won_is_told_once() -> None:
    found = raised(new_environment(0.02, 80))
    assert [alarm.name for alarm in found] == ["no_success/mine"] and "none of 7680 episodes" in found[0].message
    assert "easier ones first" in found[0].remedy
    assert names(new_environment(0.02, 20) + new_environment(0.02, 60, 0.01)) == []
    few = raised(new_environment(0.02, 60), Sizes(groups=2, samples=4))
    assert few == [], "480 episodes do not rule out one success in a hundred"
    learnt = new_environment(1.0, 8) + new_environment(0.1, 40)
    assert names(learnt) == ["all_invalid/mine", "no_success/mine"], "first the form, then the levels"


def test_how_many_evaluations_are_hopeless_follows_from_their_episodes() -> None:
    def first(episodes: int, won: int = 0) -> int | None:
        rows = repeat({"evaluation/success": won / episodes}, 40)
        return next((alarm.step for alarm in raised(rows, Sizes(evaluation_episodes=episodes))), None)

    assert first(512) == 5 and first(64) == 6 and first(16) == 24 and first(512, won=4) == 16
    won = [row for _ in range(9) for row in ({"rollout/success": 0.05}, {"evaluation/success": 0.0})]
    assert names(won) == [], "what is won in training counts"


def test_steps_without_a_group_are_no_alarm_where_all_is_won_or_few_groups_differ() -> None:
    def empties(differ: float, success: float, count: int) -> list[str]:
        usual = {"rollout/zero_variance_groups": 1 - differ, "rollout/kept_groups": 1.0, "rollout/success": success}
        empty = usual | {"rollout/zero_variance_groups": 1.0, "rollout/kept_groups": 0}
        found = raised(repeat(usual, 20) + repeat(empty, count), Sizes(groups=8, samples=16))
        return [alarm.name for alarm in found]

    assert empties(0.5, 0.4, 9) == [] and empties(0.5, 0.4, 10) == ["empty_steps"]
    assert empties(0.5, 1.0, 30) == []
    assert empties(0.1, 0.05, 12) == [] and empties(0.1, 0.05, 20) == ["empty_steps"]


def test_another_rule_needs_no_more_than_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new alarm is added: its words in ADVICE, its rule in RULES."""

    def far(memory: dict[str, Any], row: Any, setting: Setting) -> Iterator[Finding]:
        if (value := row.get("policy/far")) is not None:
            yield Finding("far", value > 1, value < 0.5, f"{value} is far.")

    monkeypatch.setitem(ADVICE, "far", Advice("warn", "Come back."))
    monkeypatch.setattr(alarms, "RULES", [*RULES, far])
    assert [str(alarm) for alarm in raised([{"policy/far": 2.0}] * 3)] == ["step 1: 2.0 is far. Come back."]


def test_a_skill_that_is_lost_is_announced_where_chance_does_not_explain_it() -> None:
    def rows(n: int, first: float, *changes: tuple[float, float]) -> list[Row]:
        """After a first evaluation those where shares of the items were lost and gained."""
        found: list[Row] = [{"evaluation/recall/accuracy": first, "evaluation/math/a/accuracy": first}]
        for lost, gained in changes:
            change = gained - lost
            error = math.sqrt((lost + gained - change**2) / (n - 1))
            figures = {"accuracy": first + change, "change": change, "change_error": error}
            suites = ("recall", "math/a")
            found.append({f"evaluation/{suite}/{key}": figures[key] for suite in suites for key in figures})
        return found

    assert names(rows(64, 0.6, (0.15, 0.05), (0.2, 0.1), (0.0, 0.0))) == []  # 64 answers say no more
    assert names(rows(1000, 0.95, (0.09, 0.0))) == []  # less than a tenth of it
    lost = raised(rows(64, 0.72, (0.1, 0.08), (0.3, 0.05), (0.3, 0.05), (0.1, 0.1), (0.25, 0.02)))
    assert [(alarm.name, alarm.step) for alarm in lost] == [
        (f"skill_lost/{suite}", step) for step in (3, 6) for suite in ("recall", "math/a")
    ]
    assert "recall" in lost[0].message and "47% are right; 72% were" in lost[0].message and lost[0].severity == "warn"
    assert "distillation.coef" in lost[0].remedy


def test_forgetting_is_announced_once_and_not_where_distillation_holds() -> None:
    """The figures of both kinds were measured on the quickstart's model."""

    def rows(*kls: float) -> list[Row]:
        return [{"evaluation/distillation_kl": kl} for kl in kls]

    assert names(rows(0.0, 0.0047, 0.0058, 0.0083, 0.0092, 0.007)) == []
    without = raised(rows(0.0, 0.0017, 0.0093, 0.018, 0.0334, 0.0451, 0.049))
    assert [(alarm.name, alarm.severity, alarm.step) for alarm in without] == [("forgetting", "warn", 5)]
    assert "0.033 nats" in without[0].message and "distillation.coef" in without[0].remedy
    assert names(rows(0.04, 0.02, 0.04)) == ["forgetting"]
    assert names(rows(0.04, 0.01, 0.04)) == ["forgetting"] * 2


def test_a_solved_task_has_no_std_and_no_alarm() -> None:
    """The same fall of the std, told apart by success alone."""
    std = line(0.4, 0.4, 12) + line(0.4, 0.01, 30) + line(0.01, 0.0, 20)
    solved = line(0.4, 0.4, 12) + line(0.4, 0.99, 30) + line(0.99, 1.0, 20)
    lost = line(0.4, 0.4, 12) + line(0.4, 0.01, 30) + line(0.01, 0.0, 20)

    def rows(success: list[float]) -> list[Row]:
        pairs = zip(std, success, strict=True)
        return [HEALTHY | {"rollout/in_group_std": s, "rollout/success": p} for s, p in pairs]

    assert names(rows(solved)) == []
    assert {"variance_collapse", "variance_gone"} <= set(names(rows(lost)))
    assert {"variance_collapse", "variance_gone"} <= set(names(rows([0.5] * 62)))


def test_a_task_that_is_solved_within_a_few_steps_raises_no_alarm() -> None:
    """The success of ten steps lags behind the std of five."""
    success = line(0.18, 0.3, 12) + line(0.45, 0.97, 5) + [0.98] * 20
    std = line(0.4, 0.45, 12) + line(0.3, 0.03, 5) + [0.02] * 20
    pairs = zip(std, success, strict=True)
    assert names(HEALTHY | {"rollout/in_group_std": s, "rollout/success": p} for s, p in pairs) == []


def test_a_run_that_starts_without_std_or_entropy_divides_by_nothing() -> None:
    silent = ("rollout/in_group_std", "rollout/success", "policy/entropy", "policy/grad_norm")
    row = HEALTHY | dict.fromkeys(silent, 0.0)
    assert names(repeat(row, 40)) == []


# ------------------------------------------------------------------------------------------------------ once, and again


def test_an_alarm_fires_once_and_again_after_a_recovery() -> None:
    def at(std: float, count: int) -> list[Row]:
        return repeat(HEALTHY | {"rollout/in_group_std": std}, count)

    assert names(at(0.4, 10) + at(0.08, 8) + at(0.12, 8) + at(0.08, 8)) == ["variance_collapse"]  # never past 40 %
    assert names(at(0.4, 10) + at(0.08, 8) + at(0.3, 8) + at(0.08, 8)) == ["variance_collapse"] * 2


def test_advice_names_nothing_that_the_run_has(tmp_path: Path) -> None:
    def said(name: str, **changes: Any) -> str:
        base = {"output_dir": "out", "model": {"name_or_path": "m"}, "envs": ["frozen_lake"]}
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(base | {"trainer": {"max_steps": 9}} | changes))
        return ADVICE[name].words(resolve(StarPORun, file))

    by_hand = {"filter": {"strategy": "top_p", "value": 0.9, "keep_zero": False}}
    for algorithm in ({"preset": "starpo-s"}, {"preset": "ragen2"}, by_hand):
        for name in ("variance_collapse", "variance_gone", "repetition"):
            assert "starpo-s" in said(name) and "starpo-s" not in said(name, algorithm=algorithm), name
    assert "num_iterations" not in said("variance_collapse") and "minibatches" not in said("clip_fraction")
    assert "minibatches" in said("clip_fraction", algorithm={"minibatches": 2})
    assert "`distillation`" in said("skill_lost")
    distils = {"sources": [{"kind": "capybara", "path": "embedded"}]}
    kept = said("skill_lost", distillation=distils)
    assert "`distillation`" not in kept and "distillation.coef" in kept and "sources" not in kept
    assert "bf16: false" in said("sampler_gap", trainer={"bf16": True, "max_steps": 9})
    assert "bf16: false" not in said("sampler_gap", trainer={"bf16": False, "max_steps": 9})


def test_limits_can_be_set_but_not_invented() -> None:
    row = HEALTHY | {"policy/sampler_gap": 0.02}  # what bfloat16 rounds
    assert [alarm.name for alarm in raised([row])] == ["sampler_gap"]
    assert raised([row], sampler_gap=HALF_PRECISION_GAP) == []
    with pytest.raises(AssertionError, match="samplergap"):
        raised([row], samplergap=0.1)


values = st.sampled_from([0.0, 1e-3, 0.02, 0.1, 0.3, 0.4, 1.0, 5.0, math.nan, math.inf])
measured = ("collapse/trajectory/mi_z_ema", "collapse/trajectory/conditional_entropy_token")
keys = sorted({*HEALTHY, *measured, "evaluation/success"})
blocks = st.tuples(st.dictionaries(st.sampled_from(keys), values, min_size=1), st.integers(1, 12))


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(st.lists(blocks, min_size=1, max_size=8), st.data())
def test_a_resume_anywhere_raises_the_same_alarms(parts: list[tuple[Row, int]], data: st.DataObject) -> None:
    rows = repeat(HEALTHY, 12) + [HEALTHY | change for change, count in parts for _ in range(count)]
    cut = data.draw(st.integers(0, len(rows)))
    state: AlarmState = {}
    found: list[Alarm] = []
    for step, row in enumerate(rows, 1):
        if step == cut:
            state = json.loads(json.dumps(state, allow_nan=False))
        frozen = json.dumps(state)
        new, after = watch(state, step, row, SIZES)
        assert json.dumps(state) == frozen  # pure: the old state is untouched
        found, state = found + new, after
    assert found == raised(rows)


def test_the_examples_run() -> None:
    for module in (alarms, alarm_rules, alarm_series):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed
