"""How near its limits does a device come?  Its bandwidth and FLOP rate, and what decoding and learning make of them.

Rollout and update of phase 3 on conversations of fixed lengths, random weights, as many at once as its plan says; on a
GPU as phase 3 computes there: bfloat16 over float32 weights, CUDA graphs, compiled layers. One process for each model.
    python benchmarks/device.py --device cuda [--model qwen2.5-0.5b convgpt] [--json FILE]
    python benchmarks/device.py    # this CPU, with a Llama of 3M; small numbers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure
import update

from posttrain import plan
from posttrain.config.starpo import StarPORun
from posttrain.models import layers_are_compiled
from posttrain.plan import seconds as roofline
from posttrain.plan.devices import OPERATIONS, Device, Fleet
from posttrain.plan.known_models import PUBLISHED
from posttrain.plan.shape import Shape
from posttrain.plan.work import Episodes
from posttrain.rollout.engines.graphs import GraphSampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.types import Completion, SamplingParams, Segment, Trajectory

SMALL = dict(
    vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, tie_word_embeddings=True,
)  # fmt: skip
MODELS = {
    "convgpt": PUBLISHED["mkurman/ConvGPT-0.2B-SYNTH-250B-EC"],
    "qwen2.5-0.5b": PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"],
    "qwen2.5-1.5b": PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"],
    "llama-3m": ("llama", SMALL),
}


class Work(NamedTuple):
    """One iteration: Work(conversations=128, samples=16, turns=5, prompt=250, new=64, reply=60)."""

    conversations: int
    samples: int  # conversations that share a prompt, which is prefilled once
    turns: int
    prompt: int
    new: int  # tokens sampled in a turn
    reply: int  # tokens of the environment's answer to it

    @property
    def context(self) -> int:
        """Tokens of a whole conversation."""
        return self.prompt + self.turns * self.new + (self.turns - 1) * self.reply


DEFAULTS = {
    "cpu": (["llama-3m"], Work(16, 8, turns=3, prompt=96, new=16, reply=24)),
    "cuda": (["qwen2.5-0.5b", "convgpt"], Work(128, 16, turns=10, prompt=320, new=64, reply=60)),  # 1,500 tokens
}


def limits(kind: str) -> Device:
    """What this device reaches, as a device of the plan."""
    bandwidth, peak = _measure.limits(kind)
    return Device(kind, 0, bandwidth / 1e9, peak / 1e12, peak / 1e12, link=1, network=1, waits=kind != "cuda")


def config_of(work: Work, *, bf16: bool, torch_compile: bool, gradient_checkpointing: bool | None = None) -> StarPORun:
    """A run of phase 3 with this work."""
    return StarPORun.model_validate(
        {
            "output_dir": "unused",
            "model": {"name_or_path": "unused"},
            "envs": ["frozen_lake"],
            "rollout": {
                "groups": -(-work.conversations // work.samples),
                "num_generations": work.samples,
                "max_context": work.context,
                "max_completion_length": work.new,
            },
            "algorithm": {"num_iterations": 1, "minibatches": 1, "filter": {"strategy": "none", "keep_zero": True}},
            "trainer": {
                "bf16": bf16,
                "torch_compile": torch_compile,
                "gradient_checkpointing": gradient_checkpointing,
            },
        }
    )


def conversations(work: Work, vocabulary: int) -> list[Trajectory]:
    """Episodes of exactly this length; every second one of a group has won."""
    numbers = torch.Generator().manual_seed(0)

    def text(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=numbers).tolist()

    played = []
    for row in range(work.conversations):
        if row % work.samples == 0:
            prompt = text(work.prompt)
        segment = Segment(list(prompt))
        for turn in range(work.turns):
            segment.write(turn, Completion(text(work.new), [0.0] * work.new, True))
            if turn + 1 < work.turns:
                segment.read(text(work.reply))
        ends = [0.0] * (work.turns - 1) + [float(row % 2)]
        empty = [""] * work.turns
        played.append(Trajectory([segment], ends, [0.0] * work.turns, empty, group=row // work.samples))
    return played


def play(engine: SlotSampler, work: Work, slots: int, vocabulary: int) -> None:
    prompts = [episode.segments[0].ids[: work.prompt] for episode in conversations(work._replace(turns=1), vocabulary)]
    for start in range(0, len(prompts), slots):
        handles = engine.open(prompts[start : start + slots])
        for _ in range(work.turns):
            engine.sample(handles, SamplingParams(work.new), handles)
            for handle in handles:
                engine.append(handle, [5] * work.reply)
        engine.close(handles)


def one(given: Any, work: Work) -> dict[str, Any]:
    """In a process of its own: what one model does here."""
    _measure.threads()
    kind, device = given.device, limits(given.device)
    name, sizes = MODELS[given.model[0]]
    model = _measure.model_of(name, sizes | _measure.ENDLESS, kind).eval()
    own: dict[str, bool] = {"bf16": kind == "cuda", "torch_compile": kind == "cuda"}
    cfg = config_of(work, **own)
    shape = plan.Shape.of(model.config, cfg.model)
    planned = plan.choose(shape, cfg, plan.Place(int(given.memory * 1e9), cuda=kind == "cuda"))
    own["gradient_checkpointing"] = planned.gradient_checkpointing
    cfg = config_of(work, **own)
    replayed = kind == "cuda" and planned.cuda_graphs  # as in a run
    launching = SlotSampler(model, [shape.vocabulary], 0, work.context)
    engine = GraphSampler(model, [shape.vocabulary], 0, work.context) if replayed else launching
    precision = torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")

    def seconds(what: Work, engine: SlotSampler = engine) -> list[float]:
        with precision:
            action = partial(play, engine, what, planned.slots, shape.vocabulary)
            action()  # which also records graphs
            return [_measure.seconds_of(action, kind) for _ in range(given.repeats)]

    # a turn of all conversations, half as long as they become, beside one of a single token: what is left is decoding
    half = work._replace(turns=1, prompt=work.context // 2)
    steps = work.new - 1
    decode = (median(seconds(half)) - median(seconds(half._replace(new=1)))) / steps
    rows = min(planned.slots, work.conversations)
    size = plan.Numbers.of(cfg).computed
    step_of = Episodes(1, rows, 1, half.prompt + work.new / 2, new=1, reply=0)
    reads = work.conversations / rows * _measure.decoding_bytes(shape, rows, step_of, size)
    alone = half._replace(conversations=1, samples=1)  # with one row there is little else than launches
    of_one = [median(seconds(alone._replace(new=new), launching)) for new in (work.new, 1)]
    launch = (of_one[0] - of_one[1]) / steps / shape.layers

    rollout = seconds(work)
    step = update.ours(model, conversations(work, shape.vocabulary), planned.micro_batch_tokens, **own)
    step()  # makes the optimizer's moments
    learning = [_measure.seconds_of(step, kind) for _ in range(given.repeats)]
    device = device._replace(operation=max(0.0, launch) / OPERATIONS)
    said, flops = predicted(shape, work, device, cfg, planned)
    bandwidth, peak = device.bandwidth * 1e9, device.peak * 1e12
    labels = work.conversations * work.turns * work.new
    captures = engine.recorded if isinstance(engine, GraphSampler) and engine.replays else 0
    useful = 3 * _measure.forward_flops(shape, [work.context] * work.conversations, labels)
    return {
        "model": given.model[0],
        "engine": "graphs" if captures else "slots",
        "captures": captures,
        "compiled": layers_are_compiled(model),
        "bandwidth": bandwidth,
        "flops": peak,
        "launch": launch,
        "slots": planned.slots,
        "micro_batch_tokens": planned.micro_batch_tokens,
        "decode_step": decode,
        "decode_share": reads / decode / bandwidth,
        "update_share": flops / median(learning) / peak,
        "mfu": useful / median(learning) / peak,
        "predicted": said,
        "seconds": {"rollout": rollout, "update": learning},
        "peak": _measure.peak(kind),
    }


def predicted(
    shape: Shape, work: Work, device: Device, cfg: StarPORun, planned: plan.Plan
) -> tuple[dict[str, float], float]:
    """Seconds of rollout and update by the plan's arithmetic, and the FLOPs of the update."""
    groups = work.conversations / work.samples
    played = Episodes(round(groups), work.samples, work.turns, work.prompt, work.new, work.reply)
    found = roofline.of_episodes(shape, cfg, Fleet(device), played, planned, 1).parts
    tokens, sampled = work.conversations * work.context, work.conversations * work.turns * work.new
    passes = 3 + bool(cfg.trainer.gradient_checkpointing)
    flops = passes * roofline.forward_flops(shape, tokens, work.context / 2)
    return found, flops + 4 * roofline.head_flops(shape, sampled)


def markdown(results: dict[str, Any]) -> str:
    cells = []
    for row in results["rows"]:
        rollout, learning = (median(row["seconds"][part]) for part in ("rollout", "update"))
        line = [row["model"], str(row["slots"]), f"{row['decode_step'] * 1000:.1f}", f"{row['decode_share']:.0%}"]
        line += [f"{row['update_share']:.0%}", f"{rollout:.2f} + {learning:.2f}"]
        parts = (("rollout", rollout), ("update", learning))
        line += [f"{real / row['predicted'][part]:.2f}" for part, real in parts]
        cells.append([*line, f"{row['peak']:.1f}", *([row["engine"], f"{row['mfu']:.0%}"] if "mfu" in row else [])])
    first = results["rows"][0]
    limit = f"{first['bandwidth'] / 1e9:,.0f} GB/s and {first['flops'] / 1e9:,.0f} GFLOP/s"
    header = [
        "model",
        "at a time",
        "decode ms a step",
        "of the bandwidth",
        "update, of the FLOPs",
        "rollout + update, s",
    ]
    header += ["measured / predicted: rollout", "update", "peak GiB", *(["engine", "MFU"] if "mfu" in first else [])]
    work = Work(*(results["work"][name] for name in Work._fields))
    size = f"{work.conversations} conversations of {work.turns} turns, {work.context} tokens, all trained on"
    return f"{_measure.told(results)}\n{size}. Measured here: {limit}.\n\n{_measure.table(header, cells)}"


def arguments(argv: Sequence[str]) -> tuple[Any, Work]:
    parser = _measure.parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", nargs="+", choices=MODELS)
    for field in Work._fields:
        parser.add_argument(f"--{field}", type=int)
    parser.add_argument("--memory", type=float, default=20.0, help="GB that the plan may use")
    parser.add_argument("--only", action="store_true", help="the first model, in this process, figures as JSON")
    given = parser.parse_args(argv)
    models, work = DEFAULTS[given.device]
    sizes = {field: getattr(given, field) for field in Work._fields if getattr(given, field) is not None}
    work = work._replace(**sizes)
    given.model = given.model or models
    if work.new < 2:
        parser.error("--new: 2 or more, the second token is the first that is only decoded")
    return given, work


def main() -> None:
    given, work = arguments(sys.argv[1:])
    if given.only:
        print(json.dumps(one(given, work)))
        return
    options = [f"--device={given.device}", f"--memory={given.memory}", f"--repeats={given.repeats}", "--only"]
    options += [f"--{field}={getattr(work, field)}" for field in Work._fields]
    rows = [_measure.alone(__file__, [f"--model={name}", *options]) for name in given.model]
    _measure.threads()
    results = _measure.surroundings(given.device) | {"work": work._asdict(), "memory": given.memory, "rows": rows}
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
