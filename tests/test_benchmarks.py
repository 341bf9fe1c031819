"""Do the benchmarks run, compare equal work, and write the figures they print?"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from posttrain.config import StarPORun, resolve

FILE = Path(__file__).parent.parent / "benchmarks" / "rollout.py"
SIZES = "--conversations 3 --new-tokens 3 --turns 1 2 --repeats 2".split()


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FILE.parent), *sys.path])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return loaded(FILE)


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{file.stem}_benchmark", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rollout_measures_three_engines_on_equal_work(rollout, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FILE), *SIZES, "--json", str(tmp_path / "figures.json")])
    rollout.main()
    results = json.loads((tmp_path / "figures.json").read_text())
    assert {"commit", "machine", "threads", "load", "dtype"} <= results.keys()
    assert [(row["model"], row["turns"], row["tokens"]) for row in results["rows"]] == [
        ("convgpt", 1, 9),
        ("convgpt", 2, 18),
        ("llama", 1, 9),
        ("llama", 2, 18),
    ]
    for row in results["rows"]:
        assert row["seconds"].keys() == {"slots", "generate", "replay"}
        assert all(len(times) == 2 and min(times) > 0 for times in row["seconds"].values())
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(results["rows"])
    assert len({line.count("|") for line in table}) == 1


def test_nothing_is_timed_when_the_engines_differ(rollout, tmp_path, monkeypatch):
    honest = rollout.GenerateSampler.sample

    def wrong(self, handles, params, seeds):
        return [
            rollout.Completion([token + 1 for token in c.ids], [], False) for c in honest(self, handles, params, seeds)
        ]

    monkeypatch.setattr(rollout.GenerateSampler, "sample", wrong)
    monkeypatch.setattr(sys, "argv", [str(FILE), *SIZES, "--json", str(tmp_path / "figures.json")])
    with pytest.raises(SystemExit, match="engines differ"):
        rollout.main()
    assert not (tmp_path / "figures.json").exists()


def test_both_updates_have_the_same_gradient(rollout):
    update = loaded(FILE.parent / "update.py")
    episodes = update.conversations(8, 3, 8, 100)
    ours = update.ours(update.model_of(100, "cpu"), episodes, 512)()
    assert ours > 0 and update.theirs(update.model_of(100, "cpu"), episodes, 4)() == pytest.approx(ours, rel=1e-4)


def test_worlds_are_timed_beside_the_games_they_are_made_of(rollout, tmp_path, monkeypatch, capsys):
    worlds = loaded(FILE.parent / "worlds.py")
    sizes = ["--levels", "3", "--steps", "20", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["worlds.py", *sizes, "--json", str(tmp_path / "figures.json")])
    try:
        worlds.main()
    finally:
        sys.modules.pop("pkg_resources", None)  # which gym-sokoban asks for
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(row["world"], row["what"], row["count"]) for row in rows] == [
        (world, what, count) for world in ("frozen_lake", "sokoban") for what, count in (("levels", 3), ("steps", 20))
    ]
    assert all(len(row["seconds"]) == 2 and "ours" in row["seconds"] for row in rows)
    assert capsys.readouterr().out.count("\n| ") == 2 + len(rows)


def test_every_arm_of_the_learning_benchmark_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    learning = loaded(FILE.parent / "long" / "learning.py")
    for arm, changes in learning.ARMS.items():
        for world in learning.WORLDS.values():
            cfg = resolve(StarPORun, learning.CONFIG, [*learning.SMALL, *changes, world])
            assert cfg.algorithm.critical == (arm in ("starpo-s", "ppo", "bilevel-gae"))
    row = {"world": "sokoban", "arm": "ppo", "before": 0.2, "after": 0.4, "low": 0.3, "high": 0.5, "minutes": 2.0}
    row["reward"] = [n / 20 for n in range(20)]
    cheap = row | {"arm": "grpo", "seed": 0, "minutes": 1.0}
    learning.show([row | {"seed": 1}, row | {"seed": 0, "after": 0.6}, cheap])
    table = capsys.readouterr().out.splitlines()
    assert table[-2] == "| sokoban | grpo | 0.40 [0.30, 0.50] | 0.400 | 1.0 | 20.0 | 0.78 |"
    assert table[-1] == "| sokoban | ppo | 0.60 [0.30, 0.50], 0.40 [0.30, 0.50] | 0.500 | 2.0 | 15.0 | 0.28 |"


def test_what_came_first_in_a_collapse(capsys: pytest.CaptureFixture[str]) -> None:
    learning = loaded(FILE.parent / "long" / "learning.py")
    spread = [0.4] * 10 + [0.1] * 20
    reward = [0.5] * 20 + [0.1] * 10
    row = {"world": "sokoban", "arm": "bonus", "seed": 3, "std": spread, "reward": reward}
    row |= {"alarms": ["step 17: one", "step 14: another"]}
    steady = row | {"std": [0.4] * 30, "reward": [0.5] * 30}
    rising = row | {"reward": [n / 30 - 1 for n in range(30)], "alarms": []}
    learning.show_collapse([row, steady, rising])
    table = capsys.readouterr().out.splitlines()
    assert table[2] == "| sokoban | bonus | 3 | 0.50 | 0.10 | 24 | 14 | 14 |"
    assert table[4:] == ["1 of the 2 runs that did not lose half their reward raised an alarm."]
