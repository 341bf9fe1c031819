"""How does a data set of reasoning-gym become an environment?  `make("reasoning_gym", dataset="spell_backward")`.

One question, one answer. The answer is compared with the stored one. The library's own scorers are never called on
what a model wrote: several evaluate it as code (`eval`, sympy's parse_expr).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from envs.adapters.base import SEEDS, package
from envs.base import TextEnv, known

NUMBER = re.compile(r"[+-]?\d{1,60}(\.\d{1,60})?")
# Their scorers do more than compare, but only to give half marks or to forgive the form: the answer is unique. Data
# sets without a scorer of their own need no entry: the library itself compares those.
UNIQUE = frozenset(
    "ab binary_matrix bitwise_arithmetic calendar_arithmetic chain_sum circuit_logic color_cube_rotation"
    " decimal_chain_sum emoji_mystery family_relationships figlet_font game_of_life_halting manipulate_matrix"
    " mini_sudoku needle_haystack path_star products rectangle_count self_reference spell_backward spiral_matrix"
    " string_insertion sudoku word_sorting zebra_puzzles".split()
)


class StoredQuestion(NamedTuple):
    """Question(text="Spell this word backward: sun", answer="nus")."""

    text: str
    answer: str


class ReasoningGym(TextEnv):
    """Questions of one data set of Reasoning Gym.

    ## Action space
    Free text: the answer.

    ## Observation space
    Text: the question.

    ## Rewards
    1 for the stored answer, else 0. Case and white space do not count, and numbers are compared by value.

    ## Starting state
    A question of the data set's generator.

    ## Episode end
    Terminated after the first answer.

    ## Arguments
    - `dataset`: name of the data set, e.g. spell_backward.
    - `settings=None`: settings of its generator.
    - `render_mode=None`: or "ansi".
    """

    name = "reasoning_gym"
    actions = None
    max_turns = 1

    def __init__(
        self, dataset: str = "", settings: Mapping[str, Any] | None = None, render_mode: str | None = None
    ) -> None:
        super().__init__(render_mode)
        self.config = (dataset, json.dumps(dict(settings or {}), sort_keys=True))
        opened(self.config)

    @classmethod
    def draw(cls, config: Any, rng: np.random.Generator) -> Iterator[StoredQuestion | None]:
        data, size = opened(config)
        while True:
            item = data[int(rng.integers(size))]
            answer = str(item["answer"])
            yield (
                StoredQuestion(item["question"].strip(), answer)
                if answer.strip() and "</answer>" not in answer
                else None
            )

    @classmethod
    def key_of(cls, level: StoredQuestion) -> str:
        return level.text

    def begin(self, level: StoredQuestion) -> None:
        self.level = level
        self.response: str | None = None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        valid = self.response is None and bool(action.strip())
        if valid:
            self.response = action
        right = self.response is not None and same_answer(self.response, self.level.answer)
        info = {
            "success": right,
            "action_is_valid": valid,
            "action_is_effective": valid,
            "failure": "wrong" if self.response is not None and not right else "",
        }
        return self.observe(), float(valid and right), self.response is not None, False, info

    def observe(self) -> str:
        return self.level.text

    def rules(self) -> str:
        return "Answer the question. Give the answer alone, in the form that the question asks for."

    def state_key(self) -> str:
        return f"{self.response is None} {self.level.text}"

    def expert(self) -> str:
        return self.level.answer

    def players(self) -> dict[str, str]:
        """`random` gives the answer to another question."""
        return {"random": next(each for each in self.draw(self.config, self.policy_rng) if each).answer}


def same_answer(answer: str, stored: str) -> bool:
    """Return whether two answers differ in case, white space and the writing of a number at most.

    >>> same(" Nus", "nus"), same("12.0", "+12"), same("1 2", "12")
    (True, True, False)
    """
    mine, theirs = (" ".join(text.casefold().split()) for text in (answer, stored))
    if NUMBER.fullmatch(mine) and NUMBER.fullmatch(theirs):
        return Decimal(mine) == Decimal(theirs)
    return mine == theirs


@lru_cache
def opened(config: tuple[str, str]) -> tuple[Any, int]:
    """Return the data set, and its number of items; ValueError where it cannot be used here."""
    name, settings = config
    if not name:
        raise ValueError("reasoning_gym needs the option dataset, for example dataset=spell_backward.")
    package("reasoning_gym", "reasoning_gym==0.1.25")
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS, create_dataset

    kind, _ = DATASETS[known("data set of reasoning-gym", name, sorted(DATASETS))]
    if name not in UNIQUE and kind.score_answer is not ProceduralDataset.score_answer:
        raise ValueError(
            f'The answers of "{name}" are not known to be unique: only its own scorer could judge them, and scorers of'
            " reasoning-gym may evaluate an answer as code. Choose a data set whose answer is compared, or write an"
            " environment that parses its answers."
        )
    try:
        data = create_dataset(name, **{"seed": 0, **json.loads(settings)})
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f'reasoning-gym cannot make "{name}" with {settings}: {error}') from None
    try:
        data[SEEDS - 1]
        return data, SEEDS
    except IndexError:  # made beforehand, and no more than that
        return data, len(data)
