"""How does a model folder become one GGUF file, which llama.cpp and what is built on it run?

By the writer and the names of the package `gguf`, for architectures and tokenizers that `posttrain gguf` reads back to
the same logits and tokens. The file has the chat template and the token that ends an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

from posttrain.types import UserError

ANSWER = "<<answer>>"  # no template has this text of its own
CONVERTER = "llama.cpp's own convert_hf_to_gguf.py may know it, and reads the same folder"
TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
LARGEST = {  # number of a type; a block of q8_0 has whole numbers up to 127, and a scale in f16
    GGMLQuantizationType.F16: 65_504.0,
    GGMLQuantizationType.Q8_0: 127 * 65_504.0,
}
# How words are split before merges, as tokenizer.json has it, and llama.cpp's name for it.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {_WORDS % "": "qwen2", _WORDS % "{1,3}": "llama-bpe"}


class Kind(NamedTuple):
    """An architecture: llama.cpp's, what becomes of a weight of transformers', and the settings that are computed.

    A GGUF file has no place for these settings. With other values it would be another model.
    """

    arch: gguf.MODEL_ARCH
    change: Callable[[str, torch.Tensor, Any], torch.Tensor]
    computed: dict[str, str | bool]


def _as_it_is(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    return weight


def _pairs_adjacent(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Reorder rows of queries and keys: llama.cpp's Llama rotates dimensions 2i and 2i + 1, not i and i + D/2."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if f".{projection}." in name:
            return weight.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(weight.shape)
    return weight


def _transposed(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Transpose GPT-2's matrices, which transformers holds as inputs x outputs."""
    return weight.t() if re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) else weight


_GATED: dict[str, str | bool] = {"hidden_act": "silu"}
KINDS = {
    "llama": Kind(gguf.MODEL_ARCH.LLAMA, _pairs_adjacent, _GATED | {"attention_bias": False, "mlp_bias": False}),
    "qwen2": Kind(gguf.MODEL_ARCH.QWEN2, _as_it_is, _GATED),  # with biases of queries, keys and values
    "qwen3": Kind(gguf.MODEL_ARCH.QWEN3, _as_it_is, _GATED | {"attention_bias": False}),
    "gpt2": Kind(
        gguf.MODEL_ARCH.GPT2,
        _transposed,
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
}


def reason_against(config: Any, tokenizer: Any) -> str:
    """Return why this model cannot be written as GGUF, and what to do instead; "" where it can."""
    kind = config.model_type
    if kind == "convgpt":
        return (
            "llama.cpp has no such architecture: ConvGPT reads an embedding as a square and convolves it. Other tools"
            " load the folder with transformers and trust_remote_code=True, or as a server: `posttrain serve`"
        )
    if kind not in KINDS:
        return f"{kind} is not among the architectures that are written here ({', '.join(KINDS)}). {CONVERTER}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        return f"its positions are scaled (rope_type {rope['rope_type']}), which is not written here. {CONVERTER}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"its layers see a sliding window, which is not written here. {CONVERTER}"
    for key, value in (KINDS[kind].computed | {"is_causal": True}).items():
        if (own := getattr(config, key, value)) != value:
            here, there = (f"{key}={json.dumps(each, default=str)}" for each in (own, value))
            return (
                f"its config.json has {here}, and a GGUF file of {kind} is computed with {there}. Other tools load the"
                " folder with transformers, or as a server: `posttrain serve`"
            )
    if len(tokenizer) > config.vocab_size:
        return f"its tokenizer has {len(tokenizer)} tokens, and the model {config.vocab_size}"
    if not pre_tokenizer_of(tokenizer):
        return f"its tokenizer splits words in a way that has no name here. {CONVERTER}"
    return ""


def pre_tokenizer_of(tokenizer: Any) -> str:
    """Return llama.cpp's name for how this tokenizer splits text; "" where none is known to be the same.

    Byte-level BPE alone: GPT-2's rule, SmolLM2's single digits before it, or the patterns of `SPLITS`. A GGUF file has
    no place for a normalizer. NFC is let through, because it changes no composed text, and llama.cpp leaves it out.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        return ""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    model, split = spec["model"], spec["pre_tokenizer"] or {}
    steps = split["pretokenizers"] if split.get("type") == "Sequence" else [split]
    last = steps.pop()
    if model["type"] != "BPE" or model.get("byte_fallback") or last.get("type") != "ByteLevel":
        return ""
    if last["add_prefix_space"] or (spec.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return ""
    name = ""
    if last["use_regex"]:
        digits = [step.get("type") == "Digits" and step["individual_digits"] for step in steps]
        name = "" if not all(digits) or len(digits) > 1 else "smollm" if digits else "gpt-2"
    elif len(steps) == 1 and steps[0].get("type") == "Split" and steps[0]["behavior"] == "Isolated":
        name = "" if steps[0]["invert"] else SPLITS.get(steps[0]["pattern"].get("Regex"), "")
    # llama.cpp looks a whole word up before it merges where Llama 3's rule is named, and nowhere else
    return name if bool(model.get("ignore_merges")) == (name == "llama-bpe") else ""


def write_gguf(net: Any, tokenizer: Any, file: Path, kind: str, name: str) -> None:
    """Write a model with its tokenizer and chat template as one GGUF file.

    Args:
        net: the model, in float32; `reason_against` has nothing against it.
        tokenizer: a fast one.
        file: where; it is overwritten.
        kind: of the matrices: "f32", "f16" or "q8_0" (blocks of 32 numbers with one scale; matrices whose rows are no
            whole blocks become f16). Norms and biases are float32.
        name: of the model, for whoever lists models.

    Raises:
        UserError: a weight is not finite or exceeds float16, or llama.cpp has no place for it.
    """
    config = net.config
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[KINDS[config.model_type].arch])
    writer.add_name(name)
    writer.add_file_type(TYPES[kind][1])
    _add_sizes(writer, config)
    _add_tokens(writer, tokenizer, config.vocab_size)
    for tensor, numbers, stored in _tensors(net, TYPES[kind][0]):
        writer.add_tensor(tensor, numbers, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)


def _add_tokens(writer: GGUFWriter, tokenizer: Any, count: int) -> None:
    """Write the vocabulary of `count` tokens, merges, special tokens and the template."""
    names = {place: token for token, place in tokenizer.get_vocab().items()}
    kinds = {
        place: TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        for place, token in tokenizer.added_tokens_decoder.items()
    }
    writer.add_vocab_size(count)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_of(tokenizer))
    writer.add_token_list([names.get(place, f"[PAD{place}]") for place in range(count)])
    writer.add_token_types(
        [kinds.get(place, TokenType.NORMAL if place in names else TokenType.UNUSED) for place in range(count)]
    )
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    special = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: stop_of(tokenizer),
        writer.add_pad_token_id: tokenizer.pad_token_id,
        writer.add_unk_token_id: tokenizer.unk_token_id,
    }
    for add, token in special.items():
        if token is not None:
            add(token)
    writer.add_add_bos_token(tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(plain_template(tokenizer.get_chat_template()))


def stop_of(tokenizer: Any) -> int | None:
    """Return the token that the chat template writes after an answer.

    Without a template, or where it writes no such conversation, it is that of the end of a text; None without one.
    """
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    for messages in (talk, [{"role": "system", "content": "?"}, *talk]) if tokenizer.chat_template is not None else ():
        try:
            after = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(ANSWER)[2].lstrip()
        except Exception:  # a template may raise anything, e.g. where it demands a system message
            continue
        for place, token in tokenizer.added_tokens_decoder.items():
            if after.startswith(token.content):
                return place
        break
    return tokenizer.eos_token_id


def plain_template(template: str) -> str:
    """Return a template without transformers' own `generation` blocks, which say what is trained."""
    return re.sub(r"\{%(-?)\s*(end)?generation\s*(-?)%\}", _block, template)


def _block(tag: re.Match[str]) -> str:
    return f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}"


def _tensors(net: Any, wanted: GGMLQuantizationType) -> Iterator[tuple[str, np.ndarray, GGMLQuantizationType]]:
    """Yield name, numbers and type of each tensor, with matrices in the type that is wanted."""
    config = net.config
    arch, change, _ = KINDS[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, weight in net.state_dict().items():
        if name in tied:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"llama.cpp's {gguf.MODEL_ARCH_NAMES[arch]} has no place for {name}. {CONVERTER}.")
        numbers = change(name, weight.detach().float().cpu(), config).contiguous().numpy()
        if not np.isfinite(numbers).all():
            raise UserError(f"{name} holds numbers that are not finite. Name another model or checkpoint.")
        stored = wanted if numbers.ndim > 1 else GGMLQuantizationType.F32
        if stored is GGMLQuantizationType.Q8_0 and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:
            stored = GGMLQuantizationType.F16
        if np.abs(numbers).max() > (most := LARGEST.get(stored, np.inf)):
            named = stored.name.lower()
            raise UserError(f"{name} holds numbers above {most:,.0f}, the largest of {named}. Take --type f32.")
        yield found, quantize(numbers, stored), stored
