"""Does this run diverge or collapse?  Watches the rows of metrics.jsonl, says what is wrong and what to do.

`watch` is a pure function of the rows so far: all it remembers is in a state that JSON can hold, so a resumed run
raises the alarms that an uninterrupted one would have. An alarm fires once and can fire again after its signal has
recovered past a second, milder threshold. Nothing here needs torch.

A figure of a batch has sampling noise, and 200 steps are 200 chances to be wrong. So an alarm on a noisy figure needs
two things: a change large enough to matter (LIMITS), and one that the noise of this batch does not explain (`z_bound`
standard deviations, corrected for the number of steps). docs/metrics.md derives both.

To add an alarm: a limit in LIMITS, severity and remedy in ADVICE, a function in RULES that yields a Finding for each
row that has its figures, and a line in docs/metrics.md. `Noisy` keeps a series, its best level and its noise.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

LIMITS: dict[str, float] = {  # tests/alarm_runs.py and tests/data/alarms.json have runs that they tell apart
    "variance_collapse": 0.25,  # of its best
    "variance_gone": 0.10,  # of its best, mean of 10 steps: RAGEN's early stopping
    "solved": 0.95,  # success from which a small std is no collapse
    "entropy_collapse": 0.15,  # of the start, times what the success leaves
    "entropy_explosion": 3.0,  # times its lowest, without a gain in success
    "entropy_floor": 0.1,  # nats; a lowest entropy below it counts as this
    "gradient_growth": 5.0,  # times its lowest median of 10 steps, without a gain in success
    "repetition": 0.15,  # share of repeated 4-grams above the lowest
    "template_collapse": 0.5,  # of the first z-scores, while the conditional entropy keeps 0.75 of its own
    "format_decay": 0.10,  # share of invalid turns above the lowest
    "success_drop": 0.6,  # of its best
    "wavering": 0.9,  # of its best success: a healthy policy may lose that much, what counts begins below it
    "clip_fraction": 0.05,  # median of 5 steps
    "forgetting": 0.03,  # nats a token from the teacher, on held-out prompts of the phases before
    "skill_lost": 0.9,  # of the accuracy at the start of the run
    "sampler_gap": 1e-4,  # nats, mean over tokens; float32. HALF_PRECISION_GAP for bfloat16
    "skipped_updates": 3,  # in 10 steps
    "all_invalid": 0.95,  # of the turns of an environment, mean of 5 steps
    "no_success": 0.01,  # success of an environment that its episodes so far rule out
    "validation": 0.01,  # success that 5 or more evaluations in a row rule out
    "empty_steps": 5,  # in a row
    "not_finite": 5,  # rows in a row
}
FALSE_ALARM = 0.002  # how often a test may be wrong in a whole run, by the normal approximation
WINDOWS = (5, 10, 20)  # steps: short ones see a fast fall, long ones a small one
HALF_PRECISION_GAP = 16 * 2**-8  # nats, mean over tokens: 16 steps of bfloat16; about 5 were seen
ENOUGH = 40  # groups in a window: the mean of fewer has no normal distribution


@dataclass(frozen=True)
class Sizes:
    """What the figures are means of, which is what their noise follows from."""

    groups: int = 16  # played in a step
    samples: int = 8  # in a group
    evaluation_episodes: int = 128  # in an evaluation, over all environments
    steps: int = 200  # of the run: how often each test is made


@dataclass(frozen=True)
class Alarm:
    """Alarm("variance_collapse", "warn", "In-group reward std fell to 18 % ...", "Try preset starpo-s ...", step=34).

    Severity `warn` asks for a look; `stop` says that further steps are wasted.
    """

    name: str
    severity: str
    message: str
    remedy: str
    step: int

    def __str__(self) -> str:
        return f"step {self.step}: {self.message} {self.remedy}"


class Finding(NamedTuple):
    """What a rule sees in one row: the alarm's name, whether to fire, whether all is well again, and the words."""

    name: str
    bad: bool
    well: bool
    message: str


class Setting(NamedTuple):
    """What a rule may look at beside its memory and the row."""

    step: int
    sizes: Sizes
    limits: Mapping[str, float]


Memory = dict[str, Any]
Row = Mapping[str, float]


def watch(
    state: Mapping[str, Any],
    step: int,
    row: Row,
    sizes: Sizes = Sizes(),
    limits: Mapping[str, float] | None = None,
) -> tuple[list[Alarm], dict[str, Any]]:
    """The alarms that this row sets off, and the state for the next one; begin with {}.

    Rows of training and of evaluation come in the order in which they were written; a key that a row does not have is
    not looked at. `limits` replaces entries of LIMITS.
    """
    after = copy.deepcopy(dict(state))
    return advance(after, step, row, sizes, limits), after


def advance(
    state: MutableMapping[str, Any],
    step: int,
    row: Row,
    sizes: Sizes = Sizes(),
    limits: Mapping[str, float] | None = None,
) -> list[Alarm]:
    """As `watch`, with the state changed in place."""
    known = {**LIMITS, **(limits or {})}
    assert known.keys() == LIMITS.keys(), known.keys() - LIMITS.keys()
    on, memory = state.setdefault("on", []), state.setdefault("memory", {})
    setting = Setting(step, sizes, known)
    finite = {key: value for key, value in row.items() if math.isfinite(value)}
    _forget_easier_levels(memory, finite)
    findings = list(_numbers(memory.setdefault("_numbers", {}), row, setting))
    for rule in RULES:
        findings += rule(memory.setdefault(rule.__name__, {}), finite, setting)
    alarms = []
    for name, bad, well, message in findings:
        if bad and name not in on:
            severity, remedy = ADVICE[name.split("/")[0]]
            alarms.append(Alarm(name, severity, message, remedy, step))
            on.append(name)
        elif well and not bad and name in on:
            on.remove(name)
    return alarms


ADVICE: dict[str, tuple[str, str]] = {
    "variance_collapse": (
        "warn",
        "Try preset starpo-s (`algorithm.preset`), a higher `rollout.temperature`, or fewer epochs over a rollout"
        " (`algorithm.num_iterations`); if levels are always won or always lost, other levels (`envs[].options`).",
    ),
    "variance_gone": (
        "stop",
        "Go back to the best checkpoint and start from it with preset starpo-s, a lower `trainer.learning_rate` or"
        " other levels.",
    ),
    "entropy_collapse": (
        "warn",
        "Raise `algorithm.epsilon_high` or `algorithm.entropy_coef`, or stop here: the policy explores no more.",
    ),
    "entropy_explosion": (
        "warn",
        "Lower `trainer.learning_rate` or `algorithm.entropy_coef`, or use a rollout fewer times.",
    ),
    "gradient_growth": (
        "warn",
        "Lower `trainer.learning_rate` and go on from the checkpoint before; `trainer.max_grad_norm` hides the size of"
        " an update, not its direction.",
    ),
    "repetition": (
        "warn",
        "Read transcripts. Raise `rollout.temperature`, train on groups whose rewards differ (preset starpo-s), or put"
        " more repetition pairs into phase 2.",
    ),
    "template_collapse": (
        "warn",
        "Train on the groups whose rewards differ: `algorithm.filter.strategy: top_p`, `value: 0.9`, `keep_zero: false`"
        " (preset ragen2); lower `algorithm.entropy_coef` and `algorithm.beta`, which pull on every prompt alike.",
    ),
    "format_decay": (
        "warn",
        "Lower `trainer.learning_rate`, fewer updates a rollout (`algorithm.minibatches` x `num_iterations`), a smaller"
        " `algorithm.entropy_coef`.",
    ),
    "success_drop": (
        "warn",
        "Unless levels have just become harder: go back to the best checkpoint and lower `trainer.learning_rate`.",
    ),
    "clip_fraction": ("warn", "Lower `trainer.learning_rate`, or fewer updates a rollout."),
    "sampler_gap": (
        "warn",
        "More than rounding: sampler and learner compute different models. Write `rollout.engine: replay`; if the gap"
        " stays, it is the model's precision (`trainer.bf16: false` tells), and `algorithm.importance: truncate` weighs"
        " tokens by it.",
    ),
    "forgetting": (
        "warn",
        "Raise `distillation.coef` or `distillation.batch_size`, or lower `trainer.learning_rate`.",
    ),
    "skill_lost": (
        "warn",
        "Raise `distillation.coef` or `distillation.batch_size`, with this suite's kind of prompts among"
        " `distillation.sources`; or lower `trainer.learning_rate`.",
    ),
    "skipped_updates": ("warn", "Numbers overflow: write `trainer.bf16: false`, or lower `trainer.learning_rate`."),
    "all_invalid": (
        "warn",
        "Read transcripts.jsonl. Where the answers lack the form: run phase 1 with demonstrations of this environment"
        " (`data.sources`); where they are cut: a larger `rollout.max_completion_length`.",
    ),
    "no_success": (
        "warn",
        "The levels are too hard for this model: easier ones first (`envs[].curriculum`, `envs[].options`), more"
        " turns (`protocol.max_turns`), or demonstrations of this environment in phase 1.",
    ),
    "validation": (
        "stop",
        "The model cannot play this yet: easier levels (`envs[].options`), or demonstrations in phase 1.",
    ),
    "empty_steps": (
        "stop",
        "Levels are too hard or too easy for this model: others (`envs[].options`), larger groups"
        " (`rollout.num_generations`) or a higher `rollout.temperature`; where `rollout/crashed` is not 0, it is the"
        " environment that needs fixing.",
    ),
    "not_finite": ("warn", "Write `trainer.bf16: false` and look at the transcripts and rewards of this step."),
    "not_finite_for_long": ("stop", "Go back to the last checkpoint with a lower `trainer.learning_rate`."),
}

# ------------------------------------------------------------------------------------------------ noise and memory


@functools.lru_cache
def z_bound(steps: int, tests: int = len(WINDOWS)) -> float:
    """How many standard deviations a change must be for one of `steps` looks at `tests` windows (Bonferroni).

    Windows that overlap are not independent, so the bound is on the safe side.

    >>> round(z_bound(200), 2), round(z_bound(2000), 2)
    (4.5, 4.97)
    """
    return NormalDist().inv_cdf(1 - FALSE_ALARM / (steps * tests))


class Noisy:
    """A series that is measured with noise: its last 20 values, the best mean of 20, the noise of one value.

    The noise is half the mean square of what neighbouring values differ by (von Neumann), which a slow trend does not
    touch and which holds everything that changes from step to step: levels, chance, which environments were played. Of
    the last 40 differences or so; `variance`, what the size of the batch lets expect, counts as ten of them.
    """

    def __init__(self, memory: Memory, name: str, value: float, variance: float, sign: int = 1) -> None:
        """Add a value to the series `name` of this memory; `sign` is -1 where low is best."""
        kept = memory.setdefault(name, {"values": [], "square": 0.0, "count": 0.0})
        values = kept["values"]
        if values:
            kept["square"] = 0.975 * kept["square"] + (value - values[-1]) ** 2 / 2
            kept["count"] = 0.975 * kept["count"] + 1
        values.append(value)
        del values[:-20]
        if len(values) >= 10:
            level = fmean(values)
            kept["best"] = sign * max(sign * kept.get("best", level), sign * level)
        self.values: list[float] = values
        self.best: float | None = kept.get("best")
        self.sign = sign
        self.deviation = math.sqrt((10 * variance + kept["square"]) / (10 + kept["count"]))

    def mean(self, count: int) -> float:
        return fmean(self.values[-count:])

    def worse(
        self,
        limit: float,
        bound: float,
        windows: Sequence[int] = WINDOWS,
        groups: float = ENOUGH,
        healthy: float | None = None,
    ) -> bool:
        """Is the mean of a window beyond `limit`, and further from `healthy` (or the best) than its noise explains?

        groups: how many a value is the mean of; windows of fewer than ENOUGH are not looked at.
        """
        if self.best is None:
            return False
        healthy = self.best if healthy is None else healthy
        for window in windows:
            if len(self.values) >= window >= ENOUGH / groups:
                mean = self.sign * self.mean(window)
                margin = bound * self.deviation * math.sqrt(1 / window + 1 / 20)
                if mean < self.sign * limit and self.sign * healthy - mean > margin:
                    return True
        return False


def success_variance(success: float, groups: float, samples: int) -> float:
    """Of the mean of a batch, p (1 - p) / groups x (1 + 1 / samples) / 2: half of it is between levels, half within.

    That is so where the levels' chances are of the distribution beta(p, 1 - p). Laplace's rule keeps it above 0.

    >>> round(success_variance(0.5, groups=8, samples=16) ** 0.5, 3)
    0.129
    """
    share = (success * groups * samples + 1) / (groups * samples + 2)
    return share * (1 - share) / groups * (0.5 + 0.5 / samples)


def _last(memory: Memory, name: str, value: float, count: int) -> list[float]:
    """The last `count` values, this one included."""
    memory[name] = [*memory.get(name, ()), value][-count:]
    return memory[name]


def _start(memory: Memory, name: str, value: float, count: int = 10) -> float | None:
    """Mean of the first `count` values; None until there are so many."""
    first = memory.setdefault(f"start {name}", [])
    if len(first) < count:
        first.append(value)
    return fmean(first) if len(first) == count else None


def _in_a_row(memory: Memory, name: str, holds: bool) -> int:
    memory[name] = memory.get(name, 0) + 1 if holds else 0
    return memory[name]


def _grown(
    memory: Memory, name: str, value: float, success: float, count: int = 10, floor: float = 0.0
) -> tuple[float, float] | None:
    """The value's median of the last `count` steps, and the lowest median of 10 steps from when success was not lower.

    None until there is one. What rises together with success is not compared: a policy that has learned to play has
    larger gradients and more ways to win than one that knew nothing.
    """
    values, won = _last(memory, name, value, 10), fmean(_last(memory, f"{name} success", success, 10))
    blocks = memory.setdefault(f"{name} blocks", [])
    now = median(values[-count:])
    lowest = min((low for low, then in blocks if then >= 0.8 * won), default=None)
    seen = memory[f"{name} seen"] = memory.get(f"{name} seen", 0) + 1
    if seen % 10 == 0:
        blocks.append([max(median(values), floor), won])
    return None if lowest is None else (now, lowest)


def _forget_easier_levels(memory: MutableMapping[str, Any], row: Row) -> None:
    """Begin anew where a curriculum has moved on: what was normal before says nothing about the new levels."""
    stages = {key: value for key, value in row.items() if key.endswith("/stage")}  # of the environments played
    known = memory.get("stages", {})
    if any(known.get(key, value) != value for key, value in stages.items()):
        for rule in (_reward_std, _entropy, _gradient, _format, _success):
            memory.pop(rule.__name__, None)
    memory["stages"] = known | stages


# --------------------------------------------------------------------------------------------------------- rules


def room(success: float) -> float:
    """What a success above one half leaves of the variance within groups, p (1 - p) over its largest value.

    Only above one half: the way from half to never won is a loss, not a solution.

    >>> room(0.9), room(0.2)
    (0.36, 1.0)
    """
    return round(4 * success * (1 - success), 6) if success > 0.5 else 1.0


def _reward_std(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """The echo trap's first sign (RAGEN, arXiv 2504.20073, section 4.1): the samples of a group score alike.

    A task that is solved looks the same from here, so the std is divided by what the success leaves room for, and
    from `solved` on it is not looked at. It is compared with its best, not with its start, which may be weak. Rewards
    of two environments need not have one scale, so each is looked at alone; the run is over when all are.
    """
    if "rollout/in_group_std" not in row:
        return
    sizes, limits = setting.sizes, setting.limits
    names = [name for name in _environments(row) if f"rollout/{name}/in_group_std" in row]
    known = memory["names"] = sorted({*memory.get("names", ()), *names})
    gone = memory.setdefault("gone", {})
    for path in [f"/{name}" for name in names] or [""]:
        own, groups = memory.setdefault(path, {}), sizes.groups / max(1, len(names))
        won = fmean(_last(own, "success", row.get(f"rollout{path}/success", 0.0), 5))
        name = f"variance_collapse{path if len(known) > 1 else ''}"
        if won >= limits["solved"]:
            gone[path] = None
            yield Finding(name, False, True, "")
            continue
        std = row[f"rollout{path}/in_group_std"] / room(won)
        before = own.get("std", {"values": [std]})["values"]
        # the std of one group scatters about as much as it measures
        series = Noisy(own, "std", std, fmean(before) ** 2 / groups)
        if series.best is None or series.best <= 1e-6:
            continue
        bound = z_bound(sizes.steps, len(WINDOWS) * max(1, len(known)))
        if series.mean(5) >= 0.75 * series.best or "healthy" not in own:
            own["healthy"] = setting.step
        limit = limits["variance_collapse"] * series.best
        yield Finding(
            name,
            series.worse(limit, bound, groups=groups),
            series.mean(5) > 1.6 * limit,
            f"In-group reward std fell to {series.mean(5) / series.best:.0%} of its best in"
            f" {setting.step - own['healthy']} steps, with success at {won:.0%}: the usual first sign of collapse.",
        )
        limit = limits["variance_gone"] * series.best
        if series.worse(limit, bound, WINDOWS[1:], groups):
            gone[path] = series.mean(10) / series.best
        elif series.mean(10) > 2 * limit:
            gone.pop(path, None)
    shares = [share for share in gone.values() if share is not None]
    yield Finding(
        "variance_gone",
        bool(shares) and len(gone) >= len(known),
        len(gone) < max(1, len(known)),
        f"In-group reward std fell to {max(shares, default=1):.0%} of its best: there is nothing left to learn from.",
    )


def _entropy(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """A decay along with success is healthy; a fall to a fraction of the start on an unsolved task, or a rise, is not.

    Thousands of tokens make up the mean, so its noise is far below these factors.
    """
    success = row.get("rollout/success", 0.0)
    if "policy/entropy" not in row:
        return
    entropy, limits = row["policy/entropy"], setting.limits
    won = fmean(_last(memory, "success", success, 10))
    start, now = _start(memory, "entropy", entropy), fmean(_last(memory, "now", entropy, 5))
    if start is not None and start > 0:
        low = limits["entropy_collapse"] * start * room(won)
        solved = won >= limits["solved"]
        yield Finding(
            "entropy_collapse",
            now < low and not solved,
            now > 1.5 * low or solved,
            f"Entropy fell to {now / start:.0%} of its start ({now:.2g} nats), with success at {won:.0%}.",
        )
    if (grown := _grown(memory, "entropy", entropy, success, 5, limits["entropy_floor"])) is not None:
        now, lowest = grown
        yield Finding(
            "entropy_explosion",
            now > limits["entropy_explosion"] * lowest,
            now < 0.75 * limits["entropy_explosion"] * lowest,
            f"Entropy rose to {now / lowest:.1f} times its lowest value ({now:.2g} nats), and success did not: the"
            " policy diverges.",
        )


def _gradient(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """Norms that grow. One large norm is clipped and forgotten; how much norms scatter follows from the run itself."""
    norm = row.get("policy/grad_norm", 0.0)
    if norm <= 0:  # a critic that warms up, or nothing to learn from
        return
    scatter = Noisy(memory, "log", math.log(norm), 0.3**2).deviation
    if (grown := _grown(memory, "norm", norm, row.get("rollout/success", 0.0))) is not None:
        now, lowest = grown
        scatter *= math.sqrt(math.pi / 2 * (1 / 10 + 1 / 10))  # of the difference between two medians of 10
        limit = max(setting.limits["gradient_growth"], math.exp(z_bound(setting.sizes.steps, 1) * scatter))
        yield Finding(
            "gradient_growth",
            now > limit * lowest,
            now < 0.5 * limit * lowest,
            f"The gradient norm has grown to {now:.2g}, {now / lowest:.1f} times what it was, and success has not.",
        )


def _repetition(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
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


def _template(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """RAGEN-2's template collapse (arXiv 2604.06268): thoughts stay varied, but no longer depend on the prompt."""
    limits = setting.limits
    for scope in ("first_turn", "trajectory"):
        z, entropy = (row.get(f"collapse/{scope}/{key}") for key in ("mi_z_ema", "conditional_entropy_token"))
        if z is None or entropy is None:
            continue
        start, start_entropy = _start(memory, f"{scope} z", z, 3), _start(memory, f"{scope} entropy", entropy, 3)
        if start is None or start_entropy is None or start <= 0.1 or start_entropy <= 0:
            continue  # thoughts that never depended on the prompt cannot stop doing so
        low = limits["template_collapse"] * start
        count = _in_a_row(memory, scope, z < low and entropy >= 0.75 * start_entropy)
        yield Finding(
            f"template_collapse/{scope}",
            count >= 2,
            z > 1.3 * low,
            f"Thoughts depend on the prompt {z / start:.0%} as much as at the start (z-score {z:.2f}, {scope}), while"
            f" their entropy is {entropy / start_entropy:.0%} of it: varied words, one template.",
        )


def _format(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
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


def _environments(row: Row) -> list[str]:
    """Whose success is in this row: `rollout/ENV/success`."""
    parts = [key.split("/") for key in row if key.startswith("rollout/")]
    return [part[1] for part in parts if len(part) == 3 and part[2] == "success"]


def _success(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """Of the whole batch, and of each environment where there are several: one may be lost while another is learned."""
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
        usual = memory.get(name, {}).get("best", success)
        series = Noisy(memory, name, success, success_variance(usual, groups, sizes.samples))
        if series.best is None:
            continue
        where = f"Success in {name[1:]}" if name else "Success"
        yield Finding(
            f"success_drop{name}",
            series.worse(
                limits["success_drop"] * series.best,
                z_bound(sizes.steps, len(WINDOWS) * len(shown)),
                groups=groups,
                healthy=limits["wavering"] * series.best,
            ),
            series.mean(10) > (1 + limits["success_drop"]) / 2 * series.best,
            f"{where} fell to {series.mean(10):.0%} from {series.best:.0%} at best.",
        )


def _first_success(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """An environment in which nothing has ever been won: because no answer is valid, or although they are.

    After N episodes without a success one of `no_success` or more is ruled out with 99.9 % where (1 - it)^N < .001.
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
        share = fmean(_last(own, "shares", invalid, 5))
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


def _evaluation(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """Hopeless: evaluations and rollouts that rule out a success of `validation`; how many it takes follows from N."""
    limit = setting.limits["validation"]
    if (won := row.get("rollout/success")) is not None:
        memory["training"] = max(memory.get("training", 0.0), fmean(_last(memory, "rollouts", won, 10)))
    if (success := row.get("evaluation/success")) is None:
        return
    count = _in_a_row(memory, "count", success < limit and memory.get("training", 0.0) < limit)
    memory["training"] = 0.0
    memory["won"] = memory.get("won", 0.0) + success * setting.sizes.evaluation_episodes if count else 0.0
    episodes = max(1, count * setting.sizes.evaluation_episodes)
    share, z = memory["won"] / episodes, 1.96
    upper = share + z**2 / (2 * episodes) + z * math.sqrt(share * (1 - share) / episodes + z**2 / (4 * episodes**2))
    upper /= 1 + z**2 / episodes  # Wilson
    words = f"Success on validation levels was below {limit:.0%} {count} times in a row."
    yield Finding("validation", count >= 5 and upper < limit, count == 0, words)


def _forgetting(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """How far is the policy from the model that it began as, where nothing new is asked of it (arXiv 2509.04259)?

    The mean over thousands of tokens, on the same rows at each evaluation: its noise is far below the limit.
    """
    if (kl := row.get("evaluation/distillation_kl")) is None:
        return
    limit = setting.limits["forgetting"]
    words = f"On held-out prompts of the phases before, the policy is {kl:.2g} nats a token from the model it began as."
    yield Finding("forgetting", kl > limit, kl < limit / 2, words)


def _skills(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """Is a suite of the former phases answered worse than before the first step?

    On the same items, by more than three standard errors of the paired difference: by chance in one of 740 evaluations.
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


def _machinery(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """What is wrong with the run rather than the policy: engines that disagree, updates that are too long or lack."""
    limits = setting.limits
    if (clipped := row.get("policy/clip_fraction")) is not None:
        values, limit = _last(memory, "clipped", clipped, 5), limits["clip_fraction"]
        words = f"The clip took the gradient of {median(values):.1%} of the tokens (median of 5 steps)."
        yield Finding("clip_fraction", len(values) == 5 and median(values) > limit, median(values) < 0.6 * limit, words)
    if (gap := row.get("policy/sampler_gap")) is not None:
        limit = limits["sampler_gap"]
        words = f"Sampler and learner differ by {gap:.2g} nats in the log-prob of a token; {limit:.2g} is tolerated."
        yield Finding("sampler_gap", gap > limit, gap < limit / 2, words)
    if (skipped := row.get("policy/skipped_steps")) is not None:
        total = sum(_last(memory, "skipped", skipped, 10))
        words = f"{total:.0f} updates of the last 10 steps were left out: their gradients were not finite."
        yield Finding("skipped_updates", total >= limits["skipped_updates"], total == 0, words)


def _empty(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """Steps without a group to learn from: not where all is won, and more of them where few groups differ anyway.

    With a share s of groups that differ, a step of G groups has none with probability (1 - s)^G.
    """
    if (kept := row.get("rollout/kept_groups")) is None:
        return
    count = _in_a_row(memory, "empty", kept == 0)
    won = fmean(_last(memory, "success", row.get("rollout/success", 0.0), 5))
    differ = _last(memory, "differ", 1 - row.get("rollout/zero_variance_groups", 0.0), 40) if not count else []
    share = fmean(memory.get("differ") or [1.0])
    if differ:
        yield Finding("empty_steps", False, True, "")
        return
    by_chance = setting.sizes.groups * math.log1p(-min(share, 1 - 1e-9))
    needed = max(setting.limits["empty_steps"], math.log(FALSE_ALARM / setting.sizes.steps) / min(by_chance, -1e-9))
    words = f"No group passed the filter for {count} steps in a row: all samples of a group score alike."
    yield Finding("empty_steps", count >= needed and won < setting.limits["solved"], False, words)


def _numbers(memory: Memory, row: Row, setting: Setting) -> Iterator[Finding]:
    """Sees the row as it is; all other rules see its finite numbers alone, so that none of them remembers a NaN."""
    broken = {key for key, value in row.items() if not math.isfinite(value)}
    memory["keys"] = sorted((set(memory.get("keys", ())) - row.keys()) | broken)
    memory["rows"] = memory.get("rows", 0) + 1 if broken else memory.get("rows", 0) if memory["keys"] else 0
    kind = "evaluation" if any(key.startswith("evaluation/") for key in row) else "training"
    since = memory.setdefault("since", {})
    if broken:
        since.setdefault(kind, {"step": setting.step, "keys": sorted(broken)})
    else:
        since.pop(kind, None)
    listed = ", ".join(sorted(broken))
    yield Finding("not_finite", bool(broken), not memory["keys"], f"Not a finite number: {listed}.")
    words = f"For {memory['rows']} rows some numbers have not been finite: {listed}."
    yield Finding("not_finite_for_long", memory["rows"] >= setting.limits["not_finite"], memory["rows"] == 0, words)


def not_finite(state: Mapping[str, Any]) -> str:
    """Since which step a run's rows have not been finite, in words; "" where its last rows are.

    The last row of training counts, and the last of an evaluation: one overflow in between is no failure.

    >>> not_finite(watch({}, 12, {"policy/loss": math.nan})[1])
    'since step 12 its figures have not been finite numbers (policy/loss)'
    """
    found = sorted(state.get("memory", {}).get("_numbers", {}).get("since", {}).values(), key=lambda each: each["step"])
    if not found:
        return ""
    return f"since step {found[0]['step']} its figures have not been finite numbers ({', '.join(found[0]['keys'])})"


Rule = Callable[[Memory, Row, Setting], Iterator[Finding]]
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

# ------------------------------------------------------------------------------------------------------ intervention

DIVERGING = {
    "entropy_explosion", "gradient_growth", "format_decay", "success_drop", "repetition", "not_finite",
    "not_finite_for_long",
}  # fmt: skip
LEVELLING = {"variance_collapse", "variance_gone", "template_collapse"}


def rollback(alarms: Sequence[Alarm], config: Mapping[str, Any]) -> dict[str, Any]:
    """What to change when going back to the last healthy checkpoint because of these alarms, by dotted path; or {}.

    One idea at a time: half the learning rate for a policy that diverges; for one that levels out, training on the
    groups that differ (RAGEN-2's top-p), or half the learning rate where a filter is already on; more entropy bonus for
    one that explores no more. The other alarms are no reason to go back. `config` holds the values now.

    >>> alarm = Alarm("success_drop", "warn", "", "", 40)
    >>> rollback([alarm], {"trainer.learning_rate": 4e-6})
    {'trainer.learning_rate': 2e-06}
    """
    names = {alarm.name.split("/")[0] for alarm in alarms}
    if not names & DIVERGING and names & LEVELLING and config["algorithm.filter.strategy"] == "none":
        path = "algorithm.filter"
        return {f"{path}.strategy": "top_p", f"{path}.value": 0.9, f"{path}.keep_zero": False}
    if names & (DIVERGING | LEVELLING):
        return {"trainer.learning_rate": config["trainer.learning_rate"] / 2}
    if "entropy_collapse" in names:
        return {"algorithm.entropy_coef": max(0.001, 2 * config["algorithm.entropy_coef"])}
    return {}
