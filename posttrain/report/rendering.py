"""How are pages and Markdown written?  By jinja2 from the files of templates/; a page needs no other file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.exceptions import UndefinedError

from posttrain.metrics import Interval
from posttrain.report import charts
from posttrain.report.episodes import without_infinite
from posttrain.report.tables import BENCHMARKS, NOT_ASKED, percent, points, points_span, span
from posttrain.types import markdown_text

HERE = Path(__file__).parent
KINDS = {  # verdict -> its class in page.css
    "better": "good", "better in part": "good", "worse": "bad", "worse in part": "bad",
    "mixed": "flat", "cannot tell": "flat",
}  # fmt: skip
# Errors from damaged results.json or transcripts.jsonl; a template raises UndefinedError for a missing key.
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError, UndefinedError)


def _bar_places(figure: Interval) -> list[float]:
    """Return low end, high end and value of a share, in percent."""
    return [100 * min(1.0, max(0.0, x)) for x in (figure.low, figure.high, figure.value)]


TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=lambda name: name is None or name.endswith(".html.j2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {"percent": percent, "span": span, "points": points, "change": points_span}
TEMPLATES.filters |= {"short": "{:g}".format, "bar_places": _bar_places, "text": markdown_text}
TEMPLATES.globals |= {"KINDS": KINDS, "NOT_ASKED": NOT_ASKED, "BENCHMARKS": BENCHMARKS, **charts.SIZES}


def render_page(template: str, title: str, data: Any, *scripts: str, **values: Any) -> str:
    """Return a page. data: for `unpack` of player.js. scripts: files of this folder, dependencies first."""
    style, code = (
        "".join((HERE / name).read_text(encoding="utf-8") for name in names)
        for names in (("page.css", "player.css"), scripts)
    )
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return TEMPLATES.get_template(template).render(
        title=title, style=style, code=code, digest=digest, packed=packed(data), **values
    )


def packed(data: Any) -> str:
    """Return data as gzipped JSON in base64: a small page for thousands of episodes, and no text can end the script."""
    try:
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN or infinity, which a browser's JSON does not know
        text = json.dumps(without_infinite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), mtime=0)).decode()
