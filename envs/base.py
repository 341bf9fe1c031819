"""What must a world be?  A gymnasium environment that speaks text, plus what an agent pipeline needs to know of it.

A world is one file in this folder with one subclass of `TextEnv`; the registry in `envs/__init__.py` finds it.
Nothing here imports torch or the training package.
"""

from __future__ import annotations

import difflib
import hashlib
import string
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import gymnasium
import numpy as np

SPLITS = ("train", "validation", "test")
DRAWS = 2_000  # candidates looked at before a level is declared not to be found
OBSERVATIONS = ("grid", "coordinates", "both", "neighbours")


def split_of(level_key: str) -> str:
    """Which split a level belongs to, decided by the level itself: 80 % train, 10 % validation, 10 % test.

    A level can therefore never be in two splits, whatever seeds produced it.
    """
    bucket = int.from_bytes(hashlib.sha256(level_key.encode()).digest()[:4], "big") % 10
    return SPLITS[max(0, bucket - 7)]


def known(what: str, name: str, choices: Iterable[str]) -> str:
    """`name` if it is one of `choices`; otherwise a ValueError that names the choices and guesses what was meant."""
    choices = list(choices)
    if name in choices:
        return name
    close = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    raise ValueError(f'There is no {what} "{name}".{guess} Known: {", ".join(choices)}.')


def canonical(rows: Sequence[str]) -> str:
    """One text for a grid, its rotations and mirror images: no test level is a training level turned round."""
    turned, images = list(rows), []
    for _ in range(4):
        images += ["\n".join(turned), "\n".join(row[::-1] for row in turned)]
        turned = ["".join(column) for column in zip(*turned[::-1], strict=True)]
    return min(images)


class NoLevel(ValueError):
    """These options leave a split without levels."""


@lru_cache(maxsize=1 << 16)
def draw_level(world: type[TextEnv], config: Hashable, seed: int, split: str) -> Any:
    """The level at one address: candidate after candidate, until one is in `split`.

    Pure (no draw depends on an earlier one), hence cached: the members of a group get their level for one price.
    """
    for level in islice(world.draw(config, np.random.default_rng([seed, 0])), DRAWS):
        if level is not None and split_of(world.key_of(level)) == split:
            return level
    raise NoLevel(f'{world.name}: no level for the split "{split}" in {DRAWS:,} draws with the options {config}.')


class TextEnv(gymnasium.Env[str, str]):
    """A world whose observation and action are text.

    `reset(seed=s, options={"split": "train"})` is pure: the same seed and split give the same level in any process.
    `options["noise_seed"]` addresses the chance inside the episode (slips, random players) apart from the level; it
    is the seed itself unless given, so the members of a group can share a level without sharing their luck.
    `info` of `reset` and `step` carries `success`, `action_is_valid`, `action_is_effective` (bool) and `failure`
    (a short word such as "hole", empty while nothing is lost).
    `step` takes ONE action as text; an unknown action changes nothing, costs a step and is reported as invalid.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 2}
    name: ClassVar[str]
    actions: ClassVar[tuple[str, ...]]

    observation_space: gymnasium.spaces.Text
    action_space: gymnasium.spaces.Text
    render_mode: str | None
    config: Hashable  # all that decides which levels there are
    noise: np.random.Generator  # chance inside the episode
    dice: np.random.Generator  # the weak players' choices, apart from `noise`: watching them changes nothing

    def __init__(self, render_mode: str | None, config: Hashable, symbols: Iterable[str] = (), length: int = 2048):
        if render_mode is not None:
            known("render mode", render_mode, self.metadata["render_modes"])
        self.render_mode = render_mode
        self.config = config
        charset = frozenset(string.printable).union(*symbols)
        self.observation_space = gymnasium.spaces.Text(length, min_length=1, charset=charset)
        self.action_space = gymnasium.spaces.Text(64, min_length=1, charset=charset)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        for key in options:
            known("reset option", key, ("split", "noise_seed"))
        if seed is None:
            seed = int(self.np_random.integers(1 << 62))
        noise_seed = options.get("noise_seed", seed)
        self.noise = np.random.default_rng([noise_seed, 1])
        self.dice = np.random.default_rng([noise_seed, 2])
        split = known("split", options.get("split", "train"), SPLITS)
        self.begin(draw_level(type(self), self.config, seed, split))
        return self.observe(), {"success": False, "action_is_valid": True, "action_is_effective": False, "failure": ""}

    def canonical_action(self, action: str) -> str | None:
        """The action's own spelling, whatever the case; None for an unknown one."""
        return {known_action.lower(): known_action for known_action in self.actions}.get(action.strip().lower())

    @classmethod
    @abstractmethod
    def draw(cls, config: Any, rng: np.random.Generator) -> Iterator[Any]:
        """Candidate levels (hashable) without end; None for a try that gave none.

        A split takes the first that is its own. So that no split has harder levels than another, candidates must not
        come in clusters (all starts of one room, say): the smallest split would choose among them, the largest not.
        """

    @classmethod
    @abstractmethod
    def key_of(cls, level: Any) -> str:
        """Equal for two levels exactly when they are the same puzzle; decides the split."""

    @abstractmethod
    def begin(self, level: Any) -> None:
        """Puts the world into the level's first state."""

    @abstractmethod
    def observe(self) -> str:
        """The current state as text."""

    @abstractmethod
    def rules(self) -> str:
        """The task, the legend of the symbols in use and the actions, for the system message."""

    @abstractmethod
    def state_key(self) -> str:
        """Equal for two states exactly when the same actions lead to the same futures (GiGPO's anchor states)."""

    @abstractmethod
    def level_key(self) -> str:
        """`key_of` the current level."""

    @abstractmethod
    def expert(self) -> str:
        """The best next action from the current state."""

    @abstractmethod
    def optimal_success(self, horizon: int) -> float:
        """The chance with which the best player succeeds from here within `horizon` actions."""

    @abstractmethod
    def players(self) -> dict[str, str]:
        """Each weak player's next action from the current state, by player name; `random` is always one of them.

        No single weak player is good at the world: what they show is the format and the rules, not the skill.
        """

    @abstractmethod
    def cues(self) -> dict[str, tuple[str, ...]]:
        """What matters in the current state: named sets of actions, e.g. {"goal": ("Down",), "safe": ("Left",)}."""

    def thought(self) -> str:
        """The cues as a demonstrator would think them: `goal Down safe Left Down`."""
        return " ".join(f"{cue} {' '.join(actions) or 'none'}" for cue, actions in self.cues().items())

    @abstractmethod
    def render(self) -> np.ndarray:
        """An RGB frame, uint8, shape (height, width, 3)."""

    def _any_of(self, actions: Sequence[str]) -> str:
        """One of these actions by the players' dice; of all actions where there are none."""
        choices = actions or self.actions
        return choices[int(self.dice.integers(len(choices)))]


def with_symbols(defaults: Mapping[str, str], custom: Mapping[str, str] | None) -> dict[str, str]:
    """The default symbols with the user's in their place; each must be a single word that no other cell uses."""
    symbols = dict(defaults)
    for cell, symbol in (custom or {}).items():
        symbols[known("cell to give a symbol", cell, defaults)] = symbol
    for cell, symbol in symbols.items():
        if not symbol or any(c.isspace() or c in "<>" for c in symbol):
            raise ValueError(f'The symbol of "{cell}" is {symbol!r}: use one word without spaces or angle brackets.')
    if len(set(symbols.values())) < len(symbols):
        raise ValueError(f"Two cells share a symbol: {symbols}. Give each its own.")
    return symbols
