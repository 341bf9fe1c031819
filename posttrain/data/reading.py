"""Where do rows come from?  The Hub, a local .jsonl or .parquet file, or the project's own generators.

Training (`read`) and evaluation (`evaluation_rows`) read files in the same way. A file that is damaged, or holds rows
of another schema, is a UserError that names the file, the line and what is expected there.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError

from posttrain import embedded
from posttrain.compat import HTTP_ERROR
from posttrain.config import Source
from posttrain.data import gsm8k
from posttrain.data.filters import fault, is_text, whole_dialogue
from posttrain.runlog import Progress
from posttrain.types import HUB_NAME, UserError, one_line

EMBEDDED = "embedded"
HUB_ERRORS = (OSError, ValueError, HTTP_ERROR, DatasetsError)  # what load_dataset raises for a set it cannot read


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
    "gsm8k": HubSet("openai/gsm8k", "MIT", "train", 7_473, config="main"),
    "capybara": HubSet("trl-lib/Capybara", "Apache-2.0 (as LDJnr/Capybara)", "train", 15_806),
    "ultrafeedback": HubSet("HuggingFaceH4/ultrafeedback_binarized", "MIT", "train_prefs", 61_135),
}

# What is never trained on, by the name that a config calls it.
HELD_OUT = {
    "gsm8k": HubSet("openai/gsm8k", "MIT", "test", 1_319, config="main"),
    gsm8k.HELD_OUT: TRAINING["gsm8k"],  # of which the held-out questions are asked, and those alone
    "math500": HubSet("HuggingFaceH4/MATH-500", "MIT (as hendrycks/math)", "test", 500),
    "ultrafeedback": HubSet("HuggingFaceH4/ultrafeedback_binarized", "MIT", "test_prefs", 2_000),
}

COLUMNS = {
    "openmathinstruct": ("question", "generated_solution", "expected_answer", "error_message", "is_correct"),
    "gsm8k": ("question", "answer"),
    "capybara": ("messages",),
    "ultrafeedback": ("chosen", "rejected", "score_chosen", "score_rejected"),
    "messages": ("messages",),
    "preferences": ("chosen", "rejected"),
    "demonstrations": ("messages",),
    "prompts": ("prompt",),
    # what only evaluation reads
    "questions": ("question", "answer"),
    "recall": ("messages", "answer"),
}
Placed = tuple[str, dict[str, Any]]  # where a row stands in its file, "line 3" or "row 3", and the row


def read(source: Source, key: str, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of a source, each with the columns of its kind; `key` says where the config names it.

    The messages of `prompts` may stand in a column of either name.
    """
    for place, row in _open(source, key, seed):
        if source.kind == "prompts" and "prompt" not in row and "messages" in row:
            row["prompt"] = row["messages"]
        _check(row, source.kind, f"{key}: {place} of {source.path}")
        yield row


def evaluation_rows(
    path: str, kind: Literal["questions", "prompts", "recall", "preferences"], key: str, most: int | None = None
) -> list[dict[str, Any]]:
    """The first rows of a local file, ready for a suite; `key` says where the config names it.

    {"question", "answer"} for questions, {"messages"} for prompts, {"messages", "answer"} for recall (the last message
    is the user's), {"chosen", "rejected"} for preferences (whole dialogues, equal but for the last answer). Columns
    that no suite needs are left out.
    """
    if not _is_file(path):
        raise UserError(f"{key}={path} is neither a name that is known here nor a .jsonl or .parquet file.")
    rows = []
    for place, row in islice(_local(Path(path), key), most):
        where = f"{key}: {place} of {path}"
        _check(row, kind, where)
        rows.append(_preferences(row, where) if kind == "preferences" else _asked(row, kind, where))
    if not rows:
        raise UserError(f"{key}: {path} is empty. It should have rows with the columns {', '.join(COLUMNS[kind])}.")
    return rows


def _asked(row: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """A row of questions, prompts or recall, its columns alone."""
    asked: dict[str, Any] = {}
    for name in COLUMNS[kind]:
        value = row[name]
        if name in ("messages", "prompt"):
            name, value = "messages", [{"role": "user", "content": value}] if isinstance(value, str) else value
            value = [{"role": message["role"], "content": message["content"]} for message in value]
            problem = fault([*value, {"role": "assistant", "content": "its answer, to come"}])
            if problem is not None:
                raise UserError(
                    f"{where}: {problem}. The messages of a row are those of user and assistant in turn, the last one "
                    "the user's, each with a text as its content."
                )
        elif name == "answer" and isinstance(value, int | float | Decimal) and not isinstance(value, bool):
            if value != value or value in (math.inf, -math.inf):
                raise UserError(f"{where}: answer is {value}. It should be text or a number.")
            value = str(value)
        elif not is_text(value):
            wanted = "text or a number" if name == "answer" else "text"
            raise UserError(f"{where}: {name} should be {wanted}, but is {_brief(value)}.")
        asked[name] = value
    return asked


def _preferences(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A pair as two whole dialogues."""
    pair = {side: whole_dialogue(row[side], row.get("prompt")) for side in ("chosen", "rejected")}
    pair = {
        side: [{"role": message["role"], "content": message["content"]} for message in messages]
        for side, messages in pair.items()
    }
    problems = [f"{side}: {problem}" for side, messages in pair.items() if (problem := fault(messages))]
    if not problems and pair["chosen"][:-1] != pair["rejected"][:-1]:
        problems = ["the two dialogues have different prompts"]
    if not problems and pair["chosen"][-1]["content"] == pair["rejected"][-1]["content"]:
        problems = ["both answers are the same"]
    if problems:
        raise UserError(
            f"{where}: {'; '.join(problems)}. A pair is two dialogues that differ in the last answer alone, or "
            "`prompt` with two answers."
        )
    return pair


def _check(row: dict[str, Any], kind: str, where: str) -> None:
    """UserError where a row does not have the columns of its kind, or something else stands in them."""
    columns = COLUMNS[kind]
    if not set(columns) <= row.keys():
        raise UserError(
            f"{where} has the columns {', '.join(sorted(map(str, row)))[:300] or '(none)'}; the kind {kind} needs "
            f"{', '.join(columns)}. Rename the columns or choose the kind that fits."
        )
    prompt = row.get("prompt")
    absent = prompt is None and "prompt" not in columns
    asked = kind == "prompts" or "chosen" in columns
    if asked and not (absent or isinstance(prompt, str) or _is_dialogue(prompt)):
        raise UserError(
            f"{where}: column prompt should be text or a list of messages, but is {_brief(prompt)}. Convert the file."
        )
    for name in ("messages", "chosen", "rejected"):
        plain_answer = kind == "preferences" and isinstance(row.get(name), str)
        if name in columns and not plain_answer and not _is_dialogue(row[name]):
            raise UserError(
                f"{where}: column {name} should be a list of messages "
                f'[{{"role": "user", "content": "..."}}, ...], but is {_brief(row[name])}. Convert the file.'
            )
        for message in row[name] if name in columns and not plain_answer else ():
            if not _spans_fit(message):
                raise UserError(
                    f"{where}: column {name}: mask_spans is {_brief(message['mask_spans'])}, but should be a list of "
                    f"[start, end) characters inside the content {_brief(message['content'])}. Correct the file."
                )


def _brief(value: object) -> str:
    """The beginning of a value, however deep it is nested."""
    return reprlib.repr(value)[:120]


def licence(source: Source) -> str:
    """What the table says about the right to use a source."""
    if source.path == EMBEDDED:
        return "generated here"
    hub = TRAINING.get(source.kind)
    if hub is not None and hub.path == source.path:
        return hub.licence
    return "your own file" if _is_file(source.path) else "see its page on the Hub"


def _open(source: Source, key: str, seed: int) -> Iterator[Placed]:
    if source.path == EMBEDDED:
        return _numbered(_generated(source, key, seed))
    if _is_file(source.path) or Path(source.path).exists():
        return _local(Path(source.path), f"{key}.path")
    if not HUB_NAME.fullmatch(source.path):
        raise UserError(
            f"{key}.path={source.path} is neither `embedded`, nor a .jsonl or .parquet file, nor a name on the Hugging "
            "Face Hub (owner/name). Write one of them."
        )
    return _numbered(_from_hub(source, key))


def _numbered(rows: Iterator[dict[str, Any]]) -> Iterator[Placed]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


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
            said = {"player": source.player, "thought": source.thought or "cues"}
            yield from embedded.demonstrations(source.envs or [], source.rows, seed, **said)
        except ValueError as error:
            raise UserError(f"{key}.envs: {error}") from error
        except (Exception, SystemExit) as error:  # an environment may raise anything
            told = f"{key}.envs: an environment raised {one_line(error)}. `python -m envs.check NAME`"
            raise UserError(f"{told} says what is wrong with it.") from error
        return
    generators = {
        "openmathinstruct": embedded.openmathinstruct,
        "capybara": embedded.capybara,
        "ultrafeedback": embedded.ultrafeedback,
        "prompts": embedded.training_prompts,
    }
    if source.kind not in generators:
        raise UserError(
            f"{key}: there is no embedded data of the kind {source.kind}, only of {', '.join(generators)} and "
            "demonstrations. Name a .jsonl or .parquet file as path, or choose one of these kinds."
        )
    yield from generators[source.kind](source.rows, seed)


# Local files


def _local(path: Path, key: str) -> Iterator[Placed]:
    if not path.is_file() or path.suffix not in (".jsonl", ".parquet"):
        what = "is neither .jsonl nor .parquet" if path.exists() else "does not exist"
        raise UserError(f"{key}={path} {what}. Name one such file; several files are several sources.")
    try:
        yield from _jsonl(path, key) if path.suffix == ".jsonl" else _numbered(_parquet(path, key))
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {one_line(error)}. Check the file.") from error


def _jsonl(path: Path, key: str) -> Iterator[Placed]:
    """A row a line. Only a line feed ends a line: U+2028 and other separators of str.splitlines stand inside texts."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{key}: line {number} of {path}"
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
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, endless nesting
                raise UserError(f"{where} is no JSON ({one_line(error)}). Repair or delete it.") from None
            if not isinstance(row, dict):
                raise UserError(f"{where} is {_brief(row)}, not a JSON object {{...}}. Repair it.")
            yield f"line {number}", row


def _parquet(path: Path, key: str) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except Exception as error:  # what pyarrow raises on a damaged file has no common class
        raise UserError(
            f"{key}={path} cannot be read as a parquet file: {one_line(error)}. Check the file or make it again."
        ) from error


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
            f"{key}: the data set {hub.path} could not be read from the Hugging Face Hub ({one_line(error)}). Connect "
            "and start again (a gated set needs `hf auth login`; sets loaded before are found in the cache, HF_HOME); "
            f"or name a .jsonl or .parquet file with the same columns as {key}.path; or try the pipeline without a "
            "network on generated data, which is `path: embedded` or the whole of `make quickstart`."
        ) from error
