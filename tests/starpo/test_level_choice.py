"""Are levels of medium success played again, and is the choice the same in every process and after a resume?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_phase3 import LAKE, rows, settings, train

from posttrain.config import StarPORun
from posttrain.starpo.level_choice import WINDOW, level_seeds, record_levels
from posttrain.starpo.run_state import RunState
from posttrain.types import Trajectory, derive_seed

AUTO = {"name": "frozen_lake", "difficulty": "auto"}


def run(staleness: int = 0, **env: Any) -> StarPORun:
    rollout: dict[str, Any] = {"max_staleness": staleness}
    if staleness:
        rollout |= {"engine": "vllm_server", "servers": ["http://localhost:1"]}
    section = {"output_dir": "x", "model": {"name_or_path": "x"}, "envs": [{**AUTO, **env}], "rollout": rollout}
    return StarPORun.model_validate(section)


def group(seed: int, won: int, of: int = 4) -> list[Trajectory]:
    return [Trajectory(env="frozen_lake", level_seed=seed, noise_seed=0, success=n < won) for n in range(of)]


def test_half_of_the_groups_play_a_level_of_medium_success_again() -> None:
    cfg, state = run(), RunState()
    assert record_levels(cfg, state, [group(seed, seed % 5) for seed in range(100)], 1) == {
        "rollout/frozen_lake/levels_again": 0
    }
    medium = {seed for seed in range(100) if 0 < seed % 5 < 4}
    found = level_seeds(cfg, cfg.envs * 64, 2, state.levels)
    again = [seed for seed in found if seed < 100]
    assert 16 <= len(again) <= 48 and set(again) <= medium and len(set(found)) == 64
    assert all(seed in again or seed == derive_seed(cfg.seed, "level", 2, place) for place, seed in enumerate(found))
    assert level_seeds(cfg, cfg.envs * 8, 2, state.levels) == found[:8], "further groups (refill) change no former one"
    assert level_seeds(cfg, cfg.envs * 64, 3, state.levels) != found
    assert record_levels(cfg, state, [group(seed, 4) for seed in again], 2)["rollout/frozen_lake/levels_again"] == len(
        again
    )
    assert not set(again) & set(level_seeds(cfg, cfg.envs * 64, 3, state.levels)), "the last result of a level counts"


def test_without_the_key_every_level_is_new() -> None:
    cfg, state = run(difficulty=None), RunState()
    assert record_levels(cfg, state, [group(1, 2)], 1) == {} and state.levels == {}
    seeds = [derive_seed(cfg.seed, "level", 2, place) for place in range(8)]
    assert level_seeds(cfg, cfg.envs * 8, 2, {"frozen_lake": [[1, 1, 0.5, 1.0]]}) == seeds


def test_steps_that_may_be_under_way_and_old_ones_are_not_looked_at() -> None:
    for staleness in (0, 2):
        cfg, state = run(staleness), RunState()
        for step in range(1, 40):
            record_levels(cfg, state, [group(1000 + step, 2)], step)
        used = {seed - 1000 for seed in level_seeds(cfg, cfg.envs * 200, 40, state.levels) if seed < 2000}
        last = 39 - staleness
        assert used == set(range(last - WINDOW + 1, last + 1))
        assert len(state.levels["frozen_lake"]) == WINDOW + staleness


def test_crashed_episodes_say_nothing_about_a_level() -> None:
    cfg, state = run(), RunState()
    crashed = group(3, 0)
    for t in crashed[:3]:
        t.crashed = "RuntimeError: x"
    crashed[3].success = True
    record_levels(cfg, state, [crashed, [*crashed[:3]]], 1)
    assert state.levels["frozen_lake"] == [[1, 3, 1.0, 0.0]]


def test_graded_rewards_without_a_success_choose_levels_whose_rewards_differ() -> None:
    cfg, state = run(), RunState()
    groups = [group(seed, 0) for seed in range(100)]
    for played in groups[::2]:
        for n, t in enumerate(played):
            t.turn_rewards, t.turn_penalties = [n / 10], [0.0]
    for n, t in enumerate(groups[1]):
        t.turn_rewards, t.turn_penalties = [0.0], [-n / 10]  # of the format, as games with rewards of 0 and 1 have them
    record_levels(cfg, state, groups, 1)
    again = [seed for seed in level_seeds(cfg, cfg.envs * 64, 2, state.levels) if seed < 100]
    assert 16 <= len(again) <= 48 and not any(seed % 2 for seed in again)
    record_levels(cfg, state, [group(101, 2)], 2)  # a success: from then on it alone says what is medium
    assert {seed for seed in level_seeds(cfg, cfg.envs * 64, 3, state.levels) if seed < 200} == {101}


@pytest.mark.thorough
def test_a_resumed_run_plays_the_same_levels(player: Path, tmp_path: Path) -> None:
    algorithm = {"num_iterations": 1, "minibatches": 1, "filter": {"strategy": "none", "keep_zero": True}}
    few = {"every": 4, "episodes": 4, "final_episodes": 4}
    file = settings(
        tmp_path / "run.yaml", player, envs=[{**LAKE, "difficulty": "auto"}], algorithm=algorithm, evaluation=few
    )
    train(file, f"output_dir={tmp_path / 'whole'}")
    found = rows(tmp_path / "whole")
    assert sum(row.get("rollout/frozen_lake/levels_again", 0) for row in found) > 0
    train(file, f"output_dir={tmp_path / 'cut'}")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "cut" / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "cut" / "final")
    train(file, "--resume", f"output_dir={tmp_path / 'cut'}")
    assert rows(tmp_path / "cut") == found


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(ValueError, match="auto"):
        run(difficulty="hard")
