"""Where does synchronous play stop scaling, and which mode is the right one then?  Simulated, and checked by real runs.

python benchmarks/scale_out.py --check 1 2 4 --json FILE      # real rollouts and updates beside simulated ones
python benchmarks/scale_out.py --plot docs/images/scaling.png # 1 to 1,024 devices
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks._scale_runs import GROUPS, SIZE, TURNS, costs_of_calls, run
from benchmarks.simulation import Costs, Group, Layout, Mode, Outcome, Turn, simulate

SYNCHRONOUS: tuple[Mode, ...] = ("lockstep", "refilled")


def check(processes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Seconds of real iterations on so many processes beside the simulated ones of the very same episodes.

    What a call of the engine takes is measured alone, and how many processes' work the machine does side by side; what
    a turn takes around such a call, and a token that is learnt from, on one process that refills. The rest is foretold.
    """
    from benchmarks import _measure

    costs, rows = costs_of_calls(), []
    alone = min(run(["speed"], 1, repeats))
    cores = max(count * alone / median(run(["speed"], count, repeats)) for count in processes)
    for count in processes:
        for mode in SYNCHRONOUS:
            found = run(["played", mode], count, repeats)
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


def checked(results: dict[str, Any]) -> str:
    from benchmarks import _measure

    cells = []
    for row in results["rows"]:
        cells.append([row["mode"], str(row["processes"])])
        whole = [played + learnt for played, learnt in zip(row["rollout"], row["update"], strict=True)]
        shown = [(median(row["rollout"]), median(row["simulated rollout"])), (median(whole), median(row["simulated"]))]
        for measured, simulated in shown:
            cells[-1] += [f"{measured:.2f}", f"{simulated:.2f}", f"{100 * (simulated / measured - 1):+.0f} %"]
    header = ["mode", "processes", "rollout, s", "simulated", "", "iteration, s", "simulated", ""]
    work = f"{GROUPS} x {SIZE} episodes of {TURNS} turns; medians of {results['repeats']} iterations"
    return f"{_measure.told(results)}\n{work}.\n\n{_measure.table(header, cells)}"


# ------------------------------------------------------------------------------------------------- 1 to 1,024 devices

STALENESS = 1
MODEL, DEVICE, OF_A_HOST = "Qwen/Qwen2.5-0.5B-Instruct", "H100", 8
ALL_MODES: tuple[Mode, ...] = ("lockstep", "refilled", "asynchronous")
EPISODES = (1024, 8)  # of a step: groups and members
MOST_TURNS, TOKENS, LIMIT, READ = 8, 128, 4096, (400, 40)  # a turn's mean and most; a first prompt, a later one
TAILS = {"even": 0.1, "long-tailed": 0.7, "very long-tailed": 1.4}  # sigma of the logarithm of a turn's tokens
LEARNERS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # shares of the devices of an asynchronous run; the best one is taken
DEVICES = [2**n for n in range(11)]


def of_many(count: int) -> Costs:
    """Of each of so many devices, by the roofline of `--plan`; a run in bfloat16 with float32 weights."""
    from posttrain.config.loading import resolve
    from posttrain.config.starpo import StarPORun
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
    # one graph for a whole step (vLLM, or CUDA graphs): launched from Python, a small model waits for its launches
    one_row, rows, seen = (cost.decodes(1, *each) for each in ((1, 0), (many, 0), (many, 1000)))
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
    given = parser.parse_args()
    if given.check or not given.plot:
        from benchmarks import _measure

        results = check(given.check or [1, 2], given.repeats)
        _measure.publish(results, checked(results), given.json)
    if given.plot:
        from benchmarks import _measure

        results = many()
        plot(results, given.plot)
        _measure.publish(results, told(results), given.json)


if __name__ == "__main__":
    main()
