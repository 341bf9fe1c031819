"""How much memory will a run of phase 3 take, and how much of it can it use at once?  Arithmetic before anything loads.

A model becomes a `Shape`, a handful of numbers. `always`, `playing`, `learning` and `stepping` turn shape and config
into bytes, part by part; `choose` takes the most conversations and the largest micro-batch whose bytes fit. Each part
says whether it is exact or an estimate; tests/test_plan.py compares them with the tensors of small models.
"""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain import model_files, models, parallel
from posttrain.compat import TOKEN_CHUNK_SIZE
from posttrain.config import ModelSection, StarPORun
from posttrain.convgpt import ConvGPTModel
from posttrain.head import KL_TILE, VOCABULARY_CHUNK
from posttrain.prefixes import can_share
from posttrain.rollout import most_turns
from posttrain.sampler.slots import PREFILL_TOKENS, whole_blocks
from posttrain.selftest import UNFIT
from posttrain.types import UserError

MARGIN = 0.15  # of the free memory: for what no formula sees, fragments and workspaces
MOST_TOKENS = {"cuda": 16384, "cpu": 2048}  # of a micro-batch: a CPU is no faster with more, a GPU not expected to be
FLOAT = 4  # bytes of a float32
FOUR_BITS = 0.5 + (1 + 4 / 256) / 64  # of a number under QLoRA: blocks of 64 share a scale, 256 scales another
EIGHT_BITS = 1 + 4 / 256  # of a moment of an 8-bit optimizer: blocks of 256 share a scale


class Shape(NamedTuple):
    """A model in numbers; Qwen2.5-0.5B is

    Shape(parameters=494e6, blocks=358e6, top=136e6, adapter=0, layers=24, hidden=896, query=896, key_value=128,
          intermediate=4864, behind=0, embedding=896, vocabulary=151936, states=896, tied=True, cache=6144)
    """

    parameters: int
    blocks: int  # numbers in the matrices of the decoder's blocks
    top: int  # numbers in the linear layers behind them, the output layer included
    adapter: int  # numbers that tuning=lora or qlora adds
    layers: int
    hidden: int  # width of a token between two blocks
    query: int  # query heads x head size
    key_value: int  # key-value heads x head size
    cache: int  # numbers that the KV cache holds of a token, over all layers
    intermediate: int  # width inside a block's MLP
    behind: int  # the widest layer between blocks and output layer; 0 where there is none
    embedding: int
    vocabulary: int
    states: int  # width of what the output layer multiplies
    tied: bool  # whether the output layer is the embedding
    fused: int = 0  # numbers of the blocks' weights that a rollout keeps a second time (posttrain/fused.py)

    @classmethod
    def of(cls, config: Any, model: ModelSection) -> Shape:
        """Counted on a model without memory, so for any architecture."""
        with torch.device("meta"):
            net: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        text, output = config.get_text_config(), net.get_output_embeddings()

        def inside(name: str) -> bool:  # a block's name has a number: model.layers.3.mlp.up_proj
            return any(part.isdigit() for part in name.split("."))

        outside = [
            layer for name, layer in net.named_modules() if isinstance(layer, torch.nn.Linear) and not inside(name)
        ]
        hidden = getattr(text, "transformer_dim", text.hidden_size)  # ConvGPT's blocks are narrower than its embedding
        heads = getattr(text, "num_attention_heads", None) or 0  # none: no attention, and no cache of keys and values
        size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
        key_value = (getattr(text, "num_key_value_heads", None) or heads) * size
        shape = cls(
            parameters=net.num_parameters(),
            blocks=sum(p.numel() for name, p in net.named_parameters() if p.ndim > 1 and inside(name)),
            top=sum(layer.weight.numel() for layer in outside),
            adapter=0,
            layers=text.num_hidden_layers,
            hidden=hidden,
            query=heads * size,
            key_value=key_value,
            cache=_cache_of_a_token(net, otherwise=2 * text.num_hidden_layers * key_value),
            intermediate=getattr(text, "intermediate_size", None) or 4 * hidden,
            behind=max((layer.out_features for layer in outside if layer is not output), default=0),
            embedding=net.get_input_embeddings().embedding_dim,
            vocabulary=output.out_features,
            states=output.in_features,
            tied=output.weight is net.get_input_embeddings().weight,
        )
        if isinstance(net.base_model, ConvGPTModel) and model.tuning == "full":
            shape = shape._replace(fused=shape.blocks + shape.embedding * shape.hidden)
        if (settings := models.peft_config(model, net)) is None:
            return shape
        from peft import get_peft_model

        adapted = get_peft_model(net, settings)
        return shape._replace(adapter=sum(p.numel() for p in adapted.parameters() if p.requires_grad))


def _cache_of_a_token(net: Any, otherwise: int) -> int:
    """Numbers that a model puts into its cache when it reads a token; `otherwise` where it cannot without memory."""
    net, always = net.bfloat16(), {"use_cache": True, "return_dict": True}  # experts want half precision there
    try:
        with torch.device("meta"), torch.no_grad():
            cache = getattr(net(input_ids=torch.zeros(1, 1, dtype=torch.long), **always), "past_key_values", None)
    except UNFIT:  # it looks at its inputs' values, as some do for padding
        return otherwise
    held = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return sum(tensor.numel() for tensor in held if tensor is not None)


def stored(cfg: StarPORun) -> int:
    """Bytes of a number of the weights; "auto" is float32."""
    return 2 if cfg.model.dtype in ("bfloat16", "float16") else FLOAT


def computed(cfg: StarPORun) -> int:
    """Bytes of a number that layers compute with, and that the KV cache holds."""
    return 2 if cfg.trainer.bf16 else stored(cfg)


# -------------------------------------------------------------------------------------------------------------- always


def trained(shape: Shape, cfg: StarPORun) -> list[tuple[int, int]]:
    """What the optimizer moves, as numbers and bytes of each: the policy or its adapter, then what the critic has."""
    tuned = cfg.model.tuning != "full"
    parts = [(shape.adapter if tuned else shape.parameters, FLOAT)]
    if cfg.algorithm.critical:
        parts.append((shape.states + 1, FLOAT))  # the value head
        if cfg.algorithm.critic.kind == "separate":
            unused = 0 if shape.tied else shape.vocabulary * shape.states
            parts += [(shape.parameters - unused + shape.adapter, FLOAT)]
    return parts


def always(shape: Shape, cfg: StarPORun) -> dict[str, int]:
    """What is held from the first update to the end. Exact, up to the 8 bits of small tensors."""
    size = stored(cfg)
    weights = shape.parameters * size + shape.adapter * FLOAT
    if cfg.model.tuning == "qlora":
        packed = shape.blocks + shape.top - shape.vocabulary * shape.states  # everything linear but the output layer
        weights -= round(packed * (size - FOUR_BITS))
    parts = trained(shape, cfg)
    critic = sum(count * each for count, each in parts[1:])
    if cfg.algorithm.critical and cfg.algorithm.critic.kind == "separate" and not shape.tied:
        critic += shape.vocabulary * shape.states * FLOAT  # copied, too
    eight = cfg.trainer.optim != "adamw_torch"
    copied = cfg.algorithm.beta > 0 or cfg.distillation is not None  # one copy is reference and teacher
    return {
        "weights": weights,
        "reference model": shape.parameters * size if copied and cfg.model.tuning == "full" else 0,
        "critic": critic,
        "optimizer": round(sum(2 * count * (EIGHT_BITS if eight else each) for count, each in parts)),
    }


# --------------------------------------------------------------------------------------------------------- at one time


def copies(shape: Shape, cfg: StarPORun, learns: bool) -> int:
    """Bytes of the bfloat16 copies that autocast makes of float32 weights.

    It keeps those of trained weights; others live as long as their product, or the graph that needs them.
    """
    if not cfg.trainer.bf16 or stored(cfg) == 2:
        return 0
    in_graph = learns and cfg.model.tuning == "lora" and not cfg.trainer.gradient_checkpointing
    return 2 * (shape.top + (shape.blocks if in_graph or cfg.model.tuning == "full" else 0))


def playing(shape: Shape, cfg: StarPORun, slots: int) -> dict[str, int]:
    """A rollout of so many conversations at once, all of which become as long as they may.

    The cache is exact where a model can count it (`_cache_of_a_token`), the rest an estimate for the slot engine: one
    forward pass over what is new to it.
    """
    if cfg.rollout.engine == "vllm":
        return {"bfloat16 weights": copies(shape, cfg, learns=False)}
    prompt = cfg.rollout.max_context - cfg.rollout.max_completion_length  # what leaves room for a turn
    parts = conversations(shape, computed(cfg), slots, cfg.rollout.max_context, prompt)
    return parts | {"bfloat16 weights": copies(shape, cfg, learns=False)}


def conversations(shape: Shape, size: int, slots: int, longest: int, prompt: int) -> dict[str, int]:
    """Bytes of so many conversations of `longest` tokens, of which `prompt` are read; `size` is that of a number."""
    length = whole_blocks(longest)
    tokens = min(slots * prompt, max(PREFILL_TOKENS, prompt))
    stream = tokens * FLOAT * (shape.embedding + 3 * shape.hidden)
    mlp = tokens * size * 3 * shape.intermediate
    # one layer's keys and values, twice: old and new ones while the cache grows, or those of chosen rows
    twice = slots * length * 2 * shape.key_value * size
    masks = 1 + shape.query // max(1, shape.key_value) * (1 + size)  # bytes for each pair of tokens
    attention = twice + tokens * (size * (4 * shape.query + 3 * shape.key_value) + masks * prompt)
    sampling = slots * shape.vocabulary * 32  # logits in the several precisions of sampling.py
    return {
        "fused weights": shape.fused * size,
        "KV cache": slots * length * shape.cache * size,
        "reading and sampling": max(stream + mlp, stream + attention, sampling),
    }


def rows_at_once(
    model: PreTrainedModel, section: ModelSection, longest: int, new: int, most: int, processes: int = 1
) -> int:
    """How many conversations of `longest` tokens, the last `new` of them sampled, fit beside a loaded model: `most`, or
    what the free memory of its device holds, which that many processes share on a CPU.

    UserError where not even one fits.
    """
    shape, size = Shape.of(copy.deepcopy(model.config), section), model.dtype.itemsize
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available // processes
    budget = free * (1 - MARGIN)
    takes = lambda count: sum(conversations(shape, size, count, longest, longest - new).values())  # noqa: E731
    fitting = largest(range(1, most + 1), budget, takes)
    if fitting is None:
        raise UserError(
            f"Not even one conversation of {longest} tokens fits into the {gib(free)} GiB that are free beside the "
            f"model; it takes {gib(takes(1))} GiB. Lower max_context and max_new_tokens, or take a smaller model."
        )
    return fitting


def learning(shape: Shape, cfg: StarPORun, tokens: int, cuda: bool) -> dict[str, int]:
    """Forward and backward pass of a micro-batch of so many tokens, as if all of them were sampled.

    What a block keeps for its backward pass is an estimate for a decoder with a gated MLP and fused attention (after
    Korthikanti et al., arXiv 2205.05198, section 4): norms and their inputs in float32, the rest as it is computed.
    """
    size, attention = computed(cfg), shape.query + shape.key_value
    block = FLOAT * (6 * shape.hidden + 2 * attention) + size * (4 * shape.intermediate + 2 * attention)
    before = size * (shape.embedding + 3 * shape.hidden) if shape.embedding != shape.hidden else 0  # ConvGPT's stage
    behind = size * 4 * shape.behind + FLOAT * 4 * shape.states
    kept = shape.layers * (FLOAT * shape.hidden if cfg.trainer.gradient_checkpointing else block)
    at_work = size * max(6 * shape.intermediate, 2 * shape.behind + shape.states)  # gradients of a layer's inside
    if cfg.trainer.gradient_checkpointing:
        at_work = size * 2 * shape.intermediate + block
    tile = output_tiles(shape, cfg, tokens, cuda)
    if cfg.distillation is not None:  # log-probs of both models, what they are made of and their gradients
        tile = max(tile, 6 * FLOAT * min(KL_TILE["cuda" if cuda else "cpu"], tokens * shape.vocabulary))
    in_flight = 2 * FLOAT * shape.vocabulary * shape.states if cfg.model.tuning == "full" else 0
    looks = 3 + (cfg.algorithm.beta > 0) if cfg.diagnostics.gradients_every else 1  # gradients of several losses
    policy, *critic = (count * each for count, each in trained(shape, cfg))
    # the prefixes that a minibatch shares wait beside the micro-batches for their gradients, as many tokens at most
    return {
        "gradients": max(policy + sum(critic), looks * policy),
        "activations": tokens * (before + kept + behind),
        "shared prefixes": tokens * (before + kept) if can_share(cfg) else 0,
        "the layer at work": max(tokens * at_work, tile) + in_flight,
        "bfloat16 weights": copies(shape, cfg, learns=True),
    }


def output_tiles(shape: Shape, cfg: StarPORun, tokens: int, cuda: bool) -> int:
    """Bytes of the logits that exist at any one time (posttrain/head.py), in all the forms that they take."""
    size, columns = computed(cfg), VOCABULARY_CHUNK["cuda" if cuda else "cpu"]
    logits = FLOAT * min(columns, shape.vocabulary)
    forms = 0 if cuda else 10 if size == FLOAT else 8  # a GPU has a kernel for what comes after the product
    return min(tokens, TOKEN_CHUNK_SIZE) * (size * columns + forms * logits)


def stepping(shape: Shape, cfg: StarPORun, cuda: bool) -> dict[str, int]:
    """The optimizer's step. On a GPU torch's AdamW takes the roots of all second moments at once."""
    gradients = sum(count * each for count, each in trained(shape, cfg))
    return {"gradients": gradients, "square roots": gradients if cuda and cfg.trainer.optim == "adamw_torch" else 0}


# ------------------------------------------------------------------------------------------------------------ the plan


class Plan(NamedTuple):
    slots: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    parts: dict[str, dict[str, int]]  # {"always": {"weights": ..., ...}, "playing": {...}, ...}, in bytes
    available: int  # bytes that this process holds or can have
    warnings: list[str]

    @property
    def changes(self) -> dict[str, int]:
        """What was chosen, by dotted paths."""
        return {
            "rollout.slots": self.slots,
            "trainer.micro_batch_tokens": self.micro_batch_tokens,
            "trainer.gradient_checkpointing": self.gradient_checkpointing,
        }

    @property
    def peak(self) -> int:
        return most(self.parts)

    def table(self) -> str:
        """What takes how much, in plain words."""
        rows = [
            (name if phase == "always" else f"{phase}: {name}", size)
            for phase, sizes in self.parts.items()
            for name, size in sizes.items()
            if size >= 2**20
        ]
        rows.append(("at most, at one time", self.peak))
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {gib(size):>8}" for name, size in rows]
        what = f"{self.slots} conversations at a time, micro-batches of {self.micro_batch_tokens} tokens"
        what += ", activations recomputed" if self.gradient_checkpointing else ""
        return "\n".join([f"memory as planned, GiB ({what})", *lines]) + f" of {gib(self.available)}"


def most(parts: Mapping[str, Mapping[str, int]]) -> int:
    """Bytes at the worst moment: phases follow each other, `always` is there in all of them."""
    totals = {phase: sum(sizes.values()) for phase, sizes in parts.items()}
    return totals.pop("always") + max(totals.values())


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def largest(candidates: Sequence[int], budget: float, takes: Callable[[int], int]) -> int | None:
    """The last of these rising numbers that takes no more than the budget; None where the first one does."""
    fitting = bisect_right(candidates, budget, key=takes)
    return candidates[fitting - 1] if fitting else None


def choose(
    shape: Shape, cfg: StarPORun, free: int, *, held: int = 0, vllm: int = 0, cuda: bool = True, processes: int = 1
) -> Plan:
    """The config's own numbers where it has them, and else the largest that fit into `free` bytes but for a margin.

    held: what this process has already. vllm: what vLLM will take.
    UserError where a number is to be chosen and the smallest does not fit.
    """
    rollout, context = cfg.rollout, cfg.rollout.max_context
    samples, groups = rollout.num_generations, -(-rollout.groups // processes)
    episodes = cfg.algorithm.filter.most(rollout.groups, len(cfg.envs)) * samples
    contexts = 1 if rollout.context == "full" else most_turns(cfg.envs, cfg.protocol)
    share = episodes * contexts * context // (cfg.algorithm.minibatches * processes)
    cap = max(context, min(share, MOST_TOKENS["cuda" if cuda else "cpu"]))

    base = held + vllm + sum(always(shape, cfg).values())
    budget = held + free * (1 - MARGIN)
    if cfg.trainer.gradient_checkpointing is None:
        wanted = cfg.trainer.micro_batch_tokens or min(4 * context, cap)
        cfg = checkpointed(cfg, False)
        cfg = checkpointed(cfg, base + sum(learning(shape, cfg, wanted, cuda).values()) > budget)
    step = sum(stepping(shape, cfg, cuda).values())
    whole_groups = [*range(1, samples), *range(samples, samples * groups + 1, samples)]  # which share their prompt
    slots = rollout.slots or largest(
        whole_groups, budget - base, lambda count: sum(playing(shape, cfg, count).values())
    )
    tokens = cfg.trainer.micro_batch_tokens or largest(
        [*range(context, cap, 256), cap],
        budget - base,
        lambda count: max(step, sum(learning(shape, cfg, count, cuda).values())),
    )
    parts = {
        "always": {"held already": held, "vLLM": vllm} | always(shape, cfg),
        "playing": playing(shape, cfg, slots or 1),
        "learning": learning(shape, cfg, max(context, min(tokens or context, share)), cuda),
        "stepping": stepping(shape, cfg, cuda),
    }
    if slots is None or tokens is None:
        raise UserError(too_much(cfg, slots or 1, tokens or context, parts, budget))
    warnings = []
    if most(parts) > held + free:
        warnings.append(
            f"This run is planned to take {gib(most(parts))} GiB, and {gib(held + free)} GiB are there: it may run out."
            " Lower rollout.slots or trainer.micro_batch_tokens, or write null for the plan to choose."
        )
    return Plan(slots, tokens, bool(cfg.trainer.gradient_checkpointing), parts, held + free, warnings)


def checkpointed(cfg: StarPORun, on: bool) -> StarPORun:
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"gradient_checkpointing": on})})


def too_much(cfg: StarPORun, slots: int, tokens: int, parts: Mapping[str, Mapping[str, int]], budget: float) -> str:
    """The paragraph for a run that cannot fit: what takes how much, and what to lower."""
    listed = "; ".join(
        f"{phase} " + ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size >= 2**20)
        for phase, sizes in parts.items()
    )
    full = cfg.model.tuning == "full"
    remedies = {
        "algorithm.critic.kind=shared": cfg.algorithm.critical and cfg.algorithm.critic.kind == "separate",
        "algorithm.beta=0 (no reference model)": full and cfg.algorithm.beta > 0 and cfg.distillation is None,
        "distillation=null (no teacher)": full and cfg.algorithm.beta == 0 and cfg.distillation is not None,
        "trainer.gradient_checkpointing=true": not cfg.trainer.gradient_checkpointing,
        "trainer.optim=adamw_8bit": full and cfg.trainer.optim == "adamw_torch",
        "model.tuning=lora": full,
        f"a rollout.max_context below {cfg.rollout.max_context}": True,
        "a smaller model": True,
    }
    return (
        f"This run does not fit: with rollout.slots={slots} conversations of up to {cfg.rollout.max_context} tokens and"
        f" trainer.micro_batch_tokens={tokens} it takes {gib(most(parts))} GiB, and {gib(budget)} GiB can be used here"
        f" ({MARGIN:.0%} of what is free are left alone). In GiB: {listed}. What helps:"
        f" {', '.join(key for key, on in remedies.items() if on)}."
    )


def make(cfg: StarPORun, device: torch.device) -> Plan:
    """The plan for this process's device; all processes choose what fits the one with the least memory."""
    cuda = device.type == "cuda"
    if cuda:
        (free, total), held = torch.cuda.mem_get_info(device), torch.cuda.memory_allocated(device)
    else:
        total = psutil.virtual_memory().total
        free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        held = psutil.Process().memory_info().rss
    free, held = min(parallel.gather([free])), max(parallel.gather([held]))
    vllm = round(total * cfg.rollout.vllm_gpu_memory_utilization) if cfg.rollout.engine == "vllm" else 0
    shape = Shape.of(model_files.load_config(cfg.model), cfg.model)
    return choose(shape, cfg, free, held=held, vllm=vllm, cuda=cuda, processes=parallel.size())
