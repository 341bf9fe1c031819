"""Which part of a model is in this process, and how does it become whole again?  FSDP2's and DeepSpeed's shards.

FSDP2 (`torch.distributed.fsdp.fully_shard`) makes each parameter a DTensor, DeepSpeed's ZeRO 3 a flat part behind an
empty tensor, ZeRO 1 and 2 leave it whole and keep a float32 copy of a part in the optimizer. Functions that say so have
to be called by all processes.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from posttrain.runtime import launcher, parallel, runlog


def held(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's share of a parameter; all of it where it is not sharded."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter)


def is_sharded(net: torch.nn.Module) -> bool:
    return any(held(parameter) is not parameter for parameter in net.parameters())


def number(value: torch.Tensor) -> float:
    """Return a scalar that may be spread over processes, such as a norm of gradients. Every process has to call it."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


def whole_weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every weight by its name, whole and on the CPU; {} in all processes but the first.

    Every process has to call it. It gathers one weight at a time: no process holds more of the model than its share and
    one weight. Under DeepSpeed, trained weights come from the optimizer's float32 copy.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        whole = _whole(tensor)
        if runlog.is_main_process():
            weights[name] = whole.detach().cpu()
    return weights


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


def place(models: dict[str, Any], device: torch.device) -> Placement:
    """Return an object that holds these models' weights from now on: here, or with FSDP2 a share in each process.

    Args:
        models: the models by name; None where the run has no model of this name.
        device: of this process.
    """
    return Shards(models, device) if launcher.sharding() == "fsdp2" else Placement(models, device)


class Placement:
    """The models of a run and where their weights are: all of them in every process. `Shards` is the other kind.

    models: what computes and is trained, by name. lockstep: whether all processes have to compute together, equally
    often.
    """

    lockstep = False

    def __init__(self, models: dict[str, Any], device: torch.device) -> None:
        self.models, self.device = models, device

    @contextmanager
    def whole(self, *names: str, write: bool = False) -> Iterator[dict[str, Any]]:
        """Give these models with all their weights, to play, to measure and to save; outside they may have none.

        Args:
            write: what is written into them is trained from then on.
        """
        yield self.models

    def compute(self, run: Callable[[], Any]) -> Any:
        """Return what `run()` does, which may call all models."""
        return run()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Compute without gradient inside."""
        with torch.no_grad():
            yield

    def each(self, micro_batches: list[Any], run: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
        """Give each micro-batch that counts, with what `run` computes of it."""
        for micro_batch in micro_batches:
            computed = self.compute(partial(run, micro_batch))
            if self.weight(micro_batch):
                yield micro_batch, computed

    def even(self, own: list[Any], most: int, spare: Sequence[Any]) -> list[Any]:
        """Return this process's micro-batches, filled up where all processes need equally many.

        Args:
            most: the largest number that a process has.
            spare: the rows of a micro-batch that takes the place of a missing one, with weight 0.
        """
        return own

    def weight(self, micro_batch: Any) -> float:
        """Return what a micro-batch counts: 1, or 0 where this process reads it to keep pace alone."""
        return 1.0

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up the gradients of all processes."""
        parallel.sum_gradients(parameters)

    def clip(self, parameters: list[torch.nn.Parameter], max_norm: float) -> float:
        """Scale the gradients down to this norm at most, and return the norm that they had."""
        return number(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, file: Path) -> None:
        """Put the state that `whole_state` has given into an optimizer."""
        place = "cpu" if self.lockstep else self.device
        load_whole_state(optimizer, torch.load(file, map_location=place, weights_only=True))


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


class _Repeated(list[Any]):
    """A micro-batch that another process has as well."""


class Shards(Placement):
    """FSDP2: a twin of the models is trained, with a share of every layer in each process.

    The models themselves keep their structure. Their weights are there inside `whole` and nan otherwise. All methods
    have to be called by all processes together. A layer is gathered as often as the process with most micro-batches
    needs it, so the others read one twice, with weight 0.
    """

    lockstep = True

    def __init__(self, models: dict[str, Any], device: torch.device) -> None:
        self._whole = {name: model for name, model in models.items() if model is not None}
        originals = list(torch.nn.ModuleDict(self._whole).parameters())
        twins = {id(each): torch.nn.Parameter(each.data.new_empty(0), each.requires_grad) for each in originals}
        # a copy of the structure alone: nothing is held twice
        self._root: Any = _Root(copy.deepcopy(torch.nn.ModuleDict(self._whole), dict(twins)))
        self._waiting = {id(twins[id(each)]): each for each in originals}
        mesh = init_device_mesh(device.type, (parallel.size(),))
        for part in self._root.parts.values():
            for block in _blocks(part):
                self._shard(block, mesh=mesh, reshard_after_forward=True)
        self._shard(self._root, mesh=mesh, reshard_after_forward=False)
        assert not self._waiting
        parts = {name: self._root.parts[name] if name in self._whole else None for name in models}
        super().__init__(parts, device)
        self._pairs = {
            name: list(zip(model.parameters(), self._root.parts[name].parameters(), strict=True))
            for name, model in self._whole.items()
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

    def compute(self, run: Callable[[], Any]) -> Any:
        return self._root(run)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with torch.no_grad():
            yield
        self._root.reshard()  # lets go of the top layers, which passes without gradient have gathered

    def even(self, own: list[Any], most: int, spare: Sequence[Any]) -> list[Any]:
        return own + [_Repeated(spare) for _ in range(most - len(own))]

    def weight(self, micro_batch: Any) -> float:
        return 0.0 if isinstance(micro_batch, _Repeated) else 1.0

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Do nothing: FSDP2 adds them up after each micro-batch."""

    @contextmanager
    def whole(self, *names: str, write: bool = False) -> Iterator[dict[str, Any]]:
        names = tuple(name for name in names if name in self._whole)
        for name in names:
            for original, shard in self._pairs[name]:
                original.data = shard.detach().full_tensor()
        try:
            yield self._whole
            if write:
                for name in names:
                    for original, shard in self._pairs[name]:
                        shard.detach().to_local().copy_(_share(original.data, shard).to_local())
        finally:
            for name in names:
                for original, _ in self._pairs[name]:
                    _empty(original)


def _blocks(net: Any) -> list[torch.nn.Module]:
    """Return the layers of every decoder in a model, each of which is gathered alone."""
    configs = [module.config.get_text_config() for module in net.modules() if isinstance(module, PreTrainedModel)]
    counts = {config.num_hidden_layers for config in configs}
    lists = [module for module in net.modules() if isinstance(module, torch.nn.ModuleList) and len(module) in counts]
    return [block for each in lists for block in each]


def _empty(parameter: torch.nn.Parameter) -> None:
    """Keep a parameter's shape and free its memory; its values are nan."""
    parameter.data = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _share(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Return this process's share of a tensor that every process has whole, sharded as `like` is."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state_dict, with sharded tensors whole and on the CPU in the first process, None elsewhere.

    Every process has to call it.
    """

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        gathered = tensor.full_tensor()
        return gathered.cpu() if runlog.is_main_process() else None

    state = optimizer.state_dict()
    return state | {"state": {n: {key: whole(each) for key, each in of.items()} for n, of in state["state"].items()}}


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
