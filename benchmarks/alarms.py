"""How often does a healthy run of phase 3 raise an alarm, and how soon is a collapse announced?  Simulated runs.

    python benchmarks/alarms.py --json benchmarks/results/alarms.json     # ten minutes on one core
    python benchmarks/alarms.py --runs 20                                  # a look

The runs are those of _alarm_runs.py: rows of metrics.jsonl with the sampling noise of their batch, 200 steps each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import _measure
from benchmarks._alarm_runs import BATCHES, CELLS, COLLAPSING, DROPS, EPISODES, HEALTHY, STEPS, Cell, Run, simulate
from posttrain.metrics import wilson
from posttrain.starpo.monitoring import alarms
from posttrain.starpo.monitoring.alarm_rules import Sizes
from posttrain.starpo.monitoring.alarms import Alarm
from posttrain.starpo.run_state import AlarmState

RUNS = 200  # of a cell: with 10 of them stopped or warned, Wilson's interval is 2.7 to 9.0 %
FIRST = 20_000  # seed: the limits were chosen on runs with smaller ones


def watched(run: Run, groups: int, samples: int) -> list[Alarm]:
    """The alarms of a run, as phase 3 would raise them."""
    state: AlarmState = {}
    sizes = Sizes(groups=groups, samples=samples, evaluation_episodes=EPISODES, steps=STEPS)
    return [alarm for step, row in run.rows for alarm in alarms.advance(state, step, row, sizes)]


def false_alarms(kind: str | Cell, batch: tuple[int, int], runs: int) -> dict[str, Any]:
    """Of so many healthy runs: how many raise any alarm, how many one that stops them, and which."""
    found = [watched(simulate(kind, *batch, seed), *batch) for seed in range(FIRST, FIRST + runs)]
    return {
        "kind": kind.name if isinstance(kind, Cell) else f"{kind}, {batch[0]} x {batch[1]}",
        "runs": runs,
        "any": sum(map(bool, found)),
        "stop": sum(any(alarm.severity == "stop" for alarm in each) for each in found),
        "alarms": dict(Counter(name for each in found for name in {alarm.name for alarm in each}).most_common()),
    }


def announcements(kind: str, batch: tuple[int, int], runs: int) -> dict[str, Any]:
    """Of so many collapsing runs: how many are announced between the begin and the halving of the success.

    delays: steps from the begin to the first alarm after it, the whole rest of the run where there is none; halved: to
    the halving of the true success. early: runs with an alarm before the collapse has begun.
    """
    delays, halved, in_time, early = [], [], 0, 0
    for seed in range(FIRST, FIRST + runs):
        run = simulate(kind, *batch, seed)
        steps = [alarm.step for alarm in watched(run, *batch)]
        first = min((step for step in steps if step >= run.begins), default=STEPS + 1)
        in_time += first < run.halved
        early += any(step < run.begins for step in steps)
        delays.append(first - run.begins)
        halved.append(run.halved - run.begins)
    return {
        "kind": kind, "batch": f"{batch[0]} x {batch[1]}", "runs": runs, "in_time": in_time, "early": early,
        "delays": sorted(delays), "halved": sorted(halved),
    }  # fmt: skip


def share(count: int, runs: int) -> str:
    low, high = wilson(count, runs)
    return f"{count / runs:.1%} [{low:.1%}, {high:.1%}]"


def markdown(results: dict[str, Any]) -> str:
    """Two tables: healthy runs, and collapses."""
    healthy = [
        [row["kind"], share(row["stop"], row["runs"]), share(row["any"], row["runs"]),
         ", ".join(f"{name} {count}" for name, count in row["alarms"].items())]
        for row in results["healthy"]
    ]  # fmt: skip
    collapses = [
        [f"{row['kind']}, {row['batch']}", share(row["in_time"], row["runs"]), str(row["early"]),
         *(f"{median(row[key]):g}" for key in ("delays", "halved")), str(row["delays"][int(0.9 * row["runs"])])]
        for row in results["collapses"]
    ]  # fmt: skip
    first = _measure.table(["healthy runs", "stopped", "any alarm", "which"], healthy)
    header = ["collapse", "announced in time", "early", "steps to the alarm", "to half of the success", "9th decile"]
    return f"{_measure.told(results)}\n\n{first}\n\n{_measure.table(header, collapses)}"


def _each(measure: Any, job: tuple[Any, ...]) -> dict[str, Any]:
    return measure(*job)


def measure(cells: Sequence[Cell], runs: int, collapses: int, processes: int) -> dict[str, Any]:
    """False alarms in every cell and healthy kind, and announcements of every collapse."""
    healthy = [(cell, (cell.groups, cell.samples), runs) for cell in cells]
    healthy += [(kind, batch, collapses) for batch in BATCHES for kind in HEALTHY]
    falling = [(kind, batch, collapses) for batch in BATCHES for kind in (*COLLAPSING, *DROPS)]
    with ProcessPoolExecutor(processes) as pool:
        return {
            **_measure.surroundings(),
            "steps": STEPS,
            "healthy": list(pool.map(partial(_each, false_alarms), healthy)),
            "collapses": list(pool.map(partial(_each, announcements), falling)),
        }


def main() -> None:
    parser = _measure.parser(__doc__, repeats=False)
    parser.add_argument("--runs", type=int, default=RUNS, help="healthy runs of each cell")
    parser.add_argument("--collapses", type=int, default=100, help="runs of each other kind")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    results = measure(CELLS, args.runs, args.collapses, args.processes)
    _measure.publish(results, markdown(results), args.json)


if __name__ == "__main__":
    main()
