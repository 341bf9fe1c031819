"""The suites of an evaluation besides episodes, and when they are measured during training."""

from __future__ import annotations

from pydantic import field_validator

from posttrain.config.shared import Field, Section, wrong

MATH = "share of right answers; null leaves it out"
REPETITION = "how much open answers repeat themselves; null leaves it out"
RECALL = "memory of earlier turns; null leaves it out"
PREFERENCES = "share of pairs ranked right; null leaves it out"
INSTRUCTIONS = "share of prompts whose instructions are all followed (IFEval, arXiv 2311.07911); null leaves it out"


class Suite(Section):
    n: int = Field("prompts", 200, ge=1, le=1_000_000)
    max_new_tokens: int = Field("longest answer", 256, ge=1)


class MathSuite(Suite):
    sources: list[str] = Field(
        "embedded, gsm8k, math500, gsm8k_held_out (524 questions of its training split; gsm8k_held_out=FILE reads the"
        " split from a file), or local files with question and answer",
        ["embedded"],
        min_length=1,
    )
    instruction: str = Field("added to each question, e.g. how to mark the answer", "")

    @field_validator("sources")
    @classmethod
    def _each_once(cls, sources: list[str]) -> list[str]:
        if len(set(sources)) < len(sources):
            raise wrong(f"names a source twice: {', '.join(sources)}")
        return sources


class RepetitionSuite(Suite):
    source: str = Field("embedded, or a local file with the column prompt", "embedded")
    equal_length: int = Field("also count repetition on the first so many tokens of every answer", 60, ge=8)


class RecallSuite(Suite):
    source: str = Field("embedded, or a local file with messages and answer", "embedded")


class InstructionSuite(Suite):
    source: str = Field("ifeval (google/IFEval), or a local file with its columns", "ifeval")
    max_new_tokens: int = Field("longest answer", 1280, ge=1)


class PreferenceSuite(Section):
    source: str = Field("embedded, ultrafeedback (its test_prefs), or a local file with the same columns", "embedded")
    n: int = Field("held-out pairs", 200, ge=1, le=1_000_000)


class TrainingSuites(Section):
    """Suites that are measured during training; all are answered greedily, except open prompts (temperature 1)."""

    math: MathSuite | None = Field(MATH, None)
    repetition: RepetitionSuite | None = Field(REPETITION, None)
    recall: RecallSuite | None = Field(RECALL, None)
    preferences: PreferenceSuite | None = Field(PREFERENCES, None)
    instructions: InstructionSuite | None = Field(INSTRUCTIONS, None)


BUDGET = (
    "share of the training time that the suites may take: a measurement that would exceed it is postponed, except those"
    " before the first step and after the last one; null postpones none"
)


class SuitesSchedule(Section):
    """`evaluation` of phases 1 and 2. Phase 3 has these keys and more."""

    every: int = Field(
        "steps between two measurements of the suites; one is before the first step, one after the last", 100, ge=1
    )
    suites: TrainingSuites = Field(
        "a few held-out prompts, answered by the model while it is trained (as in phase 3)", TrainingSuites()
    )
    budget: float | None = Field(BUDGET, 0.1, gt=0, le=1)
