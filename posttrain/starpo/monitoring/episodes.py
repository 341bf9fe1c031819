"""What happened in these episodes?  Their figures, for phase 3 and for the evaluator."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from envs.players import play_scripted, player_names
from envs.process_state import keep_process_state
from envs.protocol import Protocol
from posttrain.config import EnvSection, ProtocolSection, StarPORun
from posttrain.metrics import pass_at, seq_rep_n, wilson_of_levels
from posttrain.rollout import RAISED, open_env
from posttrain.types import Record, Trajectory


class Summary(NamedTuple):
    """The fields of an episode that the figures need, small enough to send to every process."""

    env: str
    level_key: str
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
    context: int  # tokens of the longest context
    reward: float
    earned: float | None  # the reward without penalties; None where the episode crashed
    calls: int | None  # of tools; None without
    failed_calls: int | None

    @classmethod
    def of(cls, t: Trajectory) -> Summary:
        """Summarise an episode of a rollout."""
        same = {name: getattr(t, name) for name in cls._fields if name not in ("actions", "logprob", "earned")}
        same |= {name: bool(same[name]) for name in ("success", "terminated", "truncated", "crashed")}
        same["level_key"] = t.level_key or f"never begun: {t.level_seed}"
        earned = None if t.crashed else float(sum(t.turn_rewards))
        return cls(**same, actions=len(t.actions), logprob=sum(t.sampled_logprobs), earned=earned)

    @classmethod
    def of_record(cls, record: Record) -> Summary:
        """Summarise a row of the evaluator or of a scripted policy; a field that it lacks is 0 or False."""
        kept: Record = {name: record.get(name, 0) for name in cls._fields}
        kept |= {"success": bool(record["success"]), "crashed": bool(kept["crashed"]), "level_key": record["level"]}
        kept |= {"reward": record["return"], "earned": None if kept["crashed"] else record["return"], "actions": 0}
        kept |= {name: record.get(name) for name in ("calls", "failed_calls")}
        return cls(**kept)


def aggregate(episodes: Sequence[Summary]) -> dict[str, float]:
    """Return figures of episodes, by the last part of their names.

    `crashed` and `tokens` are counts. Figures of turns and tokens are means over all of them, the rest over episodes,
    `reward` over those that did not crash (0 if all did).
    """
    rewards = [e.reward for e in episodes if not e.crashed]
    count, turns = len(episodes), max(1, sum(e.turns for e in episodes))
    tokens, actions = sum(e.tokens for e in episodes), sum(e.actions for e in episodes)
    calling = [(e.calls, e.failed_calls or 0) for e in episodes if e.calls is not None]
    calls = sum(made for made, _ in calling)
    of_tools = (
        {
            "tool_calls": calls / len(calling),
            "failed_tool_calls": sum(failed for _, failed in calling) / max(1, calls),
        }
        if calling
        else {}
    )
    return of_tools | {
        "success": sum(e.success for e in episodes) / count,
        "reward": sum(rewards) / max(1, len(rewards)),
        "terminated": sum(e.terminated for e in episodes) / count,
        "truncated": sum(e.truncated for e in episodes) / count,
        "crashed": sum(e.crashed for e in episodes),
        "turns": sum(e.turns for e in episodes) / count,
        "invalid_turns": sum(e.invalid_turns for e in episodes) / turns,
        "format_rate": 1 - sum(e.malformed_turns for e in episodes) / turns,
        "unfinished_turns": sum(e.unfinished_turns for e in episodes) / turns,
        "response_tokens": tokens / turns,
        "effective_actions": sum(e.effective_actions for e in episodes) / max(1, actions),
        "tokens": tokens,
        "logprob": sum(e.logprob for e in episodes) / max(1, tokens),
        "context_tokens": sum(e.context for e in episodes) / count,
        "dropped_turns": sum(e.dropped_turns for e in episodes) / count,
    }


def failure_shares(episodes: Sequence[Summary]) -> dict[str, float]:
    """Return the share of each kind of failure in an environment, unless the kind has the name of another figure."""
    taken = {"", "success", "low", "high", "reward", "invalid_turns", "turns", "crashed", "levels"}
    taken |= {"in_group_std", "kept_groups"}
    names = sorted({e.failure for e in episodes} - taken)
    return {name: sum(e.failure == name for e in episodes) / len(episodes) for name in names}


def describe(groups: list[list[Trajectory]], std: list[float], kept: list[int]) -> dict[str, float]:
    """Return the figures of a rollout. std: of each group's rewards. kept: numbers of the trained groups."""
    trajectories = [t for group in groups for t in group]
    episodes = [Summary.of(t) for t in trajectories]
    alive = [[t.reward for t in group if not t.crashed] for group in groups]
    stds = [each for each, group in zip(std, alive, strict=True) if group] or [0.0]
    answers = [ids for t in trajectories for ids in answers_of(t)]

    out = {f"rollout/{name}": value for name, value in aggregate(episodes).items()}
    out |= {
        "rollout/in_group_std": sum(stds) / len(stds),
        "rollout/in_group_max": sum(max(group) for group in alive if group) / max(1, sum(map(bool, alive))),
        "rollout/kept_in_group_std": sum(std[number] for number in kept) / max(1, len(kept)),
        "rollout/zero_variance_groups": sum(each <= 1e-10 for each in stds) / len(stds),
        "rollout/kept_groups": len(kept),
        "rollout/truncated_groups": sum(all(t.truncated for t in group) for group in groups) / len(groups),
        "rollout/repeated_share": sum(seq_rep_n(ids, 4) for ids in answers) / max(1, len(answers)),
    }
    wins = [(len(group), sum(t.success for t in group)) for group in groups]
    for k in (2**power for power in range(1, min(size for size, _ in wins).bit_length())):
        out[f"rollout/pass_at_{k}"] = sum(pass_at(k, *each) for each in wins) / len(wins)
    for env in sorted({e.env for e in episodes}):
        own = [e for e in episodes if e.env == env]
        figures, numbers = aggregate(own), [n for n, group in enumerate(groups) if group[0].env == env]
        out[f"rollout/{env}/success"] = figures["success"]
        out[f"rollout/{env}/invalid_turns"] = figures["invalid_turns"]
        if stds := [std[n] for n in numbers if alive[n]]:
            out[f"rollout/{env}/in_group_std"] = sum(stds) / len(stds)
        out[f"rollout/{env}/kept_groups"] = sum(n in kept for n in numbers)
        for failure, share in failure_shares(own).items():
            out[f"rollout/{env}/{failure}"] = share
        here = [t for t in trajectories if t.env == env]
        for name, mean in _means([t.reward_parts for t in here]).items():
            out[f"rollout/{env}/reward_{name}"] = mean
        for name, mean in _means([t.logged for t in here]).items():
            out[f"rollout/{env}/logged_{name}"] = mean
    return out


def differs(group: Sequence[Trajectory], penalties: bool = True) -> bool:
    """Return whether the episodes of a group have different rewards, crashed ones aside: only these groups teach.

    penalties: whether these count. What they teach is the format.
    """
    alive = [t for t in group if not t.crashed]
    return len({round(t.reward if penalties else sum(t.turn_rewards), 10) for t in alive}) > 1


def trained_on(cfg: StarPORun, t: Trajectory) -> bool:
    """Return whether the tokens of an episode may count in the loss, if its group is kept."""
    return not t.crashed and t.tokens > 0 and not (cfg.algorithm.mask_truncated_completions and t.truncated)


def teaches(cfg: StarPORun, group: Sequence[Trajectory]) -> bool:
    """Return whether the rewards of a group differ and one of its episodes is trained on."""
    return differs(group) and any(trained_on(cfg, t) for t in group)


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each key over the rows that have it: a reward function applies to some answers only."""
    names = dict.fromkeys(name for each in rows for name in each)
    return {name: fmean(each[name] for each in rows if name in each) for name in names}


def describe_evaluation(name: str, by_env: dict[str, list[Summary]]) -> dict[str, float]:
    """Return the figures of an evaluation, with Wilson 95 % intervals of each success. name: evaluation or final."""
    row: dict[str, float] = {}
    for env, episodes in by_env.items():
        figures = aggregate(episodes)
        low, high = wilson_of_levels([e.success for e in episodes], [e.level_key for e in episodes])
        row |= {
            f"{name}/{env}/success": figures["success"],
            f"{name}/{env}/low": low,
            f"{name}/{env}/high": high,
            f"{name}/{env}/reward": figures["reward"],
            f"{name}/{env}/invalid_turns": figures["invalid_turns"],
            f"{name}/{env}/turns": figures["turns"],
            f"{name}/{env}/logprob": figures["logprob"],
            f"{name}/{env}/crashed": figures["crashed"],
            f"{name}/{env}/levels": len({e.level_key for e in episodes}),
        }
        for failure, share in failure_shares(episodes).items():
            row[f"{name}/{env}/{failure}"] = share
    row[f"{name}/success"] = sum(row[f"{name}/{env}/success"] for env in by_env) / len(by_env)
    return row


def reward_table(cfg: StarPORun, played: Sequence[EnvSection], episodes: int = 16) -> str:
    """Return a table of the smallest and largest reward of an episode of each environment, for the start of a run.

    The expert and the scripted policies each play training levels under the run's limits, one action a turn. A model
    may earn less or more, and format penalties are added.

    Args:
        played: the environment of each group of a step.
        episodes: of each player.
    """
    rows: list[tuple[str, str, str]] = []
    widths: list[float] = []
    for env in cfg.envs:
        earned = scripted_returns(env, cfg.protocol, episodes)
        seen = f"{min(earned):g} to {max(earned):g} ({len(earned)} episodes)" if earned else "not observed"
        rows.append((env.title, f"{sum(group.title == env.title for group in played)} groups", seen))
        widths += [max(earned) - min(earned)] if earned else []
    lines = [f"  {name:<20} {groups:>12}   {seen}" for name, groups, seen in rows]
    lines.insert(0, "groups of the first step, and what an episode earns when scripted policies play it")
    if cfg.algorithm.keeps_scale and len(widths) > 1 and max(widths) > 2 * min(widths):
        lines.append(
            f"WARNING: with `algorithm.advantage: {cfg.algorithm.advantage}` as set here, advantages are as large as"
            " rewards, so the environment with the widest range outweighs the others. Give them one scale"
            " (sokoban: options: {reward: sparse}), or divide by a deviation (advantage: grpo, advantage_std: true)."
        )
    return "\n".join(lines)


def scripted_returns(section: EnvSection, limits: ProtocolSection, episodes: int) -> list[float]:
    """Return the reward of each episode of the expert and the scripted policies, without episodes that raise."""
    earned: list[float] = []
    # an environment may raise anything, and a run goes on without this table
    with contextlib.suppress(*RAISED), keep_process_state(section.title):
        env = open_env(section)
        env.reset(seed=0)
        protocol = Protocol.of(env, **limits.arguments())
        for player in player_names(env):
            for seed in range(episodes):
                with contextlib.suppress(*RAISED):
                    episode = play_scripted(open_env(section), player, protocol, seed, "train")
                    earned.append(round(sum(turn.reward for turn in episode.past), 6))
    return [each for each in earned if math.isfinite(each)]


def answers_of(trajectory: Trajectory) -> Iterator[list[int]]:
    """Yield the sampled tokens of each turn."""
    ids, start = trajectory.sampled_ids, 0
    for count in trajectory.turn_tokens:
        yield ids[start : start + count]
        start += count


def costs(row: dict[str, float], tokens: int, rollout: float, update: float, device: torch.device) -> dict[str, float]:
    """Return the costs of a step. tokens: sampled in all steps so far. rollout, update: seconds in this step."""
    return {
        "tokens": tokens,
        "seconds/rollout": rollout,
        "seconds/update": update,
        "rollout/tokens_per_second": row["rollout/tokens"] / rollout,
        "memory": memory(device),
    }


def memory(device: torch.device) -> float:
    """Return the peak memory of this process in GiB, of the GPU if it uses one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
