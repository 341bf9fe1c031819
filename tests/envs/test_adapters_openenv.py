"""Is an episode over the wire the episode itself, at both ends of OpenEnv, and does a dead server hang anything?"""

# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false
from __future__ import annotations

import asyncio
import copy
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("openenv.core", reason="OpenEnv is not installed: pip install openenv==0.10.0")

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field
from test_env_contract import Say
from test_rollout import PARAMS, Scripted
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

import envs
from envs import base, promises
from envs.adapters import openenv, openenv_client, openenv_server
from envs.adapters.openenv_client import ServerError, request_json
from envs.episode import Episode
from envs.guard import patient_protocol
from envs.promises import Subject
from envs.protocol import Protocol, format_response
from posttrain.models.chat import Chat
from posttrain.rollout.episodes import play, set_up

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(app: Any, log_level: str = "critical") -> Iterator[str]:
    """The address at which an application is served by a thread."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level=log_level, http=patient_protocol()))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def lake() -> Iterator[str]:
    with serving(openenv_server.app_of("frozen_lake", {"slippery": True}, tasks=400)) as url:
        yield url


def over_the_wire(
    url: str, seed: int, split: str = "test", noise_seed: int = 5, style: str = "plain", per_turn: int = 1
) -> Episode:
    env = envs.make("openenv", url=url)
    protocol = Protocol.of(env, style=style, max_actions_per_turn=per_turn)
    return Episode(env, protocol, seed, split, noise_seed)


def itself(like: Episode, name: str, noise_seed: int = 5, **options: Any) -> Episode:
    """The episode that should be the same, without a server."""
    return Episode(envs.make(name, **options), like.protocol, like.env.level.index, like.split, noise_seed)


ANSWERS = ["Left", "down", "fly", "Right || Up", "", "Up", "\ud800", "Right", "Down", "a" * 60_000, "Left", "Up"]


def lived(episode: Episode, shift: int) -> Any:
    """All that can be seen of an episode."""
    turns = []
    for turn in range(40):
        if episode.done:
            break
        turns.append(episode.step(format_response("so", [ANSWERS[(turn + shift) % len(ANSWERS)]], episode.protocol)))
    return turns, episode.messages, episode.success, episode.failure, episode.terminated, episode.truncated


# -- ours at both ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "per_turn"), [("plain", 1), ("plain", 3), ("compact", 1)])
def test_an_episode_over_the_wire_is_the_episode_itself(lake: str, style: str, per_turn: int) -> None:
    """To the word, whatever the style of the protocol, and though one session serves several styles."""
    outcomes = set()
    for seed in range(16):
        wire = over_the_wire(lake, seed, "test", seed, style, per_turn)
        direct = itself(wire, "frozen_lake", noise_seed=seed, slippery=True)
        seen = lived(wire, seed)
        assert seen == lived(direct, seed)
        assert wire.env.max_turns == direct.env.max_turns and wire.env.rules() == direct.env.rules()
        outcomes.add((wire.success, wire.terminated, wire.truncated))
    assert len(outcomes) >= 2


def test_sixty_four_sessions_at_once_keep_apart(lake: str) -> None:
    def whole(seed: int) -> tuple[Any, Any]:
        wire = over_the_wire(lake, seed, "train", seed)
        barrier.wait(60)  # all sessions are open
        return lived(wire, seed), lived(itself(wire, "frozen_lake", seed, slippery=True), seed)

    barrier = threading.Barrier(64)
    with ThreadPoolExecutor(64) as pool:
        played = list(pool.map(whole, range(64)))
    assert all(wire == direct for wire, direct in played) and len({str(wire) for wire, _ in played}) > 32
    loops = [thread for thread in threading.enumerate() if thread.name == "openenv-sessions"]
    assert len(loops) == 1


def test_the_adapter_is_registered_once_by_whoever_is_first(
    own_environments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(kind: type[base.TextEnv]) -> None:
        registered.append(kind.name)
        if len(registered) > 1:
            twice.set()
        twice.wait(0.1)  # for as many as may come in between
        honest(kind)

    def ask(_: int) -> None:
        with pytest.raises(ValueError, match="openenv needs the option url"):
            envs.make("openenv")

    registered: list[str] = []
    honest = envs.register
    twice = threading.Event()
    monkeypatch.setattr(envs, "_ENVS", {})
    monkeypatch.setattr(envs, "register", slowly)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    assert registered == ["openenv"]


def test_a_connection_serves_one_environment_after_the_other(lake: str) -> None:
    sessions = openenv_client.SESSIONS.idle[(lake, 30.0)]
    sessions.clear()
    first = over_the_wire(lake, 1)
    session = first.env.session
    assert not sessions
    del first
    assert sessions == [session] and over_the_wire(lake, 2).env.session is session


def test_a_copy_goes_its_own_way_from_the_same_state(lake: str) -> None:
    wire = over_the_wire(lake, 3, noise_seed=9)
    lived_a_little = [wire.env.step(action)[:4] for action in ("Left", "Up")]
    twin = copy.deepcopy(wire.env)
    direct = itself(wire, "frozen_lake", 9, slippery=True).env
    assert [direct.step(action)[:4] for action in ("Left", "Up")] == lived_a_little
    moves = ["Right", "Down", "Down"]
    walks = [[env.step(move)[:4] for move in moves] for env in (twin, wire.env, direct)]
    assert walks[0] == walks[1] == walks[2]
    assert twin.session is not wire.env.session


def test_it_keeps_every_promise(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {promises.same_in_every_process, promises.hostile_text}  # they start a process
    monkeypatch.setattr(promises, "PROMISES", [each for each in promises.PROMISES if each not in elsewhere])
    monkeypatch.setattr(promises, "LEVELS", 40)
    assert not promises.broken_promises(Subject("openenv", {"url": lake}, episodes=10))
    env = envs.make("openenv", url=lake)
    assert env.slow and not env.deterministic and "openenv" not in envs.names()


def test_levels_are_the_tasks_of_their_split(lake: str) -> None:
    assert request_json(lake, "/frozen_lake/splits", 5)[1] == {"name": "validation", "type": "validation"}
    assert request_json(lake, "/frozen_lake/num_tasks", 5, {"split": "test"}) == {"num_tasks": 400}
    task = {"id": "frozen_lake-test-7", "index": 7, "split": "test"}
    assert request_json(lake, "/frozen_lake/task", 5, {"split": "test", "index": 7}) == {"task": task}
    some = request_json(lake, "/frozen_lake/task_range", 5, {"split": "test", "start": 395})["tasks"]
    assert [each["index"] for each in some] == [395, 396, 397, 398, 399]
    assert len(request_json(lake, "/frozen_lake/tasks", 5, {"split": "train"})["tasks"]) == 400
    for wrong in ({"split": "test", "index": 400}, {"split": "exam", "index": 0}):
        with pytest.raises(ServerError, match="400"):
            request_json(lake, "/frozen_lake/task", 5, wrong)
    for split in base.SPLITS:
        wire = over_the_wire(lake, 11, split)
        assert wire.env.level.split == split and wire.env.level.index < 400
        assert wire.messages[1] == itself(wire, "frozen_lake", slippery=True).messages[1]


def test_a_client_that_vanishes_is_no_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[logging.LogRecord] = []
    asked_for, gone, told = threading.Event(), threading.Event(), threading.Event()
    reset = openenv_server.Served.reset

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record)
            told.set()

    def answer_too_late(*arguments: Any, **options: Any) -> Any:
        asked_for.set()
        gone.wait(10)
        time.sleep(0.1)  # for the server to notice that nobody listens any more
        return reset(*arguments, **options)

    async def vanish(address: str) -> None:
        left = await connect(address)
        await left.send('{"type": "reset", "data": {"seed": 1}}')
        await asyncio.to_thread(asked_for.wait, 10)
        left.transport.abort()

    monkeypatch.setattr(openenv_server.Served, "reset", answer_too_late)
    handler = Kept(logging.ERROR)
    with serving(openenv_server.app_of("frozen_lake"), log_level="error") as url:
        logging.getLogger("uvicorn.error").addHandler(handler)
        for _ in range(20):  # a busy machine may notice later
            asked_for.clear()
            gone.clear()
            asyncio.run(vanish(url.replace("http", "ws") + "/ws"))
            gone.set()
            if told.wait(0.5):
                break
        logging.getLogger("uvicorn.error").removeHandler(handler)
    assert errors and all(map(openenv_server.vanished, errors))
    assert not openenv_server.vanished(logging.LogRecord("x", logging.ERROR, "", 0, "", (), (OSError, OSError(), None)))


@pytest.mark.parametrize(
    ("headers", "answered"),
    [
        ({}, True),
        ({"Origin": "http://HOST"}, True),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, False),  # whose name leads to 127.0.0.1
    ],
)
def test_no_other_website_plays(lake: str, headers: dict[str, str], answered: bool) -> None:
    """Browsers let every page open a websocket to any address."""
    host = lake.removeprefix("http://")
    headers = {name: value.replace("HOST", host) for name, value in headers.items()}

    async def play() -> str:
        place, port = host.split(":")
        named: Any = {"host": place, "port": int(port), "origin": headers.get("Origin")}
        async with connect(f"ws://{headers.get('Host', host)}/ws", **named) as connection:
            await connection.send('{"type": "reset", "data": {"seed": 1}}')
            return str(await connection.recv())

    status = httpx.post(f"{lake}/reset", json={"seed": 1}, headers=headers).status_code
    if answered:
        assert status == 200 and "rules" in asyncio.run(play())
    else:
        with pytest.raises(InvalidStatus) as refused:
            asyncio.run(play())
        assert status == refused.value.response.status_code == 403


def test_a_request_has_a_bound(lake: str) -> None:
    assert httpx.post(f"{lake}/reset", content=b"[" * 2_000_000).status_code == 413


def test_free_text_travels_as_it_is(own_environments: None) -> None:
    envs.register(Say)
    with serving(openenv_server.app_of("say")) as url:
        wire = over_the_wire(url, 4)
        direct = itself(wire, "say")
        for text in ("go 3", "\n go 1\n", "é\u2028{}", "go 2", "go 2", "go 2"):
            said = format_response("so", [text], wire.protocol)
            if not wire.done:
                assert wire.step(said) == direct.step(said)
        assert wire.done and wire.messages == direct.messages and wire.success == direct.success
        assert wire.state_key() != direct.state_key(), "a key may hold what the player must not see"


@pytest.mark.parametrize("answer", ["It is 7.", "", "<answer>7</answer>"])
def test_prompts_of_your_own_travel_as_they_are(answer: str) -> None:
    with serving(openenv_server.app_of("prompts", {"system": "Be brief."})) as url:
        wire = over_the_wire(url, 4)
        direct = itself(wire, "prompts", system="Be brief.")
        assert wire.messages[0] == {"role": "system", "content": "Be brief."} and len(wire.messages) == 2
        assert wire.step(answer) == direct.step(answer)
        assert wire.done and wire.messages == direct.messages and wire.success == direct.success


def test_the_server_says_what_a_client_did_wrong(lake: str) -> None:
    from openenv.core import GenericEnvClient

    with GenericEnvClient(base_url=lake).sync() as client:
        with pytest.raises(RuntimeError, match=r"no episode: reset\(\) comes before step"):
            client.step({"text": "Left"})
        with pytest.raises(RuntimeError, match="no task 400"):
            client.reset(split="test", index=400)
        for wrong in ({"index": "x"}, {"index": 1.5}, {"seed": "x"}, {"seed": -1}, {"index": 3, "seed": "x"}):
            with pytest.raises(RuntimeError, match=r"reset takes .* as a whole number .* not (\"x\"|1.5|-1)"):
                client.reset(split="test", **wrong)
        first = client.reset(split="test", index=3)
        assert first.observation["actions"] == ["Left", "Down", "Right", "Up"] and not first.done
        assert first.observation["rules"].startswith("You walk over a frozen lake")
        compact = client.reset(split="test", index=3, style="compact")
        assert compact.observation["rules"].startswith("Walk over the frozen lake")
        assert client.reset(split="test", index=3).observation == first.observation, "sentences again"
        with pytest.raises(RuntimeError, match='no style "plane"'):
            client.reset(split="test", index=3, style="plane")
        client.reset(split="test", index=3)
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            client.step({"words": "Left"})
        turn = client.step({"text": "fly"})
        assert (turn.reward, turn.metadata["action_is_valid"]) == (0.0, False)
        for _ in range(12):
            turn = client.step({"text": "Left"})
        assert turn.done and turn.metadata["terminated"] != turn.metadata["truncated"]
        assert client.step({"text": "Left"}).observation["text"] == turn.observation["text"]
        seeded = client.reset(seed=3, split="test")
        assert seeded.observation["text"] == first.observation["text"]


# -- somebody else's server --------------------------------------------------------------------------------------------


class Move(Action):
    steps: int = Field(ge=-100, le=100)


class Say2(Action):
    words: str
    tone: str


class Seen(Observation):
    place: int = 0
    note: str = ""


class Hall(Environment[Move, Seen, State]):
    """Walk ten steps along a hall; it knows nothing of tasks, rules or validity."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    place = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self.place = (seed or 0) % 7
        return Seen(place=self.place, note="begin")

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        self.place += action.steps
        return Seen(place=self.place, note="so", done=self.place >= 10, reward=float(self.place == 10))

    @property
    def state(self) -> State:
        return State()


@pytest.fixture(scope="module")
def hall() -> Iterator[str]:
    with serving(create_app(Hall, Move, Seen, env_name="hall", max_concurrent_envs=8)) as url:
        yield url


def test_a_server_of_somebody_else_is_played_by_seeds(hall: str) -> None:
    env = envs.make("openenv", url=hall, rules="Walk to 10.")
    assert (env.actions, env.max_turns, env.rules()) == (None, 8, "Walk to 10.")
    assert envs.make("openenv", url=hall).rules() == "Hall environment"
    text, _ = env.reset(seed=5)
    start = env.level.index % 7
    assert text == f"place: {start}\nnote: begin" and env.split_of(env.level) == "train"
    assert {env.split_of(env.reset(seed=s, options={"split": "test"}) and env.level) for s in range(5)} == {"test"}
    env.reset(seed=5)
    for bad in ("two", "1.5", "9" * 30, "²", " ", "--5", "101", "9" * 18):
        assert env.step(bad)[0] == text and env.step(bad)[4]["action_is_valid"] is False
    _, reward, over, _, info = env.step(f" {10 - start}\n")
    assert (reward, over, info["success"], info["failure"]) == (1.0, True, True, "")
    assert env.step("1")[:4] == (env.observe(), 0.0, True, False)
    env.reset(seed=5)
    assert env.step("20")[2:] == (True, False, {**info, "success": False, "failure": "lost"})
    one = envs.make("openenv", url=hall, observation="note")
    assert one.reset(seed=5)[0] == "begin"
    with pytest.raises(ServerError, match='no field "notes", only place, note'):
        envs.make("openenv", url=hall, observation="notes").reset(seed=5)
    with pytest.raises(ServerError, match=r'no field "step", only .*steps'):
        envs.make("openenv", url=hall, action="step")


def test_an_action_of_two_fields_is_refused() -> None:
    with (
        serving(create_app(Hall, Say2, Seen, env_name="hall")) as url,  # pyright: ignore[reportArgumentType]
        pytest.raises(ValueError, match="need words, tone: an environment of text can fill one field"),
    ):
        envs.make("openenv", url=url)


def test_splits_that_a_server_lacks_are_made_of_its_training_tasks() -> None:
    def homes(*splits: tuple[str, str, int]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for split in base.SPLITS:
            for seed in range(30):
                task = base.draw_level(openenv_client.OpenEnv, ("url", splits), seed, split)
                found.setdefault(split, set()).add(openenv_client.OpenEnv.key_of(task))
        return found

    for offered in ((("train", "train", 500), ("test", "test", 500)), (("easy", "validation", 900),)):
        found = homes(*offered)
        assert not found["train"] & found["validation"] and not found["train"] & found["test"]
        assert all(key.startswith("test ") == ("test" in str(offered)) for key in found["test"])


def test_a_full_server_says_so() -> None:
    with serving(create_app(Hall, Move, Seen, env_name="hall", max_concurrent_envs=2)) as url:
        begun = [envs.make("openenv", url=url) for _ in range(2)]
        for env in begun:
            env.reset(seed=0)
        with pytest.raises(ServerError, match="capacity"):
            envs.make("openenv", url=url).reset(seed=0)


# -- the command, and a server that dies -------------------------------------------------------------------------------


@pytest.fixture
def command() -> Iterator[Callable[[], Any]]:
    started: list[subprocess.Popen[str]] = []

    def start() -> Any:
        command = [sys.executable, "-m", "envs.adapters.openenv", "frozen_lake", "--port", "0", "size=5"]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        line = started[-1].stdout and started[-1].stdout.readline()
        assert line and line.startswith("frozen_lake is served at http://127.0.0.1:")
        return SimpleNamespace(url=line.split()[-1], pid=started[-1].pid)

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_server_that_hangs_or_dies_costs_its_episodes_and_nothing_else(
    command: Callable[[], Any], tiny_chat: Chat
) -> None:
    server = command()
    env = envs.make("openenv", url=server.url, timeout=2.0)
    assert env.rules().count("frozen lake") == 1
    protocol = Protocol.of(env, max_turns=4)

    def begin(count: int) -> list[Any]:
        made = [envs.make("openenv", url=server.url, timeout=2.0) for _ in range(count)]
        return [set_up(each, protocol, n, "train", n) for n, each in enumerate(made)]

    healthy, lost = Episode(envs.make("frozen_lake"), protocol, 0), begin(16)
    assert all(isinstance(episode, Episode) for episode in lost)
    lost[0].step(format_response("", ["Up"], protocol))
    os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ServerError, match=rf"server at {server.url} failed in step\(\): no answer within 2 seconds"):
        lost[0].env.step("Down")
    assert 1 < time.monotonic() - began < 8
    with pytest.raises(ServerError, match="the connection was closed"):
        lost[0].env.step("Down")
    began, late = time.monotonic(), begin(16)
    assert time.monotonic() - began < 10, "each waited in its turn"
    assert {trajectory.crashed[:12] for trajectory in late} == {"ServerError:"}
    assert "did not answer a moment ago" in late[-1].crashed

    os.kill(server.pid, signal.SIGKILL)
    began = time.monotonic()
    moves = Scripted(tiny_chat, [["<think>a</think><answer>Up</answer>"] * 4] * 16)
    played = play(moves, tiny_chat, [healthy, *lost[1:]], PARAMS, range(16))
    assert time.monotonic() - began < 10
    assert not played[0].crashed and played[0].turns
    assert all("ServerError: The OpenEnv server at" in trajectory.crashed for trajectory in played[1:])
    with pytest.raises(ServerError, match=r"No OpenEnv server answers at .*Connection refused.*Start it"):
        openenv_client.server_offer.__wrapped__(server.url, 2.0)


def test_a_server_that_came_back_does_not_go_on_with_an_episode_it_does_not_know() -> None:
    app = openenv_server.app_of("frozen_lake")
    with serving(app) as url:
        wire = over_the_wire(url, 3)
        assert not wire.env.step("fly")[2]

        async def cut() -> None:
            await wire.env.session.client.disconnect()

        asyncio.run_coroutine_threadsafe(cut(), openenv_client.loop()).result(10)
        with pytest.raises(ServerError, match="the connection was closed"):
            wire.env.step("Left")
        assert wire.env.reset(seed=3, options={"split": "test"})[0] == wire.observation


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frozen_lak"], 'Did you mean "frozen_lake"'),
        (["frozen_lake", "sise=4"], 'no option of the environment frozen_lake "sise"'),
        (["frozen_lake", "size"], "write name=value"),
        (["frozen_lake", "--sessions", "0"], "--sessions must be at least 1"),
        (["frozen_lake", "--port", "99999"], "--port must be between 0 and 65535"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert openenv.main(arguments) == 2 and says in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert openenv.main(["frozen_lake", "--port", str(port)]) == 2
    assert f"Listening at 127.0.0.1:{port} fails: " in capsys.readouterr().err


def test_help_needs_no_package() -> None:
    code = "import sys\nfrom envs.adapters import openenv\ntry: openenv.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('openenv', 'uvicorn', 'fastapi', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("\n[]\n") and "--sessions" in done.stdout, done.stderr


def test_without_the_package_both_ends_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    assert openenv.main(["frozen_lake"]) == 2 and "pip install openenv==0.10.0" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"pip install openenv==0\.10\.0"):
        openenv_client.Session("http://localhost:1", 1.0)
