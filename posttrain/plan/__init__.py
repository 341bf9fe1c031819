"""How much memory, how many seconds and how much money will a run take?  Arithmetic, before anything is loaded.

shape.py     a model in numbers
parts.py     what takes memory in all phases
episodes.py  phase 3: its memory, and the most that fits at once
rows.py      phases 1 and 2: the same
devices.py   what devices can do and cost
work.py      how many rows, tokens and turns a run sees
seconds.py   a roofline of it all
known_models.py   the sizes of models that cannot be read yet
report.py    `--plan`
"""

from posttrain.plan.episodes import (
    MOST_TOKENS,
    Place,
    Plan,
    always,
    choose,
    learning,
    make,
    output_tiles,
    playing,
    rows_at_once,
)
from posttrain.plan.parts import Numbers, gib, most
from posttrain.plan.report import show
from posttrain.plan.rows import warning
from posttrain.plan.shape import Shape

__all__ = [
    "MOST_TOKENS",
    "Numbers",
    "Place",
    "Plan",
    "Shape",
    "always",
    "choose",
    "gib",
    "learning",
    "make",
    "most",
    "output_tiles",
    "playing",
    "rows_at_once",
    "show",
    "warning",
]
