"""How far may a noisy figure move by chance?  Series with their noise, windows over the last steps, test bounds.

A `Memory` is plain data that JSON can hold. docs/metrics.md derives the bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median
from typing import Any

Memory = dict[str, Any]
FALSE_ALARM = 0.004  # how often a test may be wrong in a whole run
WINDOWS = (5, 10, 20)  # steps: short ones see a fast fall, long ones a small one
LUCK = 0.5  # standard errors by which the best of many means is above what it measures


@functools.lru_cache
def z_bound(steps: int, tests: int = len(WINDOWS)) -> float:
    """Return how many standard deviations a change needs if `tests` windows are tested in each of `steps` (Bonferroni).

    Overlapping windows are not independent, so the bound is conservative.

    >>> round(z_bound(200), 2), round(z_bound(2000), 2)
    (4.35, 4.83)
    """
    return NormalDist().inv_cdf(1 - FALSE_ALARM / (steps * tests))


def chance_of_fewer(low: float, drawn: float, high: float, others: float) -> float:
    """Return the chance of a share of `low` or less in `drawn` trials, given `high` in `others` (Fisher's exact test).

    >>> round(chance_of_fewer(0.1, 40, 0.4, 80), 5)  # 4 of 40, 32 of 80
    0.00043
    """
    n, m = max(1, round(drawn)), max(1, round(others))
    hits, rest = math.ceil(low * n - 1e-9), math.floor(high * m + 1e-9)
    if hits * m >= rest * n:
        return 1.0
    log, total = math.lgamma, hits + rest
    first, second, every = (log(a + 1) - log(b + 1) - log(a - b + 1) for a, b in ((n, hits), (m, rest), (n + m, total)))
    term = chance = math.exp(first + second - every)
    for x in range(hits, max(0, total - m), -1):  # with one hit fewer each time
        term *= x * (m - total + x) / ((n - x + 1) * (total - x + 1))
        chance += term
    return chance


class Noisy:
    """A noisy series: its last 20 values, the best mean of 20, the standard deviation of one value.

    The variance is half the mean square difference of neighbouring values (von Neumann): a slow trend does not change
    it, and it includes all that varies from step to step (levels, chance, environments). It covers about the last 40
    differences; `variance`, the expectation from the batch size, counts as ten of them.
    """

    def __init__(self, memory: Memory, name: str, value: float, variance: float = 0.0, sign: int = 1) -> None:
        """Add a value to the series `name` of this memory; `sign` is -1 where low is best."""
        kept = memory.setdefault(name, {"values": [], "square": 0.0, "count": 0.0})
        values = kept["values"]
        if values:
            kept["square"] = 0.975 * kept["square"] + (value - values[-1]) ** 2 / 2
            kept["count"] = 0.975 * kept["count"] + 1
        values.append(value)
        del values[:-20]
        level = fmean(values)
        self.improved = len(values) >= 10 and sign * level >= sign * kept.get("best", level)
        if self.improved:
            kept["best"] = level
        self.values: list[float] = values
        self.best: float | None = kept.get("best")
        self.sign = sign
        self.deviation = math.sqrt((10 * variance + kept["square"]) / (10 + kept["count"]))

    def mean(self, count: int) -> float:
        return fmean(self.values[-count:])

    def worse(self, limit: float, bound: float) -> bool:
        """Return whether the mean of a window is beyond `limit` and further from the best than noise explains."""
        if self.best is None:
            return False
        for window in WINDOWS:
            if len(self.values) >= window:
                mean = self.sign * self.mean(window)
                margin = bound * self.deviation * math.sqrt(1 / window + 1 / 20)
                if mean < self.sign * limit and self.sign * self.best - mean > margin:
                    return True
        return False

    def fell(
        self,
        limit: float,
        healthy: float,
        trials: float,
        chance: float,
        size: float = 1.0,
        windows: Sequence[int] = WINDOWS,
    ) -> bool:
        """Return whether the mean of a window is below `limit`, with a probability below `chance` under `healthy`.

        A value is the mean of `trials` trials that each give 0 or `size`: episodes for a success, groups for a std.
        """
        share = min(1.0, healthy / size)
        share -= LUCK * math.sqrt(share * (1 - share) / (20 * trials))
        return any(
            len(self.values) >= window
            and (mean := self.mean(window)) < limit
            and chance_of_fewer(mean / size, window * trials, share, 20 * trials) < chance
            for window in windows
        )


def trials_of_success(memory: Memory, series: Noisy, usual: float, groups: float, samples: int) -> float:
    """Return how many independent episodes a success is the mean of: p (1 - p) over its variance.

    They are fewer than were played, since levels differ. The variance is that of neighbouring steps, as in `Noisy`.
    """
    expected = groups / (0.5 + 0.5 / samples)
    sums = memory.setdefault("trials", [0.0, 0.0])
    if len(series.values) > 1:
        level, difference = fmean(series.values), series.values[-1] - series.values[-2]
        sums[0] = 0.975 * sums[0] + success_variance(level, groups, samples) * expected
        sums[1] = 0.975 * sums[1] + difference**2 / 2
    prior = 10 * success_variance(usual, groups, samples)
    return (prior * expected + sums[0]) / (prior + sums[1])


def size_of_std(memory: Memory, series: Noisy, groups: float) -> float:
    """Return the std of the groups whose samples differ: the mean of the squares over the mean.

    Half of the groups at .4 and half at 0 give .4; all at .2 give .2.
    """
    sums = memory.setdefault("size", [0.0, 0.0])
    if len(series.values) > 1:
        before, now = series.values[-2:]
        sums[0] = 0.99 * sums[0] + groups * (now - before) ** 2 / 2 + now * before
        sums[1] = 0.99 * sums[1] + (now + before) / 2
    return sums[0] / sums[1] if sums[1] > 0 else 0.0


def success_variance(success: float, groups: float, samples: int) -> float:
    """Return the variance of a batch's mean success: p (1 - p) / groups x (1 + 1 / samples) / 2.

    Half is between levels, half within, if the levels' success is distributed as beta(p, 1 - p). Laplace's rule keeps
    it above 0.

    >>> round(success_variance(0.5, groups=8, samples=16) ** 0.5, 3)
    0.129
    """
    share = (success * groups * samples + 1) / (groups * samples + 2)
    return share * (1 - share) / groups * (0.5 + 0.5 / samples)


def last_values(memory: Memory, name: str, value: float, count: int) -> list[float]:
    """Add a value; return the last `count` values."""
    memory[name] = [*memory.get(name, ()), value][-count:]
    return memory[name]


def first_mean(memory: Memory, name: str, value: float, count: int = 10) -> float | None:
    """Return the mean of the first `count` values; None until there are so many."""
    first = memory.setdefault(f"start {name}", [])
    if len(first) < count:
        first.append(value)
    return fmean(first) if len(first) == count else None


def count_in_a_row(memory: Memory, name: str, holds: bool) -> int:
    """Return for how many steps in a row, this one included, the condition holds."""
    memory[name] = memory.get(name, 0) + 1 if holds else 0
    return memory[name]


def growth(
    memory: Memory, name: str, value: float, success: float, count: int = 10, floor: float = 0.0
) -> tuple[float, float] | None:
    """Return the median of the last `count` values, and the lowest median of 10 steps with at least 0.8 of the success.

    None until there is one. Steps with less success are not compared: a policy that has learned to play has larger
    gradients and more ways to win.
    """
    values, won = last_values(memory, name, value, 10), fmean(last_values(memory, f"{name} success", success, 10))
    blocks = memory.setdefault(f"{name} blocks", [])
    now = median(values[-count:])
    lowest = min((low for low, then in blocks if then >= 0.8 * won), default=None)
    seen = memory[f"{name} seen"] = memory.get(f"{name} seen", 0) + 1
    if seen % 10 == 0:
        blocks.append([max(median(values), floor), won])
    return None if lowest is None else (now, lowest)
