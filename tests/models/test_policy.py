"""Are the learner's log-probs, entropies and gradients those of the plain model, whatever the batching?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.models import output_layer
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.models.forward import attention_mask, backbone_states, microbatches, token_logprobs
from posttrain.plan.selftest import head_agrees, without_noise
from posttrain.types import UserError

SIZES = {
    "vocab_size": 71, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(params=["llama", "convgpt", "convgpt-tied"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(hidden_size=32, **SIZES))
    tied = request.param == "convgpt-tied"
    return ConvGPTForCausalLM(ConvGPTConfig(hidden_size=256, tie_word_embeddings=tied, **SIZES))


def ragged() -> tuple[list[list[int]], list[list[bool]]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 71, (n,), generator=generator).tolist() for n in (5, 17, 9, 2, 30)]
    masks = [[i > 0 and (i * 7 + len(row)) % 3 > 0 for i in range(len(row))] for row in rows]
    return rows, masks


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax_of_the_logits(model: PreTrainedModel, temperature: float) -> None:
    rows, masks = ragged()
    logprobs, entropy = token_logprobs(model, rows, masks, temperature)
    expected_logprobs, expected_entropy = [], []
    for row, mask in zip(rows, masks, strict=True):
        table = (model(torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
        for i, on in enumerate(mask):
            if on:
                expected_logprobs.append(table[i - 1, row[i]])
                expected_entropy.append(-(table[i - 1].exp() * table[i - 1]).sum())
    assert torch.allclose(logprobs, torch.stack(expected_logprobs), atol=1e-5)
    assert torch.allclose(entropy, torch.stack(expected_entropy), atol=1e-4)


def gradients(model: PreTrainedModel, batches: list[list[int]]) -> list[torch.Tensor]:
    rows, masks = ragged()
    weights = torch.linspace(-1, 1, sum(map(sum, masks)))
    starts = [sum(map(sum, masks[:i])) for i in range(len(rows))]
    model.zero_grad()
    for batch in batches:
        logprobs, entropy = token_logprobs(model, [rows[i] for i in batch], [masks[i] for i in batch])
        weight = torch.cat([weights[starts[i] : starts[i] + sum(masks[i])] for i in batch])
        ((logprobs * weight).sum() / len(weights) - 0.1 * entropy.sum() / len(weights)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_micro_batching_changes_no_gradient(model: PreTrainedModel) -> None:
    whole = gradients(model, [[0, 1, 2, 3, 4]])
    split = gradients(model, [[4], [1, 2], [0, 3]])
    for a, b in zip(whole, split, strict=True):
        assert (a - b).norm() <= 1e-5 * (a.norm() + 1e-8)


def test_padding_and_unmasked_text_get_no_gradient_of_their_own(model: PreTrainedModel) -> None:
    """What stands behind the last trained token cannot matter."""
    rows, masks = ragged()
    longer = [[*row, 3, 4, 5] for row in rows]
    silent = [[*mask, False, False, False] for mask in masks]
    a, b = token_logprobs(model, rows, masks), token_logprobs(model, longer, silent)
    assert torch.allclose(a[0], b[0], atol=1e-6) and torch.allclose(a[1], b[1], atol=1e-5)


@given(st.lists(st.integers(1, 200), min_size=0, max_size=40), st.integers(1, 500))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(microbatches(lengths, budget))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_heads_that_share_keys_ask_them_together(key_value_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_key_value_heads": key_value_heads}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, **sizes)).double()
    ids = torch.randint(0, 71, (3, 11))
    sees = (torch.rand(3, 11, 11) < 0.5).tril() | torch.eye(11, dtype=torch.bool)
    mask = attention_mask(model, sees)
    weight = torch.randn(3, 11, 32, dtype=torch.float64)
    transformers_own = torch.nn.functional.scaled_dot_product_attention
    asked: list[int] = []

    def attend(query: torch.Tensor, key: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        asked.append(key.shape[1])
        return transformers_own(query, key, *args, **settings)  # type: ignore[arg-type]

    def results(ours: bool) -> list[torch.Tensor]:
        model.zero_grad()
        if ours:
            everywhere = torch.ones(ids.shape, dtype=torch.bool)
            states = backbone_states(model, everywhere, input_ids=ids, attention_mask=mask, use_cache=False).view(
                weight.shape
            )
        else:
            states = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        (states * weight).sum().backward()
        return [states] + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    own = results(ours=True)
    assert set(asked) == {key_value_heads}
    for mine, theirs in zip(own, results(ours=False), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
    assert key_value_heads == 4 or 4 in asked  # outside `read`, transformers copies


SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_windows_and_checkpointing_go_together() -> None:
    """Layers are run again in the backward pass; they must then be what they were."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(sliding_window=8, **SMALL)).train()
    rows, masks = [list(range(1, 40))], [[False] * 5 + [True] * 34]

    def gradient() -> torch.Tensor:
        model.zero_grad()
        token_logprobs(model, rows, masks)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = gradient()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.allclose(gradient(), plain, atol=1e-6)


def test_somebody_elses_attention_stays() -> None:
    def own(*args: Any, **settings: Any) -> Any:
        asked.append(1)
        return sdpa_attention_forward(*args, **settings)

    asked: list[int] = []
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    ids, everywhere = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.bool)
    mask = attention_mask(model, torch.ones(1, 3, 3, dtype=torch.bool).tril())
    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        backbone_states(model, everywhere, input_ids=ids, attention_mask=mask, use_cache=False)
        assert asked and ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    backbone_states(model, everywhere, input_ids=ids, attention_mask=mask, use_cache=False)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_logits_that_are_more_than_a_product_are_known_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 1}
    gemma = AutoConfig.for_model("recurrent_gemma", lru_width=32, **sizes)
    capped = AutoModelForCausalLM.from_config(gemma).eval()
    assert gemma.logits_soft_cap == 30.0 and head_agrees(capped)
    monkeypatch.setattr(output_layer, "soft_cap", lambda config: None)
    assert not head_agrees(capped)
    multiplied = AutoModelForCausalLM.from_config(AutoConfig.for_model("hyperclovax", logits_scaling=4.0, **SMALL))
    assert not head_agrees(multiplied)


def test_heads_agree(model: Any) -> None:
    assert head_agrees(model) and head_agrees(model.to(torch.bfloat16))


NOISY: dict[str, dict[str, Any]] = {  # rates that some set by default and some only where a config says so
    "opt": dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
                layerdrop=0.3, attention_dropout=0.2),
    "xglm": dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
    "biogpt": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
    "gpt_bigcode": dict(n_embd=32, n_layer=2, n_head=4, n_inner=48),
    "starcoder2": dict(SMALL, residual_dropout=0.3, embedding_dropout=0.3, attention_dropout=0.3),
    "falcon": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.3,
                   attention_dropout=0.3),
    "mpt": dict(d_model=32, n_layers=2, n_heads=4, attn_config={"attn_pdrop": 1}),
    "mixtral": dict(SMALL, num_local_experts=4, router_jitter_noise=0.5),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.3, attention_dropout=0.3),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOISY)
def test_no_noise_is_left_in_training_mode(kind: str) -> None:
    torch.manual_seed(0)
    shape = NOISY[kind] | {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    for parameter in model.parameters():  # large enough for noise to show
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(3, 40)[None]

    def logits(training: bool) -> torch.Tensor:
        return model.train(training)(input_ids=ids, use_cache=False).logits.detach()

    expected = logits(training=False)
    assert not torch.allclose(logits(training=True), expected, atol=1e-2)
    state = torch.get_rng_state()
    without_noise(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(training=True), expected) and torch.equal(logits(training=False), expected)


def test_noise_that_cannot_be_switched_off_is_refused() -> None:
    """PhiMoE draws its experts in training mode, and its jitter decides on experts in evaluation mode as well."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", num_local_experts=4, **SMALL))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with pytest.raises(UserError, match="other probabilities in training mode"):
        without_noise(model.train())
    assert model.training
