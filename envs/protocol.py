"""How do a model and a world talk?  Turns, answers, penalties, limits and the words around them.

The model writes `<think>...</think><answer>Left || Up</answer>`; the first well-formed pair counts. What it wrote is
kept as it is: nothing here rewrites a response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envs.base import TextEnv, known

Message = dict[str, str]
_BETWEEN = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True)
class Protocol:
    """The limits of an episode and the form of an answer.

    `format_penalty` is paid once for every turn that is badly formed or names an unknown action, at most
    `max_penalised_turns` times an episode: Protocol(max_turns=8, max_actions_per_turn=1, max_actions=8).
    With `force_think` every response begins with `opening`, which the model is given instead of writing it.
    """

    max_turns: int = 8
    max_actions_per_turn: int = 1
    max_actions: int = 8
    think: bool = True
    format_penalty: float = -0.1
    max_penalised_turns: int = 3
    action_sep: str = "||"
    force_think: bool = False

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_actions_per_turn, self.max_actions) < 1:
            raise ValueError("max_turns, max_actions_per_turn and max_actions must be at least 1.")
        if self.format_penalty > 0 or self.max_penalised_turns < 0:
            raise ValueError("format_penalty must not be above 0, nor max_penalised_turns below 0.")
        if not self.action_sep.strip():
            raise ValueError("action_sep must not be blank.")

    @property
    def opening(self) -> str:
        """The forced beginning of a response, the first tag of the answer format; empty where none is forced."""
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


def parse(text: str, protocol: Protocol, world_actions: Sequence[str]) -> Parsed:
    """Reads a response; linear in its length and never raises, whatever the text.

    Names count whatever their case; actions beyond the turn's limit are left out. A world without a list of actions
    takes any text as an action.
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
    names = [name for name in map(str.strip, text[start:end].split(protocol.action_sep)) if name]
    if not world_actions:
        return Parsed(names[: protocol.max_actions_per_turn], True, [])
    spelling = {action.lower(): action for action in world_actions}
    invalid = [name for name in names if name.lower() not in spelling]
    actions = [spelling[name.lower()] for name in names if name.lower() in spelling]
    return Parsed(actions[: protocol.max_actions_per_turn], True, invalid)


def thought_span(text: str) -> tuple[int, int] | None:
    """Where the thought stands in a response, between the first <think> and the first </think> behind it.

    >>> thought_span("<think>so</think><answer>Up</answer>"), thought_span("<answer>Up</answer>")
    ((7, 9), None)
    """
    start = text.find("<think>")
    end = text.find("</think>", start) if start >= 0 else -1
    return (start + len("<think>"), end) if end >= 0 else None


def answer(thought: str, actions: Sequence[str], protocol: Protocol) -> str:
    """A response in the protocol's form."""
    reply = f"<answer>{f' {protocol.action_sep} '.join(actions)}</answer>"
    return f"<think>{thought}</think>{reply}" if protocol.think else reply


def system_text(world: TextEnv, protocol: Protocol) -> str:
    """Rules, limits and answer format: the same for every episode of a world under a protocol."""
    limits, example = f"At most {protocol.max_turns} turns, one action each", ["Action"]
    if protocol.max_actions_per_turn > 1:
        limits = f"At most {protocol.max_turns} turns, up to {protocol.max_actions_per_turn} actions each"
        example = ["Action", "Action"]
    if _actions_bind(protocol, protocol.max_turns, 0):
        limits += f", {protocol.max_actions} actions in all"
    return f"{world.rules()} {limits}. Reply: {answer('reasoning', example, protocol)}"


def _actions_bind(protocol: Protocol, turns_left: int, actions_used: int) -> bool:
    """Whether the episode's action limit can be reached before its turn limit."""
    return protocol.max_actions - actions_used < turns_left * protocol.max_actions_per_turn


class Episode:
    """One conversation with one world; the world belongs to the episode until it is over.

    Example: episode = Episode(make("frozen_lake"), Protocol(), seed=7, split="test")
             turn = episode.step("<think>goal Down safe Down</think><answer>Down</answer>")
    `noise_seed` gives the members of a group their own luck on a shared level.
    A world that raises is not caught here: the caller counts it as crashed, never as a reward of zero.
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
        """Plays one turn: acts on what the response asks for and says what came of it."""
        if self.done:
            raise RuntimeError("This episode is over: open a new one.")
        self.messages.append({"role": "assistant", "content": response_text})
        parsed = parse(response_text, self.protocol, self.env.actions)
        valid = bool(parsed.well_formed and parsed.actions and not parsed.invalid)
        reward, observation, before = 0.0, None, len(self.actions)
        for action in parsed.actions[: self.protocol.max_actions - len(self.actions)]:
            observation, paid, over, cut, info = self.env.step(action)
            self.terminated = bool(over)  # a world may count in NumPy
            self.truncated = bool(cut) and not self.terminated
            self.actions.append(action)
            self.effective_actions += bool(info["action_is_effective"])
            self.success, self.failure = bool(info["success"]), str(info["failure"])
            valid = valid and bool(info["action_is_valid"])
            reward += float(paid)
            if self.done:
                break
        self.past.append(Past(self.observation, self.actions[before:], reward, valid))
        self.turns += 1
        self.invalid_turns += not valid
        self.malformed_turns += not parsed.well_formed
        penalised = not valid and self.invalid_turns <= self.protocol.max_penalised_turns
        if self.turns >= self.protocol.max_turns or len(self.actions) >= self.protocol.max_actions:
            self.truncated = not self.terminated
        user = None
        if not self.done:
            self.observation = self.env.observe() if observation is None else observation
            user = self._user_text(self.observation, reward, valid)
            self.messages.append({"role": "user", "content": user})
        return Turn(reward, self.protocol.format_penalty if penalised else 0.0, self.done, valid, user)

    def summary(self, first: int) -> str:
        """The state now in one user message, after the turns from number `first` on in brief: state, action, reward.

        Without earlier turns it is the first user message; `first == turns` leaves all of them out.
        """
        if first >= self.turns:
            return self._user_text(self.observation)
        lines = []
        for number, turn in enumerate(self.past[first:], first + 1):
            lines += [f"Turn {number}", turn.observation]
            lines += [f"Action {f' {self.protocol.action_sep} '.join(turn.actions)}"] if turn.actions else []
            lines += [] if turn.valid else ["Invalid answer"]
            lines.append(f"Reward {round(turn.reward, 6):g}")
        return "\n".join([*lines, f"Turn {self.turns + 1}", self._user_text(self.observation)])

    def state_key(self) -> str:
        return self.env.state_key()

    def _user_text(self, state: str, reward: float | None = None, valid: bool = True) -> str:
        turns = self.protocol.max_turns - self.turns
        left = f"Turns left {turns}"
        if _actions_bind(self.protocol, turns, len(self.actions)):
            left += f" Actions left {self.protocol.max_actions - len(self.actions)}"
        before = [] if reward is None else [f"Reward {round(reward, 6):g}"]
        if not valid:
            before.append("Invalid answer")
        return "\n".join([*before, state, left])


def demonstrate(world: TextEnv, protocol: Protocol, seed: int, split: str, mix: Mapping[str, float]) -> list[Message]:
    """An episode in which every turn is played by one of the players, drawn by its share in `mix`.

    Players are the world's weak ones and `expert`; shares sum to 1: {"goal": 0.3, "safe": 0.3, "random": 0.4}.
    Each turn is one action after the world's own thought. The same seed gives the same text.
    """
    episode = Episode(world, protocol, seed, split)
    for player in mix:
        known(f"player of {world.name}", player, [*world.players(), "expert"])
    shares = np.array(list(mix.values()), dtype=float)
    if len(shares) == 0 or shares.min() < 0 or abs(shares.sum() - 1) > 1e-6:
        raise ValueError(f"The shares of the players must be positive and sum to 1, not {dict(mix)}.")
    names, rng = list(mix), np.random.default_rng([seed, 3])
    while not episode.done:
        player = names[int(np.searchsorted(shares.cumsum(), rng.random() * shares.sum(), side="right"))]
        action = world.expert() if player == "expert" else world.players()[player]
        episode.step(answer(world.thought(), [action], protocol))
    return episode.messages
