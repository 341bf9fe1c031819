"""What is made of the weights once for a rollout?  ConvGPT's fused projections, and other models' bfloat16 copies.

A decoding step on a GPU waits for the launches of its many small kernels. Inside `fused` a layer takes half as many:
one product for queries, keys and values, one for gate and up, one norm and one rotation for queries and keys. What
depends on the weights alone is made once, when `fused` is entered, and dropped when it is left: they must not change in
between.

Shapes: B rows, Q tokens, N = B Q, K tokens in the cache, H key-value heads, G query heads for each of them, D head
size, L layers, E width of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import Cache, PreTrainedModel

from posttrain.models.convgpt import ConvGPTLayer, ConvGPTModel, in_one_kernel
from posttrain.models.row_attention import attend
from posttrain.runtime import compat

Kept = dict[str | int, Any]  # fused layers, and tensors by their name or the address of the weight


@contextmanager
def fused_weights(model: PreTrainedModel, kept: Kept | None = None) -> Iterator[None]:
    """Let a model decode faster within the context, in which its weights may not change.

    A ConvGPT gets fused projections, unless it has adapters, quantised weights, biases, sliding windows, hooks, or
    another attention than sdpa. Linear layers get the weights that autocast would otherwise make at every step: it
    keeps its copies of trained weights alone, and makes those of a frozen base model for every product. Enter it under
    the autocast that decoding runs under.

    Args:
        kept: where what is made stays for the next rollout, which has the same autocast, at the same addresses. Without
            it the memory is freed.
    """
    kept = {} if kept is None else kept
    decoder = model.base_model
    if not isinstance(decoder, ConvGPTModel) or not _can_fuse(decoder):
        with _converted(model.modules(), model.device.type, kept):
            yield
        return
    with torch.no_grad():
        kind = decoder.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else decoder.conv.weight.dtype
        if (layers := kept.get("layers")) is None:
            layers = kept["layers"] = _Layers(decoder, dtype)
        else:
            layers.refresh()
        decoder.fused, decoder.conv.fixed = layers, _stay(kept, "conv", decoder.conv.matrix())
    behind = [] if decoder.scale_up is None else decoder.scale_up.modules()
    try:
        with _converted([*behind, model.get_output_embeddings()], kind, kept):
            yield
    finally:
        decoder.fused = decoder.conv.fixed = None


def _stay(kept: Kept, key: str | int, made: torch.Tensor) -> torch.Tensor:
    """Return these values where those of this key were before."""
    if (there := kept.get(key)) is None:
        kept[key] = made
        return made
    return there.copy_(made)


@contextmanager
def _converted(modules: Iterable[object], kind: str, kept: Kept) -> Iterator[None]:
    """Give linear layers of float32 the weights that autocast multiplies with; without autocast do nothing."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    dtype = torch.get_autocast_dtype(kind)
    linear = [layer for layer in modules if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter]
    weights = [(layer, layer.weight) for layer in linear if layer.weight.dtype == torch.float32]
    try:
        for layer, weight in weights:
            made = _stay(kept, weight.data_ptr(), weight.detach().to(dtype))
            layer.weight = nn.Parameter(made, requires_grad=False)
        yield
    finally:
        for layer, weight in weights:
            layer.weight = weight


def _can_fuse(decoder: ConvGPTModel) -> bool:
    """Return whether every layer is as posttrain/models/convgpt.py builds it."""
    config = decoder.config
    products = [
        part
        for layer in decoder.layers
        if isinstance(layer, ConvGPTLayer)
        for block in (layer.self_attn, layer.mlp)
        for name, part in block.named_children()
        if name.endswith("_proj")
    ]
    plain = all(type(part) is nn.Linear and part.bias is None and part.weight.is_floating_point() for part in products)
    hooked = any(map(compat.has_hooks, decoder.layers.modules()))
    return plain and not hooked and compat.attention_of(config) == "sdpa" and not config.sliding_window


class _Layer(NamedTuple):
    qkv: torch.Tensor  # ((G + 2) H D, E): queries, keys, values; the first query of every group, then the second
    output: torch.Tensor  # (E, G H D), its columns in this order of the queries
    gate_up: torch.Tensor  # (2 intermediate_size, E)
    down: torch.Tensor  # (E, intermediate_size)


class _Layers:
    """All layers of the decoder, without gradient or dropout, over a cache that keeps what was read before."""

    def __init__(self, decoder: ConvGPTModel, dtype: torch.dtype) -> None:
        config = decoder.config
        self.decoder_layers: list[Any] = list(decoder.layers)
        self.heads, self.size = config.num_key_value_heads, config.head_dim
        self.group = config.num_attention_heads // self.heads
        self.dtype = dtype
        self.layers = [self._layer(layer) for layer in self.decoder_layers]
        exponent = torch.arange(0, self.size, 2, device=decoder.device, dtype=torch.float) / self.size
        self.frequency_D = (1.0 / config.rope_theta**exponent).repeat(2)
        self.cos_weight, self.sin_weight = self._rotations()

    def refresh(self) -> None:
        """Make everything again from the weights as they are now, at the same addresses."""
        for kept, layer in zip(self.layers, self.decoder_layers, strict=True):
            for old, new in zip(kept, self._layer(layer), strict=True):
                old.copy_(new)
        for old, new in zip((self.cos_weight, self.sin_weight), self._rotations(), strict=True):
            old.copy_(new)

    def _rotations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of cosine and sine, (L, 1, 1, G + 1, 1, D), with the weights of the norms in them."""
        norms = [[layer.self_attn.q_norm] * self.group + [layer.self_attn.k_norm] for layer in self.decoder_layers]
        weight_LGD = torch.stack([torch.stack([norm.weight for norm in row]) for row in norms])
        first_LGD, second_LGD = weight_LGD.chunk(2, -1)
        swapped_LGD = torch.cat([-second_LGD, first_LGD], -1)  # as `apply_rotary` swaps the halves
        return weight_LGD[:, None, None, :, None], swapped_LGD[:, None, None, :, None]

    def _layer(self, layer: ConvGPTLayer) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        width = attention.q_proj.weight.shape[1]
        query = attention.q_proj.weight.view(self.heads, self.group, self.size, width).transpose(0, 1)
        output = attention.o_proj.weight.view(width, self.heads, self.group, self.size).transpose(1, 2)
        projections = [query.reshape(-1, width), attention.k_proj.weight, attention.v_proj.weight]
        return _Layer(
            torch.cat(projections).to(self.dtype),
            output.reshape(width, -1).to(self.dtype),
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(self.dtype),
            mlp.down_proj.weight.to(self.dtype),
        )

    def __call__(
        self, hidden_BQE: torch.Tensor, positions_BQ: torch.Tensor, mask_B1QK: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Return these states after all layers; the mask is True or 0 where a token attends to another.

        Q is 1: a prompt is read layer by layer, since the rotations of all its tokens for all layers at once would
        take much memory and save little.
        """
        rows, queries, width = hidden_BQE.shape
        assert queries == 1
        group, heads, size = self.group, self.heads, self.size
        angle_BQD = positions_BQ[:, :, None].float() * self.frequency_D
        cos_BQD, sin_BQD = (each.to(hidden_BQE.dtype) for each in (angle_BQD.cos(), angle_BQD.sin()))
        cos_LBQG1D = (cos_BQD[:, :, None, None] * self.cos_weight).to(self.dtype)
        sin_LBQG1D = (sin_BQD[:, :, None, None] * self.sin_weight).to(self.dtype)
        mask = mask_B1QK.expand(-1, -1, group, -1)
        hidden_NE = hidden_BQE.reshape(-1, width)
        turns = zip(self.decoder_layers, self.layers, cos_LBQG1D.unbind(), sin_LBQG1D.unbind(), strict=True)
        for n, (layer, weights, cos_BQG1D, sin_BQG1D) in enumerate(turns):
            heads_BQGHD = functional.linear(layer.norm1(hidden_NE), weights.qkv).view(rows, queries, -1, heads, size)
            qk_BQGHD = heads_BQGHD[:, :, : group + 1]
            with in_one_kernel(qk_BQGHD):
                qk_BQGHD = functional.rms_norm(qk_BQGHD, (size,), eps=layer.self_attn.q_norm.eps)
            qk_BQGHD = torch.addcmul(qk_BQGHD * cos_BQG1D, qk_BQGHD.roll(size // 2, -1), sin_BQG1D)
            keys, values = cache.update(qk_BQGHD[:, :, -1].transpose(1, 2), heads_BQGHD[:, :, -1].transpose(1, 2), n)
            mixed = attend(
                qk_BQGHD[:, :, :-1].permute(0, 3, 2, 1, 4).reshape(rows, heads, group * queries, size),
                keys,
                values,
                mask,
                layer.self_attn.scaling,
            )
            mixed = mixed.view(rows, heads, group, queries, size).permute(0, 3, 2, 1, 4).reshape(len(hidden_NE), -1)
            hidden_NE = _add_product(hidden_NE, mixed, weights.output)
            gate, up = functional.linear(layer.norm2(hidden_NE), weights.gate_up).chunk(2, -1)
            hidden_NE = _add_product(hidden_NE, layer.mlp.act_fn(gate) * up, weights.down)
        return hidden_NE.view(rows, queries, width)


def _add_product(sum_NE: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return sum + x W^T, in one operation where this does not round differently."""
    if sum_NE.dtype == weight.dtype:
        return torch.addmm(sum_NE, x, weight.t())
    return sum_NE + functional.linear(x, weight)
