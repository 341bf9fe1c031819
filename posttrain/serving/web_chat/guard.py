"""Who may use the page, and how much?  Those who know its password, with requests of bounded size, a place for each."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from fastapi import HTTPException, Request

from envs.guard import refuse_unread

LOGIN_BYTES, MOST_BYTES = 16 << 10, 1 << 20  # of a request: with a password, and any other
WRONG = 1.0  # seconds that a wrong password takes
MOST_GUESSES = 10  # that wait; further ones are refused unread, so that a flood is over ten seconds after it ends


class Password:
    """Compares one guess at a time and lets the next wait after a wrong one: all visitors share one guess a second."""

    def __init__(self, password: str) -> None:
        self.password, self.turn, self.waiting = password.encode(), asyncio.Lock(), 0

    async def allows(self, _: str, typed: str) -> bool:
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
    """Return how large the body of a request may be: no page sends more than a message and its settings."""
    return LOGIN_BYTES if scope["path"].rstrip("/") == "/login" else MOST_BYTES


class Visitors:
    """Refuses what somebody sends who has not logged in, unread, except for the password itself.

    gradio asks whether a visitor is logged in when it has read and parsed the request, and for some requests never.
    gradio_app: the application that keeps who is logged in.
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
    """Refuse what a page puts into the queue while it has something waiting there: nobody takes ten places.

    gradio's `trigger_mode` holds in the browser alone. Until its queue takes a limit for a session.
    """
    queue = page._queue
    join = queue.push

    async def push(body: Any, request: Any, username: Any) -> Any:
        line = queue.event_queue_per_concurrency_id.get(queue_name)
        asked = page.fns.get(body.fn_index)
        mine = [event for event in line.queue if event.session_hash == body.session_hash] if line else []
        if mine and asked and asked.concurrency_id == queue_name:
            return False, "Your page has a message or a turn in the queue already: wait for it, or stop it.", "error"
        return await join(body=body, request=request, username=username)

    queue.push = push
