"""How long until a model succeeds in 65 % of FrozenLake: phase 3, or TRL's GRPOTrainer on the very same environment?

Both begin with the same phase-2 model and have the quickstart's environment, protocol, template, levels, temperature,
group sizes, optimizer, learning rates and number of updates. Ours drops half the groups, as the quickstart does; TRL
cannot.
    make quickstart                                       # the player that all runs begin with
    python benchmarks/long/target.py --seeds 0 1 2 --jobs 2
    python benchmarks/long/target.py --out runs/target16 rollout.groups=16

Hours. A run that is finished is not run again. The clock stands still while a policy is evaluated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_phase3_starpo as phase3
from benchmarks import _measure
from posttrain.config.loading import resolve
from posttrain.config.starpo import StarPORun
from posttrain.models.chat import Chat
from posttrain.rollout.episodes import open_sampler
from posttrain.starpo.learner import schedule
from posttrain.starpo.run import make_learner
from posttrain.types import derive_seed

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart" / "phase3_starpo.yaml"


class Race:
    """The cost of training up to the first evaluation that reaches the target."""

    def __init__(self, cfg: StarPORun, chat: Chat, target: float) -> None:
        self.cfg, self.chat, self.target = cfg, chat, target
        self.cpu = self.wall = 0.0
        self.curve: list[dict[str, float]] = []
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        self._began = (time.process_time(), time.perf_counter())

    def pause(self) -> None:
        self.cpu += time.process_time() - self._began[0]
        self.wall += time.perf_counter() - self._began[1]

    def over(self, step: int, policy: Any) -> bool:
        """Whether the policy of this step reaches the target; only some steps are looked at."""
        evaluation = self.cfg.evaluation
        if step % evaluation.every and step != self.cfg.trainer.max_steps:
            return False
        sampler = open_sampler(policy, self.chat, self.cfg.rollout.engine)
        success = phase3.evaluate(self.cfg, sampler, self.chat, "validation", evaluation.episodes).metrics
        row = {"step": step, "success": success["evaluation/success"], "cpu": self.cpu, "wall": self.wall}
        self.curve.append(row)
        print(json.dumps(row), flush=True)
        return row["success"] >= self.target


def ours(cfg: StarPORun, model: Any, chat: Chat, race: Race) -> None:
    """The loop of phase 3 without its files and alarms."""
    learner = make_learner(cfg, model, chat)
    sampler = open_sampler(learner.policy, chat, cfg.rollout.engine)
    step = 0
    while not race.over(step, learner.policy) and step < cfg.trainer.max_steps:
        step += 1
        race.begin()
        groups = phase3.rollout(cfg, sampler, chat, step)
        scored = phase3.score_and_filter(cfg, groups)
        if scored.kept:
            phase3.update(cfg, learner, phase3.collect(cfg, learner, groups, scored), step)
        race.pause()


def theirs(cfg: StarPORun, model: Any, chat: Chat, race: Race, batch_size: int) -> None:
    """The same run in GRPOTrainer."""
    episodes = cfg.rollout.groups * cfg.rollout.num_generations
    assert episodes % (cfg.algorithm.minibatches * batch_size) == 0, "micro-batches must fill a minibatch"
    updates = cfg.algorithm.num_iterations * cfg.algorithm.minibatches  # of each step

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            race.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            race.pause()
            step, part = divmod(state.global_step, updates)
            control.should_training_stop = part == 0 and race.over(step, model)

    steps = range(1, cfg.trainer.max_steps + 1)
    levels = [derive_seed(cfg.seed, "level", step, group) for step in steps for group in range(cfg.rollout.groups)]
    settings = cfg.trainer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        cfg.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay,
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: schedule(cfg, 1 + done // updates))
    trainer = _measure.grpo_trainer(
        model,
        chat.tokenizer,
        [{"prompt": str(level)} for level in levels],
        lambda reward, **_: reward,
        rollout_func=_measure.rollout_func(cfg, chat),
        callbacks=[Clock()],
        optimizers=(optimizer, rates),
        seed=cfg.seed,
        max_steps=cfg.trainer.max_steps * updates,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=episodes // cfg.algorithm.minibatches // batch_size,
        steps_per_generation=episodes // batch_size,
        num_iterations=cfg.algorithm.num_iterations,
        num_generations=cfg.rollout.num_generations,
        max_completion_length=cfg.rollout.max_completion_length,
        temperature=cfg.rollout.temperature,
        epsilon=cfg.algorithm.epsilon,
        epsilon_high=cfg.algorithm.epsilon_high,
        entropy_coef=cfg.algorithm.entropy_coef,
        max_grad_norm=settings.max_grad_norm,
        shuffle_dataset=False,
    )
    if not race.over(0, model):
        trainer.train()


CONTESTANTS: dict[str, Callable[..., None]] = {"ours": ours, "trl": theirs}


def config(given: Any, seed: int) -> StarPORun:
    changes = [f"model.name_or_path={given.player}", "envs=[frozen_lake]", f"seed={seed}"]
    changes += [f"trainer.max_steps={given.steps}", f"evaluation.every={given.every}"]
    return resolve(StarPORun, CONFIG, [*changes, f"evaluation.episodes={given.episodes}", *given.changes])


def one(given: Any) -> None:
    """One contestant, one seed, in a process of its own; its row of the table."""
    from posttrain.models import loading as models

    cfg = config(given, given.seeds[0])
    model, chat = models.load(cfg.model, device="cpu", chat_template=cfg.chat.template)
    race = Race(cfg, chat, given.target)
    more = {"batch_size": given.batch_size} if given.only == "trl" else {}
    CONTESTANTS[given.only](cfg, model, chat, race, **more)
    row = _measure.surroundings() | {"who": given.only, "seed": cfg.seed, "target": given.target, "curve": race.curve}
    (given.out / f"{given.only}-{cfg.seed}.json").write_text(json.dumps(row))


def run(given: Any, who: str, seed: int) -> dict[str, Any]:
    """One row, from its file if it is there."""
    done = given.out / f"{who}-{seed}.json"
    if not done.exists():
        mine = ("only", "seeds", "jobs", "changes", "json")
        options = [f"--{key.replace('_', '-')}={value}" for key, value in vars(given).items() if key not in mine]
        command = [sys.executable, __file__, *options, f"--only={who}", f"--seeds={seed}", "--", *given.changes]
        with done.with_suffix(".log").open("w") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if subprocess.run(command, stdout=log, stderr=log, env=env).returncode:
                raise SystemExit(f"{who}, seed {seed} failed, see {log.name}.")
    return json.loads(done.read_text())


def markdown(rows: list[dict[str, Any]]) -> str:
    """Steps, success and cost of each run, and how many times as long TRL takes for the seeds where ours arrives.

    A run of TRL that does not arrive counts with what it has cost so far, and the ratio is a lower bound.
    """
    cells, cost, arrived = [], {}, {}
    for row in rows:
        first, last, which = row["curve"][0], row["curve"][-1], (row["who"], row["seed"])
        cost[which], arrived[which] = last, last["success"] >= row["target"]
        figures = [f"{last['step']}" if arrived[which] else f"not in {last['step']}", f"{last['cpu'] / 60:.1f}"]
        success = [f"{first['success']:.2f}", f"{last['success']:.2f}"]
        cells.append([row["who"], str(row["seed"]), *figures, f"{last['wall'] / 60:.1f}", *success])
    header = ["", "seed", f"steps to {rows[0]['target']:.0%}", "CPU-minutes", "minutes", "success before", "after"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    where = _measure.told(rows[0] | {"commit": commits, "load": max(row["load"] for row in rows)})
    text = f"{where}\n\n{_measure.table(header, cells)}"
    seeds = [seed for who, seed in arrived if who == "ours" and arrived[who, seed] and cost[who, seed]["cpu"] > 0]
    bound = "at least " if not all(arrived["trl", seed] for seed in seeds) else ""
    for part, name in (("cpu", "CPU time"), ("wall", "time")) if seeds else ():
        ratio = _measure.ratio(*([cost[who, seed][part] for seed in seeds] for who in ("trl", "ours")))
        text += f"\n\nTRL takes {bound}{ratio} of our {name} ({len(seeds)} of {len(rows) // 2} seeds)."
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--player", type=Path, default=Path("runs/quickstart/phase2/final"), help="where runs begin")
    parser.add_argument("--out", type=Path, default=Path("runs/target"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.65, help="success on held-out levels")
    parser.add_argument("--steps", type=int, default=110, help="at most")
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    parser.add_argument("--episodes", type=int, default=256, help="of an evaluation")
    parser.add_argument("--batch-size", type=int, default=32, help="TRL: episodes in a micro-batch")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one core each")
    parser.add_argument("--only", choices=CONTESTANTS, help="one run: this contestant, the first seed")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("changes", nargs="*", help="settings of both, as of phase 3: rollout.groups=16")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.only:
        one(given)
        return
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(run, given, who, seed) for seed in given.seeds for who in CONTESTANTS]
    rows = [each.result() for each in runs]
    _measure.publish({"rows": rows}, markdown(rows), given.json)


if __name__ == "__main__":
    main()
