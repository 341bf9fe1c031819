"""The keys of evaluate_model.py."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Discriminator, Tag, field_validator, model_validator

from posttrain.config.shared import (
    CONTEXT,
    CONTEXT_TURNS,
    MAX_CONTEXT,
    ChatSection,
    Context,
    Env,
    Field,
    ProtocolSection,
    Run,
    SamplingSection,
    Section,
    different_titles,
    templates_are_shown,
    turns_where_counted,
    whole_context_with_tools,
    wrong,
)
from posttrain.config.suites import (
    INSTRUCTIONS,
    MATH,
    PREFERENCES,
    RECALL,
    REPETITION,
    InstructionSuite,
    MathSuite,
    PreferenceSuite,
    RecallSuite,
    RepetitionSuite,
    Suite,
)


class NamedSampling(SamplingSection):
    name: str = Field("column of the table, e.g. greedy", min_length=1)


class SuiteSettings(Section):
    """The sampling settings under which a suite is measured, and the one that the table shows."""

    settings: list[str] | None = Field("names of the sampling settings used; null uses all", None, min_length=1)
    headline: str | None = Field("name of the setting shown in the table; null shows the first", None)


class SampledSuite(SuiteSettings, Suite):
    n_others: int | None = Field("prompts for the settings that are not in the table; null takes all", None, ge=1)


class SampledMath(SampledSuite, MathSuite): ...


class SampledRepetition(SampledSuite, RepetitionSuite): ...


class SampledRecall(SampledSuite, RecallSuite): ...


class SampledInstructions(SampledSuite, InstructionSuite): ...


class ComparedPreferences(PreferenceSuite):
    reference: str | None = Field("name of the checkpoint that rewards are relative to; null measures none", None)


class EnvSuite(SuiteSettings):
    envs: list[Env] = Field("the environments that are played", min_length=1)
    protocol: ProtocolSection = Field("turns, answer format and penalties; as in phase 3", ProtocolSection())
    episodes: int = Field("held-out levels of each environment", 256, ge=1, le=1_000_000)
    episodes_others: int | None = Field("levels for the settings that are not in the table", None, ge=1)
    split: Literal["validation", "test"] = Field("which levels", "test")
    max_completion_length: int = Field("new tokens in one turn", 64, ge=1)
    max_context: int = Field(MAX_CONTEXT, 1024, ge=8)
    context: Context = Field(CONTEXT, "full")
    context_turns: int | None = Field(CONTEXT_TURNS, None, ge=1)

    _context = model_validator(mode="after")(turns_where_counted)

    @model_validator(mode="after")
    def _titles(self) -> EnvSuite:
        different_titles(self.envs)
        whole_context_with_tools(self.envs, self.context, "suites.envs.context")
        templates_are_shown(self.envs, self.protocol, "suites.envs.protocol")
        return self


class SuitesSection(Section):
    math: SampledMath | None = Field(MATH, None)
    repetition: SampledRepetition | None = Field(REPETITION, None)
    recall: SampledRecall | None = Field(RECALL, None)
    preferences: ComparedPreferences | None = Field(PREFERENCES, None)
    instructions: SampledInstructions | None = Field(INSTRUCTIONS, None)
    envs: EnvSuite | None = Field("success in the environments; null leaves it out", None)


OptionalField = Literal["seed", "temperature", "top_p", "top_k", "repetition_penalty"]


class Endpoint(Section):
    """A model behind a server with the interface of OpenAI, e.g. {endpoint: http://127.0.0.1:8000/v1, model: mine}."""

    endpoint: str = Field("address of the server up to /v1, e.g. http://127.0.0.1:8000/v1")
    model: str = Field("the model's name there", min_length=1)
    api_key_env: str | None = Field("the environment variable that holds the key; null sends no key", None)
    concurrency: int = Field("requests that are sent at the same time", 8, ge=1, le=256)
    timeout: float = Field("seconds until an answer must be complete", 120, gt=0, le=3600)
    attempts: int = Field("how often a failing request is repeated, with growing pauses, before the run stops", 8, ge=1)
    tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        "this server's name for the limit on an answer's tokens", "max_tokens"
    )
    leave_out: list[OptionalField] = Field("fields of a request that this server refuses, which are not sent", [])
    price_input: float | None = Field("price of a million tokens of prompt, in any currency", None, ge=0)
    price_output: float | None = Field("price of a million tokens of answer, in the same currency", None, ge=0)

    @field_validator("endpoint")
    @classmethod
    def _address(cls, value: str) -> str:
        from envs.web import is_address

        if not is_address(value):
            raise wrong("this is not the address of a server: write e.g. http://127.0.0.1:8000/v1")
        parts = urlsplit(value)
        if "@" in value or parts.query or parts.fragment:  # a password with a slash is read as a path
            raise wrong(
                "an address ends with its path, e.g. /v1; a key is read only from the environment variable in"
                " api_key_env"
            )
        return value.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _variable(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise wrong(
                "this is not the name of an environment variable: write upper case letters, digits and _, e.g. MY_KEY; "
                "the key itself is never written here"
            )
        return value

    @model_validator(mode="after")
    def _key_in_private(self) -> Endpoint:
        from envs.web import is_loopback

        place = urlsplit(self.endpoint)
        if self.api_key_env is not None and place.scheme == "http" and not is_loopback(place.hostname):
            raise wrong(
                f"with {self.endpoint} others could read the key in {self.api_key_env} on its way: write an https "
                "address, or one of this machine (http://127.0.0.1:...), such as the end of a tunnel"
            )
        return self


# A folder or Hub name as text, an endpoint as a section.
Checkpoint = Annotated[
    Annotated[str, Tag(":text")] | Annotated[Endpoint, Tag(":section")],
    Discriminator(lambda value: ":section" if isinstance(value, dict | Endpoint) else ":text"),
]


class EvaluateRun(Run):
    """The evaluator; the first checkpoint is the one that the others are compared with."""

    preset_sections = ("suites.envs.protocol",)

    checkpoints: dict[str, Checkpoint] = Field(
        "name: folder, Hub id or an endpoint's section, in the order of the table; the first is the base", min_length=1
    )
    chat: ChatSection = Field("template for a checkpoint without one", ChatSection())
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("precision the weights are loaded in", "auto")
    attn_implementation: str = Field("attention kernel", "sdpa")
    batch_size: int | None = Field(
        "most answers and episodes that are sampled at the same time; null takes as many as the free memory holds, up "
        "to 256",
        None,
        ge=1,
        le=65536,
    )
    settings: list[NamedSampling] = Field("sampling settings, one column each", min_length=1)
    suites: SuitesSection = Field("what is measured")
    bootstrap_samples: int = Field("resamples for the interval of a mean (not of a share)", 2000, ge=100, le=1_000_000)
    goals: bool = Field("check the results against the quickstart's goals", False)
    report: bool = Field("write report.html, one file with curves, table and episodes", True)
    workers: int = Field(
        "on a CPU: processes of one thread; on GPUs there is one for each that is visible", 2, ge=1, le=1024
    )

    @model_validator(mode="after")
    def _known_names(self) -> EvaluateRun:
        known = [setting.name for setting in self.settings]
        if len(set(known)) < len(known):
            raise wrong(f"two of the settings have the same name: {', '.join(known)}")
        for key in type(self.suites).model_fields:
            suite = getattr(self.suites, key)
            if isinstance(suite, SuiteSettings):
                for name in [*(suite.settings or []), *([suite.headline] if suite.headline else [])]:
                    if name not in known:
                        raise wrong(
                            f"suites.{key} names the setting `{name}`, which `settings` does not list: write one of"
                            f" {', '.join(known)}, or add it there"
                        )
                if suite.headline and suite.settings and suite.headline not in suite.settings:
                    raise wrong(
                        f"suites.{key}.headline is `{suite.headline}`, which suites.{key}.settings leaves out: write"
                        f" one of {', '.join(suite.settings)}, or add it there"
                    )
        reference = self.suites.preferences.reference if self.suites.preferences else None
        if reference is not None and reference not in self.local:
            if not self.local:
                raise wrong(
                    f"suites.preferences.reference is `{reference}`, but every checkpoint is a server, which has no"
                    " rewards: write suites.preferences.reference=null"
                )
            server = ", and a server has no rewards" if reference in self.checkpoints else ""
            raise wrong(
                f"suites.preferences.reference is `{reference}`, which is not among the checkpoints"
                f" {', '.join(self.local)}{server}: write suites.preferences.reference={next(iter(self.local))}, or"
                " another of them, or null to measure no reward"
            )
        return self

    @property
    def local(self) -> dict[str, str]:
        """Return the checkpoints that are loaded here."""
        return {name: place for name, place in self.checkpoints.items() if isinstance(place, str)}

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Return the checkpoints behind a server."""
        return {name: place for name, place in self.checkpoints.items() if isinstance(place, Endpoint)}
