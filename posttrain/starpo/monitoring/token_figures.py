"""What was each token of a recorded episode to the update?  Its text, log-prob, entropy, advantage, and its loss mask.

For people to read beside an episode. One pass without gradient over the few episodes that are recorded; nothing that
is computed for the update changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posttrain.models import Chat
from posttrain.starpo.experience import Batch, Experience
from posttrain.starpo.learner import Learner
from posttrain.types import Trajectory

Turn = dict[str, list[Any]]  # {"text": ["<think>", "to"], "logprob": [None, -0.1], "entropy": ..., "advantage": ...}


def token_figures(
    learner: Learner, chat: Chat, episodes: Sequence[Trajectory], experience: Experience | None
) -> list[list[Turn]]:
    """The turns of each episode, token by token, before the update. Every process has to call it.

    logprob: the sampler's. entropy: of the distribution that the token was drawn from, nats. advantage: null where the
    episode's group was filtered out. loss: 1 where the token counts in the loss. A forced opening tag was not sampled:
    it has neither of them.
    """
    sampled = [t for t in episodes if t.tokens]
    entropies = iter(learner.entropies(Batch.of(sampled)).tolist() if sampled else ())
    known = {} if experience is None else _advantages(experience)
    texts: dict[int, str] = {}
    found = []
    for t in episodes:
        advantages, trained = known.get(id(t), ([None] * t.tokens, False))
        left, turns = iter(advantages), []
        for segment in t.segments:
            for start, end in zip(segment.turn_starts, segment.turn_ends, strict=True):
                turn: Turn = {"text": [], "logprob": [], "entropy": [], "advantage": [], "loss": []}
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
        found.append(turns)
    return found


def _advantages(experience: Experience) -> dict[int, tuple[list[float | None], bool]]:
    """id of an episode -> (its tokens' advantages, whether they count in the loss)."""
    values = [_rounded(value) for value in experience.advantages_S.tolist()]
    found, start = {}, 0
    for t, trained in zip(experience.batch.episodes, experience.trains_B.tolist(), strict=True):
        found[id(t)] = (values[start : start + t.tokens], trained)
        start += t.tokens
    return found


def _rounded(value: float) -> float | None:
    """Four digits are enough to look at; null for what JSON has no number for, as in metrics.jsonl."""
    return round(value, 4) if math.isfinite(value) else None
