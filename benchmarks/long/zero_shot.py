"""What do instruct models win without training, in plain and in compact words?

    python benchmarks/long/zero_shot.py MODEL [MODEL ...]  # hours; go on with it whenever you like
    python benchmarks/long/zero_shot.py                    # the table of what has been measured

64 validation levels of each environment, temperature 0.5, at most 5 turns (in FrozenLake its own 8) of 128 tokens, 256
where the answer is a calculation or a program. A game that is finished adds its row to the results and is not played
again. benchmarks/baselines.py tells what random play wins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks._measure import table
from benchmarks._rows import read_rows
from posttrain import models
from posttrain.config import EnvSection, ModelSection, ProtocolSection, run
from posttrain.metrics import wilson
from posttrain.rollout import Context, new_episode, open_sampler, play
from posttrain.runtime import runlog
from posttrain.types import Record, SamplingParams, Trajectory, derive_seed, short_name

RESULTS = Path(__file__).resolve().parents[1] / "results" / "zero_shot.jsonl"
LEVELS, CONTEXT = 64, 3500
TURNS = 5  # as RAGEN plays
STYLES = ("plain", "compact")


class Game(NamedTuple):
    """An environment, its options, the most turns, where None takes its own number, and the most tokens of a turn."""

    name: str
    options: dict[str, Any]
    turns: int | None = TURNS
    tokens: int = 128

    @property
    def title(self) -> str:
        return ", ".join([self.name, *map(str, self.options.values())])


GAMES = [
    Game("frozen_lake", {}, turns=None),
    *(Game(name, {}) for name in ("bandit", "sokoban", "search_qa", "rubiks_cube", "sudoku", "web_shop", "game_2048")),
    *(Game(name, {}, tokens=256) for name in ("countdown", "metamath_qa", "deep_coder", "lean")),
]


def row_of(model: str, game: Game, style: str, episodes: Sequence[Trajectory], seconds: float) -> Record:
    """Return the figures of a game: success with its Wilson interval, and shares of all turns."""
    turns, actions = sum(each.turns for each in episodes), sum(len(each.actions) for each in episodes)
    won = sum(each.success for each in episodes)
    low, high = wilson(won, len(episodes))
    return {
        "model": model,
        "env": game.title,
        "style": style,
        "levels": len(episodes),
        "success": won / len(episodes),
        "low": low,
        "high": high,
        "invalid_turns": sum(each.invalid_turns for each in episodes) / turns,
        "malformed_turns": sum(each.malformed_turns for each in episodes) / turns,
        "unfinished_turns": sum(each.unfinished_turns for each in episodes) / turns,
        "effective_actions": sum(each.effective_actions for each in episodes) / max(1, actions),
        "crashed": sum(bool(each.crashed) for each in episodes),
        "turns": turns / len(episodes),
        "seconds": round(seconds),
    }


def measure(folder: str, done: set[tuple[str, str, str]]) -> Iterator[Record]:
    """Yield the row of each game and style that this model has not played yet."""
    section, name = ModelSection(name_or_path=folder), short_name(folder)
    model, chat = models.load(section, device="auto", chat_template=None, training=False)
    sampler = open_sampler(model.bfloat16(), chat)
    seeds = [derive_seed(0, "sampling", n) for n in range(LEVELS)]
    for game in GAMES:
        for style in STYLES:
            if (name, game.title, style) in done:
                continue
            began = time.monotonic()
            env = EnvSection(name=game.name, options=game.options)
            limits = ProtocolSection.model_validate({"style": style, "max_turns": game.turns})
            places = [derive_seed(0, "level", n) for n in range(LEVELS)]
            episodes = [new_episode(env, limits, seed, "validation", derive_seed(seed, "noise")) for seed in places]
            params = SamplingParams(max_new_tokens=game.tokens, temperature=0.5)
            played = play(sampler, chat, episodes, params, seeds, slots=LEVELS, context=Context(max_tokens=CONTEXT))
            yield row_of(name, game, style, played, time.monotonic() - began)


def markdown(rows: Sequence[Record]) -> str:
    """A line for each environment and model; success and invalid turns of each style, in percent."""
    found = {(row["env"], row["model"], row["style"]): row for row in rows}
    lines = []
    for env, model in dict.fromkeys((row["env"], row["model"]) for row in rows):
        cells: list[str] = []
        for style in STYLES:
            row = found.get((env, model, style))
            cells += ["", ""] if row is None else [share(row), f"{row['invalid_turns']:.0%}"]
        lines.append([env, model, *cells])
    heads = [f"{style}: {what}" for style in STYLES for what in ("success", "invalid turns")]
    return table(["environment", "model", *heads], lines)


def share(row: Record) -> str:
    return f"{row['success']:.0%} [{row['low']:.0%}, {row['high']:.0%}]"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="folders or Hub names of instruct models")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON Lines (default: %(default)s)")
    given = parser.parse_args(argv)
    for model in given.models:
        rows = read_rows(given.results) if given.results.exists() else []
        for row in measure(model, {(row["model"], row["env"], row["style"]) for row in rows}):
            with given.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            runlog.say(f"{row['model']}, {row['env']}, {row['style']}: {share(row)}, {row['seconds']} s")
    print(markdown(read_rows(given.results)))


if __name__ == "__main__":
    run(main)
