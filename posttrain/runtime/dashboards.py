"""Where can a run be watched?  Its metrics, alarms and episodes in trackio, TensorBoard and wandb, as in `report_to`.

A run has one name on all of them, which `dashboards.json` in its folder keeps for a resumed run. A dashboard gets from
the run's files only what it lacks: rows that a kill lost, or all of them where it is new. So it has each step once.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

import yaml
from PIL import Image

from posttrain import files
from posttrain.runtime import checkpoint, compat, runlog
from posttrain.types import UserError, one_line

PROJECT = "posttrain"
SHOWN = "shown.jsonl"  # the episodes that dashboards were shown, for a resumed run
Held = set[tuple[int, str]]  # step and key of what a dashboard has


def as_transformers(key: str) -> str:
    """Return the name of a metric of phases 1 and 2 on the dashboard of any Trainer: train/loss, eval/rewards/margins.

    Those that phase 3 has as well keep their names: evaluation/recall/accuracy.

    >>> as_transformers("eval_loss")
    'eval/loss'
    """
    if key.startswith(("evaluation/", "seconds/")):
        return key
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"


class Dashboard(Protocol):
    """One dashboard of a run."""

    has: Held

    def log(self, row: Mapping[str, float], step: int) -> None: ...

    def alert(self, title: str, text: str, step: int, error: bool) -> None:
        """Store an alert with the run; the caller has printed it."""

    def show(self, title: str, episodes: Sequence[Mapping[str, Any]], pictures: Sequence[Path], step: int) -> None:
        """Show whole episodes, each with `messages` and other facts, and an animated picture of each."""

    def finish(self) -> None: ...


class Dashboards:
    """All dashboards of the run in `out`. `named` returns a metric's name there; phase 3's need no other."""

    def __init__(self, each: Sequence[Dashboard], out: Path, named: Callable[[str], str] = str) -> None:
        self.each, self.out, self.named = each, out, named

    def log(self, row: Mapping[str, Any], step: int) -> None:
        numbers = {self.named(key): value for key, value in row.items() if isinstance(value, int | float)}
        numbers.pop(self.named("step"), None)
        for one in self.each:
            if new := {key: value for key, value in numbers.items() if (step, key) not in one.has}:
                one.log(new, step)
                one.has |= {(step, key) for key in new}  # a row of phase 1 and that of its evaluation share `epoch`

    def alert(self, title: str, text: str, step: int, error: bool = False) -> None:
        for one in self.each:
            if (step, f"alarms/{title}") not in one.has:
                one.alert(title, text, step, error)

    def alarm(self, alarm: Mapping[str, Any], step: int) -> None:
        """Send a row of alarms.jsonl."""
        text = f"step {step}: {alarm['message']} {alarm['remedy']}"
        self.alert(alarm["name"].replace("_", " "), text, step, alarm["severity"] == "stop")

    def show(self, title: str, episodes: Sequence[Mapping[str, Any]], pictures: Sequence[Path], step: int) -> None:
        """Show episodes with their pictures, which lie in the run's folder, and keep a record of them there."""
        if self.each and episodes:
            names = [str(picture.relative_to(self.out)) for picture in pictures]
            row = {"step": step, "title": title, "episodes": episodes, "pictures": names}
            with (self.out / SHOWN).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, default=str) + "\n")
            self._show(row, step)

    def _show(self, row: Mapping[str, Any], step: int) -> None:
        """Show a row of the file `SHOWN`."""
        pictures = [self.out / name for name in row["pictures"]]
        for one in self.each:
            if (step, f"{row['title']}/picture 0") not in one.has and all(map(Path.exists, pictures)):
                one.show(row["title"], row["episodes"], pictures, step)

    def catch_up(self, after: int | None) -> None:
        """Send the rows in the files of a run that continues after this step (None: that begins)."""
        if not self.each:
            return
        if (self.out / SHOWN).exists():
            runlog.MetricsFile(self.out / SHOWN, after_step=after)
        for name, give in (("metrics.jsonl", self.log), ("alarms.jsonl", self.alarm), (SHOWN, self._show)):
            for row in runlog.read_metrics(self.out / name) if (self.out / name).exists() else ():
                give(row, row["step"])

    def finish(self) -> None:
        for one in self.each:
            one.finish()


def open_dashboards(
    cfg: Any, settings: dict[str, Any], *, resume: bool, named: Callable[[str], str] = str
) -> Dashboards:
    """Start the run on each dashboard of `cfg.report_to`, or continue it; do nothing in the other processes.

    Args:
        cfg: the config of a phase.
        settings: the config as values of JSON, to show beside the curves.
        resume: continue the run of an earlier process.
        named: returns a metric's name on the dashboard.
    """
    out = Path(cfg.output_dir)
    if not cfg.report_to or not runlog.is_main_process():
        return Dashboards([], out)
    file = out / checkpoint.DASHBOARDS
    if resume and file.exists():
        identity = files.read_json(file, f"Remove it: the dashboards then show a new run, from {out}.")
    else:
        name = f"{cfg.run_name or out.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        identity = {"name": name, "id": uuid.uuid4().hex}
        file.write_text(json.dumps(identity), encoding="utf-8")
    kinds: dict[str, Callable[[str, str, dict[str, Any]], Dashboard]] = {
        "trackio": Trackio, "tensorboard": TensorBoard, "wandb": Wandb,
    }  # fmt: skip
    return Dashboards([kinds[kind](identity["name"], identity["id"], settings) for kind in cfg.report_to], out, named)


def facts(episodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each episode without its messages."""
    return [{key: value for key, value in episode.items() if key != "messages"} for episode in episodes]


def as_markdown(messages: Sequence[Mapping[str, str]]) -> str:
    """Return messages as Markdown in which the model's words stay unchanged."""
    return "\n\n".join(
        f"**{each['role']}**\n\n" + re.sub("^", "    ", each["content"], flags=re.M) for each in messages
    )


class Trackio:
    """A local SQLite file and a local page: no account, and no network unless TRACKIO_SPACE_ID or the like asks."""

    def __init__(self, name: str, key: str, settings: dict[str, Any]) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        if not os.environ.get("TRACKIO_SPACE_ID") and not os.environ.get("TRACKIO_SERVER_URL"):
            compat.trackio_asks_nobody()
        with redirect_stdout(io.StringIO()):  # it prints six lines at every phase
            self.run = trackio.init(project=PROJECT, name=name, config=settings, resume="allow", embed=False)
        rows = SQLiteStorage.get_logs(PROJECT, name, run_id=self.run.id)
        alerts = SQLiteStorage.get_alerts(PROJECT, run_name=name, run_id=self.run.id)
        self.has = {(row["step"], figure) for row in rows for figure in row}
        self.has |= {(alert["step"], f"alarms/{alert['title']}") for alert in alerts}
        where = f"TRACKIO_DIR={os.environ.get('TRACKIO_DIR')}"
        runlog.say(f"Curves, in another terminal: {where} trackio show --project {PROJECT}")

    def log(self, row: Mapping[str, float], step: int) -> None:
        self.run.log(dict(row), step=step)

    def alert(self, title: str, text: str, step: int, error: bool) -> None:
        from trackio import AlertLevel

        with redirect_stdout(io.StringIO()):
            self.run.alert(title, text, AlertLevel.ERROR if error else AlertLevel.WARN, step=step)

    def show(self, title: str, episodes: Sequence[Mapping[str, Any]], pictures: Sequence[Path], step: int) -> None:
        import trackio

        about = facts(episodes)
        rows = [[str(fact[key]) for key in about[0]] for fact in about]
        row: dict[str, Any] = {f"{title}/table": trackio.Table(columns=list(about[0]), data=rows)}
        for number, (episode, fact, picture) in enumerate(zip(episodes, about, pictures, strict=True)):
            row[f"{title}/episode {number}"] = trackio.Trace(messages=list(episode["messages"]), metadata=fact)
            row[f"{title}/picture {number}"] = trackio.Video(picture)
        self.run.log(row, step=step)

    def finish(self) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()


class TensorBoard:
    """Event files beside the run, written through at every row."""

    def __init__(self, name: str, key: str, settings: dict[str, Any]) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        root = Path(os.environ["TENSORBOARD_LOGGING_DIR"])
        folder = root / re.sub(r"[^\w.-]+", "-", name).lstrip(".")
        self.has = set()
        if folder.exists():
            events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()
            for kind, read in (("scalars", events.Scalars), ("tensors", events.Tensors), ("images", events.Images)):
                for tag in events.Tags()[kind]:
                    self.has |= {(event.step, tag.removesuffix("/text_summary")) for event in read(tag)}
        self.writer: Any = SummaryWriter(str(folder))
        if (0, "config") not in self.has:
            self.writer.add_text("config", f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```", 0)
            self.writer.flush()
        runlog.say(f"Curves, in another terminal: tensorboard --logdir {root}")

    def log(self, row: Mapping[str, float], step: int) -> None:
        for figure, value in row.items():
            self.writer.add_scalar(figure, value, step)
        self.writer.flush()

    def alert(self, title: str, text: str, step: int, error: bool) -> None:
        self.writer.add_text(f"alarms/{title}", text, step)
        self.writer.flush()

    def show(self, title: str, episodes: Sequence[Mapping[str, Any]], pictures: Sequence[Path], step: int) -> None:
        from tensorboard.compat.proto import summary_pb2

        summary: Any = vars(summary_pb2)["Summary"]  # protobuf makes it when the module is imported
        for number, (episode, fact, picture) in enumerate(zip(episodes, facts(episodes), pictures, strict=True)):
            listed = "\n".join(f"- {key}: {value}" for key, value in fact.items())
            self.writer.add_text(f"{title}/episode {number}", f"{listed}\n\n{as_markdown(episode['messages'])}", step)
            with Image.open(picture) as opened:
                width, height = opened.size
            shown = summary.Image(height=height, width=width, encoded_image_string=picture.read_bytes())  # it moves
            value = summary.Value(tag=f"{title}/picture {number}", image=shown)
            self.writer.file_writer.add_summary(summary(value=[value]), step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Wandb:
    """The only one that uploads; WANDB_MODE=offline keeps its files here for `wandb sync`.

    wandb counts its own steps and accepts each once, so ours are a metric, the x-axis of all others.
    """

    def __init__(self, name: str, key: str, settings: dict[str, Any]) -> None:
        import wandb

        folder = Path(os.environ["WANDB_DIR"])
        self.has = set().union(*map(compat.read_wandb_log, folder.glob(f"wandb/*-{key}/run-{key}.wandb")))
        quiet = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=1.0)
        try:
            self.run = wandb.init(
                project=PROJECT, name=name, id=key, resume="allow", config=settings, dir=folder, settings=quiet
            )
        except wandb.Error as error:
            raise UserError(
                f"wandb does not start ({one_line(error)}). Write report_to=trackio, or set WANDB_MODE=offline."
            ) from error
        self.run.define_metric("*", step_metric="step")
        place = f"wandb sync {folder}/wandb/offline-run-*-{key}" if self.run.offline else self.run.url
        runlog.say(f"Curves: {place}")

    def log(self, row: Mapping[str, float], step: int) -> None:
        self.run.log({**row, "step": step})

    def alert(self, title: str, text: str, step: int, error: bool) -> None:
        self.run.alert(title=title, text=text, level="ERROR" if error else "WARN")
        self.run.log({f"alarms/{title}": 1, "step": step})

    def show(self, title: str, episodes: Sequence[Mapping[str, Any]], pictures: Sequence[Path], step: int) -> None:
        import wandb

        rows: list[Any] = [[json.dumps(value, default=str) for value in episode.values()] for episode in episodes]
        row: dict[str, Any] = {f"{title}/table": wandb.Table(columns=list(episodes[0]), data=rows)}
        row |= {f"{title}/picture {n}": wandb.Video(str(file), format="gif") for n, file in enumerate(pictures)}
        self.run.log({**row, "step": step})

    def finish(self) -> None:
        self.run.finish()
