"""Are rewards by functions what the config and the rows say, and does a slow or odd answer cost no other one?"""

from __future__ import annotations

import datetime
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from envs import make
from envs.base import LateReward
from envs.episode import Episode
from envs.protocol import Protocol
from envs.tools import tool_of
from envs.web import NoAnswer


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Write a module of the current folder; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        name = f"rewards_{abs(hash(request.node.name)) % 10**9}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def rows_at(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"  # what was read before is kept by its name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def scores(texts: list[str], **options: Any) -> list[LateReward | Exception]:
    """What answers get that are scored at once."""
    envs: list[Any] = []
    for text in texts:
        env = make("prompts", **options)
        env.late = True
        Episode(env, Protocol.of(env), 0).step(text)
        envs.append(env)
    return type(envs[0]).score(envs)


def rewards_of(texts: list[str], **options: Any) -> list[float | str]:
    """Their sums, or why there is none."""
    return [score.reward if isinstance(score, LateReward) else str(score) for score in scores(texts, **options)]


ROW = {
    "prompt": "x",
    "answer": "b",
    "words": 1,
    "n": "2",
    "pattern": None,
    "column": "prompt",
    "seconds": [],
    "lost": 0,
}


@pytest.mark.parametrize(
    "reward",
    ["math", "exact_match", "length", "repetition", {"name": "format", "pattern": "b"}, {"name": "length", "words": 3}],
)
def test_a_column_does_not_take_the_place_of_an_option(tmp_path: Path, reward: Any) -> None:
    (with_columns,) = rewards_of(["b"], path=rows_at(tmp_path, ROW), rewards=[reward])
    (without,) = rewards_of(["b"], path=rows_at(tmp_path, {"prompt": "x", "answer": "b"}), rewards=[reward])
    assert with_columns == without and isinstance(without, float)


def test_an_option_of_the_config_wins_against_a_column(tmp_path: Path, module: Any) -> None:
    name = module(
        "def f(prompts, completions, threshold=0.0, **columns):\n"
        "    return [columns['other'][0] + (threshold if isinstance(threshold, int) else threshold[0])]\n"
    )
    path = rows_at(tmp_path, {"prompt": "x", "threshold": 5, "other": 10})
    assert rewards_of(["b"], path=path, rewards=[{"name": f"{name}:f", "threshold": 1}]) == [11.0]
    assert rewards_of(["b"], path=path, rewards=[f"{name}:f"]) == [15.0]


@pytest.mark.parametrize("column", ["completion", "prompt", "trainer_state", "column"])
def test_a_column_that_no_function_is_given_is_refused(tmp_path: Path, column: str) -> None:
    path = rows_at(tmp_path, {"question": "x"} | {column: "b"})
    for name in ("math", "exact_match"):
        with pytest.raises(ValueError, match=f"cannot read the column {column}, .*: rename the column in the rows"):
            make("prompts", path=path, prompt="question", rewards=[{"name": name, "column": column}])


def test_slow_answers_cost_no_other_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has a limit of its own, whatever all of them take."""
    monkeypatch.setattr("envs.prompts.rewards.MATCH_SECONDS", 0.2)
    texts = [*(["a" * 60 + "b"] * 3), "a", "aa"]
    *late, first, last = rewards_of(texts, rewards=[{"name": "format", "pattern": "(a|aa)+"}], timeout=0.3)
    assert (first, last) == (1.0, 1.0)
    assert all("the pattern took more than 0.2 s" in str(reason) for reason in late)


def test_programs_are_judged_side_by_side_and_one_that_fails_costs_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from envs.deep_coder import sandbox, verdict

    together = threading.Barrier(3, timeout=20)

    def judge(problem: Any, source: str, limits: Any) -> verdict.TestVerdict:
        together.wait()
        if source == "broken":
            raise sandbox.SandboxError("no sandbox")
        return verdict.TestVerdict(1, 1, "")

    monkeypatch.setattr(verdict, "judge", judge)
    monkeypatch.setattr(sandbox, "require", lambda: None)
    path = rows_at(tmp_path, {"prompt": "x", "tests": [{"input": "1", "output": "1"}]})
    one, broken, other = rewards_of(["a", "broken", "c"], path=path, rewards=["program_tests"], timeout=1e-9)
    assert (one, other) == (1.0, 1.0) and "no sandbox" in str(broken)


def test_tags_are_found_in_a_text_of_nothing_else(tmp_path: Path) -> None:
    """In a time that grows with its length alone: otherwise this test would take minutes."""
    path = rows_at(tmp_path, {"prompt": "x", "answer": "b"})
    texts = ["<answer>" * 100_000, "<answer>a</answer><answer> b </answer></answer>", "</answer>b"]
    assert rewards_of(texts, path=path, rewards=["exact_match"]) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "text", "answer", "value"),
    [
        ("exact_match", "<think>The capital is Paris.</think>\n\nParis", "Paris", 1.0),
        ("exact_match", "<think>Perhaps <answer>Rome</answer></think> Paris", "Paris", 1.0),
        ("exact_match", "The capital is Paris.</think>Paris", "Paris", 1.0),  # the prompt ended with <think>
        ("exact_match", "<think>Paris", "<think>Paris", 0.0),
        ("exact_match", "I write <think>a</think>", "I write <think>a</think>", 1.0),
        ("math", r"<think>Maybe \boxed{3}? No.</think> The answer is 4.", "4", 1.0),
        ("math", r"<think>Maybe \boxed{3}? No.</think> The answer is 4.", "3", 0.0),
        ("math", r"<think>so \boxed{4}", "4", 0.0),
    ],
)
def test_the_thought_is_not_the_answer(tmp_path: Path, reward: str, text: str, answer: str, value: float) -> None:
    path = rows_at(tmp_path, {"prompt": "x", "answer": answer})
    assert rewards_of([text], path=path, rewards=[reward]) == [value]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that would be run, which pass their tests."""
    from envs.deep_coder import sandbox, verdict

    found: list[str] = []

    def judge(problem: Any, source: str, limits: Any) -> verdict.TestVerdict:
        found.append(source)
        return verdict.TestVerdict(1, 1, "")

    monkeypatch.setattr(verdict, "judge", judge)
    monkeypatch.setattr(sandbox, "require", lambda: None)
    return found


def test_a_program_of_the_thought_is_not_run(tmp_path: Path, programs: list[str]) -> None:
    path = rows_at(tmp_path, {"prompt": "x", "tests": [{"input": "1", "output": "1"}]})
    text = "<think>```python\ndraft()\n```</think>```python\nmine()\n```"
    assert rewards_of([text], path=path, rewards=["program_tests"]) == [1.0] and programs == ["mine()"]


def test_what_functions_record_is_kept_beside_the_rewards(module: Any) -> None:
    name = module(
        "def f(prompts, completions, trainer_state, log_metric, log_extra, **columns):\n"
        "    for share in (0.25, 0.75): log_metric(name='share', value=share)\n"
        "    log_extra(column='length', values=[len(text) for text in completions])\n"
        "    log_extra('odd', [float('nan') for _ in completions])\n"
        "    return [2.0 if trainer_state.epoch is None else trainer_state.epoch for _ in completions]\n"
    )
    for score, length in zip(scores(["x", "xyz"], rewards=[f"{name}:f"]), (1, 3), strict=True):
        assert isinstance(score, LateReward) and score.reward == 2.0
        assert score.logged == {"share": 0.5} and score.extra == {"length": length, "odd": "nan"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("log_extra('length', [1])", "log_extra('length'): 1 values for 2 answers"),
        ("log_metric('share', float('inf'))", "log_metric('share'): inf is not a finite number"),
    ],
)
def test_what_cannot_be_recorded_is_said(module: Any, call: str, said: str) -> None:
    name = module(f"def f(completions, log_metric, log_extra, **columns):\n    {call}\n    return [1.0, 1.0]\n")
    for score in scores(["x", "y"], rewards=[f"{name}:f"]):
        assert f"raised ValueError: {said}" in str(score)


def test_a_function_that_expects_messages_is_told_of_texts(tmp_path: Path, module: Any) -> None:
    """As those of trl.rewards do, which TRL itself gives texts for prompts that are texts."""
    name = module(
        "def f(prompts, completions, **columns):\n"
        "    return [1.0 if c[0]['content'] == 'x' else 1 + None for c in completions]\n"
    )
    (told,) = rewards_of(["x"], path=rows_at(tmp_path, {"prompt": "a"}), rewards=[f"{name}:f"])
    assert "raised TypeError: string indices must be" in str(told) and "needs prompts of messages" in str(told)
    path = rows_at(tmp_path, {"prompt": [{"role": "user", "content": "a"}]})
    (right,), (wrong,) = (rewards_of([text], path=path, rewards=[f"{name}:f"]) for text in "xy")
    assert right == 1.0 and "raised TypeError" in str(wrong) and "prompts of messages" not in str(wrong)


@pytest.mark.parametrize("call", ["c.lower()", "re.search('x', c)", "c + ''"])
def test_a_function_that_expects_texts_is_told_of_messages(tmp_path: Path, module: Any, call: str) -> None:
    """With tools TRL gives messages as well."""
    name = module(
        f"import re\ndef f(prompts, completions, **columns): return [float(bool({call})) for c in completions]\n"
    )
    env: Any = make("prompts", path=rows_at(tmp_path, {"prompt": "a"}), rewards=[f"{name}:f"])
    env.late, env.tools = True, [tool_of("examples.own_tool:calculate")]
    Episode(env, Protocol.of(env), 0).step("x")
    (told,) = env.score([env])
    assert "(with tools, and for prompts of messages, completions are lists of messages" in str(told)
    assert len(str(told)) < 280, "a crash is told in 300 characters"
    (right,) = rewards_of(["x"], path=rows_at(tmp_path, {"prompt": "a"}), rewards=[f"{name}:f"])
    assert right == 1.0


def test_coroutines_in_a_list_are_to_be_awaited(module: Any) -> None:
    """Whether or not the function that returns them is async."""
    name = module(
        "async def inner(): return 1.0\n"
        "def f(prompts, completions, **columns): return [inner() for _ in completions]\n"
        "async def g(prompts, completions, **columns): return [inner() for _ in completions]\n"
    )
    for function in "fg":
        (told,) = rewards_of(["x"], rewards=[f"{name}:{function}"])
        assert f"reward {function} returned coroutines: await them in an async function, for ex" in str(told)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('\\x1b[31mred\\nand more')", r"raised ValueError: \x1b[31mred and more"),
        ("class Mute(Exception): __str__ = None\nraise Mute", "raised Mute: (without words: its __str__ raised)"),
        ("raise ModuleNotFoundError(name='\\x1b[31m')", r"imports \x1b[31m, which is not installed"),
    ],
)
def test_a_module_that_raises_is_named_in_one_line(module: Any, code: str, words: str) -> None:
    name = module(code)
    with pytest.raises(ValueError) as error:
        make("prompts", rewards=[f"{name}:f"])
    assert words in str(error.value) and str(error.value).isprintable()


def test_an_answer_that_the_first_function_does_not_judge_is_not_called_wrong(
    module: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module(
        "def first(prompts, completions, **columns): return [0.0 if c == 'wrong' else None for c in completions]\n"
        "def second(prompts, completions, **columns): return [1.0] * len(completions)\n"
    )
    wrong, other = scores(["wrong", "x"], rewards=[f"{name}:first", f"{name}:second"])
    assert isinstance(wrong, LateReward) and isinstance(other, LateReward)
    assert (wrong.failure, other.failure, other.reward, other.success) == ("wrong answer", "not judged", 1.0, False)
    env = make("prompts", rewards=[f"{name}:first", f"{name}:second"])
    episode = Episode(env, Protocol.of(env), 0)
    episode.step("x")
    assert episode.failure == "not judged"
    scores(["x"], rewards=[f"{name}:first"])
    assert "left out of training; an evaluation counts them as not solved" in capsys.readouterr().err


def test_nothing_of_rows_answers_and_exceptions_controls_the_terminal(
    tmp_path: Path, module: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module("def f(prompts, completions, **columns): raise ValueError('\\x1b[2J \\u202e' + completions[0])\n")
    path = rows_at(tmp_path, {"prompt": "\x1b]0;p\x07"})
    (told,) = rewards_of(["\x9b31m\x1b"], path=path, rewards=[f"{name}:f"])
    with pytest.raises(NoAnswer) as stopped:
        scores(["\x9b31m\x1b"], path=path, rewards=[f"{name}:f"], on_error="stop")
    for text in (str(told), str(stopped.value), capsys.readouterr().err):
        assert text.replace("\n", "").isprintable() and r"ValueError: \x1b[2J \u202e\x9b31m\x1b" in text
    assert r'prompt "\x1b]0;p\x07", answer "\x9b31m\x1b"' in str(stopped.value)


@pytest.mark.parametrize(("value", "weight"), [("1e200", 1), ("1e90", 1e20), ("1e99", -10), ("1e200", 0)])
def test_a_reward_too_large_is_named_with_its_row(module: Any, value: str, weight: float) -> None:
    name = module(f"def f(prompts, completions, **c): return [{value} if c == 'x' else 1e9 for c in completions]\n")
    large, good = rewards_of(["x", "y"], rewards=[{"name": f"{name}:f", "weight": weight}])
    assert good == 1e9 * weight and f"returned {float(value):g}, which is too large with its weight" in str(large)


def test_an_exact_match_may_be_one_of_a_list(tmp_path: Path) -> None:
    path = rows_at(tmp_path, {"prompt": "x", "answer": ["Jim Reeves", 7]})
    assert rewards_of(["jim  reeves.", "7", "Jim"], path=path, rewards=["exact_match"]) == [1.0, 1.0, 0.0]


def test_a_program_may_stand_in_the_tag_of_an_answer(tmp_path: Path, programs: list[str]) -> None:
    path = rows_at(tmp_path, {"prompt": "x", "tests": [{"input": "1", "output": "1"}]})
    fenced = "```python\nf()\n```"
    for text in ("So <answer>\nf()\n</answer>", f"<answer>{fenced}</answer>", f"{fenced} <answer>f(1)</answer>", "f()"):
        assert rewards_of([text], path=path, rewards=["program_tests"]) == [1.0]
    assert programs == ["f()"] * 4


def test_a_function_that_changes_its_columns_changes_those_of_its_episode_alone(tmp_path: Path, module: Any) -> None:
    name = module(
        "def pops(prompts, completions, targets, **columns): return [float(each.pop()['n']) for each in targets]\n"
        "def reply(messages, targets): return targets.pop()['n']\n"
    )
    path = rows_at(tmp_path, {"prompt": "x", "targets": [{"n": "1"}, {"n": "2"}]})
    for _ in range(2):
        assert rewards_of(["a", "b"], path=path, rewards=[f"{name}:pops"]) == [2.0, 2.0]
        episode = Episode(make("prompts", path=path, rewards=["length"], reply=f"{name}:reply"), Protocol(), 0)
        assert episode.step("a").user == "2"


def test_a_set_of_values_is_refused(module: Any) -> None:
    name = module("def f(prompts, completions, **columns): return {float(len(c)) for c in completions}\n")
    assert all("returned set, and not a list" in str(told) for told in rewards_of(["aa", "b"], rewards=[f"{name}:f"]))


def test_an_option_may_be_a_date(module: Any) -> None:
    """YAML reads 2024-01-02 as one."""
    name = module("def f(prompts, completions, since, **columns): return [float(since.year)] * len(completions)\n")
    rewards = [{"name": f"{name}:f", "since": datetime.date(2024, 1, 2)}]
    assert rewards_of(["x"], rewards=rewards) == [2024.0]
    with pytest.raises(ValueError, match=r"words, a number of at least 1, not datetime.date"):
        make("prompts", rewards=[{"name": "length", "words": datetime.date(2024, 1, 2)}])
