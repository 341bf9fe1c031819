"""Can the model fill a grid that has one solution?  Sudoku of 4 x 4, 6 x 6 or 9 x 9 cells, a cell a turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envs.base import TextEnv, known
from envs.sentences import at_in_words, counted
from envs.sudoku.puzzles import (
    BOXES,
    EFFORTS,
    GridShape,
    Puzzle,
    Single,
    by_singles,
    candidates,
    make_puzzle,
    place_digit,
    puzzle_key,
    shape_of,
    singles,
)

__all__ = ["Sudoku"]

CLUES = {4: (5, 8), 6: (12, 18), 9: (30, 40)}  # by size, as default
CLUES_OF_SEARCH = {6: (8, 11), 9: (30, 40)}  # the same for puzzles that need a guess
MOST_CLUES_OF_SEARCH = {6: 13, 9: 40}  # with more, fewer than 1 in 300 needs one
TRIES = 10  # puzzles for one that needs a guess: 1 in 70 does with 6 x 6 cells, 1 in 25 with 9 x 9
SHOWN = 10  # empty cells up to which the values that fit are listed
RIGHT, CONFLICT, SOLVED = 1.0, -0.1, 10.0
LONGEST = 80  # characters of an action
MOVE = re.compile(
    r"\W*(?:row|r)?\W*([1-9])\W*(?:column|col|c)?\W*([1-9])\W*(?:value|is|to)?\W*([1-9])\W*", re.IGNORECASE | re.ASCII
)


class Grids(NamedTuple):
    """Which levels there are: Grids(size=4, clues=(5, 8), effort="any")."""

    size: int
    clues: tuple[int, int]
    effort: str


class Sudoku(TextEnv):
    """Fill a grid that has exactly one solution, one cell at a time.

    ## Action space
    Free text: row, column and number, counted from 1 at the top left: `2 3 1`, `(2, 3) = 1`, `r2c3=1`. A clue, a place
    outside the grid and any other text are invalid.

    ## Observation space
    Text: the grid with a dot for an empty cell and a star behind a wrong number, the numbers that fit where few cells
    are left, what became of the last action, and how many mistakes are left.

    ## Rewards
    "dense": 1 for a cell that becomes right, -1 for a right one that is overwritten, -0.1 for a number that its row,
    column or box already has, and 10 for the solution. "sparse": 1 for the solution.

    ## Starting state
    A puzzle with `min_clues` to `max_clues` clues, proven to have one solution.

    ## Episode end
    Terminated by the solution (success), or by one wrong number more than `mistakes` (`failure` "mistakes").
    Truncation is left to the protocol, after `max_turns`: one for each cell that can be empty and for each mistake.

    ## Arguments
    - `size=4`: cells per side: 4, 6 or 9.
    - `min_clues=None`, `max_clues=None`: 5 to 8, 12 to 18 or 30 to 40 by size when None; 8 to 11 for size 6 with
      `effort="search"`.
    - `effort="any"`: or "singles" (solvable without a guess), "search" (not so; sizes 6 and 9).
    - `candidates=10`: up to this many empty cells, the numbers that fit are shown; 0 never shows them.
    - `mistakes=1`: wrong numbers that can be replaced.
    - `reward="dense"`: or "sparse".
    - `render_mode=None`: or "ansi", "rgb_array".
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    name = "sudoku"
    harder, easier = "size: 6, min_clues: 5", "min_clues: 11, max_clues: 13"
    action_word = "move"
    actions = None

    def __init__(
        self,
        size: int = 4,
        min_clues: int | None = None,
        max_clues: int | None = None,
        effort: str = "any",
        candidates: int = SHOWN,
        mistakes: int = 1,
        reward: str = "dense",
        render_mode: str | None = None,
    ):
        if size not in BOXES:
            raise ValueError(f"sudoku has the sizes {', '.join(map(str, BOXES))}, not size={size}.")
        if size == 4 and effort == "search":
            raise ValueError(
                "sudoku has no 4 x 4 puzzle that needs a guess: one single after the other solves them all. Choose"
                " size=6 or size=9 with effort=search."
            )
        usual = CLUES_OF_SEARCH[size] if effort == "search" else CLUES[size]
        least = usual[0] if min_clues is None else min_clues
        most = max(least, usual[1]) if max_clues is None else max_clues
        if not size - 1 <= least <= most < size * size or min(candidates, mistakes) < 0:
            raise ValueError(
                f"sudoku needs {size - 1} <= min_clues <= max_clues < {size * size} with size={size}, candidates >= 0"
                f" and mistakes >= 0, not min_clues={least}, max_clues={most}, candidates={candidates},"
                f" mistakes={mistakes}."
            )
        if effort == "search" and most > MOST_CLUES_OF_SEARCH[size]:
            raise ValueError(
                f"sudoku finds hardly a {size} x {size} puzzle with more than {MOST_CLUES_OF_SEARCH[size]} clues that"
                f" needs a guess: with effort=search, write max_clues={MOST_CLUES_OF_SEARCH[size]} or less, not"
                f" min_clues={least}, max_clues={most}."
            )
        self.shown, self.mistakes = candidates, mistakes
        self.dense = known("reward", reward, ("dense", "sparse")) == "dense"
        self.max_turns = size * size - least + mistakes
        super().__init__(render_mode)
        self.config = Grids(size, (least, most), known("effort", effort, EFFORTS))

    @classmethod
    def draw(cls, config: Grids, rng: np.random.Generator) -> Iterator[Puzzle | None]:
        shape = shape_of(config.size)
        while True:
            puzzle = None
            for _ in range(TRIES if config.effort == "search" else 1):
                puzzle = make_puzzle(shape, int(rng.integers(config.clues[0], config.clues[1] + 1)), rng)
                if puzzle and config.effort not in ("any", "singles" if by_singles(shape, puzzle.clues) else "search"):
                    puzzle = None
                if puzzle:
                    break
            yield puzzle

    @classmethod
    def key_of(cls, level: Puzzle) -> str:
        return puzzle_key(level.clues)

    @property
    def shape(self) -> GridShape:
        return shape_of(self.config.size)  # shared: a copy of the environment does not copy it

    def begin(self, level: Puzzle) -> None:
        self.level = level
        self.board = level.clues
        self.mistakes_left = self.mistakes
        self.last = ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        move, key, reward = self._read(action), self.state_key(), 0.0
        if move is not None and not self._over:
            (cell, value), before = move, self.board
            self.board = f"{before[:cell]}{value}{before[cell + 1 :]}"
            right = value == self.level.solution[cell]
            twice = "" if right else self._conflicts(cell, value)
            comment = "right" if right else f"wrong, {value} is in the {twice}" if twice else "wrong"
            self.mistakes_left -= not right
            place = place_digit(self.shape.size, cell)
            self.last = f"{place} {value} was {comment}" if self.style == "plain" else f"{place} {value} {comment}"
            if self.dense:
                gained = right - (before[cell] == self.level.solution[cell])
                reward = RIGHT * gained + CONFLICT * bool(twice) + SOLVED * self._solved
            else:
                reward = float(self._solved)
        info = {
            "success": self._solved,
            "action_is_valid": move is not None,
            "action_is_effective": self.state_key() != key,
            "failure": "mistakes" if self._over and not self._solved else "",
        }
        return self.observe(), reward, self._over, False, info

    def _read(self, action: str) -> tuple[int, str] | None:
        """Return the cell and the value that an action names; None for other texts, other places, and clues."""
        match = MOVE.fullmatch(action) if len(action) <= LONGEST else None
        if match is None or max(map(int, match.groups())) > self.shape.size:
            return None
        cell = (int(match[1]) - 1) * self.shape.size + int(match[2]) - 1
        return (cell, match[3]) if self.level.clues[cell] == "." else None

    @property
    def _solved(self) -> bool:
        return self.board == self.level.solution

    @property
    def _over(self) -> bool:
        return self._solved or self.mistakes_left < 0

    def _wrong(self) -> list[int]:
        """Return the cells with a wrong number."""
        both = zip(self.board, self.level.solution, strict=True)
        return [cell for cell, (value, right) in enumerate(both) if value not in (right, ".")]

    def _known(self) -> str:
        """Return the grid without wrong numbers."""
        both = zip(self.board, self.level.solution, strict=True)
        return "".join(value if value == right else "." for value, right in both)

    def _conflicts(self, cell: int, value: str) -> str:
        """Return which of its row, column and box have the value already, wrong numbers left aside: "row and box"."""
        grid = self._known()
        units = zip(("row", "column", "box"), self.shape.units_of[cell], strict=True)
        return " and ".join(kind for kind, unit in units if any(grid[k] == value for k in self.shape.units[unit]))

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        size, wrong = self.shape.size, set(self._wrong())
        cells = [f"{value}*" if cell in wrong else value for cell, value in enumerate(self.board)]
        lines = [" ".join(cells[k : k + size]) for k in range(0, size * size, size)]
        if self.style == "plain":
            return "\n".join([*lines, *self._plain_remarks()])
        left = candidates(self.shape, self._known())
        if 0 < len(left) <= self.shown:
            fits = [f"{place_digit(size, cell)}: {' '.join(map(str, values(mask)))}" for cell, mask in left.items()]
            lines.append(f"Possible {' ; '.join(fits)}")
        lines += [f"Last {self.last}"] if self.last else []
        return "\n".join([*lines, f"Mistakes left {max(0, self.mistakes_left)}"])

    def _plain_remarks(self) -> list[str]:
        size, left = self.shape.size, candidates(self.shape, self._known())
        said = []
        if 0 < len(left) <= self.shown:
            fits = [f"{place_digit(size, cell)}: {' '.join(map(str, values(mask)))}" for cell, mask in left.items()]
            said.append(f"Numbers that still fit, as row column: numbers: {'; '.join(fits)}.")
        said += [f"Your last move {self.last}."] if self.last else []
        mistakes = max(0, self.mistakes_left)
        return [*said, f"You may make {counted(mistakes, 'more mistake')}." if mistakes else "You may make no mistake."]

    def rules(self) -> str:
        size, (high, wide) = self.shape.size, self.shape.box
        if self.style == "plain":
            wrong = "A wrong number ends the game."
            if self.mistakes:
                wrong = f"A * marks a wrong number, which you have to replace; more than {self.mistakes} end the game."
            return (
                f"Solve a Sudoku: fill the grid so that every row, every column and every box of {high} rows and {wide}"
                f" columns has each number from 1 to {size} once. A dot is an empty cell. {wrong} Rows and columns are"
                " counted from 1 at the top left. A move is a row, a column and a number: 2 3 1 writes 1 into row 2,"
                " column 3."
            )
        wrong = "A wrong number ends the game."
        if self.mistakes:
            wrong = f"3* is a wrong number, to be replaced; more than {self.mistakes} of them end the game."
        shown = " Possible lists the numbers that fit in each empty cell, as row column: numbers." if self.shown else ""
        return (
            f"Sudoku: fill the grid so that every row, every column and every box of {high} rows and {wide} columns"
            f" has each number from 1 to {size} once. A dot is an empty cell. {wrong} Rows and columns count from 1 at"
            f" the top left.{shown} The action is row, column and number, such as 2 3 1."
        )

    def state_key(self) -> str:
        return f"{self.level.clues} {self.board} {self.mistakes_left}"

    # -- players ---------------------------------------------------------------------------------------------------

    def next_cell(self) -> Single:
        """Return the next right move with its reason: a single if any, else the cell with the fewest values."""
        grid, size = self._known(), self.shape.size
        single = next(singles(self.shape, grid), None)
        if single is not None:
            return single
        left = candidates(self.shape, grid)
        if not left:
            return Single(0, int(self.level.solution[0]), "nothing is empty")
        cell = min(left, key=lambda cell: left[cell].bit_count())
        value = int(self.level.solution[cell])
        others = " and ".join(str(other) for other in values(left[cell]) if other != value)
        return Single(cell, value, f"{place_digit(size, cell)} is {value}, as {others} leads to no solution")

    def expert(self) -> str:
        single = self.next_cell()
        return f"{place_digit(self.shape.size, single.cell)} {single.value}"

    def thought_of(self, action: str) -> str:
        return self.thought() if self.style == "compact" else f"{self.thought()} I write {action}."

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "In row 2, column 3 only 1 is left: its row, column and box have all other numbers.", ("2 3 1",)

    def thought(self) -> str:
        """Return why the expert's next move is right: `1 2 can only be 2` or `4 fits in its row only at 3 1`."""
        single = self.next_cell()
        if self.style == "compact":
            return single.reason
        row, column = divmod(single.cell, self.shape.size)
        place, words = place_digit(self.shape.size, single.cell), at_in_words(row + 1, column + 1)
        if single.reason.startswith(place):
            return f"The cell at {words}{single.reason.removeprefix(place)}."
        return f"{single.reason.removesuffix(place)}{words}." if single.reason.endswith(place) else f"{single.reason}."

    def cues(self) -> dict[str, tuple[str, ...]]:
        """Return all moves that a `single` proves right."""
        values = {single.cell: single.value for single in singles(self.shape, self._known())}
        return {
            "single": tuple(f"{place_digit(self.shape.size, cell)} {value}" for cell, value in sorted(values.items()))
        }

    def players(self) -> dict[str, str]:
        """`random`: any number in an open cell. `fitting`: one that its row, column and box do not have yet."""
        left = candidates(self.shape, self._known()) or {0: self.shape.full}
        chosen = [list(left)[int(k)] for k in self.policy_rng.integers(len(left), size=2)]
        numbers = [list(range(1, self.shape.size + 1)), values(left[chosen[1]])]
        moves = [
            f"{place_digit(self.shape.size, cell)} {choices[int(self.policy_rng.integers(len(choices)))]}"
            for cell, choices in zip(chosen, numbers, strict=True)
        ]
        return dict(zip(("random", "fitting"), moves, strict=True))

    def optimal_success(self, horizon: int) -> float:
        """Return 1 where the turns suffice for the cells that are not right yet, else 0."""
        lost = self._over and not self._solved
        return float(not lost and self._known().count(".") <= horizon)

    def render(self) -> Any:
        """Return the grid as text, or as a picture: clues black, right numbers blue, wrong ones red."""
        if self.render_mode != "rgb_array":
            return super().render()
        from PIL import Image, ImageDraw, ImageFont

        size, (high, wide), side, edge = self.shape.size, self.shape.box, 48, 6
        width = size * side + 2 * edge
        frame = Image.new("RGB", (width, width), "white")
        draw, font, wrong = ImageDraw.Draw(frame), ImageFont.load_default(28), set(self._wrong())
        for line in range(size + 1):
            at, end = edge + line * side, edge + size * side
            draw.line((at, edge, at, end), fill="black", width=4 if line % wide == 0 else 1)
            draw.line((edge, at, end, at), fill="black", width=4 if line % high == 0 else 1)
        for cell, value in enumerate(self.board):
            if value != ".":
                middle = (edge + cell % size * side + side // 2, edge + cell // size * side + side // 2)
                colour = "black" if self.level.clues[cell] != "." else "#c62828" if cell in wrong else "#1565c0"
                draw.text(middle, value, fill=colour, font=font, anchor="mm")
        return np.asarray(frame)


def values(mask: int) -> list[int]:
    """Return the values of some bits: values(0b1010) == [2, 4]."""
    return [value for value in range(1, mask.bit_length() + 1) if mask >> value - 1 & 1]
