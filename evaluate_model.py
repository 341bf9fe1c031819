"""What did each phase change?  Any list of checkpoints on the same held-out prompts, levels and seeds, with intervals.

    python evaluate_model.py                                              the phases of the reference run
    python evaluate_model.py --config configs/quickstart/evaluate.yaml    those of `make quickstart`
    python evaluate_model.py checkpoints.mine=runs/mine/final output_dir=runs/comparison
    python evaluate_model.py "checkpoints.gpt={endpoint: https://HOST/v1, model: NAME, api_key_env: KEY}"

Prompts, levels and the seed of every answer are fixed before any model is loaded, and are the same for all checkpoints.
Written to `output_dir`: results.json, results.md, transcripts.jsonl (every generation), plots/ and report.html.

There is one process for every visible GPU, or `workers` on a CPU; under torchrun the work is divided among the ranks.
Finished parts are kept in `output_dir`/evaluation_rows, and the same command with --resume continues from there.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from argparse import ArgumentParser
from pathlib import Path

from safetensors import SafetensorError, safe_open

# A package loads a module when one of its names is first used, so --help and mistakes answer before torch is loaded.
from posttrain import config, evaluation, models, plan, report, rollout, runtime
from posttrain.config import EvaluateRun, load, run
from posttrain.evaluation import (
    ROWS,
    Store,
    build_tasks,
    compare,
    costs_in_words,
    endpoint_costs,
    env_error,
    headline_levels,
    hub_sets,
    play_baselines,
    run_task,
    run_tasks,
    section,
    summarise,
)
from posttrain.files import write_whole
from posttrain.runtime import runlog
from posttrain.types import HUB_NAME, Record, UserError

RESULTS = "results.json"
PACKAGES = ("torch", "transformers", "trl", "datasets", "gymnasium", "gym-sokoban", "math-verify", "numpy")


def main() -> None:
    cfg, args = load(EvaluateRun, "configs/evaluate.yaml", add_arguments=_arguments, description=__doc__)
    out = Path(cfg.output_dir)
    runlog.keep_private(out)
    if runlog.is_main_process():
        check(cfg, overwrite=args.overwrite, resume=args.resume)

    checkpoint, parallel = runtime.checkpoint, runtime.parallel
    parallel.join(runtime.hardware.resolve_device("cpu"))  # ranks hand rows to each other, never tensors
    tasks = build_tasks(cfg)
    headlines = headline_levels(cfg, tasks).items() if runlog.is_main_process() else ()
    baselines = {env: play_baselines(cfg, task) for env, task in headlines}
    store = Store(cfg, tasks)
    if runlog.is_main_process() and not args.resume:
        store.clear()
    parallel.barrier()
    outcome = run_tasks(cfg, tasks, run_task)
    parallel.stop()
    if not runlog.is_main_process():
        return

    measured = [name for name in cfg.checkpoints if name not in outcome.failed]
    if measured:
        rows = {name: outcome.of(name, tasks) for name in measured}
        results = {
            "checkpoints": {name: summarise(cfg, rows[name], rows) for name in measured},
            "failed": outcome.failed,
            "differences": compare(cfg, rows),
            "baselines": baselines,
            "digests": {name: store.fingerprint(name) for name in measured if name in cfg.local},
            "commit": models.commit(),
            "versions": versions(),
            "config": cfg.model_dump(mode="json"),
            "seeds": {
                "run": cfg.seed,
                "answer": "derive_seed(run, suite, part, setting, i)",
                "level": "derive_seed(run, environment, i), repeats left out",
                "bootstrap": "derive_seed(run, bootstrap)",
            },
        }
        if cfg.endpoints:
            results["endpoints"] = endpoint_costs(cfg, tasks)
        if cfg.goals:
            results["goals"] = evaluation.goals(results)
        if kept := benchmarks(out / RESULTS, results["digests"]):
            results["benchmarks"] = kept
        with checkpoint.full_disk_in_words(out):
            write_whole(out / "transcripts.jsonl", (f"{json.dumps(row)}\n" for name in rows for row in rows[name]))
            write_whole(out / "results.md", [report.markdown(results), "\n"])
            report.plots(results, out / "plots")
            write_whole(out / RESULTS, [json.dumps(results, indent=1, allow_nan=False), "\n"])
        report.show(results)
        for name, costs in results.get("endpoints", {}).items():
            print(f"{name}: {costs_in_words(costs)}")
        print(f"Written: {out / RESULTS}, results.md, transcripts.jsonl, plots/")
        if cfg.report:
            print(f"Report: {report.build(out)}")
    if outcome.failed:
        listed = "\n  ".join(f"{name}: {reason}" for name, reason in outcome.failed.items())
        raise UserError(
            f"{len(outcome.failed)} of {len(cfg.checkpoints)} checkpoints could not be measured:\n  {listed}\nThe rows "
            f"of the others are in {out}. Repair these (checkpoints.NAME=...) and run the same command with --resume, "
            "which measures only what is missing."
        )
    store.clear()


def _arguments(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--overwrite", action="store_true", help="replace the results that are in output_dir")
    what.add_argument(
        "--resume", action="store_true", help="continue an interrupted evaluation, and keep its finished parts"
    )


def check(cfg: EvaluateRun, *, overwrite: bool, resume: bool) -> None:
    """Check everything before any work: existing results, checkpoints, device, environments, ...

    Then lock output_dir, so that no other process writes to it until this one ends.

    Raises:
        UserError: something is wrong; the message lists all problems.
    """
    checkpoint = runtime.checkpoint
    problems = []
    out = Path(cfg.output_dir)
    if out.is_dir():
        checkpoint.lock_folder(out)
    elif out.exists():
        problems.append(f"output_dir={out} is a file. Choose another name: output_dir=...")
    kept = any((out / ROWS).glob("*.jsonl"))
    if resume and not kept:
        done = f"{out / RESULTS} is complete" if (out / RESULTS).exists() else f"no evaluation has begun in {out}"
        problems.append(f"There is nothing to resume: {done}. Leave out --resume.")
    elif kept and not (overwrite or resume):
        problems.append(f"{out} holds an unfinished evaluation: continue it (--resume) or replace it (--overwrite).")
    elif (out / RESULTS).exists() and not (overwrite or resume):
        problems.append(f"{out / RESULTS} exists. Keep it (output_dir=ANOTHER) or replace it (--overwrite).")
    if not any(getattr(cfg.suites, suite) for suite in type(cfg.suites).model_fields):
        problems.append(f"suites: no suite is set; set at least one of {', '.join(type(cfg.suites).model_fields)}.")
    try:
        device = runtime.hardware.resolve_device(cfg.device)
        if cfg.suites.preferences and device.type == "cuda":
            plan.try_output_layer(device)
    except UserError as problem:
        problems.append(str(problem))
    hub_is_there = True
    try:
        plan.check_hub([section(cfg, name) for name in cfg.local], hub_sets(cfg.suites))
    except UserError as problem:
        hub_is_there = False
        problems.append(str(problem))
    for name, served in cfg.endpoints.items():
        try:
            evaluation.api_key(served)
        except UserError as problem:
            problems.append(f"checkpoints.{name}: {problem}")
    for name, path in cfg.local.items():
        if not hub_is_there and not Path(path).exists() and HUB_NAME.fullmatch(path):
            continue  # reported already
        try:
            models.load_chat(section(cfg, name), cfg.chat.template)
            if (Path(path) / checkpoint.MANIFEST).exists():
                checkpoint.verify(Path(path))
            for weights in Path(path).glob("*.safetensors"):
                with safe_open(weights, framework="numpy"):  # reads the header and compares the length
                    pass
        except UserError as problem:
            problems.append(f"checkpoints.{name}: {problem}")
        except (SafetensorError, OSError) as error:
            problems.append(f"checkpoints.{name}: {path} cannot be read or is damaged: {error}.")
    if suite := cfg.suites.envs:
        for env in suite.envs:
            try:
                config.check_parser(suite.protocol, rollout.open_env(env))
            except UserError as problem:
                problems.append(f"suites.envs: {problem}")
            except (ValueError, TypeError) as error:
                problems.append(f"suites.envs.envs: {error}")
            except (Exception, SystemExit) as error:  # an environment may raise anything
                problems.append(str(env_error(env.name, error)))
    if problems:
        raise UserError("\n  ".join(["The evaluation cannot start:", *problems] if len(problems) > 1 else problems))
    checkpoint.lock_folder(out)


def benchmarks(file: Path, digests: dict[str, str]) -> Record:
    """Return the figures of `posttrain harness` in the former results, except those of checkpoints that changed."""
    try:
        former = json.loads(file.read_text(encoding="utf-8")).get("benchmarks", {})
        return {name: entry for name, entry in former.items() if digests.get(name, entry["digest"]) == entry["digest"]}
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # absent or damaged; it is replaced
        return {}


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


if __name__ == "__main__":
    run(main)
