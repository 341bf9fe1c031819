"""The keys of train_phase1_sft.py."""

from __future__ import annotations

from typing import Annotated, Any

from posttrain.config.data import SFT_KINDS, DataSection, _of_kind
from posttrain.config.shared import SFT_RATES, ChatSection, Field, ModelSection, TrainingRun
from posttrain.config.trl_fields import TRLFields


class SFTRun(TrainingRun):
    """Phase 1."""

    rates = SFT_RATES

    model: ModelSection = Field("the model that is trained")
    chat: ChatSection = Field("how messages become tokens", ChatSection())
    data: Annotated[DataSection, _of_kind(*SFT_KINDS)] = Field("what it is trained on")
    trainer: Annotated[dict[str, Any], TRLFields("trl/trainer/sft_config.py:SFTConfig")] = Field(
        "any field of trl.SFTConfig under its own name; without learning_rate 2e-5 (full) or 2e-4 (lora, qlora),"
        " without bf16 whatever the GPU or CPU has in hardware",
        {},
    )
