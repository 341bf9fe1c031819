"""What do all sections of the page have in common?  Escaped text, names in colour, badges, tables."""

from __future__ import annotations

import html

from posttrain.report.tables import Results, colour


def text(value: object) -> str:
    return html.escape(str(value))


def chip(results: Results, name: str) -> str:
    """A checkpoint's name in its colour."""
    return f'<span class="chip" style="--c:{colour(results, name)}">{text(name)}</span>'


def badge(kind: str, words: str) -> str:
    return f'<span class="badge {kind}">{text(words)}</span>'


def table(head: str, body: str, kind: str = "") -> str:
    """A table; on a phone page.css lays out the kinds `headline`, `parts` and `every` as lines below each other."""
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'
