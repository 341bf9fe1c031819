"""Which rows does a run read?  Data sets of the Hub and files are recognised, read, filtered, mixed and made token ids.

`load_sft` and `load_dpo` give rows with exact masks; the quickstart's data are in `embedded`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
