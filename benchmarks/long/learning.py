"""Which algorithm learns most from the same episodes, and what does it cost?  Every arm, environment and seed.

    make quickstart                                       # the player that all runs begin with
    python benchmarks/long/learning.py --steps 40 --seeds 0 1 2 --jobs 2
    python benchmarks/long/learning.py --arms grpo gigpo --envs sokoban --json rows.json
    python benchmarks/long/learning.py --arms choices --envs frozen-lake sokoban  # the parts of the recipe, one by one
    python benchmarks/long/learning.py --table benchmarks/results/learning.jsonl  # the rows of the README's tables

Hours. A run that is finished is not run again; one that was cut starts again from its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks._rows import read_rows
from posttrain import config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart" / "phase3_starpo.yaml"
SMALL = ["algorithm.entropy_coef=0", "algorithm.num_iterations=2", "algorithm.minibatches=2", "algorithm.beta=0"]
SMALL += ["rollout.groups=12"]  # the quickstart has 16 for each of its two environments
CRITIC = ["algorithm.critic.learning_rate=2e-3", "algorithm.critic.warmup_steps=3", "algorithm.turn_rewards=true"]
HALF = "algorithm.filter={strategy: top_k, value: 0.5}"
TOP_P = "algorithm.filter={strategy: top_p, value: 0.9}"
BONUS = ["algorithm.entropy_coef=0.05"]  # too much, to see runs diverge
ALL = "algorithm.filter={strategy: none, keep_zero: true}"
ALGORITHMS: dict[str, list[str]] = {  # in common: SMALL, and the quickstart's learning rate and clip
    "grpo": ["algorithm.advantage=grpo", ALL],
    "grpo-top-k": ["algorithm.advantage=grpo", HALF],
    "starpo-s": ["algorithm.advantage=gae", "algorithm.filter={strategy: top_k, value: 0.25}", *CRITIC],
    "ragen2": ["algorithm.advantage=grpo", TOP_P],
    "gigpo": ["algorithm.advantage=gigpo", ALL],
    "gigpo-top-k": ["algorithm.advantage=gigpo", HALF],
    "ppo": ["algorithm.advantage=gae", ALL, *CRITIC],
    "bilevel-gae": ["algorithm.advantage=bilevel_gae", ALL, *CRITIC],
}
RECIPE = ["algorithm.advantage=grpo", "algorithm.filter={strategy: none, keep_zero: false}", "rollout.refill=12"]
RECIPE += ["algorithm.aggregation=sequence_mean", "algorithm.num_iterations=1", "algorithm.minibatches=1"]
CHOICES: dict[str, list[str]] = {  # a recipe, and what each of its choices is worth
    "recipe": RECIPE,
    "no-refill": [*RECIPE, "rollout.refill=0"],
    "minibatches-2": [*RECIPE, "algorithm.minibatches=2"],
    "iterations-2": [*RECIPE, "algorithm.num_iterations=2", "algorithm.minibatches=2"],
    "token-mean": [*RECIPE, "algorithm.aggregation=token_mean"],
    "symmetric-clip": [*RECIPE, "algorithm.epsilon_high=0.2"],
    "kl": [*RECIPE, "algorithm.beta=0.01"],
    "temperature-1.2": [*RECIPE, "rollout.temperature=1.2"],
    "temperature-0.7": [*RECIPE, "rollout.temperature=0.7"],
    "no-std": [*RECIPE, "algorithm.advantage_std=false"],
    "best-half": [*RECIPE, "algorithm.filter={strategy: top_k, value: 0.5, keep_zero: false}"],
    "rate-x3": [*RECIPE, "trainer.learning_rate=18e-4"],
    "rate-by-3": [*RECIPE, "trainer.learning_rate=2e-4"],
    "with-gigpo": [*RECIPE, "algorithm.advantage=gigpo"],
}
ARMS = (
    ALGORITHMS
    | CHOICES
    | {
        "bonus": ["algorithm.advantage=grpo", ALL, *BONUS],
        "bonus-top-k": ["algorithm.advantage=grpo", HALF, *BONUS],
        "bonus-ragen2": ["algorithm.advantage=grpo", TOP_P, *BONUS],
        "curriculum": ["algorithm.advantage=gigpo", HALF],  # with EASY_FIRST for the environments
    }
)
LONG_TURNS = ["rollout.max_completion_length=112", "rollout.max_context=2048"]  # room for the next state in a thought
LAKE = "name: frozen_lake, options: {observation: neighbours"  # as the player has learnt it
BOX = "name: sokoban, options: {observation: neighbours, reward: sparse, deadlock_ends: true"
ENVS: dict[str, list[str]] = {
    "frozen-lake": [f"envs=[{{{LAKE}}}}}]"],
    "slippery": [f"envs=[{{{LAKE}, slippery: true, success_rate: 0.8}}}}]"],
    "sokoban": [f"envs=[{{{BOX}}}}}]"],
    "frozen-lake-seen": ["envs=[{name: frozen_lake, options: {observation: coordinates}}]", *LONG_TURNS],
    "sokoban-seen": [
        "envs=[{name: sokoban, options: {observation: coordinates, reward: sparse, deadlock_ends: true}}]",
        *LONG_TURNS,
    ],
}
EASY_FIRST: dict[str, list[str]] = {  # the second joins once half of the first one's validation levels are won
    "frozen-lake": [f"envs=[{{label: easy, {LAKE}, frozen: 0.95}}}}, {{after: easy, {LAKE}}}}}]"],
    "slippery": [f"envs=[{{label: easy, {LAKE}}}}}, {{after: easy, {LAKE}, slippery: true, success_rate: 0.8}}}}]"],
    "sokoban": [f"envs=[{{label: easy, {BOX}, max_length: 2}}}}, {{after: easy, {BOX}}}}}]"],
}


def run(out: Path, player: Path, arm: str, env: str, seed: int, steps: int) -> dict[str, Any]:
    """One run, unless it is finished; its row of the table."""
    folder = out / f"{env}-{arm}-{seed}"
    done = folder / "row.json"
    if done.exists():
        return json.loads(done.read_text())
    command = [sys.executable, str(ROOT / "train_phase3_starpo.py"), "--config", str(CONFIG), *SMALL, *ARMS[arm]]
    command += (EASY_FIRST if arm == "curriculum" else ENVS)[env]
    command += [f"seed={seed}", f"trainer.max_steps={steps}", f"model.name_or_path={player}"]
    command += [f"output_dir={folder}", "report_to=none", "diagnostics.early_stop=false"]
    shutil.rmtree(folder, ignore_errors=True)
    log = out / f"{folder.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{folder.name} failed, see {log}.")
    table = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    name = "sokoban" if env.startswith("sokoban") else "frozen_lake"
    final = next(row for row in table if "final/success" in row)
    played = [row for row in table if "seconds/rollout" in row]
    row = {
        "env": env,
        "arm": arm,
        "seed": seed,
        "steps": played[-1]["step"],
        "minutes": (usage.ru_utime + usage.ru_stime) / 60,
        "before": next(row for row in table if "evaluation/success" in row)[f"evaluation/{name}/success"],
        "after": final[f"final/{name}/success"],
        "low": final[f"final/{name}/low"],
        "high": final[f"final/{name}/high"],
        "alarms": [line.split(" ", 1)[1] for line in log.read_text().splitlines() if line.startswith("ALARM")],
        "std": [row["rollout/in_group_std"] for row in played],
        "reward": [row["rollout/reward"] for row in played],
    }
    done.write_text(json.dumps(row))
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Per environment and arm: test success of each seed with its interval, the mean, and what a CPU-minute buys.

    `reward by then` is the reward in play, mean of eight steps, when a run had cost what the cheapest arm of its
    environment costs in all; a step of a run is taken to cost the same as any other.
    """
    print("| env | algorithm | seeds: test success [95 %] | mean | CPU-minutes | points a minute | reward by then |")
    print("|---|---|---|---|---|---|---|")
    names = dict.fromkeys([*ARMS, *(row["arm"] for row in rows)])  # some are gone since their rows were made
    for env in ENVS:
        arms = {arm: [r for r in rows if (r["env"], r["arm"]) == (env, arm)] for arm in names}
        costs = {arm: statistics.fmean(r["minutes"] for r in own) for arm, own in arms.items() if own}
        for arm, minutes in costs.items():
            own = sorted(arms[arm], key=lambda r: r["seed"])
            seeds = ", ".join(f"{r['after']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for r in own)
            rate = statistics.fmean(100 * (r["after"] - r["before"]) / r["minutes"] for r in own)
            mean = statistics.fmean(r["after"] for r in own)
            by_then = statistics.fmean(reward_at(r, min(costs.values())) for r in own)
            print(f"| {env} | {arm} | {seeds} | {mean:.3f} | {minutes:.1f} | {rate:.1f} | {by_then:.2f} |")


def reward_at(row: dict[str, Any], minutes: float, width: int = 8) -> float:
    """Mean reward in play of the last `width` steps before a run had cost so many CPU-minutes."""
    reward = row["reward"]
    step = max(1, min(len(reward), round(len(reward) * minutes / row["minutes"])))
    return statistics.fmean(reward[max(0, step - width) : step])


def show_collapse(rows: list[dict[str, Any]]) -> None:
    """What came first in each run that lost half its reward: that, half the std within its groups gone, or an alarm?"""
    print("| environment | algorithm | seed | best reward | last reward | reward halved | std halved | first alarm |")
    print("|---|---|---|---|---|---|---|---|")
    quiet = alarmed = 0
    for row in rows:
        reward, std = smooth(row["reward"]), smooth(row["std"])
        alarm = min((int(text.split(":")[0].split()[-1]) for text in row["alarms"]), default=None)
        halved = first(n for n, value in enumerate(std) if value < 0.5 * std[0])
        lost = first(n for n, value in enumerate(reward) if max(reward[: n + 1]) > max(0.1, 2 * value))
        if lost:
            steps = " | ".join("" if step is None else str(step) for step in (lost, halved, alarm))
            print(f"| {row['env']} | {row['arm']} | {row['seed']} | {max(reward):.2f} | {reward[-1]:.2f} | {steps} |")
        else:
            quiet, alarmed = quiet + 1, alarmed + (alarm is not None)
    print(f"\n{alarmed} of the {quiet} runs that did not lose half their reward raised an alarm.")


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Means of the last `width` values, from the `width`th on."""
    return [statistics.fmean(values[n - width : n]) for n in range(width, len(values) + 1)]


def first(places: Iterator[int], width: int = 5) -> int | None:
    """The first place in a smoothed series, as a step."""
    return next((place + width for place in places), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--player", type=Path, default=Path("runs/quickstart/phase2/final"), help="where all runs begin"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, "choices"], default=list(ALGORITHMS))
    parser.add_argument("--envs", nargs="+", choices=ENVS, default=list(EASY_FIRST))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the rows of such a file and run nothing")
    args = parser.parse_args()
    if args.table:
        rows = read_rows(args.table)
        show(rows)
        show_collapse(rows)
        return
    if "curriculum" in args.arms and (hard := [env for env in args.envs if env not in EASY_FIRST]):
        parser.error(f"curriculum has no easy levels of {', '.join(hard)}: leave it out of --arms")
    arms = [each for arm in args.arms for each in (CHOICES if arm == "choices" else [arm])]
    args.out.mkdir(parents=True, exist_ok=True)
    player = args.player.resolve()
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(run, args.out, player, arm, env, seed, args.steps)
            for seed in args.seeds
            for env in args.envs
            for arm in arms
        ]
    rows = [one.result() for one in runs]
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)
    show_collapse(rows)


if __name__ == "__main__":
    config.run(main)
