"""A whole environment: walk along a row of cells to the goal.

Copy this file into envs/; that registers it.    cp examples/minimal_env.py envs/line.py
Does it keep its promises?                       posttrain env check line
Or leave it where it is, and name it by path:    posttrain env check examples.minimal_env:Line
Train in it, after `make quickstart`:            python train_phase3_starpo.py \
    --config configs/quickstart/own_environment.yaml 'envs=[line]' output_dir=runs/line
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from envs.base import TextEnv


class Line(TextEnv):
    """Up to `cells` are in a row, the goal at most three from the start; reward 1 there."""

    name = "line"
    actions = ("Left", "Right")  # None where an action is free text

    def __init__(self, cells: int = 24, render_mode: str | None = None):
        super().__init__(render_mode)
        self.config = cells  # all that decides which levels there are

    @classmethod
    def draw(cls, config: int, rng: np.random.Generator) -> Iterator[tuple[int, int, int] | None]:
        while True:
            cells = int(rng.integers(6, config + 1))
            start, goal = int(rng.integers(cells)), int(rng.integers(cells))
            yield (cells, start, goal) if 1 <= abs(start - goal) <= 3 else None

    @classmethod
    def key_of(cls, level: tuple[int, int, int]) -> str:
        return f"{level[0]} {level[1]} {level[2]}"

    def begin(self, level: tuple[int, int, int]) -> None:
        self.cells, self.position, self.goal = level

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, name = self.position, self.canonical_action(action)
        self.position = min(max(before + (name == "Right") - (name == "Left"), 0), self.cells - 1)
        there, moved = self.position == self.goal, self.position != before
        info = {"success": there, "action_is_valid": name is not None, "action_is_effective": moved, "failure": ""}
        return self.observe(), float(there), there, False, info

    def observe(self) -> str:
        row, here = ["G" if cell == self.goal else "_" for cell in range(self.cells)], self.position
        return " ".join(["Left", *reversed(row[max(here - 3, 0) : here]), "Right", *row[here + 1 : here + 4]])

    def rules(self) -> str:
        return "Walk along a row of cells to the goal G. You see three cells left and right of you, the nearest first."
