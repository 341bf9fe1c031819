"""A parser of your own: the last answer counts, and what is not an action in it is passed over.

    python train_phase3_starpo.py --config configs/quickstart/own_environment.yaml \\
        protocol.parser=examples.own_parser:last_answer output_dir=runs/own

posttrain/config/plugins.py says what such a function is given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from envs.protocol import Parsed, Protocol

ANSWER = re.compile(r"<answer>([^<]*)</answer>")


def last_answer(text: str, protocol: Protocol, listed: Sequence[str] | None) -> Parsed:
    """Return the actions of the last <answer>, whatever stands before it."""
    answers = ANSWER.findall(text)
    if not answers:
        return Parsed(actions=[], well_formed=False, invalid=[])
    if listed is None:  # free text is one action
        return Parsed(actions=[answers[-1]], well_formed=True, invalid=[])
    spelling = {action.lower(): action for action in listed}
    names = [name for name in re.findall(r"\w+", answers[-1].lower()) if name in spelling]
    return Parsed([spelling[name] for name in names[: protocol.max_actions_per_turn]], well_formed=True, invalid=[])
