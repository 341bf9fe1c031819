"""Which part of a model is in this process, and how does it become whole again?  FSDP2's and DeepSpeed's shards.

FSDP2 (`torch.distributed.fsdp.fully_shard`) makes each parameter a DTensor, DeepSpeed's ZeRO 3 a flat part behind an
empty tensor, ZeRO 1 and 2 leave it whole and keep a float32 copy of a part in the optimizer. Every function that says
so has to be called by all processes together.
"""

from __future__ import annotations

import importlib

import torch
from torch.distributed.tensor import DTensor

from posttrain import launcher, runlog


def held(parameter: torch.Tensor) -> torch.Tensor:
    """This process's share of a parameter; all of it where it is not sharded."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter)


def is_sharded(net: torch.nn.Module) -> bool:
    return any(held(parameter) is not parameter for parameter in net.parameters())


def number(value: torch.Tensor) -> float:
    """A scalar that may be spread over processes, such as the norm of sharded gradients; for all processes together."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


def whole_weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight by its name, whole and on the CPU, in the first process; {} in the others. For all together.

    One weight at a time: no process holds more of the model than its share and one weight. Under DeepSpeed what is
    trained comes from the optimizer's float32 copy.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        whole = _whole(tensor)
        if runlog.is_main_process():
            found[name] = whole.detach().cpu()
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if launcher.sharding().startswith("zero"):
        if tensor.requires_grad:
            return importlib.import_module("deepspeed.utils").safe_get_full_fp32_param(tensor)
        if hasattr(tensor, "ds_id"):
            with importlib.import_module("deepspeed").zero.GatheredParameters([tensor]):
                return tensor.detach().clone()
    return tensor
