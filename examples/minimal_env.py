"""A whole environment: walk along a line of numbered cells to the goal.

Copy this file into envs/; that registers it.   cp examples/minimal_env.py envs/line.py
Does it keep its promises?                       python -m envs.check line
Train in it, after `make quickstart`:            python train_phase3_starpo.py \
    --config configs/quickstart/phase3_starpo.yaml 'envs=[line]' output_dir=runs/line
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from envs.base import TextEnv

STEPS = {"Left": -1, "Right": 1}


class Line(TextEnv):
    """`cells` are in a row, the goal at most five from the start; reward 1 there."""

    name = "line"
    actions = tuple(STEPS)  # None where an action is free text

    def __init__(self, cells: int = 100, render_mode: str | None = None):
        super().__init__(render_mode)
        self.config = cells  # all that decides which levels there are

    @classmethod
    def draw(cls, config: int, rng: np.random.Generator) -> Iterator[tuple[int, int] | None]:
        while True:
            start, goal = int(rng.integers(config)), int(rng.integers(config))
            yield (start, goal) if 1 <= abs(start - goal) <= 5 else None

    @classmethod
    def key_of(cls, level: tuple[int, int]) -> str:
        return f"{level[0]} {level[1]}"

    def begin(self, level: tuple[int, int]) -> None:
        self.position, self.goal = level

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, name = self.position, self.canonical_action(action)
        self.position = min(max(before + STEPS.get(name or "", 0), 0), self.config - 1)
        there, moved = self.position == self.goal, self.position != before
        info = {"success": there, "action_is_valid": name is not None, "action_is_effective": moved, "failure": ""}
        return self.observe(), float(there), there, False, info

    def observe(self) -> str:
        return f"You {self.position} Goal {self.goal}"

    def rules(self) -> str:
        return "Walk along numbered cells to the goal. Left takes you to the cell before, Right to the next."
