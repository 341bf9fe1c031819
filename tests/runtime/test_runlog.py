"""Do the bar and the metrics file tell the truth, without a terminal and after a kill?"""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table
from tiny_runs import ROOT

from posttrain.runtime import runlog
from posttrain.types import UserError


def plain_console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=False, width=200), text


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, for the test to set."""
    seconds = [0.0]
    monkeypatch.setattr(runlog.time, "monotonic", lambda: seconds[0])
    return seconds


def test_without_a_terminal_lines_are_few_and_carry_rate_and_time_left(now: list[float]) -> None:
    console, text = plain_console()
    with runlog.Progress(total=400, title="phase 1", start=200, console=console) as progress:
        for step in range(201, 401):
            now[0] += 0.25
            progress.update(step, loss=2.5)
    lines = text.getvalue().splitlines()
    assert lines[0] == "phase 1: 201/400 steps, 50 %, 4.0 steps/s, 0:50 left, loss 2.5"
    assert lines[-1] == "phase 1: 400/400 steps, 100 %, 4.0 steps/s, 0:00 left, loss 2.5"
    assert len(lines) == 11  # 50 seconds, one line every 5, and the last state


def test_the_last_state_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog.time, "monotonic", itertools.count(0.0, 6.0).__next__)  # every line may be said
    console, text = plain_console()
    with runlog.Progress(total=2, title="phase 1", console=console) as progress:
        progress.update(1, loss=2.5)
        progress.update(2, loss=2.0)
    assert [line.split(",")[0] for line in text.getvalue().splitlines()] == ["phase 1: 1/2 steps", "phase 1: 2/2 steps"]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_ends_early_says_where(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Also where the last state has been said before, as one among others."""
    monkeypatch.setattr(runlog.time, "monotonic", itertools.count(0.0, 6.0).__next__)
    console, text = plain_console()
    if terminal:
        console = Console(file=text, force_terminal=True, width=120)
    with runlog.Progress(total=90, title="phase 3", console=console) as progress:
        progress.update(21, success=0.5)
    begins = "21/90" if terminal else "phase 3: stopped at step 21 of 90, "
    last = text.getvalue().rpartition(begins)[2]
    assert "success 0.5" in last and "left" not in last and "100 %" not in last


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"COLUMNS": "40"}])
def test_tables_are_not_cut_where_there_is_no_terminal(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    table = Table(title="a table")
    for number in range(20):
        table.add_column(f"column-{number:02}-of-a-table", no_wrap=number % 2 == 0)
    table.add_row(*(f"value-{number:02}-of-the-row" for number in range(20)))
    runlog.console().print(table)
    told = capsys.readouterr().out
    assert all(f"column-{number:02}-of-a-table" in told for number in range(20))
    assert all(f"value-{number:02}-of-the-row" in told for number in range(20))
    assert max(map(len, told.splitlines())) < 2000  # no wider than the table


def test_slow_steps_are_given_in_seconds_per_step(now: list[float]) -> None:
    console, text = plain_console()
    with runlog.Progress(total=1000, title="t", console=console) as progress:
        now[0] = 8.0
        progress.update(2)
    assert "4.0 s/step, 1:06:32 left" in text.getvalue()


def test_with_a_terminal_a_bar_is_drawn_and_text_stands_above_it() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with runlog.Progress(total=4, title="phase 1", console=console) as progress:
        progress.say("[not markup] checkpoint-2 saved")
        progress.update(4, loss=1.0)
    assert "4/4" in text.getvalue()
    assert "loss 1" in text.getvalue()
    assert "[not markup] checkpoint-2 saved" in text.getvalue()


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    console, text = plain_console()
    with runlog.Progress(total=4, title="t", console=console) as progress:
        progress.update(4)
        progress.say("hello")
    runlog.MetricsFile(tmp_path / "metrics.jsonl").write({"loss": 1.0}, 1)
    assert text.getvalue() == ""
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3725, "1:02:05"), (-3, "0:00")])
def test_clock(seconds: float, text: str) -> None:
    assert runlog.clock(seconds) == text


def test_metrics_rows_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = runlog.MetricsFile(path)
    for step in range(1, 6):
        metrics.write({"loss": 1.0 / step}, step)
    with path.open("a") as out:
        out.write('{"step": 6, "lo')  # a kill in the middle of a row
    assert [row["step"] for row in runlog.read_metrics(path)] == [1, 2, 3, 4, 5]
    metrics = runlog.MetricsFile(path, after_step=3)
    metrics.write({"loss": float("nan"), "grad_norm": float("inf")}, 4)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 1 / 3},
        {"step": 4, "loss": None, "grad_norm": None},
    ]
    assert [path.name for path in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(("rank", "terminal", "bars"), [("0", True, True), ("1", True, False), ("0", False, False)])
def test_bars_are_drawn_by_one_process_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, terminal: bool, bars: bool
) -> None:
    places = ("TRACKIO_DIR", "TENSORBOARD_LOGGING_DIR", "WANDB_DIR")
    for key in ("HF_HUB_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING", "TOKENIZERS_PARALLELISM", *places):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "")  # so that it is put back
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    runlog.keep_private(tmp_path / "run")
    assert ("HF_DATASETS_DISABLE_PROGRESS_BARS" not in os.environ) == bars


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
    ],
)
def test_memory_of_a_gpu_can_grow_unless_the_user_says_otherwise(
    tmp_path: Path, given: dict[str, str], found: dict[str, str]
) -> None:
    """Before torch is imported, which may read it once; the module that sets it does not import torch itself."""
    program = (
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from posttrain.runtime import runlog\n"
        "runlog.keep_private(Path(sys.argv[1]) / 'run')\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps({key: value for key, value in os.environ.items() if 'ALLOC_CONF' in key}))\n"
    )
    clean = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert json.loads(subprocess.check_output(command, cwd=ROOT, env=clean | given)) == found


STOPS = """
import fcntl, os, signal, sys
from posttrain.runtime import runlog
seen, told = os.pipe()
os.set_blocking(told, False)
signal.set_wakeup_fd(told)
with runlog.StopSignals() as stop:
    os.write(1, b"ready\\n")  # whole, though two processes write
    while not stop.requested:
        os.read(seen, 1)
    os.write(1, b"stopping\\n")
    fcntl.flock(open(os.environ["LOCK"]), fcntl.LOCK_SH)  # as long as a checkpoint takes
    stop.leave()
"""


def launched(tmp_path: Path, program: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(program)
    command = [sys.executable, "-m", "posttrain.runtime.parallel", "--standalone", "--nproc_per_node", "2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LOCK": str(tmp_path / "lock")}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.thorough
def test_the_launcher_ends_as_its_processes_do(tmp_path: Path) -> None:
    """143 after SIGTERM, once they have written their checkpoint, and 2 for a mistake of the user's."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = launched(tmp_path, STOPS)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGTERM)
        assert [process.stdout.readline() for _ in range(2)] == ["stopping\n"] * 2
        assert process.poll() is None
    assert process.wait(timeout=120) == 143
    assert launched(tmp_path, "import sys; sys.exit(2)").wait(timeout=120) == 2


def test_a_signal_ends_work_that_is_done_again_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with runlog.StopSignals() as stop, stop.at_once("the closing evaluation"), pytest.raises(SystemExit) as left:
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 143
    assert "Stopped in the closing evaluation. Continue with the same command and --resume." in capsys.readouterr().err
    with runlog.StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)  # before that work begins
        with pytest.raises(SystemExit), stop.at_once("the closing evaluation"):
            pytest.fail("it has begun")


def test_a_signal_that_the_launcher_passes_on_is_no_second_one(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with runlog.StopSignals() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        now[0] = 10.0
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\x00" * 300, "line 2"),
        (b'{"step": "\xff"}', "line 2"),
        (b"[" * 9000, "line 2: brackets are nested too deep"),
        (b'{"step": ' + b"9" * 5000 + b"}", "line 2"),
        (b"[1]", "line 2: it holds a list"),
        (b'{"loss": 1}', "line 2: it has no step"),
    ],
)
def test_a_damaged_row_is_named_and_a_torn_end_left_out(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=words):
        runlog.MetricsFile(path, after_step=3)
    assert path.read_bytes().count(b"\n") == 3
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"\x00" * 300 + b"\n" + b"\x00" * 9)
    assert [row["step"] for row in runlog.read_metrics(path)] == [1, 2]
