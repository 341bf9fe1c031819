"""How do sources become a training set?  Read, filter, choose by seed, tokenise, hold out by question, mix by weight.

Which rows are drawn depends on their content and the seed, not on their order, nor on PYTHONHASHSEED:

    every row of a source ── filters, no duplicate, at most k of a question ── in the order of derive_seed(seed, row)
        ── not in an evaluation set, short enough, until `rows` are found ── split by derive_seed(seed, question)
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import NamedTuple

from datasets import Dataset, Features, List, Value

from envs.math_judge import MathJudge
from posttrain.config import DataSection, Source
from posttrain.data import reading
from posttrain.data.calls import message_size
from posttrain.data.contamination import EvaluationQuestions, evaluation_questions
from posttrain.data.encoding import (
    NO_PROMPT,
    Sample,
    TokenRow,
    encode_dialogues,
    encode_pairs,
    encode_prompts,
    most_characters,
    prompt_ids,
    question_messages,
    shortened,
)
from posttrain.data.filters import CHECKS, REMEDIES, Example
from posttrain.data.table import FilterTable, SourceReport
from posttrain.models import Chat, Message, model_card
from posttrain.runtime import console, is_main_process, parallel
from posttrain.types import UserError, derive_seed

ENCODE_AT_ONCE = 512
CHARACTERS_AT_ONCE = 4_000_000  # a tokenizer takes some 200 bytes for each

Encode = Callable[[list[Example], Chat, int], list[Sample | str | UserError]]

SFT_COLUMNS = Features({"input_ids": List(Value("int32")), "assistant_masks": List(Value("int8"))})
PREFERENCE_COLUMNS = Features({name: List(Value("int32")) for name in ("prompt_ids", "chosen_ids", "rejected_ids")})
PROMPT_COLUMNS = Features({"prompt_ids": List(Value("int32"))})


class TokenData(NamedTuple):
    """Rows of token ids, their held-out part, and the table of what was read and dropped.

    Phase 1: input_ids and assistant_masks (1 on trained tokens). Phase 2: prompt_ids, chosen_ids and rejected_ids, the
    last two with their stop token. Phase 3: prompt_ids, up to the header of the answer.
    """

    train: Dataset
    eval: Dataset
    table: FilterTable


class PromptQuestion(NamedTuple):
    """A prompt as messages and as ids, with its right answer if known."""

    messages: list[Message]
    ids: list[int]
    answer: str | None


def load_sft(data: DataSection, chat: Chat) -> TokenData:
    """Return conversations for phase 1, and print the table; UserError if nothing would be trained."""
    return _load(data, chat, encode_dialogues, SFT_COLUMNS)


def load_preferences(data: DataSection, chat: Chat) -> TokenData:
    """Return pairs for phase 2, and print the table; UserError if nothing would be trained."""
    train, evaluation, table = _load(data, chat, encode_pairs, PREFERENCE_COLUMNS)
    if data.flip_labels:
        pairs = zip(train["chosen_ids"], train["rejected_ids"], strict=True)
        tossed = [pair if derive_seed(data.seed, "coin", n) % 2 else pair[::-1] for n, pair in enumerate(pairs)]
        columns = {"chosen_ids": [chosen for chosen, _ in tossed], "rejected_ids": [rejected for _, rejected in tossed]}
        train = Dataset.from_dict({"prompt_ids": train["prompt_ids"], **columns}, features=PREFERENCE_COLUMNS)
        if is_main_process():
            console().print("CONTROL RUN (data.flip_labels): a coin decides which answer of a training pair is chosen.")
    return TokenData(train, evaluation, table)


def load_prompts(data: DataSection, chat: Chat) -> TokenData:
    """Return prompts without their answers for phase 3, and print the table.

    Of a dialogue with several answers it is the prompt of one, chosen by its text.

    Raises:
        UserError: no prompt is left.
    """
    title = "Prompts of phases 1 and 2, for answers of the model that phase 3 starts from"
    return _load(data, chat, encode_prompts, PROMPT_COLUMNS, title, "answers to come", "distillation")


def load_questions(data: DataSection, chat: Chat) -> tuple[list[PromptQuestion], FilterTable]:
    """Return prompts as messages, with known answers, and print the table; UserError if no prompt is left."""
    known = _evaluation_questions(data, "sources", "decontaminate")
    table = FilterTable(notes=known.notes, title="Prompts", trained="answers to come")
    questions: list[PromptQuestion] = []
    with MathJudge() as judge:
        for number, source in enumerate(data.sources):
            report = SourceReport(source.path, source.kind, reading.licence(source))
            rows, drawn = _chosen(source, f"sources.{number}", data.seed, judge, report), len(questions)
            characters = most_characters(chat, data.max_length)
            for row in rows:
                messages = question_messages(row)
                if messages is None:
                    report.drop(NO_PROMPT)
                    continue
                if row.calls:
                    report.drop("calls of tools")
                    continue
                if sum(len(message["content"]) for message in messages) > characters:
                    report.drop(f"longer than {data.max_length} tokens")
                    continue
                ids = prompt_ids(messages, None, chat)
                if isinstance(ids, UserError):
                    report.drop_unwritten(ids)
                elif source.rows is not None and len(questions) - drawn == source.rows:
                    report.drop("not drawn")
                elif known.seen_in(row):
                    report.drop("in an evaluation set")
                elif len(ids) > data.max_length:
                    report.drop(f"longer than {data.max_length} tokens")
                else:
                    questions.append(PromptQuestion(messages, ids, row.answer))
                    report.tokens += len(ids)
            report.train = report.per_epoch = report.trained_tokens = len(questions) - drawn
            table.sources.append(report)
    console().print(table)
    for number, report in enumerate(table.sources):
        if report.train == 0:
            raise UserError(
                f"Nothing is left of sources.{number}: {report.summary()}. {_remedy(report)}Check that `kind` and "
                "`path` fit, or remove this source."
            )
    return questions, table


def _evaluation_questions(data: DataSection, sources: str, key: str) -> EvaluationQuestions:
    """Return what the rows must not contain. sources, key: where the config names the sources and `decontaminate`."""
    if data.decontaminate:
        return evaluation_questions(data.sources, data.seed, sources)
    known = EvaluationQuestions()
    known.notes.append(f"NOT checked against any evaluation set: {key} is false.")
    return known


def _load(
    data: DataSection,
    chat: Chat,
    encode: Encode,
    columns: Features,
    title: str = "Training data",
    trained: str = "of them trained",
    section: str = "data",
) -> TokenData:
    key = f"{section}.sources"
    known = _evaluation_questions(data, key, f"{section}.decontaminate")
    table = FilterTable(notes=known.notes, title=title, trained=trained)
    kept: list[list[tuple[str, Sample]]] = []
    for report, samples in _read_all(data, chat, encode, known, section):
        table.sources.append(report)
        kept.append(samples)

    held_out = _held_out(kept, data)
    train: list[TokenRow] = []
    evaluation: list[TokenRow] = []
    for source, report, samples in zip(data.sources, table.sources, kept, strict=True):
        mine = [sample for question, sample in samples if question not in held_out]
        evaluation += [sample.columns for question, sample in samples if question in held_out]
        epoch = _weighted(mine, source.weight)
        train += [sample.columns for sample in epoch]
        report.train, report.held_out, report.per_epoch = len(mine), len(samples) - len(mine), len(epoch)
        report.truncated = sum(sample.truncated for _, sample in samples)
        report.cut = sum(sample.cut for _, sample in samples)
        report.tokens = sum(sample.tokens for sample in epoch)
        report.trained_tokens = sum(sample.trained for sample in epoch)
    random.Random(derive_seed(data.seed, "mix")).shuffle(train)

    if is_main_process():
        console().print(table)
    _require_something(table, section)
    return TokenData(_dataset(train, columns), _dataset(evaluation, columns), table)


def _read_all(
    data: DataSection, chat: Chat, encode: Encode, known: EvaluationQuestions, section: str
) -> list[tuple[SourceReport, list[tuple[str, Sample]]]]:
    """Return every source's report and samples, on every process; each source is read by one of them."""
    results: list[tuple[int, SourceReport, list[tuple[str, Sample]]]] = []
    problem: Exception | None = None
    try:
        with MathJudge() as judge:
            for number in range(parallel.rank(), len(data.sources), parallel.size()):
                source = data.sources[number]
                report = SourceReport(source.path, source.kind, reading.licence(source))
                rows = _chosen(source, f"{section}.sources.{number}", data.seed, judge, report)
                report.examples = _first_messages(source, rows)
                results.append((number, report, _tokenise(rows, source, chat, data.max_length, encode, known, report)))
    except Exception as error:  # the others wait for an answer
        problem = error
    for one in parallel.gather([problem]):
        if one is not None:
            raise one
    return [(report, samples) for _, report, samples in sorted(parallel.gather(results), key=lambda one: one[0])]


def _first_messages(source: Source, rows: list[Example]) -> list[str]:
    """Return first messages of generated dialogues, which every card may show: rows of anybody else may be private."""
    if source.path != "embedded" or source.kind == "demonstrations":
        return []
    users = (next((each for each in row.dialogues[0] if each["role"] == "user"), None) for row in rows)
    return list(islice(dict.fromkeys(user["content"] for user in users if user), model_card.MOST_EXAMPLES))


# From a source to the rows that may be used, in the order in which they are drawn


def _chosen(source: Source, key: str, seed: int, judge: MathJudge, report: SourceReport) -> list[Example]:
    """Return good rows, without duplicates and with at most k of a question, in an order that the seed chooses.

    Only the first k rows of each question in that order stay in memory, so a stream of millions fits.
    """
    check, seen, arrival = CHECKS[source.kind], set(), count()
    most = 1 if source.kind == "ultrafeedback" else source.max_per_question
    queues: dict[object, list[tuple[int, int, Example]]] = {}  # per question, the last in order on top
    for raw in reading.read_rows(source, key, seed, report):
        report.read += 1
        row = check(raw, source, judge)
        if isinstance(row, str):
            report.drop(row)
            continue
        digest = _digest("\x1e".join(_parts(row)))
        if digest in seen:
            report.drop("seen before")
            continue
        seen.add(digest)
        entry = (-derive_seed(seed, "draw", digest), next(arrival), row)
        queue = queues.setdefault(row.question if most else None, [])
        if most is None or len(queue) < most:
            heapq.heappush(queue, entry)
        else:
            heapq.heappushpop(queue, entry)
            report.drop(f"more than {most} of one question")
    return [row for *_, row in sorted((entry for queue in queues.values() for entry in queue), reverse=True)]


def _tokenise(
    rows: list[Example],
    source: Source,
    chat: Chat,
    max_length: int,
    encode: Encode,
    known: EvaluationQuestions,
    report: SourceReport,
) -> list[tuple[str, Sample]]:
    """Return the first `rows` rows that are in no evaluation set and short enough, as (question, tokens)."""
    kept: list[tuple[str, Sample]] = []
    most = source.rows or len(rows)
    for batch in _batches(rows, most_characters(chat, max_length)):
        if len(kept) == most:
            break
        clean = []
        for row in batch:
            if row is None:
                report.drop(f"longer than {max_length} tokens")
            elif known.seen_in(row):
                report.drop("in an evaluation set")
            else:
                clean.append(row)
        for row, sample in zip(clean, encode(clean, chat, max_length), strict=True):
            if len(kept) == most:
                report.drop("not drawn")
            elif isinstance(sample, UserError):
                report.drop_unwritten(sample)
            elif isinstance(sample, str):
                report.drop(sample)
            else:
                kept.append((" ".join(row.question.casefold().split()), sample._replace(cut=row.cut)))
    report.drop("not drawn", max(0, report.read - sum(report.dropped.values()) - len(kept)))
    return kept


def _batches(rows: list[Example], most: int) -> Iterator[list[Example | None]]:
    """Yield as many rows as may be tokenised together; None for a row of more than `most` characters."""
    batch: list[Example | None] = []
    size = 0
    for row in rows:
        short = shortened(row, most)
        length = sum(message_size(message) for messages in short.dialogues for message in messages) if short else 0
        if batch and (len(batch) == ENCODE_AT_ONCE or size + length > CHARACTERS_AT_ONCE):
            yield batch
            batch, size = [], 0
        batch.append(short)
        size += length
    if batch:
        yield batch


# The held-out split, and what an epoch sees


def _held_out(kept: list[list[tuple[str, Sample]]], data: DataSection) -> set[str]:
    """Return the questions whose rows are evaluated on: a share of all questions, or enough for `eval_rows` rows.

    `eval_rows` is written for a large data set: of a small one, no more than a tenth of the rows is held out. A
    question has its place by its own text and the seed, so it is on the same side in every source.
    """
    rows: dict[str, int] = {}
    for question, _ in (one for samples in kept for one in samples):
        rows[question] = rows.get(question, 0) + 1
    places = {question: derive_seed(data.seed, "held out", question) for question in rows}
    if data.eval_rows is None:
        return {question for question, place in places.items() if place < data.eval_fraction * 2**63}
    chosen: set[str] = set()
    count = 0
    for question in sorted(places, key=places.__getitem__):
        if count >= data.eval_rows:
            break
        if count + rows[question] <= sum(rows.values()) // 10:
            chosen.add(question)
            count += rows[question]
    return chosen


def _weighted(samples: list[Sample], weight: float) -> list[Sample]:
    """Return each sample `weight` times; for the fraction of the weight, the first samples once more."""
    whole = int(weight)
    return samples * whole + samples[: round((weight - whole) * len(samples))]


def _require_something(table: FilterTable, section: str) -> None:
    """Raise UserError where nothing is left; `section` is the one of the config that names the sources."""
    for number, report in enumerate(table.sources):
        if report.train + report.held_out == 0:
            raise UserError(
                f"Nothing is left of {section}.sources.{number}: {report.summary()}. {_remedy(report)}Check that "
                "`kind` and `path` fit, loosen the filter that took the rows, or remove this source."
            )
    if sum(report.train for report in table.sources) == 0:
        held_out = sum(report.held_out for report in table.sources)
        raise UserError(
            f"All {held_out} rows are held out, so there is nothing to train on. Write a smaller data.eval_fraction, or"
            " add data."
        )
    if table.trained_tokens == 0:
        raise UserError(
            "An epoch would hold no trained token, because the weights of the sources round down to zero rows. "
            "Write a larger data.sources.N.weight, or add data."
        )


def _remedy(report: SourceReport) -> str:
    does = [does for why, does in REMEDIES.items() if any(one.startswith(why) for one in report.dropped)]
    return "".join(f"{each} " for each in [*does, *([report.unwritten] if report.unwritten else [])])


def _dataset(rows: list[TokenRow], columns: Features) -> Dataset:
    """Return a data set in memory: nothing is written to the user's Hugging Face cache."""
    return Dataset.from_dict({name: [row[n] for row in rows] for n, name in enumerate(columns)}, features=columns)


def _parts(row: Example) -> list[str]:
    """Return what makes two rows the same: roles, contents, which answers are trained, calls and tools."""
    parts = [
        message["role"]
        + "\x1f"
        + message["content"]
        + "\x1funtrained" * (message.get("train") is False)
        + (f"\x1fcalls {json.dumps(message['tool_calls'])}" if "tool_calls" in message else "")
        for messages in row.dialogues
        for message in messages
    ]
    return parts if row.tools is None else [*parts, json.dumps(row.tools)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
