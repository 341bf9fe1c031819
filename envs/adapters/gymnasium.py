"""How does a Gymnasium environment with numbered actions become a `TextEnv`?  By names for its actions, and a text.

class Taxi(GymnasiumText):
    name, env_id = "taxi", "Taxi-v4"
    actions = ("South", "North", "East", "West", "Pickup", "Dropoff")  # in the order of their numbers

    def describe(self, state: Any) -> str: ...

    def rules(self) -> str: ...
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium

from envs.adapters.base import Lender, SeededEnv, SeededLevel, plain_numbers

DRAWING = threading.Lock()  # one environment draws all levels


class GymnasiumText(SeededEnv):
    """A Gymnasium environment of discrete actions: `actions` in the order of their numbers, `describe`, `rules`.

    An `__init__` with options sets `self.config` to the arguments of gymnasium.make, as pairs: (("is_rainy", True),).
    The level is what the seed's first observation shows; chance after that follows `noise_seed`. A time limit of the
    environment truncates.
    """

    env_id: ClassVar[str]
    held_out: ClassVar[bool] = True  # False where there are too few first states to keep some for evaluation
    deterministic = False  # nothing is known about it
    inner: gymnasium.Env[Any, Any]

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.config = ()

    @abstractmethod
    def describe(self, state: Any) -> str:
        """Return an observation of the Gymnasium environment as text."""

    def won(self, reward: float) -> bool:
        """Return whether an episode that has just terminated with this reward was a success."""
        return reward > 0

    @classmethod
    def level_of(cls, config: Any, seed: int) -> SeededLevel:
        with DRAWING:
            return SeededLevel(seed, repr(plain_numbers(drawing(cls, config).reset(seed=seed)[0])), cls.held_out)

    def begin(self, level: SeededLevel) -> None:
        if not hasattr(self, "inner"):
            self.inner = GAMES.lend(self, type(self), self.config)
        self.level = level
        self.state, _ = self.inner.reset(seed=level.seed)
        self.inner.unwrapped.np_random = self.noise  # the members of a group share the level, not the noise
        self.over = False
        self.last = (False, False, False)  # terminated, truncated, success

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        name, before, reward = self.canonical_action(action), self.observe(), 0.0
        valid = name is not None and not self.over
        if valid and name is not None and self.actions is not None:
            number = self.actions.index(name) + int(getattr(self.inner.action_space, "start", 0))
            self.state, gain, terminated, truncated, _ = self.inner.step(number)
            reward, terminated, truncated = float(gain), bool(terminated), bool(truncated)
            self.over = terminated or truncated
            self.last = (terminated, truncated and not terminated, terminated and self.won(reward))
        terminated, truncated, success = self.last
        info = {
            "success": success,
            "action_is_valid": valid,
            "action_is_effective": self.observe() != before,
            "failure": "lost" if terminated and not success else "",
        }
        return self.observe(), reward, terminated, truncated, info

    def observe(self) -> str:
        return self.describe(self.state)


def build_env(kind: type[GymnasiumText], config: tuple[tuple[str, Any], ...]) -> gymnasium.Env[Any, Any]:
    """Return the environment itself; ValueError where the names do not fit its actions."""
    made = gymnasium.make(kind.env_id, **dict(config))
    count = getattr(made.action_space, "n", None)
    if not isinstance(made.action_space, gymnasium.spaces.Discrete) or count != len(kind.actions or ()):
        raise ValueError(
            f"{kind.__name__} names {len(kind.actions or ())} actions, but {kind.env_id} has {made.action_space}:"
            " name every action of a Discrete space, in the order of the numbers."
        )
    return made


drawing = lru_cache(build_env)
GAMES = Lender(build_env)  # some take milliseconds to make, and a group plays many
