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

from posttrain import config
from posttrain.config import SFTRun
from posttrain.runtime import runlog


def main(argv: list[str] | None = None) -> None:
    # 1. What to do. Heavy imports wait until the config stands, so that --help and every mistake answer at once.
    cfg, flags = config.load(SFTRun, "configs/phase1_sft.yaml", argv, config.training_flags, __doc__)
    if flags.plan is not None:
        from posttrain import plan

        return plan.show(cfg, flags.plan, flags.config)
    output_dir = Path(cfg.output_dir)
    runlog.keep_private(output_dir)

    from transformers import set_seed
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from posttrain import data, models, plan
    from posttrain.data import prepared_rows
    from posttrain.finetune import training, trl_trainers
    from posttrain.plan import check_run, selftest
    from posttrain.runtime import checkpoint, hardware, run_identity, trl_arguments

    # 2. Can it be done? Everything that is wrong is said at once, before anything is written.
    cfg = hardware.settle(cfg)
    if runlog.is_main_process():
        check_run(cfg, resume=flags.resume, kept=output_dir / "rows")
        if flags.resume:
            run_identity.same_run(output_dir, cfg.model_dump(mode="json"))
        checkpoint.claim(output_dir, flags.resume)
    given = run_identity.same_batches(output_dir, cfg) if flags.resume else cfg
    device = hardware.resolve_device(cfg.device)
    args = trl_arguments.arguments(SFTConfig, given, device)
    set_seed(cfg.seed)
    place = plan.Place.here(device)

    # 3. The model, the chat that speaks to it, and the conversations as token ids with a mask on what is trained.
    model, chat = training.load(cfg)
    rows = prepared_rows.prepare(output_dir / "rows", cfg, chat, args, data.load_sft, resume=flags.resume)
    if words := plan.warning(cfg, args, place, max(prepared_rows.lengths(rows["train"]))):
        runlog.say(words)

    # 4. TRL trains. The rows carry assistant_masks, from which TRL makes the labels: only those tokens have a loss.
    training.save_work(model, device)
    deterministic = selftest.can_be_deterministic(model, args.bf16)
    with trl_arguments.refusals_in_words():
        trainer = trl_trainers.groups_by_length(trl_trainers.weighs_held_out_rows(SFTTrainer))(
            model=model,
            args=args,
            train_dataset=rows["train"],
            eval_dataset=rows.get("eval"),
            processing_class=chat.tokenizer,
            peft_config=models.peft_config(cfg.model, model, chat),
        )
    prepared_rows.seal(output_dir / "rows", cfg, chat)
    outcome = training.fit(trainer, "phase 1", cfg, resume=flags.resume, deterministic=deterministic)

    # 5. What phase 2 takes over.
    training.export(
        trainer, chat, cfg, outcome, rows=output_dir / "rows", phase="phase1", next_phase="phase2_dpo",
        config_file=flags.config,
    )  # fmt: skip


if __name__ == "__main__":
    config.run(main)
