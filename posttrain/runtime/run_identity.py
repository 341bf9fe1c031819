"""Is this the run that was started?  A resumed run needs the same settings and processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml

from posttrain import files
from posttrain.config import TrainingRun, parse_yaml
from posttrain.runtime import checkpoint, launcher, runlog
from posttrain.types import UserError

TrainingConfig = TypeVar("TrainingConfig", bound=TrainingRun)

COUNTS = "counts.json"  # in each checkpoint of phases 1 and 2: what TRL counts and does not save
# Keys in which a resumed run may differ.
FREE_TO_CHANGE = ("output_dir", "run_name", "report_to", "hardware", "rollout.servers")


def same_run(output_dir: Path, settings: dict[str, Any]) -> None:
    """Raise UserError with every setting in which a resumed run differs from the run that was started.

    A damaged metrics.jsonl, which the run could not continue, is such an error, too.
    """
    for log in ("metrics.jsonl", "transcripts.jsonl", "alarms.jsonl", "shown.jsonl"):
        if (output_dir / log).exists():
            runlog.read_metrics(output_dir / log)
    begun = begun_with(output_dir)
    if not begun:  # a new run, or one killed before its first step
        return
    before, now = _flat(begun), _flat(settings)
    keys = [key for key in sorted(before | now) if not {key, key.split(".")[0]} & {*FREE_TO_CHANGE}]
    differing = [key for key in keys if before.get(key) != now.get(key)]
    changed = [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in differing]
    if changed:
        raise UserError(
            f"--resume continues the run in {output_dir} exactly as it was started, but its settings differ: "
            f"{'; '.join(changed)}. Use the old settings, or start a new run (output_dir=...)."
        )


def same_batches(output_dir: Path, cfg: TrainingConfig) -> TrainingConfig:
    """Return the config of a resumed run of phase 1 or 2 with which these processes train on the same batches.

    A batch is per_device_train_batch_size x gradient_accumulation_steps x processes rows; the accumulation makes up for
    the processes.

    Raises:
        UserError: it cannot, or a checkpoint has another kind of sharding.
    """
    earlier = _begun(output_dir)
    now, kind = launcher.processes(), launcher.sharding()
    if earlier is None:
        return cfg
    before, earlier_kind = earlier
    trainer: dict[str, Any] = cfg.trainer  # type: ignore[attr-defined]
    started = f"The run in {output_dir} was started on {before} process{'es' if before > 1 else ''}"
    if earlier_kind != kind:
        raise UserError(
            f"{started} with sharding {earlier_kind} and would continue with {kind}, which stores optimizer states in"
            f" another form. Use {_launch(earlier_kind, before)}, or start a new run (output_dir=...)."
        )
    if before == now:
        return cfg
    steps = trainer.get("gradient_accumulation_steps", 1)
    why = ""
    if kind.startswith("zero"):
        why = "DeepSpeed's checkpoints hold one file for each process"
    elif steps * before % now:
        why = f"{steps * before} micro-batches a step (gradient_accumulation_steps {steps}) cannot be shared by {now}"
    if why:
        raise UserError(
            f"{started} and would continue with {now}: {why}, so its batches would hold other rows. Use"
            f" {_launch(kind, before)}, or start a new run (output_dir=...)."
        )
    return cfg.model_copy(update={"trainer": trainer | {"gradient_accumulation_steps": steps * before // now}})


def begun_processes(cfg: TrainingRun, args: Any) -> int:
    """Return the number of processes for which this config's accumulation is meant; `args` is a TrainingArguments."""
    trainer: dict[str, Any] = cfg.trainer  # type: ignore[attr-defined]
    return args.world_size * args.gradient_accumulation_steps // trainer.get("gradient_accumulation_steps", 1)


def share_out_in_words(args: Any, begun: int, rows: int) -> str:
    """Return the line about a run that continues on another number of processes."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    last = ""
    if left := rows % batch:
        last = f" The last step of an epoch has {left} rows, which several processes fill up."
    return (
        f"Started on {begun} process{'es' if begun > 1 else ''}, now on {args.world_size}: with"
        f" gradient_accumulation_steps={args.gradient_accumulation_steps} a step has the same {batch} rows.{last}"
    )


def _begun(output_dir: Path) -> tuple[int, str] | None:
    """Return processes and sharding of the run that wrote the checkpoints here; None where no checkpoint has them."""
    for _, folder in reversed(checkpoint.numbered(output_dir)):
        try:
            counts = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
            return int(counts["processes"]), str(counts.get("sharding", "none"))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged, and skipped later
            continue
    return None


def _launch(kind: str, processes: int) -> str:
    if kind != "none":
        return f"accelerate launch --config_file {launcher.FILES}/{kind}.yaml --num_processes {processes}"
    return f"torchrun --nproc_per_node {processes}" if processes > 1 else "python, without torchrun"


def _read_begun(file: Path) -> dict[str, Any]:
    remedy = "If you are sure of the settings, delete this file; --resume then writes the present ones."
    try:
        begun = parse_yaml(files.read_text(file, remedy))
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        raise UserError(f"{file}, which holds the settings of the run, is damaged. {remedy}")
    return begun


def begun_with(output_dir: Path) -> dict[str, Any]:
    """Return the settings of the run that was started in a folder; empty where none has come to its first step.

    Raises:
        UserError: they are damaged.
    """
    file = output_dir / checkpoint.RUN_CONFIG
    return _read_begun(file) if file.exists() else {}


def remember_run(output_dir: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write the settings that `same_run` compares with, unless this is a resumed run that has them."""
    file = output_dir / checkpoint.RUN_CONFIG
    if not (resume and file.exists()):
        files.write_whole(file, [yaml.safe_dump(settings, sort_keys=False)])


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return {"a.b": 1} for {"a": {"b": 1}}."""
    if not isinstance(tree, dict):
        return {path: tree}
    parts = [_flat(sub, f"{path}.{name}" if path else name) for name, sub in tree.items()]
    return {key: value for part in parts for key, value in part.items()}
