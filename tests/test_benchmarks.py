"""Do the benchmarks run as `make bench` runs them, and write the figures they print?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_rollout_measures_three_engines_on_equal_work(tmp_path):
    figures = tmp_path / "figures.json"
    sizes = ["--conversations", "3", "--new-tokens", "3", "--turns", "1", "2", "--repeats", "2"]
    command = [sys.executable, str(ROOT / "benchmarks" / "rollout.py"), *sizes, "--json", str(figures)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())
    assert {"commit", "machine", "threads", "load", "dtype"} <= results.keys()
    assert [(row["model"], row["turns"], row["tokens"]) for row in results["rows"]] == [
        ("convgpt", 1, 9),
        ("convgpt", 2, 18),
        ("llama", 1, 9),
        ("llama", 2, 18),
    ]
    for row in results["rows"]:
        assert row["seconds"].keys() == {"slots", "generate", "replay"}
        assert all(len(times) == 2 and min(times) > 0 for times in row["seconds"].values())
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(results["rows"])
    assert len({line.count("|") for line in table}) == 1
