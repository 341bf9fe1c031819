"""What does GSM8K by GRPO gain for the time that it takes, beside TRL's GRPOTrainer?  Accuracy against seconds.

    python benchmarks/long/gsm8k_trl.py MODEL --data gsm8k_train.jsonl            # hours: first ours, then TRL's
    python benchmarks/long/gsm8k_trl.py MODEL --data gsm8k_train.jsonl --only trl
    python benchmarks/long/gsm8k_trl.py                                           # the table

Both begin with the same adapter, train on the same questions in the same order with the same reward function, and are
evaluated by the same code on the same validation questions, greedily. Seconds are those of training alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _measure
from transformers import TrainerCallback, set_seed

import train_phase3_starpo as phase3
from benchmarks._rows import read_rows
from envs.episode import Episode
from envs.prompts import Prompts
from envs.prompts.rewards import math
from posttrain import models
from posttrain.config import StarPORun, run
from posttrain.config.loading import resolve
from posttrain.report.tables import percent
from posttrain.runtime import hardware, runlog
from posttrain.starpo.run import levels, make_learner
from posttrain.types import Record, UserError, short_name

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "gsm8k.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "gsm8k-trl.jsonl"
WHOSE = ("ours", "trl")


def changes(given: argparse.Namespace) -> list[str]:
    """Return the overrides of configs/gsm8k.yaml with which both do the same work."""
    options = f"{{path: {given.data}, prompt: question, rewards: [math], system: {json.dumps(given.system)}}}"
    return [
        f"model={{name_or_path: {given.model}, tuning: lora, lora: {{r: 16, alpha: 32}}}}",
        f"envs=[{{name: prompts, label: gsm8k, options: {options}}}]",
        f"device={given.device}",
        "report_to=none",
        f"seed={given.seed}",
        f"rollout={{groups: {given.groups}, num_generations: {given.num_generations}, refill: 0, temperature: 1.0,"
        f" max_completion_length: {given.new_tokens}, max_context: {given.new_tokens + 512}}}",
        "algorithm={advantage: grpo, epsilon_high: 0.28, aggregation: token_mean, importance_sampling_clip_max: null,"
        " filter: {strategy: none, keep_zero: true}}",  # TRL leaves no group out
        f"trainer={{max_steps: {given.steps}, learning_rate: {given.learning_rate}, max_grad_norm: 1.0, bf16: true}}",
        f"evaluation={{every: {given.every}, episodes: {given.questions}, final_episodes: 8, temperature: 0.0}}",
        "diagnostics={early_stop: false}",
        f"checkpoint={{every: {given.steps}, keep: 1}}",
    ]


def row_of(given: argparse.Namespace, whose: str, step: int, seconds: float, metrics: dict[str, Any]) -> Record:
    """Return the row of one evaluation. seconds: of training until then."""
    return {
        "whose": whose,
        "model": short_name(given.model),
        "seed": given.seed,
        "batch": f"{given.groups} x {given.num_generations}, {given.new_tokens} tokens, {given.learning_rate:g}",
        "step": step,
        "seconds": round(seconds, 1),
        **{name: metrics[f"evaluation/gsm8k/{name}"] for name in ("success", "low", "high")},
        "questions": given.questions,
        **_measure.surroundings(given.device),
    }


def ours(given: argparse.Namespace, out: Path) -> list[Record]:
    """Train by the script of phase 3; seconds and evaluations are those of its metrics.jsonl."""
    command = [sys.executable, str(ROOT / "train_phase3_starpo.py"), "--config", str(CONFIG), *changes(given)]
    done = subprocess.run([*command, f"output_dir={out}", *(["--resume"] if out.exists() else [])], cwd=ROOT)
    if done.returncode:
        raise UserError(f"The run in {out} failed; its words are above.")
    seconds, found = 0.0, list[Record]()
    for metrics in read_rows(out / "metrics.jsonl"):
        seconds += sum(metrics.get(f"seconds/{part}", 0.0) for part in ("rollout", "update", "collapse"))
        if "evaluation/gsm8k/success" in metrics:
            found.append(row_of(given, "ours", metrics["step"], seconds, metrics))
    return found


def trl(given: argparse.Namespace) -> list[Record]:
    """Train by GRPOTrainer, and evaluate its policy as phase 3 evaluates its own."""
    cfg = hardware.settle(resolve(StarPORun, CONFIG, [*changes(given), "trainer.gradient_checkpointing=false"]))
    model, chat = models.load(cfg.model, device=cfg.device, chat_template=None)
    set_seed(cfg.seed)  # the adapter that phase 3 begins with
    learner = make_learner(cfg, model, chat)
    sampler = learner.open_sampler(chat)
    rows: list[dict[str, Any]] = []
    for step in range(1, cfg.trainer.max_steps + 1):
        for episode in levels(cfg, step)[0][:: cfg.rollout.num_generations]:
            assert isinstance(episode, Episode) and isinstance(episode.env, Prompts)
            rows.append({"prompt": episode.env.messages(), "answer": str(episode.env.row["answer"])})
    found: list[Record] = []
    seconds = began = 0.0

    def evaluated(step: int) -> None:
        training = learner.model.training
        with learner.sampling(), torch.no_grad():
            metrics = phase3.evaluate(cfg, sampler, chat, "validation", cfg.evaluation.episodes).metrics
        learner.model.train(training)
        found.append(row_of(given, "trl", step, seconds, metrics))
        runlog.say(f"TRL, step {step}: {percent(found[-1]['success'])} after {seconds:.0f} s of training.")

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal seconds
            _measure.synchronize(given.device)
            seconds += time.perf_counter() - began
            runlog.say(f"TRL, step {state.global_step}/{given.steps}: {seconds / state.global_step:.0f} s a step.")
            if state.global_step % given.every == 0:
                evaluated(state.global_step)

    evaluated(0)
    trainer = _measure.grpo_trainer(
        learner.model,
        chat.tokenizer,
        rows,
        math,
        callbacks=[Clock()],
        max_steps=given.steps,
        per_device_train_batch_size=given.batch_size,
        gradient_accumulation_steps=given.groups * given.num_generations // given.batch_size,
        num_generations=given.num_generations,
        max_completion_length=given.new_tokens,
        temperature=1.0,
        shuffle_dataset=False,
        learning_rate=given.learning_rate,
        lr_scheduler_type=cfg.trainer.lr_scheduler_type,
        warmup_steps=cfg.trainer.warmup_steps,
        adam_beta1=cfg.trainer.adam_beta1,
        adam_beta2=cfg.trainer.adam_beta2,
        weight_decay=cfg.trainer.weight_decay,
        max_grad_norm=cfg.trainer.max_grad_norm,
        bf16=bool(cfg.trainer.bf16),
    )
    trainer.train()
    return found


def markdown(rows: Sequence[Record]) -> str:
    """A line for each evaluation: accuracy, and the seconds of training until then, of both."""
    lines: list[list[str]] = []
    for key in dict.fromkeys((row["model"], row["batch"], row["seed"], row["step"]) for row in rows):
        cells: list[str] = []
        for whose in WHOSE:
            each = [
                row for row in rows
                if row["whose"] == whose and (row["model"], row["batch"], row["seed"], row["step"]) == key
            ]  # fmt: skip
            within = [f"{percent(row['success'])} [{100 * row['low']:.0f}, {100 * row['high']:.0f}]" for row in each]
            cells += [within[-1], f"{each[-1]['seconds']:,.0f}"] if each else ["", ""]
        lines.append([*map(str, key), *cells])
    return _measure.table(["model", "batch", "seed", "steps", "ours", "s", "TRL", "s"], lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or Hub name of an instruct model")
    parser.add_argument("--data", type=Path, help="GSM8K's training split as JSON Lines")
    parser.add_argument("--only", choices=WHOSE, help="one of the two alone")
    parser.add_argument(
        "--out", type=Path, help="folder of our run, with which it goes on; a temporary one if left out"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4, help="TRL: answers in a micro-batch")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--system", default="Reason step by step, and put your final answer into \\boxed{}.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON Lines (default: %(default)s)")
    given = parser.parse_args(argv)
    if given.model:
        if given.data is None or not given.data.exists():
            parser.error("--data: the file of GSM8K's training split is needed")
        _measure.threads()
        for whose in [given.only] if given.only else WHOSE:
            if whose == "ours":
                with tempfile.TemporaryDirectory() as temporary:
                    rows = ours(given, given.out or Path(temporary) / "run")
            else:
                rows = trl(given)
            with given.results.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    print(markdown(read_rows(given.results)))


if __name__ == "__main__":
    run(main)
