"""How likely is every reasoning under every prompt?  Teacher forcing of R x N pairs that share their prefixes.

Shapes: R reasonings of Q tokens, N distinct prompts of P tokens, S scored tokens one after another.

A prompt is prefilled once, and every reasoning continues the same keys and values: N x P + N x R x Q tokens are
computed instead of N x R x (P + Q).
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
    """One answer of an episode: the ids up to and including <think>, those of the thought, and the episode's group."""

    prompt: list[int]
    reasoning: list[int]
    group: int


class Pairs(NamedTuple):
    """What is scored: Pairs(prompts=[p0, p1], weights=[2, 1], reasonings=[a, b, c], own=[0, 1, 0]).

    `prompts` are distinct; `weights` says how many columns each stands for, `own` whose column each reasoning is.
    """

    prompts: list[list[int]]
    weights: list[int]
    reasonings: list[list[int]]
    own: list[int]


def first_turn_pairs(episodes: Sequence[Sequence[ReasonedTurn]], count: int, *place: int | str) -> Pairs:
    """Up to `count` first turns; a group is one column, groups with one prompt share theirs.

    `place` is what the seed is derived from. Turns without a thought are left out; where the samples of a group have
    prompts of their own, each is a column.
    """
    first = [turns[0] for turns in episodes if turns and turns[0].reasoning]
    chosen = sorted(sorted(range(len(first)), key=lambda i: derive_seed(*place, "first turn", i))[:count])
    return _merged([first[i] for i in chosen], once_a_group=True)


def trajectory_pairs(episodes: Sequence[Sequence[ReasonedTurn]], count: int, *place: int | str) -> Pairs:
    """Up to `count` episodes, and one of the turns with a thought of each: a column a turn.

    `place` is what the seed is derived from.
    """
    spoken = [[turn for turn in turns if turn.reasoning] for turns in episodes]
    able = [i for i, turns in enumerate(spoken) if turns]
    chosen = sorted(sorted(able, key=lambda i: derive_seed(*place, "episode", i))[:count])
    return _merged([spoken[i][derive_seed(*place, "turn", i) % len(spoken[i])] for i in chosen], once_a_group=False)


def _merged(turns: list[ReasonedTurn], *, once_a_group: bool) -> Pairs:
    """Equal prompts become one column, which counts for each group (or each turn) that showed it."""
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
    """scores_RN on the CPU: the log-prob of each reasoning after each prompt, summed over its tokens.

    `token_budget` bounds the padded tokens of one forward pass; beside them stands one layer's copy of the prefix for
    each row. A model that does not compute with a shared prefix what it computes without reads every pair as a whole
    instead, with a warning.
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
            for (r, n), part in zip(several, logprobs_S.split([sum(mask) for mask in masks]), strict=True):
                scores_RN[r, n] = part.float().sum()
    model.train(was_training)
    return scores_RN
