"""Reward functions of your own: they have the signature of TRL's GRPOTrainer.

    python train_phase3_starpo.py --config configs/gsm8k.yaml \
        'envs.0.options.rewards=[examples.own_reward:right_number, {name: examples.own_reward:brief, weight: 0.2}]'

prompts and completions have one entry for each answer, and so has every column of the rows, by its name. A prompt
that is a text gives completions that are texts; a prompt of messages gives lists of messages. A function returns a
number for each answer, None where it does not apply, and may be async.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def right_number(prompts: list[Any], completions: list[str], answer: list[str], **columns: list[Any]) -> list[float]:
    """Return 1 where the last number of an answer is the last number of the column `answer`."""
    pairs = zip(completions, answer, strict=True)
    return [float(NUMBER.findall(text)[-1:] == NUMBER.findall(reference)[-1:]) for text, reference in pairs]


def brief(prompts: list[Any], completions: list[str], **columns: list[Any]) -> list[float]:
    """Return 1 for an empty answer, falling to 0 at 200 words."""
    return [max(0.0, 1 - len(text.split()) / 200) for text in completions]
