r"""Are two answers of mathematics equal?  Here as far as their form goes; formulas are left to math-verify.

    equal("x = 7.0 cm", "7", same)            # True, without a call of `same`
    equal("5 m", "5 cm", same), equal("12_8", "12", same), equal("6=7", "7", same)         # all False
    equal("1+2i", "2i+1", same)               # what same("1+2{i}", "2{i}+1") says
Both texts take the one step of envs/math_spelling.py first. Numbers are compared exactly, lists, points and matrices
part by part. A unit, or words as in "5 apples", may be left out on either side and has to agree where both have one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from envs.math_numbers import BASED, Number, as_text, is_same, parse_number
from envs.math_spelling import (
    CLOSE_MATRIX,
    FUNCTION,
    FUNCTIONS,
    IN_WORDS,
    OPEN_MATRIX,
    ROW_END,
    closes,
    for_math_verify,
    plain_spelling,
)
from envs.math_units import CURRENCY, agree, split_unit, unit_of

Same = Callable[[str, str], bool]  # (given, answer) -> whether two formulas have the same value
MULTIPLES = frozenset(  # words that make another number of the one before them, so they are not units
    """hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens gross kilo
    half halves halved third thirds fourth fourths fifth fifths quarter quarters tenth tenths hundredth hundredths
    squared cubed doubled times twice factorial""".split()
)
NUMERALS = frozenset(
    """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety""".split()
)
NOT_BESIDE = (  # words beside a number with which it is not the answer
    MULTIPLES
    | NUMERALS
    | frozenset("mod plus minus over by and or to choose percent point negative not no never wrong incorrect".split())
    | frozenset("false without than least most below above under between before after if unless isn't base".split())
)
VERBS = frozenset("is are was were be equals equal becomes has have gets gives".split())
FILLERS = frozenset("equal to exactly about approximately roughly simply just only therefore".split())
SMALL_WORDS = frozenset("in is are per of for at on more men way ways".split())
ARTICLE = re.compile(r"(?:a|an|the) (?=[a-z]{3})")
WORD = re.compile(r"[A-Za-z'’]+[:,]?")
LETTERS = re.compile("[A-Za-z]+")
WORDS_BEHIND = re.compile(r"(?<![\\A-Za-z{_^'])[A-Za-z]{2}[A-Za-z .'-]*$")
LONGEST_UNIT = 100  # characters of the words behind a number
BARE_LETTER = re.compile(r"(?<![\\a-zA-Z])(?:[a-df-hj-zA-Z](?![a-zA-Z])|[a-zA-Z]{2})")  # neither e, i nor a command
BARE_WORD = re.compile(rf"(?<![\\a-zA-Z])(?!(?:{FUNCTIONS})(?![a-zA-Z]))[a-zA-Z]{{4}}")
OF_LETTERS = re.compile(r"[A-Za-z()\[\]{} '’-]+")
ATTACHED = re.compile(r"[0-9.)}](?![eE][-+]?[0-9]|x ?10)[A-Za-z](?![A-Za-z])")  # 5m is a product, 5 m a length
# What is still to be calculated is no number: a policy learned to answer "What is 18 * 28 - 279?" with 18 * 28 - 279
UNFINISHED = re.compile(r"[0-9)}] *[-+*](?! *10 *\^) *\$?(?:[0-9(]|\\frac)")
SUBSCRIPT = re.compile(r"[0-9)}] ?_")  # of a number: math-verify leaves it out
PERCENT = re.compile(r"%|per\s?cent", re.IGNORECASE)
PERCENT_AT_END = re.compile(r"\s*(?:%|per\s?cent)\s*$", re.IGNORECASE)
RATIO = re.compile(r"([^:]+):([^:]+)")
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
NAMED = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([^()=]*\))?")  # x, \theta, f(2) in x = 5
QUALIFIED = re.compile(r",? (?:where|for (?:all|any|every|each)) .*$|,? ?(?:\\pmod|\(mod)(?![a-z]).*$")  # what follows
IN_BRACKETS = re.compile(r" ?\(([A-Za-z][A-Za-z .'-]*)\)$")  # 5 (approximately)
BETWEEN = re.compile(
    rf"(?P<open>[(\[{{{OPEN_MATRIX}])|(?P<close>[)\]}}{CLOSE_MATRIX}])|,? (?:and|or) |[,;:&{ROW_END}]|\\cup(?![a-zA-Z])"
)
ONE_NUMBER = re.compile(r"[^,;]*(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])[^,;]*")  # 1,200\pi is not a list
UNION = r"\cup"
# what a chain of equations is cut at, and the brackets inside which it is not
EQUALS = re.compile(
    r"(?P<open>[({\[])|(?P<close>[)}\]])|(?<![<>!\\])[:=]?="
    r"|\\(?:to|(?:[Ll]ong)?[Rr]ightarrow|implies|iff|equiv)(?![a-z])"
)
INDEX = re.compile(r"_ ?(?:\w|\{[^{}]*\})|(?<=[A-Za-z'}]) ?\([^()]*\)")  # of x_1, and the argument of f(2)
POWER = re.compile(r"\^ ?(?:\w|\{[^{}]*\})")
NAME = re.compile(r"[A-Za-z\\|][A-Za-z\\ '|(){}]*")
NO_NAME = re.compile(
    r"\\(?:pi|frac|sqrt|infty)(?![a-z])"
    r"|(?<![A-Za-z])(?:and|or|(?i:not|never|isn't|no(?!\.? of |\.)|false|wrong|incorrect|negative))(?![A-Za-z])"
)
LONE_NAME = re.compile(r"(?:\\?[A-Za-z]|\\[A-Za-z]+|[A-Za-z]{4,})'?")
COMMAND = re.compile(r"\\[a-zA-Z]+")
DEEPEST = 8  # brackets within brackets, and what is taken off around an answer
MOST_PARTS = 30  # of a list in another order than the answer's


def same_text(one: str, other: str) -> bool:
    """Return whether two texts are the same but for blanks; between digits a blank counts: 1 1/2 is not 11/2."""
    one, other = (re.sub(r"(?<![0-9.,]) | (?![0-9.,])", "", " ".join(text.split())) for text in (one, other))
    return one == other


def equal(response: str, answer: str, same: Same) -> bool:
    """Return whether an expression is the answer; `same` compares the formulas in them."""
    if same_text(response, answer):
        return True  # also where math-verify could read neither, such as a name
    words = frozenset(LETTERS.findall(" ".join(IN_WORDS.findall(f"{response} {answer}"))))
    response, answer = plain_spelling(response), plain_spelling(answer)
    if not response or not answer or (parse_number(answer) is not None and UNFINISHED.search(equation(response)[-1])):
        return False
    return _Comparison(same, words).equal(response, answer)


@dataclass(frozen=True)
class _Comparison:
    r"""`same` compares formulas, `quoted` holds the words inside of \text{}, which are never products of variables."""

    same: Same
    quoted: frozenset[str]

    def equal(self, response: str, answer: str, depth: int = 0) -> bool:
        """Return whether two plain texts are equal."""
        if depth > DEEPEST:
            return False
        response, answer = (_without_lead(_without_braces(text)) for text in (response, answer))
        if QUALIFIED.search(answer) is None:
            response = QUALIFIED.sub("", response) or response
        if same_text(response, answer) or (_only_words(response) == _only_words(answer) != ""):
            return True
        number, expected = (None if ATTACHED.search(text) else parse_number(text) for text in (response, answer))
        if number is not None and expected is not None:
            return agree(number.unit, expected.unit) and is_same(number, expected)
        ours, theirs = self._measured(response), self._measured(answer)
        if not _agree(ours, theirs):
            return False
        if (ours.rest, theirs.rest) != (response, answer):
            return self.equal(ours.rest, theirs.rest, depth + 1)
        if len(equation(response)) + len(equation(answer)) > 2:
            return self._equations(response, answer, depth)
        if (lists := self._lists(response, answer, depth)) is not None:
            return lists
        return self._formulas(response, answer, number, expected)

    def _measured(self, text: str) -> _Measured:
        """Return a text without its unit, or without the words behind a number."""
        if currency := CURRENCY.match(text):
            rest = text[currency.end() :].strip()
            if rest and not split_unit(rest)[1]:
                return _Measured(("-" if text.startswith("-") else "") + rest, unit_of(currency[1]), "")
        whole = text
        if (inside := IN_BRACKETS.search(text)) and (len(inside[1].split()[0]) > 3 or unit_of(inside[1])):
            text = f"{text[: inside.start()]} {inside[1]}"
        rest, unit = split_unit(text)
        if unit:
            end, letters = text[len(rest) :], LETTERS.match(text[len(rest) :].strip())
            variable = letters is not None and len(letters[0]) == 1 and letters[0] not in self.quoted
            if end.startswith(" ") and not variable:
                return _Measured(rest, unit, "")
            if parse_number(rest) is not None if end.startswith(" ") else not variable and not _is_algebra(rest):
                return _Measured(rest, unit, "")
        match = WORDS_BEHIND.search(text, max(0, len(text) - LONGEST_UNIT))
        words = match[0].split() if match else []
        rest = text[: match.start()].rstrip() if match else ""
        if not rest or _is_algebra(rest) or NOT_BESIDE.intersection(LETTERS.findall(" ".join(words).casefold())):
            return _Measured(whole, "", "")
        if len(words[0]) < 4 and words[0] not in SMALL_WORDS | self.quoted:
            return _Measured(whole, "", "")
        for count in range(len(words), 0, -1):  # 5 meters long
            if unit := unit_of(" ".join(words[:count])):
                return _Measured(rest, unit, "")
        return _Measured(rest, "", " ".join(words).casefold())

    def _equations(self, response: str, answer: str, depth: int) -> bool:
        """Return whether each side of an equation is a name or the answer: x=7 and 3+4=7 are 7, 6=7 and 2x=7 are not.

        An equation as the answer is what it says of one name, as in y = 2x + 3, or is left to math-verify.
        """
        is_list = _listed(answer) is not None
        sides, theirs = [response] if _listed(response) else equation(response), equation(answer)
        if not is_list and len(theirs) == 2 and (name := _name(theirs[0])):
            mine = _name(sides[0]) if len(sides) > 1 else ""
            if len(name) > 1 or len(mine) != 1 or name == mine:
                alike = self._sides(sides, theirs[1], depth)
                if alike or len(sides) != 2:
                    return alike
        elif len(theirs) == 1 or is_list:
            if len(sides) > 1:
                return self._sides(sides, answer, depth)
            return bool(self._lists(response, answer, depth))
        return len(sides) == len(theirs) == 2 and self._ask(response, answer)

    def _sides(self, sides: list[str], answer: str, depth: int) -> bool:
        *before, last = sides
        if not self.equal(last, answer, depth + 1):
            return False
        return all(
            names_variable(side, answer) or _name(side).startswith("(") or self.equal(side, answer, depth + 1)
            for side in before
        )

    def _lists(self, response: str, answer: str, depth: int) -> bool | None:
        """Return whether two lists, points, intervals, unions or matrices are equal; None if both may be formulas."""
        ours, theirs = _listed(response), _listed(answer)
        if ours is None and theirs is None:
            return None
        if ":" in f"{response}{answer}" and (ratios := _same_ratio(response, answer)) is not None:
            return ratios
        if ours is None or theirs is None:  # 5, 6 is not 5
            return False if ours and not ours[0] and UNION not in response else None
        (brackets, between, these), (their_brackets, separators, those) = ours, theirs
        if len(these) != len(those) or between != separators:
            return None if UNION in response + answer else False
        if brackets != their_brackets and not (set(separators) == {","} and {brackets, their_brackets} == {"", "()"}):
            return False
        if brackets != their_brackets and any(text.startswith(("{", r"\{")) for text in (response, answer)):
            return False  # a set is not a point
        if their_brackets or ":" in separators:
            return all(self.equal(one, other, depth + 1) for one, other in zip(these, those, strict=True))
        left = list(those)
        rest = [one for one in these if not _taken(one, left)]
        if len(rest) > MOST_PARTS:
            return False
        for one in rest:
            match = next((other for other in left if self.equal(one, other, depth + 1)), None)
            if match is None:
                return False
            left.remove(match)
        return True

    def _formulas(self, response: str, answer: str, number: Number | None, expected: Number | None) -> bool:
        """Return whether what is neither a list nor an equation nor two numbers is equal."""
        ours, theirs = based(response), based(answer)
        if theirs:
            return ours == theirs or as_text(response) == theirs[0]
        if ours:  # 12_8 is not 12
            return (
                ours[1] == 10
                and expected is not None
                and is_same(Number(Fraction(int(ours[0])), Fraction(0)), expected)
            )
        if PERCENT.search(response) or PERCENT.search(answer):
            return self._percentages(response, answer)
        return self._ask(response, answer)

    def _percentages(self, response: str, answer: str) -> bool:
        """Return whether they are equal: a percentage is so many hundredths, unless the answer is one as well."""
        rest, theirs = PERCENT_AT_END.sub("", response), PERCENT_AT_END.sub("", answer)
        if PERCENT.search(rest) or PERCENT.search(theirs) or not rest or not theirs:
            return False
        if rest == response:
            return self._ask(response, theirs) or self._ask(response, rf"\frac{{{theirs}}}{{100}}")
        return self._ask(rest, theirs) if theirs != answer else self._ask(rf"\frac{{{rest}}}{{100}}", answer)

    def _ask(self, response: str, answer: str) -> bool:
        """Return what math-verify says of two formulas, where it is not too generous: it takes 1 2 for 3."""
        if any(BARE_WORD.search(text) or SUBSCRIPT.search(text) for text in (response, answer)):
            return False
        if response.count("'") != answer.count("'"):
            return False
        response, answer = for_math_verify(response), for_math_verify(answer)
        return not re.search("[0-9] [0-9]", response) and self.same(response, answer)


class _Measured(NamedTuple):
    """_Measured("5", "cm", "") of 5 cm, _Measured("5", "", "red apples") of words that are not in the list."""

    rest: str
    unit: str
    words: str


def _agree(ours: _Measured, theirs: _Measured) -> bool:
    """Return whether units or words agree; what has neither agrees with all, and words need one word in common."""
    if ours.words and theirs.words:
        one, other = ({word.rstrip("s") for word in LETTERS.findall(each.words)} for each in (ours, theirs))
        return bool((one & other) - SMALL_WORDS)
    return agree(ours.unit or ours.words, theirs.unit or theirs.words)


def _without_braces(text: str) -> str:
    """Return a text without the braces around all of it, unless it is a set of several."""
    text = text.replace(r"\{", "{").replace(r"\}", "}") if text.startswith(r"\{") else text
    while text.startswith("{") and closes(text) == len(text) - 1 and parts(text) is None:
        text = text[1:-1].strip()
    return text


def _is_algebra(text: str) -> bool:
    """Return whether a text has variables."""
    currency = CURRENCY.match(text)
    return BARE_LETTER.search(text, currency.end() if currency else 0) is not None


def _without_lead(text: str) -> str:
    """Return a text without the words before its verb, colon or number: The answer is about 5, Answer: 5, total 5."""
    words, cut = text.split(" "), 0
    for number_of_words, word in enumerate(words):
        bare = word.rstrip(":,").casefold()
        if WORD.fullmatch(word) is None or bare in NOT_BESIDE:
            break
        if bare in VERBS or (word.endswith(":") and len(bare) > 2):
            cut = number_of_words + 1
            while cut < len(words) - 1 and words[cut].rstrip(":,").casefold() in FILLERS:
                cut += 1
            break
    else:
        return text
    if cut:
        return " ".join(words[cut:]).removeprefix("=").strip() or text
    lead, rest = words[:number_of_words], " ".join(words[number_of_words:])
    is_lead = all(len(word) > 2 and not CURRENCY.match(word) and not FUNCTION.match(word) for word in lead)
    return (
        rest
        if lead and is_lead and words[number_of_words].casefold() not in NOT_BESIDE and parse_number(rest)
        else text
    )


def _only_words(text: str) -> str:
    """Return an answer that is words, in one spelling of it: the Ellipse, (C); nothing for any other."""
    if OF_LETTERS.fullmatch(text) is None:
        return ""
    text = re.sub(r"[()\[\]{}]", " ", text).strip().casefold()
    article = ARTICLE.match(text)
    return text[article.end() :] if article else text


def _name(side: str) -> str:
    """Return what an equation says a value of: x, f(2) or (x,y); nothing where it is not one name."""
    if NO_NAME.search(side):
        return ""
    side = side.strip("$ ").replace(" ", "")
    several = side[1:-1].split(",") if side.startswith("(") and side.endswith(")") else []
    is_point = len(several) > 1 and all(map(NAMED.fullmatch, several))
    return side if is_point or NAMED.fullmatch(side) else ""


def _listed(text: str) -> tuple[str, str, list[str]] | None:
    r"""Return the parts of a list, point, interval, union or matrix; 1\pm\sqrt2 is a list of two."""
    if ONE_NUMBER.fullmatch(text) and not re.search(r" (?:and|or) |^\\?[(\[{]", text):
        return None
    pieces = parts(text)
    brackets, separators, several = pieces or ("", "", [text])
    if PLUS_MINUS.search(text) is None or brackets or set(separators) > {","}:
        return pieces
    both = [[PLUS_MINUS.sub(sign, part) for sign in ("+-" if PLUS_MINUS.search(part) else " ")] for part in several]
    expanded = [part for signs in both for part in signs]
    return brackets, "," * (len(expanded) - 1), expanded


def _taken(part: str, left: list[str]) -> bool:
    """Return whether a part is in a list as it is written; it is taken out."""
    there = next((other for other in left if same_text(part, other)), None)
    if there is not None:
        left.remove(there)
    return there is not None


def _same_ratio(response: str, answer: str) -> bool | None:
    """Return whether 6:8 is 3:4, or 3/4 is 3:4; None where one is neither such a ratio nor a number."""
    ratios, others = [], []
    for text in (response, answer):
        match, whole = RATIO.fullmatch(text), parse_number(text)
        sides = [parse_number(side.strip()) for side in match.groups()] if match else []
        if all(sides) and sides and sides[1] and sides[1].value:
            ratios.append(Fraction(sides[0].value, sides[1].value))  # pyright: ignore[reportOptionalMemberAccess]
        elif whole is not None:
            others.append(whole)
    if len(ratios) + len(others) < 2:
        return None
    return len(set(ratios)) == 1 and all(other.parts and other.value == ratios[0] for other in others)


def based(text: str) -> tuple[str, int] | None:
    """Return the digits and the base of a number such as 52_8 or 52 in base eight; None of any other text."""
    match = BASED.fullmatch(as_text(text).replace(" ", ""))
    if match is None or not match["base"].isdecimal():
        return None
    base = int(match["base"])
    is_one = 2 <= base <= 36 and all(int(digit, 36) < base for digit in match["digits"])
    return (match["digits"], base) if is_one else None


def parts(text: str) -> tuple[str, str, list[str]] | None:
    r"""Return brackets, separators and parts of what is made of several: "(3, 4]" -> ("(]", ",", ["3", "4"])."""
    text, brackets = text.replace(r"\{", "{").replace(r"\}", "}").strip(), ""
    if text and text[0] in f"([{{{OPEN_MATRIX}" and closes(text) == len(text) - 1:
        brackets, text = (text[0] + text[-1]).strip("{}"), text[1:-1]
    separators, pieces, start, depth = "", [], 0, 0
    for match in BETWEEN.finditer(text):
        if match["open"] or match["close"]:
            depth += 1 if match["open"] else -1
        elif depth == 0:
            separators += "," if match[0].strip(",; ") in ("", "and", "or") else match[0].strip()
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    return (brackets, separators, [*pieces, text[start:].strip()]) if pieces else None


def names_variable(side: str, answer: str = "") -> bool:
    r"""Return whether a side of an equation names the unknown: x, f(2), a+b; not 2x, -x, x^2, 13 or x.

    Of an answer with letters it is one name that the answer does not have.
    """
    side = re.sub(r"\\(?:text|mathrm) ?\{([^{}]*)\}", r"\1", side).strip("$ ")
    rest = INDEX.sub("", side).strip()
    if any(map(str.isalpha, COMMAND.sub(" ", answer))):
        others = COMMAND.findall(answer) if rest.startswith("\\") else COMMAND.sub(" ", answer)
        return LONE_NAME.fullmatch(rest) is not None and rest not in others
    terms = re.split("[-+]", rest)
    return all(
        NAME.fullmatch(term) is not None and not NO_NAME.search(term)
        for term in (terms if len(terms) == 1 else [POWER.sub("", term).strip() for term in terms])
    )


def equation(text: str) -> list[str]:
    """Return the sides of an equation or of a chain of them: equation("x=3+4=7") -> ["x", "3+4", "7"].

    An equals sign inside brackets counts only where no other is outside them: equation("(6=7)") -> ["6", "7"].
    """
    cuts: list[tuple[int, int, int]] = []  # depth, start, end
    depth = 0
    for match in EQUALS.finditer(text):
        if match["open"] or match["close"]:
            depth = max(0, depth + (1 if match["open"] else -1))
        else:
            cuts.append((depth, *match.span()))
    least = min(cuts)[0] if cuts else 0
    outermost = [(start, end) for level, start, end in cuts if level == least]
    ends, starts = [start for start, _ in outermost] + [len(text)], [0] + [end for _, end in outermost]
    sides = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    if least > 0:
        sides = [re.sub(r"\\(?:left|right)(?![a-z])|[(){}\[\]$]", "", side).strip(" \\") for side in sides]
    return sides
