"""Which environments can this machine open?  deep_coder needs a sandbox: its tests are skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest

import envs
from envs.deep_coder import sandbox


def open_or_skip(name: str, **options: Any) -> envs.TextEnv:
    if name == "deep_coder":
        try:
            sandbox.require()
        except ValueError as problem:
            pytest.skip(str(problem))
    return envs.make(name, **options)
