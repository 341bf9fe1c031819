"""How does TRL's GRPOTrainer play one of our environments?  By a class for its `environment_factory`, and rows.

GRPOTrainer(
    model,
    environment_factory=environment("frozen_lake", size=4),
    train_dataset=rows("frozen_lake", 1000),
    reward_funcs=[success],
    args=GRPOConfig(reward_weights=[0.0], max_tool_calling_iterations=8, ...),
)

The model plays by calling the tool `act`. TRL knows no end of an episode: a model may stop early, and further calls
after the end change nothing.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

from envs import make
from envs.adapters.base import package
from envs.episode import Episode
from envs.protocol import Protocol, format_response

if TYPE_CHECKING:
    from datasets import Dataset

OVER = "The episode is over."


class TRLGame:
    """What TRL plays, one instance for each sample of a batch; each public method but two is a tool."""

    _name: ClassVar[str]
    _options: ClassVar[dict[str, Any]]
    _protocol: ClassVar[Protocol]
    _numbers: ClassVar[Any]  # of the instances
    _episode: Episode | None = None

    def __init__(self) -> None:
        self._number, self._resets, self._reward = next(self._numbers), 0, 0.0

    def reset(self, seed: int, split: str = "train", **row: Any) -> str:
        """Start the level of a row and return the rules and the first observation, which TRL adds to the prompt."""
        self._resets += 1  # the samples of a group share the level and not the noise
        noise_seed = (self._number << 32) + self._resets
        self._episode = Episode(make(self._name, **self._options), self._protocol, int(seed), split, noise_seed)
        self._reward = 0.0
        calls = self._protocol.max_turns
        limit = f"At most {calls} calls of act, one action each." if calls > 1 else "At most 1 call of act, one action."
        return f"{self._episode.env.rules()} {limit}\n\n{self._episode.observation}"

    def act(self, action: str) -> str:
        """
        Plays one action.

        Args:
            action: The action, written as the rules say.

        Returns:
            The reward of the action and the state after it.
        """
        if not isinstance(action, str):
            raise ValueError(f"The action must be one text, not {type(action).__name__}.")
        episode = self._episode
        if episode is None or episode.done:
            return OVER
        try:
            turn = episode.step(format_response("", [action], self._protocol))
        except (Exception, SystemExit) as error:  # also for a reward of NaN, which would spoil its group
            self._episode = None
            raise ValueError(f"The environment {self._name} failed ({error}): the episode is over.") from error
        self._reward += turn.reward + turn.penalty
        if turn.user is not None:
            return turn.user
        words = "Your reward was {:g}." if self._protocol.style == "plain" else "Reward {:g}"
        return f"{words.format(round(turn.reward, 6))}\n{episode.env.observe()}\n{OVER}"

    def get_reward(self) -> float:
        """Return the sum of the rewards of all turns and of the penalties for invalid actions."""
        return self._reward


def environment(name: str, max_turns: int | None = None, **options: Any) -> type[TRLGame]:
    """Return the class for `environment_factory`; TRL logs its reward under the name of the environment's class.

    Args:
        max_turns: turns of an episode; None for the environment's own number.

    Raises:
        ValueError: there is no such environment or option.
    """
    env = make(name, **options)
    own = {
        "__doc__": env.__doc__,
        "_name": name,
        "_options": options,
        "_protocol": Protocol.of(env, max_turns, think=False),
        "_numbers": itertools.count(),
    }
    return type(type(env).__name__, (TRLGame,), own)


def rows(name: str, count: int, split: str = "train", first: int = 0) -> Dataset:
    """Return a data set of levels.

    Args:
        name: of the environment; the column `environment` is for a dictionary of factories.
        split: train, validation or test.
    """
    package("datasets", "datasets")
    from datasets import Dataset

    prompt = [{"role": "user", "content": "Play by calling the tool act, one action at a time.\n\n"}]
    row = {"prompt": prompt, "environment": name, "split": split}
    return Dataset.from_list([{**row, "seed": seed} for seed in range(first, first + count)])


def success(environments: list[TRLGame], **_: Any) -> list[float | None]:
    """Return whether each sample has solved its level: a reward function to be logged with weight 0."""
    return [float(game._episode is not None and game._episode.success) for game in environments]
