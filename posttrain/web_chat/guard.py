"""Whose requests does the page answer, and how many?  Those of its own pages and of programs, a place for each."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.datastructures import Headers
from fastapi.responses import PlainTextResponse

from envs.web import is_loopback

WRONG = 1.0  # seconds that a wrong password takes
MOST_GUESSES = 10  # that wait; further ones are refused unread, so that a flood is over ten seconds after it ends


def host_of(address: str) -> str | None:
    """The host of `http://host:port` or `//host:port`, without the port."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


class OwnPagesOnly:
    """Refuses what a browser sends for another website; takes back what gradio allows such a website.

    local: the page is for this machine alone and asks for no password. Then a name that leads here is refused as well,
    unless it is this machine's own: the owner of a website can let its name lead to 127.0.0.1 (DNS rebinding), and the
    browser takes the page for a part of that website. With a password such a website is not logged in.
    """

    def __init__(self, app: Any, local: bool) -> None:
        self.app, self.local = app, local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.local and not is_loopback(host_of(f"//{host}")):
            await PlainTextResponse("This page is served to this machine alone.", 403)(scope, receive, send)
        elif origin is not None and origin.lower().partition("://")[2] != host.lower():
            await PlainTextResponse("This page takes no requests of other websites.", 403)(scope, receive, send)
        else:
            await self.app(scope, receive, own_headers(send))


def own_headers(send: Any) -> Any:
    """Sends no word of other websites, and cookies for this one alone."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                (name, value.replace(b"SameSite=none", b"SameSite=lax") if name == b"set-cookie" else value)
                for name, value in message.get("headers", ())
                if not name.lower().startswith(b"access-control-")
            ]
        await send(message)

    return sending


class Password:
    """One guess at a time, and after a wrong one the next waits: at most one guess a second, from all together."""

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


def one_place_a_page(page: Any, queue_name: str) -> None:
    """Refuses what a page puts into the queue while it has something waiting there: nobody takes ten places.

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
