"""How is a search server asked?  One POST with a deadline; whatever it answers, a list of articles or a clear error."""

from __future__ import annotations

import http.client
import json
import socket
import time
from contextlib import suppress
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

from envs.search_qa.library import Article

MOST_BYTES = 4 << 20  # of a reply


class RetrieverError(RuntimeError):
    """The server did not answer, or not as it should."""


class Retriever:
    """Asks `url` with {"query": ..., "k": ...}; it answers {"results": [{"title": ..., "text": ...}, ...]}."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or timeout <= 0:
            raise ValueError(
                f"search_qa: retriever={url} with timeout={timeout:g} cannot be asked. Write an address such as "
                "http://localhost:8000/search, and seconds above 0."
            )
        self.url, self.timeout = url, timeout

    def search(self, query: str, k: int) -> list[Article]:
        """The first `k` results; RetrieverError, one paragraph, where there are none to be had."""
        try:
            reply = json.loads(self._post(json.dumps({"query": query, "k": k}).encode()))
            results = [(result["title"], result["text"]) for result in reply["results"][:k]]
            if not all(isinstance(part, str) for result in results for part in result):
                raise TypeError("a title or text is no string")
            return results
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
            raise RetrieverError(
                f"search_qa: the retriever {self.url} gave no results ({type(error).__name__}: {str(error)[:200]}). It "
                'must answer POST {"query", "k"} with {"results": [{"title", "text"}, ...]} within '
                f"{self.timeout:g} s; without the option `retriever` articles are searched by BM25."
            ) from error

    def _post(self, body: bytes) -> bytes:
        """The reply, complete before the deadline: a socket's own limit starts anew with every byte it receives."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        began = time.monotonic()
        try:
            connection.connect()
            timer = Timer(max(0.0, self.timeout - (time.monotonic() - began)), _hang_up, [connection.sock])
            timer.daemon = True
            timer.start()
            try:
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("POST", target, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                reply = response.read(MOST_BYTES + 1)
            finally:
                timer.cancel()
                if time.monotonic() - began >= self.timeout:
                    raise TimeoutError("it did not answer in time")
        finally:
            connection.close()
        if response.status != 200 or len(reply) > MOST_BYTES:
            raise ValueError(f"status {response.status}, {len(reply)} bytes")
        return reply


def _hang_up(connection: Any) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
