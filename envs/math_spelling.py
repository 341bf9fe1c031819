r"""How is an answer of mathematics spelled without what LaTeX, Markdown and Unicode put around it?

    plain(r"$\dfrac{1}{2}$") == plain("\\displaystyle \\frac{1}{2},") == r"\frac{1}{2}"
    plain("**3½**") == "3 1/2", plain("2562₇") == "2562_{7}", plain(r"10,\!080") == "10,080"
    for_math_verify("√(x)") == r"\sqrt{x}", for_math_verify("3 sin x + 2i") == r"3 \sin x + 2{i}"
Every judge of mathematics takes this step before any other. No pattern repeats a group that repeats, so the time is
linear in the length of a text, which is bounded first.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from functools import lru_cache

LONGEST_TEXT = 1000  # characters; nothing longer is an answer
WORDS = "text|textnormal|textrm|textbf|textit|textsf|texttt|textup|emph|mbox|fbox|mathrm"
STYLES = f"{WORDS}|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|underline"
IN_WORDS = re.compile(rf"\\(?:{WORDS})\s*\{{[^{{}}]*\}}")
GREEK = "alpha beta gamma delta epsilon theta lambda mu phi rho sigma tau omega".split()
LETTERS = {unicodedata.lookup(f"GREEK SMALL LETTER {name.replace('lambda', 'lamda')}"): name for name in GREEK}
OPEN_MATRIX, CLOSE_MATRIX, ROW_END = "⟦⟧¦"  # stand for one matrix with its rows, however it was typeset
SPELLINGS = [  # LaTeX's way to write what plain text has as well
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\\\(?: *\[[0-9.]+ *(?:pt|em|ex|mm|cm)\])?", ROW_END),
        (r"(?:US ?)?\\\$", "USD "),  # a currency; any other pair of dollars surrounds mathematics
        (r"\$\$?(?=[^\s$])([^$]*[^\s$])\$\$?(?![0-9])", r"\1"),
        (r"(?<=[0-9])(?:,|\{,\})\\! *(?=[0-9]{3})", ","),  # 10,\!080
        (r"\{([,:])\}", r"\1"),
        (r"\\(?:left|right|displaystyle|textstyle|bf|rm|it|ensuremath)(?![a-zA-Z])|\\!|\\[()\[\]]", ""),
        (rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (rf"\\(?:{STYLES})(?= *\{{)", ""),
        (r"\\(?:[,;:> ]|\Z)|\\(?:q?quad|enspace|thinspace)(?![a-zA-Z])|~|\s", " "),
        (r"\^ *(?:\{ *\\circ *\}|\\circ(?![a-zA-Z]))|\\(?:text)?degree(?![a-zA-Z])|º", "°"),
        (r"\\%", "%"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        ("[−–‐‑‒]", "-"),
        (r"\\(?:cdot|times|ast)(?![a-zA-Z])|[·×⋅∗]", "*"),
        (r"\\div(?![a-zA-Z])|[÷⁄∕]", "/"),
        (r"\\colon(?![a-zA-Z])|∶", ":"),
        (r"(?<=[0-9]) +to +(?=[0-9])", ":"),
        (r"(:[0-9][0-9]) ?([aApP])\.? ?[mM](?:\.|(?![a-zA-Z]))", r"\1 \2m"),
        (r"\\approx(?![a-zA-Z])|≈", "="),
        ("≤", r"\\le "),
        ("≥", r"\\ge "),
        ("≠", r"\\ne "),
        (r"π|(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"∪|(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
        (r"∞|(?<![a-zA-Z\\])inf(?:inity|ty)?(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])sqrt", "√"),
        ("±", r"\\pm "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"[(\[] *\\begin *\{(?:small)?matrix\}|[(\[] *\\begin *\{array\} *\{[^{}]*\}", OPEN_MATRIX),
        (r"\\end *\{(?:(?:small)?matrix|array)\} *[)\]]", CLOSE_MATRIX),
        (r"\\begin *\{[pb]matrix\}", OPEN_MATRIX),
        (r"\\end *\{[pb]matrix\}", CLOSE_MATRIX),
        (rf"{ROW_END} *{CLOSE_MATRIX}", CLOSE_MATRIX),
        (r"(?<![^\s=:(])\*\*(?=[^\s*])([^*]*[^\s*])\*\*(?![^\s.,;:)])", r"\1"),
        (" +", " "),
    )
]
AROUND = "*_`\"'“”‘’"  # quotation marks, and what Markdown puts around what it stresses
BEHIND = ".,; 。，、；" + ROW_END
MEMBER = re.compile(r"^[A-Za-z] ?(?:\\in(?![a-zA-Z])|∈) ?(?=[(\[])")  # x \in (0, 5] says which interval
ROOT = re.compile(r"√ ?(?:([0-9]+|[A-Za-z])|(?=[({]))")
MOST_ROOTS = 20
OF_DIGITS = re.compile(r"(\\(?:frac|binom)) ?([0-9]) ?([0-9])(?![0-9])")  # \frac 1 2 is \frac{1}{2}
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9])")
MIXED = re.compile(r"(?<![0-9.,/])([0-9]+) ([0-9]+) ?/ ?([0-9]+)(?![0-9.,])")
FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|max|min|gcd|lcm|det|deg|arg|dim|sup|lim"
)
FUNCTION = re.compile(rf"(?<![\\a-zA-Z])(?:{FUNCTIONS})(?![a-zA-Z])")
DIGIT_RAISED = re.compile(r"([_^]) ?([0-9])(?= )")  # \log_2 8
IMAGINARY = re.compile(r"(?<![\\a-zA-Z{])i(?![a-zA-Z])")


@lru_cache(maxsize=1 << 12)
def plain_spelling(text: str) -> str:
    """Return the text without what is put around it, blanks as one blank; nothing where it is not an answer."""
    if len(text) > LONGEST_TEXT or len(text := _without_unicode(text)) > LONGEST_TEXT:
        return ""
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip().rstrip(BEHIND)
    while len(text) > 2 and text[0] in AROUND and text[-1] in AROUND:
        text = text[1:-1].strip().rstrip(BEHIND)
    return MEMBER.sub("", text.removeprefix("=").strip("` "))


def _without_unicode(text: str) -> str:
    """Wide digits, superscripts and signs that stand for several as what they stand for: x² is x^{2}, 3½ is 3 1/2."""
    if text.isascii():
        return text
    pieces = []
    for kind, characters in itertools.groupby(text, lambda one: unicodedata.decomposition(one).partition(" ")[0]):
        these = list(characters)
        wide = [f"\\{LETTERS[one]} " if one in LETTERS else unicodedata.normalize("NFKC", one) for one in these]
        if kind == "<fraction>":
            pieces += [f" {one} " for one in wide]
        elif kind in ("<super>", "<sub>") and these != ["º"]:
            pieces.append(f"{'^' if kind == '<super>' else '_'}{{{''.join(wide)}}}")
        else:
            pieces += these if these == ["º"] else wide
    return "".join(pieces)


def for_math_verify(text: str) -> str:
    r"""Return a plain text without unit as math-verify reads it: \sqrt{x} for √x, \sin for sin, 1200 for 1 200."""
    if OPEN_MATRIX in text:
        text = text.replace(OPEN_MATRIX, r"\begin{pmatrix}").replace(CLOSE_MATRIX, r"\end{pmatrix}")
    text = OF_DIGITS.sub(r"\1{\2}{\3}", text.replace("**", "^").replace(ROW_END, r" \\ "))
    if "," not in text or "(" not in text:  # (1,200) is a point
        text = THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), text)
    text = DIGIT_RAISED.sub(r"\1{\2}", text)
    text = FUNCTION.sub(r"\\\g<0>", MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = IMAGINARY.sub("{i}", text).replace("°", r"^{\circ}").replace("%", r"\%")
    pieces = ROOT.split(text, maxsplit=MOST_ROOTS)
    result = pieces[0]
    for inside, rest in zip(pieces[1::2], pieces[2::2], strict=True):
        end = 0 if inside else closes(rest)
        result += rf"\sqrt{{{inside or rest[1:end]}}}" + (rest if inside else rest[end + 1 :]) if end >= 0 else rest
    return result


def closes(text: str) -> int:
    """Return where the bracket that opens a text is closed; -1 where it is not."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in f"([{{{OPEN_MATRIX}") - (character in f")]}}{CLOSE_MATRIX}")
        if depth == 0:
            return at
    return -1
