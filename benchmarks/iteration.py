"""How fast and how lean is a whole iteration, played, scored and learnt from, beside one of TRL's GRPOTrainer?

The functions of phase 3, and `GRPOTrainer.train` with a `rollout_func`: the same levels of FrozenLake, protocol, tokens
and weights, the same number of turns and sampled tokens, one optimizer step each.
    python benchmarks/iteration.py [--size 40m] [--groups 8] [--num-generations 16] [--turns 5] [--json FILE]
    python benchmarks/iteration.py --model runs/smollm2/base          # a pretrained model, bfloat16 on both sides
    python benchmarks/iteration.py --size convgpt-164m --device cuda  # bfloat16 on both sides
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure
from _measure import PAD, SHAPES

import train_phase3_starpo as phase3
from envs.episode import Episode
from posttrain import plan
from posttrain.config.loading import resolve
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun
from posttrain.models import layers_are_compiled, loading as models
from posttrain.models.chat import Chat
from posttrain.plan import seconds
from posttrain.rollout.engines.graphs import POSITIONS, GraphSampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.runtime import hardware
from posttrain.starpo.run import levels, make_learner
from posttrain.types import derive_seed

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart" / "phase3_starpo.yaml"


class Iteration(NamedTuple):
    """What one iteration took, in seconds, and the work that it was."""

    rollout: float
    update: float
    turns: int
    sampled: int
    context: int  # tokens of all episodes, sampled or read
    prompt: int = 0  # tokens of all prompts
    compiled: bool = False  # whether the layers are
    captures: int = 0  # CUDA graphs that are replayed


def config(
    groups: int = 8,
    num_generations: int = 16,
    turns: int = 5,
    new_tokens: int = 24,
    micro_batch_tokens: int = 2048,
    bf16: bool = False,
) -> StarPORun:
    """A run in which no group is left out and every batch is used once."""
    changes = [f"rollout={{groups: {groups}, num_generations: {num_generations}}}", "model.name_or_path=unused"]
    changes += [f"rollout.max_completion_length={new_tokens}", "rollout.max_context=4096", "envs=[frozen_lake]"]
    changes += [f"protocol.max_turns={turns}", f"trainer.micro_batch_tokens={micro_batch_tokens}"]
    changes += [f"trainer.bf16={str(bf16).lower()}", "distillation=null"]
    changes += ["algorithm.filter={strategy: none, keep_zero: true}", "trainer.learning_rate=1e-6"]
    return resolve(StarPORun, CONFIG, [*changes, "algorithm.num_iterations=1", "algorithm.minibatches=1"])


def fitted(cfg: StarPORun, chat: Chat, iterations: int) -> StarPORun:
    """The run with a context of its longest episode, rounded up to positions of a step.

    For GraphSampler, whose cache has the whole context from the start; that of SlotSampler grows as it is needed.
    """
    longest = 0
    for step in range(1, iterations + 1):
        for episode in levels(cfg, step)[0]:
            assert isinstance(episode, Episode)
            tokens = len(chat.prompt(episode.messages))
            while not episode.done:
                said = episode.step("").user  # what random weights write is as little an action
                tokens += cfg.rollout.max_completion_length
                tokens += 0 if said is None else len(chat.extend(said, finished=False))
            longest = max(longest, tokens)
    context = -(-longest // POSITIONS) * POSITIONS
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"max_context": context})})


def won(sample: int) -> float:
    """Random weights write no valid action, so every episode lasts for all its turns and wins nothing.

    Without a reward there is nothing to learn: every second member of a group is given one.
    """
    return float(sample % 2)


def ours(cfg: StarPORun, model: Any, chat: Chat) -> Callable[[int], Iteration]:
    """Iteration 1, 2, ... of phase 3, its model being the policy."""
    hardware.keep_freed_memory()  # as a script does that loads a model
    learner = make_learner(cfg, model, chat)
    engine = GraphSampler if learner.device.type == "cuda" else SlotSampler  # as rollout.cuda_graphs is by default
    sampler = engine(learner.policy, [model.config.vocab_size], PAD, cfg.rollout.max_context)  # no token ends a turn

    def iteration(step: int) -> Iteration:
        start = time.perf_counter()
        with learner.autocast():
            groups = phase3.rollout(cfg, sampler, chat, step)
        played = time.perf_counter()  # tokens have come from the device, so it has nothing left to do
        for group in groups:
            for sample, trajectory in enumerate(group):
                trajectory.turn_rewards[-1] = won(sample)
        with hardware.deterministic(learner.deterministic):
            experience = phase3.collect(cfg, learner, groups, phase3.score_and_filter(cfg, groups))
            phase3.update(cfg, learner, experience, step)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
        episodes = [trajectory for group in groups for trajectory in group]
        work = (sum(t.turns for t in episodes), sum(t.tokens for t in episodes), sum(t.context for t in episodes))
        prompt = sum(t.segments[0].mask.index(True) for t in episodes)
        captures = sampler.recorded if isinstance(sampler, GraphSampler) and sampler.replays else 0
        return Iteration(played - start, end - played, *work, prompt, layers_are_compiled(model), captures)

    return iteration


def beside_limits(cfg: StarPORun, config: Any, device: str, each: Iteration) -> dict[str, Any]:
    """Bytes that the rollout reads at least, FLOPs of the update, and the plan's seconds of both."""
    shape, samples = _measure.shape_of(config), cfg.rollout.num_generations
    episodes = cfg.rollout.groups * samples
    work = _measure.episodes_of(episodes, samples, each.turns, each.prompt, each.sampled, each.context)
    chosen = plan.choose(shape, cfg, plan.Place(1 << 40, cuda=device == "cuda"))
    return {
        "read": _measure.decoding_bytes(shape, episodes, work, plan.Numbers.of(cfg).computed),
        "flops": 3 * _measure.forward_flops(shape, [work.context] * episodes, each.sampled),
        "planned": seconds.of_episodes(shape, cfg, _measure.fleet(device), work, chosen, 1).parts,
    }


def theirs(cfg: StarPORun, model: Any, chat: Chat, iterations: int, batch_size: int) -> list[Iteration]:
    """So many training steps of GRPOTrainer, on the levels that ours plays."""
    size, found = cfg.rollout.num_generations, []
    play = _measure.rollout_func(cfg, chat)
    began = rollout = 0.0
    work = (0, 0, 0, 0)

    def timed(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal rollout, work
        start = time.perf_counter()
        made = play(prompts, trainer)
        rollout = time.perf_counter() - start
        sampled = sum(map(sum, made["env_mask"]))
        context = sum(map(len, made["prompt_ids"] + made["completion_ids"]))
        work = (sampled // cfg.rollout.max_completion_length, sampled, context, sum(map(len, made["prompt_ids"])))
        return made

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            found.append(Iteration(rollout, time.perf_counter() - began - rollout, *work))

    steps = range(1, iterations + 1)
    levels = [derive_seed(cfg.seed, "level", step, group) for step in steps for group in range(cfg.rollout.groups)]
    trainer = _measure.grpo_trainer(
        model,
        chat.tokenizer,
        [{"prompt": str(level)} for level in levels],
        lambda prompts, **_: [won(row % size) for row in range(len(prompts))],
        rollout_func=timed,
        callbacks=[Clock()],
        max_steps=iterations,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=cfg.rollout.groups * size // batch_size,
        num_generations=size,
        max_completion_length=cfg.rollout.max_completion_length,
        generation_kwargs={"eos_token_id": None},
        shuffle_dataset=False,
        learning_rate=cfg.learning_rate,
        bf16=bool(cfg.trainer.bf16),
    )
    trainer.eos_token_ids = [-1]  # no token ends a turn
    trainer.train()
    return found


def in_bf16(given: Any) -> bool:
    return given.model is not None or given.device == "cuda"


def settings(given: Any, chat: Chat) -> StarPORun:
    """The run that a command line asks for."""
    sizes = (given.groups, given.num_generations, given.turns, given.new_tokens, given.micro_batch_tokens)
    cfg = config(*sizes, bf16=in_bf16(given))
    if given.device == "cuda":
        cfg = fitted(cfg, chat, given.iterations)
    return hardware.settle(cfg.model_copy(update={"device": given.device}))  # compiled layers on a GPU


def one(given: Any) -> None:
    """In a process of its own: time and memory of one contestant, as JSON."""
    _measure.threads()
    if given.model:
        model, chat = models.load(ModelSection(name_or_path=given.model), device=given.device, chat_template=None)
    else:
        shape = SHAPES[given.size][given.kind]
        model, chat = _measure.model_of(given.kind, shape, given.device), _measure.words(shape["vocab_size"])
    cfg = settings(given, chat)
    shape = copy.deepcopy(model.config)
    if given.only == "ours":
        iteration = ours(cfg, model, chat)
        found = [iteration(step) for step in range(1, given.iterations + 1)]
    else:
        found = theirs(cfg, model, chat, given.iterations, given.batch_size)
    assert len(found) == given.iterations
    counted = [each._asdict() for each in found[1:] or found]
    figures = {"iterations": counted, "parameters": model.num_parameters(), "peak": _measure.peak(given.device)}
    print(json.dumps(figures | (beside_limits(cfg, shape, given.device, found[-1]) if given.only == "ours" else {})))


def markdown(results: dict[str, Any]) -> str:
    cells = []
    for row in results["rows"]:
        seconds, parts = {}, []
        for name in ("ours", "trl"):
            each = [iteration for process in row[name] for iteration in process["iterations"]]
            seconds[name] = [one["rollout"] + one["update"] for one in each]
            parts.append(f"{median(one['rollout'] for one in each):.2f} + {median(one['update'] for one in each):.2f}")
        peak = {name: median(process["peak"] for process in row[name]) for name in ("ours", "trl")}
        memory = [f"{peak['ours']:.2f}", f"{peak['trl']:.2f}", f"{peak['ours'] / peak['trl']:.2f}"]
        who = f"{row['model']} {row['ours'][0]['parameters'] / 1e6:.1f}M"
        cells.append([who, *parts, _measure.ratio(seconds["trl"], seconds["ours"]), *memory])
        if "planned" in (first := row["ours"][0]):
            took = {
                part: [
                    median(one[part] for each in row[name] for one in each["iterations"]) for name in ("ours", "trl")
                ]
                for part in ("rollout", "update")
            }
            cells[-1] += [f"{first['read'] / each / results['GB_s'] / 1e9:.1%}" for each in took["rollout"]]
            cells[-1] += [f"{first['flops'] / each / results['TFLOP_s'] / 1e12:.1%}" for each in took["update"]]
            cells[-1].append(" + ".join(f"{first['planned'][part]:.2f}" for part in took))
            cells[-1].append(" and ".join(f"{each[0] / first['planned'][part]:.2f}" for part, each in took.items()))
    work = results["rows"][0]["ours"][0]["iterations"][0]
    header = ["model", "ours: rollout + update, s", "TRL", "ours vs TRL", "ours GiB", "TRL GiB", "memory"]
    if "planned" in results["rows"][0]["ours"][0]:
        header += ["rollout, of the bandwidth: ours", "TRL", "update, MFU: ours", "TRL"]
        header += ["planned, s", "measured / planned"]
    size = f"{results['groups']} x {results['num_generations']} episodes of {results['turns']} turns"
    tokens = f"{work['context']:,} tokens, {work['sampled']:,} of them sampled"
    return (
        f"{_measure.told(results)}\n{size}: {tokens}; medians of {results['repeats']} processes each.\n\n"
        f"{_measure.table(header, cells)}"
    )


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--num-generations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24, help="sampled in a turn")
    parser.add_argument("--iterations", type=int, default=2, help="of a process; the first of several is not counted")
    parser.add_argument("--batch-size", type=int, default=8, help="TRL: episodes in a micro-batch")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="ours: padded tokens in a micro-batch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda is timed in bfloat16")
    parser.add_argument("--only", choices=["ours", "trl"], help="one contestant alone, figures as JSON")
    parser.add_argument("--kind", help="with --only: which model of the size")
    parser.add_argument("--model", help="a model's folder instead, which has not learnt to play; in bfloat16")
    given = parser.parse_args()
    if given.groups * given.num_generations % given.batch_size:
        parser.error("--batch-size: must divide the number of episodes, groups x num-generations")
    if given.only:
        one(given)
        return
    _measure.threads()
    mine = ("json", "repeats", "only", "kind")
    told = {key: value for key, value in vars(given).items() if key not in mine and value is not None}
    shared = [f"--{key.replace('_', '-')}={value}" for key, value in told.items()]

    rows = []
    for kind in [Path(given.model).name] if given.model else SHAPES[given.size]:
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for repeat in range(given.repeats):
            for name in sorted(found, reverse=repeat % 2 == 1):
                found[name].append(_measure.alone(__file__, [f"--only={name}", f"--kind={kind}", *shared]))
        work = {name: amounts(processes) for name, processes in found.items()}
        if work["ours"] != work["trl"]:
            sys.exit(f"{kind}: turns, sampled tokens and tokens in all differ, it was not the same work: {work}.")
        rows.append({"model": kind} | found)
    bf16 = in_bf16(given)
    results = (
        _measure.surroundings(given.device)
        | _measure.limits(given.device, bf16).told
        | {
            **{key: value for key, value in vars(given).items() if key not in ("json", "only", "kind", "model")},
            "bf16": bf16,
            "rows": rows,
        }
    )
    _measure.publish(results, markdown(results), given.json)


def amounts(processes: list[dict[str, Any]]) -> list[list[int]]:
    """Turns, sampled tokens and tokens in all of every iteration."""
    return [
        [iteration[key] for key in ("turns", "sampled", "context")]
        for process in processes
        for iteration in process["iterations"]
    ]


if __name__ == "__main__":
    main()
