"""Where can a run be watched?  Its figures, alarms and episodes in trackio, TensorBoard and wandb, as `report_to` says.

A run has one name on all of them, which `dashboards.json` in its folder keeps: a resumed run goes on under it. What a
dashboard has already it is not given again, and what it lacks it gets from the run's files: rows that a kill took on
their way, or all of them where the dashboard is a new one. So each step stands there once.
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
from typing import Any

import yaml
from PIL import Image

from posttrain import files
from posttrain.runtime import checkpoint, compat, runlog
from posttrain.types import UserError, one_line

PROJECT = "posttrain"
SHOWN = "shown.jsonl"  # the episodes that dashboards were shown, for a resumed run
Held = set[tuple[int, str]]  # what a dashboard has: step and key


def as_it_is(key: str) -> str:
    """Figures of phase 3 name their group: rollout/success."""
    return key


def as_transformers(key: str) -> str:
    """Groups of phases 1 and 2, as on the dashboard of any other Trainer: train/loss, eval/rewards/margins.

    >>> as_transformers("eval_loss")
    'eval/loss'
    """
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"


class Dashboard:
    """One of them, in the run called `name`."""

    has: Held

    def log(self, row: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def alert(self, title: str, text: str, step: int, error: bool) -> None:
        """Keep it with the run; the terminal has been told by whoever raised it."""
        raise NotImplementedError

    def show(self, title: str, episodes: Sequence[Mapping[str, Any]], pictures: Sequence[Path], step: int) -> None:
        """Whole episodes, each with `messages` and other facts, and an animated picture of each."""
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


class Dashboards:
    """All that were asked for, of the run in `out`. `named` gives a figure the name that it has there."""

    def __init__(self, each: Sequence[Dashboard], out: Path, named: Callable[[str], str] = as_it_is) -> None:
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
        """A row of alarms.jsonl."""
        text = f"step {step}: {alarm['message']} {alarm['remedy']}"
        self.alert(alarm["name"].replace("_", " "), text, step, alarm["severity"] == "stop")

    def show(self, title: str, episodes: Sequence[Mapping[str, Any]], pictures: Sequence[Path], step: int) -> None:
        """Episodes with their pictures, which lie in the run's folder; what was shown is kept there as well."""
        if self.each and episodes:
            names = [str(picture.relative_to(self.out)) for picture in pictures]
            row = {"step": step, "title": title, "episodes": episodes, "pictures": names}
            with (self.out / SHOWN).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, default=str) + "\n")
            self._show(row, step)

    def _show(self, row: Mapping[str, Any], step: int) -> None:
        """A row of the file of what was shown."""
        pictures = [self.out / name for name in row["pictures"]]
        for one in self.each:
            if (step, f"{row['title']}/picture 0") not in one.has and all(map(Path.exists, pictures)):
                one.show(row["title"], row["episodes"], pictures, step)

    def catch_up(self, after: int | None) -> None:
        """Give them what stands in the files of a run that goes on after this step (None: that begins)."""
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


def start(cfg: Any, settings: dict[str, Any], *, resume: bool, named: Callable[[str], str] = as_it_is) -> Dashboards:
    """Begin the run on each dashboard of `cfg.report_to`, or go on with it; nothing in the other processes."""
    out = Path(cfg.output_dir)
    if not cfg.report_to or not runlog.is_main_process():
        return Dashboards([], out)
    file = out / checkpoint.DASHBOARDS
    if resume and file.exists():
        known = files.read_json(file, f"Remove it: on the dashboards the run then goes on as a new one, from {out}.")
    else:
        name = f"{cfg.run_name or out.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        known = {"name": name, "id": uuid.uuid4().hex}
        file.write_text(json.dumps(known), encoding="utf-8")
    kinds: dict[str, Callable[[str, str, dict[str, Any]], Dashboard]] = {
        "trackio": Trackio, "tensorboard": TensorBoard, "wandb": Wandb,
    }  # fmt: skip
    return Dashboards([kinds[kind](known["name"], known["id"], settings) for kind in cfg.report_to], out, named)


def facts(episodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each episode without what was said."""
    return [{key: value for key, value in episode.items() if key != "messages"} for episode in episodes]


def told(messages: Sequence[Mapping[str, str]]) -> str:
    """What was said, as Markdown in which the model's words stay as they are."""
    return "\n\n".join(
        f"**{each['role']}**\n\n" + re.sub("^", "    ", each["content"], flags=re.M) for each in messages
    )


class Trackio(Dashboard):
    """A local SQLite file and a local page: no account, and no network unless TRACKIO_SPACE_ID or the like asks."""

    def __init__(self, name: str, key: str, settings: dict[str, Any]) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        if not os.environ.get("TRACKIO_SPACE_ID") and not os.environ.get("TRACKIO_SERVER_URL"):
            compat.trackio_asks_nobody()
        with redirect_stdout(io.StringIO()):  # six lines about itself at every phase
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


class TensorBoard(Dashboard):
    """Event files beside the run, written through at every row."""

    def __init__(self, name: str, key: str, settings: dict[str, Any]) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        root = Path(os.environ["TENSORBOARD_LOGGING_DIR"])
        folder = root / re.sub(r"[^\w.-]+", "-", name).lstrip(".")
        self.has = set()
        if folder.exists():
            found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()
            for kind, read in (("scalars", found.Scalars), ("tensors", found.Tensors), ("images", found.Images)):
                for tag in found.Tags()[kind]:
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
            self.writer.add_text(f"{title}/episode {number}", f"{listed}\n\n{told(episode['messages'])}", step)
            with Image.open(picture) as opened:
                width, height = opened.size
            shown = summary.Image(height=height, width=width, encoded_image_string=picture.read_bytes())  # it moves
            value = summary.Value(tag=f"{title}/picture {number}", image=shown)
            self.writer.file_writer.add_summary(summary(value=[value]), step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Wandb(Dashboard):
    """The only one that uploads; WANDB_MODE=offline keeps its files here for `wandb sync`.

    wandb counts steps by itself and takes none twice, so ours are a figure, over which all others are drawn.
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
