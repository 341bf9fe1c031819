"""Which run is better?  comparison.html: several runs side by side, a verdict, and the largest differences.

    posttrain report runs/quickstart runs/seed1              their last checkpoints
    posttrain report runs/quickstart:phase2 runs/quickstart  one checkpoint against another

RUN is a folder with results.json, RUN:CHECKPOINT one of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.report import training_log
from posttrain.report.charts import Chart, chart
from posttrain.report.episodes import Pictures, browser_row
from posttrain.report.page import read_run
from posttrain.report.rendering import DAMAGED, render_page
from posttrain.report.sections import play_again
from posttrain.report.tables import COLOURS, less_is_better, readable
from posttrain.report.verdict import UNSEEN, Comparison, Model, compare_models, not_compared, overall
from posttrain.runtime import runlog
from posttrain.types import Record, UserError, one_line

MANY = 100_000  # items: more than anybody measures
ITEMS = {
    "envs": "levels", "preferences": "pairs", "math": "questions", "recall": "questions", "repetition": "prompts",
    "instructions": "prompts",
}  # fmt: skip


def build_comparison(runs: Sequence[str]) -> Path:
    """Write comparison.html into the folder of the last run and return its path. runs: RUN or RUN:CHECKPOINT."""
    models = [open_model(each) for each in runs]
    titles = [model.title for model in models]
    if len(set(titles)) < len(titles):
        models = [model._replace(title=each) for model, each in zip(models, runs, strict=True)]
    first, *others = models
    pictures = Pictures()
    try:
        comparisons = [compare_models(first, other) for other in others]
        pairs, examples = differing(first, others, comparisons, pictures)
        html = render_page(
            "comparison.html.j2",
            "Which is better?",
            {"top": None, "pairs": pairs, "recorded": [], "pictures": pictures.coded},
            *("player.js", "viewer.js", "charts.js", "page.js"),
            titles=[model.title for model in models],
            verdicts=verdicts(first, others, comparisons),
            heads=[(model.title, COLOURS[(number + 1) % len(COLOURS)]) for number, model in enumerate(models)],
            rows=comparison_rows(comparisons),
            examples=examples,
            curves=shared_curves(models),
        )
    except DAMAGED as error:
        raise UserError(
            f"The files of these runs are damaged or not what evaluate_model.py writes (comparisons {one_line(error)})."
            " Measure again: python evaluate_model.py output_dir=RUN --overwrite"
        ) from error
    path = models[-1].folder / "comparison.html"
    path.write_text(html, encoding="utf-8")
    return path


def open_model(run: str) -> Model:
    """Read a run and its last checkpoint (runs/a), or another one (runs/a:phase2)."""
    folder, name = Path(run), ""
    if not folder.exists() and ":" in run:
        place, _, name = run.rpartition(":")
        folder = Path(place)
    results, rows = read_run(folder)
    name = name or list(results["checkpoints"])[-1]
    if name not in results["checkpoints"]:
        raise UserError(
            f"{folder} has no checkpoint {name}: write {folder}:NAME with one of {', '.join(results['checkpoints'])}."
        )
    return Model(folder, f"{folder.resolve().name}:{name}", name, results, rows)


def verdicts(
    first: Model, others: Sequence[Model], comparisons: Sequence[list[Comparison]]
) -> list[tuple[str, str, str, list[str]]]:
    """Return (title, verdict, its sentence, figures that cannot be compared) of each other model."""
    pairs = zip(others, comparisons, strict=True)
    return [(other.title, *overall(compared), not_compared(first, other, compared)) for other, compared in pairs]


def comparison_rows(comparisons: Sequence[list[Comparison]]) -> list[tuple[str, list[str], list[Any]]]:
    """Return rows of figures, with a cell for each model: its figure, the change against the first, and `needed`."""
    rows = []
    for place in dict.fromkeys(_place(each) for compared in comparisons for each in compared):
        by_model = [next((each for each in compared if _place(each) == place), None) for compared in comparisons]
        shown = next(each for each in by_model if each is not None)
        better = "lower is better" if less_is_better(shown.column.metric) else "higher is better"
        about = list(filter(None, (better, f"{shown.n} common items", shown.column.setting)))
        cells = [each and (each.values[1], each, needed(each)) for each in by_model]
        rows.append((shown.column.title, about, [(shown.values[0], None, ""), *cells]))
    return rows


def _place(compared: Comparison) -> tuple[str, str]:
    return compared.column.suite, compared.column.part


def needed(compared: Comparison) -> str:
    """Return how many items would decide, if the verdict is `cannot tell`."""
    if compared.verdict != "cannot tell":
        return ""
    if not compared.change.low <= 0 <= compared.change.high:
        return ": a difference that rounds to 0"
    items, n = ITEMS[compared.column.suite], f"{compared.n:,}"
    if compared.needed == 0:
        return f": the same on all {n} {items}"
    count = f"more than {MANY:,}" if compared.needed > MANY else f"about {compared.needed:,}"
    if compared.change.value == 0:
        return f": no difference seen; {count} {items} needed to tell one of {100 * UNSEEN:.0f} points, {n} compared"
    return f": {count} {items} needed to tell this difference, {n} compared"


def differing(
    first: Model, others: Sequence[Model], comparisons: Sequence[list[Comparison]], pictures: Pictures
) -> tuple[list[list[Record]], list[tuple[str, range]]]:
    """Return pairs of episodes for page.js, and (title, their places) for each figure."""
    pairs, places = list[list[Record]](), []
    for other, compared in zip(others, comparisons, strict=True):
        for each in compared:
            if each.examples and each.column.suite != "preferences":
                title = f"{each.column.title}: {first.title} and {other.title}"
                places.append((title, range(len(pairs), len(pairs) + len(each.examples))))
                pairs += [
                    [_shown(model, row, pictures) for model, row in zip((first, other), rows, strict=True)]
                    for rows in each.examples
                ]
    return pairs, places


def _shown(model: Model, row: Record, pictures: Pictures) -> Record:
    shown = play_again(model.results, row, pictures) if row["suite"] == "envs" else browser_row(row)
    return shown | {"at": f"{model.title}, {readable(shown['env'])} {row['index']}"}


def shared_curves(models: Sequence[Model]) -> list[tuple[str, list[Chart]]]:
    """Return (phase, charts) of the phases of several runs, with all runs in each chart; [] for a single run."""
    runs = list({model.folder: model for model in models}.values())
    folders = [(model.folder.resolve().name, training_log.phase_folders(model.results, model.folder)) for model in runs]
    phases = []
    for name in folders[0][1] if len(runs) > 1 else ():
        logs = {
            run: runlog.read_metrics(place / "metrics.jsonl") for run, places in folders if (place := places.get(name))
        }
        drawn = []
        for curve in training_log.CURVES:
            by_run = {run: training_log.curve_lines(rows, curve.lines) for run, rows in logs.items()}
            lines = {f"{run}, {label}": line for run, phases in by_run.items() for label, line in phases.items()}
            drawn.append(chart(curve.title, lines, about=curve.about))
        if any(drawn):
            phases.append((name, list(filter(None, drawn))))
    return phases
