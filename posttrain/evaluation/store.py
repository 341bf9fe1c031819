"""What is kept of an evaluation that dies?

A unit of work is one task for one checkpoint. When it is done, its rows are written to `output_dir/evaluation_rows/`,
in a file whose name is a digest of all that they depend on. A resumed evaluation reads the units whose file is there:
where the config or the checkpoint has changed, the name is another one. Which process measures a unit changes none of
its rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.config import EvaluateRun, ModelSection
from posttrain.evaluation.tasks import Task, env_section
from posttrain.types import Record

ROWS = "evaluation_rows"  # the folder in output_dir that holds what is finished until all is


class Unit(NamedTuple):
    """Unit("phase1", 3): the fourth task, for phase1."""

    checkpoint: str
    number: int


@dataclass
class Found:
    """What an evaluation came to: the rows of every unit that was measured, and why others were not."""

    rows: dict[Unit, list[Record]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # checkpoint -> reason

    def of(self, checkpoint: str, tasks: Sequence[Task]) -> list[Record]:
        """A checkpoint's rows in the order of the tasks; an endpoint is not asked all of them."""
        units = (Unit(checkpoint, number) for number in range(len(tasks)))
        return [row for unit in units if unit in self.rows for row in self.rows[unit]]


class Store:
    """The rows of finished units in `output_dir/evaluation_rows/`."""

    def __init__(self, cfg: EvaluateRun, tasks: Sequence[Task]) -> None:
        self.cfg, self.tasks = cfg, tasks
        self.folder = Path(cfg.output_dir) / ROWS
        self._fingerprints: dict[str, str] = {}

    def path(self, unit: Unit) -> Path:
        """The file of a unit, named by all that its rows depend on."""
        task = self.tasks[unit.number]
        facts = [unit.checkpoint, self.fingerprint(unit.checkpoint), asdict(task)]
        facts.append(conditions(self.cfg, task, local=unit.checkpoint in self.cfg.local))
        return self.folder / f"{_sha256(json.dumps(facts, sort_keys=True).encode())[:32]}.jsonl"

    def fingerprint(self, name: str) -> str:
        """A checkpoint's `fingerprint` under this config."""
        if name not in self._fingerprints:
            self._fingerprints[name] = store_fingerprint(self.cfg, name)
        return self._fingerprints[name]

    def read(self, unit: Unit) -> list[Record] | None:
        """The rows of a unit that was finished earlier under the same conditions; None where there are none."""
        try:
            content, _, digest = self.path(unit).read_bytes().rstrip(b"\n").rpartition(b"\n")
        except OSError:  # absent, or it cannot be read: it is measured again
            return None
        if _sha256(content).encode() != digest:  # damaged, likewise
            return None
        return [json.loads(line) for line in content.split(b"\n")]

    def write(self, unit: Unit, rows: Sequence[Record]) -> None:
        """All of a unit's rows or none of them."""
        from posttrain.runtime import checkpoint

        path = self.path(unit)
        with checkpoint.full_disk_in_words(self.folder.parent):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            content = "\n".join(json.dumps(row, allow_nan=False) for row in rows).encode()
            partial.write_bytes(content + f"\n{_sha256(content)}\n".encode())  # the last line is the checksum
            partial.replace(path)

    def clear(self) -> None:
        """Remove the rows of every unit; what else lies there stays."""
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.partial")]:
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


def store_fingerprint(cfg: EvaluateRun, name: str) -> str:
    """A digest of a checkpoint's files; of an endpoint nothing is known but its address and the model's name there."""
    if name in cfg.endpoints:
        return f"{cfg.endpoints[name].endpoint} {cfg.endpoints[name].model}"
    return digest(cfg.local[name])


def digest(name_or_path: str) -> str:
    """A digest of a model's files; for a name on the Hub, of the commit that is in the cache."""
    from posttrain.models import model_files
    from posttrain.runtime import checkpoint, compat

    path = Path(name_or_path)
    if not path.is_dir():
        section = ModelSection(name_or_path=name_or_path)
        return f"{path} {compat.commit_of(model_files.load_config(section))}"
    if (path / checkpoint.MANIFEST).exists():
        return _sha256(json.dumps(checkpoint.read_manifest(path)["files"], sort_keys=True).encode())
    files = sorted(file for file in path.iterdir() if file.is_file())
    digests = []
    for file in files:
        with file.open("rb") as content:
            digests.append((file.name, hashlib.file_digest(content, "sha256").hexdigest()))
    return _sha256(json.dumps(digests).encode())


def conditions(cfg: EvaluateRun, task: Task, *, local: bool) -> dict[str, Any]:
    """What the rows of a part depend on besides its items: not how many processes or rows at a time there were."""
    from posttrain.models import template_text
    from posttrain.runtime import hardware

    suite = getattr(cfg.suites, task.suite).model_dump(mode="json")
    for key in ("n", "n_others", "episodes", "episodes_others", "settings", "headline", "reference"):
        suite.pop(key, None)  # they choose items, which are part of the task, or what is shown
    if task.suite == "envs":
        suite["envs"] = [env_section(cfg, task.part).model_dump(mode="json")]
    if not local:
        return {"suite": suite}
    template = cfg.chat.template and template_text(cfg.chat.template)
    device = hardware.resolve_device(cfg.device).type
    return {"suite": suite, "dtype": cfg.dtype, "attention": cfg.attn_implementation, "chat": template, "on": device}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
