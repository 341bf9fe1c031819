"""What must an environment leave as it found it?  The working directory and torch's settings, which all code shares.

Otherwise a model would be trained in another precision, on other threads or without gradients, and files would be read
from another folder, with messages that name neither the environment nor the reason. So each change is undone, and
reported once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

_reported: set[tuple[str, str]] = set()


class ProcessState(NamedTuple):
    """ProcessState(directory="/home/me/posttrain", dtype=torch.float32, gradients=True, threads=8).

    Before torch is imported dtype and gradients are what it begins with; threads are None, which is not compared.
    """

    directory: str
    dtype: str
    gradients: bool
    threads: int | None

    @classmethod
    def now(cls) -> ProcessState:
        torch: Any = sys.modules.get("torch")
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = ""
        if not hasattr(torch, "is_grad_enabled"):  # not imported, or half of it
            return cls(directory, "float32", True, None)
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        return cls(directory, dtype, torch.is_grad_enabled(), torch.get_num_threads())

    def put_back(self, who: str) -> None:
        """Undo what differs by now, and say once that `who` has changed it."""
        now, torch = ProcessState.now(), sys.modules.get("torch")
        changed: dict[str, str] = {}
        if now.directory != self.directory:
            changed["the working directory"] = f"to {now.directory or 'a folder that is gone'}"
            with suppress(OSError):
                os.chdir(self.directory)
        if torch is not None and now.dtype != self.dtype:
            changed["torch's default dtype"] = f"to {now.dtype}"
            torch.set_default_dtype(getattr(torch, self.dtype))
        if torch is not None and now.gradients != self.gradients:
            changed["whether torch computes gradients"] = f"to {now.gradients}"
            torch.set_grad_enabled(self.gradients)
        if torch is not None and self.threads is not None and now.threads != self.threads:
            changed["torch's number of threads"] = f"to {now.threads}"
            torch.set_num_threads(self.threads)
        for what, how in changed.items():
            if (who, what) not in _reported:
                _reported.add((who, what))
                print(
                    f"{who} changed {what} {how}, for all of this process. It was put back and will be each time:"
                    " an environment must leave it as it is.",
                    file=sys.stderr,
                )


@contextmanager
def keep_process_state(who: str) -> Iterator[None]:
    """Run an environment's code, then put the process's state back as it was before."""
    before = ProcessState.now()
    try:
        yield
    finally:
        if ProcessState.now() != before:
            before.put_back(who)
