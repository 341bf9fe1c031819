"""Does `posttrain env play` show what the model sees, and play what is typed?"""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import ROOT

import envs
from envs import check, play
from envs.base import TextEnv
from envs.episode import Episode
from envs.protocol import Protocol


def played(typed: str, *command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert play.main([*command]) == 0
    return capsys.readouterr().out


def test_the_text_is_the_models_and_the_expert_wins(monkeypatch, capsys) -> None:
    env = envs.make("frozen_lake", size=5)
    episode, typed = Episode(env, Protocol.of(env), 4, "test"), []
    while not episode.done:
        typed.append(env.expert())
        episode.step(f"<think></think><answer>{typed[-1]}</answer>")
    shown = played(
        "\n".join(typed), "frozen_lake", "size=5", "--seed", "4", "--split", "test",
        monkeypatch=monkeypatch, capsys=capsys,
    )  # fmt: skip
    at = 0
    for message in episode.messages:
        assert message["content"] in shown[at:], message
        at = shown.index(message["content"], at)
    assert "[reward 1]" in shown and shown.endswith(f"Solved after {episode.turns} turns, return 1.\n")
    assert f"-- last state\n{env.observe()}\n" in shown


def test_thoughts_tags_and_nonsense(monkeypatch, capsys) -> None:
    typed = "# it is there \n\nLeft\n<think>a</think><answer>\nDown\n</answer>\n<think>Up\nfly\n"
    shown = played(typed, "frozen_lake", "frozen=1.0", monkeypatch=monkeypatch, capsys=capsys)
    assert "<think>it is there</think><answer>Left</answer>" in shown
    assert "<think>a</think><answer>\nDown\n</answer>\n[reward 0]" in shown
    assert "<think>Up\n[reward 0, penalty -0.1, invalid answer]" in shown
    assert "<think></think><answer>fly</answer>\n[reward 0, penalty -0.1, invalid answer]" in shown
    assert "That was not a valid answer. " in shown and '"fly" is not one of the actions.' in shown
    assert shown.endswith("Not solved after 4 turns, 2 of them invalid, return -0.2. Ended by you.\n")


def test_the_turns_run_out(monkeypatch, capsys) -> None:
    shown = played("fly\n" * 9, "sokoban", "--turns", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert "You answer once. First, think step by step" in shown
    assert shown.endswith("1 turn, 1 of them invalid, return -0.1. Out of turns.\n")


def test_other_words_and_whole_answers(monkeypatch, capsys) -> None:
    shown = played("fly\n", "sokoban", "--turns", "1", "--style", "compact", monkeypatch=monkeypatch, capsys=capsys)
    assert "At most 1 turn, one action. Reply" in shown
    shown = played("# The result is 7.\n", "prompts", monkeypatch=monkeypatch, capsys=capsys)
    assert "you> # The result is 7.\n[reward " in shown and "system" not in shown


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["frozen_lake", "--style", "plane"], 'Did you mean "plain"'),
        (["frozen_lak"], 'Did you mean "frozen_lake"'),
        (["frozen_lake", "siz=4"], 'Did you mean "size"'),
        (["frozen_lake", "size"], "name=value"),
        (["frozen_lake", "--split", "tset"], 'Did you mean "test"'),
        (["frozen_lake", "--seed", "-1"], "at least 0"),
        (["frozen_lake", "--turns", "0"], "at least 1"),
    ],
)
def test_bad_input_is_told_in_one_paragraph(command, says, capsys) -> None:
    assert play.main(command) == 2
    told = capsys.readouterr()
    assert says in told.err and not told.out and "\n\n" not in told.err


class Red(TextEnv):
    def __init__(self, render_mode: str | None = None) -> None:
        raise ValueError("\x1b[31mred\nand blue")


@pytest.mark.parametrize("main", [play.main, check.main])
def test_what_an_environment_raises_does_not_control_the_terminal(main, monkeypatch, capsys) -> None:
    monkeypatch.setattr(envs, "_by_name", lambda name: Red)
    monkeypatch.setattr(Red, "__abstractmethods__", frozenset())
    assert main(["red"]) == 2 and capsys.readouterr().err == "error: \\x1b[31mred and blue\n"


@pytest.mark.parametrize(
    ("command", "typed", "says"),
    [
        (["search_qa", "retriever=http://127.0.0.1:9"], "search[x]\n", "retriever http://127.0.0.1:9 gave no results"),
        (["lean", "backend=http://127.0.0.1:9"], "intro h\n", "Lean server at http://127.0.0.1:9 does not answer"),
    ],
)
def test_a_server_that_is_dead_is_told_in_one_paragraph(command, typed, says, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert play.main(command) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1
    assert check.main([*command, "--episodes", "1"]) == 2
    told = capsys.readouterr()
    assert says in told.err and told.err.count("\n") == 1 and "broken" not in told.out


@pytest.mark.slow
def test_a_pipe_of_bytes_and_a_terminal_that_is_interrupted() -> None:
    command = [sys.executable, "-m", "envs.play", "frozen_lake", "frozen=1.0"]
    done = subprocess.run(command, cwd=ROOT, input=b"\xff\xfe\x00\nLeft\n", capture_output=True, timeout=60)
    assert done.returncode == 0 and b"Ended by you." in done.stdout and not done.stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    ) as running:  # fmt: skip
        os.close(theirs)
        try:
            assert b"you>" in read_until(ours, b"you>")
            shown = b""
            for _ in range(10):  # an interrupt between the prompt and the wait for a line is not heard
                running.send_signal(signal.SIGINT)
                shown += read_until(ours, b"Ended by you.", seconds=3)
                if b"Ended by you." in shown:
                    break
            assert b"Ended by you." in shown and b"Traceback" not in shown and running.wait(timeout=30) == 0
        finally:
            running.kill()
            os.close(ours)


def read_until(terminal: int, wanted: bytes, seconds: float = 30) -> bytes:
    shown, end = b"", time.monotonic() + seconds
    while wanted not in shown and select.select([terminal], [], [], max(0, end - time.monotonic()))[0]:
        shown += os.read(terminal, 4096)
    return shown
