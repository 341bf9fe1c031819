"""Where do the problems of an environment come from?  The rows of a data set on the Hub, or of a local copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
EMBEDDED = "embedded"  # as `path`: what the environment brings itself


def read_rows(
    env: str,
    path: str,
    columns: Sequence[str],
    rows: int | None = None,
    config: str | None = None,
    split: str = "train",
) -> list[dict[str, Any]]:
    """The first `rows` rows of a split, each with these columns alone; all of them for None.

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
    """The same, one row at a time."""
    empty = set(columns)
    try:
        for row in islice(_open(path, config, split), rows):
            found = {column: row.get(column) for column in columns}
            empty -= {column for column, value in found.items() if value is not None}
            yield found
    except Exception as error:  # `datasets` raises classes of many libraries
        raise _unreadable(env, f"{path} (split {split})", error) from error
    if lacking := [column for column in columns if column in empty]:
        raise ValueError(
            f"{env}: the data set path={path} (split {split}) has no values in {', '.join(lacking)}. It should "
            f"have rows with the columns {', '.join(columns)}."
        )


def split_names(env: str, path: str, config: str | None = None) -> list[str]:
    """What the data set calls its splits; one file is one split, "train"."""
    if _is_file(path):
        return ["train"]
    try:
        import datasets

        return list(datasets.get_dataset_split_names(path, None if Path(path).exists() else config))
    except Exception as error:  # as above
        raise _unreadable(env, path, error) from error


def _unreadable(env: str, what: str, error: Exception) -> ValueError:
    return ValueError(
        f"{env}: the data set path={what} cannot be read ({type(error).__name__}: "
        f"{' '.join(str(error).split())[:300]}). Name a data set on the Hugging Face Hub (which needs a network), a "
        f"folder or a .jsonl or .parquet file with its columns; path={EMBEDDED} needs none of them."
    )


def _is_file(path: str) -> bool:
    return Path(path).suffix in FILES and Path(path).exists()


def _open(path: str, config: str | None, split: str) -> Any:
    import datasets

    if not _is_file(path):
        config = None if Path(path).exists() else config
        return datasets.load_dataset(path, config, split=split, streaming=True)
    if split != "train":
        raise ValueError("one file is one split, which is called train")
    return datasets.load_dataset(FILES[Path(path).suffix], data_files=path, split="train", streaming=True)
