"""What does an engine promise?  Open conversations, append the world's tokens, sample turns, close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from posttrain.types import Completion, SamplingParams


class Sampler(Protocol):
    """A batch of open conversations, each known by a handle.

    Every engine gives the same tokens for the same (tokens so far, params, seed), whatever else is in the batch,
    up to floating-point noise in the logits.
    """

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Start one conversation per prompt (at least one token each) and return their handles."""
        ...

    def append(self, handle: int, ids: Sequence[int]) -> None:
        """Add tokens the model did not sample (the world's reply) to a conversation."""
        ...

    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        """Let the model write one turn in each of these conversations; `seeds[i]` addresses row i's randomness."""
        ...

    def close(self, handles: Sequence[int]) -> None:
        """Forget these conversations and free their memory."""
        ...
