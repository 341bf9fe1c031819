"""What is kept of an evaluation that was interrupted?

A unit of work is one task for one checkpoint. When it is finished, its rows are written to
`output_dir/evaluation_rows/`, to a file whose name is a digest of everything that they depend on. A resumed evaluation
reads the units whose file exists; after a change of the config or the checkpoint, the file would have another name.
The rows of a unit do not depend on the process that measures it.
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

ROWS = "evaluation_rows"  # the folder in output_dir with finished rows, until all are finished


class Unit(NamedTuple):
    """Unit("phase1", 3): the fourth task, for phase1."""

    checkpoint: str
    number: int


@dataclass
class Outcome:
    """The outcome of an evaluation: the rows of every measured unit, and the reasons why others were not measured."""

    rows: dict[Unit, list[Record]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # checkpoint -> reason

    def of(self, checkpoint: str, tasks: Sequence[Task]) -> list[Record]:
        """Return a checkpoint's rows in the order of the tasks, of which an endpoint does not get all."""
        units = (Unit(checkpoint, number) for number in range(len(tasks)))
        return [row for unit in units if unit in self.rows for row in self.rows[unit]]


class Store:
    """The rows of finished units in `output_dir/evaluation_rows/`."""

    def __init__(self, cfg: EvaluateRun, tasks: Sequence[Task]) -> None:
        self.cfg, self.tasks = cfg, tasks
        self.folder = Path(cfg.output_dir) / ROWS
        self._fingerprints: dict[str, str] = {}

    def path(self, unit: Unit) -> Path:
        """Return the file of a unit, named by everything that its rows depend on."""
        task = self.tasks[unit.number]
        facts = [unit.checkpoint, self.fingerprint(unit.checkpoint), asdict(task)]
        facts.append(conditions(self.cfg, task, local=unit.checkpoint in self.cfg.local))
        return self.folder / f"{_sha256(json.dumps(facts, sort_keys=True).encode())[:32]}.jsonl"

    def fingerprint(self, name: str) -> str:
        """Return the `store_fingerprint` of a checkpoint, computed once."""
        if name not in self._fingerprints:
            self._fingerprints[name] = store_fingerprint(self.cfg, name)
        return self._fingerprints[name]

    def read(self, unit: Unit) -> list[Record] | None:
        """Return the rows of a unit that was finished earlier under the same conditions; None where there are none."""
        try:
            content, _, digest = self.path(unit).read_bytes().rstrip(b"\n").rpartition(b"\n")
        except OSError:  # absent or unreadable: measured again
            return None
        if _sha256(content).encode() != digest:  # damaged: measured again
            return None
        return [json.loads(line) for line in content.split(b"\n")]

    def write(self, unit: Unit, rows: Sequence[Record]) -> None:
        """Write all rows of a unit, or none of them if the process is killed."""
        from posttrain.runtime import checkpoint

        path = self.path(unit)
        with checkpoint.full_disk_in_words(self.folder.parent):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            content = "\n".join(json.dumps(row, allow_nan=False) for row in rows).encode()
            partial.write_bytes(content + f"\n{_sha256(content)}\n".encode())  # the last line is the checksum
            partial.replace(path)

    def clear(self) -> None:
        """Remove the rows of every unit; other files stay."""
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.partial")]:
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


def store_fingerprint(cfg: EvaluateRun, name: str) -> str:
    """Return a digest of a checkpoint's files; for an endpoint its address and the model's name there."""
    if name in cfg.endpoints:
        return f"{cfg.endpoints[name].endpoint} {cfg.endpoints[name].model}"
    return digest(cfg.local[name])


def digest(name_or_path: str) -> str:
    """Return a digest of the files of a model's folder; for a name on the Hub, the name and the commit in the cache."""
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
    """Return what the rows of a task depend on besides its items. The number of processes and slots does not count."""
    from posttrain.models import template_text
    from posttrain.runtime import hardware

    suite = getattr(cfg.suites, task.suite).model_dump(mode="json")
    for key in ("n", "n_others", "episodes", "episodes_others", "settings", "headline", "reference"):
        suite.pop(key, None)  # they choose the items, which are part of the task, or what is shown
    if task.suite == "envs":
        suite["envs"] = [env_section(cfg, task.part).model_dump(mode="json")]
    if not local:
        return {"suite": suite}
    template = cfg.chat.template and template_text(cfg.chat.template)
    device = hardware.resolve_device(cfg.device).type
    return {"suite": suite, "dtype": cfg.dtype, "attention": cfg.attn_implementation, "chat": template, "on": device}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
