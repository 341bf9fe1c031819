"""Is an exported model the one that was trained, and does what cannot be exported end in words?"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_families
import pytest
import torch
from gguf import GGUFReader, quants
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_evaluate import tiny_model
from tiny_runs import ROOT, called
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from posttrain import models
from posttrain.config import ModelSection
from posttrain.models import gguf_writer, model_card
from posttrain.models.chat import Chat
from posttrain.models.gguf import convert
from posttrain.runtime import checkpoint
from posttrain.serving.export import export_run, main
from posttrain.serving.ollama import modelfile, ollama_template
from posttrain.serving.publish.content import gather_content
from posttrain.types import UserError

WRITTEN = {
    "llama": {},
    "qwen2.5": {},
    "qwen3": {"head_dim": 128},
    "gpt2": {},
}  # transformers reads no head_dim of Qwen3
TALK = [{"role": "user", "content": "It's 12 + 345!"}]


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def prompt(tokenizer: Any) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(TALK[0]["content"])["input_ids"]
    return tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)


def family(folder: Path, name: str, **changes: Any) -> Path:
    """A model of a family, with the tokenizer rules that its makers use: Qwen has its own."""
    model_families.write(folder, name, **(WRITTEN.get(name, {}) | changes))
    if name.startswith("qwen"):
        file = folder / "tokenizer.json"
        spec = json.loads(file.read_text())
        (pattern,) = (each for each, of in gguf_writer.SPLITS.items() if of == "qwen2")
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        spec["pre_tokenizer"]["use_regex"] = False
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
        file.write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_what_is_read_back_from_gguf_is_the_model(name: str, kind: str, tmp_path: Path) -> None:
    """Weights of the file in float32 are those of the model; otherwise their nearest in the file's type."""
    net, tokenizer = load(family(tmp_path / "model", name))
    with torch.no_grad():
        for each in net.parameters():
            each.add_(0.1 * torch.randn_like(each))  # biases and norms as well
    net.save_pretrained(tmp_path / "model")
    file = export_run(tmp_path / "model", "gguf", tmp_path / "out" / "m.gguf", kind)
    again, said = load(convert(file, tmp_path / "back"))
    ids = prompt(tokenizer)
    assert prompt(said) == ids and said.pad_token_id == tokenizer.pad_token_id
    assert said.eos_token == ("<|endoftext|>" if name == "gpt2" else "<|eot_id|>" if name == "llama" else "<|im_end|>")
    with torch.no_grad():
        for each in net.parameters():
            if each.ndim > 1:
                blocks = each.shape[-1] % 32 == 0 and "gpt2" not in name
                numbers = each.numpy()
                if kind == "q8_0" and blocks:
                    stored = gguf_writer.TYPES[kind][0]
                    each.copy_(torch.from_numpy(quants.dequantize(quants.quantize(numbers, stored), stored)))
                elif kind != "f32":
                    each.copy_(each.half().float())
        mine, right = (each(torch.tensor([ids])).logits for each in (again, net))
    if name == "gpt2" and kind == "q8_0":  # whose matrices are transposed: their blocks are of columns here
        assert (mine - right).abs().max() < 0.1 * right.abs().max()
    else:
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_the_file_holds_tokens_template_and_the_end_of_an_answer(tmp_path: Path) -> None:
    net, tokenizer = load(family(tmp_path / "model", "qwen2.5"))
    reader = GGUFReader(export_run(tmp_path / "model", "gguf", tmp_path / "m.gguf"))
    found = {name: field.contents() for name, field in reader.fields.items()}
    assert found["general.architecture"] == "qwen2" and found["general.name"] == "model"
    assert found["tokenizer.ggml.pre"] == "qwen2" and found["tokenizer.ggml.eos_token_id"] == (
        stop := tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == found["qwen2.vocab_size"] == net.config.vocab_size
    control = gguf_writer.TokenType.CONTROL
    assert tokens[stop] == "<|im_end|>" and kinds[stop] == control
    assert kinds[300] == gguf_writer.TokenType.NORMAL and kinds[-1] == gguf_writer.TokenType.UNUSED
    assert found["tokenizer.chat_template"] == tokenizer.chat_template and not found["tokenizer.ggml.add_bos_token"]


def test_what_is_trained_is_not_marked_in_the_template() -> None:
    """llama.cpp does not know transformers' `generation` blocks; the rest is unchanged, spaces as well."""
    template = models.TEMPLATE_PATH.read_text(encoding="utf-8")
    plain = gguf_writer.plain_template(template)
    assert "generation" in template and not re.search(r"\{%-?\s*(end)?generation", plain)
    tokenizer = model_families.byte_level_tokenizer()
    for blocks in (template, template.replace("{%- generation -%}", "{% generation %}\n")):
        written = [
            tokenizer.apply_chat_template(
                [*TALK, {"role": "assistant", "content": "357"}], chat_template=each, tokenize=False
            )
            for each in (blocks, gguf_writer.plain_template(blocks))
        ]
        assert written[0] == written[1]


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}], "gpt-2"),
        ([{"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}], ""),
        (
            [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
            "smollm",
        ),
        (
            [
                {"type": "Digits", "individual_digits": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
            "",
        ),
        ([{"type": "Whitespace"}], ""),
    ],
)
def test_how_words_are_split_has_a_name_or_none(
    steps: list[dict[str, Any]], name: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    class Backend:
        def to_str(self) -> str:
            spec = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
            spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
            return json.dumps(spec)

    class Tokenizer:
        backend_tokenizer = Backend()

    assert gguf_writer.pre_tokenizer_of(Tokenizer()) == name


def go(template: str, messages: list[dict[str, str]]) -> str:
    """What Ollama's language makes of a template that has the form of ours."""
    pattern = r"\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)"
    (body, last), text = re.fullmatch(pattern, template, re.DOTALL).groups(), ""  # type: ignore[union-attr]
    parts = dict(re.findall(r'if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else|\Z)', body, re.DOTALL))
    for message in messages:
        text += parts[message["role"]].replace("{{ .Content }}", message["content"])
    return text + last


@pytest.mark.parametrize("name", ["qwen2.5", "chatml", "phi3"])
def test_ollama_writes_what_the_template_writes(name: str, tmp_path: Path) -> None:
    family = "gpt2" if name == "chatml" else name
    tokenizer = AutoTokenizer.from_pretrained(model_families.write(tmp_path / "model", family))
    if name == "chatml":
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.chat_template = models.TEMPLATE_PATH.read_text(encoding="utf-8")
    found = ollama_template(tokenizer)
    assert found is not None and not found.differences
    template, system, _ = found
    assert system == ("You help." if name == "qwen2.5" else "")
    asked = [*TALK, {"role": "assistant", "content": "357"}, {"role": "user", "content": "Sure?"}]
    late = {"role": "system", "content": "Be short."}
    for messages in (asked, [late, *asked], [*asked[:2], late, asked[2]], [asked[0], late, *asked[1:]]):
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = (
            messages
            if messages[0]["role"] == "system" or not system
            else [{"role": "system", "content": system}, *messages]
        )
        assert go(template, given) == written
    text = "".join(modelfile(tokenizer, 512))
    assert text.startswith("FROM ./model.gguf\nPARAMETER num_ctx 512\nPARAMETER stop ")
    assert text.endswith(f'TEMPLATE """{template}"""\n')


def test_a_template_that_is_more_than_a_sequence_of_messages_is_left_to_ollama(tmp_path: Path) -> None:
    """Gemma writes the system message into the first user message; a model may have no template."""
    for name in ("gemma3", "gpt2"):
        tokenizer = AutoTokenizer.from_pretrained(model_families.write(tmp_path / name, name))
        assert ollama_template(tokenizer) is None and "TEMPLATE" not in "".join(modelfile(tokenizer, 8))


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
BRACED = "{% for m in messages %}[{{ m.role }}]{{ '{' + m.content + '}' }}{% endfor %}[assistant]{"
THOUGHTS = "m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else m.content"
NO_LATE = "raise_exception('late') if m.role == 'system' and not loop.first else m.content"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (BRACED, False),  # Ollama's language reads {{{ as an action that begins with a brace
        (BRACED.replace("'{'", "'{ '"), True),
    ],
)
def test_a_brace_before_a_message_has_no_form_in_the_language_of_ollama(template: str, written: bool) -> None:
    tokenizer = model_families.byte_level_tokenizer()
    tokenizer.chat_template = template
    assert (ollama_template(tokenizer) is not None) == written
    assert ("TEMPLATE" in "".join(modelfile(tokenizer, 8))) == written


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("m.content", []),
        (THOUGHTS, ["changes thoughts of earlier answers (<think>...</think>)"]),
        ("m.content|trim", ["changes spaces and line breaks around a message"]),
        (NO_LATE, ["refuses a system message after the first message"]),
    ],
)
def test_what_a_template_does_to_contents_is_told_in_the_modelfile(content: str, told: list[str]) -> None:
    """Qwen3's drops thoughts, Llama 3's cuts spaces, others refuse a system message in mid-conversation."""
    tokenizer = model_families.byte_level_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML.replace("CONTENT", content)
    found, lines = ollama_template(tokenizer), modelfile(tokenizer, 8)
    assert found is not None and found.differences == told
    assert [line for line in lines if line.startswith("#")] == [
        f"# The model's own chat template {each}. TEMPLATE does not.\n" for each in told
    ]
    asked = [*TALK, {"role": "assistant", "content": "357"}, {"role": "user", "content": "Sure?"}]
    written = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert go(found.text, asked) == written and lines[-1].startswith("TEMPLATE ")


DEMANDS = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "eos", "stop"),
    [
        (None, None, None),
        (None, "<|endoftext|>", "<|endoftext|>"),
        ("{{ raise_exception('no') }}", "<|endoftext|>", "<|endoftext|>"),
        ("{{ raise_exception('no') }}", None, None),
        (DEMANDS + CHATML.replace("CONTENT", "m.content"), "<|endoftext|>", "<|im_end|>"),
    ],
)
def test_a_modelfile_has_the_stop_that_the_tokenizer_has(
    template: str | None, eos: str | None, stop: str | None
) -> None:
    """There may be no template and no end of a text, and a template may raise."""
    tokenizer = model_families.byte_level_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    found = gguf_writer.stop_of(tokenizer)
    assert found == (None if stop is None else tokenizer.convert_tokens_to_ids(stop))
    told = [line for line in modelfile(tokenizer, 8) if line.startswith("PARAMETER stop")]
    assert told == ([] if stop is None else [f'PARAMETER stop "{stop}"\n'])


def test_ollama_gets_a_folder(tmp_path: Path) -> None:
    folder = export_run(family(tmp_path / "model", "qwen2.5"), "ollama", tmp_path / "out", "q8_0")
    assert sorted(each.name for each in folder.iterdir()) == ["Modelfile", "model.gguf"]
    assert 'SYSTEM """You help."""' in (folder / "Modelfile").read_text()


def adapter_of(base: Path, folder: Path) -> Any:
    """An adapter with random numbers in `folder`; returns the model that it changes."""
    net: Any = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(folder))
    return adapted


def test_an_adapter_is_merged_or_copied(tmp_path: Path) -> None:
    base = family(tmp_path / "base", "llama")
    adapted = adapter_of(base, tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        right = adapted(ids).logits
        merged, _ = load(export_run(tmp_path / "adapter", "merged", tmp_path / "merged"))
        torch.testing.assert_close(merged(ids).logits, right, rtol=1e-4, atol=1e-5)
        file = export_run(tmp_path / "adapter", "gguf", tmp_path / "m.gguf", "f32")
        read, _ = load(convert(file, tmp_path / "back"))
        torch.testing.assert_close(read(ids).logits, right, rtol=1e-4, atol=1e-5)
    family(tmp_path / "final", "qwen2.5")  # a run's own merged model beside its adapter is taken as it is
    kept = export_run(tmp_path / "adapter", "merged", tmp_path / "kept")
    assert (kept / "model.safetensors").read_bytes() == (tmp_path / "final" / "model.safetensors").read_bytes()
    copied = export_run(tmp_path / "adapter", "adapter", tmp_path / "copy")
    for each in (tmp_path / "adapter").iterdir():
        assert (copied / each.name).read_bytes() == each.read_bytes()
    with pytest.raises(UserError, match=r"holds no adapter: model.tuning was full"):
        export_run(family(tmp_path / "alone" / "base", "llama"), "adapter", tmp_path / "none")


def test_the_tokenizer_beside_an_adapter_is_the_one_it_was_trained_with(tmp_path: Path) -> None:
    """TRL saves it there, with the template. Answers end with what this template writes after them."""
    base = family(tmp_path / "base", "llama")
    adapter_of(base, tmp_path / "mine")
    own = AutoTokenizer.from_pretrained(base)
    own.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    own.chat_template = models.TEMPLATE_PATH.read_text(encoding="utf-8")
    own.save_pretrained(tmp_path / "mine")
    stop = own.convert_tokens_to_ids("<|im_end|>")
    net, said = load(export_run(tmp_path / "mine", "merged", tmp_path / "merged"))
    assert said.chat_template == own.chat_template and prompt(said) == prompt(own)
    assert net.generation_config.eos_token_id == [stop, *GenerationConfig.from_pretrained(base).eos_token_id]
    reader = GGUFReader(export_run(tmp_path / "mine", "gguf", tmp_path / "m.gguf"))
    found = {name: field.contents() for name, field in reader.fields.items()}
    assert found["tokenizer.ggml.eos_token_id"] == stop
    assert found["tokenizer.chat_template"] == gguf_writer.plain_template(own.chat_template)
    ollama = export_run(tmp_path / "mine", "ollama", tmp_path / "ollama")
    assert "<|im_start|>user\n{{ .Content }}" in (ollama / "Modelfile").read_text()
    assert "tokenizer.json" in {
        each.name for each in export_run(tmp_path / "mine", "adapter", tmp_path / "c").iterdir()
    }


@pytest.mark.parametrize("form", ["merged", "gguf", "ollama"])
def test_a_tokenizer_without_its_vocabulary_is_refused(form: str, tmp_path: Path) -> None:
    """transformers makes one of a single token of it."""
    base = family(tmp_path / "base", "llama")
    adapter_of(base, tmp_path / "mine")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"mine has a tokenizer_config.json, but no vocabulary"):
        export_run(tmp_path / "mine", form, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_an_adapter_may_bring_tokens_that_its_base_model_lacks(form: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family(tmp_path / "base", "llama"))
    rows = len(tokenizer)
    base = family(tmp_path / "base", "llama", vocab_size=rows)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    net: Any = AutoModelForCausalLM.from_pretrained(base)
    net.resize_token_embeddings(rows + 2)
    trained = LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, trainable_token_indices=[rows, rows + 1]
    )
    adapted = get_peft_model(net, trained)
    adapted.save_pretrained(str(tmp_path / "mine"))
    tokenizer.save_pretrained(tmp_path / "mine")
    out = export_run(tmp_path / "mine", form, tmp_path / "out", "f32")
    merged, said = load(out if form == "merged" else convert(out, tmp_path / "back"))
    ids = torch.tensor([[5, 6, rows, rows + 1]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    assert said.convert_tokens_to_ids("<|im_end|>") == rows + 1
    adapter_of(base, tmp_path / "without")
    tokenizer.save_pretrained(tmp_path / "without")
    with pytest.raises(UserError, match=r"no embeddings of the 2 tokens"):
        export_run(tmp_path / "without", form, tmp_path / "none")


@pytest.mark.parametrize("form", ["merged", "gguf"])
@pytest.mark.parametrize(
    ("tied", "targets"), [(True, ["q_proj"]), (False, ["q_proj"]), (False, ["q_proj", "embed_tokens"])]
)
@pytest.mark.parametrize("more", [0, 64])
def test_embeddings_may_have_been_resized(form: str, tied: bool, targets: list[str], more: int, tmp_path: Path) -> None:
    """To a multiple of 64, or to no more rows than the tokenizer has tokens."""
    tokenizer = AutoTokenizer.from_pretrained(family(tmp_path / "base", "llama"))
    rows = len(tokenizer) + more
    size = len(tokenizer) + 32
    base = family(tmp_path / "base", "llama", vocab_size=size, tie_word_embeddings=tied)
    net: Any = AutoModelForCausalLM.from_pretrained(base)
    net.resize_token_embeddings(rows)
    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "mine"))
    out = export_run(tmp_path / "mine", form, tmp_path / "out", "f32")
    merged, _ = load(out if form == "merged" else convert(out, tmp_path / "back"))
    assert merged.config.vocab_size == merged.get_input_embeddings().weight.shape[0] == rows
    ids = torch.tensor([[5, 6, 7, len(tokenizer) - 1]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


def test_embeddings_with_fewer_rows_than_the_tokenizer_has_tokens_are_refused(tmp_path: Path) -> None:
    base = family(tmp_path / "base", "llama")
    net: Any = AutoModelForCausalLM.from_pretrained(base)
    net.resize_token_embeddings(300)
    get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(tmp_path / "mine"))
    with pytest.raises(UserError, match=r"mine has embeddings of 300 tokens, and its tokenizer has \d+"):
        export_run(tmp_path / "mine", "merged", tmp_path / "out")


def test_the_adapter_of_a_run_is_copied_with_the_tokenizer_of_its_model(tmp_path: Path) -> None:
    """A phase saves the tokenizer beside the whole model alone. What was copied can be merged again."""
    tokenizer = AutoTokenizer.from_pretrained(family(tmp_path / "base", "llama"))
    rows = len(tokenizer)
    net: Any = AutoModelForCausalLM.from_pretrained(family(tmp_path / "base", "llama", vocab_size=rows))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = models.TEMPLATE_PATH.read_text(encoding="utf-8")
    net.resize_token_embeddings(rows + 2)
    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    phase = tmp_path / "mine" / "phase1"
    adapted.save_pretrained(str(phase / "adapter"))
    (phase / "adapter" / "README.md").write_text("The adapter.")
    final: Any = adapted.merge_and_unload()  # type: ignore[operator]

    def write(folder: Path) -> None:
        final.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text("The model.")

    checkpoint.save(phase / "final", write)
    for number, source in enumerate((phase, phase / "adapter")):
        copied = export_run(source, "adapter", tmp_path / f"copied{number}")
        assert (copied / "README.md").read_text() == "The adapter." and not (copied / "config.json").exists()
        again, said = load(export_run(copied, "merged", tmp_path / f"again{number}"))
        assert said.chat_template == tokenizer.chat_template and prompt(said) == prompt(tokenizer)
        ids = torch.tensor([prompt(said)])
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, final(ids).logits, rtol=1e-4, atol=1e-5)
    (phase / "final" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"final is damaged: tokenizer_config.json"):
        export_run(phase, "adapter", tmp_path / "none")


def test_an_adapter_that_does_not_fit_its_base_model_is_named(tmp_path: Path) -> None:
    base = family(tmp_path / "base", "llama")
    adapter_of(base, tmp_path / "mine")
    family(tmp_path / "base", "llama", hidden_size=64)
    with pytest.raises(UserError, match=r"The adapter .*mine cannot be merged into .*base"):
        export_run(tmp_path / "mine", "merged", tmp_path / "out")


@pytest.mark.parametrize("parts", [1, 3])
def test_weights_that_are_cut_are_not_copied(parts: int, tmp_path: Path) -> None:
    """A folder from elsewhere has no manifest that would tell."""
    net, _ = load(family(tmp_path / "base", "llama"))
    if parts > 1:
        (tmp_path / "base" / "model.safetensors").unlink()
        net.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    files = sorted((tmp_path / "base").glob("*.safetensors"))
    assert min(parts, 2) <= len(files)
    whole = files[-1].read_bytes()
    files[-1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"{files[-1].name} is not a weight file that can be loaded"):
        export_run(tmp_path / "base", "merged", tmp_path / "out" / "copied")
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_whole_weights_is_not_copied(tmp_path: Path) -> None:
    adapter_of(family(tmp_path / "base", "llama"), tmp_path / "mine")
    weights = tmp_path / "mine" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"adapter_model.safetensors is not a weight file that can be loaded"):
        export_run(tmp_path / "mine", "adapter", tmp_path / "copied")
    weights.unlink()
    with pytest.raises(UserError, match=r"mine holds no weights of an adapter \(adapter_model.safetensors\)"):
        export_run(tmp_path / "mine", "adapter", tmp_path / "copied")
    assert not (tmp_path / "copied").exists()
    (tmp_path / "mine" / "adapter_model.bin").write_bytes(b"weights")  # peft reads it as well
    assert (export_run(tmp_path / "mine", "adapter", tmp_path / "copied") / "adapter_model.bin").is_file()


@pytest.mark.parametrize("base", [5, ["a"], "", None])
def test_the_base_model_of_an_adapter_is_a_name(base: object, tmp_path: Path) -> None:
    adapter_of(family(tmp_path / "base", "llama"), tmp_path / "mine")
    file = tmp_path / "mine" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    with pytest.raises(UserError, match=r"does not name its base model \(base_model_name_or_path\)"):
        export_run(tmp_path / "mine", "merged", tmp_path / "out")


def test_a_checkpoint_is_exported_and_not_the_end_of_its_run(tmp_path: Path) -> None:
    """Its folder lies beside `adapter` and `final`, which are of a later step."""
    run = tmp_path / "run"
    base = family(tmp_path / "base", "llama")
    adapted = adapter_of(base, run / "checkpoint-1")
    adapter_of(base, run / "adapter")
    family(run / "final", "llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    merged, _ = load(export_run(run / "checkpoint-1", "merged", tmp_path / "merged"))
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    copied = export_run(run / "checkpoint-1", "adapter", tmp_path / "copied")
    weights = "adapter_model.safetensors"
    assert (copied / weights).read_bytes() == (run / "checkpoint-1" / weights).read_bytes()
    whole = family(run / "checkpoint-2", "llama")
    with pytest.raises(UserError, match=r"checkpoint-2 holds no adapter"):
        export_run(whole, "adapter", tmp_path / "none")


def convgpt_run(run: Path, chat: Chat) -> Path:
    """A phase with a checkpoint of step 1, as the Trainer and `seal` write it, and `final` of step 2."""
    net = tiny_model(chat, 1)
    net.save_pretrained(run / "checkpoint-1")
    chat.save(run / "checkpoint-1")
    (run / "checkpoint-1" / "optimizer.pt").write_bytes(b"0")
    checkpoint.seal(run / "checkpoint-1", step=1)
    config = {"model": {"name_or_path": "runs/base"}, "seed": 0}
    result = model_card.CardResult("held-out rows: loss", 0.5, 10)
    data = {"path": "embedded", "kind": "messages", "licence": "generated here", "train": 9, "held_out": 1}
    record = model_card.phase_record("phase1", config, 2, data=[data], results=[result])
    source = ModelSection(name_or_path="x")
    models.save(run / "final", tiny_model(chat, 2), chat, config, source=source, history=[record], phase="phase1")
    (run / checkpoint.RUN_CONFIG).write_bytes((run / "final" / checkpoint.RUN_CONFIG).read_bytes())
    return run


def test_a_checkpoint_gets_what_only_the_model_of_its_run_has(tmp_path: Path, tiny_chat: Chat) -> None:
    """The code of a ConvGPT, the settings, and the card, whose step is that of the checkpoint."""
    run = convgpt_run(tmp_path / "run", copy.deepcopy(tiny_chat))
    for name in ("checkpoint-1", "best-1"):
        if name == "best-1":
            (run / "checkpoint-1").rename(run / name)
        out = export_run(run / name, "merged", tmp_path / name)
        assert {each.name for each in out.iterdir()} == {each.name for each in (run / "final").iterdir()}
        maps = [json.loads((each / "config.json").read_text())["auto_map"] for each in (out, run / "final")]
        assert maps[0] == maps[1] and (out / models.CODE).read_bytes() == (run / "final" / models.CODE).read_bytes()
        meta = checkpoint.verify(out)["meta"]
        (record,) = meta["history"]
        assert (meta["step"], record["step"], record["results"]) == (1, 1, [])
        card: Any = ModelCard.load(out / "README.md")
        assert "| embedded | messages | generated here | 9 | 1 |" in card.text
        assert "held-out rows: loss" not in card.text
        content = gather_content(out, "ana/toy")  # as `publish` does
        assert content.size(models.CODE)
    shutil.rmtree(run / "final")
    (run / checkpoint.RUN_CONFIG).unlink()
    out = export_run(run / "best-1", "merged", tmp_path / "alone")
    assert (out / models.CODE).is_file() and not (out / "README.md").exists()
    (out / models.CODE).write_text("# of an earlier version")
    (out / checkpoint.MANIFEST).unlink()
    again = export_run(out, "merged", tmp_path / "again")
    assert (again / models.CODE).read_text() == "# of an earlier version"


ELSEWHERE = """
import sys
sys.modules["posttrain"] = None  # which may be installed here: an import of it raises
import torch
from transformers import AutoModelForCausalLM
net = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32).eval()
with torch.no_grad():
    torch.save(net(torch.tensor([[5, 6, 7, 8]])).logits, sys.argv[2])
"""


@pytest.mark.thorough
def test_a_checkpoint_of_a_convgpt_is_loaded_without_this_project(tmp_path: Path, tiny_chat: Chat) -> None:
    run = convgpt_run(tmp_path / "run", copy.deepcopy(tiny_chat))
    out = export_run(run / "checkpoint-1", "merged", tmp_path / "out")
    (tmp_path / "load.py").write_text(ELSEWHERE)
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "load.py"), str(out), str(tmp_path / "logits.pt")],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    net, ids = AutoModelForCausalLM.from_pretrained(run / "checkpoint-1"), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), net(ids).logits)


def test_the_default_place_may_lie_in_the_folder_that_is_copied(tmp_path: Path) -> None:
    base = family(tmp_path / "base", "llama")
    adapter_of(base, tmp_path / "mine")
    for folder, form in ((base, "merged"), (tmp_path / "mine", "adapter")):
        done = called(main, str(folder), "--to", form)
        assert done.returncode == 0, done.stderr
        out = folder / "export" / form
        assert not [each for each in out.iterdir() if each.is_dir()]
        assert [each.name for each in out.parent.iterdir()] == [form]


def test_what_is_no_part_of_the_model_is_not_copied(tmp_path: Path) -> None:
    """A checkpoint also holds what a run continues from. The copy's manifest lists what was copied, with its meta."""
    net, tokenizer = load(family(tmp_path / "base", "llama"))

    def write(folder: Path) -> None:
        net.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name in ("README.md", "run_config.yaml", "state.json", "optimizer.pt", "critic.safetensors"):
            (folder / name).write_text("{}")

    folder = checkpoint.save(tmp_path / "run" / "checkpoint-1", write, step=1, phase=3)
    copied = export_run(folder, "merged", tmp_path / "copied")
    assert checkpoint.verify(copied)["meta"] == {"step": 1, "phase": 3}
    kept = {each.name for each in folder.iterdir()} - {"state.json", "optimizer.pt", "critic.safetensors"}
    assert {each.name for each in copied.iterdir()} == kept
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"holds no .safetensors weights"):
        export_run(tmp_path / "base", "merged", tmp_path / "none")


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_all_templates_of_a_tokenizer_are_copied(form: str, tmp_path: Path) -> None:
    folder = base = family(tmp_path / "base", "llama")
    if form == "adapter":
        adapter_of(base, folder := tmp_path / "mine")
    tokenizer = AutoTokenizer.from_pretrained(base)
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(folder)
    out = export_run(folder, form, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).chat_template == templates
    assert "additional_chat_templates/tool_use.jinja" in checkpoint.verify(out)["files"]


@pytest.mark.parametrize("form", ["gguf", "ollama", "merged", "adapter"])
def test_a_place_that_cannot_be_made_is_named(form: str, tmp_path: Path) -> None:
    adapter_of(family(tmp_path / "base", "llama"), tmp_path / "mine")
    (tmp_path / "a.yaml").write_text("")
    for place in ("/proc/x/y", "/proc/x", str(tmp_path / "a.yaml" / "sub"), str(tmp_path / "a.yaml" / "sub" / "m")):
        done = called(main, str(tmp_path / "mine"), "--to", form, "--out", place)
        assert done.returncode == 2
        assert f"Nothing can be written at {place}" in done.stderr and "--out" in done.stderr


def test_the_command_for_ollama_can_be_copied_into_a_shell(tmp_path: Path) -> None:
    family(tmp_path / "a b" / "phase1" / "final", "llama")
    done = called(main, str(tmp_path / "a b" / "phase1"), "--to", "ollama")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "a b" / "phase1" / "export" / "ollama" / "Modelfile"
    assert shlex.split(done.stdout.splitlines()[-1]) == ["ollama", "create", "a-b-phase1", "-f", str(file)]


def test_a_run_is_found_by_its_folder(tmp_path: Path) -> None:
    family(tmp_path / "mine" / "phase1" / "final", "llama")
    done = called(main, str(tmp_path / "mine"), "--to", "gguf", "--type", "f16")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "export" / "mine-f16.gguf").stat().st_size > 10_000
    done = called(main, str(tmp_path / "mine" / "phase1"), "--to", "merged")
    assert done.returncode == 0 and (tmp_path / "mine" / "phase1" / "export" / "merged" / "config.json").exists()
    again = called(main, str(tmp_path / "mine" / "phase1"), "--to", "merged")
    assert again.returncode == 2 and "already exists and is not changed" in again.stderr


@pytest.mark.parametrize("part", ["final", "adapter"])
def test_a_part_of_a_run_may_be_the_current_folder(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phase = tmp_path / "mine" / "phase1"
    adapter_of(family(tmp_path / "base", "llama"), phase / "adapter")
    family(phase / "final", "llama")
    monkeypatch.chdir(phase / part)
    done = called(main, ".", "--to", "merged" if part == "final" else "adapter")
    assert done.returncode == 0, done.stderr
    assert (phase / "export").is_dir() and not (phase / part / "export").exists()
    (out,) = (phase / "export").iterdir()
    assert checkpoint.verify(out)["meta"]["source"] == part


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smollm3", "smollm3 is not among the architectures"),
        ("phi3", "phi3 is not among"),
        ("mamba", "convert_hf_to_gguf.py"),
    ],
)
def test_other_architectures_are_refused_before_anything_is_written(name: str, reason: str, tmp_path: Path) -> None:
    folder = model_families.write(tmp_path / "model", name)
    done = called(main, str(folder), "--to", "gguf")
    assert done.returncode == 2 and reason in done.stderr
    assert not (folder / "export").exists()


def test_convgpt_says_why_not(tmp_path: Path) -> None:
    config = models.ConvGPTConfig(
        vocab_size=512, hidden_size=144, intermediate_size=32, num_hidden_layers=1, head_dim=16
    )
    tokenizer = model_families.byte_level_tokenizer()
    assert "convolves" in gguf_writer.reason_against(config, tokenizer)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
        ("llama", "hidden_act", "gelu"),
        ("llama", "hidden_act", "gelu_new"),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "is_causal", False),
        ("qwen2.5", "hidden_act", "gelu_new"),
        ("qwen2.5", "layer_types", ["sliding_attention", "full_attention"]),
        ("qwen3", "attention_bias", True),
        ("gpt2", "activation_function", "silu"),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
    ],
)
def test_settings_that_llama_cpp_would_not_compute_are_refused(name: str, key: str, value: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family(tmp_path / "model", name))
    config: Any = AutoConfig.from_pretrained(tmp_path / "model")
    assert gguf_writer.reason_against(config, tokenizer) == ""
    changed = type(config)(**(config.to_dict() | {key: value}))
    assert gguf_writer.reason_against(changed, tokenizer) != ""


def test_layers_are_refused_only_if_they_see_a_sliding_window(tmp_path: Path) -> None:
    """max_window_layers: so many layers see everything before the first one that does not."""
    tokenizer = AutoTokenizer.from_pretrained(family(tmp_path / "model", "qwen2.5"))
    config = AutoConfig.from_pretrained(tmp_path / "model").to_dict()
    window = {"use_sliding_window": True, "sliding_window": 16, "layer_types": None}
    for layers, words in ((2, ""), (1, "its layers see a sliding window")):
        settings: dict[str, Any] = {**config, **window, "max_window_layers": layers}
        made = Qwen2Config(**settings)
        assert gguf_writer.reason_against(made, tokenizer).startswith(words)
        assert bool(gguf_writer.reason_against(made, tokenizer)) == bool(words)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"tie_word_embeddings": False, "head_dim": 16, "rms_norm_eps": 1e-2, "num_key_value_heads": 1}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
        ("qwen2.5", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 128}),
        ("gpt2", {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-2, "reorder_and_upcast_attn": True}),
    ],
)
def test_other_settings_are_read_back(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    net, tokenizer = load(family(tmp_path / "model", name, **changes))
    file = export_run(tmp_path / "model", "gguf", tmp_path / "m.gguf", "f32")
    again, _ = load(convert(file, tmp_path / "back"))
    ids = torch.tensor([prompt(tokenizer)])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, net(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_tokenizer_that_changes_letters_is_refused(tmp_path: Path) -> None:
    """A GGUF file has no place for it. NFC, which Qwen's has, changes no text that is composed already."""
    file = family(tmp_path / "model", "llama") / "tokenizer.json"
    spec = json.loads(file.read_text())
    for change, refused in (({"type": "NFC"}, False), ({"type": "Lowercase"}, True)):
        file.write_text(json.dumps(spec | {"normalizer": change}))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
        assert (gguf_writer.pre_tokenizer_of(tokenizer) == "") == refused


@pytest.mark.parametrize(
    ("number", "kind", "most"),
    [(1e5, "f16", "65,504, the largest of f16"), (-1e8, "q8_0", "8,319,008, the largest of q8_0")],
)
def test_numbers_beyond_a_type_are_refused_and_leave_nothing(
    number: float, kind: str, most: str, tmp_path: Path
) -> None:
    """A block of q8_0 has a scale in f16, 1/127 of its largest number."""
    net, _ = load(family(tmp_path / "model", "llama"))
    with torch.no_grad():
        net.model.layers[0].mlp.up_proj.weight[0, 0] = number
    net.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=rf"above {most}. Take --type f32"):
        export_run(tmp_path / "model", "gguf", tmp_path / "out" / "m.gguf", kind)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_weights_that_are_not_finite_are_refused(number: float, kind: str, tmp_path: Path) -> None:
    net, _ = load(family(tmp_path / "model", "llama"))
    with torch.no_grad():
        net.model.norm.weight[0] = number
    net.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"^model.norm.weight holds numbers that are not finite. Name another model"):
        export_run(tmp_path / "model", "gguf", tmp_path / "out" / "m.gguf", kind)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_an_adapter_that_makes_weights_infinite_is_not_merged(form: str, tmp_path: Path) -> None:
    adapter_of(family(tmp_path / "base", "llama"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(weight for name, weight in tensors.items() if "lora_B" in name)[0, 0] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"weight holds numbers that are not finite once .*adapter is merged into"):
        export_run(tmp_path / "adapter", form, tmp_path / "out" / "m")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_a_type_is_refused_where_no_gguf_file_is_written(form: str, tmp_path: Path) -> None:
    done = called(main, str(tmp_path), "--to", form, "--type", "q8_0")
    assert done.returncode == 2 and f"--to {form} writes none: leave out --type" in done.stderr


def test_llama_cpp_writes_what_transformers_writes(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    net, tokenizer = load(family(tmp_path / "model", "qwen2.5"))
    file = export_run(tmp_path / "model", "gguf", tmp_path / "m.gguf", "f32")
    llm = llama_cpp.Llama(str(file), n_ctx=256, verbose=False)
    ids = prompt(tokenizer)
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert llm.tokenize(text.encode(), add_bos=False, special=True) == ids
    right = net.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
    made = []
    for token in llm.generate(ids, temp=0.0):
        made.append(token)
        if len(made) == len(right):
            break
    assert made == right


def test_help_loads_no_library() -> None:
    code = (
        "import sys; from posttrain.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'gguf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, "export", "--help"], cwd=ROOT, check=True)
