"""Does an environment keep its promises?  `posttrain env check frozen_lake observation=grid` plays it and says so.

Prints an episode, what scripted policies reach, the optional parts and the different levels of each split, then what is
broken, a sentence each. Exit code 1 when a promise is broken, 2 when the request makes no sense, as when options leave
too few different levels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from envs import CAPABILITIES, SPLITS, make, names, option
from envs.base import NoLevel, known
from envs.episode import Episode
from envs.hostile import HOSTILE, HOSTILE_TEXTS, meet_hostile_text
from envs.in_time import error_text
from envs.players import play_scripted
from envs.promises import LEVELS, SAME, TURNS, Subject, already, broken_promises, env_digest, protocol_for, where_raised
from envs.sentences import escaped
from envs.web import NoAnswer

COLOURS = {"system": "yellow", "user": "cyan", "assistant": "green"}


def main(argv: Sequence[str] | None = None, prog: str = "posttrain env check") -> int:
    """Check an environment. Returns the exit code: 0, 1 (a promise is broken) or 2 (the request makes no sense)."""
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help=f"one of: {', '.join(names())}; or module:Class")
    parser.add_argument("options", nargs="*", default=[], help="the environment's options, name=value (as in YAML)")
    parser.add_argument("--episodes", type=int, default=200, help="levels per player (default 200)")
    parser.add_argument("--turns", type=int, help=f"turns an episode (default: the environment's own, up to {TURNS})")
    parser.add_argument("--split", default="test", help=f"one of: {', '.join(SPLITS)} (default test)")
    parser.add_argument("--seed", type=int, default=0, help="the episode that is shown")
    parser.add_argument("--digest", action="store_true", help="print a fingerprint of the levels and stop")
    parser.add_argument("--hostile", metavar="FILE", help=argparse.SUPPRESS)  # how `hostile_text` plays elsewhere
    arguments = parser.parse_args(argv)
    try:
        subject = check_request(arguments)
    except (ValueError, NoAnswer) as problem:
        print(f"error: {escaped(error_text(problem))}", file=sys.stderr)
        return 2
    try:
        if arguments.hostile:
            for event in (*meet_hostile_text(subject, arguments.hostile), {"done": True}):
                print(json.dumps(event), flush=True)
            return 0
        return show_digest(subject) if arguments.digest else look(subject, arguments.seed)
    except (NoLevel, NoAnswer) as problem:
        print(f"error: {escaped(error_text(problem))}", file=sys.stderr)
        return 2


def check_request(arguments: argparse.Namespace) -> Subject:
    """Return what to check; a ValueError says what is wrong with the request."""
    options = dict(map(option, arguments.options))
    known("split", arguments.split, SPLITS)
    if arguments.episodes < 1 or arguments.seed < 0:
        raise ValueError("--episodes must be at least 1 and --seed at least 0.")
    protocol = protocol_for(make(arguments.name, **options), arguments.turns)
    return Subject(arguments.name, options, protocol, arguments.episodes, arguments.split)


def show_digest(subject: Subject) -> int:
    print(env_digest(subject))
    return 0


def look(subject: Subject, seed: int) -> int:
    """Show and check an environment; return the exit code."""
    console, broken = Console(), []
    try:
        show_environment(subject, seed, console)
    except (NoLevel, NoAnswer):
        raise
    except (Exception, SystemExit) as error:  # an environment may raise anything
        broken = [where_raised(subject, error)]
    broken += [sentence for sentence in broken_promises(subject) if not any(already([sentence], one) for one in broken)]
    if subject.options and broken and all(SAME in sentence for sentence in broken):
        options = " ".join(f"{name}={value}" for name, value in subject.options.items())
        print(f"{subject.name} with {options}: {broken[0].partition(SAME)[0]}{SAME}. Choose options with more levels.",
              file=sys.stderr)  # fmt: skip
        return 2
    for sentence in broken:
        console.print(f"[red]broken[/red] {escape(sentence)}", soft_wrap=not console.is_terminal)
    if not broken:
        env = subject.make()
        texts = len(HOSTILE) + (len(HOSTILE_TEXTS) if env.actions is None else 0)
        optimum = " no win beyond the claimed optimum," if env.has("optimal_success") else ""
        console.print(
            "[green]kept[/green] gymnasium's API, disjoint splits of different levels, the same levels in every"
            " process, pure resets, valid steps, play in the protocol, scripted policies that change nothing,"
            f"{optimum} {texts} hostile texts survived"
        )
    return 1 if broken else 0


def show_environment(subject: Subject, seed: int, console: Console) -> None:
    """Print one episode, the results of the scripted policies, the optional parts and the levels."""
    env = subject.at(0)
    players = subject.players
    shown = Episode(subject.make(), subject.protocol, seed, subject.split)
    if players:
        shown = play_scripted(subject.make(), players[-1], subject.protocol, seed, subject.split)
    for message in shown.messages:
        role = message["role"]
        console.print(Panel(escape(message["content"]), title=role, title_align="left", border_style=COLOURS[role]))
    if players:
        console.print(f"{players[-1]} {'succeeds' if shown.success else 'fails'} after {shown.turns} turns.\n")
        console.print(scores(subject))
    parts = Table("optional part", "", "what it switches on", title="")
    for capability, what in CAPABILITIES.items():
        parts.add_row(capability, "yes" if env.has(capability) else "no", what)
    console.print(parts)
    counts = ", ".join(f"{split} {count}" for split, count in subject.distinct.items())
    shared = "" if any(env.split_of(level) for level in subject.levels["test"]) else " (no level is held out)"
    console.print(f"Different levels in {LEVELS} draws: {counts}{shared}.\n")


def scores(subject: Subject) -> Table:
    """Return a table of how well each player does on the same levels."""
    turns = subject.protocol.max_turns
    table = Table(
        title=f"{subject.name}: {subject.episodes} {subject.split} levels, at most {turns} turns of one action"
    )
    for column in ("player", "success", "", "lost", "turns"):
        table.add_column(column, justify="left" if column == "player" else "right")
    for player in subject.players:
        played = [
            play_scripted(subject.make(), player, subject.protocol, level, subject.split)
            for level in range(subject.episodes)
        ]
        won, lost = sum(e.success for e in played), sum(bool(e.failure) for e in played)
        mean = sum(e.turns for e in played) / len(played)
        table.add_row(player, f"{won}/{len(played)}", f"{won / len(played):.1%}", str(lost), f"{mean:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
