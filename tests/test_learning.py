"""Does StarPO learn?  Apart from test_phase3.py, so that another process can run it."""

from __future__ import annotations

from pathlib import Path

from test_phase3 import rows, settings, taught, train
from transformers import PreTrainedTokenizerFast


def test_it_learns_a_small_lake(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """From a player that walks at random to one that mostly knows where the goal is."""
    file = settings(
        tmp_path / "run.yaml",
        taught(tmp_path / "player" / "final", tiny_tokenizer, 200),
        rollout={"groups": 16, "num_generations": 8},
        trainer={"max_steps": 9, "learning_rate": 1.5e-3, "warmup_steps": 2, "adam_beta2": 0.99},
        evaluation={"every": 9, "episodes": 20, "final_episodes": 20},
        checkpoint={"every": 100},
        transcripts={"every": 100},
        diagnostics={"every": 0},
    )
    train(file)
    success = [row["rollout/success"] for row in rows(tmp_path / "run") if "rollout/success" in row]
    before, after = sum(success[:3]) / 3, sum(success[-3:]) / 3  # 384 episodes each, on levels never seen before
    assert after > before + 0.12, f"{before:.2f} in the first three steps, {after:.2f} in the last three"
