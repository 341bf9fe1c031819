"""Which statements about numbers and lists can be decided?  Closed ones by computing, linear ones by elimination."""

from __future__ import annotations

import operator
from collections import Counter
from functools import lru_cache
from math import gcd

from envs.lean.syntax import RELATIONS, Expr

COMPARE = {
    "=": operator.eq, "≠": operator.ne, "≤": operator.le, "<": operator.lt, "≥": operator.ge, ">": operator.gt,
}  # fmt: skip
BRANCHES = 64  # cases that `refuted` distinguishes
NESTED = 4  # equivalences in each other
ROWS = 300  # inequalities it keeps at once
EFFORT = 30_000  # coefficients that are looked at for one question
BITS = 256  # of a coefficient: each elimination may double them

# The inequality 0 <= constant + sum of coefficient * name, as ((name, coefficient), ...), constant; sorted by name.
LinearForm = tuple[tuple[tuple[str, int], ...], int]


def compute(expr: Expr) -> int | tuple[int, ...] | None:
    """Return the value of a closed term; None where it is not closed, or not a term."""
    kind = expr[0]
    if kind == "num":
        return expr[1]
    if kind == "list":
        items = [compute(item) for item in expr[1]]
        return (
            tuple(item for item in items if isinstance(item, int)) if all(isinstance(i, int) for i in items) else None
        )
    if kind == "proj" and expr[2] in ("length", "reverse"):
        inner = compute(expr[1])
        if not isinstance(inner, tuple):
            return None
        return len(inner) if expr[2] == "length" else inner[::-1]
    if kind == "bin" and expr[1] in ("+", "*", "++"):
        left, right = compute(expr[2]), compute(expr[3])
        if expr[1] == "++":
            return left + right if isinstance(left, tuple) and isinstance(right, tuple) else None
        if isinstance(left, int) and isinstance(right, int):
            return left + right if expr[1] == "+" else left * right
    return None


def decided(formula: Expr) -> bool | None:
    """Return whether a closed formula without ∃ is true; None where it is not a closed formula."""
    kind = formula[0]
    if kind == "name":
        return {"True": True, "False": False}.get(formula[1])
    if kind == "not":
        inner = decided(formula[1])
        return None if inner is None else not inner
    if kind != "bin":
        return None
    if formula[1] in RELATIONS:
        left, right = compute(formula[2]), compute(formula[3])
        if left is None or right is None or isinstance(left, int) != isinstance(right, int):
            return None
        if isinstance(left, tuple) and formula[1] not in ("=", "≠"):
            return None
        return COMPARE[formula[1]](left, right)
    left, right = decided(formula[2]), decided(formula[3])
    if left is None or right is None:
        return None
    return {"∧": left and right, "∨": left or right, "→": not left or right, "↔": left == right}.get(formula[1])


def linear_form(expr: Expr) -> tuple[dict[str, int], int] | None:
    """Return a term over natural numbers as coefficients and constant; None where it is not linear."""
    kind = expr[0]
    if kind == "num":
        return {}, expr[1]
    if kind == "name":
        return {expr[1]: 1}, 0
    if kind != "bin" or expr[1] not in ("+", "*"):
        return None
    left, right = linear_form(expr[2]), linear_form(expr[3])
    if left is None or right is None:
        return None
    if expr[1] == "*":
        if left[0] and right[0]:
            return None
        (terms, constant), factor = (left, right[1]) if not right[0] else (right, left[1])
        return {name: factor * times for name, times in terms.items()}, factor * constant
    terms = dict(left[0])
    for name, times in right[0].items():
        terms[name] = terms.get(name, 0) + times
    return terms, left[1] + right[1]


def _row(terms: dict[str, int], constant: int) -> LinearForm:
    """Return the row divided by the common divisor of its coefficients; the constant is rounded down."""
    kept = {name: times for name, times in sorted(terms.items()) if times}
    share = gcd(*kept.values()) if kept else 1
    return tuple((name, times // share) for name, times in kept.items()), constant // share


def _at_most(left: Expr, right: Expr, less: int) -> LinearForm | None:
    """Return the row of left + less <= right."""
    a, b = linear_form(left), linear_form(right)
    if a is None or b is None:
        return None
    terms = dict(b[0])
    for name, times in a[0].items():
        terms[name] = terms.get(name, 0) - times
    return _row(terms, b[1] - a[1] - less)


def cases(formula: Expr, holds: bool) -> list[list[LinearForm]]:
    """Return sets of inequalities of which one must hold if the formula does (or does not); one empty if unknown."""
    kind = formula[0]
    if formula == ("name", "False" if holds else "True"):
        return []
    if kind == "not":
        return cases(formula[1], not holds)
    if kind != "bin":
        return [[]]
    sign, left, right = formula[1:]
    if sign in RELATIONS:
        if not holds:
            sign = {"=": "≠", "≠": "=", "≤": ">", "<": "≥", "≥": "<", ">": "≤"}[sign]
        if sign in ("≥", ">"):
            sign, left, right = {"≥": "≤", ">": "<"}[sign], right, left
        below, above = _at_most(left, right, int(sign in ("<", "≠"))), _at_most(right, left, int(sign == "≠"))
        if below is None or above is None:
            return [[]]
        return {"=": [[below, above]], "≠": [[below], [above]]}.get(sign, [[below]])
    if sign == "↔":
        if repr(formula).count("↔") > NESTED:  # each doubles the work
            return [[]]
        one = ("bin", "∧", ("bin", "→", left, right), ("bin", "→", right, left))
        return cases(one, holds)
    if sign == "→":
        left, sign = ("not", left), "∨"
    first, second = cases(left, holds), cases(right, holds)
    if (sign == "∧") == holds:
        both = [a + b for a in first for b in second]
        return both if len(both) <= BRANCHES else [[]]
    return first + second


def infeasible(rows: list[LinearForm], effort: list[int]) -> bool:
    """Return whether no integers satisfy the inequalities, found by eliminating name after name (Fourier and Motzkin).

    Sound: each new row follows from two others. Not complete, and given up where rows become too many or numbers too
    large, or the effort is spent.
    """
    known = set(rows)
    while True:
        if any(not terms and constant < 0 for terms, constant in known):
            return True
        effort[0] -= sum(len(terms) + 1 for terms, _ in known)
        above, below = Counter[str](), Counter[str]()  # how often a name's coefficient is positive, and negative
        for terms, _ in known:
            above.update(name for name, times in terms if times > 0)
            below.update(name for name, times in terms if times < 0)
        names = sorted({*above, *below})
        if not names or len(known) > ROWS or effort[0] < 0:
            return False
        if any(abs(times) >> BITS for terms, _ in known for _, times in terms):
            return False
        gone = min(names, key=lambda n: above[n] * below[n])
        lower = [row for row in known if dict(row[0]).get(gone, 0) > 0]
        upper = [row for row in known if dict(row[0]).get(gone, 0) < 0]
        if len(lower) * len(upper) > ROWS:
            return False
        effort[0] -= len(names) * len(lower) * len(upper)
        known = {row for row in known if not dict(row[0]).get(gone, 0)}
        for one in lower:
            for other in upper:
                a, b = dict(one[0]), dict(other[0])
                times, less = -b[gone], a[gone]
                terms = {n: times * a.get(n, 0) + less * b.get(n, 0) for n in {*a, *b}}
                known.add(_row(terms, times * one[1] + less * other[1]))


@lru_cache(maxsize=1 << 12)
def linear_consequence(facts: tuple[Expr, ...], goal: Expr) -> bool:
    """Return whether the goal follows from the facts by linear arithmetic over the natural numbers."""
    while goal[0] == "bin" and goal[1] == "→":
        facts, goal = (*facts, goal[2]), goal[3]
    branches = cases(goal, False)
    for fact in facts:
        combined = [old + new for old in branches for new in cases(fact, True)]
        branches = combined if len(combined) <= BRANCHES else branches
    effort = [EFFORT]
    for rows in branches:
        names = {name for terms, _ in rows for name, _ in terms}
        if not infeasible(rows + [(((name, 1),), 0) for name in sorted(names)], effort):
            return False
    return True
