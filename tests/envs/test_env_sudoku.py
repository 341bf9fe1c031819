"""Has every Sudoku one solution, does its key know its images, and is a game played as documented?"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envs import make
from envs.players import next_action
from envs.sudoku.puzzles import (
    BOXES,
    GridShape,
    Puzzle,
    another_value,
    by_singles,
    full_grid,
    grid_text,
    make_puzzle,
    masks_of,
    puzzle_key,
    shape_of,
    solve_grid,
)

TOY = Puzzle("1.3434...143432.", "1234341221434321")


def toy(**options: Any) -> Any:
    env = make("sudoku", **options)
    env.reset(seed=0)
    env.begin(TOY)
    return env


def solutions(shape: GridShape, grid: str) -> Iterator[str]:
    """Every solution, by plain trial: shares nothing with the solver but the list of cells that exclude each other."""
    options = {
        cell: [v for v in "123456789"[: shape.size] if all(grid[peer] != v for peer in shape.peers[cell])]
        for cell, value in enumerate(grid)
        if value == "."
    }
    if not options:
        yield grid
        return
    cell = min(options, key=lambda cell: len(options[cell]))
    for value in options[cell]:
        yield from solutions(shape, f"{grid[:cell]}{value}{grid[cell + 1 :]}")


def image(clues: str, rng: np.random.Generator) -> str:
    """The same puzzle with other digits, its bands, stacks, rows and columns exchanged."""
    size = round(len(clues) ** 0.5)
    high, wide = BOXES[size]
    grid = np.array(list(clues)).reshape(size, size)
    rows = [band * high + row for band in rng.permutation(size // high) for row in rng.permutation(high)]
    columns = [stack * wide + column for stack in rng.permutation(size // wide) for column in rng.permutation(wide)]
    grid = grid[rows][:, columns]
    grid = grid.T if high == wide and rng.random() < 0.5 else grid
    digits = dict(zip("123456789", (str(k + 1) for k in rng.permutation(size)), strict=False)) | {".": "."}
    return "".join(digits[value] for value in grid.ravel())


# -- puzzles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "clues", "count"), [(4, (4, 10), 120), (6, (9, 20), 40), (9, (26, 45), 12)])
def test_every_puzzle_has_exactly_one_solution(size, clues, count):
    shape, rng = shape_of(size), np.random.default_rng(size)
    digits, made = set("123456789"[:size]), 0
    for _ in range(count):
        wanted = int(rng.integers(clues[0], clues[1] + 1))
        puzzle = make_puzzle(shape, wanted, rng)
        if puzzle is None:
            continue
        made += 1
        assert len(puzzle.clues) - puzzle.clues.count(".") == wanted
        assert all({puzzle.solution[cell] for cell in unit} == digits for unit in shape.units)
        assert list(itertools.islice(solutions(shape, puzzle.clues), 2)) == [puzzle.solution]
        masks = masks_of(shape, puzzle.clues)
        assert masks is not None and grid_text(solve_grid(shape, masks) or []) == puzzle.solution
    assert made > count // 2


def test_a_second_solution_is_noticed():
    shape, rng, found = shape_of(4), np.random.default_rng(0), set()
    for _ in range(200):
        solution = full_grid(shape, rng)
        emptied = rng.choice(16, 9, replace=False)
        grid = "".join("." if cell in emptied else value for cell, value in enumerate(solution))
        cell = int(emptied[0])
        values = {other[cell] for other in solutions(shape, grid)}
        assert another_value(shape, grid, cell, int(solution[cell])) == (len(values) > 1)
        found.add(len(values) > 1)
    assert found == {True, False}


def test_the_units_are_rows_columns_and_boxes():
    shape = shape_of(6)
    assert shape.units[1] == (6, 7, 8, 9, 10, 11) and shape.units[6] == (0, 6, 12, 18, 24, 30)
    assert shape.units[12] == (0, 1, 2, 6, 7, 8) and shape.units[17] == (27, 28, 29, 33, 34, 35)
    assert all(len(peers) == 12 for peers in shape.peers) and {len(p) for p in shape_of(9).peers} == {20}


@pytest.mark.parametrize("size", BOXES)
def test_images_of_a_puzzle_have_its_key_and_other_puzzles_have_others(size):
    shape, rng, keys = shape_of(size), np.random.default_rng(1), {}
    clues = size * size // 2
    while len(keys) < 12:
        puzzle = make_puzzle(shape, clues, rng)
        if puzzle is not None:
            keys[puzzle.clues] = puzzle_key(puzzle.clues)
            assert {puzzle_key(image(puzzle.clues, rng)) for _ in range(8)} == {keys[puzzle.clues]}
    assert len(set(keys.values())) >= 11
    other = next(iter(keys)).replace(".", "1", 1)
    assert puzzle_key(other) not in keys.values()


def test_keys_of_4x4_tell_nearly_all_puzzles_apart():
    """Against the exact form: the first in the alphabet of all images."""
    rng, exact = np.random.default_rng(2), {}
    orders = [(a, b, c, d) for a, b, c, d in itertools.permutations(range(4)) if {a, b} in ({0, 1}, {2, 3})]
    for _ in range(60):
        puzzle = make_puzzle(shape_of(4), int(rng.integers(5, 7)), rng)
        if puzzle is None:
            continue
        grid, images = np.array(list(puzzle.clues)).reshape(4, 4), []
        for rows, columns, turned in itertools.product(orders, orders, (grid, grid.T)):
            cells = "".join(turned[list(rows)][:, list(columns)].ravel())
            names = dict(zip(dict.fromkeys(cells.replace(".", "")), "1234", strict=False)) | {".": "."}
            images.append("".join(names[value] for value in cells))
        exact.setdefault(min(images), set()).add(puzzle_key(puzzle.clues))
    assert all(len(keys) == 1 for keys in exact.values()), "images have one key"
    assert len({key for keys in exact.values() for key in keys}) >= 0.9 * len(exact) > 20


def test_effort_is_what_it_says():
    for effort, seed in itertools.product(("singles", "search"), range(4)):
        env = make("sudoku", size=9, min_clues=25, max_clues=27, effort=effort)
        env.reset(seed=seed)
        assert by_singles(env.shape, env.level.clues) == (effort == "singles")
        assert 25 <= 81 - env.level.clues.count(".") <= 27
    thoughts = []
    while not env.step(env.expert())[2]:  # a puzzle that needs a search
        thoughts.append(env.thought())
    assert any("leads to no solution" in thought for thought in thoughts) and any("can only" in t for t in thoughts)


def test_the_solver_agrees_with_reasoning_gym():
    gym = pytest.importorskip("reasoning_gym")
    for name, size in (("mini_sudoku", 4), ("sudoku", 9)):
        for entry in gym.create_dataset(name, size=10, seed=3):
            told = entry["metadata"]
            puzzle, solution = (
                "".join(str(value) for row in told[key] for value in row) for key in ("puzzle", "solution")
            )
            masks = masks_of(shape_of(size), puzzle.replace("0", "."))
            assert masks is not None and grid_text(solve_grid(shape_of(size), masks) or []) == solution


# -- play --------------------------------------------------------------------------------------------------------------


def test_a_game_reads_and_pays_as_documented():
    env = toy(mistakes=3)
    grid = ["1 . 3 4", "3 4 . .", ". 1 4 3", "4 3 2 ."]
    assert env.observe().splitlines() == [
        *grid,
        "Numbers that still fit, as row column: numbers: 1 2: 2; 2 3: 1; 2 4: 1 2; 3 1: 2; 4 4: 1.",
        "You may make 3 more mistakes.",
    ]
    assert env.thought() == "The cell at row 1, column 2 can only be 2." and env.expert() == "1 2 2"
    env.style = "compact"
    assert env.observe().splitlines() == [
        *grid,
        "Possible 1 2: 2 ; 2 3: 1 ; 2 4: 1 2 ; 3 1: 2 ; 4 4: 1",
        "Mistakes left 3",
    ]
    assert env.thought() == "1 2 can only be 2" and env.expert() == "1 2 2"
    observation, reward, over, _, info = env.step("1 2 4")
    assert (reward, over, info["success"], info["failure"]) == (-0.1, False, False, "")
    assert "1 4* 3 4" in observation and "Last 1 2 4 wrong, 4 is in the row and column and box\n" in observation
    assert env.step("1 2 4")[0].endswith("Mistakes left 1"), "the same mistake again is one more"
    assert env.step("1 2 2")[1] == 1.0 and "1 2 3 4" in env.observe() and "Last 1 2 2 right" in env.observe()
    assert env.step("1 2 2")[4]["action_is_effective"] is False
    assert env.step("1 2 3")[1] == pytest.approx(-1.1), "a right cell that is lost costs what it earned"
    assert [env.step(move)[1] for move in ("1 2 2", "2 3 1", "2 4 2", "3 1 2")] == [1.0] * 4
    observation, reward, over, _, info = env.step("row 4, column 4 = 1")
    assert over and info["success"] and reward == 11.0 and "Possible" not in observation
    before = env.observe(), env.state_key()
    again = env.step("1 2 3")
    assert again[1:3] == (0.0, True) and again[4]["success"] and (env.observe(), env.state_key()) == before


@pytest.mark.parametrize(
    ("style", "said", "fit"),
    [("plain", "Your last move 1 1 2 was wrong.\n", "still fit"), ("compact", "Last 1 1 2 wrong\n", "Possible")],
)
def test_a_number_that_fits_and_is_wrong_earns_nothing(style, said, fit):
    env = make("sudoku", candidates=0)
    env.style = style
    env.reset(seed=0)
    env.begin(Puzzle("." * 12 + TOY.solution[12:], TOY.solution))
    observation, reward, _, _, info = env.step("1 1 2")
    assert reward == 0 and said in observation and info["action_is_effective"]
    assert fit not in observation and fit not in env.rules()


def test_other_rewards_and_an_end_by_mistakes():
    env = toy(reward="sparse")
    moves = ["1 2 4", "1 2 2", "2 3 1", "2 4 2", "3 1 2", "4 4 1"]
    assert [env.step(move)[1] for move in moves] == [0, 0, 0, 0, 0, 1]
    env = toy(mistakes=0)
    assert env.max_turns == 11 and toy(mistakes=5).max_turns == 16 and "A wrong number ends the game" in env.rules()
    assert env.step("1 2 2")[2] is False
    _, _, over, _, info = env.step("2 3 4")
    assert over and info["failure"] == "mistakes" and not info["success"] and env.optimal_success(99) == 0
    assert env.step("2 3 1")[2] and not env.step("2 3 1")[4]["action_is_effective"]


@pytest.mark.parametrize(
    "text",
    ["1 2 2", "1,2,2", "(1, 2, 2)", " row 1 column 2 = 2\n", "Row 1, Col 2: 2", "r1c2=2", "R1C2 -> 2", "1 2 is 2"],
)
def test_plain_ways_to_write_a_move(text):
    env = toy()
    assert env.step(text)[4]["action_is_valid"] and env.board[1] == "2"


@pytest.mark.parametrize(
    "text",
    ["1 1 2", "1 2", "1 2 5", "0 2 2", "1 2 2 2", "1 2 2 || 2 3 1", "column 2 row 1 = 2", "one 2 2", "1 2 \u0662",
     "", "\ud800", "9" * 60_000, "1 2 2" + " " * 60_000, "(" * 10_000, "1 " * 40, "row " * 20],
)  # fmt: skip
def test_clues_and_other_texts_are_invalid(text):
    env = toy()
    before = env.observe()
    observation, reward, over, _, info = env.step(text)
    assert not (info["action_is_valid"] or info["action_is_effective"] or over or reward) and observation == before


def test_the_expert_repairs_wrong_numbers_and_its_thought_names_its_move():
    env = make("sudoku", size=6, mistakes=4)
    for seed in range(10):
        env.reset(seed=seed)
        for _ in range(4):
            env.step(next_action(env, "random"))
        need = sum(a != b for a, b in zip(env.board, env.level.solution, strict=True))
        assert env.optimal_success(need) == 1 and env.optimal_success(need - 1) == 0
        for left in range(need, 0, -1):
            assert env.optimal_success(left) == 1
            row, column, value = env.expert().split()
            for env.style, place in (("compact", f"{row} {column}"), ("plain", f"row {row}, column {column}")):
                assert place in env.thought() and value in env.thought().replace(place, "")
            assert env.expert() in env.cues()["single"]
            over = env.step(env.expert())[2]
        assert over


def test_no_small_grid_takes_a_guess():
    with pytest.raises(ValueError, match="size=6 or size=9"):
        make("sudoku", effort="search")
    rng, shape = np.random.default_rng(0), shape_of(4)
    made = [puzzle for _ in range(300) if (puzzle := make_puzzle(shape, 4, rng))]
    assert len(made) > 10 and all(by_singles(shape, puzzle.clues) for puzzle in made)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [6, 9])
def test_puzzles_that_need_a_guess_are_found_without_other_options(size):
    env = make("sudoku", size=size, effort="search")
    for seed in (3, 7, 9):
        env.reset(seed=seed, options={"split": "test"})
        assert not by_singles(env.shape, env.level.clues)


def test_pictures_show_the_grid():
    env = toy(render_mode="rgb_array")
    frames = [env.render()]
    for move in ("1 2 3", "1 2 2"):
        env.step(move)
        frames.append(env.render())
    assert all(frame.shape == (204, 204, 3) and frame.dtype == np.uint8 for frame in frames)
    red, blue = ((frame[..., 0].astype(int) - frame[..., 2] > 100).sum() for frame in frames[1:])
    assert red > 20 > blue == 0 and not np.array_equal(frames[0], frames[2])
