"""What if rewards are computed for many answers at once?  After the episodes, by the environment's own `score`."""

from __future__ import annotations

from collections.abc import Sequence

from envs import TextEnv
from envs.process_state import keep_process_state
from envs.prompts import Prompts
from posttrain.types import Trajectory


def score_late(trajectories: Sequence[Trajectory]) -> None:
    """Give each of these episodes that is without a reward what its environment's `score` says, at its last turn.

    An episode whose score is an exception has crashed, as if its environment had raised.
    """
    waiting: dict[type[TextEnv], list[Trajectory]] = {}
    for trajectory in trajectories:
        unscored: TextEnv | None = trajectory.unscored
        if unscored is not None:
            waiting.setdefault(type(unscored), []).append(trajectory)
            if isinstance(unscored, Prompts):
                unscored.completion_ids = completion_ids(trajectory, unscored.agent is not None)
    for env, members in waiting.items():
        with keep_process_state(members[0].env):
            scores = env.score([each.unscored for each in members])
        for trajectory, score in zip(members, scores, strict=True):
            trajectory.unscored = None
            if isinstance(score, Exception):
                trajectory.crashed, trajectory.success = str(score) or type(score).__name__, False
                continue
            trajectory.turn_rewards[-1] += score.reward
            trajectory.success, trajectory.failure = score.success, score.failure
            trajectory.reward_parts = score.parts
            trajectory.logged, trajectory.extra = score.logged, score.extra


def completion_ids(trajectory: Trajectory, last: bool) -> list[int]:
    """Return the tokens after the prompt, with those of tools and users between the answers, as TRL gives them.

    last: of the last context alone.
    """
    segments = trajectory.segments[-1:] if last else trajectory.segments
    return [token for segment in segments for token in segment.ids[segment.turn_starts[0] :]]
