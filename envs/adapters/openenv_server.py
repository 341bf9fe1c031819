"""What does a client of OpenEnv play when one of our environments is served?  Its actions, observations and tasks."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import partial
from typing import Any

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field

from envs import SPLITS, make
from envs.adapters.base import SESSIONS, TASKS, plain_numbers
from envs.base import TextEnv, known
from envs.guard import OwnPagesOnly, WholeRequests
from envs.protocol import STYLES

MOST_BYTES = 1 << 20  # of a request or a message: an action and its options


class TextAction(Action):
    """TextAction(text="Left")."""

    text: str = Field(description="one action, as the rules say")


class TextObservation(Observation):
    """TextObservation(text="You 0 0 Goal 3 3 ...", reward=0.0, done=False, metadata={"success": False, ...})."""

    text: str = Field(default="", description="the state")
    rules: str = Field(default="", description="what there is to do, with the first observation of an episode")
    actions: list[str] | None = Field(default=None, description="all actions there are, or none where it is free text")
    action_word: str = Field(default="", description="what the rules call an action, with the first observation")
    example_thought: str = Field(default="", description="how to think before an action, with the first observation")
    example_actions: list[str] | None = Field(default=None, description="the actions that follow from that thought")
    example_state: str = Field(default="", description="what the example is about, if its thought does not say it")
    messages: list[dict[str, str]] | None = Field(default=None, description="a whole prompt in place of rules")


class TextState(State):
    """What a client can know before it plays: TextState(max_turns=8, actions=["Left", ...])."""

    max_turns: int = 0
    actions: list[str] | None = None
    styles: tuple[str, ...] = STYLES  # that `reset` takes


class Served(Environment[TextAction, TextObservation, TextState]):
    """One session: an environment and its episode, which ends with the environment or after `max_turns` actions."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, name: str, options: dict[str, Any], max_turns: int | None = None, tasks: int = TASKS) -> None:
        super().__init__()
        self.env: TextEnv = make(name, **options)
        self.max_turns = self.env.max_turns if max_turns is None else max_turns
        self.tasks = tasks
        self.info: dict[str, Any] = {}
        self.turns = -1  # before the first reset
        self.episode_id: str | None = None

    # -- play ------------------------------------------------------------------------------------------------------

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        style: str = "plain",
        **_: Any,
    ) -> TextObservation:
        """Return the level of a task, or of a seed. Beside an index, `seed` is that of chance inside the episode.

        `style` is that of the protocol in which the client plays: rules and observations are in its words.
        """
        for what, value in (("seed", seed), ("index", index)):
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"reset takes {what} as a whole number of 0 or more, not {json.dumps(value)}.")
        options: dict[str, Any] = {"split": split}
        if index is not None:
            self.get_task(split, index)
            options |= {} if seed is None else {"noise_seed": seed}
            seed = index
        self.env.style = known("style", style, STYLES)
        text, info = self.env.reset(seed=seed, options=options)
        self.info = dict(info)
        self.turns, self.episode_id, self.terminated, self.truncated = 0, episode_id, False, False
        thought, example = self.env.example()
        own = self.env.messages()
        return TextObservation(
            text=without_surrogates(text),
            rules=without_surrogates(self.env.rules()),
            actions=list(self.env.actions) if self.env.actions else None,
            action_word=self.env.action_word,
            example_thought=thought,
            example_actions=list(example),
            example_state=self.env.example_state,
            messages=own and [{key: without_surrogates(value) for key, value in message.items()} for message in own],
            metadata=self.observation_metadata(),
        )

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        if self.turns < 0:
            raise RuntimeError("There is no episode: reset() comes before step().")
        reward = 0.0
        if not (self.terminated or self.truncated):
            name = action.text if self.env.actions is None else self.env.canonical_action(action.text)
            self.info = {**self.info, "action_is_valid": False, "action_is_effective": False}
            if name is not None and (name.strip() or self.env.messages() is not None):
                gain, terminated, truncated, info = self.env.step(name)[1:]
                reward, self.info = float(gain), info
                self.terminated, self.truncated = bool(terminated), bool(truncated)
            self.turns += 1
            self.truncated = not self.terminated and (self.truncated or self.turns >= self.max_turns)
        return TextObservation(
            text=without_surrogates(self.env.observe()),
            reward=reward,
            done=self.terminated or self.truncated,
            metadata=self.observation_metadata(),
        )

    def observation_metadata(self) -> dict[str, Any]:
        """Return what stands beside an observation: `info`, how the episode ended, and a name for the state."""
        values = {key: plain_numbers(value) for key, value in self.info.items()}
        if self.env.has("state_key"):  # its digest alone: a key may hold what the player must not see
            values["state_key"] = hashlib.sha256(self.env.state_key().encode("utf-8", "replace")).hexdigest()[:24]
        return values | {"terminated": self.terminated, "truncated": self.truncated}

    @property
    def state(self) -> TextState:
        actions = list(self.env.actions) if self.env.actions else None
        turns = max(0, self.turns)
        return TextState(episode_id=self.episode_id, step_count=turns, max_turns=self.max_turns, actions=actions)

    def get_metadata(self) -> EnvironmentMetadata:
        self.env.reset(seed=0)  # rules may speak of the level
        return EnvironmentMetadata(name=self.env.name, description=without_surrogates(self.env.rules()), version="1")

    # -- tasks -----------------------------------------------------------------------------------------------------

    def list_splits(self) -> list[str]:
        return list(SPLITS)

    def num_tasks(self, split: str) -> int:
        self.get_task(split, 0)
        return self.tasks

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return a task. IndexError for one that does not exist, which the server answers as a bad request."""
        if split not in SPLITS or not 0 <= index < self.tasks:
            raise IndexError(f'no task {index} in the split "{split}": {", ".join(SPLITS)}, 0 to {self.tasks - 1}')
        return {"id": f"{self.env.name}-{split}-{index}", "index": index, "split": split}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return [self.get_task(split, index) for index in range(self.num_tasks(split))[start:stop]]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)


def without_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which no message can carry."""
    return text.encode("utf-8", "replace").decode()


def vanished(record: logging.LogRecord) -> bool:
    """Return whether a log record only tells that a client has disconnected, which is not a failure of the server."""
    error = record.exc_info[1] if record.exc_info else None
    while error is not None and type(error).__name__ != "WebSocketDisconnect":
        error = error.__context__
    return error is not None


def app_of(
    name: str,
    options: dict[str, Any] | None = None,
    max_turns: int | None = None,
    tasks: int = TASKS,
    sessions: int = SESSIONS,
    *,
    local: bool = True,
) -> Any:
    """Return the FastAPI application that serves an environment; each session has one of its own.

    local: it listens where this machine alone reaches it, under its own names; no other website's page may play
    """
    session = partial(Served, name, options or {}, max_turns, tasks)
    session()  # a ValueError now, not in each session
    app = create_app(
        session, TextAction, TextObservation, env_name=name, max_concurrent_envs=sessions, state_cls=TextState
    )
    app.add_middleware(WholeRequests, most=lambda _: MOST_BYTES)
    app.add_middleware(OwnPagesOnly, local=local)
    return app
