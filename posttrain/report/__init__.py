"""What does a run look like?  One self-contained page with its curves, tables and episodes, and the pictures.

`write_report` makes the page; `tables` are what the README and the results are printed with.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
