"""What do adapters share?  Levels that are seeds of another generator, and things that are expensive to make."""

from __future__ import annotations

import importlib
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from envs.base import TextEnv

SEEDS = 1 << 31  # every generator takes so many
TASKS = 1000  # levels of each split that a server lists
SESSIONS = 1024  # that a server plays side by side


def package(module: str, install: str) -> Any:
    """Return the module of an optional package; a ValueError says how to install what is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported ({error}). Install it: pip install {install}") from None


def plain_numbers(value: Any) -> Any:
    """Return the same with Python's own numbers and lists for NumPy's: a state whose repr is the same everywhere."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain_numbers(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(plain_numbers, value)))
    if isinstance(value, dict):
        return sorted((repr(plain_numbers(key)), plain_numbers(each)) for key, each in value.items())
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


class SeededLevel(NamedTuple):
    """A seed, and the starting state that it gives: Level(seed=7, key="252", held_out=True)."""

    seed: int
    key: str
    held_out: bool  # False where there are too few starting states to keep some for evaluation


class SeededEnv(TextEnv):
    """An environment whose levels are the seeds of another one; two with the same starting state are one puzzle."""

    @classmethod
    @abstractmethod
    def level_of(cls, config: Any, seed: int) -> SeededLevel:
        """Return the level of a seed."""

    @classmethod
    def draw(cls, config: Any, rng: np.random.Generator) -> Iterator[SeededLevel]:
        while True:
            yield cls.level_of(config, int(rng.integers(SEEDS)))

    @classmethod
    def key_of(cls, level: SeededLevel) -> str:
        return level.key

    @classmethod
    def split_of(cls, level: SeededLevel) -> str | None:
        return super().split_of(level) if level.held_out else None


class Lender:
    """A pool that lends each owner an object, and reuses it for the next one once the owner is garbage."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.idle: dict[Hashable, list[Any]] = defaultdict(list)

    def lend(self, owner: object, *key: Hashable) -> Any:
        """Return a thing made from `key` that no owner has; one that is `lost` by now is not lent again."""
        thing, idle = None, self.idle[key]
        while idle and (thing is None or getattr(thing, "lost", False)):
            thing = idle.pop()
        if thing is None or getattr(thing, "lost", False):
            thing = self.make(*key)
        weakref.finalize(owner, idle.append, thing).atexit = False
        return thing
