"""python -m posttrain.data.embedded --out runs/quickstart/base: writes the base model of the quickstart."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from posttrain.data.embedded.base_model import build_base


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the base model of the quickstart.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    disable_progress_bar()  # of writing a file of two megabytes
    print(f"The base model is in {build_base(arguments.out, arguments.seed)}.")


if __name__ == "__main__":
    main()
