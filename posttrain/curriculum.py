"""How hard is a world now?  Stages that begin at a step or after enough success; where a run stands is plain data.

    places = start(cfg.worlds)                       {"sokoban": {"stage": 0, "successes": []}}
    options, protocol = conditions(world, protocol, places["sokoban"]["stage"])
    places = after_step(cfg.worlds, places, episodes, step)
The places go into the checkpoint, so a resumed run stands where it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

from envs.protocol import Protocol
from posttrain.config import StageSection, TrainingWorld
from posttrain.types import Trajectory

TARGET = -1  # the last stage, for held-out levels


class Place(TypedDict):
    """Where a world's curriculum stands: its stage, and the share of episodes won in each recent step of that stage."""

    stage: int
    successes: list[float]


def start(worlds: Sequence[TrainingWorld]) -> dict[str, Place]:
    """The first stage of every world that has a curriculum."""
    return {world.name: Place(stage=0, successes=[]) for world in worlds if world.curriculum}


def conditions(world: TrainingWorld, protocol: Protocol, stage: int) -> tuple[dict[str, Any], Protocol]:
    """The world's options and the protocol in a stage; without a curriculum they are what they are."""
    if not world.curriculum:
        return world.options, protocol
    chosen = world.curriculum[stage]
    turns = protocol.max_turns if chosen.max_turns is None else chosen.max_turns
    return world.options | chosen.options, replace(protocol, max_turns=turns)


def after_step(
    worlds: Sequence[TrainingWorld], places: dict[str, Place], episodes: Sequence[Trajectory], step: int
) -> dict[str, Place]:
    """The places for step `step + 1`, given what was played in `step`; episodes whose world raised do not count."""
    moved = {}
    for world in worlds:
        if world.curriculum:
            won = [t.success for t in episodes if t.world == world.name and not t.crashed]
            moved[world.name] = advance(
                world.curriculum, places[world.name], step, sum(won) / len(won) if won else None
            )
    return moved


def advance(stages: Sequence[StageSection], place: Place, step: int, success: float | None) -> Place:
    """The place for step `step + 1`, given the share of episodes won in `step` (None where none was played).

    Scheduled stages that are due are entered at once, one after the other; success counts anew in every stage.

    >>> stages = [StageSection(), StageSection(success=0.5, success_steps=2), StageSection(from_step=9)]
    >>> advance(stages, Place(stage=0, successes=[0.4]), 2, 0.7)
    {'stage': 1, 'successes': []}
    """
    stage, successes = place["stage"], place["successes"] + ([] if success is None else [success])
    while stage + 1 < len(stages) and _begins(stages[stage + 1], step + 1, successes):
        stage, successes = stage + 1, []
    window = stages[stage + 1].success_steps if stage + 1 < len(stages) else None
    return Place(stage=stage, successes=successes[-window:] if window else [])


def _begins(stage: StageSection, step: int, successes: list[float]) -> bool:
    if stage.from_step is not None:
        return step >= stage.from_step
    assert stage.success is not None and stage.success_steps is not None
    recent = successes[-stage.success_steps :]
    return len(recent) == stage.success_steps and sum(recent) / len(recent) >= stage.success
