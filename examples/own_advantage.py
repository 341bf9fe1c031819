"""An advantage of your own: GRPO's, written out.

    python train_phase3_starpo.py --config configs/quickstart/own_environment.yaml \\
        algorithm.advantage=examples.own_advantage:group_relative output_dir=runs/own

The file may lie in the folder that the command is run in: `algorithm.advantage=own_advantage:group_relative`.
posttrain/config/plugins.py says what such a function is given.
"""

from __future__ import annotations

import torch

from posttrain.config import AlgorithmSection
from posttrain.starpo import Earned


def group_relative(earned: Earned, algorithm: AlgorithmSection) -> torch.Tensor:
    """Return how much better each episode did than its group, in standard deviations, for each of its tokens, (S,)."""
    advantage_B = torch.zeros_like(earned.rewards_B)
    for group in earned.group_B.unique():
        members_B = earned.group_B == group
        rewards = earned.rewards_B[members_B]
        if len(rewards) > 1:
            advantage_B[members_B] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return advantage_B[earned.episode_S]
