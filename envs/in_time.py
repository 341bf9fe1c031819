"""How long may somebody's function take?  It runs in a thread, which is left behind when its time is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_time(call: Callable[[], Any], timeout: float) -> Any:
    """Return what a call returns or raises; a TimeoutError without words where it takes longer than `timeout` s."""
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
        return TimeoutError()
    main = threading.current_thread() is threading.main_thread()
    if isinstance(found[0], ValueError) and "main thread" in str(found[0]) and main:
        try:  # it sets a signal, which Python allows in the main thread alone: nothing limits its time then
            return call()
        except Exception as error:
            return error
    return found[0]
