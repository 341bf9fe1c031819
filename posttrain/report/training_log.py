"""What happened while it trained?  Curves with alarms, recorded episodes, the rows of phases 1 and 2, and the cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from posttrain import files
from posttrain.config import parse_yaml
from posttrain.report import charts
from posttrain.report.episodes import Stage, evaluation_stage, training_stage
from posttrain.report.markup import chip, table, text
from posttrain.report.rows import Pictures, entry, with_pictures
from posttrain.report.tables import Results
from posttrain.runtime import runlog
from posttrain.types import Record, UserError, one_line

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
    ("KL to the rollout's policy", (("policy/kl_to_old", "per token"),)),
    ("Norm of the gradient", (("policy/grad_norm", "policy"), ("grad_norm", "before clipping"))),
    ("Invalid turns", (("rollout/invalid_turns", "share"),)),
    ("Tokens per turn", (("rollout/response_tokens", "training"),)),
)
DPO_LOSS = (
    "The loss is about pairs of answers. DPO’s part is ln 2 = 0.69 as long as the model still is its reference, and"
    " falls as the chosen answer of each pair gains on the rejected one; other parts (sft: the loss of the chosen"
    " answers) are added to it."
)
MOST_PICTURES = 4000  # of a page, so that it can be mailed; the latest episodes have them, earlier ones have none
REMEDY = "Remove that line (the others are kept), then go on."


def phase_folders(results: Results, folder: Path) -> dict[str, Path | None]:
    """checkpoint -> the folder of the phase that made it, where its metrics.jsonl is; None where there is none."""
    found = {}
    for name, path in results["config"]["checkpoints"].items():
        if not isinstance(path, str):  # an endpoint
            continue
        places = [folder / name, Path(path).parent]  # a run that was copied or renamed shows its own training
        found[name] = next((place for place in places if (place / "metrics.jsonl").is_file()), None)
    return found


def curves(results: Results, folders: dict[str, Path | None]) -> str:
    """The curves of each phase, and below them its alarms."""
    blocks = ""
    for name, place in folders.items():
        if place is None:  # it was not trained here
            continue
        rows = runlog.read_metrics(place / "metrics.jsonl")
        raised = alarms(place)
        drawn = "".join(charts.lines(title, series(rows, keys), raised or ()) for title, keys in CURVES)
        drawn = drawn or f'<p class="quiet">{text(place / "metrics.jsonl")} holds no curve yet.</p>'
        pairs = any(key.startswith("rewards/") for row in rows for key in row)
        drawn = (f'<p class="quiet">{DPO_LOSS}</p>' if pairs else "") + f'<div class="charts">{drawn}</div>'
        blocks += f"<h3>{chip(results, name)}</h3>{drawn}{_told(raised)}"
    how = "Move over a curve or tap on it for its values; drag to zoom, double-click for the whole run."
    return blocks and f'<p class="quiet">{how} With the keyboard: arrow keys, + and -, Escape.</p>{blocks}'


def alarms(place: Path) -> list[Record] | None:
    """What the run warned of, step by step; None where it kept no such file."""
    if not (place / "alarms.jsonl").is_file():
        return None
    return runlog.read_metrics(place / "alarms.jsonl")


def _told(raised: list[Record] | None) -> str:
    if raised is None:
        return ""
    if not raised:
        return '<p class="quiet">No alarm was raised.</p>'
    items = "".join(
        f"<li><b>Step {row['step']}: {text(row['name'].replace('_', ' '))}.</b> {text(row['message'])}"
        f' <span class="quiet">{text(row["remedy"])}</span></li>'
        for row in raised
    )
    return f'<ul class="alarms">{items}</ul>'


def series(rows: Sequence[Record], keys: Sequence[tuple[str, str]]) -> dict[str, charts.Line]:
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


def recorded(file: Path, pictures: Pictures) -> list[Record]:
    """The rows of a transcripts.jsonl; episodes are played again, the last one first, where a file beside it says how.

    UserError for a line that is neither an episode nor an answer.
    """
    rows, found = files.read_json_lines(file, REMEDY, appended=False), list[Record]()
    for number, row in enumerate(rows, 1):
        try:
            found.append(entry(row))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"Line {number} of {file} is not an episode or an answer as phase 3 and evaluate_model.py write them"
                f" ({one_line(error)})."
            ) from error
    stage_of = _stages(file)
    if stage_of is not None:
        for number in reversed(range(len(rows))):
            if "actions" in rows[number]:
                found[number] = _played(rows[number], found[number], stage_of, pictures)
    return found


def _played(row: Record, plain: Record, stage_of: Callable[[Record], Stage], pictures: Pictures) -> Record:
    """The entry with pictures, or the plain one with why there are none."""
    if len(pictures.coded) >= MOST_PICTURES:
        facts = f"without pictures: the page keeps {MOST_PICTURES:,}, of the latest episodes"
        return plain | {"facts": " · ".join(filter(None, (plain["facts"], facts)))}
    try:
        return with_pictures(row, stage_of(row), pictures)
    except (Exception, SystemExit) as error:  # an environment may raise anything, and may have changed since
        return plain | {"facts": f"cannot be played again: {one_line(error)}"}


def _stages(file: Path) -> Callable[[Record], Stage] | None:
    """How the episodes of phase 3 (run_config.yaml) or of the evaluator (results.json) were set up, if known."""
    config, results = file.with_name("run_config.yaml"), file.with_name("results.json")
    if config.is_file():
        remedy = "Remove it, then the episodes are shown without pictures."
        try:
            return partial(training_stage, parse_yaml(files.read_text(config, remedy)))
        except ValueError as error:
            raise UserError(f"{config} is damaged: {one_line(error)}. {remedy}") from None
    if results.is_file():
        return partial(evaluation_stage, files.read_json(results, "Remove it, then there are no pictures."))
    return None


def episodes(folders: dict[str, Path | None], pictures: Pictures) -> list[Record]:
    """Every episode that was recorded while a phase trained."""
    found = list(dict.fromkeys(place / "transcripts.jsonl" for place in folders.values() if place))
    by_file = [recorded(file, pictures) for file in reversed(found) if file.is_file()]
    return [row for rows in reversed(by_file) for row in rows]


# ---------------------------------------------------------------------------------------------------- data and cost


def data(results: Results, folders: dict[str, Path | None]) -> str:
    """What became of the rows of each data set, as the tables before training said it."""
    blocks = ""
    for name, place in folders.items():
        file = next((file for kind in ("rows", "pairs") for file in _tables(place, kind)), None)
        if file is None:
            continue
        rows = ""
        for source in files.parse_json(files.read_text(file, "Train again to have this table.")):
            dropped = "; ".join(f"{count:,} {reason}" for reason, count in source.get("dropped", {}).items())
            cells = [text(source["kind"]), text(source["path"]), text(source["licence"] or "not stated")]
            cells += [f"{source[key]:,}" if key in source else "" for key in ("read", "train", "held_out")]
            cells += [text(dropped or ("none" if "dropped" in source else "not recorded"))]
            labels = ("", "from", "licence", "read", "trained on", "held out", "dropped")
            rows += "<tr>" + "".join(
                f'<td data-label="{label}">{cell}</td>' if label else f"<th>{cell}</th>"
                for label, cell in zip(labels, cells, strict=True)
            )
            rows += "</tr>"
        head = "".join(f"<th>{label}</th>" for label in ("kind", *labels[1:]))
        blocks += f"<h3>{chip(results, name)}</h3>{table(head, rows, 'cards data')}"
    return blocks


def _tables(place: Path | None, kind: str) -> list[Path]:
    """The whole table, or of an older run what its model card says."""
    found = [place / kind / name for name in ("table.json", "sources.json")] if place else []
    return [file for file in found if file.is_file()]


def cost(results: Results, folders: dict[str, Path | None]) -> str:
    """Steps, tokens, time and memory of each phase, from its metrics.jsonl."""
    rows, total = "", 0.0
    for name, place in folders.items():
        if place is None:
            continue
        found = runlog.read_metrics(place / "metrics.jsonl")
        parts = {key: sum(_seconds(row, key) for row in found) for key in ("rollout", "update", "evaluation")}
        seconds = sum(parts.values()) + sum(_seconds(row, "") for row in found)
        total += seconds
        tokens = max((row.get("tokens") or row.get("num_tokens") or 0 for row in found), default=0)
        memory = max((row.get("memory") or 0.0 for row in found), default=0.0)
        split = ", ".join(f"{key} {spent(value)}" for key, value in parts.items() if value)
        cells = {
            "optimizer steps": f"{max((row['step'] for row in found), default=0):,}",
            "tokens": f"{int(tokens):,}" + (" sampled" if parts["rollout"] else " read") if tokens else "not recorded",
            "time": spent(seconds) + (f"<small>{split}</small>" if split else "") if seconds else "not recorded",
            "memory": f"{memory:.1f} GiB" if memory else "not recorded",
        }
        body = "".join(f'<td data-label="{label}">{cell}</td>' for label, cell in cells.items())
        rows += f"<tr><th>{chip(results, name)}</th>{body}</tr>"
    if not rows:
        return ""
    head = "<th></th><th>optimizer steps</th><th>tokens</th><th>time</th><th>memory, at most</th>"
    hardware = results["config"].get("hardware")
    on = f" on {text(hardware)}" if hardware else ""
    words = f"Together {spent(total)} of training{on}, as far as it was recorded."
    return f'{table(head, rows, "cards")}<p class="quiet">{words}</p>'


def _seconds(row: Record, part: str) -> float:
    found = row.get(f"seconds/{part}" if part else "seconds")
    return float(found) if isinstance(found, int | float) else 0.0


def spent(seconds: float) -> str:
    """75 -> 1:15 min, 4000 -> 1:06 h"""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds) // 60
    return f"{minutes}:{round(seconds) % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
