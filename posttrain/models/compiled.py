"""Which layers are compiled?  The decoder's, where whole rows are read, so that a GPU runs fewer and larger kernels.

Each layer is compiled by itself, and layers of one class share the result, so that it takes seconds and not minutes.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler.config as settings
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.runtime import runlog
from posttrain.types import one_line

# Forms of a layer that may be compiled: one row or several, with gradients or without, training or evaluation, with an
# adapter or without, for each kind of attention. torch gives up after 8.
FORMS = 64
COMPILERS = ("torch._dynamo", "torch._inductor", "triton")  # where errors of compilation are defined
COMPILED = "layer_is_compiled"  # an attribute of classes of compiled layers; False once compilation has failed


def compile_layers(model: Any, *, deterministic: bool = False, backend: str = "inductor") -> None:
    """Compile the decoder layers of a model for any number of rows and tokens, each when it first runs.

    A layer that is given a cache of keys and values runs as it is: generation reads one token at a time and has CUDA
    graphs. Weights, gradients, adapters, recomputed activations, hooks, FSDP2's shards and copies of the model stay
    what they are. Where compilation fails, a line says why and the layers run as they are.

    Args:
        model: a transformers model, or peft's wrapper around one.
        deterministic: choose kernels without timing them, so that another process chooses the same ones.
        backend: of torch.compile.
    """
    if hasattr(settings, "recompile_limit"):
        settings.recompile_limit = FORMS
    # A backward pass that cannot be compiled fails in the forward pass, which can go on without, not in `backward()`.
    of_backward: Any = importlib.import_module("torch._functorch.config")
    of_backward.force_non_lazy_backward_lowering = True
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and not hasattr(layer, COMPILED):
            layer.__class__ = _compiled(type(layer), deterministic, backend)


def layers_are_compiled(model: Any) -> bool:
    """Return whether `compile_layers` has compiled the layers of a model, and compilation of none has failed so far.

    Torch compiles nothing at all where TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set.
    """
    off = "1" in (os.environ.get("TORCH_COMPILE_DISABLE"), os.environ.get("TORCHDYNAMO_DISABLE"))
    found = [getattr(layer, COMPILED) for layer in model.modules() if hasattr(layer, COMPILED)]
    return bool(found) and all(found) and not off


@functools.cache
def _compiled(kind: type, deterministic: bool, backend: str) -> type:
    """Return a class of layers like `kind`, of the same name, whose forward pass is compiled."""
    eager: Callable[..., Any] = kind.forward
    make = functools.partial(torch.compile, eager, dynamic=True, backend=backend)
    try:
        compiled = make(options={"deterministic": True} if deterministic and backend == "inductor" else None)
    except RuntimeError:  # torch before 2.10 does not know this option
        compiled = make()

    @functools.wraps(eager)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(own, COMPILED) and not any(isinstance(each, Cache) for each in (*args, *kwargs.values())):
            try:
                return compiled(self, *args, **kwargs)
            except Exception as error:
                if not type(error).__module__.startswith(COMPILERS):
                    raise
                setattr(own, COMPILED, False)
                runlog.say(f"{kind.__name__} is not compiled ({one_line(error)}): it runs as it is, more slowly.")
        return eager(self, *args, **kwargs)

    own = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, COMPILED: True})
    return own
