"""What does the policy say now about the tokens it sampled?  Their log-probs and entropies, and no others.

Shapes: B rows, T tokens of the longest row, S trained tokens of all rows one after another, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.convgpt import ConvGPTModel
from posttrain.head import head_logprobs
from posttrain.types import UserError

# what a model raises in a self-test if its cache or its attention is of another kind
UNFIT = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
# RuntimeErrors that tell of the device instead: no self-test may take them for an answer
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


def microbatches(lengths: Sequence[int], token_budget: float) -> Iterator[list[int]]:
    """Indices of rows of similar length, each batch within `token_budget` padded tokens (a longer row goes alone)."""
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
    """log pi(token | everything before it) and the entropy there, both (S,), in row order, with gradient."""
    return head_logprobs(model, *trained_states(model, rows, masks), temperature)


def trained_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output layer multiplies where a trained token is predicted, (S, D), and that token, (S,).

    Rows are padded on the right, which a causal model cannot see, so no attention mask is needed.
    """
    width = max(map(len, rows))
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ids_BT[i, : len(row)] = torch.tensor(row)
        mask_BT[i, : len(row)] = torch.tensor(mask)
    assert not mask_BT[:, 0].any(), "the first token of a conversation is never sampled"
    ids_BT, mask_BT = ids_BT.to(model.device), mask_BT.to(model.device)
    return read(model, mask_BT.roll(-1, 1), input_ids=ids_BT, use_cache=False), ids_BT[mask_BT]


def read(model: PreTrainedModel, predicts_BT: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """One pass through the model up to its output layer; its states where something is predicted, (S, D)."""
    backbone = model.base_model
    with _grouped_queries() if "attention_mask" in inputs else nullcontext():  # outside it layers may be run again
        if isinstance(backbone, ConvGPTModel):  # with tied embeddings its last layers are most of the work
            return backbone(**inputs, logits_to_keep=predicts_BT).last_hidden_state
        return backbone(**inputs).last_hidden_state[predicts_BT]


@contextmanager
def _grouped_queries() -> Iterator[None]:
    """Under a mask of our own, heads that share keys and values ask them together.

    transformers does this where there is one query token, and copies keys and values for each head where there are
    more: in a cache of long conversations that is most of the time that reading takes.
    """
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:  # somebody's own
        yield
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled-dot-product attention of queries (B, heads, Q, D) over keys and values (B, key-value heads, K, D)."""
    batch, heads, queries, size = query.shape
    group = heads // key.shape[1]
    special = any(settings.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "cache"))
    if group == 1 or attention_mask is None or attention_mask.shape[1] > 1 or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, -1, group * queries, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, group, 1),
        dropout_p=settings.get("dropout", 0.0),
        scale=settings.get("scaling"),
    )
    return mixed.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def head_agrees(model: PreTrainedModel) -> bool:
    """Whether `head_logprobs` gives what the model's own logits give, also where these are as large as in training."""
    head: Any = model.get_output_embeddings()
    factor, was_training = 1.0, model.training
    ids_1T = torch.tensor([[3, 4, 5, 6, 7, 8]], device=model.device)
    predicts_1T = torch.tensor([[True] * 5 + [False]], device=model.device)
    asked = []

    def enlarge(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        asked.append(True)
        return (given[0] * factor, *given[1:])

    larger = head.register_forward_pre_hook(enlarge)
    model.eval()
    try:
        with torch.no_grad():
            largest = model(input_ids=ids_1T).logits.abs().max().clamp(min=1e-6).item()
            if not math.isfinite(largest):  # the weights are at fault, as the sampler's check and an evaluation say
                return True
            factor = 100.0 / largest if asked else 1.0  # some use the layer's weights without asking the layer
            own_TV = model(input_ids=ids_1T).logits[0, :-1].float()
            states_TD = read(model, predicts_1T, input_ids=ids_1T, use_cache=False) * factor
            said_T, _ = head_logprobs(model, states_TD, ids_1T[0, 1:])
    finally:
        larger.remove()
        model.train(was_training)
    own_T = own_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
    exact = states_TD.dtype == head.weight.dtype == torch.float32
    return bool((own_T - said_T).abs().max() <= (0.1 if exact else 10.0))


def without_noise(model: PreTrainedModel) -> None:
    """Switch off all dropout, layer drop and router jitter, so that sampler and learner are the same policy.

    What the model computes in training mode must then be what it computed in evaluation mode before, twice in a row;
    otherwise a UserError. In the model's config the rates are 0 as well, for some architectures read them there.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids_1T = torch.arange(3, min(67, vocabulary), device=model.device)[None]
    devices = [model.device] if model.device.type == "cuda" else []
    was_training = model.training

    def logits(training: bool) -> torch.Tensor:
        return model.train(training)(input_ids=ids_1T, use_cache=False).logits.float()

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            expected = logits(training=False)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
                _no_rates(module)
                if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
                    _no_rates(config)
            tolerance = (1e-3 if model.dtype == torch.float32 else 0.05) * expected.abs().max()
            differs = any(bool((logits(training=True) - expected).abs().max() > tolerance) for _ in range(2))
    finally:
        model.train(was_training)
    if differs:
        raise UserError(
            f"{type(model).__name__} computes other probabilities in training mode than in evaluation mode, although"
            " all rates of dropout and jitter were set to 0: sampler and learner would not be the same policy. Phase 3"
            " cannot train this architecture. Take a model without noise of its own."
        )


def _no_rates(thing: object) -> None:
    """Set what is named as a rate of dropout or jitter to 0, in a module or a config and the configs inside it."""
    for name, value in list(vars(thing).items()):
        if isinstance(value, PreTrainedConfig):
            _no_rates(value)
        elif type(value) in (int, float) and 0 < value <= 1 and ("drop" in name or "jitter" in name):
            setattr(thing, name, type(value)(0))  # a config may take no other type


def attends_to_all(model: PreTrainedModel) -> bool:
    """Whether every layer attends to everything before it, in the same way however long the rows are.

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


def attention_mask(model: PreTrainedModel, sees_BQK: torch.Tensor) -> torch.Tensor:
    """What a model takes as its mask, (B, 1, Q, K), where each token (Q) sees what is True (K) and nothing else."""
    sees_B1QK = sees_BQK[:, None]
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        return sees_B1QK
    # Both add a mask instead of selecting by it; sdpa would convert it anew in every layer.
    device, dtype = sees_BQK.device, model.dtype
    if implementation == "sdpa" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    hidden = -torch.inf if implementation == "sdpa" else torch.finfo(dtype).min
    return torch.zeros(sees_B1QK.shape, dtype=dtype, device=device).masked_fill_(~sees_B1QK, hidden)
