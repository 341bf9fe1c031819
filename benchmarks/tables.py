"""Which tables do the README, docs/results.md and RESULTS.md show?  Each from files in results/.

    python benchmarks/tables.py               # all of them
    python benchmarks/tables.py quickstart    # results/quickstart.json: parts of the results.json of `make quickstart`
    python benchmarks/tables.py seeds         # that and results/quickstart-seed*.json, by "Another seed" of decisions
    python benchmarks/tables.py merge         # results/merge.json, by "An average of phases 2 and 3" of docs/results.md
    python benchmarks/tables.py smollm2       # results/smollm2.json, by configs/smollm2/evaluate.yaml
    python benchmarks/tables.py ragen         # results/ragen_levels.jsonl, by long/ragen_levels.py
    python benchmarks/tables.py gpu           # aims on a GPU beside results/gpu-*.json, by gpu.py

A test compares them with these texts; the table of the seeds stands in docs/results.md, that of GPUs in RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
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
    "linear": "average of phases 2 and 3, linear",
    "slerp": "average of phases 2 and 3, slerp",
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


REPLACED = {"144e367a9d76-dirty"}  # before the engine with CUDA graphs, compiled layers and ConvGPT's fewer kernels


class Aim(NamedTuple):
    """Aim("decoding, ConvGPT-164M, 128 x 512: share of the copy's bandwidth", .45, "{:.0%}", share)"""

    what: str
    least: float  # or with a minus sign the most
    form: str
    of: Callable[[Record], float | None]  # in a file of figures, if they are there


def decoded(model: str, key: str) -> Callable[[Record], float | None]:
    """A figure of CUDA graphs in block A."""

    def of(figures: Record) -> float | None:
        rows = [row for row in figures.get("rows", ()) if row.get("what") == "decode" and row["model"] == model]
        replayed = [row for row in rows if row["way"] == "graph" and row.get("captures", 1)]
        return next((row[key] for row in replayed if key in row), None)

    return of


def as_meant(figures: Record) -> bool:
    """Whether our layers stayed compiled and our steps CUDA graphs, as far as it was written down."""
    each = [
        part
        for row in figures.get("rows", ())
        for own in row.get("ours", ())
        for part in (own, *own.get("iterations", ()))
    ]
    return all(part.get("compiled", True) and part.get("captures", 1) for part in each)


def steps_of(figures: Record) -> dict[str, Record]:
    """The figures of the steps of block B that ran as they were meant, by name, or those of phases.py alone."""
    found = {row["step"]: row["figures"] for row in figures.get("steps", ()) if row.get("figures")}
    if figures.get("size") == "convgpt":
        found |= {row["phase"]: figures for row in figures["rows"]}
    return {name: each for name, each in found.items() if as_meant(each)}


def of_step(name: str, read: Callable[[Record, Record], float]) -> Callable[[Record], float | None]:
    """A figure of a step of block B, from what its script wrote and the first row of that."""

    def of(figures: Record) -> float | None:
        steps = steps_of(figures)
        return read(steps[name], steps[name]["rows"][0]) if name in steps else None

    return of


def rate(_: Record, row: Record, side: str = "ours") -> float:
    """Tokens a second of the steady updates, with the time of the log-probs that were computed ahead of them."""
    ahead = median(each["ahead"] for each in row[side]) / row["epochs"]
    return row["tokens"] / (row["tokens"] / median(each["steady"] for each in row[side]) + ahead)


def used(figures: Record, row: Record) -> float:
    """MFU of phase 1."""
    return 3 * row["forward_flops"] / row["tokens"] * rate(figures, row) / figures["TFLOP_s"] / 1e12


def pairs_share(figures: Record) -> float | None:
    """The rate of phase 2 as a share of that of phase 1, in the same block."""
    steps = steps_of(figures)
    if not {"sft", "dpo"} <= steps.keys():
        return None
    sft, dpo = (rate(steps[name], steps[name]["rows"][0]) for name in ("sft", "dpo"))
    return dpo / sft


def seconds_of(_: Record, row: Record, side: str = "ours") -> float:
    return median(one["rollout"] + one["update"] for each in row[side] for one in each["iterations"])


def faster(figures: Record, row: Record) -> float:
    """Times TRL as it comes: in phases.py or iteration.py."""
    if "phase" in row:
        return rate(figures, row) / rate(figures, row, "trl")
    return seconds_of(figures, row, "trl") / seconds_of(figures, row)


GPU_AIMS = (
    Aim("ConvGPT-164M: SFT, tokens/s", 100_000, "{:,.0f}", of_step("sft", rate)),
    Aim("SFT, MFU", 0.18, "{:.0%}", of_step("sft", used)),
    Aim("SFT beside TRL", 1.5, "{:.1f}x", of_step("sft", faster)),
    Aim("DPO, of SFT's rate", 0.4, "{:.0%}", pairs_share),
    Aim("DPO beside TRL", 1.5, "{:.1f}x", of_step("dpo", faster)),
    Aim("an iteration beside TRL", 3, "{:.1f}x", of_step("iteration", faster)),
    Aim("decoding 128 x 512 by CUDA graphs, of the copy's bandwidth", 0.45, "{:.0%}", decoded("convgpt", "bandwidth")),
    Aim("Qwen2.5-0.5B: SFT, tokens/s", 100_000, "{:,.0f}", of_step("sft-qwen", rate)),
    Aim("decoding 256 rows by CUDA graphs, tokens/s", 20_000, "{:,.0f}", decoded("qwen", "tokens_per_s")),
    Aim("an iteration of 8 x 16 episodes of 5 turns, s", -10, "{:.1f}", of_step("iteration-qwen", seconds_of)),
)


def gpu() -> str:
    """A row for each aim and each file that has its figure, with card and commit.

    Figures of code that has been replaced since do not reach an aim.
    """
    files = sorted([*RESULTS.glob("gpu-*.json"), *RESULTS.glob("phases-*-h?00.json")])
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    cells = []
    for aim in GPU_AIMS:
        told = [aim.what, f"at {'least' if aim.least > 0 else 'most'} {aim.form.format(abs(aim.least))}"]
        found = [(value, figures) for figures in results if (value := aim.of(figures)) is not None]
        for value, figures in found:
            where = f"{figures['machine']}, {figures['commit']}"
            if figures["commit"] in REPLACED:
                cells.append([*told, "not yet measured", f"{aim.form.format(value)} by earlier code ({where})"])
                continue
            reached = value >= aim.least if aim.least > 0 else value <= -aim.least
            cells.append([*told, aim.form.format(value), f"{'reached' if reached else 'missed'} ({where})"])
        cells += [] if found else [[*told, "not yet measured", ""]]
    return table(["on a GPU", "aim", "measured", ""], cells)


TABLES: dict[str, Callable[[], str]] = {
    "quickstart": lambda: of_checkpoints("quickstart", QUICKSTART),
    "seeds": seeds,
    "merge": lambda: of_checkpoints("merge", QUICKSTART),
    "smollm2": lambda: of_checkpoints("smollm2", SMOLLM2),
    "ragen": ragen,
    "gpu": gpu,
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
