from .algorithm import AlgorithmSection as AlgorithmSection
from .chat import ChatRun as ChatRun
from .data import (
    DPO_KINDS as DPO_KINDS,
    HUB_KINDS as HUB_KINDS,
    SFT_KINDS as SFT_KINDS,
    DataSection as DataSection,
    Source as Source,
)
from .dpo import DPORun as DPORun
from .evaluation import (
    Endpoint as Endpoint,
    EvaluateRun as EvaluateRun,
    NamedSampling as NamedSampling,
    OptionalField as OptionalField,
    SampledSuite as SampledSuite,
    SuitesSection as SuitesSection,
)
from .loading import dump as dump, load as load, resolve as resolve, run as run, training_flags as training_flags
from .pairs import PairsRun as PairsRun
from .plugins import call as call, check_parser as check_parser, is_path as is_path
from .reference import (
    CONFIGS as CONFIGS,
    command as command,
    find_config as find_config,
    find_file as find_file,
    reference_name as reference_name,
)
from .sft import SFTRun as SFTRun
from .shared import (
    COLDEST as COLDEST,
    EnvSection as EnvSection,
    ModelSection as ModelSection,
    ProtocolSection as ProtocolSection,
    SamplingSection as SamplingSection,
    TrainingRun as TrainingRun,
    hint as hint,
)
from .starpo import (
    DistillationSection as DistillationSection,
    RolloutSection as RolloutSection,
    StarPORun as StarPORun,
    StarPOTrainerSection as StarPOTrainerSection,
    TrainingEnvSection as TrainingEnvSection,
)
from .suites import Suite as Suite, SuitesSchedule as SuitesSchedule, TrainingSuites as TrainingSuites
from .yaml_file import parse_yaml as parse_yaml, read_yaml as read_yaml, yaml_value as yaml_value
