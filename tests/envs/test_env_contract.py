"""Is an environment of six methods enough, and does `posttrain env check` notice each broken promise?"""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from open_envs import open_or_skip

import envs
from envs import CAPABILITIES, TextEnv, base, check, players, promises
from envs.base import AnyText, OneOf
from envs.episode import Episode
from envs.promises import Subject
from envs.protocol import Protocol, format_response
from envs.wording import system_text

ROOT = Path(__file__).parents[2]


@pytest.fixture
def register(own_environments: None):
    def run(kind: type[TextEnv]) -> type[TextEnv]:
        base.draw_level.cache_clear()
        envs.register(kind)
        return kind

    yield run
    base.draw_level.cache_clear()


class Walk(TextEnv):
    """A whole environment with listed actions, and no optional part."""

    name = "walk"
    actions = ("Left", "Right")

    @classmethod
    def draw(cls, config: Any, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        while True:
            yield int(rng.integers(500)), int(rng.integers(1, 4))

    @classmethod
    def key_of(cls, level: tuple[int, int]) -> str:
        return f"{level[0]} {level[1]}"

    def begin(self, level: tuple[int, int]) -> None:
        self.place, self.left = level

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        name = self.canonical_action(action)
        if name is not None:
            self.place, self.left = self.place + 1, self.left + (1 if name.startswith("Left") else -1)
        return self.result(name is not None)

    def result(self, valid: bool) -> tuple[str, float, bool, bool, dict[str, Any]]:
        over = self.left == 0
        info = {"success": over, "action_is_valid": valid, "action_is_effective": valid, "failure": ""}
        return self.observe(), float(over), over, False, info

    def observe(self) -> str:
        return f"At {self.place}, {self.left} to go"

    def rules(self) -> str:
        return "Go Right until nothing is left to go."


class Say(Walk):
    """The same with free text: the action is `go` and a number of steps; it has a key, an expert and its optimum."""

    name = "say"
    actions = None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        word, _, number = action.strip().partition(" ")
        valid = word == "go" and number in ("1", "2")
        if valid:
            self.place, self.left = self.place + 1, max(0, self.left - int(number))
        return self.result(valid)

    def rules(self) -> str:
        return 'Say "go 1" or "go 2" until nothing is left to go.'

    def expert(self) -> str:
        return "go 2"

    def state_key(self) -> str:
        return f"{self.place} {self.left}"

    def optimal_success(self, horizon: int) -> float:
        return float((self.left + 1) // 2 <= horizon)


def sentences(kind: type[TextEnv], **options: Any) -> str:
    """All breaches that are found within this process."""
    subject = Subject(kind.name, options, episodes=40)
    elsewhere = {promises.same_in_every_process, promises.hostile_text}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(promises, "PROMISES", [each for each in promises.PROMISES if each not in elsewhere])
        return "\n".join(promises.broken_promises(subject))


def variant(kind: type[TextEnv], **changed: Any) -> type[TextEnv]:
    return type(kind.__name__, (kind,), {"__qualname__": f"variant.<locals>.{kind.__name__}", **changed})


# -- six methods -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Walk, Say])
def test_six_methods_keep_every_promise(kind, register):
    register(kind)
    assert not sentences(kind)
    env = envs.make(kind.name, render_mode="ansi")
    env.reset(seed=0)
    assert env.render() == env.observe() and isinstance(env.action_space, OneOf if env.actions else AnyText)
    made = gymnasium.make(f"posttrain/{kind.__name__}-v0")
    made.reset(seed=0)
    assert made.step(made.action_space.sample())[4]["failure"] == ""


@pytest.mark.parametrize(  # a file in envs/, and one in the current folder
    "name", [pytest.param("line", marks=pytest.mark.thorough), "my_module:Line"]
)
def test_the_minimal_environment_is_small_and_passes_the_check(name: str, tmp_path: Path) -> None:
    file = ROOT / "examples" / "minimal_env.py"
    lines = file.read_text().splitlines()
    (kind,) = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    methods = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    assert len(lines) <= 60 and methods - {"__init__"} == set(TextEnv.__abstractmethods__) and len(methods) == 7
    dropped = name == "line"
    if dropped:
        shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(file, tmp_path / ("envs/line.py" if dropped else "my_module.py"))
    done = subprocess.run(
        [sys.executable, "-m", "envs.check", name, "--episodes", "20"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": "" if dropped else str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "kept" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_an_environment_is_made_by_path_and_called_by_it(folder: Path) -> None:
    from posttrain.config.starpo import StarPORun
    from posttrain.rollout import episodes as rollout

    shutil.copy(ROOT / "examples" / "minimal_env.py", folder / "own_line.py")
    env = envs.make("own_line:Line", cells=9)
    assert (env.config, env.made_with, type(env).__module__) == (9, {"cells": 9}, "own_line")
    assert "line" not in envs.names() and sys.path[-1] == str(folder), "last: it hides no installed package"
    with pytest.raises(ValueError, match='Did you mean "cells"'):
        envs.make("own_line:Line", cell=9)
    section = StarPORun.model_validate(
        {"output_dir": "x", "model": {"name_or_path": "x"}, "envs": ["own_line:Line"]}
    ).envs[0]
    assert rollout.open_env(section).title == section.title == "own_line:Line"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("own_lin:Line", "there is no module own_lin: run the command in the folder that has own_lin.py"),
        ("own_line:Lin", "own_line.py there is no Lin. Write module:Class .* Environments there: Half, Line."),
        ("own_line:np", "np is not a subclass of envs.base.TextEnv"),
        ("own_line:Half", r"Half lacks begin\(\), draw\(\)"),
        ("json:loads", "loads is not a subclass .* examples/minimal_env.py is a whole environment"),
        ("raising:Line", "importing raising raised ZeroDivisionError: division by zero"),
        ("leaving:Line", "importing leaving raised SystemExit: 0"),
        ("needing:Line", "needing imports a_package_that_nobody_has, which is not installed"),
        *[(path, "does not name a class. Write module:Class") for path in ("own_line:", ":Line", ".a:B", "a/b.py:C")],
    ],
)
def test_a_path_that_leads_to_no_environment_says_what_to_write(path: str, says: str, folder: Path) -> None:
    example = (ROOT / "examples" / "minimal_env.py").read_text()
    (folder / "own_line.py").write_text(example.replace("class Line", "class Half(TextEnv):\n    pass\n\n\nclass Line"))
    (folder / "raising.py").write_text("1 / 0")
    (folder / "leaving.py").write_text("raise SystemExit(0)")
    (folder / "needing.py").write_text("import a_package_that_nobody_has")
    with pytest.raises(ValueError, match=says):
        envs.make(path)


def test_a_file_of_results_imports_nothing(folder: Path) -> None:
    from posttrain.report.episodes import Pictures, Stage, with_pictures

    (folder / "named_in_a_file.py").write_text("1 / 0")
    stage = Stage("named_in_a_file:Line", {}, {}, 0, {"split": "test"})
    row = {"env": "named_in_a_file:Line", "messages": [], "actions": []}
    assert "frames" not in with_pictures(row, stage, Pictures())
    assert "named_in_a_file" not in sys.modules


def test_only_an_optional_part_that_is_defined_is_there():
    lake = type(envs.make("frozen_lake"))
    assert all(lake.has(capability) for capability in CAPABILITIES)
    assert not any(Walk.has(capability) for capability in CAPABILITIES)
    assert {c for c in CAPABILITIES if Say.has(c)} == {"state_key", "expert", "optimal_success"}
    with pytest.raises(ValueError, match='Did you mean "expert"'):
        lake.has("experts")
    env = Walk()
    for absent in (env.state_key, env.expert, lambda: env.optimal_success(3)):
        with pytest.raises(NotImplementedError, match="walk has no"):
            absent()
    assert env.thought() == "" and env.render() is None


SECTIONS = ["Action space", "Observation space", "Rewards", "Starting state", "Episode end", "Arguments"]


@pytest.mark.parametrize("name", envs.names())
def test_a_docstring_has_gymnasiums_sections_and_every_argument_with_its_default(name: str) -> None:
    env = open_or_skip(name)
    told = inspect.getdoc(type(env)) or ""
    assert re.findall("^## (.*)$", told, re.MULTILINE) == SECTIONS
    assert told.count("\n") < 50 and "after `max_turns`: " in " ".join(told.split())
    listed = re.findall(r"`(\w+)=(.*?)`(?=[,:])", told.partition("## Arguments")[2])
    expected = {key: each.default for key, each in inspect.signature(type(env)).parameters.items()}
    assert {key: ast.literal_eval(value) for key, value in listed} == expected
    assert {mode for mode in ("ansi", "rgb_array") if f'"{mode}"' in told} == set(env.metadata["render_modes"])


def test_what_is_required_and_missing_is_named(register):
    with pytest.raises(ValueError, match=r"Half lacks begin\(\), draw\(\), key_of\(\), observe\(\), step\(\), name"):
        register(type("Half", (TextEnv,), {"rules": lambda self: "", "actions": ("a",)}))


def test_a_file_that_cannot_be_used_leaves_the_others_alone_and_is_named(tmp_path):
    shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "envs" / "riddle.py").write_text("import a_package_that_nobody_has\n")
    code = "import envs\nprint(envs.make('sokoban').name)\nenvs.make('riddle')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "sokoban\n"
    assert "envs/riddle.py cannot be used (ModuleNotFoundError: No module named 'a_package" in done.stderr


@pytest.mark.parametrize("file", ["a_lake.py", "my_lake.py"])  # read before the original, and after it
def test_two_files_of_one_name_are_refused(tmp_path: Path, file: str) -> None:
    shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "envs" / "frozen_lake.py", tmp_path / "envs" / file)
    code = "import envs\nprint(envs.make('sokoban').name)\nenvs.make('frozen_lake')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "sokoban\n" and "both have the name frozen_lake: rename one of them" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 4.5}, "valid integer"),
        ({"size": "big"}, "valid integer"),
        ({"size": True}, "valid integer"),
        ({"frozen": float("nan")}, "finite number"),
        ({"slippery": 1}, "valid boolean"),
        ({"symbols": ["P"]}, "valid dictionary"),
        ({"separator": None}, "valid string"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(options, says):
    (key,) = options
    with pytest.raises(ValueError, match=f"frozen_lake cannot be made with {key}=.*{says}"):
        envs.make("frozen_lake", **options)
    assert envs.make("frozen_lake", frozen=1, symbols={"hole": "H"}).name == "frozen_lake"


# -- actions -----------------------------------------------------------------------------------------------------------


def test_listed_actions_are_sampled_by_name_and_may_depend_on_the_level(register):
    space = OneOf(["Up", "Down"])
    space.seed(0)
    assert (
        {space.sample() for _ in range(20)} == {"Up", "Down"} and "Left" not in space and space == OneOf(["Up", "Down"])
    )

    def begin(self: Any, level: tuple[int, int]) -> None:
        Walk.begin(self, level)
        self.actions = (f"Left{level[1]}", f"Right{level[1]}")

    kind = register(variant(Walk, begin=begin))
    assert not sentences(kind)
    env = envs.make("walk")
    arms = set()
    for seed in range(20):
        env.reset(seed=seed)
        assert env.actions is not None
        assert env.action_space.sample() in env.actions == env.action_space.texts
        arms.add(env.actions)
    assert len(arms) == 3
    episode = Episode(env, Protocol(), seed=3)
    assert not episode.step(format_response("", ["Left9"], Protocol())).valid
    assert env.actions and episode.step(format_response("", [env.actions[0].lower()], Protocol())).valid


def test_any_text_is_any_text():
    space = AnyText(50)
    assert "é\u2028\n" in space and "x" * 51 not in space and "" not in space and 3 not in space
    assert all(space.sample() in space for _ in range(100))


def test_free_text_is_judged_by_the_environment_and_is_one_action_a_turn():
    protocol = Protocol(max_actions_per_turn=4, max_turns=3, max_actions=8)
    episode = Episode(Say(), protocol, seed=0)
    episode.env.begin((7, 3))
    assert "Then write your action between <answer> and </answer>." in system_text(episode.env, protocol)
    compact = Protocol(max_actions_per_turn=4, max_turns=3, max_actions=8, style="compact")
    assert "one action each. Reply" in system_text(episode.env, compact)
    wrong = episode.step("<think>a</think><answer>go 1 || go 1</answer>")
    assert episode.actions == ["go 1 || go 1"] and (wrong.valid, wrong.penalty) == (False, -0.1)
    assert episode.past[-1].valid is False and episode.malformed_turns == 0
    assert "You have 2 turns left." in (wrong.user or ""), "the limit of turns comes first"
    assert episode.step("<think>a</think><answer>\n go 1\n</answer>").valid and episode.actions[-1] == "\n go 1\n"
    last = episode.step("<think>a</think><answer>go 2</answer>")
    assert last.done and last.reward == 1.0 and episode.success and episode.terminated


def test_a_state_without_a_key_is_known_by_its_observation():
    walk, say = (Episode(kind(), Protocol(), seed=0) for kind in (Walk, Say))
    assert walk.state_key() == walk.observation != say.state_key() == say.env.state_key()
    walk.step(format_response("", ["Left"], Protocol()))
    assert walk.state_key() == walk.observation == walk.env.observe()


# -- who plays ---------------------------------------------------------------------------------------------------------


def test_players_are_those_that_are_there():
    for kind, names in ((Walk, ["random"]), (Say, ["expert"])):
        env = kind()
        env.reset(seed=0)
        assert players.player_names(env) == names
    free = variant(Walk, actions=None)()
    free.reset(seed=0)
    assert players.player_names(free) == []
    assert players.play_scripted(Say(), "expert", Protocol(), 0, "train").success


def test_demonstrations_fall_back_to_what_there_is(register):
    from posttrain.config.data import Source
    from posttrain.config.shared import EnvSection
    from posttrain.data import embedded, reading
    from posttrain.types import UserError

    assert players.default_mix(Say()) == {"expert": 1.0}
    two = variant(Walk, players=lambda self: {"random": self.choose(), "left": "Left"})
    assert players.default_mix(two()) == {"random": 0.5, "left": 0.5}
    register(Say)
    register(Walk)
    (row,) = embedded.demonstrations([("say", {})], 1, 0, answers_only=1.0)
    assert row["messages"][2]["content"] == "<think></think><answer>go 2</answer>"
    assert row["messages"][2]["mask_spans"] == [[0, len("<think></think>")]]
    source = Source(kind="demonstrations", path="embedded", rows=2, envs=[EnvSection(name="walk")])
    with pytest.raises(UserError, match=r"data.sources.0.envs: The environment walk cannot be demonstrated: .*players"):
        list(reading.read_rows(source, "data.sources.0", 0))
    register(variant(Say, step=lambda self, action: {}["no"]))
    source = Source(kind="demonstrations", path="embedded", rows=2, envs=[EnvSection(name="say")])
    with pytest.raises(UserError, match=r"raised KeyError: 'no'.*env check"):
        list(reading.read_rows(source, "data.sources.0", 0))


def test_a_model_is_compared_with_the_players_that_are_there(register):
    from types import SimpleNamespace

    from posttrain.config.shared import EnvSection, ProtocolSection
    from posttrain.evaluation.scoring import play_baselines

    register(Say)
    register(Walk)
    sections = [EnvSection(name=name) for name in ("walk", "say")]
    suite = SimpleNamespace(protocol=ProtocolSection(), split="test", envs=sections)
    cfg: Any = SimpleNamespace(suites=SimpleNamespace(envs=suite))
    task: Any = SimpleNamespace(part="walk", items=[{"seed": seed} for seed in range(5)])
    assert set(play_baselines(cfg, task)) == {"random"}
    task.part = "say"
    found = play_baselines(cfg, task)
    assert set(found) == {"expert", "optimum"} and found["expert"]["success"] == found["optimum"]["success"] == 1
    register(variant(Walk, actions=None))
    task.part = "walk"
    assert play_baselines(cfg, task) == {}


def test_there_are_pictures_only_of_an_environment_that_has_them(register):
    from posttrain.report.episodes import frames_of

    register(Walk)
    assert frames_of("walk", {}, 0, {"split": "train"}, ["Left"]) == []
    assert len(frames_of("frozen_lake", {"size": 3}, 0, {"split": "train"}, ["Left", "Up"])) == 3
    with pytest.raises(ValueError, match='no render mode "rgb_array"'):
        envs.make("walk", render_mode="rgb_array")


# -- posttrain env check: a broken toy for each promise ---------------------------------------------------------------


def few(cls: Any, config: Any, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    while True:
        yield int(rng.integers(60)), 1


def one_or_one_point_zero(cls: Any, config: Any, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
    while True:
        place = int(rng.integers(150))
        yield (place if rng.random() < 0.5 else float(place)), 1


def by_chance(cls: Any, level: tuple[int, int]) -> str:
    return str(next(COUNT))


COUNT = itertools.count()


def spoil(**changed: Any) -> Any:
    """A step whose result has other values than it should: an index or a key of info, and the value."""

    def step(self: Any, action: str) -> Any:
        result: list[Any] = list(Walk.step(self, action))
        for key, value in changed.items():
            if key.startswith("at"):
                result[int(key[2:])] = value
            elif value is None:
                del result[4][key]
            else:
                result[4][key] = value
        return tuple(result)

    return step


def swallow(self: Any, action: str) -> Any:
    if self.canonical_action(action) is None:
        self.place += 1
    return Walk.step(self, action)


def sloppy_begin(self: Any, level: tuple[int, int]) -> None:
    self.place, self.left = level[0] + vars(self).get("left", 0) * 0 + vars(self).get("seen", 0), level[1]


def remembering_step(self: Any, action: str) -> Any:
    self.seen = vars(self).get("seen", 0) + 1
    return Walk.step(self, action)


def noisy_begin(self: Any, level: tuple[int, int]) -> None:
    self.place, self.left = level[0] + int(self.noise.integers(1000)), level[1]


def random_step(self: Any, action: str) -> Any:
    self.place += int(np.random.default_rng().integers(10**6))
    return Walk.step(self, action)


def restless_players(self: Any) -> dict[str, str]:
    self.place += 1
    return {"random": "Left"}


def raise_loudly() -> Iterator[str]:
    """Raise what would steer a terminal."""
    yield from ()
    raise ValueError("\x1b[2Jno")


BROKEN = [
    ({"draw": classmethod(few)}, "the split validation has only"),
    ({"draw": classmethod(one_or_one_point_zero)}, "levels are both in"),
    ({"key_of": classmethod(by_chance)}, "the split train gave levels of"),
    ({"split_of": classmethod(lambda cls, level: envs.SPLITS[next(COUNT) % 3])}, "gave levels of"),
    ({"begin": sloppy_begin, "step": remembering_step}, "after an episode begins elsewhere"),
    ({"begin": noisy_begin}, "begin() must not use self.noise"),
    ({"step": random_step}, "chance must come from self.noise"),
    ({"step": lambda self, action: ("x", 0.0, False, {})}, "not observation, reward, terminated"),
    ({"step": spoil(at0="elsewhere")}, "another text than observe()"),
    ({"step": spoil(at1=float("nan"))}, "not a finite number"),
    ({"step": spoil(at1="much")}, "not a finite number"),
    ({"step": spoil(at2=None)}, "both must be bool"),
    ({"step": spoil(failure=None)}, 'None for info["failure"], which must be a str'),
    ({"step": spoil(success="yes")}, "'yes' for info[\"success\"], which must be a bool"),
    ({"step": spoil(success=True, failure="lost")}, 'both succeeds and fails ("lost")'),
    ({"step": spoil(action_is_valid=True)}, "though it is not in the list of actions"),
    ({"step": swallow}, "an invalid action must change nothing"),
    ({"state_key": lambda self: str(self.left)[:0]}, "the same state_key as before"),
    ({"step": spoil(action_is_effective=False), "state_key": lambda self: self.observe()}, "and another state_key"),
    ({"rules": lambda self: " "}, "rules() returned ' '"),
    ({"messages": lambda self: [{"role": "system", "content": "Walk."}]}, "does not end with a user message"),
    ({"observe": lambda self: ""}, "observe() returned ''"),
    ({"actions": ("up", "Up")}, "the action 'up' is read as ['Up']"),
    ({"actions": ("go || on", "Right")}, "is read as ['go', 'on']"),
    ({"step": spoil(action_is_valid=False, action_is_effective=False)}, "well-formed answers was valid"),
    ({"expert": lambda self: "Fly"}, "expert plays 'Fly', which is not in the list"),
    ({"players": restless_players}, "they must change nothing"),
    ({"players": lambda self: {str(self.left): "Left"}}, "in one state and"),
    ({"metadata": {"render_modes": ["rgb_array"], "render_fps": 2}}, 'lacks "ansi"'),
    ({"metadata": {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}}, "warns: RGB-array rendering"),
    ({"render": lambda self: 3}, "check_env"),
    ({"rules": lambda self: {}["task"]}, "it raised KeyError: 'task' (test_env_contract.py, line"),
    ({"rules": lambda self: next(raise_loudly())}, r"it raised ValueError: \x1b[2Jno (test_env_contract.py, line"),
    ({"optimal_success": lambda self, horizon: 1.5}, "not a probability"),
    ({"optimal_success": lambda self, horizon: 0.0}, "random wins"),
    ({"expert": lambda self: "Left", "optimal_success": lambda self, h: 1.0}, "does not play its best"),
]


BROKEN_IN_FREE_TEXT = [
    ({"expert": lambda self: " "}, "not a text that can stand in an answer"),
    ({"expert": lambda self: "go 3"}, "the expert's action on seed"),
    ({"expert": lambda self: "</answer>go 1"}, "not a text that can stand in an answer"),
]


@pytest.mark.parametrize(
    ("base", "changed", "says"),
    [*((Walk, *row) for row in BROKEN), *((Say, *row) for row in BROKEN_IN_FREE_TEXT)],
)
def test_check_notices_what_is_broken(base, changed, says, register):
    found = sentences(register(variant(base, **changed)))
    assert says in found, found


HARMED = {  # how an answer is read -> what the check says
    "eval(action)": "it executed the text of an answer",
    "len(action.split('||')[1])": "it raised IndexError: list index out of range (careless.py, line",
    "__import__('os')._exit(3) if '((((' in action else 0": "ended its process with exit code 3",
    "__import__('signal').pause() if '[[[' in action else 0": "was not read within 3 seconds",
    "setattr(self, 'left', 0)": "it succeeded",
}
CARELESS = """
from test_env_contract import Say

class Careless(Say):
    name = "careless"

    def step(self, action):
        try:
            {read}
        except (SyntaxError, NameError, TypeError, ValueError, MemoryError, RecursionError):
            pass
        if action == "go 2":
            return super().step(action)
        return self.result(False)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "read", [*list(HARMED)[:3], *(pytest.param(read, marks=pytest.mark.slow) for read in list(HARMED)[3:])]
)
def test_check_survives_and_names_what_hostile_text_does(read, tmp_path, monkeypatch, register):
    shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "envs" / "careless.py").write_text(CARELESS.format(read=read))
    monkeypatch.setattr(promises, "PATIENCE", 3 if "within 3 seconds" in HARMED[read] else 15)
    register(variant(Say, name="careless", __doc__="stands for the one in the folder"))
    run = subprocess.run

    def there(command: Any, **named: Any) -> Any:
        named["env"]["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT), *sys.path])
        return run(command, cwd=tmp_path, **named)

    monkeypatch.setattr(subprocess, "run", there)
    found = list(promises.hostile_text(Subject("careless")))
    assert any(HARMED[read] in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('["math", {name: length, words: 5}]', ["math", {"name": "length", "words": 5}]),
        ("[my_rewards:polite]", ["my_rewards:polite"]),
        ("{command: [python, a.py], turns: 3}", {"command": ["python", "a.py"], "turns": 3}),
        ("{{ question }}", "{{ question }}"),
        ("{% if a %}b{% endif %}", "{% if a %}b{% endif %}"),
        ("[INST] Be brief.", "[INST] Be brief."),
        ("[2024-13-45]", "[2024-13-45]"),
        ("no", "no"),
        ("a: b", "a: b"),
        ("1e-4", 1e-4),
        ("null", None),
    ],
)
def test_lists_and_mappings_are_read_as_in_a_config_file(text, value):
    assert envs.option(f"x={text}") == ("x", value)


@pytest.mark.parametrize("name", ["frozen_lake", pytest.param("sokoban", marks=pytest.mark.thorough)])
def test_check_shows_an_episode_the_players_and_the_levels(name, capsys):
    assert check.main([name, "observation=grid", "--episodes", "5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(
        word in shown for word in ("expert", "5/5", "random", "kept", "state_key", "Different levels in 64 draws")
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frozenlake"], 'Did you mean "frozen_lake"'),
        (["sokoban", "sise=6"], 'Did you mean "size"'),
        (["sokoban", "size"], "name=value"),
        (["sokoban", "size=big"], "size='big': it should be a valid integer"),
        (["sokoban", "size=1"], "size >= 5"),
        (["sokoban", "--split", "tset"], 'Did you mean "test"'),
        (["sokoban", "--turns", "0"], "at least 1"),
        (["sokoban", "--episodes", "0"], "at least 1"),
        (["countdown", "max_number=99999999999999999999"], "max_number from 2 to 999999"),
        (["countdown", "max_number=3000000000", "max_target=3000000000"], "max_target from 10 to 999999"),
        (["lean", "topics=logic"], 'it should be a valid list. Write a list, here topics=["logic"]'),
        (["lean", "topics=logic, lists"], 'here topics=["logic", "lists"]'),
        (["lean", "topics=\N{ROCKET}"], 'here topics=["\N{ROCKET}"]'),  # a config file reads no pair of escapes
        (["lean", "topics=7"], "topics=7: it should be a valid list.\n"),
        pytest.param(
            ["frozen_lake", "frozen=1", "--episodes", "3"],
            "frozen_lake with frozen=1: the split validation has only",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ["frozen_lake", "frozen=1", "size=3", "--episodes", "3"],
            "the same few levels again and again. Choose",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_check_refuses_nonsense_in_one_paragraph(arguments, says, capsys):
    assert check.main(arguments) == 2
    problem = capsys.readouterr().err
    assert says in problem and problem.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "option"), [("metamath_qa", "attempts"), ("countdown", "tries")])
def test_check_ends_whatever_number_of_turns_an_option_allows(name, option, monkeypatch):
    monkeypatch.setattr(promises, "TURNS", 120)
    assert promises.protocol_for(envs.make(name, **{option: 10**12})).max_turns == 120
    assert promises.protocol_for(envs.make(name, **{option: 7})).max_turns == 7
    assert promises.protocol_for(envs.make(name), 10**4).max_turns == 10**4, "what was asked for"
    begun = time.process_time()
    assert check.main([name, f"{option}={10**12}", "--episodes", "5"]) == 0
    assert time.process_time() - begun < 30


@pytest.mark.thorough
def test_the_turns_that_are_asked_for_are_those_of_the_other_process():
    asked = Subject("countdown", {"tries": 4}, Protocol(max_turns=3, max_actions=3))
    assert not list(promises.same_in_every_process(asked)), "demonstrations tell how many turns are left"


@pytest.mark.thorough
def test_check_notices_an_environment_that_differs_between_processes(monkeypatch):
    lake = type(envs.make("frozen_lake"))
    honest = lake.observe
    assert not list(promises.same_in_every_process(Subject("frozen_lake")))
    monkeypatch.setattr(lake, "observe", lambda self: f"{honest(self)} here")
    assert "sees other levels" in " ".join(promises.same_in_every_process(Subject("frozen_lake")))


def test_check_says_where_an_environment_raises_and_when_there_are_no_levels(register, monkeypatch, capsys):
    def wrong(self: Any) -> str:
        raise ValueError("a mistake of its author")

    monkeypatch.setattr(promises, "PROMISES", [promises.pure_resets, promises.play_in_the_protocol])
    register(variant(Walk, observe=wrong))
    assert check.main(["walk", "--episodes", "2"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "it raised ValueError: a mistake of its author (test_env_contract.py, line" in shown and "in wrong)" in shown
    assert shown.count("a mistake of its author") == 1, "the same error at the same place is told once"
    register(variant(Walk, draw=classmethod(lambda cls, config, rng: iter([]))))
    assert check.main(["walk", "--episodes", "2"]) == 2
    assert "no level for the split" in capsys.readouterr().err


def test_an_environment_that_holds_nothing_out_may_have_few_levels(register, capsys):
    kind = register(variant(Walk, draw=classmethod(few), split_of=classmethod(lambda cls, level: None)))
    assert not sentences(kind)
    envs.make("walk").reset(seed=0, options={"split": "test"})
