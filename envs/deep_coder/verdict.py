"""Did a program pass its tests, and what is the feedback?  Outputs are compared here, outside of the sandbox.

Printed output is compared line by line, blank lines and white space between tokens aside; a token of the expected
output that is written as a decimal fraction is met by any number within 1e-6 of it, absolutely or relatively. Values of
functions are compared as JSON, floats as above, integers exactly; a tuple is a list.

Tests that may be shown pay nothing, nor does a program that knows nothing but an output of theirs.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from envs.deep_coder.sandbox import Limits, TestOutcome, run_in_sandbox
from envs.sentences import escaped

TOLERANCE = 1e-6
SHOWN = 300  # characters of an input or output in the feedback
OPENING = re.compile(r"(?:[-*+>] |[0-9]{1,3}[.)] )?(?P<fence>`{3,}|~{3,})[ \t]*(?P<tag>[^`]*)")  # a line of a fence
SAID = re.compile(r"[^`]*(?P<fence>`{3,})[ \t]*(?P<tag>[\w.+#-]*)")  # "The program: ```python": words before the fence
CLOSING = re.compile(r"(?P<last>[^`]*?)(?P<fence>`{3,}|~{3,})")  # also behind the last line of the program
CLOSED = re.compile(r"(?P<last>)(?P<fence>`{3,}|~{3,})(?P<tag>[^`]*)")  # "``` does not work": words behind the fence
PYTHON = re.compile(r"\{?\.?(?:python|py|pypy|ipython)[0-9.]*(?![a-z])", re.IGNORECASE)
CACHED = 4096  # verdicts


@dataclass(frozen=True)
class Test:
    """Test("3 4\\n", "7\\n"); of a function its arguments and its value as JSON: Test("[3, 4]", "7")."""

    input: str
    output: str


@dataclass(frozen=True)
class CodeProblem:
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

    @property
    def hidden(self) -> tuple[Test, ...]:
        return self.tests[self.public :]

    def pays(self, passed: Sequence[Test]) -> bool:
        """Return whether hidden tests that were passed are worth something.

        They are not where one output answers them all and may be shown: to print it needs no program.
        """
        outputs = {" ".join(test.output.split()) for test in passed}
        return len(outputs) > 1 or bool(outputs - {" ".join(test.output.split()) for test in self.tests[: self.public]})


@dataclass(frozen=True)
class TestVerdict:
    """Tests that passed, those that count for the reward, and the feedback: Verdict(2, 1, "Passed 2 of 8 ...")."""

    passed: int
    paid: int
    feedback: str


def program_of(text: str) -> str:
    """Return the last fenced block of Python, else the last without a language, else any other, else all of the text.

    Indentation that all lines share is taken off. A block that is not closed goes on to the end.
    """
    blocks = fenced(text)
    for is_wanted in (PYTHON.match, lambda tag: not tag, lambda tag: True):
        if programs := [program for tag, program in blocks if is_wanted(tag)]:
            return textwrap.dedent(programs[-1]).strip()
    alone = text.strip()
    ticks = len(alone) - len(alone.lstrip("`"))
    if 0 < ticks < len(alone) / 2 and alone.endswith("`" * ticks) and "`" not in alone[ticks:-ticks]:
        text = alone[ticks:-ticks]
    return textwrap.dedent(text).strip()


def fenced(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of each fenced block, as Markdown defines them (CommonMark 4.5).

    Models also write words before an opening fence and behind a closing one, and open a block before they have closed
    another. Only a line that begins with a fence at least as long as its block's can end the block.
    """
    blocks: list[tuple[str, str]] = []
    fence, tag, lines = "", "", []
    for line in text.split("\n"):
        bare = line.strip()
        if not fence:
            if opening := OPENING.fullmatch(bare) or SAID.fullmatch(bare):
                fence, tag, lines = opening["fence"], opening["tag"].strip(), []
            continue
        closing = CLOSING.fullmatch(bare) or CLOSED.fullmatch(bare)
        if closing and closing["fence"][0] == fence[0] and len(closing["fence"]) >= len(fence):
            lines += [line.rstrip()[: -len(closing["fence"])]] if closing["last"] else []
            blocks.append((tag, "\n".join(lines)))
            again = PYTHON.match(closing.groupdict().get("tag", "").strip())
            fence, tag, lines = (closing["fence"], again[0], []) if again else ("", "", [])
        else:
            lines.append(line.removesuffix("\r"))
    return [*blocks, (tag, "\n".join(lines))] if fence else blocks


_cache: OrderedDict[tuple[CodeProblem, str, Limits], TestVerdict] = OrderedDict()
_lock = threading.Lock()


def judge(problem: CodeProblem, source: str, limits: Limits) -> TestVerdict:
    """Return the verdict on a program; the same program on the same problem is run once."""
    key = (problem, source, limits)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    with closing(run_in_sandbox(source, problem.function, [test.input for test in problem.tests], limits)) as outcomes:
        verdict = weigh(problem, outcomes)
    with _lock:
        _cache[key] = verdict
        while len(_cache) > CACHED:
            _cache.popitem(last=False)
    return verdict


def weigh(problem: CodeProblem, outcomes: Iterable[TestOutcome]) -> TestVerdict:
    """Return what outcomes come to, each compared as it comes. Tests that were not run any more are not passed."""
    good, failed = [], None  # numbers of the tests passed; the first test that failed, with its number and outcome
    for number, (test, outcome) in enumerate(zip(problem.tests, outcomes, strict=False), 1):
        if passed(problem, test, outcome):
            good.append(number)
        elif failed is None:
            failed = number, test, outcome
    hidden = [problem.tests[number - 1] for number in good if number > problem.public]
    lines = [f"Passed {len(good)} of {len(problem.tests)} tests."]
    feedback = "\n".join(lines if failed is None else [*lines, *_told_of(problem, *failed)])
    return TestVerdict(len(good), len(hidden) if problem.pays(hidden) else 0, feedback)


def _told_of(problem: CodeProblem, number: int, test: Test, outcome: TestOutcome) -> Iterator[str]:
    """Yield the feedback on a test that failed: of a hidden one only the kind of its failure."""
    if outcome.status == "syntax":
        yield short(outcome.error)
    elif number > problem.public:
        kind = {"ok": "wrong output", "error": "an error", "time": "time is up"}.get(outcome.status, outcome.status)
        yield f"A hidden test failed: {kind}."
    else:
        yield from (f"Test {number}", f"Input {short(test.input)}", f"Expected {short(test.output)}")
        yield f"Got {short(outcome.output)}" if outcome.status == "ok" else f"Failed: {short(outcome.error)}"
        if outcome.status == "ok" and outcome.error and not outcome.output:  # a thread of it died
            yield f"Failed: {short(outcome.error)}"


def passed(problem: CodeProblem, test: Test, outcome: TestOutcome) -> bool:
    if outcome.status != "ok":
        return False
    if not problem.function:
        return same_output(test.output, outcome.output)
    try:
        expected, actual = json.loads(test.output), json.loads(outcome.output)
    except (ValueError, RecursionError):  # no JSON, too deep, or a number of too many digits
        return False
    boxed = problem.boxed and isinstance(expected, list) and len(expected) == 1
    return same_value(expected, actual) or (boxed and same_value(expected[0], actual))


def same_output(expected: str, actual: str) -> bool:
    ours = expected.split()
    theirs = actual.split(maxsplit=len(ours))  # of a long output that is wrong, little is split
    return (
        len(ours) == len(theirs)
        and all(map(same_token, ours, theirs))
        and line_lengths(expected) == line_lengths(actual)
    )


def line_lengths(text: str) -> list[int]:
    """Return how many tokens each line has that has any."""
    return [len(line.split()) for line in text.splitlines() if line.strip()]


def same_token(expected: str, actual: str) -> bool:
    if expected == actual:
        return True
    if "." not in expected or max(len(expected), len(actual)) > 64:
        return False
    try:
        return near(float(expected), float(actual))
    except ValueError:
        return False


def same_value(expected: Any, actual: Any) -> bool:
    """Return whether a value equals `expected`, which decides how deep the comparison goes."""
    if isinstance(expected, list):
        return isinstance(actual, list) and len(expected) == len(actual) and all(map(same_value, expected, actual))
    if isinstance(expected, dict):
        alike = isinstance(actual, dict) and expected.keys() == actual.keys()
        return alike and all(same_value(value, actual[key]) for key, value in expected.items())
    if not isinstance(expected, float):  # 3.0 is 3, but True is not 1
        return expected == actual and isinstance(expected, bool) == isinstance(actual, bool)
    try:
        return type(actual) in (int, float) and near(expected, actual)
    except OverflowError:  # an integer beyond every float
        return False


def near(expected: float, actual: float) -> bool:
    return math.isclose(expected, actual, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def short(text: str) -> str:
    """Return a text cut in its middle, unprintable characters escaped."""
    text = text.strip()
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return escaped(text) or "nothing"
