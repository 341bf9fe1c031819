"""Which program answers a prompt instead of the model alone?  One that talks to the model by OpenAI's interface.

    agent: [python, my_agent.py, "{{ question }}"]

The program is started once for each episode, in a process group of its own, with two environment variables that the
`openai` client reads by itself: OPENAI_BASE_URL and OPENAI_API_KEY. It finds its row as JSON on stdin, and in the parts
of the command, which are Jinja templates over the row's columns.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envs.prompts.rewards import Reward, is_exit_code
from envs.prompts.rows import filled

MARKS = re.compile("{[{%#]")  # of a Jinja template
MOST_PARALLEL = 256  # programs at the same time
OUTPUT = ("output", "exit_code")  # columns that reward functions are given beside those of the row


class AgentProgram(NamedTuple):
    """A program: its command, and its limits.

    turns: answers of the model in an episode, after which it is truncated. seconds: that the program may take for all
    of it, the time that it waits for the model aside. parallel: programs that run at the same time. lost: the exit code
    with which a program says that it lost.
    """

    command: tuple[str, ...]
    turns: int = 16
    seconds: float = 600.0
    parallel: int = 16
    lost: int | None = None

    def words(self, row: Mapping[str, Any]) -> list[str]:
        """Return the command for a row; ValueError where a template cannot be filled."""
        return [filled(part, row, empty=True) if MARKS.search(part) else part for part in self.command]

    def ended_well(self, exit_code: int) -> bool:
        """Return whether a program that ended so has not crashed."""
        return exit_code in (0, self.lost)


def search_path() -> str:
    """Return where programs are looked for: `python` is the Python that runs this, then PATH."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def agent_of(given: str | Sequence[Any] | Mapping[str, Any], rewards: Sequence[Reward]) -> AgentProgram:
    """Return the program that `agent` names; ValueError says what is wrong with it.

    rewards: of the environment; that of the exit code knows which one is not a crash.
    """
    entry: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"command": given}
    command: Any = entry.pop("command", None)
    if not isinstance(command, list | tuple) or not command or command[0] == "":
        raise ValueError(
            f"prompts: agent={given!r:.80} has no command: write a list, agent: [python, my_agent.py], or a mapping"
            " with command and limits."
        )
    if other := [part for part in command if not isinstance(part, str)]:
        raise ValueError(
            f"prompts: the command of agent has the part {other[0]!r:.40}, not a text: write it in quotes."
        )
    limits = {
        "turns": (int, 1, 10_000),
        "seconds": (float, 0.001, 1e6),
        "parallel": (int, 1, MOST_PARALLEL),
    }
    for key, value in entry.items():
        if key not in limits:
            raise ValueError(f"prompts: agent has no key {key}; it has command, {', '.join(limits)}.")
        kind, low, high = limits[key]
        if type(value) not in (int, kind) or not low <= value <= high:
            raise ValueError(f"prompts: agent.{key} is {value!r:.40}, not a number from {low:g} to {high:g}.")
    if shutil.which(command[0], path=search_path()) is None:
        raise ValueError(
            f"prompts: there is no program {command[0]}: write the path of one that may be executed, or the name of one"
            " on PATH."
        )
    lost = next((each.function.keywords["lost"] for each in rewards if is_exit_code(each)), None)
    return AgentProgram(tuple(command), **entry, lost=lost)
