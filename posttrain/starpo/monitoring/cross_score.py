"""How likely is every reasoning under every prompt?  Teacher forcing of R x N pairs that share their prefixes.

Shapes: R reasonings of Q tokens, N distinct prompts of P tokens, S scored tokens.

A prompt is prefilled once and every reasoning continues its keys and values: N x P + N x R x Q tokens are computed
instead of N x R x (P + Q).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from posttrain.models import Prefixes, head_logprobs, microbatches
from posttrain.plan import can_share_prefixes
from posttrain.types import derive_seed

# ------------------------------------------------------------------------------------------------------ which pairs


class ReasonedTurn(NamedTuple):
    """A turn of an episode: the ids up to and including <think>, the ids of the thought, and the episode's group."""

    prompt: list[int]
    reasoning: list[int]
    group: int


class Pairs(NamedTuple):
    """The sample to score: Pairs(prompts=[p0, p1], weights=[2, 1], reasonings=[a, b, c], own=[0, 1, 0]).

    `prompts` are distinct. `weights`: how many groups or turns each stands for. `own`: the prompt of each reasoning.
    """

    prompts: list[list[int]]
    weights: list[int]
    reasonings: list[list[int]]
    own: list[int]


def first_turn_pairs(episodes: Sequence[Sequence[ReasonedTurn]], count: int, *place: int | str) -> Pairs:
    """Draw up to `count` first turns with a thought; each distinct prompt of a group is a column.

    place: what the seed is derived from.
    """
    first = [turns[0] for turns in episodes if turns and turns[0].reasoning]
    chosen = sorted(sorted(range(len(first)), key=lambda i: derive_seed(*place, "first turn", i))[:count])
    return _merged([first[i] for i in chosen], once_a_group=True)


def trajectory_pairs(episodes: Sequence[Sequence[ReasonedTurn]], count: int, *place: int | str) -> Pairs:
    """Draw up to `count` episodes, and from each a turn with a thought, which is a column.

    place: what the seed is derived from.
    """
    spoken = [[turn for turn in turns if turn.reasoning] for turns in episodes]
    able = [i for i, turns in enumerate(spoken) if turns]
    chosen = sorted(sorted(able, key=lambda i: derive_seed(*place, "episode", i))[:count])
    return _merged([spoken[i][derive_seed(*place, "turn", i) % len(spoken[i])] for i in chosen], once_a_group=False)


def _merged(turns: list[ReasonedTurn], *, once_a_group: bool) -> Pairs:
    """Merge equal prompts into one column; its weight is the number of groups (or turns) with this prompt."""
    columns: dict[tuple[int, ...], set[int]] = {}
    for i, turn in enumerate(turns):
        columns.setdefault(tuple(turn.prompt), set()).add(turn.group if once_a_group else i)
    number = {prompt: n for n, prompt in enumerate(columns)}
    return Pairs(
        prompts=[list(prompt) for prompt in columns],
        weights=[len(shown) for shown in columns.values()],
        reasonings=[turn.reasoning for turn in turns],
        own=[number[tuple(turn.prompt)] for turn in turns],
    )


# ----------------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def cross_scores(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    reasonings: Sequence[Sequence[int]],
    *,
    token_budget: int = 16384,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return scores_RN on the CPU: the log-prob of each reasoning after each prompt, summed over its tokens.

    A model that computes something else with a shared prefix reads every pair as a whole, with a warning.

    Args:
        token_budget: padded tokens of a forward pass, without one layer's copy of the prefix for each row.
    """
    assert all(prompts) and all(reasonings), "every prompt and every reasoning needs a token"
    scores_RN = torch.zeros(len(reasonings), len(prompts))
    if not prompts or not reasonings:
        return scores_RN
    was_training = model.training
    model.eval()
    shared = can_share_prefixes(model)
    if not shared:
        warnings.warn(f"{type(model).__name__}: no standard KV cache; every pair reads its prompt again", stacklevel=3)
    for columns in microbatches([len(prompt) for prompt in prompts], token_budget):
        prefixes = Prefixes(model, [tuple(prompts[n][:-1]) for n in columns if shared and len(prompts[n]) > 1])
        pairs = [(r, n) for n in columns for r in range(len(reasonings))]
        lengths = [len(reasonings[r]) + (1 if shared else len(prompts[n])) for r, n in pairs]
        for batch in microbatches(lengths, token_budget):
            several = [pairs[i] for i in batch]
            rows = [[*prompts[n], *reasonings[r]] for r, n in several]
            masks = [[False] * len(prompts[n]) + [True] * len(reasonings[r]) for r, n in several]
            logprobs_S, _ = head_logprobs(model, *prefixes.states(rows, masks), temperature)
            for (r, n), part in zip(several, torch.split(logprobs_S, [sum(mask) for mask in masks]), strict=True):
                scores_RN[r, n] = part.float().sum()
    model.train(was_training)
    return scores_RN
