"""Does StarPO learn?  Apart from test_phase3.py, so that another process can run it."""

from __future__ import annotations

from pathlib import Path

from test_phase3 import rows, settings, taught, train
from transformers import PreTrainedTokenizerFast


def test_it_learns_a_small_lake(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """From a player that walks at random to one that mostly knows where the goal is."""
    file = settings(
        tmp_path / "run.yaml",
        taught(tmp_path / "player" / "final", tiny_tokenizer, 250),
        rollout={"groups": 16, "num_generations": 8},
        trainer={"max_steps": 15, "learning_rate": 1.5e-3, "warmup_steps": 2, "adam_beta2": 0.99},
        evaluation={"every": 15, "episodes": 100, "final_episodes": 100},
        checkpoint={"every": 100},
        transcripts={"every": 100},
        diagnostics={"every": 0},
    )
    train(file)
    table = rows(tmp_path / "run")
    before = next(row["evaluation/frozen_lake/high"] for row in table if row["step"] == 0)
    after = next(row["final/frozen_lake/low"] for row in table if "final/success" in row)
    assert after > before, f"upper end before {before}, lower end after {after}"
