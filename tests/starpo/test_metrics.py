"""Are the figures right that every result rests on?  Against slow references, TRL's code and published numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from trl.rewards.other_rewards import get_repetition_penalty_reward

from posttrain import metrics
from posttrain.metrics import (
    at_equal_length,
    bootstrap_mean,
    distinct_n,
    longest_repeat,
    paired_difference,
    paired_interval,
    repetition,
    seq_rep_n,
    wilson,
)

texts = st.lists(st.integers(0, 4), max_size=40)


@given(texts, st.integers(1, 5))
def test_seq_rep_agrees_with_trl(ids: list[int], n: int) -> None:
    oracle = get_repetition_penalty_reward(ngram_size=n, max_penalty=-1.0)
    assert seq_rep_n(ids, n) == pytest.approx(-oracle([ids])[0])


def test_seq_rep_by_hand() -> None:
    assert seq_rep_n([1, 2, 3, 4, 5], 4) == 0.0
    assert seq_rep_n([7] * 8, 4) == pytest.approx(1 - 1 / 5)
    assert seq_rep_n([1, 2, 1, 2, 1, 2], 4) == pytest.approx(1 - 2 / 3)
    assert seq_rep_n([1, 2, 3], 4) == 0.0


@pytest.mark.thorough
@given(st.lists(texts, max_size=5), st.integers(1, 3))
def test_distinct_by_counting(many: list[list[int]], n: int) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for ids in many:
        for start in range(len(ids)):
            if start + n <= len(ids):
                counts[tuple(ids[start : start + n])] += 1
    tokens = sum(len(ids) for ids in many)
    assert distinct_n(many, n) == (len(counts) / tokens if tokens else 0.0)


@given(texts)
def test_longest_repeat_by_trying_all_pairs(ids: list[int]) -> None:
    best = 0
    for a in range(len(ids)):
        for b in range(a + 1, len(ids)):
            length = 0
            while b + length < len(ids) and ids[a + length] == ids[b + length]:
                length += 1
            best = max(best, length)
    assert longest_repeat(ids) == best


def test_equal_length_removes_the_gain_of_silence() -> None:
    loop = [1, 2, 3, 4] * 10
    chatty, silent = at_equal_length([loop, [1, 2]], [loop[:8], [5, 6, 7]])
    assert [len(ids) for ids in chatty] == [len(ids) for ids in silent] == [8, 2]
    assert seq_rep_n(loop) > seq_rep_n(loop[:8])
    assert seq_rep_n(chatty[0]) == seq_rep_n(silent[0])


def test_repetition_summary() -> None:
    figures = repetition([[1, 2] * 40, [1, 2, 3]], [False, True], first=6)
    assert figures["never_stops"] == 0.5
    assert figures["tokens"] == 41.5
    assert figures["seq_rep_4"] == pytest.approx((1 - 2 / 77) / 2)
    assert figures["seq_rep_4_first"] == pytest.approx((1 - 2 / 3) / 2)
    assert figures["longest_repeat"] == 78 / 2
    assert figures["distinct_1"] == 3 / 83


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score without continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_bootstrap_is_seeded_and_covers() -> None:
    rng = np.random.default_rng(3)
    sample = rng.normal(0.4, 1.0, size=400).tolist()
    interval = bootstrap_mean(sample, seed=1)
    assert interval == bootstrap_mean(sample, seed=1) != bootstrap_mean(sample, seed=2)
    error = 1.96 * float(np.std(sample)) / 20
    assert interval.low == pytest.approx(np.mean(sample) - error, abs=0.02)
    assert interval.high == pytest.approx(np.mean(sample) + error, abs=0.02)


def test_bootstrap_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        interval = bootstrap_mean(rng.binomial(1, 0.3, size=150).tolist(), seed=trial, rounds=500)
        held += interval.low <= 0.3 <= interval.high
    assert 180 <= held <= 199


def test_pairing_sharpens_a_difference() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(0, 1, size=200)
    after = before + 0.1 + rng.normal(0, 0.05, size=200)
    interval = paired_interval(before.tolist(), after.tolist(), seed=0)
    assert 0.08 < interval.low < interval.value < interval.high < 0.12
    with pytest.raises(AssertionError):
        paired_interval([1.0], [1.0, 2.0], seed=0)


def flipped(changes: np.ndarray) -> float:
    """The slow reference: of all ways to flip signs, the share whose sum is as large as this one, or larger."""
    sums = np.array([*itertools.product((1, -1), repeat=len(changes))]) @ changes
    return float(np.mean(sums >= abs(changes.sum()) - 1e-9))


@pytest.mark.parametrize("shares", [True, False])
def test_an_interval_leaves_zero_out_only_where_every_way_to_flip_the_signs_says_so(shares: bool) -> None:
    """Of ten items, in every number of gains and losses; the bootstrap's is [1, 1] where one item was gained."""
    rng = np.random.default_rng(0)
    told = []
    for gains, losses in ((g, n - g) for n in range(11) for g in range(n + 1)):
        changes = np.array([1] * gains + [-1] * losses + [0] * (10 - gains - losses), dtype=float)
        changes *= 1 if shares else rng.uniform(0.1, 1, size=10)
        before, after = np.maximum(-changes, 0), np.maximum(changes, 0)
        found = paired_interval(before.tolist(), after.tolist(), 0, 2000, 0.025)
        chance = flipped(changes)
        assert found.low <= found.value <= found.high and found.value == pytest.approx(changes.mean())
        told.append(not found.low <= 0 <= found.high)
        if shares or not 0.015 < chance < 0.035:  # where the random subsets are sure
            assert not told[-1] or chance <= 0.025
            assert told[-1] or chance > 0.025 or (shares and gains + losses < 8)
    assert 6 <= sum(told) <= 30
    for n in range(1, 8):  # no few items tell anything at the level of six figures
        values = [1.0] * n if shares else rng.uniform(0.5, 1, size=n).tolist()
        low, high = paired_interval([0.0] * n, values, 0, 10_000, 0.025 / 6)[1:]
        assert low <= 0 < high


def test_six_figures_of_equal_models_are_told_apart_in_at_most_one_of_twenty() -> None:
    """Of the chances of each number of gains and losses, for shares; by simulation for means with many zeros."""
    tail, rng = 0.025 / 6, np.random.default_rng(0)
    for n, moved in ((4, 0.9), (8, 0.9), (16, 0.6), (30, 0.4)):
        wrong = 0.0
        for changed in range(n + 1):
            for gains in range(changed + 1):
                after = [1] * gains + [0] * (n - gains)
                before = [0] * gains + [1] * (changed - gains) + [0] * (n - changed)
                low, high = paired_interval(before, after, 0, tail=tail)[1:]
                ways = math.comb(n, changed) * math.comb(changed, gains) / 2**changed
                wrong += (not low <= 0 <= high) * ways * moved**changed * (1 - moved) ** (n - changed)
        assert 1 - (1 - wrong) ** 6 <= 0.05, n
    told = 0
    for trial in range(100):
        before, after = rng.beta(0.5, 3, size=(2, 16)) * (rng.random((2, 16)) < 0.5)
        low, high = paired_interval(before.tolist(), after.tolist(), trial, 1000, tail)[1:]
        told += not low <= 0 <= high
    assert told <= 3


def test_a_paired_difference_has_the_error_of_its_pairs() -> None:
    """Against the std of the same difference over many draws of levels; independent samples would be less sure."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        before, after = {}, {}
        for name, size, up, down in (("lake", 64, 0.2, 0.1), ("boxes", 32, 0.1, 0.1)):
            fate = rng.random(size)
            old = fate < 0.5
            change = rng.random(size)
            before[name], after[name] = old, np.where(old, change > 2 * down, change < 2 * up)
        found.append(paired_difference(before, after))
    differences, errors = np.array(found).T
    assert differences.mean() == pytest.approx((0.1 + 0.0) / 2, abs=0.005)
    assert errors.mean() == pytest.approx(differences.std(), rel=0.05)
    same = {"a": [True, False], "b": [True]}
    assert paired_difference(same, same) == (0.0, 0.0)
    one_more = paired_difference({"a": [0] * 64}, {"a": [1] + [0] * 63})
    assert one_more == pytest.approx((1 / 64, 1 / 64))  # no more than its error: one level is no news


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), min_size=1, max_size=40))
def test_a_level_counts_once_in_an_interval(played: list[tuple[str, bool]]) -> None:
    levels, won = [level for level, _ in played], [success for _, success in played]
    low, high = metrics.wilson_of_levels(won, levels)
    share, different = sum(won) / len(won), len(set(levels))
    assert 0 <= low <= share <= high <= 1
    assert metrics.wilson_of_levels(won * 3, levels * 3) == pytest.approx((low, high))  # repeats teach nothing
    plain = metrics.wilson(sum(won), len(won))
    assert metrics.wilson_of_levels(won, list(range(len(won)))) == pytest.approx(plain)
    assert high - low >= plain[1] - plain[0] - 1e-12
    means = metrics.means_of_levels(won, levels)
    assert len(means) == different and all(0 <= mean <= 1 for mean in means)


def test_the_chance_of_a_gain_is_that_of_fair_coins() -> None:
    """Against all outcomes of the levels that changed; and the approximation against the sum that it stands for."""
    for changed in range(8):
        outcomes = list(itertools.product((-1, 1), repeat=changed))
        for up in range(changed + 1):
            before = [False] * up + [True] * (changed - up) + [True, False]
            after = [True] * up + [False] * (changed - up) + [True, False]
            as_good = sum(outcome.count(1) >= up for outcome in outcomes)
            assert metrics.chance_of_gain(before, after) == pytest.approx(as_good / len(outcomes))
    for up, down in ((520, 481), (560, 450), (500, 520)):
        exact = sum(math.comb(up + down, heads) for heads in range(up, up + down + 1)) / 2 ** (up + down)
        assert metrics.chance_of_gain([False] * up + [True] * down, [True] * up + [False] * down) == pytest.approx(
            exact, abs=1e-3
        )


def test_the_chance_of_a_rise_is_that_of_random_signs() -> None:
    draw = np.random.default_rng(0)
    for up, down in ((0, 0), (3, 1), (5, 5), (7, 0), (0, 2), (13, 6), (20, 4)):
        before, after = [0.0] * up + [1.0] * down + [1.0], [1.0] * up + [0.0] * down + [1.0]
        expected = metrics.chance_of_gain([bool(x) for x in before], [bool(x) for x in after])
        assert metrics.chance_of_rise(before, after) == pytest.approx(expected, abs=0 if up + down < 15 else 0.01)
    for count in (6, 40):  # equal policies with graded rewards of any scale are exchanged as often as is allowed
        pairs = draw.exponential(size=(100, 2, count)) ** 2
        found = np.array([metrics.chance_of_rise(before, after) for before, after in pairs.tolist()])
        assert (found <= 0.05).mean() <= 0.1
    assert metrics.chance_of_rise([0.0] * 32, [0.1] * 32) <= 0.05 / 1000


@pytest.mark.parametrize("size, won", [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_success(size: int, won: int) -> None:
    for k in range(1, size + 1):
        chosen = list(itertools.combinations([True] * won + [False] * (size - won), k))
        assert metrics.pass_at(k, size, won) == pytest.approx(sum(map(any, chosen)) / len(chosen))
