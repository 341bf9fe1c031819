"""Which tables does the README show?  Each from a file in results/.

    python benchmarks/tables.py ragen    # results/ragen_levels.jsonl, by long/ragen_levels.py; all without a name

A test compares them with the README.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._measure import table
from benchmarks.long import ragen_levels

RESULTS = Path(__file__).resolve().parent / "results"
TITLES = {
    "frozen-lake": "FrozenLake",
    "slippery": "FrozenLake, slippery",
    "sokoban-1": "Sokoban, 1 box",
    "sokoban-2": "Sokoban, 2 boxes",
    "sudoku": "Sudoku 4x4",
    "2048": "2048, to 32",
    "rubiks-cube": "Rubik's cube 2x2",
}


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


TABLES = {"ragen": ragen}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", nargs="*", help=f"of {', '.join(TABLES)}; all if none is named")
    wanted = parser.parse_args().table or list(TABLES)
    if unknown := [name for name in wanted if name not in TABLES]:
        parser.error(f"there is no table {unknown[0]}; write {', '.join(TABLES)}")
    print("\n\n".join(TABLES[name]() for name in wanted))


if __name__ == "__main__":
    main()
