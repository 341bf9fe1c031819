"""Is a model behind a server measured like a local one, whatever the server does, and is nothing paid for twice?"""

# ruff: noqa: F811  (fixtures of other files)
from __future__ import annotations

import asyncio
import doctest
import json
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_evaluate import checkpoints, evaluate, resolved, settings  # noqa: F401  `checkpoints` is a fixture
from test_serve import address, final  # noqa: F401  fixtures: the server of posttrain.serving.serve

from envs.web import MOST_BYTES
from posttrain.config.evaluation import Endpoint
from posttrain.evaluation import endpoint, store, tasks
from posttrain.evaluation.endpoint import Client, Nonsense, Pace, Reply, read_reply
from posttrain.evaluation.text_episodes import STOP, TextChat
from posttrain.types import SamplingParams, UserError

KEY = 'sk/a-"qzx7vkw"-key'
PARAMS = SamplingParams(max_new_tokens=7, temperature=0.5)
ASKED = [{"role": "user", "content": "Which way?"}]
SUITES = {
    "math": {"n": 3, "max_new_tokens": 6, "settings": ["greedy"]},
    "repetition": {"n": 3, "max_new_tokens": 8, "settings": ["greedy"]},
    "recall": {"n": 3, "max_new_tokens": 4, "settings": ["greedy"]},
    "preferences": {"n": 2, "reference": "base"},
    "envs": {
        "envs": ["frozen_lake"],
        "episodes": 3,
        "protocol": {"max_turns": 3},
        "max_completion_length": 6,
        "settings": ["greedy"],
    },
}


def completion(text: str, reason: str = "stop", prompt: int = 10, tokens: int = 4) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}], "usage": usage}


class Server(ThreadingHTTPServer):
    """Answers as `behave(number of the request, body)` says: (status, headers, reply), or None to drop it.

    A reply that is bytes is sent as it is. `asked` are the bodies, `keys` the Authorization headers that came.
    """

    daemon_threads = True

    def __init__(self, behave: Callable[[int, dict[str, Any]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.lock = behave, threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def left_within(self, seconds: float) -> bool:
        """Wait for so many seconds, or until the client hangs up; return whether it did."""
        return bool(select.select([self.connection], [], [], seconds)[0])

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(body)
            self.server.keys.append(self.headers["Authorization"])
            self.server.headers.append(dict(self.headers))
            self.server.busy += 1
            self.server.most = max(self.server.most, self.server.busy)
        try:
            said = self.server.behave(number, body)
        finally:
            with self.server.lock:
                self.server.busy -= 1
        if said is None:
            self.connection.close()
            return
        status, headers, reply = said
        if headers.get("X-Stalls"):
            assert self.left_within(20)
            return
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if headers.get("X-Trickles"):  # a piece each 0.1 s, and the head of the reply is never whole
                while not self.left_within(0.1):
                    self.send_header("X-More", "b")
                    self.flush_headers()
            self.send_header("Content-Length", str(headers.get("X-Claims", len(content))))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client has gone
            pass


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int, dict[str, Any]], Any]], Server]]:
    """Starts servers, and makes the pauses between attempts short."""
    monkeypatch.setattr(endpoint, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(endpoint, "LONGEST_PAUSE", 0.1)
    servers: list[Server] = []

    def start(behave: Callable[[int, dict[str, Any]], Any]) -> Server:
        servers.append(Server(behave))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def good(number: int, body: dict[str, Any]) -> Any:
    return 200, {}, completion("<think>so</think><answer>Right</answer>")


def ask(client: Client, messages: list[dict[str, str]], params: SamplingParams, seed: int) -> Reply:
    return client.begin(messages, params, seed).result()


def section(server: Server, **more: Any) -> Endpoint:
    return Endpoint(endpoint=server.url, model="m", **{"timeout": 5, "concurrency": 3, **more})


def ask_once(kept: Path, server: Server, **more: Any) -> Reply:
    with Client(section(server, **more), kept) as client:
        return ask(client, ASKED, PARAMS, 5)


# ------------------------------------------------------------------------------------------------------- one request


FAULTS: dict[str, Callable[[int, dict[str, Any]], Any]] = {
    "drops": lambda *_: None,
    "stalls": lambda *_: (200, {"X-Stalls": True}, b""),
    "stops in the middle": lambda *_: (200, {"X-Claims": 5000}, b'{"choices": ['),
    "500": lambda *_: (500, {}, b"<html>oops</html>"),
    "503 with a date": lambda *_: (503, {"Retry-After": formatdate(time.time(), usegmt=True)}, b""),
    "no JSON": lambda *_: (200, {}, b"<html>nginx</html>"),
    "a list": lambda *_: (200, {}, []),
    "nothing in it": lambda *_: (200, {}, {}),
    "no choices": lambda *_: (200, {}, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}),
    "a number for a text": lambda *_: (200, {}, completion(3)),  # type: ignore[arg-type]
    "no text": lambda *_: (200, {}, completion(None)),  # type: ignore[arg-type]
    "half a character": lambda *_: (200, {}, completion("\ud800")),
    "no UTF-8": lambda *_: (200, {}, b"\xff\xfe{"),
    "too deep": lambda *_: (200, {}, b"[" * 100_000),
    "too large": lambda *_: (200, {}, b" " * (MOST_BYTES + 1)),
    "too large an error": lambda *_: (400, {}, b" " * (MOST_BYTES + 1)),
    "trickles": lambda *_: (200, {"X-Trickles": True}, b""),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_an_attempt_and_the_last_one_is_told_in_a_paragraph(
    serving: Any, tmp_path: Path, fault: str
) -> None:
    server = serving(lambda number, body: (FAULTS[fault] if number < 3 else good)(number, body))
    reason = r"it did not answer in 0\.6 s" if fault in ("stalls", "trickles") else ".+"
    words = rf"\(m\) has not answered a request 2 times; the last: {reason}\. Its answers so far"
    for attempts in (2, 8):
        with Client(section(server, timeout=0.6, attempts=attempts), tmp_path / "kept.jsonl") as client:
            if attempts == 2:
                with pytest.raises(UserError, match=words):
                    ask(client, ASKED, PARAMS, 5)
                continue
            for _ in range(2):
                assert ask(client, ASKED, PARAMS, 5) == Reply("<think>so</think><answer>Right</answer>", True, 10, 4)
    assert len(server.asked) == 4 and server.asked[0] == server.asked[3]


def test_nobody_listens(tmp_path: Path) -> None:
    nobody = Endpoint(endpoint="http://127.0.0.1:9/v1", model="m", attempts=1)
    with Client(nobody, tmp_path / "kept.jsonl") as client, pytest.raises(UserError, match="ConnectionRefusedError"):
        ask(client, ASKED, PARAMS, 5)


def test_nothing_goes_elsewhere_nor_comes_from_the_environment(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No redirect, no proxy, and neither keys nor headers that openai would take from the environment."""
    other = serving(good)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, other.url)
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "from-elsewhere")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer from-elsewhere\nX-Other: from-elsewhere")
    monkeypatch.setenv("MY_KEY", KEY)
    for more, key in (({}, None), ({"api_key_env": "MY_KEY"}, f"Bearer {KEY}")):
        server = serving(good)
        ask_once(tmp_path / f"{key is None}.jsonl", server, **more)
        assert server.keys == [key] and "from-elsewhere" not in str(server.headers)
        assert not re.search("stainless-(os|arch|runtime)", str(server.headers), re.IGNORECASE)
    server = serving(lambda *_: (307, {"Location": f"{other.url}/chat/completions"}, b""))
    with pytest.raises(UserError, match="with status 307"):
        ask_once(tmp_path / "k.jsonl", server)
    assert other.asked == []


def test_a_request_says_what_a_local_model_is_asked(serving: Any, tmp_path: Path) -> None:
    server = serving(good)
    with Client(section(server), tmp_path / "a.jsonl") as client:
        ask(client, [{**ASKED[0], "mask_spans": []}], PARAMS, (1 << 62) + 5)  # type: ignore[dict-item]
        ask(client, ASKED, SamplingParams(9, 0.0, 50, 0.9, 1.15), 1)
    plain = {"model": "m", "messages": ASKED, "max_tokens": 7, "temperature": 0.5, "seed": 5}
    assert server.asked[0] == plain and server.keys == [None, None]
    cut = {"max_tokens": 9, "temperature": 0.0, "seed": 1, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.15}
    assert server.asked[1] == plain | cut
    ask_once(tmp_path / "b.jsonl", server, tokens_field="max_completion_tokens")
    assert "max_tokens" not in server.asked[2] and server.asked[2]["max_completion_tokens"] == 7


@pytest.mark.parametrize(
    ("status", "reply", "more", "words"),
    [
        (422, '{"loc": ["body", "seed"]}', {}, r"does not accept seed, write leave_out: \[seed\]"),
        (400, "top_k, seed: unknown", {}, r"leave_out: \[seed, top_k\] in this checkpoint's section"),
        (400, "no temperature here", {"leave_out": ["seed"]}, r"leave_out: \[seed, temperature\]"),
        (400, "Unsupported parameter: 'max_tokens'", {}, "write tokens_field: max_completion_tokens in"),
        (400, "'max_completion_tokens'?", {"tokens_field": "max_completion_tokens"}, "write tokens_field: max_tokens"),
        (400, "my_seed is not seeds", {}, "with leave_out some of seed, temperature, top_p"),
        (400, "", {}, "status 400: no reason given. Change this checkpoint's section"),
        (401, "who is it?", {}, "without a key"),
    ],
)
def test_a_refusal_says_which_key_leaves_a_field_out_and_is_not_tried_again(
    serving: Any, tmp_path: Path, status: int, reply: str, more: dict[str, Any], words: str
) -> None:
    server = serving(lambda *_: (status, {}, reply.encode()))
    with pytest.raises(UserError, match=words):
        ask_once(tmp_path / "k.jsonl", server, **more)
    assert len(server.asked) == 1


def test_what_is_left_out_is_not_sent_and_each_seed_has_its_reply(serving: Any, tmp_path: Path) -> None:
    allowed = {"model", "messages", "max_tokens", "top_p"}

    def strict(number: int, body: dict[str, Any]) -> Any:
        unknown = sorted(body.keys() - allowed)
        return (422, {}, {"unknown": unknown}) if unknown else (200, {}, completion(f"reply {number}"))

    server, kept = serving(strict), tmp_path / "kept.jsonl"
    params = SamplingParams(9, 0.0, 50, 0.9, 1.15)
    fields = ["seed", "temperature", "top_k", "repetition_penalty"]
    with Client(section(server, leave_out=fields), kept) as client:
        assert [ask(client, ASKED, params, seed).text for seed in (1, 2, 1)] == ["reply 0", "reply 1", "reply 0"]
    assert all(body.keys() == allowed for body in server.asked)
    server = serving(good)
    with Client(section(server), tmp_path / "other.jsonl") as client:
        whole = ask(client, ASKED, PARAMS, 1)
    with Client(section(server, leave_out=["seed"]), tmp_path / "other.jsonl") as client:
        assert ask(client, ASKED, PARAMS, 1) == whole and len(server.asked) == 1
    with Client(section(server, leave_out=["temperature"]), tmp_path / "other.jsonl") as client:
        ask(client, ASKED, PARAMS, 1)  # another distribution is another request
    assert len(server.asked) == 2


def test_examples() -> None:
    assert doctest.testmod(endpoint).attempted and not doctest.testmod(endpoint).failed


def test_retry_after_holds_for_all_requests(serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[float] = []
    known, honest = threading.Event(), Pace.limited

    def limited(number: int, body: dict[str, Any]) -> Any:
        came.append(time.monotonic())
        if number:
            return good(number, body)
        return 429, {"Retry-After": "0.8"}, {}

    def noted(pace: Pace, began: float, wait: float) -> float:
        unanswered = honest(pace, began, wait)
        known.set()
        return unanswered

    monkeypatch.setattr(Pace, "limited", noted)
    server = serving(limited)
    with Client(section(server, concurrency=2), tmp_path / "kept.jsonl") as client:
        first = client.begin(ASKED, PARAMS, 0)
        assert known.wait(10)
        others = [client.begin(ASKED, PARAMS, seed) for seed in range(1, 4)]
        assert all(one.result().finished for one in [first, *others])
    assert len(came) == 5 and min(came[1:]) - came[0] > 0.78


@pytest.mark.thorough
def test_a_rate_limit_costs_no_attempt_and_everybody_keeps_to_its_pause(serving: Any, tmp_path: Path) -> None:
    """One request in 0.1 s is answered, any other with 429: each of 12 requests with 2 attempts has its answer."""
    windows: set[int] = set()
    early: list[int] = []

    def limited(number: int, body: dict[str, Any]) -> Any:
        window = int(time.monotonic() / 0.1)
        if window in windows:
            early.append(number)
            return 429, {"Retry-After": "0.1" if number % 2 else "0"}, {"error": "slow down"}
        windows.add(window)
        return good(number, body)

    server = serving(limited)
    with Client(section(server, concurrency=8, attempts=2), tmp_path / "kept.jsonl") as client:
        assert all(one.result().finished for one in [client.begin(ASKED, PARAMS, seed) for seed in range(12)])
    assert len(server.asked) == 12 + len(early) and 7 <= len(early) < 12 * 5


def test_a_pause_is_shared_and_a_429_lowers_how_many_ask_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE", 0.05)

    async def play() -> None:
        over = asyncio.Event()
        pace, open_slots = Pace(8, over), AsyncExitStack()

        async def begin() -> float:
            return await open_slots.enter_async_context(pace.slot())

        for began in [await begin() for _ in range(8)]:  # they were under way together
            pace.limited(began, 0.0)
        await open_slots.aclose()
        told = time.monotonic()
        assert min([await begin() for _ in range(4)]) - told > 0.02
        fifth = asyncio.ensure_future(begin())
        assert not (await asyncio.wait([fifth], timeout=0.01))[0]  # four at a time
        for _ in range(2 * endpoint.RISE):
            pace.answered()
        await asyncio.wait_for(fifth, 5)
        await asyncio.wait_for(begin(), 5)  # six
        seventh = asyncio.ensure_future(begin())
        assert not (await asyncio.wait([seventh], timeout=0.01))[0]
        pace.pause(1000)
        over.set()
        await open_slots.aclose()
        await asyncio.wait_for(seventh, 5)  # the end of a run ends every pause

    asyncio.run(play())


def test_a_server_that_answers_429_alone_is_left_for_later(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving(lambda *_: (429, {"Retry-After": "3600"}, {"error": "Limit of the day"}))
    words = r"3600 s.*Limit of the day.*--resume"
    with pytest.raises(UserError, match=words):
        ask_once(tmp_path / "k.jsonl", server)
    assert [endpoint.seconds_of(header) for header in ("nan", "soon", "")] == [None] * 3
    assert endpoint.seconds_of("-3") == 0 and 50 < (endpoint.seconds_of(formatdate(time.time() + 60)) or 0) < 61
    server = serving(lambda *_: (429, {}, {"error": {"message": "Pay first", "code": "insufficient_quota"}}))
    with pytest.raises(UserError, match=r"no quota.*Pay first"):
        ask_once(tmp_path / "k.jsonl", server)
    assert len(server.asked) == 1
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.2)
    server = serving(lambda *_: (429, {"Retry-After": "0"}, {"error": "slow down"}))
    with pytest.raises(UserError, match=r"429: .*slow down.*0\.2 s"):
        ask_once(tmp_path / "k.jsonl", server)
    assert 3 < len(server.asked) < 20


@pytest.mark.parametrize(
    ("usage", "reason", "known", "finished"),
    [
        (None, "stop", (None, None), True),
        ({"prompt_tokens": 10.0, "completion_tokens": 4}, "stop", (10, 4), True),
        ({"prompt_tokens": 10**400, "completion_tokens": 4}, "stop", (None, 4), True),
        ({"prompt_tokens": -1, "completion_tokens": True}, "length", (None, None), False),
        ({"prompt_tokens": 1e400, "completion_tokens": "4"}, None, (None, None), True),
        ({"prompt_tokens": 10, "completion_tokens": 7}, None, (10, 7), False),
    ],
)
def test_an_answer_is_taken_whatever_its_server_counts(
    serving: Any, tmp_path: Path, usage: Any, reason: str | None, known: tuple[int | None, int | None], finished: bool
) -> None:
    reply = {**completion("x", reason), "usage": usage}  # type: ignore[arg-type]
    server, kept = serving(lambda *_: (200, {}, reply)), tmp_path / "kept.jsonl"
    assert ask_once(kept, server) == Reply("x", finished, *known)
    assert len(server.asked) == 1 and list(endpoint.read_kept(kept).values()) == [Reply("x", finished, *known)]
    assert endpoint.spent(kept) == (1, known[0] or 0, known[1] or 0, int(None in known))


def test_a_key_is_masked_in_whatever_form_it_comes_back(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    escaped = json.dumps(KEY)[1:-1]
    coded = "".join(f"\\u{ord(c):04x}" for c in KEY)
    forms = [KEY, escaped, json.dumps(escaped)[1:-1], KEY.replace("/", "\\/"), coded, KEY.replace('"', "%22")]
    for status in (200, 400):
        for form in forms:
            text = "a" * 284 + f" {form} b"
            server = serving(
                lambda *_, text=text, status=status: (status, {}, completion(text) if status == 200 else text)
            )
            with Client(section(server, api_key_env="MY_KEY"), tmp_path / f"{len(text)}-{status}") as client:
                if status == 200:
                    assert ask(client, ASKED, PARAMS, 5).text == "a" * 284 + " *** b"
                    continue
                with pytest.raises(UserError, match=r"a \*\*\* b") as problem:
                    ask(client, ASKED, PARAMS, 5)
                assert "qzx7vkw" not in str(problem.value)
    server = serving(lambda *_: (400, {}, b" " * 990 + KEY.encode()))  # where a reply was cut
    with pytest.raises(UserError, match=r": \*\*\*\. C"):
        ask_once(tmp_path / "k", server, api_key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", "EMPTY")  # what servers without keys are sent is a word
    server = serving(lambda *_: (200, {}, completion("EMPTY")))
    assert ask_once(tmp_path / "w", server, api_key_env="MY_KEY").text == "EMPTY"


def test_no_more_requests_than_allowed_at_a_time(serving: Any, tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def slow(number: int, body: dict[str, Any]) -> Any:
        together.wait(10)
        return good(number, body)

    server = serving(slow)
    with Client(section(server, concurrency=3), tmp_path / "kept.jsonl") as client:
        for one in [client.begin(ASKED, PARAMS, seed) for seed in range(12)]:
            one.result()
    assert server.most == 3 and len(server.asked) == 12


def test_after_a_failure_nothing_more_is_sent_and_what_was_under_way_is_kept(serving: Any, tmp_path: Path) -> None:
    under_way, refused = threading.Event(), threading.Event()

    def behave(number: int, body: dict[str, Any]) -> Any:
        if body["seed"] == 1:
            assert under_way.wait(5)
            return 400, {}, b"wrong"
        under_way.set()
        assert refused.wait(5)
        return good(number, body)

    server, kept = serving(behave), tmp_path / "kept.jsonl"
    with Client(section(server, concurrency=2, timeout=20), kept) as client:
        coming = [client.begin(ASKED, PARAMS, seed) for seed in range(8)]
        with pytest.raises(UserError, match="status 400"):
            coming[1].result()
        refused.set()
    assert len(server.asked) == 2 and endpoint.spent(kept) == (1, 10, 4, 0)


def test_a_reply_that_is_kept_is_not_paid_for_again(serving: Any, tmp_path: Path) -> None:
    server, kept = serving(good), tmp_path / "kept.jsonl"
    with Client(section(server), kept) as client:
        said = [ask(client, ASKED, PARAMS, seed) for seed in range(3)]
    whole = kept.read_bytes()
    kept.write_bytes(whole + whole[: len(whole) // 5])  # cut short while it was written
    with Client(section(server), kept) as client:
        assert [ask(client, ASKED, PARAMS, seed) for seed in range(3)] == said and len(server.asked) == 3
        ask(client, ASKED, PARAMS, 3)
        ask(client, ASKED, SamplingParams(7, 0.6), 0)
    assert len(server.asked) == 5 and len(endpoint.read_kept(kept)) == 5


def test_replies_that_are_of_no_use_are_counted_all_the_same(serving: Any, tmp_path: Path) -> None:
    bad = completion(None, tokens=100)  # type: ignore[arg-type]
    server, kept = serving(lambda number, body: good(number, body) if number else (200, {}, bad)), tmp_path / "k.jsonl"
    ask_once(kept, server)
    assert endpoint.spent(kept) == (2, 20, 104, 0) and len(endpoint.read_kept(kept)) == 1


def test_thoughts_that_a_server_cuts_off_are_put_back() -> None:
    reply = completion("<answer>Up</answer>", "length")
    for name in ("reasoning_content", "reasoning"):
        reply["choices"][0]["message"] = {"content": "<answer>Up</answer>", name: "so"}
        assert read_reply(reply) == Reply("<think>so</think><answer>Up</answer>", False, 10, 4)
    assert read_reply(completion(None, "content_filter")).text == ""  # type: ignore[arg-type]
    with pytest.raises(Nonsense):
        read_reply(completion(None))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- evaluation


def served(server: Server, **more: Any) -> dict[str, Any]:
    return {"endpoint": server.url, "model": "m", "timeout": 5, "concurrency": 4, **more}


@pytest.mark.slow
def test_a_served_model_has_the_rows_of_the_local_one(
    address: str,
    final: Path,
    checkpoints: dict[str, str],
    tmp_path: Path,
) -> None:
    """The same weights here and behind `posttrain serve`: same prompts, levels, greedy answers and figures."""
    both = {"base": str(final), "gpt": {"endpoint": address, "model": str(final), "concurrency": 4}}
    out = evaluate(tmp_path, both, suites=SUITES)  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
    here, there = ([row for row in rows if row["checkpoint"] == name] for name in both)
    assert Counter(row["suite"] for row in there) == {"math": 6, "repetition": 3, "recall": 3, "envs": 3}
    plain = re.compile(r"<\|\w+\|>")  # control tokens that the model wrote are not sent to clients
    for row in there:
        (same,) = [one for one in here if all(one[k] == row[k] for k in ("suite", "part", "setting", "index"))]
        if row["suite"] == "envs":
            assert row["level"] == same["level"] and row["messages"][:2] == same["messages"][:2]
            assert row["messages"][2]["content"] == plain.sub("", same["messages"][2]["content"])
            continue
        assert row["messages"] == same["messages"] and row["never_stops"] == same["never_stops"]
        assert row["text"] == plain.sub("", same["text"])
        if row["suite"] != "repetition":
            assert (row["accuracy"], row["tokens"]) == (same["accuracy"], same["tokens"])
    results = json.loads((out / "results.json").read_text())
    assert set(results["checkpoints"]["gpt"]) == {"math", "repetition", "recall", "envs"}
    assert {one["suite"] for one in results["differences"]} == {"math", "repetition", "recall", "envs"}
    paid = results["endpoints"]["gpt"]
    assert paid["replies"] == 12 + sum(row["turns"] for row in there if row["suite"] == "envs")
    assert paid["completion_tokens"] > 0 and paid["cost"] is None and list(paid["left_out"]) == ["preferences"]
    for page in ("report.html", "results.md"):
        assert "not asked" in (out / page).read_text()


@pytest.mark.thorough
def test_an_evaluation_that_breaks_off_pays_for_nothing_twice(
    serving: Any,
    checkpoints: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that fails for good in the middle, then one that is well: each request has been answered once."""
    broken = threading.Event()

    def behave(number: int, body: dict[str, Any]) -> Any:
        if number >= 9 and not broken.is_set():
            return 500, {}, b"down"
        return (500, {}, b"hiccup") if number % 5 == 3 else good(number, body)

    server = serving(behave)
    mine = {"base": checkpoints["base"], "gpt": served(server, attempts=3, price_input=2.0, price_output=10.0)}
    with pytest.raises(UserError, match=r"(?s)1 of 2 checkpoints could not.*gpt: .*has not answered.*--resume"):
        evaluate(tmp_path, mine, suites=SUITES, report=False)  # type: ignore[arg-type]
    out = tmp_path / "out"
    assert list(json.loads((out / "results.json").read_text())["checkpoints"]) == ["base"]
    first = len(server.asked)
    broken.set()
    mine["renamed"] = mine.pop("gpt")
    evaluate(tmp_path, mine, "--resume", suites=SUITES, report=False)  # type: ignore[arg-type]
    results = json.loads((out / "results.json").read_text())
    paid = results["endpoints"]["renamed"]
    distinct = {json.dumps(body, sort_keys=True) for body in server.asked}
    assert paid["replies"] == len(distinct) and len(server.asked) > first
    assert paid["prompt_tokens"] == 10 * len(distinct) and paid["completion_tokens"] == 4 * len(distinct)
    assert paid["cost"] == pytest.approx((2.0 * 10 + 10.0 * 4) * len(distinct) / 1e6)
    assert not (out / "evaluation_rows").exists()
    assert f"renamed: {len(distinct)} replies, {10 * len(distinct)} tokens of prompts" in capsys.readouterr().out
    lake = results["checkpoints"]["renamed"]["envs"]["frozen_lake"]
    assert lake["episodes"] == 3 and lake["invalid_turns"] == 0 and lake["crashed"] == 0


@pytest.mark.thorough
def test_the_key_is_sent_and_never_written_or_said(
    serving: Any,
    checkpoints: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    said: list[str] = []
    small = {"math": SUITES["math"]}
    echo = {"status": 200}

    def behave(number: int, body: dict[str, Any]) -> Any:
        if echo["status"] == 200:
            return 200, {}, {**completion(f"<think>I got Bearer {KEY}</think>"), "usage": None}
        return echo["status"], {}, f"bad key {KEY}".encode()

    server = serving(behave)
    mine = {"base": checkpoints["base"], "gpt": served(server, api_key_env="MY_KEY", attempts=2)}
    evaluate(tmp_path / "fine", mine, suites=small)  # type: ignore[arg-type]
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert "did not report the tokens of 6 replies" in capfd.readouterr().out
    assert "I got Bearer ***" in (tmp_path / "fine" / "out" / "transcripts.jsonl").read_text()
    for status in (400, 401, 500):
        echo["status"] = status
        with pytest.raises(UserError) as problem:
            evaluate(tmp_path / str(status), mine, suites=small)  # type: ignore[arg-type]
        said.append(str(problem.value))
    assert "bad key ***" in said[0] and "refuses the key in MY_KEY (status 401)" in said[1]
    monkeypatch.setenv("MY_KEY", f"{KEY}\nX-Other: 1")
    for change in ({"api_key_env": "MY_KEY"}, {"api_key_env": KEY}, {"api_key": KEY}, {"endpoint": f"http://{KEY}@h/v1"},
                   {"api_key_env": "gsk_8rNvery_s"}, {"endpoint": f"http://h/v1?key={KEY}"}):  # fmt: skip
        with pytest.raises(UserError) as problem:
            wrong = {**mine, "gpt": served(server, **change)}
            evaluate(tmp_path / "wrong", wrong, suites=small)  # type: ignore[arg-type]
        said.append(str(problem.value))
    captured = capfd.readouterr()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "evaluate.yaml":  # where this test has put the key itself
            assert b"qzx7vkw" not in path.read_bytes(), path
    assert not any("qzx7vkw" in text or "gsk_8" in text for text in [*said, captured.out, captured.err])


def test_what_is_wrong_in_the_config_is_told_before_any_work(
    checkpoints: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def problem(suites: dict[str, Any], **changes: Any) -> str:
        with pytest.raises(UserError) as told:
            gpt = {"endpoint": "http://h/v1", "model": "m", **changes}
            evaluate(tmp_path, {"base": checkpoints["base"], "gpt": gpt}, suites=suites)  # type: ignore[arg-type]
        return str(told.value)

    monkeypatch.delenv("NO_KEY", raising=False)
    small = {"math": SUITES["math"]}
    assert "checkpoints.gpt: the environment variable NO_KEY" in problem(
        small, api_key_env="NO_KEY", endpoint="https://h/v1"
    )
    monkeypatch.setenv("A_KEY", "a")
    for place in ("http://h/v1", "http://127.0.0.1.example/v1"):
        assert "could read the key in" in problem(small, api_key_env="A_KEY", endpoint=place)
    assert "checkpoints.gpt.endpoint: this is not the address" in problem(small, endpoint="h/v1")
    assert "checkpoints.gpt.modle: unknown key; did you mean `checkpoints.gpt.model`?" in problem(small, modle="m")
    wrong = {"preferences": {"n": 2, "reference": "gpt"}}
    told = problem(wrong)
    assert "reference is `gpt`, which is not among the checkpoints base, and a server has no rewards" in told
    assert "write suites.preferences.reference=base" in told


def test_without_a_local_checkpoint_repetition_is_left_out(serving: Any, tmp_path: Path) -> None:
    server = serving(good)
    suites = {"math": SUITES["math"], "repetition": SUITES["repetition"], "envs": SUITES["envs"]}
    out = evaluate(tmp_path, {"gpt": served(server), "other": served(server)}, suites=suites)  # type: ignore[arg-type]
    results = json.loads((out / "results.json").read_text())
    assert results["endpoints"]["gpt"] == results["endpoints"]["other"]  # each was asked for itself
    assert len(server.asked) == 2 * results["endpoints"]["gpt"]["replies"]
    for name in ("gpt", "other"):
        assert set(results["checkpoints"][name]) == {"math", "envs"}
        assert results["endpoints"][name]["left_out"].keys() == {"repetition"}
    assert (out / "report.html").exists()


def test_what_an_endpoint_answered_stands_under_what_it_was_asked(
    checkpoints: dict[str, str],
    tmp_path: Path,
) -> None:
    """Another device or dtype is no other endpoint; another address or model is."""

    def path(**changes: Any) -> Path:
        gpt = {"endpoint": "http://h/v1", "model": "m"} | changes.pop("gpt", {})
        mine = {"base": checkpoints["base"], "gpt": gpt}
        cfg = resolved(tmp_path, mine, suites={"math": SUITES["math"]}, **changes)  # type: ignore[arg-type]
        return store.Store(cfg, tasks.build_tasks(cfg)).path(store.Unit("gpt", 0))

    assert path() == path(dtype="bfloat16") == path(gpt={"timeout": 9, "concurrency": 1, "price_input": 1})
    assert len({path(), path(gpt={"model": "n"}), path(gpt={"endpoint": "http://g/v1"}), path(seed=1)}) == 4


def tool_calls(*arguments: str | dict[str, Any], name: str = "calculate", text: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": each}}
        for n, each in enumerate(arguments)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 4}
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    return {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}


@pytest.mark.parametrize("local", [True, False])
def test_an_endpoint_calls_tools_and_reads_their_results(
    serving: Any, checkpoints: dict[str, str], tmp_path: Path, local: bool
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"What is {n} + 3?", "answer": str(n + 3)}) + "\n" for n in range(60))
    )

    def behave(number: int, body: dict[str, Any]) -> Any:
        question, results = body["messages"][0]["content"], [m for m in body["messages"] if m["role"] == "tool"]
        if not results:
            return 200, {}, tool_calls(json.dumps({"expression": question[8:-1]}), "{", text="I add.")
        if len(results) == 2:
            return 200, {}, tool_calls({"expression": "1/0"})
        return 200, {}, completion(results[0]["content"])

    server = serving(behave)
    env = {
        "name": "prompts", "tools": ["examples.own_tool:calculate"],
        "options": {"path": str(rows), "rewards": ["exact_match"]},
    }  # fmt: skip
    suite = {"envs": [env], "episodes": 3, "max_completion_length": 300, "max_context": 3000, "settings": ["greedy"]}
    mine = {**({"base": checkpoints["base"]} if local else {}), "gpt": served(server)}
    out = evaluate(tmp_path / "run", mine, suites={"envs": suite})  # type: ignore[arg-type]
    told = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
    played = [row for row in told if row["checkpoint"] == "gpt"]
    assert len(played) == 3 and all(row["success"] and not row["crashed"] for row in played)
    assert all((row["calls"], row["failed_calls"]) == (3, 2) for row in played)
    assert played[0]["messages"][1]["content"].startswith("I add.\n<tool_call>")
    assert len(server.asked) == 9
    last = next(body for body in server.asked if len(body["messages"]) == 6)
    (tool,) = last["tools"]
    assert tool["function"]["name"] == "calculate" and tool["function"].keys() == {"name", "description", "parameters"}
    _, first, *results = last["messages"][:4]
    assert first["content"] == "I add." and [call["id"] for call in first["tool_calls"]] == ["call_0", "call_1"]
    assert [each["tool_call_id"] for each in results] == ["call_0", "call_1"]
    assert results[0]["content"].isdecimal() and "not valid JSON" in results[1]["content"]
    again, result = last["messages"][4:]
    assert again["content"] is None and result["tool_call_id"] == "call_0" and "ZeroDivisionError" in result["content"]


def test_calls_that_cannot_be_read_are_no_answer_and_without_tools_there_are_none() -> None:
    for calls in (3, [3], [{"function": {"name": 3}}], [{"function": {"name": "f", "arguments": 3}}]):
        answer = completion("Hi")
        answer["choices"][0]["message"]["tool_calls"] = calls
        with pytest.raises(Nonsense, match="tool_calls cannot be read"):
            read_reply(answer, calls=True)
        assert read_reply(answer) == Reply("Hi", True, 10, 4)
    with pytest.raises(Nonsense, match="half a character"):
        read_reply(tool_calls("\ud800"), calls=True)
    masked = read_reply(tool_calls("my key"), calls=True).changed(lambda text: text.replace("key", "***"))
    assert masked.calls[0]["function"]["arguments"] == "my ***"


def test_a_message_takes_as_much_of_the_context_as_in_a_local_model(tiny_chat: Any) -> None:
    chat = TextChat(tiny_chat)
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Now?"}]
    ids = chat.prompt(messages)
    assert len(ids) == len(tiny_chat.prompt(messages)) and chat.of(ids) == messages
    said = chat.completion(Reply("Right", True, 1, 1))
    assert said.ids[-1] == STOP and chat.decode(said.ids[:-1]) == "Right"
    more = chat.extend("Next?")
    assert len(more) == len(tiny_chat.extend("Next?"))
    told = [message["content"] for message in chat.of([*ids, *said.ids, *more])]
    assert told == ["Rules.", "Now?", "Right", "Next?"]
    assert TextChat(None).prompt(messages) and TextChat(None).content_ids("<think>") == []
