"""Is an answer right?  The judge of envs/math_judge.py, as the scripts use it.

Importing it loads the environments: what must start at once imports it where it is needed.
"""

from __future__ import annotations

import re

from envs import math_judge
from envs.math_judge import last_boxed as last_boxed
from posttrain.types import UserError

WIDE = str.maketrans("０１２３４５６７８９．，－−﹣", "0123456789.,---")
CURRENCY = r"(?:[A-Z]{0,3}\\?[$€£¥])"
SEPARATOR = r"(?:,(?:\\!)?|\{,\}|\\[,!])"  # of thousands, also as LaTeX spells it
NUMBER = re.compile(
    rf"(?P<before>[-+]?){CURRENCY}?(?P<after>-?)(?P<number>"
    rf"(?:(?<![0-9.])(?:[0-9]{{1,3}}(?:{SEPARATOR}[0-9]{{3}})++|[0-9]{{1,2}}(?:,[0-9]{{2}}(?![0-9]))++,[0-9]{{3}})"
    r"(?![0-9])|[0-9]++)(?:\.[0-9]++)?|(?<![0-9A-Za-z.)\]}])\.[0-9]++)(?P<power>[eE][-+]?[0-9]++(?![0-9A-Za-z]))?"
)
TAKEN_FROM = re.compile(  # what a minus behind it is not a sign after: a number, a bracket, a word of an alphabet
    rf"(?:[0-9)\]}}%!]|[0-9]\.?{CURRENCY}?) *\Z|[0-9A-Za-z\u00c0-\u024f\u0370-\u052f.]['’]?\Z"
)
LOOK_BACK = 40  # characters


def last_number(text: str) -> str | None:
    """Return the last number of a text, boxed or not, without commas: last_number("It is -$1,200.") -> "-1200".

    What lm-evaluation-harness calls the flexible extraction of GSM8K. A minus belongs to a number unless it stands
    directly behind a word or behind a number or a bracket, as in COVID-19 and 5 - 3, or before a blank.
    """
    text = text.translate(WIDE)
    matches = list(NUMBER.finditer(text))
    if not matches:
        return None
    found = matches[-1]
    number = re.sub(SEPARATOR, "", found["number"]) + (found["power"] or "")
    number = f"0{number}" if number.startswith(".") else number
    signs = found["before"] + found["after"]
    is_operand = TAKEN_FROM.search(text[max(0, found.start() - LOOK_BACK) : found.start()]) is not None
    return f"-{number}" if signs.endswith("-") and (len(signs) == 2 or not is_operand) else number


class MathJudge(math_judge.MathJudge):
    """That it cannot be started is something a user can fix."""

    def start(self) -> None:
        try:
            super().start()
        except math_judge.NoJudge as error:
            raise UserError(str(error)) from None
