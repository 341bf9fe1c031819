"""Where do the tables of benchmarks/long get their rows?  From JSON Lines that a run has written, or a person named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from posttrain.files import read_json_lines
from posttrain.types import UserError


def stop(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(2)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file; one sentence and exit code 2 where there are none."""
    remedy = "Name a file of rows, such as those of benchmarks/results."
    try:
        rows = read_json_lines(file, remedy, appended=False)
    except UserError as error:
        stop(str(error))
    return rows or stop(f"{file} has no rows. {remedy}")
