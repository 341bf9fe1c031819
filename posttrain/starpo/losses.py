"""How far may the policy move for an advantage?  Token losses; the caller divides by the global token count."""

from __future__ import annotations

import torch


def ppo_clip(
    logprobs_S: torch.Tensor, old_S: torch.Tensor, advantages_S: torch.Tensor, epsilon: float, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per token and where the clip bites, both (S,): -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    PPO, arXiv 1707.06347, eq. 7, with the asymmetric range of DAPO (arXiv 2503.14476, "clip-higher").
    """
    ratio_S = (logprobs_S - old_S).exp()
    clipped_S = ratio_S.clamp(1 - epsilon, 1 + epsilon_high)
    loss_S = -torch.minimum(ratio_S * advantages_S, clipped_S * advantages_S)
    bites_S = ((ratio_S > 1 + epsilon_high) & (advantages_S > 0)) | ((ratio_S < 1 - epsilon) & (advantages_S < 0))
    return loss_S, bites_S


def kl_k3(logprobs_S: torch.Tensor, old_S: torch.Tensor) -> torch.Tensor:
    """Schulman's non-negative estimate of KL(policy || old) per token: exp(d) - d - 1 with d = old - new."""
    difference_S = old_S - logprobs_S
    return difference_S.exp() - difference_S - 1
