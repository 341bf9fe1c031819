"""What else do episodes say?  The environment's words, and own wins: two losses beside the policy's.

Shapes: S predicted tokens of all rows one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain import parallel
from posttrain.experience import Batch, BatchRow
from posttrain.policy import microbatches, token_logprobs
from posttrain.types import Trajectory, derive_seed

if TYPE_CHECKING:
    from posttrain.learner import Learner

BEFORE = 2  # tokens that a token is told by where it is constant text
KEPT_WINS = 512  # episodes
WINS_READ = 16  # in an optimizer step
HARD = 0.5  # wins are kept of groups that won no more than this share


def observed(rows: Sequence[BatchRow]) -> list[list[bool]]:
    """Which tokens of each row the environment said behind the first answer, without constant text (ECHO).

    A token is constant text where these rows never show another one behind the same `BEFORE` tokens.
    """
    seen: dict[tuple[int, ...], set[int]] = {}
    said = []
    for row in rows:
        first = row.mask.index(True)
        said.append([not on and n > first for n, on in enumerate(row.mask)])
        for n, on in enumerate(said[-1]):
            if on:
                seen.setdefault(tuple(row.ids[n - BEFORE : n]), set()).add(row.ids[n])
    return [
        [on and len(seen[tuple(row.ids[n - BEFORE : n])]) > 1 for n, on in enumerate(own)]
        for row, own in zip(rows, said, strict=True)
    ]


class Wins:
    """Episodes that won where most of their group lost, and their cross-entropy (self-imitation of SPEAR)."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.rows = learner, deque[BatchRow](maxlen=KEPT_WINS)

    def remember(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        for group in groups:
            won = [t for t in group if t.success]
            if 0 < len(won) <= HARD * len(group):
                self.rows.extend(Batch.of(won).rows)

    def backward(self, step: int, number: int) -> None:
        """Add this process's share of the gradient: coef (1 - done share of the run) x mean over tokens of -log p."""
        cfg = self.learner.cfg
        weight = cfg.algorithm.wins_coef * (1 - step / cfg.trainer.max_steps)
        if not self.rows or weight <= 0:
            return
        chosen = [
            self.rows[derive_seed(cfg.seed, "wins", step, number, n) % len(self.rows)]
            for n in range(min(WINS_READ, len(self.rows)))
        ]
        tokens, own = sum(sum(row.mask) for row in chosen), chosen[parallel.rank() :: parallel.size()]
        for micro in microbatches([len(row.ids) for row in own], self.learner.budget):
            with self.learner.autocast():
                rows = [own[n] for n in micro]
                logprobs_S, _ = token_logprobs(
                    self.learner.policy, [row.ids for row in rows], [row.mask for row in rows]
                )
            (-weight / tokens * logprobs_S.float().sum()).backward()
