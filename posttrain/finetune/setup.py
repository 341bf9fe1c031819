"""What do phases 1 and 2 do before TRL trains?  Check everything, reserve the output folder, load model and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedModel, TrainingArguments, set_seed

from posttrain.config import TrainingRun
from posttrain.data import prepared_rows
from posttrain.finetune import suites, training
from posttrain.models import Chat, compile_layers, model_files, simplify_layers
from posttrain.plan import BY_MEMORY, Place, Shape, can_be_deterministic, check_run, choose_rows, warning
from posttrain.runtime import checkpoint, hardware, parallel, run_identity, runlog, trl_arguments


class TrainingSetup(NamedTuple):
    """What the trainer of phase 1 or 2 is made from."""

    cfg: TrainingRun  # with the values that depend on the device
    args: Any  # SFTConfig or DPOConfig
    model: PreTrainedModel
    chat: Chat
    rows: dict[str, Dataset]  # "train", and "eval" if rows are held out
    folder: Path  # where the prepared rows are
    deterministic: bool  # whether the GPU can compute each operation of the model deterministically
    measures: bool  # whether `evaluation.suites` is measured


def set_up(
    cfg: TrainingRun, kind: type[TrainingArguments], load_rows: Callable[..., Any], folder: str, *, resume: bool,
    data_sets: Sequence[str] = (), **fixed: Any,
) -> TrainingSetup:  # fmt: skip
    """Prepare a run of phase 1 or 2, or raise one UserError with all that is wrong, before anything is written.

    Args:
        kind: TRL's class of training arguments, made from `cfg.trainer` and `fixed`.
        load_rows: `data.load_sft` or `data.load_preferences`.
        folder: name of the folder inside `output_dir` for the prepared rows.
        data_sets: those that the run will ask the Hub for, besides its sources.
        **fixed: training arguments that the config cannot change.
    """
    output_dir = Path(cfg.output_dir)
    cfg, begun = hardware.settle(cfg), run_identity.begun_with(output_dir) if resume else {}
    cfg = _as_begun(cfg, begun.get("trainer", {}))
    if unmeasured := suites.why_not_measured(cfg):
        runlog.say(unmeasured)
    if runlog.is_main_process():
        check_run(cfg, resume=resume, kept=output_dir / folder, data_sets=() if unmeasured else data_sets)
        if resume:
            run_identity.same_run(output_dir, cfg.model_dump(mode="json"))
        checkpoint.claim(output_dir, resume)
    batches = run_identity.same_batches(output_dir, cfg) if resume else cfg
    device = hardware.resolve_device(cfg.device)
    parallel.join(device, cfg.trainer.get("ddp_timeout", parallel.TIMEOUT))  # or accelerate would, without device_id
    place = Place.here(device)  # before the model takes memory
    if not begun:
        cfg = batches = _fitted(cfg, place)
    args = trl_arguments.arguments(kind, batches, device, **fixed)
    set_seed(cfg.seed)

    model, chat = training.load_model(cfg)
    rows = prepared_rows.prepare(output_dir / folder, cfg, chat, args, load_rows, resume=resume)
    if words := warning(cfg, args, place, max(prepared_rows.row_lengths(rows["train"]))):
        runlog.say(words)
    training.save_work(model, device)
    deterministic = can_be_deterministic(model, args.bf16)
    simplify_layers(model)
    if hardware.trainer_field(cfg, "torch_compile"):
        compile_layers(model, deterministic=deterministic)
    measures = not unmeasured and bool(cfg.evaluation.suites.model_dump(exclude_none=True))
    return TrainingSetup(cfg, args, model, chat, rows, output_dir / folder, deterministic, measures)


def _left_to_memory(cfg: TrainingRun) -> tuple[str, ...]:
    """Return the keys of `trainer` that the config leaves to the memory plan."""
    if hardware.trainer_field(cfg, "auto_find_batch_size"):
        return BY_MEMORY
    return BY_MEMORY[:1] if hardware.trainer_field(cfg, "gradient_checkpointing") is None else ()


def _as_begun(cfg: TrainingRun, before: dict[str, Any]) -> TrainingRun:
    """Return the config with what the memory plan chose when the run began: sums would round otherwise."""
    return hardware.with_trainer(cfg, **{name: before[name] for name in _left_to_memory(cfg) if name in before})


def _fitted(cfg: TrainingRun, place: Place) -> TrainingRun:
    """Return the config with the keys that the memory decides."""
    if not (names := _left_to_memory(cfg)):
        return cfg
    chosen = choose_rows(Shape.of(model_files.load_config(cfg.model), cfg.model), cfg, place)
    if len(names) > 1:
        rows, accumulated = chosen["per_device_train_batch_size"], chosen["gradient_accumulation_steps"]
        again = ", activations recomputed" if chosen["gradient_checkpointing"] else ""
        runlog.say(f"Planned by memory: micro-batches of {rows}, {accumulated} of them a step{again}.")
    return hardware.with_trainer(cfg, **chosen)
