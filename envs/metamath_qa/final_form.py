r"""Is an answer the reference written out?  Without math-verify, which would work out what the answer leaves undone.

A number is right written as one: 12, -1,200.50, 7/2 in lowest terms, 3 1/2, 1.2 \times 10^3, 15 %, 2 million, with a
currency or a unit of the list. For roots, powers and pi it is the same expression in another notation or order, or
that number. Lists, points, ratios and intervals are right part by part; any other text, such as 2562_7, as it stands.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from math import gcd

from envs.math_answers import MULTIPLES, NAMED, PLUS_MINUS, equation, names_variable, parts
from envs.math_numbers import LONGEST, Number, as_text, is_near, parse_number as any_number
from envs.math_spelling import IN_WORDS, plain_spelling
from envs.math_units import NAMES, agree, split_unit, unit_of
from envs.metamath_qa.expression import Node, parse_value, value_of, worked_out

NO_VARIABLES = re.compile(  # commands, constants, units, names and longer words
    r"\\[a-zA-Z]+"
    rf"|(?<![a-zA-Z])(?:e|i|and|or|USD?|EUR|GBP|(?<=:[0-9][0-9] )[aApP]m|{'|'.join(sorted(NAMES))})(?![a-zA-Z])"
    r"|(?<![^\s(/-])(?:[a-z]{4,}|[A-Z][a-z]{2,})(?![a-zA-Z])"
)
NO_UNITS = MULTIPLES | frozenset("mod plus minus over by and or to choose percent point negative".split())
WORDS = re.compile(r"(?<![\\A-Za-z{_^])[A-Za-z]{2}[A-Za-z .'-]*$")


@lru_cache(maxsize=1 << 12)
def has_variables(answer: str) -> bool:
    r"""Return whether a reference is algebra: x + 1 and 2ab are; x = 5, 12 apples, 3 + 4i and Monday are not."""
    text = plain_spelling(IN_WORDS.sub(" ", _right_side(answer)))
    text = NO_VARIABLES.sub(" ", split_unit(text, shortest=2)[0])
    return any(map(str.isalpha, text)) and " base " not in as_text(plain_spelling(answer))


def is_written_out(response: str, answer: str) -> bool:
    """Return whether an answer is the reference, with nothing left to work out.

    >>> [is_written_out(given, "12") for given in ("x = 12 cm", "5 + 7", "5 + 7 = 12", "5 + 6 = 12", "12 dozen")]
    [True, False, True, False, False]
    """
    return _same(_both_signs(plain_spelling(response)), _both_signs(plain_spelling(_right_side(answer))))


def _same(response: str, answer: str) -> bool:
    """Return whether two plain texts are equal; before the last equals sign only names and equal values may be."""
    answer, words = _without_words(answer)
    expected, (rest, unit) = usual_number(answer), split_unit(answer)
    expression = parse_value(rest)
    if expected is None and expression is None:
        return _same_parts(response, answer)
    *before, response = equation(response)
    if words and response.casefold().endswith(words.casefold()):
        response, words = response[: -len(words)].rstrip(), ""
    number, worth = usual_number(response), expected or _worth(expression)
    if not all(names_variable(side) or _is_worth(side, worth) for side in before):
        return False
    if worth is not None and number is not None:
        return agree(number.unit, words or worth.unit or unit) and _is_reduced(number, worth) and is_near(number, worth)
    if expected is not None or expression is None:
        return False
    response, ours = split_unit(response)
    return agree(ours, words or unit) and parse_value(response) in (expression, worked_out(expression))


def usual_number(text: str) -> Number | None:
    """Return the number that is all of a plain text, in its usual form: not 12e3."""
    number = any_number(text)
    return number if number is not None and number.normal else None


def _without_words(answer: str) -> tuple[str, str]:
    """Return a reference such as 12 apples, whose unit is not in the list, and these words; not 12 halves."""
    match = WORDS.search(answer, max(0, len(answer) - LONGEST))
    words = match[0] if match else ""
    if not words or unit_of(words) or NO_UNITS & set(re.findall("[a-z]+", words.casefold())):
        return answer, ""
    rest = answer[: -len(words)].rstrip()
    return (answer, "") if usual_number(rest) is None and parse_value(rest) is None else (rest, words)


def _worth(expression: Node | None) -> Number | None:
    """Return the value of an expression as a number."""
    known = None if expression is None else value_of(expression)
    if known is None:
        return None
    exact = isinstance(known, Fraction)
    return Number(Fraction(known), Fraction(0), error=Fraction(0) if exact else abs(Fraction(known)) / 10**14)


def _same_parts(response: str, answer: str) -> bool:
    """Return whether two plain texts are equal that are neither numbers nor expressions.

    A list without brackets may be in any order.
    """
    theirs = parts(answer)
    if theirs is None or theirs[0]:  # else each part may be an equation
        *before, response = equation(response)
        if not all(names_variable(side.strip("()").replace(",", "")) for side in before):
            return False
    ours = parts(response)
    if theirs is None:
        return as_text(response) in (as_text(answer), as_text(answer).partition(" base ")[0])
    if ours is None or ours[:2] != theirs[:2]:
        return False
    left, ordered = list(ours[2]), theirs[0] or ":" in theirs[1]
    for part in theirs[2]:
        right = next((our for our in (left[:1] if ordered else left) if _same(our, part)), None)
        if right is None:
            return False
        left.remove(right)
    return True


def _right_side(answer: str) -> str:
    """Return what a reference such as x = 5 says x is; any other reference as it is."""
    sides = equation(answer)
    return sides[1] if len(sides) == 2 and NAMED.fullmatch(sides[0].strip("$ ")) else answer


def _both_signs(text: str) -> str:
    r"""1\pm\sqrt2 as the list of what it stands for."""
    return f"{PLUS_MINUS.sub('+', text)}, {PLUS_MINUS.sub('-', text)}" if PLUS_MINUS.search(text) else text


def _is_reduced(number: Number, expected: Number) -> bool:
    """Return whether a fraction is in lowest terms, or written as the reference is."""
    return number.parts is None or number.parts == expected.parts or (number.parts[1] > 1 and gcd(*number.parts) == 1)


def _is_worth(side: str, expected: Number | None) -> bool:
    """Return whether another side of the equation has the value of the answer."""
    number = usual_number(side) or _worth(parse_value(side))
    return number is not None and expected is not None and is_near(number, expected)
