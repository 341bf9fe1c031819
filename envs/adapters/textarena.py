"""How is a game of TextArena for one player played here?  `make("textarena", game="FrozenLake-v0-random")`.

TextArena draws from Python's and NumPy's global generators. Here every call has a generator of its own in their place,
and afterwards they are as they were.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import random
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from envs.adapters.base import SeededEnv, SeededLevel, package, plain_numbers

TURNS = 30  # of a game that has no limit
GLOBALS = threading.RLock()  # its holder alone uses the global generators
Chance = tuple[Any, Any]  # the states of both


class TextArena(SeededEnv):
    """A single-player game of TextArena.

    ## Action space
    Free text, or one of `actions`.

    ## Observation space
    Text: what the game shows after a move.

    ## Rewards
    The game's, at its end.

    ## Starting state
    The game after a reset with a seed; its prompt is the rules.

    ## Episode end
    Terminated when the game ends: a success with a reward of 1 or more. A move that the game refuses is undone, so it
    costs the penalty for invalid actions and never ends the game. Truncation is left to the protocol, after the turns
    of the game.

    ## Arguments
    - `game`: its id, e.g. Wordle-v0.
    - `actions=None`: all actions, where they are a list.
    - `held_out=True`: False where the game has too few levels to keep some for evaluation.
    - `render_mode=None`: or "ansi".
    """

    name = "textarena"
    actions = None
    deterministic = False
    observable = False  # many games keep a secret
    game: Any

    def __init__(
        self,
        game: str = "",
        actions: Sequence[str] | None = None,
        held_out: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.actions = tuple(actions) if actions else None
        super().__init__(render_mode)
        self.config = (game, held_out)
        self.max_turns = probe(game).state.max_turns or TURNS

    @classmethod
    def level_of(cls, config: tuple[str, bool], seed: int) -> SeededLevel:
        with GLOBALS:
            game = probe(config[0])
            start_game(game, seed)
            return SeededLevel(seed, game_fingerprint(game, new_messages(game)), config[1])

    def begin(self, level: SeededLevel) -> None:
        self.level = level
        self.game = build_game(self.config[0])
        start_game(self.game, level.seed)
        self.prompt, self.text = split_messages(new_messages(self.game))
        self.chance = seeded(int(self.noise.integers(1 << 32)))
        self.reward, self.over = 0.0, False

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        valid = effective = False
        reward, before = 0.0, (self.state_key(), copy.deepcopy(self.game), self.chance)
        if not self.over:
            with own_chance(self.chance) as after, contextlib.suppress(Exception):  # hostile text breaks some games
                self.over, _ = self.game.step(action=action)
                valid = not (self.game.state.error_count or self.game.state.game_info[0]["invalid_move"])
            if valid:
                self.chance = after[0]
                self.text = split_messages(new_messages(self.game))[1] or self.text
                self.reward = reward = float((self.game.state.rewards or {}).get(0, 0.0)) if self.over else 0.0
                effective = self.state_key() != before[0]
            else:
                self.over, self.game = False, before[1]
        success = self.over and self.reward >= 1
        info = {
            "success": success,
            "action_is_valid": valid,
            "action_is_effective": effective,
            "failure": "lost" if self.over and not success else "",
        }
        return self.text, reward, self.over, False, info

    def observe(self) -> str:
        return self.text

    def rules(self) -> str:
        return self.prompt if hasattr(self, "prompt") else f"The game {self.config[0]} of TextArena."

    def state_key(self) -> str:
        """Return what the game remembers and showed last. The random state of a game of chance is not in it."""
        return game_fingerprint(self.game, [("", self.text)])


def build_game(game: str) -> Any:
    """Return a game without TextArena's wrappers; ValueError where it does not exist, or cannot be made here."""
    if not game:
        raise ValueError("textarena needs the option game, for example game=FrozenLake-v0-random.")
    arena = package("textarena", "textarena==0.7.4")
    raw = game if game.endswith("-raw") else f"{game}-raw"
    try:
        with own_chance(seeded(0)):  # some constructors draw
            return arena.make(raw)
    except Exception as error:  # unknown ids, and games that load word lists from the network
        problem = next((line.strip() for line in str(error).splitlines() if line.strip(" *")), "")
        raise ValueError(f'TextArena cannot make the game "{game}": {type(error).__name__}: {problem}') from None


@lru_cache
def probe(game: str) -> Any:
    """Return one instance of a game that draws the levels; ValueError where one player cannot play it."""
    made = build_game(game)
    try:
        start_game(made, 0)
    except Exception as error:
        raise ValueError(f'"{game}" is not a game for one player: {type(error).__name__}: {error}') from None
    return made


def start_game(game: Any, seed: int) -> None:
    """Return the game in the first state of a seed."""
    with own_chance(seeded(seed)):
        game.reset(num_players=1, seed=seed)
    if type(game.state).__name__ != "SinglePlayerState":
        raise ValueError("it is for several")


def new_messages(game: Any) -> list[tuple[str, str]]:
    """Return the game's new messages since the last call, kind and text, without those of the player."""
    messages = game.get_observation()[1]
    return [(kind.name, text) for _, text, kind in messages if kind.name != "PLAYER_ACTION"]


def split_messages(messages: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the prompt, and all else: what a model reads once, and what it reads in this turn."""
    prompt = "\n".join(text.strip() for kind, text in messages if kind == "PROMPT")
    return prompt, "\n".join(text.strip() for kind, text in messages if kind != "PROMPT") or "The game begins."


def game_fingerprint(game: Any, messages: Sequence[tuple[str, str]]) -> str:
    """Return a name for a state by what the game remembers and says."""
    return hashlib.sha256(repr((plain_numbers(game.state.game_state), plain_numbers(messages))).encode()).hexdigest()[
        :24
    ]


def seeded(seed: int) -> Chance:
    """Return the state of both generators after seeding."""
    return random.Random(seed).getstate(), np.random.RandomState(seed % (1 << 32)).get_state()


@contextlib.contextmanager
def own_chance(chance: Chance) -> Iterator[list[Chance]]:
    """Set Python's and NumPy's global generators to a state, and restore them at the end.

    The list gets their last state. What a game prints meanwhile is not shown.
    """
    after: list[Chance] = []
    with GLOBALS, contextlib.redirect_stdout(io.StringIO()):
        outside = random.getstate(), np.random.get_state()
        try:
            random.setstate(chance[0])
            np.random.set_state(chance[1])
            yield after
        finally:
            after.append((random.getstate(), np.random.get_state()))
            random.setstate(outside[0])
            np.random.set_state(outside[1])
