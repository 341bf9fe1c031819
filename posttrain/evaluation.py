"""How is an evaluation shared out among processes, and what is kept of it when it dies?

A unit of work is one part of the exam for one checkpoint. When it is done, its rows are written to
`output_dir/evaluation_rows/`, in a file whose name is a digest of all that they depend on. A resumed evaluation reads
the units whose file is there: where the config or the checkpoint has changed, the name is another one. Which process
measures a unit changes none of its rows.

A checkpoint that cannot be measured (it raises, its weights are not finite, its process is killed) is a failure with
its reason; the others are measured all the same.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain import runlog
from posttrain.config import EvaluateRun, ModelSection
from posttrain.metrics import MathJudge
from posttrain.types import SamplingParams, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.chat import Chat

ROWS = "evaluation_rows"  # the folder in output_dir that holds what is finished until all is
Row = dict[str, Any]  # one answer, one pair or one episode, as transcripts.jsonl holds it
Tick = Callable[[int], None]  # told how many rows are done


@dataclass(frozen=True)
class Sitting:
    """A part of the exam under one setting: Sitting("math", "embedded", "unseen_questions", "greedy", params, items,
    seeds).

    items: {"messages", "answer"} for math and recall, {"messages"} for repetition, {"chosen", "rejected"} for
    preferences (which sample nothing: no setting), {"seed"} of a level for worlds.
    source: where the part comes from; the parts of one source are counted together, those of different sources never.
    """

    suite: str
    source: str
    part: str
    setting: str
    params: SamplingParams | None
    items: list[dict[str, Any]]
    seeds: list[int]

    @property
    def cost(self) -> int:
        """Tokens that it samples at most, in one turn; pairs are read once."""
        return len(self.items) * (self.params.max_new_tokens if self.params else 1)


class Unit(NamedTuple):
    """Unit("phase1", 3): the fourth part of the exam, for phase1."""

    checkpoint: str
    number: int


@dataclass
class Loaded:
    """The model that a process holds, one at a time."""

    key: tuple[str, str] = ("", "")
    model: PreTrainedModel | None = None
    chat: Chat | None = None
    processes: int = 1  # that share this machine's memory
    judge: MathJudge = field(default_factory=MathJudge)

    def get(self, section: ModelSection, device: str, template: str | None) -> tuple[PreTrainedModel, Chat]:
        """The model of this section, in its dtype; UserError where a weight is NaN or infinite."""
        import torch

        from posttrain import models

        if self.key != (section.name_or_path, section.dtype) or self.model is None or self.chat is None:
            self.model = self.chat = None  # makes room for the next one
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            model, self.chat = models.load(section, device=device, chat_template=template, training=False)
            for name, weight in model.named_parameters():
                if not torch.isfinite(weight).all():
                    raise UserError(f"{section.name_or_path}: the weights {name} hold NaN or infinity.")
            self.model, self.key = model.eval(), (section.name_or_path, section.dtype)
        return self.model, self.chat


Measure = Callable[[EvaluateRun, str, Sitting, Tick, Loaded], list[Row]]


@dataclass
class Found:
    """What an evaluation came to: the rows of every unit that was measured, and why others were not."""

    rows: dict[Unit, list[Row]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # checkpoint -> reason

    def of(self, checkpoint: str, exam: Sequence[Sitting]) -> list[Row]:
        """A checkpoint's rows in the order of the exam."""
        return [row for number in range(len(exam)) for row in self.rows[Unit(checkpoint, number)]]


# ------------------------------------------------------------------------------------------------- rows on the disk


class Store:
    """The rows of finished units in `output_dir/evaluation_rows/`."""

    def __init__(self, cfg: EvaluateRun, exam: Sequence[Sitting]) -> None:
        self.cfg, self.exam = cfg, exam
        self.folder = Path(cfg.output_dir) / ROWS
        self._fingerprints: dict[str, str] = {}

    def path(self, unit: Unit) -> Path:
        """The file of a unit, named by all that its rows depend on."""
        if unit.checkpoint not in self._fingerprints:
            self._fingerprints[unit.checkpoint] = fingerprint(self.cfg, unit.checkpoint)
        sitting = self.exam[unit.number]
        facts = [unit.checkpoint, self._fingerprints[unit.checkpoint], asdict(sitting), conditions(self.cfg, sitting)]
        return self.folder / f"{_sha256(json.dumps(facts, sort_keys=True).encode())[:32]}.jsonl"

    def read(self, unit: Unit) -> list[Row] | None:
        """The rows of a unit that was finished earlier under the same conditions; None where there are none."""
        try:
            rows = [json.loads(line) for line in self.path(unit).read_bytes().split(b"\n") if line.strip()]
        except (OSError, ValueError, RecursionError):  # absent, or damaged: it is measured again
            return None
        whole = len(rows) == len(self.exam[unit.number].items)
        return rows if whole and all(isinstance(row, dict) for row in rows) else None

    def write(self, unit: Unit, rows: Sequence[Row]) -> None:
        """All of a unit's rows or none of them."""
        from posttrain import checkpoint

        path = self.path(unit)
        with checkpoint.full_disk_in_words(self.folder.parent):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
            partial.replace(path)

    def clear(self) -> None:
        """Remove the rows of every unit; what else lies there stays."""
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.partial")]:
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


def fingerprint(cfg: EvaluateRun, name: str) -> str:
    """A digest of a checkpoint's files; for a name on the Hub, of the commit that is in the cache."""
    from posttrain import checkpoint, models

    path = Path(cfg.checkpoints[name])
    if not path.is_dir():
        section = ModelSection(name_or_path=cfg.checkpoints[name])
        return f"{path} {getattr(models.load_config(section), '_commit_hash', None)}"
    if (path / checkpoint.MANIFEST).exists():
        return _sha256(json.dumps(checkpoint.read_manifest(path)["files"], sort_keys=True).encode())
    files = sorted(file for file in path.iterdir() if file.is_file())
    digests = []
    for file in files:
        with file.open("rb") as content:
            digests.append((file.name, hashlib.file_digest(content, "sha256").hexdigest()))
    return _sha256(json.dumps(digests).encode())


def conditions(cfg: EvaluateRun, sitting: Sitting) -> dict[str, Any]:
    """What the rows of a part depend on besides its items: not how many processes or rows at a time there were."""
    from posttrain import models

    suite = getattr(cfg.suites, sitting.suite).model_dump(mode="json")
    for key in ("n", "n_others", "episodes", "episodes_others", "settings", "headline", "reference"):
        suite.pop(key, None)  # they choose items, which are part of the sitting, or what is shown
    if sitting.suite == "worlds":
        suite["worlds"] = [world for world in suite["worlds"] if world["name"] == sitting.part]
    template = cfg.chat.template and Path(cfg.chat.template).read_text(encoding="utf-8")
    device = models.resolve_device(cfg.device).type
    return {"suite": suite, "dtype": cfg.dtype, "attention": cfg.attn_implementation, "chat": template, "on": device}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -------------------------------------------------------------------------------------------------- sharing it out


def run_exam(cfg: EvaluateRun, exam: Sequence[Sitting], measure: Measure) -> Found:
    """Every checkpoint's rows: those that are on the disk, and the others measured by as many processes as there are.

    Under torchrun the ranks share the units out, each on its own device. Elsewhere there is a process for every visible
    GPU, or `workers` processes on a CPU.
    """
    import torch

    from posttrain import models, parallel

    store = Store(cfg, exam)
    # pairs last: they are scored in float32, for which a checkpoint may have to be loaded once more
    order = sorted(range(len(exam)), key=lambda number: exam[number].suite == "preferences")
    units = [Unit(name, number) for name in cfg.checkpoints for number in order]
    ranks = parallel.size()
    if ranks > 1:
        units = shares(units, exam, ranks)[parallel.rank()]
    found = Found({unit: rows for unit in units if (rows := store.read(unit)) is not None})
    left = [unit for unit in units if unit not in found.rows]
    if found.rows:
        runlog.say(f"{len(found.rows)} of {len(units)} parts were measured before and are kept.")
    total = sum(len(exam[unit.number].items) for unit in left)
    names = dict.fromkeys(unit.checkpoint for unit in left)
    place = models.resolve_device(cfg.device)
    with runlog.Progress(total, f"evaluating {len(names)} checkpoints", unit="answer") as progress:

        def tick(count: int) -> None:
            progress.update(progress.done + count)

        if ranks > 1 or (place.type == "cpu" and min(cfg.workers, len(left)) <= 1):
            if place.type == "cuda":
                torch.cuda.set_device(place)
            in_this_process(cfg, exam, left, measure, tick, store, found)
        else:
            places = visible_gpus() if place.type == "cuda" else [None] * min(cfg.workers, len(left))
            in_processes(cfg, exam, left, measure, tick, store, found, places)
    if ranks > 1:
        for rows, failed in parallel.gather([(found.rows, found.failed)]):
            found.rows |= rows
            found.failed |= failed
    return found


def shares(units: Sequence[Unit], exam: Sequence[Sitting], processes: int) -> list[list[Unit]]:
    """The units of each process, of about equal cost: the largest first, each to the process with the least so far."""
    given: list[list[Unit]] = [[] for _ in range(processes)]
    costs = [0] * processes
    for unit in sorted(units, key=lambda unit: -exam[unit.number].cost):
        least = costs.index(min(costs))
        given[least].append(unit)
        costs[least] += exam[unit.number].cost
    order = {unit: place for place, unit in enumerate(units)}
    return [sorted(share, key=order.__getitem__) for share in given]


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES has to be for a process to see one GPU alone, for each that this one sees."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else []
    count = torch.cuda.device_count()
    return names[:count] if len(names) >= count else [str(number) for number in range(count)]


def in_this_process(
    cfg: EvaluateRun,
    exam: Sequence[Sitting],
    units: Sequence[Unit],
    measure: Measure,
    tick: Tick,
    store: Store,
    found: Found,
) -> None:
    """One unit after the other; those of a checkpoint that has failed are left out."""
    with MathJudge() as judge:
        loaded = Loaded(processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), judge=judge)
        for unit in units:
            if unit.checkpoint not in found.failed:
                try:
                    rows = measure(cfg, unit.checkpoint, exam[unit.number], tick, loaded)
                except Exception as error:  # costs this checkpoint's rows and no other's
                    found.failed[unit.checkpoint] = reason(error, exam[unit.number])
                else:
                    store.write(unit, rows)
                    found.rows[unit] = rows


class _Worker:
    """A process that measures one unit after the other, on the GPU `place`, or on the CPU without one."""

    def __init__(self, cfg: EvaluateRun, exam: Sequence[Sitting], measure: Measure, place: str | None, of: int) -> None:
        # A fork server imports everything once. Processes that use CUDA are not forked from one that may have asked it.
        context = multiprocessing.get_context("forkserver" if place is None else "spawn")
        if place is None:
            context.set_forkserver_preload(["posttrain.models", "posttrain.rollout", "posttrain.policy"])
        self.pipe, there = context.Pipe()
        self.place, self.unit, self.checkpoint = place, None, ""
        arguments = (there, cfg, exam, measure, place, of)
        self.process: Any = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        there.close()

    unit: Unit | None

    def take(self, unit: Unit) -> None:
        self.unit, self.checkpoint = unit, unit.checkpoint
        with suppress(BrokenPipeError):  # `hear` will say that it has gone
            self.pipe.send(unit)

    def hear(self) -> int | list[Row] | str:
        """How many rows more are done, the rows of its unit, or why there are none."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return (
                f"its process ended with exit code {self.process.exitcode}; what it said stands above. If it was "
                "killed for memory (-9), write workers=1 or a smaller batch_size."
            )

    def stop(self) -> None:
        """An idle process ends by itself and says what there is to say; a busy one is ended."""
        with suppress(OSError):
            if self.unit is None:
                self.pipe.send(None)
                self.process.join(5)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(
    pipe: Any, cfg: EvaluateRun, exam: Sequence[Sitting], measure: Measure, place: str | None, processes: int
) -> None:
    """A worker's loop: a unit in; counts of what is done, then its rows or the reason of a failure out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place
        os.environ.pop("LOCAL_RANK", None)
    try:
        with MathJudge() as judge:
            _measure_what_comes(pipe, cfg, exam, measure, Loaded(processes=processes, judge=judge))
    except (BrokenPipeError, EOFError, ConnectionResetError):  # the parent has gone
        pass


def _measure_what_comes(pipe: Any, cfg: EvaluateRun, exam: Sequence[Sitting], measure: Measure, loaded: Loaded) -> None:
    while unit := pipe.recv():
        try:
            pipe.send(measure(cfg, unit.checkpoint, exam[unit.number], pipe.send, loaded))
        except (BrokenPipeError, EOFError):
            raise
        except Exception as error:
            pipe.send(reason(error, exam[unit.number]))


def in_processes(
    cfg: EvaluateRun,
    exam: Sequence[Sitting],
    units: Sequence[Unit],
    measure: Measure,
    tick: Tick,
    store: Store,
    found: Found,
    places: Sequence[str | None],
) -> None:
    """A process for each of these places, another one after a failure; none survives this function."""
    waiting, free = list(units), list(places)
    workers: dict[Any, _Worker] = {}
    with _ended_by_sigterm():
        try:
            while True:
                waiting = [unit for unit in waiting if unit.checkpoint not in found.failed]
                idle = [worker for worker in workers.values() if worker.unit is None]
                while waiting and (idle or free):
                    worker = idle.pop() if idle else _Worker(cfg, exam, measure, free.pop(0), len(places))
                    workers[worker.pipe] = worker
                    worker.take(next_unit(waiting, exam, worker.checkpoint))
                busy = [pipe for pipe, worker in workers.items() if worker.unit is not None]
                if not busy:
                    return
                for pipe in connection.wait(busy):
                    worker = workers[pipe]
                    assert worker.unit is not None
                    said = worker.hear()
                    if isinstance(said, int):
                        tick(said)
                    elif isinstance(said, list):
                        store.write(worker.unit, said)
                        found.rows[worker.unit] = said
                        worker.unit = None
                    else:
                        found.failed.setdefault(worker.unit.checkpoint, said)
                        worker.stop()  # what failed may have left the device in no state to go on
                        free.append(workers.pop(pipe).place)
        finally:
            for worker in workers.values():
                worker.stop()


def next_unit(waiting: list[Unit], exam: Sequence[Sitting], loaded: str) -> Unit:
    """Takes the unit that a process does next: of the checkpoint it holds, else of the one with the most work left."""
    names = {unit.checkpoint for unit in waiting}
    left = {name: sum(exam[unit.number].cost for unit in waiting if unit.checkpoint == name) for name in names}
    name = loaded if loaded in names else max((unit.checkpoint for unit in waiting), key=left.__getitem__)
    unit = next(unit for unit in waiting if unit.checkpoint == name)
    waiting.remove(unit)
    return unit


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as it would without a handler, but after its children."""

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


def reason(error: Exception, sitting: Sitting) -> str:
    """Why a checkpoint was not measured, in one paragraph."""
    import torch

    what = " ".join(filter(None, (sitting.suite, sitting.part.replace("_", " "), sitting.setting)))
    if isinstance(error, UserError):
        return f"{what}: {error}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"{what}: out of memory. Write a smaller batch_size, or shorter answers and contexts."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}{place}."
