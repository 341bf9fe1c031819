"""Is a right answer right, a retry worth half, and does no rephrasing of a test problem stand in the training split?"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from envs import SPLITS, make, math_judge, metamath_qa
from envs.base import split_by_hash
from envs.episode import Episode
from envs.metamath_qa import MetaMathQA, Problem, answer_in, is_right
from envs.metamath_qa.problems import NAMES, TEMPLATES, THINGS, Parameters
from envs.protocol import Protocol

ONE = Problem("What is 1/2 of 7?", "Halve 7.", "7/2", "example", "7 / 2 = 7/2")


def at(problem: Problem, attempts: int = 4, style: str = "plain") -> MetaMathQA:
    env = MetaMathQA(attempts=attempts)
    env.style = style
    env.reset(seed=0)
    env.begin(problem)
    return env


# -- the rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "told"),
    [("plain", "{} {} wrong. Try again."), ("compact", "Not right, try again. Wrong: {}")],
)
def test_a_right_answer_is_worth_half_as_much_after_each_wrong_one(style: str, told: str) -> None:
    for wrong in range(4):
        env = at(ONE, style=style)
        for number in range(wrong):
            observation, reward, over, cut, info = env.step(str(number))
            assert (reward, over, cut) == (0, False, False) and not info["failure"]
            assert info["action_is_valid"] and info["action_is_effective"]
            said = told.format(number + 1, "attempts were" if number else "attempt was")
            assert observation == f"Problem: What is 1/2 of 7?\n{said}"
        observation, reward, over, _, info = env.step("3.5")
        assert (observation, reward, over, info["success"]) == ("Right.", 0.5**wrong, True, True)


def test_a_turn_without_an_answer_is_not_called_wrong() -> None:
    env = MetaMathQA()
    episode = Episode(env, Protocol.of(env), 0)
    episode.step("<think>so</think><answer>no idea</answer>")
    said = episode.step("3.5").user or ""
    assert said.startswith("That was not a valid answer.") and "\n1 attempt was wrong. Try again.\n" in said


def test_the_last_wrong_answer_ends_the_episode_for_good():
    env = at(ONE, attempts=2)
    assert env.max_turns == 2
    env.step("1")
    before = env.state_key()
    assert env.step("   ")[4] | {"success": False} == {
        "success": False, "action_is_valid": False, "action_is_effective": False, "failure": ""
    } and env.state_key() == before  # fmt: skip
    observation, _, over, _, info = env.step("2")
    assert over and info["failure"] == "attempts" and "No attempt is left" in observation
    ended = env.state_key()
    for answer in ("7/2", "3", "x" * 60_000):
        observation, reward, over, _, info = env.step(answer)
        assert over and reward == 0 and not info["success"] and not info["action_is_effective"]
        assert env.state_key() == ended


def test_a_solved_problem_stays_solved():
    env = at(ONE)
    env.step("7/2")
    for answer in ("7/2", "1"):
        observation, reward, over, _, info = env.step(answer)
        assert (observation, reward, over, info["success"], info["failure"]) == ("Right.", 0, True, True, "")


@pytest.mark.parametrize(
    ("given", "answer", "verdict"),
    [
        ("7/2", "7/2", True),
        ("3.5", "7/2", True),
        (r"\frac{7}{2}", "7/2", True),
        ("x = 3.5", "7/2", True),
        ("1,200", "1200", True),
        ("$12", "12", True),
        ("-4", "4", False),
        ("x+1", "1+x", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("3 + 1/2", "7/2", False),  # arithmetic left undone
        ("2^3 + 4^2", "24", False),
        ("27-25", "2", False),
        (r"3 \cdot 4", "12", False),
        ("84/7", "12", False),
        ("3 * 4 = 12", "12", True),
        ("3 * 5 = 12", "12", False),
        ("5!", "120", False),
        ("twelve", "12", False),
        ("9^9^9^9", "12", False),
    ],
)
def test_what_is_right(given: str, answer: str, verdict: bool) -> None:
    assert is_right(given, answer) is verdict


@pytest.mark.parametrize(
    ("answer", "undone"),
    {
        "12": [
            r"5\ +7", r"5\,+\,7", r"5\quad+7", r"5{+}7", r"60\over5", r"{84 \over 7}", r"\cfrac{60}{5}",
            r"\frac{60}{5}", "60/5", "60:5", "12/1", r"\max(3,12)", r"\gcd(24,36)", r"\log_2 4096", r"\log_{2}{4096}",
            r"\binom{12}{1}",
            r"{12 \choose 1}", r"\lfloor 12.5\rfloor", "|-12|", "-(-12)", "3 4", "3(4)", "{3}{4}", "12^{1}", "12!",
            r"12 \approx 13", r"12 = 12 \approx 13", r"x\in\{12\}", "12.000000001", "11.9999999999", "13 - 1", "5７",
            "twelve", "12 squared", "12 mod 20", "12 thousand", "12x", r"12\pi", "12 or 13", "12, 13", "1,2", "٣",
        ],
        "5": [r"237 \mod 8", r"237 \bmod 8", "237 mod 8", "237 % 8"],
        "72": [r"\operatorname{lcm}(24,18)", r"\mathrm{lcm}(24,18)", "lcm(24,18)"],
        "25": [r"2^3\ +4^2", "2^3 + 17", r"\sqrt{625}", "5^2", "5**2", r"50\% \text{ of } 50"],
        "1/2": ["3/6", r"\frac{3}{6}", r"\binom{3}{1}/6", "1-1/2", "1:2", "0.5000001", "0.4999999999999", "1/2 or 1/3"],
        "1200": ["12 * 100", r"12 \times 10^2", "10^3 + 200", "12e2"],
        r"\frac{5}{6}": [r"\frac12+\frac13", r"\frac{1}{2}\ + \frac{1}{3}"],
        r"2\sqrt{3}": [r"\sqrt{12}", r"\frac{6}{\sqrt{3}}", r"2\sqrt{1+2}", r"\sqrt{3}+\sqrt{3}", r"\gcd(2,4)\sqrt{3}",
                        r"\frac{8}{4}\sqrt{3}"],
        r"12\pi": [r"3 \cdot 4\pi", r"(3)(4)\pi", r"5\pi+7\pi", r"{3}{4}\pi"],
    }.items(),
)  # fmt: skip
def test_a_number_is_written_out_and_not_left_to_the_reader(answer: str, undone: list[str]) -> None:
    assert [given for given in undone if is_right(given, answer)] == []


@pytest.mark.parametrize(
    ("answer", "forms"),
    {
        "12": [
            "12", " 12.0 ", "12.", "+12", "012", "(12)", "$12$", r"\(12\)", "{12}", r"\text{12}", r"\mathbf{12}",
            "1.2e1", "$12", r"\$12.00", "€12", "12€", "12 people", r"12\text{ cm}^2", "12 km/h", "12 miles per hour",
            "12cm", "12 m",
            r"12~\text{hours}", r"12^\circ", "12 degrees", "x = 12", r"x \to 12", "84/7 = 12", "1200%",
        ],
        "1200": ["1,200", "1{,}200", r"1\,200", "1 200", r"1.2 \times 10^3", r"1.2 \cdot 10^{3}", r"\$1,200"],
        "7/2": ["3.5", "3.5e0", r"\frac72", r"\dfrac{7}{2}", "{7}/{2}", "7 / 2", "3 1/2", r"3\frac{1}{2}", "3.5 hours"],
        "-4": ["-4", "−4", "- 4", "-$4", "$-4", r"\text{-4}", "-4.0"],
        "1/2": ["0.5", ".5", "50%", r"50\%", "50 percent", r"\tfrac12"],
        "-1/2": ["-0.5", r"-\frac{1}{2}", r"\frac{-1}{2}", "-1/2"],
        "1/3": ["0.333333", "0.3333333333"],
        "6/8": ["6/8", r"\frac{6}{8}", "3/4", "0.75"],
        r"\$12": ["12", "$12", "12 dollars"],
        r"90^\circ": ["90", "90 degrees", "90°"],
        r"10\%": ["10", "10%", "0.1", "1/10"],
        r"2\sqrt{3}": [r"2 \cdot \sqrt 3", "2*sqrt(3)", "3.464101615"],
        r"4\pi": [r"4\pi\text{ cm}^2", "4π", r"4 \cdot \pi", r"\pi 4"],
        r"1+\sqrt{2}": [r"\sqrt{2}+1", r"\sqrt2 + 1"],
        "2^{10}": ["1024", "2^10"],
        "1, 2": ["2, 1", r"\{1, 2\}"],
    }.items(),
)  # fmt: skip
def test_a_number_may_be_written_in_many_ways(answer: str, forms: list[str]) -> None:
    assert [given for given in forms if not is_right(given, answer)] == []


def test_restating_a_problem_does_not_solve_it() -> None:
    env, kinds = make("metamath_qa"), set()
    for seed in range(150):
        env.reset(seed=seed, options={"split": "test"})
        undone, equals, _ = env.level.working.split(", ")[-1].rpartition(" = ")
        if equals and not is_right(undone, env.level.answer):  # a chance, already in lowest terms, is worked out
            kinds.add(env.level.kind)
            for old, new in ((" + ", r"\ +"), (" - ", r"\ -"), (" * ", r"\ \cdot "), (" / ", r" \over ")):
                undone = undone.replace(old, new)
            assert not env.step(undone)[4]["success"], undone
    assert len(kinds) > 15


def test_an_answer_is_found_in_what_models_write_around_it():
    texts = (r"so \boxed{7}", "The answer is: 7.", "answer is 7", "\n 7 \n", "Answer: 7")
    assert [answer_in(text) for text in texts] == ["7"] * 5
    assert [answer_in(text) for text in ("", " \n", "\\boxed{}", "...", "The answer is:", "7" * 1001)] == [None] * 6


def test_a_parser_that_hangs_costs_its_time_limit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counter()

    class Slow:
        def equal(self, given: str, answer: str) -> bool:
            asked["questions"] += 1
            return False

    monkeypatch.setattr(math_judge, "_judge", lambda process: Slow())
    for problem, times in ((ONE, 0), (ONE._replace(answer="x^9"), 1)):  # a power is no number, and not asked about
        env = at(problem)
        for _ in range(4):
            env.step("(9)^x")
        assert asked["questions"] == times


# -- the embedded problems ---------------------------------------------------------------------------------------------

EXPECTED: dict[str, Callable[..., Fraction | int]] = {  # another way to compute the answer from the numbers of the text
    "bags": lambda bags, each, more: bags * each + more,
    "change": lambda count, price, paid: paid - count * price,
    "left_over": lambda had, each, days: had - each * days,
    "average": lambda a, b, c: Fraction(a + b + c, 3),
    "discount": lambda price, percent: Fraction(price * (100 - percent), 100),
    "part_of": lambda whole, top, bottom: Fraction(whole * top, bottom),
    "trip": lambda long, fast, short, slow: long * fast + short * slow,
    "together": lambda a, b: 1 / (Fraction(1, a) + Fraction(1, b)),
    "linear": lambda factor, added, result: Fraction(result - added, factor),
    "two_numbers": lambda total, gap: Fraction(total + gap, 2),
    "rectangle": lambda area, side: 2 * side + Fraction(2 * area, side),
    "common_divisor": lambda a, b: max(d for d in range(1, a + 1) if a % d == b % d == 0),
    "common_multiple": lambda a, b: next(m for m in range(a, a * b + 1, a) if m % b == 0),
    "remainder": lambda number, divisor: number % divisor,
    "sequence": lambda a, b, _, place: [a + i * (b - a) for i in range(place)][-1],
    "series": lambda first, last: sum(range(first, last + 1)),
    "handshakes": lambda guests, absent: sum(range(guests - absent)),
    "chance": lambda red, blue, green: Fraction(red, red + blue + green),
    "ages": lambda young, years, times: times * (young + years) - years,
    "roots": lambda _, b, c, zero: max(x for x in range(99) if x * x - b * x + c == zero),
    "ratio": lambda total, one, other: Fraction(total * one, one + other),
    "square_grid": lambda rows, columns, missing: rows * columns - missing,
    "powers": lambda base, high, low, two: base**high + low**two,
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_each_template_asks_for_the_answer_it_gives(kind: str) -> None:
    rng, questions = np.random.default_rng(1), set()
    for _ in range(200):
        drawn = TEMPLATES[kind](Parameters(rng))
        if kind == "fractions":
            one, other = re.findall(r"\d+(?:/\d+)?", drawn.questions[0])
            expected = Fraction(one) + Fraction(other)
        else:
            expected = EXPECTED[kind](*map(int, re.findall(r"\d+", drawn.questions[0])))
        assert Fraction(drawn.answer) == expected and str(expected) == drawn.answer, drawn
        first, second = (Counter(re.findall(r"\d+", text)) for text in drawn.questions)
        assert first - Counter(["0", "2"]) == second - Counter(["0", "2"]), "both ways ask with the same numbers"
        assert drawn.working.endswith(f" {drawn.answer}") and max(map(len, drawn.questions)) < 300
        for step in drawn.working.split(", "):
            left, equals, right = step.partition(" = ")
            assert not equals or value(left) == Fraction(right), step
        questions |= set(drawn.questions)
    assert len(questions) > 100


def value(text: str) -> Fraction:
    """A chain of operations from left to right, products first."""
    words = [
        str(Fraction(word.split("^")[0]) ** int(word.split("^")[1])) if "^" in word else word for word in text.split()
    ]
    total, sign = Fraction(0), 1
    while words:
        term = Fraction(words.pop(0))
        while words and words[0] in "*/":
            operation, number = words.pop(0), Fraction(words.pop(0))
            term = term * number if operation == "*" else term / number
        total += sign * term
        if words:
            sign = 1 if words.pop(0) == "+" else -1
    return total


def test_there_are_thousands_of_problems_of_two_dozen_kinds():
    assert len(TEMPLATES) == 24
    draw, levels = MetaMathQA.draw(("embedded", 0), np.random.default_rng(0)), []
    for _ in range(3000):
        levels.append(next(draw))
    assert len({MetaMathQA.key_of(level) for level in levels}) > 2500
    assert set(Counter(level.kind for level in levels)) == set(TEMPLATES)


def test_no_test_problem_is_a_training_problem_with_other_names_and_things():
    draw, words = MetaMathQA.draw(("embedded", 0), np.random.default_rng(0)), re.compile("|".join(NAMES + THINGS))
    homes: dict[str, set[str]] = {}
    ways: dict[str, set[str]] = {}
    for level in itertools.islice(draw, 6000):
        asked = words.sub("", level.query)
        homes.setdefault(asked, set()).add(str(MetaMathQA.split_of(level)))
        ways.setdefault(MetaMathQA.key_of(level), set()).add(asked)
    assert all(len(home) == 1 for home in homes.values()) and set().union(*homes.values()) == set(SPLITS)
    asked_in_both = sum(len(way) == 2 for way in ways.values())
    assert asked_in_both > 300 and max(map(len, ways.values())) == 2, "a key is one problem, asked in two ways"


# -- a data set --------------------------------------------------------------------------------------------------------


def meta_math(path: Path, originals: int = 60, rows_each: int = 4) -> Path:
    """Rows in the schema of meta-math/MetaMathQA, some of them without an answer."""
    rows = []
    for number in range(originals):
        for way in range(rows_each):
            response = f"There are {number} and {number}.\nThat makes {2 * number}.\n#### {2 * number}\nThe answer is: "
            rows.append(
                {
                    "query": f"Way {way} to ask: what is twice {number}?",
                    "response": f"{response}{2 * number}",
                    "original_question": f"What is twice {number}?",
                    "type": ("GSM_Rephrased", "GSM_AnsAug", "GSM_SV", "GSM_FOBAR")[way],
                }
            )
    rows += [{**rows[0], "response": "No answer here."}, {**rows[0], "response": "The answer is: " + "9" * 2000}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_in_the_schema_of_metamathqa_is_played(tmp_path: Path) -> None:
    path = meta_math(tmp_path / "meta.jsonl")
    problems = metamath_qa.problems_of(str(path), 10_000)
    assert len(problems) == 240 and problems[5].answer == "2" and problems[5].kind == "GSM_AnsAug"
    assert problems[5].working == "There are 1 and 1. That makes 2. #### 2"
    env = make("metamath_qa", path=str(path))
    homes: dict[str, set[str]] = {}
    for split in SPLITS:
        for seed in range(60):
            env.reset(seed=seed, options={"split": split})
            homes.setdefault(env.level_key(), set()).add(split)
            assert env.observe() == f"Problem: {env.level.query}" and split_by_hash(env.level_key()) == split
            assert env.step(env.expert())[1] == 1
    assert all(len(splits) == 1 for splits in homes.values()) and len(homes) > 30
    assert len(metamath_qa.problems_of(str(path), 3)) == 3
    assert metamath_qa.problems_of(str(tmp_path), 10_000) == problems, "a folder holds such files"


def test_what_cannot_be_read_is_one_clear_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.jsonl").write_text('{"question": "What?", "answer": "That."}\n')
    (tmp_path / "none.jsonl").write_text(
        '{"query": "What?", "response": "That.", "original_question": "What?", "type": "a"}\n'
    )
    cases = {
        "other.jsonl": "no values in query, response, original_question, type",
        "none.jsonl": "no row of path=.*The answer is:",
        "missing.jsonl": "cannot be read .*Hugging Face Hub",
    }
    for name, says in cases.items():
        with pytest.raises(ValueError, match=says) as caught:
            make("metamath_qa", path=str(tmp_path / name))
        assert "\n" not in str(caught.value) and str(caught.value).startswith("metamath_qa: ")
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"path=meta-math/MetaMathQA \(split train\) cannot be read \(ConnectionError"):
        make("metamath_qa", path="meta-math/MetaMathQA", rows=10)
    with pytest.raises(ValueError, match="attempts >= 1"):
        make("metamath_qa", attempts=0)


# -- hostile text ------------------------------------------------------------------------------------------------------


def test_hostile_answers_end_in_time_and_win_nothing():
    pieces = ["\\boxed{", "}", "9", "^", "(", ")", "\\frac", "=", "\x00", "\ud800", " ", "search[", "!", "\u0660", "²"]
    rng, env = np.random.default_rng(0), make("metamath_qa")
    judged = Counter()
    for seed in range(60):
        env.reset(seed=seed)
        text = "".join(pieces[int(rng.integers(len(pieces)))] for _ in range(int(rng.integers(1, 40))))
        _, reward, _, _, info = env.step(text)
        judged[info["action_is_valid"]] += 1
        assert math.isfinite(reward) and not info["success"]
    assert judged[True] and judged[False]
