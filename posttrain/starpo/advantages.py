"""How much better was this episode than its siblings?  Raw returns in, one advantage per episode out."""

from __future__ import annotations

import torch


def grpo(rewards_B: torch.Tensor, group_B: torch.Tensor, *, std: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """Group-relative advantage, shape (B,): (R - mean of the group) / (standard deviation of the group + eps).

    GRPO, arXiv 2402.03300, section 4.1.2; the standard deviation is the sample one (n - 1), as in RAGEN and TRL.
    `std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). A group of one gets 0: nothing to compare with.

    >>> grpo(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]), std=False)
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    mean_B, std_B = group_moments(rewards_B, group_B)
    centred_B = rewards_B - mean_B
    return centred_B / (std_B + eps) if std else centred_B


def group_moments(rewards_B: torch.Tensor, group_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sample standard deviation of each trajectory's group, both (B,); a group of one has deviation 0."""
    if len(rewards_B) == 0:
        return rewards_B, rewards_B
    _, index_B = group_B.unique(return_inverse=True)
    zero_G = torch.zeros(int(index_B.max()) + 1, dtype=rewards_B.dtype)
    count_G = zero_G.index_add(0, index_B, torch.ones_like(rewards_B))
    mean_G = zero_G.index_add(0, index_B, rewards_B) / count_G
    square_B = (rewards_B - mean_G[index_B]) ** 2
    variance_G = zero_G.index_add(0, index_B, square_B) / (count_G - 1).clamp(min=1)
    return mean_G[index_B], variance_G.sqrt()[index_B]
