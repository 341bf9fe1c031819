"""What does an update minimise?  The objective as one formula, and the losses and weights that it is made of.

Shapes, as suffixes: S sampled tokens of all turns one after another, B episodes. A loss function returns the loss of
each token and which tokens are clipped, both (S,).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

K3_LARGEST = 20.0  # nats


class Settings(NamedTuple):
    """What the objective is set to: Settings(loss_type="ppo_clip", epsilon=0.2, epsilon_high=0.28)."""

    loss_type: str = "ppo_clip"  # ppo_clip, gspo_turn, gspo_episode, cispo or dppo_tv
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    dual_clip: float | None = None  # of ppo_clip
    delta: float = 0.2  # of dppo_tv
    scale: float = 1.0  # of the policy loss, see `filters.loss_scale`
    entropy_coef: float = 0.0
    beta: float = 0.0  # weight of the KL to the reference
    kl_estimator: str = "k3"


class Tokens(NamedTuple):
    """The sampled tokens of a micro-batch, every field (S,). Gradients come from `logprobs_S` and `entropy_S` alone."""

    logprobs_S: torch.Tensor  # under the policy
    old_S: torch.Tensor  # under the policy before the update
    advantages_S: torch.Tensor
    weights_S: torch.Tensor  # what a token counts in the optimizer step, of `token_weights`
    importance_weights_S: torch.Tensor  # of `sampler_weights`
    entropy_S: torch.Tensor
    reference_S: torch.Tensor | None = None  # log-probs under the reference
    segments_S: torch.Tensor | None = None  # the turn or episode of each token, for gspo


class Objective(NamedTuple):
    """The loss of a micro-batch, and of each of its tokens the policy loss and whether it is clipped, (S,)."""

    loss: torch.Tensor
    policy_S: torch.Tensor
    clipped_S: torch.Tensor


def objective(tokens: Tokens, settings: Settings) -> Objective:
    """What a micro-batch adds to the loss of an optimizer step; call `backward` on `.loss`.

        L = sum over S of  weight_S * ( scale * w_S * policy_S  -  entropy_coef * H_S  +  beta * KL_S )

        policy_S  the policy loss of each token, e.g. -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) with
                  r = exp(logprobs - old), PPO's eq. 7 (arXiv 1707.06347). StarPO (arXiv 2504.20073, section 2.2) takes
                  it over the sampled tokens of all turns of an episode. `gspo`, `cispo` and `dppo_tv` cite theirs
        w_S       importance weight, where the engine that sampled has other log-probs (`sampler_weights`)
        H_S       entropy of the distribution that the token was drawn from, nats
        KL_S      an estimate of KL(policy || reference), k1 to k3 (`kl`)
        weight_S  what the token counts: 1 / (all tokens of the step) is DAPO's token mean, arXiv 2503.14476, eq. 8
                  (`token_weights` has the others)

    The sum of the losses of all micro-batches of all processes is the loss of the step: how tokens are cut into
    micro-batches changes nothing.

    >>> one, zero = torch.tensor([1.0]), torch.tensor([0.0])
    >>> objective(Tokens(zero, zero, advantages_S=2 * one, weights_S=one, importance_weights_S=one, entropy_S=one),
    ...           Settings(entropy_coef=0.1)).loss
    tensor(-2.1000)
    """
    policy_S, clipped_S = policy_loss(tokens, settings)
    loss_S = settings.scale * policy_S * tokens.importance_weights_S
    if settings.entropy_coef:  # without it the output layer is spared the gradient of the entropy
        loss_S = loss_S - settings.entropy_coef * tokens.entropy_S
    if settings.beta:
        assert tokens.reference_S is not None
        loss_S = loss_S + settings.beta * kl(tokens.logprobs_S, tokens.reference_S, settings.kl_estimator)
    return Objective((tokens.weights_S * loss_S).sum(), policy_S, clipped_S)


def policy_loss(tokens: Tokens, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy loss by name: of each token, and which tokens are clipped, both (S,)."""
    new_S, old_S, advantages_S = tokens.logprobs_S, tokens.old_S, tokens.advantages_S
    low, high = settings.epsilon, settings.epsilon_high
    match settings.loss_type:
        case "ppo_clip":
            return ppo_clip(new_S, old_S, advantages_S, low, high, dual_clip=settings.dual_clip)
        case "gspo_turn" | "gspo_episode":
            assert tokens.segments_S is not None
            return gspo(new_S, old_S, advantages_S, tokens.segments_S, low, high)
        case "cispo":
            return cispo(new_S, old_S, advantages_S, high)
        case "dppo_tv":
            return dppo_tv(new_S, old_S, advantages_S, settings.delta)
        case name:
            raise ValueError(f"unknown loss {name!r}: ppo_clip, gspo_turn, gspo_episode, cispo or dppo_tv")


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
    """Loss per token and which tokens are clipped, both (S,): -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

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
    """-stop_gradient(min(r, epsilon_high)) A log p, and which ratios are truncated; both (S,). All tokens learn.

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
    left_out_S = ((advantages_S > 0) & (moved_S > delta)) | ((advantages_S < 0) & (moved_S < -delta))
    loss_S = -(fixed_S - old_S).exp().clamp(max=truncate) * advantages_S * logprobs_S
    return loss_S.masked_fill(left_out_S, 0.0), left_out_S


def _clipped(
    ratio_S: torch.Tensor, advantages_S: torch.Tensor, epsilon: float, epsilon_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    limited_S = ratio_S.clamp(1 - epsilon, 1 + epsilon_high)
    loss_S = -torch.minimum(ratio_S * advantages_S, limited_S * advantages_S)
    clipped_S = ((ratio_S > 1 + epsilon_high) & (advantages_S > 0)) | ((ratio_S < 1 - epsilon) & (advantages_S < 0))
    if dual_clip is not None:
        assert dual_clip > 1
        far_S = (ratio_S > dual_clip) & (advantages_S < 0)
        loss_S, clipped_S = torch.where(far_S, -dual_clip * advantages_S, loss_S), clipped_S | far_S
    return loss_S, clipped_S


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
    match kind:
        case "k1":
            return logprobs_S - reference_S
        case "k2":
            return (logprobs_S - reference_S) ** 2 / 2
        case "k3":
            return kl_k3(logprobs_S, reference_S)
        case name:
            raise ValueError(f"unknown KL estimate {name!r}: k1, k2 or k3")


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
    """Half the squared error of the critic per token and which tokens are clipped, both (S,).

    Values may move by `clip` from those of the rollout; of both errors the larger counts (OpenAI baselines' ppo2).
    """
    error_S = (values_S - returns_S) ** 2
    clipped_S = (values_S.clamp(old_S - clip, old_S + clip) - returns_S) ** 2
    return torch.maximum(error_S, clipped_S) / 2, clipped_S > error_S


def adaptive_entropy(coef: float, entropy: float, target: float, *, delta: float = 0.005) -> tuple[float, float]:
    """Next coefficient of the entropy bonus, and what of it to apply: it rises while the entropy is at most `target`.

    Above the target the coefficient falls and nothing is applied. Skywork-OR1, arXiv 2505.22312, within 0 and 1 as in
    TRL.

    >>> adaptive_entropy(0.01, entropy=0.15, target=0.2), adaptive_entropy(0.01, entropy=0.3, target=0.2)
    ((0.015, 0.015), (0.005, 0.0))
    """
    if entropy <= target:
        coef = min(coef + delta, 1.0)
        return coef, coef
    return max(coef - delta, 0.0), 0.0


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
    match aggregation:
        case "token_mean":
            return (1 / lengths_B.sum()).expand(len(segment_S))
        case "sequence_mean":
            return 1 / (lengths_B[segment_S] * episodes)
        case "dr_grpo":
            assert max_length is not None
            return (1 / (episodes * max_length)).expand(len(segment_S))
        case name:
            raise ValueError(f"unknown aggregation {name!r}: token_mean, sequence_mean or dr_grpo")


def sampler_weights(
    trainer_S: torch.Tensor,
    sampler_S: torch.Tensor,
    correction: str,
    segment_S: torch.Tensor | None = None,
    low: float = 0.0,
    high: float = 2.0,
) -> torch.Tensor:
    """Importance weight of each token, (S,). One policy has different log-probs in the engine that sampled and in the
    one that trains; w = p_train / p_sample.

    none             1
    truncate         min(w, high) (TIS, fengyao.notion.site/off-policy-rl; high is 2 there)
    mask             w, and 0 outside [low, high] (IcePop, ringtech.notion.site/icepop)
    sequence_mask    the same with the product of w over the segment (TRL's default, with 0 and 3)
    geometric_mask   1, and 0 where the geometric mean of w over the segment lies outside (SkyRL: 0.99 and 1.01)

    >>> trainer, sampler = torch.tensor([0.5, 0.3]).log(), torch.tensor([0.1, 0.3]).log()
    >>> sampler_weights(trainer, sampler, "truncate", high=2.0)
    tensor([2., 1.])
    """
    log_S = (trainer_S - sampler_S).detach()

    def inside(ratio_S: torch.Tensor, weights_S: torch.Tensor) -> torch.Tensor:
        return weights_S.masked_fill((ratio_S < low) | (ratio_S > high), 0.0)

    match correction:
        case "none":
            return torch.ones_like(log_S)
        case "truncate":
            return log_S.exp().clamp(max=high)
        case "mask":
            return inside(ratio_S := log_S.exp(), ratio_S)
        case "sequence_mask":
            assert segment_S is not None
            return inside(ratio_S := _segment_sum(log_S, segment_S).exp(), ratio_S)
        case "geometric_mask":
            assert segment_S is not None
            mean_S = _segment_sum(log_S, segment_S) / _segment_sum(torch.ones_like(log_S), segment_S)
            return inside(mean_S.exp(), torch.ones_like(log_S))
        case name:
            raise ValueError(f"unknown correction {name!r}: none, truncate, mask, sequence_mask or geometric_mask")


def _segment_sum(values_S: torch.Tensor, segment_S: torch.Tensor) -> torch.Tensor:
    """Sum over each token's segment, shape (S,)."""
    numbers_G, index_S = segment_S.unique(return_inverse=True)
    return values_S.new_zeros(len(numbers_G)).index_add(0, index_S, values_S)[index_S]
