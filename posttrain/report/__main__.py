"""How is a report made again?  And how are runs compared, and transcripts read?  One command.

    posttrain report runs/quickstart                              report.html
    posttrain report runs/quickstart runs/seed1                   comparison.html: side by side, a verdict
    posttrain report runs/quickstart/phase3/transcripts.jsonl     transcripts.html: the episodes, with filters
    posttrain report runs/quickstart --gif docs/quickstart.gif    the README's animation

Each prints the path of the page that it has written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.config import run
from posttrain.report import build, comparison
from posttrain.report.animation import gif
from posttrain.report.page import build_transcripts, read
from posttrain.types import UserError

SHOWN = ("base", "phase2", "phase3")  # of the checkpoints, in the animation


def main() -> None:
    parser = argparse.ArgumentParser(prog="posttrain report", description="Writes a page into a run's folder.")
    what = "folder with results.json, e.g. runs/quickstart; several to compare (RUN:CHECKPOINT); or a transcripts.jsonl"
    parser.add_argument("run", nargs="+", help=what)
    parser.add_argument("--gif", type=Path, help="write this animation of base, phase2 and phase3 instead")
    given = parser.parse_args()
    folder = Path(given.run[0])
    if given.gif is None:
        if len(given.run) > 1:
            print(comparison.build(given.run))
        elif folder.suffix == ".jsonl":
            print(build_transcripts(folder))
        else:
            print(build(folder))
        return
    results, rows = read(folder)
    shown = [name for name in SHOWN if name in results["checkpoints"]]
    if not shown:
        raise UserError(
            f"The animation shows the checkpoints {', '.join(SHOWN)}, but {folder} has evaluated only"
            f" {', '.join(results['checkpoints'])}."
        )
    given.gif.parent.mkdir(parents=True, exist_ok=True)
    given.gif.write_bytes(gif(results, rows, shown))
    print(given.gif)


if __name__ == "__main__":
    run(main)
