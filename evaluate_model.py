"""What did each phase change?  Any list of checkpoints on the same held-out prompts, levels and seeds, with intervals.

    python evaluate_model.py                                              the phases of the reference run
    python evaluate_model.py --config configs/quickstart/evaluate.yaml    those of `make quickstart`
    python evaluate_model.py checkpoints.mine=runs/mine/final output_dir=runs/comparison

An exam is set once: prompts, levels and the seed of every answer. Each checkpoint sits it under each sampling setting.
Written to `output_dir`: results.json, results.md, transcripts.jsonl (every generation), plots/ and report.html.

There is one process for every visible GPU, or `workers` on a CPU; under torchrun the ranks share the work out. What is
finished is kept in `output_dir`/evaluation_rows: the same command with --resume goes on from there.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import platform
import re
import subprocess
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from posttrain import metrics, runlog
from posttrain.config import EvaluateRun, ModelSection, Suite, load, run
from posttrain.config.schemas import NamedSampling, WorldSection
from posttrain.evaluation import ROWS, Loaded, Row, Sitting, Store, Tick, run_exam
from posttrain.types import UserError, address

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.chat import Chat

RESULTS = "results.json"
PACKAGES = ("torch", "transformers", "trl", "datasets", "gymnasium", "gym-sokoban", "math-verify", "numpy")
PAIR_TOKENS = 8192  # padded tokens in one batch of preference pairs
MOST_ROWS = 256  # sampled at the same time where batch_size is null and the memory allows it
# What is compared between two checkpoints, item by item. `equal_length` cuts each pair of answers to the shorter one.
COMPARED = {
    "math": ("accuracy", "tokens"),
    "repetition": ("equal_length", "seq_rep_4", "seq_rep_4_first", "longest_repeat", "never_stops", "tokens"),
    "recall": ("accuracy",),
    "preferences": ("accuracy", "margin"),
    "worlds": ("success", "failed", "return"),
}


def main() -> None:
    cfg, args = load(EvaluateRun, "configs/evaluate.yaml", add_arguments=_arguments)
    out = Path(cfg.output_dir)
    runlog.keep_private(out)
    if runlog.is_main_process():
        check(cfg, overwrite=args.overwrite, resume=args.resume)

    import torch

    from posttrain import checkpoint, parallel, report

    parallel.start(torch.device("cpu"))  # ranks hand rows to each other, never tensors
    exam = set_exam(cfg)
    headlines = headline_levels(cfg, exam).items() if runlog.is_main_process() else ()
    baselines = {world: play_baselines(cfg, sitting) for world, sitting in headlines}
    store = Store(cfg, exam)
    if runlog.is_main_process() and not args.resume:
        store.clear()
    parallel.barrier()
    found = run_exam(cfg, exam, measure)
    parallel.stop()
    if not runlog.is_main_process():
        return

    measured = [name for name in cfg.checkpoints if name not in found.failed]
    if measured:
        rows = {name: found.of(name, exam) for name in measured}
        results = {
            "checkpoints": {name: summarise(cfg, rows[name], rows) for name in measured},
            "failed": found.failed,
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
        if cfg.goals:
            results["goals"] = report.goals(results)
        with checkpoint.full_disk_in_words(out):
            write(out / "transcripts.jsonl", (json.dumps(row) for name in rows for row in rows[name]))
            write(out / "results.md", [report.markdown(results)])
            report.plots(results, out / "plots")
            write(out / RESULTS, [json.dumps(results, indent=1, allow_nan=False)])
        report.show(results)
        print(f"Written: {out / RESULTS}, results.md, transcripts.jsonl, plots/")
        if cfg.report:
            print(f"Report: {report.build(out)}")
    if found.failed:
        listed = "\n  ".join(f"{name}: {reason}" for name, reason in found.failed.items())
        raise UserError(
            f"{len(found.failed)} of {len(cfg.checkpoints)} checkpoints could not be measured:\n  {listed}\nThe rows "
            f"of the others are in {out}. Repair these (checkpoints.NAME=...) and give the same command with --resume, "
            "which measures only what is missing."
        )
    store.clear()


def _arguments(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--overwrite", action="store_true", help="replace the results that output_dir holds already")
    what.add_argument("--resume", action="store_true", help="keep what an evaluation has finished that did not end")


# --------------------------------------------------------------------------------------------------- setting the exam


def set_exam(cfg: EvaluateRun) -> list[Sitting]:
    """Everything that will be asked, in order; a part's other settings ask the first `n_others` of its items."""
    from posttrain import embedded

    suites = cfg.suites
    exam: list[Sitting] = []

    def add(
        suite: str, source: str, part: str, items: list[dict[str, Any]], n: int, others: int | None, tokens: int
    ) -> None:
        for setting in used_settings(cfg, suite):
            asked = items[: n if setting.name == headline(cfg, suite) else others or n]
            seeds = [address(cfg.seed, suite, part, setting.name, i) for i in range(len(asked))]
            exam.append(Sitting(suite, source, part, setting.name, setting.params(tokens), asked, seeds))

    if suites.math:
        for source, part, items in math_items(cfg):
            add("math", source, part, items, suites.math.n, suites.math.n_others, suites.math.max_new_tokens)
    if suites.repetition:
        suite = suites.repetition
        if suite.source == "embedded":
            prompts = embedded.open_prompts(most(suite), cfg.seed)
            items = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
        else:
            items = file_rows(suite.source, "prompts", "suites.repetition.source", most(suite))
        add("repetition", "", "", items, suite.n, suite.n_others, suite.max_new_tokens)
    if suites.recall:
        suite = suites.recall
        if suite.source == "embedded":
            items = embedded.recall_dialogues(most(suite), cfg.seed)
        else:
            items = file_rows(suite.source, "recall", "suites.recall.source", most(suite))
        add("recall", "", "", items, suite.n, suite.n_others, suite.max_new_tokens)
    if suites.preferences:
        suite = suites.preferences
        if suite.source == "embedded":
            pairs = embedded.preference_pairs(suite.n, cfg.seed)
        elif suite.source == "ultrafeedback":
            pairs = hub_rows(suite.source, "preferences.source")
            pairs = [pair for pair in pairs if pair["score_chosen"] > pair["score_rejected"]][: suite.n]
        else:
            pairs = file_rows(suite.source, "preferences", "suites.preferences.source", suite.n)
        items = [{"chosen": pair["chosen"], "rejected": pair["rejected"]} for pair in pairs]
        exam.append(Sitting("preferences", "", "", "", None, items, [0] * len(items)))
    if suites.worlds:
        suite = suites.worlds
        for world in suite.worlds:
            name, tokens = world.name, suite.max_completion_length
            items = levels(cfg, world, max(suite.episodes, suite.episodes_others or 0))
            add("worlds", name, name, items, suite.episodes, suite.episodes_others, tokens)
    return exam


def most(suite: Suite) -> int:
    """The most items that a suite asks under any setting."""
    return max(suite.n, suite.n_others or 0)


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
        except (Exception, SystemExit) as problem:  # a world may raise anything
            raise raised(world.name, problem) from problem
        (repeats if game.level_key() in seen else new).append(item)
        seen.add(game.level_key())
        if len(new) == n:
            break
    return (new + repeats)[:n]


def raised(world: str, problem: BaseException) -> UserError:
    return UserError(
        f"suites.worlds.worlds: {world} raised {type(problem).__name__}: {problem}. `python -m envs.check {world}` "
        "says what is wrong with it."
    )


def world_options(cfg: EvaluateRun, name: str) -> dict[str, Any]:
    assert cfg.suites.worlds is not None
    return next(world.options for world in cfg.suites.worlds.worlds if world.name == name)


def math_items(cfg: EvaluateRun) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(source, part, problems) of every part; embedded has two: new questions, and operands never seen together."""
    from posttrain import embedded

    suite = cfg.suites.math
    assert suite is not None
    parts: list[tuple[str, str, list[dict[str, Any]]]] = []
    stems = [Path(source).stem for source in suite.sources]
    for source in suite.sources:
        if source == "embedded":
            splits = ("unseen_questions", "unseen_operands")
            parts += [(source, split, embedded.math_problems(most(suite), cfg.seed, split)) for split in splits]
        elif source == "gsm8k":
            rows = hub_rows(source, "math.sources")
            golds = [row["answer"].split("####")[-1].strip().replace(",", "") for row in rows]
            asked = [{"question": row["question"], "answer": gold} for row, gold in zip(rows, golds, strict=True)]
            parts.append((source, source, asked))
        elif source == "math500":
            rows = hub_rows(source, "math.sources")
            asked = [{"question": row["problem"], "answer": row["answer"]} for row in rows]
            parts.append((source, source, asked))
        else:
            rows, stem = file_rows(source, "questions", "suites.math.sources", most(suite)), Path(source).stem
            unlike = stems.count(stem) == 1 and stem not in ("unseen_questions", "unseen_operands")
            name = stem if unlike else source
            parts.append((name, name, rows))
    return [
        (source, part, [_as_prompt(row, suite.instruction) for row in rows[: most(suite)]])
        for source, part, rows in parts
    ]


def file_rows(source: str, kind: Any, key: str, most: int) -> list[dict[str, Any]]:
    """The first rows of a local file; `key` is where the config names it."""
    from posttrain.data.reading import evaluation_rows

    return evaluation_rows(source, kind, key, most)


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


# ------------------------------------------------------------------------------------------------- before any work


def check(cfg: EvaluateRun, *, overwrite: bool, resume: bool) -> None:
    """Everything that can be known to be wrong, in one UserError: results in the way, checkpoints, worlds, device.

    What passes is locked: no other process may write to output_dir until this one ends.
    """
    from safetensors import SafetensorError, safe_open

    from envs import make
    from posttrain import checkpoint, models

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
        problems.append(
            f"{out} holds an evaluation that has not ended: go on with it (--resume) or drop it (--overwrite)."
        )
    elif (out / RESULTS).exists() and not (overwrite or resume):
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
        except (SafetensorError, OSError) as error:
            problems.append(f"checkpoints.{name}: {path} cannot be read or is damaged: {error}.")
    for world in cfg.suites.worlds.worlds if cfg.suites.worlds else []:
        try:
            make(world.name, **world.options)
        except (ValueError, TypeError) as error:
            problems.append(f"suites.worlds.worlds: {error}")
    if problems:
        raise UserError("\n  ".join(["The evaluation cannot start:", *problems] if len(problems) > 1 else problems))
    checkpoint.lock_folder(out)


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


def measure(cfg: EvaluateRun, name: str, sitting: Sitting, tick: Tick, loaded: Loaded) -> list[Row]:
    """One checkpoint's answers to one part of the exam, judged; ValueError where a log-prob is NaN."""
    import torch

    torch.set_num_threads(1)  # sums come out the same wherever this runs; more cores are used by more `workers`
    model_section = section(cfg, name)
    if sitting.suite == "preferences":  # bfloat16 would move a sequence's log-prob as much as DPO does
        model_section.dtype = "float32"
    model, chat = loaded.get(model_section, cfg.device, cfg.chat.template)
    if sitting.suite == "preferences":
        with torch.autocast(model.device.type, enabled=False):
            found = weigh_pairs(model, chat, sitting, tick)
    elif sitting.suite == "worlds":
        found = play_levels(cfg, model_section, loaded, sitting, tick)
    else:
        found = answer(cfg, model_section, loaded, sitting, tick)
    where = {
        "checkpoint": name,
        "suite": sitting.suite,
        "source": sitting.source,
        "part": sitting.part,
        "setting": sitting.setting,
    }
    return [where | {"index": index} | row for index, row in enumerate(found)]


def rows_at_once(cfg: EvaluateRun, section: ModelSection, loaded: Loaded, longest: int, new: int) -> int:
    """How many conversations of `longest` tokens, `new` of them sampled in one go, are sampled at the same time."""
    from posttrain import plan

    assert loaded.model is not None
    most = cfg.batch_size or MOST_ROWS
    rows = plan.rows_at_once(loaded.model, section, longest, new, most, loaded.processes)
    if cfg.batch_size and rows < most:
        runlog.say(f"Memory is there for {rows} answers at a time, not for batch_size={most}.")
    return rows


def finite(logprobs: Iterable[float]) -> None:
    """ValueError where one is not: what was sampled then says nothing about the checkpoint."""
    if not all(map(math.isfinite, logprobs)):
        raise ValueError("a log-prob is NaN or infinite")


def answer(cfg: EvaluateRun, section: ModelSection, loaded: Loaded, sitting: Sitting, tick: Tick) -> list[Row]:
    """One written answer to each prompt, judged where there is something to judge."""
    from posttrain.rollout import complete, open_sampler

    model, chat, params = loaded.model, loaded.chat, sitting.params
    assert model is not None and chat is not None and params is not None
    prompts = [chat.prompt(item["messages"]) for item in sitting.items]
    longest = max(map(len, prompts)) + params.max_new_tokens
    batch = rows_at_once(cfg, section, loaded, longest, params.max_new_tokens)
    sampler = open_sampler(model, chat, max_context=longest)
    completions = complete(sampler, prompts, params, sitting.seeds, batch=batch, done=tick)
    rows = []
    for item, completion in zip(sitting.items, completions, strict=True):
        finite(completion.logprobs)
        ids = completion.ids[:-1] if completion.finished else completion.ids
        row = item | {"text": chat.decode(completion.ids), "never_stops": not completion.finished, "tokens": len(ids)}
        if sitting.suite == "math":
            row["accuracy"] = loaded.judge.correct(row["text"], item["answer"])
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


def weigh_pairs(model: PreTrainedModel, chat: Chat, sitting: Sitting, tick: Tick) -> list[Row]:
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
    finite(sums)
    rows = []
    for item, chosen, rejected in zip(sitting.items, sums[::2], sums[1::2], strict=True):
        figures = {"chosen_logprob": chosen, "rejected_logprob": rejected, "margin": chosen - rejected}
        rows.append(item | figures | {"accuracy": chosen > rejected})
    tick(len(rows))
    return rows


def play_levels(cfg: EvaluateRun, section: ModelSection, loaded: Loaded, sitting: Sitting, tick: Tick) -> list[Row]:
    """One episode on each level."""
    from envs import make
    from envs.protocol import Protocol
    from posttrain.rollout import open_sampler, play, set_up

    suite, model, chat = cfg.suites.worlds, loaded.model, loaded.chat
    assert suite is not None and sitting.params is not None and model is not None and chat is not None
    options = world_options(cfg, sitting.part)
    protocol = Protocol(**suite.protocol.model_dump())
    episodes = [set_up(make(sitting.part, **options), protocol, item["seed"], suite.split) for item in sitting.items]
    played = play(
        open_sampler(model, chat, max_context=suite.max_context),
        chat,
        episodes,
        sitting.params,
        sitting.seeds,
        slots=rows_at_once(cfg, section, loaded, suite.max_context, suite.max_completion_length),
        max_context=suite.max_context,
        context=suite.context,
        context_turns=suite.context_turns,
        done=tick,
    )
    for trajectory in played:
        finite(trajectory.sampled_logprobs)
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
    try:
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
                if not math.isfinite(paid):
                    raise ValueError(f"the world paid {paid}")
                row = {"success": info["success"], "failure": info["failure"], "return": paid, "turns": actions}
                played.setdefault(player, []).append(row)
    except (Exception, SystemExit) as problem:  # a world may raise anything
        raise raised(sitting.part, problem) from problem
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
        elif suite == "math":  # by source: what is unlike is never counted together
            sources: dict[str, dict[str, dict[str, list[Row]]]] = {}
            for setting, parts in settings.items():
                for part, found in parts.items():
                    sources.setdefault(found[0]["source"], {}).setdefault(setting, {})[part] = found
            summary[suite] = {
                source: _with_settings(cfg, suite, {s: _math_figures(by) for s, by in by_setting.items()})
                for source, by_setting in sources.items()
            }
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
    if reference in everybody and reference != rows[0]["checkpoint"]:
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
     "before": 0.21, "after": 0.11, "value": -0.1, "low": -0.13, "high": -0.07, "n": 100}
    In math, part is a source or one of the parts of a source.
    """
    names = list(rows)
    pairs = list(dict.fromkeys([*itertools.pairwise(names), *((names[0], name) for name in names[1:])]))
    sittings: dict[str, dict[tuple[str, str, str], list[Row]]] = {name: {} for name in names}
    for name in names:
        for row in rows[name]:
            for part in dict.fromkeys((row["source"], row["part"]) if row["suite"] == "math" else (row["part"],)):
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
