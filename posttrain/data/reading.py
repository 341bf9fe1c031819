"""Where do rows come from?  The Hub, a local .jsonl or .parquet file, or the project's own generators."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError
from huggingface_hub.utils import httpx  # the one it was built with, httpx or httpx2

from posttrain import embedded
from posttrain.config import Source
from posttrain.runlog import Progress
from posttrain.types import UserError

EMBEDDED = "embedded"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_ERRORS = (OSError, ValueError, httpx.HTTPError, DatasetsError)  # what load_dataset raises for a set it cannot read


@dataclass(frozen=True)
class HubSet:
    """One set on the Hub: where, under which licence, which part of it, and about how many rows that part has."""

    path: str
    licence: str
    split: str
    rows: int
    config: str | None = None
    data_files: Mapping[str, str] | None = None
    streaming: bool = False


# What is trained on, by kind. OpenMathInstruct-1 keeps 7.4 GB of wrong solutions beside 1.5 GB of right ones and merges
# both by default, so its files are named; and it is streamed, because few of its rows are kept.
TRAINING = {
    "openmathinstruct": HubSet(
        "nvidia/OpenMathInstruct-1",
        "nvidia-license (not an OSI licence)",
        "train",
        1_825_000,
        data_files={"train": "correct_solutions/*.jsonl"},
        streaming=True,
    ),
    "capybara": HubSet("trl-lib/Capybara", "Apache-2.0 (as LDJnr/Capybara)", "train", 15_806),
    "ultrafeedback": HubSet("HuggingFaceH4/ultrafeedback_binarized", "MIT", "train_prefs", 61_135),
}

# What is never trained on, by the name that a config calls it.
HELD_OUT = {
    "gsm8k": HubSet("openai/gsm8k", "MIT", "test", 1_319, config="main"),
    "math500": HubSet("HuggingFaceH4/MATH-500", "MIT (as hendrycks/math)", "test", 500),
    "ultrafeedback": HubSet("HuggingFaceH4/ultrafeedback_binarized", "MIT", "test_prefs", 2_000),
}

COLUMNS = {
    "openmathinstruct": ("question", "generated_solution", "expected_answer", "error_message", "is_correct"),
    "capybara": ("messages",),
    "ultrafeedback": ("chosen", "rejected", "score_chosen", "score_rejected"),
    "messages": ("messages",),
    "preferences": ("chosen", "rejected"),
    "demonstrations": ("messages",),
    "prompts": ("prompt",),
}


def read(source: Source, key: str, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of a source, each with the columns of its kind; `key` says where the config names it."""
    columns = COLUMNS[source.kind]
    for number, row in enumerate(_open(source, key, seed), 1):
        if not set(columns) <= row.keys():
            raise UserError(
                f"{key}: row {number} of {source.path} has the columns {', '.join(sorted(row)) or '(none)'}; the kind "
                f"{source.kind} needs {', '.join(columns)}. Rename the columns or choose the kind that fits."
            )
        prompt = row.get("prompt")
        absent = prompt is None and source.kind == "preferences"
        spoken = absent or isinstance(prompt, str) or _is_dialogue(prompt)
        if source.kind in ("preferences", "prompts") and not spoken:
            raise UserError(
                f"{key}: column prompt in row {number} of {source.path} should be text or a list of messages, but is "
                f"{prompt!r:.120}. Convert the file."
            )
        for name in ("messages", "chosen", "rejected"):
            plain_answer = source.kind == "preferences" and isinstance(row.get(name), str)
            if name in columns and not plain_answer and not _is_dialogue(row[name]):
                raise UserError(
                    f"{key}: column {name} in row {number} of {source.path} should be a list of messages "
                    f'[{{"role": "user", "content": "..."}}, ...], but is {row[name]!r:.120}. Convert the file.'
                )
            for message in row[name] if name in columns and not plain_answer else ():
                if not _spans_fit(message):
                    raise UserError(
                        f"{key}: column {name} in row {number} of {source.path}: mask_spans is "
                        f"{message['mask_spans']!r:.60}, but should be a list of [start, end) characters inside the "
                        f"content of {len(message['content'] or '')} characters. Correct the file."
                    )
        yield row


def licence(source: Source) -> str:
    """What the table says about the right to use a source."""
    if source.path == EMBEDDED:
        return "generated here"
    hub = TRAINING.get(source.kind)
    if hub is not None and hub.path == source.path:
        return hub.licence
    return "your own file" if _is_file(source.path) else "see its page on the Hub"


def _open(source: Source, key: str, seed: int) -> Iterator[dict[str, Any]]:
    if source.path == EMBEDDED:
        return _generated(source, key, seed)
    if _is_file(source.path) or Path(source.path).exists():
        return _local(Path(source.path), key)
    if not HUB_NAME.fullmatch(source.path):
        raise UserError(
            f"{key}.path={source.path} is neither `embedded`, nor a .jsonl or .parquet file, nor a name on the Hugging "
            "Face Hub (owner/name). Write one of them."
        )
    return _from_hub(source, key)


def _is_file(path: str) -> bool:
    return path.endswith((".jsonl", ".parquet"))


def _is_dialogue(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)


def _spans_fit(message: Mapping[str, Any]) -> bool:
    """True without `mask_spans`, or when each is a pair of places in the content, in order."""
    spans, content = message.get("mask_spans"), message["content"]
    if spans is None or (isinstance(spans, list) and not spans):
        return True
    return (
        isinstance(content, str)
        and isinstance(spans, list)
        and all(isinstance(span, list) and len(span) == 2 for span in spans)
        and all(type(place) is int for span in spans for place in span)
        and all(0 <= start <= end <= len(content) for start, end in spans)
    )


# Embedded


def _generated(source: Source, key: str, seed: int) -> Iterator[dict[str, Any]]:
    if source.rows is None:
        raise UserError(f"{key}: embedded data has no end, so say how much of it: write rows, e.g. `rows: 2000`.")
    if source.kind == "demonstrations":
        try:
            yield from embedded.demonstrations(source.worlds or [], source.rows, seed)
        except ValueError as error:
            raise UserError(f"{key}.worlds: {error}") from error
        return
    generators = {
        "openmathinstruct": embedded.openmathinstruct,
        "capybara": embedded.capybara,
        "ultrafeedback": embedded.ultrafeedback,
    }
    if source.kind not in generators:
        raise UserError(
            f"{key}: there is no embedded data of the kind {source.kind}, only of {', '.join(generators)} and "
            "demonstrations. Name a .jsonl or .parquet file as path, or choose one of these kinds."
        )
    yield from generators[source.kind](source.rows, seed)


# Local files


def _local(path: Path, key: str) -> Iterator[dict[str, Any]]:
    if not path.is_file() or path.suffix not in (".jsonl", ".parquet"):
        what = "is neither .jsonl nor .parquet" if path.exists() else "does not exist"
        raise UserError(f"{key}.path={path} {what}. Name one such file; several files are several sources.")
    try:
        yield from _jsonl(path, key) if path.suffix == ".jsonl" else _parquet(path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UserError(f"{key}.path={path} cannot be read: {_one_line(error)}. Check the file.") from error


def _jsonl(path: Path, key: str) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, endless nesting
                raise UserError(f"{key}: line {number} of {path} is no JSON ({error}). Repair or delete it.") from error
            if not isinstance(row, dict):
                raise UserError(f"{key}: line {number} of {path} is {row!r:.60}, not a JSON object {{...}}. Repair it.")
            yield row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


# The Hub


def load_hub(hub: HubSet) -> Any:
    """One split of a Hub set; raises one of HUB_ERRORS where it cannot be had."""
    files = None if hub.data_files is None else dict(hub.data_files)
    return datasets.load_dataset(hub.path, hub.config, data_files=files, split=hub.split, streaming=hub.streaming)


def _from_hub(source: Source, key: str) -> Iterator[dict[str, Any]]:
    hub = TRAINING.get(source.kind)
    if hub is None or hub.path != source.path:  # another set of the same schema: its own files, the usual split
        hub = HubSet(source.path, "", hub.split if hub else "train", rows=0)
    try:
        loaded = load_hub(hub)
        total = hub.rows if hub.streaming else len(loaded)
        with Progress(total, f"reading {hub.path}", unit="row") as progress:
            for number, row in enumerate(loaded, 1):
                if number % 1000 == 0:
                    progress.update(number)
                yield row
    except HUB_ERRORS as error:
        raise UserError(
            f"{key}: the data set {hub.path} could not be read from the Hugging Face Hub ({_one_line(error)}). Connect "
            "and start again (a gated set needs `hf auth login`; sets loaded before are found in the cache, HF_HOME); "
            f"or name a .jsonl or .parquet file with the same columns as {key}.path; or try the pipeline without a "
            "network on generated data, which is `path: embedded` or the whole of `make quickstart`."
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
