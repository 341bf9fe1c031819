"""What do the steps of an iteration hand on?  Scored groups, their tokens in one batch, what each was worth.

Shapes: B episodes, N turns of all episodes one after another, S sampled tokens of all turns one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from posttrain.runtime import distinct
from posttrain.types import Trajectory, derive_seed


class Scored(NamedTuple):
    """Which groups are kept, and which of their episodes are trained on."""

    members: list[list[bool]]  # [group][sample] whether it counts in its group's statistics: no crash, tokens sampled
    trains: list[list[bool]]  # [group][sample] whether its tokens may count in the loss
    std: list[float]  # of each group: sample standard deviation of the group's rewards
    weights: list[float]  # of each group: what the group's advantages are multiplied by
    kept: list[int]  # numbers of the groups to train on

    def batch(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[Batch, torch.Tensor]:
        """Return the members of the kept groups, and whose tokens may count in the loss, (B,) bool."""
        chosen = [(number, sample) for number in self.kept for sample, on in enumerate(self.members[number]) if on]
        trains_B = torch.tensor([self.trains[number][sample] for number, sample in chosen])
        return Batch.of([groups[number][sample] for number, sample in chosen]), trains_B


class BatchRow(NamedTuple):
    """One context of an episode: what is read, what was sampled there, and where these tokens stand in the batch."""

    episode: int
    ids: list[int]
    mask: list[bool]
    tokens: slice


def token_places(rows: Sequence[BatchRow]) -> torch.Tensor:
    """Return where the tokens sampled in these rows stand in the batch, row by row, (S,)."""
    return torch.cat([torch.arange(0), *(torch.arange(row.tokens.start, row.tokens.stop) for row in rows)])


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

    @classmethod
    def of(cls, episodes: Sequence[Trajectory]) -> Batch:
        """Return these episodes, of which each has a sampled token in every turn, as tensors."""
        turns: list[int] = []  # of each turn: the number of its episode
        tokens: list[int] = []  # of each turn: how many were sampled
        rows: list[BatchRow] = []
        start = 0
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


class Minibatch(NamedTuple):
    """The episodes of an optimizer step.

    number: of the step, over all epochs. lengths_B: how many tokens of each episode count in its loss, (B,) integers; 0
    where the episode is not in it.
    """

    number: int
    lengths_B: torch.Tensor


class Experience(NamedTuple):
    """What an update learns from: episodes, their tokens as measured before it, and what each token was worth."""

    batch: Batch
    measured: Measured
    advantages_S: torch.Tensor
    returns_S: torch.Tensor | None  # the critic's targets
    trains_B: torch.Tensor  # bool: whose tokens count in the loss; the others are in its group's statistics alone

    @property
    def trained_S(self) -> torch.Tensor:
        """Which tokens count in the loss, (S,) bool."""
        return self.trains_B[self.batch.episode_S]

    def read_in(self, minibatches: Sequence[Minibatch]) -> torch.Tensor:
        """Return which episodes are in any of these optimizer steps, (B,) bool."""
        lengths_B = torch.zeros(len(self.batch.episodes), dtype=torch.long)
        return sum((each.lengths_B for each in minibatches), lengths_B) > 0

    def minibatches(self, epochs: int, count: int, seed: int, step: int) -> list[Minibatch]:
        """Return the optimizer steps of an update, those without a token left out.

        Args:
            epochs: how often each episode is read.
            count: optimizer steps in an epoch, each of whole groups, in a seeded order.
        """
        lengths_B = torch.bincount(self.batch.episode_S, minlength=len(self.batch.episodes)) * self.trains_B
        steps: list[Minibatch] = []
        for epoch in range(epochs):
            groups = distinct(self.batch.group_B)
            groups.sort(key=lambda group: derive_seed(seed, "order", step, epoch, group))
            for part in range(count):
                chosen_B = torch.isin(self.batch.group_B, torch.tensor(groups[part::count]))
                steps.append(Minibatch(epoch * count + part, lengths_B * chosen_B))
        return [minibatch for minibatch in steps if minibatch.lengths_B.sum() > 0]
