"""What may a run be told, and what is it told?  Schemas of the scripts, one a file; YAML files and overrides on top.

    python train_phase1_sft.py --config configs/quickstart/phase1_sft.yaml trainer.learning_rate=1e-3 seed=1

Everything is strict: an unknown key, a wrong type or a value out of range is reported with its path, all at once.
Nothing here imports torch, transformers or trl: `--help`, `--print-config` and every error answer in under a second.
"""

from posttrain.config.algorithm import AlgorithmSection, FilterSection
from posttrain.config.chat import ChatRun
from posttrain.config.data import DataSection, Source
from posttrain.config.dpo import DPORun
from posttrain.config.evaluation import (
    Endpoint,
    EnvSuite,
    EvaluateRun,
    NamedSampling,
    SampledSuite,
    Settings,
    SuitesSection,
)
from posttrain.config.loading import dump, load, resolve, run, training_flags
from posttrain.config.pairs import PairsRun
from posttrain.config.sft import SFTRun
from posttrain.config.shared import (
    ChatSection,
    EnvSection,
    LoraSection,
    ModelSection,
    ProtocolSection,
    Run,
    SamplingSection,
    Section,
    TrainingRun,
    hint,
)
from posttrain.config.starpo import (
    CheckpointSection,
    DistillationSection,
    EvaluationSection,
    RolloutSection,
    StarPORun,
    StarPOTrainerSection,
    TrainingEnvSection,
    TranscriptSection,
)
from posttrain.config.suites import FormerSuites, MathSuite, PreferenceSuite, RecallSuite, RepetitionSuite, Suite
from posttrain.config.trl_fields import SET_BY_SCRIPTS, fields_of_trl

__all__ = [
    "SET_BY_SCRIPTS",
    "AlgorithmSection",
    "ChatRun",
    "ChatSection",
    "CheckpointSection",
    "DPORun",
    "DataSection",
    "DistillationSection",
    "Endpoint",
    "EnvSection",
    "EnvSuite",
    "EvaluateRun",
    "EvaluationSection",
    "FilterSection",
    "FormerSuites",
    "LoraSection",
    "MathSuite",
    "ModelSection",
    "NamedSampling",
    "PairsRun",
    "PreferenceSuite",
    "ProtocolSection",
    "RecallSuite",
    "RepetitionSuite",
    "RolloutSection",
    "Run",
    "SFTRun",
    "SampledSuite",
    "SamplingSection",
    "Section",
    "Settings",
    "Source",
    "StarPORun",
    "StarPOTrainerSection",
    "Suite",
    "SuitesSection",
    "TrainingEnvSection",
    "TrainingRun",
    "TranscriptSection",
    "dump",
    "fields_of_trl",
    "hint",
    "load",
    "resolve",
    "run",
    "training_flags",
]
