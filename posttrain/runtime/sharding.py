"""Which part of a model is in this process, and how does it become whole again?  FSDP2's and DeepSpeed's shards.

FSDP2 (`torch.distributed.fsdp.fully_shard`) makes each parameter a DTensor, DeepSpeed's ZeRO 3 a flat part behind an
empty tensor, ZeRO 1 and 2 leave it whole and keep a float32 copy of a part in the optimizer. Every function that says
so has to be called by all processes together.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from posttrain.runtime import launcher, parallel, runlog


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


# ------------------------------------------------------------------------------------------------------------- phase 3


class _Root(torch.nn.Module):
    """Everything that is sharded. What computes with its parts is called through it, with their top layers gathered.

    It is FSDP2's root: a pass through a model's backbone and then, elsewhere, through the weight of its output layer is
    for FSDP2 one forward pass of this module.
    """

    def __init__(self, parts: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class Shards:
    """A twin of some models that is trained, with a share of every layer in each process.

    The models themselves keep their structure. Their weights are there while they are `gathered` and nan otherwise. All
    methods, and calls, are for all processes together.
    """

    def __init__(self, whole: dict[str, torch.nn.Module], device: torch.device) -> None:
        originals = list(torch.nn.ModuleDict(whole).parameters())
        twins = {id(each): torch.nn.Parameter(each.data.new_empty(0), each.requires_grad) for each in originals}
        # a copy of the structure alone: nothing is held twice
        self._root: Any = _Root(copy.deepcopy(torch.nn.ModuleDict(whole), dict(twins)))
        self._waiting = {id(twins[id(each)]): each for each in originals}
        mesh = init_device_mesh(device.type, (parallel.size(),))
        for part in self._root.parts.values():
            for block in _blocks(part):
                self._shard(block, mesh=mesh, reshard_after_forward=True)
        self._shard(self._root, mesh=mesh, reshard_after_forward=False)
        assert not self._waiting
        self._pairs = {
            name: list(zip(part.parameters(), self.part(name).parameters(), strict=True))
            for name, part in whole.items()
        }

    def _shard(self, module: Any, **how: Any) -> None:
        for parameter in module.parameters():
            if (original := self._waiting.pop(id(parameter), None)) is not None:
                parameter.data = original.data
                _empty(original)
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)  # gradients are sums, over micro-batches and processes alike
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        module.unshard()  # while it is known what is trained: an adapter may be switched off when it is first read
        module.reshard()

    def part(self, name: str) -> Any:
        """The twin of a model."""
        return self._root.parts[name]

    def __call__(self, compute: Callable[[], Any]) -> Any:
        """What `compute()` returns, tensors, which may use all parts; `release` afterwards unless it goes backward."""
        return self._root(compute)

    def release(self) -> None:
        """Let go of the top layers that passes without gradient have gathered."""
        self._root.reshard()

    @contextmanager
    def gathered(self, *names: str, write: bool = False) -> Iterator[None]:
        """Within it these models have their weights. `write`: what they are at its end is what is trained from then."""
        for name in names:
            for original, shard in self._pairs[name]:
                original.data = shard.detach().full_tensor()
        try:
            yield
            if write:
                for name in names:
                    for original, shard in self._pairs[name]:
                        shard.detach().to_local().copy_(_share(original.data, shard).to_local())
        finally:
            for name in names:
                for original, _ in self._pairs[name]:
                    _empty(original)


def _blocks(net: Any) -> list[torch.nn.Module]:
    """The layers of every decoder in a model, each of which is gathered by itself."""
    configs = [module.config.get_text_config() for module in net.modules() if isinstance(module, PreTrainedModel)]
    counts = {config.num_hidden_layers for config in configs}
    lists = [module for module in net.modules() if isinstance(module, torch.nn.ModuleList) and len(module) in counts]
    return [block for each in lists for block in each]


def _empty(parameter: torch.nn.Parameter) -> None:
    """Keep a parameter's shape and none of its memory; whoever uses it finds nan."""
    parameter.data = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _share(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This process's share of a tensor that every process has, as `like` is spread."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state_dict; sharded tensors whole and on the CPU, in the first process. For all together."""

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        gathered = tensor.full_tensor()
        return gathered.cpu() if runlog.is_main_process() else None

    told = optimizer.state_dict()
    return told | {"state": {n: {key: whole(each) for key, each in of.items()} for n, of in told["state"].items()}}


def load_whole_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put a whole `state` into an optimizer; of sharded parameters, this process's share."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        own = state["state"].get(number, {})
        for key, tensor in own.items():
            if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
                own[key] = _share(tensor, parameter)
    optimizer.state.clear()  # or the old moments would be there beside the new ones
    optimizer.load_state_dict(state)
