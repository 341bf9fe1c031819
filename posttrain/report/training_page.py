"""What does a training run look like before it is evaluated?  report.html of one phase, from the files it writes.

Phase 3 has answers by reward, calls and results, and recorded episodes; every phase has curves, data and cost.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from posttrain import files
from posttrain.config import parse_yaml
from posttrain.report import answers, tables, training_log
from posttrain.report.episodes import Pictures
from posttrain.report.page import PageSection, recorded_section, render_report
from posttrain.report.rendering import DAMAGED
from posttrain.report.tables import percent
from posttrain.runtime import runlog
from posttrain.types import OF_GAMES, Record, UserError, Words, one_line, value_at, words_of


def is_training_run(folder: Path) -> bool:
    """Return whether a folder holds a training run that was not evaluated there."""
    return (folder / "metrics.jsonl").is_file() and not (folder / "results.json").is_file()


def build_training(folder: Path) -> Path:
    """Write report.html into the folder of a training run and return its path."""
    name, config, pictures = folder.resolve().name, _config(folder), Pictures()
    recorded, words = training_log.recorded_episodes({name: folder}, pictures), _words(config)
    try:
        metrics = runlog.read_metrics(folder / "metrics.jsonl")
        examples = answers.good_and_bad(recorded)
        html = render_report(
            {"top": None, "pairs": [], "recorded": recorded, "answered": [], "pictures": pictures.coded},
            _sections(folder, name, config, metrics, recorded, examples),
            name=name,
            heading="What training changed",
            lead=_lead(config, metrics),
            examples=examples,
            words=words,
            pictured=False,
            colour=lambda _: tables.COLOURS[1],
        )
    except DAMAGED as error:
        raise UserError(
            f"The files in {folder} are damaged or not those of a training run (found {one_line(error)}). Train again,"
            " or remove the file that is damaged."
        ) from error
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


def _config(folder: Path) -> Record:
    file = folder / "run_config.yaml"
    if not file.is_file():
        return {}
    remedy = "Remove it, then the page does without it."
    try:
        config = parse_yaml(files.read_text(file, remedy))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {one_line(error)}. {remedy}") from None
    return config if isinstance(config, dict) else {}


def _words(config: Record) -> Words:
    names = [env["name"] for env in config.get("envs") or ()]
    return words_of(names) if names else OF_GAMES


def _has_programs(config: Record) -> bool:
    return any(value_at(env, "options.agent") for env in config.get("envs") or ())


def _lead(config: Record, metrics: Sequence[Record]) -> str:
    model, last = value_at(config, "model.name_or_path"), max((row["step"] for row in metrics), default=0)
    envs = ", ".join(str(env.get("label") or env["name"]) for env in config.get("envs") or ())
    tools = ", ".join(dict.fromkeys(tool for env in config.get("envs") or () for tool in env.get("tools") or ()))
    parts = [f"{last:,} step{'s' * (last != 1)}", f"from {model}" if model else "", f"on {envs}" if envs else ""]
    lead = " ".join(filter(None, parts)) + "."
    lead += f" The model may call {tools}." if tools else ""
    return lead + (" A program asks the model, and sends what follows an answer." if _has_programs(config) else "")


def _sections(
    folder: Path,
    name: str,
    config: Record,
    metrics: Sequence[Record],
    recorded: list[Record],
    examples: list[answers.ShownAnswer],
) -> list[PageSection]:
    words = _words(config)
    folders: dict[str, Path | None] = {name: folder}
    run = {"config": {"checkpoints": {name: str(folder / "final")}, "hardware": config.get("hardware")}}
    curves, cost, done = (
        training_log.curves(folders),
        training_log.cost(run, folders),
        [r for r in recorded if r["end"]],
    )
    asked = words.level == "prompt"
    return [
        PageSection(
            "Measured while training", "Summary", "progress", progress(metrics, words, _kept(run, folders)), "", True
        ),
        PageSection(
            "Answers by reward", "Answers", "by_reward", answers.by_reward(done, examples) if asked else {}, "", True
        ),
        PageSection("Calls and results", "Calls", "calls", answers.calls_table(done, _has_programs(config)), "", True),
        recorded_section(recorded, words),
        PageSection("Learning curves", "Curves", "curves", curves, training_log.count_of(curves), not asked),
        PageSection("The data", "Data", "data", training_log.data(folders)),
        PageSection("What it cost", "Cost", "cost", cost, f"{cost['total']} of training" if cost else ""),
        PageSection("What to type next", "Commands", "commands", _commands(folder, bool(recorded))),
    ]


def _kept(run: Record, folders: dict[str, Path | None]) -> str:
    """Return a sentence about the step that the run has kept; nothing if it is the last one."""
    kept = training_log.kept_steps(run, folders)
    return "".join(f"The run kept step {step} of {last} as its best." for step, last in kept.values())


def progress(metrics: Sequence[Record], words: Words, kept: str) -> list[tuple[str, str, str]]:
    """Return (figure, from where to where, note) of what is measured on held-out tasks or rows, first and last."""
    found = list[tuple[str, str, str]]()
    for kind, tasks in (("evaluation", f"validation {words.levels}"), ("final", f"test {words.levels}")):
        ends = [key for key in dict.fromkeys(key for row in metrics for key in row) if key.startswith(f"{kind}/")]
        for key in (key for key in ends if key.count("/") == 2 and key.endswith("/success")):
            rows = [row for row in metrics if key in row]
            env, of = key.split("/")[1], key.removesuffix("success")
            told = [f"{_share(row, of)} {'after training' if kind == 'final' else _at(row)}" for row in _ends(rows)]
            counts = f"on {rows[-1][of + 'levels']} {tasks}" if of + "levels" in rows[-1] else f"on {tasks}"
            found.append((tables.readable(env), " → ".join(told), counts))
    losses = [row for row in metrics if isinstance(row.get("eval_loss"), int | float)]
    if losses:
        told = " → ".join(f"{row['eval_loss']:.3g} {_at(row)}" for row in _ends(losses))
        found.append(("Loss", told, "on held-out rows"))
    if found and kept:
        found.append(("", kept, ""))
    return found


def _ends(rows: Sequence[Record]) -> Sequence[Record]:
    return rows if len(rows) < 2 else (rows[0], rows[-1])


def _at(row: Record) -> str:
    return "before training" if row["step"] == 0 else f"at step {row['step']:,}"


def _share(row: Record, of: str) -> str:
    share = percent(row[f"{of}success"])
    low, high = row.get(f"{of}low"), row.get(f"{of}high")
    return share if low is None or high is None else f"{share} [{100 * low:.0f}, {100 * high:.0f}]"


def _commands(folder: Path, recorded: bool) -> list[tuple[str, str]]:
    listed = [("All episodes alone, with filters", f"posttrain report {folder / 'transcripts.jsonl'}")]
    return [
        ("Talk to the result", f"posttrain chat {shlex.quote(f'model.name_or_path={folder}/final')}"),
        (
            "Compare it with other checkpoints on test tasks (a config is in docs/own.md)",
            "posttrain eval --config FILE",
        ),
        *(listed if recorded else []),
        ("Make this page again", f"posttrain report {shlex.quote(str(folder))}"),
    ]
