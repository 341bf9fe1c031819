"""The keys of train_phase1_sft.py."""

from __future__ import annotations

from typing import Annotated, Any

from posttrain.config.data import SFT_KINDS, DataSection, _of_kind, kinds_filled_in
from posttrain.config.shared import SFT_RATES, Field, TrainingRun, trl_trainer
from posttrain.config.suites import SuitesSchedule
from posttrain.config.trl_fields import TRLFields


class SFTRun(TrainingRun):
    """Phase 1."""

    rates = SFT_RATES

    data: Annotated[DataSection, kinds_filled_in("messages"), _of_kind(*SFT_KINDS)] = Field("what it is trained on")
    trainer: Annotated[dict[str, Any], TRLFields("trl/trainer/sft_config.py:SFTConfig")] = trl_trainer(
        "SFTConfig", SFT_RATES
    )
    evaluation: SuitesSchedule = Field("what the model can do while it is trained", SuitesSchedule())
