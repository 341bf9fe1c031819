"""How probable is each token?  The output layer, applied to the states that predict something, a few columns at a time.

Shapes: S tokens, D states, V vocabulary, C columns of the output layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.compat import TOKEN_CHUNK_SIZE, chunked_logprobs

# columns of the logits that exist at any one time; on a CPU few enough that they hardly leave its caches
VOCABULARY_CHUNK = {"cuda": 8192, "cpu": 2048}
# numbers in the logits, tokens times vocabulary, that exist of each of two models whose distributions are compared
KL_TILE = {"cuda": 2**25, "cpu": 2**20}


def head_logprobs(
    model: PreTrainedModel, hidden_SD: torch.Tensor, tokens_S: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-prob of each token and the entropy there, both (S,), with gradient, from the states that predict them."""
    layer: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    cap, scale = soft_cap(config), logit_scale(config)
    weight_VD = layer.weight  # an adapter's is made each time that it is asked for
    device, exact = hidden_SD.device.type, hidden_SD.dtype == weight_VD.dtype in (torch.float32, torch.float64)
    if device == "cpu" and exact and not torch.is_autocast_enabled(device):
        scale /= temperature
        bias_V = None if layer.bias is None else layer.bias * scale
        cap = None if cap is None else cap / temperature
        return _LogProbs.apply(hidden_SD if scale == 1.0 else hidden_SD * scale, weight_VD, bias_V, tokens_S, cap)
    columns = VOCABULARY_CHUNK.get(device, VOCABULARY_CHUNK["cuda"])
    return chunked_logprobs(
        hidden_SD, weight_VD, layer.bias, tokens_S, columns=columns, temperature=temperature, cap=cap, scale=scale
    )


def kl_backward(
    model: PreTrainedModel,
    hidden_SD: torch.Tensor,
    teacher: PreTrainedModel,
    teacher_SD: torch.Tensor,
    weight: float | None,
) -> float:
    """The sum over tokens of KL(teacher || model), over the whole vocabulary; `weight` times its gradient is added.

    hidden_SD and teacher_SD are the states of the same tokens. A few tokens at a time, forward and backward, so that
    logits of both exist for these alone; then the states' own graph, which is spent. weight=None: no gradient.
    """
    layer: Any = model.get_output_embeddings()
    tokens = max(1, KL_TILE.get(hidden_SD.device.type, KL_TILE["cuda"]) // len(layer.weight))
    leaf_SD = hidden_SD.detach().requires_grad_(weight is not None)
    total = 0.0
    for state_CD, state_of_teacher_CD in zip(leaf_SD.split(tokens), teacher_SD.split(tokens), strict=True):
        with torch.no_grad():
            log_q_CV = _logits(teacher, state_of_teacher_CD).log_softmax(-1)
        with torch.set_grad_enabled(weight is not None):
            log_p_CV = _logits(model, state_CD).log_softmax(-1)
            kl = torch.nn.functional.kl_div(log_p_CV, log_q_CV, reduction="sum", log_target=True)
        total += kl.item()
        if weight is not None:
            with torch.autocast(hidden_SD.device.type, enabled=False):  # which is for forward passes
                (weight * kl).backward()
    if leaf_SD.grad is not None:
        with torch.autocast(hidden_SD.device.type, enabled=False):
            hidden_SD.backward(leaf_SD.grad)
    return total


def _logits(model: PreTrainedModel, hidden_SD: torch.Tensor) -> torch.Tensor:
    """What the output layer says of these states, (S, V), in float32 at least."""
    layer: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    logits_SV = torch.nn.functional.linear(hidden_SD, layer.weight, layer.bias)
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)) * logit_scale(config)
    cap = soft_cap(config)
    return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


class _LogProbs(torch.autograd.Function):
    """log softmax(z)[token] and the entropy of softmax(z) where z = cap tanh((h W^T + b) / cap), both (S,).

    It is what TRL's function computes, which has a kernel for GPUs and goes over all logits more than twice as often on
    a CPU. With p = softmax(z): d log p[token] / dz = 1[token] - p, and d entropy / dz = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        tokens_S: torch.Tensor,
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        most_S = hidden_SD.new_full(tokens_S.shape, torch.finfo(hidden_SD.dtype).min)
        sum_S, weighted_S, own_S = (hidden_SD.new_zeros(tokens_S.shape) for _ in range(3))
        other = _tile(hidden_SD, weight_VD)
        for _, logits_SC, own in _tiles(hidden_SD, weight_VD, bias_V, tokens_S, cap):
            own_S[own[0]] = logits_SC[own]
            before_S, most_S = most_S, torch.maximum(most_S, logits_SC.amax(-1))
            below_SC = logits_SC.sub_(most_S[:, None])
            power_SC = torch.exp(below_SC, out=other[:, : below_SC.shape[1]])
            lower_S = before_S - most_S  # both sums are of powers below the largest logit so far
            shrunk_S = lower_S.exp()
            weighted_S.add_(lower_S * sum_S).mul_(shrunk_S)
            sum_S.mul_(shrunk_S).add_(power_SC.sum(-1))
            weighted_S.add_(power_SC.mul_(below_SC).sum(-1))
        log_sum_S = most_S + sum_S.log()
        entropy_S = sum_S.log() - weighted_S / sum_S
        ctx.save_for_backward(hidden_SD, weight_VD, bias_V, tokens_S, log_sum_S, entropy_S)
        ctx.cap = cap
        return own_S - log_sum_S, entropy_S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_logprob_S: torch.Tensor | None, by_entropy_S: torch.Tensor | None) -> tuple[Any, ...]:
        hidden_SD, weight_VD, bias_V, tokens_S, log_sum_S, entropy_S = ctx.saved_tensors
        if by_logprob_S is None:
            by_logprob_S = torch.zeros_like(log_sum_S)
        wanted = ctx.needs_input_grad
        by_hidden_SD = torch.zeros_like(hidden_SD) if wanted[0] else None
        by_weight_VD = torch.empty_like(weight_VD) if wanted[1] else None
        by_bias_V = torch.empty_like(bias_V) if wanted[2] else None
        for columns, logits_SC, own in _tiles(hidden_SD, weight_VD, bias_V, tokens_S, ctx.cap):
            grad_SC = _gradient_(logits_SC, own, log_sum_S, entropy_S, by_logprob_S, by_entropy_S, ctx.cap)
            if by_hidden_SD is not None:
                by_hidden_SD.addmm_(grad_SC, weight_VD[columns])
            if by_weight_VD is not None:
                torch.mm(grad_SC.t(), hidden_SD, out=by_weight_VD[columns])
            if by_bias_V is not None:
                torch.sum(grad_SC, 0, out=by_bias_V[columns])
        return by_hidden_SD, by_weight_VD, by_bias_V, None, None


def _gradient_(
    logits_SC: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    log_sum_S: torch.Tensor,
    entropy_S: torch.Tensor,
    by_logprob_S: torch.Tensor,
    by_entropy_S: torch.Tensor | None,
    cap: float | None,
) -> torch.Tensor:
    """These logits' gradient, in their own memory: that of the product, before its cap."""
    slope_SC = None if cap is None else (logits_SC / cap).square_().neg_().add_(1)
    log_p_SC = logits_SC.sub_(log_sum_S[:, None])
    factor_SC = -by_logprob_S[:, None]
    if by_entropy_S is not None:
        factor_SC = (log_p_SC + entropy_S[:, None]).mul_(-by_entropy_S[:, None]).add_(factor_SC)
    grad_SC = log_p_SC.exp_().mul_(factor_SC)
    grad_SC[own] += by_logprob_S[own[0]]
    return grad_SC if slope_SC is None else grad_SC.mul_(slope_SC)


def _tile(hidden_SD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Memory for some columns; fewer where there are more tokens than TRL's function takes at a time."""
    columns = VOCABULARY_CHUNK["cpu"] * TOKEN_CHUNK_SIZE // max(TOKEN_CHUNK_SIZE, len(hidden_SD))
    return hidden_SD.new_empty(len(hidden_SD), min(max(1, columns), len(weight_VD)))


def _tiles(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    tokens_S: torch.Tensor,
    cap: float | None,
) -> Iterator[tuple[slice, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """Some columns, their logits, and where among these (row and column) a token has its own; in the same memory."""
    tile = _tile(hidden_SD, weight_VD)
    width = tile.shape[1]
    for start in range(0, len(weight_VD), width):
        columns = slice(start, min(start + width, len(weight_VD)))
        logits_SC = torch.mm(hidden_SD, weight_VD[columns].t(), out=tile[:, : columns.stop - start])
        if bias_V is not None:
            logits_SC.add_(bias_V[columns])
        if cap is not None:
            logits_SC.div_(cap).tanh_().mul_(cap)
        (row_O,) = ((start <= tokens_S) & (tokens_S < columns.stop)).nonzero(as_tuple=True)
        yield columns, logits_SC, (row_O, tokens_S[row_O] - start)


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
