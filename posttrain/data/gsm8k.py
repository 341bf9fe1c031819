r"""Which rows of GSM8K are trained on, and which evaluate?  Worked answers that end in a box; 524 are held out.

The training split has 7,473 rows of `question` and `answer`: "48/2 = <<48/2=24>>24 clips.\n#### 24". A hash of the
question decides its side, so training and evaluation never share one, whichever file or part of it they read.
"""

from __future__ import annotations

import re

from posttrain.types import derive_seed

GSM8K_HELD_OUT = "gsm8k_held_out"  # the held-out side in configs
MARK = re.compile(r"<<[^<>]*>>")  # calls of a calculator, which does not exist here
SHARE = 14  # one question in 14 is held out


def is_held_out(question: str) -> bool:
    """Return whether a question is for evaluation alone; white space and case do not count."""
    return derive_seed("gsm8k held out", " ".join(question.casefold().split())) < 2**63 // SHARE


def final(answer: str) -> str | None:
    """Return the number after the last `####`, without the commas of thousands; None without one."""
    steps, mark, number = answer.rpartition("####")
    return (number.strip().replace(",", "") or None) if mark and steps.strip() else None


def worked_answer(answer: str) -> str:
    r"""Return the worked answer as math evaluation reads it: "48/2 = 24 clips.\nThe answer is \boxed{24}."."""
    steps = MARK.sub("", answer.rpartition("####")[0]).strip()
    return rf"{steps}{chr(10)}The answer is \boxed{{{final(answer)}}}."
