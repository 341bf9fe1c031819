"""Which small things do many tests share?  A byte-level BPE tokenizer of 512 tokens and its chat."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.models.chat import Chat

CORPUS = [
    "The agent stands on ice and must reach the goal G without falling into a hole O.",
    "<think>The goal is right of me, so I go right.</think><answer>Right</answer>",
    "<think>I push the box down.</think><answer>Down || Left</answer>",
    "Anna has 12 apples and buys 7 more. How many apples does she have? 12 + 7 = 19, so the answer is \\boxed{19}.",
    "system user assistant: hello, how are you? I am fine, thank you!\n\n",
    "Well, it depends on the weather: when it rains we stay inside, read books, cook soup and play cards together.",
    "Which way should the player move first? Between both holes lies one safe square; every other step ends the game.",
    "Tom buys three boxes with eight pencils each and gives five away. Solution: 3 * 8 = 24, then 24 - 5 = 19.",
    "_ P _ _\n_ O _ _\n_ _ _ O\nO _ _ G\n",
]


def byte_level_tokenizer(*, chatml: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens, with or without the ChatML tokens among them; no template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        min_frequency=1,
        vocab_size=512,
        special_tokens=["<|endoftext|>", *(["<|im_start|>", "<|im_end|>"] if chatml else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    assert backend.get_vocab_size() == 512
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def pytest_configure(config: pytest.Config) -> None:
    """The default tests run on the CPU everywhere: a GPU rounds otherwise, and many tests at once would fill it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
