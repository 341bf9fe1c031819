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
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, get_args

from envs.web import FAILURES, BadStatus, post_json
from posttrain.config import Endpoint, OptionalField
from posttrain.types import SamplingParams, UserError

PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)  # statuses that another attempt may not meet
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts: doubled each time, less a random part
LONGEST_WAIT = 600.0  # seconds that a server may ask to wait, and that it may answer nothing but 429
RISE = 20  # answers after which a request more is under way at a time, where a 429 has lowered their number
SECRET = 8  # characters from which a key is masked in answers: "none" and "EMPTY" are words, and no secrets
OPTIONAL = get_args(OptionalField)  # fields of a request that can be left out
MOST_TOKENS = 10**12  # of one reply; a larger number is none


Usage = tuple[int | None, int | None]  # tokens of a prompt and of its answer, where they are known


@dataclass(frozen=True)
class Reply:
    """What a model said: Reply("Right.", finished=True, prompt_tokens=31, completion_tokens=3), as its server counts.

    finished: False where the longest answer cut it short. A number of tokens that the server does not tell is None.
    """

    text: str
    finished: bool
    prompt_tokens: int | None
    completion_tokens: int | None


class Nonsense(ValueError):
    """An answer with status 200 that is none; `usage` is what it cost, where it says so."""

    def __init__(self, words: str, usage: Usage = (None, None)) -> None:
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


class Pace:
    """When may a request begin?  All keep to one pause; a 429 halves how many are under way."""

    def __init__(self, most: int, over: threading.Event) -> None:
        self._most, self._allowed, self._busy, self._over = most, most, 0, over
        self._turn = threading.Condition()
        self._not_before = self._lowered = 0.0
        self._answers = self._refusals = 0  # since the number was lowered; since the last answer
        self._since: float | None = None  # the first 429 since the last answer

    def begin(self) -> float | None:
        """Waits for a turn, until the end of which nobody else has it; its time, or None where the run is over."""
        with self._turn:
            while not self._over.is_set():
                left = self._not_before - time.monotonic()
                if left <= 0 and self._busy < self._allowed:
                    self._busy += 1
                    return time.monotonic()
                self._turn.wait(left if left > 0 else None)
        return None

    def end(self) -> None:
        with self._turn:
            self._busy -= 1
            self._turn.notify_all()

    def wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def pause(self, seconds: float) -> None:
        """Nobody begins before these are over; a random part is added, lest several programs come back together."""
        with self._turn:
            until = time.monotonic() + seconds * random.uniform(1, 1.1)
            self._not_before = max(self._not_before, until)

    def answered(self) -> None:
        with self._turn:
            self._since, self._refusals, self._answers = None, 0, self._answers + 1
            if self._answers % RISE == 0:
                self._allowed = min(self._most, self._allowed + 1)

    def limited(self, began: float, asked: float) -> float:
        """After a 429 to a request that began then: the seconds since the first one that no answer has followed."""
        now = time.monotonic()
        with self._turn:
            self._since = now if self._since is None else self._since
            if began >= self._lowered:  # of requests that were under way together, one lowers the number
                self._lowered, self._answers, self._allowed = now, 0, max(1, self._allowed // 2)
                self._refusals += 1
                self.pause(asked or pause_after(self._refusals - 1))
            return now - self._since


class Client:
    """Asks one model, `concurrency` requests at a time, and keeps each reply in the file `kept` as soon as it is there.

    A request whose reply is in that file is not sent. UserError, with what to do, where the server refuses a request or
    has failed `attempts` times; what was under way by then is still waited for and kept.
    """

    def __init__(self, endpoint: Endpoint, kept: Path) -> None:
        self.endpoint, self.kept, self._key = endpoint, kept, api_key(endpoint)
        self._masked = forms_of(self._key) if self._key else None
        self._replies = read_kept(kept)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._problem = UserError("the run was stopped.")
        self._pace = Pace(endpoint.concurrency, self._over)
        self._pool = ThreadPoolExecutor(endpoint.concurrency)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pace.wake()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, messages: Sequence[dict[str, str]], params: SamplingParams, seed: int) -> Future[Reply]:
        """The reply to come."""
        return self._pool.submit(self.ask, messages, params, seed)

    def ask(self, messages: Sequence[dict[str, str]], params: SamplingParams, seed: int) -> Reply:
        content = request(self.endpoint, messages, params, seed)
        sent = {key: value for key, value in content.items() if key not in self.endpoint.leave_out}
        # the seed always counts: a prompt that is asked several times gets an answer each
        name = hashlib.sha256(json.dumps(sent | {"seed": content["seed"]}, sort_keys=True).encode()).hexdigest()
        if name not in self._replies:
            reply = self._attempts(sent)
            self._keep(name, reply)
            self._replies[name] = reply
        return self._replies[name]

    def _attempts(self, content: dict[str, Any]) -> Reply:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        url, failed, attempt = f"{self.endpoint.endpoint}/chat/completions", "", 0
        while attempt < self.endpoint.attempts:
            if attempt:
                self._over.wait(pause_after(attempt - 1))
            attempt += 1
            began = self._pace.begin()
            if began is None:
                raise self._problem
            try:
                answer = post_json(url, content, self.endpoint.timeout, headers)
                reply = read_reply(answer, content[self.endpoint.tokens_field])
                self._pace.answered()
                return replace(reply, text=self._without_key(reply.text, SECRET))
            except BadStatus as error:
                failed = self._not_now(error, began)
                attempt -= error.status == 429  # nothing has failed
            except Nonsense as error:
                failed = str(error)
                if error.usage != (None, None):
                    self._keep("", Reply("", False, *error.usage))
            except FAILURES as error:
                failed = self._without_key(f"{type(error).__name__}: {' '.join(str(error).split())}")[:300]
            finally:
                self._pace.end()
        raise self._give_up(f"has not answered a request {self.endpoint.attempts} times; at last: {failed}.") from None

    def _not_now(self, error: BadStatus, began: float) -> str:
        """What a status says that may pass; UserError, which ends the run, where it does not."""
        if error.status not in PASSING:
            raise self._give_up(self._refusal(error)) from None
        failed = f"status {error.status}" + (f": {words}" if (words := self._words(error)) else "")
        if error.status == 429 and "insufficient_quota" in error.reply:
            raise self._give_up(f"has no quota left for this key ({failed}).") from None
        asked = seconds_of(error.retry_after) or 0.0
        if asked > LONGEST_WAIT:
            words = f"asks to wait {asked:.0f} s before the next request ({failed}). Go on later, with --resume."
            raise self._give_up(words) from None
        if error.status == 429 and self._pace.limited(began, asked) > LONGEST_WAIT:
            words = f"has answered nothing but {failed} for {LONGEST_WAIT:g} s. Go on later, with --resume."
            raise self._give_up(words) from None
        if asked:
            self._pace.pause(asked)
        return failed

    def _give_up(self, words: str) -> UserError:
        """The end of all requests that are not under way."""
        with self._lock:
            if not self._over.is_set():
                words = f"{self.endpoint.endpoint} ({self.endpoint.model}) {words} What it has answered is kept."
                self._problem = UserError(words)
                self._over.set()
        self._pace.wake()
        return self._problem

    def _refusal(self, error: BadStatus) -> str:
        if error.status in (401, 403):  # some servers repeat the key
            which = f"the key in {self.endpoint.api_key_env}" if self._key else "a request without a key (api_key_env)"
            return f"refuses {which} (status {error.status})."
        words = self._words(error)
        return f"refuses the request with status {error.status}: {words or 'no words'}. {remedy(words, self.endpoint)}"

    def _words(self, error: BadStatus) -> str:
        """How a reply begins, cut where no key is left that could be cut."""
        return " ".join(self._without_key(error.reply).split())[:300]

    def _without_key(self, text: str, least: int = 1) -> str:
        return self._masked.sub("***", text) if self._masked and len(self._key or "") >= least else text

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


def remedy(words: str, endpoint: Endpoint) -> str:
    """Say what to change in the config after a refusal in these words.

    >>> remedy("unknown field: seed", Endpoint(endpoint="http://127.0.0.1:8000/v1", model="m"))
    "If it does not take seed, write leave_out: [seed] in this checkpoint's section."
    """
    named = [name for name in (*OPTIONAL, endpoint.tokens_field) if re.search(rf"(?<!\w){name}(?!\w)", words)]
    fields = [name for name in named if name in OPTIONAL]
    if fields:
        all_of_them = ", ".join([*endpoint.leave_out, *fields])
        return (
            f"If it does not take {', '.join(fields)}, write leave_out: [{all_of_them}] in this checkpoint's section."
        )
    if named:
        (other,) = {"max_tokens", "max_completion_tokens"} - set(named)
        return (
            f"If it has another name for the longest answer, write tokens_field: {other} in this checkpoint's section."
        )
    return f"Change this checkpoint's section; leave_out there names what is not to be sent, of {', '.join(OPTIONAL)}."


def read_reply(answer: Any, longest: int | None = None) -> Reply:
    """What a chat completion says; Nonsense where it is none.

    A thought that the server has cut off (`reasoning_content`) is put back in front of the answer, in its tags. Where
    finish_reason is missing, the answer is finished unless it is known to have `longest` tokens.
    """
    paid = usage_of(answer)
    try:
        choice = answer["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    except (LookupError, TypeError, AttributeError):
        raise Nonsense("a reply without choices[0].message", paid) from None
    if not isinstance(text, str | None) or not isinstance(thought, str | None):
        raise Nonsense("a reply whose content is no text", paid)
    if text is None and thought is None and reason != "content_filter":
        raise Nonsense("a reply without a text", paid)
    text = (f"<think>{thought}</think>" if thought else "") + (text or "")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Nonsense("a reply with half a character", paid) from None
    full = longest is not None and paid[1] is not None and paid[1] >= longest
    return Reply(text, reason != "length" and not (full and reason is None), *paid)


def usage_of(answer: Any) -> Usage:
    """(prompt tokens, completion tokens) of an answer, as far as it says them."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    return tokens_of(usage.get("prompt_tokens")), tokens_of(usage.get("completion_tokens"))


def tokens_of(number: Any) -> int | None:
    """10 and 10.0 are numbers of tokens; what is none, or cannot be one, is unknown."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= MOST_TOKENS:
        return None
    return int(number) if number == int(number) else None


def read_kept(kept: Path) -> dict[str, Reply]:
    """The replies in a file by request; a line that was cut short is none."""
    return {name: reply for name, reply in _lines(kept) if name}


def spent(kept: Path) -> tuple[int, int, int, int]:
    """(replies, tokens of prompts, of answers, replies that do not say both) that were paid for, unusable ones too."""
    replies = [reply for _, reply in _lines(kept)]
    prompts, answers = ([one.prompt_tokens for one in replies], [one.completion_tokens for one in replies])
    unknown = sum(None in pair for pair in zip(prompts, answers, strict=True))
    return len(replies), sum(one or 0 for one in prompts), sum(one or 0 for one in answers), unknown


def _lines(kept: Path) -> list[tuple[str, Reply]]:
    found = []
    if kept.is_file():
        for line in kept.read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                usage = {name: tokens_of(row[name]) for name in ("prompt_tokens", "completion_tokens")}
                found.append((row.pop("request"), Reply(**row | usage)))
    return found


def pause_after(failures: int) -> float:
    """Seconds: twice as many after each failure, less a random part."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, 30)) * random.uniform(0.5, 1)


def forms_of(key: str) -> re.Pattern[str]:
    """A key as a server may repeat it: as it is, or escaped, once or more, as in JSON or in an address."""
    letters = (rf"(?:\\{{0,8}}{re.escape(c)}|(?i:\\{{1,8}}u00{ord(c):02x}|%{ord(c):02x}))" for c in key)
    return re.compile("".join(letters))


def seconds_of(header: str) -> float | None:
    """What Retry-After asks for: seconds, or a date; None where it says nothing."""
    with suppress(ValueError):
        return max(0.0, float(header)) if float(header) == float(header) else None
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None
