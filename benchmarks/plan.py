"""How long should an iteration of phase 3 take on a GPU that is not here?  Bandwidth, FLOPs and the shape of the model.

Nothing is measured: rollout and update are arithmetic on datasheets and on assumptions, each of which is an option.
    python benchmarks/plan.py [--model convgpt] [--device A10G H200] [--conversations 128] [--turns 5] [--json FILE]
    python benchmarks/plan.py --measured run.json   # beside it the seconds of a real run
    python benchmarks/plan.py --check               # this CPU: its bandwidth and rate, a prediction, and what is real
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

from posttrain import plan
from posttrain.config import StarPORun
from posttrain.types import Completion, SamplingParams, Segment, Trajectory, UserError


class Device(NamedTuple):
    bandwidth: float  # bytes a second
    flops: float  # a second, bfloat16 with float32 accumulation, dense
    memory: float = 0.0  # bytes
    waits: bool = False  # a CPU computes before it goes on; a GPU while the next kernels are being launched


DEVICES = {
    "A10G": Device(600e9, 70e12, 24e9),  # baseten.co, "A10 vs A10G"; its tensor rate has no datasheet
    "L4": Device(300e9, 121e12, 24e9),  # NVIDIA L4 datasheet: 300 GB/s, 242 TFLOP/s with sparsity
    "A100": Device(1555e9, 312e12, 40e9),  # NVIDIA A100 datasheet, 40 GB SXM
    "H100": Device(3350e9, 989e12, 80e9),  # NVIDIA H100 datasheet, SXM: 1979 TFLOP/s with sparsity
    "H200": Device(4800e9, 989e12, 141e9),  # NVIDIA H200 datasheet, SXM: 4.8 TB/s, 1979 TFLOP/s with sparsity
}
QWEN = dict(vocab_size=151936, num_key_value_heads=2, head_dim=128, tie_word_embeddings=True)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the config.json of the published checkpoints
    "convgpt": ("convgpt", {}),  # 164M
    "qwen2.5-0.5b": (
        "qwen2",
        QWEN | dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, head_dim=64),
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        QWEN | dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    ),
}
CHECKED = dict(  # a Llama of 3M for --check
    vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


class Work(NamedTuple):
    """One iteration: Work(conversations=128, siblings=16, turns=5, prompt=250, new=64, reply=60, kept=0.25)."""

    conversations: int
    siblings: int  # conversations that share a prompt, which is read once
    turns: int
    prompt: int
    new: int  # tokens sampled in a turn
    reply: int  # tokens of the world's answer to it
    kept: float = 1.0  # share of the conversations that is trained on

    @property
    def context(self) -> int:
        """Tokens of a whole conversation."""
        return self.prompt + self.turns * self.new + (self.turns - 1) * self.reply


class Assumed(NamedTuple):
    decode_share: float  # of the bandwidth, while decoding
    compute_share: float  # of the FLOPs, while reading and learning
    launch: float  # seconds that Python and the launches take for one layer of one decoding step


class Seconds(NamedTuple):
    prefill: float
    decode: float
    update: float

    @property
    def rollout(self) -> float:
        return self.prefill + self.decode

    @property
    def iteration(self) -> float:
        return self.rollout + self.update


def forward_flops(shape: plan.Shape, tokens: float, context: float) -> float:
    """Of the blocks, for tokens that each see `context` others on average: 2 for each weight, and for q k' and p v."""
    return tokens * (2 * shape.blocks + 4 * shape.layers * shape.query * context)


def prefill_seconds(shape: plan.Shape, work: Work, device: Device, assumed: Assumed) -> float:
    """Prompts once for each group, then every reply behind all that was said before."""
    flops = forward_flops(shape, work.conversations / work.siblings * work.prompt, work.prompt / 2)
    flops += forward_flops(shape, work.conversations * (work.turns - 1) * work.reply, (work.prompt + work.context) / 2)
    return flops / (device.flops * assumed.compute_share)


def decode_seconds(shape: plan.Shape, work: Work, device: Device, assumed: Assumed, slots: int, size: int) -> float:
    """Each step reads all weights and the KV cache of `slots` conversations, in numbers of `size` bytes."""
    rows, seconds = min(slots, work.conversations), 0.0
    for turn in range(work.turns):
        context = work.prompt + turn * (work.new + work.reply) + work.new / 2
        weights = shape.blocks + shape.top
        reads = size * (weights + rows * context * shape.cache) / (device.bandwidth * assumed.decode_share)
        flops = forward_flops(shape, rows, context) + rows * 2 * shape.top
        work_seconds = max(reads, flops / (device.flops * assumed.compute_share))
        host = assumed.launch * shape.layers
        seconds += work.new * (host + work_seconds if device.waits else max(host, work_seconds))
    return seconds * work.conversations / rows


def update_seconds(
    shape: plan.Shape, work: Work, device: Device, assumed: Assumed, cfg: StarPORun, looks: int
) -> float:
    """6 N T, 8 N T where activations are computed again; the output layer, always so, for sampled tokens alone.

    looks: forward passes over the batch before the update.
    """
    tokens = work.kept * work.conversations * work.context
    sampled = work.kept * work.conversations * work.turns * work.new
    blocks, top = forward_flops(shape, tokens, work.context / 2), 2 * shape.top * sampled
    passes = (3 if cfg.model.tuning == "full" else 2) + bool(cfg.trainer.gradient_checkpointing)  # frozen: no gradient
    flops = looks * (blocks + top) + cfg.algorithm.num_iterations * (passes * blocks + 4 * top)
    if cfg.algorithm.critical and cfg.algorithm.critic.kind != "shared":
        flops += cfg.algorithm.num_iterations * passes * blocks
    return flops / (device.flops * assumed.compute_share)


def looks_of(cfg: StarPORun) -> int:
    """Forward passes before the update: log-probs again in bfloat16, the reference, the critic's values."""
    return int(cfg.trainer.bf16) + (cfg.algorithm.beta > 0) + cfg.algorithm.critical


def predict(
    shape: plan.Shape, work: Work, device: Device, assumed: Assumed, cfg: StarPORun, slots: int, looks: int
) -> Seconds:
    return Seconds(
        prefill_seconds(shape, work, device, assumed),
        decode_seconds(shape, work, device, assumed, slots, plan.computed(cfg)),
        update_seconds(shape, work, device, assumed, cfg, looks),
    )


def config_of(given: Any, work: Work) -> StarPORun:
    """A run of phase 3 with this work."""
    advantage = "grpo" if given.critic == "none" else "gae"
    algorithm: dict[str, Any] = {"advantage": advantage, "beta": given.beta, "num_iterations": given.num_iterations}
    if given.critic != "none":
        algorithm["critic"] = {"kind": given.critic}
    return StarPORun.model_validate(
        {
            "output_dir": "unused",
            "model": {"name_or_path": "unused", "tuning": given.tuning},
            "worlds": ["frozen_lake"],
            "rollout": {
                "groups": -(-work.conversations // work.siblings),
                "num_generations": work.siblings,
                "max_context": work.context,
                "max_completion_length": work.new,
            },
            "algorithm": algorithm,
            "trainer": {"bf16": not given.check, "gradient_checkpointing": given.gradient_checkpointing},
        }
    )


def table(results: dict[str, Any], measured: dict[str, Any] | None) -> str:
    header = ["model", "device", "at a time", "prefill s", "decode s", "update s", "iteration s", "sampled tok/s"]
    header += ["measured / predicted: rollout", "update"] if measured else []
    cells = []
    for row in results["rows"]:
        line = [row["model"], row["device"]]
        if row["slots"] is None:
            cells.append([*line, "does not fit", *[""] * (len(header) - 3)])
            continue
        found = Seconds(row["prefill"], row["decode"], row["update"])
        line += [str(row["slots"]), *(f"{value:.2f}" for value in (*found, found.iteration))]
        line.append(f"{results['sampled_tokens'] / found.rollout:,.0f}")
        if measured:
            same = row["model"] == measured["model"] and re.search(rf"\b{row['device']}\b", measured["device"])
            pairs = ((measured["rollout"], found.rollout), (measured["update"], found.update))
            line += [f"{real:.2f} s, **{real / said:.2f}x**" if same else "" for real, said in pairs]
        cells.append(line)
    return _measure.table(header, cells)


# --------------------------------------------------------------------------------------------------------- this CPU


def rate(action: Callable[[], object], amount: float, repeats: int = 5) -> float:
    """`amount` a second: the best of a few times, as a datasheet has it."""
    action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return amount / min(seconds)


def this_cpu() -> Device:
    """Bandwidth of a copy that no cache holds, and the rate of a float32 matrix product."""
    numbers, size = torch.zeros(1 << 25), 1024
    copied, matrix = torch.empty_like(numbers), torch.randn(size, size)
    return Device(
        rate(lambda: copied.copy_(numbers), 2 * numbers.nbytes), rate(lambda: matrix @ matrix, 2 * size**3), waits=True
    )


def conversations(work: Work, vocabulary: int) -> list[Trajectory]:
    """Episodes of exactly this length."""
    numbers = torch.Generator().manual_seed(0)

    def text(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=numbers).tolist()

    played = []
    for row in range(work.conversations):
        segment = Segment(text(work.prompt))
        for turn in range(work.turns):
            segment.write(turn, Completion(text(work.new), [0.0] * work.new, True))
            if turn + 1 < work.turns:
                segment.read(text(work.reply))
        ends = [0.0] * (work.turns - 1) + [float(row % 2)]
        empty = [""] * work.turns
        played.append(Trajectory([segment], ends, [0.0] * work.turns, empty, empty, group=row // work.siblings))
    return played


def check(work: Work, cfg: StarPORun, shares: Assumed, repeats: int) -> dict[str, Any]:
    """The prediction for this CPU beside the slot engine and the learner, on a Llama of 3M."""
    import update

    from posttrain.sampler import SlotSampler

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CHECKED)
    model = AutoModelForCausalLM.from_config(config).eval()
    shape = plan.Shape.of(config, cfg.model)
    device = this_cpu()
    engine = SlotSampler(model, [config.vocab_size], 0, cfg.rollout.max_context)

    def play(work: Work) -> None:
        episodes = conversations(work, config.vocab_size)
        prompts = [episodes[row - row % work.siblings].segments[0].ids[: work.prompt] for row in range(len(episodes))]
        handles = engine.open(prompts)
        for _ in range(work.turns):
            engine.sample(handles, SamplingParams(work.new), handles)
            for handle in handles:
                engine.append(handle, [5] * work.reply)
        engine.close(handles)

    one = work._replace(conversations=1, siblings=1, turns=1)
    launch = 1 / rate(partial(play, one), work.new * shape.layers, repeats)  # with one row there is little else
    learner_step = update.ours(model, conversations(work, config.vocab_size), plan.MOST_TOKENS["cpu"])
    found = _measure.alternating({"rollout": partial(play, work), "update": learner_step}, repeats)
    assumed = shares._replace(launch=launch)
    said = predict(shape, work, device, assumed, cfg, work.conversations, looks=0)
    return {"device": device._asdict(), "launch": launch, "predicted": said._asdict(), "seconds": found}


def checked(results: dict[str, Any]) -> str:
    said, device = Seconds(**results["predicted"]), Device(**results["device"])
    cells = []
    for name, predicted in (("rollout", said.rollout), ("update", said.update)):
        real = results["seconds"][name]
        spread = f"{min(real) / predicted:.2f}-{max(real) / predicted:.2f}"
        cells.append(
            [name, f"{predicted:.2f}", f"{median(real):.2f}", f"**{median(real) / predicted:.2f}x** ({spread})"]
        )
    here = f"{device.bandwidth / 1e9:.0f} GB/s, {device.flops / 1e9:.0f} GFLOP/s, {results['launch'] * 1e6:.0f} us"
    head = ["a Llama of 3M", "predicted s", "measured s", "measured / predicted"]
    return f"This CPU: {here} a layer and step.\n\n{_measure.table(head, cells)}"


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--conversations", type=int, default=128)
    parser.add_argument("--siblings", type=int, default=16, help="conversations that share a prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=250, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=64, help="sampled in a turn")
    parser.add_argument("--reply", type=int, default=60, help="tokens of the world's answer to a turn")
    parser.add_argument("--kept", type=float, default=0.25, help="share of the conversations that is trained on")
    parser.add_argument("--tuning", choices=["full", "lora"], default="full")
    parser.add_argument("--critic", choices=["none", "shared", "separate"], default="none")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0 there is a reference")
    parser.add_argument("--num-iterations", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--decode-share", type=float, default=0.5, help="assumption: of the bandwidth, in decoding")
    parser.add_argument("--compute-share", type=float, default=0.4, help="assumption: of the FLOP rate, elsewhere")
    # Qwen2-0.5B, 24 layers, gives 49.9 tokens a second on an A100 whose bandwidth allows 1,500 (Qwen's speed benchmark)
    parser.add_argument("--launch-ms", type=float, default=0.83, help="assumption: a layer of one decoding step")
    parser.add_argument("--measured", type=Path, help="JSON of a run: device, model, seconds of rollout and update")
    parser.add_argument("--check", action="store_true", help="measure this CPU and compare")
    given = parser.parse_args()
    _measure.threads()
    work = Work(
        given.conversations, given.siblings, given.turns, given.prompt, given.new_tokens, given.reply,
        1.0 if given.check else given.kept,
    )  # fmt: skip
    assumed = Assumed(given.decode_share, given.compute_share, given.launch_ms / 1000)
    cfg = config_of(given, work)
    options = {key: value for key, value in vars(given).items() if key not in ("json", "measured")}
    results = _measure.surroundings() | options
    if given.check:
        results |= check(work, cfg, assumed, given.repeats)
        _measure.publish(results, f"{_measure.told(results)} {checked(results)}", given.json)
        return

    rows = []
    for name in given.model:
        kind, sizes = MODELS[name]
        shape = plan.Shape.of(AutoConfig.for_model(kind, **sizes), cfg.model)
        for place in given.device:
            device, row = DEVICES[place], {"model": name, "device": place, "slots": None}
            try:
                planned = plan.choose(shape, cfg, int(device.memory))
            except UserError:
                rows.append(row)
                continue
            found = predict(shape, work, device, assumed, cfg, planned.slots, looks_of(cfg))
            rows.append(row | {"slots": planned.slots, "bytes": planned.peak} | found._asdict())
    results |= {"sampled_tokens": work.conversations * work.turns * work.new, "rows": rows}
    measured = json.loads(given.measured.read_text(encoding="utf-8")) if given.measured else None
    size = (
        f"{work.conversations} conversations of {work.turns} turns, {work.context} tokens, {work.kept:.0%} trained on"
    )
    shares = f"assumed: {given.decode_share:.0%} of the bandwidth, {given.compute_share:.0%} of the FLOPs"
    head = f"Predicted, not measured: {size}; {shares}, {given.launch_ms} ms a layer and decoding step."
    _measure.publish(results, f"{head}\n\n{table(results, measured)}", given.json)


if __name__ == "__main__":
    main()
