"""Which settings may a run have, and which does it have?  Schemas of the scripts, YAML files, and overrides.

Everything is strict: an unknown key, a wrong type or a value out of range is reported with its path, all at once.
Nothing here imports torch, transformers or TRL, so `--help`, `--print-config` and every error answer within a second.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
