"""How does an evaluation get answers from a model that another program serves?  No answer is paid for twice.

The client is the one of the package openai, with three additions: a limit on the time and the size of a whole answer;
pauses that all requests share; and openai's settings from environment variables are not sent. Requests, with the key,
go to the configured address only: redirects and proxies are not used.
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
from dataclasses import asdict
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, get_args

from envs.web import MOST_BYTES, BadStatus
from posttrain.config import Endpoint, OptionalField
from posttrain.evaluation.replies import Nonsense, Reply, read_reply, tokens_of
from posttrain.types import SamplingParams, UserError

TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)  # statuses worth another attempt
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts: doubled each time, then reduced at random
LONGEST_WAIT = 600.0  # seconds: the longest Retry-After, and the longest time with status 429 alone
RISE = 20  # answers after which one more request runs at a time, where a 429 has lowered the number
SECRET = 8  # characters of the shortest key that is masked in answers: "none" and "EMPTY" are words
OPTIONAL = get_args(OptionalField)  # fields of a request that may be left out
OF_MESSAGES = ("role", "content", "tool_calls", "tool_call_id")  # keys, those sent
HEADERS = ("host", "accept", "content-type", "content-length", "x-stainless-raw-response")  # of openai's, those sent


def api_key(endpoint: Endpoint) -> str | None:
    """Return the key from the environment variable of an endpoint; None where it needs no key.

    Raises:
        UserError: the key is missing or malformed. The message never contains the key.
    """
    name = endpoint.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(
            f"the environment variable {name}, which should hold the key of {endpoint.endpoint}, is not set."
        )
    if not re.fullmatch("[!-~]+", key):
        raise UserError(
            f"the environment variable {name} holds spaces or other characters that no key has: set it again."
        )
    return key


class Pace:
    """Decides when a request may start: all wait for one shared pause, and a 429 halves how many run at a time."""

    def __init__(self, most: int, over: asyncio.Event) -> None:
        self._most, self._allowed, self._over = most, most, over
        self._slots, self._withheld = asyncio.Semaphore(most), 0
        self._not_before = self._lowered = 0.0
        self._answers = self._refusals = 0  # answers since the number was lowered; refusals since the last answer
        self._since: float | None = None  # the first 429 since the last answer

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait until a request may start, and yield the time; the slot is free again when the context ends."""
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
        """Start no request for so long; a random part keeps several programs from returning at the same moment."""
        self._not_before = max(self._not_before, time.monotonic() + seconds * random.uniform(1, 1.1))

    def answered(self) -> None:
        """Count an answer, and after enough of them let one more request run at a time."""
        self._since, self._refusals, self._answers = None, 0, self._answers + 1
        if self._answers % RISE == 0 and self._allowed < self._most:
            self._allowed += 1
            self._give_back()

    def limited(self, began: float, wait: float) -> float:
        """Record a 429, and return for how many seconds no request has been answered with anything else.

        began: when the refused request was sent. wait: seconds of its Retry-After, or 0.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if began >= self._lowered:  # of requests that ran together, only one lowers the number
            fewer = max(1, self._allowed // 2)
            self._withheld += self._allowed - fewer
            self._lowered, self._answers, self._allowed = now, 0, fewer
            self._refusals += 1
            self.pause(wait or pause_after(self._refusals - 1))
        return now - self._since


async def sleep(seconds: float, over: asyncio.Event) -> None:
    """Wait for so many seconds, or until the event is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)


class Client:
    """Sends requests to one model, `concurrency` at a time, and appends each reply to the file `kept` when it arrives.

    A request whose reply is in that file is not sent. The future of a reply raises UserError where the server refuses
    a request or has failed `attempts` times; replies to requests that were sent before are still awaited and kept.
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
        self._openai = AsyncOpenAI(  # a hook sets the key; without one openai looks in the environment
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

    def begin(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        seed: int,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Future[Reply]:
        """Send a request, unless its reply is kept, and return the future of the reply. tools: schemas."""
        content = request(self.endpoint, messages, params, seed) | ({"tools": list(tools)} if tools else {})
        return asyncio.run_coroutine_threadsafe(self._reply(content), self._loop)

    async def _reply(self, content: dict[str, Any]) -> Reply:
        sent = {key: value for key, value in content.items() if key not in self.endpoint.leave_out}
        # the seed always counts, so that a prompt with several samples gets an answer for each
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
                    answer, longest = json.loads(await self._send(content)), content[self.endpoint.tokens_field]
                    reply = read_reply(answer, longest, calls="tools" in content)
                except BadStatus as error:
                    failed = self._temporary_failure(error, began)
                    attempt -= error.status == 429  # not a failure
                except Nonsense as error:
                    failed = str(error)
                    if error.usage != (None, None):
                        self._keep("", Reply("", False, *error.usage))
                except TimeoutError:
                    failed = f"it did not answer in {self.endpoint.timeout:g} s"
                except Exception as error:  # of httpx or httpx2 (by the version of openai), of the socket, of json
                    failed = self._without_key(cause(error))[:300]
                else:
                    self._pace.answered()
                    return reply.changed(lambda text: self._without_key(text, SECRET))
        raise self._give_up(f"has not answered a request {self.endpoint.attempts} times; the last: {failed}.") from None

    async def _send(self, content: dict[str, Any]) -> bytes:
        """Return the body of a reply with status 200, complete within `timeout`; httpx limits single pauses alone."""
        named = {name: content[name] for name in ("model", "messages")}
        rest = {name: value for name, value in content.items() if name not in named}
        completions: Any = self._openai.chat.completions.with_streaming_response
        async with (
            asyncio.timeout(self.endpoint.timeout),
            completions.create(**named, extra_body=rest) as response,
        ):
            return await read_bounded(response.http_response)

    async def _clean_headers(self, sent: Any) -> None:
        """Remove the headers that openai takes from the environment or that describe this machine, and set the key."""
        for name in [name for name in sent.headers if name not in HEADERS]:
            del sent.headers[name]
        sent.headers["Connection"] = "close"  # a reused connection may just be closing, which costs an attempt
        if self._key:
            sent.headers["Authorization"] = f"Bearer {self._key}"

    def _temporary_failure(self, error: BadStatus, began: float) -> str:
        """Return the words for a temporary status, after which the request is sent again.

        Raises:
            UserError: the status is not temporary, or the server asks for too long a pause.
        """
        if error.status not in TEMPORARY:
            raise self._give_up(self._refusal(error)) from None
        failed = f"status {error.status}" + (f": {words}" if (words := self._words(error)) else "")
        if error.status == 429 and "insufficient_quota" in error.reply:
            raise self._give_up(f"has no quota left for this key ({failed}).") from None
        wait = seconds_of(error.retry_after) or 0.0
        if wait > LONGEST_WAIT:
            words = f"asks to wait {wait:.0f} s before the next request ({failed}). Continue later with --resume."
            raise self._give_up(words) from None
        if error.status == 429 and self._pace.limited(began, wait) > LONGEST_WAIT:
            words = f"has answered nothing but {failed} for {LONGEST_WAIT:g} s. Continue later with --resume."
            raise self._give_up(words) from None
        if wait:
            self._pace.pause(wait)
        return failed

    def _give_up(self, words: str) -> UserError:
        """Send no further request, and return the error of the first failure."""
        if not self._over.is_set():
            words = f"{self.endpoint.endpoint} ({self.endpoint.model}) {words} Its answers so far are kept."
            self._problem = UserError(words)
            self._over.set()
        return self._problem

    def _refusal(self, error: BadStatus) -> str:
        if error.status in (401, 403):  # some servers repeat the key
            which = f"the key in {self.endpoint.api_key_env}" if self._key else "a request without a key (api_key_env)"
            return f"refuses {which} (status {error.status})."
        words = self._words(error)
        words, what_to_write = words or "no reason given", remedy(words, self.endpoint)
        return f"refuses the request with status {error.status}: {words}. {what_to_write}"

    def _words(self, error: BadStatus) -> str:
        """Return the beginning of a reply. The key is masked before the text is cut, or a part of it could remain."""
        return " ".join(self._without_key(error.reply).split())[:300]

    def _without_key(self, text: str, least: int = 1) -> str:
        return self._masked.sub("***", text) if self._masked and len(self._key or "") >= least else text

    def _keep(self, name: str, reply: Reply) -> None:
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        with self.kept.open("a", encoding="utf-8") as file:  # the line before may be incomplete
            file.write("\n" + json.dumps({"request": name, **asdict(reply)}) + "\n")


async def refuse_status(response: Any) -> None:
    """Raise BadStatus for any status but 200, redirects included; openai would read such a reply without a limit."""
    if response.status_code != 200:
        reply = (await read_bounded(response)).decode(errors="replace")
        raise BadStatus(response.status_code, response.headers.get("Retry-After", ""), reply)


async def read_bounded(response: Any) -> bytes:
    """Return the body of a response of httpx; raise ValueError where it has more than MOST_BYTES."""
    reply = bytearray()
    async for piece in response.aiter_raw():
        reply += piece
        if len(reply) > MOST_BYTES:
            raise ValueError(f"its reply has more than {MOST_BYTES} bytes")
    return bytes(reply)


def cause(error: BaseException) -> str:
    """Return the words of the first error in a chain: openai and httpx each wrap the error of the layer below."""
    while (under := error.__cause__ or error.__context__) is not None:
        error = under
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def request(
    endpoint: Endpoint, messages: Sequence[dict[str, Any]], params: SamplingParams, seed: int
) -> dict[str, Any]:
    """Return the body of a request. Settings that OpenAI does not have are named as in vLLM, and only sent if set."""
    content: dict[str, Any] = {
        "model": endpoint.model,
        "messages": [{key: message[key] for key in OF_MESSAGES if key in message} for message in messages],
        endpoint.tokens_field: params.max_new_tokens,
        "temperature": params.temperature,
        "seed": seed % (1 << 31),  # some servers take 32 bits
    }
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)):
        if getattr(params, name) != neutral:
            content[name] = getattr(params, name)
    return content


def remedy(words: str, endpoint: Endpoint) -> str:
    """Return what to change in the config after a server has refused a request with these words.

    >>> remedy("unknown field: seed", Endpoint(endpoint="http://127.0.0.1:8000/v1", model="m"))
    "If it does not accept seed, write leave_out: [seed] in this checkpoint's section."
    """
    named = [name for name in (*OPTIONAL, endpoint.tokens_field) if re.search(rf"(?<!\w){name}(?!\w)", words)]
    fields = [name for name in named if name in OPTIONAL]
    if fields:
        all_of_them = ", ".join([*endpoint.leave_out, *fields])
        return (
            f"If it does not accept {', '.join(fields)}, write leave_out: [{all_of_them}] in this checkpoint's section."
        )
    if named:
        (other,) = {"max_tokens", "max_completion_tokens"} - set(named)
        return (
            f"If it names the limit of an answer otherwise, write tokens_field: {other} in this checkpoint's section."
        )
    return f"Change this checkpoint's section; with leave_out some of {', '.join(OPTIONAL)} are not sent."


def read_kept(kept: Path) -> dict[str, Reply]:
    """Return the replies in a file by the digest of their request; incomplete lines are skipped."""
    return {name: reply for name, reply in _lines(kept) if name}


def spent(kept: Path) -> tuple[int, int, int, int]:
    """Return what was paid for: (replies, prompt tokens, completion tokens, replies that do not say both).

    Malformed replies count as well.
    """
    replies = [reply for _, reply in _lines(kept)]
    prompts, answers = ([one.prompt_tokens for one in replies], [one.completion_tokens for one in replies])
    unknown = sum(None in pair for pair in zip(prompts, answers, strict=True))
    return len(replies), sum(one or 0 for one in prompts), sum(one or 0 for one in answers), unknown


def _lines(kept: Path) -> list[tuple[str, Reply]]:
    lines = []
    if kept.is_file():
        for line in kept.read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                usage = {name: tokens_of(row[name]) for name in ("prompt_tokens", "completion_tokens")}
                lines.append((row.pop("request"), Reply(**row | usage)))
    return lines


def pause_after(failures: int) -> float:
    """Return the seconds to wait after so many failures: doubled each time, then reduced at random."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, 30)) * random.uniform(0.5, 1)


def forms_of(key: str) -> re.Pattern[str]:
    """Return a pattern that finds a key as a server may repeat it: plain, or escaped as in JSON or a URL."""
    letters = (rf"(?:\\{{0,8}}{re.escape(c)}|(?i:\\{{1,8}}u00{ord(c):02x}|%{ord(c):02x}))" for c in key)
    return re.compile("".join(letters))


def seconds_of(header: str) -> float | None:
    """Return the seconds of a Retry-After header, which holds seconds or a date; None where it holds neither."""
    with suppress(ValueError):
        return max(0.0, float(header)) if float(header) == float(header) else None
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None
