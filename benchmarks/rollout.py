"""How much faster are multi-turn rollouts when the KV cache is kept, and not the whole history read again each turn?

Three engines play the same conversations (same random weights, prompts, replies and number of sampled tokens):
`slots` is what we train with, `replay` our fallback, `generate` transformers' own loop, called once per turn.
    python benchmarks/rollout.py [--size 40m] [--device cuda] [--turns 2 5 10] [--json FILE]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

import posttrain.convgpt  # noqa: F401  registers ConvGPT with the Auto classes
from posttrain.sampler import ReplaySampler, Sampler, SlotSampler
from posttrain.types import Completion, SamplingParams, address

PAD, GROUP = 0, 8  # the members of a group share their prompt, as they do in training
ENDLESS = dict(pad_token_id=PAD, bos_token_id=None, eos_token_id=None)  # so all sample the same number of tokens
COMMON = ENDLESS | dict(initializer_range=0.06, max_position_embeddings=4096)
TINY = COMMON | dict(vocab_size=512, num_attention_heads=4, num_key_value_heads=4)
LARGER = COMMON | dict(vocab_size=32000, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
SHAPES: dict[str, dict[str, dict[str, Any]]] = {  # of the tiny ones, the ConvGPT is the quickstart's
    "tiny": {
        "convgpt": TINY
        | dict(hidden_size=256, num_hidden_layers=3, head_dim=16, intermediate_size=192, tie_word_embeddings=False),
        "llama": TINY | dict(hidden_size=128, num_hidden_layers=4, intermediate_size=384),
    },
    "40m": {"llama": LARGER | dict(hidden_size=512, num_hidden_layers=8, intermediate_size=1536)},
}


class GenerateSampler(ReplaySampler):
    """The peer: plain `model.generate` over the left-padded histories, which draws by itself and keeps no log-probs."""

    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        rows = [self._ids[handle] for handle in handles]
        width, model = max(map(len, rows)), cast(Any, self.model)
        ids_BT = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=model.device)
        mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        settings = GenerationConfig(
            min_new_tokens=params.max_new_tokens,
            max_new_tokens=params.max_new_tokens,
            do_sample=params.temperature > 0,
            top_k=0 if params.temperature > 0 else None,
            pad_token_id=PAD,
        )
        new_BN = model.generate(ids_BT, attention_mask=mask_BT, generation_config=settings)[:, width:].tolist()
        for row, new in zip(rows, new_BN, strict=True):
            row.extend(new)
        return [Completion(new, [], False) for new in new_BN]


def script(conversations: int, turns: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """What the model is given: prompts[row] of 80-120 tokens and replies[turn][row] of 20-40."""

    def text(low: int, high: int, *place: int | str) -> list[int]:
        rng = random.Random(address(*place))
        return rng.choices(range(1, 512), k=rng.randint(low, high))

    prompts = [text(80, 120, "prompt", row // GROUP) for row in range(conversations)]
    return prompts, [[text(20, 40, "reply", turn, row) for row in range(conversations)] for turn in range(turns)]


def play(
    sampler: Sampler, prompts: list[list[int]], replies: list[list[list[int]]], params: SamplingParams
) -> list[list[int]]:
    """The sampled tokens of each conversation."""
    handles = sampler.open(prompts)
    sampled: list[list[int]] = [[] for _ in handles]
    for turn, texts in enumerate(replies):
        seeds = [address("turn", turn, row) for row in range(len(handles))]
        for row, completion in enumerate(sampler.sample(handles, params, seeds)):
            sampled[row] += completion.ids
            sampler.append(handles[row], texts[row])
    sampler.close(handles)
    assert all(len(ids) == len(replies) * params.max_new_tokens for ids in sampled)
    return sampled


def markdown(results: dict[str, Any]) -> str:
    """Sampled tokens per second at the median time."""
    rows = []
    for row in results["rows"]:
        seconds = row["seconds"]
        speeds = [f"{row['tokens'] / median(seconds[name]):.0f}" for name in ("slots", "generate", "replay")]
        ratios = [_measure.ratio(seconds[peer], seconds["slots"]) for peer in ("generate", "replay")]
        rows.append([f"{row['model']} {row['parameters'] / 1e6:.1f}M", str(row["turns"]), *speeds, *ratios])
    header = ["model", "turns", "slots tok/s", "generate tok/s", "replay tok/s", "slots vs generate", "slots vs replay"]
    size = f"{results['conversations']} conversations, {results['new_tokens']} tokens a turn, {results['dtype']}"
    return f"{_measure.told(results)}\n{size}, medians of {results['repeats']}.\n\n{_measure.table(header, rows)}"


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda is timed in bfloat16")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--conversations", type=int, default=32, help="played side by side")
    parser.add_argument("--new-tokens", type=int, default=24, help="sampled per conversation and turn")
    given = parser.parse_args()
    _measure.threads()
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32

    rows = []
    for kind, shape in SHAPES[given.size].items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).to(given.device).eval()
        never = [shape["vocab_size"]]
        engines: dict[str, Sampler] = {
            "slots": SlotSampler(model, never, PAD),
            "generate": GenerateSampler(model, never, PAD),
            "replay": ReplaySampler(model, never, PAD),
        }

        greedy = SamplingParams(given.new_tokens, temperature=0.0)
        answers = {name: play(engine, *script(given.conversations, 2), greedy) for name, engine in engines.items()}
        if not answers["slots"] == answers["generate"] == answers["replay"]:
            sys.exit(f"{kind}: the engines differ under greedy decoding in float32, so nothing was timed.")

        model.to(dtype)
        for turns in given.turns:
            texts = script(given.conversations, turns)
            params = SamplingParams(given.new_tokens)
            seconds = _measure.alternating(
                {name: partial(play, engine, *texts, params) for name, engine in engines.items()}, given.repeats
            )
            tokens = given.conversations * turns * given.new_tokens
            rows.append(
                dict(model=kind, parameters=model.num_parameters(), turns=turns, tokens=tokens, seconds=seconds)
            )

    results = _measure.surroundings(given.device) | {
        "dtype": str(dtype).removeprefix("torch."),
        **{key: value for key, value in vars(given).items() if key != "json"},
        "rows": rows,
    }
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
