"""Does the bandit pay, split and count as documented?"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from envs import SPLITS, make
from envs.bandit import NAMES, PAIRS, Arm
from envs.episode import Episode
from envs.players import next_action
from envs.protocol import Protocol

MANY: dict[str, Any] = {"arms": 3, "pulls": 10}


def at(seed: int, split: str = "train", noise: int | None = None, style: str = "plain", **options: Any) -> Any:
    env = make("bandit", **options)
    env.style = style
    env.reset(seed=seed, options={"split": split} | ({} if noise is None else {"noise_seed": noise}))
    return env


@pytest.mark.parametrize(
    ("style", "arms", "thought", "last"),
    [
        (
            "plain",
            "The arms are Teacher and Trader.",
            "Trader is the arm that takes a risk, and Teacher the one that pays for sure.",
            "The last pull was of {} and paid {:g}.",
        ),
        ("compact", "Arms Teacher Trader", "risky Trader safe Teacher", "Last {} paid {:g}"),
    ],
)
def test_one_pull_ends_the_game_and_only_the_better_arm_is_success(style, arms, thought, last):
    env = at(0, style=style)
    for name, success, failure, regret in (("Trader", True, "", 0.0), ("Teacher", False, "worse arm", 0.15)):
        env.begin((Arm("Teacher", 1.0, 0.1), Arm("Trader", 0.25, 1.0)))
        assert env.observe() == arms and env.thought() == thought
        observation, reward, terminated, truncated, info = env.step(f" {name.lower()} ")
        assert terminated and not truncated and info["success"] is success and info["failure"] == failure
        assert info["regret"] == pytest.approx(regret) and reward in ((0.0, 1.0) if success else (0.1,))
        assert observation == f"{arms} {last.format(name, reward)}"
        again = env.step("Trader")
        assert again[:2] == (observation, 0.0) and again[2] and not again[4]["action_is_effective"]
        assert again[4]["success"] is success


def test_arms_pay_as_often_as_they_should():
    safe, risky = [], []
    for noise in range(1500):
        env = at(3, noise=noise)
        risky.append(env.step(env.best.name)[1])
        env = at(3, noise=noise)
        safe.append(env.step(env.players()["safe"])[1])
    assert set(safe) == {0.1} and set(risky) == {0.0, 1.0}
    assert abs(np.mean(risky) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 1500)


def test_names_are_held_out_and_reversed_semantics_swap_the_arms():
    words = [name for kinds in NAMES.values() for kind in kinds for side in kind for name in side.split()]
    assert len(words) == len({word.lower() for word in words}), "a name is in one split, and on one side"
    for split in SPLITS:
        orders = set()
        for seed in range(80):
            env, other = at(seed, split), at(seed, split, reversed=True)
            safe, risky = (next(arm for arm in env.level if arm != env.best).name, env.best.name)
            assert (safe, risky) in PAIRS[split]
            assert other.actions == env.actions and other.best.name == safe
            assert {arm.mean for arm in other.level} == {0.1, 0.25}
            orders.add(env.actions[0] == safe)
        assert orders == {True, False}, "the names stand in either order"


def test_samples_of_a_group_share_the_prompt_and_not_the_chance():
    for options in ({}, MANY):
        paid, prompts = set(), set()
        for noise in range(40):
            episode = Episode(make("bandit", **options), Protocol(), seed=5, noise_seed=noise)
            prompts.add(str(episode.messages))
            paid.add(episode.env.step(episode.env.best.name)[1])
        assert len(prompts) == 1 and paid == {0.0, 1.0}


def test_many_pulls_are_counted_and_the_last_one_decides():
    env = at(0, arms=2, pulls=3)
    for last in ("A", "B"):
        env.begin((Arm("A", 1.0, 1.0), Arm("B", 0.01, 1.0)))
        env.style = "compact"
        assert env.observe() == "A 0/0 B 0/0 Pulls left 3" and env.thought() == "untried A B leading A B"
        env.style = "plain"
        assert env.observe() == "Arm A has not been pulled. Arm B has not been pulled. You have 3 pulls left."
        assert env.thought() == "I have not tried A and B yet. No arm has been pulled."
        assert env.step("A")[0] == (
            "Arm A paid in 1 of 1 pull. Arm B has not been pulled. The last pull was of A and paid 1. You have 2 pulls"
            " left."
        )
        assert env.thought() == "I have not tried B yet. A has paid most often so far."
        env.style = "compact"
        assert env.observe() == "A 1/1 B 0/0 Last A paid 1 Pulls left 2" and env.thought() == "untried B leading A"
        _, _, over, _, info = env.step("b")
        assert not over and info["regret"] == pytest.approx(0.99) and not info["failure"]
        _, _, over, _, info = env.step(last)
        assert over and info["success"] is (last == "A") and info["regret"] == pytest.approx(0.99 * (1 + (last == "B")))
        before = env.state_key(), env.observe()
        assert env.step("A")[2] and (env.state_key(), env.observe()) == before


def test_levels_have_one_best_arm_by_the_gap_and_their_order_is_no_other_puzzle():
    env = make("bandit", arms=4, pulls=8, gap=0.3)
    found = set()
    for split, seed in itertools.product(SPLITS, range(60)):
        env.reset(seed=seed, options={"split": split})
        chances = sorted(arm.chance for arm in env.level)
        assert chances[-1] - chances[-2] >= 0.3 - 1e-9 and env.best.chance == chances[-1]
        assert env.key_of(env.level[::-1]) == env.level_key()
        found.add((env.level_key(), split))
    assert len({key for key, _ in found}) == len(found) > 150


def test_the_expert_learns_which_arm_is_best():
    env, wins, regrets = make("bandit", **MANY), {}, {}
    for player, seed in itertools.product(("random", "greedy", "even", "expert"), range(300)):
        env.reset(seed=seed, options={"split": "test"})
        for _ in range(env.max_turns):
            info = env.step(next_action(env, player))[4]
        wins[player] = wins.get(player, 0) + info["success"] / 300
        regrets[player] = regrets.get(player, 0) + info["regret"] / 300
    assert abs(wins["random"] - 1 / 3) < 0.12 and wins["random"] < wins["greedy"] < wins["expert"]
    assert wins["expert"] > 0.7 and regrets["expert"] < 0.6 * regrets["random"]


def test_the_expert_knows_no_more_than_the_model():
    """The same pulls and wins lead to the same choice, whatever the chances are."""
    one, other = at(0, **MANY), at(0, **MANY)
    one.begin((Arm("A", 0.9, 1.0), Arm("B", 0.2, 1.0), Arm("C", 0.1, 1.0)))
    other.begin((Arm("A", 0.1, 1.0), Arm("B", 0.2, 1.0), Arm("C", 0.9, 1.0)))
    for tries, wins in (([0, 0, 0], [0, 0, 0]), ([2, 1, 1], [1, 1, 0]), ([4, 3, 2], [2, 0, 2])):
        for env in (one, other):
            env.tries, env.wins = list(tries), list(wins)
        assert one.expert() == other.expert() and one.observe() == other.observe()


@pytest.mark.parametrize("text", ["", "Teacher Trader", "9" * 60_000, "\ud800", "(" * 10_000])
def test_other_texts_pull_nothing(text):
    for options in ({}, MANY):
        env = at(1, **options)
        before = env.state_key()
        _, reward, over, _, info = env.step(text)
        assert not (reward or over or info["action_is_valid"] or info["action_is_effective"])
        assert env.state_key() == before and info["regret"] == 0
