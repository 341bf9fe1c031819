from . import training as training, trl_trainers as trl_trainers
