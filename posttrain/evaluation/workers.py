"""How is an evaluation divided among processes?

A checkpoint that cannot be measured (it raises, its weights are not finite, its process is killed) is recorded with
the reason; the others are still measured.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from posttrain.config import EvaluateRun
from posttrain.evaluation.endpoints import why_left_out
from posttrain.evaluation.scoring import Loaded, Tick
from posttrain.evaluation.store import Outcome, Store, Unit
from posttrain.evaluation.tasks import Task
from posttrain.files import keep_standard_streams
from posttrain.runtime import runlog
from posttrain.types import Record, UserError, one_line

PRELOADED = ["posttrain.models.loading", "posttrain.rollout.episodes", "posttrain.models.forward"]
RunTask = Callable[[EvaluateRun, str, Task, Tick, Loaded], list[Record]]


@dataclass(frozen=True)
class Measurement:
    """Measures units in any process: it can be pickled."""

    cfg: EvaluateRun
    tasks: Sequence[Task]
    run: RunTask

    def rows(self, unit: Unit, tick: Tick, loaded: Loaded) -> list[Record]:
        return self.run(self.cfg, unit.checkpoint, self.tasks[unit.number], tick, loaded)

    def reason(self, unit: Unit, error: Exception) -> str:
        return reason(error, self.tasks[unit.number])


@dataclass(frozen=True)
class Results:
    """Receives rows: for the disk, the outcome in memory, and the progress bar."""

    store: Store
    outcome: Outcome
    tick: Tick

    def keep(self, unit: Unit, rows: list[Record]) -> None:
        self.store.write(unit, rows)
        self.outcome.rows[unit] = rows


def run_tasks(cfg: EvaluateRun, tasks: Sequence[Task], run: RunTask) -> Outcome:
    """Return every checkpoint's rows: read from the disk where an earlier evaluation has finished them, else measured.

    Under torchrun the units are divided among the ranks, each with its own device. Otherwise there is a process for
    every visible GPU, or `workers` processes on a CPU. Endpoints come first, and only the main process calls them.
    """
    import torch

    from posttrain.runtime import hardware, parallel

    store = Store(cfg, tasks)
    # pairs last: they are scored in float32, for which a checkpoint may have to be loaded again
    order = sorted(range(len(tasks)), key=lambda number: tasks[number].suite == "preferences")
    units = [Unit(name, number) for name in cfg.local for number in order]
    ranks = parallel.size()
    if ranks > 1:
        units = shares(units, tasks, ranks)[parallel.rank()]
    if runlog.is_main_process():  # it calls the endpoints, whose limits hold for all requests together
        units = [Unit(name, n) for name in cfg.endpoints for n in order if not why_left_out(cfg, tasks[n])] + units
    outcome = Outcome({unit: rows for unit in units if (rows := store.read(unit)) is not None})
    left = [unit for unit in units if unit not in outcome.rows]
    if outcome.rows:
        runlog.say(f"{len(outcome.rows)} of {len(units)} parts were measured before and are kept.")
    total = sum(len(tasks[unit.number].items) for unit in left)
    names = dict.fromkeys(unit.checkpoint for unit in left)
    place = hardware.resolve_device(cfg.device)
    with runlog.Progress(total, f"evaluating {len(names)} checkpoints", unit="answer") as progress:

        def tick(count: int) -> None:
            progress.update(progress.done + count)

        measurement, results = Measurement(cfg, tasks, run), Results(store, outcome, tick)
        in_this_process([unit for unit in left if unit.checkpoint in cfg.endpoints], measurement, results)
        left = [unit for unit in left if unit.checkpoint in cfg.local]
        if ranks > 1 or (place.type != "cuda" and min(cfg.workers, len(left)) <= 1):
            if place.type == "cuda":
                torch.cuda.set_device(place)
            in_this_process(left, measurement, results)
        else:
            places = visible_gpus() if place.type == "cuda" else [None] * min(cfg.workers, len(left))
            in_processes(left, measurement, results, places)
    if ranks > 1:
        for rows, failed in parallel.gather([(outcome.rows, outcome.failed)]):
            outcome.rows |= rows
            outcome.failed |= failed
    return outcome


def shares(units: Sequence[Unit], tasks: Sequence[Task], processes: int) -> list[list[Unit]]:
    """Return the units of each process, of about equal cost: each unit, largest first, goes to the smallest share."""
    divided: list[list[Unit]] = [[] for _ in range(processes)]
    costs = [0] * processes
    for unit in sorted(units, key=lambda unit: -tasks[unit.number].cost):
        least = costs.index(min(costs))
        divided[least].append(unit)
        costs[least] += tasks[unit.number].cost
    order = {unit: place for place, unit in enumerate(units)}
    return [sorted(share, key=order.__getitem__) for share in divided]


def visible_gpus() -> list[str]:
    """Return for each GPU that this process sees the CUDA_VISIBLE_DEVICES with which a process sees it alone."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else []
    count = torch.cuda.device_count()
    return names[:count] if len(names) >= count else [str(number) for number in range(count)]


def in_this_process(units: Sequence[Unit], measurement: Measurement, results: Results) -> None:
    """Measure units one after the other; those of a checkpoint that has failed are left out."""
    from envs.math_judge import MathJudge

    failed = results.outcome.failed
    with MathJudge() as judge:
        loaded = Loaded(judge, processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        for unit in units:
            if unit.checkpoint not in failed:
                try:
                    rows = measurement.rows(unit, results.tick, loaded)
                except Exception as error:  # this checkpoint fails, the others are measured
                    failed[unit.checkpoint] = measurement.reason(unit, error)
                else:
                    results.keep(unit, rows)


class _Worker:
    """A process that measures one unit after the other, on the GPU `place`, or on the CPU without one."""

    def __init__(self, measurement: Measurement, place: str | None, processes: int) -> None:
        # A fork server imports everything once. A process that uses CUDA must not be forked from one that has used it.
        context = multiprocessing.get_context("forkserver" if place is None else "spawn")
        if place is None:
            context.set_forkserver_preload(PRELOADED)
        self.pipe, other_end = context.Pipe()
        self.place, self.unit, self.checkpoint = place, None, ""
        arguments = (other_end, measurement, place, processes)
        self.process: Any = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        other_end.close()

    unit: Unit | None

    def take(self, unit: Unit) -> None:
        self.unit, self.checkpoint = unit, unit.checkpoint
        with suppress(BrokenPipeError):  # `hear` reports that the process has ended
            self.pipe.send(unit)

    def hear(self) -> int | list[Record] | str:
        """Return the next message: a number of finished rows, the rows of the unit, or the reason of a failure."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return (
                f"its process ended with exit code {self.process.exitcode}; its output is above. If it was "
                "killed for memory (-9), write workers=1 or a smaller batch_size."
            )

    def stop(self) -> None:
        """Let an idle process finish and print its last output; kill a busy one."""
        with suppress(OSError):
            if self.unit is None:
                self.pipe.send(None)
                self.process.join(5)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Any, measurement: Measurement, place: str | None, processes: int) -> None:
    """Run a worker: receive units; for each send counts of finished rows, then its rows or the reason of a failure."""
    from envs.math_judge import MathJudge

    keep_standard_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place
        os.environ.pop("LOCAL_RANK", None)
    try:
        with MathJudge() as judge:
            _measure_units(pipe, measurement, Loaded(judge, processes))
    except (BrokenPipeError, EOFError, ConnectionResetError):  # the parent has ended
        pass


def _measure_units(pipe: Any, measurement: Measurement, loaded: Loaded) -> None:
    while unit := pipe.recv():
        try:
            pipe.send(measurement.rows(unit, pipe.send, loaded))
        except (BrokenPipeError, EOFError):
            raise
        except Exception as error:
            pipe.send(measurement.reason(unit, error))


def in_processes(
    units: Sequence[Unit], measurement: Measurement, results: Results, places: Sequence[str | None]
) -> None:
    """Measure units with a process for each place; a failed process is replaced, and all end with this function."""
    waiting, free, failed = list(units), list(places), results.outcome.failed
    workers: dict[Any, _Worker] = {}
    with _ended_by_sigterm():
        try:
            while True:
                waiting = [unit for unit in waiting if unit.checkpoint not in failed]
                idle = [worker for worker in workers.values() if worker.unit is None]
                while waiting and (idle or free):
                    worker = idle.pop() if idle else _Worker(measurement, free.pop(0), len(places))
                    workers[worker.pipe] = worker
                    worker.take(next_unit(waiting, measurement.tasks, worker.checkpoint))
                busy = [pipe for pipe, worker in workers.items() if worker.unit is not None]
                if not busy:
                    return
                for pipe in connection.wait(busy):
                    worker = workers[pipe]
                    assert worker.unit is not None
                    message = worker.hear()
                    if isinstance(message, int):
                        results.tick(message)
                    elif isinstance(message, list):
                        results.keep(worker.unit, message)
                        worker.unit = None
                    else:
                        failed.setdefault(worker.unit.checkpoint, message)
                        worker.stop()  # a failure may have left its device unusable
                        free.append(workers.pop(pipe).place)
        finally:
            for worker in workers.values():
                worker.stop()


def next_unit(waiting: list[Unit], tasks: Sequence[Task], loaded: str) -> Unit:
    """Take the next unit for a process: of the checkpoint that it holds, or of the one with the most work left."""
    names = {unit.checkpoint for unit in waiting}
    left = {name: sum(tasks[unit.number].cost for unit in waiting if unit.checkpoint == name) for name in names}
    name = loaded if loaded in names else max((unit.checkpoint for unit in waiting), key=left.__getitem__)
    unit = next(unit for unit in waiting if unit.checkpoint == name)
    waiting.remove(unit)
    return unit


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process with the usual exit code, but after its children have been stopped."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread, where no signal arrives
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def reason(error: Exception, task: Task) -> str:
    """Return why a checkpoint was not measured, in one paragraph."""
    import torch

    from envs.web import NoAnswer

    what = " ".join(filter(None, (task.suite, task.part.replace("_", " "), task.setting)))
    if isinstance(error, UserError | NoAnswer):
        return f"{what}: {error}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"{what}: out of memory. Write a smaller batch_size, or shorter answers and contexts."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{what}: {one_line(error)}{place}."
