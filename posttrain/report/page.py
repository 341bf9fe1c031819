"""What does a person see first?  report.html, section by section, and transcripts.html, from the files of a run."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posttrain import files
from posttrain.metrics import Interval
from posttrain.report import tables, training_log, verdict
from posttrain.report.episodes import Pictures, evaluation_stage, with_pictures
from posttrain.report.rendering import DAMAGED, TEMPLATES, render
from posttrain.report.tables import NOT_ASKED, Column, Results, percent, readable, span
from posttrain.report.verdict import Comparison
from posttrain.types import Record, UserError, one_line

OPEN = ("phases", "results")  # sections that are not folded
LEVELS = 4  # shown of each kind in each environment, the first one at once and the others on request
ON_TOP = {"base": "base model", "phase2": "SFT + DPO", "phase3": "SFT + DPO + RL"}  # where checkpoints are called so
SAMPLES = 2  # prompts shown of each part
SHOWN_CHARACTERS = 420  # of one answer
OPENING_CHARACTERS = 160  # of an answer, shown before it is unfolded
Steps = Mapping[tuple[str, str], Sequence[Comparison]]  # each checkpoint against the one before it


def build(folder: Path) -> Path:
    """Write report.html beside results.json and return its path."""
    folder = Path(folder)
    results, transcripts = read(folder)
    name, pictures = folder.resolve().name, Pictures()
    try:
        top = first_levels(results, transcripts, pictures)
        sections, episodes = _sections(results, transcripts, folder, pictures)
        html = render(
            "report.html.j2",
            f"{name}: what each phase changed",
            {"top": top, **episodes, "pictures": pictures.coded},
            *("player.js", "viewer.js", "charts.js", "page.js"),
            name=name,
            checkpoints=list(results["checkpoints"]),
            sections=[(f"s{number}", *each) for number, each in enumerate(sections) if each[-1]],
            pictured=top is not None,
            colour=partial(tables.colour, results),
            OPEN=OPEN,
            SAMPLES=SAMPLES,
        )
    except DAMAGED as error:
        raise UserError(f"{_damaged(folder)} (found {one_line(error)})") from error
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


def build_transcripts(file: Path) -> Path:
    """Write transcripts.html beside a transcripts.jsonl, with its name, and return its path.

    Episodes are played again where a run_config.yaml or results.json beside the file says how.
    """
    if not file.is_file():
        raise UserError(f"There is no file {file}. Name a transcripts.jsonl of phase 3 or of evaluate_model.py.")
    pictures = Pictures()
    found = training_log.recorded(file, pictures)
    if not found:
        raise UserError(f"{file} holds no whole row: there is no episode to show.")
    folder = file.resolve().parent.name
    data = {"rows": found, "pictures": pictures.coded}
    scripts = ("player.js", "viewer.js", "transcripts.js")
    page = {"folder": folder, "file": file.name, "count": len(found)}
    path = file.with_suffix(".html")
    path.write_text(render("transcripts.html.j2", f"{folder}: transcripts", data, *scripts, **page), encoding="utf-8")
    return path


def markdown(results: Results) -> str:
    """Return results.md: the headline table, what changed from phase to phase, players, all settings, goals."""
    columns = tables.columns(results)
    rows = []
    for name, entry in results["checkpoints"].items():
        figures = (column.get(entry) for column in columns)
        rows.append([name, *(f"{percent(each.value)} ({span(each)})" if each else NOT_ASKED for each in figures)])
    differences = (
        [
            *(each["from"], each["to"], tables.what(each), each["setting"]),
            *(f"{each['before']:.3f}", f"{each['after']:.3f}", f"{each['value']:+.3f}"),
            *(f"{each['low']:+.3f} to {each['high']:+.3f}", each["n"]),
        ]
        for each in results["differences"]
    )
    settings = tables.every_setting(results)
    players = {readable(env): [_player(*each) for each in found.items()] for env, found in results["baselines"].items()}
    goals = results.get("goals") or ()
    text = TEMPLATES.get_template("results.md.j2").render(
        headline=(["checkpoint", *(f"{column.title} ({column.note})" for column in columns)], rows),
        failed=results.get("failed", {}).items(),
        differences=differences,
        baselines=players.items(),
        settings=[(*where, percent(figure.value), span(figure), n) for *where, figure, n in settings],
        benchmarks=list(tables.benchmark_rows(results)),
        goals=[(each["phase"], each["goal"], each["measured"], "yes" if each["reached"] else "no") for each in goals],
    )
    return text.strip()


def _player(name: str, found: Record) -> list[str]:
    success = percent(found["success"])
    if "low" in found:
        success += f" ({span(tables.figure_of(found, 'success'))})"
    counts = ", ".join(f"{word} {count}" for word, count in found.get("failures", {}).items())
    return [name, success, f"{found['return']:.2f}" if "return" in found else "", counts]


def _sections(
    results: Results, transcripts: list[Record], folder: Path, pictures: Pictures
) -> tuple[list[tuple[str, str, Any]], Record]:
    """Return (title, macro of sections.html.j2, what it shows) of each section, and the episodes for page.js.

    A section that has nothing to show is left out.
    """
    folders = training_log.phase_folders(results, folder)
    steps = verdict.steps(folder, results, transcripts)
    same_level, pairs = levels(results, transcripts, pictures)
    recorded = training_log.episodes(folders, pictures)
    sections = [
        ("In one sentence each", "phases", phases(steps)),
        ("Results", "results", headline(results, steps)),
        ("Goals", "goals", results.get("goals")),
        ("The environments, beside other players", "environments", environments(results)),
        ("The same level, before and after", "levels", same_level),
        ("Episodes recorded while training", "recorded", bool(recorded)),
        ("Learning curves", "curves", training_log.curves(results, folders)),
        ("Samples", "answers", answers(results, transcripts)),
        ("The data of phases 1 and 2", "data", training_log.data(folders)),
        ("What it cost", "cost", training_log.cost(results, folders)),
        ("Every paired difference", "differences", differences(results)),
        ("Every sampling setting", "settings", list(tables.every_setting(results))),
        ("Standard benchmarks", "benchmarks", list(tables.benchmark_rows(results))),
        ("What to type next", "commands", commands(results, folder)),
        ("How this was measured", "provenance", provenance(results)),
    ]
    return sections, {"pairs": pairs, "recorded": recorded}


def read(folder: Path) -> tuple[Results, list[Record]]:
    """Return results.json and transcripts.jsonl; UserError where they are not what the evaluator writes."""
    for file in (folder / "results.json", folder / "transcripts.jsonl"):
        if not file.is_file():
            raise UserError(
                f"{file} does not exist, so there is nothing to report. `python evaluate_model.py "
                f"output_dir={folder}` writes it."
            )
    remedy = f"Measure again: python evaluate_model.py output_dir={folder} --overwrite"
    results = files.read_json(folder / "results.json", remedy)
    transcripts = files.read_json_lines(folder / "transcripts.jsonl", remedy, appended=False)
    parts = {"checkpoints": dict, "differences": list, "baselines": dict, "config": dict}
    whole = all(isinstance(results.get(part), kind) for part, kind in parts.items()) and results["checkpoints"]
    torn = not transcripts and (folder / "transcripts.jsonl").stat().st_size > 0
    if torn or not whole:
        raise UserError(_damaged(folder))
    return results, transcripts


def _damaged(folder: Path) -> str:
    return (
        f"The files in {folder} are damaged or not what evaluate_model.py writes. Measure again: "
        f"python evaluate_model.py output_dir={folder} --overwrite"
    )


# ------------------------------------------------------------------------------------------------------- figures


def phases(steps: Steps) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return (new, old, [(verdict, figures)]): what each phase made better, what worse, and what nobody can tell."""
    found = []
    for (old, new), compared in steps.items():
        words: dict[str, list[str]] = {"better": [], "worse": [], "cannot tell": []}
        for each in compared:
            title = each.column.title
            before, after = (percent(figure.value) for figure in each.values)
            if each.verdict in words:
                words[each.verdict].append(title if each.verdict == "cannot tell" else f"{title} ({before} → {after})")
            for kind, parts in each.changed_parts.items():
                for part in parts:
                    before, after = map(percent, part.values)
                    words[kind].append(f"{title}: {part.title} ({before} → {after})")
        if any(words.values()):
            found.append((new, old, [(kind, listed(titles)) for kind, titles in words.items() if titles]))
    return found


def listed(words: list[str]) -> str:
    """Return a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def headline(results: Results, steps: Steps) -> Record:
    """Return the headline table, the checkpoints that could not be measured, and math by kind of problem."""
    entries = results["checkpoints"]
    rows = []
    for column in tables.columns(results):
        figures = {name: column.get(entry) for name, entry in entries.items()}
        cells = [figure and (figure, change(steps, name, column), "") for name, figure in figures.items()]
        rows.append((column.title, about(results, column), cells))
    return {
        "heads": [(name, tables.colour(results, name)) for name in entries],
        "rows": rows,
        "failed": results.get("failed", {}).items(),
        "math": math_parts(results),
    }


def about(results: Results, column: Column) -> list[str]:
    """Return what a figure is, which way is better, how many items it is of, and how they were sampled."""
    found = column.found(next(entry for entry in results["checkpoints"].values() if column.suite in entry))
    note = "levels solved" if column.suite == "envs" else column.note.removesuffix(", lower is better")
    better = "lower is better" if tables.less_is_better(column.metric) else "higher is better"
    items = f"{found.get('n', found.get('episodes'))} items"
    return list(filter(None, (note, better, items, column.setting and setting_of(column.setting))))


def setting_of(name: str) -> str:
    """Return what a column says of its sampling setting; `greedy` samples nothing."""
    return "greedy" if name == "greedy" else f"sampling setting “{name}”"


def change(steps: Steps, name: str, column: Column) -> Comparison | None:
    """Return how a figure changed since the checkpoint before."""
    compared = (each for (_, new), found in steps.items() if new == name for each in found)
    return next((each for each in compared if each.column == column), None)


def math_parts(results: Results) -> list[tuple[str, list[str], list[tuple[str, list[tuple[str, Interval, Any]]]]]]:
    """Return (source, parts, [(checkpoint, [(part, figure, n)])]) of each source of math that has several parts."""
    found = []
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
        found.append((tables.math_title(source), [*map(_spaced, first["parts"]), "together"], rows))
    return found


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def environments(results: Results) -> list[tuple[Any, ...]]:
    """Return (title, episodes, levels, setting, players, checkpoints), the last two as (name, success, note)."""
    found = []
    for env, players in results["baselines"].items():
        entries = {name: entry["envs"][env] for name, entry in results["checkpoints"].items()}
        others = [(name, tables.figure_of(one, "success"), failures(one)) for name, one in players.items()]
        ours = []
        for name, one in entries.items():
            notes = [failures(one), f"{one['turns']:.1f} turns", f"{percent(one['invalid_turns'])} invalid turns"]
            notes += [f"{one['crashed']} crashed"] if one["crashed"] else []
            ours.append((name, tables.figure_of(one, "success"), ", ".join(filter(None, notes))))
        first = next(iter(entries.values()))
        setting = setting_of(first["setting"])
        found.append((readable(env), first["episodes"], first["levels"], setting, others, ours))
    return found


def failures(found: Record) -> str:
    return ", ".join(f"{word} {percent(n / found['episodes'])}" for word, n in found.get("failures", {}).items())


def differences(results: Results) -> Record:
    """Return paired differences between neighbours under the headline settings, and the reach of their scale."""
    metrics = ("accuracy", "success", "failed", "equal_length")
    steps: dict[tuple[str, str], list[Record]] = {pair: [] for pair in itertools.pairwise(results["checkpoints"])}
    for each in results["differences"]:
        pair = each["from"], each["to"]
        if pair in steps and each["metric"] in metrics and is_headline(results, each):
            steps[pair].append(each)
    ends = [abs(each[end]) for found in steps.values() for each in found for end in ("low", "high")]
    rows = [
        (old, new, [(tables.what(each), tables.figure_of(each, "value")) for each in found])
        for (old, new), found in steps.items()
    ]
    return {"reach": max(0.05, *ends), "steps": rows} if ends else {}


def is_headline(results: Results, difference: Record) -> bool:
    entry = results["checkpoints"][difference["to"]][difference["suite"]]
    if difference["suite"] == "envs":
        entry = entry[difference["part"]]
    if difference["suite"] == "math":  # its sources share their settings
        entry = next(iter(entry.values()))
    return entry.get("setting", "") == difference["setting"]


# ------------------------------------------------------------------------------------------- levels, before and after


def played(results: Results, transcripts: Sequence[Record], name: str, env: str) -> dict[int, Record]:
    """Return level -> a checkpoint's episode under the setting of the headline table, without those that crashed."""
    setting = results["checkpoints"][name]["envs"][env]["setting"]
    wanted = (name, "envs", env, setting)
    return {
        row["index"]: row
        for row in transcripts
        if (row["checkpoint"], row["suite"], row["part"], row["setting"]) == wanted and not row["crashed"]
    }


def shown(results: Results, row: Record, pictures: Pictures) -> Record:
    return with_pictures(row, evaluation_stage(results, row), pictures)


def first_levels(results: Results, transcripts: Sequence[Record], pictures: Pictures) -> Record | None:
    """Return the first test levels, which nobody chose, as the model played them before and after: data for page.js."""
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
    return {"columns": [ON_TOP.get(name, name) for name in columns], "rows": rows} if rows else None


def levels(results: Results, transcripts: Sequence[Record], pictures: Pictures) -> tuple[Record, list[list[Record]]]:
    """Return how many levels the last two checkpoints solved, together and alone, with some of each kind.

    The second value holds pairs of episodes; the first names their places in it.
    """
    envs, pairs = [], list[list[Record]]()
    names = list(results["checkpoints"])[-2:]
    for env in results["baselines"] if len(names) > 1 else ():
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
            pairs += [[shown(results, side[number], pictures) for side in (before, after)] for number in few]
        envs.append((readable(env), sum(len(numbers) for _, numbers in kinds.values()), counts, blocks))
    return ({"before": names[0], "after": names[1], "envs": envs} if envs else {}), pairs


# ------------------------------------------------------------------------------------------------- answers, facts


def answers(results: Results, transcripts: Sequence[Record]) -> list[tuple[Any, ...]]:
    """Return (title, prompt, expected answer, [(row, opening, rest)]) of the first prompts of each part."""
    found = []
    for suite, title in (("math", "Math"), ("recall", "Recall"), ("repetition", "Open question")):
        entry = next(iter(results["checkpoints"].values())).get(suite)
        entry = next(iter(entry.values())) if entry and suite == "math" else entry
        asked: dict[tuple[str, int], list[Record]] = {}
        for row in transcripts:
            if row["suite"] == suite and entry and row["setting"] == entry["setting"] and row["index"] < SAMPLES:
                asked.setdefault((row["part"], row["index"]), []).append(row)
        for (part, _), rows in asked.items():
            words = f"{title}, {_spaced(part)}" if part else title
            given = [(row, *folded(cut(row["text"]))) for row in rows]
            found.append((words, rows[0]["messages"], rows[0].get("answer"), given))
    return found


def cut(words: str) -> str:
    """Return the beginning of a long text; line breaks become a sign, since some models write a page of them."""
    words = words.replace("\n", " ↵ ")
    return words if len(words) <= SHOWN_CHARACTERS else words[:SHOWN_CHARACTERS] + " …"


def folded(words: str) -> tuple[str, str]:
    """Return a text and what of it is unfolded on request: long answers of an untrained model would fill the page."""
    return words[:OPENING_CHARACTERS], words[OPENING_CHARACTERS:]


def commands(results: Results, folder: Path) -> list[tuple[str, str]]:
    """Return (purpose, command) of what a reader would type next, ready to copy."""
    places = [results["config"]["checkpoints"][name] for name in results["checkpoints"]]
    local = [place for place in places if isinstance(place, str)]  # the others are endpoints
    chat = "python inference_with_improved_settings.py"
    if results["config"].get("goals"):  # those of the quickstart, whose models want other presets
        chat += " --config configs/quickstart/chat.yaml"
    chat += f" {shlex.quote(f'model.name_or_path={local[-1]}' if local else 'model.name_or_path=MODEL')}"
    beside = f" --beside {shlex.quote(local[-2])}" if len(local) > 1 else ""
    return [
        ("Talk to the result", chat),
        ("In the browser" + (", beside its predecessor" if beside else ""), f"{chat} --web{beside}"),
        ("The same question under each preset", f'{chat} --compare --prompt "Tell me about the old garden."'),
        *((f"Watch it play {_spaced(name)}", f"{chat} --play {name}") for name in results["baselines"]),
        ("All answers and episodes, with filters", f"python -m posttrain.report {folder / 'transcripts.jsonl'}"),
        ("Beside another run, with a verdict", f"python -m posttrain.report {folder} ANOTHER_RUN"),
        ("Make this page again", f"python -m posttrain.report {folder}"),
        ("The reference run, on a GPU with a real model", "python train_phase1_sft.py"),
    ]


def provenance(results: Results) -> dict[str, Any]:
    """Return how the figures came about, fact by fact."""
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
