"""Which prompts does the environment `prompts` make of a file, and what are its reward functions given?"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from envs import make
from envs.prompts import Prompts
from envs.prompts.rewards import Reward
from envs.prompts.rows import EVERY_COLUMN, Conversation, Rows, conversation_of, read_rows, splits_of, without_prompt
from posttrain.types import UserError

SPLITS = {"train": "training", "validation": "validation", "test": "the test"}
MOST = 10  # rows that are listed of each kind
Row = tuple[int, dict[str, Any], Conversation]  # its number, counted from 1


class OwnPrompts(NamedTuple):
    """What is said about the rows, and the conversations of those that can be used."""

    lines: list[str]
    conversations: list[Conversation]
    problem: str  # why the environment refuses this file or these options; else empty


def own_prompts(path: str, options: Mapping[str, Any]) -> OwnPrompts:
    """Return what the environment makes of the rows; UserError where they cannot be read, or an option is wrong.

    options: of the environment, beside `path`.
    """
    try:
        env, problem = make("prompts", path=path, **options), ""
    except ValueError as error:
        env, problem = None, str(error)
    if isinstance(env, Prompts):
        source = env.config
    else:
        played = options.get("environment") or options.get("agent")
        source = Rows(path, *(options.get(name) for name in Rows._fields[1:]))
        source = source._replace(reads=EVERY_COLUMN if played else None)
    try:
        rows, homes = read_rows(source)
    except ValueError as error:
        raise UserError(str(error)) from None
    usable: list[Row] = []
    unusable: list[str] = []
    for number, row in enumerate(rows, 1):
        try:
            usable.append((number, row, conversation_of(row, source)))
        except ValueError as error:
            unusable.append(f"row {number} cannot be used: {error}")
    if problem and not unusable:
        raise UserError(problem)
    conversations = [conversation for _, _, conversation in usable]
    splits = Counter(splits_of([homes[number - 1] for number, _, _ in usable], conversations))
    repeated = list(_repeated(usable))
    counts = ", ".join(f"{splits[name]:,} for {what}" for name, what in SPLITS.items())
    lines = [
        f"rows of {path}: {len(rows):,}; unusable: {len(unusable):,}; repeated prompts: {len(repeated):,}; {counts}",
        *_listed(unusable),
        *_listed(repeated),
        f"columns: {', '.join(dict.fromkeys(column for row in rows for column in row))}",
    ]
    if empty := without_prompt(rows, source):
        lines.append(f"{empty} Without a prompt the user message is empty.")
    if isinstance(env, Prompts):
        lines += [f"  {_reward_line(reward, env.columns, usable)}" for reward in env.rewards]
    return OwnPrompts(lines, conversations, problem)


def _repeated(rows: Sequence[Row]) -> Iterator[str]:
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for number, row, conversation in rows:
        if conversation.key not in first:
            first[conversation.key] = number, row
            continue
        earlier, other = first[conversation.key]
        differing = ", ".join(name for name in row if row[name] != other.get(name))
        yield f"row {number} repeats the prompt of row {earlier}" + (f" with another {differing}" if differing else "")


def _listed(lines: Sequence[str]) -> list[str]:
    more = [f"  ... and {len(lines) - MOST:,} more"] if len(lines) > MOST else []
    return [*(f"  {line}" for line in lines[:MOST]), *more]


def _reward_line(reward: Reward, columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return what a reward function is called with, and how many rows lack the column that a built-in one reads."""
    line = (
        f"reward {reward.title}, weight {reward.weight:g}: is given {', '.join(reward.given(columns)) or 'no column'}"
    )
    reads = inspect.signature(reward.function).parameters.get("column")
    if reads is None or not isinstance(reads.default, str):
        return line
    lacking = [number for number, row, _ in rows if row.get(reads.default) in (None, "", [])]
    absent = f", which {len(lacking):,} of {len(rows):,} rows lack (the first: row {lacking[0]})" if lacking else ""
    return f"{line}; reads {reads.default}{absent}"
