"""From which figure on does an alarm fire, and what does it advise?  Limits and texts, no mathematics."""

from __future__ import annotations

LIMITS: dict[str, float] = {  # tests/alarm_runs.py and tests/data/alarms.json have runs that they tell apart
    "variance_collapse": 0.25,  # of its best
    "variance_gone": 0.10,  # of its best, mean of 10 steps: RAGEN's early stopping
    "solved": 0.95,  # success from which a small std is no collapse
    "entropy_collapse": 0.15,  # of the start, times what the success leaves
    "entropy_explosion": 3.0,  # times its lowest, without a gain in success
    "entropy_floor": 0.1,  # nats; a lowest entropy below it counts as this
    "gradient_growth": 5.0,  # times its lowest median of 10 steps, without a gain in success
    "repetition": 0.15,  # share of repeated 4-grams above the lowest
    "template_collapse": 0.5,  # of the first z-scores, while the conditional entropy keeps 0.75 of its own
    "format_decay": 0.10,  # share of invalid turns above the lowest
    "success_drop": 0.6,  # of its best
    "wavering": 0.9,  # of its best success: a healthy policy may lose that much, what counts begins below it
    "clip_fraction": 0.05,  # median of 5 steps
    "forgetting": 0.03,  # nats a token from the teacher, on held-out prompts of the phases before
    "skill_lost": 0.9,  # of the accuracy at the start of the run
    "sampler_gap": 1e-4,  # nats, mean over tokens; float32. HALF_PRECISION_GAP for bfloat16
    "skipped_updates": 3,  # in 10 steps
    "all_invalid": 0.95,  # of the turns of an environment, mean of 5 steps
    "no_success": 0.01,  # success of an environment that its episodes so far rule out
    "validation": 0.01,  # success that 5 or more evaluations in a row rule out
    "empty_steps": 5,  # in a row
    "not_finite": 5,  # rows in a row
}
HALF_PRECISION_GAP = 16 * 2**-8  # nats, mean over tokens: 16 steps of bfloat16; about 5 were seen

ADVICE: dict[str, tuple[str, str]] = {
    "variance_collapse": (
        "warn",
        "Try preset starpo-s (`algorithm.preset`), a higher `rollout.temperature`, or fewer epochs over a rollout"
        " (`algorithm.num_iterations`); if levels are always won or always lost, other levels (`envs[].options`).",
    ),
    "variance_gone": (
        "stop",
        "Go back to the best checkpoint and start from it with preset starpo-s, a lower `trainer.learning_rate` or"
        " other levels.",
    ),
    "entropy_collapse": (
        "warn",
        "Raise `algorithm.epsilon_high` or `algorithm.entropy_coef`, or stop here: the policy explores no more.",
    ),
    "entropy_explosion": (
        "warn",
        "Lower `trainer.learning_rate` or `algorithm.entropy_coef`, or use a rollout fewer times.",
    ),
    "gradient_growth": (
        "warn",
        "Lower `trainer.learning_rate` and go on from the checkpoint before; `trainer.max_grad_norm` hides the size of"
        " an update, not its direction.",
    ),
    "repetition": (
        "warn",
        "Read transcripts. Raise `rollout.temperature`, train on groups whose rewards differ (preset starpo-s), or put"
        " more repetition pairs into phase 2.",
    ),
    "template_collapse": (
        "warn",
        "Train on the groups whose rewards differ: `algorithm.filter.strategy: top_p`, `value: 0.9`, `keep_zero: false`"
        " (preset ragen2); lower `algorithm.entropy_coef` and `algorithm.beta`, which pull on every prompt alike.",
    ),
    "format_decay": (
        "warn",
        "Lower `trainer.learning_rate`, fewer updates a rollout (`algorithm.minibatches` x `num_iterations`), a smaller"
        " `algorithm.entropy_coef`.",
    ),
    "success_drop": (
        "warn",
        "Unless levels have just become harder: go back to the best checkpoint and lower `trainer.learning_rate`.",
    ),
    "clip_fraction": ("warn", "Lower `trainer.learning_rate`, or fewer updates a rollout."),
    "sampler_gap": (
        "warn",
        "More than rounding: sampler and learner compute different models. Write `rollout.engine: replay`; if the gap"
        " stays, it is the model's precision (`trainer.bf16: false` tells).",
    ),
    "forgetting": (
        "warn",
        "Raise `distillation.coef` or `distillation.batch_size`, or lower `trainer.learning_rate`.",
    ),
    "skill_lost": (
        "warn",
        "Raise `distillation.coef` or `distillation.batch_size`, with this suite's kind of prompts among"
        " `distillation.sources`; or lower `trainer.learning_rate`.",
    ),
    "skipped_updates": ("warn", "Numbers overflow: write `trainer.bf16: false`, or lower `trainer.learning_rate`."),
    "all_invalid": (
        "warn",
        "Read transcripts.jsonl. Where the answers lack the form: run phase 1 with demonstrations of this environment"
        " (`data.sources`); where they are cut: a larger `rollout.max_completion_length`.",
    ),
    "no_success": (
        "warn",
        "The levels are too hard for this model: easier ones first (`envs[].options`), more turns"
        " (`protocol.max_turns`), or demonstrations of this environment in phase 1.",
    ),
    "validation": (
        "stop",
        "The model cannot play this yet: easier levels (`envs[].options`), or demonstrations in phase 1.",
    ),
    "empty_steps": (
        "stop",
        "Levels are too hard or too easy for this model: others (`envs[].options`), larger groups"
        " (`rollout.num_generations`) or a higher `rollout.temperature`; where `rollout/crashed` is not 0, it is the"
        " environment that needs fixing.",
    ),
    "not_finite": ("warn", "Write `trainer.bf16: false` and look at the transcripts and rewards of this step."),
    "not_finite_for_long": ("stop", "Go back to the last checkpoint with a lower `trainer.learning_rate`."),
}
