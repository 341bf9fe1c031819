"""What will this episode still earn?  A value for every sampled token, from the state in which it was sampled.

Two kinds: `shared` puts a value head on the policy's own trunk; `separate` is a copy of the whole trunk, as in PPO's
first implementations and in RAGEN.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from posttrain.models import trained_states

FILE = "critic.safetensors"


class Critic(torch.nn.Module):
    """`model` is the policy, a transformers model or peft's wrapper around one; values start at 0 everywhere."""

    def __init__(self, kind: str, model: Any) -> None:
        super().__init__()
        policy = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.kind = kind
        self.head = torch.nn.Linear(policy.get_output_embeddings().weight.shape[1], 1, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        # float32 like all that is trained, whatever the policy's frozen weights are
        self.copy = copy.deepcopy(policy).float().requires_grad_(True) if kind == "separate" else None
        if self.copy is not None:  # its output layer computes nothing
            self.copy.get_output_embeddings().requires_grad_(policy.config.tie_word_embeddings)

    def values(self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> torch.Tensor:
        """Return V of the state before each trained token, (S,), by the critic's own trunk; not for the shared kind."""
        assert self.copy is not None, "the shared trunk has already computed: use `of`"
        return self.of(trained_states(self.copy, rows, masks)[0])

    def of(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return V from the states of the trunk, (S,), in the head's own precision: GAE takes differences of values."""
        with torch.autocast(hidden_SD.device.type, enabled=False):
            return self.head(hidden_SD.to(self.head.weight.dtype))[:, 0]

    def own_parameters(self) -> list[torch.nn.Parameter]:
        """Return everything the critic learns beside the policy's parameters."""
        return [p for p in self.parameters() if p.requires_grad]

    def save(self, folder: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.named_parameters()}, folder / FILE)

    def load(self, folder: Path) -> None:
        saved, own = load_file(folder / FILE), dict(self.named_parameters())
        assert saved.keys() == own.keys(), "the critic of this checkpoint is of another kind"
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
