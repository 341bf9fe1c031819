"""What did each phase change?  Any list of checkpoints on the same held-out prompts, levels and seeds, with intervals.

    python evaluate_model.py                                              the phases of the reference run
    python evaluate_model.py --config configs/quickstart/evaluate.yaml    those of `make quickstart`
    python evaluate_model.py checkpoints.mine=runs/mine/final output_dir=runs/comparison

An exam is set once: prompts, levels and the seed of every answer. Each checkpoint sits it under each sampling setting.
Written to `output_dir`: results.json, results.md, transcripts.jsonl (every generation), plots/ and report.html.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import multiprocessing
import platform
import re
import signal
import subprocess
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from posttrain import metrics, runlog
from posttrain.config import EvaluateRun, ModelSection, load, run
from posttrain.config.schemas import NamedSampling, WorldSection
from posttrain.types import SamplingParams, UserError, address

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.chat import Chat
    from posttrain.sampler import Sampler

Row = dict[str, Any]  # one answer, one pair or one episode, as transcripts.jsonl holds it

RESULTS = "results.json"
PACKAGES = ("torch", "transformers", "trl", "datasets", "gymnasium", "gym-sokoban", "math-verify", "numpy")
PAIR_TOKENS = 8192  # padded tokens in one batch of preference pairs
# What is compared between two checkpoints, item by item. `equal_length` cuts each pair of answers to the shorter one.
COMPARED = {
    "math": ("accuracy", "tokens"),
    "repetition": ("equal_length", "seq_rep_4", "seq_rep_4_first", "longest_repeat", "never_stops", "tokens"),
    "recall": ("accuracy",),
    "preferences": ("accuracy", "margin"),
    "worlds": ("success", "failed", "return"),
}


@dataclass(frozen=True)
class Sitting:
    """A part of the exam under one setting: Sitting("math", "unseen_questions", "greedy", params, items, seeds).

    items: {"messages", "answer"} for math and recall, {"messages"} for repetition, {"chosen", "rejected"} for
    preferences (which sample nothing: no setting), {"seed"} of a level for worlds.
    """

    suite: str
    part: str
    setting: str
    params: SamplingParams | None
    items: list[dict[str, Any]]
    seeds: list[int]


def main() -> None:
    cfg, args = load(EvaluateRun, "configs/evaluate.yaml", add_arguments=_arguments)
    out = Path(cfg.output_dir)
    runlog.keep_private(out)
    check(cfg, overwrite=args.overwrite)
    exam = set_exam(cfg)

    baselines = {world: play_baselines(cfg, sitting) for world, sitting in headline_levels(cfg, exam).items()}
    rows = sit(cfg, exam)

    results = {
        "checkpoints": {name: summarise(cfg, rows[name], rows) for name in cfg.checkpoints},
        "differences": compare(cfg, rows),
        "baselines": baselines,
        "commit": commit(),
        "versions": versions(),
        "config": cfg.model_dump(mode="json"),
        "seeds": {
            "run": cfg.seed,
            "answer": "address(run, suite, part, setting, i)",
            "level": "address(run, world, i), repeats left out",
            "bootstrap": "address(run, bootstrap)",
        },
    }

    from posttrain import report

    if cfg.goals:
        results["goals"] = report.goals(results)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "transcripts.jsonl", (json.dumps(row) for name in rows for row in rows[name]))
    write(out / "results.md", [report.markdown(results)])
    report.plots(results, out / "plots")
    write(out / RESULTS, [json.dumps(results, indent=1, allow_nan=False)])
    report.show(results)
    print(f"Written: {out / RESULTS}, results.md, transcripts.jsonl, plots/")
    if cfg.report:
        print(f"Report: {report.build(out)}")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace the results that output_dir holds already")


# --------------------------------------------------------------------------------------------------- setting the exam


def set_exam(cfg: EvaluateRun) -> list[Sitting]:
    """Everything that will be asked, in order; a part's other settings ask the first `n_others` of its items."""
    from posttrain import embedded

    suites = cfg.suites
    exam: list[Sitting] = []

    def add(suite: str, part: str, items: list[dict[str, Any]], n: int, others: int | None, tokens: int) -> None:
        for setting in used_settings(cfg, suite):
            asked = items[: n if setting.name == headline(cfg, suite) else others or n]
            seeds = [address(cfg.seed, suite, part, setting.name, i) for i in range(len(asked))]
            exam.append(Sitting(suite, part, setting.name, setting.params(tokens), asked, seeds))

    if suites.math:
        for part, items in math_items(cfg):
            add("math", part, items, suites.math.n, suites.math.n_others, suites.math.max_new_tokens)
    if suites.repetition:
        suite = suites.repetition
        if suite.source == "embedded":
            prompts = embedded.open_prompts(max(suite.n, suite.n_others or 0), cfg.seed)
        else:
            prompts = [row["prompt"] for row in read_rows(suite.source, ("prompt",))]
        items = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
        add("repetition", "", items, suite.n, suite.n_others, suite.max_new_tokens)
    if suites.recall:
        suite = suites.recall
        if suite.source == "embedded":
            items = embedded.recall_dialogues(max(suite.n, suite.n_others or 0), cfg.seed)
        else:
            items = read_rows(suite.source, ("messages", "answer"))
        add("recall", "", items, suite.n, suite.n_others, suite.max_new_tokens)
    if suites.preferences:
        suite = suites.preferences
        if suite.source == "embedded":
            pairs = embedded.preference_pairs(suite.n, cfg.seed)
        elif suite.source == "ultrafeedback":
            pairs = hub_rows(suite.source, "preferences.source")
            pairs = [pair for pair in pairs if pair["score_chosen"] > pair["score_rejected"]][: suite.n]
        else:
            pairs = read_rows(suite.source, ("chosen", "rejected"))[: suite.n]
        items = [{"chosen": pair["chosen"], "rejected": pair["rejected"]} for pair in pairs]
        exam.append(Sitting("preferences", "", "", None, items, [0] * len(items)))
    if suites.worlds:
        suite = suites.worlds
        for world in suite.worlds:
            items = levels(cfg, world, max(suite.episodes, suite.episodes_others or 0))
            add("worlds", world.name, items, suite.episodes, suite.episodes_others, suite.max_completion_length)
    return exam


def used_settings(cfg: EvaluateRun, suite: str) -> list[NamedSampling]:
    """The sampling settings that a suite is measured under."""
    names = getattr(cfg.suites, suite).settings
    return [setting for setting in cfg.settings if names is None or setting.name in names]


def headline(cfg: EvaluateRun, suite: str) -> str:
    """The setting whose figures stand in the table; preferences need none."""
    if suite == "preferences":
        return ""
    return getattr(cfg.suites, suite).headline or used_settings(cfg, suite)[0].name


def levels(cfg: EvaluateRun, world: WorldSection, n: int) -> list[dict[str, Any]]:
    """Seeds of `n` held-out levels, all different where the world has so many: a repeated one would count twice."""
    from envs import make

    assert cfg.suites.worlds is not None
    game, seen = make(world.name, **world.options), set()
    new: list[dict[str, Any]] = []
    repeats: list[dict[str, Any]] = []
    for i in range(10 * n):
        item = {"seed": address(cfg.seed, world.name, i)}
        try:
            game.reset(seed=item["seed"], options={"split": cfg.suites.worlds.split})
        except ValueError as problem:
            raise UserError(f"suites.worlds.worlds: {problem} Choose other options.") from problem
        (repeats if game.level_key() in seen else new).append(item)
        seen.add(game.level_key())
        if len(new) == n:
            break
    return (new + repeats)[:n]


def world_options(cfg: EvaluateRun, name: str) -> dict[str, Any]:
    assert cfg.suites.worlds is not None
    return next(world.options for world in cfg.suites.worlds.worlds if world.name == name)


def math_items(cfg: EvaluateRun) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each part's problems; the embedded ones have two: new questions, and operands never seen together."""
    from posttrain import embedded

    suite = cfg.suites.math
    assert suite is not None
    wanted = max(suite.n, suite.n_others or 0)
    parts: list[tuple[str, list[dict[str, Any]]]] = []
    for source in suite.sources:
        if source == "embedded":
            splits = ("unseen_questions", "unseen_operands")
            parts += [(split, embedded.math_problems(wanted, cfg.seed, split)) for split in splits]
        elif source == "gsm8k":
            rows = hub_rows(source, "math.sources")
            golds = [row["answer"].split("####")[-1].strip().replace(",", "") for row in rows]
            parts.append((source, [{"question": r["question"], "answer": a} for r, a in zip(rows, golds, strict=True)]))
        elif source == "math500":
            rows = hub_rows(source, "math.sources")
            parts.append((source, [{"question": row["problem"], "answer": row["answer"]} for row in rows]))
        else:
            parts.append((Path(source).stem, read_rows(source, ("question", "answer"))))
    return [(part, [_as_prompt(row, suite.instruction) for row in rows[:wanted]]) for part, rows in parts]


def _as_prompt(row: dict[str, Any], instruction: str) -> dict[str, Any]:
    content = f"{row['question']} {instruction}".strip()
    return {"messages": [{"role": "user", "content": content}], "answer": str(row["answer"])}


def hub_rows(source: str, key: str) -> list[dict[str, Any]]:
    """A held-out split of a Hub data set; `key` is where the config names it."""
    from posttrain.data import reading

    hub = reading.HELD_OUT[source]
    try:
        return list(reading.load_hub(hub))
    except reading.HUB_ERRORS as error:
        raise UserError(
            f"The test set {hub.path} cannot be had ({type(error).__name__}: {' '.join(str(error).split())[:200]}). "
            f"Connect and start again (it is kept for later); or name a local .jsonl or .parquet file, or `embedded`, "
            f"in suites.{key}."
        ) from error


def read_rows(source: str, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of a local .jsonl or .parquet file that has these columns."""
    path = Path(source)
    if path.suffix not in (".jsonl", ".parquet") or not path.is_file():
        raise UserError(f"The source {source} is neither a name that is known here nor a .jsonl or .parquet file.")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    else:
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise UserError(f"{source} should hold one JSON object a line, but: {error}.") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or set(columns) - set(row):
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise UserError(f"Row {number} of {source} has {found}; expected are the columns {', '.join(columns)}.")
    if not rows:
        raise UserError(f"{source} is empty.")
    return rows


# ------------------------------------------------------------------------------------------------- before any work


def check(cfg: EvaluateRun, *, overwrite: bool) -> None:
    """Everything that can be known to be wrong, in one UserError: results in the way, checkpoints, worlds, device."""
    from safetensors import SafetensorError, safe_open

    from envs import make
    from posttrain import checkpoint, models

    problems = []
    out = Path(cfg.output_dir)
    if (out / RESULTS).exists() and not overwrite:
        problems.append(f"{out / RESULTS} exists. Keep it (output_dir=ANOTHER) or replace it (--overwrite).")
    if not any(getattr(cfg.suites, suite) for suite in type(cfg.suites).model_fields):
        problems.append("suites: nothing is asked; give at least one of math, repetition, recall, preferences, worlds.")
    try:
        models.resolve_device(cfg.device)
    except UserError as problem:
        problems.append(str(problem))
    hub_is_there = True
    try:
        models.check_hub([section(cfg, name) for name in cfg.checkpoints], hub_sets(cfg))
    except UserError as problem:
        hub_is_there = False
        problems.append(str(problem))
    for name, path in cfg.checkpoints.items():
        if not hub_is_there and not Path(path).exists() and models.HUB_NAME.fullmatch(path):
            continue  # said already
        try:
            models.load_chat(section(cfg, name), cfg.chat.template)
            if (Path(path) / checkpoint.MANIFEST).exists():
                checkpoint.verify(Path(path))
            for weights in Path(path).glob("*.safetensors"):
                with safe_open(weights, framework="numpy"):  # reads the header and compares the length
                    pass
        except UserError as problem:
            problems.append(f"checkpoints.{name}: {problem}")
        except SafetensorError as error:
            problems.append(f"checkpoints.{name}: {path} is damaged: {error}.")
    for world in cfg.suites.worlds.worlds if cfg.suites.worlds else []:
        try:
            make(world.name, **world.options)
        except (ValueError, TypeError) as error:
            problems.append(f"suites.worlds.worlds: {error}")
    if problems:
        raise UserError("\n  ".join(["The evaluation cannot start:", *problems] if len(problems) > 1 else problems))


def hub_sets(cfg: EvaluateRun) -> list[str]:
    """The data sets on the Hub that the exam is set from."""
    from posttrain.data.reading import HELD_OUT

    sources = list(cfg.suites.math.sources) if cfg.suites.math else []
    sources += [cfg.suites.preferences.source] if cfg.suites.preferences else []
    return [HELD_OUT[source].path for source in sources if source in HELD_OUT]


def section(cfg: EvaluateRun, name: str) -> ModelSection:
    return ModelSection(
        name_or_path=cfg.checkpoints[name], dtype=cfg.dtype, attn_implementation=cfg.attn_implementation
    )


# ------------------------------------------------------------------------------------------------------ sitting it


def sit(cfg: EvaluateRun, exam: list[Sitting]) -> dict[str, list[Row]]:
    """Every checkpoint's rows; `workers` checkpoints at a time, whose number changes no row."""
    from posttrain.runlog import Progress

    total = len(cfg.checkpoints) * sum(len(sitting.items) for sitting in exam)
    with Progress(total, f"evaluating {len(cfg.checkpoints)} checkpoints", unit="answer") as progress:

        def tick(count: int) -> None:
            progress.update(progress.done + count)

        if min(cfg.workers, len(cfg.checkpoints)) == 1:
            return {name: measure(cfg, name, exam, tick) for name in cfg.checkpoints}
        return sit_in_parallel(cfg, exam, tick)


def sit_in_parallel(cfg: EvaluateRun, exam: list[Sitting], tick: Callable[[int], None]) -> dict[str, list[Row]]:
    """One process per checkpoint, at most `workers` at once; none survives this function."""
    context = multiprocessing.get_context("forkserver")  # a server that imports once; nothing of this process is forked
    context.set_forkserver_preload(["posttrain.models", "posttrain.rollout", "posttrain.policy"])
    waiting, rows = list(cfg.checkpoints), {}
    running: dict[Any, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < cfg.workers:
                name = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_measure_apart, args=(there, cfg, name, exam), daemon=True)
                process.start()
                there.close()
                running[here] = name, process
            for pipe in connection.wait(list(running)):
                name, process = running[pipe]
                try:
                    message = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    process.join()
                    raise UserError(
                        f"The process that measured {name} ended with exit code {process.exitcode}; what it said "
                        "stands above. If it was killed for memory (-9), write workers=1 or a smaller batch_size."
                    ) from None
                if isinstance(message, UserError):
                    raise message
                if isinstance(message, int):
                    tick(message)
                else:
                    rows[name] = message
                    process.join()
                    del running[pipe]
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return {name: rows[name] for name in cfg.checkpoints}


def _measure_apart(pipe: Any, cfg: EvaluateRun, name: str, exam: list[Sitting]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    try:
        message: Any = measure(cfg, name, exam, pipe.send)
    except UserError as problem:
        message = problem
    pipe.send(message)


def measure(cfg: EvaluateRun, name: str, exam: list[Sitting], tick: Callable[[int], None]) -> list[Row]:
    """One checkpoint's answers to the whole exam, judged."""
    import torch

    from posttrain import models
    from posttrain.rollout import open_sampler

    torch.set_num_threads(1)  # sums come out the same wherever this runs; more cores are used by more `workers`
    model, chat = models.load(section(cfg, name), device=cfg.device, chat_template=cfg.chat.template, training=False)
    model.eval()
    sampler = open_sampler(model, chat)
    rows: list[Row] = []
    with metrics.MathJudge() as judge:
        for sitting in exam:
            if sitting.suite == "preferences":
                found = weigh_pairs(model, chat, sitting, tick)
            elif sitting.suite == "worlds":
                found = play_levels(cfg, sampler, chat, sitting, tick)
            else:
                found = answer(cfg, sampler, chat, sitting, judge, tick)
            where = {"checkpoint": name, "suite": sitting.suite, "part": sitting.part, "setting": sitting.setting}
            rows += [where | {"index": index} | row for index, row in enumerate(found)]
    return rows


def answer(
    cfg: EvaluateRun,
    sampler: Sampler,
    chat: Chat,
    sitting: Sitting,
    judge: metrics.MathJudge,
    tick: Callable[[int], None],
) -> list[Row]:
    """One written answer to each prompt, judged where there is something to judge."""
    from posttrain.rollout import complete

    assert sitting.params is not None
    prompts = [chat.prompt(item["messages"]) for item in sitting.items]
    completions = complete(sampler, prompts, sitting.params, sitting.seeds, batch=cfg.batch_size, done=tick)
    rows = []
    for item, completion in zip(sitting.items, completions, strict=True):
        ids = completion.ids[:-1] if completion.finished else completion.ids
        row = item | {"text": chat.decode(completion.ids), "never_stops": not completion.finished, "tokens": len(ids)}
        if sitting.suite == "math":
            row["accuracy"] = judge.correct(row["text"], item["answer"])
            row["boxed"] = metrics.last_boxed(row["text"]) is not None
        elif sitting.suite == "recall":
            row["accuracy"] = recalls(row["text"], item["answer"])
        else:
            assert cfg.suites.repetition is not None
            first = cfg.suites.repetition.equal_length
            row |= {
                "ids": ids,
                "seq_rep_4": metrics.seq_rep_n(ids),
                "seq_rep_4_first": metrics.seq_rep_n(ids[:first]),
                "longest_repeat": metrics.longest_repeat(ids),
            }
        rows.append(row)
    return rows


def recalls(text: str, wanted: str) -> bool:
    """Whether the answer stands in the text as a word of its own, whatever its case."""
    return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text, re.IGNORECASE) is not None


def weigh_pairs(model: PreTrainedModel, chat: Chat, sitting: Sitting, tick: Callable[[int], None]) -> list[Row]:
    """log pi(answer | prompt), summed over the answer's tokens, for both answers of each pair."""
    import torch

    from posttrain.policy import microbatches, token_logprobs

    encoded = []
    for item in sitting.items:
        for side in ("chosen", "rejected"):
            ids, mask = chat.encode(item[side])
            start = len(chat.prompt(item[side][:-1]))  # of what the assistant said, the last answer alone is compared
            encoded.append((ids, [trained and place >= start for place, trained in enumerate(mask)]))
    sums = [0.0] * len(encoded)
    for batch in microbatches([len(ids) for ids, _ in encoded], PAIR_TOKENS):
        with torch.no_grad():
            logprobs_S, _ = token_logprobs(model, [encoded[i][0] for i in batch], [encoded[i][1] for i in batch])
        for i, part in zip(batch, logprobs_S.split([sum(encoded[i][1]) for i in batch]), strict=True):
            sums[i] = float(part.double().sum())
    rows = []
    for item, chosen, rejected in zip(sitting.items, sums[::2], sums[1::2], strict=True):
        figures = {"chosen_logprob": chosen, "rejected_logprob": rejected, "margin": chosen - rejected}
        rows.append(item | figures | {"accuracy": chosen > rejected})
    tick(len(rows))
    return rows


def play_levels(
    cfg: EvaluateRun, sampler: Sampler, chat: Chat, sitting: Sitting, tick: Callable[[int], None]
) -> list[Row]:
    """One episode on each level."""
    from envs import make
    from envs.protocol import Episode, Protocol
    from posttrain.rollout import play

    suite = cfg.suites.worlds
    assert suite is not None and sitting.params is not None
    options = world_options(cfg, sitting.part)
    protocol = Protocol(**suite.protocol.model_dump())
    episodes = [Episode(make(sitting.part, **options), protocol, item["seed"], suite.split) for item in sitting.items]
    played = play(
        sampler,
        chat,
        episodes,
        sitting.params,
        sitting.seeds,
        slots=cfg.batch_size,
        max_context=suite.max_context,
        context=suite.context,
        context_turns=suite.context_turns,
        done=tick,
    )
    return [
        item
        | {
            "messages": trajectory.messages,
            "actions": trajectory.actions,
            "success": trajectory.success,
            "failure": trajectory.failure,
            "failed": bool(trajectory.failure),
            "return": sum(trajectory.turn_rewards),
            "penalties": sum(trajectory.turn_penalties),
            "turns": trajectory.turns,
            "invalid_turns": trajectory.invalid_turns,
            "unfinished_turns": trajectory.unfinished_turns,
            "crashed": trajectory.crashed,
            "level": trajectory.level_key,
        }
        for item, trajectory in zip(sitting.items, played, strict=True)
    ]


def headline_levels(cfg: EvaluateRun, exam: Sequence[Sitting]) -> dict[str, Sitting]:
    """Per world the levels behind the figures of the table."""
    return {s.part: s for s in exam if s.suite == "worlds" and s.setting == headline(cfg, "worlds")}


def play_baselines(cfg: EvaluateRun, sitting: Sitting) -> dict[str, Row]:
    """What players without a model reach on the same levels with as many actions: the weak ones and the expert.

    `optimum` is the mean chance of the best possible player, for worlds that can compute it.
    """
    from envs import make

    suite = cfg.suites.worlds
    assert suite is not None
    protocol = suite.protocol
    horizon = min(protocol.max_actions, protocol.max_turns * protocol.max_actions_per_turn)
    game = make(sitting.part, **world_options(cfg, sitting.part))
    optima: list[float] = []
    played: dict[str, list[Row]] = {}
    for item in sitting.items:
        game.reset(seed=item["seed"], options={"split": suite.split})
        if hasattr(game, "optimal_success"):
            optima.append(game.optimal_success(horizon))  # type: ignore[attr-defined]
        for player in (*game.players(), "expert"):
            _, info = game.reset(seed=item["seed"], options={"split": suite.split})
            paid, actions, over = 0.0, 0, False
            while not over and actions < horizon:
                action = game.expert() if player == "expert" else game.players()[player]
                _, reward, terminated, truncated, info = game.step(action)
                paid, actions, over = paid + float(reward), actions + 1, terminated or truncated
            row = {"success": info["success"], "failure": info["failure"], "return": paid, "turns": actions}
            played.setdefault(player, []).append(row)
    baselines = {player: _world_figures(rows) for player, rows in played.items()}
    if optima:
        baselines["optimum"] = {"success": fmean(optima), "episodes": len(optima)}
    return baselines


# ----------------------------------------------------------------------------------------------------- figures


def summarise(cfg: EvaluateRun, rows: list[Row], everybody: dict[str, list[Row]]) -> dict[str, Any]:
    """A checkpoint's part of results.json: {"math": {"accuracy": 0.7, "n": 200, "low": ..., "settings": ...}, ...}."""
    by_suite: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        by_suite.setdefault(row["suite"], {}).setdefault((row["setting"], row["part"]), []).append(row)
    summary: dict[str, Any] = {}
    for suite, sittings in by_suite.items():
        settings: dict[str, Any] = {}
        for (setting, part), found in sittings.items():
            settings.setdefault(setting, {})[part] = found
        if suite == "worlds":
            parts = {part for _, part in sittings}
            summary[suite] = {
                world: _with_settings(cfg, suite, {s: _world_figures(by[world]) for s, by in settings.items()})
                for world in sorted(parts, key=[part for _, part in sittings].index)
            }
        elif suite == "math":
            summary[suite] = _with_settings(cfg, suite, {s: _math_figures(by) for s, by in settings.items()})
        elif suite == "recall":
            summary[suite] = _with_settings(cfg, suite, {s: _answer_figures(by[""]) for s, by in settings.items()})
        elif suite == "repetition":
            figures = {s: _repetition_figures(cfg, by[""]) for s, by in settings.items()}
            summary[suite] = _with_settings(cfg, suite, figures)
        else:
            summary[suite] = _preference_figures(cfg, settings[""][""], everybody)
    return summary


def _with_settings(cfg: EvaluateRun, suite: str, settings: dict[str, Row]) -> Row:
    chosen = headline(cfg, suite)
    return settings[chosen] | {"setting": chosen, "settings": settings}


def _share(rows: Sequence[Row], metric: str = "accuracy") -> Row:
    right = sum(bool(row[metric]) for row in rows)
    low, high = metrics.wilson(right, len(rows))
    return {metric: right / len(rows), "n": len(rows), "low": low, "high": high}


def _answer_figures(rows: Sequence[Row]) -> Row:
    means = {metric: fmean(float(row[metric]) for row in rows) for metric in ("tokens", "never_stops")}
    return _share(rows) | means


def _math_figures(parts: dict[str, list[Row]]) -> Row:
    together = [row for rows in parts.values() for row in rows]
    total = _answer_figures(together) | {"boxed": fmean(float(row["boxed"]) for row in together)}
    return total | {"parts": {part: _answer_figures(rows) for part, rows in parts.items()}}


def _repetition_figures(cfg: EvaluateRun, rows: Sequence[Row]) -> Row:
    assert cfg.suites.repetition is not None
    finished = [not row["never_stops"] for row in rows]
    figures = metrics.repetition([row["ids"] for row in rows], finished, cfg.suites.repetition.equal_length)
    seed = address(cfg.seed, "bootstrap")
    interval = metrics.bootstrap_mean([row["seq_rep_4"] for row in rows], seed, cfg.bootstrap_samples)
    return figures | {"n": len(rows), "low": interval.low, "high": interval.high}


def _preference_figures(cfg: EvaluateRun, rows: Sequence[Row], everybody: dict[str, list[Row]]) -> Row:
    """Besides the accuracy: whose reward beta * log(pi / pi_ref) is higher, which needs no beta to compare."""
    assert cfg.suites.preferences is not None
    figures = _share(rows) | {
        name: fmean(row[name] for row in rows) for name in ("chosen_logprob", "rejected_logprob", "margin")
    }
    reference = cfg.suites.preferences.reference
    if reference is not None and reference != rows[0]["checkpoint"]:
        before = [row for row in everybody[reference] if row["suite"] == "preferences"]
        rewarded = [{"accuracy": row["margin"] > old["margin"]} for row, old in zip(rows, before, strict=True)]
        share = _share(rewarded)
        figures |= {"reward_accuracy": share["accuracy"], "reward_low": share["low"], "reward_high": share["high"]}
        figures["reference"] = reference
    return figures


def _world_figures(rows: Sequence[Row]) -> Row:
    figures = _share(rows, "success")
    figures["episodes"] = figures.pop("n")
    turns = sum(row["turns"] for row in rows)
    figures |= {
        "return": fmean(row["return"] for row in rows),
        "failures": dict(sorted(Counter(row["failure"] for row in rows if row["failure"]).items())),
        "turns": turns / len(rows),
    }
    if "level" in rows[0]:  # played by a model
        figures |= {
            "penalties": fmean(row["penalties"] for row in rows),
            "invalid_turns": sum(row["invalid_turns"] for row in rows) / turns,
            "unfinished_turns": sum(row["unfinished_turns"] for row in rows) / turns,
            "crashed": sum(bool(row["crashed"]) for row in rows),
            "levels": len({row["level"] for row in rows}),
        }
    return figures


def compare(cfg: EvaluateRun, rows: dict[str, list[Row]]) -> list[Row]:
    """Paired differences, each checkpoint against the one before it and against the first.

    {"from": "phase1", "to": "phase2", "suite": "repetition", "part": "", "setting": "chat", "metric": "equal_length",
     "before": 0.21, "after": 0.11, "value": -0.1, "low": -0.13, "high": -0.07, "n": 100}; math in total has part "".
    """
    names = list(cfg.checkpoints)
    pairs = list(dict.fromkeys([*itertools.pairwise(names), *((names[0], name) for name in names[1:])]))
    sittings: dict[str, dict[tuple[str, str, str], list[Row]]] = {name: {} for name in names}
    for name in names:
        for row in rows[name]:
            for part in {row["part"], "" if row["suite"] == "math" else row["part"]}:
                sittings[name].setdefault((row["suite"], part, row["setting"]), []).append(row)
    seed, differences = address(cfg.seed, "bootstrap"), []
    for old, new in pairs:
        for (suite, part, setting), before in sittings[old].items():
            after = sittings[new][suite, part, setting]
            for metric in COMPARED[suite]:
                left, right = _values(metric, before, after)
                interval = metrics.paired_bootstrap(left, right, seed, cfg.bootstrap_samples)
                where = {"from": old, "to": new, "suite": suite, "part": part, "setting": setting, "metric": metric}
                figures = {"before": fmean(left), "after": fmean(right), **interval._asdict(), "n": len(left)}
                differences.append(where | figures)
    return differences


def _values(metric: str, before: Sequence[Row], after: Sequence[Row]) -> tuple[list[float], list[float]]:
    """One figure per item, from both checkpoints."""
    if metric == "equal_length":
        cut = metrics.at_equal_length([row["ids"] for row in before], [row["ids"] for row in after])
        return [metrics.seq_rep_n(ids) for ids in cut[0]], [metrics.seq_rep_n(ids) for ids in cut[1]]
    return [float(row[metric]) for row in before], [float(row[metric]) for row in after]


# ------------------------------------------------------------------------------------------------------- files


def commit() -> str | None:
    """The commit of this code, with "+" for changes on top of it; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return None
    changes = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def write(path: Path, lines: Iterable[str]) -> None:
    """All of the file or none of it."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        out.writelines(f"{line}\n" for line in lines)
    partial.replace(path)


if __name__ == "__main__":
    run(main)
