"""What does a model say about tokens?  Log-probs and entropies of those that are trained, from one pass through it.

backbone_states, trained_states  the states that the output layer multiplies where a trained token is predicted
head_logprobs                    the output layer, applied to these states alone, a few columns at a time
kl_backward, reverse_kl          the distance of its distributions from those of another model, a few tokens at a time
Prefixes                         rows with the same prefix, which is prefilled once and continued by every row

Shapes: B rows, T tokens of the longest row, S trained tokens of all rows one after another, C of them at a time,
D states, V vocabulary; G prefixes of at most P tokens, Q tokens of a row behind its prefix, H key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from posttrain.runtime import CacheLayer, chunked_logprobs, compat, floats, sent

Ids = Sequence[int]
# what a model raises where its cache or its attention is of another kind
UNFIT = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
# columns of the logits that exist at any one time; on a CPU few enough that they hardly leave its caches
VOCABULARY_CHUNK = {"cuda": 8192, "cpu": 2048}
# numbers in the logits, tokens times vocabulary, that exist of each of two models whose distributions are compared; but
# at least those of so many tokens, for which the weights of the output layers are read once
KL_TILE, KL_TOKENS = {"cuda": 2**25, "cpu": 2**20}, 32


def microbatches(lengths: Sequence[int], token_budget: float) -> Iterator[list[int]]:
    """Yield indices of rows of similar length, at most `token_budget` padded tokens in each batch of several."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def token_logprobs(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each trained token and the entropy at its position, with gradient.

    Args:
        rows: token ids of each row.
        masks: True on the trained tokens of each row; never on its first token.
        temperature: divides the logits.

    Returns:
        Log-probs and entropies in nats, both (S,): the S trained tokens, row after row.
    """
    return head_logprobs(model, *trained_states(model, rows, masks), temperature)


def trained_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states from which trained tokens are predicted, and those tokens.

    Rows are padded on the right, which a causal model cannot see, so no attention mask is needed.

    Args:
        rows: token ids of each row.
        masks: True on the trained tokens of each row; never on its first token.

    Returns:
        Hidden states (S, D) before the output layer, and token ids (S,), row after row.
    """
    width = max(map(len, rows))
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ids_BT[i, : len(row)] = torch.tensor(row)
        mask_BT[i, : len(row)] = torch.tensor(mask)
    assert not mask_BT[:, 0].any(), "the first token of a conversation is never sampled"
    inputs = {"input_ids": sent(ids_BT, model.device), "use_cache": False}
    return backbone_states(model, mask_BT.roll(-1, 1), **inputs), sent(ids_BT[mask_BT], model.device)


def backbone_states(model: PreTrainedModel, predicts_BT: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the model's hidden states before the output layer at some positions.

    Args:
        predicts_BT: True at the positions to return; on the CPU, where a GPU need not be waited for.
        **inputs: of the model's forward, as `input_ids`.

    Returns:
        Hidden states (S, D), row after row.
    """
    backbone: Any = model.base_model
    own_mask = "attention_mask" in inputs  # without one layers may be run again, outside this context
    places = tuple(sent(each_S, model.device) for each_S in predicts_BT.nonzero(as_tuple=True))
    with compat.grouped_queries() if own_mask else nullcontext():
        if getattr(backbone, "selects_positions", False):
            return backbone(**inputs, logits_to_keep=places).last_hidden_state
        return backbone(**inputs).last_hidden_state[places]


def attention_mask(model: PreTrainedModel, sees_BQK: torch.Tensor) -> torch.Tensor:
    """Return an attention mask in the form that the model's attention implementation takes.

    Args:
        sees_BQK: True where a token (Q) attends to a key (K).

    Returns:
        The mask, (B, 1, Q, K): of numbers to add for eager and sdpa, of booleans otherwise.
    """
    sees_B1QK = sees_BQK[:, None]
    implementation = compat.attention_of(model.config)
    if implementation not in ("eager", "sdpa"):
        return sees_B1QK
    # Both add a mask instead of selecting by it; sdpa would convert it again in every layer.
    device, dtype = sees_BQK.device, model.dtype
    if implementation == "sdpa" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    hidden = -torch.inf if implementation == "sdpa" else torch.finfo(dtype).min
    return torch.zeros(sees_B1QK.shape, dtype=dtype, device=device).masked_fill_(~sees_B1QK, hidden)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of the language model, which is a part of the config of a model that also sees or hears."""
    return model.config.get_text_config()


def attends_to_all(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to everything before it, in the same way however long the rows are.

    Engines that keep a cache and shared prefixes need both.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if {"dynamic", "longrope"} & {rope.get("rope_type")}:  # there a token's rotation depends on the longest row
        return False
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is not None:
        return all(kind in ("full_attention", "global") for kind in kinds)
    windows = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
    return all(getattr(config, name, None) is None for name in windows)


# -------------------------------------------------------------------------------------------------- output layer
def head_logprobs(
    model: PreTrainedModel, hidden_SD: torch.Tensor, tokens_S: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each token and the entropy at its position, with gradient.

    Args:
        hidden_SD: hidden states before the output layer, from which the tokens are predicted.
        tokens_S: token ids.
        temperature: divides the logits.

    Returns:
        Log-probs and entropies in nats, both (S,).
    """
    if hidden_SD.dtype == torch.float64:  # TRL's function computes in float32
        log_p_SV = (_logits(model, model.get_output_embeddings(), hidden_SD) / temperature).log_softmax(-1)
        return log_p_SV.gather(-1, tokens_S[:, None])[:, 0], -(log_p_SV.exp() * log_p_SV).sum(-1)
    layer: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    columns = VOCABULARY_CHUNK.get(hidden_SD.device.type, VOCABULARY_CHUNK["cuda"])
    return chunked_logprobs(
        hidden_SD, layer.weight, layer.bias, tokens_S,
        columns=columns, temperature=temperature, cap=soft_cap(config), scale=logit_scale(config),
    )  # fmt: skip


def kl_backward(
    model: PreTrainedModel,
    hidden_SD: torch.Tensor,
    teacher: PreTrainedModel,
    teacher_SD: torch.Tensor,
    weight: float | None,
    without_adapter: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 (it holds nothing)
) -> float:
    """Return the sum over tokens of KL(teacher || model) over the vocabulary, and add `weight` times its gradient.

    It computes forward and backward for a few tokens at a time, so that logits exist for these alone, and then runs the
    backward pass of the hidden states, whose graph is freed.

    Args:
        hidden_SD: the model's hidden states before the output layer.
        teacher: the teacher, which may be the model itself without its adapter.
        teacher_SD: the teacher's hidden states at the same positions.
        weight: factor of the gradient; None for no gradient.
        without_adapter: context in which the model is the teacher; rows of the output layer may be trained as well.

    Returns:
        The sum in nats.
    """
    kl_S, gradient_SD = _kl(
        model, hidden_SD, teacher, teacher_SD, weight, reverse=False, without_adapter=without_adapter
    )
    if gradient_SD is not None:
        with torch.autocast(hidden_SD.device.type, enabled=False):
            hidden_SD.backward(gradient_SD)
    return sum(floats(kl_S))  # here alone something waits for a GPU


def reverse_kl(
    model: PreTrainedModel,
    hidden_SD: torch.Tensor,
    teacher: PreTrainedModel,
    teacher_SD: torch.Tensor,
    weights_S: torch.Tensor | None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(model || teacher) over the vocabulary at each position, and a scalar with the gradient of their sum.

    As `kl_backward` it computes for a few tokens at a time, and adds the output layer's gradient at once. The gradient
    of the hidden states comes with the scalar's backward pass, which a caller can join with that of another loss. Where
    one of the models has more logits, for tokens that do not exist, the first ones are compared alone.

    Args:
        hidden_SD: the model's hidden states before the output layer.
        teacher_SD: the teacher's hidden states at the same positions.
        weights_S: factor of each position's KL in the sum; None for no gradient.
        temperature: divides the logits of both.

    Returns:
        The KL in nats, (S,), without gradient; and the scalar, whose value says nothing.
    """
    kl_S, gradient_SD = _kl(model, hidden_SD, teacher, teacher_SD, weights_S, reverse=True, temperature=temperature)
    return kl_S, hidden_SD.new_zeros(()) if gradient_SD is None else (hidden_SD * gradient_SD).sum()


def kl_tokens(kind: str, vocabulary: int) -> int:
    """Return of how many tokens `reverse_kl` and `kl_backward` have the logits at a time on a kind of device."""
    return max(KL_TOKENS, KL_TILE.get(kind, KL_TILE["cuda"]) // vocabulary)


def _kl(
    model: PreTrainedModel,
    hidden_SD: torch.Tensor,
    teacher: PreTrainedModel,
    teacher_SD: torch.Tensor,
    weights: torch.Tensor | float | None,
    *,
    reverse: bool,
    without_adapter: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 (it holds nothing)
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the KL at each position, (S,), and the gradient of its weighted sum at the hidden states, (S, D).

    Logits exist for a few tokens at a time, and the output layer is given its gradient at once. With the model's p and
    the teacher's q, the gradient of KL(p || q) at the logits is p (log p - log q - KL), that of KL(q || p) is p - q.

    Args:
        weights: of each position, (S,), or one for all; None for no gradient.
        reverse: KL(p || q); else KL(q || p).
    """
    layer: Any = model.get_output_embeddings()
    tokens, size = kl_tokens(hidden_SD.device.type, len(layer.weight)), len(hidden_SD)
    with without_adapter, torch.no_grad():  # where rows of the layer are trained, its weights are computed on access
        frozen = _OutputLayer.of(teacher.get_output_embeddings(), hidden_SD.device.type)
    layer = layer if layer.weight.requires_grad else _OutputLayer.of(layer, hidden_SD.device.type)
    columns = min(len(layer.weight), len(frozen.weight))
    kl_S = hidden_SD.new_zeros(size, dtype=torch.promote_types(hidden_SD.dtype, torch.float32))
    learns, gradient_SD = weights is not None, torch.zeros_like(hidden_SD)
    weights_S = weights.to(kl_S) if isinstance(weights, torch.Tensor) else torch.full_like(kl_S, weights or 0.0)
    if size > tokens:  # tensors of one size take each other's place in memory, those of many sizes leave gaps
        more = -size % tokens
        hidden_SD, teacher_SD = (torch.nn.functional.pad(each, (0, 0, 0, more)) for each in (hidden_SD, teacher_SD))
        weights_S = torch.nn.functional.pad(weights_S, (0, more))
    for start in range(0, len(hidden_SD), tokens):
        place, own = slice(start, start + tokens), slice(start, min(start + tokens, size))
        count = own.stop - own.start
        states_CD = hidden_SD[place].detach().requires_grad_(learns)
        with torch.no_grad():
            log_q_CV = _log_probs(_logits(teacher, frozen, teacher_SD[place])[:, :columns], temperature)
        with torch.set_grad_enabled(learns):
            logits_CV = _logits(model, layer, states_CD)[:, :columns]
        with torch.no_grad():
            log_p_CV = _log_probs(logits_CV, temperature)
            if reverse:
                slope_CV = log_q_CV.neg_().add_(log_p_CV)  # log p - log q
                p_CV = log_p_CV.exp_()
                kl_C = torch.linalg.vecdot(p_CV, slope_CV)
                slope_CV.sub_(kl_C[:, None]).mul_(p_CV)
            else:
                gap_CV = log_p_CV.sub(log_q_CV).neg_()  # log q - log p
                q_CV, slope_CV = log_q_CV.exp_(), log_p_CV.exp_()
                kl_C = torch.linalg.vecdot(q_CV, gap_CV)
                slope_CV.sub_(q_CV)
            kl_S[own] = kl_C[:count]
        if learns:
            with torch.autocast(hidden_SD.device.type, enabled=False):  # which is for forward passes
                logits_CV.backward(slope_CV.mul_(weights_S[place, None] / temperature))
            assert states_CD.grad is not None
            gradient_SD[own] = states_CD.grad[:count]
    return kl_S, gradient_SD if learns else None


def _log_probs(logits_CV: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits_CV if temperature == 1.0 else logits_CV / temperature).log_softmax(-1)


class _OutputLayer(NamedTuple):
    weight: torch.Tensor  # (V, D)
    bias: torch.Tensor | None  # (V,)

    @classmethod
    def of(cls, layer: Any, kind: str) -> _OutputLayer:
        """Return what a layer multiplies with on a kind of device, as autocast would convert it for each product."""
        lower = torch.is_autocast_enabled(kind) and layer.weight.dtype == torch.float32
        dtype = torch.get_autocast_dtype(kind) if lower else layer.weight.dtype
        return cls(layer.weight.detach().to(dtype), layer.bias)


def _logits(model: PreTrainedModel, layer: Any, hidden_SD: torch.Tensor) -> torch.Tensor:
    """Return the logits of an output layer of this model, (S, V), in float32 at least."""
    config = model.config.get_text_config()
    logits_SV = torch.nn.functional.linear(hidden_SD, layer.weight, layer.bias)
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)) * logit_scale(config)
    cap = soft_cap(config)
    return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


def soft_cap(config: object) -> float | None:
    """Return the cap of cap x tanh(logits / cap) (Gemma 2 and similar models); None without one."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logit_softcap")
    return next((cap for name in names if (cap := getattr(config, name, None)) is not None), None)


def logit_scale(config: object) -> float:
    """Return the factor that some architectures put on their logits (Cohere, Granite, Falcon-H1)."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    return 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)


# ----------------------------------------------------------------------------------------------- shared prefixes
def prefix_of(ids: Ids, mask: Sequence[bool]) -> tuple[int, ...]:
    """Return the tokens of a row before its first prediction of a trained token."""
    return tuple(ids[: mask.index(True) - 1])


def worth_sharing(rows: Sequence[tuple[Ids, Sequence[bool]]], budget: float) -> list[tuple[int, ...]]:
    """Return prefixes that several rows share, the largest savings first.

    Args:
        rows: token ids and mask of each row.
        budget: the largest number of tokens of all prefixes together, each padded to the longest.
    """
    count: dict[tuple[int, ...], int] = {}
    for ids, mask in rows:
        key = prefix_of(ids, mask)
        count[key] = count.get(key, 0) + 1
    chosen, width = [], 0
    for key in sorted(count, key=lambda key: -len(key) * (count[key] - 1)):
        if count[key] > 1 and key and max(width, len(key)) * (len(chosen) + 1) <= budget:
            chosen.append(key)
            width = max(width, len(key))
    return chosen


class _PrefixLayer(CacheLayer):
    """Keys and values of one layer: of the prefixes, (G, H, P, D); then those picked for each row, and the row's."""

    def __init__(self) -> None:
        super().__init__()
        self.read: tuple[torch.Tensor, torch.Tensor] | None = None  # as computed, with their graph
        self.leaves: tuple[torch.Tensor, torch.Tensor] | None = None  # detached copies, which gather gradients
        self.pick_B = torch.empty(0, dtype=torch.long)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.leaves is None:
            self.read = (key_states, value_states)
            return self.read
        # Gradients of the rows of a group are added up in one order: indexing does on a GPU, index_select on a CPU.
        on_cpu = self.pick_B.device.type == "cpu"
        keys, values = (each.index_select(0, self.pick_B) if on_cpu else each[self.pick_B] for each in self.leaves)
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class Prefixes:
    """Shared prefixes, each computed once. `states` is `trained_states` for rows of which some begin with a prefix.

    With gradients: call `states` and the backward pass for one micro-batch after another, then `backward` once.
    """

    def __init__(self, model: PreTrainedModel, prefixes: Sequence[tuple[int, ...]]) -> None:
        self.model, self.number = model, {key: n for n, key in enumerate(prefixes)}
        self.width = max(map(len, prefixes), default=0)
        self.layers = [_PrefixLayer() for _ in range(model.config.get_text_config().num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        if not prefixes:
            return
        ids_GP = torch.zeros(len(prefixes), self.width, dtype=torch.long)
        for n, key in enumerate(prefixes):
            ids_GP[n, : len(key)] = torch.tensor(key)
        position_P = torch.arange(self.width)
        seen_GPP = (position_P <= position_P[:, None]).expand(len(ids_GP), -1, -1)
        self._run(ids_GP, position_P.expand(ids_GP.shape), seen_GPP)
        for layer in self.layers:
            assert layer.read is not None, "every layer keeps keys and values"
            keys, values = (each.detach().requires_grad_(each.requires_grad) for each in layer.read)
            layer.leaves = (keys, values)

    def states(self, rows: Sequence[Ids], masks: Sequence[Sequence[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `trained_states` for these rows, whose prefixes are not computed again."""
        keys = [prefix_of(row, mask) for row, mask in zip(rows, masks, strict=True)]
        if not any(key in self.number for key in keys):
            return trained_states(self.model, rows, masks)
        start_B = torch.tensor([len(key) if key in self.number else 0 for key in keys])
        width = max(len(row) - start for row, start in zip(rows, start_B.tolist(), strict=True))
        ids_BQ = torch.zeros(len(rows), width, dtype=torch.long)
        mask_BQ = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, (row, mask, start) in enumerate(zip(rows, masks, start_B.tolist(), strict=True)):
            ids_BQ[i, : len(row) - start] = torch.tensor(row[start:])
            mask_BQ[i, : len(row) - start] = torch.tensor(mask[start:])
        pick_B = sent(torch.tensor([self.number.get(key, 0) for key in keys]), self.model.device)
        for layer in self.layers:
            layer.pick_B = pick_B
        index_Q = torch.arange(width)
        before_B1P = torch.arange(self.width) < start_B[:, None, None]
        seen_BQK = torch.cat(
            [before_B1P.expand(-1, width, -1), (index_Q <= index_Q[:, None]).expand(len(rows), -1, -1)], dim=2
        )
        hidden_SD = self._run(ids_BQ, start_B[:, None] + index_Q, seen_BQK, mask_BQ.roll(-1, 1))
        return hidden_SD, sent(ids_BQ[mask_BQ], self.model.device)

    def backward(self) -> None:
        """Add the gradients that the rows have left at the prefixes to the gradients of the weights."""
        ends = [
            (read, leaf.grad)
            for layer in self.layers
            if layer.read is not None and layer.leaves is not None
            for read, leaf in zip(layer.read, layer.leaves, strict=True)
            if leaf.grad is not None
        ]
        if ends:
            torch.autograd.backward([read for read, _ in ends], [grad for _, grad in ends])

    def _run(
        self,
        ids_BQ: torch.Tensor,
        positions_BQ: torch.Tensor,
        seen_BQK: torch.Tensor,
        predicts_BQ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states at `predicts_BQ`; a token attends to the keys that `seen_BQK` marks."""
        model, device = self.model, self.model.device
        if predicts_BQ is None:
            predicts_BQ = torch.zeros(ids_BQ.shape, dtype=torch.bool)
        return backbone_states(
            model,
            predicts_BQ,
            input_ids=sent(ids_BQ, device),
            position_ids=sent(positions_BQ, device),
            attention_mask=attention_mask(model, sent(seen_BQK, device)),
            past_key_values=self.cache,
            use_cache=True,
        )
