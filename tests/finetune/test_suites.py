"""Are the suites measured while phases 1 and 2 train, and does training stay the same to the bit?"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_phases import SFT, Phase, same_weights
from tiny_runs import python

from posttrain.config.loading import resolve
from posttrain.config.sft import SFTRun
from posttrain.finetune.suites import unchanged, why_not_measured
from posttrain.types import UserError

IFEVAL = {
    "key": 1, "prompt": "Name a colour without commas.",
    "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}],
}  # fmt: skip
CLOCK = ("seconds", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "seconds/evaluation")
FIGURES = {
    f"evaluation/{suite}/{key}"
    for suite, keys in {
        "math/embedded": ("accuracy",), "recall": ("accuracy",), "preferences": ("accuracy",),
        "instructions": ("accuracy", "instruction_accuracy", "left_out"), "repetition": ("seq_rep_4",),
    }.items()
    for key in (*keys, "n", "low", "high")
}  # fmt: skip


def suites(phase: Phase) -> list[str]:
    file = phase.folder / "ifeval.jsonl"
    file.write_text(json.dumps(IFEVAL) + "\n")
    return [
        "evaluation.every=4",
        "evaluation.budget=null",
        "evaluation.suites={math: {n: 3, max_new_tokens: 8}, repetition: {n: 3, max_new_tokens: 12},"
        f" recall: {{n: 2, max_new_tokens: 8}}, preferences: {{n: 4}}, instructions: {{source: {file},"
        " max_new_tokens: 8}}",
    ]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def measured(run: Path) -> dict[int, dict[str, Any]]:
    """Step -> the figures of the suites, without the clock."""
    found = [row for row in rows(run) if "evaluation/recall/accuracy" in row]
    assert len({row["step"] for row in found}) == len(found)
    return {row.pop("step"): {k: v for k, v in row.items() if k not in CLOCK} for row in found}


def trained(run: Path) -> list[dict[str, Any]]:
    """The rows of training, without the clock."""
    kept = [row for row in rows(run) if "evaluation/recall/accuracy" not in row]
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in kept]


@pytest.fixture(scope="session")
def with_suites(phase: Phase) -> Path:
    """A run of twelve steps whose suites are measured every four."""
    out = phase.folder / "suites"
    phase.train("--config", str(phase.config_in(phase.folder)), f"output_dir={out}", *suites(phase))
    return out


def test_suites_are_measured_and_training_stays_the_same(phase: Phase, with_suites: Path) -> None:
    found = measured(with_suites)
    assert list(found) == [0, 4, 8, 12] and found[0].keys() == FIGURES
    changes = {f"evaluation/{suite}/change" for suite in ("math/embedded", "recall", "preferences", "instructions")}
    assert found[4].keys() == FIGURES | changes | {f"{key}_error" for key in changes}
    assert found[0] != found[12]
    assert trained(with_suites) == trained(phase.whole)
    assert same_weights(with_suites, phase.whole)
    card = (with_suites / "final" / "README.md").read_text()
    assert "repetition, held-out prompts: repeated 4-grams" in card
    assert "held-out prompts" not in (phase.whole / "final" / "README.md").read_text()


@pytest.mark.thorough
def test_a_resumed_run_measures_as_the_whole_run(tmp_path: Path, phase: Phase, with_suites: Path) -> None:
    """Also the change since the first step, which the checkpoint keeps."""
    out = tmp_path / "run"
    shutil.copytree(with_suites, out)
    for name in ("checkpoint-8", "checkpoint-12", "final"):
        shutil.rmtree(out / name)
    config = out / "run_config.yaml"
    config.write_text(config.read_text().replace(str(with_suites), str(out)))
    file = phase.config_in(tmp_path)
    phase.train("--config", str(file), f"output_dir={out}", *suites(phase), "--resume")
    assert measured(out) == measured(with_suites) and trained(out) == trained(with_suites)
    assert same_weights(out, with_suites)
    kept = json.loads((out / "checkpoint-12" / "counts.json").read_text())["suites"]
    assert kept["times"]["trained"] > 0 and kept["times"]["spent"] > kept["times"]["cost"] > 0
    assert kept["first"].keys() == {"math/embedded", "recall", "preferences", "instructions"}


def test_a_budget_postpones_and_the_last_step_is_measured(
    tmp_path: Path, sft: Phase, capsys: pytest.CaptureFixture[str]
) -> None:
    words = suites(sft)
    words[:2] = ["evaluation.every=1", "evaluation.budget=1e-9"]
    sft.train("--config", str(sft.config_in(tmp_path, max_steps=4)), *words)
    assert list(measured(tmp_path / "run")) == [0, 4]
    said = re.findall(r"step (\d+): the suites \(math, .*\) are postponed, next (.*?)\.", capsys.readouterr().err)
    assert said == [("1", "after the last step")]


@pytest.mark.thorough
def test_random_numbers_of_training_are_left_alone(tmp_path: Path, sft: Phase) -> None:
    """Dropout draws from the random state of torch in every step."""
    file = sft.config_in(tmp_path, max_steps=4)
    drawn = ["model.tuning=lora", "model.lora.dropout=0.3"]
    for name, more in (("with", suites(sft)), ("without", [])):
        sft.train("--config", str(file), f"output_dir={tmp_path / name}", *drawn, *more)
    assert list(measured(tmp_path / "with")) == [0, 4]
    assert trained(tmp_path / "with") == trained(tmp_path / "without")
    assert same_weights(tmp_path / "with", tmp_path / "without")


def test_measuring_leaves_modes_settings_and_random_states() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2)))
    model[1].eval()
    modes, before = [module.training for module in model.modules()], torch.get_rng_state()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ZeroDivisionError), unchanged(model):
            assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
            assert not torch.are_deterministic_algorithms_enabled()
            torch.rand(3)
            raise ZeroDivisionError
        assert torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)


def test_a_prompt_without_room_is_told(tmp_path: Path, sft: Phase) -> None:
    wide = "evaluation.suites={recall: {n: 1, max_new_tokens: 4000}}"
    with pytest.raises(UserError, match=r"evaluation\.suites\.recall has a prompt .* max_position_embeddings=2048"):
        sft.train("--config", str(sft.config_in(tmp_path)), wide)


def test_a_sharded_model_is_said_to_be_measured_elsewhere(sft: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sft.config_in(sft.folder)
    cfg, without = resolve(SFTRun, file, suites(sft)), resolve(SFTRun, file)
    assert why_not_measured(cfg) == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "evaluation.suites is not measured: the launcher shards the model (fsdp2)" in why_not_measured(cfg)
    assert why_not_measured(without) == ""


@pytest.mark.slow
def test_two_processes_share_the_prompts(tmp_path: Path, sft: Phase) -> None:
    file = sft.config_in(tmp_path, max_steps=4, per_device_train_batch_size=2)
    launched = python(
        "-m", "posttrain.runtime.parallel", "--standalone", "--nproc_per_node", "2",
        f"{SFT.name}.py", "--config", str(file), *suites(sft),
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    one = tmp_path / "one"
    sft.train("--config", str(sft.config_in(tmp_path, max_steps=4)), f"output_dir={one}", *suites(sft))
    assert list(measured(tmp_path / "run")) == [0, 4]
    assert measured(tmp_path / "run")[0] == pytest.approx(measured(one)[0])
    two, alone = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "run", one))
    assert all(torch.allclose(two[name], alone[name], atol=1e-4) for name in two)
