"""Where do agent programs reach the model?  At a server on this machine that speaks OpenAI's chat completions.

Each episode has a key of its own, by which its requests are known. Requests are checked here, answered by the thread
that plays, and sent when they are complete; streams are sent as one piece.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sized
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from envs.guard import OwnPagesOnly, WholeRequests, header, hung_up, openai_error, patient_protocol
from envs.prompts.agents import MOST_PARALLEL
from posttrain.rollout.agents.game import AgentGame
from posttrain.rollout.agents.requests import AgentAnswer, Asked, Refusal, read_request
from posttrain.types import UserError

if TYPE_CHECKING:
    from fastapi import Request
    from fastapi.responses import Response

MOST_BYTES = 8 << 20  # of a request
MOST_CONNECTIONS = 2 * MOST_PARALLEL  # at the same time
MODEL = "policy"  # the name of the model; requests may write any

Ask = Callable[[AgentGame, Asked], None]


class AgentServer:
    """The server of a process, at a free port and in a thread of its own."""

    def __init__(self) -> None:
        self._games: dict[str, tuple[AgentGame, Ask]] = {}
        self._connections: Sized = ()  # that are open
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(1024)  # whoever asks before the server runs waits for it
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, daemon=True).start()

    def admit(self, game: AgentGame, ask: Ask) -> str:
        """Return a new key; what is asked with it is given to `ask` in another thread, until `dismiss`."""
        key = secrets.token_hex(16)
        self._games[key] = game, ask
        return key

    def dismiss(self, key: str) -> None:
        """Take no more requests with this key."""
        del self._games[key]

    def environment(self, key: str) -> dict[str, str]:
        """Return the environment variables that lead a program here, past any proxy."""
        proxies: dict[str, str] = {}
        for name in ("NO_PROXY", "no_proxy"):
            proxies[name] = ",".join(filter(None, ["127.0.0.1,localhost", os.environ.get(name)]))
        return proxies | {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": key}

    def _serve(self) -> None:
        import uvicorn

        config = uvicorn.Config(
            self._application(), log_level="critical", http=patient_protocol(), ws="none", lifespan="off",
            timeout_keep_alive=600,
        )  # fmt: skip
        server = uvicorn.Server(config)
        self._connections = server.server_state.connections
        asyncio.run(server.serve([self._socket]))

    def _application(self) -> Any:
        from fastapi import FastAPI, HTTPException
        from fastapi.responses import JSONResponse

        async def models(_: Request) -> Response:
            listed = {"id": MODEL, "object": "model", "created": 0, "owned_by": "posttrain"}
            return JSONResponse({"object": "list", "data": [listed]})

        async def refuse(_: Request, error: Any) -> Response:
            words = f"{error.detail}: this server has /v1/chat/completions and /v1/models."
            return refusal(Refusal(error.status_code, words))

        app = FastAPI(openapi_url=None)
        app.add_route("/v1/chat/completions", self._chat, ["POST"])
        app.add_route("/v1/models", models)
        for kind in (HTTPException, 404, 405):
            app.add_exception_handler(kind, refuse)
        # the middleware that is added last sees a request first
        app.add_middleware(WholeRequests, most=lambda _: MOST_BYTES, form=openai_error)
        app.add_middleware(OwnPagesOnly, local=True, form=openai_error)
        return app

    async def _chat(self, request: Request) -> Response:
        from fastapi.responses import JSONResponse, Response, StreamingResponse

        scheme, _, key = (header(request.scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or key not in self._games:
            return refusal(Refusal(401, "The key is missing, or its episode is over."))
        game, ask = self._games[key]
        if len(self._connections) > MOST_CONNECTIONS:  # each takes a file descriptor of this process
            game.refused = f"More than {MOST_CONNECTIONS} connections are open here: close those without a request."
            return refusal(Refusal(503, game.refused))
        raw, loop = await request.body(), asyncio.get_running_loop()
        try:
            asked = await loop.run_in_executor(None, read_request, raw)
        except UserError as error:
            game.refused = str(error)
            return refusal(Refusal(400, game.refused))
        known = asyncio.Event()
        asked.answer.add_done_callback(lambda _: loop.call_soon_threadsafe(known.set))
        clock = game.program.clock if game.program else None
        if clock:
            clock.wait(1)
        try:
            ask(game, asked)
            answering, leaving = asyncio.ensure_future(known.wait()), asyncio.ensure_future(hung_up(request))
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            asked.left = leaving.done()
            answering.cancel()
            leaving.cancel()
            if asked.left:
                return Response(status_code=499)  # nobody reads it
        finally:
            if clock:
                clock.wait(-1)
        answer = asked.answer.result()
        if isinstance(answer, Refusal):
            return refusal(answer)
        body: dict[str, Any] = json.loads(raw)
        if body.get("stream"):
            options: Any = body.get("stream_options")
            with_usage = isinstance(options, dict) and bool(cast(Any, options).get("include_usage"))
            return StreamingResponse(stream_of(answer, body, with_usage), media_type="text/event-stream")
        return JSONResponse(completion_body(answer, body))


@cache
def server_of(process: int) -> AgentServer:
    """Return the server of this process, whose number is given: a fork has its own. It runs until the process ends."""
    return AgentServer()


def refusal(refused: Refusal) -> Response:
    from fastapi.responses import JSONResponse

    body = openai_error(refused.words, refused.status, refused.code)
    if refused.status == 503:  # later there may be room
        return JSONResponse(body, refused.status, {"connection": "close"})
    # the openai client would repeat a request without this header; a repeated one is refused again
    return JSONResponse(body, refused.status, {"x-should-retry": "false"})


def head(body: dict[str, Any], kind: str) -> dict[str, Any]:
    number, name = f"chatcmpl-{secrets.token_hex(12)}", body.get("model")
    return {
        "id": number,
        "object": kind,
        "created": int(time.time()),
        "model": name if isinstance(name, str) else MODEL,
    }


def usage(answer: AgentAnswer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return counts | {"total_tokens": total}


def completion_body(answer: AgentAnswer, body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer in OpenAI's form."""
    choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}
    return head(body, "chat.completion") | {"choices": [choice], "usage": usage(answer)}


async def stream_of(answer: AgentAnswer, body: dict[str, Any], with_usage: bool) -> AsyncIterator[str]:
    """Yield an answer as an OpenAI stream: its whole message, why it ended, and the usage if it is asked for."""
    begin, message = head(body, "chat.completion.chunk"), dict(answer.message)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": n} | call for n, call in enumerate(calls)]
    more = {"usage": None} if with_usage else {}
    for delta, reason in ((message, None), ({}, answer.finish_reason)):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        yield f"data: {json.dumps(begin | {'choices': [choice]} | more)}\n\n"
    if with_usage:
        yield f"data: {json.dumps(begin | {'choices': [], 'usage': usage(answer)})}\n\n"
    yield "data: [DONE]\n\n"
