"""Does the simulation of many devices do its sums right?  Against closed forms, and against what must always hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks import _scale_runs, scale_out
from benchmarks.simulation import REFILL_BELOW, Costs, Group, Layout, Mode, Turn, simulate

COSTS = Costs(step=0.01, row=0.001, context=1e-5, read=1e-4, turn=2e-4, update=0.5, learn=1e-5, transfer=0.1)
MODES: list[Mode] = ["lockstep", "refilled", "asynchronous"]


def drawn(seed: int, groups: int, members: int = 2, most: int = 60) -> list[Group]:
    rng = random.Random(seed)
    return [
        [[Turn(rng.randint(1, 20), rng.randint(1, most)) for _ in range(rng.randint(1, 4))] for _ in range(members)]
        for _ in range(groups)
    ]


def test_the_slot_engine_refills_where_the_simulation_says_so() -> None:
    from posttrain.rollout.engines import slots

    assert slots.REFILL_BELOW == REFILL_BELOW


@pytest.mark.parametrize("mode", ["lockstep", "refilled"])
def test_one_device_and_equal_turns_have_a_closed_form(mode: Mode) -> None:
    groups = [[[Turn(10, 4), Turn(6, 4)]] * 3] * 2  # 6 conversations, each: read 10, write 4, read 6, write 4
    first = 6 * 10 * COSTS.read + sum(COSTS.step + 6 * (COSTS.row + (10 + t) * COSTS.context) for t in range(1, 5))
    second = 6 * 6 * COSTS.read + sum(COSTS.step + 6 * (COSTS.row + (20 + t) * COSTS.context) for t in range(1, 5))
    learning = 6 * 24 * COSTS.learn + COSTS.update
    found = simulate(mode, [groups] * 3, COSTS, Layout(1))
    assert found.seconds == pytest.approx(first + second + 12 * COSTS.turn + learning)
    assert found.busy == pytest.approx(1)


def test_a_prompt_that_the_group_shares_is_read_once_and_seen_by_all() -> None:
    alone = simulate("refilled", [[[[Turn(50, 5)]]]], COSTS, Layout(1)).seconds
    both = simulate("refilled", [[[[Turn(50, 5)], [Turn(0, 5, copied=50)]]]], COSTS, Layout(1)).seconds
    row = sum(COSTS.row + (50 + t) * COSTS.context for t in range(1, 6))
    assert both - alone == pytest.approx(row + COSTS.turn + 55 * COSTS.learn)


def test_devices_that_do_not_disturb_each_other_halve_the_play() -> None:
    free = COSTS._replace(update=0.0)
    one, two = ([[[Turn(10, 8)]] * 2] * count for count in (1, 2))
    assert simulate("refilled", [one], free, Layout(1)).seconds == pytest.approx(
        simulate("refilled", [two], free, Layout(2)).seconds
    )


def test_processes_that_share_a_core_take_turns() -> None:
    groups = drawn(1, 8)
    for mode in ("lockstep", "refilled"):
        work = sum(simulate(mode, [[group]], COSTS._replace(learn=0, update=0), Layout(1)).seconds for group in groups)
        shared = simulate(mode, [groups], COSTS._replace(learn=0, update=0), Layout(8, cores=1))
        assert shared.seconds == pytest.approx(work)


def test_a_long_tail_holds_up_the_others_in_lockstep_alone() -> None:
    """One turn of 500 tokens among turns of 5: refilled rows play on meanwhile."""
    short = [[Turn(5, 5)] * 40]
    groups = [[[Turn(5, 500)]]] + [short] * 15
    free = COSTS._replace(row=0.0, context=0.0, update=0.0, turn=0.0, read=0.0)
    lockstep, refilled = (simulate(mode, [groups], free, Layout(1)).seconds for mode in ("lockstep", "refilled"))
    # one after the other, and side by side
    assert lockstep - refilled == pytest.approx(39 * 5 * free.step, rel=0.05)


def test_without_staleness_an_asynchronous_run_waits_and_with_it_playing_hides_behind_learning() -> None:
    groups = [[[Turn(10, 20)]] * 4] * 4
    costs = COSTS._replace(transfer=0.0)
    playing = simulate("refilled", [groups], costs._replace(update=0, learn=0), Layout(1)).seconds
    learning = 16 * 30 * costs.learn + costs.update
    waits = simulate("asynchronous", [groups] * 6, costs, Layout(2, learners=1, staleness=0), skip=1)
    overlaps = simulate("asynchronous", [groups] * 6, costs, Layout(2, learners=1, staleness=1), skip=1)
    assert waits.seconds == pytest.approx(playing + learning) and waits.stalest == 0
    assert overlaps.seconds == pytest.approx(max(playing, learning), rel=0.05) and overlaps.stalest == 1


def test_new_weights_wait_for_the_turns_under_way() -> None:
    """Three steps of one episode each, begun together; the last writes a long turn when the first update ends."""
    steps = [[[[Turn(0, 5)]]], [[[Turn(0, 5)]]], [[[Turn(0, 100)]]]]
    costs = Costs(step=1.0, update=10.0)
    found = simulate("asynchronous", steps, costs, Layout(2, learners=1, staleness=2), skip=1)
    # the first update is from 5 to 15; the second could begin at 15 and waits for the turn that ends at 100
    assert found.seconds == pytest.approx((120 - 15) / 2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    devices=st.integers(2, 6),
    slots=st.integers(1, 8),
    staleness=st.integers(0, 3),
    mode=st.sampled_from(MODES),
)
def test_what_always_holds(seed: int, devices: int, slots: int, staleness: int, mode: Mode) -> None:
    iterations = [drawn(seed + step, 5) for step in range(5)]
    layout = Layout(devices, learners=1 + seed % (devices - 1), slots=slots, staleness=staleness)
    found = simulate(mode, iterations, COSTS, layout)
    assert 0 < found.busy <= 1 + 1e-9
    assert 0 <= found.stale <= found.stalest <= (staleness if mode == "asynchronous" else 0)
    again = simulate(mode, iterations, COSTS, layout)
    assert again == found
    # nobody is faster than the longest episode alone, nor than all devices that never wait
    longest = max(sum(turn.write for turn in episode) for groups in iterations for group in groups for episode in group)
    assert found.seconds * len(iterations) >= longest * COSTS.step
    slower = simulate(mode, iterations, COSTS._replace(step=2 * COSTS.step), layout)
    assert slower.seconds > found.seconds


def test_an_engine_has_to_read_and_write_every_token_of_an_episode_once() -> None:
    from posttrain.types import Completion, Segment, Trajectory

    def played() -> Trajectory:
        segment = Segment([1, 2, 3])
        segment.write(0, Completion([4, 5], [0.0, 0.0], True))
        segment.read([6, 7, 8])
        segment.write(1, Completion([9], [0.0], True))
        return Trajectory(segments=[segment], turn_rewards=[0.0, 0.0])

    first, second = _scale_runs.turns_of([played(), played()])
    assert list(first) == [Turn(3, 2), Turn(3, 1)]
    assert list(second) == [Turn(0, 2, copied=3), Turn(3, 1)]


@pytest.mark.thorough
def test_the_figure_and_the_table_of_many_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_out, "DEVICES", [1, 4])
    monkeypatch.setattr(scale_out, "EPISODES", (4, 2))
    monkeypatch.setattr(scale_out, "drawn", lambda sigma, steps: [drawn(step, 4) for step in range(steps)])
    results = scale_out.many()
    found = {(row["tail"], row["devices"], row["mode"]) for row in results["rows"]}
    assert ("even", 4, "asynchronous") in found and ("even", 1, "asynchronous") not in found
    scale_out.plot(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert scale_out.told(results).count("\n") == 1 + 2 * len(scale_out.TAILS)


def test_tails_differ_in_length_and_not_in_their_mean() -> None:
    for sigma in (0.1, 0.7):
        writes = [turn.write for g in scale_out.drawn(sigma, 1, groups=300)[0] for e in g for turn in e]
        assert sum(writes) / len(writes) == pytest.approx(scale_out.TOKENS, rel=0.05)
