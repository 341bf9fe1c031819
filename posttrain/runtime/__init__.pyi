from . import (
    checkpoint as checkpoint,
    compat as compat,
    dashboards as dashboards,
    hardware as hardware,
    launcher as launcher,
    parallel as parallel,
    run_identity as run_identity,
    runlog as runlog,
    sharding as sharding,
    trl_arguments as trl_arguments,
)
from .compat import (
    HTTP_ERROR as HTTP_ERROR,
    TOKEN_CHUNK_SIZE as TOKEN_CHUNK_SIZE,
    CacheLayer as CacheLayer,
    chunked_logprobs as chunked_logprobs,
    grouped_queries as grouped_queries,
    merged_weights as merged_weights,
    panics_in_words as panics_in_words,
    plain_text_tokenizer as plain_text_tokenizer,
)
from .dashboards import Dashboards as Dashboards
from .hardware import DEVICE_ERRORS as DEVICE_ERRORS, trainer_field as trainer_field, widest as widest
from .run_identity import COUNTS as COUNTS, FREE_TO_CHANGE as FREE_TO_CHANGE
from .runlog import Progress as Progress, console as console, is_main_process as is_main_process
from .sharding import whole_state as whole_state
from .tensors import (
    distinct as distinct,
    floats as floats,
    integers as integers,
    numbered as numbered,
    sent as sent,
)
from .time_budget import TimeBudget as TimeBudget
from .trl_arguments import FIGURES as FIGURES
