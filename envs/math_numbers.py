r"""Which number is an answer of mathematics?  Exact, with the unit of the list that stands before or behind it.

    number("1,200.50 cm") == Number(Fraction(2401, 2), step=Fraction(1, 100), parts=None, unit="cm")
    number("3 1/2"), number("1.2*10^{-3}"), number("2 million dollars"), number("15%"), number("0.\overline{3}")
    as_text("(1042)_{eight}") == as_text("1042 in base 8") == "1042 base 8"
These texts are plain ones, of envs/math_spelling.py. What is not one number, such as 1, 200 or 5 + 7, has none.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from envs.math_spelling import closes
from envs.math_units import unit_of

LONGEST = 300  # characters
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
PART = rf"(?:\{{ *(-?{DIGITS}) *\}}|([0-9]))"
LATEX_FRACTION = re.compile(rf"\\frac *{PART} *{PART}")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
CURRENCY = r"(?:(?:US|USD|EUR|GBP)? ?[$€£¥]|USD|EUR|GBP)?"
NUMBER = re.compile(
    rf"(?P<before>{CURRENCY}) ?(?P<sign>[-+]?) ?(?P<after>{CURRENCY}) ?"
    rf"(?:(?:(?P<whole>[0-9]+) )?(?P<top>-?{DIGITS}) ?/ ?(?P<bottom>-?{DIGITS})"
    rf"|(?P<decimal>{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?: ?\\overline ?(?P<again>[0-9]+))?"
    r"(?: ?[x*] ?10 ?(?:\^|\*\*) ?(?P<power>[-+]?[0-9]{1,3})|[eE](?P<e>[-+]?[0-9]{1,3})"
    rf"|[ -]?(?P<scale>{'|'.join(SCALES)})(?![A-Za-z]))?)"
    r" ?(?P<percent>%|per ?cent(?![A-Za-z]))?"
)
LOOSE_BRACES = re.compile(r"\} ?\{|[0-9.] ?\{|\} ?[0-9.]")  # {1}{200} is not a number
BASES = "two three four five six seven eight nine ten eleven twelve".split()
BASED = re.compile(  # without blanks and capitals
    r"\(?(?P<digits>(?=[a-f]*[0-9]|[a-f]{2})[0-9a-f]+)\)?(?:_\(?(?:base)?|\(?(?:in)?base)(?P<base>[0-9]+|[a-z]+)\)?"
)
NOISE = Fraction(1, 10**14)  # relative error of what a program computed in floating point


class Number(NamedTuple):
    """Number(Fraction(7, 2), step=Fraction(0), parts=(7, 2), unit="cm"), read from 7/2 cm.

    `step` is 1 in the last place of a decimal fraction, `parts` are those of a fraction as it is written, `error` is
    what a value that was computed may be off. `normal` is false for 12 * 10^3, which has another usual form.
    """

    value: Fraction
    step: Fraction
    parts: tuple[int, int] | None = None
    unit: str = ""
    error: Fraction = Fraction(0)
    normal: bool = True

    @property
    def percent(self) -> bool:
        return self.unit == "%"


@lru_cache(maxsize=1 << 12)
def parse_number(text: str) -> Number | None:
    """Return the number that is all of a plain text, but for a unit of the list."""
    text = LATEX_FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
    text = _without_brackets(re.sub(r"\\overline *\{([0-9]+)\}", r"\\overline \1 ", text))
    match = None if len(text) > LONGEST else NUMBER.match(text)
    if match is None:
        return None
    unit = _unit(match, text[match.end() :].strip())
    if unit is None:
        return None
    digits = {name: re.sub("[, ]", "", match[name] or "") for name in ("whole", "top", "bottom", "decimal")}
    step, parts, sign, normal = Fraction(0), None, -1 if match["sign"] == "-" else 1, True
    if match["decimal"]:
        exact, places = Fraction(f"0{digits['decimal']}".rstrip(".")), len(digits["decimal"].partition(".")[2])
        power = match["power"] or match["e"]
        if match["again"] and "." not in digits["decimal"]:
            return None
        normal = not power or 1 <= exact < 10
        shift = Fraction(10) ** (int(power or 0) + SCALES.get(match["scale"], 0))
        if match["again"]:  # 0.1666... is 0.1 and 6/90
            exact, places = exact + Fraction(int(match["again"]), (10 ** len(match["again"]) - 1) * 10**places), 0
        exact, step = exact * shift, shift / 10**places if places else step
    else:
        top, bottom, whole = int(digits["top"]), int(digits["bottom"]), int(digits["whole"] or 0)
        signs = (match["sign"] == "-") + (top < 0) + (bottom < 0)
        if bottom == 0 or signs > 1 or (match["whole"] and not 0 < top < bottom):
            return None
        exact, parts = whole + Fraction(top, bottom), (abs(top), abs(bottom))
    return Number(exact * sign, step, parts, unit, normal=normal)


def _without_brackets(text: str) -> str:
    """Return a number without the brackets around it or its parts: -(3/2), (-3)/2, {12}; "" for a product."""
    loose = LOOSE_BRACES.search(text) or text.count("{") != text.count("}")
    text = "" if loose else " ".join(re.sub("[{}]", " ", text).split())
    for _ in range(3):
        sign, inside = re.match("([-+]?) ?", text)[1], text.lstrip("-+ ")  # pyright: ignore[reportOptionalSubscript]
        is_all = inside.startswith("(") and closes(inside) == len(inside) - 1
        if not is_all or "," in inside or (sign and inside[1:].lstrip().startswith(("-", "+"))):
            break
        text = sign + inside[1:-1].strip()
    text = re.sub(r"^([-+]?) ?\((-?[0-9]+)\)(?= ?/)", r"\1\2", text)
    return re.sub(r"/ ?\((-?[0-9]+)\)$", r"/\1", text)


def _unit(match: re.Match[str], behind: str) -> str | None:
    """Return the one unit of a number, before or behind it; None where there are two, or no unit of the list."""
    before = match["before"] or match["after"]
    units = ["%"] if match["percent"] else []
    units += [unit_of(before.removeprefix("US").strip() if before.endswith("$") else before)] if before else []
    units += [unit_of(behind)] if behind else []
    return (units[0] if units else "") if all(units) and len(set(units)) <= 1 else None


def is_near(number: Number, expected: Number) -> bool:
    """Return whether two numbers are equal, or one is the other rounded to six places and six digits or more."""
    scale = Fraction(1, 100) if number.percent and not expected.percent else Fraction(1)
    if expected.percent and not number.percent and number.value != expected.value:
        scale = Fraction(100)
    difference, step = abs(number.value * scale - expected.value), max(number.step * scale, expected.step)
    error = number.error * scale + expected.error
    return difference <= error or (
        difference <= step / 2 + error and step <= min(abs(expected.value) / 10**5, Fraction(1, 10**6))
    )


def is_same(number: Number, expected: Number) -> bool:
    """Return whether two numbers are near, or differ by no more than the noise of floating point."""
    noisy = number.step or expected.step
    return is_near(number, expected) or bool(
        noisy
        and number.percent == expected.percent
        and abs(number.value - expected.value) <= abs(expected.value) * NOISE
    )


def as_text(text: str) -> str:
    """Return a text without spaces, braces and capitals; a number in base 8 has one text in every notation of it."""
    text = re.sub(r"[{}\s]", "", text).casefold()
    if text.startswith("(") and closes(text) == len(text) - 1:
        text = text[1:-1]
    based = BASED.fullmatch(text)
    if based is None:
        return text
    base = based["base"]
    return f"{based['digits']} base {BASES.index(base) + 2 if base in BASES else base}"
