"""Can this run be done, and what does it take?  Memory, time and cost, and what a model must pass, before it starts.

`preflight` says everything that is wrong at once, `selftest` tries shortcuts on the very model, `show` prints the plan.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
