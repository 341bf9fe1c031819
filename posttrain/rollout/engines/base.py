"""What does an engine promise?  Open conversations, append an environment's tokens, sample turns, close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from posttrain.types import Completion, SamplingParams

TurnRequest = tuple[
    int, int
]  # the handle of a conversation in which a turn is to be written, and the seed of its randomness
Then = Callable[[list[tuple[int, Completion]]], Sequence[TurnRequest]]


class Sampler(Protocol):
    """A batch of open conversations, each known by a handle.

    Every engine gives the same tokens for the same (tokens so far, params, seed), whatever else is in the batch,
    up to floating-point noise in the logits.
    """

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Start one conversation per prompt (at least one token each) and return their handles."""
        ...

    def append(self, handle: int, ids: Sequence[int]) -> None:
        """Add tokens the model did not sample (the environment's reply) to a conversation."""
        ...

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        """Let the model write these turns, and those that follow, until there are none.

        Whenever some are written, `then` is told (handle, completion) of each. It may append, open and close, but not
        touch a conversation that is still being written in, and returns the turns to come.
        """
        ...

    def close(self, handles: Sequence[int]) -> None:
        """Forget these conversations and free their memory."""
        ...

    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        """One turn in each of these conversations; `seeds[i]` is row i's seed."""
        written: dict[int, Completion] = {}

        def then(finished: list[tuple[int, Completion]]) -> Sequence[TurnRequest]:
            written.update(finished)
            return []

        self.converse(list(zip(handles, seeds, strict=True)), params, then)
        return [written[handle] for handle in handles]


class Histories(Sampler):
    """The bookkeeping of engines that keep nothing of a conversation but its tokens."""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}
        self._next = 0

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        handles = list(range(self._next, self._next + len(prompts)))
        self._next += len(prompts)
        self._ids.update({handle: list(prompt) for handle, prompt in zip(handles, prompts, strict=True)})
        return handles

    def append(self, handle: int, ids: Sequence[int]) -> None:
        self._ids[handle].extend(ids)

    def close(self, handles: Sequence[int]) -> None:
        for handle in handles:
            del self._ids[handle]
