"""Does check_model say of a model what the scripts then do with it?"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import model_families
import pytest
import torch
import yaml
from model_families import FAMILIES, GEMMA2
from tiny_runs import ROOT, called, conversations, settings
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train_phase1_sft as phase1
import train_phase3_starpo as phase3
from posttrain import config
from posttrain.config.sft import SFTRun
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun
from posttrain.models import loading as models, model_files
from posttrain.models.chat import TEMPLATE_PATH, Chat, template_hash
from posttrain.plan import check_model, preflight, selftest
from posttrain.plan.shape import Shape
from posttrain.rollout.engine import open_engine
from posttrain.runtime import checkpoint
from posttrain.types import UserError

FILE = str(ROOT / "configs" / "phase3_starpo.yaml")
OURS = "chat.template=chatml"
WINDOWS = {"KV cache": ("slower", "engine=replay"), "shared prefixes": ("slower", "reads the prompt again")}
ODD: dict[str, dict[str, tuple[str, str]]] = {  # what is not simply ok: subject -> mark, words
    "llama": {"chat template": ("ok", "today's date")},
    "qwen2.5": {"chat template": ("ok", "the model's own"), "tied heads": ("ok", "is the embedding")},
    "qwen3": {
        "chat template": ("does not work", "removes the thoughts of earlier answers"),
        "tied heads": ("ok", "not"),
    },
    "gemma3": {**WINDOWS, "stop token": ("ok", "<end_of_turn> (513) ends an answer, as in the model")},
    "smollm3": {"chat template": ("ok", "today's date")},
    "phi": {"chat template": ("ok", "2 tokens are added"), "LoRA": ("ok", "dense, fc1, fc2")},
    "phi3": {"chat template": ("does not work", "writes earlier turns differently once later ones follow"), **WINDOWS},
    "gpt2": {"stop token": ("ok", "phase 1 must teach it"), "LoRA": ("ok", "c_attn, c_fc, c_proj; not the output")},
    "mamba": {
        "attention": ("does not work", "model.attn_implementation=eager"),
        "LoRA": ("ok", "model.lora.target_modules=[in_proj,x_proj]"),
        "longest context": ("ok", "has no limit"),
        **WINDOWS,
    },
}
REMEDIES = {
    "qwen3": [OURS],
    "phi3": [f"chat.template={ROOT}/configs/models/phi-4-mini.jinja"],
    "mamba": ["model.attn_implementation=eager"],
}


def lines(folder: Path | str, *overrides: str, file: str = FILE) -> dict[str, check_model.Line]:
    fixed = ["device=cpu", f"model.name_or_path={folder}", "rollout.max_context=1024"]
    fixed = fixed if file == FILE else fixed[:2]
    cfg = config.resolve(check_model.schema_of(file), file, [*fixed, *overrides])
    return {line.subject: line for line in check_model.check(cfg)}


def marks(found: dict[str, check_model.Line], mark: str) -> set[str]:
    return {subject for subject, line in found.items() if line.mark == mark}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_said_of_each_family(tmp_path: Path, name: str) -> None:
    found = lines(model_families.write(tmp_path, name))
    for subject, (mark, words) in ODD[name].items():
        assert found[subject].mark == mark and words in found[subject].words, found[subject]
    for mark in ("slower", "does not work"):
        assert marks(found, mark) == {subject for subject, (each, _) in ODD[name].items() if each == mark}
    assert {"assistant mask", "history", "system messages", "padding on the left", "memory plan"} <= marks(found, "ok")
    if name in REMEDIES:
        assert not marks(lines(tmp_path, *REMEDIES[name]), "does not work")


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_scripts_do_what_is_said(tmp_path: Path, name: str, tuning: str) -> None:
    """A step of phase 1 and a step of phase 3; without the remedy both refuse in the same words."""
    folder = model_families.write(tmp_path / "model", name)
    sft = settings(
        tmp_path / "sft.yaml", "messages", folder, conversations(tmp_path / "rows.jsonl", 24), max_steps=1, save_steps=1
    )
    played: dict[str, Any] = {
        "output_dir": str(tmp_path / "phase3"),
        "device": "cpu",
        "report_to": "none",
        "model": {"name_or_path": str(folder)},
        "envs": [{"name": "frozen_lake", "options": {"size": 3}}],
        "protocol": {"max_turns": 2, "max_actions": 2},
        "rollout": {"groups": 2, "num_generations": 2, "max_completion_length": 8, "max_context": 1024},
        "algorithm": {"filter": {"keep_zero": True}},
        "trainer": {"max_steps": 1, "learning_rate": 1e-3, "micro_batch_tokens": 2048, "bf16": False},
        "evaluation": {"every": 1, "episodes": 2, "final_episodes": 2},
    }
    starpo = tmp_path / "starpo.yaml"
    starpo.write_text(yaml.safe_dump(played))
    both = [(sft, phase1.main), (starpo, phase3.main)]
    more = [f"model.tuning={tuning}"]
    for file, run in both if (name, tuning) != ("mamba", "lora") else []:  # below
        said = lines(folder, *more, file=str(file))
        for subject in marks(said, "does not work"):
            with pytest.raises(UserError) as refused:
                run(["--config", str(file), *more])
            assert said[subject].words.startswith(str(refused.value))
    more += REMEDIES.get(name, [])
    if tuning == "lora" and name == "mamba":
        for file, run in both:
            assert "[in_proj,x_proj]" in lines(folder, *more, file=str(file))["LoRA"].words
            with pytest.raises(UserError, match="out_proj"):
                run(["--config", str(file), f"output_dir={tmp_path}/refused-{file.stem}", *more])
        more.append("model.lora.target_modules=[in_proj,x_proj]")
    for file, run in both:
        said = lines(folder, *more, file=str(file))
        assert not marks(said, "does not work")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run(["--config", str(file), *more])
        if file == starpo:
            replays = any("replays its history" in str(each.message) for each in warned)
            assert replays == (said["KV cache"].mark == "slower")
    chat = models.load_chat(ModelSection(name_or_path=str(tmp_path / "phase3" / "final")), None)
    rows = [json.loads(row) for row in (tmp_path / "phase3" / "metrics.jsonl").read_text().splitlines()]
    (gap,) = [row["policy/sampler_gap"] for row in rows if "policy/sampler_gap" in row]
    assert gap < 1e-4  # it learns from the log-probs that it sampled with
    assert str(chat.tokenizer.convert_ids_to_tokens(chat.stop_id)) in said["stop token"].words
    assert checkpoint.verify(tmp_path / "run" / "final") and checkpoint.verify(tmp_path / "phase3" / "final")


@pytest.mark.thorough
def test_what_a_conversation_starts_with(tmp_path: Path) -> None:
    folder = model_families.write(tmp_path, "gpt2")
    words = lines(folder)["start of text"].words
    assert words == "the tokenizer puts no token before plain text, and none is added"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    start = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = start
    tokenizer.save_pretrained(folder)
    found = lines(folder)
    puts = "the tokenizer puts <|endoftext|> (0) before plain text"
    assert found["start of text"].words == f"{puts}; the template lacked them, so they were added to it"
    assert "the model has none, so" in found["chat template"].words and not marks(found, "does not work")

    checkpoint.seal(folder, phase="phase1", chat_template_sha256=template_hash(TEMPLATE_PATH.read_text()))
    words = lines(folder)["start of text"].words
    assert words == f"{puts}, but an earlier phase was trained without them, so they are not added"
    some = "{% if messages[0].role == 'system' %}{{ bos_token }}{% endif %}"
    (folder / "chat_template.jinja").write_text(some + TEMPLATE_PATH.read_text())
    checkpoint.seal(folder, phase="base")
    words = lines(folder)["start of text"].words
    assert words == f"{puts}, but the template writes them only in some dialogues, and is not changed"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE_PATH.read_text())
    checkpoint.seal(folder, phase="base")
    assert lines(folder)["start of text"].words == f"{puts}, and the template writes them"


def test_a_template_without_system_messages(tmp_path: Path) -> None:
    folder = model_families.write(tmp_path, "gemma3")
    (tmp_path / "chat_template.jinja").write_text(GEMMA2)
    found = lines(folder)
    assert marks(found, "does not work") == {"system messages"}
    assert "no system role" in found["system messages"].words and OURS in found["system messages"].words


def test_logits_that_are_more_than_a_plain_product(tmp_path: Path) -> None:
    found = lines(model_families.write(tmp_path, "gemma3", final_logit_softcapping=30.0))
    assert found["output layer"] == ("ok", "output layer", "logits soft-capped at 30")


def test_positions_that_are_learnt_are_the_limit(tmp_path: Path) -> None:
    """GPT-2 cannot read on; a rotation can, beyond what it was trained on."""
    gpt2 = model_families.write(tmp_path / "gpt2", "gpt2", max_position_embeddings=None, n_positions=64)
    llama = model_families.write(tmp_path / "llama", "llama", max_position_embeddings=64)
    words = r"rollout\.max_context=1024, but .* has an embedding for each of 64 positions"
    changes = ["device=cpu", f"model.name_or_path={gpt2}", "distillation=null", "rollout.max_context=1024"]
    cfg = config.resolve(StarPORun, FILE, changes)
    with pytest.raises(UserError, match=words) as refused:
        preflight.check_run(cfg)
    assert str(refused.value) == lines(gpt2)["longest context"].words
    assert marks(lines(gpt2), "does not work") == {"longest context"}
    assert lines(llama)["longest context"][::2] == (
        "ok", "64 tokens; rollout.max_context is 1,024, more than the model was trained on"
    )  # fmt: skip
    assert "longest context" in marks(
        lines(gpt2, "distillation=null", "rollout.max_context=64", "rollout.max_completion_length=8"), "ok"
    )
    data = conversations(tmp_path / "rows.jsonl", 4)
    sft = settings(tmp_path / "sft.yaml", "messages", gpt2, data)
    with pytest.raises(UserError, match=r"data\.max_length=96, but"):
        preflight.check_run(config.resolve(SFTRun, sft))
    assert model_files.learned_positions(AutoConfig.for_model("opt", max_position_embeddings=32)) == 32


@pytest.mark.thorough
def test_an_architecture_that_no_engine_samples_is_refused(tmp_path: Path) -> None:
    """RWKV's recurrence reads padding as text: replayed rows would have other probabilities than the learner sees."""
    folder = model_families.write(tmp_path / "llama", "llama")
    sizes = {"vocab_size": 544, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", **sizes, context_length=64))
    with torch.no_grad():
        for weight in net.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    for engine in ("auto", "replay"):
        with pytest.raises(
            UserError, match="RwkvForCausalLM cannot be sampled by replaying its history: in left-padded"
        ):
            open_engine(net, [2], 0, engine)
    net.save_pretrained(folder)
    found = lines(folder, "model.attn_implementation=eager")
    assert found["padding on the left"].mark == "does not work"
    assert found["KV cache"].mark == "slower"


def test_an_adapter_on_the_output_layer(tmp_path: Path) -> None:
    folder = model_families.write(tmp_path, "qwen3")
    more = ["model.tuning=lora", "model.lora.target_modules=[q_proj, lm_head]", OURS]
    found = lines(folder, *more)
    assert marks(found, "does not work") == {"LoRA"} and "leave it out" in found["LoRA"].words
    assert "LoRA" in marks(lines(folder, *more[1:]), "ok")


def test_a_model_is_left_as_it_was(tmp_path: Path, tiny_chat: Chat) -> None:
    folder = model_families.write(tmp_path, "mamba")
    section = ModelSection(name_or_path=str(folder), attn_implementation="eager", tuning="lora")
    net, chat = models.load(section, device="cpu", chat_template=None)
    before, names = (
        {name: weight.clone() for name, weight in net.state_dict().items()},
        [n for n, _ in net.named_modules()],
    )
    assert selftest.why_not_recomputed(net) == ""
    assert "out_proj" in selftest.adapter_of(section, net, chat)
    found = selftest.adapter_of(selftest.on(section, ["in_proj", "dt_proj"]), net, chat)
    assert found == (["dt_proj", "in_proj"], ["dt_proj"], False)  # whose weight is used without its layer
    assert selftest.change_beside_longer_rows(net, chat.pad_id) < 1e-3
    after = net.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert names == [name for name, _ in net.named_modules()]
    assert all(weight.requires_grad and weight.grad is None for weight in net.parameters())
    with pytest.raises(UserError, match="out_proj"):
        Shape.of(net.config, section)


def test_code_of_its_own_and_damage_are_told(tmp_path: Path) -> None:
    folder = model_families.write(tmp_path, "llama")
    content = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    assert [line.mark for line in lines(folder).values()] == ["ok", "does not work"]
    (folder / "model.safetensors").write_bytes(weights)
    own = {"model_type": "somebodys", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(content | own))
    (only,) = lines(folder).values()
    assert only.mark == "does not work" and "model.trust_remote_code=true and model.revision=<the 40" in only.words
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text("{}")
    assert list(lines(folder)) == ["architecture", "tokenizer, template"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{folder}"], 0, "It can be trained like this."),
        (["{folder}", "rollout.engine=slots", "--config", "{file}"], 0, "kept across turns"),
        (["{emoji}"], 0, "\N{ROCKET}, with the settings of"),
        (["{folder}", "chat.template={plain}"], 1, "It cannot be trained like this: 1 of these does not work."),
        (["{folder}/nowhere"], 2, "does not exist"),
        (["{folder}", "rollout.slot=3"], 2, "did you mean"),
        (["{folder}", "--config", "configs/chat.yaml"], 2, "not a config of phase 1, 2 or 3"),
        (["{folder}", "--config", "nowhere.yaml"], 2, "nowhere.yaml"),
    ],
)
def test_exit_codes(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    folder = model_families.write(tmp_path / "model", "llama")
    emoji = tmp_path / "\N{ROCKET}"
    emoji.symlink_to(folder)
    places = {"folder": folder, "emoji": emoji, "file": FILE, "plain": tmp_path / "plain.jinja"}
    done = called(check_model.main, *(word.format_map(places) for word in arguments))
    assert done.returncode == code and words in (done.stdout + done.stderr), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code != 2:
        assert all(line.startswith(("ok ", "slower ", "does not work ")) for line in done.stdout.splitlines()[1:-1])
