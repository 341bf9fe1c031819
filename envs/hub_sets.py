"""Where do the problems of an environment come from?  The rows of a data set on the Hub, or of a local copy of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from envs.local_rows import BrokenRows, kind_of_file, rows_in

MOST_ENTRIES = 10_000  # of a folder; `datasets` looks at every one before it reports that there are no data
EMBEDDED = "embedded"  # as `path`: what the environment brings itself
NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # of `datasets`
MOST_NAMED = 5  # files that a line names


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
    try:
        if (own := local_splits(path)) is not None:
            return list(own)
        import datasets

        return list(datasets.get_dataset_split_names(path, None if Path(path).exists() else config))
    except Exception as error:  # as above
        raise _unreadable(env, path, "", error) from error


def _unreadable(env: str, path: str, split: str, error: Exception) -> ValueError:
    what = f"{path} (split {split})" if split else path
    return ValueError(
        f"{env}: the data set path={what} cannot be read ({reason_unreadable(error)}). Name a data set on the"
        " Hugging Face Hub (which needs a network), a folder, or a .jsonl, .json, .csv (also .gz) or .parquet file with"
        f" its columns; path={EMBEDDED} needs none of them."
    )


def reason_unreadable(error: Exception) -> str:
    """Return why a data set cannot be read, in a few words."""
    if isinstance(error, StopIteration):  # how `datasets` says that a file is empty
        return "it has no rows"
    if isinstance(error, BrokenRows):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def local_splits(path: str) -> dict[str, Iterator[dict[str, Any]]] | None:
    """Return the rows of each split of a local file or folder, texts as they are written there.

    None for a data set of the Hub, and for local files that `datasets` reads, such as Parquet. How a folder is divided
    into splits is left to `datasets`; a line says which files it leaves out. Errors are as in `read_rows`, but of many
    classes, also while rows are read.
    """
    here = Path(path)
    if not here.exists() and (kind_of_file(here.name) or here.suffix == ".parquet"):
        raise FileNotFoundError(f"there is no file {path}")
    if not here.is_dir():
        if here.is_file() and here.suffix == ".parquet":
            import datasets

            return {"train": iter(datasets.load_dataset("parquet", data_files=path, split="train", streaming=True))}
        return {"train": _rows([here])} if here.is_file() and kind_of_file(here.name) else None
    import datasets

    not_too_large(path)
    found = datasets.load_dataset_builder(path).config.data_files or {}
    splits = {str(split): [Path(file) for file in files] for split, files in found.items()}
    _tell_left_out(path, tuple(_left_out(path, [file for files in splits.values() for file in files])))
    own = all(kind_of_file(file.name) and file.is_file() for files in splits.values() for file in files)
    return {split: _rows(files, here) for split, files in splits.items()} if own and splits else None


def _left_out(path: str, read: Iterable[Path]) -> list[str]:
    """Return the files of rows in a folder that are not read, by their path in it; hidden ones are not meant to be."""
    known, found = {os.path.realpath(file) for file in read}, list[str]()
    for place, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        files = [os.path.join(place, name) for name in names if not name.startswith(".") and name not in NO_ROWS]
        rows = [file for file in files if kind_of_file(file) or file.endswith(".parquet")]
        found += [os.path.relpath(file, path) for file in rows if os.path.realpath(file) not in known]
    return sorted(found)


@lru_cache(maxsize=64)  # once for a folder, however often it is read
def _tell_left_out(path: str, files: tuple[str, ...]) -> None:
    if files:
        more = f" and {len(files) - MOST_NAMED:,} more" if len(files) > MOST_NAMED else ""
        print(
            f"The folder {path} is read without {', '.join(files[:MOST_NAMED])}{more}. Only files of one kind are read;"
            " and where some are named after a split, as train-more.jsonl is, only those.",
            file=sys.stderr,
        )


def _rows(files: Sequence[Path], folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of files; an empty cell of CSV is missing. `BrokenRows` names a file by its path in `folder`."""
    empty = True
    for file in files:
        try:
            for _, row in rows_in(file):
                empty = False
                is_csv = kind_of_file(file.name) == ".csv"
                yield {name: None if value == "" else value for name, value in row.items()} if is_csv else row
        except BrokenRows as broken:
            name = "" if folder is None else f"{os.path.relpath(file, folder)}: "
            raise BrokenRows(name + broken.place, broken.problem, broken.remedy) from None
    if empty:
        raise BrokenRows("", "it has no rows")


def not_too_large(path: str) -> None:
    """Raise ValueError for a folder with so many files that it cannot be a data set: a home folder, say."""
    entries = (name for _, folders, files in os.walk(path) for name in (*folders, *files))
    if next(islice(entries, MOST_ENTRIES, None), None) is not None:
        raise ValueError(f"a folder with more than {MOST_ENTRIES:,} files and folders in it cannot be a data set")


def _open(path: str, config: str | None, split: str) -> Any:
    if (own := local_splits(path)) is not None:
        if split not in own:
            raise ValueError(f"it has the splits {', '.join(own)}; one file is one split, which is called train")
        return own[split]
    import datasets

    return datasets.load_dataset(path, None if Path(path).exists() else config, split=split, streaming=True)
