"""Can the model merge its way to a large tile?  The game 2048 as text.

A level is the first board, its tiles row by row. Where new tiles appear is chance, and belongs to the episode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envs.base import TextEnv, canonical, known, split_by_hash
from envs.sentences import listed

MOVES = ("Up", "Right", "Down", "Left")
FOURS = 0.1  # the share of new tiles that are 4; the others are 2
MANY = 1000  # ways to place the first tiles; below it the boards are too few to hold any out
CELL = 76  # pixels
COLOURS = ("cdc1b4", "eee4da", "ede0c8", "f2b179", "f59563", "f67c5f", "f65e3b", "edcf72", "edcc61", "edc850", "edc53f")

Line = tuple[int, ...]
Board = tuple[Line, ...]  # from the top; 0 is an empty cell


class Boards(NamedTuple):
    """Which levels there are: Boards(size=4, tiles=4)."""

    size: int
    tiles: int


class Game2048(TextEnv):
    """Merge tiles until one shows the target: the game 2048 in text.

    ## Action space
    `Up`, `Right`, `Down` or `Left`. A move that shifts no tile is valid and changes nothing.

    ## Observation space
    Text: the board, a row a line, `_` for an empty cell.

    ## Rewards
    "largest": the growth of the largest tile as a share of `target`, at most 1 in a game. "merges":
    0.1 log2(1 + sum of the tiles that the move makes).

    ## Starting state
    `tiles` tiles on random cells. Like every new tile, each is a 4 with probability 0.1, else a 2.

    ## Episode end
    Terminated when a tile reaches `target` (success) or nothing can move (`failure` "stuck"). Truncation is left to the
    protocol, after `max_turns`: 1.45 `target` / 2.2, rounded up, and 8 more.

    ## Arguments
    - `size=4`: cells per side, 3 to 6.
    - `target=64`: a power of two, 8 to 131,072; at most 1,024 with size 3. The standard game has 2,048.
    - `tiles=4`: tiles on the first board, fewer than cells. The standard game has 2.
    - `reward="largest"`: or "merges", which is RAGEN's.
    - `render_mode=None`: or "ansi", "rgb_array".

    `info["largest"]` is the largest tile.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    name = "game_2048"
    harder, easier = "target: 128", "target: 16"
    actions = MOVES
    deterministic = False

    def __init__(
        self,
        size: int = 4,
        target: int = 64,
        tiles: int = 4,
        reward: str = "largest",
        render_mode: str | None = None,
    ):
        largest = 1024 if size == 3 else 1 << 17  # on 3 x 3 and on 4 x 4 cells no larger tile can be made
        if not 3 <= size <= 6 or not 8 <= target <= largest or target & (target - 1) or not 1 <= tiles < size**2:
            raise ValueError(
                "game_2048 needs size from 3 to 6, a power of two as target from 8 to 131072 (1024 with size 3), and"
                f" 1 <= tiles < size * size, not size={size}, target={target}, tiles={tiles}."
            )
        self.target = target
        self.reward = known("reward", reward, ("largest", "merges"))
        # A move adds 2.2 to the board on average, and some of it lies beside the target. Docs: how often this suffices.
        self.max_turns = math.ceil(1.45 * target / 2.2) + 8
        super().__init__(render_mode)
        self.config = Boards(size, tiles)

    @classmethod
    def draw(cls, config: Boards, rng: np.random.Generator) -> Iterator[Board]:
        while True:
            cells = np.zeros(config.size**2, dtype=int)
            places = rng.choice(config.size**2, config.tiles, replace=False)
            cells[places] = np.where(rng.random(config.tiles) < FOURS, 4, 2)
            yield tuple(map(tuple, cells.reshape(config.size, config.size).tolist()))

    @classmethod
    def key_of(cls, level: Board) -> str:
        return canonical(["".join(map(str, row)) for row in level])

    @classmethod
    def split_of(cls, level: Board) -> str | None:
        tiles = [tile for row in level for tile in row if tile]
        return split_by_hash(cls.key_of(level)) if math.comb(len(level) ** 2, len(tiles)) >= MANY else None

    def begin(self, level: Board) -> None:
        self.level = level
        self.board = level

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, name, gained = self.board, self.canonical_action(action), 0
        if name is not None and not self._over():
            moved, gained = slide(before, name)
            self.board = moved if moved == before else self._with_new_tile(moved)
        won, largest = self._won(), max(map(max, self.board))
        grown = (largest - max(map(max, before))) / self.target
        reward = 0.1 * math.log2(1 + gained) if self.reward == "merges" else grown
        info = {
            "success": won,
            "action_is_valid": name is not None,
            "action_is_effective": self.board != before,
            "failure": "stuck" if self._over() and not won else "",
            "largest": largest,
        }
        return self.observe(), round(reward, 6), self._over(), False, info

    def _won(self) -> bool:
        return max(map(max, self.board)) >= self.target

    def _over(self) -> bool:
        return self._won() or not legal(self.board)

    def _with_new_tile(self, board: Board) -> Board:
        empty = empty_cells(board)
        row, column = empty[int(self.noise.integers(len(empty)))]
        return placed(board, row, column, 4 if self.noise.random() < FOURS else 2)

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        return "\n".join(" ".join(str(tile) if tile else "_" for tile in row) for row in self.board)

    def rules(self) -> str:
        if self.style == "plain":
            return (
                "You play 2048. In each move all tiles of the board slide one way. Two equal tiles that meet become one"
                " tile of their sum; then a new 2 or 4 appears in an empty cell. Make a tile of"
                f" {self.target} before no move is possible. Numbers are tiles, and _ is an empty cell. The actions are"
                f" {listed(MOVES)}. A move that shifts no tile changes nothing."
            )
        return (
            "Slide all tiles of the board one way. Two equal tiles that meet become one tile of their sum; then a new"
            f" 2 or 4 appears in an empty cell. Make a tile of {self.target} before nothing can move. A move that"
            " shifts no tile changes nothing. Numbers are tiles, _ is empty. Actions: Up, Right, Down, Left."
        )

    def thought(self) -> str:
        if self.style == "compact":
            return super().thought()
        cues, able = self.cues(), legal(self.board)
        merge, corner = (listed(cues[cue], "or") for cue in ("merge", "corner"))
        said = [f"The moves that shift a tile are {listed(able)}." if able else "No move shifts a tile."]
        said.append(f"The largest sum comes from {merge}." if merge else "No two tiles merge.")
        return " ".join([*said, *([f"The largest tile is in a corner after {corner}."] if corner else [])])

    def thought_of(self, action: str) -> str:
        return self.thought() if self.style == "compact" else f"{self.thought()} I choose {action}."

    def example(self) -> tuple[str, tuple[str, ...]]:
        action, line = self.by_level((("Left", "row"), ("Down", "column"), ("Right", "row"), ("Up", "column")))
        return f"The two tiles of 8 in the first {line} meet if I slide {action.lower()}.", (action, action)

    def state_key(self) -> str:
        return self.observe()

    # -- players ---------------------------------------------------------------------------------------------------

    def cues(self) -> dict[str, tuple[str, ...]]:
        """`merge`: the moves that make the largest sum. `corner`: moves after which the largest tile is in a corner."""
        after = {move: slide(self.board, move) for move in legal(self.board)}
        most = max((gained for _, gained in after.values()), default=0)
        merge = tuple(move for move, (_, gained) in after.items() if most and gained == most)
        return {"merge": merge, "corner": tuple(move for move, (board, _) in after.items() if cornered(board))}

    def players(self) -> dict[str, str]:
        """`merge` takes what it can get now; `corner` keeps the largest tile in a corner; `random` also wastes moves
        that shift nothing."""
        cues = self.cues()
        able = legal(self.board)
        return {"random": self.choose()} | {cue: self.choose(cues[cue] or able) for cue in ("merge", "corner")}

    def expert(self) -> str:
        """Return the best move by expectimax: own move, every new tile, own move, and the value of what is left."""
        return best_move(self.board)

    def render(self) -> Any:
        if self.render_mode != "rgb_array":
            return super().render()
        from PIL import Image, ImageDraw, ImageFont

        size = len(self.board)
        frame = Image.new("RGB", (size * CELL, size * CELL), "#bbada0")
        pen = ImageDraw.Draw(frame)
        for i, tile in enumerate(tile for row in self.board for tile in row):
            x, y = i % size * CELL, i // size * CELL
            colour = COLOURS[min(tile.bit_length() - 1, len(COLOURS) - 1)] if tile else COLOURS[0]
            pen.rounded_rectangle((x + 4, y + 4, x + CELL - 5, y + CELL - 5), 6, fill=f"#{colour}")
            if tile:
                font = ImageFont.load_default(30 if tile < 100 else 24 if tile < 1000 else 19)
                ink = "#776e65" if tile < 8 else "#f9f6f2"
                pen.text((x + CELL / 2, y + CELL / 2), str(tile), fill=ink, font=font, anchor="mm")
        return np.asarray(frame)


# -- the game ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 17)
def slide_row(row: Line) -> tuple[Line, int]:
    """Return a row slid to its start and the sum of the merged tiles: (2, 0, 2, 4) gives ((4, 4, 0, 0), 4)."""
    made, gained, mergeable = [], 0, False
    for tile in filter(None, row):
        if mergeable and made[-1] == tile:
            made[-1] *= 2
            gained += made[-1]
            mergeable = False
        else:
            made.append(tile)
            mergeable = True
    return tuple(made + [0] * (len(row) - len(made))), gained


def slide(board: Board, move: str) -> tuple[Board, int]:
    """Return the board after a move and the sum of the tiles that were made."""
    lines = list(zip(*board, strict=True)) if move in ("Up", "Down") else board
    if move in ("Right", "Down"):
        lines = [line[::-1] for line in lines]
    slid = [slide_row(line) for line in lines]
    rows = [line[::-1] if move in ("Right", "Down") else line for line, _ in slid]
    turned = tuple(zip(*rows, strict=True)) if move in ("Up", "Down") else tuple(rows)
    return turned, sum(gained for _, gained in slid)


def legal(board: Board) -> tuple[str, ...]:
    """Return the moves that shift something."""
    return tuple(move for move in MOVES if slide(board, move)[0] != board)


def empty_cells(board: Board) -> list[tuple[int, int]]:
    return [(r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if not tile]


def placed(board: Board, row: int, column: int, tile: int) -> Board:
    line = board[row]
    return (*board[:row], (*line[:column], tile, *line[column + 1 :]), *board[row + 1 :])


def cornered(board: Board) -> bool:
    corners = {board[0][0], board[0][-1], board[-1][0], board[-1][-1]}
    return max(map(max, board)) in corners


@lru_cache(maxsize=1 << 17)
def line_value(line: Line) -> float:
    """Return what a row or column is worth: empty cells, equal neighbours, and tiles that rise or fall along it.

    Differences count by the exponent, more among large tiles: a large tile between small ones can hardly be merged.
    """
    powers = [tile.bit_length() for tile in line]
    falls = sum(max(0, a**2 - b**2) for a, b in pairwise(powers))
    rises = sum(max(0, b**2 - a**2) for a, b in pairwise(powers))
    equal = sum(a == b > 0 for a, b in pairwise(powers))
    return 10.0 * line.count(0) + 12.0 * equal - 1.0 * min(falls, rises) - 0.5 * sum(power**1.5 for power in powers)


@lru_cache(maxsize=1 << 16)
def board_value(board: Board) -> float:
    return sum(map(line_value, board)) + sum(map(line_value, zip(*board, strict=True)))


@lru_cache(maxsize=1 << 16)
def best_reply(board: Board) -> float:
    """Return the value after the best move; a lost board is worth much less than any other."""
    return max((board_value(slide(board, move)[0]) for move in legal(board)), default=-1000.0)


@lru_cache(maxsize=1 << 16)
def best_move(board: Board) -> str:
    """Return the best move by expectimax over one own move, the new tile and one more move; any move if all lose."""

    def expected(after: Board) -> float:
        empty = empty_cells(after)
        values = [
            (1 - FOURS) * best_reply(placed(after, r, c, 2)) + FOURS * best_reply(placed(after, r, c, 4))
            for r, c in empty
        ]
        return sum(values) / len(values)

    return max(legal(board), key=lambda move: expected(slide(board, move)[0]), default=MOVES[0])
