"""What does an output layer say of states?  Log-probs and entropies of tokens, and the distance of two models.

head_logprobs            the output layer, applied to the states of trained tokens alone, a few columns at a time
kl_backward, reverse_kl  the distance of its distributions from those of another model, a few tokens at a time

Shapes: S trained tokens of all rows one after another, C of them at a time, D states, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from posttrain.runtime import chunked_logprobs

# columns of the logits that exist at any one time; on a CPU few enough that they hardly leave its caches
VOCABULARY_CHUNK = {"cuda": 8192, "cpu": 2048}
# numbers in the logits, tokens times vocabulary, that exist of each of two models whose distributions are compared
KL_TILE = {"cuda": 2**25, "cpu": 2**20}
KL_TOKENS = 32  # at a time, at least: the weights of both output layers are read for each of these groups


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
) -> torch.Tensor:
    """Return KL(teacher || model) over the vocabulary at each token, and add `weight` times the gradient of their sum.

    It computes forward and backward for a few tokens at a time, so that logits exist for these alone, and then runs the
    backward pass of the hidden states, whose graph is freed.

    Args:
        hidden_SD: the model's hidden states before the output layer.
        teacher: the teacher, which may be the model itself without its adapter.
        teacher_SD: the teacher's hidden states at the same positions.
        weight: factor of the gradient; None for no gradient.
        without_adapter: context in which the model is the teacher; rows of the output layer may be trained as well.

    Returns:
        The KL in nats, (S,), without gradient.
    """
    kl_S, gradient_SD = _kl(
        model, hidden_SD, teacher, teacher_SD, weight, reverse=False, without_adapter=without_adapter
    )
    if gradient_SD is not None:
        with torch.autocast(hidden_SD.device.type, enabled=False):
            hidden_SD.backward(gradient_SD)
    return kl_S


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
                gap_CV = log_q_CV - log_p_CV
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
