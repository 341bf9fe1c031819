"""Does each dashboard get every figure, alarm and picture once, after a kill as well, quietly and without a network?"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_phase3 import settings, taught
from tiny_runs import ROOT, conversations, settings as tiny_run, tiny_base
from transformers import PreTrainedTokenizerFast

from posttrain.config.loading import resolve
from posttrain.config.starpo import StarPORun
from posttrain.plan import preflight
from posttrain.runtime import dashboards
from posttrain.types import UserError

# What a run leaves on each dashboard, read back by the dashboard's own reader: [step, key], once for each time.
READ_BACK = """
import collections, json, os, pathlib

def on_trackio():
    import trackio
    from trackio.sqlite_storage import SQLiteStorage
    (run,) = trackio.Api().runs("posttrain")
    assert run.config["output_dir"] and run.config["_Username"] is None, run.config
    rows = SQLiteStorage.get_logs("posttrain", run.name, run_id=run.id)
    yield from ([row["step"], key] for row in rows for key in row if key not in ("step", "timestamp"))
    yield from ([alert["step"], f"alarms/{alert['title']}"] for alert in run.alerts())
    for trace in SQLiteStorage.get_traces("posttrain", run.name, run_id=run.id):
        assert {"user", "assistant"} <= {message["role"] for message in trace["messages"]}
        yield [trace["step"], trace["key"]]
    assert all(file.read_bytes()[:4] == b"GIF8" for file in pathlib.Path(os.environ["TRACKIO_DIR"]).rglob("*.gif"))

def on_tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    (folder,) = pathlib.Path(os.environ["TENSORBOARD_LOGGING_DIR"]).iterdir()
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()
    for tag in read.Tags()["images"]:
        assert all(event.encoded_image_string.startswith(b"GIF8") for event in read.Images(tag))
        yield from ([event.step, tag] for event in read.Images(tag))
    yield from ([event.step, tag] for tag in read.Tags()["scalars"] for event in read.Scalars(tag))
    for tag in read.Tags()["tensors"]:
        yield from ([event.step, tag.removesuffix("/text_summary")] for event in read.Tensors(tag))

def on_wandb():
    from posttrain.runtime import compat
    logs = sorted(pathlib.Path(os.environ["WANDB_DIR"]).glob("wandb/offline-run-*/run-*.wandb"))
    assert len({log.name for log in logs}) == 1, "one run"
    yield from (pair for log in logs for pair in compat.read_wandb_log(log) if pair[1][0] != "_" and pair[1] != "step")
"""
KILLED_AND_RESUMED = """
import signal, sys
calls = []
sys.addaudithook(lambda name, args: calls.append((name, args)) if name in (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto") else None)
import train_phase3_starpo as phase3
from posttrain.starpo.monitoring import watch
from posttrain.starpo.monitoring.monitor import Monitor
from posttrain.starpo.monitoring.alarms import Alarm

def noticed(state, step, row, *_):  # as a rule would
    here = "rollout/reward" in row and step in (1, 3)
    return [Alarm("variance_gone", "warn", "All is alike.", "Look.", step)] if here else [], state

watch.alarms.watch = noticed
if (child := os.fork()) == 0:
    record = Monitor.record
    def killed(self, groups, state, step, tokens=None):
        record(self, groups, state, step, tokens)
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    Monitor.record = killed
    phase3.main(sys.argv[1:])
assert os.waitpid(child, 0)[1] == signal.SIGKILL
print("RESUMES", file=sys.stderr)
phase3.main([*sys.argv[1:], "--resume"])
reached = [args for name, args in calls if name != "socket.connect" or not isinstance(args[1], str)]
assert not reached, reached  # wandb speaks to a process of its own over a file
print("HELD", json.dumps([list(read()) for read in (on_trackio, on_tensorboard, on_wandb)]))
"""


def in_a_process(program: str, place: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With nothing of this machine's user, but a token, with which one could ask the Hub."""
    own = ("TRACKIO_DIR", "TENSORBOARD_LOGGING_DIR", "WANDB_DIR", "HF_HUB_OFFLINE", "WANDB_API_KEY")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    home = {"HOME": str(place), "HF_HOME": str(place / "hf"), "HF_TOKEN": "hf_" + "a" * 34, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept | home | variables, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_each_step_once(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    model, kinds = taught(tmp_path / "model", tiny_tokenizer, 0), ["trackio", "tensorboard", "wandb"]
    file = settings(
        tmp_path / "run.yaml", model,
        report_to=kinds, checkpoint={"every": 2}, diagnostics={"every": 0}, trainer={"max_steps": 4},
    )  # fmt: skip
    done = in_a_process(READ_BACK + KILLED_AND_RESUMED, tmp_path, "--config", str(file), WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr[-4000:]

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = {(row["step"], key) for row in rows for key in row if key != "step" and row[key] is not None}
    assert {step for step, _ in numbers} == {0, 1, 2, 3, 4} and (4, "final/success") in numbers
    (best,) = {int(folder.name[5:]) for folder in (tmp_path / "run").glob("best-*")} - {0} or {0}
    shown = {(step, "validation") for step in {0, best}} | {(step, "training") for step in (2, 4)}
    pictures = {(step, f"{what}/picture {n}") for step, what in shown for n in range(2 if what == "validation" else 4)}
    episodes = {(step, key.replace("picture", "episode")) for step, key in pictures}
    tables = {(step, f"{what}/table") for step, what in shown}
    alarms = {(step, "alarms/variance gone") for step in (1, 3)}
    own = {"trackio": episodes | tables, "tensorboard": episodes | {(0, "config")}, "wandb": tables}
    for kind, pairs in zip(kinds, json.loads(done.stdout.split("HELD")[1]), strict=True):
        held = Counter((step, key) for step, key in pairs)
        assert {pair: times for pair, times in held.items() if times > 1} == {}, kind
        assert held.keys() == numbers | pictures | alarms | own[kind], kind

    once, again = (part.splitlines() for part in done.stderr.split("RESUMES"))
    for lines in (once, again):  # one line of each, with the command that shows it
        told = [line for line in lines if any(word in line.lower() for word in kinds)]
        words = ["trackio show --project posttrain", "tensorboard --logdir", "wandb sync"]
        assert [word for word in words if sum(word in line for line in told) == 1] == words and len(told) == 3, told


KILLED_IN_PHASE_1 = """
import signal, sys
import train_phase1_sft as phase1
from posttrain.finetune.training import Reporter

if (child := os.fork()) == 0:
    logged = Reporter.on_log
    def killed(self, args, state, control, logs=None, **more):
        logged(self, args, state, control, logs, **more)
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
    Reporter.on_log = killed
    phase1.main(sys.argv[1:])
assert os.waitpid(child, 0)[1] == signal.SIGKILL
phase1.main([*sys.argv[1:], "--resume"])
print("HELD", json.dumps([list(read()) for read in (on_trackio, on_tensorboard, on_wandb)]))
"""


@pytest.mark.slow
def test_a_killed_and_resumed_phase_1_has_each_step_once(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for name in ("wandb", "tensorboard"):
        pytest.importorskip(name)
    base, rows = tiny_base(tmp_path / "base", tiny_tokenizer), conversations(tmp_path / "rows.jsonl")
    file = tiny_run(tmp_path / "run.yaml", "messages", base, rows, eval_strategy="steps", eval_steps=3)
    more = ("--config", str(file), "report_to=[trackio,tensorboard,wandb]")
    done = in_a_process(READ_BACK + KILLED_IN_PHASE_1, tmp_path, *more, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr[-4000:]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = {(row["step"], dashboards.as_transformers(key)) for row in written for key in row if key != "step"}
    assert {(step, "train/loss") for step in range(1, 13)} | {(3, "eval/loss"), (12, "eval/loss")} <= numbers
    for pairs in json.loads(done.stdout.split("HELD")[1]):
        held = Counter((step, key) for step, key in pairs)
        assert max(held.values()) == 1 and held.keys() - {(0, "config")} == numbers


def config(tmp_path: Path, *kinds: str) -> StarPORun:
    return resolve(StarPORun, settings(tmp_path / "run.yaml", tmp_path, report_to=list(kinds)))


def test_a_dashboard_that_is_added_gets_all_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    clock = itertools.count(1)
    monkeypatch.setattr(dashboards.time, "strftime", lambda _: str(next(clock)))
    (tmp_path / "run").mkdir()
    rows = [{"step": 1, "loss": 2.0, "eval_loss": None}, {"step": 2, "loss": 1.0}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alarm = {"step": 2, "name": "not_finite", "severity": "stop", "message": "It is inf.", "remedy": "Stop."}
    (tmp_path / "run" / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    assert dashboards.open_dashboards(config(tmp_path), {}, resume=False).each == []
    for resume in (True, True, False):  # the last one is another run in the same folder
        boards = dashboards.open_dashboards(
            config(tmp_path, "tensorboard"), {"a": 1}, resume=resume, named=dashboards.as_transformers
        )
        boards.catch_up(after=2)
        boards.log({"loss": 0.5, "words": "none"}, 3)
        boards.finish()
    first, second = sorted((tmp_path / "events").iterdir(), key=lambda folder: len(list(folder.iterdir())))[::-1]
    assert first.name != second.name and len(list(first.iterdir())) == 2
    for folder in (first, second):
        read = events.EventAccumulator(str(folder)).Reload()
        assert read.Tags()["scalars"] == ["train/loss"]
        assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 2.0), (2, 1.0), (3, 0.5)]
        (told,) = read.Tensors("alarms/not finite/text_summary")
        assert told.step == 2 and told.tensor_proto.string_val == [b"step 2: It is inf. Stop."]
    monkeypatch.setenv("RANK", "1")
    assert dashboards.open_dashboards(config(tmp_path, "tensorboard"), {}, resume=False).each == []
    assert capsys.readouterr().err.count("tensorboard --logdir") == 3


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = (ROOT / "requirements-extras.txt").read_text().split("\n")
    for kind, requirement in preflight.DASHBOARDS.items():
        assert [line for line in extras if line.split("#")[0].strip() == requirement]
        with monkeypatch.context() as without:
            without.setattr(preflight.importlib.util, "find_spec", lambda name: None)
            with pytest.raises(UserError, match=f"report_to={kind} needs {kind}.*pip install '{requirement}'"):
                preflight.check_run(config(tmp_path, "trackio", kind))


def test_wandb_without_an_account_says_so_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    assert {"prompt", "verify"} <= inspect.signature(wandb.login).parameters.keys()
    known: list[bool] = []
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(
        wandb, "login", lambda **how: known.pop() if how == {"prompt": False, "verify": False} else None
    )
    for mode, answers in (("online", [False]), ("online", [True]), ("offline", [])):
        monkeypatch.setenv("WANDB_MODE", mode)
        known[:] = answers
        with pytest.raises(UserError) as refused:  # there is no model either
            preflight.check_run(config(tmp_path, "wandb"))
        asked = "Log in with `wandb login`, set WANDB_MODE=offline" in str(refused.value)
        assert asked == (answers == [False]) and known == []
