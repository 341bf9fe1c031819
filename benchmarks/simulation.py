"""How long does an iteration of phase 3 take on many devices?  An event simulation of players and learners.

Three ways to play are told apart, after which the update is the same:

    lockstep      all conversations of a device write their turn, then all environments answer; nobody goes ahead
    refilled      the slot engine: a row that is done makes room while the others go on (rollout/engines/slots.py)
    asynchronous  some devices play all the time and others learn; the groups of a step are learnt from in that step,
                  `staleness` updates after they were begun at most (bounded staleness, AReaL, arXiv 2505.24298).
                  Every turn is written by one version: players end those under way before they take up new weights,
                  and the learners wait for that (posttrain/rollout/engines/remote.py)

The first two end in a barrier: every device waits for the one that plays longest. Time is that of the engine's calls: a
device reads what is new, then writes until enough of its rows are done, as the engine does. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

Mode = Literal["lockstep", "refilled", "asynchronous"]
REFILL_BELOW = 0.8  # as in posttrain/rollout/engines/slots.py, which imports torch


class Turn(NamedTuple):
    """Tokens that a turn reads (prompt, or what the environment said) and then writes.

    copied: of a prompt that another episode of the group has read; they are there and cost nothing.
    """

    read: int
    write: int
    copied: int = 0


Episode = Sequence[Turn]
Group = Sequence[Episode]


class Costs(NamedTuple):
    """Seconds of one device.

    A forward pass that writes one token in each of B rows, of which the longest has L, takes
    step + B * (row + L * context).
    """

    step: float
    row: float = 0.0
    context: float = 0.0
    read: float = 0.0  # a token of a prompt
    turn: float = 0.0  # a turn's environment, one after another
    update: float = 0.0  # an update without a token: gradients exchanged, the optimizer's step
    learn: float = 0.0  # a token that is learnt from
    transfer: float = 0.0  # new weights on a player


class Layout(NamedTuple):
    """Which devices there are and what they do.

    learners: of an asynchronous run, those that do not play; else every device plays and learns. slots: conversations
    of a device at once. staleness: the updates that a group may be old. cores: processes that run at full speed; more
    of them share these evenly, as processes of a CPU do.
    """

    devices: int
    learners: int = 0
    slots: int = 256
    staleness: int = 1
    cores: float = math.inf


class Outcome(NamedTuple):
    """Means over the iterations that were counted.

    seconds: of an iteration. busy: share of all devices' time in which they played or learnt. stale: updates between
    the begin of a step's episodes and the update that learns from them, mean and largest.
    """

    seconds: float
    busy: float
    stale: float
    stalest: int


@dataclass
class _Row:
    """A conversation on a device."""

    step: int
    turns: Episode
    at: int = 0  # its turn
    length: int = 0
    left: int = 0  # tokens of the turn to be written
    unread: bool = True


@dataclass
class _Player:
    waiting: deque[_Row] = field(default_factory=deque)
    rows: list[_Row] = field(default_factory=list)
    delay: float = 0.0  # before its next call: weights arrive
    calling: bool = False


def call(player: _Player, waiting: deque[_Row], slots: int, costs: Costs, lockstep: bool) -> float:
    """The seconds of one call of the engine, after which `left` is 0 in the rows that are done."""
    while waiting and len(player.rows) < slots:
        player.rows.append(waiting.popleft())
    rows, seconds = player.rows, player.delay
    player.delay = 0.0
    for row in rows:
        if row.unread:
            turn = row.turns[row.at]
            row.length += turn.copied + turn.read
            row.left, row.unread = turn.write, False
            seconds += turn.read * costs.read
    count = len(rows)
    enough = 0.0 if lockstep else REFILL_BELOW * count
    done = count if lockstep else next(n for n in range(1, count + 1) if count - n < max(1.0, enough))
    tokens = sorted(row.left for row in rows)[done - 1]
    longest = max(row.length for row in rows)
    # the sum over t = 1 ... tokens of step + count * (row + (longest + t) * context)
    seen = tokens * longest + tokens * (tokens + 1) / 2
    seconds += tokens * (costs.step + count * costs.row) + count * costs.context * seen
    for row in rows:
        written = min(tokens, row.left)
        row.left, row.length = row.left - written, row.length + written
    return seconds + costs.turn * sum(row.left == 0 for row in rows)


def hear(player: _Player) -> list[int]:
    """After a call: rows that are done go on to their next turn or leave; the steps of those that left."""
    left = []
    for row in player.rows:
        if row.left == 0 and not row.unread:
            row.at, row.unread = row.at + 1, True
            if row.at == len(row.turns):
                left.append(row.step)
    player.rows = [row for row in player.rows if row.at < len(row.turns)]
    return left


def tokens_of(group: Group) -> int:
    """What the update reads: every token of every episode."""
    return sum(sum(turn) for episode in group for turn in episode)


class _Clock:
    """Finishing times of processes that share cores evenly: the next to finish is the one with the least work left."""

    def __init__(self, cores: float) -> None:
        self.cores, self.now, self.worked = cores, 0.0, 0.0
        self.heap: list[tuple[float, int, int]] = []
        self.count = 0

    def begin(self, who: int, seconds: float) -> None:
        heappush(self.heap, (self.worked + seconds, self.count, who))
        self.count += 1

    def next(self) -> int:
        slower = max(1.0, len(self.heap) / self.cores)
        until, _, who = heappop(self.heap)
        self.now += (until - self.worked) * slower
        self.worked = until
        return who


def simulate(mode: Mode, iterations: Sequence[Sequence[Group]], costs: Costs, layout: Layout, skip: int = 0) -> Outcome:
    """Play and learn from these groups; the first `skip` iterations are not counted."""
    if mode == "asynchronous":
        return _asynchronous(iterations, costs, layout, skip)
    seconds, busy = [], []
    for groups in iterations:
        clock, work = _Clock(layout.cores), 0.0
        share = [groups[part(i, layout.devices, len(groups))] for i in range(layout.devices)]
        players = [_Player(deque(_Row(0, e) for group in own for e in group)) for own in share]
        working = [player for player in players if player.waiting]
        for who, player in enumerate(working):
            clock.begin(who, taken := call(player, player.waiting, layout.slots, costs, mode == "lockstep"))
            work += taken
        while clock.heap:
            player = working[who := clock.next()]
            hear(player)
            if player.rows or player.waiting:
                clock.begin(who, taken := call(player, player.waiting, layout.slots, costs, mode == "lockstep"))
                work += taken
        learning = costs.learn * sum(map(tokens_of, groups)) / layout.devices + costs.update
        slower = max(1.0, layout.devices / layout.cores)
        seconds.append(clock.now + learning * slower)
        busy.append(work + learning * layout.devices)
    counted = sum(seconds[skip:])
    return Outcome(counted / len(seconds[skip:]), sum(busy[skip:]) / counted / layout.devices, 0.0, 0)


def part(index: int, of: int, count: int) -> slice:
    """Neighbouring groups, as `posttrain.runtime.parallel.mine` deals them out."""
    return slice(index * count // of, (index + 1) * count // of)


def _asynchronous(iterations: Sequence[Sequence[Group]], costs: Costs, layout: Layout, skip: int) -> Outcome:
    players = [_Player() for _ in range(layout.devices - layout.learners)]
    learner = len(players)  # its number: all learners work as one
    clock, waiting = _Clock(layout.cores), deque[_Row]()
    playing = [sum(map(len, groups)) for groups in iterations]  # episodes of each step that are not over
    step_begun_at: list[int] = []  # the version of the weights when a step's first episode began
    version, learning, work = 0, False, 0.0
    ended, work_then = [0.0], [0.0]
    outdated: set[int] = set()  # players that have not taken up the newest weights

    def take_up(who: int) -> float:
        """Seconds of a call that ends the turns under way before the weights change; 0 when none is left to end."""
        rows = [row for row in players[who].rows if row.left]
        if rows:
            return call(_Player(rows=rows), deque(), 0, costs, lockstep=True)
        outdated.discard(who)
        players[who].delay += costs.transfer
        return 0.0

    def start() -> None:
        """Everybody who can do something does."""
        nonlocal learning, work
        while len(step_begun_at) < min(len(iterations), version + layout.staleness + 1):
            step = len(step_begun_at)
            waiting.extend(_Row(step, episode) for group in iterations[step] for episode in group)
            step_begun_at.append(version)
        for who, player in enumerate(players):
            if player.calling:
                continue
            if who in outdated and (taken := take_up(who)):
                clock.begin(who, taken)
                player.calling, work = True, work + taken
            elif player.rows or waiting:
                # an even share of what waits, so that the last episodes are not all on one device
                slots = min(layout.slots, len(player.rows) + math.ceil(len(waiting) / len(players)))
                clock.begin(who, taken := call(player, waiting, slots, costs, lockstep=False))
                player.calling, work = True, work + taken
        if not learning and not outdated and version < len(iterations) and playing[version] == 0:
            tokens = sum(map(tokens_of, iterations[version]))
            clock.begin(learner, taken := costs.learn * tokens / layout.learners + costs.update)
            learning, work = True, work + taken * layout.learners

    start()
    while clock.heap:
        who = clock.next()
        if who == learner:
            version, learning = version + 1, False
            ended.append(clock.now)
            work_then.append(work)
            outdated = set(range(len(players)))
        else:
            players[who].calling = False
            for step in hear(players[who]):
                playing[step] -= 1
        start()
    seconds = ended[-1] - ended[skip]
    busy = (work_then[-1] - work_then[skip]) / seconds / layout.devices
    ages = [step - begun for step, begun in enumerate(step_begun_at)][skip:]
    return Outcome(seconds / len(ages), busy, sum(ages) / len(ages), max(ages))
