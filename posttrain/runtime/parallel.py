"""Which share of the work is mine?  The few collective operations of a run on several processes, no-ops on one.

Processes come from `torchrun` or `accelerate launch`, or from `python -m posttrain.runtime.parallel`, which takes
torchrun's arguments and ends with the run's own exit code, where torchrun always returns 1. Gradients are summed by
hand after the last micro-batch, so ranks may hold different numbers of micro-batches, or none, without deadlock.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from posttrain.files import keep_standard_streams
from posttrain.runtime import launcher
from posttrain.types import UserError

TIMEOUT = 6 * 3600  # seconds that processes wait for one that streams a large source, or writes to a slow disk
SHUTDOWN = 3600  # seconds after a signal that a step may still take, with its checkpoint
T = TypeVar("T")


def join(device: torch.device, timeout: float = TIMEOUT) -> None:
    """Join the other processes of a launch; TRL's trainers use the same process group.

    NCCL's own limit is ten minutes, and without `device_id` it guesses which GPU belongs to a process.

    Args:
        device: of this process.
        timeout: seconds to wait for another process.
    """
    if launcher.processes() > 1 and not dist.is_initialized():
        patience = timedelta(seconds=timeout)
        with port_in_words():
            if device.type == "cuda":
                torch.cuda.set_device(device)
                dist.init_process_group("nccl", timeout=patience, device_id=device)
            else:
                dist.init_process_group("gloo", timeout=patience)


@contextmanager
def port_in_words() -> Iterator[None]:
    """Raise UserError where the first process cannot listen on the port at which all of them meet."""
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "failed to listen" not in str(error):
            raise
        match = re.search(r"port: (\d+)", str(error))
        port = match[1] if match else os.environ.get("MASTER_PORT", "29500")
        raise UserError(
            f"Port {port}, at which the processes of the run would meet, is in use on this machine. Choose another:"
            " --master_port of torchrun, --main_process_port of accelerate launch; or, on one machine, let the"
            " launcher choose (--standalone; --main_process_port 0)."
        ) from None


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mine(count: int) -> range:
    """Return this process's indices out of `count`: consecutive, and as many as each other process has."""
    return range(rank() * count // size(), (rank() + 1) * count // size())


def gather(items: list[T]) -> list[T]:
    """Return every process's items, dealt out by `mine`, in their original order, on every process."""
    if size() == 1:
        return items
    parts: list[list[Any]] = [[] for _ in range(size())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def total(value: float, device: torch.device) -> float:
    """Return the sum of one number over all processes."""
    if size() == 1:
        return value
    summed = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.item()


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Add up every process's gradients in place; a process without a batch contributes zero."""
    if size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def barrier() -> None:
    if size() > 1:
        dist.barrier()


def launch(argv: list[str] | None = None) -> NoReturn:
    """Run torchrun, and exit as its processes do: 143 after SIGTERM, 2 for what the user can fix.

    They have long enough to end their step and write a checkpoint; torchrun kills them after 30 seconds.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    keep_standard_streams()
    argv = sys.argv[1:] if argv is None else argv
    arguments = run.parse_args(argv)
    if "--shutdown-timeout" not in " ".join(argv).replace("_", "-"):
        arguments.shutdown_timeout = SHUTDOWN
    try:
        with port_in_words():
            run.run(arguments)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        sys.exit(code if code >= 0 else 128 - code)
    sys.exit(0)


if __name__ == "__main__":
    launch()
