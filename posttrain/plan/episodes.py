"""How much memory will a run of phase 3 take, and how much of it can it use at once?  Arithmetic before anything loads.

`always`, `playing`, `learning` and `stepping` turn shape and config into bytes, part by part; `choose` takes the most
conversations and the largest micro-batch whose bytes fit.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import NamedTuple

import psutil
import torch
from transformers import PreTrainedModel

from posttrain.config import ModelSection, StarPORun
from posttrain.models import KL_TILE, VOCABULARY_CHUNK, model_files
from posttrain.plan import parts
from posttrain.plan.parts import FLOAT, MARGIN, Numbers, OfAToken, Parts, gib, largest, listed, most
from posttrain.plan.shape import Shape
from posttrain.rollout import most_turns
from posttrain.runtime import launcher, parallel
from posttrain.types import UserError

MOST_TOKENS = {"cuda": 16384, "cpu": 2048}  # of a micro-batch: a CPU is no faster with more, a GPU not expected to be


def trained(shape: Shape, cfg: StarPORun) -> list[tuple[int, int]]:
    """What the optimizer moves, as numbers and bytes of each: the policy or its adapter, then what the critic has."""
    tuned = cfg.model.tuning != "full"
    counts = [(shape.adapter if tuned else shape.parameters, FLOAT)]
    if cfg.algorithm.critical:
        counts.append((shape.states + 1, FLOAT))  # the value head
        if cfg.algorithm.critic.kind == "separate":
            unused = 0 if shape.tied else shape.vocabulary * shape.states
            counts += [(shape.parameters - unused + shape.adapter, FLOAT)]
    return counts


def always(shape: Shape, cfg: StarPORun, shards: int = 1) -> Parts:
    """What is held from the first update to the end. Exact, up to the 8 bits of small tensors."""
    numbers, counts = Numbers.of(cfg, shards), trained(shape, cfg)
    critic = sum(count * each for count, each in counts[1:])
    if cfg.algorithm.critical and cfg.algorithm.critic.kind == "separate" and not shape.tied:
        critic += shape.vocabulary * shape.states * FLOAT  # copied, too
    copied = cfg.algorithm.beta > 0 or cfg.distillation is not None  # one copy is reference and teacher
    return {
        "weights": parts.weights(shape, numbers),
        "reference model": numbers.mine(shape.parameters * numbers.stored) if copied and numbers.full else 0,
        "critic": numbers.mine(critic),
        "optimizer": parts.moments(counts, numbers),
    }


def playing(shape: Shape, cfg: StarPORun, slots: int, shards: int = 1) -> Parts:
    """A rollout of so many conversations at once, all of which become as long as they may.

    The cache is exact where a model can count it (`Shape.cache`), the rest an estimate for the slot engine: one forward
    pass over what is new to it. Sharded weights are gathered whole for a rollout.
    """
    numbers = Numbers.of(cfg, shards)
    whole = {"gathered weights": shape.parameters * numbers.stored if shards > 1 else 0}
    whole["bfloat16 weights"] = parts.copies(shape, numbers, learns=False)
    if cfg.rollout.engine == "vllm" or cfg.rollout.servers:
        return whole
    prompt = cfg.rollout.max_context - cfg.rollout.max_completion_length  # what leaves room for a turn
    return parts.conversations(shape, numbers.computed, slots, cfg.rollout.max_context, prompt) | whole


def learning(shape: Shape, cfg: StarPORun, tokens: int, cuda: bool, shards: int = 1) -> Parts:
    """Forward and backward pass of a micro-batch of so many tokens, as if all of them were sampled."""
    numbers = Numbers.of(cfg, shards)
    token = OfAToken.of(shape, numbers)
    tile = output_tiles(shape, cfg, tokens, cuda)
    if cfg.distillation is not None:  # log-probs of both models, what they are made of and their gradients
        tile = max(tile, 6 * FLOAT * min(KL_TILE["cuda" if cuda else "cpu"], tokens * shape.vocabulary))
    in_flight = 2 * FLOAT * shape.vocabulary * shape.states if numbers.full else 0
    # the prefixes that a minibatch shares wait beside the micro-batches for their gradients, as many tokens at most
    return {
        "gradients": numbers.mine(sum(count * each for count, each in trained(shape, cfg))),
        "activations": token.activations(tokens),
        "shared prefixes": tokens * (token.before + token.kept) if cfg.can_share_prefixes else 0,
        "the layer at work": max(tokens * token.at_work, tile) + in_flight,
        "gathered weights": parts.gathered(shape, numbers),
        "bfloat16 weights": parts.copies(shape, numbers, learns=True),
    }


def output_tiles(shape: Shape, cfg: StarPORun, tokens: int, cuda: bool) -> int:
    """Bytes of the logits that exist at any one time (forward.py of posttrain/models)."""
    columns = VOCABULARY_CHUNK["cuda" if cuda else "cpu"]
    return parts.output_tile(shape, Numbers.of(cfg).computed, tokens, columns, cuda)


def stepping(shape: Shape, cfg: StarPORun, cuda: bool, shards: int = 1) -> Parts:
    """The optimizer's step. On a GPU torch's AdamW takes the roots of all second moments at once."""
    numbers = Numbers.of(cfg, shards)
    gradients = numbers.mine(sum(count * each for count, each in trained(shape, cfg)))
    return {"gradients": gradients, "square roots": gradients if cuda and not numbers.eight_bits else 0}


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
    takes = lambda count: sum(parts.conversations(shape, size, count, longest, longest - new).values())  # noqa: E731
    fitting = largest(range(1, most + 1), budget, takes)
    if fitting is None:
        raise UserError(
            f"Not even one conversation of {longest} tokens fits into the {gib(free)} GiB that are free beside the "
            f"model; it takes {gib(takes(1))} GiB. Lower max_context and max_new_tokens, or take a smaller model."
        )
    return fitting


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


class Place(NamedTuple):
    """Where a run is: Place(free=23 * 2**30, held=0, vllm=0, cuda=True, processes=8, sharded=False)"""

    free: int  # bytes that this process can have
    held: int = 0  # bytes that it has already
    vllm: int = 0  # bytes that vLLM will take
    cuda: bool = True
    processes: int = 1
    sharded: bool = False  # whether they share parameters, gradients and moments

    @property
    def shards(self) -> int:
        return self.processes if self.sharded else 1

    @classmethod
    def here(cls, device: torch.device, vllm_share: float = 0.0) -> Place:
        """This process's device as it is now; of several processes the one that has least left counts for all."""
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
    """The config's own numbers where it has them, and else the largest that fit into the free bytes but for a margin.

    UserError where a number is to be chosen and the smallest does not fit.
    """
    free, held, vllm, cuda, processes, _ = place
    rollout, context, shards = cfg.rollout, cfg.rollout.max_context, place.shards
    samples, groups = rollout.num_generations, -(-rollout.groups // processes)
    episodes = cfg.algorithm.filter.most(rollout.groups, len(cfg.envs)) * samples
    contexts = 1 if rollout.context == "full" else most_turns(cfg.envs, cfg.protocol)
    share = episodes * contexts * context // (cfg.algorithm.minibatches * processes)
    cap = max(context, min(share, MOST_TOKENS["cuda" if cuda else "cpu"]))

    base = held + vllm + sum(always(shape, cfg, shards).values())
    budget = held + free * (1 - MARGIN)
    if cfg.trainer.gradient_checkpointing is None:
        wanted = cfg.trainer.micro_batch_tokens or min(4 * context, cap)
        cfg = checkpointed(cfg, False)
        cfg = checkpointed(cfg, base + sum(learning(shape, cfg, wanted, cuda, shards).values()) > budget)
    step = sum(stepping(shape, cfg, cuda, shards).values())
    whole_groups = [*range(1, samples), *range(samples, samples * groups + 1, samples)]  # which share their prompt
    slots = rollout.slots or largest(
        whole_groups, budget - base, lambda count: sum(playing(shape, cfg, count, shards).values())
    )
    tokens = cfg.trainer.micro_batch_tokens or largest(
        [*range(context, cap, 256), cap],
        budget - base,
        lambda count: max(step, sum(learning(shape, cfg, count, cuda, shards).values())),
    )
    found = {
        "always": {"held already": held, "vLLM": vllm} | always(shape, cfg, shards),
        "playing": playing(shape, cfg, slots or 1, shards),
        "learning": learning(shape, cfg, max(context, min(tokens or context, share)), cuda, shards),
        "stepping": stepping(shape, cfg, cuda, shards),
    }
    if slots is None or tokens is None:
        raise UserError(too_much(cfg, slots or 1, tokens or context, found, budget, place.sharded))
    warnings = []
    if most(found) > held + free:
        warnings.append(
            f"This run is planned to take {gib(most(found))} GiB, and {gib(held + free)} GiB are there: it may run out."
            " Lower rollout.slots or trainer.micro_batch_tokens, or write null for the plan to choose."
        )
    return Plan(slots, tokens, bool(cfg.trainer.gradient_checkpointing), found, held + free, warnings)


def checkpointed(cfg: StarPORun, on: bool) -> StarPORun:
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"gradient_checkpointing": on})})


def too_much(
    cfg: StarPORun, slots: int, tokens: int, found: Mapping[str, Mapping[str, int]], budget: float, sharded: bool
) -> str:
    """The paragraph for a run that cannot fit: what takes how much, and what to lower."""
    full = cfg.model.tuning == "full"
    remedies = {
        "algorithm.critic.kind=shared": cfg.algorithm.critical and cfg.algorithm.critic.kind == "separate",
        "algorithm.beta=0 (no reference model)": full and cfg.algorithm.beta > 0 and cfg.distillation is None,
        "distillation=null (no teacher)": full and cfg.algorithm.beta == 0 and cfg.distillation is not None,
        "trainer.gradient_checkpointing=true": not cfg.trainer.gradient_checkpointing,
        "trainer.optim=adamw_8bit": full and cfg.trainer.optim == "adamw_torch" and not sharded,
        "model.tuning=lora": full,
        f"a rollout.max_context below {cfg.rollout.max_context}": True,
        "a smaller model": True,
    }
    return (
        f"This run does not fit: with rollout.slots={slots} conversations of up to {cfg.rollout.max_context} tokens and"
        f" trainer.micro_batch_tokens={tokens} it takes {gib(most(found))} GiB, and {gib(budget)} GiB can be used here"
        f" ({MARGIN:.0%} of what is free are left alone). In GiB: {listed(found)}. What helps:"
        f" {', '.join(key for key, on in remedies.items() if on)}."
    )


def make(cfg: StarPORun, device: torch.device) -> Plan:
    """The plan for this process's device; all processes choose what fits the one with the least memory."""
    vllm_share = cfg.rollout.vllm_gpu_memory_utilization if cfg.rollout.engine == "vllm" else 0.0
    shape = Shape.of(model_files.load_config(cfg.model), cfg.model)
    return choose(shape, cfg, Place.here(device, vllm_share))
