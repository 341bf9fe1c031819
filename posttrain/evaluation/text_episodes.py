"""How does an endpoint play the episodes that local models play in tokens?  Messages take the place of tokens.

Tools are sent as OpenAI's `tools`. A reply with `tool_calls` becomes a turn whose text shows them in Hermes' form, and
results are sent as messages of the role tool.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from envs.tools import Call
from posttrain.evaluation.endpoint import Client
from posttrain.evaluation.replies import Reply
from posttrain.models import Chat, Message, Said, Tools, parsed_json, tools_key
from posttrain.rollout import Histories, Then, TurnRequest
from posttrain.types import Completion, SamplingParams, UserError, one_line

STOP = -1  # the last id of a complete answer
CHARACTERS = 4  # of a token, where no local checkpoint has a tokenizer


class TextChat:
    """Takes the place of a Chat in episodes with an endpoint: each message is encoded as its number.

    The number is repeated for each token that the message has in `chat`, so that a context holds as many turns as with
    a local model. Without a `chat`, a token is `CHARACTERS` long.
    """

    lead = ""  # as Chat's

    def __init__(self, chat: Chat | None) -> None:
        self.chat = chat
        self.messages: list[Message] = []
        self._tools: dict[int, list[Message]] = {}  # the schemas of a conversation, by its first message
        self._said: dict[str, Said] = {}  # turns with calls, by their text

    def numbered(self, message: Message, tokens: int) -> list[int]:
        """Add a message, and return its number repeated for each of its tokens."""
        self.messages.append(message)
        return [len(self.messages) - 1] * max(1, tokens)

    def _counted(self, count: Callable[[Chat], Sequence[int]], messages: Sequence[Message], tools: Tools | None) -> int:
        """Return the tokens of messages in `chat`, where there is one whose template can write them."""
        try:
            if self.chat is not None:
                return len(count(self.chat))
        except UserError:
            if not tools:
                raise
        return sum(_length(each["content"]) for each in messages) + (_length(json.dumps(tools)) if tools else 0)

    def check_tools(self, tools: Tools) -> None:
        """Raise UserError where these are not schemas; whether the server knows tools shows its first reply."""
        tools_key(tools)

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the ids of a conversation, as many as `Chat.prompt` gives."""
        total = self._counted(lambda chat: chat.prompt(messages, tools), messages, tools)
        ids = self._all_numbered(messages, total)
        if tools:
            self._tools[ids[0]] = [_sent_schema(tool) for tool in tools]
        return ids

    def extend(self, said: str | Sequence[Message], *, finished: bool = True, tools: Tools | None = None) -> list[int]:
        """Return the ids of a user message, or of results, as many as `Chat.extend` gives."""
        messages: Sequence[Message] = [{"role": "user", "content": said}] if isinstance(said, str) else said
        tokens = self._counted(lambda chat: chat.extend(said, finished=finished, tools=tools), messages, None)
        return self._all_numbered(messages, tokens)

    def _all_numbered(self, messages: Sequence[Message], tokens: int) -> list[int]:
        """Add messages, and return their numbers, the last one repeated for all further tokens."""
        ids = [number for m in messages for number in self.numbered({"role": m["role"], "content": m["content"]}, 1)]
        return ids + ids[-1:] * (tokens - len(ids))

    def content_ids(self, text: str) -> list[int]:
        """Return no ids: the text is a forced opening tag, and an endpoint's answer cannot be begun for it."""
        return []

    def completion(self, reply: Reply) -> Completion:
        """Return a reply in ids, with log-probs of 0."""
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.calls:
            message |= {"tool_calls": reply.calls}
            self._said[_text_of(message)] = Said(reply.text, list(map(_call_of, reply.calls)))
        text = _text_of(message)
        tokens = len(self.chat.content_ids(text)) if self.chat else _length(text)
        ids = self.numbered(message, tokens) + [STOP] * reply.finished
        return Completion(ids, [0.0] * len(ids), reply.finished)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the texts of the messages in these ids, one after the other."""
        return "".join(map(_text_of, self._in(ids)))

    def read_calls(self, text: str) -> Said:
        """Return what a reply of this text called; only `tool_calls` are calls, not what stands in a content."""
        return self._said.get(text) or Said(text, [])

    def of(self, ids: Sequence[int]) -> list[Message]:
        """Return the messages in these ids as they are sent: each result names its call."""
        sent: list[Message] = []
        names: list[str] = []  # of the calls whose results follow
        for message in self._in(ids):
            if calls := message.get("tool_calls"):
                names = [call["id"] for call in calls]
                message = message | {"content": message["content"] or None}
            elif message["role"] == "tool":
                message = message | {"tool_call_id": names.pop(0)}
            sent.append(message)
        return sent

    def tools_of(self, ids: Sequence[int]) -> list[Message] | None:
        """Return the schemas of the conversation that these ids begin."""
        return self._tools.get(ids[0])

    def _in(self, ids: Sequence[int]) -> list[Message]:
        return [self.messages[number] for number, _ in itertools.groupby(ids) if number != STOP]


class TextSampler(Histories):
    """A sampler whose turns are written by an endpoint. An episode continues as soon as its turn has arrived."""

    def __init__(self, client: Client, chat: TextChat) -> None:
        super().__init__()
        self.client, self.chat = client, chat

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        handles: dict[Future[Reply], int] = {}  # of the conversations that wait for a reply
        while turns or handles:
            for handle, seed in turns:
                ids = self._ids[handle]
                handles[self.client.begin(self.chat.of(ids), params, seed, self.chat.tools_of(ids))] = handle
            done, _ = wait(handles, return_when=FIRST_COMPLETED)
            written = [(handles.pop(future), self.chat.completion(future.result())) for future in done]
            for handle, completion in written:
                self._ids[handle].extend(completion.ids)
            turns = then(sorted(written, key=lambda one: one[0]))


def _text_of(message: Message) -> str:
    """Return a message as it stands in transcripts, with its calls."""
    called = [
        f'<tool_call>\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        f"{function['arguments']}}}\n</tool_call>"
        for function in (call["function"] for call in message.get("tool_calls") or [])
    ]
    return "\n".join([*([message["content"]] if message["content"] or not called else []), *called])


def _call_of(call: Message) -> Call:
    """Return a call of a reply, with an error where its arguments cannot be read."""
    name = call["function"]["name"]
    try:
        arguments = parsed_json(call["function"]["arguments"].strip() or "{}")
    except ValueError as error:
        return Call(name, {}, f"The arguments of the call are not valid JSON: {one_line(error)}.")
    if not isinstance(arguments, dict):
        return Call(name, {}, "The arguments of the call are not an object.")
    return Call(name, arguments)


def _sent_schema(tool: Mapping[str, Any]) -> Message:
    """Return a schema with the keys that servers know: transformers adds `return`, which some refuse."""
    known = {key: tool["function"][key] for key in ("name", "description", "parameters") if key in tool["function"]}
    return {"type": "function", "function": known}


def _length(text: str) -> int:
    return len(text) // CHARACTERS + 1
