"""How does a test start Python without waiting for imports each time?  As a fork of a process that has made them.

Each is a process of its own, as a user's: nothing of this project is imported in it yet, only what it is built on.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

WITHOUT_SETTINGS = "torch torch._dynamo torch.distributed.tensor pandas pyarrow.parquet gymnasium"
LIBRARIES = (
    f"{WITHOUT_SETTINGS} transformers.modeling_utils datasets trl.trainer.sft_trainer trl.trainer.dpo_trainer peft"
)


@cache
def server(root: str, libraries: str) -> subprocess.Popen[str]:
    """The process that has the libraries; it ends with the pipe to it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *libraries.split()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True)


LOCK = threading.Lock()


def run(
    command: tuple[str, ...], root: str, env: dict[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """`python COMMAND` in the folder `root`. Raises subprocess.TimeoutExpired.

    With `env`, what reads its settings from the environment when it is imported is imported anew.
    """
    with LOCK, tempfile.TemporaryDirectory() as folder:
        process = server(root, LIBRARIES if env is None else WITHOUT_SETTINGS)
        assert process.stdin is not None and process.stdout is not None
        asked = {"command": command, "folder": folder, "timeout": timeout, "env": env or {}}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        code = json.loads(process.stdout.readline())
        said = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    if code is None:
        raise subprocess.TimeoutExpired(list(command), timeout, *said)
    return subprocess.CompletedProcess([sys.executable, *command], code, *said)


def serve() -> dict[str, Any]:
    """Forks a process for each request and tells its exit code; in that process, returns the request."""
    for library in sys.argv[1:]:
        __import__(library)
    gc.freeze()  # or the children copy all of it, looking for garbage
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            return asked
        print(json.dumps(waited(child, asked["timeout"])), flush=True)
    sys.exit()


def waited(child: int, timeout: float) -> int | None:
    """The exit code as subprocess has it, or None where the process was killed because it took too long."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        os.kill(child, 9)

    timer = threading.Timer(timeout, kill)
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return None if late.is_set() else os.waitstatus_to_exitcode(status)


def become(command: list[str], folder: str) -> None:
    """`python COMMAND`, its output in files."""
    for descriptor, name in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
    sys.path[0] = "" if command[0] in ("-c", "-m") else os.path.dirname(os.path.abspath(command[0]))
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    elif command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    request = serve()
    os.environ.update(request["env"])
    become(request["command"], request["folder"])
