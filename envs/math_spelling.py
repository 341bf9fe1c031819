r"""How is an answer of mathematics spelled without what LaTeX, Markdown and Unicode put around it?

    plain(r"$\dfrac{1}{2}$") == plain("\\displaystyle \\frac{1}{2},") == r"\frac{1}{2}"
    plain("**3½**") == "3 1/2", plain("2562₇") == "2562_{7}", for_math_verify("√(x)") == r"\sqrt{x}"
No pattern repeats a group that repeats, so the time is linear in the length of a text, which is bounded first.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from functools import lru_cache

LONGEST_TEXT = 1000  # characters; nothing longer is an answer
SPELLINGS = [  # LaTeX's way to write what plain text has as well
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\\\", "¦"),  # ends a row
        (r"\\\$", "USD "),  # a currency; any other pair of dollars surrounds mathematics
        (r"\$\$?(?=[^\s$])([^$]*[^\s$])\$\$?(?![0-9])", r"\1"),
        (r"\\(?:left|right|displaystyle|textstyle)(?![a-zA-Z])|\\!|\\[()\[\]]", ""),
        (r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox|fbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s", " "),
        (r"\^ *\{? *\\circ *\}?|\\degree(?![a-zA-Z])|º", "°"),
        (r"\{([,:])\}", r"\1"),
        (r"\\%", "%"),
        (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
        ("[−–]", "-"),
        (r"\\(?:cdot|times)(?![a-zA-Z])|[·×]", "*"),
        ("[÷⁄∕]", "/"),
        (r"\\colon(?![a-zA-Z])|∶", ":"),
        (r"(?<=[0-9]) +to +(?=[0-9])", ":"),
        (r"(:[0-9][0-9]) ?([aApP])\.? ?[mM](?:\.|(?![a-zA-Z]))", r"\1 \2m"),
        (r"\\approx(?![a-zA-Z])|≈", "="),
        (r"π|(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"∪|(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
        (r"∞|(?<![a-zA-Z\\])inf(?:inity|ty)?(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])sqrt", "√"),
        ("±", r"\\pm "),
        (r"\\begin *\{pmatrix\}", "("),
        (r"\\end *\{pmatrix\}", ")"),
        (" +", " "),
    )
]
AROUND = "*`\"'“”‘’"  # quotation marks, and the stars of Markdown
MEMBER = re.compile(r"^[A-Za-z] ?(?:\\in(?![a-zA-Z])|∈) ?(?=[(\[])")  # x \in (0, 5] says which interval
LAST_LETTERS = re.compile(r"(?<![\\A-Za-z])([A-Za-z]+)$")
ROOT = re.compile(r"√ ?(?:([0-9]+|[A-Za-z])|(?=[({]))")
MOST_ROOTS = 20


@lru_cache(maxsize=1 << 12)
def plain(text: str) -> str:
    """The text without what is put around it, blanks as one blank; nothing where the text is no answer."""
    if len(text) > LONGEST_TEXT or len(text := _without_unicode(text)) > LONGEST_TEXT:
        return ""
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip().rstrip(".,; ")
    while len(text) > 2 and text[0] in AROUND and text[-1] in AROUND:
        text = text[1:-1].strip().rstrip(".,; ")
    return MEMBER.sub("", text.removeprefix("=").strip("` "))


def _without_unicode(text: str) -> str:
    """Wide digits, superscripts and signs that stand for several as what they stand for: x² is x^{2}, 3½ is 3 1/2."""
    if text.isascii():
        return text
    pieces = []
    for kind, characters in itertools.groupby(text, lambda one: unicodedata.decomposition(one).partition(" ")[0]):
        these = list(characters)
        wide = [unicodedata.normalize("NFKC", one) for one in these]
        if kind == "<fraction>":
            pieces += [f" {one} " for one in wide]
        elif kind in ("<super>", "<sub>") and these != ["º"]:
            pieces.append(f"{'^' if kind == '<super>' else '_'}{{{''.join(wide)}}}")
        else:
            pieces += these if these == ["º"] else wide
    return "".join(pieces)


def for_math_verify(text: str) -> str:
    r"""A plain text without unit as math-verify reads it: \sqrt{x} for √x, 2{ab}, since it takes ab for a unit."""
    text = LAST_LETTERS.sub(r"{\1}", text.replace("**", "^"))
    pieces = ROOT.split(text, maxsplit=MOST_ROOTS)
    found = pieces[0]
    for inside, rest in zip(pieces[1::2], pieces[2::2], strict=True):
        end = 0 if inside else closes(rest)
        found += rf"\sqrt{{{inside or rest[1:end]}}}" + (rest if inside else rest[end + 1 :]) if end >= 0 else rest
    return found


def closes(text: str) -> int:
    """Where the bracket that opens a text is closed; -1 where it is not."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return at
    return -1
