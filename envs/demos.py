"""How are demonstrations and preference pairs written?  Episodes of scripted policies, as rows for phases 1 and 2.

posttrain env demos rubiks_cube=2 sudoku --n 3000 --thought plan         rows for phase 1, kind: messages
posttrain env demos frozen_lake --player expert:0.8,random:0.2 --pairs   pairs for phase 2, kind: preferences
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from envs import SPLITS, make, names, option
from envs.base import TextEnv, known
from envs.episode import Episode
from envs.players import THOUGHTS, Style, demonstration, parse_mix, preference_in_state
from envs.protocol import STYLES, Protocol
from envs.web import NoAnswer

GIVE_UP = 200  # episodes of an environment without a row


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
    words: str = "plain"  # the protocol's style
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
        protocol = Protocol.of(env, max_turns=self.turns, style=self.words)
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
    made.add_argument(
        "--style", default="plain", help=f"words, as in protocol.style: {', '.join(STYLES)} (default plain)"
    )
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
        words=known("style", arguments.style, STYLES),
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
