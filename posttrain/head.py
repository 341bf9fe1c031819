"""How probable is each token?  The output layer, applied to the states that predict something, a few columns at a time.

Shapes: S tokens, C of them at a time, D states, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from posttrain.compat import chunked_logprobs

# columns of the logits that exist at any one time; on a CPU few enough that they hardly leave its caches
VOCABULARY_CHUNK = {"cuda": 8192, "cpu": 2048}
# numbers in the logits, tokens times vocabulary, that exist of each of two models whose distributions are compared
KL_TILE = {"cuda": 2**25, "cpu": 2**20}


def head_logprobs(
    model: PreTrainedModel, hidden_SD: torch.Tensor, tokens_S: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-prob of each token and the entropy there, both (S,), with gradient, from the states that predict them."""
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
    """The sum over tokens of KL(teacher || model), over the whole vocabulary; `weight` times its gradient is added.

    hidden_SD and teacher_SD are the states of the same tokens. A teacher that is the model without its adapter needs
    `without_adapter`, for rows of the output layer may be trained as well. A few tokens at a time, forward and
    backward, so that logits of both exist for these alone; then the states' own graph, which is spent. weight=None: no
    gradient.
    """
    layer: Any = model.get_output_embeddings()
    tokens = max(1, KL_TILE.get(hidden_SD.device.type, KL_TILE["cuda"]) // len(layer.weight))
    leaf_SD = hidden_SD.detach().requires_grad_(weight is not None)
    with without_adapter, torch.no_grad():  # where rows of the layer are trained, its weights are made when asked for
        of_teacher: Any = teacher.get_output_embeddings()
        frozen = _Layer(of_teacher.weight, of_teacher.bias)
    total = 0.0
    for state_CD, state_of_teacher_CD in zip(leaf_SD.split(tokens), teacher_SD.split(tokens), strict=True):
        with torch.no_grad():
            log_q_CV = _logits(teacher, frozen, state_of_teacher_CD).log_softmax(-1)
        with torch.set_grad_enabled(weight is not None):
            log_p_CV = _logits(model, layer, state_CD).log_softmax(-1)
            kl = torch.nn.functional.kl_div(log_p_CV, log_q_CV, reduction="sum", log_target=True)
        total += kl.item()
        if weight is not None:
            with torch.autocast(hidden_SD.device.type, enabled=False):  # which is for forward passes
                (weight * kl).backward()
    if leaf_SD.grad is not None:
        with torch.autocast(hidden_SD.device.type, enabled=False):
            hidden_SD.backward(leaf_SD.grad)
    return total


class _Layer(NamedTuple):
    weight: torch.Tensor  # (V, D)
    bias: torch.Tensor | None  # (V,)


def _logits(model: PreTrainedModel, layer: Any, hidden_SD: torch.Tensor) -> torch.Tensor:
    """What an output layer of this model says of these states, (S, V), in float32 at least."""
    config = model.config.get_text_config()
    logits_SV = torch.nn.functional.linear(hidden_SD, layer.weight, layer.bias)
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)) * logit_scale(config)
    cap = soft_cap(config)
    return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


def soft_cap(config: object) -> float | None:
    """Where logits end: cap x tanh(logits / cap) (Gemma 2 and its kin)."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logit_softcap")
    return next((cap for name in names if (cap := getattr(config, name, None)) is not None), None)


def logit_scale(config: object) -> float:
    """The factor some architectures put on their logits (Cohere, Granite, Falcon-H1 and their kin)."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    return 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)
