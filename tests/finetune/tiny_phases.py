"""What do the tests of phases 1 and 2 share?  A tiny model, rows, a config, and one whole run of each phase."""

from __future__ import annotations

import importlib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tiny_runs import conversations, preferences, settings, tiny_base
from transformers import PreTrainedTokenizerFast

from posttrain.config.shared import ModelSection
from posttrain.models import loading as models


class Script(NamedTuple):
    name: str
    kind: str  # of its rows
    tag: str  # in the model card
    figures: tuple[str, ...]  # of the held-out rows


PAIR_FIGURES = ("loss", "rewards/accuracies", "rewards/margins", "logps/chosen")
SFT = Script("train_phase1_sft", "messages", "sft", ("loss", "entropy", "mean_token_accuracy"))
DPO = Script("train_phase2_dpo", "preferences", "dpo", PAIR_FIGURES)


class Phase:
    """A phase that trains for seconds: of phase 2 the model is what phase 1 would have saved."""

    def __init__(self, script: Script, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.script, self.folder = script, folder
        self.base = tiny_base(folder / "base", tokenizer)
        self.rows = self.make_rows(folder / "rows.jsonl")
        if script is DPO:
            section = ModelSection(name_or_path=str(self.base))
            net, chat = models.load(section, device="cpu", chat_template=None)
            final = folder / "phase1" / "final"
            self.base = models.save(final, net, chat, {}, source=section, phase="phase1", step=1)

    def make_rows(self, file: Path, *count: int) -> Path:
        return (conversations if self.script is SFT else preferences)(file, *count)

    def train(self, *arguments: str) -> None:
        importlib.import_module(self.script.name).main(list(arguments))

    def config_in(self, folder: Path, **trainer: Any) -> Path:
        return settings(folder / "run.yaml", self.script.kind, self.base, self.rows, **trainer)

    @cached_property
    def whole(self) -> Path:
        """The folder of a run of twelve steps that nothing interrupted."""
        out = self.folder / "whole"
        self.train("--config", str(self.config_in(self.folder)), f"output_dir={out}")
        return out


def same_weights(one: Path, other: Path) -> bool:
    return (one / "final" / "model.safetensors").read_bytes() == (other / "final" / "model.safetensors").read_bytes()
