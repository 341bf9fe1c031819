"""What did phase 3 gain on a pretrained model?  The evaluations of runs, from their metrics.jsonl.

    python benchmarks/long/phase3_runs.py --add runs/gsm8k --start "GSM8K, LoRA"    # what the model began with
    python benchmarks/long/phase3_runs.py    # the table
    python benchmarks/long/phase3_runs.py --plot docs/images/recipes.png

A row is one environment in one evaluation of one run.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks._measure import table
from benchmarks._rows import read_rows
from posttrain import config
from posttrain.files import write_whole
from posttrain.report.tables import percent
from posttrain.types import Record, UserError, short_name

RESULTS = Path(__file__).resolve().parents[1] / "results" / "phase3-runs.jsonl"
RUN = ("model", "start", "seed")  # the columns that tell runs apart


def rows_of(run: Path, start: str) -> list[Record]:
    """A row for each environment and evaluation of a run; `start` says what the model began with.

    The last evaluation plays test levels with the policy that the run kept as its best on the validation levels.
    """
    if not (run / "run_config.yaml").exists():
        raise UserError(f"{run} is not a folder of a run of phase 3: there is no run_config.yaml in it.")
    settings = yaml.safe_load((run / "run_config.yaml").read_text(encoding="utf-8"))
    named = {"model": short_name(settings["model"]["name_or_path"]), "start": start, "seed": settings["seed"]}
    envs = [section.get("label") or section["name"] for section in settings["envs"]]
    best = [int(folder.name.removeprefix("best-")) for folder in run.glob("best-*")]
    rows: list[Record] = []
    for metrics in read_rows(run / "metrics.jsonl"):
        for prefix, split, key in (("evaluation", "validation", "episodes"), ("final", "test", "final_episodes")):
            for env in envs:
                if f"{prefix}/{env}/success" in metrics and best:
                    place = {
                        "env": env,
                        "step": max(best) if split == "test" else metrics["step"],
                        "split": split,
                        "levels": settings["evaluation"][key],
                    }
                    figures = {figure: metrics[f"{prefix}/{env}/{figure}"] for figure in ("success", "low", "high")}
                    rows.append(named | place | figures)
    if not rows:
        raise UserError(
            f"{run} has not been evaluated yet: there is no evaluation of {' and '.join(envs)} in metrics.jsonl, or no"
            " folder best-STEP."
        )
    return rows


def markdown(rows: list[Record]) -> str:
    """A line for each run and environment: validation levels won after each number of steps, then test levels."""
    lines: list[list[str]] = []
    for key in dict.fromkeys((*(row[name] for name in RUN), row["env"]) for row in rows):
        own = [row for row in rows if (*(row[name] for name in RUN), row["env"]) == key]
        curve = [f"{row['step']}: {percent(row['success'])}" for row in own if row["split"] == "validation"]
        last = ["", ""]
        for row in own:
            if row["split"] == "test":
                within = f"[{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
                last = [str(row["step"]), f"{percent(row['success'])} {within} of {row['levels']}"]
        lines.append([*map(str, key), ", ".join(curve), *last])
    header = [
        "model",
        "start",
        "seed",
        "environment",
        "validation levels won after steps",
        "best step",
        "test levels won",
    ]
    return table(header, lines)


def plot(rows: list[Record], file: Path) -> None:
    """One panel for each model and start, a line for each run: validation levels won after so many steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for row in rows:
        if row["split"] == "validation":
            line = f"{row['env'].replace('_', ' ')}, seed {row['seed']}"
            curves.setdefault((row["model"], row["start"]), {}).setdefault(line, []).append(row)
    columns = 3
    lines = -(-len(curves) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(11, 2.9 * lines), sharey=True, squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, ((model, start), runs) in zip(axes.flat, curves.items(), strict=False):
        for name, points in runs.items():
            steps, shares = ([point[key] for point in points] for key in ("step", "success"))
            axis.plot(steps, shares, marker="o", markersize=3, label=name)
            axis.fill_between(steps, [p["low"] for p in points], [p["high"] for p in points], alpha=0.12)
        axis.set_title("\n".join([model, *textwrap.wrap(start, 52)]), fontsize=8)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7, loc="lower right")
        axis.tick_params(labelsize=7)
    figure.supxlabel("steps of phase 3", fontsize=8)
    figure.supylabel("validation levels won, with 95 % intervals", fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, help="the folder of a run, whose rows take the place of older ones of it")
    parser.add_argument("--start", help="with --add: what the model began with, and what was trained")
    parser.add_argument("--plot", type=Path, help="draw the curves of all runs into this file")
    given = parser.parse_args()
    if (given.add is None) != (given.start is None):
        parser.error("--add and --start belong together")
    rows = read_rows(RESULTS)
    if given.add:
        new = rows_of(given.add, given.start)
        rows = [row for row in rows if any(row[name] != new[0][name] for name in RUN)] + new
        write_whole(RESULTS, (f"{json.dumps(row)}\n" for row in rows))
    if given.plot:
        plot(rows, given.plot)
    print(markdown(rows))


if __name__ == "__main__":
    config.run(main)
