from . import training as training, trl_trainers as trl_trainers
from .setup import Setup as Setup, set_up as set_up
