"""How can another GPU or host write a run's turns?  The slot engine as a server, which is given the run's weights.

    python -m posttrain.rollout_server --model runs/phase2/final --port 8200

Token ids in, token ids and log-probs out. Conversations stay here between turns, with their KV cache. One run at a time
has a server: it sends its weights, numbers its conversations and says regularly that it goes on. If it is silent for
LEASE seconds, its conversations are dropped. docs/serving.md, "Rollouts elsewhere", has the rest.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import os
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from envs.guard import host_of
from envs.web import is_loopback
from posttrain.config import ModelSection, run
from posttrain.rollout import CHECKSUM, SESSION, TOKEN
from posttrain.rollout_engine import Engine, Refused
from posttrain.runtime import runlog
from posttrain.serving import listen
from posttrain.types import HUB_NAME, UserError

MOST_JSON = 256 << 20  # bytes of a request
SPARE = 1 << 20  # bytes that a chunk of weights may have beside its tensors


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.rollout_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="the folder that the run starts from, or a model of the Hub")
    parser.add_argument("--host", default="127.0.0.1", help=f"address; one that others reach needs {TOKEN}")
    parser.add_argument("--port", type=int, default=8200, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    arguments = parser.parse_args(argv)
    check_model(arguments.model)
    listening = listen(arguments.host, arguments.port)
    host, port = listening.getsockname()[:2]
    token = os.environ.get(TOKEN, "")
    if not token and not ipaddress.ip_address(host).is_loopback:
        raise UserError(
            f"--host {arguments.host} lets others reach this server, who could replace its weights: set the environment"
            f" variable {TOKEN} to a secret word, here and where the run is started."
        )
    runlog.keep_private(Path("runs"))

    from posttrain import models
    from posttrain.plan import check_hub
    from posttrain.rollout import open_engine

    section = ModelSection(name_or_path=arguments.model, dtype=arguments.dtype)
    check_hub([section], [])
    model, chat = models.load(section, device=arguments.device, chat_template=None, training=False)
    engine = Engine(open_engine(model.eval(), [chat.stop_id], chat.pad_id), chat, arguments.model)
    server = Server(listening, engine, token)
    engine.start(server.shutdown)
    print(f"Rollout server of {arguments.model} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    server.serve_forever()
    server.server_close()
    sys.exit(f"The rollout server has stopped: {engine.failure}")


def check_model(model: str) -> None:
    """UserError where MODEL is none; the Hub itself is not asked."""

    if not (Path(model) / "config.json").is_file() and (Path(model).exists() or not HUB_NAME.fullmatch(model)):
        raise UserError(f"--model {model} is no model: name a folder with a config.json, or a model of the Hub.")


class Server(ThreadingHTTPServer):
    """Requests, each in a thread of its own; what they ask for is done by the engine's thread."""

    daemon_threads = True

    def __init__(self, listening: Any, engine: Engine, token: str) -> None:
        self.address_family = listening.family
        super().__init__(listening.getsockname()[:2], Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.engine, self.token = engine, token


class Handler(BaseHTTPRequestHandler):
    """One request. Its body is JSON or, of weights, safetensors; its answer is JSON."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds without a byte
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def _reply(self, do: Any) -> None:
        try:
            name = host_of(f"//{self.headers.get('Host', '')}")
            if "Origin" in self.headers or not (self.server.token or is_loopback(name)):
                raise Refused(403, "this server takes no requests of websites, nor under a name of theirs")
            token = f"Bearer {self.server.token}".encode()
            given = self.headers.get("Authorization", "").encode()
            if self.server.token and not hmac.compare_digest(token, given):
                raise Refused(401, "the token is missing or another one")
            status, said = 200, do(self._url())
        except Refused as error:
            status, said = error.status, {"error": str(error)}
        except OSError:  # the caller has gone
            self.close_connection = True
            return
        content = json.dumps(said).encode()
        if status != 200:
            self.close_connection = True  # its body may not have been read
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True

    def _url(self) -> Any:
        try:
            return urlsplit(self.path)
        except ValueError as error:  # half of a bracket
            raise Refused(400, "the address is none") from error

    def _get(self, url: Any) -> Any:
        engine = self.server.engine
        match url.path:
            case "/health":
                return {"status": "ok"}
            case "/server_info":
                return engine.about()
            case "/weight_info":
                return {"weight_version": str(engine.version)}
            case "/get_world_size":
                return {"world_size": 1}
        raise Refused(404, f"nothing is at {url.path:.100}")

    def _post(self, url: Any) -> Any:
        engine, session = self.server.engine, self.headers.get(SESSION, "")
        if url.path == "/update_weights":
            body = self._body(engine.largest + SPARE, "application/octet-stream")
            return engine.update_weights(session, body, self.headers.get(CHECKSUM, ""))
        try:
            given = json.loads(self._body(MOST_JSON, "application/json") or b"{}")
        except (ValueError, RecursionError) as error:
            raise Refused(400, "the body is no JSON") from error
        if not isinstance(given, dict):
            raise Refused(400, "the body is no JSON object")
        match url.path:
            case "/init_weight_transfer_engine":
                return engine.begin_session(given.get("init_info"), secrets.token_hex(16), session)
            case "/shutdown_weight_transfer_engine":
                return engine.end_session(session)
            case "/renew":
                return engine.renew(session)
            case "/converse":
                return engine.converse(session, given)
            case "/start_weight_update":
                return engine.start_weight_update(session)
            case "/finish_weight_update":
                return engine.finish_weight_update(session, given.get("weight_version"))
            case "/pause":
                mode = parse_qs(url.query).get("mode", ["wait"])[0]
                if mode not in ("wait", "keep"):
                    raise Refused(400, "mode is neither wait nor keep: conversations are never aborted here")
                return engine.pause(session)
            case "/resume":
                return engine.resume(session)
        raise Refused(404, f"nothing is at {url.path:.100}")

    def _body(self, most: int, kind: str) -> bytes:
        """As many bytes as are announced, and no more than may be."""
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdecimal()) or int(length) > most:
            raise Refused(413, f"a request may have {most} bytes")
        if int(length) and self.headers.get_content_type() != kind:
            raise Refused(415, f"the body is not {kind}")
        return self.rfile.read(int(length))


if __name__ == "__main__":
    run(main)
