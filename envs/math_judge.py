"""Is an answer right?  math-verify in a process of its own, because its parser can hang on what a model may write."""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import subprocess
import sys
import time
from functools import cache
from threading import Lock
from typing import Self

from envs import math_answers, math_worker
from envs.web import NoAnswer

JUDGE_SECONDS = 2.0  # of math-verify for one answer; an honest one takes a millisecond
JUDGE_START_SECONDS = 60.0  # the worker's own imports, on a busy machine
LONGEST_ANSWER = 1000  # characters; nothing longer is an answer
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
BOX_OR_BRACE = re.compile(r"(?P<box>\\boxed\s*\{)|[{}]")
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
_LOCK = Lock()  # environments may be stepped in threads


class NoJudge(NoAnswer):
    """math-verify cannot be started."""


def last_boxed(text: str) -> str | None:
    r"""Return what the last complete \boxed{...} of a text holds, braces balanced; None without one.

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


def last_number(text: str) -> str | None:
    """Return the last number of a text, boxed or not, without commas: last_number("It is -$1,200.") -> "-1200".

    What lm-evaluation-harness calls the flexible extraction of GSM8K. A minus belongs to a number unless it stands
    directly behind a word or behind a number or a bracket, as in COVID-19 and 5 - 3, or before a blank.
    """
    text = text.translate(WIDE)
    matches = list(NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    number = re.sub(SEPARATOR, "", last["number"]) + (last["power"] or "")
    number = f"0{number}" if number.startswith(".") else number
    signs = last["before"] + last["after"]
    is_operand = TAKEN_FROM.search(text[max(0, last.start() - LOOK_BACK) : last.start()]) is not None
    return f"-{number}" if signs.endswith("-") and (len(signs) == 2 or not is_operand) else number


class MathJudge:
    r"""Says whether the last \boxed{} of a text equals an answer; what does not come to a verdict in 2 s is wrong.

        with MathJudge() as judge:
            judge.correct(r"3+4=7. The answer is \boxed{7.0}.", "7")                 # True
            judge.correct(r"\boxed{6=7}", "7")                                       # False
    The worker is a fresh Python that imports math-verify alone: no torch, no copy of this process's memory. It is
    killed when it takes too long and started again for the next answer. `restarts` counts how often.
    """

    def __init__(self, seconds: float = JUDGE_SECONDS) -> None:
        self.seconds = seconds
        self.restarts = 0
        self._left = seconds  # of the answer that is judged
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
        """Return whether the text's last box holds this answer."""
        response = last_boxed(text)
        return response is not None and self.equal(response, answer)

    def equal(self, response: str, answer: str) -> bool:
        """Return whether an expression equals the answer."""
        if WHOLE_NUMBER.fullmatch(response) and WHOLE_NUMBER.fullmatch(answer):
            return int(response) == int(answer)  # most answers are: no need to look closer
        self._left = self.seconds
        return math_answers.equal(response, answer, self._ask)

    def start(self) -> None:
        """Start the worker; the first question that needs it does so."""
        # -P keeps this file's folder off the path, where a file could stand in for a module of the standard library
        command, pipe = [sys.executable, "-P", math_worker.__file__], subprocess.PIPE
        self._worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        if self._line(JUDGE_START_SECONDS) != "ready":
            self.close()
            raise NoJudge(
                "math-verify, which judges answers, does not start. `python -c 'import math_verify'` says why; "
                "`pip install .` in this project's folder installs it."
            )

    def close(self) -> None:
        """End the worker; the next question would start another."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _ask(self, response: str, answer: str) -> bool:
        """Return whether math-verify accepts a formula, within the time that is left for the answer."""
        if self._left <= 0:
            return False
        if self._worker is not None and self._worker.poll() is not None:
            self.close()
        if self._worker is None:
            self.start()
        assert self._worker is not None and self._worker.stdin is not None
        began = time.monotonic()
        self._worker.stdin.write(json.dumps([response, answer]).encode() + b"\n")
        self._worker.stdin.flush()
        verdict = self._line(self._left)
        self._left -= time.monotonic() - began
        if verdict is None:
            self._left = 0.0
            self.restarts += 1
            self.close()
        return verdict == "true"

    def _line(self, seconds: float) -> str | None:
        """Return the worker's next line; None when it was too late or died."""
        assert self._worker is not None and self._worker.stdout is not None
        ready, _, _ = select.select([self._worker.stdout], [], [], seconds)
        line = self._worker.stdout.readline() if ready else b""
        return line.decode().strip() or None


def equal(response: str, answer: str) -> bool:
    """Return whether an expression equals the answer, by a judge that this process keeps."""
    with _LOCK:
        return _judge(os.getpid()).equal(response, answer)


@cache
def _judge(process: int) -> MathJudge:
    """Return the judge of this process: a fork would share the pipe of its parent's worker."""
    judge = MathJudge()
    atexit.register(judge.close)
    return judge
