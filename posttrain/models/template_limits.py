"""Does a chat template come to an end?  It is foreign code, bounded in steps, time and memory.

`why_not` lets a child process render it, under limits of processor time and memory: a single operation may take any
amount of both. `at_most` bounds the steps of what is then rendered in this process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import jinja2.filters

if TYPE_CHECKING or __name__ != "__main__":  # the child below runs this file alone, without the package
    from posttrain.types import UserError

SECONDS, BYTES = 5, 2**30  # processor time and memory of the child
STEPS = 3_000_000  # lines that a template may run for one dialogue
ROLES = 1 << 16  # of all dialogues whose rendered form is kept
PATIENCE = 120  # seconds by the clock, with the start of Python, on a busy machine
OUT_OF_MEMORY = 77  # exit code


def why_not(
    template: str, special_tokens: Mapping[str, str], dialogues: list[list[dict[str, str]]], tools: str | None = None
) -> str:
    """Return why this template cannot be rendered for these dialogues within the limits, in words, or "".

    Other errors do not count here: they are raised again when the template is used. tools: schemas as JSON.
    """
    schemas = None if tools is None else json.loads(tools)
    return _tried(json.dumps([template, dict(special_tokens), dialogues, schemas, STEPS, SECONDS, BYTES]))


@functools.cache
def _tried(source: str) -> str:
    # -P keeps this file's folder off the path, where types.py would replace the standard library's
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {PATIENCE} seconds"
    if done.returncode > 0 and done.returncode != OUT_OF_MEMORY:
        raise UserError(
            "A chat template is tried out in a Python process of its own, which does not start here: "
            f"{' '.join(done.stderr.decode(errors='replace').split())[-300:]}"
        )
    return meaning_of_exit(done.returncode)


def meaning_of_exit(code: int) -> str:
    """Return what the child's exit code means: 0 -> "", -11 -> "it crashes (SIGSEGV)"."""
    if code == -signal.SIGXCPU:
        return f"it takes more than {SECONDS} seconds"
    if code == OUT_OF_MEMORY:
        return f"it takes more than {BYTES >> 30} GiB"
    if code == -signal.SIGKILL:
        return "the system killed it (SIGKILL), as it does where memory runs out"
    return f"it crashes ({signal.Signals(-code).name})" if code < 0 else ""


class _Endless(BaseException):
    """Not an Exception: Jinja's optimizer runs constant parts of a template when it compiles it, and swallows those."""


@contextmanager
def at_most(steps: int) -> Iterator[None]:
    """End a template that loops for longer than `steps` lines with a TimeoutError.

    Jinja's sandbox bounds one range(), but not nested loops. Lines are counted, not seconds, so that the limit does not
    depend on the machine. A single operation cannot be interrupted: `why_not` covers those.
    """
    left = steps

    def each_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Endless
        return each_line

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        return each_line if file == "<template>" or file == jinja2.filters.__file__ else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield
    except _Endless:
        raise TimeoutError(f"it takes more than {steps} steps") from None
    finally:
        sys.settrace(before)


class Kept(dict[Any, Any]):
    """A cache of what was rendered for (roles, anything, tools); the latest is dropped first.

    It holds at most ROLES roles in all, where a hundred characters of tools count as one. It is bounded because clients
    of a server choose the shapes of dialogues.
    """

    _roles = 0

    def __reduce__(self) -> Any:  # copied and pickled item by item, so that they are counted once
        return Kept, (), None, None, iter(self.items())

    def __setitem__(self, shape: Any, rendered: Any) -> None:
        while self._roles + _size(shape) > ROLES and self:
            self._roles -= _size(self.popitem()[0])
        self._roles += _size(shape)
        super().__setitem__(shape, rendered)


def _size(shape: tuple[Any, ...]) -> int:
    return len(shape[0]) + sum(len(tools) for tools in shape[2:] if tools) // 100


def import_alone(module: str) -> types.ModuleType:
    """Import a module without the slow `__init__` files of its packages: those of transformers take half a second."""
    names = module.split(".")
    spec = importlib.util.find_spec(names[0])
    assert spec is not None and spec.submodule_search_locations
    for depth in range(1, len(names)):
        package = types.ModuleType(".".join(names[:depth]))
        package.__path__ = [os.path.join(spec.submodule_search_locations[0], *names[1:depth])]
        sys.modules[package.__name__] = package
    return importlib.import_module(module)


def _render() -> None:
    """Run as the child process: JSON in; exit code 0, OUT_OF_MEMORY, or a signal."""
    import resource

    templates = import_alone("transformers.utils.chat_template_utils")
    template, special_tokens, dialogues, tools, steps, seconds, memory = json.load(sys.stdin)
    if sys.platform == "linux":
        with open("/proc/self/statm") as sizes:
            memory += int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    # SIGXCPU at the first limit, SIGKILL at the second
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for dialogue in dialogues:
        try:
            with at_most(steps):
                templates.render_jinja_template(
                    [dialogue], tools=tools, chat_template=template, add_generation_prompt=True, **special_tokens
                )
        except BaseException as error:
            while error is not None:
                if isinstance(error, MemoryError):
                    os._exit(OUT_OF_MEMORY)
                error = error.__cause__ or error.__context__
    os._exit(0)


if __name__ == "__main__":
    _render()
