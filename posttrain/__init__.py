"""What do the scripts share?  Data, models, chat, sampling, the mathematics of StarPO and the house-keeping of a run."""
