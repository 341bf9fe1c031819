"""Which small things do many tests share?  A byte-level BPE tokenizer of 512 tokens and its chat."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from tiny_tokenizers import byte_level_tokenizer
from transformers import PreTrainedTokenizerFast

from posttrain.models.chat import Chat


def pytest_configure(config: pytest.Config) -> None:
    """The default tests run on the CPU everywhere: a GPU rounds otherwise, and many tests at once would fill it.

    One thread a process, here and in what a test starts: sums over two threads are rounded otherwise, and a run in
    this process is compared with one in another.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """List what is skipped in the file that SKIPPED names: .ci/run runs it again when more is installed."""
    file = os.environ.get("SKIPPED")
    if report.skipped and file and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(file, "a", encoding="utf-8") as out:
            out.write(f"{report.nodeid}\n")


@pytest.fixture(autouse=True)
def packages_look_up_their_names() -> Iterator[None]:
    """A package finds its names in its modules; one that a test patched on the package would stay on it."""
    yield
    for name, package in list(sys.modules.items()):
        if name.startswith("posttrain.") and name.count(".") == 1 and hasattr(package, "__path__"):
            for own in set(vars(package)) & set(package.__all__):
                if not isinstance(vars(package)[own], ModuleType):
                    delattr(package, own)


@pytest.fixture
def own_environments() -> Iterator[None]:
    """The environments that a test registers are forgotten when it ends."""
    import gymnasium

    import envs

    with patch.dict(envs._ENVS), patch.dict(gymnasium.registry):
        yield


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A script sets variables for its process, and some tests run its `main` in this one."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) | set(before):
        if name not in before:
            os.environ.pop(name, None)
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True)
def same_broken_pipes() -> Iterator[None]:
    """The chat lets a broken pipe end its process, and some tests run it in this one."""
    before = signal.getsignal(signal.SIGPIPE) if hasattr(signal, "SIGPIPE") else None
    yield
    if before is not None:
        signal.signal(signal.SIGPIPE, before)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Shared by all tests: copy it before changing it."""
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def tiny_chat(tiny_tokenizer: PreTrainedTokenizerFast) -> Chat:
    """The tiny tokenizer with the project's ChatML template."""
    return Chat.load(copy.deepcopy(tiny_tokenizer), None)


@pytest.fixture(scope="session")
def player(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny model that knows the format of answers and hardly anything else, trained once for all test processes."""
    from test_phase3 import taught

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "player"
    with FileLock(folder.with_suffix(".lock")):
        return folder / "final" if folder.exists() else taught(folder / "final", tiny_tokenizer, 100)
