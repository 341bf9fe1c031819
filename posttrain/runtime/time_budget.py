"""Is there time for an evaluation now?  Its share of the training time, the same for all processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from posttrain.runtime import parallel, runlog

LATEST = 10**12  # a step behind every run


class TimeBudget:
    """Evaluations every so many steps that together take at most a share of the training time.

    The first and the last one always run. Another one runs where what all have taken so far, what it is expected to
    take (as long as the one before it) and as much for the last one are within the share; otherwise it is postponed to
    the step at which they will be. The first process decides, since the clocks of two processes differ.
    """

    def __init__(
        self,
        share: float | None,
        every: int,
        last_step: int,
        kept: dict[str, float],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Count from now on.

        Args:
            share: of the training time, e.g. 0.1; None postpones nothing.
            every: steps between two evaluations.
            last_step: of the run.
            kept: what a checkpoint has to keep, changed in place; empty where a run begins. Seconds of training and of
                all evaluations (`trained`, `spent`) and of the latest one (`cost`), the step to which one is postponed
                (`next`).
            say: prints a line.
            clock: returns seconds.
        """
        self.share, self.every, self.last_step = share, every, last_step
        self.kept, self.say, self.clock = kept, say, clock
        self._since = clock()

    def count(self) -> None:
        """Add the seconds since the last call, which are training, to what a checkpoint keeps."""
        now = self.clock()
        self.kept["trained"] = self.kept.get("trained", 0.0) + now - self._since
        self._since = now

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the time inside as that of an evaluation."""
        self.count()
        yield
        now = self.clock()
        self.kept["cost"] = now - self._since
        self.kept["spent"] = self.kept.get("spent", 0.0) + self.kept["cost"]
        self._since = now

    def due(self, step: int, what: str, device: torch.device, *, always: bool = False) -> bool:
        """Return whether to evaluate after this step, the same in all processes, which must all call it.

        Args:
            step: the number of steps done.
            what: is evaluated, for the message of a postponement.
            device: of this process.
            always: evaluate whatever it takes, as after the last step.
        """
        self.count()
        if always or step in (0, self.last_step):
            return True
        if step % self.every or step < self.kept.get("next", 0):
            return False
        later = int(parallel.total(self._possible(step) if runlog.is_main_process() else 0.0, device))
        if later == step:
            return True
        self.kept["next"] = later
        when = f"at step {later}" if later < self.last_step else "after the last step"
        spent, cost, trained = (self.kept.get(name, 0.0) for name in ("spent", "cost", "trained"))
        self.say(
            f"step {step}: {what} are postponed, next {when}. So far {spent:.1f} s in {trained:.1f} s of training, and"
            f" {cost:.1f} s each time, is more than evaluation.budget={self.share}."
        )
        return False

    def _possible(self, step: int) -> float:
        """Return the first step from this one on at which an evaluation is within the share."""
        if self.share is None or not self.kept.get("cost"):
            return step
        trained = self.kept["trained"]
        needed = (self.kept["spent"] + 2 * self.kept["cost"]) / self.share
        if trained >= needed:
            return step
        at = min(LATEST, step * needed / trained) if trained > 0 else LATEST
        return max(step + self.every, math.ceil(at / self.every) * self.every)
