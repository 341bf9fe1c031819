"""Does all that docs/adapters.md shows work?"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_adapters_trl import CALL, OVER, scripted_model, tool_tokenizer as tool_tokenizer
from transformers import PreTrainedTokenizerFast

import envs
from envs import check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")
TAXI, PLAY, TRAIN = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for line in re.findall(r"^    ((?:python|posttrain) .*)", PAGE, re.MULTILINE)]
SECTIONS: list[dict[str, Any]] = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0])[
    "envs"
]


@pytest.mark.slow
def test_the_file_of_the_gymnasium_section_is_an_environment(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "envs" / "taxi.py").write_text(TAXI)
    command = [sys.executable, "-m", "envs.check", "taxi", "--episodes", "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "kept" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_commands_are_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checked = {command[3]: command[3:] for command in COMMANDS if command[:3] == ["posttrain", "env", "check"]}
    served = [command[3:] for command in COMMANDS if command[2] == "envs.adapters.openenv"]
    assert checked.keys() == {"textarena", "reasoning_gym"} and len(served) == 1 and len(COMMANDS) == 3
    for package, arguments in checked.items():
        pytest.importorskip(package, reason=f"{package} is not installed: see requirements-extras.txt")
        assert check.main([*arguments, "--digest"]) == 0
    pytest.importorskip("openenv.core", reason="OpenEnv is not installed: see requirements-extras.txt")
    import uvicorn

    from envs.adapters import openenv

    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    port = served[0].index("--port") + 1
    served[0][port] = "0"  # 8000 may be taken
    assert openenv.main(served[0]) == 0
    assert "frozen_lake is served at http://127.0.0.1:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_environments_of_the_config_are_found(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core", reason="OpenEnv is not installed: see requirements-extras.txt")
    for package in ("textarena", "reasoning_gym"):
        pytest.importorskip(package, reason=f"{package} is not installed: see requirements-extras.txt")
    from test_adapters_openenv import serving

    from envs.adapters.openenv_server import app_of
    from posttrain.config.loading import resolve
    from posttrain.config.starpo import StarPORun
    from posttrain.starpo.run import check_environments
    from posttrain.types import UserError

    def config(url: str) -> StarPORun:
        SECTIONS[0]["options"]["url"] = url
        given = yaml.safe_load((ROOT / "configs/phase3_starpo.yaml").read_text(encoding="utf-8"))
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(given | {"envs": SECTIONS}), encoding="utf-8")
        return resolve(StarPORun, file)

    with serving(app_of("frozen_lake")) as url:
        check_environments(config(url))
        namespace: dict[str, Any] = {}
        exec(PLAY, namespace)
        assert namespace["play"](url) in (0.0, 1.0)
    with pytest.raises(UserError, match=r"envs.0 \(openenv\): No OpenEnv server answers at http://localhost:9 "):
        check_environments(config("http://localhost:9"))


@pytest.mark.thorough
def test_trl_trains_as_it_is_shown(
    tool_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    namespace: dict[str, Any] = {}
    exec(TRAIN, namespace)

    def says(context: str) -> str:
        return "Done.<|im_end|>" if OVER in context else CALL.format('{"action": "Up"}')

    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4000, "max_steps": 1}
    trainer = namespace["train"](
        scripted_model(tool_tokenizer, says), tool_tokenizer, output_dir=tmp_path, **settings, **sizes
    )
    assert trainer.state.global_step == 1 and all(game._episode.turns for game in trainer.environments)


def test_every_refused_or_lost_thing_is_told() -> None:
    assert PAGE.count("**Costs**") == PAGE.count("\n## ") == 5 and PAGE.count("**Lost**") == 6
    assert {section["name"] for section in SECTIONS} == envs._ADAPTERS.keys()
