"""Where do rows come from?  The Hub, a local file, or the project's own generators.

Training (`read_rows`) and evaluation (`evaluation_rows`) read files in the same way. A damaged file, or rows of
another schema raise a UserError that names the file, the line and the expected columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets.exceptions import DatasetsError

from posttrain.config import Source
from posttrain.data import embedded, filters, formats, gsm8k, local
from posttrain.data.local import Placed, brief
from posttrain.data.table import SourceReport
from posttrain.files import DATA_FILES, DATA_FILES_IN_WORDS
from posttrain.runtime import HTTP_ERROR, Progress
from posttrain.types import HUB_NAME, UserError, one_line

EMBEDDED = "embedded"
LONGEST_TEXT = 10_000_000  # characters; a tokenizer takes some 200 bytes for each
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


# Training sets by kind. OpenMathInstruct-1 has 7.4 GB of wrong solutions, 1.5 GB of right ones, and merges both by
# default, so its files are named; it is streamed, because few of its rows are kept.
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

# Evaluation sets, which are never trained on, by their names in configs.
HELD_OUT = {
    "gsm8k": HubSet("openai/gsm8k", "MIT", "test", 1_319, config="main"),
    gsm8k.GSM8K_HELD_OUT: TRAINING["gsm8k"],  # only its held-out questions are used
    "ifeval": HubSet("google/IFEval", "Apache-2.0", "train", 541),
    "math500": HubSet("HuggingFaceH4/MATH-500", "MIT (as hendrycks/math)", "test", 500),
    "ultrafeedback": HubSet("HuggingFaceH4/ultrafeedback_binarized", "MIT", "test_prefs", 2_000),
}

COLUMNS = {  # of the kinds whose rows have one form
    "openmathinstruct": ("question", "generated_solution", "expected_answer", "error_message", "is_correct"),
    "gsm8k": ("question", "answer"),
    "ultrafeedback": ("chosen", "rejected", "score_chosen", "score_rejected"),
    # what only evaluation reads
    "questions": ("question", "answer"),
    "recall": ("messages", "answer"),
    "instructions": ("prompt", "instruction_id_list", "kwargs"),
}
FORMATS: dict[str, tuple[formats.Recognise, str]] = {  # of the others, and of pairs and messages
    "capybara": (formats.as_dialogue, formats.DIALOGUE_FORMATS),
    "messages": (formats.as_dialogue, formats.DIALOGUE_FORMATS),
    "demonstrations": (formats.as_dialogue, formats.DIALOGUE_FORMATS),
    "ultrafeedback": (formats.as_pair, formats.PAIR_FORMATS),
    "preferences": (formats.as_pair, formats.PAIR_FORMATS),
    "prompts": (formats.as_prompt, formats.PROMPT_FORMATS),
    "recall": (formats.last_turn, formats.PROMPT_FORMATS),
}


def read_rows(source: Source, key: str, seed: int, report: SourceReport | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source in the form that `filters` takes.

    Args:
        source: where the rows are.
        key: key of the config that names the source, for messages.
        seed: of embedded rows.
        report: gets the format of each row, and the columns that were not read.

    Raises:
        UserError: the source cannot be read, or a row has no known format.
    """
    for place, row in _open(source, key, seed):
        match = _recognised(row, source.kind, f"{key}: {place} of {source.path}")
        if report is not None:
            unread = formats.used_columns(row) - match.columns - filters.columns_judged(source.kind)
            report.recognised(match.format, unread)
        yield match.row


def kind_of(path: str, key: str) -> Literal["messages", "preferences"]:
    """Return the kind of a file or a set on the Hub, judged by its first row.

    Args:
        path: of a file, or the name of a set.
        key: key of the config that names it, for messages.
    """
    for _, row in _open(Source(kind="messages", path=path), key, 0):
        return "messages" if isinstance(formats.as_pair(row), str) else "preferences"
    return "messages"


def evaluation_rows(
    path: str,
    kind: Literal["questions", "prompts", "recall", "preferences", "instructions"],
    key: str,
    most: int | None = None,
) -> list[dict[str, Any]]:
    """Return the first rows of a local file, ready for a suite.

    {"question", "answer"} for questions, {"messages"} for prompts, {"messages", "answer"} for recall (the last message
    is the user's), {"chosen", "rejected"} for preferences (whole dialogues, equal but for the last answer), {"key",
    "prompt", "instruction_id_list", "kwargs"} for instructions. Columns that no suite needs are left out.

    Args:
        path: of the file.
        kind: what the suite needs.
        key: key of the config that names the file, for messages.
        most: number of rows; None for all.

    Raises:
        UserError: the file cannot be read, or a row does not fit the suite.
    """
    if not path.endswith(DATA_FILES):
        raise UserError(f"{key}={path} is neither a known name nor a {DATA_FILES_IN_WORDS} file.")
    rows = []
    for place, row in islice(local.rows_of(Path(path), key), most):
        where = f"{key}: {place} of {path}"
        row = _recognised(row, kind, where).row
        if kind == "preferences":
            ready = _preferences(row, where)
        else:
            ready = instruction_row(row, where) if kind == "instructions" else _question_row(row, kind, where)
        if (length := max(map(len, _texts(ready)))) > LONGEST_TEXT:
            raise UserError(f"{where} holds a text of {length:,} characters, more than a model reads. Remove the row.")
        rows.append(ready)
    if not rows:
        expected = ", ".join(COLUMNS[kind]) if kind in COLUMNS else FORMATS[kind][1]
        raise UserError(f"{key}: {path} is empty. It should have rows with the columns {expected}.")
    return rows


def _texts(row: dict[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, str):
            yield value
        elif name in ("messages", "chosen", "rejected"):  # other lists are of names and arguments
            yield from (message["content"] for message in value)


def _question_row(row: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Return a row of questions, prompts or recall with the columns that a suite needs."""
    ready: dict[str, Any] = {}
    if kind != "questions":
        messages = filters.prompt_messages(row["prompt"])
        if isinstance(messages, str):
            raise UserError(
                f"{where}: {messages}. The messages of a row are those of user and assistant in turn, the last one "
                "the user's, each with a text as its content."
            )
        ready["messages"] = messages
    for name in {"questions": ("question", "answer"), "recall": ("answer",)}.get(kind, ()):
        value = row[name]
        if name == "answer" and isinstance(value, int | float | Decimal) and not isinstance(value, bool):
            if value != value or value in (math.inf, -math.inf):
                raise UserError(f"{where}: answer is {value}. It should be text or a number.")
            value = str(value)
        elif not filters.is_readable_text(value):
            expected = "text or a number" if name == "answer" else "text"
            raise UserError(f"{where}: {name} should be {expected}, but is {brief(value)}.")
        ready[name] = value
    return ready


def instruction_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row of google/IFEval. UserError: it does not have an instruction's id and arguments in two lists."""
    ids, given = row["instruction_id_list"], row["kwargs"]
    lists = isinstance(ids, list) and isinstance(given, list) and 0 < len(ids) == len(given)
    if (
        not filters.is_readable_text(row["prompt"])
        or not lists
        or not all(isinstance(name, str) for name in ids)
        or not all(isinstance(each, dict | None) for each in given)
    ):
        raise UserError(
            f"{where}: prompt should be text, instruction_id_list a list of names, and kwargs a list with as many"
            " objects, as in google/IFEval. Correct the row."
        )
    kept = {"prompt": row["prompt"], "instruction_id_list": ids, "kwargs": given}
    return kept | ({"key": str(row["key"])} if "key" in row else {})


def _preferences(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a pair as two whole dialogues."""
    pair = filters.dialogues_of_pair(row)
    if not isinstance(pair, str) and pair[0][-1]["content"] == pair[1][-1]["content"]:
        pair = "both answers are the same"
    if isinstance(pair, str):
        raise UserError(
            f"{where}: {pair}. A pair is two dialogues that differ in the last answer alone, or `prompt` with two "
            "answers."
        )
    return dict(zip(("chosen", "rejected"), pair, strict=True))


def _recognised(row: dict[str, Any], kind: str, where: str) -> formats.Recognised:
    """Return the row in the form of its kind. UserError: a column is missing, or has another type."""
    has = f"{where} has the columns {', '.join(sorted(map(str, row)))[:300] or '(none)'}"
    columns = COLUMNS.get(kind, ())
    if not set(columns) <= row.keys():
        raise UserError(
            f"{has}; the kind {kind} needs {', '.join(columns)}. Rename the columns or choose the kind that fits."
        )
    if kind not in FORMATS:
        return formats.Recognised(kind, row, set(columns))
    recognise, understood = FORMATS[kind]
    match = recognise(row)
    if isinstance(match, str):
        if match.startswith("column "):
            raise UserError(f"{where}: {match}. Convert the file.")
        raise UserError(
            f"{has}. {match or 'No known format has these'}. The kind {kind} reads: {understood}. Rename "
            "the columns, or choose the kind that fits."
        )
    for name in ("messages", "chosen", "rejected"):
        for message in match.row[name] if isinstance(match.row.get(name), list) and name in match.columns else ():
            if not _spans_fit(message):
                raise UserError(
                    f"{where}: column {name}: mask_spans is {brief(message['mask_spans'])}, but should be a list of "
                    f"[start, end) characters inside the content {brief(message['content'])}. Correct the file."
                )
    return match


def licence(source: Source) -> str:
    """Return the licence of a source for the table."""
    if source.path == EMBEDDED:
        return "generated here"
    hub = TRAINING.get(source.kind)
    if hub is not None and hub.path == source.path:
        return hub.licence
    return "your own file" if source.path.endswith(DATA_FILES) else "see its page on the Hub"


def _open(source: Source, key: str, seed: int) -> Iterator[Placed]:
    if source.path == EMBEDDED:
        return local.with_row_numbers(_generated(source, key, seed))
    if source.path.endswith(DATA_FILES) or Path(source.path).exists():
        return local.rows_of(Path(source.path), f"{key}.path")
    if not HUB_NAME.fullmatch(source.path):
        raise UserError(
            f"{key}.path={source.path} is neither `embedded`, nor a {DATA_FILES_IN_WORDS} file, nor a name on the "
            "Hugging Face Hub (owner/name). Write one of them."
        )
    return local.with_row_numbers(_from_hub(source, key))


def _spans_fit(message: Mapping[str, Any]) -> bool:
    """Return True without `mask_spans`, or when each is a pair of positions in the content, in order."""
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
        raise UserError(f"{key}: embedded data has no end: write how many rows, e.g. `rows: 2000`.")
    if source.kind == "demonstrations":
        try:
            played = [(env.name, env.options) for env in source.envs or []]
            how = {"player": source.player, "thought": source.thought or "cues", "style": source.style or "plain"}
            yield from embedded.demonstrations(played, source.rows, seed, **how)
        except ValueError as error:
            raise UserError(f"{key}.envs: {error}") from error
        except (Exception, SystemExit) as error:  # an environment may raise anything
            raise UserError(
                f"{key}.envs: an environment raised {one_line(error)}. `posttrain env check NAME` shows its mistakes."
            ) from error
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
            "demonstrations. Name a file as path, or choose one of these kinds."
        )
    yield from generators[source.kind](source.rows, seed)


# The Hub


def load_hub(hub: HubSet) -> Any:
    """Return one split of a Hub set; raise one of HUB_ERRORS where it cannot be loaded."""
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
                yield local.from_table(row)
    except HUB_ERRORS as error:
        raise UserError(
            f"{key}: the data set {hub.path} could not be read from the Hugging Face Hub ({one_line(error)}). Connect "
            "and start again (a gated set needs `hf auth login`; sets loaded before are found in the cache, HF_HOME); "
            f"or name a {DATA_FILES_IN_WORDS} file with the same columns as {key}.path; or try the pipeline without a "
            "network on generated data, which is `path: embedded` or the whole of `make quickstart`."
        ) from error
