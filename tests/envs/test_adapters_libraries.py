"""Are environments of Gymnasium, TextArena and reasoning-gym good ones of ours, by a few lines each?"""

# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportArgumentType=false
from __future__ import annotations

import copy
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import envs
from envs import promises
from envs.adapters import base as shared
from envs.adapters.gymnasium import GymnasiumText
from envs.adapters.reasoning_gym import UNIQUE, same_answer
from envs.players import play_scripted
from envs.promises import Subject
from envs.protocol import Protocol

ROOT = Path(__file__).parents[2]
ARENA = "TextArena is not installed: pip install textarena==0.7.4"
GYM = "reasoning-gym is not installed: pip install reasoning_gym==0.1.25"


@pytest.fixture
def broken(own_environments: None, monkeypatch: pytest.MonkeyPatch):
    """All breaches that are found within this process."""
    elsewhere = {promises.same_in_every_process, promises.hostile_text}
    monkeypatch.setattr(promises, "PROMISES", [each for each in promises.PROMISES if each not in elsewhere])

    def run(name: str, kind: type[envs.TextEnv] | None = None, **options: Any) -> list[str]:
        if kind is not None:
            envs.register(kind)
            spec = gymnasium.registry[envs.gymnasium_id(kind)]
            spec.entry_point = kind
        return promises.broken_promises(Subject(name, options, episodes=20))

    return run


# -- Gymnasium ---------------------------------------------------------------------------------------------------------

PLACES = ("red", "green", "yellow", "blue", "taxi")


class Cab(GymnasiumText):
    """The taxi of Gymnasium; `rainy` lets it slide."""

    name, env_id = "cab", "Taxi-v4"
    actions = ("South", "North", "East", "West", "Pickup", "Dropoff")
    max_turns = 20

    def __init__(self, rainy: bool = False, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.config = (("is_rainy", rainy),)

    def describe(self, state: Any) -> str:
        row, column, passenger, goal = self.inner.unwrapped.decode(state)
        return f"Taxi {row} {column} Passenger {PLACES[passenger]} Goal {PLACES[goal]}"

    def rules(self) -> str:
        return "Fetch the passenger and drop him at the goal."


class Cliff(GymnasiumText):
    name, env_id, held_out = "cliff", "CliffWalking-v1", False
    actions = ("Up", "Right", "Down", "Left")
    max_turns = 14

    def describe(self, state: Any) -> str:
        return f"You {state // 12} {state % 12} Goal 3 11"

    def rules(self) -> str:
        return (
            "Walk to the goal. Below row 2 there is a cliff between columns 0 and 11: it takes you back to the start."
        )

    def won(self, reward: float) -> bool:
        return True

    def expert(self) -> str:
        row, column = divmod(self.state, 12)
        return "Up" if row == 3 and column == 0 else "Right" if column < 11 else "Down"


class Cards(GymnasiumText):
    name, env_id = "cards", "Blackjack-v1"
    actions = ("Stick", "Hit")

    def describe(self, state: Any) -> str:
        return f"You {state[0]} Dealer {state[1]} Ace {state[2]}"

    def rules(self) -> str:
        return "Blackjack: come closer to 21 than the dealer."


@pytest.mark.parametrize("kind", [Cab, Cliff, Cards])
def test_environments_of_gymnasium_keep_every_promise(kind: type[GymnasiumText], broken) -> None:
    assert not broken(kind.name, kind)


class Littered(Cards):
    """What is collected in a step is not the environment's doing."""

    name = "littered"

    def describe(self, state: Any) -> str:
        warnings.warn("unclosed <socket.socket fd=9>", ResourceWarning, stacklevel=1)
        return super().describe(state)


def test_what_is_collected_meanwhile_is_no_breach(broken) -> None:
    assert not broken(Littered.name, Littered)


def test_a_step_is_that_of_gymnasium() -> None:
    env = Cab()
    text, _ = env.reset(seed=3)
    twin = gymnasium.make("Taxi-v4")
    state, _ = twin.reset(seed=env.level.seed)
    assert env.describe(state) == text and env.level.key == str(state)
    rng = np.random.default_rng(0)
    for number in rng.integers(6, size=60):
        state, reward, over, _, _ = twin.step(int(number))
        observation, gain, ended, cut, info = env.step(env.actions[number].lower())
        assert (env.describe(state), reward, over) == (observation, gain, ended) and not cut and info["action_is_valid"]
    before = env.observe()
    assert env.step("fly") == (
        before,
        0.0,
        False,
        False,
        {**info, "action_is_valid": False, "action_is_effective": False},
    )
    env = Cliff()
    env.reset(seed=0)
    for action in ("Right", "Up", *["Right"] * 11, "Down"):
        last = env.step(action)
    assert last[1:4] == (-1.0, True, False) and last[4]["success"]
    assert env.step("Up") == (
        last[0],
        0.0,
        True,
        False,
        {**last[4], "action_is_valid": False, "action_is_effective": False},
    )


def test_the_members_of_a_group_share_the_level_and_not_their_noise() -> None:
    def walk(noise: int) -> list[str]:
        env = Cab(rainy=True)
        first, _ = env.reset(seed=1, options={"noise_seed": noise})
        return [first, *(env.step(action)[0] for action in ["South", "East", "North"] * 5)]

    walks = [walk(noise) for noise in (1, 2, 3, 1)]
    assert walks[0] == walks[3] and len({walk[0] for walk in walks}) == 1 and len(set(map(str, walks))) == 3


def test_a_time_limit_truncates_and_names_must_fit() -> None:
    class Short(Cliff):
        def __init__(self) -> None:
            super().__init__()
            self.config = (("max_episode_steps", 3),)

    env = Short()
    env.reset(seed=0)
    assert [env.step("Up")[2:4] for _ in range(4)] == [(False, False)] * 2 + [(False, True)] * 2
    names = type("Names", (Cliff,), {"actions": ("Up", "Down")})
    with pytest.raises(ValueError, match=r"Names names 2 actions, but CliffWalking-v1 has Discrete\(4\)"):
        names().reset(seed=0)
    with pytest.raises(ValueError, match="Box"):
        type("Pole", (Cliff,), {"env_id": "Pendulum-v1"})().reset(seed=0)


def test_what_is_dear_to_make_is_lent_again() -> None:
    made: list[int] = []
    lender = shared.Lender(lambda number: made.append(number) or type("Thing", (), {"lost": False})())
    owners = [Cliff(), Cliff()]
    things = [lender.lend(owner, 7) for owner in owners]
    assert things[0] is not things[1]
    owners.clear()
    again = [lender.lend(shared, 7), lender.lend(shared, 7)]
    assert {*map(id, again)} == {*map(id, things)} and made == [7, 7]
    things[0].lost = True
    lender.idle[7,] = [things[0]]
    assert lender.lend(shared, 7) is not things[0] and made == [7, 7, 7]


# -- TextArena ---------------------------------------------------------------------------------------------------------

MOVES = ["[up]", "[down]", "[left]", "[right]"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"game": "FrozenLake-v0-random", "actions": MOVES},
        pytest.param({"game": "Mastermind-v0"}, marks=pytest.mark.slow),
        {"game": "TowerOfHanoi-v0", "held_out": False},
        pytest.param({"game": "2048-v0-very-easy", "actions": MOVES}, marks=pytest.mark.slow),
    ],
)
def test_games_of_textarena_keep_every_promise(options: dict[str, Any], broken) -> None:
    pytest.importorskip("textarena", reason=ARENA)
    assert not broken("textarena", **options)


def test_a_move_is_that_of_textarena_and_the_global_generators_stay_as_they_are() -> None:
    arena = pytest.importorskip("textarena", reason=ARENA)
    env = envs.make("textarena", game="FrozenLake-v0-random")
    random.seed(1)
    np.random.seed(1)
    outside = random.getstate(), np.random.get_state()[1].tolist()
    text, _ = env.reset(seed=5)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == outside
    twin = arena.make("FrozenLake-v0-random-raw")
    twin.reset(num_players=1, seed=env.level.seed)
    prompt, board = (message for _, message, _ in twin.get_observation()[1])
    assert (env.rules(), text) == (prompt.strip(), board.strip())
    random.setstate(outside[0])
    for action in ("[up]", "[left]", "[down]", "nonsense", "[right]", "9" * 5000, "[right]", "[down]", "[up]"):
        before = env.state_key(), env.observe()
        observation, reward, over, _, info = env.step(action)
        if not info["action_is_valid"]:
            assert (env.state_key(), env.observe(), reward) == (*before, 0.0) and not info["action_is_effective"]
        else:
            twin.step(action)
            said = [message.strip() for _, message, kind in twin.get_observation()[1] if kind.name != "PLAYER_ACTION"]
            assert observation == "\n".join(said) and over == twin.state.done
            assert not over or reward == twin.state.rewards[0]
    assert random.getstate() == outside[0]


def test_constructors_draw_nothing_outside_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("textarena", reason=ARENA)
    random.seed(1)
    outside = random.getstate()
    env = envs.make("textarena", game="RushHour-v0", held_out=False)
    env.reset(seed=1)
    assert random.getstate() == outside
    env = envs.make("textarena", game="LogicPuzzle-v0", held_out=False)
    env.reset(seed=1)
    env.step("[people locations Alice park X]")
    assert capsys.readouterr().out == ""


def test_invalid_moves_never_end_a_game_and_a_win_is_a_win() -> None:
    pytest.importorskip("textarena", reason=ARENA)
    env = envs.make("textarena", game="GuessTheNumber-v0", held_out=False)
    env.reset(seed=2)
    assert not any(env.step(text)[2] for text in ("[99]", "five", "[-1]", "[99]", "[99]"))
    secret = env.game.state.game_state["game_number"]
    other = secret % 20 + 1
    assert env.step(f"[{other}]")[4]["action_is_valid"] and "number is" in env.observe()
    copied = copy.deepcopy(env)
    assert copied.step(f"[{secret}]")[1:4] == (1.0, True, False) and copied.step("[1]")[1:3] == (0.0, True)
    assert not env.over and env.step(f"[{secret}]")[4]["success"]


@pytest.mark.parametrize(
    ("game", "says"),
    [
        ("", "needs the option game, for example game=FrozenLake-v0-random"),
        ("Chess", "TextArena cannot make the game"),
        ("TicTacToe-v0", "not a game for one player"),
        ("TwentyQuestions-v0", "OpenRouter API key not found"),
    ],
)
def test_a_game_that_cannot_be_played_here_is_refused(game: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textarena", reason=ARENA)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=says):
        envs.make("textarena", **({"game": game} if game else {}))


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("dataset", ["spell_backward", "basic_arithmetic", "maze", "mini_sudoku"])
def test_data_sets_of_reasoning_gym_keep_every_promise(dataset: str, broken) -> None:
    pytest.importorskip("reasoning_gym", reason=GYM)
    assert not broken("reasoning_gym", dataset=dataset)
    env = envs.make("reasoning_gym", dataset=dataset)
    assert all(play_scripted(env, "expert", Protocol.of(env), seed, "test").success for seed in range(50))
    assert sum(play_scripted(env, "random", Protocol.of(env), seed, "test").success for seed in range(50)) < 25


def test_answers_differ_in_form_alone() -> None:
    assert (
        same_answer(" NUS\n", "nus")
        and same_answer("1  2\n3", "1 2\n3")
        and same_answer("+12.50", "12.5")
        and same_answer("0012", "12")
    )
    wrong = [("1 2", "12"), ("1e3", "1000"), ("12.", "12"), ("", "0"), ("nan", "0"), ("٣", "4"), ("12 34", "12")]
    assert not any(same_answer(answer, stored) for answer, stored in wrong) and not same_answer("9" * 60_000, "9")


def test_the_answers_of_all_data_sets_that_are_asked_are_right_by_their_own_scorers() -> None:
    """The library's scorers judge the library's answers here, never a model's."""
    factory = pytest.importorskip("reasoning_gym.factory", reason=GYM)
    from reasoning_gym.dataset import ProceduralDataset

    compared = {n for n, (kind, _) in factory.DATASETS.items() if kind.score_answer is ProceduralDataset.score_answer}
    assert factory.DATASETS.keys() >= UNIQUE and not UNIQUE & compared and len(compared) > 25
    for name in sorted(UNIQUE):
        data = factory.create_dataset(name, seed=0)
        for index in range(2):
            item = data[index]
            assert isinstance(item["answer"], str) and item["answer"].strip(), name
            assert data.score_answer(item["answer"], item) == 1, name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs the option dataset"),
        ({"dataset": "spell_bakward"}, 'Did you mean "spell_backward"'),
        ({"dataset": "countdown"}, "may evaluate an answer as code"),
        ({"dataset": "n_queens"}, "not known to be unique"),
        ({"dataset": "spell_backward", "settings": {"longest": 4}}, "longest"),
        ({"dataset": "spell_backward", "settings": {"min_word_len": 0}}, "min_word_len must be positive"),
    ],
)
def test_a_data_set_that_cannot_be_judged_is_refused(options: dict[str, Any], says: str) -> None:
    pytest.importorskip("reasoning_gym", reason=GYM)
    with pytest.raises(ValueError, match=says):
        envs.make("reasoning_gym", **options)


def test_settings_reach_the_generator() -> None:
    pytest.importorskip("reasoning_gym", reason=GYM)
    settings = {"min_word_len": 3, "max_word_len": 3}
    env = envs.make("reasoning_gym", dataset="spell_backward", settings=settings)
    assert {len(env.reset(seed=seed) and env.level.answer) for seed in range(30)} == {3}


def test_a_missing_package_is_named_and_nothing_is_imported_before_it_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"nobody_has_this cannot be imported .* pip install nobody==1"):
        shared.package("nobody_has_this", "nobody==1")
    code = "import envs, sys; print([m for m in ('openenv', 'textarena', 'reasoning_gym', 'trl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
