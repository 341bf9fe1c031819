"""Does a curriculum move when it should, forward only, and stand where it stood after a resume?"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.protocol import Protocol
from posttrain.config import StageSection, StarPORun, TrainingEnv
from posttrain.curriculum import TARGET, Place, advance, after_step, conditions, start
from posttrain.types import Trajectory

LATER = st.one_of(
    st.builds(lambda step: {"from_step": step}, st.integers(2, 12)),
    st.builds(lambda x, m: {"success": x, "success_steps": m}, st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 3)),
)


def slow(stages: list[StageSection], history: list[float | None]) -> list[int]:
    """The stage of every step from the whole history, in plain loops; `history[n]` is the success of step n + 1."""
    table = [0]
    entered = 0  # steps played before the stage began
    for step in range(1, len(history) + 1):
        stage = table[-1]
        while stage + 1 < len(stages):
            after = stages[stage + 1]
            seen = np.array([x for x in history[entered:step] if x is not None])
            if after.from_step is not None:
                due = step + 1 >= after.from_step
            else:
                window = after.success_steps or 0
                due = len(seen) >= window and seen[-window:].mean() >= after.success
            if not due:
                break
            stage, entered = stage + 1, step
        table.append(stage)
    return table


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    later=st.lists(LATER, min_size=1, max_size=4),
    history=st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=14),
)
def test_stages_follow_the_slow_reference_and_survive_json(later, history):
    stages = [StageSection(), *(StageSection(**stage) for stage in later)]
    place, table = Place(stage=0, successes=[]), [0]
    for step, success in enumerate(history, 1):
        place = advance(stages, json.loads(json.dumps(place)), step, success)
        table.append(place["stage"])
    assert table == slow(stages, history)
    assert table == sorted(table) and len(place["successes"]) <= 3


def test_a_stage_changes_options_and_turns_and_the_last_one_is_the_target():
    env = TrainingEnv(
        name="sokoban",
        options={"size": 6, "boxes": 2},
        curriculum=[
            StageSection(options={"boxes": 1, "max_length": 2}, max_turns=3),
            StageSection(options={"boxes": 1}, from_step=3),
            StageSection(success=0.5),
        ],
    )
    cfg = StarPORun.model_validate(
        {
            "output_dir": "unused",
            "model": {"name_or_path": "unused"},
            "envs": ["frozen_lake"],
            "protocol": {"max_turns": 7},
        }
    )
    protocol = Protocol(**cfg.protocol.model_dump())
    assert protocol.max_turns == 7
    assert conditions(cfg, env, 0) == ({"size": 6, "boxes": 1, "max_length": 2}, replace(protocol, max_turns=3))
    assert conditions(cfg, env, 1) == ({"size": 6, "boxes": 1}, protocol)
    assert conditions(cfg, env, TARGET) == conditions(cfg, env, 2) == (env.options, protocol)
    plain = TrainingEnv(name="frozen_lake", options={"size": 3})
    assert conditions(cfg, plain, 0) == conditions(cfg, plain, TARGET) == (plain.options, protocol)
    assert start([env, plain]) == {"sokoban": {"stage": 0, "successes": []}}


def test_only_the_own_episodes_count_and_crashed_ones_do_not():
    stages = [StageSection(), StageSection(success=0.75, success_steps=2)]
    environments = [TrainingEnv(name=name, curriculum=stages) for name in ("frozen_lake", "sokoban")]
    played = [
        Trajectory(env="frozen_lake", success=True),
        Trajectory(env="frozen_lake", success=False),
        Trajectory(env="sokoban", success=True),
        Trajectory(env="sokoban", success=False, crashed="OSError: no"),
    ]
    before = start(environments)
    places = after_step(environments, before, played, 1)
    assert places == {"frozen_lake": {"stage": 0, "successes": [0.5]}, "sokoban": {"stage": 0, "successes": [1.0]}}
    assert before == start(environments)
    places = after_step(environments, places, played[:3], 2)
    assert places["frozen_lake"] == {"stage": 0, "successes": [0.5, 0.5]}
    assert places["sokoban"] == {"stage": 1, "successes": []}
    assert after_step(environments, places, [], 3) == places


def test_success_is_measured_over_five_steps_unless_told():
    assert StageSection(success=0.5).success_steps == 5
    assert StageSection(success=0.5, success_steps=2).success_steps == 2 and StageSection().success_steps is None
