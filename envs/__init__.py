"""Which environments can be made?  Every `TextEnv` of a file or package in this folder, registered with gymnasium.

from envs import make, names
env = make("frozen_lake", size=4, observation="neighbours")     # the bare environment
env = make("my_module:MyEnv", size=4)                            # the class MyEnv of ./my_module.py
gymnasium.make("posttrain/FrozenLake-v0")                        # the same, with gymnasium's wrappers
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from functools import lru_cache
from threading import Lock
from typing import Any, get_type_hints

import gymnasium
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from envs.base import CAPABILITIES, SPLITS, TextEnv, known
from envs.by_path import PATH, imported
from envs.in_time import named_error
from envs.process_state import keep_process_state

__all__ = ["CAPABILITIES", "SPLITS", "TextEnv", "make", "names", "option", "register"]

_NO_ENVS = {
    *("adapters", "base", "check", "demos", "episode", "hostile", "play", "players", "process_state", "promises"),
    *("protocol", "sentences", "tools", "wording"),
}
_ADAPTERS = {  # names that `make` knows as well, with options that say whose environment it is
    "openenv": "openenv_client.OpenEnv",
    "reasoning_gym": "reasoning_gym.ReasoningGym",
    "textarena": "textarena.TextArena",
}
_ENVS: dict[str, type[TextEnv]] = {}
_LOCK = Lock()
_BROKEN: dict[str, str] = {}  # file -> why it cannot be imported; added to the message about an unknown name


def register(env: type[TextEnv]) -> None:
    """Make an environment known to `make` under its name, and to gymnasium as `posttrain/<class>-v0`."""
    _check_whole(env)
    files = {
        ".".join(each.__module__.split(".")[:2])
        for each in (env, _ENVS.get(env.name, env))
        if each.__module__.startswith("envs.")
    }
    if len(files) == 2:
        del _ENVS[env.name]  # neither may be played under a name that the other one has as well
        raise ValueError(f"{' and '.join(sorted(files))} both have the name {env.name}: rename one of them")
    _ENVS[env.name] = env
    local = "<locals>" in env.__qualname__
    entry: Any = env if local else f"{env.__module__}:{env.__qualname__}"
    gymnasium.register(gymnasium_id(env), entry_point=entry)


def _check_whole(env: type[TextEnv]) -> None:
    """Raise ValueError unless a class has everything that an environment needs."""
    lacks = [f"{method}()" for method in sorted(env.__abstractmethods__)]
    lacks += [field for field in ("name", "actions") if not hasattr(env, field)]
    if lacks:
        raise ValueError(f"{env.__name__} lacks {', '.join(lacks)}; envs/base.py says what each is for")


def gymnasium_id(env: type[TextEnv]) -> str:
    return f"posttrain/{env.__name__}-v0"


def names() -> list[str]:
    """Return the names that `make` knows without options, hence without those of other libraries' environments."""
    return sorted(_ENVS.keys() - _ADAPTERS)


def make(name: str, **options: Any) -> TextEnv:
    """Make an environment.

    Args:
        name: one of `names()`, an adapter (openenv, reasoning_gym, textarena), or module:Class, whose module is looked
            for among the installed packages and then in the current folder, and imported.
        options: the environment's own, as its class docstring lists them.

    Raises:
        ValueError: the name or an option is unknown, an option has the wrong type, or the class of a path does not fit.
    """
    env = _by_path(name) if ":" in name else _by_name(name)
    accepted = _options(env)
    for option, value in options.items():
        try:
            accepted[known(f"option of the environment {name}", option, accepted)].validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Input ")
            wants_list = "valid list" in problem or "as a Sequence" in problem
            hint = _as_list(option, value) if wants_list and isinstance(value, str) else ""
            raise ValueError(f"{name} cannot be made with {option}={value!r}: it {problem}.{hint}") from None
    made = env(**options)
    made.made_with = options
    return made


def _by_name(name: str) -> type[TextEnv]:
    try:
        return _ENVS.get(known("environment", name, [*names(), *_ADAPTERS])) or _adapter(name)
    except ValueError as error:
        raise ValueError(" ".join([str(error), *_BROKEN.values()])) from None


def _by_path(path: str) -> type[TextEnv]:
    """Return the class of module:Class. Names that come from a data file or a model's folder must not get here."""
    if not PATH.fullmatch(path):
        usage = "Write module:Class, for example my_module:MyEnv for the class MyEnv of my_module.py in this folder."
        raise ValueError(f"{path} does not name a class. {usage}")
    module, name = path.split(":")
    try:
        with keep_process_state(path):
            namespace = vars(imported(module))
    except ValueError as problem:
        raise ValueError(f"{path} cannot be used: {problem}") from problem.__cause__
    classes = {key: value for key, value in namespace.items() if isinstance(value, type) and issubclass(value, TextEnv)}
    if name in classes:
        _check_whole(classes[name])
        return classes[name]
    file, own = namespace.get("__file__", module), [each for each in classes if each != "TextEnv"]
    what = f"{name} is not a subclass of envs.base.TextEnv" if name in namespace else f"there is no {name}"
    others = f" Environments there: {', '.join(own)}." if own else " examples/minimal_env.py is a whole environment."
    raise ValueError(f"In {file} {what}. Write module:Class with an environment's class.{others}")


def option(text: str) -> tuple[str, Any]:
    """Return an option: ("size", 5) for `size=5`, ("observation", "grid") for `observation=grid`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(
            f'"{text}" is not an option of an environment: write name=value, for example observation=grid.'
        )
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        pass
    try:  # as a config file has lists and mappings; other words stay texts: no, 1e-4
        return key, yaml.safe_load(value) if value.startswith(("[", "{")) else value
    except (yaml.YAMLError, ValueError):  # a template, or a date that is none
        return key, value


def _as_list(option: str, text: str) -> str:
    """Return how to write a list, for an option that was given a text: topics=logic or topics=[logic]."""
    words = json.dumps(re.findall(r"[^\s,\[\]'\"]+", text), ensure_ascii=False)  # YAML joins no pair of escapes
    return f" Write a list, here {option}={words}, in a shell with single quotes around it."


def _adapter(name: str) -> type[TextEnv]:
    """Return the class that plays another library's environments, imported when it is first asked for."""
    file, _, kind = _ADAPTERS[name].partition(".")
    with _LOCK:  # gymnasium warns when a name is registered twice
        if name not in _ENVS:
            register(getattr(importlib.import_module(f"envs.adapters.{file}"), kind))
    return _ENVS[name]


@lru_cache
def _options(env: type[TextEnv]) -> dict[str, TypeAdapter[Any]]:
    """Return the options of an environment, and what checks a value against the annotation in `__init__`."""
    hints = get_type_hints(env.__init__)
    config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    return {option: TypeAdapter(hints.get(option, Any), config=config) for option in inspect.signature(env).parameters}


for _module in pkgutil.iter_modules(__path__):
    if _module.name in _NO_ENVS:
        continue
    try:
        with keep_process_state(f"envs/{_module.name}.py"):
            _imported = importlib.import_module(f"envs.{_module.name}")
        for _thing in list(vars(_imported).values()):
            _own = f"{getattr(_thing, '__module__', '')}.".startswith(f"{_imported.__name__}.")
            if _own and isinstance(_thing, type) and issubclass(_thing, TextEnv):
                register(_thing)
    except (Exception, SystemExit) as _error:  # one file that a user is writing must not take the others with it
        _BROKEN[_module.name] = f"envs/{_module.name}.py cannot be used ({named_error(_error)})."
