"""What did the models answer?  The same prompts, every checkpoint beside the others."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.report.markup import badge, chip, text
from posttrain.report.tables import Results, percent
from posttrain.types import Record

SHOWN_CHARACTERS = 420  # of one answer
SAMPLES = 2  # prompts shown of each part
OPENING_CHARACTERS = 160  # of an answer, shown before it is unfolded


def cut(words: str) -> str:
    """The beginning of a long text; line breaks become a sign, since a page of them is what some models write."""
    words = words.replace("\n", " ↵ ")
    return words if len(words) <= SHOWN_CHARACTERS else words[:SHOWN_CHARACTERS] + " …"


def answers(results: Results, transcripts: Sequence[Record]) -> str:
    """The first prompts of each part, with every checkpoint's answer."""
    blocks = ""
    for suite, title in (("math", "Math"), ("recall", "Recall"), ("repetition", "Open question")):
        entry = next(iter(results["checkpoints"].values())).get(suite)
        entry = next(iter(entry.values())) if entry and suite == "math" else entry
        asked: dict[tuple[str, int], list[Record]] = {}
        for row in transcripts:
            if row["suite"] == suite and entry and row["setting"] == entry["setting"] and row["index"] < SAMPLES:
                asked.setdefault((row["part"], row["index"]), []).append(row)
        for (part, _), rows in asked.items():
            said = "".join(map(message, rows[0]["messages"]))
            if "answer" in rows[0]:
                said += f'<p class="quiet">expected: {text(rows[0]["answer"])}</p>'
            about = f"{title}, {part.replace('_', ' ')}" if part else title
            shown = "".join(answer(results, row) for row in rows)
            blocks += f'<div class="sample"><h4>{text(about)}</h4>{said}{shown}</div>'
    note = (
        f"The first {SAMPLES} of each part of the evaluation, not picked, sampled as for the table above. Every "
        "generation is in transcripts.jsonl."
    )
    return blocks and f'<p>{note}</p><div class="samples">{blocks}</div>'


def message(said: Record) -> str:
    """One message of a prompt; the user's stand to the right."""
    kind = "said user" if said["role"] == "user" else "said"
    return f'<p class="{kind}">{text(said["content"])}</p>'


def answer(results: Results, row: Record) -> str:
    marks = chip(results, row["checkpoint"])
    if "accuracy" in row:
        marks += badge("yes", "right") if row["accuracy"] else badge("no", "wrong")
    else:
        marks += badge("", f"repeats {percent(row['seq_rep_4'])}")
    marks += badge("no", "never stops") if row["never_stops"] else ""
    return f'<div class="answer">{marks}{folded(cut(row["text"]))}</div>'


def folded(words: str) -> str:
    """A text whose end is unfolded on request: the long ones of an untrained model would fill the page."""
    if len(words) <= OPENING_CHARACTERS:
        return f"<p>{text(words) or '<i>nothing</i>'}</p>"
    opening, rest = words[:OPENING_CHARACTERS], words[OPENING_CHARACTERS:]
    return f"<details><summary>{text(opening)}<span> … more</span></summary><p>{text(rest)}</p></details>"
