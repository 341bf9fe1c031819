"""What happened during training?  Curves with alarms, recorded episodes, the rows of phases 1 and 2, and the cost."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NamedTuple

from posttrain import files
from posttrain.config import parse_yaml
from posttrain.report import charts
from posttrain.report.charts import Chart
from posttrain.report.episodes import Pictures, Stage, browser_row, evaluation_stage, training_stage, with_pictures
from posttrain.report.tables import Results
from posttrain.runtime import checkpoint, runlog
from posttrain.types import Record, UserError, one_line


class Curve(NamedTuple):
    """A chart of figures in metrics.jsonl; `*` in a key stands for a part of it, which is then the line's label."""

    title: str
    about: str  # what the figure is and which way is good, in a sentence
    lines: tuple[tuple[str, str], ...]  # (key, label), ...


CURVES = (
    Curve(
        "Loss",
        "What training makes smaller; a fall on trained rows with a rise on held-out ones means that it memorises.",
        (("loss", "training"), ("eval_loss", "held out")),
    ),
    Curve(
        "Next token right",
        "The share of tokens that the model finds the most likely ones; it should rise and then flatten.",
        (("mean_token_accuracy", "training"), ("eval_mean_token_accuracy", "held out")),
    ),
    Curve(
        "Reward accuracy, against the reference",
        "The share of pairs in which the chosen answer has become likelier than the rejected one, compared with the"
        " start; it should rise.",
        (("rewards/accuracies", "training"), ("eval_rewards/accuracies", "held out")),
    ),
    Curve(
        "Reward margin, against the reference",
        "How far the chosen answer has moved away from the rejected one, in nats times beta; it should rise and then"
        " flatten.",
        (("rewards/margins", "training"), ("eval_rewards/margins", "held out")),
    ),
    Curve(
        "Success in validation",
        "The share of held-out tasks that are solved; this figure chooses the policy that is kept.",
        (("evaluation/*/success", "*"),),
    ),
    Curve(
        "Right answers to held-out prompts",
        "The share of right answers to prompts that are not trained on; a fall means that something is forgotten.",
        (("evaluation/math/*/accuracy", "*"), ("evaluation/*/accuracy", "*")),
    ),
    Curve(
        "Repetition in answers to open prompts",
        "The share of 4-grams that an answer has written before; it should stay low.",
        (("evaluation/repetition/seq_rep_4", "share"),),
    ),
    Curve(
        "Success while training",
        "The share of sampled episodes that succeed; it should rise.",
        (("rollout/*/success", "*"),),
    ),
    Curve(
        "Mean of each reward function",
        "What each function gave on average, before its weight; one that falls is outweighed by the others.",
        (("rollout/*/reward_*", "*"),),
    ),
    Curve(
        "What the reward functions record",
        "The mean over the episodes of a step of each number that a reward function gave `log_metric`.",
        (("rollout/*/logged_*", "*"),),
    ),
    Curve(
        "Calls of tools per episode",
        "How often the model calls a tool before it answers; at 0 it answers without tools.",
        (("rollout/tool_calls", "calls"),),
    ),
    Curve(
        "Calls that failed",
        "The share of calls that were answered with an error; it should fall.",
        (("rollout/failed_tool_calls", "share"),),
    ),
    Curve(
        "Std of the reward in a group",
        "How much the samples of one task differ in reward: what there is to learn from; near 0 nothing is left.",
        (("rollout/in_group_std", "mean over groups"),),
    ),
    Curve(
        "Groups whose rewards are all equal",
        "The share of tasks whose samples all earn the same: they teach nothing.",
        (("rollout/zero_variance_groups", "share"),),
    ),
    Curve(
        "Entropy",
        "How undecided the model is about the next token, in nats; a fall to 0 means that it no longer explores.",
        (("policy/entropy", "of trained tokens"), ("entropy", "of trained tokens")),
    ),
    Curve(
        "KL to the rollout's policy",
        "How far an update moves the policy away from the one that sampled, in nats a token; it should stay small.",
        (("policy/kl_to_old", "per token"),),
    ),
    Curve(
        "Norm of the gradient",
        "The size of a step's gradient before clipping; single peaks are clipped, a lasting rise means instability.",
        (("policy/grad_norm", "policy"), ("grad_norm", "training")),
    ),
    Curve(
        "Invalid turns",
        "The share of turns that are not in the form that is asked for; it should fall.",
        (("rollout/invalid_turns", "share"),),
    ),
    Curve(
        "Tokens per turn",
        "How long an answer is; growth up to the limit of tokens often means that answers are cut off.",
        (("rollout/response_tokens", "training"),),
    ),
)
# What a part of phase 2's loss is, by its name in TRL's DPOConfig.
LOSS_PARTS = {
    "sigmoid": "DPO’s loss of a pair, which is ln 2 = 0.69 as long as the model equals its reference, and falls as the"
    " chosen answer becomes likelier than the rejected one",
    "sft": "the mean negative log-likelihood of the chosen answers’ tokens, as in phase 1",
    "hinge": "a hinge loss of the margin, which is 1 as long as the model equals its reference",
    "ipo": "the squared distance of the margin from 1 / (2 beta)",
}
MOST_PICTURES = 4000  # of a page, so that it can be mailed; only the latest episodes have pictures
REMEDY = "Remove that line (the others are kept), then go on."


def phase_folders(results: Results, folder: Path) -> dict[str, Path | None]:
    """Return checkpoint -> the folder of its phase, which holds metrics.jsonl; None without such a folder."""
    folders = {}
    for name, path in results["config"]["checkpoints"].items():
        if not isinstance(path, str):  # an endpoint
            continue
        places = [folder / name, _found(Path(path).parent, folder)]  # a copied or renamed run shows its own training
        folders[name] = next((place for place in places if (place / "metrics.jsonl").is_file()), None)
    return folders


def merged_of(results: Results, folder: Path) -> dict[str, list[str]]:
    """Return the checkpoints of which each merged one was made, by its manifest: {"slerp": ["phase2", "phase3"]}.

    Models that were not evaluated are left out: the list of a merged one is empty if none was.
    """
    paths = {name: results["config"]["checkpoints"].get(name) for name in results["checkpoints"]}
    places = {name: path for name, path in paths.items() if isinstance(path, str)}  # the others are endpoints
    merged = dict[str, list[str]]()
    for name, path in places.items():
        models = _models_merged([_found(path, folder), folder / name, folder / name / Path(path).name])
        if models is not None:
            found = {_model_folder(model, folder) for model in models}
            merged[name] = [each for each in places if each != name and _model_folder(places[each], folder) in found]
    return merged


def _model_folder(path: str, folder: Path) -> Path:
    """Return the folder of a model, which may be named with or without its last part `final`."""
    place = Path(path)
    return _found(place.parent if place.name == "final" else place, folder).absolute()


def _found(path: str | Path, folder: Path) -> Path:
    """Return where a path of an evaluation leads: from the working directory, or else from above the folder of results.

    Paths are those that the evaluation was called with, often relative to the folder that holds all runs.
    """
    places = (place / path for place in (Path(), *folder.resolve().parents))
    return next((place for place in places if os.path.exists(place)), Path(path))


def _models_merged(places: Sequence[Path]) -> list[str] | None:
    """Return the models that a checkpoint was merged of, by the first manifest of these folders; None for others."""
    for place in places:
        try:
            meta = checkpoint.read_manifest(place)["meta"]
        except UserError:  # the model is elsewhere
            continue
        if meta.get("phase") != "merge":
            return None
        records = meta.get("history") or [{}]
        return [each["model"] for each in records[-1].get("merged", ())]
    return None


def kept_steps(results: Results, folders: dict[str, Path | None]) -> dict[str, tuple[int, int]]:
    """Return (its step, the last step) of each checkpoint that is an earlier step of its run, as phase 3 may keep."""
    kept = {}
    for name, place in folders.items():
        if place is None:
            continue
        try:
            manifest = checkpoint.read_manifest(place / Path(results["config"]["checkpoints"][name]).name)
        except UserError:  # only the files of its training are here
            continue
        step, last = manifest["meta"].get("step"), _last_step(runlog.read_metrics(place / "metrics.jsonl"))
        if isinstance(step, int) and step < last:
            kept[name] = step, last
    return kept


def curves(
    folders: dict[str, Path | None],
) -> list[tuple[str, Path, list[Chart], str, list[Record] | None]]:
    """Return (checkpoint, metrics.jsonl, charts, what the loss of pairs is made of, alarms) of each phase.

    The alarms are None if the phase does not have an alarms.jsonl.
    """
    phases = []
    for name, place in folders.items():
        if place is None:  # it was not trained here
            continue
        file, kept = place / "metrics.jsonl", place / "alarms.jsonl"
        rows = runlog.read_metrics(file)
        alarms = runlog.read_metrics(kept) if kept.is_file() else None
        found, pairs = drawn(rows, alarms or ()), ""
        if any(key.startswith("rewards/") for row in rows for key in row):
            short, pairs = loss_of_pairs(place)
            made = f"{short}, as explained above. " if short else "Explained above. "
            found = [each._replace(about=made + each.about) if each.title == "Loss" else each for each in found]
        phases.append((name, file, found, pairs, alarms))
    return phases


def count_of(phases: Sequence[tuple[str, Path, list[Chart], str, list[Record] | None]]) -> str:
    """Return how many charts and alarms `curves` found: `12 charts, 1 alarm`."""
    drawn_charts, raised = sum(len(each[2]) for each in phases), sum(len(each[4] or ()) for each in phases)
    words = f"{drawn_charts} chart{'s' * (drawn_charts != 1)}"
    return words + (f", {raised} alarm{'s' * (raised != 1)}" if raised else "")


def drawn(rows: Sequence[Record], alarms: Sequence[Record] = ()) -> list[Chart]:
    """Return the charts of CURVES that these rows have values for."""
    drawn_charts = (charts.chart(each.title, curve_lines(rows, each.lines), alarms, each.about) for each in CURVES)
    return [chart for chart in drawn_charts if chart]


def curve_lines(rows: Sequence[Record], keys: Sequence[tuple[str, str]]) -> dict[str, charts.Line]:
    """Return label -> [(step, value), ...] for the keys that these rows have."""
    lines: dict[str, charts.Line] = {}
    for row, (pattern, label) in itertools.product(rows, keys):
        for key, value in row.items():
            matches = fnmatchcase(key, pattern) and key.count("/") == pattern.count("/")  # `*` is one part
            if matches and isinstance(value, int | float) and math.isfinite(value):
                lines.setdefault(_label(key, pattern) if label == "*" else label, []).append((row["step"], value))
    return {label.replace("_", " "): line for label, line in lines.items()}


def _label(key: str, pattern: str) -> str:
    """Return what stands for the stars: ("rollout/sums/reward_math", "rollout/*/reward_*") -> sums, math."""
    matched = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), key)
    return ", ".join(matched.groups()) if matched else key


def loss_of_pairs(place: Path) -> tuple[str, str]:
    """Return what phase 2's loss is made of, short and in a sentence, from the run_config.yaml beside its metrics."""
    config = place / "run_config.yaml"
    try:
        trainer = parse_yaml(config.read_text(encoding="utf-8")).get("trainer") or {}
        names = trainer.get("loss_type") or ["sigmoid"]
        names = [names] if isinstance(names, str) else list(map(str, names))
        weights = [float(weight) for weight in trainer.get("loss_weights") or [1.0] * len(names)]
    except (OSError, ValueError, TypeError, AttributeError):  # an older or copied run: what can be said of any
        about = f"The loss is about pairs of answers: {LOSS_PARTS['sigmoid']}. Other parts of `loss_type` are added."
        return "", about
    parts = [
        f"{weight:g} × {name}" + (f" ({LOSS_PARTS[name]})" if name in LOSS_PARTS else "")
        for name, weight in zip(names, weights, strict=False)
    ]
    tail = " So it can stay far above 0.69." if "sft" in names else ""
    short = " + ".join(f"{weight:g} × {name}" for name, weight in zip(names, weights, strict=False))
    return short, f"The loss of a pair is {' + '.join(parts)}.{tail}"


def recorded(file: Path, pictures: Pictures) -> list[Record]:
    """Return the rows of a transcripts.jsonl for the browser; UserError for a line of another kind.

    Episodes are played again, the last one first, if their settings are in a file beside it.
    """
    rows, shown = files.read_json_lines(file, REMEDY, appended=False), list[Record]()
    for number, row in enumerate(rows, 1):
        try:
            shown.append(browser_row(row))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"Line {number} of {file} is not an episode or an answer as phase 3 and evaluate_model.py write them"
                f" ({one_line(error)})."
            ) from error
    stage_of = _stages(file)
    if stage_of is not None:
        for number in reversed(range(len(rows))):
            if "actions" in rows[number]:
                shown[number] = _played(rows[number], shown[number], stage_of, pictures)
    return shown


def _played(row: Record, plain: Record, stage_of: Callable[[Record], Stage], pictures: Pictures) -> Record:
    """Return the row with pictures, or without them and with the reason."""
    if len(pictures.coded) >= MOST_PICTURES:
        facts = f"without pictures: the page keeps {MOST_PICTURES:,}, of the latest episodes"
        return plain | {"facts": " · ".join(filter(None, (plain["facts"], facts)))}
    try:
        return with_pictures(row, stage_of(row), pictures)
    except (Exception, SystemExit) as error:  # an environment may raise anything, or may have changed
        return plain | {"facts": f"cannot be played again: {one_line(error)}"}


def _stages(file: Path) -> Callable[[Record], Stage] | None:
    """Return a function from a row to its stage, from run_config.yaml (phase 3) or results.json; None without both."""
    config, results = file.with_name("run_config.yaml"), file.with_name("results.json")
    remedy = "Remove it, then the episodes are shown without pictures."
    if config.is_file():
        try:
            return partial(training_stage, parse_yaml(files.read_text(config, remedy)))
        except ValueError as error:
            raise UserError(f"{config} is damaged: {one_line(error)}. {remedy}") from None
    if results.is_file():
        return partial(evaluation_stage, files.read_json(results, remedy))
    return None


def recorded_episodes(folders: dict[str, Path | None], pictures: Pictures) -> list[Record]:
    """Return every episode that the phases recorded."""
    files_found = list(dict.fromkeys(place / "transcripts.jsonl" for place in folders.values() if place))
    by_file = [recorded(file, pictures) for file in reversed(files_found) if file.is_file()]
    return [row for rows in reversed(by_file) for row in rows]


# ---------------------------------------------------------------------------------------------------- data and cost


def data(folders: dict[str, Path | None]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return (checkpoint, [(kind, cells)]): how many rows of each data set were read, trained on and dropped."""
    tables = []
    for name, place in folders.items():  # an older run has only the table of its model card
        kept = [f"{kind}/{file}.json" for kind in ("rows", "pairs") for file in ("table", "sources")] if place else []
        file = next((place / name for name in kept if place and (place / name).is_file()), None)
        if file is None:
            continue
        rows = []
        for source in files.parse_json(files.read_text(file, "Train again to have this table.")):
            dropped = "; ".join(f"{count:,} {reason}" for reason, count in source.get("dropped", {}).items())
            counts = [f"{source[key]:,}" if key in source else "" for key in ("read", "train", "held_out")]
            last = dropped or ("none" if "dropped" in source else "not recorded")
            rows.append((source["kind"], [source["path"], source["licence"] or "not stated", *counts, last]))
        tables.append((name, rows))
    return tables


def cost(results: Results, folders: dict[str, Path | None]) -> Record:
    """Return steps, tokens, time and memory of each phase from its metrics.jsonl; {} without trained phases."""
    rows, total, kept = [], 0.0, kept_steps(results, folders)
    for name, place in folders.items():
        if place is None:
            continue
        metrics = runlog.read_metrics(place / "metrics.jsonl")
        parts = {key: sum(_seconds(row, key) for row in metrics) for key in ("rollout", "update", "evaluation")}
        seconds = sum(parts.values()) + sum(_seconds(row, "") for row in metrics)
        total += seconds
        tokens = max((row.get("tokens") or row.get("num_tokens") or 0 for row in metrics), default=0)
        memory = max((row.get("memory") or 0.0 for row in metrics), default=0.0)
        rows.append((
            name,
            f"{_last_step(metrics):,}" + (f" (kept: step {kept[name][0]:,})" if name in kept else ""),
            f"{int(tokens):,} {'sampled' if parts['rollout'] else 'read'}" if tokens else "not recorded",
            duration(seconds) if seconds else "not recorded",
            ", ".join(f"{key} {duration(value)}" for key, value in parts.items() if value),
            f"{memory:.1f} GiB" if memory else "not recorded",
        ))  # fmt: skip
    return {"rows": rows, "total": duration(total), "hardware": results["config"].get("hardware")} if rows else {}


def _last_step(metrics: Sequence[Record]) -> int:
    return max((row["step"] for row in metrics), default=0)


def _seconds(row: Record, part: str) -> float:
    value = row.get(f"seconds/{part}" if part else "seconds")
    return float(value) if isinstance(value, int | float) else 0.0


def duration(seconds: float) -> str:
    """Write a duration: 75 -> 1:15 min, 4000 -> 1:06 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds) // 60
    return f"{minutes}:{round(seconds) % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
