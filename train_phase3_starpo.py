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
import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain import runlog
from posttrain.config import StarPORun, TrainingWorld, load, run
from posttrain.types import SamplingParams, Segment, Trajectory, UserError, address

if TYPE_CHECKING:
    import torch

    from envs.protocol import Episode
    from posttrain.chat import Chat
    from posttrain.curriculum import Place
    from posttrain.sampler import Sampler


def main(argv: list[str] | None = None) -> None:
    cfg, args = load(StarPORun, "configs/phase3_starpo.yaml", argv, _arguments)

    out = Path(cfg.output_dir)
    runlog.keep_private(out)

    import torch

    from posttrain import checkpoint, curriculum, models, parallel, training
    from posttrain.rollout import open_sampler

    settings = cfg.model_dump(mode="json")
    if runlog.is_main_process():
        try_worlds(cfg)
        models.preflight(cfg, resume=args.resume)
        training.same_run(out, settings)
        checkpoint.claim(out, args.resume)
        training.remember_run(out, settings)
    device = models.resolve_device(cfg.device)
    parallel.start(device)

    model, chat = models.load(cfg.model, device=cfg.device, chat_template=cfg.chat.template)
    model, optimizer = prepare(cfg, model, chat)
    progress = runlog.Progress(cfg.trainer.max_steps, "phase 3")
    progress.say(f"phase 3: {training.describe(model, device)}")
    state: dict[str, Any] = {"step": 0, "best": -1.0, "best_step": 0, "empty_steps": 0, "tokens": 0}
    state["curriculum"] = curriculum.start(cfg.worlds)
    if args.resume and (found := checkpoint.latest_good(out, say=progress.say)):
        state |= load_state(found, model, optimizer)
        progress.say(f"Resuming from {found}.")
        drop_later(out, state["step"])
        progress.start = state["step"]
    sampler = open_sampler(policy_of(model), chat, cfg.rollout.engine)
    precision = torch.autocast(device.type, dtype=torch.bfloat16, enabled=cfg.trainer.bf16)
    metrics = runlog.MetricsFile(out / "metrics.jsonl", after_step=state["step"] or None)
    runlog.MetricsFile(out / "transcripts.jsonl", after_step=state["step"] or None)  # steps that will be played again
    tracker = runlog.start_tracker(
        cfg.report_to, project="posttrain", run_name=cfg.run_name or out.name, config=settings
    )

    def report(step: int, row: dict[str, float]) -> None:
        metrics.write(row, step)
        tracker.log(row, step)
        shown = {key.split("/", 1)[1]: value for key, value in row.items() if key.endswith("/success")}
        progress.update(step, **shown)

    def validate(step: int) -> None:
        with precision:
            row = evaluate(cfg, sampler, chat, cfg.evaluation.split, cfg.evaluation.episodes)
        report(step, row)
        if row["evaluation/success"] > state["best"]:
            state.update(best=row["evaluation/success"], best_step=step)
            save_state(out / "best", model, chat, optimizer, state)

    with runlog.StopSignals() as stop, models.no_bars():
        if state["step"] == 0:
            validate(0)
        for step in range(state["step"] + 1, cfg.trainer.max_steps + 1):
            # 1. play: groups of siblings, every group on a fresh level
            began = time.perf_counter()
            with precision:
                groups = rollout(cfg, sampler, chat, step, state["curriculum"])
            played = time.perf_counter()
            episodes = [trajectory for group in groups for trajectory in group]
            state["curriculum"] = curriculum.after_step(cfg.worlds, state["curriculum"], episodes, step)

            # 2. judge: raw rewards say which groups can teach something, and how good each episode was among its own
            judged = judge(cfg, groups)
            row = describe(groups, judged)

            # 3. learn: the clipped policy gradient, a mean over the sampled tokens of all kept groups of all processes
            state["empty_steps"] = 0 if judged.kept else state["empty_steps"] + 1
            if judged.kept:
                row |= update(cfg, model, optimizer, groups, judged, step)
            elif state["empty_steps"] >= cfg.algorithm.max_empty_steps:
                raise UserError(nothing_to_learn(state["empty_steps"], out))
            state["step"], state["tokens"] = step, state["tokens"] + int(row["rollout/tokens"])
            row |= {
                "tokens": state["tokens"],
                "seconds/rollout": played - began,
                "seconds/update": time.perf_counter() - played,
                "rollout/tokens_per_second": row["rollout/tokens"] / (played - began),
            }
            report(step, row)

            # 4. look: transcripts, held-out levels and the best policy so far, a checkpoint to resume from
            last = step == cfg.trainer.max_steps
            to_read = groups[0][: cfg.transcripts.count] if step % cfg.transcripts.every == 0 else []
            crashed = [trajectory for trajectory in episodes if trajectory.crashed][: cfg.transcripts.count]
            if parallel.rank() == 0:
                write_transcripts(out / "transcripts.jsonl", step, to_read + crashed)
            for t in crashed:
                progress.say(f"step {step}: {t.world} raised {t.crashed} (level seed {t.level_seed}), see transcripts")
            if last or step % cfg.evaluation.every == 0:
                validate(step)
            stopping = parallel.total(stop.requested, device) > 0
            if last or stopping or step % cfg.checkpoint.every == 0:
                save_state(out / f"checkpoint-{step}", model, chat, optimizer, state)
                drop_old(out, cfg.checkpoint.keep)
            if stopping:
                stop.leave()

        # the policy handed over is the one that did best on the validation levels; the test levels see only that one
        load_state(out / "best", model, optimizer)
        with precision:
            row = evaluate(cfg, sampler, chat, cfg.evaluation.final_split, cfg.evaluation.final_episodes, name="final")
        report(cfg.trainer.max_steps, row)
    progress.close()
    tracker.finish()
    if parallel.rank() == 0:
        final = models.save(
            out / "final", model, chat, settings, source=cfg.model, phase="phase3", step=state["best_step"]
        )
        print(f"Best on {cfg.evaluation.split} levels: step {state['best_step']}.", end=" ")
        print(f"On {cfg.evaluation.final_split} levels:")
        for world in cfg.worlds:
            success, low, high = (row[f"final/{world.name}/{key}"] for key in ("success", "low", "high"))
            print(f"  {world.name}: {success:.1%} [{low:.1%}, {high:.1%}] of {cfg.evaluation.final_episodes} episodes")
        print(f"Handed over: {final}  (curves: {out / 'metrics.jsonl'})")
        print(
            f"Next: python inference_with_improved_settings.py model.name_or_path={final} --play {cfg.worlds[0].name}"
        )
    parallel.barrier()
    parallel.stop()


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
            except (ValueError, TypeError) as problem:
                stage = f".curriculum.{number}" if world.curriculum else ""
                raise UserError(f"worlds.{n}{stage} ({world.name}): {problem}") from problem


def nothing_to_learn(steps: int, out: Path) -> str:
    return (
        f"In {steps} steps in a row the episodes of every group scored alike, so there was nothing to learn from. The"
        " levels are too hard or too easy for this model: choose others (worlds[].options), more siblings"
        " (rollout.num_generations) or a higher rollout.temperature, and start again in another output_dir; where the"
        " metric rollout/crashed is not 0, it is the world that needs mending. The last"
        f" checkpoint is in {out}."
    )


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
    """What each group earned, which groups are kept, what each episode is worth."""

    rewards: list[list[float]]  # [P][G] raw rewards, penalties included; nan for an episode whose world raised
    advantages: list[list[float]]  # [P][G], 0 where nothing is to be learned
    tokens: list[list[int]]  # [P][G] sampled tokens that count in the loss
    spread: list[float]  # [P] standard deviation of the rewards in the group
    kept: list[int]  # numbers of the groups to train on


def judge(cfg: StarPORun, groups: list[list[Trajectory]]) -> Judged:
    """Group-relative advantages and the group filter, both from raw rewards."""
    import torch

    from posttrain.starpo.advantages import group_moments, grpo
    from posttrain.starpo.filters import keep_groups

    algorithm = cfg.algorithm

    def score(t: Trajectory) -> tuple[float, int]:
        unused = t.crashed or (algorithm.mask_truncated and t.truncated)
        return math.nan if t.crashed else t.reward, 0 if unused else t.tokens

    scored = [[score(t) for t in group] for group in groups]
    rewards = [[reward for reward, _ in group] for group in scored]
    flat = [(reward, group) for group, row in enumerate(rewards) for reward in row if not math.isnan(reward)]
    reward_B = torch.tensor([reward for reward, _ in flat], dtype=torch.float64)
    group_B = torch.tensor([group for _, group in flat], dtype=torch.long)
    spread_G = torch.zeros(len(rewards), dtype=torch.float64)
    spread_G[group_B] = group_moments(reward_B, group_B)[1]
    advantage = iter(grpo(reward_B, group_B, std=algorithm.advantage_std).tolist())
    chosen = algorithm.filter
    return Judged(
        rewards=rewards,
        advantages=[[0.0 if math.isnan(reward) else next(advantage) for reward in row] for row in rewards],
        tokens=[[tokens for _, tokens in group] for group in scored],
        spread=spread_G.tolist(),
        kept=keep_groups(spread_G, chosen.strategy, chosen.value, keep_zero=chosen.keep_zero).tolist(),
    )


def describe(groups: list[list[Trajectory]], judged: Judged) -> dict[str, float]:
    """The numbers of one rollout; docs/metrics.md says what each means and what to do about it."""
    episodes = [Played.of(t) for group in groups for t in group]
    rewards = [reward for group in judged.rewards for reward in group if not math.isnan(reward)]
    turns, actions = max(1, sum(e.turns for e in episodes)), sum(e.actions for e in episodes)

    def share(name: str) -> float:
        return sum(bool(getattr(e, name)) for e in episodes) / len(episodes)

    out: dict[str, float] = {
        "rollout/reward": sum(rewards) / max(1, len(rewards)),
        "rollout/in_group_std": sum(judged.spread) / len(judged.spread),
        "rollout/zero_variance_groups": sum(spread <= 1e-10 for spread in judged.spread) / len(judged.spread),
        "rollout/kept_groups": len(judged.kept),
        "rollout/success": share("success"),
        "rollout/terminated": share("terminated"),
        "rollout/truncated": share("truncated"),
        "rollout/crashed": sum(e.crashed for e in episodes),
        "rollout/pass_at_g": sum(any(t.success for t in group) for group in groups) / len(groups),
        "rollout/turns": sum(e.turns for e in episodes) / len(episodes),
        "rollout/invalid_turns": sum(e.invalid_turns for e in episodes) / turns,
        "rollout/unfinished_turns": sum(e.unfinished_turns for e in episodes) / turns,
        "rollout/response_tokens": sum(e.tokens for e in episodes) / turns,
        "rollout/effective_actions": sum(e.effective_actions for e in episodes) / max(1, actions),
        "rollout/tokens": sum(e.tokens for e in episodes),
        "rollout/context_tokens": sum(e.context for e in episodes) / len(episodes),
        "rollout/dropped_turns": sum(e.dropped_turns for e in episodes) / len(episodes),
    }
    for world in sorted({e.world for e in episodes}):
        own = [e for e in episodes if e.world == world]
        out[f"rollout/{world}/success"] = sum(e.success for e in own) / len(own)
        if own[0].stage is not None:
            out[f"rollout/{world}/stage"] = own[0].stage
        for failure in sorted({e.failure for e in own if e.failure}):
            out[f"rollout/{world}/{failure}"] = sum(e.failure == failure for e in own) / len(own)
    return out


class Played(NamedTuple):
    """What the statistics need of an episode, small enough to send to every process."""

    world: str
    success: bool
    terminated: bool
    truncated: bool
    crashed: bool
    failure: str
    turns: int
    invalid_turns: int
    unfinished_turns: int
    actions: int
    effective_actions: int
    dropped_turns: int
    tokens: int  # sampled ones
    context: int  # all of the longest context
    reward: float
    stage: int | None

    @classmethod
    def of(cls, t: Trajectory) -> Played:
        return cls(
            world=t.world,
            success=t.success,
            terminated=t.terminated,
            truncated=t.truncated,
            crashed=bool(t.crashed),
            failure=t.failure,
            turns=t.turns,
            invalid_turns=t.invalid_turns,
            unfinished_turns=t.unfinished_turns,
            actions=len(t.actions),
            effective_actions=t.effective_actions,
            dropped_turns=t.dropped_turns,
            tokens=t.tokens,
            context=t.context,
            reward=t.reward,
            stage=t.stage,
        )


# ----------------------------------------------------------------------------------------------------- 3. learn


class Row(NamedTuple):
    """One context of an episode, to be trained on."""

    key: tuple[int, int]  # seed of the episode, number of the segment
    segment: Segment
    advantage: float  # of the episode


def update(
    cfg: StarPORun,
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: list[list[Trajectory]],
    judged: Judged,
    step: int,
) -> dict[str, float]:
    """`num_iterations` passes over the kept groups, `minibatches` optimizer steps each; returns what happened.

    Processes share out the micro-batches, whoever played their episodes: all have the same number of them, or one less.
    """
    import torch

    from posttrain import parallel
    from posttrain.policy import microbatches, token_logprobs
    from posttrain.starpo.losses import kl_k3, ppo_clip

    algorithm, trainer = cfg.algorithm, cfg.trainer
    policy, parameters = policy_of(model), [p for p in model.parameters() if p.requires_grad]
    autocast = torch.autocast(policy.device.type, dtype=torch.bfloat16, enabled=trainer.bf16)
    for setting in optimizer.param_groups:
        setting["lr"] = learning_rate(cfg, step)

    def batches(numbers: list[int]) -> list[list[Row]]:
        """This process's share of these groups as micro-batches: a row is a context with the tokens sampled in it."""
        rows = [
            Row((trajectory.seed, n), segment, judged.advantages[number][sample])
            for number in numbers
            for sample, trajectory in enumerate(groups[number])
            if judged.tokens[number][sample] > 0
            for n, segment in enumerate(trajectory.segments)
        ]
        chosen = list(microbatches([len(row.segment.ids) for row in rows], trainer.micro_batch_tokens))
        return [[rows[i] for i in batch] for batch in chosen[parallel.rank() :: parallel.size()]]

    def logprobs(batch: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, masks = [row.segment.ids for row in batch], [row.segment.mask for row in batch]
        with autocast:
            return token_logprobs(policy, ids, masks, cfg.rollout.temperature)

    def sampled(batch: list[Row]) -> torch.Tensor:
        segments = [row.segment for row in batch]
        values = [lp for s in segments for lp, on in zip(s.logprobs, s.mask, strict=True) if on]
        return torch.tensor(values, device=policy.device)

    model.train()
    old: dict[tuple[int, int], torch.Tensor] = {}  # by key of the row: log-probs of the policy about to be moved
    exact = policy.dtype == torch.float32 and not trainer.bf16
    if not exact:  # sampler and trainer round differently: the ratio must start at 1 all the same
        with torch.no_grad():
            for batch in batches(judged.kept):
                parts = logprobs(batch)[0].cpu().split([row.segment.tokens for row in batch])
                old.update({row.key: part for row, part in zip(batch, parts, strict=True)})
        old = dict(parallel.gather(list(old.items())))

    sums = dict.fromkeys(("loss", "entropy", "clipped", "kl", "tokens", "gap", "grad_norm", "skipped"), 0.0)
    steps, gap = 0, 0.0
    for iteration in range(algorithm.num_iterations):
        order = sorted(judged.kept, key=lambda number: address(cfg.seed, "order", step, iteration, number))
        for part in range(algorithm.minibatches):
            numbers = order[part :: algorithm.minibatches]
            count = sum(tokens for number in numbers for tokens in judged.tokens[number])
            if count == 0:
                continue
            for batch in batches(numbers):
                new_S, entropy_S = logprobs(batch)
                sampler_S = sampled(batch)
                old_S = sampler_S if exact else torch.cat([old[row.key] for row in batch]).to(policy.device)
                lengths = torch.tensor([row.segment.tokens for row in batch], device=policy.device)
                advantage_S = torch.tensor([row.advantage for row in batch], device=policy.device)
                advantage_S = advantage_S.repeat_interleave(lengths)
                loss_S, bites_S = ppo_clip(new_S, old_S, advantage_S, algorithm.epsilon, algorithm.epsilon_high)
                loss = (loss_S - algorithm.entropy_coef * entropy_S).sum() / count
                loss.backward()
                with torch.no_grad():
                    if steps == 0:
                        gap = max(gap, (new_S - sampler_S).abs().max().item())
                    sums["loss"] += loss_S.sum().item()
                    sums["entropy"] += entropy_S.sum().item()
                    sums["clipped"] += bites_S.sum().item()
                    sums["kl"] += kl_k3(new_S, old_S).sum().item()
                    sums["tokens"] += len(new_S)
            parallel.sum_gradients(parameters)
            norm = torch.nn.utils.clip_grad_norm_(parameters, trainer.max_grad_norm).item()
            if math.isfinite(norm):
                optimizer.step()
                sums["grad_norm"] += norm
            else:
                sums["skipped"] += 1
            optimizer.zero_grad(set_to_none=True)
            steps += 1
    tokens = parallel.total(sums["tokens"], policy.device)
    means = {key: parallel.total(sums[key], policy.device) / tokens for key in ("loss", "entropy", "clipped", "kl")}
    return {
        "policy/loss": means["loss"],
        "policy/entropy": means["entropy"],
        "policy/clip_fraction": means["clipped"],
        "policy/kl_to_old": means["kl"],
        "policy/grad_norm": sums["grad_norm"] / max(1, steps - sums["skipped"]),
        "policy/skipped_steps": sums["skipped"],
        "policy/sampler_gap": max(parallel.gather([gap])),
        "policy/learning_rate": learning_rate(cfg, step),
    }


def learning_rate(cfg: StarPORun, step: int) -> float:
    """Of step 1, 2, ...: a linear warm-up, then constant, linear or cosine towards 0 behind the last step."""
    trainer = cfg.trainer
    if step <= trainer.warmup_steps:
        return trainer.learning_rate * step / trainer.warmup_steps
    done = (step - 1 - trainer.warmup_steps) / max(1, trainer.max_steps - trainer.warmup_steps)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}
    return trainer.learning_rate * shape[trainer.lr_scheduler_type]


def prepare(cfg: StarPORun, model: Any, chat: Chat) -> tuple[Any, torch.optim.Optimizer]:
    """The adapter where one is asked for, memory savings, and the optimizer over what is trained."""
    import torch

    from posttrain import models

    for module in model.modules():  # the ratio must start at 1, and a resumed run has no random state to restore
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            vars(module)["attention_dropout"] = 0.0
    if cfg.model.tuning != "full" and cfg.model.lora.dropout > 0:
        raise UserError("model.lora.dropout must be 0 in phase 3: sampler and learner have to be the same policy.")
    if (adapter := models.peft_config(cfg.model, model, chat)) is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    if cfg.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if cfg.model.tuning != "full":
            model.enable_input_require_grads()
    trainer = cfg.trainer
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = {
        "lr": trainer.learning_rate,
        "betas": (trainer.adam_beta1, trainer.adam_beta2),
        "weight_decay": trainer.weight_decay,
    }
    if trainer.optim == "adamw_torch":
        return model, torch.optim.AdamW(parameters, **options)
    from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

    kind = AdamW8bit if trainer.optim == "adamw_8bit" else PagedAdamW8bit
    return model, kind(parameters, **options)


def policy_of(model: Any) -> Any:
    """The transformers model itself; an adapter's layers sit inside it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# ------------------------------------------------------------------------------------------------------ 4. look


def evaluate(
    cfg: StarPORun, sampler: Sampler, chat: Chat, split: str, episodes: int, name: str = "evaluation"
) -> dict[str, float]:
    """Success on held-out levels, the same ones each time and in every run, with Wilson 95 % intervals.

    A world with a curriculum is played as in its last stage, from the first evaluation on.
    """
    import envs
    from envs.protocol import Protocol
    from posttrain import curriculum, parallel
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
        row |= {
            f"{name}/{world.name}/success": wins / episodes,
            f"{name}/{world.name}/low": low,
            f"{name}/{world.name}/high": high,
            f"{name}/{world.name}/reward": sum(e.reward for e in episodes_played) / episodes,
            f"{name}/{world.name}/invalid_turns": sum(e.invalid_turns for e in episodes_played) / turns,
            f"{name}/{world.name}/turns": turns / episodes,
            f"{name}/{world.name}/crashed": sum(e.crashed for e in episodes_played),
        }
        for failure in sorted({e.failure for e in episodes_played if e.failure}):
            row[f"{name}/{world.name}/{failure}"] = sum(e.failure == failure for e in episodes_played) / episodes
    row[f"{name}/success"] = sum(row[f"{name}/{world.name}/success"] for world in cfg.worlds) / len(cfg.worlds)
    return row


def write_transcripts(path: Path, step: int, trajectories: list[Trajectory]) -> None:
    """Whole episodes as JSON lines, to be read by people; seeds and actions are enough to play one again."""
    kept = "world stage level_key level_seed noise_seed success failure crashed actions turn_rewards messages".split()
    with path.open("a", encoding="utf-8") as file:
        for t in trajectories:
            file.write(json.dumps({"step": step} | {key: getattr(t, key) for key in kept}) + "\n")


# ------------------------------------------------------------------------------------------------- checkpoints


def save_state(
    folder: Path, model: Any, chat: Chat, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """A checkpoint that a run resumes from bit by bit, and that transformers (or peft) can load as it is."""
    import torch

    from posttrain import checkpoint, parallel

    def write(out: Path) -> None:
        model.save_pretrained(out)
        chat.save(out)
        torch.save(optimizer.state_dict(), out / "optimizer.pt")
        (out / "state.json").write_text(json.dumps(state), encoding="utf-8")

    if parallel.rank() == 0:
        checkpoint.save(folder, write, chat_template_sha256=chat.hash, phase=3, step=state["step"])
    parallel.barrier()


def load_state(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's weights and optimizer in place and return where the run was."""
    import torch
    from safetensors.torch import load_file

    from posttrain import checkpoint

    checkpoint.verify(folder)
    device = str(policy_of(model).device)
    if (folder / "adapter_model.safetensors").exists():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors", device=device))
    else:
        shards = [load_file(file, device=device) for file in sorted(folder.glob("model*.safetensors"))]
        missing = model.load_state_dict({key: value for shard in shards for key, value in shard.items()}, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location=device, weights_only=True))
    return json.loads((folder / "state.json").read_text(encoding="utf-8"))


def drop_later(out: Path, step: int) -> None:
    """Checkpoints behind the one that a run resumes from are damaged, and would count as the newest."""
    from posttrain import parallel

    for folder in out.glob("checkpoint-*") if parallel.rank() == 0 else ():
        if int(folder.name.rpartition("-")[2]) > step:
            shutil.rmtree(folder)


def drop_old(out: Path, keep: int) -> None:
    """Only the newest `keep` checkpoints stay (and `best`)."""
    from posttrain import parallel

    if parallel.rank() == 0:
        folders = sorted(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
        for folder in folders[:-keep]:
            shutil.rmtree(folder)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="go on with the run in output_dir")


if __name__ == "__main__":
    run(main)
