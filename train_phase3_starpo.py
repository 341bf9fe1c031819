"""Phase 3, StarPO: how does a model that talks become one that acts?  Multi-turn RL in text worlds, line by line.

    python train_phase3_starpo.py                                            the reference run on one 24 GB GPU
    python train_phase3_starpo.py --config configs/quickstart/phase3_starpo.yaml --resume
    torchrun --nproc_per_node 8 train_phase3_starpo.py                       the same run on eight

One step of StarPO (arXiv 2504.20073): play `groups` levels `num_generations` times each, score every episode against
its siblings, keep the groups whose siblings differ, and move the policy by the clipped policy gradient on exactly the
tokens it sampled. Every seed is addressed by (run, step, group, sample): a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain import runlog
from posttrain.config import StarPORun, TrainingWorld, load, run
from posttrain.types import SamplingParams, Trajectory, UserError, address

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from envs.protocol import Episode
    from posttrain.chat import Chat
    from posttrain.curriculum import Place
    from posttrain.learner import Batch, Learner, Measured
    from posttrain.model_card import Result
    from posttrain.runlog import Tracker
    from posttrain.sampler import Sampler
    from posttrain.starpo.alarms import Alarm


def main(argv: list[str] | None = None) -> None:
    cfg, args = load(StarPORun, "configs/phase3_starpo.yaml", argv, _arguments)

    out = Path(cfg.output_dir)
    runlog.keep_private(out)

    import torch
    from transformers import set_seed

    from posttrain import checkpoint, cockpit, curriculum, distillation, model_card, models, parallel, plan, training
    from posttrain.evaluation.former import FormerTasks
    from posttrain.evaluation.tasks import hub_sets
    from posttrain.metrics import paired_difference
    from posttrain.rollout import open_sampler
    from posttrain.starpo.alarms import not_finite

    cfg = models.settle(cfg)
    settings = cfg.model_dump(mode="json")
    if runlog.is_main_process():
        try_worlds(cfg)
        runlog.say(cockpit.reward_table(cfg, share_out(cfg.worlds, cfg.rollout.groups, 1)))
        models.preflight(cfg, resume=args.resume, data_sets=hub_sets(cfg.evaluation.suites))
        if args.resume:
            training.same_run(out, settings)
        checkpoint.claim(out, args.resume)
        training.remember_run(out, settings, args.resume)
    device = models.resolve_device(cfg.device)
    parallel.start(device)
    set_seed(cfg.seed)  # for new adapters; whatever is drawn later has a seed of its own

    found = resume_from(out, runlog.say) if args.resume else None
    if found:  # what was chosen then rounds as it did then
        cfg = cockpit.intervene(cfg, read_state(found).get("plan", {}))
    planned = plan.make(cfg, device)
    cfg = cockpit.intervene(cfg, planned.changes)
    for words in (planned.table(), *planned.warnings):
        runlog.say(words)

    model, chat = models.load(cfg.model, device=cfg.device, chat_template=cfg.chat.template)
    learner = prepare(cfg, model, chat)
    sampler = open_sampler(learner.policy, chat, cfg.rollout.engine, cfg.rollout.max_context, cfg.rollout.vllm_memory)
    precision = torch.autocast(device.type, dtype=torch.bfloat16, enabled=bool(cfg.trainer.bf16))
    former = None
    if cfg.distillation is not None:  # while the policy is the model that it starts from
        with precision, models.no_bars():
            former = distillation.Distillation(learner, distillation.answered(cfg, sampler, chat))
        learner.distil = former.backward if cfg.distillation.coef else None
    former_tasks = FormerTasks(cfg, chat)
    progress = runlog.Progress(cfg.trainer.max_steps, "phase 3")
    progress.say(f"phase 3: {training.describe(cfg, learner.model, device)}")
    state: dict[str, Any] = {"step": 0, "best": -1.0, "best_step": 0, "best_won": {}, "empty_steps": 0, "tokens": 0}
    state |= {"curriculum": curriculum.start(cfg.worlds), "alarms": {}, "collapse": {}, "interventions": []}
    state |= {"stopped_early": False, "plan": planned.changes, "told": False}

    def best() -> Path:
        return out / f"best-{state['best_step']}"

    if found:
        state |= load_state(found, learner)
        progress.say(f"Resuming from {found}.")
        progress.start = state["step"]
        for intervention in state["interventions"]:
            cfg = learner.cfg = cockpit.intervene(cfg, intervention["changes"])
        if parallel.total(not checkpoint.is_whole(best()), device) > 0:
            progress.say(f"{best().name} is damaged: {found.name} stands in for it until the next evaluation.")
            state.update(best=-1.0, best_step=state["step"], best_won={})
            save_state(best(), learner, chat, state)
    if args.resume:
        drop_later(out, state["step"])
    metrics = runlog.MetricsFile(out / "metrics.jsonl", after_step=state["step"] or None, but_not="final/")
    runlog.MetricsFile(out / "transcripts.jsonl", after_step=state["step"] or None)  # steps that will be played again
    tracker = runlog.start_tracker(
        cfg.report_to, project="posttrain", run_name=cfg.run_name or out.name, config=settings
    )

    watch = cockpit.Watch(cfg, progress.say, tracker.alert, learner.exact)
    raised: list[Alarm] = []  # in this step

    def report(step: int, row: dict[str, float]) -> None:
        metrics.write(row, step)
        tracker.log(row, step)
        raised.extend(watch.see(state, step, row))
        shown = {key.split("/", 1)[1]: value for key, value in row.items() if key.endswith("/success")}
        progress.update(step, **shown)

    def validate(step: int) -> None:
        began = time.perf_counter()
        won: dict[str, list[bool]] = {}
        with precision:
            row = evaluate(cfg, sampler, chat, cfg.evaluation.split, cfg.evaluation.episodes, won=won)
        better = not state["best_won"]
        if state["best_won"]:
            gain, error = paired_difference(state["best_won"], won)
            row |= {"evaluation/over_best": gain, "evaluation/over_best_error": error}
            needed = 0.0 if step == cfg.trainer.max_steps else error  # within noise, what was trained longer
            better = gain > needed + 1e-9
            progress.say(
                f"step {step}: {row['evaluation/success']:.1%} of {cfg.evaluation.split} levels won, {100 * gain:+.1f}"
                f" points against step {state['best_step']} on the same levels; a new best needs more than"
                f" {100 * needed:.1f}: " + ("the new best" if better else f"step {state['best_step']} stays it")
            )
        if former is not None:
            row["evaluation/distillation_kl"] = former.measure()
        with precision:
            row |= former_tasks.measure(sampler, learner)
        report(step, row | {"seconds/evaluation": time.perf_counter() - began})
        broken = not_finite(state["alarms"])
        if broken and step == 0:
            raise UserError(f"{cfg.model.name_or_path} cannot be trained: {broken}.")
        if better and not broken:
            state.update(best=row["evaluation/success"], best_step=step, best_won=won)
            save_state(best(), learner, chat, state)

    with runlog.StopSignals() as stop, models.no_bars():
        if state["step"] == 0:
            validate(0)
        ahead = () if state["stopped_early"] else range(state["step"] + 1, cfg.trainer.max_steps + 1)
        for step in ahead:
            # 1. play: groups of siblings, every group on a fresh level
            began = time.perf_counter()
            raised.clear()
            with precision:
                groups = rollout(cfg, sampler, chat, step, state["curriculum"])
            played = time.perf_counter()
            episodes = [trajectory for group in groups for trajectory in group]
            state["curriculum"] = curriculum.after_step(cfg.worlds, state["curriculum"], episodes, step)

            # 2. judge: raw rewards say which groups can teach something, and how good each episode was among its own
            judged = judge(cfg, groups, learner)
            row = cockpit.describe(groups, judged.spread, judged.kept)
            if due(cfg.diagnostics.every, step) and cfg.protocol.think:
                row |= cockpit.thoughts_and_prompts(cfg, learner, chat, groups, step, state["collapse"], progress.say)

            # 3. learn: the clipped policy gradient, a mean over the sampled tokens of all kept groups of all processes
            judged_at = time.perf_counter()
            state["empty_steps"] = 0 if judged.kept else state["empty_steps"] + 1
            if judged.kept:
                row |= learn(cfg, learner, groups, judged, step)
            state["step"], state["tokens"] = step, state["tokens"] + int(row["rollout/tokens"])
            row |= {
                "tokens": state["tokens"],
                "seconds/rollout": played - began,
                "seconds/update": time.perf_counter() - judged_at,
                "rollout/tokens_per_second": row["rollout/tokens"] / (played - began),
                "memory": cockpit.memory(device),
            }
            report(step, row)

            # 4. look: transcripts, held-out levels and the best policy so far, a checkpoint to resume from
            last = step == cfg.trainer.max_steps
            state["told"] = tell(cfg, out, step, groups, tracker, progress.say, state["told"])
            if last or step % cfg.evaluation.every == 0:
                validate(step)
            if changes := cockpit.remedy(cfg, learner, raised, len(state["interventions"])):
                cfg = go_back(learner, state, step, raised, changes, best())
                words = f"step {step}: back to the policy of step {state['best_step']}, with {changes}"
                progress.say(words)
                tracker.alert("went back", words)
                metrics.write({"intervention/back_to": state["best_step"], "intervention/changes": changes}, step)
            elif any(alarm.severity == "stop" for alarm in raised) and (
                cfg.diagnostics.early_stop or state["empty_steps"] >= cfg.algorithm.max_empty_steps
            ):
                progress.say(f"step {step}: stopped early, the alarm above says why.")
                last = state["stopped_early"] = True
            elif solved(cfg, state, row["rollout/success"]):
                progress.say(f"step {step}: stopped early, every level is won and nothing is left to learn from.")
                last = state["stopped_early"] = True
            stopping = parallel.total(stop.requested, device) > 0
            if last or stopping or step % cfg.checkpoint.every == 0:
                save_state(out / f"checkpoint-{step}", learner, chat, state)
                drop_old(out, cfg.checkpoint.keep)
            if stopping:
                stop.leave()
            if last:
                break

        # the policy handed over is the one that did best on the validation levels; the test levels see only that one
        broken = not_finite(state["alarms"])  # the same in all processes, which see the same rows
        load_state(best(), learner)
        with precision, stop.at_once("the closing evaluation"):
            row = evaluate(cfg, sampler, chat, cfg.evaluation.final_split, cfg.evaluation.final_episodes, name="final")
        report(cfg.trainer.max_steps, row)
    progress.close()
    tracker.finish()
    if parallel.rank() == 0:
        told = model_card.record("phase3", settings, state["best_step"], results=test_results(cfg, row))
        final = models.save(
            out / "final", learner.model, chat, settings,
            source=cfg.model, history=[*model_card.history(cfg.model.name_or_path), told],
            phase="phase3", step=state["best_step"],
        )  # fmt: skip
        print(f"Best on {cfg.evaluation.split} levels: step {state['best_step']}.", end=" ")
        print(f"On {cfg.evaluation.final_split} levels:")
        for world in cfg.worlds:
            success, low, high = (row[f"final/{world.name}/{key}"] for key in ("success", "low", "high"))
            crashed = row[f"final/{world.name}/crashed"]
            print(
                f"  {world.name}: {success:.1%} [{low:.1%}, {high:.1%}] of {cfg.evaluation.final_episodes} episodes"
                + (f", {crashed} of which raised and count as lost" if crashed else "")
            )
        print(f"Memory: at most {cockpit.memory(device):.2f} GiB; planned {plan.gib(planned.peak)} GiB.")
        print(f"Handed over: {final}  (curves: {out / 'metrics.jsonl'})")
        if not broken:
            print(
                f"Next: python inference_with_improved_settings.py model.name_or_path={final}"
                f" --play {cfg.worlds[0].name}"
            )
    parallel.barrier()
    parallel.stop()
    if broken:
        raise UserError(
            f"The run failed: {broken}. {out / 'final'} was made from {best().name}, the best healthy policy on the"
            f" {cfg.evaluation.split} levels. Start again with a lower trainer.learning_rate or trainer.bf16=false, and"
            " another output_dir."
        )


def due(every: int, step: int) -> bool:
    """The first step and every so many; never with 0."""
    return every > 0 and (step == 1 or step % every == 0)


def try_worlds(cfg: StarPORun) -> None:
    """Every world is there, takes its options and has levels in every split; otherwise a UserError."""
    import envs

    share_out(cfg.worlds, cfg.rollout.groups, 1)
    held_out = (cfg.evaluation.split, cfg.evaluation.final_split)
    for n, world in enumerate(cfg.worlds):
        stages = [stage.options for stage in world.curriculum] or [{}]
        for number, options in enumerate(stages):
            try:
                made = envs.make(world.name, **world.options | options)
                for split in ("train", *(held_out if number == len(stages) - 1 else ())):
                    made.reset(seed=0, options={"split": split})
            except (Exception, SystemExit) as problem:  # a world may raise anything
                stage = f".curriculum.{number}" if world.curriculum else ""
                words = str(problem)
                if not isinstance(problem, ValueError | TypeError):
                    words = f"it raised {type(problem).__name__}: {problem}. See python -m envs.check {world.name}."
                raise UserError(f"worlds.{n}{stage} ({world.name}): {words}") from problem


# ------------------------------------------------------------------------------------------------------ 1. play


def rollout(
    cfg: StarPORun, sampler: Sampler, chat: Chat, step: int, places: dict[str, Place]
) -> list[list[Trajectory]]:
    """All groups of a step, played by all processes together; siblings share the level, not their luck.

    `places` says in which stage of its curriculum each world is.
    """
    import envs
    from envs.protocol import Protocol
    from posttrain import curriculum, parallel
    from posttrain.rollout import set_up

    worlds = share_out(cfg.worlds, cfg.rollout.groups, step)
    stages = {name: place["stage"] for name, place in places.items()}
    size = cfg.rollout.num_generations
    members = [(group, sample) for group in parallel.mine(len(worlds)) for sample in range(size)]
    episodes, seeds = [], []
    for group, sample in members:
        world = worlds[group]
        options, protocol = curriculum.conditions(
            world, Protocol(**cfg.protocol.model_dump()), stages.get(world.name, 0)
        )
        level_seed = address(cfg.seed, "level", step, group)
        noise_seed = address(cfg.seed, "noise", step, group, sample)
        episodes.append(set_up(envs.make(world.name, **options), protocol, level_seed, "train", noise_seed))
        seeds.append(address(cfg.seed, "sample", step, group, sample))
    trajectories = play_all(cfg, sampler, chat, episodes, cfg.rollout.temperature, seeds)
    for (group, _), trajectory in zip(members, trajectories, strict=True):
        trajectory.group, trajectory.stage = group, stages.get(trajectory.world)
    return parallel.gather([trajectories[start : start + size] for start in range(0, len(trajectories), size)])


def play_all(
    cfg: StarPORun,
    sampler: Sampler,
    chat: Chat,
    episodes: list[Episode | Trajectory],
    temperature: float,
    seeds: list[int],
) -> list[Trajectory]:
    """`posttrain.rollout.play` under the limits of this run."""
    from posttrain.rollout import play

    return play(
        sampler,
        chat,
        episodes,
        SamplingParams(max_new_tokens=cfg.rollout.max_completion_length, temperature=temperature),
        seeds,
        slots=cfg.rollout.slots or cfg.rollout.groups * cfg.rollout.num_generations,
        max_context=cfg.rollout.max_context,
        context=cfg.rollout.context,
        context_turns=cfg.rollout.context_turns,
    )


def share_out(worlds: list[TrainingWorld], groups: int, step: int) -> list[TrainingWorld]:
    """Which world each group of a step plays: fixed numbers first, the rest by weight, evenly over the steps."""
    fixed = [world for world in worlds for _ in range(world.groups or 0)]
    free = [world for world in worlds if world.groups is None]
    if len(fixed) > groups or (len(fixed) < groups and not free):
        raise UserError(f"worlds[].groups add up to {len(fixed)}, but rollout.groups is {groups}: make them fit.")
    total = sum(world.weight for world in free)
    ahead = [0.0] * len(free)
    chosen: list[TrainingWorld] = []
    places = groups - len(fixed)
    for _ in range(step * places):  # every place goes to the world that is furthest behind its share
        ahead = [a + world.weight / total for a, world in zip(ahead, free, strict=True)]
        most = ahead.index(max(ahead))
        ahead[most] -= 1.0
        chosen.append(free[most])
    return fixed + chosen[len(chosen) - places :]


# ----------------------------------------------------------------------------------------------------- 2. judge


class Judged(NamedTuple):
    """What each group earned, which groups are kept, and which of their episodes are trained on."""

    rewards: list[list[float]]  # [P][G] raw rewards, penalties included; nan for an episode whose world raised
    members: list[list[bool]]  # [P][G] whether it is in its group's statistics: no crash, and chosen by `within`
    trains: list[list[bool]]  # [P][G] whether its tokens may count in the loss
    spread: list[float]  # [P] standard deviation of the rewards in the group
    weights: list[float]  # [P] what the group's advantages are multiplied by
    kept: list[int]  # numbers of the groups to train on


def judge(cfg: StarPORun, groups: list[list[Trajectory]], learner: Learner | None = None) -> Judged:
    """The group filter, on raw rewards; episodes whose world raised are in no statistic.

    learner: asked for entropies where the filter's metric is made of them.
    """
    import torch

    from posttrain.learner import Batch
    from posttrain.starpo import filters

    algorithm, chosen = cfg.algorithm, cfg.algorithm.filter
    alive = [(number, sample) for number, group in enumerate(groups) for sample, t in enumerate(group) if not t.crashed]
    played = [groups[number][sample] for number, sample in alive]
    negative = [t for t in played if t.reward < 0]
    if algorithm.advantage == "maxrl" and negative:
        raise UserError(
            f"{negative[0].world} paid {negative[0].reward:g}, and maxrl divides by the mean reward of a group: play"
            " worlds that pay 0 or more (sokoban: options: {reward: sparse}), or take another algorithm.advantage."
        )
    group_B = torch.tensor([number for number, _ in alive], dtype=torch.long)
    rewards_B = torch.tensor([t.reward for t in played], dtype=torch.float64)
    lengths_B = torch.tensor([t.tokens for t in played], dtype=torch.float64)
    entropy_B = None
    if chosen.metric.startswith("entropy"):
        assert learner is not None
        batch = Batch.of(played)
        entropy_B = torch.zeros(len(played), dtype=torch.float64)
        entropy_B = entropy_B.index_add(0, batch.episode_S, learner.entropies(batch).double()) / lengths_B.clamp(min=1)

    def scores(metric: str) -> torch.Tensor:
        return filters.group_scores(
            metric, group_B, rewards_B, groups=len(groups), entropy_B=entropy_B, lengths_B=lengths_B
        )

    within_B = torch.ones(len(alive), dtype=torch.bool)
    if chosen.within is not None:
        within_B = filters.within_group(rewards_B, group_B, chosen.within)
    members = [[False] * len(group) for group in groups]
    for (number, sample), t, within in zip(alive, played, within_B.tolist(), strict=True):
        members[number][sample] = within and t.tokens > 0
    trains = [
        [on and not (algorithm.mask_truncated and t.truncated) for on, t in zip(*both, strict=True)]
        for both in zip(members, groups, strict=True)
    ]
    idle_G = torch.tensor([not any(group) for group in trains])

    spread_G = scores("reward_std")
    worlds = sorted({group[0].world for group in groups})
    env_G = [worlds.index(group[0].world) for group in groups]  # rewards of two environments need not have one scale
    percentile = chosen.strategy == "percentile"
    kept_G = filters.keep_groups(
        scores(chosen.metric).masked_fill(idle_G, math.nan),
        "none" if chosen.strategy == "soft" else chosen.strategy,
        chosen.band[0] if percentile else chosen.value,
        upper=chosen.band[1],
        smallest=not chosen.largest,
        keep_zero=chosen.keep_zero,
        # a level's seed is addressed by run, step and group: a new order each step, the same in all processes
        ties=sorted(range(len(groups)), key=lambda number: address("ties", groups[number][0].level_seed)),
        env_G=env_G,
    )
    weights_G = filters.soft_weights(spread_G, env_G) if chosen.strategy == "soft" else torch.ones(len(groups))
    rewards = [[math.nan if t.crashed else t.reward for t in group] for group in groups]
    return Judged(rewards, members, trains, spread_G.nan_to_num(0.0).tolist(), weights_G.tolist(), kept_G.tolist())


def advantages(
    cfg: StarPORun, batch: Batch, measured: Measured, weights: list[float], trains_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What each sampled token of these episodes is worth, (S,), and what a critic should have said, (S,) or None."""
    import torch

    from posttrain.starpo import advantages as estimators
    from posttrain.starpo import losses

    algorithm, group_B, episode_N, turn_S = cfg.algorithm, batch.group_B, batch.episode_N, batch.turn_S
    rewards_N = torch.tensor([score for t in batch.episodes for score in t.turn_scores], dtype=torch.float64)
    if algorithm.critical and not algorithm.turn_rewards:
        rewards_N = estimators.at_the_end(rewards_N, episode_N)
    penalty_S = torch.zeros(len(turn_S), dtype=torch.float64)
    if algorithm.kl_in == "reward" and measured.reference_S is not None:
        penalty_S = algorithm.beta * losses.kl(measured.old_S, measured.reference_S, algorithm.kl_kind).double()
    paid_N = rewards_N.index_add(0, turn_S, -penalty_S)  # each turn's reward, the KL of its tokens taken off
    rewards_B = torch.zeros(len(group_B), dtype=torch.float64).index_add(0, episode_N, paid_N)
    std = algorithm.advantage_std
    worlds = sorted({t.world for t in batch.episodes})
    env_B = torch.tensor([worlds.index(t.world) for t in batch.episodes])  # statistics of a batch are of each alone
    trained_S, env_S = trains_B[batch.episode_S], env_B[batch.episode_S]
    match algorithm.advantage:
        case "gae" | "bilevel_gae":
            assert measured.values_S is not None
            rewards_S, values_S = estimators.token_rewards(rewards_N, turn_S, -penalty_S), measured.values_S.double()
            if algorithm.advantage == "gae":
                value_S, returns_S = estimators.gae(
                    rewards_S, values_S, batch.episode_S, algorithm.gamma, algorithm.lam
                )
            else:
                value_S, returns_S = estimators.bilevel_gae(
                    rewards_S, values_S, turn_S, episode_N,
                    gamma=algorithm.gamma, gamma_high=algorithm.gamma_high, lam=algorithm.lam,
                )  # fmt: skip
            if algorithm.whiten:
                value_S = estimators.whiten(value_S, trained_S, env_S)
            return value_S, returns_S
        case "turn_return":
            value_N = estimators.turn_advantages(
                paid_N, episode_N, group_B, gamma=algorithm.gamma, over=algorithm.turn_norm, std=std, env_B=env_B
            )
            value_S = value_N[turn_S]
        case "gigpo":
            similar = algorithm.step_similarity
            states = [s for t in batch.episodes for s in (t.state_keys if similar is None else t.observations)]
            buckets_N = estimators.state_buckets(states, group_B[episode_N], similar or 1.0)
            value_N = estimators.gigpo(
                rewards_B, group_B, paid_N, episode_N, buckets_N,
                weight=algorithm.step_weight, gamma=algorithm.step_gamma, std=std,
            )  # fmt: skip
            value_S = value_N[turn_S]
        case "reinforce_pp" | "reinforce_pp_baseline":
            raw_B = torch.zeros(len(group_B), dtype=torch.float64).index_add(0, episode_N, rewards_N)
            baseline = algorithm.advantage == "reinforce_pp_baseline"
            value_S = estimators.reinforce_pp(
                raw_B, group_B, batch.episode_S, -penalty_S, baseline=baseline, trained_S=trained_S, env_S=env_S
            )
        case name:
            value_B = {
                "grpo": lambda: estimators.grpo(rewards_B, group_B, std=std),
                "rloo": lambda: estimators.rloo(rewards_B, group_B),
                "brpo": lambda: estimators.brpo(rewards_B, env_B, std=std),
                "arpo": lambda: estimators.arpo(rewards_B),
                "maxrl": lambda: estimators.maxrl(rewards_B, group_B),
            }[name]()
            value_S = value_B[batch.episode_S]
    return value_S * torch.tensor(weights, dtype=torch.float64)[group_B][batch.episode_S], None


# ----------------------------------------------------------------------------------------------------- 3. learn


def learn(
    cfg: StarPORun, learner: Learner, groups: list[list[Trajectory]], judged: Judged, step: int, fresh: bool = True
) -> dict[str, float]:
    """The kept groups' advantages and the update on them; returns what happened.

    fresh: the policy is still the one that played. Only a test has groups that another one played.
    """
    import torch

    from posttrain.cockpit import gradients_by_spread
    from posttrain.learner import Batch
    from posttrain.starpo.filters import loss_scale

    members = [(number, sample) for number in judged.kept for sample, on in enumerate(judged.members[number]) if on]
    batch = Batch.of([groups[number][sample] for number, sample in members])
    trains_B = torch.tensor([judged.trains[number][sample] for number, sample in members])
    measured = learner.measure(batch)
    advantages_S, returns_S = advantages(cfg, batch, measured, judged.weights, trains_B)
    trained_S = advantages_S[trains_B[batch.episode_S]]
    looked: dict[str, float] = {}
    if cfg.diagnostics.gradients_every and step % cfg.diagnostics.gradients_every == 0:
        everything = Batch.of([t for group in groups for t in group if not t.crashed and t.tokens])
        seen = learner.measure(everything)
        value_S, _ = advantages(cfg, everything, seen, judged.weights, torch.ones(len(everything.episodes)) > 0)
        looked = gradients_by_spread(learner, everything, seen, value_S, judged.spread)
    passes = []
    for iteration in range(cfg.algorithm.num_iterations):
        order = sorted(judged.kept, key=lambda number: address(cfg.seed, "order", step, iteration, number))
        parts = [order[part :: cfg.algorithm.minibatches] for part in range(cfg.algorithm.minibatches)]
        passes.append([[n for n, (number, _) in enumerate(members) if number in part] for part in parts])
    scale = loss_scale(len(judged.kept) / len(groups), cfg.algorithm.filter.loss_scale)
    row = learner.update(batch, measured, advantages_S, returns_S, trains_B, passes, step, scale, fresh)
    return (
        row
        | looked
        | {
            "advantage/mean": trained_S.mean().item(),
            "advantage/std": trained_S.std(correction=0).item(),
            "advantage/max": trained_S.abs().max().item(),
        }
    )


def prepare(cfg: StarPORun, model: Any, chat: Chat) -> Learner:
    """The adapter where one is asked for, memory savings, the reference, and the learner of it all."""
    from posttrain import models, training
    from posttrain.learner import Learner
    from posttrain.policy import without_noise

    without_noise(model)  # the ratio must start at 1, and a resumed run has no random state to restore
    if cfg.model.tuning != "full" and cfg.model.lora.dropout > 0:
        raise UserError("model.lora.dropout must be 0 in phase 3: sampler and learner have to be the same policy.")
    reference = None  # and the teacher of `distillation`; an adapter is switched off instead
    if (cfg.algorithm.beta > 0 or cfg.distillation) and cfg.model.tuning == "full":
        reference = copy.deepcopy(model).requires_grad_(False).eval()
    if (adapter := models.peft_config(cfg.model, model, chat)) is not None:
        from peft import get_peft_model

        with training.refusals_in_words():
            model = get_peft_model(model, adapter)
        models.adapters_in_float32(model)
    if cfg.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if cfg.model.tuning != "full":
            model.enable_input_require_grads()
    return Learner(cfg, model, reference)


# ------------------------------------------------------------------------------------------------------ 4. look


def evaluate(
    cfg: StarPORun,
    sampler: Sampler,
    chat: Chat,
    split: str,
    episodes: int,
    name: str = "evaluation",
    won: dict[str, list[bool]] | None = None,
) -> dict[str, float]:
    """Success on held-out levels, the same ones each time and in every run, with Wilson 95 % intervals.

    A world with a curriculum is played as in its last stage, from the first evaluation on.
    won: is given, for each world, whether each of its levels was won, in the order of the levels.
    """
    import envs
    from envs.protocol import Protocol
    from posttrain import curriculum, parallel
    from posttrain.cockpit import Played, failures
    from posttrain.metrics import wilson
    from posttrain.rollout import set_up

    row: dict[str, float] = {}
    for world in cfg.worlds:
        seeds = [address("evaluation", world.name, split, i) for i in parallel.mine(episodes)]
        options, protocol = curriculum.conditions(world, Protocol(**cfg.protocol.model_dump()), curriculum.TARGET)
        levels = [set_up(envs.make(world.name, **options), protocol, seed, split) for seed in seeds]
        played = play_all(cfg, sampler, chat, levels, cfg.evaluation.temperature, seeds)
        episodes_played = parallel.gather([Played.of(t) for t in played])
        wins, turns = sum(e.success for e in episodes_played), max(1, sum(e.turns for e in episodes_played))
        low, high = wilson(wins, episodes)
        if won is not None:
            won[world.name] = [bool(e.success) for e in episodes_played]
        row |= {
            f"{name}/{world.name}/success": wins / episodes,
            f"{name}/{world.name}/low": low,
            f"{name}/{world.name}/high": high,
            f"{name}/{world.name}/reward": sum(e.reward for e in episodes_played) / episodes,
            f"{name}/{world.name}/invalid_turns": sum(e.invalid_turns for e in episodes_played) / turns,
            f"{name}/{world.name}/turns": turns / episodes,
            f"{name}/{world.name}/logprob": sum(e.logprob for e in episodes_played)
            / max(1, sum(e.tokens for e in episodes_played)),
            f"{name}/{world.name}/crashed": sum(e.crashed for e in episodes_played),
        }
        for failure in failures(episodes_played):
            row[f"{name}/{world.name}/{failure}"] = sum(e.failure == failure for e in episodes_played) / episodes
    row[f"{name}/success"] = sum(row[f"{name}/{world.name}/success"] for world in cfg.worlds) / len(cfg.worlds)
    return row


def test_results(cfg: StarPORun, row: dict[str, float]) -> list[Result]:
    """The last evaluation's success in each environment, for the model card."""
    from posttrain.model_card import Result

    split, levels = cfg.evaluation.final_split, cfg.evaluation.final_episodes
    shares = {env.name: [row[f"final/{env.name}/{key}"] for key in ("success", "low", "high")] for env in cfg.worlds}
    return [
        Result(f"{name}, {split} levels: success", success, levels, low, high)
        for name, (success, low, high) in shares.items()
    ]


def go_back(
    learner: Learner, state: dict[str, Any], step: int, raised: list[Alarm], changes: dict[str, Any], best: Path
) -> StarPORun:
    """Put the best policy so far in place, with its optimizer, and go on from this step with a changed config."""
    from posttrain import cockpit

    goes_on = ("step", "tokens", "curriculum", "best", "best_step", "best_won", "interventions")
    state |= load_state(best, learner) | {key: state[key] for key in goes_on} | {"alarms": {}}
    names = [alarm.name for alarm in raised]
    state["interventions"].append({"step": step, "alarms": names, "back_to": state["best_step"], "changes": changes})
    learner.cfg = cockpit.intervene(learner.cfg, changes)
    if (coef := changes.get("algorithm.entropy_coef")) is not None:
        learner.entropy_coef = learner.entropy_bonus = coef
    return learner.cfg


def solved(cfg: StarPORun, state: dict[str, Any], success: float) -> bool:
    """No group has passed the filter for long because all is won, and no curriculum has harder levels in store."""
    from posttrain.starpo.alarms import LIMITS

    places = state["curriculum"]
    last = all(places[world.name]["stage"] == len(world.curriculum) - 1 for world in cfg.worlds if world.curriculum)
    return last and success >= LIMITS["solved"] and state["empty_steps"] >= cfg.algorithm.max_empty_steps


def tell(
    cfg: StarPORun,
    out: Path,
    step: int,
    groups: list[list[Trajectory]],
    tracker: Tracker,
    say: Callable[[str], None],
    told: bool = False,
) -> bool:
    """Transcripts and pictures of the first group and a group that nobody finished, where due; crashes, always.

    told: whether the run has been told of groups that nobody finished; once is enough. Returns whether it has now.
    """
    from posttrain import parallel

    crashed = [trajectory for group in groups for trajectory in group if trajectory.crashed]
    if crashed:
        t, of = crashed[0], sum(map(len, groups))
        say(
            f"step {step}: {len(crashed)} of {of} episodes crashed and are left out, see transcripts; the first:"
            f" {t.world} raised {t.crashed} (level seed {t.level_seed})"
        )
    stuck = [group for group in groups if all(t.truncated and not t.crashed for t in group)]
    stuck = stuck if due(cfg.transcripts.every, step) else []
    if stuck and not told:
        t = stuck[0][0]
        say(
            f"step {step}: in {len(stuck)} of {len(groups)} groups nobody finished, see transcripts; the first:"
            f" {t.world} (level seed {t.level_seed}). They teach what their rewards tell apart;"
            " algorithm.mask_truncated leaves them out. Said once: `rollout/truncated_groups` goes on counting."
        )
    told = told or bool(stuck)
    if parallel.rank() != 0:
        return told
    to_read = groups[0][: cfg.transcripts.count] if step % cfg.transcripts.every == 0 else []
    more = crashed[: max(1, cfg.transcripts.count)] + [group[0] for group in stuck[:1] if group[0] not in to_read]
    written = write_transcripts(out / "transcripts.jsonl", step, to_read + more)
    shown, pictures = [], []
    for number, (episode, t) in enumerate(zip(written, to_read, strict=False)):
        picture = None if t.crashed else draw(cfg, out / "episodes", f"step-{step}-{number}", t, say)
        if picture:
            shown.append(episode)
            pictures.append(picture)
    if shown:
        tracker.show(shown, pictures, step)
    return told


def write_transcripts(path: Path, step: int, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """Whole episodes as JSON lines, to be read by people; seeds and actions are enough to play one again."""
    kept = "world stage level_key level_seed noise_seed success failure crashed actions turn_rewards messages".split()
    rows = [{"step": step} | {key: getattr(t, key) for key in kept} for t in trajectories]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    return rows


def draw(cfg: StarPORun, folder: Path, name: str, t: Trajectory, say: Callable[[str], None]) -> Path | None:
    """An animated picture of an episode, played again from its seeds and actions; None where its world raises."""
    import envs
    from envs.protocol import Protocol
    from posttrain import curriculum
    from posttrain.report.episodes import gif

    folder.mkdir(parents=True, exist_ok=True)
    chosen = next(world for world in cfg.worlds if world.name == t.world)
    options, _ = curriculum.conditions(chosen, Protocol(**cfg.protocol.model_dump()), t.stage or 0)
    try:
        world = envs.make(t.world, **options)
        world.reset(seed=t.level_seed, options={"split": "train", "noise_seed": t.noise_seed})
        frames = [world.render()]
        for action in t.actions:
            world.step(action)
            frames.append(world.render())
        picture = gif(frames)
    except Exception as error:  # a world may raise here alone
        say(f"no picture of {name}: {t.world} (level seed {t.level_seed}) raised {type(error).__name__}: {error}")
        return None
    path = folder / f"{name}.gif"
    path.write_bytes(picture)
    return path


# ------------------------------------------------------------------------------------------------- checkpoints


def save_state(folder: Path, learner: Learner, chat: Chat, state: dict[str, Any]) -> None:
    """A checkpoint that a run resumes from bit by bit, and that transformers (or peft) can load as it is."""
    from posttrain import checkpoint, parallel

    def write(out: Path) -> None:
        learner.model.save_pretrained(out, **({"selected_adapters": ["default"]} if learner.adapted else {}))
        chat.save(out)
        learner.save(out)
        bonus = {"entropy_coef": learner.entropy_coef, "entropy_bonus": learner.entropy_bonus}
        (out / "state.json").write_text(json.dumps(state | bonus), encoding="utf-8")

    if parallel.rank() == 0:
        checkpoint.save(folder, write, chat_template_sha256=chat.hash, phase=3, step=state["step"])
    parallel.barrier()


def load_state(folder: Path, learner: Learner) -> dict[str, Any]:
    """Put a checkpoint's weights, critic and optimizer in place and return where the run was."""
    from safetensors.torch import load_file

    from posttrain import checkpoint

    checkpoint.verify(folder)
    if learner.adapted:  # read into the CPU's memory: the device need not hold all of it twice
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(learner.model, load_file(folder / "adapter_model.safetensors"))
    else:
        shards = [load_file(file) for file in checkpoint.weight_files(folder)]
        weights = {key: value for shard in shards for key, value in shard.items()}
        missing = learner.model.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
    state = read_state(folder)
    learner.load(folder)
    learner.entropy_coef, learner.entropy_bonus = state["entropy_coef"], state["entropy_bonus"]
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """Where the run was when it wrote this checkpoint."""
    from posttrain import files

    return files.read_json(folder / "state.json", "Remove this checkpoint: --resume then takes an older one.")


def resume_from(out: Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint whose best policy is whole as well: from there the run repeats itself exactly.

    Where no checkpoint has its best, the newest whole one, which then begins to look for a best anew.
    """
    from posttrain import checkpoint

    def best_is_whole(folder: Path) -> None:
        checkpoint.verify(out / f"best-{read_state(folder)['best_step']}")

    whole = checkpoint.latest_good(out, say=say, also=best_is_whole)
    return whole or checkpoint.latest_good(out, say=lambda _: None)


def drop_later(out: Path, step: int) -> None:
    """Checkpoints and bests behind the step that a run resumes from: damaged or unknown to it, and taken for newer."""
    from posttrain import checkpoint, parallel

    if parallel.rank() == 0:
        for number, folder in checkpoint.numbered(out) + checkpoint.numbered(out, "best"):
            if number > step:
                shutil.rmtree(folder)


def drop_old(out: Path, keep: int) -> None:
    """Only the newest `keep` checkpoints stay, and the bests that they know."""
    from posttrain import checkpoint, parallel

    if parallel.rank() == 0:
        folders = checkpoint.numbered(out)
        known = [best for best in checkpoint.numbered(out, "best") if best[0] <= folders[-keep:][0][0]]
        for _, folder in folders[:-keep] + known[:-1]:
            shutil.rmtree(folder)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="go on with the run in output_dir")


if __name__ == "__main__":
    run(main)
