"""Did a program pass its tests, and what may its author be told?  Outputs are compared here, outside of the sandbox.

Printed output is compared line by line, blank lines and white space between tokens aside; a token of the expected
output that is written as a decimal fraction is met by any number within 1e-6 of it, absolutely or relatively. Values of
functions are compared as JSON, floats as above; a tuple is a list.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from envs.deep_coder.sandbox import Limits, Outcome, execute

TOLERANCE = 1e-6
SHOWN = 300  # characters of an input or output in the feedback
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
CACHED = 4096  # verdicts


@dataclass(frozen=True)
class Test:
    """Test("3 4\\n", "7\\n"); of a function its arguments and its value as JSON: Test("[3, 4]", "7")."""

    input: str
    output: str


@dataclass(frozen=True)
class Problem:
    """A task with its tests, of which the first `public` ones may be shown.

    Problem(statement="Print the sum ...", function="", tests=(Test("3 4", "7"),), public=1, key="sum")
    `function` is the one to call; without it the program reads stdin. `programs` holds known programs by the name of
    their player, `idea` a thought that leads to the right one. `home` is the data set's own split, empty where there
    is none; `boxed`: an expected value may stand in a list of its own, as in TACO.
    """

    statement: str
    function: str
    tests: tuple[Test, ...]
    public: int
    key: str
    programs: tuple[tuple[str, str], ...] = ()
    idea: str = ""
    home: str = ""
    boxed: bool = False


@dataclass(frozen=True)
class Verdict:
    """How many tests a program passed, and what is said about it: Verdict(2, "Passed 2 of 8 tests. ...")."""

    passed: int
    feedback: str


def program_of(text: str) -> str:
    """The last fenced block of an answer, else all of it; indentation that all lines share is taken off."""
    blocks = FENCE.findall(text)
    return textwrap.dedent(blocks[-1] if blocks else text).strip()


_cache: OrderedDict[tuple[Problem, str, Limits], Verdict] = OrderedDict()
_lock = threading.Lock()


def judge(problem: Problem, source: str, limits: Limits) -> Verdict:
    """The verdict on a program; the same program on the same problem is run once."""
    key = (problem, source, limits)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    outcomes = execute(source, problem.function, [test.input for test in problem.tests], limits)
    verdict = weigh(problem, outcomes)
    with _lock:
        _cache[key] = verdict
        while len(_cache) > CACHED:
            _cache.popitem(last=False)
    return verdict


def weigh(problem: Problem, outcomes: list[Outcome]) -> Verdict:
    """What outcomes come to. Tests that were not run any more are not passed."""
    passes = [passed(problem, test, outcome) for test, outcome in zip(problem.tests, outcomes, strict=False)]
    told = [f"Passed {sum(passes)} of {len(problem.tests)} tests."]
    shown = next((number for number, good in enumerate(passes) if not good and number < problem.public), None)
    failed = next((outcome for outcome, good in zip(outcomes, passes, strict=True) if not good), None)
    if failed is not None and failed.status == "syntax":
        told.append(short(failed.error))
    elif shown is not None:
        test, outcome = problem.tests[shown], outcomes[shown]
        told += [f"Test {shown + 1}", f"Input {short(test.input)}", f"Expected {short(test.output)}"]
        told.append(f"Got {short(outcome.output)}" if outcome.status == "ok" else f"Failed: {short(outcome.error)}")
        if outcome.status == "ok" and outcome.error and not outcome.output:  # a thread of it died
            told.append(f"Failed: {short(outcome.error)}")
    elif failed is not None:  # of a hidden test only the kind of its failure is told
        kind = {"ok": "wrong output", "error": "an error", "time": "time is up"}.get(failed.status, failed.status)
        told.append(f"A hidden test failed: {kind}.")
    return Verdict(sum(passes), "\n".join(told))


def passed(problem: Problem, test: Test, outcome: Outcome) -> bool:
    if outcome.status != "ok":
        return False
    if not problem.function:
        return same_text(test.output, outcome.output)
    try:
        expected, found = json.loads(test.output), json.loads(outcome.output)
    except (ValueError, RecursionError):  # no JSON, too deep, or a number of too many digits
        return False
    boxed = problem.boxed and isinstance(expected, list) and len(expected) == 1
    return same_value(expected, found) or (boxed and same_value(expected[0], found))


def same_text(expected: str, found: str) -> bool:
    lines = [[line.split() for line in text.splitlines() if line.strip()] for text in (expected, found)]
    return len(lines[0]) == len(lines[1]) and all(
        len(ours) == len(theirs) and all(map(same_token, ours, theirs)) for ours, theirs in zip(*lines, strict=True)
    )


def same_token(expected: str, found: str) -> bool:
    if expected == found:
        return True
    if "." not in expected or max(len(expected), len(found)) > 64:
        return False
    try:
        return near(float(expected), float(found))
    except ValueError:
        return False


def same_value(expected: Any, found: Any) -> bool:
    """As deep as `expected` goes, whatever was found."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(expected) == len(found) and all(map(same_value, expected, found))
    if isinstance(expected, dict):
        alike = isinstance(found, dict) and expected.keys() == found.keys()
        return alike and all(same_value(value, found[key]) for key, value in expected.items())
    if type(expected) is type(found) and not isinstance(expected, float):
        return expected == found
    try:
        return {type(expected), type(found)} <= {int, float} and near(expected, found)
    except OverflowError:  # an integer beyond every float
        return False


def near(expected: float, found: float) -> bool:
    return math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def short(text: str) -> str:
    """A text cut in its middle, unprintable characters escaped."""
    text = text.strip()
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    clean = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return clean or "nothing"
