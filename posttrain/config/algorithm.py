"""How episodes become an update: the keys of phase 3's section `algorithm`."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from posttrain.config.shared import PRESETS, Field, OwnFunction, Section, hint, wrong
from posttrain.config.yaml_file import read_yaml
from posttrain.types import value_at


class FilterSection(Section):
    """RAGEN's rollout filter (StarPO-S, arXiv 2504.20073; RAGEN-2, arXiv 2604.06268)."""

    metric: Literal["reward_std", "reward_variance", "reward", "entropy", "entropy_variance", "length"] = Field(
        "what groups are ranked by: the std or the mean of the raw rewards, the mean or the variance of the entropy"
        " of an episode's tokens (one more forward pass), or the sampled tokens (RAGEN's rollout_filter_metric)",
        "reward_std",
    )
    strategy: Literal["none", "top_k", "top_k_abs", "top_p", "top_p_softmax", "min_p", "soft"] = Field(
        "none keeps all groups; top_k the best share `value`; top_k_abs the best `value`; top_p the fewest that hold"
        " the share `value` of the metric; top_p_softmax the same of its softmax; min_p those above `value` times the"
        " best; soft all, each weighted by its deviation over the largest. Groups are ranked within their environment,"
        " and each environment keeps its share (RAGEN's rollout_filter_strategy)",
        "none",
    )
    value: float = Field("see strategy: a share, or a number of groups for top_k_abs", 0.5, gt=0)
    largest: bool = Field(
        "keep the groups where the metric is largest; false keeps the smallest (RAGEN's rollout_filter_type)", True
    )
    keep_zero: bool = Field("also keep groups whose metric is 0; with a std of rewards these carry no signal", False)

    @model_validator(mode="after")
    def _fits(self) -> FilterSection:
        if self.strategy == "top_k_abs" and (self.value != int(self.value)):
            raise wrong("`value` is a number of groups for top_k_abs: write a whole number, e.g. 8")
        if self.strategy not in ("top_k_abs", "none", "soft") and self.value > 1:
            raise wrong(f"`value` is a share for {self.strategy}: write a number up to 1, e.g. 0.5, or use top_k_abs")
        if self.strategy == "soft" and self.metric != "reward_std":
            raise wrong("the soft filter weights groups by the deviation of their rewards: `metric: reward_std`")
        if self.metric == "reward" and self.strategy in ("top_p", "min_p"):
            raise wrong(f"mean rewards may be negative, and {self.strategy} takes shares of them: write top_p_softmax")
        return self

    def most(self, groups: int, environments: int = 1) -> int:
        """Return the largest number of groups that can be kept; every environment keeps at least one."""
        kept = {"top_k": int(self.value * groups), "top_k_abs": int(self.value)}
        return min(groups, max(environments, kept.get(self.strategy, groups)))


def presets() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


class CriticSection(Section):
    kind: Literal["shared", "separate"] = Field(
        "shared: a value head on the policy's trunk; separate: a model of its own, as in RAGEN", "shared"
    )
    learning_rate: float = Field("of the value head, and of a separate critic (RAGEN's critic.optim.lr)", 1e-5, gt=0)
    clip: float | None = Field(
        "values move at most this far from those of the rollout; null does not clip (RAGEN's cliprange_value)",
        0.5,
        gt=0,
    )
    warmup_steps: int = Field("first steps in which the critic learns alone (RAGEN's critic_warmup)", 0, ge=0)


# Keys that not every run reads: the keys, the key that decides, and which of its values read them.
_READ_BY = (
    ("critic lam turn_rewards gamma", "advantage", "gae bilevel_gae"),
    ("gamma_high", "advantage", "gigpo bilevel_gae"),
    ("step_weight", "advantage", "gigpo"),
    ("advantage_std", "advantage", "grpo brpo gigpo"),
    ("epsilon", "loss_type", "ppo_clip gspo"),
    ("delta", "loss_type", "ppo_clip"),
    ("filter.value filter.largest", "filter.strategy", "top_k top_k_abs top_p top_p_softmax min_p"),
)


class AlgorithmSection(Section):
    preset: str | None = Field(
        "configs/presets/NAME.yaml is laid under the keys of this file; on the command line, over them", None
    )
    advantage: (
        Literal[
            "grpo",
            "rloo",
            "brpo",
            "arpo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "gigpo",
            "gae",
            "bilevel_gae",
        ]
        | OwnFunction
    ) = Field(
        "how rewards become advantages, all but gigpo RAGEN's: of an episode among its group (grpo, rloo), in the"
        " whole batch (brpo, reinforce_pp) or as it is (arpo); of a turn and its episode (verl-agent's gigpo); of a"
        " token (gae, bilevel_gae: a critic; an episode that a limit of turns ended is worth nothing afterwards, as the"
        " turns left are shown to model and critic; one whose next prompt did not fit into the context is worth what"
        " the critic expects); or MODULE:FUNCTION, which gives each sampled token its advantage",
        "grpo",
    )
    advantage_std: bool = Field(
        "grpo, brpo, gigpo: divide by the standard deviation; false is Dr. GRPO's choice (RAGEN's"
        " norm_adv_by_std_in_grpo, TRL's scale_rewards)",
        True,
    )
    gamma: float = Field("gae, bilevel_gae: discount of a token (RAGEN's)", 1.0, gt=0, le=1)
    lam: float = Field("gae, bilevel_gae: lambda (RAGEN's)", 1.0, ge=0, le=1)
    gamma_high: float = Field(
        "gigpo, bilevel_gae: discount of a turn (verl-agent's gamma, RAGEN's high_level_gamma)", 0.95, gt=0, le=1
    )
    step_weight: float = Field(
        "gigpo: weight of the comparison within a state (verl-agent's step_advantage_w)", 1.0, ge=0
    )
    turn_rewards: bool = Field(
        "gae, bilevel_gae: put the reward of a turn at its last token; false puts an episode's return at its last"
        " token",
        True,
    )
    critic: CriticSection = Field("gae, bilevel_gae: the model that estimates values", CriticSection())
    loss_type: Literal["ppo_clip", "gspo", "cispo"] | OwnFunction = Field(
        "the policy loss; gspo has one ratio for each context instead of each token: for an episode under `context:"
        " full`, for a turn under the others (with `aggregation: sequence_mean`; TRL's importance_sampling_level:"
        " sequence); or MODULE:FUNCTION, which gives each sampled token its loss",
        "ppo_clip",
    )
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = Field(
        "mean over the sampled tokens of the whole step, all ranks; mean over episodes of their token means; or Dr."
        " GRPO's sum of tokens over a constant (TRL's loss_type: dapo, grpo and dr_grpo)",
        "token_mean",
    )
    epsilon: float = Field("lower clip: the ratio counts from 1 - epsilon", 0.2, gt=0, lt=1)
    epsilon_high: float = Field("upper clip: the ratio counts up to 1 + epsilon_high; cispo: up to it", 0.28, gt=0)
    delta: float | None = Field(
        "ppo_clip: where the advantage is negative, the ratio counts up to this (TRL's name for the dual clip; RAGEN's"
        " clip_ratio_c is 3); null sets no limit",
        None,
        gt=1,
    )
    beta: float = Field(
        "weight of the KL to the model that the run started from, by Schulman's estimator k3, in the loss", 0.0, ge=0
    )
    entropy_coef: float = Field("weight of the entropy bonus", 0.0, ge=0)
    importance_sampling_clip_max: float | None = Field(
        "where sampler and trainer differ, as in bfloat16 or with servers, tokens are weighted by the ratio of their"
        " probabilities, at most by this (as TRL's vllm_importance_sampling_clip_max with token_truncate, for every"
        " engine); null does not weight them",
        2.0,
        gt=0,
    )
    num_iterations: int = Field("epochs over one rollout (TRL's mu)", 1, ge=1)
    minibatches: int = Field("optimizer steps in one epoch", 1, ge=1)
    filter: FilterSection = Field("which groups are trained on", FilterSection())
    max_empty_steps: int = Field(
        "stop after so many steps in a row in which no group passed the filter (RAGEN's"
        " rollout_filter_empty_stop_steps); more where few groups differ anyway",
        10,
        ge=1,
    )
    mask_truncated_completions: bool = Field("leave episodes that a limit ended out of the loss (TRL's)", False)

    @model_validator(mode="after")
    def _no_contradiction(self) -> AlgorithmSection:
        keys_now = self.model_dump()
        for keys, decides, values in _READ_BY:
            now = value_at(keys_now, decides)
            if now in values.split() or ":" in str(now):  # a user's function may read every key
                continue
            for key in keys.split():
                if self.written(key):
                    raise wrong(
                        f"`{key}` belongs to {values.replace(' ', ' and ')}, and this run has"
                        f" `{decides}: {now}`: leave it out, or change `{decides}`"
                    )
        if self.filter.strategy == "soft" and self.critical:
            raise wrong("the soft filter weights group-relative advantages; with a critic choose another filter")
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            raise wrong(f"`delta` ({self.delta}) must lie above 1 + epsilon_high ({1 + self.epsilon_high})")
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise wrong("cispo's `epsilon_high` bounds the ratio itself: write a number above 1, e.g. 5")
        if self.loss_type == "gspo" and max(self.epsilon, self.epsilon_high) > 0.05:
            raise wrong(
                "the ratios of gspo are means over many tokens: write a small `epsilon` and `epsilon_high`, e.g. 3e-4"
                " and 4e-4"
            )
        if self.loss_type == "gspo" and self.aggregation != "sequence_mean":
            raise wrong(
                f"gspo is a mean over sequences (arXiv 2507.18071, eq. 5), and `aggregation: {self.aggregation}` would"
                " weigh a sequence by its length: write `aggregation: sequence_mean`"
            )
        return self

    def written(self, key: str) -> bool:
        """Return whether the file or the command line sets this value; a default or a preset is never wrong."""
        value = value_at(self.model_dump(), key)
        if value == value_at(type(self).model_construct().model_dump(), key):
            return False
        return self.preset is None or value != value_at(read_yaml(PRESETS / f"{self.preset}.yaml"), f"algorithm.{key}")

    @property
    def critical(self) -> bool:
        """Return whether there is a critic."""
        return self.advantage in ("gae", "bilevel_gae")

    @property
    def compares_groups(self) -> bool:
        """Return whether an episode is compared with others of its group, so that a group of one teaches nothing."""
        return self.advantage in ("grpo", "rloo", "reinforce_pp_baseline", "gigpo")

    @property
    def keeps_scale(self) -> bool:
        """Return whether advantages have the scale of rewards, so that environments with larger rewards weigh more."""
        if self.advantage in ("grpo", "brpo", "gigpo"):
            return not self.advantage_std
        return self.advantage in ("arpo", "rloo")

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in presets():
            raise wrong(f"there is no preset `{name}`, only {', '.join(presets())}{hint(name, presets())}")
        return name
