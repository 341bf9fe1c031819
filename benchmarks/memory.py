"""How much memory does phase 1 take on a CPU, beside what `--plan` says?  Random weights in the shapes of real models.

    python benchmarks/memory.py [--json FILE]     # a quarter of an hour on two cores, 12 GB
Every row is as long as it may be. What was measured is the most that the process ever had (`ru_maxrss`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure
import phases

from posttrain.config.loading import resolve
from posttrain.config.sft import SFTRun
from posttrain.plan import report, rows
from posttrain.plan.devices import Device, Fleet
from posttrain.plan.episodes import Place
from posttrain.plan.known_models import PUBLISHED
from posttrain.plan.parts import gib, peak_bytes
from posttrain.plan.shape import Shape

ROOT = Path(__file__).resolve().parent.parent
LONGEST, STEPS = 320, 2
FRAME = 6  # tokens around question and answer: <|im_start|>, a role, <|im_end|>, twice


class Case(NamedTuple):
    """A run of phase 1: rows of a micro-batch, micro-batches of an optimizer step."""

    model: str
    rows: int
    accumulated: int


CASES = [
    Case("HuggingFaceTB/SmolLM2-135M-Instruct", 4, 2),
    Case("HuggingFaceTB/SmolLM2-135M-Instruct", 16, 1),
    Case("Qwen/Qwen2.5-0.5B-Instruct", 4, 1),
    Case("Qwen/Qwen2.5-0.5B-Instruct", 4, 2),
]


def make(folder: Path, case: Case) -> Path:
    """A model of this shape, 32 rows of words for it, and the config of a run."""
    kind, sizes = PUBLISHED[case.model]
    phases.save_tokenizer(folder / "model", sizes["vocab_size"])
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "model")
    draw = random.Random(0)
    names = [f"w{n}" for n in range(len(phases.WORDS), sizes["vocab_size"])]
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for _ in range(32):
            asked, answered = (
                {"role": role, "content": " ".join(draw.choices(names, k=count))}
                for role, count in (("user", 100), ("assistant", LONGEST - 100 - FRAME))
            )
            file.write(json.dumps({"messages": [asked, answered]}) + "\n")
    settings = {
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "report_to": "none",
        "model": {"name_or_path": str(folder / "model")},
        "data": {
            "max_length": LONGEST, "eval_rows": 4, "decontaminate": False,
            "sources": [{"kind": "messages", "path": str(folder / "rows.jsonl")}],
        },
        "trainer": {
            "learning_rate": 1e-6, "max_steps": STEPS, "logging_steps": 1, "per_device_eval_batch_size": 4,
            "per_device_train_batch_size": case.rows, "gradient_accumulation_steps": case.accumulated,
            "save_strategy": "no", "eval_strategy": "no",
        },
    }  # fmt: skip
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder / "sft.yaml"


def planned(file: Path, case: Case) -> int:
    """Bytes, as `--plan cpu` prints them, where it does not have to choose smaller micro-batches."""
    here = Device("cpu", 1, 1, 1, 1, 1, 1, None, 1e-6, waits=True)
    cfg = report.with_device_defaults(resolve(SFTRun, str(file), []), Fleet(here))
    kind, sizes = PUBLISHED[case.model]
    shape = Shape.of(AutoConfig.for_model(kind, **sizes), cfg.model)
    return peak_bytes(rows.rows_memory(shape, cfg, Place(1 << 50, report.HELD, cuda=False), case.rows))


def measured(file: Path) -> int:
    """Bytes: the peak of the process that trains."""
    command = [sys.executable, "train_phase1_sft.py", "--config", str(file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{said[-2000:]}")
    return used.ru_maxrss * 1024


def measure(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = make(Path(folder), case)
        return {**case._asdict(), "tokens": LONGEST, "planned": planned(file, case), "measured": measured(file)}


def markdown(results: dict[str, Any]) -> str:
    lines = [
        [
            row["model"].partition("/")[2],
            f"{row['rows']} x {row['accumulated']}",
            gib(row["planned"]),
            gib(row["measured"]),
            f"**{row['planned'] / row['measured']:.2f}**",
        ]
        for row in results["cases"]
    ]
    header = ["model", f"rows of {LONGEST} tokens", "planned GiB", "measured GiB", "ratio"]
    return f"{_measure.told(results)}\n\n{_measure.table(header, lines)}"


def main() -> None:
    args = _measure.parser(__doc__, repeats=False).parse_args()
    results = {**_measure.surroundings(), "cases": [measure(case) for case in CASES]}
    _measure.publish(results, markdown(results), args.json)


if __name__ == "__main__":
    main()
