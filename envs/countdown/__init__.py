"""Can the model reach a number?  Countdown: an expression of given numbers with + - * / that has the target's value.

Answers are read by a parser of our own over exact fractions: no text of a model is ever executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from envs.base import TextEnv
from envs.countdown.arithmetic import CountdownTask, any_target, any_term, find_solution, parse_expression
from envs.hub_sets import EMBEDDED, read_rows
from envs.sentences import listed

__all__ = ["Countdown"]

RIGHT_NUMBERS = 0.1  # RAGEN's score of an answer with the right numbers and another value
LEAST_TARGET = 10
LARGEST = 999_999  # of numbers and targets: answers may hold numbers of nine digits, and flawed ones hold larger ones
TRIES, ROUNDS = 500, 120  # options that give no task in 60,000 tries, about two seconds, have none


class Tasks(NamedTuple):
    """Which levels there are: those of `path`, or generated ones."""

    path: str
    rows: int
    least: int
    most: int
    highest: int
    target: int
    use_all: bool


class Countdown(TextEnv):
    """Reach a target with given numbers, + - * / and brackets.

    ## Action space
    Free text: one expression such as `(8 - 2) * 5`, at most 300 characters. A parser reads it over exact fractions;
    nothing is executed.

    ## Observation space
    Text: the target and the numbers; after an answer also its value and what is wrong with its numbers.

    ## Rewards
    An answer scores 1 with the target's value, 0.1 with another value of the right numbers, else 0; it earns what it
    adds to the best score so far.

    ## Starting state
    Numbers and a target that a solution exists for: generated, or a row of `path`.

    ## Episode end
    Terminated at the target (success) or after `tries` answers (`failure` "value" or "numbers"). Truncation is left to
    the protocol, after `max_turns`: `tries`. An action that cannot be read costs a turn but is not an answer.

    ## Arguments
    - `min_numbers=3`, `max_numbers=4`: how many numbers, 2 to 6.
    - `max_number=99`: the largest of the numbers, 2 to 999,999.
    - `max_target=100`: the largest target, 10 to 999,999; the smallest is 10.
    - `use_all=True`: every number exactly once; False: each at most once.
    - `tries=1`: answers in an episode.
    - `path="embedded"`: generated tasks, or a data set of the Hub, a file or a folder with columns `nums` and `target`.
    - `rows=20000`: rows of `path` that are read at most.
    - `render_mode=None`: or "ansi".
    """

    name = "countdown"
    example_state = "If the numbers were 2, 5 and 8, and the target 30"
    harder, easier = "max_numbers: 5", "max_numbers: 3, max_number: 20"
    action_word = "expression"
    actions = None

    def __init__(
        self,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 99,
        max_target: int = 100,
        use_all: bool = True,
        tries: int = 1,
        path: str = EMBEDDED,
        rows: int = 20_000,
        render_mode: str | None = None,
    ):
        if (
            not 2 <= min_numbers <= max_numbers <= 6
            or not 2 <= max_number <= LARGEST
            or not LEAST_TARGET <= max_target <= LARGEST
            or min(tries, rows) < 1
        ):
            raise ValueError(
                f"countdown needs 2 <= min_numbers <= max_numbers <= 6, max_number from 2 to {LARGEST}, max_target from"
                f" {LEAST_TARGET} to {LARGEST}, tries >= 1 and rows >= 1, not min_numbers={min_numbers},"
                f" max_numbers={max_numbers}, max_number={max_number},"
                f" max_target={max_target}, tries={tries}, rows={rows}."
            )
        self.max_turns = self.tries = tries
        super().__init__(render_mode)
        self.config = Tasks(path, rows, min_numbers, max_numbers, max_number, max_target, use_all)
        if path != EMBEDDED:
            read_tasks(path, rows)  # report unreadable files at once

    @classmethod
    def draw(cls, config: Tasks, rng: np.random.Generator) -> Iterator[CountdownTask | None]:
        tasks = () if config.path == EMBEDDED else read_tasks(config.path, config.rows)
        while tasks:
            task = tasks[int(rng.integers(len(tasks)))]
            yield task if find_solution(task, config.use_all) else None
        empty = 0  # rounds in a row
        while empty < ROUNDS:
            yield (task := _generated(config, rng))
            empty = 0 if task else empty + 1

    @classmethod
    def key_of(cls, level: CountdownTask) -> str:
        return f"{level.target} from {' '.join(map(str, sorted(level.numbers)))}"

    def begin(self, level: CountdownTask) -> None:
        self.level = level
        self.best = 0.0
        self.answers = 0
        self.last = self.failure = ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reading, reward = parse_expression(action), 0.0
        counts = reading is not None and not self._over
        if reading is not None and counts:
            excess, unused = self._wrong_numbers(reading.numbers)
            wrong = bool(excess or unused)
            score = 0.0 if wrong or reading.value is None else RIGHT_NUMBERS
            score = 1.0 if score and reading.value == self.level.target else score
            reward, self.best = max(0.0, score - self.best), max(score, self.best)
            self.answers += 1
            self.failure = "numbers" if wrong else "value"
            value = "no value (division by zero)" if reading.value is None else str(reading.value)
            self.last = f"{reading.text} = {value}"
            if self.style == "plain":
                self.last += f". It uses {listed(excess)} more often than given" if excess else ""
                self.last += f". It does not use {listed(unused, 'or')}" if unused else ""
            else:
                self.last += f" not given {' '.join(excess)}" if excess else ""
                self.last += f" not used {' '.join(unused)}" if unused else ""
        success = self.best == 1.0
        info = {
            "success": success,
            "action_is_valid": reading is not None,
            "action_is_effective": counts,
            "failure": self.failure if self._over and not success else "",
        }
        return self.observe(), reward, self._over, False, info

    @property
    def _over(self) -> bool:
        return self.best == 1.0 or self.answers >= self.tries

    def _wrong_numbers(self, used: tuple[int, ...]) -> tuple[list[str], list[str]]:
        """Return the numbers of an answer that are not given, and those that it should use and does not."""
        there, here = Counter(self.level.numbers), Counter(used)
        unused = there - here if self.config.use_all else Counter[int]()
        return [str(n) for n in sorted((here - there).elements())], [str(n) for n in sorted(unused.elements())]

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        if self.style == "plain":
            task = f"The target is {self.level.target}. The numbers are {listed([str(n) for n in self.level.numbers])}."
            return f"{task}\nYour last answer was {self.last}." if self.last else task
        task = f"Target {self.level.target} Numbers {' '.join(map(str, self.level.numbers))}"
        return f"{task}\nLast {self.last}" if self.last else task

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "The target 30 is 6 * 5, and 6 is 8 - 2.", ("(8 - 2) * 5",)

    def rules(self) -> str:
        use = "every number exactly once" if self.config.use_all else "each number at most once"
        retry = " A wrong answer is told its value, and you may answer again." if self.tries > 1 else ""
        if self.style == "plain":
            return (
                f"Write an arithmetic expression whose value is the target. Use {use}, with +, -, *, / and brackets,"
                f" and no other numbers.{' You may answer again after a wrong answer.' if self.tries > 1 else ''}"
            )
        return (
            f"Write an expression whose value is the target. Use {use}, with + - * / and brackets.{retry} The action is"
            " the expression alone, such as (8 - 2) * 5."
        )

    def state_key(self) -> str:
        return f"{self.level_key()} {self.tries - self.answers} {self.best}"

    # -- players ---------------------------------------------------------------------------------------------------

    def thought(self) -> str:
        """Return the steps of a solution: `8 - 2 = 6 and 6 * 5 = 30.`"""
        return self.thought_of(self.expert())

    def thought_of(self, action: str) -> str:
        """Return the steps of the expression, right or wrong."""
        reading = parse_expression(action)
        if reading is None or not reading.steps:  # a number alone has none
            return ""
        return " ; ".join(reading.steps) if self.style == "compact" else f"{listed(reading.steps)}."

    def expert(self) -> str:
        """Return a solution, from an exact search."""
        solution = find_solution(self.level, self.config.use_all)
        assert solution is not None  # `draw` gives only levels that have one
        return solution

    def optimal_success(self, horizon: int) -> float:
        return float(self.best == 1.0 or (horizon > 0 and not self._over))

    def players(self) -> dict[str, str]:
        """Return three answers: `random` is any expression of the numbers, `near` the nearest wrong one of several.

        `invented` has the right value, with a number that is not given.
        """
        numbers, target = self.level
        tried = [any_term(numbers, self.policy_rng) for _ in range(8)]
        wrong = [term for term in tried if term.value != target] or tried
        near = min(wrong, key=lambda term: abs(term.value - target))
        return {"random": tried[0].text, "near": near.text, "invented": _invented(self.level)}


# -- tasks -------------------------------------------------------------------------------------------------------------


def _invented(task: CountdownTask) -> str:
    """Return an expression for the target in which a number that is not given stands for one that is."""
    for number in task.numbers:
        others = list(task.numbers)
        others.remove(number)
        missing = task.target - sum(others)
        if abs(missing) != number:
            return f"{' + '.join(map(str, others))} {'-' if missing < 0 else '+'} {abs(missing)}"
    return f"{task.target} + 0"


def _generated(config: Tasks, rng: np.random.Generator) -> CountdownTask | None:
    """Return numbers with the value of a random expression of them as target; None where no good target exists."""
    for _ in range(TRIES):
        count = int(rng.integers(config.least, config.most + 1))
        numbers = tuple(int(number) for number in rng.integers(1, config.highest + 1, count))
        target = any_target(numbers, rng)
        if LEAST_TARGET <= target <= config.target and target not in numbers:
            return CountdownTask(numbers, target)
    return None


@lru_cache(maxsize=8)
def read_tasks(path: str, rows: int) -> tuple[CountdownTask, ...]:
    """Return the first `rows` tasks of a data set with the columns nums and target."""
    tasks = []
    for number, row in enumerate(read_rows("countdown", path, ("nums", "target"), rows), 1):
        numbers, target = row["nums"], row["target"]
        whole = isinstance(numbers, list) and all(isinstance(each, int) for each in [*numbers, target])
        if (
            not whole
            or not 2 <= len(numbers) <= 6
            or not 0 < min([*numbers, target]) <= max([*numbers, target]) <= LARGEST
        ):
            raise ValueError(
                f"countdown: row {number} of {path} has nums={numbers!r:.80} and target={target!r:.80}. A task has 2 to"
                " 6 whole numbers and a target, all above 0 and below a million."
            )
        tasks.append(CountdownTask(tuple(numbers), target))
    return tuple(tasks)
