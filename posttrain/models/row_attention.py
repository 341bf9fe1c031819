"""How does a decoding step read as much of the cache as each row has, and not as much as the longest one?

A mask hides the positions behind a row's length after they have been read. The FlashAttention kernel in torch takes the
lengths from a tensor on the GPU, so that a CUDA graph also holds for other lengths. Each row of the cache is a page of
torch's paged attention.

Shapes: B rows, H key-value heads, G query heads for each of them, K positions of the cache, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.models.forward import text_config
from posttrain.runtime import compat

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch 2.9
    varlen_attn = None

PAGE = 256  # the kernel takes a multiple of it as K
OTHER_SCORES = ("position_bias", "softcap", "s_aux", "cache", "sliding_window")  # arguments that the kernel lacks


class _Step(NamedTuple):
    """What the kernel is told about the rows of a decoding step, all in int32."""

    length_B: torch.Tensor
    query_start: torch.Tensor  # 0, 1, 2, ..., B: each row has one query token
    key_start: torch.Tensor  # 0, K, 2 K, ..., B K
    page_B1: torch.Tensor


_step: _Step | None = None


def has_kernel(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for this model's decoding steps over a cache of this precision.

    It needs a GPU, float16 or bfloat16, torch 2.12 or later, and a model whose attention is sdpa.
    """
    known = varlen_attn is not None and "block_table" in inspect.signature(varlen_attn).parameters
    half = dtype in (torch.float16, torch.bfloat16)
    return known and half and model.device.type == "cuda" and compat.attention_of(text_config(model)) == "sdpa"


@contextmanager
def by_length(length_B: torch.Tensor, positions: int) -> Iterator[None]:
    """Let attention of one query token read the first `length_B` positions of each row within the context.

    Args:
        length_B: integers on the model's device, at least 1.
        positions: how many positions the keys and values have, a multiple of `PAGE`.
    """
    global _step
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:  # replaced by other code
        yield
        return
    start = torch.arange(len(length_B) + 1, dtype=torch.int32, device=length_B.device)
    _step = _Step(length_B.int(), start, start * positions, start[:-1, None])
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _of_transformers
    try:
        yield
    finally:
        _step = None
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def attend(
    query_BHGD: torch.Tensor, key_BHKD: torch.Tensor, value_BHKD: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return the values that one query token of each row attends to, (B, H, G, D).

    The mask, (B, 1, G, K), has no effect within `by_length`.
    """
    if _step is None:
        return functional.scaled_dot_product_attention(query_BHGD, key_BHKD, value_BHKD, attn_mask=mask, scale=scaling)
    return _by_length(_step, query_BHGD, key_BHKD, value_BHKD, scaling)


def _by_length(
    step: _Step, query_BHGD: torch.Tensor, key_BHKD: torch.Tensor, value_BHKD: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    assert varlen_attn is not None
    mixed: Any = varlen_attn(
        query_BHGD.flatten(1, 2).to(key_BHKD.dtype),  # which may be float32 under autocast
        key_BHKD.transpose(1, 2),
        value_BHKD.transpose(1, 2),
        step.query_start,
        step.key_start,
        1,
        key_BHKD.shape[2],
        scale=scaling,
        enable_gqa=query_BHGD.shape[2] > 1,
        seqused_k=step.length_B,
        block_table=step.page_B1,
    )
    return mixed.view(query_BHGD.shape)


def _of_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as transformers' sdpa does. Queries are (B, heads, 1, D), the result is (B, 1, heads, D)."""
    rows, heads, queries, size = query.shape
    other = any(settings.get(name) is not None for name in OTHER_SCORES)
    if _step is None or other or queries > 1 or value.shape != key.shape:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    mixed = _by_length(_step, query.reshape(rows, key.shape[1], -1, size), key, value, scaling)
    return mixed.reshape(rows, 1, heads, size), None
