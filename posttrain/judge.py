"""Is an answer right?  The judge of envs/math_judge.py, as the scripts use it.

Importing it loads the environments: what must start at once imports it where it is needed.
"""

from __future__ import annotations

from envs import math_judge
from envs.math_judge import last_boxed as last_boxed
from posttrain.types import UserError


class MathJudge(math_judge.MathJudge):
    """That it cannot be started is something a user can fix."""

    def start(self) -> None:
        try:
            super().start()
        except math_judge.NoJudge as error:
            raise UserError(str(error)) from None
