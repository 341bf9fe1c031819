r"""What may an answer look like where the reference is a number?  A number that is written out, and nothing else.

Such are 12, -1,200.50, 7/2 in lowest terms, 3 1/2, 1.2 \times 10^3 and 15 %, with a currency or a unit in words.
Whatever leaves an operation to the reader is none: 5 + 7, 84/7, {84 \over 7}, \gcd(44, 68), |-12|. Where the reference
has roots, powers or pi an answer may have them too, with no more signs, products and powers than the reference.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from envs.math_judge import equation

SPELLINGS = [  # LaTeX's way to write what plain text has as well
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:left|right)(?![a-zA-Z])|\\!|\\\(|\\\)", ""),
        (r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox|fbox)\s*(?=\{)", " "),
        (r"\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s", " "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", "°"),
        (r"\{,\}", ","),
        (r"\\([$%])", r"\1"),
        (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
        ("[−–]", "-"),
        (r"π|(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])sqrt ?\(([0-9]+)\)", r"\\sqrt{\1}"),
    )
]
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
PART = rf"(?:\{{ *(-?{DIGITS}) *\}}|([0-9]))"
LATEX_FRACTION = re.compile(rf"\\frac *{PART} *{PART}")
WORD = r"[A-Za-z]+(?: ?\^ ?[23]|[²³])?"
NUMBER = re.compile(
    rf"[$€£¥]? ?(?P<sign>[-+]?) ?[$€£¥]? ?"
    rf"(?:(?:(?P<whole>[0-9]+) )?(?P<top>-?{DIGITS}) ?/ ?(?P<bottom>{DIGITS})"
    rf"|(?P<decimal>{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?: ?(?:\\times|\\cdot|[x×·*]) ?10 ?(?:\^|\*\*) ?(?P<power>[-+]?[0-9]{1,3})|[eE](?P<e>[-+]?[0-9]{1,3}))?)"
    rf" ?(?:(?P<percent>%|per ?cent)|°[CF]?|[$€£¥¢]|(?P<unit>{WORD}(?: ?[ /] ?{WORD})*))?\.?"
)
LETTERS = frozenset("mgshlLCFKWVNJA")  # units of one letter
NO_UNITS = frozenset(  # words that make another number of the one before them
    """pi sqrt hundred thousand million billion trillion dozen half halves third thirds quarter quarters tenth tenths
    hundredth hundredths squared cubed factorial mod plus minus times over by and or to choose percent""".split()
)
WITH_ROOTS = re.compile(r"(?:[0-9.,\s{}()/+*^-]|\\(?:frac|sqrt|pi|cdot|times)(?![a-zA-Z]))+")
UNIT_AT_END = re.compile(r"[ {]*(?<![\\A-Za-z])[A-Za-z][A-Za-z ]*\}?(?: ?\^ ?\{?[23]\}?)?$")
NEEDLESS_TIMES = re.compile(r"(?:\\cdot|\\times|\*)\s*(?=\\sqrt|\\pi)")
SIDE_BY_SIDE = re.compile(r"[0-9)]\s*\(|\)\s*[0-9]|(?<!frac)(?<!frac )[0-9](?:\s+[0-9]|\s*\{)|^\s*\{")
FRACTION = re.compile(rf"(?:{LATEX_FRACTION.pattern})|([0-9]+)\s*/\s*([0-9]+)")


class Number(NamedTuple):
    """Number(r"\\frac{7}{2}", Fraction(7, 2), step=Fraction(0), parts=(7, 2), percent=False), read from 7/2.

    `step` is 1 in the last place of a decimal fraction, `parts` are those of a fraction as it is written.
    """

    text: str
    value: Fraction
    step: Fraction
    parts: tuple[int, int] | None
    percent: bool


def final_form(given: str, answer: str) -> tuple[str, str] | None:
    """What math-verify is to compare; None where the reference is a number and the answer leaves arithmetic undone.

    >>> final_form("x = 12 apples", "12"), final_form("5 + 7", "12"), final_form("1 + x", "x + 1")
    (('x=12', '12'), None, ('1 + x', 'x + 1'))
    """
    sides, wanted = equation(given), number(answer)
    if wanted is None:
        plain = _plain(answer)
        rooted = WITH_ROOTS.fullmatch(plain) and re.search(r"\\sqrt|\\pi|\^", plain) and "," not in plain
        return (given, answer) if not rooted or _as_done(sides[-1], plain) else None
    found = number(sides[-1])
    if found is None or not _is_reduced(found, wanted) or not _is_near(found, wanted):
        return None
    return "=".join([*sides[:-1], found.text]), wanted.text


@lru_cache(maxsize=1 << 12)
def number(text: str) -> Number | None:
    """The number that is all of a text, but for a unit."""
    plain = LATEX_FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", _plain(text))
    plain = " ".join(re.sub("[{}]", " ", plain).split())
    while plain.startswith("(") and plain.endswith(")") and not re.search("[()]", plain[1:-1]):
        plain = plain[1:-1].strip()
    match = NUMBER.fullmatch(plain)
    words = re.findall("[A-Za-z]+", (match and match["unit"]) or "")
    if match is None or NO_UNITS & set(words) or (words and len(words[0]) == 1 and words[0] not in LETTERS):
        return None
    digits = {name: re.sub("[, ]", "", match[name] or "") for name in ("whole", "top", "bottom", "decimal")}
    step, parts, sign = Fraction(0), None, -1 if match["sign"] == "-" else 1
    if match["decimal"]:
        value, places = Fraction(f"0{digits['decimal']}".rstrip(".")), len(digits["decimal"].partition(".")[2])
        step = Fraction(1, 10**places) if places else step
        power = match["power"] or match["e"]
        if power and not 1 <= value < 10:
            return None
        value, step = value * Fraction(10) ** int(power or 0), step * Fraction(10) ** int(power or 0)
    else:
        top, bottom, whole = int(digits["top"]), int(digits["bottom"]), int(digits["whole"] or 0)
        if bottom == 0 or (match["whole"] and not 0 < top < bottom):
            return None
        value, parts = whole + Fraction(top, bottom), (top, bottom)
    value *= sign
    shown = f"{'-' if sign < 0 else ''}{digits['decimal'].rstrip('.')}"
    if parts or match["power"] or match["e"] or not match["decimal"]:
        shown = str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return Number(shown + (r"\%" if match["percent"] else ""), value, step, parts, bool(match["percent"]))


def _plain(text: str) -> str:
    for pattern, plain in SPELLINGS:
        text = pattern.sub(plain, text)
    return text.strip()


def _lowest(top: int, bottom: int) -> bool:
    return bottom > 1 and gcd(top, bottom) == 1


def _is_reduced(found: Number, wanted: Number) -> bool:
    """Whether a fraction is in lowest terms, or written as the reference is."""
    return found.parts is None or found.parts == wanted.parts or _lowest(*found.parts)


def _is_near(found: Number, wanted: Number) -> bool:
    """Whether two numbers are equal to the last place of a decimal fraction: math-verify looks at six places alone."""
    scales = (Fraction(1), Fraction(100)) if wanted.percent and not found.percent else (Fraction(1),)
    if found.percent and not wanted.percent:
        scales = (Fraction(1, 100),)
    difference = min(abs(found.value * scale - wanted.value) for scale in scales)
    return difference == 0 or difference < max(found.step * scales[-1], wanted.step)


def _as_done(given: str, answer: str) -> bool:
    """Whether an answer leaves no more to do than a reference with roots, powers or pi."""
    if number(given):
        return True
    given = UNIT_AT_END.sub("", _plain(given))
    if not WITH_ROOTS.fullmatch(given) or SIDE_BY_SIDE.search(given):
        return False
    ours, theirs = (NEEDLESS_TIMES.sub("", text.lstrip("+-( ")) for text in (given, answer))
    for signs in (r"[-+]", r"\^|\*\*", r"\\cdot|\\times|\*"):
        if len(re.findall(signs, ours)) > len(re.findall(signs, theirs)):
            return False
    fractions = (
        [int(re.sub("[, ]", "", part)) for part in match.groups() if part] for match in FRACTION.finditer(given)
    )
    return all(_lowest(*parts) for parts in fractions)
