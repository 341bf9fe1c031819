"""Where is a run of phase 3, and from which checkpoint does it go on?  Its state, saved beside the weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from posttrain import files
from posttrain.config import StarPORun, TrainingEnvSection
from posttrain.models import Chat
from posttrain.runtime import checkpoint, parallel, runlog, whole_state
from posttrain.starpo.learner import Learner
from posttrain.types import UserError

FILE = "state.json"
# by environment, the reward of each level's episode; None where it crashed
LevelRewards = Mapping[str, Sequence[float | None]]
REMEDY = "Remove this checkpoint: --resume then takes an older one."


class AlarmState(TypedDict, total=False):
    """What `monitoring.alarms` remembers; it begins empty."""

    on: list[str]  # the alarms that have been raised and whose signals have not recovered
    memory: dict[str, dict[str, Any]]  # of each rule, by its name: a rule alone knows what it keeps


class ScopeState(TypedDict):
    """What `monitoring.collapse` remembers of the thoughts of one scope: first turns, or whole episodes."""

    pairs: int  # thoughts, and at most as many prompts, of its first sample: later ones are as large
    tokens: int  # that all its samples so far have sent through the model
    first: list[float]  # conditional entropy and mutual information when they were first measured
    scale: float  # a running mean of the std of the thoughts' log-probs under all prompts
    regime: str | None


@dataclass
class RunState:
    """All that a run must remember beside weights and optimizer; `state.json` has the same keys.

    RunState(step=40, tokens=812345, plan={"rollout.slots": 256, ...}, best_step=20, best_success=0.61,
             best_won={"frozen_lake": [True, False, ...]}, best_earned={"frozen_lake": [1.0, 0.0, ...]})

    With `distillation.reward: false`, `best_success`, `best_won` and `best_earned` are of the highest success so far,
    and the policy of `best_step` is not worse.
    """

    step: int = 0  # the last one that was played and learned from
    tokens: int = 0  # sampled in all steps
    work: int = 0  # tokens that rollouts and updates have sent through the model, as `monitoring.collapse` counts them
    empty_steps: int = 0  # steps in a row in which no group passed the filter
    crashed_steps: dict[str, int] = field(default_factory=dict[str, int])  # by environment: all its episodes crashed
    best_step: int = 0
    best_success: float = -1.0
    best_won: dict[str, list[bool]] = field(default_factory=dict[str, list[bool]])  # by environment: validation levels
    best_earned: LevelRewards = field(default_factory=dict[str, list[float | None]])  # on them, without penalties
    joined: list[str] = field(default_factory=list[str])  # environments of the curriculum that are played by now
    levels: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])  # see `level_choice`
    first_answers: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # by suite of former phases
    suite_times: dict[str, float] = field(default_factory=dict[str, float])  # see `runtime.TimeBudget`
    best_measured: bool = False  # whether the suites were measured for `best_step`
    plan: dict[str, int] = field(default_factory=dict[str, int])  # by dotted path: what the memory plan chose
    alarms: AlarmState = field(default_factory=AlarmState)
    collapse: dict[str, ScopeState] = field(default_factory=dict[str, ScopeState])  # by scope
    stopped_early: bool = False
    unfinished_reported: bool = False  # that in some groups no episode ended by itself

    def join(self, envs: Sequence[TrainingEnvSection], won: Mapping[str, Sequence[bool]]) -> list[str]:
        """Add the environments that join the curriculum after this evaluation; return them. won: as `best_won`."""
        playing = [env.title for env in envs if env.after is None or env.title in self.joined]
        new = [
            env.title
            for env in envs
            if env.title not in playing and env.after in playing and fmean(won[env.after]) >= env.after_success
        ]
        self.joined += new
        return new

    def forget_best(self) -> None:
        """Let the policy of this step stand in for a best that is damaged: any evaluation is better."""
        self.best_step, self.best_success, self.best_won, self.best_earned = self.step, -1.0, {}, {}
        self.best_measured = False


def changed(cfg: StarPORun, changes: Mapping[str, object]) -> StarPORun:
    """Return the run's config with these dotted paths changed."""
    sections = cfg.model_dump()
    for path, value in changes.items():
        *parents, key = path.split(".")
        inner = sections
        for section in parents:
            inner = inner[section]
        inner[key] = value
    return type(cfg).model_validate(sections)


def save(folder: Path, learner: Learner, chat: Chat, state: RunState) -> None:
    """Save a checkpoint that a run resumes from bit by bit, and that transformers (or peft) can load as it is."""

    optimizer = whole_state(learner.optimizer)

    def write(out: Path) -> None:
        models.model.save_pretrained(out, **({"selected_adapters": ["default"]} if learner.adapted else {}))
        chat.save(out)
        torch.save(optimizer, out / "optimizer.pt")
        if models.critic:
            models.critic.save(out)
        (out / FILE).write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")

    with learner.whole(critic=True) as models:
        if runlog.is_main_process():
            checkpoint.save(folder, write, chat_template_sha256=chat.hash, phase=3, step=state.step)
    parallel.barrier()


def load(folder: Path, learner: Learner) -> RunState:
    """Put a checkpoint's weights, critic and optimizer in place and return where the run was."""
    checkpoint.verify(folder)
    with learner.whole(critic=True, write=True) as models:
        if learner.adapted:  # read into the CPU's memory: the device need not hold all of it twice
            from peft import set_peft_model_state_dict  # pyright: ignore[reportUnknownVariableType]

            set_peft_model_state_dict(models.model, load_file(folder / "adapter_model.safetensors"))
        else:
            shards = [load_file(file) for file in checkpoint.weight_files(folder)]
            weights = {key: value for shard in shards for key, value in shard.items()}
            missing = models.model.load_state_dict(weights, strict=False)
            assert not missing.unexpected_keys, missing.unexpected_keys
        if models.critic:
            models.critic.load(folder)
    state = read(folder)
    learner.load_optimizer(folder)
    return state


def read(folder: Path) -> RunState:
    """Return where the run was when it wrote this checkpoint."""
    saved = files.read_json(folder / FILE, REMEDY)
    fields = {each.name for each in dataclasses.fields(RunState)}
    if saved.keys() != fields:
        raise UserError(
            f"{folder / FILE} was written by another version of this program: it has other keys"
            f" ({', '.join(sorted(saved.keys() ^ fields))}). Go on with that version, or start anew in another"
            " output_dir."
        )
    return RunState(**saved)


def resume_from(out: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest whole checkpoint whose best policy is whole as well: from there the run repeats itself exactly.

    Where no checkpoint has its best, the newest whole one, which then begins to look for a best anew.
    """

    def best_is_whole(folder: Path) -> None:
        checkpoint.verify(out / f"best-{read(folder).best_step}")

    whole = checkpoint.latest_good(out, say=say, also=best_is_whole)
    return whole or checkpoint.latest_good(out, say=lambda _: None)


def drop_later(out: Path, step: int) -> None:
    """Remove checkpoints and bests behind the step that a run resumes from, which would be taken for newer."""
    if runlog.is_main_process():
        for number, folder in checkpoint.numbered(out) + checkpoint.numbered(out, "best"):
            if number > step:
                remove(folder)


def drop_old(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the bests that they know."""
    if runlog.is_main_process():
        folders = checkpoint.numbered(out)
        known = [best for best in checkpoint.numbered(out, "best") if best[0] <= folders[-keep:][0][0]]
        for _, folder in folders[:-keep] + known[:-1]:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder and all that is in it; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
