"""What if the servers play while the learner learns?  The next steps' episodes, at most `max_staleness` updates ahead.

The rollout of step s begins once the weights of step s - 1 - k have been sent, k = `rollout.max_staleness`, so no turn
of it is more than k updates old when it is learned from. New weights are taken up between two turns, so an episode may
have turns of several versions; each knows its own (`Trajectory.versions`). Episodes of later steps begin as soon as
places are free. Before an evaluation nothing is played ahead: what it decides, the curriculum, holds for all that
follows, and it has the servers to itself.

It has the shape of the protocol `rollout_worker` of TRL's async_grpo: start, stop, update_model_version, check_health.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from envs.episode import Episode
from posttrain.config import StarPORun
from posttrain.models import Chat
from posttrain.rollout import LOOK, RemoteSampler, Sampler, score_late
from posttrain.starpo.run import play_all
from posttrain.types import Trajectory

Levels = Callable[[int], tuple[list[Episode | Trajectory], list[int]]]  # a step's episodes, and their seeds


class RolloutWorker:
    """A thread that plays, and the steps it has played: at most k + 1 of them at a time.

    levels: the episodes of a step that this process plays. sampler: whose servers play.
    """

    def __init__(self, cfg: StarPORun, sampler: Sampler, chat: Chat, levels: Levels) -> None:
        assert isinstance(sampler, RemoteSampler)
        self.cfg, self.chat, self.levels = cfg, chat, levels
        self.servers = sampler.servers
        self.rollout_buffer: dict[int, list[Trajectory]] = {}
        self._sampler = RemoteSampler(self.servers, ahead=True)
        self._changed = threading.Condition()
        self._allowed = self._begun = 0  # the last step that may be played, and that is being played or was
        self._steps: dict[int, list[Trajectory]] = {}  # what each step that is under way has so far
        self._expected: dict[int, list[int]] = {}  # the seeds of its episodes, in their order
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, step: int) -> None:
        """Play from the step after this one on."""
        self._begun = step
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def update_model_version(self, step: int) -> None:
        """Send the weights, which are those after this step, and play further ahead."""
        self.servers.renew()
        every = self.cfg.evaluation.every
        last = min(step + 1 + self.cfg.rollout.max_staleness, (step // every + 1) * every, self.cfg.trainer.max_steps)
        with self._changed:
            self._allowed = last
            self._changed.notify_all()
        if self._thread is None:
            self.start(step)

    def take(self, step: int) -> list[Trajectory]:
        """Return the episodes of this step, in their order, when the last one has ended."""
        with self._changed:
            while not self._changed.wait_for(lambda: step in self.rollout_buffer or self._error, LOOK):
                self.servers.rescue()  # the weights are whole here, and do not change
            self.check_health()
            episodes = self.rollout_buffer.pop(step)
        oldest = min((version for each in episodes for version in each.versions), default=self.servers.version)
        assert self.servers.version - oldest <= self.cfg.rollout.max_staleness, "nothing older is learned from"
        return episodes

    def staleness(self, episodes: Sequence[Trajectory]) -> dict[str, float]:
        """Return by how many updates the weights that wrote these tokens are behind those of now."""
        ages = [
            (self.servers.version - version, tokens)
            for each in episodes
            for version, tokens in zip(each.versions, each.turn_tokens, strict=True)
        ]
        total = sum(tokens for _, tokens in ages)
        return {
            "rollout/staleness": sum(age * tokens for age, tokens in ages) / max(1, total),
            "rollout/staleness_max": max((age for age, _ in ages), default=0),
        }

    def check_health(self) -> None:
        """Raise here what ended the thread."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Begin nothing more, and wait for the episodes that are under way."""
        self.servers.leave_alone()
        with self._changed:
            self._allowed = -1
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._wait_for_a_step():
                self._play(*self._next())
        except BaseException as error:  # raised again where episodes are taken
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _play(self, episodes: list[Episode | Trajectory], seeds: list[int]) -> None:
        """These, and the steps that may be begun by the time that places are free."""

        def go_on(ended: list[Trajectory]) -> None:
            self._keep(ended)
            if self._begun < self._allowed and self._has_room():
                more, of_more = self._next()
                episodes.extend(more)
                seeds.extend(of_more)

        play_all(self.cfg, self._sampler, self.chat, episodes, self.cfg.rollout.temperature, seeds, go_on)

    def _wait_for_a_step(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._begun < self._allowed or self._allowed < 0)
            return self._allowed >= 0

    def _has_room(self) -> bool:
        """Whether fewer episodes are under way than may be played at a time."""
        left = sum(len(self._expected[step]) - len(done) for step, done in self._steps.items())
        return left < self.cfg.rollout.conversations

    def _next(self) -> tuple[list[Episode | Trajectory], list[int]]:
        self._begun += 1
        episodes, seeds = self.levels(self._begun)
        self._steps[self._begun], self._expected[self._begun] = [], list(seeds)
        return episodes, seeds

    def _keep(self, ended: Sequence[Trajectory]) -> None:
        """Put each episode to its step, and the steps that are whole where the learner finds them."""
        for trajectory in ended:
            step = next(step for step, seeds in self._expected.items() if trajectory.seed in seeds)
            self._steps[step].append(trajectory)
        for step in [step for step, ended in self._steps.items() if len(ended) == len(self._expected[step])]:
            score_late(self._steps[step])
            by_seed = {trajectory.seed: trajectory for trajectory in self._steps.pop(step)}
            with self._changed:
                self.rollout_buffer[step] = [by_seed[seed] for seed in self._expected.pop(step)]
                self._changed.notify_all()
