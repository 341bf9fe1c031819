"""Is every task solvable, every answer judged exactly, and no text of an answer executed?"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from envs import SPLITS, hub_sets, make
from envs.base import NoLevel
from envs.countdown.arithmetic import DEEPEST, LONGEST, CountdownTask, any_term, find_solution, parse_expression
from envs.players import play_scripted
from envs.protocol import Protocol
from envs.sentences import listed


def at(task: CountdownTask, style: str = "plain", **options: Any) -> Any:
    env = make("countdown", **options)
    env.style = style
    env.reset(seed=0)
    env.begin(task)
    return env


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value of exactly these numbers, by joining any two until one is left."""
    if len(numbers) == 1:
        return set(numbers)
    values: set[Fraction] = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(number for k, number in enumerate(numbers) if k not in (i, j))
        a, b = numbers[i], numbers[j]
        for joined in (a + b, a - b, a * b, a / b if b else None):
            values |= reachable((joined, *rest)) if joined is not None else set()
    return values


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7), ("1 + 2 * 3", 7), ("(1+2)*3", 9), ("10 - 4 - 3", 3), ("12 / 4 / 3", 1), ("2 - 3 * 4", -10),
        ("-3 + 10", 7), ("4 * -(2 - 5)", 12), ("1 / 3 * 3", 1), ("8 / 3", Fraction(8, 3)), ("  ( 1\n+\t2 ) ", 3),
        ("007", 7), ("5 / (3 - 3)", None), ("1 + 0 / 0 * 2", None),
    ],
)  # fmt: skip
def test_expressions_are_read_as_in_school(text, value):
    reading = parse_expression(text)
    assert reading is not None and reading.value == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "2 +", "+ 2", "2 ** 3", "2 ^ 3", "2 // 3", "2 % 3", "2.5 + 1", "1e3", "0x10", "1_000", "3 4", "(3", "3)",
     "()", "(3)(4)", "3 + 4 = 7", "a + 1", "3!", "\u0663 + 1", "\u00b2", "3 + \ud800", "3\x00", "1234567890", "[3]",
     "3,4", "__import__('os').system('true')", "9**9**9**9", "(" * 10_000, "-" * 10_000 + "1", "1 + " * 20_000 + "1",
     "9" * 60_000],
)  # fmt: skip
def test_other_texts_are_no_answer(text):
    env = at(CountdownTask((3, 4, 5), 17))
    before = env.observe(), env.state_key()
    start = time.perf_counter()
    _, reward, over, _, info = env.step(text)
    assert time.perf_counter() - start < 0.2
    assert not (info["action_is_valid"] or info["action_is_effective"] or over or reward or info["failure"])
    assert (env.observe(), env.state_key()) == before and parse_expression(text) is None


def test_length_and_depth_are_bounded():
    deep = "(" * DEEPEST + "1" + ")" * DEEPEST
    assert (
        parse_expression(deep)
        and not parse_expression(f"({deep})")
        and parse_expression("-" * DEEPEST + "1")
        and not parse_expression("-" * DEEPEST + "-1")
    )
    assert parse_expression("1+" * (LONGEST // 2 - 1) + "11") and not parse_expression("1+" * (LONGEST // 2) + "1")
    long = parse_expression("*".join(["999999999"] * 30))
    assert long is not None and long.value == 999999999**30


def test_twenty_thousand_random_answers_raise_nothing():
    rng, letters = np.random.default_rng(0), np.array(list("0123456789+-*/+-*/()()  .e\n"))
    env, valid = at(CountdownTask((3, 4, 5), 17), tries=20_000), 0
    for _ in range(20_000):
        valid += env.step("".join(rng.choice(letters, int(rng.integers(1, 10)))))[4]["action_is_valid"]
    assert 500 < valid < 10_000


def test_a_random_expression_is_read_with_the_value_it_was_made_with():
    rng = np.random.default_rng(3)
    for _ in range(300):
        numbers = tuple(int(number) for number in rng.integers(1, 50, int(rng.integers(1, 7))))
        term = any_term(numbers, rng)
        reading = parse_expression(term.text)
        assert reading is not None and reading.value == term.value and Counter(reading.numbers) == Counter(numbers)


# -- tasks and the solver ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"max_numbers": 5, "max_number": 12}, {"use_all": False}])
def test_every_task_has_a_solution_that_the_checker_accepts(options):
    for split, seed in itertools.product(SPLITS, range(60)):
        env = make("countdown", **options)
        env.reset(seed=seed, options={"split": split})
        numbers, target = env.level
        reading = parse_expression(env.expert())
        assert reading is not None and reading.value == target and 10 <= target <= 100 and target not in numbers
        given, used = Counter(numbers), Counter(reading.numbers)
        assert used == given if env.config.use_all else not used - given
        assert env.thought().endswith(f"= {target}.") and "(" not in env.thought(), "whole values above 0 on the way"
        env.style = "compact"
        assert env.thought().endswith(f"= {target}") and "(" not in env.thought()


def test_the_solver_finds_a_solution_exactly_where_there_is_one():
    rng = np.random.default_rng(1)
    for count in (3, 4, 4, 4):
        numbers = tuple(int(number) for number in rng.integers(1, 10, count))
        values = reachable(tuple(map(Fraction, numbers)))
        for target in range(1, 80):
            found = find_solution(CountdownTask(numbers, target), True)
            reading = parse_expression(found) if found else None
            assert (found is not None) == (Fraction(target) in values)
            assert reading is None or (reading.value == target and Counter(reading.numbers) == Counter(numbers))
    assert find_solution(CountdownTask((3, 3, 8, 8), 24), True) == "8 / (3 - 8 / 3)"
    assert find_solution(CountdownTask((29, 60, 81), 50), True) == "29 + 81 - 60"
    task = CountdownTask((3, 3, 8, 8), 24)
    assert at(task, "compact").thought() == "8 / 3 = 8/3 ; 3 - (8/3) = 1/3 ; 8 / (1/3) = 24"
    assert at(task).thought() == "8 / 3 = 8/3, 3 - (8/3) = 1/3 and 8 / (1/3) = 24."
    assert find_solution(CountdownTask((5, 5, 7, 24), 24), True) is not None, "nothing times 7 is added"
    assert (
        find_solution(CountdownTask((2, 5, 7, 50), 10), False) == "2 * 5"
        and find_solution(CountdownTask((2, 2), 9), False) is None
    )


def test_six_numbers_are_solved_quickly():
    env, start = make("countdown", min_numbers=6, max_numbers=6), time.process_time()
    for seed in range(12):
        env.reset(seed=seed)
        reading = parse_expression(env.expert())
        assert reading is not None and reading.value == env.level.target
    assert find_solution(CountdownTask((51, 58, 67, 73, 88, 97), 100_003), True) is None, (
        "the longest search: there is none"
    )
    assert time.process_time() - start < 4


def test_the_checker_and_the_solver_agree_with_reasoning_gym():
    gym = pytest.importorskip("reasoning_gym")
    for entry in gym.create_dataset("countdown", size=30, seed=7, min_numbers=3, max_numbers=5):
        told = entry["metadata"]
        task = CountdownTask(tuple(told["numbers"]), told["target"])
        reading = parse_expression(told["expression"])
        assert reading is not None and reading.value == task.target
        assert Counter(reading.numbers) == Counter(task.numbers)
        env = at(task)
        assert env.step(env.expert())[4]["success"] and at(task).step(told["expression"])[4]["success"]


def test_the_order_of_the_numbers_is_no_other_task():
    env, keys = make("countdown"), {}
    assert (
        env.key_of(CountdownTask((3, 5, 4), 17))
        == env.key_of(CountdownTask((5, 4, 3), 17))
        != env.key_of(CountdownTask((5, 4, 3), 18))
    )
    for split, seed in itertools.product(SPLITS, range(150)):
        env.reset(seed=seed, options={"split": split})
        keys.setdefault(env.level_key(), set()).add(split)
    assert len(keys) > 400 and all(len(splits) == 1 for splits in keys.values())


# -- play --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "shown", "last"),
    [
        ("plain", "The target is 17. The numbers are 3, 4 and 5.", "Your last answer was {}."),
        ("compact", "Target 17 Numbers 3 4 5", "Last {}"),
    ],
)
@pytest.mark.parametrize(
    ("answer", "reward", "failure", "told"),
    [
        ("3 * 4 + 5", 1.0, "", "3*4+5 = 17"),
        ("5 - -4 * 3", 1.0, "", "5--4*3 = 17"),
        ("(3 + 4) * 5", 0.1, "value", "(3+4)*5 = 35"),
        ("3 / 4 + 5", 0.1, "value", "3/4+5 = 23/4"),
        ("17", 0.0, "numbers", "17 = 17 not given 17 not used 3 4 5"),
        ("3 + 4 + 5 + 5", 0.0, "numbers", "3+4+5+5 = 17 not given 5"),
        ("4 * 3", 0.0, "numbers", "4*3 = 12 not used 5"),
        ("3 / (4 - 4) + 5", 0.0, "numbers", "3/(4-4)+5 = no value (division by zero) not given 4"),
    ],
)
def test_one_answer_is_scored_as_documented(answer, reward, failure, told, style, shown, last):
    env = at(CountdownTask((3, 4, 5), 17), style)
    assert env.max_turns == 1 and env.observe() == shown
    observation, gain, over, _, info = env.step(answer)
    assert (gain, over, info["failure"], info["success"]) == (reward, True, failure, reward == 1)
    if style == "plain":
        told = re.sub(r" not given (\d+)", r". It uses \1 more often than given", told)
        told = re.sub(r" not used (.*)", lambda m: ". It does not use " + listed(m[1].split(), "or"), told)
    assert observation == f"{shown}\n{last.format(told)}" and info["action_is_effective"]
    again = env.step("3 * 4 + 5")
    assert again[:3] == (observation, 0.0, True) and again[4]["success"] is (reward == 1)
    assert not again[4]["action_is_effective"]


def test_each_number_at_most_once():
    env = at(CountdownTask((3, 4, 5, 9), 17), use_all=False)
    assert "at most once" in env.rules() and env.step("3 * 4 + 5")[4]["success"]
    env.begin(CountdownTask((3, 4, 5, 9), 17))
    assert env.step("3 + 3 + 9")[1] == 0 and "uses 3 more" in env.observe() and "not use" not in env.observe()


def test_several_answers_earn_what_they_add_and_never_more_than_one():
    env = at(CountdownTask((3, 4, 5), 17), tries=4)
    assert env.max_turns == 4 and "answer again" in env.rules()
    moves = ["3 + 4 + 5", "3 + 4 - 5", "no answer", "9 + 8", "3 * 4 + 5"]
    results = [env.step(move) for move in moves]
    assert [result[1] for result in results] == [0.1, 0.0, 0.0, 0.0, pytest.approx(0.9)]
    assert [result[2] for result in results] == [False] * 4 + [True] and results[-1][4]["success"]
    assert results[2][0] == results[1][0], "what cannot be read costs no answer"
    env.begin(CountdownTask((3, 4, 5), 17))
    assert [env.step("3 + 4 + 5")[2] for _ in range(4)] == [False, False, False, True]
    assert env.step("3 * 4 + 5")[4]["failure"] == "value"


# -- the data set ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "parquet", "folder"])
def test_a_local_copy_of_the_data_set_is_played(tmp_path, form):
    import datasets

    rng = np.random.default_rng(0)
    rows = [{"target": 10_007, "nums": [2, 3, 4]}]  # no solution: never drawn
    for _ in range(300):
        a, b, c = (int(number) for number in rng.integers(1, 99, 3))
        rows.append({"target": a + b + c, "nums": [c, a, b]})
    path = tmp_path / ("train.parquet" if form != "jsonl" else "tasks.jsonl")
    if form == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    name = str(tmp_path if form == "folder" else path)
    env, seen = make("countdown", path=name, rows=200), set()
    tasks = {(row["target"], tuple(row["nums"])) for row in rows[1:200]}
    for split, seed in itertools.product(SPLITS, range(40)):
        env.reset(seed=seed, options={"split": split})
        assert (env.level.target, env.level.numbers) in tasks
        seen.add((env.level_key(), split))
        assert env.step(env.expert())[4]["success"]
    assert len(seen) == len({key for key, _ in seen}) > 60


def test_a_data_set_that_cannot_be_used_is_one_paragraph(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "odd.jsonl").write_text('{"nums": [1, -2], "target": 3}\n')
    for file, says in (
        ("other", "no values in nums, target"),
        ("odd", r"row 1 .*nums=\[1, -2\]"),
        ("none", "cannot be read"),
        ("empty", r"cannot be read \(it has no rows\)"),
    ):
        with pytest.raises(ValueError, match=says) as problem:
            make("countdown", path=str(tmp_path / f"{file}.jsonl"))
        assert "\n" not in str(problem.value)


def test_a_folder_of_all_kinds_of_files_is_refused_before_it_is_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_sets, "MOST_ENTRIES", 100)
    rows = "".join(f'{{"nums": [1, 2], "target": {n}}}\n' for n in range(10, 40))
    (tmp_path / "train.jsonl").write_text(rows)
    assert hub_sets.read_rows("countdown", str(tmp_path), ("nums", "target"))
    for n in range(120):
        (tmp_path / f"{n}.txt").touch()
    with pytest.raises(ValueError, match="more than 100 files and folders") as problem:
        make("countdown", path=str(tmp_path))
    assert "\n" not in str(problem.value) and "a folder, or a .jsonl, .json, .csv" in str(problem.value)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"max_number": 2, "max_numbers": 2}, {"max_number": 4, "max_numbers": 2}])
def test_options_without_a_task_are_found_out_soon(options):
    env, before = make("countdown", min_numbers=2, max_target=10, **options), time.process_time()
    with pytest.raises(NoLevel, match="in 120 draws"):
        env.reset(seed=0)
    assert time.process_time() - before < 10


def test_a_thought_is_the_steps_of_its_own_expression():
    for style, thought in (("plain", "2 * 75 = 150 and 150 - 7 = 143."), ("compact", "2 * 75 = 150 ; 150 - 7 = 143")):
        env = at(CountdownTask((2, 75, 7), 70), style)
        assert env.thought_of("2 * 75 - 7") == thought and env.thought_of("what?") == env.thought_of("70") == ""
        assert env.thought_of(env.expert()) == env.thought()


def test_the_largest_numbers_are_read_and_won():
    wins: Counter[str] = Counter()
    options = {"max_numbers": 6, "max_number": 999_999, "max_target": 999_999}
    for player, seed in itertools.product(("expert", "invented"), range(30)):
        episode = play_scripted(make("countdown", **options), player, Protocol(max_turns=1), seed, "test")
        wins[player] += episode.success
        assert episode.invalid_turns == 0
    assert wins == {"expert": 30, "invented": 0}
