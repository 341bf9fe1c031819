"""Where does synchronous play stop scaling, and which mode is the right one then?  Simulated, and checked by real runs.

python benchmarks/scale_out.py --check 1 2 4 --json FILE      # real rollouts and updates beside simulated ones
python benchmarks/scale_out.py --plot docs/images/scaling.png # 1 to 1,024 devices
"""

from __future__ import annotations

import argparse
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
from benchmarks.simulation import Costs, Group, Layout, Mode, Outcome, Turn, simulate

VOCABULARY, STOPS = 512, 16  # of 512 about equally likely tokens 16 end a turn: 32 tokens on average, geometric
LONGEST, TURNS = 160, 3  # tokens of a turn, turns of an episode
GROUPS, SIZE = 16, 8
SYNCHRONOUS: tuple[Mode, ...] = ("lockstep", "refilled")


# ---------------------------------------------------------------------------------------------- real runs, in processes


def played(mode: str, repeats: int, out: str) -> None:
    """In each process of a run: iterations of phase 3 in one mode; process 0 writes their seconds and their lengths."""
    import iteration

    import train_phase3_starpo as phase3
    from posttrain import parallel
    from posttrain.sampler import slots
    from posttrain.starpo_run import make_learner

    if mode == "lockstep":
        slots.REFILL_BELOW = 0.0  # a call of the engine ends when its last row is done
    model, sampler, chat = engine()
    parallel.start(model.device)
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
    from posttrain import compat
    from posttrain.sampler import SlotSampler

    _measure.threads()
    compat.keep_freed_memory()  # as a script does that loads a model
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
    from posttrain import parallel
    from posttrain.types import SamplingParams

    model, sampler, _ = engine()
    sampler.stop_ids = [VOCABULARY]
    parallel.start(model.device)
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


def check(processes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Seconds of real iterations on so many processes beside the simulated ones of the very same episodes.

    What a call of the engine takes is measured alone, and how many processes' work the machine does side by side; what
    a turn takes around such a call, and a token that is learnt from, on one process that refills. The rest is foretold.
    """
    from benchmarks import _measure

    costs, rows = costs_of_calls(), []
    alone = min(run("speed", 1, repeats))
    cores = max(count * alone / median(run("speed", count, repeats)) for count in processes)
    for count in processes:
        for mode in SYNCHRONOUS:
            found = run(mode, count, repeats)
            iterations = [[[[Turn(*turn) for turn in e] for e in g] for g in groups] for groups in found["groups"]]
            layout = Layout(count, cores=cores)
            rows.append({"mode": mode, "processes": count, "rollout": found["rollout"], "update": found["update"]})
            rows[-1] |= {"iterations": iterations, "layout": layout}
    fit = next(row for row in rows if row["mode"] == "refilled" and row["processes"] == 1)
    seconds = [simulate("refilled", [groups], costs, fit["layout"]).seconds for groups in fit["iterations"]]
    turns = [sum(len(e) for g in groups for e in g) for groups in fit["iterations"]]
    left = (median(fit["rollout"]) - median(seconds)) / median(turns)
    tokens = [sum(sum(t) for g in groups for e in g for t in e) for groups in fit["iterations"]]
    costs = costs._replace(turn=max(0.0, left), learn=median(fit["update"]) / median(tokens))
    for row in rows:
        iterations, layout = row.pop("iterations"), row.pop("layout")
        playing = costs._replace(learn=0.0)
        row["simulated rollout"] = [simulate(row["mode"], [each], playing, layout).seconds for each in iterations]
        row["simulated"] = [simulate(row["mode"], [each], costs, layout).seconds for each in iterations]
    return _measure.surroundings() | {"repeats": repeats, "costs": costs._asdict(), "cores": cores, "rows": rows}


def run(mode: str, processes: int, repeats: int) -> Any:
    """`played` or `speed` in so many processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "posttrain.parallel", "--standalone", "--nproc_per_node", str(processes)]
        command += [__file__, "--only", mode, str(repeats), str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])
        if done.returncode:
            sys.exit(f"{mode} on {processes} processes:\n{done.stderr[-2000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def checked(results: dict[str, Any]) -> str:
    from benchmarks import _measure

    cells = []
    for row in results["rows"]:
        both = [median(row["rollout"]), median(row["simulated rollout"])]
        whole = [median(a + b for a, b in zip(row["rollout"], row["update"], strict=True)), median(row["simulated"])]
        cells.append([row["mode"], str(row["processes"])])
        for measured, simulated in (both, whole):
            cells[-1] += [f"{measured:.2f}", f"{simulated:.2f}", f"{100 * (simulated / measured - 1):+.0f} %"]
    header = ["mode", "processes", "rollout, s", "simulated", "", "iteration, s", "simulated", ""]
    work = f"{GROUPS} x {SIZE} episodes of {TURNS} turns; medians of {results['repeats']} iterations"
    return f"{_measure.told(results)}\n{work}.\n\n{_measure.table(header, cells)}"


# ------------------------------------------------------------------------------------------------- 1 to 1,024 devices

MODEL, DEVICE, OF_A_HOST = "Qwen/Qwen2.5-0.5B-Instruct", "H100", 8
ALL_MODES: tuple[Mode, ...] = ("lockstep", "refilled", "asynchronous")
EPISODES = (1024, 8)  # of a step: groups and members
MOST_TURNS, TOKENS, LIMIT, READ = 8, 128, 4096, (400, 40)  # a turn's mean and most; a first prompt, a later one
TAILS = {"even": 0.1, "long-tailed": 0.7, "very long-tailed": 1.4}  # sigma of the logarithm of a turn's tokens
STALENESS = 1
LEARNERS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # shares of the devices of an asynchronous run; the best one is taken
DEVICES = [2**n for n in range(11)]


def of_many(count: int) -> Costs:
    """Of each of so many devices, by the roofline of `--plan`; a run in bfloat16 with float32 weights."""
    from posttrain.config import StarPORun, resolve
    from posttrain.plan.devices import Fleet, fleets
    from posttrain.plan.known_models import config_of
    from posttrain.plan.parts import Numbers
    from posttrain.plan.seconds import Cost
    from posttrain.plan.shape import Shape

    config = Path(__file__).parents[1] / "configs" / "phase3_starpo.yaml"
    cfg = resolve(StarPORun, config, [f"model.name_or_path={MODEL}", "trainer.bf16=true"])
    shape = Shape.of(config_of(cfg.model, config), cfg.model)
    (one,) = fleets(DEVICE)
    fleet = Fleet(one.device, hosts=-(-count // OF_A_HOST), each=min(count, OF_A_HOST))
    cost, many = Cost(shape, Numbers.of(cfg), fleet), 256
    # one graph for a whole step (vLLM, or rollout.compile): launched from Python, a small model waits for its launches
    one_row, rows, seen = (cost.decodes(1, *each, compiled=True) for each in ((1, 0), (many, 0), (many, 1000)))
    length = READ[0] + MOST_TURNS / 2 * (TOKENS + READ[1])
    return Costs(
        step=one_row,
        row=(rows - one_row) / (many - 1),
        context=(seen - rows) / (many * 1000),
        read=cost.reads(16384, 0, length / 2) / 16384,
        turn=1e-4,
        update=cost.steps(shape.parameters),
        learn=cost.learns(16384, 8192, length / 2, pieces=1) / 16384,
        transfer=2 * shape.parameters / fleet.wire,
    )


def drawn(sigma: float, steps: int, groups: int = EPISODES[0]) -> list[list[Group]]:
    """Episodes of 1 to MOST_TURNS turns, whose tokens are lognormal with the same mean for every sigma."""
    rng, mu = random.Random(0), math.log(TOKENS) - sigma**2 / 2

    def episode(sample: int) -> list[Turn]:
        writes = [min(LIMIT, 1 + int(rng.lognormvariate(mu, sigma))) for _ in range(rng.randint(1, MOST_TURNS))]
        first = Turn(READ[0], writes[0]) if sample == 0 else Turn(0, writes[0], copied=READ[0])
        return [first, *(Turn(READ[1], write) for write in writes[1:])]

    return [[[episode(sample) for sample in range(EPISODES[1])] for _ in range(groups)] for _ in range(steps)]


def best(mode: Mode, iterations: list[list[Group]], devices: int, costs: Costs) -> Outcome | None:
    """The outcome in this mode; with the best share of learners where some devices do not play."""
    layouts = [Layout(devices)]
    if mode == "asynchronous":
        learners = {max(1, round(share * devices)) for share in LEARNERS}
        layouts = [Layout(devices, number, staleness=STALENESS) for number in sorted(learners) if number < devices]
    found = [simulate(mode, iterations, costs, layout, skip=1) for layout in layouts]
    return min(found, key=lambda outcome: outcome.seconds, default=None)


def many() -> dict[str, Any]:
    """Seconds of an iteration and what share of the devices works, for every tail, mode and number of devices."""
    rows = []
    for tail, sigma in TAILS.items():
        iterations = drawn(sigma, steps=4)
        for devices in DEVICES:
            costs = of_many(devices)
            for mode in ALL_MODES:
                outcome = best(mode, iterations, devices, costs)
                if outcome is not None:
                    rows.append({"tail": tail, "devices": devices, "mode": mode} | outcome._asdict())
    return {"model": MODEL, "device": DEVICE, "rows": rows}


def plot(results: dict[str, Any], file: Path) -> None:
    """A column for each tail: seconds of an iteration above, the share of the devices that works below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from posttrain.report.tables import COLOURS

    figure, axes = pyplot.subplots(2, len(TAILS), figsize=(11, 5.4), sharex=True, sharey="row")
    for column, tail in enumerate(TAILS):
        above, below = axes[:, column]
        for mode, colour in zip(ALL_MODES, COLOURS, strict=False):
            own = [row for row in results["rows"] if (row["tail"], row["mode"]) == (tail, mode)]
            xs = [row["devices"] for row in own]
            above.plot(xs, [row["seconds"] for row in own], "o-", color=colour, markersize=4, label=mode)
            below.plot(xs, [100 * row["busy"] for row in own], "o-", color=colour, markersize=4)
            if mode == "refilled":
                above.plot(xs, [own[0]["seconds"] / x for x in xs], ":", color="0.6", label="linear")
        above.set(xscale="log", yscale="log", title=f"{tail} answers (sigma {TAILS[tail]})")
        below.set(ylim=(0, 103), xlabel="devices")
        below.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
        below.minorticks_off()
        for axis in (above, below):
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("seconds of an iteration")
    axes[1, 0].set_ylabel("devices at work, %")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def told(results: dict[str, Any]) -> str:
    """For every tail and number of devices: seconds of an iteration in each mode."""
    from benchmarks import _measure

    found = {(row["tail"], row["devices"], row["mode"]): row for row in results["rows"]}
    cells = []
    for tail in TAILS:
        for devices in sorted({row["devices"] for row in results["rows"]}):
            own = [found.get((tail, devices, mode)) for mode in ALL_MODES]
            shown = [f"{row['seconds']:.1f} ({100 * row['busy']:.0f} %)" if row else "-" for row in own]
            cells.append([tail, f"{devices:,}", *shown])
    return _measure.table(["answers", "devices", *(f"{mode}, s" for mode in ALL_MODES)], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", type=int, nargs="+", metavar="N", help="real runs on so many processes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="simulate 1 to 1,024 devices, and draw it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        mode, repeats, out = given.only
        return speed(int(repeats), out) if mode == "speed" else played(mode, int(repeats), out)
    if given.check:
        from benchmarks import _measure

        results = check(given.check, given.repeats)
        _measure.publish(results, checked(results), given.json)
    if given.plot:
        from benchmarks import _measure

        results = many()
        plot(results, given.plot)
        _measure.publish(results, told(results), given.json)


if __name__ == "__main__":
    main()
