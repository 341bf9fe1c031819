"""What stands around the loop of phase 3?  Checks and the memory plan before its first step, the export after it."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import set_seed

from envs.episode import Episode
from envs.in_time import error_text
from envs.process_state import keep_process_state
from envs.prompts import Prompts, TrainerState
from envs.sentences import escaped
from posttrain import models, plan
from posttrain.config import ChatRun, EnvSection, StarPORun, TrainingEnvSection, command, yaml_value
from posttrain.models import Chat, model_card
from posttrain.plan import check_run, head_agrees, without_noise
from posttrain.rollout import PROGRAM_CRASHED, Context, Sampler, most_turns, new_episode, open_env, play
from posttrain.runtime import checkpoint, hardware, launcher, parallel, run_identity, runlog, trl_arguments
from posttrain.starpo import distillation, run_state
from posttrain.starpo.functions import check_functions
from posttrain.starpo.learner import Learner
from posttrain.starpo.level_choice import level_seeds
from posttrain.starpo.monitoring.episodes import memory, reward_table
from posttrain.starpo.run_state import RunState, changed
from posttrain.types import SamplingParams, Trajectory, UserError, derive_seed, words_of


class Setup(NamedTuple):
    """A run whose config will not change any more."""

    cfg: StarPORun
    settings: dict[str, Any]  # the config as it was given, for the files of the run
    device: torch.device
    plan: plan.Plan
    resumes: bool
    resume_from: Path | None  # a checkpoint

    @property
    def out(self) -> Path:
        return Path(self.cfg.output_dir)

    def best(self, state: RunState) -> Path:
        return self.out / f"best-{state.best_step}"


def set_up(cfg: StarPORun, *, resume: bool, data_sets: list[str]) -> Setup:
    """Check everything that can be known to go wrong, claim the folder, plan the memory; the config is then final.

    data_sets: those that the run will ask the Hub for.
    """
    settled = hardware.settle(cfg)
    settings, out = settled.model_dump(mode="json"), Path(settled.output_dir)
    if runlog.is_main_process():
        check_environments(settled)
        check_functions(settled)
        runlog.say(reward_table(settled, environments_of_groups(settled.envs, settled.rollout.groups, 1)))
        check_run(settled, resume=resume, kept=out / distillation.FOLDER, data_sets=data_sets)
        if resume:
            run_identity.same_run(out, settings)
        checkpoint.claim(out, resume)
        run_identity.remember_run(out, settings, resume)
    device = hardware.resolve_device(settled.device)
    parallel.join(device, settled.trainer.ddp_timeout)
    set_seed(settled.seed)  # for new adapters; whatever is drawn later has a seed of its own

    resume_from = run_state.resume_from(out, runlog.say) if resume else None
    # What a checkpoint's plan chose is chosen again, so that a resumed run rounds as before.
    chosen = changed(settled, run_state.read(resume_from).plan) if resume_from else settled
    planned = plan.make_plan(chosen, device)
    for words in (planned.table(), *planned.warnings):
        runlog.say(words)
    return Setup(changed(chosen, planned.changes), settings, device, planned, resume, resume_from)


def make_learner(cfg: StarPORun, model: Any, chat: Chat) -> Learner:
    """Return the learner of a model, with the adapter, the memory savings and the reference that the config names.

    Raises:
        UserError: the model cannot be trained in this way.
    """
    without_noise(model)  # the ratio must start at 1, and a resumed run has no random state to restore
    if cfg.model.tuning != "full" and cfg.model.lora.dropout > 0:
        raise UserError("model.lora.dropout must be 0 in phase 3: sampler and learner have to be the same policy.")
    reference = None  # and what `distillation.sources` keeps the policy near; an adapter is switched off instead
    if (cfg.algorithm.beta > 0 or cfg.remembers) and cfg.model.tuning == "full":
        reference = copy.deepcopy(model).requires_grad_(False).eval()
    if (adapter := models.peft_config(cfg.model, model, chat)) is not None:
        from peft import get_peft_model

        with trl_arguments.refusals_in_words():
            model = get_peft_model(model, adapter)
        models.adapters_in_float32(model)
    if cfg.trainer.gradient_checkpointing:
        with trl_arguments.refusals_in_words():
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if cfg.model.tuning != "full":
            model.enable_input_require_grads()
    return Learner(cfg, model, reference, load_teacher(cfg))


def load_teacher(cfg: StarPORun) -> Any:
    """Return the model of `distillation.teacher`, frozen; None without one. `check_run` has compared its tokenizer."""
    if cfg.teacher is None:
        return None
    section = cfg.teacher
    if launcher.sharding() == "fsdp2":  # weights that are sharded together have one precision
        section = section.model_copy(update={"dtype": cfg.model.dtype})
    with models.named_by("distillation.teacher"):
        teacher, _ = models.load(section, device=cfg.device, chat_template=cfg.chat.template)
    if not head_agrees(teacher):
        raise UserError(
            f"distillation.teacher={section.name_or_path} does more to its logits than phase 3 knows: what it says of a"
            " token would be wrong. Choose a teacher of another architecture."
        )
    count, coef = sum(p.numel() for p in teacher.parameters()), cfg.distillation.teacher_coef if cfg.distillation else 0
    alone = "" if cfg.rewarded else "; rewards are measured alone, and every group is trained on"
    runlog.say(f"{section.name_or_path} teaches ({count / 1e6:.2f} M parameters, weight {coef:g}){alone}.")
    return teacher.requires_grad_(False).eval()


def environments_of_groups(
    environments: Sequence[TrainingEnvSection], groups: int, step: int, joined: Sequence[str] = ()
) -> list[TrainingEnvSection]:
    """Return which environment each group of a step plays: by weight, evenly over the steps.

    joined: those of the curriculum that are played by now; the others with `after` are left out.
    """
    environments = [env for env in environments if env.after is None or env.title in joined]
    total = sum(env.weight for env in environments)
    ahead = [0.0] * len(environments)
    chosen: list[TrainingEnvSection] = []
    for _ in range(step * groups):  # every place goes to the environment that is furthest behind its share
        ahead = [a + env.weight / total for a, env in zip(ahead, environments, strict=True)]
        most = ahead.index(max(ahead))
        ahead[most] -= 1.0
        chosen.append(environments[most])
    return chosen[len(chosen) - groups :]


def levels(
    cfg: StarPORun, step: int, state: RunState | None = None, groups: Sequence[int] | None = None
) -> tuple[list[Episode | Trajectory], list[int]]:
    """Return this process's episodes of a step, in their first state, and the seed of what is sampled in each.

    Args:
        state: knows the environments of the curriculum (`envs.after`) that are played by now, and former levels.
        groups: their numbers; None for the `rollout.groups` first ones. The environments of later ones are the same in
            turn.
    """
    state = state or RunState()
    envs_G = environments_of_groups(cfg.envs, cfg.rollout.groups, step, state.joined)
    numbers = range(len(envs_G)) if groups is None else groups
    played = [envs_G[group % len(envs_G)] for group in range(max(numbers, default=-1) + 1)]
    seeds_G = level_seeds(cfg, played, step, state.levels)
    episodes: list[Episode | Trajectory] = []
    seeds: list[int] = []
    for group in (numbers[place] for place in parallel.mine(len(numbers))):
        for sample in range(cfg.rollout.num_generations):
            noise_seed = derive_seed(cfg.seed, "noise", step, group, sample)
            episodes.append(new_episode(played[group], cfg.protocol, seeds_G[group], "train", noise_seed))
            seeds.append(derive_seed(cfg.seed, "sample", step, group, sample))
    for episode in episodes:
        if isinstance(episode, Episode) and isinstance(episode.env, Prompts):
            episode.env.trainer_state = TrainerState(step - 1, cfg.trainer.max_steps)
    return episodes, seeds


def longest_episode(cfg: StarPORun) -> int:
    """Return how many tokens an episode can sample at most."""
    return cfg.rollout.max_completion_length * most_turns(cfg.envs, cfg.protocol)


def check_environments(cfg: StarPORun) -> None:
    """Raise a UserError unless every environment is there, takes its options and has levels in every split."""
    for n, env in enumerate(cfg.envs):
        try:
            made = open_env(env)
            with keep_process_state(env.title):
                for split in ("train", "validation", "test"):
                    made.reset(seed=0, options={"split": split})
        except (Exception, SystemExit) as problem:  # an environment may raise anything
            words = escaped(error_text(problem))
            if not isinstance(problem, ValueError | TypeError):
                words = f"it raised {type(problem).__name__}: {words}. See {_check_of(env)}."
            raise UserError(f"envs.{n} ({env.title}): {words}") from problem


def _check_of(env: EnvSection) -> str:
    options = "".join(f" {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in env.options.items())
    return f"`posttrain env check {env.name}{options}`"


class Crashed(UserError):
    """An environment does nothing but crash, so there is nothing to learn from."""

    def __init__(self, env: EnvSection, where: str, last: str) -> None:
        what = "reward function" if env.name == "prompts" else "environment"
        if env.name == "prompts" and env.options.get("environment"):
            what = "environment or the reward function"
        remedy = f"Correct the {what}: {_check_of(env)} plays it and says what is wrong."
        if env.name == "prompts" and (env.tools or env.options.get("agent")):  # the check has neither
            remedy = f"Correct the {what}."
        if last.startswith(PROGRAM_CRASHED):
            remedy = "Correct the program: `posttrain serve` answers it as well, with its OPENAI_BASE_URL and a key."
        if "`protocol.parser:" in last:
            remedy = "Correct that function, which must not raise for any text."
        if "`protocol.system`" in last or "`protocol.feedback`" in last:
            remedy = "Correct that template."
        super().__init__(f"{env.title} has crashed in every episode {where}, the last time with {last}. {remedy}")


def refuse_crashes(cfg: StarPORun, state: RunState, groups: Sequence[Sequence[Trajectory]]) -> None:
    """Raise Crashed where an environment has done nothing else for `max_empty_steps` steps in a row.

    Counts this step in `state`. A resumed run counts anew. An episode without an action says nothing of its
    environment.
    """
    for env in cfg.envs:
        played = [t for group in groups for t in group if t.env == env.title and (t.crashed or t.actions)]
        if played:
            crashed = all(t.crashed for t in played)
            state.crashed_steps[env.title] = state.crashed_steps.get(env.title, 0) + 1 if crashed else 0
        if (steps := state.crashed_steps.get(env.title, 0)) >= cfg.algorithm.max_empty_steps:
            state.crashed_steps.clear()
            raise Crashed(env, f"of {steps} steps", f"{played[-1].crashed} (level seed {played[-1].level_seed})")


def refuse_crashed_evaluation(env: EnvSection, played: Sequence[Trajectory]) -> None:
    """Raise Crashed where no episode of an evaluation came to its end, which then measures nothing.

    played: the episodes of this process; all processes ask together. Those without an action say nothing of the
    environment, as long as they are less than half.
    """
    ends = parallel.gather([(t.crashed, bool(t.crashed or t.actions)) for t in played])
    crashes = [crashed for crashed, _ in ends if crashed]
    if 2 * len(crashes) >= len(ends) and len(crashes) == sum(acted for _, acted in ends):
        raise Crashed(env, f"on held-out levels in which it was given an action ({len(crashes)})", crashes[-1])


def refuse_silent_programs(cfg: StarPORun, env: EnvSection) -> Callable[[list[Trajectory]], None]:
    """Return what takes the episodes that have ended, and raises Crashed where no program has had an answer.

    It waits for as many as run at a time: each may take minutes, and there may be many more.
    """
    made, ended = open_env(env), list[Trajectory]()
    most = min(made.agent.parallel, cfg.rollout.conversations) if isinstance(made, Prompts) and made.agent else None

    def done(episodes: list[Trajectory]) -> None:
        ended.extend(t for t in episodes if not t.crashed or t.crashed.startswith(PROGRAM_CRASHED))
        if most and len(ended) >= most and all(t.crashed and not t.turns for t in ended):
            raise Crashed(env, f"of the first {len(ended)}", ended[-1].crashed)

    return done


@contextmanager
def kept_in_a_crash(setup: Setup, learner: Learner, chat: Chat, state: RunState) -> Generator[None]:
    """Save a checkpoint where an environment that crashes ends the run, and say so in a UserError."""
    try:
        yield
    except Crashed as crash:
        words = f"{crash} Nothing was exported."
        if state.step:
            if not (folder := setup.out / f"checkpoint-{state.step}").exists():
                run_state.save(folder, learner, chat, state)
            words += f" The same command with --resume goes on after step {state.step}."
        raise UserError(words) from crash


def play_all(
    cfg: StarPORun,
    sampler: Sampler,
    chat: Chat,
    episodes: Sequence[Episode | Trajectory],
    temperature: float,
    seeds: Sequence[int],
    done: Callable[[list[Trajectory]], None] | None = None,
) -> list[Trajectory]:
    """Play these episodes to their ends under the limits of this run, as `posttrain.rollout.play`."""
    return play(
        sampler,
        chat,
        episodes,
        SamplingParams(max_new_tokens=cfg.rollout.max_completion_length, temperature=temperature),
        seeds,
        slots=cfg.rollout.conversations,
        context=Context(cfg.rollout.context, cfg.rollout.context_turns, cfg.rollout.max_context),
        done=done,
    )


def first_state(setup: Setup, learner: Learner, chat: Chat) -> RunState:
    """Return a new run's state, or that of its checkpoint, whose weights are then in place."""
    runlog.say(f"phase 3: {models.describe_training(setup.cfg, learner.model, setup.device)}")
    state = RunState(plan=setup.plan.changes)
    if setup.resume_from:
        state = run_state.load(setup.resume_from, learner)
        runlog.say(f"Resuming from {setup.resume_from}.")
        best = setup.best(state)
        if parallel.total(not checkpoint.is_whole(best), setup.device) > 0:
            runlog.say(f"{best.name} is damaged: {setup.resume_from.name} stands in for it until the next evaluation.")
            state.forget_best()
            run_state.save(setup.best(state), learner, chat, state)
    if setup.resumes:
        run_state.drop_later(setup.out, state.step)
    return state


def finish(setup: Setup, learner: Learner, chat: Chat, state: RunState, metrics: dict[str, float], broken: str) -> None:
    """Export the model and leave the other processes; a UserError where the last policy was not healthy.

    broken: why, or "". metrics: of the closing evaluation.
    """
    with learner.whole() as whole:
        if runlog.is_main_process():
            export(setup, whole.model, chat, state, metrics, broken)
    parallel.barrier()
    parallel.stop()
    if broken:
        raise UserError(
            f"The run failed: {broken}. {setup.out / 'final'} was made from {setup.best(state).name}, the best healthy"
            f" policy in validation. Start again with a lower trainer.learning_rate or"
            " trainer.bf16=false, and another output_dir."
        )


def export(setup: Setup, model: Any, chat: Chat, state: RunState, metrics: dict[str, float], broken: str) -> None:
    """Save the final model with its card. metrics: of its evaluation on test levels, which are printed.

    broken: why the last policy is not healthy, "" where it is.
    """
    cfg, episodes = setup.cfg, setup.cfg.evaluation.final_episodes
    keys, words = ("success", "low", "high", "levels"), words_of(env.name for env in cfg.envs)
    shares = {env.title: [metrics[f"final/{env.title}/{key}"] for key in keys] for env in cfg.envs}
    results = [
        model_card.CardResult(f"{name}, test {words.levels}: success", success, int(levels), low, high)
        for name, (success, low, high, levels) in shares.items()
    ]
    for line in runlog.read_metrics(setup.out / "metrics.jsonl"):
        if line["step"] == state.best_step:
            results += model_card.suite_results(line)
    results += model_card.suite_results(metrics, "final")  # of a best whose step had no time for them
    data = distillation.sources(cfg)
    record = model_card.phase_record("phase3", setup.settings, state.best_step, data=data, results=results)
    final = models.save(
        setup.out / "final", model, chat, setup.settings,
        source=cfg.model, history=[*model_card.history(cfg.model.name_or_path), record],
        phase="phase3", step=state.best_step,
    )  # fmt: skip
    chosen = "Best" if cfg.rewarded else "Last policy that is not worse"
    print(f"{chosen} on validation {words.levels}: step {state.best_step}. On test {words.levels}:")
    for name, (success, low, high, levels) in shares.items():
        crashed = metrics[f"final/{name}/crashed"]
        print(
            f"  {name}: {success:.1%} [{low:.1%}, {high:.1%}] of {episodes} {words.episodes}"
            + (f" on {levels} {words.levels}" if levels < episodes else "")
            + (f", {crashed} of which raised and count as lost" if crashed else "")
        )
    print(f"Memory: at most {memory(setup.device):.2f} GiB; planned {plan.gib(setup.plan.peak)} GiB.")
    print(f"Saved: {final}  (curves: {setup.out / 'metrics.jsonl'})")
    if not broken:
        if cfg.envs[0].options.get("agent"):
            print(f"Next: posttrain serve {shlex.quote(str(final))}  (and run the program with its address)")
        else:
            print(f"Next: {play_command(cfg, final)}")


def play_command(cfg: StarPORun, final: Path) -> str:
    """Return the command that shows how the model plays the first environment, as in the run."""
    env, protocol, rollout = cfg.envs[0], cfg.protocol, cfg.rollout
    changes: dict[str, Any] = {"model.name_or_path": str(final)}
    played = env.model_dump(include=set(EnvSection.model_fields) - {"weight"}, exclude_defaults=True)
    if played.keys() - {"name"}:
        changes["envs"] = [played]
    changes |= {f"protocol.{key}": value for key, value in protocol.model_dump(exclude_defaults=True).items()}
    for key in ("max_completion_length", "context", "context_turns"):
        if (value := getattr(rollout, key)) != ChatRun.model_fields[key].default:
            changes[key] = value
    values = {
        key: value if re.fullmatch(r"[\w./:-]+", str(value)) else yaml_value(value) for key, value in changes.items()
    }
    words = [f"{key}={value}" for key, value in values.items()]
    return f"{command('inference_with_improved_settings')} {shlex.join(words)} --play {shlex.quote(env.title)}"
