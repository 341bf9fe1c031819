"""Where do the problems of an environment come from?  The rows of a data set on the Hub, or of a local copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
EMBEDDED = "embedded"  # as `path`: what the environment brings itself


def read_rows(
    env: str, path: str, columns: Sequence[str], rows: int, config: str | None = None, split: str = "train"
) -> list[dict[str, Any]]:
    """The first `rows` rows of a split, each with these columns alone.

    `path` is a Hub id (streamed), a folder of data files, or one file, whose rows are all of the split "train".
    ValueError, one paragraph, where that cannot be read: read_rows("metamath_qa", "meta-math/MetaMathQA",
    ("query", "response"), 1000).
    """
    try:
        stream = _open(path, config, split)
        found = [{column: row.get(column) for column in columns} for row in islice(stream, rows)]
    except Exception as error:  # `datasets` raises classes of many libraries
        raise ValueError(
            f"{env}: the data set path={path} (split {split}) cannot be read ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Name a data set on the Hugging Face Hub (which needs a network), "
            f"a folder or a .jsonl or .parquet file with its columns; path={EMBEDDED} needs none of them."
        ) from error
    lacking = [column for column in columns if not any(row[column] is not None for row in found)]
    if lacking:
        raise ValueError(
            f"{env}: the data set path={path} (split {split}) has no values in {', '.join(lacking)}. It should have "
            f"rows with the columns {', '.join(columns)}."
        )
    return found


def _open(path: str, config: str | None, split: str) -> Any:
    import datasets

    kind, local = FILES.get(Path(path).suffix), Path(path).exists()
    if kind and local:
        if split != "train":
            raise ValueError("one file is one split, which is called train")
        return datasets.load_dataset(kind, data_files=path, split="train", streaming=True)
    return datasets.load_dataset(path, None if local else config, split=split, streaming=True)
