"""How episodes become an update: the keys of phase 3's section `algorithm`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from posttrain.config.shared import PRESETS, Field, Section, hint, wrong
from posttrain.config.yaml_file import read_yaml


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
        "let groups through whose metric is 0: for a std of rewards, those that carry no signal", False
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
