"""Is a converted GGUF file the model that was in it, and does a damaged file end in words?"""

from __future__ import annotations

import copy
import json
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from posttrain.config.shared import ModelSection
from posttrain.models.gguf import _same_tokens, convert
from posttrain.models.loading import load
from posttrain.types import UserError

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def net() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape).eval()


def write(file: Path, net: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, without: str = "") -> Path:
    """The model as llama.cpp's converter writes it, unquantized: the halves of rotary dimensions are interleaved."""
    out = gguf.GGUFWriter(file, "llama")
    config: Any = net.config  # its numbers may be None by their types
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_vocab_size(config.vocab_size)
    out.add_rope_dimension_count(config.head_dim)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    special = set(tokenizer.added_tokens_decoder)
    out.add_tokenizer_model("gpt2")
    out.add_token_list([token for token, _ in vocabulary])
    out.add_token_types([3 if number in special else 1 for _, number in vocabulary])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    out.add_token_merges([" ".join(merge) for merge in merges])
    out.add_eos_token_id(int(str(tokenizer.eos_token_id)))
    for name, weight in net.state_dict().items():
        if (name == "lm_head.weight" and net.config.tie_word_embeddings) or name == without:
            continue
        short = name.removeprefix("model.").replace("layers.", "blk.").replace("embed_tokens", "token_embd")
        short = {"norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}.get(short, short)
        for ours, theirs in NAMES.items():
            short = short.replace(ours, theirs)
        heads = {"attn_q.weight": 4, "attn_k.weight": 2}.get(short.partition(".")[2].partition(".")[2])
        if heads:
            weight = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        out.add_tensor(short, weight.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


@pytest.fixture(scope="module")
def file(
    tmp_path_factory: pytest.TempPathFactory, net: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", net, copy.deepcopy(tiny_tokenizer))


def test_the_folder_is_the_model_of_the_file(file: Path, net: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = convert(file, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(again.config, "quantization_config")
    ids = torch.tensor([[5, 17, 300, 42]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, net(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_says_whether_the_file_has_an_output_layer(
    tiny_tokenizer: PreTrainedTokenizerFast, net: LlamaForCausalLM, tmp_path: Path, tied: bool
) -> None:
    torch.manual_seed(1)
    config = copy.deepcopy(net.config)
    config.tie_word_embeddings = tied
    other = LlamaForCausalLM(config).eval()  # type: ignore[arg-type]
    folder = convert(write(tmp_path / "one.gguf", other, copy.deepcopy(tiny_tokenizer)), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    with torch.no_grad():
        ids = torch.tensor([[5, 17, 300, 42]])
        again, _ = load(ModelSection(name_or_path=str(folder)), device="cpu", chat_template=None)
        assert torch.equal(again(ids).logits, other(ids).logits)


def test_the_tokenizer_is_that_of_the_file(file: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(convert(file, tmp_path / "model"))
    for text in ("The goal is right of me, so I go right.", "12 + 7 = 19<|im_end|>\n", "ä\x00<think>"):
        assert tokenizer(text)["input_ids"] == tiny_tokenizer(text)["input_ids"]
    assert tokenizer.eos_token == tiny_tokenizer.eos_token
    assert tokenizer.model_max_length == 256


def test_a_folder_that_would_be_read_with_other_tokens_is_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    _same_tokens(tiny_tokenizer, tmp_path)
    Qwen2Config().save_pretrained(tmp_path)  # transformers gives it a tokenizer class that splits digits
    with pytest.raises(UserError, match="splits text in another way than transformers' Qwen2Tokenizer"):
        _same_tokens(tiny_tokenizer, tmp_path)


def test_a_script_loads_the_folder(file: Path, tmp_path: Path) -> None:
    folder = convert(file, tmp_path / "model")
    net, chat = load(ModelSection(name_or_path=str(folder)), device="cpu", chat_template=None)
    assert net.dtype == torch.float32
    assert chat.tokenizer.convert_ids_to_tokens(chat.stop_id) == "<|im_end|>"


def test_a_folder_that_is_there_is_left_alone(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="already exists"):
        convert(file, tmp_path / "model")


def test_a_folder_below_a_file_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    with pytest.raises(UserError, match=r"cannot be made, because .*notes is a file"):
        convert(file, tmp_path / "notes" / "model")


def test_missing_weights_are_not_made_up(
    net: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lacking = write(tmp_path / "a.gguf", net, tiny_tokenizer, without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UserError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        convert(lacking, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_damaged_file_ends_in_words(file: Path, tmp_path: Path) -> None:
    whole, draw = file.read_bytes(), random.Random(0)
    variants = [b"", b"GGUF", b"GGUF" * 10, b"not a model", whole[: len(whole) // 2], whole[:-1]]
    for _ in range(30):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 8))):
            damaged[draw.randrange(6000)] = draw.randrange(256)  # the header: a weight that changed is no fault
        variants.append(bytes(damaged))
    refused = 0
    for number, content in enumerate(variants):
        (tmp_path / "damaged.gguf").write_bytes(content)
        try:
            convert(tmp_path / "damaged.gguf", tmp_path / f"model-{number}")
        except UserError:
            refused += 1
    assert refused >= 10


def test_impossible_numbers_end_in_words_before_a_model_is_built(file: Path, tmp_path: Path) -> None:
    impossible: dict[str, tuple[str, list[int | float]]] = {
        "block_count": ("<I", [200_000, 0, 1, 3]),
        "embedding_length": ("<I", [2**31, 0, 64]),
        "context_length": ("<I", [0, 2**24 + 1, 2**32 - 1]),
        "attention.layer_norm_rms_epsilon": ("<f", [float("nan"), float("inf"), 0.0, -1e-6]),
        "rope.freq_base": ("<f", [float("nan"), float("-inf"), 0.0, -10000.0]),
    }
    for name, (form, values) in impossible.items():
        for value in values:
            damaged, before = tmp_path / "damaged.gguf", time.process_time()
            damaged.write_bytes(with_number(file.read_bytes(), f"llama.{name}", form, value))
            with pytest.raises(UserError, match=rf"damaged\.gguf is damaged: its {re.escape(name)} is "):
                convert(damaged, tmp_path / "model")
            assert time.process_time() - before < 5
    assert not (tmp_path / "model").exists()


def with_number(whole: bytes, name: str, form: str, value: float) -> bytes:
    """The same file with another number; its place is behind its name and four bytes of its type."""
    place = whole.index(name.encode()) + len(name) + 4
    number = struct.pack(form, value)
    return whole[:place] + number + whole[place + len(number) :]


def test_one_part_of_several_is_refused(file: Path, tmp_path: Path) -> None:
    part = tmp_path / "tiny-00001-of-00003.gguf"
    part.write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="part 1 of 3"):
        convert(part, tmp_path / "model")


def test_help_and_mistakes_load_no_library() -> None:
    code = (
        "import sys; from posttrain.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'gguf'} & sys.modules.keys()"
    )
    for words in (["--help"], ["none.gguf", "folder"]):
        subprocess.run([sys.executable, "-c", code, "gguf", *words], cwd=Path(__file__).parents[2], check=True)
