"""When is an alarm raised, and when does a run stop early?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from posttrain.config import StarPORun
from posttrain.starpo.monitoring import alarms
from posttrain.starpo.monitoring.alarm_limits import HALF_PRECISION_GAP, LIMITS
from posttrain.starpo.monitoring.alarm_rules import Sizes
from posttrain.starpo.run_state import RunState


class Watch:
    """Raises the alarms of every reported row with `say`; its memory is plain data for the checkpoint."""

    def __init__(self, cfg: StarPORun, say: Callable[[str], None], exact: bool) -> None:
        self.cfg, self.say = cfg, say
        self.sizes = Sizes(
            groups=cfg.rollout.groups,
            samples=cfg.rollout.num_generations,
            evaluation_episodes=cfg.evaluation.episodes * len(cfg.envs),
            steps=cfg.trainer.max_steps,
        )
        self.limits: dict[str, float] = {"empty_steps": cfg.algorithm.max_empty_steps}
        if not exact:
            self.limits["sampler_gap"] = HALF_PRECISION_GAP
        if cfg.rollout.max_staleness:  # the policy has learned since it sampled
            self.limits["sampler_gap"] = math.inf
        if cfg.algorithm.loss_type != "ppo_clip":  # the other losses clip tokens by design
            self.limits["clip_fraction"] = math.inf

    def see(self, state: RunState, step: int, row: Mapping[str, object]) -> list[alarms.Alarm]:
        """Return the alarms that this row raises, after showing them; update `state.alarms`."""
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        raised, state.alarms = alarms.watch(state.alarms, step, numbers, self.sizes, self.limits, self.cfg)
        for alarm in raised:
            self.say(f"ALARM {alarm}")
        return raised


def solved(cfg: StarPORun, state: RunState, success: float) -> bool:
    """Return whether no group passes the filter because every level is won."""
    return success >= LIMITS["solved"] and state.empty_steps >= cfg.algorithm.max_empty_steps
