"""Real iterations of phase 3 beside which `scale_out.py` puts simulated ones, each in processes of its own.

python benchmarks/_scale_runs.py played MODE REPEATS OUT         # in each process of a synchronous run
python benchmarks/_scale_runs.py speed REPEATS OUT               # in each of some processes: calls of the engine alone
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.simulation import Costs, Group, Turn

VOCABULARY, STOPS = 512, 16  # of 512 about equally likely tokens 16 end a turn: 32 tokens on average, geometric
LONGEST, TURNS = 160, 3  # tokens of a turn, turns of an episode
GROUPS, SIZE = 16, 8


def played(mode: str, repeats: int, out: str) -> None:
    """In each process of a run: iterations of phase 3 in one mode; process 0 writes their seconds and their lengths."""
    import iteration

    import train_phase3_starpo as phase3
    from posttrain.rollout.engines import slots
    from posttrain.runtime import parallel
    from posttrain.starpo.run import make_learner

    if mode == "lockstep":
        slots.REFILL_BELOW = 0.0  # a call of the engine ends when its last row is done
    model, sampler, chat = engine()
    parallel.join(model.device)
    cfg = iteration.config(GROUPS, SIZE, TURNS, LONGEST)
    learner = make_learner(cfg, model, chat)
    found: dict[str, list[Any]] = {"rollout": [], "update": [], "groups": []}
    for step in range(1, repeats + 2):  # the first is not counted
        parallel.barrier()
        start = time.perf_counter()
        groups = phase3.rollout(cfg, sampler, chat, step)
        rolled_out = time.perf_counter()
        for group in groups:
            for sample, trajectory in enumerate(group):
                trajectory.turn_rewards[-1] = iteration.won(sample)
        phase3.update(cfg, learner, phase3.collect(cfg, learner, groups, phase3.score_and_filter(cfg, groups)), step)
        parallel.barrier()
        if step > 1:
            found["rollout"].append(rolled_out - start)
            found["update"].append(time.perf_counter() - rolled_out)
            found["groups"].append([turns_of(group) for group in groups])
    if parallel.rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    parallel.stop()


def engine() -> tuple[Any, Any, Any]:
    """A small Llama of random weights, the slot engine around it, and a chat of words."""
    from benchmarks import _measure
    from posttrain.rollout.engines.slots import SlotSampler
    from posttrain.runtime import hardware

    _measure.threads()
    hardware.keep_freed_memory()  # as a script does that loads a model
    model = _measure.model_of("llama", _measure.SHAPES["tiny"]["llama"])
    return model, SlotSampler(model, range(VOCABULARY - STOPS, VOCABULARY), _measure.PAD), _measure.words(VOCABULARY)


def turns_of(group: Sequence[Any]) -> Group:
    """What the engine had to do for the episodes of a group, whose members share their first prompt."""
    episodes = []
    for sample, trajectory in enumerate(group):
        (segment,), end, turns = trajectory.segments, 0, []
        for until in segment.turn_ends:
            write = sum(segment.mask[end:until])
            read = until - end - write
            turns.append(Turn(read, write) if end or sample == 0 else Turn(0, write, copied=read))
            end = until
        episodes.append(turns)
    return episodes


def costs_of_calls() -> Costs:
    """Seconds of this machine for a step, a row, a token in view and a token that is read: least squares."""
    from posttrain.types import SamplingParams

    _, sampler, _ = engine()
    sampler.stop_ids = [VOCABULARY]  # nothing ends a turn
    rows, seconds, tokens = [], [], 24
    reads, reading = [], []
    for count in (4, 16, 64, 128):
        for length in (64, 256):
            best = [math.inf, math.inf]
            for repeat in range(3):
                prompts = [
                    [random.Random(1000 * repeat + n).randrange(VOCABULARY) for _ in range(length)]
                    for n in range(count)
                ]
                times = []
                handles = sampler.open(prompts)
                for new in (1, tokens):
                    start = time.perf_counter()
                    sampler.sample(handles, SamplingParams(max_new_tokens=new, temperature=1.0), range(count))
                    times.append(time.perf_counter() - start)
                sampler.close(handles)
                best = [min(pair) for pair in zip(best, times, strict=True)]
            seen = sum(length + t for t in range(1, tokens + 1))
            rows.append([tokens, tokens * count, count * seen])
            seconds.append(best[1])
            reads.append(count * length)
            reading.append(best[0] - best[1] / tokens)
    # relative errors: a small call counts as much as a large one
    scaled = np.array(rows) / np.array(seconds)[:, None]
    step, row, context = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
    return Costs(step, max(0.0, row), max(0.0, context), read=median(np.array(reading) / np.array(reads)))


def speed(repeats: int, out: str) -> None:
    """In each process of a run: the same calls of the engine, side by side; process 0 writes the seconds of one."""
    from posttrain.runtime import parallel
    from posttrain.types import SamplingParams

    model, sampler, _ = engine()
    sampler.stop_ids = [VOCABULARY]
    parallel.join(model.device)
    seconds = []
    for _ in range(repeats):
        handles = sampler.open([[n % VOCABULARY for n in range(64)]] * 32)
        parallel.barrier()
        start = time.perf_counter()
        sampler.sample(handles, SamplingParams(max_new_tokens=128, temperature=1.0), range(32))
        parallel.barrier()
        seconds.append(time.perf_counter() - start)
        sampler.close(handles)
    if parallel.rank() == 0:
        Path(out).write_text(json.dumps(seconds), encoding="utf-8")
    parallel.stop()


def run(what: Sequence[str], processes: int, repeats: int) -> Any:
    """`played` in a mode, or `speed`, in so many processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-m",
            "posttrain.runtime.parallel",
            "--standalone",
            "--nproc_per_node",
            str(processes),
        ]
        command += [__file__, *what, str(repeats), str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])
        if done.returncode:
            sys.exit(f"{' '.join(what)} on {processes} processes:\n{done.stderr[-2000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def main(what: str, *given: str) -> None:
    match what:
        case "played":
            mode, repeats, out = given
            played(mode, int(repeats), out)
        case "speed":
            repeats, out = given
            speed(int(repeats), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
