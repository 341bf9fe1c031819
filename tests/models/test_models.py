"""Does what is loaded fit its chat, does what is saved come back, and is everything wrong said before a run starts?"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.utils import httpx  # the one it was built with, httpx or httpx2
from safetensors.torch import load_file, save_file
from tiny_runs import conversations, not_root, settings, tiny_base
from tiny_tokenizers import byte_level_tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from posttrain import config
from posttrain.config.sft import SFTRun
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun
from posttrain.models import loading as models, model_files
from posttrain.models.chat import TEMPLATE_PATH, Chat
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.plan import preflight
from posttrain.runtime import checkpoint, hardware
from posttrain.types import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    return tiny_base(tmp_path_factory.mktemp("models") / "base", tiny_tokenizer)


@pytest.fixture
def copied(base: Path, tmp_path: Path) -> Path:
    """A copy of the base model, which a test may harm."""
    return Path(shutil.copytree(base, tmp_path / "copy"))


def load(folder: Path | str, **section: Any) -> tuple[Any, Chat]:
    return models.load(ModelSection(name_or_path=str(folder), **section), device="cpu", chat_template=None)


def logits(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net.eval()(torch.arange(3, 40)[None]).logits


def test_save_then_load_gives_the_same_logits_and_template(base: Path, tmp_path: Path) -> None:
    net, chat = load(base)
    section = ModelSection(name_or_path=str(base))
    net.config.use_cache = False  # as after training
    folder = models.save(tmp_path / "final", net, chat, {"seed": 3}, source=section, phase="phase1", step=7)
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    again, chat_again = load(folder)
    assert torch.equal(logits(net), logits(again))
    assert again.dtype == torch.float32
    manifest = checkpoint.verify(folder)
    assert manifest["meta"] == {"phase": "phase1", "step": 7, "chat_template_sha256": chat_again.hash}
    assert yaml.safe_load((folder / "run_config.yaml").read_text()) == {"seed": 3}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(manifest["files"])


def test_sampling_habits_of_a_checkpoint_are_dropped(base: Path, tmp_path: Path) -> None:
    net, chat = load(base)
    net.generation_config = GenerationConfig(do_sample=True, top_k=20, temperature=0.6, repetition_penalty=1.1)
    models.save(tmp_path / "final", net, chat, {}, source=ModelSection(name_or_path=str(base)))
    kept = json.loads((tmp_path / "final" / "generation_config.json").read_text())
    assert not {"do_sample", "top_k", "temperature", "repetition_penalty"} & set(kept)
    assert kept["eos_token_id"] == chat.stop_id
    assert kept["pad_token_id"] == chat.pad_id
    shape = json.loads((tmp_path / "final" / "config.json").read_text())
    assert (shape["eos_token_id"], shape["pad_token_id"]) == (chat.stop_id, chat.pad_id)


def test_embeddings_grow_with_the_tokens_the_chat_adds(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The tokenizer has no ChatML tokens: the chat adds two, and the model gets two more rows."""
    folder = tiny_base(tmp_path / "base", tiny_tokenizer)
    text = (folder / "tokenizer.json").read_text()
    for name in ("<|im_start|>", "<|im_end|>"):
        text = text.replace(name, name.replace("im_", "other_"))
    (folder / "tokenizer.json").write_text(text)
    net, chat = load(folder)
    assert chat.added_tokens == 2
    assert net.get_input_embeddings().weight.shape[0] == 514
    rows = models.peft_config(ModelSection(name_or_path="x", tuning="lora"), net, chat)
    assert rows is not None
    assert rows.trainable_token_indices == {"model.embed_tokens": [512, 513]}


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_with_new_tokens_trains_through_the_fused_heads(tied: bool) -> None:
    """The rows of the new tokens learn, in TRL's head of phases 1 and 2 as in the update of phase 3."""
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from posttrain.models.forward import token_logprobs

    chat = Chat.load(byte_level_tokenizer(chatml=False), None)
    assert chat.added_tokens == 2
    config = LlamaConfig(
        vocab_size=len(chat.tokenizer), tie_word_embeddings=tied, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=2,
    )  # fmt: skip
    net = LlamaForCausalLM(config)
    add_fused_lm_head(net)
    lora = models.peft_config(ModelSection(name_or_path="x", tuning="lora"), net, chat)
    assert lora is not None
    adapted = get_peft_model(net, lora)
    ids, mask = chat.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}])
    logprobs, _ = token_logprobs(net, [ids], [mask])
    row = torch.tensor([ids])
    labels = row.masked_fill(~torch.tensor([mask]), -100)
    fused = adapted(input_ids=row, labels=labels, fused_lm_head=True)
    plain = adapted(input_ids=row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    on = torch.tensor(mask[1:])
    assert torch.allclose(logprobs, plain[on], atol=1e-5)
    assert fused.loss.item() == pytest.approx(-plain[on].mean().item(), abs=1e-5)
    logprobs.sum().backward()
    rows = [p for name, p in adapted.named_parameters() if "token_adapter" in name and p.requires_grad]
    assert rows and any(p.grad is not None and p.grad.abs().sum() > 0 for p in rows)


def test_dtype_auto_is_float32_and_others_are_taken(base: Path) -> None:
    assert load(base)[0].dtype == torch.float32
    assert load(base, dtype="bfloat16")[0].dtype == torch.bfloat16


def tiny_convgpt(tied: bool) -> ConvGPTForCausalLM:
    shape = ConvGPTConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(3)
    return ConvGPTForCausalLM(shape).eval()


def test_auto_map_names_our_own_code_alone(tmp_path: Path, tiny_chat: Chat) -> None:
    """A config that points to code files on the Hub loads natively, and the result points to the copy of ours."""
    tiny_convgpt(tied=True).save_pretrained(tmp_path / "hub")
    copy.deepcopy(tiny_chat.tokenizer).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "config.json"
    marked = json.loads(file.read_text())
    marked["auto_map"] = {"AutoModelForCausalLM": "modeling_convgpt.ConvGPTForCausalLM"}
    file.write_text(json.dumps(marked))
    net, chat = load(tmp_path / "hub")
    assert type(net) is ConvGPTForCausalLM
    models.save(tmp_path / "final", net, chat, {}, source=ModelSection(name_or_path="x"))
    named = json.loads((tmp_path / "final" / "config.json").read_text())["auto_map"]
    assert set(named) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert {place.split(".")[0] for place in named.values()} == {"modeling_convgpt"}
    code = tmp_path / "final" / "modeling_convgpt.py"
    assert code.read_bytes() == (ROOT / "posttrain" / "models" / "convgpt.py").read_bytes()
    assert torch.equal(logits(net), logits(load(tmp_path / "final")[0]))
    code.write_text(code.read_text() + "import os\n")
    with pytest.raises(UserError, match=r"modeling_convgpt.py has .* bytes instead"):
        load(tmp_path / "final")


ELSEWHERE = """
import json, sys
sys.modules["posttrain"] = None  # which may be installed here: an import of it raises
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
try:
    AutoConfig.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    refused = str(error)
named = AutoConfig.from_pretrained(folder, trust_remote_code=True).auto_map  # vLLM finds the classes there
net = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Which way?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)["input_ids"]
with torch.no_grad():
    logits = net(ids).logits
    hidden = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)(ids).last_hidden_state
told = net.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1]:].tolist()
torch.save({"ids": ids, "logits": logits, "hidden": hidden, "told": told}, out)
print(json.dumps([type(net).__module__, refused, sorted(named)]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_saved_convgpt_is_loaded_without_this_project(tmp_path: Path, tiny_chat: Chat, tied: bool) -> None:
    """By plain transformers, in a process that cannot import posttrain: the same logits and the same greedy tokens."""
    net = tiny_convgpt(tied)
    final = models.save(tmp_path / "final", net, tiny_chat, {}, source=ModelSection(name_or_path="x"))
    (tmp_path / "load.py").write_text(ELSEWHERE)
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "load.py"), str(final), str(tmp_path / "out.pt")],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    module, refused, named = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules.") and "trust_remote_code" in refused
    assert named == ["AutoConfig", "AutoModel", "AutoModelForCausalLM"]
    there = torch.load(tmp_path / "out.pt", weights_only=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        assert torch.equal(there["logits"], net(there["ids"]).logits)
        assert torch.equal(there["hidden"], net.model(there["ids"]).last_hidden_state)
    torch.set_num_threads(threads)
    assert there["ids"][0].tolist() == tiny_chat.prompt([{"role": "user", "content": "Which way?"}])
    assert len(there["told"]) > 0
    checkpoint.verify(final)


@pytest.mark.parametrize("tuning", ["lora", "qlora"])
def test_an_adapter_is_merged_and_kept_beside(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, tuning: str
) -> None:
    peft = pytest.importorskip("peft")
    if tuning == "qlora":
        pytest.importorskip("bitsandbytes")
    base = tiny_base(tmp_path / "base", tiny_tokenizer, width=64)  # 4-bit blocks are 64 wide
    section = ModelSection(name_or_path=str(base), tuning=tuning)  # type: ignore[arg-type]
    net, chat = models.load(section, device="cpu", chat_template=None)
    net = peft.get_peft_model(net, models.peft_config(section, net, chat))
    for name, weight in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    expected = logits(net)
    folder = models.save(tmp_path / "final", net, chat, {}, source=section, phase="phase1")
    merged, _ = load(folder)
    assert type(merged) is LlamaForCausalLM
    assert (logits(merged) - expected).abs().max() < (1e-4 if tuning == "lora" else 0.5)  # 4 bits round the base
    checkpoint.verify(tmp_path / "adapter")
    whole = peft.PeftModel.from_pretrained(load(base)[0], str(tmp_path / "adapter"))
    assert (logits(merged) - logits(whole)).abs().max() < 1e-4


def test_gradients_through_4_bit_weights_are_right_even_after_an_evaluation(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Compared with the same model in which the 4-bit weights stand written out in float32."""
    peft = pytest.importorskip("peft")
    bnb = pytest.importorskip("bitsandbytes")
    base = tiny_base(tmp_path / "base", tiny_tokenizer, width=64)
    section = ModelSection(name_or_path=str(base), tuning="qlora")
    small, _ = models.load(section, device="cpu", chat_template=None)
    large, _ = load(base)
    written_out = dict(large.named_modules())
    for name, layer in small.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            packed: Any = layer.weight
            weight = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
            written_out[name].weight.data = weight.float()
    gradients = []
    for net in (small, large):
        torch.manual_seed(0)
        net = peft.get_peft_model(net, models.peft_config(section))
        draw = torch.Generator().manual_seed(1)
        for name, weight in net.named_parameters():
            if "lora_" in name:
                weight.data = 0.05 * torch.randn(weight.shape, generator=draw)
        logits(net)  # an evaluation in between
        ids = torch.arange(3, 43).reshape(2, 20)
        net.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in net.parameters() if weight.grad is not None]))
    assert gradients[0].shape == gradients[1].shape
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[1].norm()


# ----------------------------------------------------------------------------------------------- what is no checkpoint


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(UP), rf"1 missing: {UP}\. "),
        (lambda t: t.update(extra=torch.zeros(2)), r"1 without a place in the model: extra\. "),
        (lambda t: t.update({UP: torch.zeros(3, 32)}), rf"1 of another shape: {UP} \(\[3, 32\] instead of \[64, 32"),
        (lambda t: t[UP][3, 4].fill_(torch.nan), f"not finite numbers: {UP}"),
        (lambda t: t["model.embed_tokens.weight"][7].fill_(torch.inf), "not finite numbers: .*embed_tokens"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    copied: Path, capfd: pytest.CaptureFixture[str], change: Any, words: str
) -> None:
    """transformers would make random numbers of what is missing, print a table and go on."""
    retensor(copied, change)
    with pytest.raises(UserError, match=words) as error:
        load(copied)
    assert "\n" not in str(error.value) and capfd.readouterr() == ("", "")


def test_tied_weights_that_are_stored_once_are_not_missing(base: Path, tmp_path: Path) -> None:
    """Neither is the output layer of a bare decoder whose embeddings it is tied to; untied, it is."""
    bare = LlamaForCausalLM.from_pretrained(base).model
    bare.save_pretrained(tmp_path / "bare")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / file, tmp_path / "bare")
    assert not any("lm_head" in name for name in load_file(tmp_path / "bare" / "model.safetensors"))
    assert torch.equal(logits(load(tmp_path / "bare")[0]), logits(load(base)[0]))
    edit(tmp_path / "bare" / "config.json", tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"1 missing: lm_head\.weight"):
        load(tmp_path / "bare")


@pytest.mark.parametrize("mark", ["run_config.yaml", "counts.json", "state.json"])
def test_a_folder_of_a_phase_that_has_lost_its_manifest_is_refused(base: Path, tmp_path: Path, mark: str) -> None:
    """Even its weights might have changed. A model from elsewhere has no manifest, and loads."""
    net, chat = load(base)
    final = models.save(tmp_path / "final", net, chat, {}, source=ModelSection(name_or_path=str(base)), phase="phase1")
    (final / "run_config.yaml").rename(final / mark)
    (final / "manifest.json").unlink()
    retensor(final, lambda tensors: tensors[UP].neg_())
    words = rf"final was written by a phase \(it contains {mark}\), but its manifest.json is missing"
    with pytest.raises(UserError, match=words):
        preflight.check_run(run_config(tmp_path, final))
    with pytest.raises(UserError, match=words):
        load(final)
    (final / mark).unlink()
    load(final)


@pytest.mark.parametrize(
    "shape", [{"num_hidden_layers": 10**9}, {"hidden_size": 10**60}, {"num_attention_heads": 10**9}], ids=str
)
def test_a_convgpt_of_any_size_is_refused_at_once(tmp_path: Path, tiny_chat: Chat, shape: dict[str, int]) -> None:
    """Its config makes a list of its layers, and looks for the nearest width that would do."""
    tiny_convgpt(tied=True).save_pretrained(tmp_path)
    tiny_chat.tokenizer.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **shape)
    with pytest.raises(UserError, match=rf"config\.json is damaged: {next(iter(shape))} is 1,000,"):
        load(tmp_path)


def doubling(*, regex: bool = False) -> dict[str, Any]:
    pattern = {"Regex": "a+"} if regex else {"String": "a"}
    return {"type": "Replace", "pattern": pattern, "content": "aa"}


PUTS = {"SpecialToken": {"id": "x", "type_id": 0}}


@pytest.mark.parametrize(
    ("key", "rules", "words"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [doubling()] * 40}, r"normalizer .* 1\.1e\+12 letters of"),
        ("normalizer", {"type": "Sequence", "normalizers": [doubling(regex=True)] * 40}, "normalizer .* letters of"),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}, r"normalizer .* 1e\+06 letters of one"),
        ("decoder", {"type": "Sequence", "decoders": [doubling()] * 40}, "decoder .* letters of one"),
        (
            "post_processor",
            {
                "type": "TemplateProcessing", "single": [PUTS] * 1000, "pair": [],
                "special_tokens": {"x": {"id": "x", "ids": [5] * 1000, "tokens": ["x"] * 1000}},
            },
            "puts 1,000,000 tokens around every text",
        ),
        ("normalizer", {"type": "Replace", "pattern": 3}, "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_makes_much_of_little_is_refused(
    copied: Path, key: str, rules: dict[str, Any], words: str
) -> None:
    edit(copied / "tokenizer.json", **{key: rules})
    with pytest.raises(UserError, match=words):
        load(copied)


def test_rules_of_common_tokenizers_are_taken(copied: Path) -> None:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    llama = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces, runs, {"type": "NFC"}],
    }
    edit(copied / "tokenizer.json", normalizer=llama)
    load(copied)


def test_a_pattern_that_fails_on_a_text_is_told_in_words(base: Path, copied: Path) -> None:
    """When the text comes: the library gives up after so many ways to match, with a panic."""
    splits = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    edit(copied / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [splits, bytes_]})
    chat = models.load_chat(ModelSection(name_or_path=str(copied)), None)
    text = "a" * 30 + "!"
    for use in (chat.content_ids, lambda text: chat.encode([{"role": "user", "content": text}])):
        with pytest.raises(UserError, match=r"The tokenizer fails on a text \(PanicException: .*retry-limit"):
            use(text)
    assert chat.content_ids("Go on")


def adapter_beside(base: Path, folder: Path) -> Path:
    """folder/adapter, of peft alone."""
    from peft import get_peft_model

    section = ModelSection(name_or_path=str(base), tuning="lora")
    net, chat = models.load(section, device="cpu", chat_template=None)
    get_peft_model(net, models.peft_config(section, net, chat)).save_pretrained(folder / "adapter")  # type: ignore[arg-type]
    return folder / "adapter"


def test_an_adapter_is_no_model(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even beside a whole model, in whose place transformers would load the base model that the adapter names."""
    adapter = adapter_beside(base, tmp_path)
    with pytest.raises(UserError, match=rf"adapter is an adapter: .* Merge it into its base model \({base}\)"):
        preflight.check_run(run_config(tmp_path, adapter))
    teacher = ModelSection(name_or_path=str(adapter))
    with pytest.raises(UserError, match=rf"^distillation\.teacher={adapter} is an adapter: "):
        model_files.check_source(teacher, "distillation.teacher")
    shutil.copytree(base, tmp_path / "final")
    with pytest.raises(UserError, match=rf"Name the folder in which it is merged: {tmp_path}/final\.$"):
        preflight.check_run(run_config(tmp_path, adapter))
    with pytest.raises(UserError, match=rf"is a run's folder. Name its result: {tmp_path}/final\.$"):
        preflight.check_run(run_config(tmp_path, tmp_path))
    both = tmp_path / "both"
    shutil.copytree(base, both)
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    edit(both / "adapter_config.json", base_model_name_or_path="somebody/else")
    (tmp_path / "final").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"base model \(somebody/else\) with peft.* remove the adapter's files\.$"):
        load(both)

    cached = tmp_path / "cache" / "models--who--what"
    shutil.copytree(both, cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    with pytest.raises(UserError, match=r"^model.name_or_path=who/what is an adapter: .*somebody/else"):
        load("who/what")


def test_a_gguf_file_is_named_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "a model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"is a file\. .*`posttrain gguf '.*/a model\.gguf' FOLDER`"):
        load(file)


def own_output_layer(folder: Path, kind: str = "llama") -> Path:
    """A model whose config.json ties the output layer to the embedding, while the file holds another output layer."""
    net: Any
    torch.manual_seed(2)
    if kind == "convgpt":
        net = tiny_convgpt(tied=True)
    else:
        config = LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=True, dtype="float32",
        )  # fmt: skip
        net = LlamaForCausalLM(config)
    net.save_pretrained(folder)
    byte_level_tokenizer(chatml=False).save_pretrained(folder)
    embedding = "model.embed_tokens.weight"
    retensor(folder, lambda tensors: tensors.update({"lm_head.weight": torch.randn_like(tensors[embedding])}))
    return folder


@pytest.mark.parametrize("tuning", ["full", "lora", "qlora"])
def test_an_output_layer_of_its_own_is_kept_and_the_config_says_so(tmp_path: Path, tuning: str) -> None:
    """Also after rows are added, which ties what the config calls tied."""
    peft = pytest.importorskip("peft")
    if tuning == "qlora":
        pytest.importorskip("bitsandbytes")
    base = own_output_layer(tmp_path / "base")
    own = load_file(base / "model.safetensors")["lm_head.weight"]
    section = ModelSection(name_or_path=str(base), tuning=tuning)  # type: ignore[arg-type]
    net, chat = models.load(section, device="cpu", chat_template=None)
    assert chat.added_tokens == 2
    if tuning != "full":
        net = peft.get_peft_model(net, models.peft_config(section, net, chat))
    final = models.save(tmp_path / "final", net, chat, {}, source=section, phase="phase1")
    assert json.loads((final / "config.json").read_text())["tie_word_embeddings"] is False
    saved = load_file(final / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"][:512], own) and saved["lm_head.weight"].shape == (514, 64)
    assert not torch.equal(saved["model.embed_tokens.weight"][:512], own)
    assert (
        {json.loads((final / "config.json").read_text())["dtype"]}
        == {"float32"}
        == {str(tensor.dtype).removeprefix("torch.") for tensor in saved.values()}
    )


def test_tied_weights_that_are_stored_twice_stay_tied(tmp_path: Path) -> None:
    folder = own_output_layer(tmp_path / "base")
    retensor(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    net, _ = load(folder)
    assert net.config.tie_word_embeddings and net.lm_head.weight is net.model.embed_tokens.weight


def test_an_output_layer_that_the_architecture_has_no_place_for_is_refused(tmp_path: Path) -> None:
    """A ConvGPT scales its states up for tied embeddings alone."""
    with pytest.raises(UserError, match=r"another output layer, for which ConvGPTForCausalLM has no place"):
        load(own_output_layer(tmp_path, "convgpt"))


@pytest.mark.parametrize("chatml", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("asked", [["q_proj", "lm_head"], ["q_proj", "embed_tokens"], r".*(q_proj|lm_head)"])
def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path, asked: Any, tied: bool, chatml: bool) -> None:
    """Merged into weights that two layers share it would change both; everywhere else it gives the same model."""
    from peft import get_peft_model

    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    byte_level_tokenizer(chatml=chatml).save_pretrained(tmp_path / "base")
    section = ModelSection.model_validate(
        {"name_or_path": str(tmp_path / "base"), "tuning": "lora", "lora": {"target_modules": asked}}
    )
    net, chat = models.load(section, device="cpu", chat_template=None)
    if tied or not chatml:
        words = "the output layer is the embedding" if tied else "rows of tokens that the chat template adds"
        with pytest.raises(UserError, match=rf"puts an adapter on (lm_head|model\.embed_tokens), but {words}"):
            models.peft_config(section, net, chat)
        return
    net = get_peft_model(net, models.peft_config(section, net, chat))  # type: ignore[arg-type]
    for weight in net.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    expected = logits(net)
    final = models.save(tmp_path / "final", net, chat, {}, source=section, phase="phase1")
    assert (logits(load(final)[0]) - expected).abs().max() < 1e-4


def test_other_weights_that_lie_beside_are_not_looked_at(base: Path, copied: Path, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(32)}, copied / "model_zz.safetensors")
    (copied / "consolidated.safetensors").write_bytes(b"no weights at all")
    assert torch.equal(logits(load(copied)[0]), logits(load(base)[0]))
    preflight.check_run(run_config(tmp_path, copied))


def test_weights_that_only_somebody_else_may_read(base: Path) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folder is closed to other users
        os.chmod(place, 0o755)
        folder = Path(place) / "model"
        shutil.copytree(base, folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        folder.chmod(0o755)
        for secret in ("model.safetensors", "config.json"):
            (folder / secret).chmod(0)
            with not_root(), pytest.raises(UserError, match=f"cannot be read: .*{secret} .*chmod"):
                load(folder)
            (folder / secret).chmod(0o644)
        with not_root():
            needed = (ROOT / "posttrain" / "models" / "chatml.jinja", sys.executable)
            if all(os.access(file, os.R_OK, effective_ids=True) for file in needed):  # root's own home is closed
                load(folder)


UNFIT = "cannot be loaded|can be loaded|is damaged|is no JSON|should hold"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), UNFIT),
        (lambda f: (f / "config.json").write_text('{"model_type": "no_such_thing"}'), UNFIT),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"no \.safetensors"),  # a pickle
        (lambda f: (f / "model.safetensors").write_bytes(b"garbage" * 100), "can be loaded"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), UNFIT),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), UNFIT),
        (lambda f: edit(f / "config.json", hidden_size="wide"), "can be loaded"),
        (lambda f: edit(f / "config.json", num_attention_heads=0), "can be loaded"),
        (lambda f: edit(f / "config.json", rms_norm_eps="x"), "TypeError"),
        (lambda f: edit(f / "config.json", max_position_embeddings="many"), "max_position_embeddings"),
        (lambda f: edit(f / "config.json", return_dict=False), "does not run|is not a checkpoint"),
        (lambda f: edit(f / "config.json", num_labels=10**9), "num_labels is 1,000,000,000"),
        (
            lambda f: edit(f / "config.json", num_hidden_layers=10**9),
            "num_hidden_layers is 1,000,000,000, and no model has more than 100,000",
        ),
        (lambda f: edit(f / "config.json", num_hidden_layers=1e9), r"num_hidden_layers is 1,000,000,000\.0, and"),
        (lambda f: edit(f / "config.json", text_config={"n_layer": 10**9}), "n_layer is 1,000,000,000, and"),
        (lambda f: edit(f / "config.json", hidden_size=10**300), "hidden_size is 1,000,[,0]*, and"),
        (lambda f: edit(f / "config.json", vocab_size=10**12), "vocab_size is 1,000,000,000,000, and"),
        (lambda f: edit(f / "config.json", intermediate_size=30_000), "describes .* but the weight files hold"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "tokenizer of"),
        (lambda f: (f / "tokenizer.json").write_text("[" * 5000), "tokenizer.json is damaged"),
    ],
)
def test_a_folder_that_is_no_checkpoint(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, harm: Any, words: str
) -> None:
    folder = tiny_base(tmp_path / "base", tiny_tokenizer)
    harm(folder)
    with pytest.raises(UserError, match=words):
        load(folder)


@pytest.mark.parametrize("number", [600, 2**31])  # the embedding has 512 rows
def test_a_token_without_an_embedding_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, number: int
) -> None:
    folder = tiny_base(tmp_path / "base", tiny_tokenizer)
    settings = json.loads((folder / "tokenizer.json").read_text())
    token = max(settings["model"]["vocab"], key=len)
    settings["model"]["vocab"][token] = number
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"does not fit the model: token .* has the number {number}"):
        load(folder)


def test_a_file_and_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(UserError, match="is a file"):
        load(tmp_path / "x.txt")
    with pytest.raises(UserError, match="previous phase"):
        load(tmp_path / "phase1" / "final")
    with pytest.raises(UserError, match="previous phase"):
        load("runs/nothing-here/final")


def test_a_damaged_handover_is_refused(base: Path, tmp_path: Path) -> None:
    folder = models.save(tmp_path / "final", *load(base), {}, source=ModelSection(name_or_path=str(base)))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match="damaged"):
        load(folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text()[:-40])
    with pytest.raises(UserError, match=r"final is damaged: chat_template\.jinja has"):
        models.load_chat(ModelSection(name_or_path=str(folder)), None)


def test_another_template_than_the_previous_phase_is_refused(base: Path, tmp_path: Path) -> None:
    net, chat = load(base)
    section = ModelSection(name_or_path=str(base))
    folder = models.save(tmp_path / "final", net, chat, {}, source=section, phase="phase1")
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE_PATH.read_text() + "{# mine #}")
    with pytest.raises(UserError, match="another chat template"):
        models.load(ModelSection(name_or_path=str(folder)), device="cpu", chat_template=str(other))
    checkpoint.seal(folder, phase="base", chat_template_sha256=chat.hash)  # a base model binds nobody
    models.load(ModelSection(name_or_path=str(folder)), device="cpu", chat_template=str(other))


def test_remote_code_needs_a_pinned_revision() -> None:
    section = ModelSection.model_construct(name_or_path="some/model", revision="main", trust_remote_code=True)
    with pytest.raises(UserError, match="40-digit commit"):
        models.load(section, device="cpu", chat_template=None)


# ------------------------------------------------------------------------------------------------------- the preflight


def run_config(tmp_path: Path, base: Path, *overrides: str) -> SFTRun:
    file = settings(tmp_path / "sft.yaml", "messages", base, conversations(tmp_path / "rows.jsonl"))
    return config.resolve(SFTRun, file, list(overrides))


def starpo_config(base: Path) -> StarPORun:
    given = {"output_dir": "x", "device": "cpu", "model": {"name_or_path": str(base)}, "envs": ["frozen_lake"]}
    return StarPORun.model_validate(given)


def test_preflight_passes_and_writes_nothing(tmp_path: Path, base: Path) -> None:
    preflight.check_run(run_config(tmp_path, base))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "sft.yaml"]


def test_preflight_says_everything_at_once(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    cfg = run_config(tmp_path, base, "device=cuda", f"data.sources.0.path={tmp_path}/none.jsonl")
    with pytest.raises(UserError) as error:
        preflight.check_run(cfg)
    text = str(error.value)
    for words in ("4 reasons", "no CUDA GPU", "none.jsonl", "Too little disk space", "already holds a run"):
        assert words in text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_the_size_of_a_model_on_the_hub_is_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(safetensors=SimpleNamespace(total=163_952_769))
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: told)
    assert preflight._parameters(ModelSection(name_or_path="no/such-model")) == 163_952_769


def test_preflight_without_a_network_names_all_it_would_need(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(HfApi, "repo_info", unreachable)
    cfg = run_config(tmp_path, base, "model.name_or_path=no/such-model", "data.sources.0.path=no/such-data")
    with pytest.raises(UserError) as error:
        preflight.check_run(cfg)
    text = str(error.value)
    for words in ("cannot be reached", "model no/such-model", "dataset no/such-data", "make quickstart", "hf download"):
        assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.bf16=true", "has no bfloat16 in hardware"),
        ("model.name_or_path=runs/none/final", "previous phase"),
        ("model.attn_implementation=flex_attention", "no backward pass without an NVIDIA GPU"),
    ],
)
def test_preflight_refuses(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", frozenset)
    with pytest.raises(UserError, match=words):
        preflight.check_run(run_config(tmp_path, base, override))


# ------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("flags", "there"),
    [("fpu avx2 avx512f", False), ("avx512f avx512_bf16", True), ("amx_tile amx_bf16", True), ("", False)],
)
def test_bf16_is_derived_from_the_cpu(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, flags: str, there: bool
) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    cpu = torch.device("cpu")
    assert hardware.has_bf16(cpu) is there
    for cfg in (run_config(tmp_path, base, "trainer.bf16=null"), starpo_config(base)):
        settled = hardware.settle(cfg)
        assert hardware.trainer_field(settled, "bf16") is there and hardware.settle(settled) is settled
        assert hardware.trainer_field(cfg, "bf16") is None  # the config itself is left alone
    assert hardware.settle(run_config(tmp_path, base, "trainer.bf16=false")).trainer["bf16"] is False
    section = ModelSection(name_or_path=str(base))
    for training, dtype in ((True, torch.float32), (False, torch.bfloat16 if there else torch.float32)):
        net, _ = models.load(section, device="cpu", chat_template=None, training=training)
        assert net.dtype == dtype
    preflight.check_run(run_config(tmp_path, base, f"trainer.bf16={there}"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not hardware.has_bf16(cpu)


def test_the_flags_of_this_cpu_are_those_that_torch_finds() -> None:
    told = getattr(torch.cpu, "get_capabilities", dict)()
    for flag in ("avx2", "avx512_bf16", "amx_bf16"):
        if flag in told and hardware._cpu_flags():
            assert (flag in hardware._cpu_flags()) == told[flag]


def test_a_bf16_checkpoint_is_trained_in_float32(tmp_path: Path, base: Path) -> None:
    net, chat = load(base)
    net.bfloat16().save_pretrained(tmp_path / "half")
    chat.save(tmp_path / "half")
    for tuning in ("full", "lora"):
        section = ModelSection.model_validate({"name_or_path": str(tmp_path / "half"), "tuning": tuning})
        net, _ = models.load(section, device="cpu", chat_template=None)
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_weights_that_are_not_finite_are_neither_loaded_nor_saved(tmp_path: Path, base: Path) -> None:
    """One row of the embedding, of a token that nobody may ever write."""
    net, chat = load(base)
    with torch.no_grad():
        net.get_input_embeddings().weight[3] = torch.nan
    section = ModelSection(name_or_path=str(base))
    with pytest.raises(UserError, match=r"final is not written.*embed_tokens.weight \(\d+ of \d+\)"):
        models.save(tmp_path / "run" / "final", net, chat, {}, source=section, phase="phase1")
    assert not (tmp_path / "run" / "final").exists()
    net.save_pretrained(tmp_path / "broken")
    chat.save(tmp_path / "broken")
    for training in (True, False):
        with pytest.raises(UserError, match=r"broken holds weights that are not finite.*embed_tokens.weight"):
            models.load(
                ModelSection(name_or_path=str(tmp_path / "broken")), device="cpu", chat_template=None, training=training
            )


def test_an_adapter_that_is_not_finite_is_not_saved(tmp_path: Path, base: Path) -> None:
    from peft import get_peft_model

    section = ModelSection(name_or_path=str(base), tuning="lora")
    net, chat = load(base)
    lora: Any = models.peft_config(section)
    adapted: Any = get_peft_model(net, lora)
    with torch.no_grad():
        next(p for name, p in adapted.named_parameters() if "lora_A" in name).fill_(torch.inf)
    with pytest.raises(UserError, match=r"final is not written.*lora_A"):
        models.save(tmp_path / "run" / "final", adapted, chat, {}, source=section, phase="phase1")
    assert not (tmp_path / "run").exists()


def test_an_adapter_on_half_precision_weights_is_merged_in_float32(tmp_path: Path, base: Path) -> None:
    from peft import get_peft_model

    section = ModelSection(name_or_path=str(base), tuning="lora", dtype="bfloat16")
    net, chat = models.load(section, device="cpu", chat_template=None)
    assert net.dtype == torch.bfloat16
    lora: Any = models.peft_config(section)
    adapted: Any = get_peft_model(net, lora)
    models.adapters_in_float32(adapted)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and {p.dtype for p in trained.values()} == {torch.float32}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.fill_(1e-3)  # r x 1e-6 x alpha / r: far less than a bfloat16 weight can take
    folder = models.save(tmp_path / "run" / "final", adapted, chat, {}, source=section, phase="phase1")
    merged, before = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, base))
    name = "model.layers.0.mlp.up_proj.weight"
    moved = merged.state_dict()[name] - before.state_dict()[name]
    rank, alpha = section.lora.r, section.lora.alpha
    assert torch.allclose(moved, torch.full_like(moved, rank * 1e-6 * alpha / rank), rtol=0.02)


@pytest.mark.parametrize("override", ["trainer.optim=adamw_8bit", "model.tuning=qlora"])
def test_preflight_without_bitsandbytes(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if "bits" in name else find(name, *a))
    with pytest.raises(UserError, match=r"pip install bitsandbytes.*adamw_torch"):
        preflight.check_run(run_config(tmp_path, base, override))


def test_preflight_refuses_another_template(tmp_path: Path, base: Path) -> None:
    net, chat = load(base)
    section = ModelSection(name_or_path=str(base))
    folder = models.save(tmp_path / "before" / "final", net, chat, {}, source=section, phase="phase1")
    (tmp_path / "other.jinja").write_text(TEMPLATE_PATH.read_text() + "{# mine #}")
    cfg = run_config(tmp_path, base, f"model.name_or_path={folder}", f"chat.template={tmp_path}/other.jinja")
    with pytest.raises(UserError, match="another chat template"):
        preflight.check_run(cfg)
