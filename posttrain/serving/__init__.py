"""How does a person talk to a model?  Chat in the terminal and the browser, an OpenAI-compatible server, publishing.

The script inference_with_improved_settings.py puts the chats together.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
