"""Does this run diverge or collapse?  Alarms on the rows of metrics.jsonl, with advice.

`watch` is a pure function of the rows so far. Its state can be stored as JSON, so a resumed run raises the same alarms.
An alarm fires once; it can fire again after its figure has recovered past a second, milder limit.

A noisy figure needs a change that is large enough to matter (LIMITS) and larger than the noise of the batch explains,
corrected for the number of steps. docs/metrics.md derives both.

To add an alarm: a limit in LIMITS, severity and remedy in ADVICE (alarm_limits.py), a function in RULES
(alarm_rules.py), and a line in docs/metrics.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.starpo.monitoring.alarm_limits import ADVICE, LIMITS
from posttrain.starpo.monitoring.alarm_rules import OF_REWARDS, RULES, Figures, Finding, Setting, Sizes
from posttrain.starpo.monitoring.alarm_series import Memory

if TYPE_CHECKING:
    from posttrain.config import StarPORun
    from posttrain.starpo.run_state import AlarmState

USUAL = Sizes()


@dataclass(frozen=True)
class Alarm:
    """An alarm: Alarm("variance_collapse", "warn", "In-group reward std fell to 18 % ...", "Try ...", step=34).

    Severity `stop` means that further steps are wasted.
    """

    name: str
    severity: str
    message: str
    remedy: str
    step: int

    def __str__(self) -> str:
        return f"step {self.step}: {self.message} {self.remedy}"


def watch(
    state: AlarmState,
    step: int,
    row: Figures,
    sizes: Sizes = USUAL,
    limits: Mapping[str, float] | None = None,
    cfg: StarPORun | None = None,
) -> tuple[list[Alarm], AlarmState]:
    """Return the alarms that this row raises, and the state for the next row; the first state is {}.

    Args:
        row: of training or of evaluation, in the order in which they were written.
        limits: replaces entries of LIMITS.
        cfg: advice leaves out what this run already does.
    """
    after = copy.deepcopy(state)
    return advance(after, step, row, sizes, limits, cfg), after


def advance(
    state: AlarmState,
    step: int,
    row: Figures,
    sizes: Sizes = USUAL,
    limits: Mapping[str, float] | None = None,
    cfg: StarPORun | None = None,
) -> list[Alarm]:
    """Return the alarms that `watch` returns; change the state in place."""
    all_limits = {**LIMITS, **(limits or {})}
    assert all_limits.keys() == LIMITS.keys(), all_limits.keys() - LIMITS.keys()
    on, memory = state.setdefault("on", []), state.setdefault("memory", {})
    setting = Setting(step, sizes, all_limits)
    finite = {key: value for key, value in row.items() if math.isfinite(value)}
    findings = list(_numbers(memory.setdefault("_numbers", {}), row, setting))
    for rule in RULES:
        if rule in OF_REWARDS and cfg is not None and not cfg.rewarded:
            continue
        findings += rule(memory.setdefault(rule.__name__, {}), finite, setting)
    alarms: list[Alarm] = []
    for name, bad, well, message in findings:
        if bad and name not in on:
            advice = ADVICE[name.split("/")[0]]
            alarms.append(Alarm(name, advice.severity, message, advice.words(cfg), step))
            on.append(name)
        elif well and not bad and name in on:
            on.remove(name)
    return alarms


def _numbers(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
    """Look for numbers that are not finite; all other rules see only the finite ones, so that none remembers a NaN."""
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


def not_finite(state: AlarmState) -> str:
    """Return since which step the figures have not been finite, in words; "" if the last rows are finite.

    The last row of training and the last row of evaluation count, not an overflow between them.

    >>> not_finite(watch({}, 12, {"policy/loss": math.nan})[1])
    'since step 12 its figures have not been finite numbers (policy/loss)'
    """
    kinds = sorted(state.get("memory", {}).get("_numbers", {}).get("since", {}).values(), key=lambda each: each["step"])
    if not kinds:
        return ""
    return f"since step {kinds[0]['step']} its figures have not been finite numbers ({', '.join(kinds[0]['keys'])})"
