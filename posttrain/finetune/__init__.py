"""How do phases 1 and 2 train?  What stands around TRL's trainers: models, resume, progress, export.

`set_up` prepares a run, `training` fits and exports it, `trl_trainers` has what differs from TRL's trainers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
