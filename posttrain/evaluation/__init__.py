"""How good is a model?  Suites and scores, also during training, endpoints, lm-evaluation-harness, preference pairs.

The script evaluate_model.py combines them; all phases measure some of them while they train.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
