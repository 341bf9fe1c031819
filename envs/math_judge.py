"""Is an answer right?  math-verify in a process of its own, because its parser can hang on what a model may write."""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Self

JUDGE_SECONDS = 2.0  # an honest answer takes a millisecond
JUDGE_START_SECONDS = 60.0  # the worker's own imports, on a busy machine
JUDGE_MEMORY = 4 << 30  # bytes of address space
LONGEST_ANSWER = 1000  # characters; nothing longer is an answer
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
BOX_OR_BRACE = re.compile(r"(?P<box>\\boxed\s*\{)|[{}]")
MULTIPLES = frozenset(  # words that make another number of the one before them, so they are no units
    """hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens gross kilo
    half halves halved third thirds fourth fourths fifth fifths quarter quarters tenth tenths hundredth hundredths
    squared cubed doubled times twice factorial""".split()
)
PERCENT = re.compile(r"%|per\s?cent", re.IGNORECASE)
PERCENT_AT_END = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*per\s?cent\s*\}|per\s?cent)\s*$", re.IGNORECASE)
# what a chain of equations is cut at, and the brackets inside which it is not
EQUALS = re.compile(
    r"(?P<open>[({\[])|(?P<close>[)}\]])|(?<![<>!\\])[:=]?="
    r"|\\(?:to|(?:[Ll]ong)?[Rr]ightarrow|implies|iff|equiv)(?![a-z])"
)
INDEX = re.compile(r"_ ?(?:\w|\{[^{}]*\})|(?<=[A-Za-z'}]) ?\([^()]*\)")  # of x_1, and the argument of f(2)
POWER = re.compile(r"\^ ?(?:\w|\{[^{}]*\})")
NAME = re.compile(r"[A-Za-z\\|][A-Za-z\\ '|(){}]*")
NO_NAME = re.compile(r"\\(?:pi|frac|sqrt|infty)(?![a-z])|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
LONE_NAME = re.compile(r"(?:\\?[A-Za-z]|\\[A-Za-z]+|[A-Za-z]{4,})'?")
COMMAND = re.compile(r"\\[a-zA-Z]+")
BLANK = re.compile(r"(?:\\[,;:! ]|~|\\q?quad(?![a-zA-Z])|\s)+")
OF_DIGITS = re.compile(r"(\\(?:[dt]?frac|binom)) ?([0-9]) ?([0-9])(?![0-9])")  # \frac 1 2 is \frac{1}{2}
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
LAST_LETTERS = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]|[cdot]s|ab|bc|mp|rs|st|th)$")
MIXED = re.compile(r"(?<![0-9.,/])([0-9]+) ([0-9]+) ?/ ?([0-9]+)(?![0-9.,])")


class NoJudge(RuntimeError):
    """math-verify cannot be started."""


def last_boxed(text: str) -> str | None:
    r"""What the last complete \boxed{...} of a text holds, braces balanced; None without one.

    One pass over the braces, so that the time is linear in the length of any text.
    """
    open_braces: list[int | None] = []  # where the content of a box starts; None for any other brace
    last: tuple[int, int] | None = None
    for match in BOX_OR_BRACE.finditer(text):
        if match[0] != "}":
            open_braces.append(match.end() if match["box"] else None)
            continue
        start = open_braces.pop() if open_braces else None
        if start is not None and match.start() - start <= LONGEST_ANSWER and (last is None or start > last[0]):
            last = start, match.start()
    return None if last is None else text[last[0] : last[1]].strip()


class MathJudge:
    r"""Says whether the last \boxed{} of a text equals an answer; what does not come to a verdict in 2 s is wrong.

        with MathJudge() as judge:
            judge.correct(r"3+4=7. The answer is \boxed{7.0}.", "7")                 # True
            judge.correct_many([(r"\boxed{\frac12}", "0.5"), ("no box", "3")])       # [True, False]
            judge.correct_many([(r"\boxed{x=7}", "7"), (r"\boxed{6=7}", "7")])       # [True, False]
    The worker is a fresh Python that imports math-verify alone: no torch, no copy of this process's memory. It is
    killed when it takes too long and started again for the next answer. `restarts` counts how often.
    """

    def __init__(self, seconds: float = JUDGE_SECONDS) -> None:
        self.seconds = seconds
        self.restarts = 0
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.restarts:
            silent = f"{self.restarts} answer{'s' if self.restarts > 1 else ''}"
            print(
                f"math-verify came to no verdict on {silent} within {self.seconds:g} s: counted as wrong",
                file=sys.stderr,
            )

    def correct(self, text: str, answer: str) -> bool:
        """Whether the text's last box holds this answer."""
        given = last_boxed(text)
        return given is not None and self.equal(given, answer)

    def equal(self, given: str, answer: str) -> bool:
        """Whether an expression equals the answer."""
        if same_text(given, answer):
            return True  # also where math-verify could read neither, such as a name
        if WHOLE_NUMBER.fullmatch(given) and WHOLE_NUMBER.fullmatch(answer):
            return int(given) == int(answer)  # most answers are: no need to ask
        if not _same_unit(given, answer):
            return False
        return self._ask(given, answer)

    def correct_many(self, pairs: Iterable[tuple[str, str]]) -> list[bool]:
        """`correct` for each (text, answer); one that hangs costs its 2 s and no other its verdict."""
        return [self.correct(text, answer) for text, answer in pairs]

    def start(self) -> None:
        """Start the worker; the first question that needs it does so."""
        # -P keeps this file's folder off the path, where a file could stand in for a module of the standard library
        command, pipe = [sys.executable, "-P", __file__], subprocess.PIPE
        self._worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        if self._line(JUDGE_START_SECONDS) != "ready":
            self.close()
            raise NoJudge(
                "math-verify, which judges answers, does not start. `python -c 'import math_verify'` says why; "
                "`pip install -r requirements.txt` installs it."
            )

    def close(self) -> None:
        """End the worker; the next question would start another."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _ask(self, given: str, answer: str) -> bool:
        if self._worker is not None and self._worker.poll() is not None:
            self.close()
        if self._worker is None:
            self.start()
        assert self._worker is not None and self._worker.stdin is not None
        self._worker.stdin.write(json.dumps([answer, given]).encode() + b"\n")
        self._worker.stdin.flush()
        verdict = self._line(self.seconds)
        if verdict is None:
            self.restarts += 1
            self.close()
        return verdict == "true"

    def _line(self, seconds: float) -> str | None:
        """The worker's next line; None when it said nothing in time or died."""
        assert self._worker is not None and self._worker.stdout is not None
        ready, _, _ = select.select([self._worker.stdout], [], [], seconds)
        line = self._worker.stdout.readline() if ready else b""
        return line.decode().strip() or None


def _serve() -> None:
    """The worker: a line of JSON [answer, given] in, "true" or "false" out, until the pipe closes."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (JUDGE_MEMORY, JUDGE_MEMORY))
    from math_verify import parse, verify

    def same(answer: str, given: str) -> bool:
        gold, found = (parse(rf"\boxed{{{variable_last(text)}}}", parsing_timeout=0) for text in (answer, given))
        return verify(gold, found, timeout_seconds=None)

    print("ready", flush=True)
    for line in sys.stdin:
        answer, given = json.loads(line)
        print("true" if equals(answer, given, same) else "false", flush=True)


def same_text(one: str, other: str) -> bool:
    """Whether two texts are the same but for blanks; between digits a blank counts: 1 1/2 is not 11/2."""
    one, other = (re.sub(r"(?<![0-9.,]) | (?![0-9.,])", "", " ".join(text.split())) for text in (one, other))
    return one == other


def _same_unit(given: str, answer: str) -> bool:
    """Whether a text has no other unit than the answer, and no other word for a multiple: math-verify drops both."""
    from envs.math_spelling import plain  # not above: the worker has no path to this project
    from envs.math_units import agree, unit_in

    given, answer = plain(given), plain(answer)
    multiples, theirs = (MULTIPLES.intersection(re.findall("[a-z]+", text.casefold())) for text in (given, answer))
    return multiples == theirs and agree(unit_in(given), unit_in(answer))


def equals(answer: str, given: str, same: Callable[[str, str], bool]) -> bool:
    r"""`same` (math-verify) where it alone is too generous: it takes 6=7 for 7, 1 2 for 3, and 7\% for 7 and for .07.

    Every side of an equation that is no name must be the answer: x=7 and 3+4=7 are 7, 6=7 and 2x=7 are not. A
    percentage is so many hundredths, unless the answer is a percentage as well.
    """
    answer, given = _without_blanks(answer), _without_blanks(given)
    if re.search("[0-9] [0-9]", given):
        return False
    if len(equation(answer)) == 1:
        sides = [given] if "," in given or ";" in given else equation(given)
        if len(sides) > 1 and not (
            all(names(side, answer) or same(answer, side) for side in sides[:-1]) and same(answer, sides[-1])
        ):
            return False
        if PERCENT.search(sides[-1]) and not PERCENT.search(answer):
            number = PERCENT_AT_END.sub("", sides[-1])
            return not PERCENT.search(number) and same(answer, rf"\frac{{{number}}}{{100}}")
    return same(answer, given)


def _without_blanks(text: str) -> str:
    r"""One blank for each kind of blank, none in 1\,200, and 3 1/2 as 3\frac{1}{2}."""
    text = OF_DIGITS.sub(r"\1{\2}{\3}", BLANK.sub(" ", text).strip())
    return MIXED.sub(r"\1\\frac{\2}{\3}", THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text))


def variable_last(text: str) -> str:
    r"""2t as 2{t}: math-verify takes letters at the end for a unit and leaves them out. It may, of a 5 m alone."""
    match = LAST_LETTERS.search(text)
    if match is None:
        return text
    before, letters = text[: match.start()], match[0]
    apart = before.endswith(" ") and not any(map(str.isalpha, before))
    return text if letters in ("m", "g", "h", "l", "s") and apart else f"{before}{{{letters}}}"


def names(side: str, answer: str = "") -> bool:
    r"""Whether a side of an equation names what is asked for: x, f(2), a+b; not 2x, -x, x^2, 13 or x.

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
    """The sides of an equation or of a chain of them: equation("x=3+4=7") -> ["x", "3+4", "7"].

    An equals sign inside brackets counts only where there is none outside them: equation("(6=7)") -> ["6", "7"].
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


if __name__ == "__main__":
    _serve()
