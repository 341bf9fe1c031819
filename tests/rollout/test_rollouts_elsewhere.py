"""Does phase 3 learn from what servers played as from what it plays itself, also ahead of the learner?"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_phase3 import rows, settings, train, weights
from test_sharding import FSDP2, launched
from test_vllm_server import StandIn, llama, standing_in
from tiny_runs import ROOT
from waiting import wait_until

from posttrain.models.chat import Chat
from posttrain.rollout.engines.remote import RemoteSampler
from posttrain.runtime import checkpoint
from posttrain.types import UserError

LEARNS = {"filter": {"strategy": "none", "keep_zero": True}, "advantage": "arpo", "importance_sampling_clip_max": 2.0}


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Chat) -> Path:
    def write(out: Path) -> None:
        llama().save_pretrained(out)
        tiny_chat.save(out)

    folder = tmp_path_factory.mktemp("player") / "final"
    return checkpoint.save(folder, write, phase="phase2", chat_template_sha256=tiny_chat.hash)


def run_of(folder: Path, player: Path, **rollout: Any) -> Path:
    """The config file of a run of three steps, whose output is beside it."""
    folder.mkdir(exist_ok=True)
    few = {"episodes": 4, "final_episodes": 4}
    rollout = {"max_context": 448, "max_completion_length": 12, **rollout}
    file = folder / "run.yaml"
    return settings(file, player, rollout=rollout, algorithm=LEARNS, trainer={"max_steps": 3}, evaluation=few)


def elsewhere(servers: list[StandIn], **more: Any) -> dict[str, Any]:
    return {"engine": "vllm_server", "servers": [server.url for server in servers], **more}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, player: Path) -> Path:
    file = run_of(tmp_path_factory.mktemp("here"), player)
    train(file)
    return file.with_name("run")


def check_equal(here: Path, there: Path) -> None:
    ours, theirs, before = (weights(run / f"checkpoint-{n}") for run, n in ((there, 3), (here, 3), (here, 1)))
    assert max((before[name] - theirs[name]).abs().max().item() for name in ours) > 1e-4, "it has learned"
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-5
    for ours, theirs in zip(rows(there), rows(here), strict=True):
        for key in ("rollout/reward", "rollout/tokens", "rollout/logprob", "evaluation/success", "policy/loss"):
            assert (key in ours) == (key in theirs)
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4, abs=1e-5), key


@pytest.mark.thorough
def test_two_servers_and_this_process_make_the_same_run(
    here: Path, player: Path, tmp_path: Path, tiny_chat: Chat
) -> None:
    with standing_in(tiny_chat, 2) as servers:
        train(run_of(tmp_path, player, **elsewhere(servers)))
        assert all(server.version >= 3 for server in servers), "both played, with weights of every step"
    check_equal(here, tmp_path / "run")
    gaps = [row["policy/sampler_gap"] for row in rows(tmp_path / "run") if "policy/loss" in row]
    assert len(gaps) == 3 and max(gaps) < 1e-4


@pytest.mark.thorough
def test_a_server_that_dies_changes_nothing_of_the_run(
    here: Path, player: Path, tmp_path: Path, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RemoteSampler._begin
    with standing_in(tiny_chat, 2) as servers:

        def begin(self: RemoteSampler, turns: Any) -> None:
            if self.servers.version == 2 and not servers[1].released.is_set() and len(self._seeds) > 2:
                servers[1].die()  # in the middle of the rollout of the second step
            honest(self, turns)

        monkeypatch.setattr(RemoteSampler, "_begin", begin)
        train(run_of(tmp_path, player, **elsewhere(servers)))
        assert servers[1].version == 2 and servers[0].version >= 3
    check_equal(here, tmp_path / "run")


@pytest.mark.parametrize("ahead", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_that_plays_ahead_learns_from_nothing_that_is_older_than_asked(
    player: Path, tmp_path: Path, tiny_chat: Chat, ahead: int
) -> None:
    with standing_in(tiny_chat, 2) as servers:
        file = run_of(tmp_path, player, **elsewhere(servers, max_staleness=ahead))
        train(file, "trainer.max_steps=4", "evaluation.every=4")
    table = [row for row in rows(tmp_path / "run") if "rollout/staleness" in row]
    assert [row["step"] for row in table] == [1, 2, 3, 4]
    assert table[0]["rollout/staleness"] == 0 < max(row["rollout/staleness"] for row in table)
    assert all(row["rollout/staleness_max"] <= ahead and row["policy/loss"] == row["policy/loss"] for row in table)


def test_wrong_configs_are_told(player: Path, tmp_path: Path) -> None:
    for rollout, words in [
        ({"engine": "vllm_server"}, "needs `rollout.servers`"),
        ({"servers": ["http://localhost:1"]}, "write `rollout.engine: vllm_server` as well"),
        ({"engine": "vllm_server", "servers": ["localhost:1"]}, "which is not an address such as http"),
        ({"engine": "vllm_server", "servers": ["http://a:1", "http://a:1/"]}, "names a server twice"),
        ({"engine": "vllm_server", "servers": ["http://localhost:1", "http://127.0.0.1:1/"]}, "names a server twice"),
        ({"max_staleness": 1}, "above 0 needs `rollout.engine: vllm_server`"),
    ]:
        with pytest.raises(UserError, match=words):
            train(run_of(tmp_path, player, **rollout))
    file = run_of(tmp_path, player, engine="vllm_server", servers=["http://localhost:1"], max_staleness=1)
    with pytest.raises(UserError, match="importance_sampling_clip_max: 2"):
        train(file, "algorithm.importance_sampling_clip_max=null")
    with pytest.raises(UserError, match="is not given four-bit weights"):
        train(file, "model.tuning=qlora")
    with pytest.raises(UserError, match="There is no vLLM server at http://localhost:1"):
        train(file)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{}, FSDP2], ids=["copies", "fsdp2"])
def test_two_processes_with_a_server_each_make_the_same_run(
    here: Path, player: Path, tmp_path: Path, tiny_chat: Chat, sharding: dict[str, str]
) -> None:
    with standing_in(tiny_chat, 2) as servers:
        file = run_of(tmp_path, player, **elsewhere(servers))
        command = ("train_phase3_starpo.py", "--config", str(file))
        result = launched(2, *command, env=sharding)
        assert result.returncode == 0, result.stderr
        assert all(server.version >= 3 for server in servers)
        result = launched(2, *command, f"output_dir={tmp_path / 'other'}", f"rollout.servers=[{servers[0].url}]")
        assert result.returncode == 2 and "names 1 servers for 2 processes" in " ".join(result.stderr.split())
    check_equal(here, tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_plays_ahead_stops_at_a_signal_and_goes_on(player: Path, tmp_path: Path, tiny_chat: Chat) -> None:
    with standing_in(tiny_chat, 2) as servers:
        file = run_of(tmp_path, player, **elsewhere(servers, max_staleness=1))
        command = [sys.executable, "train_phase3_starpo.py", "--config", str(file), "trainer.max_steps=12"]
        command += ["evaluation.every=20", "checkpoint.every=20"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), 120)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[1]
        assert process.returncode == 143, output
        (left,) = (tmp_path / "run").glob("checkpoint-*")
        stopped = int(left.name.split("-")[1])
        train(file, *command[4:], f"rollout.servers=[{servers[1].url}]", "--resume")
    table = {row["step"]: row for row in rows(tmp_path / "run") if "rollout/staleness" in row}
    assert list(table) == list(range(1, 13)) and stopped < 11
    assert table[stopped + 1]["rollout/staleness"] == 0, "what was played ahead is played again"
