"""The keys of train_phase2_dpo.py."""

from __future__ import annotations

from typing import Annotated, Any

from posttrain.config.data import DPO_KINDS, DataSection, _of_kind
from posttrain.config.shared import DPO_RATES, ChatSection, Field, ModelSection, TrainingRun
from posttrain.config.trl_fields import TRLFields


class DPORun(TrainingRun):
    """Phase 2; `model.name_or_path` is the folder phase 1 saved."""

    rates = DPO_RATES

    model: ModelSection = Field("the model that is trained, and the reference it starts from")
    chat: ChatSection = Field("how messages become tokens; must be what phase 1 used", ChatSection())
    data: Annotated[DataSection, _of_kind(*DPO_KINDS)] = Field("the preference pairs")
    trainer: Annotated[dict[str, Any], TRLFields("trl/trainer/dpo_config.py:DPOConfig")] = Field(
        "any field of trl.DPOConfig under its own name; without learning_rate 1e-6 (full) or 1e-5 (lora, qlora),"
        " without bf16 whatever the GPU or CPU has in hardware",
        {},
    )
