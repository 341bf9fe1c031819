"""Where do the built-in problems come from?  From tasks with parameters, each as a program or as a function.

Half of them are the tasks of tasks.py, half are put together: which numbers to take, what to make of each, and what to
tell of them. A problem's tests belong to it: its key seeds their arguments. What is put together has what it answers
for its key, so of two texts that ask for the same none is held out from the other.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from envs.deep_coder.tasks import TASKS, ints
from envs.deep_coder.verdict import CodeProblem, Test

TESTS, PUBLIC = 8, 2
ALIKE = 4  # tests with one output, at most: a program that prints it whatever it reads passes no more
TRIES = 30  # draws of arguments whose output is not there yet
TASKS_SHARE = 0.5
READ = {  # an argument's name -> in a line of stdin, as an argument, and how a program reads it
    "numbers": ("integers, maybe none", "a list of integers, maybe empty", "list(map(int, input().split()))"),
    "words": ("words, maybe none", "a list of words, maybe empty", "input().split()"),
    "text": ("a text", "a text", "input()"),
}
WHOLE = ("an integer", "an integer", "int(input())")
Choice = tuple[str, str, Callable[[int, int], Any]]
TAKE: tuple[Choice, ...] = (  # words, source, and the same as a function of x and k
    ("even", "x % 2 == 0", lambda x, k: x % 2 == 0),
    ("odd", "x % 2 == 1", lambda x, k: x % 2 == 1),
    ("divisible by {k}", "x % {k} == 0", lambda x, k: x % k == 0),
    ("greater than {k}", "x > {k}", lambda x, k: x > k),
    ("at most {k}", "x <= {k}", lambda x, k: x <= k),
    ("negative", "x < 0", lambda x, k: x < 0),
    ("not divisible by {k}", "x % {k} != 0", lambda x, k: x % k != 0),
)
MAKE: tuple[Choice, ...] = (
    ("", "x", lambda x, m: x),
    ("square each", "x * x", lambda x, m: x * x),
    ("take the absolute value of each", "abs(x)", lambda x, m: abs(x)),
    ("multiply each by {m}", "{m} * x", lambda x, m: m * x),
    ("replace each by the sum of its digits", "sum(map(int, str(abs(x))))", lambda x, m: sum(map(int, str(abs(x))))),
    ("replace each by its distance from {m}", "abs(x - {m})", lambda x, m: abs(x - m)),
)
TELL: tuple[tuple[str, str, Callable[[list[int]], Any]], ...] = (
    ("their sum", "sum(made)", sum),
    ("the largest", "max(made)", max),
    ("the smallest", "min(made)", min),
    ("how many different values there are", "len(set(made))", lambda made: len(set(made))),
    ("the difference of the largest and the smallest", "max(made) - min(made)", lambda made: max(made) - min(made)),
    ("the last one", "made[-1]", lambda made: made[-1]),
    ("all of them, sorted ascending", "sorted(made)", sorted),
    ("all of them in reverse order", "made[::-1]", lambda made: made[::-1]),
)


_rng = np.random.default_rng(0)
BATTERY = [  # what tells functions apart: single numbers, longer and longer lists for values that fall together, any
    *([x] for x in range(-60, 61)), *(list(range(-20, end)) for end in range(-18, 41, 2)),
    *(ints(_rng, -20, 40, 4) for _ in range(40)),
]  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A problem before it is put into words: `lines` define the function `name`, with the marks of tasks.py."""

    key: str
    text: str
    idea: str
    name: str
    arguments: list[str]
    lines: list[str]
    answer: Callable[..., Any]
    sample: Callable[[np.random.Generator], tuple[Any, ...]]
    edges: tuple[tuple[Any, ...], ...]


def problems(rng: np.random.Generator) -> Iterator[CodeProblem]:
    """Yield problems without end, alike in every split."""
    while True:
        called = bool(rng.random() < 0.5)
        if rng.random() < TASKS_SHARE:
            number = int(rng.integers(len(TASKS)))
            drawn = from_task(number, tuple(TASKS[number].parameters(rng).items()), called)
        else:
            choice = tuple(int(rng.integers(len(some))) for some in (TAKE, MAKE, TELL))
            drawn = put_together(choice, int(rng.integers(3, 10)), int(rng.integers(2, 10)), called)
        if drawn is not None:
            yield drawn


@lru_cache(maxsize=1 << 14)
def from_task(number: int, parameters: tuple[tuple[str, int], ...], called: bool) -> CodeProblem | None:
    """Return the problem of one task and its parameters, `called` as a function."""
    task, values = TASKS[number], dict(parameters)
    name = task.function.__name__
    names = list(inspect.signature(task.function).parameters)
    arguments = [each for each in names if each not in values]
    head = f"def {name}({', '.join(f'{each}={values[each]}' if each in values else each for each in names)}):"
    lines = [head, *inspect.getsource(task.function).splitlines()[1:]]
    return problem(
        Draft(
            key=f"{name} {' '.join(map(str, values.values()))}",
            text=task.text.format(**values),
            idea=task.idea.format(**values),
            name=name,
            arguments=arguments,
            lines=lines,
            answer=lambda *inputs: task.function(*inputs, **values),
            sample=task.sample,
            edges=task.edges,
        ),
        called,
    )


@lru_cache(maxsize=1 << 14)
def put_together(choice: tuple[int, ...], k: int, m: int, called: bool) -> CodeProblem | None:
    """Take some of the numbers, make something of each, tell something of them."""
    (which, keep, good), (change, make, made) = TAKE[choice[0]], MAKE[choice[1]]
    what, tell, result_of = TELL[choice[2]]
    text = f"Take the numbers that are {which}" + (f", {change}" if change else "") + f". Give {what}"
    scalar = not isinstance(result_of([1]), list)
    partial = tell.startswith(("max", "min", "made[-1]"))  # raises where nothing is left
    text = (text + (", or 0 if there are none." if scalar else ".")).format(k=k, m=m)
    lines = ["def solve(numbers):"]
    lines += [f"    made = [{make} for x in numbers if {keep}]  # off: made = [{make} for x in numbers[1:] if {keep}]"]
    if partial:
        lines += ["    if not made:  # edge", "        return 0  # edge"]
    lines.append(f"    return {tell}")

    def answer(numbers: list[int]) -> Any:
        values = [made(x, m) for x in numbers if good(x, k)]
        return result_of(values) if values or not scalar else 0

    return problem(
        Draft(
            key=f"solve {behaviour(answer)}",
            text=text,
            idea="Take the right numbers first. No number left is a case of its own.",
            name="solve",
            arguments=["numbers"],
            lines=[line.format(k=k, m=m) for line in lines],
            answer=answer,
            sample=lambda rng: (ints(rng, -20, 40, 4),),
            edges=(([],), ([1],), ([-30, 3, 2, 8, 60],)),
        ),
        called,
    )


def problem(draft: Draft, called: bool) -> CodeProblem | None:
    """Return a draft as a problem; None where one output is that of too many tests."""
    name, arguments, lines, text = draft.name, draft.arguments, draft.lines, draft.text
    tests = tuple(test_of(each, value, called) for each, value in examples(draft))
    if Counter(test.output for test in tests).most_common(1)[0][1] > ALIKE:
        return None
    kinds_of = [READ.get(each, WHOLE) for each in arguments]
    if called:
        described = ", ".join(f"{each} is {kind[1]}" for each, kind in zip(arguments, kinds_of, strict=True))
        text += f"\nWrite a function {name}({', '.join(arguments)}) that returns the result; {described}.\n"
        text += f"Example arguments {tests[0].input}\nResult {tests[0].output}"
    else:
        order = ", ".join(f"line {number} {kind[0]}" for number, kind in enumerate(kinds_of, 1))
        text += f"\nRead from stdin: {order}. Print the result.\n"
        text += f"Example input\n{tests[0].input}Output\n{tests[0].output}"
    kinds = {"expert": lines, "off_by_one": off_by_one(lines), "no_edge_cases": no_edge_cases(lines)}
    listed = isinstance(draft.answer(*draft.edges[0]), list)
    end = "" if called else f"\nprint({'*' * listed}{name}({', '.join(kind[2] for kind in kinds_of)}))"
    programs = tuple((player, "\n".join(map(without_mark, each)) + end) for player, each in kinds.items())
    return CodeProblem(text.rstrip("\n"), name if called else "", tests, PUBLIC, draft.key, programs, draft.idea)


def examples(draft: Draft) -> list[tuple[tuple[Any, ...], Any]]:
    """Return arguments with their values: two samples, the edges, and more samples, of other values where possible."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(draft.key.encode()).digest()[:8], "big"))
    edges = [(each, draft.answer(*each)) for each in draft.edges]
    pairs: list[tuple[tuple[Any, ...], Any]] = []
    while len(pairs) < TESTS:
        if len(pairs) == PUBLIC:
            pairs += edges
        there = [value for _, value in pairs or edges]
        for _ in range(TRIES):
            arguments = draft.sample(rng)
            value = draft.answer(*arguments)
            if value not in there:
                break
        pairs.append((arguments, value))
    return pairs


def behaviour(answer: Callable[[list[int]], Any]) -> str:
    """Return a text that is equal for two functions with the same results, whatever their texts.

    Otherwise a test problem could be a training problem.
    """
    return hashlib.sha256(json.dumps([answer(numbers) for numbers in BATTERY]).encode()).hexdigest()


def test_of(arguments: tuple[Any, ...], value: Any, called: bool) -> Test:
    if called:
        return Test(json.dumps(list(arguments)), json.dumps(value))
    return Test("".join(f"{line(each)}\n" for each in arguments), f"{line(value)}\n")


def line(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def off_by_one(lines: list[str]) -> list[str]:
    """Return the program as one writes it who is off by one in the marked line."""
    return [re.sub(r"^( *).*# off: ", r"\1", each) for each in lines]


def no_edge_cases(lines: list[str]) -> list[str]:
    """Return the program without its edge cases; where it has none, its author errs in the other way."""
    kept = [each for each in lines if not each.endswith("# edge")]
    return off_by_one(lines) if kept == lines else kept


def without_mark(line: str) -> str:
    return re.sub(r"  # (edge|off: .*)$", "", line)
