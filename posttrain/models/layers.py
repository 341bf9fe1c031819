"""Which operations does a decoder layer take?  Those of transformers' Llama and its relatives, fewer of them.

transformers' layer norms in six operations, rotates queries and keys in ten, and under autocast leaves both in float32,
so that each product converts its input again. Here a norm is one operation, queries and keys are rotated together in
five, and both are in the products' precision. In float32 without autocast every number is the same to the bit, but for
Qwen3's gradients, whose norms of heads add up in another order.

Shapes: B rows, T tokens, H heads, D head size.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.runtime import compat

SIMPLE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # values of model_type
SIMPLE = "layer_is_simple"  # an attribute of the classes that are put in place here


def simplify_layers(model: nn.Module) -> None:
    """Let the decoder layers of a Llama, Mistral, Qwen2 or Qwen3 take fewer operations; leave other models alone.

    Weights, adapters, caches, recomputed activations and names of classes stay what they are. Layers are compiled after
    this, not before.
    """
    for module in model.modules():
        make = MAKERS.get((type(module).__module__, type(module).__name__))
        if make is not None and not hasattr(module, SIMPLE):
            module.__class__ = _like(type(module), make)


@functools.cache
def _like(kind: type, make: Callable[[Any], Any]) -> type:
    """Return a class like `kind`, of the same name, with another forward pass."""
    members = {"forward": make(kind), "__module__": kind.__module__, "__qualname__": kind.__qualname__, SIMPLE: True}
    return type(kind.__name__, (kind,), members)


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Return the precision of products with this input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Return x normed, in the precision of the products that read it."""
    normed = functional.rms_norm(x.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.variance_epsilon)
    return normed.to(_dtype(x))


def _rotation(kind: Any) -> Any:
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of `_rotated`, (B, T, 1, D), for all layers."""
        cos_BTD, sin_BTD = kind.forward(self, x, position_ids)
        first_BTD, second_BTD = sin_BTD.chunk(2, -1)
        signed_BTD = torch.cat([-first_BTD, second_BTD], -1)
        return cos_BTD[:, :, None].to(_dtype(x)), signed_BTD[:, :, None].to(_dtype(x))

    return forward


def _rotated(x_BTHD: torch.Tensor, cos_BT1D: torch.Tensor, signed_BT1D: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of a dimension of the first half and one of the second (Su et al. 2021, eq. 34)."""
    return (x_BTHD * cos_BT1D).add_(x_BTHD.roll(x_BTHD.shape[-1] // 2, -1).mul_(signed_BT1D))


def _attended(
    attention: Any, normed: torch.Tensor, factors: Any, mask: torch.Tensor | None, cache: Any, eager: Any, **kwargs: Any
) -> torch.Tensor:
    """Return what attention adds to the hidden states."""
    rows = normed.shape[:-1]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (project(normed).view(*rows, -1, attention.head_dim) for project in projections)
    if hasattr(attention, "q_norm"):
        query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
    heads, both = [query.shape[2], key.shape[2]], torch.cat([query, key], 2)
    del query, key  # a long prompt takes much memory here
    query, key = (each.transpose(1, 2) for each in _rotated(both, *factors).split(heads, 2))
    del both
    value = value.transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    mixed, _ = ALL_ATTENTION_FUNCTIONS.get_interface(compat.attention_of(attention.config), eager)(
        attention,
        query,
        key,
        value,
        mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
        **kwargs,
    )
    return attention.o_proj(mixed.reshape(*rows, -1))


def _layer(kind: type) -> Any:
    eager = sys.modules[kind.__module__].eager_attention_forward

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the hidden states, (B, T, E), after attention and the feed-forward block."""
        mlp, normed = self.mlp, _norm(self.input_layernorm, hidden_states)
        hidden_states = hidden_states + _attended(
            self.self_attn, normed, position_embeddings, attention_mask, past_key_values, eager, **kwargs
        )
        normed = _norm(self.post_attention_layernorm, hidden_states)
        return hidden_states + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))

    return forward


MAKERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    (f"transformers.models.{family}.modeling_{family}", f"{family.capitalize()}{name}"): make
    for family in SIMPLE_FAMILIES
    for name, make in (("DecoderLayer", _layer), ("RotaryEmbedding", _rotation))
}
