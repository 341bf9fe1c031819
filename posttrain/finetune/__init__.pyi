from . import suites as suites, training as training, trl_trainers as trl_trainers
from .setup import TrainingSetup as TrainingSetup, set_up as set_up
from .trl_trainers import (
    DPOConfig as DPOConfig,
    DPOTrainer as DPOTrainer,
    SFTConfig as SFTConfig,
    SFTTrainer as SFTTrainer,
)
