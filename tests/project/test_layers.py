"""Is the architecture what docs/architecture.md says?  Read with `ast`, imports inside functions included.

posttrain/ has eleven packages in layers, and few files beside them. A package imports the packages below it, through
what their `__init__` names and nothing else; no module is in a cycle. Scripts never import each other; envs/ imports
neither torch nor posttrain.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
# from the bottom: a package imports those before it
LAYERS = [
    "envs",
    "config",
    "runtime",
    "models",
    "data",
    "rollout",
    "plan",
    "finetune",
    "report",
    "starpo",
    "evaluation",
    "serving",
]
BESIDE = ["posttrain", "posttrain.__main__", "posttrain.types", "posttrain.files", "posttrain.metrics"]
MOST_ARROWS = 60
MOST_SHARED_NAMES = 20
NO_TORCH = {"envs", "posttrain.types", "posttrain.files", "config"}  # nor anything that imports it
# envs/ may import such a package in a function: data sets of the Hub, adapters
HEAVY = {"torch", "transformers", "trl", "datasets", "accelerate", "peft"}
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 450, 90, 8  # self aside


def files() -> list[Path]:
    return [*sorted((ROOT / "envs").rglob("*.py")), *sorted((ROOT / "posttrain").rglob("*.py")), *ROOT.glob("*.py")]


def module_of(path: Path) -> str:
    """posttrain/data/x.py -> posttrain.data.x, posttrain/data/__init__.py -> posttrain.data"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """The package that a module is in: posttrain.data.table -> data, envs.sokoban -> envs, posttrain.types itself."""
    top, *rest = module.split(".")
    if top != "posttrain" or not rest:
        return top
    return rest[0] if rest[0] in LAYERS else f"posttrain.{rest[0]}"


def walk(tree: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """All nodes, if asked also those inside functions and those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        yield node
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if functions or not (isinstance(node, ast.FunctionDef) or for_types):
            yield from walk(node, functions)


def imports(path: Path, functions: bool = True) -> Iterator[str]:
    """Dotted names of everything a file imports; `from posttrain.models import chat` counts as posttrain.models.chat.

    functions: also what is imported when a function is called, not when the file is.
    """
    for node in walk(ast.parse(path.read_text(encoding="utf-8")), functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name instead of a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named_by(package: str) -> set[str]:
    """What the `__init__` of a package names for others."""
    tree = ast.parse((ROOT / "posttrain" / package / "__init__.pyi").read_text(encoding="utf-8"))
    return {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def broken_arrows(path: Path) -> list[str]:
    """What a file imports and must not, in words."""
    here, where = room(module_of(path)), path.relative_to(ROOT).as_posix()
    if here not in (*LAYERS, *BESIDE, *SCRIPTS):
        return [f"{where} is in none of the packages"]
    broken, now = [], {name.split(".")[0] for name in imports(path, functions=False)}
    for name in imports(path):
        there = room(name)
        if there in SCRIPTS and there != here:
            broken.append(f"{where} -> {there}: a script is never imported")
        elif there in LAYERS and there != here:
            if (here in LAYERS and LAYERS.index(there) > LAYERS.index(here)) or here in BESIDE:
                broken.append(f"{where} -> {name}, which is above it")
            elif there != "envs" and len(name.split(".")) > 2 and name.split(".")[2] not in named_by(there):
                broken.append(f"{where} -> {name}, which posttrain/{there}/__init__.pyi does not name")
            elif there != "envs" and len(name.split(".")) > 3:
                broken.append(f"{where} -> {name}: import it from posttrain.{there}")
        elif there in HEAVY and here in NO_TORCH and (here != "envs" or there in now):
            broken.append(f"{where} -> {name}, but {here} must load without it")
    return broken


def test_imports_point_down() -> None:
    assert [arrow for path in files() for arrow in broken_arrows(path)] == []


def test_a_broken_arrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "envs/environment.py": "import torch",
        "posttrain/types.py": "from posttrain.config import load",
        "posttrain/models/chat.py": "def later():\n    from posttrain.rollout import play",
        "posttrain/rollout/rows.py": "from posttrain.models.chat import Chat\nfrom posttrain.models import hidden",
        "posttrain/plan/rows.py": "import evaluate_model",
        "posttrain/other.py": "",
    }
    for name, text in wrong.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "posttrain" / "models" / "__init__.pyi").write_text(
        "from .chat import Chat as Chat\nfrom . import chat"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    arrows = [arrow for name in wrong for arrow in broken_arrows(tmp_path / name)]
    assert arrows == [
        "envs/environment.py -> torch, but envs must load without it",
        "posttrain/types.py -> posttrain.config.load, which is above it",
        "posttrain/models/chat.py -> posttrain.rollout.play, which is above it",
        "posttrain/rollout/rows.py -> posttrain.models.chat.Chat: import it from posttrain.models",
        "posttrain/rollout/rows.py -> posttrain.models.hidden, which posttrain/models/__init__.pyi does not name",
        "posttrain/plan/rows.py -> evaluate_model: a script is never imported",
        "posttrain/other.py is in none of the packages",
    ]


def test_packages_are_few_and_so_are_the_arrows_between_them() -> None:
    """Arrows between the eleven packages and envs/; of the files beside them and the scripts there is no limit."""
    folders = {path.name for path in (ROOT / "posttrain").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(LAYERS) - {"envs"}
    assert sorted(path.stem for path in (ROOT / "posttrain").glob("*.py")) == sorted(
        name.removeprefix("posttrain.") if name != "posttrain" else "__init__" for name in BESIDE
    )
    arrows = {(room(module_of(path)), room(name)) for path in files() for name in imports(path)}
    between = {(here, there) for here, there in arrows if here != there and {here, there} <= set(LAYERS)}
    assert len(between) <= MOST_ARROWS


def test_no_module_is_in_a_cycle() -> None:
    """Inside packages neither, imports for types and inside functions included."""
    modules = {module_of(path): path for path in files() if path.suffix == ".py"}
    graph = {}
    for module, path in modules.items():
        found = {name if name in modules else name.rpartition(".")[0] for name in imports(path)}
        graph[module] = {name for name in found if name in modules and name != module}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # a CycleError names one


def test_a_package_names_what_it_has() -> None:
    """Every name of an `__init__.pyi` is there, so that a type checker and Python agree."""
    for package in LAYERS[1:]:
        names = named_by(package)
        module = importlib.import_module(f"posttrain.{package}")
        assert [name for name in names if not hasattr(module, name)] == []


def test_few_names_stand_in_several_modules() -> None:
    """So that a search for a function or a class finds it, and its name says what it is of."""
    modules: dict[str, set[Path]] = {}
    for path in [file for file in files() if file.parts[-2] != ROOT.name]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                modules.setdefault(node.name, set()).add(path)
    shared = [name for name, places in modules.items() if len(places) > 1 and name != "main" and name[0] != "_"]
    assert len(shared) <= MOST_SHARED_NAMES


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
        f"    async def long(self):\n{('        pass' + chr(10)) * 90}"
    )
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "lake.py").write_text(f"def __init__(self, {names}): ...\n{chr(10) * 450}")
    assert [too_long(path) for path in (tmp_path / "file.py", tmp_path / "envs" / "lake.py")] == [
        [
            "file.py: many has 9 parameters",
            "file.py: __init__ has 9 parameters",
            "file.py: long has 91 lines",
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
