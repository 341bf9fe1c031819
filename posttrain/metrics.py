"""How often does a text repeat itself, and how certain is a metric?

Repetition is counted on token ids without the stop token. Every metric has an interval at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np

Z_95 = NormalDist().inv_cdf(0.975)
# --------------------------------------------------------------------------------------------------------- repetition


def _ngrams(ids: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return list(zip(*(ids[i:] for i in range(n)), strict=False))


def seq_rep_n(ids: Sequence[int], n: int = 4) -> float:
    """Return 1 - distinct n-grams / all n-grams (Welleck et al., arXiv 1908.04319, eq. 11); 0 without n-grams.

    Args:
        ids: token ids of one text, without the stop token.
        n: length of the n-grams in tokens.
    """
    ngrams = _ngrams(ids, n)
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def distinct_n(texts: Iterable[Sequence[int]], n: int) -> float:
    """Return distinct n-grams of all texts together / their tokens (Li et al., arXiv 1510.03055, section 5.4).

    It falls as texts are added, so compare it only between equal numbers of texts.

    Args:
        texts: token ids of each text.
        n: length of the n-grams in tokens.

    Returns:
        A share; 0 without tokens.
    """
    texts = list(texts)
    tokens = sum(map(len, texts))
    return len({gram for ids in texts for gram in _ngrams(ids, n)}) / tokens if tokens else 0.0


def longest_repeat(ids: Sequence[int]) -> int:
    """Return the tokens of the longest span that occurs twice, overlaps allowed: 2 for abcab (ab), 3 for aaaa (aaa)."""

    def repeats(length: int) -> bool:
        spans = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
        return len(set(spans)) < len(spans)

    known, impossible = 0, len(ids)  # a span that occurs twice holds shorter ones that do, so halving finds the limit
    while impossible - known > 1:
        middle = (known + impossible) // 2
        known, impossible = (middle, impossible) if repeats(middle) else (known, middle)
    return known


def at_equal_length(
    left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Return both lists with each pair cut to the shorter of the two.

    Longer texts repeat more, so without this cut a model could look better by writing less.
    """
    lengths = [min(len(a), len(b)) for a, b in zip(left, right, strict=True)]
    return (
        [ids[:length] for ids, length in zip(left, lengths, strict=True)],
        [ids[:length] for ids, length in zip(right, lengths, strict=True)],
    )


def repetition(texts: Sequence[Sequence[int]], finished: Sequence[bool], first: int = 60) -> dict[str, float]:
    """Return all repetition metrics of some texts: means over texts, except distinct-n.

    {"seq_rep_4": 0.11, "seq_rep_4_first": 0.04, "distinct_1": 0.2, "distinct_2": 0.5, "longest_repeat": 6.1,
     "never_stops": 0.02, "tokens": 74.3}

    Args:
        texts: token ids of each text, without the stop token.
        finished: whether each text has a stop token.
        first: number of tokens for `seq_rep_4_first`.
    """
    assert len(texts) == len(finished) > 0
    return {
        "seq_rep_4": fmean(map(seq_rep_n, texts)),
        "seq_rep_4_first": fmean(seq_rep_n(ids[:first]) for ids in texts),
        "distinct_1": distinct_n(texts, 1),
        "distinct_2": distinct_n(texts, 2),
        "longest_repeat": fmean(map(longest_repeat, texts)),
        "never_stops": 1 - fmean(map(float, finished)),
        "tokens": fmean(map(len, texts)),
    }


# ---------------------------------------------------------------------------------------------------------- intervals


class Interval(NamedTuple):
    """A metric and its interval at 95 %: Interval(value=0.62, low=0.55, high=0.68)."""

    value: float
    low: float
    high: float


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's score interval at 95 % for a share (1927), which also holds at 0 % and 100 %.

    Args:
        successes: number of successes, which may be a fraction.
        n: number of independent items.

    Returns:
        The lower and the upper end, shares from 0 to 1.
    """
    assert 0 <= successes <= n and n > 0
    share, z2 = successes / n, Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # at 0 and 1 the exact bound is the share itself, without rounding errors
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def wilson_of_levels(won: Sequence[bool], levels: Sequence[Hashable]) -> tuple[float, float]:
    """Return `wilson` of a share of episodes, with as many items as there are different levels.

    Two episodes on one level say little more than one of them, however many are played.

    >>> wilson_of_levels([True, True, False, False], ["a", "a", "b", "b"]) == wilson(1, 2)
    True
    """
    assert len(won) == len(levels) > 0
    different = len(set(levels))
    return wilson(sum(won) / len(won) * different, different)


def means_of_levels(values: Sequence[float], levels: Sequence[Hashable]) -> list[float]:
    """Return the mean of each different level, in order of first occurrence: what pairs of policies differ by.

    >>> means_of_levels([1.0, 0.0, 1.0], ["a", "b", "a"])
    [1.0, 0.0]
    """
    by_level: dict[Hashable, list[float]] = {}
    for level, value in zip(levels, values, strict=True):
        by_level.setdefault(level, []).append(value)
    return [fmean(group) for group in by_level.values()]


def pass_at(k: int, size: int, won: int) -> float:
    """Return the chance that k of a group's `size` samples, `won` of which succeeded, hold a success.

    1 - C(size - won, k) / C(size, k), the unbiased estimate of pass@k, arXiv 2107.03374, eq. 1.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(4, 4, 1)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(size - won, k) / math.comb(size, k)


def bootstrap_mean(values: Sequence[float], seed: int, rounds: int = 4000) -> Interval:
    """Return the mean and its percentile bootstrap interval at 95 %.

    Args:
        values: of independent items.
        seed: of the resamples.
        rounds: number of resamples.
    """
    sample, rng = np.asarray(values, dtype=float), np.random.default_rng(seed)
    assert sample.ndim == 1 and len(sample) > 0
    means = [sample[rng.integers(len(sample), size=(100, len(sample)))].mean(1) for _ in range(max(1, rounds // 100))]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(sample.mean()), float(low), float(high))


def paired_interval(
    before: Sequence[float], after: Sequence[float], seed: int, rounds: int = 4000, tail: float = 0.025
) -> Interval:
    """Return mean(after) - mean(before) with an interval that also holds for few items.

    It excludes zero only where an exact test at the same level rejects it.

    Args:
        before: values of the items.
        after: values of the same items in the same order.
        seed: of the random signs, which values other than 0 and 1 need.
        rounds: number of random signs.
        tail: probability outside at each end; a fraction of it where several intervals must hold together.
    """
    assert len(before) == len(after) > 0
    changes = np.subtract(after, before, dtype=float)
    if {*before, *after} <= {0, 1}:
        return _paired_shares(int((changes > 0).sum()), int((changes < 0).sum()), len(changes), tail)
    return _paired_means(changes, float(np.ptp([*before, *after])), seed, rounds, tail)


def _paired_shares(up: int, down: int, n: int, tail: float) -> Interval:
    """Return Bonett and Price's interval (2012), widened to hold zero where McNemar's exact test does not reject it.

    up, down: items that were gained and lost. Their interval counts one more of each.
    """
    gained, lost = (up + 1) / (n + 2), (down + 1) / (n + 2)
    half = NormalDist().inv_cdf(1 - tail) * math.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
    low, high = max(-1.0, gained - lost - half), min(1.0, gained - lost + half)
    tosses = up + down  # of a fair coin, one for each item that changed
    if sum(math.comb(tosses, heads) for heads in range(max(up, down), tosses + 1)) > tail * 2**tosses:
        low, high = min(low, 0.0), max(high, 0.0)
    return Interval((up - down) / n, low, high)


def _paired_means(changes: np.ndarray, reach: float, seed: int, rounds: int, tail: float) -> Interval:
    """Return the interval of the sign-flip permutation test: quantiles of the means of random subsets (Hartigan, 1969).

    For equal models each sign of an item's change is equally likely. For an empty subset the mean may be anywhere
    within the range of the values (`reach`).
    """
    rng, lows, highs = np.random.default_rng(seed), [], []
    for _ in range(math.ceil(max(rounds, 2 / tail) / 100)):
        taken = rng.integers(2, size=(100, len(changes)))
        sizes = taken.sum(1)
        means = np.round(taken @ changes / np.maximum(sizes, 1), 12)  # what cancels out is zero
        lows.append(np.where(sizes, means, -reach))
        highs.append(np.where(sizes, means, reach))
    low, high = np.sort(np.concatenate(lows)), np.sort(np.concatenate(highs))
    left_out = math.floor(tail * (len(low) + 1))  # the signs as they are count as one more
    return Interval(round(float(changes.mean()), 12), float(low[left_out - 1]), float(high[-left_out]))


def chance_of_gain(before: Iterable[bool], after: Iterable[bool]) -> float:
    """Return the chance that of two equal policies the second solves at least as many more of these levels.

    McNemar's exact test with one side: a level with a changed result was gained or lost with probability 1/2 each.
    Beyond 1,000 changed levels it is the normal approximation, which has converged by then.

    >>> chance_of_gain([False, False, False, True], [True, True, True, True])
    0.125

    Args:
        before: whether the first policy solved each level.
        after: whether the second policy solved the same level.
    """
    changes = [new - old for old, new in zip(before, after, strict=True)]
    up, down = changes.count(1), changes.count(-1)
    tosses = up + down
    if tosses > 1000:
        return 1 - NormalDist().cdf((up - down - 1) / math.sqrt(tosses))
    return sum(math.comb(tosses, heads) for heads in range(up, tosses + 1)) / 2**tosses


def chance_of_rise(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the chance that of two equal policies the second earns at least as much more on these levels in sum.

    A test of random signs with one side: each sign of a level's change is equally likely. All of them are tried for few
    changed levels, a fixed draw of them for more. For values of 0 and 1 it is `chance_of_gain`.

    >>> chance_of_rise([0.0, 0.0, 0.5, 1.0], [0.5, 0.25, 1.0, 1.0])
    0.125

    Args:
        before: what the first policy earned on each level.
        after: what the second policy earned on the same levels.
    """
    changes = np.subtract(after, before, dtype=float)
    changes = changes[np.abs(changes) > 1e-9]
    count = len(changes)
    if count <= 14:
        turned = np.arange(2**count)[:, None] >> np.arange(count) & 1
        return float((turned @ changes <= 1e-9).mean())  # as good: those whose sign is turned do not add up to a gain
    rng, as_good = np.random.default_rng(0), 1  # the signs as they are count as one
    for _ in range(20):
        turned = rng.integers(2, size=(1000, count), dtype=np.int8).astype(np.float32)
        as_good += int((turned @ changes <= 1e-9).sum())
    return as_good / 20_001


def paired_difference(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> tuple[float, float]:
    """Return the mean over the sets of the mean of after - before, item by item, and its standard error.

    Only items that changed contribute to the error of shares (McNemar's test without its approximation). The error of a
    set with one item is unknown and counts as 0.

    >>> paired_difference({"a": [0, 0, 1, 1]}, {"a": [1, 1, 1, 1]})
    (0.5, 0.28867513459481287)

    Args:
        before: values by set; each set has the same weight.
        after: values of the same items in the same order.
    """
    assert before.keys() == after.keys()
    mean, square = 0.0, 0.0
    for name, old in before.items():
        assert len(old) == len(after[name]) > 0
        changes = np.subtract(after[name], old, dtype=float)
        mean += float(changes.mean()) / len(before)
        square += float(changes.var(ddof=1)) / len(changes) / len(before) ** 2 if len(changes) > 1 else 0.0
    return mean, math.sqrt(square)
