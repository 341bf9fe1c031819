"""Does StarPO learn?  Apart from test_phase3.py, so that another process can run it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from test_phase3 import rows, settings, taught, train
from tiny_runs import ROOT
from transformers import PreTrainedTokenizerFast

import envs
from posttrain.runtime import checkpoint


@pytest.mark.thorough
def test_it_learns_a_small_lake(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """From a player that walks at random to one that mostly knows where the goal is."""
    file = settings(
        tmp_path / "run.yaml",
        taught(tmp_path / "player" / "final", tiny_tokenizer, 200, layers=2),
        rollout={"groups": 12, "num_generations": 8},
        trainer={"max_steps": 9, "learning_rate": 1.5e-3, "warmup_steps": 2, "adam_beta2": 0.99},
        evaluation={"every": 9, "episodes": 20, "final_episodes": 20},
        checkpoint={"every": 100},
        transcripts={"every": 100},
        diagnostics={"every": 0},
    )
    train(file)
    success = [row["rollout/success"] for row in rows(tmp_path / "run") if "rollout/success" in row]
    before, after = sum(success[:3]) / 3, sum(success[-3:]) / 3  # 288 episodes each, on levels never seen before
    assert after > before + 0.12, f"{before:.2f} in the first three steps, {after:.2f} in the last three"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_the_environment_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """By the README's command, from phase 2 of the quickstart: validation success rises by at least 25 points."""
    model = ROOT / "runs" / "quickstart" / "phase2" / "final"
    if not model.is_dir():
        pytest.skip("needs `make quickstart`")
    spec = importlib.util.spec_from_file_location("line", ROOT / "examples" / "minimal_env.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(envs, "_ENVS", {**envs._ENVS, "line": module.Line})
    file = ROOT / "configs" / "quickstart" / "own_environment.yaml"
    train(file, "envs=[line]", f"output_dir={tmp_path / 'run'}", f"model.name_or_path={model}", f"seed={seed}")
    success = {row["step"]: row["evaluation/success"] for row in rows(tmp_path / "run") if "evaluation/success" in row}
    final = checkpoint.verify(tmp_path / "run" / "final")["meta"]["step"]
    assert success[final] >= success[0] + 0.25, success
