"""Is the merged model the average that was asked for, and is what cannot be averaged refused?"""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import model_families
import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_evaluate import evaluate, tiny_model
from tiny_runs import called
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import models
from posttrain.config import ModelSection
from posttrain.models import model_card
from posttrain.models.chat import Chat
from posttrain.runtime import checkpoint
from posttrain.serving.merge import average_tensors, main, merge_models
from posttrain.serving.publish.content import gather_content
from posttrain.types import UserError

WEIGHTS = "model.safetensors"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUICK = settings(max_examples=60, deadline=None)


def numbers(seed: int, dtype: torch.dtype = torch.float32, size: int = 257) -> torch.Tensor:
    """Random numbers of many sizes, with zeros of both signs among them."""
    from_seed = torch.Generator().manual_seed(seed)
    made = torch.randn(size, generator=from_seed) * 10 ** torch.randint(-6, 4, (size,), generator=from_seed)
    made[:2] = torch.tensor([0.0, -0.0])
    return made.to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# --------------------------------------------------------------------------------------------------------- properties

SEEDS, SHARES = st.integers(0, 2**32 - 1), st.floats(0, 1)


@QUICK
@given(SEEDS, st.sampled_from(DTYPES), st.sampled_from(["linear", "slerp"]))
def test_all_weight_on_one_model_gives_it_to_the_bit(seed: int, dtype: torch.dtype, method: str) -> None:
    one, other = numbers(seed, dtype), numbers(seed + 1, dtype)
    assert same_bits(average_tensors([one, other], [1.0, 0.0], method), one)
    assert same_bits(average_tensors([one, other], [0.0, 1.0], method), other)


@QUICK
@given(SEEDS, st.sampled_from(DTYPES), st.integers(2, 9))
def test_an_average_of_equal_models_is_the_model(seed: int, dtype: torch.dtype, count: int) -> None:
    one = numbers(seed, dtype)
    assert same_bits(average_tensors([one] * count, [1 / count] * count), one)
    assert same_bits(average_tensors([one, one.clone()], [0.3, 0.7], "slerp"), one)


@QUICK
@given(SEEDS, SHARES, st.sampled_from(["linear", "slerp"]))
def test_models_can_be_named_in_any_order(seed: int, share: float, method: str) -> None:
    one, other = numbers(seed), numbers(seed + 1)
    swapped = average_tensors([other, one], [1 - share, share], method)
    assert same_bits(average_tensors([one, other], [share, 1 - share], method), swapped)


@QUICK
@given(SEEDS, SHARES, st.floats(-6, 0))
def test_slerp_keeps_the_norm_of_tensors_of_equal_norm(seed: int, share: float, near: float) -> None:
    """From models that are nearly the same to those that have nothing in common."""
    one = numbers(seed).double()
    other = one / one.norm() + 10**near * torch.nn.functional.normalize(numbers(seed + 1).double(), dim=0)
    one, other = (each / each.norm() for each in (one, other))
    between = average_tensors([one, other], [1 - share, share], "slerp")
    assert between.norm() == pytest.approx(1, abs=1e-6)
    whole, part = (torch.dot(one, each).clamp(-1, 1).acos() for each in (other, between))
    assert part == pytest.approx(float(share * whole), abs=1e-3)


def test_the_formulas_by_hand() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert average_tensors([one, other], [0.25, 0.75]).tolist() == [0.25, 1.5]
    third = average_tensors([one, other], [2 / 3, 1 / 3], "slerp")  # 30 of 90 degrees, along tensors of norm 1 and 2
    torch.testing.assert_close(third, torch.tensor([math.cos(math.pi / 6), 2 * math.sin(math.pi / 6)]))
    for opposite in (-one, torch.zeros(2)):  # there is no single arc, or none
        assert average_tensors([one, opposite], [0.75, 0.25], "slerp").tolist() == [
            0.75 + 0.25 * float(opposite[0]),
            0.0,
        ]


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = numbers(0).reshape(257, 1), numbers(1).reshape(257, 1)
    whole = [average_tensors([one, other], [0.3, 0.7], method) for method in ("linear", "slerp")]
    monkeypatch.setattr("posttrain.serving.merge.BLOCK", 16)
    blocks = [average_tensors([one, other], [0.3, 0.7], method) for method in ("linear", "slerp")]
    assert whole[0].shape == (257, 1) and same_bits(whole[0], blocks[0])
    torch.testing.assert_close(whole[1], blocks[1])


# ------------------------------------------------------------------------------------------------------------ folders


def near(folder: Path, name: str, seed: int, base: Path | None = None) -> Path:
    """A model of a family that differs a little from `base`, or the base itself."""
    if base is None:
        return model_families.write(folder, name)
    net = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for each in net.parameters():
            each.add_(0.02 * torch.randn_like(each))
    net.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "phi"])
@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_every_tensor_is_an_average_and_tied_ones_stay_tied(name: str, method: str, tmp_path: Path) -> None:
    one = near(tmp_path / "one", name, 0)
    other = near(tmp_path / "other", name, 1, one)
    out = merge_models([one, other], tmp_path / "new" / "out", method, [1, 3])
    nets: list[Any] = [AutoModelForCausalLM.from_pretrained(each) for each in (one, other, out)]
    heads = [(net.get_output_embeddings().weight, net.get_input_embeddings().weight) for net in nets]
    assert len({head is embedding for head, embedding in heads}) == 1
    states = [net.state_dict() for net in nets]
    for key, tensor in states[2].items():
        expected = average_tensors([states[0][key], states[1][key]], [0.25, 0.75], method)
        assert torch.equal(tensor, expected), key
    kept = {each.name: each.read_bytes() for each in one.iterdir() if each.name != WEIGHTS}
    assert {each.name: each.read_bytes() for each in out.iterdir() if each.name in kept} == kept
    assert {each.name for each in out.iterdir()} - kept.keys() == {"README.md", "manifest.json", WEIGHTS}
    assert [each.name for each in out.parent.iterdir()] == ["out"]


def test_files_are_divided_as_those_of_the_first_model_and_have_its_type(tmp_path: Path) -> None:
    one = near(tmp_path / "one", "llama", 0)
    net: Any = AutoModelForCausalLM.from_pretrained(one)
    (one / WEIGHTS).unlink()
    net.to(torch.bfloat16).save_pretrained(one, max_shard_size="20KB")
    files = sorted(each.name for each in one.glob("*.safetensors*"))
    other = near(tmp_path / "other", "llama", 1, one)
    assert len(files) > 3 and (other / WEIGHTS).is_file()
    for first, second in ((one, other), (other, one)):
        out = merge_models([first, second], tmp_path / f"out-{first.name}")
        assert sorted(each.name for each in out.glob("*.safetensors*")) == (files if first == one else [WEIGHTS])
        merged: Any = AutoModelForCausalLM.from_pretrained(out)
        assert merged.dtype == torch.bfloat16
        for own, before in zip(merged.parameters(), net.parameters(), strict=True):
            assert (own - before).abs().max() < 0.06


def test_an_adapter_is_merged_into_its_base_model_first(tmp_path: Path) -> None:
    base = near(tmp_path / "base", "llama", 0)
    net: Any = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "mine"))
    out = merge_models([tmp_path / "mine", base], tmp_path / "out")
    merged: Any = adapted.merge_and_unload()  # type: ignore[operator]
    own, before = merged.state_dict(), AutoModelForCausalLM.from_pretrained(base).state_dict()
    for key, tensor in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        torch.testing.assert_close(tensor, (own[key] + before[key]) / 2)
    (record,) = checkpoint.verify(out)["meta"]["history"]
    assert [each["model"] for each in record["merged"]] == [str(tmp_path / "mine"), str(base)]


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Chat) -> Path:
    """A run of two phases, whose models are saved as the scripts save them."""
    run, chat, records = tmp_path_factory.mktemp("runs") / "mine", copy.deepcopy(tiny_chat), []
    for seed, phase in enumerate(("phase1", "phase2")):
        base = "runs/base" if not seed else str(run / "phase1" / "final")
        config = {"model": {"name_or_path": base}, "seed": 0, "output_dir": str(run / phase)}
        records = [*records, model_card.phase_record(phase, config, 3)]
        net, source = tiny_model(chat, seed), ModelSection(name_or_path="x")
        models.save(run / phase / "final", net, chat, config, source=source, history=records, phase=phase)
    return run


def test_the_command_writes_a_final_folder_with_its_history(phases: Path, tmp_path: Path) -> None:
    done = called(main, *(str(phases / each) for each in ("phase1", "phase2")), "--weights", "1", "3",
                  "--out", str(tmp_path / "out"))  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"Written: {tmp_path / 'out'}\n"), done.stderr
    meta = checkpoint.verify(tmp_path / "out")["meta"]
    before = checkpoint.read_manifest(phases / "phase2" / "final")["meta"]
    assert meta["chat_template_sha256"] == before["chat_template_sha256"] and meta["phase"] == "merge"
    *history, record = meta["history"]
    assert history == before["history"] and record["settings"] == {"method": "linear"}
    assert [each["share"] for each in record["merged"]] == [0.25, 0.75]
    assert not (tmp_path / "out" / checkpoint.RUN_CONFIG).exists()
    card: Any = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.tags == ["sft", "dpo", "merge", "convgpt"]
    assert "merge (linear): `phase1/final` 0.25, `phase2/final` 0.75." in card.text
    assert str(tmp_path) not in card.content and "run_config.yaml" not in card.text
    content = gather_content(tmp_path / "out", "ana/toy")  # as `publish` does
    assert content.size(WEIGHTS) and all(str(phases) not in text for text in content.free_text)
    again = merge_models([tmp_path / "out", phases / "phase2"], tmp_path / "again")
    assert [each["phase"] for each in checkpoint.read_manifest(again)["meta"]["history"]] == [
        "phase1",
        "phase2",
        "merge",
        "merge",
    ]


DATA = {"path": "embedded", "kind": "messages", "licence": "generated here", "train": 9, "held_out": 1, "examples": []}


@pytest.fixture
def stopped(tmp_path: Path, phases: Path, tiny_chat: Chat) -> Path:
    """A phase 2 without `final`, whose checkpoints 4 and 8 hold what the Trainer and `seal` write."""
    run = tmp_path / "stopped"
    for step in (4, 8):
        tiny_model(tiny_chat, step).save_pretrained(run / f"checkpoint-{step}")
        tiny_chat.save(run / f"checkpoint-{step}")
        checkpoint.seal(run / f"checkpoint-{step}", step=step)
    (run / "pairs").mkdir()
    (run / "pairs" / "sources.json").write_text(json.dumps([DATA]))
    config = {"model": {"name_or_path": str(phases / "phase1" / "final")}, "seed": 3}
    (run / checkpoint.RUN_CONFIG).write_text(json.dumps(config))
    return run


def test_checkpoints_of_a_run_have_the_history_of_its_model(stopped: Path, tmp_path: Path, tiny_chat: Chat) -> None:
    """The phase is listed once, with its results where the checkpoint that was measured is among the models."""
    run, net = stopped, tiny_model(tiny_chat, 8)
    config = json.loads((run / checkpoint.RUN_CONFIG).read_text())
    result = model_card.CardResult("held-out rows: loss", 0.5, 10)
    record = model_card.phase_record("phase2", config, 8, data=[DATA], results=[result])
    before = model_card.history(config["model"]["name_or_path"])
    source = ModelSection(name_or_path="x")
    models.save(run / "final", net, tiny_chat, config, source=source, history=[*before, record], phase="phase2", step=8)
    checkpoints = [run / "checkpoint-4", run / "checkpoint-8"]
    for number, places in enumerate((checkpoints, checkpoints[::-1], [checkpoints[0], run])):
        out = merge_models(places, tmp_path / str(number))
        assert checkpoint.verify(out)["meta"]["history"][:-1] == [*before, record]
        card: Any = ModelCard.load(out / "README.md")
        assert card.data.tags == ["sft", "dpo", "merge", "convgpt"]
        assert card.text.count("| embedded | messages | generated here | 9 | 1 |") == 1
        assert "held-out rows: loss" in card.text
        assert (out / models.CODE).is_file()  # which `trust_remote_code` on the card runs
    best = checkpoints[0].rename(run / "best-4")
    assert model_card.history(str(best)) == [*before, record | {"step": 4, "results": []}]
    assert model_card.history(str(best.rename(run / "copy"))) == []


def test_checkpoints_of_a_run_without_a_model_have_what_its_folder_tells(stopped: Path, tmp_path: Path) -> None:
    out = merge_models([stopped / "checkpoint-4", stopped / "checkpoint-8"], tmp_path / "out")
    one, two, merge = checkpoint.verify(out)["meta"]["history"]
    assert [each["phase"] for each in (one, two, merge)] == ["phase1", "phase2", "merge"]
    assert (two["step"], two["data"][0]["licence"], two["settings"]) == (8, "generated here", {"seed": 3})
    assert two["results"] == [] and two["commit"] == "not recorded"
    (stopped / "pairs" / "sources.json").write_text("[")
    assert model_card.history(str(stopped / "checkpoint-4"))[-1]["data"] == []
    for broken in ("model: 3", "[", "- 1"):
        (stopped / checkpoint.RUN_CONFIG).write_text(broken)
        assert model_card.history(str(stopped / "checkpoint-4")) == []


def test_the_adapter_of_a_checkpoint_brings_the_history_of_its_run(stopped: Path, tmp_path: Path) -> None:
    base = near(tmp_path / "base", "llama", 0)
    for step in (4, 8):
        net: Any = AutoModelForCausalLM.from_pretrained(base)
        adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        shutil.rmtree(stopped / f"checkpoint-{step}")
        adapted.save_pretrained(str(stopped / f"checkpoint-{step}"))
        checkpoint.seal(stopped / f"checkpoint-{step}", step=step)
    out = merge_models([stopped / "checkpoint-4", stopped / "checkpoint-8"], tmp_path / "out")
    history = checkpoint.verify(out)["meta"]["history"]
    assert [(each["phase"], each["step"]) for each in history] == [("phase1", 3), ("phase2", 8), ("merge", 0)]


@pytest.mark.thorough
def test_an_average_is_evaluated_in_the_same_table(phases: Path, tmp_path: Path) -> None:
    finals = {name: str(phases / name / "final") for name in ("phase1", "phase2")}
    average = merge_models([*map(Path, finals.values())], tmp_path / "average")
    suites = {"math": {"n": 2, "max_new_tokens": 3}, "repetition": None, "recall": None, "preferences": None,
              "envs": None}  # fmt: skip
    out = evaluate(tmp_path, finals | {"average": str(average)}, suites=suites)
    results = json.loads((out / "results.json").read_text())
    assert list(results["checkpoints"]) == ["phase1", "phase2", "average"] and not results["failed"]


# ------------------------------------------------------------------------------------------------------------ refusals


def change(folder: Path, file: str, **values: Any) -> None:
    place = folder / file
    place.write_text(json.dumps(json.loads(place.read_text()) | values))


def tensors(folder: Path, **values: torch.Tensor | None) -> None:
    held = load_file(folder / WEIGHTS) | values
    save_file({key: each for key, each in held.items() if each is not None}, folder / WEIGHTS, {"format": "pt"})


FIRST = "model.layers.0.self_attn.q_proj.weight"
CHANGES: list[tuple[Any, str]] = [
    (lambda other: change(other, "config.json", rms_norm_eps=0.1), "In config.json rms_norm_eps is 1e-06 in the first"),
    (lambda other: model_families.write(other, "qwen2.5"), "model_type is llama in the first, and qwen2"),
    (lambda other: (other / "chat_template.jinja").unlink(), "different chat templates"),
    (lambda other: (other / "chat_template.jinja").write_text("{{ messages }}"), "different chat templates"),
    (lambda other: tensors(other, **{FIRST: None}), f"only one of them has a tensor {FIRST}"),
    (lambda other: tensors(other, more=torch.ones(2)), "only one of them has a tensor more"),
    (lambda other: tensors(other, **{FIRST: torch.ones(2, 3)}), r"has the shape \[32, 32\] in the first, \[2, 3\]"),
    (lambda other: tensors(other, **{FIRST: torch.full((32, 32), torch.nan)}), "not finite in .*other"),
    (lambda other: change(other, "config.json", quantization_config={"quant_method": "gptq"}), "quantized"),
    (lambda other: (other / WEIGHTS).write_bytes(b"no weights"), "cannot be merged|not a weight file"),
    (lambda other: (other / "config.json").unlink(), "holds no finished model"),
]


@pytest.mark.parametrize(("broken", "says"), CHANGES, ids=[str(number) for number in range(len(CHANGES))])
def test_a_model_that_does_not_fit_is_refused(broken: Any, says: str, tmp_path: Path) -> None:
    one = near(tmp_path / "one", "llama", 0)
    other = near(tmp_path / "other", "llama", 1, one)
    broken(other)
    with pytest.raises(UserError, match=says) as refused:
        merge_models([one, other], tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "other"]  # nothing is left


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    one = near(tmp_path / "one", "llama", 0)
    other = near(tmp_path / "other", "llama", 1, one)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match=r"their vocabularies differ, the first time in '<more>'"):
        merge_models([one, other], tmp_path / "out")


def test_numbers_that_are_not_trained_must_be_equal(tmp_path: Path) -> None:
    one = near(tmp_path / "one", "llama", 0)
    other = near(tmp_path / "other", "llama", 1, one)
    tensors(one, steps=torch.tensor([3, 4]))
    tensors(other, steps=torch.tensor([3, 4]))
    assert load_file(merge_models([one, other], tmp_path / "same") / WEIGHTS)["steps"].tolist() == [3, 4]
    tensors(other, steps=torch.tensor([3, 5]))
    with pytest.raises(UserError, match="steps holds integers"):
        merge_models([one, other], tmp_path / "out")


@pytest.mark.parametrize(
    ("count", "method", "weights", "says"),
    [
        (1, "linear", None, "two models or more"),
        (3, "slerp", None, "exactly two models, not 3"),
        (2, "linear", [1], "1 numbers for 2 models"),
        (2, "linear", [-1, 2], "numbers from 0 on"),
        (2, "slerp", [0, 0], "one of them is above 0"),
        (2, "linear", [math.nan, 1], "numbers from 0 on"),
        (2, "linear", [1e308, 1e308], "numbers from 0 on"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_model_is_read(
    count: int, method: str, weights: list[float] | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        merge_models([tmp_path / "nothing"] * count, tmp_path / "out", method, weights)


def test_what_is_there_is_not_changed_and_a_damaged_run_is_refused(phases: Path, tmp_path: Path) -> None:
    finals = [str(phases / each) for each in ("phase1", "phase2")]
    done = called(main, *finals, "--out", str(phases))
    assert done.returncode == 2 and "already exists" in done.stderr
    changed = tmp_path / "changed"
    merge_models([Path(each) for each in finals], changed)
    with (changed / WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    done = called(main, finals[0], str(changed), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "model.safetensors differ from its checksum" in done.stderr
    assert not (tmp_path / "out").exists()
