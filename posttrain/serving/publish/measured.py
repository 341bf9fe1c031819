"""What does an evaluation add to a publication?  Lines of the card, .eval_results/, model-index and pictures.

Only figures of exactly these weights, by the digests in results.json. Figures of whole data sets of the Hub go to
`.eval_results/*.yaml`, those of environments and local tasks to `model-index` in the card.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml
from PIL import Image, ImageSequence

from posttrain.data import HELD_OUT
from posttrain.report import animation, tables
from posttrain.types import HUB_NAME, Record, UserError, one_line

FOLDER = ".eval_results"
TASKS = {"gsm8k": "gsm8k", "math500": "math_500"}  # what the Hub calls the tasks of these two data sets
PICTURES = {"headline.png": "The evaluated checkpoints side by side, with 95 % intervals"}
MOVING = "before_and_after.gif"


@dataclass
class CardFigures:
    """The figures of a model: rows of the card's table, entries for the Hub, pictures as bytes."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)  # measured, value, items
    index: list[EvalResult] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)  # file -> what it shows
    commit: str = ""


def of_run(results: Record, digest: str, folder: Path) -> CardFigures:
    """Return the figures of the weights with this digest in `results`, the results.json of `folder`."""
    figures = CardFigures(commit=results.get("commit") or "no git checkout")
    names = [name for name, known in results.get("digests", {}).items() if known == digest]
    for name in names[:1]:
        _checkpoint(results, name, figures)
        _pictures(results, name, folder, figures)
    for measured in results.get("benchmarks", {}).values():
        if measured["digest"] == digest:
            for task, entry in measured["tasks"].items():
                if entry["part_of"] not in measured["tasks"]:  # otherwise the group's figure is used
                    _benchmark(task, entry, figures)
    return figures


def _checkpoint(results: Record, name: str, figures: CardFigures) -> None:
    """Add the headline figures of one checkpoint."""
    entry, config = results["checkpoints"][name], results["config"]
    for column in tables.columns(results):
        figure = column.get(entry)
        if figure is None:
            continue
        part = column.figures_in(entry)
        n, share = part.get("n", part.get("episodes")), f"{figure.value:.3g} [{figure.low:.3g}, {figure.high:.3g}]"
        setting = f", {column.setting}" if column.setting else ""
        figures.rows.append((f"{column.title} ({column.note}{setting})", share, str(n)))
        if column.suite == "math" and column.part in TASKS and n == HELD_OUT[column.part].rows:
            notes = f"zero-shot in the chat template, {column.setting}, n {n}, 95 % interval {figure.low:.3f} to "
            notes += f"{figure.high:.3f}, code at {figures.commit}"
            entered = EvalResultEntry(HELD_OUT[column.part].path, TASKS[column.part], figure.value, notes=notes)
            _enter(column.part, entered, figures)
        if column.suite == "envs":
            suite = config["suites"]["envs"]
            figures.index.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="playing a text environment",
                    dataset_type=column.part,
                    dataset_name=f"{column.title}, levels of the split {suite['split']}",
                    dataset_split=suite["split"],
                    metric_type="success",
                    metric_name=f"share of {n} episodes that were solved",
                    metric_value=figure.value,
                    metric_args={"low": figure.low, "high": figure.high, "interval": 0.95, "episodes": n},
                )
            )


def _benchmark(task: str, entry: Record, figures: CardFigures) -> None:
    """Add the metrics of one task of lm-evaluation-harness."""
    data = entry["data_set"]
    for metric in entry["metrics"]:
        if metric["value"] is None:
            continue
        about = f"{metric['metric']}{'' if metric['filter'] == 'none' else ', ' + metric['filter']}"
        how = f"lm-evaluation-harness {entry['harness']}, version {entry['version']}, {tables.how_asked(entry)}"
        error = f" ± {metric['stderr']:.2g}" if metric["stderr"] else ""  # 0 if all items are equal: not an estimate
        value = f"{metric['value']:.3g}{error}{error and ' (standard error)'}"
        n = tables.items_asked(entry)
        split = f"split {data.get('split')}, " if data.get("split") else ""
        figures.rows.append((f"{task}: {about} ({split}{how})", value, n))
        if entry["n"] != entry["of"]:  # the Hub expects whole benchmarks
            continue
        # a local folder may have the name of a Hub data set: `hub` is what the harness says
        of_the_hub = data.get("hub") is True and HUB_NAME.fullmatch(data["path"] or "")
        if of_the_hub and data.get("split") == "test" and entry["n"] == data.get("rows"):
            notes = f"{how}, {about}, n {n}{', standard error' + error.removeprefix(' ±') if error else ''}"
            entered = EvalResultEntry(data["path"], task, metric["value"], date=entry["date"], notes=notes)
            _enter("-".join((task, metric["metric"], metric["filter"])).removesuffix("-none"), entered, figures)
        else:
            figures.index.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=task,
                    dataset_name=f"{task} (a task of lm-evaluation-harness)",
                    dataset_split=data.get("split"),
                    metric_type=metric["metric"],
                    metric_name=about,
                    metric_value=metric["value"],
                )
            )


def _enter(name: str, entry: EvalResultEntry, figures: CardFigures) -> None:
    """Add a file of .eval_results/."""
    text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)
    figures.files[f"{FOLDER}/{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.yaml"] = text.encode()


def _pictures(results: Record, name: str, folder: Path, figures: CardFigures) -> None:
    """Add the plots beside results.json and the animation of episodes before and after training."""
    from posttrain.report import read_run

    for file, shows in PICTURES.items():
        if (folder / "plots" / file).is_file():
            figures.files[file] = without_metadata(folder / "plots" / file)
            figures.pictures[file] = shows
    first = next(iter(results["checkpoints"]))
    if "envs" in results["checkpoints"][name]:
        shown = [before for before in (first,) if before != name and "envs" in results["checkpoints"][before]]
        try:
            figures.files[MOVING] = animation.animate(*read_run(folder), [*shown, name], levels=3)
        except UserError:  # no transcripts beside the results
            return
        figures.pictures[MOVING] = "The first test levels of the evaluation, before and after"


def without_metadata(picture: Path) -> bytes:
    """Return only the pixels of a picture, as PNG or GIF."""
    try:
        with Image.open(picture, formats=("PNG", "GIF")) as read:
            frames, times = [], []
            for frame in ImageSequence.Iterator(read):
                frames.append(Image.frombytes("RGBA", frame.size, frame.convert("RGBA").tobytes()))
                times.append(frame.info.get("duration", 100))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{picture} is not a picture that can be read ({one_line(error)}).") from error
    out = io.BytesIO()
    if picture.suffix.lower() == ".gif":
        frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
    else:
        frames[0].save(out, "PNG", optimize=True)
    return out.getvalue()


def index(figures: CardFigures, name: str) -> dict[str, Any]:
    """Return the card's metadata for `model-index`."""
    return {"eval_results": figures.index, "model_name": name} if figures.index else {}
