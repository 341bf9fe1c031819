"""Can the model turn a small cube back?  The 2x2x2 Rubik's cube, described by the stickers of its faces.

A level is a cube as 24 letters, face after face, and whether its kind is held out. Two cubes that differ by turning the
whole cube in the hand are the same puzzle. All 3,674,160 puzzles are in one table of exact distances, which is
built once a process, in half a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envs.base import TextEnv, split_by_hash
from envs.sentences import listed

# Each face: its name, the letter of its colour when solved, its outward direction, and where its rows and columns lead.
# x is right, y is up, z is towards the reader: every face is read as it lies in the usual unfolded net.
FACES = (
    ("Up", "W", (0, 1, 0), (0, 0, 1), (1, 0, 0)),
    ("Right", "R", (1, 0, 0), (0, -1, 0), (0, 0, -1)),
    ("Front", "G", (0, 0, 1), (0, -1, 0), (1, 0, 0)),
    ("Down", "Y", (0, -1, 0), (0, 0, -1), (1, 0, 0)),
    ("Left", "O", (-1, 0, 0), (0, -1, 0), (0, 0, 1)),
    ("Back", "B", (0, 0, -1), (0, -1, 0), (-1, 0, 0)),
)
SOLVED = "".join(colour * 4 for _, colour, *_ in FACES)
MOVES = tuple(face[0] + turn for face in ("Up", "Right", "Front", "Down", "Left", "Back") for turn in ("", "'"))
GENERATORS = MOVES[:6]  # the moves that leave the corner down left back where it is
FARTHEST = 14  # quarter turns from the puzzle that is hardest to solve
FEW = 500  # puzzles; of fewer than these none is held out
PATIENCE = 200  # candidates of one distance before another is tried
SQUARE = 40  # pixels
INK = {"W": "#f4f4f4", "R": "#c41e3a", "G": "#009e60", "Y": "#ffd500", "O": "#ff6a00", "B": "#0051ba"}
NET = ((None, 0, None, None), (4, 2, 1, 5), (None, 3, None, None))  # faces by number

Order = tuple[int, ...]


class Scrambles(NamedTuple):
    """Which levels there are: Scrambles(min_length=1, max_length=4, rotate=False)."""

    min_length: int
    max_length: int
    rotate: bool


class CubeLevel(NamedTuple):
    """A cube and whether its split is decided by hash: Level(cube="WWWW...", held_out=True)."""

    cube: str
    held_out: bool


class RubiksCube(TextEnv):
    """Turn the faces of a 2x2x2 cube until each has one colour.

    ## Action space
    `U`, `R`, `F`, `D`, `L`, `B` turn a face a quarter clockwise as seen from outside; `U'` and so on turn it back.

    ## Observation space
    Text: the four stickers of each face, in the order Up, Right, Front, Down, Left, Back.

    ## Rewards
    1 when each face has one colour, 0 before.

    ## Starting state
    A cube that needs `min_length` to `max_length` quarter turns, each distance with equal probability.

    ## Episode end
    Terminated when solved (success); no game is lost. Truncation is left to the protocol, after `max_turns`:
    `max_length` + 4.

    ## Arguments
    - `min_length=1`, `max_length=4`: quarter turns to the solution, proven; 1 to 14.
    - `rotate=False`: start in any of 24 positions; False: with the corner down left back in place.
    - `render_mode=None`: or "ansi", "rgb_array".
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    name = "rubiks_cube"
    harder, easier = "max_length: 6", "max_length: 1"
    actions = MOVES

    def __init__(self, min_length: int = 1, max_length: int = 4, rotate: bool = False, render_mode: str | None = None):
        if not 1 <= min_length <= max_length <= FARTHEST:
            raise ValueError(
                f"rubiks_cube needs 1 <= min_length <= max_length <= {FARTHEST}, not min_length={min_length},"
                f" max_length={max_length}."
            )
        self.max_turns = max_length + 4
        super().__init__(render_mode)
        self.config = Scrambles(min_length, max_length, rotate)

    @classmethod
    def draw(cls, config: Scrambles, rng: np.random.Generator) -> Iterator[CubeLevel]:
        """Yield any distance with equal chance, then any puzzle at that distance.

        A distance is given up for another after `PATIENCE` puzzles: the split has none of them.
        """
        shells = [puzzles_at(length) for length in range(config.min_length, config.max_length + 1)]
        held_out = sum(map(len, shells)) >= FEW
        while True:
            shell = shells[int(rng.integers(len(shells)))]
            for _ in range(PATIENCE):
                cube = cube_of(int(shell[int(rng.integers(len(shell)))]))
                if config.rotate:
                    positions = rotations()
                    cube = turned(cube, positions[int(rng.integers(len(positions)))])
                yield CubeLevel(cube, held_out)

    @classmethod
    def key_of(cls, level: CubeLevel) -> str:
        return str(number_of(level.cube))

    @classmethod
    def split_of(cls, level: CubeLevel) -> str | None:
        return split_by_hash(cls.key_of(level)) if level.held_out else None

    def begin(self, level: CubeLevel) -> None:
        self.level = level
        self.cube = level.cube

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, name = self.cube, self.canonical_action(action)
        if name is not None and not is_solved(before):
            self.cube = after(before, name)
        solved = is_solved(self.cube)
        info = {
            "success": solved,
            "action_is_valid": name is not None,
            "action_is_effective": self.cube != before,
            "failure": "",
        }
        return self.observe(), float(solved and self.cube != before), solved, False, info

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        if self.style == "plain":
            faces = [f"{face[0]}: {' '.join(self.cube[4 * i : 4 * i + 4])}" for i, face in enumerate(FACES)]
            return "\n".join(faces)
        return " ".join(f"{face[0]} {self.cube[4 * i : 4 * i + 4]}" for i, face in enumerate(FACES))

    def rules(self) -> str:
        if self.style == "plain":
            return (
                "Solve a Rubik's cube of 2x2x2 pieces: turn its faces until each face has one colour. You see the four"
                " stickers of each face: the upper row from left to right, then the lower row, as in an unfolded net"
                " with Up above Front, Down below it, and Left, Front, Right and Back side by side. The colours are W"
                " (white), R (red), G (green), Y (yellow), O (orange) and B (blue). The actions U, R, F, D, L and B"
                " turn the face Up, Right, Front, Down, Left or Back a quarter clockwise as seen from outside; the same"
                " letter with ' turns it counterclockwise, as in R'."
            )
        return (
            "Solve the 2x2x2 cube: turn faces until each face has one colour. Each face is its four stickers, upper row"
            " first, as in a net with Up above Front, Down below it, and Left Front Right Back side by side. Colours:"
            " W white, R red, G green, Y yellow, O orange, B blue. An action turns a face a quarter clockwise as seen"
            f" from outside; ' turns it back. Actions: {', '.join(MOVES)}."
        )

    def state_key(self) -> str:
        return self.cube

    # -- players ---------------------------------------------------------------------------------------------------

    def cues(self) -> dict[str, tuple[str, ...]]:
        """Return `pairs`: the moves after which the most neighbours on a face have the same colour."""
        counts = {move: pairs(after(self.cube, move)) for move in MOVES}
        most = max(counts.values())
        return {"pairs": tuple(move for move, count in counts.items() if count == most)}

    def thought(self) -> str:
        if self.style == "compact":
            return f"{pairs(self.cube)} of 24 pairs now. {super().thought()}"
        best = self.cues()["pairs"]
        return (
            f"{pairs(self.cube)} of the 24 pairs of neighbours on a face have the same colour. Most of them,"
            f" {pairs(after(self.cube, best[0]))}, would match after {listed(best, 'or')}."
        )

    def thought_of(self, action: str) -> str:
        return self.thought() if self.style == "compact" else f"{self.thought()} I turn {action}."

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "The right face needs a quarter turn back, and then every face has one colour.", ("R'", "U")

    def players(self) -> dict[str, str]:
        """`pairs` looks one move ahead for equal neighbours, and so turns in circles on most harder cubes."""
        return {"random": self.choose(), "pairs": self.choose(self.cues()["pairs"])}

    def expert(self) -> str:
        """Return the first move that comes nearer to solved; of a solved cube, any."""
        here = distance(self.cube)
        return next((move for move in MOVES if distance(after(self.cube, move)) < here), MOVES[0])

    def optimal_length(self) -> int:
        """Return quarter turns from here to solved."""
        return distance(self.cube)

    def optimal_success(self, horizon: int) -> float:
        return float(distance(self.cube) <= horizon)

    def render(self) -> Any:
        """Return the unfolded net, as text or as a picture."""
        if self.render_mode is None:
            return None
        if self.render_mode == "ansi":
            lines = []
            for faces, half in itertools.product(NET, (0, 2)):
                cells = ["  " if face is None else self.cube[4 * face + half : 4 * face + half + 2] for face in faces]
                lines.append(" ".join(cells).rstrip())
            return "\n".join(lines)
        from PIL import Image, ImageDraw

        frame = Image.new("RGB", (8 * SQUARE + 10, 6 * SQUARE + 10), "#ffffff")
        pen = ImageDraw.Draw(frame)
        for down, faces in enumerate(NET):
            for right, face in enumerate(faces):
                for i in range(4) if face is not None else ():
                    x, y = (2 * right + i % 2) * SQUARE + 5, (2 * down + i // 2) * SQUARE + 5
                    box = (x + 1, y + 1, x + SQUARE - 2, y + SQUARE - 2)
                    pen.rounded_rectangle(box, 5, fill=INK[self.cube[4 * (face or 0) + i]], outline="#222222", width=2)
        return np.asarray(frame)


# -- stickers ----------------------------------------------------------------------------------------------------------


@cache
def stickers() -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return where each of the 24 stickers is and where it faces, in the order of a cube's letters."""
    places = []
    for _, _, outward, down, right in FACES:
        for row, column in itertools.product((-1, 1), repeat=2):
            place = tuple(o + row * d + column * r for o, d, r in zip(outward, down, right, strict=True))
            places.append((place, outward))
    return tuple(places)


def _clockwise(vector: tuple[int, ...], axis: tuple[int, ...]) -> tuple[int, ...]:
    """Return a vector turned by a quarter clockwise, seen from the tip of the axis: v x a + (v . a) a."""
    along = sum(v * a for v, a in zip(vector, axis, strict=True))
    cross = [vector[i - 2] * axis[i - 1] - vector[i - 1] * axis[i - 2] for i in range(3)]
    return tuple(c + along * a for c, a in zip(cross, axis, strict=True))


def _turning(axis: tuple[int, ...], whole: bool) -> Order:
    """Return for each sticker of the turned cube which one moves there when a face, or the whole cube, is turned."""
    places = stickers()
    order = list(range(len(places)))
    for i, (place, outward) in enumerate(places):
        if whole or sum(p * a for p, a in zip(place, axis, strict=True)) > 0:
            order[places.index((_clockwise(place, axis), _clockwise(outward, axis)))] = i
    return tuple(order)


def turned(cube: str, order: Order) -> str:
    return "".join(itemgetter(*order)(cube))


@cache
def orders() -> dict[str, Order]:
    """Return what each move does to the stickers."""
    by_move = {}
    for name, _, axis, *_ in FACES:
        once = by_move[name[0]] = _turning(axis, whole=False)
        by_move[f"{name[0]}'"] = tuple(once.index(i) for i in range(len(once)))
    return by_move


@cache
def rotations() -> tuple[Order, ...]:
    """Return the 24 ways to hold a cube, as it is first."""
    turns = [_turning(FACES[i][2], whole=True) for i in (0, 1)]
    known_orders = [tuple(range(24))]
    for order in known_orders:  # grows while it is read
        known_orders += [new for turn in turns if (new := itemgetter(*turn)(order)) not in known_orders]
    return tuple(known_orders)


def after(cube: str, move: str) -> str:
    return turned(cube, orders()[move])


def is_solved(cube: str) -> bool:
    return all(len(set(cube[i : i + 4])) == 1 for i in range(0, 24, 4))


def pairs(cube: str) -> int:
    """Return how many of the 24 pairs of neighbours on a face have the same colour."""
    faces = [cube[i : i + 4] for i in range(0, 24, 4)]
    return sum((a == b) + (a == c) + (b == d) + (c == d) for a, b, c, d in faces)


# -- puzzles -----------------------------------------------------------------------------------------------------------
# With the corner down left back held in place a puzzle is an arrangement of seven corners (7! = 5,040) and their twists
# (3^6 = 729; those of six corners decide the seventh). Its number is arrangement * 729 + twists.


@cache
def corners() -> tuple[tuple[int, int, int], ...]:
    """Return the stickers of each corner, that on Up or Down first, then clockwise; the corner down left back last."""
    places = sorted({place for place, _ in stickers()}, key=lambda place: (place == (-1, -1, -1), place))
    stickers_of = []
    for place in places:
        first, *others = [i for i, (there, _) in enumerate(stickers()) if there == place]
        first, *others = sorted((first, *others), key=lambda i: stickers()[i][1][1] == 0)
        a, b, c = (stickers()[i][1] for i in (first, *others))
        cross = [a[i - 2] * b[i - 1] - a[i - 1] * b[i - 2] for i in range(3)]
        clockwise = sum(x * y for x, y in zip(cross, c, strict=True)) < 0
        stickers_of.append((first, *(others if clockwise else reversed(others))))
    return tuple(stickers_of)


@cache
def arrangements() -> tuple[list[Order], dict[Order, int]]:
    listed = list(itertools.permutations(range(7)))
    return listed, {order: i for i, order in enumerate(listed)}


@lru_cache(maxsize=1 << 16)
def upright(cube: str) -> str:
    """Return the cube held with the corner of its down, left and back colours in place."""
    last = corners()[-1]
    home = "".join(SOLVED[i] for i in last)
    (held,) = {turned(cube, order) for order in rotations() if "".join(cube[order[i]] for i in last) == home}
    return held


def _read(cube: str) -> tuple[Order, Order]:
    """Return which corner is at each of the seven places, and how it is twisted."""
    homes = {frozenset(SOLVED[i] for i in corner): number for number, corner in enumerate(corners()[:-1])}
    places, twists = [], []
    for corner in corners()[:-1]:
        colours = [cube[i] for i in corner]
        places.append(homes[frozenset(colours)])
        twists.append(next(i for i, colour in enumerate(colours) if colour in "WY"))
    return tuple(places), tuple(twists)


def number_of(cube: str) -> int:
    places, twists = _read(upright(cube))
    number = arrangements()[1][places]
    for twist in twists[:6]:
        number = 3 * number + twist
    return number


@lru_cache(maxsize=1 << 16)
def cube_of(number: int) -> str:
    """Return the inverse of `number_of`."""
    places = arrangements()[0][number // 729]
    twists = [number // 3 ** (5 - i) % 3 for i in range(6)]
    twists.append(-sum(twists) % 3)
    cube = list(SOLVED)
    for corner, home, twist in zip(corners(), places, twists, strict=False):
        for i in range(3):
            cube[corner[(i + twist) % 3]] = SOLVED[corners()[home][i]]
    return "".join(cube)


@cache
def distances() -> np.ndarray:
    """Return the exact distance of every puzzle from solved, shape (3674160,): breadth first over all of them."""
    listed, numbers = arrangements()
    digits = np.array(list(itertools.product(range(3), repeat=6)))
    twists = np.concatenate([digits, -digits.sum(1, keepdims=True) % 3], axis=1)
    tables = []
    for move in GENERATORS:
        comes_from, twisted = _read(after(SOLVED, move))
        places = np.array([numbers[itemgetter(*comes_from)(order)] for order in listed])
        turned_twists = (twists[:, list(comes_from)] + np.array(twisted)) % 3
        tables.append((places, turned_twists[:, :6] @ 3 ** np.arange(5, -1, -1)))
    table = np.full(len(listed) * 729, -1, np.int8)
    frontier = np.array([number_of(SOLVED)])
    table[frontier] = 0
    for length in itertools.count(1):
        for places, turns in tables:
            reached = places[frontier // 729] * 729 + turns[frontier % 729]
            table[reached[table[reached] < 0]] = length
        frontier = np.flatnonzero(table == length)
        if not len(frontier):
            return table
    raise AssertionError("the puzzles are finite")


@cache
def puzzles_at(length: int) -> np.ndarray:
    """Return the numbers of all puzzles of a distance."""
    return np.flatnonzero(distances() == length)


@lru_cache(maxsize=1 << 16)
def distance(cube: str) -> int:
    return int(distances()[number_of(cube)])
