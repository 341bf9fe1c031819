"""How is a local file of rows read?  By envs/local_rows.py, or as Parquet; an error says where and what to do."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from envs.local_rows import MESSAGES, BrokenRows, Placed, brief, kind_of_file, rows_in
from envs.tools import without_nothing
from posttrain.files import DATA_FILES, DATA_FILES_IN_WORDS
from posttrain.types import UserError, one_line

__all__ = ["Placed", "brief", "from_table", "printable", "rows_of", "with_row_numbers"]

CALLS = ("tool_calls", "function_call")
NUMBERS = ("score_chosen", "score_rejected")


def rows_of(path: Path, key: str) -> Iterator[Placed]:
    """Yield the rows of a local file. key: where the config names it. UserError: it cannot be read."""
    if not path.is_file() or not path.name.endswith(DATA_FILES):
        what = f"is not a {DATA_FILES_IN_WORDS} file" if path.exists() else "does not exist"
        raise UserError(f"{key}={path} {what}. Name one such file; several files are several sources.")
    kind = kind_of_file(path.name)
    if not kind:
        yield from with_row_numbers(_parquet(path, key))
        return
    try:
        for place, row in rows_in(path):
            yield place, {name: _number(name, value) for name, value in row.items()} if kind == ".csv" else row
    except BrokenRows as broken:
        where = f"{key}: {broken.place} of {path}" if broken.place else f"{key}={path}"
        raise UserError(f"{where} {broken.problem}. {broken.remedy}") from None
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


def printable(name: object) -> str:
    """Return a name that comes from a file, short and without control characters."""
    text = str(name)[:40]
    return text if text.isprintable() else ascii(text)


def _number(name: str, value: Any) -> Any:
    """Return a cell of CSV, a score as a number."""
    try:
        return float(value) if name in NUMBERS else value
    except ValueError:
        return value


def _parquet(path: Path, key: str) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from map(from_table, batch.to_pylist())
    except Exception as error:  # what pyarrow raises on a damaged file has no common class
        raise UserError(
            f"{key}={path} cannot be read as a parquet file: {one_line(error)}. Check the file or make it again."
        ) from error
