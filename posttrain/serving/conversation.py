"""Which messages and answers does a conversation hold, and which of them fit into the model's context?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.types import UserError, derive_seed

if TYPE_CHECKING:
    from envs.tools import Tool
    from posttrain.config import ChatRun
    from posttrain.models import Chat, Message
    from posttrain.serving.generation import Answer, Generator
    from posttrain.types import SamplingParams


@dataclass
class Exchange:
    """A message and its answer: Exchange("Hi", [40, 7, 2], finished=True, text="Hello.").

    `before` are turns that called tools, and their results; `ids` are theirs as well.
    """

    message: str
    ids: list[int]
    finished: bool
    text: str
    before: list[Message] = field(default_factory=list)


def open_tools(paths: Sequence[str]) -> list[Tool]:
    """Return the tools of a chat; UserError where a path does not name one."""
    if not paths:
        return []
    from envs.tools import tools_of  # which is slow to import

    try:
        return tools_of(paths)
    except ValueError as problem:
        raise UserError(f"tools: {problem}") from problem


@dataclass
class Conversation:
    """A conversation. Answers keep the tokens as they were sampled; nothing is tokenised twice."""

    chat: Chat
    context: int
    max_new_tokens: int
    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    forgotten: int = 0  # first exchanges, which no longer fit into the context
    tools: list[Tool] = field(default_factory=list)

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        return [tool.schema for tool in self.tools] or None

    def results(self, text: str, most: int, seconds: float) -> list[Message]:
        """Return the results of the calls in a turn, at most `most`; none where it calls nothing."""
        if not self.tools:
            return []
        from envs.tools import answer_of, result_of

        calls = self.chat.read_calls(text).calls[:most]
        return [result_of(call, answer_of(call, self.tools, seconds).text) for call in calls]

    def prompt(self, text: str) -> list[int]:
        """Return the ids up to the answer to `text`, with as many of the latest exchanges as leave room for it."""
        answer_tokens = min(self.max_new_tokens, self.context // 2)
        for start in range(self.forgotten, len(self.exchanges) + 1):
            ids = self._ids(start, text)
            if len(ids) + answer_tokens <= self.context:
                self.forgotten = start
                return ids
        raise UserError(
            f"This message is too long: it takes {len(ids)} tokens, and {answer_tokens} of the model's"
            f" {self.context} are kept for the answer. Shorten it (or the system message), or lower max_new_tokens."
        )

    def _ids(self, start: int, text: str) -> list[int]:
        exchanges = self.exchanges[start:]
        messages = [exchange.message for exchange in exchanges] + [text]
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = self.chat.prompt([*system, {"role": "user", "content": messages[0]}], self.schemas)
        for exchange, following in zip(exchanges, messages[1:], strict=True):
            ids += exchange.ids + self.chat.extend(following, finished=exchange.finished, tools=self.schemas)
        return ids

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages, also those outside the context; an answer that was cut short has `finished: False`."""
        rows: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            rows.append({"role": "user", "content": exchange.message})
            rows += exchange.before
            rows.append({"role": "assistant", "content": exchange.text})
            rows[-1] |= {} if exchange.finished else {"finished": False}
        return rows


class Answering:
    """An answer to a message while it is written: turns that call tools, what those answer, and the last turn.

    current    the turn that is being written
    before     the turns before it, and the results of their calls
    """

    def __init__(
        self,
        generator: Generator,
        conversation: Conversation,
        ids: list[int],
        params: Callable[[int], SamplingParams],
        seed: int,
        cfg: ChatRun,
    ) -> None:
        """Begin the answer. ids: of the conversation up to it. params: for a number of tokens."""
        self.generator, self.conversation, self.cfg = generator, conversation, cfg
        self.ids, self.params, self.seed = ids, params, seed
        self.before: list[Message] = []
        self.budget = min(conversation.max_new_tokens, conversation.context - len(ids))
        self.current: Answer = generator.answer(ids, params(self.budget), seed)
        self._earlier: list[int] = []
        self._called = 0

    @property
    def written(self) -> list[int]:
        """Return the ids of all turns and of the results between them."""
        return [*self._earlier, *self.current.ids]

    def __iter__(self) -> Iterator[str]:
        """Yield a piece for each token of all turns."""
        yield from self.current
        while self.proceed():
            yield from self.current

    def proceed(self) -> list[Message]:
        """Call what the turn that has ended asks for, and begin the next one; return the results, none at the end."""
        talk, turn = self.conversation, self.current
        results = talk.results(turn.text, self.cfg.max_calls - self._called, self.cfg.call_seconds)
        following = talk.chat.extend(results, finished=turn.finished, tools=talk.schemas) if results else []
        length = len(self.ids) + len(self.written) + len(following)
        budget = min(talk.max_new_tokens, talk.context - length)
        if not results or budget < 1:
            return []
        self._called += len(results)
        self.before += [{"role": "assistant", "content": turn.text}, *results]
        self._earlier = [*self.written, *following]
        seed = derive_seed(self.seed, self._called)
        self.current = self.generator.answer([*self.ids, *self._earlier], self.params(budget), seed)
        return results

    def keep(self, text: str) -> bool:
        """Add the answer to the conversation as that to `text`; return False where nothing was written."""
        if self.written:
            turn = self.current
            self.conversation.exchanges.append(Exchange(text, self.written, turn.finished, turn.text, self.before))
        return bool(self.written)
