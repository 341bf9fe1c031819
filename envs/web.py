"""How does a request to an untrusted server stay safe?  One request with a deadline and a bound on the reply.

There are no proxies and no redirects: what is sent, a key included, goes to the address that was given or nowhere.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

MOST_BYTES = 4 << 20  # of a reply
LONGEST_WAIT = 3600.0  # the longest timeout in seconds
FAILURES = (OSError, http.client.HTTPException, ValueError, RecursionError)  # what `ask` and `post_json` raise


class NoAnswer(RuntimeError):
    """A server or a helper process did not answer, or not as it should; the message says which one and what to do."""


class BadStatus(ValueError):
    """An answer with another status than 200, what its header Retry-After says, and all of it, uncut.

    Mask the key before you show a part of it: a key that is cut would not be found.
    """

    def __init__(self, status: int, retry_after: str = "", reply: str = "") -> None:
        super().__init__(f"status {status}")
        self.status, self.retry_after, self.reply = status, retry_after, reply


def is_address(url: str) -> bool:
    """Return whether a text is the address of a server: "http://localhost:8000/search" is one, "http://" is not."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, half of a bracket
        return False


def is_loopback(name: str | None) -> bool:
    """Return whether only this machine is reached under the name.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("a.example")
    (True, True, True, False)
    """
    try:
        return name == "localhost" or ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False


def post_json(url: str, content: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
    """Send JSON and return the JSON that the server answers; see `ask` for arguments and errors."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    return json.loads(send_request(url, json.dumps(content).encode(), timeout, sent))


def send_request(
    url: str, body: bytes | None, timeout: float, headers: Mapping[str, str] | None = None, most: int = MOST_BYTES
) -> bytes:
    """Return the body of the reply to one request.

    Args:
        body: sent with POST; None sends GET.
        timeout: seconds for the whole request, connecting and reading included.
        most: bytes that the reply may have.

    Raises:
        BadStatus: the status is not 200.
        TimeoutError: the reply was not complete in time. Every error is one of FAILURES.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    began = time.monotonic()
    try:
        connection.connect()
        timer = Timer(max(0.0, timeout - (time.monotonic() - began)), _hang_up, [connection.sock])
        timer.daemon = True
        timer.start()
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET" if body is None else "POST", target, body, headers or {})
            response = connection.getresponse()
            reply = response.read(most + 1)
        finally:
            timer.cancel()
            if time.monotonic() - began >= timeout:
                raise TimeoutError("it did not answer in time")
    finally:
        connection.close()
    if response.status != 200:
        raise BadStatus(response.status, response.getheader("Retry-After", ""), reply.decode(errors="replace"))
    if len(reply) > most:
        raise ValueError(f"its reply has more than {most} bytes")
    return reply


def _hang_up(connection: Any) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
