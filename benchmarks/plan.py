"""Is the plan right?  What `--plan` predicts beside what was measured here and published elsewhere.

    python benchmarks/plan.py results [--json FILE]     # beside the results of this folder's other benchmarks
    python benchmarks/plan.py published                 # beside figures of papers, issues and documentation
    python benchmarks/plan.py runs runs/quickstart/phase3 [--device cpu]   # beside the seconds in runs' metrics.jsonl
What launches cost on a GPU and the share of the bandwidth in kernels that only read and write are fitted to the H100's
figures, no other factor to any of these. Where a prediction is off, the table says why.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

from posttrain import plan
from posttrain.config.dpo import DPORun
from posttrain.config.loading import resolve
from posttrain.config.sft import SFTRun
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun
from posttrain.config.yaml_file import read_yaml
from posttrain.plan import devices, episodes, known_models, parts, report, rows, seconds
from posttrain.plan.devices import Device, Fleet
from posttrain.plan.known_models import PUBLISHED
from posttrain.plan.parts import Numbers
from posttrain.plan.shape import Shape
from posttrain.plan.work import DataRows, Episodes

HERE = Path(__file__).parent
LABELS = "planned as if every token had a label; a third has none"
SAMPLED = "planned as if every token were sampled, and a quarter or a third is"
GIB = 2**30
NEW = 64  # tokens that a turn of gpu.py's decoding has


# Kernels and passes of the layers that were measured on an H100 and an H200; today's have fewer.
THEN: dict[str, Any] = {"DECODING": dict.fromkeys(seconds.DECODING, devices.OPERATIONS), "DECODING_FUSED": 26}
THEN |= {name: dict.fromkeys(each, each[""]) for name, each in (("EAGER", seconds.EAGER), ("MANY", seconds.MANY))}


class Compared(NamedTuple):
    """One figure: Compared("update, 40M", "s", 61.2, 57.9, "")"""

    what: str
    unit: str
    predicted: float
    found: float
    why: str = ""


def table(compared: Sequence[Compared], found: str) -> str:
    header = ["", "predicted", found, "ratio", "where it is off, and why"]
    lines = [
        [
            each.what,
            f"{_short(each.predicted)} {each.unit}".strip(),
            f"{_short(each.found)} {each.unit}".strip(),
            f"**{each.predicted / each.found:.2f}**",
            each.why,
        ]
        for each in compared
    ]
    return _measure.table(header, lines)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def shape_of(kind: str, sizes: dict[str, Any], **model: Any) -> Shape:
    return Shape.of(AutoConfig.for_model(kind, **sizes), ModelSection(name_or_path="unused", **model))


# ---------------------------------------------------------------------------------------------- this folder's results


def measured_limits(file: str = "device.json") -> Device:
    """The processor that device.py has measured."""
    found = json.loads((HERE / "results" / file).read_text(encoding="utf-8"))
    (row,) = found["rows"]
    operation, peak = row["launch"] / devices.OPERATIONS, row["flops"] / 1e12
    return Device("cpu", 16, row["bandwidth"] / 1e9, peak, peak, 1, 1, None, operation, waits=True)


def iteration_of(shape: Shape, cfg: StarPORun, work: Episodes, device: Device) -> tuple[dict[str, float], float, float]:
    """Seconds by part, and GiB at the peak of an iteration and of an update, libraries included."""
    rollout = cfg.rollout.model_copy(update={"max_context": round(work.context)})  # what contexts came to
    cfg = cfg.model_copy(update={"rollout": rollout})
    place = episodes.Place(1 << 40, report.HELD, cuda=device.cuda)
    planned = episodes.choose(shape, cfg, place)
    found = seconds.of_episodes(shape, cfg, Fleet(device), work, planned, 1)
    learns = {name: parts for name, parts in planned.parts.items() if name != "playing"}
    return found.parts, planned.peak / GIB, plan.peak_bytes(learns) / GIB


def of_results() -> Iterator[Compared]:
    """Rollouts, updates, iterations and phases on CPUs, one thread, float32."""
    import iteration

    device = measured_limits()
    kinds = {"iteration.json": "tiny", "iteration-40m.json": "40m"}
    for file, size in kinds.items():
        found = json.loads((HERE / "results" / file).read_text(encoding="utf-8"))
        cfg = iteration.config()
        # 305 tokens an episode, 120 of them sampled in 5 turns
        work = Episodes(8, 16, turns=5, prompt=97, new=24, reply=22)
        for row in found["rows"]:
            shape = shape_of(row["model"], _measure.SHAPES[size][row["model"]])
            name = f"{row['model']} {shape.parameters / 1e6:.1f}M"
            steps = [step for each in row["ours"] for step in each["iterations"]]
            took, peak, _ = iteration_of(shape, cfg, work, device)
            yield Compared(f"rollout, {name}", "s", took["rollout"], median(step["rollout"] for step in steps))
            yield Compared(f"update, {name}", "s", took["update"], median(step["update"] for step in steps))
            why = SAMPLED if size == "40m" else ""
            yield Compared(f"peak, {name}", "GiB", peak, median(each["peak"] for each in row["ours"]), why)
    found = json.loads((HERE / "results" / "rollout-164m.json").read_text(encoding="utf-8"))
    (row,) = found["rows"]
    shape = shape_of("convgpt", _measure.SHAPES["convgpt-164m"]["convgpt"])
    cfg = iteration.config(groups=4, num_generations=8)
    work = Episodes(4, 8, turns=5, prompt=120, new=24, reply=35)
    took, *_ = iteration_of(shape, cfg, work, device)
    yield Compared("rollout, convgpt 164M", "s", took["rollout"], median(row["seconds"]["slots"]))
    yield from _updates(device)
    yield from _phases(device)


def of_gpu() -> Iterator[Compared]:
    """Micro-batches and decoding steps on an H100, steps of phases on it and an H200, as they were launched then."""
    with patch.multiple(seconds, **THEN):
        yield from _of_h100()
        yield from _gpu_steps()


def _of_h100() -> Iterator[Compared]:
    """Micro-batches and decoding steps; each is the median of three."""
    import gpu

    (device,) = (each for each in devices.DEVICES if each.name == "H100")
    found = json.loads((HERE / "results" / "gpu-h100.json").read_text(encoding="utf-8"))
    for row in found["rows"]:
        if row["what"] not in ("train", "decode") or "error" in row:
            continue
        recomputed, compiled = bool(row.get("recomputed")), "compiled" in row["way"]
        numbers = Numbers(4, 2, "full", recomputed, eight_bits=False, compiled=compiled)
        kind, sizes = gpu.MODELS[row["model"]]
        cost = seconds.Cost(shape_of(kind, sizes), numbers, Fleet(device))
        if row["what"] == "decode":
            planned, name = cost.decodes(1, row["rows"], row["positions"], row["way"] == "eager"), "a decoding step"
        else:
            count, name = row["rows"] * row["tokens"], "a micro-batch"
            planned = cost.learns(count, count, row["tokens"] / 2)
        title = f"{name}, {row['model']}, {row['rows']} x {row.get('tokens', row.get('positions'))}, {row['way']}"
        title += ", recomputed" if recomputed else ""
        title += "" if row.get("deterministic", True) else ", not deterministic"
        yield Compared(title, "ms", planned * 1e3, row.get("ms", row.get("ms_a_step")))
        if row["what"] == "train":
            held = _trained_bytes(cost.shape, numbers, count)
            yield Compared(f"its peak, {title.partition(', ')[2]}", "GiB", held / GIB, row["peak_gib"])
        else:
            total = parts.weights(cost.shape, numbers) + parts.copies(cost.shape, numbers, kept=True)
            longest = row["positions"] + NEW
            held = parts.conversations(cost.shape, 2, row["rows"], longest, row["positions"] - NEW // 2)
            yield Compared(
                f"its peak, {title.partition(', ')[2]}", "GiB", (total + sum(held.values())) / GIB, row["peak_gib"]
            )


def _trained_bytes(shape: Shape, numbers: Numbers, tokens: int) -> float:
    """Bytes of a first micro-batch without an optimizer, as gpu.py runs it; its logits are 8,192 columns at a time."""
    token = parts.OfAToken.of(shape, numbers)
    tile = parts.output_tile(shape, numbers.computed, tokens, 8192, cuda=True)
    head = 2 * parts.FLOAT * shape.vocabulary * shape.states
    held = parts.weights(shape, numbers) + parts.copies(shape, numbers, kept=not numbers.recomputed) + head
    return held + token.activations(tokens) + max(tokens * token.at_work, tile)


def _gpu_steps() -> Iterator[Compared]:
    """Optimizer steps of phases 1 and 2 on GPUs, ConvGPT, its layers not compiled."""
    kind, sizes = PUBLISHED["mkurman/ConvGPT-0.2B-SYNTH-250B-EC"]
    shape = shape_of(kind, sizes)
    found = json.loads((HERE / "results" / "steps-h200.json").read_text(encoding="utf-8"))
    steps = [("H200", row) for row in found["rows"]]
    found = json.loads((HERE / "results" / "phases-dpo-h100.json").read_text(encoding="utf-8"))
    (row,), (mine,) = found["rows"], found["rows"][0]["ours"]
    length = row["tokens"] / found["count"]  # of a pair; two were read at a time, and activations kept
    own = {"phase": "dpo", "rows": 16, "tokens": length, "at_once": 2, "recomputed": False}
    steps.append(("H100", own | {"seconds": 16 * length / mine["steady"]}))
    for name, row in steps:
        numbers = Numbers(4, 2, "full", row["recomputed"], eight_bits=False)
        (fleet,) = devices.fleets(name)
        cost = seconds.Cost(shape, numbers, fleet)
        count, behind = row["rows"] * row["tokens"], row["tokens"] / (1 if row["phase"] == "sft" else 2)
        pieces = row["rows"] / row["at_once"]
        planned = cost.learns(count, count, behind, pieces) + cost.steps(shape.parameters, pieces)
        title = f"a step of {row['phase']}, convgpt, {row['rows']} x {row['tokens']:.0f}, eager"
        title += ", recomputed" if row["recomputed"] else ""
        yield Compared(f"{title}, {name}", "s", planned, row["seconds"])


def _updates(device: Device) -> Iterator[Compared]:
    import iteration
    import update

    found = json.loads((HERE / "results" / "update.json").read_text(encoding="utf-8"))
    for row in found["rows"]:
        shape = shape_of("llama", update.SHAPE | {"vocab_size": row["vocabulary"], "tie_word_embeddings": True})
        cfg = iteration.config(groups=2, num_generations=8)
        # 251 tokens an episode, 66 of them sampled
        work = Episodes(2, 8, turns=3.6, prompt=100, new=18.3, reply=30)
        took, _, peak = iteration_of(shape, cfg, work, device)
        name = f"llama of 4 layers, {row['vocabulary'] // 1024}k words"
        yield Compared(f"update, {name}", "s", took["update"], median(each["seconds"][-1] for each in row["ours"]))
        yield Compared(f"peak, {name}", "GiB", peak, median(each["peak"] for each in row["ours"]), SAMPLED)


def _phases(device: Device) -> Iterator[Compared]:
    """The seconds of phases.json are those of another processor: of these only the memory.

    Both files are of the time when TRL's trainers made as many columns of the logits on a CPU as on a GPU.
    """
    import phases

    own = json.loads((HERE / "results" / "device.json").read_text(encoding="utf-8"))["machine"]
    for file in ("phases.json", "phases-65k.json"):
        found = json.loads((HERE / "results" / file).read_text(encoding="utf-8"))
        for row in found["rows"]:
            with tempfile.TemporaryDirectory() as folder:
                phases.make_rows(Path(folder) / "rows.jsonl", row["phase"], found["count"], row["vocabulary"])
                lines = (Path(folder) / "rows.jsonl").read_text(encoding="utf-8").splitlines()
                settings = phases.settings_of(row["phase"], Path(folder), _Given(row["epochs"]))
            read = [json.loads(line) for line in lines]
            sides = ("messages",) if row["phase"] == "sft" else ("chosen", "rejected")
            tokens = sorted(sum(phases.tokens_of(each[side]) for side in sides) for each in read)
            kind = SFTRun if row["phase"] == "sft" else DPORun
            at_once = settings["trainer"]["per_device_train_batch_size"]
            longest = sum(tokens[-at_once:]) / min(at_once, len(tokens)) / len(sides)  # the longest rows together
            settings["data"]["max_length"] = round(longest)
            cfg = kind.model_validate(settings)
            shape = shape_of(
                "llama", phases.SHAPES["tiny"] | {"vocab_size": row["vocabulary"], "tie_word_embeddings": True}
            )
            place = episodes.Place(1 << 40, report.HELD, cuda=False)
            (mine,) = row["ours"]
            with patch.dict(rows.COLUMNS, cpu=rows.COLUMNS["cuda"]):
                peak = plan.peak_bytes(rows.rows_memory(shape, cfg, place, min(at_once, len(tokens)))) / GIB
            name = f"{row['phase']}, {row['vocabulary'] // 1024}k words"
            yield Compared(f"peak, {name}", "GiB", peak, mine["peak"], LABELS)
            if found["machine"] == own:
                data = DataRows(len(tokens), row["tokens"] / len(tokens), row["trained"] / row["tokens"])
                took = seconds.of_rows(shape, cfg, Fleet(device), data, at_once, 1).run
                yield Compared(f"all of it, {name}", "s", took, mine["seconds"])


class _Given(NamedTuple):
    epochs: float
    device: str = "cpu"


# ------------------------------------------------------------------------------------------------------- published


def episodes_on(model: str, fleet: str, **changes: Any) -> tuple[report.Planned, StarPORun]:
    """RAGEN's setting: 8 levels x 16, 5 turns of up to 100 tokens, PPO with a critic of its own."""
    given = [f"model.name_or_path=Qwen/{model}-Instruct", "algorithm.preset=ragen2", "output_dir=unused"]
    given += [] if "algorithm.advantage" in changes else ["algorithm.critic.kind=separate"]
    given += ["protocol={max_turns: 5, max_actions_per_turn: 2, max_actions: 10}"]
    given += ["rollout.max_completion_length=100", "rollout.max_context=2048", "trainer.max_steps=200"]
    given += [f"{key}={value}" for key, value in changes.items()]
    cfg = resolve(StarPORun, HERE.parent / "configs" / "envs" / "sokoban.yaml", given)
    (wanted,) = devices.fleets(fleet)
    return report.plan(_shape_of(f"Qwen/{model}-Instruct", cfg.model.tuning), cfg, wanted), cfg


@functools.cache
def _shape_of(name: str, tuning: str = "full") -> Shape:
    return shape_of(*PUBLISHED[name], tuning=tuning)


def of_published() -> Iterator[Compared]:
    """What the field has said of its runs, where model and device are known."""
    small = _shape_of("Qwen/Qwen2.5-0.5B-Instruct")
    three = _shape_of("Qwen/Qwen2.5-3B-Instruct")
    yield Compared("KV cache of a token, Qwen2.5-0.5B, bfloat16", "KB", 2 * small.cache / 1e3, 12.25)
    yield Compared("logits of 2 x 256 tokens, Qwen3-0.6B (trl#3678)", "MB", 4 * 512 * 151936 / 1e6, 310)
    why = "they keep both moments and float32 weights, as here; the rest is rounding of the 35"
    saved = three.parameters * 12 / 1e9
    yield Compared("checkpoint of PPO's actor, 3B, 8 shards (RAGEN v2)", "GB", saved, 35, why)

    whole, lora = (episodes_on("Qwen2.5-0.5B", "H100", **{"model.tuning": kind})[0] for kind in ("full", "lora"))
    share = plan.peak_bytes(lora.parts) / plan.peak_bytes(whole.parts)
    why = "theirs holds vLLM's share beside both; ours fills the memory with larger micro-batches where it is free"
    yield Compared("memory, LoRA to full, 0.5B (RAGEN, app. D)", "", share, 23 / 48, why)

    four = shape_of(
        "qwen3",
        dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
             num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
    )  # fmt: skip
    cost = cost_of(four, "RTX3090:memory=24,bandwidth=936,peak=71")
    why = "another engine: on the same CPU its step of 24 narrow layers takes half as long as ours launched one by one"
    with patch.multiple(seconds, **THEN):  # which launches as many operations as ours did
        waiting = cost_of(small, "A100-40").decodes(1, 1, 256, launched=True)
        yield Compared("transformers' generate, Qwen2-0.5B, A100, one row", "tokens/s", 1 / waiting, 49.9, why)
        waiting = cost.decodes(1, 1, 256, launched=True)
        why = "the same, and a host that launches an operation in 12 microseconds"
        yield Compared("generate, Qwen3-4B, RTX 3090, one row", "tokens/s", 1 / waiting, 48.7, why)
    yield Compared("the same with CUDA graphs", "tokens/s", 1 / cost.decodes(1, 1, 256), 109.8)

    planned, _ = episodes_on("Qwen2.5-0.5B", "H100", **{"algorithm.filter": "{strategy: none, keep_zero: true}"})
    assert planned.seconds is not None
    why = "read off an axis; Ray, verl and a prompt that is read anew each turn; lengths and number of GPUs unknown"
    yield Compared("an iteration, 0.5B, PPO on H100 (RAGEN v1)", "s", planned.seconds.iteration, 75, why)
    large, _ = episodes_on("Qwen2.5-3B", "4xH100", **{"algorithm.filter": "{strategy: none, keep_zero: true}"})
    kept, _ = episodes_on("Qwen2.5-3B", "4xH100")
    assert large.seconds is not None and kept.seconds is not None
    why = "the same stack, answers of up to 400 tokens, weights moved to vLLM each step"
    yield Compared("a step, 3B, 4 x H100, all groups (RAGEN v2)", "s", large.seconds.iteration, 89.2, why)
    why = "hours over 200 steps, the filter on; it keeps 3.2 of 8 groups, the plan counts on all that it may keep"
    yield Compared("a step, 3B, 4 x H100, repeated by others", "s", kept.seconds.iteration, 3.75 * 3600 / 200, why)
    why = "ours fills the memory with larger micro-batches where it is free; theirs lets vLLM reserve it"
    yield Compared("memory of all four", "GB", 4 * plan.peak_bytes(large.parts) / 1e9, 202, why)


def cost_of(shape: Shape, device: str) -> seconds.Cost:
    return seconds.Cost(shape, Numbers(4, 2, "full", False, False), devices.fleets(device)[0])


def verdicts() -> list[list[str]]:
    """What was said to fit or not to fit, and what the plan says."""
    alone = {"algorithm.advantage": "grpo"}
    half = alone | {"model.tuning": "lora", "model.dtype": "bfloat16"}
    five = "GPU5:memory=5,bandwidth=300,peak=65"
    cases = [
        ("0.5B, PPO, one GPU of 24 GB: does not fit (RAGEN#92)", "Qwen2.5-0.5B", "A10G", {}),
        ("7B, PPO in WebShop, 4 x H100: out of memory (RAGEN)", "Qwen2.5-7B", "4xH100", {"rollout.max_context": 15000}),
        ("7B, LoRA, no critic, 2 x H100: fits (verl-agent)", "Qwen2.5-7B", "2xH100", half),
        ("1.5B, QLoRA, no critic, 5 GB: fits (unsloth)", "Qwen2.5-1.5B", five, alone | {"model.tuning": "qlora"}),
        ("0.5B, LoRA, one H100: fits (verl)", "Qwen2.5-0.5B", "H100", {"model.tuning": "lora"}),
        ("3B, no critic, one GPU of 80 GB: fits (nano-aha)", "Qwen2.5-3B", "A100-80", alone),
        ("3B, no critic, 24 GB: only with Adam on the CPU (GRPO-Zero)", "Qwen2.5-3B", "A10G", alone),
    ]
    lines = []
    for told, model, fleet, changes in cases:
        planned, _ = episodes_on(model, fleet, **changes)
        least = plan.peak_bytes(planned.parts) / GIB if planned.seconds else sum(planned.parts["always"].values()) / GIB
        says = "fits" if planned.seconds else "does not fit"
        says += ", sharded" if planned.sharded and planned.seconds else ""
        lines.append([told, says, f"{least:.1f}" + ("" if planned.seconds else " before anything is computed")])
    return lines


# ------------------------------------------------------------------------------------------------------- runs at hand


def of_run(folder: Path, asked: str) -> Iterator[Compared]:
    """A run's seconds beside the plan's, for the lengths that it had."""
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    content = read_yaml(folder / "run_config.yaml")
    kind = StarPORun if "rollout" in content else DPORun if (folder / "pairs").is_dir() else SFTRun
    cfg = resolve(kind, folder / "run_config.yaml")
    (fleet,) = devices.fleets(asked)
    cfg = report.with_device_defaults(cfg, fleet)
    shape = Shape.of(known_models.config_of(cfg.model, folder / "run_config.yaml"), cfg.model)
    if isinstance(cfg, StarPORun):
        yield from _of_steps(folder, shape, cfg, fleet, [row for row in told if "seconds/update" in row])
        return
    logged = [row for row in told if "seconds" in row and "num_tokens" in row][1:]
    before = [row for row in told if "num_tokens" in row][: len(logged)]
    settings = rows.RowSettings.of(cfg)
    share = settings.share(fleet.count)
    steps = [now["step"] - then["step"] for now, then in zip(logged, before, strict=True)]
    tokens = [now["num_tokens"] - then["num_tokens"] for now, then in zip(logged, before, strict=True)]
    data = DataRows.of(cfg, fleet.known)._replace(tokens=sum(tokens) / sum(steps) / settings.batch)
    planned = seconds.of_rows(shape, cfg, fleet, data, min(settings.rows, share), 1)
    found = sum(row["seconds"] for row in logged) / sum(steps)
    yield Compared(f"{folder.name}: an optimizer step", "s", planned.iteration, found)


def _of_steps(
    folder: Path, shape: Shape, cfg: StarPORun, fleet: Fleet, told: list[dict[str, Any]]
) -> Iterator[Compared]:
    def middle(key: str) -> float:
        return median(row[key] for row in told)

    assumed, turns, new = Episodes.of(cfg, fleet.known), middle("rollout/turns"), middle("rollout/response_tokens")
    prompt = middle("rollout/context_tokens") - turns * new - (turns - 1) * assumed.reply
    kept = middle("rollout/kept_groups") / cfg.rollout.groups
    work = assumed._replace(turns=turns, new=new, prompt=max(1.0, prompt), kept=kept)
    place = episodes.Place(1 << 40, report.HELD, cuda=fleet.device.cuda, processes=fleet.count)
    planned = episodes.choose(shape, cfg, place)
    found = seconds.of_episodes(shape, cfg, fleet, work, planned, 1)
    for part in ("rollout", "update"):
        yield Compared(f"{folder.name}: {part} of a step", "s", found.parts[part], middle(f"seconds/{part}"))
    memory = max(row["memory"] for row in told if "memory" in row)
    yield Compared(f"{folder.name}: memory", "GiB", planned.peak / GIB, memory)


def main() -> None:
    parser = _measure.parser(__doc__, repeats=False)
    parser.add_argument("what", nargs="?", choices=["results", "published", "runs"], default="results")
    parser.add_argument("folders", nargs="*", type=Path, help="runs: output folders")
    parser.add_argument("--device", default="cpu", help="runs: where they ran, as --plan takes it: cpu, 2xcpu, A10G")
    given = parser.parse_args()
    if given.what == "runs" and not given.folders:
        parser.error("runs: name at least one output folder")
    _measure.threads()
    match given.what:
        case "results":
            found, head = [*of_results(), *of_gpu()], "measured"
        case "published":
            found, head = list(of_published()), "published"
        case _:
            found, head = [each for folder in given.folders for each in of_run(folder, given.device)], "measured"
    text = table(found, head)
    if given.what == "runs" and "cpu" in given.device:
        limits = devices.probed()
        text += f"\n\nLimits: {limits.bandwidth:.1f} GB/s, {limits.peak:.3f} and {limits.single:.3f} TFLOP/s (bfloat16,"
        text += f" float32), {limits.operation * 1e6:.1f} microseconds an operation."
    results: dict[str, Any] = {"rows": [each._asdict() for each in found]}
    if given.what == "published":
        fits = verdicts()
        results["verdicts"] = fits
        text += "\n\n" + _measure.table(["what was said", "the plan says", "GiB a device"], fits)
    _measure.publish(_measure.surroundings() | results, text, given.json)


if __name__ == "__main__":
    main()
