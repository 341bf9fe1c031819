"""What was measured?  The sections with figures: the headline table, goals, differences, environments, settings."""

from __future__ import annotations

import itertools

from posttrain.report import charts
from posttrain.report.markup import badge, chip, table, text
from posttrain.report.tables import (
    Column,
    Figure,
    Results,
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
from posttrain.types import Record


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


def verdict(difference: Record) -> str:
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


def is_headline(results: Results, difference: Record) -> bool:
    entry = results["checkpoints"][difference["to"]][difference["suite"]]
    if difference["suite"] == "envs":
        entry = entry[difference["part"]]
    if difference["suite"] == "math":  # its sources share their settings
        entry = next(iter(entry.values()))
    return entry.get("setting", "") == difference["setting"]


def environments(results: Results) -> str:
    """The scripted policies and the expert of every environment, above the checkpoints."""
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


def failures(found: Record) -> str:
    return ", ".join(f"{word} {percent(n / found['episodes'])}" for word, n in found.get("failures", {}).items())


def settings(results: Results) -> str:
    rows = "".join(
        f"<tr><td>{chip(results, name)}</td><td>{text(figure)}</td><td>{text(setting or 'none')}</td>"
        f'<td class="num"><b>{percent(value.value)}</b></td><td class="num">{span(value)}</td>'
        f'<td class="num" data-label="n">{n}</td></tr>'
        for name, figure, setting, value, n in every_setting(results)
    )
    head = "<th></th><th></th><th>setting</th><th>figure</th><th>95 %</th><th>n</th>"
    return f"<details><summary>All figures under every setting</summary>{table(head, rows, 'every')}</details>"
