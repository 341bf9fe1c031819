"""What `posttrain data --kind prompts` says about the rows of the environment `prompts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.__main__ import main
from posttrain.types import UserError

FUNCTIONS = """
def polite(prompts, completions, level, **columns): return [1.0] * len(completions)
def brief(prompts, completions, question): return [1.0] * len(completions)
"""
ROWS: list[dict[str, Any]] = [
    {"question": "What is 2 + 3?", "answer": "5", "level": 1},
    {"question": "What is 2 + 4?", "answer": "6"},
    {"question": "What is 2 + 3?", "answer": "6", "level": 1},
    {"question": "What is 2 + 5?"},
]


def shown(rows: list[dict[str, Any]], folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    main(["rows.jsonl", "--kind", "prompts", *words])
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards_of_rows.py").write_text(FUNCTIONS)
    return tmp_path


def test_prompts_repeated_rows_and_what_rewards_are_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = ["math", "rewards_of_rows:polite", {"name": "rewards_of_rows:brief", "weight": 0.2}]
    said = shown(ROWS, folder, capsys, "prompt=question", "system=Be brief.", f"rewards={json.dumps(rewards)}")
    assert (
        "rows of rows.jsonl: 4; unusable: 0; repeated prompts: 1; 2 for training, 1 for validation, 1 for the test"
        in said
    )
    assert "  row 3 repeats the prompt of row 1 with another answer\n" in said
    assert "weight 1: is given question, answer, level; reads answer, which 1 of 4 rows lack (the first: row 4)" in said
    assert "reward polite, weight 1: is given question, answer, level\n" in said
    assert "reward brief, weight 0.2: is given question\n" in said
    assert "system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n" in said
    assert "a prompt" in said and said.count("<|im_start|>user") == 3


def test_rows_that_cannot_be_used_are_all_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the environment refuses them, which is the message at the end."""
    rows = [ROWS[0], {"level": 1}, {"messages": [{"role": "assistant", "content": "b"}]}]
    with pytest.raises(UserError, match=r"row 2 of path=rows\.jsonl: it has none of the columns"):
        shown(rows, folder, capsys)
    said = capsys.readouterr().out
    assert "rows of rows.jsonl: 3; unusable: 2; repeated prompts: 0; 1 for training" in said
    assert "row 2 cannot be used: it has none" in said and "row 3 cannot be used: messages is neither" in said
    assert "What is 2 + 3?" in said, "those that can be used are shown"


def test_messages_of_several_turns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a?"), ("assistant", "b"), ("user", "c?"))]
    said = shown([{"messages": turns, "answer": "1"}], folder, capsys)
    assert "user\na?<|im_end|>\n<|im_start|>assistant\nthen, after each answer, the user: c?\n" in said


def test_rows_of_a_program_or_an_environment_are_levels_without_a_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "game_of_rows.py").write_text(
        "class Game:\n    def reset(self, seed): return str(seed)\n    def get_reward(self): return 1.0\n"
    )
    rows = [{"seed": number % 30, "id": number} for number in range(60)]
    said = shown(rows, folder, capsys, "agent=[python]", "rewards=[length]")
    assert "rows of rows.jsonl: 60; unusable: 0; repeated prompts: 0; " in said and " 0 for" not in said
    said = shown(rows, folder, capsys, "environment=game_of_rows:Game")
    assert "rows of rows.jsonl: 60; unusable: 0; repeated prompts: 30; " in said
    assert "  row 31 repeats the prompt of row 1 with another id\n" in said
    with pytest.raises(UserError, match="row 2 of path"):
        shown([rows[0], {"prompt": [1]}], folder, capsys, "agent=[python]", "rewards=[length]", "system=a")
    assert "rows of rows.jsonl: 2; unusable: 1;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["promt=question"], 'Did you mean "prompt"'),
        (["rewards=[no_module:f]"], "there is no module no_module"),
        (["rewards=no_module:f"], "Write a list, here rewards="),
        (["question"], "is not an option of an environment"),
    ],
)
def test_wrong_options(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shown(ROWS, folder, capsys, *words)
    assert capsys.readouterr().out == ""


def test_options_are_for_prompts_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rows.jsonl", "prompt=question"])
    assert "prompt=question is an option of --kind prompts" in capsys.readouterr().err
