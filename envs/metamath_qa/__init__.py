"""Can the model solve a problem of mathematics, and correct itself?  MetaMathQA, or embedded problems, with retries.

A right answer is worth 1 at the first attempt, 1/2 at the second, 1/4 at the third, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from envs import math_judge
from envs.base import TextEnv
from envs.hub_sets import EMBEDDED, read_rows
from envs.math_answers import same_text
from envs.math_judge import LONGEST_ANSWER, last_boxed
from envs.metamath_qa.final_form import has_variables, is_written_out
from envs.metamath_qa.problems import TEMPLATES, Parameters
from envs.sentences import counted

COLUMNS = ("query", "response", "original_question", "type")
MARK = "The answer is:"  # what stands before the answer at the end of a response of MetaMathQA
SAID = re.compile(r"answer(?: is\s?:?|\s?:)", re.IGNORECASE)
NUMBER = re.compile(r"\d+(?:/\d+)?")
LONGEST_WORKING = 600  # characters of a response that a demonstration shows as its thought


class Problem(NamedTuple):
    """Problem("What is 2 plus 3?", "Add 2 and 3.", "5", "rephrased", "2 + 3 = 5"); the last is the working.

    `original` is the original question; of an embedded problem its template and numbers, without its names.
    """

    query: str
    original: str
    answer: str
    kind: str
    working: str


class MetaMathQA(TextEnv):
    r"""Solve a problem of mathematics, with a smaller reward for each retry.

    ## Action space
    Free text: the answer, a number or an expression. What the last `\boxed{}` holds counts, else what follows "answer
    is" or "answer:", else all of it; at most 1,000 characters. Blank and longer answers are invalid.

    ## Observation space
    Text: the problem; after a wrong answer also how many were wrong.

    ## Rewards
    1 for a right answer, halved for each wrong one before it; 0 for a wrong one. Arithmetic that is left undone is
    wrong: 42 is right, 6 * 7 is not.

    ## Starting state
    A problem from a template with random numbers, or a row of `path`.

    ## Episode end
    Terminated by a right answer (success) or after `attempts` wrong ones (`failure` "attempts"). Truncation is left to
    the protocol, after `max_turns`: `attempts`.

    ## Arguments
    - `path="embedded"`: templates; or meta-math/MetaMathQA, or a file or folder in its schema.
    - `rows=50000`: rows of `path` that are used at most.
    - `attempts=4`: answers in an episode.
    - `render_mode=None`: or "ansi".
    """

    name = "metamath_qa"
    example_state = "If the problem were: A box holds 6 eggs. How many eggs do 7 boxes hold?"
    action_word = "answer"
    actions = None

    def __init__(
        self, path: str = EMBEDDED, rows: int = 50_000, attempts: int = 4, render_mode: str | None = None
    ) -> None:
        if rows < 1 or attempts < 1:
            raise ValueError(f"metamath_qa needs rows >= 1 and attempts >= 1, not rows={rows}, attempts={attempts}.")
        super().__init__(render_mode)
        self.max_turns = self.attempts = attempts
        self.config = (path, 0 if path == EMBEDDED else rows)
        if path != EMBEDDED:
            problems_of(*self.config)  # report unreadable files at once

    @classmethod
    def draw(cls, config: tuple[str, int], rng: np.random.Generator) -> Iterator[Problem]:
        path, rows = config
        if path != EMBEDDED:
            problems = problems_of(path, rows)
            while True:
                yield problems[int(rng.integers(len(problems)))]
        kinds = list(TEMPLATES)
        while True:
            kind = kinds[int(rng.integers(len(kinds)))]
            drawn = TEMPLATES[kind](Parameters(rng))
            query = drawn.questions[int(rng.integers(len(drawn.questions)))]
            original = " ".join([kind, *NUMBER.findall(drawn.questions[0])])
            yield Problem(query, original, drawn.answer, kind, drawn.working)

    @classmethod
    def key_of(cls, level: Problem) -> str:
        """Return the original question, or template and numbers: all rephrasings are in one split, with all names."""
        return " ".join(level.original.split())

    def begin(self, level: Problem) -> None:
        self.level = level
        self.wrong, self.solved = 0, False

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        response, reward = answer_in(action), 0.0
        played = response is not None and not self._over()
        if response is not None and played:
            if is_right(response, self.level.answer):
                reward, self.solved = 0.5**self.wrong, True
            else:
                self.wrong += 1
        info = {
            "success": self.solved,
            "action_is_valid": response is not None,
            "action_is_effective": played,
            "failure": "attempts" if self._over() and not self.solved else "",
        }
        return self.observe(), reward, self._over(), False, info

    def _over(self) -> bool:
        return self.solved or self.wrong >= self.attempts

    def observe(self) -> str:
        if self.solved:
            return "Right."
        problem = f"Problem: {self.level.query}"
        if not self.wrong:
            return problem
        if self.style == "plain":
            wrong = f"{counted(self.wrong, 'attempt')} {'was' if self.wrong == 1 else 'were'} wrong."
            return f"{problem}\n{wrong}{' No attempt is left.' if self._over() else ' Try again.'}"
        return f"{problem}\nNot right{'. No attempt is left.' if self._over() else ', try again.'} Wrong: {self.wrong}"

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "A box holds 6 eggs, so 7 boxes hold 6 * 7 = 42 eggs.", ("42",)

    def rules(self) -> str:
        if self.style == "plain":
            retry = f" You have {self.attempts} attempts, and each wrong one halves the reward." * (self.attempts > 1)
            return (
                "Solve a problem of mathematics. Your answer is the result alone: a number such as 42 or 3/4, or an"
                f" expression, without units and words.{retry}"
            )
        worth = f" A right answer is worth 1, and half as much after each wrong one. {self.attempts} attempts."
        return (
            "Solve the problem. The action is the answer alone: a number such as 42 or 3/4, or an expression, without "
            f"units and words.{worth if self.attempts > 1 else ''}"
        )

    def state_key(self) -> str:
        return f"{'solved' if self.solved else self.wrong} {self.level.query}"

    # -- players ---------------------------------------------------------------------------------------------------

    def expert(self) -> str:
        """Return the answer that stands in the data: this expert knows it."""
        return self.level.answer

    def players(self) -> dict[str, str]:
        """`near` is close to the answer, `copied` a number of the problem."""
        answer, numbers = self.level.answer, NUMBER.findall(self.level.query)
        number, miss = int(self.policy_rng.integers(100)), int(self.policy_rng.integers(1, 4))
        near = f"{answer} + {miss}"
        if re.fullmatch(r"-?\d{1,18}(?:/[1-9]\d{0,17})?", answer):
            near = str(Fraction(answer) + miss)
        return {"random": str(number), "near": near, "copied": self.choose(numbers or [str(number)])}

    def thought(self) -> str:
        return self.level.working


def answer_in(action: str) -> str | None:
    r"""Return the answer of an action: what \boxed{} holds, else what follows "The answer is"; None without one.

    >>> answer_in(r"\boxed{7}"), answer_in("The answer is: 7."), answer_in(" 7 "), answer_in("  ")
    ('7', '7', '7', None)
    """
    if len(action) > LONGEST_ANSWER:
        return None
    boxed = last_boxed(action)
    response = (SAID.split(action)[-1] if boxed is None else boxed).strip().rstrip(".").strip()
    return response or None


@lru_cache(maxsize=1 << 14)
def is_right(response: str, answer: str) -> bool:
    """Return whether an answer is the reference, with nothing left to work out; math-verify judges variables.

    math-verify evaluates everything: for numbers it would accept the question 2^3 + 4^2 as its own answer.
    """
    if len(response) > LONGEST_ANSWER:
        return False
    if same_text(response, answer):
        return True
    if not has_variables(answer):
        return is_written_out(response, answer)
    return math_judge.equal(response, answer)


@lru_cache(maxsize=4)
def problems_of(path: str, rows: int) -> tuple[Problem, ...]:
    """Return the first rows of a data set in the schema of MetaMathQA, without those that give no answer."""
    problems = []
    for row in read_rows("metamath_qa", path, COLUMNS, rows):
        query, response, original, kind = (str(row[column] or "").strip() for column in COLUMNS)
        working, mark, answer = response.rpartition(MARK)
        answer = answer_in(answer)
        if query and original and mark and answer and "</" not in answer:
            working = " ".join(working.split())
            problems.append(Problem(query, original, answer, kind, working if len(working) <= LONGEST_WORKING else ""))
    if not problems:
        raise ValueError(
            f"metamath_qa: no row of path={path} has a query, an original_question and a response that ends with"
            f' "{MARK} ...". Use rows in the schema of meta-math/MetaMathQA.'
        )
    return tuple(problems)
