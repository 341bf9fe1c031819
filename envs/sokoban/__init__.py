"""Can the model push the boxes home?  gym-sokoban's rooms as text.

A level is a room in letters (`rooms`), chosen by the length of its best solution, or drawn as RAGEN does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from envs.base import OBSERVATIONS, TextEnv, canonical, known, steps_in_words, with_symbols
from envs.sentences import DIRECTIONS, PLACES, SIDES, at_in_words, listed, way_in_words
from envs.sokoban.rooms import (
    MOVES,
    Room,
    Rooms,
    backwards,
    displaced,
    generate_room,
    package_folder,
    solve_room,
    walked,
)

CELLS = ("wall", "floor", "target", "box", "box_on_target", "player", "player_on_target")
LETTERS = dict(zip("# .$*@+", CELLS, strict=True))  # in levels
WORDS = dict(
    zip(CELLS, ("a wall", "floor", "a target", "a box", "a box on a target", "you", "you on a target"), strict=True)
)
OPPOSITE = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
SYMBOLS: dict[str, str] = dict(zip(CELLS, "#_OX*PS", strict=True))  # in observations
LARGEST = 64  # cells a side
PATIENCE = 100  # rooms that are looked at for a start of one length


class Sokoban(TextEnv):
    """Push every box onto a target: gym-sokoban's rooms in text.

    ## Action space
    `Left`, `Down`, `Right` or `Up`. Moving onto a box pushes it; a blocked move is valid and changes nothing.

    ## Observation space
    Text. With `observation="neighbours"` the four cells beside the player and, for each box, its steps from the player,
    the four cells beside it and the steps from it to the nearest free target; with `coordinates` the positions; with
    `grid` the room; with `both` the last two.

    ## Rewards
    "dense": -0.1 for each action, also an invalid one, +1 for a box that gets onto a target, -1 for one that leaves it
    and +10 for the solution. "sparse": 1 for the solution.

    ## Starting state
    A room whose shortest solution has `min_length` to `max_length` moves, each length with equal probability; with
    `distribution="ragen"` a start drawn as RAGEN does, of any length.

    ## Episode end
    Terminated when every target has a box (success). A box in a corner that is not a target is `failure` "deadlock";
    with `deadlock_ends` it terminates the episode. Truncation is left to the protocol, after `max_turns`: `max_length`,
    at least 8 turns, or 25 with `distribution="ragen"`.

    ## Arguments
    - `size=6`: cells per side, 5 to 64.
    - `boxes=1`: boxes and targets.
    - `min_length=None`, `max_length=None`: moves of the shortest solution, 2 to 4 when None; not for "ragen".
    - `steps=None`: steps of the random walk that digs the room; None is gym-sokoban's default, 3.4 times `size`.
    - `distribution="length"`: or "ragen".
    - `search_depth=None`: moves of RAGEN's backward search, 3 to 10,000; 300 when None; only for "ragen".
    - `reward="dense"`: or "sparse".
    - `deadlock_ends=False`: a deadlock ends the episode.
    - `observation="grid"`: or "coordinates", "both", "neighbours".
    - `symbols=None`: what stands for each kind of cell, by its name in `CELLS`.
    - `separator=" "`: between the cells of a grid.
    - `render_mode=None`: or "ansi", "rgb_array".
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    name = "sokoban"
    harder, easier = "boxes: 2, max_length: 8, distribution: ragen", "max_length: 2, observation: neighbours"
    actions = tuple(MOVES)

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        min_length: int | None = None,
        max_length: int | None = None,
        steps: int | None = None,
        distribution: str = "length",
        search_depth: int | None = None,
        reward: str = "dense",
        deadlock_ends: bool = False,
        observation: str = "grid",
        symbols: Mapping[str, str] | None = None,
        separator: str = " ",
        render_mode: str | None = None,
    ):
        ragen = known("distribution", distribution, ("length", "ragen")) == "ragen"
        if ragen and (min_length, max_length) != (None, None):
            raise ValueError(
                'sokoban: min_length and max_length are for distribution="length"; RAGEN\'s have any length.'
            )
        min_length = 2 if min_length is None else min_length
        max_length = 4 if max_length is None else max_length
        if not 5 <= size <= LARGEST or boxes < 1 or not 1 <= min_length <= max_length:
            raise ValueError(
                f"sokoban needs size >= 5 and at most {LARGEST}, boxes >= 1 and 1 <= min_length <= max_length, not"
                f" size={size}, boxes={boxes}, min_length={min_length}, max_length={max_length}."
            )
        if search_depth is not None and not (ragen and 3 <= search_depth <= 10_000):
            raise ValueError('sokoban: search_depth is 3 to 10000, and for distribution="ragen" alone.')
        self.side = size
        self.reward = known("reward", reward, ("dense", "sparse"))
        self.deadlock_ends = deadlock_ends
        self.observation = known("observation", observation, OBSERVATIONS)
        self.observable = observation != "neighbours"
        self.symbols = with_symbols(SYMBOLS, symbols)
        self.separator = separator
        super().__init__(render_mode)
        steps = int(1.7 * 2 * size) if steps is None else steps
        self.max_turns = 25 if ragen else max(8, max_length)
        self.config = Rooms(size, boxes, min_length, max_length, steps, (search_depth or 300) if ragen else None)

    @classmethod
    def draw(cls, config: Rooms, rng: np.random.Generator) -> Iterator[tuple[str, ...] | None]:
        """Yield one start of each room, all of one optimal length, which is any within the limits with equal chance.

        A length is given up for another after `PATIENCE` rooms: few rooms have it, or the split has none of them.
        """
        while config.search_depth is not None:
            room = generate_room(config, int(rng.integers(1 << 32)))
            start = None if room is None else displaced(room, config.search_depth)
            yield None if start is None else walked(start, rng).letters()
        while True:
            length = int(rng.integers(config.min_length, config.max_length + 1))
            for _ in range(PATIENCE):
                room = generate_room(config, int(rng.integers(1 << 32)))
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
        was_over = self._over()
        if name is not None and not was_over:
            self.room = before.after(name)
        solved, deadlock = self.room.solved, self.room.deadlocked
        placed = len(self.room.boxes & self.room.targets) - len(before.boxes & before.targets)
        reward = -0.1 + placed + 10 * solved if self.reward == "dense" else float(solved)
        reward = 0.0 if was_over else round(reward, 6)
        info = {
            "success": solved,
            "action_is_valid": name is not None,
            "action_is_effective": self.room != before,
            "failure": "deadlock" if deadlock else "",
            "deadlock": deadlock,
        }
        return self.observe(), reward, self._over(), False, info

    def _over(self) -> bool:
        return self.room.solved or (self.deadlock_ends and self.room.deadlocked)

    # -- text ------------------------------------------------------------------------------------------------------

    def _at(self, cell: int) -> str:
        at = divmod(cell, self.side)
        return at_in_words(*at) if self.style == "plain" else f"{at[0]} {at[1]}"

    def _beside(self, cell: int, letters: str) -> str:
        beside = {direction: letters[cell + self.room.offset(direction)] for direction in MOVES}
        if self.style == "plain":
            return listed([f"{WORDS[LETTERS[letter]]} {SIDES[each]}" for each, letter in beside.items()])
        return " ".join(f"{direction} {self.symbols[LETTERS[letter]]}" for direction, letter in beside.items())

    def observe(self) -> str:
        room, letters = self.room, "".join(self.room.letters())
        if self.observation == "grid":
            return self._grid(self.separator)
        if self.observation == "neighbours" and self.style == "plain":
            return "\n".join([f"Around you: {self._beside(room.player, letters)}.", *self._boxes_in_words(letters)])
        if self.observation == "neighbours":
            boxes = [f"{self._box(box)} {self._beside(box, letters)}{self._target(box)}" for box in sorted(room.boxes)]
            return " ".join([f"You {self._beside(room.player, letters)}", *boxes])
        inner = [i for i in sorted(room.walls) if {i // self.side, i % self.side}.isdisjoint({0, self.side - 1})]
        lists = {"You": [room.player], "Boxes": room.boxes, "Targets": room.targets, "Walls": inner}
        if self.style == "plain":
            places = {name: listed([self._at(cell) for cell in sorted(cells)]) for name, cells in lists.items()}
            coordinates = f"You are at {places.pop('You')}." + "".join(
                f" {name} {'inside the room ' if name == 'Walls' else ''}are at {where}."
                for name, where in places.items()
                if where
            )
        else:
            coordinates = " ".join(
                f"{name} {' ; '.join(map(self._at, sorted(cells))) or 'none'}" for name, cells in lists.items()
            )
        return coordinates if self.observation == "coordinates" else f"{coordinates}\n{self._grid(self.separator)}"

    def _boxes_in_words(self, letters: str) -> list[str]:
        """Return for each box where it is, what is beside it, and where its nearest free target is."""
        said = []
        for box in sorted(self.room.boxes):
            way = way_in_words(self._way(self.room.player, box))
            target = self._nearest_target(box)
            goal = (
                "It is on a target."
                if target is None
                else f"Its nearest free target is {way_in_words(target)} from it."
            )
            said.append(f"A box is {way} from you. Around it: {self._beside(box, letters)}. {goal}")
        return said

    def _grid(self, separator: str) -> str:
        rows = [separator.join(self.symbols[LETTERS[letter]] for letter in row) for row in self.room.letters()]
        return "\n".join(rows)

    def _box(self, box: int) -> str:
        """Return where it is, from the player."""
        return f"Box {steps_in_words(self._way(self.room.player, box), MOVES)}"

    def _target(self, box: int) -> str:
        """Return where the nearest target is that has no box, from this box; nothing of a box that is on one."""
        way = self._nearest_target(box)
        return "" if way is None else f" Target {steps_in_words(way, MOVES)}"

    def _nearest_target(self, box: int) -> tuple[int, int] | None:
        """Return the way from a box to its nearest free target; None for a box that is on one, or without any."""
        free = sorted(self.room.targets - self.room.boxes)
        if box in self.room.targets or not free:
            return None
        return min((self._way(box, target) for target in free), key=lambda way: abs(way[0]) + abs(way[1]))

    def _plain_rules(self) -> str:
        parts = [
            "You push boxes in a room. Push every box onto a target. To push a box, walk against it: it moves one cell"
            " if the cell behind it is free. You cannot pull a box or push two at once."
        ]
        if self.observation == "neighbours":
            parts.append("In each turn you learn what is beside you, where each box is, and what is beside it.")
        elif self.observation != "grid":
            side = self.side
            parts.append(
                f"The room has {side} rows and {side} columns. Rows are counted from the top and columns from the left,"
                " beginning with 0. The outermost cells are walls."
            )
        if self.observation in ("grid", "both"):
            legend = listed([f"{self.symbols[cell]} is {WORDS[cell]}" for cell in CELLS])
            parts.append(f"On the map, {legend}.")
        if self.deadlock_ends:
            parts.append("A box in a corner that is not a target cannot be moved any more and ends the game.")
        parts.append(f"The actions are {listed(list(MOVES))}; each moves you by one cell.")
        return " ".join(parts)

    def rules(self) -> str:
        if self.style == "plain":
            return self._plain_rules()
        parts = ["Push every box onto a target; you cannot pull."]
        if self.observation == "neighbours":
            parts.append("Box: steps from you. Target: steps from that box to the nearest free target.")
        elif self.observation != "grid":
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
        place to push it from lies, walls and boxes or not, and `free`: moves onto an empty cell. `to`: which push.

        With several boxes it is about the unplaced box nearest to a free target.
        """
        room = self.room
        places: dict[str, int] = {}
        if (nearest := self._nearest_box()) is not None:
            way, box = nearest
            blocked = room.walls | room.boxes
            for direction in _towards(way):
                step = room.offset(direction)
                if box - step not in blocked and box + step not in blocked:
                    places[direction] = box - step
        push = tuple(direction for direction, place in places.items() if place == room.player)
        if push:
            return {"to": push, "push": push}
        ways = {direction: self._way(room.player, place) for direction, place in places.items()}
        to = sorted(ways, key=lambda direction: abs(ways[direction][0]) + abs(ways[direction][1]))[:1]
        go = _towards(ways[to[0]]) if to else ()
        free = [d for d in MOVES if room.player + room.offset(d) not in room.walls | room.boxes]
        return {"to": tuple(to), "go": go, "free": tuple(free)}

    def _way(self, here: int, there: int) -> tuple[int, int]:
        return there // self.side - here // self.side, there % self.side - here % self.side

    def _nearest_box(self) -> tuple[tuple[int, int], int] | None:
        """Return the way to its target of the unplaced box that is nearest to one, and the box."""
        boxes, targets = sorted(self.room.boxes - self.room.targets), sorted(self.room.targets - self.room.boxes)
        pairs = [(self._way(box, target), box) for box in boxes for target in targets]
        return min(pairs, key=lambda pair: abs(pair[0][0]) + abs(pair[0][1]), default=None)

    def thought(self) -> str:
        if self.style == "compact":
            return super().thought()
        if (nearest := self._nearest_box()) is None:
            return "Every box is on a target."
        way, box = nearest
        here = way_in_words(self._way(self.room.player, box))
        said = f"The box is {here} from me. Its target is {way_in_words(way)} from the box."
        if to := self.cues()["to"]:
            ready = "push" in self.cues()
            said += f" I want to push it {DIRECTIONS[to[0]]}"
            said += ", and I am in the right place." if ready else f", so I must get {PLACES[OPPOSITE[to[0]]]} it."
        return said

    def thought_of(self, action: str) -> str:
        """Return where the box and its target are, from where it has to be pushed, and the action."""
        if self.style == "compact" or action not in MOVES:
            return self.thought()
        pushes = self.room.player + self.room.offset(action) in self.room.boxes
        return f"{self.thought()} I {'push' if pushes else 'go'} {action.lower()}."

    def example(self) -> tuple[str, tuple[str, ...]]:
        action, place = self.by_level(
            (("Right", "to the right of"), ("Down", "below"), ("Left", "to the left of"), ("Up", "above"))
        )
        thought = f"The box is 1 step {place} me, and its target is 2 steps {place} the box, so I push it."
        return thought, (action, action)

    def players(self) -> dict[str, str]:
        """`push` pushes when it happens to stand right; `go` walks to where it should stand, blind to what is in the
        way; `free` wanders where nothing is in the way. Each acts at random where its cue says nothing."""
        cues = self.cues()
        return {"random": self.choose()} | {cue: self.choose(cues.get(cue, ())) for cue in ("push", "go", "free")}

    def expert(self) -> str:
        """Return the first move of a shortest solution; of a lost game, any."""
        solution = solve_room(self.room)
        return solution[0] if solution else next(iter(MOVES))

    def optimal_length(self) -> int:
        """Return moves to the solution from here; -1 when none exists."""
        solution = solve_room(self.room)
        return -1 if solution is None else len(solution)

    def optimal_success(self, horizon: int) -> float:
        """Return 1 when the best player solves it from here within `horizon` moves, else 0."""
        return float(0 <= self.optimal_length() <= horizon)

    def render(self) -> Any:
        """Return gym-sokoban's picture with `render_mode="rgb_array"`, and the grid with "ansi"."""
        if self.render_mode != "rgb_array":
            return self._grid(" ") if self.render_mode == "ansi" else None
        rows = [
            np.concatenate([cell_picture(LETTERS[letter]) for letter in row], axis=1) for row in self.room.letters()
        ]
        return np.concatenate(rows, axis=0).repeat(4, axis=0).repeat(4, axis=1)


def _towards(way: tuple[int, int]) -> tuple[str, ...]:
    return tuple(d for d, (down, right) in MOVES.items() if down * way[0] + right * way[1] > 0)


@lru_cache(maxsize=len(CELLS))
def cell_picture(cell: str) -> np.ndarray:
    """Return one of gym-sokoban's 16 x 16 pictures (read here, since its renderer needs pkg_resources)."""
    from PIL import Image

    files = {"target": "box_target"}
    with Image.open(package_folder() / "surface" / f"{files.get(cell, cell)}.png") as image:
        return np.asarray(image.convert("RGB"))
