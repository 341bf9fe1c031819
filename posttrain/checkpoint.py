"""Is this folder a whole checkpoint, and which is the newest one that is?

A folder counts as a checkpoint once `manifest.json` lies in it: the manifest holds the size and the sha256 of every
other file and is written last, after everything else has reached the disk.  A kill at any moment therefore leaves
either the whole checkpoint or none.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from posttrain.types import UserError

MANIFEST = "manifest.json"
LOCK = ".lock"
RUN_CONFIG = "run_config.yaml"

# The lock of every output folder this process has claimed; the kernel lets go of it however the process ends.
_claimed: dict[Path, IO[str]] = {}


def save(folder: Path, write: Callable[[Path], object], **meta: Any) -> Path:
    """Let `write(temporary_folder)` fill a checkpoint, then put it at `folder` in one rename.

    A `folder` that is already there is replaced only after the new one is complete.  Example of what arrives:
        final/model.safetensors  final/config.json  ...  final/manifest.json
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in sorted(folder.parent.glob(f".{folder.name}.partial-*"), reverse=True):  # left by a killed save
        if stale.name.endswith("-old") and not folder.exists():
            stale.rename(folder)  # killed between the two renames below: this is still the newest whole one
        else:
            shutil.rmtree(stale)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    with full_disk_in_words(partial):
        write(partial)
        seal(partial, **meta)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.partial-{os.getpid()}-old")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    _sync(folder.parent)
    return folder


def seal(folder: Path, **meta: Any) -> dict[str, Any]:
    """Write the manifest of a folder whose files are all there, for checkpoints that somebody else wrote."""
    folder = Path(folder)
    files = {}
    for path in _files(folder):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {"sha256": _sha256(path), "bytes": path.stat().st_size}
    for sub in {path.parent for path in _files(folder)}:
        _sync(sub)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest = {"format": 1, "created": created, "meta": meta, "files": files}
    unnamed = folder / f"{MANIFEST}.partial"
    with unnamed.open("w", encoding="utf-8") as out:
        json.dump({**manifest, "seal": _digest(manifest)}, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())
    unnamed.rename(folder / MANIFEST)
    _sync(folder)
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    """sha256 of everything else in a manifest: it vouches for the files, this vouches for it."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint in which every byte is as it was written; otherwise a UserError that says what is
    wrong."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{folder} is damaged: {name} is missing. Use another checkpoint or make this one again.")
        if path.stat().st_size != expected["bytes"]:
            raise UserError(
                f"{folder} is damaged: {name} has {path.stat().st_size} bytes instead of {expected['bytes']}. "
                "Use another checkpoint or make this one again."
            )
        if _sha256(path) != expected["sha256"]:
            raise UserError(
                f"{folder} is damaged: the contents of {name} differ from its checksum. "
                "Use another checkpoint or make this one again."
            )
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest as it stands, files unchecked; UserError when there is none that can be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no checkpoint: there is no such folder.")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        well_formed = manifest.pop("seal") == _digest(manifest)
    except FileNotFoundError:
        raise UserError(f"{folder} is no complete checkpoint: {MANIFEST}, which is written last, is missing.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        raise UserError(
            f"{folder} is damaged: {MANIFEST} cannot be read. Use another checkpoint or make this one again."
        )
    return manifest


def latest_good(run_dir: Path, pattern: str = "checkpoint-*", say: Callable[[str], object] = print) -> Path | None:
    """The checkpoint with the highest number that verifies; `say` hears of every newer one that does not."""
    found = [path for path in Path(run_dir).glob(pattern) if path.is_dir() and re.search(r"\d+$", path.name)]
    for folder in sorted(found, key=_number, reverse=True):
        try:
            verify(folder)
        except UserError as problem:
            say(f"Skipped {folder.name}: {problem}")
        else:
            return folder
    return None


def in_use(output_dir: Path, resume: bool) -> None:
    """UserError when a run may not write to this folder; nothing is created or changed."""
    output_dir = Path(output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"output_dir={output_dir} is a file. Choose another name: output_dir=...")
    found = [path for path in output_dir.iterdir() if path.name != LOCK] if output_dir.is_dir() else []
    if not resume and any(_worth_keeping(path) for path in found):
        raise UserError(
            f"output_dir={output_dir} already holds a run, which is left as it is. "
            "Go on with it (--resume) or choose another name (output_dir=...)."
        )
    if resume and not found:
        raise UserError(
            f"There is nothing to resume in output_dir={output_dir}. Start without --resume, or name the run's folder."
        )


def _worth_keeping(path: Path) -> bool:
    """False for what a run leaves that failed before its first step: its settings, empty files, prepared rows."""
    if path.name in (RUN_CONFIG, "rows", "pairs") or path.name.startswith((".rows.partial-", ".pairs.partial-")):
        return False
    return path.is_dir() or path.stat().st_size > 0


def claim(output_dir: Path, resume: bool) -> None:
    """Make the output folder this process's own until it ends; UserError when a run lies in it or is writing to it."""
    in_use(Path(output_dir), resume)
    lock_folder(Path(output_dir))


def lock_folder(output_dir: Path) -> None:
    """Make the output folder, which may hold something, this process's own; UserError when another one has it."""
    key = output_dir.resolve()
    if key in _claimed:
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = (output_dir / LOCK).open("w")
    except OSError as error:
        raise UserError(
            f"Nothing can be written to output_dir={output_dir} ({error}). Choose another folder."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"Another process is writing to output_dir={output_dir} right now. "
            "Wait for it, stop it, or choose another name (output_dir=...)."
        ) from None
    _claimed[key] = lock


def needs_free_space(path: Path, needed: int) -> None:
    """UserError when the disk that would hold `path` has less than `needed` bytes left."""
    place = Path(path).resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"Too little disk space for {path}: the run needs about {_size(needed)} and {_size(free)} are free. Make "
            "room, keep fewer checkpoints, or write to another disk (output_dir=...)."
        )


@contextmanager
def full_disk_in_words(path: Path) -> Iterator[None]:
    """What a write raises on a full disk differs from library to library; all of it becomes one UserError."""
    try:
        yield
    except UserError:  # has said what is wrong
        raise
    except Exception as error:
        if shutil.disk_usage(path).free > 10e6 and getattr(error, "errno", None) != errno.ENOSPC:
            raise
        raise UserError(
            f"The disk that holds {path} is full. Checkpoints that were complete still are: make room and go on with "
            "the same command and --resume."
        ) from error


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _files(folder: Path) -> list[Path]:
    own = {MANIFEST, f"{MANIFEST}.partial"}
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if path.relative_to(folder).as_posix() not in own)


def _number(folder: Path) -> int:
    match = re.search(r"\d+$", folder.name)
    assert match
    return int(match[0])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the kernel put a file or a folder's list of names on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
