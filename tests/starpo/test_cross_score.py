"""Are cross scores those of plain forward passes, whatever the batching, and are the right pairs chosen?"""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from posttrain.models import forward
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.starpo.monitoring.cross_score import ReasonedTurn, cross_scores, first_turn_pairs, trajectory_pairs

SIZES = {
    "vocab_size": 71, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(hidden_size=32, **SIZES))
    if kind == "llama-eager":
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, **SIZES))
        model.set_attn_implementation("eager")
        return model
    if kind == "sliding":
        return MistralForCausalLM(MistralConfig(hidden_size=32, sliding_window=4, **SIZES))
    tied = kind == "convgpt-tied"
    return ConvGPTForCausalLM(ConvGPTConfig(hidden_size=256, tie_word_embeddings=tied, **SIZES))


def ragged(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 71, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = ragged((9, 23, 1, 2, 14), 1)
REASONINGS = ragged((5, 1, 12, 12, 3, 30), 2)


@torch.no_grad()
def slow_scores(model: PreTrainedModel, temperature: float) -> torch.Tensor:
    table = torch.zeros(len(REASONINGS), len(PROMPTS))
    for r, reasoning in enumerate(REASONINGS):
        for n, prompt in enumerate(PROMPTS):
            logits = model(input_ids=torch.tensor([prompt + reasoning])).logits[0] / temperature
            logprobs = logits.log_softmax(-1)
            for t, token in enumerate(reasoning):
                table[r, n] += logprobs[len(prompt) + t - 1, token]
    return table


@pytest.mark.parametrize("kind", ["llama", "llama-eager", "convgpt", "convgpt-tied"])
@pytest.mark.parametrize(("temperature", "token_budget"), [(1.0, 16384), (0.6, 25), (1.0, 1)])
def test_equals_plain_forward_passes(kind: str, temperature: float, token_budget: int) -> None:
    model = build(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cross_scores(model, PROMPTS, REASONINGS, token_budget=token_budget, temperature=temperature)
    assert model.training  # as it came
    assert found.shape == (6, 5) and not found.requires_grad
    expected = slow_scores(model.eval(), temperature)
    assert expected.std() > 1  # a model that says something
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-5)


def test_a_model_with_another_cache_reads_whole_sequences_and_says_so() -> None:
    model = build("sliding")
    with pytest.warns(UserWarning, match="MistralForCausalLM: no standard KV cache"):
        found = cross_scores(model, PROMPTS, REASONINGS, token_budget=64)
    assert torch.allclose(found, slow_scores(model.eval(), 1.0), atol=1e-4, rtol=1e-5)


def test_a_cache_that_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").eval()
    layer = forward._PrefixLayer
    whole = layer.update
    monkeypatch.setattr(layer, "update", lambda self, k, v, *a: whole(self, k * 1.01, v * 1.5, *a))
    with pytest.warns(UserWarning, match="no standard KV cache"):
        found = cross_scores(model, PROMPTS, REASONINGS)
    assert torch.allclose(found, slow_scores(model, 1.0), atol=1e-4, rtol=1e-5)


def test_nothing_to_score() -> None:
    model = build("llama")
    assert cross_scores(model, [], REASONINGS).shape == (6, 0)
    assert cross_scores(model, PROMPTS, []).shape == (0, 5)
    with pytest.raises(AssertionError, match="needs a token"):
        cross_scores(model, PROMPTS, [[]])


# ------------------------------------------------------------------------------------------------------ which pairs


def episodes() -> list[list[ReasonedTurn]]:
    """Groups 0 to 3 of four samples and three turns; groups 1 and 3 play the same level; one thought is missing."""
    out = []
    for group in range(4):
        for sample in range(4):
            level = [100 + group % 2 if group in (1, 3) else 100 + 10 * group]
            thoughts = [[group, sample, turn] for turn in range(3)]
            if (group, sample) == (0, 2):
                thoughts[0] = []
            turns = enumerate(thoughts)
            out.append([ReasonedTurn([*level, *([sample] * n)], thought, group) for n, thought in turns])
    return out


def test_first_turns_have_a_column_for_each_level() -> None:
    pairs = first_turn_pairs(episodes(), 64, 0, "mi", 5)
    assert pairs.prompts == [[100], [101], [120]] and pairs.weights == [1, 2, 1]  # groups 1 and 3 share theirs
    assert len(pairs.reasonings) == 15 and [0, 2, 0] not in pairs.reasonings
    for reasoning, own in zip(pairs.reasonings, pairs.own, strict=True):
        assert reasoning[2] == 0 and own == {0: 0, 1: 1, 2: 2, 3: 1}[reasoning[0]]


def test_draws_depend_on_the_address_alone() -> None:
    for choose in (first_turn_pairs, trajectory_pairs):
        drawn = [choose(episodes(), 6, 0, "mi", step) for step in range(20)]
        assert drawn == [choose(episodes(), 6, 0, "mi", step) for step in range(20)]
        assert all(len(pairs.reasonings) == 6 for pairs in drawn)
        assert len({str(pairs) for pairs in drawn}) > 15
        assert {str(thought) for pairs in drawn for thought in pairs.reasonings} >= {"[3, 3, 0]", "[0, 0, 0]"}


def test_trajectories_give_one_turn_each_and_a_column_a_turn() -> None:
    seen = set()
    for step in range(40):
        pairs = trajectory_pairs(episodes(), 64, 0, "mi", step)
        assert len(pairs.reasonings) == 16 == sum(pairs.weights)
        assert len({tuple(thought[:2]) for thought in pairs.reasonings}) == 16  # every episode once
        assert len({tuple(prompt) for prompt in pairs.prompts}) == len(pairs.prompts)
        for n, weight in enumerate(pairs.weights):
            assert weight == pairs.own.count(n)
        for thought, own in zip(pairs.reasonings, pairs.own, strict=True):
            assert len(pairs.prompts[own]) == 1 + thought[2]
            seen.add(tuple(thought))
    assert len(seen) == 47  # every turn that has a thought is drawn sooner or later


def test_no_thoughts_no_pairs() -> None:
    silent = [[ReasonedTurn([1], [], 0), ReasonedTurn([1, 2], [], 0)], []]
    for choose in (first_turn_pairs, trajectory_pairs):
        assert choose(silent, 8, 0) == ([], [], [], [])
