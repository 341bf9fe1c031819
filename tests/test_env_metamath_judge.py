"""Does the judge of metamath_qa take the reference in every common notation, and nothing that leaves work undone?"""

from __future__ import annotations

import pytest

from envs.metamath_qa import final_form, is_right
from envs.metamath_qa.expression import read, value, worked_out

WRONG = {
    "2562_7": [
        "2562_9", "2562_{10}", "2000+562", "1281_7+1281_7", "947", "2562_{77}", "2562.0", "2562_9=2562_9", "25620_7",
    ],
    "101_2": ["101_3", "5", "5_{10}"],
    "1042_8": ["1042_3", "2526-1484", "546"],
    r"6\sqrt{5}": [r"\sqrt{180}", r"2\sqrt{45}", r"\sqrt{36}\sqrt5", r"\sqrt{5}\cdot 3\cdot 2", r"3\sqrt{20}"],
    r"\frac{\sqrt5}{5}": [r"\frac{5}{\sqrt{125}}", r"\frac{1}{\sqrt5}", r"\frac{5\sqrt5}{25}", r"\frac{2\sqrt5}{10}"],
    "2^{10}": ["4^5", "2^{5+5}", "2^5*2^5", "32^2", "2^{2*5}", "1024.5", "1023"],
    "3^4": ["9^2", "80", "3*3*3*3"],
    r"3+2\sqrt2": [r"\sqrt{17+12\sqrt2}", r"1+2+2\sqrt2", r"(1+\sqrt2)^2", r"3+\sqrt8"],
    r"9\pi": [
        r"3\pi3", r"3 \pi 3", r"\pi\sqrt{81}", r"3^2\pi", r"\frac{18\pi}{2}", r"3(3)\pi", r"9\pi^1", r"1 9\pi", "9",
        r"3\pi\cdot3", r"\frac{9}{1/\pi}",
    ],
    r"6\sqrt2": [r"\sqrt2\sqrt{36}", r"\sqrt{72}"],
    r"12\pi": [r"36\pi/3", r"{1}{12}\pi", "12x", r"12\pi squared", r"12\pi times two", r"12\pi thousand"],
    r"\frac{3\pi}{2}": [r"\frac{6\pi}{4}", r"3\frac12\pi", r"3 1/2 \pi", r"1\frac12\pi"],
    r"\frac{\pi}{2}": [r"1\frac12\pi", r"1 1/2\pi", r"1\frac{\pi}{2}"],
    "5:30": ["1/6", "5/30", r"\frac{1}{6}", "10:60", "30:5", "0.1666666667"],
    "3:4": [r"\frac{9-6}{4}", "6:8", "3/4", "0.75", "4:3", "2+1:4"],
    "x=5": ["2+3", "x=2+3", "x = 4", "10/2"],
    r"x = \frac{1}{2}": ["2/4"],
    r"2.5\text{ million}": ["2.5", "2.5 thousand", "2.4 million"],
    "0.000001": ["0.0000012", "0.0000009", "0", "0.00000104"],
    "10^{-9}": ["0", "0.0", "0.000000"],
    "2xy": ["2"],
    "12h": ["12.5"],
    "(3,4)": [r"(\sqrt9, 2^2)", "(4,3)", "[3,4]", "3,4", "(1+2,4)", "(3,4,5)"],
    "1, 2": ["1,1", "1", "2-1, 2", "1, 2, 2", "1 2"],
    "[0,5]": ["(0,5]", "[1-1,5]"],
    r"(-\infty,3]": [r"(\infty,3]", r"(-\infty,3)"],
    r"\frac{3+\sqrt{5}}{2}": [r"\frac{6+2\sqrt5}{4}", r"\frac{1+2+\sqrt5}{2}", r"\frac{6}{4}+\frac{\sqrt5}{2}"],
    "12 cm": ["10+2", "10+2 cm"],
    r"\mathbf{j}": [r"\mathbf{k}"],
    "3+4i": [r"\sqrt9+4i", r"3+2\cdot2i", "1+2+4i", "7i"],
    r"\text{even}": ["odd", "neve"],
    r"\log_2 3": [r"\log", r"\log_3 2"],
    "12": [
        "12 squared", "12 thousand", "12 dozen", "12 point five", "12 dollars and fifty cents", "12 thirds",
        "12 plus two", "3*5=12", "11=12", r"12\text{ hundred}", "12 and a half", "12 feet plus two", "100_3", "1100_2",
        "12_{10}=13", "12 pi", "12e", "12i", "12%", "USD", "**1**2",
    ],
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": [
        r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", "(1,2)", r"\begin{pmatrix} 1 \\ 1+1 \end{pmatrix}",
    ],
    "-3/4": [r"\frac{-3}{-4}", r"-\frac{3}{-4}", "3/4", r"\frac{6}{-8}"],
    "2e": ["2"],
    r"5\text{ halves}": ["5"],
    "5!": ["5"],
}  # fmt: skip
RIGHT = {
    "2562_7": [
        "2562_7", "2562_{7}", r"2562_{\text{seven}}", "2562 base 7", "2562", "2562 (base 7)", "2562_{seven}",
        "$2562_7$", "1281_7+1281_7=2562_7", r"\text{2562}_7",
    ],
    "1042_8": [r"1042_{\text{eight}}", "1042_8", "1042"],
    r"1042_{\text{eight}}": ["1042_8", "1042"],
    "A3_{12}": ["a3_{12}", "A3"],
    r"6\sqrt{5}": [
        "6√5", "6 sqrt(5)", "6sqrt5", r"6\cdot\sqrt{5}", r"\sqrt5\cdot6", "13.416407865", r"6\sqrt5\text{ cm}",
        "6*sqrt(5)", r"\[6\sqrt5\]", "**6√5**", r"\sqrt{180}=6\sqrt5", "6√(5)",
    ],
    r"\frac{\sqrt5}{5}": [r"\sqrt5/5", r"\frac15\sqrt5", r"\dfrac{\sqrt{5}}{5}", "sqrt(5)/5", "(√5)/5", "0.447214"],
    r"9\pi": [
        "9*pi", "9pi", "9 pi", r"\pi*9", "9π", r"\pi\cdot 9", r"9 \pi \text{ square inches}", "9pi cm^2", r"A=9\pi",
        "28.274334", r"3\cdot3\pi=9\pi", r"\pi 9",
    ],
    r"\frac{3\pi}{2}": [
        "3pi/2", r"\frac32\pi", "1.5π", r"\frac{3}{2}\pi", "(3/2)*pi", "3/2 pi", r"\frac{3 \pi}{2}\text{ units}",
    ],
    "2^{10}": ["2**10", "2^10", "1024", "1,024"],
    "12": [
        "12 times", "12 quarters", "12 feet squared", "USD 12", "US$12", r"\[12\]", "**12**", "12 one-dollar bills",
        "12 times as many", r"\[ 12 \]", "x=12", "12 USD", "12 m²",
    ],
    "-3/4": [r"\frac{3}{-4}", "-0.75", r"-\frac34"],
    r"\frac{1+\sqrt5}{2}": [r"\frac{\sqrt5+1}{2}", "(1+sqrt(5))/2", "(1+√5)/2"],
    r"\frac{-1-\sqrt5}{2}": [r"-\frac{1+\sqrt5}{2}", r"-\frac{\sqrt5+1}{2}"],
    r"2-\sqrt3": [r"-\sqrt3+2", r"-(\sqrt3-2)"],
    "5:30": ["5:30", "5 : 30", "5{:}30"],
    "3:4": ["3 : 4"],
    "x=5": ["5", "x=5", "5.0"],
    r"2.5\text{ million}": ["2.5 million", "2,500,000", "2500000"],
    "(3,4)": ["(3, 4)", r"\left(3,4\right)", "(x,y)=(3,4)", "(3.0,4)"],
    "1, 2": ["2 and 1", "x=1, x=2", "x=1 or x=2", "1 and 2", r"1\text{ and }2"],
    r"\pm 3": ["3, -3", "±3", r"x=\pm3", r"-3\text{ or }3"],
    r"1\pm\sqrt2": [r"1+\sqrt2, 1-\sqrt2"],
    r"(-\infty,3]\cup[5,\infty)": [r"(-\infty, 3] \cup [5, \infty)", r"[5,\infty)\cup(-\infty,3]"],
    r"\frac{3+\sqrt{5}}{2}": [r"\frac{3}{2}+\frac{\sqrt5}{2}", r"1.5+\frac{\sqrt5}{2}", r"\frac12(3+\sqrt5)"],
    r"\{1,2,3\}": ["{1,2,3}", "3,2,1"],
    r"(-2,3)\cup(4,5)": ["(4,5) U (-2,3)", "(-2,3)∪(4,5)"],
    "3+4i": ["4i+3", "3 + 4 i"],
    r"\text{even}": ["even", "Even"],
    r"\text{(C)}": ["C", "(C)", r"\text{C}"],
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": [r"\begin{pmatrix}1\\2\end{pmatrix}"],
    "x+1": ["1+x"],
    "2xy": ["2yx"],
    "12 cm": ["12", "12 cm"],
    r"12\text{ cm}": ["12"],
    r"\frac{1}{3}": ["0.333333"],
    "0.333333": ["1/3"],
    r"3\sqrt{12}": [r"6\sqrt3"],
    r"\log_2 3": [r"\log_{2}{3}"],
    "y=2x+1": ["2x+1", "y=1+2x"],
    "Monday": ["monday"],
    r"\frac{10\pi}{4}": [r"\frac{5\pi}{2}"],
    "1000": ["10^3=1000"],
    r"3\frac{1}{2}": ["3.5", "7/2"],
    r"\sqrt[3]{2}": [r"\sqrt[3]2"],
    "-2,3": ["3,-2"],
    r"\frac{\pi}{6}+\sqrt{3}": ["√3+π/6"],
}  # fmt: skip


@pytest.mark.parametrize(("answer", "undone"), WRONG.items())
def test_what_is_another_value_or_leaves_work_undone_is_wrong(answer: str, undone: list[str]) -> None:
    assert [given for given in undone if is_right(given, answer)] == []


@pytest.mark.parametrize(("answer", "forms"), RIGHT.items())
def test_the_reference_may_be_written_in_many_ways(answer: str, forms: list[str]) -> None:
    assert [given for given in forms if not is_right(given, answer)] == []


@pytest.mark.parametrize("answer", [*RIGHT, *WRONG])
def test_the_reference_itself_is_written_out(answer: str) -> None:
    assert final_form.has_variables(answer) or final_form.is_written_out(answer, answer)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    {
        "x+1": True, "2ab": True, "y=2x+3": True, r"x^2\text{ cm}": True, r"2\mathbf{j}": True, "x=5": False,
        "12": False, "12 cm": False, "12 apples": False,
        r"5\text{ m}": False, r"3\pi": False, "3+4i": False, "2562_7": False, "AB_{16}": False, "Monday": False,
        "(3, 4)": False, "1 or 2": False, r"\text{(C)}": False,
    }.items(),
)  # fmt: skip
def test_algebra_alone_is_left_to_math_verify(answer: str, verdict: bool) -> None:
    assert final_form.has_variables(answer) is verdict


def test_an_expression_is_the_same_in_every_notation_and_nothing_is_worked_out() -> None:
    assert read(r"3*\pi/2") == read(r"\frac{3}{2}\pi") == read(r"1.5\pi") != read(r"3\pi*2/4")
    assert read("2-√3") == read("-(√3-2)") == read("-√3+2") != read("√3-2")
    assert [read(text) for text in ("", "3 4", "2^", "(3", "3)", r"3\frac12", "x", "3++4", r"\gcd(2,3)")] == [None] * 9
    node = read(r"\frac{3√12}{4}")
    assert node is not None and worked_out(node) == read(r"\frac{3√3}{2}") and value(node) == pytest.approx(2.598076211)


def test_texts_made_to_be_slow_or_large_have_no_value() -> None:
    for text in ("9^" * 400 + "9", "9^{9^{9^{9}}}", "(" * 450 + "1" + ")" * 450, "√" * 900 + "2", "1/(1-1)", "√(-1)"):
        node = read(text)
        assert node is None or value(node) is None
    for text in ("9^{999}*" * 120 + "9", "1e999", "12=" * 300 + "13", "12 " + "a/" * 490 + "1", "1," * 490 + "1"):
        for answer in (*WRONG, *RIGHT):
            assert not final_form.is_written_out(f"{text}={text}", answer)
