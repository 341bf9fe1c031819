"""Is a run's state the same after it was written, and readable?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from test_learner import config

from posttrain.starpo import run_state
from posttrain.starpo.run_state import RunState, changed
from posttrain.types import UserError


def test_a_state_is_the_same_after_json(tmp_path: Path) -> None:
    state = RunState(
        step=40, tokens=812345, best_step=20, best_success=0.61, best_won={"lake": [True, False]},
        plan={"rollout.slots": 256}, alarms={"memory": {"_entropy": {"lowest": 0.5}}},
    )  # fmt: skip
    (tmp_path / run_state.FILE).write_text(json.dumps(dataclasses.asdict(state)))
    assert run_state.read(tmp_path) == state
    assert json.loads((tmp_path / run_state.FILE).read_text())["plan"]["rollout.slots"] == 256


def test_a_state_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    keys = dataclasses.asdict(RunState())
    del keys["empty_steps"]
    (tmp_path / run_state.FILE).write_text(json.dumps(keys | {"told": True}))
    with pytest.raises(UserError, match=r"another version.*empty_steps, told"):
        run_state.read(tmp_path)


def test_a_best_that_is_damaged_is_beaten_by_any() -> None:
    state = RunState(step=7, best_step=4, best_success=0.9, best_won={"lake": [True]}, best_earned={"lake": [1.0]})
    state.forget_best()
    assert (state.best_step, state.best_success, state.best_won, state.best_earned) == (7, -1.0, {}, {})


def test_a_config_is_changed_by_dotted_paths_and_checked() -> None:
    cfg = changed(config(), {"trainer.learning_rate": 3e-4, "algorithm.entropy_coef": 0.1})
    assert (cfg.trainer.learning_rate, cfg.algorithm.entropy_coef) == (3e-4, 0.1)
    with pytest.raises(ValueError):
        changed(config(), {"algorithm.entropy_coef": -1.0})
