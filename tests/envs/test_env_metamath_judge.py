"""Does the judge of metamath_qa take the reference in every common notation, and nothing that leaves work undone?"""

from __future__ import annotations

import re
from re import _parser as parser  # pyright: ignore
from typing import Any

import pytest

from envs import math_answers, math_judge, math_numbers, math_spelling, math_units
from envs.metamath_qa import answer_in, expression, final_form, is_right
from envs.metamath_qa.expression import parse_value, value_of, worked_out

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
    "3:4": [r"\frac{9-6}{4}", "6:8", "3/4", "0.75", "4:3", "2+1:4", "4 to 3", r"4\colon 3", "3 to 5"],
    "x=5": ["2+3", "x=2+3", "x = 4", "10/2"],
    r"x = \frac{1}{2}": ["2/4"],
    r"2.5\text{ million}": ["2.5", "2.5 thousand", "2.4 million"],
    "0.000001": ["0.0000012", "0.0000009", "0", "0.00000104"],
    "10^{-9}": ["0", "0.0", "0.000000"],
    "2xy": ["2"],
    "12h": ["12.5"],
    "(3,4)": [r"(\sqrt9, 2^2)", "(4,3)", "[3,4]", "3,4", "(1+2,4)", "(3,4,5)"],
    "1, 2": ["1,1", "1", "2-1, 2", "1, 2, 2", "1 2"],
    "(0,5]": ["}0,5", "0,5", "(0,5)", "[0,5]"],
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
        "12_{10}=13", "12 pi", "12e", "12i", "12%", "USD", "**1**2", "12 times", "12 quarters", "12 one-dollar bills",
        "12 times as many", "1 2", "1~2", r"1\ 2", "{1}{2}", "12 halved", "12 kilo", "12 gross", "12 negative", "12K",
        "12 is wrong", "12 thousands", "12 millions", "12 dozens", "12 fourths", "12 times itself", "12 in binary",
        "12 apples", "x = 13 or x = 12", "x=13, y = 12", "2x=12", "-x = 12", "6, because 7+5=12", "x+1=12", "x^2=12",
        r"\sqrt{x}=12", r"\frac{x}{2}=12", "13 = x = 12", "x=", "12=x", "12 cm km", "$12 cents", "x/2=12",
        "(13) or x=12",        "x = 13; x = 12", "11.9999+0=12", "12 m per", "12 /s", "12 square", "12₂", "1²",
        "12 ½", "12,13", "12 5",
        "𝟏𝟑",        r"\pi\text{ or }x=12",
    ],
    "11/2": ["1 1/2", r"1\ 1/2", r"1\frac12", "1½", "1 ½", "1,1/2", "11 2", "1(1/2)", "22/4"],
    "21/3": ["2 1/3", "2⅓"],
    "31/2": ["3½", "3 1/2"],
    "3/2": ["(3)(1/2)", "-(-3/2)", "6/4", "1.5 dozen", "3(1)/2"],
    r"12 \text{ cm}": ["12 km", "12 cm^2", "12 dollars", "$12", "12 inches", "12 dozen", "1200%", "12 cm/s"],
    "12 km/h": ["12 km", "12 h", "12 mph", "12 h/km"],
    "5 hours": ["5 minutes", "5 s"],
    r"\$5": ["5¢", "5 cents", "€5", "£5", "5 km", "500 cents"],
    r"5\text{ cents}": ["$5", r"\$5", "5 dollars", "5 euros"],
    "12 apples": ["12 pears", "12 km", "12 dozen apples", "12 apples and pears"],
    "7": ["7 thousands", "7 millions", "7 thousand", "7K", "7M"],
    "3": ["3 fourths", "3 quarters", "3rd", "3 x", "3 of 4"],
    "5": ["5 dozens", "5K", "5 times itself", "6, because 2+3=5"],
    "101": ["101 in binary", "101_2", "101₂"],
    "1200": ["(1,200)", "1, 200", r"\{1,200\}", "{1}{200}", "1,2,00", "12 00", r"1,\,200"],
    "(1,200)": ["1200", "1,200", "(1200)", "1 200", "(1,201)"],
    "2000000": ["2 millions people", "2 million dozen", "2 million million", "2"],
    "1/3": ["0.333334", "0.333332", "0.33333", "0.3333334", r"0.\overline{4}", r"\overline{3}", r"0.\overline{3}3"],
    "2/3": ["0.666666", "0.666668"],
    r"\pi": ["3.141592", "3.141594", "22/7", "3.14"],
    "x+2": ["x+1=x+2", "x+3, x+2", "x+3 or x+2", "x+2=y", "x=x+2", "ab=x+2", "x+2 apples"],
    "x+1": ["y=x+2=x+1", "y=x+1=x+2", "2x+1", "x+2=x+1", "x + 1 or x", "x"],
    "2ba": ["2", "2a", "2b", "4ab"],
    "2t": ["2", "t", "2 h"],
    "2 + t": ["2"],
    r"\frac{x}{2}h": [r"\frac{x}{2}", "x/2"],
    r"\pi r^2 h": [r"\pi r^2"],
    "5m": ["5", "5 cm"],
    r"\frac{1}{x}": ["1", "1x"],
    "x^2": ["x2", "x", "2x", "x³", "x_2"],
    r"x^2\text{ cm}": ["x^2 km"],
    "3:30 PM": ["3:30 am", "3:31 pm", "330 pm"],
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
        "$2562_7$", r"\text{2562}_7", "2562₇", "(2562)_7",
    ],
    "1042_8": [
        r"1042_{\text{eight}}", "1042_8", "1042", "(1042)_8", "1042 in base 8", "1042 base 8", "(1042)_{8}", "1042₈",
    ],
    r"1042_{\text{eight}}": ["1042_8", "1042"],
    "A3_{12}": ["a3_{12}", "A3"],
    r"6\sqrt{5}": [
        "6*5^(1/2)", r"6\cdot5^{1/2}", "6√5", "6 sqrt(5)", "6sqrt5", r"6\cdot\sqrt{5}", r"\sqrt5\cdot6",
        "13.416407865", r"6\sqrt5\text{ cm}",
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
        "12 feet squared", "USD 12", "US$12", r"\[12\]", "**12**", r"\[ 12 \]", "x=12", "12 USD", "12 m²", "$12$ cm",
        "Total=12", "a+b=12", r"\angle ABC=12", "AB = 12", "12,",
        "*12*", '"12"', r"\displaystyle 12", "12 sq. ft.",
        "≈12",
        r"\approx 12", "x ≈ 12", "((12))", "１２", "= 12", "12º", r"\text{Area} = 12", r"\textbf{12}", "12 km/h",
        "12 kilometers per hour", r"$12$", "`12`", r"12\text{ square units}", "(12)",
    ],
    "12 km/h": ["12 kilometers per hour", "12", "12kph", r"12\ \text{km}/\text{h}"],
    r"12\text{ ft}^2": ["12 sq. ft.", "12 square feet", "12 feet squared", "12 ft²", "12"],
    "12 apples": ["12", "12 apples", "x = 12 apples"],
    r"\$5": ["$5", "5 dollars", "US$5", "5 USD", "USD 5", "5", r"\$5.00", "$5.00"],
    r"5\text{ cents}": ["5¢", "5 cents", "5"],
    "2000000": [
        "2 million", "2 million dollars", "2 million people", "$2 million", r"\$2\text{ million}", "2,000,000 people",
        "2 million USD",
    ],
    "2500000000": ["2.5 billion dollars", r"\$2.5\text{ billion}"],
    "(1,200)": [r"\left(1, 200\right)", r"(1,\ 200)", "(1, 200)", "(1,200)", "(1; 200)", "(x,y)=(1,200)"],
    r"\{1,200\}": ["1, 200", r"\{200, 1\}"],
    "1200": ["1,200", r"1\,200", "1 200"],
    "11/2": ["5 1/2", "5½", r"5\frac12", "5 ½", "11÷2", "11⁄2", "5.5", "(11)/2", "11/(2)", "(11/2)"],
    "1/2": ["½", "1÷2", "1⁄2"],
    "-3/2": ["-(3/2)", "(-3)/2", "-3/2", r"-\left(\frac{3}{2}\right)", "3/(-2)", "-1 1/2"],
    "1/3": ["1÷3", "1⁄3", r"0.\overline{3}", "0.333333", "0.3333333", "1/3≈0.333333"],
    "1/6": [r"0.1\overline{6}", "0.166667", "0.1666667"],
    r"0.\overline{3}": ["1/3", "0.333333"],
    r"\pi": ["3.141593", "3.1415927", "3.14159265358979", "3.14159265358979323846"],
    "3:4": ["3 to 4", r"3\colon 4", "3∶4", "3 : 4"],
    "3:30 PM": ["3:30 pm", "3:30 p.m.", "3:30PM"],
    r"(-\infty,5]": ["(-inf, 5]", r"x \in (-\infty,5]", "x∈(-∞,5]", "(-infinity, 5]"],
    "x^2": ["x**2", "x²", "x^{2}", "x*x", "y=x^2", "f(x) = x^2", "$x^2$", "`x^2`"],
    r"\sqrt{x}": ["√x", "sqrt(x)", r"\sqrt x", "√(x)", "√{x}"],
    r"\pi r^2": ["pi r^2", "πr²", r"r^2 \pi", "A = pi r^2", "pi*r**2"],
    "2ba": ["2ab", "2 a b", "a*2*b", r"2 \cdot a \cdot b"],
    "2t": ["2 t", "t2", "t*2"],
    "2 + t": ["t+2", "2+t"],
    r"\frac{x}{2}h": [r"\frac{xh}{2}", "xh/2", r"h\frac x2"],
    r"\pi r^2 h": ["h pi r²", r"\pi h r^2", "πr²h"],
    r"\frac{1}{x}": [r"\frac1x", "1/x", "x^{-1}"],
    "6x^2+2xy": ["2xy + 6x²", "6x**2+2yx"],
    r"x^2\text{ cm}": ["x^2", "x² cm"],
    "-3/4": [r"\frac{3}{-4}", "-0.75", r"-\frac34"],
    r"\frac{1+\sqrt5}{2}": [r"\frac{\sqrt5+1}{2}", "(1+sqrt(5))/2", "(1+√5)/2"],
    r"\frac{-1-\sqrt5}{2}": [r"-\frac{1+\sqrt5}{2}", r"-\frac{\sqrt5+1}{2}"],
    r"2-\sqrt3": [r"-\sqrt3+2", r"-(\sqrt3-2)"],
    "5:30": ["5:30", "5 : 30", "5{:}30"],
    "x=5": ["5", "x=5", "5.0"],
    r"2.5\text{ million}": ["2.5 million", "2,500,000", "2500000"],
    "(3,4)": ["(3, 4)", r"\left(3,4\right)", "(x,y)=(3,4)", "(3.0,4)"],
    "1, 2": ["2 and 1", "x=1, x=2", "x=1 or x=2", "1 and 2", r"1\text{ and }2", "1; 2", "2;1"],
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
    assert (
        parse_value(r"3*\pi/2") == parse_value(r"\frac{3}{2}\pi") == parse_value(r"1.5\pi") != parse_value(r"3\pi*2/4")
    )
    assert parse_value("2-√3") == parse_value("-(√3-2)") == parse_value("-√3+2") != parse_value("√3-2")
    assert [parse_value(text) for text in ("", "3 4", "2^", "(3", "3)", r"3\frac12", "x", "3++4", r"\gcd(2,3)")] == [
        None
    ] * 9
    node = parse_value(r"\frac{3√12}{4}")
    assert (
        node is not None
        and worked_out(node) == parse_value(r"\frac{3√3}{2}")
        and value_of(node) == pytest.approx(2.598076211)
    )


def test_texts_made_to_be_slow_or_large_have_no_value() -> None:
    for text in ("9^" * 400 + "9", "9^{9^{9^{9}}}", "(" * 450 + "1" + ")" * 450, "√" * 900 + "2", "1/(1-1)", "√(-1)"):
        node = parse_value(text)
        assert node is None or value_of(node) is None
    for text in ("9^{999}*" * 120 + "9", "1e999", "12=" * 300 + "13", "12 " + "a/" * 490 + "1", "1," * 490 + "1"):
        for answer in (*WRONG, *RIGHT):
            assert not final_form.is_written_out(f"{text}={text}", answer)


PIECES = (
    "a  ", "~~", "\\ \\ ", "\n\n", "a ", " ", "1 ", "1,", "999 ", "(", "[", "{", "{}", r"\text{", "\\", "$", "$a",
    "**", "=", "x=",
    ":", ";", " and ", "½", "²", "√(", "√", "^", "_{", "/", "a/", "(1)", "1-", "m ", "m/", "per ", "square ", "cm ",
    "°", "f(",
    r"\frac1", r"\overline{3}", "base", "ab", "\ufdfa", "e", "pi", "1 to ", "'", "2 m^2", ".",
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_a_text_of_any_length_is_answered(piece: str) -> None:
    """Without a limit on time: what takes exponential or cubic time would not end within the suite."""
    for length in (1000, 100_000):
        for head, tail in (("", ""), ("5 ", "!"), ("x=", "13")):
            text = head + (piece * length)[: length - len(head + tail)] + tail
            for answer in (r"6\sqrt{5}", "1, 2", "1042_8", "(3,4)", r"12\text{ cm}"):
                assert not is_right(text, answer)
            assert answer_in(text) is None or length == 1000
            for read_text in (
                math_spelling.plain_spelling,
                math_answers.names_variable,
                math_answers.equation,
                math_units.split_unit,
            ):
                read_text(text[:1000])
            math_spelling.for_math_verify(text[:1000])


def repeats_in(pattern: Any, inside: bool = False) -> bool:
    """Whether a parsed pattern repeats, without an end, what itself holds such a repetition."""
    if isinstance(pattern, tuple) and len(pattern) == 2 and pattern[0] in (parser.MAX_REPEAT, parser.MIN_REPEAT):
        _, most, repeated = pattern[1]
        endless = most == parser.MAXREPEAT
        return (inside and endless) or repeats_in(repeated, inside or endless)
    if isinstance(pattern, parser.SubPattern | list | tuple):
        return any(repeats_in(part, inside) for part in pattern)
    return False


def test_no_pattern_repeats_a_repetition() -> None:
    patterns = [spelled for spelled, _ in math_spelling.SPELLINGS]
    for module in (math_answers, math_judge, math_numbers, math_spelling, math_units, expression, final_form):
        patterns += [value_of for value_of in vars(module).values() if isinstance(value_of, re.Pattern)]
    assert len(patterns) > 50
    assert repeats_in(parser.parse("(?: ?[ /] ?[a-z]+)*$")) and not repeats_in(parser.parse("(?:,[0-9]{3})+a*"))
    assert [pattern.pattern for pattern in patterns if repeats_in(parser.parse(pattern.pattern))] == []
