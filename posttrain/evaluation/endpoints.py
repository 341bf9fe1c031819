"""How does an endpoint take part in an evaluation?  Which tasks it gets, where replies are kept, what they cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import EvaluateRun
from posttrain.evaluation.store import ROWS
from posttrain.evaluation.tasks import Task
from posttrain.types import Record

if TYPE_CHECKING:
    from posttrain.models import Chat


def why_left_out(cfg: EvaluateRun, task: Task) -> str:
    """Return why an endpoint does not get this task, in a sentence; an empty string where it does."""
    if task.suite == "preferences":
        return "Preferences compare log-probs of given answers, which an endpoint does not return."
    if task.suite == "repetition" and not cfg.local:
        return "Repetition is counted in tokens of the first local checkpoint, and all checkpoints are endpoints."
    return ""


def counting_chat(cfg: EvaluateRun) -> Chat | None:
    """Return the chat of the first local checkpoint, whose tokenizer limits contexts and counts repetition."""
    from posttrain import models
    from posttrain.config import ModelSection

    place = next(iter(cfg.local.values()), None)
    return place and models.load_chat(ModelSection(name_or_path=place), cfg.chat.template)  # type: ignore[return-value]


def replies_file(cfg: EvaluateRun, name: str, task: Task) -> Path:
    """Return the file that keeps the replies to a task until the evaluation has ended, also after a failure.

    Its name depends on server, model and task and not on the checkpoint's name, which may change.
    """
    facts = [task.suite, task.source, task.part, task.setting]
    return Path(cfg.output_dir) / ROWS / f"replies-{_who(cfg, name)}-{_digest(facts)}.jsonl"


def _who(cfg: EvaluateRun, name: str) -> str:
    """Return a digest of server and model; an endpoint that is listed under two names has two digests."""
    models = [(one.endpoint, one.model) for one in cfg.endpoints.values()]
    place = list(cfg.endpoints).index(name)
    return _digest([*models[place], models[:place].count(models[place])])


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def endpoint_costs(cfg: EvaluateRun, tasks: Sequence[Task]) -> dict[str, Record]:
    """Return for each endpoint what was paid for, in interrupted processes as well, and the tasks it did not get.

    {"gpt": {"replies": 412, "prompt_tokens": 120000, "completion_tokens": 31000, "cost": 0.53,
     "replies_without_tokens": 0, "fields_left_out": [], "left_out": {"preferences": "Preferences compare ..."}}}
    """
    from posttrain.evaluation.endpoint import spent

    costs: dict[str, Record] = {}
    kept = Path(cfg.output_dir) / ROWS
    for name, endpoint in cfg.endpoints.items():
        files = [spent(file) for file in sorted(kept.glob(f"replies-{_who(cfg, name)}-*.jsonl"))]
        replies, prompt, answers, unknown = (sum(column) for column in zip(*files, strict=True)) if files else (0,) * 4
        one: Record = {"replies": replies, "prompt_tokens": prompt, "completion_tokens": answers, "cost": None}
        one["replies_without_tokens"] = unknown
        one["fields_left_out"] = endpoint.leave_out
        if endpoint.price_input is not None and endpoint.price_output is not None:
            one["cost"] = (prompt * endpoint.price_input + answers * endpoint.price_output) / 1e6
        costs[name] = one | {"left_out": {task.suite: words for task in tasks if (words := why_left_out(cfg, task))}}
    return costs


def costs_in_words(costs: Record) -> str:
    """Return e.g. "412 replies, 120,000 tokens of prompts and 31,000 of answers, which cost 0.53."

    costs: an entry of `endpoint_costs`.
    """
    words = f"{costs['replies']:,} replies, {costs['prompt_tokens']:,} tokens of prompts and "
    words += f"{costs['completion_tokens']:,} of answers"
    words += "." if costs["cost"] is None else f", which cost {costs['cost']:.4g}."
    if unknown := costs["replies_without_tokens"]:
        words += f" The server did not report the tokens of {unknown:,} replies, so the true figures are higher."
    if fields := costs["fields_left_out"]:
        words += f" Its requests were sent without {', '.join(fields)}: the server's own values apply."
    return " ".join([words, *dict.fromkeys(costs["left_out"].values())])
