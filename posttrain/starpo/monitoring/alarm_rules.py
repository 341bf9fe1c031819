"""What does each alarm look at?  One function for each kind of trouble; it reads a row and yields Findings.

A rule receives its own memory, the finite numbers of the row, and a Setting. It ignores a row without its figures. An
alarm needs a change that is large enough to matter and that the noise of the batch does not explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from posttrain.metrics import wilson
from posttrain.starpo.monitoring.alarm_series import (
    FALSE_ALARM,
    WINDOWS,
    Memory,
    Noisy,
    count_in_a_row,
    first_mean,
    growth,
    last_values,
    size_of_std,
    success_variance,
    trials_of_success,
    z_bound,
)

Figures = Mapping[str, float]  # a row of metrics.jsonl: {"rollout/success": 0.4, ...}


@dataclass(frozen=True)
class Sizes:
    """The sizes of the samples that the figures are means of; the noise follows from them."""

    groups: int = 16  # played in a step
    samples: int = 8  # in a group
    evaluation_episodes: int = 128  # in an evaluation, over all environments
    steps: int = 200  # of the run: how often each test is made


class Finding(NamedTuple):
    """What a rule sees in one row: the alarm's name, whether it fires, whether it is over, and the message."""

    name: str
    bad: bool
    well: bool
    message: str


class Setting(NamedTuple):
    """What a rule needs besides its memory and the row."""

    step: int
    sizes: Sizes
    limits: Mapping[str, float]


def variance_left(success: float) -> float:
    """Return which share of the variance within groups is possible at a success p: p (1 - p) over its largest value.

    1 below one half: there a fall in success is a loss, not a solved task.

    >>> variance_left(0.9), variance_left(0.2)
    (0.36, 1.0)
    """
    return max(0.0, round(4 * success * (1 - success), 6)) if success > 0.5 else 1.0


def _reward_std(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for the echo trap's first sign (RAGEN, arXiv 2504.20073, section 4.1): equal scores within a group.

    A solved task looks the same: at success p the variance within groups is at most p (1 - p). So the std is compared
    with the share of its best that this success allows, and not at all from `saturated` on. The best, not the start,
    which may be weak. Each environment is looked at alone, since rewards may have different scales; `variance_gone`
    needs all of them.
    """
    if "rollout/in_group_std" not in row:
        return
    sizes, limits = setting.sizes, setting.limits
    names = [name for name in _environments(row) if f"rollout/{name}/in_group_std" in row]
    seen = memory["names"] = sorted({*memory.get("names", ()), *names})
    gone = memory.setdefault("gone", {})
    for path in [f"/{name}" for name in names] or [""]:
        own, groups = memory.setdefault(path, {}), sizes.groups / max(1, len(names))
        success = last_values(own, "success", row.get(f"rollout{path}/success", 0.0), 20)
        won = fmean(success[-10:])
        name = f"variance_collapse{path if len(seen) > 1 else ''}"
        series = Noisy(own, "std", row[f"rollout{path}/in_group_std"])
        size = size_of_std(own, series, groups)
        if series.improved:
            own["left"] = variance_left(fmean(success))
        if max(won, fmean(success[-5:])) >= limits["saturated"]:  # the std may fall within five steps
            gone[path] = None
            yield Finding(name, False, True, "")
            continue
        if series.best is None or series.best <= 1e-6:
            continue
        expected = series.best * min(1.0, variance_left(won) / max(own["left"], 1e-6))
        chance = FALSE_ALARM / (sizes.steps * len(WINDOWS) * max(1, len(seen)))
        if series.mean(5) >= 0.75 * expected or "healthy" not in own:
            own["healthy"] = setting.step
        limit = limits["variance_collapse"] * expected
        yield Finding(
            name,
            series.fell(limit, expected, groups, chance, size),
            series.mean(5) > 1.6 * limit,
            f"In-group reward std fell to {series.mean(5) / series.best:.0%} of its best in"
            f" {setting.step - own['healthy']} steps, with success at {won:.0%}: the usual first sign of collapse.",
        )
        limit = limits["variance_gone"] * expected
        if series.fell(limit, expected, groups, chance / 10, size, WINDOWS[1:]):  # it ends a run: ten times as sure
            gone[path] = series.mean(10) / series.best
        elif series.mean(10) > 2 * limit:
            gone.pop(path, None)
    shares = [share for share in gone.values() if share is not None]
    yield Finding(
        "variance_gone",
        bool(shares) and len(gone) >= len(seen),
        len(gone) < max(1, len(seen)),
        f"In-group reward std fell to {max(shares, default=1):.0%} of its best: the rewards no longer teach anything.",
    )


def _entropy(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for an entropy that falls to a fraction of its start on an unsolved task, or that rises.

    A fall along with success is healthy. The mean is over thousands of tokens: its noise is far below these factors.
    """
    success = row.get("rollout/success", 0.0)
    if "policy/entropy" not in row:
        return
    entropy, limits = row["policy/entropy"], setting.limits
    won = fmean(last_values(memory, "success", success, 5))
    start, now = first_mean(memory, "entropy", entropy), fmean(last_values(memory, "now", entropy, 5))
    if start is not None and start > 0:
        low = limits["entropy_collapse"] * start * variance_left(won)
        solved = won >= limits["saturated"]
        yield Finding(
            "entropy_collapse",
            now < low and not solved,
            now > 1.5 * low or solved,
            f"Entropy fell to {now / start:.0%} of its start ({now:.2g} nats), with success at {won:.0%}.",
        )
    if (grown := growth(memory, "entropy", entropy, success, 5, limits["entropy_floor"])) is not None:
        now, lowest = grown
        yield Finding(
            "entropy_explosion",
            now > limits["entropy_explosion"] * lowest,
            now < 0.75 * limits["entropy_explosion"] * lowest,
            f"Entropy rose to {now / lowest:.1f} times its lowest value ({now:.2g} nats), and success did not: the"
            " policy diverges.",
        )


def _gradient(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for gradient norms that grow; their scatter is that of the run itself. One large norm is only clipped."""
    norm = row.get("policy/grad_norm", 0.0)
    if norm <= 0:  # a critic that warms up, or nothing to learn from
        return
    scatter = Noisy(memory, "log", math.log(norm), 0.3**2).deviation
    if (grown := growth(memory, "norm", norm, row.get("rollout/success", 0.0))) is not None:
        now, lowest = grown
        scatter *= math.sqrt(math.pi / 2 * (1 / 10 + 1 / 10))  # of the difference between two medians of 10
        limit = max(setting.limits["gradient_growth"], math.exp(z_bound(setting.sizes.steps, 1) * scatter))
        yield Finding(
            "gradient_growth",
            now > limit * lowest,
            now < 0.5 * limit * lowest,
            f"The gradient norm has grown to {now:.2g}, {now / lowest:.1f} times what it was, and success has not.",
        )


def _repetition(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for answers that repeat themselves more than before."""
    if "rollout/repeated_share" not in row:
        return
    series = Noisy(memory, "share", row["rollout/repeated_share"], 0.0, sign=-1)
    if series.best is not None:
        best, limit = series.best, setting.limits["repetition"]
        yield Finding(
            "repetition",
            series.worse(max(2 * best, best + limit), z_bound(setting.sizes.steps)),
            series.mean(5) < best + limit / 2,
            f"{series.mean(5):.0%} of the 4-grams of an answer repeat earlier ones; it was {best:.0%} at best.",
        )


def _template(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for RAGEN-2's template collapse (arXiv 2604.06268): varied thoughts that no longer depend on the prompt."""
    limits = setting.limits
    for scope in ("first_turn", "trajectory"):
        z, entropy = (row.get(f"collapse/{scope}/{key}") for key in ("mi_z_ema", "conditional_entropy_token"))
        if z is None or entropy is None:
            continue
        start = first_mean(memory, f"{scope} z", z, 3)
        start_entropy = first_mean(memory, f"{scope} entropy", entropy, 3)
        if start is None or start_entropy is None or start <= 0.1 or start_entropy <= 0:
            continue  # thoughts that never depended on the prompt cannot stop doing so
        low = limits["template_collapse"] * start
        count = count_in_a_row(memory, scope, z < low and entropy >= 0.75 * start_entropy)
        yield Finding(
            f"template_collapse/{scope}",
            count >= 2,
            z > 1.3 * low,
            f"Thoughts depend on the prompt {z / start:.0%} as much as at the start (z-score {z:.2f}, {scope}), while"
            f" their entropy is {entropy / start_entropy:.0%} of it: varied words, one template.",
        )


def _format(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for more invalid turns than before."""
    if "rollout/invalid_turns" not in row:
        return
    share, sizes = row["rollout/invalid_turns"], setting.sizes
    series = Noisy(memory, "share", share, success_variance(share, sizes.groups, sizes.samples), sign=-1)
    if series.best is None:
        return
    best, limit = series.best, setting.limits["format_decay"]
    yield Finding(
        "format_decay",
        series.worse(max(best + limit, min(2 * best, (1 + best) / 2)), z_bound(sizes.steps)),
        series.mean(5) < best + 0.6 * limit,
        f"{series.mean(5):.0%} of the turns are badly formed or name an unknown action; it was {best:.0%} at best.",
    )


def _environments(row: Figures) -> list[str]:
    """Return the environments whose success is in this row: `rollout/ENV/success`."""
    parts = [key.split("/") for key in row if key.startswith("rollout/")]
    return [part[1] for part in parts if len(part) == 3 and part[2] == "success"]


def _success(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for a success that drops, of the whole batch and of each of several environments."""
    if "rollout/success" not in row:
        return
    sizes, limits = setting.sizes, setting.limits
    names = _environments(row)
    shown = {"": row["rollout/success"]}
    memory["names"] = sorted({*memory.get("names", ()), *names})
    if len(memory["names"]) > 1:
        shown |= {f"/{name}": row[f"rollout/{name}/success"] for name in names}
    for name, success in shown.items():
        groups = sizes.groups / (len(names) if name else 1)
        own = memory.setdefault(name, {})
        series = Noisy(own, "won", success)
        usual = success if series.best is None else series.best
        trials = trials_of_success(own, series, usual, groups, sizes.samples)
        if series.best is None:
            continue
        where = f"Success in {name[1:]}" if name else "Success"
        yield Finding(
            f"success_drop{name}",
            series.fell(
                limits["success_drop"] * series.best,
                limits["wavering"] * series.best,
                trials,
                FALSE_ALARM / (sizes.steps * len(WINDOWS) * len(shown)),
            ),
            series.mean(10) > (1 + limits["success_drop"]) / 2 * series.best,
            f"{where} fell to {series.mean(10):.0%} from {series.best:.0%} at best.",
        )


def _first_success(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for environments in which no episode was ever won, with invalid or with valid answers.

    After N lost episodes a success of p = `no_success` or more is ruled out with 99.9 % if (1 - p)^N < .001.
    """
    names, limits = _environments(row), setting.limits
    episodes = setting.sizes.groups * setting.sizes.samples / max(1, len(names))
    for name in names:
        own = memory.setdefault(name, {"won": False, "valid": 0, "shares": []})
        invalid = row.get(f"rollout/{name}/invalid_turns", row.get("rollout/invalid_turns", 0.0))
        own["won"] = own["won"] or row[f"rollout/{name}/success"] > 0
        if own["won"]:
            own["shares"] = []
            yield Finding(f"all_invalid/{name}", False, True, "")
            yield Finding(f"no_success/{name}", False, True, "")
            continue
        share = fmean(last_values(own, "shares", invalid, 5))
        yield Finding(
            f"all_invalid/{name}",
            len(own["shares"]) == 5 and share >= limits["all_invalid"],
            share < 0.5,
            f"{name}: {share:.0%} of the answers are invalid, and no episode has been won: the model does not know how"
            " to answer here.",
        )
        own["valid"] += invalid < 0.5
        count = own["valid"] * episodes
        yield Finding(
            f"no_success/{name}",
            own["valid"] >= 30 and count * math.log1p(-limits["no_success"]) < math.log(0.001),
            False,
            f"{name}: the answers are valid, but none of {count:.0f} episodes has been won.",
        )


def _evaluation(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for evaluations and rollouts in a row that rule out a success of `validation`."""
    limit = setting.limits["validation"]
    if (won := row.get("rollout/success")) is not None:
        memory["training"] = max(memory.get("training", 0.0), fmean(last_values(memory, "rollouts", won, 10)))
    if (success := row.get("evaluation/success")) is None:
        return
    count = count_in_a_row(memory, "count", success < limit and memory.get("training", 0.0) < limit)
    memory["training"] = 0.0
    memory["won"] = memory.get("won", 0.0) + success * setting.sizes.evaluation_episodes if count else 0.0
    episodes = max(1, count * setting.sizes.evaluation_episodes)
    upper = wilson(round(memory["won"]), episodes)[1]
    words = f"Success on validation levels was below {limit:.0%} {count} times in a row."
    yield Finding("validation", count >= 5 and upper < limit, count == 0, words)


def _forgetting(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Measure how far the policy is from the model that it started from on earlier data (arXiv 2509.04259).

    A mean over thousands of tokens, on the same rows at each evaluation: its noise is far below the limit.
    """
    if (kl := row.get("evaluation/distillation_kl")) is None:
        return
    limit = setting.limits["forgetting"]
    words = (
        f"On held-out prompts of the phases before, the policy is {kl:.2g} nats a token from the model it started from."
    )
    yield Finding("forgetting", kl > limit, kl < limit / 2, words)


def _skills(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for a suite of the phases before that is answered worse than before the first step.

    On the same items, by more than three standard errors of the paired difference: by chance in 1 of 740 evaluations.
    """
    for key, change in row.items():
        if not (key.startswith("evaluation/") and key.endswith("/change")):
            continue
        suite = key.removeprefix("evaluation/").removesuffix("/change")
        now = row[f"evaluation/{suite}/accuracy"]
        first, error = now - change, row[f"evaluation/{suite}/change_error"]
        large = change < -(1 - setting.limits["skill_lost"]) * first
        words = f"Of {suite}, which the phases before taught, {now:.0%} are right; {first:.0%} were at the start."
        yield Finding(f"skill_lost/{suite}", large and change < -3 * error, not large, words)


def _machinery(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for technical faults: a sampler that differs from the learner, updates that are clipped or skipped."""
    limits = setting.limits
    if (clipped := row.get("policy/clip_fraction")) is not None:
        values, limit = last_values(memory, "clipped", clipped, 5), limits["clip_fraction"]
        words = f"The clip took the gradient of {median(values):.1%} of the tokens (median of 5 steps)."
        yield Finding("clip_fraction", len(values) == 5 and median(values) > limit, median(values) < 0.6 * limit, words)
    if (gap := row.get("policy/sampler_gap")) is not None:
        limit = limits["sampler_gap"]
        words = f"Sampler and learner differ by {gap:.2g} nats in the log-prob of a token; {limit:.2g} is tolerated."
        yield Finding("sampler_gap", gap > limit, gap < limit / 2, words)
    if (skipped := row.get("policy/skipped_steps")) is not None:
        total = sum(last_values(memory, "skipped", skipped, 10))
        words = f"{total:.0f} updates of the last 10 steps were skipped: their gradients were not finite."
        yield Finding("skipped_updates", total >= limits["skipped_updates"], total == 0, words)


def _empty(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for steps in a row without a group to learn from, unless every level is won.

    With a share s of groups whose rewards differ, a step of G groups has none of them with probability (1 - s)^G. The
    share is that of the 10 or the 40 steps before, whichever is smaller, plus 10 steps of 5 % for a run that has just
    started. Until a first group differs, `empty_steps` alone decides.
    """
    if (kept := row.get("rollout/kept_groups")) is None:
        return
    limits, ended = setting.limits, memory.get("empty", 0)
    count = count_in_a_row(memory, "empty", kept == 0)
    won = fmean(last_values(memory, "success", row.get("rollout/success", 0.0), 5))
    differ = memory.setdefault("differ", [])
    if not count:
        memory["differ"] = [*differ, *[0.0] * ended, 1 - row.get("rollout/zero_variance_groups", 0.0)][-40:]
        yield Finding("empty_steps", False, True, "")
        return
    needed = limits["empty_steps"]
    if any(differ):
        share = min((sum(last) + 10 * 0.05) / (len(last) + 10) for last in (differ, differ[-10:]))
        by_chance = setting.sizes.groups * math.log1p(-share)
        needed = max(needed, math.log(FALSE_ALARM / setting.sizes.steps) / by_chance)
    words = f"No group passed the filter for {count} steps in a row: all samples of a group score alike."
    yield Finding("empty_steps", count >= needed and won < limits["saturated"], False, words)


Rule = Callable[[Memory, Figures, Setting], Iterator[Finding]]
RULES: list[Rule] = [
    _first_success,
    _reward_std,
    _entropy,
    _gradient,
    _repetition,
    _template,
    _format,
    _success,
    _evaluation,
    _forgetting,
    _skills,
    _machinery,
    _empty,
]
OF_REWARDS: list[Rule] = [_reward_std]  # what they find does not matter where a teacher replaces the reward
