"""What do chance and the expert reach in each environment, within its own number of turns?

Success on test levels with its 95 % interval; the table of docs/environments.md.
    python benchmarks/baselines.py [NAME ...] [--episodes 256] [--json FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

import envs
from envs.players import play_scripted, player_names
from envs.protocol import Protocol
from posttrain.metrics import wilson

SHOWN = ("random", "expert")  # of the players


def baselines(name: str, episodes: int) -> dict[str, dict[str, Any]]:
    """For each player: levels won, of how many, and the mean reward."""
    env = envs.make(name)
    env.reset(seed=0, options={"split": "test"})
    found = {}
    for player in [each for each in SHOWN if each in player_names(env)]:
        played = [play_scripted(envs.make(name), player, Protocol.of(env), seed, "test") for seed in range(episodes)]
        reward = sum(turn.reward for episode in played for turn in episode.past) / episodes
        found[player] = {"won": sum(episode.success for episode in played), "of": episodes, "reward": reward}
    return found


def cell(found: dict[str, Any] | None) -> str:
    """`12.5% [9.0%, 17.1%]`, or a dash where there is no such player."""
    if found is None:
        return "-"
    low, high = wilson(found["won"], found["of"])
    return f"{found['won'] / found['of']:.1%} [{low:.1%}, {high:.1%}]"


def main() -> None:
    parser = _measure.parser(__doc__, repeats=False)
    parser.add_argument("names", nargs="*", help="environments; all of them by default")
    parser.add_argument("--episodes", type=int, default=256)
    given = parser.parse_args()
    results = _measure.surroundings() | {"envs": {}}
    rows = []
    for name in given.names or _measure.environments():
        found = results["envs"][name] = baselines(name, given.episodes)
        rewards = [f"{found[player]['reward']:.2f}" if player in found else "-" for player in SHOWN]
        rows.append([name, str(envs.make(name).max_turns), *(cell(found.get(player)) for player in SHOWN), *rewards])
    header = ["environment", "turns", *(f"{player}: success" for player in SHOWN), *(f"{p}: reward" for p in SHOWN)]
    _measure.publish(results, f"{_measure.told(results)}\n\n{_measure.table(header, rows)}", given.json)


if __name__ == "__main__":
    main()
