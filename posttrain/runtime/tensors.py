"""How do tensors become Python numbers and groups, and come to a device?  torch's methods for it have no types."""

from __future__ import annotations

import torch


def integers(tensor_N: torch.Tensor) -> list[int]:
    return tensor_N.tolist()


def floats(tensor_N: torch.Tensor) -> list[float]:
    return tensor_N.tolist()


def numbered(values_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each value among the distinct ones in order, (N,), and how often each of these occurs, (D,).

    >>> numbered(torch.tensor([7, 3, 7]))
    (tensor([1, 0, 1]), tensor([1, 2]))
    """
    _, place_N, count_D = values_N.unique(return_inverse=True, return_counts=True)
    return place_N, count_D


def distinct(values_N: torch.Tensor) -> list[int]:
    """Return the distinct integers of a vector in order."""
    return values_N.unique().tolist()


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU on a device, without waiting for what a GPU still computes."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
