"""Is an update the same whether shared prefixes are computed one time or in every row?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.models.forward import Prefixes, prefix_of, token_logprobs, trained_states, worth_sharing
from posttrain.models.output_layer import head_logprobs
from posttrain.plan.selftest import can_share_prefixes

SIZES: dict[str, Any] = {
    "vocab_size": 71, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(params=["llama", "llama-eager", "qwen3", "convgpt", "convgpt-tied"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    if request.param.startswith("llama"):
        attention = "eager" if request.param == "llama-eager" else "sdpa"
        model: Any = LlamaForCausalLM(LlamaConfig(hidden_size=32, **SIZES))
        model.set_attn_implementation(attention)
        return model
    if request.param == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(hidden_size=32, **SIZES))
    tied = request.param == "convgpt-tied"
    return ConvGPTForCausalLM(ConvGPTConfig(hidden_size=256, tie_word_embeddings=tied, **SIZES))


def ragged() -> tuple[list[list[int]], list[list[bool]]]:
    """Three rows of one prompt, two of another, one alone, one whose first token is the only one that is read."""
    generator = torch.Generator().manual_seed(1)
    first, second, alone = (torch.randint(1, 71, (n,), generator=generator).tolist() for n in (9, 5, 7))
    rows, masks = [], []
    for prompt, said in [(first, 3), (second, 12), (first, 20), (alone, 6), (second, 1), (first, 7), (first[:1], 4)]:
        tail = torch.randint(1, 71, (said,), generator=generator).tolist()
        rows.append([*prompt, *tail])
        masks.append([False] * len(prompt) + [n == 0 or n % 3 > 0 for n in range(said)])
    return rows, masks


def loss_of(logprobs_S: torch.Tensor, entropy_S: torch.Tensor, place: int) -> torch.Tensor:
    weight_S = torch.linspace(-1, 1, len(logprobs_S), dtype=logprobs_S.dtype) + place
    return (weight_S * logprobs_S).sum() - 0.1 * entropy_S.sum()


def gradient(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_gradients_are_the_same_in_every_run() -> None:
    """Bit by bit, with more than one thread: the gradients of many rows are added up in the same order."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, **SIZES))
    prompt = torch.randint(1, 71, (64,)).tolist()
    rows = [[*prompt, *tail] for tail in torch.randint(1, 71, (64, 4)).tolist()]
    masks = [[False] * 64 + [True] * 4] * len(rows)
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for _ in range(8):
            model.zero_grad()
            prefixes = Prefixes(model, [tuple(prompt[:63])])
            hidden_SD, _ = prefixes.states(rows, masks)
            hidden_SD.sin().sum().backward()
            prefixes.backward()
            found.append(gradient(model))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)


def test_gradients_are_those_of_whole_rows(model: PreTrainedModel) -> None:
    model = model.double()
    rows, masks = ragged()
    shared = worth_sharing(list(zip(rows, masks, strict=True)), 100)
    assert sorted(map(len, shared)) == [4, 8]
    batches = [[0, 1, 3], [2, 4], [5, 6], [3]]
    read = []
    model.base_model.register_forward_pre_hook(
        lambda m, a, given: read.append(given["input_ids"].shape), with_kwargs=True
    )

    def pick(values: list[Any], batch: list[int]) -> list[Any]:
        return [values[i] for i in batch]

    for place, batch in enumerate(batches):
        loss_of(*token_logprobs(model, pick(rows, batch), pick(masks, batch)), place).backward()
    expected = gradient(model)
    model.zero_grad()
    read.clear()
    prefixes = Prefixes(model, shared)
    for place, batch in enumerate(batches):
        states = prefixes.states(pick(rows, batch), pick(masks, batch))
        loss_of(*head_logprobs(model, *states), place).backward()
    prefixes.backward()
    assert (gradient(model) - expected).norm() <= 1e-6 * expected.norm()
    assert read == [(2, 8), (3, 13), (2, 21), (2, 8), (1, 13)], "prefixes once, then what each row adds"


def test_nothing_shared_is_the_plain_pass(model: PreTrainedModel) -> None:
    rows, masks = ragged()
    prefixes = Prefixes(model, [])
    a, b = head_logprobs(model, *prefixes.states(rows, masks)), token_logprobs(model, rows, masks)
    assert torch.equal(a[0], b[0])
    prefixes.backward()


def test_only_models_that_can_share_do(model: PreTrainedModel) -> None:
    assert can_share_prefixes(model)
    if model.config.model_type == "qwen3":
        config: Any = copy.deepcopy(model.config)
        config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 4
        assert not can_share_prefixes(Qwen3ForCausalLM(config))


def test_a_model_without_keys_and_values_does_not_share() -> None:
    sizes: dict[str, Any] = {"vocab_size": 71, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    assert not can_share_prefixes(MambaForCausalLM(MambaConfig(**sizes)))


ALIBI: dict[str, dict[str, Any]] = {
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
}


@pytest.mark.parametrize("kind", [*ALIBI, "opt", "gpt2", "gptj"])
def test_the_self_test_says_whether_padded_prefixes_are_read_right(kind: str) -> None:
    """A bias by the places of keys counts the padding of a prefix beside a longer one; learnt positions do not."""
    torch.manual_seed(0)
    shape = ALIBI.get(kind) or {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    if kind == "opt":
        shape = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape["word_embed_proj_dim"] = 32
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    net: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=71, **ids, **shape)).eval()
    rows, masks = ragged()
    with torch.no_grad():
        try:
            whole_SD, _ = trained_states(net, rows, masks)
            shared = worth_sharing(list(zip(rows, masks, strict=True)), 100)
            same = torch.allclose(Prefixes(net, shared).states(rows, masks)[0], whole_SD, atol=1e-5)
        except (RuntimeError, ValueError):  # it takes no such mask
            same = False
    assert can_share_prefixes(net) == same == (kind not in ALIBI)


def test_a_wrong_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, **SIZES))
    honest = Prefixes._run

    def shifted(self, ids_BQ, positions_BQ, *others):
        return honest(self, ids_BQ, positions_BQ * 0, *others)

    monkeypatch.setattr(Prefixes, "_run", shifted)
    assert not can_share_prefixes(model)


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 60))
def test_what_is_shared_is_common_and_within_the_budget(kinds: list[int], budget: int) -> None:
    rows = [([kind] * (2 * kind + 1) + [9], [False] * (2 * kind + 1) + [True]) for kind in kinds]
    shared = worth_sharing(rows, budget)
    assert len(set(shared)) == len(shared) and max(map(len, shared), default=0) * len(shared) <= budget
    for key in shared:
        assert len(key) > 0 and sum(prefix_of(*row) == key for row in rows) > 1
    if budget >= 50:
        assert len(shared) == len({kind for kind in kinds if kind > 0 and kinds.count(kind) > 1})
