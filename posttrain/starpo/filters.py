"""Which groups are worth an update?  Scores come from raw rewards with penalties, before any normalisation."""

from __future__ import annotations

import torch


def keep_groups(
    score_G: torch.Tensor, strategy: str, value: float, *, keep_zero: bool = False, eps: float = 0.01
) -> torch.Tensor:
    """Indices of the groups to train on, best score first; may be empty.

    score_G: one number per group, e.g. the standard deviation of its rewards (StarPO-S, arXiv 2504.20073, eq. 7).
    `none` keeps all; `top_k` keeps the best `value` share (at least one); `top_p` keeps from the top until the kept
    scores sum to `value` of all (RAGEN-2, arXiv 2604.06268, linear rule, with its tolerance `eps`).
    Groups whose score is zero teach nothing and are dropped first unless `keep_zero`.

    >>> keep_groups(torch.tensor([0.1, 0.5, 0.0, 0.4]), "top_k", 0.5)
    tensor([1, 3])
    """
    order_G = score_G.argsort(descending=True, stable=True)
    if not keep_zero:
        order_G = order_G[score_G[order_G] > 1e-10]
    if strategy == "none" or len(order_G) == 0:
        return order_G
    if strategy == "top_k":
        return order_G[: max(1, int(value * len(score_G)))]
    if strategy == "top_p":
        ranked_G = score_G[order_G]
        before_G = ranked_G.cumsum(0) - ranked_G
        return order_G[before_G < value * score_G.sum() - eps]
    raise ValueError(f"unknown filter strategy {strategy!r}: none, top_k or top_p")
