"""How is a report made again?  `python -m posttrain.report runs/quickstart`"""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.config import run
from posttrain.report import build


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.report", description="Writes report.html into a run's folder."
    )
    parser.add_argument("run", type=Path, help="folder with results.json, e.g. runs/quickstart")
    print(build(parser.parse_args().run))


if __name__ == "__main__":
    run(main)
