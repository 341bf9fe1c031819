"""How many seconds does an iteration take, and how many hours a run?  A roofline model of bytes and FLOPs.

The factors below are the same for every model and device. What launches cost on a GPU (of operations, of compiled
layers, with recomputation, in a graph) and `stream` were measured on an H100; the other factors were not fitted to the
figures that test the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from posttrain.config import StarPORun, Suite
from posttrain.plan.devices import OPERATIONS, Device, Fleet
from posttrain.plan.episodes import Plan, with_checkpointing
from posttrain.plan.parts import FLOAT, SAMPLING, Numbers, OfAToken, trained_parameters
from posttrain.plan.rows import RowSettings
from posttrain.plan.shape import Shape
from posttrain.plan.work import CHARACTERS, DataRows, Episodes


class Factors(NamedTuple):
    """The shares of the datasheet's figures that are reached."""

    # share of the peak in products of large matrices: cuBLAS reaches 70 to 80 % with thousands of columns, and a small
    # model has hundreds. Other kernels are counted separately (`stream`), so the MFU is lower than this.
    matmul: float = 0.6
    # share of the bandwidth in kernels that only read and write: by micro-batches of 16 x 2,048 tokens on an H100
    stream: float = 0.7
    # share of the bandwidth in decoding: attention over a cache of unequal lengths, and on a CPU the weights as well,
    # which it arranges anew for each product of few rows. A GPU reads them as a copy does.
    decode: float = 0.5


# Share of a CPU's peak in float32 that torch's attention reaches, forward and backward, a causal half counted: on one
# core of an EPYC .33 to .53 in float32 and .21 to .53 in bfloat16, with heads of 32 and 64 and 305 to 1,024 tokens.
ATTENTION_ON_CPU = 0.35
PLAYING, LEARNING = "playing", "learning"  # kinds of work
# What was measured takes so many times what is planned, at least and at most, by kind of device and of work: the rows
# of `benchmarks/plan.py results` (its test compares them), and of `benchmarks/plan.py runs` for rollouts on a CPU.
LIKELY = {
    ("gpu", PLAYING): (0.7, 1.2),
    ("gpu", LEARNING): (0.8, 1.4),
    ("cpu", PLAYING): (0.9, 3.2),
    ("cpu", LEARNING): (0.7, 1.6),
}


class Counts(NamedTuple):
    """How often something happens in a layer: Counts(both=5, again=2, forward=2)"""

    both: float  # in a forward and backward pass
    again: float  # what recomputation adds
    forward: float  # in a forward pass alone

    def plus(self, other: Counts, times: float) -> Counts:
        """Return these counts and `times` as often the others."""
        return Counts(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


# An activation is written once, read by the next operation and by the backward pass, and its gradient is written and
# read: five passes. A CPU keeps the rest in its caches, and compiled layers do not write it. Launched one by one,
# operations of a GPU write what they convert, norm and rotate as well. By family, as benchmarks/kernel_counts.py counts
# with 1,024 tokens: 4.8 passes in ConvGPT's layers, and after `simplify_layers` 7.1 and 7.7 in those of SmolLM2 and
# Qwen2.5-0.5B and 8.5 in Qwen3's; 11.0 and 10.6 before it, as in other families.
FEW = Counts(5, 2, 2)
MANY = {
    "convgpt": Counts(4.8, 1.9, 1.9),
    "simple": Counts(7.4, 3, 3),
    "qwen3": Counts(8.5, 3.4, 3.4),
    "": Counts(11, 4.4, 4.4),
}
# Operations. Launched one by one, counted likewise: 93, 71 and 80, 85, and 135 and 144. Compiled: 74 in ConvGPT's, 94
# with recomputation, counted on a GPU. Those of a CPU are measured in a forward pass: two or three times as many.
EAGER = {
    "convgpt": Counts(93, 30, 30),
    "simple": Counts(76, 25, 25),
    "qwen3": Counts(85, 28, 28),
    "": Counts(140, 46, 46),
}
COMPILED, ON_CPU = Counts(74, 20, 25), Counts(92, 46, 46)
# Launches that take as long as what else the call of a compiled layer costs: the host of an H100 took 102 to 129 ms for
# micro-batches of few tokens, where the launches take 85.
CALLED = Counts(22, 11, 11)
# How many times as long an operation takes to launch that is recomputed, where layers are not compiled: the host of an
# H100 took 271 to 382 ms with recomputation and 132 to 201 without, where the launches alone take 214 and 161.
RECOMPUTED = 2.5
# What an adapter on a linear layer adds on a GPU: two products, their scale and sum, and conversions between float32
# and bfloat16, less the gradient of the frozen weight. Counted likewise with --tuning lora, for the seven linear layers
# of a layer: 100 to 112 operations in both passes (112 in SmolLM2's and Qwen3's), 51 to 56 in the forward pass, 4.4 to
# 6.6 passes over the activations. Compiled: 53 in both and 29 to 34 forward (Qwen2 and ConvGPT, products and kernels of
# inductor on a CPU). What unpacks 4-bit weights is not counted.
ADAPTED, ADAPTED_COMPILED, ADAPTED_PASSES = Counts(15, 8, 8), Counts(7.5, 4.5, 4.5), Counts(0.77, 0.31, 0.31)
# Kernels of a decoding step for one layer, counted by benchmarks/launches.py: those of a step over the layers.
# ConvGPT's have matrices joined (posttrain.models.fused) unless they have adapters. Of other families Phi-4 and SmolLM3
# take so many, Gemma 3 more. An adapter, which the engines of this project do not merge, adds four to a linear layer. A
# CPU's own time of a layer is measured, without adapters.
DECODING = {"convgpt": 40, "simple": 26, "qwen3": 32, "": 46}
DECODING_FUSED, DECODING_ADAPTED = 23, 4
# The shortest time between two kernels of a CUDA graph: an H100 took 5.9 ms for 1,106 of Qwen2.5-0.5B and 5.6 for 1,380
# of SmolLM2, where their bytes take 2.
REPLAYED = 4.5e-6
# Bytes that an optimizer step moves for each trained number: it reads weights, gradients and two moments, writes all
# but the gradients, reads and scales the gradients for their norm, and makes bfloat16 copies.
STEP = 4 * 10 + 2
# How often logits are written or read, in the forward pass and in both passes: by TRL's kernels on a GPU, including the
# products, and by its torch code on a CPU, operation by operation. Phase 3 uses so few columns on a CPU that most
# logits stay in the caches.
LOGITS, LOGITS_BOTH = 2, 7
LOGITS_IN_TORCH, LOGITS_IN_TORCH_BOTH = 17, 39
GUESSED_PROMPT = 100  # tokens, assumed, of a prompt of `distillation` and of a question of a suite


class Seconds(NamedTuple):
    """The seconds of an iteration by part, and of the run by kind of work.

    Seconds({"rollout": 20.1, "update": 2.2}, {"playing": 4900.0, "learning": 500.0})
    """

    parts: dict[str, float]
    work: dict[str, float]

    @property
    def run(self) -> float:
        return sum(self.work.values())

    @property
    def iteration(self) -> float:
        return sum(self.parts.values())


class Range(NamedTuple):
    """What is likely where one number is planned: Range(0.9, 1.95)"""

    low: float
    high: float

    @classmethod
    def of(cls, work: Mapping[str, float], device: Device) -> Range:
        """Return the range of an amount that is planned by kind of work, such as seconds."""
        kind = "cpu" if device.waits else "gpu"
        low, high = (sum(LIKELY[kind, name][end] * planned for name, planned in work.items()) for end in (0, 1))
        return cls(low, high)

    def __str__(self) -> str:
        if self.high < 0.005:
            return "<0.01"
        low, high = (f"{end:,.{0 if end >= 9.95 else 1 if end >= 0.995 else 2}f}" for end in self)
        return low if low == high else f"{low}-{high}"


class Cost:
    """The seconds that one device needs for forward passes, updates, optimizer steps and decoding."""

    def __init__(self, shape: Shape, numbers: Numbers, fleet: Fleet, in_torch: bool = False) -> None:
        self.in_torch = in_torch
        self.logits = (LOGITS_IN_TORCH, LOGITS_IN_TORCH_BOTH) if in_torch else (LOGITS, LOGITS_BOTH)
        self.shape, self.numbers, self.fleet, self.device = shape, numbers, fleet, fleet.device
        own = {key: value for key, value in fleet.known.items() if key in Factors._fields}
        self.factors = Factors(**own)
        peak = self.device.peak if numbers.computed < FLOAT else self.device.single
        self.flops = peak * 1e12 * self.factors.matmul
        self.attention = self.device.single * 1e12 * ATTENTION_ON_CPU if self.device.waits else self.flops
        self.stream = self.device.bandwidth * 1e9 * self.factors.stream
        self.moved = OfAToken.of(shape, numbers).moved
        self.adapted = shape.adapted / max(1, shape.layers)  # linear layers with an adapter, in one layer
        if self.device.waits:
            self.passes, self.launches = FEW, ON_CPU
        elif numbers.compiled:
            self.passes, self.launches = FEW, COMPILED.plus(ADAPTED_COMPILED, self.adapted).plus(CALLED, 1)
        else:
            self.passes = MANY[shape.family].plus(ADAPTED_PASSES, self.adapted)
            launches = EAGER[shape.family].plus(ADAPTED, self.adapted)
            self.launches = launches._replace(again=RECOMPUTED * launches.again)

    def with_launches(self, work: float, operations: float) -> float:
        """Return the seconds of work and launches: only a GPU works while the next operations are launched."""
        launches = operations * self.device.operation
        return work + launches if self.device.waits else max(work, launches)

    def products(self, tokens: float, behind: float) -> float:
        """Return the seconds of a forward pass's products in the blocks."""
        attended = attention_flops(self.shape, tokens, behind)
        return (forward_flops(self.shape, tokens, behind) - attended) / self.flops + attended / self.attention

    def reads(self, tokens: float, labels: float, behind: float, pieces: float = 1) -> float:
        """Return the seconds of forward passes in `pieces` batches.

        tokens: each attends to `behind` others on average. labels: tokens whose log-probs are computed.
        """
        moved = self.passes.forward * tokens * self.moved
        moved += self.logits[0] * labels * self.shape.vocabulary * self.numbers.computed
        work = self.products(tokens, behind) + head_flops(self.shape, labels) / self.flops + moved / self.stream
        return self.with_launches(work, pieces * self.launches.forward * self.shape.layers)

    def learns(self, tokens: float, labels: float, behind: float, pieces: float = 1) -> float:
        """Return the seconds of forward and backward passes, with the arguments of `reads`.

        Frozen weights get no gradients; logits are always recomputed.
        """
        recomputed = self.numbers.recomputed
        times = (3 if self.numbers.full else 2) + recomputed
        products = times * self.products(tokens, behind)
        products += (4 if self.numbers.full else 3) * head_flops(self.shape, labels) / self.flops
        moved = (self.passes.both + recomputed * self.passes.again) * tokens * self.moved
        moved += self.logits[1] * labels * self.shape.vocabulary * self.numbers.computed
        work = products + moved / self.stream
        launches = self.launches.both + recomputed * self.launches.again
        return self.with_launches(work, pieces * launches * self.shape.layers)

    def steps(self, trained: float, pieces: float = 1) -> float:
        """Return the seconds of an optimizer step and of the communication between devices.

        They exchange gradients once, or with a sharded model the weights twice and the gradients for each micro-batch.
        """
        shards, count = self.numbers.shards, self.fleet.count
        moved = STEP * trained / shards / self.stream
        if count == 1:
            return moved
        share = (count - 1) / count
        sent = pieces * FLOAT * (2 * self.shape.parameters + trained) if shards > 1 else 2 * FLOAT * trained
        return moved + share * sent / self.fleet.wire

    def decodes(self, tokens: float, rows: float, behind: float, launched: bool = False) -> float:
        """Return the seconds of `tokens` decoding steps, each of which reads the weights and the whole KV cache."""
        shape, size = self.shape, self.numbers.computed
        ragged = self.device.bandwidth * 1e9 * self.factors.decode
        weights = size * (shape.blocks + shape.top) / (self.stream if self.device.cuda else ragged)
        read = weights + size * rows * behind * shape.cache / ragged
        read += SAMPLING * rows * shape.vocabulary / self.stream
        flops = forward_flops(shape, rows, behind) + head_flops(shape, rows)
        work = max(read, flops / self.flops)
        kernels = DECODING_FUSED if shape.fused else DECODING[shape.family]
        kernels += DECODING_ADAPTED * self.adapted
        operations = shape.layers * (kernels if self.device.cuda else OPERATIONS)
        if launched:
            return tokens * self.with_launches(work, operations)
        return tokens * (max(work, operations * REPLAYED) if self.device.cuda else work)


def unadapted(cost: Cost) -> Cost:
    """Return the cost with adapters merged into the weights, or switched off as in passes of the reference."""
    return Cost(cost.shape._replace(adapted=0), cost.numbers, cost.fleet, cost.in_torch)


def forward_flops(shape: Shape, tokens: float, behind: float) -> float:
    """Return the FLOPs of the blocks for tokens that each attend to `behind` others on average.

    2 for each weight, and those of the products q k' and p v.
    """
    return 2 * tokens * shape.blocks + attention_flops(shape, tokens, behind)


def attention_flops(shape: Shape, tokens: float, behind: float) -> float:
    """Return the FLOPs of q k' and p v in all layers, for tokens that each attend to `behind` others on average."""
    return 4 * tokens * shape.layers * shape.query * behind


def head_flops(shape: Shape, labels: float) -> float:
    """Return the FLOPs of the layers after the blocks, for so many labels."""
    return 2 * shape.top * labels


# -------------------------------------------------------------------------------------------------------- phases 1, 2


def of_rows(shape: Shape, cfg: Any, fleet: Fleet, data: DataRows, rows: int, shards: int) -> Seconds:
    """Return the seconds of phase 1 or 2 with micro-batches of `rows` rows; an iteration is an optimizer step."""
    settings = RowSettings.of(cfg)
    cost = Cost(shape, Numbers.of(cfg, shards), fleet, in_torch=fleet.device.waits)
    share = settings.share(fleet.count)
    pieces = math.ceil(share / rows)
    each = data.tokens * (1 + data.padding)  # of a row, or of both halves of a pair
    behind = data.tokens / (1 + settings.pairs)  # lengths differ so much that a token attends to about as many others
    learning = cost.learns(share * each, share * data.tokens * data.trained, behind, pieces)
    stepping = cost.steps(trained_parameters(shape, cfg.model.tuning), pieces)

    steps = settings.max_steps
    if steps <= 0:
        steps = math.ceil(settings.epochs * data.rows / (share * fleet.count))
    epochs = steps * share * fleet.count / max(1.0, data.rows)
    if settings.eval_steps is None:
        evaluations = epochs
    else:  # below 1 it is a share of all steps
        evaluations = steps / (settings.eval_steps * (steps if settings.eval_steps < 1 else 1))

    def read(reader: Cost, count: float) -> float:
        return reader.reads(count * each, count * data.tokens * data.trained, behind, count / rows)

    run = steps * (learning + stepping) + math.ceil(evaluations) * read(cost, settings.held_out)  # on every device
    if settings.pairs:  # the reference computes the log-probs of every pair once
        run += read(unadapted(cost), (data.rows + settings.held_out) / fleet.count)
    return Seconds({"passes": learning, "optimizer": stepping}, {LEARNING: run})


# ------------------------------------------------------------------------------------------------------------ phase 3


def of_episodes(shape: Shape, cfg: StarPORun, fleet: Fleet, work: Episodes, plan: Plan, shards: int) -> Seconds:
    """Return the seconds of phase 3 with as many conversations at a time as the plan says."""
    cfg = with_checkpointing(cfg, plan.gradient_checkpointing)
    cost = Cost(shape, Numbers.of(cfg, shards), fleet)
    launched = not cfg.rollout.engine.startswith("vllm") and not plan.cuda_graphs
    replays = cfg.rollout.engine == "replay"
    player = unadapted(cost) if cfg.rollout.engine.startswith("vllm") else cost  # which gets merged weights

    def plays(conversations: float, samples: float) -> float:
        return rollout(player, work, conversations, samples, plan.slots, launched, replays)

    players = len(cfg.rollout.servers) or fleet.count  # a server is as fast as one device
    playing = plays(math.ceil(work.groups / players) * work.samples, work.samples)
    learning = update(cost, cfg, work, plan.micro_batch_tokens)
    moving = 0.0
    if cfg.rollout.servers:  # each receives the weights
        moving = players * FLOAT * shape.parameters / (fleet.device.network * 1e9)
    elif shards > 1:  # weights are gathered once a rollout
        moving = (shards - 1) / shards * FLOAT * shape.parameters / fleet.wire

    every, steps = cfg.evaluation.every, cfg.trainer.max_steps
    levels = math.ceil(cfg.evaluation.episodes / players) * len(cfg.envs)
    evaluation = plays(levels, 1) + sum(
        _suite_seconds(player, suite, players, plan.slots, launched) for suite in _suites(cfg)
    )
    evaluations = 1 + steps // every + bool(steps % every)
    evaluating = evaluations * evaluation
    evaluating += plays(math.ceil(cfg.evaluation.final_episodes / players) * len(cfg.envs), 1)
    if cfg.distillation is not None and cfg.remembers:  # the first model's answers, before the first step
        answers = sum(source.rows or 10_000 for source in cfg.distillation.sources) / players
        new = cfg.distillation.max_new_tokens
        evaluating += _answer_seconds(player, answers, GUESSED_PROMPT, new, plan.slots, launched)
    work_of_run = {PLAYING: evaluating + steps * (moving + playing), LEARNING: steps * learning}
    if cfg.rollout.max_staleness:  # the rollout of the next step runs during the update
        shorter = PLAYING if playing < learning else LEARNING
        work_of_run[shorter] -= steps * min(playing, learning)
    return Seconds({"rollout": moving + playing, "update": learning}, work_of_run)


def rollout(
    cost: Cost,
    work: Episodes,
    conversations: float,
    samples: float,
    slots: int,
    launched: bool = False,
    replays: bool = False,
) -> float:
    """Return the seconds of a rollout: reading prompts once a group and the environment's replies, and decoding.

    replays: whether the engine keeps no cache and reads the whole conversation again in every turn.
    """
    turns = max(1.0, work.turns)
    if replays:
        half = (work.prompt + work.context) / 2  # tokens of the conversation so far, on average over the turns
        reading = cost.reads(conversations * turns * half, 0, half / 2, turns)
    else:
        reading = cost.reads(conversations / samples * work.prompt, 0, work.prompt / 2)
        replies = conversations * (turns - 1) * work.reply
        reading += cost.reads(replies, 0, (work.prompt + work.context) / 2, turns - 1)
    at_once = min(slots, conversations)
    tokens = turns * work.new * conversations / at_once
    return reading + cost.decodes(tokens, at_once, (work.prompt + work.context) / 2, launched)


def update(cost: Cost, cfg: StarPORun, work: Episodes, micro_batch_tokens: int) -> float:
    """Return the seconds of an update: forward passes before it, all epochs and minibatches, and distillation."""
    algorithm, count = cfg.algorithm, cost.fleet.count
    episodes = work.kept * work.groups * work.samples / count
    sampled = episodes * min(work.turns * work.new, work.context)
    tokens, behind = episodes * work.context, work.context / 2
    pieces = math.ceil(tokens / micro_batch_tokens)
    epochs = algorithm.num_iterations
    # in bfloat16 log-probs are computed again for all steps but the first; reference and critic have a pass each
    again = 1.0 if epochs > 1 else 1 - 1 / algorithm.minibatches
    forward_passes = bool(cfg.trainer.bf16) * again + algorithm.critical
    seconds = forward_passes * cost.reads(tokens, sampled, behind, pieces)
    seconds += (algorithm.beta > 0) * unadapted(cost).reads(tokens, sampled, behind, pieces)
    shared = episodes * work.prompt * (1 - 1 / work.samples) if cfg.can_share_prefixes else 0.0
    seconds += epochs * cost.learns(tokens - shared, sampled, behind, pieces)
    trained = trained_parameters(cost.shape, cfg.model.tuning)
    if algorithm.critical and algorithm.critic.kind != "shared":
        seconds += epochs * cost.learns(tokens, 0, behind, pieces)
        trained *= 2
    steps = epochs * algorithm.minibatches
    seconds += steps * cost.steps(trained, pieces / algorithm.minibatches)
    if cost.shape.teacher is not None:  # it reads what the policy learns from, and the output layer compares both
        teacher = Cost(cost.shape.teacher, cost.numbers, cost.fleet)
        seconds += epochs * (teacher.reads(tokens, sampled, behind, pieces) + cost.learns(0, sampled, 0, 0))
    if cfg.distillation is not None and cfg.remembers and cfg.distillation.coef:
        rows, new = cfg.distillation.batch_size / count, cfg.distillation.max_new_tokens
        read = rows * (GUESSED_PROMPT + new)
        learned, reference = (each(read, rows * new, new / 2) for each in (cost.learns, unadapted(cost).reads))
        seconds += steps * (learned + reference)
    return seconds


def _suites(cfg: StarPORun) -> Iterable[Suite]:
    suites = cfg.evaluation.suites
    written = (suites.math, suites.repetition, suites.recall, suites.instructions)
    return [suite for suite in written if suite is not None]


def _suite_seconds(cost: Cost, suite: Suite, players: int, slots: int, launched: bool) -> float:
    instruction = len(getattr(suite, "instruction", "")) / CHARACTERS
    prompt, questions = GUESSED_PROMPT + instruction, suite.n * len(getattr(suite, "sources", [1]))
    return _answer_seconds(cost, questions / players, prompt, suite.max_new_tokens, slots, launched)


def _answer_seconds(cost: Cost, answers: float, prompt: float, new: float, slots: int, launched: bool) -> float:
    """Return the seconds of answers to different prompts, in as many rounds as the slots need."""
    work = Episodes(1, 1, turns=1, prompt=prompt, new=new, reply=0)
    return rollout(cost, work, max(1.0, answers), 1, slots, launched)
