"""How does an endpoint play the episodes that local models play in tokens?  Messages take the place of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from posttrain.evaluation.endpoint import Client, Reply
from posttrain.models import Chat, Message
from posttrain.rollout import Histories, Then, TurnRequest
from posttrain.types import Completion, SamplingParams

STOP = -1  # the last id of a complete answer
CHARACTERS = 4  # of a token, where no local checkpoint has a tokenizer


class TextChat:
    """Takes the place of a Chat in episodes with an endpoint: each message is encoded as its number.

    The number is repeated for each token that the message has in `chat`, so that a context holds as many turns as with
    a local model. Without a `chat`, a token is `CHARACTERS` long.
    """

    def __init__(self, chat: Chat | None) -> None:
        self.chat = chat
        self.messages: list[Message] = []

    def numbered(self, role: str, text: str, tokens: int) -> list[int]:
        """Add a message, and return its number repeated for each of its tokens."""
        self.messages.append({"role": role, "content": text})
        return [len(self.messages) - 1] * max(1, tokens)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, as many as `Chat.prompt` gives."""
        total = len(self.chat.prompt(messages)) if self.chat else sum(_length(m["content"]) for m in messages)
        ids = [number for m in messages for number in self.numbered(m["role"], m["content"], 1)]
        return ids + ids[-1:] * (total - len(ids))

    def extend(self, user: str, *, finished: bool = True) -> list[int]:
        """Return the ids of a user message, as many as `Chat.extend` gives."""
        tokens = len(self.chat.extend(user, finished=finished)) if self.chat else _length(user)
        return self.numbered("user", user, tokens)

    def content_ids(self, text: str) -> list[int]:
        """Return no ids: the text is a forced opening tag, and an endpoint's answer cannot be begun for it."""
        return []

    def completion(self, reply: Reply) -> Completion:
        """Return a reply in ids, with log-probs of 0."""
        tokens = len(self.chat.content_ids(reply.text)) if self.chat else _length(reply.text)
        ids = self.numbered("assistant", reply.text, tokens) + [STOP] * reply.finished
        return Completion(ids, [0.0] * len(ids), reply.finished)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the texts of the messages in these ids, one after the other."""
        return "".join(message["content"] for message in self.of(ids))

    def of(self, ids: Sequence[int]) -> list[Message]:
        """Return the messages in these ids."""
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
                handles[self.client.begin(self.chat.of(self._ids[handle]), params, seed)] = handle
            done, _ = wait(handles, return_when=FIRST_COMPLETED)
            written = [(handles.pop(future), self.chat.completion(future.result())) for future in done]
            for handle, completion in written:
                self._ids[handle].extend(completion.ids)
            turns = then(sorted(written, key=lambda one: one[0]))


def _length(text: str) -> int:
    return len(text) // CHARACTERS + 1
