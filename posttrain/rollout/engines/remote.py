"""What if the model plays elsewhere?  Conversations over several servers, each of which is given the policy's weights.

Every server writes the same tokens for the same (tokens, params, seed), and what a conversation consists of is known
here. So one whose server is lost goes on at another one, with the turn that was under way, and nothing is played again.
"""

from __future__ import annotations

import atexit
import copy
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from envs.web import FAILURES, BadStatus, ask
from posttrain.rollout.engines.base import Histories, Then, TurnRequest
from posttrain.runtime import merged_weights, runlog
from posttrain.types import Completion, SamplingParams, UserError

Weights = Iterable[tuple[str, torch.Tensor]]
CHUNK = 128 << 20  # bytes of weights that are sent together, or one tensor that is larger
MOST_REQUESTS = 512  # under way at a time
HEARTBEAT = 5.0  # seconds
SILENCE = 60.0  # seconds after which a server that shows no sign of life is lost, whatever else it was asked
BRIEF = 5.0  # seconds for an answer for which nothing has to be computed
LOOK = 0.5  # seconds between two looks for servers that are all lost


class Lost(Exception):
    """A server that cannot be used as it is, and why. forgot: it knows nothing of this run, or something else of it."""

    def __init__(self, why: str, forgot: bool = False) -> None:
        super().__init__(why)
        self.forgot = forgot


class Turn(NamedTuple):
    """A turn to be written after these ids."""

    handle: int
    seed: int
    ids: list[int]


@dataclass
class Work:
    """What a server is told in one request: conversations that end, begin and go on, and the turns to be written."""

    close: list[int] = field(default_factory=list)
    open: dict[int, list[int]] = field(default_factory=dict)
    append: dict[int, list[int]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.close or self.open or self.append or self.turns)


class Policy(NamedTuple):
    """What a server must know, or be equal to, before it can play for a run."""

    model: PreTrainedModel
    tokenizer: Any
    stop_ids: list[int]
    pad_id: int
    longest: int  # tokens of a conversation

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in merged_weights(self.model)}


class Server(Protocol):
    """One server, asked from several threads. Each method raises `Lost` where there is no answer, or a wrong one."""

    url: str
    keeps: bool  # whether it keeps conversations: then one request at a time has all that is new
    exact: bool  # whether it computes to the bit as this process does, where both do so in float32

    def connect(self, policy: Policy) -> None:
        """Make it play for this run; a UserError where it cannot."""
        ...

    def ask(self, work: Work, params: SamplingParams | None, in_step: bool) -> list[tuple[int, Completion]]:
        """Turns that it has written; maybe none yet, of those that it was asked for before.

        in_step: it waits for what follows on the turns it has written before it writes on, as a local engine does.
        """
        ...

    def disconnect(self) -> None:
        """Leave it to other runs."""
        ...

    def still_here(self) -> None:
        """Say that the run goes on, however long it asks for nothing."""
        ...

    def pause(self) -> None:
        """Return when nothing is being written; what is asked for from now on waits."""
        ...

    def resume(self) -> None: ...


S = TypeVar("S", bound=Server)


class Servers(Generic[S]):
    """All servers of this process. The five methods of the protocol `weight_transfer` of TRL's async_grpo, and `renew`.

    version: of the weights that they hold, a number that grows by one with each change. `renew` and `rescue` read the
    policy's weights, so they are for the thread that changes them.
    """

    def __init__(self, servers: Sequence[S], policy: Policy) -> None:
        self.policy, self.live = policy, list(servers)
        self.lost: dict[str, tuple[S, Lost]] = {}  # by address, and why
        self.version = 0
        self._rescued: set[str] = set()  # addresses that were tried again and have written nothing since
        self._sent: list[int] = []
        self._lock, self._over, self._left_alone = threading.Lock(), threading.Event(), threading.Event()

    def init_weight_transfer(self) -> None:
        """Make all of them play for this run; a UserError where one does not answer or does not fit."""
        atexit.register(self.destroy)
        for server in self.live:
            try:
                server.connect(self.policy)
            except Lost as error:
                raise UserError(
                    f"There is no rollout server at {server.url} ({error}). Start it, as docs/serving.md says, or take"
                    " it out of rollout.servers."
                ) from error
            self._keep(server)

    def _keep(self, server: S) -> None:
        """Say regularly that the run goes on; in a thread of its own, as a server may hang."""

        def beat() -> None:
            heard = time.monotonic()
            while not self._over.wait(HEARTBEAT) and server in self.live:
                try:
                    server.still_here()
                    heard = time.monotonic()
                except Lost as error:  # most often the next request to it says so first
                    if time.monotonic() - heard >= SILENCE:
                        self.lose(server, error)

        threading.Thread(target=beat, daemon=True).start()

    def lose(self, server: S, why: Lost) -> None:
        """Go on without this server, for now at least."""
        with self._lock:
            if server in self.live:
                self.live.remove(server)
                self.lost[server.url] = (server, why)
                runlog.say(f"The rollout server at {server.url} is lost ({why}). {len(self.live)} are left.")

    def has_written(self, server: S) -> None:
        self._rescued.discard(server.url)

    def renew(self) -> None:
        """Send the policy's weights where they have changed since they were last sent."""
        with torch.autocast(self.policy.model.device.type, enabled=False):
            found = fingerprint(self.policy.model)
            if found != self._sent:
                self.version += 1
                self.send_weights(merged_weights(self.policy.model))
                self._sent = found
        self.rescue()

    def send_weights(self, iterator: Weights) -> None:
        """Give them all these weights. A server that was lost and answers again is one of them."""
        self._connect_again(list(self.lost))
        self._send(iterator, self.live)

    def rescue(self) -> None:
        """Try servers once again that have forgotten this run, or all if none is left; a UserError if none is then.

        A pause of this process that is longer than LEASE makes them forget it.
        """
        untried = [url for url in list(self.lost) if url not in self._rescued]
        urls = [url for url in untried if not self.live or self.lost[url][1].forgot]
        if urls:
            self._rescued.update(urls)
            if back := self._connect_again(urls):
                with torch.autocast(self.policy.model.device.type, enabled=False):
                    self._send(merged_weights(self.policy.model), back)
        if not self.live:
            raise self._none_left()

    def _none_left(self) -> UserError:
        reasons = "; ".join(f"{url}: {why}" for url, (_, why) in list(self.lost.items()))
        return UserError(
            f"No rollout server is left ({reasons}). Start them again, then go on from the last checkpoint with"
            " --resume."
        )

    def wait(self) -> None:
        """Until the thread that changes the weights has rescued a server; a UserError where it will not any more."""
        while not self.live:
            if self._left_alone.wait(LOOK):
                raise self._none_left()

    def leave_alone(self) -> None:
        """From now on nobody rescues servers for those who `wait`."""
        self._left_alone.set()

    def _connect_again(self, urls: Sequence[str]) -> list[S]:
        """Those of these lost servers that answer and can play for this run, as new ones without conversations."""
        back = []
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            answering = [url for url, answers in zip(urls, pool.map(_answers, urls), strict=True) if answers]
        for url in answering:
            server = copy.copy(self.lost[url][0])
            with suppress(Lost, UserError):
                server.connect(self.policy)
                with self._lock:
                    del self.lost[url]
                    self.live.append(server)
                self._keep(server)
                back.append(server)
                runlog.say(f"The rollout server at {url} is back.")
        return back

    def _send(self, weights: Weights, servers: Sequence[S]) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        self._all(lambda server: server.pause(), self.live)

    def resume(self) -> None:
        self._all(lambda server: server.resume(), self.live)

    def destroy(self) -> None:
        """Leave the servers to other runs."""
        self._over.set()
        self._left_alone.set()
        for server in self.live:
            with suppress(Lost):
                server.disconnect()
        self.live = []

    def _all(self, do: Callable[[S], None], servers: Sequence[S]) -> None:
        """This with each of them that is not lost, side by side; one with which it cannot be done is lost."""
        asked: dict[S, Future[None]] = {server: Future() for server in servers if server in self.live}

        def settle(server: S, done: Future[None]) -> None:
            try:
                done.set_result(do(server))
            except BaseException as error:
                done.set_exception(error)

        for each in asked.items():  # threads that nobody has to wait for: a server may hang
            threading.Thread(target=settle, args=each, daemon=True).start()
        for server, done in asked.items():
            while server in self.live and not wait([done], LOOK).done:
                pass
            if done.done():
                try:
                    done.result()
                except Lost as error:
                    self.lose(server, error)


def _answers(url: str) -> bool:
    """Whether something is there that does not hang."""
    try:
        ask(f"{url}/health", None, BRIEF)
    except BadStatus:
        return True
    except FAILURES:
        return False
    return True


def fingerprint(model: PreTrainedModel) -> list[int]:
    """A number for each parameter, the sum of its bits as integers: an optimizer step changes it."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().view(kinds[p.element_size()]).sum(dtype=torch.int64) for p in model.parameters()]
    return torch.stack(sums).tolist()


def check_logprobs(said: Completion) -> None:
    """`Lost` where a log-prob is none: the update that it goes into would be nan."""
    if not all(-math.inf < logprob <= 1e-3 for logprob in said.logprobs):  # rounding may leave one above 0
        raise Lost("a log-prob in its answer is nan, infinite or above 0")


def chunks(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """These tensors in the CPU's memory, some at a time."""
    chunk: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = tensor.to("cpu").contiguous()
        size += tensor.nbytes
    if chunk:
        yield chunk


class RemoteSampler(Histories):
    """Conversations over servers; neighbours, which often begin with the same prompt, go to the same one.

    ahead: weights are then sent by whoever changes them, while turns are being written. Without it they are sent at the
    beginning of each `converse`, as they are then, and each server writes in step with this process.
    """

    def __init__(self, servers: Servers[Any], *, ahead: bool = False) -> None:
        super().__init__()
        self.servers, self.ahead = servers, ahead
        self._home: dict[int, Server] = {}
        self._turns: dict[int, int] = {}  # the seed of each turn that is not written yet
        self._work: defaultdict[Server, Work] = defaultdict(Work)
        self._conversing = False

    @property
    def exact(self) -> bool:
        return all(server.exact for server in self.servers.live)

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        handles = super().open(prompts)
        self._settle(handles)
        return handles

    def append(self, handle: int, ids: Sequence[int]) -> None:
        super().append(handle, ids)
        self._work[self._home[handle]].append.setdefault(handle, []).extend(ids)

    def close(self, handles: Sequence[int]) -> None:
        super().close(handles)
        for handle in handles:
            work = self._work[self._home.pop(handle)]
            work.append.pop(handle, None)
            if work.open.pop(handle, None) is None:
                work.close.append(handle)
        if not self._conversing:
            self._tell_the_rest()

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        if not self.ahead:
            self.servers.renew()
        self._conversing = True
        asked: dict[Future[list[tuple[int, Completion]]], Server] = {}
        try:
            with ThreadPoolExecutor(MOST_REQUESTS) as pool:
                self._begin(turns)
                while self._turns:
                    if not self.ahead:
                        self.servers.rescue()
                    self._move()
                    for server in list(self.servers.live):
                        for work in self._requests(server, server in asked.values()):
                            asked[pool.submit(server.ask, work, params, not self.ahead)] = server
                    done = wait(asked, LOOK, FIRST_COMPLETED).done  # or a server has been lost meanwhile
                    written: list[tuple[int, Completion]] = []
                    for request in [request for request in asked if request in done]:
                        written += self._written(asked.pop(request), request)
                    if written:
                        self._begin(then(written))
        finally:
            self._conversing = False
        self._tell_the_rest()

    # ------------------------------------------------------------------ which server

    def _settle(self, handles: Sequence[int]) -> None:
        """A server for each of these conversations, so that all have as many, neighbours at the same one."""
        while not (live := list(self.servers.live)):
            if self.ahead:
                self.servers.wait()
            else:
                self.servers.rescue()
        load = dict.fromkeys(live, 0)
        for server in self._home.values():
            if server in load:
                load[server] += 1
        share = -(-(sum(load.values()) + len(handles)) // len(load))
        places = [server for server in sorted(load, key=load.__getitem__) for _ in range(share - load[server])]
        for handle, server in zip(handles, places, strict=False):
            self._home[handle] = server
            self._work[server].open[handle] = list(self._ids[handle])

    def _move(self) -> None:
        """Conversations of servers that are lost go on at others, with the turns that were asked for."""
        stranded = [handle for handle, server in self._home.items() if server not in self.servers.live]
        if stranded:
            self._settle(stranded)
            self._begin([(handle, self._turns[handle]) for handle in stranded if handle in self._turns])
        for server in [server for server in self._work if server not in self.servers.live]:
            del self._work[server]

    # ------------------------------------------------------------------ what it is asked, and says

    def _begin(self, turns: Sequence[TurnRequest]) -> None:
        for handle, seed in turns:
            self._turns[handle] = seed
            self._work[self._home[handle]].turns.append(Turn(handle, seed, self._ids[handle]))

    def _requests(self, server: Server, busy: bool) -> list[Work]:
        """What this server is to be asked now; one that keeps conversations is asked on until it has written all."""
        work = self._work[server]
        if server.keeps:
            owes = any(self._home[handle] is server for handle in self._turns)
            if busy or not (work or owes):
                return []
            self._work[server] = Work()
            return [work]
        self._work[server] = Work()
        return [Work(turns=[turn]) for turn in work.turns]

    def _written(self, server: Server, request: Future[list[tuple[int, Completion]]]) -> list[tuple[int, Completion]]:
        try:
            found = request.result()
        except Lost as error:
            self.servers.lose(server, error)
            return []
        if found:
            self.servers.has_written(server)
        written = []
        for handle, completion in found:
            if handle in self._turns and self._home[handle] is server:  # or another server writes it by now
                del self._turns[handle]
                self._ids[handle].extend(completion.ids)
                written.append((handle, completion))
        return written

    def _tell_the_rest(self) -> None:
        """Conversations that have ended are forgotten there, too."""
        for server, work in list(self._work.items()):
            if work.close and server.keeps and server in self.servers.live:
                try:
                    server.ask(work, None, False)
                except Lost as error:
                    self.servers.lose(server, error)
                self._work[server] = Work()
