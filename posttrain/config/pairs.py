"""The keys of posttrain pairs."""

from __future__ import annotations

from typing import Annotated

from posttrain.config.data import Source, kinds_filled_in
from posttrain.config.shared import ChatSection, Field, ModelSection, Run, Temperature


class PairsRun(Run):
    """Preference pairs from a model's own answers."""

    model: ModelSection = Field("the model that answers, most often the one that phase 2 starts from")
    chat: ChatSection = Field("how messages become tokens; as in phase 2", ChatSection())
    sources: Annotated[list[Source], kinds_filled_in("prompts")] = Field(
        "where the prompts come from, as in phases 1 to 3; right answers are known for gsm8k, openmathinstruct,"
        " and rows of prompts with a column answer",
        min_length=1,
    )
    decontaminate: bool = Field("drop prompts that share 13 words in a row with an evaluation set", True)
    num_generations: int = Field("answers to each prompt", 8, ge=2, le=1024)
    temperatures: list[Temperature] = Field("of the answers, in turn; 0 is greedy, and a second 0 gives a copy", [1.0])
    max_new_tokens: int = Field("longest answer", 256, ge=1)
    max_length: int = Field("prompt and answer in tokens; longer prompts are dropped", 1024, ge=8)
    batch_size: int | None = Field(
        "most answers that are sampled at the same time; null takes as many as the free memory holds, up to 256",
        None,
        ge=1,
    )
    pairs_per_prompt: int = Field(
        "most pairs of a prompt, which share no answer; 0 writes the best answers alone", 1, ge=0
    )
    min_repetition: float = Field(
        "prompts without a known answer: by how much the repeated 4-grams of two answers differ at equal length",
        0.1,
        gt=0,
        le=1,
    )
    min_length_ratio: float = Field("tokens of the shorter answer of a pair to those of the longer", 0.5, gt=0, le=1)
