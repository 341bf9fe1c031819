"""How do models of well-known families look to the scripts?  Tiny, random, templates in the style of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_tokenizers import byte_level_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

SIZES: dict[str, Any] = {
    "vocab_size": 544,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
OPENS = "{% if add_generation_prompt %}"
CHATML_TURNS = (
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    + OPENS
    + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Today's date stands in the system message, which is always there.
LLAMA = (
    "{% set has = messages[0].role == 'system' %}{% set day = strftime_now('%d %b %Y') %}"
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + day + '\n\n' }}"
    "{{ (messages[0].content | trim if has else '') + '<|eot_id|>' }}{% for m in messages[1 if has else 0:] %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    + OPENS
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN25 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}" + CHATML_TURNS
)
# The thoughts of all answers but the last one are cut out, and the last one gets empty ones where it has none.
QWEN3 = (
    "{% for m in messages %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role != 'assistant' %}{{ m.content }}"
    "{% elif loop.last and '</think>' not in m.content %}{{ '<think>\n\n</think>\n\n' + said }}"
    "{% elif loop.last %}{{ m.content }}{% else %}{{ said }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    + OPENS
    + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# There is no system turn: what it says opens the first turn of the user. An answer is the turn of a "model".
GEMMA = (
    "{{ bos_token }}{% set has = messages[0].role == 'system' %}{% for m in messages[1 if has else 0:] %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if loop.first and has %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}" + OPENS + "{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA2 = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + GEMMA
# The system message is always there, with today's date and a mode; without thoughts, answers begin with empty ones.
SMOLLM3 = (
    "{% set has = messages[0].role == 'system' %}{% set mute = has and '/no_think' in messages[0].content %}"
    "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %B %Y') + '\nMode: ' + ('/no_think' if mute else '/think') }}"
    "{{ '\n' + (messages[0].content if has else '') + '<|im_end|>\n' }}{% for m in messages[1 if has else 0:] %}"
    "{{ '<|im_start|>' + m.role + '\n' + ('<think>\n\n</think>\n' if mute and m.role == 'assistant' else '') }}"
    "{{ m.content.lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    + OPENS
    + "{{ '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if mute else '') }}{% endif %}"
)
# A dialogue that is not to be continued ends with the token of the end of a text.
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    + OPENS
    + "{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)


class Family(NamedTuple):
    """settings: of its config. tokens: those it adds to the vocabulary. stops: names in its generation_config."""

    kind: str
    settings: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    template: str | None = None
    tokens: tuple[str, ...] = ()
    stops: tuple[str, ...] = ("<|endoftext|>",)


CHATML = ("<|im_start|>", "<|im_end|>")
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
NO_HEADS = {"num_attention_heads": None, "num_key_value_heads": None, "max_position_embeddings": None}
FAMILIES = {
    "llama": Family(
        "llama", {"tie_word_embeddings": True}, LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ("<|endoftext|>", "<|eot_id|>"),
    ),
    "qwen2.5": Family("qwen2", {"tie_word_embeddings": True}, QWEN25, CHATML, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family("qwen3", {"head_dim": 8}, QWEN3, (*CHATML, "<think>", "</think>"), ("<|im_end|>", "<|endoftext|>")),
    "gemma3": Family(
        "gemma3_text", {"head_dim": 8, **SLIDING}, GEMMA, ("<start_of_turn>", "<end_of_turn>"),
        ("<|endoftext|>", "<end_of_turn>"),
    ),
    "smollm3": Family("smollm3", {"tie_word_embeddings": True}, SMOLLM3, CHATML, ("<|im_end|>",)),
    "phi": Family("phi"),
    "phi3": Family(
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 512}, PHI,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ("<|endoftext|>", "<|end|>"),
    ),
    "gpt2": Family("gpt2", {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}),
    "mamba": Family("mamba", {"state_size": 4, **NO_HEADS}),
}  # fmt: skip


def write(folder: Path, name: str, **changes: Any) -> Path:
    """A model folder of this family as its makers publish it: weights, tokenizer, template, generation_config."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    tokenizer = byte_level_tokenizer(chatml=False)
    tokenizer.add_tokens(list(family.tokens), special_tokens=True)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = family.template
    sizes = {key: value for key, value in {**SIZES, **family.settings, **changes}.items() if value is not None}
    config = AutoConfig.for_model(family.kind, **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, **sizes})
    net = AutoModelForCausalLM.from_config(config)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in family.stops]
    net.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=stops)
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
