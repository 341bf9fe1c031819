"""How much memory, how many seconds and how much money will a run take?  Arithmetic, before anything is loaded.

shape.py     a model in numbers
parts.py     what takes memory in all phases
episodes.py  phase 3: its memory, and the most that fits at once
"""

from posttrain.plan.episodes import (
    MOST_TOKENS,
    Place,
    Plan,
    always,
    checkpointed,
    choose,
    learning,
    make,
    output_tiles,
    playing,
    rows_at_once,
    stepping,
)
from posttrain.plan.parts import MARGIN, Numbers, conversations, gib, most
from posttrain.plan.shape import Shape

__all__ = [
    "MARGIN",
    "MOST_TOKENS",
    "Numbers",
    "Place",
    "Plan",
    "Shape",
    "always",
    "checkpointed",
    "choose",
    "conversations",
    "gib",
    "learning",
    "make",
    "most",
    "output_tiles",
    "playing",
    "rows_at_once",
    "stepping",
]
