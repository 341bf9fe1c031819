"""Does the package install, and does the command do from another folder what the scripts do in a checkout?"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling import build

import posttrain
from posttrain import __main__ as command, config
from posttrain.config import StarPORun, reference
from posttrain.types import UserError

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
# every module of the project that a command has loaded, and where from
ORIGINS = """
import sys
from posttrain.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
names = {"posttrain", "envs", "train_phase3_starpo"}
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in names and getattr(module, "__file__", None):
        print(module.__file__, file=sys.stderr)
"""


def requirements(file: str) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return {line for line in lines if line}


def environment(folder: Path, what: list[str]) -> Path:
    """A new environment that has this one's packages and in which pip has installed `what`; its folder bin."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    scripts = folder / "bin"
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(scripts / "python")]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", *what], check=True)
    return scripts


def outcome(words: list[Any], folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=outside, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder bin of an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("package")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel = build.build_wheel(str(folder))
    return environment(folder / "venv", [str(folder / wheel)])


@pytest.mark.thorough
def test_the_command_works_from_another_folder(installed: Path, tmp_path: Path) -> None:
    said = outcome([installed / "posttrain"], tmp_path).stdout
    assert all(re.search(rf"^  {name} +\w", said, re.M) for name in command.COMMANDS)
    assert outcome([installed / "posttrain", "--version"], tmp_path).stdout == f"posttrain {posttrain.__version__}\n"
    assert outcome([installed / "posttrain", "sft", "--help"], tmp_path).stdout.startswith("usage: posttrain sft ")
    checked = outcome([installed / "posttrain", "env", "check", "bandit", "--episodes", "3"], tmp_path).stdout
    assert "bandit" in checked
    wrong = outcome([installed / "posttrain", "dpo", "--config", "configs/quickstart/phase1_sft.yaml"], tmp_path, 2)
    assert "Write: posttrain sft --config configs/quickstart/phase1_sft.yaml" in wrong.stderr
    assert [*tmp_path.iterdir()] == []


def test_no_module_comes_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    ran = outcome([installed / "python", "-c", ORIGINS, "rl", "--print-config"], tmp_path)
    assert ran.stdout == config.dump(config.resolve(StarPORun, ROOT / "configs" / "phase3_starpo.yaml"))
    loaded = ran.stderr.split()
    assert len(loaded) > 5 and all(file.startswith(str(installed.parent)) for file in loaded)
    presets = outcome([installed / "posttrain", "rl", "--print-config", "algorithm.preset=gigpo"], tmp_path).stdout
    assert yaml.safe_load(presets)["algorithm"]["preset"] == "gigpo"


@pytest.mark.slow
def test_a_plan_and_the_editable_installation(installed: Path, tmp_path: Path) -> None:
    plan = outcome(
        [installed / "posttrain", "plan", "sft", "A10G", "--config", "quickstart/phase1_sft"], tmp_path / "a"
    )
    assert "GiB" in plan.stdout
    editable = environment(tmp_path / "venv", ["--no-build-isolation", "-e", str(ROOT)])
    ran = outcome([editable / "python", "-c", ORIGINS, "rl", "--print-config"], tmp_path / "a")
    assert all(file.startswith(str(ROOT)) for file in ran.stderr.split())
    assert ran.stdout == config.dump(config.resolve(StarPORun, ROOT / "configs" / "phase3_starpo.yaml"))


def test_the_wheel_needs_what_the_requirements_say() -> None:
    assert set(PROJECT["project"]["dependencies"]) == requirements("requirements.txt")
    extras = PROJECT["project"]["optional-dependencies"]
    assert set().union(*extras.values()) == requirements("requirements-extras.txt")
    assert PROJECT["build-system"]["requires"][0] in requirements("requirements-dev.txt")


# ------------------------------------------------------------------------------------------------------- the command


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The exit code of `posttrain WORDS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["posttrain", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


WHOLE = [name for name in command.COMMANDS if name not in command.SECOND]
WHOLE += [f"{first} {each}" for first, names in command.SECOND.items() for each in names]


@pytest.mark.parametrize("words", WHOLE)
def test_every_command_has_a_help(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert not call(monkeypatch, *words.split(), "--help")
    assert capsys.readouterr().out.startswith(f"usage: posttrain {words.removeprefix('plan ')} ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("evall", "Did you mean eval?"),
        ("zzz", "posttrain has no command zzz. `posttrain` alone lists them."),
        ("env", "`posttrain env` takes one of check, play, demos"),
        ("env chek bandit", "Did you mean check?"),
        ("plan starpo", "`posttrain plan` takes one of sft, dpo, rl"),
        ("sft --config quickstart/phase1_stf", "Did you mean quickstart/phase1_sft"),
    ],
)
def test_a_wrong_command_is_refused(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *words.split()) == 2
    assert says in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.runpy, "run_module", stopped)
    assert call(monkeypatch, "env", "play", "bandit") == 130


# -------------------------------------------------------------------------------------------------- reference configs


@pytest.mark.parametrize("given", ["quickstart/chat", "quickstart/chat.yaml", "configs/quickstart/chat.yaml"])
def test_a_reference_config_is_found_by_name(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert reference.find_config(given) == reference.CONFIGS / "quickstart" / "chat.yaml"
    own = tmp_path / given
    own.parent.mkdir(parents=True)
    own.touch()
    assert reference.find_config(given) == Path(given)  # a path first


def test_a_name_that_is_none_gets_close_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--config phase1: .* Did you mean phase1_sft"):
        reference.find_config("phase1")
    with pytest.raises(UserError, match=r"--config 'nothing.yaml': there is no such file.* one of chat, evaluate,"):
        reference.find_config("nothing.yaml")


# -------------------------------------------------------------------------------------------- files of the repository


HOSTED = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


@pytest.mark.parametrize("file", HOSTED, ids=lambda file: file.name)
def test_files_that_others_read_are_yaml_and_name_no_place(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    assert not re.search(r"/root|/work|/home|pypi|index-url", text)


def test_the_version_stands_in_one_place_and_others_agree() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == posttrain.__version__
    assert f"\n## {posttrain.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    pythons = set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"])
    assert pythons <= {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"]}
    assert {"run": ".ci/run"} in workflow["jobs"]["test"]["steps"]


def test_commands_in_messages_are_those_that_one_started(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Measure again: python evaluate_model.py --overwrite"
    assert reference.as_started(text) == text
    monkeypatch.setattr(sys, "argv", ["posttrain report"])
    assert reference.as_started(text) == "Measure again: posttrain eval --overwrite"
