"""Can the functions that a config names by path be used?  Each is called once, before anything is loaded."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from envs.episode import Episode
from posttrain.config import StarPORun, check_parser, is_path
from posttrain.rollout import new_episode, open_env
from posttrain.starpo import estimators, losses
from posttrain.starpo.learner import objective_settings
from posttrain.types import UserError

TURNS = (1, 2, 1, 2)  # of each made-up episode, two of a group
TOKENS = 3  # of a turn


def check_functions(cfg: StarPORun) -> None:
    """Refuse a function of the user's that cannot be used.

    A wrong one would otherwise be seen at the first update, and never where no group passes the filter.

    Raises:
        UserError: says what is wrong and what to write.
    """
    for section in cfg.envs:
        check_parser(cfg.protocol, open_env(section))
    algorithm = cfg.algorithm
    if is_path(algorithm.advantage):
        with _what_was_given():
            estimators.estimate(algorithm, made_up_earned(cfg))
    if is_path(algorithm.loss_type):
        with _what_was_given():
            loss_S, _ = losses.policy_loss(made_up_tokens(), objective_settings(cfg))
            if not loss_S.isfinite().all():
                raise UserError(f"`algorithm.loss_type: {algorithm.loss_type}` returned a loss that is not finite.")


@contextmanager
def _what_was_given() -> Generator[None]:
    try:
        yield
    except UserError as error:
        count = sum(TURNS)
        raise UserError(
            f"{error} It was called with a made-up update: 4 episodes in 2 groups, {count} turns, {count * TOKENS}"
            " sampled tokens."
        ) from error


def made_up_earned(cfg: StarPORun) -> estimators.Earned:
    """Return what four made-up episodes earned, of which one is won, in the first state of a level of the run."""
    begun = new_episode(cfg.envs[0], cfg.protocol, cfg.seed, "train")
    state = begun.state_key() if isinstance(begun, Episode) else "start"
    episode_N = torch.arange(len(TURNS)).repeat_interleave(torch.tensor(TURNS))
    rewards_N = torch.tensor([0.0, -0.1, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    turn_S = torch.arange(len(rewards_N)).repeat_interleave(TOKENS)
    return estimators.Earned(
        rewards_B=torch.zeros(len(TURNS), dtype=torch.float64).index_add(0, episode_N, rewards_N),
        group_B=torch.tensor([0, 0, 1, 1]),
        env_B=torch.zeros(len(TURNS), dtype=torch.long),
        rewards_N=rewards_N,
        episode_N=episode_N,
        states_N=[state] * len(rewards_N),
        turn_S=turn_S,
        trained_S=torch.ones(len(turn_S), dtype=torch.bool),
        cut_S=torch.zeros(len(turn_S), dtype=torch.bool),
        values_S=None,
    )


def made_up_tokens() -> losses.Tokens:
    """Return tokens of a made-up update, with a gradient at their log-probs."""
    count = sum(TURNS) * TOKENS
    logprobs_S, ones_S = torch.linspace(-2.0, -0.1, count), torch.ones(count)
    return losses.Tokens(
        logprobs_S=logprobs_S.clone().requires_grad_(),
        old_S=logprobs_S,
        advantages_S=torch.linspace(-1.0, 1.0, count),
        weights_S=ones_S / count,
        importance_weights_S=ones_S,
        entropy_S=ones_S,
        reference_S=logprobs_S,
        contexts_S=torch.arange(count) // TOKENS,
    )
