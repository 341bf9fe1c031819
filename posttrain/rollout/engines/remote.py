"""What if the model plays elsewhere?  Conversations over several servers, each of which is given the policy's weights.

Every server writes the same tokens for the same (tokens, params, seed), and what a conversation consists of is known
here. So one whose server is lost goes on at another one, with the turn that was under way, and nothing is played again.
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
from safetensors.torch import save_file
from transformers import PreTrainedModel

from envs.web import FAILURES, BadStatus, send_request
from posttrain.rollout.engines.base import Histories, Then, TurnRequest
from posttrain.rollout.engines.vllm_server import BRIEF, Lost, Policy, VLLMServer
from posttrain.runtime import merged_weights, runlog
from posttrain.types import Completion, SamplingParams, UserError

Weights = Iterable[tuple[str, torch.Tensor]]
CHUNK = 128 << 20  # bytes of weights that are written into one file, or one tensor that is larger
MOST_REQUESTS = 512  # under way at a time
HEARTBEAT = 5.0  # seconds
SILENCE = 60.0  # seconds after which a server that shows no sign of life is lost, whatever else it was asked
LOOK = 0.5  # seconds between two looks for servers that are all lost


class Servers:
    """All servers of this process.

    version: of the weights that they hold, a number that grows by one with each change. `renew` and `rescue` read the
    policy's weights, so they are for the thread that changes them. folder: where weights lie while the servers read
    them; they must see it at the same path.
    """

    def __init__(self, servers: Sequence[VLLMServer], policy: Policy, folder: Path) -> None:
        self.policy, self.live, self.folder = policy, list(servers), folder.resolve()
        self.lost: dict[str, tuple[VLLMServer, Lost]] = {}  # by address, and why
        self.version = 0
        self._rescued: set[str] = set()  # addresses that were tried again and have written nothing since
        self._sent: list[int] = []
        self._lock, self._over, self._left_alone = threading.Lock(), threading.Event(), threading.Event()

    def connect(self) -> None:
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
            self._watch(server)

    def _watch(self, server: VLLMServer) -> None:
        """Ask regularly for a sign of life; in a thread of its own, as a server may hang."""

        def beat() -> None:
            heard = time.monotonic()
            while not self._over.wait(HEARTBEAT) and server in self.live:
                try:
                    server.ping()
                    heard = time.monotonic()
                except Lost as error:  # most often the next request to it says so first
                    if time.monotonic() - heard >= SILENCE:
                        self.lose(server, error)

        threading.Thread(target=beat, daemon=True).start()

    def lose(self, server: VLLMServer, why: Lost) -> None:
        """Go on without this server, for now at least."""
        with self._lock:
            if server in self.live:
                self.live.remove(server)
                self.lost[server.url] = (server, why)
                runlog.say(f"The rollout server at {server.url} is lost ({why}). {len(self.live)} are left.")

    def has_written(self, server: VLLMServer) -> None:
        self._rescued.discard(server.url)

    def renew(self) -> None:
        """Send the policy's weights where they have changed since they were last sent."""
        with torch.autocast(self.policy.model.device.type, enabled=False):
            found = fingerprint(self.policy.model)
            if found != self._sent:
                self.version += 1
                self._connect_again(list(self.lost))
                self._send(self.live)
                self._sent = found
        self.rescue()

    def rescue(self) -> None:
        """If no server is left, try each of them once more; a UserError if there is still none."""
        if self.live:
            return
        urls = [url for url in list(self.lost) if url not in self._rescued]
        self._rescued.update(urls)
        if back := self._connect_again(urls):
            with torch.autocast(self.policy.model.device.type, enabled=False):
                self._send(back)
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

    def _connect_again(self, urls: Sequence[str]) -> list[VLLMServer]:
        """Those of these lost servers that answer and can play for this run."""
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
                self._watch(server)
                back.append(server)
                runlog.say(f"The rollout server at {url} is back.")
        return back

    def _send(self, servers: Sequence[VLLMServer]) -> None:
        """Give these servers the policy's weights."""
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
        """This with each of them that is not lost, side by side; one with which it cannot be done is lost."""
        asked: dict[VLLMServer, Future[None]] = {server: Future() for server in servers if server in self.live}

        def settle(server: VLLMServer, done: Future[None]) -> None:
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
        send_request(f"{url}/health", None, BRIEF)
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
    beginning of each `converse`, as they are then.
    """

    def __init__(self, servers: Servers, *, ahead: bool = False) -> None:
        super().__init__()
        self.servers, self.ahead = servers, ahead
        self._home: dict[int, VLLMServer] = {}
        self._seeds: dict[int, int] = {}  # of each turn that is not written yet
        self._unasked: list[int] = []  # the conversations of those that no server has been asked for

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
        asked: dict[Future[Completion], tuple[VLLMServer, int]] = {}
        with ThreadPoolExecutor(MOST_REQUESTS) as pool:
            self._begin(turns)
            while self._seeds:
                if not self.ahead:
                    self.servers.rescue()
                self._move()
                for handle in self._unasked:
                    server = self._home[handle]
                    request = pool.submit(server.ask, self._ids[handle], self._seeds[handle], params)
                    asked[request] = server, handle
                self._unasked = []
                done = wait(asked, LOOK, FIRST_COMPLETED).done  # or a server has been lost meanwhile
                written: list[tuple[int, Completion]] = []
                for request in [request for request in asked if request in done]:
                    written += self._written(*asked.pop(request), request)
                if written:
                    self._begin(then(written))

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
        self._home.update(zip(handles, places, strict=False))

    def _move(self) -> None:
        """Conversations of servers that are lost go on at others, with the turns that were asked for."""
        stranded = [handle for handle, server in self._home.items() if server not in self.servers.live]
        if stranded:
            self._settle(stranded)
            waiting = set(self._unasked)
            self._unasked += [handle for handle in stranded if handle in self._seeds and handle not in waiting]

    def _begin(self, turns: Sequence[TurnRequest]) -> None:
        self._seeds.update(turns)
        self._unasked += [handle for handle, _ in turns]

    def _written(self, server: VLLMServer, handle: int, request: Future[Completion]) -> list[tuple[int, Completion]]:
        """The turn, if there is one and no other server writes it by now."""
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
