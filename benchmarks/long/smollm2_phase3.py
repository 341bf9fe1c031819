"""What did phase 3 of SmolLM2 win?  The levels of each evaluation, from the metrics.jsonl of its runs.

    python benchmarks/long/smollm2_phase3.py --add runs/smollm2/phase3 --start "GSM8K and 2600 games"
    python benchmarks/long/smollm2_phase3.py    # the table

A row is one evaluation of one run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks._measure import table
from benchmarks._rows import read_rows
from posttrain import config
from posttrain.files import write_whole
from posttrain.report.tables import percent
from posttrain.types import Record, UserError

RESULTS = Path(__file__).resolve().parents[1] / "results" / "smollm2-phase3.jsonl"
GAMES = {"frozen_lake": "FrozenLake", "sokoban": "Sokoban"}


def rows_of(run: Path, start: str) -> list[Record]:
    """A row for each evaluation of a run; `start` says what the model that it began with has imitated.

    The last one plays test levels with the policy that the run kept as its best on the validation levels.
    """
    if not (run / "run_config.yaml").exists():
        raise UserError(f"{run} is no folder of a run of phase 3: there is no run_config.yaml in it.")
    settings = yaml.safe_load((run / "run_config.yaml").read_text(encoding="utf-8"))
    seed, evaluation = settings["seed"], settings["evaluation"]
    validation = f"validation, {evaluation['episodes']} each"
    test = f"test, {evaluation['final_episodes']} each, of the best step"
    rows = []
    for metrics in read_rows(run / "metrics.jsonl"):
        for prefix, levels in (("evaluation", validation), ("final", test)):
            if f"{prefix}/frozen_lake/success" in metrics:
                figures = {
                    game: {key: metrics[f"{prefix}/{game}/{key}"] for key in ("success", "low", "high")}
                    for game in GAMES
                }
                rows.append({"start": start, "seed": seed, "step": metrics["step"], "levels": levels} | figures)
    best = [int(folder.name.removeprefix("best-")) for folder in run.glob("best-*")]
    if not rows or not best:
        raise UserError(
            f"{run} has not been evaluated yet: there is no evaluation of {' and '.join(GAMES)} in metrics.jsonl, or no"
            " folder best-STEP."
        )
    return [row | {"step": max(best)} if row["levels"] == test else row for row in rows]


def markdown(rows: list[Record]) -> str:
    """A line for each run and game: validation levels won after each number of steps, then test levels."""
    steps = sorted({row["step"] for row in rows})
    cells = []
    for start, seed in dict.fromkeys((row["start"], row["seed"]) for row in rows):
        own = [row for row in rows if (row["start"], row["seed"]) == (start, seed)]
        for game, title in GAMES.items():
            won = {row["step"]: percent(row[game]["success"]) for row in own if row["levels"].startswith("validation")}
            last = ["", ""]
            for row in own:
                if row["levels"].startswith("test"):
                    share, low, high = (row[game][key] for key in ("success", "low", "high"))
                    last = [str(row["step"]), f"{percent(share)} [{100 * low:.0f}, {100 * high:.0f}]"]
            cells.append([start, str(seed), title, *(won.get(step, "") for step in steps), *last])
    header = ["imitated", "seed", "game", *(f"{step} steps" for step in steps), "best step", "its test levels"]
    return table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, help="the folder of a run, whose rows take the place of older ones of it")
    parser.add_argument("--start", help="with --add: what the model that it began with has imitated")
    given = parser.parse_args()
    if (given.add is None) != (given.start is None):
        parser.error("--add and --start belong together")
    rows = read_rows(RESULTS)
    if given.add:
        new = rows_of(given.add, given.start)
        run = {(row["start"], row["seed"]) for row in new}
        rows = [row for row in rows if (row["start"], row["seed"]) not in run] + new
        write_whole(RESULTS, (f"{json.dumps(row)}\n" for row in rows))
    print(markdown(rows))


if __name__ == "__main__":
    config.run(main)
