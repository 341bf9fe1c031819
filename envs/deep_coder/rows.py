"""How do problems of a data set become ours?  Rows of DeepCoder-Preview-Dataset, from the Hub or from local files.

A row has `problem`, `tests` (JSON: a list of {input, output, type}, or {inputs, outputs, fn_name}), and it may have
`solutions`, `starter_code` and `metadata` with `func_name`. A row that cannot be judged here is left out and counted:
without a test that stays hidden, with another kind of test, or too long to be read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from envs.base import split_by_hash
from envs.deep_coder.verdict import CodeProblem, Test, program_of
from envs.hub_sets import local_splits, reason_unreadable

SUBSETS = ("primeintellect", "codeforces")  # train and test of the Hub set that belong together
LONGEST_STATEMENT = 10_000  # characters
_log = logging.getLogger(__name__)
HUB = "agentica-org/DeepCoder-Preview-Dataset"
TAKES = (
    f"It takes `embedded`, a name on the Hugging Face Hub such as {HUB}, or a local .jsonl, .json or .parquet file or a"
    " folder of them with the same columns."
)
NO_HIDDEN_TEST = "without a hidden test (the statement or feedback shows them all)"
NO_TESTS = "without tests in a known form within max_test_bytes"
TOKEN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|[^\W\d_]+")  # of a statement and its examples
ARGUMENT = re.compile(r"\b[A-Za-z_]\w*\s*=(?!=)")  # nums = [1, 2] in an example
MOST_BETWEEN = 4  # words between an example's input and its output
MOST_CHARACTERS = 20  # the same, where the input has no word and no number
AROUND = re.compile(r"[\s\"'`]")  # what stands around a value without being a part of it
SAYS_EXAMPLE = frozenset("input inputs output outputs example examples sample samples result returns return".split())


@dataclass(frozen=True)
class Bounds:
    """Of the tests of a problem: so many may be shown, so many are run, and none is larger than that."""

    public: int = 2
    max_tests: int = 15
    max_test_bytes: int = 100_000


@lru_cache(maxsize=4)
def load_problems(path: str, subsets: tuple[str, ...], most: int, bounds: Bounds) -> tuple[CodeProblem, ...]:
    """Return the problems of a data set with their splits: its own, or by hash out of train where it lacks one."""
    problems: dict[str, CodeProblem] = {}
    own: set[str] = set()
    read, left_out = 0, Counter[str]()
    for split, row in _rows(path, subsets, most):
        own.add(split)
        read += 1
        problem = problem_of(row, bounds)
        if isinstance(problem, str):
            left_out[problem] += 1
        elif problem.key not in problems or split != "train":
            problems[problem.key] = replace(problem, home=split)  # of a problem in train and test, test has it
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    if not problems:
        raise ValueError(
            f"deep_coder found no problem in path={path} ({read} rows{': ' * bool(reasons)}{reasons}): a row needs"
            f" `problem` and `tests` as in {HUB}, with a hidden test of at most {bounds.max_test_bytes} bytes."
        )
    if left_out:
        _log.warning("deep_coder: of %s rows of %s, %s are left out: %s.", read, path, left_out.total(), reasons)
    return tuple(replace(problem, home=_split(problem, own)) for problem in problems.values())


def _split(problem: CodeProblem, own: set[str]) -> str:
    bucket = split_by_hash(problem.key)
    return problem.home if problem.home != "train" or bucket in own else bucket


def _rows(path: str, subsets: tuple[str, ...], most: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of every split of every subset, `most` of each, with the name of the split in our words."""
    import datasets

    local = Path(path)
    if not local.exists() and not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise ValueError(f"deep_coder could not read path={path}: there is no such file or folder. {TAKES}")
    names: tuple[str | None, ...] = subsets or ((None,) if local.exists() else SUBSETS)
    try:
        for name in names:
            loaded: Any = local_splits(path)
            if loaded is None:
                loaded = datasets.load_dataset(path, name, streaming=True)
            for split, rows in dict(loaded).items():
                ours = next((each for each in ("test", "validation") if each in str(split)), "train")
                for row in islice(rows, most):
                    yield ours, row
    except Exception as error:  # `datasets`, its file systems and its HTTP client raise errors of many libraries
        reason = reason_unreadable(error)
        raise ValueError(f"deep_coder could not read path={path} ({reason}). {TAKES}") from error


def problem_of(row: Mapping[str, Any], bounds: Bounds) -> CodeProblem | str:
    """Return a row as a problem; why it is left out where it cannot be judged here."""
    statement, tests = row.get("problem"), row.get("tests")
    if not isinstance(statement, str) or not 0 < len(statement) <= LONGEST_STATEMENT:
        return f"without a statement of at most {LONGEST_STATEMENT:,} characters"
    try:
        function, cases, boxed = tests_of(decode_json(tests), decode_json(row.get("metadata")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # another schema, or a number too long
        return NO_TESTS
    cases = [test for test in cases if len(test.input) + len(test.output) <= bounds.max_test_bytes]
    if not cases:
        return NO_TESTS
    chosen, public = choose_tests(cases, statement, bounds)
    key = hashlib.sha256(" ".join(statement.split()).encode("utf-8", "surrogatepass")).hexdigest()
    starter = row.get("starter_code")
    if isinstance(starter, str) and starter.strip() and starter.strip() not in statement:
        statement += f"\nBegin with\n{starter.strip()}"
    if function and function not in statement:
        statement += f"\nWrite a function {function}."
    solutions = [each for each in row.get("solutions") or () if isinstance(each, str) and each.strip()]
    programs = (("expert", program_of(solutions[0])),) if solutions else ()
    problem = CodeProblem(statement, function, chosen, public, key, programs, boxed=boxed)
    return problem if problem.pays(problem.hidden) else NO_HIDDEN_TEST


def decode_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value


def tests_of(tests: Any, metadata: Any) -> tuple[str, list[Test], bool]:
    """Return the function to call (empty: stdin), all tests, and whether expected values may stand in a list."""
    if isinstance(tests, dict):
        function = tests.get("fn_name") or ""
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    else:
        first = tests[0]
        called = first.get("type", first.get("testtype", "stdin")) in ("function_call", "functional")
        inner = decode_json(first.get("metadata")) or metadata or {}
        function = (first.get("fn_name") or inner.get("func_name") or inner["fn_name"]) if called else ""
        pairs = [(test["input"], test["output"]) for test in tests]
    if not function:
        return "", [Test(lines(value_in), lines(value)) for value_in, value in pairs], False
    if not isinstance(function, str):
        raise TypeError("the name of a function is text")
    if isinstance(pairs[0][0], str):  # LiveCodeBench: an argument a line, as JSON
        made = [
            Test(as_json([json.loads(line) for line in value_in.split("\n")]), as_json(json.loads(value)))
            for value_in, value in pairs
        ]
        return function, made, False
    return function, [Test(as_json(value_in), as_json(value)) for value_in, value in pairs], True


def lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def as_json(value: Any) -> str:
    return json.dumps(value)


def choose_tests(tests: list[Test], statement: str, bounds: Bounds) -> tuple[tuple[Test, ...], int]:
    """Return the first tests, which may be shown, and the others with the longest inputs; how many may be shown.

    One at least is hidden, and none of the hidden ones is an example of the statement.
    """
    public = min(bounds.public, len(tests) - 1, bounds.max_tests - 1)
    words = output_tokens(ARGUMENT.sub(" ", statement))
    signs = AROUND.sub("", statement.casefold())
    shown, hidden = tests[:public], [test for test in tests[public:] if not is_example(test, words, signs)]
    longest = sorted(range(len(hidden)), key=lambda number: -len(hidden[number].input))[: bounds.max_tests - public]
    return tuple([*shown, *(hidden[number] for number in sorted(longest))]), public


def output_tokens(text: str) -> list[str]:
    return TOKEN.findall(text.casefold())


def written(text: str) -> str:
    """Return what a JSON value or a text looks like in a statement: its parts, without the arguments' brackets."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def is_example(test: Test, statement: list[str], signs: str) -> bool:
    """Return whether the tokens of a statement hold a test's input, and soon behind it its output.

    signs: the statement without blanks and quotation marks, for an input such as "()[]", which has no tokens.
    """
    if len(test.input) + len(test.output) > LONGEST_STATEMENT:
        return False
    input_tokens, expected_tokens = output_tokens(test.input), output_tokens(test.output)
    if not input_tokens:
        input_text, value = (AROUND.sub("", written(text).casefold()) for text in (test.input, test.output))
        starts = [match.start() for match in re.finditer(f"(?={re.escape(input_text)})", signs)] if input_text else []
        return any(value in signs[start + len(input_text) :][: MOST_CHARACTERS + len(value)] for start in starts)
    for start in range(len(statement) - len(input_tokens) - len(expected_tokens) + 1):
        if statement[start] == input_tokens[0] and statement[start : start + len(input_tokens)] == input_tokens:
            end = start + len(input_tokens)
            between = next(
                (n for n in range(MOST_BETWEEN) if statement[end + n :][: len(expected_tokens)] == expected_tokens),
                None,
            )
            beside = statement[max(0, start - 2) : start] + statement[end : end + (between or 0)]
            if between is not None and (
                len(input_tokens) + len(expected_tokens) > 3 or not SAYS_EXAMPLE.isdisjoint(beside)
            ):
                return True
    return False
