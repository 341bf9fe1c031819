"""How far does a small model come on RAGEN's level distributions, with demonstrations alone and with StarPO after them?

    python benchmarks/long/ragen_levels.py --jobs 2                           # hours; go on with it whenever you like
    python benchmarks/long/ragen_levels.py --envs sokoban-1 --seeds 0
    python benchmarks/long/ragen_levels.py --table benchmarks/results/ragen_levels.jsonl

A run is a ConvGPT from scratch, phase 1 on what the expert plays, and phase 3 from there: 25 turns of one action. Both
models are played on the same 256 test levels, which neither training nor the choice of the best checkpoint has seen. A
finished stage is not run again, one that was cut goes on from its last checkpoint, and a finished run adds its row to
the results. Cost is CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import _measure
from benchmarks._rows import read_rows
from posttrain import config
from posttrain.files import write_whole
from posttrain.metrics import wilson
from posttrain.runtime.checkpoint import RUN_CONFIG

ROOT = Path(__file__).resolve().parents[2]
TURNS = 25
LEVELS = 256
# No token crosses the border of one of these: so every cell, every number below 1000 and every word is a token.
PIECES = r"(?:system|user|assistant)\n| ?\p{Lu}?\p{Ll}+| ?\p{Lu}| ?\d{1,3}| ?[^\s\p{L}\d]+|\s"
VOCABULARY = 512
SMALL: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL |= {"head_dim": 16, "intermediate_size": 192, "max_position_embeddings": 512}  # a decoder of width 64
SMALL |= {"rope_theta": 100.0}
LARGER = SMALL | {"hidden_size": 576, "head_dim": 36, "intermediate_size": 432}  # of width 144


class Published(NamedTuple):
    """Qwen2.5-0.5B-Instruct in SCOUT's table: multi-turn PPO as RAGEN trains, SPA, SCOUT's SFT alone, SFT and RL."""

    ppo: float
    spa: float
    sft: float
    rl: float


class Game(NamedTuple):
    """An environment with the settings of its runs."""

    name: str
    options: dict[str, Any]
    thought: str  # of `posttrain env demos`
    shape: dict[str, Any]
    published: Published | None = None
    player: str = "expert:0.85,random:0.15"
    episodes: int = 16_000  # of demonstrations
    sft_steps: int = 3000  # of 64 turns
    rl_steps: int = 100
    rl_groups: int = 64  # of 8 episodes, a step
    rl_filter: Mapping[str, Any] = MappingProxyType({"strategy": "top_k", "value": 0.5})
    reply: int = 64  # tokens of a turn


GRID = {"observation": "grid", "distribution": "ragen"}
PUSH = GRID | {"reward": "sparse"}
GAMES = {
    "frozen-lake": Game("frozen_lake", GRID, "plan", SMALL, Published(0.39, 0.55, 0.89, 0.93)),
    "slippery": Game(
        "frozen_lake",
        GRID | {"slippery": True, "success_rate": 0.8},
        "cues",
        SMALL,
        Published(0.24, 0.47, 0.46, 0.88),
        rl_filter={"strategy": "none"},  # where chance decides, a group's std says little about what was played
    ),
    "sokoban-1": Game(
        "sokoban",
        PUSH | {"boxes": 1},
        "plan",
        SMALL,
        Published(0.15, 0.37, 0.58, 0.98),
        episodes=30_000,
        sft_steps=6000,
    ),
    "sokoban-2": Game(
        "sokoban",
        PUSH | {"boxes": 2},
        "plan",
        LARGER,
        Published(0.06, 0.07, 0.52, 0.53),
        episodes=30_000,
        sft_steps=2500,
        rl_steps=50,
        rl_groups=32,
    ),
    "sudoku": Game(
        "sudoku",
        {"size": 4, "reward": "sparse"},
        "cues",
        SMALL,
        Published(0.0, 0.18, 0.63, 0.80),
        player="expert:0.95,random:0.05",  # the second wrong number ends an episode
        episodes=30_000,
        sft_steps=6000,
    ),
    "2048": Game("game_2048", {"target": 32}, "none", SMALL, episodes=6000, rl_steps=50, rl_groups=32),
    "rubiks-cube": Game("rubiks_cube", {}, "plan", SMALL),
}
ONE_SEED = ("2048", "rubiks-cube")
SAMPLINGS = {"sampled": 1.0, "greedy": 0.0}  # by temperature


# -- the stages of a run -----------------------------------------------------------------------------------------------


class Stages:
    """What a run has done, in `stages.json` of its folder: CPU seconds and results of each stage."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "stages.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.done: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, stage: str, command: Sequence[str | Path]) -> None:
        """One process of one thread; its CPU time counts however it ends, unless this process is killed first."""
        entry = self.done.setdefault(stage, {"seconds": 0.0, "finished": False})
        if entry["finished"]:
            return
        if STOPPED.is_set():
            raise SystemExit(f"{self.folder.name} was stopped before {stage}.")
        log = self.folder / f"{stage}.log"
        with log.open("a") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, cwd=ROOT, env=environment)
            RUNNING.add(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            RUNNING.discard(process.pid)
        entry["seconds"] += usage.ru_utime + usage.ru_stime
        entry["finished"] = status == 0
        self.save()
        if status:
            raise SystemExit(
                f"{self.folder.name}: {stage} did not end well, see {log}. If this script was killed before,"
                " the process that it left may still be at work: wait for it."
            )

    def save(self) -> None:
        write_whole(self.file, [json.dumps(self.done, indent=1)])

    def train(self, stage: str, script: str, settings: dict[str, Any]) -> None:
        """A training script, from its last checkpoint if it has begun before."""
        out = self.folder / stage
        file = self.folder / f"{stage}.yaml"
        file.write_text(yaml.safe_dump(settings | {"output_dir": str(out)}, sort_keys=False))
        begun = (out / RUN_CONFIG).exists()
        self.run(stage, [sys.executable, ROOT / script, "--config", file, *(["--resume"] if begun else [])])


RUNNING: set[int] = set()  # processes of stages
STOPPED, WRITING = threading.Event(), threading.Lock()


def pass_on(number: int, _: object) -> None:
    """Training scripts save a checkpoint at a signal; this process ends as they do."""
    STOPPED.set()
    for pid in list(RUNNING):
        os.kill(pid, number)


def common(seed: int, model: Path) -> dict[str, Any]:
    return {"seed": seed, "device": "cpu", "report_to": "none", "model": {"name_or_path": str(model)}}


def phase1(game: Game, seed: int, folder: Path) -> dict[str, Any]:
    return common(seed, folder / "base") | {
        "data": {
            "max_length": 512,
            "eval_rows": 512,
            "decontaminate": False,
            "sources": [{"kind": "messages", "path": str(folder / "turns.jsonl")}],
        },
        "trainer": {
            "learning_rate": 2e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 100,
            "max_steps": game.sft_steps,
            "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 64,
            "train_sampling_strategy": "group_by_length",
            "adam_beta2": 0.98,
            "weight_decay": 0.01,
            "packing": False,
            "bf16": False,
            "gradient_checkpointing": False,
            "logging_steps": 50,
            "eval_strategy": "steps",
            "eval_steps": 500,
            "save_strategy": "steps",
            "save_steps": 250,
            "save_total_limit": 2,
        },
    }


def phase3(game: Game, seed: int, folder: Path, start: Path) -> dict[str, Any]:
    return common(seed, start) | {
        "envs": [{"name": game.name, "options": game.options}],
        "protocol": {"style": "compact", "max_turns": TURNS},
        "rollout": {
            "groups": game.rl_groups,
            "num_generations": 8,
            "max_completion_length": game.reply,
            "max_context": 512,
            "context": "last_k",  # every state is whole: the turns before it tell nothing more
            "context_turns": 1,
        },
        "algorithm": {
            "preset": "starpo-s",
            "advantage": "gigpo",
            "entropy_coef": 0.0,
            "num_iterations": 1,
            "minibatches": 2,
            "filter": dict(game.rl_filter),
        },
        "trainer": {
            "learning_rate": 2e-4,
            "lr_scheduler_type": "warmup_stable_decay",
            "warmup_steps": 5,
            "max_steps": game.rl_steps,
            "adam_beta2": 0.99,
            "micro_batch_tokens": 4096,
            "bf16": False,
        },
        "evaluation": {"every": 20, "episodes": LEVELS, "temperature": 1.0, "final_episodes": LEVELS},
        "checkpoint": {"every": 10},
        "diagnostics": {"every": 0},
    }


def write_turns(episodes: Path, turns: Path) -> int:
    """Each trained answer as a row of its own, behind the rules and the state that it answers: what is seen in play."""
    count, part = 0, turns.with_suffix(".part")
    with episodes.open(encoding="utf-8") as read, part.open("w", encoding="utf-8") as write:
        for line in read:
            system, *others = json.loads(line)["messages"]
            for state, answer in zip(others[::2], others[1::2], strict=True):
                if "mask_spans" not in answer:
                    write.write(json.dumps({"messages": [system, state, answer]}) + "\n")
                    count += 1
    os.replace(part, turns)
    return count


def write_base(game: Game, turns: Path, out: Path, seed: int) -> None:
    """A ConvGPT of random weights. The rules, the same in every prompt, are a single token of its tokenizer."""
    from posttrain.data.embedded.base_model import TAGS, new_base

    def texts() -> Iterator[str]:
        with turns.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number < 20_000:
                    yield from (f"{m['role']}\n{m['content']}" for m in json.loads(line)["messages"][1:])

    with turns.open(encoding="utf-8") as lines:
        rules = json.loads(next(lines))["messages"][0]["content"]
    new_base(out, texts(), seed, vocabulary=VOCABULARY, pieces=PIECES, tags=[*TAGS, rules], **game.shape)


def demonstrations(game: Game, seed: int, out: Path) -> list[str | Path]:
    given = [f"{game.name}.{key}={json.dumps(value)}" for key, value in game.options.items()]
    command: list[str | Path] = [sys.executable, "-m", "envs.demos", game.name, "--n", str(game.episodes)]
    command += ["--player", game.player, "--thought", game.thought, "--plan", str(TURNS), "--turns", str(TURNS)]
    command += ["--split", "train", "--style", "compact", "--seed", str(seed), "--out", out, "--overwrite"]
    return command + (["--options", *given] if given else [])


def measure(file: Path) -> dict[str, Any]:
    """Test levels that the model of a config of phase 3 wins, sampled and greedy, by phase 3's `evaluate`; its size."""
    import torch

    import train_phase3_starpo as script
    from posttrain.config.loading import resolve
    from posttrain.config.starpo import StarPORun
    from posttrain.models import loading as models
    from posttrain.rollout.episodes import open_sampler

    _measure.threads()
    found: dict[str, Any] = {}
    for sampling, temperature in SAMPLINGS.items():
        cfg = resolve(StarPORun, file, [f"evaluation.temperature={temperature}"])
        model, chat = models.load(cfg.model, device="cpu", chat_template=None, training=False)
        sampler = open_sampler(model.eval(), chat, cfg.rollout.engine, cfg.rollout.max_context)
        with torch.no_grad():
            won = script.evaluate(cfg, sampler, chat, "test", LEVELS).won
        found[sampling] = sum(*won.values())
        found["parameters"] = sum(p.numel() for p in model.parameters())
    return found


def run(out: Path, label: str, seed: int) -> dict[str, Any]:
    """A whole run, or what is left of it; its row of the table."""
    game, folder = GAMES[label], out / f"{label}-{seed}"
    stages = Stages(folder)
    here = [sys.executable, __file__]
    stages.run("demonstrations", demonstrations(game, seed, folder / "episodes.jsonl"))
    stages.run("base", [*here, "--stage", "base", label, str(seed), folder])
    stages.train("sft", "train_phase1_sft.py", phase1(game, seed, folder))
    stages.train("rl", "train_phase3_starpo.py", phase3(game, seed, folder, folder / "sft" / "final"))
    row = {"env": label, "seed": seed}
    for stage in ("sft", "rl"):
        file = folder / f"measure-{stage}.yaml"
        own = phase3(game, seed, folder, folder / stage / "final") | {"output_dir": str(folder / "unused")}
        file.write_text(yaml.safe_dump(own, sort_keys=False))
        stages.run(f"measure-{stage}", [*here, "--stage", "measure", file, folder / f"{stage}.json"])
        row |= {stage: json.loads((folder / f"{stage}.json").read_text())}
    row["minutes"] = {stage: round(entry["seconds"] / 60, 2) for stage, entry in stages.done.items()}
    return row | baselines(game) | {key: _measure.surroundings()[key] for key in ("commit", "machine")}


def baselines(game: Game) -> dict[str, Any]:
    """What chance and the expert win on the levels that `evaluate` plays, and what the best player would."""
    import envs
    from envs.players import play_scripted
    from envs.protocol import Protocol
    from posttrain.config.shared import EnvSection
    from posttrain.evaluation.tasks import held_out_levels

    env = envs.make(game.name, **game.options)
    limits, found, best = Protocol.of(env, max_turns=TURNS), {"random": 0, "expert": 0}, []
    for seed in held_out_levels(EnvSection(name=game.name, options=game.options), "test", LEVELS):
        for player in found:
            found[player] += play_scripted(env, player, limits, seed, "test").success
        if env.has("optimal_success"):
            env.reset(seed=seed, options={"split": "test"})
            best.append(env.optimal_success(TURNS))
    return found | {"optimum": fmean(best) if best else None, "of": LEVELS}


# -- the table ---------------------------------------------------------------------------------------------------------


def share(won: int, of: int) -> str:
    low, high = wilson(won, of)
    return f"{won / of:.2f} [{low:.2f}, {high:.2f}]"


def show(rows: Sequence[dict[str, Any]]) -> str:
    """For each environment and sampling: what SCOUT's table has, and what our seeds win before and after phase 3."""
    header = ["environment", "PPO", "SPA", "SCOUT: SFT", "SCOUT: SFT + RL", "decoding", "ours, SFT: seeds", "mean"]
    header += ["ours, SFT + RL: seeds", "mean", "random", "expert", "optimum", "parameters", "CPU-minutes a run"]
    cells = []
    for label, game in GAMES.items():
        own = sorted((row for row in rows if row["env"] == label), key=lambda row: row["seed"])
        if not own:
            continue
        one = own[0]
        theirs = [f"{figure:.2f}" for figure in game.published] if game.published else ["-"] * 4
        others = [share(one[player], one["of"]) for player in ("random", "expert")]
        others += ["-" if one["optimum"] is None else f"{one['optimum']:.3f}"]
        minutes = fmean(sum(row["minutes"].values()) for row in own)
        others += [f"{one['sft']['parameters'] / 1e6:.2f}M", f"{minutes:.0f}"]
        for sampling in SAMPLINGS:
            ours = []
            for stage in ("sft", "rl"):
                ours.append(", ".join(share(row[stage][sampling], row["of"]) for row in own))
                ours.append(f"{fmean(row[stage][sampling] / row['of'] for row in own):.3f}")
            cells.append([label, *theirs, sampling, *ours, *others])
    return _measure.table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/ragen_levels"))
    parser.add_argument("--envs", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one core each")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "ragen_levels.jsonl")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the rows of such a file and run nothing")
    parser.add_argument("--stage", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage:
        stage(*given.stage)
        return
    if given.table:
        print(show(read_rows(given.table)))
        return
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, lambda *_: STOPPED.set())  # which a terminal sends to the stages as well
    wanted = [(label, seed) for seed in given.seeds for label in given.envs if seed == 0 or label not in ONE_SEED]
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(add_row, given.results, given.out.resolve(), label, seed) for label, seed in wanted]
    for each in runs:
        each.result()
    print(show(rows_so_far(given.results)))


def rows_so_far(results: Path) -> list[dict[str, Any]]:
    return read_rows(results) if results.exists() else []


def add_row(results: Path, out: Path, label: str, seed: int) -> None:
    """A run whose row is not there yet."""
    if STOPPED.is_set() or any((row["env"], row["seed"]) == (label, seed) for row in rows_so_far(results)):
        return
    line = json.dumps(run(out, label, seed))
    with WRITING, results.open("a") as file:
        file.write(f"{line}\n")


def stage(name: str, *given: str) -> None:
    if name == "base":
        label, seed, folder = given[0], int(given[1]), Path(given[2])
        write_turns(folder / "episodes.jsonl", folder / "turns.jsonl")
        shutil.rmtree(folder / "base", ignore_errors=True)
        write_base(GAMES[label], folder / "turns.jsonl", folder / "base", seed)
    else:
        Path(given[1]).write_text(json.dumps(measure(Path(given[0]))))


if __name__ == "__main__":
    config.run(main)
