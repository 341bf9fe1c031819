"""Do packed rows give the loss and the gradients of separate rows under flex attention?

TRL's collator lays them one behind another; transformers makes a mask of blocks from the positions and calls torch's
flex attention, which has no gradients on a CPU. `dense` takes its place: attention under the mask that the blocks stand
for. tests/project/test_gpu.py runs the same with flex attention itself.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import SIZES
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import flex_attention
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from posttrain.models import convgpt

LENGTHS = (40, 150, 25)


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: BlockMask, scale: float, **_: Any
) -> torch.Tensor:
    seen = create_mask(block_mask.mask_mod, 1, 1, query.shape[2], key.shape[2], query.device)
    return functional.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True)


def model_of(kind: str) -> Any:
    assert convgpt, "registered"
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 256 if kind == "convgpt" else 64, "head_dim": 16}  # no kernel for smaller heads
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).train()


def gradients_agree(kind: str, device: str) -> None:
    rows = [[3 + (7 * i + length) % 500 for i in range(length)] for length in LENGTHS]
    batch = DataCollatorForLanguageModeling(0, padding_free=True)([{"input_ids": row} for row in rows])
    batch = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
    packed, apart = model_of(kind).to(device), model_of(kind).to(device)
    packed.set_attn_implementation("flex_attention")
    found = packed(**batch, use_cache=False).loss
    found.backward()
    expected = torch.zeros((), device=device)
    for row in rows:
        ids = torch.tensor([row], device=device)
        loss = apart(input_ids=ids, labels=ids, use_cache=False).loss * (len(row) - 1) / (sum(LENGTHS) - len(LENGTHS))
        loss.backward()
        expected += loss.detach()
    torch.testing.assert_close(found.detach(), expected)
    theirs = dict(apart.named_parameters())
    for name, weight in packed.named_parameters():
        assert (weight.grad - theirs[name].grad).norm() <= 1e-2 * theirs[name].grad.norm() + 1e-7, name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "convgpt"])
def test_loss_and_gradients_are_those_of_separate_rows(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", dense)
    gradients_agree(kind, "cpu")
