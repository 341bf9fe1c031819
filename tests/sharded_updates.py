"""What do five updates of phase 3 do in these processes?  `sharded_updates.py OUT SETTINGS` (test_sharding.py).

SETTINGS is JSON: `algorithm`, `trainer`, `tuning` and `distillation` as in a config; `groups` and `members` of the
episodes, which are the same in every process; `tied`: one weight for embedding and output layer; `teacher`: whether
another model teaches. OUT is given the gradients of each step, the weights at the end, and a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import updates
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from posttrain.config.starpo import StarPORun
from posttrain.runtime import parallel, sharding
from posttrain.runtime.sharding import whole_state, whole_weights
from posttrain.starpo import run, run_state
from posttrain.starpo.distillation import Answered, Distillation
from posttrain.starpo.learner import Learner

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("rollout", "starpo"))
import test_learner
import test_teacher

STEPS = 5


def main(out: Path, asked: dict[str, Any]) -> None:
    device = torch.device("cpu")
    parallel.join(device)
    section = test_learner.config(tuning=asked.get("tuning", "full"), **asked["algorithm"]).model_dump()
    section["trainer"] |= {"learning_rate": 1e-3, "max_grad_norm": 1.0, "bf16": False} | asked.get("trainer", {})
    if asked.get("distillation"):
        section["distillation"] = {"sources": [{"kind": "capybara", "path": "embedded"}], "batch_size": 5}
    if asked.get("teacher"):
        section["distillation"] = {"teacher": "unused", "teacher_coef": 0.5}
    cfg = StarPORun.model_validate(section)
    model = test_learner.policy()
    if asked.get("tied"):
        config = model.config
        config.tie_word_embeddings = True
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    groups = test_learner.played(model, asked["groups"], asked["members"])
    run.load_teacher = lambda cfg: test_teacher.teacher().float() if cfg.teacher else None  # type: ignore[assignment]
    learner = run.make_learner(cfg, model, None)  # type: ignore[arg-type]
    for group in learner.optimizer.param_groups:
        group["eps"] = 1e-4  # or Adam makes steps of what is rounding, where a gradient is next to nothing
    gradients = kept_gradients(learner)
    distillation = None
    if cfg.remembers:
        rows = [Answered([1, 2, 3], list(range(4, 5 + n % 7)), n >= 8) for n in range(11)]
        distillation = Distillation(learner, rows)
    figures = []
    for step in range(1, STEPS + 1):
        figures.append(updates.learn(cfg, learner, groups, step, distillation=distillation))
        if distillation is not None:
            figures[-1]["held_out"] = distillation.measure()
    parts = {"model": whole_weights(learner.model)}
    if learner.critic is not None:
        parts["critic"] = whole_weights(learner.critic)
    state = whole_state(learner.optimizer)
    with learner.whole() as whole:
        played = {name: each.detach().clone() for name, each in whole.model.named_parameters()}
    held = [(sharding.held(each).numel(), each.numel()) for group in learner.trainable for each in group]
    share = sum(own for own, _ in held) / sum(all_of_it for _, all_of_it in held)
    resumed = checkpoint_round_trip(cfg, learner, out.with_suffix(""))
    if parallel.rank() == 0:
        found = {"gradients": gradients, "weights": parts, "figures": figures, "optimizer": state, "played": played}
        torch.save(found | {"share": share, "resumed": resumed}, out)
    parallel.barrier()
    parallel.stop()


def kept_gradients(learner: Learner) -> list[list[torch.Tensor]]:
    """Is given the whole gradients of each step, clipped, before the optimizer sees them."""
    kept: list[list[torch.Tensor]] = []
    step = learner.optimizer.step

    def keep(*rest: Any) -> Any:
        own = [p.grad for group in learner.trainable for p in group if p.grad is not None]
        kept.append([each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in own])
        return step(*rest)

    learner.optimizer.step = keep  # type: ignore[method-assign]
    return kept


def checkpoint_round_trip(cfg: StarPORun, learner: Learner, folder: Path) -> bool:
    """Whether what is changed after a checkpoint is as before when the checkpoint is loaded."""

    class Nothing:
        hash = "0"

        def save(self, out: Path) -> None: ...

    before = whole_weights(learner.model)
    moments = whole_state(learner.optimizer)["state"]
    run_state.save(folder, learner, Nothing(), run_state.RunState(step=3))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert run_state.load(folder, learner).step == 3
    after, again = whole_weights(learner.model), whole_state(learner.optimizer)["state"]
    same = all(torch.equal(before[name], after[name]) for name in before)
    return same and all(
        torch.equal(moments[n][key], again[n][key])
        for n in moments
        for key in moments[n]
        if isinstance(moments[n][key], torch.Tensor)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
