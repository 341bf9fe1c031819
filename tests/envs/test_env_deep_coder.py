"""Does deep_coder judge programs as documented, tell no hidden test, and read the data set's schemas?"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import json
import random
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from open_envs import needs_sandbox

from envs import SPLITS, make
from envs.base import draw_level, split_by_hash
from envs.deep_coder import embedded, rows, tasks, verdict
from envs.deep_coder.environment import Data, DeepCoder
from envs.deep_coder.rows import Bounds
from envs.deep_coder.sandbox import Limits, TestOutcome
from envs.deep_coder.verdict import CodeProblem, program_of, same_output, same_value, short
from envs.episode import Episode
from envs.protocol import Protocol, format_response

TESTS = tuple(verdict.Test(f"{n}\n", f"{2 * n}\n") for n in (1, 2, 3, 4))
DOUBLE = CodeProblem("Print twice the number.", "", TESTS, public=1, key="double")
DOUBLE_OF_FIVE = CodeProblem("Print twice the number.", "", (*TESTS, verdict.Test("5\n", "10\n")), 1, "double of five")


def started(problem: CodeProblem = DOUBLE, **options):
    env = make("deep_coder", **options)
    env.reset(seed=0)
    env.begin(problem)
    return env


# -- the rules by example ----------------------------------------------------------------------------------------------


@needs_sandbox
def test_an_episode_adds_up_to_the_best_share_of_passed_hidden_tests():
    env = started(DOUBLE_OF_FIVE)
    played = [env.step(program) for program in ("print(2)", "n = int(input())\nprint(2 * n if n < 5 else 0)", "pass")]
    assert [step[1] for step in played] == [0.0, 0.75, 0.0]
    observation, reward, terminated, truncated, info = env.step("print(2 * int(input()))")
    assert (reward, terminated, truncated, info["success"], info["passed"]) == (0.25, True, False, True, 1.0)
    again = env.step("print(0)")
    assert again[0] == observation and again[1:4] == (0.0, True, False) and again[4]["success"]
    assert not again[4]["action_is_effective"]


@needs_sandbox
def test_to_know_the_outputs_that_are_shown_pays_nothing():
    """Neither to print one of them nor to look each up, whatever hidden test expects the same."""
    yes = tuple(verdict.Test(f"{n}\n", "no\n" if n % 3 else "yes\n") for n in range(9))
    problem = CodeProblem("Is it divisible by 3?", "", yes, public=2, key="by three")
    assert len(problem.hidden) == 7 and problem.pays(problem.hidden)
    for program in ("print('yes')", "print('no')", "print({0: 'yes', 1: 'no'}.get(int(input()), 'no'))"):
        for options in ({}, {"reward": "sparse"}):
            env = started(problem, **options)
            assert env.step(program)[1] == 0.0 and env.feedback.startswith("Passed ")
    solved = started(problem).step("print('yes' if input() in '036' else 'no')")
    assert solved[1] == 1.0 and solved[4]["success"]
    assert started(problem).step("print('yes' if input() in '03' else 'no')")[1] == pytest.approx(6 / 7)


@needs_sandbox
def test_the_sparse_reward_is_for_all_tests_alone():
    env = started(reward="sparse")
    rewards = [env.step(program)[1] for program in ("print(2)", "print(2 * int(input()))", "print(2 * int(input()))")]
    assert rewards == [0.0, 1.0, 0.0]


@needs_sandbox
def test_feedback_shows_the_first_public_test_that_failed_and_no_hidden_one():
    env = started()
    assert env.observe() == "Print twice the number."
    told = env.step("print(int(input()) + 3)")[0]
    assert told == "Print twice the number.\nPassed 1 of 4 tests.\nTest 1\nInput 1\nExpected 2\nGot 4"
    assert env.step("raise ValueError(input())")[0].endswith("Input 1\nExpected 2\nFailed: line 1: ValueError: 1")
    assert env.step("print(")[0].endswith("Passed 0 of 4 tests.\nline 1: SyntaxError: '(' was never closed")
    hidden = env.step("n = int(input())\nprint(2 * n if n < 4 else f'secret {n}')")[0]
    assert hidden.endswith("Passed 3 of 4 tests.\nA hidden test failed: wrong output.")
    hidden = env.step("n = int(input())\nprint(2 * n if n < 4 else 1 / 0)")[0]
    assert hidden.endswith("A hidden test failed: an error.")


@needs_sandbox
def test_blank_and_endless_answers_are_invalid_and_change_nothing():
    env = started()
    env.step("print(2)")
    before = (env.state_key(), env.observe())
    for action in ("", " \n", "```python\n\n```", "x" * 60_001):
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["action_is_valid"], info["action_is_effective"]) == (0, False, False, False)
    assert (env.state_key(), env.observe()) == before


def test_a_fence_is_taken_off():
    assert program_of("Here:\n```python\nprint(1)\n```\nDone") == program_of(" print(1)") == "print(1)"
    assert program_of("```\nx\n```\nor\n```PY\nprint(1)\n```") == program_of("\n  print(1)\n") == "print(1)"
    assert program_of("if x:\n    y") == "if x:\n    y"


ONE = "print(1)"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python3\nprint(1)\n```", ONE),
        ("Here:\n```py3\nprint(1)\n```\nIt prints 1.", ONE),
        ("``` python\nprint(1)\n```", ONE),
        ("```Python 3.11\nprint(1)\n```", ONE),
        ("```{.python}\nprint(1)\n```", ONE),
        ('```python title="a.py"\nprint(1)\n```', ONE),
        ("~~~python\nprint(1)\n~~~", ONE),
        ("```python\r\nprint(1)\r\n```\r\n", ONE),
        ("```python\nprint(1)```", ONE),
        ("```print(1)```", ONE),
        ("`print(1)`", ONE),
        ("  ```python\n  print(1)\n  ```", ONE),
        ("1. Do\n   ```python\n   for i in x:\n       print(1)\n   ```", "for i in x:\n    print(1)"),
        ("- ```python\n  print(1)\n  ```", ONE),
        ("```python\nprint(1)\n```\nRun it:\n```bash\npython a.py\n```", ONE),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", ONE),
        ("```\nprint(1)\n```\n```text\n1\n```", ONE),
        ("```python\nprint(0)\n```\nBetter:\n```python\nprint(1)\n```", ONE),
        ("```python\nprint(0)\n```\nBetter:\n```python\nprint(1)\n", ONE),
        ("```python\nprint(1)", ONE),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("~~~python\na = '```'\n~~~", "a = '```'"),
        ("```pyx\nq\n```\n```\nprint(1)\n```", ONE),
        ("```cpp\nint x;\n```", "int x;"),
        ("Sure: ```python\nprint(1)\n```", ONE),
        ("Sure: ```\nprint(1)\n```", ONE),
        ("Here is the program: ```python\nprint(1)\n```\nIt prints 1.", ONE),
        ("First idea: ```python\nbad\n``` does not work. Better:\n```python\nprint(1)\n```", ONE),
        ("```python\nbad\n``` wrong, so:\n```python\nprint(1)\n```", ONE),
        ("<think>```python\nbad\n```</think>\n```python\nprint(1)\n```", ONE),
        ("```python\nbad\n```python\nprint(1)\n```", ONE),
        ("Use ```x``` here.\n```python\nprint(1)\n```", ONE),
        ("x = '`'\nprint(x)", "x = '`'\nprint(x)"),
        ("```python\n\n```", ""),
        ("", ""),
    ],
)
def test_a_fence_is_one_of_markdown(text, program):
    assert program_of(text) == program


@given(
    lines=st.lists(st.sampled_from(["print(1)", "if x:", "    y = '`'", "", "# ~~", "~ ``"]), max_size=6),
    fence=st.sampled_from(["```", "~~~", "````"]),
    tag=st.sampled_from(["", "python", " py3", "Python "]),
    indent=st.sampled_from(["", "  ", "    "]),
    before=st.sampled_from(["", "Here:\n", "```bash\nls\n```\n"]),
    behind=st.sampled_from(["", "\nDone.", "\n```text\n1\n```"]),
)
def test_a_program_comes_out_of_its_fence_as_it_went_in(lines, fence, tag, indent, before, behind):
    block = "\n".join(indent + line for line in [fence + tag, *lines, fence])
    assert program_of(f"{before}{block}{behind}") == textwrap.dedent("\n".join(lines)).strip()


@needs_sandbox
def test_a_program_is_run_once(monkeypatch):
    env, runs = started(), []

    def run(*given):
        runs.append(given)
        yield from [TestOutcome("ok", "0", "")] * 4

    monkeypatch.setattr(verdict, "run_in_sandbox", run)
    for _ in range(3):
        env.step("print('run once')")
    env.begin(DOUBLE)
    env.step("```python\nprint('run once')\n```")
    assert len(runs) == 1
    monkeypatch.setattr(verdict, "CACHED", 2)
    for n in (1, 2, 3, 1):
        env.step(f"print('{n}')")
    assert len(runs) == 5, "the first of the three was forgotten"


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("1 2\n", "1  2", True), ("1\n2\n", "1\n\n2\n\n", True), ("1 2", "1\n2", False), ("", "\n", True),
        ("", "0", False), ("0.333333", "0.3333334", True), ("0.5", ".50", True), ("2", "2.0", False),
        ("1000000000.5", "1000000000.9", True), ("1.5", "nan", False), ("1.5", "1.6", False), ("1.0.0", "1.0", False),
        ("YES", "yes", False), ("1.5", "1." + "5" * 10_000, False), ("1 2\n3", "1\n2 3", False),
        ("1\n2", "\n \n 1 \x0c\n\n2 \n ", True), ("1\n2", "1\n2\n3", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_lines_and_tokens(expected, found, same):
    assert same_output(expected, found) is same


@needs_sandbox
@pytest.mark.parametrize("line", [r"b'a\n'", r"b'\xff\n'", r"b'\n'"])
def test_a_megabyte_of_short_lines_costs_little(line):
    problem, begun = CodeProblem("", "", TESTS * 5, 1, f"lines {line}"), (time.monotonic(), time.process_time())
    program = f"import os\nos.write(1, ({line} * 2**20)[:2**20 - 4])"
    assert verdict.judge(problem, program, Limits()).passed == 0
    assert time.monotonic() - begun[0] < 6 and time.process_time() - begun[1] < 1


@needs_sandbox
def test_the_clock_runs_while_outputs_are_compared(monkeypatch):
    """However many tests there are, and however long their outputs take: it strikes during the first comparison."""
    struck = threading.Event()

    class Clock(threading.Timer):
        def run(self):
            super().run()
            struck.set()

    monkeypatch.setattr(threading, "Timer", Clock)
    monkeypatch.setattr(verdict, "same_output", lambda *texts: struck.wait(10))
    problem = CodeProblem("", "", TESTS * 100, 1, "slow to compare")
    assert 0 < verdict.judge(problem, "print(1)", Limits(total_seconds=1.0)).passed < 20


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ([1, [2.0]], [1, [2.0000001]], True), (3, 3.0, True), (1000000007, 1000000500.0, False),
        (1000000007, 1000000007.0, True), (1000000007, 1000000500, False), (10**18, 10**18 + 1, False),
        (10**18 + 1, 1e18, False), (7, 7.0000001, False), ([1000000007], [1000000500.0], False),
        ({"a": 1000000007}, {"a": 1000000500.0}, False), (1000000007.0, 1000000500.0, True), (0.5, 0.5000001, True),
        (2.0, 2, True), (1, True, False), (1.0, True, False), (0, None, False), (0.5, 10**400, False),
        (False, False, True), (3, 4, False), (True, 1, False), (None, None, True), ("a", "a", True),
        ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"b": 1}, False), ([1], [1, 2], False), (0.5, "0.5", False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json(expected, found, same):
    assert same_value(expected, found) is same


def test_values_that_no_json_reader_likes_are_wrong_and_harmless():
    problem = CodeProblem("", "f", (verdict.Test("[]", "[1.5]"),), 1, "", boxed=True)
    for text in ("[" * 200_000, "9" * 100_000, "", "NaN", "\ud800", '{"a": ' * 50_000, "1e999", "[1" + "0" * 400 + "]"):
        assert not verdict.passed(problem, problem.tests[0], TestOutcome("ok", text, ""))
    assert verdict.passed(problem, problem.tests[0], TestOutcome("ok", "1.5", "")), "TACO boxes its values"


def test_what_is_shown_is_short_and_printable():
    assert short("x" * 5000).count("x") == verdict.SHOWN and short("  ") == "nothing"
    assert short("a\x1b[2J\x00\ud800\n字") == "a\\x1b[2J\\x00\\ud800\n字"


# -- embedded problems -------------------------------------------------------------------------------------------------


def test_reference_functions_are_right_on_cases_solved_by_hand():
    cases = [
        (tasks.count_pairs([1, 5, 3, 3, 3], 6), 4), (tasks.caesar("xyz A", 3), "abc A"),
        (tasks.compress("aabbbc", 3), "aab3c"), (tasks.fewest_coins(12, 5, 6), 2), (tasks.fewest_coins(0, 5, 6), 0),
        (tasks.largest_window([1, -2, 4, 3], 2), 7), (tasks.last_in_circle(5, 2), 3), (tasks.to_base(11, 3), "102"),
        (tasks.every_kth(["a", "b", "c", "d"], 2), ["b", "d"]), (tasks.longest_smooth([1, 3, 9, 10, 11], 2), 3),
        (tasks.rotate([1, 2, 3], 4), [2, 3, 1]), (tasks.at_most_k_times([1, 1, 2, 1], 2), [1, 1, 2]),
        (tasks.recurrence(7, 1, 1, 100), 13), (tasks.depth_of("(()())", 2), 2), (tasks.depth_of("())", 1), -1),
        (tasks.grid_paths(3, 3, 2, 2), 2), (tasks.count_primes(20, 4, 1), 3),
        (tasks.sorted_words(["ccc", "bb", "a", "bb"], 2), ["bb", "ccc"]), (tasks.climb(4, 2, 3), 7),
        (tasks.by_remainder([5, 3, -1, 6], 3), [3, 6, -1, 5]), (tasks.steps_to_one(10, 3), 3),
        (tasks.balance([5, -7, -9, 1], 3), -1), (tasks.closest([1, 5], 3), 1),
        (tasks.most_common(["a", "bb", "cc", "bb"], 2), "bb"),
    ]  # fmt: skip
    assert [found for found, _ in cases] == [expected for _, expected in cases]
    assert len({task.function for task in tasks.TASKS}) == 22


@pytest.mark.thorough
def test_there_are_hundreds_of_problems_and_both_forms_of_one_are_in_one_split():
    drawn = [problem for problem, _ in zip(embedded.problems(np.random.default_rng(0)), range(3000), strict=False)]
    assert len({problem.key for problem in drawn}) > 1000
    forms = {}
    for problem in drawn:
        forms.setdefault(problem.key, set()).add(bool(problem.function))
    assert sum(len(form) == 2 for form in forms.values()) > 300
    assert all(len(problem.tests) == embedded.TESTS and problem.public == embedded.PUBLIC for problem in drawn)
    assert max(len(problem.statement) for problem in drawn) < 900


@pytest.mark.thorough
def test_a_program_that_always_prints_the_same_passes_half_of_the_tests_at_most():
    for split in SPLITS:
        for seed in range(200):
            drawn = draw_level(DeepCoder, Data("embedded", (), 1000, Bounds()), seed, split)
            assert max(Counter(test.output for test in drawn.tests).values()) <= 4, drawn.statement
    for problem, _ in zip(embedded.problems(np.random.default_rng(2)), range(1500), strict=False):
        assert max(Counter(test.output for test in problem.tests).values()) <= 4, problem.statement


def test_tests_and_those_that_may_be_shown_have_different_outputs():
    drawn = [problem for problem, _ in zip(embedded.problems(np.random.default_rng(3)), range(1000), strict=False)]
    assert all(problem.tests[0].output != problem.tests[1].output for problem in drawn)
    assert np.mean([len({test.output for test in problem.tests}) for problem in drawn]) > 7


def test_no_held_out_problem_behaves_like_a_training_problem():
    rng, homes, keys = np.random.default_rng(5), {}, {}
    inputs = [tasks.ints(rng, -20, 40, 0, 12) for _ in range(200)]
    for problem, _ in zip(embedded.problems(np.random.default_rng(0)), range(3000), strict=False):
        if problem.function == "solve":
            scope: dict = {}
            exec(dict(problem.programs)["expert"], scope)  # our own program, not a model's
            outputs = str([scope["solve"](numbers) for numbers in inputs])
            homes.setdefault(outputs, set()).add(split_by_hash(problem.key))
            keys.setdefault(problem.key, set()).add(outputs)
    assert len(homes) > 300 and all(len(home) == 1 for home in homes.values())
    assert set().union(*homes.values()) == set(SPLITS)
    assert all(len(each) == 1 for each in keys.values()), "a key is one behaviour"


def test_flawed_programs_are_other_programs():
    for problem, _ in zip(embedded.problems(np.random.default_rng(1)), range(300), strict=False):
        programs = dict(problem.programs)
        assert programs["expert"] not in (programs["off_by_one"], programs["no_edge_cases"])
        assert not any("# off" in program or "# edge" in program for program in programs.values())


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_wins_every_level(split):
    for seed in range(200):
        env = make("deep_coder", turns=1)
        env.reset(seed=seed, options={"split": split})
        assert env.step(env.expert())[4]["success"], env.level


# -- the data set ------------------------------------------------------------------------------------------------------

STDIN = [{"type": "stdin_stdout", "input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(20)]
ROWS = {
    "list": {
        "problem": "Print twice n.",
        "solutions": ["```python\nprint(2 * int(input()))\n```"],
        "tests": json.dumps(STDIN),
    },
    "called": {
        "problem": "Write f that doubles.",
        "solutions": ["def f(n):\n    return 2 * n"],
        "tests": json.dumps([{"type": "function_call", "fn_name": "f", "input": [2], "output": [4]}]),
    },
    "taco": {
        "problem": "Add two numbers.",
        "solutions": ["print(int(input()) + int(input()))"],
        "tests": json.dumps({"inputs": [["1", "2"], "3\n4"], "outputs": [["3"], "7"]}),
    },
    "taco called": {
        "problem": "Reverse.",
        "solutions": ["class Solution:\n    def back(self, x):\n        return x[::-1]"],
        "tests": json.dumps({"fn_name": "back", "inputs": [[[1, 2]], [[3]]], "outputs": [[[2, 1]], [[3]]]}),
    },
    "lcb": {
        "problem": "Sum of a and b.",
        "starter_code": "class Solution:\n    def add(self, a: List[int], b: int) -> int:",
        "solutions": ["class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        return sum(a) + b"],
        "tests": json.dumps([{"testtype": "functional", "input": "[1, 2]\n3", "output": "6"}]),
        "metadata": json.dumps({"func_name": "add"}),
    },
}  # fmt: skip
BAD = [
    {"problem": "", "tests": "[]"},
    {"problem": "No tests", "tests": "[]"},
    {"problem": "No JSON", "tests": "nonsense"},
    {"problem": "Too large", "tests": json.dumps([{"input": "x" * 200_000, "output": "x"}])},
    {"problem": "No name", "tests": json.dumps([{"type": "function_call", "input": [1], "output": [1]}])},
    {"problem": "Other", "tests": json.dumps({"in": [1]})},
    {"problem": "x" * 20_000, "tests": json.dumps(STDIN)},
]


def written(folder: Path, name: str, some: list[dict]) -> Path:
    columns = ("problem", "solutions", "tests", "starter_code", "metadata")
    lines = [json.dumps({column: row.get(column) for column in columns}) for row in some]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


@needs_sandbox
def test_every_schema_is_read_and_the_rows_own_solution_passes(tmp_path):
    path = written(tmp_path, "train.jsonl", [*ROWS.values(), *BAD])
    found = {problem.statement.split("\n")[0]: problem for problem in rows.load_problems(str(path), (), 100, Bounds())}
    assert set(found) == {row["problem"] for row in ROWS.values()}
    for problem in found.values():
        env = started(problem)
        assert env.step(env.expert())[4]["success"], (problem, env.feedback)
        assert set(env.players()) == {"random"}
    lcb = found["Sum of a and b."]
    assert (
        lcb.function == "add" and lcb.tests[0].input == "[[1, 2], 3]" and "Begin with\nclass Solution" in lcb.statement
    )
    assert "Write a function back." in found["Reverse."].statement


def test_tests_are_capped_the_first_may_be_shown_and_the_longest_are_kept():
    tests = [{"input": "7" * n, "output": str(n)} for n in (1, 2, 9, 3, 8, 40)]
    problem = rows.problem_of({"problem": "p", "tests": tests}, Bounds(public=2, max_tests=4, max_test_bytes=20))
    assert isinstance(problem, CodeProblem)
    assert [len(test.input) for test in problem.tests] == [1, 2, 9, 8] and problem.public == 2


@pytest.mark.parametrize("public", [0, 2, 99])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_row_that_is_kept_has_a_hidden_test(count, public):
    tests = [{"input": f"{n} {n}\n", "output": f"{2 * n}\n"} for n in range(count)]
    problem = rows.problem_of({"problem": "Add the numbers.", "tests": tests}, Bounds(public=public, max_tests=5))
    assert isinstance(problem, CodeProblem) and problem.hidden and len(problem.tests) == min(count, 5)
    assert problem.public == min(public, len(problem.tests) - 1)


@pytest.mark.parametrize(
    "statement",
    [
        "Add a and b.\n-----Sample Input-----\n3 4\n-----Sample Output-----\n7\n",
        "Add a and b.\n\nExample 1:\nInput: a = 3, b = 4\nOutput: 7",
        "Add a and b.\n\nExamples\n\nInput\n3 4\n\n\nOutput\n7",
        ">>> add(3, 4)  # returns\n7",
    ],
)
def test_an_example_of_the_statement_is_not_a_hidden_test(statement):
    example, other = {"input": "3 4\n", "output": "7\n"}, {"input": "5 6\n", "output": "11\n"}
    assert rows.problem_of({"problem": statement, "tests": [example]}, Bounds()) == rows.NO_HIDDEN_TEST
    assert rows.problem_of({"problem": statement, "tests": [example, example]}, Bounds()) == rows.NO_HIDDEN_TEST
    kept = rows.problem_of({"problem": statement, "tests": [example, other, example]}, Bounds(public=0))
    assert isinstance(kept, CodeProblem) and [test.input for test in kept.hidden] == ["5 6\n"]
    assert isinstance(
        rows.problem_of({"problem": "Add 3 numbers, 4 times 7.", "tests": [example]}, Bounds()), CodeProblem
    )


@pytest.mark.parametrize("function", ["isValid", ""])
def test_an_example_without_words_and_numbers_is_not_a_hidden_test(function):
    shown = [("()", True), ("()[]{}", True), ("(]", False)]
    parts = [f'Input: s = "{given}"\nOutput: {str(value).lower()}' for given, value in shown]
    statement = "The brackets '(', ')', '{', '}', '[' and ']': is it valid?\nExamples\n" + "\n".join(parts)

    def problem(extra):
        pairs = [*shown, *extra]
        inputs = [[given] if function else given for given, _ in pairs]
        outputs = [[value] if function else str(value).lower() for _, value in pairs]
        return rows.problem_of(
            {"problem": statement, "tests": {"fn_name": function, "inputs": inputs, "outputs": outputs}}, Bounds()
        )

    assert problem([]) == rows.NO_HIDDEN_TEST
    kept = problem([("([)]", False), ("{[]}", True)])
    assert isinstance(kept, CodeProblem) and ["([)]" in test.input for test in kept.hidden] == [True, False]


def test_rows_without_a_hidden_test_are_counted(tmp_path, caplog):
    shown = {"problem": "Print 7.", "tests": json.dumps([{"input": "", "output": "7"}] * 3)}
    path = written(tmp_path, "rows.jsonl", [*[{**ROWS["list"], "problem": f"Problem {n}"} for n in range(3)], shown])
    assert len(rows.load_problems(str(path), (), 100, Bounds())) == 3
    assert f"of 4 rows of {path}, 1 are left out: 1 {rows.NO_HIDDEN_TEST}" in caplog.text


def test_embedded_problems_keep_a_hidden_test_whatever_may_be_shown():
    for bounds in (Bounds(public=99), Bounds(public=0, max_tests=2), Bounds(public=2, max_tests=3)):
        for seed in range(60):
            level = draw_level(DeepCoder, Data("embedded", (), 1000, bounds), seed, "train")
            assert level.hidden and level.pays(level.hidden) and level.public >= 1, "the first is the example"


def test_own_splits_are_honoured_and_validation_is_by_hash_out_of_train(tmp_path):
    def numbered(*numbers: int) -> list[dict]:
        return [{**ROWS["list"], "problem": f"Problem {n}"} for n in numbers]

    written(tmp_path, "train.jsonl", numbered(*range(60)))
    written(tmp_path, "test.jsonl", numbered(*range(50, 70)))
    found = rows.load_problems(str(tmp_path), (), 1000, Bounds())
    homes = {problem.statement: problem.home for problem in found}
    assert len(found) == 70 and all(homes[f"Problem {n}"] == "test" for n in range(50, 70))
    assert {homes[f"Problem {n}"] for n in range(50)} == {"train", "validation"}
    assert len(rows.load_problems(str(tmp_path), (), 10, Bounds())) == 20
    alone = rows.load_problems(str(tmp_path / "train.jsonl"), (), 1000, Bounds())
    assert {problem.home for problem in alone} == set(SPLITS), "by hash where there is but one split"


@needs_sandbox
def test_levels_of_a_file_are_drawn_by_split(tmp_path):
    path = written(tmp_path, "train.jsonl", [{**ROWS["list"], "problem": f"Problem {n}"} for n in range(80)])
    env = make("deep_coder", path=str(path))
    seen = {split: set() for split in SPLITS}
    for split in SPLITS:
        for seed in range(20):
            seen[split].add(env.reset(seed=seed, options={"split": split})[0])
    assert not seen["train"] & seen["test"] and len(seen["train"]) > 10


@needs_sandbox
@pytest.mark.parametrize("path", ["nowhere", "no/such-set"])
def test_what_cannot_be_read_is_one_paragraph(path, monkeypatch):
    def unreachable(*given: object, **named: object) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"could not read path=.* takes `embedded`, a name on the Hugging Face"
    ) as told:
        make("deep_coder", path=path)
    assert "\n" not in str(told.value)


@needs_sandbox
def test_rows_of_another_schema_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(ValueError, match=r"no problem in path=.*\(1 rows: 1 without a .*\): a row needs `problem` and"):
        make("deep_coder", path=str(tmp_path / "rows.jsonl"))


# -- hostile answers ---------------------------------------------------------------------------------------------------

PIECES = (
    *("import os", "os.fork()", "while True: pass", "print(input())", "(", ")", "[" * 50, "9**9**9", "\x00", "\ud800"),
    *("</answer>", "<think>", "eval(input())", "exec('1/0')", "raise SystemExit(3)", "open('/etc/passwd')", "```"),
    *("def f(x): return f(x)", "f(1)", "\n", "    ", "try:", "except:", "print('x' * 10**7)", "bytearray(10**10)"),
    *("import sys; sys.exit = 1", "import ctypes; ctypes.string_at(0)", "import socket; socket.socket()", "del print"),
    *("class A(metaclass=A)", "async def g(): await g", "__import__('os')._exit(0)", "assert 0, 'x' * 10**5", "yield"),
    *("lambda", "# ", '"""', "\u202e", "%s {0}"),
)


def hostile(rng: random.Random) -> str:
    text = "\n".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 7)))
    return text * rng.choice((1, 1, 1, 50)) if rng.random() < 0.2 else text


def survived(numbers: range) -> int:
    """Plays hostile answers, each alone in an episode of one turn; how many succeeded."""
    protocol = Protocol(max_turns=1, max_actions=1)

    def one(number: int) -> bool:
        env = make("deep_coder", seconds=0.25, total_seconds=3.0)
        episode = Episode(env, protocol, number % 50)
        episode.step(format_response("", [hostile(random.Random(number))], protocol))
        return episode.success

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(one, numbers))


@needs_sandbox
def test_hostile_answers_raise_nothing_and_win_nothing():
    assert survived(range(30)) == 0


@needs_sandbox
@pytest.mark.slow
def test_two_thousand_hostile_programs():
    assert survived(range(2_000)) == 0
