"""How do environments write plain sentences?  Lists, counts, and ways over a grid in words."""

from __future__ import annotations

from collections.abc import Sequence

DIRECTIONS = {"Left": "to the left", "Right": "to the right", "Up": "up", "Down": "down"}
PLACES = {"Left": "to the left of", "Right": "to the right of", "Up": "above", "Down": "below"}

SIDES = {"Left": "on the left", "Right": "on the right", "Up": "above", "Down": "below"}


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return names as a sentence lists them.

    >>> listed(["Left", "Down", "Up"])
    'Left, Down and Up'
    """
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def escaped(text: str) -> str:
    r"""Return a text that a terminal shows and does not obey: all but line feeds that cannot be printed is escaped.

    >>> escaped("\x1b[2Jno")
    '\\x1b[2Jno'
    """
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "turn"), counted(2, "box")
    ('1 turn', '2 boxes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("x", "sh", "ch")) else "s"
    return f"{number} {noun}{ending}"


def way_in_words(way: tuple[int, int], noun: str = "step") -> str:
    """Return a way of (down, right) cells in words; empty for no way.

    >>> way_in_words((-1, 2))
    '2 steps to the right and 1 step up'
    """
    down, right = way
    parts = [(right, "Right"), (-right, "Left"), (down, "Down"), (-down, "Up")]
    return listed([f"{counted(steps, noun)} {DIRECTIONS[name]}" for steps, name in parts if steps > 0])


def at_in_words(row: int, column: int) -> str:
    return f"row {row}, column {column}"


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]
