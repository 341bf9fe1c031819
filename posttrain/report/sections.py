"""What do the sections of report.html show?  The values for the macros of templates/sections.html.j2."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config import command
from posttrain.metrics import Interval
from posttrain.report import tables
from posttrain.report.answers import folded, legible, shorten
from posttrain.report.episodes import Pictures, browser_row, evaluation_stage, played, with_pictures
from posttrain.report.tables import Column, Results, percent, readable
from posttrain.report.verdict import Comparison
from posttrain.types import Record, value_at

LEVELS = 4  # of each kind in each environment; only the first is unfolded
ON_TOP = {"base": "base model", "phase2": "SFT + DPO", "phase3": "SFT + DPO + RL"}  # if checkpoints have these names
SAMPLES = 2  # prompts shown of each part
MOST_ANSWERS = 128  # of each checkpoint in the list of a run of prompts; transcripts.html has all
# Each checkpoint against the one before it that was not merged, or a merged one against those that it was made of.
Steps = Mapping[tuple[str, str], Sequence[Comparison]]


def phases(steps: Steps) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return (new, old, [(verdict, figures)]): the figures that each phase changed, and the undecided ones."""
    phases_changed = []
    for (old, new), compared in steps.items():
        words: dict[str, list[str]] = {"better": [], "worse": [], "cannot tell": []}
        for each in compared:
            title = each.column.title
            shares = tables.from_to(*(figure.value for figure in each.values))
            if each.verdict in words:
                words[each.verdict].append(title if each.verdict == "cannot tell" else f"{title} ({shares})")
            for kind, parts in each.changed_parts.items():
                words[kind] += [f"{title}: {part.with_values}" for part in parts]
        if any(words.values()):
            phases_changed.append((new, old, [(kind, join_words(titles)) for kind, titles in words.items() if titles]))
    return phases_changed


def join_words(words: list[str]) -> str:
    """Return a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def headline_table(results: Results, steps: Steps, kept: Mapping[str, tuple[int, int]]) -> Record:
    """Return the headline table, what was not measured, which steps were kept, and math by kind of problem.

    kept: as `training_log.kept_steps` returns them.
    """
    entries = results["checkpoints"]
    rows, before = [], {new: old for old, new in itertools.pairwise(entries)}
    for column in tables.columns(results):
        figures = {name: column.get(entry) for name, entry in entries.items()}
        cells = [figure and (figure, *_change_of(steps, name, column, before)) for name, figure in figures.items()]
        rows.append((column.title, about(results, column), cells))
    return {
        "heads": [(name, tables.colour(results, name)) for name in entries],
        "rows": rows,
        "failed": results.get("failed", {}).items(),
        "kept": kept.items(),
        "merged": list(steps) != [(old, new) for new, old in before.items()],
        "math": math_parts(results),
    }


def about(results: Results, column: Column) -> list[str]:
    """Return a figure's note, its better direction, the number of items and the sampling setting."""
    figures = column.figures_in(next(entry for entry in results["checkpoints"].values() if column.suite in entry))
    note = (
        f"{tables.task_words(results).levels} solved"
        if column.suite == "envs"
        else column.note.removesuffix(", lower is better")
    )
    better = "lower is better" if tables.less_is_better(column.metric) else "higher is better"
    items = f"{figures.get('n', figures.get('episodes'))} items"
    return list(filter(None, (note, better, items, column.setting and tables.setting_of(column.setting))))


def _change_of(steps: Steps, name: str, column: Column, before: Mapping[str, str]) -> tuple[Comparison | None, str]:
    """Return the change in a cell, and against which checkpoint it is if that is not the one before."""
    old, compared = change_since_last(steps, name, column) or ("", None)
    return compared, "" if compared is None or old == before.get(name) else f", against {old}"


def change_since_last(steps: Steps, name: str, column: Column) -> tuple[str, Comparison] | None:
    """Return how a figure changed, and since which checkpoint: the last one that this one is compared with."""
    compared = [(old, each) for (old, new), comparisons in steps.items() if new == name for each in comparisons]
    return next(((old, each) for old, each in reversed(compared) if each.column == column), None)


def math_parts(results: Results) -> list[tuple[str, list[str], list[tuple[str, list[tuple[str, Interval, Any]]]]]]:
    """Return (source, parts, [(checkpoint, [(part, figure, n)])]) of each source of math that has several parts."""
    tables_by_source = []
    for source, first in next(iter(results["checkpoints"].values())).get("math", {}).items():
        if len(first["parts"]) < 2:
            continue
        rows = []
        for name, entry in results["checkpoints"].items():
            whole = entry["math"][source]
            by_part = whole["parts"] | {"together": whole}
            rows.append(
                (name, [(_spaced(part), tables.figure_of(one, "accuracy"), one["n"]) for part, one in by_part.items()])
            )
        tables_by_source.append((tables.math_title(source), [*map(_spaced, first["parts"]), "together"], rows))
    return tables_by_source


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def environments(results: Results) -> list[tuple[Any, ...]]:
    """Return (title, episodes, levels, setting, players, checkpoints), the last two as (name, success, note)."""
    rows = []
    for env, players in results["baselines"].items():
        entries = {name: entry["envs"][env] for name, entry in results["checkpoints"].items()}
        others = [(name, tables.figure_of(one, "success"), failures(one)) for name, one in players.items()]
        ours = []
        for name, one in entries.items():
            notes = [failures(one), f"{one['turns']:.1f} turns", f"{percent(one['invalid_turns'])} invalid turns"]
            notes += [f"{one['crashed']} crashed"] if one["crashed"] else []
            ours.append((name, tables.figure_of(one, "success"), ", ".join(filter(None, notes))))
        first = next(iter(entries.values()))
        setting = tables.setting_of(first["setting"])
        rows.append((readable(env), first["episodes"], first["levels"], setting, others, ours))
    return rows


def failures(entry: Record) -> str:
    """Return `hole 12 %, ...`."""
    return ", ".join(f"{word} {percent(n / entry['episodes'])}" for word, n in entry.get("failures", {}).items())


def differences(results: Results) -> Record:
    """Return paired differences between neighbours under the headline settings, and the reach of their scale."""
    metrics = ("accuracy", "success", "failed", "equal_length")
    steps: dict[tuple[str, str], list[Record]] = {pair: [] for pair in itertools.pairwise(results["checkpoints"])}
    for each in results["differences"]:
        pair = each["from"], each["to"]
        if pair in steps and each["metric"] in metrics and is_headline(results, each):
            steps[pair].append(each)
    ends = [abs(each[end]) for differences in steps.values() for each in differences for end in ("low", "high")]
    rows = [
        (old, new, [(tables.what(each), tables.figure_of(each, "value")) for each in differences])
        for (old, new), differences in steps.items()
    ]
    return {"reach": max(0.05, *ends), "steps": rows} if ends else {}


def is_headline(results: Results, difference: Record) -> bool:
    """Return whether a difference is under the setting of the headline table."""
    entry = results["checkpoints"][difference["to"]][difference["suite"]]
    if difference["suite"] == "envs":
        entry = entry[difference["part"]]
    if difference["suite"] == "math":  # its sources share their settings
        entry = next(iter(entry.values()))
    return entry.get("setting", "") == difference["setting"]


# ------------------------------------------------------------------------------------------- levels, before and after


def play_again(results: Results, row: Record, pictures: Pictures) -> Record:
    """Return the row of an evaluated episode for the browser, with pictures."""
    return with_pictures(row, evaluation_stage(results, row), pictures)


def first_levels(results: Results, transcripts: Sequence[Record], pictures: Pictures) -> Record | None:
    """Return the first test levels as the checkpoints played them: data for page.js."""
    names = list(results["checkpoints"])
    columns = [name for name in ON_TOP if name in names]
    if len(columns) < 2:
        columns = list(dict.fromkeys([names[0], *names[-2:]]))
    rows = []
    for env in results["baselines"]:
        by_column = [played(results, transcripts, name, env) for name in columns]
        levels = sorted(set.intersection(*map(set, by_column)))[:LEVELS]
        cells = [[play_again(results, by_level[level], pictures) for level in levels] for by_level in by_column]
        if levels and any("frames" in cell for column in cells for cell in column):
            shares = [percent(results["checkpoints"][name]["envs"][env]["success"]) for name in columns]
            rows.append({"title": readable(env), "shares": shares, "cells": cells})
    return {"columns": [ON_TOP.get(name, name) for name in columns], "rows": rows} if rows else None


def level_pairs(
    results: Results, transcripts: Sequence[Record], step: tuple[str, str] | None, pictures: Pictures
) -> tuple[Record, list[list[Record]]]:
    """Return how many levels both, one or none of two checkpoints solved, and pairs of episodes.

    The first value refers to the pairs by their places. step: the two checkpoints.
    """
    envs, pairs = [], list[list[Record]]()
    names = step or ("", "")
    for env in results["baselines"] if step else ():
        before, after = (played(results, transcripts, name, env) for name in names)
        kinds: dict[tuple[bool, bool], tuple[str, list[int]]] = {  # by who solved it: before, after
            (False, True): (f"Solved by {names[1]} alone", []),
            (True, False): (f"Solved by {names[0]} alone", []),
            (False, False): ("Solved by neither", []),
            (True, True): ("Solved by both", []),
        }
        for number in (number for number in before if number in after):
            kinds[before[number]["success"], after[number]["success"]][1].append(number)
        counts = ", ".join(f"{len(numbers)} {title[0].lower()}{title[1:]}" for title, numbers in kinds.values())
        blocks = []
        for title, numbers in list(kinds.values())[:3]:
            few = numbers[:LEVELS]
            blocks.append((title, [(number, len(pairs) + place) for place, number in enumerate(few)]))
            pairs += [[play_again(results, side[number], pictures) for side in (before, after)] for number in few]
        envs.append((readable(env), sum(len(numbers) for _, numbers in kinds.values()), counts, blocks))
    return ({"before": names[0], "after": names[1], "envs": envs} if envs else {}), pairs


# ------------------------------------------------------------------------------------------------- answers, facts


def answers(results: Results, transcripts: Sequence[Record]) -> list[tuple[Any, ...]]:
    """Return (title, prompt, expected answer, [(row, opening, rest)]) of the first prompts of each part."""
    samples = []
    titles = {"math": "Math", "recall": "Recall", "instructions": "Instructions", "repetition": "Open question"}
    for suite, title in titles.items():
        entry = next(iter(results["checkpoints"].values())).get(suite)
        entry = next(iter(entry.values())) if entry and suite == "math" else entry
        rows_by_item: dict[tuple[str, int], list[Record]] = {}
        for row in transcripts:
            if row["suite"] == suite and entry and row["setting"] == entry["setting"] and row["index"] < SAMPLES:
                rows_by_item.setdefault((row["part"], row["index"]), []).append(row)
        for (part, _), rows in rows_by_item.items():
            words = f"{title}, {_spaced(part)}" if part else title
            answers_shown = [(row, *folded(shorten(legible(row["text"])))) for row in rows]
            samples.append((words, rows[0]["messages"], rows[0].get("answer"), answers_shown))
    return samples


def evaluated_answers(results: Results, transcripts: Sequence[Record]) -> list[Record]:
    """Return the answers of the evaluation to questions and own prompts, for the browser, by checkpoint and then suite.

    They are those under the headline settings, without crashed ones. Games are left out, unless they have tools or
    there is nothing else.
    """
    envs = {env.get("label") or env["name"]: env for env in value_at(results["config"], "suites.envs.envs") or ()}
    rows: dict[str, list[Record]] = {name: [] for name in results["checkpoints"]}
    for row in transcripts:
        entry = results["checkpoints"].get(row["checkpoint"], {}).get(row["suite"], {})
        if row["suite"] in ("math", "envs"):
            entry = entry.get(row["source"] if row["suite"] == "math" else row["part"], {})
        if row["suite"] not in ("math", "recall", "envs") or row.get("crashed") or not entry:
            continue
        if entry.get("setting", "") == row["setting"]:
            rows[row["checkpoint"]].append(row)
    every = [row for part in rows.values() for row in part]
    asked = [row for row in every if row["suite"] != "envs" or _is_answered(envs.get(row["part"], {}))]
    return [browser_row(row) | {"suite": row["suite"]} for row in asked or every]


def has_answers(results: Results) -> bool:
    """Return whether an environment of the evaluation asks own prompts or has tools."""
    return any(map(_is_answered, value_at(results["config"], "suites.envs.envs") or ()))


def has_programs(results: Results) -> bool:
    """Return whether agent programs were evaluated."""
    return any(value_at(env, "options.agent") for env in value_at(results["config"], "suites.envs.envs") or ())


def first_answers(rows: Sequence[Record]) -> list[Record]:
    """Return the first MOST_ANSWERS of each checkpoint, in the same order."""
    counts: Counter[str] = Counter()
    shown = list[Record]()
    for row in rows:
        counts[row["from"]] += 1
        if counts[row["from"]] <= MOST_ANSWERS:
            shown.append(row)
    return shown


def _is_answered(env: Record) -> bool:
    return env.get("name") == "prompts" or bool(env.get("tools"))


def commands(results: Results, folder: Path) -> list[tuple[str, str]]:
    """Return (purpose, command) of the next commands, ready to copy."""
    places = [results["config"]["checkpoints"][name] for name in results["checkpoints"]]
    local = [place for place in places if isinstance(place, str)]  # the others are endpoints
    chat = command("inference_with_improved_settings")
    if results["config"].get("goals"):  # the models of the quickstart need other presets
        chat += " --config configs/quickstart/chat.yaml"
    chat += f" {shlex.quote(f'model.name_or_path={local[-1]}' if local else 'model.name_or_path=MODEL')}"
    played = results["baselines"] if tables.task_words(results).level == "level" else ()  # prompts are not played
    beside = f" --beside {shlex.quote(local[-2])}" if len(local) > 1 else ""
    return [
        ("Talk to the result", chat),
        ("In the browser" + (", beside the checkpoint before" if beside else ""), f"{chat} --web{beside}"),
        ("The same question under each preset", f'{chat} --compare --prompt "Tell me about the old garden."'),
        *((f"Watch it play {_spaced(name)}", f"{chat} --play {name}") for name in played),
        ("All answers and episodes, with filters", f"posttrain report {folder / 'transcripts.jsonl'}"),
        ("Beside another run, with a verdict", f"posttrain report {folder} ANOTHER_RUN"),
        ("Make this page again", f"posttrain report {folder}"),
        ("The reference run, on a GPU with a real model", command("train_phase1_sft")),
    ]


def provenance(results: Results) -> dict[str, Any]:
    config = results["config"]
    knobs = ("temperature", "top_k", "top_p", "repetition_penalty")
    return {
        "Settings": "; ".join(
            f"{setting['name']}: " + ", ".join(f"{knob.replace('_', ' ')} {setting[knob]:g}" for knob in knobs)
            for setting in config["settings"]
        ),
        "Intervals": "95 %: Wilson for shares, bootstrap over items for repetition; those of paired differences hold "
        "zero where an exact test (McNemar's, sign flips) does not reject it, and those of the headline's changes hold "
        "together (Bonferroni)",
        "Repetition": "seq-rep-4 on token ids without the stop token: 1 - distinct 4-grams / all 4-grams",
        "Commit": results["commit"] or "not a git checkout",
        "Seed": config["seed"],
        "Hardware": config["hardware"] or "not stated",
        "Versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }
