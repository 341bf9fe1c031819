"""How far is the run, how long will it take, and where are its numbers?

One bar in the terminal and one row a report in `metrics.jsonl` (dashboards.py shows the same elsewhere).
Only the first process of a run writes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TaskID, TextColumn

from posttrain import files
from posttrain.types import UserError

WIDE = 10_000  # columns, more than any table has
PLAIN_EVERY = 5.0  # seconds between two lines where there is no terminal to draw a bar in


def is_main_process() -> bool:
    """Return True in the one process that prints and writes (torchrun and accelerate number processes in RANK)."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print a line on stderr, from the first process alone."""
    if is_main_process():
        print(text, file=sys.stderr)


def console(**options: Any) -> Console:
    """Return stdout for tables and texts; where it is not a terminal, nothing is cut or wrapped to a width.

    `options` are those of rich's Console, for which a file under FORCE_COLOR would be a terminal of 80 columns.
    """
    return Console(**options, width=None if sys.stdout.isatty() else WIDE)


def keep_private(output_dir: Path) -> None:
    """Set the environment variables that keep a run on this machine and within its memory, before imports read them.

    No library reports its use or its errors anywhere, and dashboards keep their files beside the run (all phases of one
    experiment share them, so one page shows them all). Batches differ in length, so torch gets segments that can grow:
    otherwise much of a GPU's memory ends up in pieces that fit no later batch. A user's setting stays.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    beside = output_dir.resolve().parent
    os.environ.setdefault("TRACKIO_DIR", str(beside / "trackio"))
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(beside / "tensorboard"))
    os.environ.setdefault("WANDB_DIR", str(beside))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not (is_main_process() and sys.stderr.isatty()):  # bars of several processes, or in a file, are unreadable
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if sys.platform == "darwin":  # the CPU computes what Apple's GPU lacks, where torch would fail
        os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class Progress:
    """A bar with rate and time left; without a terminal, a plain line at most every five seconds.

        with Progress(total=1300, title="phase 1", start=400) as progress:
            progress.update(401, loss=2.31)
    `start` is the first step of a resumed run: the rate counts only what this process did.
    """

    def __init__(
        self, total: int, title: str, *, start: int = 0, unit: str = "step", console: Console | None = None
    ) -> None:
        self.total, self.title, self.start, self.unit = total, title, start, unit
        self.done = start
        self.began = time.monotonic()
        self._console = console or Console(stderr=True)
        self._figures: dict[str, float] = {}
        self._spoke = -math.inf
        self._last_line: tuple[int, dict[str, float]] | None = None  # step and figures
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        if is_main_process() and self._console.is_terminal:
            title_column, note_column = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
            columns = (title_column, BarColumn(), MofNCompleteColumn(), note_column)
            self._bar = RichProgress(*columns, console=self._console)
            self._task = self._bar.add_task(title, total=total, completed=start, note="")
            self._bar.start()

    def update(self, done: int, **figures: float) -> None:
        """Show that `done` of `total` are done; figures given earlier stay until they are given again."""
        self.done = done
        self._figures.update(figures)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self.total, note=self._note())
        elif is_main_process() and time.monotonic() - self._spoke >= PLAIN_EVERY:
            self._line()

    def say(self, text: str) -> None:
        """Print a line of its own above the bar."""
        if is_main_process():
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the last state; safe to call twice."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, note=self._note(self.done < self.total))
            self._bar.stop()
            self._bar = None
        elif self._spoke > -math.inf and (self.done < self.total or self._last_line != (self.done, self._figures)):
            self._line(over=True)
        self._spoke = -math.inf

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, over: bool = False) -> None:
        """Print a plain line. over: no more updates will come, even where less was done than planned."""
        self._spoke, self._last_line = time.monotonic(), (self.done, dict(self._figures))
        percent = 100 * self.done / self.total if self.total else 100
        stopped = over and self.done < self.total
        far = f"{self.done}/{self.total} {self.unit}s, {percent:.0f} %"
        if stopped:
            far = f"stopped at {self.unit} {self.done} of {self.total}"
        self.say(f"{self.title}: {far}, {self._note(stopped)}")

    def _note(self, stopped: bool = False) -> str:
        did, seconds = self.done - self.start, time.monotonic() - self.began
        parts = []
        if did > 0 and seconds > 0:
            rate = did / seconds
            speed = f"{rate:.1f} {self.unit}s/s" if rate >= 1 else f"{1 / rate:.1f} s/{self.unit}"
            parts = [speed] if stopped else [speed, f"{clock((self.total - self.done) / rate)} left"]
        return ", ".join(parts + [f"{name} {value:.4g}" for name, value in self._figures.items()])


def clock(seconds: float) -> str:
    """Return seconds as a clock shows them: clock(3725) -> '1:02:05', clock(65) -> '1:05'."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class MetricsFile:
    """`metrics.jsonl`, one row a report: {"step": 120, "loss": 2.31, ...}; NaN and infinity are written as null.

    A run that resumes at step k first drops the rows after k (and a row torn by a kill), so that the file has every
    step once.  `after_step=None` empties the file; rows with a key that begins with `but_not` are dropped as well, for
    the closing metrics of a run that is closed again.
    """

    def __init__(self, path: Path, after_step: int | None = None, but_not: str | None = None) -> None:
        self.path = path
        kept = []
        if after_step is not None and self.path.exists():
            kept = [row for row in read_metrics(self.path) if row["step"] <= after_step]
        if but_not is not None:
            kept = [row for row in kept if not any(key.startswith(but_not) for key in row)]
        if is_main_process():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(self.path, map(_row, kept))

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Append one row; it is in the file when this returns."""
        if is_main_process():
            with self.path.open("a", encoding="utf-8") as out:
                out.write(_row({"step": step, **row}))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl` (or another file with steps); a torn row at its end is left out.

    Raises:
        UserError: a row is damaged or has no step.
    """
    remedy = "Remove that line (the others are kept), then continue."
    rows = files.read_json_lines(path, remedy)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{path} is damaged in line {number}: it has no step. {remedy}")
    return rows


def _row(row: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class StopSignals:
    """SIGTERM and SIGINT as a request to stop at the next safe place; the second one stops at once.

    with StopSignals() as stop:
        ...
        if stop.requested: save; stop.leave()
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._interrupts = ""
        self._noted = 0.0

    @property
    def requested(self) -> bool:
        return self.number is not None

    @contextmanager
    def at_once(self, what: str) -> Iterator[None]:
        """Let a signal end the work inside at once, because --resume does all of it again."""
        self._interrupts = what
        try:
            if self.requested:
                self._interrupted()
            yield
        finally:
            self._interrupts = ""

    def _interrupted(self) -> NoReturn:
        say(f"Stopped in {self._interrupts}. Continue with the same command and --resume.")
        self.leave()

    def leave(self) -> NoReturn:
        """Exit with the code of a process that the signal killed: 143 for SIGTERM, 130 for SIGINT."""
        raise SystemExit(128 + (self.number or signal.SIGTERM))

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now, several = time.monotonic(), int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self.requested:
            if several and now - self._noted < 5:  # Ctrl-C reaches every process, and torchrun then passes it on
                return
            self.leave()
        self.number, self._noted = number, now
        if self._interrupts:
            self._interrupted()
        if is_main_process():
            print("Stopping at the next safe place, with a checkpoint (repeat to stop at once).", file=sys.stderr)
