"""Where do the tables of benchmarks/long get their rows?  From JSON Lines that a run has written, or a person named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from posttrain.files import read_json_lines
from posttrain.types import UserError


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file; UserError where there are none."""
    remedy = "Name a file of rows, such as those of benchmarks/results."
    rows = read_json_lines(file, remedy, appended=False)
    if not rows:
        raise UserError(f"{file} has no rows. {remedy}")
    return rows
