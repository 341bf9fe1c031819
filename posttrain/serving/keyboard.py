"""What does a person type?  Lines and pasted texts as messages; Ctrl-C stops an answer or clears a half-typed line."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from posttrain.serving.display import note


def next_message(by_hand: bool) -> str:
    """Read the next line; in a terminal with all lines that came at once, as they do when a text is pasted."""
    if not by_hand:
        return input()
    text = typed_line("\nyou> ")
    if more := pending():
        text = f"{text}\n{more}".rstrip("\n")
        note(f"[{len(text.splitlines())} lines are taken as one message]")
    return text


def typed_line(prompt: str) -> str:
    """Read a line as it is typed. Ctrl-C clears what is typed so far; with nothing typed it interrupts."""
    while True:
        try:
            return input(prompt)
        except KeyboardInterrupt:
            print()
            readline = sys.modules.get("readline")  # whoever edits the line knows what is on it
            if not (readline and readline.get_line_buffer()):
                raise


def pending() -> str:
    """Read what is waiting in the terminal: a paste comes faster than anybody types."""
    if os.name != "posix":  # elsewhere a terminal cannot be asked
        return ""
    found, descriptor = b"", sys.stdin.fileno()
    while select.select([descriptor], [], [], 0.05)[0] and (piece := os.read(descriptor, 65536)):
        found += piece
    return found.decode(sys.stdin.encoding, errors="replace")


@contextmanager
def ctrl_c_keeps_what_was_typed() -> Iterator[None]:
    """Keep Ctrl-C from emptying the terminal's queue, so that lines that wait there are still answered."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    kept = before[:]
    kept[3] |= termios.NOFLSH  # the local modes
    termios.tcsetattr(descriptor, termios.TCSANOW, kept)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


@contextmanager
def one_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C only make `stopped()` true, and the second one interrupt."""
    pressed: list[int] = []

    def note_it(number: int, _: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
