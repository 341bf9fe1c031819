"""What does the update see of each token of a recorded episode?  Text, log-prob, entropy, advantage, loss mask.

For people to read. One pass without gradient over the few recorded episodes; the update does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from posttrain.models import Chat
from posttrain.runtime import floats, integers
from posttrain.starpo.experience import Batch, Experience
from posttrain.starpo.learner import Learner
from posttrain.types import Trajectory


class TokenFigures(TypedDict):
    """The tokens of a turn: {"text": ["<think>", "to"], "logprob": [None, -0.1], ...}."""

    text: list[str]
    logprob: list[float | None]
    entropy: list[float | None]
    advantage: list[float | None]
    loss: list[int]


def token_figures(
    learner: Learner, chat: Chat, episodes: Sequence[Trajectory], experience: Experience | None
) -> list[list[TokenFigures]]:
    """Return figures of the tokens of each turn of each episode. Call it before the update, on every process.

    logprob: the sampler's. entropy: of the distribution that the token was drawn from, nats. advantage: None if the
    episode's group was filtered out. loss: 1 if the token counts in the loss. A forced opening tag is not sampled and
    has only a text.
    """
    sampled = [t for t in episodes if t.tokens]
    entropies = iter(floats(learner.entropies(Batch.of(sampled))) if sampled else ())
    advantages_of = {} if experience is None else _advantages(experience)
    texts: dict[int, str] = {}
    figures: list[list[TokenFigures]] = []
    for t in episodes:
        advantages, trained = advantages_of.get(id(t), ([None] * t.tokens, False))
        left = iter(advantages)
        turns: list[TokenFigures] = []
        for segment in t.segments:
            for start, end in zip(segment.turn_starts, segment.turn_ends, strict=True):
                turn: TokenFigures = {"text": [], "logprob": [], "entropy": [], "advantage": [], "loss": []}
                for token, on, logprob in zip(
                    segment.ids[start:end], segment.mask[start:end], segment.logprobs[start:end], strict=True
                ):
                    if token not in texts:
                        texts[token] = chat.decode([token]) or str(chat.tokenizer.convert_ids_to_tokens(token))
                    turn["text"].append(texts[token])
                    turn["logprob"].append(_rounded(logprob) if on else None)
                    turn["entropy"].append(_rounded(next(entropies)) if on else None)
                    turn["advantage"].append(next(left) if on else None)
                    turn["loss"].append(int(on and trained))
                turns.append(turn)
        figures.append(turns)
    return figures


def _advantages(experience: Experience) -> dict[int, tuple[list[float | None], bool]]:
    """Return id of an episode -> (its tokens' advantages, whether they count in the loss)."""
    values = [_rounded(value) for value in floats(experience.advantages_S)]
    advantages: dict[int, tuple[list[float | None], bool]] = {}
    start = 0
    for t, trained in zip(experience.batch.episodes, integers(experience.trains_B), strict=True):
        advantages[id(t)] = (values[start : start + t.tokens], bool(trained))
        start += t.tokens
    return advantages


def _rounded(value: float) -> float | None:
    """Round to four digits; None for a number that is not finite, as in metrics.jsonl."""
    return round(value, 4) if math.isfinite(value) else None
