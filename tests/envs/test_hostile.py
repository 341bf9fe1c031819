"""Does every environment survive generated hostile answers, and are breaches noticed?"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hostile_answers import PIECES, hostile_answers, meet_hostile_answers
from open_envs import open_or_skip

import envs
from envs.promises import Subject
from envs.protocol import Protocol, parse


def subject(name: str) -> Subject:
    return Subject(name, {}, Protocol.of(envs.make(name)))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, so that what an answer writes is seen."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", envs.names())
def test_hostile_answers_do_no_harm(name: str, elsewhere: Path) -> None:
    env = open_or_skip(name)
    played, broken = meet_hostile_answers(subject(name), 6 if env.slow else 500, seconds=0.8)
    assert not broken and played >= 6
    assert not list(elsewhere.iterdir()), "an answer wrote a file"


@pytest.mark.slow
@pytest.mark.parametrize("name", envs.names())
def test_twenty_thousand_hostile_answers_do_no_harm(name: str, elsewhere: Path) -> None:
    slow = open_or_skip(name).slow
    played, broken = meet_hostile_answers(subject(name), 20_000, seed=1, seconds=900 if slow else float("inf"))
    print(f"{name}: {played:,} hostile answers")  # pytest -rA shows it; slow environments stop at the time limit
    assert not broken and (slow or played == 20_000)
    assert not list(elsewhere.iterdir()), "an answer wrote a file"


def test_the_answers_are_of_every_kind_and_the_same_for_a_seed() -> None:
    env = envs.make("frozen_lake")
    made = list(itertools.islice(hostile_answers(env, 3), 4000))
    assert made == list(itertools.islice(hostile_answers(env, 3), 4000))
    assert len(set(made)) > 3500 and max(len(response) for _, response in made) > 40_000
    read = [parse(response, Protocol(), env.actions) for _, response in made]
    assert sum(bool(one.actions) for one in read) > 400, "games go on"
    assert sum(not one.well_formed for one in read) > 400
    assert sum(bool(one.invalid) for one in read) > 400
    text = "".join(response for _, response in made)
    assert all(piece in text for piece in PIECES)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "it raised ZeroDivisionError"),
        ("moves", "changed the state"),
        ("pays", "step\\(\\) gave the reward nan|its reward is nan"),
        ("accepts", "called it valid"),
        ("goes on", "after the end of the game"),
        ("sleeps", "it took "),
    ],
)
def test_a_breach_is_noticed(how: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(envs.make("frozen_lake"))
    step = kind.step

    def broken(self: Any, action: str) -> Any:
        known, ended = self.canonical_action(action) is not None, self.cells[self.position] in "GH"
        observation, reward, over, cut, info = step(self, action)
        if how == "raises" and not known:
            return 1 // 0
        if how == "moves" and not known:
            self.position = (self.position + 1) % len(self.cells)
            observation = self.observe()
        if how == "pays":
            reward = float("nan")
        if how == "accepts":
            info["action_is_valid"] = True
        return observation, reward, over and not (how == "goes on" and ended), cut, info

    monkeypatch.setattr(kind, "step", broken)
    if how == "sleeps":
        monkeypatch.setattr("hostile_answers.LATE", -1.0)
    _, found = meet_hostile_answers(subject("frozen_lake"), 400)
    assert found and re.search(says, " ".join(found)), found[:3]
