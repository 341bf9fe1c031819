"""Which tools may a served model call, and how do its calls reach the client?  As OpenAI's `tools` and `tool_calls`.

A request's schemas are rendered by the model's chat template. The text before a call is streamed, calls follow when the
answer is complete. A call that cannot be read stays text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from posttrain.models import Said, openai_calls, thought_end
from posttrain.serving.served_answers import Cutter

if TYPE_CHECKING:
    from posttrain.models import Chat, Message

OF_CALLS = ("tool_calls", "tool_call_id", "name")  # keys of messages


def whole_messages(messages: list[Message], given: list[dict[str, Any]]) -> list[Message]:
    """Return messages of texts with the calls and results that belong to them in the request."""
    return [
        message | {key: each[key] for key in OF_CALLS if each.get(key) and (key != "name" or each["role"] == "tool")}
        for message, each in zip(messages, given, strict=True)
    ]


def characters_of(texts: list[Message], given: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
    """Return the characters of messages, calls and schemas."""
    called = [tools, *(each["tool_calls"] for each in given if each.get("tool_calls"))]
    return sum(len(each["content"]) for each in texts) + sum(len(json.dumps(each)) for each in called if each)


class CallReader:
    """What takes the place of transformers' parser of responses for a request with tools.

    said: the whole answer, once it is complete.
    """

    initial_events: tuple[()] = ()

    def __init__(self, chat: Chat) -> None:
        self.chat, self.text, self.sent = chat, "", ""
        self.fed = ""  # as far as it was looked through for a call
        self.said = Said("", [])
        self._stop: str = chat.tokenizer.convert_ids_to_tokens(chat.stop_id)  # type: ignore[assignment]
        self._before = Cutter(["<tool_call>", self._stop]) if chat.call_form == "hermes" else None

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return events with the text that does not belong to a call; in other forms only the whole text shows that."""
        self.text += text
        if self._before is None or self._before.stopped:
            return []
        thought = thought_end(self.text, self.chat.opens_thoughts)
        held = self.text[thought:].lstrip()[:1] in ("{", "")  # it may be a call as a whole
        known = self.text[:thought] if held else self.text
        piece = self._before.take(known[len(self.fed) :])
        self.fed = known
        self.sent += piece
        return [_content(piece)] if piece else []

    def finalize(self) -> tuple[None, list[dict[str, Any]]]:
        """Return the events at the end of an answer: its calls, or the text that was held back."""
        text = self.text.removesuffix(self._stop)
        said = self.chat.read_calls(text)
        if not said.calls or any(call.error for call in said.calls):
            self.said = Said(text, [])
            rest = text[len(self.sent) :]
            return None, [_content(rest)] if rest else []
        self.said = said
        rest = said.content[len(self.sent) :]
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in said.calls]
        events = [{"type": "region_close", "field": "tool_calls", "value": call} for call in calls]
        return None, [*([_content(rest)] if rest else []), *events]

    def into(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return a whole completion with the calls of its answer."""
        (choice,) = completion["choices"]
        choice["message"]["content"] = self.said.content
        if self.said.calls:
            choice["finish_reason"] = "tool_calls"
            choice["message"]["content"] = self.said.content or None
            ids = [f"{completion['id']}_tool_call_{number}" for number in range(len(self.said.calls))]
            choice["message"]["tool_calls"] = openai_calls(self.said.calls, ids)
        return completion


def _content(text: str) -> dict[str, Any]:
    return {"type": "region_chunk", "field": "content", "text": text, "dirty": False}
