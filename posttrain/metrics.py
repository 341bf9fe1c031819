"""How often does a text repeat itself, is an answer right, and how sure may one be of either?

Repetition is counted on token ids without the stop token. Every figure comes with an interval at 95 %. Answers are
judged by math-verify in a process of its own, because its parser can hang on what a model may write.
"""

from __future__ import annotations

import json
import math
import re
import select
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING or __name__ != "__main__":  # the worker below runs this file alone, without the package
    from posttrain.types import UserError

Z_95 = NormalDist().inv_cdf(0.975)
JUDGE_SECONDS = 2.0  # an honest answer takes a millisecond
JUDGE_START_SECONDS = 60.0  # the worker's own imports, on a busy machine
JUDGE_MEMORY = 4 << 30  # bytes of address space
LONGEST_ANSWER = 1000  # characters; nothing longer is an answer
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
BOX_OR_BRACE = re.compile(r"(?P<box>\\boxed\s*\{)|[{}]")
PERCENT = re.compile(r"%|per\s?cent", re.IGNORECASE)
PERCENT_AT_END = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*per\s?cent\s*\}|per\s?cent)\s*$", re.IGNORECASE)
# what a chain of equations is cut at, and the brackets inside which it is not
EQUALS = re.compile(
    r"(?P<open>[({\[])|(?P<close>[)}\]])|(?<![<>!\\])[:=]?="
    r"|\\(?:to|(?:[Ll]ong)?[Rr]ightarrow|implies|iff|equiv)(?![a-z])"
)

# --------------------------------------------------------------------------------------------------------- repetition


def _ngrams(ids: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return list(zip(*(ids[i:] for i in range(n)), strict=False))


def seq_rep_n(ids: Sequence[int], n: int = 4) -> float:
    """1 - distinct n-grams / all n-grams (Welleck et al., arXiv 1908.04319, eq. 11); 0 for fewer than n tokens."""
    ngrams = _ngrams(ids, n)
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def distinct_n(texts: Iterable[Sequence[int]], n: int) -> float:
    """Distinct n-grams of all texts together / their tokens (Li et al., arXiv 1510.03055, section 5.4).

    It falls as texts are added, so compare it between equally many of them only; 0 when there is no token at all.
    """
    texts = list(texts)
    tokens = sum(map(len, texts))
    return len({gram for ids in texts for gram in _ngrams(ids, n)}) / tokens if tokens else 0.0


def longest_repeat(ids: Sequence[int]) -> int:
    """Tokens of the longest span that occurs twice, overlaps allowed: abcab has 2 (ab), aaaa has 3 (aaa)."""

    def repeats(length: int) -> bool:
        spans = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
        return len(set(spans)) < len(spans)

    known, impossible = 0, len(ids)  # a span that occurs twice holds shorter ones that do, so halving finds the limit
    while impossible - known > 1:
        middle = (known + impossible) // 2
        known, impossible = (middle, impossible) if repeats(middle) else (known, middle)
    return known


def at_equal_length(
    left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], limit: int | None = None
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Both lists with each pair cut to the shorter of the two (and to `limit` tokens).

    Longer texts repeat more whatever wrote them, so a model could look better by falling silent; after this cut it
    cannot.
    """
    lengths = [min(len(a), len(b), limit or len(a)) for a, b in zip(left, right, strict=True)]
    return (
        [ids[:length] for ids, length in zip(left, lengths, strict=True)],
        [ids[:length] for ids, length in zip(right, lengths, strict=True)],
    )


def repetition(texts: Sequence[Sequence[int]], finished: Sequence[bool], first: int = 60) -> dict[str, float]:
    """All repetition figures of a set of texts (ids without the stop token), each a mean over texts but distinct-n.

    {"seq_rep_4": 0.11, "seq_rep_4_first": 0.04, "distinct_1": 0.2, "distinct_2": 0.5, "longest_repeat": 6.1,
     "never_stops": 0.02, "tokens": 74.3}    `..._first` looks at the first 60 tokens alone.
    """
    assert len(texts) == len(finished) > 0
    return {
        "seq_rep_4": fmean(map(seq_rep_n, texts)),
        "seq_rep_4_first": fmean(seq_rep_n(ids[:first]) for ids in texts),
        "distinct_1": distinct_n(texts, 1),
        "distinct_2": distinct_n(texts, 2),
        "longest_repeat": fmean(map(longest_repeat, texts)),
        "never_stops": 1 - fmean(map(float, finished)),
        "tokens": fmean(map(len, texts)),
    }


# ---------------------------------------------------------------------------------------------------------- intervals


class Interval(NamedTuple):
    """A figure and where it lies at 95 %: Interval(value=0.62, low=0.55, high=0.68)."""

    value: float
    low: float
    high: float


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's score interval at 95 % for a share (1927): honest at 0 % and 100 %, where p +- 2 SE is not."""
    assert 0 <= successes <= n and n > 0
    share, z2 = successes / n, Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # at the ends the exact bound is the share itself; rounding would leave it beside
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def pass_at(k: int, size: int, won: int) -> float:
    """Chance that k of a group's `size` samples, `won` of which succeeded, hold a success.

    1 - C(size - won, k) / C(size, k), the unbiased estimate of pass@k, arXiv 2107.03374, eq. 1.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(4, 4, 1)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(size - won, k) / math.comb(size, k)


def bootstrap_mean(values: Sequence[float], seed: int, rounds: int = 4000) -> Interval:
    """The mean and its percentile bootstrap interval at 95 %: `rounds` resamples, the same for the same seed."""
    sample, rng = np.asarray(values, dtype=float), np.random.default_rng(seed)
    assert sample.ndim == 1 and len(sample) > 0
    means = [sample[rng.integers(len(sample), size=(100, len(sample)))].mean(1) for _ in range(max(1, rounds // 100))]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(sample.mean()), float(low), float(high))


def paired_bootstrap(before: Sequence[float], after: Sequence[float], seed: int, rounds: int = 4000) -> Interval:
    """mean(after) - mean(before), and its interval when the same item i was given to both (items are resampled)."""
    assert len(before) == len(after)
    return bootstrap_mean(np.subtract(after, before, dtype=float).tolist(), seed, rounds)


def paired_difference(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> tuple[float, float]:
    """Mean over the sets of the mean of after - before, item by item, and its standard error.

    before, after: values by set, of the same items in the same order; sets count alike, whatever their size. Of shares,
    only items that came out otherwise make an error (McNemar's test without its approximation). A set of one item has
    no error that could be known, and 0 is taken.

    >>> paired_difference({"a": [0, 0, 1, 1]}, {"a": [1, 1, 1, 1]})
    (0.5, 0.28867513459481287)
    """
    assert before.keys() == after.keys()
    mean, square = 0.0, 0.0
    for name, old in before.items():
        assert len(old) == len(after[name]) > 0
        changes = np.subtract(after[name], old, dtype=float)
        mean += float(changes.mean()) / len(before)
        square += float(changes.var(ddof=1)) / len(changes) / len(before) ** 2 if len(changes) > 1 else 0.0
    return mean, math.sqrt(square)


# ------------------------------------------------------------------------------------------------------------ answers


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

    def __enter__(self) -> MathJudge:
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
        if given is None:
            return False
        if "".join(given.split()) == "".join(answer.split()):
            return True  # also where math-verify could read neither, such as a name
        if WHOLE_NUMBER.fullmatch(given) and WHOLE_NUMBER.fullmatch(answer):
            return int(given) == int(answer)  # most answers are: no need to ask
        return self._ask(given, answer)

    def correct_many(self, pairs: Iterable[tuple[str, str]]) -> list[bool]:
        """`correct` for each (text, answer); one that hangs costs its 2 s and no other its verdict."""
        return [self.correct(text, answer) for text, answer in pairs]

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
            # -P keeps this file's folder off the path, where types.py would stand in for the standard library's
            command, pipe = [sys.executable, "-P", __file__], subprocess.PIPE
            self._worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            if self._line(JUDGE_START_SECONDS) != "ready":
                self.close()
                raise UserError(
                    "math-verify, which judges answers, does not start. `python -c 'import math_verify'` says why; "
                    "`pip install -r requirements.txt` installs it."
                )
        assert self._worker.stdin is not None
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
        gold, found = (parse(rf"\boxed{{{text}}}", parsing_timeout=0) for text in (answer, given))
        return verify(gold, found, timeout_seconds=None)

    print("ready", flush=True)
    for line in sys.stdin:
        answer, given = json.loads(line)
        print("true" if equals(answer, given, same) else "false", flush=True)


def equals(answer: str, given: str, same: Callable[[str, str], bool]) -> bool:
    r"""`same` (math-verify) where it alone is too generous: it takes 6=7 for 7, and 7\% for 7 as well as for .07.

    Every side of an equation that is a number must be the answer: x=7 and 3+4=7 are 7, 6=7 is not. A percentage is so
    many hundredths, unless the answer is a percentage as well.
    """
    if len(equation(answer)) == 1:
        sides = [given] if "," in given or ";" in given else equation(given)
        if len(sides) > 1 and not all(same(answer, side) for side in sides if is_number(side)):
            return False
        if PERCENT.search(sides[-1]) and not PERCENT.search(answer):
            number = PERCENT_AT_END.sub("", sides[-1])
            return not PERCENT.search(number) and same(answer, rf"\frac{{{number}}}{{100}}")
    return same(answer, given)


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
    outermost = [(start, end) for level, start, end in cuts if level == min(cuts)[0]]
    ends, starts = [start for start, _ in outermost] + [len(text)], [0] + [end for _, end in outermost]
    sides = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    if cuts and min(cuts)[0] > 0:
        sides = [re.sub(r"\\(?:left|right)(?![a-z])|[(){}\[\]$]", "", side).strip(" \\") for side in sides]
    return sides


def is_number(text: str) -> bool:
    r"""True for digits and operations, without a letter but those of commands: 3+4, \frac{1}{2}; not f(2)."""
    plain = re.sub(r"\\[a-zA-Z]+", " ", text)
    return any(map(str.isdigit, plain)) and not any(map(str.isalpha, plain))


if __name__ == "__main__":
    _serve()
