"""What do both tabs of the page share?  Settings of events, errors, the end of a cancelled event, tables."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any

import gradio

# Events that use the model share one queue, in the order of arrival.
ONE_AT_A_TIME: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "minimal"}
QUICK: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
# For events that may raise `page_error`: gradio shows the errors of its queue only. These do not wait for others in it.
REFUSES: dict[str, Any] = QUICK | {"queue": True, "concurrency_limit": None}
PAUSE = 0.1  # seconds between two updates of a text that is being written


def page_error(words: object) -> gradio.Error:
    """Return an error that the page shows, without a traceback in the log."""
    return gradio.Error(str(words), print_exception=False)


def wait_until_idle(what: Any) -> None:
    """Wait for the end of a cancelled event, which still computes its last token when gradio reports the end."""
    until = time.monotonic() + 60
    while what.busy and time.monotonic() < until:
        time.sleep(0.02)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; the first cell of a row is its heading. A line may end after a slash."""

    def cell(tag: str, text: str) -> str:
        return f"<{tag}>{html.escape(text).replace('/', '/<wbr>')}</{tag}>"

    lines = (cell("th", first) + "".join(cell("td", text) for text in rest) for first, *rest in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
