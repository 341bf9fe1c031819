"""Which advantage does each sampled token get?  `algorithm.advantage`: an estimator by name, or a function of your own.

The formulas are in advantages.py; here each estimator is given the values that it needs. An estimator of your own has
the same signature, see posttrain/config/plugins.py. Shapes, as suffixes: B episodes, N turns of all episodes one after
another, S sampled tokens of all turns one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from posttrain.config import AlgorithmSection, call, is_path
from posttrain.starpo import advantages
from posttrain.starpo.experience import Batch
from posttrain.types import UserError


class Earned(NamedTuple):
    """What the episodes of an update earned, and which episode, group and environment turns and tokens belong to.

    A value of each turn belongs to its tokens as `value_N[turn_S]`, a value of each episode as `value_B[episode_S]`.
    """

    rewards_B: torch.Tensor  # float64: what an episode earned, penalties included
    group_B: torch.Tensor  # integers: episodes of a group played one level
    env_B: torch.Tensor  # integers: episodes of one environment
    rewards_N: torch.Tensor  # float64: what a turn earned, penalties included
    episode_N: torch.Tensor  # the episode of each turn, as its place in `rewards_B`
    states_N: list[str]  # the environment's state that each turn was answered in
    turn_S: torch.Tensor  # the turn of each token, as its place in `rewards_N`
    trained_S: torch.Tensor  # bool: whether the token counts in the loss
    cut_S: torch.Tensor  # bool: whether the episode ended because the context was full
    values_S: torch.Tensor | None  # float64: the critic's values; None without a critic

    @property
    def episode_S(self) -> torch.Tensor:
        """The episode of each token, (S,)."""
        return self.episode_N[self.turn_S]

    @property
    def env_S(self) -> torch.Tensor:
        """The environment of each token, (S,)."""
        return self.env_B[self.episode_S]

    @classmethod
    def of(cls, batch: Batch, trains_B: torch.Tensor, values_S: torch.Tensor | None) -> Earned:
        """Return what the episodes of a batch earned.

        Args:
            trains_B: bool, whose tokens count in the loss.
            values_S: the critic's, (S,).
        """
        episodes = batch.episodes
        rewards_N = torch.tensor([score for t in episodes for score in t.turn_scores], dtype=torch.float64)
        names = sorted({t.env for t in episodes})
        return cls(
            rewards_B=torch.zeros(len(episodes), dtype=torch.float64).index_add(0, batch.episode_N, rewards_N),
            group_B=batch.group_B,
            env_B=torch.tensor([names.index(t.env) for t in episodes]),
            rewards_N=rewards_N,
            episode_N=batch.episode_N,
            states_N=[state for t in episodes for state in t.state_keys],
            turn_S=batch.turn_S,
            trained_S=trains_B[batch.episode_S],
            cut_S=torch.tensor([t.out_of_context for t in episodes])[batch.episode_S],
            values_S=None if values_S is None else values_S.double(),
        )


Estimator = Callable[[Earned, AlgorithmSection], torch.Tensor]
Returns = Callable[[Earned, AlgorithmSection], tuple[torch.Tensor, torch.Tensor]]


def _gigpo(e: Earned, a: AlgorithmSection) -> torch.Tensor:
    buckets_N = advantages.state_buckets(e.states_N, e.group_B[e.episode_N])
    return advantages.gigpo(
        e.rewards_B, e.group_B, e.rewards_N, e.episode_N, buckets_N,
        weight=a.step_weight, gamma=a.gamma_high, std=a.advantage_std,
    )[e.turn_S]  # fmt: skip


def _reinforce_pp(e: Earned, baseline: bool) -> torch.Tensor:
    return advantages.reinforce_pp(
        e.rewards_B, e.group_B, e.episode_S, baseline=baseline, trained_S=e.trained_S, env_S=e.env_S
    )


ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda e, a: advantages.grpo(e.rewards_B, e.group_B, std=a.advantage_std)[e.episode_S],
    "rloo": lambda e, a: advantages.rloo(e.rewards_B, e.group_B)[e.episode_S],
    "brpo": lambda e, a: advantages.brpo(e.rewards_B, e.env_B, std=a.advantage_std)[e.episode_S],
    "arpo": lambda e, a: advantages.arpo(e.rewards_B)[e.episode_S],
    "gigpo": _gigpo,
    "reinforce_pp": lambda e, a: _reinforce_pp(e, baseline=False),
    "reinforce_pp_baseline": lambda e, a: _reinforce_pp(e, baseline=True),
}


def _token_rewards(e: Earned, a: AlgorithmSection) -> torch.Tensor:
    rewards_N = e.rewards_N if a.turn_rewards else advantages.at_the_end(e.rewards_N, e.episode_N)
    return advantages.token_rewards(rewards_N, e.turn_S)


def _gae(e: Earned, a: AlgorithmSection) -> tuple[torch.Tensor, torch.Tensor]:
    assert e.values_S is not None
    return advantages.gae(_token_rewards(e, a), e.values_S, e.episode_S, a.gamma, a.lam, e.cut_S)


def _bilevel_gae(e: Earned, a: AlgorithmSection) -> tuple[torch.Tensor, torch.Tensor]:
    assert e.values_S is not None
    return advantages.bilevel_gae(
        _token_rewards(e, a), e.values_S, e.turn_S, e.episode_N,
        gamma=a.gamma, gamma_high=a.gamma_high, lam=a.lam, cut_S=e.cut_S,
    )  # fmt: skip


WITH_CRITIC: dict[str, Returns] = {"gae": _gae, "bilevel_gae": _bilevel_gae}  # advantages and the critic's targets


def estimate(algorithm: AlgorithmSection, earned: Earned) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the advantage of each token and the critic's targets, (S,) each; None without a critic.

    Raises:
        UserError: a function of the user's raised, or returned something else than a finite float tensor (S,).
    """
    name = algorithm.advantage
    if name in WITH_CRITIC:
        advantages_S, returns_S = WITH_CRITIC[name](earned, algorithm)
        return advantages.whiten(advantages_S, earned.trained_S, earned.env_S), returns_S
    if not is_path(name):
        return ESTIMATORS[name](earned, algorithm), None
    own_S = call(name, "algorithm.advantage", earned, algorithm)
    count = len(earned.turn_S)
    if not isinstance(own_S, torch.Tensor) or own_S.shape != (count,) or not own_S.is_floating_point():
        what = type(own_S).__name__
        if isinstance(own_S, torch.Tensor):
            what = f"a tensor of shape {tuple(own_S.shape)} and dtype {own_S.dtype}"
        raise UserError(
            f"`algorithm.advantage: {name}` returned {what}, and a float tensor of shape ({count},) is needed, a"
            " number for each sampled token: index values of episodes with `earned.episode_S`, values of turns with"
            " `earned.turn_S`."
        )
    if not own_S.isfinite().all():
        raise UserError(f"`algorithm.advantage: {name}` returned a number that is not finite (nan or infinite).")
    return own_S.detach().double().cpu(), None
