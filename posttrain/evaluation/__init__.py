"""How good is a model?  Suites and scores, forgetting, endpoints, lm-evaluation-harness, preference pairs.

The script evaluate_model.py combines them; phase 3 measures forgetting with the same tasks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
