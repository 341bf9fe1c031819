"""How much memory does a run of phase 3 take, and which numbers of slots and tokens fit?  Computed before any loading.

`always`, `playing`, `learning` and `stepping` turn shape and config into bytes, part by part; `choose` finds the
largest number of conversations and the largest micro-batch that fit.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import psutil
import torch
from transformers import PreTrainedModel

from posttrain.config import ModelSection, StarPORun
from posttrain.models import VOCABULARY_CHUNK, kl_tokens, model_files
from posttrain.plan import parts
from posttrain.plan.parts import (
    FLOAT,
    MARGIN,
    Numbers,
    OfAToken,
    Parts,
    gib,
    largest,
    lines_of_parts,
    peak_bytes,
    sentence_of_parts,
)
from posttrain.plan.shape import Shape
from posttrain.rollout import most_turns, whole_rows
from posttrain.runtime import launcher, parallel
from posttrain.types import UserError

MOST_TOKENS = {"cuda": 16384, "cpu": 2048}  # of a micro-batch: more make a CPU no faster, nor, as we expect, a GPU


def trained_by_critic(shape: Shape, cfg: StarPORun) -> int:
    """Return how many numbers the critic alone has to train, float32 like those of the policy."""
    if not cfg.algorithm.critical:
        return 0
    head = shape.states + 1
    if cfg.algorithm.critic.kind != "separate":
        return head
    unused = 0 if shape.tied else shape.vocabulary * shape.states
    return head + shape.parameters - unused + shape.adapter


def trained(shape: Shape, cfg: StarPORun) -> int:
    """Return how many numbers the optimizer changes."""
    return parts.trained_parameters(shape, cfg.model.tuning) + trained_by_critic(shape, cfg)


def always(shape: Shape, cfg: StarPORun, shards: int = 1) -> Parts:
    """Return the bytes that are held from the first update on (exact, except for small tensors in 8 bits)."""
    numbers, critic = Numbers.of(cfg, shards), FLOAT * trained_by_critic(shape, cfg)
    if cfg.algorithm.critical and cfg.algorithm.critic.kind == "separate" and not shape.tied:
        critic += shape.vocabulary * shape.states * FLOAT  # the output layer is copied as well
    copied = cfg.algorithm.beta > 0 or cfg.remembers  # one copy is both
    teacher = shape.teacher.parameters * of_teacher(cfg, shards).stored if shape.teacher else 0
    return {
        "weights": parts.weights(shape, numbers),
        "reference model": numbers.mine(shape.parameters * numbers.stored) if copied and numbers.full else 0,
        "teacher": numbers.mine(teacher),
        "critic": numbers.mine(critic),
        "optimizer": parts.moments(trained(shape, cfg), numbers),
    }


def of_teacher(cfg: StarPORun, shards: int = 1) -> Numbers:
    """Return the precision of a teacher, which is frozen; sharded weights have that of the policy's."""
    numbers = Numbers.of(cfg, shards)
    return numbers._replace(stored=numbers.computed if shards == 1 else numbers.stored, tuning="lora", recomputed=False)


def playing(shape: Shape, cfg: StarPORun, slots: int, shards: int = 1) -> Parts:
    """Return the bytes of a rollout of `slots` conversations, each as long as `rollout.max_context`.

    The cache is exact if the model's cache can be counted (`Shape.cache`). The rest is an estimate for the slot engine:
    one forward pass over the new tokens. Sharded weights are gathered for a rollout.
    """
    numbers = Numbers.of(cfg, shards)
    whole = {"gathered weights": shape.parameters * numbers.stored if shards > 1 else 0}
    whole["bfloat16 weights"] = parts.copies(shape, numbers, kept=True)
    if cfg.rollout.engine == "vllm" or cfg.rollout.servers:
        return whole
    prompt = cfg.rollout.max_context - cfg.rollout.max_completion_length  # the longest that leaves room for a turn
    return parts.conversations(shape, numbers.computed, slots, cfg.rollout.max_context, prompt) | whole


def replaying(shape: Shape, cfg: StarPORun, slots: int, cuda: bool) -> Parts:
    """Return the bytes that stay from rollout to rollout where steps are replayed as CUDA graphs.

    These are what graphs have the addresses of, and the memory that they share: the tensors of the largest step.
    """
    if not cuda or cfg.rollout.cuda_graphs is False or cfg.rollout.engine not in ("auto", "slots"):
        return {}
    slots = whole_rows(slots)
    whole = playing(shape, cfg, slots)
    kept = {name: whole[name] for name in ("KV cache", "fused weights", "bfloat16 weights")}
    return kept | {"CUDA graphs": parts.graph_pool(shape, slots)}


def learning(shape: Shape, cfg: StarPORun, tokens: int, cuda: bool, shards: int = 1) -> Parts:
    """Return the bytes of a forward and backward pass over a micro-batch, as if all tokens were sampled."""
    numbers = Numbers.of(cfg, shards)
    token = OfAToken.of(shape, numbers)
    kind = "cuda" if cuda else "cpu"
    tile = parts.output_tile(shape, numbers.computed, tokens, VOCABULARY_CHUNK[kind], cuda)
    if cfg.distillation is not None:  # logits and log-probs of two models, and their gradients
        tile = max(tile, 6 * FLOAT * shape.vocabulary * min(kl_tokens(kind, shape.vocabulary), tokens))
    reading = tokens * OfAToken.of(shape.teacher, of_teacher(cfg, shards)).at_work if shape.teacher else 0
    in_flight = 2 * FLOAT * shape.vocabulary * shape.states if numbers.full else 0
    kept, freed = (parts.copies(shape, numbers, kept=on) for on in (not numbers.recomputed, False))
    # the prefixes of a minibatch are kept until all its micro-batches are done; at most as many tokens, with copies of
    # frozen weights of their own
    prefixes = tokens * (token.before + token.kept) + kept - freed
    return {
        "gradients": numbers.mine(FLOAT * trained(shape, cfg)),
        "activations": token.activations(tokens),
        "shared prefixes": prefixes if cfg.can_share_prefixes else 0,
        "the layer at work": max(tokens * token.at_work, tile, reading) + in_flight,
        "gathered weights": parts.gathered_weights(shape, numbers),
        "bfloat16 weights": kept,
    }


def stepping(shape: Shape, cfg: StarPORun, shards: int = 1) -> Parts:
    """Return the bytes of an optimizer step."""
    return {"gradients": Numbers.of(cfg, shards).mine(FLOAT * trained(shape, cfg))}


def rows_at_once(
    model: PreTrainedModel, section: ModelSection, longest: int, new: int, most: int, processes: int = 1
) -> tuple[int, bool]:
    """Return how many conversations fit into the free memory beside a loaded model, and whether CUDA graphs do, too.

    Steps that are graphs have `whole_rows`, of which each has its part of the cache, and a memory pool of their own.

    Args:
        longest: tokens of a conversation, of which the last `new` are sampled.
        most: conversations.
        processes: that share the memory of a CPU.

    Raises:
        UserError: not even one fits.
    """
    shape, size = Shape.of(copy.deepcopy(model.config), section), model.dtype.itemsize
    if cuda := model.device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier sampler had is not free otherwise
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available // processes

    def takes(count: int, graphs: bool = False) -> int:
        rows = whole_rows(count) if graphs else count
        held = sum(parts.conversations(shape, size, rows, longest, longest - new).values())
        return held + (parts.graph_pool(shape, rows) if graphs else 0)

    for graphs in (True, False) if cuda else (False,):
        fitting = largest(range(1, most + 1), free * (1 - MARGIN), partial(takes, graphs=graphs))
        if fitting is not None:
            return fitting, graphs
    raise UserError(
        f"Not even one conversation of {longest} tokens fits into the {gib(free)} GiB that are free beside the "
        f"model; it takes {gib(takes(1))} GiB. Lower max_context and max_new_tokens, or use a smaller model."
    )


# ------------------------------------------------------------------------------------------------------------ the plan


class Plan(NamedTuple):
    """The sizes of a run of phase 3 that fit into the memory, and the bytes that they take."""

    slots: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    cuda_graphs: bool
    parts: dict[str, dict[str, int]]  # {"always": {"weights": ..., ...}, "playing": {...}, ...}, in bytes
    available: int  # bytes that this process holds or can get
    warnings: list[str]

    @property
    def changes(self) -> dict[str, int]:
        """Return the chosen values by their keys in the config."""
        return {
            "rollout.slots": self.slots,
            "trainer.micro_batch_tokens": self.micro_batch_tokens,
            "trainer.gradient_checkpointing": self.gradient_checkpointing,
            "rollout.cuda_graphs": self.cuda_graphs,
        }

    @property
    def peak(self) -> int:
        return peak_bytes(self.parts)

    def table(self) -> str:
        """Return the plan as a table: a line for each part."""
        lines = lines_of_parts(self.parts, self.peak)
        what = f"{self.slots} conversations at a time, micro-batches of {self.micro_batch_tokens} tokens"
        what += ", activations recomputed" if self.gradient_checkpointing else ""
        return "\n".join([f"memory as planned, GiB ({what})", *lines]) + f" of {gib(self.available)}"


class Place(NamedTuple):
    """The memory for a run: Place(free=23 * 2**30, held=0, vllm=0, cuda=True, processes=8, sharded=False)"""

    free: int  # bytes that this process can still get
    held: int = 0  # bytes that it holds already
    vllm: int = 0  # bytes that vLLM will take
    cuda: bool = True
    processes: int = 1
    sharded: bool = False  # whether parameters, gradients and moments are divided among them

    @property
    def shards(self) -> int:
        return self.processes if self.sharded else 1

    @classmethod
    def here(cls, device: torch.device, vllm_share: float = 0.0) -> Place:
        """Return the state of this process's device; of several processes that of the one with the least memory.

        A collective call. vllm_share: of the device's memory, for vLLM.
        """
        cuda = device.type == "cuda"
        if cuda:
            (free, total), held = torch.cuda.mem_get_info(device), torch.cuda.memory_allocated(device)
        else:
            total = psutil.virtual_memory().total
            free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            held = psutil.Process().memory_info().rss
        free, held = min(parallel.gather([free])), max(parallel.gather([held]))
        return cls(free, held, round(total * vllm_share), cuda, parallel.size(), launcher.sharding() == "fsdp2")


def choose(shape: Shape, cfg: StarPORun, place: Place) -> Plan:
    """Return the plan: the config's own numbers where it has them, else the largest that fit, with a margin.

    Raises:
        UserError: a number has to be chosen, and the smallest does not fit.
    """
    if cfg.rollout.cuda_graphs is None:
        if place.shards > 1:  # each rollout gathers weights at new addresses, and would record all graphs again
            return choose(shape, with_graphs(cfg, False), place)
        try:
            return choose(shape, with_graphs(cfg, True), place)
        except UserError:  # they keep memory during updates
            return choose(shape, with_graphs(cfg, False), place)
    if cfg.trainer.gradient_checkpointing is None:
        return _keeping_or_recomputing(shape, cfg, place)
    free, held, vllm, cuda, processes, _ = place
    rollout, context, shards = cfg.rollout, cfg.rollout.max_context, place.shards
    samples, groups = rollout.num_generations, -(-rollout.groups // processes)
    episodes = cfg.algorithm.filter.most(rollout.groups, len(cfg.envs)) * samples
    contexts = 1 if rollout.context == "full" else most_turns(cfg.envs, cfg.protocol)
    share = episodes * contexts * context // (cfg.algorithm.minibatches * processes)
    cap = max(context, min(share, MOST_TOKENS["cuda" if cuda else "cpu"]))

    there = {"held already": held, "vLLM": vllm} | always(shape, cfg, shards)
    there["kernels"] = parts.kernels(Numbers.of(cfg, shards), cuda)
    base = sum(there.values())
    budget = held + free * (1 - MARGIN)

    def stays(count: int) -> Parts:
        return replaying(shape, cfg, count, cuda)

    def comes(count: int) -> Parts:
        return {name: size for name, size in playing(shape, cfg, count, shards).items() if name not in stays(count)}

    def learns(count: int) -> int:
        return sum(learning(shape, cfg, count, cuda, shards).values())

    def rollout_peak(count: int, update: int) -> int:  # beside what stays of a rollout an update has to fit
        staying = sum(stays(count).values())
        return staying + max(sum(comes(count).values()), update if staying else 0)

    likely = cfg.trainer.micro_batch_tokens or min(4 * context, cap)
    step = sum(stepping(shape, cfg, shards).values())
    whole_groups = [
        *range(1, samples),
        *range(samples, samples * groups + 1, samples),
    ]  # the samples of a group share their prompt
    slots = rollout.slots
    for update in (learns(likely), learns(context)):
        slots = slots or largest(whole_groups, budget - base, partial(rollout_peak, update=update))
    base += sum(stays(slots or 1).values())
    tokens = cfg.trainer.micro_batch_tokens or largest(
        [*range(context, cap, 256), cap],
        budget - base,
        lambda count: max(step, learns(count)),
    )
    by_phase = {
        "always": there | stays(slots or 1),
        "playing": comes(slots or 1),
        "learning": learning(shape, cfg, max(context, min(tokens or context, share)), cuda, shards),
        "stepping": stepping(shape, cfg, shards),
    }
    if slots is None or tokens is None:
        raise UserError(does_not_fit(cfg, slots or 1, tokens or context, by_phase, budget, place.sharded))
    warnings = []
    if (peak := peak_bytes(by_phase)) > held + free:
        warnings.append(
            f"This run is planned to take {gib(peak)} GiB of {gib(held + free)} GiB: it may run out of memory. Lower"
            " rollout.slots or trainer.micro_batch_tokens, or write null to let the plan choose."
        )
    recomputes, graphs = bool(cfg.trainer.gradient_checkpointing), bool(stays(1))
    return Plan(slots, tokens, recomputes, graphs, by_phase, held + free, warnings)


def _keeping_or_recomputing(shape: Shape, cfg: StarPORun, place: Place) -> Plan:
    """Return the plan that keeps activations, or the one that computes them again where that is worth its time.

    Recomputation adds a third to the products of an update. Fewer conversations at a time take as many times more
    decoding steps, which are most of an iteration: half as many again are worth it.
    """
    recomputing = choose(shape, with_checkpointing(cfg, True), place)
    try:
        keeping = choose(shape, with_checkpointing(cfg, False), place)
    except UserError:
        return recomputing
    tokens = cfg.trainer.micro_batch_tokens or min(4 * cfg.rollout.max_context, recomputing.micro_batch_tokens)
    enough = keeping.micro_batch_tokens >= tokens and 1.5 * keeping.slots > recomputing.slots
    return keeping if enough and not keeping.warnings else recomputing


def with_graphs(cfg: StarPORun, on: bool) -> StarPORun:
    """Return the config with CUDA graphs switched on or off."""
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"cuda_graphs": on})})


def with_checkpointing(cfg: StarPORun, on: bool) -> StarPORun:
    """Return the config with gradient checkpointing switched on or off."""
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"gradient_checkpointing": on})})


def does_not_fit(
    cfg: StarPORun, slots: int, tokens: int, by_phase: Mapping[str, Mapping[str, int]], budget: float, sharded: bool
) -> str:
    """Return the message for a run that does not fit: the size of each part, and what to change."""
    full = cfg.model.tuning == "full"
    remedies = {
        "algorithm.critic.kind=shared": cfg.algorithm.critical and cfg.algorithm.critic.kind == "separate",
        "algorithm.beta=0 (no reference model)": full and cfg.algorithm.beta > 0 and not cfg.remembers,
        "rollout.cuda_graphs=false": "CUDA graphs" in by_phase["always"],
        "distillation=null (no teacher)": cfg.teacher or (full and cfg.algorithm.beta == 0 and cfg.remembers),
        "trainer.gradient_checkpointing=true": not cfg.trainer.gradient_checkpointing,
        "trainer.optim=adamw_8bit": full and cfg.trainer.optim == "adamw_torch" and not sharded,
        "model.tuning=lora": full,
        f"a rollout.max_context below {cfg.rollout.max_context}": True,
        "a smaller model": True,
    }
    return (
        f"This run does not fit: with rollout.slots={slots} conversations of up to {cfg.rollout.max_context} tokens and"
        f" trainer.micro_batch_tokens={tokens} it takes {gib(peak_bytes(by_phase))} GiB, and {gib(budget)} GiB can be"
        f" used here ({MARGIN:.0%} of the free memory are kept free). In GiB: {sentence_of_parts(by_phase)}. What"
        f" helps: {', '.join(key for key, on in remedies.items() if on)}."
    )


def make_plan(cfg: StarPORun, device: torch.device) -> Plan:
    """Return the plan for this process's device. A collective call: all processes get what fits the smallest memory.

    Raises:
        UserError: the run does not fit.
    """
    vllm_share = cfg.rollout.vllm_gpu_memory_utilization if cfg.rollout.engine == "vllm" else 0.0
    shape = Shape.of(model_files.load_config(cfg.model), cfg.model)
    if cfg.teacher:
        shape = shape._replace(teacher=Shape.of(model_files.load_config(cfg.teacher), cfg.teacher))
    return choose(shape, cfg, Place.here(device, vllm_share))
