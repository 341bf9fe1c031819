"""Does a compiled decoding step sample the tokens of the plain one, compiled once for all sizes and all weights?

A token could differ honestly where its draw lies within rounding of the border of two tokens. `clear` asserts that in
these conversations none does: the nearest draw is many times as far from a border as rounding moves it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from test_phase3 import rows as metrics, settings, taught, train
from test_sampler import PAD, PROMPTS, REPLIES, STOP, VOCABULARY, build, conversation, keeps_nothing, serve
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.config.loading import resolve
from posttrain.config.starpo import StarPORun
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.rollout.engine import open_engine
from posttrain.rollout.engines import compiled, slots
from posttrain.rollout.engines.compiled import CompiledSampler, compiled_graphs
from posttrain.rollout.engines.sampling import uniforms
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.types import Completion, SamplingParams, UserError

STOPS = [STOP, 7, 19, 33, 41, 55]  # so that turns differ in length
NEAR = 5e-6  # rounding moves a draw by less than 1e-6
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="no C++ compiler is installed (on Debian: apt-get install g++)",
)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in steps of 16 instead of 128, so that short conversations come through several of them."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "POSITIONS", 16)


def one_layer(kind: type[ConvGPTForCausalLM] | type[Qwen3ForCausalLM]) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCABULARY, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, initializer_range=0.3, pad_token_id=PAD, bos_token_id=1, eos_token_id=STOP,
    )  # fmt: skip
    if kind is ConvGPTForCausalLM:
        return kind(ConvGPTConfig(hidden_size=64, conv_kernel_h_w=5, **sizes)).eval()
    return kind(Qwen3Config(hidden_size=16, **sizes)).eval()


@torch.no_grad()
def clear(model: PreTrainedModel, rows: list[list[int]], answers: list[list[Completion]], temperature: float) -> None:
    """No draw of these conversations is within rounding of another token; greedily, no best one of the second best."""
    for row, (prompt, turns) in enumerate(zip(rows, answers, strict=True)):
        ids = list(prompt)
        for turn, completion in enumerate(turns):
            start, length = len(ids), len(completion.ids)
            ids += completion.ids
            logits_NV = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].double()
            if temperature == 0:
                best_N2 = logits_NV.topk(2).values
                assert (best_N2[:, 0] - best_N2[:, 1]).min() > 1e-3
            else:
                borders_NV = (logits_NV / temperature).softmax(-1).cumsum(-1)
                drawn_1N = uniforms(torch.tensor([[1000 * row + turn]]), torch.arange(length))
                assert (borders_NV - drawn_1N.T).abs().min() > NEAR
            ids += REPLIES[row % len(REPLIES)]


def equal(ours: list[list[Completion]], plain: list[list[Completion]]) -> None:
    assert [[each.ids for each in row] for row in ours] == [[each.ids for each in row] for row in plain]
    for row, other in zip(ours, plain, strict=True):
        for a, b in zip(row, other, strict=True):
            assert a.finished == b.finished and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def play(model: PreTrainedModel, sampler: SlotSampler, params: SamplingParams, places: int, most: int = 4) -> Any:
    """Fourteen conversations of one to `most` turns, the shared prompts of some read once, so many places at a time."""
    rows = [PROMPTS[n % 5] for n in range(14)]
    turns = [1 + n % most for n in range(14)]
    plain, rounds = serve(SlotSampler(model, STOPS, PAD), params, places, rows, turns)
    clear(model, rows, plain, params.temperature)
    ours, our_rounds = serve(sampler, params, places, rows, turns)
    equal(ours, plain)
    assert min(map(len, rounds)) < places, "no turn waits for the slowest"
    assert keeps_nothing(sampler)
    return rounds, our_rounds


@pytest.mark.thorough
@needs_compiler
def test_the_same_tokens_from_one_graph_whatever_the_sizes_and_the_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = one_layer(ConvGPTForCausalLM)
    sampler = CompiledSampler(model, STOPS, PAD)
    seen: list[tuple[int, int, int]] = []
    honest = CompiledSampler._prepared

    def prepared(self: CompiledSampler, writing: slots.Writing, rows: int, end: int) -> compiled.Step:
        seen.append((rows, end, self._layers[0].length))
        return honest(self, writing, rows, end)

    monkeypatch.setattr(CompiledSampler, "_prepared", prepared)
    params, before = SamplingParams(max_new_tokens=14), compiled_graphs()
    rounds, our_rounds = play(model, sampler, params, 6)
    assert rounds == our_rounds, "on a CPU rows are looked at after every token, as without compiling"
    assert len({rows for rows, _, _ in seen}) > 2 and len({end for _, end, _ in seen}) > 2
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.2)
    play(model, sampler, SamplingParams(max_new_tokens=20), 9, most=7)
    assert len({length for *_, length in seen}) > 2, "the cache has grown"
    # one for a step that reads less than the whole cache, and at most one for a step that reads all of it
    made = compiled_graphs() - before
    assert 1 <= made <= 2
    assert capsys.readouterr().err.count("The decoding step was compiled in") == made

    # what a GPU does: a step is recorded once a size and rollout, and rows are looked at every few tokens
    recorded: list[compiled.Step] = []

    def record(step: compiled.Step) -> compiled.Step:
        recorded.append(step)
        return step

    monkeypatch.setattr(compiled, "_recorded", record)
    sampler._gpu = True
    seen.clear()
    play(model, sampler, params, 6)
    assert len(recorded) == len(seen) and compiled_graphs() - before == made
    assert not sampler._steps, "they would hold the cache"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("kind", ["llama", "convgpt", "convgpt-tied"])
def test_every_model_and_temperature(kind: str, temperature: float) -> None:
    model = build(kind)
    play(model, CompiledSampler(model, STOPS, PAD), SamplingParams(max_new_tokens=14, temperature=temperature), 6)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=10, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=10, temperature=0.7, top_k=9, top_p=0.8),
    ],
)
def test_settings_of_a_chat(params: SamplingParams) -> None:
    model = build("llama")
    plain, plain_spans = conversation(SlotSampler(model, STOPS, PAD), params)
    ours, spans = conversation(CompiledSampler(model, STOPS, PAD), params)
    assert ours == plain
    for row, other in zip(spans, plain_spans, strict=True):
        equal([[each for _, each in row]], [[each for _, each in other]])


def test_conversations_that_begin_with_one_token_make_their_cache_first() -> None:
    model = one_layer(Qwen3ForCausalLM)
    params = SamplingParams(max_new_tokens=1)
    found = [
        engine(model, [STOP], PAD).sample([0], params, [5])[0]
        for engine in (lambda *given: opened(SlotSampler(*given)), lambda *given: opened(CompiledSampler(*given)))
    ]
    equal([[found[1]]], [[found[0]]])


def opened(sampler: SlotSampler) -> SlotSampler:
    assert sampler.open([[9]]) == [0]
    return sampler


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "convgpt"])
def test_autocast(kind: str) -> None:
    """Fused kernels round where the plain ones do not, so that in bfloat16 log-probs agree and tokens need not."""
    model = build(kind)
    sampler = CompiledSampler(model, [STOP], PAD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        done = sampler.sample(sampler.open(PROMPTS), SamplingParams(max_new_tokens=8), [7] * len(PROMPTS))
        for prompt, completion in zip(PROMPTS, done, strict=True):
            logprobs = model(input_ids=torch.tensor([prompt + completion.ids])).logits[0].float().log_softmax(-1)
            for n, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
                assert logprobs[len(prompt) + n - 1, token].item() == pytest.approx(logprob, abs=0.3)


@needs_compiler
@pytest.mark.slow
def test_adapters_that_change_are_compiled_once() -> None:
    torch.manual_seed(1)
    wanted = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(build("llama"), wanted).base_model.model
    sampler, params, before = CompiledSampler(model, STOPS, PAD), SamplingParams(max_new_tokens=14), compiled_graphs()
    play(model, sampler, params, 6)
    made = compiled_graphs() - before
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    model(input_ids=torch.tensor([PROMPTS[1]])).logits.square().mean().backward()
    optimizer.step()
    play(model, sampler, params, 6)
    assert compiled_graphs() - before == made


@pytest.mark.thorough
def test_a_model_that_is_no_graph_is_refused_in_one_paragraph() -> None:
    model = one_layer(Qwen3ForCausalLM)
    model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(UserError, match=r"the decoding step of Qwen3ForCausalLM cannot be compiled .*g\+\+"):
        open_engine(model, [STOP], PAD, compiled=True)


@pytest.mark.slow
def test_a_missing_compiler_is_said_in_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, exc

    def missing(*_: object, **__: object) -> None:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(compile_fx, "compile_fx_inner", missing)
    monkeypatch.setattr(compile_fx, "compile_fx", missing)
    with pytest.raises(UserError, match=r"cannot be compiled for cpu \(.*InvalidCxxCompiler.*apt-get install g\+\+"):
        open_engine(one_layer(Qwen3ForCausalLM), [STOP], PAD, compiled=True)


def test_a_model_without_a_kept_cache_is_refused() -> None:
    model = one_layer(Qwen3ForCausalLM)
    model.config.layer_types = ["sliding_attention"]
    with pytest.raises(UserError, match=r"compile=true decodes with a kept KV cache, which Qwen3ForCausalLM .*windows"):
        open_engine(model, [STOP], PAD, compiled=True)


def test_an_engine_without_a_step_of_ours_is_refused() -> None:
    with pytest.raises(UserError, match=r"`rollout.compile` is for the slot engine in this process"):
        resolve(StarPORun, Path("configs/phase3_starpo.yaml"), ["rollout.engine=replay", "rollout.compile=true"])


@needs_compiler
@pytest.mark.slow
def test_a_training_run_says_what_it_compiles_and_learns_as_without(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, player = [], taught(tmp_path / "player" / "final", tiny_tokenizer, 30)
    for name, compile_step in (("plain", False), ("compiled", True)):
        (tmp_path / name).mkdir()
        file = settings(tmp_path / name / "run.yaml", player, rollout={"compile": compile_step})
        train(file, f"output_dir={tmp_path / name / 'run'}", "trainer.max_steps=2")
        figures.append([row for row in metrics(tmp_path / name / "run") if "rollout/tokens" in row])
    assert len(figures[0]) == 2
    for plain, ours in zip(*figures, strict=True):
        assert ours == pytest.approx(plain, rel=1e-3, abs=1e-5)
    assert "The decoding step was compiled in" in capsys.readouterr().err
