"""Is an answer right?  The judge of envs/math_judge.py, as the scripts use it.

Importing it loads the environments: what must start at once imports it where it is needed.
"""

from __future__ import annotations

import re

from envs import math_judge
from envs.math_judge import last_boxed as last_boxed
from posttrain.types import UserError

NUMBER = re.compile(r"-?[0-9][0-9,]*+(?:\.[0-9]+)?")


def last_number(text: str) -> str | None:
    """The last number of a text, without the commas of thousands, boxed or not: last_number("It is $1,200.") -> "1200".

    What lm-evaluation-harness calls the flexible extraction of GSM8K.
    """
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


class MathJudge(math_judge.MathJudge):
    """That it cannot be started is something a user can fix."""

    def start(self) -> None:
        try:
            super().start()
        except math_judge.NoJudge as error:
            raise UserError(str(error)) from None
