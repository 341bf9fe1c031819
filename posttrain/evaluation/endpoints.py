"""How does an endpoint take part in an evaluation?  What it is not asked, where replies are kept, their cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import EvaluateRun
from posttrain.evaluation.tasks import Task
from posttrain.types import Record

if TYPE_CHECKING:
    from posttrain.models import Chat


def left_out(cfg: EvaluateRun, task: Task) -> str:
    """Return why an endpoint is not asked this task, in a sentence; empty where it is asked."""
    if task.suite == "preferences":
        return "Preferences compare log-probs of given answers, which an endpoint does not tell."
    if task.suite == "repetition" and not cfg.local:
        return "Repetition is counted in tokens of the first local checkpoint, and all of these are endpoints."
    return ""


def counting_chat(cfg: EvaluateRun) -> Chat | None:
    """Return the chat of the first local checkpoint, in whose tokens contexts are cut and repetition is counted."""
    from posttrain import models
    from posttrain.config import ModelSection

    place = next(iter(cfg.local.values()), None)
    return place and models.load_chat(ModelSection(name_or_path=place), cfg.chat.template)  # type: ignore[return-value]


def replies_file(cfg: EvaluateRun, name: str, task: Task) -> Path:
    """Return where the replies to a task are kept until the evaluation has ended, also where other items fail.

    The file's name says who was asked what, so that a checkpoint may get another name.
    """
    facts = [task.suite, task.source, task.part, task.setting]
    return _folder(cfg) / f"replies-{_who(cfg, name)}-{_digest(facts)}.jsonl"


def _folder(cfg: EvaluateRun) -> Path:
    from posttrain.evaluation.store import ROWS

    return Path(cfg.output_dir) / ROWS


def _who(cfg: EvaluateRun, name: str) -> str:
    """Return a digest of server and model; an endpoint that is listed under two names is asked twice."""
    asked = [(one.endpoint, one.model) for one in cfg.endpoints.values()]
    place = list(cfg.endpoints).index(name)
    return _digest([*asked[place], asked[:place].count(asked[place])])


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def endpoint_costs(cfg: EvaluateRun, tasks: Sequence[Task]) -> dict[str, Record]:
    """Return for each endpoint what was paid for, in processes that were cut short too, and what was left out."""
    from posttrain.evaluation.endpoint import spent

    found: dict[str, Record] = {}
    for name, endpoint in cfg.endpoints.items():
        paid = [spent(file) for file in sorted(_folder(cfg).glob(f"replies-{_who(cfg, name)}-*.jsonl"))]
        replies, prompt, answers, unknown = (sum(column) for column in zip(*paid, strict=True)) if paid else (0,) * 4
        one: Record = {"replies": replies, "prompt_tokens": prompt, "completion_tokens": answers, "cost": None}
        one["replies_without_tokens"] = unknown
        one["fields_left_out"] = endpoint.leave_out
        if endpoint.price_input is not None and endpoint.price_output is not None:
            one["cost"] = (prompt * endpoint.price_input + answers * endpoint.price_output) / 1e6
        found[name] = one | {"left_out": {task.suite: words for task in tasks if (words := left_out(cfg, task))}}
    return found


def costs_in_words(paid: Record) -> str:
    """Say: 412 replies, 120,000 tokens of prompts and 31,000 of answers, which cost 0.53. Preferences compare ..."""
    words = f"{paid['replies']:,} replies, {paid['prompt_tokens']:,} tokens of prompts and "
    words += f"{paid['completion_tokens']:,} of answers"
    words += "." if paid["cost"] is None else f", which cost {paid['cost']:.4g}."
    if unknown := paid["replies_without_tokens"]:
        words += f" Of {unknown:,} the server did not tell the tokens: it is more than that."
    if fields := paid["fields_left_out"]:
        words += f" Its requests had no {', '.join(fields)}: the server's own values hold."
    return " ".join([words, *dict.fromkeys(paid["left_out"].values())])
