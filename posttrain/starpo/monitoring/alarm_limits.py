"""At which limit does an alarm fire, and what does it advise?  Limits and texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from posttrain.config import StarPORun

LIMITS: dict[str, float] = {  # benchmarks/alarms.py and tests/fixtures/alarms.json hold healthy and failing runs
    "variance_collapse": 0.27,  # of its best
    "variance_gone": 0.10,  # of its best, mean of 10 steps: RAGEN's early stopping
    "saturated": 0.8,  # success from which a small std or entropy, or steps without a group, raise no alarm
    "solved": 0.95,  # success from which such steps end a run all the same
    "entropy_collapse": 0.13,  # of the start, times what the success leaves
    "entropy_explosion": 3.0,  # times its lowest, without a gain in success
    "entropy_floor": 0.1,  # nats; a lowest entropy below it counts as this
    "gradient_growth": 5.0,  # times its lowest median of 10 steps, without a gain in success
    "repetition": 0.15,  # share of repeated 4-grams above the lowest
    "template_collapse": 0.5,  # of the first z-scores, while the conditional entropy keeps 0.75 of its own
    "format_decay": 0.10,  # share of invalid turns above the lowest
    "success_drop": 0.6,  # of its best
    "wavering": 0.92,  # of its best success: a healthy policy may lose that much
    "clip_fraction": 0.05,  # median of 5 steps
    "forgetting": 0.03,  # nats a token from the teacher, on held-out prompts of the phases before
    "skill_lost": 0.9,  # of the accuracy at the start of the run
    "sampler_gap": 1e-4,  # nats, mean over tokens; float32. HALF_PRECISION_GAP for bfloat16
    "skipped_updates": 3,  # in 10 steps
    "all_invalid": 0.95,  # of the turns of an environment, mean of 5 steps
    "no_success": 0.01,  # success of an environment that its episodes so far rule out
    "validation": 0.01,  # success that 5 or more evaluations in a row rule out
    "empty_steps": 10,  # in a row
    "not_finite": 5,  # rows in a row
}
HALF_PRECISION_GAP = 16 * 2**-8  # nats, mean over tokens: 16 steps of bfloat16; about 5 were seen


@dataclass(frozen=True)
class Option:
    """One change to advise, and whether it is useful for a run (a setting that the run already has is not advised)."""

    words: str
    useful: Callable[[StarPORun], bool] = lambda cfg: True


class Advice(NamedTuple):
    """The advice of an alarm; `{options}` in `text` stands for the options that are useful for the run."""

    severity: str
    text: str
    options: tuple[Option, ...] = ()
    otherwise: str = ""  # instead of `text` if no option is useful

    def words(self, cfg: StarPORun | None = None) -> str:
        """Return the advice for this run, or with all options if `cfg` is None."""
        chosen = [option.words for option in self.options if cfg is None or option.useful(cfg)]
        if self.options and not chosen:
            return self.otherwise
        *first, last = chosen or [""]
        return self.text.format(options=f"{', '.join(first)} or {last}" if first else last)


def _filters(cfg: StarPORun) -> bool:
    """Return whether only groups with different rewards are trained on, where rewards teach anything."""
    return not cfg.rewarded or (cfg.algorithm.filter.strategy != "none" and not cfg.algorithm.filter.keep_zero)


STARPO_S = Option("preset starpo-s (`algorithm.preset`)", lambda cfg: not _filters(cfg))
RAGEN2 = Option(
    "train on the groups whose rewards differ (preset ragen2; or `algorithm.filter.strategy: top_p`, `value: 0.9`,"
    " `keep_zero: false`)",
    lambda cfg: cfg.rewarded and (cfg.algorithm.filter.strategy != "top_p" or cfg.algorithm.filter.keep_zero),
)
WARMER = Option("a higher `rollout.temperature`")
FEWER_EPOCHS = Option(
    "fewer epochs over a rollout (`algorithm.num_iterations`)", lambda cfg: cfg.algorithm.num_iterations > 1
)
FEWER_UPDATES = Option(
    "fewer updates a rollout (`algorithm.minibatches` x `num_iterations`)",
    lambda cfg: cfg.algorithm.minibatches * cfg.algorithm.num_iterations > 1,
)
SLOWER = Option("a lower `trainer.learning_rate`")
LESS_ENTROPY = Option("a smaller `algorithm.entropy_coef`", lambda cfg: cfg.algorithm.entropy_coef > 0)
LESS_KL = Option("a smaller `algorithm.beta`", lambda cfg: cfg.algorithm.beta > 0)
FLOAT32 = Option("`trainer.bf16: false`", lambda cfg: cfg.trainer.bf16 is not False)
DISTIL = Option(
    "`distillation`, which keeps the policy near the model that it started from", lambda cfg: not cfg.remembers
)
MORE_DISTILLATION = Option("a larger `distillation.coef` or `distillation.batch_size`", lambda cfg: cfg.remembers)

ADVICE: dict[str, Advice] = {
    "variance_collapse": Advice(
        "warn",
        "Try {options}; if levels are always won or always lost, other levels (`envs[].options`).",
        (STARPO_S, WARMER, FEWER_EPOCHS),
    ),
    "variance_gone": Advice(
        "stop",
        "Go back to the best checkpoint and start from it with {options}.",
        (STARPO_S, SLOWER, Option("other levels (`envs[].options`)")),
    ),
    "entropy_collapse": Advice(
        "warn",
        "Raise `algorithm.epsilon_high` or `algorithm.entropy_coef`, or stop here: the policy no longer explores.",
    ),
    "entropy_explosion": Advice("warn", "Try {options}.", (SLOWER, LESS_ENTROPY, FEWER_UPDATES)),
    "gradient_growth": Advice(
        "warn",
        "Lower `trainer.learning_rate` and go on from the checkpoint before; `trainer.max_grad_norm` limits"
        " the size of an update, not its direction.",
    ),
    "repetition": Advice(
        "warn",
        "Read transcripts. Try {options}.",
        (
            WARMER,
            Option("to train on groups whose rewards differ (preset starpo-s)", lambda cfg: not _filters(cfg)),
            Option("more repetition pairs in phase 2"),
        ),
    ),
    "template_collapse": Advice(
        "warn",
        "Try {options}: entropy bonus and KL act on every prompt alike.",
        (RAGEN2, LESS_ENTROPY, LESS_KL),
        "The filter is on, without an entropy bonus and a KL penalty: go back to the best checkpoint with a lower"
        " `trainer.learning_rate`.",
    ),
    "format_decay": Advice("warn", "Try {options}.", (SLOWER, FEWER_UPDATES, LESS_ENTROPY)),
    "success_drop": Advice(
        "warn",
        "Unless levels have just become harder: go back to the best checkpoint and lower `trainer.learning_rate`.",
    ),
    "clip_fraction": Advice("warn", "Try {options}.", (SLOWER, FEWER_UPDATES)),
    "sampler_gap": Advice(
        "warn",
        "More than rounding: sampler and learner compute different models. Try {options}.",
        (
            Option("`rollout.engine: replay`", lambda cfg: cfg.rollout.engine != "replay"),
            FLOAT32,
            Option(
                "`algorithm.importance_sampling_clip_max: 2`, which weighs tokens by the gap",
                lambda cfg: cfg.algorithm.importance_sampling_clip_max is None,
            ),
        ),
        "More than rounding: sampler and learner compute different models, and no setting"
        " can avoid or weigh it. Please report it.",
    ),
    "forgetting": Advice("warn", "Try {options}.", (DISTIL, MORE_DISTILLATION, SLOWER)),
    "skill_lost": Advice(
        "warn",
        "Try {options}.",
        (DISTIL, MORE_DISTILLATION, SLOWER),
    ),
    "skipped_updates": Advice("warn", "Numbers overflow. Try {options}.", (FLOAT32, SLOWER)),
    "all_invalid": Advice(
        "warn",
        "Read transcripts.jsonl. If the answers are badly formed: run phase 1 with demonstrations of this environment"
        " (`data.sources`); if they are cut: a larger `rollout.max_completion_length`.",
    ),
    "no_success": Advice(
        "warn",
        "The levels are too hard for this model: easier ones first (`envs[].options`), more turns"
        " (`protocol.max_turns`), or demonstrations of this environment in phase 1.",
    ),
    "validation": Advice(
        "stop",
        "The model cannot play this yet: easier levels (`envs[].options`), or demonstrations in phase 1.",
    ),
    "empty_steps": Advice(
        "stop",
        "Levels are too hard or too easy for this model: others (`envs[].options`), larger groups"
        " (`rollout.num_generations`) or a higher `rollout.temperature`; if `rollout/crashed` is not 0, fix the"
        " environment.",
    ),
    "not_finite": Advice(
        "warn", "Look at the transcripts and rewards of this step, and try {options}.", (FLOAT32, SLOWER)
    ),
    "not_finite_for_long": Advice("stop", "Go back to the last checkpoint with a lower `trainer.learning_rate`."),
}
