"""Does attention by each row's length give what attention under a mask gives?

The kernel itself runs on a GPU alone (tests/project/test_gpu.py). Here `paged` takes its place: what torch documents of
`varlen_attn` with a page for each row, in operations of the CPU.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from test_sampler import build
from torch.nn import functional

from posttrain.models import row_attention

since_torch_2_12 = pytest.mark.skipif(
    "block_table" not in signature(row_attention.varlen_attn or print).parameters, reason="torch < 2.12"
)


def paged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    rows, heads, size = query.shape
    pages, length, key_heads, _ = key.shape
    assert pages >= rows and length == max_k and length % row_attention.PAGE == 0 and max_q == 1
    assert query.dtype == key.dtype and key.stride(-1) == value.stride(-1) == 1
    assert cu_seq_q.shape == cu_seq_k.shape == (rows + 1,) and block_table.shape == (rows, 1)
    assert {each.dtype for each in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert enable_gqa == (heads > key_heads) and seqused_k.is_contiguous()
    keys, values = (each[block_table[:, 0].long()].transpose(1, 2) for each in (key, value))
    seen = torch.arange(length) < seqused_k[:, None, None, None]
    grouped = query.view(rows, key_heads, -1, size)
    return functional.scaled_dot_product_attention(grouped, keys, values, seen, scale=scale).reshape(query.shape)


def either(*given: Any, **named: Any) -> torch.Tensor:
    """The stand-in also for packed rows: their queries, keys and values, (T, heads, D), and their bounds."""
    if named.get("window_size") != (-1, 0):
        return paged(*given, **named)
    query, key, value, bounds, same, longest, _ = given
    assert bounds is same and bounds.dtype == torch.int32 and longest == bounds.diff().max() and "enable_gqa" in named
    mixed = [
        functional.scaled_dot_product_attention(*row, is_causal=True, scale=named["scale"], enable_gqa=True)
        for row in zip(
            *(each.transpose(0, 1).split(bounds.diff().tolist(), 1) for each in (query, key, value)), strict=True
        )
    ]
    return torch.cat(mixed, 1).transpose(0, 1)


def ragged(rows: int, heads: int, group: int, size: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """A query for each of some adjacent rows of a larger cache, whose lengths differ."""
    torch.manual_seed(rows + group)
    made = {"query": torch.randn(rows, heads, group, size), "length": torch.randint(1, 513, (rows,))}
    made["length"][:2] = torch.tensor([1, 512])
    cache = {name: torch.randn(rows + 2, heads, 768, size)[:rows, :, :512] for name in ("key", "value")}
    return {name: each.to(device, None if name == "length" else dtype) for name, each in (made | cache).items()}


def both(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by length, and under a mask."""
    query, key, value, length_B = (given[name] for name in ("query", "key", "value", "length"))
    seen = torch.arange(key.shape[2], device=key.device) < length_B[:, None, None, None]
    mask = seen.expand(-1, -1, query.shape[2], -1)
    with row_attention.by_length(length_B, key.shape[2]):
        ours = row_attention.attend(query, key, value, mask, 0.2)
    return ours, row_attention.attend(query, key, value, mask, 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_what_a_row_attends_to(monkeypatch: pytest.MonkeyPatch, group: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(row_attention, "varlen_attn", paged)
    ours, masked = both(ragged(5, 3, group, 64, dtype))
    assert ours.dtype == masked.dtype and ours.shape == masked.shape
    torch.testing.assert_close(ours, masked)


@since_torch_2_12
def test_torch_s_kernel_takes_these_arguments() -> None:
    """Its shapes, on the device meta, which computes nothing."""
    given = {name: each.to("meta") for name, each in ragged(5, 3, 7, 64, torch.bfloat16).items()}
    with row_attention.by_length(given["length"], 512):
        found = row_attention.attend(given["query"], given["key"], given["value"], given["query"], 0.2)
    assert found.shape == (5, 3, 7, 64) and found.dtype == torch.bfloat16
    names = signature(row_attention.varlen_attn).parameters.keys()
    assert signature(paged).parameters.keys() <= names, "the stand-in has no argument of its own"


def test_which_models_have_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    assert not row_attention.has_kernel(model, torch.bfloat16), "on a CPU"
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(row_attention, "varlen_attn", paged)
    assert row_attention.has_kernel(model, torch.bfloat16) and not row_attention.has_kernel(model, torch.float32)
    model.config._attn_implementation = "eager"
    assert not row_attention.has_kernel(model, torch.bfloat16)
    monkeypatch.setattr(row_attention, "varlen_attn", lambda query, key: query)  # before torch 2.12
    model.config._attn_implementation = "sdpa"
    assert not row_attention.has_kernel(model, torch.bfloat16)
