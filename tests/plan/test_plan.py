"""Does the plan say what a run takes?  Against the tensors of small models, of every shape, tuning and critic."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bitsandbytes.optim.optimizer import GlobalOptimManager
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import train_phase3_starpo as phase3
from posttrain import plan
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun
from posttrain.models import loading as models
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.models.forward import Prefixes, trained_states
from posttrain.models.output_layer import VOCABULARY_CHUNK, head_logprobs
from posttrain.plan.episodes import Place, always, learning, playing
from posttrain.plan.parts import Numbers, output_tile
from posttrain.plan.shape import Shape
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.starpo.experience import Batch, Experience
from posttrain.starpo.run import make_learner
from posttrain.types import Completion, SamplingParams, Segment, Trajectory, UserError

CONTEXT = 128
GIB = 2**30


def config(**sections: Any) -> StarPORun:
    given: dict[str, Any] = {
        "output_dir": "unused",
        "model": {"name_or_path": "unused"},
        "envs": ["frozen_lake"],
        "rollout": {"max_context": CONTEXT, "max_completion_length": 16, "groups": 4, "num_generations": 4},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return StarPORun.model_validate(given)


def network(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=300, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        intermediate_size=256,
    )  # fmt: skip
    match kind:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(hidden_size=64, tie_word_embeddings=True, **sizes))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(hidden_size=64, tie_word_embeddings=False, **sizes))
        case "convgpt":
            return ConvGPTForCausalLM(ConvGPTConfig(hidden_size=256, tie_word_embeddings=False, **sizes))
    return ConvGPTForCausalLM(ConvGPTConfig(hidden_size=256, **sizes))


KINDS = ["llama", "qwen3", "convgpt", "convgpt-tied"]


def shape_of(model: PreTrainedModel, cfg: StarPORun) -> Shape:
    return Shape.of(model.config, cfg.model)


class Alive(TorchDispatchMode):
    """Bytes of the tensors made inside that are still there, and the most there have been at one time."""

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.made(tensor.untyped_storage())
        return out

    def made(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()

        def gone() -> None:
            self.known.discard(key)
            self.now -= size

        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, gone)


def episodes(count: int) -> list[Trajectory]:
    played = []
    for number in range(count):
        segment = Segment([1] * 8)
        segment.write(0, Completion([2] * (CONTEXT - 8), [-1.0] * (CONTEXT - 8), True))
        played.append(Trajectory([segment], [float(number % 2)], [0.0], [""], group=0))
    return played


def update(learner: Any, count: int) -> None:
    batch = Batch.of(episodes(count))
    ones_S = torch.ones(len(batch.turn_S))
    returns_S = ones_S if learner.critic else None
    everyone = torch.ones(count, dtype=torch.bool)
    experience, cfg = Experience(batch, learner.measure(batch), ones_S, returns_S, everyone), learner.cfg
    phase3.update(cfg, learner, experience, 1)


def moments(learner: Any) -> Iterator[torch.Tensor]:
    for state in learner.optimizer.state.values():
        yield from (value for key, value in state.items() if torch.is_tensor(value) and key != "step")


def total(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes, of a shared tensor once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


# ------------------------------------------------------------------------------------------------------------ exact


def test_published_models_have_the_sizes_on_their_cards() -> None:
    model = ModelSection(name_or_path="unused")
    convgpt = Shape.of(ConvGPTConfig(), model)
    assert convgpt.parameters == 163_952_769 and convgpt.cache * 2 == 131_072 and convgpt.tied
    qwen = Shape.of(
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        ),
        model,
    )  # fmt: skip
    assert qwen.parameters == 494_032_768 and qwen.cache * 2 == 12_288
    assert 2 * qwen.blocks == 2 * 357_826_560  # FLOPs a token without the output layer


CRITICS = [{}, *({"advantage": "gae", "critic": {"kind": kind}} for kind in ("shared", "separate"))]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "convgpt-tied"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("algorithm", [{"beta": 0.1}, *CRITICS], ids=["reference", "none", "shared", "separate"])
def test_weights_gradients_and_moments_to_the_byte(kind: str, tuning: str, algorithm: dict[str, Any]) -> None:
    cfg = config(model={"tuning": tuning, "lora": {"r": 4}}, algorithm=algorithm)
    model = network(kind)
    shape = shape_of(model, cfg)
    learner = make_learner(cfg, model, None)  # type: ignore[arg-type]
    for parameter in [*learner.trainable[0], *learner.trainable[1]]:
        parameter.grad = torch.zeros_like(parameter)
    gradients = total(p.grad for group in learner.trainable for p in group if p.grad is not None)
    learner.optimizer.step()
    held = always(shape, cfg)
    beside = [learner.reference] if learner.reference is not None else []
    assert held["reference model"] == total(p for net in beside for p in net.parameters())
    own = list(learner.critic.parameters()) if learner.critic else []
    assert held["weights"] + held["critic"] == total([*learner.model.parameters(), *own])
    assert held["optimizer"] == total(moments(learner))
    assert learning(shape, cfg, CONTEXT, cuda=False)["gradients"] == gradients


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_to_the_byte_and_never_longer_than_a_context(kind: str, bf16: bool) -> None:
    cfg, rows = config(rollout={"max_context": 260}, trainer={"bf16": bf16}), 3
    model = network(kind).eval()
    sampler = SlotSampler(model, [300], 0, longest=260)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        handles = sampler.open([[row + 1] * 190 for row in range(rows)])
        sampler.sample(handles, SamplingParams(5), [0] * rows)  # 195 tokens: the cache has 256 places
        for handle in handles:
            sampler.append(handle, [7] * 60)
        sampler.sample(handles, SamplingParams(5), [0] * rows)  # 260: half as much again would be 384
        held = total(tensor for layer in sampler._layers for tensor in (layer.keys, layer.values))  # type: ignore
    assert held == playing(shape_of(model, cfg), cfg, rows)["KV cache"]


# -------------------------------------------------------------------------------------------------------- estimates


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: str, bf16: bool, checkpointing: bool) -> None:
    """Never less than autograd keeps of a micro-batch, weights apart, and at most 1.3 times as much."""
    cfg, model = config(trainer={"bf16": bf16, "gradient_checkpointing": checkpointing}), network(kind)
    learner = make_learner(cfg, model, None)  # type: ignore[arg-type]
    rows, row = 4, episodes(1)[0].segments[0]
    of_tokens = (rows, rows * CONTEXT, rows * row.tokens)  # others are weights, or autocast's copies of them
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] and tensor.shape[0] in of_tokens:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), learner.autocast():
        states_SD, _ = trained_states(model.train(), [row.ids] * rows, [row.mask] * rows)
    found = sum(storage.nbytes() for storage in kept.values()) + states_SD.nbytes
    planned = learning(shape_of(model, cfg), cfg, rows * CONTEXT, cuda=False)["activations"]
    assert found <= planned <= 1.3 * found


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("bonus", [0.0, 0.01])
def test_the_tiles_of_the_output_layer(bonus: float, cap: float | None) -> None:
    """All that exists of the logits at one time, in the forward and in the backward pass."""
    cfg, model = config(), network("llama")
    output: Any = torch.nn.Linear(2, 5000, bias=False)
    model.set_output_embeddings(output)
    model.config.final_logit_softcapping = cap
    hidden = torch.randn(512, 2, requires_grad=True)
    with Alive(output.parameters()) as alive:
        logprobs, entropy = head_logprobs(model, hidden, torch.arange(512))
        (logprobs.sum() + (bonus * entropy.sum() if bonus else 0.0)).backward()
    shape = shape_of(network("llama"), cfg)._replace(vocabulary=5000)
    planned = output_tile(shape, Numbers.of(cfg).computed, 512, VOCABULARY_CHUNK["cpu"], cuda=False)
    assert 0.6 * planned <= alive.peak <= 1.05 * planned  # what is as long as the states or the weights comes on top


@pytest.mark.thorough
@pytest.mark.parametrize("bonus", [0.0, 0.01], ids=["", "entropy"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", pytest.param("convgpt-tied", marks=pytest.mark.slow)])
def test_the_peaks_of_playing_and_learning(kind: str, bf16: bool, bonus: float) -> None:
    """All tensors of a rollout that fills its contexts, and of an update: at most a quarter below the plan."""
    rows = 8
    for checkpointing in (False, True):
        cfg = config(trainer={"bf16": bf16, "gradient_checkpointing": checkpointing}, algorithm={"entropy_coef": bonus})
        model = network(kind)
        shape = shape_of(model, cfg)
        learner = make_learner(cfg, model, None)  # type: ignore[arg-type]
        update(learner, rows)
        with Alive([*model.parameters(), *moments(learner)]) as alive:
            update(learner, rows)
        planned = learning(shape, cfg, rows * CONTEXT, cuda=False)
        alone = sum(planned.values()) - planned["shared prefixes"]  # these episodes have none
        assert 0.75 * alone <= alive.peak <= alone

    sampler = SlotSampler(model.eval(), [300], 0, longest=CONTEXT)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16), Alive(model.parameters()) as alive:
        handles = sampler.open([[row + 1] * (CONTEXT - 16) for row in range(rows)])
        sampler.sample(handles, SamplingParams(16), [0] * rows)
    planned = sum(playing(shape, cfg, rows).values())
    assert 0.75 * planned <= alive.peak <= planned


def test_prefixes_keep_their_own_copies_of_frozen_weights() -> None:
    """Autocast casts a frozen weight again in each forward pass, and each graph keeps its copy."""
    cfg = config(model={"tuning": "lora"}, trainer={"bf16": True, "gradient_checkpointing": False})
    learner = make_learner(cfg, network("llama"), None)  # type: ignore[arg-type]
    shape = shape_of(learner.policy, cfg)
    with learner.autocast(), Alive(learner.model.parameters()) as alive:
        prefixes = Prefixes(learner.policy, [(1,) * 8])
    planned = learning(shape, cfg, 8, cuda=False)["shared prefixes"]
    assert prefixes.width == 8 and 2 * shape.blocks <= alive.now <= 1.1 * planned


def test_four_and_eight_bits(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """But for tables of a few hundred numbers, which all layers share."""
    whole = network("llama")
    whole.resize_token_embeddings(len(tiny_tokenizer))
    whole.save_pretrained(tmp_path)
    copy.deepcopy(tiny_tokenizer).save_pretrained(tmp_path)
    # with this rank no matrix of the adapter is so small that its moments stay in float32
    source = {"name_or_path": str(tmp_path), "tuning": "qlora", "lora": {"r": 128}}
    cfg = config(model=source, trainer={"optim": "adamw_8bit"})
    held, shape = always(shape_of(whole, cfg), cfg), shape_of(whole, cfg)
    model, chat = models.load(cfg.model, device="cpu", chat_template=None)
    packed: list[Any] = [parameter for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    states = [parameter.quant_state for parameter in packed]
    scales = [scale for state in states for scale in (state.absmax, state.state2.absmax)]
    assert held["weights"] - 4 * shape.adapter == pytest.approx(total([*model.parameters(), *scales]), rel=0.01)
    # transformers' Trainer tells one object of the whole process which embeddings keep float32 moments; it then applies
    # to the parameters of every later optimizer that have the same place, also those of other tests
    GlobalOptimManager.get_instance().initialize()
    learner = make_learner(cfg, model, chat)
    update(learner, 2)
    assert held["optimizer"] == pytest.approx(total(moments(learner)), rel=0.02)


# ---------------------------------------------------------------------------------------------------------- choosing

SHAPE = Shape(
    parameters=494_032_768, blocks=357_826_560, top=136_134_656, adapter=0, layers=24, hidden=896, query=896,
    key_value=128, cache=6144, intermediate=4864, behind=0, embedding=896, vocabulary=151936, states=896, tied=True,
)  # fmt: skip


def tried(free: int, cfg: StarPORun, cuda: bool) -> plan.Plan | None:
    try:
        return plan.choose(SHAPE, cfg, Place(free, cuda=cuda))
    except UserError:
        return None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 60 * GIB), st.integers(0, 20 * GIB), st.booleans(), st.booleans(), st.sampled_from([256, 1000, 4096])
)
def test_what_is_chosen_fits_and_more_memory_never_chooses_less(
    free: int, more: int, cuda: bool, checkpointing: bool, context: int
) -> None:
    trainer = {"gradient_checkpointing": checkpointing, "bf16": cuda}
    cfg = config(rollout={"groups": 8, "num_generations": 16, "max_context": context}, trainer=trainer)
    little, much = tried(free, cfg, cuda), tried(free + more, cfg, cuda)
    if little is None:
        return
    assert little.peak <= 0.85 * free
    assert much is not None and much.slots >= little.slots and much.micro_batch_tokens >= little.micro_batch_tokens
    assert 1 <= little.slots <= 128 and (little.slots < 16 or little.slots % 16 == 0)
    assert context <= little.micro_batch_tokens <= max(context, 16384 if cuda else 2048)


def test_no_more_is_chosen_than_a_step_needs() -> None:
    cfg = config(algorithm={"minibatches": 2, "filter": {"strategy": "top_k", "value": 0.5}})
    planned = plan.choose(SHAPE, cfg, Place(200 * GIB))
    assert planned.slots == 16  # 4 groups of 4
    assert planned.micro_batch_tokens == 2 * 4 * CONTEXT // 2
    assert plan.choose(SHAPE, cfg, Place(200 * GIB, processes=2)).slots == 8
    windows = config(rollout={"context": "last_k", "context_turns": 1}, protocol={"max_turns": 3})
    assert plan.choose(SHAPE, windows, Place(200 * GIB)).micro_batch_tokens == 3 * 16 * CONTEXT


def test_a_written_number_wins_and_is_warned_of() -> None:
    cfg = config(rollout={"slots": 100_000}, trainer={"micro_batch_tokens": 512})
    planned = plan.choose(SHAPE, cfg, Place(24 * GIB))
    assert planned.changes == {
        "rollout.slots": 100_000,
        "trainer.micro_batch_tokens": 512,
        "trainer.gradient_checkpointing": True,
        "rollout.cuda_graphs": True,
    }
    (warning,) = planned.warnings
    assert "\n" not in warning and "rollout.slots" in warning
    assert plan.choose(SHAPE, config(), Place(24 * GIB)).warnings == []


def test_what_graphs_hold_stays_beside_an_update() -> None:
    """With CUDA graphs the cache and the copies of weights are there always, and an update gets what they leave."""
    with_graphs, without = (
        plan.choose(SHAPE, config(rollout={"cuda_graphs": on}, trainer={"bf16": True}), Place(16 * GIB))
        for on in (None, False)
    )
    for name in ("KV cache", "bfloat16 weights"):
        assert with_graphs.parts["always"][name] > 0 and name not in with_graphs.parts["playing"]
        assert without.parts["playing"][name] > 0 and name not in without.parts["always"]
    assert "CUDA graphs" in with_graphs.parts["always"] and "CUDA graphs" not in without.parts["always"]
    assert with_graphs.peak <= 16 * GIB and with_graphs.slots <= without.slots
    # under FSDP2 each rollout gathers the weights at other addresses
    for place in (Place(11 * GIB), Place(16 * GIB, cuda=False), Place(80 * GIB, processes=2, sharded=True)):
        chosen = plan.choose(SHAPE, config(trainer={"bf16": True}), place)
        assert not chosen.cuda_graphs and "KV cache" in chosen.parts["playing"]
    with pytest.raises(UserError, match=r"helps: rollout\.cuda_graphs=false"):
        plan.choose(SHAPE, config(rollout={"cuda_graphs": True}, trainer={"bf16": True}), Place(11 * GIB))
    kept = [
        plan.choose(SHAPE, config(rollout={"slots": slots}), Place(80 * GIB)).parts["always"] for slots in (100, 112)
    ]
    assert kept[0]["KV cache"] == kept[1]["KV cache"], "a step for 100 rows has 112"


def test_activations_are_recomputed_where_memory_asks() -> None:
    def chosen(free: int, **trainer: object) -> plan.Plan:
        return plan.choose(SHAPE, config(rollout={"max_context": 4096}, trainer={"bf16": True, **trainer}), Place(free))

    assert not chosen(80 * GIB).gradient_checkpointing
    assert chosen(24 * GIB).gradient_checkpointing and "activations recomputed" in chosen(24 * GIB).table()
    with pytest.raises(UserError, match="gradient_checkpointing=true"):
        chosen(24 * GIB, gradient_checkpointing=False)
    assert chosen(32 * GIB).gradient_checkpointing  # a single context would fit without, but not four
    assert not chosen(32 * GIB, micro_batch_tokens=4096).gradient_checkpointing
    assert chosen(80 * GIB, gradient_checkpointing=True).gradient_checkpointing


def test_activations_are_recomputed_where_that_lets_more_conversations_play() -> None:
    def chosen(free: int, **trainer: object) -> plan.Plan:
        cfg = config(
            rollout={"max_context": 4096, "groups": 16}, trainer={"bf16": True, "micro_batch_tokens": 4096, **trainer}
        )
        return plan.choose(SHAPE, cfg, Place(free))

    keeping, recomputing = (chosen(30 * GIB, gradient_checkpointing=on) for on in (False, True))
    assert keeping.slots * 1.5 < recomputing.slots
    assert chosen(30 * GIB) == recomputing
    assert chosen(32 * GIB) == chosen(32 * GIB, gradient_checkpointing=False)  # 60 of 64 conversations at a time


def test_vllm_takes_its_share_and_no_cache_of_ours() -> None:
    ours = plan.choose(SHAPE, config(), Place(24 * GIB))
    theirs = plan.choose(SHAPE, config(rollout={"engine": "vllm"}), Place(24 * GIB, vllm=8 * GIB))
    assert theirs.parts["always"]["vLLM"] == 8 * GIB and "KV cache" not in theirs.parts["playing"]
    assert theirs.slots >= ours.slots and theirs.peak > 8 * GIB
    with pytest.raises(UserError, match="vLLM 20"):
        plan.choose(SHAPE, config(rollout={"engine": "vllm"}), Place(22 * GIB, vllm=20 * GIB))


def test_a_run_that_cannot_fit_says_what_takes_how_much() -> None:
    cfg = config(
        algorithm={"beta": 0.1, "advantage": "gae", "critic": {"kind": "separate"}},
        trainer={"gradient_checkpointing": False},
    )
    with pytest.raises(UserError) as problem:
        plan.choose(SHAPE, cfg, Place(4 * GIB))
    words = str(problem.value)
    assert "\n" not in words and "weights 1.84" in words and "reference model 1.84" in words
    for remedy in ("critic.kind=shared", "beta=0", "adamw_8bit", "tuning=lora", "gradient_checkpointing=true"):
        assert remedy in words
    small = config(model={"tuning": "lora"}, trainer={"gradient_checkpointing": True})
    with pytest.raises(UserError) as problem:
        plan.choose(SHAPE, small, Place(GIB))
    assert "tuning=lora" not in str(problem.value) and "max_context below 128" in str(problem.value)


def test_the_table_adds_up() -> None:
    planned = plan.choose(SHAPE, config(), Place(24 * GIB, held=GIB))
    first, *rows, last = planned.table().splitlines()
    assert "16 conversations at a time, micro-batches of 2048 tokens" in first
    assert len({len(row) for row in rows}) == 1  # aligned
    sizes = {name.strip(): float(size) for name, size in (row.rsplit("  ", 1) for row in rows)}
    phases = ("playing", "learning", "stepping")
    by_phase = [sum(size for name, size in sizes.items() if name.startswith(phase)) for phase in phases]
    always = sum(size for name, size in sizes.items() if not name.startswith(phases))
    assert last.endswith(f"{planned.peak / GIB:.2f} of 25.00")
    assert always + max(by_phase) == pytest.approx(planned.peak / GIB, abs=0.06)


def test_the_plan_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network("llama").save_pretrained(tmp_path)
    cfg = config(model={"name_or_path": str(tmp_path)})
    planned = plan.make_plan(cfg, torch.device("cpu"))
    assert planned.slots == 16 and planned.micro_batch_tokens == 2048
    assert 0 < planned.parts["always"]["held already"] < planned.available
    rollout = {"engine": "vllm", "vllm_gpu_memory_utilization": 0.05}  # little: a busy machine has no more
    rented = config(model={"name_or_path": str(tmp_path)}, rollout=rollout)
    vllm = plan.make_plan(rented, torch.device("cpu")).parts["always"]["vLLM"]
    assert vllm == round(0.05 * psutil.virtual_memory().total)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # which share the memory
    assert plan.make_plan(cfg, torch.device("cpu")).available < planned.available / 2


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
        ("llama", {"use_cache": False}),  # as models are that a Trainer has trained
        ("gpt2", {"pad_token_id": 0, "n_embd": 32, "n_layer": 2, "n_head": 4}),  # which reads nothing without memory
        ("bloom", {}),
        ("deepseek_v3", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}),
    ],
)
def test_the_cache_is_counted_whatever_a_model_keeps_of_a_token(kind: str, sizes: dict[str, Any]) -> None:
    """Multi-query heads, latents: the plan does not know them, the model does."""
    common = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config = AutoConfig.for_model(kind, **common, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    held = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values.layers
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in held)
    assert numbers == 3 * Shape.of(config, ModelSection(name_or_path="unused")).cache > 0


def test_models_without_attention_or_without_linear_layers_have_a_plan() -> None:
    sizes: dict[str, Any] = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2)
    cfg = config()
    mamba = Shape.of(AutoConfig.for_model("mamba", **sizes), cfg.model)
    assert mamba.cache == 0 and plan.choose(mamba, cfg, Place(GIB)).peak < GIB
    gpt2 = AutoConfig.for_model("gpt2", vocab_size=300, n_embd=32, n_layer=2, n_head=4)
    assert Shape.of(gpt2, cfg.model).blocks == 2 * 12 * 32 * 32  # no torch.nn.Linear among them
