"""Which attention is fastest for rows of different length?  In decoding, in training, and in an update of phase 3.

decode  one layer's attention of a step: under a mask over all positions, and up to each row's own length
train   forward and backward pass of a whole model over conversations: batches in any order, batches of similar length
        as phase 1 makes them, and packed rows with flex attention or torch's varlen attention
update  phase 3's update with shared prefixes computed once, and without

Every way does equal work on the same rows.
    python benchmarks/attention.py [--parts decode train update] [--json FILE]
Without CUDA the same code runs on tiny sizes: a smoke test, whose figures mean nothing. A kernel that is missing is a
row with an error.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure
import gpu
import update

from posttrain.models import row_attention
from posttrain.rollout.engines.graphs import CudaRecorder
from posttrain.runtime import hardware
from posttrain.runtime.compat import chunked_logprobs
from posttrain.starpo import learner
from posttrain.types import one_line

CUDA, KIND = gpu.CUDA, gpu.KIND
HALF = torch.bfloat16
# Rows x positions of decoding; rows x the most tokens of one of training
DECODING = {"convgpt": (128, 512), "smol": (256, 512), "qwen": (256, 512)}
TRAINING = {"convgpt": (16, 2048), "qwen": (8, 1024)}
LAYERS, BATCHES, CONVERSATIONS = 8, 8, 64  # caches that take turns, so that none stays in the GPU's own cache
if not CUDA:
    DECODING, TRAINING = dict.fromkeys(DECODING, (4, 256)), dict.fromkeys(TRAINING, (2, 24))
    LAYERS, BATCHES, CONVERSATIONS = 1, 2, 8


def attempt(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row with what was measured, or with the error of a kernel, the compiler or the driver."""
    try:
        return row | measure()
    except Exception as error:
        return row | {"error": one_line(error)[:90]}


def decode(bandwidth: float, name: str) -> Iterable[dict[str, Any]]:
    """`share` is of the bandwidth of a copy, for the keys and values that rows need, whatever a way reads."""
    rows, positions = DECODING[name]
    config = gpu.model_of(name).config
    heads, size = config.num_key_value_heads, getattr(config, "head_dim", None)
    size, group = size or config.hidden_size // config.num_attention_heads, config.num_attention_heads // heads
    torch.manual_seed(0)
    length_B = torch.randint(positions // 16, int(0.7 * positions), (rows,), device=KIND)  # 38 % of the positions
    length_B[0] = positions
    made: Any = dict(device=KIND, dtype=HALF)
    query = torch.randn(rows, heads, group, size, **made)
    caches = [torch.randn(2, rows, heads, positions, size, **made) for _ in range(LAYERS)]
    seen = torch.arange(positions, device=KIND) < length_B[:, None, None, None]
    mask = torch.zeros(seen.shape, **made).masked_fill_(~seen, -torch.inf).expand(-1, -1, group, -1)
    needed = int(length_B.sum()) * heads * size * 2 * HALF.itemsize
    what = {"what": "decode", "model": name, "rows": rows, "positions": positions, "needed": needed / caches[0].nbytes}
    found: list[torch.Tensor] = []

    def step() -> None:
        found[:] = [row_attention.attend(query, keys, values, mask, size**-0.5) for keys, values in caches]

    def by_length() -> None:
        with row_attention.by_length(length_B, positions):
            step()

    def measured(way: Callable[[], None]) -> dict[str, Any]:
        way()
        mixed = found[0].clone()
        seconds = gpu.seconds_of(CudaRecorder().record(way) if CUDA else way, repeats=9) / LAYERS
        share = needed / seconds / bandwidth
        return {"us": seconds * 1e6, "share": share, "norm": float(mixed.float().norm())}

    for label, way in (("mask", step), ("by length", by_length)):
        yield attempt(what | {"way": label}, lambda way=way: measured(way))


def attend_varlen(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows for transformers, whose bounds TRL's collator has put into the batch."""
    assert row_attention.varlen_attn is not None
    half = [each[0].transpose(0, 1).to(HALF) for each in (query, key, value)]
    bounds, longest = given["cu_seq_lens_q"], given["max_length_q"]
    grouped: Any = {"enable_gqa": True} if query.shape[1] > key.shape[1] else {}
    arguments: Any = (*half, bounds, bounds, longest, longest)
    mixed: Any = row_attention.varlen_attn(*arguments, scale=scaling, window_size=(-1, 0), **grouped)
    return mixed[None], None


def laid_out(rows: list[torch.Tensor], packed: bool) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """The model's inputs, at which positions it predicts, and what follows there, row after row."""
    targets = torch.cat([row[1:] for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=KIND)
    if not packed:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids}, torch.arange(ids.shape[1], device=KIND) < lengths[:, None] - 1, targets
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    inputs = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row), device=KIND) for row in rows])[None],
        "cu_seq_lens_q": bounds,
        "max_length_q": int(lengths.max()),
    }
    predicts = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    predicts[0, bounds[1:].long() - 1] = False
    return inputs, predicts, targets


def train(name: str) -> Iterable[dict[str, Any]]:
    """Tokens that are not padding a second; `padding` is a share of all tokens that the model reads.

    Batches of similar length are every fourth of a pool of 32, as phase 1 has them on a GPU.
    """
    size, longest = TRAINING[name]
    rng = random.Random(0)
    pool = sorted(min(longest, max(8, round(rng.lognormvariate(math.log(longest / 5), 0.9)))) for _ in range(32 * size))
    lengths = [each for at in range(0, 32, 32 // BATCHES) for each in pool[at * size : (at + 1) * size]]
    model = gpu.model_of(name).train()
    head = model.get_output_embeddings()
    torch.manual_seed(0)
    rows = [torch.randint(3, 1000, (length,), device=KIND) for length in lengths]
    ALL_ATTENTION_FUNCTIONS["varlen"] = attend_varlen

    def measured(attention: str, order: list[torch.Tensor], packed: bool) -> dict[str, Any]:
        model.set_attn_implementation(attention)
        batches = [laid_out(order[at : at + size], packed) for at in range(0, len(order), size)]
        losses: list[torch.Tensor] = []

        def step() -> None:
            model.zero_grad(set_to_none=True)
            losses.clear()
            for inputs, predicts, targets in batches:
                with torch.autocast(KIND, HALF):
                    states = model.base_model(**inputs, use_cache=False).last_hidden_state[predicts]
                    logprobs, _ = chunked_logprobs(states, head.weight, None, targets, columns=8192)
                (-logprobs.sum() / sum(lengths)).backward()
                losses.append(-logprobs.detach().sum() / sum(lengths))

        with hardware.deterministic():
            seconds = gpu.seconds_of(step)
        read = sum(inputs["input_ids"].numel() for inputs, _, _ in batches)
        found = {"tokens_s": sum(lengths) / seconds, "padding": 1 - sum(lengths) / read}
        return found | {"loss": float(torch.stack(losses).sum())}

    mixed = rng.sample(rows, len(rows))
    ways: Any = [("any order", "sdpa", mixed, False), ("similar length", "sdpa", rows, False)]
    ways += [("packed, flex", "flex_attention", mixed, True), ("packed, varlen", "varlen", mixed, True)]
    try:
        for way, *given in ways:
            what = {"what": "train", "model": name, "rows": size, "longest": longest, "way": way}
            yield attempt(what, lambda given=given: measured(*given))
            model.zero_grad(set_to_none=True)
    finally:
        del ALL_ATTENTION_FUNCTIONS["varlen"]


def updates() -> Iterable[dict[str, Any]]:
    """Groups of 8 with prompts of 80 to 120 tokens and up to 5 turns, as in update.py."""
    model = gpu.model_of("qwen")
    episodes = update.conversations(CONVERSATIONS, 5, 24, 1000)
    for shared in (False, True):

        def measured(shared: bool = shared) -> dict[str, Any]:
            with patch.object(learner, "can_share_prefixes", lambda _: shared):
                step = update.ours(model, episodes, 8192, bf16=CUDA)
            norm = step()
            seconds = gpu.seconds_of(step, warm=1)
            return {"tokens_s": sum(each.context for each in episodes) / seconds, "norm": norm}

        what = {"what": "update", "model": "qwen", "rows": CONVERSATIONS}
        yield attempt(what | {"way": "shared prefixes" if shared else "whole rows"}, measured)


def markdown(results: dict[str, Any]) -> str:
    parts = [f"{_measure.told(results)} Copy {results['GB_s']:,.0f} GB/s."]
    for what in dict.fromkeys(row["what"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["what"] == what]
        keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "what"]
        cells = [[f"{v:.3g}" if isinstance(v := row.get(key, ""), float) else str(v) for key in keys] for row in rows]
        parts.append(_measure.table(keys, cells))
    return "\n\n".join(parts)


def main() -> None:
    parser = _measure.parser(__doc__, repeats=False)
    parts = ["decode", "train", "update"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="in this order")
    given = parser.parse_args()
    bandwidth, _ = _measure.limits(KIND)
    results: dict[str, Any] = _measure.surroundings(KIND) | {"GB_s": bandwidth / 1e9, "rows": []}
    for part in given.parts:
        if part == "decode":
            sources = [decode(bandwidth, name) for name in DECODING]
        else:
            sources = [train(name) for name in TRAINING] if part == "train" else [updates()]
        for row in (row for source in sources for row in source):
            print(row, file=sys.stderr, flush=True)
            results["rows"].append(row)
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
