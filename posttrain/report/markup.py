"""What do all sections of the page have in common?  Escaped text, names in colour, badges, tables."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

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


def document(title: str, body: str, data: str, *scripts: str) -> str:
    """A page that holds all it needs: what a browser is allowed to load from elsewhere is nothing at all.

    It runs the page's own script, known by its digest, and no other: no attribute such as `onclick` either.

    data: as `rows.packed` writes it. scripts: files of this folder, in the order in which they need each other.
    """
    here = Path(__file__).parent
    style = "".join((here / name).read_text(encoding="utf-8") for name in ("page.css", "player.css"))
    code = "".join((here / name).read_text(encoding="utf-8") for name in scripts)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    allowed += "; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{style}</style></head><body><main>{body}</main>{data}"
        f"<script>{code}</script></body></html>\n"
    )
