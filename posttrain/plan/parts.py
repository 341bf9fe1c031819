"""How many bytes do weights, copies, activations, conversations and the output layer take, in any of the phases?

Each function says whether it is exact or an estimate; test_plan.py compares them with the tensors of small models.
If a model is sharded (FSDP2, ZeRO-3), each of `shards` devices holds its share of the parameters, the gradients and
the optimizer's moments; activations are not divided.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.plan.shape import Shape
from posttrain.rollout import PREFILL_TOKENS, whole_blocks
from posttrain.runtime import TOKEN_CHUNK_SIZE, trainer_field

MARGIN = 0.15  # share of the free memory for what the formulas leave out: fragments and workspaces
FLOAT = 4  # bytes of a float32
SAMPLING = 32  # bytes of a logit in the precisions of sampling.py
KERNELS = 2**28  # bytes that oneDNN keeps for products in bfloat16 on a CPU, with the limit of runtime/hardware.py
FOUR_BITS = 0.5 + (1 + 4 / 256) / 64  # bytes of a number under QLoRA: 64 share a scale, 256 scales share another
EIGHT_BITS = 1 + 4 / 256  # bytes of a moment of an 8-bit optimizer: 256 share a scale
Parts = dict[str, int]  # bytes by name


class Numbers(NamedTuple):
    """The precision of a run: Numbers(stored=4, computed=2, tuning="full", recomputed=True, eight_bits=False)"""

    stored: int  # bytes of a weight; "auto" is float32
    computed: int  # bytes of a number in the layers' computations and in the KV cache
    tuning: str
    recomputed: bool  # whether activations are (gradient checkpointing)
    eight_bits: bool  # whether the optimizer's moments are
    shards: int = 1  # devices that share parameters, gradients and moments
    compiled: bool = False  # whether the layers are

    @classmethod
    def of(cls, cfg: Any, shards: int = 1) -> Numbers:
        """Return the precision of a run of any phase. Its trainer.bf16 must not be null."""
        stored = 2 if cfg.model.dtype in ("bfloat16", "float16") else FLOAT
        half = trainer_field(cfg, "bf16") or trainer_field(cfg, "fp16")
        return cls(
            stored=stored,
            computed=2 if half else stored,
            tuning=cfg.model.tuning,
            recomputed=bool(trainer_field(cfg, "gradient_checkpointing")),
            eight_bits="8bit" in str(trainer_field(cfg, "optim")),
            shards=shards,
            compiled=bool(trainer_field(cfg, "torch_compile")),
        )

    @property
    def full(self) -> bool:
        return self.tuning == "full"

    def mine(self, size: float) -> int:
        """Return the bytes on one device of a sharded size."""
        return round(size / self.shards)


# -------------------------------------------------------------------------------------------------------------- always


def weights(shape: Shape, numbers: Numbers) -> int:
    """Return the bytes of the weights (exact). With four bits the output layer keeps its precision."""
    size = shape.parameters * numbers.stored + shape.adapter * FLOAT
    if numbers.tuning == "qlora":
        packed = shape.blocks + shape.top - shape.vocabulary * shape.states
        size -= round(packed * (numbers.stored - FOUR_BITS))
    return numbers.mine(size)


def trained_parameters(shape: Shape, tuning: str) -> int:
    """Return how many numbers of the policy the optimizer changes. They are float32."""
    return shape.parameters if tuning == "full" else shape.adapter


def moments(trained: int, numbers: Numbers) -> int:
    """Return the bytes of the optimizer's two moments (exact, except for small tensors in 8 bits)."""
    return numbers.mine(2 * trained * (EIGHT_BITS if numbers.eight_bits else FLOAT))


def kernels(numbers: Numbers, cuda: bool) -> int:
    """Return the bytes of what oneDNN keeps for its products (an estimate)."""
    return 0 if cuda or numbers.computed == FLOAT else KERNELS


# --------------------------------------------------------------------------------------------------------- at one time


def copies(shape: Shape, numbers: Numbers, kept: bool) -> int:
    """Return the bytes of the bfloat16 copies of float32 weights that products need.

    Autocast keeps those of trained weights. Sharding changes nothing: weights are copied after they were gathered.

    kept: whether the copies of frozen weights are kept, too: in a rollout, and in a graph without recomputation.
    """
    if numbers.computed == numbers.stored or numbers.stored == 2:
        return 0
    blocks = numbers.full or (kept and numbers.tuning == "lora")
    return 2 * (shape.top + (shape.blocks if blocks else 0))


def gathered_weights(shape: Shape, numbers: Numbers) -> int:
    """Return the bytes of the weights that FSDP2 has gathered at a time: two blocks, and all outside of the blocks."""
    if numbers.shards == 1:
        return 0
    outside = shape.parameters - shape.blocks
    return numbers.stored * (2 * shape.blocks // max(1, shape.layers) + outside)


def conversations(shape: Shape, size: int, slots: int, longest: int, prompt: int) -> Parts:
    """Return the bytes of `slots` conversations at a time.

    Args:
        size: bytes of a number.
        longest: tokens of a conversation, of which the prompt has `prompt`.
    """
    length = whole_blocks(longest)
    tokens = min(slots * prompt, max(PREFILL_TOKENS, prompt))
    stream = tokens * FLOAT * (shape.embedding + 3 * shape.hidden)
    mlp = tokens * size * 3 * shape.intermediate
    # keys and values of one layer, twice: old and new ones while the cache grows, or those of selected rows
    twice = slots * length * 2 * shape.key_value * size
    group = shape.query // max(1, shape.key_value)
    # what all layers share: a mask for each pair of tokens, repeated for a group of heads, and rotations of positions
    stream += tokens * (prompt * (1 + group) * size + 2 * FLOAT * shape.key_value)
    attention = twice + tokens * (size * (4 * shape.query + 3 * shape.key_value) + (1 + group) * prompt)
    sampling = slots * shape.vocabulary * SAMPLING
    return {
        "fused weights": shape.fused * size,
        "KV cache": slots * length * shape.cache * size,
        "reading and sampling": max(stream + mlp, stream + attention, sampling),
    }


def graph_pool(shape: Shape, rows: int) -> int:
    """Return the bytes that CUDA graphs share: the tensors of a step of so many rows (an estimate)."""
    return rows * shape.vocabulary * SAMPLING


class OfAToken(NamedTuple):
    """Bytes of one token in a forward and backward pass.

    An estimate for a decoder with a gated MLP and fused attention (after Korthikanti et al., arXiv 2205.05198, section
    4): norms and their inputs in float32, everything else in `numbers.computed` bytes. Compiled layers keep the inputs
    of products and attention, by what torch's partitioner chooses for ConvGPT, Llama and Qwen2.
    """

    before: int  # kept of the layers before the blocks (ConvGPT)
    kept: int  # kept of the blocks; with gradient checkpointing only their inputs
    behind: int  # kept of the layers after the blocks
    at_work: int  # gradients inside a layer, and with gradient checkpointing its activations
    moved: int  # what all blocks write for their backward pass if they are not compiled, whether it is kept or not

    @classmethod
    def of(cls, shape: Shape, numbers: Numbers) -> OfAToken:
        """Return the bytes of a token for a model and a precision."""
        size, attention = numbers.computed, shape.query + shape.key_value
        norms = 6 * shape.hidden + 2 * attention + attention // 4  # the last: statistics of heads
        given = 0  # norms in the products' precision
        if shape.simple and size < FLOAT:
            norms, given = 4 * shape.hidden + attention // 4, 2 * shape.hidden + 2 * attention
        block = whole = FLOAT * norms + size * (4 * shape.intermediate + 2 * attention + given)
        if numbers.compiled:  # the rest is computed again within the backward pass
            block = FLOAT * 2 * shape.hidden + size * (2 * shape.hidden + 3 * shape.intermediate + 3 * attention)
        inside = size * 2 * shape.intermediate + block if numbers.recomputed else size * 6 * shape.intermediate
        behind = size * 4 * shape.behind
        # what is kept behind the blocks is freed when their backward pass begins
        at_work = max(size * (2 * shape.behind + shape.states), inside - behind)
        return cls(
            before=FLOAT * (shape.embedding + 3 * shape.hidden) if shape.embedding != shape.hidden else 0,
            kept=shape.layers * (FLOAT * shape.hidden if numbers.recomputed else block),
            behind=behind + FLOAT * 4 * shape.states,
            at_work=at_work,
            moved=shape.layers * whole,
        )

    def activations(self, tokens: int) -> int:
        """Return the bytes that so many tokens keep for the backward pass."""
        return tokens * (self.before + self.kept + self.behind)


def output_tile(shape: Shape, size: int, tokens: int, columns: int, cuda: bool) -> int:
    """Return the most bytes of logits and what is computed from them, at one time in TRL's function.

    Args:
        size: bytes of a number.
        columns: logits of a token at a time; the buffer has so many even for a smaller vocabulary.
    """
    logits = FLOAT * min(columns, shape.vocabulary)
    forms = 0 if cuda else 10 if size == FLOAT else 8  # on a GPU one kernel does all that follows the product
    return min(tokens, TOKEN_CHUNK_SIZE) * (size * columns + forms * logits)


# ------------------------------------------------------------------------------------------------------------ together


def peak_bytes(parts: Mapping[str, Mapping[str, int]]) -> int:
    """Return the largest number of bytes at one time: "always", and the largest of the other phases."""
    totals = {phase: sum(sizes.values()) for phase, sizes in parts.items()}
    return totals.pop("always") + max(totals.values())


def gib(size: float) -> str:
    """Return bytes in GiB, with two decimals."""
    return f"{size / 2**30:.2f}"


def lines_of_parts(parts: Mapping[str, Mapping[str, int]], peak: int | None) -> list[str]:
    """Return a line for each part of at least 1 MiB, in GiB, and one for the peak."""
    rows = [
        (name if phase == "always" else f"{phase}: {name}", size)
        for phase, sizes in parts.items()
        for name, size in sizes.items()
        if size >= 2**20
    ]
    if peak is not None:
        rows.append(("at most, at one time", peak))
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {gib(size):>8}" for name, size in rows]


def sentence_of_parts(parts: Mapping[str, Mapping[str, int]]) -> str:
    """Return the GiB of each part by phase, in one sentence."""
    return "; ".join(
        f"{phase} " + (", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size >= 2**20) or "nothing")
        for phase, sizes in parts.items()
    )


def largest(candidates: Sequence[int], budget: float, takes: Callable[[int], int]) -> int | None:
    """Return the largest of ascending candidates that takes at most the budget; None if the smallest takes more."""
    fitting = bisect_right(candidates, budget, key=takes)
    return candidates[fitting - 1] if fitting else None
