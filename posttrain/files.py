"""How is a file read that may be damaged, and what is the message when the system refuses a write, or memory?

Every reader here raises a UserError that names the file, the place in it and what to do, and no other error.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posttrain.types import UserError, one_line

# Files of rows that phases 1 and 2 read, by the ends of their names.
DATA_FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
DATA_FILES_IN_WORDS = ".jsonl, .json, .csv (also .gz) or .parquet"

# Errors of libraries, beside OSError, when a write fails: safetensors and tokenizers quote the number of the system's
# error, SQLite has its own words, and torch's zip writer says only that it failed.
_SYSTEM_ERROR = re.compile(r"\bos error (\d+)\b")
_FAILED_WRITE = re.compile(
    r"database or disk is full|PytorchStreamWriter failed writing|file write failed|iostream error|"
    + "|".join(re.escape(os.strerror(number)) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR}
_GONE = {errno.EPIPE, errno.EIO}  # of a standard stream: its reader has ended, or its terminal was closed
# Errors of torch, C++ and the loader of libraries, beside MemoryError, when the system has no more memory.
_NO_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|bad_alloc|out of memory|failed to map segment|"
    + re.escape(os.strerror(errno.ENOMEM))
)


def parse_json(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: it is not JSON, nested too deep, or a number has too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def wrong_in_line(error: Exception) -> str:
    """Return what is wrong with a line of a JSON Lines file; json itself would call it line 1."""
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def read_text(file: Path, remedy: str) -> str:
    """Return the contents of a UTF-8 file.

    Args:
        file: path of the file.
        remedy: sentence for the error message that says what to do.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The file {file} cannot be read ({error.strerror}). {remedy}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is damaged: byte {error.start} is not UTF-8. {remedy}") from None
    except ValueError as error:  # a name with a zero byte
        raise UserError(f"The file {str(file)!r:.200} cannot be read ({error}). {remedy}") from None


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        file: path of the file.
        remedy: sentence for the error message that says what to do.

    Raises:
        UserError: the file cannot be read, or does not hold an object.
    """
    try:
        value = parse_json(read_text(file, remedy))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}. {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is damaged: it holds a {type(value).__name__} instead of an object. {remedy}")
    return value


def read_json_lines(file: Path, remedy: str, appended: bool = True) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file.

    A torn row or zero bytes at the end, as a kill or a power failure leaves them, are skipped.

    Args:
        file: path of the file.
        remedy: sentence for the error message that says what to do.
        appended: a run appends to the file, so a last row without a line end is torn.

    Raises:
        UserError: the file cannot be read, or a row is damaged that has whole rows after it.
    """
    try:
        lines = Path(file).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). {remedy}") from None
    rows: list[dict[str, Any]] = []
    damaged = ""
    last = lines.pop()  # has no line end
    if last and not appended:
        lines.append(last)
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line.decode())
            if not isinstance(row, dict):
                raise ValueError(f"it holds a {type(row).__name__} instead of an object")
        except ValueError as error:
            damaged = damaged or f"in line {number}: {wrong_in_line(error)}"
            continue
        if damaged:
            raise UserError(f"{file} is damaged {damaged}. {remedy}")
        rows.append(row)
    return rows


def write_whole(file: Path, lines: Iterable[str]) -> None:
    """Write a text file whole or not at all: after a failure the file is as it was before.

    Args:
        file: path of the file.
        lines: with their line ends.
    """
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        out.writelines(lines)
    partial.replace(file)


def failed_write(error: BaseException) -> str | None:
    """Return a message for the user when a write failed for lack of space or permission; None for any other error.

    Libraries may have raised errors of their own from the system's error.
    """
    for each in _chain(error):
        text = str(each)
        quoted = _SYSTEM_ERROR.search(text)
        number = each.errno if isinstance(each, OSError) else int(quoted[1]) if quoted else None
        place = f" to {each.filename}" if isinstance(each, OSError) and each.filename else ""
        if number in _NO_ROOM or (number is None and _FAILED_WRITE.search(text)):
            return (
                f"Nothing more could be written{place}: the disk is full, or a quota or a limit on the size of files is"
                f" reached ({one_line(each)}). Complete checkpoints are not damaged: make room and start the same"
                " command again, a training run with --resume."
            )
        if number in _REFUSED and each is error:
            return (
                f"The system refused to read or write a file ({one_line(each)}). Fix its permissions or its name,"
                " or choose another folder."
            )
    return None


def out_of_memory(error: BaseException) -> str | None:
    """Return what to tell the user when the machine or a GPU had no more memory; None for any other error."""
    for each in _chain(error):
        if isinstance(each, MemoryError | RuntimeError | OSError | ImportError) and (
            isinstance(each, MemoryError) or _NO_MEMORY.search(str(each))
        ):
            what = one_line(each).rstrip(": ")  # a MemoryError often has no text
            return (
                f"There was no more memory ({what}). Lower what a process needs at a time: the size of a"
                " micro-batch (trainer.per_device_train_batch_size, trainer.micro_batch_tokens), the length of rows"
                " (data.max_length), rollout.slots or workers; --plan of a training run shows what needs how much. Or"
                " raise the limit, if `ulimit -v` shows one. Complete checkpoints are not damaged: continue a training"
                " run with --resume."
            )
    return None


class _Stream(io.FileIO):
    """A standard stream that drops output when nobody reads it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for libraries and processes that write to it by its number
            os.close(nowhere)
            return memoryview(data).nbytes


def keep_standard_streams() -> None:
    """Let this process continue when nobody reads its output any more: `| head`, a closed terminal, `>&-` and `2>&-`.

    A stream that is closed already reads and writes nothing, and no file gets its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: Any = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(number)
            except OSError:
                nowhere = os.open(os.devnull, os.O_RDWR)
                if nowhere != number:
                    os.dup2(nowhere, number)
                    os.close(nowhere)
                os.set_inheritable(number, True)
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
        elif name != "stdin" and stream is getattr(sys, f"__{name}__"):  # not one that others have replaced
            stream.flush()
            raw: Any = _Stream(number, "w", closefd=False)
            kept = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, kept)


def must_be_readable(file: Path | str, what: str) -> None:
    """Raise UserError where this user may not read a file.

    Args:
        file: path of the file.
        what: subject of the message's first sentence.
    """
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{what} cannot be read: {file} ({error.strerror}). Change its permissions (chmod).") from None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors that it was raised from or during."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def lost(error: BaseException) -> str | None:
    """Return a message for the user when this process cannot reach another one any more; None for any other error."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    kinds = {each.__name__ for each in type(error).__mro__}
    unreachable = kinds & {"DistBackendError", "DistNetworkError", "DistStoreError"} or "gloo/transport" in str(error)
    if processes == 1 or not unreachable:
        return None
    return (
        f"Process {os.environ.get('RANK', '0')} of {processes} has lost the others: one has ended, for the reason above"
        " unless it was killed, or has not answered for longer than trainer.ddp_timeout. Complete checkpoints are not"
        f" damaged: continue with the same command and --resume. ({one_line(error)})"
    )
