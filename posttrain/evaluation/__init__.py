"""How good is a model?  Suites and their scores, forgetting, endpoints, the harness of others, pairs of answers.

The script evaluate_model.py puts them together; phase 3 measures what was forgotten with the same tasks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
