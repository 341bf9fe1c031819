"""How good is a model at standard benchmarks?  lm-evaluation-harness on a model, with its figures beside the others.

    posttrain harness runs/phase3/final --tasks gsm8k hellaswag --chat-template --out runs/evaluation
    posttrain harness runs/phase3/final --tasks mine.yaml --limit 20 --out runs/evaluation

The figures go into `benchmarks` of results.json in --out, and the model's answers into the folder benchmarks/ there.
Tasks are names of the harness (`lm-eval ls tasks`) or YAML files. Code of a task only runs with --run-task-code.
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
SAMPLES = "benchmarks"  # the folder of questions and answers
# Folders of lm_eval/tasks whose Python runs what a model writes, as a program or an expression, or other programs. Few
# of them declare it (`unsafe_code`); a test searches for more.
RUN_ANSWERS = "cruxeval humaneval humaneval_infilling longproc mbpp noreval/ask_gec score unitxt".split()
# Settings of generation that a task may make without --run-task-code. transformers accepts more, among them code
# (`custom_generate`).
GENERATION = (
    "until do_sample temperature top_p top_k min_p repetition_penalty num_beams max_gen_toks max_new_tokens max_tokens "
    "max_completion_tokens"
).split()
KEPT = ("doc_id", "target", "arguments", "resps", "filtered_resps", "filter")  # of a sample, besides its metrics


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a phase's folder `final`, or a model of the Hub (OWNER/NAME)")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names of the harness or YAML files")
    parser.add_argument("--out", type=Path, help="the folder of results.json (default: the run that MODEL belongs to)")
    parser.add_argument(
        "--chat-template", action="store_true", help="format questions as a conversation, with MODEL's template"
    )
    parser.add_argument("--system", help="a system message, with --chat-template")
    parser.add_argument("--fewshot", type=int, metavar="N", help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of each task, for trying out")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows at a time (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument(
        "--run-task-code", action="store_true", help="run Python that comes with a task, or that a model writes"
    )
    options = parser.parse_args(argv)
    out = check_harness(options)
    runlog.keep_private(out)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    from posttrain.evaluation.store import digest
    from posttrain.plan import check_hub

    section = ModelSection(name_or_path=options.model, dtype=options.dtype)
    check_hub([section], [])
    names = [name for several in options.tasks for name in several.split(",")]
    manager, tasks = load_tasks(names, code=options.run_task_code)
    model = wrap(section, options)
    for task in tasks:  # written after each task, in case a later one fails
        measured = measure(model, manager, task, options)
        measured["origins"] = origins(task)
        entries = {name: entry(name, measured, options) for name in (*measured.get("groups", {}), *measured["configs"])}
        checkpoint = keep(out / RESULTS, options.model, digest(options.model), entries)
        for name, rows in measured["samples"].items():
            write_samples(out / SAMPLES / f"{checkpoint}-{name}.jsonl".replace("/", "-"), rows)
        print_figures(checkpoint, entries)
    print(f"Written: {out / RESULTS} (benchmarks), {out / SAMPLES}/")


def check_harness(options: argparse.Namespace) -> Path:
    """Return the folder for the results.

    Raises:
        UserError: an option is wrong, or the harness is not installed; checked before anything is loaded.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "Standard benchmarks need lm-evaluation-harness, which is not installed: "
            "`pip install '.[harness]'` in this project's folder (about 300 MB)."
        )
    folder = Path(options.model)
    if not folder.exists() and not HUB_NAME.fullmatch(options.model):
        raise UserError(f"There is no folder {folder}. Name the folder `final` of a phase, or a model on the Hub.")
    numbers = (("fewshot", options.fewshot, 0), ("limit", options.limit, 1), ("batch-size", options.batch_size, 1))
    for option, value, least in numbers:
        if value is not None and value < least:
            raise UserError(f"--{option} {value} is too small: write at least {least}.")
    if options.system is not None and not options.chat_template:
        raise UserError("--system is a message of a conversation: add --chat-template.")
    if options.out is not None:
        return options.out
    if not folder.exists() or not (folder / "../.." / RESULTS).is_file():
        raise UserError(
            f"--out is missing, since {options.model} is not in a run with {RESULTS}. Name a folder, e.g. --out"
            " runs/benchmarks, or the folder of an evaluation, to whose figures these are added."
        )
    return (folder / "../..").resolve()


@contextlib.contextmanager
def in_words(what: str, code: bool, own: bool = False) -> Iterator[None]:
    """Raise any error of a task as a UserError, and refuse the code of a task unless `code` is set.

    Args:
        what: the beginning of the message.
        own: whether the task is a file of the user, which may not use code of the harness either.
    """
    from posttrain.runtime import compat

    with contextlib.ExitStack() as stack:
        try:
            if not code:
                stack.enter_context(compat.no_task_code(own, RUN_ANSWERS))
            yield
        except UserError as refused:
            raise UserError(f"{what}: {refused}. Read that code, then allow it with --run-task-code.") from refused
        except Exception as error:
            raise UserError(f"{what}: {one_line(error)}") from error


def load_tasks(names: Sequence[str], *, code: bool) -> tuple[Any, list[Any]]:
    """Return the harness's task manager, and the tasks and groups with these names or files.

    Raises:
        UserError: a task is unknown, or needs code that is not allowed.
    """
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    files = [name for name in names if Path(name).suffix in (".yaml", ".yml")]
    manager = TaskManager(include_defaults=len(files) < len(names))  # it reads some 14,000 files
    loaded = []
    for name in names:
        if name not in files and name not in manager.all_tasks:
            raise UserError(
                f"There is no task {name}. Write the name of a task or group of the harness (`lm-eval ls tasks` lists"
                " them), or the path of a YAML file that ends in .yaml."
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
    """Raise UserError for a task with code that the loader does not refuse: answers as programs, metrics of the Hub."""
    from lm_eval.api.registry import metric_registry  # pyright: ignore[reportMissingImports]

    if code:
        return
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"The task {task.task_name} runs what the model writes as a program, on this machine and without a sandbox."
            " Leave it out, or allow it with --run-task-code on a machine without anything of value."
        )
    if unknown := [key for key in task.config.generation_kwargs or {} if key not in GENERATION]:
        raise UserError(
            f"The task {task.task_name} sets {unknown[0]} in generation_kwargs, which may run code. Remove it: a "
            f"task may set {', '.join(GENERATION)}. Or allow it with --run-task-code."
        )
    if task.config.process_results is None:  # where it is set, the names are only labels
        names = [entry["metric"] for entry in task.config.metric_list or [] if isinstance(entry["metric"], str)]
        if absent := [name for name in names if name not in metric_registry]:
            raise UserError(
                f"The task {task.task_name} has the metric {absent[0]}, which the harness does not have, so"
                " that it would be a script from the Hub. Choose a metric of the harness, or"
                " allow scripts with --run-task-code."
            )


def wrap(section: ModelSection, options: argparse.Namespace) -> Any:
    """Return the harness's model class around a model that this project has loaded.

    Log-probs are computed in float32 for all weights, since bfloat16 has three digits. `options` gets the dtype and
    the device of the model.
    """
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    from posttrain import models

    model, chat = models.load(section, device=options.device, chat_template=None, training=False)
    options.dtype, options.device = str(model.dtype).removeprefix("torch."), str(model.device)
    wrapper: Any = HFLM  # its decorator hides its parameters
    tokenizer, rows = chat.tokenizer, options.batch_size
    return wrapper(pretrained=model.eval(), tokenizer=tokenizer, batch_size=rows, softmax_dtype="float32")


def measure(model: Any, manager: Any, task: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the harness's results of one task or group."""
    import lm_eval  # pyright: ignore[reportMissingImports]

    evaluate: Any = lm_eval.simple_evaluate  # its decorator hides its parameters
    with in_words("The benchmarks could not be measured", options.run_task_code):
        results = evaluate(
            model=model,
            tasks=[task],
            task_manager=manager,
            num_fewshot=options.fewshot,
            limit=options.limit,
            apply_chat_template=options.chat_template,
            system_instruction=options.system,
            fewshot_as_multiturn=options.chat_template,
            confirm_run_unsafe_code=options.run_task_code,
        )
    assert results is not None  # one process
    return dict(results)


def entry(name: str, results: dict[str, Any], options: argparse.Namespace) -> Record:
    """Return the part of a task, or of a group of tasks, in results.json.

    {"version": 3, "n": 1319, "of": 1319, "fewshot": 5, "metrics": [{"metric": "exact_match", "filter": "none",
     "value": 0.31, "stderr": 0.013, "higher_is_better": True}, ...], "harness": "0.4.13", ...}
    """
    from posttrain.models import commit

    figures, tasks = results["results"][name], leaves(name, results)
    configs = [results["configs"][task] for task in tasks]
    kind = configs[0]["output_type"]
    groups = [group for group, children in results["group_subtasks"].items() if name in children]
    metrics = []
    for key, value in figures.items():
        metric, _, filtered = key.partition(",")
        if filtered and not metric.endswith("_stderr"):
            metrics.append({
                "metric": metric,
                "filter": filtered,
                "value": finite_or_none(value),
                "stderr": finite_or_none(figures.get(f"{metric}_stderr,{filtered}")),
                "higher_is_better": results["higher_is_better"].get(name, {}).get(metric),
            })  # fmt: skip
    return {
        "version": results["versions"][name],
        "part_of": groups[0] if groups else None,
        "n": sum(results["n-samples"][task]["effective"] for task in tasks),
        "of": sum(results["n-samples"][task]["original"] for task in tasks),
        "fewshot": results["n-shot"].get(name),
        "metrics": metrics,
        "data_set": data_set(configs, [results["origins"][task] for task in tasks]),
        "output_type": kind,
        "generation": configs[0].get("generation_kwargs") if kind == "generate_until" else None,
        "chat_template": options.chat_template,
        "system": options.system,
        "dtype": options.dtype,
        "device": options.device,
        "seeds": {key: results["config"][key] for key in ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")},
        "harness": importlib.metadata.version("lm-eval"),
        "transformers": importlib.metadata.version("transformers"),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def leaves(name: str, results: dict[str, Any]) -> list[str]:
    """Return the names of the tasks of a group, or of the task itself."""
    if name in results["configs"]:
        return [name]
    return [task for child in results["group_subtasks"][name] for task in leaves(child, results)]


def origins(task: Any) -> dict[str, Record]:
    """Return for each task of a group, or the task itself, {"hub": True, "rows": 1319}.

    hub: whether the items come from the Hub: the data set has a name of the Hub, which is not a file or a folder here,
    and the task names no files. rows: of its split, of which a task may use fewer.
    """
    by_task: dict[str, Record] = {}
    for leaf in task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]:
        config, rows = getattr(leaf, "config", None), getattr(leaf, "dataset", None)
        path = getattr(config, "dataset_path", None) or ""
        own = getattr(config, "custom_dataset", None) or "data_files" in (getattr(config, "dataset_kwargs", None) or {})
        split = getattr(config, "test_split", None) or getattr(config, "validation_split", None)
        by_task[leaf.task_name] = {
            "hub": bool(HUB_NAME.fullmatch(path)) and not own and not Path(path).exists(),
            "rows": len(rows[split]) if rows is not None and split in rows else None,
        }
    return by_task


def data_set(configs: Sequence[dict[str, Any]], origin: Sequence[Record]) -> dict[str, Any]:
    """Return where items come from: a data set on the Hub, or a format of local files (json); None if tasks differ."""
    splits = [config.get("test_split") or config.get("validation_split") for config in configs]
    every = {"path": [config.get("dataset_path") for config in configs], "split": splits}
    every["name"] = [config.get("dataset_name") for config in configs]
    common: dict[str, Any] = {key: values[0] if len(set(values)) == 1 else None for key, values in every.items()}
    rows = [one["rows"] for one in origin]
    return common | {"hub": all(one["hub"] for one in origin), "rows": None if None in rows else sum(rows)}


def finite_or_none(value: Any) -> float | None:
    """Return a number as JSON can hold it; None for "N/A", NaN and infinity."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def keep(file: Path, model: str, digest: str, entries: dict[str, Record]) -> str:
    """Add a model's tasks to `benchmarks` of results.json, and return the model's name there.

    Earlier tasks of the same weights stay, and so does everything about other weights.
    """
    from posttrain import files, report
    from posttrain.runtime import checkpoint

    remedy = "Write to another folder (--out), or measure again (python evaluate_model.py --overwrite)."
    results = files.read_json(file, remedy) if file.is_file() else {}
    benchmarks = results.setdefault("benchmarks", {})
    name = name_of(model, digest, results.get("digests", {}), benchmarks)
    tasks: dict[str, Record] = {}
    for former_name in [key for key, former in benchmarks.items() if former["digest"] == digest]:
        tasks |= benchmarks.pop(former_name)["tasks"]
    if name in benchmarks:  # other weights, which had this name before an evaluation gave it to these
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
    """Return the name of weights: as in the evaluation, as before, or one that no other weights have."""
    taken = {name: former["digest"] for name, former in benchmarks.items()}
    for names in (evaluated, taken):
        for name, weights in names.items():
            if weights == digest:
                return name
    folder = Path(model)
    short = folder.parent.name if folder.name == "final" else folder.name
    candidates = (short, model, f"{model} ({digest[:8]})")
    return next(name for name in candidates if name and name not in taken | evaluated)


def write_samples(file: Path, rows: Sequence[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = [{key: row[key] for key in (*KEPT, *row["metrics"])} for row in rows]
    write_whole(file, (f"{json.dumps(row, default=str)}\n" for row in kept))


def print_figures(name: str, entries: dict[str, Record]) -> None:
    from posttrain.report import benchmark_rows

    for row in benchmark_rows({"benchmarks": {name: {"tasks": entries}}}):
        print(f"{row.checkpoint}  {row.task} (version {row.version}): {row.metric} {row.figure}, n {row.n}")


if __name__ == "__main__":
    run(main)
