"""What is one conversation between a model and an environment?  Messages, turns, rewards, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from envs.base import TextEnv
from envs.protocol import MAX_PENALISED_TURNS, Message, Parsed, Past, Protocol, Turn
from envs.tools import Call, ToolAnswer, answer_of, result_of
from envs.wording import View, actions_per_turn, summary_text, system_text, user_text


class Episode:
    """One conversation with one environment, which belongs to the episode until it is over.

    `episode = Episode(make("frozen_lake"), Protocol(), seed=7, split="test")` opens one, and
    `turn = episode.step("<think>The goal is below me.</think><answer>Down</answer>")` plays a turn of it.
    `noise_seed` gives the samples of a group their own environment noise on a shared level.
    An environment that raises is not caught here, and a reward that is not a finite number raises as well: the caller
    counts it as crashed, never as a reward of zero.
    """

    def __init__(
        self, env: TextEnv, protocol: Protocol, seed: int, split: str = "train", noise_seed: int | None = None
    ):
        self.env, self.protocol, self.seed, self.split = env, protocol, seed, split
        self.noise_seed = noise_seed
        env.style = protocol.style
        options = {"split": split} if noise_seed is None else {"split": split, "noise_seed": noise_seed}
        self.observation, info = env.reset(seed=seed, options=options)
        self.level_key = env.level_key()
        self.past: list[Past] = []
        self.success, self.failure = bool(info["success"]), str(info["failure"])
        self.terminated = self.truncated = False
        self.turns = self.invalid_turns = self.malformed_turns = self.effective_actions = 0
        self.calls = self.failed_calls = self.refused_calls = 0
        self.heard: list[str] = []  # answers of tools since the last turn
        self.actions: list[str] = []
        own = env.messages()
        self.own_words = own is not None  # the environment writes all messages itself
        if own is None:
            own = [
                {"role": "system", "content": system_text(env, protocol)},
                {"role": "user", "content": user_text(env, protocol, self._view(None))},
            ]
        if not own or own[-1]["role"] != "user":
            raise ValueError(f"messages() of {env.name} returned {own!r:.80}, which does not end with a user message")
        self.messages: list[Message] = own
        self.first_messages = len(self.messages)  # before the first answer

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    def read(self, response_text: str) -> Parsed:
        """Return what a response asks for: the whole of it where the environment writes all messages itself."""
        if self.own_words:
            return Parsed([response_text], well_formed=True, invalid=[])
        return self.protocol.read(response_text, self.env.actions)

    def step(self, response_text: str) -> Turn:
        """Play one turn: acts on what the response asks for and says what came of it."""
        if self.done:
            raise RuntimeError("This episode is over: open a new one.")
        self.messages.append({"role": "assistant", "content": response_text})
        self.heard = []
        parsed = self.read(response_text)
        valid = bool(parsed.well_formed and parsed.actions and not parsed.invalid)
        reward, observation, before, effective = 0.0, None, len(self.actions), False
        for action in parsed.actions[: self.protocol.max_actions - len(self.actions)]:
            observation, gain, over, cut, info = self.env.step(action)
            if not math.isfinite(float(gain)):
                raise ValueError(f"the reward is {gain}")
            self.terminated = bool(over)  # an environment may count in NumPy
            self.truncated = bool(cut) and not self.terminated
            self.actions.append(action)
            self.effective_actions += bool(info["action_is_effective"])
            effective = effective or bool(info["action_is_effective"])
            self.success, self.failure = bool(info["success"]), str(info["failure"])
            valid = valid and bool(info["action_is_valid"])
            reward += float(gain)
            if self.done:
                break
        past = Past(
            self.observation, self.actions[before:], reward, valid, parsed.well_formed, parsed.invalid, effective
        )
        self.past.append(past)
        self.turns += 1
        self.invalid_turns += not valid
        self.malformed_turns += not parsed.well_formed
        penalised = not valid and self.invalid_turns <= MAX_PENALISED_TURNS
        if self.turns >= self.protocol.max_turns or len(self.actions) >= self.protocol.max_actions:
            self.truncated = not self.terminated
        user = None
        if not self.done:
            self.observation = self.env.observe() if observation is None else observation
            user = self.observation if self.own_words else user_text(self.env, self.protocol, self._view(past))
            self.messages.append({"role": "user", "content": user})
        return Turn(reward, self.protocol.format_penalty if penalised else 0.0, self.done, valid, user)

    def call(self, response_text: str, content: str, calls: Sequence[Call]) -> Turn:
        """Answer the calls of a turn, which is not a turn of the environment. It may run in a thread.

        Calls beyond the limit are answered with an error; after as many of those the episode is truncated.

        Args:
            response_text: the whole turn.
            content: what it says beside the calls.
            calls: those that it asks for.
        """
        if self.done:
            raise RuntimeError("This episode is over: open a new one.")
        results: list[Message] = []
        for call in calls:
            if self.calls < self.env.max_calls:
                self.calls += 1
                answer = answer_of(call, self.env.tools, self.env.call_seconds)
                self.failed_calls += answer.failed
            else:
                self.refused_calls += 1
                answer = ToolAnswer(f"Error: all {self.env.max_calls} calls are used up. Answer without a tool.", True)
            results.append(result_of(call, answer.text))
            if self.refused_calls >= self.env.max_calls:
                self.truncated = True
                break
        self.messages += [{"role": "assistant", "content": response_text}, *results]
        self.heard += [response_text, *(each["content"] for each in results)]
        written = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
        self.env.heard([{"role": "assistant", "content": content, "tool_calls": written}, *results])
        return Turn(0.0, 0.0, self.done, True, None, tuple(results))

    def summary(self, first: int) -> str:
        """Return one user message: the turns from number `first` on in brief (state, action, reward), then the state.

        Without earlier turns it is the first user message; `first == turns` leaves all of them out.
        """
        return summary_text(self.env, self.protocol, self.past[first:], first + 1, self._view(None))

    def state_key(self) -> str:
        """Return the environment's key of the state, or its observation where it has none, and what tools answered."""
        key = self.env.state_key() if self.env.has("state_key") else self.observation
        return "\n".join([key, *self.heard]) if self.heard else key

    def _view(self, past: Past | None) -> View:
        turns, actions = self.protocol.max_turns - self.turns, self.protocol.max_actions - len(self.actions)
        limited = actions < turns * actions_per_turn(self.env, self.protocol)  # else the limit of turns comes first
        return View(self.observation, self.turns + 1, turns, actions if limited else None, past)
