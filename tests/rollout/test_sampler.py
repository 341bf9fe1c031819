"""Do both engines sample exactly what the plain model would, ragged, over several turns, whatever the batch?"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.models.fused import fused_weights
from posttrain.plan import selftest
from posttrain.rollout import engine as engines
from posttrain.rollout.engine import open_engine, why_unfit
from posttrain.rollout.engines import slots
from posttrain.rollout.engines.replay import ReplaySampler
from posttrain.rollout.engines.sampling import sample_tokens, uniforms
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.types import SamplingParams, UserError

VOCABULARY = 61
STOP, PAD = 2, 0


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "initializer_range": 0.3,
        "max_position_embeddings": 512,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": STOP,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(hidden_size=32, **sizes)).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(hidden_size=32, **sizes)).eval()
    tied = kind == "convgpt-tied"
    config = ConvGPTConfig(hidden_size=256, conv_kernel_h_w=5, tie_word_embeddings=tied, **sizes)
    return ConvGPTForCausalLM(config).eval()


@pytest.fixture(scope="module", params=["llama", "qwen3", "convgpt", "convgpt-tied"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 11, 12, 13], [5, 6, 7], [30, 31], [9, 8, 7, 6, 5, 4, 3, 11, 12, 13]]
REPLIES = [[20, 21], [22], [23, 24, 25, 26], [27, 28], [29] * 7]


def conversation(sampler, params: SamplingParams, turns: int = 3, rows: tuple[int, ...] = (0, 1, 2, 3, 4)):
    handles = sampler.open([PROMPTS[row] for row in rows])
    ids = [list(PROMPTS[row]) for row in rows]
    spans = [[] for _ in rows]
    for turn in range(turns):
        active = list(range(len(rows)))[turn % 2 :]  # not every conversation takes part in every turn
        seeds = [1000 * rows[i] + turn for i in active]
        done = sampler.sample([handles[i] for i in active], params, seeds)
        for i, completion in zip(active, done, strict=True):
            spans[i].append((len(ids[i]), completion))
            ids[i] += completion.ids + REPLIES[rows[i]]
            sampler.append(handles[i], REPLIES[rows[i]])
    sampler.close(handles)
    return ids, spans


@torch.no_grad()
def check_logprobs(model: PreTrainedModel, ids, spans, temperature: float) -> None:
    for row, row_spans in zip(ids, spans, strict=True):
        logits = model(input_ids=torch.tensor([row])).logits[0].float()
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        for start, completion in row_spans:
            for n, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
                assert logprobs[start + n - 1, token].item() == pytest.approx(logprob, abs=1e-4)
                if temperature == 0:
                    assert logits[start + n - 1].argmax().item() == token
            assert completion.finished == (completion.ids[-1] == STOP)
            assert STOP not in completion.ids[:-1]


@pytest.mark.parametrize("engine", [SlotSampler, ReplaySampler])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_every_sampled_logprob_is_the_models_own(model: PreTrainedModel, engine: type, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=temperature)
    ids, spans = conversation(engine(model, [STOP], PAD), params)
    check_logprobs(model, ids, spans, temperature)


def test_engines_agree_and_the_batch_does_not_matter(model: PreTrainedModel) -> None:
    params = SamplingParams(max_new_tokens=10)
    together, _ = conversation(SlotSampler(model, [STOP], PAD), params, turns=1)
    replayed, _ = conversation(ReplaySampler(model, [STOP], PAD), params, turns=1)
    assert together == replayed
    for row in range(len(PROMPTS)):
        alone, _ = conversation(SlotSampler(model, [STOP], PAD), params, turns=1, rows=(row,))
        assert alone[0] == together[row]


def test_a_small_prefill_budget_and_reused_slots_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    params = SamplingParams(max_new_tokens=10)
    expected, _ = conversation(SlotSampler(model, [STOP], PAD), params)
    monkeypatch.setattr(slots, "PREFILL_TOKENS", 4)
    sampler = SlotSampler(model, [STOP], PAD)
    keep = sampler.open([[40, 41, 42]])
    sampler.sample(keep, params, [7])
    assert conversation(sampler, params)[0] == expected  # a stranger keeps a slot of the same cache meanwhile
    assert conversation(sampler, params)[0] == expected
    sampler.close(keep)
    assert keeps_nothing(sampler)


def keeps_nothing(sampler: SlotSampler) -> bool:
    return not sampler._slot and not sampler._readers and sampler._layers[0].keys is None


def serve(sampler, params: SamplingParams, places: int, rows: list[list[int]], turns: list[int]):
    """Play a conversation in each row, `places` at a time; return the turns of each, and which rows ended together."""
    waiting, rounds, completions, of, left = list(range(len(rows)))[::-1], [], [[] for _ in rows], {}, list(turns)

    def enter():
        free = min(len(waiting), places - len(of))
        entering = [waiting.pop() for _ in range(free)]
        for row, handle in zip(entering, sampler.open([rows[row] for row in entering]), strict=True):
            of[handle] = row
            yield handle, 1000 * row

    def then(finished):
        rounds.append([of[handle] for handle, _ in finished])
        coming = []
        for handle, completion in finished:
            row = of[handle]
            completions[row].append(completion)
            left[row] -= 1
            if left[row]:
                sampler.append(handle, REPLIES[row % len(REPLIES)])
                coming.append((handle, 1000 * row + len(completions[row])))
            else:
                del of[handle]
                sampler.close([handle])
        return coming + list(enter())

    sampler.converse(list(enter()), params, then)
    return completions, rounds


def test_turns_join_while_others_are_being_written(model: PreTrainedModel) -> None:
    rows = [PROMPTS[n % 5] for n in range(14)]
    turns = [1 + n % 4 for n in range(14)]
    params, stops = SamplingParams(max_new_tokens=14), [STOP, 7, 19, 33, 41, 55]  # so that turns differ in length
    sampler = SlotSampler(model, stops, PAD)
    completions, rounds = serve(sampler, params, 6, rows, turns)
    assert [len(each) for each in completions] == turns
    assert min(map(len, rounds[:3])) < 6, "no turn waits for the slowest"
    assert keeps_nothing(sampler)
    expected, _ = serve(ReplaySampler(model, stops, PAD), params, 14, rows, turns)
    for row, (ours, theirs) in enumerate(zip(completions, expected, strict=True)):
        assert [c.ids for c in ours] == [c.ids for c in theirs], f"conversation {row}"
        for a, b in zip(ours, theirs, strict=True):
            assert a.finished == b.finished and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_places_and_company_change_nothing(data: st.DataObject) -> None:
    model = build("llama")
    count = data.draw(st.integers(1, 9))
    rows = [PROMPTS[n] for n in data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))]
    turns = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    penalty = data.draw(st.sampled_from([1.0, 1.3]))
    params = SamplingParams(max_new_tokens=data.draw(st.integers(1, 12)), repetition_penalty=penalty)
    expected, _ = serve(ReplaySampler(model, [STOP], PAD), params, count, rows, turns)
    completions, _ = serve(SlotSampler(model, [STOP], PAD), params, data.draw(st.integers(1, 9)), rows, turns)
    assert [[c.ids for c in each] for each in completions] == [[c.ids for c in each] for each in expected]


def test_a_prompt_is_read_once_also_by_those_who_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    read, honest = [], SlotSampler._read

    def counted(self, handles, width):
        read.append(len(handles) * width)
        honest(self, handles, width)

    monkeypatch.setattr(SlotSampler, "_read", counted)
    sampler = SlotSampler(build("llama"), [STOP], PAD)
    first = sampler.open([PROMPTS[1]])
    params = SamplingParams(max_new_tokens=3)
    sampler.sample(first, params, [0])
    sampler.sample(sampler.open([PROMPTS[1]] * 3), params, [1, 2, 3])
    assert read == [len(PROMPTS[1]) - 1]
    sampler.close(first)
    alone = sampler.open([PROMPTS[1]])
    sampler.sample(alone, params, [0])
    assert read == [len(PROMPTS[1]) - 1] * 2, "its reader has left, and the slot may hold anything"


@pytest.mark.parametrize("penalty", [1.0, 1.15, 2.0])
def test_chat_settings_equal_transformers_processors(model: PreTrainedModel, penalty: float) -> None:
    """Greedy with a repetition penalty is deterministic, so generate is an exact oracle for it."""
    params = SamplingParams(max_new_tokens=15, temperature=0, repetition_penalty=penalty)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=15, eos_token_id=STOP, pad_token_id=PAD, repetition_penalty=penalty
    )
    for engine in (SlotSampler, ReplaySampler):
        sampler = engine(model, [STOP], PAD)
        for prompt, completion in zip(PROMPTS, sampler.sample(sampler.open(PROMPTS), params, [0] * 5), strict=True):
            expected = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
            assert completion.ids == expected.tolist()


def test_eager_attention_gets_an_additive_mask() -> None:
    model = build("qwen3")
    params = SamplingParams(max_new_tokens=8)
    expected, _ = conversation(SlotSampler(model, [STOP], PAD), params)
    model.set_attn_implementation("eager")
    assert conversation(SlotSampler(model, [STOP], PAD), params)[0] == expected


def test_autocast_keeps_the_cache_in_its_own_precision(model: PreTrainedModel) -> None:
    params = SamplingParams(max_new_tokens=8)
    sampler = SlotSampler(model, [STOP], PAD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handles = sampler.open(PROMPTS)
        done = sampler.sample(handles, params, [7] * len(PROMPTS))
        assert {layer.keys.dtype for layer in sampler._layers if layer.keys is not None} == {torch.bfloat16}
        for prompt, completion in zip(PROMPTS, done, strict=True):
            ids = torch.tensor([prompt + completion.ids])
            logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
            for n, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
                assert logprobs[len(prompt) + n - 1, token].item() == pytest.approx(logprob, abs=0.3)


def test_sliding_windows_go_to_the_replay_engine() -> None:
    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=VOCABULARY, use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    assert isinstance(open_engine(model, [STOP], PAD, "auto"), ReplaySampler)
    assert isinstance(open_engine(build("llama"), [STOP], PAD, "auto"), SlotSampler)
    with pytest.raises(UserError, match="engine"):
        open_engine(model, [STOP], PAD, "slots")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_longest_row_go_to_the_replay_engine(kind: str) -> None:
    model = build("llama")
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    assert isinstance(open_engine(model, [STOP], PAD, "auto"), ReplaySampler)


def test_local_layers_and_attention_of_another_kind_go_to_the_replay_engine() -> None:
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, pad_token_id=PAD)
    local = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, window_size=8, **sizes
        )
    )
    alibi = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", n_layer=2, n_head=4, **sizes)).train()
    for model in (local, alibi):
        with pytest.warns(UserWarning, match="replays"):
            assert isinstance(open_engine(model, [STOP], PAD, "auto"), ReplaySampler)
    assert alibi.training


@given(st.integers(0, 2**63 - 1), st.integers(0, 4096))
def test_uniforms_are_splitmix64(seed: int, step: int) -> None:
    word = (1 << 64) - 1
    z = (seed + (step + 1) * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    z ^= z >> 31
    assert uniforms(torch.tensor([seed]), step).item() == (z >> 11) * 2.0**-53


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -torch.inf]]).expand(40_000, -1)
    seeds = torch.arange(40_000) * 7919
    tokens, logprobs = sample_tokens(logits, SamplingParams(max_new_tokens=1), uniforms(seeds, 3))
    expected = logits[0].softmax(-1)
    observed = torch.bincount(tokens, minlength=5) / len(tokens)
    assert torch.allclose(observed, expected, atol=0.01)
    assert torch.allclose(logprobs.exp(), expected[tokens])
    nucleus = sample_tokens(logits, SamplingParams(max_new_tokens=1, top_k=3, top_p=0.7), uniforms(seeds, 0))[0]
    assert set(nucleus.tolist()) == {0, 3}


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 255, 256, 257, 1000]), st.floats(0, 1, exclude_max=True))
def test_blocks_of_a_large_vocabulary_give_what_one_sum_gives(seed: int, size: int, uniform: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(1, size, generator=generator)
    logits[torch.rand(1, size, generator=generator) < 0.3] = -torch.inf
    logits[0, seed % size] = 1.0
    token = sample_tokens(logits, SamplingParams(1), torch.tensor([uniform], dtype=torch.float64))[0].item()
    probs = logits[0].double().softmax(-1)
    upper = probs.cumsum(-1)[token].item()
    assert probs[token] > 0
    assert upper - probs[token] - 1e-6 <= uniform <= upper + 1e-6


@pytest.mark.parametrize("size", [5, 300, 1024])
def test_the_ends_of_the_interval_choose_tokens_that_can_be(size: int) -> None:
    logits = torch.full((2, size), -torch.inf)
    logits[:, size // 2 : size // 2 + 2] = 0.0
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample_tokens(logits, SamplingParams(1), ends)[0].tolist() == [size // 2, size // 2 + 1]


def test_logits_that_are_no_numbers_raise_nothing_and_are_told_by_their_log_probs() -> None:
    token, logprob = sample_tokens(torch.full((1, 600), torch.nan), SamplingParams(1), torch.tensor([0.5]))
    assert 0 <= token.item() < 600 and logprob.isnan()


@settings(max_examples=50)
@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.floats(0, 1, exclude_max=True), st.integers(0, 9))
def test_filters_never_choose_outside(values: list[float], uniform: float, top_k: int) -> None:
    logits = torch.tensor([values])
    params = SamplingParams(max_new_tokens=1, top_k=top_k, top_p=0.5)
    token = sample_tokens(logits, params, torch.tensor([uniform], dtype=torch.float64))[0].item()
    order = logits[0].sort(descending=True)
    kept = order.values[: top_k or None].double().softmax(-1)
    allowed = order.values[: int((kept.cumsum(-1) - kept < 0.5).sum())]
    assert values[token] >= allowed[-1].item() - 1e-6


def test_fused_projections_change_rounding_alone(model: PreTrainedModel) -> None:
    """Ragged rows, a mask, several queries and one: the states that the layers make, one by one."""
    decoder: Any = model.base_model
    found: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for fuses in (True, False):
        sampler = SlotSampler(model, [STOP], PAD)
        handles = sampler.open(PROMPTS)
        hook = decoder.register_forward_hook(lambda *given, fuses=fuses: found[fuses].append(given[2][0]))
        with pytest.MonkeyPatch.context() as patch:
            if not fuses:
                patch.setattr(slots, "fused_weights", lambda *given: nullcontext())
            done = sampler.sample(handles, SamplingParams(max_new_tokens=6), [1] * len(PROMPTS))
        hook.remove()
        assert sum(len(completion.ids) for completion in done) > 0
    assert len(found[True]) == len(found[False]) > 3
    for ours, plain in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["optimizer", "load", "adapter", "merge"])
def test_what_is_made_of_the_weights_lasts_for_one_rollout(change: str) -> None:
    model = build("convgpt-tied")
    sampler = SlotSampler(model, [STOP], PAD)
    params = SamplingParams(max_new_tokens=8)
    before, _ = conversation(sampler, params)
    if change == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(input_ids=torch.tensor([PROMPTS[1]])).logits.square().mean().backward()
        optimizer.step()
    elif change == "load":
        model.load_state_dict({name: 1.3 * weight for name, weight in model.state_dict().items()})
    else:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        wanted = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapted: Any = get_peft_model(model, wanted)
        model = adapted.merge_and_unload() if change == "merge" else adapted.base_model.model
        sampler.model = model
    ids, spans = conversation(sampler, params)
    assert ids != before
    check_logprobs(model, ids, spans, 1.0)
    decoder: Any = model.base_model
    assert decoder.fused is None and decoder.conv.fixed is None


def test_frozen_weights_are_converted_once_to_what_autocast_makes() -> None:
    """Of adapters and of what they adapt, and also where the rollout fails."""
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(build("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model = adapted.base_model.model
    ids, before = torch.tensor(PROMPTS[:1]), [weight.data_ptr() for weight in model.parameters()]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=ids).logits
        with pytest.raises(KeyError), fused_weights(model):
            linear = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
            assert len(linear) > 20 and all(layer.weight.dtype == torch.bfloat16 for layer in linear)
            assert torch.equal(model(input_ids=ids).logits, expected)
            raise KeyError
    assert [weight.data_ptr() for weight in model.parameters()] == before
    assert {weight.requires_grad for weight in model.parameters()} == {True, False}
    with fused_weights(model):
        assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_only_a_plain_convgpt_is_fused() -> None:
    def fuses(model: Any) -> bool:
        with fused_weights(model):
            return getattr(model.base_model, "fused", None) is not None

    assert fuses(build("convgpt")) and not fuses(build("llama"))
    eager, biased, hooked, windowed = (build("convgpt") for _ in range(4))
    eager.set_attn_implementation("eager")
    biased.model.layers[1].self_attn.k_proj.bias = torch.nn.Parameter(torch.ones(16))
    hooked.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: None)
    windowed.config.sliding_window = 8
    assert not any(map(fuses, (eager, biased, hooked, windowed)))
    model = build("convgpt")
    with pytest.raises(KeyError), fused_weights(model):
        raise KeyError
    assert model.base_model.fused is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_what_the_device_raises_is_no_answer_of_the_self_test(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")

    def fail(*args: object, **settings: object) -> None:
        raise error("the device")

    monkeypatch.setattr(model.model, "forward", fail)
    with pytest.raises(error, match="the device"):
        open_engine(model, [STOP], PAD, "auto")
    with pytest.raises(error, match="the device"):
        selftest.can_share_prefixes(model)


def test_the_cause_of_a_fallback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    with monkeypatch.context() as patch:
        patch.setattr(slots._SlotLayer, "copy_rows", lambda *args: None)
        with pytest.warns(UserWarning, match=r"log-probs differ from those of a full forward pass by up to \d"):
            assert isinstance(open_engine(model, [STOP], PAD, "auto"), ReplaySampler)

    def fail(*args: object, **settings: object) -> None:
        raise TypeError("past_key_values has\nno layers")

    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", fail)
        both = "its self-test raised TypeError: past_key_values has no layers"
        with pytest.raises(UserError, match=rf"by replaying its history: {both}\. It cannot .* either: {both}"):
            open_engine(model, [STOP], PAD, "auto")
        with pytest.raises(UserError, match=r"engine=slots .* raised TypeError"):
            open_engine(model, [STOP], PAD, "slots")
    model.config.layer_types, model.config.sliding_window = ["sliding_attention", "full_attention"], 4096
    with pytest.warns(UserWarning, match="not every layer attends to all tokens"):
        open_engine(model, [STOP], PAD, "auto")


def test_the_self_test_compares_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-precision weights and autocast make differences of their own, which say nothing about the cache."""
    model = build("convgpt").to(torch.bfloat16)
    seen: list[torch.dtype] = []
    honest = engines._largest_difference

    def compared(model: Any, *given: Any) -> float:
        seen.append(model.base_model(input_ids=torch.tensor([[3, 4]])).last_hidden_state.dtype)
        return honest(model, *given)

    monkeypatch.setattr(engines, "_largest_difference", compared)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert why_unfit(model, [STOP], PAD) is None
        assert why_unfit(build("convgpt"), [STOP], PAD) is None
    assert seen == [torch.float32] * 2 and model.dtype == torch.bfloat16


def test_weights_that_are_no_numbers_are_not_blamed_on_the_architecture() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"not numbers \(NaN\).* weights are damaged"):
        open_engine(model, [STOP], PAD, "auto")
