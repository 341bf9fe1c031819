"""What do the scripts share?  Data, models, chat, sampling, the mathematics of StarPO and what keeps a run in order."""
