"""Is this the run that was begun?  A run that --resume goes on with has the same settings and processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from posttrain import checkpoint, files, runlog
from posttrain.config.yaml_file import parse_yaml
from posttrain.types import UserError

COUNTS = "counts.json"  # in each checkpoint of phases 1 and 2: what TRL counts and does not save
FREE_TO_CHANGE = ("output_dir", "run_name", "report_to", "hardware")  # what a resumed run may have otherwise


def same_run(output_dir: Path, settings: dict[str, Any]) -> None:
    """A resumed run must be the run that was begun: UserError with every setting that differs.

    Logs that it could not be written on to are found here as well, before any work.
    """
    for log in ("metrics.jsonl", "transcripts.jsonl", "alarms.jsonl", "shown.jsonl"):
        if (Path(output_dir) / log).exists():
            runlog.read_metrics(Path(output_dir) / log)
    begun = Path(output_dir) / checkpoint.RUN_CONFIG
    if not begun.exists():  # a new run, or one killed before its first step
        return
    before, now = _flat(_read_begun(begun)), _flat(settings)
    keys = [key for key in sorted(before | now) if key.split(".")[0] not in FREE_TO_CHANGE]
    differing = [key for key in keys if before.get(key) != now.get(key)]
    changed = [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in differing]
    if changed:
        raise UserError(
            f"--resume goes on with the run in {output_dir} exactly as it was begun, but its settings differ: "
            f"{'; '.join(changed)}. Use the old settings, or start a new run (output_dir=...)."
        )


def same_processes(output_dir: Path) -> None:
    """UserError when a run of phase 1 or 2 goes on with another number of processes: they share out each batch."""
    now = int(os.environ.get("WORLD_SIZE", "1"))
    for file in Path(output_dir).glob(f"checkpoint-*/{COUNTS}"):
        try:
            before = int(json.loads(file.read_text(encoding="utf-8"))["processes"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged, and passed over later
            continue
        if before != now:
            begun = f"torchrun --nproc_per_node {before}" if before > 1 else "python, without torchrun"
            raise UserError(
                f"The run in {output_dir} was begun on {before} process{'es' if before > 1 else ''} and would go on on "
                f"{now}: its batches would hold other rows, and as many times more or fewer. Use {begun}, or start a "
                "new run (output_dir=...)."
            )


def _read_begun(file: Path) -> dict[str, Any]:
    remedy = "If you are sure of the settings, delete this file; --resume then writes those of now into it."
    try:
        begun = parse_yaml(files.read_text(file, remedy))
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        raise UserError(f"{file}, the settings that the run was begun with, is damaged. {remedy}")
    return begun


def remember_run(output_dir: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write the settings that `same_run` compares with, unless this goes on with a run that has."""
    begun = Path(output_dir) / checkpoint.RUN_CONFIG
    if not (resume and begun.exists()):
        unnamed = begun.with_suffix(".partial")
        unnamed.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        unnamed.rename(begun)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    if not isinstance(tree, dict):
        return {path: tree}
    parts = [_flat(sub, f"{path}.{name}" if path else name) for name, sub in tree.items()]
    return {key: value for part in parts for key, value in part.items()}
