"""Can a run be done, and what does it cost?  Memory, time, price, and the tests of a model, before the start.

`preflight` reports all problems at once, `selftest` tries shortcuts on the model itself, `print_plan` prints the plan.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
