from . import advantages as advantages, filters as filters, losses as losses, run_state as run_state
from .advantages import grpo as grpo
from .advice import (
    ANSWERS as ANSWERS,
    LEVELS as LEVELS,
    Start as Start,
    advice_text as advice_text,
    first_advice as first_advice,
    measure_start as measure_start,
)
from .distillation import Distillation as Distillation
from .estimators import Earned as Earned, estimate as estimate
from .experience import Batch as Batch, Experience as Experience, Measured as Measured, Scored as Scored
from .learner import (
    POLICY as POLICY,
    Learner as Learner,
    objective_settings as objective_settings,
    schedule as schedule,
)
from .level_choice import record_levels as record_levels
from .losses import ppo_clip as ppo_clip
from .monitoring.alarms import not_finite as not_finite
from .monitoring.collapse import thoughts_and_prompts as thoughts_and_prompts
from .monitoring.episodes import (
    Summary as Summary,
    aggregate as aggregate,
    costs as costs,
    describe as describe,
    describe_evaluation as describe_evaluation,
    teaches as teaches,
    trained_on as trained_on,
)
from .monitoring.monitor import Monitor as Monitor
from .monitoring.transcripts import due as due
from .monitoring.updates import UpdateFigures as UpdateFigures, advantage_figures as advantage_figures
from .rollout_worker import RolloutWorker as RolloutWorker
from .run import (
    finish as finish,
    first_state as first_state,
    kept_in_a_crash as kept_in_a_crash,
    levels as levels,
    longest_episode as longest_episode,
    make_learner as make_learner,
    play_all as play_all,
    refuse_crashed_evaluation as refuse_crashed_evaluation,
    refuse_crashes as refuse_crashes,
    refuse_silent_programs as refuse_silent_programs,
    set_up as set_up,
)
from .run_state import RunState as RunState
