"""What do tests of an update share?  Steps 2 to 4 of train_phase3_starpo.py in one call."""

from __future__ import annotations

from typing import Any

import train_phase3_starpo as phase3
from posttrain.config.starpo import StarPORun
from posttrain.starpo.distillation import Distillation
from posttrain.starpo.learner import Learner
from posttrain.types import Trajectory


def learn(
    cfg: StarPORun,
    learner: Learner,
    groups: list[list[Trajectory]],
    step: int = 1,
    scored: Any = None,
    distillation: Distillation | None = None,
) -> dict[str, float]:
    """Score and filter, advantages, update."""
    scored = scored or phase3.score_and_filter(cfg, groups, learner)
    experience = phase3.collect(cfg, learner, groups, scored)
    return phase3.update(cfg, learner, experience, step, distillation)
