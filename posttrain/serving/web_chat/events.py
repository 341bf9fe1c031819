"""What do both tabs of the page need?  Settings of events, errors in words, the end of a cancelled one, tables."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any

import gradio

# Events that use the model share one queue: first come, first served.
ONE_AT_A_TIME: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "minimal"}
QUICK: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
PAUSE = 0.1  # seconds between two pictures of a text that is being written


def page_error(words: object) -> gradio.Error:
    """Return an error that the page shows and the log does not."""
    return gradio.Error(str(words), print_exception=False)


def wait_until_idle(what: Any, seconds: float = 60.0) -> None:
    """Wait for the end of a cancelled event: gradio tells the page earlier, while a last token is computed."""
    until = time.monotonic() + seconds
    while what.busy and time.monotonic() < until:
        time.sleep(0.02)


def html_table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return a small table in HTML; the first cell of a row says what it is about. kind: CSS class of all cells."""

    def cell(tag: str, text: str) -> str:
        return f"<{tag}{kind and f' class={kind}'}>{html.escape(text)}</{tag}>"

    lines = (cell("th", first) + "".join(cell("td", text) for text in rest) for first, *rest in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
