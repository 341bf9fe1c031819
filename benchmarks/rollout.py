"""How much faster are multi-turn rollouts when the KV cache is kept, and not the whole history read again each turn?

Three engines play the same conversations (same random weights, prompts, replies and number of sampled tokens):
`slots` is what we train with, `replay` our fallback, `generate` transformers' own loop, called once per turn.
    python benchmarks/rollout.py [--size 40m] [--device cuda] [--turns 2 5 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import posttrain.convgpt  # registers it with the Auto classes
from posttrain.sampler import ReplaySampler, Sampler, SlotSampler
from posttrain.types import Completion, SamplingParams, address

PAD, GROUP = 0, 8  # the members of a group share their prompt, as they do in training
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SHAPES: dict[str, dict[str, dict[str, Any]]] = {  # size -> model type -> its config; "tiny" has the quickstart's ConvGPT
    "tiny": {
        "convgpt": HEADS | dict(vocab_size=512, hidden_size=256, num_hidden_layers=3, head_dim=16, intermediate_size=192)
        | dict(tie_word_embeddings=False),
        "llama": HEADS | dict(vocab_size=512, hidden_size=128, num_hidden_layers=4, intermediate_size=384),
    },
    "40m": {
        "llama": dict(vocab_size=32000, hidden_size=512, num_hidden_layers=8, intermediate_size=1536)
        | dict(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True),
    },
}


class GenerateSampler:
    """The peer: plain `model.generate` over the left-padded histories, log-probs not even asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self._ids: list[list[int]] = []

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self._ids = [list(prompt) for prompt in prompts]
        return list(range(len(prompts)))

    def append(self, handle: int, ids: Sequence[int]) -> None:
        self._ids[handle].extend(ids)

    def close(self, handles: Sequence[int]) -> None:
        self._ids = []

    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        width = max(map(len, self._ids))
        ids_BT = torch.tensor([[PAD] * (width - len(row)) + row for row in self._ids], device=self.model.device)
        mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in self._ids], device=ids_BT.device)
        settings = GenerationConfig(
            min_new_tokens=params.max_new_tokens,
            max_new_tokens=params.max_new_tokens,
            do_sample=params.temperature > 0,
            top_k=0,
            pad_token_id=PAD,
        )
        new_BN = self.model.generate(ids_BT, attention_mask=mask_BT, generation_config=settings)[:, width:].tolist()
        for row, new in zip(self._ids, new_BN, strict=True):
            row.extend(new)
        return [Completion(new, [], False) for new in new_BN]


def play(sampler: Sampler, conversations: int, turns: int, params: SamplingParams) -> list[list[int]]:
    """Sampled tokens of each conversation; prompts have 80-120 tokens, the world's replies 20-40."""

    def text(low: int, high: int, *place: int | str) -> list[int]:
        rng = random.Random(address(*place))
        return [rng.randrange(1, 512) for _ in range(rng.randint(low, high))]

    handles = sampler.open([text(80, 120, "prompt", row // GROUP) for row in range(conversations)])
    sampled: list[list[int]] = [[] for _ in handles]
    for turn in range(turns):
        seeds = [address("turn", turn, row) for row in range(conversations)]
        for row, completion in enumerate(sampler.sample(handles, params, seeds)):
            sampled[row] += completion.ids
            sampler.append(handles[row], text(20, 40, "reply", turn, row))
    sampler.close(handles)
    assert all(len(ids) == turns * params.max_new_tokens for ids in sampled)
    return sampled


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def markdown(results: dict[str, Any]) -> str:
    """Sampled tokens per second at the median time; ratios of medians, and in brackets those of the single repeats."""
    lines = [
        f"Commit {results['commit']}, {results['machine']}, {results['threads']} thread(s), load {results['load']:.1f}, "
        f"torch {results['torch']}, transformers {results['transformers']}.",
        f"{results['conversations']} conversations, {results['new_tokens']} tokens a turn, {results['dtype']}, "
        f"medians of {results['repeats']}.",
        "",
        "| model | turns | slots tok/s | generate tok/s | replay tok/s | slots vs generate | slots vs replay |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        seconds = row["seconds"]
        cells = [f"{row['model']} {row['parameters'] / 1e6:.1f}M", str(row["turns"])]
        cells += [f"{row['tokens'] / median(seconds[name]):.0f}" for name in ("slots", "generate", "replay")]
        for peer in ("generate", "replay"):
            ratios = [theirs / ours for theirs, ours in zip(seconds[peer], seconds["slots"], strict=True)]
            middle = median(seconds[peer]) / median(seconds["slots"])
            cells.append(f"**{middle:.1f}x** ({min(ratios):.1f}-{max(ratios):.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda is timed in bfloat16")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--conversations", type=int, default=64, help="played side by side")
    parser.add_argument("--new-tokens", type=int, default=24, help="sampled per conversation and turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32

    rows = []
    for kind, shape in SHAPES[given.size].items():
        torch.manual_seed(0)
        nobody = dict.fromkeys(["bos_token_id", "eos_token_id"])  # no turn stops early: all sample the same number
        more = {"max_position_embeddings": 4096, "initializer_range": 0.06, "pad_token_id": PAD, **nobody}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **more)).to(given.device).eval()
        never = [shape["vocab_size"]]
        engines: dict[str, Sampler] = {
            "slots": SlotSampler(model, never, PAD),
            "generate": GenerateSampler(model),
            "replay": ReplaySampler(model, never, PAD),
        }

        greedy = SamplingParams(given.new_tokens, temperature=0.0)
        answers = {name: play(engine, given.conversations, 2, greedy) for name, engine in engines.items()}
        if not answers["slots"] == answers["generate"] == answers["replay"]:
            sys.exit(f"{kind}: the engines differ under greedy decoding in float32, so nothing was timed.")

        model.to(dtype)
        for turns in given.turns:
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for repeat in range(given.repeats):
                for name in sorted(engines, reverse=repeat % 2 == 1):
                    start = time.perf_counter()
                    play(engines[name], given.conversations, turns, SamplingParams(given.new_tokens))
                    seconds[name].append(time.perf_counter() - start)
            tokens = given.conversations * turns * given.new_tokens
            rows.append(
                dict(model=kind, parameters=model.num_parameters(), turns=turns, tokens=tokens, seconds=seconds)
            )

    results = {
        "commit": commit(),
        "machine": torch.cuda.get_device_name() if given.device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        **{key: value for key, value in vars(given).items() if key != "json"},
        "rows": rows,
    }
    print(markdown(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
