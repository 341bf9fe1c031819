"""What was said in an episode?  Its messages for a page: which the model wrote, what it called, what it was told.

    [{"role": "user", "content": "What is 4 + 3?"},
     {"role": "assistant", "content": "<tool_call>..."},
     {"role": "tool", "content": "7", "call": 'calculate(expression="4 + 3")', "failed": False}]

An assistant's message that the model did not write, as an example in its prompt, has the role `example`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from posttrain.types import Record

EXAMPLE = "example"
ERROR = "Error: "  # how the result of a call that failed begins (envs/tools.py)
MOST_OBJECTS = 32  # in a turn, of which each is read as a call
BEFORE_A_CALL = re.compile(r"(<tool_call>|\[TOOL_CALLS\]\s*\[?|<\|python_tag\|>|```(json)?|\[)\s*$")
NO_TEXT = "no readable text"


def messages_of(row: Record) -> list[Record]:
    """Return the messages and the answer of a row, or both answers of a preference pair."""
    if "chosen" in row and "rejected" in row:
        pair = [[{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in
                (row["chosen"], row["rejected"])]  # fmt: skip
        return [*pair[0], *(message for message in pair[1] if message["role"] == "assistant")]
    messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in row.get("messages", [])]
    names = [each.get("name") for each in row.get("messages", [])]
    if isinstance(row.get("turn_rewards"), list):
        _mark_examples(messages, len(row["turn_rewards"]), row.get("actions"))
    _mark_calls(messages, names)
    if isinstance(row.get("text"), str):
        messages.append({"role": "assistant", "content": row["text"]})
    return messages


def _mark_examples(messages: list[Record], turns: int, actions: Any) -> None:
    """Give the answers that the model did not write another role: there are more of them than turns."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if len(answers) <= turns:
        return
    written = answers[-turns:] if turns else []
    if isinstance(actions, list) and len(actions) == turns:  # an agent may open several conversations, each with them
        left, found = Counter(map(str, actions)), list[Record]()
        for message in reversed(answers):
            if left[message["content"]]:
                left[message["content"]] -= 1
                found.append(message)
        written = found if len(found) == turns else written
    for message in answers:
        if not any(message is each for each in written):
            message["role"] = EXAMPLE


def _mark_calls(messages: list[Record], names: Sequence[Any]) -> None:
    """Add to each result of a tool the call that it answers, if it can be read, and whether it failed."""
    calls = list[tuple[str, str]]()
    for message, name in zip(messages, names, strict=True):
        if message["role"] == "assistant":
            calls = [(name, arguments) for name, arguments, _ in written_calls(message["content"])]
        elif message["role"] == "tool":
            message["failed"] = message["content"].startswith(ERROR)
            message["call"] = str(name or "")
            if calls and name in (None, calls[0][0]):
                message["call"] = "{}({})".format(*calls.pop(0))


def written_calls(text: str) -> list[tuple[str, str, int]]:
    """Return (name, arguments as written in Python, where it begins) of each JSON object in a text that is a call."""
    decoder, calls, at = json.JSONDecoder(), list[tuple[str, str, int]](), 0
    for _ in range(MOST_OBJECTS):
        at = text.find("{", at)
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
        if isinstance(value.get("name"), str) and isinstance(arguments, dict):
            given = (f"{key}={json.dumps(each, ensure_ascii=False)}" for key, each in arguments.items())
            calls.append((value["name"], ", ".join(given), at))
        at = end
    return calls


def beside_calls(text: str) -> str:
    """Return what a turn with calls says before the first of them."""
    calls = written_calls(text)
    return BEFORE_A_CALL.sub("", text[: calls[0][2]]).strip() if calls else text.strip()


def is_readable(text: str) -> bool:
    """Return whether a text has letters or digits, and nothing that is no text, as bytes that are no character."""
    return is_legible(text) and any(map(str.isalnum, text))


def is_legible(text: str) -> bool:
    """Return whether every character is one that can be read, also punctuation."""
    plain = text.translate(dict.fromkeys(map(ord, "\n\t\r")))
    return not any(mark == "\ufffd" or unicodedata.category(mark) in ("Cc", "Cn", "Co", "Cs") for mark in plain)
