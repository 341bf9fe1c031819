"""Do phases 1 and 2 alike save, stop, resume, measure held-out rows and train on own data?"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tiny_phases import DPO, SFT, Phase, same_weights
from tiny_runs import rows_of, tiny_base, unheard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.trainer.dpo_trainer import DPOTrainer

from posttrain.finetune import training, trl_trainers
from posttrain.finetune.trl_trainers import AheadTrainer
from posttrain.plan import rows as plan_rows
from posttrain.runtime import checkpoint


@pytest.mark.thorough
def test_the_figures_of_held_out_rows_do_not_depend_on_batches(tmp_path: Path, phase: Phase) -> None:
    """Means over batches would: the last of 8 rows would count as much as seven others."""
    figures = []
    for size in (8, 7, 1):
        out = tmp_path / f"by-{size}"
        file = phase.config_in(tmp_path, max_steps=1, per_device_eval_batch_size=size)
        phase.train("--config", str(file), f"output_dir={out}")
        figures.append([rows_of(out, f"eval_{name}")[1] for name in phase.script.figures])
    assert figures[1] == pytest.approx(figures[0], abs=1e-5) and figures[2] == pytest.approx(figures[0], abs=1e-5)
    if phase.script is DPO:  # and the share of pairs in the model card is one of whole pairs
        (record,) = checkpoint.verify(out / "final")["meta"]["history"]
        (wins,) = [one["value"] for one in record["results"] if "chosen answer" in one["name"]]
        assert 8 * wins == pytest.approx(round(8 * wins), abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("tuning", ["lora", "qlora"])
def test_adapters_train_and_are_merged(
    tmp_path: Path, phase: Phase, tiny_tokenizer: PreTrainedTokenizerFast, tuning: str
) -> None:
    if tuning == "qlora":
        pytest.importorskip("bitsandbytes")
    base = tiny_base(tmp_path / "base", tiny_tokenizer, width=64)
    file = phase.config_in(tmp_path, max_steps=6, learning_rate=1e-2)
    phase.train("--config", str(file), f"model.name_or_path={base}", f"model.tuning={tuning}")
    losses = rows_of(tmp_path / "run")
    if phase.script is SFT:
        assert losses[6] < losses[1] - 0.1
    else:
        assert losses[1] == pytest.approx(math.log(2), abs=1e-3) and losses[6] < 0.68
    final = tmp_path / "run" / "final"
    checkpoint.verify(final)
    checkpoint.verify(tmp_path / "run" / "adapter")
    assert not list(final.glob("adapter*"))
    merged, before = (AutoModelForCausalLM.from_pretrained(path) for path in (final, base))
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, before.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(merged.model.embed_tokens.weight, before.model.embed_tokens.weight)


@pytest.mark.thorough
def test_a_signal_stops_with_a_checkpoint_and_resume_repeats_the_whole_run(
    tmp_path: Path, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phase 2 does not compute the reference's log-probs again."""
    stop = signal.SIGTERM if phase.script is SFT else signal.SIGINT
    file, report, whole = phase.config_in(tmp_path), training.Reporter.on_log, phase.whole

    def signal_at_step_6(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        report(self, args, state, control, **more)
        if state.global_step == 6:
            os.kill(os.getpid(), stop)

    monkeypatch.setattr(training.Reporter, "on_log", signal_at_step_6)
    with pytest.raises(SystemExit) as stopped:
        phase.train("--config", str(file))
    assert stopped.value.code == 128 + stop
    checkpoint.verify(tmp_path / "run" / "checkpoint-7")
    assert not (tmp_path / "run" / "final").exists()
    monkeypatch.undo()
    monkeypatch.setattr(DPOTrainer, "compute_ref_log_probs", lambda *_, **__: pytest.fail("computed again"))
    phase.train("--config", str(file), "--resume")
    for figure in ("loss", "grad_norm", "num_tokens"):
        assert rows_of(tmp_path / "run", figure) == rows_of(whole, figure)
    assert same_weights(tmp_path / "run", whole)


class Waits(TorchDispatchMode):
    """Counts where TRL's trainers turn a tensor into a number, or choose by a mask, in their loss."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            callers = [frame.filename for frame in traceback.extract_stack(limit=5)]
            self.count += any(name.endswith(("sft_trainer.py", "dpo_trainer.py")) for name in callers)
        return func(*args, **(kwargs or {}))


def test_figures_wait_until_they_are_logged_and_are_those_of_trl(
    tmp_path: Path, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, rows, waits = AheadTrainer.compute_loss, [], []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Waits() as mode:
            loss = compute(self, *args, **kwargs)
        waits.append(mode.count if self.model.training else 0)
        return loss

    settled = {"max_steps": 2, "save_steps": 2, "gradient_accumulation_steps": 2}
    for ahead in (True, False):
        monkeypatch.setattr(AheadTrainer, "compute_loss", counted)
        if not ahead:
            monkeypatch.setattr(trl_trainers, "_NumbersLater", nullcontext)
        waits.clear()
        out = tmp_path / str(ahead)
        phase.train("--config", str(phase.config_in(tmp_path, **settled)), f"output_dir={out}")
        assert len(waits) >= 4 and (not any(waits)) is ahead
        read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rows.append([{key: row[key] for key in row if "second" not in key and "runtime" not in key} for row in read])
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    for one, other in zip(*rows, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.thorough
def test_micro_batches_by_memory_keep_the_steps_and_a_resumed_run_keeps_them(
    tmp_path: Path, phase: Phase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_memory = {"auto_find_batch_size": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    file, run = phase.config_in(tmp_path, max_steps=4, save_steps=2, **by_memory), tmp_path / "run"
    phase.train("--config", str(file))
    assert "micro-batches of 4, 1 of them a step" in capsys.readouterr().err
    assert rows_of(run)[1] == pytest.approx(rows_of(phase.whole)[1], rel=1e-4)
    for later in ("checkpoint-4", "final"):
        shutil.move(run / later, tmp_path / later)
    monkeypatch.setitem(plan_rows.MOST_TOKENS, "cpu", 1)
    phase.train("--config", str(file), "--resume")
    assert (run / "final" / "model.safetensors").read_bytes() == (tmp_path / "final" / "model.safetensors").read_bytes()


@pytest.mark.thorough
def test_compiled_layers_train_as_the_layers_do_and_resume_in_another_process(tmp_path: Path, phase: Phase) -> None:
    file, run = phase.config_in(tmp_path, max_steps=4, save_steps=2, torch_compile=True), tmp_path / "run"
    phase.train("--config", str(file))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert [*rows_of(run).values()] == pytest.approx([*rows_of(phase.whole).values()][:4], rel=0.05)
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoint-4")
    shutil.rmtree(again / "final")
    command = [f"{phase.script.name}.py", "--config", str(file), f"output_dir={again}", "--resume"]
    subprocess.run([sys.executable, *command], check=True, cwd=Path(__file__).parents[2])
    assert same_weights(run, again)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "phase"), [("closed", "sft"), ("unread", "sft"), ("unread", "dpo")], indirect=["phase"]
)
def test_a_run_that_nobody_reads_goes_on(tmp_path: Path, phase: Phase, how: str) -> None:
    """As `>&- 2>&-` and `2>&1 | head -1` leave it."""
    assert unheard(how, f"{phase.script.name}.py", "--config", str(phase.config_in(tmp_path))) == 0
    assert rows_of(tmp_path / "run") == rows_of(phase.whole)
    assert same_weights(tmp_path / "run", phase.whole)


def test_the_model_card_is_part_of_the_result(phase: Phase) -> None:
    card: Any = ModelCard.load(phase.whole / "final" / "README.md")
    assert card.data.library_name == "transformers" and phase.script.tag in card.data.tags
    assert "| loss" in card.text or "loss |" in card.text
    assert "README.md" in checkpoint.verify(phase.whole / "final")["files"]
    assert not (phase.whole / "README.md").exists()  # TRL's


@pytest.mark.thorough
def test_own_data_trains_with_the_reference_settings_on_a_laptop(tmp_path: Path, phase: Phase) -> None:
    """40 rows, no GPU, no config file: a few steps, of which the first and the last show a loss."""
    source = f"[{{kind: {phase.script.kind}, path: {phase.make_rows(tmp_path / 'mine.jsonl', 40)}}}]"
    where = [f"output_dir={tmp_path}/run", "report_to=none", "device=cpu", "data.decontaminate=false"]  # no network
    phase.train(f"model.name_or_path={phase.base}", "model.tuning=lora", f"data.sources={source}", *where)
    losses, final = rows_of(tmp_path / "run"), tmp_path / "run" / "final"
    assert list(losses) == [1, 3] and all(math.isfinite(loss) for loss in losses.values())
    assert phase.script is SFT or losses[1] == pytest.approx(math.log(2), abs=1e-3)
    assert {"README.md", "config.json"} <= checkpoint.verify(final)["files"].keys()
    trained, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (final, phase.base))
    assert trained.keys() == before.keys() and any(not torch.equal(trained[name], before[name]) for name in before)
