"""Who may use the page?  Visitors with the password, with requests of limited size and one place in the queue."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from fastapi import HTTPException, Request

from envs.guard import refuse_unread

LOGIN_BYTES, MOST_BYTES = 16 << 10, 1 << 20  # of a request: a login, and any other
WRONG = 1.0  # seconds of delay after a wrong password
MOST_GUESSES = 10  # that wait; more are refused unread, so that a flood ends after ten seconds


class Password:
    """A password check that allows all visitors together one wrong guess a second."""

    def __init__(self, password: str) -> None:
        self.password, self.turn, self.waiting = password.encode(), asyncio.Lock(), 0

    async def allows(self, _: str, typed: str) -> bool:
        """Return whether the password is right, after a delay if it is wrong."""
        if self.waiting >= MOST_GUESSES:
            raise HTTPException(429, "Too many wrong passwords. Try again in some seconds.")
        self.waiting += 1
        try:
            async with self.turn:
                right = hmac.compare_digest(typed.encode(), self.password)
                if not right:
                    await asyncio.sleep(WRONG)
                return right
        finally:
            self.waiting -= 1


def most_bytes(scope: Any) -> int:
    """Return the limit of a request's body: a page sends a message and its settings at most."""
    return LOGIN_BYTES if scope["path"].rstrip("/") == "/login" else MOST_BYTES


class Visitors:
    """Middleware that refuses, unread, requests with a body of visitors who are not logged in, except the login.

    gradio checks the login after it has parsed a request, and for some requests never. gradio_app: keeps the logins.
    """

    def __init__(self, app: Any, gradio_app: Any) -> None:
        self.app, self.gradio_app = app, gradio_app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reads_nothing = scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS")
        if scope["type"] == "lifespan" or reads_nothing or scope["path"].rstrip("/") == "/login":
            await self.app(scope, receive, send)
            return
        cookies = Request(scope).cookies if scope["type"] == "http" else {}
        names = [f"access-token-{kind}{self.gradio_app.cookie_id}" for kind in ("", "unsecure-")]
        if any(cookies.get(name) in self.gradio_app.tokens for name in names):
            await self.app(scope, receive, send)
        else:
            await refuse_unread(scope, send, 401, "Log in first.")


def one_place_a_page(page: Any, queue_name: str) -> None:
    """Let a page have only one event waiting in the queue.

    gradio's `trigger_mode` works only in the browser, and its queue does not have a limit for a session.
    """
    queue = page._queue
    join = queue.push

    async def push(body: Any, request: Any, username: Any) -> Any:
        line = queue.event_queue_per_concurrency_id.get(queue_name)
        event = page.fns.get(body.fn_index)
        waits = line and any(each.session_hash == body.session_hash for each in line.queue)
        if waits and event and event.concurrency_id == queue_name:
            return False, "Your page has a message or a turn in the queue already: wait for it, or stop it.", "error"
        return await join(body=body, request=request, username=username)

    queue.push = push
