"""What does every engine do?  Open conversations, append an environment's tokens, sample turns, close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from posttrain.types import Completion, SamplingParams

TurnRequest = tuple[int, int]  # the handle of a conversation in which to write a turn, and the seed of the turn
Then = Callable[[list[tuple[int, Completion]]], Sequence[TurnRequest]]


class Sampler(Protocol):
    """An engine: a batch of open conversations, each with a handle.

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
        """Write these turns, and those that `then` asks for, until it asks for none.

        Args:
            then: takes the (handle, completion) of each turn that has just been written, and returns the turns to write
                next. It may append, open and close, but not touch a conversation whose turn is still being written.
        """
        ...

    def close(self, handles: Sequence[int]) -> None:
        """Free the memory of these conversations."""
        ...

    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        """Write one turn in each of these conversations; `seeds[i]` is the seed of `handles[i]`."""
        written: dict[int, Completion] = {}

        def then(finished: list[tuple[int, Completion]]) -> Sequence[TurnRequest]:
            written.update(finished)
            return []

        self.converse(list(zip(handles, seeds, strict=True)), params, then)
        return [written[handle] for handle in handles]


class Histories(Sampler):
    """An engine's conversations as token ids."""

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
