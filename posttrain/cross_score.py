"""How likely is every reasoning under every prompt?  Teacher forcing of R x N pairs that share their prefixes.

Shapes: R reasonings, N distinct prompts, B rows of a batch, Q tokens read anew, P tokens of a prefix, H key-value
heads, D their size, S scored tokens one after another.

A prompt is read once, and every reasoning continues the same keys and values: N x P + N x R x Q tokens are computed
instead of N x R x (P + Q).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from posttrain.convgpt import ConvGPTModel
from posttrain.policy import VOCABULARY_CHUNK, _logit_scale, microbatches, token_logprobs
from posttrain.types import address

# ------------------------------------------------------------------------------------------------------ which pairs


class Turn(NamedTuple):
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


def first_turn_pairs(episodes: Sequence[Sequence[Turn]], count: int, *place: int | str) -> Pairs:
    """Up to `count` first turns, drawn at this address; a group is one column, groups with one prompt share theirs.

    Turns without a thought are left out; where siblings have prompts of their own, each is a column.
    """
    first = [turns[0] for turns in episodes if turns and turns[0].reasoning]
    chosen = sorted(sorted(range(len(first)), key=lambda i: address(*place, "first turn", i))[:count])
    return _merged([first[i] for i in chosen], once_a_group=True)


def trajectory_pairs(episodes: Sequence[Sequence[Turn]], count: int, *place: int | str) -> Pairs:
    """Up to `count` episodes drawn at this address, and one of the turns with a thought of each: a column a turn."""
    spoken = [[turn for turn in turns if turn.reasoning] for turns in episodes]
    able = [i for i, turns in enumerate(spoken) if turns]
    chosen = sorted(sorted(able, key=lambda i: address(*place, "episode", i))[:count])
    return _merged([spoken[i][address(*place, "turn", i) % len(spoken[i])] for i in chosen], once_a_group=False)


def _merged(turns: list[Turn], *, once_a_group: bool) -> Pairs:
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

    `token_budget` bounds the padded reasoning tokens of one forward pass; beside them stands one layer's copy of the
    prefix for each row. A model that has no standard cache, or does not compute with it what it computes without
    (tried on two pairs first), reads every pair as a whole instead, with a warning.
    """
    assert all(prompts) and all(reasonings), "every prompt and every reasoning needs a token"
    if not prompts or not reasonings:
        return torch.zeros(len(reasonings), len(prompts))
    was_training = model.training
    model.eval()
    shared = shares_prefixes(model, prompts[0], reasonings[:2], temperature)
    if not shared:
        warnings.warn(f"{type(model).__name__}: no standard KV cache; every pair reads its prompt again", stacklevel=3)
    columns = [
        (_score_shared if shared and len(prompt) > 1 else _score_whole)(
            model, prompt, reasonings, token_budget, temperature
        )
        for prompt in prompts
    ]
    model.train(was_training)
    return torch.stack(columns, dim=1)


@torch.no_grad()
def shares_prefixes(
    model: PreTrainedModel, prompt: Sequence[int], reasonings: Sequence[Sequence[int]], temperature: float = 1.0
) -> bool:
    """Whether these reasonings score with a shared prefix as they do when read as a whole."""
    if len(prompt) < 2:
        return True  # nothing to share, so nothing to get wrong
    if _read_prefix(model, prompt[:-1]) is None:
        return False
    whole_R = _score_whole(model, prompt, reasonings, 1, temperature)
    shared_R = _score_shared(model, prompt, reasonings, sum(map(len, reasonings)), temperature)
    exact = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    length_R = torch.tensor([len(reasoning) for reasoning in reasonings])
    return bool(((whole_R - shared_R).abs() < (1e-3 if exact else 0.25) * length_R).all())


class _Prefix(DynamicLayer):
    """Keys and values of one prompt, [1, H, P, D], that every row continues; what the rows add is not kept."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        rows = len(key_states)
        keys = torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2)
        return keys, torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2)


def _read_prefix(model: PreTrainedModel, ids: Sequence[int]) -> DynamicCache | None:
    """These ids as a cache that any number of rows can continue; None where the model keeps no such cache."""
    ids_1P = torch.tensor([list(ids)], device=model.device)
    keep = {"logits_to_keep": 1} if isinstance(model.base_model, ConvGPTModel) else {}
    cache = getattr(model.base_model(input_ids=ids_1P, use_cache=True, **keep), "past_key_values", None)
    if not isinstance(cache, DynamicCache):
        return None
    for i, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            return None
        cache.layers[i] = _Prefix(layer.keys, layer.values)
    return cache


def _score_shared(
    model: PreTrainedModel,
    prompt: Sequence[int],
    reasonings: Sequence[Sequence[int]],
    token_budget: int,
    temperature: float,
) -> torch.Tensor:
    """One column, (R,): every row is the prompt's last token and a reasoning, behind the prefix read once."""
    cache = _read_prefix(model, prompt[:-1])
    assert cache is not None
    head: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    scores_R = torch.zeros(len(reasonings))
    for batch in microbatches([len(reasoning) for reasoning in reasonings], token_budget):
        width = max(len(reasonings[i]) for i in batch)
        ids_BQ = torch.zeros(len(batch), width + 1, dtype=torch.long)
        length_B = torch.tensor([len(reasonings[i]) for i in batch])
        for row, i in enumerate(batch):
            ids_BQ[row, : len(reasonings[i]) + 1] = torch.tensor([prompt[-1], *reasonings[i]])
        # padding on the right, which a causal model cannot see; the last token predicts nothing that is scored
        predicts_BQ = (torch.arange(width) < length_B[:, None]).to(model.device)
        ids_BQ = ids_BQ.to(model.device)
        hidden_SD = _hidden_states(model, ids_BQ[:, :-1], predicts_BQ, cache)
        logprobs_S, *_ = ChunkedLogProbFunction.apply(
            hidden_SD,
            head.weight,
            head.bias,
            ids_BQ[:, 1:][predicts_BQ],
            temperature,
            VOCABULARY_CHUNK,
            getattr(config, "final_logit_softcapping", None),
            _logit_scale(config),
            (),
        )
        scores_R[batch] = torch.stack([part.sum() for part in logprobs_S.split(length_B.tolist())]).float().cpu()
    return scores_R


def _hidden_states(
    model: PreTrainedModel, ids_BQ: torch.Tensor, predicts_BQ: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """What the output layer multiplies at the positions that predict a scored token, (S, D)."""
    backbone = model.base_model
    if isinstance(backbone, ConvGPTModel):
        outputs = backbone(input_ids=ids_BQ, past_key_values=cache, use_cache=True, logits_to_keep=predicts_BQ)
        return outputs.last_hidden_state
    return backbone(input_ids=ids_BQ, past_key_values=cache, use_cache=True).last_hidden_state[predicts_BQ]


def _score_whole(
    model: PreTrainedModel,
    prompt: Sequence[int],
    reasonings: Sequence[Sequence[int]],
    token_budget: int,
    temperature: float,
) -> torch.Tensor:
    """The same column from whole sequences, for models that keep no standard cache."""
    scores_R = torch.zeros(len(reasonings))
    for batch in microbatches([len(prompt) + len(reasoning) for reasoning in reasonings], token_budget):
        rows = [[*prompt, *reasonings[i]] for i in batch]
        masks = [[False] * len(prompt) + [True] * len(reasonings[i]) for i in batch]
        logprobs_S, _ = token_logprobs(model, rows, masks, temperature)
        parts = logprobs_S.split([len(reasonings[i]) for i in batch])
        scores_R[batch] = torch.stack([part.sum() for part in parts]).float().cpu()
    return scores_R
