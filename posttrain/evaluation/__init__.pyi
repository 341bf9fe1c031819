from .endpoint import api_key as api_key
from .endpoints import costs_in_words as costs_in_words, endpoint_costs as endpoint_costs
from .figures import compare as compare, summarise as summarise
from .quickstart_goals import goals as goals
from .scoring import play_baselines as play_baselines, run_task as run_task, section as section
from .store import ROWS as ROWS, Store as Store, digest as digest
from .tasks import (
    build_tasks as build_tasks,
    env_error as env_error,
    headline_levels as headline_levels,
    held_out_levels as held_out_levels,
    hub_sets as hub_sets,
    sampling_seed as sampling_seed,
)
from .while_training import TrainingTasks as TrainingTasks
from .workers import run_tasks as run_tasks
