"""Which figures stand where?  Headline table, goals, results.md, terminal and plots, from results.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from posttrain import runlog

Results = dict[str, Any]  # results.json as evaluate_model.py writes it
Row = dict[str, Any]

MATH_TITLES = {"embedded": "Math (toy sums)", "gsm8k": "GSM8K", "math500": "MATH-500"}
COLOURS = ("#8b8f98", "#2f7fd1", "#d9822b", "#1f9d6b", "#a45bd1", "#c94f6d")  # one per checkpoint, in order


# ------------------------------------------------------------------------------------------------------- the table


class Figure(NamedTuple):
    """Figure(value=0.62, low=0.55, high=0.68)"""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Column:
    """Column("GSM8K", "answers right", "math", "gsm8k", "accuracy", "greedy"): a figure of every checkpoint."""

    title: str
    note: str
    suite: str
    part: str  # the environment, or where the questions of math come from
    metric: str
    setting: str

    def get(self, entry: Row) -> Figure:
        """The figure, from a checkpoint's part of results.json."""
        found = entry[self.suite]
        return figure_of(found[self.part] if self.part else found, self.metric)


def columns(results: Results) -> list[Column]:
    """The headline figures that this run has, in the order of the phases."""
    first = next(iter(results["checkpoints"].values()))

    found = []
    for source, entry in first.get("math", {}).items():
        found.append(Column(math_title(source), "answers right", "math", source, "accuracy", entry["setting"]))
    for suite, title, note, metric in (
        ("recall", "Recall", "earlier turns remembered", "accuracy"),
        ("preferences", "Preferences", "ranking accuracy: pairs whose chosen answer is likelier", "accuracy"),
        ("repetition", "Repetition", "repeated 4-grams, lower is better", "seq_rep_4"),
    ):
        if suite in first:
            found.append(Column(title, note, suite, "", metric, first[suite].get("setting", "")))
    for env, entry in first.get("envs", {}).items():
        note = f"success in {entry['episodes']} episodes"
        found.append(Column(readable(env), note, "envs", env, "success", entry["setting"]))
    return found


def math_title(source: str) -> str:
    """embedded -> Math (toy sums), gsm8k -> GSM8K"""
    return MATH_TITLES.get(source, f"Math ({source})")


def figure_of(found: Row, key: str) -> Figure:
    """A value of results.json with its interval; one without an interval, such as an optimum, is its own."""
    return Figure(found[key], found.get("low", found[key]), found.get("high", found[key]))


def readable(name: str) -> str:
    """frozen_lake -> Frozen lake"""
    return name.replace("_", " ").capitalize()


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if abs(value) >= 0.095 or value == 0 else f"{100 * value:.1f} %"


def span(figure: Figure) -> str:
    return f"{100 * figure.low:.0f} to {100 * figure.high:.0f}"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.1f}"


# ------------------------------------------------------------------------------------------------------------ goals


def goals(results: Results) -> list[Row]:
    """The quickstart's goals beside what was measured: {"phase", "goal", "measured", "reached"}.

    They are about the checkpoints base, phase1, phase2 and phase3 and their headline figures, in math those of the
    embedded questions; a goal whose figures are not there is left out.
    """
    entries = results["checkpoints"]
    base, one, two, three = (entries.get(name, {}) for name in ("base", "phase1", "phase2", "phase3"))
    sums = {name: entry["math"]["embedded"] for name, entry in entries.items() if "embedded" in entry.get("math", {})}
    found: list[Row] = []

    def goal(phase: str, text: str, measured: str, reached: bool) -> None:
        found.append({"phase": phase, "goal": text, "measured": measured, "reached": bool(reached)})

    def difference(old: str, new: str, suite: str, metric: str) -> Row | None:
        setting = entries[new][suite].get("setting", "")
        wanted = {"from": old, "to": new, "suite": suite, "part": "", "setting": setting, "metric": metric}
        return next((d for d in results["differences"] if wanted.items() <= d.items()), None)

    if {"base", "phase1"} <= sums.keys():
        gained = sums["phase1"]["accuracy"] - sums["base"]["accuracy"]
        parts = ", ".join(
            f"{part.replace('_', ' ')} {points(figures['accuracy'] - sums['base']['parts'][part]['accuracy'])}"
            for part, figures in sums["phase1"]["parts"].items()
        )
        goal("phase1", "math at least 30 points above base", f"{points(gained)} ({parts})", gained >= 0.30)
    if "recall" in base and "recall" in one:
        gained = one["recall"]["accuracy"] - base["recall"]["accuracy"]
        goal("phase1", "recall at least 50 points above base", points(gained), gained >= 0.50)
    if "preferences" in two:
        accuracy = two["preferences"]["accuracy"]
        goal("phase2", "ranks at least 75 % of held-out pairs right", percent(accuracy), accuracy >= 0.75)
    if "repetition" in one and "repetition" in two:
        cut = difference("phase1", "phase2", "repetition", "equal_length")
        if cut is not None:
            text = f"{points(cut['value'])} ({points(cut['low'])} to {points(cut['high'])})"
            goal("phase2", "repeats less than phase 1 at equal length, interval below 0", text, cut["high"] < 0)
        ratio = two["repetition"]["tokens"] / max(one["repetition"]["tokens"], 1e-9)
        goal("phase2", "answers at most 20 % shorter", f"{round(100 * (ratio - 1)):+d} %", ratio >= 0.8)
    if {"phase1", "phase2"} <= sums.keys():
        gained = sums["phase2"]["accuracy"] - sums["phase1"]["accuracy"]
        goal("phase2", "math at most 5 points lower", points(gained), gained >= -0.05)
    for env, after in three.get("envs", {}).items():
        before = two.get("envs", {}).get(env)
        if before is None:
            continue
        change = f"{percent(before['success'])} to {percent(after['success'])}"
        apart = f"before up to {100 * before['high']:.0f} %, after from {100 * after['low']:.0f} %"
        if env == "frozen_lake":
            reached = before["success"] < 0.45 and after["success"] >= 0.80
            goal("phase3", "Frozen lake to at least 80 % from less than 45 %", change, reached)
            falls = [entry["failures"].get("hole", 0) / entry["episodes"] for entry in (before, after)]
            text = f"{percent(falls[0])} to {percent(falls[1])} of episodes"
            goal("phase3", "Frozen lake: half the deaths in holes or fewer", text, 0 < falls[0] >= 2 * falls[1])
            weak = {n: p for n, p in results["baselines"][env].items() if n not in ("expert", "optimum")}
            best = max(weak, key=lambda name: weak[name]["success"])
            text = f"{percent(after['success'])} against {percent(weak[best]['success'])} ({best})"
            goal("phase3", "Frozen lake: beats every demonstrator", text, after["success"] > weak[best]["success"])
        if env == "sokoban":
            goal("phase3", "Sokoban at least doubled", change, after["success"] >= 2 * before["success"] > 0)
            goal("phase3", "Sokoban to at least 45 %", change, after["success"] >= 0.45)
        title = f"{readable(env)}: intervals before and after do not overlap"
        goal("phase3", title, apart, after["low"] > before["high"])
    kept = {suite: _accuracy(three, suite) / _accuracy(two, suite) for suite in KEPT if _accuracy(two, suite)}
    if three and kept:
        average = sum(kept.values()) / len(kept)
        each = ", ".join(f"{suite} {percent(share)}" for suite, share in kept.items())
        names = ", ".join(kept)
        goal("phase3", f"{names}: at least 97 % of phase 2's, on average", percent(average), average >= 0.97)
        goal("phase3", f"{names}: at least 92 % of phase 2's, each", each, min(kept.values()) >= 0.92)
    both = "repetition" in two and "repetition" in three
    more = difference("phase2", "phase3", "repetition", "equal_length") if both else None
    if more is not None:
        text = f"{points(more['value'])} ({points(more['low'])} to {points(more['high'])})"
        goal("phase3", "repeats no more than phase 2 at equal length, interval not above 0", text, more["low"] <= 0)
    return found


KEPT = ("math", "recall", "preferences")  # what phase 3 does not ask for and should not take away


def _accuracy(entry: Row, suite: str) -> float:
    """The headline accuracy; 0 where it was not measured."""
    found = entry.get(suite, {})
    return found.get("embedded", found).get("accuracy", 0.0)


# ----------------------------------------------------------------------------------- Markdown, terminal and PNG


def markdown(results: Results) -> str:
    """results.md: the headline table, what changed from phase to phase, players, all settings, goals."""
    shown = columns(results)
    lines = ["# Results", "", "Share in percent, with its 95 % interval.", ""]
    lines += _table(
        ["checkpoint", *(f"{c.title} ({c.note})" for c in shown)],
        (
            [name, *(f"{percent(figure.value)} ({span(figure)})" for figure in (c.get(entry) for c in shown))]
            for name, entry in results["checkpoints"].items()
        ),
    )
    for name, reason in results.get("failed", {}).items():
        lines += ["", f"{name} could not be measured: {' '.join(reason.split())}"]
    lines += ["", "## Paired differences", "", "Same items, same seeds; bootstrap over items, 95 %.", ""]
    lines += _table(
        ["from", "to", "what", "setting", "before", "after", "difference", "interval", "n"],
        (
            [
                *(d["from"], d["to"], what(d), d["setting"], f"{d['before']:.3f}", f"{d['after']:.3f}"),
                *(f"{d['value']:+.3f}", f"{d['low']:+.3f} to {d['high']:+.3f}", str(d["n"])),
            ]
            for d in results["differences"]
        ),
    )
    for env, players in results["baselines"].items():
        lines += ["", f"## {readable(env)}: players on the same levels", ""]
        lines += _table(["player", "success", "return", "failures"], (_player(n, p) for n, p in players.items()))
    lines += ["", "## Every setting", ""]
    settings = ([a, b, c, percent(figure.value), span(figure), str(n)] for a, b, c, figure, n in every_setting(results))
    lines += _table(["checkpoint", "what", "setting", "figure", "95 %", "n"], settings)
    if results.get("goals"):
        lines += ["", "## Goals", ""]
        rows = ([g["phase"], g["goal"], g["measured"], "yes" if g["reached"] else "no"] for g in results["goals"])
        lines += _table(["phase", "goal", "measured", "reached"], rows)
    return "\n".join(lines)


def what(difference: Row) -> str:
    """Which figure a difference is about: `GSM8K: accuracy`, `Math, unseen operands: accuracy`, `Sokoban: success`."""
    if difference["suite"] == "preferences" and difference["metric"] == "accuracy":
        return "Preferences: ranking accuracy"
    part = difference["part"].replace("_", " ")
    subject = part if difference["suite"] == "envs" else ", ".join(filter(None, (difference["suite"], part)))
    if difference["suite"] == "math":
        subject = MATH_TITLES.get(difference["part"], subject)
    subject = subject[:1].upper() + subject[1:]
    names = {
        "equal_length": "4-grams repeated, at equal length",
        "seq_rep_4": "4-grams repeated",
        "seq_rep_4_first": "4-grams repeated in the first tokens",
        "failed": "ended in a failure",
    }
    return f"{subject}: {names.get(difference['metric'], difference['metric'].replace('_', ' '))}"


def every_setting(results: Results) -> Iterator[tuple[str, str, str, Figure, int]]:
    """(checkpoint, which figure, sampling setting, figure, n) for every one there is."""
    for name, entry in results["checkpoints"].items():
        for suite, figures in entry.items():
            for part, found in figures.items() if suite in ("math", "envs") else [("", figures)]:
                key = {"envs": "success", "repetition": "seq_rep_4"}.get(suite, "accuracy")
                title = math_title(part) if suite == "math" else readable(part or suite)
                for setting, one in found.get("settings", {"": found}).items():
                    yield name, title, setting, figure_of(one, key), one.get("n", one.get("episodes"))
                    parts = one.get("parts", {})
                    for section, inner in parts.items() if len(parts) > 1 else ():
                        about = f"{title}, {section.replace('_', ' ')}"
                        yield name, about, setting, figure_of(inner, key), inner["n"]


def _player(name: str, figures: Row) -> list[str]:
    success = percent(figures["success"])
    if "low" in figures:
        success += f" ({span(figure_of(figures, 'success'))})"
    failures = ", ".join(f"{word} {count}" for word, count in figures.get("failures", {}).items())
    return [name, success, f"{figures['return']:.2f}" if "return" in figures else "", failures]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, *rows]]
    return [body[0], "|" + "---|" * len(head), *body[1:]]


def show(results: Results) -> None:
    """The headline table and the goals in the terminal."""
    from rich.markup import escape
    from rich.table import Table

    console, shown = runlog.console(), columns(results)
    table = Table(title="Held-out results, in percent with 95 % intervals")
    table.add_column("")
    for column in shown:
        head = f"{escape(column.title)}\n[dim]{escape(column.setting) or 'no sampling'}[/dim]"
        table.add_column(head, justify="right", overflow="fold")
    for name, entry in results["checkpoints"].items():
        figures = [column.get(entry) for column in shown]
        table.add_row(escape(name), *(f"{percent(figure.value)}\n[dim]{span(figure)}[/dim]" for figure in figures))
    console.print(table)
    for name, reason in results.get("failed", {}).items():
        console.print(f"[red]not measured[/red] {escape(f'{name}: {reason}')}", highlight=False)
    for goal in results.get("goals", []):
        mark = "[green]reached    [/green]" if goal["reached"] else "[red]not reached[/red]"
        console.print(f"{mark} {goal['phase']}: {goal['goal']}: {goal['measured']}", highlight=False)


def plots(results: Results, folder: Path) -> None:
    """plots/headline.png and plots/settings.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    folder.mkdir(parents=True, exist_ok=True)
    shown, entries = columns(results), results["checkpoints"]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(2.6 * len(shown) + 0.6, 3.2), squeeze=False)
    for axis, column in zip(axes[0], shown, strict=True):
        for place, (name, entry) in enumerate(entries.items()):
            _error_bar(axis, place, column.get(entry), colour(results, name))
        axis.set_xticks(range(len(entries)), entries, rotation=30, ha="right")
        axis.set_title(f"{column.title}\n{column.note}", fontsize=9)
        _percent_axis(axis)
    _save(figure, folder / "headline.png")

    rows = [row for row in every_setting(results) if "," not in row[1] and row[2]]  # totals, of what was sampled
    suites = list(dict.fromkeys(suite for _, suite, *_ in rows))
    if not suites:
        return
    figure, axes = pyplot.subplots(1, len(suites), figsize=(2.8 * len(suites) + 0.6, 3.4), squeeze=False)
    for axis, suite in zip(axes[0], suites, strict=True):
        settings = list(dict.fromkeys(setting for _, which, setting, *_ in rows if which == suite))
        for name, _, setting, value, _ in (row for row in rows if row[1] == suite):
            shift = 0.6 * (list(entries).index(name) - (len(entries) - 1) / 2) / len(entries)
            _error_bar(axis, settings.index(setting) + shift, value, colour(results, name))
        axis.set_xticks(range(len(settings)), settings, rotation=20, ha="right")
        axis.set_title(suite, fontsize=9)
        _percent_axis(axis)
    handles = [Line2D([], [], marker="o", ls="", color=colour(results, name), label=name) for name in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    _save(figure, folder / "settings.png")


def _error_bar(axis: Any, place: float, figure: Figure, paint: str) -> None:
    reach = [[max(0.0, figure.value - figure.low)], [max(0.0, figure.high - figure.value)]]
    axis.errorbar([place], [figure.value], yerr=reach, fmt="o", color=paint, capsize=3, markersize=5)


def _percent_axis(axis: Any) -> None:
    axis.set_ylim(-0.03, 1.03)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"], fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def colour(results: Results, checkpoint: str) -> str:
    return COLOURS[list(results["config"]["checkpoints"]).index(checkpoint) % len(COLOURS)]
