"""How long may somebody's function take?  It runs in a thread, or in one event loop, and is left when its time is over.

Everything async of a process shares that loop: what a module keeps between calls, such as a client or a semaphore,
belongs to the loop in which it was first used.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import wait
from functools import cache
from typing import Any

from envs.sentences import escaped

STUCK_SECONDS = 1.0  # in which a loop that no function blocks answers
_LOCK = threading.Lock()  # tools run in threads


class TooLate(TimeoutError):
    """A function took longer than it may; no function raises it itself."""


def in_time(call: Callable[[], Any], timeout: float) -> Any:
    """Return what a call returns or raises; `TooLate` where it takes longer than `timeout` s."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if not found:
        return TooLate()
    main = threading.current_thread() is threading.main_thread()
    if isinstance(found[0], ValueError) and "main thread" in error_text(found[0]) and main:
        try:  # it sets a signal, which Python allows in the main thread alone: nothing limits its time then
            return call()
        except Exception as error:
            return error
    return found[0]


def awaited_in_time(works: Sequence[Awaitable[Any]], timeout: float) -> list[Any]:
    """Return what each of these returns or raises, side by side; `TooLate` for those that take longer."""

    async def kept(work: Awaitable[Any]) -> Any:
        try:
            return await work
        except BaseException as error:  # SystemExit would end the loop
            return error

    with _LOCK:
        loop = _loop(os.getpid())
    futures = [asyncio.run_coroutine_threadsafe(kept(work), loop) for work in works]
    done, late = wait(futures, timeout)
    for future in late:
        future.cancel()
    if late and wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)], STUCK_SECONDS).not_done:
        _loop.cache_clear()  # a function blocks it: the next ones get another
    return [future.result() if future in done else TooLate() for future in futures]


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process: a fork has no thread that runs its parent's."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def error_text(error: BaseException) -> str:
    """Return what an exception says, in one line; whatever its `__str__` does."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return "(without words: its __str__ raised)"


def named_error(error: BaseException) -> str:
    """Return an exception's class and what it says, in one line that a terminal shows and does not obey."""
    return f"{type(error).__name__}: {escaped(error_text(error))}"
