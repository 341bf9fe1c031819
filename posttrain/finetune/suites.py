"""How are suites measured while a trainer of TRL trains?  `evaluation.suites` of phases 1 and 2; training is unchanged.

The tasks and their scores are `posttrain.evaluation.TrainingTasks`, which phase 3 has as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerCallback

from posttrain.config import TrainingRun
from posttrain.models import Chat
from posttrain.plan import rows_at_once
from posttrain.rollout import Sampler, open_sampler
from posttrain.runtime import TimeBudget, launcher, parallel
from posttrain.types import UserError

MOST_ANSWERS = 256  # that are written at the same time
Report = Callable[[dict[str, float], int], None]
Say = Callable[[str], None]


class SuiteTasks(Protocol):
    """What is measured; see `posttrain.evaluation.TrainingTasks`."""

    chat: Chat
    tasks: list[Any]
    longest: int
    new: int
    at_once: int

    def measure(self, sampler: Sampler, policy: Any, first: dict[str, list[float]]) -> dict[str, float]: ...


def why_not_measured(cfg: TrainingRun) -> str:
    """Return why this run cannot measure its suites, and what to do instead; empty where it can, or has none."""
    if (kind := launcher.sharding()) == "none" or not cfg.evaluation.suites.model_dump(exclude_none=True):
        return ""
    return (
        f"evaluation.suites is not measured: the launcher shards the model ({kind}), and phases 1 and 2 write answers"
        " only with a model that is whole in every process. The run trains as it would without suites. Measure its"
        " checkpoints with evaluate_model.py, or start a copy on each GPU"
        f" ({launcher.FILES}/multi_gpu.yaml)."
    )


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Compute inside without an effect on training: random states, modes of modules and settings of torch stay."""
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    settings: Any = torch.utils.deterministic
    on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)  # sampling has operations without a deterministic form
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, training in modes:
            module.training = training
        torch.use_deterministic_algorithms(on, warn_only=warns)
        settings.fill_uninitialized_memory = filled


class SuiteCallback(TrainerCallback):
    """The callback that measures the suites before the first step, every so many steps, and after the last one.

    The figures of a step are reported before its checkpoint is written, which keeps `kept()`.
    """

    def __init__(self, tasks: SuiteTasks, cfg: TrainingRun, kept: dict[str, Any], report: Report, say: Say) -> None:
        """Prepare to measure.

        Args:
            kept: what `kept()` returned when the checkpoint was written that the run goes on from; {} for a new run.
            report: takes the figures of a step.
            say: prints a line.
        """
        self.tasks, self.cfg, self.report, self.say = tasks, cfg, report, say
        self.times: dict[str, float] = dict(kept.get("times", {}))
        self.first: dict[str, list[float]] = dict(kept.get("first", {}))
        self.what = f"the suites ({', '.join(cfg.evaluation.suites.model_dump(exclude_none=True))})"
        self.sampler: Sampler | None = None
        self.budget: TimeBudget | None = None

    def kept(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep: the seconds so far, and which items were right at first."""
        if self.budget is not None:
            self.budget.count()
        return {"times": self.times, "first": self.first}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        section = self.cfg.evaluation
        self.budget = TimeBudget(section.budget, section.every, state.max_steps, self.times, self.say)
        if state.global_step == 0:
            self._measure(args, state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert self.budget is not None
        last = state.global_step >= state.max_steps
        if self.budget.due(state.global_step, self.what, args.device, always=last):
            self._measure(args, state, model)

    def _measure(self, args: Any, state: Any, model: Any) -> None:
        assert self.budget is not None
        policy = model.get_base_model() if hasattr(model, "peft_config") else model
        dtype = torch.float16 if args.fp16 else torch.bfloat16
        autocast = torch.autocast(args.device.type, dtype=dtype, enabled=bool(args.bf16 or args.fp16))
        with self.budget.measuring(), unchanged(model), autocast:
            problem = self._prepare(policy)
            if parallel.total(float(bool(problem)), args.device) > 0:  # the memory of one process may be full
                self.say(
                    f"step {state.global_step}: {self.what} are not measured. {problem or 'A process lacks memory.'}"
                )
                return
            assert self.sampler is not None
            figures = self.tasks.measure(self.sampler, policy, self.first)
        self.report(figures | {"seconds/evaluation": self.times["cost"]}, state.global_step)

    def _prepare(self, policy: PreTrainedModel) -> str:
        """Open the sampler, and choose how many answers are written at a time; return why not even one fits."""
        if self.sampler is None:  # without CUDA graphs, whose memory training needs
            self.sampler = open_sampler(policy, self.tasks.chat, max_context=self.tasks.longest, graphs=False)
        try:
            count, _ = rows_at_once(
                policy, self.cfg.model, self.tasks.longest, self.tasks.new, MOST_ANSWERS, processes=parallel.size()
            )
        except UserError as problem:
            return str(problem)
        self.tasks.at_once = count
        return ""
