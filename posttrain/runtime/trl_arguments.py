"""Which arguments do TRL's trainers get?  What they cannot use is refused before any work, with an explanation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer, get_scheduler

from posttrain.runtime import compat, launcher
from posttrain.types import UserError

# the metrics of an evaluation in phases 1 and 2
FIGURES = ("eval_loss", "eval_mean_token_accuracy", "eval_rewards/accuracies", "eval_rewards/margins")


def arguments(kind: Callable[..., Any], cfg: Any, device: torch.device, **fixed: Any) -> Any:
    """Return TRL's SFTConfig or DPOConfig from a config.

    bfloat16 and the recomputation of activations, which TRL switches on everywhere, are as `hardware.settle` and the
    memory plan have set them in the config. The first step is logged, and `Reporter` logs the last one: a run on
    little data may be shorter than `logging_steps`.

    Args:
        cfg: SFTRun or DPORun, whose section `trainer` replaces the defaults for the device.
        **fixed: fields that the config cannot change.

    Raises:
        UserError: fields cannot be used together, or would have no effect.
    """
    defaults = {
        "gradient_checkpointing": False,
        "dataloader_pin_memory": device.type == "cuda",
        "accelerator_config": {"non_blocking": device.type == "cuda"},  # or each copy of a batch waits for the GPU
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
        "auto_find_batch_size": False,  # the plan has found it; TRL would wait until the memory runs out
        "torch_compile": False,  # `models.compile_layers` compiles layers; TRL would compile the whole model
        "logging_nan_inf_filter": False,  # it would show a loss of 0 for nan
        "max_length": cfg.data.max_length,
        **fixed,
    }
    compat.ignore_renamed_argument()
    with refusals_in_words():
        _check_weights(cfg.trainer)
        args = kind(**{**defaults, **{key: value for key, value in cfg.trainer.items() if value is not None}, **fixed})
        if device.type == "cpu" and launcher.sharding() == "fsdp2":
            compat.shard_on_cpus()
        _check_scheduler(args)
        _check_optimizer(args)
        _check_best(args)
        _check_effect(args, cfg.trainer)
    if device.type == "cpu" and cfg.model.attn_implementation == "flex_attention":
        raise UserError(
            "model.attn_implementation=flex_attention has no gradients on a CPU. Write model.attn_implementation=sdpa."
        )
    check_packing(args, device, cfg.model.attn_implementation)
    return args


def check_packing(args: Any, device: torch.device, attention: str) -> None:
    """Raise UserError for packed rows whose conversations attend to each other, or whose mask has T x T entries.

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
            "different length: model.attn_implementation=flex_attention, which torch has, or flash_attention_2, with "
            "flash-attn installed."
        )


def _check_scheduler(args: Any) -> None:
    """Raise ValueError for a scheduler without the settings that it needs: it would fail only when training begins."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    own = args.lr_scheduler_kwargs or {}
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=own)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_type {args.lr_scheduler_type} cannot be set up with lr_scheduler_kwargs {own} ({error})"
        ) from error


def _check_optimizer(args: Any) -> None:
    """Make the optimizer once: missing packages and wrong settings would show only after the data work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    if kind.__module__.startswith("torch."):
        kind([torch.nn.Parameter(torch.zeros(1))], **settings)


def _check_best(args: Any) -> None:
    """Raise ValueError for a best metric that no evaluation has: the first one would end the run."""
    known = [name.removeprefix("eval_") for name in FIGURES]
    best = args.metric_for_best_model
    if best is not None and best.removeprefix("eval_") not in known:
        raise ValueError(f"metric_for_best_model is {best}; an evaluation has {', '.join(known)}")


def _check_weights(trainer: dict[str, Any]) -> None:
    """Raise ValueError, with what to write, where losses and their weights differ in number."""
    losses, weights = trainer.get("loss_type", ["sigmoid"]), trainer.get("loss_weights")
    if isinstance(losses, list) and isinstance(weights, list) and len(losses) != len(weights):
        raise ValueError(
            f"loss_weights={weights} has a weight for {len(weights)} losses, and loss_type={losses} names"
            f" {len(losses)}: write {_weights(len(losses))}, a weight for each"
        )


def _weights(losses: int) -> str:
    """Return what to write for equal weights, as an override on the command line."""
    return f"trainer.loss_weights='{[1.0] * losses}'"


# the losses that compare the pairs of a micro-batch with each other
OF_MICRO_BATCHES = ("aot", "aot_unpaired", "bco_pair")
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # the losses that read label_smoothing


def _check_effect(args: Any, fields: dict[str, Any]) -> None:
    """Raise ValueError for settings that TRL and transformers accept and then ignore.

    fields: the section `trainer` of the config, without their defaults.
    """
    losses, scheduler = args.loss_type, str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    pairs = isinstance(losses, list)  # phase 2
    # A single loss needs a single weight.
    weights = f" {_weights(1)}" if pairs and args.loss_weights and len(losses) > 1 else ""
    robust = f"write trainer.loss_type='[robust]'{weights}"
    useless = {
        "label_smoothing_factor": pairs and f"phase 2 has no such loss: {robust} and label_smoothing in its place",
        "padding_free": pairs and "TRL pads all pairs at present: leave it out",
        "label_smoothing": pairs
        and not {*losses} & {*SMOOTHED}
        and f"only the losses {', '.join(SMOOTHED)} smooth labels: {robust}, or leave it out",
        "discopop_tau": pairs and "discopop" not in losses and f"it belongs to trainer.loss_type='[discopop]'{weights}",
        **dict.fromkeys(
            ("ld_alpha", "f_divergence_type"),
            pairs and {*losses} == {"sft"} and "the loss sft compares no answers: add another loss",
        ),
        "f_alpha_divergence_coef": pairs
        and args.f_divergence_type != "alpha_divergence"
        and "it belongs to f_divergence_type=alpha_divergence",
        "warmup_steps": scheduler in ("constant", "reduce_lr_on_plateau")
        and f"lr_scheduler_type={scheduler} has no warmup: write constant_with_warmup, or warmup_steps=0",
        "liger_kernel_config": not args.use_liger_kernel and "it belongs to use_liger_kernel=true",
    }
    if losses == "dft":
        useless["label_smoothing_factor"] = "loss_type=dft smooths no labels: write loss_type=nll, or leave it out"
    for key, why in useless.items():
        if why and fields.get(key) not in (None, False, 0, "reverse_kl"):
            raise ValueError(f"{key}={fields[key]} would have no effect, for {why}")
    alone = args.per_device_train_batch_size == 1 and pairs and {*losses} & {"aot", "aot_unpaired"}
    if alone:
        raise ValueError(
            f"loss_type={losses} would be the same as sigmoid: {' and '.join(sorted(alone))} sorts the pairs of a"
            " micro-batch, and with per_device_train_batch_size=1 there is nothing to sort: write 2 or more"
        )
    if fields.get("auto_find_batch_size") and pairs and (mixing := {*losses} & {*OF_MICRO_BATCHES}):
        raise ValueError(
            f"loss_type={losses} would depend on the machine's memory: {' and '.join(sorted(mixing))} compares the"
            " pairs of a micro-batch, and auto_find_batch_size=true takes as many as fit: write"
            " auto_find_batch_size=false"
        )
    if pairs and "robust" in losses and args.label_smoothing >= 0.5:
        raise ValueError(f"label_smoothing={args.label_smoothing}, but the loss robust needs less than 0.5")


@contextmanager
def refusals_in_words() -> Iterator[None]:
    """Turn what TRL and peft refuse during set-up into a UserError."""
    try:
        yield
    except (ValueError, ImportError, NotImplementedError) as error:
        text = " ".join(str(error).split())[:500]
        raise UserError(f"These settings (trainer, model) cannot be used together: {text}") from error
