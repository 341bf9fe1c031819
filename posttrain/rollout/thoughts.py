"""Where is the reasoning of a turn?  Its tokens, and the tokens that it was sampled after."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from envs.protocol import thought_span
from posttrain.models import Chat
from posttrain.types import Segment, Trajectory


class Thought(NamedTuple):
    """The reasoning of one turn: `segment.ids[:start]` ends with <think>, `segment.ids[start:end]` is the thought.

    Tokens need not end where tags do: the thought is cut at the nearest token boundaries inside it, and may be empty. A
    token across the end of <think> belongs to the prompt, one across the start of </think> to neither.
    """

    segment: Segment
    start: int
    end: int

    @property
    def prompt_ids(self) -> list[int]:
        return self.segment.ids[: self.start]

    @property
    def ids(self) -> list[int]:
        return self.segment.ids[self.start : self.end]


def thoughts(chat: Chat, trajectory: Trajectory) -> list[Thought | None]:
    """Return the reasoning of every turn; None for a turn without <think>...</think>."""
    found: list[Thought | None] = []
    for segment in trajectory.segments:
        for begin, end in zip(segment.turn_starts, segment.turn_ends, strict=True):
            ids = segment.ids[begin:end]
            text = chat.decode(ids)
            span = thought_span(text)
            if span is None:
                found.append(None)
                continue
            start = begin + _tokens_for(chat, ids, text[: span[0]])
            stop = begin + _tokens_for(chat, ids, text[: span[1] + 1]) - 1  # without the token that begins "</think>"
            found.append(Thought(segment, start, max(start, stop)))
    return found


def _tokens_for(chat: Chat, ids: list[int], text: str) -> int:
    """Return how many of these tokens it takes until their text begins with `text`."""
    return bisect_left(range(len(ids)), True, key=lambda count: chat.decode(ids[:count]).startswith(text))
