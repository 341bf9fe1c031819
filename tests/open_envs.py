"""Which environments can this machine open?  deep_coder needs a sandbox: its tests are skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest

import envs
from envs.deep_coder import sandbox


def missing() -> str:
    """Why there is no sandbox here; empty where there is one."""
    try:
        sandbox.require()
    except ValueError as problem:
        return str(problem)
    return ""


MISSING = missing()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING[:200]}")


def open_or_skip(name: str, **options: Any) -> envs.TextEnv:
    if name == "deep_coder" and MISSING:
        pytest.skip(MISSING)
    return envs.make(name, **options)
