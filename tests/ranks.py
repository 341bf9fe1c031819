"""What happens in several processes?  `ranks.py N [NAME=VALUE ...] SCRIPT ...` forks N that have imported everything.

As torchrun, without its seconds of imports: what it was started with is loaded already (tests/preloaded.py). The exit
code is that of the first process that fails; the others then have PATIENCE, a minute, to end by themselves.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress


def main(count: int, words: list[str]) -> int:
    settings = [word for word in words if "=" in word.split("/")[0] and word.split("=")[0].isupper()]
    command = words[len(settings) :]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update({"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"})
    os.environ.update({"MASTER_PORT": str(port), **dict(word.split("=", 1) for word in settings)})
    children = [start(rank, command) for rank in range(count)]
    running, code = set(children), 0
    patience = threading.Timer(float(os.environ.get("PATIENCE", "60")), kill, [running])
    while running:
        child, status = os.wait()
        running.discard(child)
        code = code or os.waitstatus_to_exitcode(status)
        if code and patience.ident is None:
            patience.start()
    patience.cancel()
    return code


def kill(running: set[int]) -> None:
    late = list(running)
    for each in late:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    print(f"{len(late)} processes did not end by themselves", file=sys.stderr)


def start(rank: int, command: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    sys.argv, code = command, 0
    sys.path[0:1] = [os.path.dirname(os.path.abspath(command[0])), os.getcwd()]
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
