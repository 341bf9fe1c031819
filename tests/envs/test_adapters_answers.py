"""Is whatever an OpenEnv server answers either understood or a ServerError in words, in time?"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("openenv.core", reason="OpenEnv is not installed: pip install openenv==0.10.0")

from fastapi import FastAPI, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import StreamingResponse
from test_adapters_openenv import serving

import envs
from envs.adapters import openenv_client
from envs.adapters.openenv_answers import TEXT, ServerError

SCHEMA = {"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}, "state": {"properties": {}}}
OURS = {**SCHEMA, "state": {"properties": {"max_turns": {}}}}


class Server:
    """Answers what `says` holds for a path or a message, twice where `times` is 2."""

    def __init__(self) -> None:
        self.says: dict[str, Any] = {}
        self.times = 1
        self.connections = 0
        self.answered = threading.Event()
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self.page, methods=["GET", "POST"])
        self.app.add_api_websocket_route("/ws", self.play)

    def page(self, path: str) -> Response:
        says = {"schema": SCHEMA, "metadata": {"description": "d"}, **self.says}
        if says.get(path) is None:
            return Response("{}", 404)
        if says[path] == "drip":
            return StreamingResponse(self.drip())
        return Response(json.dumps(says[path]))

    async def drip(self) -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.1)

    async def play(self, socket: WebSocket) -> None:
        await socket.accept()
        self.connections += 1
        try:
            while True:
                message = json.loads(await socket.receive_text())
                if message["type"] == "close":
                    break
                said = self.says.get(message["type"], {"observation": {"text": message["data"].get("text", "begin")}})
                said = {"reward": 0.0, "done": False, **said}
                for _ in range(self.times):
                    await socket.send_text(json.dumps({"type": "observation", "data": said}))
                self.answered.set()
        except WebSocketDisconnect:
            pass


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, str]]:
    server = Server()
    with serving(server.app) as url:
        yield server, url


@pytest.fixture
def server(served: tuple[Server, str]) -> Iterator[Server]:
    openenv_client.server_offer.cache_clear()
    openenv_client.SESSIONS.idle.clear()
    server, server.url = served  # type: ignore[attr-defined]
    server.says, server.times = {}, 1
    yield server
    openenv_client.server_offer.cache_clear()


def made(server: Any, **options: Any) -> Any:
    return envs.make("openenv", url=server.url, **options)


@pytest.mark.parametrize(
    ("path", "says", "told"),
    [
        ("schema", [1, 2], "/schema of .* cannot be understood: the whole: Input should be a valid dictionary"),
        ("schema", {"action": "x"}, "action: Input should be a valid dictionary"),
        ("schema", {"action": {"properties": {"text": 5}}}, "action.properties.text: Input should be a valid dict"),
        ("schema", {"action": {"properties": {}, "required": ["text"]}}, "need text: an environment of text can fill"),
        ("schema", None, "does not offer /schema"),
        ("metadata", [3], "/metadata of .* cannot be understood"),
        ("metadata", {"description": "x" * (TEXT + 1)}, "description: String should have at most 100000 characters"),
        ("state", {"max_turns": "many"}, "max_turns: Input should be a valid integer"),
        ("state", {"max_turns": -5}, "max_turns: Input should be greater than or equal to 0"),
        ("state", {"max_turns": 3, "actions": [1, 2]}, "actions.0: Input should be a valid string"),
        ("state", {"max_turns": 3, "actions": "Left"}, "actions: Input should be a valid list"),
        ("list_environments", ["a", "b"], r"serves 2 environments \(a, b\): here one is played"),
    ],
)
def test_an_odd_offer_is_refused_in_words(server: Server, path: str, says: Any, told: str) -> None:
    server.says = {"schema": OURS, "state": {"max_turns": 3}} | {path: says}
    with pytest.raises(ServerError, match=told):
        made(server)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ({"reward": float("nan")}, "reward.*: Input should be a finite number"),
        ({"reward": float("inf"), "done": True}, "Input should be a finite number"),
        ({"reward": "lots"}, "reward.*: Input should be a valid number"),
        ({"done": "no"}, "done: Input should be a valid boolean"),
        ({"observation": {"text": "x", "metadata": {"success": "false"}}, "done": True}, "success: .* valid boolean"),
        ({"observation": {"text": "x", "metadata": [1]}}, "metadata: Input should be a valid dictionary"),
        ({"observation": "abc"}, "observation: Input should be a valid dictionary"),
        ({"observation": {"text": "x" * (TEXT + 1)}}, "has 100,001 characters, more than 100,000"),
    ],
)
def test_an_odd_answer_ends_the_episode_and_the_connection(server: Server, says: Any, told: str) -> None:
    env = made(server)
    env.reset(seed=1)
    server.says = {"step": says}
    with pytest.raises(ServerError, match=told):
        env.step("go")
    server.says, before = {}, server.connections
    assert env.reset(seed=1)[0] == "begin" and env.step("on")[0] == "on" and server.connections == before + 1


def test_odd_first_observations_of_our_servers(server: Server) -> None:
    server.says = {"schema": OURS, "state": {"max_turns": 3}}
    env = made(server)
    for odd in ({"actions": "Left"}, {"rules": "x" * (TEXT + 1)}):
        server.says["reset"] = {"observation": {"text": "x", **odd}}
        with pytest.raises(ServerError, match="cannot be understood"):
            env.reset(seed=1)


def test_rewards_may_be_what_openenv_allows(server: Server) -> None:
    env = made(server)
    for reward, number in ((True, 1.0), (None, 0.0), (2, 2.0), (-0.5, -0.5)):
        env.reset(seed=1)
        server.says = {"step": {"reward": reward, "done": True}}
        assert env.step("go")[1:3] == (number, True)


def test_a_message_answered_twice_shifts_nothing(server: Server) -> None:
    env = made(server)
    env.reset(seed=1)
    server.times = 2
    assert env.step("one")[0] == "one"
    server.times, before = 1, server.connections
    assert env.reset(seed=2)[0] == "begin" and env.step("two")[0] == "two" and server.connections == before + 1
    server.times = 2
    server.answered.clear()
    env.step("three")
    assert server.answered.wait(10)
    asyncio.run_coroutine_threadsafe(pinged(env.session.socket), openenv_client.loop()).result(10)
    with pytest.raises(ServerError, match="it answered a message twice"):
        env.step("four")


async def pinged(socket: Any) -> None:
    """Wait for the answer to a ping: all that was sent before has arrived."""
    await (await socket.ping())


def test_a_question_has_one_deadline_for_all_of_its_answer(server: Server) -> None:
    server.says = {"schema": "drip"}
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer /schema within 0\.5 seconds|too slowly"):
        made(server, timeout=0.5)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("url", ["nonsense", "localhost:8000", "ftp://host:1", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an address: write http://host:port"):
        envs.make("openenv", url=url)
