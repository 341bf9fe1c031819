"""How does the default base model compute?  ConvGPT as a native transformers model, registered with the Auto classes.

The published checkpoint (`mkurman/ConvGPT-0.2B-SYNTH-250B-EC`) ships its own modelling code, which does not run on the
transformers version we use.  This file computes the same function from the same weights under the same names, so the
checkpoint loads with `trust_remote_code=False`.

A token's embedding is read as a square, convolved along its columns and average-pooled to the width of an ordinary
decoder (grouped-query attention, q/k norm, rotary positions, gated MLP).  With tied embeddings the decoder's output is
scaled back up to the embedding width.  No token sees another outside the attention.

It imports nothing of this project: every saved ConvGPT has a copy beside its weights, for plain transformers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, initialization
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

# Without effect in the published code, but not here: `is_causal` turns the causal mask off, `output_router_logits` asks
# trainers for an expert loss, `auto_map` names the published files, or the copy beside weights, which vLLM reads.
_IS_COPY = __name__.startswith("transformers_modules.")
_INERT_FIELDS = ("is_causal", "output_router_logits", *(() if _IS_COPY else ("auto_map",)))
# Follow from the other fields, whatever a file says: the published code computed some from its class defaults.
_DERIVED_FIELDS = ("emb_dim_factor", "emb_factor", "transformer_dim", "layer_types")


def _can_pool(side: int) -> bool:
    return side >= 4 and side % (math.isqrt(side) // 2) == 0


@strict
class ConvGPTConfig(PreTrainedConfig):
    """The defaults are the published checkpoint; unknown fields of a config.json are kept and have no effect."""

    model_type = "convgpt"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers reads it as a class attribute)

    vocab_size: int = 65538
    hidden_size: int = 1296
    intermediate_size: int = 3072
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    conv_kernel_h_w: int = 5
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    rope_theta: float | int = 10000.0
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    sliding_window: int | None = None
    max_window_layers: int = 0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        side = math.isqrt(self.hidden_size)
        if side * side != self.hidden_size or not _can_pool(side):
            below = next((s**2 for s in range(side, 3, -1) if _can_pool(s)), None)
            above = next(s**2 for s in itertools.count(max(side + 1, 4)) if _can_pool(s))
            raise ValueError(
                f"ConvGPT reads an embedding as a square and pools it in whole blocks, so hidden_size must be a "
                f"perfect square whose side the blocks divide; {self.hidden_size} is not. "
                f"The nearest that work: {above if below is None else f'{below} and {above}'}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        self.emb_dim_factor = side
        self.emb_factor = math.isqrt(side) // 2
        self.transformer_dim = self.hidden_size // self.emb_factor**2
        self.layer_types = [
            "sliding_attention" if self.sliding_window and layer >= self.max_window_layers else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]
        for name in (*_INERT_FIELDS, *_DERIVED_FIELDS):
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)
        rope = self.rope_parameters or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"ConvGPT has plain rotary positions; rope_type {rope['rope_type']!r} is not supported.")
        self.rope_theta = rope.get("rope_theta", self.rope_theta)


def in_one_kernel(x: torch.Tensor) -> Any:
    """For a norm of x: autocast on a GPU makes x float32 before its kernel, which computes in float32 in any case."""
    cast = x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if cast else contextlib.nullcontext()


class ConvGPTRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with in_one_kernel(x):
            if self.weight.dtype == torch.float32:  # one kernel on a GPU if the weight has the precision of x
                return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
            return self.weight * functional.rms_norm(x, (x.shape[-1],), eps=self.eps)


class ConvGPTScaleNorm(nn.Module):
    """To unit root mean square, times one learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        return x / scale.clamp(min=1e-5) * self.g


class ConvGPTStage(nn.Conv2d):
    """From the embedding to the decoder: rows as channels, a causal convolution along the columns, average pooling.

    That is one linear map, and multiplying by its matrix costs a fraction of convolving and pooling every token.
    """

    def __init__(self, config: ConvGPTConfig) -> None:
        side = config.emb_dim_factor
        super().__init__(side, side, kernel_size=(1, config.conv_kernel_h_w), bias=False)
        self.pool = config.emb_factor
        self.fixed: torch.Tensor | None = None  # the matrix, while `posttrain.models.fused` knows that the kernel stays

    def matrix(self) -> torch.Tensor:
        """Return the map (hidden_size, transformer_dim), computed in float32, differentiable in the kernel."""
        side, taps, weight = self.in_channels, self.kernel_size[1], self.weight
        kernel = weight.float().squeeze(2).unflatten(0, (-1, self.pool)).mean(1)  # pooled over output rows
        # With taps - 1 columns of padding on the left, tap t of input column c feeds output column c - t + taps - 1.
        output = torch.arange(side, device=weight.device) - torch.arange(taps, device=weight.device)[:, None] + taps - 1
        feeds = (output // self.pool)[..., None] == torch.arange(side // self.pool, device=weight.device)
        with torch.autocast(weight.device.type, enabled=False):
            matrix = torch.einsum("rit,tcq->icrq", kernel, feeds.to(kernel.dtype) / self.pool)
        return matrix.reshape(side * side, -1).to(weight.dtype)

    def forward(self, embeds: torch.Tensor) -> torch.Tensor:
        with torch.autocast(embeds.device.type, enabled=False):  # rounded here, every layer's input would be off
            return embeds @ (self.matrix() if self.fixed is None else self.fixed).to(embeds.dtype)


class ConvGPTMLP(nn.Module):
    def __init__(self, dim: int, intermediate: int, out: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, intermediate, bias=False)
        self.up_proj = nn.Linear(dim, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, out, bias=False)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def rotary(config: ConvGPTConfig, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and signed sine, (rows, 1, tokens, head_dim); `from_pretrained` would not fill a buffer of them."""
    exponent = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=torch.float) / config.head_dim
    angle = position_ids[:, None, :, None].float() * (1.0 / config.rope_theta**exponent)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = x.roll(x.shape[-1] // 2, -1)  # the halves; the sign is in the sine
    return x * cos + swapped * sin if x.dtype == torch.float32 else torch.addcmul(x * cos, swapped, sin)


def pads_on_the_right(attention_mask: Any, tokens: int) -> bool:
    """Return whether this (rows, tokens) mask hides nothing from a real token that causality does not hide already.

    Without a mask, scaled-dot-product attention computes half the scores, and none of them twice.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2 or attention_mask.shape[1] != tokens:
        return False
    if is_tracing(attention_mask):
        return False
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all() and attention_mask[:, 0].all())


def kept_positions(hidden_states: torch.Tensor, positions: Any) -> torch.Tensor:
    """Return the states that `logits_to_keep` names; a pair of tensors: row and column of each, whatever the row."""
    if isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.dtype != torch.bool:
        return torch.take_along_dim(hidden_states, positions[..., None], dim=1)
    if isinstance(positions, int):
        return hidden_states[:, -positions:]
    return hidden_states[:, positions] if getattr(positions, "ndim", 2) == 1 else hidden_states[positions]


def eager_attention(
    module: ConvGPTAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    key = key.repeat_interleave(module.num_key_value_groups, 1)
    value = value.repeat_interleave(module.num_key_value_groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:  # a caller's own mask, True = attend
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ConvGPTAttention(nn.Module):
    def __init__(self, config: ConvGPTConfig, layer_idx: int) -> None:
        super().__init__()
        dim, head_dim, bias = config.transformer_dim, config.head_dim, config.attention_bias
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.q_proj = nn.Linear(dim, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, dim, bias=bias)
        self.q_norm = ConvGPTRMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = ConvGPTRMSNorm(head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        query = apply_rotary(self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2), *position_embeddings)
        key = apply_rotary(self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2), *position_embeddings)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation or "eager", eager_attention)
        settings = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling, **kwargs}
        settings["sliding_window"] = self.sliding_window
        output, weights = attend(self, query, key, value, attention_mask, **settings)
        return self.o_proj(output.reshape(*shape, -1)), weights


class ConvGPTLayer(GradientCheckpointingLayer):
    def __init__(self, config: ConvGPTConfig, layer_idx: int) -> None:
        super().__init__()
        dim = config.transformer_dim
        self.self_attn = ConvGPTAttention(config, layer_idx)
        self.mlp = ConvGPTMLP(dim, config.intermediate_size, dim, config.hidden_act)
        self.norm1 = ConvGPTRMSNorm(dim, config.rms_norm_eps)
        self.norm2 = ConvGPTRMSNorm(dim, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.norm1(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.norm2(hidden_states))


class ConvGPTPreTrainedModel(PreTrainedModel):
    config_class = ConvGPTConfig
    config: ConvGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ConvGPTLayer"]  # noqa: RUF012 (transformers reads these as class attributes)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": ConvGPTLayer, "attentions": ConvGPTAttention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ConvGPTScaleNorm):
            initialization.ones_(module.g)


class ConvGPTModel(ConvGPTPreTrainedModel):
    """The decoder; `last_hidden_state` is what the output projection multiplies (after scale_up and the final norm)."""

    selects_positions = True  # `logits_to_keep`: with tied embeddings scale_up is most of the work

    def __init__(self, config: ConvGPTConfig) -> None:
        super().__init__(config)
        dim = config.transformer_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.conv = ConvGPTStage(config)
        self.norm_emb = ConvGPTScaleNorm()
        self.layers = nn.ModuleList([ConvGPTLayer(config, layer) for layer in range(config.num_hidden_layers)])
        # All layers in fewer operations, over a cache and under a finished mask: see `posttrain.models.fused`.
        self.fused: Callable[..., torch.Tensor] | None = None
        self.scale_up = None
        if config.tie_word_embeddings:
            self.scale_up = ConvGPTMLP(dim, 4 * config.hidden_size, config.hidden_size, config.hidden_act)
        self.norm = ConvGPTRMSNorm(config.hidden_size if config.tie_word_embeddings else dim, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the states at the positions `logits_to_keep` (as in the causal model); scale_up runs on those alone.

        `attention_mask` is (rows, all tokens so far) with 0 for padding anywhere, or a finished (rows, 1, query, key)
        mask, boolean with True = attend.  Without `position_ids` a token's position is the number of real tokens
        before it.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        tokens = embeds.shape[1]
        if (given := position_ids) is None and self.config._attn_implementation == "sdpa":  # else rows may be packed
            attention_mask = None if pads_on_the_right(attention_mask, tokens) else attention_mask
        if position_ids is None and isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
        elif position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(tokens, device=embeds.device) + seen)[None]

        if isinstance(attention_mask, dict):  # generate has made one mask for every type of layer
            masks = attention_mask
        else:
            arguments = {"config": self.config, "inputs_embeds": embeds, "attention_mask": attention_mask}
            arguments |= {"past_key_values": past_key_values, "position_ids": given}
            masks = {"full_attention": create_causal_mask(**arguments)}
            if self.config.sliding_window:
                masks["sliding_attention"] = create_sliding_window_causal_mask(**arguments)

        hidden_states = self.norm_emb(self.conv(embeds))
        decoding = tokens == 1 and past_key_values is not None and isinstance(attention_mask, torch.Tensor)
        if self.fused is not None and decoding:
            hidden_states = self.fused(hidden_states, position_ids, masks["full_attention"], past_key_values)
        else:
            device, dtype = hidden_states.device.type, hidden_states.dtype
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype  # of products
            position_embeddings = rotary(self.config, position_ids, dtype)
            for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
                hidden_states = layer(
                    hidden_states,
                    attention_mask=masks[kind],
                    position_ids=position_ids,
                    past_key_values=past_key_values,
                    use_cache=use_cache,
                    position_embeddings=position_embeddings,
                    **kwargs,
                )
        hidden_states = kept_positions(hidden_states, logits_to_keep)
        if self.scale_up is not None:
            hidden_states = self.scale_up(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class ConvGPTForCausalLM(ConvGPTPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ConvGPTConfig) -> None:
        super().__init__(config)
        self.model = ConvGPTModel(config)
        width = config.hidden_size if config.tie_word_embeddings else config.transformer_dim
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


AutoConfig.register("convgpt", ConvGPTConfig, exist_ok=True)
AutoModel.register(ConvGPTConfig, ConvGPTModel, exist_ok=True)
AutoModelForCausalLM.register(ConvGPTConfig, ConvGPTForCausalLM, exist_ok=True)
