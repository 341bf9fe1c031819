"""What does a server's reply say?  Its text, calls of tools, whether it is complete, and the tokens that it cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.models import nine, texts_in

MOST_TOKENS = 10**12  # of one reply; a larger number is an error of the server

Usage = tuple[int | None, int | None]  # tokens of a prompt and of its answer; None where the server did not say


@dataclass(frozen=True)
class Reply:
    """An answer of a model: Reply("Right.", finished=True, prompt_tokens=31, completion_tokens=3).

    finished: False if it was cut off at the longest answer. The server counts the tokens; None where it does not say.
    calls: of tools, as OpenAI's `tool_calls`.
    """

    text: str
    finished: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def changed(self, change: Callable[[str], str]) -> Reply:
        """Return the reply with a change of each of its texts."""
        calls = [
            call | {"id": change(call["id"]), "function": {key: change(text) for key, text in call["function"].items()}}
            for call in self.calls
        ]
        return replace(self, text=change(self.text), calls=calls)


class Nonsense(ValueError):
    """A reply with status 200 that is not an answer; `usage` is its cost in tokens, where it says so."""

    def __init__(self, words: str, usage: Usage = (None, None)) -> None:
        super().__init__(words)
        self.usage = usage


def read_reply(answer: Any, longest: int | None = None, *, calls: bool = False) -> Reply:
    """Return the answer in a chat completion.

    A thought that the server returns separately (`reasoning_content`) is put in front of the answer, in <think> tags.
    Without finish_reason an answer is finished unless the server says that it has `longest` tokens. `tool_calls` are
    read where the request has tools (`calls`).

    Raises:
        Nonsense: the reply is not a chat completion.
    """
    usage = usage_of(answer)
    try:
        choice = answer["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        called = message.get("tool_calls") if calls else None
    except (LookupError, TypeError, AttributeError):
        raise Nonsense("a reply without choices[0].message", usage) from None
    if not isinstance(text, str | None) or not isinstance(thought, str | None):
        raise Nonsense("a reply whose content is not text", usage)
    if not isinstance(called, list | None) or not all(map(_is_call, called or [])):
        raise Nonsense("a reply whose tool_calls cannot be read", usage)
    if text is None and thought is None and not called and reason != "content_filter":
        raise Nonsense("a reply without a text", usage)
    text = (f"<think>{thought}</think>" if thought else "") + (text or "")
    plain = [_plain_call(call, number) for number, call in enumerate(called or [])]
    try:
        "".join([text, *texts_in(plain)]).encode()
    except UnicodeEncodeError:
        raise Nonsense("a reply with half a character", usage) from None
    full = longest is not None and usage[1] is not None and usage[1] >= longest
    return Reply(text, reason != "length" and not (full and reason is None), *usage, plain)


def _is_call(call: Any) -> bool:
    """Return whether a value is {"function": {"name": ..., "arguments": a text or an object}}."""
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict | None)
    )


def _plain_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a call with an id and arguments as a text, as they are sent back."""
    function, name = call["function"], call.get("id")
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    given = {"name": function["name"], "arguments": text}
    return {"id": name if isinstance(name, str) and name else nine(None, number), "type": "function", "function": given}


def usage_of(answer: Any) -> Usage:
    """Return (prompt tokens, completion tokens) of an answer; None for each that it does not say."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    return tokens_of(usage.get("prompt_tokens")), tokens_of(usage.get("completion_tokens"))


def tokens_of(number: Any) -> int | None:
    """Return a number of tokens as int (10 for 10.0), and None for anything that cannot be one."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= MOST_TOKENS:
        return None
    return int(number) if number == int(number) else None
