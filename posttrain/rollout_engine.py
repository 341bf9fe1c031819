"""What does a rollout server do between two requests?  One thread writes turns and takes up weights between them.

Requests only leave word of what they want, under one lock, and wait for what was written. So one thread at
a time touches the engine, and weights change when no turn is being written: every turn was written by one version.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from threading import Condition, Thread
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from posttrain.models import Chat
from posttrain.rollout import (
    CHUNK,
    LEASE,
    LONG_POLL,
    PROTOCOL,
    WEIGHTS_PATIENCE,
    TurnRequest,
    architecture,
    digest,
    precision,
    vocabulary_of,
)
from posttrain.types import Completion, SamplingParams, one_line

MOST_CONVERSATIONS = 65536
LONGEST = 1 << 24  # tokens of a conversation
IDLE = 3600.0  # seconds after which a conversation that nobody goes on with is dropped
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights that may be sent
LOOK = 5.0  # seconds between two looks for what is to be dropped


class Refused(Exception):
    """A request that is not carried out, with the status of the answer."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Asked(NamedTuple):
    """A turn that waits to be written."""

    handle: int
    seed: int
    params: SamplingParams


class Conversation:
    """What requests know of a conversation: how long it will be, whether a turn is under way, when it was last used."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.busy, self.used = tokens, False, time.monotonic()


class Engine:
    """`sampler` is our engine around the model; handles are those of the run that has the server."""

    def __init__(self, sampler: Any, chat: Chat, name: str) -> None:
        self.sampler, self.chat, self.name = sampler, chat, name
        self.parameters = dict(sampler.model.named_parameters())
        self.vocabulary = sampler.model.get_input_embeddings().weight.shape[0]
        self.largest = max(CHUNK, *(4 * parameter.numel() for parameter in self.parameters.values()))  # bytes at once
        self.tokens = vocabulary_of(chat.tokenizer)
        self.version, self.failure = 0, ""
        self._changed = Condition()
        self._session, self._heard, self._longest = "", 0.0, LONGEST
        self._known: dict[int, Conversation] = {}
        self._own: dict[int, int] = {}  # the sampler's handle of each conversation
        self._told: list[Callable[[], None]] = []  # what requests want done with the sampler
        self._asked: list[Asked] = []
        self._params = SamplingParams(1)  # of the turns that are being written
        self._writing: set[int] = set()
        self._written: list[tuple[int, list[int], list[float], bool, int]] = []
        self._in_step = self._owed = self._paused = False
        self._received: dict[str, torch.Tensor] | None = None
        self._renewed: tuple[dict[str, torch.Tensor], int] | None = None

    def start(self, when_it_fails: Callable[[], None]) -> None:
        def go() -> None:
            try:
                while True:
                    self._go_on()
            except Exception as error:  # of the device, or a mistake in here: nothing can be trusted any more
                traceback.print_exc()
                with self._changed:
                    self.failure = one_line(error)
                    self._changed.notify_all()
                when_it_fails()

        Thread(target=go, daemon=True).start()

    # ------------------------------------------------------------------ the thread that writes

    def _go_on(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._told or self._renewed or (self._asked and not self._paused), LOOK)
            self._take_up()
            self._drop_what_is_forgotten()
            turns = self._next_turns(self._asked[0].params) if self._asked else []
            params = self._params
        if turns:
            self.sampler.converse(turns, params, self._then)

    def _then(self, finished: list[tuple[int, Completion]]) -> Sequence[TurnRequest]:
        with self._changed:
            of = {own: handle for handle, own in self._own.items()}
            for own, said in finished:
                handle = of[own]
                self._writing.discard(handle)
                conversation = self._known[handle]
                conversation.busy, conversation.used = False, time.monotonic()
                conversation.tokens += len(said.ids)
                self._written.append((handle, said.ids, said.logprobs, said.finished, self.version))
            self._owed = self._in_step and bool(self._writing)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._owed or self._renewed or self._paused, LEASE)
            self._do_what_was_told()
            return self._next_turns(self._params)

    def _take_up(self) -> None:
        self._do_what_was_told()
        if self._renewed is not None:
            tensors, version = self._renewed
            with torch.no_grad():
                for name, tensor in tensors.items():
                    self.parameters[name].copy_(tensor)
            self.sampler.forget()
            self.version, self._renewed = version, None
            self._changed.notify_all()

    def _do_what_was_told(self) -> None:
        told, self._told = self._told, []
        for do in told:
            do()
        self._changed.notify_all()

    def _next_turns(self, params: SamplingParams) -> list[TurnRequest]:
        """Turns to begin with: none before a pause is over and new weights are there."""
        if self._paused or self._renewed is not None:
            return []
        self._params = params
        mine = [asked for asked in self._asked if asked.params == params]
        self._asked = [asked for asked in self._asked if asked.params != params]
        self._writing |= {asked.handle for asked in mine}
        return [(self._own[asked.handle], asked.seed) for asked in mine]

    def _drop_what_is_forgotten(self) -> None:
        now = time.monotonic()
        if self._session and now - self._heard > LEASE:
            self._end()
        for handle, conversation in list(self._known.items()):
            if not conversation.busy and now - conversation.used > IDLE:
                self._forget(handle)

    def _forget(self, handle: int) -> None:
        del self._known[handle]
        self.sampler.close([self._own.pop(handle)])

    def _end(self) -> None:
        """Nobody has the server any more. Only while nothing is being written."""
        self._session, self._paused, self._received = "", False, None
        self._do_what_was_told()
        self._asked, self._written = [], []
        for handle in list(self._known):
            self._forget(handle)

    # ------------------------------------------------------------------ requests: who has the server

    def about(self) -> dict[str, Any]:
        return {
            "program": "posttrain.rollout_server",
            "protocol": PROTOCOL,
            "model": self.name,
            "vocabulary": self.tokens,
            "precision": precision(self.sampler.model),
            "engine": type(self.sampler).__name__,
            "weight_version": str(self.version),
        }

    def begin_session(self, wanted: Any, session: str, former: str = "") -> dict[str, str]:
        """former: what the run was known by, if it is one that starts again."""
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        if not isinstance(wanted, dict):
            raise Refused(400, "init_info is no JSON object")
        theirs = wanted.get("shapes")
        if theirs != shapes:
            other = sorted(set(theirs) ^ set(shapes)) if isinstance(theirs, dict) else []
            other = other or [name for name in shapes if isinstance(theirs, dict) and theirs[name] != shapes[name]]
            raise Refused(400, f"its model {self.name} has other weights ({', '.join(other[:3])[:200]})")
        own, asked = architecture(self.sampler.model), wanted.get("architecture")
        if own != asked:
            asked = asked if isinstance(asked, dict) else {}
            other = [key for key in sorted(own.keys() | asked.keys()) if own.get(key, ...) != asked.get(key, ...)]
            raise Refused(400, f"its model {self.name} has another config.json ({', '.join(other[:3])[:200]})")
        if (wanted.get("stop_ids"), wanted.get("pad_id")) != ([self.chat.stop_id], self.chat.pad_id):
            raise Refused(400, f"the turns of its model {self.name} end with another token")
        longest = wanted.get("longest")
        if not (type(longest) is int and 0 < longest <= LONGEST):
            raise Refused(400, f"longest is no number from 1 to {LONGEST}")
        with self._changed:
            self._refuse_if_taken(former)
            self._until_nothing_is_written()
            self._refuse_if_taken(former)  # by a run that waited as well
            self._end()
            self._session, self._heard, self._longest = session, time.monotonic(), longest
            if hasattr(self.sampler, "longest"):
                self.sampler.longest = longest
        return {"session": session}

    def end_session(self, session: str) -> dict[str, str]:
        with self._changed:
            self._check(session)
            self._asked, self._owed = [], False
            self._changed.notify_all()
            self._until_nothing_is_written()
            self._end()
        return {"message": "the server is free"}

    def renew(self, session: str) -> dict[str, str]:
        with self._changed:
            self._check(session)
        return {}

    def _check(self, session: str) -> None:
        if self.failure:
            raise Refused(500, f"its engine has failed: {self.failure}")
        if not session or session != self._session:
            raise Refused(409, "it does not know this run: it was restarted, or heard nothing of the run for too long")
        self._heard = time.monotonic()

    def _refuse_if_taken(self, former: str) -> None:
        silent = time.monotonic() - self._heard
        if self._session not in ("", former) and silent <= LEASE:
            raise Refused(409, f"another run has this server, which it asked {silent:.0f} s ago")

    def _until_nothing_is_written(self) -> None:
        if not self._changed.wait_for(lambda: not self._writing or self.failure, WEIGHTS_PATIENCE):
            raise Refused(503, "a turn is being written for too long")

    # ------------------------------------------------------------------ requests: conversations

    def converse(self, session: str, given: dict[str, Any]) -> dict[str, Any]:
        """Do all of this request or nothing; return when a turn is written, none is to be, or it takes long."""
        with self._changed:
            self._check(session)
            self._told.append(self._plan(given))
            if not self._written:
                self._owed = False
            self._in_step = given.get("in_step") is True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._written
                    or not (self._told or self._asked or self._writing)
                    or self.failure
                    or self._session != session
                ),
                LONG_POLL,
            )
            self._check(session)
            written, self._written = self._written, []
        return {"written": written}

    def _plan(self, given: dict[str, Any]) -> Callable[[], None]:
        """What the request changes among the conversations, checked as a whole; what is to be done with the sampler."""
        try:
            close = [_number(handle) for handle in given["close"]]
            opened = [(_number(handle), self._ids(ids)) for handle, ids in given["open"]]
            appended = [(_number(handle), self._ids(ids)) for handle, ids in given["append"]]
            turns = [(_number(handle), _number(seed)) for handle, seed in given["turns"]]
            params = _params(given["params"]) if turns else None
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(400, f"the request is none: {one_line(error)}") from error
        tokens = {handle: each.tokens for handle, each in self._known.items() if handle not in close}
        busy = [handle for handle, each in self._known.items() if each.busy]
        for handle, ids in opened:
            if handle in tokens or not ids:
                raise Refused(400, f"conversation {handle} cannot be opened")
            tokens[handle] = len(ids)
        for handle, ids in appended:
            tokens[handle] = tokens.get(handle, LONGEST) + len(ids)
        new = params.max_new_tokens if params else 0
        for handle in [handle for handle, _ in appended] + [handle for handle, _ in turns]:
            if handle not in tokens or handle in busy or tokens[handle] + new > self._longest:
                raise Refused(409, f"conversation {handle} is not open, is being written in, or becomes too long")
        if set(close) - set(self._known) or set(close) & set(busy) or len(set(close)) < len(close):
            raise Refused(409, "a conversation that is to be closed is not open, or is being written in")
        if len(dict(turns)) < len(turns) or len(tokens) > MOST_CONVERSATIONS:
            raise Refused(400, "two turns of one conversation, or too many conversations")

        for handle in close:
            del self._known[handle]
        for handle, _ in opened:
            self._known[handle] = Conversation(0)
        for handle in tokens:
            self._known[handle].tokens = tokens[handle]
        for handle, _ in appended + turns:
            self._known[handle].used = time.monotonic()
        for handle, _ in turns:
            self._known[handle].busy = True

        def do() -> None:
            self.sampler.close([self._own.pop(handle) for handle in close])
            names = [handle for handle, _ in opened]
            self._own.update(zip(names, self.sampler.open([ids for _, ids in opened]), strict=True))
            for handle, ids in appended:
                self.sampler.append(self._own[handle], ids)
            if params is not None:
                self._asked += [Asked(handle, seed, params) for handle, seed in turns]

        return do

    def _ids(self, given: Any) -> list[int]:
        known = range(self.vocabulary)
        if not (isinstance(given, list) and all(type(token) is int and token in known for token in given)):
            raise ValueError(f"token ids are numbers below {self.vocabulary}")
        return given

    # ------------------------------------------------------------------ requests: weights

    def pause(self, session: str) -> dict[str, str]:
        with self._changed:
            self._check(session)
            self._paused = True
            self._changed.notify_all()
            self._until_nothing_is_written()
        return {"status": "paused"}

    def resume(self, session: str) -> dict[str, str]:
        with self._changed:
            self._check(session)
            self._paused = False
            self._changed.notify_all()
        return {"status": "resumed"}

    def start_weight_update(self, session: str) -> dict[str, str]:
        with self._changed:
            self._check(session)
            self._received = {}
        return {"message": "weight update started"}

    def update_weights(self, session: str, body: bytes, checksum: str) -> dict[str, str]:
        """Tensors, kept beside those in use until the update is finished."""
        with self._changed:
            self._check(session)
        if digest(body) != checksum:
            raise Refused(400, "the tensors do not have the checksum that was sent with them")
        try:
            tensors = load(body)
        except Exception as error:  # what safetensors raises has no common type
            raise Refused(400, f"the body is not of safetensors: {one_line(error)}") from error
        for name, tensor in tensors.items():
            if name not in self.parameters or tensor.shape != self.parameters[name].shape:
                raise Refused(400, f"{name:.100} is no tensor of this model, or has another shape")
            if tensor.dtype not in FLOATS or not tensor.isfinite().all():
                raise Refused(400, f"{name:.100} has nan or infinite numbers in it, or is of {tensor.dtype}")
        with self._changed:
            self._check(session)
            if self._received is None:
                raise Refused(409, "no weight update has been started")
            self._received |= tensors
        return {"message": f"{len(tensors)} tensors"}

    def finish_weight_update(self, session: str, version: Any) -> dict[str, str]:
        """The tensors replace those in use once the turns that are being written have ended."""
        if not (isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) < 16):
            raise Refused(400, "weight_version is no number, as text")
        with self._changed:
            self._check(session)
            received, self._received = self._received, None
            if received is None or received.keys() != self.parameters.keys():
                missing = len(self.parameters) - len(received or ())
                raise Refused(409, f"{missing} tensors have not been sent: begin with start_weight_update")
            self._renewed = received, int(version)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._renewed is None or self.failure, WEIGHTS_PATIENCE):
                raise Refused(503, "a turn is being written for too long")
            self._check(session)
        return {"weight_version": version}


def _number(given: Any) -> int:
    if not (type(given) is int and 0 <= given < 1 << 63):
        raise ValueError(f"{given!r:.40} is no number from 0 to 2^63")
    return given


def _params(given: Any) -> SamplingParams:
    """Sampling parameters from JSON, within what the engine can compute with."""
    params = SamplingParams(**given)
    for each in fields(params):
        value = getattr(params, each.name)
        if type(value) is not int and (each.type == "int" or type(value) is not float):
            raise TypeError(f"{each.name} is {value!r:.40}")
    inside = params.max_new_tokens > 0 and params.top_k >= 0
    inside = inside and (params.temperature == 0 or 1e-5 <= params.temperature < 1e6)  # below it logits overflow
    if not (inside and 0 < params.top_p <= 1 and 0 < params.repetition_penalty < 1e6):
        raise ValueError("sampling parameters beyond their limits")
    return params
