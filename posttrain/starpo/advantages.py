"""How much better was this than could be expected?  Rewards in; one advantage per episode, turn or token out.

B episodes; N turns of all episodes and S sampled tokens of all turns, one after another. `group_B`, `episode_N` and
`turn_S` are integers that say where each belongs; the last two never decrease. Where a turn ends is read from these
maps and never from its reward. Rewards are finite: episodes that crashed have none and are left out by the caller.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from posttrain.runtime import distinct, integers, numbered

# Per episode


def grpo(rewards_B: torch.Tensor, group_B: torch.Tensor, *, std: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """Return the group-relative advantage, (B,): (R - mean of the group) / (standard deviation of the group + eps).

    GRPO, arXiv 2402.03300, section 4.1.2; the standard deviation is the sample one (n - 1), as in RAGEN and TRL.
    `std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). A group of one gets 0: nothing to compare with.

    >>> grpo(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]), std=False)
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    mean_B, std_B = group_moments(rewards_B, group_B)
    centred_B = rewards_B - mean_B
    return centred_B / (std_B + eps) if std else centred_B


def rloo(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return the reward minus the mean of the others in the group, (B,). A group of one gets 0.

    RLOO, arXiv 2402.14740; with `ppo_clip` on top it is LOOP, arXiv 2502.01600.

    >>> rloo(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    index_B, count_G = numbered(group_B)
    count_B = count_G[index_B]
    return grpo(rewards_B, group_B, std=False) * count_B / (count_B - 1).clamp(min=1)


def brpo(rewards_B: torch.Tensor, env_B: torch.Tensor | None = None, *, std: bool = True) -> torch.Tensor:
    """Return `grpo` of the whole batch as one group, (B,): RAGEN's BRPO.

    env_B: which environment each episode played, any integers; each environment is then a group of its own, because the
    rewards of two need not have one scale.

    >>> brpo(torch.tensor([0.0, 1.0, -1.0, 10.0]), torch.tensor([0, 0, 1, 1])).round(decimals=1)
    tensor([-0.7000,  0.7000, -0.7000,  0.7000])
    """
    env_B = torch.zeros(len(rewards_B), dtype=torch.long, device=rewards_B.device) if env_B is None else env_B
    return grpo(rewards_B, env_B, std=std)


def arpo(rewards_B: torch.Tensor) -> torch.Tensor:
    """Return the reward itself, (B,): RAGEN's ARPO, plain REINFORCE."""
    assert rewards_B.isfinite().all()
    return rewards_B


def group_moments(rewards_B: torch.Tensor, group_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and sample standard deviation of each episode's group, both (B,); a group of one has deviation 0.

    Taken from the group's smallest reward upwards, so that equal rewards have deviation 0 to the last bit.
    """
    assert rewards_B.isfinite().all()
    index_B, count_G = numbered(group_B)
    zero_G = rewards_B.new_zeros(len(count_G))
    least_B = zero_G.scatter_reduce(0, index_B, rewards_B, "amin", include_self=False)[index_B]
    above_B = rewards_B - least_B
    mean_B = (zero_G.index_add(0, index_B, above_B) / count_G)[index_B]
    square_G = zero_G.index_add(0, index_B, (above_B - mean_B) ** 2)
    return least_B + mean_B, (square_G / (count_G - 1).clamp(min=1)).sqrt()[index_B]


# Per turn


def returns_to_go(rewards_N: torch.Tensor, episode_N: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the discounted sum of this and all later rewards of the episode, (N,); of tokens for `episode_S`.

    >>> returns_to_go(torch.tensor([0.0, 0.0, 1.0, 3.0]), torch.tensor([0, 0, 0, 1]), 0.5)
    tensor([0.2500, 0.5000, 1.0000, 3.0000])
    """
    row_N, place_N = _places(episode_N)
    if len(row_N) == 0:
        return rewards_N
    grid_TB = rewards_N.new_zeros(int(place_N.max()) + 1, int(row_N[-1]) + 1)
    grid_TB[place_N, row_N] = rewards_N
    for turn in range(len(grid_TB) - 2, -1, -1):
        grid_TB[turn] += gamma * grid_TB[turn + 1]
    return grid_TB[place_N, row_N]


def gigpo(
    rewards_B: torch.Tensor,
    group_B: torch.Tensor,
    rewards_N: torch.Tensor,
    episode_N: torch.Tensor,
    bucket_N: torch.Tensor,
    *,
    weight: float = 1.0,
    gamma: float = 0.95,
    std: bool = True,
) -> torch.Tensor:
    """Return the group-relative return of the episode plus `weight` times that of the step, (N,).

    GiGPO, arXiv 2505.10978, eq. 3, 5, 7 and 8: steps taken from the same state (`bucket_N`, of `state_buckets`) are
    compared by their discounted returns; a state met once gets 0. `std=False` divides neither part.
    """
    step_N = grpo(returns_to_go(rewards_N, episode_N, gamma), bucket_N, std=std)
    return grpo(rewards_B, group_B, std=std)[episode_N] + weight * step_N


def state_buckets(states_N: Sequence[Hashable], group_N: torch.Tensor) -> torch.Tensor:
    """Return the number of the bucket of each turn, (N,): same group, same state. GiGPO, eq. 6.

    >>> state_buckets(["a", "b", "a", "a"], torch.tensor([0, 0, 0, 1])).tolist()
    [0, 1, 0, 2]
    """
    number: dict[tuple[int, Hashable], int] = {}
    numbers = [number.setdefault(key, len(number)) for key in zip(integers(group_N), states_N, strict=True)]
    return torch.tensor(numbers, dtype=torch.long, device=group_N.device)


# Per token


def token_rewards(rewards_N: torch.Tensor, turn_S: torch.Tensor) -> torch.Tensor:
    """Return each turn's reward on its last token, (S,).

    >>> token_rewards(torch.tensor([0.0, 1.0]), torch.tensor([0, 0, 1, 1, 1]))
    tensor([0., 0., 0., 0., 1.])
    """
    rewards_S = rewards_N.new_zeros(len(turn_S))
    rewards_S[_ends(turn_S, len(rewards_N))] = rewards_N
    return rewards_S


def at_the_end(rewards_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return the sum of each episode's rewards on its last turn and 0 on the others, (N,).

    RAGEN's default (`use_turn_scores: False`).

    >>> at_the_end(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([0., 3., 5.])
    """
    row_N, _ = _places(episode_N)
    last_N = _last(episode_N)
    sums_B = rewards_N.new_zeros(int(last_N.sum())).index_add(0, row_N, rewards_N)
    return torch.zeros_like(rewards_N).masked_scatter(last_N, sums_B)


def gae(
    rewards_S: torch.Tensor,
    values_S: torch.Tensor,
    episode_S: torch.Tensor,
    gamma: float,
    lam: float,
    cut_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and the critic's targets, both (S,). GAE, arXiv 1506.02438, eq. 16.

    After a token comes the next sampled one of its episode, however long the environment spoke in between; after the
    last one comes nothing, whose value is 0.

    cut_S: the tokens of episodes that were cut off, by a limit which neither the environment nor a prompt tells of.
    What they would have come to is then taken to be what the critic expects (bootstrapping, arXiv 1712.00378, section
    3.2): their last token has no error, and no reward of it counts.

    >>> rewards, values = torch.tensor([0.0, 0.0]), torch.tensor([0.5, 0.8])
    >>> gae(rewards, values, torch.tensor([0, 0]), 1.0, 1.0, cut_S=torch.tensor([True, True]))[0].round(decimals=1)
    tensor([0.3000, 0.0000])
    """
    assert rewards_S.isfinite().all() and values_S.isfinite().all()
    next_S = torch.cat([values_S[1:], values_S.new_zeros(1)])[: len(values_S)]
    last_S = _last(episode_S)
    next_S = next_S.where(~last_S, torch.zeros_like(next_S))
    errors_S = rewards_S + gamma * next_S - values_S
    if cut_S is not None:
        errors_S = errors_S.masked_fill(last_S & cut_S, 0.0)
    advantages_S = returns_to_go(errors_S, episode_S, gamma * lam)
    return advantages_S, advantages_S + values_S


def bilevel_gae(
    rewards_S: torch.Tensor,
    values_S: torch.Tensor,
    turn_S: torch.Tensor,
    episode_N: torch.Tensor,
    *,
    gamma: float,
    gamma_high: float,
    lam: float,
    cut_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and the critic's targets, both (S,): GAE over turns, then over the tokens inside each turn.

    VAGEN, arXiv 2510.16907, as its code has it. The rewards and values at the last tokens of the turns give each turn a
    return (discount `gamma_high`), which is the reward of its last token below (discount `gamma`); there, every turn
    starts anew. cut_S: as in `gae`.
    """
    ends_S = _ends(turn_S, len(episode_N))
    cut_N = None if cut_S is None else cut_S[ends_S]
    _, returns_N = gae(rewards_S[ends_S], values_S[ends_S], episode_N, gamma_high, lam, cut_N)
    return gae(rewards_S.masked_scatter(ends_S, returns_N), values_S, turn_S, gamma, lam)


def reinforce_pp(
    rewards_B: torch.Tensor,
    group_B: torch.Tensor,
    episode_S: torch.Tensor,
    *,
    baseline: bool = False,
    trained_S: torch.Tensor | None = None,
    env_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the episode's reward for each of its tokens, whitened as `whiten` says, (S,).

    REINFORCE++, arXiv 2501.03262, with the KL in the loss. `baseline` subtracts the mean of the group from the reward
    first (REINFORCE++-baseline).
    """
    score_B = grpo(rewards_B, group_B, std=False) if baseline else rewards_B
    return whiten(score_B[episode_S], trained_S, env_S)


def whiten(
    advantages_S: torch.Tensor, trained_S: torch.Tensor | None = None, env_S: torch.Tensor | None = None
) -> torch.Tensor:
    """Scale to mean 0 and variance 1 over the trained tokens of each environment, (S,); equal ones become 0.

    trained_S: the tokens that count; the others are left as they are. None: all. env_S: which environment each token
    belongs to, any integers; None: all to one.

    >>> whiten(torch.tensor([0.0, 2.0, 9.0]), torch.tensor([True, True, False])).round(decimals=1)
    tensor([-0.7000,  0.7000,  9.0000])
    """
    trained_S = torch.ones_like(advantages_S, dtype=torch.bool) if trained_S is None else trained_S
    env_S = torch.zeros_like(advantages_S, dtype=torch.long) if env_S is None else env_S
    out_S = advantages_S.clone()
    for env in distinct(env_S[trained_S]):
        own_S = trained_S & (env_S == env)
        out_S[own_S] = _whitened(advantages_S[own_S])
    return out_S


def _whitened(advantages_S: torch.Tensor) -> torch.Tensor:
    variance = ((advantages_S - advantages_S.mean()) ** 2).sum() / max(1, len(advantages_S) - 1)
    return (advantages_S - advantages_S.mean()) * (variance + 1e-8).rsqrt()


def _places(episode_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of the episode without gaps, and place of the turn in it: [3, 3, 7] -> [0, 0, 1], [0, 1, 0]."""
    assert (episode_N[1:] >= episode_N[:-1]).all(), "turns of one episode stand together, in order"
    row_N, count_B = numbered(episode_N)
    start_B = count_B.cumsum(0) - count_B
    return row_N, torch.arange(len(row_N), device=row_N.device) - start_B[row_N]


def _last(turn_S: torch.Tensor) -> torch.Tensor:
    """True at the last token of each turn: [0, 0, 1] -> [False, True, True]."""
    last_S = torch.ones_like(turn_S, dtype=torch.bool)
    last_S[:-1] = turn_S[1:] != turn_S[:-1]
    return last_S


def _ends(turn_S: torch.Tensor, turns: int) -> torch.Tensor:
    """`_last`, and every one of the turns has a token."""
    last_S = _last(turn_S)
    assert torch.equal(turn_S[last_S], torch.arange(turns, device=turn_S.device)), "every turn has a sampled token"
    return last_S
