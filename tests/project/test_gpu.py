"""Does a CUDA GPU compute what the CPU computes, in the three phases and in both precisions?

    python -m pytest -m gpu
The other tests run on the CPU, also where there is a GPU; without `-m gpu` no test sees it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_compiled
import test_packed
import test_phase1
import test_phase2
import test_phase3
import torch
from test_graphs import LONGEST, STOPS, equal
from test_plan import CONTEXT, KINDS, config, network, shape_of, update
from test_row_attention import both, ragged, since_torch_2_12
from test_sampler import PAD, PROMPTS, build, conversation, serve
from tiny_runs import rows_of, settings, tiny_base
from transformers import PreTrainedTokenizerFast

from posttrain.models import row_attention
from posttrain.models.forward import trained_states
from posttrain.models.output_layer import head_logprobs
from posttrain.plan.episodes import learning
from posttrain.plan.selftest import can_be_deterministic
from posttrain.rollout.engine import open_engine
from posttrain.rollout.engines.graphs import CudaRecorder, GraphSampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.runtime import hardware
from posttrain.starpo.monitoring.alarm_limits import HALF_PRECISION_GAP
from posttrain.starpo.run import make_learner
from posttrain.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU, or no -m gpu")]


# ---------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "convgpt", "convgpt-tied"])
def test_the_tokens_are_those_of_the_cpu(kind: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=temperature)
    ids, spans = conversation(SlotSampler(build(kind).cuda(), STOPS, PAD), params)
    expected, there = conversation(SlotSampler(build(kind), STOPS, PAD), params)
    assert ids == expected
    for row, other in zip(spans, there, strict=True):
        for (_, a), (_, b) in zip(row, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "convgpt", "convgpt-tied"])
def test_graphs_give_the_same_tokens_and_are_recorded_once(kind: str, temperature: float) -> None:
    """Over rollouts between which the weights change, and with more conversations than before, as it was told."""
    model = build(kind).cuda()
    sampler = GraphSampler(model, STOPS, PAD, LONGEST, conversations=9)
    params = SamplingParams(max_new_tokens=14, temperature=temperature)
    recorded: list[int] = []
    for places in (6, 6, 9, 9):
        rows, turns = [PROMPTS[n % 5] for n in range(14)], [1 + n % 4 for n in range(14)]
        plain, _ = serve(SlotSampler(model, STOPS, PAD), params, places, rows, turns)
        ours, _ = serve(sampler, params, places, rows, turns)
        equal(ours, plain)
        recorded.append(sampler.recorded)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
    sizes = [size for static in sampler._static.values() for size in static.graphs]
    assert 0 < recorded[0] == recorded[1] and recorded[3] == len(sizes), "no size is recorded twice"


def test_a_step_that_waits_for_the_gpu_is_launched_and_harms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A capture that fails leaves stream and allocator as they were; the self-test finds out before a run begins."""
    model = build("llama").cuda()
    model.model.layers[0].register_forward_hook(lambda module, args, out: bool(out[0].sum() > 0) and None)
    stream, params = torch.cuda.current_stream(), SamplingParams(max_new_tokens=12)
    expected, _ = conversation(SlotSampler(model, STOPS, PAD), params)
    sampler = GraphSampler(model, STOPS, PAD, LONGEST)
    assert conversation(sampler, params)[0] == expected and sampler.recorded == 0
    line = capsys.readouterr().err
    assert "cannot be recorded" in line and "captur" in line and "previous error" not in line
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    torch.rand(1, device="cuda")
    model(input_ids=torch.tensor([[3, 4, 5]], device="cuda")).logits.sum().backward()
    with pytest.warns(UserWarning, match="decoded without CUDA graphs"):
        assert type(open_engine(model, STOPS, PAD)) is SlotSampler


def test_a_graph_is_replayed_after_another_one_could_not_be_recorded() -> None:
    number, recorder = torch.zeros((), device="cuda"), CudaRecorder()
    replay = recorder.record(lambda: number.add_(1))
    with pytest.raises(RuntimeError, match="captur"):
        recorder.record(lambda: number.item())
    replay()
    recorder.record(lambda: number.mul_(2))()
    assert number.item() == 2


@pytest.mark.parametrize("engine", [SlotSampler, GraphSampler])
@pytest.mark.parametrize("kind", ["qwen3", "convgpt-tied"])
def test_the_log_probs_of_sampler_and_update_are_near_in_bfloat16(kind: str, engine: type[SlotSampler]) -> None:
    """Both round, each in its own kernels; more than this raises an alarm in a run."""
    model = build(kind).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        ids, spans = conversation(engine(model, STOPS, PAD), SamplingParams(max_new_tokens=12))
        for row, said in zip(ids, spans, strict=True):
            mask = [False] * len(row)
            for start, completion in said:
                mask[start : start + len(completion.ids)] = [True] * len(completion.ids)
            with torch.no_grad():
                states_SD, tokens_S = trained_states(model, [row], [mask])
                logprobs_S, _ = head_logprobs(model, states_SD, tokens_S)
            sampled_S = torch.tensor([each for _, completion in said for each in completion.logprobs])
            assert (logprobs_S.cpu() - sampled_S).abs().mean() < HALF_PRECISION_GAP


@since_torch_2_12
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_attention_by_length_is_that_under_a_mask(group: int, size: int, dtype: torch.dtype) -> None:
    ours, masked = both(ragged(17, 3, group, size, dtype, "cuda"))
    torch.testing.assert_close(ours, masked, rtol=2e-2, atol=2e-2)


@since_torch_2_12
@pytest.mark.parametrize("kind", ["qwen3", "convgpt", "convgpt-tied"])
def test_rows_are_read_up_to_their_own_length(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16 tokens may differ; log-probs are as near to those of the model as without it."""
    model, params, calls = build(kind).cuda(), SamplingParams(max_new_tokens=12), []
    kernel: Any = row_attention.varlen_attn

    @functools.wraps(kernel)  # `has_kernel` looks at its arguments
    def counted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return kernel(*args, **named)

    monkeypatch.setattr(row_attention, "varlen_attn", counted)
    sampler = GraphSampler(model, STOPS, PAD, LONGEST, by_length=True)
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            handles = sampler.open(PROMPTS)
            for prompt, completion in zip(PROMPTS, sampler.sample(handles, params, [7] * len(PROMPTS)), strict=True):
                ids = torch.tensor([prompt + completion.ids], device="cuda")
                with torch.no_grad():
                    logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
                expected = [logprobs[len(prompt) - 1 + n, token].item() for n, token in enumerate(completion.ids)]
                assert completion.logprobs == pytest.approx(expected, abs=0.3)
            sampler.close(handles)
    assert len(calls) == 2 * sampler.recorded * model.config.num_hidden_layers
    assert "attention by length fails" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- learning and memory


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_that_of_the_cpu(kind: str, checkpointing: bool) -> None:
    after = []
    for device in ("cpu", "cuda"):
        cfg = config(trainer={"bf16": False, "gradient_checkpointing": checkpointing, "learning_rate": 1e-3})
        model = network(kind).to(device)
        learner = make_learner(cfg, model, None)
        with hardware.deterministic(learner.deterministic):
            update(learner, 8)
        after.append({name: weight.detach().cpu() for name, weight in model.named_parameters()})
    before = dict(network(kind).named_parameters())
    for name, weight in after[0].items():
        moved = (weight - before[name]).norm()
        assert (weight - after[1][name]).norm() <= 1e-2 * moved + 1e-7, name


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "convgpt-tied"])
def test_an_update_takes_at_most_the_memory_that_was_planned(kind: str, bf16: bool, checkpointing: bool) -> None:
    """Of a model whose activations are much more than the allocator rounds to."""
    rows = 64
    cfg = config(trainer={"bf16": bf16, "gradient_checkpointing": checkpointing, "micro_batch_tokens": rows * CONTEXT})
    model = network(kind).cuda()
    learner = make_learner(cfg, model, None)
    with hardware.deterministic(learner.deterministic):
        update(learner, rows)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        update(learner, rows)
    found = torch.cuda.max_memory_allocated() - before
    planned = learning(shape_of(model, cfg), cfg, rows * CONTEXT, cuda=True)
    assert found <= 1.1 * (sum(planned.values()) - planned["shared prefixes"])


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_gradients_of_long_rows_are_deterministic(bf16: bool) -> None:
    """16 rows of 512 tokens, several times: attention's backward pass takes them in many pieces."""
    model = network("llama").cuda()
    assert can_be_deterministic(model, bf16)
    ids_BT = torch.randint(300, (16, 512), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    with hardware.deterministic(), torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        for _ in range(4):
            model.zero_grad()
            model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
            found.append([weight.grad.clone() for weight in model.parameters()])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("kind", ["llama", "convgpt"])
def test_gradients_of_compiled_layers_are_as_exact_as_those_of_the_layers(kind: str) -> None:
    test_compiled.test_gradients_are_as_exact_as_those_of_the_layers(kind, "cuda")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "convgpt"])
def test_packed_rows_learn_as_separate_rows(kind: str) -> None:
    test_packed.gradients_agree(kind, "cuda")


def test_a_model_that_cannot_be_deterministic_is_trained_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert can_be_deterministic(build("llama").cuda(), False) and not torch.are_deterministic_algorithms_enabled()
    model = build("llama").cuda()
    honest = model.model.forward

    def pooled(*args: Any, **kwargs: Any) -> Any:
        out = honest(*args, **kwargs)
        states = out.last_hidden_state
        out.last_hidden_state = states + torch.nn.functional.adaptive_avg_pool2d(states[:, None], 3).mean()
        return out

    model.model.forward = pooled
    assert not can_be_deterministic(model, False) and "adaptive_avg_pool2d" in capsys.readouterr().err
    assert all(weight.grad is None for weight in model.parameters())


# --------------------------------------------------------------------------------------------------------- the phases


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> SimpleNamespace:
    """Rows of hundreds of tokens: gradients of shorter rows are deterministic on a GPU anyway."""
    folder = tmp_path_factory.mktemp("gpu")
    rows, pairs = [], []
    for n in range(80):
        asked = {"role": "user", "content": f"{n} + 1 = ?"}
        right, wrong = (" ".join(str(n * i % m) for i in range(100 + n)) for m in (7, 5))
        rows.append({"messages": [asked, {"role": "assistant", "content": right}]})
        answers = {"chosen": right, "rejected": wrong}
        pair = {name: [asked, {"role": "assistant", "content": text}] for name, text in answers.items()}
        pairs.append(pair | {"score_chosen": 8.0, "score_rejected": 2.0})
    for name, content in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    base = tiny_base(folder / "base", tiny_tokenizer, width=64)
    return SimpleNamespace(base=base, rows=folder / "rows.jsonl", pairs=folder / "pairs.jsonl")


def cut(run: Path, step: int) -> None:
    """As after a kill behind this checkpoint."""
    shutil.rmtree(run / "final")
    for folder in run.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("phase", [1, 2])
def test_phases_1_and_2_learn_and_resume(tmp_path: Path, files: SimpleNamespace, phase: int, bf16: bool) -> None:
    kind, data = ("messages", files.rows) if phase == 1 else ("ultrafeedback", files.pairs)
    script = test_phase1 if phase == 1 else test_phase2
    file = settings(tmp_path / "run.yaml", kind, files.base, data, bf16=bf16)
    script.train(file, "device=cuda", "data.max_length=1024")
    whole = rows_of(tmp_path / "run")
    assert whole[12] < whole[1] - 0.1
    cut(tmp_path / "run", 4)
    script.train(file, "device=cuda", "data.max_length=1024", "--resume")
    assert rows_of(tmp_path / "run") == whole


@pytest.mark.parametrize(
    "changes",
    [
        ["model.tuning=qlora", "trainer.learning_rate=1e-2"],
        ["model.tuning=lora", "trainer.learning_rate=1e-2"],
        ["trainer.optim=adamw_8bit"],
        ["trainer.gradient_checkpointing=true"],
        ["trainer.torch_compile=false"],
        ["trainer.packing=true", "model.attn_implementation=flex_attention"],
    ],
    ids=["qlora", "lora", "8 bits", "recomputed", "not compiled", "packed"],
)
def test_phase_1_learns_under_other_settings(tmp_path: Path, files: SimpleNamespace, changes: list[str]) -> None:
    if "8bit" in changes[0] or "qlora" in changes[0]:
        pytest.importorskip("bitsandbytes")
    file = settings(tmp_path / "run.yaml", "messages", files.base, files.rows, bf16=True)
    test_phase1.train(file, "device=cuda", "data.max_length=1024", *changes)
    losses = rows_of(tmp_path / "run")
    assert losses[12] < losses[1] - 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"bf16": False}},
        {},
        {"trainer": {"gradient_checkpointing": True}},
        {"rollout": {"cuda_graphs": False}},
        {"trainer": {"torch_compile": False}},
        {"rollout": {"engine": "replay"}},
        {"model": {"tuning": "qlora"}},
    ],
    ids=["float32", "bfloat16", "recomputed", "launched", "not compiled", "replay", "qlora"],
)
def test_phase_3_learns_and_resumes(
    tmp_path: Path,
    player: Path,
    changes: dict[str, Any],
) -> None:
    if "model" in changes:
        pytest.importorskip("bitsandbytes")
    trainer = {"bf16": True} | changes.get("trainer", {})
    file = test_phase3.settings(tmp_path / "run.yaml", player, device="cuda", **changes | {"trainer": trainer})
    run = tmp_path / "run"
    test_phase3.train(file)
    whole = test_phase3.rows(run)
    gaps = [row["policy/sampler_gap"] for row in whole if "policy/sampler_gap" in row]
    assert len(gaps) == 4 and max(gaps) < HALF_PRECISION_GAP
    cut(run, 2)
    test_phase3.train(file, "--resume")
    assert test_phase3.rows(run) == whole
