"""Which figures does results.json hold, and how are they shown?  Columns, formats, terminal table and plots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.metrics import Interval
from posttrain.runtime import runlog
from posttrain.types import Record, Words, value_at, words_of

Results = dict[str, Any]  # results.json as evaluate_model.py writes it

MATH_TITLES = {"embedded": "Math (toy sums)", "gsm8k": "GSM8K", "math500": "MATH-500"}
NOT_ASKED = "not asked"
BENCHMARKS = (
    "Tasks of lm-evaluation-harness, measured separately: without pairs, and with other prompts than those above."
)
COLOURS = ("#8b8f98", "#2f7fd1", "#d9822b", "#1f9d6b", "#a45bd1", "#c94f6d")  # one per checkpoint, in order


# ------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Column:
    """A figure of every checkpoint: Column("GSM8K", "answers right", "math", "gsm8k", "accuracy", "greedy")."""

    title: str
    note: str
    suite: str
    part: str  # the environment, or the source of math questions
    metric: str
    setting: str

    def get(self, entry: Record) -> Interval | None:
        """Return the figure from a checkpoint's part of results.json; None if its suite was not measured."""
        return figure_of(self.figures_in(entry), self.metric) if self.suite in entry else None

    def figures_in(self, entry: Record) -> Record:
        """Return all figures of its suite and part."""
        return entry[self.suite][self.part] if self.part else entry[self.suite]


def columns(results: Results) -> list[Column]:
    """Return the headline figures that this run has, in the order of the phases."""
    first: Record = {}
    for entry in results["checkpoints"].values():  # an endpoint does not have every suite
        first = entry | first

    shown = []
    for source, entry in first.get("math", {}).items():
        shown.append(Column(math_title(source), "answers right", "math", source, "accuracy", entry["setting"]))
    for suite, title, note, metric in (
        ("recall", "Recall", "earlier turns remembered", "accuracy"),
        ("instructions", "Instructions", "prompts whose instructions are all followed", "accuracy"),
        ("preferences", "Preferences", "ranking accuracy: pairs whose chosen answer is likelier", "accuracy"),
        ("repetition", "Repetition", "repeated 4-grams, lower is better", "seq_rep_4"),
    ):
        if suite in first:
            shown.append(Column(title, note, suite, "", metric, first[suite].get("setting", "")))
    for env, entry in first.get("envs", {}).items():
        note = f"success in {entry['episodes']} episodes"
        shown.append(Column(readable(env), note, "envs", env, "success", entry["setting"]))
    return shown


def task_words(results: Results) -> Words:
    """Return what the page calls the tasks of this run's environments."""
    return words_of(env["name"] for env in value_at(results["config"], "suites.envs.envs") or ())


def math_title(source: str) -> str:
    """Return the title of a source: embedded -> Math (toy sums), gsm8k -> GSM8K."""
    return MATH_TITLES.get(source, f"Math ({source})")


def setting_of(name: str) -> str:
    """Return a sampling setting in words; `greedy` does not sample."""
    return "greedy" if name == "greedy" else f"sampling setting “{name}”"


def figure_of(entry: Record, key: str) -> Interval:
    """Return a value of results.json with its interval; the value itself if it has none, as an optimum."""
    return Interval(entry[key], entry.get("low", entry[key]), entry.get("high", entry[key]))


def less_is_better(metric: str) -> bool:
    return metric in ("equal_length", "seq_rep_4", "seq_rep_4_first", "failed", "never_stops")


def readable(name: str) -> str:
    """Return a name as a title: frozen_lake -> Frozen lake."""
    return name.replace("_", " ").capitalize()


def percent(value: float) -> str:
    """Return a share as `54 %` or `2.3 %`."""
    return f"{100 * value:.0f} %" if abs(value) >= 0.095 or value == 0 else f"{100 * value:.1f} %"


def from_to(before: float, after: float) -> str:
    """Return two shares as `45 % → 38 %`, with more digits where they would read the same: `45.2 % → 45.4 %`."""
    told = [(percent(before), percent(after))]
    told += [(f"{100 * before:.{digits}f} %", f"{100 * after:.{digits}f} %") for digits in (1, 2)]
    return " → ".join(next((pair for pair in told if pair[0] != pair[1]), told[0]))


def span(figure: Interval) -> str:
    """Return an interval of a share in percent: `48 to 60`."""
    return f"{100 * figure.low:.0f} to {100 * figure.high:.0f}"


def points(value: float) -> str:
    """Write a difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.1f}"


def points_span(change: Interval) -> str:
    """Write a difference with its interval: +10.0 (+2.1 to +17.9)."""
    return f"{points(change.value)} ({points(change.low)} to {points(change.high)})"


def what(difference: Record) -> str:
    """Return the title of a difference's figure: `GSM8K: accuracy`, `Math, unseen operands: accuracy`."""
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


def every_setting(results: Results) -> Iterator[tuple[str, str, str, Interval, int]]:
    """Yield (checkpoint, which figure, sampling setting, figure, n) for all of them."""
    for name, entry in results["checkpoints"].items():
        for suite, figures in entry.items():
            for part, entry_of_part in figures.items() if suite in ("math", "envs") else [("", figures)]:
                key = {"envs": "success", "repetition": "seq_rep_4"}.get(suite, "accuracy")
                title = math_title(part) if suite == "math" else readable(part or suite)
                for setting, one in entry_of_part.get("settings", {"": entry_of_part}).items():
                    yield name, title, setting, figure_of(one, key), one.get("n", one.get("episodes"))
                    parts = one.get("parts", {})
                    for section, inner in parts.items() if len(parts) > 1 else ():
                        about = f"{title}, {section.replace('_', ' ')}"
                        yield name, about, setting, figure_of(inner, key), inner["n"]


class Benchmark(NamedTuple):
    """A figure of lm-evaluation-harness, as text."""

    checkpoint: str
    task: str
    version: str
    metric: str
    figure: str
    n: str
    how: str


def benchmark_rows(results: Results) -> Iterator[Benchmark]:
    """Yield each metric of each standard benchmark in results.json."""
    for name, measured in results.get("benchmarks", {}).items():
        for task, entry in measured["tasks"].items():
            how = f"{how_asked(entry)}, lm-eval {entry['harness']}"
            for value in entry["metrics"]:
                metric = value["metric"] + (f" ({value['filter']})" if value["filter"] != "none" else "")
                figure = "none" if value["value"] is None else f"{value['value']:.4g}"
                figure += "" if value["stderr"] is None else f" ± {value['stderr']:.2g}"
                yield Benchmark(name, task, str(entry["version"]), metric, figure, items_asked(entry), how)


def items_asked(entry: Record) -> str:
    """Return the number of items of a benchmark: 1319, or 50 of 1319."""
    return str(entry["n"]) if entry["n"] == entry["of"] else f"{entry['n']} of {entry['of']}"


def how_asked(entry: Record) -> str:
    """Return the prompt format and dtype of a benchmark: 5 examples, chat template, bfloat16."""
    examples = "" if entry["fewshot"] is None else f"{entry['fewshot']} examples"
    template = "chat template" if entry["chat_template"] else "plain text"
    return ", ".join(filter(None, (examples, template, entry.get("dtype"))))


def show(results: Results) -> None:
    """Print the headline table and the goals."""
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
        cells = (f"{percent(figure.value)}\n[dim]{span(figure)}[/dim]" if figure else NOT_ASKED for figure in figures)
        table.add_row(escape(name), *cells)
    console.print(table)
    for name, reason in results.get("failed", {}).items():
        console.print(f"[red]not measured[/red] {escape(f'{name}: {reason}')}", highlight=False)
    for goal in results.get("goals", []):
        mark = "[green]reached    [/green]" if goal["reached"] else "[red]not reached[/red]"
        console.print(f"{mark} {goal['phase']}: {goal['goal']}: {goal['measured']}", highlight=False)


def plots(results: Results, folder: Path) -> None:
    """Draw plots/headline.png and plots/settings.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    folder.mkdir(parents=True, exist_ok=True)
    shown, entries = columns(results), results["checkpoints"]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(2.6 * len(shown) + 0.6, 3.2), squeeze=False)
    for axis, column in zip(axes[0], shown, strict=True):
        for place, (name, entry) in enumerate(entries.items()):
            if value_shown := column.get(entry):
                _error_bar(axis, place, value_shown, colour(results, name))
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


def _error_bar(axis: Any, place: float, figure: Interval, paint: str) -> None:
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
