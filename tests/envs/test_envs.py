"""Do FrozenLake and Sokoban behave as documented, and are their optima optimal?"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportReturnType=false
# pyright: reportOptionalSubscript=false, reportOptionalIterable=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from open_envs import open_or_skip

from envs import SPLITS, base, frozen_lake, make, names, players, promises, sokoban
from envs.base import OBSERVATIONS, canonical, split_by_hash
from envs.promises import Subject
from envs.protocol import STYLES, Protocol
from envs.sokoban import rooms

ROOT = Path(__file__).parents[2]
ENVS = ("frozen_lake", "sokoban")


def wander(env, steps: int, seed: int = 0):
    """Observations along a random walk that starts a new level whenever one ends; in sentences, only what a model sees.

    The state in which a game ends is shown to nobody, and only the compact words explain its symbols.
    """
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    for step in range(steps):
        yield observation
        observation, _, terminated, _, _ = env.step(env.actions[rng.integers(len(env.actions))])
        if terminated:
            if env.style == "compact":
                yield observation
            observation, _ = env.reset(seed=seed + step + 1)


LONG = {"web_shop", "sudoku", "rubiks_cube", "countdown", "search_qa", "lean", "bandit", "metamath_qa"}  # to check


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name == "deep_coder" else pytest.mark.thorough if name in LONG else ()
        )
        for name in names()
    ],
)
def test_every_environment_keeps_its_promises(name: str) -> None:
    """What `posttrain env check` looks at: gymnasium's API, splits, purity, copies, other processes, hostile text."""
    options = {"game_2048": {"target": 16}}.get(name, {})  # short games
    protocol = promises.protocol_for(open_or_skip(name, **options))
    assert promises.broken_promises(Subject(name, options, protocol, episodes=20)) == []


THOROUGH, SLOW = pytest.mark.thorough, pytest.mark.slow
PLAYED = [  # an environment, its options, levels of each split, the largest share of them that scripted policies win
    pytest.param("frozen_lake", {}, 50, {"random": 0.35, "nearer": 0.85, "safe": 0.85}, marks=THOROUGH),
    pytest.param("sokoban", {}, 50, {"random": 0.35, "push": 0.85, "go": 0.85, "free": 0.85}, marks=THOROUGH),
    ("bandit", {}, 40, {"safe": 0.0}),
    ("bandit", {"reversed": True}, 40, {"safe": 0.0}),
    ("countdown", {}, 60, {"near": 0.0, "invented": 0.0, "random": 0.08}),
    pytest.param("game_2048", {}, 6, {"random": 0.7}, marks=THOROUGH),
    ("lean", {"backend": "fragment"}, 25, {"random": 0.6, "shape": 0.6, "close": 0.6}),
    ("metamath_qa", {}, 60, {"near": 0.0, "random": 0.15, "copied": 0.15}),
    ("rubiks_cube", {"min_length": 3, "max_length": 6}, 14, {"random": 0.08, "pairs": 0.75}),
    ("search_qa", {}, 40, {"random": 0.05, "hasty": 0.05, "astray": 0.05}),
    pytest.param("sudoku", {"size": 4}, 60, {"random": 0.05, "fitting": 0.85}, marks=THOROUGH),
    pytest.param("sudoku", {"size": 6}, 25, {"random": 0.05, "fitting": 0.85}, marks=THOROUGH),
    pytest.param("sudoku", {"size": 9}, 6, {"random": 0.05, "fitting": 0.85}, marks=THOROUGH),
    ("web_shop", {}, 40, {"random": 0.1, "hasty": 0.0, "first": 0.75}),
    ("web_shop", {"results_per_page": 3, "reward": "sparse"}, 15, {"hasty": 0.0}),
    pytest.param("deep_coder", {"turns": 1}, 4, {"random": 0.1, "off_by_one": 0.34, "no_edge_cases": 0.34}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "options", "levels", "most"), PLAYED)
def test_the_expert_wins_every_level_and_the_scripted_policies_few(name, options, levels, most):
    env, wins = open_or_skip(name, **options), Counter()
    for player, split, seed in itertools.product(("expert", *most), SPLITS, range(levels)):
        episode = players.play_scripted(env, player, Protocol.of(env), seed, split)
        assert player != "expert" or not episode.invalid_turns
        wins[player] += episode.success / levels / 3
    assert wins.pop("expert") == pytest.approx(1)
    assert {player: share for player, share in wins.items() if share > most[player] + 1e-9} == {}


def test_importing_the_environments_imports_nothing_heavy() -> None:
    code = "import sys, envs; assert not {'bm25s', 'datasets', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ENVS)
def test_the_default_split_is_train_and_case_and_blanks_of_an_action_do_not_matter(name: str) -> None:
    env, other = make(name), make(name)
    assert env.reset(seed=5) == other.reset(seed=5, options={"split": "train"})
    assert env.step(f"  {env.actions[0].upper()} ")[4]["action_is_valid"]


@pytest.mark.parametrize("call", [lambda: make("frozenlake"), lambda: make("frozen_lake", observation="grit")])
def test_a_misspelt_name_is_guessed(call):
    with pytest.raises(ValueError, match=r'Did you mean "(frozen_lake|grid)"'):
        call()


def test_misspelt_options_symbols_and_splits_are_refused():
    with pytest.raises(ValueError, match=r'"observaton".*Did you mean "observation"'):
        make("frozen_lake", observaton="grid")
    with pytest.raises(ValueError, match='Did you mean "player"'):
        make("sokoban", symbols={"playr": "@"})
    with pytest.raises(ValueError, match="share a symbol"):
        make("sokoban", symbols={"player": "#"})
    with pytest.raises(ValueError, match="one word"):
        make("frozen_lake", symbols={"hole": "<think>"})
    with pytest.raises(ValueError, match='no split "tests"'):
        make("frozen_lake").reset(seed=0, options={"split": "tests"})
    with pytest.raises(ValueError, match='no reset option "splt"'):
        make("frozen_lake").reset(seed=0, options={"splt": "test"})
    with pytest.raises(ValueError, match="min_length"):
        make("sokoban", min_length=5, max_length=4)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        *[("bandit", options, "bandit needs") for options in (
            {"arms": 3}, {"arms": 4, "pulls": 3}, {"arms": 11, "pulls": 20}, {"sure": 0.3}, {"chance": 1.5},
            {"pulls": 2, "gap": 0.0},
        )],
        ("bandit", {"pulls": 4, "reversed": True}, "leave out reversed"),
        *[("countdown", options, "countdown needs 2 <= min_numbers") for options in (
            {"min_numbers": 1}, {"min_numbers": 5}, {"max_numbers": 7}, {"tries": 0}, {"max_target": 9},
            {"max_number": 10**6}, {"max_target": 10**6}, {"max_number": 10**20},
        )],
        *[("deep_coder", options, "dense|deep_coder needs") for options in (
            {"reward": "dens"}, {"turns": 0}, {"max_tests": 1}, {"seconds": 9.0}, {"memory_mb": 1},
            {"memory_mb": 10**14}, {"public": -1},
        )],
        *[("game_2048", options, "game_2048 needs|no reward") for options in (
            {"size": 2}, {"target": 48}, {"target": 4}, {"tiles": 16}, {"reward": "sums"},
        )],
        ("lean", {"topics": []}, "lean needs topics"),
        ("lean", {"topics": ["logics"]}, 'Did you mean "logic"'),
        ("lean", {"timeout": 0.0}, "timeout above 0"),
        ("lean", {"timeout": 1e9}, "at most 3600"),
        ("lean", {"topics": ["library"], "backend": "fragment"}, "needs Lean itself"),
        *[("lean", {"backend": backend}, f'no backend "{backend}"') for backend in (
            "coq", "http://", "http://localhost:99999",
        )],
        *[("rubiks_cube", options, "rubiks_cube needs") for options in (
            {"min_length": 0}, {"max_length": 15}, {"min_length": 5},
        )],
        *[("sudoku", options, "sudoku needs 3 <= min_clues") for options in (
            {"min_clues": 2}, {"min_clues": 9, "max_clues": 8}, {"max_clues": 16}, {"candidates": -1},
        )],
        ("sudoku", {"size": 5}, "sizes 4, 6, 9, not size=5"),
        ("sudoku", {"effort": "single"}, 'Did you mean "singles"'),
        *[("sudoku", {"size": 6, "effort": "search", **options}, "hardly .* max_clues=13 or less") for options in (
            {"max_clues": 18}, {"min_clues": 30}, {"max_clues": 14},
        )],
        ("frozen_lake", {"success_rate": 0.8}, "success_rate on slippery ice only"),
        ("frozen_lake", {"size": 65}, "size from 2 to 64"),
        ("sokoban", {"distribution": "ragen", "min_length": 2}, "min_length and max_length are for"),
        ("sokoban", {"distribution": "ragen", "max_length": 4}, "min_length and max_length are for"),
        ("sokoban", {"size": 65}, "at most 64"),
        ("bandit", {"gap": 0.2}, "leave out gap"),
        ("web_shop", {"rows": 1000}, "Leave them out, or set path"),
        ("web_shop", {"human_goals": True}, "Leave them out, or set path"),
        ("game_2048", {"target": 1 << 18}, "131072"),
        ("game_2048", {"size": 3, "target": 2048}, "1024 with size 3"),
    ],
)  # fmt: skip
def test_an_option_that_would_do_nothing_or_harm_is_refused(name, options, says):
    open_or_skip(name)
    with pytest.raises(ValueError, match=says):
        make(name, **options)


def test_an_environment_without_levels_says_so():
    with pytest.raises(ValueError) as told:
        make("sokoban", size=5, boxes=8, observation="grid").reset(seed=0)
    assert str(told.value) == (
        'sokoban: no level for the split "train" in 2,000 draws with size: 5, boxes: 8, observation: "grid". Choose'
        " options that allow more levels."
    )


def test_split_shares_are_eighty_ten_ten():
    counts = Counter(split_by_hash(str(i)) for i in range(20_000))
    assert [round(counts[split] / 20_000, 2) for split in SPLITS] == [0.80, 0.10, 0.10]


def test_canonical_knows_all_eight_images():
    rows = ["ab", "cd"]
    images = ["ab cd", "ca db", "dc ba", "bd ac", "ba dc", "ac bd", "cd ab", "db ca"]
    assert {canonical(image.split()) for image in images} == {canonical(rows)}
    assert canonical(["ab", "dc"]) != canonical(rows)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENVS)
def test_no_split_has_longer_levels_than_another(name):
    env, means = make(name), []
    for split in SPLITS:
        lengths = []
        for seed in range(400):
            env.reset(seed=seed, options={"split": split})
            lengths.append(env.optimal_length())
        means.append((np.mean(lengths), np.std(lengths) / 20))
    for mean, error in means[1:]:
        assert abs(mean - means[0][0]) < 3.5 * np.hypot(error, means[0][1])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ENVS)
def test_the_legend_follows_the_symbols(name, style):
    cells = sorted({"frozen_lake": frozen_lake.SYMBOLS, "sokoban": sokoban.SYMBOLS}[name])
    custom = {cell: f"{cell[0].upper()}{i}" for i, cell in enumerate(cells)}
    for observation in OBSERVATIONS:
        env = make(name, observation=observation, symbols=custom)
        env.style = style
        texts = list(wander(env, 400))
        shown = {word for text in texts for word in text.split()} & set(custom.values())
        assert bool(shown) == (observation in ("grid", "both") or (observation == "neighbours" and style == "compact"))
        assert all(f" {symbol} " in env.rules() for symbol in shown)
        assert all(env.observation_space.contains(text) for text in texts)
        defaults = set(make(name).symbols.values())
        assert not any(defaults & set(text.split()) for text in texts)


def test_compact_observations_read_as_documented():
    lake = make("frozen_lake", observation="neighbours")
    lake.style = "compact"
    lake.reset(seed=0)
    lake.begin(("SFHF", "FFFF", "FHFF", "FFFG"))
    lake.step("Right")
    assert lake.observe() == "Goal Down 3 Right 2 Left _ Down _ Right O Up #"
    assert lake.thought() == "safe Left Down goal Down"
    lake.observation = "both"
    assert lake.thought() == "goal Down safe Left Down"
    assert lake.observe() == "You 0 1 Goal 3 3 Holes 0 2 ; 2 1\n_ P O _\n_ _ _ _\n_ O _ _\n_ _ _ G"
    room = make("sokoban", size=5, observation="neighbours")
    room.style = "compact"
    room.reset(seed=0)
    room.begin(("#####", "#@$.#", "#   #", "# # #", "#####"))
    beside_box = "Left P Down _ Right O Up #"
    assert room.observe() == f"You Left # Down _ Right X Up # Box Right 1 {beside_box} Target Right 1"
    assert room.thought() == "to Right push Right"
    room.step("Down")
    assert room.thought() == "to Right go Up free Down Right Up"
    room.observation = "coordinates"
    assert room.observe() == "You 2 1 Boxes 1 2 Targets 1 3 Walls 3 2"
    room.observation, room.separator = "grid", ""
    assert room.observe() == "#####\n#_XO#\n#P__#\n#_#_#\n#####"


@pytest.mark.parametrize("name", ENVS)
def test_scripted_policies_follow_their_cue_and_watching_them_changes_nothing(name):
    watched, alone = make(name), make(name)
    for seed in range(40):
        watched.reset(seed=seed)
        alone.reset(seed=seed)
        for _ in range(4):
            players, cues = watched.players(), watched.cues()
            assert set(players.values()) <= set(watched.actions) and "random" in players
            assert all(players[cue] in actions for cue, actions in cues.items() if actions and cue in players)
            assert watched.step("Up")[0] == alone.step("Up")[0]


@pytest.mark.parametrize("name", ENVS)
def test_the_text_for_people_is_the_grid_whatever_the_model_is_shown(name):
    env = make(name, render_mode="ansi", observation="coordinates")
    grid = make(name, observation="grid")
    for each in (env, grid):
        each.reset(seed=1)
    assert env.render() == grid.observe() != env.observe() and grid.render() is None


PICTURES = {"frozen_lake": {}, "sokoban": {}, "rubiks_cube": {}, "game_2048": {"size": 3}}


@pytest.mark.parametrize("name", PICTURES)
def test_frames_are_pictures_of_the_state(name):
    env = make(name, **PICTURES[name], render_mode="rgb_array")
    env.reset(seed=1)
    before = env.render()
    assert before.dtype == np.uint8 and before.ndim == 3 and before.shape[2] == 3 and before.std() > 10
    env.step(env.expert())
    assert not np.array_equal(before, env.render())


# -- FrozenLake --------------------------------------------------------------------------------------------------------


def expectimax(table, cells: str, state: int, horizon: int) -> float:
    """The optimum straight from gymnasium's table, by recursion."""
    if horizon == 0 or cells[state] in "GH":
        return float(cells[state] == "G")
    return max(
        sum(p * expectimax(table, cells, following, horizon - 1) for p, following, _, _ in table[state][action])
        for action in range(4)
    )


@pytest.mark.parametrize("chance", [1.0, 0.7, 1 / 3])
def test_value_iteration_agrees_with_recursion_over_gymnasiums_table(chance):
    env = make("frozen_lake", size=3, slippery=chance < 1, success_rate=chance if chance < 1 else None)
    for seed in range(6):
        env.reset(seed=seed)
        table = FrozenLakeEnv(desc=list(env.level), is_slippery=chance < 1, success_rate=chance).P
        for horizon in range(4):
            expected = expectimax(table, env.cells, env.position, horizon)
            assert env.optimal_success(horizon) == pytest.approx(expected, abs=1e-12)


def test_value_iteration_agrees_with_play():
    env = make("frozen_lake", slippery=True, success_rate=0.6)
    env.reset(seed=11)
    promised, wins, games = env.optimal_success(6), 0, 1500
    for game in range(games):
        env.reset(seed=11, options={"noise_seed": game})
        for left in range(6, 0, -1):
            if env.step(env.expert(horizon=left))[2]:
                break
        wins += env.position == env.goal
    assert 0.1 < promised < 0.98
    assert abs(wins / games - promised) < 4 * np.sqrt(promised * (1 - promised) / games)


def test_frozen_lake_levels_are_solvable_and_the_expert_takes_the_shortest_way():
    env = make("frozen_lake")
    starts = set()
    for seed in range(100):
        env.reset(seed=seed)
        starts.add((env.position, env.goal))
        length = env.optimal_length()
        assert length > 0 and env.optimal_success(length) == 1 and env.optimal_success(length - 1) == 0
        rewards = [env.step(env.expert())[1] for _ in range(length)]
        assert rewards == [0.0] * (length - 1) + [1.0]
    assert len(starts) > 50


def test_frozen_lake_corners_size_and_holes():
    env = make("frozen_lake", size=6, corners=True)
    env.reset(seed=2)
    assert (env.position, env.goal) == (0, 35)
    env.begin(("SH", "FG"))
    env.side = 2
    _, reward, terminated, truncated, info = env.step("Right")
    assert (reward, terminated, truncated, info["failure"], info["success"]) == (0.0, True, False, "hole", False)


def test_members_of_a_group_share_the_level_but_not_the_slips():
    env = make("frozen_lake", slippery=True, success_rate=0.34)

    def walk(noise_seed: int) -> tuple[str, ...]:
        first, _ = env.reset(seed=4, options={"noise_seed": noise_seed})
        return (first, env.level_key(), *(env.step(action)[0] for action in env.actions))

    walks = [walk(noise_seed) for noise_seed in range(8)]
    assert len({walk[:2] for walk in walks}) == 1
    assert len({walk[2:] for walk in walks}) > 3
    assert walks == [walk(noise_seed) for noise_seed in range(8)]


def test_the_lake_of_ragen_has_more_ice_and_more_turns():
    def ice(**options) -> float:
        env = make("frozen_lake", **options)
        shares = []
        for seed in range(300):
            env.reset(seed=seed)
            shares.append(1 - env.cells.count("H") / len(env.cells))
        return float(np.mean(shares))

    # two of 16 cells are never holes, and maps without a way are drawn again
    assert 0.82 < ice() < 0.88 < 0.90 < ice(distribution="ragen") < 0.94
    assert ice(distribution="ragen", frozen=0.8) == ice()
    turns = [make("frozen_lake", **o).max_turns for o in ({}, {"distribution": "ragen"}, {"size": 8})]
    assert turns == [8, 25, 32]
    assert make("frozen_lake").deterministic and not make("frozen_lake", slippery=True).deterministic
    with pytest.raises(ValueError, match='Did you mean "ragen"'):
        make("frozen_lake", distribution="rage")


@pytest.mark.parametrize(
    "options",
    [
        {"distribution": "ragen"},
        {"size": 8},
        {"size": 12, "frozen": 0.7},
        {"distribution": "ragen", "observation": "coordinates"},
    ],
)
def test_the_expert_crosses_larger_lakes_and_ragens_within_their_budget(options):
    env = make("frozen_lake", **options)
    protocol = Protocol.of(env)
    for split, seed in itertools.product(SPLITS, range(30)):
        assert players.play_scripted(env, "expert", protocol, seed, split).success


def test_state_key_tells_futures_apart_and_nothing_else():
    env = make("frozen_lake")
    env.reset(seed=0)
    env.begin(("SFF", "FFF", "FFG"))
    env.side = 3
    env.step("Right")
    here = env.state_key()
    env.begin(("FSF", "FFF", "FFG"))
    assert env.state_key() == here, "where the walk began does not matter"
    env.begin(("FSF", "FFH", "FFG"))
    assert env.state_key() != here


# -- Sokoban -----------------------------------------------------------------------------------------------------------


def brute_force(level: tuple[str, ...], depth: int) -> int | None:
    """Length of the shortest solution by trying every sequence of moves; None if it is above `depth`."""
    cells = {(r, c): letter for r, row in enumerate(level) for c, letter in enumerate(row)}
    targets = {cell for cell, letter in cells.items() if letter in ".*+"}
    boxes = {cell for cell, letter in cells.items() if letter in "$*"}
    (player,) = (cell for cell, letter in cells.items() if letter in "@+")
    for length in range(depth + 1):
        for moves in itertools.product(((-1, 0), (1, 0), (0, -1), (0, 1)), repeat=length):
            (r, c), now = player, set(boxes)
            for down, right in moves:
                there, beyond = (r + down, c + right), (r + 2 * down, c + 2 * right)
                if cells[there] == "#" or (there in now and (cells[beyond] == "#" or beyond in now)):
                    continue
                if there in now:
                    now = now - {there} | {beyond}
                r, c = there
            if now == targets:
                return length
    return None


def test_the_solver_agrees_with_brute_force_on_random_rooms():
    rng = random.Random(0)
    lengths = Counter()
    for trial in range(60):
        boxes = 1 + trial % 2
        cells = [(r, c) for r in range(1, 4) for c in range(1, 4)]
        rng.shuffle(cells)
        grid = [list("#####") if r in (0, 4) else list("#   #") for r in range(5)]
        for letter in "@" + "$" * boxes + "." * boxes + "#" * rng.randrange(2):
            r, c = cells.pop()
            grid[r][c] = letter
        level = tuple("".join(row) for row in grid)
        solution = rooms.solve_room(rooms.Room.read(level), 5)
        expected = brute_force(level, 5)
        assert (None if solution is None else len(solution)) == expected, level
        lengths[expected] += 1
    assert len(lengths) > 3, "the rooms must try several lengths"


def test_backward_search_agrees_with_the_solver():
    solved = rooms.Room.read(("######", "#@   #", "# *# #", "#    #", "######"))
    layers = rooms.backwards(solved, 50)
    length = {state: i for i, layer in enumerate(layers) for state in layer}
    assert len(length) == sum(map(len, layers)) and max(length.values()) < 50
    free = set(range(30)) - solved.walls
    for box, player in itertools.permutations(sorted(free), 2):
        state = solved._replace(boxes=frozenset({box}), player=player)
        solution = rooms.solve_room(state)
        assert length.get(state) == (None if solution is None else len(solution))


@pytest.mark.parametrize(
    "options", [{}, {"min_length": 3, "max_length": 3}, {"size": 7, "boxes": 2, "min_length": 4, "max_length": 9}]
)
def test_levels_have_the_length_asked_for_and_the_expert_proves_it(options):
    env, lengths = make("sokoban", **options), set()
    for seed in range(25):
        env.reset(seed=seed)
        length = env.optimal_length()
        lengths.add(length)
        infos = [env.step(env.expert())[4] for _ in range(length)]
        assert [info["success"] for info in infos] == [False] * (length - 1) + [True]
    assert lengths == set(range(options.get("min_length", 2), options.get("max_length", 4) + 1))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"size": 5, "max_length": 10}, marks=pytest.mark.thorough),
        {"size": 5, "boxes": 2, "max_length": 6},
    ],
)
def test_small_rooms_have_levels_for_every_seed_of_every_split(options):
    env = make("sokoban", **options)
    for split in SPLITS:
        for seed in range(25):
            env.reset(seed=seed, options={"split": split})
            assert 2 <= env.optimal_length() <= options["max_length"]


def test_sokoban_generation_leaves_the_global_generators_alone():
    random.seed(7)
    np.random.seed(7)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    env = make("sokoban")
    for seed in range(5):
        base.draw_level.cache_clear()
        env.reset(seed=seed)
    assert rooms.generate_room(rooms.Rooms(5, 8, 1, 4, 20), 0) is None, "the generator's own failure is survived"
    after = np.random.get_state()
    assert random.getstate() == python_state
    assert after[0] == numpy_state[0] and np.array_equal(after[1], numpy_state[1]) and after[2:] == numpy_state[2:]


def pulled_apart(level: tuple[str, ...], depth: int) -> set[tuple[str, ...]]:
    """Every level that pulling backwards from a solved one comes by within `depth` moves, by recursion over letters."""
    found, grid = set(), [list(row) for row in level]

    def visit(boxes: frozenset, player: tuple[int, int], left: int) -> None:
        found.add((boxes, player))
        for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            there, behind = (player[0] + down, player[1] + right), (player[0] - down, player[1] - right)
            if left and grid[there[0]][there[1]] != "#" and there not in boxes:
                visit(boxes - {behind} | {player} if behind in boxes else boxes, there, left - 1)

    cells = {(r, c): letter for r, row in enumerate(level) for c, letter in enumerate(row)}
    start = next(cell for cell, letter in cells.items() if letter in "@+")
    visit(frozenset(cell for cell, letter in cells.items() if letter in "*"), start, depth)
    return found


def test_ragens_start_is_where_pulling_backwards_comes_by():
    level = ("######", "#  * #", "# #  #", "# @* #", "######")
    solved = rooms.Room.read(level)
    reachable = pulled_apart(level, 6)
    start = rooms.displaced(solved, 8)  # a search of 8 goes 6 moves away
    cells = frozenset(divmod(box, 6) for box in start.boxes)
    assert (cells, divmod(start.player, 6)) in reachable
    assert start.targets.isdisjoint({start.player, *start.boxes}) and len(rooms.solve_room(start)) <= 6
    # in a corridor there is one way: the farther back, the larger both pulls and distance
    corridor = rooms.Room.read(("#######", "#*@   #", "#######"))
    assert rooms.displaced(corridor, 300).letters() == ("#######", "#.  $@#", "#######")
    assert rooms.displaced(corridor, 4).letters() == ("#######", "#. $@ #", "#######")
    assert rooms.displaced(rooms.Room.read(("####", "#@*#", "####")), 300) is None, "nothing can be pulled"


def test_ragens_walk_keeps_the_boxes_and_happens_half_the_time():
    near = rooms.Room.read(("#####", "#@$.#", "#   #", "#   #", "#####"))
    far = rooms.Room.read(("######", "#@$ .#", "#    #", "#    #", "######"))
    rng = np.random.default_rng(0)
    for room, expected in ((near, 0.8), (far, 0.5)):
        ends = [rooms.walked(room, rng) for _ in range(2000)]
        assert all(end.boxes == room.boxes for end in ends)
        # a walk of two steps may lead back: half the walks go on, and then half the ways lead back at most
        assert expected * 0.7 < np.mean([end != room for end in ends]) < expected + 0.04


@pytest.mark.thorough
@pytest.mark.parametrize("boxes", [1, 2])
def test_the_expert_solves_ragens_sokoban_within_25_turns(boxes):
    env, lengths = make("sokoban", distribution="ragen", boxes=boxes), set()
    protocol = Protocol.of(env)
    assert protocol.max_turns == 25
    for split, seed in itertools.product(SPLITS, range(25)):
        env.reset(seed=seed, options={"split": split})
        lengths.add(env.optimal_length())
        assert players.play_scripted(env, "expert", protocol, seed, split).success
    assert len(lengths) > 6, "levels of any length"


def test_the_depth_of_the_search_belongs_to_ragens_levels():
    for options in ({"search_depth": 30}, {"distribution": "ragen", "search_depth": 2}):
        with pytest.raises(ValueError, match='for distribution="ragen" alone'):
            make("sokoban", **options)
    assert make("sokoban", max_length=12).max_turns == 12
    shallow, deep = (make("sokoban", distribution="ragen", search_depth=depth) for depth in (5, 300))
    for seed in range(20):
        for env in (shallow, deep):
            env.reset(seed=seed)
        assert shallow.optimal_length() <= 6, "three moves of the search, and up to three of the walk"


@pytest.mark.parametrize("ends", [False, True])
def test_nothing_happens_after_the_end(ends):
    env = make("sokoban", size=5, deadlock_ends=ends)
    env.reset(seed=0)
    last = {False: "Right", True: "Down"}[ends]
    env.begin(
        ("#####", "#@$.#", "#   #", "#   #", "#####")
        if last == "Right"
        else ("#####", "# .@#", "#  $#", "#   #", "#####")
    )
    assert env.step(last)[2]
    before = env.state_key()
    for action in env.actions:
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["success"]) == (0, True, not ends) and env.state_key() == before


def test_sokoban_rewards_are_ragens_or_sparse():
    level = ("#######", "#@$ . #", "#.   $#", "#     #", "#######")

    def rewards(kind: str, moves: str) -> list[float]:
        env = make("sokoban", size=7, boxes=2, reward=kind)
        env.reset(seed=0)
        env.begin(level)
        names = {name[0]: name for name in env.actions}
        return [env.step(names[move])[1] for move in moves]

    # on, off (pushed past the target), blocked
    assert rewards("dense", "RRRR") == [-0.1, 0.9, -1.1, -0.1]
    assert rewards("sparse", "RRRR") == [0, 0, 0, 0]
    env = make("sokoban", size=5)
    env.reset(seed=0)
    env.begin(("#####", "#@$.#", "#   #", "#   #", "#####"))
    _, reward, terminated, truncated, info = env.step("Right")
    assert (reward, terminated, truncated, info["success"], info["failure"]) == (10.9, True, False, True, "")


@pytest.mark.parametrize("ends", [False, True])
def test_a_box_in_a_corner_is_a_deadlock(ends):
    env = make("sokoban", size=5, deadlock_ends=ends)
    env.reset(seed=0)
    env.begin(("#####", "# .@#", "#  $#", "#   #", "#####"))
    _, _, terminated, truncated, info = env.step("Down")
    assert not truncated and info["deadlock"] and info["failure"] == "deadlock" and not info["success"]
    assert terminated == ends
    assert env.optimal_length() == -1 and env.optimal_success(99) == 0 and env.expert() in env.actions
    env.begin(("#####", "# @ #", "# $ #", "# . #", "#####"))
    assert not env.step("Down")[4]["deadlock"], "a box on a target is never stuck"
