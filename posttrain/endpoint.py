"""How is a model asked that somebody else serves?  One request at a time until it is answered, and none paid for twice.

Built on envs/web.py and so on the standard library: a request has one deadline for all of its answer, a reply has a
bound, and what is sent, the key included, goes to the address that was given or nowhere (no redirects, no proxies).
The key comes from the environment and is in nothing that is written or said.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from envs.web import FAILURES, BadStatus, post_json
from posttrain.config import Endpoint
from posttrain.types import SamplingParams, UserError

PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)  # statuses that another attempt may not meet
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts: doubled each time, less a random part
LONGEST_WAIT = 600.0  # seconds that a server may ask to wait


@dataclass(frozen=True)
class Reply:
    """What a model said: Reply("Right.", finished=True, prompt_tokens=31, completion_tokens=3), as its server counts.

    finished: False where the longest answer cut it short.
    """

    text: str
    finished: bool
    prompt_tokens: int
    completion_tokens: int


class Nonsense(ValueError):
    """An answer with status 200 that is none; `usage` is what it cost, where it says so."""

    def __init__(self, words: str, usage: tuple[int, int] | None = None) -> None:
        super().__init__(words)
        self.usage = usage


def api_key(endpoint: Endpoint) -> str | None:
    """The key in the environment; UserError, which never shows it, where it is missing or cannot be one."""
    name = endpoint.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(f"the environment variable {name}, which holds the key of {endpoint.endpoint}, is not set.")
    if not re.fullmatch("[!-~]+", key):
        raise UserError(f"the environment variable {name} holds spaces or letters that no key has: set it again.")
    return key


class Client:
    """Asks one model, `concurrency` requests at a time, and keeps each reply in the file `kept` as soon as it is there.

    A request whose reply is in that file is not sent. UserError, with what to do, where the server refuses a request or
    has failed `attempts` times; what was under way by then is still waited for and kept.
    """

    def __init__(self, endpoint: Endpoint, kept: Path) -> None:
        self.endpoint, self.kept, self._key = endpoint, kept, api_key(endpoint)
        self._replies = read_kept(kept)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._not_before, self._problem = 0.0, UserError("the run was stopped.")
        self._pool = ThreadPoolExecutor(endpoint.concurrency)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, messages: Sequence[dict[str, str]], params: SamplingParams, seed: int) -> Future[Reply]:
        """The reply to come."""
        return self._pool.submit(self.ask, messages, params, seed)

    def ask(self, messages: Sequence[dict[str, str]], params: SamplingParams, seed: int) -> Reply:
        content = request(self.endpoint, messages, params, seed)
        name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        if name not in self._replies:
            reply = self._attempts(content)
            self._keep(name, reply)
            self._replies[name] = reply
        return self._replies[name]

    def _attempts(self, content: dict[str, Any]) -> Reply:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        url, failed = f"{self.endpoint.endpoint}/chat/completions", ""
        for attempt in range(self.endpoint.attempts):
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1)
            self._wait_for_turn()
            try:
                return read_reply(post_json(url, content, self.endpoint.timeout, headers))
            except BadStatus as error:
                if error.status not in PASSING:
                    raise self._give_up(self._refusal(error)) from None
                failed, asked = str(error), seconds_of(error.retry_after)
                if asked is not None and asked > LONGEST_WAIT:
                    words = f"asks to wait {asked:.0f} s before the next request. Go on later, with --resume."
                    raise self._give_up(words) from None
                if asked is not None:  # it holds for all requests
                    self._not_before, pause = max(self._not_before, time.monotonic() + asked), 0.0
            except Nonsense as error:
                failed = str(error)
                if error.usage is not None:
                    self._keep("", Reply("", False, *error.usage))
            except FAILURES as error:
                failed = self._without_key(f"{type(error).__name__}: {' '.join(str(error).split())}")[:300]
            if attempt + 1 < self.endpoint.attempts:
                self._over.wait(pause)
        raise self._give_up(f"has not answered a request {self.endpoint.attempts} times; at last: {failed}.") from None

    def _wait_for_turn(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0 and not self._over.is_set():
            self._over.wait(left)
        if self._over.is_set():
            raise self._problem

    def _give_up(self, words: str) -> UserError:
        """The end of all requests that are not under way."""
        with self._lock:
            if not self._over.is_set():
                words = f"{self.endpoint.endpoint} ({self.endpoint.model}) {words} What it has answered is kept."
                self._problem = UserError(words)
                self._over.set()
        return self._problem

    def _refusal(self, error: BadStatus) -> str:
        if error.status in (401, 403):  # some servers repeat the key
            which = f"the key in {self.endpoint.api_key_env}" if self._key else "a request without a key (api_key_env)"
            return f"refuses {which} (status {error.status})."
        said = self._without_key(" ".join(error.reply.split()))[:300]
        return f"refuses the request with status {error.status}: {said or 'no words'}. Mend the config."

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _keep(self, name: str, reply: Reply) -> None:
        with self._lock:
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            with self.kept.open("a", encoding="utf-8") as file:  # the line before may have been cut short
                file.write("\n" + json.dumps({"request": name, **asdict(reply)}) + "\n")


def request(
    endpoint: Endpoint, messages: Sequence[dict[str, str]], params: SamplingParams, seed: int
) -> dict[str, Any]:
    """The body of a request; what OpenAI has no name for has vLLM's, and stands there only where it is not neutral."""
    content: dict[str, Any] = {
        "model": endpoint.model,
        "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
        endpoint.tokens_field: params.max_new_tokens,
        "temperature": params.temperature,
        "seed": seed % (1 << 31),  # some servers take 32 bits
    }
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)):
        if getattr(params, name) != neutral:
            content[name] = getattr(params, name)
    return content


def read_reply(answer: Any) -> Reply:
    """What a chat completion says; Nonsense where it is none.

    A thought that the server has cut off (`reasoning_content`) is put back in front of the answer, in its tags.
    """
    paid = usage_of(answer)
    try:
        choice = answer["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    except (LookupError, TypeError, AttributeError):
        raise Nonsense("a reply without choices[0].message and finish_reason", paid) from None
    if not isinstance(text, str | None) or not isinstance(thought, str | None) or not isinstance(reason, str):
        raise Nonsense("a reply whose content is no text", paid)
    if text is None and thought is None and reason != "content_filter":
        raise Nonsense("a reply without a text", paid)
    if paid is None:
        raise Nonsense("a reply that does not say its tokens (usage)")
    text = (f"<think>{thought}</think>" if thought else "") + (text or "")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Nonsense("a reply with half a character", paid) from None
    return Reply(text, reason != "length", *paid)


def usage_of(answer: Any) -> tuple[int, int] | None:
    """(prompt tokens, completion tokens) of an answer that says them."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(completion, int) or min(prompt, completion) < 0:
        return None
    return prompt, completion


def read_kept(kept: Path) -> dict[str, Reply]:
    """The replies in a file by request; a line that was cut short is none."""
    return {name: reply for name, reply in _lines(kept) if name}


def spent(kept: Path) -> tuple[int, int, int]:
    """(replies, prompt tokens, tokens of answers) that were paid for, unusable ones included."""
    replies = [reply for _, reply in _lines(kept)]
    return len(replies), sum(one.prompt_tokens for one in replies), sum(one.completion_tokens for one in replies)


def _lines(kept: Path) -> list[tuple[str, Reply]]:
    found = []
    if kept.is_file():
        for line in kept.read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                found.append((row.pop("request"), Reply(**row)))
    return found


def seconds_of(header: str) -> float | None:
    """What Retry-After asks for: seconds, or a date; None where it says nothing."""
    with suppress(ValueError):
        return max(0.0, float(header)) if float(header) == float(header) else None
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None
