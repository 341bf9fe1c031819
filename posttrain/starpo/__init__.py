"""How does phase 3 learn from episodes?  Advantages, losses and filters as pure functions; learner, state, monitoring.

The loop itself is in train_phase3_starpo.py.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
