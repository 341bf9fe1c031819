"""Does an environment that was written for TRL's `environment_factory` run unchanged in `prompts`?"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import envs
from envs.adapters.trl import environment, rows
from envs.base import LateReward, NoLevel, TextEnv
from envs.episode import Episode
from envs.protocol import Protocol
from envs.tools import Call


class Counter:
    """Count to a target."""

    def __init__(self) -> None:
        self.value = self.target = 0

    def reset(self, target: int, **row: Any) -> str | None:
        self.value, self.target = 0, target
        return f" Count to {target}."

    def count(self, by: int) -> str:
        """Count on.

        Args:
            by: how far
        """
        self.value += by
        return str(self.value)

    def _secret(self) -> None: ...


class Judge(Counter):
    async def get_reward(self) -> float:
        return float(self.value == self.target)


class Fragile(Counter):
    def get_reward(self) -> float:
        if not self.value:
            raise RuntimeError("nothing was counted")
        return 1.0


class FragileJudge(Fragile):
    async def get_reward(self) -> float:
        return super().get_reward()


class Leaving(Counter):
    def get_reward(self) -> float:
        if not self.value:
            raise SystemExit("nothing was counted")
        return 1.0


class Waiting(Counter):
    together: asyncio.Barrier  # which none passes alone

    async def get_reward(self) -> float:
        await Waiting.together.wait()
        if self.value == 0:
            raise SystemExit("no reward")
        if self.value == 1:
            raise RuntimeError("nothing")
        return float(self.value)


class Parts(Counter):
    def reset(self, **row: Any) -> Any:
        return [{"type": "text", "text": " Count"}, {"type": "text", "text": " to 3."}]


class Silent(Counter):
    def reset(self, **row: Any) -> str | None:
        return None


class Odd(Counter):
    def reset(self, **row: Any) -> Any:
        return 5


class Untyped(Counter):
    def wait(self, seconds):
        """Wait.

        Args:
            seconds: how long
        """


class Stones(Counter):
    def reset(self, stones: list[str], **row: Any) -> str | None:
        self.stones = stones
        return None

    def take(self) -> str:
        """Take a stone."""
        return self.stones.pop()

    def get_reward(self) -> float:
        return float(len(self.stones))


def near(prompts: list[Any], completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
    assert all(isinstance(each, list) for each in [*prompts, *completions])
    return [1.0 - abs(each.target - each.value) / 10 for each in environments]


def opened(tmp_path: Path, kind: str, **options: Any) -> TextEnv:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Hello {n}.", "target": 3}) + "\n" for n in range(40)))
    return envs.make("prompts", path=str(path), environment=f"{__name__}:{kind}", **options)


def count(episode: Episode, by: int) -> Any:
    return episode.call("text", "", [Call("count", {"by": by})])


def test_a_result_names_the_call_that_it_answers(tmp_path: Path) -> None:
    episode = Episode(opened(tmp_path, "Judge"), Protocol(), 1, "train")
    turn = episode.call("text", "", [Call("count", {"by": 1}, id="q1w2e3r4t"), Call("count", {"by": 2})])
    assert [result.get("tool_call_id") for result in turn.results] == ["q1w2e3r4t", None]


def test_methods_are_tools_and_the_environment_gives_its_reward(tmp_path: Path) -> None:
    both = [Episode(opened(tmp_path, "Judge"), Protocol(), seed, "train") for seed in (1, 2)]
    assert [tool.name for tool in both[0].env.tools] == ["count"]
    assert all(episode.messages[-1]["content"].endswith(". Count to 3.") for episode in both)
    assert [count(both[0], by).results[0]["content"] for by in (1, 2)] == ["1", "3"]
    assert count(both[1], 1).results[0]["content"] == "1"
    assert [episode.step("Done.").reward for episode in both] == [1.0, 0.0]
    assert [episode.success for episode in both] == [True, False]
    again = both[0].env
    assert count(Episode(again, Protocol(), 5, "train"), 1).results[0]["content"] == "1" and len(again.tools) == 1


def test_reward_functions_are_given_environments(tmp_path: Path) -> None:
    episode = Episode(opened(tmp_path, "Judge", rewards=[f"{__name__}:near"]), Protocol(), 1, "train")
    count(episode, 2)
    assert episode.step("Done.").reward == pytest.approx(0.9)
    answered: Any = episode.env
    assert [message["role"] for message in answered.answered.completion] == ["assistant", "tool", "assistant"]
    assert answered.answered.completion[0]["tool_calls"][0]["function"] == {"name": "count", "arguments": {"by": 2}}


@pytest.mark.parametrize("kind", ["Fragile", "FragileJudge", "Leaving"])
def test_an_environment_that_raises_costs_its_own_answer_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    episodes = [Episode(opened(tmp_path, kind), Protocol(), seed, "train") for seed in (1, 2, 3)]
    for number, episode in enumerate(episodes):
        episode.env.late = True
        count(episode, number % 2)
        episode.step("Done.")
    first, second, third = type(episodes[0].env).score([episode.env for episode in episodes])
    assert isinstance(first, ValueError) and isinstance(third, ValueError) and isinstance(second, LateReward)
    assert second.parts == {kind: 1.0} and re.search("(RuntimeError|SystemExit): nothing was counted", str(first))
    assert f"row {episodes[0].env.level.number + 1} and 1 more" in capsys.readouterr().err


class Scored(Counter):
    def __init__(self, reward: float) -> None:
        super().__init__()
        self.reward = reward

    def get_reward(self) -> float:
        return self.reward


def scored() -> Scored:
    return Scored(0.25)


half = functools.partial(Scored, reward=0.5)


@pytest.mark.parametrize(("kind", "reward"), [("scored", 0.25), ("half", 0.5)])
def test_anything_that_makes_an_environment_is_one(tmp_path: Path, kind: str, reward: float) -> None:
    """A function or a partial, as TRL's environment_factory takes them."""
    env: Any = opened(tmp_path, kind)
    for seed in (1, 2):
        episode = Episode(env, Protocol(), seed, "train")
        assert episode.messages[-1]["content"].endswith(". Count to 3.")
        assert count(episode, 1).results[0]["content"] == "1", "each episode has an instance of its own"
        assert episode.step("Done.").reward == reward and env.rewards[0].title == "Scored"


class Narrow(Counter):
    def reset(self, target: int) -> str | None:  # no **row
        return super().reset(target)


class Demanding(Counter):
    def reset(self, target: int, level: int, **row: Any) -> str | None:
        return None


def test_reset_is_given_the_columns_that_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Hello {n}.", "target": 3, "self": 1}) + "\n" for n in range(40)))
    for kind in ("Judge", "Narrow"):
        env = envs.make("prompts", path=str(path), environment=f"{__name__}:{kind}", rewards=["length"])
        assert Episode(env, Protocol(), 1, "train").messages[-1]["content"].endswith(". Count to 3.")


def test_async_rewards_of_environments_are_awaited_side_by_side(tmp_path: Path) -> None:
    episodes = [Episode(opened(tmp_path, "Waiting", timeout=20.0), Protocol(), seed, "train") for seed in range(4)]
    Waiting.together = asyncio.Barrier(len(episodes))
    for number, episode in enumerate(episodes):
        episode.env.late = True
        count(episode, number)
        episode.step("Done.")
    first, second, *others = type(episodes[0].env).score([episode.env for episode in episodes])
    assert isinstance(first, ValueError) and "SystemExit: no reward" in str(first)
    assert isinstance(second, ValueError)
    assert [each.reward for each in others if isinstance(each, LateReward)] == [2.0, 3.0]


def test_what_an_environment_does_to_its_row_is_of_its_own_episode_alone(tmp_path: Path) -> None:
    path = tmp_path / "stones.jsonl"
    path.write_text(json.dumps({"prompt": "Take one.", "stones": ["a", "b"]}) + "\n")
    env_of = lambda: envs.make("prompts", path=str(path), environment=f"{__name__}:Stones")  # noqa: E731
    both = [Episode(env_of(), Protocol(), 1, "train") for _ in range(2)]  # of one group
    for episode in both:
        assert [result["content"] for result in episode.call("text", "", [Call("take", {})]).results] == ["b"]
    assert [episode.step("Done.").reward for episode in both] == [1.0, 1.0]
    assert Episode(both[0].env, Protocol(), 2, "train").step("Done.").reward == 2.0, "a later episode"


def test_an_episode_makes_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(Counter, "__init__", lambda self: made.append(1))
    env = opened(tmp_path, "Judge")
    assert Episode(env, Protocol(), 1, "train").env.tools and len(made) == 1
    assert Episode(env, Protocol(), 2, "train").env.tools and len(made) == 2


def test_what_reset_says(tmp_path: Path) -> None:
    plain = Episode(opened(tmp_path, "Silent", rewards=["length"]), Protocol(), 1, "train")
    assert plain.messages[-1]["content"].startswith("Hello") and plain.messages[-1]["content"].endswith(".")
    parts = Episode(opened(tmp_path, "Parts", rewards=["length"]), Protocol(), 1, "train")
    assert parts.messages[-1]["content"].endswith(". Count to 3.")
    with pytest.raises(ValueError, match="reset returned 5"):
        Episode(opened(tmp_path, "Odd", rewards=["length"]), Protocol(), 1, "train")


Lake = environment("frozen_lake", size=4)


def saved(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_levels_of_this_project_for_trl_are_levels_here_as_well(tmp_path: Path) -> None:
    """All of their rows have one prompt: what is played stands in other columns."""
    path = saved(tmp_path / "lake.jsonl", [dict(row) for row in rows("frozen_lake", 200)])
    env: Any = envs.make("prompts", path=path, environment=f"{__name__}:Lake")
    assert len(set(env.table.keys)) == 200
    assert all(len(numbers) > 10 for numbers in env.table.numbers.values())
    drawn = {split: [Episode(env, Protocol(), seed, split) for seed in range(9)] for split in env.table.numbers}
    assert all(len({episode.level_key for episode in episodes}) > 3 for episodes in drawn.values())
    assert "calls of act" in drawn["test"][0].messages[-1]["content"]


def test_the_splits_of_a_folder_have_as_many_levels_as_rows(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "validation", "test")):
        found = rows("frozen_lake", 30, split, first=100 * number)
        saved(tmp_path / f"{split}.jsonl", [dict(row) for row in found])
    env: Any = envs.make("prompts", path=str(tmp_path), environment=f"{__name__}:Lake")
    assert [len(env.table.numbers[split]) for split in ("train", "validation", "test")] == [30, 30, 30]
    assert len(set(env.table.keys)) == 90


def test_a_template_beside_an_environment_leaves_its_rows_apart(tmp_path: Path) -> None:
    path = saved(tmp_path / "seeds.jsonl", [{"seed": n} for n in range(60)])
    options = {"path": path, "environment": f"{__name__}:Lake"}
    env: Any = envs.make("prompts", prompt="seed", template="Play the game.", **options)
    assert len(set(env.table.keys)) == 60 and set(env.table.splits) == {"train", "validation", "test"}


def test_an_environment_needs_no_prompt(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": ""}]  # as TRL fills it in where there is no data set
    given: list[dict[str, Any]] = [{}, {"prompt": None}, {"prompt": ""}, {"prompt": asked}, {"problem": 3}]
    given += [{"prompt": []}, {"prompt": " "}, {"input": [0, 1]}, {"query": [0], "input": [{"x": 0}]}]
    given += [{name: "Read me."} for name in ("question", "problem", "query", "input", "instruction", "messages")]
    given += [{"messages": [1]}, {"messages": [{"content": "a"}]}, {"messages": []}]
    for number, row in enumerate(given):
        path = saved(tmp_path / f"{number}.jsonl", [row | {"target": n} for n in range(60)])
        env: Any = envs.make("prompts", path=path, environment=f"{__name__}:Judge")
        episode = Episode(env, Protocol(), 1, "train")
        assert episode.messages == [{"role": "user", "content": f" Count to {env.row['target']}."}]
        assert len(set(env.table.keys)) == 60 and set(env.table.splits) == {"train", "validation", "test"}
    path = saved(tmp_path / "led.jsonl", [{"system": "Be brief.", "target": n} for n in range(60)])
    led = Episode(envs.make("prompts", path=path, environment=f"{__name__}:Judge"), Protocol(), 1, "train")
    assert [message["role"] for message in led.messages] == ["system", "user"]


def test_messages_that_are_damaged_are_refused_beside_an_environment(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "usr", "content": "Count."}], "target": n} for n in range(60)]
    with pytest.raises(ValueError, match="messages is neither a text nor a list of messages"):
        envs.make("prompts", path=saved(tmp_path / "rows.jsonl", rows), environment=f"{__name__}:Judge")


class Unasked(Counter):
    def reset(self) -> None: ...


def test_a_column_that_may_be_the_prompt_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "rows.jsonl", [{"question": f"q{n}"} for n in range(60)])
    options: dict[str, Any] = {"environment": f"{__name__}:Unasked", "rewards": ["length"]}
    with pytest.raises(NoLevel, match="No column is read as the prompt; to name one: prompt: question"):
        envs.make("prompts", path=path, **options).reset(seed=0, options={"split": "test"})
    named: Any = envs.make("prompts", path=path, prompt="question", **options)
    assert len(set(named.table.keys)) == 60


def test_more_of_the_rows_are_asked_for_where_few_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "rows.jsonl", [{"prompt": f"q{n}", "target": n} for n in range(60)])
    env: Any = envs.make("prompts", path=path, rows=5, environment=f"{__name__}:Judge")
    assert env.more_levels.endswith("Raise rows (now 5).")


class Asking(Counter):
    def reset(self, question: str, **row: Any) -> str | None:
        return f"Solve: {question}"


def test_a_question_that_reset_shows_is_shown_once(tmp_path: Path) -> None:
    """TRL takes the column `prompt` and no other; `messages` are taken here as well."""
    path = saved(tmp_path / "rows.jsonl", [{"question": f"q{n}"} for n in range(60)])
    options: dict[str, Any] = {"environment": f"{__name__}:Asking", "rewards": ["length"]}
    env: Any = envs.make("prompts", path=path, **options)
    episode = Episode(env, Protocol(), 1, "train")
    assert episode.messages == [{"role": "user", "content": f"Solve: {env.row['question']}"}]
    assert len(set(env.table.keys)) == 60 and set(env.table.splits) == {"train", "validation", "test"}
    named: Any = Episode(envs.make("prompts", path=path, prompt="question", **options), Protocol(), 1, "train")
    assert named.messages[-1]["content"] == "{0}Solve: {0}".format(named.env.row["question"])
    turns = [{"role": "user", "content": "Hello. "}, {"role": "assistant", "content": "Hi."}]
    path = saved(tmp_path / "talks.jsonl", [{"messages": turns, "question": f"q{n}"} for n in range(60)])
    talk: Any = Episode(envs.make("prompts", path=path, **options), Protocol(), 1, "train")
    assert talk.messages[-1]["content"] == f"Hello. Solve: {talk.env.row['question']}"


def test_a_prompt_of_something_else_than_messages_is_refused_beside_an_environment(tmp_path: Path) -> None:
    path = saved(tmp_path / "rows.jsonl", [{"prompt": [0, 1], "target": n} for n in range(60)])
    with pytest.raises(ValueError, match=r"row 1 of .*prompt is neither a text nor a list of messages"):
        envs.make("prompts", path=path, environment=f"{__name__}:Judge")


def test_system_messages_that_reset_reads_tell_levels_apart(tmp_path: Path) -> None:
    path = saved(tmp_path / "rows.jsonl", [{"system": f"s{n}", "target": 3} for n in range(200)])
    wide: Any = envs.make("prompts", path=path, environment=f"{__name__}:Judge")
    assert len(set(wide.table.keys)) == 200 and set(wide.table.splits) == {"train", "validation", "test"}
    narrow: Any = envs.make("prompts", path=path, environment=f"{__name__}:Narrow", rewards=["length"])
    assert len(set(narrow.table.keys)) == 200 and len(set(narrow.table.splits)) == 1, "one task in other words"


def test_what_reset_does_not_read_makes_no_level(tmp_path: Path) -> None:
    path = saved(tmp_path / "rows.jsonl", [{"target": n % 30, "id": n} for n in range(60)])
    made: list[Any] = [
        envs.make("prompts", path=path, environment=f"{__name__}:{kind}", rewards=["length"])
        for kind in ("Narrow", "Judge")
    ]
    narrow, wide = (env.table for env in made)
    assert len(set(narrow.keys)) == 30 and narrow.splits[:30] == narrow.splits[30:]
    assert len(set(wide.keys)) == 60


def test_rows_that_are_one_level_are_told_where_a_split_has_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "rows.jsonl", [{"prompt": "Count.", "target": 3, "id": n} for n in range(60)])
    env = envs.make("prompts", path=path, environment=f"{__name__}:Narrow", rewards=["length"])
    with pytest.raises(NoLevel, match=r"The 60 rows .* have the same prompt and the same values of what reset reads"):
        for split in ("train", "test"):
            env.reset(seed=1, options={"split": split})


NUMBER = 5


class Resetless: ...


class Red(Counter):
    def __init__(self) -> None:
        raise ValueError("\x1b[31mred")


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Mute(Counter):
    def __init__(self) -> None:
        raise Wordless


def without_reset() -> dict[str, int]:
    return {}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Missing", "has no Missing"),
        ("near", r"near cannot be made: it raised TypeError: near\(\) missing 3 required positional arguments"),
        ("Red", r"Red cannot be made: it raised ValueError: \\x1b\[31mred$"),
        ("Mute", r"Mute cannot be made: it raised Wordless: \(without words: its __str__ raised\)$"),
        ("NUMBER", "NUMBER is neither a class nor a function"),
        ("without_reset", r"without_reset makes a dict, which has no method reset\(\*\*row\) -> str \| None, as TRL"),
        ("Resetless", "Resetless makes a Resetless, which has no method reset"),
        ("Untyped", "wait has no schema"),
        ("Demanding", "missing a required argument: 'level'"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        opened(tmp_path, kind)
