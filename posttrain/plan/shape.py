"""What sizes does a model have?  A `Shape`, counted on a model without memory, so for any architecture."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from posttrain import models
from posttrain.config import ModelSection
from posttrain.models import ConvGPTModel
from posttrain.plan.selftest import UNFIT
from posttrain.runtime import trl_arguments


class Shape(NamedTuple):
    """The sizes of a model. Qwen2.5-0.5B:

    Shape(parameters=494e6, blocks=358e6, top=136e6, adapter=0, layers=24, hidden=896, query=896, key_value=128,
          intermediate=4864, behind=0, embedding=896, vocabulary=151936, states=896, tied=True, cache=6144)
    """

    parameters: int
    blocks: int  # numbers in the matrices of the blocks
    top: int  # numbers in the linear layers after the blocks, with the output layer
    adapter: int  # numbers that tuning=lora or qlora adds
    layers: int
    hidden: int  # width of a token between two blocks
    query: int  # query heads x head size
    key_value: int  # key-value heads x head size
    cache: int  # numbers of a token in the KV cache, over all layers
    intermediate: int  # width inside a block's MLP
    behind: int  # width of the widest layer between the blocks and the output layer; 0 if there is none
    embedding: int
    vocabulary: int
    states: int  # width of the input of the output layer
    tied: bool  # whether the output layer is the embedding
    fused: int = 0  # numbers of the blocks that a rollout keeps a second time (fused.py in posttrain/models)
    adapted: int = 0  # linear layers that tuning=lora or qlora puts an adapter on
    family: str = ""  # of the layers, as they are launched: convgpt; simple and qwen3 (simplify_layers); others
    simple: bool = False  # whether simplify_layers (layers.py in posttrain/models) makes its layers keep less
    teacher: Shape | None = None  # of the model of `distillation.teacher`

    @classmethod
    def of(cls, config: Any, model: ModelSection) -> Shape:
        """Return the sizes of a model that is built from its config without memory.

        model: the section of the config, for `tuning` and the adapter.
        """
        with torch.device("meta"):
            net: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        text, output = config.get_text_config(), net.get_output_embeddings()

        def inside(name: str) -> bool:  # a block's name has a number: model.layers.3.mlp.up_proj
            return any(part.isdigit() for part in name.split("."))

        outside = [
            layer for name, layer in net.named_modules() if isinstance(layer, torch.nn.Linear) and not inside(name)
        ]
        hidden = getattr(text, "transformer_dim", text.hidden_size)  # ConvGPT's blocks are narrower than its embedding
        heads = getattr(text, "num_attention_heads", None) or 0  # 0: no attention, and no KV cache
        size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
        key_value = (getattr(text, "num_key_value_heads", None) or heads) * size
        shape = cls(
            parameters=net.num_parameters(),
            blocks=sum(p.numel() for name, p in net.named_parameters() if p.ndim > 1 and inside(name)),
            top=sum(layer.weight.numel() for layer in outside),
            adapter=0,
            layers=text.num_hidden_layers,
            hidden=hidden,
            query=heads * size,
            key_value=key_value,
            cache=_cache_of_a_token(net, otherwise=2 * text.num_hidden_layers * key_value),
            intermediate=getattr(text, "intermediate_size", None) or 4 * hidden,
            behind=max((layer.out_features for layer in outside if layer is not output), default=0),
            embedding=net.get_input_embeddings().embedding_dim,
            vocabulary=output.out_features,
            states=output.in_features,
            tied=output.weight is net.get_input_embeddings().weight,
            simple=text.model_type in models.SIMPLE_FAMILIES and text.model_type != "qwen3",  # which norms heads, too
        )
        if text.model_type in models.SIMPLE_FAMILIES:
            shape = shape._replace(family="simple" if shape.simple else "qwen3")
        if isinstance(net.base_model, ConvGPTModel):
            fused = shape.blocks + shape.embedding * shape.hidden if model.tuning == "full" else 0
            shape = shape._replace(family="convgpt", fused=fused)
        if (settings := models.peft_config(model, net)) is None:
            return shape
        from peft import get_peft_model

        with trl_arguments.refusals_in_words():
            adapted = get_peft_model(net, settings)
        return shape._replace(
            adapter=sum(p.numel() for p in adapted.parameters() if p.requires_grad),
            adapted=sum(name.endswith(".lora_A.default") for name, _ in adapted.named_modules()),
        )


def _cache_of_a_token(net: Any, otherwise: int) -> int:
    """Return how many numbers a model caches for a token; `otherwise` if it cannot run without memory."""
    net, always = net.bfloat16(), {"use_cache": True, "return_dict": True}  # experts need half precision there
    try:
        with torch.device("meta"), torch.no_grad():
            cache = getattr(net(input_ids=torch.zeros(1, 1, dtype=torch.long), **always), "past_key_values", None)
    except UNFIT:  # it needs the values of its inputs, as some models do for padding
        return otherwise
    held = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return sum(tensor.numel() for tensor in held if tensor is not None)
