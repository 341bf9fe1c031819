"""Are the figures right that every result rests on?  Against slow references, TRL's code and published numbers."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards.other_rewards import get_repetition_penalty_reward

from envs import math_judge
from posttrain import metrics
from posttrain.metrics import (
    MathJudge,
    at_equal_length,
    bootstrap_mean,
    distinct_n,
    last_boxed,
    longest_repeat,
    paired_bootstrap,
    paired_difference,
    repetition,
    seq_rep_n,
    wilson,
)
from posttrain.types import UserError

texts = st.lists(st.integers(0, 4), max_size=40)


@given(texts, st.integers(1, 5))
def test_seq_rep_agrees_with_trl(ids: list[int], n: int) -> None:
    oracle = get_repetition_penalty_reward(ngram_size=n, max_penalty=-1.0)
    assert seq_rep_n(ids, n) == pytest.approx(-oracle([ids])[0])


def test_seq_rep_by_hand() -> None:
    assert seq_rep_n([1, 2, 3, 4, 5], 4) == 0.0
    assert seq_rep_n([7] * 8, 4) == pytest.approx(1 - 1 / 5)
    assert seq_rep_n([1, 2, 1, 2, 1, 2], 4) == pytest.approx(1 - 2 / 3)
    assert seq_rep_n([1, 2, 3], 4) == 0.0


@given(st.lists(texts, max_size=5), st.integers(1, 3))
def test_distinct_by_counting(many: list[list[int]], n: int) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for ids in many:
        for start in range(len(ids)):
            if start + n <= len(ids):
                counts[tuple(ids[start : start + n])] += 1
    tokens = sum(len(ids) for ids in many)
    assert distinct_n(many, n) == (len(counts) / tokens if tokens else 0.0)


@given(texts)
def test_longest_repeat_by_trying_all_pairs(ids: list[int]) -> None:
    best = 0
    for a in range(len(ids)):
        for b in range(a + 1, len(ids)):
            length = 0
            while b + length < len(ids) and ids[a + length] == ids[b + length]:
                length += 1
            best = max(best, length)
    assert longest_repeat(ids) == best


def test_equal_length_removes_the_gain_of_silence() -> None:
    loop = [1, 2, 3, 4] * 10
    chatty, silent = at_equal_length([loop, [1, 2]], [loop[:8], [5, 6, 7]])
    assert [len(ids) for ids in chatty] == [len(ids) for ids in silent] == [8, 2]
    assert seq_rep_n(loop) > seq_rep_n(loop[:8])
    assert seq_rep_n(chatty[0]) == seq_rep_n(silent[0])
    assert [len(ids) for ids in at_equal_length([loop], [loop], limit=5)[0]] == [5]


def test_repetition_summary() -> None:
    figures = repetition([[1, 2] * 40, [1, 2, 3]], [False, True], first=6)
    assert figures["never_stops"] == 0.5
    assert figures["tokens"] == 41.5
    assert figures["seq_rep_4"] == pytest.approx((1 - 2 / 77) / 2)
    assert figures["seq_rep_4_first"] == pytest.approx((1 - 2 / 3) / 2)
    assert figures["longest_repeat"] == 78 / 2
    assert figures["distinct_1"] == 3 / 83


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score without continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_bootstrap_is_seeded_and_covers() -> None:
    rng = np.random.default_rng(3)
    sample = rng.normal(0.4, 1.0, size=400).tolist()
    interval = bootstrap_mean(sample, seed=1)
    assert interval == bootstrap_mean(sample, seed=1) != bootstrap_mean(sample, seed=2)
    error = 1.96 * float(np.std(sample)) / 20
    assert interval.low == pytest.approx(np.mean(sample) - error, abs=0.02)
    assert interval.high == pytest.approx(np.mean(sample) + error, abs=0.02)


def test_bootstrap_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        interval = bootstrap_mean(rng.binomial(1, 0.3, size=150).tolist(), seed=trial, rounds=500)
        held += interval.low <= 0.3 <= interval.high
    assert 180 <= held <= 199


def test_pairing_sharpens_a_difference() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(0, 1, size=200)
    after = before + 0.1 + rng.normal(0, 0.05, size=200)
    interval = paired_bootstrap(before.tolist(), after.tolist(), seed=0)
    assert 0.08 < interval.low < interval.value < interval.high < 0.12
    with pytest.raises(AssertionError):
        paired_bootstrap([1.0], [1.0, 2.0], seed=0)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{3} or rather \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {\text{a}}", r"\text{a}"),
        (r"\boxed{3} and \boxed{4", "3"),
        ("no box", None),
        (r"\boxed{" + "9" * 2000 + "}", None),
        (r"\boxed{}", ""),
        (r"\boxed{3} \boxed{\boxed{4}}", "4"),
        (r"\boxed{3} \boxed{\boxed{4} 5", "4"),
        (r"}} \boxed{3} }} {{", "3"),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def slow_last_boxed(text: str) -> str | None:
    """The definition, tried from every box on its own."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for end in range(match.end(), min(len(text), match.end() + math_judge.LONGEST_ANSWER + 1)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end].strip()
    return None


@given(st.lists(st.sampled_from([r"\boxed{", r"\boxed {", "{", "}", " ", "7", "9" * 400]), max_size=30))
def test_last_boxed_by_its_definition(pieces: list[str]) -> None:
    assert last_boxed("".join(pieces)) == slow_last_boxed("".join(pieces))


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed{{", r"\boxed{}", r"\boxed   ", "{", "}"])
def test_last_boxed_reads_each_character_once(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the pieces that the scan looks at are at most the braces of the text."""
    looked = []

    class Counted:
        @staticmethod
        def finditer(text: str) -> Iterator[re.Match[str]]:
            for match in pattern.finditer(text):
                looked.append(match)
                yield match

    pattern = math_judge.BOX_OR_BRACE
    monkeypatch.setattr(math_judge, "BOX_OR_BRACE", Counted)
    last_boxed(piece * 100_000)
    assert len(looked) <= 2 * 100_000


def test_a_paired_difference_has_the_error_of_its_pairs() -> None:
    """Against the spread of the same difference over many draws of levels; independent samples would be less sure."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        before, after = {}, {}
        for name, size, up, down in (("lake", 64, 0.2, 0.1), ("boxes", 32, 0.1, 0.1)):
            fate = rng.random(size)
            old = fate < 0.5
            change = rng.random(size)
            before[name], after[name] = old, np.where(old, change > 2 * down, change < 2 * up)
        found.append(paired_difference(before, after))
    differences, errors = np.array(found).T
    assert differences.mean() == pytest.approx((0.1 + 0.0) / 2, abs=0.005)
    assert errors.mean() == pytest.approx(differences.std(), rel=0.05)
    same = {"a": [True, False], "b": [True]}
    assert paired_difference(same, same) == (0.0, 0.0)
    one_more = paired_difference({"a": [0] * 64}, {"a": [1] + [0] * 63})
    assert one_more == pytest.approx((1 / 64, 1 / 64))  # no more than its error: one level is no news


def test_judge_knows_equal_answers() -> None:
    cases = [
        (r"3+4=7. The answer is \boxed{7}.", "7", True),
        (r"\boxed{07}", "7", True),
        (r"\boxed{7.0}", "7", True),
        (r"\boxed{\frac12}", "0.5", True),
        (r"\boxed{1,000}", "1000", True),
        (r"\boxed{x+1}", "1+x", True),
        (r"\boxed{ Evelyn }", "Evelyn", True),
        (r"\boxed{-7}", "7", False),
        (r"\boxed{8}", "7", False),
        (r"the answer is 7", "7", False),
        (r"\boxed{7} no, \boxed{8}", "7", False),
    ]
    with MathJudge() as judge:
        assert judge.correct_many([(text, answer) for text, answer, _ in cases]) == [right for *_, right in cases]
        assert judge.restarts == 0


def test_an_equation_is_right_only_if_it_is_true() -> None:
    right = [("x=7", "7"), ("3+4=7", "7"), ("x=3+4=7", "7"), (r"\frac{14}{2}=7", "7"), ("f(2)=7", "7")]
    right += [("P(X=3)=0.5", "0.5"), ("x^2+y^2=25", "25"), ("y=2x+1", "2x+1"), ("2x+1=y", "y=2x+1"), ("6=7", "6=7")]
    wrong = [("6=7", "7"), ("x=6=7", "7"), ("1=7", "7"), ("6==7", "7"), ("6:=7", "7"), (r"6\implies 7", "7")]
    wrong += [(r"6\Rightarrow 7", "7"), (r"6 \to 7", "7"), ("(6=7)", "7"), ("{6=7}", "7"), ("(6=7", "7")]
    wrong += [(r"\left(6=7\right)", "7"), ("6)=7", "7"), ("x=", "7"), ("x=1, x=7", "7")]
    with MathJudge() as judge:
        for cases, verdict in ((right, True), (wrong, False)):
            for given_answer, answer in cases:
                assert judge.correct(rf"\boxed{{{given_answer}}}", answer) is verdict, given_answer


def test_a_percentage_is_a_number_of_hundredths() -> None:
    right = [(r"7\%", "0.07"), (r"7\%", r"7\%"), ("7", r"7\%"), ("7%", "7 percent"), (r"50\%", r"\frac12")]
    right += [(r"x=7\%", "0.07"), ("700%", "7")]
    wrong = [(r"7\%", "7"), ("7%", "7"), (r"x=7\%", "7"), ("7 percent", "7"), (r"7\text{ percent}", "7")]
    wrong += [(r"7\%", "0.7"), (r"1,000\%", "1000"), (r"8\%", r"7\%"), (r"7\% \text{ a year}", "7")]
    with MathJudge() as judge:
        for cases, verdict in ((right, True), (wrong, False)):
            for given_answer, answer in cases:
                assert judge.correct(rf"\boxed{{{given_answer}}}", answer) is verdict, given_answer


def test_sides_of_an_equation() -> None:
    assert math_judge.equation("x=3+4=7") == ["x", "3+4", "7"]
    assert math_judge.equation("(6=7)") == ["6", "7"]
    assert math_judge.equation(r"a \le b \neq c") == [r"a \le b \neq c"]
    assert math_judge.equation(r"\top=1 \leq 2 >= 3") == [r"\top", r"1 \leq 2 >= 3"]


def test_judge_survives_what_hangs_and_says_so(capsys) -> None:
    with MathJudge() as judge:
        assert judge.correct(r"\boxed{0.50}", "1/2")  # starts the worker, whose imports are not what is timed here
        assert judge._worker is not None
        first = judge._worker.pid
        began = time.monotonic()
        assert not judge.correct(r"\boxed{9^{9^{9^9}}}", "7")
        assert time.monotonic() - began < 3
        assert judge.restarts == 1
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert judge.correct_many([(r"\boxed{0.50}", "1/2"), (r"\boxed{2/4}", "0.5")]) == [True, True]
        assert judge.restarts == 1
    assert "no verdict on 1 answer within 2 s" in capsys.readouterr().err


def test_judge_starts_again_after_its_worker_died() -> None:
    with MathJudge() as judge:
        assert judge.correct(r"\boxed{1/2}", "0.5")
        assert judge._worker is not None
        judge._worker.kill()
        judge._worker.wait()
        assert judge.correct(r"\boxed{1/2}", "0.5")


def test_a_judge_that_cannot_start_is_something_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for judge, error in ((MathJudge(), UserError), (math_judge.MathJudge(), math_judge.NoJudge)):
        with pytest.raises(error, match=r"does not start.*pip install"):
            judge.correct(r"\boxed{1/2}", "0.5")


def test_judge_runs_no_code_and_imports_no_torch(tmp_path) -> None:
    marker = tmp_path / "ran"
    with MathJudge() as judge:
        assert not judge.correct(rf"\boxed{{__import__('pathlib').Path('{marker}').touch()}}", "7")
        assert not marker.exists()
    code = "import sys, runpy; sys.stdin.close(); sys.stdin = open('/dev/null'); "
    code += f"runpy.run_path({math_judge.__file__!r}, run_name='__main__'); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ready\n"


@pytest.mark.parametrize("size, won", [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_success(size: int, won: int) -> None:
    for k in range(1, size + 1):
        chosen = list(itertools.combinations([True] * won + [False] * (size - won), k))
        assert metrics.pass_at(k, size, won) == pytest.approx(sum(map(any, chosen)) / len(chosen))
