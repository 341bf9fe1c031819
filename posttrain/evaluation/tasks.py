"""What is a model asked?  The suites as tasks: prompts, pairs or levels, a sampling setting, a seed for each answer.

The tasks are built once, before any model is loaded, so that every checkpoint gets the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import EnvSection, EvaluateRun, NamedSampling, SampledSuite, SuitesSection, TrainingSuites
from posttrain.files import DATA_FILES_IN_WORDS
from posttrain.types import Record, SamplingParams, UserError, derive_seed, one_line

if TYPE_CHECKING:
    from envs import TextEnv


@dataclass(frozen=True)
class Task:
    """A part of a suite under one sampling setting, the same for every checkpoint.

    Task("math", "embedded", "unseen_questions", "greedy", SamplingParams(...), items, seeds)

    items: {"messages", "answer"} for math and recall, {"messages"} for repetition, {"messages", "instructions"} for
    instructions, {"chosen", "rejected"} for preferences (which sample nothing and have no setting), {"seed"} of a level
    for environments.
    source: where the part comes from; the parts of one source are counted together, those of different sources never.
    """

    suite: str
    source: str
    part: str
    setting: str
    params: SamplingParams | None
    items: list[dict[str, Any]]
    seeds: list[int]

    @property
    def cost(self) -> int:
        """Return the most tokens that the task samples, in one turn; a pair counts as one, for its forward pass."""
        return len(self.items) * (self.params.max_new_tokens if self.params else 1)

    def only(self, places: range) -> Task:
        """Return the task with only the items at these places."""
        part = slice(places.start, places.stop)
        return replace(self, items=self.items[part], seeds=self.seeds[part])

    def described(self, checkpoint: str, rows: Sequence[Record]) -> list[Record]:
        """Return the rows of a checkpoint with the names of task and checkpoint; `index` is the place of the item."""
        where = {"checkpoint": checkpoint, "suite": self.suite, "source": self.source, "part": self.part}
        return [where | {"setting": self.setting, "index": index} | row for index, row in enumerate(rows)]


def build_tasks(cfg: EvaluateRun) -> list[Task]:
    """Return the tasks of an evaluation, in order; settings other than the headline use the first `n_others` items.

    Raises:
        UserError: a file, a data set or the first level of an environment cannot be read or made.
    """
    from posttrain.data import embedded, evaluation_rows

    suites = cfg.suites
    tasks: list[Task] = []

    def add(
        suite: str, source: str, part: str, items: list[dict[str, Any]], n: int, others: int | None, tokens: int
    ) -> None:
        for setting in used_settings(cfg, suite):
            used = items[: n if setting.name == headline(cfg, suite) else others or n]
            seeds = [derive_seed(cfg.seed, suite, part, setting.name, i) for i in range(len(used))]
            if suite == "envs":
                seeds = [sampling_seed(part, i, cfg.seed) for i in range(len(used))]
            tasks.append(Task(suite, source, part, setting.name, setting.params(tokens), used, seeds))

    if suites.math:
        for source, part, items in math_items(cfg):
            add("math", source, part, items, suites.math.n, suites.math.n_others, suites.math.max_new_tokens)
    written: list[tuple[str, Any, Any, Any]] = [  # name, suite, kind of file, generator
        ("repetition", suites.repetition, "prompts", open_questions),
        ("recall", suites.recall, "recall", embedded.recall_dialogues),
    ]
    for name, suite, kind, generated in written:
        if suite:
            if suite.source == "embedded":
                items = generated(most_items(suite), cfg.seed)
            else:
                items = evaluation_rows(suite.source, kind, f"suites.{name}.source", most_items(suite))
            add(name, "", "", items, suite.n, suite.n_others, suite.max_new_tokens)
    if suites.instructions:
        suite = suites.instructions
        items = instructions(suite.source, most_items(suite))
        add("instructions", "", "", items, suite.n, suite.n_others, suite.max_new_tokens)
    if suites.preferences:
        suite = suites.preferences
        if suite.source == "embedded":
            pairs = embedded.preference_pairs(suite.n, cfg.seed)
        elif suite.source == "ultrafeedback":
            pairs = hub_rows(suite.source, "preferences.source")
            pairs = [pair for pair in pairs if pair["score_chosen"] > pair["score_rejected"]][: suite.n]
        else:
            pairs = evaluation_rows(suite.source, "preferences", "suites.preferences.source", suite.n)
        items = [{"chosen": pair["chosen"], "rejected": pair["rejected"]} for pair in pairs]
        tasks.append(Task("preferences", "", "", "", None, items, [0] * len(items)))
    if suites.envs:
        suite = suites.envs
        for env in suite.envs:
            name, tokens = env.title, suite.max_completion_length
            items = first_levels(cfg, env, max(suite.episodes, suite.episodes_others or 0))
            add("envs", name, name, items, suite.episodes, suite.episodes_others, tokens)
    return tasks


def open_questions(n: int, seed: int) -> list[dict[str, Any]]:
    """Return generated open questions, each as a conversation."""
    from posttrain.data import embedded

    return [{"messages": [{"role": "user", "content": prompt}]} for prompt in embedded.open_prompts(n, seed)]


def instructions(source: str, n: int) -> list[dict[str, Any]]:
    """Return the first `n` prompts of IFEval, or of a file with its columns, whose instructions can be checked."""
    from posttrain.data import evaluation_rows, instruction_row
    from posttrain.evaluation.instructions import instruction_items

    key = "suites.instructions.source"
    if source == "ifeval":
        loaded = enumerate(hub_rows(source, "instructions.source"), 1)
        rows = [instruction_row(row, f"{key}: row {number} of {source}") for number, row in loaded]
    else:
        rows = evaluation_rows(source, "instructions", key)
    return instruction_items(rows, f"{key}={source}", n)


def most_items(suite: SampledSuite) -> int:
    """Return the largest number of items that a suite uses under any setting."""
    return max(suite.n, suite.n_others or 0)


def used_settings(cfg: EvaluateRun, suite: str) -> list[NamedSampling]:
    """Return the sampling settings that a suite is measured under."""
    names = getattr(cfg.suites, suite).settings
    return [setting for setting in cfg.settings if names is None or setting.name in names]


def headline(cfg: EvaluateRun, suite: str) -> str:
    """Return the name of the setting whose figures are in the table; "" for preferences, which sample nothing."""
    if suite == "preferences":
        return ""
    return getattr(cfg.suites, suite).headline or used_settings(cfg, suite)[0].name


def headline_levels(cfg: EvaluateRun, tasks: Sequence[Task]) -> dict[str, Task]:
    """Return for each environment the task behind the figures of the table."""
    return {s.part: s for s in tasks if s.suite == "envs" and s.setting == headline(cfg, "envs")}


def first_levels(cfg: EvaluateRun, section: EnvSection, n: int) -> list[dict[str, Any]]:
    """Return the seeds of `held_out_levels` as items.

    Raises:
        UserError: the environment raised on the first level.
    """
    from envs.process_state import keep_process_state
    from posttrain.rollout import open_env

    assert cfg.suites.envs is not None
    try:
        with keep_process_state(section.name):
            first = {"seed": derive_seed(cfg.seed, section.name, 0), "options": {"split": cfg.suites.envs.split}}
            open_env(section).reset(**first)
        return [{"seed": level} for level in held_out_levels(section, cfg.suites.envs.split, n, cfg.seed)]
    except ValueError as problem:
        raise UserError(f"suites.envs.envs: {problem} Choose other options.") from problem
    except (Exception, SystemExit) as problem:  # an environment may raise anything
        raise env_error(section.name, problem) from problem


def held_out_levels(section: EnvSection, split: str, n: int, seed: int = 0, *, repeat: bool = True) -> list[int]:
    """Return the seeds of `n` levels of a split.

    Every evaluation plays these levels, with `sampling_seed`: those during and after phase 3, and evaluate_model.py.
    So the same weights get the same figures in all of them, at equal `n`, `seed`, temperature and limits.

    All levels are different if 10 `n` draws give that many. Otherwise each level that was drawn is played equally
    often, as far as `n` allows; `metrics.wilson_of_levels` is the interval of such a rate. None is begun here, which
    may cost: a container, say. A seed on which `draw` raises counts as a level: its episode says why.

    repeat: False gives fewer levels instead.
    """
    from posttrain.rollout import open_env

    kind = type(open_env(section))  # part of the cache key: a class of the same name may have other levels
    drawn = _drawn(kind, section.model_dump_json(include={"name", "options"}), split, n, seed)
    return [level for times, level in drawn if repeat or times == 0]


@lru_cache(maxsize=64)
def _drawn(kind: type[TextEnv], section: str, split: str, n: int, seed: int) -> tuple[tuple[int, int], ...]:
    from envs.base import draw_level
    from envs.process_state import keep_process_state
    from posttrain.rollout import RAISED, open_env

    parsed = EnvSection.model_validate_json(section)
    env, times = open_env(parsed), Counter[str]()
    drawn: list[tuple[int, int]] = []  # (how often the level was drawn before, its seed)
    for i in range(10 * n):
        level = derive_seed(seed, parsed.name, i)
        try:
            with keep_process_state(parsed.name):
                key = env.key_of(draw_level(type(env), env.config, level, split))
        except RAISED:
            key = f"never begun: {level}"
        drawn.append((times[key], level))
        times[key] += 1
        if len(times) == n:
            break
    return tuple(sorted(drawn, key=lambda one: one[0])[:n])


def sampling_seed(env: str, number: int, seed: int = 0) -> int:
    """Return the seed of all sampling in the episode of this number; it is the same under every setting."""
    return derive_seed(seed, "envs", env, number)


def env_error(env: str, problem: BaseException) -> UserError:
    """Return the error for an environment that raised something else than a ValueError."""
    return UserError(
        f"suites.envs.envs: {env} raised {one_line(problem)}. `posttrain env check {env}` says what is wrong with it."
    )


def env_section(cfg: EvaluateRun, title: str) -> EnvSection:
    assert cfg.suites.envs is not None
    return next(env for env in cfg.suites.envs.envs if env.title == title)


def math_items(cfg: EvaluateRun) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return (source, part, items) of every part; embedded has two: new questions, and operands never seen together."""
    from posttrain.data import GSM8K_HELD_OUT, embedded, evaluation_rows, final

    suite = cfg.suites.math
    assert suite is not None
    parts: list[tuple[str, str, list[dict[str, Any]]]] = []
    stems = [Path(source).stem for source in suite.sources]
    for source in suite.sources:
        if source == "embedded":
            splits = ("unseen_questions", "unseen_operands")
            parts += [(source, split, embedded.math_problems(most_items(suite), cfg.seed, split)) for split in splits]
        elif source == "gsm8k":
            rows = hub_rows(source, "math.sources")
            parts.append((source, source, [row | {"answer": final(row["answer"])} for row in rows]))
        elif source.partition("=")[0] == GSM8K_HELD_OUT:
            parts.append((GSM8K_HELD_OUT, GSM8K_HELD_OUT, gsm8k_held_out(source, most_items(suite))))
        elif source == "math500":
            rows = hub_rows(source, "math.sources")
            parts.append((source, source, [row | {"question": row["problem"]} for row in rows]))
        else:
            rows = evaluation_rows(source, "questions", "suites.math.sources", most_items(suite))
            stem = Path(source).stem
            unique = stems.count(stem) == 1 and stem not in ("unseen_questions", "unseen_operands")
            name = stem if unique else source
            parts.append((name, name, rows))
    return [
        (source, part, [_as_prompt(row, suite.instruction) for row in rows[: most_items(suite)]])
        for source, part, rows in parts
    ]


def gsm8k_held_out(source: str, most: int) -> list[dict[str, Any]]:
    """Return the held-out questions of GSM8K's training split, from the Hub or from the file that `source` names."""
    from posttrain.data import evaluation_rows, final, is_held_out

    name, from_file, file = source.partition("=")
    rows = evaluation_rows(file, "questions", "suites.math.sources") if from_file else hub_rows(name, "math.sources")
    problems = [
        {"question": row["question"], "answer": final(row["answer"])} for row in rows if is_held_out(row["question"])
    ]
    if not problems or any(row["answer"] is None for row in problems):
        raise UserError(
            f"suites.math.sources: {file or name} has no held-out row of GSM8K with a number after ####. Name a file"
            " of the whole training split of openai/gsm8k, with its columns question and answer."
        )
    return problems[:most]


def _as_prompt(row: dict[str, Any], instruction: str) -> dict[str, Any]:
    content = f"{row['question']} {instruction}".strip()
    return {"messages": [{"role": "user", "content": content}], "answer": str(row["answer"])}


def hub_rows(source: str, key: str) -> list[dict[str, Any]]:
    """Return the rows of a held-out split on the Hub; `key` is the key of the config that names it.

    Raises:
        UserError: the data set is neither cached nor within reach.
    """
    from posttrain.data import reading

    hub = reading.HELD_OUT[source]
    try:
        return list(reading.load_hub(hub))
    except reading.HUB_ERRORS as error:
        raise UserError(
            f"The test set {hub.path} cannot be loaded ({one_line(error)}). Connect and start again (it is then"
            f" cached); or name a local file ({DATA_FILES_IN_WORDS}), or `embedded`, in suites.{key}."
        ) from error


def hub_sets(suites: SuitesSection | TrainingSuites) -> list[str]:
    """Return the data sets on the Hub that the suites use."""
    from posttrain.data import HELD_OUT

    sources = list(suites.math.sources) if suites.math else []
    sources += [suite.source for suite in (suites.preferences, suites.instructions) if suite]
    return [HELD_OUT[source].path for source in sources if source in HELD_OUT]
