"""How is a report made again?  `python -m posttrain.report runs/quickstart`; with --gif, the README's animation.

python -m posttrain.report runs/quickstart                              report.html
python -m posttrain.report runs/quickstart/phase3/transcripts.jsonl     transcripts.html: the episodes, with filters
"""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.config import run
from posttrain.report import build, transcripts_page
from posttrain.report.animation import gif
from posttrain.report.page import read
from posttrain.types import UserError

SHOWN = ("base", "phase2", "phase3")  # of the checkpoints, in the animation


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.report", description="Writes report.html into a run's folder."
    )
    parser.add_argument("run", type=Path, help="folder with results.json, e.g. runs/quickstart, or a transcripts.jsonl")
    parser.add_argument("--gif", type=Path, help="write this animation of base, phase2 and phase3 instead")
    given = parser.parse_args()
    if given.run.suffix == ".jsonl":
        print(transcripts_page.build(given.run))
        return
    if given.gif is None:
        print(build(given.run))
        return
    results, rows = read(given.run)
    shown = [name for name in SHOWN if name in results["checkpoints"]]
    if not shown:
        raise UserError(
            f"The animation shows the checkpoints {', '.join(SHOWN)}, but {given.run} has evaluated only"
            f" {', '.join(results['checkpoints'])}."
        )
    given.gif.write_bytes(gif(results, rows, shown))
    print(given.gif)


if __name__ == "__main__":
    run(main)
