"""Does phase 1 train on the assistant's tokens alone, go on exactly after any stop, and leave everything else alone?"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from datasets import load_from_disk
from tiny_phases import Phase, same_weights
from tiny_runs import ROOT, conversations, preferences, python, rows_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
)
from trl.trainer.sft_config import SFTConfig

import train_phase1_sft
from posttrain import plan
from posttrain.config.loading import load, resolve, training_flags
from posttrain.config.sft import SFTRun
from posttrain.data import prepared_rows
from posttrain.finetune import training, trl_trainers
from posttrain.models import loading as models
from posttrain.models.chat import Chat
from posttrain.plan import preflight
from posttrain.runtime import checkpoint, hardware, parallel, run_identity, runlog, trl_arguments
from posttrain.types import UserError


@pytest.fixture
def files(sft: Phase) -> Phase:
    return sft


def train(file: Path, *more: str) -> None:
    train_phase1_sft.main(["--config", str(file), *more])


@pytest.mark.thorough
def test_a_micro_batch_that_does_not_fit_is_announced(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to write instead, for the rows that there are; the run goes on, since the plan is an estimate."""
    file = files.config_in(tmp_path, max_steps=1, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    train(file)
    assert "may run out of memory" not in "".join(capsys.readouterr())
    monkeypatch.setattr(plan.Place, "here", lambda device: plan.Place(free=15_000_000, cuda=False))
    run = tmp_path / "little"
    train(file, f"output_dir={run}")
    told = capsys.readouterr().err
    assert "Planned, not measured: it may run out of memory. This run does not fit on this device: with" in told
    found = re.search(r"rows of up to (\d+) tokens", told)
    rows: Any = load_from_disk(str(run / "rows" / "train"))
    longest = max(map(len, rows["input_ids"]))
    assert found is not None and int(found[1]) == longest
    assert re.search(r"per_device_train_batch_size=[124] trainer.gradient_accumulation_steps=(16|8|4)\b", told), told


# ---------------------------------------------------------------------------------------------------------------- a run


def test_a_run_learns_and_saves(whole: Path, files: Phase, tiny_chat: Chat) -> None:
    losses = rows_of(whole)
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1] - 0.1
    assert rows_of(whole, "eval_loss").keys() == {12}
    assert all(json.loads(line)["seconds"] > 0 for line in (whole / "metrics.jsonl").read_text().splitlines())
    (source,) = json.loads((whole / "rows" / "table.json").read_text())
    assert source["read"] == source["train"] + source["held_out"] + sum(source["dropped"].values()) > 0
    manifest = checkpoint.verify(whole / "final")
    (record,) = manifest["meta"].pop("history")
    assert (record["phase"], record["base"], record["step"]) == ("phase1", str(files.base), 12)
    assert manifest["meta"] == {"phase": "phase1", "step": 12, "chat_template_sha256": tiny_chat.hash}
    assert yaml.safe_load((whole / "final" / "run_config.yaml").read_text())["trainer"]["max_steps"] == 12
    for step in (4, 8, 12):
        assert checkpoint.verify(whole / f"checkpoint-{step}")["meta"] == {"step": step}
    assert AutoModelForCausalLM.from_pretrained(whole / "final").config.eos_token_id == tiny_chat.stop_id


def test_the_loss_is_that_of_the_assistants_tokens_alone(whole: Path, files: Phase) -> None:
    """The held-out loss that TRL reports, recomputed from the handed-over weights without TRL."""
    from posttrain.data.loading import load_sft

    cfg = resolve(SFTRun, files.folder / "run.yaml")
    net, chat = models.load(models.ModelSection(name_or_path=str(whole / "final")), device="cpu", chat_template=None)
    total, count = 0.0, 0
    for row in load_sft(cfg.data, chat).eval.to_list():
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["assistant_masks"]).bool()
        text = str(chat.tokenizer.decode(ids[mask]))
        assert "?" not in text  # what the user says
        assert text.endswith("<|im_end|>")
        with torch.no_grad():
            logprobs = net.eval()(ids[None]).logits[0, :-1].log_softmax(-1)
        picked = -logprobs.gather(1, ids[1:, None])[:, 0][mask[1:]]
        total, count = total + picked.sum().item(), count + len(picked)
    assert rows_of(whole, "eval_loss")[12] == pytest.approx(total / count, abs=1e-5)


@pytest.fixture
def cuda_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts take the device for a GPU; weights and batches stay on the CPU."""
    resolve, load = hardware.resolve_device, models.load

    def load_on_the_cpu(*args: Any, **more: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hardware, "resolve_device", resolve)
            return load(*args, **{**more, "device": "cpu"})

    monkeypatch.setattr(hardware, "resolve_device", lambda device: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(models, "load", load_on_the_cpu)
    monkeypatch.setattr(preflight, "try_output_layer", lambda device: None)


TINY: dict[str, Any] = dict(vocab_size=512, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(hidden_size=64, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", ["convgpt", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "qwen2"))]
)
@pytest.mark.parametrize("script", ["train_phase1_sft", "train_phase2_dpo"])
@pytest.mark.usefixtures("cuda_path")
def test_the_reference_settings_attend_without_a_mask_on_a_gpu(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, script: str, kind: str
) -> None:
    """Training and evaluation; flash kernels take no mask and share the keys and values of grouped queries.

    Not the answers that are written meanwhile, whose prompts are padded.
    """
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY)).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    first = script == "train_phase1_sft"
    rows = (conversations if first else preferences)(tmp_path / "rows.jsonl", 80)
    calls: list[tuple[Any, dict[str, Any]]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        calls.append((query.shape, named))
        return attend(query, *args, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(plan.Place, "here", lambda device: plan.Place(1 << 40))  # no GPU to ask
    config = yaml.safe_load((ROOT / "configs" / script.replace("train_", "")).with_suffix(".yaml").read_text())
    config |= {"output_dir": str(tmp_path / "run"), "report_to": "none"}
    config["model"]["name_or_path"] = str(tmp_path / "base")
    config["evaluation"]["suites"] = {}
    config["data"] |= {"max_length": 96, "eval_rows": 8, "decontaminate": False}
    config["data"]["sources"] = [{"kind": "messages" if first else "preferences", "path": str(rows)}]
    # without a GPU, TRL refuses bfloat16 outside a CPU
    config["trainer"] |= {"bf16": False, "max_steps": 2, "eval_steps": 1, "logging_steps": 1, "save_strategy": "no"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    importlib.import_module(script).main(["--config", str(tmp_path / "run.yaml")])
    assert rows_of(tmp_path / "run", "eval_loss").keys() == {1, 2}
    assert len({shape for shape, _ in calls}) > 2  # batches of several lengths: most are padded
    for shape, named in calls:
        if shape[2] == 1:  # the plan asks what one token leaves in a cache
            continue
        assert named.get("attn_mask") is None and named["is_causal"] and named["enable_gqa"], shape
        assert shape[0] > 1 or shape[2] == 2  # not packed into one row; two tokens are the check of a loaded model


def test_a_kernel_that_cannot_be_compiled_is_found_before_the_data_work(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Triton raises where there is no C compiler, from inside TRL's output layer."""
    from trl.kernels import chunked_logprob

    from posttrain import data

    preflight.try_output_layer(torch.device("cpu"))  # the same function, there without Triton

    def uncompiled(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(chunked_logprob, "_forward_tile", uncompiled)
    monkeypatch.setattr(data, "load_sft", lambda *_: pytest.fail("data was read"))
    real = preflight.try_output_layer
    monkeypatch.setattr(preflight, "try_output_layer", lambda device: real(torch.device("cpu")))
    monkeypatch.setattr(hardware, "resolve_device", lambda device: SimpleNamespace(type="cuda"))
    with pytest.raises(UserError, match=r"Failed to find C compiler.*apt-get install gcc") as problem:
        train(files.config_in(tmp_path, bf16=False), "device=cuda")
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "convgpt", "gpt2", "opt", "bloom"])
def test_reading_without_a_mask_changes_no_loss_and_no_gradient(kind: str, checkpointing: bool) -> None:
    """Beside the dense mask, and beside each row read on its own; what stands in the padding makes no difference."""
    from trl.trainer.utils import add_fused_lm_head

    lengths = torch.tensor([3, 11, 4, 11, 2, 7])
    mask = (torch.arange(11) < lengths[:, None]).long()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(97, mask.shape, generator=draw)
    labels = ids.masked_fill((torch.rand(mask.shape, generator=draw) < 0.4) | (mask == 0), -100)

    def scored(plain: bool, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(2)
        more = {"initializer_range": 0.1, "dropout": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config = AutoConfig.for_model(kind, **(TINY | {"vocab_size": 97} | more))
        net: Any = AutoModelForCausalLM.from_config(config).train()
        if checkpointing:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        seen: list[Any] = []
        attends = [module for name, module in net.named_modules() if name.endswith((".self_attn", ".attn"))]
        for module in attends:
            module.register_forward_pre_hook(lambda _, __, named: seen.append(named), with_kwargs=True)
        if not plain:
            training.read_without_padding_masks(net)
        add_fused_lm_head(net, outputs=("log_probs", "entropy", "is_top1"))
        out = net(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        loss = -out.log_probs.sum() / (labels != -100).sum()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        if not plain and attends:
            assert all(named.get("attention_mask") is None for named in seen)
        return loss, out.log_probs, gradient

    masked = scored(True, ids, mask, labels)
    bare = scored(False, ids, mask, labels)
    other = scored(False, ids.masked_fill(mask == 0, 5), mask, labels)
    assert masked[1].abs().max() > 1
    for one, another, third in zip(masked, bare, other, strict=True):
        assert torch.allclose(one, another, rtol=1e-4, atol=1e-6)
        assert torch.allclose(one, third, rtol=1e-4, atol=1e-6)
    for row, length in enumerate(lengths.tolist()):
        alone = (part[row : row + 1, :length] for part in (ids, mask, labels))
        assert torch.allclose(scored(True, *alone)[1][0], bare[1][row, : length - 1], rtol=1e-4, atol=1e-5)


def test_only_padding_on_the_right_is_read_without_a_mask() -> None:
    """Padding on the left, a cache and a caller's own positions keep their mask."""
    net: Any = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    before = net.model(ids, attention_mask=mask.flip(1), use_cache=False).last_hidden_state
    cached = net.generate(ids, attention_mask=mask.flip(1), max_new_tokens=3, do_sample=False)
    training.read_without_padding_masks(net)
    assert torch.equal(net.model(input_ids=ids, attention_mask=mask.flip(1), use_cache=False)[0], before)
    assert torch.equal(net.generate(ids, attention_mask=mask.flip(1), max_new_tokens=3, do_sample=False), cached)


def test_packing_on_a_gpu_is_refused_without_a_kernel_for_it(tmp_path: Path, files: Phase) -> None:
    """sdpa would build one mask over all packed rows of a batch."""

    def arguments(device: str, attention: str, **packed: Any) -> Any:
        file = files.config_in(tmp_path, bf16=False, **packed)
        cfg = resolve(SFTRun, file, [f"model.attn_implementation={attention}"])
        return trl_arguments.arguments(SFTConfig, cfg, torch.device(device))

    for packed in ({"packing": True}, {"packing": True, "eval_packing": False}):
        for attention in ("sdpa", "eager"):
            with pytest.raises(UserError, match=r"384 x 384.*group_by_length.*flex_attention.*flash_attention_2"):
                arguments("cuda", attention, **packed)
        for attention in ("flex_attention", "flash_attention_2"):
            assert arguments("cuda", attention, **packed)
        assert arguments("cpu", "sdpa", **packed)
    with pytest.raises(UserError, match=r"no gradients on a CPU\. Write model\.attn_implementation=sdpa"):
        arguments("cpu", "flex_attention")
    for device in ("cpu", "cuda"):
        with pytest.raises(UserError, match="see the one before"):
            arguments(device, "flash_attention_2", packing=True, packing_strategy="wrapped")
        with pytest.raises(UserError, match="see the one before"):
            arguments(device, "flash_attention_2", eval_packing=True)


def pooled(lengths: list[int], *, seed: int = 1, epoch: int = 0, accumulated: int = 1, processes: int = 1) -> list[int]:
    batch = dict(per_device_train_batch_size=4, gradient_accumulation_steps=accumulated, world_size=processes)
    args = SimpleNamespace(**batch, device=torch.device("cpu"), seed=seed)
    return trl_trainers.side_by_side(prepared_rows.length_pools(lengths, args, epoch), lengths, args)


def test_length_pools_keep_every_row_once_and_halve_the_padding() -> None:
    draw = random.Random(3)
    lengths = [draw.choice([5, 20, 50]) for _ in range(203)]

    def padded(order: list[int]) -> int:
        return sum(4 * max(lengths[row] for row in order[at : at + 4]) for at in range(0, 200, 4))

    for epoch in (0, 1, 2):
        assert sorted(pooled(lengths, epoch=epoch)) == list(range(203))
        assert padded(pooled(lengths, epoch=epoch)) < sum(lengths) * 1.15 < sum(lengths) * 1.5 < padded([*range(203)])
    assert pooled(lengths) == pooled(lengths) != pooled(lengths, seed=2)
    assert len({tuple(pooled(lengths, epoch=epoch)) for epoch in range(4)}) == 4


def test_length_pools_give_each_step_the_rows_of_one_process() -> None:
    """Of six batches in a step; those that two processes read at the same time are of similar length."""
    draw = random.Random(3)
    lengths = [draw.choice([5, 20, 50]) for _ in range(203)]

    def waits(order: list[int]) -> int:
        longest = [max(lengths[row] for row in order[at : at + 4]) for at in range(0, 200, 4)]
        return sum(max(pair) - min(pair) for pair in zip(longest[::2], longest[1::2], strict=True))

    waited = []
    for epoch in range(4):
        one, shared = pooled(lengths, epoch=epoch), pooled(lengths, epoch=epoch, accumulated=3, processes=2)
        for start in range(0, 203, 24):
            assert sorted(one[start : start + 24]) == sorted(shared[start : start + 24])
        waited.append((waits(one), waits(shared)))
    assert sum(shared for _, shared in waited) < sum(one for one, _ in waited) / 2, waited


def test_group_by_length_trains_in_the_pooled_order(tmp_path: Path, files: Phase) -> None:
    train(files.config_in(tmp_path, train_sampling_strategy="group_by_length", max_steps=18))
    tokens = list(rows_of(tmp_path / "run", "num_tokens").values())
    a_step = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert sum(a_step) == tokens[-1]
    assert max(a_step) > 1.5 * min(a_step)  # batches of short rows, batches of long ones


@pytest.mark.thorough
def test_group_by_length_draws_new_batches_in_each_epoch(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row once in each of two epochs, in other batches; a run stopped in the second reads on in its order."""
    seen: list[list[tuple[int, ...]]] = []
    true_step = Trainer.training_step

    def noted(trainer: Any, model: Any, inputs: Any, *more: Any) -> Any:
        masks = inputs["attention_mask"].bool()
        seen.append(sorted(tuple(ids[m].tolist()) for ids, m in zip(inputs["input_ids"], masks, strict=True)))
        return true_step(trainer, model, inputs, *more)

    monkeypatch.setattr(Trainer, "training_step", noted)
    file = files.config_in(tmp_path, train_sampling_strategy="group_by_length", max_steps=36, save_steps=22)
    train(file)
    first, second = seen[:18], seen[18:]
    assert len(second) == 18 and sorted(chain(*first)) == sorted(chain(*second))
    assert len([batch for batch in second if batch in first]) < 9
    whole = rows_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoint-36")
    seen.clear()
    train(file, "--resume")
    assert seen == second[4:] and rows_of(tmp_path / "run") == whole


def test_packing_trains_on_whole_conversations(tmp_path: Path, files: Phase) -> None:
    """Packed rows are as long as allowed, their labels are the same tokens, and the run learns."""
    train(files.config_in(tmp_path, packing=True, max_steps=4, per_device_train_batch_size=1))
    losses = rows_of(tmp_path / "run")
    assert list(losses) == [1, 2, 3, 4]
    assert all(4 < loss < 7 for loss in losses.values())
    tokens = rows_of(tmp_path / "run", "num_tokens")
    assert tokens[4] > 4 * 70  # a step is one packed row of up to 96 tokens; a single conversation has about 30


@pytest.mark.parametrize("has_bf16", [False, True])
def test_what_the_device_calls_for(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(hardware, "has_bf16", lambda _: has_bf16)
    file = files.config_in(tmp_path, bf16=None)

    def arguments(*changes: str) -> Any:
        cfg = hardware.settle(resolve(SFTRun, file, list(changes)))
        return trl_arguments.arguments(SFTConfig, cfg, torch.device("cpu"))

    args = arguments()
    assert (args.bf16, args.gradient_checkpointing, args.use_cpu, args.report_to) == (has_bf16, False, True, [])
    assert args.max_length == 96 and args.logging_nan_inf_filter is False
    for written in (False, True):
        assert arguments(f"trainer.bf16={written}").bf16 is written
    half = arguments("trainer.fp16=true")
    assert (half.bf16, half.fp16) == (False, True)


def test_an_8_bit_optimizer_trains(tmp_path: Path, files: Phase) -> None:
    pytest.importorskip("bitsandbytes")
    train(files.config_in(tmp_path, max_steps=4, optim="adamw_8bit"))
    losses = rows_of(tmp_path / "run")
    assert losses[4] < losses[1]


# --------------------------------------------------------------------------------------------------------- not finite


@pytest.fixture
def after_each_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Any], object]], None]:
    """Has a function called with the number of each step and the model after it."""

    def register(change: Callable[[int, Any], object]) -> None:
        def on_step_end(self: Any, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            change(state.global_step, model)

        monkeypatch.setattr(training.Reporter, "on_step_end", on_step_end)

    return register


def finite(folder: Path) -> bool:
    return models.parameters_not_finite(AutoModelForCausalLM.from_pretrained(folder)) == ""


def test_a_run_that_diverges_at_once_hands_nothing_over(tmp_path: Path, files: Phase) -> None:
    with pytest.raises(UserError, match=r"stopped at step \d+:.*not a finite number.*nothing is saved") as error:
        train(files.config_in(tmp_path, learning_rate=1e30, save_steps=1))
    assert "trainer.learning_rate" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run" / "final").exists()
    assert len(rows_of(tmp_path / "run", "learning_rate")) < 4  # not to the end


@pytest.mark.thorough
@pytest.mark.parametrize("clipped", [True, False])
def test_a_run_that_diverges_later_saves_its_last_healthy_checkpoint(
    tmp_path: Path, files: Phase, after_each_step: Any, clipped: bool
) -> None:
    """The weights are ruined by the 7th update, unseen in the checkpoint that is saved after it."""
    healthy: dict[int, torch.Tensor] = {}

    def ruin(step: int, model: Any) -> None:
        weight = model.model.layers[0].mlp.up_proj.weight
        healthy[step] = weight.detach().clone()
        if step == 7:
            weight.data.fill_(3e38)

    after_each_step(ruin)
    file = files.config_in(tmp_path, save_steps=1, max_grad_norm=1.0 if clipped else 0.0)
    with pytest.raises(UserError, match=r"stopped at step 8: the gradient is not.*final was made from checkpoint-6"):
        train(file)
    final = tmp_path / "run" / "final"
    assert checkpoint.verify(final)["meta"]["step"] == 6 and finite(final)
    handed = AutoModelForCausalLM.from_pretrained(final).model.layers[0].mlp.up_proj.weight
    assert torch.equal(handed, healthy[6])
    assert finite(tmp_path / "run" / "checkpoint-7")  # finite, and broken


def test_a_resumed_run_trusts_the_checkpoints_before_the_one_it_resumed_from(tmp_path: Path) -> None:
    parts: Any = SimpleNamespace(catch_up=lambda step: None, log=lambda row, step: None)
    reporter = training.Reporter("phase 1", tmp_path, parts, parts, dict)
    state = SimpleNamespace(global_step=200, max_steps=400)
    reporter.on_train_begin(None, state, None)
    state.global_step = 210
    with pytest.raises(training.NotFinite) as error:
        reporter.on_log(None, state, None, logs={"loss": math.nan})
    assert error.value.updates == 200


def test_a_checkpoint_with_weights_that_are_not_finite_is_not_sealed(
    tmp_path: Path, files: Phase, after_each_step: Any
) -> None:
    after_each_step(lambda step, model: step == 8 and model.get_input_embeddings().weight.data[3].fill_(torch.inf))
    with pytest.raises(UserError, match=r"stopped at step 8: a weight \(.*made from checkpoint-4"):
        train(files.config_in(tmp_path))
    with pytest.raises(UserError):
        checkpoint.verify(tmp_path / "run" / "checkpoint-8")
    assert finite(tmp_path / "run" / "final")


def test_held_out_rows_that_are_not_finite_fail_the_run(tmp_path: Path, files: Phase, after_each_step: Any) -> None:
    """The last update ruins the model: no later gradient shows it."""
    after_each_step(lambda step, model: step == 12 and model.model.layers[0].mlp.up_proj.weight.data.fill_(3e38))
    with pytest.raises(UserError, match=r"step 12: the loss of the held-out rows is not.*made from checkpoint-8"):
        train(files.config_in(tmp_path))
    assert checkpoint.verify(tmp_path / "run" / "final")["meta"]["step"] == 8


# ------------------------------------------------------------------------------------------------------ stop and go on


@pytest.mark.thorough
def test_a_stop_in_the_middle_of_an_epoch_is_not_its_end(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is evaluated, logged and saved when an epoch ends waits for that."""
    changes = {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    file = files.config_in(tmp_path, **changes)
    train(file, f"output_dir={tmp_path}/whole")
    begin = training.Reporter.on_step_end

    def signal_at_step_6(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step in (6, steps):
            os.kill(os.getpid(), signal.SIGTERM)
        begin(self, args, state, control, **more)

    monkeypatch.setattr(training.Reporter, "on_step_end", signal_at_step_6)
    steps = min(rows_of(tmp_path / "whole", "eval_loss"))  # of an epoch
    assert steps > 7
    for more in ([], ["--resume"]):  # in the middle of the first epoch, then at its very end
        with pytest.raises(SystemExit):
            train(file, *more)
    monkeypatch.undo()
    train(file, "--resume")
    for figure in ("loss", "eval_loss"):
        assert rows_of(tmp_path / "run", figure) == rows_of(tmp_path / "whole", figure)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_after_a_kill_in_the_middle_of_a_save_resume_takes_the_older_checkpoint(
    tmp_path: Path, files: Phase, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL falls between the files of checkpoint-8 and its manifest."""
    file = files.config_in(tmp_path)
    program = textwrap.dedent(
        """
        import os, signal, sys
        from posttrain.runtime import checkpoint
        seal = checkpoint.seal
        def killed(folder, **meta):
            if folder.name == "checkpoint-8":
                os.kill(os.getpid(), signal.SIGKILL)
            return seal(folder, **meta)
        checkpoint.seal = killed
        import train_phase1_sft
        train_phase1_sft.main(sys.argv[1:])
        """
    )
    done = python("-c", program, "--config", str(file))
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "checkpoint-8" / "trainer_state.json").exists()
    train(file, "--resume")
    out = capsys.readouterr().out
    assert "Skipped checkpoint-8" in out
    assert "checkpoint-4" in out
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert same_weights(tmp_path / "run", whole)
    checkpoint.verify(tmp_path / "run" / "checkpoint-8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "damage",
    ["a byte", "other settings", pytest.param("a leftover", marks=pytest.mark.slow)],
)
def test_resume_reads_no_source_again_unless_the_kept_rows_are_damaged(
    tmp_path: Path,
    files: Phase,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    from posttrain import data

    file = files.config_in(tmp_path)
    train(file, "run_name=first")
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "run" / "final")
    arrow = next((tmp_path / "run" / "rows" / "train").glob("data-*.arrow"))
    if damage == "a byte":
        content = bytearray(arrow.read_bytes())
        content[len(content) // 2] ^= 1
        arrow.write_bytes(content)
    elif damage == "a leftover":  # of a process that was killed before it took a checksum
        arrow.with_name("cache-0123456789abcdef.arrow").write_text("half a")
    elif damage == "other settings":
        checkpoint.seal(tmp_path / "run" / "rows", made_with="something else")
    times, load = [0], data.load_sft

    def counted(*args: Any) -> Any:
        times[0] += 1
        return load(*args)

    monkeypatch.setattr(data, "load_sft", counted)
    capsys.readouterr()
    train(file, "--resume")
    again = damage in ("a byte", "other settings")
    assert times[0] == again
    out = capsys.readouterr().out
    assert ("prepared again" in out) == again and ("Prepared rows are used again" in out) != again
    assert "cache-0123456789abcdef.arrow" not in checkpoint.verify(tmp_path / "run" / "rows")["files"]
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert same_weights(tmp_path / "run", whole)


@pytest.mark.thorough
def test_a_source_may_be_gone_once_its_rows_are_kept(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path)
    text = file.read_text()
    source = Path(yaml.safe_load(text)["data"]["sources"][0]["path"])
    file.write_text(text.replace(str(source), str(shutil.copy(source, tmp_path / "mine.jsonl"))))
    train(file)
    shutil.rmtree(tmp_path / "run" / "checkpoint-12")
    shutil.rmtree(tmp_path / "run" / "final")
    (tmp_path / "mine.jsonl").unlink()
    train(file, "--resume")
    assert (tmp_path / "run" / "final").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.3, 0.45, 0.6])
def test_a_kill_at_any_time_loses_no_exactness(tmp_path: Path, files: Phase, whole: Path, seconds: float) -> None:
    """SIGKILL so many seconds after the first step: inside a step, a save or a rotation."""
    file = files.config_in(tmp_path)
    program = textwrap.dedent(
        f"""
        import os, signal, sys, threading
        from posttrain.finetune import training
        begin = training.Reporter.on_train_begin
        def on_train_begin(self, *args, **more):
            begin(self, *args, **more)
            threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGKILL)).start()
        training.Reporter.on_train_begin = on_train_begin
        import train_phase1_sft
        train_phase1_sft.main(sys.argv[1:])
        """
    )
    assert python("-c", program, "--config", str(file)).returncode in (0, -signal.SIGKILL)
    train(file, "--resume")
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert same_weights(tmp_path / "run", whole)


@pytest.mark.thorough
def test_a_run_that_never_saved_resumes_from_the_beginning(
    tmp_path: Path, files: Phase, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = files.config_in(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    train(file, "--resume")
    assert "from the beginning" in capsys.readouterr().out
    assert rows_of(tmp_path / "run") == rows_of(whole)


def test_resume_of_a_finished_run_changes_no_figure(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path, max_steps=4)
    train(file)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    train(file, "--resume")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    checkpoint.verify(tmp_path / "run" / "final")


@pytest.mark.thorough
def test_resume_with_other_settings_is_refused(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path, max_steps=4)
    train(file)
    with pytest.raises(UserError, match=r"trainer.learning_rate was 0.001, now 0.01"):
        train(file, "--resume", "trainer.learning_rate=1e-2")
    train(file, "--resume", "run_name=another")  # only a name


def test_resume_on_another_number_of_processes_that_do_not_divide_a_batch_is_refused(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any data is read: each batch would be of another size, and of other rows."""
    file = files.config_in(tmp_path, max_steps=4)
    train(file)
    kept = snapshot(tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"started on 1 process and .* with 2: 1 micro-batch.*python, without torchrun"):
        train(file, "--resume")
    assert snapshot(tmp_path / "run") == kept
    monkeypatch.setenv("WORLD_SIZE", "1")
    cfg, _ = load(SFTRun, "", ["--config", str(file)], training_flags)
    for damaged in ("", "[]", '{"processes": "x"}', "{}"):  # no reason to refuse
        (tmp_path / "run" / "checkpoint-4" / training.COUNTS).write_text(damaged)
        assert run_identity.same_batches(tmp_path / "run", cfg) is cfg


# ----------------------------------------------------------------------------------------------------------- bad input


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_in_use_is_left_as_it_is(whole: Path, files: Phase) -> None:
    before = snapshot(whole)
    with pytest.raises(UserError, match=r"--resume.*output_dir="):
        train(files.folder / "run.yaml", f"output_dir={whole}")
    assert snapshot(whole) == before


def test_missing_model_and_empty_data_and_all_masked_rows(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path)
    with pytest.raises(UserError, match="previous phase"):
        train(file, "model.name_or_path=runs/none/final")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError):
        train(file, f"data.sources.0.path={tmp_path}/empty.jsonl")
    silent = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": ""}]}
    (tmp_path / "silent.jsonl").write_text((json.dumps(silent) + "\n") * 20)
    with pytest.raises(UserError):
        train(file, f"data.sources.0.path={tmp_path}/silent.jsonl")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name != checkpoint.LOCK]
    train(file, "trainer.max_steps=1")  # the folder is still free


def test_what_cannot_be_set_up_is_a_mistake_to_fix(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    file = files.config_in(tmp_path)
    for change in (
        "trainer.load_best_model_at_end=true",  # TRL's config refuses it: nothing is evaluated
        "trainer.lr_scheduler_type=warmup_stable_decay",  # needs num_decay_steps
        "report_to=wandb",  # not installed
        "model.attn_implementation=flash_attention_2",  # needs a GPU
        f"model={{name_or_path: {files.base}, tuning: lora, lora: {{target_modules: [nonsense]}}}}",
    ):
        with pytest.raises(UserError):
            train(file, change)
    train(file, "trainer.max_steps=1")  # the folder is still free


PAIRS = "data.sources=[PAIRS.jsonl]  (PAIRS.jsonl: your own pairs of answers)"  # not those of the Hub


@pytest.mark.parametrize(
    ("config_file", "device", "command"),
    [
        ("configs/quickstart/phase1_sft.yaml", "cpu", "--config configs/quickstart/phase2_dpo.yaml {f}"),
        ("configs/phase1_sft.yaml", "cuda", "--config configs/phase2_dpo.yaml {f}"),
        ("configs/phase1_sft.yaml", "cpu", "--config configs/phase2_dpo.yaml {f} device=cpu"),
        ("mine.yaml", "cpu", f"{{f}} device=cpu {PAIRS}"),  # the reference run's own file, which names a GPU
        ("mine.yaml", "cuda", f"{{f}} {PAIRS}"),
    ],
)
def test_what_comes_next_runs_on_this_device(
    monkeypatch: pytest.MonkeyPatch, config_file: str, device: str, command: str
) -> None:
    monkeypatch.chdir(ROOT)
    found = training.next_command("phase2_dpo", Path(config_file), Path("f"), device)
    assert found == f"python train_phase2_dpo.py {command.format(f='model.name_or_path=f')}"


def test_what_comes_next_is_the_command_where_that_is_how_one_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["posttrain sft"])
    for given, words in (
        ("configs/phase1_sft.yaml", "--config phase2_dpo model.name_or_path=f"),
        ("quickstart/phase1_sft", "--config quickstart/phase2_dpo model.name_or_path=f device=cuda"),
        ("models/gpt2", f"model.name_or_path=f {PAIRS}"),  # the reference run's own file
    ):
        assert training.next_command("phase2_dpo", Path(given), Path("f"), "cuda") == f"posttrain dpo {words}"


@pytest.mark.thorough
def test_the_command_line_says_it_in_one_paragraph_with_code_2(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path)
    done = python("train_phase1_sft.py", "--config", str(file), "model.name_or_path=runs/none/final")
    assert done.returncode == 2
    assert "runs/none/final does not exist" in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr  # no library has said anything before
    assert not (tmp_path / "run").exists()


UNPLUGGED = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}  # a real connection, which is refused


@pytest.mark.slow
@pytest.mark.parametrize("unplugged", [UNPLUGGED, {"HF_HUB_OFFLINE": "1"}], ids=["refused", "offline"])
def test_without_a_network_the_reference_run_says_what_to_do(tmp_path: Path, unplugged: dict[str, str]) -> None:
    env = unplugged | {"HF_HOME": str(tmp_path / "hf")}
    done = python("train_phase1_sft.py", "device=cpu", f"output_dir={tmp_path}/run", env=env)
    assert done.returncode == 2
    for words in ("Hugging Face cannot be reached", "ConvGPT-0.2B-SYNTH", "OpenMathInstruct-1", "make quickstart"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", ["train_phase1_sft.py", "train_phase2_dpo.py"])
def test_help_and_print_config_import_nothing_heavy(script: str) -> None:
    program = (
        "import runpy, sys; sys.argv = [sys.argv[1], sys.argv[2]]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert not {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules), 'heavy'\n"
    )
    for flag, words in (("--print-config", "name_or_path:"), ("--help", "--resume")):
        command = [sys.executable, "-c", program, str(ROOT / script), flag]  # one that has imported nothing yet
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


# -------------------------------------------------------------------------------------------- network, many processes


@pytest.mark.slow
def test_no_network_call_and_a_local_tracker(tmp_path: Path, files: Phase) -> None:
    """A whole run with an adapter and two dashboards, every socket call recorded; figures reach both, in groups."""
    program = textwrap.dedent(
        """
        import sys
        calls = []
        def hook(name, args):
            if name in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
                calls.append((name, args))
        sys.addaudithook(hook)
        import train_phase1_sft
        train_phase1_sft.main(sys.argv[1:])
        assert not calls, calls
        """
    )
    file = files.config_in(tmp_path, max_steps=3)
    clean = {"HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hf"), "TRACKIO_DIR": str(tmp_path / "tracked")}
    clean |= {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "events")}
    more = ("report_to=[trackio,tensorboard]", "model.tuning=lora")
    done = python("-c", program, "--config", str(file), *more, env={**clean, "CI": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    import sqlite3

    with sqlite3.connect(tmp_path / "tracked" / "posttrain.db") as database:
        logged = [json.loads(blob) for (blob,) in database.execute("select metrics from metrics order by id")]
    assert [row["train/loss"] for row in logged if "train/loss" in row] == list(rows_of(tmp_path / "run").values())
    assert any("eval/loss" in row for row in logged)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (tmp_path / "events").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(rows_of(tmp_path / "run"))
    assert "eval/loss" in events.Tags()["scalars"]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_processes_wait_long_for_each_other_and_know_their_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    asked: list[Any] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *how, **more: asked.append((*how, more)))
    place, patience = torch.device(device), timedelta(hours=6)
    parallel.join(place)
    if device == "cpu":
        assert asked == [("gloo", {"timeout": patience})]
    else:
        assert asked == [place, ("nccl", {"timeout": patience, "device_id": place})]


def test_only_the_first_process_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not runlog.is_main_process()
    layer, cpu = torch.nn.Linear(1000, 1000, bias=False), torch.device("cpu")
    section = {"output_dir": "x", "model": {"name_or_path": "a/b", "tuning": "lora"}}
    section |= {"data": {"sources": [{"kind": "capybara", "path": "embedded"}]}}
    line = models.describe_training(SFTRun.model_validate(section), layer, cpu)
    assert line == "1.00 M parameters (all trained), cpu, 2 processes, float32, learning rate 0.0002"
    section["trainer"] = {"learning_rate": 1e-6, "bf16": True}
    line, warning = models.describe_training(SFTRun.model_validate(section), layer, cpu).splitlines()
    assert line.endswith("2 processes, bfloat16, learning rate 1e-06")
    assert warning.startswith("WARNING: trainer.learning_rate=1e-06 is so low for model.tuning=lora")


@pytest.mark.thorough
def test_own_data_needs_no_network(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path, max_steps=2)
    env = UNPLUGGED | {"HF_HOME": str(tmp_path)}
    done = python("train_phase1_sft.py", "--config", str(file), "data.decontaminate=true", env=env)
    assert done.returncode == 0, done.stderr
    assert "NOT checked" in done.stdout


@pytest.mark.parametrize("given, logged", [({}, [1, 5, 7]), ({"logging_first_step": False}, [5, 7])])
def test_the_first_and_the_last_step_are_logged(
    tmp_path: Path, files: Phase, given: dict[str, Any], logged: list[int]
) -> None:
    train(files.config_in(tmp_path, max_steps=7, logging_steps=5, **given))
    assert list(rows_of(tmp_path / "run")) == logged


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"optim": "galore_adamw"}, "galore"),
        ({"optim": "schedule_free_adamw"}, "schedule"),
        ({"optim": "lomo"}, "lomo"),
        ({"optim_args": "foo"}, "unpack|argument"),
        ({"adam_beta1": 2.0}, "beta"),
        ({"metric_for_best_model": "foo"}, "metric_for_best_model is foo; an evaluation has loss"),
    ],
)
def test_what_the_optimizer_does_not_take_is_told_before_any_work(
    tmp_path: Path, files: Phase, trainer: dict[str, Any], words: str
) -> None:
    cfg = resolve(SFTRun, files.config_in(tmp_path, **trainer))
    with pytest.raises(UserError, match=f"(?i)cannot be used together: .*({words})"):
        trl_arguments.arguments(SFTConfig, cfg, torch.device("cpu"))


@pytest.mark.parametrize("damage", ["zzz: &a {x: *a}", "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]"])
def test_settings_of_a_run_that_refer_to_themselves_are_damaged(tmp_path: Path, damage: str) -> None:
    (tmp_path / checkpoint.RUN_CONFIG).write_text(f"seed: 0\n{damage}\n")
    with pytest.raises(UserError, match="is damaged"):
        run_identity.same_run(tmp_path, {"seed": 0})
