"""How is a local file of rows read?  JSON Lines, a JSON array, CSV or Parquet; errors name the place of damage.

`datasets` could read them as well, but gives a whole file one schema, names no line and writes a copy to its cache.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import reprlib
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from envs.tools import without_nothing
from posttrain.files import DATA_FILES, DATA_FILES_IN_WORDS, wrong_in_line
from posttrain.types import UserError, one_line

Placed = tuple[str, dict[str, Any]]  # a row's place in its file, "line 3" or "row 3", and the row

LONGEST_LINE = 2**28  # bytes: a packed file may unfold to any length
LONGEST_ARRAY = 2**31
MESSAGES = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected")
CALLS = ("tool_calls", "function_call")
NUMBERS = ("score_chosen", "score_rejected")


def rows_of(path: Path, key: str) -> Iterator[Placed]:
    """Yield the rows of a local file. key: where the config names it. UserError: it cannot be read."""
    if not path.is_file() or not path.name.endswith(DATA_FILES):
        what = f"is not a {DATA_FILES_IN_WORDS} file" if path.exists() else "does not exist"
        raise UserError(f"{key}={path} {what}. Name one such file; several files are several sources.")
    kind = Path(path.name.removesuffix(".gz")).suffix
    try:
        if kind == ".parquet":
            yield from with_row_numbers(_parquet(path, key))
            return
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            read = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}[kind]
            yield from read(file, path, key)  # type: ignore[operator]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{key}={path} cannot be read: {one_line(error)}. Check the file.") from error


def with_row_numbers(rows: Iterator[dict[str, Any]]) -> Iterator[Placed]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def from_table(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a table whose calls of tools have their own keys: a table gives each the keys of all of them."""

    def without_others(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return message | {name: without_nothing(message[name]) for name in CALLS if message.get(name) is not None}

    lists = {name: row[name] for name in MESSAGES if isinstance(row.get(name), list)}
    return row | {name: list(map(without_others, messages)) for name, messages in lists.items()}


def brief(value: object) -> str:
    """Return the beginning of a value, however deep it is nested."""
    return reprlib.repr(value)[:120]


def printable(name: object) -> str:
    """Return a name that comes from a file, short and without control characters."""
    text = str(name)[:40]
    return text if text.isprintable() else ascii(text)


def _json_lines(file: IO[bytes], path: Path, key: str) -> Iterator[Placed]:
    """Yield a row for each line. Only a line feed ends a line: texts may hold U+2028 and similar separators."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        where = f"{key}: line {number} of {path}"
        if len(line) > LONGEST_LINE:
            raise UserError(f"{where} has more than {LONGEST_LINE:,} bytes. Repair or delete it.")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not UTF-8 text (byte {line[error.start]:#04x} at place {error.start + 1}). Save the "
                "file as UTF-8, or repair or delete the line."
            ) from None
        if not text.strip():
            continue
        try:
            row = json.loads(text.rstrip())
        except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, endless nesting
            raise UserError(f"{where} is not JSON ({wrong_in_line(error)}). Repair or delete it.") from None
        yield f"line {number}", _object(row, where)


def _json(file: IO[bytes], path: Path, key: str) -> Iterator[Placed]:
    """Yield the rows of an array. Many files of this name are JSON Lines, which begin with another character."""
    content = file.read(LONGEST_ARRAY + 1)
    if len(content) > LONGEST_ARRAY:
        raise UserError(f"{key}={path} has more than {LONGEST_ARRAY:,} bytes. Save it as .jsonl, a row a line.")
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
        yield from _json_lines(io.BytesIO(content), path, key)
        return
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, and names the byte
        raise UserError(f"{key}={path} is not a JSON array of rows ({one_line(error)}). Repair the file.") from None
    for number, row in enumerate(rows, 1):
        yield f"row {number}", _object(row, f"{key}: row {number} of {path}")


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where} is {brief(row)}, not a JSON object {{...}}. Repair it.")
    return row


def _csv(file: IO[bytes], path: Path, key: str) -> Iterator[Placed]:
    """Yield the rows below a header. Cells are text, except messages, which are JSON, and scores."""
    csv.field_size_limit(sys.maxsize)  # 131,072 characters are a long answer, not an error
    reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(header) != len(set(header)):
            raise UserError(f"{key}: the header of {path} names a column twice: {', '.join(header)[:300]}. Rename one.")
        for cells in reader:
            if not cells:
                continue
            place = f"line {reader.line_num}"
            if len(cells) != len(header):
                raise UserError(
                    f"{key}: {place} of {path} has {len(cells)} cells, its header {len(header)} "
                    f"({', '.join(header)[:300]}). Columns are separated by commas, and a text with a comma, a "
                    "quotation mark or a line break must be quoted. Repair the file, or save it as .jsonl."
                )
            yield place, {name: _cell(name, text) for name, text in zip(header, cells, strict=True)}
    except UnicodeDecodeError as error:
        raise UserError(f"{key}={path} is not UTF-8 text (byte {error.object[error.start]:#04x} behind line "
                        f"{reader.line_num}). Save the file as UTF-8.") from None  # fmt: skip
    except csv.Error as error:
        raise UserError(f"{key}: line {reader.line_num} of {path} is not CSV ({error}). Repair the file.") from None


def _cell(name: str, text: str) -> Any:
    try:
        if name in NUMBERS:
            return float(text)
        if name in MESSAGES and text.startswith(("[{", '{"')):
            return json.loads(text)
    except (ValueError, RecursionError):
        pass
    return text


def _parquet(path: Path, key: str) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from map(from_table, batch.to_pylist())
    except Exception as error:  # what pyarrow raises on a damaged file has no common class
        raise UserError(
            f"{key}={path} cannot be read as a parquet file: {one_line(error)}. Check the file or make it again."
        ) from error
