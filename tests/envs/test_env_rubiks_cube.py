"""Do the faces turn as on a cube in the hand, and are the distances exact?"""

# pyright: reportAttributeAccessIssue=false, reportOptionalIterable=false, reportOptionalSubscript=false
from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from envs import SPLITS, make, rubiks_cube as cubes

KNOWN = [1, 6, 27, 120, 534, 2256, 8969, 33058, 114149, 360508, 930588, 1350852, 782536, 90280, 276]


def after_all(cube: str, moves) -> str:
    for move in moves:
        cube = cubes.after(cube, move)
    return cube


def test_there_are_as_many_cubes_of_each_distance_as_are_known():
    assert np.bincount(cubes.distances()).tolist() == KNOWN and sum(KNOWN) == 3_674_160


def test_distances_agree_with_a_search_over_stickers_with_all_twelve_moves():
    layer, seen = {cubes.SOLVED}, {cubes.upright(cubes.SOLVED)}
    for length in range(1, 5):
        layer = {cubes.upright(cubes.after(cube, move)) for cube in layer for move in cubes.MOVES} - seen
        seen |= layer
        assert len(layer) == KNOWN[length] and {cubes.distance(cube) for cube in layer} == {length}


def test_number_and_cube_are_inverse_and_holding_the_cube_otherwise_changes_neither():
    rng = random.Random(0)
    assert len(set(cubes.rotations())) == 24
    for number in rng.sample(range(3_674_160), 100):
        cube = cubes.cube_of(number)
        held = cubes.turned(cube, rng.choice(cubes.rotations()))
        assert cubes.number_of(held) == cubes.number_of(cube) == number and cubes.upright(held) == cube
        assert Counter(cube) == Counter(cubes.SOLVED)


def test_moves_have_order_four_and_an_inverse():
    for name in "URFDLB":
        assert after_all(cubes.SOLVED, [name] * 4) == cubes.SOLVED == after_all(cubes.SOLVED, [name, name + "'"])
        assert cubes.distance(cubes.after(cubes.SOLVED, name)) == 1
    assert after_all(cubes.SOLVED, ["R", "U", "R'", "U'"] * 6) == cubes.SOLVED
    assert cubes.is_solved(after_all(cubes.SOLVED, ["R", "L'"])), "the whole cube turned is solved"


def test_faces_turn_as_those_of_magiccube():
    magiccube = pytest.importorskip("magiccube")
    theirs, rng = magiccube.Cube(2), random.Random(1)
    order = [getattr(type(next(iter(theirs.get_all_faces()))), face) for face in "URFDLB"]

    def stickers() -> str:
        faces = theirs.get_all_faces()
        return "".join(colour.name for face in order for row in faces[face] for colour in row)

    letters = dict(zip(stickers(), cubes.SOLVED, strict=True))
    ours = cubes.SOLVED
    for _ in range(60):
        move = rng.choice(cubes.MOVES)
        theirs.rotate(move)
        ours = cubes.after(ours, move)
        assert "".join(letters[colour] for colour in stickers()) == ours


def test_the_observation_the_reward_and_the_end():
    env = make("rubiks_cube", render_mode="ansi")
    env.reset(seed=0)
    env.begin(cubes.CubeLevel(cubes.after(cubes.SOLVED, "U"), True))
    assert env.observe() == ("Up: W W W W\nRight: B B R R\nFront: R R G G\nDown: Y Y Y Y\nLeft: G G O O\nBack: O O B B")
    env.style = "compact"
    assert env.observe() == "Up WWWW Right BBRR Front RRGG Down YYYY Left GGOO Back OOBB"
    assert env.render().splitlines()[:4] == ["   WW", "   WW", "GG RR BB OO", "OO GG RR BB"]
    _, reward, over, _, info = env.step("f")
    assert (reward, over, info["success"], info["action_is_effective"]) == (0, False, False, True)
    env.step("F'")
    _, reward, over, cut, info = env.step(" u' ")
    assert (reward, over, cut, info["success"], env.cube) == (1, True, False, True, cubes.SOLVED)
    assert env.step("R")[1:3] == (0, True) and env.cube == cubes.SOLVED
    assert env.step("X")[4]["action_is_valid"] is False


@pytest.mark.parametrize("options", [{}, {"min_length": 9, "max_length": 14, "rotate": True}])
def test_the_expert_takes_the_shortest_way_in_every_split(options):
    env, lengths = make("rubiks_cube", **options), set()
    for split, seed in itertools.product(SPLITS, range(12)):
        env.reset(seed=seed, options={"split": split})
        length = env.optimal_length()
        lengths.add(length)
        assert env.optimal_success(length) == 1 and env.optimal_success(length - 1) == 0 and length <= env.max_turns
        rewards = [env.step(env.expert())[1] for _ in range(length)]
        assert rewards == [0.0] * (length - 1) + [1.0]
    assert min(lengths) == env.config.min_length and len(lengths) > 3


def test_every_split_has_each_distance_and_no_cube_is_in_two():
    env, keys = make("rubiks_cube"), {}
    for split in SPLITS:
        lengths = set()
        for seed in range(150):
            env.reset(seed=seed, options={"split": split})
            lengths.add(env.optimal_length())
            keys.setdefault(split, set()).add(env.level_key())
        assert lengths == {1, 2, 3, 4} and len(keys[split]) > 30
    assert not any(keys[a] & keys[b] for a, b in itertools.combinations(SPLITS, 2))


def test_where_the_cubes_are_few_none_is_held_out():
    env = make("rubiks_cube", max_length=3)
    env.reset(seed=0, options={"split": "test"})
    assert env.split_of(env.level) is None
    env = make("rubiks_cube", min_length=4)
    env.reset(seed=0, options={"split": "test"})
    assert env.split_of(env.level) == "test"


def test_pairs_of_neighbours_are_counted():
    env = make("rubiks_cube")
    env.reset(seed=0)
    env.begin(cubes.CubeLevel(cubes.after(cubes.SOLVED, "R"), True))
    assert env.players()["pairs"] in ("R'", "L'") and env.thought() == (
        "16 of the 24 pairs of neighbours on a face have the same colour. Most of them, 24, would match after R' or L'."
    )
    env.style = "compact"
    assert env.thought() == "16 of 24 pairs now. pairs R' L'"
