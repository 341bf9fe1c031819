"""What do the scripts share?  Data, models, chat, sampling, the mathematics of StarPO and what keeps a run in order."""

import logging

__version__ = "0.1.0"

# At import bitsandbytes warns that a CPU lacks a kernel for 4-bit weights, and TRL imports it before anything of ours
# that could prevent it. Until it warns where there are such weights alone.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
