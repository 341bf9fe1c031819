"""Does an environment leave the process as it found it, whatever its code does?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import envs
from envs import process_state
from envs.frozen_lake import FrozenLake
from envs.process_state import ProcessState, keep_process_state
from envs.protocol import Protocol
from posttrain.models.chat import Chat
from posttrain.rollout.episodes import FULL, set_up
from posttrain.rollout.game import Game, take_turns
from posttrain.types import Completion

FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "folder": (lambda: os.chdir("/"), "the working directory to /"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype to float64"),
    "gradients": (lambda: torch.set_grad_enabled(False), "whether torch computes gradients to False"),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch's number of threads to "),
}


@pytest.fixture(autouse=True)
def whole_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a fault that is not undone leaves behind harms this test alone."""
    monkeypatch.setattr(process_state, "_reported", set())
    before = ProcessState.now()
    yield
    before.put_back("a test")


@pytest.mark.parametrize("kind", FAULTS)
def test_what_was_changed_is_put_back_and_said_once(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = FAULTS[kind]
    before = ProcessState.now()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="also raises"), keep_process_state("line"):
            change()
            raise RuntimeError("also raises")
        assert ProcessState.now() == before
    said = capsys.readouterr().err
    assert said.count("line changed") == 1 and words in said and "put back" in said


def test_a_folder_that_is_gone_is_left_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def leave() -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    before = ProcessState.now()
    with keep_process_state("line"):
        leave()
    assert ProcessState.now() == before and "a folder that is gone" in capsys.readouterr().err


@pytest.mark.parametrize(  # slow: in threads side by side, where the last two change their own thread alone
    ("kind", "slow"),
    [(kind, False) for kind in FAULTS] + [("folder", True), ("dtype", True)],
)
def test_an_episode_leaves_the_process_as_it_is(
    kind: str, slow: bool, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, before = FrozenLake.step, ProcessState.now()

    def step(self: FrozenLake, action: str) -> Any:
        FAULTS[kind][0]()
        return real(self, action)

    monkeypatch.setattr(FrozenLake, "step", step)
    monkeypatch.setattr(FrozenLake, "slow", slow)
    games = []
    for seed in range(4):
        episode = set_up(envs.make("frozen_lake"), Protocol(think=False), seed, "train")
        games.append(Game(tiny_chat, episode, FULL, 8))  # type: ignore[arg-type]
        assert games[-1].begin()
    ids = [*tiny_chat.content_ids("<answer>Up</answer>"), tiny_chat.stop_id]
    take_turns(games, [Completion(ids, [0.0] * len(ids), finished=True) for _ in games])
    assert ProcessState.now() == before
    assert all(not game.trajectory.crashed and game.trajectory.turns == 1 for game in games)
    assert capsys.readouterr().err.count("frozen_lake changed") == 1


@pytest.mark.parametrize("when", ["__init__", "reset"])
def test_also_while_a_level_is_made(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.config.shared import EnvSection, ProtocolSection
    from posttrain.rollout.episodes import new_episode

    real, before = getattr(FrozenLake, when), ProcessState.now()

    def broken(self: FrozenLake, *given: Any, **named: Any) -> Any:
        torch.set_grad_enabled(False)
        return real(self, *given, **named)

    monkeypatch.setattr(FrozenLake, when, broken)
    new_episode(EnvSection(name="frozen_lake"), ProtocolSection(), 0, "train")
    assert ProcessState.now() == before


def test_before_torch_is_imported_its_defaults_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that imports torch and changes it, the first thing that is imported at all."""
    monkeypatch.delitem(sys.modules, "torch")
    before = ProcessState.now()
    assert before == (os.getcwd(), "float32", True, None)
    monkeypatch.undo()
    torch.set_default_dtype(torch.float16)
    before.put_back("envs/line.py")
    assert torch.get_default_dtype() == torch.float32
