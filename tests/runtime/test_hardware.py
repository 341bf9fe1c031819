"""Are missing devices refused in words, is a Mac asked for nothing that it does not have, and is freed memory kept?"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_phase3 import settings
from tiny_runs import ROOT

from posttrain.config.chat import ChatRun
from posttrain.config.loading import resolve
from posttrain.config.starpo import StarPORun
from posttrain.plan import preflight
from posttrain.rollout.engines.sampling import sample_tokens, uniforms
from posttrain.runtime import hardware
from posttrain.types import SamplingParams, UserError

MPS = torch.device("mps")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that it has Apple's GPU; tensors stay where they are."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this is a Mac")
def test_a_mac_gpu_that_is_not_there_is_a_mistake_to_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"device=mps is the GPU of a Mac.*Write device=cpu"):
        hardware.resolve_device("mps")
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", tmp_path, device="mps"))
    with pytest.raises(UserError, match="device=mps"):
        preflight.check_run(cfg)
    assert resolve(ChatRun, ROOT / "configs/chat.yaml", ["device=mps"]).device == "mps"


def test_a_mac_gpu_is_taken_when_it_is_asked_for_alone(
    mac: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hardware.resolve_device("mps") == MPS and hardware.resolve_device("auto").type == "cpu"
    assert not hardware.has_bf16(MPS)
    assert (hardware.widest(MPS), hardware.widest(torch.device("cpu"))) == (torch.float32, torch.float64)
    for key, value in (("model.tuning", "qlora"), ("model.attn_implementation", "flex_attention")):
        file = settings(tmp_path / "run.yaml", tmp_path, device="mps")
        with pytest.raises(UserError, match=key):
            preflight.check_run(resolve(StarPORun, file, [f"{key}={value}"]))
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", tmp_path, device="mps", trainer={"bf16": None}))
    assert hardware.settle(cfg).trainer.bf16 is False
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one GPU, for one process"):
        hardware.resolve_device("mps")


class OnMac(torch.Tensor):
    """A tensor that says it is on MPS and refuses what MPS refuses; `cpu()` brings it here."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    def cpu(self, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function not in (torch.Tensor.as_subclass, torch.Tensor.__repr__):
                raise TypeError(f"{function} on MPS, in which this test lets nothing compute")
            return function(*given, **(named or {}))


@pytest.mark.parametrize("params", [{}, {"top_k": 4, "top_p": 0.9}, {"temperature": 0.0}, {"repetition_penalty": 1.2}])
def test_tokens_are_drawn_by_the_cpu_where_a_gpu_has_no_double_precision(
    params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[torch.Tensor] = []
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        if given != (MPS,):
            return real(tensor, *given, **named)
        there.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    settings = SamplingParams(**{"max_new_tokens": 1, "temperature": 0.7, **params})  # type: ignore[arg-type]
    logits_BV, seen_BV = torch.randn(64, 300, generator=torch.manual_seed(0)), torch.rand(64, 300) < 0.1
    seeds_B = torch.arange(64) * 7919 + 2**40
    here = uniforms(seeds_B, 3)
    uniform_B = uniforms(seeds_B.as_subclass(OnMac), 3)
    assert uniform_B.dtype == torch.float32 and torch.equal(uniform_B, here.float())
    on_mac = [tensor.as_subclass(OnMac) for tensor in (logits_BV, uniform_B, seen_BV)]
    tokens_B, logprobs_B = sample_tokens(on_mac[0], settings, on_mac[1], on_mac[2])
    expected = sample_tokens(logits_BV, settings, here.float().double(), seen_BV)
    assert torch.equal(tokens_B, expected[0]) and torch.equal(logprobs_B, expected[1])
    assert [tensor.dtype for tensor in there] == [torch.float32, torch.long, torch.float32]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
@pytest.mark.slow
def test_keep_freed_memory() -> None:
    """The same memory is asked for again and again: the system provides it once, where it did so each time."""
    program = """
import resource, torch
from posttrain.runtime import hardware

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

without = faults()
hardware.keep_freed_memory()
faults()
print(without, faults())
"""
    without, kept = measured(program)
    assert without > 100 + 10 * kept
    _, large = measured(program, MALLOC_MMAP_THRESHOLD_=str(2**25))  # 64 MiB a piece: these go back
    assert large > 100 + 10 * kept


def measured(program: str, **variables: str) -> list[int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain | variables)
    return [*map(int, done.stdout.split())]


def test_products_of_many_sizes_do_not_fill_the_memory() -> None:
    """Each size of a product in bfloat16 has a kernel, and oneDNN keeps the last ones."""
    code = """
import psutil, torch
from posttrain.runtime import hardware
rows, weight = torch.ones(600, 256, dtype=torch.bfloat16), torch.ones(512, 256, dtype=torch.bfloat16)
for count in range(1, 601):
    torch.nn.functional.linear(rows[:count], weight)
    if count == 100:
        before = psutil.Process().memory_info().rss
print((psutil.Process().memory_info().rss - before) / 2**20)
"""
    grown = float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
    assert grown < 150  # 350 without a limit
