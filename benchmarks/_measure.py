"""What every benchmark needs: contestants that take turns, ratios with their range, and where it all was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser that every benchmark begins with."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--json", type=Path, help="also write every figure to this file")
    return made


def threads() -> None:
    """One thread, unless OMP_NUM_THREADS says otherwise."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def alternating(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each contestant; they take turns, in reversed order every second time."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name in sorted(contestants, reverse=repeat % 2 == 1):
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as fast ours is: the ratio of medians, and in brackets the range of single repeats."""
    single = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"**{median(theirs) / median(ours):.1f}x** ({min(single):.1f}-{max(single):.1f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def surroundings(device: str = "cpu") -> dict[str, Any]:
    """Where this is measured."""
    return {
        "commit": commit(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def told(results: Mapping[str, Any]) -> str:
    """The line above every table."""
    return (
        f"Commit {results['commit']}, {results['machine']}, {results['threads']} thread(s), load {results['load']:.1f},"
        f" torch {results['torch']}, transformers {results['transformers']}."
    )


def publish(results: dict[str, Any], markdown: str, file: Path | None) -> None:
    """Print the table and write the figures behind it."""
    print(markdown)
    if file:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
