"""What does an update minimise?  The objective as one formula, and the losses and weights that it is made of.

Shapes, as suffixes: S sampled tokens of all turns one after another, B episodes. A loss function returns the loss of
each token and which tokens are clipped, both (S,).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from posttrain.config import call, is_path
from posttrain.types import UserError

K3_LARGEST = 20.0  # nats


class Settings(NamedTuple):
    """What the objective is set to: Settings(loss_type="ppo_clip", epsilon=0.2, epsilon_high=0.28)."""

    loss_type: str = "ppo_clip"  # ppo_clip, gspo, cispo, or the path of a function of one's own
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    delta: float | None = None  # of ppo_clip
    entropy_coef: float = 0.0
    beta: float = 0.0  # weight of the KL to the reference


class Tokens(NamedTuple):
    """The sampled tokens of a micro-batch, every field (S,). Gradients come from `logprobs_S` and `entropy_S` alone."""

    logprobs_S: torch.Tensor  # under the policy
    old_S: torch.Tensor  # under the policy before the update
    advantages_S: torch.Tensor
    weights_S: torch.Tensor  # what a token counts in the optimizer step, of `token_weights`
    importance_weights_S: torch.Tensor  # of `sampler_weights`
    entropy_S: torch.Tensor
    reference_S: torch.Tensor | None = None  # log-probs under the reference
    contexts_S: torch.Tensor | None = None  # the context of each token, for gspo; those of the tokens are 0, 1, 2, ...


class Objective(NamedTuple):
    """The loss of a micro-batch, and of each of its tokens the policy loss and whether it is clipped, (S,)."""

    loss: torch.Tensor
    policy_S: torch.Tensor
    clipped_S: torch.Tensor


def objective(tokens: Tokens, settings: Settings) -> Objective:
    """Return what a micro-batch adds to the loss of an optimizer step; call `backward` on `.loss`.

        L = sum over S of  weight_S * ( w_S * policy_S  -  entropy_coef * H_S  +  beta * KL_S )

        policy_S  the policy loss of each token, e.g. -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) with
                  r = exp(logprobs - old), PPO's eq. 7 (arXiv 1707.06347). StarPO (arXiv 2504.20073, section 2.2) takes
                  it over the sampled tokens of all turns of an episode. `gspo` and `cispo` cite theirs
        w_S       importance weight, where the engine that sampled has other log-probs (`sampler_weights`)
        H_S       entropy of the distribution that the token was drawn from, nats
        KL_S      an estimate of KL(policy || reference) (`kl`)
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
    loss_S = policy_S * tokens.importance_weights_S
    if settings.entropy_coef:  # without it the output layer is spared the gradient of the entropy
        loss_S = loss_S - settings.entropy_coef * tokens.entropy_S
    if settings.beta:
        assert tokens.reference_S is not None
        loss_S = loss_S + settings.beta * kl(tokens.logprobs_S, tokens.reference_S)
    return Objective((tokens.weights_S * loss_S).sum(), policy_S, clipped_S)


def policy_loss(tokens: Tokens, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the policy loss of each token, and which tokens are clipped, both (S,).

    Raises:
        UserError: a function of the user's raised or returned something else.
    """
    new_S, old_S, advantages_S = tokens.logprobs_S, tokens.old_S, tokens.advantages_S
    low, high = settings.epsilon, settings.epsilon_high
    match settings.loss_type:
        case "ppo_clip":
            return ppo_clip(new_S, old_S, advantages_S, low, high, delta=settings.delta)
        case "gspo":
            assert tokens.contexts_S is not None
            return gspo(new_S, old_S, advantages_S, tokens.contexts_S, low, high)
        case "cispo":
            return cispo(new_S, old_S, advantages_S, high)
        case name if is_path(name):
            return _checked(name, call(name, "algorithm.loss_type", tokens, settings), len(new_S))
        case name:
            raise ValueError(f"unknown loss {name!r}: ppo_clip, gspo or cispo")


def _checked(path: str, result: object, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function of the user's returned; a UserError where it is not loss and clipped tokens, both (S,)."""
    match result:
        case (torch.Tensor() as loss_S, torch.Tensor() as clipped_S) if (
            loss_S.shape == clipped_S.shape == (count,)
            and clipped_S.dtype == torch.bool
            and (loss_S.requires_grad or not torch.is_grad_enabled())
        ):
            return loss_S, clipped_S
        case _:
            raise UserError(
                f"`algorithm.loss_type: {path}` has to return two tensors of shape ({count},): the loss of each token,"
                " with gradient from `tokens.logprobs_S`, and which tokens are clipped, of dtype bool; without a clip"
                " `torch.zeros_like(loss_S, dtype=torch.bool)`."
            )


# Policy


def ppo_clip(
    logprobs_S: torch.Tensor,
    old_S: torch.Tensor,
    advantages_S: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
    *,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss per token and which are clipped, both (S,): -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    PPO, arXiv 1707.06347, eq. 7, with the asymmetric range of DAPO (arXiv 2503.14476, "clip-higher"). Where A < 0 the
    loss grows with r without end; `delta` (above 1; verl's clip_ratio_c is 3) stops it at -delta A (dual clip, arXiv
    1912.09729, eq. 5; TRL's two-sided GRPO).
    """
    return _clipped((logprobs_S - old_S).exp(), advantages_S, epsilon, epsilon_high, delta)


def gspo(
    logprobs_S: torch.Tensor,
    old_S: torch.Tensor,
    advantages_S: torch.Tensor,
    context_S: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `ppo_clip` with one ratio for each context, the geometric mean of its tokens' ratios; both (S,).

    GSPO, arXiv 2507.18071, eq. 7, in its token form (eq. 14), whose gradient is the same: advantages may differ inside
    a context. `context_S` numbers the contexts 0, 1, 2, ...: rows as the model reads them, each with the tokens sampled
    in it. The paper's range is 3e-4 and 4e-4, far below PPO's.
    """
    mean_S = _context_sum(logprobs_S.detach() - old_S, context_S) / _context_sum(torch.ones_like(old_S), context_S)
    ratio_S = (logprobs_S - logprobs_S.detach() + mean_S).exp()
    return _clipped(ratio_S, advantages_S, epsilon, epsilon_high, None)


def cispo(
    logprobs_S: torch.Tensor, old_S: torch.Tensor, advantages_S: torch.Tensor, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -stop_gradient(min(r, epsilon_high)) A log p, and which ratios are truncated; both (S,). All tokens learn.

    CISPO, arXiv 2506.13585, eq. 4 and 5. `epsilon_high` bounds the ratio itself, as in TRL and ScaleRL (5).
    """
    ratio_S = (logprobs_S.detach() - old_S).exp()
    return -ratio_S.clamp(max=epsilon_high) * advantages_S * logprobs_S, ratio_S > epsilon_high


def _clipped(
    ratio_S: torch.Tensor, advantages_S: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    limited_S = ratio_S.clamp(1 - epsilon, 1 + epsilon_high)
    loss_S = -torch.minimum(ratio_S * advantages_S, limited_S * advantages_S)
    clipped_S = ((ratio_S > 1 + epsilon_high) & (advantages_S > 0)) | ((ratio_S < 1 - epsilon) & (advantages_S < 0))
    if delta is not None:
        assert delta > 1
        far_S = (ratio_S > delta) & (advantages_S < 0)
        loss_S, clipped_S = torch.where(far_S, -delta * advantages_S, loss_S), clipped_S | far_S
    return loss_S, clipped_S


# Distance, value


def kl(logprobs_S: torch.Tensor, reference_S: torch.Tensor) -> torch.Tensor:
    """Return Schulman's estimate k3 of KL(policy || reference) from the policy's own tokens, never negative, (S,).

    exp(d) - d - 1 with d = log reference - log policy (joschu.net/blog/kl-approx.html), as in TRL's GRPO and RAGEN's
    code. RAGEN's paper names k1, whose gradient in the loss is zero on average. With the tokens held fixed, as in a
    loss, the gradient of k3 is on average that of the other direction, KL(reference || policy).

    d counts up to 20, as in verl, and has no gradient beyond: exp(d) would overflow in float32 from 88 on, and one
    token that the policy has all but ruled out would cost the update of all the others. TRL has no such bound. (verl
    bounds the estimate at 10, too, which would take the pull from every token with d above 2.6 or below -11.)

    >>> kl(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1065])
    """
    difference_S = (reference_S - logprobs_S).clamp(max=K3_LARGEST)
    return difference_S.expm1() - difference_S


def value_loss(
    values_S: torch.Tensor, old_S: torch.Tensor, returns_S: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half the squared error of the critic per token and which tokens are clipped, both (S,).

    Values may move by `clip` from those of the rollout; of both errors the larger counts (OpenAI baselines' ppo2).
    """
    error_S = (values_S - returns_S) ** 2
    clipped_S = (values_S.clamp(old_S - clip, old_S + clip) - returns_S) ** 2
    return torch.maximum(error_S, clipped_S) / 2, clipped_S > error_S


# Weights


def token_weights(
    episode_S: torch.Tensor, aggregation: str, lengths_B: torch.Tensor, max_length: int | None = None
) -> torch.Tensor:
    """Return what each token counts in the loss of the optimizer step, (S,).

    lengths_B: sampled tokens of every episode of the step, in all micro-batches of all processes, 0 where none counts.
    episode_S: each token's episode, as its place in `lengths_B`. Parts of an episode may so be in different
    micro-batches.

    `token_mean`: every token alike (DAPO, arXiv 2503.14476, eq. 8). `sequence_mean`: the mean over episodes of the mean
    over their tokens (GRPO, arXiv 2402.03300, eq. 3). `dr_grpo`: a constant, 1 / (episodes * max_length) (Dr. GRPO,
    arXiv 2503.20783). Episodes without a token are not counted.

    >>> token_weights(torch.tensor([0, 0, 0, 1]), "sequence_mean", torch.tensor([3, 1]))
    tensor([0.1667, 0.1667, 0.1667, 0.5000])
    """
    episodes = (lengths_B > 0).sum()
    match aggregation:
        case "token_mean":
            return (1 / lengths_B.sum()).expand(len(episode_S))
        case "sequence_mean":
            return 1 / (lengths_B[episode_S] * episodes)
        case "dr_grpo":
            assert max_length is not None
            return (1 / (episodes * max_length)).expand(len(episode_S))
        case name:
            raise ValueError(f"unknown aggregation {name!r}: token_mean, sequence_mean or dr_grpo")


def sampler_weights(trainer_S: torch.Tensor, sampler_S: torch.Tensor, clip_max: float | None) -> torch.Tensor:
    """Return the importance weight of each token, (S,): min(p_train / p_sample, clip_max); 1 with clip_max None.

    One policy has different log-probs in the engine that sampled and in the one that trains. Truncated importance
    sampling (fengyao.notion.site/off-policy-rl, where clip_max is 2), TRL's mode `token_truncate`.

    >>> trainer, sampler = torch.tensor([0.5, 0.3]).log(), torch.tensor([0.1, 0.3]).log()
    >>> sampler_weights(trainer, sampler, clip_max=2.0)
    tensor([2., 1.])
    """
    log_S = (trainer_S - sampler_S).detach()
    return torch.ones_like(log_S) if clip_max is None else log_S.exp().clamp(max=clip_max)


def _context_sum(values_S: torch.Tensor, context_S: torch.Tensor) -> torch.Tensor:
    """Sum over each token's context, shape (S,)."""
    sums_S = torch.zeros_like(values_S)  # of as many contexts at most: to count them, Python would wait for a GPU
    return sums_S.index_add(0, context_S, values_S)[context_S]
