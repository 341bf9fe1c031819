"""Own prompts and own rewards: what is read, what a reward function is given, and what happens when it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from open_envs import needs_sandbox

from envs import make
from envs.base import LateReward
from envs.episode import Episode
from envs.protocol import Protocol
from envs.web import NoAnswer

Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Module:
    """Write a module of the current folder; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        name = f"own_{abs(hash(request.node.name)) % 10**9}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answer(env: Any, *texts: str, seed: int = 0) -> Episode:
    episode = Episode(env, Protocol.of(env), seed)
    for text in texts:
        episode.step(text)
    return episode


def test_a_prompt_stands_alone_and_the_whole_answer_is_scored(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)])
    env: Any = make("prompts", path=path, system="Be brief.")
    episode = Episode(env, Protocol.of(env), 3)
    system, user = episode.messages
    assert system == {"role": "system", "content": "Be brief."} and user["content"] == env.row["question"]
    turn = episode.step(f"<answer> It is {env.row['answer']}.")
    assert (turn.reward, turn.done, turn.penalty, turn.valid) == (1.0, True, 0.0, True)
    assert episode.success and not episode.failure
    assert not answer(env, "no idea").success and env.step("again")[1] == 0.0, "nothing counts once it is over"


@pytest.mark.parametrize(
    ("row", "options", "prompt", "later"),
    [
        ({"prompt": "a b", "answer": "1"}, {}, "a b", []),
        ({"instruction": "Add.", "input": "1 2", "answer": "1"}, {}, "Add.\n\n1 2", []),
        ({"question": "a", "answer": "1"}, {"template": "Q: {{ question }}?"}, "Q: a?", []),
        ({"x": "a", "question": "b", "answer": "1"}, {"prompt": "x"}, "a", []),
        ({"prompt": [{"role": "user", "content": "a"}], "answer": "1"}, {}, "a", []),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "reference"},
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": "reference"},
                ],
                "answer": "1",
            },
            {},
            "a",
            ["b"],
        ),
    ],
)  # fmt: skip
def test_prompts_of_many_forms(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], prompt: str, later: list[str]
) -> None:
    env = make("prompts", path=write(tmp_path / "rows.jsonl", [row] * 3), **options)
    episode = answer(env, *(["1"] * (1 + len(later))))
    users = [message["content"] for message in episode.messages if message["role"] == "user"]
    assert users == [prompt, *later] and env.max_turns == 1 + len(later)
    assert episode.terminated and episode.success
    assert "reference" not in json.dumps(episode.messages), "answers of the data are not shown to the model"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rewards": ["maths"]}, 'Did you mean "math"'),
        ({"rewards": []}, "prompts needs rewards, a list"),
        ({"rewards": ["missing_module:f"]}, "there is no module missing_module"),
        ({"rewards": [{"name": "length", "word": 3}]}, "no option word"),
        ({"rewards": [{"weight": 3}]}, "is not a reward"),
        ({"prompt": "nothing"}, 'no column "nothing", only question'),
        ({"template": "{{ nothing }}"}, "'nothing' is undefined). The columns are question"),
        ({"path": "no_such_file.jsonl"}, "there is no file no_such_file.jsonl"),
        ({"turns": 3}, "set reply"),
        ({"timeout": 0}, "timeout > 0"),
        ({"on_error": "ignore"}, "Known: skip, stop"),
    ],
)
def test_bad_options_are_told_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        make("prompts", **options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": [{"role": "assistant", "content": "b"}]}])
    with pytest.raises(ValueError, match="row 2 of path="):
        make("prompts", path=path, rewards=["length"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "a", "ans', "line 4 is not JSON: Unterminated string starting at, column 19"),
        ("[1]", "line 4 is not a JSON object {...}"),
        ('{"question": "\xe9"}', "line 4 is not JSON: 'utf-8' codec can't decode byte 0xe9"),
    ],
)
@pytest.mark.parametrize("env", ["prompts", "countdown", pytest.param("deep_coder", marks=needs_sandbox)])
def test_a_broken_line_is_counted_from_one(tmp_path: Path, line: str, words: str, env: str) -> None:
    """In the file, blank lines included, and by all environments that read rows."""
    lines = ['{"question": "a", "nums": [1, 2], "target": 3, "problem": "x"}', "", '{"question": "b"}', line, "{}"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.jsonl") as error:
        make(env, path=str(path))
    assert words in str(error.value) and "line 1" not in str(error.value) and "\n" not in str(error.value)


def test_a_broken_line_in_a_folder_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"question": "a", "answer": "1"}])
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question"\n')
    with pytest.raises(ValueError, match=r"\(train.jsonl: line 2 is not JSON: Expecting ':' delimiter, column 12\)"):
        make("prompts", path=str(tmp_path))


def test_rows_stay_as_they_are_written(tmp_path: Path) -> None:
    """Columns of several types, texts that look like dates; a column that a row lacks is None."""
    rows = [{"question": "a", "answer": "2024-01-01"}, {"question": "b", "answer": 1, "more": {"x": 1}}]
    env: Any = make("prompts", path=write(tmp_path / "rows.jsonl", rows), template="{{ question }} {{ more }}")
    assert env.table.rows == [rows[0] | {"more": None}, rows[1]]


def test_functions_are_called_as_trl_calls_them(tmp_path: Path, module: Module) -> None:
    """prompts, completions and every column, one value for each answer; texts for a text, messages for messages."""
    name = module(
        "seen = []\n"
        "def all_of_it(prompts, completions, **columns):\n"
        "    seen.append((prompts, completions, columns))\n"
        "    return [float(len(c)) for c in completions]\n"
        "def some(completions, prompts, answer, **kwargs):\n"
        "    return [0.5 if a == '2' else None for a in answer]\n"
    )
    rows = [{"prompt": "one", "answer": "1", "tag": ["x"]}, {"prompt": "two", "answer": "2", "tag": []}]
    path = write(tmp_path / "rows.jsonl", rows)
    env_of = lambda: make("prompts", path=path, rewards=[f"{name}:all_of_it", {"name": f"{name}:some", "weight": 2}])  # noqa: E731
    envs = []
    for seed in range(6):
        env = env_of()
        env.late = True
        answer(env, "abc"[: 1 + seed % 3], seed=seed)
        envs.append(env)
    scores = type(envs[0]).score(envs)
    import sys

    ((prompts, completions, columns),) = sys.modules[name].seen
    assert len(prompts) == 6 and completions == ["a", "ab", "abc", "a", "ab", "abc"], "one call for all answers"
    assert set(columns) == {"answer", "tag"} and columns["answer"] == [env.row["answer"] for env in envs]
    for env, score, text in zip(envs, scores, completions, strict=True):
        assert isinstance(score, LateReward)
        parts = {"all_of_it": float(len(text))} | ({"some": 0.5} if env.row["answer"] == "2" else {})
        assert score.parts == parts and score.reward == len(text) + (1.0 if "some" in parts else 0.0)

    chat = write(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}])
    env = make("prompts", path=chat, rewards=[{"name": f"{name}:all_of_it"}])
    assert answer(env, "yo").past[-1].reward == 1.0, "a list of one message"
    assert sys.modules[name].seen[-1][1] == [[{"role": "assistant", "content": "yo"}]]


def test_async_functions_wait_side_by_side(module: Module) -> None:
    name = module(
        "import asyncio\n"
        "both = asyncio.Barrier(2)\n"
        "async def slow(prompts, completions, **kwargs):\n"
        "    await both.wait()\n"
        "    return [1.0] * len(completions)\n"
        "async def other(prompts, completions, **kwargs): return await slow(prompts, completions)\n"
    )
    env = make("prompts", rewards=[f"{name}:slow", f"{name}:other"], timeout=20.0)
    assert answer(env, "x").past[-1].reward == 2.0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('oops')", "raised KeyError: 'oops'"),
        ("return [1.0] * (len(completions) + 1)", "returned 2 values for 1 answers"),
        ("return [float('nan')]", "returned nan, which is not a finite number"),
        ("return ['1']", "returned '1', which is not a finite number"),
        ("return None", "returned NoneType, and not a list"),
        ("return [None]", "no reward function applies"),
        ("import threading; threading.Event().wait()", "it took more than 0.2 s"),
    ],
)
def test_a_function_that_fails_is_named_with_its_row(
    module: Module, capsys: pytest.CaptureFixture[str], body: str, words: str
) -> None:
    name = module(f"def f(prompts, completions, **kwargs):\n    {body}\n")
    env = make("prompts", rewards=[f"{name}:f"], timeout=0.2)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"f|applies") as error:
        answer(env, "x")
    assert words in str(error.value) and time.monotonic() - began < 20
    if "applies" not in words:
        assert f"row {env.level.number + 1}, prompt " in capsys.readouterr().err

    env = make("prompts", rewards=[f"{name}:f"], timeout=0.2, on_error="stop")
    if "applies" not in words:
        with pytest.raises(NoAnswer, match="on_error: skip"):
            answer(env, "x")


def test_one_bad_value_costs_its_own_answer_alone(module: Module) -> None:
    name = module(
        "def f(prompts, completions, **kw): return [1.0 if len(c) < 3 else float('inf') for c in completions]\n"
    )
    envs = []
    for text in ("a", "aaaa", "b"):
        env = make("prompts", rewards=[f"{name}:f"])
        env.late = True
        answer(env, text)
        envs.append(env)
    first, bad, last = type(envs[0]).score(envs)
    assert isinstance(first, LateReward) and isinstance(last, LateReward) and isinstance(bad, ValueError)


def test_a_signature_that_cannot_be_called_is_refused(module: Module) -> None:
    name = module("def f(prompts, completions, solution): return []\ndef g(completions): return []\n")
    for function, words in (
        ("f", "there is no column solution"),
        ("g", "is called as g(prompts, completions, **columns)"),
    ):
        with pytest.raises(ValueError) as error:
            make("prompts", rewards=[f"{name}:{function}"])
        assert words in str(error.value)


def test_a_user_of_your_own_answers_until_it_is_satisfied(module: Module) -> None:
    name = module(
        "def reply(messages, answer, **columns):\n"
        "    return None if messages[-1]['content'] == answer else 'Try again.'\n"
    )
    env: Any = make("prompts", reply=f"{name}:reply", turns=3)
    episode = answer(env, "wrong")
    assert not episode.done and episode.messages[-1] == {"role": "user", "content": "Try again."}
    episode.step(env.row["answer"])
    assert episode.success and episode.turns == 2
    lost = answer(env, "wrong", "wrong", "wrong")
    assert lost.done and not lost.success


def test_splits_of_a_data_set_stay_apart(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split, start in (("train", 0), ("test", 1000)):
        write(
            folder / f"{split}.jsonl", [{"question": f"Is {n} odd?", "answer": "1"} for n in range(start, start + 60)]
        )
    env: Any = make("prompts", path=str(folder))
    seen: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    for split, found in seen.items():
        for seed in range(60):
            env.reset(seed=seed, options={"split": split})
            found.add(env.row["question"])
    assert not seen["train"] & seen["validation"] and not seen["train"] & seen["test"]
    assert all(int(text.split()[1]) >= 1000 for text in seen["test"]), "its own test rows"
    assert all(int(text.split()[1]) < 1000 for text in seen["validation"]), "held out of its training rows"


@pytest.mark.parametrize(
    ("reward", "text", "column", "value"),
    [
        ("math", r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("math", "The answer is 1,234.", "first 1,000 + 234\n#### 1,234", 1.0),
        ("math", "<answer>7</answer> of 9", "7", 1.0),
        ("math", "none", "7", 0.0),
        ("exact_match", " The  cat. ", "the cat", 1.0),
        ("exact_match", "<think>dog</think><answer>cat</answer>", "cat", 1.0),
        ("exact_match", "a cat", "cat", 0.0),
        ("format", "<think>a</think> b", "", 1.0),
        ("format", "a", "", 0.0),
        ("length", "word " * 300, "", -0.5),
        ("length", "word " * 900, "", -1.0),
        ("length", "word", "", 0.0),
        ("repetition", "a b c d a b c d", "", -0.2),
        ("repetition", "a b c", "", 0.0),
    ],
)
def test_built_in_rewards(tmp_path: Path, reward: str, text: str, column: str, value: float) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x", "answer": column}])
    assert answer(make("prompts", path=path, rewards=[reward]), text).past[-1].reward == pytest.approx(value)


def test_programs_are_tested_in_the_sandbox(tmp_path: Path) -> None:
    from envs.deep_coder.sandbox import require

    try:
        require()
    except ValueError as problem:
        pytest.skip(str(problem))
    tests = [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "5"}]
    env = make(
        "prompts", path=write(tmp_path / "rows.jsonl", [{"prompt": "Add.", "tests": tests}]), rewards=["program_tests"]
    )
    episode = answer(env, "Here:\n```python\nprint(sum(map(int, input().split())))\n```")
    assert episode.past[-1].reward == 0.5 and not episode.success


def test_a_hanging_async_function_leaves_the_others_their_values(module: Module) -> None:
    name = module(
        "import asyncio\n"
        "async def hangs(prompts, completions, **kw): await asyncio.Event().wait()\n"
        "async def good(prompts, completions, **kw): return [1.0] * len(completions)\n"
    )
    env = make("prompts", rewards=[f"{name}:good", f"{name}:hangs"], timeout=0.2)
    with pytest.raises(ValueError, match="hangs"):
        answer(env, "x")
