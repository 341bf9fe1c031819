"""The keys of train_phase2_dpo.py."""

from __future__ import annotations

from typing import Annotated, Any

from posttrain.config.data import DPO_KINDS, DataSection, _of_kind, kinds_filled_in
from posttrain.config.shared import DPO_RATES, Field, TrainingRun, trl_trainer
from posttrain.config.suites import SuitesSchedule
from posttrain.config.trl_fields import TRLFields


class DPORun(TrainingRun):
    """Phase 2; `model.name_or_path` is the folder phase 1 saved."""

    rates = DPO_RATES

    data: Annotated[DataSection, kinds_filled_in("preferences"), _of_kind(*DPO_KINDS)] = Field("the preference pairs")
    trainer: Annotated[dict[str, Any], TRLFields("trl/trainer/dpo_config.py:DPOConfig")] = trl_trainer(
        "DPOConfig", DPO_RATES
    )
    evaluation: SuitesSchedule = Field("what the model can do while it is trained", SuitesSchedule())
