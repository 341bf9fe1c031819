"""How far may the policy move for an advantage?  Losses and weights of sampled tokens, shape (S,).

A policy loss gives the loss of each token and where its limit bites. What a batch weighs is in `token_weights`:
`(loss_S * weight_S).sum()` over all micro-batches of all processes is the loss of the optimizer step.
"""

from __future__ import annotations

import torch

K3_LARGEST = 20.0  # nats

# Policy


def ppo_clip(
    logprobs_S: torch.Tensor,
    old_S: torch.Tensor,
    advantages_S: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
    *,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per token and where the clip bites, both (S,): -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    PPO, arXiv 1707.06347, eq. 7, with the asymmetric range of DAPO (arXiv 2503.14476, "clip-higher"). Where A < 0 the
    loss grows with r without end; `dual_clip` (above 1, verl's is 3) stops it at -dual_clip A (arXiv 1912.09729).
    """
    return _clipped((logprobs_S - old_S).exp(), advantages_S, epsilon, epsilon_high, dual_clip)


def gspo(
    logprobs_S: torch.Tensor,
    old_S: torch.Tensor,
    advantages_S: torch.Tensor,
    segment_S: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ppo_clip` with one ratio per segment, the geometric mean of its tokens' ratios; both (S,).

    GSPO, arXiv 2507.18071, eq. 7, in its token form (eq. 14), whose gradient is the same: advantages may differ inside
    a segment. `segment_S` numbers turns or episodes. The paper's range is 3e-4 and 4e-4, far below PPO's.
    """
    mean_S = _segment_sum(logprobs_S.detach() - old_S, segment_S) / _segment_sum(torch.ones_like(old_S), segment_S)
    ratio_S = (logprobs_S - logprobs_S.detach() + mean_S).exp()
    return _clipped(ratio_S, advantages_S, epsilon, epsilon_high, None)


def cispo(
    logprobs_S: torch.Tensor, old_S: torch.Tensor, advantages_S: torch.Tensor, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-stop_gradient(min(r, epsilon_high)) A log p, and where the ratio is truncated; both (S,). No token is silenced.

    CISPO, arXiv 2506.13585, eq. 4 and 5. `epsilon_high` bounds the ratio itself, as in TRL and ScaleRL (5).
    """
    ratio_S = (logprobs_S.detach() - old_S).exp()
    return -ratio_S.clamp(max=epsilon_high) * advantages_S * logprobs_S, ratio_S > epsilon_high


def dppo_tv(
    logprobs_S: torch.Tensor, old_S: torch.Tensor, advantages_S: torch.Tensor, delta: float, *, truncate: float = 20.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """-stop_gradient(min(r, truncate)) A log p, and which tokens are left out; both (S,).

    DPPO with binary total variation, arXiv 2602.04879: a token is left out once its probability, rather than the ratio,
    has moved by more than `delta` to where A pushes it. A rare token may so grow by a large factor.
    """
    fixed_S = logprobs_S.detach()
    moved_S = fixed_S.exp() - old_S.exp()
    bites_S = ((advantages_S > 0) & (moved_S > delta)) | ((advantages_S < 0) & (moved_S < -delta))
    loss_S = -(fixed_S - old_S).exp().clamp(max=truncate) * advantages_S * logprobs_S
    return loss_S.masked_fill(bites_S, 0.0), bites_S


def _clipped(
    ratio_S: torch.Tensor, advantages_S: torch.Tensor, epsilon: float, epsilon_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    clipped_S = ratio_S.clamp(1 - epsilon, 1 + epsilon_high)
    loss_S = -torch.minimum(ratio_S * advantages_S, clipped_S * advantages_S)
    bites_S = ((ratio_S > 1 + epsilon_high) & (advantages_S > 0)) | ((ratio_S < 1 - epsilon) & (advantages_S < 0))
    if dual_clip is not None:
        assert dual_clip > 1
        far_S = (ratio_S > dual_clip) & (advantages_S < 0)
        loss_S, bites_S = torch.where(far_S, -dual_clip * advantages_S, loss_S), bites_S | far_S
    return loss_S, bites_S


# Distance, value, entropy


def kl(logprobs_S: torch.Tensor, reference_S: torch.Tensor, kind: str = "k3") -> torch.Tensor:
    """Schulman's estimates of KL(policy || reference) from the policy's own tokens, shape (S,).

    With d = log policy - log reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d. k1 and k3 are unbiased, k2 and
    k3 never negative. In the reward, take k1: as rewards, k2 and k3 have the gradients of other things than the KL. In
    the loss, k1 teaches nothing on average (its gradient has mean 0), k2 has the gradient of the KL, and k3 only near
    d = 0 (joschu.net/blog/kl-approx.html; arXiv 2510.01555).

    >>> kl(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")
    tensor([0.1250])
    """
    if kind == "k1":
        return logprobs_S - reference_S
    if kind == "k2":
        return (logprobs_S - reference_S) ** 2 / 2
    if kind == "k3":
        return kl_k3(logprobs_S, reference_S)
    raise ValueError(f"unknown KL estimate {kind!r}: k1, k2 or k3")


def kl_k3(logprobs_S: torch.Tensor, old_S: torch.Tensor) -> torch.Tensor:
    """Schulman's non-negative estimate of KL(policy || old) per token: exp(d) - d - 1 with d = old - new.

    d counts up to 20, as in verl, and has no gradient beyond: exp(d) would overflow in float32 from 88 on, and one
    token that the policy has all but ruled out would cost the update of all the others. TRL has no such bound. (verl
    bounds the estimate at 10, too, which would take the pull from every token with d above 2.6 or below -11.)
    """
    difference_S = (old_S - logprobs_S).clamp(max=K3_LARGEST)
    return difference_S.expm1() - difference_S


def value_loss(
    values_S: torch.Tensor, old_S: torch.Tensor, returns_S: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of the critic per token and where its clip bites, both (S,).

    Values may move by `clip` from those of the rollout; of both errors the larger counts (OpenAI baselines' ppo2).
    """
    error_S = (values_S - returns_S) ** 2
    clipped_S = (values_S.clamp(old_S - clip, old_S + clip) - returns_S) ** 2
    return torch.maximum(error_S, clipped_S) / 2, clipped_S > error_S


def adaptive_entropy(
    coef: float, entropy: float, target: float, *, delta: float = 0.005, low: float = 0.0, high: float = 1.0
) -> tuple[float, float]:
    """Next coefficient of the entropy bonus, and what of it to apply: it rises while the entropy is at most `target`.

    Above the target the coefficient falls and nothing is applied. Skywork-OR1, arXiv 2505.22312, with TRL's limits.

    >>> adaptive_entropy(0.01, entropy=0.15, target=0.2), adaptive_entropy(0.01, entropy=0.3, target=0.2)
    ((0.015, 0.015), (0.005, 0.0))
    """
    if entropy <= target:
        coef = min(coef + delta, high)
        return coef, coef
    return max(coef - delta, low), 0.0


# Weights


def token_weights(
    segment_S: torch.Tensor, aggregation: str, lengths_B: torch.Tensor, max_length: int | None = None
) -> torch.Tensor:
    """What each token counts in the loss of the optimizer step, shape (S,).

    lengths_B: sampled tokens of every episode of the step, in all micro-batches of all processes, 0 where none counts.
    segment_S: each token's place in `lengths_B`. Parts of an episode may so be in different micro-batches.

    `token_mean`: every token alike (DAPO, arXiv 2503.14476, eq. 8). `sequence_mean`: the mean over episodes of the mean
    over their tokens (GRPO, arXiv 2402.03300, eq. 3). `dr_grpo`: a constant, 1 / (episodes * max_length) (Dr. GRPO,
    arXiv 2503.20783). Episodes without a token are not counted.

    >>> token_weights(torch.tensor([0, 0, 0, 1]), "sequence_mean", torch.tensor([3, 1]))
    tensor([0.1667, 0.1667, 0.1667, 0.5000])
    """
    episodes = (lengths_B > 0).sum()
    if aggregation == "token_mean":
        return (1 / lengths_B.sum()).expand(len(segment_S))
    if aggregation == "sequence_mean":
        return 1 / (lengths_B[segment_S] * episodes)
    if aggregation == "dr_grpo":
        assert max_length is not None
        return (1 / (episodes * max_length)).expand(len(segment_S))
    raise ValueError(f"unknown aggregation {aggregation!r}: token_mean, sequence_mean or dr_grpo")


def sampler_weights(
    trainer_S: torch.Tensor,
    sampler_S: torch.Tensor,
    correction: str,
    segment_S: torch.Tensor | None = None,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weight of each token and which were truncated or masked, both (S,); its mean is the share affected.

    One policy has different log-probs in the engine that sampled and in the one that trains; w = p_train / p_sample.

    none             1
    truncate         min(w, high) (TIS, fengyao.notion.site/off-policy-rl; high is 2 there)
    mask             w, and 0 outside [low, high] (IcePop, ringtech.notion.site/icepop)
    sequence_mask    the same with the product of w over the segment (TRL's default, with 0 and 3)
    geometric_mask   1, and 0 where the geometric mean of w over the segment lies outside (SkyRL: 0.99 and 1.01)

    >>> trainer, sampler = torch.tensor([0.5, 0.3]).log(), torch.tensor([0.1, 0.3]).log()
    >>> sampler_weights(trainer, sampler, "truncate", high=2.0)
    (tensor([2., 1.]), tensor([ True, False]))
    """
    if correction not in ("none", "truncate", "mask", "sequence_mask", "geometric_mask"):
        raise ValueError(f"unknown correction {correction!r}: none, truncate, mask, sequence_mask or geometric_mask")
    gap_S = (trainer_S - sampler_S).detach()
    none_S = torch.zeros_like(gap_S, dtype=torch.bool)
    if correction == "none":
        return torch.ones_like(gap_S), none_S
    if correction in ("sequence_mask", "geometric_mask"):
        assert segment_S is not None
        count_S = _segment_sum(torch.ones_like(gap_S), segment_S)
        gap_S = _segment_sum(gap_S, segment_S) / (count_S if correction == "geometric_mask" else 1)
    ratio_S = gap_S.exp()
    if correction == "truncate":
        return ratio_S.clamp(max=high), ratio_S > high
    outside_S = (ratio_S < low) | (ratio_S > high)
    weight_S = torch.ones_like(ratio_S) if correction == "geometric_mask" else ratio_S
    return weight_S.masked_fill(outside_S, 0.0), outside_S


def _segment_sum(values_S: torch.Tensor, segment_S: torch.Tensor) -> torch.Tensor:
    """Sum over each token's segment, shape (S,)."""
    numbers_G, index_S = segment_S.unique(return_inverse=True)
    return values_S.new_zeros(len(numbers_G)).index_add(0, index_S, values_S)[index_S]
