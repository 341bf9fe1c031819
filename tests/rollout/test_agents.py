"""Are the turns that an agent program asks for tied to its episode, and trained in the contexts they were sampled in?

Most programs here are of the standard library alone, which starts at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from test_rollout import model as model  # a fixture
from test_vllm_server import connected, llama, standing_in
from transformers import PreTrainedModel
from waiting import wait_until

from posttrain.config import EnvSection, ProtocolSection
from posttrain.models.chat import Chat
from posttrain.rollout.agents import programs, server
from posttrain.rollout.agents.game import AgentGame
from posttrain.rollout.agents.programs import Clock, ProgramEnd
from posttrain.rollout.agents.requests import Asked
from posttrain.rollout.agents.server import AgentServer
from posttrain.rollout.engines.base import Histories
from posttrain.rollout.episodes import Context, new_episode, open_sampler, play
from posttrain.types import Completion, SamplingParams, Trajectory

PARAMS = SamplingParams(max_new_tokens=64)
ROOT = Path(__file__).parents[2]
ASK = """
import http.client, json, os, signal, sys
from urllib.parse import urlsplit

def send(body, path="/chat/completions", headers={}, key=None, timeout=60):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout)
    key = os.environ["OPENAI_API_KEY"] if key is None else key
    connection.request("POST", url.path + path, json.dumps(body), {"Authorization": f"Bearer {key}", **headers})
    reply = connection.getresponse()
    return reply.status, reply.read().decode()

def ask(messages, **more):
    status, text = send({"model": "any", "messages": messages, **more})
    assert status == 200, text
    return json.loads(text)["choices"][0]

def user(text): return {"role": "user", "content": text}
def said(choice): return {"role": "assistant", "content": choice["message"]["content"]}
row = json.load(sys.stdin)
"""


class Answering(Histories):
    """An engine that writes what a function of the conversation's text says.

    It begins when `ready` is true, and `then` is called when it has told what it has written.
    """

    def __init__(
        self,
        chat: Chat,
        answer: Callable[[str], str],
        ready: Callable[[], object] = lambda: True,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self.chat, self.answer, self.ready, self.then = chat, answer, ready, then
        self.most_open = self.written = 0

    def converse(self, turns, params, then) -> None:
        while turns:
            self.most_open = max(self.most_open, len(self._ids))
            wait_until(self.ready)
            finished = []
            for handle, _ in turns:
                text = self.answer(str(self.chat.tokenizer.decode(self._ids[handle])))
                ids = [*self.chat.content_ids(text), self.chat.stop_id][: params.max_new_tokens]
                self._ids[handle] += ids
                self.written += 1
                done = ids[-1] == self.chat.stop_id
                finished.append((handle, Completion(ids, [-0.5] * len(ids), done)))
            turns = then(finished)
            self.then()

    def still_open(self) -> int:
        """Return how many conversations are open."""
        return len(self._ids)


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The requests that have come to the thread that plays."""
    came: list[Asked] = []
    admit = AgentServer.admit

    def admitting(server: AgentServer, game: AgentGame, ask: Callable[[AgentGame, Asked], None]) -> str:
        def noted(game: AgentGame, asked: Asked) -> None:
            ask(game, asked)
            came.append(asked)

        return admit(server, game, noted)

    monkeypatch.setattr(AgentServer, "admit", admitting)
    return came


def section(tmp_path: Path, code: str, *, rewards: Any = None, **agent: Any) -> EnvSection:
    """An environment whose agent is a program of this code, after ASK; its rows ask "What is n?"."""
    (tmp_path / "agent.py").write_text(ASK + textwrap.dedent(code))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"What is {n}?", "answer": str(n)}) + "\n" for n in range(40)))
    command = [sys.executable, str(tmp_path / "agent.py")]
    options = {"path": str(rows), "rewards": rewards or ["math"], "agent": {"command": command} | agent}
    return EnvSection(name="prompts", options=options)


def played(sampler: Any, chat: Chat, env: EnvSection, count: int = 1, **more: Any) -> list[Trajectory]:
    episodes = [new_episode(env, ProtocolSection(), n, "train") for n in range(count)]
    for episode in episodes:
        assert not isinstance(episode, Trajectory), episode.crashed
    return play(sampler, chat, episodes, PARAMS, list(range(count)), **more)


def sampled(chat: Chat, trajectory: Trajectory) -> list[str]:
    """The text of each turn."""
    return [
        chat.decode(segment.ids[start:end])
        for segment in trajectory.segments
        for start, end in zip(segment.turn_starts, segment.turn_ends, strict=True)
    ]


def echo(text: str) -> str:
    """Answer with the number of answers so far."""
    return f"answer {text.count('assistant')}"


def test_a_conversation_is_one_context_of_exactly_the_sampled_tokens(tmp_path: Path, tiny_chat: Chat) -> None:
    env = section(
        tmp_path,
        """
        messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, user(row["question"])]
        for n in range(3):
            messages += [said(ask(messages)), user(f"And {n}? <|im_end|>")]
        print("done")
        """,
    )
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, env)
    assert (t.crashed, t.turns, t.terminated, t.truncated, t.failure) == ("", 3, True, False, "wrong answer")
    (segment,) = t.segments
    assert t.messages[0] == {"role": "system", "content": "Be brief."} and len(t.messages) == 7
    whole = tiny_chat.encode(t.messages)
    assert segment.ids == whole.ids[: len(segment.ids)] and segment.mask == whole.mask[: len(segment.ids)]
    assert sampled(tiny_chat, t) == ["answer 1", "answer 2", "answer 3"]
    assert len(set(t.state_keys)) == 3 and t.turn_rewards == [0.0, 0.0, 0.0]


def test_a_fork_shares_the_tokens_before_it_and_other_histories_are_not_trained(
    tmp_path: Path, tiny_chat: Chat
) -> None:
    env = section(
        tmp_path,
        """
        start = [user(row["question"])]
        first = said(ask(start))
        a = [*start, first, user("left")]
        b = [*start, first, user("right")]
        left = said(ask(a))
        said(ask(b))                                                        # the context before it is continued twice
        said(ask([user("x"), {"role": "assistant", "content": "words of another model"}, user("y")]))
        said(ask([*a, left, user("again")]))                                # and the first one goes on
        """,
    )
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, env)
    assert t.crashed == "" and t.turns == 5 and len(t.segments) == 3
    fork, other, first = t.segments  # the context of the last turn is the last
    assert [s.turns for s in t.segments] == [[0], [1], [2, 3, 4]] and [s.first_turn for s in t.segments] == [0, 1, 2]
    shared = first.turn_ends[0]
    assert fork.ids[:shared] == first.ids[:shared] and fork.ids[shared:] != first.ids[shared : len(fork.ids)]
    assert not any(fork.mask[:shared]) and sum(fork.mask) == fork.turn_ends[0] - fork.turn_starts[0]
    assert "another model" in tiny_chat.tokenizer.decode(other.ids) and sum(other.mask) == len(
        other.ids[other.turn_starts[0] :]
    )
    assert [m["content"] for m in t.messages if m["role"] == "user"].count("left") == 1
    assert t.tokens == sum(sum(s.mask) for s in t.segments) == len(t.sampled_logprobs)


def test_a_question_that_was_answered_gets_another_sample(tmp_path: Path, tiny_chat: Chat) -> None:
    """Also where the client repeats it because its first attempt never came here."""
    env = section(
        tmp_path,
        """
        body = {"messages": [user(row["question"])]}
        found = [send(body, headers={"x-stainless-retry-count": str(n)})[1] for n in range(3)]
        print(*[json.loads(text)["choices"][0]["message"]["content"] for text in found])
        """,
    )
    numbers = iter(range(9))
    (t,) = played(Answering(tiny_chat, lambda text: f"sample {next(numbers)}"), tiny_chat, env)
    assert t.crashed == "" and t.turns == 3 and len(t.segments) == 3
    assert sampled(tiny_chat, t) == ["sample 0", "sample 1", "sample 2"]


def test_answers_that_were_left_go_to_those_who_ask_the_same(tmp_path: Path, tiny_chat: Chat) -> None:
    """Several equal requests may be left, before their answers are written and just as they are sent."""
    episode = new_episode(section(tmp_path, ""), ProtocolSection(), 0, "train")
    assert not isinstance(episode, Trajectory)
    game = AgentGame(tiny_chat, episode, 100, 0)

    def ask() -> tuple[Asked, Any]:
        asked = Asked([{"role": "user", "content": "a"}], [])
        return asked, game.begin_turn(asked)

    def text(asked: Asked) -> Any:
        answer: Any = asked.answer.result(0)
        return answer.message["content"]

    assert game.begin_turn(Asked([{"role": "user", "content": "a"}], [], left=True)) is None
    first, turns = zip(*[ask() for _ in range(3)], strict=True)
    first[0].left = first[1].left = True
    for n, turn in enumerate(turns):
        game.end_turn(turn, Completion([*tiny_chat.content_ids(f"{n}"), tiny_chat.stop_id], [0.0] * 2, True))
    again = [ask() for _ in range(3)]
    assert [turn is None for _, turn in again] == [True, True, False] and text(first[2]) == "2"
    assert [text(asked) for asked, _ in again[:2]] == ["0", "1"] and game.trajectory.turns == 3
    again[1][0].left = True  # as its answer was sent
    assert text(ask()[0]) == "1" and ask()[1] is not None


def test_an_answer_that_was_left_counts_as_a_turn_when_it_is_taken(tmp_path: Path, tiny_chat: Chat) -> None:
    """Another answer that is being written may be the last."""
    episode = new_episode(section(tmp_path, ""), ProtocolSection(max_turns=1), 0, "train")
    assert not isinstance(episode, Trajectory)
    game = AgentGame(tiny_chat, episode, 100, 0)
    one, two, again = (Asked([{"role": "user", "content": text}], []) for text in "aba")
    answer = Completion([*tiny_chat.content_ids("x"), tiny_chat.stop_id], [0.0] * 2, True)
    turn = game.begin_turn(one)
    one.left = True
    assert turn is not None
    game.end_turn(turn, answer)
    turn = game.begin_turn(two)
    assert turn is not None and game.begin_turn(again) is None and not again.answer.done()
    game.end_turn(turn, answer)
    assert game.held_requests() == [again] and game.begin_turn(again) is None
    refused: Any = again.answer.result(0)
    assert "All 1 answers" in refused.words and game.trajectory.turns == 1


def printed(prompts: Any, completions: Any, output: list[str], exit_code: list[int], **columns: Any) -> list[float]:
    """Whether a program printed the last answer; rewards see messages, the row and how the program ended."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts) and exit_code == [0] * len(output)
    return [float(text.strip() == said[-1]["content"]) for text, said in zip(output, completions, strict=True)]


@pytest.mark.parametrize("late", [False, True])
def test_a_short_timeout_gets_the_answer_in_the_end(
    tmp_path: Path, tiny_chat: Chat, arrived: list[Asked], late: bool
) -> None:
    """Whether the repeated request comes while its answer is written or after it."""
    os.mkfifo(tmp_path / "written")
    written = os.open(tmp_path / "written", os.O_RDWR)
    env = section(
        tmp_path,
        f"""
        messages = [user(row["question"])]
        for number in range(9):
            try:
                status, text = send({{"messages": messages}}, timeout=0.3)
                break
            except TimeoutError:
                pass
            if {late}:
                open({str(tmp_path / "written")!r}, "rb", 0).read(1)
        print(json.loads(text)["choices"][0]["message"]["content"])
        """,
        rewards=[f"{__name__}:printed"],
    )

    def ready() -> bool:
        return len(arrived) > (0 if late else 1) and arrived[0].left

    sampler = Answering(tiny_chat, echo, ready, lambda: os.write(written, b"x"))
    (t,) = played(sampler, tiny_chat, env)
    os.close(written)
    assert (t.crashed, t.turns, t.reward, sampler.written) == ("", 1, 1.0, 1)


def test_answers_end_where_the_program_says(tmp_path: Path, tiny_chat: Chat) -> None:
    env = section(
        tmp_path,
        """
        messages = [user("one")]
        a = ask(messages, stop=["Result:", "never"])
        assert (a["message"]["content"], a["finish_reason"]) == ("Action: add ", "stop"), a
        b = ask([*messages, said(a), user("two")], max_tokens=3)
        assert b["finish_reason"] == "length", b
        c = ask([*messages, said(a), user("two"), said(b), user("three")], max_completion_length=None)
        assert c["finish_reason"] == "stop" and "Result: 5" in c["message"]["content"], c
        """,
    )
    (t,) = played(Answering(tiny_chat, lambda text: "Action: add Result: 5 and more"), tiny_chat, env)
    assert t.crashed == "" and t.turns == 3 and t.unfinished_turns == 0  # the run cut nothing off
    (segment,) = t.segments
    first = tiny_chat.decode(segment.ids[segment.turn_starts[0] : segment.turn_ends[0]])
    assert first.startswith("Action: add Result:") and "and more" not in first
    assert segment.ids[segment.turn_ends[0]] == tiny_chat.stop_id and not segment.mask[segment.turn_ends[0]]
    assert segment.turn_ends[1] - segment.turn_starts[1] == 3


HOSTILE = {
    "never_calls": ("", {}, "the model was asked for no answer, and it ended with exit code 0", 0),
    "raises": ("ask([user('a')]); 1 / 0", {}, "exit code 1: ZeroDivisionError", 1),
    "asks_for_more": (
        "ask([user('a')]); ask([user('b')], n=2)",
        {},
        "a request was refused (n is not supported here.), and it ended with exit code 1",
        1,
    ),
    "hangs": ("ask([user('a')]); signal.pause()", {"seconds": 1.0}, "took more than 1 s", 1),
    "ignores_sigterm": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); ask([user('a')]); signal.pause()",
        {"seconds": 1.0},
        "took more than 1 s",
        1,
    ),
    "kills_itself": ("ask([user('a')]); os.kill(os.getpid(), 9)", {}, "exit code -9", 1),
    "prints_endlessly": ("ask([user('a')])\nwhile True: print('x' * 100000)", {}, "printed more than", 1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_crashed_program_counts_as_crashed(
    tmp_path: Path, tiny_chat: Chat, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, limits, words, turns = HOSTILE[kind]
    monkeypatch.setattr(programs, "GRACE", 0.3)
    monkeypatch.setattr(programs, "MOST_OUTPUT", 1 << 20)
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, section(tmp_path, code, **limits))
    assert words in t.crashed and t.turns == turns and not t.success and not t.terminated and t.reward == 0


def test_a_program_that_never_ends_is_truncated_and_scored(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        messages = [user(row["question"])]
        while True:
            messages += [said(ask(messages)), user("go on")]
        """
    (t,) = played(Answering(tiny_chat, lambda text: "7 0 1"), tiny_chat, section(tmp_path, code, turns=3))
    assert (t.crashed, t.turns, t.truncated, t.terminated) == ("", 3, True, False)
    assert t.failure == "wrong answer" and len(t.messages) == 6


def test_parallel_requests_share_the_turns_that_are_left(tmp_path: Path, tiny_chat: Chat, arrived: list[Asked]) -> None:
    code = """
        import threading
        def one(n):
            status, text = send({"messages": [user(row["question"] + str(n))]})
            statuses.append(status)
        statuses = []
        jobs = [threading.Thread(target=one, args=(n,)) for n in range(8)]
        for job in jobs: job.start()
        for job in jobs: job.join()
        """
    sampler = Answering(tiny_chat, echo, lambda: len(arrived) == 8)
    (t,) = played(sampler, tiny_chat, section(tmp_path, code, turns=4))
    assert (t.crashed, t.turns, t.truncated, t.failure) == ("", 4, True, "wrong answer")


def test_requests_that_nobody_waits_for_take_no_turn(tmp_path: Path, tiny_chat: Chat, arrived: list[Asked]) -> None:
    code = """
        for n in range(5):
            try:
                send({"messages": [user(row["question"] + str(n))]}, timeout=0.05)
            except TimeoutError:
                pass
        ask([user("last")])
        """

    def ready() -> bool:
        wanted = [each.messages[0]["content"] for each in arrived if not each.left]
        return wanted == ["last"]

    sampler = Answering(tiny_chat, echo, ready)
    (t,) = played(sampler, tiny_chat, section(tmp_path, code, turns=2))
    assert (t.crashed, t.turns, t.truncated) == ("", 1, False) and sampler.written < 5


def test_a_program_that_waits_for_no_answer_ends(tmp_path: Path, tiny_chat: Chat) -> None:
    """The clock stands still while it waits, and what nobody waits for takes no turn: neither limit would end it."""
    env = section(tmp_path, "", turns=2)
    episode = new_episode(env, ProtocolSection(), 0, "train")
    assert not isinstance(episode, Trajectory)
    game, stops = AgentGame(tiny_chat, episode, 100, 0), list[int]()
    program: Any = SimpleNamespace(stop=lambda: stops.append(1))
    game.program = program

    def ask(text: str, *, waits: bool) -> Asked:
        asked = Asked([{"role": "user", "content": text}], [])
        if (turn := game.begin_turn(asked)) is not None:
            asked.left = not waits
            game.end_turn(turn, Completion([*tiny_chat.content_ids("1"), tiny_chat.stop_id], [0.0] * 2, True))
        return asked

    ask("a", waits=False)
    assert ask("a", waits=True).answer.done() and game.trajectory.turns == 1  # who asks again gets the answer
    for text in "bcd":
        assert not stops
        ask(text, waits=False)
    refused: Any = ask("e", waits=True).answer.result(0)
    assert stops == [1] and refused.status == 403
    game.end(ProgramEnd(None, "", ""))
    t = game.trajectory
    assert "it did not wait for more answers than it may have in all (2)" in t.crashed
    assert (t.turns, t.truncated, t.terminated, t.reward) == (1, False, False, 0)


@pytest.mark.parametrize("ends", [False, True])
def test_too_many_connections_are_refused_in_words(
    tmp_path: Path, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    code = f"""
        url = urlsplit(os.environ["OPENAI_BASE_URL"])
        idle = [http.client.HTTPConnection(url.hostname, url.port) for _ in range(4)]
        for each in idle:
            each.request("GET", url.path + "/models")
            each.getresponse().read()
        body = {{"messages": [user("a")]}}
        status, text = send(body)
        assert status == 503 and "More than 4 connections" in json.loads(text)["error"]["message"], text
        if {ends}: sys.exit(1)
        for each in idle: each.close()
        while send(body)[0] == 503: pass
        """
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, section(tmp_path, code))
    words = "a request was refused (More than 4 connections are open here: close those without a request.)"
    assert (words in t.crashed, t.crashed == "", t.turns) == (ends, not ends, 0 if ends else 1)


def test_half_a_surrogate_pair_harms_nothing(tmp_path: Path, tiny_chat: Chat) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    code = """
        tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
            "type": "object", "properties": {"a": {"type": "string", "description": "x"}}, "required": ["a"]}}}]
        choice = ask([user("a")], tools=tools)
        assert choice["finish_reason"] == "stop" and "ud800" in choice["message"]["content"], choice
        calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\\\ud800"}'}}]
        bad = [user("a"), {"role": "assistant", "tool_calls": calls}, user("b")]
        status, text = send({"messages": bad, "tools": tools})
        assert status == 400 and "message" in json.loads(text)["error"], text
        """
    (t,) = played(Answering(tiny_chat, lambda text: call), tiny_chat, section(tmp_path, code))
    assert t.crashed == "" and t.turns == 1


def test_what_a_program_started_ends_with_it(tmp_path: Path, tiny_chat: Chat) -> None:
    code = f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        if os.fork() == 0:
            signal.pause()
        ask([user("a")])
        os._exit(0)
        """
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, section(tmp_path, code))
    assert t.crashed == "" and t.turns == 1
    gone(int((tmp_path / "child").read_text()))


def test_a_program_plays_rows_without_a_prompt(tmp_path: Path, tiny_chat: Chat) -> None:
    env = section(tmp_path, 'ask([user(row["repo"])])', rewards=["length"])
    rows = [{"repo": f"r{number}"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = played(Answering(tiny_chat, echo), tiny_chat, env, 12)
    assert {(t.crashed, t.turns) for t in found} == {("", 1)} and len({t.level_key for t in found}) > 6


def test_the_exit_code_can_be_the_reward(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        ask([user(row["question"])])
        sys.exit([0, 3, 5][int(row["answer"]) % 3])
        """
    env = section(tmp_path, code, rewards=[{"name": "exit_code", "lost": 3}])
    env.options["prompt"] = "question"  # then the key of a level begins with it
    for t in played(Answering(tiny_chat, echo), tiny_chat, env, 12):
        kind = int(t.level_key.removeprefix("What is ").partition("?")[0]) % 3
        assert (t.success, t.reward) == (kind == 0, float(kind == 0))
        assert ("exit code 5" in t.crashed) == (kind == 2) and bool(t.crashed) == (kind == 2)


def test_a_crash_after_a_long_prompt_is_a_crash(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        status, text = send({"messages": [user("word " * 500)]})
        assert json.loads(text)["error"]["code"] == "context_length_exceeded"
        ask([user("a")])
        1 / 0
        """
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, section(tmp_path, code), context=Context(max_tokens=256))
    assert "ZeroDivisionError" in t.crashed and not t.truncated


def test_a_program_whose_requests_are_all_refused_is_told_so(tmp_path: Path, tiny_chat: Chat) -> None:
    code = 'send({"messages": [{"role": "stranger", "content": "a"}]}); sys.exit(1)'
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, section(tmp_path, code))
    assert "a request was refused (A message has the role 'stranger'" in t.crashed and "exit code 1" in t.crashed


def test_the_reward_after_the_last_turn_is_not_chance(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        for n in range(9):
            status, text = send({"messages": [user(row["question"] + str(n))]})
        """
    env = section(tmp_path, code, turns=2, rewards=[{"name": "exit_code", "lost": 1}])
    found = played(Answering(tiny_chat, echo), tiny_chat, env, 8)
    assert [(t.crashed, t.truncated, t.reward) for t in found] == [("", True, 0.0)] * 8


def test_programs_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    pid = str(tmp_path / "pid")
    child = f"import os, signal; open({pid!r}, 'w').write(str(os.getpid())); signal.pause()"
    code = f"""
import os, sys, threading
sys.path[:0] = {[str(ROOT), str(ROOT / "tests/rollout")]!r}
from envs.prompts import AgentProgram
from posttrain.rollout.agents import programs
told, tell = threading.Event(), programs.Watchdog.tell
def telling(*words):
    tell(*words)
    told.set()
programs.Watchdog.tell = telling
program = AgentProgram((sys.executable, '-c', {child!r}))
programs.RunningProgram(program, {{}}, {{}}, print).start()
told.wait()
while not os.path.exists({pid!r}) or not open({pid!r}).read():
    pass
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    gone(int(Path(pid).read_text()))


def gone(process: int) -> None:
    """Wait until a process has ended."""

    def ended() -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        return True

    wait_until(ended)


def test_a_prompt_that_is_too_long_is_refused_as_openai_does(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        messages = [user(row["question"])]
        while True:
            messages += [said(ask(messages)), user("word " * 30)]
        """
    env = section(tmp_path, code)
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, env, context=Context(max_tokens=256))
    assert (t.crashed, t.truncated, t.out_of_context) == ("", True, True) and 0 < t.context <= 256


def test_what_cannot_be_answered_is_refused(tmp_path: Path, tiny_chat: Chat) -> None:
    env = section(
        tmp_path,
        """
        good = {"messages": [user("a")]}
        seen = [
            send(good, key="wrong"), send(good | {"n": 2}), send({"messages": []}), send({"messages": 3}),
            send(good, path="/responses"), send({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            send({"messages": [{"role": "stranger", "content": "a"}]}), send(good | {"tools": [{"name": "x"}]}),
            send([1]), send({"messages": [{"role": "assistant", "tool_calls": [3]}]}), send(good | {"stop": 3}),
        ]
        assert [status for status, _ in seen] == [401, 400, 400, 400, 404, 400, 400, 400, 400, 400, 400], seen
        assert all("message" in json.loads(text)["error"] for _, text in seen), seen
        empty = {"role": "assistant", "content": None}
        ask([user("a"), empty, user("b")], temperature=1e-9, top_p=0, seed=-1, logit_bias={"5": 1})
        """,
    )
    (t,) = played(Answering(tiny_chat, echo), tiny_chat, env)
    assert t.crashed == "" and t.turns == 1


@pytest.mark.thorough
def test_many_programs_are_the_same_whatever_runs_beside_them(
    tmp_path: Path, tiny_chat: Chat, model: PreTrainedModel
) -> None:
    """With the real engine: each turn's log-probs are those of its context, and order and company change nothing."""
    env = section(
        tmp_path,
        """
        import random, threading, time
        time.sleep(random.random() / 5)
        messages = [user(row["question"])]
        messages += [said(ask(messages)), user("more")]
        jobs = [threading.Thread(target=lambda n=n: ask([*messages, user(str(n))])) for n in range(3)]
        for job in jobs: job.start()
        for job in jobs: job.join()
        said(ask(messages))
        """,
    )
    once = played(open_sampler(model, tiny_chat), tiny_chat, env, 4, slots=3)
    alone = played(open_sampler(model, tiny_chat), tiny_chat, env, 2, slots=1)
    for t in once:
        assert t.crashed == "" and t.turns == 5 and t.tokens
        for segment in t.segments:
            ids = torch.tensor([segment.ids])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            mask = torch.tensor(segment.mask)
            torch.testing.assert_close(torch.tensor(segment.logprobs)[mask], logprobs[mask[1:]], atol=1e-4, rtol=0)
    for a, b in zip(once, alone, strict=False):
        assert sorted(s.ids for s in a.segments) == sorted(s.ids for s in b.segments)


def test_servers_of_vllm_write_the_same(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        messages = [user(row["question"])]
        for n in range(3):
            messages += [said(ask(messages, max_tokens=5)), user(str(n))]
        """
    env, policy = section(tmp_path, code), llama()
    with standing_in(tiny_chat, 2) as servers:
        theirs = played(connected(tiny_chat, policy, servers, tmp_path / "weights"), tiny_chat, env, 3)
    ours = played(open_sampler(policy, tiny_chat), tiny_chat, env, 3)
    for a, b in zip(theirs, ours, strict=True):
        assert a.crashed == "" and [s.ids for s in a.segments] == [s.ids for s in b.segments]
        assert a.sampled_logprobs == pytest.approx(b.sampled_logprobs, rel=0, abs=1e-4)


def test_no_more_conversations_are_open_than_slots(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        for n in range(4):
            said(ask([user(row["question"] + str(n))]))
        """
    sampler = Answering(tiny_chat, echo)
    found = played(sampler, tiny_chat, section(tmp_path, code, parallel=8), 8, slots=3)
    assert all(t.turns == 4 and t.crashed == "" for t in found) and sampler.most_open <= 3
    assert not sampler.still_open()


def test_a_free_place_is_taken_while_others_are_answered(tmp_path: Path, tiny_chat: Chat, arrived: list[Asked]) -> None:
    class Unequal(Answering):
        """It writes the answer to "slow" when three other programs have asked."""

        def converse(self, turns, params, then) -> None:
            slow = []

            def sorted_out(turns):
                slow.extend(turn for turn in turns if "slow" in str(self.chat.tokenizer.decode(self._ids[turn[0]])))
                return [turn for turn in turns if turn not in slow]

            def others() -> bool:
                super(Unequal, self).converse(sorted_out(then([])), params, lambda done: sorted_out(then(done)))
                return len(arrived) == 4

            super().converse(sorted_out(turns), params, lambda done: sorted_out(then(done)))
            if slow:
                wait_until(others)
                super().converse(slow, params, then)

    code = f"""
        try:
            os.mkdir({str(tmp_path / "first")!r})
            ask([user("slow")])
        except FileExistsError:
            ask([user("quick")])
        """
    found = played(Unequal(tiny_chat, echo), tiny_chat, section(tmp_path, code, parallel=2), 4)
    assert [(t.crashed, t.turns) for t in found] == [("", 1)] * 4


@pytest.mark.thorough
def test_an_unmodified_agent_sixteen_at_once(tmp_path: Path, tiny_chat: Chat) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"What is {n} * 3?", "answer": str(3 * n)}) + "\n" for n in range(60))
    )
    command = [sys.executable, str(ROOT / "examples/own_agent.py"), "{{ question }}"]
    env = EnvSection(name="prompts", options={"path": str(rows), "rewards": ["math"], "agent": command})

    def react(text: str) -> str:
        question = text.rpartition("What is ")[2].partition("?")[0]
        if "Result: " in text.rpartition("What is ")[2]:
            return f"Final: {text.rpartition('Result: ')[2].partition('<')[0].strip()}"
        return f"I compute.\nAction: calculate[{question}]\nResult: 99"

    found = played(Answering(tiny_chat, react), tiny_chat, env, 16)
    assert [(t.crashed, t.success, t.turns, len(t.segments)) for t in found] == [("", True, 2, 1)] * 16


@pytest.mark.thorough
def test_tools_and_streams_through_the_openai_client(tmp_path: Path, tiny_chat: Chat) -> None:
    code = """
        import openai
        client = openai.OpenAI()
        tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}}}]
        messages = [user(row["question"])]
        reply = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.tool_calls[0].function.name == "add"
        assert json.loads(reply.message.tool_calls[0].function.arguments) == {"a": 1}
        messages += [reply.message, {"role": "tool", "tool_call_id": reply.message.tool_calls[0].id, "content": "2"}]
        stream = client.chat.completions.create(
            model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True})
        pieces = list(stream)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == "It is 2." and pieces[-1].usage.completion_tokens > 0
        print([model.id for model in client.models.list()])
        """
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answer = Answering(tiny_chat, lambda text: "It is 2." if "tool_response" in text else call)
    (t,) = played(answer, tiny_chat, section(tmp_path, code))
    assert t.crashed == "" and t.turns == 2 and len(t.segments) == 1
    assert sampled(tiny_chat, t) == [call, "It is 2."]


def test_the_clock_stands_still_while_the_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100]
    monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = Clock()
    for seconds, more in [(1, 1), (2, 1), (4, -1), (8, -1)]:
        now[0] += seconds
        assert clock.seconds() == 1
        clock.wait(more)
    now[0] += 16
    assert clock.seconds() == 17


@pytest.mark.parametrize(
    "agent, words",
    [
        ([], "has no command"),
        ("python agent.py", "has no command"),
        (["python", 3], "has the part 3, not a text"),
        (["python", "{{ nope }}"], "the template cannot be filled"),
        (["python", "{% if question"], "the template cannot be filled"),
        ({}, "has no command"),
        ([""], "has no command"),
        (["no-such-program"], "there is no program no-such-program"),
        ({"command": ["python3"], "second": 3}, "has no key second"),
        ({"command": ["python3"], "seconds": 0}, "seconds is 0"),
        ({"command": ["python3"], "turns": True}, "turns is True"),
        ({"command": ["python3"], "parallel": 257}, "parallel is 257, not a number from 1 to 256"),
    ],
)
def test_a_wrong_agent_is_said_at_once(agent: Any, words: str) -> None:
    from posttrain.rollout.episodes import open_env

    with pytest.raises(ValueError, match=words):
        open_env(EnvSection(name="prompts", options={"agent": agent}))


@pytest.mark.parametrize("lost", [None, 0, "1", True, 1.0])
def test_the_exit_code_of_a_loss_is_a_number(lost: Any) -> None:
    from posttrain.rollout.episodes import open_env

    options = {"agent": ["python"], "rewards": [{"name": "exit_code", "lost": lost}]}
    with pytest.raises(ValueError, match="with which exit code a program says that it lost"):
        open_env(EnvSection(name="prompts", options=options))


def exit_code(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.5] * len(prompts)


def test_an_own_function_may_have_any_name(tmp_path: Path, tiny_chat: Chat) -> None:
    env = section(tmp_path, "ask([user('a')])", rewards=[f"{__name__}:exit_code"])
    assert played(Answering(tiny_chat, echo), tiny_chat, env)[0].reward == 0.5
