"""Which rows does phase 1 or 2 read, and in which order?  Prepared once, and kept under checksums."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from posttrain.models import Chat
from posttrain.runtime import FREE_TO_CHANGE, checkpoint, parallel, runlog
from posttrain.types import UserError, derive_seed

TABLE = "table.json"  # in their folder: the report's counts of rows for each data set
SOURCES = "sources.json"  # in their folder: the model card's lines on each data set


def prepare(
    folder: Path, cfg: Any, chat: Chat, args: Any, load: Callable[..., Any], *, resume: bool
) -> dict[str, Dataset]:
    """Return a run's rows as token ids: read from the sources, or from `folder` where a resumed run has them.

    A resumed run takes the rows of `folder` unless a checksum or their settings differ: a source may be large, and far
    away. TRL stores what it computes from the rows in the same folder, above all reference log-probs; `seal_rows` adds
    their checksums. Every process calls this; `load` divides the sources among them.

    Under `group_by_length` the rows are kept in the order in which the first epoch reads them, so that passes of the
    reference, in the same order, have little padding as well. Empty parts are left out of {"train": ..., "eval": ...}.

    Args:
        cfg: SFTRun or DPORun.
        args: SFTConfig or DPOConfig.
        load: `load_sft` or `load_preferences`.
    """
    made_with = _made_with(cfg, chat)
    reusable = resume and runlog.is_main_process() and _still_whole(folder, made_with)
    if not parallel.gather([reusable])[0]:
        loaded = load(cfg.data, chat)
        if runlog.is_main_process():
            train = loaded.train
            if args.train_sampling_strategy == "group_by_length":
                train = train.select(length_pools(row_lengths(train), args, epoch=0))
            rows = {"train": train, "eval": loaded.eval}
            reports = {SOURCES: loaded.table.for_card(), TABLE: [asdict(each) for each in loaded.table.sources]}
            checkpoint.save(folder, lambda out: _write_rows(rows, reports, out), made_with=made_with)
        parallel.barrier()
    parts = {part.name: Dataset.load_from_disk(str(part)) for part in sorted(folder.iterdir()) if part.is_dir()}
    if "eval" not in parts:  # no row is held out of less than ten
        args.eval_strategy = "no"
    return parts


def seal_rows(folder: Path, cfg: Any, chat: Chat) -> None:
    """Add to the checksums what has been computed from the rows since `prepare` wrote them."""
    parallel.barrier()
    if runlog.is_main_process():
        with checkpoint.full_disk_in_words(folder):
            checkpoint.seal(folder, made_with=_made_with(cfg, chat))


def _write_rows(rows: dict[str, Dataset], reports: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    for name, sources in reports.items():
        (folder / name).write_text(json.dumps(sources), encoding="utf-8")
    shown = not datasets.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    try:
        for name, part in rows.items():
            if len(part):
                part.save_to_disk(folder / name)
    finally:
        if shown:
            datasets.enable_progress_bars()


def _still_whole(folder: Path, made_with: str) -> bool:
    """Return whether every byte is as it was written, for these settings. Files that no checksum covers are removed."""
    if not folder.exists():
        return False
    try:
        listed = checkpoint.read_manifest(folder)
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in listed["files"] and name != checkpoint.MANIFEST:
                path.unlink()
        whole = checkpoint.verify(folder)["meta"].get("made_with") == made_with
        problem = "" if whole else f"{folder} was made with other settings."
    except UserError as error:
        problem = str(error)
    print(f"{problem} The rows are prepared again." if problem else f"Prepared rows are used again: {folder}.")
    return not problem


def _made_with(cfg: Any, chat: Chat) -> str:
    """Return sha256 of all that decides which rows there are, and in which order."""
    settings = {key: value for key, value in cfg.model_dump(mode="json").items() if key not in FREE_TO_CHANGE}
    return hashlib.sha256(json.dumps([settings, chat.hash], sort_keys=True).encode()).hexdigest()


def length_pools(lengths: Sequence[int], args: Any, epoch: int) -> list[int]:
    """Return the indices of rows in the order of an epoch, whose consecutive batches hold rows of similar length.

    It sorts the random rows of a few batches (a pool) by length, cuts them into batches, and shuffles all batches.
    Lengths of mixed data differ by ten times, so random batches are half padding.

    Args:
        lengths: tokens of each row.
        args: SFTConfig or DPOConfig.
        epoch: number of the epoch, from 0.
    """
    size = args.per_device_train_batch_size
    pool = 8 if args.device.type == "cpu" else 32  # on a CPU `read_in_slices` cuts what padding is left
    rng = random.Random(derive_seed(args.seed, "length pools", *([epoch] if epoch else [])))
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    for start in range(0, len(order), size * pool):
        similar = sorted(order[start : start + size * pool], key=lambda row: lengths[row])
        batches += [similar[at : at + size] for at in range(0, len(similar), size)]
    full = [batch for batch in batches if len(batch) == size]
    rng.shuffle(full)
    rest = [row for batch in batches if len(batch) < size for row in batch]
    return [row for batch in full for row in batch] + rest


def row_lengths(rows: Any) -> list[int]:
    """Return the tokens of each conversation, or of the longer half of each pair."""
    if "input_ids" in rows.column_names:
        return [len(ids) for ids in rows["input_ids"]]
    columns = (rows[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return [len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in zip(*columns, strict=True)]
