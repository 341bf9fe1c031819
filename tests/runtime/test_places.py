"""Does what takes the project elsewhere still fit it: the notebook, the Dockerfile, the versions of Python?"""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_readme import Shell
from tiny_runs import ROOT

import evaluate_model

NOTEBOOK, GSM8K = ROOT / "notebooks" / "quickstart.ipynb", ROOT / "notebooks" / "gsm8k.ipynb"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SETUP = MAKEFILE[MAKEFILE.index("$(STAMP): req") : MAKEFILE.index("@touch $@")]
DOCKERFILE = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M).replace("\\\n", "")
SMALL = {  # of the quickstart, by the variables that the notebook offers
    "PHASE1": "trainer.max_steps=2 data.eval_rows=8",
    "PHASE2": "trainer.max_steps=2 data.eval_rows=8",
    "PHASE3": "trainer.max_steps=1 rollout.groups=2 evaluation.episodes=2 evaluation.final_episodes=2"
    " distillation=null transcripts.every=1",
    "EVALUATION": "suites.math.n=4 suites.repetition.n=4 suites.recall.n=4 suites.preferences.n=4"
    " suites.envs.episodes=4 suites.math.n_others=4 suites.repetition.n_others=4 suites.recall.n_others=4"
    " suites.envs.episodes_others=4",
}


def cells(kind: str = "code", notebook: Path = NOTEBOOK) -> list[str]:
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def commands(notebook: Path = NOTEBOOK) -> list[str]:
    """The lines of the cells that are shell scripts, with what is continued in one."""
    scripts = [cell.partition("\n")[2] for cell in cells("code", notebook) if cell.startswith("%%bash\n")]
    return [line for script in scripts for line in script.replace("\\\n", "").splitlines() if line != "set -e"]


# ---------------------------------------------------------------------------------------------------------- notebook


@pytest.mark.parametrize("notebook", [NOTEBOOK, GSM8K], ids=lambda path: path.stem)
def test_a_notebook_is_one_without_outputs(notebook: Path) -> None:
    book = json.loads(notebook.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and book["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"]) > 10
    for cell in book["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        assert all(isinstance(line, str) for line in cell["source"]) and cell["metadata"] == {}
    assert "https://colab.research.google.com/" in cells("markdown", notebook)[0]


@pytest.mark.parametrize(("notebook", "count"), [(NOTEBOOK, 8), (GSM8K, 3)], ids=["quickstart", "gsm8k"])
def test_each_cell_is_valid_and_each_command_exists(
    notebook: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for cell in cells("code", notebook):
        if cell.startswith("%%bash\n"):
            done = subprocess.run(["bash", "-n"], input=cell.partition("\n")[2], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif "%pip install" in cell:
            lines = [line for line in cell.splitlines() if line and not line.startswith("#")]
            assert all(line.startswith("%pip install -q ") for line in lines)
            words = shlex.split(lines[-1])
            assert [(ROOT / words[words.index(flag) + 1]).is_file() for flag in ("-c", "-r")] == [True, True]
        else:
            ast.parse(cell.partition("\n")[2] if cell.startswith("%%writefile ") else cell)
    shell, ran = Shell(), []
    for command in commands(notebook):
        words = [word for word in shlex.split(command) if not word.startswith("$")]
        if words[:3] == ["python", "-m", "posttrain.runtime.parallel"]:  # which takes torchrun's arguments
            words = ["torchrun", *words[3:]]
        shell.run(words)
        ran.append(" ".join(words))
    assert len(ran) == count


def test_the_notebook_does_what_the_quickstart_does() -> None:
    """The recipe of the Makefile, without its own words for the interpreter and for --resume."""
    recipe = MAKEFILE[MAKEFILE.index("$(QUICK)/base/manifest.json:\n") : MAKEFILE.index("# A pretrained model goes")]
    two = re.search(r"^TWO := (.*)$", MAKEFILE, re.M)
    assert two is not None
    recipe = recipe.replace("$(TWO)", two[1]).replace("$(PY)", "python").replace("$(QUICK)", "runs/quickstart")
    asked = re.findall(r"^\t(.*?)(?: \$\(call .*)?$", recipe, re.M)
    offered = {variable: f" ${variable}" for variable in SMALL}
    written = [command for command in commands() if "inference" not in command]
    for variable in offered.values():
        assert sum(command.endswith(variable) for command in written) == 1
    assert [" ".join(re.sub(r" \$\w+$", "", command).split()) for command in written] == asked


@pytest.mark.parametrize("notebook", [NOTEBOOK, GSM8K], ids=lambda path: path.stem)
def test_each_variable_of_the_first_cell_is_read_by_a_command(notebook: Path) -> None:
    first = cells("code", notebook)[0]
    listed = [name for names in re.findall(r"^for name in (\(.*\)):", first, re.M) for name in ast.literal_eval(names)]
    offered = [*listed, *re.findall(r"setdefault\(\"(\w+)\"", first)]
    assert offered and [name for name in offered if not any(f"${name}" in each for each in commands(notebook))] == []


def test_the_first_cell_can_run_again_and_clones_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train_phase1_sft.py").touch()
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    for variable in ("OMP_NUM_THREADS", *SMALL):  # which the cell sets
        monkeypatch.setenv(variable, "")
    cell = cells()[0].replace('repository = ""', f"repository = {source.as_uri()!r}")
    monkeypatch.chdir(tmp_path)
    for start in (".", ".", tmp_path):  # the last one is a new kernel
        os.chdir(start)
        exec(compile(cell, "cell", "exec"), {})
        assert Path.cwd() == tmp_path / "posttrain"
    assert not (tmp_path / "posttrain" / "posttrain").exists()
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="Write the address of the git repository"):
        exec(compile(cells()[0], "cell", "exec"), {})


def test_what_is_said_of_resume_fits_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--overwrite and --resume exclude each other."""
    (evaluation,) = [command for command in commands() if "evaluate_model.py" in command]
    said = " ".join(" ".join(cells("markdown")).split())
    assert "--overwrite" in evaluation
    assert "an evaluation with `--resume` in the place of `--overwrite`" in said
    both = [word for word in shlex.split(evaluation)[2:] if word[0] != "$"]
    monkeypatch.setattr(sys, "argv", ["evaluate_model.py", *both, "--resume"])
    with pytest.raises(SystemExit):
        evaluate_model.main()
    assert "--resume: not allowed with argument --overwrite" in capsys.readouterr().err


def outputs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a notebook in a clone, and return what each of its cells of code shows: stdout and stderr, each in one piece.

    Its cell of pip finds everything installed. Where something is missing, pip must not change the environment in which
    other tests run.
    """
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    tracked = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    ).splitlines()
    for name in tracked:
        if (ROOT / name).is_file():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    book = nbformat.read(notebook, as_version=4)
    nbformat.validate(book)
    kernel = {"metadata": {"path": str(tmp_path / "clone" / "notebooks")}}
    late = {"iopub_timeout": 60, "raise_on_iopub_timeout": True}  # by default what comes 4 s late is left out
    nbclient.NotebookClient(book, timeout=1200, kernel_name="python3", resources=kernel, **late).execute()
    said = []
    for cell in book.cells:
        if cell.cell_type == "code":
            parts: dict[str, str] = {}
            for each in cell["outputs"]:
                name = each.get("name", "")
                parts[name] = parts.get(name, "") + each.get("text", "") + str(each.get("data", ""))
            said.append("\n".join(parts.values()))
    return said


@pytest.mark.slow
def test_the_notebook_of_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, with little data: no cell fails, and the model answers."""
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    said = outputs(NOTEBOOK, tmp_path, monkeypatch)
    assert "image/gif" in said[-2] or "image/png" in said[-2]
    assert (tmp_path / "clone" / "runs" / "quickstart" / "report.html").is_file() and "frozen_lake" in said[-1]


@pytest.mark.thorough
def test_the_notebook_of_gsm8k_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, with the quickstart's base model and rows of a file: its reward is called, and the model answers."""
    base, rows = tmp_path / "base", ROOT / "tests" / "fixtures" / "gsm8k" / "rows.jsonl"
    subprocess.run([sys.executable, "-m", "posttrain.data.embedded", "--out", base], cwd=ROOT, check=True)
    small = f"model.name_or_path={base} envs.0.options.path={rows} envs.0.options.config=null device=cpu"
    small += " trainer.max_steps=1 trainer.bf16=false rollout.groups=2 rollout.num_generations=2 rollout.refill=0"
    small += " rollout.max_completion_length=8 evaluation.episodes=2 evaluation.final_episodes=2"
    monkeypatch.setenv("RUN", f"report_to=none {small}")
    said = outputs(GSM8K, tmp_path, monkeypatch)
    wanted = [(3, "pass@16"), (4, "Saved: runs/notebook/final"), (5, "after 0 steps: 0%"), (5, "after 1 steps: 0%")]
    for cell, words in wanted:
        assert words in said[cell], f"cell {cell} does not say {words!r}, but:\n{said[cell]}"
    config = (tmp_path / "clone" / "runs" / "notebook" / "run_config.yaml").read_text(encoding="utf-8")
    assert "my_rewards:boxed" in config


# --------------------------------------------------------------------------------------------------------- Dockerfile


def test_a_chat_that_listens_everywhere_asks_for_a_password() -> None:
    head = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^#   (docker run .* --host 0\.0\.0\.0.*)$", head, re.M)
    assert " --web " in command and " --password" in command and " -it " in command  # it is typed at the start


def instructions() -> list[tuple[str, str]]:
    lines = [line.partition(" ") for line in DOCKERFILE.splitlines() if line.strip()]
    return [(name, re.sub(r"\s+", " ", rest).strip()) for name, _, rest in lines]


def test_the_image_installs_what_make_installs() -> None:
    found = instructions()
    assert [name for name, _ in found] == (
        "ARG FROM ARG RUN ENV WORKDIR COPY RUN COPY RUN USER ENV CMD".split()
    )  # packages below the code
    runs = [rest for name, rest in found if name == "RUN"]
    (wheels,) = re.findall(r"^CPU_TORCH := (\S+)$", MAKEFILE, re.M)
    assert f"--extra-index-url {wheels}" in runs[1] and "--extra-index-url $(CPU_TORCH)" in SETUP
    torch = "$(grep -o '^torch==[^ ]*' requirements.lock)"
    assert re.findall(r"pip install (.*?)(?: &&|;|$)", runs[1]) == [
        "--require-hashes -r /tmp/pip.txt", f"--no-deps --extra-index-url {wheels} {torch}",
        "--require-hashes -c requirements.lock -r requirements.txt hatchling",
    ]  # fmt: skip
    for command in ("--require-hashes -r $(VENV)/pip.txt", f"--no-deps $$index ${torch}"):
        assert f"$$pip {command}" in SETUP
    assert "$$pip --require-hashes -c requirements.lock -r requirements.txt -r requirements-dev.txt" in SETUP
    copied = [rest.split()[:-1] for name, rest in found if name == "COPY"]
    assert copied == [["requirements.txt", "requirements.lock"], ["."]]
    assert all((ROOT / name).exists() for names in copied for name in names)
    for script in runs:
        done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for device, code in (("cpu", 0), ("cuda", 0), ("tpu", 2)):
        choose = runs[0].partition("esac;")[0] + 'esac; echo "$more"'
        done = subprocess.run(["sh", "-c", choose], env={"DEVICE": device}, capture_output=True, text=True)
        assert done.returncode == code and ("gcc" in done.stdout) == (device == "cuda")


def test_the_image_runs_make_as_somebody_who_is_not_root() -> None:
    found = instructions()
    assert [rest for name, rest in found if name == "USER"] == ["1000"]
    (command,) = [json.loads(rest) for name, rest in found if name == "CMD"]
    shown = subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert command[0] == "make" and shown.returncode == 0
    variables = " ".join(rest for name, rest in found if name == "ENV")
    assert "VENV=/opt/venv " in variables and re.search(r"^VENV \?= ", MAKEFILE, re.M)  # which the environment sets
    assert "STAMP := $(VENV)/.installed\n" in MAKEFILE and 'touch "$VENV/.installed"' in found[-4][1]
    assert not re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", DOCKERFILE, re.I)


@pytest.mark.parametrize(
    ("path", "copied"),
    [
        ("train_phase1_sft.py", True),
        ("posttrain/models/chatml.jinja", True),
        ("requirements.lock", True),
        ("configs/quickstart/chat.yaml", True),
        (".git/config", False),
        ("runs/quickstart/phase1/final/model.safetensors", False),
        (".venv/bin/python", False),
        (".env", False),
        ("deploy/.env.local", False),
        ("posttrain/__pycache__/chat.pyc", False),
    ],
)
def test_no_run_and_no_secret_is_copied_into_the_image(path: str, copied: bool) -> None:
    """Docker's rule for these patterns: one that fits a folder fits what is in it; ** is any folders, or none."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    starts = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
    left_out = any(
        fnmatch.fnmatch(start, pattern) or fnmatch.fnmatch(f"/{start}", pattern.replace("**/", "*/"))
        for pattern in patterns
        for start in starts
    )
    assert left_out != copied


# -------------------------------------------------------------------------------------------------------------- Python


def test_one_oldest_python_is_named_everywhere() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["project"]["requires-python"]).groups()  # type: ignore[union-attr]
    kinds = project["project"]["classifiers"]
    named = [line.rpartition("3.")[2] for line in kinds if ":: Python ::" in line]
    assert named == [str(minor) for minor in range(int(low), int(high))]
    assert int(low) <= sys.version_info.minor < int(high)
    assert f"v < (3, {low})" in SETUP and f"Python 3.{low} or later is needed" in SETUP
    assert project["tool"]["ruff"]["target-version"] == f"py3{low}"
    assert project["tool"]["pyright"]["pythonVersion"] == f"3.{low}"
    (image,) = re.findall(r"^ARG PYTHON=3\.(\d+)$", DOCKERFILE, re.M)
    assert image in named and f"Python 3.{low} or later" in (ROOT / "README.md").read_text()
    assert f"Python 3.{low} to 3.{int(high) - 1}" in (ROOT / "docs" / "config.md").read_text()
