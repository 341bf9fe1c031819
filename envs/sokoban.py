"""Can the model push the boxes home?  gym-sokoban's rooms, told in text, chosen by the length of their best solution.

A level is a room in the customary letters: # wall, space floor, . target, $ box, * box on target, @ player, + player
on target. Rooms and targets are gym-sokoban's. Its last step, playing backwards depth first from the solution, gives
mostly levels of one or two moves and says nothing of their length; here an exact backward search takes its place.
Its package fails to import on current setuptools, so its files are loaded by path.
"""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envs.base import OBSERVATIONS, TextEnv, canonical, known, with_symbols

CELLS = ("wall", "floor", "target", "box", "box_on_target", "player", "player_on_target")
LETTERS = dict(zip("# .$*@+", CELLS, strict=True))  # in levels
SYMBOLS: dict[str, str] = dict(zip(CELLS, "#_OX*PS", strict=True))  # in observations
MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}  # the order of every list of directions
PATIENCE = 100  # rooms that are looked at for a start of one length
SEARCH_LIMIT = 500_000  # states the solver looks at before it gives up


class Rooms(NamedTuple):
    """Which levels there are: Rooms(size=6, boxes=1, min_length=2, max_length=4, steps=20)."""

    size: int
    boxes: int
    min_length: int
    max_length: int
    steps: int


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
        """The room after a move; itself when the move is blocked (rooms are walled all round)."""
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
        """Whether a box stands in a corner that is no target: no push can ever free it."""
        return any(
            (box - self.width in self.walls or box + self.width in self.walls)
            and (box - 1 in self.walls or box + 1 in self.walls)
            for box in self.boxes - self.targets
        )

    def letters(self) -> tuple[str, ...]:
        """The letters of the room, row by row: the inverse of `read`."""
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
def solve(room: Room, max_length: int = 10**6) -> tuple[str, ...] | None:
    """A shortest solution (breadth first over player and boxes), or None: unsolvable, too long or too large."""
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


class Sokoban(TextEnv):
    """Push every box onto a target.

    Levels have a best solution of `min_length` to `max_length` moves in a room of gym-sokoban's (`steps` of its random
    walk; its own default when None).
    `reward="dense"` pays -0.1 a step, +1 for a box that gets onto a target, -1 for one that leaves it, +10 for the
    solution; `reward="sparse"` pays 1 for the solution. `deadlock_ends=True` ends a game with a box lost in a corner.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    name = "sokoban"
    actions = tuple(MOVES)

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        min_length: int = 2,
        max_length: int = 4,
        steps: int | None = None,
        reward: str = "dense",
        deadlock_ends: bool = False,
        observation: str = "neighbours",
        symbols: Mapping[str, str] | None = None,
        separator: str = " ",
        render_mode: str | None = None,
    ):
        if size < 5 or boxes < 1 or not 1 <= min_length <= max_length:
            raise ValueError(
                f"sokoban needs size >= 5, boxes >= 1 and 1 <= min_length <= max_length, not size={size}, "
                f"boxes={boxes}, min_length={min_length}, max_length={max_length}."
            )
        self.side = size
        self.reward = known("reward", reward, ("dense", "sparse"))
        self.deadlock_ends = deadlock_ends
        self.observation = known("observation", observation, OBSERVATIONS)
        self.symbols = with_symbols(SYMBOLS, symbols)
        self.separator = separator
        super().__init__(render_mode)
        self.config = Rooms(size, boxes, min_length, max_length, int(1.7 * 2 * size) if steps is None else steps)

    @classmethod
    def draw(cls, config: Rooms, rng: np.random.Generator) -> Iterator[tuple[str, ...] | None]:
        """One start of each room, all of one optimal length, which is any within the limits with equal chance.

        A length is given up for another after `PATIENCE` rooms: few rooms have it, or the split has none of them.
        """
        while True:
            length = int(rng.integers(config.min_length, config.max_length + 1))
            for _ in range(PATIENCE):
                room = generate(config, int(rng.integers(1 << 32)))
                layers = backwards(room, length) if room is not None else []
                starts = layers[length] if len(layers) > length else []
                yield starts[int(rng.integers(len(starts)))].letters() if starts else None

    @classmethod
    def key_of(cls, level: tuple[str, ...]) -> str:
        return canonical(level)

    def begin(self, level: tuple[str, ...]) -> None:
        self.level = level
        self.room = Room.read(level)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, name = self.room, self.canonical_action(action)
        if name is not None:
            self.room = before.after(name)
        solved, deadlock = self.room.solved, self.room.deadlocked
        placed = len(self.room.boxes & self.room.targets) - len(before.boxes & before.targets)
        reward = -0.1 + placed + 10 * solved if self.reward == "dense" else float(solved)
        info = {
            "success": solved,
            "action_is_valid": name is not None,
            "action_is_effective": self.room != before,
            "failure": "deadlock" if deadlock else "",
            "deadlock": deadlock,
        }
        return self.observe(), round(reward, 6), solved or (deadlock and self.deadlock_ends), False, info

    # -- text ------------------------------------------------------------------------------------------------------

    def _at(self, cell: int) -> str:
        return f"{cell // self.side} {cell % self.side}"

    def _beside(self, cell: int, letters: str) -> str:
        beside = {direction: letters[cell + self.room.offset(direction)] for direction in MOVES}
        return " ".join(f"{direction} {self.symbols[LETTERS[letter]]}" for direction, letter in beside.items())

    def observe(self) -> str:
        room, letters = self.room, "".join(self.room.letters())
        if self.observation == "neighbours":
            boxes = [f"Box {self._at(box)} {self._beside(box, letters)}" for box in sorted(room.boxes)]
            targets = [f"Target {self._at(target)}" for target in sorted(room.targets)]
            return " ".join([f"You {self._at(room.player)} {self._beside(room.player, letters)}", *boxes, *targets])
        inner = [i for i in sorted(room.walls) if {i // self.side, i % self.side}.isdisjoint({0, self.side - 1})]
        lists = {"You": [room.player], "Boxes": room.boxes, "Targets": room.targets, "Walls": inner}
        coordinates = " ".join(
            f"{name} {' ; '.join(map(self._at, sorted(cells))) or 'none'}" for name, cells in lists.items()
        )
        if self.observation == "coordinates":
            return coordinates
        grid = self._grid(self.separator)
        return grid if self.observation == "grid" else f"{coordinates}\n{grid}"

    def _grid(self, separator: str) -> str:
        rows = [separator.join(self.symbols[LETTERS[letter]] for letter in row) for row in self.room.letters()]
        return "\n".join(rows)

    def rules(self) -> str:
        parts = ["Push every box onto a target; you cannot pull."]
        if self.observation != "grid":
            parts.append(f"Positions are row column, 0 0 the top left of {self.side} x {self.side} cells.")
        if self.observation in ("coordinates", "both"):
            parts.append("The outermost cells are walls.")
        if self.observation != "coordinates":
            names = {cell: cell.replace("_", " ").replace("player", "you") for cell in CELLS}
            legend = ", ".join(f"{self.symbols[cell]} {names[cell]}" for cell in CELLS)
            where = "Cells beside you and each box" if self.observation == "neighbours" else "Cells"
            parts.append(f"{where}: {legend}.")
        if self.deadlock_ends:
            parts.append("A box stuck in a corner ends the game.")
        parts.append(f"Actions: {', '.join(MOVES)}.")
        return " ".join(parts)

    def state_key(self) -> str:
        return "\n".join(self.room.letters())

    # -- players ---------------------------------------------------------------------------------------------------

    def cues(self) -> dict[str, tuple[str, ...]]:
        """`push`: pushes at hand that bring the box nearer to its target. Where there are none, `go`: where the
        place to push it from lies, walls and boxes or not, and `free`: moves onto an empty cell.

        With several boxes it is about the unplaced box nearest to a free target.
        """
        room = self.room
        boxes, targets = sorted(room.boxes - room.targets), sorted(room.targets - room.boxes)
        pairs = [(self._way(box, target), box) for box in boxes for target in targets]
        places: dict[str, int] = {}
        if pairs:
            way, box = min(pairs, key=lambda pair: abs(pair[0][0]) + abs(pair[0][1]))
            blocked = room.walls | room.boxes
            for direction in _towards(way):
                step = room.offset(direction)
                if box - step not in blocked and box + step not in blocked:
                    places[direction] = box - step
        push = tuple(direction for direction, place in places.items() if place == room.player)
        if push:
            return {"push": push}
        ways = [self._way(room.player, place) for place in places.values()]
        go = _towards(min(ways, key=lambda way: abs(way[0]) + abs(way[1]))) if ways else ()
        free = [d for d in MOVES if room.player + room.offset(d) not in room.walls | room.boxes]
        return {"go": go, "free": tuple(free)}

    def _way(self, here: int, there: int) -> tuple[int, int]:
        return there // self.side - here // self.side, there % self.side - here % self.side

    def players(self) -> dict[str, str]:
        """`push` pushes when it happens to stand right; `go` walks to where it should stand, blind to what is in the
        way; `free` wanders where nothing is in the way. Each acts at random where its cue says nothing."""
        cues = self.cues()
        return {"random": self.choose()} | {cue: self.choose(cues.get(cue, ())) for cue in ("push", "go", "free")}

    def expert(self) -> str:
        """The first move of a shortest solution; of a lost game, any."""
        solution = solve(self.room)
        return solution[0] if solution else next(iter(MOVES))

    def optimal_length(self) -> int:
        """Moves to the solution from here; -1 when there is none."""
        solution = solve(self.room)
        return -1 if solution is None else len(solution)

    def optimal_success(self, horizon: int) -> float:
        """1 when the best player solves it from here within `horizon` moves, else 0."""
        return float(0 <= self.optimal_length() <= horizon)

    def render(self) -> Any:
        """gym-sokoban's pictures with `render_mode="rgb_array"`; the grid with "ansi", whatever the model is shown."""
        if self.render_mode != "rgb_array":
            return self._grid(" ") if self.render_mode == "ansi" else None
        rows = [np.concatenate([picture(LETTERS[letter]) for letter in row], axis=1) for row in self.room.letters()]
        return np.concatenate(rows, axis=0).repeat(4, axis=0).repeat(4, axis=1)


def _towards(way: tuple[int, int]) -> tuple[str, ...]:
    return tuple(d for d, (down, right) in MOVES.items() if down * way[0] + right * way[1] > 0)


@lru_cache(maxsize=len(CELLS))
def picture(cell: str) -> np.ndarray:
    """One of gym-sokoban's 16 x 16 pictures (read here, since its renderer needs pkg_resources)."""
    from PIL import Image

    files = {"target": "box_target"}
    with Image.open(package_folder() / "surface" / f"{files.get(cell, cell)}.png") as image:
        return np.asarray(image.convert("RGB"))


_GENERATOR_LOCK = threading.Lock()  # gym-sokoban draws from the global generators


@lru_cache(maxsize=1)
def package_folder() -> Path:
    """Where gym-sokoban lies; finding a package does not run it."""
    spec = importlib.util.find_spec("gym_sokoban")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("The environment sokoban needs gym-sokoban: pip install gym-sokoban==0.0.6")
    return Path(spec.submodule_search_locations[0]) / "envs"


@lru_cache(maxsize=1)
def room_utils() -> ModuleType:
    """gym-sokoban's level generator, without the package around it."""
    spec = importlib.util.spec_from_file_location("gym_sokoban_room_utils", package_folder() / "room_utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generate(config: Rooms, seed: int) -> Room | None:
    """gym-sokoban's room for a seed below 2**32, solved (boxes on the targets), or None where too little is free.

    It draws from the global generators, which are lent to it and then put back as they were.
    """
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
    """All states of a room by the length of their shortest solution, 0 to `max_length` (breadth first, pulling)."""
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
