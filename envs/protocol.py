"""How do a model and an environment talk?  Turns, answers, penalties, limits and the words around them.

The model writes `<think>...</think><answer>Left || Up</answer>`; the first well-formed pair counts. What it wrote is
kept as it is: nothing here rewrites a response.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.base import TextEnv
from envs.by_path import by_path

Message = dict[str, str]
ACTION_SEP = "||"  # between two actions of one answer, as in RAGEN
MAX_PENALISED_TURNS = 3  # of one episode
_BETWEEN = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True)
class Protocol:
    """The limits of an episode and the form of an answer.

    `format_penalty` is subtracted once for every turn that is badly formed or names an unknown action, at most
    MAX_PENALISED_TURNS times an episode: Protocol(max_turns=8, max_actions_per_turn=1, max_actions=8).
    An environment of free text takes one action a turn, whatever `max_actions_per_turn` says.
    With `force_think` every response begins with `opening`, which the model is given instead of writing it.
    `parser` is the path `module:function` of what takes the place of `parse`, whose parameters and result it has.
    """

    max_turns: int = 8
    max_actions_per_turn: int = 1
    max_actions: int = 8
    think: bool = True
    format_penalty: float = -0.1
    force_think: bool = False
    parser: str | None = None

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_actions_per_turn, self.max_actions) < 1:
            raise ValueError("max_turns, max_actions_per_turn and max_actions must be at least 1.")
        if self.format_penalty > 0:
            raise ValueError("format_penalty must not be above 0.")

    @classmethod
    def of(cls, env: TextEnv, max_turns: int | None = None, max_actions: int | None = None, **others: Any) -> Protocol:
        """Return the protocol of a run in an environment.

        None takes the environment's own number of turns, and as many actions as these hold.
        """
        turns = env.max_turns if max_turns is None else max_turns
        most = turns * others.get("max_actions_per_turn", cls.max_actions_per_turn)
        return cls(max_turns=turns, max_actions=most if max_actions is None else max_actions, **others)

    def read(self, text: str, listed: Sequence[str] | None) -> Parsed:
        """Return the actions of a response, by `parser` or else by `parse`."""
        if self.parser is None:
            return parse(text, self, listed)
        try:
            return by_path(self.parser)(text, self, listed)
        except Exception as error:  # the user's own code
            raise RuntimeError(f"`protocol.parser: {self.parser}` raised {type(error).__name__}: {error}") from error

    @property
    def opening(self) -> str:
        """Return the forced beginning of a response, the first tag of the answer format; "" where none is forced."""
        return ("<think>" if self.think else "<answer>") if self.force_think else ""


@dataclass(frozen=True)
class Parsed:
    """What a response asks for: Parsed(actions=["Left"], well_formed=True, invalid=["fly"])."""

    actions: list[str]
    well_formed: bool
    invalid: list[str]


@dataclass(frozen=True)
class Past:
    """A turn that was played: Past(observation="You 0 0 Goal 3 3", actions=["Down"], reward=0.0, valid=True)."""

    observation: str
    actions: list[str]
    reward: float
    valid: bool


@dataclass(frozen=True)
class Turn:
    """What a turn came to: Turn(reward=0.0, penalty=-0.1, done=False, valid=False, user="Reward 0 ...").

    `valid` is False when the penalty rule applies, even once its cap is reached; `user` is None when `done`.
    """

    reward: float
    penalty: float
    done: bool
    valid: bool
    user: str | None


def parse(text: str, protocol: Protocol, listed: Sequence[str] | None) -> Parsed:
    """Read a response, in time linear in its length; no text raises an error.

    Args:
        listed: the environment's list of actions, whose names count in any case; those beyond the turn's limit are left
            out. None for free text: the action is all that stands in <answer>, unless it is blank.
    """
    start = 0
    if protocol.think:
        opening = text.find("<think>")
        match = _BETWEEN.search(text, opening + len("<think>")) if opening >= 0 else None
        start = match.end() if match else -1
    else:
        opening = text.find("<answer>")
        start = opening + len("<answer>") if opening >= 0 else -1
    end = text.find("</answer>", start) if start >= 0 else -1
    if end < 0:
        return Parsed([], False, [])
    if listed is None:
        return Parsed([text[start:end]] if text[start:end].strip() else [], True, [])
    names = [name for name in map(str.strip, text[start:end].split(ACTION_SEP)) if name]
    spelling = {action.lower(): action for action in listed}
    invalid = [name for name in names if name.lower() not in spelling]
    actions = [spelling[name.lower()] for name in names if name.lower() in spelling]
    return Parsed(actions[: protocol.max_actions_per_turn], True, invalid)


def thought_span(text: str) -> tuple[int, int] | None:
    """Return where the thought stands in a response, between the first <think> and the first </think> behind it.

    >>> thought_span("<think>so</think><answer>Up</answer>"), thought_span("<answer>Up</answer>")
    ((7, 9), None)
    """
    start = text.find("<think>")
    end = text.find("</think>", start) if start >= 0 else -1
    return (start + len("<think>"), end) if end >= 0 else None


def format_response(thought: str, actions: Sequence[str], protocol: Protocol) -> str:
    """Return a response in the protocol's form."""
    reply = f"<answer>{f' {ACTION_SEP} '.join(actions)}</answer>"
    return f"<think>{thought}</think>{reply}" if protocol.think else reply


def system_text(env: TextEnv, protocol: Protocol) -> str:
    """Return rules, limits and answer format: the same for every episode of an environment under a protocol."""
    each = " each" if protocol.max_turns > 1 else ""
    turns = f"At most {protocol.max_turns} turn{'s' if each else ''}"
    limits, example, per_turn = f"{turns}, one action{each}", ["Action"], _per_turn(env, protocol)
    if per_turn > 1:
        limits, example = f"{turns}, up to {per_turn} actions{each}", ["Action", "Action"]
    if protocol.max_actions < protocol.max_turns * per_turn:
        limits += f", {protocol.max_actions} actions in all"
    return f"{env.rules()} {limits}. Reply: {format_response('reasoning', example, protocol)}"


def _per_turn(env: TextEnv, protocol: Protocol) -> int:
    """Return how many actions a turn may hold; free text is one."""
    return 1 if env.actions is None else protocol.max_actions_per_turn


class Episode:
    """One conversation with one environment, which belongs to the episode until it is over.

    Example: episode = Episode(make("frozen_lake"), Protocol(), seed=7, split="test")
             turn = episode.step("<think>goal Down safe Down</think><answer>Down</answer>")
    `noise_seed` gives the samples of a group their own environment noise on a shared level.
    An environment that raises is not caught here, and a reward that is not a finite number raises as well: the caller
    counts it as crashed, never as a reward of zero.
    """

    def __init__(
        self, env: TextEnv, protocol: Protocol, seed: int, split: str = "train", noise_seed: int | None = None
    ):
        self.env, self.protocol, self.seed, self.split = env, protocol, seed, split
        self.noise_seed = noise_seed
        options = {"split": split} if noise_seed is None else {"split": split, "noise_seed": noise_seed}
        self.observation, info = env.reset(seed=seed, options=options)
        self.level_key = env.level_key()
        self.past: list[Past] = []
        self.success, self.failure = bool(info["success"]), str(info["failure"])
        self.terminated = self.truncated = False
        self.turns = self.invalid_turns = self.malformed_turns = self.effective_actions = 0
        self.actions: list[str] = []
        self.messages: list[Message] = [
            {"role": "system", "content": system_text(env, protocol)},
            {"role": "user", "content": self._user_text(self.observation)},
        ]

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    def step(self, response_text: str) -> Turn:
        """Play one turn: acts on what the response asks for and says what came of it."""
        if self.done:
            raise RuntimeError("This episode is over: open a new one.")
        self.messages.append({"role": "assistant", "content": response_text})
        parsed = self.protocol.read(response_text, self.env.actions)
        valid = bool(parsed.well_formed and parsed.actions and not parsed.invalid)
        reward, observation, before = 0.0, None, len(self.actions)
        for action in parsed.actions[: self.protocol.max_actions - len(self.actions)]:
            observation, gain, over, cut, info = self.env.step(action)
            if not math.isfinite(float(gain)):
                raise ValueError(f"the reward is {gain}")
            self.terminated = bool(over)  # an environment may count in NumPy
            self.truncated = bool(cut) and not self.terminated
            self.actions.append(action)
            self.effective_actions += bool(info["action_is_effective"])
            self.success, self.failure = bool(info["success"]), str(info["failure"])
            valid = valid and bool(info["action_is_valid"])
            reward += float(gain)
            if self.done:
                break
        self.past.append(Past(self.observation, self.actions[before:], reward, valid))
        self.turns += 1
        self.invalid_turns += not valid
        self.malformed_turns += not parsed.well_formed
        penalised = not valid and self.invalid_turns <= MAX_PENALISED_TURNS
        if self.turns >= self.protocol.max_turns or len(self.actions) >= self.protocol.max_actions:
            self.truncated = not self.terminated
        user = None
        if not self.done:
            self.observation = self.env.observe() if observation is None else observation
            user = self._user_text(self.observation, reward, valid)
            self.messages.append({"role": "user", "content": user})
        return Turn(reward, self.protocol.format_penalty if penalised else 0.0, self.done, valid, user)

    def summary(self, first: int) -> str:
        """Return one user message: the turns from number `first` on in brief (state, action, reward), then the state.

        Without earlier turns it is the first user message; `first == turns` leaves all of them out.
        """
        if first >= self.turns:
            return self._user_text(self.observation)
        lines = []
        for number, turn in enumerate(self.past[first:], first + 1):
            lines += [f"Turn {number}", turn.observation]
            lines += [f"Action {f' {ACTION_SEP} '.join(turn.actions)}"] if turn.actions else []
            lines += [] if turn.valid else ["Invalid answer"]
            lines.append(f"Reward {round(turn.reward, 6):g}")
        return "\n".join([*lines, f"Turn {self.turns + 1}", self._user_text(self.observation)])

    def state_key(self) -> str:
        """Return the environment's key of the state, or its observation where it has none."""
        return self.env.state_key() if self.env.has("state_key") else self.observation

    def _user_text(self, state: str, reward: float | None = None, valid: bool = True) -> str:
        turns = self.protocol.max_turns - self.turns
        left = f"Turns left {turns}"
        actions = self.protocol.max_actions - len(self.actions)
        if actions < turns * _per_turn(self.env, self.protocol):  # else the limit of turns comes first
            left += f" Actions left {actions}"
        before = [] if reward is None else [f"Reward {round(reward, 6):g}"]
        if not valid:
            before.append("Invalid answer")
        return "\n".join([*before, state, left])
