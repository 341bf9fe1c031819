"""Where do the figures of a run go?  Into metrics.jsonl, the dashboards, the progress bar and the alarms."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from posttrain.config import StarPORun
from posttrain.metrics import chance_of_gain, chance_of_rise, paired_difference
from posttrain.models import Chat
from posttrain.runtime import dashboards, runlog
from posttrain.starpo.experience import Experience
from posttrain.starpo.learner import Learner
from posttrain.starpo.monitoring import transcripts, watch
from posttrain.starpo.monitoring.alarms import Alarm
from posttrain.starpo.monitoring.collapse import work
from posttrain.starpo.monitoring.token_figures import TokenFigures, token_figures
from posttrain.starpo.run_state import LevelRewards, RunState
from posttrain.types import Trajectory, words_of

EVIDENCE = 0.05  # the largest probability that a policy which is not better becomes the best


class Monitor:
    """The output of a run: files, dashboards, progress bar, alarms.

    settings: the config as the user wrote it. exact: whether sampler and trainer round alike.
    """

    def __init__(self, cfg: StarPORun, settings: dict[str, Any], state: RunState, exact: bool, resume: bool) -> None:
        self.cfg, self.raised, out = cfg, list[Alarm](), Path(cfg.output_dir)  # raised: the alarms of this step
        self.words = words_of(env.name for env in cfg.envs)
        after = state.step or None  # steps that will be played again are dropped
        self.metrics = runlog.MetricsFile(out / "metrics.jsonl", after_step=after, but_not="final/")
        runlog.MetricsFile(out / "transcripts.jsonl", after_step=after)
        self.alarms = runlog.MetricsFile(out / "alarms.jsonl", after_step=after)
        self.boards = dashboards.open_dashboards(cfg, settings, resume=resume)
        self.boards.catch_up(after)
        self.progress = runlog.Progress(cfg.trainer.max_steps, "phase 3", start=state.step)
        self.say = self.progress.say
        self.watch = watch.Watch(cfg, self.say, exact)

    def report(self, state: RunState, step: int, row: dict[str, float]) -> None:
        """Write a row of figures, and raise its alarms."""
        if "rollout/kept_groups" in row:
            state.work += work(self.cfg, row)
            if state.empty_steps == 1:  # the first of several in a row
                self.say(f"step {step}: no group passed the filter, so nothing was trained.")
        self.metrics.write(row, step)
        self.boards.log(row, step)
        raised = self.watch.see(state, step, row)
        for alarm in raised:
            self.alarms.write(asdict(alarm), step)
            self.boards.alarm(asdict(alarm), step)
        self.raised.extend(raised)
        shown = {key.split("/", 1)[1]: value for key, value in row.items() if key.endswith("/success")}
        self.progress.update(step, **shown)

    def tokens(
        self, learner: Learner, chat: Chat, groups: list[list[Trajectory]], step: int, experience: Experience | None
    ) -> list[list[TokenFigures]]:
        """Return the token figures of the episodes that `record` writes. Call before the update, on every process."""
        return token_figures(learner, chat, transcripts.written_episodes(self.cfg, groups, step), experience)

    def record(
        self, groups: list[list[Trajectory]], state: RunState, step: int, tokens: list[list[TokenFigures]] | None = None
    ) -> None:
        """Write transcripts and pictures, where due."""
        transcripts.record_step(self.cfg, groups, step, state, self.boards, self.say, tokens)

    def show_validation(self, played: list[Trajectory], step: int) -> None:
        """Show episodes of validation levels on the dashboards."""
        transcripts.show_validation(self.cfg, played, step, self.boards, self.say)

    def compare_with_best(
        self, state: RunState, step: int, won: dict[str, list[bool]], earned: LevelRewards
    ) -> tuple[bool, dict[str, float]]:
        """Return whether this policy wins more validation levels than the best so far, and figures of the difference.

        Where both win all or none of them, it has to earn more; a crashed episode earns what the worst one did. Where
        rewards are not learned from, it must not win fewer. An equal policy may become the best, or be refused for
        fewer, with a probability of at most EVIDENCE in the last evaluation, and of at most EVIDENCE in all evaluations
        before it together.

        Args:
            won, earned: by environment, of each level; `earned` without penalties.
        """
        if not state.best_won:
            return True, {}
        gain, error = paired_difference(state.best_won, won)
        before, after = ([one for name in won for one in wins[name]] for wins in (state.best_won, won))
        before_the_last = math.ceil(self.cfg.trainer.max_steps / self.cfg.evaluation.every) - 1
        last = state.stopped_early or step == self.cfg.trainer.max_steps
        allowed = EVIDENCE if last else EVIDENCE / max(1, before_the_last)
        success = sum(sum(levels) / len(levels) for levels in won.values()) / len(won)
        words = self.words
        shown = f"step {step}: {success:.1%} of validation {words.levels} {words.won}, "
        points, same = f"{100 * gain:+.1f} points", f"on the same {words.levels}. By chance alone,"
        if not self.cfg.rewarded:
            chance = chance_of_gain(after, before)
            better = chance > allowed
            self.say(
                f"{shown}{points} against the highest success so far {same} it is that low with a probability of"
                f" {chance:.2g} (limit: {allowed:.2g}). Rewards are not learned from, so the last policy that is not"
                f" worse is kept: " + ("this one." if better else f"that of step {state.best_step}.")
            )
        else:
            chance = chance_of_gain(before, after)
            if len({*before, *after}) == 1 and earned != state.best_earned:  # success cannot tell them apart
                rewards = _with_crashed(state.best_earned, earned)
                rise, _ = paired_difference(*rewards)
                mean = fmean(fmean(levels) for levels in rewards[1].values())
                filled = " with the lowest for crashed episodes," if rewards != [state.best_earned, earned] else ""
                shown += f"as at step {state.best_step}; mean reward {mean:.3g} without penalties,{filled} "
                points = f"{rise:+.3g}"
                chance = chance_of_rise(*([one for name in won for one in of[name]] for of in rewards))
            better = chance <= allowed
            self.say(
                f"{shown}{points} against step {state.best_step} {same} such a gain has a probability of {chance:.2g}"
                f" (limit: {allowed:.2g}). "
                + ("The new best." if better else f"Step {state.best_step} remains the best.")
            )
        return better, {"evaluation/over_best": gain, "evaluation/over_best_error": error}

    def stop_early(self, state: RunState, success: float) -> None:
        """Stop the run if an alarm of this step asks for it or every level is won. success: of this step's rollout."""
        severe = any(alarm.severity == "stop" for alarm in self.raised)
        if severe and (self.cfg.diagnostics.early_stop or state.empty_steps >= self.cfg.algorithm.max_empty_steps):
            self.say(f"step {state.step}: stopped early, the alarm above says why.")
            state.stopped_early = True
        elif watch.solved(self.cfg, state, success):
            self.say(f"step {state.step}: stopped early, every {self.words.level} is {self.words.won}.")
            state.stopped_early = True

    def close(self) -> None:
        self.progress.close()
        self.boards.finish()


def _with_crashed(*evaluations: LevelRewards) -> list[dict[str, list[float]]]:
    """Return evaluations of the same levels in which a crashed episode has the lowest reward of its environment.

    With 0, a policy that crashes would beat one whose rewards are negative. 0 where no episode has a reward.
    """
    lowest = {
        name: min((each for of in evaluations for each in of[name] if each is not None), default=0.0)
        for name in evaluations[0]
    }
    return [
        {name: [lowest[name] if each is None else each for each in levels] for name, levels in of.items()}
        for of in evaluations
    ]
