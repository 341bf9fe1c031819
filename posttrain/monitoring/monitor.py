"""Where do the figures of a run go?  Into metrics.jsonl, the tracker and the progress bar, past the alarms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain import run_state, runlog
from posttrain.config import StarPORun
from posttrain.learner import Learner
from posttrain.metrics import paired_difference
from posttrain.monitoring import transcripts, watch
from posttrain.monitoring.alarms import Alarm
from posttrain.run_state import RunState, changed
from posttrain.types import Trajectory


class Monitor:
    """`settings` is the config as the user gave it. exact: whether sampler and trainer round alike."""

    def __init__(self, cfg: StarPORun, settings: dict[str, Any], state: RunState, exact: bool) -> None:
        self.cfg, self.raised, out = cfg, list[Alarm](), Path(cfg.output_dir)  # raised: the alarms of this step
        after = state.step or None  # steps that will be played again are dropped
        self.metrics = runlog.MetricsFile(out / "metrics.jsonl", after_step=after, but_not="final/")
        runlog.MetricsFile(out / "transcripts.jsonl", after_step=after)
        name = cfg.run_name or out.name
        self.tracker = runlog.start_tracker(cfg.report_to, project="posttrain", run_name=name, config=settings)
        self.progress = runlog.Progress(cfg.trainer.max_steps, "phase 3", start=state.step)
        self.say = self.progress.say
        self.watch = watch.Watch(cfg, self.say, self.tracker.alert, exact)

    def report(self, state: RunState, step: int, row: dict[str, float]) -> None:
        self.metrics.write(row, step)
        self.tracker.log(row, step)
        self.raised.extend(self.watch.see(state, step, row))
        shown = {key.split("/", 1)[1]: value for key, value in row.items() if key.endswith("/success")}
        self.progress.update(step, **shown)

    def record(self, groups: list[list[Trajectory]], state: RunState, step: int) -> None:
        """Transcripts and pictures, where due."""
        transcripts.record(self.cfg, groups, step, state, self.tracker, self.say)

    def compare_with_best(
        self, state: RunState, step: int, won: dict[str, list[bool]]
    ) -> tuple[bool, dict[str, float]]:
        """Whether this policy wins more validation levels than the best one so far, and by how many, as figures.

        A difference within one standard error is none, except in the last step: what was trained longer then wins.
        """
        if not state.best_won:
            return True, {}
        gain, error = paired_difference(state.best_won, won)
        needed = 0.0 if step == self.cfg.trainer.max_steps else error
        better, split = gain > needed + 1e-9, self.cfg.evaluation.split
        success = sum(sum(levels) / len(levels) for levels in won.values()) / len(won)
        self.say(
            f"step {step}: {success:.1%} of {split} levels won, {100 * gain:+.1f}"
            f" points against step {state.best_step} on the same levels; a new best needs more than"
            f" {100 * needed:.1f}: " + ("the new best" if better else f"step {state.best_step} stays it")
        )
        return better, {"evaluation/over_best": gain, "evaluation/over_best_error": error}

    def react(self, cfg: StarPORun, learner: Learner, state: RunState, success: float) -> tuple[RunState, StarPORun]:
        """What follows from this step's alarms: back to the best policy with a changed config, the end, or nothing.

        success: of its rollout.
        """
        severe = any(alarm.severity == "stop" for alarm in self.raised)
        if changes := watch.remedy(cfg, state, self.raised):
            step, state = state.step, self._go_back(learner, state, changes)
            words = f"step {step}: back to the policy of step {state.best_step}, with {changes}"
            self.say(words)
            self.tracker.alert("went back", words)
            row: dict[str, Any] = {"intervention/back_to": state.best_step, "intervention/changes": changes}
            self.metrics.write(row, step)
            return state, changed(cfg, changes)
        if severe and (cfg.diagnostics.early_stop or state.empty_steps >= cfg.algorithm.max_empty_steps):
            self.say(f"step {state.step}: stopped early, the alarm above says why.")
            state.stopped_early = True
        elif watch.solved(cfg, state, success):
            self.say(f"step {state.step}: stopped early, every level is won and nothing is left to learn from.")
            state.stopped_early = True
        return state, cfg

    def _go_back(self, learner: Learner, state: RunState, changes: dict[str, Any]) -> RunState:
        """The best policy so far in place, with its optimizer, in a run that goes on from this step."""
        intervention = {
            "step": state.step,
            "alarms": [alarm.name for alarm in self.raised],
            "back_to": state.best_step,
            "changes": changes,
        }
        goes_on = ("step", "tokens", "curriculum", "best_success", "best_step", "best_won")
        best = run_state.load(Path(self.cfg.output_dir) / f"best-{state.best_step}", learner)
        best = replace(best, **{name: getattr(state, name) for name in goes_on}, alarms={})
        best.interventions = [*state.interventions, intervention]
        if (coef := changes.get("algorithm.entropy_coef")) is not None:
            best.entropy_coef = best.entropy_bonus = coef
        return best

    def close(self) -> None:
        self.progress.close()
        self.tracker.finish()
