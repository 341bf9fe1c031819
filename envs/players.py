"""How do scripted policies play?  The expert and the players of an environment, and what a demonstrator thinks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from envs.base import TextEnv, known
from envs.episode import Episode
from envs.protocol import ACTION_SEP, Message, Protocol, format_response, parse

THOUGHTS = {
    "cues": "what matters in the state, as the environment tells it",
    "plan": "the next moves",
    "next_state": "the state that the action leads to (arXiv 2510.15047)",
    "none": "nothing",
}
PLAYS = 16  # of each action of a pair, where chance decides
FIRST_LOOK = 5  # a pair that shows no difference after so many more plays than one is given up
LOOK_AHEAD = 8  # turns of each of them
TRIES = 4  # turns of an episode that are looked at for a pair


def player_names(env: TextEnv) -> list[str]:
    """Return who can play an environment that has been reset: its scripted policies, then `expert`, if it has one."""
    return [*env.players(), *(["expert"] if env.has("expert") else [])]


def next_action(env: TextEnv, player: str) -> str:
    """Return what the expert or a scripted policy does in the current state."""
    return env.expert() if player == "expert" else env.players()[player]


def play_scripted(env: TextEnv, player: str, protocol: Protocol, seed: int, split: str) -> Episode:
    """Return one episode played by the expert or a scripted policy, one action a turn."""
    episode = Episode(env, protocol, seed, split)
    while not episode.done:
        episode.step(format_response(env.thought(), [next_action(env, player)], protocol))
    return episode


def default_mix(env: TextEnv) -> dict[str, float]:
    """Return who demonstrates by default: the expert, else all scripted policies alike, else a ValueError."""
    if env.has("expert"):
        return {"expert": 1.0}
    if env.has("players"):
        env.reset(seed=0)
        players = env.players()
        return {player: 1 / len(players) for player in players}
    raise nobody_plays(env)


def nobody_plays(env: TextEnv) -> ValueError:
    return ValueError(
        f"The environment {env.name} cannot be demonstrated: it defines neither players() nor expert(). Write one of"
        " them, or leave it out of the demonstrations."
    )


def parse_mix(text: str) -> dict[str, float]:
    """`expert:0.9,random:0.1` -> {"expert": 0.9, "random": 0.1}; shares are made to sum to 1."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        player, _, share = part.strip().partition(":")
        try:
            mix[player] = float(share or 1)
        except ValueError:
            mix[player] = 0.0
        if not player or not isfinite(mix[player]) or mix[player] <= 0:
            raise ValueError(f'"{text}" names no players: write one, or shares as in expert:0.9,random:0.1.')
    total = sum(mix.values())
    return {player: share / total for player, share in mix.items()}


@dataclass(frozen=True)
class Style:
    """What a demonstrator thinks: Style("plan", plan=4)."""

    thought: str = "cues"
    plan: int = 4  # moves of a plan

    def __post_init__(self) -> None:
        known("thought", self.thought, THOUGHTS)
        if self.plan < 1:
            raise ValueError("A plan has at least one move.")

    def require(self, env: TextEnv) -> None:
        """ValueError where the thought would tell what only chance decides, or what the model cannot see."""
        if self.thought not in ("plan", "next_state") or (env.deterministic and env.observable):
            return
        why = "depends on what the observation does not show" if env.deterministic else "chance decides"
        sight = env.deterministic and getattr(env, "observation", "") == "neighbours"
        raise ValueError(
            f'The thought "{self.thought}" tells what comes next, which {why} in {env.name} with these options: a'
            f" model would learn to guess. {'Set observation=coordinates, or choose' if sight else 'Choose'} the"
            " thought cues or none."
        )

    def reply(self, episode: Episode, player: str, action: str) -> str:
        """Return the whole answer: the thought behind an action of a player, then the action."""
        return format_response(self.think(episode, player, action), [action], episode.protocol)

    def think(self, episode: Episode, player: str, action: str) -> str:
        if self.thought == "none":
            return ""
        if self.thought == "cues":
            return episode.env.thought_of(action)
        ahead, moves = _ahead(episode), [action]
        ahead.step(format_response("", [action], ahead.protocol))
        if self.thought == "next_state":
            words = "Next state: " if episode.protocol.style == "compact" else "Then I will see:\n"
            return f"{words}{ahead.env.observe()}"
        while len(moves) < self.plan and not ahead.done:
            moves.append(next_action(ahead.env, player))
            ahead.step(format_response("", moves[-1:], ahead.protocol))
        if episode.protocol.style == "compact":
            return f"Plan: {f' {ACTION_SEP} '.join(moves)}"
        return f"My plan is {', then '.join(moves)}."


def _ahead(episode: Episode) -> Episode:
    """Return a copy of an episode to think ahead in: it does not need the conversation so far."""
    ahead = copy.copy(episode)
    ahead.env, ahead.messages = copy.deepcopy(episode.env), []
    ahead.past, ahead.actions = list(episode.past), list(episode.actions)
    return ahead


class Turns:
    """Who plays which turn of an episode, drawn by shares."""

    def __init__(self, env: TextEnv, mix: Mapping[str, float], seed: int, stream: int = 3) -> None:
        for player in mix:  # each time anew: their choices use up random numbers, and written rows must stay the same
            if not (names := player_names(env)):
                raise nobody_plays(env)
            known(f"player of {env.name}", player, names)
        self.shares = np.array(list(mix.values()), dtype=float)
        if len(self.shares) == 0 or self.shares.min() < 0 or abs(self.shares.sum() - 1) > 1e-6:
            raise ValueError(f"The shares of the players must be positive and sum to 1, not {dict(mix)}.")
        self.names, self.rng = list(mix), np.random.default_rng([seed, stream])

    def next(self) -> str:
        place = np.searchsorted(self.shares.cumsum(), self.rng.random() * self.shares.sum(), side="right")
        return self.names[int(place)]


def demonstrate(
    env: TextEnv, protocol: Protocol, seed: int, split: str, mix: Mapping[str, float], style: Style | None = None
) -> list[Message]:
    """Return the messages of an episode in which every turn, a thought and an action, is played by one of the players.

    Args:
        mix: the share of turns of each scripted policy or `expert`, summing to 1: {"nearer": 0.6, "random": 0.4}.
    """
    return demonstration(Episode(env, protocol, seed, split), mix, style)[0]


def demonstration(
    episode: Episode, mix: Mapping[str, float], style: Style | None = None
) -> tuple[list[dict[str, Any]], int]:
    """`demonstrate` in an episode that has just begun: the messages, and how many of their answers are trained.

    Beside an expert, the others only lead to states that it does not come to: their turns have `mask_spans`.
    """
    env, style, turns, trained = episode.env, style or Style(), Turns(episode.env, mix, episode.seed), 0
    style.require(env)
    masked: list[int] = []
    while not episode.done:
        player = turns.next()
        if player != "expert" and "expert" in mix:
            masked.append(len(episode.messages))
        else:
            trained += 1
        episode.step(style.reply(episode, player, next_action(env, player)))
    messages: list[dict[str, Any]] = [dict(message) for message in episode.messages]
    for turn in masked:
        messages[turn]["mask_spans"] = [[0, len(messages[turn]["content"])]]
    return messages, trained


# -- pairs -------------------------------------------------------------------------------------------------------------


def preference_in_state(
    begin: Callable[[], Episode], mix: Mapping[str, float], flawed: Mapping[str, float], style: Style
) -> tuple[dict[str, Any] | None, Counter[str]]:
    """Return the expert's answer and a worse one of a flawed player, in a state of an episode played by `mix`.

    `begin` opens the same episode each time. The turn is drawn by its seed among those in which the two differ and
    the expert's is better; None where none of a few is such a turn. The counter says which turns were left out.
    """
    episode, left_out = begin(), Counter()
    style.require(episode.env)
    turns, worse = Turns(episode.env, mix, episode.seed), Turns(episode.env, flawed, episode.seed, stream=4)
    candidates: list[tuple[list[str], str, str, str]] = []  # answers before, the expert's action, who plays the other
    replies: list[str] = []
    while not episode.done:
        env, player, other = episode.env, turns.next(), worse.next()
        good, bad = env.expert(), next_action(env, other)
        candidates.append((list(replies), good, other, bad))
        replies.append(style.reply(episode, player, good if player == "expert" else next_action(env, player)))
        episode.step(replies[-1])
    for place in np.random.default_rng([episode.seed, 5]).permutation(len(candidates))[:TRIES]:
        before, good, other, bad = candidates[int(place)]
        if good.split() == bad.split():
            left_out["both do the same"] += 1
            continue
        episode = begin()
        for reply in before:
            episode.step(reply)
        if not is_better(episode, good, bad):
            left_out["no worse than the expert's"] += 1
            continue
        answers = [style.reply(episode, player, action) for player, action in (("expert", good), (other, bad))]
        if not all(parse(text, episode.protocol, episode.env.actions).well_formed for text in answers):
            left_out["the answer format is broken"] += 1
            continue
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
        return {"prompt": episode.messages, "chosen": chosen, "rejected": rejected}, left_out
    return None, left_out


def is_better(episode: Episode, good: str, bad: str) -> bool:
    """Return whether the first action leads to more when the expert plays on: success, else reward, else fewer turns.

    Where chance decides, both are played often with the same chance, and a difference counts from two standard errors.
    """
    differences: list[np.ndarray] = []
    for play in range(1 if episode.env.deterministic else PLAYS):
        one, other = (np.array(_outcome(episode, action, play)) for action in (good, bad))
        differences.append(one - other)
        if play == FIRST_LOOK and _sign(differences, errors=1) <= 0:
            return False  # most pairs are of this kind, and the plays are what takes time
    return _sign(differences, errors=2) > 0


def _sign(differences: list[np.ndarray], errors: float) -> float:
    """Return the sign of the first measure whose mean difference is `errors` standard errors away from 0, else 0."""
    for measure in np.array(differences).T:
        error = measure.std(ddof=1) / len(measure) ** 0.5 if len(measure) > 1 else 0.0
        if abs(measure.mean()) > errors * error + 1e-9:
            return float(np.sign(measure.mean()))
    return 0.0


def _outcome(episode: Episode, action: str, play: int) -> tuple[float, float, float]:
    """Return success, reward and turns (as a loss) of an action, after which the expert plays on."""
    ahead, gain = _ahead(episode), 0.0
    if not ahead.env.deterministic:
        ahead.env.noise = np.random.default_rng([episode.seed, 6, play])
    while not ahead.done and (ahead.env.deterministic or ahead.turns < episode.turns + LOOK_AHEAD):
        first = ahead.turns == episode.turns
        turn = ahead.step(format_response("", [action if first else ahead.env.expert()], ahead.protocol))
        gain += turn.reward + turn.penalty
    return float(ahead.success), gain, -float(ahead.turns if ahead.success else 0)
