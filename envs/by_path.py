"""Where is what `module:name` names?  In a module of the current folder or of an installed package."""

from __future__ import annotations

import importlib
import os
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any

from envs.in_time import error_text
from envs.sentences import escaped

PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@cache
def by_path(path: str) -> Any:
    """Return what a path names, e.g. `by_path("my_module:function")`.

    Raises:
        ValueError: says in words what is missing and what to write.
    """
    if not PATH.fullmatch(path):
        raise ValueError("write `module:name`, e.g. `my_module:function` for a function of my_module.py.")
    module_name, name = path.split(":")
    module = imported(module_name)
    if not hasattr(module, name):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        listed = f" It has {', '.join(own)}." if own else ""
        raise ValueError(f"{module_name} ({module.__file__}) has no {name}.{listed}")
    return getattr(module, name)


def imported(module_name: str) -> ModuleType:
    """Return a module; ValueError as in `by_path`."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last: a file here takes the place of no installed module
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            missing = escaped(str(error.name))
            raise ValueError(f"{module_name} imports {missing}, which is not installed.") from error
        file = module_name.replace(".", os.sep) + ".py"
        raise ValueError(
            f"there is no module {module_name}: run the command in the folder that has {file}, or install its package."
        ) from None
    except (Exception, SystemExit) as error:  # a module may raise anything
        words = escaped(error_text(error))
        raise ValueError(f"importing {module_name} raised {type(error).__name__}: {words}") from error
