r"""Is an answer the reference written out?  Without math-verify, which would work out what the answer leaves undone.

A number is right written as one: 12, -1,200.50, 7/2 in lowest terms, 3 1/2, 1.2 \times 10^3, 15 %, 2 million, with a
currency or a unit in words. For roots, powers and pi it is the same expression in another notation or order, or that
number. Lists, points, ratios and intervals are right part by part; any other text, such as 2562_7, as it stands.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from envs.math_judge import equation
from envs.metamath_qa.expression import DIGITS, Node, plain, read, value, worked_out

PART = rf"(?:\{{ *(-?{DIGITS}) *\}}|([0-9]))"
LATEX_FRACTION = re.compile(rf"\\frac *{PART} *{PART}")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
CURRENCY = r"(?:(?:US|USD|EUR|GBP)? ?[$€£¥]|USD|EUR|GBP)?"
WORD = r"[A-Za-z]+(?:-[A-Za-z]+)*(?: ?\^ ?(?:[23]|\{[23]\}))?"
UNIT = re.compile(rf" ?(?<![\\A-Za-z{{])(?P<words>{WORD}(?: ?[ /] ?{WORD})*)$|°[CF]?$|[$€£¥¢]$")
NUMBER = re.compile(
    rf"{CURRENCY} ?(?P<sign>[-+]?) ?{CURRENCY} ?"
    rf"(?:(?:(?P<whole>[0-9]+) )?(?P<top>-?{DIGITS}) ?/ ?(?P<bottom>-?{DIGITS})"
    rf"|(?P<decimal>{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?: ?[x*] ?10 ?(?:\^|\*\*) ?(?P<power>[-+]?[0-9]{1,3})|[eE](?P<e>[-+]?[0-9]{1,3})"
    rf"|[ -]?(?P<scale>{'|'.join(SCALES)}))?)"
    r" ?(?P<percent>%|per ?cent)?"
)
LETTERS = frozenset("mgshlLCFKWVNJA")  # units of one letter
NO_UNITS = frozenset(  # words that make another number of the one before them
    """hundred thousand million billion trillion dozen half halves third thirds tenth tenths hundredth hundredths
    factorial mod plus minus over by and or to choose percent point zero one two three four five six seven eight nine
    ten twenty thirty forty fifty sixty seventy eighty ninety""".split()
)
IN_WORDS = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\s*\{[^{}]*\}")
NO_VARIABLES = re.compile(  # commands, constants, units, names and longer words
    r"\\[a-zA-Z]+|(?<![a-zA-Z])(?:e|i|and|or|[mck]m|kg|lb|oz|ft|in|mph|min|sec)(?![a-zA-Z])"
    r"|(?<![^\s(/-])(?:[a-z]{4,}|[A-Z][a-z]{2,})(?![a-zA-Z])"
)
NAMED = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([^()=]*\))?")  # x, \theta, f(2) in x = 5
BASES = "two three four five six seven eight nine ten eleven twelve".split()
BASED = re.compile(r"([0-9a-f]*[0-9][0-9a-f]*|[a-f]{2,})(?:_|_?\(?base)([0-9]+|[a-z]+)\)?")  # no spaces, no capitals
PLUS_MINUS = r"\pm"
BETWEEN = re.compile(r"(?P<open>[(\[{])|(?P<close>[)\]}])|,? (?:and|or) |[,;:&]|\\cup(?![a-zA-Z])")


class Number(NamedTuple):
    """Number(Fraction(7, 2), step=Fraction(0), parts=(7, 2), percent=False), read from 7/2.

    `step` is 1 in the last place of a decimal fraction, `parts` are those of a fraction as it is written.
    """

    value: Fraction
    step: Fraction
    parts: tuple[int, int] | None = None
    percent: bool = False


@lru_cache(maxsize=1 << 12)
def has_variables(answer: str) -> bool:
    r"""Whether a reference is algebra: x + 1 and 2ab are; x = 5, 12 apples, 5 \text{ m}, 3 + 4i and Monday are not."""
    text = plain(IN_WORDS.sub(" ", _right_side(answer)))
    return " base " not in _as_text(text) and any(map(str.isalpha, NO_VARIABLES.sub(" ", text)))


def is_written_out(given: str, answer: str) -> bool:
    """Whether an answer is the reference, with nothing left to work out.

    >>> [is_written_out(given, "12") for given in ("x = 12 apples", "5 + 7", "5 + 7 = 12", "5 + 6 = 12")]
    [True, False, True, False]
    """
    return _same(_both_signs(plain(given)), _both_signs(plain(_right_side(answer))))


def _same(given: str, answer: str) -> bool:
    """For plain texts. What stands before the last equals sign must have the same value, where it has one."""
    wanted, expression = number(answer), read(_without_unit(answer))
    if wanted is None and expression is None:
        return _same_parts(given, answer)
    *before, given = equation(given)
    found, worth = number(given), wanted
    if worth is None and expression is not None and (known := value(expression)) is not None:
        exact = isinstance(known, Fraction)
        worth = Number(Fraction(known), Fraction(0) if exact else abs(Fraction(known)) / 10**14)
    if worth is not None and not all(_is_worth(side, worth) for side in before):
        return False
    if worth is not None and found is not None:
        return _is_reduced(found, worth) and _is_near(found, worth)
    if wanted is not None or expression is None:
        return False
    return read(_without_unit(given)) in (expression, worked_out(expression))


def _same_parts(given: str, answer: str) -> bool:
    """For plain texts that are neither numbers nor expressions; a list without brackets may be in any order."""
    theirs = _parts(answer)
    if theirs is None or theirs[0]:  # else each part may be an equation
        given = equation(given)[-1]
    ours = _parts(given)
    if theirs is None or ours is None:
        return _as_text(given) in (_as_text(answer), _as_text(answer).partition(" base ")[0])
    if ours[:2] != theirs[:2]:
        return False
    left, ordered = list(ours[2]), theirs[0] or ":" in theirs[1]
    for part in theirs[2]:
        right = next((our for our in (left[:1] if ordered else left) if _same(our, part)), None)
        if right is None:
            return False
        left.remove(right)
    return True


@lru_cache(maxsize=1 << 12)
def number(text: str) -> Number | None:
    """The number that is all of a plain text, but for a unit."""
    text = LATEX_FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
    text = " ".join(re.sub("[{}]", " ", text).split())
    while text.startswith("(") and text.endswith(")") and not re.search("[()]", text[1:-1]):
        text = text[1:-1].strip()
    match = NUMBER.fullmatch(text) or NUMBER.fullmatch(_without_unit(text))
    if match is None:
        return None
    digits = {name: re.sub("[, ]", "", match[name] or "") for name in ("whole", "top", "bottom", "decimal")}
    step, parts, sign = Fraction(0), None, -1 if match["sign"] == "-" else 1
    if match["decimal"]:
        exact, places = Fraction(f"0{digits['decimal']}".rstrip(".")), len(digits["decimal"].partition(".")[2])
        power = match["power"] or match["e"]
        if power and not 1 <= exact < 10:
            return None
        shift = Fraction(10) ** (int(power or 0) + SCALES.get(match["scale"], 0))
        exact, step = exact * shift, shift / 10**places if places else step
    else:
        top, bottom, whole = int(digits["top"]), int(digits["bottom"]), int(digits["whole"] or 0)
        signs = (match["sign"] == "-") + (top < 0) + (bottom < 0)
        if bottom == 0 or signs > 1 or (match["whole"] and not 0 < top < bottom):
            return None
        exact, parts = whole + Fraction(top, bottom), (abs(top), abs(bottom))
    return Number(exact * sign, step, parts, bool(match["percent"]))


def _right_side(answer: str) -> str:
    """What a reference such as x = 5 says x is; any other reference as it is."""
    sides = equation(answer)
    return sides[1] if len(sides) == 2 and NAMED.fullmatch(sides[0].strip("$ ")) else answer


def _both_signs(text: str) -> str:
    r"""1\pm\sqrt2 as the list of what it stands for."""
    return f"{text.replace(PLUS_MINUS, '+')}, {text.replace(PLUS_MINUS, '-')}" if PLUS_MINUS in text else text


def _without_unit(text: str) -> str:
    match = UNIT.search(text)
    if match is None:
        return text
    words = re.findall("[A-Za-z]+(?:-[A-Za-z]+)*", match["words"] or "")
    if words and (
        NO_UNITS & set(words) or words[0] in ("squared", "cubed") or (len(words[0]) == 1 and words[0] not in LETTERS)
    ):
        return text
    return text[: match.start()].rstrip()


def _is_reduced(found: Number, wanted: Number) -> bool:
    """Whether a fraction is in lowest terms, or written as the reference is."""
    return found.parts is None or found.parts == wanted.parts or (found.parts[1] > 1 and gcd(*found.parts) == 1)


def _is_near(found: Number, wanted: Number) -> bool:
    """Whether two numbers are equal, or one is the other rounded to six places and six digits or more."""
    scale = Fraction(1, 100) if found.percent and not wanted.percent else Fraction(1)
    if wanted.percent and not found.percent and found.value != wanted.value:
        scale = Fraction(100)
    difference, step = abs(found.value * scale - wanted.value), max(found.step * scale, wanted.step)
    return difference == 0 or (difference < step <= min(abs(wanted.value) / 10**5, Fraction(1, 10**6)))


def _is_worth(side: str, wanted: Number) -> bool:
    """Whether another side of the equation has the value of the answer, or is nothing that has one."""
    found = number(side)
    if found is not None:
        return _is_near(found, wanted)
    node: Node | None = read(side)
    worth = None if node is None else value(node)
    return worth is None or abs(Fraction(worth) - wanted.value) <= abs(wanted.value) / 10**6


def _parts(text: str) -> tuple[str, str, list[str]] | None:
    r"""Brackets, separators and parts of what is made of several: "(3, 4]" -> ("(]", ",", ["3", "4"])."""
    text, brackets = text.replace(r"\{", "{").replace(r"\}", "}").strip(), ""
    if text and text[0] in "([{" and _closes(text) == len(text) - 1:
        brackets, text = (text[0] + text[-1]).strip("{}"), text[1:-1]
    separators, parts, start, depth = "", [], 0, 0
    for match in BETWEEN.finditer(text):
        if match["open"] or match["close"]:
            depth += 1 if match["open"] else -1
        elif depth == 0:
            separators += "," if match[0].strip(", ") in ("", "and", "or") else match[0].strip()
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return (brackets, separators, [*parts, text[start:].strip()]) if parts else None


def _closes(text: str) -> int:
    """Where the bracket that opens a text is closed."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return at
    return -1


def _as_text(text: str) -> str:
    """Spaces, braces and capitals make no difference; a number in base 8 has the same text in every notation of it."""
    text = re.sub(r"[{}\s]", "", text).casefold()
    if text.startswith("(") and _closes(text) == len(text) - 1:
        text = text[1:-1]
    based = BASED.fullmatch(text)
    if based is None:
        return text
    digits, base = based.groups()
    return f"{digits} base {BASES.index(base) + 2 if base in BASES else base}"
