"""Phase 3, StarPO: how does a model that talks become one that acts?  Multi-turn RL in text environments, line by line.

    python train_phase3_starpo.py                                            the reference run on one 24 GB GPU
    python train_phase3_starpo.py --config configs/quickstart/phase3_starpo.yaml --resume
    torchrun --nproc_per_node 8 train_phase3_starpo.py                       the same run on eight
    python train_phase3_starpo.py --plan                                     memory, hours, cost; nothing runs

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

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from posttrain.config import StarPORun, load, run, training_flags
from posttrain.runtime import runlog
from posttrain.types import Trajectory, UserError, derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from posttrain.evaluation import FormerTasks
    from posttrain.models import Chat
    from posttrain.rollout import Sampler
    from posttrain.starpo import (
        Batch,
        Distillation,
        Experience,
        Learner,
        Measured,
        Monitor,
        RolloutWorker,
        RunState,
        Scored,
    )


class Parts(NamedTuple):
    """What a run plays with, learns with and reports to."""

    cfg: StarPORun
    chat: Chat
    sampler: Sampler
    learner: Learner
    distillation: Distillation | None
    former_tasks: FormerTasks
    monitor: Monitor


def main(argv: list[str] | None = None) -> None:
    cfg, args = load(StarPORun, "configs/phase3_starpo.yaml", argv, training_flags, __doc__)
    if args.plan is not None:
        from posttrain import plan

        return plan.show(cfg, args.plan, args.config)
    runlog.keep_private(Path(cfg.output_dir))

    from posttrain import models, starpo
    from posttrain.evaluation import FormerTasks, hub_sets
    from posttrain.models import model_files
    from posttrain.rollout import sampler_of
    from posttrain.runtime import hardware, parallel
    from posttrain.starpo import (
        Distillation,
        Monitor,
        RolloutWorker,
        costs,
        describe,
        due,
        not_finite,
        run_state,
        thoughts_and_prompts,
    )

    setup = starpo.set_up(cfg, resume=args.resume, data_sets=hub_sets(cfg.evaluation.suites))
    cfg = setup.cfg  # with the memory plan's numbers; frozen, as every config is

    model, chat = models.load(cfg.model, device=cfg.device, chat_template=cfg.chat.template)
    learner = starpo.make_learner(cfg, model, chat)
    with learner.whole():
        sampler = sampler_of(cfg, learner.policy, chat)
    with learner.whole(), learner.autocast(), model_files.no_bars():  # while the policy is what it starts from
        distillation = Distillation.start(learner, sampler, chat) if cfg.distillation else None
    former_tasks = FormerTasks(cfg, chat)
    state = starpo.first_state(setup, learner, chat)
    monitor = Monitor(cfg, setup.settings, state, learner.exact, setup.resumes)
    parts = Parts(cfg, chat, sampler, learner, distillation, former_tasks, monitor)
    worker = None
    if cfg.rollout.max_staleness:
        worker = RolloutWorker(cfg, sampler, chat, lambda step: starpo.levels(cfg, step, state.joined))

    with runlog.StopSignals() as stop, model_files.no_bars(), starpo.kept_in_a_crash(setup, learner, chat, state):
        if state.step == 0:
            validate(parts, state, 0)
        for step in range(state.step + 1, cfg.trainer.max_steps + 1) if not state.stopped_early else ():
            started_at = time.perf_counter()
            monitor.raised.clear()
            with learner.whole(), learner.autocast():
                groups = rollout(cfg, sampler, chat, step, state.joined, worker)
            played_at = time.perf_counter()
            starpo.refuse_crashes(cfg, state, groups)
            scored = score_and_filter(cfg, groups, learner)
            metrics = describe(groups, scored.std, scored.kept)
            metrics |= worker.staleness([t for group in groups for t in group]) if worker else {}
            if due(cfg.diagnostics.every, step) and cfg.protocol.think:
                with learner.whole():
                    metrics |= thoughts_and_prompts(cfg, learner, chat, groups, step, state, monitor.say)
            scored_at = time.perf_counter()
            state.empty_steps = 0 if scored.kept else state.empty_steps + 1
            with hardware.deterministic(learner.deterministic):
                experience = collect(cfg, learner, groups, scored) if scored.kept else None
                tokens = monitor.tokens(learner, chat, groups, step, experience)
                if experience is not None:
                    metrics |= update(cfg, learner, experience, step, distillation)
            state.step, state.tokens = step, state.tokens + int(metrics["rollout/tokens"])
            learning = time.perf_counter() - scored_at
            metrics |= costs(metrics, state.tokens, played_at - started_at, learning, setup.device)
            monitor.report(state, step, metrics)
            monitor.record(groups, state, step, tokens)

            evaluates = step == cfg.trainer.max_steps or step % cfg.evaluation.every == 0
            if evaluates:
                validate(parts, state, step)
            monitor.stop_early(state, metrics["rollout/success"])
            if state.stopped_early and not evaluates:  # what was learned since the last evaluation may be the best
                validate(parts, state, step)
            last = step == cfg.trainer.max_steps or state.stopped_early
            stopping = parallel.total(stop.requested, setup.device) > 0
            if last or stopping or step % cfg.checkpoint.every == 0:
                run_state.save(setup.out / f"checkpoint-{step}", learner, chat, state)
                run_state.drop_old(setup.out, cfg.checkpoint.keep)
            if stopping:
                stop.leave()
            if last:
                break

        if worker:
            worker.stop()
        # what is saved is the policy that did best on the validation levels; the test levels see only that one
        broken = not_finite(state.alarms)  # the same in all processes, which see the same rows
        run_state.load(setup.best(state), learner)
        with learner.whole(), learner.autocast(), stop.at_once("the closing evaluation"):
            final = evaluate(cfg, sampler, chat, "test", cfg.evaluation.final_episodes, name="final")
        monitor.report(state, state.step, final)
    monitor.close()
    starpo.finish(setup, learner, chat, state, final, broken)


# ----------------------------------------------------------------------------------------------------------- 1. rollout
def rollout(
    cfg: StarPORun, sampler: Sampler, chat: Chat, step: int,
    joined: Sequence[str] = (), worker: RolloutWorker | None = None,
) -> list[list[Trajectory]]:  # fmt: skip
    """All groups of a step, played by all processes together; samples of a group share the level and nothing else.

    joined: the environments of the curriculum (`envs.after`) that are played by now. worker: plays ahead of this.
    """
    from posttrain.runtime import parallel
    from posttrain.starpo import levels, play_all

    if worker:
        worker.update_model_version(step - 1)
        trajectories = worker.take(step)
    else:
        episodes, seeds = levels(cfg, step, joined)
        trajectories = play_all(cfg, sampler, chat, episodes, cfg.rollout.temperature, seeds)
    size = cfg.rollout.num_generations
    groups = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
    for number, group in zip(parallel.mine(cfg.rollout.groups), groups, strict=True):
        for trajectory in group:
            trajectory.group = number
    return parallel.gather(groups)


# -------------------------------------------------------------------------------------------------- 2. score and filter
def score_and_filter(cfg: StarPORun, groups: list[list[Trajectory]], learner: Learner | None = None) -> Scored:
    """The group filter, on raw rewards with penalties; crashed episodes are in no statistic.

    learner: measures entropies where the filter's metric is made of them.
    """
    import torch

    from posttrain.starpo import Scored, filters

    algorithm, chosen = cfg.algorithm, cfg.algorithm.filter
    alive = [(number, sample) for number, group in enumerate(groups) for sample, t in enumerate(group) if not t.crashed]
    trajectories = [groups[number][sample] for number, sample in alive]
    group_B = torch.tensor([number for number, _ in alive], dtype=torch.long)
    rewards_B = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    lengths_B = torch.tensor([t.tokens for t in trajectories], dtype=torch.float64)
    measured_B = {"reward": rewards_B, "length": lengths_B}
    if chosen.metric.startswith("entropy"):
        assert learner is not None
        measured_B["entropy"] = learner.mean_entropies(trajectories)
    members = [[not t.crashed and t.tokens > 0 for t in group] for group in groups]
    trains = [
        [on and not (algorithm.mask_truncated_completions and t.truncated) for on, t in zip(*both, strict=True)]
        for both in zip(members, groups, strict=True)
    ]
    idle_G = torch.tensor([not any(group) for group in trains])

    std_G = filters.group_scores("reward_std", measured_B, group_B, len(groups))
    names = sorted({group[0].env for group in groups})
    env_G = [names.index(group[0].env) for group in groups]  # rewards of two environments need not have one scale
    kept_G = filters.keep_groups(
        filters.group_scores(chosen.metric, measured_B, group_B, len(groups)).masked_fill(idle_G, math.nan),
        "none" if chosen.strategy == "soft" else chosen.strategy,
        chosen.value,
        smallest=not chosen.largest,
        keep_zero=chosen.keep_zero,
        # a level's seed is derived from run, step and group: a new order each step, the same in all processes
        ties=sorted(range(len(groups)), key=lambda number: derive_seed("ties", groups[number][0].level_seed)),
        env_G=env_G,
    )
    weights_G = filters.soft_weights(std_G, env_G) if chosen.strategy == "soft" else torch.ones(len(groups))
    return Scored(members, trains, std_G.nan_to_num(0.0).tolist(), weights_G.tolist(), kept_G.tolist())


# -------------------------------------------------------------------------------------------------------- 3. advantages
def collect(cfg: StarPORun, learner: Learner, groups: list[list[Trajectory]], scored: Scored) -> Experience:
    """The kept groups' tokens, with the reference's log-probs and the critic's values, and what each was worth."""
    import torch

    from posttrain.starpo import Batch, Experience

    chosen = [(number, sample) for number in scored.kept for sample, on in enumerate(scored.members[number]) if on]
    batch = Batch.of([groups[number][sample] for number, sample in chosen])
    trains_B = torch.tensor([scored.trains[number][sample] for number, sample in chosen])
    measured = learner.measure(batch)
    advantages_S, returns_S = advantages(cfg, batch, measured, scored.weights, trains_B)
    return Experience(batch, measured, advantages_S, returns_S, trains_B)


def advantages(
    cfg: StarPORun, batch: Batch, measured: Measured, weights: list[float], trains_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What each sampled token of these episodes is worth, (S,), and the critic's targets, (S,) or None."""
    import torch

    from posttrain.starpo import advantages as estimators

    algorithm, group_B, episode_N = cfg.algorithm, batch.group_B, batch.episode_N
    turn_S, episode_S = batch.turn_S, batch.episode_S
    rewards_N = torch.tensor([score for t in batch.episodes for score in t.turn_scores], dtype=torch.float64)
    if algorithm.critical and not algorithm.turn_rewards:
        rewards_N = estimators.at_the_end(rewards_N, episode_N)
    rewards_B = torch.zeros(len(group_B), dtype=torch.float64).index_add(0, episode_N, rewards_N)
    std = algorithm.advantage_std
    names = sorted({t.env for t in batch.episodes})
    env_B = torch.tensor([names.index(t.env) for t in batch.episodes])  # statistics of a batch are of each alone
    trained_S, env_S = trains_B[episode_S], env_B[episode_S]
    match algorithm.advantage:
        case "grpo":
            advantages_S = estimators.grpo(rewards_B, group_B, std=std)[episode_S]
        case "rloo":
            advantages_S = estimators.rloo(rewards_B, group_B)[episode_S]
        case "brpo":
            advantages_S = estimators.brpo(rewards_B, env_B, std=std)[episode_S]
        case "arpo":
            advantages_S = estimators.arpo(rewards_B)[episode_S]
        case "gigpo":
            states = [state for t in batch.episodes for state in t.state_keys]
            buckets_N = estimators.state_buckets(states, group_B[episode_N])
            advantages_S = estimators.gigpo(
                rewards_B, group_B, rewards_N, episode_N, buckets_N,
                weight=algorithm.step_weight, gamma=algorithm.gamma_high, std=std,
            )[turn_S]  # fmt: skip
        case "reinforce_pp" | "reinforce_pp_baseline" as name:
            advantages_S = estimators.reinforce_pp(
                rewards_B, group_B, episode_S,
                baseline=name == "reinforce_pp_baseline", trained_S=trained_S, env_S=env_S,
            )  # fmt: skip
        case "gae" | "bilevel_gae" as name:
            assert measured.values_S is not None
            rewards_S, values_S = estimators.token_rewards(rewards_N, turn_S), measured.values_S.double()
            cut_S = torch.tensor([t.out_of_context for t in batch.episodes])[episode_S]
            gamma, lam = algorithm.gamma, algorithm.lam
            if name == "gae":
                advantages_S, returns_S = estimators.gae(rewards_S, values_S, episode_S, gamma, lam, cut_S)
            else:
                advantages_S, returns_S = estimators.bilevel_gae(
                    rewards_S, values_S, turn_S, episode_N,
                    gamma=gamma, gamma_high=algorithm.gamma_high, lam=lam, cut_S=cut_S,
                )  # fmt: skip
            return estimators.whiten(advantages_S, trained_S, env_S), returns_S
    return advantages_S * torch.tensor(weights, dtype=torch.float64)[group_B][episode_S], None


# ------------------------------------------------------------------------------------------------------------ 4. update
def update(
    cfg: StarPORun, learner: Learner, experience: Experience, step: int, distillation: Distillation | None = None
) -> dict[str, float]:
    """Move the policy (and its critic) by one optimizer step for each minibatch of each epoch; figures of it.

    Gradients are summed over micro-batches and processes: neither changes the result.
    """
    import torch

    from posttrain.rollout import most_turns
    from posttrain.runtime import sharding
    from posttrain.starpo import POLICY, UpdateFigures, advantage_figures, losses, objective_settings, schedule

    algorithm, batch, measured, critic = cfg.algorithm, experience.batch, experience.measured, learner.critic
    warming_up = critic is not None and step <= algorithm.critic.warmup_steps  # the critic then learns alone
    rates = (0.0 if warming_up else cfg.learning_rate, algorithm.critic.learning_rate)
    learner.set_learning_rates(*(rate * schedule(cfg, step) for rate in rates))
    settings = objective_settings(cfg)
    clip_max = None if learner.exact else algorithm.importance_sampling_clip_max
    longest = cfg.rollout.max_completion_length * most_turns(cfg.envs, cfg.protocol)  # sampled tokens of an episode
    lengths_B = torch.bincount(batch.episode_S, minlength=len(batch.episodes)) * experience.trains_B
    count = algorithm.minibatches
    minibatches = [
        (number, counted_B)
        for epoch in range(algorithm.num_iterations)
        for number, chosen_B in enumerate(experience.minibatches(count, cfg.seed, step, epoch), epoch * count)
        if (counted_B := lengths_B * chosen_B).sum() > 0
    ]
    # the first optimizer step finds the policy as it is; the others need what it was before that step
    later_B = sum((counted_B for _, counted_B in minibatches[1:]), torch.zeros_like(lengths_B)) > 0
    policy_S = learner.logprobs(batch, later_B)
    figures = UpdateFigures()
    learner.train()
    for number, counted_B in minibatches:
        weights_S = losses.token_weights(batch.episode_S, algorithm.aggregation, counted_B, longest)
        prefixes, micro_batches = learner.prefill([row for row in batch.rows if counted_B[row.episode] > 0])
        for rows in micro_batches:
            forward = learner.forward(rows, prefixes)
            new_S, sampler_S = forward.logprobs_S, forward.take(batch.sampler_S)
            old_S = new_S.detach() if figures.steps == 0 else forward.take(policy_S)  # no step yet: the ratio is 1
            tokens = losses.Tokens(
                logprobs_S=new_S,
                old_S=old_S,
                advantages_S=forward.take(experience.advantages_S).float(),
                weights_S=forward.weights(weights_S),
                importance_weights_S=losses.sampler_weights(old_S, sampler_S, clip_max),
                entropy_S=forward.entropy_S,
                reference_S=None if measured.reference_S is None else forward.take(measured.reference_S),
                contexts_S=forward.take(batch.context_S),
            )
            objective = losses.objective(tokens, settings)
            if forward.counts:
                figures.policy(tokens, objective, sampler_S)
            loss = None if warming_up else objective.loss
            if critic is not None and critic.kind == "shared":  # one trunk: one backward pass for both
                value = learner.value_loss(forward, experience, tokens.weights_S)
                if forward.counts:
                    figures.critic(value)
                (value.loss if loss is None else loss + value.loss).backward()
                continue
            if loss is not None:
                loss.backward()
            if critic is not None:
                value = learner.value_loss(forward, experience, tokens.weights_S)
                if forward.counts:
                    figures.critic(value)
                value.loss.backward()
        prefixes.backward()
        if distillation is not None and distillation.coef and not warming_up:
            figures.distillation(*distillation.backward(step, number))

        learner.sum_gradients()
        for parameter in learner.trainable[POLICY] if warming_up else ():
            parameter.grad = None  # not even the optimizer's moments learn from the critic's loss
        norms = [
            sharding.number(torch.nn.utils.clip_grad_norm_(own, cfg.trainer.max_grad_norm)) for own in learner.trainable
        ]
        finite = all(map(math.isfinite, norms))
        if finite:
            learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        figures.step(norms, finite)
    return figures.row(learner) | advantage_figures(experience.advantages_S, experience.trains_B[batch.episode_S])


# ---------------------------------------------------------------------------------------------------------- 5. evaluate
def evaluate(
    cfg: StarPORun, sampler: Sampler, chat: Chat, split: str, episodes: int,
    name: str = "evaluation", won: dict[str, list[bool]] | None = None, seen: list[Trajectory] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Success on held-out levels, the same ones each time and in every run, with 95 % intervals over the levels.

    won: is given, for each environment, whether each of its levels was won, in the order of the levels.
    seen: is given the first two episodes of each environment.
    """
    from posttrain.evaluation import held_out_levels, sampling_seed
    from posttrain.rollout import new_episode
    from posttrain.runtime import parallel
    from posttrain.starpo import Summary, describe_evaluation, play_all, refuse_crashed_evaluation

    summaries: dict[str, list[Summary]] = {}
    for env in cfg.envs:
        own, levels = parallel.mine(episodes), held_out_levels(env, split, episodes)
        begun = [new_episode(env, cfg.protocol, levels[i], split) for i in own]
        seeds = [sampling_seed(env.title, i) for i in own]
        trajectories = play_all(cfg, sampler, chat, begun, cfg.evaluation.temperature, seeds)
        refuse_crashed_evaluation(env, trajectories)
        summaries[env.title] = parallel.gather([Summary.of(t) for t in trajectories])
        if seen is not None:
            seen += trajectories[:2]
    if won is not None:
        won |= {name: [e.success for e in found] for name, found in summaries.items()}
    return describe_evaluation(name, summaries)


def validate(parts: Parts, state: RunState, step: int) -> None:
    """Evaluate on validation levels and old tasks; keep the policy as the best one where it wins more than the best."""
    from posttrain.starpo import not_finite, run_state

    cfg, learner, monitor, started_at = parts.cfg, parts.learner, parts.monitor, time.perf_counter()
    won: dict[str, list[bool]] = {}
    seen: list[Trajectory] = []
    with learner.whole(), learner.autocast():
        metrics = evaluate(cfg, parts.sampler, parts.chat, "validation", cfg.evaluation.episodes, won=won, seen=seen)
    better, compared = monitor.compare_with_best(state, step, won)
    for title in state.join(cfg.envs, won):
        monitor.say(f"{title} joins: from the next step on it is trained in.")
    metrics |= compared
    if parts.distillation is not None and parts.distillation.held_out:
        metrics["evaluation/distillation_kl"] = parts.distillation.measure()
    with learner.whole(), learner.autocast():
        metrics |= parts.former_tasks.measure(parts.sampler, learner, state.first_answers)
    monitor.report(state, step, metrics | {"seconds/evaluation": time.perf_counter() - started_at})
    if better:
        monitor.show_validation(seen, step)
    broken = not_finite(state.alarms)
    if broken and step == 0:
        raise UserError(f"{cfg.model.name_or_path} cannot be trained: {broken}.")
    if better and not broken:
        state.best_step, state.best_success, state.best_won = step, metrics["evaluation/success"], won
        run_state.save(Path(cfg.output_dir) / f"best-{step}", learner, parts.chat, state)


if __name__ == "__main__":
    run(main)
