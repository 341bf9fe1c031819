"""What does a person see first?  report.html, section by section, from the files of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from posttrain import files, runlog
from posttrain.report import charts, figures, samples
from posttrain.report.markup import chip, text
from posttrain.report.tables import Results
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
        raise UserError(f"{_damaged(folder)} (found {one_line(error)})") from error
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


def _sections(results: Results, transcripts: list[Record], folder: Path) -> list[tuple[str, str]]:
    """Title and body of each section; an empty body has nothing to show."""
    return [
        ("Results", figures.headline(results)),
        ("Goals", figures.goals(results)),
        ("What changed from phase to phase", figures.differences(results)),
        ("The environments, beside other players", figures.environments(results)),
        ("Before and after, on the same level", samples.episodes(results, transcripts)),
        ("Learning curves", curves(results, folder)),
        ("Samples", samples.answers(results, transcripts)),
        ("Every sampling setting", figures.settings(results)),
        ("What to type next", commands(results, folder)),
        ("How this was measured", provenance(results)),
    ]


def read(folder: Path) -> tuple[Results, list[Record]]:
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
    if not {"checkpoints", "differences", "baselines", "config"} <= set(results) or not results["checkpoints"]:
        raise UserError(_damaged(folder))
    return results, transcripts


def _damaged(folder: Path) -> str:
    return (
        f"The files in {folder} are damaged or not what evaluate_model.py writes. Measure again: "
        f"python evaluate_model.py output_dir={folder} --overwrite"
    )


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
