"""What does StarPO learn from an episode?  Pure functions on tensors: no config object, no logger, no device.

Shapes: B trajectories, G groups, S trained (sampled) tokens of a batch, one after another.
"""
