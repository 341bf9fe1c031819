"""How do scripted policies play?  The expert and the players of an environment, for demonstrations and comparisons.

posttrain env demos rubiks_cube=2 sudoku --n 3000 --thought plan         rows for phase 1, kind: messages
posttrain env demos frozen_lake --player expert:0.8,random:0.2 --pairs   pairs for phase 2, kind: preferences
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from envs import SPLITS, make, names, option
from envs.base import TextEnv, known
from envs.protocol import ACTION_SEP, Episode, Message, Protocol, format_response, parse
from envs.web import NoAnswer

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
GIVE_UP = 200  # episodes of an environment without a row


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
    raise ValueError(
        f"The environment {env.name} cannot be demonstrated: it defines neither players() nor expert(). Write one of"
        " them, or leave it out of the demonstrations."
    )


def parse_mix(text: str) -> dict[str, float]:
    """Return {"expert": 0.9, "random": 0.1} for `expert:0.9,random:0.1`; the shares are scaled to the sum 1."""
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
        """Raise ValueError where the thought would name what only chance decides, or what the model cannot see."""
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
            return f"Next state: {ahead.env.observe()}"
        while len(moves) < self.plan and not ahead.done:
            moves.append(next_action(ahead.env, player))
            ahead.step(format_response("", moves[-1:], ahead.protocol))
        return f"Plan: {f' {ACTION_SEP} '.join(moves)}"


def _ahead(episode: Episode) -> Episode:
    """Return a copy of an episode to think ahead in: it does not need the conversation so far."""
    ahead = copy.copy(episode)
    ahead.env, ahead.messages = copy.deepcopy(episode.env), []
    ahead.past, ahead.actions = list(episode.past), list(episode.actions)
    return ahead


class Turns:
    """Who plays which turn of an episode, drawn by shares."""

    def __init__(self, env: TextEnv, mix: Mapping[str, float], seed: int, stream: int = 3) -> None:
        for player in mix:
            known(f"player of {env.name}", player, player_names(env))
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


# -- rows of several environments --------------------------------------------------------------------------------------


@dataclass
class Recipe:
    """What is written: Recipe([make("frozen_lake")], [1.0], {"expert": 1.0}, Style("plan"))."""

    envs: Sequence[TextEnv]
    weights: Sequence[float]
    mix: Mapping[str, float]
    style: Style
    flawed: Mapping[str, float] | None = None  # who plays the rejected answers; None: the scripted policies alike
    pairs: bool = False
    success_only: bool = False
    turns: int | None = None  # of an episode; None: those of the environment
    split: str = "train"
    seed: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # filled while rows are made

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        """Yield `n` rows; the first k of them do not depend on n. ValueError where an environment gives none."""
        written, tried = [0] * len(self.envs), [0] * len(self.envs)
        for number in range(1, n + 1):
            owed = [weight * number / sum(self.weights) - k for weight, k in zip(self.weights, written, strict=True)]
            which = int(np.argmax(owed))
            row, last = None, tried[which] + GIVE_UP
            while row is None:
                if tried[which] == last:
                    reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.left_out.items())
                    raise ValueError(
                        f"{self.envs[which].name}: {GIVE_UP} episodes in a row gave nothing to write (left out:"
                        f" {reasons}). Choose other players or more turns."
                    )
                row = self._row(self.envs[which], tried[which])
                tried[which] += 1
            written[which] += 1
            yield row

    def _row(self, env: TextEnv, number: int) -> dict[str, Any] | None:
        """Return the row of an environment's episode of that number, or None."""
        protocol = Protocol.of(env, max_turns=self.turns)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {env.name} {number}".encode()).digest()[:4], "big")

        def begin() -> Episode:
            return Episode(env, protocol, seed, self.split)

        facts = {"env": env.name, "seed": seed}
        if self.pairs:
            pair, left_out = preference_in_state(begin, self.mix, self.flawed or self._players(env), self.style)
            self.left_out.update(left_out)
            return None if pair is None else pair | facts
        episode = begin()
        messages, trained = demonstration(episode, self.mix, self.style)
        reason = "the answer format is broken" if episode.malformed_turns else ""
        reason = reason or ("no turn is the expert's" if not trained else "")
        reason = reason or ("not solved" if self.success_only and not episode.success else "")
        if reason:
            self.left_out[reason] += 1
            return None
        return {"messages": messages} | facts | {"success": episode.success}

    def _players(self, env: TextEnv) -> dict[str, float]:
        env.reset(seed=0)
        players = env.players()
        if not players or not env.has("expert"):
            raise ValueError(f"Pairs need an expert and a flawed player; {env.name} lacks one of them.")
        return {player: 1 / len(players) for player in players}


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, prog: str = "posttrain env demos") -> int:
    """Write demonstrations or pairs. Returns the exit code: 0, or 2 where nothing was written."""
    arguments = parser(prog).parse_args(argv)
    try:
        recipe = demos_request(arguments)
        kind = "preferences" if recipe.pairs else "messages"
        name = "+".join(env.name for env in recipe.envs) + ("_pairs" if recipe.pairs else "")
        file = Path(arguments.out or f"runs/demos/{name}.jsonl")
        if file.exists() and not arguments.overwrite:
            raise ValueError(f"{file} exists already: name another file with --out, or write --overwrite.")
        summary = write(recipe, arguments.n, file)
    except (ValueError, OSError, NoAnswer) as problem:
        lost = f"{arguments.out or 'runs/demos'} cannot be written: choose another file with --out"
        print(f"{lost} ({problem.strerror})." if isinstance(problem, OSError) else problem, file=sys.stderr)
        return 2
    print(f"{summary}\nRead it with data.sources: [{{kind: {kind}, path: {file}}}]")
    return 0


PLAYER_HELP = "who plays, in shares: expert:0.9,random:0.1 (default expert; beside it the others are not trained)"


def parser(prog: str = "posttrain env demos") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=prog, description="Write demonstrations or preference pairs as JSONL.")
    made.add_argument("envs", nargs="+", metavar="NAME[=WEIGHT]", help=f"of: {', '.join(names())}; or module:Class")
    made.add_argument("--n", type=int, default=1000, help="rows (default 1000)")
    made.add_argument("--player", default="expert", help=PLAYER_HELP)
    made.add_argument("--thought", default="cues", help=f"one of: {', '.join(THOUGHTS)} (default cues)")
    made.add_argument("--plan", type=int, default=4, help="moves of a plan (default 4)")
    made.add_argument("--pairs", action="store_true", help="preference pairs: the expert's answer and a worse one")
    made.add_argument("--rejected", help="who plays the worse answers (default: the scripted policies alike)")
    made.add_argument("--options", nargs="+", default=[], metavar="NAME.OPTION=VALUE", help="e.g. sokoban.boxes=2")
    made.add_argument("--turns", type=int, help="turns an episode (default: the environment's own max_turns)")
    made.add_argument("--success-only", action="store_true", help="leave out episodes that are not solved")
    made.add_argument("--split", default="train", help=f"one of: {', '.join(SPLITS)} (default train)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", metavar="FILE", help="default runs/demos/NAME.jsonl")
    made.add_argument("--overwrite", action="store_true", help="overwrite an existing file")
    return made


def demos_request(arguments: argparse.Namespace) -> Recipe:
    """Return what to write; a ValueError says what is wrong with the request."""
    weights: dict[str, float] = {}
    for text in arguments.envs:
        name, equals, weight = text.partition("=")
        if ":" not in name:
            known("environment", name, names())
        try:
            weights[name] = float(weight if equals else 1)
        except ValueError:
            weights[name] = 0.0
        if not 0 < weights[name] < float("inf"):
            raise ValueError(f'The weight in "{text}" is not a positive number: write for example {name}=2.')
    options: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for text in arguments.options:
        name = next((each for each in weights if text.startswith(f"{each}.")), text.partition(".")[0])
        rest = text[len(name) + 1 :]
        if not rest or "=" in name:
            raise ValueError(f'"{text}" does not name an environment: write NAME.OPTION=VALUE, as in sokoban.boxes=2.')
        key, value = option(rest)
        options[known("environment of this command", name, weights)][key] = value
    if arguments.n < 1 or arguments.seed < 0 or (arguments.turns or 1) < 1:
        raise ValueError("--n and --turns must be at least 1, and --seed at least 0.")
    if (arguments.pairs and arguments.success_only) or (arguments.rejected and not arguments.pairs):
        raise ValueError("--success-only is about whole episodes, --rejected about --pairs: write them with these.")
    recipe = Recipe(
        envs=[make(name, **options[name]) for name in weights],
        weights=list(weights.values()),
        mix=parse_mix(arguments.player),
        style=Style(arguments.thought, arguments.plan),
        flawed=parse_mix(arguments.rejected) if arguments.rejected else None,
        pairs=arguments.pairs,
        success_only=arguments.success_only,
        turns=arguments.turns,
        split=known("split", arguments.split, SPLITS),
        seed=arguments.seed,
    )
    for env in recipe.envs:
        recipe.style.require(env)
    return recipe


def write(recipe: Recipe, n: int, file: Path) -> str:
    """Write the rows, all or none; return what to tell about them."""
    from rich.console import Console
    from rich.progress import track

    counts, different, solved = Counter(), set(), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    console = Console(stderr=True)
    try:
        with part.open("w", encoding="utf-8", newline="\n") as lines:
            bar = track(recipe.rows(n), "playing", n, console=console, transient=True, disable=not console.is_terminal)
            for row in bar:
                line = json.dumps(row)
                lines.write(f"{line}\n")
                counts[row["env"]] += 1
                different.add(json.dumps({key: row[key] for key in row if key != "seed"}))
                solved += row.get("success", 0)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    total = f"{n:,} {'pairs' if recipe.pairs else f'episodes, {solved:,} of them solved'}"
    shares = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    left_out = "".join(f"; {reason}: {count:,}" for reason, count in sorted(recipe.left_out.items())) or "; nothing"
    return f"Wrote {total} ({shares}), {len(different):,} different, to {file}. Left out{left_out[1:]}."


if __name__ == "__main__":
    sys.exit(main())
