"""How does a kept row become token ids?  A dialogue, plain text, a pair or a prompt; or the reason to drop it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from posttrain.data.calls import message_size
from posttrain.data.filters import Example
from posttrain.data.formats import TEXT
from posttrain.models import Chat, Encoded, Message, Tools
from posttrain.types import UserError, derive_seed

TokenRow = tuple[np.ndarray, ...]  # one row of the dataset, column by column
NO_PROMPT = "plain text has no prompt"


class Sample(NamedTuple):
    """A row as token ids, with the table's counts."""

    columns: TokenRow
    tokens: int
    trained: int
    truncated: bool = False
    cut: bool = False


def most_characters(chat: Chat, max_length: int) -> int:
    """Return a limit of characters: no longer text fits into `max_length` tokens. At least a million, since a
    normaliser may drop some."""
    return max(1_000_000, max_length * max(map(len, chat.tokenizer.get_vocab())))


def shortened(row: Example, most: int) -> Example | None:
    """Return a row of at most `most` characters, cut after an answer if necessary; None where nothing would be left.

    Longer texts would take too much memory in the tokenizer. A pair and a prompt are never cut.
    """
    if sum(message_size(message) for messages in row.dialogues for message in messages) <= most:
        return row
    messages = row.dialogues[0]
    if _is_plain(row):
        return row._replace(dialogues=[[messages[0] | {"content": messages[0]["content"][:most]}]])
    if len(row.dialogues) > 1 or messages[-1]["role"] != "assistant":
        fits = all(sum(map(message_size, each)) <= most for each in row.dialogues)
        return row if fits else None
    ends = accumulate(map(message_size, messages))
    kept = [at for at, end in enumerate(ends, 1) if end <= most and messages[at - 1]["role"] == "assistant"]
    return row._replace(dialogues=[messages[: kept[-1]]], shortened=True) if kept else None


def encode_dialogues(rows: list[Example], chat: Chat, max_length: int) -> list[Sample | str | UserError]:
    """Return ids and mask of each row, or the reason to drop it, an error where the template cannot write it.

    A row that is too long ends with the last trained answer that fits whole. Plain text is trained whole, and may be
    cut anywhere.
    """
    samples: list[Sample | str | UserError] = []
    control = [name for name in chat.tokenizer.convert_ids_to_tokens(sorted(chat.control_ids)) if name]
    talking = [row for row in rows if not _is_plain(row)]
    talks = iter(_encoded([row.dialogues[0] for row in talking], [row.tools for row in talking], chat))
    for row in rows:
        text = row.dialogues[0][0]["content"]
        if _is_plain(row) and any(name in text for name in control):
            samples.append("text with control tokens, as a template writes them")
            continue
        encoded = _encode_text(text, chat) if _is_plain(row) else next(talks)
        if isinstance(encoded, UserError):
            samples.append(encoded)
            continue
        ids, mask = np.array(encoded.ids, np.int32), np.array(encoded.mask, np.int8)
        whole = len(ids)
        if whole > max_length:
            ends = np.flatnonzero((ids == chat.stop_id) & (mask == 1)) + 1
            fitting = [max_length] if _is_plain(row) else ends[ends <= max_length]
            whole = int(fitting[-1]) if len(fitting) else 0
        trained = int(mask[:whole].sum())
        if whole == 0:
            samples.append(f"longer than {max_length} tokens")
        elif trained == 0:
            samples.append("no trained token")
        else:
            samples.append(Sample((ids[:whole], mask[:whole]), whole, trained, row.shortened or whole < len(ids)))
    return samples


def encode_pairs(rows: list[Example], chat: Chat, max_length: int) -> list[Sample | str | UserError]:
    """Return ids of each prompt up to the header of the answer, and of both answers with stop tokens, uncut."""
    dialogues = [messages for row in rows for messages in row.dialogues]
    encoded = iter(_encoded(dialogues, [None] * len(dialogues), chat))
    samples: list[Sample | str | UserError] = []
    for chosen, rejected in zip(encoded, encoded, strict=True):
        if not (isinstance(chosen, Encoded) and isinstance(rejected, Encoded)):
            samples.append(next(each for each in (chosen, rejected) if isinstance(each, UserError)))
            continue
        prompt, better = _last_answer(chosen.ids, chosen.mask)
        same_prompt, worse = _last_answer(rejected.ids, rejected.mask)
        trained = len(better) + len(worse)
        if min(len(better), len(worse)) == 0:
            samples.append("no trained token")
            continue
        assert np.array_equal(prompt, same_prompt), "a template wrote the same prompt in two ways"
        if len(prompt) + max(len(better), len(worse)) > max_length:
            samples.append(f"longer than {max_length} tokens")
        elif np.array_equal(better, worse):
            samples.append("identical answers")
        else:
            samples.append(Sample((prompt, better, worse), 2 * len(prompt) + trained, trained))
    return samples


def encode_prompts(rows: list[Example], chat: Chat, max_length: int) -> list[Sample | str | UserError]:
    """Return ids of the messages before an answer, up to its header; none is cut."""
    samples: list[Sample | str | UserError] = []
    for row in rows:
        messages = question_messages(row)
        if messages is None:
            samples.append(NO_PROMPT)
            continue
        prompt = prompt_ids(messages, row.tools, chat)
        if isinstance(prompt, UserError):
            samples.append(prompt)
            continue
        ids = np.array(prompt, np.int32)
        if len(ids) > max_length:
            samples.append(f"longer than {max_length} tokens")
        else:
            samples.append(Sample((ids,), len(ids), trained=1))
    return samples


def prompt_ids(messages: list[Message], tools: Tools | None, chat: Chat) -> list[int] | UserError:
    """Return ids up to the header of the answer, or why the template cannot write this prompt."""
    try:
        return chat.prompt(messages, tools)
    except UserError as error:
        _require_tools(messages, tools, chat)
        return error


def _encoded(
    dialogues: Sequence[list[Message]], tools: Sequence[Tools | None], chat: Chat
) -> Sequence[Encoded | UserError]:
    """Return ids and mask of each dialogue, or why the template cannot write it."""
    try:
        return chat.encode_batch(dialogues, tools)
    except UserError:  # of some row, which is found by encoding each alone
        return [_encoded_alone(*each, chat) for each in zip(dialogues, tools, strict=True)]


def _encoded_alone(messages: list[Message], tools: Tools | None, chat: Chat) -> Encoded | UserError:
    try:
        return chat.encode(messages, tools)
    except UserError as error:
        _require_tools(messages, tools, chat)
        return error


def _require_tools(messages: list[Message], tools: Tools | None, chat: Chat) -> None:
    """Raise UserError where a row has tools and its template knows none, which is no fault of the row."""
    if tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        chat.require_tools(bool(tools))


def _encode_text(text: str, chat: Chat) -> Encoded:
    """Return a text without a template, as a base model is trained on it: all of it and the end-of-sequence token."""
    start: list[Any] = list(chat.tokenizer("")["input_ids"])[:1]
    start = start if start == [chat.tokenizer.bos_token_id] else []
    end: Any = chat.stop_id if chat.tokenizer.eos_token_id is None else chat.tokenizer.eos_token_id
    ids = chat.content_ids(text)
    return Encoded([*start, *ids, end], [False] * len(start) + [True] * (len(ids) + 1))


def _is_plain(row: Example) -> bool:
    return row.dialogues[0][0]["role"] == TEXT


def question_messages(row: Example) -> list[Message] | None:
    """Return the messages before an answer of the row, or before the answer to come; None for plain text."""
    messages = row.dialogues[0]
    if _is_plain(row):
        return None
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if messages[-1]["role"] == "assistant":
        messages = messages[: answers[derive_seed("answer", *(m["content"] for m in messages)) % len(answers)]]
    return messages


def _last_answer(ids: list[int], mask: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Split in front of the last run of trained tokens, and drop what the template writes after it."""
    end = len(mask) - mask[::-1].index(True) if True in mask else len(mask)
    start = end
    while start > 0 and mask[start - 1]:
        start -= 1
    return np.array(ids[:start], np.int32), np.array(ids[start:end], np.int32)
