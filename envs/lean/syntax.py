"""How is the fragment of Lean written?  A parser for formulas, terms and proof terms, and a printer in Lean's way.

An expression is a tuple that begins with its kind:
    ("name", "p")  ("num", 3)  ("list", (e, ...))  ("bin", "∧", e, e)  ("not", e)  ("exists", "x", "Nat", e)
    ("proj", e, "1")  ("app", e, (e, ...))  ("tuple", (e, ...))  ("fun", "x", e)  ("hole",)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

Expr = tuple[Any, ...]

# Operator: strength, least strength of its left and of its right side, as in Lean's own notations.
OPERATORS = {
    "↔": (20, 21, 21), "→": (25, 26, 25), "∨": (30, 31, 30), "∧": (35, 36, 35),
    "=": (50, 51, 51), "≠": (50, 51, 51), "≤": (50, 51, 51), "<": (50, 51, 51), "≥": (50, 51, 51), ">": (50, 51, 51),
    "++": (65, 65, 66), "+": (65, 65, 66), "*": (70, 70, 71),
}  # fmt: skip
RELATIONS = ("=", "≠", "≤", "<", "≥", ">")
NEGATION, TIGHT = 40, 1024
ASCII = {"->": "→", "<->": "↔", "/\\": "∧", "\\/": "∨", "<=": "≤", ">=": "≥", "!=": "≠", "λ": "fun", "↦": "=>"}
TOKEN = re.compile(
    r"\s*(<->|->|=>|<=|>=|:=|\+\+|/\\|\\/|\?_|[A-Za-z_][A-Za-z0-9_']*|[0-9]+|[⟨⟩()\[\],.|:=<≤≥>≠+*¬∧∨→↔∃λ↦])"
)
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_']*\Z")
RESERVED = frozenset("fun by at with have show from if then else let in True False Prop Nat List".split())
DEEPEST = 40  # brackets and prefixes within each other
DIGITS = 9


class Unreadable(ValueError):
    """The text is not in the fragment."""


def split_tokens(text: str) -> list[str]:
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"{text[at : at + 12]!r} is not in the fragment")
        tokens.append(ASCII.get(match[1], match[1]))
        at = match.end()
    return tokens


class Parser:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self.tokens = split_tokens(text)
        self.at = self.depth = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.next
        if not token or (expected and token != expected):
            raise Unreadable(f"expected {expected or 'more'}, found {token or 'the end'}")
        self.at += 1
        return token

    def took(self, token: str) -> bool:
        if self.next == token:
            self.at += 1
            return True
        return False

    def name(self) -> str:
        token = self.take()
        if not NAME.match(token) or token in RESERVED:
            raise Unreadable(f"{token} is not a name")
        return token

    def end(self) -> None:
        if self.next:
            raise Unreadable(f"unexpected {self.next}")

    def expression(self, least: int = 0) -> Expr:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("too deeply nested")
        left = self._prefix(least)
        while self.next in OPERATORS and OPERATORS[self.next][0] >= least:
            operator = self.take()
            left = ("bin", operator, left, self.expression(OPERATORS[operator][2]))
            if (operator in RELATIONS and self.next in RELATIONS) or operator == self.next == "↔":
                raise Unreadable(f"put brackets around one {operator}")
        self.depth -= 1
        return left

    def _prefix(self, least: int) -> Expr:
        if self.took("¬"):
            return ("not", self.expression(NEGATION))
        if self.next in ("∃", "fun"):
            if least > OPERATORS["→"][2]:
                raise Unreadable(f"put brackets around {self.next}")
            return self._exists() if self.took("∃") else self._fun()
        head = self._tight()
        arguments = []
        while self.next in ("(", "⟨", "[", "?_") or NAME.match(self.next) or self.next.isdecimal():
            if self.next in RESERVED - {"True", "False"}:
                break
            arguments.append(self._tight())
        return ("app", head, tuple(arguments)) if arguments else head

    def _exists(self) -> Expr:
        name = self.name()
        self.take(":")
        kind = self.take()
        if kind == "List":
            self.take("Nat")
        elif kind != "Nat":
            raise Unreadable(f"∃ over {kind}: only Nat and List Nat are in the fragment")
        self.take(",")
        return ("exists", name, kind, self.expression())

    def _fun(self) -> Expr:
        self.take("fun")
        names = [self.name()]
        while self.next != "=>":
            names.append(self.name())
        self.take("=>")
        body = self.expression()
        for name in reversed(names):
            body = ("fun", name, body)
        return body

    def _tight(self) -> Expr:
        term = self._closed()
        while self.took("."):
            term = ("proj", term, self.take())
        return term

    def _closed(self) -> Expr:
        token = self.take()
        if token == "?_":
            return ("hole",)
        if token == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if token in ("⟨", "["):
            closing, items = {"⟨": "⟩", "[": "]"}[token], []
            while self.next != closing:
                items.append(self.expression())
                if not self.took(","):
                    break
            self.take(closing)
            return ("tuple" if token == "⟨" else "list", tuple(items))
        if token.isdecimal():
            if len(token) > DIGITS:
                raise Unreadable("the number is too large")
            return ("num", int(token))
        if NAME.match(token) and token not in RESERVED - {"True", "False"}:
            return ("name", token)
        raise Unreadable(f"unexpected {token}")


@lru_cache(maxsize=1 << 14)
def parse_formula(text: str) -> Expr:
    parser = Parser(text)
    expression = parser.expression()
    parser.end()
    return expression


def format_formula(expr: Expr, least: int = 0) -> str:
    """Return an expression as Lean prints it."""
    kind = expr[0]
    if kind == "bin":
        strength, left, right = OPERATORS[expr[1]]
        text = f"{format_formula(expr[2], left)} {expr[1]} {format_formula(expr[3], right)}"
        return f"({text})" if strength < least else text
    if kind == "not":
        return f"¬{format_formula(expr[1], NEGATION)}"
    if kind == "exists":
        text = f"∃ {expr[1]}, {format_formula(expr[3])}"
        return f"({text})" if least > OPERATORS["→"][2] else text
    if kind == "list":
        return f"[{', '.join(map(format_formula, expr[1]))}]"
    if kind == "proj":
        return f"{format_formula(expr[1], TIGHT)}.{expr[2]}"
    assert kind in ("name", "num"), expr
    return str(expr[1])


def mentions(expr: Expr, names: Collection[str]) -> bool:
    """Return whether an expression has one of these names in it."""
    return expr[1] in names if expr[0] == "name" else any(mentions(e, names) for e in _inside(expr))


def _inside(expr: Expr) -> Iterator[Expr]:
    for part in expr[1:]:
        if isinstance(part, tuple):
            yield from part if part and isinstance(part[0], tuple) else (part,) if part else ()


def substitute(expr: Expr, name: str, by: Expr) -> Expr:
    """Return an expression with `by` for `name`; Unreadable where an ∃ inside would capture a name of `by`."""
    kind = expr[0]
    if kind == "name":
        return by if expr[1] == name else expr
    if kind == "bin":
        return ("bin", expr[1], substitute(expr[2], name, by), substitute(expr[3], name, by))
    if kind == "not":
        return ("not", substitute(expr[1], name, by))
    if kind == "exists":
        if expr[1] == name:
            return expr
        if mentions(by, (expr[1],)):
            raise Unreadable(f"the name {expr[1]} is in use; the fragment wants a new one")
        return (*expr[:3], substitute(expr[3], name, by))
    if kind == "list":
        return ("list", tuple(substitute(item, name, by) for item in expr[1]))
    if kind == "proj":
        return ("proj", substitute(expr[1], name, by), expr[2])
    return expr


WORDS = {
    "∧": "{} and {}", "∨": "{} or {}", "↔": "{} exactly when {}", "=": "{} equals {}",
    "≠": "{} is not {}", "≤": "{} is at most {}", "<": "{} is less than {}", "≥": "{} is at least {}",
    ">": "{} is more than {}", "+": "{} + {}", "*": "{} * {}", "++": "{} followed by {}",
}  # fmt: skip


def formula_in_words(expr: Expr, inner: bool = False) -> str:
    """Return a formula in plain words; parts of parts stand in brackets."""
    kind = expr[0]
    if kind == "bin" and expr[1] == "→":  # several premises in one sentence
        premises = []
        while expr[:2] == ("bin", "→"):
            premises.append(formula_in_words(expr[2], True))
            expr = expr[3]
        text = f"if {' and '.join(premises)}, then {formula_in_words(expr, True)}"
        return f"({text})" if inner else text
    if kind == "bin":
        text = WORDS[expr[1]].format(formula_in_words(expr[2], True), formula_in_words(expr[3], True))
        plain = expr[1] in RELATIONS or expr[1] in ("*", "++")
        return f"({text})" if inner and not plain else text
    if kind == "not":
        return f"not {formula_in_words(expr[1], True)}"
    if kind == "exists":
        text = f"there is a {'list' if expr[2] == 'List' else 'number'} {expr[1]} such that {formula_in_words(expr[3])}"
        return f"({text})" if inner else text
    if kind == "proj":
        return f"the {'length' if expr[2] == 'length' else 'reverse'} of {formula_in_words(expr[1], True)}"
    return "a contradiction" if expr == ("name", "False") else format_formula(expr)
