"""What does the model see?  `posttrain env play frozen_lake size=5` lets you play it with the very same text.

Write an action; `# a thought` in the line before it, if you like; or a whole answer with its tags, over several lines
up to </answer>. Ctrl-C, Ctrl-D and the end of a file end the game.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from envs import SPLITS, make, names, option
from envs.base import known
from envs.episode import Episode
from envs.in_time import error_text
from envs.protocol import STYLES, Protocol, Turn, format_response
from envs.sentences import escaped
from envs.web import NoAnswer

THOUGHT = "#"  # begins a line with the thought of the next action


def main(argv: Sequence[str] | None = None, prog: str = "posttrain env play") -> int:
    """Play an environment at the terminal. Returns the exit code: 0, or 2 where the request makes no sense."""
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help=f"one of: {', '.join(names())}; or module:Class")
    parser.add_argument("options", nargs="*", default=[], help="the environment's options, name=value (as in YAML)")
    parser.add_argument("--turns", type=int, help="turns (default: the environment's own max_turns)")
    parser.add_argument("--style", default="plain", help=f"words: {', '.join(STYLES)} (default plain)")
    parser.add_argument("--split", default="train", help=f"one of: {', '.join(SPLITS)} (default train)")
    parser.add_argument("--seed", type=int, default=0, help="the level (default 0)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.seed < 0:
            raise ValueError("--seed must be at least 0.")
        env = make(arguments.name, **dict(map(option, arguments.options)))
        split = known("split", arguments.split, SPLITS)
        protocol = Protocol.of(env, max_turns=arguments.turns, style=arguments.style)
        episode = Episode(env, protocol, arguments.seed, split)
    except (ValueError, NoAnswer) as problem:
        print(f"error: {escaped(error_text(problem))}", file=sys.stderr)
        return 2
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # whatever is piped in, and whatever a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    rewards: list[float] = []
    try:
        converse(episode, rewards)
    except (EOFError, KeyboardInterrupt):
        print()
    except NoAnswer as problem:
        print(f"error: {escaped(error_text(problem))}", file=sys.stderr)
        return 2
    print(summary(episode, sum(rewards)))
    return 0


def converse(episode: Episode, rewards: list[float]) -> None:
    """Play until the game is over, rewards and penalties into the list; EOFError where the input ends first."""
    for message in episode.messages:
        print_as(message["role"], message["content"])
    while not episode.done:
        text = response(episode)
        if not sys.stdin.isatty():
            print(text)
        turn = episode.step(text)
        rewards.append(turn.reward + turn.penalty)
        print(f"[{print_turn(turn)}]")
        if turn.user is not None:
            print_as("user", turn.user)
    print_as("last state", episode.env.observe())


def response(episode: Episode) -> str:
    """Return the answer that is typed; one with tags is left as it is, good or bad.

    Where an environment takes whole answers, a line is one.
    """
    thought = ""
    while True:
        line = input("you> ")
        if episode.own_words:
            return line
        if line.lstrip().startswith(THOUGHT):
            thought = line.strip().removeprefix(THOUGHT).strip()
        elif "<answer>" in line or "<think>" in line:
            while "<answer>" in line and "</answer>" not in line:
                line += f"\n{input('...> ')}"
            return line
        elif line.strip():
            return format_response(thought, [line.strip()], episode.protocol)


def print_turn(turn: Turn) -> str:
    penalty = f", penalty {turn.penalty:g}" if turn.penalty else ""
    return f"reward {round(turn.reward, 6):g}{penalty}{'' if turn.valid else ', invalid answer'}"


def summary(episode: Episode, total: float) -> str:
    ended = "solved" if episode.success else f"lost ({episode.failure})" if episode.failure else "not solved"
    limit = " Out of turns." if episode.truncated else "" if episode.done else " Ended by you."
    invalid = f", {episode.invalid_turns} of them invalid" if episode.invalid_turns else ""
    turns = f"{episode.turns} turn{'' if episode.turns == 1 else 's'}{invalid}"
    return f"{ended.capitalize()} after {turns}, return {round(total, 6):g}.{limit}"


def print_as(role: str, text: str) -> None:
    colour = {"system": "33", "user": "36"}.get(role, "32")
    title = f"\x1b[{colour}m{role}\x1b[0m" if sys.stdout.isatty() else role
    print(f"-- {title}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
