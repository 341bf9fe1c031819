"""What does a group play?  Which environment, and how hard: stages that begin at a step or after enough success.

    played = environments_of_groups(cfg.envs, groups=8, step=1)       one for each group
    places = start(cfg.envs)                                          {"sokoban": {"stage": 0, "successes": []}}
    options, protocol = conditions(cfg, played[0], places["sokoban"]["stage"])
    places = after_step(cfg.envs, places, episodes, step)
The places go into the checkpoint, so a resumed run stands where it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

import envs
from envs.protocol import Protocol
from posttrain.config import StageSection, StarPORun, TrainingEnv
from posttrain.types import Trajectory, UserError

TARGET = -1  # the last stage, for held-out levels


class Place(TypedDict):
    """Where an environment's curriculum stands: its stage, and the share of episodes won in each recent step of it."""

    stage: int
    successes: list[float]


def environments_of_groups(environments: Sequence[TrainingEnv], groups: int, step: int) -> list[TrainingEnv]:
    """Which environment each group of a step plays: fixed numbers first, the rest by weight, evenly over the steps."""
    fixed = [env for env in environments for _ in range(env.groups or 0)]
    free = [env for env in environments if env.groups is None]
    if len(fixed) > groups or (len(fixed) < groups and not free):
        raise UserError(f"envs[].groups add up to {len(fixed)}, but rollout.groups is {groups}: make them fit.")
    total = sum(env.weight for env in free)
    ahead = [0.0] * len(free)
    chosen: list[TrainingEnv] = []
    places = groups - len(fixed)
    for _ in range(step * places):  # every place goes to the environment that is furthest behind its share
        ahead = [a + env.weight / total for a, env in zip(ahead, free, strict=True)]
        most = ahead.index(max(ahead))
        ahead[most] -= 1.0
        chosen.append(free[most])
    return fixed + chosen[len(chosen) - places :]


def check_environments(cfg: StarPORun) -> None:
    """UserError unless every environment is there, takes its options and has levels in every split."""
    environments_of_groups(cfg.envs, cfg.rollout.groups, 1)
    held_out = (cfg.evaluation.split, cfg.evaluation.final_split)
    for n, env in enumerate(cfg.envs):
        stages = [stage.options for stage in env.curriculum] or [{}]
        for number, options in enumerate(stages):
            try:
                made = envs.make(env.name, **env.options | options)
                for split in ("train", *(held_out if number == len(stages) - 1 else ())):
                    made.reset(seed=0, options={"split": split})
            except (Exception, SystemExit) as problem:  # an environment may raise anything
                stage = f".curriculum.{number}" if env.curriculum else ""
                words = str(problem)
                if not isinstance(problem, ValueError | TypeError):
                    words = f"it raised {type(problem).__name__}: {problem}. See python -m envs.check {env.name}."
                raise UserError(f"envs.{n}{stage} ({env.name}): {words}") from problem


def longest_episode(cfg: StarPORun) -> int:
    """The most tokens that can be sampled in an episode: Dr. GRPO's constant."""
    stages = [stage.max_turns or 0 for env in cfg.envs for stage in env.curriculum]
    return cfg.rollout.max_completion_length * max([cfg.protocol.max_turns, *stages])


def start(environments: Sequence[TrainingEnv]) -> dict[str, Place]:
    """The first stage of every environment that has a curriculum."""
    return {env.name: Place(stage=0, successes=[]) for env in environments if env.curriculum}


def conditions(cfg: StarPORun, env: TrainingEnv, stage: int) -> tuple[dict[str, Any], Protocol]:
    """The environment's options and the run's protocol in a stage; without a curriculum they are what they are."""
    protocol = Protocol(**cfg.protocol.model_dump())
    if not env.curriculum:
        return env.options, protocol
    chosen = env.curriculum[stage]
    turns = protocol.max_turns if chosen.max_turns is None else chosen.max_turns
    return env.options | chosen.options, replace(protocol, max_turns=turns)


def after_step(
    environments: Sequence[TrainingEnv], places: dict[str, Place], episodes: Sequence[Trajectory], step: int
) -> dict[str, Place]:
    """The places for step `step + 1`, given what was played in `step`; crashed episodes do not count."""
    moved = {}
    for env in environments:
        if env.curriculum:
            won = [t.success for t in episodes if t.env == env.name and not t.crashed]
            moved[env.name] = advance(env.curriculum, places[env.name], step, sum(won) / len(won) if won else None)
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
