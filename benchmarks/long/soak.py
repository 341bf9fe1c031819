"""Does a long run stay as light as it began?  Memory, file handles, threads, disk, step and resume of 2,000 iterations.

    python benchmarks/long/soak.py --out runs/soak --json benchmarks/results/soak.json
    python benchmarks/long/soak.py --out runs/soak60 --steps 60          # the same bounds in a minute

A tiny model plays and learns with everything switched on that writes or remembers: distillation, checkpoints,
transcripts with pictures, validation, two dashboards. The run is stopped by SIGTERM near its start and near its end and
resumed, each time with the processor seconds until its next step. Another process looks at it from outside. Exit code 1
if a bound of `BOUNDS` is broken. Interrupted, it goes on with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
BOUNDS = {
    "memory_mib": 64,  # of the resident set: mean of the last tenth of the long stretch less that of its second tenth
    "handles": 0,  # most in the last tenth, less most before
    "threads": 0,
    "bytes_a_step": 1.2,  # disk: the second half's growth over the first half's
    "checkpoint": 1.1,  # bytes of the last checkpoint over those of the first
    "step_cpu": 1.5,  # processor seconds a step: the last tenth over the second tenth
    "resume_cpu": 10,  # processor seconds until the next step: at the end, less near the start
    "report_cpu": 60,
}
LAKE = {"observation": "neighbours"}
RUN: dict[str, Any] = {
    "device": "cpu",
    "report_to": ["trackio", "tensorboard"],
    "envs": [{"name": "frozen_lake", "options": {"size": 3, **LAKE}}],
    "protocol": {"style": "compact", "max_turns": 2, "max_actions": 2, "think": True},
    "rollout": {"groups": 2, "num_generations": 2, "max_completion_length": 8, "max_context": 384},
    "algorithm": {"preset": "starpo-s", "advantage": "grpo", "filter": {"strategy": "none", "keep_zero": True}},
    "distillation": {
        "sources": [{"kind": "capybara", "path": "embedded", "rows": 64}],
        "batch_size": 1, "max_new_tokens": 8, "eval_rows": 4,
    },
    "trainer": {"learning_rate": 1e-5, "micro_batch_tokens": 2048, "bf16": False},
    "diagnostics": {"every": 50, "early_stop": False, "pairs": 4},
    "transcripts": {"every": 10},
}  # fmt: skip


def prepared(out: Path) -> Path:
    """A tiny model that has read a few demonstrations."""
    from posttrain.data.embedded.base_model import new_base
    from posttrain.data.embedded.environments import demonstrations

    base, told = out / "base", demonstrations([("frozen_lake", LAKE)], 300, 0, style="compact")
    if not base.exists():
        texts = [f"{m['role']}\n{m['content']}" for row in told for m in row["messages"]]
        new_base(base, texts, 0, vocabulary=512, num_hidden_layers=1, intermediate_size=64)
    final = out / "phase1" / "final"
    if not final.exists():
        sources = "data.sources=[{kind: demonstrations, path: embedded, rows: 300, style: compact,"
        sources += " envs: [{name: frozen_lake, options: {observation: neighbours}}]}]"
        told = [f"model.name_or_path={base}", f"output_dir={out / 'phase1'}", "report_to=none", "trainer.max_steps=60"]
        more = ["data.eval_rows=8", "device=cpu", "trainer.logging_steps=20", "trainer.save_steps=60"]
        config = ["--config", "configs/quickstart/phase1_sft.yaml"]
        resumed = ["--resume"] if (out / "phase1").exists() else []
        run("train_phase1_sft.py", *config, sources, *told, *more, *resumed)
    return final


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, env=surroundings())


def surroundings() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def reported(out: Path, folder: Path) -> float:
    """Processor seconds of the page with all curves and of the one with all recorded episodes."""
    if not (out / "results.json").exists():
        settings = {"output_dir": str(out), "device": "cpu", "report_to": "none", "workers": 1}
        settings["settings"] = [{"name": "greedy", "temperature": 0.0}]
        settings |= {"checkpoints": {"phase3": str(folder / "final")}}
        settings |= {"suites": {"math": {"sources": ["embedded"], "n": 4, "n_others": 4, "max_new_tokens": 8}}}
        (out / "evaluate.yaml").write_text(yaml.safe_dump(settings))
        run("evaluate_model.py", "--config", str(out / "evaluate.yaml"))
    began = os.times()
    run("-m", "posttrain.report", str(out))
    run("-m", "posttrain.report", str(folder / "transcripts.jsonl"))
    ended = os.times()
    return ended.children_user + ended.children_system - began.children_user - began.children_system


def size(*places: Path) -> int:
    return sum(file.stat().st_size for place in places for file in [place, *place.rglob("*")] if file.is_file())


def disk(folder: Path, boards: Path) -> dict[str, int]:
    """Bytes of what grows step by step, and of the newest checkpoint."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in checkpoints if (path / "manifest.json").exists()]
    names = ("metrics.jsonl", "transcripts.jsonl", "alarms.jsonl", "episodes")
    found = {name: size(folder / name) for name in names}
    found |= {name: size(boards / name) for name in ("trackio", "tensorboard")}
    found["checkpoint"] = size(whole[-1]) if whole else 0
    known = [*(folder / name for name in names), *checkpoints]
    found["everything else"] = size(folder) - size(*known)
    return found


def last_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as rows:
        rows.seek(max(0, file.stat().st_size - 50_000))
        steps = [json.loads(row) for row in rows.read().splitlines()[1:] if row.endswith(b"}")]
    return max((row["step"] for row in steps if "rollout/reward" in row), default=0)


def stretch(file: Path, folder: Path, boards: Path, until: int | None, log: Path) -> dict[str, Any]:
    """Start or resume the run, watch it, stop it after step `until`: what was seen, every 10 steps."""
    began, seen = last_step(folder), []
    settings = ["--resume"] if (folder / "run_config.yaml").exists() else []
    env = surroundings() | {"TRACKIO_DIR": str(boards / "trackio")}
    env |= {"TENSORBOARD_LOGGING_DIR": str(boards / "tensorboard")}
    command = [sys.executable, "train_phase3_starpo.py", "--config", str(file), *settings]
    resumed_cpu, told = None, began
    with log.open("a") as said, subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said) as started:
        process = psutil.Process(started.pid)
        while started.poll() is None:
            try:
                step, cpu = last_step(folder), sum(process.cpu_times()[:2])
                if step > began and resumed_cpu is None:
                    resumed_cpu = cpu
                if step >= told + 10:
                    told = step
                    state = {"step": step, "cpu": cpu, "handles": process.num_fds(), "threads": process.num_threads()}
                    seen.append(state | {"rss": process.memory_info().rss, "disk": disk(folder, boards)})
            except (psutil.Error, FileNotFoundError):  # it has ended, or a checkpoint went away meanwhile
                continue
            if until is not None and step >= until:
                started.send_signal(signal.SIGTERM)
                break
            time.sleep(0.1)
        code = started.wait()
    if code != (0 if until is None else 128 + signal.SIGTERM):
        raise SystemExit(f"The run ended with exit code {code}: see {log}.")
    return {"from": began, "resume_cpu": resumed_cpu, "samples": seen}


def tenths(samples: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The second tenth of a stretch and its last: the first one warms up."""
    tenth = max(2, len(samples) // 10)
    return samples[tenth : 2 * tenth], samples[-tenth:]


def cpu_a_step(samples: list[dict[str, Any]]) -> float:
    return (samples[-1]["cpu"] - samples[0]["cpu"]) / (samples[-1]["step"] - samples[0]["step"])


def figures(stretches: list[dict[str, Any]], report_cpu: float) -> dict[str, Any]:
    """What the bounds are of."""
    long = max((each["samples"] for each in stretches), key=len)
    early, late = tenths(long)
    middle, growth = long[len(long) // 2], {}
    for name in long[0]["disk"]:
        first, half, last = (sample["disk"][name] for sample in (long[0], middle, long[-1]))
        ahead = (last - half) / (long[-1]["step"] - middle["step"])
        behind = (half - first) / (middle["step"] - long[0]["step"])
        growth[name] = {"bytes": last, "first half": behind, "second half": ahead}
    before = long[: -len(late)]
    first_checkpoint = next((s["disk"]["checkpoint"] for s in long if s["disk"]["checkpoint"]), 0)
    resumes = [each["resume_cpu"] for each in stretches if each["from"] and each["resume_cpu"] is not None]
    return {
        "steps": stretches[-1]["samples"][-1]["step"] if stretches[-1]["samples"] else long[-1]["step"],
        "long_stretch": [long[0]["step"], long[-1]["step"]],
        "memory_mib": (mean(s["rss"] for s in late) - mean(s["rss"] for s in early)) / 2**20,
        "rss_mib": [round(mean(s["rss"] for s in part) / 2**20, 1) for part in (early, late)],
        "handles": max(s["handles"] for s in late) - max(s["handles"] for s in before),
        "threads": max(s["threads"] for s in late) - max(s["threads"] for s in before),
        "most": {name: max(s[name] for s in long) for name in ("handles", "threads")},
        "disk": growth,
        "checkpoint": long[-1]["disk"]["checkpoint"] / max(1, first_checkpoint),
        "step_cpu_seconds": [cpu_a_step(early), cpu_a_step(late)],
        "step_cpu": cpu_a_step(late) / cpu_a_step(early),
        "resume_cpu_seconds": resumes,
        "resume_cpu": resumes[-1] - resumes[0],
        "report_cpu": report_cpu,
    }


def broken(found: dict[str, Any]) -> list[str]:
    """The bounds that do not hold, in words."""
    wrong = []
    for name, most in BOUNDS.items():
        if name in found and found[name] > most:
            wrong.append(f"{name} is {found[name]:.2f}, at most {most}")
    for name, grown in found["disk"].items():
        if name != "checkpoint" and grown["second half"] > BOUNDS["bytes_a_step"] * grown["first half"] + 256:
            slopes = f"{grown['first half']:.0f}, then {grown['second half']:.0f} bytes a step"
            wrong.append(f"{name} grows faster: {slopes}")
    return wrong


def table(found: dict[str, Any]) -> str:
    """The figures as lines of Markdown."""
    rss, step, resume = found["rss_mib"], found["step_cpu_seconds"], found["resume_cpu_seconds"]
    most = found["most"]
    rows = [
        ("resident memory, MiB", f"{rss[0]} in the second tenth, {rss[1]} in the last"),
        ("file handles, threads", f"at most {most['handles']} and {most['threads']}"),
        ("processor seconds a step", f"{step[0]:.3f} in the second tenth, {step[1]:.3f} in the last"),
        ("`--resume` to the next step, processor seconds", ", ".join(f"{each:.1f}" for each in resume)),
        ("both report pages, processor seconds", f"{found['report_cpu']:.1f}"),
        ("a checkpoint, MB", f"{found['disk']['checkpoint']['bytes'] / 1e6:.2f}"),
    ]
    for name, grown in found["disk"].items():
        if name != "checkpoint":
            slope = f"{grown['first half'] / 1e3:.2f} kB a step, then {grown['second half'] / 1e3:.2f}"
            rows.append((f"{name}, MB", f"{grown['bytes'] / 1e6:.2f} ({slope})"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {words} |" for name, words in rows)])


def main() -> None:
    import _measure

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="where everything is kept")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    out, steps = arguments.out.absolute(), arguments.steps
    out.mkdir(parents=True, exist_ok=True)
    kept, folder, boards, file = out / "seen.json", out / "run", out / "boards", out / "run.yaml"
    every = max(5, steps // 40)
    config = RUN | {"output_dir": str(folder), "model": {"name_or_path": str(prepared(out))}}
    config["trainer"] = {**config["trainer"], "max_steps": steps}
    config["evaluation"] = {"every": 2 * every, "episodes": 8, "final_episodes": 8}
    config["checkpoint"] = {"every": every, "keep": 2}
    file.write_text(yaml.safe_dump(config))

    seen: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    for until in (steps // 10, steps - steps // 20, None)[min(3, len(seen)) :]:
        seen.append(stretch(file, folder, boards, until, out / "log"))
        kept.write_text(json.dumps(seen))
    found = figures(seen, reported(out, folder))
    wrong = broken(found)
    samples = [each for stretched in seen for each in stretched["samples"]][:: max(1, steps // 400)]
    results = _measure.surroundings() | {"bounds": BOUNDS, "figures": found, "broken": wrong, "samples": samples}
    _measure.publish(results, table(found), arguments.json)
    if wrong:
        raise SystemExit("Broken: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
