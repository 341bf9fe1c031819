"""Which tables do the README and docs/results.md show?  Each from files in results/.

    python benchmarks/tables.py               # all of them
    python benchmarks/tables.py quickstart    # results/quickstart.json: parts of the results.json of `make quickstart`
    python benchmarks/tables.py seeds         # that and results/quickstart-seed*.json, by "Another seed" of decisions
    python benchmarks/tables.py smollm2       # results/smollm2.json, by configs/smollm2/evaluate.yaml
    python benchmarks/tables.py ragen         # results/ragen_levels.jsonl, by long/ragen_levels.py

A test compares them with these texts; the table of the seeds stands in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._measure import table
from benchmarks.long import ragen_levels
from posttrain.metrics import wilson
from posttrain.report.tables import percent
from posttrain.types import Record

RESULTS = Path(__file__).resolve().parent / "results"
ROWS = {
    "base": "base",
    "phase1": "phase 1: SFT",
    "coin": "phase 2 with labels by a coin",
    "phase2": "phase 2: DPO",
    "phase3": "phase 3: StarPO",
    "phase3_last": "phase 3, last step",
    "phase3_seed1_last": "phase 3, last step, seed 1",
}
TITLES = {
    "frozen-lake": "FrozenLake",
    "slippery": "FrozenLake, slippery",
    "sokoban-1": "Sokoban, 1 box",
    "sokoban-2": "Sokoban, 2 boxes",
    "sudoku": "Sudoku 4x4",
    "2048": "2048, to 32",
    "rubiks-cube": "Rubik's cube 2x2",
}


class Column(NamedTuple):
    """Column("Sokoban", "envs.sokoban", "success"): a figure of each checkpoint, a share that is counted or a mean."""

    title: str
    place: str  # within a checkpoint's part of results.json
    metric: str

    def entry(self, checkpoint: Record) -> Record:
        for key in self.place.split("."):
            checkpoint = checkpoint[key]
        return checkpoint

    def cell(self, checkpoint: Record) -> str:
        entry = self.entry(checkpoint)
        value = entry[self.metric]
        if self.metric in ("accuracy", "success", "seq_rep_4"):  # the figures that the intervals belong to
            low, high = entry["low"], entry["high"]
        elif self.metric == "last_number":
            low, high = wilson(round(value * entry["n"]), entry["n"])
        else:
            return percent(value)
        return f"{percent(value)} [{100 * low:.0f}, {100 * high:.0f}]"


PLAY = (Column("FrozenLake", "envs.frozen_lake", "success"), Column("Sokoban", "envs.sokoban", "success"))
QUICKSTART = (
    Column("math", "math.embedded", "accuracy"),
    Column("recall", "recall", "accuracy"),
    Column("pairs ranked right", "preferences", "accuracy"),
    Column("repeated 4-grams", "repetition", "seq_rep_4"),
    *PLAY,
)
SMOLLM2 = (
    Column("GSM8K: in a box", "math.gsm8k_held_out", "accuracy"),
    Column("GSM8K: last number", "math.gsm8k_held_out", "last_number"),
    Column("repeated 4-grams", "repetition", "seq_rep_4"),
    Column("of the first 128 tokens", "repetition", "seq_rep_4_first"),
    *PLAY,
)


KEPT = QUICKSTART[:3]  # what phases 1 and 2 taught


def read_checkpoints(name: str) -> dict[str, Record]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["checkpoints"]


def of_checkpoints(name: str, columns: Sequence[Column]) -> str:
    """A row for each checkpoint of a results.json."""
    checkpoints = read_checkpoints(name)
    entries = [(label, checkpoints[key]) for key, label in ROWS.items() if key in checkpoints]
    cells = [[label, *(column.cell(entry) for column in columns)] for label, entry in entries]
    return table(["", *(column.title for column in columns)], cells)


def seeds() -> str:
    """Phases 2 and 3 of each seed of the quickstart, and the means of phase 3."""
    cells, finals = [], []
    for seed, name in enumerate(("quickstart", "quickstart-seed1", "quickstart-seed2")):
        before, after = (
            {column.title: column.entry(checkpoint)[column.metric] for column in QUICKSTART}
            for checkpoint in map(read_checkpoints(name).__getitem__, ("phase2", "phase3"))
        )
        kept = fmean(after[column.title] / before[column.title] for column in KEPT)
        finals.append(after | {"kept": kept})
        cells.append(["phase 2", str(seed), "", *map(percent, before.values())])
        cells.append(["phase 3", str(seed), percent(kept), *map(percent, after.values())])
    means = {name: f"{100 * fmean(final[name] for final in finals):.1f} %" for name in finals[0]}
    cells.append(["phase 3", "mean", means.pop("kept"), *means.values()])
    return table(["", "seed", "kept", *(column.title for column in QUICKSTART)], cells)


def ragen() -> str:
    """A row for each environment: published figures, then the means of our seeds, sampled at temperature 1."""
    rows = ragen_levels.read_rows(RESULTS / "ragen_levels.jsonl")
    cells = []
    for label, game in ragen_levels.GAMES.items():
        own = [row for row in rows if row["env"] == label]
        ours = [_mean([row[stage]["sampled"] / row["of"] for row in own]) for stage in ("sft", "rl")]
        published = [f"{game.published.sft:.2f}", f"{game.published.rl:.2f}"] if game.published else ["-", "-"]
        played = [own[0]["random"], own[0]["expert"]]
        best = own[0]["optimum"]
        others = [f"{won / own[0]['of']:.2f}" for won in played] + ["-" if best is None else f"{best:.2f}"]
        minutes = fmean(sum(row["minutes"].values()) for row in own)
        cells.append([TITLES[label], *published, *ours, *others, f"{minutes:.0f}"])
    header = ["", "SCOUT 0.5B: SFT", "SFT + RL", "ours: SFT", "SFT + RL", "random", "expert", "optimum", "CPU-minutes"]
    return table(header, cells)


def _mean(shares: Sequence[float]) -> str:
    """The mean and, of several seeds, the lowest and the highest."""
    spread = f" [{min(shares):.2f}, {max(shares):.2f}]" if len(shares) > 1 else ""
    return f"{fmean(shares):.2f}{spread}"


TABLES: dict[str, Callable[[], str]] = {
    "quickstart": lambda: of_checkpoints("quickstart", QUICKSTART),
    "seeds": seeds,
    "smollm2": lambda: of_checkpoints("smollm2", SMOLLM2),
    "ragen": ragen,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", nargs="*", help=f"of {', '.join(TABLES)}; all if none is named")
    wanted = parser.parse_args().table or list(TABLES)
    if unknown := [name for name in wanted if name not in TABLES]:
        parser.error(f"there is no table {unknown[0]}; write {', '.join(TABLES)}")
    print("\n\n".join(TABLES[name]() for name in wanted))


if __name__ == "__main__":
    main()
