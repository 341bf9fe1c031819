"""How far may a noisy figure move by chance?  Series with their noise, windows over the last steps, test bounds.

Everything that is remembered is in a `Memory`, plain data that JSON can hold. docs/metrics.md derives the bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median
from typing import Any

Memory = dict[str, Any]
FALSE_ALARM = 0.002  # how often a test may be wrong in a whole run, by the normal approximation
WINDOWS = (5, 10, 20)  # steps: short ones see a fast fall, long ones a small one
ENOUGH = 40  # groups in a window: the mean of fewer has no normal distribution


@functools.lru_cache
def z_bound(steps: int, tests: int = len(WINDOWS)) -> float:
    """How many standard deviations a change must be for one of `steps` looks at `tests` windows (Bonferroni).

    Windows that overlap are not independent, so the bound is on the safe side.

    >>> round(z_bound(200), 2), round(z_bound(2000), 2)
    (4.5, 4.97)
    """
    return NormalDist().inv_cdf(1 - FALSE_ALARM / (steps * tests))


class Noisy:
    """A series that is measured with noise: its last 20 values, the best mean of 20, the noise of one value.

    The noise is half the mean square of what neighbouring values differ by (von Neumann), which a slow trend does not
    touch and which holds everything that changes from step to step: levels, chance, which environments were played. Of
    the last 40 differences or so; `variance`, what the size of the batch lets expect, counts as ten of them.
    """

    def __init__(self, memory: Memory, name: str, value: float, variance: float, sign: int = 1) -> None:
        """Add a value to the series `name` of this memory; `sign` is -1 where low is best."""
        kept = memory.setdefault(name, {"values": [], "square": 0.0, "count": 0.0})
        values = kept["values"]
        if values:
            kept["square"] = 0.975 * kept["square"] + (value - values[-1]) ** 2 / 2
            kept["count"] = 0.975 * kept["count"] + 1
        values.append(value)
        del values[:-20]
        if len(values) >= 10:
            level = fmean(values)
            kept["best"] = sign * max(sign * kept.get("best", level), sign * level)
        self.values: list[float] = values
        self.best: float | None = kept.get("best")
        self.sign = sign
        self.deviation = math.sqrt((10 * variance + kept["square"]) / (10 + kept["count"]))

    def mean(self, count: int) -> float:
        return fmean(self.values[-count:])

    def worse(
        self,
        limit: float,
        bound: float,
        windows: Sequence[int] = WINDOWS,
        groups: float = ENOUGH,
        healthy: float | None = None,
    ) -> bool:
        """Is the mean of a window beyond `limit`, and further from `healthy` (or the best) than its noise explains?

        groups: how many a value is the mean of; windows of fewer than ENOUGH are not looked at.
        """
        if self.best is None:
            return False
        healthy = self.best if healthy is None else healthy
        for window in windows:
            if len(self.values) >= window >= ENOUGH / groups:
                mean = self.sign * self.mean(window)
                margin = bound * self.deviation * math.sqrt(1 / window + 1 / 20)
                if mean < self.sign * limit and self.sign * healthy - mean > margin:
                    return True
        return False


def success_variance(success: float, groups: float, samples: int) -> float:
    """Of the mean of a batch, p (1 - p) / groups x (1 + 1 / samples) / 2: half of it is between levels, half within.

    That is so where the levels' chances are of the distribution beta(p, 1 - p). Laplace's rule keeps it above 0.

    >>> round(success_variance(0.5, groups=8, samples=16) ** 0.5, 3)
    0.129
    """
    share = (success * groups * samples + 1) / (groups * samples + 2)
    return share * (1 - share) / groups * (0.5 + 0.5 / samples)


def last_values(memory: Memory, name: str, value: float, count: int) -> list[float]:
    """The last `count` values, this one included."""
    memory[name] = [*memory.get(name, ()), value][-count:]
    return memory[name]


def first_mean(memory: Memory, name: str, value: float, count: int = 10) -> float | None:
    """Mean of the first `count` values; None until there are so many."""
    first = memory.setdefault(f"start {name}", [])
    if len(first) < count:
        first.append(value)
    return fmean(first) if len(first) == count else None


def count_in_a_row(memory: Memory, name: str, holds: bool) -> int:
    memory[name] = memory.get(name, 0) + 1 if holds else 0
    return memory[name]


def growth(
    memory: Memory, name: str, value: float, success: float, count: int = 10, floor: float = 0.0
) -> tuple[float, float] | None:
    """The value's median of the last `count` steps, and the lowest median of 10 steps from when success was not lower.

    None until there is one. What rises together with success is not compared: a policy that has learned to play has
    larger gradients and more ways to win than one that knew nothing.
    """
    values, won = last_values(memory, name, value, 10), fmean(last_values(memory, f"{name} success", success, 10))
    blocks = memory.setdefault(f"{name} blocks", [])
    now = median(values[-count:])
    lowest = min((low for low, then in blocks if then >= 0.8 * won), default=None)
    seen = memory[f"{name} seen"] = memory.get(f"{name} seen", 0) + 1
    if seen % 10 == 0:
        blocks.append([max(median(values), floor), won])
    return None if lowest is None else (now, lowest)
