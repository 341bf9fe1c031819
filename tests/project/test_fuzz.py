"""Is every damaged file told in one paragraph: no traceback, no hang, nothing lost?

Each file that a script reads is damaged in a seeded choice of ways and read as the script reads it. Rows of data are
tested with their reader (test_data.py).
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from test_report import build_run
from tiny_runs import tiny_base
from transformers import PreTrainedTokenizerFast

from posttrain import report
from posttrain.config.chat import ChatRun
from posttrain.config.dpo import DPORun
from posttrain.config.evaluation import EvaluateRun
from posttrain.config.loading import resolve
from posttrain.config.sft import SFTRun
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun
from posttrain.models import loading as models
from posttrain.runtime import checkpoint, run_identity, runlog
from posttrain.types import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
SECONDS = 10  # of this process's own time
JUNK: tuple[Any, ...] = (
    None, True, [], {}, "", "x", -1, 0, 1.5, 10**9, 10**30, -(10**30), 1e300, "\x00", "\ud800", "\u2028", [[[[]]]],
    {"x": {}}, "x" * 5000, "../../x", [1] * 2000,
)  # fmt: skip
TOKENS = (
    b"\x00" * 600, b"\xff\xfe", b"\xed\xa0\x80", "\u2028".encode(), b"\n", b"\r", b"\t", b"{", b"}", b"[" * 6000, b'"',
    b": ", b"9" * 5000, b"1e400", b"NaN", b"-Infinity", b"null", b"&a [*a]", b"!!python/object:os.system {}",
    b"{% for i in range(9**9) %}",
    b"<<: *x", b"- " * 3000,
)  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same file with one thing wrong: bytes, or a value where it is JSON or YAML."""
    way = rng.randrange(10)
    if way < 5:
        with contextlib.suppress(ValueError, yaml.YAMLError):
            whole = json.loads(data) if data.lstrip()[:1] == b"{" else yaml.safe_load(data)
            if isinstance(whole, dict | list) and whole:
                return json.dumps(_with_junk(whole, rng)).encode()
    place, length = rng.randrange(len(data) + 1), rng.choice((1, 8, 200, 5000))
    token = rng.choice(TOKENS)
    return [
        lambda: data[:place],
        lambda: data[:place] + data[place + length :],
        lambda: data[:place] + bytes([rng.randrange(256) for _ in range(8)]) + data[place + 8 :],
        lambda: data[:place] + token + data[place:],
        lambda: data[:place] + data[place : place + length] * 2 + data[place + length :],
        lambda: token,
    ][rng.randrange(6)]()


def _with_junk(whole: Any, rng: random.Random) -> Any:
    """One value at a random place is something else, or gone, or there under another name."""
    holders = [whole]
    for holder in holders:
        inside = holder.values() if isinstance(holder, dict) else holder
        holders += [value for value in inside if isinstance(value, dict | list) and value][:50]
    holder = rng.choice(holders)
    key: Any = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        case _:
            holder[key] = rng.choice(JUNK)
    return whole


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Fails after so many seconds of processor time, however busy the machine is."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, hangs)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(use: Callable[[], object], files: list[Path], seed: str, count: int) -> int:
    """Damages one of the files at a time and reads it; how often it was refused.

    Whatever is not refused must be readable as it is; what is refused must be said in words, and change nothing.
    """
    rng = random.Random(seed)
    refused = 0
    for number in range(count):
        file = rng.choice(files)
        whole = file.read_bytes()
        harm = damaged(whole, rng)
        file.write_bytes(harm)
        try:
            with no_hang():
                use()
        except UserError as problem:
            refused += 1
            assert str(problem).strip() and "Traceback" not in str(problem)
            assert file.read_bytes() == harm, f"{seed} {number}: {file.name} was changed"
        except Exception as error:
            raise AssertionError(f"{seed}, variant {number} of {file.name}, {harm[:300]!r}: {error!r}") from error
        finally:
            file.write_bytes(whole)
    return refused


@pytest.fixture(scope="module")
def handed_over(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model as a phase hands it over, sealed."""
    place = tmp_path_factory.mktemp("fuzz")
    base = ModelSection(name_or_path=str(tiny_base(place / "base", tiny_tokenizer)))
    return models.save(place / "final", *models.load(base, device="cpu", chat_template=None), {"seed": 0}, source=base)


def of_a_config(name: str, handed: Path, place: Path) -> tuple[Callable[[], object], list[Path]]:
    trained = {"phase1_sft": SFTRun, "phase2_dpo": DPORun, "phase3_starpo": StarPORun}
    schemas: dict[str, Any] = {**trained, "evaluate": EvaluateRun, "chat": ChatRun}
    file = Path(shutil.copy(CONFIGS / f"{name}.yaml", place))
    return lambda: resolve(schemas[name], file), [file]


def of_a_model(handed: Path, place: Path) -> tuple[Callable[[], object], list[Path]]:
    """Somebody else's: without a manifest, each file is taken as it is."""
    folder = place / "model"
    shutil.copytree(handed, folder)
    for name in (checkpoint.MANIFEST, checkpoint.RUN_CONFIG):
        (folder / name).unlink()
    section = ModelSection(name_or_path=str(folder))
    return lambda: models.load(section, device="cpu", chat_template=None), list(folder.iterdir())


def of_a_handover(handed: Path, place: Path) -> tuple[Callable[[], object], list[Path]]:
    folder = place / "final"
    shutil.copytree(handed, folder)
    section = ModelSection(name_or_path=str(folder))
    return lambda: models.load(section, device="cpu", chat_template=None), list(folder.iterdir())


def of_checkpoints(handed: Path, place: Path) -> tuple[Callable[[], object], list[Path]]:
    """The newest whole one is found; a damaged one never."""
    for step in (10, 20):
        shutil.copytree(handed, place / f"checkpoint-{step}")
    whole = {file: file.read_bytes() for file in (place / "checkpoint-20").iterdir()}

    def use() -> None:
        found = checkpoint.latest_good(place, say=lambda _: None)
        same = all(file.read_bytes() == data for file, data in whole.items())
        assert found == place / "checkpoint-20" if same else found is not None

    return use, list(whole)


def of_logs(handed: Path, place: Path) -> tuple[Callable[[], object], list[Path]]:
    logs = [place / "metrics.jsonl", place / "transcripts.jsonl"]
    for log in logs:
        log.write_text("".join(json.dumps({"step": n, "loss": 2.5, "words": "a b"}) + "\n" for n in range(20)))

    def use() -> None:
        for log in logs:
            kept = log.read_bytes()
            runlog.MetricsFile(log, after_step=10)
            log.write_bytes(kept)

    return use, logs


def of_a_begun_run(handed: Path, place: Path) -> tuple[Callable[[], object], list[Path]]:
    cfg = resolve(SFTRun, CONFIGS / "phase1_sft.yaml", [f"output_dir={place}"]).model_dump(mode="json")
    run_identity.remember_run(place, cfg, resume=False)
    return lambda: run_identity.same_run(place, cfg), [place / checkpoint.RUN_CONFIG]


def of_results(handed: Path, place: Path) -> tuple[Callable[[], object], list[Path]]:
    run = build_run(place / "run", episodes=2)
    return lambda: report.build(run), [run / "results.json", run / "transcripts.jsonl"]


KINDS: dict[str, tuple[Callable[..., tuple[Callable[[], object], list[Path]]], int]] = {
    **{
        f"configs/{name}.yaml": (lambda handed, place, name=name: of_a_config(name, handed, place), 6)
        for name in ("phase1_sft", "phase2_dpo", "phase3_starpo", "evaluate", "chat")
    },
    "a model folder": (of_a_model, 15),
    "a handed-over folder": (of_a_handover, 10),
    "checkpoints": (of_checkpoints, 20),
    "logs": (of_logs, 30),
    "run_config.yaml": (of_a_begun_run, 15),
    "results": (of_results, 4),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_some_damaged_files(kind: str, handed_over: Path, tmp_path: Path) -> None:
    make, count = KINDS[kind]
    use, files = make(handed_over, tmp_path)
    use()
    assert fuzz(use, files, kind, count) > 0 or kind == "checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_damaged_files(kind: str, handed_over: Path, tmp_path: Path) -> None:
    use, files = KINDS[kind][0](handed_over, tmp_path)
    assert fuzz(use, files, f"many {kind}", 500) > 0 or kind == "checkpoints"
