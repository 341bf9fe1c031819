"""Can the model cross the ice?  gymnasium's FrozenLake on random maps, as text.

A level is a map of S (start), G (goal), H (hole) and F (frozen) in which a path leads from S to G.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium.envs.toy_text import frozen_lake

from envs.base import OBSERVATIONS, TextEnv, canonical, known, steps_in_words, with_symbols
from envs.sentences import DIRECTIONS, PLACES, at_in_words, listed, upper_first, way_in_words

SYMBOLS = {"player": "P", "ice": "_", "hole": "O", "goal": "G", "dead": "X", "arrived": "*", "edge": "#"}
MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}  # gymnasium's order: 0, 1, 2, 3
FROZEN = {"uniform": 0.8, "ragen": 0.9}  # share of ice by `distribution`
SUCCESS_RATE = 0.8  # on slippery ice
LARGEST = 64  # cells a side: the expert's tables grow with the fourth power
DISCOUNT = 0.99  # without a deadline, the expert prefers the shorter of two equally safe paths


class Lake(NamedTuple):
    """The parameters that determine the levels: Lake(size=4, frozen=0.8, corners=False)."""

    size: int
    frozen: float
    corners: bool


class FrozenLake(TextEnv):
    """Walk over a frozen lake to the goal without stepping into a hole: gymnasium's FrozenLake in text, on random maps.

    ## Action space
    `Left`, `Down`, `Right` or `Up`. A move against the edge is valid and changes nothing.

    ## Observation space
    Text. With `observation="neighbours"` the steps to the goal in each direction and the four cells beside the player;
    with `coordinates` the positions of player, goal and holes; with `grid` the map; with `both` the last two.

    ## Rewards
    1 at the goal, 0 elsewhere.

    ## Starting state
    Each cell is ice with probability `frozen`; start and goal are two random cells with a path between them.

    ## Episode end
    Terminated at the goal (success) or in a hole (`failure` "hole"). Truncation is left to the protocol, after
    `max_turns`: half the number of cells, at least 8 turns, or 25 with `distribution="ragen"`.

    ## Arguments
    - `size=4`: cells per side, 2 to 64.
    - `frozen=None`: probability of ice, above 0 and at most 1; None is 0.8, or 0.9 with `distribution="ragen"`.
    - `distribution="uniform"`: or "ragen", with the ice and the turns of RAGEN's maps.
    - `corners=False`: start at the top left and goal at the bottom right instead of anywhere.
    - `slippery=False`: a move goes as intended with probability `success_rate`, else it slips to one of the two sides.
    - `success_rate=None`: 0.8 when None; only on slippery ice.
    - `observation="grid"`: or "coordinates", "both", "neighbours".
    - `symbols=None`: what stands for each kind of cell, by its name in `SYMBOLS`.
    - `separator=" "`: between the cells of a grid.
    - `render_mode=None`: or "ansi", "rgb_array".
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    name = "frozen_lake"
    harder, easier = "size: 6, slippery: true, distribution: ragen", "size: 3, observation: neighbours"
    actions = tuple(MOVES)

    def __init__(
        self,
        size: int = 4,
        frozen: float | None = None,
        distribution: str = "uniform",
        corners: bool = False,
        slippery: bool = False,
        success_rate: float | None = None,
        observation: str = "grid",
        symbols: Mapping[str, str] | None = None,
        separator: str = " ",
        render_mode: str | None = None,
    ):
        share = FROZEN[known("distribution", distribution, FROZEN)]
        frozen = share if frozen is None else frozen
        if success_rate is not None and not slippery:
            raise ValueError("frozen_lake has a success_rate on slippery ice only: leave it out, or set slippery=true.")
        success_rate = SUCCESS_RATE if success_rate is None else success_rate
        if not 2 <= size <= LARGEST or not 0 < frozen <= 1 or not 0 <= success_rate <= 1:
            raise ValueError(
                f"frozen_lake needs size from 2 to {LARGEST}, 0 < frozen <= 1 and 0 <= success_rate <= 1, not"
                f" size={size}, frozen={frozen}, success_rate={success_rate}."
            )
        self.side = size
        self.observation = known("observation", observation, OBSERVATIONS)
        self.symbols = with_symbols(SYMBOLS, symbols)
        self.separator = separator
        self.chance = float(success_rate) if slippery else 1.0
        self.max_turns = max(25 if distribution == "ragen" else 8, size**2 // 2)  # the shortest path is rarely longer
        self.deterministic = self.chance == 1
        self.observable = observation != "neighbours"
        super().__init__(render_mode)
        self.config = Lake(size, frozen, corners)

    @classmethod
    def draw(cls, config: Lake, rng: np.random.Generator) -> Iterator[tuple[str, ...] | None]:
        while True:
            cells = np.where(rng.random(config.size**2) < config.frozen, "F", "H")
            start, goal = (0, -1) if config.corners else rng.choice(config.size**2, 2, replace=False)
            cells[start], cells[goal] = "S", "G"
            text = "".join(cells)
            rows = tuple(text[i : i + config.size] for i in range(0, len(text), config.size))
            yield rows if steps_to_goal(rows)[int(start)] >= 0 else None

    @classmethod
    def key_of(cls, level: tuple[str, ...]) -> str:
        return canonical(level)

    def begin(self, level: tuple[str, ...]) -> None:
        self.level = level
        self.cells = "".join(level)
        self.goal = self.cells.index("G")
        self.position = self.cells.index("S")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, name = self.position, self.canonical_action(action)
        reward, terminated = 0.0, self.cells[before] in "GH"
        if name is not None:
            outcomes = transitions(self.level, self.chance)[before][list(MOVES).index(name)]
            drawn = 0 if len(outcomes) == 1 else self.noise.choice(len(outcomes), p=[o[0] for o in outcomes])
            _, state, gain, ended = outcomes[drawn]
            self.position, reward, terminated = int(state), float(gain), bool(ended)
        info = {
            "success": self.position == self.goal,
            "action_is_valid": name is not None,
            "action_is_effective": self.position != before,
            "failure": "hole" if self.cells[self.position] == "H" else "",
        }
        return self.observe(), reward, terminated, False, info

    # -- text ------------------------------------------------------------------------------------------------------

    def _symbol(self, cell: int | None) -> str:
        return self.symbols["edge" if cell is None else {"H": "hole", "G": "goal"}.get(self.cells[cell], "ice")]

    def _neighbour(self, direction: str) -> int | None:
        row, column = divmod(self.position, self.side)
        row, column = row + MOVES[direction][0], column + MOVES[direction][1]
        return row * self.side + column if 0 <= row < self.side and 0 <= column < self.side else None

    def _way(self) -> tuple[int, int]:
        here, there = divmod(self.position, self.side), divmod(self.goal, self.side)
        return there[0] - here[0], there[1] - here[1]

    def _at(self, cell: int) -> str:
        at = divmod(cell, self.side)
        return at_in_words(*at) if self.style == "plain" else f"{at[0]} {at[1]}"

    def observe(self) -> str:
        holes = [self._at(i) for i, cell in enumerate(self.cells) if cell == "H"]
        if self.observation == "grid":
            return self._grid(self.separator)
        if self.style == "plain":
            if self.observation == "neighbours":
                ways = listed([f"{direction} {self._lead(direction)}" for direction in MOVES])
                return f"{self._goal_in_words('You are at the goal.')} Going {ways}."
            there = f"There are holes at {listed(holes)}." if holes else "There are no holes."
            text = f"You are at {self._at(self.position)}. The goal is at {self._at(self.goal)}. {there}"
            return text if self.observation == "coordinates" else f"{text}\n{self._grid(self.separator)}"
        if self.observation == "neighbours":
            beside = [f"{direction} {self._symbol(self._neighbour(direction))}" for direction in MOVES]
            return " ".join([f"Goal {steps_in_words(self._way(), MOVES)}", *beside])
        positions = f"You {self._at(self.position)} Goal {self._at(self.goal)}"
        coordinates = f"{positions} Holes {' ; '.join(holes) or 'none'}"
        return coordinates if self.observation == "coordinates" else f"{coordinates}\n{self._grid(self.separator)}"

    def _lead(self, direction: str) -> str:
        """Return where a move leads, in words."""
        cell = self._neighbour(direction)
        kinds = {"H": "into a hole", "G": "to the goal"}
        return "against the edge" if cell is None else f"leads {kinds.get(self.cells[cell], 'onto ice')}"

    def _goal_in_words(self, here: str) -> str:
        way = way_in_words(self._way())
        return f"The goal is {way} from you." if way else here

    def _grid(self, separator: str) -> str:
        symbols = [self._symbol(i) for i in range(len(self.cells))]
        symbols[self.position] = self.symbols[{"H": "dead", "G": "arrived"}.get(self.cells[self.position], "player")]
        return "\n".join(separator.join(symbols[i : i + self.side]) for i in range(0, len(symbols), self.side))

    def rules(self) -> str:
        s = self.symbols
        if self.style == "plain":
            return self._plain_rules()
        parts = ["Walk over the frozen lake to the goal. A hole ends the game."]
        if self.observation == "neighbours":
            parts.append(f"Goal: steps from you on {self.side} x {self.side} cells.")
        elif self.observation != "grid":
            parts.append(f"Positions are row column, 0 0 the top left of {self.side} x {self.side} cells.")
        if self.observation == "neighbours":
            parts.append(f"Cells beside you: {s['ice']} ice, {s['hole']} hole, {s['goal']} goal, {s['edge']} edge.")
        elif self.observation != "coordinates":
            parts.append(
                f"Cells: {s['player']} you, {s['ice']} ice, {s['hole']} hole, {s['goal']} goal, "
                f"{s['dead']} you in a hole, {s['arrived']} you at the goal."
            )
        if self.chance < 1:
            parts.append(f"You slip: a move goes as meant with chance {self.chance:g}, else to one side of it.")
        parts.append(f"Actions: {', '.join(MOVES)}.")
        return " ".join(parts)

    def _plain_rules(self) -> str:
        s, parts = self.symbols, ["You walk over a frozen lake. Reach the goal without falling into a hole."]
        if self.observation == "neighbours":
            parts.append("In each turn you learn where the goal is and where each move leads.")
        elif self.observation != "grid":
            side = self.side
            parts.append(
                f"The lake has {side} rows and {side} columns. Rows are counted from the top and columns from the left,"
                " beginning with 0."
            )
        if self.observation in ("grid", "both"):
            legend = [
                f"{s['player']} is you",
                f"{s['ice']} is ice",
                f"{s['hole']} is a hole",
                f"{s['goal']} is the goal",
            ]
            parts.append(f"On the map, {listed(legend)}.")
        parts.append("A fall into a hole ends the game.")
        if self.chance < 1:
            parts.append(
                f"The ice is slippery: you move as you choose with a chance of {self.chance:g}, and else to one side."
            )
        parts.append(f"The actions are {listed(list(MOVES))}; each moves you by one cell.")
        return " ".join(parts)

    def state_key(self) -> str:
        return f"{self.cells.replace('S', 'F')} {self.position}"  # the start does not affect what happens next

    # -- players ---------------------------------------------------------------------------------------------------

    def _nearer(self) -> tuple[str, ...]:
        way = self._way()
        return tuple(d for d, (down, right) in MOVES.items() if down * way[0] + right * way[1] > 0)

    def cues(self) -> dict[str, tuple[str, ...]]:
        """`safe`: moves onto a cell that is not a hole. `goal`: those of them that come nearer.

        If the neighbouring cells are shown, a thought first lists the safe moves, then those that also come nearer.
        """
        cells = {d: self._neighbour(d) for d in MOVES}
        safe = tuple(d for d, cell in cells.items() if cell is not None and self.cells[cell] != "H")
        goal = tuple(d for d in self._nearer() if d in safe)
        return {"safe": safe, "goal": goal} if self.observation == "neighbours" else {"goal": goal, "safe": safe}

    def thought(self) -> str:
        if self.style == "compact":
            return super().thought()
        holes = [d for d in MOVES if self._lead(d) == "leads into a hole"]
        where = listed([f"{PLACES[direction]} me" for direction in holes])
        there = f" There {'is a hole' if len(holes) == 1 else 'are holes'} {where}." if holes else ""
        return f"{self._goal_in_words('I am at the goal.').replace(' from you', '')}{there}"

    def thought_of(self, action: str) -> str:
        """Return where the goal is, which holes are near, and what follows for the action."""
        if self.style == "compact" or action not in MOVES:
            return self.thought()
        go, cues = f"I go {action.lower()}", self.cues()
        if action in cues["goal"]:
            choice = f"{upper_first(DIRECTIONS[action])} is closer{' and safe' * (self.chance == 1)}, so {go}."
        elif action in cues["safe"] and not cues["goal"]:
            choice = f"No step towards the goal is safe, so {go} first."
        else:
            choice = f"{go}."
        return f"{self.thought()} {choice}"

    def example(self) -> tuple[str, tuple[str, ...]]:
        action = self.by_level(("Down", "Left", "Right", "Up"))
        there, then = ("to the right", "Right") if action in ("Up", "Down") else ("above me", "Up")
        beside = "to the right of me" if then == "Right" else "above me"
        thought = f"The goal is 2 steps {there}. There is a hole {beside}, so I go {action.lower()} first."
        return thought, (action, then)

    def players(self) -> dict[str, str]:
        """`nearer` ignores holes; `safe` ignores the goal."""
        safe = self.cues()["safe"]
        return {"random": self.choose(), "nearer": self.choose(self._nearer()), "safe": self.choose(safe)}

    def expert(self, horizon: int | None = None) -> str:
        """Return the action with the best chance to arrive within `horizon` moves.

        Without a horizon it is the fastest of the safest.
        """
        _, odds = lake_model(self.level, self.chance)
        if horizon is None:
            values = values_without_deadline(self.level, self.chance)
        else:
            values = values_within(self.level, self.chance, horizon - 1)
        return list(MOVES)[int(np.argmax(np.round(odds[:, self.position] @ values, 12)))]

    def optimal_success(self, horizon: int) -> float:
        """Return the chance of the best player to arrive from here within `horizon` moves (finite value iteration)."""
        return float(values_within(self.level, self.chance, horizon)[self.position])

    def optimal_length(self) -> int:
        """Return moves from here to the goal without a hole if nothing slips; -1 when no way exists."""
        return steps_to_goal(self.level)[self.position]

    def render(self) -> Any:
        """Return gymnasium's picture with `render_mode="rgb_array"`, and the grid with "ansi"."""
        if self.render_mode != "rgb_array":
            return self._grid(" ") if self.render_mode == "ansi" else None
        from PIL import Image

        size = 64
        frame = Image.new("RGB", (self.side * size, self.side * size))
        for i, cell in enumerate(self.cells):
            x, y = i % self.side * size, i // self.side * size
            frame.paste(tile_picture("tile_hole" if cell == "H" else "tile_ice", (size, size)), (x, y))
            for image, there, box in (("goal_flag", i == self.goal, (32, 42)), ("agent", i == self.position, (48, 44))):
                if there:
                    overlay = tile_picture(image, box)
                    frame.paste(overlay, (x + (size - box[0]) // 2, y + (size - box[1]) // 2), overlay)
        return np.asarray(frame)


@lru_cache(maxsize=4096)
def transitions(level: tuple[str, ...], chance: float) -> dict[int, dict[int, list[tuple[float, int, float, bool]]]]:
    """Return gymnasium's own table: state -> action -> [(probability, next state, reward, ended)]."""
    return frozen_lake.FrozenLakeEnv(desc=list(level), is_slippery=chance < 1, success_rate=chance).P


@lru_cache(maxsize=4096)
def lake_model(level: tuple[str, ...], chance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the table as arrays: success when time is up, (states,), and odds, (actions, states, next states)."""
    cells = "".join(level)
    odds = np.zeros((len(MOVES), len(cells), len(cells)))
    for state, by_action in transitions(level, chance).items():
        for action, outcomes in by_action.items():
            for probability, following, _, _ in outcomes:
                odds[action, state, following] += probability
    return np.array([float(cell == "G") for cell in cells]), odds


@lru_cache(maxsize=1 << 16)
def values_within(level: tuple[str, ...], chance: float, horizon: int) -> np.ndarray:
    """Return V_h(s) = max_a sum_s' P(s'|s,a) V_{h-1}(s'), V_0 = [s is the goal]; goal and holes are absorbing."""
    value, odds = lake_model(level, chance)
    for _ in range(horizon):
        value = (odds @ value).max(0)
    return value


@lru_cache(maxsize=4096)
def values_without_deadline(level: tuple[str, ...], chance: float) -> np.ndarray:
    """Return the values of discounted value iteration at convergence, with 1 at the goal."""
    value, odds = lake_model(level, chance)
    goal = value == 1
    while True:
        update = np.where(goal, 1.0, DISCOUNT * (odds @ value).max(0))
        if np.abs(update - value).max() < 1e-10:
            return update
        value = update


@lru_cache(maxsize=4096)
def steps_to_goal(level: tuple[str, ...]) -> list[int]:
    """Return for each cell the moves to the goal around the holes, -1 without a way (breadth first, from the goal)."""
    size, cells = len(level), "".join(level)
    steps = [-1] * len(cells)
    queue = deque([cells.index("G")])
    steps[queue[0]] = 0
    while queue:
        cell = queue.popleft()
        for down, right in MOVES.values():
            row, column = cell // size + down, cell % size + right
            there = row * size + column
            if 0 <= row < size and 0 <= column < size and cells[there] != "H" and steps[there] < 0:
                steps[there] = steps[cell] + 1
                queue.append(there)
    return steps


@lru_cache(maxsize=64)
def tile_picture(name: str, size: tuple[int, int]) -> Any:
    """Return one of gymnasium's own pictures (read here, since its renderer needs pygame)."""
    from PIL import Image

    with Image.open(Path(frozen_lake.__file__).parent / "img" / f"{name}.png") as image:
        return image.convert("RGBA").resize(size)
