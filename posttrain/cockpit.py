"""What is phase 3 doing, and is it well?  Figures of a rollout, RAGEN-2's diagnostics, gradients by spread, alarms.

docs/metrics.md says what each figure means and what to do about it.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from envs.check import make_ready, play
from envs.protocol import Protocol
from posttrain import curriculum, parallel
from posttrain.chat import Chat
from posttrain.config import StarPORun, TrainingWorld
from posttrain.cross_score import Pairs, Turn, cross_scores, first_turn_pairs, trajectory_pairs
from posttrain.learner import Batch, Learner, Measured
from posttrain.metrics import seq_rep_n
from posttrain.rollout import thoughts
from posttrain.starpo import alarms, diagnostics
from posttrain.types import Trajectory

SCOPES = {"first_turn": first_turn_pairs, "trajectory": trajectory_pairs}

# ------------------------------------------------------------------------------------------------------------- figures


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
    malformed_turns: int
    unfinished_turns: int
    actions: int
    effective_actions: int
    dropped_turns: int
    tokens: int  # sampled ones
    logprob: float  # sum over the sampled tokens
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
            malformed_turns=t.malformed_turns,
            unfinished_turns=t.unfinished_turns,
            actions=len(t.actions),
            effective_actions=t.effective_actions,
            dropped_turns=t.dropped_turns,
            tokens=t.tokens,
            logprob=sum(t.sampled_logprobs),
            context=t.context,
            reward=t.reward,
            stage=t.stage,
        )


def describe(groups: list[list[Trajectory]], spread: list[float], kept: list[int]) -> dict[str, float]:
    """The figures of one rollout, given each group's deviation of rewards and the groups that are trained on."""
    trajectories = [t for group in groups for t in group]
    episodes = [Played.of(t) for t in trajectories]
    alive = [[t.reward for t in group if not t.crashed] for group in groups]
    rewards = [reward for group in alive for reward in group]
    spreads = [each for each, group in zip(spread, alive, strict=True) if group] or [0.0]
    turns, actions = max(1, sum(e.turns for e in episodes)), sum(e.actions for e in episodes)
    answers = [ids for t in trajectories for ids in answers_of(t)]

    def share(name: str) -> float:
        return sum(bool(getattr(e, name)) for e in episodes) / len(episodes)

    out: dict[str, float] = {
        "rollout/reward": sum(rewards) / max(1, len(rewards)),
        "rollout/in_group_std": sum(spreads) / len(spreads),
        "rollout/in_group_max": sum(max(group) for group in alive if group) / max(1, sum(map(bool, alive))),
        "rollout/kept_in_group_std": sum(spread[number] for number in kept) / max(1, len(kept)),
        "rollout/zero_variance_groups": sum(each <= 1e-10 for each in spreads) / len(spreads),
        "rollout/kept_groups": len(kept),
        "rollout/success": share("success"),
        "rollout/terminated": share("terminated"),
        "rollout/truncated": share("truncated"),
        "rollout/truncated_groups": sum(all(t.truncated for t in group) for group in groups) / len(groups),
        "rollout/crashed": sum(e.crashed for e in episodes),
        "rollout/turns": sum(e.turns for e in episodes) / len(episodes),
        "rollout/invalid_turns": sum(e.invalid_turns for e in episodes) / turns,
        "rollout/format_rate": 1 - sum(e.malformed_turns for e in episodes) / turns,
        "rollout/unfinished_turns": sum(e.unfinished_turns for e in episodes) / turns,
        "rollout/response_tokens": sum(e.tokens for e in episodes) / turns,
        "rollout/repeated_share": sum(seq_rep_n(ids, 4) for ids in answers) / max(1, len(answers)),
        "rollout/effective_actions": sum(e.effective_actions for e in episodes) / max(1, actions),
        "rollout/tokens": sum(e.tokens for e in episodes),
        "rollout/logprob": sum(e.logprob for e in episodes) / max(1, sum(e.tokens for e in episodes)),
        "rollout/context_tokens": sum(e.context for e in episodes) / len(episodes),
        "rollout/dropped_turns": sum(e.dropped_turns for e in episodes) / len(episodes),
    }
    wins = [(len(group), sum(t.success for t in group)) for group in groups]
    for k in (2**power for power in range(1, min(size for size, _ in wins).bit_length())):
        out[f"rollout/pass_at_{k}"] = sum(pass_at(k, *each) for each in wins) / len(wins)
    for world in sorted({e.world for e in episodes}):
        own = [e for e in episodes if e.world == world]
        out[f"rollout/{world}/success"] = sum(e.success for e in own) / len(own)
        out[f"rollout/{world}/invalid_turns"] = sum(e.invalid_turns for e in own) / max(1, sum(e.turns for e in own))
        numbers = [n for n, group in enumerate(groups) if group[0].world == world]
        out[f"rollout/{world}/in_group_std"] = sum(spread[n] for n in numbers) / len(numbers)
        out[f"rollout/{world}/kept_groups"] = sum(n in kept for n in numbers)
        if own[0].stage is not None:
            out[f"rollout/{world}/stage"] = own[0].stage
        for failure in failures(own):
            out[f"rollout/{world}/{failure}"] = sum(e.failure == failure for e in own) / len(own)
    return out


def reward_table(cfg: StarPORun, played: Sequence[TrainingWorld], episodes: int = 16) -> str:
    """The least and the most that an episode of each environment earned, as text for the start of a run.

    played: the environment of each group of a step. An environment does not state its rewards, so its expert and its
    scripted players each play `episodes` training levels (of the last stage of a curriculum) under the run's limits,
    one action a turn. A policy may earn less or more, and format penalties come on top.
    """
    rows, widths = [], []
    for world in cfg.worlds:
        options, protocol = curriculum.conditions(world, Protocol(**cfg.protocol.model_dump()), curriculum.TARGET)
        earned = scripted_returns(world.name, options, protocol, episodes)
        seen = f"{min(earned):g} to {max(earned):g} ({len(earned)} episodes)" if earned else "not observed"
        rows.append((world.name, f"{sum(group.name == world.name for group in played)} groups", seen))
        widths += [max(earned) - min(earned)] if earned else []
    lines = [f"  {name:<20} {groups:>12}   {seen}" for name, groups, seen in rows]
    lines.insert(0, "groups of the first step, and what an episode earns when scripted players play it")
    if cfg.algorithm.keeps_scale and len(widths) > 1 and max(widths) > 2 * min(widths):
        lines.append(
            f"WARNING: with `algorithm.advantage: {cfg.algorithm.advantage}` as this run sets it, advantages are as"
            " large as rewards, so the environment with the widest range outweighs the others. Give them one scale"
            " (sokoban: options: {reward: sparse}), or divide by a deviation (advantage: grpo, advantage_std: true)."
        )
    return "\n".join(lines)


def scripted_returns(name: str, options: dict[str, Any], protocol: Protocol, episodes: int) -> list[float]:
    """What the environment paid in each episode of its expert and its scripted players, as far as none raises."""
    earned: list[float] = []
    with contextlib.suppress(Exception):  # an environment may raise anything, and a run goes on without this table
        for player in ("expert", *make_ready(name, options).players()):
            for seed in range(episodes):
                with contextlib.suppress(Exception):
                    episode = play(name, options, player, protocol, seed, "train")
                    earned.append(round(sum(turn.reward for turn in episode.past), 6))
    return [each for each in earned if math.isfinite(each)]


def failures(episodes: Iterable[Played | Trajectory]) -> list[str]:
    """How these episodes of one world were lost; not where a world's word for it is the name of another figure."""
    taken = {"", "success", "stage", "low", "high", "reward", "invalid_turns", "turns", "crashed"}
    taken |= {"in_group_std", "kept_groups"}
    return sorted({episode.failure for episode in episodes} - taken)


def pass_at(k: int, size: int, won: int) -> float:
    """Chance that k of `size` siblings, `won` of which succeeded, hold a success: 1 - C(size - won, k) / C(size, k).

    The unbiased estimate of pass@k, arXiv 2107.03374, eq. 1.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(4, 4, 1)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(size - won, k) / math.comb(size, k)


def answers_of(trajectory: Trajectory) -> Iterator[list[int]]:
    """The sampled tokens of each turn."""
    ids, start = trajectory.sampled_ids, 0
    for count in trajectory.turn_tokens:
        yield ids[start : start + count]
        start += count


def memory(device: torch.device) -> float:
    """GiB: the most that this process has held, on the GPU where it is on one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


# --------------------------------------------------------------------------------------------------------- diagnostics


def thoughts_and_prompts(
    cfg: StarPORun,
    learner: Learner,
    chat: Chat,
    groups: list[list[Trajectory]],
    step: int,
    state: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, float]:
    """Does a thought still depend on its prompt?  Cross scores over first turns and over turns of whole episodes.

    `state` carries each scope's running scale, first values and regime, which is said when it changes. Processes share
    out the reasonings.
    """
    began = time.perf_counter()
    said = [thoughts(chat, t) for group in groups for t in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    episodes = [
        [Turn(thought.prompt_ids, thought.ids, number) if thought else Turn([], [], number) for thought in found]
        for number, found in zip(numbers, said, strict=True)
    ]
    lengths = [len(turn.reasoning) for turns in episodes for turn in turns]
    row: dict[str, float] = {"rollout/thought_tokens": sum(lengths) / max(1, len(lengths))}
    for scope, choose in SCOPES.items():
        pairs: Pairs = choose(episodes, cfg.diagnostics.pairs, cfg.seed, "diagnostics", step)
        if len(pairs.prompts) < 2:
            continue
        own = list(parallel.mine(len(pairs.reasonings)))
        with learner.autocast():
            scores = cross_scores(
                learner.policy, pairs.prompts, [pairs.reasonings[i] for i in own], temperature=cfg.rollout.temperature
            )
        scores_RN = torch.tensor(parallel.gather(scores.tolist()))
        figures, scale = diagnostics.information(
            scores_RN,
            torch.tensor(pairs.own),
            torch.tensor([len(ids) for ids in pairs.reasonings]),
            torch.tensor(pairs.weights),
            state.get(scope, {}).get("scale"),
        )
        now = [figures["conditional_entropy_token"], figures["mi_tempered"]]
        before = state.get(scope, {"first": now, "regime": None})
        regime = diagnostics.regime(*now, *before["first"])
        if regime != before["regime"]:
            size, words = f"{len(pairs.reasonings)} x {len(pairs.prompts)}", scope.replace("_", " ")
            seconds = time.perf_counter() - began
            say(f"step {step}: thoughts are {regime} ({words}; {size} thoughts and prompts, {seconds:.1f} s so far)")
        state[scope] = {"first": before["first"], "scale": scale, "regime": regime}
        row |= {f"collapse/{scope}/{key}": value for key, value in figures.items()}
    return row | {"seconds/collapse": time.perf_counter() - began}


def gradients_by_spread(
    learner: Learner,
    batch: Batch,
    measured: Measured,
    advantages_S: torch.Tensor,
    spread: list[float],
) -> dict[str, float]:
    """The gradient norms of the policy loss, the entropy and the KL for each quantile of reward spread; no update.

    Each is of a mean over the tokens of its bucket (RAGEN-2, arXiv 2604.06268, section 3). On one process: the others
    wait.
    """
    began = time.perf_counter()
    row: dict[str, float] = {}
    if parallel.rank() == 0:
        bucket_G = diagnostics.buckets(torch.tensor(spread))
        for bucket in range(int(bucket_G.max()) + 1):
            counts_B = bucket_G[batch.group_B] == bucket
            rows = [each for each in batch.rows if counts_B[each.episode]]
            if not rows:
                continue
            norms = diagnostics.gradient_norms(
                learner.losses_of(rows, batch, measured, advantages_S), learner.groups[0]
            )
            for loss, norm in norms.items():
                row[f"gradients/{bucket}/{loss}"] = norm
            own = [deviation for deviation, here in zip(spread, bucket_G.tolist(), strict=True) if here == bucket]
            row[f"gradients/{bucket}/in_group_std"] = sum(own) / len(own)
        row["seconds/gradients"] = time.perf_counter() - began
    return parallel.gather([row])[0] if parallel.size() > 1 else row


# -------------------------------------------------------------------------------------------------------------- alarms


class Watch:
    """Reads every row that is reported; `say` and `alert` tell people. Its memory is plain data for the checkpoint."""

    def __init__(
        self, cfg: StarPORun, say: Callable[[str], None], alert: Callable[[str, str, bool], None], exact: bool
    ) -> None:
        self.say, self.alert = say, alert
        self.sizes = alarms.Sizes(
            groups=cfg.rollout.groups,
            samples=cfg.rollout.num_generations,
            evaluation_episodes=cfg.evaluation.episodes * len(cfg.worlds),
            steps=cfg.trainer.max_steps,
        )
        self.limits: dict[str, float] = {"empty_steps": cfg.algorithm.max_empty_steps}
        if not exact:
            self.limits["sampler_gap"] = alarms.HALF_PRECISION_GAP
        if cfg.algorithm.entropy_target is not None:  # the way up to it is meant
            floor = alarms.LIMITS["entropy_floor"]
            self.limits["entropy_floor"] = max(floor, cfg.algorithm.entropy_target)
        if cfg.algorithm.loss_type != "ppo_clip":  # there the clip bites by design
            self.limits["clip_fraction"] = math.inf

    def see(self, state: dict[str, Any], step: int, row: dict[str, float]) -> list[alarms.Alarm]:
        """The alarms that this row sets off, said; `state["alarms"]` moves on."""
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        raised, state["alarms"] = alarms.watch(state["alarms"], step, numbers, self.sizes, self.limits)
        for alarm in raised:
            self.say(f"ALARM {alarm}")
            self.alert(alarm.name.replace("_", " "), str(alarm), alarm.severity == "stop")
        return raised


def intervene(cfg: StarPORun, changes: dict[str, Any]) -> StarPORun:
    """The run's config with these dotted paths changed."""
    given = cfg.model_dump()
    for path, value in changes.items():
        *sections, key = path.split(".")
        inner = given
        for section in sections:
            inner = inner[section]
        inner[key] = value
    return type(cfg).model_validate(given)


def remedy(cfg: StarPORun, learner: Learner, raised: list[alarms.Alarm], done: int) -> dict[str, Any]:
    """What to change, by dotted path, when the run goes back to its best checkpoint for these alarms; {} for nothing.

    `done`: how often it has been back.
    """
    if done >= cfg.diagnostics.rollbacks:
        return {}
    values = {
        "trainer.learning_rate": cfg.learning_rate,
        "algorithm.filter.strategy": cfg.algorithm.filter.strategy,
        "algorithm.entropy_coef": learner.entropy_coef,
    }
    changes = alarms.rollback(raised, values)
    try:
        intervene(cfg, changes)
    except ValueError:  # the change does not suit this run: a filter where groups have one member
        changes = {"trainer.learning_rate": cfg.learning_rate / 2}
    return changes
