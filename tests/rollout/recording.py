"""How is recording tested without a GPU?  A stand-in for CUDA graphs that knows tensors alone, as they do.

It lists the operations of a step with the tensors that they read and write. A replay runs them on these tensors: what
Python would do differently at the next step, and tensors that have taken the place of others, are not seen by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of what is written in place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            written = args[0]
            self.before.setdefault(id(written), (written, written.clone()))
        made = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, made))
        return made


class ListRecorder:
    """Records steps as lists of operations."""

    def __init__(self) -> None:
        self.steps = 0

    def record(self, step: Callable[[], object]) -> Callable[[], object]:
        self.steps += 1
        with _Listing() as listing:
            step()
        for tensor, before in reversed(listing.before.values()):  # recording does nothing
            tensor.copy_(before)

        def replay() -> None:
            with torch.no_grad():
                for func, args, kwargs, made in listing.operations:
                    again = func(*args, **kwargs)
                    if not func._schema.is_mutable:
                        for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                                old.copy_(new)

        return replay
