"""Can the model write a program that passes its tests?  The action is the program; it runs in a sandbox or not at all.

The reward of a turn is what it adds to the best share of hidden tests passed so far, so an episode adds up to the best
share of all its programs. After a program the model reads how many tests passed, and the first public test that did
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envs.base import TextEnv, known, split_by_hash
from envs.deep_coder import embedded
from envs.deep_coder.rows import Bounds, load_problems
from envs.deep_coder.sandbox import Limits, require
from envs.deep_coder.verdict import CodeProblem, judge, program_of

LONGEST = 60_000  # characters of a program
EMBEDDED = "embedded"
JUNK = ("pass", "print(0)", "print(input())", "def solve(*arguments):\n    return arguments[0]")


@dataclass(frozen=True)
class Data:
    """Where problems come from: Data("embedded", (), 1000, Bounds())."""

    path: str
    subsets: tuple[str, ...]
    rows: int
    bounds: Bounds


class DeepCoder(TextEnv):
    """Write a Python program, or a function, that passes its tests.

    ## Action space
    Free text: the whole program, at most 60,000 characters, with or without a code fence. It runs in a sandbox.

    ## Observation space
    Text: the task; after a program also how many tests passed and how the first public test that failed did.

    ## Rewards
    "dense": what a program adds to the best share of hidden tests passed so far. "sparse": 1 when all tests pass.

    ## Starting state
    A task from a template with random parameters, or a row of `path`.

    ## Episode end
    Terminated when all tests pass (success). Truncation is left to the protocol, after `max_turns`: `turns`.

    ## Arguments
    - `path="embedded"`: generated tasks; or a data set of the Hub, a file or a folder with the columns of
      DeepCoder-Preview-Dataset.
    - `subsets=None`: configurations of the data set; None is primeintellect and codeforces on the Hub.
    - `rows=1000`: rows that are read at most of each split of each subset.
    - `turns=3`: programs in an episode.
    - `reward="dense"`: or "sparse".
    - `public=2`: tests that feedback may show; at least one stays hidden.
    - `max_tests=15`: tests of a problem, at least 2.
    - `max_test_bytes=100000`: of a test's input and output; larger tests are left out.
    - `seconds=2.0`: of one test.
    - `total_seconds=5.0`: of all tests of a program, at most 3,600.
    - `memory_mb=1024`: MiB of address space, 64 to 1,048,576.
    - `render_mode=None`: or "ansi".

    `info["passed"]` is the best share of hidden tests passed so far.
    """

    name = "deep_coder"
    example_state = "If the task were to add two numbers"
    action_word = "program"
    actions = None
    slow = True
    observable = False  # the hidden tests

    def __init__(
        self,
        path: str = "embedded",
        subsets: list[str] | None = None,
        rows: int = 1000,
        turns: int = 3,
        reward: str = "dense",
        public: int = 2,
        max_tests: int = 15,
        max_test_bytes: int = 100_000,
        seconds: float = 2.0,
        total_seconds: float = 5.0,
        memory_mb: int = 1024,
        render_mode: str | None = None,
    ):
        super().__init__(render_mode)
        require()
        for option, value, least in (
            ("rows", rows, 1),
            ("turns", turns, 1),
            ("max_tests", max_tests, 2),  # one that may be shown and one that is hidden
            ("max_test_bytes", max_test_bytes, 1),
        ):
            if value < least:
                raise ValueError(f"deep_coder needs {option} >= {least}, not {value}.")
        if public < 0 or not 0 < seconds <= total_seconds <= 3600 or not 64 <= memory_mb <= 1 << 20:
            raise ValueError(
                "deep_coder needs public >= 0, 0 < seconds <= total_seconds <= 3600 and 64 <= memory_mb <= 1048576."
            )
        self.dense = known("reward", reward, ("dense", "sparse")) == "dense"
        self.max_turns = turns
        self.limits = Limits(seconds, total_seconds, memory_mb)
        self.config = Data(path, tuple(subsets or ()), rows, Bounds(public, max_tests, max_test_bytes))
        if path != EMBEDDED:
            load_problems(path, self.config.subsets, rows, self.config.bounds)  # report unreadable files at once

    @classmethod
    def draw(cls, config: Data, rng: np.random.Generator) -> Iterator[CodeProblem]:
        if config.path == EMBEDDED:
            for problem in embedded.problems(rng):
                tests = problem.tests[: config.bounds.max_tests]
                public = max(1, min(config.bounds.public, len(tests) - 1))  # the first is the statement's example
                problem = replace(problem, tests=tests, public=public)
                if problem.pays(problem.hidden):
                    yield problem
        problems = load_problems(config.path, config.subsets, config.rows, config.bounds)
        while True:
            yield problems[int(rng.integers(len(problems)))]

    @classmethod
    def key_of(cls, level: CodeProblem) -> str:
        return level.key

    @classmethod
    def split_of(cls, level: CodeProblem) -> str:
        """Return the data set's own split, or one by hash out of train where it lacks one; by hash if embedded."""
        return level.home or split_by_hash(level.key)

    def begin(self, level: CodeProblem) -> None:
        self.level: CodeProblem = level
        self.best = 0
        self.feedback = ""
        self.over = False

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, best, program = self.state_key(), self.best, program_of(action)
        valid = bool(program.strip()) and len(program) <= LONGEST
        hidden, over = len(self.level.hidden), self.over
        if valid and not over:
            verdict = judge(self.level, program, self.limits)
            self.best, self.feedback = max(best, verdict.paid), verdict.feedback
            self.over = verdict.passed == len(self.level.tests)
        gained = (self.best - best) / hidden if self.dense else float(self.over and not over)
        info = {
            "success": self.over,
            "action_is_valid": valid,
            "action_is_effective": self.state_key() != before,
            "failure": "",
            "passed": self.best / hidden,
        }
        return self.observe(), gained, self.over, False, info

    def observe(self) -> str:
        return f"{self.level.statement}\n{self.feedback}" if self.feedback else self.level.statement

    def rules(self) -> str:
        again = " After a failure, answer with a corrected program." if self.max_turns > 1 else ""
        return (
            "Write a Python 3 program, standard library only, for the task. Unless a function is asked for, it reads"
            f" stdin and prints. It is judged by tests, most of them hidden; each has {self.limits.seconds:g} seconds."
            f" The answer is the whole program and nothing else.{again}"
        )

    def state_key(self) -> str:
        """Return the level with the best score so far and the last feedback: nothing else matters for the future."""
        return f"{self.level.key}\n{self.level.function}\n{self.best}\n{self.feedback}"

    # -- players ---------------------------------------------------------------------------------------------------

    def thought(self) -> str:
        return self.level.idea

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "The program reads two numbers and prints their sum.", (
            "\na, b = map(int, input().split())\nprint(a + b)\n",
        )

    def expert(self) -> str:
        """Return the known program; of a data set the first of the row's solutions, which need not pass, nor exist."""
        return dict(self.level.programs).get("expert", JUNK[0])

    def players(self) -> dict[str, str]:
        """Return wrong programs: `random` has one of a few short ones; the others make mistakes as people do."""
        flawed = {player: program for player, program in self.level.programs if player != "expert"}
        return {"random": JUNK[int(self.policy_rng.integers(len(JUNK)))], **flawed}
