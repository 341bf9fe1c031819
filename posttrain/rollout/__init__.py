"""How do a model and environments take turns?  Episodes, and the engines that write the model's turns.

`play` plays episodes, `complete` answers prompts, `open_sampler` chooses an engine: a kept KV cache, replay, vLLM.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
