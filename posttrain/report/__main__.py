"""Which command writes a report again, compares runs, or shows transcripts?

    posttrain report runs/quickstart                              report.html
    posttrain report runs/mine-rl                                 report.html of one phase, not evaluated
    posttrain report runs/quickstart runs/seed1                   comparison.html: side by side, a verdict
    posttrain report runs/quickstart/phase3/transcripts.jsonl     transcripts.html: the episodes, with filters
    posttrain report runs/quickstart --gif docs/quickstart.gif    the README's animation

Each prints the path of the page that it writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.config import run
from posttrain.report import build, comparison
from posttrain.report.animation import animate
from posttrain.report.page import build_transcripts, read_run
from posttrain.report.training_page import build_training, is_training_run
from posttrain.types import UserError

SHOWN = ("base", "phase2", "phase3")  # of the checkpoints, in the animation


def main() -> None:
    parser = argparse.ArgumentParser(prog="posttrain report", description="Writes a page into a run's folder.")
    what = "folder of a run, e.g. runs/quickstart; several to compare (RUN:CHECKPOINT); or a transcripts.jsonl"
    parser.add_argument("run", nargs="+", help=what)
    parser.add_argument("--gif", type=Path, help="write this animation of base, phase2 and phase3 instead")
    options = parser.parse_args()
    folder = Path(options.run[0])
    if options.gif is None:
        if len(options.run) > 1:
            print(comparison.build_comparison(options.run))
        elif folder.suffix == ".jsonl":
            print(build_transcripts(folder))
        elif is_training_run(folder):
            print(build_training(folder))
        else:
            print(build(folder))
        return
    results, rows = read_run(folder)
    shown = [name for name in SHOWN if name in results["checkpoints"]]
    if not shown:
        raise UserError(
            f"The animation shows the checkpoints {', '.join(SHOWN)}, but {folder} has evaluated only"
            f" {', '.join(results['checkpoints'])}."
        )
    options.gif.parent.mkdir(parents=True, exist_ok=True)
    options.gif.write_bytes(animate(results, rows, shown))
    print(options.gif)


if __name__ == "__main__":
    run(main)
