"""What do the steps of an iteration hand on?  Scored groups, their tokens in one batch, what each was worth.

Shapes: B episodes, N turns of all episodes one after another, S sampled tokens of all turns one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from posttrain.types import Trajectory, derive_seed


class Scored(NamedTuple):
    """Which groups are kept, and which of their episodes are trained on."""

    members: list[list[bool]]  # [group][sample] whether it counts in its group's statistics: no crash, tokens sampled
    trains: list[list[bool]]  # [group][sample] whether its tokens may count in the loss
    std: list[float]  # of each group: sample standard deviation of the group's rewards
    weights: list[float]  # of each group: what the group's advantages are multiplied by
    kept: list[int]  # numbers of the groups to train on


class BatchRow(NamedTuple):
    """One context of an episode: what is read, what was sampled there, and where these tokens stand in the batch."""

    episode: int
    ids: list[int]
    mask: list[bool]
    tokens: slice


class Batch(NamedTuple):
    """The episodes of an update and which of them each turn and each sampled token belongs to."""

    episodes: list[Trajectory]
    group_B: torch.Tensor
    episode_N: torch.Tensor
    turn_S: torch.Tensor
    sampler_S: torch.Tensor  # the sampler's log-probs
    rows: list[BatchRow]

    @property
    def episode_S(self) -> torch.Tensor:
        return self.episode_N[self.turn_S]

    @property
    def context_S(self) -> torch.Tensor:
        """Which row each token was sampled in."""
        counts = [row.tokens.stop - row.tokens.start for row in self.rows]
        return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.long))

    @classmethod
    def of(cls, episodes: Sequence[Trajectory]) -> Batch:
        turns, tokens, rows, start = [], [], [], 0
        for number, episode in enumerate(episodes):
            turns += [number] * episode.turns
            tokens += episode.turn_tokens
            for segment in episode.segments:
                rows.append(BatchRow(number, segment.ids, segment.mask, slice(start, start := start + segment.tokens)))
        return cls(
            episodes=list(episodes),
            group_B=torch.tensor([episode.group for episode in episodes]),
            episode_N=torch.tensor(turns, dtype=torch.long),
            turn_S=torch.arange(len(tokens)).repeat_interleave(torch.tensor(tokens, dtype=torch.long)),
            sampler_S=torch.tensor([logprob for episode in episodes for logprob in episode.sampled_logprobs]),
            rows=rows,
        )


class Measured(NamedTuple):
    """Every sampled token before the update, (S,): log-probs of the reference, the critic's values."""

    reference_S: torch.Tensor | None
    values_S: torch.Tensor | None


class Experience(NamedTuple):
    """What an update learns from: episodes, their tokens as measured before it, and what each token was worth."""

    batch: Batch
    measured: Measured
    advantages_S: torch.Tensor
    returns_S: torch.Tensor | None  # the critic's targets
    trains_B: torch.Tensor  # bool: whose tokens count in the loss; the others are in its group's statistics alone

    def minibatches(self, count: int, seed: int, step: int, epoch: int) -> list[torch.Tensor]:
        """The episodes of each optimizer step of an epoch, (B,) bool: whole groups, in a seeded order."""
        groups = sorted(
            self.batch.group_B.unique().tolist(), key=lambda group: derive_seed(seed, "order", step, epoch, group)
        )
        return [torch.isin(self.batch.group_B, torch.tensor(groups[part::count])) for part in range(count)]
