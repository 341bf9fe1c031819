"""How do several servers write the turns of a run?  Conversations are distributed over them, and weights sent to each.

Every server writes the same tokens for the same (tokens, params, seed), and the tokens of a conversation are kept here.
So if a server is lost, its conversations continue on another one, from the turn that was being written.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from transformers import PreTrainedModel

from envs.web import FAILURES, BadStatus, send_request
from posttrain.rollout.engines.base import Histories, Then, TurnRequest
from posttrain.rollout.engines.vllm_server import BRIEF, Lost, Policy, VLLMServer
from posttrain.runtime import integers, merged_weights, runlog
from posttrain.types import Completion, SamplingParams, UserError

Weights = Iterable[tuple[str, torch.Tensor]]
CHUNK = 128 << 20  # bytes of weights in one file; a larger tensor has a file of its own
MOST_REQUESTS = 512  # at a time
HEARTBEAT = 5.0  # seconds
SILENCE = 60.0  # seconds without an answer to a heartbeat after which a server is lost
LOOK = 0.5  # seconds between two checks for lost servers


class Servers:
    """All servers of this process.

    `version` numbers the weights that they hold. `renew` and `rescue` read the policy's weights: call them on the
    thread that changes these. folder: where weights are written for the servers, which must see it at the same path.
    """

    def __init__(self, servers: Sequence[VLLMServer], policy: Policy, folder: Path) -> None:
        self.policy, self.live, self.folder = policy, list(servers), folder.resolve()
        self.lost: dict[str, tuple[VLLMServer, Lost]] = {}  # address -> the server, and why it is lost
        self.version = 0
        self._rescued: set[str] = set()  # addresses that were connected again and have written no turn since
        self._sent: list[int] = []
        self._lock, self._over, self._left_alone = threading.Lock(), threading.Event(), threading.Event()

    def connect(self) -> None:
        """Prepare all servers for this run; a UserError if one does not answer or does not fit."""
        atexit.register(self.destroy)
        for server in self.live:
            try:
                server.connect(self.policy)
            except Lost as error:
                raise UserError(
                    f"There is no vLLM server at {server.url} ({error}). Start it, as docs/serving.md says, or take"
                    " it out of rollout.servers."
                ) from error
            self._watch(server)

    def _watch(self, server: VLLMServer) -> None:
        """Send heartbeats from a thread of its own, since a server may hang."""

        def beat() -> None:
            answered = time.monotonic()
            while not self._over.wait(HEARTBEAT) and server in self.live:
                try:
                    server.ping()
                    answered = time.monotonic()
                except Lost as error:  # usually the next request fails first
                    # a server that has ended and is started again has other weights
                    ended = isinstance(error.__cause__, ConnectionRefusedError)
                    if ended or time.monotonic() - answered >= SILENCE:
                        self.lose(server, error)

        threading.Thread(target=beat, daemon=True).start()

    def lose(self, server: VLLMServer, why: Lost) -> None:
        """Continue without this server until it answers again."""
        with self._lock:
            if server in self.live:
                self.live.remove(server)
                self.lost[server.url] = (server, why)
                runlog.say(f"The vLLM server at {server.url} is lost ({why}). {len(self.live)} are left.")

    def has_written(self, server: VLLMServer) -> None:
        """Allow a server that was connected again, and has written a turn since, to be rescued once more."""
        self._rescued.discard(server.url)

    def renew(self) -> None:
        """Send the policy's weights if they have changed since they were last sent."""
        with torch.autocast(self.policy.model.device.type, enabled=False):
            now = fingerprint(self.policy.model)
            if now != self._sent:
                self.version += 1
                self._connect_again(list(self.lost))
                self._send(self.live)
                self._sent = now
        self.rescue()

    def rescue(self) -> None:
        """Connect lost servers again if no server is left; a UserError if none of them answers."""
        if self.live:
            return
        urls = [url for url in list(self.lost) if url not in self._rescued]
        self._rescued.update(urls)
        if connected := self._connect_again(urls):
            with torch.autocast(self.policy.model.device.type, enabled=False):
                self._send(connected)
        if not self.live:
            raise self._none_left()

    def _none_left(self) -> UserError:
        reasons = "; ".join(f"{url}: {why}" for url, (_, why) in list(self.lost.items()))
        return UserError(
            f"No vLLM server is left ({reasons}). Start them again, then continue from the last checkpoint"
            " with --resume."
        )

    def wait(self) -> None:
        """Wait for a `rescue` on the thread that changes the weights; a UserError once it has called `leave_alone`."""
        while not self.live:
            if self._left_alone.wait(LOOK):
                raise self._none_left()

    def leave_alone(self) -> None:
        """Make `wait` fail from now on: servers are not rescued any more."""
        self._left_alone.set()

    def _connect_again(self, urls: Sequence[str]) -> list[VLLMServer]:
        """Connect these lost servers; return those that answer and fit the run."""
        connected: list[VLLMServer] = []
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            answering = [url for url, answers in zip(urls, pool.map(_answers, urls), strict=True) if answers]
        for url in answering:
            server = copy.copy(self.lost[url][0])
            with suppress(Lost, UserError):
                server.connect(self.policy)
                with self._lock:
                    del self.lost[url]
                    self.live.append(server)
                self._watch(server)
                connected.append(server)
                runlog.say(f"The vLLM server at {url} is back.")
        return connected

    def _send(self, servers: Sequence[VLLMServer]) -> None:
        """Send the policy's weights to these servers."""
        if any(server.nccl is None for server in servers):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            for number, chunk in enumerate(chunks(merged_weights(self.policy.model))):
                save_file(chunk, self.folder / f"part-{number}.safetensors")
        self._all(lambda server: server.update(self.folder, self.version), servers)
        shutil.rmtree(self.folder, ignore_errors=True)

    def destroy(self) -> None:
        """Leave the servers to other runs."""
        self._over.set()
        self._left_alone.set()
        for server in self.live:
            with suppress(Lost):
                server.disconnect()
        self.live = []

    def _all(self, do: Callable[[VLLMServer], None], servers: Sequence[VLLMServer]) -> None:
        """Run `do` on each of these live servers in parallel; those on which it fails are lost."""
        futures: dict[VLLMServer, Future[None]] = {server: Future() for server in servers if server in self.live}

        def run(server: VLLMServer, future: Future[None]) -> None:
            try:
                future.set_result(do(server))
            except BaseException as error:
                future.set_exception(error)

        for each in futures.items():  # not a pool, which waits for its threads at the end: a server may hang
            threading.Thread(target=run, args=each, daemon=True).start()
        for server, future in futures.items():
            while server in self.live and not wait([future], LOOK).done:
                pass
            if future.done():
                try:
                    future.result()
                except Lost as error:
                    self.lose(server, error)


def _answers(url: str) -> bool:
    """Return whether a server answers at this address, with any status."""
    try:
        send_request(f"{url}/health", None, BRIEF)
    except BadStatus:
        return True
    except FAILURES:
        return False
    return True


def fingerprint(model: PreTrainedModel) -> list[int]:
    """Return a number for each parameter, the sum of its bits as integers, which an optimizer step changes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().view(kinds[p.element_size()]).sum(dtype=torch.int64) for p in model.parameters()]
    return integers(torch.stack(sums))


def chunks(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Yield these tensors in the CPU's memory, at most CHUNK bytes or one tensor at a time."""
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
    """An engine that distributes conversations over servers; adjacent ones, which often share a prompt, go to the same.

    ahead: the thread that changes the weights sends them, with `Servers.renew`, while turns are being written. If
    False, they are sent at the beginning of each `converse`.
    """

    def __init__(self, servers: Servers, *, ahead: bool = False) -> None:
        super().__init__()
        self.servers, self.ahead = servers, ahead
        self._home: dict[int, VLLMServer] = {}
        self._seeds: dict[int, int] = {}  # of the turns that are not written yet
        self._unsent: list[int] = []  # conversations whose turn no server has been asked for

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        handles = super().open(prompts)
        self._settle(handles)
        return handles

    def close(self, handles: Sequence[int]) -> None:
        super().close(handles)
        for handle in handles:
            del self._home[handle]

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        if not self.ahead:
            self.servers.renew()
        requests: dict[Future[Completion], tuple[VLLMServer, int]] = {}
        with ThreadPoolExecutor(MOST_REQUESTS) as pool:
            self._begin(turns)
            while self._seeds:
                if not self.ahead:
                    self.servers.rescue()
                self._move()
                for handle in self._unsent:
                    server = self._home[handle]
                    request = pool.submit(server.ask, self._ids[handle], self._seeds[handle], params)
                    requests[request] = server, handle
                self._unsent = []
                done = wait(requests, LOOK, FIRST_COMPLETED).done  # empty after LOOK: a server may have been lost
                written: list[tuple[int, Completion]] = []
                for request in [request for request in requests if request in done]:
                    written += self._written(*requests.pop(request), request)
                if written:
                    self._begin(then(written))

    def _settle(self, handles: Sequence[int]) -> None:
        """Choose a server for each conversation: equally many on each, adjacent conversations on the same one."""
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
        self._home.update(zip(handles, places, strict=False))

    def _move(self) -> None:
        """Move the conversations of lost servers, with their unfinished turns, to other servers."""
        stranded = [handle for handle, server in self._home.items() if server not in self.servers.live]
        if stranded:
            self._settle(stranded)
            waiting = set(self._unsent)
            self._unsent += [handle for handle in stranded if handle in self._seeds and handle not in waiting]

    def _begin(self, turns: Sequence[TurnRequest]) -> None:
        self._seeds.update(turns)
        self._unsent += [handle for handle, _ in turns]

    def _written(self, server: VLLMServer, handle: int, request: Future[Completion]) -> list[tuple[int, Completion]]:
        """Return the turn of a request, unless the request failed or another server writes this turn by now."""
        try:
            completion = request.result()
        except Lost as error:
            self.servers.lose(server, error)
            return []
        self.servers.has_written(server)
        if handle not in self._seeds or self._home[handle] is not server:
            return []
        del self._seeds[handle]
        self._ids[handle].extend(completion.ids)
        return [(handle, completion)]
