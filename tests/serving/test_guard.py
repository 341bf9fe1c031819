"""Does a server answer its own clients alone, read no more than it should, and wait for nobody for ever?"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from hypothesis import given, strategies as st
from waiting import wait_until

from envs.guard import KeyHolders, OwnPagesOnly, WholeRequests, patient_protocol

MOST = 1000
BIG = b"x" * (8 << 20)  # more than fits into the buffers of a connection


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Says how many bytes came; at /flood it says far more than anybody reads."""
    size, more = 0, scope["type"] == "http"
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    content = BIG if scope.get("path") == "/flood" else b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": content})


def into(sent: list[Any]) -> Any:
    """Return a `send` that appends to a list."""

    async def send(message: Any) -> None:
        sent.append(message)

    return send


@contextmanager
def serving(app: Any, seconds: float = 60) -> Iterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", lifespan="off", http=patient_protocol(seconds))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def bounded() -> Iterator[tuple[str, int]]:
    with serving(WholeRequests(echo, lambda _: MOST)) as place:
        yield place


@pytest.fixture(scope="module")
def hasty() -> Iterator[tuple[str, int]]:
    """A server that gives its clients half a second."""
    with serving(WholeRequests(echo, lambda _: MOST), seconds=0.5) as place:
        yield place


def closed_by(place: tuple[str, int], data: bytes, trickle: bytes = b"") -> bytes:
    """All that a server says until it hangs up; it has to, though `trickle` goes on coming."""
    said = b""
    with socket.create_connection(place) as connection:
        connection.sendall(data)
        connection.settimeout(0.05)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                connection.sendall(trickle)
                if not (piece := connection.recv(1 << 16)):
                    return said
                said += piece
            except TimeoutError:
                pass
            except OSError:  # it has hung up before all was sent
                return said
    raise AssertionError("it waits for ever")


# ------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("size", [0, 1, MOST, MOST + 1, 10_000_000])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_has_a_bound(bounded: tuple[str, int], size: int, announced: bool) -> None:
    pieces = (b"x" * min(1 << 16, size - at) for at in range(0, size, 1 << 16))
    url = f"http://127.0.0.1:{bounded[1]}/"
    answer = httpx.post(url, content=b"x" * size if announced else pieces)
    assert (answer.status_code, answer.text) == (200, str(size)) if size <= MOST else answer.status_code == 413
    if size > MOST:
        assert answer.json() == {"detail": "A request may have 1,000 bytes here, and this one has more."}
    assert httpx.get(url).text == "0"


@given(st.lists(st.binary(max_size=600), max_size=4))
def test_the_application_sees_the_body_whole_or_not_at_all(pieces: list[bytes]) -> None:
    seen, sent = list[Any](), list[Any]()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await receive())
        seen.append(await receive())

    arriving = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    arriving += [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    left = iter(arriving)

    async def receive() -> Any:
        return next(left)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(WholeRequests(application, lambda _: MOST)(scope, receive, into(sent)))
    whole = b"".join(pieces)
    if len(whole) <= MOST:
        assert seen == [{"type": "http.request", "body": whole, "more_body": False}, {"type": "http.disconnect"}]
        assert sent == []
    else:
        assert seen == [] and sent[0]["status"] == 413


def test_a_client_that_leaves_in_the_middle_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    came = threading.Event()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noted() -> Any:
            message = await receive()
            came.set()
            return message

        await WholeRequests(echo, lambda _: MOST)(scope, noted, send)

    with serving(watched) as place, caplog.at_level(logging.WARNING, "uvicorn.error"):
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        try:
            with socket.create_connection(place) as connection:
                connection.sendall(b"POST /a%0Ab HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\nabc")
                assert came.wait(10)
            wait_until(lambda: caplog.records)
        finally:
            logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    told = {record.getMessage() for record in caplog.records}
    assert told == {r"POST /a\nb: the client left, or was too slow, after 3 bytes of its request."}
    assert not any(record.exc_info for record in caplog.records)


# ------------------------------------------------------------------------------------------------------------ patience


POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("data", "trickle"),
    [
        (b"", b""),
        (b"GET / HT", b""),
        (POST, b"X-A: b\r\n"),
        (POST + b"Content-Length: 500\r\n\r\n", b""),
        (POST + b"Content-Length: 500\r\n\r\n", b"x"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n", b"1\r\nx\r\n"),
        (POST + b"Content-Length: 99999999\r\n\r\n", b"x" * 100),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + POST + b"Content-Length: 9\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3 + b"GET", b""),
    ],
    ids=["silence", "half a line", "heads without end", "no body", "slow body", "slow chunks", "chunks after a refusal",
         "a body after a refusal", "a second request", "a fourth request"],
)  # fmt: skip
def test_half_a_request_is_not_waited_for(hasty: tuple[str, int], data: bytes, trickle: bytes) -> None:
    closed_by(hasty, data, trickle)
    assert httpx.get(f"http://127.0.0.1:{hasty[1]}/").text == "0"


def served() -> list[Any]:
    """The addresses of the clients to which a server in this process has a connection."""
    return [each.raddr for each in psutil.Process().net_connections()]


def test_a_client_that_reads_nothing_is_not_waited_for(hasty: tuple[str, int]) -> None:
    with socket.create_connection(hasty) as connection:
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ours = connection.getsockname()
        wait_until(lambda: ours in served())
        wait_until(lambda: ours not in served())
        connection.settimeout(20)
        read = 0
        with pytest.raises(ConnectionError):  # reset in the middle of the answer
            while piece := connection.recv(1 << 20):
                read += len(piece)
            raise ConnectionError if read < len(BIG) else AssertionError
    assert httpx.get(f"http://127.0.0.1:{hasty[1]}/").text == "0"


@pytest.mark.thorough
def test_who_sends_whole_requests_keeps_the_connection() -> None:
    server = serving(WholeRequests(echo, lambda _: MOST), seconds=2)
    with server as place, httpx.Client(base_url=f"http://127.0.0.1:{place[1]}") as client:
        for size in (1, 900, 2000, 0):
            assert client.post("/", content=b"x" * size).status_code == (200 if size <= MOST else 413)
            time.sleep(0.7)  # together longer than a request may take


def test_a_head_has_a_bound(bounded: tuple[str, int]) -> None:
    for head in (b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\nX-A: " + b"a" * 100_000):
        assert closed_by(bounded, head)[9:12] in (b"400", b"")  # reset before it could be read
    assert httpx.get(f"http://127.0.0.1:{bounded[1]}/").text == "0"


# ------------------------------------------------------------------------------------------------------ whose requests


def asked(app: Any, kind: str, **headers: str) -> Any:
    """Status, or what was sent to a websocket."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    listed = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    asyncio.run(app({"type": kind, "method": "GET", "path": "/", "headers": listed}, receive, into(sent)))
    return sent[0].get("status", sent[0]["type"])


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("local", "headers", "answered"),
    [
        (True, {"host": "localhost:8000"}, True),
        (True, {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, True),
        (True, {"host": "127.0.0.1:8000", "origin": "https://evil.example"}, False),
        (True, {"host": "127.0.0.1:8000", "origin": "null"}, False),
        (True, {"host": "127.0.0.1:8000", "origin": ""}, False),
        (True, {"host": "evil.example:8000", "origin": "http://evil.example:8000"}, False),
        (True, {}, False),
        (False, {"host": "gpu7:8000"}, True),
        (False, {"host": "gpu7:8000", "origin": "http://gpu7:8000"}, True),
        (False, {"host": "gpu7:8000", "origin": "http://evil.example"}, False),
    ],
)
def test_no_other_website_is_answered(kind: str, local: bool, headers: dict[str, str], answered: bool) -> None:
    refused = {"http": 403, "websocket": "websocket.close"}[kind]
    assert asked(OwnPagesOnly(echo, local), kind, **headers) == (200 if answered else refused)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("given_key", [None, "", "secret", "Bearer", "Bearer secret ", "Bearer Secret", "Bearer s\xe9"])
def test_nobody_without_the_key_is_answered(kind: str, given_key: str | None) -> None:
    app = KeyHolders(echo, "secret")
    refused = {"http": 401, "websocket": "websocket.close"}[kind]
    assert asked(app, kind, **{} if given_key is None else {"authorization": given_key}) == refused
    assert asked(app, kind, authorization="Bearer secret") == 200


def test_a_refusal_has_the_form_of_the_server() -> None:
    sent: list[Any] = []
    app = KeyHolders(echo, "secret", lambda words, status: {"error": {"message": words, "code": status}})
    asyncio.run(app({"type": "http", "headers": []}, None, into(sent)))
    assert json.loads(sent[1]["body"])["error"]["code"] == 401
    assert (b"www-authenticate", b"Bearer") in sent[0]["headers"]
