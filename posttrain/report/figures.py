"""What was measured?  The sections with figures: the headline table, goals, differences, environments, settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from posttrain.metrics import Interval
from posttrain.report import charts
from posttrain.report.markup import badge, chip, table, text
from posttrain.report.tables import (
    BENCHMARKS,
    NOT_ASKED,
    Column,
    Results,
    benchmark_rows,
    colour,
    columns,
    every_setting,
    figure_of,
    less_is_better,
    math_title,
    percent,
    points,
    readable,
    span,
    what,
)
from posttrain.report.verdict import Comparison
from posttrain.types import Record

KINDS = {  # the colour of a verdict
    "better": "good", "better in part": "good", "worse": "bad", "worse in part": "bad",
    "mixed": "flat", "cannot tell": "flat",
}  # fmt: skip
Steps = Mapping[tuple[str, str], Sequence[Comparison]]  # each checkpoint against the one before it


def headline(results: Results, steps: Steps) -> str:
    """The table: figures down, checkpoints across; each with its interval and what changed since the one before."""
    names = list(results["checkpoints"])
    head = "<th></th>" + "".join(f"<th>{chip(results, name)}</th>" for name in names)
    body = ""
    for column in columns(results):
        body += f'<tr><th scope="row">{text(column.title)}<small>{about(results, column)}</small></th>'
        for name in names:
            figure = column.get(results["checkpoints"][name])
            if figure is None:
                body += f'<td data-label="{text(name)}"><small>{NOT_ASKED}</small></td>'
                continue
            body += f'<td data-label="{text(name)}"><b>{percent(figure.value)}</b><small>{span(figure)}</small>'
            body += charts.bar(figure, colour(results, name)) + change(steps, name, column) + "</td>"
        body += "</tr>"
    failed = "".join(
        f"<p>{chip(results, name)} {badge('no', 'not measured')} <small>{text(reason)}</small></p>"
        for name, reason in results.get("failed", {}).items()
    )
    note = (
        "Large: the share. Beside it, and as the band: where it lies at 95 %, for one checkpoint by itself. Below: the "
        "change since the checkpoint before in points, item by item on the same prompts and levels, with its interval. "
        "The intervals of one step hold together at 95 %, for all figures. They decide: <i>cannot tell</i> where one "
        "holds zero. A kind of problem that changed within such a figure is named, at 95 % by itself."
    )
    return f'{table(head, body, "headline cards")}{failed}<p class="quiet">{note}</p>' + math_parts(results)


def about(results: Results, column: Column) -> str:
    """What a figure is, which way is better, how many items it is of, and how they were sampled."""
    found = column.found(next(entry for entry in results["checkpoints"].values() if column.suite in entry))
    note = "levels solved" if column.suite == "envs" else column.note.removesuffix(", lower is better")
    better = "lower is better" if less_is_better(column.metric) else "higher is better"
    items = f"{found.get('n', found.get('episodes'))} items"
    sampled = setting_of(column.setting) if column.setting else ""
    return "<br>".join(map(text, filter(None, (note, better, items, sampled))))


def phases(results: Results, steps: Steps) -> str:
    """One sentence for each phase: what it made better, what worse, and what nobody can tell."""
    items = ""
    for (old, new), compared in steps.items():
        found: dict[str, list[str]] = {"better": [], "worse": [], "cannot tell": []}
        for each in compared:
            title = text(each.column.title)
            before, after = (percent(figure.value) for figure in each.values)
            if each.verdict in found:
                found[each.verdict].append(title if each.verdict == "cannot tell" else f"{title} ({before} → {after})")
            for kind, parts in each.changed_parts.items():
                for part in parts:
                    before, after = map(percent, part.values)
                    found[kind].append(f"{title}: {text(part.title)} ({before} → {after})")
        parts = [f'<b class="{KINDS[words]}">{words}</b> in {listed(found[words])}' for words in found if found[words]]
        if parts:
            items += f"<li>{chip(results, new)} against {chip(results, old)}: {'; '.join(parts)}.</li>"
    return items and f'<ul class="phases">{items}</ul>'


def listed(words: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def setting_of(name: str) -> str:
    """What a column says of its sampling setting; `greedy` samples nothing."""
    return "greedy" if name == "greedy" else f"sampling setting “{name}”"


def change(steps: Steps, name: str, column: Column) -> str:
    """How a figure changed since the checkpoint before, in words that need no arrow."""
    for (_, new), compared in steps.items():
        for each in compared:
            if new == name and each.column == column:
                return shown_change(each)
    return ""


def shown_change(compared: Comparison, more: str = "") -> str:
    """+10.0 (+2.1 to +17.9), better; `more` is said of the verdict."""
    low, high = points(compared.change.low), points(compared.change.high)
    figures = f"{points(compared.change.value)} ({low} to {high})"
    changed = [part for parts in compared.changed_parts.values() for part in parts]
    for title, _, change in changed:
        more += f"<br>{text(title)} {points(change.value)} ({points(change.low)} to {points(change.high)})"
    return f'<i class="change {KINDS[compared.verdict]}">{figures}<br>{compared.verdict}{more}</i>'


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
                body += f"<small>{span(figure)}, n {text(found['n'])}</small></td>"
            body += "</tr>"
        title = f"<summary>{text(math_title(source))}, by kind of problem</summary>"
        blocks += f"<details>{title}{table(head + '<th>together</th>', body, 'parts cards')}</details>"
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
                figure = figure_of(difference, "value")
                body += (
                    f'<tr><td>{text(what(difference))}</td><td class="num"><b>{points(figure.value)}</b>'
                    f" <span>{points(figure.low)} to {points(figure.high)}</span></td>"
                    f'<td class="forest">{charts.forest(figure, reach)}</td></tr>'
                )
        blocks += f"<h3>{chip(results, old)} → {chip(results, new)}</h3>"
        blocks += f'<div class="wide"><table class="diff">{body}</table></div>'
    return (
        "<p>Percentage points, item by item on the same prompts, levels and seeds. Each interval is at 95 % by itself: "
        "one in twenty leaves zero out by chance, so these are no verdicts. “At equal length” cuts both answers to the "
        f"shorter one, so that nobody wins by falling silent. The scale runs from {points(-reach)} to "
        f"{points(reach)}.</p>{blocks}"
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
            f'<div class="half"><h3>{text(readable(env))}</h3><p class="quiet">{text(found["episodes"])} episodes on '
            f"{text(found['levels'])} test levels, {text(setting_of(found['setting']))}</p>"
            f'<table class="envs">{rows}</table></div>'
        )
    return blocks and f'<div class="halves">{blocks}</div>'


def env_row(label: str, figure: Interval, paint: str, note: str) -> str:
    return (
        f'<tr><td>{label}</td><td class="num"><b>{percent(figure.value)}</b></td>'
        f"<td>{charts.bar(figure, paint)}<small>{text(note).replace(' %', '&nbsp;%')}</small></td></tr>"
    )


def failures(found: Record) -> str:
    return ", ".join(f"{word} {percent(n / found['episodes'])}" for word, n in found.get("failures", {}).items())


def settings(results: Results) -> str:
    rows = "".join(
        f"<tr><th>{chip(results, name)} {text(figure)}</th><td>{text(setting or 'none')}</td>"
        f'<td class="num"><b>{percent(value.value)}</b></td><td class="num">{span(value)}</td>'
        f'<td class="num">n {text(n)}</td></tr>'
        for name, figure, setting, value, n in every_setting(results)
    )
    head = "<th></th><th>setting</th><th>figure</th><th>95 %</th><th>n</th>"
    return f"<details><summary>All figures under every setting</summary>{table(head, rows, 'every cards')}</details>"


def benchmarks(results: Results) -> str:
    rows = ""
    for row in benchmark_rows(results):
        about = f"version {row.version}, {row.how}"
        rows += f"<tr><th>{text(row.checkpoint)}: {text(row.task)}<small>{text(about)}</small></th>"
        rows += f'<td>{text(row.metric)}</td><td class="num"><b>{text(row.figure)}</b></td>'
        rows += f'<td class="num">n {text(row.n)}</td></tr>'
    head = "<th></th><th>metric</th><th>value ± standard error</th><th>n</th>"
    return f'<p class="quiet">{BENCHMARKS}</p>{table(head, rows, "every cards")}' if rows else ""
