"""Do evaluations during training keep within their share of the time, and is a decision the same after a stop?"""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from posttrain.runtime.time_budget import TimeBudget

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    costs: list[float], share: float | None, steps: int, every: int, kept: dict[str, float], begin: int = 0
) -> tuple[list[int], list[str], Clock]:
    """Return the steps of evaluations of a run whose steps take a second each, what it said, and its clock."""
    clock, said, done = Clock(), list[str](), list[int]()
    budget = TimeBudget(share, every, steps, kept, said.append, clock)
    for step in range(begin, steps + 1):
        if step > begin:
            clock.now += 1
        if (step > begin or step == 0) and budget.due(step, "the suites", CPU, always=step in (0, steps)):
            with budget.measuring():
                clock.now += costs[min(len(done), len(costs) - 1)]
            done.append(step)
    budget.count()
    return done, said, clock


def test_what_would_exceed_the_budget_is_postponed_and_said_once() -> None:
    done, said, _ = run([2.0], 0.1, 120, 10, {})
    assert done == [0, 60, 80, 100, 120]
    assert len(said) == 4 and said[0].startswith("step 10: the suites are postponed, next at step 60.")
    assert said[1].startswith("step 70: the suites are postponed, next at step 80.")
    assert said[-1].startswith("step 110: the suites are postponed, next after the last step.")


def test_without_a_budget_or_a_cost_nothing_is_postponed() -> None:
    assert run([50.0], None, 20, 10, {})[:2] == ([0, 10, 20], [])
    assert run([0.0], 0.1, 20, 10, {})[:2] == ([0, 10, 20], [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 30), min_size=1, max_size=9), st.sampled_from([0.05, 0.1, 0.5]), st.integers(1, 7),
    st.integers(1, 90),
)  # fmt: skip
def test_the_share_is_kept_but_for_the_first_the_last_and_surprises(
    costs: list[float], share: float, every: int, steps: int
) -> None:
    """With equal costs two are free at most; each other one was within the share when it began."""
    kept: dict[str, float] = {}
    done, _, _ = run(costs[:1], share, steps, every, kept)
    assert done[0] == 0 and done[-1] == steps and all(step % every == 0 for step in done[:-1])
    assert kept["trained"] == steps or abs(kept["trained"] - steps) < 1e-6
    assert kept["spent"] <= max(share * kept["trained"], 2 * costs[0]) + 1e-6


def test_a_resumed_run_evaluates_where_the_whole_run_did() -> None:
    whole, said, _ = run([2.0], 0.1, 120, 10, {})
    kept: dict[str, float] = {}
    clock, first = Clock(), list[int]()
    budget = TimeBudget(0.1, 10, 120, kept, lambda _: None, clock)
    for step in range(76):
        clock.now += step > 0
        if budget.due(step, "the suites", CPU, always=step == 0):
            with budget.measuring():
                clock.now += 2
            first.append(step)
    budget.count()
    second, later, _ = run([2.0], 0.1, 120, 10, dict(kept), begin=75)
    assert first + second == whole and later == said[2:]
