"""Which episodes are worth reading?  transcripts.html: any transcripts.jsonl as a list with filters, in one file.

    posttrain report runs/quickstart/phase3/transcripts.jsonl

Episodes are played again where a run_config.yaml or results.json beside the file says how.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.report.markup import document, text
from posttrain.report.rows import Pictures, packed
from posttrain.report.training_log import recorded
from posttrain.types import UserError


def build(file: Path) -> Path:
    """Write the page beside the transcripts, with their name, and return its path."""
    if not file.is_file():
        raise UserError(f"There is no file {file}. Name a transcripts.jsonl of phase 3 or of evaluate_model.py.")
    pictures = Pictures()
    found = recorded(file, pictures)
    if not found:
        raise UserError(f"{file} holds no whole row: there is no episode to show.")
    body = (
        f'<header><p class="kicker">{text(file.resolve().parent.name)}</p><h1>Transcripts</h1>'
        f'<p class="lead">{len(found):,} rows of {text(file.name)}. Arrow keys walk through the list; in the turns of '
        "an episode they step it, on shaded tokens they tell their figures.</p></header>"
        '<section id="transcripts"></section>'
    )
    data = packed("data", {"rows": found, "pictures": pictures.coded})
    path = file.with_suffix(".html")
    title = f"{file.resolve().parent.name}: transcripts"
    path.write_text(document(title, body, data, "player.js", "viewer.js", "transcripts.js"), encoding="utf-8")
    return path
