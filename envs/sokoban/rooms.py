"""Which rooms of Sokoban are there, and how are they solved?  gym-sokoban's generator, and searches in both directions.

A level is a room in the customary letters: # wall, space floor, . target, $ box, * box on target, @ player, + player
on target. Rooms and targets are gym-sokoban's. Its last step, playing backwards depth first from the solution, gives
mostly short levels and says nothing of their length; `backwards`, an exact search, takes its place. `displaced` and
`walked` draw the start as RAGEN does. The package fails to import on current setuptools, so its files are loaded by
path.
"""

from __future__ import annotations

import importlib.util
import random
import threading
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}  # the order of every list of directions
SEARCH_LIMIT = 500_000  # states the solver looks at before it gives up


class Rooms(NamedTuple):
    """Which levels there are: Rooms(size=6, boxes=1, min_length=2, max_length=4, steps=20, search_depth=None).

    With a `search_depth` they are RAGEN's, whatever their length.
    """

    size: int
    boxes: int
    min_length: int
    max_length: int
    steps: int
    search_depth: int | None = None


class Room(NamedTuple):
    """A state of a room; cells are numbered row by row. The walls and targets of a level never change."""

    width: int
    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @classmethod
    def read(cls, level: tuple[str, ...]) -> Room:
        def cells(letters: str) -> frozenset[int]:
            return frozenset(i for i, letter in enumerate("".join(level)) if letter in letters)

        return cls(len(level[0]), cells("#"), cells(".*+"), cells("$*"), next(iter(cells("@+"))))

    def offset(self, direction: str) -> int:
        down, right = MOVES[direction]
        return down * self.width + right

    def after(self, direction: str) -> Room:
        """Return the room after a move; itself when the move is blocked (rooms are walled all round)."""
        step = self.offset(direction)
        there, beyond = self.player + step, self.player + 2 * step
        if there in self.walls:
            return self
        if there not in self.boxes:
            return self._replace(player=there)
        if beyond in self.walls or beyond in self.boxes:
            return self
        return self._replace(player=there, boxes=self.boxes - {there} | {beyond})

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    @property
    def deadlocked(self) -> bool:
        """Return whether a box is in a corner that is not a target: no push can free it."""
        return any(
            (box - self.width in self.walls or box + self.width in self.walls)
            and (box - 1 in self.walls or box + 1 in self.walls)
            for box in self.boxes - self.targets
        )

    def letters(self) -> tuple[str, ...]:
        """Return the letters of the room, row by row: the inverse of `read`."""
        letters = [" "] * (max(self.walls) + 1)  # the last cell is a wall, as the border is
        for cell in self.walls:
            letters[cell] = "#"
        for cell in self.targets:
            letters[cell] = "."
        for cell in self.boxes:
            letters[cell] = "*" if cell in self.targets else "$"
        letters[self.player] = "+" if self.player in self.targets else "@"
        return tuple("".join(letters[i : i + self.width]) for i in range(0, len(letters), self.width))


@lru_cache(maxsize=1 << 16)
def solve_room(room: Room, max_length: int = 10**6) -> tuple[str, ...] | None:
    """Return a shortest solution (breadth first over player and boxes), or None: unsolvable, too long or too large."""
    came_from: dict[Room, tuple[Room, str] | None] = {room: None}
    frontier = [room]
    for _ in range(max_length + 1):
        following = []
        for state in frontier:
            if state.solved:
                path = []
                while (step := came_from[state]) is not None:
                    state, direction = step
                    path.append(direction)
                return tuple(reversed(path))
            if state.deadlocked:
                continue
            for direction in MOVES:
                after = state.after(direction)
                if after not in came_from:
                    came_from[after] = (state, direction)
                    following.append(after)
        frontier = following
        if not frontier or len(came_from) > SEARCH_LIMIT:
            return None
    return None


_GENERATOR_LOCK = threading.Lock()  # gym-sokoban draws from the global generators


@lru_cache(maxsize=1)
def package_folder() -> Path:
    """Return where gym-sokoban lies; finding a package does not run it."""
    spec = importlib.util.find_spec("gym_sokoban")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("The environment sokoban needs gym-sokoban: pip install gym-sokoban==0.0.6")
    return Path(spec.submodule_search_locations[0]) / "envs"


@lru_cache(maxsize=1)
def room_utils() -> ModuleType:
    """Import gym-sokoban's level generator without the package around it."""
    spec = importlib.util.spec_from_file_location("gym_sokoban_room_utils", package_folder() / "room_utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generate_room(config: Rooms, seed: int) -> Room | None:
    """Return gym-sokoban's room for a seed below 2**32, solved (boxes on the targets); None with too little space."""
    with _GENERATOR_LOCK:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            floor = room_utils().room_topology_generation((config.size, config.size), num_steps=config.steps)
            room = room_utils().place_boxes_and_player(floor, num_boxes=config.boxes, second_player=False)
        except RuntimeError:  # "Not enough free spots"
            return None
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
    walls, targets, players = (frozenset(np.flatnonzero(room == code).tolist()) for code in (0, 2, 5))
    return Room(config.size, walls, targets, boxes=targets, player=min(players))


def backwards(solved: Room, max_length: int) -> list[list[Room]]:
    """Return all states of a room by the length of their shortest solution, 0 to `max_length` (breadth first)."""
    free = set(range(max(solved.walls))) - solved.walls
    steps = [solved.offset(direction) for direction in MOVES]
    layers = [[(player, solved.targets) for player in sorted(free - solved.targets)]]
    seen = set(layers[0])
    while len(layers) <= max_length and layers[-1] and len(seen) < SEARCH_LIMIT:
        layer = []
        for player, boxes in layers[-1]:
            for step in steps:
                came_from = player - step
                if came_from not in free or came_from in boxes:
                    continue
                before = [(came_from, boxes)]
                if player + step in boxes:
                    before.append((came_from, boxes - {player + step} | {player}))
                for state in before:
                    if state not in seen:
                        seen.add(state)
                        layer.append(state)
        layers.append(layer)
    return [[solved._replace(player=player, boxes=boxes) for player, boxes in layer] for layer in layers]


def displaced(solved: Room, search_depth: int) -> Room | None:
    """Return RAGEN's start: of all states that pulling backwards depth first comes by, up to `search_depth` moves
    away, the first with the most (pulls so far) x (distance of the boxes from their targets).

    None where no box can be pulled away. Each state is visited once, so the search depends on the order of directions;
    a box that was pulled differs from one that never was. A state counts if neither box nor player is on a target.
    """
    free = set(range(max(solved.walls))) - solved.walls
    steps = [solved.offset(direction) for direction in ("Up", "Down", "Left", "Right")]
    homes = sorted(solved.targets)
    seen: set[tuple[int, frozenset[int], frozenset[int]]] = set()
    best, most = None, 0
    todo = [(solved.player, tuple(homes), frozenset(homes), 0, 0)]  # player, boxes, those never pulled, pulls, depth
    while todo and len(seen) < 300_000:
        player, boxes, untouched, pulls, depth = todo.pop()
        state = (player, frozenset(boxes) - untouched, untouched)
        if depth > search_depth - 2 or state in seen:
            continue
        seen.add(state)
        if solved.targets.isdisjoint((player, *boxes)):
            score = pulls * sum(_distance(box, home, solved.width) for box, home in zip(boxes, homes, strict=True))
            if score > most:
                best, most = solved._replace(player=player, boxes=frozenset(boxes)), score
        following = []
        for step in steps:
            there, behind = player + step, player - step
            if there not in free or there in boxes:
                continue
            pulled = behind in boxes
            after = tuple(player if box == behind else box for box in boxes)
            following.append((there, after, untouched - {behind}, pulls + pulled, depth + 1))
        todo += reversed(following)
    return best


def walked(room: Room, rng: np.random.Generator) -> Room:
    """Return the room after RAGEN's last move: with chance .5 (.8 one push away) the player walks 1 to 3 cells."""
    push = next(iter(room.boxes)), next(iter(room.targets))
    near = len(room.boxes) == 1 and _distance(*push, room.width) == 1
    if rng.random() >= (0.8 if near else 0.5):
        return room
    for _ in range(3):
        ways = [d for d in MOVES if room.player + room.offset(d) not in room.walls | room.boxes]
        if not ways:
            break
        room = room.after(ways[int(rng.integers(len(ways)))])
        if rng.random() >= 0.5:
            break
    return room


def _distance(here: int, there: int, width: int) -> int:
    return abs(here // width - there // width) + abs(here % width - there % width)
