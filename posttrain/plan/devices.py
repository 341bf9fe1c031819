"""How fast is a device, and what does an hour of it cost?  A table from datasheets, whose numbers can be replaced.

A10G   8xH100   2x8xA100-80   H100:price=2.1,matmul=0.7   RTX4090:memory=24,bandwidth=1008,peak=165   cpu
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.runtime import hardware
from posttrain.types import UserError

# Operations that Python launched for one layer of a forward pass when the time of a launch was measured: 1,106 in the
# 24 layers of Qwen2.5-0.5B, counted by benchmarks/launches.py. The host of an H100 took 37 microseconds for each of
# them, and 26 in SmolLM2 (benchmarks/gpu.py); Qwen published 49.9 tokens a second for Qwen2-0.5B on an A100, without
# batching: 18 each.
OPERATIONS = 46


class Device(NamedTuple):
    """Device("A10G", memory=24, bandwidth=600, peak=70, single=31.2, link=32, network=1.56, price=1.0)"""

    name: str
    memory: float  # GB, nominal
    bandwidth: float  # GB/s of its memory
    peak: float  # TFLOP/s, bfloat16 with float32 accumulation, dense
    single: float  # TFLOP/s in float32, without TF32 as torch multiplies it
    link: float  # GB/s to the other devices of its host, in one direction
    network: float  # GB/s to other hosts: the device's share of the network of its host
    price: float | None = None  # dollars an hour; None if unknown
    operation: float = 36e-6  # seconds in which Python launches one operation
    waits: bool = False  # True for a CPU, which computes between launches; a GPU computes during them
    measured: bool = False  # whether the plan was compared with seconds of this device (benchmarks/plan.py results)

    @property
    def cuda(self) -> bool:
        return not self.waits


# Bandwidth and peak: NVIDIA's datasheets, for SXM, half of the numbers "with sparsity"; the A10G has no datasheet
# (baseten.co, "A10 vs A10G"). Link: NVLink, or PCIe 4 x16. Network: EC2 instances with eight GPUs (g5, g6, p4d, p4de,
# p5, p5e). Price: one GPU of Hugging Face Inference Endpoints on AWS, by their documentation in autumn 2025 (commit
# 1129396), where eight cost eight times as much. A100 with 40 GB: Lambda, one of eight, 2026-09-20.
DEVICES = [
    Device("A10G", 24, 600, 70, 31.2, 32, 1.56, 1.00),
    Device("L4", 24, 300, 121, 30.3, 32, 1.56, 0.80),
    Device("A100-40", 40, 1555, 312, 19.5, 300, 6.25, 1.99),
    Device("A100-80", 80, 2039, 312, 19.5, 300, 6.25, 2.50),
    Device("H100", 80, 3350, 989, 67, 450, 50, 4.50, measured=True),
    Device("H200", 141, 4800, 989, 67, 450, 50, 5.00, measured=True),
]
PRICED = "dollars: Hugging Face Inference Endpoints, autumn 2025; A100-40: Lambda, September 2026"


class Fleet(NamedTuple):
    """Devices that work together: Fleet(H100, hosts=2, each=8, known={"price": 2.1})"""

    device: Device
    hosts: int = 1
    each: int = 1  # devices of a host
    known: Mapping[str, float] = MappingProxyType({})  # numbers that replace those of the plan: see `KNOWN`

    @property
    def count(self) -> int:
        return self.hosts * self.each

    @property
    def name(self) -> str:
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{hosts}{self.each}x{self.device.name}" if self.count > 1 else self.device.name

    @property
    def price(self) -> float | None:
        return None if self.device.price is None else self.count * self.device.price

    @property
    def wire(self) -> float:
        """Return the bytes a second that a device sends in a collective operation over all of them."""
        return (self.device.network if self.hosts > 1 else self.device.link) * 1e9


OF_DEVICES = ("memory", "bandwidth", "peak", "single", "link", "network", "price")
OF_FACTORS = ("matmul", "stream", "decode")
OF_WORK = ("rows", "tokens", "trained", "padding", "prompt", "new", "reply", "turns", "kept")
KNOWN = (*OF_DEVICES, *OF_FACTORS, *OF_WORK)
SHARES = (*OF_FACTORS, "trained", "kept")  # above 0, 1 at most
COUNTS = ("rows", "tokens", "new", "turns")  # 1 at least
MAY_BE_ZERO = ("price", "padding", "prompt", "reply")


def fleets(option: str) -> list[Fleet]:
    """Return the devices that `--plan` names, one or "all"; see the top of this file.

    Raises:
        UserError: the option is wrong.
    """
    name, _, replaced = option.partition(":")
    known = _read_numbers(option, replaced)
    if name == "all":
        return [_with(Fleet(device, *many), known) for many in ((1, 1), (1, 8), (2, 8)) for device in DEVICES]
    match = re.fullmatch(r"(?:(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})x)?([A-Za-z][\w-]*)", name)
    if match is None:
        raise UserError(_no_device(option))
    hosts, each, kind = match.groups()
    device = next((device for device in DEVICES if device.name.lower() == kind.lower()), None)
    if kind.lower() == "cpu":
        device = probed()
    elif device is None:
        if not {"memory", "bandwidth", "peak"} <= known.keys():
            raise UserError(_no_device(option))
        device = Device(
            kind, 0, 0, 0, single=known["peak"] / 8, link=32, network=1.56
        )  # float32 at an eighth of the peak, between L4 and H100
    return [_with(Fleet(device, int(hosts or 1), int(each or 1)), known)]


def _read_numbers(option: str, replaced: str) -> dict[str, float]:
    known = {}
    for part in filter(None, replaced.split(",")):
        key, _, value = part.partition("=")
        if key not in KNOWN or not re.fullmatch(r"\d{1,15}(\.\d{1,15})?", value):
            raise UserError(
                f"--plan {option}: `{part}` is not KEY=NUMBER with one of the keys {', '.join(KNOWN)}. GB, GB/s,"
                " TFLOP/s and dollars an hour for devices; shares of the peak and the bandwidth; counts of the data."
            )
        if key in known:
            raise UserError(f"--plan {option}: `{key}` is written twice. Write it once.")
        known[key] = number = float(value)
        too_small = number < 1 if key in COUNTS else number == 0 and key not in MAY_BE_ZERO
        if too_small or (key in SHARES and number > 1):
            allowed = "a share above 0, at most 1" if key in SHARES else "1 or more" if key in COUNTS else "above 0"
            raise UserError(f"--plan {option}: `{part}` is not possible. `{key}` is {allowed}.")
    return known


def _with(fleet: Fleet, known: dict[str, float]) -> Fleet:
    own = {key: value for key, value in known.items() if key in OF_DEVICES}
    return fleet._replace(device=fleet.device._replace(**own), known=known)


def _no_device(option: str) -> str:
    return (
        f"--plan {option or '(empty)'} names no device: write one of"
        f" {', '.join(device.name for device in DEVICES)}, cpu (this machine, measured in a few seconds), 8xH100 for"
        " eight of them, 2x8xH100 for two hosts of eight, or nothing for all. Numbers can be replaced"
        " (H100:price=2.1). For a device that is not in the table they are"
        " required: RTX4090:memory=24,bandwidth=1008,peak=165 (GB, GB/s, TFLOP/s in bfloat16)."
    )


def probed() -> Device:
    """Return this machine's processor, as torch uses it now, by its best figures in a few tries."""
    threads = torch.get_num_threads()
    half = torch.bfloat16 if hardware.has_bf16(torch.device("cpu")) else torch.float32
    numbers = torch.zeros(1 << 24)
    copied = torch.empty_like(numbers)
    with torch.no_grad():
        bandwidth = 2 * numbers.nbytes / _best(lambda: copied.copy_(numbers))
        squares = [torch.randn(1024, 1024).to(kind) for kind in (half, torch.float32)]
        peak, single = (2 * 1024**3 / _best(partial(torch.mm, square, square)) for square in squares)
        few, many = (_best(partial(_tiny(layers), torch.zeros(1, 1, dtype=torch.long)), 20) for layers in (2, 10))
    operation = max(0.0, many - few) / 8 / OPERATIONS
    memory = psutil.virtual_memory().total / 1e9
    wire = bandwidth / 4e9  # gloo writes, copies and reads shared memory
    name = f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    return Device(name, memory, bandwidth / 1e9, peak / 1e12, single / 1e12, wire, 0.125, None, operation, waits=True)


def _tiny(layers: int) -> Callable[..., Any]:
    """Return a decoder so narrow that launching its operations takes all the time."""
    sizes: dict[str, Any] = dict(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2
    )
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).eval()


def _best(action: Callable[[], Any], tries: int = 5) -> float:
    """Return the seconds of the fastest of a few calls, after one that is not counted."""
    action()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
