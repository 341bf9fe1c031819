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
from typing import NamedTuple

from envs.math_judge import MULTIPLES, equation, names
from envs.math_spelling import closes, plain
from envs.math_units import NAMES, agree, split_unit, unit_of
from envs.metamath_qa.expression import DIGITS, LONGEST, Node, read, value, worked_out

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
LOOSE_BRACES = re.compile(r"\} ?\{|[0-9.] ?\{|\} ?[0-9.]")  # {1}{200} is no number
IN_WORDS = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\s*\{[^{}]*\}")
NO_VARIABLES = re.compile(  # commands, constants, units, names and longer words
    r"\\[a-zA-Z]+"
    rf"|(?<![a-zA-Z])(?:e|i|and|or|USD?|EUR|GBP|(?<=:[0-9][0-9] )[aApP]m|{'|'.join(sorted(NAMES))})(?![a-zA-Z])"
    r"|(?<![^\s(/-])(?:[a-z]{4,}|[A-Z][a-z]{2,})(?![a-zA-Z])"
)
NO_UNITS = MULTIPLES | frozenset("mod plus minus over by and or to choose percent point negative".split())
WORDS = re.compile(r"(?<![\\A-Za-z{_^])[A-Za-z]{2}[A-Za-z .'-]*$")
NAMED = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([^()=]*\))?")  # x, \theta, f(2) in x = 5
BASES = "two three four five six seven eight nine ten eleven twelve".split()
BASED = re.compile(  # without blanks and capitals
    r"\(?(?P<digits>(?=[a-f]*[0-9]|[a-f]{2})[0-9a-f]+)\)?(?:_\(?(?:base)?|\(?(?:in)?base)(?P<base>[0-9]+|[a-z]+)\)?"
)
PLUS_MINUS = r"\pm"
BETWEEN = re.compile(r"(?P<open>[(\[{])|(?P<close>[)\]}])|,? (?:and|or) |[,;:&¦]|\\cup(?![a-zA-Z])")


class Number(NamedTuple):
    """Number(Fraction(7, 2), step=Fraction(0), parts=(7, 2), unit="cm"), read from 7/2 cm.

    `step` is 1 in the last place of a decimal fraction, `parts` are those of a fraction as it is written, `error` is
    what a value that was computed may be off.
    """

    value: Fraction
    step: Fraction
    parts: tuple[int, int] | None = None
    unit: str = ""
    error: Fraction = Fraction(0)

    @property
    def percent(self) -> bool:
        return self.unit == "%"


@lru_cache(maxsize=1 << 12)
def has_variables(answer: str) -> bool:
    r"""Whether a reference is algebra: x + 1 and 2ab are; x = 5, 12 apples, 5 \text{ m}, 3 + 4i and Monday are not."""
    text = plain(IN_WORDS.sub(" ", _right_side(answer)))
    text = NO_VARIABLES.sub(" ", split_unit(text, shortest=2)[0])
    return any(map(str.isalpha, text)) and " base " not in _as_text(plain(answer))


def is_written_out(given: str, answer: str) -> bool:
    """Whether an answer is the reference, with nothing left to work out.

    >>> [is_written_out(given, "12") for given in ("x = 12 cm", "5 + 7", "5 + 7 = 12", "5 + 6 = 12", "12 dozen")]
    [True, False, True, False, False]
    """
    return _same(_both_signs(plain(given)), _both_signs(plain(_right_side(answer))))


def _same(given: str, answer: str) -> bool:
    """For plain texts. Before the last equals sign is nothing but names and what has the same value."""
    answer, words = _without_words(answer)
    wanted, (rest, unit) = number(answer), split_unit(answer)
    expression = read(rest)
    if wanted is None and expression is None:
        return _same_parts(given, answer)
    *before, given = equation(given)
    if words and given.casefold().endswith(words.casefold()):
        given, words = given[: -len(words)].rstrip(), ""
    found, worth = number(given), wanted or _worth(expression)
    if not all(names(side) or _is_worth(side, worth) for side in before):
        return False
    if worth is not None and found is not None:
        return agree(found.unit, words or worth.unit or unit) and _is_reduced(found, worth) and _is_near(found, worth)
    if wanted is not None or expression is None:
        return False
    given, ours = split_unit(given)
    return agree(ours, words or unit) and read(given) in (expression, worked_out(expression))


def _without_words(answer: str) -> tuple[str, str]:
    """A reference such as 12 apples, whose unit is not in the list, and these words; not 12 halves."""
    match = WORDS.search(answer, max(0, len(answer) - LONGEST))
    words = match[0] if match else ""
    if not words or unit_of(words) or NO_UNITS & set(re.findall("[a-z]+", words.casefold())):
        return answer, ""
    rest = answer[: -len(words)].rstrip()
    return (answer, "") if number(rest) is None and read(rest) is None else (rest, words)


def _worth(expression: Node | None) -> Number | None:
    """The value of an expression as a number."""
    known = None if expression is None else value(expression)
    if known is None:
        return None
    exact = isinstance(known, Fraction)
    return Number(Fraction(known), Fraction(0), error=Fraction(0) if exact else abs(Fraction(known)) / 10**14)


def _same_parts(given: str, answer: str) -> bool:
    """For plain texts that are neither numbers nor expressions; a list without brackets may be in any order."""
    theirs = _parts(answer)
    if theirs is None or theirs[0]:  # else each part may be an equation
        *before, given = equation(given)
        if not all(names(side.strip("()").replace(",", "")) for side in before):
            return False
    ours = _parts(given)
    if theirs is None:
        return _as_text(given) in (_as_text(answer), _as_text(answer).partition(" base ")[0])
    if ours is None or ours[:2] != theirs[:2]:
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
    """The number that is all of a plain text, but for a unit of the list."""
    text = LATEX_FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
    text = _without_brackets(re.sub(r"\\overline *\{([0-9]+)\}", r"\\overline \1 ", text))
    match = None if len(text) > LONGEST else NUMBER.match(text)
    if match is None:
        return None
    unit = _unit(match, text[match.end() :].strip())
    if unit is None:
        return None
    digits = {name: re.sub("[, ]", "", match[name] or "") for name in ("whole", "top", "bottom", "decimal")}
    step, parts, sign = Fraction(0), None, -1 if match["sign"] == "-" else 1
    if match["decimal"]:
        exact, places = Fraction(f"0{digits['decimal']}".rstrip(".")), len(digits["decimal"].partition(".")[2])
        power = match["power"] or match["e"]
        if (power and not 1 <= exact < 10) or (match["again"] and "." not in digits["decimal"]):
            return None
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
    return Number(exact * sign, step, parts, unit)


def _without_brackets(text: str) -> str:
    """A number without the brackets around it or its parts: -(3/2), (-3)/2, {12}; nothing for what is a product."""
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
    """The one unit of a number, before or behind it; None where there are two, or no unit of the list."""
    before = match["before"] or match["after"]
    found = ["%"] if match["percent"] else []
    found += [unit_of(before.removeprefix("US").strip() if before.endswith("$") else before)] if before else []
    found += [unit_of(behind)] if behind else []
    return (found[0] if found else "") if all(found) and len(set(found)) <= 1 else None


def _right_side(answer: str) -> str:
    """What a reference such as x = 5 says x is; any other reference as it is."""
    sides = equation(answer)
    return sides[1] if len(sides) == 2 and NAMED.fullmatch(sides[0].strip("$ ")) else answer


def _both_signs(text: str) -> str:
    r"""1\pm\sqrt2 as the list of what it stands for."""
    return f"{text.replace(PLUS_MINUS, '+')}, {text.replace(PLUS_MINUS, '-')}" if PLUS_MINUS in text else text


def _is_reduced(found: Number, wanted: Number) -> bool:
    """Whether a fraction is in lowest terms, or written as the reference is."""
    return found.parts is None or found.parts == wanted.parts or (found.parts[1] > 1 and gcd(*found.parts) == 1)


def _is_near(found: Number, wanted: Number) -> bool:
    """Whether two numbers are equal, or one is the other rounded to six places and six digits or more."""
    scale = Fraction(1, 100) if found.percent and not wanted.percent else Fraction(1)
    if wanted.percent and not found.percent and found.value != wanted.value:
        scale = Fraction(100)
    difference, step = abs(found.value * scale - wanted.value), max(found.step * scale, wanted.step)
    error = found.error * scale + wanted.error
    return difference <= error or (
        difference <= step / 2 + error and step <= min(abs(wanted.value) / 10**5, Fraction(1, 10**6))
    )


def _is_worth(side: str, wanted: Number | None) -> bool:
    """Whether another side of the equation has the value of the answer."""
    found = number(side) or _worth(read(side))
    return found is not None and wanted is not None and _is_near(found, wanted)


def _parts(text: str) -> tuple[str, str, list[str]] | None:
    r"""Brackets, separators and parts of what is made of several: "(3, 4]" -> ("(]", ",", ["3", "4"])."""
    text, brackets = text.replace(r"\{", "{").replace(r"\}", "}").strip(), ""
    if text and text[0] in "([{" and closes(text) == len(text) - 1:
        brackets, text = (text[0] + text[-1]).strip("{}"), text[1:-1]
    separators, parts, start, depth = "", [], 0, 0
    for match in BETWEEN.finditer(text):
        if match["open"] or match["close"]:
            depth += 1 if match["open"] else -1
        elif depth == 0:
            separators += "," if match[0].strip(",; ") in ("", "and", "or") else match[0].strip()
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return (brackets, separators, [*parts, text[start:].strip()]) if parts else None


def _as_text(text: str) -> str:
    """Spaces, braces and capitals make no difference; a number in base 8 has the same text in every notation of it."""
    text = re.sub(r"[{}\s]", "", text).casefold()
    if text.startswith("(") and closes(text) == len(text) - 1:
        text = text[1:-1]
    based = BASED.fullmatch(text)
    if based is None:
        return text
    base = based["base"]
    return f"{based['digits']} base {BASES.index(base) + 2 if base in BASES else base}"
