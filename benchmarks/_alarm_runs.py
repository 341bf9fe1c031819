"""What do the rows of a healthy and of a collapsing run look like?  Simulated runs with the sampling noise of a batch.

Every figure is drawn as a rollout draws it: each group plays a new level, levels differ in their chance of success (a
beta distribution whose mean is the policy's chance), the samples of a group succeed or fail independently, and each
invalid turn costs a penalty. Nothing here is fitted to the limits of the alarms.

HEALTHY and COLLAPSING are kinds of runs with parameters drawn at random. CELLS are healthy runs of one level of success
each, so that no level's false alarms hide among the others'. DROPS are falls of the success that nothing else tells:
those that a paper plots, and slow ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
STEPS = 200
TURNS = 4  # of an episode
PENALTY = 0.1
EVERY, EPISODES = 20, 64  # evaluation
BATCHES = ((8, 16), (32, 8))  # groups and samples: the presets' and the quickstart's


@dataclass
class Course:
    """What the policy is truly like at each step; the rows are drawn around it."""

    chance: Array  # mean chance of success
    entropy: Array
    invalid: Array
    norm: Array
    concentration: Array  # of the levels' chances; small: a level is always or never won
    repeated: Array
    begins: int = STEPS + 1  # step at which a collapse begins
    other: Array | None = None  # chance of success in a second environment, played by a share of the groups
    other_share: float = 0.5


class Run(NamedTuple):
    kind: str
    rows: list[tuple[int, dict[str, float]]]
    begins: int
    halved: int  # first step at which the true chance is below half of its best


T = np.arange(1, STEPS + 1)


def ramp(begin: float, length: float) -> Array:
    """0 until `begin`, 1 from `begin + length` on, straight between."""
    return np.clip((T - begin) / max(length, 1e-9), 0, 1).astype(np.float64)


def course(rng: np.random.Generator, chance: Array | float, **given: Array | float | int) -> Course:
    """A healthy course with this chance of success; entropy and gradient fall as it nears 1."""
    chance = np.broadcast_to(np.asarray(chance, dtype=float), T.shape).copy()
    left = np.clip(1 - np.maximum.accumulate(chance), 0.02, 1) / (1 - min(chance[0], 0.95))
    defaults = {
        "entropy": rng.uniform(0.2, 0.8) * np.clip(left, 0.1, 1) ** rng.uniform(0.4, 1.0) * (1 - 0.4 * ramp(1, STEPS)),
        "invalid": rng.uniform(0, 0.08) * (1 - 0.5 * ramp(1, 50)),
        "norm": rng.uniform(0.1, 0.8) * (1 + rng.uniform(-0.5, 0.7) * ramp(1, STEPS)) * np.sqrt(np.clip(left, 0.1, 1)),
        "concentration": rng.choice([1.0, 3.0]) * np.ones(STEPS),
        "repeated": rng.uniform(0.02, 0.2) * np.ones(STEPS),
    }
    columns = {key: value if isinstance(value, int | float) else np.asarray(value) for key, value in given.items()}
    return Course(chance, **{**defaults, **columns})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- healthy


def flat(rng: np.random.Generator) -> Course:
    return course(rng, rng.uniform(0.05, 0.9))


def slow(rng: np.random.Generator) -> Course:
    start = rng.uniform(0.05, 0.4)
    return course(rng, start + rng.uniform(0.1, 0.5) * ramp(1, STEPS))


def solved(rng: np.random.Generator) -> Course:
    start, middle = rng.uniform(0.05, 0.4), rng.uniform(30, 110)
    return course(rng, start + (rng.uniform(0.985, 1.0) - start) / (1 + np.exp(-(T - middle) / rng.uniform(5, 15))))


def nearly_solved(rng: np.random.Generator) -> Course:
    """80 to 94 % of the levels are won, and the entropy is down to 12 to 18 % of its start."""
    start, length, top = rng.uniform(0.2, 0.5), rng.uniform(50, 150), rng.uniform(0.8, 0.94)
    up = ramp(1, length)
    return course(
        rng,
        start + (top - start) * up,
        entropy=rng.uniform(0.2, 0.8) * (1 - (1 - rng.uniform(0.12, 0.18)) * up),
        concentration=3.0 - rng.uniform(0, 2.2) * up,  # what is left are levels that are never won
    )


def easy(rng: np.random.Generator) -> Course:
    return course(rng, rng.uniform(0.93, 1.0))


def hard(rng: np.random.Generator) -> Course:
    return course(rng, 0.02 + rng.uniform(0.05, 0.3) * ramp(1, STEPS))


def wavering(rng: np.random.Generator) -> Course:
    return course(rng, rng.uniform(0.35, 0.7) + 0.06 * np.sin(T * rng.uniform(0.03, 0.12) + rng.uniform(0, 6)))


def weak_start(rng: np.random.Generator) -> Course:
    """At first only penalties tell samples apart, and nothing is won; then the model learns."""
    begin = rng.uniform(8, 25)
    return course(
        rng,
        rng.uniform(0.3, 0.8) * ramp(begin, rng.uniform(15, 60)),
        entropy=rng.uniform(0.1, 0.4) * (1 + rng.uniform(0, 1.0) * ramp(begin, 20)),
        invalid=rng.uniform(0.15, 0.6) * (1 - ramp(1, begin + 10)) + 0.02,
        norm=rng.uniform(0.1, 0.6) * (0.1 + 0.9 * ramp(begin, 25)),
    )


def pausing(rng: np.random.Generator) -> Course:
    """A second environment, harder or easier, that is not played at every step."""
    first, second = rng.uniform(0.05, 0.95, 2)
    up = ramp(1, STEPS) * rng.uniform(0, 0.5)
    return course(rng, first + (1 - first) * up, other=second + (1 - second) * up, other_share=rng.uniform(0.02, 0.5))


HEALTHY: Mapping[str, Callable[[np.random.Generator], Course]] = {
    each.__name__: each for each in (flat, slow, solved, nearly_solved, easy, hard, wavering, weak_start, pausing)
}

# ----------------------------------------------------------------------------------------------------- collapsing


def _from(rng: np.random.Generator) -> tuple[float, float]:
    """A chance of success, and the step at which the collapse begins."""
    return rng.uniform(0.25, 0.8), rng.uniform(40, 100)


def echo_trap(rng: np.random.Generator) -> Course:
    """RAGEN's: samples of a group become alike, then the success goes."""
    top, begin = _from(rng)
    alike, length = ramp(begin, rng.uniform(10, 30)), rng.uniform(20, 60)
    chance = top * (1 - 0.95 * ramp(begin + 20, length))
    entropy = rng.uniform(0.2, 0.8) * (1 - 0.95 * alike)
    return course(rng, chance, concentration=3.0 * 0.002**alike, entropy=entropy, begins=int(begin))


def weak_start_then_gone(rng: np.random.Generator) -> Course:
    """An std of .03 from penalties, then .35, then none: levels are always or never won, and ever fewer of them."""
    learns, begin = rng.uniform(15, 30), rng.uniform(80, 110)
    top, alike = rng.uniform(0.3, 0.6), ramp(begin, rng.uniform(10, 30))
    return course(
        rng,
        top * ramp(learns, 20) * (1 - 0.95 * ramp(begin + 15, rng.uniform(30, 60))),
        invalid=0.06 * (1 - ramp(learns, 20)) + 0.01,
        concentration=3.0 * 0.002**alike,
        norm=rng.uniform(0.1, 0.6) * (0.1 + 0.9 * ramp(learns, 25)),
        begins=int(begin),
    )


def growing_gradients(rng: np.random.Generator) -> Course:
    """1.05 to 1.1 times a step; success is halved where they are 12 to 50 times what they were."""
    top, begin = _from(rng)
    times = rng.uniform(1.05, 1.1) ** np.maximum(0, T - begin)
    return course(
        rng, top / (1 + (times / rng.uniform(12, 50)) ** 2), norm=rng.uniform(0.1, 0.8) * times, begins=int(begin)
    )


def entropy_explosion(rng: np.random.Generator) -> Course:
    """From .08 to 1.1 nats within 20 to 90 steps, at times after a healthy fall; success is halved at .6."""
    top, begin = _from(rng)
    fall = 1 + rng.choice([0.0, 4.0]) * (1 - ramp(1, begin))
    entropy = 0.08 * fall * (1.1 / 0.08) ** ramp(begin, rng.uniform(20, 90))
    lost = 1 / (1 + np.where(begin < T, entropy / 0.6, 0) ** 3)
    return course(rng, top * lost, entropy=entropy, begins=int(begin))


def entropy_bonus(rng: np.random.Generator) -> Course:
    """As the recorded runs: entropy and invalid turns rise together, and success is gone within 10 to 25 steps."""
    top, begin = _from(rng)
    up = ramp(begin, rng.uniform(16, 40))
    invalid = 0.02 + 0.7 * up**2
    entropy = rng.uniform(0.15, 0.4) * 12**up
    return course(rng, top * (1 - invalid) ** 2, entropy=entropy, invalid=invalid, begins=int(begin))


def format_lost(rng: np.random.Generator) -> Course:
    top, begin = _from(rng)
    invalid = 0.02 + 0.6 * ramp(begin, rng.uniform(20, 60))
    return course(rng, top * (1 - invalid) ** 2, invalid=invalid, begins=int(begin))


def success_lost(rng: np.random.Generator) -> Course:
    """Nothing but the success says so: half is gone after 25 to 60 steps."""
    top, begin = rng.uniform(0.4, 0.9), rng.uniform(40, 80)
    return course(rng, top * (1 - 0.95 * ramp(begin, rng.uniform(50, 115))), begins=int(begin))


def entropy_lost(rng: np.random.Generator) -> Course:
    """The policy stops exploring on an unsolved task, and what it repeats stops working."""
    top, begin = rng.uniform(0.2, 0.6), rng.uniform(40, 80)
    entropy = rng.uniform(0.2, 0.8) * (1 - 0.95 * ramp(begin, rng.uniform(20, 40)))
    return course(rng, top * (1 - 0.9 * ramp(begin + 25, rng.uniform(30, 60))), entropy=entropy, begins=int(begin))


def loops(rng: np.random.Generator) -> Course:
    """Answers repeat themselves."""
    top, begin = _from(rng)
    up = ramp(begin, rng.uniform(20, 50))
    return course(rng, top * (1 - 0.9 * up**2), repeated=rng.uniform(0.02, 0.2) + 0.6 * up, begins=int(begin))


COLLAPSING: Mapping[str, Callable[[np.random.Generator], Course]] = {
    each.__name__: each
    for each in (
        echo_trap, weak_start_then_gone, growing_gradients, entropy_explosion, entropy_bonus, format_lost, success_lost,
        entropy_lost, loops,
    )
}  # fmt: skip

# ------------------------------------------------------------------------------------------------- cells and drops


class Cell(NamedTuple):
    """Healthy runs whose chance of success goes from `start` to `end`, in so many environments and this batch."""

    start: float
    end: float
    environments: int
    groups: int
    samples: int

    @property
    def name(self) -> str:
        level = f"{self.start:g}" if self.start == self.end else f"{self.start:g} to {self.end:g}"
        return f"{level}, {self.environments} env, {self.groups} x {self.samples}"


LEVELS = [(p, p) for p in (0.03, 0.06, 0.3, 0.6, 0.9)]
LEVELS += [(0.9, 0.97), (0.9, 1.0), (0.3, 1.0), (0.03, 0.6), (0.03, 1.0)]
CELLS = [Cell(*level, count, *batch) for batch in BATCHES for count in (1, 2) for level in LEVELS]


def in_cell(rng: np.random.Generator, cell: Cell) -> Course:
    """A run of this cell: it rises along a logistic curve, and levels differ little or much.

    A second environment has half of the odds of success of the first. Where the success rises, what is left are levels
    that are rarely won; half of the runs have no invalid turns, so that nothing but winning tells samples apart.
    """
    middle, width = rng.uniform(20, 120), rng.uniform(3, 20)
    up = np.zeros(STEPS) if cell.start == cell.end else 1 / (1 + np.exp(-(T - middle) / width))
    chance = cell.start + (min(cell.end, rng.uniform(0.99, 1.0)) - cell.start) * up
    unequal = np.exp(rng.uniform(*np.log((0.7, 8.0))))
    given: dict[str, Array] = {"concentration": unequal * (1 - rng.uniform(0, 0.93) * cell.end * up)}
    if rng.random() < 0.5:
        given["invalid"] = np.zeros(STEPS)
    if cell.environments == 2:
        given["other"] = chance / (2 - chance)  # odds p / (1 - p), halved
    return course(rng, chance, **given)


PLOTTED: Mapping[str, tuple[list[int], list[float]]] = {  # steps and success there, read from RAGEN's plots
    "ragen_bandit": ([1, 80, 200], [0.5, 0.88, 0.0]),
    "ragen_sokoban": ([1, 40, 90], [0.065, 0.129, 0.0]),
    "ragen_frozen_lake": ([1, 40, 110], [0.035, 0.215, 0.0]),
}


def plotted(rng: np.random.Generator, name: str) -> Course:
    """The success of a run without a filter (arXiv 2504.20073, PPO, 0.5B); all else stays as in a healthy run."""
    steps, success = PLOTTED[name]
    return course(rng, np.interp(T, steps, success), begins=steps[1])


def slow_drop(rng: np.random.Generator) -> Course:
    """Half of the success is gone after 60 to 110 steps."""
    top, begin = rng.uniform(0.2, 0.9), rng.uniform(40, 60)
    return course(rng, top * (1 - 0.5 * (T - begin).clip(0) / rng.uniform(60, 110)).clip(0.05), begins=int(begin))


DROPS: Mapping[str, Callable[[np.random.Generator], Course]] = {
    **{name: partial(plotted, name=name) for name in PLOTTED},
    "slow_drop": slow_drop,
}


# ---------------------------------------------------------------------------------------------------------- rows


def _draw(rng: np.random.Generator, c: Course, chance_TG: Array, samples: int) -> tuple[Array, Array]:
    """Success and share of invalid turns of every episode, (step, group, sample)."""
    chance_TG, shape = np.clip(chance_TG, 1e-6, 1 - 1e-6), (*chance_TG.shape, samples)
    concentration = c.concentration[:, None]
    level_TG = rng.beta(np.maximum(concentration * chance_TG, 1e-9), np.maximum(concentration * (1 - chance_TG), 1e-9))
    level_TG = np.where(np.isfinite(level_TG), level_TG, rng.random(chance_TG.shape) < chance_TG)
    wins_TGK = (rng.random(shape) < level_TG[..., None]).astype(float)
    invalid_TG = np.clip(c.invalid[:, None] * rng.gamma(4, 0.25, chance_TG.shape), 0, 1)  # some levels confuse more
    return wins_TGK, rng.binomial(TURNS, invalid_TG[..., None], shape) / TURNS


def simulate(kind: str | Cell, groups: int, samples: int, seed: int) -> Run:
    """A run of 200 steps of this kind, drawn in batches of so many groups and samples."""
    name = kind.name if isinstance(kind, Cell) else kind
    rng = np.random.default_rng([seed, groups, *name.encode()])
    c = in_cell(rng, kind) if isinstance(kind, Cell) else {**HEALTHY, **COLLAPSING, **DROPS}[kind](rng)
    second_T = (
        np.diff(np.floor(np.arange(STEPS + 1) * c.other_share * groups)) if c.other is not None else np.zeros(STEPS)
    )
    second_TG = np.arange(groups) >= groups - second_T[:, None]  # the groups of the second environment
    chance_TG = np.where(second_TG, c.chance[:, None] if c.other is None else c.other[:, None], c.chance[:, None])
    wins_TGK, invalid_TGK = _draw(rng, c, chance_TG, samples)
    std_TG = (wins_TGK - PENALTY * TURNS * invalid_TGK).std(2, ddof=1)
    noise = 0.35 / np.sqrt(groups)
    entropy = c.entropy * np.exp(rng.normal(0, noise, STEPS))
    kept = (std_TG > 1e-10).sum(1).astype(float)
    always = {
        "rollout/in_group_std": std_TG.mean(1),
        "rollout/zero_variance_groups": 1 - kept / groups,
        "rollout/kept_groups": kept,
        "rollout/success": wins_TGK.mean((1, 2)),
        "rollout/invalid_turns": invalid_TGK.mean((1, 2)),
        "rollout/repeated_share": np.clip(c.repeated * np.exp(rng.normal(0, noise, STEPS)), 0, 1),
    }
    trained = {  # where a group was kept
        "policy/entropy": entropy,
        "policy/grad_norm": c.norm * np.exp(rng.normal(0, rng.uniform(0.1, 0.5), STEPS)),
        "policy/clip_fraction": rng.gamma(4, 0.004, STEPS),
        "policy/sampler_gap": np.full(STEPS, 1e-6),
        "policy/skipped_steps": np.zeros(STEPS),
    }
    looked = {  # every ten steps
        "collapse/trajectory/mi_z_ema": 2.0 * np.exp(rng.normal(0, 0.1, STEPS)),
        "collapse/trajectory/conditional_entropy_token": entropy,
    }
    played = {}  # where the environment was
    for name, own_TG in (("lake", ~second_TG), ("sokoban", second_TG)):
        count = own_TG.sum(1)
        for key, each_TGK in (("success", wins_TGK), ("invalid_turns", invalid_TGK)):
            mean = (each_TGK.mean(2) * own_TG).sum(1) / np.maximum(count, 1)
            played[f"rollout/{name}/{key}"] = np.where(count > 0, mean, np.nan)
        std = (std_TG * own_TG).sum(1) / np.maximum(count, 1)
        played[f"rollout/{name}/in_group_std"] = np.where(count > 0, std, np.nan)
    nobody = np.full(STEPS, np.nan)
    trained = {key: np.where(kept > 0, column, nobody) for key, column in trained.items()}
    looked = {key: np.where(T % 10 == 0, column, nobody) for key, column in looked.items()}
    columns = always | trained | looked | played
    table = np.stack(list(columns.values()), 1).tolist()
    rows: list[tuple[int, dict[str, float]]] = []
    for step, values in enumerate(table, 1):
        rows.append((step, {key: value for key, value in zip(columns, values, strict=True) if value == value}))
        if step % EVERY == 0:
            rows.append((step, {"evaluation/success": rng.binomial(EPISODES, c.chance[step - 1]) / EPISODES}))
    lost = np.flatnonzero(c.chance < 0.5 * np.maximum.accumulate(c.chance)) if c.begins <= STEPS else []
    return Run(name, rows, c.begins, int(lost[0]) + 1 if len(lost) else STEPS)
