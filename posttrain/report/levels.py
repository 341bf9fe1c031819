"""How did the same level go before and after?  The pictures on top of the page, and pairs of episodes."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.report.episodes import evaluation_stage
from posttrain.report.markup import chip, text
from posttrain.report.rows import Pictures, with_pictures
from posttrain.report.tables import Results, percent, readable
from posttrain.types import Record

LEVELS = 4  # shown of each kind in each environment, the first one at once and the others on request
ON_TOP = {"base": "base model", "phase2": "SFT + DPO", "phase3": "SFT + DPO + RL"}  # where checkpoints are called so


def played(results: Results, transcripts: Sequence[Record], name: str, env: str) -> dict[int, Record]:
    """level -> a checkpoint's episode under the setting of the headline table, without those that crashed."""
    setting = results["checkpoints"][name]["envs"][env]["setting"]
    wanted = (name, "envs", env, setting)
    return {
        row["index"]: row
        for row in transcripts
        if (row["checkpoint"], row["suite"], row["part"], row["setting"]) == wanted and not row["crashed"]
    }


def shown(results: Results, row: Record, pictures: Pictures) -> Record:
    return with_pictures(row, evaluation_stage(results, row), pictures)


def top(results: Results, transcripts: Sequence[Record], pictures: Pictures) -> Record | None:
    """The first test levels, which nobody chose, as the model played them before and after: data for page.js."""
    names = list(results["checkpoints"])
    columns = [name for name in ON_TOP if name in names]
    if len(columns) < 2:
        columns = list(dict.fromkeys([names[0], *names[-2:]]))
    rows = []
    for env in results["baselines"]:
        by_column = [played(results, transcripts, name, env) for name in columns]
        levels = sorted(set.intersection(*map(set, by_column)))[:LEVELS]
        cells = [[shown(results, found[level], pictures) for level in levels] for found in by_column]
        if levels and any("frames" in cell for column in cells for cell in column):
            shares = [percent(results["checkpoints"][name]["envs"][env]["success"]) for name in columns]
            rows.append({"title": readable(env), "shares": shares, "cells": cells})
    if not rows:
        return None
    return {"columns": [ON_TOP.get(name, name) for name in columns], "rows": rows}


def pairs(results: Results, transcripts: Sequence[Record], pictures: Pictures) -> tuple[str, list[list[Record]]]:
    """Per environment how many levels the last two checkpoints solved, together and alone, and some of each kind.

    The HTML names places of the second value, the pairs of episodes.
    """
    names = list(results["checkpoints"])
    blocks: str = ""
    found: list[list[Record]] = []
    for env in results["baselines"] if len(names) > 1 else ():
        before, after = (played(results, transcripts, name, env) for name in names[-2:])
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
            levels = []
            for number in numbers[:LEVELS]:
                levels.append(f'<div class="level"><h4>{text(title)} <small>level {number}</small></h4>')
                levels[-1] += f'<div class="halves" data-pair="{len(found)}"></div></div>'
                found.append([shown(results, side[number], pictures) for side in (before, after)])
            blocks += "".join(levels[:1])
            if len(levels) > 1:
                more = f"{len(levels) - 1} more: {title[0].lower()}{title[1:]}"
                blocks += f'<details class="levels"><summary>{text(more)}</summary>{"".join(levels[1:])}</details>'
    if not blocks:
        return "", []
    head = f"<p>{chip(results, names[-2])} and {chip(results, names[-1])} on the same levels with the same noise.</p>"
    return head + blocks, found
