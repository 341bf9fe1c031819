"""How is one of these environments played over the network?  As an OpenEnv server, which any of its clients can play.

python -m envs.adapters.openenv frozen_lake --port 8000 size=5 slippery=true

The action is one field, `text`; the observation has the state as `text`, with the first one `rules` and `actions`, and
in its metadata what `info` holds. A task is a level: reset(split="test", index=12). There is no authentication, so the
server listens to this machine alone unless `--host` says otherwise; pages of other websites are refused.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Sequence

from envs import names, option
from envs.adapters.base import SESSIONS, TASKS, package


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.adapters.openenv", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("name", help=f"one of: {', '.join(names())}")
    parser.add_argument("options", nargs="*", default=[], help="the environment's options, name=value (as in YAML)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines play (default this one alone)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"side by side at most (default {SESSIONS})")
    parser.add_argument("--tasks", type=int, default=TASKS, help=f"levels of each split (default {TASKS})")
    parser.add_argument("--turns", type=int, help="actions an episode (default: the environment's own max_turns)")
    arguments = parser.parse_intermixed_args(argv)
    try:
        if not 0 <= arguments.port < 1 << 16:
            raise ValueError("--port must be between 0 and 65535.")
        for flag in ("sessions", "tasks", "turns"):
            if (value := getattr(arguments, flag)) is not None and value < 1:
                raise ValueError(f"--{flag} must be at least 1.")
        package("openenv.core", "openenv==0.10.0")  # after the arguments: it takes seconds to import
        import uvicorn

        from envs.adapters.openenv_server import MOST_BYTES, app_of, vanished
        from envs.guard import patient_protocol
        from envs.web import is_loopback

        options, local = dict(map(option, arguments.options)), is_loopback(arguments.host)
        app = app_of(arguments.name, options, arguments.turns, arguments.tasks, arguments.sessions, local=local)
        listening = socket.create_server((arguments.host, arguments.port))
    except (ValueError, OSError) as problem:
        message = (
            f"Listening at {arguments.host}:{arguments.port} fails: {problem}."
            if isinstance(problem, OSError)
            else problem
        )
        print(message, file=sys.stderr)
        return 2
    print(f"{arguments.name} is served at http://{arguments.host}:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", http=patient_protocol(), ws_max_size=MOST_BYTES)
    server = uvicorn.Server(config)
    logging.getLogger("uvicorn.error").addFilter(lambda record: not vanished(record))
    server.run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
