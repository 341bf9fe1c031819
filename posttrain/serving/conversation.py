"""What was said so far, and which of it does the model still see?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.types import UserError

if TYPE_CHECKING:
    from posttrain.models import Chat


@dataclass
class Exchange:
    """One message and the tokens of its answer: Exchange("Hi", [40, 7, 2], finished=True, text="Hello.")."""

    asked: str
    ids: list[int]
    finished: bool
    text: str


@dataclass
class Conversation:
    """What was said so far. The model's own tokens are kept as they were sampled; nothing is tokenised twice."""

    chat: Chat
    context: int
    max_new_tokens: int
    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    forgotten: int = 0  # exchanges at the start that the model no longer sees

    def prompt(self, text: str) -> list[int]:
        """Return the ids up to the answer to `text`, with as many of the latest turns as leave room for that answer."""
        answer_tokens = min(self.max_new_tokens, self.context // 2)
        for start in range(self.forgotten, len(self.exchanges) + 1):
            ids = self._ids(start, text)
            if len(ids) + answer_tokens <= self.context:
                self.forgotten = start
                return ids
        raise UserError(
            f"This message is too long: it takes {len(ids)} tokens, and {answer_tokens} of the model's"
            f" {self.context} are kept for the answer. Shorten it (or the system message), or write a smaller"
            " max_new_tokens."
        )

    def _ids(self, start: int, text: str) -> list[int]:
        seen = self.exchanges[start:]
        asked = [exchange.asked for exchange in seen] + [text]
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = self.chat.prompt([*system, {"role": "user", "content": asked[0]}])
        for exchange, following in zip(seen, asked[1:], strict=True):
            ids += exchange.ids + self.chat.extend(following, finished=exchange.finished)
        return ids

    def messages(self) -> list[dict[str, Any]]:
        """Return all of it, also what the model no longer sees; an answer that was cut short says so."""
        said: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            said.append({"role": "user", "content": exchange.asked})
            said.append({"role": "assistant", "content": exchange.text})
            said[-1] |= {} if exchange.finished else {"finished": False}
        return said
