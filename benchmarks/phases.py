"""How fast and how lean are phases 1 and 2 beside TRL as it comes, on the same rows and with the same loss?

Ours is the script of the phase itself, with its quickstart config (on a GPU: its reference config). Beside it stand
`SFTTrainer` and `DPOTrainer` with the defaults of their configs, and once more without gradient checkpointing.
    python benchmarks/phases.py [--phase dpo] [--size 40m] [--vocabulary 1024 32000] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import yaml
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

from posttrain.models import layers_are_compiled
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.plan.known_models import PUBLISHED
from posttrain.types import derive_seed

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PHASES = {"sft": ("train_phase1_sft", "phase1_sft.yaml"), "dpo": ("train_phase2_dpo", "phase2_dpo.yaml")}
COLUMNS = {"sft": ("messages",), "dpo": ("chosen", "rejected")}
CONTESTANTS = {"ours": "ours", "trl": "TRL", "trl_keeps": "TRL -gc"}  # the last keeps its activations
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4),
    "40m": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8),
}
PAD, END, UNKNOWN = "<|endoftext|>", "<|im_end|>", "<unk>"
WORDS = [PAD, "<|im_start|>", END, UNKNOWN, "system", "user", "assistant"]  # made-up ones follow
LONGEST = 1024  # tokens of a row: TRL's own max_length, so that neither side cuts anything
WARM = 3  # optimizer steps that `steady` leaves out
FRAME = 3  # tokens around a message: <|im_start|>, its role, <|im_end|>


def make_model(folder: Path, size: str, vocabulary: int) -> None:
    """A model of random numbers, and a tokenizer of whole words: both sides make the same tokens of a text.

    The numbers are large, so that each token has a log-prob of its own: a wrong mask shows in the loss.
    """
    save_tokenizer(folder, vocabulary)
    torch.manual_seed(0)
    common: dict[str, Any] = dict(vocab_size=vocabulary, tie_word_embeddings=True, initializer_range=0.06)
    if size == "convgpt":  # in all else as published
        ids: dict[str, Any] = dict(pad_token_id=0, bos_token_id=None, eos_token_id=WORDS.index(END))
        ConvGPTForCausalLM(ConvGPTConfig(**common, **ids)).save_pretrained(folder)
    elif size == "qwen2.5-0.5b":
        shape = PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"][1] | common
        Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**common, **SHAPES[size])).save_pretrained(folder)


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Each of the words w7, w8, ... is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from posttrain.models.chat import Chat

    words = {word: n for n, word in enumerate([*WORDS, *(f"w{n}" for n in range(len(WORDS), vocabulary))])}
    backend = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
    Chat.load(tokenizer, None).save(folder)


def make_rows(file: Path, phase: str, count: int, vocabulary: int) -> None:
    """Conversations, or pairs of answers, with lengths as skewed as those of chats.

    Every text has a log-normal length. Half of the tokens of the conversations are in a quarter of the rows.
    """

    def turn(rng: random.Random, role: str, middle: float, sigma: float) -> dict[str, str]:
        words = min(400, max(4, round(rng.lognormvariate(math.log(middle), sigma))))
        return {"role": role, "content": " ".join(f"w{rng.randrange(len(WORDS), vocabulary)}" for _ in range(words))}

    rows: list[dict[str, Any]] = []
    for number in range(count):
        rng = random.Random(derive_seed("phases", phase, number))
        if phase == "sft":
            messages: list[dict[str, str]] = []
            for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
                more = [turn(rng, "user", 30, 0.9), turn(rng, "assistant", 80, 0.9)]
                if tokens_of([*messages, *more]) > LONGEST:
                    break
                messages += more
            rows.append({"messages": messages})
        else:
            asked, middle = turn(rng, "user", 60, 1.0), rng.lognormvariate(math.log(130), 0.7)
            chosen, rejected = ([asked, turn(rng, "assistant", middle, 0.3)] for _ in range(2))
            rows.append({"chosen": chosen, "rejected": rejected, "score_chosen": 8.0, "score_rejected": 4.0})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def tokens_of(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"].split()) + FRAME for message in messages)


def lengths_of(phase: str, file: Path) -> list[int]:
    """The tokens of each conversation, or of each answer of a pair with its prompt."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [tokens_of(row[side]) for row in rows for side in COLUMNS[phase]]


def settings_of(phase: str, folder: Path, given: Any) -> dict[str, Any]:
    """The config of the phase, on these rows: weights that stay, no evaluation, no checkpoint, TRL's default loss."""
    file = CONFIGS / ("" if given.device == "cuda" else "quickstart") / PHASES[phase][1]
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    source = {"kind": {"sft": "capybara", "dpo": "ultrafeedback"}[phase], "path": str(folder / f"{phase}.jsonl")}
    settings["data"] = {
        "sources": [source],
        "max_length": max(LONGEST, settings["data"]["max_length"]),
        "eval_fraction": 1e-9,
        "decontaminate": False,
    }
    settings["trainer"] |= {"learning_rate": 1e-9, "weight_decay": 0.0, "eval_strategy": "no", "save_strategy": "no"}
    settings["trainer"] |= {} if given.epochs is None else {"num_train_epochs": given.epochs}
    if phase == "dpo":
        settings["trainer"] |= {"loss_type": ["sigmoid"], "loss_weights": [1.0], "beta": 0.1}
    place = {"output_dir": tempfile.mkdtemp(dir=folder) + "/run", "device": given.device, "report_to": "none"}
    return settings | place | {"model": {"name_or_path": str(folder)}}


def planned(
    phase: str, settings: dict[str, Any], trainer: Any, figures: dict[str, Any], count: int
) -> dict[str, float]:
    """The plan's tokens a second of an update, and its seconds of the training, in the batches that were chosen."""
    from posttrain.config.dpo import DPORun
    from posttrain.config.sft import SFTRun
    from posttrain.plan import seconds
    from posttrain.plan.work import DataRows
    from posttrain.runtime import hardware

    args = trainer.args
    cfg: Any = hardware.settle({"sft": SFTRun, "dpo": DPORun}[phase].model_validate(settings))
    rows, chosen = args.per_device_train_batch_size, {"bf16": args.bf16}
    chosen |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": args.gradient_accumulation_steps}
    cfg = hardware.with_trainer(cfg, gradient_checkpointing=args.gradient_checkpointing, **chosen)
    data = DataRows.of(cfg, {"rows": count, "tokens": figures["tokens"] / count})
    data = data._replace(trained=figures["trained"] / figures["tokens"])
    shape, fleet = _measure.shape_of(trainer.model.config), _measure.fleet(settings["device"])
    found = seconds.of_rows(shape, cfg, fleet, data, rows, 1)
    a_step = rows * args.gradient_accumulation_steps * data.tokens
    return {"steady": a_step / found.iteration, "seconds": found.run}


def ours(phase: str, folder: Path, given: Any) -> dict[str, Any]:
    """The script of the phase from beginning to end, with a clock around its training and what is computed ahead."""
    from trl.trainer.dpo_trainer import DPOTrainer

    from posttrain.finetune import training

    fit, precompute = training.fit, DPOTrainer._precompute_ref_logps
    figures: dict[str, Any] = {}
    ahead = 0.0

    def timed(*args: Any) -> Any:
        nonlocal ahead
        start = time.perf_counter()
        rows = precompute(*args)
        ahead += time.perf_counter() - start
        return rows

    def watched(trainer: Any, *args: Any, **more: Any) -> training.Outcome:
        figures.update(measure(trainer, lambda: fit(trainer, *args, **more), ahead))
        figures["compiled"] = layers_are_compiled(trainer.model)
        figures["planned"] = planned(phase, settings, trainer, figures, len(trainer.train_dataset))
        return training.Outcome({})

    settings = settings_of(phase, folder, given)
    file = Path(settings["output_dir"]).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with patch.object(training, "fit", watched), patch.object(DPOTrainer, "_precompute_ref_logps", timed):
        importlib.import_module(PHASES[phase][0]).main(["--config", str(file)])
    return figures


def theirs(phase: str, folder: Path, given: Any, **more: Any) -> dict[str, Any]:
    """TRL's trainer, told nothing but what has to be equal, and on a CPU to compute in float32."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = [json.loads(line) for line in (folder / f"{phase}.jsonl").read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list([{name: row[name] for name in COLUMNS[phase]} for row in rows])
    settings = settings_of(phase, folder, given)
    let_trl_load_convgpt()
    trainer = settings["trainer"]
    equal = {
        "learning_rate": trainer["learning_rate"],
        "num_train_epochs": trainer["num_train_epochs"],
        "per_device_train_batch_size": trainer["per_device_train_batch_size"],
        "gradient_accumulation_steps": trainer.get("gradient_accumulation_steps", 1),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    equal |= {"use_cpu": True, "bf16": False} if given.device == "cpu" else {}
    if phase == "sft":
        args = SFTConfig(settings["output_dir"], assistant_only_loss=True, **equal, **more)
        made: Any = SFTTrainer(str(folder), args=args, train_dataset=data)
    else:
        made = DPOTrainer(str(folder), args=DPOConfig(settings["output_dir"], **equal, **more), train_dataset=data)
    return measure(made, made.train)


def let_trl_load_convgpt() -> None:
    """TRL reads `auto_map` of a model that transformers does not have, and transformers searches in it."""
    setattr(ConvGPTConfig, "auto_map", {})  # noqa: B010


def measure(trainer: Any, train: Callable[[], object], ahead: float = 0.0) -> dict[str, Any]:
    """The loss of all rows under the first weights; then seconds and memory of the training, what is ahead included."""
    start, end = 0.0, 0.0
    steps: list[tuple[float, int]] = []  # when each ended, and the tokens up to then

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal start
            start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.device.type == "cuda":
                torch.cuda.synchronize()
            steps.append((time.perf_counter(), int(trainer._total_train_tokens)))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal end
            if args.device.type == "cuda":
                torch.cuda.synchronize()
            end = time.perf_counter()

    first = first_loss(trainer)
    trainer.add_callback(Clock())
    train()
    done: dict[str, Any] = {"epochs": trainer.state.epoch, "updates": trainer.state.global_step}
    with trainer.accelerator.autocast():
        half = torch.is_autocast_enabled(kind := trainer.args.device.type)
        computed = torch.get_autocast_dtype(kind) if half else trainer.model.dtype
    done["precision"] = f"{computed} over {trainer.model.dtype}".replace("torch.", "")
    done["peak"] = _measure.peak(trainer.args.device.type)
    if len(steps) > WARM:  # the first steps load kernels and find their memory
        (since, before), (until, after) = steps[WARM - 1], steps[-1]
        done["steady"] = (after - before) / (until - since)
    return first | done | {"seconds": ahead + end - start, "ahead": ahead}


def first_loss(trainer: Any) -> dict[str, float]:
    """By the trainer's own batches and loss: its mean over all trained tokens, or all pairs, and the tokens in them."""
    told = trainer._metrics["train"]
    sums: dict[str, float] = {}
    weight, trained, before = 0, 0, trainer._total_train_tokens
    trainer.model.train()
    for inputs in trainer.get_train_dataloader():
        with torch.no_grad(), trainer.accelerator.autocast():
            figures = {"loss": trainer.compute_loss(trainer.model, inputs).item()}
        if "labels" in inputs:
            count = int((inputs["labels"][:, 1:] != -100).sum())
            trained += count
        else:
            count = len(inputs["input_ids"]) // 2
            trained += int(inputs["completion_mask"][:, 1:].sum())
            figures |= {f"logps/{side}": float(told[f"logps/{side}"][-1]) for side in ("chosen", "rejected")}
        for name, value in figures.items():
            sums[name] = sums.get(name, 0.0) + value * count
        weight += count
    told.clear()
    means = {name: total / weight for name, total in sums.items()}
    return {**means, "tokens": int(trainer._total_train_tokens - before), "trained": trained}


def require_equal_work(phase: str, found: dict[str, dict[str, Any]], device: str) -> None:
    """All read the same tokens, trained the same ones and began with the same loss, or the benchmark ends here.

    The loss of DPO begins as ln 2 whatever the model thinks, so its log-probs are compared as well.
    """
    near, far = (1e-5, 1e-3) if device == "cpu" else (1e-3, 1e-2)  # bfloat16 rounds
    first = found["ours"]
    for name, other in found.items():
        if other["precision"] != first["precision"]:
            sys.exit(f"{phase}: ours computes in {first['precision']}, {name} in {other['precision']}: not equal work.")
        wrong = [key for key in ("tokens", "trained", "epochs") if other[key] != first[key]]
        for key in ("loss",) if phase == "sft" else ("logps/chosen", "logps/rejected"):
            wrong += [key] if abs(other[key] - first[key]) > near * abs(first[key]) else []
        for key in wrong:
            sys.exit(f"{phase}: {key} is {first[key]:.8g} with ours and {other[key]:.8g} with {name}: not equal work.")
        if phase == "dpo" and abs(other["loss"] - math.log(2)) > far:
            sys.exit(
                f"dpo: the first loss of {name} is {other['loss']:.6f} and not ln 2: its reference is another model."
            )


def figures_of(name: str, phase: str, folder: Path, given: Any) -> dict[str, Any]:
    """One contestant, in this process."""
    if name == "ours":
        return ours(phase, folder, given)
    return theirs(phase, folder, given, **({"gradient_checkpointing": False} if name == "trl_keeps" else {}))


def contestant(name: str, phase: str, folder: Path, given: Any) -> dict[str, Any]:
    """One contestant, in a process of its own."""
    options = ["--only", name, "--phase", phase, "--folder", str(folder), "--device", given.device]
    return _measure.alone(__file__, [*options, *([] if given.epochs is None else ["--epochs", str(given.epochs)])])


def mfu(row: dict[str, Any], name: str, each: dict[str, Any], peak: float) -> float:
    """The share of the peak: three passes over each row, and in DPO one of the reference; recomputation is not counted.

    Ours asks the reference once, ahead of the steady updates; TRL asks it in each update.
    """
    again = row["phase"] == "dpo" and name != "ours"
    if "steady" in each:
        passes, seconds = 3 + again, row["tokens"] / each["steady"]
    else:
        passes, seconds = (3 + again) * row["epochs"] + (row["phase"] == "dpo" and not again), each["seconds"]
    return passes * row["forward_flops"] / seconds / peak


def beside_limits(results: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """MFU of each contestant, and the plan's rate of ours."""
    shares = [median(mfu(row, name, each, results["TFLOP_s"] * 1e12) for each in row[name]) for name in CONTESTANTS]
    if all("steady" in each for each in row["ours"]):
        expected, rate = row["ours"][0]["planned"]["steady"], median(each["steady"] for each in row["ours"])
    else:
        tokens = row["epochs"] * row["tokens"]
        expected = tokens / row["ours"][0]["planned"]["seconds"]
        rate = tokens / median(each["seconds"] for each in row["ours"])
    return [*(f"{share:.1%}" for share in shares), f"{expected:,.0f}", f"{expected / rate:.2f}"]


def markdown(results: dict[str, Any]) -> str:
    cells, sizes = [], {}
    steady = all("steady" in each for row in results["rows"] for name in CONTESTANTS for each in row[name])
    limited = all("forward_flops" in row for row in results["rows"])
    for row in results["rows"]:
        seconds = {name: [each["seconds"] for each in row[name]] for name in CONTESTANTS}
        speeds = [f"{row['epochs'] * row['tokens'] / median(times):,.0f}" for times in seconds.values()]
        ratios = [_measure.ratio(seconds[name], seconds["ours"]) for name in ("trl", "trl_keeps")]
        ahead = f"{median(each['ahead'] for each in row['ours']) / median(seconds['ours']):.0%}"
        peaks = [f"{median(each['peak'] for each in row[name]):.2f}" for name in CONTESTANTS]
        cells.append([row["phase"], str(row["vocabulary"]), *speeds, *ratios, ahead, *peaks])
        if steady:
            rates = [[each["steady"] for each in row[name]] for name in CONTESTANTS]
            cells[-1] += [f"{median(each):,.0f}" for each in rates]
            cells[-1] += [_measure.ratio(rates[0], each) for each in rates[1:]]
        cells[-1] += beside_limits(results, row) if limited else []
        sizes[row["phase"]] = (
            f"{row['phase']} {row['tokens']:,} tokens in {results['count']} rows, {row['trained']:,} of them trained, "
            f"{row['epochs']:g} epoch(s)"
        )
    speeds, peaks = ([f"{told} {unit}" for told in CONTESTANTS.values()] for unit in ("tok/s", "GiB"))
    header = ["phase", "vocabulary", *speeds, "ours vs TRL", "ours vs TRL -gc", "ahead", *peaks]
    if steady:
        header += [f"{told} tok/s, steady" for told in CONTESTANTS.values()] + ["steady vs TRL", "steady vs TRL -gc"]
    if limited:
        header += [f"{told} MFU" for told in CONTESTANTS.values()] + ["planned tok/s", "measured / planned, s"]
    size = f"{results['size']}; {'; '.join(sizes.values())}. Medians of {results['repeats']} processes each."
    return f"{_measure.told(results)}\n{size}\n\n{_measure.table(header, cells)}"


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--phase", choices=PHASES, nargs="+", default=list(PHASES))
    parser.add_argument("--size", choices=[*SHAPES, "convgpt", "qwen2.5-0.5b"], default="tiny")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rows", type=int, default=64, help="conversations, and pairs of answers")
    parser.add_argument("--epochs", type=float, help="epochs over the rows; unless given, those of the config")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", choices=CONTESTANTS, help="one contestant alone, figures as JSON")
    parser.add_argument("--folder", type=Path, help="with --only: where model and rows lie")
    given = parser.parse_args()
    _measure.threads()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if given.only:
        print(json.dumps(figures_of(given.only, given.phase[0], given.folder, given)))
        return

    rows = []
    for vocabulary in given.vocabulary:
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = Path(name_of_folder)
            make_model(folder, given.size, vocabulary)
            for phase in given.phase:
                make_rows(folder / f"{phase}.jsonl", phase, given.rows, vocabulary)
                found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
                for repeat in range(given.repeats):
                    for name in sorted(found, reverse=repeat % 2 == 1):
                        found[name].append(contestant(name, phase, folder, given))
                first = {name: each[0] for name, each in found.items()}
                require_equal_work(phase, first, given.device)
                same = {figure: first["ours"][figure] for figure in ("tokens", "trained", "epochs", "loss")}
                shape = _measure.shape_of(AutoConfig.from_pretrained(folder))
                lengths = lengths_of(phase, folder / f"{phase}.jsonl")
                same["forward_flops"] = _measure.forward_flops(shape, lengths, same["trained"])
                rows.append({"phase": phase, "vocabulary": vocabulary} | same | found)

    bf16 = rows[0]["ours"][0]["precision"].startswith("bfloat16")
    results = (
        _measure.surroundings(given.device)
        | _measure.limits(given.device, bf16).told
        | {
            **{key: value for key, value in vars(given).items() if key not in ("json", "only", "folder", "rows")},
            "count": given.rows,
            "rows": rows,
        }
    )
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
