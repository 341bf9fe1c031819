"""Which worlds are there?  Every file in this folder that defines a `TextEnv`, registered with gymnasium.

from envs import make, names
world = make("frozen_lake", size=4, observation="neighbours")      # the bare world
gymnasium.make("posttrain/FrozenLake-v0")                           # the same, with gymnasium's wrappers
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import gymnasium

from envs.base import SPLITS, TextEnv, known, split_of

__all__ = ["SPLITS", "TextEnv", "make", "names", "split_of"]

_WORLDS: dict[str, type[TextEnv]] = {}

for _module in pkgutil.iter_modules(__path__):
    if _module.name in ("base", "check", "protocol"):
        continue
    for _thing in vars(importlib.import_module(f"envs.{_module.name}")).values():
        if isinstance(_thing, type) and issubclass(_thing, TextEnv) and _thing.__module__ == f"envs.{_module.name}":
            _WORLDS[_thing.name] = _thing
            gymnasium.register(f"posttrain/{_thing.__name__}-v0", entry_point=f"envs.{_module.name}:{_thing.__name__}")


def names() -> list[str]:
    """The names that `make` knows."""
    return sorted(_WORLDS)


def make(name: str, **options: Any) -> TextEnv:
    """The world of that name; an unknown name or option is a ValueError that guesses what was meant."""
    world = _WORLDS[known("world", name, names())]
    for option in options:
        known(f"option of the world {name}", option, inspect.signature(world).parameters)
    try:
        return world(**options)
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ValueError(f"{name} cannot be made with {given}: one of them has the wrong type ({error}).") from error
