"""What all runs have in common: strict sections, models, environments, sampling, every training run."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from posttrain.config.reference import CONFIGS
from posttrain.config.trl_fields import STRICT, unfit
from posttrain.config.yaml_file import read_yaml
from posttrain.types import SamplingParams

PRESETS, PROTOCOLS = CONFIGS / "presets", CONFIGS / "protocols"


def Field(description: str, default: Any = ..., **limits: Any) -> Any:
    """Return pydantic's Field; the description comes first because every key has one."""
    return pydantic.Field(default, description=description, **limits)


# Peak learning rates where `trainer.learning_rate` is not written, by phase and by model.tuning. Those of `full` are
# the defaults of TRL's SFTConfig, DPOConfig and GRPOConfig (the last also RAGEN's); adapters take ten times as much, as
# in TRL's example commands for LoRA and in Schulman et al., "LoRA Without Regret" (2025).
SFT_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
DPO_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}
STARPO_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}


class Section(BaseModel):
    model_config = STRICT

    preset_sections: ClassVar[tuple[str, ...]] = ()  # the sections of a run whose key `preset` names one

    @field_validator("*")
    @classmethod
    def _can_be_held(cls, value: Any) -> Any:
        if (problem := unfit(value)) is not None:
            raise wrong(problem)
        return value

    @classmethod
    def preset_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of the preset that `given` names; none without one."""
        return {}


def wrong(text: str) -> PydanticCustomError:
    """Return the error that a validator raises: what is wrong and what to write instead."""
    return PydanticCustomError("text", "{text}", {"text": text})


def hint(name: str, known: list[str]) -> str:
    """Return "; did you mean `close_name`?" for a misspelt name, "" without a similar name."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _is_path(value: str) -> str:
    module, _, name = value.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        raise wrong("write MODULE:FUNCTION, the path of a function of your own")
    return value


OwnFunction = Annotated[str, AfterValidator(_is_path)]  # see config/plugins.py

# --------------------------------------------------------------------------------------------- sections that runs share

Device = Literal["auto", "cpu", "cuda", "mps"]
DEVICE = "auto takes the NVIDIA GPU if there is one, otherwise the CPU; mps is the GPU of a Mac, untested"
Dashboard = Literal["trackio", "tensorboard", "wandb"]


class LoraSection(Section):
    r: int = Field("rank of the adapter", 16, ge=1, le=65536)
    alpha: int = Field("scale of the adapter: its output is multiplied by alpha / r", 32, ge=1)
    dropout: float = Field("dropout on the adapter's input", 0.0, ge=0, lt=1)
    target_modules: str | list[str] = Field("which layers get an adapter: all-linear, or a list of names", "all-linear")


class ModelSection(Section):
    name_or_path: str = Field("Hub id, or the folder that the previous phase saved", min_length=1)
    revision: str | None = Field("commit of the Hub repository (TRL's model_revision); null takes the newest", None)
    trust_remote_code: bool = Field("run the Python code of the Hub repository; needs a pinned revision", False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "precision the weights are loaded in; auto is float32 for training, otherwise bfloat16 where the GPU or CPU"
        " has it in hardware",
        "auto",
    )
    attn_implementation: str = Field("attention kernel: sdpa, eager, or one that transformers can fetch", "sdpa")
    tuning: Literal["full", "lora", "qlora"] = Field("train all weights, an adapter, or an adapter on 4 bits", "full")
    lora: LoraSection = Field("the adapter, used with tuning lora or qlora (TRL's lora_r, ...)", LoraSection())

    @model_validator(mode="after")
    def _pinned(self) -> ModelSection:
        pinned = re.fullmatch(r"[0-9a-f]{40}", self.revision or "") or os.path.isdir(self.name_or_path)
        if self.trust_remote_code and not pinned:
            raise wrong(
                "trust_remote_code runs code of others on this machine: write the 40-digit commit you have read "
                "as model.revision",
            )
        return self


class ChatSection(Section):
    template: str | None = Field(
        "chatml, this project's own, or the path of a Jinja template (TRL's chat_template_path); null keeps the"
        " model's own if usable, else chatml",
        None,
    )


class EnvSection(Section):
    name: str = Field("an environment of envs/, e.g. frozen_lake, or module:Class", min_length=1)
    weight: float = Field(
        "share of the groups that play it, relative to the other environments (3 and 5 are RAGEN's n_groups [3, 5])",
        1.0,
        gt=0,
    )
    options: dict[str, Any] = Field("keyword arguments of the environment, e.g. {size: 4}", {})
    tools: list[OwnFunction] = Field(
        "MODULE:FUNCTION of each function that the model may call before it answers (TRL's tools), with types and"
        " docstring",
        [],
    )
    max_calls: int = Field(
        "calls of tools in an episode; further ones are refused (TRL's max_tool_calling_iterations)", 8, ge=1
    )
    call_seconds: float = Field("seconds that a call may take, which TRL does not limit", 10.0, gt=0)
    label: str | None = Field(
        "its name in metrics; null takes `name`, which the list may then have only once", None, min_length=1
    )

    @property
    def title(self) -> str:
        """Return its name in metrics."""
        return self.label or self.name


def different_titles(envs: Sequence[EnvSection]) -> None:
    """Raise an error where two environments of a list have the same title."""
    titles = [env.title for env in envs]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise wrong(
            f"envs has {twice[0]} twice, and metrics need different names: write it once, or give each its own label"
            f" (- {{name: {twice[0]}, label: {twice[0]}-large, options: ...}})"
        )


def whole_context_with_tools(envs: Sequence[EnvSection], context: str, key: str) -> None:
    """Raise an error where a list of environments has tools or an agent, which need `context: full`."""
    if context != "full" and (named := next((env for env in envs if env.options.get("agent")), None)):
        raise wrong(f"{named.title} is played by a program, which writes its prompts itself: write `{key}: full`")
    if context != "full" and (named := next((env for env in envs if env.tools), None)):
        raise wrong(
            f"{named.title} has tools, whose answers stand in the conversation as a whole: write `{key}: full`, or"
            " leave out the tools"
        )


def env_by_name(env: Any) -> Any:
    """Return an entry of a list of environments as a section: `- sokoban` is short for `- name: sokoban`."""
    return {"name": env} if isinstance(env, str) else env


Env = Annotated[EnvSection, BeforeValidator(env_by_name)]


class ProtocolSection(Section):
    """The arguments of envs.protocol.Protocol.of, name by name (a test compares them), and a preset for them."""

    preset: Literal["ragen"] | None = Field(
        "configs/protocols/NAME.yaml, under the keys written here: ragen is RAGEN's turns, penalties and messages", None
    )
    max_turns: int | None = Field(
        "turns after which an episode is truncated; null takes each environment's own number", None, ge=1
    )
    max_actions_per_turn: int = Field("actions that count in one answer; the rest is ignored", 1, ge=1)
    max_actions: int | None = Field(
        "actions after which an episode is truncated; null takes as many as the turns hold", None, ge=1
    )
    think: bool = Field("ask for <think>..</think> before <answer>..</answer> (RAGEN's enable_think)", True)
    format_penalty: float = Field(
        "added to the reward for each turn without a valid action (RAGEN's), three times an episode at most", -0.1, le=0
    )
    force_think: bool = Field(
        "start each answer with its first tag, not sampled: <think>, or without think <answer>, as RAGEN does",
        False,
    )
    parser: OwnFunction | None = Field(
        "MODULE:FUNCTION that finds the actions in an answer; null takes the first well-formed <answer>, as RAGEN does",
        None,
    )
    style: Literal["plain", "compact"] = Field(
        "words of rules, states and feedback: sentences for language models, or few tokens for a tiny model that learns"
        " them from demonstrations",
        "plain",
    )
    system: str | None = Field(
        "Jinja template of the system message; null takes the preset's or that of envs/wording.py", None
    )
    example: str | None = Field("an answer that the system message shows; null takes the environment's own", None)
    feedback: str | None = Field("Jinja template of the user message before each turn; null as above", None)

    @model_validator(mode="before")
    @classmethod
    def _preset_under(cls, given: Any) -> Any:
        preset = given.get("preset") if isinstance(given, dict) else None
        file = PROTOCOLS / f"{preset}.yaml"
        if not (isinstance(preset, str) and file.is_file()):
            return given
        templates = ("system", "feedback")  # null stands for the preset's
        return read_yaml(file) | {k: each for k, each in given.items() if each is not None or k not in templates}

    @property
    def templates(self) -> list[str]:
        """Return which of the messages' parts are written."""
        return [key for key in ("system", "example", "feedback") if getattr(self, key) is not None]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `envs.protocol.Protocol.of`."""
        return self.model_dump(exclude={"preset"})

    @model_validator(mode="after")
    def _templates(self) -> ProtocolSection:
        if self.preset and self.style != "plain":
            raise wrong(f"`protocol.preset: {self.preset}` is in the words of `style: plain`: leave one of them out")
        if self.templates:
            from envs.protocol import Protocol

            try:
                Protocol(style=self.style, system=self.system, example=self.example, feedback=self.feedback)
            except ValueError as problem:
                raise wrong(str(problem)) from None
        return self


def templates_are_shown(envs: Sequence[EnvSection], protocol: ProtocolSection, key: str) -> None:
    """Raise an error where a list of environments has only `prompts`, whose messages are their own, and templates."""
    if protocol.templates and not protocol.preset and all(env.name == "prompts" for env in envs):
        raise wrong(
            f"`{key}.{protocol.templates[0]}` is shown by no environment: the messages of `prompts` are those of its"
            " rows and of its option `system`"
        )


Context = Literal["full", "last_k", "single_turn"]
CONTEXT = (
    "what a turn sees: all of the episode, its last turns, or one message that sums these up (RAGEN's full,"
    " limited_multi_turn, single_turn)"
)
CONTEXT_TURNS = "k of last_k and single_turn: turns in context, the coming one included (RAGEN's max_context_window)"
MAX_CONTEXT = "tokens of a context, prompt included; where it is full, its older turns leave (RAGEN's max_model_len)"


def turns_where_counted(section: Any) -> Any:
    """Check `context_turns` against `context`: a validator of every section that has both."""
    if section.context == "full" and section.context_turns is not None:
        raise wrong(
            "context_turns counts the turns of last_k and single_turn, but context is full: leave it out or change"
            " context (what does not fit into max_context is dropped in any mode)"
        )
    if section.context != "full" and section.context_turns is None:
        raise wrong(f"context is {section.context}: write context_turns, how many turns it shows, e.g. 3")
    return section


COLDEST = 1e-5  # of temperatures above 0: a smaller one divides logits until they are infinite


def not_too_cold(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise wrong(f"this divides logits until they are infinite: the smallest temperature above 0 is {COLDEST:g}")
    return temperature


Temperature = Annotated[float, AfterValidator(not_too_cold)]


class SamplingSection(Section):
    temperature: Temperature = Field("0 is greedy, 1 is the model's own distribution", 1.0, ge=0)
    top_k: int = Field("keep the k likeliest tokens; 0 keeps all", 0, ge=0)
    top_p: float = Field("keep the likeliest tokens that make up this probability", 1.0, gt=0, le=1)
    repetition_penalty: float = Field("divides the score of tokens already seen; 1 is off", 1.0, ge=1, le=1e9)

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return these settings in the form that samplers take."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
        )


def dashboards(value: Any) -> Any:
    """Return a list of dashboards: `trackio` is short for `[trackio]`, and `none` (or null) for an empty list."""
    if value in ("none", None):
        return []
    if isinstance(value, list) and (twice := sorted({str(each) for each in value if value.count(each) > 1})):
        raise wrong(f"report_to names {twice[0]} twice")
    return [value] if isinstance(value, str) else value


class Run(Section):
    """The keys of every script."""

    output_dir: str = Field("folder of this run; one in use is never overwritten", min_length=1)
    seed: int = Field("all random numbers are derived from it", 0, ge=0)
    device: Device = Field(DEVICE, "auto")
    hardware: str = Field("free text: what this file was written for and how long it takes there", "")


def trl_trainer(config: str, rates: dict[str, float]) -> Any:
    """Return the field `trainer` of a phase whose trainer is TRL's."""
    full, adapter = rates["full"], rates["lora"]
    assert adapter == rates["qlora"]
    return Field(
        f"any field of trl.{config} under its own name; without learning_rate {full:g} (full) or {adapter:g} (lora,"
        " qlora), without bf16 whatever the GPU or CPU has in hardware",
        {},
    )


class TrainingRun(Run):
    """The keys of all three phases, with weights that the optimizer can move and a learning rate that fits."""

    run_name: str | None = Field(
        "name on the dashboard, as TRL's; null takes the name of output_dir", None, max_length=128
    )
    report_to: Annotated[list[Dashboard], BeforeValidator(dashboards)] = Field(
        "dashboards, one or several of trackio (local, no network), tensorboard (local), wandb; `none` for none",
        ["trackio"],
    )
    model: ModelSection = Field(
        "the model that is trained; its reference or teacher is what it is at first (under names of TRL's ModelConfig)"
    )
    chat: ChatSection = Field("how messages become tokens; the same in all phases", ChatSection())
    if TYPE_CHECKING:
        trainer: Any  # each phase declares its own, in its own place
        evaluation: Any

    rates: ClassVar[dict[str, float]]  # by model.tuning

    @model_validator(mode="after")
    def _weights_can_move(self) -> TrainingRun:
        model = self.model
        if model.tuning == "full" and model.dtype in ("bfloat16", "float16"):
            raise wrong(
                f"`model.dtype: {model.dtype}` with `model.tuning: full` trains weights that round most updates away:"
                " an update is smaller than the gap to the next such number. Leave model.dtype out (the weights are"
                " float32, and trainer.bf16 computes in bfloat16), or write `model.tuning: lora`, whose adapter is"
                " float32 whatever the frozen weights are"
            )
        return self

    @model_validator(mode="after")
    def _learning_rate(self) -> TrainingRun:
        trainer, default = self.trainer, {"learning_rate": self.rates[self.model.tuning]}
        if isinstance(trainer, dict):
            trainer = trainer if trainer.get("learning_rate") is not None else trainer | default
        elif trainer.learning_rate is None:
            trainer = trainer.model_copy(update=default)
        object.__setattr__(self, "trainer", trainer)  # the section is frozen otherwise
        return self

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate, from the config or from `model.tuning`."""
        trainer = self.trainer
        return trainer["learning_rate"] if isinstance(trainer, dict) else trainer.learning_rate

    def low_rate(self) -> str | None:
        """Return a sentence where the learning rate is a tenth of this tuning's default or less, otherwise None."""
        rate, tuning, default = self.learning_rate, self.model.tuning, self.rates[self.model.tuning]
        if rate > default / 10 * (1 + 1e-9):
            return None
        return (
            f"trainer.learning_rate={rate:g} is so low for model.tuning={tuning} that almost nothing will be learned: "
            f"the default is {default:g} (leave the key out to get it)."
        )
