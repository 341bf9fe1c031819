"""What does a process say that loses another one?  `lost_process.py dies|hangs`, in several processes."""

from __future__ import annotations

import os
import signal
import sys

import torch

from posttrain import config
from posttrain.runtime import parallel


def main() -> None:
    parallel.join(torch.device("cpu"), timeout=3)
    parallel.barrier()
    if parallel.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "dies" else signal.SIGSTOP)
    parallel.total(1.0, torch.device("cpu"))


if __name__ == "__main__":
    config.run(main)
