"""Do imports only point down?  Read with `ast`, imports inside functions included, so that nothing has to run.

A layer may import the layers below it and nothing beside it, except inside one sub-package. Scripts never import each
other; envs/ imports neither torch nor posttrain. A new module is given its layer here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
LAYERS = [
    ["envs"],
    ["posttrain.types"],
    ["posttrain.files"],
    ["posttrain.config", "posttrain.template_limits"],
    ["posttrain.compat"],
    [
        f"posttrain.{name}"
        for name in (
            "chat",
            "metrics",
            "runlog",
            "convgpt",
            "checkpoint",
            "starpo",
            "parallel",
            "curriculum",
            "head",
            "experience",
            "hardware",
        )
    ],
    [f"posttrain.{name}" for name in ("embedded", "policy", "fused", "model_card", "model_files", "run_identity")],
    [f"posttrain.{name}" for name in ("data", "report", "critic", "prefixes", "sampler", "prepared_rows")],
    ["posttrain.trl_arguments", "posttrain.selftest"],
    [f"posttrain.{name}" for name in ("models", "cross_score", "engine", "learner", "gguf")],
    [f"posttrain.{name}" for name in ("training", "preflight", "rollout", "run_state")],
    ["posttrain.monitoring", "posttrain.plan", "posttrain.distillation", "posttrain.inference"],
    ["posttrain.evaluation", "posttrain.starpo_run"],
    SCRIPTS,
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
NO_TORCH = {"envs", "posttrain.types", "posttrain.files", "posttrain.config"}  # nor anything that imports it
HEAVY = {"torch", "transformers", "trl", "datasets", "accelerate", "peft"}


def files() -> list[Path]:
    return [*sorted((ROOT / "envs").rglob("*.py")), *sorted((ROOT / "posttrain").rglob("*.py")), *ROOT.glob("*.py")]


def module_of(path: Path) -> str:
    """envs/x.py -> envs, posttrain/data/x.py -> posttrain.data, train_x.py -> train_x"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] != "posttrain" else ".".join(part for part in parts[:2] if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports; `from posttrain import chat` counts as posttrain.chat."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name instead of a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def target(name: str) -> str:
    """posttrain.data.table.Row -> posttrain.data, envs.base.TextEnv -> envs, torch.nn -> torch"""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "posttrain" else parts[0]


def broken_arrows(path: Path) -> list[str]:
    here = module_of(path)
    if here == "posttrain":  # the package's own docstring
        return []
    if here not in LAYER:
        return [f"{here} has no layer yet: add it to LAYERS in tests/test_layers.py"]
    broken = []
    for name in map(target, imports(path)):
        if name in SCRIPTS and name != here:
            broken.append(f"{path.name} -> {name}: a script is never imported")
        elif name in LAYER and name != here and LAYER[name] >= LAYER[here]:
            where = "beside" if LAYER[name] == LAYER[here] else "above"
            broken.append(f"{path.relative_to(ROOT)} -> {name}, which is {where} it")
        elif name in HEAVY and here in NO_TORCH:
            broken.append(f"{path.relative_to(ROOT)} -> {name}, but {here} must load without it")
    return broken


def test_imports_point_down():
    assert [arrow for path in files() for arrow in broken_arrows(path)] == []


def test_a_broken_arrow_is_named(tmp_path, monkeypatch):
    wrong = {
        "envs/environment.py": "import torch",
        "posttrain/types.py": "from posttrain import config",
        "posttrain/chat.py": "def later():\n    from posttrain.checkpoint import save",
        "posttrain/data/rows.py": "from posttrain.data import other\nimport evaluate_model",
    }
    for name, text in wrong.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    arrows = [arrow for name in wrong for arrow in broken_arrows(tmp_path / name)]
    assert arrows == [
        "envs/environment.py -> torch, but envs must load without it",
        "posttrain/types.py -> posttrain.config, which is above it",
        "posttrain/chat.py -> posttrain.checkpoint, which is beside it",
        "rows.py -> evaluate_model: a script is never imported",
    ]


def test_the_algorithm_is_read_in_one_sitting():
    """Phase 3's script has at most 450 lines, and a function at most 100 lines and 8 parameters."""
    text = (ROOT / "train_phase3_starpo.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno and node.end_lineno - node.lineno < 100, node.name
            assert len(node.args.args) + len(node.args.kwonlyargs) <= 8, node.name


def test_every_imported_package_is_required_by_name():
    required = {
        re.split(r"[\[<>=; ]", line, maxsplit=1)[0].lower().replace("_", "-")
        for name in ("requirements.txt", "requirements-dev.txt", "requirements-extras.txt")
        for line in (ROOT / name).read_text().splitlines()
        if line and not line.startswith("#")
    }
    owners = packages_distributions()
    ours = {"envs", "posttrain", *SCRIPTS, "pydantic_core"}  # pydantic brings the one version of its core that fits
    used = {name.split(".")[0] for path in files() for name in imports(path)} - ours - set(sys.stdlib_module_names)
    missing = {
        name for name in used if not {owner.lower().replace("_", "-") for owner in owners.get(name, [name])} & required
    }
    assert not missing


def test_every_requirement_has_an_upper_bound_and_an_exact_version():
    locked = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "requirements.lock").read_text().split()
    }
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-extras.txt"):
        for line in (ROOT / name).read_text().splitlines():
            requirement = line.split("#")[0].split(";")[0].strip()
            assert not requirement or "<" in requirement, f"{name}: {line}"
            package = re.split(r"[\[<>=]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            assert not package or package in locked or name == "requirements-extras.txt", f"not in the lock: {line}"
    assert not re.search(r"\+|@|^nvidia", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
