"""Is a right answer right, a wrong one wrong, and does the judge survive what a model may write?"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given, strategies as st

from envs import math_answers, math_judge, math_worker
from envs.math_judge import MathJudge, NoJudge, last_boxed
from posttrain.config.loading import run


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    with MathJudge() as opened:
        yield opened
    assert opened.restarts == 0


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
    last_boxed(piece * 20_000)
    assert len(looked) <= 2 * 20_000


def test_judge_knows_equal_answers() -> None:
    cases = [
        (r"3+4=7. The answer is \boxed{7}.", "7", True), (r"\boxed{07}", "7", True), (r"\boxed{7.0}", "7", True),
        (r"\boxed{\frac12}", "0.5", True), (r"\boxed{1,000}", "1000", True), (r"\boxed{x+1}", "1+x", True),
        (r"\boxed{ Evelyn }", "Evelyn", True), (r"\boxed{-7}", "7", False), (r"\boxed{8}", "7", False),
        (r"the answer is 7", "7", False), (r"\boxed{7} no, \boxed{8}", "7", False),
    ]  # fmt: skip
    with MathJudge() as judge:
        assert [judge.correct(text, answer) for text, answer, _ in cases] == [right for *_, right in cases]
        assert judge.restarts == 0


CASES = {  # what is judged -> pairs (given, answer) that are equal, and pairs that are not
    "an equation is right only if it is true": (
        [
            ("x=7", "7"), ("3+4=7", "7"), ("x=3+4=7", "7"), (r"\frac{14}{2}=7", "7"), ("f(2)=7", "7"),
            ("P(X=3)=0.5", "0.5"), ("x^2+y^2=25", "25"), ("y=2x+1", "2x+1"), ("2x+1=y", "y=2x+1"), ("6=7", "6=7"),
        ],
        [
            ("6=7", "7"), ("x=6=7", "7"), ("1=7", "7"), ("6==7", "7"), ("6:=7", "7"), (r"6\implies 7", "7"),
            (r"6\Rightarrow 7", "7"), (r"6 \to 7", "7"), ("(6=7)", "7"), ("{6=7}", "7"), ("(6=7", "7"),
            (r"\left(6=7\right)", "7"), ("6)=7", "7"), ("x=", "7"), ("x=1, x=7", "7"),
        ],
    ),
    "a percentage is a number of hundredths": (
        [
            (r"7\%", "0.07"), (r"7\%", r"7\%"), ("7", r"7\%"), ("7%", "7 percent"), (r"50\%", r"\frac12"),
            (r"x=7\%", "0.07"), ("700%", "7"),
        ],
        [
            (r"7\%", "7"), ("7%", "7"), (r"x=7\%", "7"), ("7 percent", "7"), (r"7\text{ percent}", "7"),
            (r"7\%", "0.7"), (r"1,000\%", "1000"), (r"8\%", r"7\%"), (r"7\% \text{ a year}", "7"),
        ],
    ),
    "blanks between digits count": (
        [
            ("1 200", "1200"), (r"1\,200", "1200"), ("2 1/3", "7/3"), (r"2\ 1/3", r"\frac73"), ("1 / 2", "0.5"),
            (r"2 \frac{1}{3}", "7/3"), (r"\frac 1 2", "1/2"), ("1 2", "1 2"), ("x + 1", "x+1"), ("(1, 2)", "(1,2)"),
            ("(1, 200)", "(1,200)"), ("two words", "twowords"), ("1 200", r"1\,200"),
        ],
        [
            ("1 1/2", "11/2"), ("2 1/3", "21/3"), ("1 2", "12"), ("1 2", "3"), (r"1\ 2", "3"), ("1~2", "12"),
            ("1 1/2", "1"), ("1 200", "201"), (r"1\quad 2", "3"), ("1, 200", "1200"), ("12 00", "1200"),
            ("1200", "(1,200)"), ("1 .5", "1.5"), ("1,200", "1, 200"),
        ],
    ),
    "before an equals sign is a name or the answer": (
        [
            ("x=12", "12"), ("a+b=12", "12"), ("f(2)=12", "12"), (r"\angle ABC = 12", "12"), ("AB=12", "12"),
            ("y=x+1", "x+1"), ("f(x)=x+1", "x+1"), ("y=1+x=x+1", "x+1"), (r"\text{Area}=12", "12"), ("x_1=12", "12"),
        ],
        [
            ("2x=12", "12"), ("-x = 12", "12"), ("x^2=12", "12"), (r"\sqrt{x}=12", "12"), (r"\frac{x}{2}=12", "12"),
            ("x = 13 or x = 12", "12"), ("x=13, y = 12", "12"), ("6, because 2+3=5", "5"), ("13=x=12", "12"),
            ("x+1=x+2", "x+2"), ("y=x+2=x+1", "x+1"), ("x+2=y", "x+2"), ("x=x+2", "x+2"), ("ab=x+2", "x+2"),
        ],
    ),
    "units are the same and multiples are no units": (
        [
            ("12 km", "12"), (r"12\text{ km}", "12 km"), ("12", "12 cm"), ("12 apples", "12 apples"), ("$5", r"\$5"),
            (r"\$5", "5"), (r"2\text{ million}", r"2\text{ million}"), ("2ab", "2ab"), ("2a b", "2ab"), ("t*2", "2t"),
            ("2 + t", "t+2"), (r"\pi h", r"h\pi"), (r"\frac{1}{2}t", "t/2"), ("x t", "tx"), (r"2\cdot t", "2t"),
            (r"\log_2 t", r"\log_{2}(t)"),
        ],
        [
            ("12 km", "12 cm"), (r"12\text{ km}", r"12\text{ cm}"), (r"\$5", r"5\text{ cents}"), ("€5", r"\$5"),
            (r"12\text{ thousand}", "12"), ("12 dozen", "12"), (r"3\text{ quarters}", "3"), ("2", "2ab"),
            ("2ab", "2"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_a_boxed_answer_is_judged(cases: tuple[list[tuple[str, str]], list[tuple[str, str]]], judge: MathJudge) -> None:
    for pairs, verdict in zip(cases, (True, False), strict=True):
        assert [pair for pair in pairs if judge.correct(rf"\boxed{{{pair[0]}}}", pair[1]) is not verdict] == []


def test_sides_of_an_equation() -> None:
    assert math_answers.equation("x=3+4=7") == ["x", "3+4", "7"]
    assert math_answers.equation("(6=7)") == ["6", "7"]
    assert math_answers.equation(r"a \le b \neq c") == [r"a \le b \neq c"]
    assert math_answers.equation(r"\top=1 \leq 2 >= 3") == [r"\top", r"1 \leq 2 >= 3"]


def newest_worker() -> psutil.Process:
    judges = [each for each in psutil.Process().children() if math_worker.__file__ in each.cmdline()]
    return max(judges, key=psutil.Process.create_time)


@pytest.mark.thorough
def test_judge_survives_what_hangs_and_says_so(capsys) -> None:
    with MathJudge() as judge:
        assert judge.correct(r"\boxed{\sqrt{4}}", "2")  # starts the worker, whose imports are not what is timed here
        first = newest_worker()
        began = time.monotonic()
        assert not judge.correct(r"\boxed{9^{9^{9^9}}}", "7")
        assert time.monotonic() - began < 3
        assert judge.restarts == 1
        assert not first.is_running()
        assert judge.correct(r"\boxed{\sqrt{4}}", "2") and judge.correct(r"\boxed{\sqrt{9}}", "3")
        assert judge.restarts == 1
    assert "no verdict on 1 answer within 2 s" in capsys.readouterr().err


def test_judge_starts_again_after_its_worker_died() -> None:
    with MathJudge() as judge:
        assert judge.correct(r"\boxed{\sqrt{4}}", "2")
        worker = newest_worker()
        worker.kill()
        worker.wait()
        assert judge.correct(r"\boxed{\sqrt{4}}", "2")


def test_a_judge_that_cannot_start_is_something_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NoJudge, match=r"does not start.*pip install"):
        MathJudge().correct(r"\boxed{\sqrt{4}}", "2")


def test_a_command_says_in_words_that_the_judge_cannot_start(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match="2"):
        run(MathJudge().start)
    assert capsys.readouterr().err.startswith("error: math-verify, which judges answers, does not start.")


def test_judge_runs_no_code_and_imports_no_torch(tmp_path) -> None:
    marker = tmp_path / "ran"
    with MathJudge() as judge:
        assert not judge.correct(rf"\boxed{{__import__('pathlib').Path('{marker}').touch()}}", "7")
        assert not marker.exists()
    code = "import sys, runpy; sys.stdin.close(); sys.stdin = open('/dev/null'); "
    code += f"runpy.run_path({math_worker.__file__!r}, run_name='__main__'); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ready\n"
