"""Which run is better?  comparison.html: several runs side by side, a verdict, and where they differ most.

    posttrain report runs/quickstart runs/seed1              their last checkpoints
    posttrain report runs/quickstart:phase2 runs/quickstart  one checkpoint against another

RUN is a folder with results.json, RUN:CHECKPOINT one of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.report import charts, training_log
from posttrain.report.episodes import evaluation_stage
from posttrain.report.figures import KINDS, shown_change
from posttrain.report.markup import document, table, text
from posttrain.report.page import read
from posttrain.report.rows import Pictures, entry, packed, with_pictures
from posttrain.report.tables import COLOURS, percent, readable, span
from posttrain.report.verdict import UNSEEN, Comparison, Model, compare, not_compared, overall
from posttrain.runtime import runlog
from posttrain.types import Record, UserError, one_line

MANY = 100_000  # items: nobody will measure more
ITEMS = {"envs": "levels", "preferences": "pairs", "math": "questions", "recall": "questions", "repetition": "prompts"}
NOTE = (
    "The verdict is about these models, not about how they were made: the same recipe with another seed gives another "
    "model. To judge a recipe, compare several seeds of each. Intervals of changes are paired, item by item, and hold "
    "together at 95 % for all figures of a comparison; each leaves zero out only where an exact test rejects it, and "
    "where one holds zero the verdict is “cannot tell”. The number of items is what it takes to tell a difference as "
    "large as the one seen, or of 5 points where none was seen, with a chance of 80 %; there is none where every item "
    "came out the same."
)


def build(given: Sequence[str]) -> Path:
    """Write comparison.html into the folder of the last run and return its path. given: RUN or RUN:CHECKPOINT."""
    models = [open_model(each) for each in given]
    titles = [model.title for model in models]
    if len(set(titles)) < len(titles):
        models = [model._replace(title=each) for model, each in zip(models, given, strict=True)]
    first, *others = models
    pictures = Pictures()
    try:
        found = [compare(first, other) for other in others]
        pairs, examples = differing(first, others, found, pictures)
        body = (
            f'<header><p class="kicker">{text(" · ".join(model.title for model in models))}</p>'
            f"<h1>Which is better?</h1>{verdicts(first, others, found)}</header>"
            f"<section><h2>Side by side</h2>{side_by_side(first, others, found)}"
            f'<p class="quiet">{NOTE}</p></section>'
            f"<section><h2>Where they differ most</h2>{examples}</section>" + curves(models)
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise UserError(
            f"The files of these runs are damaged or not what evaluate_model.py writes (found {one_line(error)})."
            " Measure again: python evaluate_model.py output_dir=RUN --overwrite"
        ) from error
    data = packed("data", {"top": None, "pairs": pairs, "recorded": [], "pictures": pictures.coded})
    path = models[-1].folder / "comparison.html"
    scripts = ("player.js", "viewer.js", "charts.js", "page.js")
    path.write_text(document("Which is better?", body, data, *scripts), encoding="utf-8")
    return path


def open_model(given: str) -> Model:
    """runs/a -> its last checkpoint; runs/a:phase2 -> that one."""
    folder, name = Path(given), ""
    if not folder.exists() and ":" in given:
        place, _, name = given.rpartition(":")
        folder = Path(place)
    results, rows = read(folder)
    name = name or list(results["checkpoints"])[-1]
    if name not in results["checkpoints"]:
        raise UserError(
            f"{folder} has no checkpoint {name}: write {folder}:NAME with one of {', '.join(results['checkpoints'])}."
        )
    return Model(folder, f"{folder.resolve().name}:{name}", name, results, rows)


def verdicts(first: Model, others: Sequence[Model], found: Sequence[list[Comparison]]) -> str:
    """The answer, before anything else."""
    shown = ""
    for other, compared in zip(others, found, strict=True):
        word, sentence = overall(compared)
        shown += (
            f'<p class="verdict"><b class="{KINDS[word]}">{word[:1].upper()}{word[1:]}</b> '
            f"<span>{text(other.title)} against {text(first.title)}: {text(sentence)}.</span></p>"
        )
        if apart := not_compared(first, other, compared):
            shown += (
                f'<p class="quiet">Not compared, for the two were not given the same or not sampled alike:'
                f" {text(', '.join(apart))}.</p>"
            )
    return shown


def side_by_side(first: Model, others: Sequence[Model], found: Sequence[list[Comparison]]) -> str:
    """Figures down, models across: of each the figure with its interval, the change against the first, the verdict."""
    models = [first, *others]
    head = "<th></th>"
    for number, model in enumerate(models):
        head += f'<th><span class="chip" style="--c:{_colour(number)}">{text(model.title)}</span></th>'
    body = ""
    titles = dict.fromkeys((c.column.suite, c.column.part) for compared in found for c in compared)
    for place in titles:
        by_model = [next((c for c in compared if (c.column.suite, c.column.part) == place), None) for compared in found]
        shown = next(c for c in by_model if c is not None)
        note = "lower is better" if shown.column.metric == "seq_rep_4" else "higher is better"
        setting = f"<br>{text(shown.column.setting)}" if shown.column.setting else ""
        about = f"<small>{note}<br>{shown.n} common items{setting}</small>"
        body += f'<tr><th scope="row">{text(shown.column.title)}{about}</th>{_cell(first.title, shown, 0, 0)}'
        for number, (model, each) in enumerate(zip(others, by_model, strict=True), 1):
            missing = f'<td data-label="{text(model.title)}">not in common</td>'
            body += missing if each is None else _cell(model.title, each, 1, number)
        body += "</tr>"
    return table(head, body, "headline cards")


def _cell(title: str, compared: Comparison, side: int, number: int) -> str:
    figure = compared.values[side]
    cell = f'<td data-label="{text(title)}"><b>{percent(figure.value)}</b><small>{span(figure)}</small>'
    cell += charts.bar(figure, _colour(number))
    if side:
        cell += shown_change(compared, needed(compared))
    return cell + "</td>"


def needed(compared: Comparison) -> str:
    """What it would take to tell, where nobody can."""
    if compared.verdict != "cannot tell":
        return ""
    items, n = ITEMS[compared.column.suite], f"{compared.n:,}"
    if compared.needed == 0:
        return f": the same on all {n} {items}"
    found = f"more than {MANY:,}" if compared.needed > MANY else f"about {compared.needed:,}"
    if compared.change.value == 0:
        return f": no difference seen; {found} {items} needed to tell one of {100 * UNSEEN:.0f} points, {n} compared"
    return f": {found} {items} needed to tell this difference, {n} compared"


def differing(
    first: Model, others: Sequence[Model], found: Sequence[list[Comparison]], pictures: Pictures
) -> tuple[list[list[Record]], str]:
    """The episodes for page.js, and the HTML that names their places."""
    pairs: list[list[Record]] = []
    blocks = ""
    for other, compared in zip(others, found, strict=True):
        for each in compared:
            inner = ""
            for rows in each.examples if each.column.suite != "preferences" else ():
                inner += f'<div class="level"><div class="halves" data-pair="{len(pairs)}"></div></div>'
                pairs.append([_shown(model, row, pictures) for model, row in zip((first, other), rows, strict=True)])
            if inner:
                title = f"{text(each.column.title)}: {text(first.title)} and {text(other.title)}"
                opened = "" if blocks else " open"
                blocks += f'<details class="levels"{opened}><summary>{title}</summary>{inner}</details>'
    note = "Of each figure the items that differ most, for and against; of equal ones the first that were asked."
    return pairs, f'<p class="quiet">{note}</p>{blocks}' if blocks else "<p>On no item.</p>"


def _shown(model: Model, row: Record, pictures: Pictures) -> Record:
    found = with_pictures(row, evaluation_stage(model.results, row), pictures) if row["suite"] == "envs" else entry(row)
    return found | {"at": f"{model.title}, {readable(found['env'])} {row['index']}"}


def curves(models: Sequence[Model]) -> str:
    """The curves of the phases that have the same name, the runs in one picture; none for one run alone."""
    runs = list({model.folder: model for model in models}.values())
    folders = [(model.folder.resolve().name, training_log.phase_folders(model.results, model.folder)) for model in runs]
    blocks = ""
    for name in folders[0][1] if len(runs) > 1 else ():
        drawn = ""
        for title, keys in training_log.CURVES:
            lines: dict[str, charts.Line] = {}
            for run, places in folders:
                if place := places.get(name):
                    rows = runlog.read_metrics(place / "metrics.jsonl")
                    lines |= {f"{run}, {label}": line for label, line in training_log.series(rows, keys).items()}
            drawn += charts.lines(title, lines)
        blocks += f"<h3>{text(name)}</h3><div class='charts'>{drawn}</div>" if drawn else ""
    return blocks and f"<section><h2>Learning curves</h2>{blocks}</section>"


def _colour(number: int) -> str:
    return COLOURS[(number + 1) % len(COLOURS)]
