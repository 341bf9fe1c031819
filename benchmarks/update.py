"""How fast and how lean is an update beside TRL's GRPO step on the same trajectories?

One optimizer step of the clipped policy gradient over the same conversations, advantages and random weights: ours, and
`GRPOTrainer.compute_loss` of TRL in float32 without gradient checkpointing, by micro-batches of `--batch-size`.
    python benchmarks/update.py [--vocabulary 1024 65536] [--turns 5] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

from posttrain.types import Completion, Segment, Trajectory, derive_seed

GROUP = 8
SHAPE: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
)


def model_of(vocabulary: int, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=4096, **SHAPE)
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def conversations(count: int, turns: int, new_tokens: int, vocabulary: int) -> list[Trajectory]:
    """Prompts of 80 to 120 tokens, shared in a group; turns of up to `new_tokens` sampled ones, replies of 20 to 40.

    Episodes end early as they do in training: each after a number of turns of its own.
    """

    def text(low: int, high: int, *place: int | str) -> list[int]:
        rng = random.Random(derive_seed(*place))
        return [rng.randrange(3, vocabulary) for _ in range(rng.randint(low, high))]

    played = []
    for row in range(count):
        segment = Segment(text(80, 120, "prompt", row // GROUP))
        last = random.Random(derive_seed("turns", row)).randint(1, turns)
        for turn in range(last):
            said = text(new_tokens // 2, new_tokens, "said", turn, row)
            segment.write(turn, Completion(said, [0.0] * len(said), True))
            if turn + 1 < last:
                segment.read(text(20, 40, "reply", turn, row))
        won = [0.0] * (last - 1) + [float(row % 2)]
        played.append(Trajectory([segment], won, [0.0] * last, [""] * last, group=row // GROUP))
    return played


def ours(model: Any, episodes: list[Trajectory], micro_batch_tokens: int, **trainer: Any) -> Callable[[], float]:
    """One update of phase 3; the norm of its gradient. `trainer` has more of its settings."""
    import train_phase3_starpo as phase3
    from posttrain.config.starpo import StarPORun
    from posttrain.runtime import hardware
    from posttrain.starpo.advantages import grpo
    from posttrain.starpo.experience import Batch, Experience
    from posttrain.starpo.learner import Learner

    hardware.keep_freed_memory()  # as a script does that loads a model
    cfg = StarPORun.model_validate(
        {
            "output_dir": "unused",
            "model": {"name_or_path": "unused"},
            "envs": ["frozen_lake"],
            "trainer": {"learning_rate": 1e-9, "max_grad_norm": 1e9, "micro_batch_tokens": micro_batch_tokens}
            | trainer,
            "algorithm": {"num_iterations": 1, "minibatches": 1},
        }
    )
    if cfg.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    learner, batch = Learner(cfg, model), Batch.of(episodes)
    learner.exact = False  # nobody has sampled these tokens: their log-probs are the policy's own
    measured = learner.measure(batch)
    everyone = torch.ones(len(episodes), dtype=torch.bool)
    batch = batch._replace(sampler_S=learner.logprobs(batch, everyone))
    rewards_B = torch.tensor([t.reward for t in episodes])
    advantages_S = grpo(rewards_B, batch.group_B)[batch.episode_S]
    experience = Experience(batch, measured, advantages_S, None, everyone)

    def step() -> float:
        return phase3.update(cfg, learner, experience, 1)["policy/grad_norm"]

    return step


def theirs(model: Any, episodes: list[Trajectory], batch_size: int) -> Callable[[], float]:
    """The loss of TRL's trainer for each micro-batch, its gradients, and one step; the norm of the gradient."""
    accumulation = -(-len(episodes) // batch_size)
    trainer = _measure.grpo_trainer(
        model,
        _measure.words(8).tokenizer,
        [{"prompt": "x"}] * len(episodes),
        lambda **_: [],
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_generations=GROUP,
        learning_rate=1e-9,
    )
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = accumulation
    rewards_B = torch.tensor([t.reward for t in episodes]).view(-1, GROUP)
    advantages_B = ((rewards_B - rewards_B.mean(1, True)) / (rewards_B.std(1, keepdim=True) + 1e-4)).flatten()
    count = torch.tensor(sum(t.tokens for t in episodes))

    def padded(rows: list[list[int]], left: bool) -> torch.Tensor:
        width = max(map(len, rows))
        return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])

    micro = []
    for start in range(0, len(episodes), batch_size):
        some = [t.segments[0] for t in episodes[start : start + batch_size]]
        cut = [segment.mask.index(True) for segment in some]
        prompts = [segment.ids[:n] for segment, n in zip(some, cut, strict=True)]
        answers = [segment.ids[n:] for segment, n in zip(some, cut, strict=True)]
        masks = [[int(on) for on in segment.mask[n:]] for segment, n in zip(some, cut, strict=True)]
        inputs = {
            "prompt_ids": padded(prompts, left=True),
            "prompt_mask": padded([[1] * len(row) for row in prompts], left=True),
            "completion_ids": padded(answers, left=False),
            "completion_mask": padded([[1] * len(row) for row in answers], left=False),
            "tool_mask": padded(masks, left=False),
            "advantages": advantages_B[start : start + batch_size],
            "num_items_in_batch": count,
        }
        micro.append({key: value.to(model.device) for key, value in inputs.items()})

    def step() -> float:
        for inputs in micro:
            trainer.compute_loss(trainer.model, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e9).item()
        trainer.optimizer.step()
        trainer.model.zero_grad(set_to_none=True)
        return norm

    return step


def one(given: Any) -> None:
    """In a process of its own: time and memory of one contestant, as JSON."""
    _measure.threads()
    model = model_of(given.vocabulary[0], given.device)
    episodes = conversations(given.conversations, given.turns, given.new_tokens, given.vocabulary[0])
    if given.only == "ours":
        step = ours(model, episodes, given.micro_batch_tokens)
    else:
        step = theirs(model, episodes, given.batch_size)
    norm, seconds = step(), []  # the first one also makes the optimizer's moments
    for _ in range(given.repeats):
        start = time.perf_counter()
        step()
        if given.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"norm": norm, "seconds": seconds, "peak": _measure.peak(given.device)}))


def markdown(results: dict[str, Any]) -> str:
    cells, read = [], results["read_tokens"]
    for row in results["rows"]:
        seconds = {name: [each["seconds"][0] for each in row[name]] for name in ("ours", "trl")}
        peak = {name: median(each["peak"] for each in row[name]) for name in ("ours", "trl")}
        speeds = [f"{read / median(seconds[name]):,.0f}" for name in ("ours", "trl")]
        memory = [f"{peak['ours']:.2f}", f"{peak['trl']:.2f}", f"{peak['ours'] / peak['trl']:.2f}"]
        cells.append([str(row["vocabulary"]), *speeds, _measure.ratio(seconds["trl"], seconds["ours"]), *memory])
    header = ["vocabulary", "ours tok/s", "TRL tok/s", "ours vs TRL", "ours GiB", "TRL GiB", "memory"]
    size = f"{results['conversations']} conversations, {read:,} tokens, {results['sampled_tokens']:,} of them sampled"
    return (
        f"{_measure.told(results)}\n{size}; medians of {results['repeats']} processes each.\n\n"
        f"{_measure.table(header, cells)}"
    )


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[1024, 65536, 151936])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24, help="the most sampled in a turn")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8, help="TRL: conversations in a micro-batch")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="ours: padded tokens in a micro-batch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", choices=["ours", "trl"], help="one contestant alone, figures as JSON")
    given = parser.parse_args()
    if given.conversations % GROUP:
        parser.error(f"--conversations: groups have {GROUP} members, so a multiple of {GROUP}")
    if given.only:
        one(given)
        return
    _measure.threads()
    episodes = conversations(given.conversations, given.turns, given.new_tokens, 1024)
    sampled, read = sum(t.tokens for t in episodes), sum(t.context for t in episodes)
    handed_on = ("turns", "new_tokens", "conversations", "batch_size", "micro_batch_tokens", "device")
    shared = [f"--{key.replace('_', '-')}={getattr(given, key)}" for key in handed_on]

    def contestant(name: str, vocabulary: int) -> dict[str, Any]:
        own = [f"--only={name}", f"--vocabulary={vocabulary}", "--repeats=1"]
        return _measure.alone(__file__, [*own, *shared])

    rows = []
    for vocabulary in given.vocabulary:
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for repeat in range(given.repeats):
            for name in sorted(found, reverse=repeat % 2 == 1):
                found[name].append(contestant(name, vocabulary))
        norms = [found[name][0]["norm"] for name in found]
        if abs(norms[0] - norms[1]) > 1e-3 * norms[0]:
            sys.exit(
                f"vocabulary {vocabulary}: the gradients differ ({norms[0]:.6g} and {norms[1]:.6g}): not the same work."
            )
        rows.append({"vocabulary": vocabulary} | found)

    results = _measure.surroundings(given.device) | {
        **{key: value for key, value in vars(given).items() if key not in ("json", "only")},
        "sampled_tokens": sampled,
        "read_tokens": read,
        "rows": rows,
    }
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
