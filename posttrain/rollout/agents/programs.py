"""How does an agent program run?  As a process group of its own, with limits, whose end is reported to a queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import IO, Any, NamedTuple

from envs.prompts import AgentProgram
from envs.prompts.agents import search_path
from posttrain.types import one_line

LOOK = 0.1  # seconds between two looks at a program
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
KEPT = 1 << 16  # bytes of its output that are kept, from the end
MOST_OUTPUT = 64 << 20  # bytes that it may print


# Kills the groups that are left when the pipe from this process ends, however it ended.
WATCHDOG = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Watchdog:
    """A process that ends the programs of this one where it was killed before it could."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        command = [sys.executable, "-S", "-c", WATCHDOG]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True
        )

    def tell(self, sign: str, group: int) -> None:
        """Watch a process group (+), or forget it (-)."""
        pipe = self._process.stdin
        assert pipe is not None
        with self._lock, suppress(OSError):
            pipe.write(f"{sign}{group}\n")
            pipe.flush()


@cache
def watchdog(process: int) -> Watchdog:
    """Return the watchdog of this process, whose number is given: a fork has its own."""
    return Watchdog()


class ProgramEnd(NamedTuple):
    """How a program ended: ProgramEnd(0, "42\\n", "") or ProgramEnd(None, "", "it took more than 600 s")."""

    exit_code: int | None  # None where it was stopped
    output: str
    problem: str  # why it crashed; "" where it did not


class Clock:
    """The time that a program takes, without the time in which it waits for the model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._paused = 0.0
        self._waiting, self._since = 0, 0.0

    def wait(self, more: int) -> None:
        """Count a request that begins (1) or has been answered (-1)."""
        with self._lock:
            now = time.monotonic()
            if self._waiting:
                self._paused += now - self._since
            self._waiting, self._since = self._waiting + more, now

    def seconds(self) -> float:
        with self._lock:
            now = time.monotonic()
            return now - self._began - self._paused - (now - self._since if self._waiting else 0.0)


class RunningProgram(threading.Thread):
    """A thread that starts a program, watches it, and reports its outcome.

    row: is written to its stdin as JSON.
    environment: variables beside those of this process.
    ended: is called with the outcome, in this thread.
    """

    def __init__(
        self,
        program: AgentProgram,
        row: Mapping[str, Any],
        environment: Mapping[str, str],
        ended: Callable[[ProgramEnd], None],
    ) -> None:
        super().__init__(daemon=True)
        self.program, self.row, self.environment, self.ended = program, row, dict(environment), ended
        self.clock = Clock()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let the program end soon; its outcome has no exit code."""
        self._stopping.set()

    def run(self) -> None:
        try:
            with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
                given.write(json.dumps(self.row, default=str).encode())
                given.seek(0)
                end = self._watched(given, out, errors)
        except Exception as error:  # the command has a text that no command can have; there are too many processes
            end = ProgramEnd(None, "", f"it cannot be started: {one_line(error)}")
        self.ended(end)

    def _watched(self, given: IO[bytes], out: IO[bytes], errors: IO[bytes]) -> ProgramEnd:
        guard = watchdog(os.getpid())  # before the program, which is unwatched otherwise until it has started
        process = subprocess.Popen(
            self.program.words(self.row),
            stdin=given, stdout=out, stderr=errors,
            env=os.environ | {"PATH": search_path()} | self.environment, start_new_session=True,
        )  # fmt: skip
        guard.tell("+", process.pid)
        problem = ""
        try:
            while not problem and not self._stopping.is_set():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                    break
                if self.clock.seconds() > self.program.seconds:
                    problem = f"it took more than {self.program.seconds:g} s"
                elif _size(out) + _size(errors) > MOST_OUTPUT:
                    problem = f"it printed more than {MOST_OUTPUT >> 20} MiB"
            code = process.poll()
        finally:
            _end(process)
            guard.tell("-", process.pid)
        words = _last(errors).split("\n")
        if code is not None and not self.program.ended_well(code):
            said = next((line.strip() for line in reversed(words) if line.strip()), "")
            problem = f"it ended with exit code {code}{f': {said[:200]}' if said else ''}"
        return ProgramEnd(code, _last(out), problem)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, and whatever it has started."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _last(file: IO[bytes]) -> str:
    """Return the end of what was printed."""
    file.seek(max(0, _size(file) - KEPT))
    return file.read(KEPT).decode("utf-8", "replace")
