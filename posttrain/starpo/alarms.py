"""Is this run coming apart?  Watches the rows of metrics.jsonl, says what is wrong in plain words, and what to do.

`watch` is a pure function of the rows so far: all it remembers is in a state that JSON can hold, so a resumed run
raises the alarms that an uninterrupted one would have. An alarm fires once and can fire again after its signal has
recovered past a second, milder threshold. Nothing here needs torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

START = 10  # steps whose mean is "the start" (RAGEN's baseline)
LIMITS: dict[str, float] = {  # tests/data/alarms.json has runs that they tell apart
    "variance_collapse": 0.25,  # of the start, mean of 5 steps
    "variance_gone": 0.10,  # of the start, each of 10 steps in a row: RAGEN's early stopping
    "solved": 0.95,  # success from which a small spread is no collapse
    "entropy_collapse": 0.2,  # of the start
    "entropy_explosion": 3.0,  # times the start, or the usual value of late
    "gradient_spike": 10.0,  # times the median of the last 20 steps
    "repetition": 0.15,  # share of repeated 4-grams above the start
    "template_collapse": 0.5,  # of the first z-scores, while the conditional entropy keeps 0.75 of its own
    "format_decay": 0.10,  # share of invalid turns above the best so far
    "success_drop": 0.5,  # of the best so far
    "kl_to_old": 0.03,  # nats a token, median of 5 steps: its estimate has a heavy tail
    "clip_fraction": 0.05,  # median of 5 steps
    "sampler_gap": 1e-3,  # nats; float32. bfloat16 differs by up to 0.1
    "skipped_updates": 3,  # in 10 steps
    "validation": 0.01,  # success, in 5 validations in a row
    "empty_steps": 5,  # in a row
    "not_finite": 5,  # rows in a row
}


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


class _Finding(NamedTuple):
    """What a rule sees in one row: the alarm's name, whether to fire, whether all is well again, and the words."""

    name: str
    bad: bool
    well: bool
    message: str


def watch(
    state: Mapping[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float] | None = None
) -> tuple[list[Alarm], dict[str, Any]]:
    """The alarms that this row sets off, and the state for the next one; begin with {}.

    Rows of training and of validation come in the order in which they were written; a key that a row does not have is
    not looked at. `limits` replaces entries of LIMITS.
    """
    known = {**LIMITS, **(limits or {})}
    assert known.keys() == LIMITS.keys(), known.keys() - LIMITS.keys()
    state = copy.deepcopy(dict(state)) or {"on": [], "memory": {}}
    finite = {key: value for key, value in row.items() if math.isfinite(value)}
    findings = list(_numbers(state["memory"].setdefault("_numbers", {}), row, known))
    for rule in RULES:
        findings += rule(state["memory"].setdefault(rule.__name__, {}), step, finite, known)
    alarms = []
    for name, bad, well, message in findings:
        if bad and name not in state["on"]:
            severity, remedy = ADVICE[name.split("/")[0]]
            alarms.append(Alarm(name, severity, message, remedy, step))
            state["on"].append(name)
        elif well and not bad and name in state["on"]:
            state["on"].remove(name)
    return alarms, state


ADVICE: dict[str, tuple[str, str]] = {
    "variance_collapse": (
        "warn",
        "Try preset starpo-s (`algorithm.preset`), a higher `rollout.temperature`, or fewer passes over a rollout"
        " (`algorithm.num_iterations`); if levels are always won or always lost, other levels (`worlds[].options`).",
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
    "gradient_spike": (
        "warn",
        "One is clipped and forgotten; several, or one with a falling reward, are hard to come back from: lower"
        " `trainer.learning_rate` and go on from the checkpoint before.",
    ),
    "repetition": (
        "warn",
        "Read transcripts. Raise `rollout.temperature`, train on groups whose rewards spread (preset starpo-s), or put"
        " more repetition pairs into phase 2.",
    ),
    "template_collapse": (
        "warn",
        "Train on the groups whose rewards spread: `algorithm.filter.strategy: top_p`, `value: 0.9`, `keep_zero: false`"
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
    "kl_to_old": ("warn", "Lower `trainer.learning_rate`, or fewer updates a rollout."),
    "clip_fraction": ("warn", "Lower `trainer.learning_rate`, or fewer updates a rollout."),
    "sampler_gap": (
        "warn",
        "Sampler and learner compute different models: write `rollout.engine: replay`, and report it.",
    ),
    "skipped_updates": ("warn", "Numbers overflow: write `trainer.bf16: false`, or lower `trainer.learning_rate`."),
    "validation": (
        "stop",
        "The model cannot play this yet: easier levels (`worlds[].options`), or demonstrations in phase 1.",
    ),
    "empty_steps": (
        "stop",
        "Levels are too hard or too easy for this model: others (`worlds[].options`), more siblings"
        " (`rollout.num_generations`) or a higher `rollout.temperature`; where `rollout/crashed` is not 0, it is the"
        " world that needs mending.",
    ),
    "not_finite": ("warn", "Write `trainer.bf16: false` and look at the transcripts and rewards of this step."),
    "not_finite_for_long": ("stop", "Go back to the last checkpoint with a lower `trainer.learning_rate`."),
}

# -------------------------------------------------------------------------------------------------------- memory


def _last(memory: dict[str, Any], name: str, value: float, count: int) -> list[float]:
    """The last `count` values, this one included."""
    memory[name] = [*memory.get(name, ()), value][-count:]
    return memory[name]


def _start(memory: dict[str, Any], name: str, value: float, count: int = START) -> float | None:
    """Mean of the first `count` values; None until there are so many."""
    first = memory.setdefault(f"start {name}", [])
    if len(first) < count:
        first.append(value)
    return fmean(first) if len(first) == count else None


def _in_a_row(memory: dict[str, Any], name: str, holds: bool) -> int:
    memory[name] = memory.get(name, 0) + 1 if holds else 0
    return memory[name]


def _forget_easier_levels(memory: dict[str, Any], row: Mapping[str, float]) -> None:
    """Begin anew where a curriculum has moved on: what was normal before says nothing about the new levels."""
    stages = {key: value for key, value in row.items() if key.endswith("/stage")}  # of the worlds that were played
    known = memory.get("stages", {})
    if any(known.get(key, value) != value for key, value in stages.items()):
        memory.clear()
    memory["stages"] = known | stages


# --------------------------------------------------------------------------------------------------------- rules


def room(success: float, start: float) -> float:
    """What a rising success leaves of the spread within groups: p (1 - p) now over that at the start, at most 1.

    Only above one half: the way from half to never won is a loss, not a solution.

    >>> room(0.9, 0.5), room(0.2, 0.5)
    (0.36, 1.0)
    """
    before = start * (1 - start)
    return min(1.0, round(success * (1 - success) / before, 6)) if success > 0.5 and before > 0 else 1.0


def _spread(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    """The echo trap's first sign (RAGEN, arXiv 2504.20073, section 4.1): siblings score alike.

    A task that is solved looks the same from here, so the spread is compared with what the success leaves room for,
    and from `solved` on not at all.
    """
    if "rollout/in_group_std" not in row:
        return
    _forget_easier_levels(memory, row)
    std, success = row["rollout/in_group_std"], row.get("rollout/success", 0.0)
    start, start_success = _start(memory, "std", std), _start(memory, "success", success)
    stds, successes = _last(memory, "stds", std, 5), _last(memory, "successes", success, 5)
    if start is None or start_success is None or start <= 1e-6:
        return
    won = fmean(successes)
    share = 1.0 if won >= limits["solved"] else fmean(stds) / (start * room(won, start_success))
    if share >= 0.75 or "healthy" not in memory:
        memory["healthy"] = step
    steps = step - memory["healthy"]
    yield _Finding(
        "variance_collapse",
        share < limits["variance_collapse"],
        share > 1.6 * limits["variance_collapse"],
        f"In-group reward std fell to {fmean(stds) / start:.0%} of its start in {steps} steps, with success at"
        f" {won:.0%}: the usual first sign of collapse.",
    )
    gone = won < limits["solved"] and std < limits["variance_gone"] * start * room(won, start_success)
    count = _in_a_row(memory, "gone", gone)
    yield _Finding(
        "variance_gone",
        count >= 10,
        share > 2 * limits["variance_gone"],
        f"In-group reward std has been below {limits['variance_gone']:.0%} of its start for {count} steps: there is"
        " nothing left to learn from.",
    )


def _entropy(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    """A slow decay is healthy; a fall to a fraction of the start on an unsolved task, or a rise, is not."""
    success = fmean(_last(memory, "success", row["rollout/success"], 3)) if "rollout/success" in row else 0.0
    if "policy/entropy" not in row:
        return
    entropy = row["policy/entropy"]
    before = memory.get("usual", [])
    usual = median(before) if len(before) >= 5 else math.inf
    _last(memory, "usual", entropy, 20)
    start, now = _start(memory, "entropy", entropy), fmean(_last(memory, "now", entropy, 3))
    if start is None or start <= 0:
        return
    low = limits["entropy_collapse"] * start
    yield _Finding(
        "entropy_collapse",
        now < low and success < limits["solved"],
        now > 1.5 * low or success >= limits["solved"],
        f"Entropy fell to {now / start:.0%} of its start ({now:.2g} nats), with success at {success:.0%}.",
    )
    reference = max(min(start, usual), 0.05)
    yield _Finding(
        "entropy_explosion",
        now > limits["entropy_explosion"] * reference,
        now < 0.75 * limits["entropy_explosion"] * reference,
        f"Entropy rose to {now / reference:.1f} times its usual value ({now:.2g} nats): the policy is coming apart.",
    )


def _gradient(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    norm, before = row.get("policy/grad_norm", 0.0), memory.get("norms", [])
    if norm == 0:  # a critic that warms up, or nothing to learn from
        return
    usual = median(before) if len(before) >= 5 else 0.0
    _last(memory, "norms", norm, 20)
    if usual > 0:
        yield _Finding(
            "gradient_spike",
            norm > limits["gradient_spike"] * usual,
            norm < 0.3 * limits["gradient_spike"] * usual,
            f"The gradient norm is {norm:.2g}, {norm / usual:.0f} times its median of the last {len(before)} steps.",
        )


def _repetition(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    if "rollout/repeated_share" not in row:
        return
    share = row["rollout/repeated_share"]
    start, now = _start(memory, "share", share), fmean(_last(memory, "now", share, 3))
    if start is not None:
        yield _Finding(
            "repetition",
            now > max(2 * start, start + limits["repetition"]),
            now < start + limits["repetition"] / 2,
            f"{now:.0%} of the 4-grams of an answer repeat earlier ones, against {start:.0%} at the start.",
        )


def _template(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    """Thoughts stay varied but no longer depend on the prompt (RAGEN-2, arXiv 2604.06268); measured every few steps."""
    for scope in ("first_turn", "trajectory"):
        z, entropy = (row.get(f"collapse/{scope}/{key}") for key in ("mi_z_ema", "conditional_entropy_token"))
        if z is None or entropy is None:
            continue
        start, start_entropy = _start(memory, f"{scope} z", z, 3), _start(memory, f"{scope} entropy", entropy, 3)
        if start is None or start_entropy is None or start <= 0.1 or start_entropy <= 0:
            continue  # thoughts that never depended on the prompt cannot stop doing so
        low = limits["template_collapse"] * start
        count = _in_a_row(memory, scope, z < low and entropy >= 0.75 * start_entropy)
        yield _Finding(
            f"template_collapse/{scope}",
            count >= 2,
            z > 1.3 * low,
            f"Thoughts depend on the prompt {z / start:.0%} as much as at the start (z-score {z:.2f}, {scope}), while"
            f" their entropy is {entropy / start_entropy:.0%} of it: varied words, one template.",
        )


def _format(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    if "rollout/invalid_turns" not in row:
        return
    shares = _last(memory, "shares", row["rollout/invalid_turns"], 5)
    if len(shares) < 5:
        return
    now, best = fmean(shares), min(memory.get("best", 1.0), fmean(shares))
    memory["best"] = best
    yield _Finding(
        "format_decay",
        now > best + limits["format_decay"] and now > min(2 * best, (1 + best) / 2),
        now < best + 0.6 * limits["format_decay"],
        f"{now:.0%} of the turns are badly formed or name an unknown action; it was {best:.0%} at best.",
    )


def _success(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    if "rollout/success" not in row:
        return
    _forget_easier_levels(memory, row)
    values = _last(memory, "values", row["rollout/success"], 10)
    if len(values) < 10:
        return
    now, best = fmean(values), max(memory.get("best", 0.0), fmean(values))
    memory["best"] = best
    if best >= 0.1:
        yield _Finding(
            "success_drop",
            now < limits["success_drop"] * best,
            now > 1.4 * limits["success_drop"] * best,
            f"Success fell to {now:.0%} from {best:.0%} at best.",
        )


def _distance(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    words = {
        "kl_to_old": "The policy moves {:.3f} nats a token from the one that sampled (median of 5 steps).",
        "clip_fraction": "The clip took the gradient of {:.1%} of the tokens (median of 5 steps).",
    }
    for name, text in words.items():
        if (value := row.get(f"policy/{name}")) is None:
            continue
        values = _last(memory, name, value, 5)
        now, limit = median(values), limits[name]
        yield _Finding(name, len(values) == 5 and now > limit, now < 0.6 * limit, text.format(now))


def _machinery(
    memory: dict[str, Any], step: int, row: Mapping[str, float], limits: Mapping[str, float]
) -> Iterator[_Finding]:
    """What is wrong with the run rather than with the policy: engines that disagree, updates and groups that lack."""
    if (gap := row.get("policy/sampler_gap")) is not None:
        limit = limits["sampler_gap"]
        words = f"Sampler and learner differ by {gap:.2g} nats in the log-prob of a token; {limit:.2g} is tolerated."
        yield _Finding("sampler_gap", gap > limit, gap < limit / 2, words)
    if (skipped := row.get("policy/skipped_steps")) is not None:
        total = sum(_last(memory, "skipped", skipped, 10))
        words = f"{total:.0f} updates of the last 10 steps were left out: their gradients were not finite."
        yield _Finding("skipped_updates", total >= limits["skipped_updates"], total == 0, words)
    if (kept := row.get("rollout/kept_groups")) is not None:
        count = _in_a_row(memory, "empty", kept == 0)
        words = f"No group passed the filter for {count} steps in a row: all siblings score alike."
        yield _Finding("empty_steps", count >= limits["empty_steps"], count == 0, words)
    if (success := row.get("evaluation/success")) is not None:
        count = _in_a_row(memory, "hopeless", success < limits["validation"])
        words = f"Success on validation levels was below {limits['validation']:.0%} {count} times in a row."
        yield _Finding("validation", count >= 5, count == 0, words)


def _numbers(memory: dict[str, Any], row: Mapping[str, float], limits: Mapping[str, float]) -> Iterator[_Finding]:
    """Sees the row as it is; all other rules see its finite numbers alone, so that none of them remembers a NaN."""
    broken = {key for key, value in row.items() if not math.isfinite(value)}
    memory["keys"] = sorted((set(memory.get("keys", ())) - row.keys()) | broken)
    memory["rows"] = memory.get("rows", 0) + 1 if broken else memory.get("rows", 0) if memory["keys"] else 0
    listed = ", ".join(sorted(broken))
    yield _Finding("not_finite", bool(broken), not memory["keys"], f"Not a finite number: {listed}.")
    words = f"For {memory['rows']} rows some numbers have not been finite: {listed}."
    yield _Finding("not_finite_for_long", memory["rows"] >= limits["not_finite"], memory["rows"] == 0, words)


Rule = Callable[[dict[str, Any], int, Mapping[str, float], Mapping[str, float]], Iterator[_Finding]]
RULES: tuple[Rule, ...] = (
    _spread,
    _entropy,
    _gradient,
    _repetition,
    _template,
    _format,
    _success,
    _distance,
    _machinery,
)

# ------------------------------------------------------------------------------------------------------ intervention

DIVERGING = {"entropy_explosion", "format_decay", "success_drop", "repetition", "not_finite", "not_finite_for_long"}
LEVELLING = {"variance_collapse", "variance_gone", "template_collapse"}


def rollback(alarms: Sequence[Alarm], config: Mapping[str, Any]) -> dict[str, Any]:
    """What to change when going back to the last healthy checkpoint because of these alarms, by dotted path; or {}.

    One idea at a time: half the learning rate for a policy that comes apart; for one that levels out, training on the
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
