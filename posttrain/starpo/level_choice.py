"""Which levels does a step play?  New ones, and with `envs.difficulty: auto` some that are won now and then.

A group teaches only if its episodes earn different rewards, which is likeliest where half of them succeed. So half of
the groups of such an environment play again a level of the last steps in which a share of `HARDEST` to `EASIEST` of the
episodes succeeded, as prioritized level replay does (arXiv 2010.03934). Where these steps had no success, as with
graded rewards below it, they play again a level whose rewards differed. The choice follows from the run's seed and the
records alone, so all processes and a resumed run make the same one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

from posttrain.config import StarPORun, TrainingEnvSection
from posttrain.starpo.monitoring.episodes import differs
from posttrain.starpo.run_state import RunState
from posttrain.types import Trajectory, derive_seed

HARDEST, EASIEST = 0.2, 0.8  # success of a level that is played again
WINDOW = 16  # steps back: older successes are those of another policy

# of each group, the oldest first: [step, level seed, share of its episodes that succeeded, whether rewards differed]
Records = list[list[float]]


def level_seeds(
    cfg: StarPORun, envs: Sequence[TrainingEnvSection], step: int, records: dict[str, Records]
) -> list[int]:
    """Return the seed of the level of each group of a step.

    Args:
        envs: the environment of each group.
        records: by environment; those of steps that may still be under way (`rollout.max_staleness`) are not used.
    """
    last = step - 1 - cfg.rollout.max_staleness
    waiting = {env.title: _between(records.get(env.title, []), last) for env in envs if env.difficulty == "auto"}
    for title, seeds in waiting.items():
        random.Random(derive_seed(cfg.seed, "again", step, title)).shuffle(seeds)
    chosen: list[int] = []
    for group, env in enumerate(envs):
        again = waiting.get(env.title)
        if again and derive_seed(cfg.seed, "again", step, group) % 2:
            chosen.append(again.pop())
        else:
            chosen.append(derive_seed(cfg.seed, "level", step, group))
    return chosen


def _between(records: Records, last: int) -> list[int]:
    """Return the levels whose last record, of the window that ends with step `last`, says that they can teach."""
    latest = {int(seed): found for step, seed, *found in records if last - WINDOW < step <= last}
    if any(success for success, _ in latest.values()):
        return [seed for seed, (success, _) in latest.items() if HARDEST <= success <= EASIEST]
    return [seed for seed, (_, differed) in latest.items() if differed]


def record_levels(
    cfg: StarPORun, state: RunState, groups: Sequence[Sequence[Trajectory]], step: int
) -> dict[str, float]:
    """Note in the state how often the levels of a step were won; return how many were played again.

    Records that no later step can use are dropped.
    """
    figures: dict[str, float] = {}
    for env in [section.title for section in cfg.envs if section.difficulty == "auto"]:
        kept = [each for each in state.levels.get(env, []) if each[0] > step - WINDOW - cfg.rollout.max_staleness]
        finished = [[t for t in group if not t.crashed] for group in groups]
        new = [
            [step, group[0].level_seed, fmean(t.success for t in group), float(differs(group, penalties=False))]
            for group in finished
            if group and group[0].env == env
        ]
        before = {seed for _, seed, *_ in kept}
        figures[f"rollout/{env}/levels_again"] = sum(seed in before for _, seed, *_ in new)
        state.levels[env] = kept + new
    return figures
