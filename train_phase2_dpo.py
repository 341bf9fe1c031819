"""Phase 2: how does a model that answers learn which of two is better?  Direct preference optimisation, with TRL.

    python train_phase2_dpo.py                                      the reference run (configs/phase2_dpo.yaml)
    python train_phase2_dpo.py --config configs/quickstart/phase2_dpo.yaml
    python train_phase2_dpo.py model.name_or_path=runs/mine/final output_dir=runs/mine-dpo trainer.beta=0.2
    python train_phase2_dpo.py --resume                             go on with a run that was stopped
    python train_phase2_dpo.py --plan                               memory, hours and cost on many devices; nothing runs
    torchrun --nproc_per_node 2 train_phase2_dpo.py                 on two GPUs (or two CPU processes)
    accelerate launch --config_file configs/accelerate/fsdp2.yaml train_phase2_dpo.py        the model in shards

It reads pairs of answers to the same prompt and raises the odds of the chosen one, measured against the model as it
was when the phase began, and saves `<output_dir>/final` to phase 3.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A package loads a module when one of its names is first used, so --help and mistakes answer before torch is loaded.
from posttrain import data, evaluation, finetune, models, plan, runtime
from posttrain.config import DPORun, load, run, training_flags
from posttrain.runtime import runlog
from posttrain.types import UserError

if TYPE_CHECKING:
    import torch


def main(argv: list[str] | None = None) -> None:
    """Train as the config says. argv: the words of the command line; None takes those of this process."""
    # 1. What to do.
    cfg, flags = load(DPORun, "configs/phase2_dpo.yaml", argv, training_flags, __doc__)
    if flags.plan is not None:
        return plan.print_plan(cfg, flags.plan, flags.config)
    runlog.keep_private(Path(cfg.output_dir))

    # 2. The model, the chat that speaks to it, and the pairs as token ids: prompt, chosen, rejected. Everything that is
    #    wrong is said at once, before anything is written.
    setup = finetune.set_up(
        cfg, finetune.DPOConfig, data.load_preferences, "pairs", resume=flags.resume,
        data_sets=evaluation.hub_sets(cfg.evaluation.suites), precompute_ref_log_probs=True, logging_first_step=True,
    )  # fmt: skip
    cfg, args, model, chat = setup.cfg, setup.args, setup.model, setup.chat
    tasks = evaluation.TrainingTasks(cfg, chat) if setup.measures else None

    # 3. TRL trains. The reference is the policy in memory. It scores all pairs once, before the first step: a reference
    #    loaded by name could be another model, and would take the memory of a second one.
    finetune.training.show_reference_progress()
    with runtime.trl_arguments.refusals_in_words(), runtime.hardware.deterministic(setup.deterministic):
        trainer = finetune.DPOTrainer(
            model=model,
            ref_model=finetune.training.reference_in_shards(model),
            args=args,
            train_dataset=setup.rows["train"],
            eval_dataset=setup.rows.get("eval"),
            processing_class=chat.tokenizer,
            peft_config=models.peft_config(cfg.model, model, chat),
        )
        trainer.ref_model = None  # its log-probs are computed
    data.prepared_rows.seal_rows(setup.folder, cfg, chat)

    margin = reference_margin(
        args,
        getattr(getattr(model.config, "quantization_config", None), "bnb_4bit_compute_dtype", model.dtype),
        answers=[len(ids) for name in ("chosen_ids", "rejected_ids") for ids in trainer.train_dataset[name]],
    )

    def check_first(figures: dict[str, Any]) -> None:
        check_reference(figures, trainer.loss_types, trainer.loss_weights, margin)

    outcome = finetune.training.fit(
        trainer,
        "phase 2",
        cfg,
        resume=flags.resume,
        deterministic=setup.deterministic,
        check_first=check_first,
        tasks=tasks,
    )

    # 4. What phase 3 takes over.
    finetune.training.export_model(
        trainer, chat, cfg, outcome, rows=setup.folder, phase="phase2", next_phase="phase3_starpo",
        config_file=flags.config,
    )  # fmt: skip


# Standard deviation of a token's log-prob, in nats, between two batch shapes: kernels sum in another order. bfloat16
# showed .58 over 300 tokens; the two others are more exact by the bits that their mantissas are longer.
ROUNDING = {"bfloat16": 0.58 / 300**0.5, "float16": 0.58 / 300**0.5 / 2**3, "float32": 0.58 / 300**0.5 / 2**16}


def reference_margin(args: Any, dtype: torch.dtype, answers: list[int]) -> float:
    """Return how far from zero rewards of the first step may be: four standard deviations of rounding, at least 1e-3.

    A reward is beta times the difference of two log-probs of an answer. Reference and training read it in batches of
    different shapes, and rounding makes their difference grow with the square root of its number of tokens. The step
    reports the mean over its pairs. With the reference settings (bfloat16, beta .1, 300 tokens, 16 pairs): .058.

    dtype: what layers compute with outside autocast.
    """
    used = [str(dtype).removeprefix("torch.")]
    used += ["bfloat16"] if args.bf16 else ["float16"] if args.fp16 or args.tf32 else []
    a_token = max(ROUNDING.get(name, ROUNDING["bfloat16"]) for name in used)
    pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return max(1e-3, 4 * args.beta * a_token * (sum(answers) / len(answers) / pairs) ** 0.5)


def check_reference(
    figures: dict[str, Any], loss_types: list[str], loss_weights: list[float], margin: float = 1e-3
) -> None:
    """Check that the policy equals its reference before the first update: rewards of zero, a sigmoid loss of ln 2.

    Raises:
        UserError: the reference log-probs belong to another model or to other tokens, or are not finite.
    """
    expected = {"rewards/chosen": 0.0, "rewards/rejected": 0.0}
    if loss_types == ["sigmoid"]:
        expected["loss"] = math.log(2) * loss_weights[0]
    off = [f"{name} {figures[name]:.4f}" for name, at in expected.items() if not abs(figures[name] - at) <= margin]
    if off:
        raise UserError(
            f"The first step should find the policy equal to its reference (rewards 0, sigmoid loss ln 2 = 0.6931), "
            f"up to {margin:.4f}, but found {', '.join(off)}: the reference log-probs are not the policy's own. A "
            "layer that draws random numbers in training (dropout) does this: write trainer.disable_dropout=true. "
            "Otherwise delete the output folder and start again without --resume."
        )


if __name__ == "__main__":
    run(main)
