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
    ["posttrain.runtime.launcher"],
    ["posttrain.config", "posttrain.models.loading.template_limits"],
    ["posttrain.runtime.compat", "posttrain.runtime.hardware"],
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
            "forward",
            "experience",
        )
    ],
    [
        f"posttrain.{name}"
        for name in (
            "embedded",
            "fused",
            "model_card",
            "model_files",
            "run_identity",
            "endpoint",
            "served_answers",
            "served_requests",
            "dashboards",
            "sharding",
        )
    ],
    [f"posttrain.{name}" for name in ("data", "report", "critic", "sampler", "prepared_rows")],
    ["posttrain.runtime.trl_arguments", "posttrain.finetune.trl_trainers"],
    [f"posttrain.{name}" for name in ("models", "engine", "gguf")],
    ["posttrain.plan.selftest"],
    [f"posttrain.{name}" for name in ("cross_score", "learner")],
    [f"posttrain.{name}" for name in ("training", "preflight", "rollout", "run_state")],
    [f"posttrain.{name}" for name in ("monitoring", "plan", "distillation", "inference")],
    [f"posttrain.{name}" for name in ("evaluation", "starpo_run", "web_chat", "rollout_engine")],
    [f"posttrain.{name}" for name in ("pairs", "harness", "publish", "serve", "rollout_worker", "check_model")],
    ["posttrain.rollout_server"],
    SCRIPTS,
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
NO_TORCH = {"envs", "posttrain.types", "posttrain.files", "posttrain.config"}  # nor anything that imports it
# envs/ may import such a package in a function: data sets of the Hub, adapters
HEAVY = {"torch", "transformers", "trl", "datasets", "accelerate", "peft"}
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 450, 100, 8  # self aside


def files() -> list[Path]:
    return [*sorted((ROOT / "envs").rglob("*.py")), *sorted((ROOT / "posttrain").rglob("*.py")), *ROOT.glob("*.py")]


def module_of(path: Path) -> str:
    """envs/x.py -> envs, posttrain/data/x.py -> posttrain.data, train_x.py -> train_x"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] != "posttrain" else ".".join(part for part in parts[:2] if part != "__init__")


def walk(tree: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """All nodes, if asked also those inside functions and those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        yield node
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if functions or not (isinstance(node, ast.FunctionDef) or for_types):
            yield from walk(node, functions)


def imports(path: Path, functions: bool = True) -> Iterator[str]:
    """Dotted names of everything a file imports; `from posttrain import chat` counts as posttrain.models.chat.

    functions: also what is imported when a function is called, not when the file is.
    """
    for node in walk(ast.parse(path.read_text(encoding="utf-8")), functions):
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
    broken, now = [], set(map(target, imports(path, functions=False)))
    for name in map(target, imports(path)):
        if name in SCRIPTS and name != here:
            broken.append(f"{path.name} -> {name}: a script is never imported")
        elif name in LAYER and name != here and LAYER[name] >= LAYER[here]:
            where = "beside" if LAYER[name] == LAYER[here] else "above"
            broken.append(f"{path.relative_to(ROOT)} -> {name}, which is {where} it")
        elif name in HEAVY and here in NO_TORCH and (here != "envs" or name in now):
            broken.append(f"{path.relative_to(ROOT)} -> {name}, but {here} must load without it")
    return broken


def test_imports_point_down():
    assert [arrow for path in files() for arrow in broken_arrows(path)] == []


def test_a_broken_arrow_is_named(tmp_path, monkeypatch):
    wrong = {
        "envs/environment.py": "import torch",
        "posttrain/types.py": "from posttrain import config",
        "posttrain/models/chat.py": "def later():\n    from posttrain.runtime.checkpoint import save",
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
        "posttrain/models/chat.py -> posttrain.runtime.checkpoint, which is beside it",
        "rows.py -> evaluate_model: a script is never imported",
    ]


def too_long(path: Path) -> list[str]:
    """What of a file is more than a reader keeps in mind: its lines, those of a function, parameters.

    The constructor of an environment is its list of options, as in Gymnasium: each is a key of `options` in YAML.
    """
    text = path.read_text(encoding="utf-8")
    found = [f"{path.name} has {lines} lines"] if (lines := len(text.splitlines())) > MOST_LINES else []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        options = "envs" in path.parts[-3:-1] and node.name == "__init__"
        if lines > MOST_LINES_OF_A_FUNCTION:
            found.append(f"{path.name}: {node.name} has {lines} lines")
        if count > MOST_PARAMETERS and not options:
            found.append(f"{path.name}: {node.name} has {count} parameters")
    return found


def test_files_functions_and_argument_lists_are_short() -> None:
    assert [words for path in [*files(), *(ROOT / "examples").glob("*.py")] for words in too_long(path)] == []


def test_what_is_too_long_is_named(tmp_path: Path) -> None:
    names = ", ".join("abcdefghi")
    (tmp_path / "file.py").write_text(
        f"def many({names}): ...\n"
        "class Long:\n"
        f"    def __init__(self, {names}): ...\n"
        f"    def fits(self, {names[3:]}):\n{'        pass' + chr(10)}"
        f"    async def long(self):\n{('        pass' + chr(10)) * 100}"
    )
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "lake.py").write_text(f"def __init__(self, {names}): ...\n{chr(10) * 450}")
    assert [too_long(path) for path in (tmp_path / "file.py", tmp_path / "envs" / "lake.py")] == [
        [
            "file.py: many has 9 parameters",
            "file.py: __init__ has 9 parameters",
            "file.py: long has 101 lines",
        ],
        ["lake.py has 451 lines"],
    ]


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


def locked() -> dict[str, list[str]]:
    """Name of a package -> the hashes of its files, from all its lines: a version may be of some Pythons alone."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        pinned, *hashes = line.split("--hash=")
        name = re.fullmatch(r"([a-z0-9-]+)==[0-9][^ @+]*( ; [^@]+?)?\s*", pinned)
        assert name, f"requirements.lock: {line[:100]}"
        found.setdefault(name[1], []).extend(each.strip() for each in hashes)
    return found


def test_every_requirement_has_an_upper_bound_and_an_exact_version():
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-extras.txt"):
        for line in (ROOT / name).read_text().splitlines():
            requirement = line.split("#")[0].split(";")[0].strip()
            assert not requirement or "<" in requirement, f"{name}: {line}"
            package = re.split(r"[\[<>=]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            assert not package or package in locked(), f"not in the lock: {line}"


def test_every_locked_package_has_hashes():
    """Of files of the package index. PyTorch's CPU build is of another one, so `make setup` compares it with none."""
    for name, hashes in locked().items():
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), name
    assert {"pip", "torch", "triton", "nvidia-nccl-cu13"} <= locked().keys()


def test_one_question_finds_the_first_process() -> None:
    """`runlog.is_main_process`, which also holds before the processes have met."""
    other = re.compile(r'rank\(\) [=!]= 0|is_world_process_zero|"RANK"')
    found = {str(path.relative_to(ROOT)): other.findall(path.read_text(encoding="utf-8")) for path in files()}
    assert {name: uses for name, uses in found.items() if uses} == {"posttrain/runtime/runlog.py": ['"RANK"']}
