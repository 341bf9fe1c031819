"""What did the models write and do?  The sections with answers and episodes, every checkpoint beside the others."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from posttrain.report.episodes import png, replay
from posttrain.report.markup import badge, chip, text
from posttrain.report.tables import Results, percent, readable
from posttrain.types import Record

SHOWN_CHARACTERS = 420  # of one answer
SAMPLES = 2  # prompts shown of each part
LEVELS = 4  # shown of each kind in each environment, the first one at once and the others on request
OPENING_CHARACTERS = 160  # of an answer, shown before it is unfolded


def episodes(results: Results, transcripts: Sequence[Record]) -> str:
    """Per environment how many levels the last two checkpoints solved, together and alone, and some of each kind."""
    names = list(results["checkpoints"])
    if len(names) < 2:
        return ""
    blocks = ""
    for env in results["baselines"]:
        setting = results["checkpoints"][names[-1]]["envs"][env]["setting"]
        before, after = (
            {
                row["index"]: row
                for row in transcripts
                if (row["checkpoint"], row["suite"], row["part"], row["setting"]) == (name, "envs", env, setting)
                and not row["crashed"]
            }
            for name in names[-2:]
        )
        kinds: dict[str, list[int]] = {
            f"Solved by {names[-1]} alone": [],
            f"Solved by {names[-2]} alone": [],
            "Solved by neither": [],
            "Solved by both": [],
        }
        for number in (number for number in before if number in after):
            wins = (after[number]["success"], before[number]["success"])
            place = [(True, False), (False, True), (False, False), (True, True)].index(wins)
            list(kinds.values())[place].append(number)
        counts = ", ".join(f"{len(numbers)} {title[0].lower()}{title[1:]}" for title, numbers in kinds.items())
        both = sum(map(len, kinds.values()))
        blocks += f'<h3>{text(readable(env))}</h3><p class="quiet">{both} levels: {text(counts)}.</p>'
        for title, numbers in list(kinds.items())[:3]:
            levels = [level(results, title, number, before, after) for number in numbers[:LEVELS]]
            blocks += "".join(levels[:1])
            if len(levels) > 1:
                more = f"{len(levels) - 1} more: {title[0].lower()}{title[1:]}"
                blocks += f'<details class="levels"><summary>{text(more)}</summary>{"".join(levels[1:])}</details>'
    return blocks


def level(results: Results, title: str, number: int, before: dict[int, Record], after: dict[int, Record]) -> str:
    """One level, as both checkpoints played it."""
    sides = "".join(episode(results, played[number]) for played in (before, after))
    head = f"{text(title)} <small>level {number}</small>"
    return f'<div class="level"><h4>{head}</h4><div class="halves">{sides}</div></div>'


def episode(results: Results, row: Record) -> str:
    """The pictures, which page.js lets the reader step through, and beside them what the model wrote."""
    frames, turns = replay(results, row)
    outcome = badge("yes", "solved") if row["success"] else badge("no", row["failure"] or "not solved")
    items = "".join(
        f"<li><b>{text(', '.join(taken) or 'no valid action')}</b> <q>{text(cut(said))}</q></li>"
        for said, taken in turns
    )
    turn_of = [-1, *(number for number, (_, taken) in enumerate(turns) for _ in taken)]  # which turn led to a picture
    pictures = ""
    for number, frame in enumerate(frames):
        code = base64.b64encode(png(frame)).decode()
        name = f"{row['part']} played by {row['checkpoint']}, after {number} actions"
        pictures += f'<img alt="{text(name)}" data-turn="{turn_of[number]}" src="data:image/png;base64,{code}">'
    film = f'<div class="film">{pictures}</div>' if pictures else ""
    return (
        f'<div class="half"><p>{chip(results, row["checkpoint"])} {outcome}</p><div class="scene">'
        f"{film}<ol>{items}</ol></div></div>"
    )


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
            said = "".join(f'<p class="said {m["role"]}">{text(m["content"])}</p>' for m in rows[0]["messages"])
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
