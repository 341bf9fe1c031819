"""What may each of the five scripts be told?  One class per script, one per section, a description on every key."""

from __future__ import annotations

import difflib
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from posttrain.config.trl_fields import STRICT, TRLFields, unfit
from posttrain.config.yaml_file import read_yaml
from posttrain.types import SamplingParams

PRESETS = Path(__file__).parents[2] / "configs" / "presets"


def Field(description: str, default: Any = ..., **limits: Any) -> Any:
    """pydantic's Field with the description first, because here no key goes without one."""
    return pydantic.Field(default, description=description, **limits)


# Peak learning rates where `trainer.learning_rate` is not written, by phase and by model.tuning. Those of `full` are
# the defaults of TRL's SFTConfig, DPOConfig and GRPOConfig (the last also RAGEN's); adapters take ten times as much, as
# in TRL's example commands for LoRA and in Schulman et al., "LoRA Without Regret" (2025).
SFT_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
DPO_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}
STARPO_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}


class Section(BaseModel):
    model_config = STRICT

    preset_key: ClassVar[str | None] = None  # the key that names a preset, in a run that knows presets

    @field_validator("*")
    @classmethod
    def _can_be_held(cls, value: Any) -> Any:
        if (problem := unfit(value)) is not None:
            raise wrong(problem)
        return value

    @classmethod
    def preset_keys(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The keys of the preset that `given` names; none without one."""
        return {}


def wrong(text: str) -> PydanticCustomError:
    """An error that a validator raises: what is wrong and what to write instead."""
    return PydanticCustomError("text", "{text}", {"text": text})


def hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


# --------------------------------------------------------------------------------------------- sections that runs share


class LoraSection(Section):
    r: int = Field("rank of the adapter", 16, ge=1, le=65536)
    alpha: int = Field("scale of the adapter: its output is multiplied by alpha / r", 32, ge=1)
    dropout: float = Field("dropout on the adapter's input", 0.0, ge=0, lt=1)
    target_modules: str | list[str] = Field("which layers get an adapter: all-linear, or a list of names", "all-linear")


class ModelSection(Section):
    name_or_path: str = Field("Hub id, or the folder that the previous phase handed over", min_length=1)
    revision: str | None = Field("commit of the Hub repository; null takes the newest", None)
    trust_remote_code: bool = Field("run the Python code of the Hub repository; needs a pinned revision", False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "precision the weights are loaded in; auto is float32 for training, otherwise bfloat16 where the GPU or CPU"
        " has it in hardware",
        "auto",
    )
    attn_implementation: str = Field("attention kernel: sdpa, eager, or one that transformers can fetch", "sdpa")
    tuning: Literal["full", "lora", "qlora"] = Field("train all weights, an adapter, or an adapter on 4 bits", "full")
    lora: LoraSection = Field("the adapter, used with tuning lora or qlora", LoraSection())

    @model_validator(mode="after")
    def _pinned(self) -> ModelSection:
        pinned = re.fullmatch(r"[0-9a-f]{40}", self.revision or "") or os.path.isdir(self.name_or_path)
        if self.trust_remote_code and not pinned:
            raise wrong(
                "trust_remote_code runs somebody's code on this machine: write the 40-digit commit you have read "
                "as model.revision",
            )
        return self


class ChatSection(Section):
    template: str | None = Field("path of a Jinja chat template; null keeps the model's own if usable, else ours", None)


class WorldSection(Section):
    name: str = Field("a world of envs/, e.g. frozen_lake", min_length=1)
    weight: float = Field("share of the groups that play it, relative to the other worlds", 1.0, gt=0)
    groups: int | None = Field("a fixed number of groups a step, instead of a share by weight", None, ge=1)
    options: dict[str, Any] = Field("keyword arguments of the world, e.g. {size: 4}", {})

    @model_validator(mode="after")
    def _one_share(self) -> WorldSection:
        if self.groups is not None and self.weight != 1:
            raise wrong("groups and weight are two shares of a step: write one of them")
        return self


class StageSection(Section):
    """One stage of a curriculum: StageSection(options={"size": 4}, success=0.6)."""

    options: dict[str, Any] = Field("laid over the world's own options while the stage lasts", {})
    max_turns: int | None = Field("turns of an episode in this stage; null takes protocol.max_turns", None, ge=1)
    from_step: int | None = Field("the stage begins at this step", None, ge=2)
    success: float | None = Field("the stage begins once the one before it is won this often", None, gt=0, le=1)
    success_steps: int | None = Field("steps over which that success is measured; null with success is 5", None, ge=1)

    @model_validator(mode="after")
    def _one_way_in(self) -> StageSection:
        if self.from_step is not None and self.success is not None:
            raise wrong("from_step and success are two ways into a stage: write one of them")
        if self.success_steps is not None and self.success is None:
            raise wrong("success_steps says over how many steps `success` is measured, and there is no success")
        if self.success is not None and self.success_steps is None:
            self.success_steps = 5
        return self


class TrainingWorld(WorldSection):
    curriculum: list[StageSection] = Field(
        "stages from easy to hard; the last one is the target, which held-out levels use from the start", []
    )

    @model_validator(mode="after")
    def _stages_follow(self) -> TrainingWorld:
        stages = self.curriculum
        if len(stages) == 1:
            raise wrong("a curriculum has two stages or more: put the options of a single one into `options`")
        if stages and (stages[0].from_step is not None or stages[0].success is not None):
            raise wrong("curriculum.0 is there from the start: leave out its from_step and success")
        for number, stage in enumerate(stages[1:], 1):
            if stage.from_step is None and stage.success is None:
                raise wrong(f"curriculum.{number} never begins: write its from_step or success")
        steps = [stage.from_step for stage in stages if stage.from_step is not None]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise wrong(f"the stages of a curriculum begin one after the other, not at the steps {steps}")
        return self


def _named(world: Any) -> Any:
    """`- sokoban` in a list of worlds is short for `- name: sokoban`."""
    return {"name": world} if isinstance(world, str) else world


World = Annotated[WorldSection, BeforeValidator(_named)]


class ProtocolSection(Section):
    """The fields of envs.protocol.Protocol, name by name (a test compares them)."""

    max_turns: int = Field("turns after which an episode is truncated", 8, ge=1)
    max_actions_per_turn: int = Field("actions that count in one answer; the rest is ignored", 1, ge=1)
    max_actions: int = Field("actions after which an episode is truncated", 8, ge=1)
    think: bool = Field("ask for <think>..</think> before <answer>..</answer>", True)
    format_penalty: float = Field("added to the reward for each turn without a valid action", -0.1, le=0)
    max_penalised_turns: int = Field("turns of one episode that can be penalised", 3, ge=0)
    action_sep: str = Field("text between two actions of one answer", "||", pattern=r"\S")
    force_think: bool = Field("give each answer its first tag, <think> or without think <answer>, unsampled", False)


Context = Literal["full", "last_k", "single_turn"]
CONTEXT = "what a turn sees: all of the episode, its last turns, or one message that tells these in brief"
CONTEXT_TURNS = "k of last_k and single_turn: turns in sight, the coming one included"
MAX_CONTEXT = "tokens of a context, prompt included; oldest turns are dropped to fit"


def turns_where_counted(section: Any) -> Any:
    """A validator of every section that has `context` and `context_turns`."""
    if section.context == "full" and section.context_turns is not None:
        raise wrong(
            "context_turns counts the turns of last_k and single_turn, but context is full: leave it out or change"
            " context (what does not fit into max_context is dropped in any mode)"
        )
    if section.context != "full" and section.context_turns is None:
        raise wrong(f"context is {section.context}: write context_turns, how many turns it shows, e.g. 3")
    return section


class SamplingSection(Section):
    temperature: float = Field("0 is greedy, 1 is the model's own distribution", 1.0, ge=0)
    top_k: int = Field("keep the k likeliest tokens; 0 keeps all", 0, ge=0)
    top_p: float = Field("keep the likeliest tokens that make up this probability", 1.0, gt=0, le=1)
    repetition_penalty: float = Field("divides the score of tokens already seen; 1 is off", 1.0, ge=1)

    def params(self, max_new_tokens: int) -> SamplingParams:
        """The same as the sampler takes it."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
        )


class Run(Section):
    """What every script knows about its run."""

    output_dir: str = Field("folder of this run; one in use is never overwritten", min_length=1)
    seed: int = Field("everything random is derived from it", 0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = Field("auto takes the GPU if there is one", "auto")
    run_name: str | None = Field("name on the dashboard; null takes the name of output_dir", None, max_length=128)
    hardware: str = Field("free text: what this file was written for and how long it takes there", "")
    report_to: Literal["trackio", "wandb", "none"] = Field(
        "dashboard; trackio is local and makes no network call", "trackio"
    )


class TrainingRun(Run):
    """What the three phases share: weights that the optimizer can move, and a learning rate that fits them."""

    model: ModelSection = Field("the model that is trained")
    if TYPE_CHECKING:
        trainer: Any  # each phase declares its own, in its own place

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
        default = self.rates[self.model.tuning]
        if isinstance(self.trainer, dict):
            if self.trainer.get("learning_rate") is None:
                self.trainer = self.trainer | {"learning_rate": default}
        elif self.trainer.learning_rate is None:
            self.trainer = self.trainer.model_copy(update={"learning_rate": default})
        return self

    @property
    def learning_rate(self) -> float:
        """The peak learning rate, as written or by `model.tuning`."""
        trainer = self.trainer
        return trainer["learning_rate"] if isinstance(trainer, dict) else trainer.learning_rate

    def low_rate(self) -> str | None:
        """One sentence where the learning rate is a tenth of this tuning's default or less, otherwise None."""
        rate, tuning, default = self.learning_rate, self.model.tuning, self.rates[self.model.tuning]
        if rate > default / 10 * (1 + 1e-9):
            return None
        return (
            f"trainer.learning_rate={rate:g} is so low for model.tuning={tuning} that next to nothing will be learned: "
            f"the default is {default:g} (leave the key out to get it)."
        )


# ------------------------------------------------------------------------------------------------------- phases 1 and 2

# Which kinds of source each phase reads, and which filter options belong to which kind (with their defaults).
SFT_KINDS = ("openmathinstruct", "capybara", "messages", "demonstrations")
DPO_KINDS = ("ultrafeedback", "preferences")
PROMPT_KINDS = (*SFT_KINDS, *DPO_KINDS, "prompts")  # of which phase 3 takes the prompts alone
_KIND_OPTIONS: dict[str, dict[str, Any]] = {
    "openmathinstruct": {"code": "drop", "max_per_question": 4},
    "capybara": {"min_turns": 1},
    "ultrafeedback": {"min_margin": 0.0},
    "messages": {},
    "preferences": {"min_margin": 0.0},
    "demonstrations": {"worlds": []},
    "prompts": {},
}


class Source(Section):
    """One data set: Source(kind="capybara", path="trl-lib/Capybara", rows=12000)."""

    kind: Literal[
        "openmathinstruct", "capybara", "ultrafeedback", "messages", "preferences", "demonstrations", "prompts"
    ] = Field("the schema of its rows, which decides the loader and its filters")
    path: str = Field("Hub id, a local .jsonl or .parquet file, or `embedded` (generated here)", min_length=1)
    rows: int | None = Field("rows kept after filtering, sampled by seed; null keeps all", None, ge=1)
    weight: float = Field("how often its rows are seen in one epoch: 2 twice, 0.5 half of them", 1.0, gt=0, le=1000)
    code: Literal["drop", "mask"] | None = Field(
        "openmathinstruct: drop solutions with code, or keep them with the interpreter's output masked", None
    )
    max_per_question: int | None = Field("openmathinstruct: solutions kept of one question", None, ge=1)
    min_turns: int | None = Field("capybara: shortest dialogue, in assistant turns", None, ge=1)
    min_margin: float | None = Field(
        "ultrafeedback, preferences: score_chosen - score_rejected is above it", None, ge=0
    )
    worlds: list[str] | None = Field("demonstrations: names of the worlds that are played", None)

    @model_validator(mode="after")
    def _own_options(self) -> Source:
        own = _KIND_OPTIONS[self.kind]
        for name in {option for options in _KIND_OPTIONS.values() for option in options}:
            if name in own and getattr(self, name) is None:
                setattr(self, name, own[name])
            elif name not in own and getattr(self, name) is not None:
                kinds = " and ".join(kind for kind, options in _KIND_OPTIONS.items() if name in options)
                raise wrong(f"`{name}` belongs to the kind {kinds}, not to {self.kind}")
        if self.kind == "demonstrations" and not self.worlds:
            raise wrong("name the worlds that are demonstrated, e.g. `worlds: [frozen_lake]`")
        return self


class DataSection(Section):
    sources: list[Source] = Field("one or more data sets, mixed", min_length=1)
    eval_fraction: float = Field("share of the questions (prompts) held out for the evaluation loss", 0.02, gt=0, lt=1)
    eval_rows: int | None = Field(
        "hold out this many rows instead of a share, but at most a tenth of all rows", None, ge=1
    )
    max_length: int = Field("longest row in tokens", 2048, ge=8)
    seed: int = Field("chooses rows and the held-out split; independent of the run's seed", 0, ge=0)
    decontaminate: bool = Field("drop rows that share 13 words in a row with an evaluation set", True)
    flip_labels: bool = Field("control run of phase 2: a coin decides which answer of a pair is the chosen one", False)


def _of_kind(*kinds: str) -> AfterValidator:
    def check(data: DataSection) -> DataSection:
        for n, source in enumerate(data.sources):
            if source.kind not in kinds:
                raise wrong(f"sources.{n}.kind is {source.kind}; this phase reads {', '.join(kinds)}")
        if data.flip_labels and kinds != DPO_KINDS:
            raise wrong("flip_labels is for pairs, which only phase 2 has")
        return data

    return AfterValidator(check)


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


class DPORun(TrainingRun):
    """Phase 2; `model.name_or_path` is the folder phase 1 handed over."""

    rates = DPO_RATES

    model: ModelSection = Field("the model that is trained, and the reference it starts from")
    chat: ChatSection = Field("how messages become tokens; must be what phase 1 used", ChatSection())
    data: Annotated[DataSection, _of_kind(*DPO_KINDS)] = Field("the preference pairs")
    trainer: Annotated[dict[str, Any], TRLFields("trl/trainer/dpo_config.py:DPOConfig")] = Field(
        "any field of trl.DPOConfig under its own name; without learning_rate 1e-6 (full) or 1e-5 (lora, qlora),"
        " without bf16 whatever the GPU or CPU has in hardware",
        {},
    )


# ------------------------------------------------------------------------------------------------------ phase 3: StarPO


class RolloutSection(Section):
    groups: int = Field("P: levels played in one step", 32, ge=1, le=65536)
    num_generations: int = Field("G: episodes of each level, which form a group", 8, ge=1, le=65536)
    temperature: float = Field("of the rollouts; 1 is the policy itself", 1.0, gt=0)
    max_completion_length: int = Field("new tokens in one turn", 64, ge=1)
    max_context: int = Field(MAX_CONTEXT, 1024, ge=8)
    context: Context = Field(CONTEXT, "full")
    context_turns: int | None = Field(CONTEXT_TURNS, None, ge=1)
    slots: int | None = Field(
        "conversations that run at the same time; null takes as many as fit into the memory, at most all of a step",
        None,
        ge=1,
    )
    engine: Literal["auto", "slots", "replay", "vllm"] = Field(
        "slots keeps the KV cache across turns, replay reads them again, vllm is vLLM where it is installed", "auto"
    )
    vllm_memory: float = Field("engine vllm: its share of the GPU's memory", 0.3, gt=0, lt=1)

    _context = model_validator(mode="after")(turns_where_counted)

    @model_validator(mode="after")
    def _room(self) -> RolloutSection:
        if self.groups * self.num_generations > 2**20:
            episodes = self.groups * self.num_generations
            raise wrong(f"groups times num_generations is {episodes} episodes in a step: at most {2**20}")
        if self.max_completion_length >= self.max_context:
            raise wrong("max_completion_length (one turn) must be smaller than max_context (all of its context)")
        return self


class FilterSection(Section):
    metric: Literal["reward_std", "reward_variance", "reward", "entropy", "entropy_variance", "length"] = Field(
        "what groups are ranked by: the spread or the mean of the raw rewards, the mean or the variance of the entropy"
        " of an episode's tokens (one more forward pass), or the sampled tokens",
        "reward_std",
    )
    strategy: Literal["none", "top_k", "top_k_abs", "top_p", "top_p_softmax", "min_p", "percentile", "soft"] = Field(
        "none keeps all groups; top_k the best share `value`; top_k_abs the best `value`; top_p the fewest that hold"
        " the share `value` of the metric; top_p_softmax the same of its softmax; min_p those above `value` times the"
        " best; percentile those whose rank lies in `band`; soft all, each weighted by its deviation over the largest."
        " Groups are ranked within their environment, and each environment keeps its share",
        "none",
    )
    value: float = Field("see strategy: a share, or a number of groups for top_k_abs", 0.5, gt=0)
    band: list[float] = Field(
        "percentile: ranks from this share, the best first, to below that", [0.0, 1.0], min_length=2, max_length=2
    )
    largest: bool = Field("keep the groups where the metric is largest; false keeps the smallest", True)
    keep_zero: bool = Field(
        "let groups through whose metric is 0: for a spread of rewards, those that carry no signal", False
    )
    within: int | None = Field("of each kept group train on the so many episodes that differ most; null on all", None)
    loss_scale: Literal["none", "linear", "sqrt"] = Field("multiply the loss by the kept share, or by its root", "none")

    @model_validator(mode="after")
    def _fits(self) -> FilterSection:
        if self.strategy == "top_k_abs" and (self.value != int(self.value)):
            raise wrong("`value` is a number of groups for top_k_abs: write a whole number, e.g. 8")
        if self.strategy not in ("top_k_abs", "none", "soft", "percentile") and self.value > 1:
            raise wrong(f"`value` is a share for {self.strategy}: write a number up to 1, e.g. 0.5, or use top_k_abs")
        if not 0 <= self.band[0] < self.band[1] <= 1:
            raise wrong("`band` goes from a smaller to a larger share of the ranks, e.g. [0.25, 0.75]")
        if self.band == [0.0, 1.0] and self.strategy == "percentile":
            raise wrong("the strategy percentile keeps all groups until you write its `band`, e.g. [0, 0.25]")
        if self.strategy == "soft" and self.metric != "reward_std":
            raise wrong("the soft filter weights groups by the deviation of their rewards: `metric: reward_std`")
        if self.metric == "reward" and self.strategy in ("top_p", "min_p"):
            raise wrong(f"mean rewards may be negative, and {self.strategy} takes shares of them: write top_p_softmax")
        if self.within is not None and self.within < 2:
            raise wrong("`within` keeps at least 2 episodes of a group, or there is nothing to compare")
        return self

    def most(self, groups: int, environments: int = 1) -> int:
        """The most of so many groups that can be kept, of which every environment gets at least one."""
        kept = {
            "top_k": int(self.value * groups),
            "top_k_abs": int(self.value),
            "percentile": environments + int((self.band[1] - self.band[0]) * groups),
        }
        return min(groups, max(environments, kept.get(self.strategy, groups)))


def _at(values: Any, key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    for name in key.split("."):
        values = values.get(name) if values else None
    return values


def presets() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


class CriticSection(Section):
    kind: Literal["shared", "lora", "separate"] = Field(
        "shared: a value head on the policy's trunk; lora: an adapter of its own on the frozen base; separate: a copy",
        "shared",
    )
    learning_rate: float = Field("of the value head, and of an adapter or a copy of the critic's own", 1e-5, gt=0)
    coef: float = Field("weight of the value loss beside the policy loss", 0.5, gt=0)
    clip: float | None = Field("values move at most this far from those of the rollout; null does not clip", 0.5, gt=0)
    warmup_steps: int = Field("first steps in which the critic learns alone", 0, ge=0)


# Keys that not every run reads: the keys, the key that decides, and which of its values read them ("": any but off).
_READ_BY = (
    ("critic lam whiten turn_rewards", "advantage", "gae bilevel_gae"),
    ("gamma", "advantage", "turn_return gae bilevel_gae"),
    ("gamma_high", "advantage", "bilevel_gae"),
    ("step_weight step_gamma step_similarity", "advantage", "gigpo"),
    ("turn_norm", "advantage", "turn_return"),
    ("advantage_std", "advantage", "grpo brpo turn_return gigpo"),
    ("epsilon", "loss_type", "ppo_clip gspo_turn gspo_episode"),
    ("epsilon_high", "loss_type", "ppo_clip gspo_turn gspo_episode cispo"),
    ("dual_clip", "loss_type", "ppo_clip"),
    ("delta", "loss_type", "dppo_tv"),
    ("kl_in kl_estimator", "beta", ""),
    ("entropy_delta", "entropy_target", ""),
    ("importance_range", "importance", "truncate mask sequence_mask geometric_mask"),
    ("filter.value", "filter.strategy", "top_k top_k_abs top_p top_p_softmax min_p"),
    ("filter.largest", "filter.strategy", "top_k top_k_abs top_p top_p_softmax min_p percentile"),
    ("filter.band", "filter.strategy", "percentile"),
)


class AlgorithmSection(Section):
    preset: str | None = Field(
        "configs/presets/NAME.yaml is laid under the keys of this file; on the command line, over them", None
    )
    advantage: Literal[
        "grpo",
        "rloo",
        "brpo",
        "arpo",
        "maxrl",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "turn_return",
        "gigpo",
        "gae",
        "bilevel_gae",
    ] = Field(
        "how rewards become advantages: of an episode among its group (grpo, rloo, maxrl), in the whole batch (brpo,"
        " reinforce_pp) or as it is (arpo); of a turn (turn_return, gigpo); of a token (gae, bilevel_gae: a critic; an"
        " episode that a limit ended is worth nothing afterwards, as the turns left are shown to model and critic)",
        "grpo",
    )
    advantage_std: bool = Field(
        "grpo, brpo, turn_return, gigpo: divide by the standard deviation; false is Dr. GRPO's choice", True
    )
    gamma: float = Field("turn_return: discount of a turn; gae, bilevel_gae: of a token", 1.0, gt=0, le=1)
    lam: float = Field("gae, bilevel_gae: lambda", 1.0, ge=0, le=1)
    gamma_high: float = Field("bilevel_gae: discount of a turn", 0.95, gt=0, le=1)
    turn_norm: Literal["group_turn", "batch"] = Field(
        "turn_return: compared with the same turn of the group, or with all turns of the batch", "group_turn"
    )
    step_weight: float = Field("gigpo: weight of the comparison within a state", 1.0, ge=0)
    step_gamma: float = Field("gigpo: discount of a turn", 0.95, gt=0, le=1)
    step_similarity: float | None = Field(
        "gigpo: states whose texts are at least this similar count as one; null wants the same state", None, gt=0, le=1
    )
    turn_rewards: bool = Field(
        "gae, bilevel_gae: what a turn earned stands at its end; false: all that an episode earned stands at its end",
        True,
    )
    whiten: bool = Field("gae, bilevel_gae: normalise the advantages over all trained tokens", True)
    critic: CriticSection = Field("gae, bilevel_gae: who estimates values", CriticSection())
    loss_type: Literal["ppo_clip", "gspo_turn", "gspo_episode", "cispo", "dppo_tv"] = Field(
        "the policy loss; gspo compares whole turns or whole episodes instead of tokens (with aggregation:"
        " sequence_mean)",
        "ppo_clip",
    )
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = Field(
        "mean over the sampled tokens of the whole step, all ranks; mean over episodes of their token means; or Dr."
        " GRPO's sum of tokens over a constant",
        "token_mean",
    )
    epsilon: float = Field("lower clip: the ratio counts from 1 - epsilon", 0.2, gt=0, lt=1)
    epsilon_high: float = Field("upper clip: the ratio counts up to 1 + epsilon_high; cispo: up to it", 0.28, gt=0)
    dual_clip: float | None = Field("ppo_clip: a bad token counts at most this many times; null does not", None, gt=1)
    delta: float = Field("dppo_tv: how far the probability of a token may move", 0.2, gt=0)
    beta: float = Field("weight of the KL to the model that the run began with", 0.0, ge=0)
    kl_in: Literal["loss", "reward"] = Field("beta times the KL is added to the loss, or taken from the reward", "loss")
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        "Schulman's estimators of the KL; null is k3 in the loss and k1 in the reward, where no other has the gradient"
        " of the KL",
        None,
    )
    entropy_coef: float = Field("weight of the entropy bonus", 0.0, ge=0)
    entropy_target: float | None = Field("entropy_coef moves until the entropy is here; null leaves it", None, gt=0)
    entropy_delta: float = Field("by how much it moves in one step", 0.005, gt=0)
    importance: Literal["none", "truncate", "mask", "sequence_mask", "geometric_mask"] = Field(
        "where sampler and trainer differ: nothing; weight tokens by their ratio, up to the end of `importance_range`"
        " (truncate) or leaving those outside it out (mask); the same for whole episodes by the product of the ratios,"
        " or without weights by the geometric mean",
        "none",
    )
    importance_range: list[float] = Field("see importance", [0.0, 3.0], min_length=2, max_length=2)
    num_iterations: int = Field("passes over one rollout", 1, ge=1)
    minibatches: int = Field("optimizer steps in one pass", 1, ge=1)
    filter: FilterSection = Field("which groups are trained on", FilterSection())
    max_empty_steps: int = Field(
        "stop after so many steps in a row in which no group passed the filter; more where few groups differ anyway",
        5,
        ge=1,
    )
    mask_truncated: bool = Field("leave episodes that a limit ended out of the loss", False)

    @model_validator(mode="after")
    def _no_contradiction(self) -> AlgorithmSection:
        found = self.model_dump()
        for keys, decides, values in _READ_BY:
            now = _at(found, decides)
            if now in values.split() if values else now:
                continue
            for key in keys.split():
                if self.written(key):
                    now = "null" if now is None else now
                    raise wrong(
                        f"`{key}` belongs to {values.replace(' ', ' and ') or decides}, and this run has"
                        f" `{decides}: {now}`: leave it out, or change `{decides}`"
                    )
        if self.filter.strategy == "soft" and self.critical:
            raise wrong("the soft filter weights group-relative advantages; with a critic choose another filter")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.epsilon_high:
            raise wrong(f"`dual_clip` ({self.dual_clip}) must lie above 1 + epsilon_high ({1 + self.epsilon_high})")
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise wrong("cispo's `epsilon_high` bounds the ratio itself: write a number above 1, e.g. 5")
        if self.loss_type.startswith("gspo") and max(self.epsilon, self.epsilon_high) > 0.05:
            raise wrong(
                "the ratios of gspo are means over many tokens: write a small `epsilon` and `epsilon_high`, e.g. 3e-4"
                " and 4e-4"
            )
        if self.beta > 0 and (self.kl_in, self.kl_kind) == ("loss", "k1"):
            raise wrong("in a loss the gradient of k1 is zero on average: write k2 or k3, or `kl_in: reward`")
        if self.beta > 0 and self.kl_in == "reward" and self.kl_kind != "k1":
            raise wrong(
                f"as a reward, the gradient of {self.kl_kind} is not that of the KL and may point away from it: write"
                " `kl_estimator: k1`, or `kl_in: loss`"
            )
        if self.loss_type.startswith("gspo") and self.aggregation != "sequence_mean":
            raise wrong(
                f"gspo is a mean over sequences (arXiv 2507.18071, eq. 5), and `aggregation: {self.aggregation}` would"
                " weigh a sequence by its length: write `aggregation: sequence_mean`"
            )
        if not 0 <= self.importance_range[0] < self.importance_range[1]:
            raise wrong("`importance_range` goes from a smaller to a larger ratio, e.g. [0.5, 3]")
        return self

    def written(self, key: str) -> bool:
        """Whether the file or the command line says this value; what a default or the preset says is never wrong."""
        value = _at(self.model_dump(), key)
        if value == _at(type(self).model_construct().model_dump(), key):
            return False
        return self.preset is None or value != _at(read_yaml(PRESETS / f"{self.preset}.yaml"), f"algorithm.{key}")

    @property
    def critical(self) -> bool:
        """Whether there is a critic."""
        return self.advantage in ("gae", "bilevel_gae")

    @property
    def kl_kind(self) -> str:
        """The estimator of the KL in use."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def keeps_scale(self) -> bool:
        """Whether advantages are as large as rewards are, so that environments with larger rewards weigh more."""
        if self.advantage in ("grpo", "brpo", "turn_return", "gigpo"):
            return not self.advantage_std
        return self.advantage in ("arpo", "rloo") or (self.critical and not self.whiten)

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in presets():
            raise wrong(f"there is no preset `{name}`, only {', '.join(presets())}{hint(name, presets())}")
        return name


class DistillationSection(Section):
    """Generalized knowledge distillation (Agarwal et al., arXiv 2306.13649) with lmbda 0 and beta 0: the teacher is the
    model that phase 3 starts from, rows are its own answers, and the divergence is KL(teacher || policy)."""

    sources: list[Source] = Field(
        "where the prompts come from, as in phases 1 and 2, `rows` of each; answers that stand there are not read",
        min_length=1,
    )
    decontaminate: bool = Field("drop prompts that share 13 words in a row with an evaluation set", True)
    coef: float = Field("weight of the KL in the loss; 0 only measures it", 1.0, ge=0)
    batch_size: int = Field("rows that are read in an optimizer step, over all processes", 32, ge=1)
    max_new_tokens: int = Field("longest answer", 256, ge=1)
    temperature: float = Field("at which the answers are sampled; 1 is the model itself", 1.0, gt=0)
    eval_rows: int = Field("rows held out, on which the KL is measured at each evaluation", 128, ge=1)


class StarPOTrainerSection(Section):
    learning_rate: float | None = Field(
        "peak learning rate; null takes what fits model.tuning: 1e-6 for full, 1e-5 for lora and qlora", None, gt=0
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "after the warm-up; the others fall towards 0, warmup_stable_decay in the last quarter", "constant"
    )
    warmup_steps: int = Field("steps over which the learning rate rises from 0", 0, ge=0)
    max_steps: int = Field("rollouts, each followed by its update", 200, ge=1)
    micro_batch_tokens: int | None = Field(
        "token budget of one forward and backward; changes memory, not the result; null takes what fits into it",
        None,
        ge=1,
    )
    optim: Literal["adamw_torch", "adamw_8bit", "paged_adamw_8bit"] = Field(
        "optimizer; 8 bits need bitsandbytes", "adamw_torch"
    )
    adam_beta1: float = Field("decay of the first moment", 0.9, ge=0, lt=1)
    adam_beta2: float = Field("decay of the second moment", 0.999, ge=0, lt=1)
    weight_decay: float = Field("decoupled weight decay", 0.0, ge=0)
    max_grad_norm: float = Field("gradients are clipped to this norm", 1.0, gt=0)
    bf16: bool | None = Field(
        "compute in bfloat16 (autocast; weights stay float32); null does so where the GPU or CPU has it in hardware",
        None,
    )
    gradient_checkpointing: bool | None = Field(
        "recompute activations to save memory; null does so where less than four contexts would fit without", None
    )


MATH = "share of right answers; null leaves it out"
REPETITION = "how much open answers repeat themselves; null leaves it out"
RECALL = "memory of earlier turns; null leaves it out"
PREFERENCES = "share of pairs ranked right; null leaves it out"


class Suite(Section):
    n: int = Field("prompts", 200, ge=1, le=1_000_000)
    max_new_tokens: int = Field("longest answer", 256, ge=1)


class MathSuite(Suite):
    sources: list[str] = Field(
        "embedded, gsm8k, math500, or local files with question and answer", ["embedded"], min_length=1
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


class PreferenceSuite(Section):
    source: str = Field("embedded, ultrafeedback (its test_prefs), or a local file with the same columns", "embedded")
    n: int = Field("held-out pairs", 200, ge=1, le=1_000_000)


class FormerSuites(Section):
    """What phases 1 and 2 taught; math and recall are answered greedily, open prompts at temperature 1."""

    math: MathSuite | None = Field(MATH, None)
    repetition: RepetitionSuite | None = Field(REPETITION, None)
    recall: RecallSuite | None = Field(RECALL, None)
    preferences: PreferenceSuite | None = Field(PREFERENCES, None)


class EvaluationSection(Section):
    every: int = Field("steps between two evaluations; there is one before the first step, too", 10, ge=1)
    episodes: int = Field("held-out episodes of each world", 128, ge=1, le=1_000_000)
    temperature: float = Field("of these episodes; 0 is greedy", 0.5, ge=0)
    split: Literal["validation", "test"] = Field("levels that choose the best checkpoint", "validation")
    final_episodes: int = Field("episodes of each world after the last step", 256, ge=1, le=1_000_000)
    final_split: Literal["validation", "test"] = Field("levels of the last evaluation", "test")
    suites: FormerSuites = Field(
        "a few held-out prompts on what phases 1 and 2 taught, asked at each evaluation: is it forgotten?",
        FormerSuites(),
    )


class CheckpointSection(Section):
    every: int = Field("steps between two checkpoints", 10, ge=1)
    keep: int = Field("checkpoints kept beside the best", 2, ge=1)


class DiagnosticsSection(Section):
    every: int = Field("steps between two looks at whether thoughts depend on their prompts; 0 never looks", 10, ge=0)
    pairs: int = Field("thoughts that are scored under as many prompts, in each of two scopes", 32, ge=2, le=65536)
    gradients_every: int = Field("steps between two looks at the gradients by reward spread; 0 never looks", 0, ge=0)
    early_stop: bool = Field("end the run at an alarm that says further steps are wasted", True)
    rollbacks: int = Field(
        "how often the run may go back to its best checkpoint and change a setting by itself", 0, ge=0
    )


class TranscriptSection(Section):
    every: int = Field("steps between two sets of transcripts", 10, ge=1)
    count: int = Field("whole episodes written each time; at any step as many whose world raised", 4, ge=0)


class StarPORun(TrainingRun):
    """Phase 3; `model.name_or_path` is the folder phase 2 handed over."""

    rates = STARPO_RATES
    preset_key = "algorithm.preset"

    model: ModelSection = Field("the policy")
    chat: ChatSection = Field("how messages become tokens; must be what phases 1 and 2 used", ChatSection())
    worlds: list[Annotated[TrainingWorld, BeforeValidator(_named)]] = Field(
        "the worlds that are played, mixed", min_length=1
    )
    protocol: ProtocolSection = Field("turns, answer format and penalties", ProtocolSection())
    rollout: RolloutSection = Field("how episodes are sampled", RolloutSection())
    algorithm: AlgorithmSection = Field("how episodes become an update", AlgorithmSection())
    distillation: DistillationSection | None = Field(
        "what keeps the policy from forgetting: the KL to the model it starts from, on that model's answers to old"
        " prompts; null leaves it out",
        None,
    )
    trainer: StarPOTrainerSection = Field("the optimizer, under TRL's names", StarPOTrainerSection())
    evaluation: EvaluationSection = Field("held-out levels", EvaluationSection())
    checkpoint: CheckpointSection = Field("what is kept to resume from", CheckpointSection())
    transcripts: TranscriptSection = Field("whole episodes to read", TranscriptSection())
    diagnostics: DiagnosticsSection = Field("what is watched, and what an alarm may do", DiagnosticsSection())

    @model_validator(mode="after")
    def _worlds_fit(self) -> StarPORun:
        names = [world.name for world in self.worlds]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise wrong(f"worlds has {twice[0]} twice, and figures go by name: write it once (`curriculum` varies it)")
        for n, world in enumerate(self.worlds):
            for number, stage in enumerate(world.curriculum):
                if stage.from_step is not None and stage.from_step > self.trainer.max_steps:
                    raise wrong(
                        f"worlds.{n}.curriculum.{number} begins at step {stage.from_step}, after the last one: lower"
                        f" from_step or raise trainer.max_steps ({self.trainer.max_steps})"
                    )
        return self

    @model_validator(mode="after")
    def _no_contradiction(self) -> StarPORun:
        algorithm, chosen, siblings = self.algorithm, self.algorithm.filter, self.rollout.num_generations
        if siblings == 1:
            compares = algorithm.advantage in ("grpo", "rloo", "maxrl", "reinforce_pp_baseline", "gigpo")
            if compares or (algorithm.advantage, algorithm.turn_norm) == ("turn_return", "group_turn"):
                raise wrong(
                    f"`algorithm.advantage: {algorithm.advantage}` compares the episodes of a group, and"
                    " `rollout.num_generations: 1` makes groups of one: play at least 2, or take reinforce_pp or gae"
                )
            if "reward_" in chosen.metric and (chosen.strategy != "none" or not chosen.keep_zero):
                raise wrong(
                    "groups of one have no spread of rewards: with `rollout.num_generations: 1` write"
                    " `algorithm.filter: {strategy: none, keep_zero: true}`"
                )
        if chosen.strategy == "top_k_abs" and chosen.value > self.rollout.groups:
            raise wrong(
                f"`algorithm.filter.value` ({chosen.value:g}) is more groups than are played ({self.rollout.groups},"
                " `rollout.groups`)"
            )
        if chosen.within is not None and chosen.within > siblings:
            raise wrong(f"`algorithm.filter.within` ({chosen.within}) is more episodes than a group has ({siblings})")
        if chosen.strategy == "top_k_abs" and chosen.value < len(self.worlds):
            raise wrong(
                f"`algorithm.filter.value` ({chosen.value:g}) is fewer groups than there are environments"
                f" ({len(self.worlds)}), each of which keeps at least one: write at least {len(self.worlds)}"
            )
        most, parts = chosen.most(self.rollout.groups, len(self.worlds)), algorithm.minibatches
        if parts > most and algorithm.written("minibatches"):
            raise wrong(
                f"`algorithm.minibatches` ({parts}) is more than the groups that a step can keep ({most}): write less,"
                " or play more (`rollout.groups`)"
            )
        if algorithm.critic.warmup_steps >= (steps := self.trainer.max_steps):
            raise wrong(
                f"`algorithm.critic.warmup_steps` ({algorithm.critic.warmup_steps}) leaves no step to the policy: write"
                f" less than `trainer.max_steps` ({steps})"
            )
        if algorithm.advantage == "maxrl" and algorithm.beta > 0 and algorithm.kl_in == "reward":
            raise wrong("maxrl divides by the mean reward, which the KL would make negative: `algorithm.kl_in: loss`")
        if algorithm.advantage == "maxrl" and self.protocol.format_penalty != 0:
            raise wrong("maxrl divides by the mean reward, which must not be negative: `protocol.format_penalty: 0`")
        if algorithm.critical and algorithm.critic.kind == "lora" and self.model.tuning == "full":
            raise wrong(
                "a LoRA critic shares the frozen base of a LoRA policy: set `model.tuning: lora`, or another kind"
            )
        if algorithm.critical and algorithm.critic.kind == "separate" and self.model.tuning == "qlora":
            raise wrong(
                "a separate critic trains a copy, which four-bit weights cannot be: `algorithm.critic.kind: shared`"
            )
        if self.evaluation.split == self.evaluation.final_split:
            raise wrong("`evaluation.split` chooses the best checkpoint, so `final_split` must be another one")
        if self.rollout.engine == "vllm" and self.model.tuning == "qlora":
            raise wrong("vLLM is not given four-bit weights: write `rollout.engine: auto`, or `model.tuning: lora`")
        if self.distillation and self.distillation.max_new_tokens + 8 > self.rollout.max_context:
            raise wrong(
                f"`distillation.max_new_tokens` ({self.distillation.max_new_tokens}) leaves no prompt any room in"
                f" `rollout.max_context` ({self.rollout.max_context}), which holds both: lower it"
            )
        if algorithm.loss_type == "gspo_episode" and self.rollout.context != "full":
            raise wrong("gspo_episode needs an episode in one context: `rollout.context: full`, or take gspo_turn")
        return self

    @classmethod
    def preset_keys(cls, given: dict[str, Any]) -> dict[str, Any]:
        algorithm = given.get("algorithm")
        name = algorithm.get("preset") if isinstance(algorithm, dict) else None
        return read_yaml(PRESETS / f"{name}.yaml") if name in presets() else {}


# --------------------------------------------------------------------------------------------------- evaluator and chat


class NamedSampling(SamplingSection):
    name: str = Field("column of the table, e.g. greedy", min_length=1)


class Settings(Section):
    """Which of the run's sampling settings a suite is measured under, and which of them stands in the table."""

    settings: list[str] | None = Field("names of the sampling settings used; null uses all", None, min_length=1)
    headline: str | None = Field("name of the setting shown in the table; null shows the first", None)


class SampledSuite(Settings, Suite):
    n_others: int | None = Field("prompts under the settings that are not in the table; null asks all", None, ge=1)


class SampledMath(SampledSuite, MathSuite): ...


class SampledRepetition(SampledSuite, RepetitionSuite): ...


class SampledRecall(SampledSuite, RecallSuite): ...


class ComparedPreferences(PreferenceSuite):
    reference: str | None = Field("name of the checkpoint rewards are measured against; null has none", None)


class WorldSuite(Settings):
    worlds: list[World] = Field("the worlds that are played", min_length=1)
    protocol: ProtocolSection = Field("turns, answer format and penalties; as in phase 3", ProtocolSection())
    episodes: int = Field("held-out levels of each world", 256, ge=1, le=1_000_000)
    episodes_others: int | None = Field("levels under the settings that are not in the table", None, ge=1)
    split: Literal["validation", "test"] = Field("which levels", "test")
    max_completion_length: int = Field("new tokens in one turn", 64, ge=1)
    max_context: int = Field(MAX_CONTEXT, 1024, ge=8)
    context: Context = Field(CONTEXT, "full")
    context_turns: int | None = Field(CONTEXT_TURNS, None, ge=1)

    _context = model_validator(mode="after")(turns_where_counted)


class SuitesSection(Section):
    math: SampledMath | None = Field(MATH, None)
    repetition: SampledRepetition | None = Field(REPETITION, None)
    recall: SampledRecall | None = Field(RECALL, None)
    preferences: ComparedPreferences | None = Field(PREFERENCES, None)
    worlds: WorldSuite | None = Field("success in the worlds; null leaves it out", None)


class EvaluateRun(Run):
    """The evaluator; the first checkpoint is the one that the others are compared with."""

    checkpoints: dict[str, str] = Field(
        "name: folder or Hub id, in the order of the table; the first is the base", min_length=1
    )
    chat: ChatSection = Field("template for a checkpoint that has none", ChatSection())
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
    bootstrap_samples: int = Field("resamples behind each interval of a difference", 2000, ge=100, le=1_000_000)
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
            if isinstance(suite, Settings):
                for name in [*(suite.settings or []), *([suite.headline] if suite.headline else [])]:
                    if name not in known:
                        raise wrong(f"suites.{key} names the setting `{name}`, not in {', '.join(known)}")
                if suite.headline and suite.settings and suite.headline not in suite.settings:
                    raise wrong(f"suites.{key}.headline is `{suite.headline}`, which its own settings leave out")
        reference = self.suites.preferences.reference if self.suites.preferences else None
        if reference is not None and reference not in self.checkpoints:
            raise wrong(f"suites.preferences.reference is `{reference}`, not in {', '.join(self.checkpoints)}")
        return self


class ChatRun(Section):
    """Chat in the terminal, and watching the model play."""

    model: ModelSection = Field("the model that answers")
    chat: ChatSection = Field("how messages become tokens", ChatSection())
    device: Literal["auto", "cpu", "cuda"] = Field("auto takes the GPU if there is one", "auto")
    seed: int = Field("everything random is derived from it", 0, ge=0)
    hardware: str = Field("free text: what this file was written for", "")
    system: str | None = Field("system message; null sends none", None)
    max_new_tokens: int = Field("longest answer", 512, ge=1)
    preset: str = Field("the preset that answers unless --compare asks for two", "improved")
    presets: dict[str, SamplingSection] = Field(
        "sampling settings by name",
        {
            "improved": SamplingSection(repetition_penalty=1.15, temperature=0.7, top_p=0.9, top_k=50),
            "plain": SamplingSection(),
            "greedy": SamplingSection(temperature=0.0),
        },
        min_length=1,
    )
    worlds: list[World] = Field("options of the worlds for --play; others are played as they come", [])
    protocol: ProtocolSection = Field("turns and answer format for --play; as in phase 3", ProtocolSection())
    max_completion_length: int = Field("new tokens in one turn of --play", 64, ge=1)
    context: Context = Field(CONTEXT + " (--play)", "full")
    context_turns: int | None = Field(CONTEXT_TURNS, None, ge=1)

    _context = model_validator(mode="after")(turns_where_counted)

    @model_validator(mode="after")
    def _known_preset(self) -> ChatRun:
        if self.preset not in self.presets:
            known = list(self.presets)
            raise wrong(f"there is no preset `{self.preset}`, only {', '.join(known)}{hint(self.preset, known)}")
        return self
