"""Whose requests does a server here answer, and how much does it read of one?  Three kinds of ASGI middleware.

OwnPagesOnly     nothing that a browser sends for another website
KeyHolders       nothing without the server's key
WholeRequests    a body has a bound, and is complete before the application sees it

`patient_protocol` bounds how long a client may take. Only the standard library is imported until it is called.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from envs.web import is_loopback

REQUEST_SECONDS = 60.0  # in which a request must have come as a whole, and in which a client must read something
Form = Callable[[str, int], Any]  # what is sent as JSON for these words and this status


def detail(words: str, _: int) -> dict[str, Any]:
    """Return an error as FastAPI tells one."""
    return {"detail": words}


def openai_error(words: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Return an error in the form of OpenAI's interface."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": words, "type": kind, "param": None, "code": code or status}}


async def hung_up(request: Any) -> None:
    """Wait until the client of a request of Starlette disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def refuse_unread(scope: Any, send: Any, status: int, words: str, form: Form = detail) -> None:
    """Answer a request with an error, unread; a websocket is not accepted, which clients see as status 403."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
        return
    content = json.dumps(form(words, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def header(scope: Any, name: bytes) -> str | None:
    """Return what a request says under this name, which is in lower case; None where it says nothing."""
    return next((value.decode("latin-1") for known, value in scope["headers"] if known.lower() == name), None)


def host_of(address: str) -> str | None:
    """Return the host of `http://host:port` or `//host:port`, without the port."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


class OwnPagesOnly:
    """Refuses what a browser sends for another website; takes back what the application allows such a website.

    local: the server is for this machine alone and asks for no password. Then a name that leads here is refused as
    well, unless it is this machine's own: the owner of a website can let its name lead to 127.0.0.1 (DNS rebinding),
    and the browser takes the server for a part of that website. With a password such a website is not logged in.
    """

    def __init__(self, app: Any, local: bool, form: Form = detail) -> None:
        self.app, self.local, self.form = app, local, form

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        host, origin = header(scope, b"host") or "", header(scope, b"origin")
        if self.local and not is_loopback(host_of(f"//{host}")):
            await refuse_unread(scope, send, 403, "This server is for this machine alone.", self.form)
        elif origin is not None and origin.lower().partition("://")[2] != host.lower():
            await refuse_unread(scope, send, 403, "This server takes no requests of other websites.", self.form)
        else:
            await self.app(scope, receive, own_headers(send))


def own_headers(send: Any) -> Any:
    """Return a `send` that drops CORS headers (other websites could read an answer) and keeps cookies to this site."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                (name, value.replace(b"SameSite=none", b"SameSite=lax") if name == b"set-cookie" else value)
                for name, value in message.get("headers", ())
                if not name.lower().startswith(b"access-control-")
            ]
        await send(message)

    return sending


class KeyHolders:
    """Refuses a request without `Authorization: Bearer KEY`, unread."""

    def __init__(self, app: Any, key: str, form: Form = detail) -> None:
        self.app, self.expected, self.form = app, f"Bearer {key}".encode(), form

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        credentials = (header(scope, b"authorization") or "").encode("latin-1") if scope["type"] != "lifespan" else b""
        if scope["type"] == "lifespan" or hmac.compare_digest(credentials, self.expected):
            await self.app(scope, receive, send)
        else:
            await refuse_unread(scope, send, 401, "The key of this server is missing, or it is another one.", self.form)


class WholeRequests:
    """Reads the body of a request before the application does, up to so many bytes; a larger one is refused (413).

    A client that leaves before its request is complete costs one line of the log.

    most: bytes that the body of this request may have
    """

    def __init__(self, app: Any, most: Callable[[Any], int], form: Form = detail) -> None:
        self.app, self.most, self.form = app, most, form

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        most, announced = self.most(scope), header(scope, b"content-length") or ""
        pieces: list[bytes] = []
        size, more = 0, True
        if announced.isascii() and announced.isdecimal() and int(announced) > most:
            size, more = int(announced), False
        while more and size <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                logging.getLogger("uvicorn.error").warning(
                    "%s %.100s: the client left, or was too slow, after %d bytes of its request.",
                    scope["method"], scope["path"].encode("unicode_escape").decode(), size,
                )  # fmt: skip
                return
            pieces.append(message.get("body", b""))
            size, more = size + len(pieces[-1]), message.get("more_body", False)
        if size > most:
            await refuse_unread(
                scope, send, 413, f"A request may have {most:,} bytes here, and this one has more.", self.form
            )
            return
        body: list[Any] = [{"type": "http.request", "body": b"".join(pieces), "more_body": False}]

        async def whole() -> Any:
            return body.pop() if body else await receive()

        await self.app(scope, whole, send)


def patient_protocol(seconds: float = REQUEST_SECONDS) -> Any:
    """uvicorn's protocol for HTTP, with a limit of time for clients: an argument `http` for uvicorn.Config.

    uvicorn waits for ever for the rest of a request, and for a client that does not read its answer. Here a request
    that is not complete, its body included, after so many seconds closes the connection, and so does a client that
    reads nothing for as long. Heads of more than 16 kB are refused by h11. Until uvicorn has such limits.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Patient(H11Protocol):
        patience: asyncio.TimerHandle | None = None

        def wait(self, waiting: bool) -> None:
            """Start the clock where it is the client's turn; it is not set back before that has ended."""
            if not waiting and self.patience is not None:
                self.patience.cancel()
                self.patience = None
            elif waiting and self.patience is None:
                self.patience = self.loop.call_later(seconds, self.transport.abort)

        def owes_a_request(self) -> bool:
            upgraded = self.transport.get_protocol() is not self  # type: ignore[attr-defined]
            return not upgraded and self.conn.their_state.__name__ in ("IDLE", "SEND_BODY")

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.wait(True)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.wait(self.owes_a_request())

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.wait(self.owes_a_request())

        def pause_writing(self) -> None:
            super().pause_writing()
            self.wait(True)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.wait(self.owes_a_request())

        def connection_lost(self, exc: Exception | None) -> None:
            self.wait(False)
            super().connection_lost(exc)

    return Patient
