"""How good is a model at standard benchmarks?  lm-evaluation-harness with a model of ours, and its figures beside ours.

    posttrain harness runs/phase3/final --tasks gsm8k hellaswag --chat-template --out runs/evaluation
    posttrain harness runs/phase3/final --tasks mine.yaml --limit 20 --out runs/evaluation

The figures go into `benchmarks` of results.json in --out, and what the model answered beside it, into benchmarks/.
Tasks are names of the harness (`lm-eval ls tasks`) or YAML files. No code of a task runs unless --run-task-code asks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.config import ModelSection, run
from posttrain.files import write_whole
from posttrain.runtime import runlog
from posttrain.types import HUB_NAME, Record, UserError, one_line

RESULTS = "results.json"
SAMPLES = "benchmarks"  # the folder of what was asked and answered
# Folders of lm_eval/tasks whose Python runs what a model writes, as a program or an expression, or programs of others.
# Few of them say so (`unsafe_code`); a test looks for more.
RUN_ANSWERS = "cruxeval humaneval humaneval_infilling longproc mbpp noreval/ask_gec score unitxt".split()
# How a task may have answers written without leave. transformers takes more, among it code (`custom_generate`).
GENERATION = (
    "until do_sample temperature top_p top_k min_p repetition_penalty num_beams max_gen_toks max_new_tokens max_tokens "
    "max_completion_tokens"
).split()
KEPT = ("doc_id", "target", "arguments", "resps", "filtered_resps", "filter")  # of a sample, beside its metrics


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a phase's folder `final`, or a model of the Hub (OWNER/NAME)")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names of the harness or YAML files")
    parser.add_argument("--out", type=Path, help="the folder with results.json (default: the run that MODEL is of)")
    parser.add_argument("--chat-template", action="store_true", help="ask as in a conversation, with MODEL's template")
    parser.add_argument("--system", help="a system message, with --chat-template")
    parser.add_argument("--fewshot", type=int, metavar="N", help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N items of each task alone: for trying out")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows at a time (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument(
        "--run-task-code", action="store_true", help="run Python that a task brings along, or that a model writes"
    )
    given = parser.parse_args(argv)
    out = check_harness(given)
    runlog.keep_private(out)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    from posttrain.evaluation.store import digest
    from posttrain.plan import check_hub

    section = ModelSection(name_or_path=given.model, dtype=given.dtype)
    check_hub([section], [])
    names = [name for several in given.tasks for name in several.split(",")]
    manager, tasks = load_tasks(names, code=given.run_task_code)
    model = wrap(section, given)
    for task in tasks:  # what is measured stays, whatever becomes of the others
        found = measure(model, manager, task, given)
        found["origins"] = origins(task)
        entries = {name: entry(name, found, given) for name in (*found.get("groups", {}), *found["configs"])}
        checkpoint = keep(out / RESULTS, given.model, digest(given.model), entries)
        for name, rows in found["samples"].items():
            write_samples(out / SAMPLES / f"{checkpoint}-{name}.jsonl".replace("/", "-"), rows)
        show(checkpoint, entries)
    print(f"Written: {out / RESULTS} (benchmarks), {out / SAMPLES}/")


def check_harness(given: argparse.Namespace) -> Path:
    """The folder for the results; UserError where something is known to be wrong before anything is loaded."""

    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "Standard benchmarks need lm-evaluation-harness, which is not installed: "
            "`pip install '.[harness]'` in this project's folder (about 300 MB)."
        )
    folder = Path(given.model)
    if not folder.exists() and not HUB_NAME.fullmatch(given.model):
        raise UserError(f"There is no folder {folder}. Name the folder `final` of a phase, or a model of the Hub.")
    numbers = (("fewshot", given.fewshot, 0), ("limit", given.limit, 1), ("batch-size", given.batch_size, 1))
    for option, value, least in numbers:
        if value is not None and value < least:
            raise UserError(f"--{option} {value} is too small: write a number from {least} on.")
    if given.system is not None and not given.chat_template:
        raise UserError("--system is part of a conversation: write --chat-template as well.")
    if given.out is not None:
        return given.out
    if not folder.exists() or not (folder / "../.." / RESULTS).is_file():
        raise UserError(
            f"Where to? {given.model} lies in no run that holds {RESULTS}. Name a folder: --out runs/benchmarks, or "
            "that of an evaluation, whose figures these are put beside."
        )
    return (folder / "../..").resolve()


@contextlib.contextmanager
def in_words(what: str, code: bool, own: bool = False) -> Iterator[None]:
    """A task is a program of somebody else's and may raise anything; its own code stays out unless `code` is set.

    A file of the user (`own`) may use no code of the harness either.
    """
    from posttrain.runtime import compat

    with contextlib.ExitStack() as stack:
        try:
            if not code:
                stack.enter_context(compat.no_task_code(own, RUN_ANSWERS))
            yield
        except UserError as refused:
            raise UserError(f"{what}: {refused}. Read it, then allow it with --run-task-code.") from refused
        except Exception as error:
            raise UserError(f"{what}: {one_line(error)}") from error


def load_tasks(names: Sequence[str], *, code: bool) -> tuple[Any, list[Any]]:
    """The harness's tasks and groups of these names or files; UserError for one that is unknown or needs code."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    files = [name for name in names if Path(name).suffix in (".yaml", ".yml")]
    manager = TaskManager(include_defaults=len(files) < len(names))  # it reads some 14,000 files
    loaded = []
    for name in names:
        if name not in files and name not in manager.all_tasks:
            raise UserError(
                f"There is no task {name}. Write the name of a task or group of the harness (`lm-eval ls tasks` lists"
                " them), or the path of a YAML file that ends with .yaml."
            )
        if name in files and not Path(name).is_file():
            raise UserError(f"There is no file {name}.")
        with in_words(f"The task {name} cannot be loaded", code, name in files):
            tasks: dict[str, Any] = dict(manager.load([name]))
        for task in tasks["tasks"].values():
            refuse(task, code)
        loaded += list(tasks["groups"].values())[:1] or tasks["tasks"].values()  # a group comes before its subgroups
    return manager, loaded


def refuse(task: Any, code: bool) -> None:
    """UserError for a task that runs code which the loader has not refused: answers as programs, metrics of the Hub."""
    from lm_eval.api.registry import metric_registry  # pyright: ignore[reportMissingImports]

    if code:
        return
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"The task {task.task_name} runs what the model writes as a program, on this machine and without a sandbox."
            " Leave it out, or allow it with --run-task-code where nothing can be lost."
        )
    if unknown := [key for key in task.config.generation_kwargs or {} if key not in GENERATION]:
        raise UserError(
            f"The task {task.task_name} sets {unknown[0]} in generation_kwargs, which may run code. Take it out: a "
            f"task may set {', '.join(GENERATION)}. Or allow it with --run-task-code."
        )
    if task.config.process_results is None:  # otherwise the names are only labels
        names = [entry["metric"] for entry in task.config.metric_list or [] if isinstance(entry["metric"], str)]
        if absent := [name for name in names if name not in metric_registry]:
            raise UserError(
                f"The task {task.task_name} has the metric {absent[0]}, which the harness does not know: it would be a "
                "script of the Hub. Choose one of the harness, or allow scripts with --run-task-code."
            )


def wrap(section: ModelSection, given: argparse.Namespace) -> Any:
    """The harness's own model class around the model that this project has loaded.

    Log-probs are summed in float32 whatever the weights are: bfloat16 has three digits.
    """
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    from posttrain import models

    model, chat = models.load(section, device=given.device, chat_template=None, training=False)
    given.dtype, given.device = str(model.dtype).removeprefix("torch."), str(model.device)
    wrapper: Any = HFLM  # its decorator hides its parameters
    tokenizer, rows = chat.tokenizer, given.batch_size
    return wrapper(pretrained=model.eval(), tokenizer=tokenizer, batch_size=rows, softmax_dtype="float32")


def measure(model: Any, manager: Any, task: Any, given: argparse.Namespace) -> dict[str, Any]:
    """What the harness finds of one task or group."""
    import lm_eval  # pyright: ignore[reportMissingImports]

    evaluate: Any = lm_eval.simple_evaluate  # its decorator hides its parameters
    with in_words("The benchmarks could not be measured", given.run_task_code):
        found = evaluate(
            model=model,
            tasks=[task],
            task_manager=manager,
            num_fewshot=given.fewshot,
            limit=given.limit,
            apply_chat_template=given.chat_template,
            system_instruction=given.system,
            fewshot_as_multiturn=given.chat_template,
            confirm_run_unsafe_code=given.run_task_code,
        )
    assert found is not None  # one process
    return dict(found)


def entry(name: str, found: dict[str, Any], given: argparse.Namespace) -> Record:
    """The part of a task, or of a group of them, in results.json.

    {"version": 3, "n": 1319, "of": 1319, "fewshot": 5, "metrics": [{"metric": "exact_match", "filter": "none",
     "value": 0.31, "stderr": 0.013, "higher_is_better": True}, ...], "harness": "0.4.13", ...}
    """
    from posttrain.models import commit

    figures, tasks = found["results"][name], leaves(name, found)
    configs = [found["configs"][task] for task in tasks]
    kind = configs[0]["output_type"]
    groups = [group for group, children in found["group_subtasks"].items() if name in children]
    metrics = []
    for key, value in figures.items():
        metric, _, filtered = key.partition(",")
        if filtered and not metric.endswith("_stderr"):
            error = figures.get(f"{metric}_stderr,{filtered}")
            measured = {
                "metric": metric,
                "filter": filtered,
                "value": finite_or_none(value),
                "stderr": finite_or_none(error),
            }
            better = found["higher_is_better"].get(name, {}).get(metric)
            metrics.append(measured | {"higher_is_better": better})
    return {
        "version": found["versions"][name],
        "part_of": groups[0] if groups else None,
        "n": sum(found["n-samples"][task]["effective"] for task in tasks),
        "of": sum(found["n-samples"][task]["original"] for task in tasks),
        "fewshot": found["n-shot"].get(name),
        "metrics": metrics,
        "data_set": data_set(configs, [found["origins"][task] for task in tasks]),
        "output_type": kind,
        "generation": configs[0].get("generation_kwargs") if kind == "generate_until" else None,
        "chat_template": given.chat_template,
        "system": given.system,
        "dtype": given.dtype,
        "device": given.device,
        "seeds": {key: found["config"][key] for key in ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")},
        "harness": importlib.metadata.version("lm-eval"),
        "transformers": importlib.metadata.version("transformers"),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def leaves(name: str, found: dict[str, Any]) -> list[str]:
    """The tasks of a group, or the task itself."""
    if name in found["configs"]:
        return [name]
    return [task for child in found["group_subtasks"][name] for task in leaves(child, found)]


def origins(task: Any) -> dict[str, Record]:
    """For each task of a group, or the task: whether its items are the Hub's, and how many its split has.

    They are the Hub's where the name is one of the Hub, no file or folder here has it, and the task names no files. A
    task may ask fewer items than its split has.
    """

    found: dict[str, Record] = {}
    for leaf in task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]:
        config, rows = getattr(leaf, "config", None), getattr(leaf, "dataset", None)
        path = getattr(config, "dataset_path", None) or ""
        own = getattr(config, "custom_dataset", None) or "data_files" in (getattr(config, "dataset_kwargs", None) or {})
        split = getattr(config, "test_split", None) or getattr(config, "validation_split", None)
        found[leaf.task_name] = {
            "hub": bool(HUB_NAME.fullmatch(path)) and not own and not Path(path).exists(),
            "rows": len(rows[split]) if rows is not None and split in rows else None,
        }
    return found


def data_set(configs: Sequence[dict[str, Any]], origin: Sequence[Record]) -> dict[str, Any]:
    """Which items are asked: a data set of the Hub, or a format of local files (json); None where tasks differ."""
    splits = [config.get("test_split") or config.get("validation_split") for config in configs]
    every = {"path": [config.get("dataset_path") for config in configs], "split": splits}
    every["name"] = [config.get("dataset_name") for config in configs]
    told: dict[str, Any] = {key: values[0] if len(set(values)) == 1 else None for key, values in every.items()}
    rows = [one["rows"] for one in origin]
    return told | {"hub": all(one["hub"] for one in origin), "rows": None if None in rows else sum(rows)}


def finite_or_none(value: Any) -> float | None:
    """A figure as JSON has it; None for "N/A", NaN and infinity."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def keep(file: Path, model: str, digest: str, entries: dict[str, Record]) -> str:
    """Put a model's tasks into `benchmarks` of results.json, and return the name it has there.

    Earlier tasks of the same weights stay, and so does everything of other weights.
    """
    from posttrain import files, report
    from posttrain.runtime import checkpoint

    remedy = "Write to another folder (--out), or measure again (python evaluate_model.py --overwrite)."
    results = files.read_json(file, remedy) if file.is_file() else {}
    benchmarks = results.setdefault("benchmarks", {})
    name = name_of(model, digest, results.get("digests", {}), benchmarks)
    tasks: dict[str, Record] = {}
    for known in [known for known, former in benchmarks.items() if former["digest"] == digest]:
        tasks |= benchmarks.pop(known)["tasks"]
    if name in benchmarks:  # of weights that had this name before the evaluation gave it to these
        former = benchmarks.pop(name)
        benchmarks[f"{name} ({former['digest'][:8]})"] = former
    benchmarks[name] = {"digest": digest, "tasks": tasks | entries}
    file.parent.mkdir(parents=True, exist_ok=True)
    with checkpoint.full_disk_in_words(file.parent):
        if "checkpoints" in results:
            write_whole(file.with_name("results.md"), [report.markdown(results), "\n"])
        write_whole(file, [json.dumps(results, indent=1, allow_nan=False), "\n"])
    return name


def name_of(model: str, digest: str, evaluated: dict[str, str], benchmarks: dict[str, Record]) -> str:
    """What these weights are called: as in the evaluation, as before, or by a name that no other weights have."""
    taken = {name: former["digest"] for name, former in benchmarks.items()}
    for known in (evaluated, taken):
        for name, weights in known.items():
            if weights == digest:
                return name
    folder = Path(model)
    short = folder.parent.name if folder.name == "final" else folder.name
    names = (short, model, f"{model} ({digest[:8]})")
    return next(name for name in names if name and name not in taken | evaluated)


def write_samples(file: Path, rows: Sequence[Record]) -> None:
    """What was asked and answered, a line for each item."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = [{key: row[key] for key in (*KEPT, *row["metrics"])} for row in rows]
    write_whole(file, (f"{json.dumps(row, default=str)}\n" for row in kept))


def show(name: str, entries: dict[str, Record]) -> None:
    """The figures in the terminal."""
    from posttrain.report import benchmark_rows

    for row in benchmark_rows({"benchmarks": {name: {"tasks": entries}}}):
        print(f"{row.checkpoint}  {row.task} (version {row.version}): {row.metric} {row.figure}, n {row.n}")


if __name__ == "__main__":
    run(main)
