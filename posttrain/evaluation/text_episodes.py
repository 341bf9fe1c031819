"""How does an endpoint, which takes and gives text, play the episodes that local models play in tokens?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from posttrain.evaluation.endpoint import Client, Reply
from posttrain.models import Chat, Message
from posttrain.rollout import Histories, Then, TurnRequest
from posttrain.types import Completion, SamplingParams

STOP = -1  # ends an answer that is complete
CHARACTERS = 4  # of a token, where no checkpoint has a tokenizer


class TextChat:
    """Stands for a Chat in episodes with an endpoint, which takes messages: each message is a number.

    The number stands there once for each token that the message takes in `chat`, so that a context holds as many turns
    as with a local model. Without a `chat`, a token is `CHARACTERS` long.
    """

    def __init__(self, chat: Chat | None) -> None:
        self.chat = chat
        self.messages: list[Message] = []

    def numbered(self, role: str, text: str, tokens: int) -> list[int]:
        """A new message, as many times as it has tokens."""
        self.messages.append({"role": role, "content": text})
        return [len(self.messages) - 1] * max(1, tokens)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        total = len(self.chat.prompt(messages)) if self.chat else sum(_length(m["content"]) for m in messages)
        ids = [number for m in messages for number in self.numbered(m["role"], m["content"], 1)]
        return ids + ids[-1:] * (total - len(ids))

    def extend(self, user: str, *, finished: bool = True) -> list[int]:
        tokens = len(self.chat.extend(user, finished=finished)) if self.chat else _length(user)
        return self.numbered("user", user, tokens)

    def content_ids(self, text: str) -> list[int]:
        """Of a forced opening tag: an endpoint's answer cannot be begun for it."""
        return []

    def completion(self, reply: Reply) -> Completion:
        tokens = len(self.chat.content_ids(reply.text)) if self.chat else _length(reply.text)
        ids = self.numbered("assistant", reply.text, tokens) + [STOP] * reply.finished
        return Completion(ids, [0.0] * len(ids), reply.finished)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(message["content"] for message in self.of(ids))

    def of(self, ids: Sequence[int]) -> list[Message]:
        """The messages that these numbers stand for."""
        return [self.messages[number] for number, _ in itertools.groupby(ids) if number != STOP]


class TextSampler(Histories):
    """Lets an endpoint write the turns of episodes; each is continued as soon as its turn is there."""

    def __init__(self, client: Client, chat: TextChat) -> None:
        super().__init__()
        self.client, self.chat = client, chat

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        coming: dict[Future[Reply], int] = {}
        while turns or coming:
            for handle, seed in turns:
                coming[self.client.begin(self.chat.of(self._ids[handle]), params, seed)] = handle
            done, _ = wait(coming, return_when=FIRST_COMPLETED)
            written = [(coming.pop(future), self.chat.completion(future.result())) for future in done]
            for handle, completion in written:
                self._ids[handle].extend(completion.ids)
            turns = then(sorted(written, key=lambda one: one[0]))


def _length(text: str) -> int:
    return len(text) // CHARACTERS + 1
