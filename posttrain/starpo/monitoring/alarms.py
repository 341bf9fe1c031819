"""Does this run diverge or collapse?  Watches the rows of metrics.jsonl, says what is wrong and what to do.

`watch` is a pure function of the rows so far: all it remembers is in a state that JSON can hold, so a resumed run
raises the alarms that an uninterrupted one would have. An alarm fires once and can fire again after its signal has
recovered past a second, milder threshold.

A figure of a batch has sampling noise, and 200 steps are 200 chances to be wrong. So an alarm on a noisy figure needs
two things: a change large enough to matter (LIMITS), and one that the noise of this batch does not explain (`z_bound`
standard deviations, corrected for the number of steps). docs/metrics.md derives both.

To add an alarm: a limit in LIMITS, severity and remedy in ADVICE (alarm_limits.py), a function in RULES that yields a
Finding for each row that has its figures (alarm_rules.py), and a line in docs/metrics.md. `Noisy` (alarm_series.py)
keeps a series, its best level and its noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.starpo.monitoring.alarm_limits import ADVICE, LIMITS
from posttrain.starpo.monitoring.alarm_rules import RULES, Figures, Finding, Setting, Sizes
from posttrain.starpo.monitoring.alarm_series import Memory

if TYPE_CHECKING:
    from posttrain.config import StarPORun
    from posttrain.starpo.run_state import AlarmState

USUAL = Sizes()


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


def watch(
    state: AlarmState,
    step: int,
    row: Figures,
    sizes: Sizes = USUAL,
    limits: Mapping[str, float] | None = None,
    cfg: StarPORun | None = None,
) -> tuple[list[Alarm], AlarmState]:
    """The alarms that this row sets off, and the state for the next one; begin with {}.

    Rows of training and of evaluation come in the order in which they were written; a key that a row does not have is
    not looked at. `limits` replaces entries of LIMITS. cfg: advice leaves out what this run has already.
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
    """As `watch`, with the state changed in place."""
    known = {**LIMITS, **(limits or {})}
    assert known.keys() == LIMITS.keys(), known.keys() - LIMITS.keys()
    on, memory = state.setdefault("on", []), state.setdefault("memory", {})
    setting = Setting(step, sizes, known)
    finite = {key: value for key, value in row.items() if math.isfinite(value)}
    findings = list(_numbers(memory.setdefault("_numbers", {}), row, setting))
    for rule in RULES:
        findings += rule(memory.setdefault(rule.__name__, {}), finite, setting)
    alarms = []
    for name, bad, well, message in findings:
        if bad and name not in on:
            advice = ADVICE[name.split("/")[0]]
            alarms.append(Alarm(name, advice.severity, message, advice.words(cfg), step))
            on.append(name)
        elif well and not bad and name in on:
            on.remove(name)
    return alarms


def _numbers(memory: Memory, row: Figures, setting: Setting) -> Iterator[Finding]:
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


def not_finite(state: AlarmState) -> str:
    """Since which step a run's rows have not been finite, in words; "" where its last rows are.

    The last row of training counts, and the last of an evaluation: one overflow in between is no failure.

    >>> not_finite(watch({}, 12, {"policy/loss": math.nan})[1])
    'since step 12 its figures have not been finite numbers (policy/loss)'
    """
    found = sorted(state.get("memory", {}).get("_numbers", {}).get("since", {}).values(), key=lambda each: each["step"])
    if not found:
        return ""
    return f"since step {found[0]['step']} its figures have not been finite numbers ({', '.join(found[0]['keys'])})"
