"""Which groups are worth an update?  Scores come from raw rewards with penalties, before any normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from posttrain.runtime import distinct, integers
from posttrain.starpo.advantages import group_moments
from posttrain.types import Trajectory

TOP_P_SLACK = 0.01  # RAGEN-2 keeps groups until their scores sum to the share less this


def measured(groups: Sequence[Sequence[Trajectory]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what groups can be ranked by, and the group of each episode, (B,); without the episodes that crashed.

    Returns:
        {"reward": raw rewards with penalties, (B,), "length": sampled tokens, (B,)}, and places in `groups`.
    """
    alive = [(number, t) for number, group in enumerate(groups) for t in group if not t.crashed]
    values_B = {
        "reward": torch.tensor([t.reward for _, t in alive], dtype=torch.float64),
        "length": torch.tensor([t.tokens for _, t in alive], dtype=torch.float64),
    }
    return values_B, torch.tensor([number for number, _ in alive], dtype=torch.long)


def group_scores(metric: str, values_B: Mapping[str, torch.Tensor], group_B: torch.Tensor, groups: int) -> torch.Tensor:
    """Return one number per group, shape (groups,); NaN for a group without an episode.

    values_B: by name what the statistics are of: rewards, entropies (means over an episode's tokens), lengths (of its
    sampled tokens). metric: a name for the mean of the group, with `_std` or `_variance` for its sample standard
    deviation or variance. `reward_std` is StarPO-S (arXiv 2504.20073, eq. 7), `reward_variance` RAGEN-2
    (arXiv 2604.06268), whose code takes the standard deviation under that name: the order is the same, the share that
    top-p keeps is not.

    >>> rewards_B, group_B = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0, 0, 0, 2])
    >>> group_scores("reward_variance", {"reward": rewards_B}, group_B, groups=3).tolist()
    [1.0, nan, 0.0]
    """
    name, _, statistic = metric.partition("_")
    if name not in values_B:
        raise ValueError(f"unknown metric {metric!r}: {', '.join(values_B)}, with _std or _variance or nothing")
    mean_B, std_B = group_moments(values_B[name], group_B)
    scores_G = values_B[name].new_full((groups,), float("nan"))
    match statistic:
        case "":
            scores_G[group_B] = mean_B
        case "std":
            scores_G[group_B] = std_B
        case "variance":
            scores_G[group_B] = std_B**2
        case other:
            raise ValueError(f"unknown statistic {other!r}: std, variance or nothing, which is the mean")
    return scores_G


def keep_groups(
    score_G: torch.Tensor,
    strategy: str,
    value: float,
    *,
    smallest: bool = False,
    keep_zero: bool = False,
    ties: Sequence[int] | None = None,
    env_G: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the indices of the groups to train on, best score first; may be empty.

    score_G: one number per group, of `group_scores`. Groups without a score (NaN) are never kept; groups whose score is
    zero teach nothing and are dropped first unless `keep_zero`. Best is largest, or `smallest`; of equal scores the one
    that comes first in `ties`, a permutation of the groups. Without it low numbers win.

    env_G: which environment each group played, any integers; None: all the same one. Rewards of two environments need
    not have one scale (0 or 1; -1 to 10), so scores are compared within an environment only, and every rule below is
    followed in each as if it were alone. The groups kept are then those of one environment after those of another.

    none            all
    top_k           the best `value` share of all groups, at least one: max(1, int(value * groups)) in all environments
                    together, divided as `divide` says
    top_k_abs       the best `value` groups, at least one, divided likewise
    top_p           from the best until their scores sum to `value` of all, less .01 (RAGEN-2, arXiv 2604.06268, the
                    linear rule); 1 keeps all, scores that sum to almost nothing keep none
    top_p_softmax   the fewest whose softmax sums to `value`
    min_p           scores of at least `value` times the largest, or of at most the smallest / `value`

    >>> keep_groups(torch.tensor([0.1, 0.5, 0.0, 0.4]), "top_k", 0.5)
    tensor([1, 3])
    >>> keep_groups(torch.tensor([0.1, 0.5, 3.0, 4.0]), "top_k", 0.5, env_G=[0, 0, 1, 1])
    tensor([1, 3])
    """
    order_G = torch.tensor(range(len(score_G)) if ties is None else ties, dtype=torch.long, device=score_G.device)
    envs_G = torch.zeros_like(order_G) if env_G is None else torch.tensor(env_G, device=score_G.device)
    envs = list(dict.fromkeys(integers(envs_G[order_G])))
    order_G = order_G[score_G[order_G].argsort(descending=not smallest, stable=True)]
    order_G = order_G[~score_G[order_G].isnan()]
    if not keep_zero:
        order_G = order_G[score_G[order_G].abs() > 1e-10]
    ranked = [order_G[envs_G[order_G] == env] for env in envs]  # the candidates of each environment, best first
    if strategy in ("top_k", "top_k_abs"):
        total = int(value * len(score_G)) if strategy == "top_k" else int(value)
        counts = divide(max(1, total), [int((envs_G == env).sum()) for env in envs], [len(own_G) for own_G in ranked])
        parts = [own_G[:count] for own_G, count in zip(ranked, counts, strict=True)]
    else:
        parts = [own_G[_passing(score_G[own_G], strategy, value, smallest)] for own_G in ranked]
    return torch.cat([order_G[:0], *parts])


def divide(total: int, played: Sequence[int], candidates: Sequence[int]) -> list[int]:
    """Return how many of `total` kept groups each environment gets, given those it played and those it may keep.

    One each (so `total` grows to the number of environments where it is less), and then one after the other to the
    environment with the largest played / (kept + 1), which keeps the shares proportional to the groups played. What an
    environment has no candidates for goes to the others. Of equal ones the first wins.

    >>> divide(4, played=[6, 2], candidates=[6, 2]), divide(4, played=[4, 4], candidates=[1, 4])
    ([3, 1], [1, 3])
    >>> divide(1, played=[7, 1], candidates=[7, 1])
    [1, 1]
    """
    kept = [0] * len(played)
    for _ in range(min(max(total, sum(count > 0 for count in candidates)), sum(candidates))):
        open_ = [env for env, count in enumerate(candidates) if kept[env] < count]
        kept[max(open_, key=lambda env: (kept[env] == 0, played[env] / (kept[env] + 1)))] += 1
    return kept


def _passing(ranked_G: torch.Tensor, strategy: str, value: float, smallest: bool) -> torch.Tensor | slice:
    """Which of the scores of one environment, best first, a rule keeps that compares them with each other."""
    if len(ranked_G) == 0:
        return slice(None)
    match strategy:
        case "none":
            return slice(None)
        case "top_p":
            mass_G = ranked_G.clamp(min=0)
            return slice(None) if value >= 1 else mass_G.cumsum(0) - mass_G < value * mass_G.sum() - TOP_P_SLACK
        case "top_p_softmax":
            mass_G = (-ranked_G if smallest else ranked_G).softmax(0)
            return slice(None) if value >= 1 else mass_G.cumsum(0) - mass_G < value
        case "min_p":
            return ranked_G * value <= ranked_G[0] if smallest else ranked_G >= value * ranked_G[0]
        case name:
            raise ValueError(f"unknown strategy {name!r}: none, top_k, top_k_abs, top_p, top_p_softmax or min_p")


def soft_weights(score_G: torch.Tensor, env_G: Sequence[int] | None = None) -> torch.Tensor:
    """Return what to multiply each group's advantages by instead of dropping some, (G,): score / largest score.

    RAGEN's soft reweighting, of `reward_std`; groups without a score get 0, and all do where no score is positive.
    env_G: which environment each group played; the largest score is that of the same environment.
    """
    score_G = score_G.nan_to_num(0.0).clamp(min=0)
    envs_G = torch.zeros(len(score_G), dtype=torch.long) if env_G is None else torch.tensor(env_G)
    out_G = torch.zeros_like(score_G)
    for env in distinct(envs_G):
        own_G = envs_G == env
        out_G[own_G] = score_G[own_G] / score_G[own_G].max().clamp(min=1e-10)
    return out_G
