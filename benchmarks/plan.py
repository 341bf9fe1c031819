"""How long should a run take on a GPU that is not here?  Bandwidth, FLOPs and the shape of the model.

Nothing is measured: everything is arithmetic on datasheets and on assumptions, each of which is an option.
    python benchmarks/plan.py [--model convgpt] [--device A10G H200] [--conversations 128] [--turns 5] [--json FILE]
    python benchmarks/plan.py --measured run.json   # beside it the seconds of a real run
    python benchmarks/plan.py --phase configs/phase1_sft.yaml --rows 56000 --tokens 400   # phase 1 or 2, in hours
device.py measures a device that is here, beside the same arithmetic.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

from posttrain import plan
from posttrain.config import DPORun, SFTRun, StarPORun, resolve
from posttrain.types import UserError


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


class Work(NamedTuple):
    """One iteration: Work(conversations=128, samples=16, turns=5, prompt=250, new=64, reply=60, kept=0.25)."""

    conversations: int
    samples: int  # conversations that share a prompt, which is prefilled once
    turns: int
    prompt: int
    new: int  # tokens sampled in a turn
    reply: int  # tokens of the environment's answer to it
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
    flops = forward_flops(shape, work.conversations / work.samples * work.prompt, work.prompt / 2)
    flops += forward_flops(shape, work.conversations * (work.turns - 1) * work.reply, (work.prompt + work.context) / 2)
    return flops / (device.flops * assumed.compute_share)


def decode_reads(shape: plan.Shape, rows: int, context: float, size: int) -> float:
    """Bytes that one step reads: the weights, and the KV cache of its rows, in numbers of `size` bytes."""
    return size * (shape.blocks + shape.top + rows * context * shape.cache)


def decode_seconds(shape: plan.Shape, work: Work, device: Device, assumed: Assumed, slots: int, size: int) -> float:
    """Each step reads all weights and the KV cache of `slots` conversations, in numbers of `size` bytes."""
    rows, seconds = min(slots, work.conversations), 0.0
    for turn in range(work.turns):
        context = work.prompt + turn * (work.new + work.reply) + work.new / 2
        reads = decode_reads(shape, rows, context, size) / (device.bandwidth * assumed.decode_share)
        flops = forward_flops(shape, rows, context) + rows * 2 * shape.top
        work_seconds = max(reads, flops / (device.flops * assumed.compute_share))
        host = assumed.launch * shape.layers
        seconds += work.new * (host + work_seconds if device.waits else max(host, work_seconds))
    return seconds * work.conversations / rows


def update_flops(shape: plan.Shape, work: Work, cfg: StarPORun, looks: int) -> float:
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
    return flops


def looks_of(cfg: StarPORun) -> int:
    """Forward passes before the update: log-probs again in bfloat16, the reference, the critic's values."""
    return bool(cfg.trainer.bf16) + (cfg.algorithm.beta > 0) + cfg.algorithm.critical


def predict(
    shape: plan.Shape, work: Work, device: Device, assumed: Assumed, cfg: StarPORun, slots: int, looks: int
) -> Seconds:
    return Seconds(
        prefill_seconds(shape, work, device, assumed),
        decode_seconds(shape, work, device, assumed, slots, plan.Numbers.of(cfg).computed),
        update_flops(shape, work, cfg, looks) / (device.flops * assumed.compute_share),
    )


class Rows(NamedTuple):
    """The data of phase 1 or 2: Rows(rows=56000, tokens=400, trained=0.6, padding=0.08)."""

    rows: int  # conversations, or twice the pairs
    tokens: int  # of a row on average; rows differ so much that a token also sees about as many before it
    trained: float  # share of the tokens that have a label
    padding: float  # tokens of padding for each real one


def row_flops(shape: plan.Shape, data: Rows) -> tuple[float, float, float]:
    """A forward pass over all rows: the blocks, their attention, and the layers behind them.

    The output layer sees labels alone. No other position is computed twice, nor masked: attention is causal.
    """
    tokens = data.rows * data.tokens * (1 + data.padding)
    blocks = forward_flops(shape, tokens, 0)
    attention = forward_flops(shape, tokens, data.tokens) - blocks
    output = shape.vocabulary * shape.states
    labels = data.rows * data.tokens * data.trained
    return blocks, attention, tokens * 2 * (shape.top - output) + labels * 2 * output


def phase_flops(shape: plan.Shape, data: Rows, settings: Any) -> dict[str, float]:
    """Of a whole run of phase 1 or 2: `settings` is its config, an SFTRun or a DPORun.

    A backward pass costs two forward passes. Blocks are computed again under gradient checkpointing, logits always.
    """
    trainer, pairs = settings.trainer, isinstance(settings, DPORun)
    epochs, again = trainer.get("num_train_epochs", 3), bool(trainer.get("gradient_checkpointing", True))
    blocks, attention, head = row_flops(shape, data)
    in_batch = trainer["per_device_train_batch_size"] * trainer.get("gradient_accumulation_steps", 1) * (1 + pairs)
    evaluations = epochs * data.rows / in_batch / trainer["eval_steps"]
    forward = pairs + evaluations * settings.data.eval_rows * (1 + pairs) / data.rows  # reference, evaluations
    return {
        "blocks": blocks * (epochs * (3 + again) + forward),
        "attention": attention * (epochs * (3 + again) + forward),
        "output": head * (epochs * 4 + forward),
    }


def phase_memory(shape: plan.Shape, settings: Any) -> int:
    """Bytes at the worst moment of phase 1 or 2: a micro-batch of rows that are all as long as they may be."""
    trainer, rows = settings.trainer, settings.trainer["per_device_train_batch_size"]
    tokens = rows * (1 + isinstance(settings, DPORun)) * settings.data.max_length
    cfg = config_of(
        Work(16, 16, 1, 64, 64, 1),
        tuning=settings.model.tuning,
        bf16=bool(trainer.get("bf16", True)),
        gradient_checkpointing=bool(trainer.get("gradient_checkpointing", True)),
    )
    learning = plan.learning(shape, cfg, tokens, cuda=True) | {"shared prefixes": 0}  # those are of phase 3
    return plan.most({"always": plan.always(shape, cfg), "a": learning, "b": plan.stepping(shape, cfg, cuda=True)})


def phase_table(given: Any) -> tuple[dict[str, Any], str]:
    """Hours and memory of phase 1 or 2 on each device, and the same as a table."""
    settings = resolve(SFTRun if "sft" in given.phase.name else DPORun, given.phase)
    pairs = isinstance(settings, DPORun)
    data = Rows(given.rows * (1 + pairs), given.tokens // (1 + pairs), given.trained, given.padding)
    rows = []
    for name in given.model:
        kind, sizes = MODELS[name]
        shape = plan.Shape.of(AutoConfig.for_model(kind, **sizes), settings.model)
        flops, memory = phase_flops(shape, data, settings), phase_memory(shape, settings)
        for place in given.device:
            hours = sum(flops.values()) / (DEVICES[place].flops * given.compute_share) / 3600
            rows.append({"model": name, "device": place, "hours": hours, "bytes": memory} | flops)
    head = ["model", "device", "hours", "GiB", "PFLOP: blocks", "attention", "output"]
    cells = [
        [row["model"], row["device"], f"{row['hours']:.1f}", plan.gib(row["bytes"])]
        + [f"{row[part] / 1e15:.0f}" for part in ("blocks", "attention", "output")]
        for row in rows
    ]
    said = f"Predicted, not measured: {given.phase.name}, {given.rows} {'pairs' if pairs else 'rows'} of {given.tokens}"
    said += f" tokens; assumed: {given.compute_share:.0%} of the FLOPs, {given.padding:.0%} padding."
    return {"rows": rows}, f"{said}\n\n{_measure.table(head, cells)}"


def config_of(
    work: Work,
    *,
    tuning: str = "full",
    critic: str = "none",
    beta: float = 0.0,
    num_iterations: int = 1,
    bf16: bool = True,
    gradient_checkpointing: bool | None = None,
) -> StarPORun:
    """A run of phase 3 with this work."""
    advantage = "grpo" if critic == "none" else "gae"
    algorithm: dict[str, Any] = {"advantage": advantage, "beta": beta, "num_iterations": num_iterations}
    if critic != "none":
        algorithm["critic"] = {"kind": critic}
    return StarPORun.model_validate(
        {
            "output_dir": "unused",
            "model": {"name_or_path": "unused", "tuning": tuning},
            "envs": ["frozen_lake"],
            "rollout": {
                "groups": -(-work.conversations // work.samples),
                "num_generations": work.samples,
                "max_context": work.context,
                "max_completion_length": work.new,
            },
            "algorithm": algorithm,
            "trainer": {"bf16": bf16, "gradient_checkpointing": gradient_checkpointing},
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


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--conversations", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16, help="conversations that share a prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=250, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=64, help="sampled in a turn")
    parser.add_argument("--reply", type=int, default=60, help="tokens of the environment's answer to a turn")
    parser.add_argument("--kept", type=float, default=0.25, help="share of the conversations that is trained on")
    parser.add_argument("--tuning", choices=["full", "lora"], default="full")
    parser.add_argument("--critic", choices=["none", "shared", "separate"], default="none")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0 there is a reference")
    parser.add_argument("--num-iterations", type=int, default=1)
    parser.add_argument(
        "--gradient-checkpointing", action="store_const", const=True, help="default: where the memory needs it"
    )
    parser.add_argument("--decode-share", type=float, default=0.5, help="assumption: of the bandwidth, in decoding")
    parser.add_argument("--compute-share", type=float, default=0.4, help="assumption: of the FLOP rate, elsewhere")
    # Qwen2-0.5B, 24 layers, gives 49.9 tokens a second on an A100 whose bandwidth allows 1,500 (Qwen's speed benchmark)
    parser.add_argument("--launch-ms", type=float, default=0.83, help="assumption: a layer of one decoding step")
    parser.add_argument("--measured", type=Path, help="JSON of a run: device, model, seconds of rollout and update")
    phases = parser.add_argument_group("phases 1 and 2")
    phases.add_argument("--phase", type=Path, help="their config; the options above do not count then")
    phases.add_argument("--rows", type=int, default=56_000, help="of the data; in phase 2 pairs")
    phases.add_argument("--tokens", type=int, default=400, help="of a row on average; in phase 2 of a pair")
    phases.add_argument("--trained", type=float, default=0.6, help="assumption: share of the tokens with a label")
    phases.add_argument("--padding", type=float, default=0.08, help="assumption: tokens of padding for each real one")
    given = parser.parse_args()
    _measure.threads()
    if given.phase is not None:
        figures, text = phase_table(given)
        return _measure.publish(_measure.surroundings() | figures, text, given.json)
    work = Work(
        given.conversations, given.samples, given.turns, given.prompt, given.new_tokens, given.reply, given.kept
    )  # fmt: skip
    assumed = Assumed(given.decode_share, given.compute_share, given.launch_ms / 1000)
    chosen = ("tuning", "critic", "beta", "num_iterations", "gradient_checkpointing")
    cfg = config_of(work, **{key: getattr(given, key) for key in chosen})
    left_out = ("json", "measured", "phase", "rows", "tokens", "trained", "padding")
    options = {key: value for key, value in vars(given).items() if key not in left_out}
    results = _measure.surroundings() | options
    rows = []
    for name in given.model:
        kind, sizes = MODELS[name]
        shape = plan.Shape.of(AutoConfig.for_model(kind, **sizes), cfg.model)
        for place in given.device:
            device, row = DEVICES[place], {"model": name, "device": place, "slots": None}
            try:
                planned = plan.choose(shape, cfg, plan.Place(int(device.memory)))
            except UserError:
                rows.append(row)
                continue
            run = plan.checkpointed(cfg, planned.gradient_checkpointing)
            found = predict(shape, work, device, assumed, run, planned.slots, looks_of(cfg))
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
