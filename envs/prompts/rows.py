"""Which rows does `prompts` read, and what is the conversation of a row?"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from envs.base import SPLITS, split_by_hash
from envs.hub_sets import EMBEDDED, all_rows, split_names
from envs.in_time import error_text
from envs.local_rows import ROLE_NAMES
from envs.protocol import Message, template
from envs.tools import text_in, without_nothing

COLUMNS = ("prompt", "messages", "question", "problem", "instruction", "query", "input")  # that may hold the prompt
SYSTEM = ("system", "system_prompt")  # columns that may hold the system message, as in phases 1 and 2
HOMES = {"train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test"}
N_EMBEDDED = 4000
ROLES = ("system", "user", "assistant", "tool")
EVERY_COLUMN = ("*",)  # may be read
ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object, such as a picture: another in each process


class Rows(NamedTuple):
    """Which rows are read, and how a prompt is made: Rows("gsm8k.jsonl", None, None, "question", None, None).

    reads: the columns that an environment or a program reads beside the prompt, which tell its levels apart; None where
    there is neither: the prompt alone is the level. prompt: the column; None for one of `COLUMNS`, beside an
    environment or a program for `prompt` or `messages`.
    """

    path: str
    config: str | None
    rows: int | None
    prompt: str | None
    template: str | None
    system: str | None
    reads: tuple[str, ...] | None = None


class Conversation(NamedTuple):
    """What stands before the first answer, the user messages that follow later answers, and the prompt as it is given
    to reward functions: a text, or messages.

    source: the columns of the row that a template was filled with, as a text; None without a template.
    rest: a digest of the other columns that `Rows.reads` names, empty where there are none; None where that is None.
    """

    prompt: list[Message]
    later: list[str]
    given: str | list[Message]
    source: str | None = None
    rest: str | None = None

    @property
    def key(self) -> str:
        """What decides whether two rows are the same level: the prompt, and what else of the row is read."""
        more = [] if self.rest is None else [self.source, self.rest]
        return "\n".join([self._words(self.prompt), *filter(None, more)])

    @property
    def divided_by(self) -> str:
        """What decides the split: a row stays in it under another system message or template."""
        own = [message for message in self.prompt if message["role"] != "system"]
        return "\n".join([self._words(own) if self.source is None else self.source, *filter(None, [self.rest])])

    @property
    def split(self) -> str:
        """Which split a row belongs to."""
        return split_by_hash(self.divided_by)

    def _words(self, messages: Sequence[Message]) -> str:
        calls = [json.dumps(each["tool_calls"], default=str) for each in messages if "tool_calls" in each]
        return "\n".join([message["content"] for message in messages] + calls + self.later)


@dataclass(frozen=True)
class Table:
    """The rows of a source, the key of each level, the split that each belongs to, and the numbers of each split.

    own: the splits that the source has itself; the others are held out of its training rows. alike: how many rows are
    divided into splits, where all of them are in one as they do not differ; else 0.
    """

    rows: list[dict[str, Any]]
    keys: list[str]
    splits: list[str]
    numbers: dict[str, list[int]]
    columns: list[str]
    most_turns: int
    own: tuple[str, ...]
    alike: int


@lru_cache(maxsize=64)  # sections of a run, each of which opens an environment for every episode
def table_of(source: Rows) -> Table:
    """Return the rows of a source; ValueError, one paragraph, where there are none or one has no prompt."""
    rows, homes = read_rows(source)
    conversations: list[Conversation] = []
    for number, row in enumerate(rows, 1):
        try:
            conversations.append(conversation_of(row, source))
        except ValueError as problem:
            raise ValueError(f"prompts: row {number} of path={source.path}: {problem}") from None
    splits = splits_of(homes, conversations)
    numbers: dict[str, list[int]] = {split: [] for split in SPLITS}
    for number, split in enumerate(splits):
        numbers[split].append(number)
    own = tuple(split for split in SPLITS if split in homes)
    of_train = [each.divided_by for home, each in zip(homes, conversations, strict=True) if home == "train"]
    divided = [] if own == SPLITS else of_train
    return Table(
        rows,
        [each.key for each in conversations],
        splits,
        numbers,
        list(dict.fromkeys(column for row in rows for column in row)),
        max(1 + len(each.later) for each in conversations),
        own,
        len(divided) if len(divided) > 1 and len(set(divided)) == 1 else 0,
    )


def read_rows(source: Rows) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a source, and the split that each stands in there; ValueError where there are none."""
    rows, homes = _embedded() if source.path == EMBEDDED else _read(source)
    if not rows:
        raise ValueError(f"prompts: path={source.path} has no rows.")
    return rows, homes


def splits_of(homes: Sequence[str], conversations: Sequence[Conversation]) -> list[str]:
    """Return the split of each row: what the data set does not hold out itself is held out of its training rows."""
    own = set(homes)
    found: list[str] = []
    for home, conversation in zip(homes, conversations, strict=True):
        held_out = conversation.split
        found.append(held_out if home == "train" and held_out not in own else home)
    return found


def _read(source: Rows) -> tuple[list[dict[str, Any]], list[str]]:
    there = split_names("prompts", source.path, source.config)
    rows: list[dict[str, Any]] = []
    homes: list[str] = []
    for name in [name for name in there if name in HOMES] or there[:1]:
        read = all_rows("prompts", source.path, source.rows, source.config, name)
        rows += read
        homes += [HOMES.get(name, "train")] * len(read)
    return rows, homes


def _embedded() -> tuple[list[dict[str, Any]], list[str]]:
    from envs.metamath_qa.problems import TEMPLATES, Parameters

    rng, kinds, rows = np.random.default_rng(0), list(TEMPLATES), []
    for number in range(N_EMBEDDED):
        drawn = TEMPLATES[kinds[number % len(kinds)]](Parameters(rng))
        question = drawn.questions[int(rng.integers(len(drawn.questions)))]
        rows.append({"question": question, "answer": drawn.answer, "kind": kinds[number % len(kinds)]})
    return rows, ["train"] * len(rows)


def conversation_of(row: Mapping[str, Any], source: Rows) -> Conversation:
    """Return the conversation of a row; ValueError where it has none."""
    conversation = _conversation(row, source)
    try:
        conversation.key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"its prompt holds half a character, {error.object[error.start]!a}, which is no text."
        ) from None
    return conversation


def _conversation(row: Mapping[str, Any], source: Rows) -> Conversation:
    said = source.system
    if said is None and source.template is None:
        said = next((row[name] for name in SYSTEM if isinstance(row.get(name), str) and row[name].strip()), None)
    system: list[Message] = [] if said is None else [{"role": "system", "content": said}]
    if source.template is not None:
        text = filled(source.template, row)
        names = _filling(source, row)
        prompt: list[Message] = [*system, {"role": "user", "content": text}]
        return Conversation(prompt, [], text, _source(row, names), _rest(source, row, names))
    column = source.prompt or (_found(row) if source.reads is None else _found_beside_a_reader(row))
    if column is None and source.reads is not None:  # TRL needs no prompt beside an environment
        empty: list[Message] = [*system, {"role": "user", "content": ""}]
        return Conversation(empty, [], list(empty), rest=_rest(source, row, []))
    if column is None or column not in row:
        named = f'no column "{column}"' if column else f"none of the columns {', '.join(COLUMNS)}"
        raise ValueError(
            f"it has {named}, only {', '.join(row)}. Name the column of the prompt, e.g. prompt: question."
        )
    value, rest = row[column], _rest(source, row, [column])
    if isinstance(value, str) and value.strip():
        if column == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
            value = f"{value}\n\n{row['input']}"  # as Alpaca's rows are read everywhere
        return Conversation([*system, {"role": "user", "content": value}], [], value, rest=rest)
    messages = _messages(value, column)
    later: list[str] = []
    if column == "messages":  # a whole dialogue: its answers are written anew, its user messages follow them
        first = next(number for number, message in enumerate(messages) if message["role"] == "user")
        later = [message["content"] for message in messages[first + 1 :] if message["role"] == "user"]
        messages = messages[: first + 1]
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last message of {column} is not a user's, so there is nothing to answer.")
    if system and messages[0]["role"] == "system":
        messages = messages[1:]
    return Conversation([*system, *messages], later, [*system, *messages], rest=rest)


def _found(row: Mapping[str, Any]) -> str | None:
    """Return the column that holds the prompt of a row, None where there is none."""
    there = [name for name in COLUMNS if row.get(name) is not None]
    return next((name for name in there if row[name] not in ("", [])), there[0] if there else None)


def _found_beside_a_reader(row: Mapping[str, Any]) -> str | None:
    """Return the column that holds the prompt beside an environment or a program: `prompt`, or messages in `messages`.

    What else stands in a row is read by these alone, under any name, as TRL does it: a question is not shown twice.
    """
    prompt = row.get("prompt")
    if (isinstance(prompt, str) and prompt.strip()) or (isinstance(prompt, list) and prompt):
        return "prompt"
    messages = row.get("messages")
    meant = isinstance(messages, list) and all(isinstance(each, Mapping) and "role" in each for each in messages)
    return "messages" if messages and meant else None


def without_prompt(rows: Sequence[Mapping[str, Any]], source: Rows) -> str:
    """Return what to do where no row has a prompt beside an environment or a program, and one may be meant; else ""."""
    if source.reads is None or source.prompt or source.template or any(map(_found_beside_a_reader, rows)):
        return ""
    names = [name for name in COLUMNS if any(row.get(name) for row in rows)]
    return f"No column is read as the prompt; to name one: prompt: {names[0]}." if names else ""


def _rest(source: Rows, row: Mapping[str, Any], used: Sequence[str]) -> str | None:
    """Return what `Conversation.rest` says, columns of the system message included.

    used: the columns that the prompt is made of.
    """
    if source.reads is None:
        return None
    names = [name for name in row if source.reads == EVERY_COLUMN or name in source.reads]
    read = without_nothing({name: row[name] for name in names if name not in used})
    if not read:
        return ""
    text = json.dumps(read, sort_keys=True, default=lambda value: ADDRESS.sub("", str(value)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _filling(source: Rows, row: Mapping[str, Any]) -> list[str]:
    """Return the column `prompt`, or else the columns that the template uses."""
    assert source.template is not None
    if source.prompt and source.prompt not in row:
        raise ValueError(f'it has no column "{source.prompt}", only {", ".join(row)}.')
    return [source.prompt] if source.prompt else sorted(_used(source.template).intersection(row))


def _source(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return columns as a text."""
    values = [row[name] if isinstance(row[name], str) else json.dumps(row[name], default=str) for name in names]
    return "\n".join(values).encode("utf-8", "replace").decode()


@lru_cache(maxsize=64)
def _used(source: str) -> frozenset[str]:
    from jinja2.meta import find_undeclared_variables

    return frozenset(find_undeclared_variables(template(source).environment.parse(source)))


def _messages(value: Any, column: str) -> list[Message]:
    messages = _as_messages(value)
    if messages is None:
        raise ValueError(f"{column} is neither a text nor a list of messages with role and content: {value!r:.80}.")
    return messages


def _as_messages(value: Any) -> list[Message] | None:
    """Return a list of messages as templates expect them; None where it is not one, or no user says anything."""
    messages = [_message(each) for each in value] if isinstance(value, list) else []
    whole = [message for message in messages if message]
    user = any(message["role"] == "user" for message in whole)
    return whole if user and len(whole) == len(messages) else None


def _message(given: Any) -> Message | None:
    """Return a message as templates expect it, roles by the names of phases 1 and 2; None where it is not one."""
    role: Any = given.get("role") if isinstance(given, Mapping) else None
    role = ROLE_NAMES.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        return None
    calls = given.get("tool_calls") or ([given["function_call"]] if given.get("function_call") else [])
    content = "" if calls and given.get("content") is None else text_in(given.get("content"))
    if content is None or (calls and (role != "assistant" or not _are_calls(calls))):
        return None
    message = {"role": role, "content": content}
    if role == "tool":
        message |= {key: given[key] for key in ("name", "tool_call_id") if isinstance(given.get(key), str)}
    return message | ({"tool_calls": without_nothing(calls)} if calls else {})


def _are_calls(calls: Any) -> bool:
    functions = [each.get("function") or each for each in calls if isinstance(each, Mapping)]
    names = [each.get("name") for each in functions if isinstance(each, Mapping)]
    return isinstance(calls, list) and len(names) == len(calls) and all(isinstance(name, str) for name in names)


def filled(source: str, row: Mapping[str, Any], empty: bool = False) -> str:
    """Return a template with the columns of a row in it; ValueError where it cannot be filled, or gives nothing.

    empty: it may give nothing.
    """
    try:
        text = template(source).render(row)
    except Exception as error:  # the user's own template
        raise ValueError(
            f"the template cannot be filled ({type(error).__name__}: {error_text(error)})."
            f" The columns are {', '.join(row)}."
        ) from None
    if not empty and not text.strip():
        raise ValueError("the template gives an empty prompt.")
    return text
