"""Which phases do these tests train?  Each is made once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_phases import DPO, SFT, Phase
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def sft(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Phase:
    return Phase(SFT, tmp_path_factory.mktemp("sft"), tiny_tokenizer)


@pytest.fixture(scope="session")
def dpo(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Phase:
    return Phase(DPO, tmp_path_factory.mktemp("dpo"), tiny_tokenizer)


@pytest.fixture(scope="session", params=["sft", "dpo"])
def phase(request: pytest.FixtureRequest) -> Phase:
    return request.getfixturevalue(request.param)


@pytest.fixture
def whole(files: Phase) -> Path:
    return files.whole
