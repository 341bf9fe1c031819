"""Episodes of the environments: in the lake and in Sokoban by weak scripted policies (the answer format and the rules,
not the skill), elsewhere by the expert, or by whom a config names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.data.embedded.splits import Messages
from posttrain.types import derive_seed

# How often each scripted policy acts in a demonstration, turn by turn. None of them is good at its environment alone.
# An environment that is not here is demonstrated by its expert: its thoughts say what the expert does, and why.
MIXES: dict[str, dict[str, float]] = {
    "frozen_lake": {"nearer": 0.2, "safe": 0.4, "random": 0.4},
    "sokoban": {"push": 0.2, "go": 0.2, "free": 0.2, "random": 0.4},
}
# What the quickstart's model of half a million parameters sees of an environment, and in which words.
TOY: tuple[tuple[str, dict[str, Any]], ...] = tuple((name, {"observation": "neighbours"}) for name in sorted(MIXES))
TOY_STYLE = "compact"
ANSWERS_ONLY = 0.3  # share of demonstrations whose thoughts are not trained, only what follows from them


def demonstrations(
    environments: Sequence[tuple[str, Mapping[str, Any]]],
    n: int,
    seed: int,
    answers_only: float = ANSWERS_ONLY,
    player: str | None = None,
    thought: str = "cues",
    style: str = "plain",
) -> Iterator[dict[str, Any]]:
    """Yield `n` episodes on training levels, the environments in turn: {"messages": [...], "env": "frozen_lake"}.

    An environment is a name with its options: ("frozen_lake", {"size": 5}). `style` is that of the protocol.
    `player` says who plays them ("expert:0.9,random:0.1"), or `MIXES`, or `envs.demos.default_mix`; ValueError where
    an environment has neither an expert nor a scripted policy.

    A thought is copied from the state, which is soon learnt; the action that follows is noisy and a single token of
    many. So a share of the rows masks the thoughts (`mask_spans`), which lends the actions more weight.
    """
    import envs
    from envs.episode import Episode
    from envs.players import Style, default_mix, demonstration, parse_mix
    from envs.protocol import Protocol

    thoughts = Style(thought)
    for i in range(n):
        name, options = environments[i % len(environments)]
        place = derive_seed(seed, "demonstrations", i)
        env = envs.make(name, **options)
        mix = parse_mix(player) if player else MIXES.get(name) or default_mix(env)
        messages, _ = demonstration(Episode(env, Protocol.of(env, style=style), place % 2**32, "train"), mix, thoughts)
        if random.Random(place).random() < answers_only:
            for message in messages:
                if message["role"] == "assistant" and "mask_spans" not in message:
                    message["mask_spans"] = [[0, message["content"].index("<answer>")]]
        yield {"messages": messages, "env": name}


def early_turn(rng: random.Random, split: str) -> tuple[Messages, str]:
    """Return an early turn of a demonstration: the conversation before it, and the demonstrator's answer."""
    import envs
    from envs.players import demonstrate
    from envs.protocol import Protocol

    name, options = rng.choice(TOY)
    env, protocol = envs.make(name, **options), Protocol(style=TOY_STYLE)
    messages: Messages = [*demonstrate(env, protocol, rng.getrandbits(31), split, MIXES[name])]
    turn = 2 + 2 * rng.randrange(min(3, (len(messages) - 1) // 2))  # behind the system message and the first state
    return messages[:turn], messages[turn]["content"]


def malformed(reply: str, rng: random.Random) -> str:
    """Return the same reply with a fault that the environments penalise."""
    thought, action = reply.removesuffix("</answer>").split("<answer>")
    faults = [f"{thought}{action}", f"{thought}<answer>Jump</answer>", f"{thought.removesuffix('</think>')} {action}"]
    return rng.choice(faults)
