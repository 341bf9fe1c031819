"""Which answers could harm an environment?  Any number of them, made by mutation, and what it makes of them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from envs.base import TextEnv
from envs.episode import Episode
from envs.players import next_action, player_names
from envs.promises import Subject, where_raised
from envs.protocol import ACTION_SEP

PIECES = (  # what mutations put into an answer
    "<think>", "</think>", "<answer>", "</answer>", "<answer/>", "<ANSWER>", "< answer >", "\uff1canswer\uff1e", "<",
    ">", "<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "<|eot_id|>", "</s>", "[INST]", "<tool_call>", "<!--",
    "&lt;", ACTION_SEP, "|", ",", ";", ":", ".", "/", "=", "-", "+", "*", "**", "%", "^", "~", "\\", "'", '"', '"""',
    "`", "#", "(", ")", "[", "]", "{", "}", "{}", "{0}", "%s", "${HOME}", "$(id)", "`id`", "../..", "/etc/passwd",
    "\n", "\r\n", "\x00", "\x1b[2J", "\x7f", "\u200b", "\u202e", "\u2028", "\ufeff", "\ud800", "\udfff", "\u0130",
    "\ufb00", "e\u0301", "0", "1", "-1", "-0", "00", "1e999", "nan", "inf", "0x10", "1/0", "1_0", "\u0661\u0662",
    "\u2167", "\u00bd", "9" * 400, "None", "null", "true", "self", "__class__", "lambda: 0", "import os", "exec('1')",
    "while True: pass", "sorry", "search[", "finish[", "click[", "buy", "Reward 10", "Turns left 99", "You have won.",
    "\U0001f9ca", "\u9752", " ", "\t",
)  # fmt: skip
LONGEST = 60_000  # characters of an answer
TURNS = 12  # played in one level
LATE = 5.0  # seconds for one answer; where a sandbox or a server is waited for, its own limit and some more
LATE_AND_SLOW = 60.0


def hostile_answers(env: TextEnv, seed: int) -> Iterator[tuple[str, str]]:
    """Yield answers without end, made of valid actions of an environment and of the protocol's own text by mutation.

    Each is an action and the whole response around it; a few are left as they were, so that games go on.
    """
    rng, actions = random.Random(seed), _valid_actions(env)
    while True:
        action = rng.choice(actions)
        kind = rng.random()
        if kind < 0.5:
            action = _mutated(action, rng)
        elif kind < 0.6:
            action = "".join(rng.choices(PIECES, k=rng.randint(1, 12)))
        elif kind < 0.61:
            piece = rng.choice((*PIECES, action))
            action = piece * (rng.randint(1, LONGEST) // max(1, len(piece)))
        elif kind < 0.62:
            depth = rng.randint(1, LONGEST // 2 - 100)
            action = "([{"[depth % 3] * depth + action[:100] + ")]}"[depth % 3] * rng.choice((0, depth))
        response = f"<think>{rng.choice(PIECES)}</think><answer>{action}</answer>"
        if 0.62 <= kind < 0.9:
            response = _mutated(response, rng)
        yield action[:LONGEST], response[: LONGEST + 100]


def _valid_actions(env: TextEnv) -> list[str]:
    """Return the list of actions, or what players write in the first states of a few levels."""
    if env.actions is not None:
        env.reset(seed=0)
        return list(env.actions or ())
    actions = []
    for seed in range(8):
        env.reset(seed=seed)
        actions += [next_action(env, player) for player in player_names(env)]
    return actions or ["some text"]


def _mutated(text: str, rng: random.Random) -> str:
    """Return the text after one to four changes."""
    for _ in range(rng.randint(1, 4)):
        here, there = sorted(rng.randint(0, len(text)) for _ in range(2))
        change = rng.randrange(8)
        if change <= 2:
            text = text[:here] + rng.choice(PIECES) + text[here:]
        elif change == 3:
            text = text[:here] + text[there:]
        elif change == 4:
            text = text[:there] + text[here:there] * rng.randint(1, 9) + text[there:]
        elif change == 5:
            text = text[there:] + text[here:there] + text[:here]
        elif change == 6:
            text = rng.choice((text.upper(), text.lower(), text.title(), text.swapcase(), text[::-1]))
        else:
            text = text[:here]
        text = text[:LONGEST]
    return text


def meet_hostile_answers(subject: Subject, n: int, seed: int = 0, seconds: float = math.inf) -> tuple[int, list[str]]:
    """Play up to `n` generated answers for about so many seconds: how many, and a sentence for each breach.

    Each is played as a response of an episode, and its action is put straight to an environment, as adapters do.
    """
    env, straight, began = subject.make(), subject.make(), time.monotonic()
    episode: Episode | None = None
    broken: list[str] = []
    played = 0
    for action, response in hostile_answers(subject.make(), seed):
        if played == n or (time.monotonic() - began > seconds and played > TURNS):
            break
        if played % TURNS == 0:
            straight.reset(seed=seed + played)
        if episode is None or episode.done or episode.turns == TURNS:
            episode = Episode(env, subject.protocol, seed + played)
        games: list[tuple[Callable[[Any, str], str], Any, str]]
        games = [(_answered, episode, response), (_stepped, straight, action)]
        for meet, game, text in games:
            start = time.monotonic()
            try:
                wrong = meet(game, text)
            except (Exception, SystemExit) as error:  # an environment may raise anything
                wrong, episode = where_raised(subject, error), None
                straight.reset(seed=seed)
            if time.monotonic() - start > (LATE_AND_SLOW if env.slow else LATE):
                wrong = wrong or f"it took {time.monotonic() - start:.1f} seconds."
            if wrong:
                broken.append(f"the hostile text {text[:200]!r}: {wrong}")
        played += 1
    return played, broken


def _answered(episode: Episode, response: str) -> str:
    """Return what is wrong with how an episode met a response; empty if nothing is."""
    before, was_won = episode.state_key(), episode.success
    read = episode.read(response)
    turn = episode.step(response)
    if not math.isfinite(turn.reward) or turn.penalty not in (0, episode.protocol.format_penalty):
        return f"its reward is {turn.reward} and its penalty {turn.penalty}."
    if not isinstance(episode.observation, str) or episode.observation not in episode.env.observation_space:
        return "the observation after it is not in the observation space."
    ignored = not read.actions or (episode.env.actions is None and not turn.valid)
    if ignored and (turn.valid or episode.state_key() != before):
        return "it names no valid action, and changed the state or was called valid."
    if not read.actions and turn.reward:
        return f"it names no action, and earned {turn.reward}."
    return "it succeeded without a valid action." if ignored and episode.success and not was_won else ""


def _stepped(env: TextEnv, action: str) -> str:
    """Return the same of an action that is put to the environment itself, and once more when that ended the game."""

    def state() -> str:
        return env.state_key() if env.has("state_key") else env.observe()

    for again in (False, True):
        before = state()
        observation, reward, over, cut, info = env.step(action)
        if not math.isfinite(reward) or observation != env.observe():
            return f"step() gave the reward {reward} and an observation unlike observe()."
        if not info["action_is_valid"] and state() != before:
            return "step() called it invalid, and changed the state."
        if info["action_is_valid"] and env.actions is not None and env.canonical_action(action) is None:
            return "step() called it valid, and it is not one of the actions."
        if again and (state() != before or not (over or cut)):
            return "step() after the end of the game changed the state or took it for unfinished."
        if not (over or cut):
            break
    return ""
