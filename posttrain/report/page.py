"""What does a person see first?  report.html, section by section, from the files of a run."""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from posttrain import files, runlog
from posttrain.report import charts
from posttrain.report.episodes import png, replay
from posttrain.report.tables import (
    Column,
    Figure,
    Results,
    Row,
    colour,
    columns,
    every_setting,
    figure_of,
    math_title,
    percent,
    points,
    readable,
    span,
    what,
)
from posttrain.types import UserError

SHOWN_CHARACTERS = 420  # of one answer
SAMPLES = 2  # prompts shown of each part
LEVELS = 4  # shown of each kind in each environment, the first one at once and the others on request
OPENING_CHARACTERS = 160  # of an answer, shown before it is unfolded
# Curves by title: (key in metrics.jsonl, label); `*` stands for the name of an environment.
CURVES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", (("loss", "training"), ("eval_loss", "held out"))),
    ("Next token right", (("mean_token_accuracy", "training"), ("eval_mean_token_accuracy", "held out"))),
    (
        "Reward accuracy, against the reference",
        (("rewards/accuracies", "training"), ("eval_rewards/accuracies", "held out")),
    ),
    ("Reward margin, against the reference", (("rewards/margins", "training"), ("eval_rewards/margins", "held out"))),
    ("Success, held-out levels", (("evaluation/*/success", "*"),)),
    ("Success while training", (("rollout/*/success", "*"),)),
    ("Std of the reward in a group", (("rollout/in_group_std", "mean over groups"),)),
    ("Groups whose rewards are all equal", (("rollout/zero_variance_groups", "share"),)),
    ("Entropy", (("policy/entropy", "of trained tokens"), ("entropy", "of trained tokens"))),
    ("Invalid turns", (("rollout/invalid_turns", "share"),)),
    ("Tokens per turn", (("rollout/response_tokens", "training"),)),
)


def build(folder: Path) -> Path:
    """Write report.html beside results.json and return its path."""
    folder = Path(folder)
    results, transcripts = read(folder)
    try:
        sections = _sections(results, transcripts, folder)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise UserError(f"{_damaged(folder)} (found {type(error).__name__}: {str(error)[:100]})") from error
    shown = [(f"s{number}", title, body) for number, (title, body) in enumerate(sections) if body]
    links = "".join(f'<a href="#{place}">{text(title)}</a>' for place, title, _ in shown)
    cards = "".join(f'<section id="{place}"><h2>{text(title)}</h2>{body}</section>' for place, title, body in shown)
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    name = folder.resolve().name
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(name)}: what each phase changed</title><style>{style}</style></head><body><main>"
        f'<header><p class="kicker">{text(name)}</p><h1>What each phase changed</h1>'
        f'<p class="lead">{text(" → ".join(results["checkpoints"]))}, on held-out questions and levels, the same for '
        f"every checkpoint. Intervals are at 95 %.</p><nav>{links}</nav></header>{cards}</main>"
        f"<script>{script}</script></body></html>\n"
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _sections(results: Results, transcripts: list[Row], folder: Path) -> list[tuple[str, str]]:
    """Title and body of each section; an empty body has nothing to show."""
    return [
        ("Results", headline(results)),
        ("Goals", goals(results)),
        ("What changed from phase to phase", differences(results)),
        ("The environments, beside other players", environments(results)),
        ("Before and after, on the same level", episodes(results, transcripts)),
        ("Learning curves", curves(results, folder)),
        ("Samples", samples(results, transcripts)),
        ("Every sampling setting", settings(results)),
        ("What to type next", commands(results, folder)),
        ("How this was measured", provenance(results)),
    ]


def read(folder: Path) -> tuple[Results, list[Row]]:
    """results.json and transcripts.jsonl; UserError when they are not what the evaluator writes."""
    for file in (folder / "results.json", folder / "transcripts.jsonl"):
        if not file.is_file():
            raise UserError(
                f"{file} does not exist, so there is nothing to report. `python evaluate_model.py "
                f"output_dir={folder}` writes it."
            )
    remedy = f"Measure again: python evaluate_model.py output_dir={folder} --overwrite"
    results = files.read_json(folder / "results.json", remedy)
    transcripts = files.read_json_lines(folder / "transcripts.jsonl", remedy)
    if not {"checkpoints", "differences", "baselines", "config"} <= set(results):
        raise UserError(_damaged(folder))
    return results, transcripts


def _damaged(folder: Path) -> str:
    return (
        f"The files in {folder} are damaged or not what evaluate_model.py writes. Measure again: "
        f"python evaluate_model.py output_dir={folder} --overwrite"
    )


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


# ------------------------------------------------------------------------------------------------------- sections


def headline(results: Results) -> str:
    """The table: checkpoints down, figures across, each with its interval; then math by part."""
    shown = columns(results)
    head = "<th></th>"
    for column in shown:
        sampled = f"<br>{text(setting_of(column.setting))}" if column.setting else ""
        head += f"<th>{text(column.title)}<small>{text(column.note)}{sampled}</small></th>"
    body = ""
    for name, entry in results["checkpoints"].items():
        body += f"<tr><th>{chip(results, name)}</th>"
        for column in shown:
            figure = column.get(entry)
            moved = change(results, name, column)
            drawn = charts.bar(figure, colour(results, name))
            label = f' data-label="{text(column.title)}"'
            body += f"<td{label}><b>{percent(figure.value)}</b>{moved}<small>{span(figure)}</small>{drawn}</td>"
        body += "</tr>"
    for name, reason in results.get("failed", {}).items():
        words = f"{badge('no', 'not measured')} <small>{text(reason)}</small>"
        body += f'<tr><th>{chip(results, name)}</th><td colspan="{len(shown)}">{words}</td></tr>'
    note = "▲ and ▼: points up or down from the checkpoint before, where the paired interval leaves zero out."
    return table(head, body, "headline") + f'<p class="quiet">{note}</p>' + math_parts(results)


def setting_of(name: str) -> str:
    """What a column says of its sampling setting; `greedy` samples nothing."""
    return "greedy" if name == "greedy" else f"sampling setting “{name}”"


def change(results: Results, name: str, column: Column) -> str:
    """How far a figure moved from the checkpoint before; nothing where that may be chance."""
    for old, new in itertools.pairwise(results["checkpoints"]):
        wanted = {"from": old, "to": new, "suite": column.suite, "part": column.part, "metric": column.metric}
        wanted["setting"] = column.setting
        for difference in results["differences"]:
            if new == name and wanted.items() <= difference.items():
                kind = verdict(difference)
                arrow = "▲" if difference["value"] > 0 else "▼"
                return f' <i class="{kind}">{arrow}{abs(100 * difference["value"]):.0f}</i>' if kind != "flat" else ""
    return ""


def verdict(difference: Row) -> str:
    """good, bad, or flat where the interval holds zero."""
    if difference["low"] <= 0 <= difference["high"]:
        return "flat"
    less_is_better = difference["metric"] in ("equal_length", "seq_rep_4", "failed")
    return "good" if (difference["value"] > 0) != less_is_better else "bad"


def math_parts(results: Results) -> str:
    """A source of math by kind of problem, where it has several: new questions, and operands never seen together."""
    blocks = ""
    for source, first in next(iter(results["checkpoints"].values())).get("math", {}).items():
        if len(first["parts"]) < 2:
            continue
        head = "<th></th>" + "".join(f"<th>{text(part.replace('_', ' '))}</th>" for part in first["parts"])
        body = ""
        for name, entry in results["checkpoints"].items():
            body += f"<tr><th>{chip(results, name)}</th>"
            for part, found in (*entry["math"][source]["parts"].items(), ("together", entry["math"][source])):
                figure, label = figure_of(found, "accuracy"), text(part.replace("_", " "))
                body += f'<td data-label="{label}"><b>{percent(figure.value)}</b>'
                body += f"<small>{span(figure)}, n {found['n']}</small></td>"
            body += "</tr>"
        blocks += f"<h3>{text(math_title(source))}, by kind of problem</h3>"
        blocks += table(head + "<th>together</th>", body, "parts")
    return blocks


def goals(results: Results) -> str:
    found = results.get("goals") or []
    items = ""
    for goal in found:
        mark = badge("yes", "✓ reached") if goal["reached"] else badge("no", "✗ not reached")
        words = f"{text(goal['goal'])}<small>{text(goal['measured'])}</small>"
        items += f"<li>{mark}{chip(results, goal['phase'])}<span>{words}</span></li>"
    reached = sum(goal["reached"] for goal in found)
    return items and f'<p>{reached} of {len(found)} reached.</p><ul class="goals">{items}</ul>'


def differences(results: Results) -> str:
    """Paired differences between neighbours under the headline settings, as intervals around zero."""
    neighbours = list(itertools.pairwise(results["checkpoints"]))
    metrics = ("accuracy", "success", "failed", "equal_length")
    shown = [
        difference
        for difference in results["differences"]
        if (difference["from"], difference["to"]) in neighbours
        and difference["metric"] in metrics
        and is_headline(results, difference)
    ]
    if not shown:
        return ""
    reach = max(0.05, *(abs(difference[end]) for difference in shown for end in ("low", "high")))
    blocks = ""
    for old, new in neighbours:
        body = ""
        for difference in shown:
            if (difference["from"], difference["to"]) == (old, new):
                figure, kind = figure_of(difference, "value"), verdict(difference)
                body += (
                    f'<tr><td>{text(what(difference))}</td><td class="num"><b class="{kind}">{points(figure.value)}</b>'
                    f" <span>{points(figure.low)} to {points(figure.high)}</span></td>"
                    f'<td class="forest">{charts.forest(figure, reach, kind)}</td></tr>'
                )
        blocks += f"<h3>{chip(results, old)} → {chip(results, new)}</h3>"
        blocks += f'<div class="wide"><table class="diff">{body}</table></div>'
    return (
        "<p>Percentage points, item by item on the same prompts, levels and seeds. Coloured where the interval leaves "
        "zero out: green is better, red is worse. “At equal length” cuts both answers to the shorter one, so that "
        f"nobody wins by falling silent. The scale runs from {points(-reach)} to {points(reach)}.</p>{blocks}"
    )


def is_headline(results: Results, difference: Row) -> bool:
    entry = results["checkpoints"][difference["to"]][difference["suite"]]
    if difference["suite"] == "envs":
        entry = entry[difference["part"]]
    if difference["suite"] == "math":  # its sources share their settings
        entry = next(iter(entry.values()))
    return entry.get("setting", "") == difference["setting"]


def environments(results: Results) -> str:
    """Every environment's players, weak ones and expert, above the checkpoints."""
    blocks = ""
    for env, players in results["baselines"].items():
        rows = ""
        for name, found in players.items():
            label = f'<span class="player">{text(name)}</span>'
            rows += env_row(label, figure_of(found, "success"), "var(--muted)", failures(found))
        for name, entry in results["checkpoints"].items():
            found = entry["envs"][env]
            notes = [failures(found), f"{found['turns']:.1f} turns", f"{percent(found['invalid_turns'])} invalid turns"]
            notes += [f"{found['crashed']} crashed"] if found["crashed"] else []
            note = ", ".join(filter(None, notes))
            rows += env_row(chip(results, name), figure_of(found, "success"), colour(results, name), note)
        found = next(iter(results["checkpoints"].values()))["envs"][env]
        blocks += (
            f'<div class="half"><h3>{text(readable(env))}</h3><p class="quiet">{found["episodes"]} episodes on '
            f"{found['levels']} test levels, {text(setting_of(found['setting']))}</p>"
            f'<table class="envs">{rows}</table></div>'
        )
    return blocks and f'<div class="halves">{blocks}</div>'


def env_row(label: str, figure: Figure, paint: str, note: str) -> str:
    return (
        f'<tr><td>{label}</td><td class="num"><b>{percent(figure.value)}</b></td>'
        f"<td>{charts.bar(figure, paint)}<small>{text(note).replace(' %', '&nbsp;%')}</small></td></tr>"
    )


def failures(found: Row) -> str:
    return ", ".join(f"{word} {percent(n / found['episodes'])}" for word, n in found.get("failures", {}).items())


def episodes(results: Results, transcripts: Sequence[Row]) -> str:
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


def level(results: Results, title: str, number: int, before: dict[int, Row], after: dict[int, Row]) -> str:
    """One level, as both checkpoints played it."""
    sides = "".join(episode(results, played[number]) for played in (before, after))
    head = f"{text(title)} <small>level {number}</small>"
    return f'<div class="level"><h4>{head}</h4><div class="halves">{sides}</div></div>'


def episode(results: Results, row: Row) -> str:
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


def curves(results: Results, folder: Path) -> str:
    """The curves of each phase from the metrics.jsonl beside its checkpoint."""
    blocks = ""
    for name, path in results["config"]["checkpoints"].items():
        places = [Path(path).parent / "metrics.jsonl", folder / name / "metrics.jsonl"]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            blocks += f'<h3>{chip(results, name)}</h3><p class="quiet">No metrics.jsonl beside {text(path)}.</p>'
            continue
        rows = runlog.read_metrics(file)
        drawn = "".join(charts.lines(title, series(rows, keys)) for title, keys in CURVES)
        drawn = drawn or f'<p class="quiet">{text(file)} holds no curve yet.</p>'
        blocks += f'<h3>{chip(results, name)}</h3><div class="charts">{drawn}</div>'
    return blocks


def series(rows: Sequence[Row], keys: Sequence[tuple[str, str]]) -> dict[str, charts.Line]:
    """label -> [(step, value), ...] of those of the keys that these rows have."""
    found: dict[str, charts.Line] = {}
    for row, (wanted, label) in itertools.product(rows, keys):
        for key, value in row.items():
            if matches(wanted, key) and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(key.split("/")[1] if label == "*" else label, []).append((row["step"], value))
    return {label.replace("_", " "): line for label, line in found.items()}


def matches(wanted: str, key: str) -> bool:
    """Whether a key is the wanted one, where `*` is one part of it: evaluation/*/success."""
    parts, given = wanted.split("/"), key.split("/")
    return len(parts) == len(given) and all(part in ("*", other) for part, other in zip(parts, given, strict=True))


def samples(results: Results, transcripts: Sequence[Row]) -> str:
    """The first prompts of each part, with every checkpoint's answer."""
    blocks = ""
    for suite, title in (("math", "Math"), ("recall", "Recall"), ("repetition", "Open question")):
        entry = next(iter(results["checkpoints"].values())).get(suite)
        entry = next(iter(entry.values())) if entry and suite == "math" else entry
        asked: dict[tuple[str, int], list[Row]] = {}
        for row in transcripts:
            if row["suite"] == suite and entry and row["setting"] == entry["setting"] and row["index"] < SAMPLES:
                asked.setdefault((row["part"], row["index"]), []).append(row)
        for (part, _), rows in asked.items():
            said = "".join(f'<p class="said {m["role"]}">{text(m["content"])}</p>' for m in rows[0]["messages"])
            if "answer" in rows[0]:
                said += f'<p class="quiet">expected: {text(rows[0]["answer"])}</p>'
            about = f"{title}, {part.replace('_', ' ')}" if part else title
            answers = "".join(answer(results, row) for row in rows)
            blocks += f'<div class="sample"><h4>{text(about)}</h4>{said}{answers}</div>'
    note = (
        f"The first {SAMPLES} of each part of the evaluation, not picked, sampled as for the table above. Every "
        "generation is in transcripts.jsonl."
    )
    return blocks and f'<p>{note}</p><div class="samples">{blocks}</div>'


def answer(results: Results, row: Row) -> str:
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


def settings(results: Results) -> str:
    rows = "".join(
        f"<tr><td>{chip(results, name)}</td><td>{text(figure)}</td><td>{text(setting or 'none')}</td>"
        f'<td class="num"><b>{percent(value.value)}</b></td><td class="num">{span(value)}</td>'
        f'<td class="num" data-label="n">{n}</td></tr>'
        for name, figure, setting, value, n in every_setting(results)
    )
    head = "<th></th><th></th><th>setting</th><th>figure</th><th>95 %</th><th>n</th>"
    return f"<details><summary>All figures under every setting</summary>{table(head, rows, 'every')}</details>"


def commands(results: Results, folder: Path) -> str:
    """What a reader would type next, ready to copy."""
    last = results["config"]["checkpoints"][list(results["checkpoints"])[-1]]
    chat = f"python inference_with_improved_settings.py model.name_or_path={last}"
    lines = [("Talk to the result", chat)]
    lines += [("The same question under both presets", f'{chat} --compare --prompt "Tell me about the old garden."')]
    lines += [(f"Watch it play {name.replace('_', ' ')}", f"{chat} --play {name}") for name in results["baselines"]]
    lines += [("Make this page again", f"python -m posttrain.report {folder}")]
    lines += [("The reference run, on a GPU with a real model", "python train_phase1_sft.py")]
    items = "".join(f"<li><span>{text(why)}</span><code>{text(command)}</code></li>" for why, command in lines)
    return f'<ul class="commands">{items}</ul>'


def provenance(results: Results) -> str:
    config = results["config"]
    knobs = ("temperature", "top_k", "top_p", "repetition_penalty")
    facts = {
        "Settings": "; ".join(
            f"{setting['name']}: " + ", ".join(f"{knob.replace('_', ' ')} {setting[knob]:g}" for knob in knobs)
            for setting in config["settings"]
        ),
        "Intervals": "95 %: Wilson for shares, bootstrap over items for repetition and paired differences",
        "Repetition": "seq-rep-4 on token ids without the stop token: 1 - distinct 4-grams / all 4-grams",
        "Commit": results["commit"] or "not a git checkout",
        "Seed": config["seed"],
        "Hardware": config["hardware"] or "not stated",
        "Versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }
    rows = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in facts.items())
    return f'<table class="facts">{rows}</table>'
