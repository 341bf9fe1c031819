"""Own prompts and own rewards: what is read, what a reward function is given, and what happens when it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from open_envs import needs_sandbox

from envs import make
from envs.base import LateReward, NoLevel
from envs.episode import Episode
from envs.hostile import meet_hostile_text
from envs.promises import Subject
from envs.prompts import TrainerState, rows as rows_module
from envs.prompts.rows import EVERY_COLUMN, Rows, conversation_of, table_of
from envs.protocol import Protocol
from envs.web import NoAnswer

Module = Callable[[str], str]
OF_TRL = ("completion_ids", "trainer_state", "log_metric", "log_extra")


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
        ({"rewards": [{"name": "format", "pattern": "("}]}, "pattern, which is not a regular expression (missing )"),
        ({"rewards": [{"name": "format", "pattern": 5}]}, "pattern, which is not a regular expression"),
        ({"rewards": [{"name": "length", "words": 0}]}, "words, a number of at least 1, not 0"),
        ({"rewards": [{"name": "length", "words": "a"}]}, "words, a number of at least 1, not 'a'"),
        ({"rewards": [{"name": "repetition", "n": 1.5}]}, "n, a number of at least 1, not 1.5"),
        (
            {"rewards": [{"name": "math", "column": "solution"}]},
            "reads the column solution, and the rows have question",
        ),
        ({"rewards": ["program_tests"]}, "reads the column tests"),
        ({"rewards": [{"name": "math", "prompts": 1}]}, "no option prompts"),
        ({"rewards": [{"name": "math", "columns": 1}]}, "no option columns"),
        ({"rewards": [{"name": "math", "weight": float("nan")}]}, "is not a reward"),
        ({"rewards": [{"name": "math", "weight": float("inf")}]}, "is not a reward"),
        ({"rewards": [{"name": "math", "weight": None}]}, "is not a reward"),
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
    ("row", "words"),
    [
        ({"question": 0}, "question is neither a text nor a list of messages with role and content: 0"),
        ({"question": 5}, "question is neither a text nor a list of messages with role and content: 5"),
        ({"prompt": "", "question": ""}, "prompt is neither a text"),
        ({"prompt": None, "answer": "1"}, "it has none of the columns"),
    ],
)
def test_what_a_row_has_in_the_place_of_a_prompt_is_told(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        conversation_of(row, Rows("", None, None, None, None, None))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "a", "ans', "line 4 is not JSON: Unterminated string starting at, column 19"),
        ("[1]", "line 4 is [1], not a JSON object {...}"),
        ('{"question": "\xe9"}', "line 4 is not UTF-8 text (byte 0xe9 at place 15)"),
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
        "def some(completions, prompts, answer, **kwargs):\n"  # the other way round: they are given by keyword
        "    assert prompts[0] in ('one', 'two')\n"
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
    assert set(columns) == {"answer", "tag", *OF_TRL} and columns["answer"] == [env.row["answer"] for env in envs]
    for env, score, text in zip(envs, scores, completions, strict=True):
        assert isinstance(score, LateReward)
        parts = {"all_of_it": float(len(text))} | ({"some": 0.5} if env.row["answer"] == "2" else {})
        assert score.parts == parts and score.reward == len(text) + (1.0 if "some" in parts else 0.0)

    chat = write(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}])
    env = make("prompts", path=chat, rewards=[{"name": f"{name}:all_of_it"}])
    assert answer(env, "yo").past[-1].reward == 1.0, "a list of one message"
    assert sys.modules[name].seen[-1][1] == [[{"role": "assistant", "content": "yo"}]]


TRL = """
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment
cosine, repeated = get_cosine_scaled_reward(max_len=10), get_repetition_penalty_reward(ngram_size=1)
overlong = get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=4)
"""


@pytest.mark.parametrize(
    ("reward", "text", "value"),
    [
        ("trl.rewards:think_format_reward", "<think>a</think>b", 1.0),
        ("trl.rewards:accuracy_reward", r"\boxed{2}", 1.0),
        ("trl.rewards:reasoning_accuracy_reward", r"<think>a</think>\boxed{3}", 0.0),
        ("cosine", r"\boxed{2}", 0.75),
        ("repeated", "x", -0.6),
        ("overlong", "x", -0.75),
    ],
)
def test_rewards_of_trl_run_unchanged(tmp_path: Path, module: Module, reward: str, text: str, value: float) -> None:
    asked = ([{"role": "user", "content": f"{n}: 1 + 1"}] for n in range(8))
    rows = [{"prompt": prompt, "solution": "2", "completion": "x", "completion_ids": 1} for prompt in asked]
    name = module(TRL)
    path = write(tmp_path / "rows.jsonl", rows)
    env: Any = make("prompts", path=path, rewards=[reward if ":" in reward else f"{name}:{reward}"])
    env.late = True
    answer(env, text)
    env.completion_ids = [7, 8, 7, 7, 7]
    (score,) = env.score([env])
    assert score.reward == pytest.approx(value), score


def test_what_trl_gives_beside_columns(module: Module) -> None:
    name = module(
        "def f(prompts, completions, completion_ids, trainer_state, log_metric, log_extra=None):\n"
        "    log_metric('share', 0.5)\n"
        "    log_extra('length', [len(ids) for ids in completion_ids])\n"
        "    return [trainer_state.global_step / trainer_state.max_steps + len(ids) for ids in completion_ids]\n"
    )
    env: Any = make("prompts", rewards=[f"{name}:f"])
    assert answer(env, "four").past[-1].reward == 1 + 4, "the bytes of the text, where no model of ours wrote"
    env.late, env.trainer_state = True, TrainerState(1, 4)
    answer(env, "four")
    env.completion_ids = [7, 8]
    assert [score.reward for score in env.score([env])] == [2.25]


def test_two_rewards_with_one_name_are_told_apart(tmp_path: Path, module: Module) -> None:
    name = module("def f(prompts, completions, **kw): return [1.0] * len(completions)\nclass g:\n    f = f\n")
    other = f"other_{name}"
    (tmp_path / f"{other}.py").write_text("def f(prompts, completions, **kw): return [0.0] * len(completions)\n")
    patterns = [{"name": "format", "pattern": pattern, "weight": 4} for pattern in ("x+", "y")]
    env: Any = make("prompts", rewards=[f"{name}:f", {"name": f"{other}:f", "weight": 2}, *patterns])
    env.late = True
    answer(env, "xx")
    (score,) = env.score([env])
    assert score.parts == {f"{name}.f": 1.0, f"{other}.f": 0.0, "format": 1.0, "format_2": 0.0} and score.reward == 5


def test_what_a_module_keeps_is_good_for_the_next_call(module: Module) -> None:
    name = module(
        "import asyncio\n"
        "turn = asyncio.Semaphore(1)\n"
        "async def one(text):\n"
        "    async with turn:\n"
        "        await asyncio.sleep(0.001)\n"
        "    return 1.0\n"
        "async def f(completions, **kw):\n"
        "    return await asyncio.gather(*map(one, completions * 3))\n"
        "class Object:\n"
        "    async def __call__(self, prompts, completions, scale=1.0, **kw):\n"
        "        return [scale * value for value in (await f(completions))[:1]]\n"
        "g, made = (lambda **kw: Object()(**kw)), Object()\n"
    )
    rewards = [f"{name}:g", f"{name}:made", {"name": f"{name}:made", "scale": 2.0}]
    env = make("prompts", rewards=rewards, timeout=20.0)
    for _ in range(2):
        assert answer(env, "x").past[-1].reward == 4.0


@pytest.mark.parametrize(
    "values",
    [
        "np.ones(1)",
        "torch.ones(1)",
        "(1.0 for _ in range(1))",
        "(1.0,)",
        "[np.float32(1)]",
        "[True]",
        "map(float, [1])",
    ],
)
def test_values_may_be_any_iterable(module: Module, values: str) -> None:
    name = module(f"import numpy as np\nimport torch\ndef f(completions, **kw): return {values}\n")
    assert answer(make("prompts", rewards=[f"{name}:f"]), "x").past[-1].reward == 1.0


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
        ("class Silent(Exception): __str__ = None\n    raise Silent", "raised Silent: (without words"),
        ("class Odd: __float__ = __repr__ = lambda self: 1 / 0\n    return [Odd()]", "returned Odd, which is not a"),
        ("raise TimeoutError", "raised TimeoutError: "),
        ("return [1.0] * (len(completions) + 1)", "returned 2 values for 1 answers"),
        ("return [float('nan')]", "returned nan, which is not a finite number"),
        ("return ['1']", "returned '1', which is not a finite number"),
        ("return ['one']", "returned 'one', which is not a finite number"),
        ("async def one(): return 1.0\n    return [one()]", "returned coroutines: await them"),
        ("return None", "returned NoneType, and not a list"),
        ("return {'a': 1.0}", "returned dict, and not a list"),
        ("return (1 / 0 for _ in completions)", "raised ZeroDivisionError"),
        ("import itertools; return itertools.repeat(threading.Event().wait())", "it took more than 0.2 s"),
        ("return [None]", "no reward function applies"),
        ("threading.Event().wait()", "it took more than 0.2 s"),
    ],
)
def test_a_function_that_fails_is_named_with_its_row(
    module: Module, capsys: pytest.CaptureFixture[str], body: str, words: str
) -> None:
    name = module(f"import threading\ndef f(prompts, completions, **kwargs):\n    {body}\n")
    env = make("prompts", rewards=[f"{name}:f"], timeout=0.2)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"f|applies") as error:
        answer(env, "x")
    assert words in str(error.value) and time.monotonic() - began < 20
    assert f"row {env.level.number + 1}, prompt " in capsys.readouterr().err

    env = make("prompts", rewards=[f"{name}:f"], timeout=0.2, on_error="stop")
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
    name = module(
        "def f(prompts, completions, solution): return []\ndef g(completions): return []\n"
        "def h(prompts, completions, /, **kw): return []\n"
    )
    for function, words in (
        ("h", "it has the parameters (prompts, completions, /, **kw)"),
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


def test_a_column_with_the_name_of_a_parameter_is_left_out(tmp_path: Path, module: Module) -> None:
    name = module(
        "def reply(messages, **columns): return f'{len(messages)} {sorted(columns)}'\n"
        "def few(said, answer): return answer\n"
        "class Object:\n"
        "    def __call__(self, messages, **columns): return f'{len(messages)} {sorted(columns)}'\n"
        "made = Object()\n"
    )
    turns = [{"role": "user", "content": "a"}]
    path = write(tmp_path / "rows.jsonl", [{"messages": turns, "answer": "1", "self": "x", "said": "y"}])
    for function, said in (
        ("reply", "2 ['answer', 'said', 'self']"),
        ("few", "1"),
        ("made", "2 ['answer', 'said']"),
    ):
        assert answer(make("prompts", path=path, reply=f"{name}:{function}"), "b").messages[-1]["content"] == said


def test_a_reply_that_cannot_be_called_is_told_at_the_start(module: Module) -> None:
    name = module("def short(): return 'a'\ndef f(messages, mood): return 'a'\ntext = 'a'\n")
    for function, words in (
        ("short", "has the parameters () and cannot be called"),
        ("f", "(missing a required argument: 'mood'). It is called with (messages, **columns), and the columns are"),
        ("text", "is not a function"),
        ("absent", "has no absent"),
    ):
        with pytest.raises(ValueError) as error:
            make("prompts", reply=f"{name}:{function}")
        assert words in str(error.value) and f"reply={name}:{function}" in str(error.value)


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


def test_a_small_split_beside_a_large_one_is_found_by_every_seed(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"question": f"What is {n} + 1?", "answer": "1"} for n in range(4_000)])
    write(tmp_path / "test.jsonl", [{"question": f"Is {n} odd?", "answer": "1"} for n in range(2)])
    env: Any = make("prompts", path=str(tmp_path))
    seen: list[str] = []
    for seed in range(60):
        env.reset(seed=seed, options={"split": "test"})
        seen.append(env.row["question"])
    assert set(seen) == {f"Is {n} odd?" for n in range(2)}


def test_which_row_a_seed_draws(tmp_path: Path) -> None:
    """Evaluations that are repeated play the rows that they played."""
    path = write(tmp_path / "rows.jsonl", [{"question": f"What is {n}?", "answer": "1"} for n in range(200)])
    env: Any = make("prompts", path=path)
    for split in ("train", "validation", "test"):
        for seed in range(20):
            rng = np.random.default_rng([seed, 0])
            numbers = iter(lambda rng=rng: int(rng.integers(200)), -1)
            env.reset(seed=seed, options={"split": split})
            assert env.level.number == next(n for n in numbers if env.table.splits[n] == split)


def test_a_split_without_rows_is_told_with_those_of_the_others(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"question": f"Is {n} odd?", "answer": "1"} for n in range(30)])
    with pytest.raises(NoLevel, match="rows 0 are for training, 0 for validation and 30 for the test"):
        make("prompts", path=str(tmp_path)).reset(seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {"system": "Be brief."},
        {"system": "Be long."},
        {"template": "{{ question }}"},
        {"template": "Think. {% if question %}{{ question }}{% endif %}", "system": "Be brief."},
        {"template": "{{ question }} Hint: {{ hint }}", "prompt": "question"},
    ],
)
def test_rows_stay_in_their_split_whatever_the_words_around_them(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "hint": str(n)} for n in range(60)]
    path = write(tmp_path / "rows.jsonl", rows)
    plain, other = (
        table_of(Rows(path, None, None, *(given.get(name) for name in ("prompt", "template", "system"))))
        for given in ({}, options)
    )
    assert set(plain.splits) == {"train", "validation", "test"} and other.splits == plain.splits


def rows_of(path: str, **options: Any) -> Rows:
    return Rows(path, None, None, *(options.get(name) for name in ("prompt", "template", "system")))


@pytest.mark.parametrize(
    ("row", "options", "splits", "key"),
    [
        (
            lambda n: {"question": f"What is {n} + 1?", "answer": str(n + 1)},
            {},
            ".tvt...........tt...t..t",
            "What is 0 + 1?",
        ),
        (lambda n: {"instruction": "Add 1.", "input": str(n), "id": n}, {}, ".............t..v.....tt", "Add 1.\n\n0"),
        (
            lambda n: {
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Is {n} odd?"}],
                "id": n,
            },
            {},
            "v....t...v.t.....t......",
            "Be brief.\nIs 0 odd?",
        ),
        (
            lambda n: {
                "messages": [
                    {"role": "user", "content": f"{n}?"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": "Sure?"},
                ]
            },
            {},
            "........v...............",
            "0?\nSure?",
        ),
        (
            lambda n: {"question": f"{n}?", "hint": n, "answer": "1"},
            {"template": "{{ question }} {{ hint }}"},
            "..t.....tt.t....t....tt.",
            "0? 0",
        ),
        (
            lambda n: {"seed": n, "answer": "1"},
            {"prompt": "seed", "template": "Play."},
            "vt......v...t..........t",
            "Play.",
        ),
    ],
)  # fmt: skip
def test_splits_and_keys_of_prompts_stay_what_they_were(
    tmp_path: Path, row: Callable[[int], dict[str, Any]], options: dict[str, Any], splits: str, key: str
) -> None:
    """Results of former runs are about these rows. `.` is train, v validation, t the test."""
    path = write(tmp_path / "rows.jsonl", [row(n) for n in range(24)])
    env: Any = make("prompts", path=path, rewards=["length"], **options)
    for table in (table_of(rows_of(path, **options)), env.table):
        assert "".join("." if split == "train" else split[0] for split in table.splits) == splits
        assert table.keys[0] == key


def test_rows_of_one_prompt_are_told_where_a_split_has_none(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "Play.", "answer": str(n)} for n in range(200)])
    with pytest.raises(NoLevel, match="200 rows that are to be divided all have the same prompt, so they are in one"):
        for split in ("train", "validation", "test"):
            make("prompts", path=path).reset(seed=1, options={"split": split})
    with pytest.raises(NoLevel, match="Add rows for training"):
        for split in ("train", "validation", "test"):
            make("prompts", path=write(tmp_path / "one.jsonl", [{"question": "Play.", "answer": "1"}])).reset(
                seed=1, options={"split": split}
            )


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        (("train",), "Add rows for training: a tenth of them is for validation and a tenth for the test."),
        (("train", "validation", "test"), "Add rows to its validation split or to its test split."),
        (("train", "validation"), "Add rows to its validation split or for training: a tenth of them is for the test."),
        (("train", "test"), "Add rows to its test split or for training: a tenth of them is for validation."),
        (("validation", "test"), "Add rows to its validation split, to its test split or for training."),
    ],
)
def test_more_rows_are_asked_for_where_a_split_takes_them_from(
    tmp_path: Path, splits: tuple[str, ...], words: str
) -> None:
    """Rows for training are divided, unless the source has a split of its own."""
    for number, split in enumerate(splits):
        write(tmp_path / f"{split}.jsonl", [{"question": f"{number} + {n}?", "answer": "1"} for n in range(30)])
    assert make("prompts", path=str(tmp_path)).more_levels.endswith(f" for the test. {words}")


def test_rows_of_one_prompt_are_no_problem_where_nothing_is_divided(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write(tmp_path / f"{split}.jsonl", [{"question": "Play.", "answer": str(n)} for n in range(30)])
    assert make("prompts", path=str(tmp_path)).more_levels.endswith(
        "Add rows to its validation split or to its test split."
    )


REPOSITORIES = [{"task": "Make the tests pass.", "repo": f"r{n}"} for n in range(300)]


def test_tasks_of_a_program_with_one_prompt_are_levels_of_their_own(tmp_path: Path) -> None:
    """The program reads the row in its command and on stdin."""
    for name, command in (("a", ["python", "agent.py", "{{ repo }}"]), ("b", ["python", "agent.py"])):
        path = write(tmp_path / f"{name}.jsonl", REPOSITORIES)
        env: Any = make("prompts", path=path, prompt="task", agent=command, rewards=["length"])
        assert len(set(env.table.keys)) == 300
        assert all(20 < env.table.splits.count(split) < 45 for split in ("validation", "test"))
        env.reset(seed=1)
        assert env.level_key() == env.table.keys[env.level.number] and env.level_key().startswith("Make the tests")
        with pytest.raises(ValueError, match="none of the columns prompt"):
            make("prompts", path=path, rewards=["length"])


def test_what_is_no_json_makes_the_same_level_in_each_process() -> None:
    first, second, third = (
        conversation_of({"prompt": "a", "seen": seen}, Rows("", None, None, None, None, None, EVERY_COLUMN))
        for seen in (object(), object(), b"other")
    )
    assert first.key == second.key != third.key


def test_a_program_needs_no_prompt(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}, {"input": [0, 2]}]
    rows += [{"question": "Which?"}, {"instruction": "Add.", "input": "1"}, {"messages": "a"}]
    for number, row in enumerate(rows):
        path = write(tmp_path / f"{number}.jsonl", [row | {"repo": "r", "number": n} for n in range(60)])
        env: Any = make("prompts", path=path, agent=["python", "{{ repo }}"], rewards=["length"])
        env.reset(seed=1)
        assert env.messages() == [{"role": "user", "content": ""}] and len(set(env.table.keys)) == 60
    with pytest.raises(ValueError, match='no column "task", only messages, repo'):
        make("prompts", path=path, prompt="task", agent=["python"], rewards=["length"])


@pytest.mark.parametrize(
    "options",
    [
        {"system": "Be brief."},
        {"template": "{{ question }}"},
        {"template": "{{ question }} {{ hint }}", "prompt": "question"},
    ],
)
def test_tasks_of_a_program_stay_in_their_split_whatever_the_words_around_them(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    rows = [{"question": "Do it.", "hint": str(n), "system": f"You are {n % 7}."} for n in range(60)]
    path = write(tmp_path / "rows.jsonl", [{**row, "number": n} for n, row in enumerate(rows)])
    agent: Any = {"agent": ["python"], "rewards": ["length"], "prompt": "question"}
    plain: Any
    other: Any
    plain, other = (make("prompts", path=path, **(agent | given)) for given in ({}, options))
    assert set(plain.table.splits) == {"train", "validation", "test"} and other.table.splits == plain.table.splits


def test_system_messages_that_a_program_reads_tell_levels_apart(tmp_path: Path) -> None:
    for name in ("system", "system_prompt"):
        path = write(tmp_path / f"{name}.jsonl", [{name: f"s{n}"} for n in range(200)])
        env: Any = make("prompts", path=path, agent=["python"], rewards=["length"])
        assert len(set(env.table.keys)) == 200 and set(env.table.splits) == {"train", "validation", "test"}


def test_a_question_under_two_system_messages_is_in_one_split(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "system": who} for n in range(40) for who in ("Be brief.", "Be long.")]
    table = table_of(Rows(write(tmp_path / "rows.jsonl", rows), None, None, None, None, None))
    assert table.splits[::2] == table.splits[1::2] and table.keys[0] != table.keys[1]


def test_many_sections_read_their_rows_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = rows_module.read_rows
    monkeypatch.setattr(rows_module, "read_rows", lambda source: reads.append(source.path) or read(source))
    paths = [write(tmp_path / f"{n}.jsonl", [{"prompt": "a", "answer": "1"}]) for n in range(12)]
    for path in paths * 2:
        make("prompts", path=path)
    assert reads == paths


def test_own_rewards_may_be_won_with_any_text(tmp_path: Path) -> None:
    options = {"rewards": ["length"], "success": 0.0}
    subject = Subject("prompts", options, Protocol.of(make("prompts", **options)))
    met = list(meet_hostile_text(subject, str(tmp_path / "marker")))
    assert len(met) > 20 and not [event for event in met if "broken" in event]


def test_a_template_that_raises_is_named_with_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": 1, "answer": "1"}, {"question": "a", "answer": "1"}])
    with pytest.raises(ValueError, match=r"row 2 of path=.*: the template cannot be filled \(TypeError: can only conc"):
        make("prompts", path=path, template="{{ question + 1 }}")


def test_without_the_column_of_the_split_a_template_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "a", "answer": "1"}])
    with pytest.raises(ValueError, match='no column "prmpt", only question'):
        make("prompts", path=path, template="{{ question }}", prompt="prmpt")


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


def test_a_pattern_that_takes_too_long_costs_its_own_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.prompts.rewards.MATCH_SECONDS", 0.2)
    envs = []
    for text in ("a", "a" * 60 + "b"):
        env: Any = make("prompts", rewards=[{"name": "format", "pattern": "(a|aa)+"}], timeout=20.0)
        env.late = True
        answer(env, text)
        envs.append(env)
    first, late = env.score(envs)
    assert first.reward == 1.0 and "the pattern took more than 0.2 s" in str(late)


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
ASKED = {"role": "assistant", "content": None, "tool_calls": CALLS}


def test_calls_and_parts_in_a_prompt_are_kept(tmp_path: Path) -> None:
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]},
        ASKED,
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add", "tool_calls": None},
        {"role": "user", "content": "c", "name": "Bob"},
    ]
    env = make("prompts", path=write(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "1"}] * 3))
    assert answer(env).messages == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize(("given", "read"), [("developer", "system"), ("human", "user"), ("gpt", "assistant")])
def test_other_names_of_roles_are_those_of_phases_1_and_2(tmp_path: Path, given: str, read: str) -> None:
    rows = [{"prompt": [{"role": given, "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"}]
    env = make("prompts", path=write(tmp_path / "rows.jsonl", rows * 3))
    assert answer(env).messages == [{"role": read, "content": "a"}, {"role": "user", "content": "b"}]


def test_a_message_of_a_developer_does_not_count_for_the_split(tmp_path: Path) -> None:
    own = [[{"role": "user", "content": f"Is {n} odd?"}] for n in range(40)]
    path = write(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in own])
    said = [{"role": "developer", "content": "Be brief."}]
    other = write(tmp_path / "other.jsonl", [{"prompt": said + prompt} for prompt in own])
    plain, led = (table_of(Rows(each, None, None, None, None, None)) for each in (path, other))
    assert set(plain.splits) == {"train", "validation", "test"} and led.splits == plain.splits


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "user", "content": "a", "tool_calls": CALLS},
        {"role": "assistant", "content": "", "tool_calls": [{"name": 1}]},
        {"role": "assistant", "content": "", "tool_calls": "add(1)"},
        {"role": "user", "content": [{"type": "image", "image": "x"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"content": "a"},
        {"role": "critic", "content": "a"},
        {"role": ["user"], "content": "a"},
        "a",
    ],
)
def test_messages_that_cannot_be_read_are_refused(tmp_path: Path, message: Any) -> None:
    rows = [{"prompt": [message, {"role": "user", "content": "a"}], "answer": "1"}]
    with pytest.raises(ValueError, match=r"row 1 of path=.*prompt is neither a text nor a list of messages"):
        make("prompts", path=write(tmp_path / "rows.jsonl", rows))


def test_half_a_character_is_told_with_its_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b\ud83d", "answer": "1"}]
    with pytest.raises(ValueError, match=r"row 2 of path=.*half a character, '\\ud83d'"):
        make("prompts", path=write(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize(
    ("row", "options", "systems"),
    [
        ({"prompt": "a", "system": "Be brief."}, {}, ["Be brief."]),
        ({"prompt": "a", "system_prompt": "Be brief.", "system": None}, {}, ["Be brief."]),
        ({"prompt": "a", "system": " "}, {}, []),
        ({"prompt": "a", "system": "Be brief."}, {"system": "Be long."}, ["Be long."]),
        ({"prompt": "a", "system": "Be brief."}, {"template": "{{ prompt }}"}, []),
        ({"messages": [{"role": "user", "content": "a"}], "system": "Be brief."}, {}, ["Be brief."]),
    ],
)
def test_a_column_may_hold_the_system_message(row: dict[str, Any], options: dict[str, Any], systems: list[str]) -> None:
    names = ("prompt", "template", "system")
    prompt = conversation_of(row, Rows("", None, None, *(options.get(name) for name in names))).prompt
    assert [message["content"] for message in prompt if message["role"] == "system"] == systems


def test_rows_whose_tests_cannot_be_read_cost_their_own_answers_alone(tmp_path: Path) -> None:
    from envs.deep_coder.sandbox import require

    try:
        require()
    except ValueError as problem:
        pytest.skip(str(problem))
    tests = [{"input": "1", "output": "1"}]
    columns = {"a": tests, "b": json.dumps(tests), "c": [{"in": "1"}], "d": "[{", "e": [{"input": 1, "output": 1}]}
    path = write(tmp_path / "rows.jsonl", [{"prompt": name, "tests": column} for name, column in columns.items()])
    envs: dict[str, Any] = {}
    for seed in range(200):
        env: Any = make("prompts", path=path, rewards=["program_tests"])
        env.late = True
        answer(env, "```python\nprint(input())\n```", seed=seed)
        envs[env.row["prompt"]] = env
    names = sorted(envs)
    scores = dict(zip(names, env.score([envs[name] for name in names]), strict=True))
    good = {name: score.reward for name, score in scores.items() if isinstance(score, LateReward)}
    assert good == dict.fromkeys([name for name in names if name in "ab"], 1.0) and len(names) > len(good)
    assert all("tests is not a list of" in str(scores[name]) for name in names if name not in good)


def test_a_hanging_async_function_leaves_the_others_their_values(module: Module) -> None:
    name = module(
        "import asyncio\n"
        "async def hangs(prompts, completions, **kw): await asyncio.Event().wait()\n"
        "async def good(prompts, completions, **kw): return [1.0] * len(completions)\n"
    )
    env = make("prompts", rewards=[f"{name}:good", f"{name}:hangs"], timeout=0.2)
    with pytest.raises(ValueError, match="hangs"):
        answer(env, "x")
