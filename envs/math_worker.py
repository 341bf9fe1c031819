"""Are two formulas equal?  math-verify in a process of its own, which envs/math_judge.py starts, asks and ends.

It imports nothing of this project: the process is started without its folder on the path.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

MEMORY = 4 << 30  # bytes of address space
ROUNDED = 2e-6  # relative difference of a decimal fraction of six digits and what it stands for
EXACT = 1e-20  # and of two formulas without decimal fractions, of which 30 digits are computed
DIGITS = 30
ZERO = 1e-100  # what is left of terms that cancel


def serve() -> None:
    """Answer each line of JSON [given, answer] with "true" or "false", until the pipe closes."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    # units are taken off before; what is not one formula must not be judged by the last number in it
    default = LatexExtractionConfig()
    spelling = replace(default.normalization_config, units=False)
    formula = replace(default, boxed_match_priority=0, normalization_config=spelling)

    @lru_cache(maxsize=64)
    def read(text: str) -> Any:
        return parse(rf"\boxed{{{text}}}", [formula], parsing_timeout=0)

    def same(response: str, answer: str) -> bool:
        values, expected = read(response), read(answer)
        return verify(expected, values, timeout_seconds=None) and is_near(values, expected)

    print("ready", flush=True)
    for line in sys.stdin:
        print("true" if same(*json.loads(line)) else "false", flush=True)


def is_near(response: list[Any], expected: list[Any]) -> bool:
    """Return whether two formulas agree in their leading digits: math-verify takes 1e-7 and 2e-7 for equal.

    Variables get values. What has no numeric value, such as a set or an equation, is left to math-verify.
    """
    one: Any = response[0] if response else None
    other: Any = expected[0] if expected else None
    try:
        names = sorted({str(symbol) for symbol in one.free_symbols | other.free_symbols})
        values = {name: Fraction(7 + 4 * number, 5 + number) for number, name in enumerate(names)}
        left, right = (
            side.doit().subs({symbol: values[str(symbol)] for symbol in side.free_symbols}).evalf(DIGITS)
            for side in (one, other)
        )
        if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
            return True
        rounded = any(atom.is_Float for atom in one.atoms() | other.atoms())
        largest = max(abs(left), abs(right))
        return bool(largest < ZERO or abs(left - right) <= (ROUNDED if rounded else EXACT) * largest)
    except (TypeError, ValueError, ArithmeticError, AttributeError):  # what has neither variables nor a value
        return True


if __name__ == "__main__":
    serve()
