"""Which device does a run compute on, in which precision, and who keeps the memory that it frees?"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from posttrain.config import TrainingRun
from posttrain.runtime import launcher
from posttrain.types import UserError

TrainingConfig = TypeVar("TrainingConfig", bound=TrainingRun)

# RuntimeErrors of the device, which say nothing about the model that a self-test tries
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)

# For `deterministic`. torch before 2.10 reads the first once, at its first product; the second is for flash-attn.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
# oneDNN keeps a kernel and its workspace for each size of a product in bfloat16, 1,024 of them, and torch as many
# again. Micro-batches of many lengths filled 2 GiB with them. A micro-batch has fewer than 64 sizes.
for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(cache, "64")


def resolve_device(device: str) -> torch.device:
    """Return this process's device for "auto", "cpu", "cuda" or "mps"; torchrun numbers GPUs in LOCAL_RANK.

    "auto" never takes mps, on which this project has not run.

    Raises:
        UserError: this machine does not have the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but torch finds no CUDA GPU here. Write device=cpu (slow for a real model), or check "
            "`nvidia-smi` and that torch was installed with CUDA."
        )
    if device == "mps":
        _check_mps()
    if device != "cuda":
        return torch.device(device)
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise UserError(
            f"The launcher has started {os.environ.get('LOCAL_WORLD_SIZE', number + 1)} processes on this machine, and"
            f" torch finds {there} GPU{'s' if there > 1 else ''}: one process a GPU. Ask for {there} (--nproc_per_node"
            f" {there}, or num_processes of accelerate), or set CUDA_VISIBLE_DEVICES right."
        )
    return torch.device("cuda", number)


def _check_mps() -> None:
    if not torch.backends.mps.is_available():
        why = "torch was built without it" if not torch.backends.mps.is_built() else "this is not a Mac with such a GPU"
        raise UserError(f"device=mps is the GPU of a Mac with macOS 14 or later, and {why}. Write device=cpu.")
    if launcher.processes() > 1:
        raise UserError("device=mps is one GPU, for one process: start the script with python, without a launcher.")


def widest(device: torch.device) -> torch.dtype:
    """Return the most precise dtype of a device: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def has_bf16(device: torch.device) -> bool:
    """Return True where bfloat16 is multiplied in hardware; every other device takes it too, but slower than float32.

    Of CPUs those with AVX512-BF16 or AMX, by the flags that Linux lists.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":  # whether it is faster there has not been measured
        return False
    return torch.backends.mkldnn.is_available() and not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_flags())


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def settle(cfg: TrainingConfig) -> TrainingConfig:
    """Return the config of a phase with trainer.bf16 and trainer.torch_compile set for this machine where left open.

    Raises:
        UserError: this run does not support the launcher's settings.
    """
    launcher.check_launch(cfg)
    try:
        device = resolve_device(cfg.device)
    except UserError:  # posttrain/plan/preflight.py reports it with all other mistakes
        return cfg
    chosen = {"bf16": has_bf16(device) and not trainer_field(cfg, "fp16"), "torch_compile": compiles(cfg, device.type)}
    return with_trainer(cfg, **{name: on for name, on in chosen.items() if trainer_field(cfg, name) is None})


def compiles(cfg: TrainingRun, device: str) -> bool:
    """Return whether decoder layers are compiled on a kind of device where the config leaves it open.

    On a GPU: weights of 4 bits have kernels of their own, and DeepSpeed's hooks inside a layer cannot be compiled.
    """
    return device == "cuda" and cfg.model.tuning != "qlora" and not launcher.sharding().startswith("zero")


def with_trainer(cfg: TrainingConfig, **changes: Any) -> TrainingConfig:
    """Return the config with keys of its section `trainer` changed; the config itself where there are none."""
    if not changes:
        return cfg
    trainer: Any = cfg.trainer
    changed = trainer | changes if isinstance(trainer, dict) else trainer.model_copy(update=changes)
    return cfg.model_copy(update={"trainer": changed})


def trainer_field(cfg: Any, name: str) -> Any:
    """Return a key of the section `trainer`: TRL's dict in phases 1 and 2, this project's own section in phase 3."""
    return cfg.trainer.get(name) if isinstance(cfg.trainer, dict) else getattr(cfg.trainer, name, None)


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """Use torch's deterministic algorithms: a resumed run is then bit-identical on a GPU, as on a CPU.

    Otherwise the backward pass of attention adds gradients in the order in which its threads finish.
    """
    if not on:
        yield
        return
    settings: Any = torch.utils.deterministic
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False  # it helps to find mistakes
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = filled


def keep_freed_memory() -> None:
    """Let glibc reuse memory that this process has freed, instead of giving it back to the system.

    Each training step needs the memory of the last one, which virtual machines in particular are slow to provide. Rows
    of many lengths leave pieces too small to reuse (docs/results.md, "SmolLM2"), unless glibc's own variable says
    which pieces are large: those go back to the system.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4  # as in malloc.h
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, -1)  # never give anything back
        if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            mallopt(mmap_max, 0)  # nor take large pieces straight from the system, which go back when they are freed
