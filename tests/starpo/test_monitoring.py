"""Does monitoring see what happens, say it once, and act only when it is told to?"""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import config, played, policy

import train_phase3_starpo as phase3
from posttrain.plan.selftest import can_share_prefixes
from posttrain.rollout.thoughts import Thought
from posttrain.starpo.monitoring import collapse, watch
from posttrain.starpo.monitoring.collapse import thoughts_and_prompts
from posttrain.starpo.monitoring.episodes import Summary, aggregate, answers_of, describe, reward_table
from posttrain.starpo.monitoring.monitor import Monitor
from posttrain.starpo.run import make_learner
from posttrain.starpo.run_state import LevelRewards, RunState
from posttrain.types import OF_GAMES, Trajectory, words_of


def test_a_figure_of_each_group_and_turn() -> None:
    groups = played(policy())
    groups[0][0].segments[0].ids[5:] = [7] * len(groups[0][0].segments[0].ids[5:])
    scored = phase3.score_and_filter(config(), groups)
    row = describe(groups, scored.std, scored.kept)
    rewards = [t.reward for group in groups for t in group]
    assert row["rollout/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert row["rollout/in_group_max"] == 1 and row["rollout/kept_groups"] == 3
    assert row["rollout/kept_in_group_std"] == pytest.approx(row["rollout/in_group_std"])
    answers = [ids for group in groups for t in group for ids in answers_of(t)]
    assert [len(ids) for ids in answers] == [n for group in groups for t in group for n in t.turn_tokens]
    assert [token for ids in answers for token in ids] == [
        token for group in groups for t in group for token in t.sampled_ids
    ]


def test_the_table_at_the_start_shows_what_episodes_earn(monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.frozen_lake import FrozenLake

    def table(**algorithm: Any) -> str:
        environments = ["frozen_lake", {"name": "sokoban", "options": {"max_length": 2}}]
        cfg = type(config()).model_validate(config(**algorithm).model_dump() | {"envs": environments})
        return reward_table(cfg, [*cfg.envs, cfg.envs[1]])

    lake, sokoban = table().splitlines()[1:]
    assert lake.split()[:6] == ["frozen_lake", "1", "groups", "0", "to", "1"]
    assert sokoban.split()[:6] == ["sokoban", "2", "groups", "-0.8", "to", "10.8"]  # eight steps lost; two, and 11
    assert "WARNING" in table(advantage="arpo")
    monkeypatch.setattr(FrozenLake, "step", lambda self, action: 1 / 0)
    assert "not observed" in table()


def heard(cfg: Any, rows: list[dict[str, float]], state: RunState) -> tuple[list[str], list[str]]:
    said: list[str] = []
    alerts: list[str] = []
    watching = watch.Watch(cfg, said.append, exact=True)
    for step, row in enumerate(rows, 1):
        alerts += [alarm.name for alarm in watching.see(state, step, row)]
    return said, alerts


def test_alarms_are_said_once_and_their_memory_is_plain_data() -> None:
    state = RunState()
    rows = [{"rollout/in_group_std": 0.4, "rollout/success": 0.4, "rollout/reward": 0.4}] * 20
    rows += [{"rollout/in_group_std": 0.02, "rollout/success": 0.3, "rollout/reward": 0.3}] * 22
    said, alerts = heard(config(), rows, state)
    assert alerts == ["variance_collapse", "variance_gone"]
    assert "starpo-s" in said[0] and said[0].startswith("ALARM step ")
    assert json.loads(json.dumps(state.alarms)) == state.alarms != {}


@cache
def chances(share: float, levels: int) -> np.ndarray:
    """Of winning each level, which are unlike each other, for a policy that wins this share of them."""
    ease = np.random.default_rng(0).normal(0, 1.5, levels)
    by_shift = 1 / (1 + np.exp(-ease - np.linspace(-9, 9, 361)[:, None]))
    return by_shift[np.abs(by_shift.mean(1) - share).argmin()]


def chosen(curve: list[float], levels: int, rng: np.random.Generator, stops_early: bool = False) -> int:
    """The step that a run chooses whose policies win these shares, at an evaluation each.

    stops_early: at the last of them, where more were to come.
    """
    trainer, evaluation = SimpleNamespace(max_steps=len(curve) - 1 + stops_early), SimpleNamespace(every=1)
    cfg = SimpleNamespace(trainer=trainer, evaluation=evaluation, rewarded=True)
    monitor: Any = SimpleNamespace(cfg=cfg, say=lambda text: None, words=OF_GAMES)
    state = RunState()
    for step, share in enumerate(curve):
        won = {"line": (rng.random(levels) < chances(share, levels)).tolist()}
        earned = {"line": [float(each) for each in won["line"]]}
        state.stopped_early = stops_early and step == len(curve) - 1
        better, _ = Monitor.compare_with_best(monitor, state, step, won, earned)
        if better:
            state.best_step, state.best_won, state.best_earned = step, won, earned
    return state.best_step


def prompts_monitor(said: list[str], rewarded: bool = True) -> Any:
    trainer, evaluation = SimpleNamespace(max_steps=2), SimpleNamespace(every=1)
    cfg = SimpleNamespace(trainer=trainer, evaluation=evaluation, rewarded=rewarded)
    return SimpleNamespace(cfg=cfg, say=said.append, words=words_of(["prompts", "prompts"]))


def test_an_evaluation_of_prompts_speaks_of_prompts() -> None:
    said: list[str] = []
    state = RunState(best_won={"p": [False, True]}, best_earned={"p": [0.0, 1.0]})
    Monitor.compare_with_best(prompts_monitor(said), state, 1, {"p": [True, True]}, {"p": [1.0, 1.0]})
    assert "step 1: 100.0% of validation prompts solved, +50.0 points against step 0 on the same prompts." in said[0]
    assert words_of(["prompts", "sokoban"]) == words_of([]) == OF_GAMES


@pytest.mark.parametrize("solved", [False, True])
@pytest.mark.parametrize(
    ("earned", "better"),
    [([0.5, 0.6, 0.4, 0.3, 0.9, 0.8], True), ([0.5, 0.6, 0.4, 0.3, 0.0, 0.0], False), ([0.0] * 6, False)],
)
def test_where_success_is_constant_rewards_are_compared(solved: bool, earned: list[float], better: bool) -> None:
    """Six of six levels rise by chance with 1 in 64, four of four with 1 in 16."""
    said: list[str] = []
    won = {"p": [solved] * 6}
    state = RunState(best_won=won, best_earned={"p": [0.0] * 6})
    found, figures = Monitor.compare_with_best(prompts_monitor(said), state, 2, won, {"p": earned})
    assert (found, figures["evaluation/over_best"]) == (better, 0.0)
    assert ("mean reward" in said[0]) == any(earned) and ("The new best." in said[0]) == better
    assert ("without penalties, " in said[0]) == any(earned) and "crashed" not in said[0]
    mixed = {"p": [*won["p"][1:], not solved]}  # success differs between levels: it alone is compared
    assert not Monitor.compare_with_best(prompts_monitor(said), state, 2, mixed, {"p": earned})[0]
    assert "mean reward" not in said[1]


@pytest.mark.parametrize(("before", "after"), [(0, 7), (7, 0), (0, 8), (4, 4)])
def test_a_policy_that_crashes_earns_no_more_than_the_worst(before: int, after: int) -> None:
    """Where rewards are negative, a crashed episode with none would be the best there is."""
    said: list[str] = []
    won = {"p": [False] * 8}

    def earned(crashed: int) -> LevelRewards:
        return {"p": [None] * crashed + [-1.0 - n / 10 for n in range(crashed, 8)]}

    state = RunState(best_won=won, best_earned=earned(before))
    better, _ = Monitor.compare_with_best(prompts_monitor(said), state, 2, won, earned(after))
    # of eight levels, seven are better than the worst one where the former policy alone crashed
    assert better == (before > after), said


def test_the_mean_reward_says_how_it_is_made() -> None:
    """It is not the figure evaluation/ENV/reward, which has penalties and leaves crashed episodes out."""
    said: list[str] = []
    won = {"p": [False] * 2}
    state = RunState(best_won=won, best_earned={"p": [0.25, 0.25]})
    Monitor.compare_with_best(prompts_monitor(said), state, 2, won, {"p": [None, 0.5]})
    assert "mean reward 0.375 without penalties, with the lowest for crashed episodes, +0.125 against" in said[0]


def test_a_crashed_episode_has_no_reward() -> None:
    whole = Trajectory(env="p", level_seed=1, noise_seed=0, turn_rewards=[-1.0], turn_penalties=[-0.5])
    crashed = Trajectory(env="p", level_seed=2, noise_seed=0, crashed="ValueError: x")
    episodes = [Summary.of(whole), Summary.of(crashed)]
    assert [each.earned for each in episodes] == [-1.0, None]
    figures = aggregate(episodes)
    assert (figures["reward"], figures["crashed"]) == (-1.5, 1)


@pytest.mark.parametrize(("wins", "kept"), [(8, True), (5, True), (4, True), (3, False), (0, False)])
def test_without_rewards_the_last_policy_that_is_not_worse_is_kept(wins: int, kept: bool) -> None:
    """Of eight levels, equal policies lose four with a chance of 1 in 16, and five with 1 in 32."""
    said: list[str] = []
    state = RunState(best_step=1, best_won={"p": [True] * 8}, best_earned={"p": [1.0] * 8})
    won = {"p": [n < wins for n in range(8)]}
    monitor = prompts_monitor(said, rewarded=False)
    found, _ = Monitor.compare_with_best(monitor, state, 2, won, {"p": [float(each) for each in won["p"]]})
    assert found == kept and ("kept: this one." if kept else "kept: that of step 1.") in said[0]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("evaluations", [1, 3, 9, 20])
def test_equal_policies_are_seldom_exchanged(share: float, evaluations: int) -> None:
    """The chance is at most .05 in the last evaluation and .05 in those before; of 60 runs 12 would be no chance."""
    rng = np.random.default_rng(0)
    exchanged = sum(chosen([share] * (evaluations + 1), 64, rng) > 0 for _ in range(60))
    assert exchanged <= 11, f"{exchanged} of 60"


@pytest.mark.parametrize(
    ("curve", "least"),
    [
        ([0.25, 0.35, 0.45, 0.55, 0.65, 0.75], 0.60),  # slow and steady
        ([0.4, 0.85, 0.9, 0.92], 0.84),  # the quickstart's
        ([0.3, 0.6, 0.8, 0.5, 0.3, 0.1], 0.59),  # a collapse
        ([0.85, 0.87, 0.9, 0.93, 0.95, 0.97], 0.92),  # from a good start
    ],
)
@pytest.mark.parametrize("stops_early", [False, True])
def test_a_real_gain_is_kept(curve: list[float], least: float, stops_early: bool) -> None:
    rng = np.random.default_rng(0)
    kept = [curve[chosen(curve, 256, rng, stops_early)] for _ in range(40)]
    assert sum(share >= least for share in kept) >= 36, kept


def test_limits_follow_the_run() -> None:
    rounded = [{"policy/sampler_gap": 0.02}]  # a mean that bfloat16 explains
    for exact, told in ((True, ["sampler_gap"]), (False, [])):
        alarms = watch.Watch(config(), print, exact=exact).see(RunState(), 1, rounded[0])
        assert [alarm.name for alarm in alarms] == told
    sizes = watch.Watch(config(), print, exact=True).sizes
    cfg = config()
    assert (sizes.groups, sizes.samples) == (cfg.rollout.groups, cfg.rollout.num_generations)
    assert sizes.evaluation_episodes == cfg.evaluation.episodes * len(cfg.envs)
    clipped = [{"policy/clip_fraction": 0.4}] * 6
    assert heard(config(), clipped, RunState())[1] == ["clip_fraction"]
    gspo = config(loss_type="gspo", aggregation="sequence_mean", epsilon=3e-4, epsilon_high=4e-4)
    assert heard(gspo, clipped, RunState())[1] == []  # there tokens are clipped by design


def test_a_group_whose_members_all_ran_out_of_turns_is_counted() -> None:
    groups: list[list[Trajectory]] = played(policy())
    for t in groups[1]:
        t.truncated = True
    scored = phase3.score_and_filter(config(), groups)
    assert describe(groups, scored.std, scored.kept)["rollout/truncated_groups"] == pytest.approx(1 / 3)


def test_crashed_groups_have_no_std_and_pass_at_k_counts_samples() -> None:
    groups = played(policy())
    for t in groups[0]:
        t.crashed = "OSError: no"
    for group in groups[1:]:
        group[0].success = True
    scored = phase3.score_and_filter(config(), groups)
    row = describe(groups, scored.std, scored.kept)
    assert row["rollout/in_group_std"] == pytest.approx(sum(scored.std[1:]) / 2)
    assert row["rollout/frozen_lake/in_group_std"] == row["rollout/in_group_std"]
    assert row["rollout/zero_variance_groups"] == 0
    assert [row["rollout/pass_at_2"], row["rollout/pass_at_4"]] == pytest.approx([(0.5 + 0.5) / 3, 2 / 3])
    assert "rollout/pass_at_8" not in row


def test_only_first_turns_are_first_turns(tiny_chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn without a thought keeps its place: the second turn of its episode does not stand in for it."""
    groups = played(policy())
    seen: dict[str, list[list[int]]] = {}

    def thoughts(chat: Any, t: Trajectory) -> list[Any]:
        found = [
            Thought(s, begin, end) for s in t.segments for begin, end in zip(s.turn_starts, s.turn_ends, strict=True)
        ]
        return [None, *found[1:]] if t.turn_rewards[-1] else found

    def scores(model: Any, prompts: list[list[int]], reasonings: list[list[int]], **_: Any) -> torch.Tensor:
        seen.setdefault("first", prompts)
        return torch.zeros(len(reasonings), len(prompts))

    monkeypatch.setattr(collapse, "thoughts", thoughts)
    monkeypatch.setattr(collapse, "cross_scores", scores)
    cfg = config()
    learner = make_learner(cfg, policy(), None)  # type: ignore[arg-type]
    row = thoughts_and_prompts(cfg, learner, tiny_chat, groups, 1, RunState(work=10**9), print)
    prefixes = [group[0].segments[0].ids[:5] for group in groups]
    assert sorted(seen["first"]) == sorted(prefixes)
    assert row["rollout/thought_tokens"] > 0


def test_looking_at_thoughts_takes_at_most_a_twentieth_of_the_work(
    tiny_chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in tokens, so that a resumed run looks at the same steps; and every sample is as large as the first."""
    groups, policy_ = played(policy()), policy()
    sent: list[int] = []
    sizes: set[int] = set()

    def thoughts(chat: Any, t: Trajectory) -> list[Any]:
        return [
            Thought(s, begin, end) for s in t.segments for begin, end in zip(s.turn_starts, s.turn_ends, strict=True)
        ]

    def scores(model: Any, prompts: list[list[int]], reasonings: list[list[int]], **_: Any) -> torch.Tensor:
        read = sum(map(len, prompts)) * (1 if can_share_prefixes(policy_) else len(reasonings))
        sent.append(read + len(prompts) * sum(map(len, reasonings)))
        return torch.zeros(len(reasonings), len(prompts))

    monkeypatch.setattr(collapse, "thoughts", thoughts)
    monkeypatch.setattr(collapse, "cross_scores", scores)
    cfg = config()
    learner = make_learner(cfg, policy_, None)  # type: ignore[arg-type]
    state, said, looked = RunState(), [], []
    for step in range(1, 61):
        before = len(sent)
        state.work += 2000
        row = thoughts_and_prompts(cfg, learner, tiny_chat, groups, step, state, said.append)
        assert sum(sent) <= 0.05 * state.work
        assert ("collapse/trajectory/mi_z_ema" in row) == (len(sent) > before)
        looked.append(len(sent) > before)
        sizes |= {scope["pairs"] for scope in state.collapse.values()}
    assert not looked[0] and sum(looked) > 5, "later, once the work so far allows it"
    assert len(sizes) == 1 and 8 <= sizes.pop() <= cfg.diagnostics.pairs
    assert sum("is not measured yet" in text for text in said) == (not looked[cfg.diagnostics.every - 1])
    assert sum(scope["tokens"] for scope in state.collapse.values()) == sum(sent)
