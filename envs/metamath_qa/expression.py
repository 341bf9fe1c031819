r"""Which expression is this text, but for its notation, the order of terms and factors, and signs?

    read(r"3\cdot\pi/2") == read(r"\frac{3}{2} \pi") == read("1.5pi")      # True
    read("3pi3") == read("9pi"), read("4^5") == read("2^{10}")             # (False, False): nothing is worked out
It knows whole and decimal numbers, + - * / ^, \frac, roots, pi, e, i and infinity; any other text is not an expression.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from envs.math_numbers import DIGITS, LONGEST

TOKEN = re.compile(
    rf" *({DIGITS}(?:\.[0-9]+)?|\.[0-9]+|(?:\\frac|\\sqrt|\\pi|\\infty|[ei])(?![a-zA-Z])|\*\*|[-+*/^(){{}}\[\]√])"
)
DEEPEST = 30  # brackets within brackets
LARGEST_POWER = 4096  # bits

NUMERAL = tuple("0123456789.")  # what a number starts with

# A sign, the factors above the bar and those below. A factor is a whole number or (r"\pi",), ("sum", (node, ...)),
# ("root", index, node), ("power", base, exponent), ("fraction", node).
Node = tuple[int, tuple[Any, ...], tuple[Any, ...]]


@lru_cache(maxsize=1 << 12)
def parse_value(text: str) -> Node | None:
    """Return the expression that a plain text is; None for any other."""
    tokens, at = [], 0
    if len(text) > LONGEST or ("," in text and "(" in text):  # (1,200) is a point
        return None
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(match[1])
        at = match.end()
    try:
        return _Reader(tokens).all()
    except _NoExpression:
        return None


class _NoExpression(Exception):
    pass


class _Reader:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.last, self.depth = tokens[::-1], "", 0

    def all(self) -> Node:
        node = self.sum()
        if self.tokens:
            raise _NoExpression
        return node

    def next_is(self, *tokens: str) -> bool:
        """Return whether one of these comes next; it is taken."""
        if not self.tokens or self.tokens[-1] not in tokens:
            return False
        self.last = self.tokens.pop()
        return True

    def take(self, *tokens: str) -> str:
        if not self.next_is(*(tokens or self.tokens[-1:])):
            raise _NoExpression
        return self.last

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _NoExpression
        terms = [self.signed()]
        while self.next_is("+", "-"):
            terms.append(_negated(self.product()) if self.last == "-" else self.product())
        self.depth -= 1
        return _sum(terms)

    def signed(self) -> Node:
        if self.next_is("-"):
            return _negated(self.product())
        self.next_is("+")
        return self.product()

    def product(self) -> Node:
        node = self.power()
        while self.tokens and self.tokens[-1] not in ("+", "-", ")", "}", "]"):
            if self.next_is("/"):
                node = _quotient(node, self.power())
                continue
            beside = not self.next_is("*", "**")
            if self.last == "**" or (
                beside
                and self.last.startswith(("}", *NUMERAL))
                and self.tokens[-1].startswith(("{", r"\frac", *NUMERAL))
            ):
                raise _NoExpression  # 3 1/2 and 3\frac12 are not products
            node = _product(node, self.power())
        return node

    def power(self) -> Node:
        base = self.atom()
        if not self.next_is("^", "**"):
            return base
        exponent = _negated(self.atom()) if self.next_is("-") else self.atom()
        if exponent[:2] == (1, ()) and len(exponent[2]) == 1 and isinstance(exponent[2][0], int):  # 5^(1/2)
            return 1, (("root", str(exponent[2][0]), base),), ()
        return 1, (("power", base, exponent),), ()

    def argument(self) -> Node:
        r"""Return what \frac and \sqrt take: a group, a command, or one digit, as in \frac12."""
        if self.tokens and self.tokens[-1].isdecimal():
            digits = self.tokens.pop()
            self.tokens += [*digits[:0:-1], digits[0]]
        return self.atom()

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _NoExpression
        node = self.atom_of(self.take())
        self.depth -= 1
        return node

    def atom_of(self, token: str) -> Node:
        if token in ("(", "{"):
            node = self.sum()
            self.take(")" if token == "(" else "}")
            return node
        if token == r"\frac":
            return _quotient(self.argument(), self.argument())
        if token in (r"\sqrt", "√"):
            index = "2"
            if token == r"\sqrt" and self.next_is("["):
                index = self.take()
                self.take("]")
            return 1, (("root", index, self.argument() if token == r"\sqrt" else self.atom()),), ()
        if token in (r"\pi", r"\infty", "e", "i"):
            return 1, ((token,),), ()
        if token.startswith(NUMERAL):
            number = Fraction(re.sub("[, ]", "", token))
            top, bottom = _whole(number.numerator), _whole(number.denominator)
            return top if number.denominator == 1 else _quotient(top, bottom)
        raise _NoExpression


def _whole(number: int) -> Node:
    return 1, (number,), ()


def _negated(node: Node) -> Node:
    return -node[0], node[1], node[2]


def _product(one: Node, other: Node) -> Node:
    return _term(one[0] * other[0], one[1] + other[1], one[2] + other[2])


def _quotient(top: Node, bottom: Node) -> Node:
    above = () if top[1] == (1,) else top[1]
    if bottom[2]:  # a fraction below a bar stays there: turning it over is work
        return _term(top[0], above, (*top[2], ("fraction", bottom)))
    return _term(top[0] * bottom[0], above, top[2] + bottom[1])


def _term(sign: int, above: tuple[Any, ...], below: tuple[Any, ...]) -> Node:
    """Return a term with its factors in order; a sum over whole numbers is a sum of fractions."""
    if below and all(isinstance(factor, int) for factor in below) and (terms := _terms_of(above)):
        return _sum([_term(sign * s, () if a == (1,) else a, b + below) for s, a, b in terms])
    return sign, _in_order(above), _in_order(below)


def _terms_of(factors: tuple[Any, ...]) -> tuple[Node, ...]:
    """Return the terms where a sum is the one factor; none otherwise."""
    is_sum = len(factors) == 1 and isinstance(factors[0], tuple) and factors[0][0] == "sum"
    return factors[0][1] if is_sum else ()


def _sum(terms: list[Node]) -> Node:
    """Return a sum with its terms in order, the first with a plus; brackets around a sum as a term are left out."""
    flat: list[Node] = []
    for sign, above, below in terms:
        inner = () if below else _terms_of(above)
        flat += [(sign * s, a, b) for s, a, b in inner] or [(sign, above, below)]
    if len(flat) == 1:
        return flat[0]
    flat.sort(key=lambda term: repr(term[1:]))
    sign = flat[0][0]
    return sign, (("sum", tuple((sign * s, a, b) for s, a, b in flat)),), ()


def _in_order(factors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(factors, key=repr))


def worked_out(node: Node) -> Node:
    """Return a product with its whole numbers multiplied, square roots drawn and the fraction reduced; sums stay."""
    (top, above), (bottom, below) = map(_gathered, node[1:])
    shared = math.gcd(top, bottom) or 1
    upper, lower = ((n // shared, *rest) for n, rest in ((top, above), (bottom, below)))
    above, below = (_in_order(tuple(factor for factor in side if factor != 1)) for side in (upper, lower))
    return node[0], above, below


def _gathered(factors: tuple[Any, ...]) -> tuple[int, list[Any]]:
    """Return a product as a whole number times what is left: 3 and the root of 12 are 6 times the root of 3."""
    whole, rest = 1, []
    for factor in factors:
        if isinstance(factor, int):
            whole *= factor
            continue
        if factor[:2] == ("root", "2") and factor[2][0] == 1 and not factor[2][2] and len(factor[2][1]) == 1:
            inside = factor[2][1][0]
            if isinstance(inside, int) and 0 < inside < 10**6:
                square = max(n for n in range(1, math.isqrt(inside) + 1) if inside % (n * n) == 0)
                whole, factor = whole * square, ("root", "2", _whole(inside // square**2))
        rest += [] if factor == ("root", "2", _whole(1)) else [factor]
    return whole, rest


def value_of(node: Node) -> Fraction | float | None:
    """Return the value, exact without roots and constants; None where it is not a real number, or is too large."""
    try:
        value = _value(node)
    except (ArithmeticError, ValueError, TypeError, _NoExpression):
        return None
    return value if isinstance(value, Fraction) or math.isfinite(value) else None


def _value(node: Node) -> Fraction | float:
    sign, above, below = node
    result: Fraction | float = Fraction(sign)
    for factor in above:
        result *= _value_of(factor)
    for factor in below:
        result /= _value_of(factor)
    return result


def _value_of(factor: Any) -> Fraction | float:
    if isinstance(factor, int):
        return Fraction(factor)
    kind, *parts = factor
    if kind == "sum":
        return sum((_value(term) for term in parts[0]), Fraction(0))
    if kind == "fraction":
        return _value(parts[0])
    if kind == "root":
        return math.pow(_value(parts[1]), 1 / int(parts[0]))
    if kind == "power":
        base, exponent = _value(parts[0]), _value(parts[1])
        if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator > 1:
            return math.pow(base, exponent)
        if abs(exponent) * (base.numerator.bit_length() + base.denominator.bit_length()) > LARGEST_POWER:
            raise _NoExpression
        return base**exponent.numerator
    if kind not in ("e", r"\pi"):
        raise _NoExpression
    return math.e if kind == "e" else math.pi
