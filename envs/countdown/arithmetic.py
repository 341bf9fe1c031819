"""What is the value of an expression, and which expression has a value?  A reader of answers, and an exact solver.

Values are fractions, exact; no text is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

LONGEST, DEEPEST = 300, 20  # characters of an answer, and brackets or signs within each other
SIGNS = "+-*/"
RANK = {"+": 1, "-": 1, "*": 2, "/": 2}
TOKEN = re.compile(r"[ \t\r\n]*(?:([0-9]{1,9})(?![0-9])|([-+*/()]))")


class CountdownTask(NamedTuple):
    """A level: Task(numbers=(3, 4, 5), target=17)."""

    numbers: tuple[int, ...]
    target: int


class Term(NamedTuple):
    """An expression, its value, and its outermost sign's rank (3 for a number): Term(Fraction(7), "3 + 4", 1)."""

    value: Fraction
    text: str
    rank: int = 3


class Reading(NamedTuple):
    """What an answer says; `value` is None after a division by zero.

    Example: Reading("(3+4)*5", (3, 4, 5), Fraction(35), ("3 + 4 = 7", "7 * 5 = 35"))
    """

    text: str
    numbers: tuple[int, ...]
    value: Fraction | None
    steps: tuple[str, ...]


# -- reading an answer -------------------------------------------------------------------------------------------------


def parse_expression(text: str) -> Reading | None:
    """Return an expression of numbers, + - * / and brackets; None for any other text. Never raises.

    A minus may stand before a number or a bracket (-3 + 10); powers, decimals and names may not stand anywhere.
    """
    if len(text) > LONGEST:
        return None
    tokens, place, end = [], 0, len(text.rstrip(" \t\r\n"))
    while place < end:
        match = TOKEN.match(text, place)
        if match is None:
            return None
        tokens.append(match[1] or match[2])
        place = match.end()
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except _Unreadable:
        return None
    if parser.at < len(tokens):
        return None
    numbers = tuple(int(token) for token in tokens if token.isdigit())
    return Reading("".join(tokens), numbers, value, tuple(parser.steps))


class _Unreadable(Exception):
    """The text is not an expression."""


class _Parser:
    """Recursive descent over tokens, one method a rule; `steps` are the operations in the order they are done."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.at = tokens, 0
        self.steps: list[str] = []

    def next(self, accepted: str) -> str:
        """Return the next token, taken if it is one of the accepted signs; empty if it is not."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        sign = token if token and token in accepted else ""
        self.at += bool(sign)
        return sign

    def sum(self, depth: int) -> Fraction | None:
        """sum = product {(+|-) product}"""
        value = self.product(depth)
        while sign := self.next("+-"):
            value = self.apply(value, sign, self.product(depth))
        return value

    def product(self, depth: int) -> Fraction | None:
        """product = atom {(*|/) atom}"""
        value = self.atom(depth)
        while sign := self.next("*/"):
            value = self.apply(value, sign, self.atom(depth))
        return value

    def atom(self, depth: int) -> Fraction | None:
        """atom = number | - atom | ( sum )"""
        if depth > DEEPEST:
            raise _Unreadable
        if self.next("-"):
            value = self.atom(depth + 1)
            return None if value is None else -value
        if self.next("("):
            value = self.sum(depth + 1)
            if not self.next(")"):
                raise _Unreadable
            return value
        if self.at == len(self.tokens) or not self.tokens[self.at].isdigit():
            raise _Unreadable
        self.at += 1
        return Fraction(int(self.tokens[self.at - 1]))

    def apply(self, a: Fraction | None, sign: str, b: Fraction | None) -> Fraction | None:
        value = None if a is None or b is None else _apply(a, sign, b)
        self.steps.append(f"{_shown(a)} {sign} {_shown(b)} = {value}")
        return value


def _shown(value: Fraction | None) -> str:
    """Return a value as part of an expression: 7, (-3), (2/3)."""
    return str(value) if value is None or (value >= 0 and value.denominator == 1) else f"({value})"


def _apply(a: Fraction, sign: str, b: Fraction) -> Fraction | None:
    if sign == "/":
        return a / b if b else None
    return a + b if sign == "+" else a - b if sign == "-" else a * b


# -- writing and solving -----------------------------------------------------------------------------------------------


def _join(a: Term, sign: str, b: Term) -> Term | None:
    """Return the two terms with a sign between them and no needless brackets; None for a division by zero."""
    value, rank = _apply(a.value, sign, b.value), RANK[sign]
    if value is None:
        return None
    left = f"({a.text})" if a.rank < rank else a.text
    right = f"({b.text})" if b.rank < rank or (b.rank == rank and sign in "-/") else b.text
    return Term(value, f"{left} {sign} {right}", rank)


def any_term(numbers: tuple[int, ...], rng: np.random.Generator) -> Term:
    """Return a random expression of all the numbers."""
    terms = [Term(Fraction(number), str(number)) for number in numbers]
    while len(terms) > 1:
        i, j = (int(k) for k in rng.choice(len(terms), 2, replace=False))
        joined = _join(terms[i], SIGNS[int(rng.integers(4))], terms[j])
        if joined is not None:
            terms = [term for k, term in enumerate(terms) if k not in (i, j)] + [joined]
    return terms[0]


def any_target(numbers: tuple[int, ...], rng: np.random.Generator) -> int:
    """Return the value of a random expression of all the numbers; each value on the way is a whole number above 0."""
    values = list(numbers)
    while len(values) > 1:
        i, j = rng.choice(len(values), 2, replace=False)
        a, b, sign = values[i], values[j], SIGNS[int(rng.integers(4))]
        if (sign == "-" and a <= b) or (sign == "/" and a % b):
            continue
        value = a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a // b
        values = [other for k, other in enumerate(values) if k not in (i, j)] + [value]
    return values[0]


def _is_whole(value: Fraction) -> bool:
    return value > 0 and value.denominator == 1


@lru_cache(maxsize=1 << 14)
def find_solution(task: CountdownTask, use_all: bool) -> str | None:
    """Return an expression for the target; None without one.

    Of as few numbers as possible if not all must be used, and with whole values above 0 on the way if that is possible.
    """
    numbers, target = tuple(sorted(task.numbers)), Fraction(task.target)
    for size in [len(numbers)] if use_all else range(1, len(numbers) + 1):
        parts = sorted(set(combinations(numbers, size)))
        for whole in (True, False):
            search = _Search(whole)
            solution = next((term for part in parts if (term := search.solve(part, target))), None)
            if solution:
                return solution.text
    return None


class _Search:
    """Finds an expression of exactly these numbers with a value.

    Up to three numbers have a table of all values. More are divided in two parts in every way: each value of the
    smaller part says which values of the other would do.
    """

    def __init__(self, whole: bool):
        self.whole = whole  # every value on the way is whole and above 0
        self.solved: dict[tuple[tuple[int, ...], Fraction], Term | None] = {}

    def solve(self, numbers: tuple[int, ...], target: Fraction) -> Term | None:
        if self.whole and not _is_whole(target):
            return None
        if len(numbers) <= 3:
            return _values(numbers, self.whole).get(target)
        key = (numbers, target)
        if key not in self.solved:
            self.solved[key] = next(self.solutions(numbers, target), None)
        return self.solved[key]

    def solutions(self, numbers: tuple[int, ...], target: Fraction) -> Iterator[Term]:
        for part, rest in _parts(numbers):
            for a in _values(part, self.whole).values():
                x = a.value
                needs = [(target - x, "+", False), (target + x, "-", True), (x - target, "-", False)]
                if x:
                    needs += [(target / x, "*", False), (target * x, "/", True)]
                if target:
                    needs += [(x / target, "/", False)]
                for value, sign, swapped in needs:
                    b = self.solve(rest, value)
                    term = b and (_join(b, sign, a) if swapped else _join(a, sign, b))
                    if term:
                        yield term
                if not x and not target:  # nothing times anything
                    term = _join(a, "*", _any_sum(rest))
                    if term:
                        yield term


def _any_sum(numbers: tuple[int, ...]) -> Term:
    return Term(Fraction(sum(numbers)), " + ".join(map(str, numbers)), 1)


@lru_cache(maxsize=1 << 12)
def _parts(numbers: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the ways to divide sorted numbers in two parts, the smaller one first."""
    parts = {}
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in combinations(range(len(numbers)), size):
            part = tuple(numbers[k] for k in chosen)
            parts[part, tuple(numbers[k] for k in range(len(numbers)) if k not in chosen)] = None
    return list(parts)


@lru_cache(maxsize=1 << 12)
def _values(numbers: tuple[int, ...], whole: bool) -> dict[Fraction, Term]:
    """Return every value of exactly these numbers, with an expression for it."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): Term(Fraction(numbers[0]), str(numbers[0]))}
    values: dict[Fraction, Term] = {}
    for part, rest in _parts(numbers):
        for a in _values(part, whole).values():
            for b in _values(rest, whole).values():
                for sign in SIGNS:
                    for term in (_join(a, sign, b), _join(b, sign, a)):
                        if term and (not whole or _is_whole(term.value)):
                            values.setdefault(term.value, term)
    return values
