"""Where do the problems of an environment come from?  The rows of a data set on the Hub, or of a local copy of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
MOST_ENTRIES = 10_000  # of a folder; `datasets` looks at every one before it reports that there are no data
EMBEDDED = "embedded"  # as `path`: what the environment brings itself


def read_rows(
    env: str,
    path: str,
    columns: Sequence[str],
    rows: int | None = None,
    config: str | None = None,
    split: str = "train",
) -> list[dict[str, Any]]:
    """Return the first `rows` rows of a split, each with these columns alone; all of them for None.

    `path` is a Hub id (streamed), a folder of data files, or one file, whose rows are all of the split "train".
    ValueError, one paragraph, where that cannot be read: read_rows("metamath_qa", "meta-math/MetaMathQA",
    ("query", "response"), 1000).
    """
    return list(stream_rows(env, path, columns, rows, config, split))


def stream_rows(
    env: str,
    path: str,
    columns: Sequence[str],
    rows: int | None = None,
    config: str | None = None,
    split: str = "train",
) -> Iterator[dict[str, Any]]:
    """Yield the same, one row at a time."""
    empty = set(columns)
    try:
        for row in islice(_open(path, config, split), rows):
            values = {column: row.get(column) for column in columns}
            empty -= {column for column, value in values.items() if value is not None}
            yield values
    except Exception as error:  # `datasets` raises classes of many libraries
        raise _unreadable(env, path, split, error) from error
    if lacking := [column for column in columns if column in empty]:
        raise ValueError(
            f"{env}: the data set path={path} (split {split}) has no values in {', '.join(lacking)}. It should "
            f"have rows with the columns {', '.join(columns)}."
        )


def all_rows(env: str, path: str, rows: int | None, config: str | None, split: str) -> list[dict[str, Any]]:
    """Return the first `rows` rows of a split, each with all columns; ValueError as in `read_rows`."""
    try:
        found = [dict(row) for row in islice(_open(path, config, split), rows)]
    except Exception as error:  # `datasets` raises classes of many libraries
        raise _unreadable(env, path, split, error) from error
    absent = dict.fromkeys(column for row in found for column in row)  # None for each
    return [absent | row for row in found]


def split_names(env: str, path: str, config: str | None = None) -> list[str]:
    """Return what the data set calls its splits; one file is one split, "train"."""
    if _is_file(path):
        return ["train"]
    try:
        if Path(path).suffix in FILES:
            raise FileNotFoundError(f"there is no file {path}")
        import datasets

        not_too_large(path)
        return list(datasets.get_dataset_split_names(path, None if Path(path).exists() else config))
    except Exception as error:  # as above
        raise _unreadable(env, path, "", error) from error


def _unreadable(env: str, path: str, split: str, error: Exception) -> ValueError:
    what = f"{path} (split {split})" if split else path
    return ValueError(
        f"{env}: the data set path={what} cannot be read ({reason_unreadable(error, path)}). Name a data set on the"
        " Hugging Face Hub (which needs a network), a folder or a .jsonl or .parquet file with its columns;"
        f" path={EMBEDDED} needs none of them."
    )


def reason_unreadable(error: Exception, path: str) -> str:
    """Return why a data set cannot be read, in a few words."""
    if isinstance(error, StopIteration):  # how `datasets` says that a file is empty
        return "it has no rows"
    if isinstance(error, BrokenLine):
        return str(error)
    if Path(path).is_dir():  # in a folder `datasets` counts from 0, and in parts of a file
        for file in sorted(Path(path).rglob("*.jsonl")):
            try:
                for _ in json_lines(file):
                    pass
            except BrokenLine as broken:
                return f"{file.relative_to(path)}: {broken}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class BrokenLine(ValueError):
    """Which line of a JSON Lines file is not a row, or that there is none."""


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON Lines file; `BrokenLine` counts lines from 1, as editors do."""
    empty = True
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip().decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:  # which counts lines within this one
                raise BrokenLine(f"line {number} is not JSON: {error.msg}, column {error.colno}") from None
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                raise BrokenLine(f"line {number} is not JSON: {' '.join(str(error).split())}") from None
            if not isinstance(row, dict):
                raise BrokenLine(f"line {number} is not a JSON object {{...}}")
            empty = False
            yield row
    if empty:
        raise BrokenLine("it has no rows")


def not_too_large(path: str) -> None:
    """Raise ValueError for a folder with so many files that it cannot be a data set: a home folder, say."""
    entries = (name for _, folders, files in os.walk(path) for name in (*folders, *files))
    if next(islice(entries, MOST_ENTRIES, None), None) is not None:
        raise ValueError(f"a folder with more than {MOST_ENTRIES:,} files and folders in it cannot be a data set")


def _is_file(path: str) -> bool:
    return Path(path).suffix in FILES and Path(path).exists()


def _open(path: str, config: str | None, split: str) -> Any:
    if Path(path).suffix in FILES and not Path(path).exists():
        raise FileNotFoundError(f"there is no file {path}")
    if _is_file(path) and split != "train":
        raise ValueError("one file is one split, which is called train")
    if path.endswith(".jsonl") and Path(path).is_file():
        return json_lines(Path(path))
    import datasets

    if not _is_file(path):
        not_too_large(path)
        config = None if Path(path).exists() else config
        return datasets.load_dataset(path, config, split=split, streaming=True)
    return datasets.load_dataset(FILES[Path(path).suffix], data_files=path, split="train", streaming=True)
