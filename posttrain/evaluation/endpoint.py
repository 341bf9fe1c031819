"""How is a model asked that somebody else serves?  One request at a time until it is answered, and none paid for twice.

The client is that of the package openai. Three things are added to it: a deadline for the whole of an answer and a
bound on its size; pauses that all requests share; and nothing is sent that openai reads from the environment. What is
sent, the key included, goes to the address that was given or nowhere (no redirects, no proxies).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, get_args

from envs.web import MOST_BYTES, BadStatus
from posttrain.config import Endpoint, OptionalField
from posttrain.types import SamplingParams, UserError

PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)  # statuses that another attempt may not meet
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts: doubled each time, less a random part
LONGEST_WAIT = 600.0  # seconds that a server may ask to wait, and that it may answer nothing but 429
RISE = 20  # answers after which a request more is under way at a time, where a 429 has lowered their number
SECRET = 8  # characters from which a key is masked in answers: "none" and "EMPTY" are words, and no secrets
OPTIONAL = get_args(OptionalField)  # fields of a request that can be left out
HEADERS = ("host", "accept", "content-type", "content-length", "x-stainless-raw-response")  # of openai's, that are sent
MOST_TOKENS = 10**12  # of one reply; a larger number is a mistake


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
    """A reply with status 200 that is not an answer; `usage` is what it cost, where it says so."""

    def __init__(self, words: str, usage: Usage = (None, None)) -> None:
        super().__init__(words)
        self.usage = usage


def api_key(endpoint: Endpoint) -> str | None:
    """Return the key from the environment; UserError, which never shows it, where it is missing or malformed."""
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
    """Decides when a request may begin: all keep to one pause, and a 429 halves how many are under way."""

    def __init__(self, most: int, over: asyncio.Event) -> None:
        self._most, self._allowed, self._over = most, most, over
        self._slots, self._withheld = asyncio.Semaphore(most), 0
        self._not_before = self._lowered = 0.0
        self._answers = self._refusals = 0  # since the number was lowered; since the last answer
        self._since: float | None = None  # the first 429 since the last answer

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait until a request may begin, and give the time; the next one may begin when this ends."""
        await self._slots.acquire()
        try:
            while (left := self._not_before - time.monotonic()) > 0 and not self._over.is_set():
                await sleep(left, self._over)
            yield time.monotonic()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._withheld:
            self._withheld -= 1
        else:
            self._slots.release()

    def pause(self, seconds: float) -> None:
        """Let nothing begin before these are over; a random part keeps several programs from coming back together."""
        self._not_before = max(self._not_before, time.monotonic() + seconds * random.uniform(1, 1.1))

    def answered(self) -> None:
        self._since, self._refusals, self._answers = None, 0, self._answers + 1
        if self._answers % RISE == 0 and self._allowed < self._most:
            self._allowed += 1
            self._give_back()

    def limited(self, began: float, asked: float) -> float:
        """After a 429 to a request that began then: return the seconds since the first one without an answer since."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if began >= self._lowered:  # of requests that were under way together, one lowers the number
            fewer = max(1, self._allowed // 2)
            self._withheld += self._allowed - fewer
            self._lowered, self._answers, self._allowed = now, 0, fewer
            self._refusals += 1
            self.pause(asked or pause_after(self._refusals - 1))
        return now - self._since


async def sleep(seconds: float, over: asyncio.Event) -> None:
    """Wait so long, or until the run is over."""
    with suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)


class Client:
    """Asks one model, `concurrency` requests at a time, and keeps each reply in the file `kept` as soon as it is there.

    A request whose reply is in that file is not sent. UserError, with what to do, where the server refuses a request or
    has failed `attempts` times; what was under way by then is still waited for and kept.
    """

    def __init__(self, endpoint: Endpoint, kept: Path) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # half a second

        self.endpoint, self.kept, self._key = endpoint, kept, api_key(endpoint)
        self._masked = forms_of(self._key) if self._key else None
        self._replies = read_kept(kept)
        self._over, self._problem = asyncio.Event(), UserError("the run was stopped.")
        self._pace = Pace(endpoint.concurrency, self._over)
        hooks: dict[str, list[Any]] = {"request": [self._clean_headers], "response": [refuse_status]}
        http = DefaultAsyncHttpxClient(
            follow_redirects=False, trust_env=False, verify=ssl.create_default_context(), event_hooks=hooks
        )
        self._openai = AsyncOpenAI(  # a hook sets the key: without one here, openai would look for another
            base_url=endpoint.endpoint, api_key="none", timeout=None, max_retries=0, http_client=http
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._over.set()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        await self._openai.close()
        await self._loop.shutdown_default_executor()

    def begin(self, messages: Sequence[dict[str, str]], params: SamplingParams, seed: int) -> Future[Reply]:
        """Return the reply to come."""
        return asyncio.run_coroutine_threadsafe(self._reply(request(self.endpoint, messages, params, seed)), self._loop)

    async def _reply(self, content: dict[str, Any]) -> Reply:
        sent = {key: value for key, value in content.items() if key not in self.endpoint.leave_out}
        # the seed always counts: a prompt that is asked several times gets an answer each
        name = hashlib.sha256(json.dumps(sent | {"seed": content["seed"]}, sort_keys=True).encode()).hexdigest()
        if name not in self._replies:
            reply = await self._attempts(sent)
            self._keep(name, reply)
            self._replies[name] = reply
        return self._replies[name]

    async def _attempts(self, content: dict[str, Any]) -> Reply:
        failed, attempt = "", 0
        while attempt < self.endpoint.attempts:
            if attempt:
                await sleep(pause_after(attempt - 1), self._over)
            attempt += 1
            async with self._pace.slot() as began:
                if self._over.is_set():
                    raise self._problem
                try:
                    reply = read_reply(json.loads(await self._send(content)), content[self.endpoint.tokens_field])
                except BadStatus as error:
                    failed = self._not_now(error, began)
                    attempt -= error.status == 429  # nothing has failed
                except Nonsense as error:
                    failed = str(error)
                    if error.usage != (None, None):
                        self._keep("", Reply("", False, *error.usage))
                except TimeoutError:
                    failed = f"it did not answer in {self.endpoint.timeout:g} s"
                except Exception as error:  # of httpx or httpx2, by openai's version, of the socket, of json
                    failed = self._without_key(cause(error))[:300]
                else:
                    self._pace.answered()
                    return replace(reply, text=self._without_key(reply.text, SECRET))
        raise self._give_up(f"has not answered a request {self.endpoint.attempts} times; at last: {failed}.") from None

    async def _send(self, content: dict[str, Any]) -> bytes:
        """Return a reply with status 200, complete before the deadline; timeouts of httpx limit each pause alone."""
        named = {name: content[name] for name in ("model", "messages")}
        rest = {name: value for name, value in content.items() if name not in named}
        completions: Any = self._openai.chat.completions.with_streaming_response
        async with (
            asyncio.timeout(self.endpoint.timeout),
            completions.create(**named, extra_body=rest) as response,
        ):
            return await read_bounded(response.http_response)

    async def _clean_headers(self, sent: Any) -> None:
        """Take out what openai adds from the environment (OPENAI_CUSTOM_HEADERS, ...) and tells about this machine."""
        for name in [name for name in sent.headers if name not in HEADERS]:
            del sent.headers[name]
        sent.headers["Connection"] = "close"  # one that its server closes at that moment would cost an attempt
        if self._key:
            sent.headers["Authorization"] = f"Bearer {self._key}"

    def _not_now(self, error: BadStatus, began: float) -> str:
        """Return what a status says that may pass; UserError, which ends the run, where it does not."""
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
        """End all requests that are not under way; return what the first of the failures says."""
        if not self._over.is_set():
            words = f"{self.endpoint.endpoint} ({self.endpoint.model}) {words} What it has answered is kept."
            self._problem = UserError(words)
            self._over.set()
        return self._problem

    def _refusal(self, error: BadStatus) -> str:
        if error.status in (401, 403):  # some servers repeat the key
            which = f"the key in {self.endpoint.api_key_env}" if self._key else "a request without a key (api_key_env)"
            return f"refuses {which} (status {error.status})."
        words = self._words(error)
        return f"refuses the request with status {error.status}: {words or 'no words'}. {remedy(words, self.endpoint)}"

    def _words(self, error: BadStatus) -> str:
        """Return how a reply begins, cut after the key is masked, of which otherwise a part would remain."""
        return " ".join(self._without_key(error.reply).split())[:300]

    def _without_key(self, text: str, least: int = 1) -> str:
        return self._masked.sub("***", text) if self._masked and len(self._key or "") >= least else text

    def _keep(self, name: str, reply: Reply) -> None:
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        with self.kept.open("a", encoding="utf-8") as file:  # the line before may have been cut short
            file.write("\n" + json.dumps({"request": name, **asdict(reply)}) + "\n")


async def refuse_status(response: Any) -> None:
    """Raise BadStatus for any status but 200, also for a redirect; openai would read all of such a reply."""
    if response.status_code != 200:
        reply = (await read_bounded(response)).decode(errors="replace")
        raise BadStatus(response.status_code, response.headers.get("Retry-After", ""), reply)


async def read_bounded(response: Any) -> bytes:
    """Return what a response of httpx holds; ValueError where it has more than MOST_BYTES."""
    reply = bytearray()
    async for piece in response.aiter_raw():
        reply += piece
        if len(reply) > MOST_BYTES:
            raise ValueError(f"its reply has more than {MOST_BYTES} bytes")
    return bytes(reply)


def cause(error: BaseException) -> str:
    """Say what was at the root of an error: openai and httpx each wrap that of the layer below."""
    while (under := error.__cause__ or error.__context__) is not None:
        error = under
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def request(
    endpoint: Endpoint, messages: Sequence[dict[str, str]], params: SamplingParams, seed: int
) -> dict[str, Any]:
    """Return the body of a request; what OpenAI has no name for has vLLM's, and is left out where it is neutral."""
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
    """Return what a chat completion says; Nonsense where the reply is not a chat completion.

    A thought that the server returns apart (`reasoning_content`) is put back in front of the answer, in its tags. Where
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
        raise Nonsense("a reply whose content is not text", paid)
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
    """Return (prompt tokens, completion tokens) of an answer, as far as it says them."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    return tokens_of(usage.get("prompt_tokens")), tokens_of(usage.get("completion_tokens"))


def tokens_of(number: Any) -> int | None:
    """Return 10 for 10 and for 10.0, and None for what cannot be a number of tokens."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= MOST_TOKENS:
        return None
    return int(number) if number == int(number) else None


def read_kept(kept: Path) -> dict[str, Reply]:
    """Return the replies in a file by request; a line that was cut short is skipped."""
    return {name: reply for name, reply in _lines(kept) if name}


def spent(kept: Path) -> tuple[int, int, int, int]:
    """Return what was paid for: (replies, tokens of prompts, of answers, replies that do not say both).

    Replies that were of no use count as well.
    """
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
    """Return seconds: twice as many after each failure, less a random part."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, 30)) * random.uniform(0.5, 1)


def forms_of(key: str) -> re.Pattern[str]:
    """Return a pattern of a key as a server may repeat it: as it is, or escaped (repeatedly) as in JSON or a URL."""
    letters = (rf"(?:\\{{0,8}}{re.escape(c)}|(?i:\\{{1,8}}u00{ord(c):02x}|%{ord(c):02x}))" for c in key)
    return re.compile("".join(letters))


def seconds_of(header: str) -> float | None:
    """Return what Retry-After asks for, given as seconds or as a date; None where it says nothing."""
    with suppress(ValueError):
        return max(0.0, float(header)) if float(header) == float(header) else None
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None
