"""Which bytes do all three phases have in common?  Weights, copies, activations, conversations, the output layer.

Each part says whether it is exact or an estimate; test_plan.py compares them with the tensors of small models.
Where a model is sharded (FSDP2, ZeRO-3), each of `shards` devices holds that part of the parameters, the gradients and
the optimizer's moments; activations are never shared out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.plan.shape import Shape
from posttrain.rollout import PREFILL_TOKENS, whole_blocks
from posttrain.runtime import TOKEN_CHUNK_SIZE, trainer_field

MARGIN = 0.15  # of the free memory: for what no formula sees, fragments and workspaces
FLOAT = 4  # bytes of a float32
FOUR_BITS = 0.5 + (1 + 4 / 256) / 64  # of a number under QLoRA: blocks of 64 share a scale, 256 scales another
EIGHT_BITS = 1 + 4 / 256  # of a moment of an 8-bit optimizer: blocks of 256 share a scale
Parts = dict[str, int]  # bytes by name


class Numbers(NamedTuple):
    """How a run keeps its numbers: Numbers(stored=4, computed=2, tuning="full", recomputed=True, eight_bits=False)"""

    stored: int  # bytes of a number of the weights; "auto" is float32
    computed: int  # bytes of a number that layers compute with, and that the KV cache holds
    tuning: str
    recomputed: bool  # activations, under gradient checkpointing
    eight_bits: bool  # the optimizer's moments
    shards: int = 1  # devices that share parameters, gradients and moments

    @classmethod
    def of(cls, cfg: Any, shards: int = 1) -> Numbers:
        """Of any phase, whose trainer.bf16 has been settled."""
        stored = 2 if cfg.model.dtype in ("bfloat16", "float16") else FLOAT
        half = trainer_field(cfg, "bf16") or trainer_field(cfg, "fp16")
        return cls(
            stored=stored,
            computed=2 if half else stored,
            tuning=cfg.model.tuning,
            recomputed=bool(trainer_field(cfg, "gradient_checkpointing")),
            eight_bits="8bit" in str(trainer_field(cfg, "optim")),
            shards=shards,
        )

    @property
    def full(self) -> bool:
        return self.tuning == "full"

    def mine(self, size: float) -> int:
        """This device's share of what is sharded."""
        return round(size / self.shards)


# -------------------------------------------------------------------------------------------------------------- always


def weights(shape: Shape, numbers: Numbers) -> int:
    """Exact. Four-bit weights leave the output layer as it is."""
    size = shape.parameters * numbers.stored + shape.adapter * FLOAT
    if numbers.tuning == "qlora":
        packed = shape.blocks + shape.top - shape.vocabulary * shape.states
        size -= round(packed * (numbers.stored - FOUR_BITS))
    return numbers.mine(size)


def moments(counts: Sequence[tuple[int, int]], numbers: Numbers) -> int:
    """Two for all that is trained, given as numbers and bytes of each; exact up to the 8 bits of small tensors."""
    return numbers.mine(sum(2 * count * (EIGHT_BITS if numbers.eight_bits else each) for count, each in counts))


# --------------------------------------------------------------------------------------------------------- at one time


def copies(shape: Shape, numbers: Numbers, learns: bool) -> int:
    """Bytes of the bfloat16 copies that autocast makes of float32 weights.

    It keeps those of trained weights; others live as long as their product, or the graph that needs them. Sharding
    changes nothing: a copy is made of weights that were gathered.
    """
    if numbers.computed == numbers.stored or numbers.stored == 2:
        return 0
    in_graph = learns and numbers.tuning == "lora" and not numbers.recomputed
    return 2 * (shape.top + (shape.blocks if in_graph or numbers.full else 0))


def gathered(shape: Shape, numbers: Numbers) -> int:
    """Weights that FSDP2 makes whole for a moment: of the block at work, of the next one, and all outside of blocks."""
    if numbers.shards == 1:
        return 0
    outside = shape.parameters - shape.blocks
    return numbers.stored * (2 * shape.blocks // max(1, shape.layers) + outside)


def conversations(shape: Shape, size: int, slots: int, longest: int, prompt: int) -> Parts:
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


class OfAToken(NamedTuple):
    """Bytes of one token in a forward and backward pass.

    An estimate for a decoder with a gated MLP and fused attention (after Korthikanti et al., arXiv 2205.05198, section
    4): norms and their inputs in float32, the rest as it is computed.
    """

    before: int  # kept in front of the blocks: ConvGPT's stage
    kept: int  # kept of the blocks; under gradient checkpointing their inputs alone
    behind: int  # kept behind the blocks
    at_work: int  # gradients of a layer's inside, and under gradient checkpointing the inside itself
    moved: int  # what all blocks write for their backward pass, whether or not it is kept

    @classmethod
    def of(cls, shape: Shape, numbers: Numbers) -> OfAToken:
        size, attention = numbers.computed, shape.query + shape.key_value
        block = FLOAT * (6 * shape.hidden + 2 * attention) + size * (4 * shape.intermediate + 2 * attention)
        at_work = size * max(6 * shape.intermediate, 2 * shape.behind + shape.states)
        if numbers.recomputed:
            at_work = size * 2 * shape.intermediate + block
        return cls(
            before=size * (shape.embedding + 3 * shape.hidden) if shape.embedding != shape.hidden else 0,
            kept=shape.layers * (FLOAT * shape.hidden if numbers.recomputed else block),
            behind=size * 4 * shape.behind + FLOAT * 4 * shape.states,
            at_work=at_work,
            moved=shape.layers * block,
        )

    def activations(self, tokens: int) -> int:
        return tokens * (self.before + self.kept + self.behind)


def output_tile(shape: Shape, size: int, tokens: int, columns: int, cuda: bool) -> int:
    """Bytes of the logits that exist at any one time in TRL's function, in all the forms that they take.

    `columns` of them at a time, for which it takes a buffer whatever the vocabulary; `size` is that of a number.
    """
    logits = FLOAT * min(columns, shape.vocabulary)
    forms = 0 if cuda else 10 if size == FLOAT else 8  # a GPU has a kernel for what comes after the product
    return min(tokens, TOKEN_CHUNK_SIZE) * (size * columns + forms * logits)


# ------------------------------------------------------------------------------------------------------------ together


def most(parts: Mapping[str, Mapping[str, int]]) -> int:
    """Bytes at the worst moment: phases follow each other, `always` is there in all of them."""
    totals = {phase: sum(sizes.values()) for phase, sizes in parts.items()}
    return totals.pop("always") + max(totals.values())


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def listed(parts: Mapping[str, Mapping[str, int]]) -> str:
    """What takes how much, in a sentence."""
    return "; ".join(
        f"{phase} " + (", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size >= 2**20) or "nothing")
        for phase, sizes in parts.items()
    )


def largest(candidates: Sequence[int], budget: float, takes: Callable[[int], int]) -> int | None:
    """The last of these rising numbers that takes no more than the budget; None where the first one does."""
    fitting = bisect_right(candidates, budget, key=takes)
    return candidates[fitting - 1] if fitting else None
