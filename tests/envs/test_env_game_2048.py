"""Does 2048 slide and merge as the game does, and does its expert reach the target within the budget?"""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalIterable=false, reportOptionalSubscript=false
from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from envs import SPLITS, game_2048, make, players
from envs.protocol import Protocol

EMPTY = (0, 0, 0, 0)


def at(board, **options):
    env = make("game_2048", **options)
    env.reset(seed=0)
    env.begin(board)
    return env


@pytest.mark.parametrize(
    ("row", "slid", "gained"),
    [
        ((2, 0, 2, 4), (4, 4, 0, 0), 4),
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),  # a tile that was made does not merge again
        ((0, 0, 0, 2), (2, 0, 0, 0), 0),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
    ],
)
def test_a_row_slides_and_merges(row, slid, gained):
    assert game_2048.slide_row(row) == (slid, gained)


def test_the_four_moves_are_one_move_seen_from_four_sides():
    rng = np.random.default_rng(0)
    for _ in range(50):
        board = rng.choice([0, 2, 4, 8], (4, 4))
        for quarter_turns, move in enumerate(("Left", "Down", "Right", "Up")):
            turned = tuple(map(tuple, np.rot90(board, quarter_turns).tolist()))
            moved, gained = game_2048.slide(turned, move)
            left, same = game_2048.slide(tuple(map(tuple, board.tolist())), "Left")
            assert np.array_equal(np.rot90(left, quarter_turns), moved) and gained == same


def test_a_new_tile_appears_after_a_move_and_only_then():
    env = at(((2, 0, 0, 0), EMPTY, EMPTY, EMPTY))
    _, reward, over, _, info = env.step("Left")
    assert (reward, over, info["action_is_valid"], info["action_is_effective"]) == (0, False, True, False)
    assert env.observe() == "2 _ _ _\n_ _ _ _\n_ _ _ _\n_ _ _ _"
    new = Counter()
    for _ in range(600):
        env.begin(((2, 0, 0, 0), EMPTY, EMPTY, EMPTY))
        assert env.step("right")[4]["action_is_effective"]
        tiles = [tile for row in env.board for tile in row if tile]
        assert len(tiles) == 2 and env.board[0][3] == 2
        new[tiles[0] if env.board[0][3] != tiles[0] else tiles[1]] += 1
    assert 0.06 < new[4] / 600 < 0.15


def test_samples_of_a_group_share_the_first_board_but_not_the_new_tiles():
    env, boards = make("game_2048"), set()
    for noise_seed in range(8):
        first, _ = env.reset(seed=4, options={"noise_seed": noise_seed})
        boards.add((first, *(env.step(move)[0] for move in ("Up", "Left", "Down", "Right"))))
    assert len({first for first, *_ in boards}) == 1 and len(boards) > 5


def test_the_target_wins_and_pays_and_nothing_comes_after_it():
    board = ((32, 32, 0, 0), (2, 0, 0, 0), EMPTY, EMPTY)
    env = at(board)
    _, reward, over, cut, info = env.step("Left")
    assert (reward, over, cut, info["success"], info["failure"], info["largest"]) == (0.5, True, False, True, "", 64)
    before = env.state_key()
    assert env.step("Up")[1:3] == (0, True) and env.state_key() == before
    assert at(board, reward="merges").step("Left")[1] == round(0.1 * math.log2(65), 6)
    assert at(board, target=128).step("Left")[1:3] == (0.25, False)


def test_a_board_in_which_nothing_moves_is_lost():
    env = at(((2, 4, 2, 4), (4, 2, 4, 2), (8, 16, 8, 16), (32, 64, 32, 0)), target=2048)
    observation, _, over, _, info = env.step("Right")
    assert "_" not in observation and over and info["failure"] == "stuck" and not info["success"]
    assert env.step("Left")[0] == observation and env.expert() in env.actions and env.players()


def test_the_whole_reward_of_a_won_game_is_at_most_one():
    episode = players.play_scripted(make("game_2048"), "expert", Protocol.of(make("game_2048")), 5, "train")
    assert episode.success and 0.9 < sum(turn.reward for turn in episode.past) <= 1


def test_splits_are_disjoint_up_to_rotation_unless_the_boards_are_few():
    keys = {split: set() for split in SPLITS}
    env = make("game_2048")
    for split in SPLITS:
        for seed in range(100):
            env.reset(seed=seed, options={"split": split})
            assert sum(tile > 0 for row in env.board for tile in row) == 4 and env.split_of(env.level) == split
            turned = tuple(zip(*env.level[::-1], strict=True))
            assert env.key_of(turned) == env.level_key()
            keys[split].add(env.level_key())
    assert not keys["train"] & keys["test"] and not keys["validation"] & keys["test"]
    standard = make("game_2048", tiles=2)
    standard.reset(seed=1, options={"split": "test"})
    assert standard.split_of(standard.level) is None


def test_cues_name_merges_and_corners():
    env = at(((2, 2, 0, 0), (0, 0, 0, 0), (0, 4, 0, 4), EMPTY))
    assert env.cues()["merge"] == ("Right", "Left")
    assert env.cues()["corner"] == ("Up", "Down")  # the others make an 8 amid an edge
    for seed in range(5):
        env.reset(seed=seed)
        cues, players = env.cues(), env.players()
        assert players["corner"] in (cues["corner"] or env.actions) and players["random"] in env.actions
