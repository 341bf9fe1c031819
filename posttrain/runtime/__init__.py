"""On what does a run compute, and what does it leave behind?  Processes, devices, checkpoints, logs, dashboards.

Others use its modules by name (`runlog.say`, `checkpoint.save`, `parallel.gather`); every patch of a library is in
`compat`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
