"""How do agent programs play?  They run side by side, and what they ask for is written together."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial

from posttrain.rollout.agents.game import AgentGame, PendingTurn
from posttrain.rollout.agents.programs import GRACE, ProgramEnd, RunningProgram
from posttrain.rollout.agents.requests import Asked
from posttrain.rollout.agents.server import AgentServer, server_of
from posttrain.rollout.engines.base import Sampler, TurnRequest
from posttrain.types import Completion, SamplingParams, Trajectory

TOGETHER = 0.02  # seconds to wait for more requests before an idle engine begins to write

Event = tuple[AgentGame, Asked | ProgramEnd]


def play_programs(
    sampler: Sampler,
    games: Sequence[AgentGame],
    params: SamplingParams,
    slots: int,
    ended: Callable[[Trajectory], None],
) -> None:
    """Play these episodes to their ends. They are of one environment, or of several with the same limits.

    Args:
        slots: how many are played at a time, at most as many as the agent's `parallel`.
        ended: is called with each trajectory when its program has ended; its reward is still missing.
    """
    Programs(sampler, params, slots, ended).play(list(games))


class Programs:
    """Programs that run, and the turns that are written for them. Everything but `_inbox` belongs to one thread."""

    def __init__(
        self, sampler: Sampler, params: SamplingParams, slots: int, ended: Callable[[Trajectory], None]
    ) -> None:
        self._sampler, self._params, self._slots, self._ended = sampler, params, slots, ended
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._keys: dict[AgentGame, tuple[AgentServer, str]] = {}  # of those whose program runs
        self._waiting: list[PendingTurn] = []  # for a place
        self._games: list[AgentGame] = []  # that have not been started yet, the next one last
        self._writing: dict[int, PendingTurn] = {}  # by the handle of their conversation
        self._idle: dict[int, PendingTurn] = {}  # the last turns of open conversations, the oldest first

    def play(self, games: list[AgentGame]) -> None:
        self._games = games[::-1]
        try:
            self._start_next()
            while self._keys:
                if requests := self._requests(self._wait()):
                    self._sampler.converse(requests, self._params, self._then)
        finally:
            running = [game.program for game in self._keys if game.program]
            for program in running:
                program.stop()
            for program in running:
                program.join(2 * GRACE)

    def _start_next(self) -> None:
        while self._games and len(self._keys) < min(self._slots, self._games[-1].agent.parallel):
            self._start(self._games.pop())

    def _start(self, game: AgentGame) -> None:
        server = server_of(os.getpid())
        key = server.admit(game, lambda game, asked: self._inbox.put((game, asked)))
        self._keys[game] = server, key
        ended = partial(self._report, game)
        game.program = RunningProgram(game.agent, game.env.row, server.environment(key), ended)
        game.program.start()

    def _report(self, game: AgentGame, outcome: ProgramEnd) -> None:
        self._inbox.put((game, outcome))

    def _wait(self) -> list[Event]:
        """Return what has happened; waits for it, and then shortly for more."""
        events = [self._inbox.get()]
        until = time.monotonic() + TOGETHER
        while (left := until - time.monotonic()) > 0:
            try:
                events.append(self._inbox.get(timeout=left))
            except queue.Empty:
                break
        return events

    def _now(self) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                events.append(self._inbox.get_nowait())
            except queue.Empty:
                return events

    def _then(self, finished: list[tuple[int, Completion]]) -> Sequence[TurnRequest]:
        # a client that repeats a request waits for the answer that has just been written
        events = [each for each in self._now() if not (isinstance(each[1], Asked) and each[0].repeats(each[1]))]
        held: list[Event] = []
        for handle, completion in finished:
            turn = self._writing.pop(handle)
            if turn.game.end_turn(turn, completion):
                turn.branch.handle = handle
                self._idle[handle] = turn
            else:
                self._sampler.close([handle])
            held += [(turn.game, asked) for asked in turn.game.held_requests()]
        return self._requests(held + events)

    def _requests(self, events: Sequence[Event]) -> list[TurnRequest]:
        """Return the turns to write for what has happened, and for what was asked before and has a place now."""
        requests: list[TurnRequest] = []
        while True:
            for game, event in events:
                if isinstance(event, ProgramEnd):
                    self._end(game, event)
                elif (turn := game.begin_turn(event)) is not None:
                    self._waiting.append(turn)
            events = []
            while self._waiting and len(self._writing) < self._slots and not events:
                turn = self._waiting.pop(0)
                if turn.game.over or not turn.wanted:
                    turn.game.drop_turn(turn)
                    events = [(turn.game, asked) for asked in turn.game.held_requests()]
                else:
                    handle = self._opened(turn)
                    self._writing[handle] = turn
                    requests.append((handle, turn.seed))
            if not events:
                return requests

    def _opened(self, turn: PendingTurn) -> int:
        """Return the conversation of a turn, with its ids. At most `slots` are open; an idle one makes room."""
        handle, turn.branch.handle = turn.branch.handle, None  # until its answer is written
        if handle is not None:
            del self._idle[handle]
            self._sampler.append(handle, turn.ids[len(turn.ids) - turn.new :])
            return handle
        if len(self._writing) + len(self._idle) >= self._slots:
            self._close(next(iter(self._idle)))
        (handle,) = self._sampler.open([turn.ids])
        return handle

    def _close(self, handle: int) -> None:
        self._idle.pop(handle).branch.handle = None
        self._sampler.close([handle])

    def _end(self, game: AgentGame, outcome: ProgramEnd) -> None:
        server, key = self._keys.pop(game)
        server.dismiss(key)
        game.end(outcome)
        game.program = None
        for handle in [handle for handle, turn in self._idle.items() if turn.game is game]:
            self._close(handle)
        self._ended(game.trajectory)
        self._start_next()
