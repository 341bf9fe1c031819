"""What do phases 1 and 2 put around TRL's trainers?  Arguments, progress, sealed checkpoints, an orderly stop.

TRL trains; what is here lets a person watch it, lets a killed run go on where it was, and keeps every file checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
import torch.distributed as dist
import yaml
from datasets import Dataset
from torch.nn import functional
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, get_scheduler
from transformers.modeling_outputs import BaseModelOutputWithPast

from posttrain import checkpoint, files, model_card, models, parallel, runlog
from posttrain.chat import Chat
from posttrain.config import TrainingRun
from posttrain.config.yaml_file import parse_yaml
from posttrain.convgpt import pads_on_the_right
from posttrain.metrics import wilson
from posttrain.types import UserError, derive_seed

SOURCES = "sources.json"  # beside the prepared rows: what the model card says of each data set
TOLD = ("path", "kind", "licence", "train", "held_out")
COUNTS = "counts.json"  # in each checkpoint: what TRL counts and does not save
SHOWN = ("eval_loss", "eval_mean_token_accuracy", "eval_rewards/accuracies", "eval_rewards/margins")
FREE_TO_CHANGE = ("output_dir", "run_name", "report_to", "hardware")  # what a resumed run may have otherwise


def arguments(kind: Callable[..., Any], cfg: Any, device: torch.device, **fixed: Any) -> Any:
    """TRL's SFTConfig or DPOConfig: the config's `trainer` section over what the device calls for, `fixed` over all.

    Activations are recomputed only where memory is scarce: TRL does so everywhere, and on a CPU it only costs time.
    bfloat16, which TRL switches on everywhere as well, is as `models.settle` has put it into the config. The first
    step is logged, and `Reporter` logs the last one: a run on little data may be shorter than `logging_steps`.
    """
    defaults = {
        "gradient_checkpointing": device.type == "cuda",
        "dataloader_pin_memory": device.type == "cuda",
        "save_total_limit": 2,
        "logging_first_step": True,
        "ddp_find_unused_parameters": False,
    }
    fixed = {
        "output_dir": str(cfg.output_dir),
        "seed": cfg.seed,
        "use_cpu": device.type == "cpu",
        "report_to": "none",  # our own Reporter writes the numbers, once, for all trackers
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would show a loss of 0 where there is none
        "max_length": cfg.data.max_length,
        **fixed,
    }
    cfg = models.settle(cfg)
    parallel.start(device, cfg.trainer.get("ddp_timeout", parallel.TIMEOUT))  # or accelerate would, without device_id
    # TRL itself uses this name, which transformers is about to change.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    with refusals_in_words():
        args = kind(**{**defaults, **cfg.trainer, **fixed})
        _check_scheduler(args)
        _check_optimizer(args)
        _check_best(args)
    check_packing(args, device, cfg.model.attn_implementation)
    return args


def check_packing(args: Any, device: torch.device, attention: str) -> None:
    """UserError for packed rows whose conversations could see each other, or whose mask is as large as T x T.

    sdpa and eager keep packed conversations apart by one mask over the whole batch, which TRL makes a single row of T
    tokens: flash kernels take no mask, so attention costs T^2 in time and memory. On a CPU that is left to the user.
    """
    packs = [name for name in ("packing", "eval_packing") if getattr(args, name, None)]
    if not packs:
        return
    key = f"trainer.{packs[0]}=true"
    instead = "trainer.packing=false trainer.train_sampling_strategy=group_by_length"
    wrapped = "trainer.packing_strategy=wrapped" if args.packing_strategy == "wrapped" else "trainer.packing=false"
    if args.packing_strategy == "wrapped" or not args.packing:
        raise UserError(
            f"{key} with {wrapped} lets a conversation see the one before it in the same row. Leave both out, or write "
            f"{instead}: batches of conversations of similar length."
        )
    if device.type != "cpu" and attention in ("sdpa", "eager"):
        rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size if args.eval_packing else 1)
        tokens = rows * args.max_length
        raise UserError(
            f"{key} with model.attn_implementation={attention} computes attention under a mask of {tokens} x {tokens} "
            f"tokens, many times slower than without a mask. Write {instead}: batches of conversations of similar "
            "length hardly need padding and no mask. Packed rows need an attention kernel that takes sequences of "
            "different length: model.attn_implementation=flash_attention_2, with flash-attn installed."
        )


def _check_scheduler(args: Any) -> None:
    """Some schedulers need settings of their own, and say so only when training begins."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    own = args.lr_scheduler_kwargs or {}
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=own)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_type {args.lr_scheduler_type} cannot be set up with lr_scheduler_kwargs {own} ({error})"
        ) from error


def _check_optimizer(args: Any) -> None:
    """Missing packages and settings that an optimizer does not take show only when it is made, after the data work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    if kind.__module__.startswith("torch."):
        kind([torch.nn.Parameter(torch.zeros(1))], **settings)


def _check_best(args: Any) -> None:
    """A figure that is not there is looked for after the first evaluation, whose run it would end."""
    known = [name.removeprefix("eval_") for name in SHOWN]
    best = args.metric_for_best_model
    if best is not None and best.removeprefix("eval_") not in known:
        raise ValueError(f"metric_for_best_model is {best}; an evaluation has {', '.join(known)}")


@contextmanager
def refusals_in_words() -> Iterator[None]:
    """What TRL and peft refuse while they are set up is the user's to fix."""
    try:
        yield
    except (ValueError, ImportError, NotImplementedError) as error:
        text = " ".join(str(error).split())[:500]
        raise UserError(f"These settings (trainer, model) cannot be used together: {text}") from error


def score_trained_positions_only() -> None:
    """Let TRL project onto the vocabulary only the positions that have a label, on a CPU as it does on a GPU.

    Prompts and padding are most of a batch of short dialogues. The loss is the same (a test compares), a step of a
    tiny model takes two thirds of the time. TRL asks this private function about nothing else.
    """
    from trl.trainer import utils

    assert hasattr(utils, "_use_triton"), "this TRL decides elsewhere which positions are scored"
    utils._use_triton = lambda device: True  # pyright: ignore[reportPrivateImportUsage]


def show_reference_progress() -> None:
    """Let TRL show how far the reference's log-probs are as these scripts show everything, without a terminal in lines.

    Its own bar is redrawn into a log file many times a second, and knows no other switch than to be silent.
    """
    from trl.trainer import dpo_trainer

    def shown(iterable: Any, desc: str, disable: bool = False) -> Iterator[Any]:
        with runlog.Progress(total=len(iterable), title=desc) as progress:
            for done, batch in enumerate(iterable, 1):
                yield batch
                progress.update(done)

    assert hasattr(dpo_trainer, "tqdm"), "this TRL shows the reference's progress in another way"
    dpo_trainer.tqdm = shown  # pyright: ignore[reportPrivateImportUsage]


def read_in_slices(net: Any) -> None:
    """Let the decoder read the rows of a padded batch in slices of similar length, each cut to its own end.

    Where rows differ in length, half of a batch and more is padding, and a CPU computes it like everything else. In a
    slice no row is shorter than three quarters of the longest: hardly any padding, and few slices where rows are alike.
    Loss and gradients are the same (a test compares): no row sees another one, whatever batch it is read in.
    """
    decoder = net.base_model
    whole = decoder.forward

    def forward(*given: Any, **named: Any) -> Any:
        if given or named.keys() != {"input_ids", "attention_mask", "use_cache"} or named["use_cache"]:
            return whole(*given, **named)  # packed rows, or somebody who generates
        ids_BT, mask_BT = named["input_ids"], named["attention_mask"]
        assert (mask_BT[:, 1:] <= mask_BT[:, :-1]).all(), "padding is on the right"
        lengths, order = mask_BT.sum(1).sort(descending=True)
        hidden, start = [], 0
        while start < len(order):
            longest = int(lengths[start])
            stop = int((lengths >= 0.75 * longest).sum())
            rows = order[start:stop]
            read = whole(input_ids=ids_BT[rows, :longest], attention_mask=mask_BT[rows, :longest], use_cache=False)
            hidden.append(functional.pad(read.last_hidden_state, (0, 0, 0, ids_BT.shape[1] - longest)))
            start = stop
        return BaseModelOutputWithPast(last_hidden_state=torch.cat(hidden)[order.argsort()])

    decoder.forward = forward


def read_without_padding_masks(net: Any) -> None:
    """Let the decoder read a batch that is padded on the right without an attention mask.

    A token attends to itself and to what stands before it, so no real token sees padding behind it, and what is
    computed for the padding has no label. Loss and gradients are the same (a test compares). transformers would make a
    mask of rows x T x T from the padding; without one, sdpa takes its flash kernels and shares the keys and values of
    grouped queries. TRL's trainers count tokens by the attention mask, so it is dropped only here.
    """
    if not getattr(net.config.get_text_config(), "is_causal", True):
        return
    decoder = net.base_model
    whole = decoder.forward

    def forward(*given: Any, **named: Any) -> Any:
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        generates = named.get("use_cache", True) or named.get("past_key_values") is not None
        if not (given or generates or ids is None) and pads_on_the_right(mask, ids.shape[1]):
            named["attention_mask"] = None
        return whole(*given, **named)

    decoder.forward = forward


def in_length_pools(rows: Dataset, batch_size: int, seed: int, pool: int = 8) -> Dataset:
    """The rows in an order whose consecutive batches hold rows of similar length, for a sampler that keeps the order.

    Random rows, `pool` batches of them, sorted by length and cut into batches; then all batches shuffled. Short and
    long rows differ by ten times in mixed data, so random batches are half padding. transformers' own grouping sorts
    50 batches at a time, and batches that are all of one kind of row taught a small model less.
    """
    draw = random.Random(derive_seed(seed, "length pools"))
    lengths = _lengths(rows)
    order = draw.sample(range(len(rows)), len(rows))
    batches = []
    for start in range(0, len(order), batch_size * pool):
        similar = sorted(order[start : start + batch_size * pool], key=lambda row: lengths[row])
        batches += [similar[at : at + batch_size] for at in range(0, len(similar), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    draw.shuffle(full)
    rest = [row for batch in batches if len(batch) < batch_size for row in batch]
    return rows.select([row for batch in full for row in batch] + rest)


def _lengths(rows: Dataset) -> list[int]:
    """Tokens of each conversation, or of the longer half of each pair."""
    if "input_ids" in rows.column_names:
        return [len(ids) for ids in rows["input_ids"]]
    columns = (rows[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return [len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in zip(*columns, strict=True)]


def prepared(
    folder: Path, cfg: Any, chat: Chat, args: Any, load: Callable[..., Any], *, resume: bool
) -> dict[str, Dataset]:
    """The rows that `load(cfg.data, chat)` makes, {"train": ..., "eval": ...} without what is empty, kept in `folder`.

    A resumed run takes them from there, unless a checksum or the settings they were made with differ: a source may be
    large, and far away. TRL keeps beside them what it computes from them, reference log-probs above all, which
    `seal_prepared` adds to the checksums. Every process calls this; `load` shares the sources out.

    args: a SFTConfig or DPOConfig, whose `group_by_length` becomes the order of the rows (`in_length_pools`).
    """
    grouped = args.train_sampling_strategy == "group_by_length"
    if grouped:
        args.train_sampling_strategy = "sequential"
    made_with = _made_with(cfg, chat)
    found = resume and runlog.is_main_process() and _still_whole(folder, made_with)
    if not parallel.gather([found])[0]:
        loaded = load(cfg.data, chat)
        if runlog.is_main_process():
            batch_size = args.per_device_train_batch_size * args.world_size
            pool = 8 if args.device.type == "cpu" else 32  # on a CPU `read_in_slices` cuts what padding is left
            train = in_length_pools(loaded.train, batch_size, cfg.seed, pool) if grouped else loaded.train
            rows = {"train": train, "eval": loaded.eval}
            sources = [{key: getattr(one, key) for key in TOLD} for one in loaded.table.sources]
            checkpoint.save(folder, lambda out: _write_rows(rows, sources, out), made_with=made_with)
        barrier()
    parts = {part.name: Dataset.load_from_disk(str(part)) for part in sorted(folder.iterdir()) if part.is_dir()}
    if "eval" not in parts:  # of less than ten rows none is held out
        args.eval_strategy = "no"
    return parts


def seal_prepared(folder: Path, cfg: Any, chat: Chat) -> None:
    """Add to the checksums what has been computed from the rows since `prepared` wrote them."""
    barrier()
    if runlog.is_main_process():
        with checkpoint.full_disk_in_words(folder):
            checkpoint.seal(folder, made_with=_made_with(cfg, chat))


def _write_rows(rows: dict[str, Dataset], sources: list[dict[str, Any]], folder: Path) -> None:
    (folder / SOURCES).write_text(json.dumps(sources), encoding="utf-8")
    shown = not datasets.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    try:
        for name, part in rows.items():
            if len(part):
                part.save_to_disk(folder / name)
    finally:
        if shown:
            datasets.enable_progress_bars()


def _still_whole(folder: Path, made_with: str) -> bool:
    """True where every byte is as it was written, for these settings. Files that no checksum covers are removed."""
    if not folder.exists():
        return False
    try:
        listed = checkpoint.read_manifest(folder)
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in listed["files"] and name != checkpoint.MANIFEST:
                path.unlink()
        whole = checkpoint.verify(folder)["meta"].get("made_with") == made_with
        problem = "" if whole else f"{folder} was made with other settings."
    except UserError as error:
        problem = str(error)
    print(f"{problem} The rows are prepared again." if problem else f"Rows as prepared before: {folder}.")
    return not problem


def _made_with(cfg: Any, chat: Chat) -> str:
    """sha256 of all that decides which rows there are, and in which order."""
    settings = {key: value for key, value in cfg.model_dump(mode="json").items() if key not in FREE_TO_CHANGE}
    facts = [settings, chat.hash, os.environ.get("WORLD_SIZE", "1")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class NotFinite(UserError):
    """A loss, a gradient or a weight is inf or nan in optimizer step `step`; so were the weights after `updates`."""

    def __init__(self, step: int, what: str, updates: int) -> None:
        super().__init__(
            f"The run stopped at step {step}: {what} is not a finite number. Lower trainer.learning_rate, look at the "
            "rows of this step, or compute in float32 (trainer.bf16=false, trainer.fp16=false)."
        )
        self.updates = updates


class Outcome(NamedTuple):
    """What training came to: the figures of the held-out rows, and why it ended early, if it did."""

    figures: dict[str, float]
    failure: UserError | None = None


def fit(
    trainer: Trainer, title: str, cfg: Any, *, resume: bool, check_first: Callable[[dict[str, Any]], None] | None = None
) -> Outcome:
    """Train to the end and measure the held-out rows; a signal ends the process here, with a checkpoint.

    `check_first(figures)` sees the very first step of a run and may raise. A loss, gradient or weight that is not
    finite ends training: the outcome is then that of the last healthy checkpoint, or a UserError where there is none.
    """
    output_dir = Path(cfg.output_dir)
    counter: Any = trainer  # TRL's trainers count tokens in a private attribute, and forget it
    settings = cfg.model_dump(mode="json")
    say = print if runlog.is_main_process() else lambda _: None
    newest = checkpoint.latest_good(output_dir, say=say) if resume else None
    if resume:
        say(f"Resuming from {newest}." if newest else "No whole checkpoint yet: starting from the beginning.")
    if runlog.is_main_process():
        remember_run(output_dir, settings, resume)
    name = cfg.run_name or output_dir.name
    tracker = runlog.start_tracker(cfg.report_to, project="posttrain", run_name=name, config=settings)
    models.adapters_in_float32(trainer.model)
    say(f"{title}: {describe(cfg, trainer.model, trainer.args.device)}")
    with runlog.StopSignals() as stop, models.no_bars():
        reporter = Reporter(title, output_dir, tracker, stop, lambda: counter._total_train_tokens, check_first)
        trainer.remove_callback(PrinterCallback)
        trainer.create_model_card = lambda *_, **__: None  # TRL's, with every checkpoint: ours is written into final/
        trainer.add_callback(reporter)
        try:
            if newest is not None and _is_last(newest):
                _take_up_finished(trainer, newest, reporter)
            else:
                if newest is not None:
                    remedy = f"Remove {newest}: --resume then takes an older checkpoint."
                    counter._total_train_tokens = files.read_json(newest / COUNTS, remedy)["num_tokens"]
                _watch_gradients(trainer, reporter)
                with checkpoint.full_disk_in_words(output_dir):
                    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            if reporter.stopped:
                say(f"Stopped after step {trainer.state.global_step}. Go on with the same command and --resume.")
                stop.leave()
            with stop.at_once("the closing evaluation"):
                return Outcome(_held_out_figures(trainer))
        except NotFinite as problem:
            tracker.alert(f"{title}: not finite", str(problem))
            trainer.remove_callback(reporter)  # its file tells of the steps in order
            return _last_healthy(trainer, output_dir, problem)
        finally:
            reporter.close()


def _watch_gradients(trainer: Trainer, reporter: Reporter) -> None:
    """Let the reporter see the gradient norm of every step, which transformers shows to its log only.

    accelerate is asked for it exactly once a step, whether gradients are clipped or not.
    """
    clip = trainer.accelerator.clip_grad_norm_

    def clip_grad_norm_(*given: Any, **named: Any) -> Any:
        norm = clip(*given, **named)
        reporter.grad_norm = None if norm is None else float(norm)
        return norm

    trainer.accelerator.clip_grad_norm_ = clip_grad_norm_


def _last_healthy(trainer: Trainer, output_dir: Path, problem: NotFinite) -> Outcome:
    """Put the newest checkpoint in place that comes before the broken weights and is finite on the held-out rows."""
    named = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    for folder in sorted(named, key=_step_of, reverse=True):
        if _step_of(folder) >= problem.updates:
            continue
        try:
            checkpoint.verify(folder)
        except UserError:  # damaged
            continue
        trainer._load_from_checkpoint(str(folder))
        trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        figures = trainer.evaluate() if trainer.eval_dataset is not None else {}
        if math.isfinite(figures.get("eval_loss", 0.0)):
            handed = f"{output_dir / 'final'} was made from {folder.name}, the last healthy checkpoint."
            return Outcome(figures, UserError(f"{problem} {handed}"))
    raise UserError(f"{problem} There is no healthy checkpoint before it, so nothing is saved.") from problem


def _step_of(folder: Path) -> int:
    """checkpoint-20 -> 20"""
    return int(folder.name.rpartition("-")[2])


def _is_last(folder: Path) -> bool:
    """True for the checkpoint of a run's last step."""
    state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    return state.global_step >= state.max_steps


def _take_up_finished(trainer: Trainer, folder: Path, reporter: Reporter) -> None:
    """Weights and figures of a run that was killed after its last step: transformers would take one step more."""
    trainer._load_from_checkpoint(str(folder))
    trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    reporter.on_train_begin(trainer.args, trainer.state, trainer.control)
    told = runlog.read_metrics(reporter.output_dir / "metrics.jsonl")
    trainer.state.log_history += [row for row in told if row["step"] == trainer.state.global_step]


def _held_out_figures(trainer: Trainer) -> dict[str, float]:
    """The figures of the held-out rows after the last step, measured now unless that step has just done so."""
    if trainer.eval_dataset is None:
        return {}
    measured = [row for row in trainer.state.log_history if "eval_loss" in row]
    if measured and measured[-1]["step"] == trainer.state.global_step:
        return measured[-1]
    return trainer.evaluate()


def hand_over(
    trainer: Trainer,
    chat: Chat,
    cfg: Any,
    outcome: Outcome,
    *,
    rows: Path,
    phase: str,
    next_phase: str,
    config_file: str,
) -> None:
    """Write `<output_dir>/final` and say what to type next; UserError, after that, where training failed.

    `rows` is the folder of `prepared`.
    """
    barrier()
    if not runlog.is_main_process():
        return
    final, step, figures = Path(cfg.output_dir) / "final", trainer.state.global_step, outcome.figures
    settings = cfg.model_dump(mode="json")
    history = [*model_card.history(cfg.model.name_or_path), _record(phase, settings, step, figures, rows)]
    models.save(final, trainer.model, chat, settings, source=cfg.model, history=history, phase=phase, step=step)
    if outcome.failure is not None:
        raise outcome.failure
    shown = ", ".join(f"{name.removeprefix('eval_')} {figures[name]:.4g}" for name in SHOWN if name in figures)
    print(f"{phase} is done after {step} steps. Held-out rows: {shown or 'none'}.")
    print(f"Saved: {final}  (curves: {final.with_name('metrics.jsonl')})")
    beside = Path(config_file).with_name(f"{next_phase}.yaml")
    given = f" --config {beside}" if beside.is_file() else ""
    print(f"Next: python train_{next_phase}.py{given} model.name_or_path={final}")


def _record(phase: str, settings: dict[str, Any], step: int, figures: dict[str, float], rows: Path) -> dict[str, Any]:
    """What the model card says of this run: its sources, and its figures on the held-out rows."""
    sources = json.loads((rows / SOURCES).read_text(encoding="utf-8"))
    held_out = sum(source["held_out"] for source in sources)
    results = []
    if "eval_loss" in figures:
        results.append(model_card.Result("held-out rows: loss", figures["eval_loss"], held_out))
    if (share := figures.get("eval_rewards/accuracies")) is not None:
        low, high = wilson(round(share * held_out), held_out)
        results.append(model_card.Result("held-out pairs: the chosen answer wins", share, held_out, low, high))
    return model_card.record(phase, settings, step, data=sources, results=results)


def same_run(output_dir: Path, settings: dict[str, Any]) -> None:
    """A resumed run must be the run that was begun: UserError with every setting that differs.

    Logs that it could not be written on to are found here as well, before any work.
    """
    for log in ("metrics.jsonl", "transcripts.jsonl"):
        if (Path(output_dir) / log).exists():
            runlog.read_metrics(Path(output_dir) / log)
    begun = Path(output_dir) / checkpoint.RUN_CONFIG
    if not begun.exists():  # a new run, or one killed before its first step
        return
    before, now = _flat(_read_begun(begun)), _flat(settings)
    keys = [key for key in sorted(before | now) if key.split(".")[0] not in FREE_TO_CHANGE]
    differing = [key for key in keys if before.get(key) != now.get(key)]
    changed = [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in differing]
    if changed:
        raise UserError(
            f"--resume goes on with the run in {output_dir} exactly as it was begun, but its settings differ: "
            f"{'; '.join(changed)}. Use the old settings, or start a new run (output_dir=...)."
        )


def same_processes(output_dir: Path) -> None:
    """UserError when a run of phase 1 or 2 goes on with another number of processes: they share out each batch."""
    now = int(os.environ.get("WORLD_SIZE", "1"))
    for file in Path(output_dir).glob(f"checkpoint-*/{COUNTS}"):
        try:
            before = int(json.loads(file.read_text(encoding="utf-8"))["processes"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged, and passed over later
            continue
        if before != now:
            begun = f"torchrun --nproc_per_node {before}" if before > 1 else "python, without torchrun"
            raise UserError(
                f"The run in {output_dir} was begun on {before} process{'es' if before > 1 else ''} and would go on on "
                f"{now}: its batches would hold other rows, and as many times more or fewer. Use {begun}, or start a "
                "new run (output_dir=...)."
            )


def _read_begun(file: Path) -> dict[str, Any]:
    remedy = "If you are sure of the settings, delete this file; --resume then writes those of now into it."
    try:
        begun = parse_yaml(files.read_text(file, remedy))
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        raise UserError(f"{file}, the settings that the run was begun with, is damaged. {remedy}")
    return begun


def remember_run(output_dir: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write the settings that `same_run` compares with, unless this goes on with a run that has."""
    begun = Path(output_dir) / checkpoint.RUN_CONFIG
    if not (resume and begun.exists()):
        unnamed = begun.with_suffix(".partial")
        unnamed.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        unnamed.rename(begun)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    if not isinstance(tree, dict):
        return {path: tree}
    parts = [_flat(sub, f"{path}.{name}" if path else name) for name, sub in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


class Reporter(TrainerCallback):
    """Bar, metrics.jsonl and tracker; seals each checkpoint; turns a signal into a checkpoint and a stop.

    `check_first(row)` sees the figures of the very first step and may raise.
    """

    metrics: runlog.MetricsFile
    progress: runlog.Progress | None = None
    grad_norm: float | None = None  # of the coming optimizer step
    logged = 0  # the last step that was logged

    def __init__(
        self,
        title: str,
        output_dir: Path,
        tracker: runlog.Tracker,
        stop: runlog.StopSignals,
        tokens: Callable[[], int],
        check_first: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.title, self.output_dir, self.tracker, self.stop = title, output_dir, tracker, stop
        self.tokens, self.check_first = tokens, check_first
        self.stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.metrics = runlog.MetricsFile(self.output_dir / "metrics.jsonl", after_step=state.global_step or None)
        self.progress = runlog.Progress(state.max_steps, self.title, start=state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # float16 scales its loss until gradients fit, and leaves out the steps in which they do not
        if not args.fp16 and self.grad_norm is not None and not math.isfinite(self.grad_norm):
            raise NotFinite(state.global_step + 1, "the gradient", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._show(state.global_step)
        if state.global_step >= state.max_steps and args.logging_strategy == "steps":
            control.should_log = True  # as transformers evaluates and saves there
        if _any_process(self.stop.requested):
            self.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        row = dict(logs or {})
        if "train_runtime" in row:  # transformers' closing summary, which holds nothing new
            return
        if self.check_first is not None and state.global_step == 1 and "loss" in row:
            self.check_first(row)
        shown = {name: row[name] for name in ("loss", "eval_loss", "rewards/accuracies") if name in row}
        self._show(state.global_step, **shown)
        self.metrics.write(row, state.global_step)
        self.tracker.log(row, state.global_step)
        if not math.isfinite(row.get("loss", 0.0)):  # a mean over all steps since the last one that was logged
            raise NotFinite(state.global_step, "the loss", self.logged)
        if not math.isfinite(row.get("eval_loss", 0.0)):
            raise NotFinite(state.global_step, "the loss of the held-out rows", state.global_step)
        self.logged = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if broken := models.not_finite(model):
            raise NotFinite(state.global_step, f"a weight ({broken})", state.global_step)
        barrier()  # every process has written its random state by now
        if state.is_world_process_zero:
            folder = self.output_dir / f"checkpoint-{state.global_step}"
            (folder / COUNTS).write_text(json.dumps({"num_tokens": self.tokens(), "processes": args.world_size}))
            checkpoint.seal(folder, step=state.global_step)

    def close(self) -> None:
        """Whatever happened: leave the terminal and the tracker in order."""
        if self.progress is not None:
            self.progress.close()
        self.tracker.finish()

    def _show(self, step: int, **figures: float) -> None:
        assert self.progress is not None
        self.progress.update(step, **figures)


def _any_process(flag: bool) -> bool:
    """True on every process as soon as it is on one; a signal may reach only some of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    votes = torch.tensor([int(flag)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())


def barrier() -> None:
    """Wait for the other processes, if there are any."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def describe(cfg: TrainingRun, net: Any, device: torch.device) -> str:
    """What is about to train, e.g. "0.21 M parameters (all trained), cpu, 1 process, float32, learning rate 2e-05".

    A second sentence warns of a learning rate that is too low for this tuning.
    """
    parameters = list(net.parameters())
    count, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    share = "all trained" if trained == count else f"{trained / 1e6:.2f} M trained"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = cfg.trainer if isinstance(cfg.trainer, dict) else cfg.trainer.model_dump()
    computes = "bfloat16" if trainer.get("bf16") else "float16" if trainer.get("fp16") else "float32"
    told = (
        f"{count / 1e6:.2f} M parameters ({share}), {device}, {processes} process{'es' if processes > 1 else ''}, "
        f"{computes}, learning rate {cfg.learning_rate:g}"
    )
    warning = cfg.low_rate()
    return f"{told}\nWARNING: {warning}" if warning else told
