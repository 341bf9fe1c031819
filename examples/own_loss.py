"""A policy loss of your own: the policy gradient without a clip.

    python train_phase3_starpo.py --config configs/quickstart/own_environment.yaml \\
        algorithm.loss_type=examples.own_loss:unclipped output_dir=runs/own

posttrain/config/plugins.py says what such a function is given.
"""

from __future__ import annotations

import torch

from posttrain.starpo import losses


def unclipped(tokens: losses.Tokens, settings: losses.Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -ratio x advantage of each token, and that none is clipped, both (S,)."""
    ratio_S = (tokens.logprobs_S - tokens.old_S).exp()
    loss_S = -ratio_S * tokens.advantages_S
    return loss_S, torch.zeros_like(loss_S, dtype=torch.bool)
