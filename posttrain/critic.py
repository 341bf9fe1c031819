"""What will this episode still earn?  A value for every sampled token, from the state in which it was sampled.

Three kinds: `shared` puts a value head on the policy's own trunk; `lora` gives the critic an adapter of its own on the
frozen base of a LoRA policy; `separate` is a copy of the whole trunk, as in PPO's first implementations.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from posttrain.policy import trained_states

FILE = "critic.safetensors"
ADAPTER = "critic"


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
        if self.copy is not None:  # its output layer is not asked
            self.copy.get_output_embeddings().requires_grad_(policy.config.tie_word_embeddings)
        self._wrapped = [model]  # in a list: the policy is no part of this module
        if kind == "lora":
            model.add_adapter(ADAPTER, model.peft_config["default"])
            self._both_learn()

    def values(self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> torch.Tensor:
        """V of the state before each trained token, (S,), by the critic's own trunk; not for the shared kind."""
        assert self.kind != "shared", "the shared trunk has already been asked: use `of`"
        policy: Any = self.copy if self.copy is not None else self._wrapped[0].get_base_model()
        return self.of(trained_states(policy, rows, masks)[0])

    def of(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """V from the states of the trunk, (S,)."""
        return self.head(hidden_SD.to(self.head.weight.dtype))[:, 0]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The critic's adapter in the policy's place; forward and backward passes of its values belong in here."""
        if self.kind != "lora":
            yield
            return
        model = self._wrapped[0]
        model.base_model.set_adapter(ADAPTER)
        self._both_learn()
        try:
            yield
        finally:
            model.base_model.set_adapter("default")
            self._both_learn()

    def own_parameters(self) -> list[torch.nn.Parameter]:
        """Everything the critic learns beside the policy's parameters."""
        own = [p for p in self.parameters() if p.requires_grad]
        return own + (list(self._adapter().values()) if self.kind == "lora" else [])

    def save(self, folder: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self._tensors().items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        saved = load_file(folder / FILE)
        own = self._tensors()
        assert saved.keys() == own.keys(), "the critic of this checkpoint is of another kind"
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = dict(self.named_parameters())
        return own | {f"adapter.{name}": p for name, p in self._adapter().items()}

    def _adapter(self) -> dict[str, torch.nn.Parameter]:
        if self.kind != "lora":
            return {}
        return {name: p for name, p in self._wrapped[0].named_parameters() if f".{ADAPTER}." in name}

    def _both_learn(self) -> None:
        """peft freezes the adapter that is not active; both belong to the optimizer."""
        for name, parameter in self._wrapped[0].named_parameters():
            if ".default." in name or f".{ADAPTER}." in name:
                parameter.requires_grad_(True)
