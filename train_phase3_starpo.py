"""Phase 3, StarPO: how does a model that talks become one that acts?  Multi-turn RL in text environments, line by line.

    python train_phase3_starpo.py                                            the reference run on one 24 GB GPU
    python train_phase3_starpo.py --config configs/quickstart/phase3_starpo.yaml --resume
    torchrun --nproc_per_node 8 train_phase3_starpo.py                       the same run on eight
    python train_phase3_starpo.py --plan                                     memory, hours, cost; nothing runs
    python train_phase3_starpo.py --advise                                   is it worth training from this model?

One step of StarPO (arXiv 2504.20073), as `main` calls it:
    rollout            play `groups` levels `num_generations` times each
    score_and_filter   rewards say how much the samples of a group differ, and which groups are kept
    collect            measure the sampled tokens, and `advantages`: what each of them was worth
    update             epochs x minibatches x micro-batches: objective, backward; then clipping and the optimizer's step
    validate           held-out levels, and the best policy so far
Every seed is derived from (run, step, group, sample): a resumed run draws what it would have drawn.

Shapes, as suffixes: B episodes, N turns of all episodes one after another, S sampled tokens of all turns one after
another, G groups, D the width of the model's last states. The formulas are in posttrain/starpo/.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

# A package loads a module when one of its names is first used, so --help and mistakes answer before torch is loaded.
from posttrain import evaluation, models, plan, rollout as rollouts, runtime, starpo
from posttrain.config import StarPORun, load, run, training_flags
from posttrain.runtime import runlog
from posttrain.types import Trajectory, UserError, derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from posttrain.models import Chat
    from posttrain.rollout import Sampler
    from posttrain.starpo import Batch, Distillation, Experience, Learner, Measured, RolloutWorker, RunState, Scored


class Parts(NamedTuple):
    """What a run plays with, learns with and reports to."""

    cfg: StarPORun
    chat: Chat
    sampler: Sampler
    learner: Learner
    distillation: Distillation | None
    suite_tasks: evaluation.TrainingTasks
    budget: runtime.TimeBudget
    monitor: starpo.Monitor


class Evaluation(NamedTuple):
    """What an evaluation shows.

    metrics: by name. won: by environment, whether each of its levels was won, in the order of the levels. earned: the
    same of rewards without penalties; None where an episode crashed. first: the first two episodes of each environment,
    of those that this process played.
    """

    metrics: dict[str, float]
    won: dict[str, list[bool]]
    earned: starpo.run_state.LevelRewards
    first: list[Trajectory]


def main(argv: list[str] | None = None) -> None:
    """Train as the config says. argv: the words of the command line; None takes those of this process."""
    cfg, args = load(StarPORun, "configs/phase3_starpo.yaml", argv, flags, __doc__)
    if args.plan is not None:
        return plan.print_plan(cfg, args.plan, args.config)
    if args.advise:
        return advise(cfg)
    runlog.keep_private(Path(cfg.output_dir))

    setup = starpo.set_up(cfg, resume=args.resume, data_sets=evaluation.hub_sets(cfg.evaluation.suites))
    cfg = setup.cfg  # with the memory plan's numbers; frozen, as every config is

    model, chat = models.load(cfg.model, device=cfg.device, chat_template=cfg.chat.template)
    learner = starpo.make_learner(cfg, model, chat)
    sampler = learner.open_sampler(chat)
    with learner.sampling(), models.no_bars():  # while the policy is what it starts from
        distillation = starpo.Distillation.start(learner, sampler, chat) if cfg.remembers else None
    suite_tasks = evaluation.TrainingTasks(cfg, chat)
    state = starpo.first_state(setup, learner, chat)
    monitor = starpo.Monitor(cfg, setup.settings, state, learner.exact, setup.resumes)
    every, times = cfg.evaluation.every, state.suite_times
    budget = runtime.TimeBudget(cfg.evaluation.budget, every, cfg.trainer.max_steps, times, monitor.say)
    parts = Parts(cfg, chat, sampler, learner, distillation, suite_tasks, budget, monitor)
    worker = None
    if cfg.rollout.max_staleness:
        worker = starpo.RolloutWorker(cfg, sampler, chat, lambda step: starpo.levels(cfg, step, state))

    with runlog.StopSignals() as stop, models.no_bars(), starpo.kept_in_a_crash(setup, learner, chat, state):
        if state.step == 0:
            validate(parts, state, 0)
        for step in range(state.step + 1, cfg.trainer.max_steps + 1) if not state.stopped_early else ():
            started_at = time.perf_counter()
            monitor.raised.clear()
            with learner.sampling():
                groups = rollout(cfg, sampler, chat, step, state, worker)
            played_at = time.perf_counter()
            starpo.refuse_crashes(cfg, state, groups)
            if step == 1:
                monitor.say(starpo.first_advice(cfg, learner, groups, model.num_parameters()))
            scored = score_and_filter(cfg, groups, learner)
            metrics = starpo.describe(groups, scored.std, scored.kept)
            metrics |= starpo.record_levels(cfg, state, groups, step)
            metrics |= worker.staleness([t for group in groups for t in group]) if worker else {}
            if starpo.due(cfg.diagnostics.every, step) and cfg.protocol.think:
                metrics |= starpo.thoughts_and_prompts(cfg, learner, chat, groups, step, state, monitor.say)
            scored_at = time.perf_counter()
            state.empty_steps = 0 if scored.kept else state.empty_steps + 1
            with runtime.hardware.deterministic(learner.deterministic):
                experience = collect(cfg, learner, groups, scored) if scored.kept else None
                tokens = monitor.tokens(learner, chat, groups, step, experience)
                if experience is not None:
                    metrics |= update(cfg, learner, experience, step, distillation)
            state.step, state.tokens = step, state.tokens + int(metrics["rollout/tokens"])
            learning = time.perf_counter() - scored_at
            metrics |= starpo.costs(metrics, state.tokens, played_at - started_at, learning, setup.device)
            monitor.report(state, step, metrics)
            monitor.record(groups, state, step, tokens)

            evaluates = step == cfg.trainer.max_steps or step % cfg.evaluation.every == 0
            if evaluates:
                validate(parts, state, step)
            monitor.stop_early(state, metrics["rollout/success"])
            if state.stopped_early and not evaluates:  # what was learned since the last evaluation may be the best
                validate(parts, state, step)
            last = step == cfg.trainer.max_steps or state.stopped_early
            stopping = runtime.parallel.total(stop.requested, setup.device) > 0
            if last or stopping or step % cfg.checkpoint.every == 0:
                budget.count()
                starpo.run_state.save(setup.out / f"checkpoint-{step}", learner, chat, state)
                starpo.run_state.drop_old(setup.out, cfg.checkpoint.keep)
            if stopping:
                stop.leave()
            if last:
                break

        if worker:
            worker.stop()
        # what is saved is the policy that did best on the validation levels; the test levels see only that one
        broken = starpo.not_finite(state.alarms)  # the same in all processes, which see the same rows
        starpo.run_state.load(setup.best(state), learner)
        with stop.at_once("the closing evaluation"):
            with learner.sampling():
                final = evaluate(cfg, sampler, chat, "test", cfg.evaluation.final_episodes, name="final").metrics
            final |= {} if state.best_measured else suites(parts, state, "final")
        monitor.report(state, state.step, final)
    monitor.close()
    starpo.finish(setup, learner, chat, state, final, broken)


# ----------------------------------------------------------------------------------------------------------- 1. rollout
def rollout(
    cfg: StarPORun, sampler: Sampler, chat: Chat, step: int,
    state: RunState | None = None, worker: RolloutWorker | None = None,
) -> list[list[Trajectory]]:  # fmt: skip
    """Play all groups of a step, with all processes; samples of a group share the level and nothing else.

    Further groups are played, up to `rollout.refill`, while too few have different rewards and an episode to train on.

    Args:
        state: decides about environments (`envs.after`) and levels (`envs.difficulty`).
        worker: has played this step ahead, where one does.
    """
    wanted, most = cfg.rollout.groups, cfg.rollout.groups + cfg.rollout.refill
    groups: list[list[Trajectory]] = []
    while missing := min(wanted - sum(starpo.teaches(cfg, group) for group in groups), most - len(groups)):
        numbers = range(len(groups), len(groups) + missing)
        if worker:
            worker.update_model_version(step - 1)
            trajectories = worker.take(step)
        else:
            episodes, seeds = starpo.levels(cfg, step, state, numbers)
            trajectories = starpo.play_all(cfg, sampler, chat, episodes, cfg.rollout.temperature, seeds)
        size = cfg.rollout.num_generations
        played = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        for place, group in zip(runtime.parallel.mine(missing), played, strict=True):
            for trajectory in group:
                trajectory.group = numbers[place]
        groups += runtime.parallel.gather(played)
    return groups


# -------------------------------------------------------------------------------------------------- 2. score and filter
def score_and_filter(cfg: StarPORun, groups: list[list[Trajectory]], learner: Learner | None = None) -> Scored:
    """Choose the groups to train on by their raw rewards with penalties; crashed episodes are in no statistic.

    learner: measures entropies, where the filter's metric is made of them.
    """
    chosen, filters = cfg.algorithm.filter, starpo.filters
    values_B, group_B = filters.measured(groups)
    if chosen.metric.startswith("entropy"):
        assert learner is not None
        values_B["entropy"] = learner.mean_entropies([t for group in groups for t in group if not t.crashed])
    members = [[not t.crashed and t.tokens > 0 for t in group] for group in groups]
    trains = [[starpo.trained_on(cfg, t) for t in group] for group in groups]
    names = sorted({group[0].env for group in groups})
    env_G = [names.index(group[0].env) for group in groups]  # rewards of two environments need not have one scale
    score_G = filters.group_scores(chosen.metric, values_B, group_B, len(groups))
    score_G[[not any(group) for group in trains]] = math.nan  # nothing to train on
    kept_G = filters.keep_groups(
        score_G,
        "none" if chosen.strategy == "soft" else chosen.strategy,
        chosen.value,
        smallest=not chosen.largest,
        keep_zero=chosen.keep_zero,
        # a level's seed is derived from run, step and group: a new order each step, the same in all processes
        ties=sorted(range(len(groups)), key=lambda number: derive_seed("ties", groups[number][0].level_seed)),
        env_G=env_G,
    )
    std_G = filters.group_scores("reward_std", values_B, group_B, len(groups))
    weights = filters.soft_weights(std_G, env_G).tolist() if chosen.strategy == "soft" else [1.0] * len(groups)
    return starpo.Scored(members, trains, std_G.nan_to_num(0.0).tolist(), weights, kept_G.tolist())


# -------------------------------------------------------------------------------------------------------- 3. advantages
def collect(cfg: StarPORun, learner: Learner, groups: list[list[Trajectory]], scored: Scored) -> Experience:
    """Return the kept groups' tokens, with the reference's log-probs, the critic's values, and what each was worth."""
    batch, trains_B = scored.batch(groups)
    measured = learner.measure(batch)
    advantages_S, returns_S = advantages(cfg, batch, measured, scored.weights, trains_B)
    return starpo.Experience(batch, measured, advantages_S, returns_S, trains_B)


def advantages(
    cfg: StarPORun, batch: Batch, measured: Measured, weights: list[float], trains_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what each sampled token was worth, (S,), and the critic's targets, (S,), None without a critic.

    Args:
        weights: of each group, which its advantages are multiplied by where there is no critic.
        trains_B: bool, whose tokens count in the loss.
    """
    if not cfg.rewarded:  # a teacher says what every token should have been
        return batch.sampler_S.new_zeros(len(batch.sampler_S)), None
    earned = starpo.Earned.of(batch, trains_B, measured.values_S)
    advantages_S, returns_S = starpo.estimate(cfg.algorithm, earned)
    if returns_S is None:
        advantages_S = advantages_S * advantages_S.new_tensor(weights)[earned.group_B][earned.episode_S]
    return advantages_S, returns_S


# ------------------------------------------------------------------------------------------------------------ 4. update
def update(
    cfg: StarPORun, learner: Learner, experience: Experience, step: int, distillation: Distillation | None = None
) -> dict[str, float]:
    """Move the policy (and its critic) by one optimizer step for each minibatch of each epoch; return figures of it.

    Gradients are summed over micro-batches and processes: neither changes the result.
    """
    algorithm, batch, measured, losses = cfg.algorithm, experience.batch, experience.measured, starpo.losses
    clip_max = None if learner.exact else algorithm.importance_sampling_clip_max
    longest, critic_alone = starpo.longest_episode(cfg), learner.critic_alone(step)
    minibatches = experience.minibatches(algorithm.num_iterations, algorithm.minibatches, cfg.seed, step)
    # the first optimizer step finds the policy as it is; the others need what it was before that step
    policy_S = learner.logprobs(batch, experience.read_in(minibatches[1:]))
    figures = starpo.UpdateFigures()
    learner.begin_update(step)
    for minibatch in minibatches:
        weights_S = losses.token_weights(batch.episode_S, algorithm.aggregation, minibatch.lengths_B, longest)
        prefixes, micro_batches = learner.prefill([row for row in batch.rows if minibatch.lengths_B[row.episode] > 0])
        for rows in micro_batches:
            forward = learner.forward(rows, prefixes)
            new_S, sampler_S = forward.logprobs_S, forward.take(batch.sampler_S)
            old_S = new_S.detach() if figures.steps == 0 else forward.take(policy_S)  # no step yet: the ratio is 1
            tokens = losses.Tokens(
                logprobs_S=new_S,
                old_S=old_S,
                advantages_S=forward.take(experience.advantages_S).float(),
                weights_S=forward.take(weights_S) * forward.weight,
                importance_weights_S=losses.sampler_weights(old_S, sampler_S, clip_max),
                entropy_S=forward.entropy_S,
                reference_S=None if measured.reference_S is None else forward.take(measured.reference_S),
                contexts_S=forward.context_S,
            )
            objective = losses.objective(tokens, learner.settings)
            figures.policy(forward, tokens, objective, sampler_S)
            taught = learner.towards_teacher(forward, tokens.weights_S, critic_alone)
            figures.teacher(forward, taught)
            loss = objective.loss + taught.loss if taught else objective.loss
            value = learner.backward(loss, forward, experience, tokens.weights_S, critic_alone)
            figures.critic(forward, value)
        prefixes.backward()
        if distillation is not None and not critic_alone:
            figures.distillation(*distillation.backward(step, minibatch.number))

        norms = learner.clipped_gradients(critic_alone)
        finite = all(map(math.isfinite, norms))
        if finite:
            learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        figures.step(norms, finite)
    return figures.row(learner) | starpo.advantage_figures(experience.advantages_S, experience.trained_S)


# ---------------------------------------------------------------------------------------------------------- 5. evaluate
def evaluate(
    cfg: StarPORun, sampler: Sampler, chat: Chat, split: str, episodes: int, name: str = "evaluation",
    begins: bool = False,
) -> Evaluation:  # fmt: skip
    """Play held-out levels, the same ones each time and in every run; shares have 95 % intervals over the levels.

    Args:
        episodes: of each environment.
        name: the first part of the metrics' names.
        begins: whether it is the first one, which no program that cannot play is to make long.
    """
    summaries: dict[str, list[starpo.Summary]] = {}
    first: list[Trajectory] = []
    for env in cfg.envs:
        own, levels = runtime.parallel.mine(episodes), evaluation.held_out_levels(env, split, episodes)
        begun = [rollouts.new_episode(env, cfg.protocol, levels[i], split) for i in own]
        seeds = [evaluation.sampling_seed(env.title, i) for i in own]
        done = starpo.refuse_silent_programs(cfg, env) if begins else None
        trajectories = starpo.play_all(cfg, sampler, chat, begun, cfg.evaluation.temperature, seeds, done)
        starpo.refuse_crashed_evaluation(env, trajectories)
        summaries[env.title] = runtime.parallel.gather([starpo.Summary.of(t) for t in trajectories])
        first += trajectories[:2]
    won = {title: [episode.success for episode in played] for title, played in summaries.items()}
    earned = {title: [episode.earned for episode in played] for title, played in summaries.items()}
    return Evaluation(starpo.describe_evaluation(name, summaries), won, earned, first)


def validate(parts: Parts, state: RunState, step: int) -> None:
    """Evaluate on validation levels and old tasks; keep the policy where it is better than the best so far."""
    cfg, learner, monitor, started_at = parts.cfg, parts.learner, parts.monitor, time.perf_counter()
    with learner.sampling():
        result = evaluate(cfg, parts.sampler, parts.chat, "validation", cfg.evaluation.episodes, begins=step == 0)
    better, compared = monitor.compare_with_best(state, step, result.won, result.earned)
    for title in state.join(cfg.envs, result.won):
        monitor.say(f"{title} joins: from the next step on it is trained in.")
    metrics = result.metrics | compared
    if parts.distillation is not None and parts.distillation.held_out:
        metrics["evaluation/distillation_kl"] = parts.distillation.measure()
    last = state.stopped_early or step == cfg.trainer.max_steps
    if measured := parts.budget.due(step, "the suites of former phases", learner.device, always=last):
        metrics |= suites(parts, state)
    monitor.report(state, step, metrics | {"seconds/evaluation": time.perf_counter() - started_at})
    if better:
        monitor.show_validation(result.first, step)
    broken = starpo.not_finite(state.alarms)
    if broken and step == 0:
        raise UserError(f"{cfg.model.name_or_path} cannot be trained: {broken}.")
    if better and not broken:
        state.best_step, state.best_measured, success = step, measured, metrics["evaluation/success"]
        # without rewards the highest success stays the measure: each policy might be a little worse than the last
        if cfg.rewarded or success >= state.best_success:
            state.best_success, state.best_won, state.best_earned = success, result.won, result.earned
        starpo.run_state.save(Path(cfg.output_dir) / f"best-{step}", learner, parts.chat, state)


def suites(parts: Parts, state: RunState, name: str = "evaluation") -> dict[str, float]:
    """Return figures of the suites of former phases, and the seconds that they took; {} without suites.

    name: the first part of the metrics' names.
    """
    if not parts.suite_tasks.tasks:
        return {}
    with parts.learner.sampling() as whole, parts.budget.measuring():
        figures = parts.suite_tasks.measure(parts.sampler, whole.policy, state.first_answers)
    figures = {key.replace("evaluation", name, 1): figure for key, figure in figures.items()}
    return figures | {"seconds/suites": state.suite_times["cost"]}


# ------------------------------------------------------------------------------------------------------------ 6. advise
def flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all phases, and this one's own."""
    training_flags(parser)
    parser.add_argument("--advise", action="store_true", help="play validation levels, say what follows, train nothing")


def advise(cfg: StarPORun) -> None:
    """Print what the policy does before the first step, and whether training can gain from there; nothing is kept."""
    with tempfile.TemporaryDirectory() as folder:
        setup = starpo.set_up(cfg.model_copy(update={"output_dir": folder}), resume=False, data_sets=[])
        cfg = setup.cfg
        model, chat = models.load(cfg.model, device=cfg.device, chat_template=cfg.chat.template)
        learner = starpo.make_learner(cfg, model, chat)
        sampler, starts, count = learner.open_sampler(chat), dict[str, starpo.Start](), starpo.ANSWERS
        for env in cfg.envs:
            levels = evaluation.held_out_levels(env, "validation", starpo.LEVELS, repeat=False)
            own = [(level, sample) for level in levels for sample in range(count)]
            own = [own[place] for place in runtime.parallel.mine(len(own))]
            seeds = [derive_seed(cfg.seed, "advice", level, sample) for level, sample in own]
            begun = [
                rollouts.new_episode(env, cfg.protocol, level, "validation", noise_seed=seed)
                for (level, _), seed in zip(own, seeds, strict=True)
            ]
            refuse = starpo.refuse_silent_programs(cfg, env)
            progress = runlog.Progress(len(begun), f"advice: {env.title}", unit="episode")
            with learner.sampling(), models.no_bars(), progress:

                def show(
                    done: list[Trajectory], progress: runlog.Progress = progress,
                    refuse: Callable[[list[Trajectory]], None] = refuse,
                ) -> None:  # fmt: skip
                    progress.update(progress.done + len(done))
                    refuse(done)

                played = starpo.play_all(cfg, sampler, chat, begun, cfg.rollout.temperature, seeds, show)
            starpo.refuse_crashed_evaluation(env, played)
            everything = runtime.parallel.gather(played)
            groups = [everything[start : start + count] for start in range(0, len(everything), count)]
            starts[env.title] = starpo.measure_start(learner, groups, env.title)
        runlog.say("advice: a step is played and learnt from, to see how long it takes.")
        started_at = time.perf_counter()
        with learner.sampling(), models.no_bars():
            groups = rollout(cfg, sampler, chat, 1)
        scored = score_and_filter(cfg, groups, learner)
        if scored.kept:
            update(cfg, learner, collect(cfg, learner, groups, scored), 1)
        seconds = time.perf_counter() - started_at
        runlog.say(starpo.advice_text(cfg, starts, model.num_parameters(), seconds, updated=bool(scored.kept)))


if __name__ == "__main__":
    run(main)
