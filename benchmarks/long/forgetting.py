"""What keeps phase 3 from forgetting, and what does it cost?  Every method and seed, with the same number of steps.

    make quickstart                                              # the player that all runs begin with
    python benchmarks/long/forgetting.py --steps 60 --json rows.jsonl
    python benchmarks/long/forgetting.py --steps 12 --seeds 0 --out runs/alone --json alone.jsonl  # idle
    python benchmarks/long/forgetting.py --table benchmarks/results/forgetting.jsonl \\
      --alone benchmarks/results/forgetting-alone.jsonl

Hours. A run that is finished is not run again, one that was cut goes on from its last checkpoint; every row is written
as it comes. `kept` is the mean of math, recall and pairs after the run over that before it, the same questions for all.
CPU-minutes are those of a whole run, start and evaluations included. Seconds a step are the median of rollout and
update by the clock, taken from the rows of --alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks._rows import read_rows
from posttrain import config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart" / "phase3_starpo.yaml"
MATH, RECALL = "{kind: openmathinstruct, path: embedded, rows: 1800}", "{kind: capybara, path: embedded, rows: 1200}"
ROWS = "eval_rows: 128, max_new_tokens: 80, batch_size: 16"
NONE = f"distillation={{sources: [{MATH}, {RECALL}], {ROWS}, coef: 0}}"  # measured, not trained
ARMS: dict[str, list[str]] = {  # what they have in common is the quickstart's phase 3
    "none": [NONE],
    "distillation": [],
    "KL in play": [NONE, "algorithm.beta=0.05"],
    "rate / 3": [NONE, "trainer.learning_rate=2e-4"],
    "LoRA": [NONE, "model.tuning=lora", "model.lora.r=16", "model.lora.alpha=32", "trainer.learning_rate=2e-3"],
}
SUITES = (
    "evaluation.suites={math: {n: 200, max_new_tokens: 96}, recall: {n: 200, max_new_tokens: 48},"
    " repetition: {n: 150, max_new_tokens: 120}, preferences: {n: 300}}"
)
OLD = {"math": "math/embedded/accuracy", "recall": "recall/accuracy", "pairs": "preferences/accuracy"}


def run(out: Path, player: str, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One run, unless it is finished; its row of the table. player: a folder, with {seed} where each seed has one."""
    folder = out / f"{arm.replace(' ', '-').replace('/', 'by')}-{seed}"
    done = folder / "row.json"
    if done.exists():
        return json.loads(done.read_text())
    command = [sys.executable, str(ROOT / "train_phase3_starpo.py"), "--config", str(CONFIG), *ARMS[arm], SUITES]
    command += [f"seed={seed}", f"trainer.max_steps={steps}", f"model.name_or_path={player.format(seed=seed)}"]
    command += [f"output_dir={folder}", "report_to=none", "diagnostics.early_stop=false", "diagnostics.every=0"]
    command += [f"evaluation.every={steps}", *(["--resume"] if folder.exists() else [])]
    spent = out / f"{folder.name}.cpu"  # a line for each try
    with (out / f"{folder.name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    with spent.open("a") as file:
        file.write(f"{usage.ru_utime + usage.ru_stime}\n")
    if status:
        raise SystemExit(f"{folder.name} failed, see {out / folder.name}.log.")
    table = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    old = [line for line in table if "evaluation/success" in line]
    final = next(line for line in table if "final/success" in line)
    row: dict[str, Any] = {"arm": arm, "seed": seed, "steps": steps}
    for when, line in (("before", old[0]), ("after", old[-1])):
        row[when] = {name: line[f"evaluation/{key}"] for name, key in OLD.items()}
        row[when]["repetition"] = line["evaluation/repetition/seq_rep_4"]
        row[when]["kl"] = line["evaluation/distillation_kl"]
    row["play"] = {name: final[f"final/{name}/success"] for name in ("frozen_lake", "sokoban")}
    row["minutes"] = sum(map(float, spent.read_text().split())) / 60
    timed = [line["seconds/rollout"] + line["seconds/update"] for line in table if "seconds/rollout" in line]
    row["seconds"] = statistics.median(timed)
    done.write_text(json.dumps(row))
    return row


def kept(row: dict[str, Any]) -> float:
    """Percent of the accuracy before the run, mean of the three suites."""
    return 100 * statistics.fmean(row["after"][name] / row["before"][name] for name in OLD)


def show(rows: list[dict[str, Any]], alone: Sequence[dict[str, Any]] = ()) -> None:
    """The table; `alone` are rows of shorter runs that had the machine to themselves, for the seconds a step."""
    seconds = {
        arm: statistics.median(r["seconds"] for r in alone if r["arm"] == arm) for arm in {r["arm"] for r in alone}
    }
    named = "method | seeds | kept: math, recall, pairs | mean of the three [each seed] | repeated 4-grams | KL"
    print(f"| {named} | FrozenLake [each seed] | Sokoban [each seed] | CPU-minutes | seconds a step |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for arm in dict.fromkeys([*ARMS, *(row["arm"] for row in rows)]):  # some are gone since their rows were made
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        if not own:
            continue
        each = [100 * statistics.fmean(r["after"][name] / r["before"][name] for r in own) for name in OLD]
        cells = [arm, str(len(own)), ", ".join(f"{value:.0f}" for value in each), mean_and_each([kept(r) for r in own])]
        before, after = (100 * statistics.fmean(r[when]["repetition"] for r in own) for when in ("before", "after"))
        cells += [f"{before:.1f} to {after:.1f} %", f"{statistics.fmean(r['after']['kl'] for r in own):.4f}"]
        cells += [mean_and_each([100 * r["play"][env] for r in own]) for env in ("frozen_lake", "sokoban")]
        cells += [
            f"{statistics.fmean(r['minutes'] for r in own):.1f}",
            f"{seconds[arm]:.1f}" if arm in seconds else "-",
        ]
        print("|", " | ".join(cells), "|")


def mean_and_each(values: list[float]) -> str:
    return f"{statistics.fmean(values):.0f} [{', '.join(f'{value:.0f}' for value in values)}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--player", default="runs/quickstart/phase2/final", help="where runs begin; {seed} is filled in"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/forgetting"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write every row to this file, as it comes")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the rows of such a file and run nothing")
    parser.add_argument("--alone", type=Path, metavar="FILE", help="with --table: rows for the seconds a step")
    args = parser.parse_args()
    if args.alone and not args.table:
        parser.error("--alone goes with --table")
    if args.table:
        show(*(read_rows(file) for file in (args.table, args.alone) if file))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in args.seeds:
        for arm in args.arms:
            rows.append(run(args.out.resolve(), args.player, arm, seed, args.steps))
            if args.json:
                args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)


if __name__ == "__main__":
    config.run(main)
