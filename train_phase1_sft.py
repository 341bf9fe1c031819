"""Phase 1: how does a base model learn to answer, step by step and turn by turn?  Supervised fine-tuning with TRL.

    python train_phase1_sft.py                                      the reference run (configs/phase1_sft.yaml)
    python train_phase1_sft.py --config configs/quickstart/phase1_sft.yaml
    python train_phase1_sft.py model.name_or_path=MODEL output_dir=runs/mine trainer.learning_rate=1e-5
    python train_phase1_sft.py --resume                             go on with a run that was stopped
    python train_phase1_sft.py --plan                               memory, hours and cost on many devices; nothing runs
    torchrun --nproc_per_node 2 train_phase1_sft.py                 on two GPUs (or two CPU processes)
    accelerate launch --config_file configs/accelerate/fsdp2.yaml train_phase1_sft.py        the model in shards

It reads conversations, trains on what the assistant says in them, stop token included, and saves
`<output_dir>/final` to phase 2.
"""

from __future__ import annotations

from pathlib import Path

# A package loads a module when one of its names is first used, so --help and mistakes answer before torch is loaded.
from posttrain import data, evaluation, finetune, models, plan, runtime
from posttrain.config import SFTRun, load, run, training_flags
from posttrain.runtime import runlog


def main(argv: list[str] | None = None) -> None:
    """Train as the config says. argv: the words of the command line; None takes those of this process."""
    # 1. What to do.
    cfg, flags = load(SFTRun, "configs/phase1_sft.yaml", argv, training_flags, __doc__)
    if flags.plan is not None:
        return plan.print_plan(cfg, flags.plan, flags.config)
    runlog.keep_private(Path(cfg.output_dir))

    # 2. The model, the chat that speaks to it, and the conversations as token ids with a mask on what is trained.
    #    Everything that is wrong is said at once, before anything is written.
    setup = finetune.set_up(
        cfg, finetune.SFTConfig, data.load_sft, "rows", resume=flags.resume,
        data_sets=evaluation.hub_sets(cfg.evaluation.suites),
    )  # fmt: skip
    cfg, model, chat = setup.cfg, setup.model, setup.chat
    tasks = evaluation.TrainingTasks(cfg, chat) if setup.measures else None

    # 3. TRL trains. The rows carry assistant_masks, from which TRL makes the labels: only those tokens have a loss.
    with runtime.trl_arguments.refusals_in_words():
        trainer = finetune.SFTTrainer(
            model=model,
            args=setup.args,
            train_dataset=setup.rows["train"],
            eval_dataset=setup.rows.get("eval"),
            processing_class=chat.tokenizer,
            peft_config=models.peft_config(cfg.model, model, chat),
        )
    data.prepared_rows.seal_rows(setup.folder, cfg, chat)
    outcome = finetune.training.fit(
        trainer, "phase 1", cfg, resume=flags.resume, deterministic=setup.deterministic, tasks=tasks
    )

    # 4. What phase 2 takes over.
    finetune.training.export_model(
        trainer, chat, cfg, outcome, rows=setup.folder, phase="phase1", next_phase="phase2_dpo",
        config_file=flags.config,
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
