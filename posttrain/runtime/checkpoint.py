"""Is this folder a whole checkpoint, and which is the newest one that is?

A folder is a checkpoint once it contains `manifest.json`, with the size and the sha256 of every other file. It is
written last, after everything else has reached the disk, so a kill leaves either the whole checkpoint or none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from posttrain import files
from posttrain.types import UserError

MANIFEST = "manifest.json"
LOCK = ".lock"
RUN_CONFIG = "run_config.yaml"
OF_A_PHASE = (RUN_CONFIG, "counts.json", "state.json")  # only folders that a phase has written hold one of these
DASHBOARDS = "dashboards.json"  # the run's name on them
WEIGHTS = "model.safetensors"
CHAT_TEMPLATES = "additional_chat_templates"  # transformers' folder for the templates of a tokenizer with several
WEIGHTS_INDEX = "model.safetensors.index.json"  # names the files of weights that are in several

_LARGE = {".safetensors", ".pt", ".pth", ".bin"}
_REMEDY = "Use another checkpoint or make this one again."

# The lock of every output folder this process has claimed; the kernel releases it however the process ends.
_claimed: dict[Path, IO[str]] = {}


def save(folder: Path, write: Callable[[Path], object], **meta: Any) -> Path:
    """Write a checkpoint, whole or not at all, and return its folder.

    An existing `folder` is replaced only after the new one is complete. Example of the result:
        final/model.safetensors  final/config.json  ...  final/manifest.json

    Args:
        folder: the checkpoint's folder.
        write: writes the files into the temporary folder that it gets; one rename puts this at `folder`.
        **meta: values to store in the manifest, as `step`.
    """
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
    """Write and return the manifest of a folder whose files are complete, for checkpoints that another library wrote.

    All files get the permissions of the umask: safetensors writes weights that only their owner may read.

    Args:
        folder: the checkpoint's folder.
        **meta: values to store in the manifest, as `step`.
    """
    unnamed = folder / f"{MANIFEST}.partial"
    with unnamed.open("w", encoding="utf-8") as out:
        mode = stat.S_IMODE(os.fstat(out.fileno()).st_mode)
        listed = {}
        for path in _files(folder):
            path.chmod(mode)
            _sync(path)
            listed[path.relative_to(folder).as_posix()] = {"sha256": _sha256(path), "bytes": path.stat().st_size}
        for sub in {path.parent for path in _files(folder)}:
            _sync(sub)
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        manifest = {"format": 1, "created": created, "meta": meta, "files": listed}
        out.write(sealed(manifest))
        out.flush()
        os.fsync(out.fileno())
    unnamed.rename(folder / MANIFEST)
    _sync(folder)
    return manifest


def sealed(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest and its seal, which `read_manifest` reads."""
    return json.dumps({**manifest, "seal": _digest(manifest)}, indent=1, sort_keys=True)


def _digest(manifest: dict[str, Any]) -> str:
    """Return sha256 of everything else in a manifest, which detects changes of the manifest itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, *, weights: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint after comparing every file with it.

    Args:
        folder: the checkpoint's folder.
        weights: compare the large files, too; otherwise only configuration, tokenizer and template.

    Raises:
        UserError: a file is missing or differs from what was written.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else None
            changed = (weights or path.suffix not in _LARGE) and size == expected["bytes"]
            changed = changed and _sha256(path) != expected["sha256"]
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}). Fix its permissions (chmod).") from None
        if size is None:
            raise UserError(f"{folder} is damaged: {name} is missing. {_REMEDY}")
        if size != expected["bytes"]:
            raise UserError(f"{folder} is damaged: {name} has {size} bytes instead of {expected['bytes']}. {_REMEDY}")
        if changed:
            raise UserError(f"{folder} is damaged: the contents of {name} differ from its checksum. {_REMEDY}")
    return manifest


def verify_if_sealed(folder: Path, *, weights: bool = True) -> None:
    """Verify a model's folder, which may come from elsewhere and have no manifest.

    Raises:
        UserError: the files differ from the manifest, or a phase's folder has none: changes would go unnoticed.
    """
    if os.path.exists(folder / MANIFEST):
        verify(folder, weights=weights)
    elif mark := next((name for name in OF_A_PHASE if os.path.exists(folder / name)), None):
        raise UserError(
            f"{folder} was written by a phase (it contains {mark}), but its {MANIFEST} is missing, so its files cannot"
            " be checked. Copy the folder again with all its files. If you have changed it on purpose, remove"
            f" {mark}: then it is loaded unchecked, as a model from elsewhere."
        )


def is_whole(folder: Path) -> bool:
    """Return whether `verify` would pass."""
    try:
        return bool(verify(folder))
    except UserError:
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest without checking the files.

    Raises:
        UserError: the manifest is missing or cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a checkpoint: there is no such folder.")
    try:
        manifest = files.parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        well_formed = manifest.pop("seal") == _digest(manifest)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a complete checkpoint: {MANIFEST}, written last, is missing.") from None
    except OSError as error:
        raise UserError(f"{folder / MANIFEST} cannot be read ({error.strerror}). Fix its permissions.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        raise UserError(f"{folder} is damaged: {MANIFEST} cannot be read. {_REMEDY}")
    return manifest


def weight_files(folder: Path) -> list[Path]:
    """Return a model's weight files: those that the index names, or the single file, never others in the folder.

    Raises:
        UserError: the folder has no weights.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        raise UserError(f"{folder} is not a checkpoint: it holds no .safetensors weights ({WEIGHTS}).")
    places = files.read_json(folder / WEIGHTS_INDEX, _REMEDY).get("weight_map")
    names = set(places.values()) if isinstance(places, dict) and all(map(_is_file_name, places.values())) else set()
    if not names:
        raise UserError(f"{folder} is damaged: {WEIGHTS_INDEX} does not say which file holds which tensor. {_REMEDY}")
    if absent := sorted(name for name in names if not (folder / name).is_file()):
        raise UserError(f"{folder} is damaged: {absent[0]}, which {WEIGHTS_INDEX} names, is missing. {_REMEDY}")
    return [folder / name for name in sorted(names)]


def _is_file_name(name: object) -> bool:
    """Return True for a weight file in the folder itself, never outside it."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def numbered(run_dir: Path, name: str = "checkpoint") -> list[tuple[int, Path]]:
    """Return the steps and folders `name-12` of a run, the oldest first, without copies such as `name-old`."""
    paths = [(re.fullmatch(rf"{name}-([0-9]{{1,18}})", path.name), path) for path in run_dir.glob(f"{name}-*")]
    return sorted((int(match[1]), path) for match, path in paths if match and path.is_dir())


def latest_good(
    run_dir: Path, say: Callable[[str], object] = print, also: Callable[[Path], object] | None = None
) -> Path | None:
    """Return the newest checkpoint that verifies; None without one.

    Args:
        run_dir: the run's folder.
        say: called with a line for each newer checkpoint that does not verify.
        also: a further check of a checkpoint's folder, which may raise a UserError.
    """
    for _, folder in reversed(numbered(run_dir)):
        try:
            verify(folder)
            if also is not None:
                also(folder)
        except UserError as problem:
            say(f"Skipped {folder.name}: {problem}")
        else:
            return folder
    return None


def in_use(output_dir: Path, resume: bool) -> None:
    """Raise UserError when a run may not write to this folder; nothing is created or changed."""
    try:
        if output_dir.exists() and not output_dir.is_dir():
            raise UserError(f"output_dir={output_dir} is a file. Choose another name: output_dir=...")
        contents = [path for path in output_dir.iterdir() if path.name != LOCK] if output_dir.is_dir() else []
        used = any(_worth_keeping(path) for path in contents)
    except OSError as error:
        raise UserError(f"output_dir={output_dir} cannot be read ({error.strerror}). Choose another folder.") from None
    if not resume and used:
        raise UserError(
            f"output_dir={output_dir} already holds a run, which is not changed. "
            "Continue it (--resume) or choose another name (output_dir=...)."
        )
    if resume and not contents:
        raise UserError(
            f"There is nothing to resume in output_dir={output_dir}. Start without --resume, or name the run's folder."
        )


def _worth_keeping(path: Path) -> bool:
    """Return False for the files of a run that failed before its first step: settings, empty files, prepared rows."""
    partial = path.name.startswith((".rows.partial-", ".pairs.partial-"))
    if partial or path.name in (RUN_CONFIG, DASHBOARDS, "rows", "pairs"):
        return False
    return path.is_dir() or path.stat().st_size > 0


def claim(output_dir: Path, resume: bool) -> None:
    """Lock the output folder for this process.

    Raises:
        UserError: it holds a run, or another process writes to it.
    """
    in_use(output_dir, resume)
    lock_folder(output_dir)


def lock_folder(output_dir: Path) -> None:
    """Lock the output folder, which may hold files, for this process.

    Raises:
        UserError: another process has locked it.
    """
    key = output_dir.resolve()
    if key in _claimed:
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = (output_dir / LOCK).open("w")
        with tempfile.NamedTemporaryFile(dir=output_dir):  # an old lock may exist where nothing can be created
            pass
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
    """Raise UserError when the disk that would hold `path` has less than `needed` bytes left."""
    place = path.resolve()
    while not os.path.exists(place):  # unlike Path.exists, it is False for a name that is too long
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"Too little disk space for {path}: the run needs about {_size(needed)} and {_size(free)} are free. Make "
            "room, keep fewer checkpoints, or write to another disk (output_dir=...)."
        )


@contextmanager
def full_disk_in_words(path: Path) -> Iterator[None]:
    """Turn the errors that libraries raise on a full disk into one UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = files.failed_write(error)
        if words is None and shutil.disk_usage(path).free > 10e6:
            raise
        raise UserError(
            words
            or f"The disk that holds {path} is full. Complete checkpoints are not damaged: make room and "
            "continue with the same command and --resume."
        ) from error


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _files(folder: Path) -> list[Path]:
    own = {MANIFEST, f"{MANIFEST}.partial"}
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if path.relative_to(folder).as_posix() not in own)


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
