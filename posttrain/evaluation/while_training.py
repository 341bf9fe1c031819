"""What can a model do while it is trained, and what does it forget?  `evaluation.suites` of all three phases.

Tasks and scores are those of evaluate_model.py; the answers come from the run's own sampler.
"""

from __future__ import annotations

from typing import Any

from envs.math_judge import MathJudge
from posttrain.config import EvaluateRun, StarPORun, TrainingRun
from posttrain.evaluation.figures import summarise
from posttrain.evaluation.scoring import ScoresNotFinite, counted_tokens, score_answers, score_pairs
from posttrain.evaluation.tasks import Task, build_tasks
from posttrain.metrics import paired_difference
from posttrain.models import Chat, model_files
from posttrain.rollout import Sampler, complete
from posttrain.runtime import parallel
from posttrain.types import Record, UserError

SETTINGS = {"math": "greedy", "recall": "greedy", "repetition": "sampled", "instructions": "greedy"}
MEASURED = {  # figures of a suite besides those of every suite, n, low and high
    "repetition": ("seq_rep_4",),
    "instructions": ("accuracy", "instruction_accuracy", "left_out"),
}


class TrainingTasks:
    """The tasks of `evaluation.suites`, the same at each evaluation.

    longest, new: tokens of the longest prompt with its answer, and of the longest answer. at_once: answers that are
    written at the same time; phases 1 and 2 choose it by the free memory.

    Raises:
        UserError: a prompt leaves no room for its answer in `rollout.max_context`, or among the model's positions.
    """

    def __init__(self, cfg: TrainingRun, chat: Chat) -> None:
        self.chat, self.config = chat, as_evaluation(cfg)
        self.at_once = cfg.rollout.conversations if isinstance(cfg, StarPORun) else 1
        self.tasks = build_tasks(self.config)
        self.longest = self.new = 1
        name, most, remedy = _context(cfg) if self.tasks else ("", 0, "")
        for task in self.tasks:
            if task.params is not None:
                new = task.params.max_new_tokens
                longest = max(len(chat.prompt(item["messages"])) for item in task.items)
                self.longest, self.new = max(self.longest, longest + new), max(self.new, new)
                if most is not None and longest + new > most:
                    raise UserError(
                        f"evaluation.suites.{task.suite} has a prompt of {longest} tokens, which leaves no room for"
                        f" max_new_tokens={new} in {name}={most}: lower max_new_tokens{remedy}."
                    )

    def measure(self, sampler: Sampler, policy: Any, first: dict[str, list[float]]) -> dict[str, float]:
        """Return figures with 95 % intervals over the items of all processes. A collective call.

        {"evaluation/recall/accuracy": 0.73, "evaluation/recall/low": 0.65, "evaluation/recall/high": 0.80,
        "evaluation/recall/n": 64, "evaluation/math/gsm8k/accuracy": ..., "evaluation/repetition/seq_rep_4": ..., ...}
        A suite whose log-probs are not finite is left out.

        Args:
            first: by suite, which items were right at the first evaluation, which fills it in. Later evaluations
                return the `change` of the accuracy since then, item by item, and its standard error.
        """
        rows: list[Record] = []
        with MathJudge() as judge:
            for task in self.tasks:
                mine = task.only(parallel.mine(len(task.items)))
                try:
                    own = self._rows(mine, sampler, policy, judge)
                except ScoresNotFinite:  # the evaluation on levels reports it
                    own = []
                whole = parallel.gather(own)
                if len(whole) == len(task.items):
                    rows += task.described("policy", whole)
        summary = summarise(self.config, rows, {})
        figures = {f"math/{source}": shares for source, shares in summary.pop("math", {}).items()} | summary
        measured = {
            f"evaluation/{suite}/{key}": shares[key]
            for suite, shares in figures.items()
            for key in (*MEASURED.get(suite, ("accuracy",)), "n", "low", "high")
        }
        for suite in figures:
            if suite == "repetition":
                continue
            right = [float(row["accuracy"]) for row in rows if suite in (f"math/{row['source']}", row["suite"])]
            if (before := first.setdefault(suite, right)) is not right:
                change, error = paired_difference({suite: before}, {suite: right})
                measured |= {f"evaluation/{suite}/change": change, f"evaluation/{suite}/change_error": error}
        return measured

    def _rows(self, task: Task, sampler: Sampler, policy: Any, judge: MathJudge) -> list[Record]:
        if task.params is None:
            return score_pairs(policy, self.chat, task, lambda _: None)
        completions = complete(
            sampler,
            [self.chat.prompt(item["messages"]) for item in task.items],
            task.params,
            task.seeds,
            batch=self.at_once,
        )
        return score_answers(task, completions, self.chat, judge, counted_tokens(self.config))


def _context(cfg: TrainingRun) -> tuple[str, int | None, str]:
    """Return the name of the longest context, its tokens (None: unknown), and what else than shorter answers helps."""
    if isinstance(cfg, StarPORun):
        return "rollout.max_context", cfg.rollout.max_context, " or raise rollout.max_context"
    positions = getattr(model_files.load_config(cfg.model).get_text_config(), "max_position_embeddings", None)
    return "the model's max_position_embeddings", positions if isinstance(positions, int) else None, ""


def as_evaluation(cfg: TrainingRun) -> EvaluateRun:
    """Return a config of the evaluator with the suites of `evaluation.suites`."""
    former = cfg.evaluation.suites.model_dump(exclude_none=True)
    suites = {
        suite: keys | ({"settings": [SETTINGS[suite]]} if suite in SETTINGS else {}) for suite, keys in former.items()
    }
    return EvaluateRun.model_validate(
        {
            "output_dir": cfg.output_dir,
            "seed": cfg.seed,
            "checkpoints": {"policy": cfg.model.name_or_path},
            "settings": [{"name": "greedy", "temperature": 0.0}, {"name": "sampled", "temperature": 1.0}],
            "suites": suites,
        }
    )
