"""Is a function of one's own used, and is a wrong one refused in words before anything is loaded?"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import config, learn, moved, played, policy
from test_phase3 import rows, settings, train
from tiny_runs import ROOT, python

import envs
from envs.by_path import by_path as bare_by_path
from envs.protocol import Parsed, Protocol, parse
from examples import own_advantage, own_loss, own_parser
from posttrain.config import AlgorithmSection, StarPORun
from posttrain.config.algorithm import AlgorithmSection as Algorithm
from posttrain.config.plugins import PARAMETERS, by_path, check_parser
from posttrain.config.shared import EnvSection, ProtocolSection
from posttrain.rollout import new_episode
from posttrain.starpo import estimators
from posttrain.starpo.experience import Batch
from posttrain.starpo.functions import check_functions
from posttrain.starpo.run import Crashed, play_command
from posttrain.types import Trajectory, UserError

ADVANTAGE = "examples.own_advantage:group_relative"
LOSS = "examples.own_loss:unclipped"
PARSER = "examples.own_parser:last_answer"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes own.py into the folder that the run is started in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "own.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    by_path.cache_clear()
    bare_by_path.cache_clear()
    sys.modules.pop("own", None)


def short(file: Path, player: Path) -> Path:
    few = {"every": 2, "episodes": 2, "final_episodes": 2}
    return settings(file, player, trainer={"max_steps": 2}, rollout={"groups": 3}, evaluation=few)


def first_update(run: Path) -> dict[str, Any]:
    updates = [row for row in rows(run) if "policy/loss" in row]
    assert [row["step"] for row in updates] == [1, 2]
    return updates[0]


@pytest.fixture(scope="module")
def built_in(player: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = short(tmp_path_factory.mktemp("built_in") / "run.yaml", player)
    train(file)
    return first_update(file.with_name("run"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("key", "path", "same"),
    [
        ("algorithm.advantage", ADVANTAGE, True),  # it is GRPO's
        ("algorithm.loss_type", LOSS, False),
        ("protocol.parser", PARSER, False),
    ],
    ids=["advantage", "loss", "parser"],
)
def test_a_run_takes_a_function_of_one_s_own(
    player: Path, built_in: dict[str, Any], tmp_path: Path, key: str, path: str, same: bool
) -> None:
    file = short(tmp_path / "run.yaml", player)
    train(file, f"{key}={path}")
    own = first_update(tmp_path / "run")
    close = all(own.get(name) == pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in built_in.items())
    assert close == same
    with pytest.raises(UserError, match=path):  # who goes on has to name the same function
        train(file, "--resume")


def test_the_example_advantage_is_grpo() -> None:
    groups = played(policy())
    for number, group in enumerate(groups):
        for t in group:
            t.group = number
    batch = Batch.of([t for group in groups for t in group])
    earned = estimators.Earned.of(batch, torch.ones(len(batch.episodes), dtype=torch.bool), None)
    built_in, named = (estimators.estimate(AlgorithmSection(advantage=name), earned)[0] for name in ("grpo", ADVANTAGE))
    assert torch.allclose(built_in, named, atol=1e-12) and built_in.abs().max() > 0.1
    assert torch.equal(named, own_advantage.group_relative(earned, AlgorithmSection()))


def test_every_estimator_is_in_the_registry_and_the_config() -> None:
    choices = Algorithm.model_fields["advantage"].annotation.__args__[0].__args__  # type: ignore[union-attr]
    assert set(choices) == estimators.ESTIMATORS.keys() | estimators.WITH_CRITIC.keys()


def test_the_example_loss_is_the_policy_gradient() -> None:
    """On-policy PPO's clip is never reached, so the gradients are the same."""
    one = {"num_iterations": 1, "minibatches": 1}
    assert torch.equal(moved(config(loss_type=LOSS, **one)), moved(config(**one)))
    assert own_loss.unclipped.__doc__


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("<think>a</think><answer>Left</answer>", ["Left"]),
        ("<answer>Up</answer> no, <answer>left, please, or right</answer>", ["Left"]),
        ("<answer>", None),
        ("", None),
    ],
)
def test_the_example_parser_takes_the_last_answer(text: str, actions: list[str] | None) -> None:
    listed, protocol = ["Left", "Right", "Up", "Down"], Protocol(parser=PARSER)
    parsed = protocol.read(text, listed)
    assert parsed == own_parser.last_answer(text, protocol, listed)
    assert parsed == Parsed(actions or [], actions is not None, [])
    assert Protocol().read(text, listed) == parse(text, Protocol(), listed)
    for env in ("frozen_lake", "countdown"):  # listed actions, and free text
        check_parser(ProtocolSection(parser=PARSER), envs.make(env))


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("", "nowhere:f", r"there is no module nowhere: run the command in the folder that has nowhere\.py"),
        ("", "own.deeper:f", r"there is no module own\.deeper"),
        ("def g(): ...", "own:f", r"own \(.*own\.py\) has no f\. It has g\."),
        ("import nowhere", "own:f", r"own imports nowhere, which is not installed"),
        ("1 / 0", "own:f", r"importing own raised ZeroDivisionError"),
        ("raise SystemExit", "own:f", r"importing own raised SystemExit"),
        ("f = 3", "own:f", r"own:f` is not a function, and it is called as f\(earned, algorithm\)"),
        ("def f(earned): ...", "own:f", r"has the parameters \(earned\), and it is called as f\(earned, algorithm\)"),
        ("def f(a, b, c): ...", "own:f", r"has the parameters \(a, b, c\)"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused_in_words(module: Any, text: str, path: str, words: str) -> None:
    module(text)
    with pytest.raises(UserError, match=rf"`algorithm\.advantage: {path}`.*{words}|{words}") as error:
        by_path(path, "algorithm.advantage")
    assert "\n" not in str(error.value)


def test_a_folder_is_searched_that_python_was_not_started_in(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module("def f(earned, algorithm, *, scale=1): return scale")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(Path.cwd()))])
    assert by_path("own:f", "algorithm.advantage")(None, None) == 1


def advantage(code: str) -> str:
    return f"import torch\ndef f(earned, algorithm): return {code}"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("None", "returned NoneType, and a float tensor of shape"),
        (
            "earned.rewards_B",
            r"returned a tensor of shape \(\d+,\) and dtype torch.float64, and a float tensor of shape",
        ),
        ("torch.zeros(len(earned.turn_S), dtype=torch.int64)", r"and dtype torch\.int64, and a float tensor"),
        ("torch.full([len(earned.turn_S)], torch.nan)", "not finite"),
        ("1 / 0", r"`algorithm\.advantage: own:f` raised ZeroDivisionError: division by zero \(own\.py, line 2\)\."),
    ],
)
def test_an_advantage_that_cannot_be_used_is_refused(module: Any, code: str, words: str) -> None:
    """In an update, and at the start of a run in which no group may ever pass the filter."""
    module(advantage(code))
    with pytest.raises(UserError, match=words):
        learn(config(advantage="own:f"), model := policy(), played(model))
    with pytest.raises(UserError, match=rf"{words}.* It was called with a made-up update: 4 episodes in 2 groups"):
        check_functions(config(advantage="own:f"))


@pytest.mark.parametrize(
    "code",
    [
        "None",
        "tokens.logprobs_S",
        "(tokens.logprobs_S.sum(), tokens.advantages_S > 0)",
        "(tokens.logprobs_S, tokens.advantages_S)",
        "(tokens.advantages_S, tokens.advantages_S > 0)",  # nothing to learn from
        "tokens.nothing",
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(module: Any, code: str) -> None:
    module(f"def f(tokens, settings): return {code}")
    words = r"`algorithm\.loss_type: own:f` (has to return two tensors of shape|raised AttributeError: .* \(own\.py, l)"
    with pytest.raises(UserError, match=words):
        learn(config(loss_type="own:f"), model := policy(), played(model))
    with pytest.raises(UserError, match=rf"{words}.* It was called with a made-up update"):
        check_functions(config(loss_type="own:f"))


def test_a_loss_that_is_not_finite_is_refused(module: Any) -> None:
    module("def f(tokens, settings): return tokens.logprobs_S / 0, tokens.logprobs_S > 0")
    with pytest.raises(UserError, match=r"`algorithm\.loss_type: own:f` returned a loss that is not finite"):
        check_functions(config(loss_type="own:f"))


@pytest.mark.parametrize("name", [ADVANTAGE, "grpo", "gae"])
def test_functions_that_can_be_used_pass(name: str) -> None:
    check_functions(config(advantage=name, loss_type=LOSS))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("text", "returned str for the text ''"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("Parsed(['Jump'], True, [])", "returned the action 'Jump', which the environment does not have"),
        ("Parsed(['Up'] * 9, True, [])", "returned 9 actions, more than"),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused(module: Any, code: str, words: str) -> None:
    module(f"from envs.protocol import Parsed\ndef f(text, protocol, listed): return {code}")
    with pytest.raises(UserError, match=words):
        check_parser(ProtocolSection(parser="own:f"), envs.make("frozen_lake"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("import torch\ndef f(earned, algorithm):\n    return torch.zeros(2) + torch.zeros(3)", r"\(own\.py, line 3\)"),
        ("class Own:\n    def __call__(self, earned, algorithm): return earned.no\nf = Own()", r"\(own\.py, line 2\)"),
        ("from math import comb as f", r"\(plugins\.py, line \d+\)"),
    ],
    ids=["library", "object", "builtin"],
)
def test_the_place_of_an_error_is_named(module: Any, text: str, place: str) -> None:
    module(text)
    with pytest.raises(UserError, match=rf"`algorithm\.advantage: own:f` raised .*{place}"):
        check_functions(config(advantage="own:f"))


def test_a_parser_that_raises_in_a_run_is_named(module: Any, player: Path, tmp_path: Path) -> None:
    """For texts that the check at the start does not try."""
    module(
        "calls = []\nfrom examples.own_parser import last_answer\ndef f(text, protocol, listed):\n"
        "    calls.append(text)\n    assert len(calls) < 6, 'late'\n    return last_answer(text, protocol, listed)"
    )
    words = r"crashed in every episode .*`protocol\.parser: own:f` raised AssertionError: late.* Correct that function"
    with pytest.raises(UserError, match=words):
        train(settings(tmp_path / "run.yaml", player), "protocol.parser=own:f")


@pytest.mark.parametrize("key", PARAMETERS)
def test_a_run_says_so_before_anything_is_loaded(player: Path, tmp_path: Path, key: str) -> None:
    file = settings(tmp_path / "run.yaml", player)
    with pytest.raises(UserError, match=f"`{key}: nowhere:f` cannot be used: there is no module nowhere"):
        train(file, f"{key}=nowhere:f")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.jsonl"))


def test_what_is_neither_a_choice_nor_a_path_is_refused(player: Path, tmp_path: Path) -> None:
    file = settings(tmp_path / "run.yaml", player)
    done = python("train_phase3_starpo.py", "--config", str(file), "algorithm.advantage=own.f", "protocol.parser=x")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "algorithm.advantage (on the command line): 'own.f' is not one of" in done.stderr
    assert "write MODULE:FUNCTION, the path of a function of your own" in done.stderr


def test_an_environment_is_played_with_the_parser() -> None:
    from envs.episode import Episode

    episode = Episode(envs.make("frozen_lake"), Protocol(parser=PARSER), seed=7)
    assert episode.step("I go <answer>down</answer>").valid and episode.actions == ["Down"]
    assert (ROOT / "examples" / "own_parser.py").exists()


def test_the_next_command_plays_as_the_run_did(tmp_path: Path) -> None:
    from posttrain.config import ChatRun, resolve

    env = {"name": "frozen_lake", "options": {"size": 5}, "label": "large"}
    env |= {"tools": ["examples.own_tool:calculate"], "max_calls": 1, "call_seconds": 2.5}
    run = StarPORun.model_validate(
        {
            "output_dir": "a b",
            "model": {"name_or_path": "x"},
            "envs": [env | {"weight": 2.0}],
            "protocol": {"parser": PARSER, "think": False, "max_turns": 9},
        }
    )
    words = shlex.split(play_command(run, Path("a b/final")))
    assert words[:2] == ["python", "inference_with_improved_settings.py"] and words[-2:] == ["--play", "large"]
    file = tmp_path / "chat.yaml"
    file.write_text("{}")
    chat = resolve(ChatRun, file, words[2:-2])
    assert (chat.model.name_or_path, chat.protocol) == ("a b/final", run.protocol)
    assert chat.envs[0].model_dump(include=set(env)) == env
    assert (chat.max_completion_length, chat.context) == (run.rollout.max_completion_length, run.rollout.context)


def test_the_next_command_keeps_every_character(tmp_path: Path) -> None:
    """YAML does not join the two escapes of an emoji, and refuses or folds others that JSON leaves as they are."""
    from posttrain.config import ChatRun, resolve

    text = "\N{GRINNING FACE} é \x1b \x7f \x85 \x9b \u2028 \ufffe \uffff \\ud83d \\ \" ' \n"
    run = StarPORun.model_validate(
        {
            "output_dir": "a",
            "model": {"name_or_path": "x"},
            "envs": [{"name": "frozen_lake", "label": "\N{ROCKET}"}],
            "protocol": {"system": text},
        }
    )
    command = play_command(run, Path("\N{ROCKET}/final"))
    assert command.isprintable() and "\N{GRINNING FACE} é" in command
    file = tmp_path / "chat.yaml"
    file.write_text("{}")
    chat = resolve(ChatRun, file, shlex.split(command)[2:-2])
    assert (chat.model.name_or_path, chat.protocol.system) == ("\N{ROCKET}/final", text)
    assert chat.envs[0].label == run.envs[0].label


def test_a_template_that_fails_in_every_episode_is_what_is_to_be_corrected() -> None:
    failed = new_episode(EnvSection(name="countdown"), ProtocolSection(system="{{ actions[0] }}"), 0, "train")
    assert isinstance(failed, Trajectory)
    told = str(Crashed(EnvSection(name="countdown"), "of 3 steps", failed.crashed))
    assert "`protocol.system` cannot be filled" in told and told.endswith("Correct that template.")
