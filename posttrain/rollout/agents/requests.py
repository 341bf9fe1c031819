"""What does an agent program ask for?  A request in the form of OpenAI's chat completions, and the answer to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from envs.protocol import Message
from envs.tools import Call
from posttrain.models import (
    Chat,
    Said,
    not_text,
    openai_calls,
    parse_object,
    plain_calls,
    reason_to_refuse,
    tools_asked,
)
from posttrain.types import Completion, UserError

# fields of a request that are not read: the policy answers as the run samples it
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip
CUT = "length"  # OpenAI's finish_reason of an answer that its limit ended


@dataclass(frozen=True)
class AgentAnswer:
    """An answer of the model: the message, why it ended (OpenAI's finish_reason), tokens of prompt and answer."""

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Refusal:
    """A request that is not answered, with the status of HTTP that says why."""

    status: int
    words: str
    code: str | None = None  # OpenAI's


@dataclass(eq=False)
class Asked:
    """One request.

    digests: of its tools and first k messages, for each k from 0 on. stops: texts before which the answer ends.
    max_tokens: of the answer; None where the run alone limits it. answer: is set when it is known.
    left: the client stopped waiting before it had the answer.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    stops: Sequence[str] = ()
    max_tokens: int | None = None
    answer: Future[AgentAnswer | Refusal] = field(default_factory=lambda: Future[AgentAnswer | Refusal]())
    left: bool = False

    def __post_init__(self) -> None:
        self.digests = digests(self.tools, self.messages)

    @property
    def characters(self) -> int:
        return sum(len(json.dumps(message, ensure_ascii=False)) for message in (*self.messages, *self.tools))

    @property
    def digest(self) -> str:
        """Return what is equal for two requests that ask for the same."""
        return following(self.digests[-1], [self.stops, self.max_tokens])


def digests(tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> list[str]:
    """Return a digest of the tools, then of these and each longer beginning of a conversation."""
    found = [following("", tools)]
    for message in messages:
        found.append(following(found[-1], message))
    return found


def following(digest: str, more: Any) -> str:
    """Return the digest of what `digest` stands for, and of something more behind it."""
    written = json.dumps(more, sort_keys=True)
    return hashlib.blake2b(f"{digest}\x1f{written}".encode(), digest_size=16).hexdigest()


def read_request(raw: bytes) -> Asked:
    """Return the request in a body; UserError where the model cannot answer it."""
    try:
        body = parse_object("The request", raw)
        for key in SAMPLING:
            body.pop(key, None)
        problem = reason_to_refuse(body) or not_text(body.get("messages"))
        if problem:
            raise UserError(problem)
        messages = [plain_message(each) for each in body["messages"]]
    except RecursionError as error:
        raise UserError("The request is nested too deeply.") from error
    except ValueError as error:
        raise UserError(f"messages holds a message whose tool_calls cannot be read: {error}.") from error
    tools = tools_asked(body)
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    most = min((limit for limit in limits if limit is not None), default=None)
    return Asked(messages, tools, body["stop"] or [], most)


def plain_message(given: dict[str, Any]) -> Message:
    """Return the parts of a message that a template reads, in one form, however a client writes them."""
    content: Any = given.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in cast("list[dict[str, str]]", content))
    role = "system" if given["role"] == "developer" else given["role"]
    message: Message = {"role": role, "content": content}
    if given.get("tool_calls"):
        message["tool_calls"] = plain_calls(given["tool_calls"])
    if role == "tool":
        message |= {key: given[key] for key in ("tool_call_id", "name") if isinstance(given.get(key), str)}
    return message


def message_of(said: Said, number: str) -> dict[str, Any]:
    """Return an answer as a message of OpenAI's interface. number: a text that makes the names of its calls unique.

    Calls that the model has given different ids keep them: their results repeat them in what it reads next.
    """
    own = [call.id for call in said.calls]
    kept = all(own) and len(set(own)) == len(own)
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["content"] = said.content or None
        ids = own if kept else [f"call_{number}_{n}" for n in range(len(own))]
        message["tool_calls"] = openai_calls(said.calls, ids)
    return message


def is_text(calls: Sequence[Call]) -> bool:
    """Return whether calls can be sent: JSON may hold half of a surrogate pair."""
    try:
        json.dumps([(call.name, call.arguments) for call in calls], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def cut_answer(completion: Completion, asked: Asked, chat: Chat) -> tuple[Completion, str, bool]:
    """Return an answer that ends where the request wants it to: what was sampled up to there, its text, and whether
    the limit of tokens ended it.

    The tokens that complete a stop text are kept: they were sampled. The text ends before it.
    """
    ids, logprobs, most = completion.ids, completion.logprobs, asked.max_tokens
    finished = completion.finished
    if most is not None and len(ids) > most:
        ids, logprobs, finished = ids[:most], logprobs[:most], False

    def stopped(count: int) -> bool:
        text = chat.decode(ids[:count])
        return any(stop in text for stop in asked.stops)

    text = chat.decode(ids)
    if not stopped(len(ids)):
        return Completion(ids, logprobs, finished, completion.version), text, not finished
    low, high = 0, len(ids)  # the fewest tokens with a stop text lie in (low, high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    text = chat.decode(ids[:high])
    text = text[: min(text.find(stop) for stop in asked.stops if stop in text)]
    finished = finished and high == len(ids)
    return Completion(ids[:high], logprobs[:high], finished, completion.version), text, False
