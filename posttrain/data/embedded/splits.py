"""Which rows are held out?  The same tenth of all keys in every run and process; and values on a wanted side."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]  # role, content, and mask_spans where a part of an answer is not trained


def held_out(*key: object) -> bool:
    """Return True for a tenth of all keys, the same tenth for every seed and process."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 10 == 0


def first_accepted(make: Callable[[random.Random], Any], accepts: Callable[[Any], bool], rng: random.Random) -> Any:
    """Return the first value on the wanted side of a split, which has at least a tenth of all values."""
    return next(value for value in (make(rng) for _ in itertools.count()) if accepts(value))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
