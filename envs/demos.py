"""How do scripted policies play?  The expert and the players of an environment, for demonstrations and comparisons."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from envs.base import TextEnv, known
from envs.protocol import Episode, Message, Protocol, answer


def player_names(env: TextEnv) -> list[str]:
    """Who can play an environment that has been reset: its scripted policies, then `expert`, if it has one."""
    return [*env.players(), *(["expert"] if env.has("expert") else [])]


def next_action(env: TextEnv, player: str) -> str:
    """What the expert or a scripted policy does in the current state."""
    return env.expert() if player == "expert" else env.players()[player]


def play(env: TextEnv, player: str, protocol: Protocol, seed: int, split: str) -> Episode:
    """One episode played by the expert or a scripted policy, one action a turn."""
    episode = Episode(env, protocol, seed, split)
    while not episode.done:
        episode.step(answer(env.thought(), [next_action(env, player)], protocol))
    return episode


def default_mix(env: TextEnv) -> dict[str, float]:
    """Who demonstrates where nothing else is said: the scripted policies in equal shares, else the expert.

    ValueError where the environment defines neither: random play alone demonstrates nothing.
    """
    if env.has("players"):
        env.reset(seed=0)
        players = env.players()
        return {player: 1 / len(players) for player in players}
    if env.has("expert"):
        return {"expert": 1.0}
    raise ValueError(
        f"Nobody can demonstrate the environment {env.name}: it defines neither players() nor expert(). Write one of"
        " them, or leave it out of the demonstrations."
    )


def demonstrate(env: TextEnv, protocol: Protocol, seed: int, split: str, mix: Mapping[str, float]) -> list[Message]:
    """An episode in which every turn is played by one of the players, drawn by its share in `mix`.

    Players are the scripted policies and `expert`; shares sum to 1: {"goal": 0.3, "safe": 0.3, "random": 0.4}.
    Each turn is one action after the environment's own thought. The same seed gives the same text.
    """
    episode = Episode(env, protocol, seed, split)
    for player in mix:
        known(f"player of {env.name}", player, player_names(env))
    shares = np.array(list(mix.values()), dtype=float)
    if len(shares) == 0 or shares.min() < 0 or abs(shares.sum() - 1) > 1e-6:
        raise ValueError(f"The shares of the players must be positive and sum to 1, not {dict(mix)}.")
    names, rng = list(mix), np.random.default_rng([seed, 3])
    while not episode.done:
        player = names[int(np.searchsorted(shares.cumsum(), rng.random() * shares.sum(), side="right"))]
        episode.step(answer(env.thought(), [next_action(env, player)], protocol))
    return episode.messages
