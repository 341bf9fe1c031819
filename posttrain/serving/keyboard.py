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
    """Read the next line; in a terminal all lines of a pasted text. "" is one that Ctrl-C stopped after its end."""
    if not by_hand:
        return input()
    text = typed_line("\nyou> ")
    with one_ctrl_c() as stopped:
        more = pending()
    if stopped():
        note("[stopped]")
        return ""
    if more:
        text = f"{text}\n{more}".rstrip("\n")
        note(f"[{len(text.splitlines())} lines are taken as one message]")
    return text


def typed_line(prompt: str) -> str:
    """Read a line. Ctrl-C clears a line that has text, and interrupts at an empty one when it is pressed again there.

    The first one may have been meant for an answer that has just ended. Ctrl-C also drops what `input` has not read,
    because `input` hears a signal only while it waits for the next key.
    """
    pressed = False
    while True:
        try:
            with _ctrl_c_keeps_queue(False):
                return input(prompt)
        except KeyboardInterrupt:
            print()
            readline = sys.modules.get("readline")  # it knows the text of the line
            empty = not (readline and readline.get_line_buffer())
            if empty and pressed:
                raise
            if empty:
                note("[Ctrl-C again leaves, and so does Ctrl-D]")
            pressed = empty


def pending() -> str:
    """Read the text that waits in the terminal: a paste arrives faster than anybody types."""
    if os.name != "posix":  # select works there only for sockets
        return ""
    data, descriptor = b"", sys.stdin.fileno()
    while select.select([descriptor], [], [], 0.05)[0] and (piece := os.read(descriptor, 65536)):
        data += piece
    return data.decode(sys.stdin.encoding, errors="replace")


@contextmanager
def ctrl_c_keeps_what_was_typed() -> Iterator[None]:
    """Keep the lines that wait in the terminal's queue when Ctrl-C is pressed, except while `typed_line` reads."""
    with _ctrl_c_keeps_queue(True):
        yield


@contextmanager
def _ctrl_c_keeps_queue(keeps: bool) -> Iterator[None]:
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    wanted = before[:]
    wanted[3] = before[3] | termios.NOFLSH if keeps else before[3] & ~termios.NOFLSH  # the local modes
    termios.tcsetattr(descriptor, termios.TCSANOW, wanted)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


@contextmanager
def one_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C make `stopped()` true, and the second one interrupt."""
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
