"""Which model is it, and what does it say?  Loading and saving, templates to token ids and masks, the forward pass.

`load` and `save` for whole models with their `Chat`; `forward` for log-probs of the tokens that are trained.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
