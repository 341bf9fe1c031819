"""Where are the reference configs, and how is a script started?  In a checkout and where the package is installed."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path

from posttrain.types import UserError

_PACKAGED = Path(__file__).parents[1] / "configs"
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "configs"
_COMMANDS = {
    "train_phase1_sft": "sft",
    "train_phase2_dpo": "dpo",
    "train_phase3_starpo": "rl",
    "evaluate_model": "eval",
    "inference_with_improved_settings": "chat",
}


def config_names() -> list[str]:
    """Return the names of the reference configs of the scripts: chat, quickstart/phase1_sft, ..."""
    names = (file.relative_to(CONFIGS).with_suffix("").as_posix() for file in CONFIGS.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith(("accelerate/", "presets/", "protocols/")))


def reference_name(config: str | Path) -> str | None:
    """Return the name of the reference config that `--config` means; None where it is a path, or nothing.

    quickstart/phase1_sft, quickstart/phase1_sft.yaml and configs/quickstart/phase1_sft.yaml are one name.
    """
    name = _name(config)
    return name if name in config_names() and not os.path.isfile(config) else None


def find_config(config: str | Path) -> Path:
    """Return the file that `--config` names: a path, or else the name of a reference config, from any folder.

    Raises:
        UserError: there is no such file, and no reference config of this name.
    """
    if (name := reference_name(config)) is not None:
        return CONFIGS / f"{name}.yaml"
    if not os.path.exists(config):
        words = "there is no such file, and no reference config of this name"
        if close := _like(_name(config)):
            raise UserError(f"--config {config}: {words}. Did you mean {' or '.join(close)}?")
        names = [name for name in config_names() if not name.startswith(("envs/", "models/"))]
        raise UserError(f"--config {str(config)!r:.200}: {words}. Write a path, or one of {', '.join(names)}.")
    return Path(config)


def find_file(file: str | Path) -> Path | None:
    """Return a file by its path, or from any folder a file of the project, e.g. configs/models/phi-4-mini.jinja."""
    places = (Path(file), CONFIGS.parent / file, Path(__file__).parents[2] / file)
    return next(filter(os.path.isfile, places), None)


def _name(config: str | Path) -> str:
    return Path(config).as_posix().removeprefix("configs/").removesuffix(".yaml")


def _like(name: str) -> list[str]:
    """Return the reference configs whose names begin with this one, or are similar, or have a similar last part."""
    names, last = config_names(), name.rpartition("/")[2]
    lasts = difflib.get_close_matches(last, {each.rpartition("/")[2] for each in names}, 1, 0.8)
    begun = [each for each in names if name and each.startswith(name)][:3]
    return (
        begun
        or difflib.get_close_matches(name, names, 2, 0.8)
        or [each for each in names if each.rpartition("/")[2] in lasts]
    )


def as_started(text: str) -> str:
    """Return a text whose commands are those that the user starts: `posttrain dpo` if started as posttrain."""
    for script in _COMMANDS:
        text = text.replace(f"python {script}.py", command(script))
    return text


def command(script: str) -> str:
    """Return how the user starts a script: `python train_phase2_dpo.py`, or `posttrain dpo` if started as posttrain."""
    return f"posttrain {_COMMANDS[script]}" if sys.argv[0].startswith("posttrain ") else f"python {script}.py"
