"""Can the policy of phase 3 still do what phases 1 and 2 taught it?  `evaluation.suites`, measured during training.

Tasks and scores are those of evaluate_model.py; the answers come from the run's own sampler.
"""

from __future__ import annotations

from typing import Any

from envs.math_judge import MathJudge
from posttrain.config import EvaluateRun, StarPORun
from posttrain.evaluation.figures import summarise
from posttrain.evaluation.scoring import ScoresNotFinite, counted_tokens, score_answers, score_pairs
from posttrain.evaluation.tasks import Task, build_tasks
from posttrain.metrics import paired_difference
from posttrain.models import Chat
from posttrain.rollout import Sampler, complete
from posttrain.runtime import parallel
from posttrain.types import Record, UserError

SETTINGS = {"math": "greedy", "recall": "greedy", "repetition": "sampled"}


class FormerTasks:
    """The tasks of `evaluation.suites`, the same at each evaluation.

    Raises:
        UserError: a prompt leaves no room for its answer in `rollout.max_context`.
    """

    def __init__(self, cfg: StarPORun, chat: Chat) -> None:
        self.cfg, self.chat, self.config = cfg, chat, as_evaluation(cfg)
        self.tasks = build_tasks(self.config)
        for task in self.tasks:
            if task.params is not None:
                longest = max(len(chat.prompt(item["messages"])) for item in task.items)
                if longest + task.params.max_new_tokens > cfg.rollout.max_context:
                    raise UserError(
                        f"evaluation.suites.{task.suite} has a prompt of {longest} tokens, which leaves no room for"
                        f" max_new_tokens={task.params.max_new_tokens} in rollout.max_context="
                        f"{cfg.rollout.max_context}: lower max_new_tokens or raise rollout.max_context."
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
            for key in ("seq_rep_4" if suite == "repetition" else "accuracy", "n", "low", "high")
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
            batch=self.cfg.rollout.conversations,
        )
        return score_answers(task, completions, self.chat, judge, counted_tokens(self.config))


def as_evaluation(cfg: StarPORun) -> EvaluateRun:
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
