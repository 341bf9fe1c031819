"""How does an OpenEnv server become one of our environments?  `make("openenv", url="http://localhost:8000")`.

A server that offers tasks gets those of each split, any other gets seeds. One thread serves all episodes of a
process. What a server does not answer within `timeout` seconds, or a server that is gone, ends the episode with a
ServerError: it is counted as crashed, never as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, TimeoutError as FutureTimeout
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np

from envs.adapters import openenv_answers as answers
from envs.adapters.base import SEEDS, Lender, package
from envs.adapters.openenv_answers import MESSAGE, TEXT, NotOffered, ServerError, checked, readable_field
from envs.base import TextEnv, split_by_hash
from envs.web import is_address

PORTABLE = 1 << 32  # every generator takes a seed below it
NUMBER = re.compile(r"-?[0-9]{1,18}")


class Refused(ServerError):
    """A server that did not take an action, which changed nothing."""


class ServerTask(NamedTuple):
    """A level: Task(split="test", index=12, home="test"); without tasks, Task(split="", index=seed, home="train")."""

    split: str
    index: int
    home: str


class Offer(NamedTuple):
    """What a server says before it is played.

    Offer(action="text", kind="string", rules="Walk ...", max_turns=8, actions=("Left",), styles=("plain", "compact"),
    splits=(("train", "train", 1000), ...)): of each split its name, its type and how many tasks it has.
    """

    action: str
    kind: str
    rules: str
    max_turns: int
    actions: tuple[str, ...] | None
    styles: tuple[str, ...]
    splits: tuple[tuple[str, str, int], ...]


class OpenEnv(TextEnv):
    """An environment behind a server, with the protocol of OpenEnv. docs/adapters.md describes the arguments.

    ## Action space
    One of the actions that the server lists, or free text: the value of one field, of text or of a whole number.

    ## Observation space
    Text: one field of the server's observation, or all of them, one per line.

    ## Rewards
    The server's.

    ## Episode end
    The server's; its metadata says truncation and success (otherwise: a reward of at least `success_at`).
    """

    name = "openenv"
    actions = None
    slow = True
    deterministic = False
    observable = False  # nothing is known about it

    def __init__(
        self,
        url: str = "",
        action: str = "",
        observation: str = "",
        rules: str = "",
        success_at: float = 1.0,
        timeout: float = 30.0,
        render_mode: str | None = None,
    ) -> None:
        if not url:
            raise ValueError("openenv needs the option url, for example url=http://localhost:8000.")
        if not is_address(url):
            raise ValueError(f'The option url of openenv is "{url}", which is not an address: write http://host:port.')
        self.where = (url.rstrip("/"), timeout)
        self.offer = server_offer(*self.where, action)
        self.actions = self.offer.actions
        super().__init__(render_mode)
        self.config = (url.rstrip("/"), self.offer.splits)
        self.max_turns = self.offer.max_turns or self.max_turns
        self.shown, self.success_at = observation, success_at
        self.own_rules = rules
        self.opening = answers.Opening.model_validate({})  # of the episode
        self.session: Session | None = None

    @classmethod
    def draw(cls, config: Any, rng: np.random.Generator) -> Iterator[ServerTask]:
        splits = config[1] or (("", "train", SEEDS),)
        kinds = {kind for _, kind, _ in splits}
        while True:
            name, kind, count = splits[int(rng.integers(len(splits)))]
            index = int(rng.integers(count))
            if "train" not in kinds:
                kind = split_by_hash(f"{name} {index}")
            elif kind == "train" and (other := split_by_hash(f"{name} {index}")) not in kinds:
                kind = other  # a split that the server lacks is made of tasks for training
            yield ServerTask(name, index, kind)

    @classmethod
    def key_of(cls, level: ServerTask) -> str:
        return f"{level.split} {level.index}".strip()

    @classmethod
    def split_of(cls, level: ServerTask) -> str:
        return level.home

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        noise_seed = (options or {}).get("noise_seed", seed)
        self.noise_seed = None if noise_seed is None else noise_seed % PORTABLE
        return super().reset(seed=seed, options=options)

    def begin(self, level: ServerTask) -> None:
        self.level = level
        self.played: list[Any] = []
        self.terminated = self.truncated = self.success = False
        self.take(self.opened())

    def task(self) -> dict[str, Any]:
        """Return the arguments of reset(). Beside a task, the seed is that of chance inside the episode."""
        style = {"style": self.style} if self.style in self.offer.styles else {}
        if not self.level.split:
            return {"seed": self.level.index, **style}
        noise = {} if self.noise_seed is None else {"seed": self.noise_seed}
        return {"split": self.level.split, "index": self.level.index, **noise, **style}

    def opened(self) -> Any:
        """Return what the server shows at the start of this episode, over a connection of this environment's own."""
        if self.session is None or self.session.lost:
            self.session = SESSIONS.lend(self, *self.where)
        assert self.session
        return self.session.reset(**self.task())

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, reward, valid = self.state_key(), 0.0, False
        value = self.value(action)
        if value is not None and not (self.terminated or self.truncated):
            if self.session is None:  # a copy has to get where its original is
                self.opened()
            assert self.session
            for sent in self.played[self.session.steps :]:
                self.session.step(sent)
            sent = {self.offer.action: value}
            with contextlib.suppress(Refused):
                reward = self.take(self.session.step(sent))
                valid = self.valid
                self.played.append(sent)
        info = {
            "success": self.success,
            "action_is_valid": valid,
            "action_is_effective": self.state_key() != before,
            "failure": str(self.beside.get("failure", "")) or ("lost" if self.terminated and not self.success else ""),
        }
        return self.text, reward, self.terminated, self.truncated, info

    def value(self, action: str) -> str | int | None:
        """Return the action as the server takes it; None for one that it cannot take."""
        if self.actions is not None:
            return self.canonical_action(action)
        if self.opening.messages is not None:  # a whole answer, which may be blank
            return action.encode("utf-8", "replace").decode()
        if self.offer.kind != "integer":
            return action.encode("utf-8", "replace").decode() if action.strip() else None
        return int(action) if NUMBER.fullmatch(action.strip()) else None

    def take(self, result: Any) -> float:
        """Keep what the server answered, and return the reward."""
        try:
            return self.understood(checked(answers.StepResult, vars(result), f"An answer of {self.where[0]}"))
        except ServerError:
            if self.session is not None:  # no further answer of such a server is trusted
                self.session.drop()
            raise

    def understood(self, result: answers.StepResult) -> float:
        fields, source = dict(result.observation or {}), f"An observation of {self.where[0]}"
        self.beside = {**(checked(answers.Observed, fields, source).metadata or {}), **(result.metadata or {})}
        fields.pop("metadata", None)
        beside = checked(answers.Beside, self.beside, f"The metadata of an observation of {self.where[0]}")
        if self.offer.max_turns:  # a server of openenv_server.py
            opening = checked(answers.Opening, fields, source)
            if opening.rules or opening.messages:
                self.opening, self.example_state = opening, opening.example_state
            self.actions = tuple(opening.actions or ()) or self.actions
            self.action_word = opening.action_word or self.action_word
            fields = {key: value for key, value in fields.items() if key not in answers.Opening.model_fields}
        text = readable_field(fields, self.shown) or "(nothing)"
        if len(text) > TEXT:
            raise ServerError(f"{source} has {len(text):,} characters, more than {TEXT:,}.")
        self.text = text
        self.truncated = bool(result.done and beside.truncated)
        self.terminated = bool(result.done and not beside.truncated)
        self.valid = beside.action_is_valid is not False
        reward = float(result.reward or 0.0)
        won = self.terminated and reward >= self.success_at
        self.success = won if beside.success is None else beside.success
        return reward

    def observe(self) -> str:
        return self.text

    def rules(self) -> str:
        return self.own_rules or self.opening.rules or self.offer.rules

    def example(self) -> tuple[str, tuple[str, ...]]:
        actions = self.opening.example_actions
        return (self.opening.example_thought, tuple(actions)) if actions else super().example()

    def messages(self) -> list[dict[str, str]] | None:
        own = self.opening.messages
        return None if own is None else [message.model_dump() for message in own]

    def state_key(self) -> str:
        """Return the server's own, where it has one; else what it shows."""
        return str(self.beside.get("state_key", self.text))

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenEnv:
        """Return a copy with its own session, in which its first step plays the actions so far again."""
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update({key: copy.deepcopy(value, memo) for key, value in vars(self).items() if key != "session"})
        twin.session = None
        return twin


# -- before play -------------------------------------------------------------------------------------------------------


@lru_cache
def server_offer(url: str, timeout: float, action: str = "") -> Offer:
    """Return what a server offers; one request per process."""
    schema = checked(answers.Schema, request_json(url, "/schema", timeout), f"/schema of {url}")
    rules = checked(answers.Metadata, request_json(url, "/metadata", timeout), f"/metadata of {url}").description or ""
    fields, needed = schema.action.properties, schema.action.required
    if action and action not in fields:
        raise ServerError(f'Actions at {url} have no field "{action}", only {", ".join(fields)}: name one of them.')
    usable = [name for name in needed if fields.get(name, {}).get("type") in ("string", "integer")]
    names = [action] if action else usable
    if len(names) != 1 or set(needed) - set(names):
        raise ServerError(
            f"Actions at {url} need {', '.join(needed) or 'no field'}: an environment of text can fill one field of"
            " text or of a whole number. Name it with the option `action`, where that is enough."
        )
    reply = request_json(url, "/state", timeout) if "max_turns" in schema.state.properties else {}
    state = checked(answers.State, reply, f"/state of {url}")
    kind = str(fields[names[0]].get("type", "string"))
    known = tuple(state.actions or ()) or None
    return Offer(names[0], kind, rules, state.max_turns or 0, known, tuple(state.styles), tasks(url, timeout))


def tasks(url: str, timeout: float) -> tuple[tuple[str, str, int], ...]:
    """Return the server's splits that have tasks; none where it offers no tasks."""
    try:
        names = checked(list[str], request_json(url, "/list_environments", timeout), f"/list_environments of {url}")
        if len(names) != 1:
            raise ServerError(f"{url} serves {len(names)} environments ({', '.join(names)}): here one is played.")
        path = f"/{quote(names[0], safe='')}"
        splits = checked(list[answers.Split], request_json(url, f"{path}/splits", timeout), f"{path}/splits of {url}")
        counts = [request_json(url, f"{path}/num_tasks", timeout, {"split": split.name}) for split in splits]
    except NotOffered:
        return ()
    sizes = [min(checked(answers.Count, count, f"{path}/num_tasks of {url}").num_tasks, SEEDS) for count in counts]
    return tuple((split.name, split.type, size) for split, size in zip(splits, sizes, strict=True) if size > 0)


def request_json(url: str, path: str, timeout: float, data: dict[str, Any] | None = None) -> Any:
    """Return the answer to a request over HTTP; `timeout` bounds it in all, also where a server sends slowly."""
    answered: Future[Any] = Future()

    def ask() -> None:
        try:
            answered.set_result(fetched(url, path, timeout, data))
        except BaseException as error:
            answered.set_exception(error)

    threading.Thread(target=ask, name="openenv-question", daemon=True).start()
    try:
        return answered.result(timeout)
    except FutureTimeout:
        raise ServerError(f"The OpenEnv server at {url} did not answer {path} within {timeout:g} seconds.") from None


def fetched(url: str, path: str, timeout: float, data: dict[str, Any] | None) -> Any:
    here = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if here else []))
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(f"{url}{path}", body, {"Content-Type": "application/json"})
    late, read = time.monotonic() + timeout, b""
    try:
        with opener.open(request, timeout=timeout) as answer:
            while (some := answer.read1(1 << 16)) and len(read) <= MESSAGE and time.monotonic() < late:
                read += some
        if some:
            raise ServerError(f"The OpenEnv server at {url} answers {path} with too much, or too slowly.")
        return json.loads(read)
    except urllib.error.HTTPError as error:
        if error.code in (404, 405, 501):
            raise NotOffered(f"The OpenEnv server at {url} does not offer {path}.") from None
        raise ServerError(f"The OpenEnv server at {url} answers {path} with {error}.") from None
    except ServerError:
        raise
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"No OpenEnv server answers at {url} ({reason}). Start it, or correct the address.") from None


# -- play --------------------------------------------------------------------------------------------------------------


def connection(client: Any) -> Any:
    """Return the websocket of a client (no public name in openenv 0.10); None without one.

    A client that lost it silently connects again, to a session that does not know the episode.
    """
    return getattr(client, "_ws", None)


class Session:
    """A connection to a server, which holds one episode at a time there. After a failure it is lost."""

    silent: ClassVar[dict[str, float]] = {}  # until when a server counts as down: not every episode waits for it

    def __init__(self, url: str, timeout: float) -> None:
        core = package("openenv.core", "openenv==0.10.0")
        self.url, self.timeout, self.lost = url, timeout, False
        self.client = core.GenericEnvClient(
            base_url=url, connect_timeout_s=timeout, message_timeout_s=timeout, max_message_size_mb=MESSAGE / (1 << 20)
        )
        self.socket: Any = None
        self.steps = 0  # of the present episode

    def reset(self, **task: Any) -> Any:
        began = time.monotonic()
        if began < self.silent.get(self.url, 0):
            raise ServerError(f"The OpenEnv server at {self.url} did not answer a moment ago: not asked again yet.")

        async def ask() -> Any:
            await self.client.connect()
            if self.socket is not None and await unread(
                self.socket
            ):  # the next answer would be that of an old question
                await self.client.disconnect()
                await self.client.connect()
            result = await self.client.reset(**task)
            self.socket = connection(self.client)
            return result

        self.steps = 0
        try:
            return self.run(ask(), "reset()")
        except ServerError:
            if time.monotonic() - began > self.timeout / 2:
                self.silent[self.url] = time.monotonic() + self.timeout
            raise

    def step(self, action: dict[str, Any]) -> Any:
        async def ask() -> Any:
            socket = connection(self.client)
            if self.lost or socket is not self.socket or (socket is not None and socket.state.name != "OPEN"):
                raise ConnectionError("the connection was closed")
            if socket is not None and await waiting(socket):
                raise ConnectionError("it answered a message twice")
            return await self.client.step(action)

        result = self.run(ask(), "step()")
        self.steps += 1
        return result

    def run(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        """Return the result of a coroutine in the thread of all sessions; ServerError when it takes too long."""
        limited = asyncio.wait_for(work, 2 * self.timeout)  # to connect, and to be answered
        try:
            return asyncio.run_coroutine_threadsafe(limited, loop()).result()
        except Exception as error:
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" in str(error):
                raise Refused(f"The OpenEnv server at {self.url} refused the message of {what}") from error
            self.drop()
            late = isinstance(error, TimeoutError)
            problem = f"no answer within {self.timeout:g} seconds" if late else str(error) or type(error).__name__
            raise ServerError(f"The OpenEnv server at {self.url} failed in {what}: {problem}") from error

    def drop(self) -> None:
        """Close it for ever: its next message may belong to another request."""
        self.lost = True
        asyncio.run_coroutine_threadsafe(self.close(), loop())

    async def close(self) -> None:
        await self.client.close()


async def unread(socket: Any) -> bool:
    """Return whether the server has sent unrequested messages; all sent before an answered ping have arrived."""
    if socket.state.name != "OPEN":
        return False  # it is opened again
    await (await socket.ping())
    return await waiting(socket)


async def waiting(socket: Any) -> bool:
    """Return whether there is an unread message."""
    task = asyncio.ensure_future(socket.recv())
    for _ in range(2):
        await asyncio.sleep(0)
    if not task.done():
        task.cancel()
    await asyncio.wait([task])
    return not task.cancelled() and task.exception() is None


@lru_cache
def started() -> asyncio.AbstractEventLoop:
    """Return an event loop in a thread of its own."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name="openenv-sessions", daemon=True).start()
    return made


def loop() -> asyncio.AbstractEventLoop:
    """Return the one loop of all sessions: episodes may begin in many threads at once."""
    with STARTING:
        return started()


STARTING = threading.Lock()
SESSIONS = Lender(Session)
