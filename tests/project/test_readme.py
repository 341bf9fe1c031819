"""Is the documentation true?  Commands, snippets, figure, links, hours and licences, and a line for every metric.

Commands are run as far as costs nothing: scripts up to `--print-config`, so that every file, key and flag must exist,
and the folders that they read must be saved by a command that stands before them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import io
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_layers
import yaml
from tiny_runs import tiny_base

import envs
import evaluate_model
import train_phase1_sft
from envs import check
from posttrain import __main__ as command
from posttrain.config import suggestions
from posttrain.config.chat import ChatRun
from posttrain.config.dpo import DPORun
from posttrain.config.evaluation import EvaluateRun
from posttrain.config.sft import SFTRun
from posttrain.config.starpo import StarPORun
from posttrain.data import reading
from posttrain.evaluation.while_training import MEASURED

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
SCRIPTS = [path.stem for path in ROOT.glob("*.py")]
SCHEMAS = (SFTRun, DPORun, StarPORun, EvaluateRun, ChatRun)
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = [f"configs/quickstart/{phase}.yaml" for phase in ("phase1_sft", "phase2_dpo", "phase3_starpo")]


def blocks(document: str, language: str) -> list[str]:
    """What stands between ```language and ```."""
    fences = re.split(r"^```(.*)\n", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE)
    opened = list(zip(fences[1::4], fences[2::4], strict=True))  # text, language, block, "", text, language, block, ...
    return [block for found, block in opened if found == language]


def outcome(run: Any, argv: list[str]) -> str:
    """What a program prints, called in this process with pipes of its own; it must end well."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        for name, pipe in (("stdin", io.TextIOWrapper(io.BytesIO())), ("stdout", said), ("stderr", said)):
            patch.setattr(sys, name, pipe)
        try:
            run()
        except SystemExit as end:
            code = end.code
    text = said.buffer.getvalue().decode()
    assert not code, f"exit code {code}: {text}"
    return text


# ------------------------------------------------------------------------------------------------------ shell commands


class Shell:
    """Follows the commands of a document without doing their work."""

    def __init__(self) -> None:
        self.made: set[str] = set()  # folders that hold a checkpoint by now
        self.written: set[str] = set()  # output folders of this block
        self.files: dict[str, Path] = {}  # YAML of the documents under the names that the text gives them

    def run(self, words: list[str]) -> None:
        while "=" in words[0]:
            assert re.fullmatch(r"[A-Z_]+", words.pop(0).partition("=")[0])
        match words:
            case ["make", target]:
                done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                if target == "quickstart":
                    self.made |= {"runs/quickstart/base", *(f"{output_dir(file)}/final" for file in QUICKSTART)}
            case [".", place]:
                assert re.search(rf"^VENV \?= {place.removesuffix('/bin/activate')}$", self.makefile(), re.MULTILINE)
            case ["trackio", verb, *flags]:
                assert importlib.metadata.entry_points(group="console_scripts", name="trackio")
                asked = [verb, *(flag for flag in flags if flag.startswith("-"))]
                assert all(f'"{word}"' in self.source("trackio", "cli.py") for word in asked)
            case ["torchrun", *rest]:
                from torch.distributed.run import get_args_parser

                launched = get_args_parser().parse_args(rest)
                self.python(launched.training_script, launched.training_script_args)
            case ["accelerate", "launch", *rest]:
                from accelerate.commands.launch import launch_command_parser

                launched = launch_command_parser().parse_args(rest)
                assert (ROOT / launched.config_file).is_file()
                self.python(launched.training_script, launched.training_script_args)
            case ["cp", file, place] if place.startswith("envs/"):  # which registers it
                spec = importlib.util.spec_from_file_location(Path(place).stem, ROOT / file)
                assert spec is not None and spec.loader is not None, f"{file} is no module"
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                own = [each for each in vars(module).values() if getattr(each, "__module__", "") == spec.name]
                envs.register(next(each for each in own if isinstance(each, type) and issubclass(each, envs.TextEnv)))
            case ["posttrain", "env", "check", *rest]:
                outcome(lambda: sys.exit(check.main([*rest, "--digest"])), [])
            case ["posttrain", name, *rest] if (module := command.COMMANDS[name].module) in SCRIPTS:
                self.python(f"{module}.py", rest)
            case ["posttrain", name, *rest]:
                first = [rest.pop(0)] if name in command.SECOND else []
                said = outcome(command.main, ["posttrain", name, *first, "--help"])
                assert all(flag in said for flag in rest if flag.startswith("-")), said
            case ["python", "-m", module, *rest]:
                said = outcome(lambda: runpy.run_module(module, run_name="__main__"), [module, "--help"])
                assert all(flag in said for flag in rest if flag.startswith("-")), said
                self.made |= {value for flag, value in itertools.pairwise(rest) if flag == "--out"}
            case ["python", script, *rest]:
                self.python(script, rest)
            case _:
                raise AssertionError("no test knows this command")

    def python(self, script: str, arguments: list[str]) -> None:
        """One of the five scripts: its config must stand, and what it reads must be there."""
        argv = [script, *(str(self.files.get(word, word)) for word in arguments), "--print-config"]
        printed = outcome(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), argv)
        cfg = yaml.safe_load(printed)
        if "--plan" in arguments:  # reads no model and writes nothing
            return
        reads = list(cfg["checkpoints"].values()) if "checkpoints" in cfg else [cfg["model"]["name_or_path"]]
        missing = [folder for folder in reads if folder.startswith("runs/") and folder not in self.made]
        assert not missing, f"nothing before it has made {missing}"
        if script.startswith("train_") and "--advise" not in arguments:  # which writes nothing
            assert cfg["output_dir"] not in self.written, f"{cfg['output_dir']} would be in use"
            self.written.add(cfg["output_dir"])
            self.made.add(f"{cfg['output_dir']}/final")

    @staticmethod
    def makefile() -> str:
        return (ROOT / "Makefile").read_text(encoding="utf-8")

    @staticmethod
    def source(package: str, file: str) -> str:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        return (Path(spec.origin).parent / file).read_text(encoding="utf-8")


def mine_eval() -> str:
    """The YAML that evaluates own prompts."""
    (found,) = (block for block in blocks("docs/own.md", "yaml") if block.startswith("# mine-eval.yaml"))
    return found


def output_dir(file: str) -> str:
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["output_dir"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_work(document, monkeypatch, tmp_path, own_environments):
    monkeypatch.chdir(ROOT)
    shell, wrong = Shell(), []
    for name, text in {
        "mine.yaml": blocks("README.md", "yaml")[0],
        "pairs.yaml": blocks("docs/own.md", "yaml")[0],
        "mine-eval.yaml": mine_eval(),
    }.items():
        shell.files[name] = tmp_path / name
        shell.files[name].write_text(text)
    if document == "docs/own.md":  # which goes on from the README, and trains by `posttrain rl` in a sentence
        shell.made |= {"runs/quickstart/base", "runs/mine-rl/final"}
    for block in blocks(document, "sh"):
        shell.written.clear()
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            try:
                if words:
                    shell.run(words)
            except (AssertionError, ValueError, OSError) as problem:
                wrong.append(f"{line}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "posttrain rll",
        "make quikstart",
        "python train_phase1_sft.py --config configs/phase1.yaml",
        "python train_phase1_sft.py trainer.learning_rat=1e-5",
        "python train_phase1_sft.py --restart",
        "python train_phase2_dpo.py",  # nothing has made runs/phase1/final
        "posttrain env check frozen_lak",
        "posttrain evals",
        "posttrain report --gyf FILE",
        "python -m posttrain.data.embedded --output runs/base",
        "torchrun --processes 2 train_phase1_sft.py",
        "trackio show --projekt posttrain",
        "pip install posttrain",
    ],
)
def test_a_wrong_command_is_noticed(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, KeyError, SystemExit)):
        Shell().run(shlex.split(line))


# ------------------------------------------------------------------------------------------------- snippets and tables


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_snippets_run(document):
    for block in blocks(document, "python"):
        outcome(lambda block=block: exec(block, {}), [])


def test_the_environment_of_the_readme_is_the_example():
    (block,) = blocks("README.md", "py")
    assert block in (ROOT / "examples/minimal_env.py").read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


def test_every_command_stands_in_the_readme():
    section = README.split("## Commands")[1].split("## ")[0]
    assert [name for name in command.COMMANDS if f"`{name}`" not in section and f"`{name} " not in section] == []


def test_own_data_of_the_readme_trains(tmp_path, tiny_tokenizer, monkeypatch):
    """The YAML and the row as they stand there, with a tiny model in the folder that it names."""
    (row,) = re.findall(r'^`(\{"messages".*)`$', README, re.MULTILINE)
    (tmp_path / "mine.jsonl").write_text(row + "\n")
    (tmp_path / "mine.yaml").write_text(blocks("README.md", "yaml")[0])
    tiny_base(tmp_path / "runs/quickstart/base", tiny_tokenizer)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    train_phase1_sft.main(["--config", "mine.yaml"])
    assert (tmp_path / "runs/mine/final/model.safetensors").exists()


def test_own_prompts_of_the_page_are_evaluated(tmp_path, tiny_tokenizer, monkeypatch):
    """The YAML and the reward function as they stand there, with tiny models."""
    (code,) = (block for block in blocks("docs/own.md", "python") if "def polite" in block)
    (tmp_path / "my_rewards.py").write_text(code)
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "mine-eval.yaml").write_text(mine_eval())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tiny_base(tmp_path / "base", tiny_tokenizer)
    tiny_base(tmp_path / "runs/mine-rl/final", tiny_tokenizer)
    changes = ["checkpoints.base=base", "device=cpu", "workers=1", "suites.envs.episodes=4"]
    changes += ["suites.envs.max_completion_length=8", "suites.envs.max_context=256"]
    outcome(evaluate_model.main, ["evaluate_model.py", "--config", "mine-eval.yaml", *changes])
    results = json.loads((tmp_path / "runs/mine-evaluation/results.json").read_text())
    assert {name: entry["envs"]["prompts"]["episodes"] for name, entry in results["checkpoints"].items()} == {
        "base": 4,
        "mine": 4,
    }
    row = json.loads((tmp_path / "runs/mine-evaluation/transcripts.jsonl").read_text().splitlines()[0])
    assert set(row["reward_parts"]) == {"math", "polite"} and row["messages"][0]["role"] == "system"
    assert "players" not in (tmp_path / "runs/mine-evaluation/results.md").read_text(), "nobody plays them by a rule"


def test_hours_are_those_of_the_config_files():
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    computed = dict(re.findall(r"^\| `(\w+)\.py` \|[^|]*\| ([\d.-]+ h) \|", text, re.MULTILINE))
    assert len(computed) == 4
    for script, hours in computed.items():
        file = ROOT / f"configs/{script.removeprefix('train_').removesuffix('_model')}.yaml"
        assert f"computed {hours}, not yet measured" in yaml.safe_load(file.read_text(encoding="utf-8"))["hardware"]


def test_everything_downloaded_stands_beside_its_licence():
    table = (ROOT / "docs/config.md").read_text(encoding="utf-8").split("| licence |")[1]
    first, second = (yaml.safe_load((ROOT / f"configs/{run}.yaml").read_text()) for run in ("phase1_sft", "phase2_dpo"))
    found = {source["path"] for run in (first, second) for source in run["data"]["sources"]} - {"embedded"}
    found.add(first["model"]["name_or_path"])
    found |= {hub.path for hub in reading.HELD_OUT.values()}
    assert len(found) == 7 and {name for name in found if f"`{name}`" not in table} == set()


# ---------------------------------------------------------------------------------------------------- figure and links


def test_the_figure_of_the_packages_is_what_they_import():
    """Every arrow is an import, and every import follows the arrows; the table has a line for each package."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    arrows: set[tuple[str, str]] = set()
    for line in blocks("docs/architecture.md", "mermaid")[0].splitlines()[1:]:
        nodes = [[re.sub(r"\[.*", "", name.strip()) for name in part.split("&")] for part in line.split("-->")]
        arrows |= {(here, there) for left, right in itertools.pairwise(nodes) for here in left for there in right}
    below: dict[str, set[str]] = {}
    for package in test_layers.LAYERS:  # from the bottom
        direct = {there for here, there in arrows if here == package}
        below[package] = direct.union(*(below[each] for each in direct))
    imports = {(test_layers.room(test_layers.module_of(path)), test_layers.room(name))
               for path in test_layers.files() for name in test_layers.imports(path)}  # fmt: skip
    between = {(here, there) for here, there in imports if here != there and {here, there} <= set(test_layers.LAYERS)}
    assert {(here, there) for here, there in arrows if here != "scripts"} <= between
    assert {(here, there) for here, there in between if there not in below[here]} == set()
    for package in test_layers.LAYERS[1:]:
        assert re.search(rf"^\| `{package}` \| ", text, re.MULTILINE), package
        init = (ROOT / f"posttrain/{package}/__init__.py").read_text(encoding="utf-8")
        assert f"| `{package}` | {init[3 : init.index('?')]}? |" in text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    missing = [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    paths = re.findall(r"`((?:configs|docs|envs|posttrain|tests|benchmarks)/[\w./-]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()]
    assert not missing


def test_keys_exist():
    """Dotted keys of the config, in the documents and in what alarms advise; docs/results.md names removed ones."""
    places = (place.path for schema in SCHEMAS for place in suggestions.places(schema))
    known = {re.sub(r"\.(0|NAME)\b", "", path) for path in places}
    sections = {name for path in known for name in path.split(".")[:-1]}
    files = [ROOT / name for name in DOCUMENTS if name != "docs/results.md"]
    found = []
    for file in (*files, *(ROOT / "posttrain" / "monitoring").glob("*.py")):
        for key in re.findall(r"`([a-z_]+(?:\[\])?(?:\.[a-z_0-9]+)+)(?=[`:=])", file.read_text(encoding="utf-8")):
            if key.partition(".")[0].removesuffix("[]") in sections and not key.startswith(("envs.", "transcripts.")):
                found.append((file.name, key, re.sub(r"\[\]|\.\d+", "", key)))
    assert len(found) > 80
    assert [
        f"{name}: {key}" for name, key, path in found if not any(f".{each}".endswith(f".{path}") for each in known)
    ] == []


# ------------------------------------------------------------------------------------------------------------- metrics


def explained(title: str) -> set[str]:
    """The keys in the tables of docs/metrics.md under headings that begin so; for results.json also in the text."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    sections = [part for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:] if part.startswith(title)]
    assert sections
    keys: set[str] = set()
    for line in "\n".join(sections).splitlines():
        cells = line.split("|")
        columns = 2 if title == "results.json" else 1
        keys |= set(re.findall(r"`([\w/]+)`", "".join(cells[1 : 1 + columns]) if line.startswith("|") else ""))
        if title == "results.json" and not line.startswith("|"):
            keys |= set(re.findall(r"`([\w/]+)`", line))
    return keys


def written_keys(function: ast.AST) -> Iterator[str]:
    """Keys of the dicts that a function builds; f-strings keep the names of what they fill in: rollout/{env}."""
    for node in ast.walk(function):
        places: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            places = list(node.keys)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            places = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_share" and len(node.args) == 2:
            places = [node.args[1]]  # its name for the share
        elif isinstance(node, ast.DictComp) and isinstance(node.generators[0].iter, ast.Tuple):
            places = list(node.generators[0].iter.elts)
        for place in places:
            if isinstance(place, ast.Constant) and isinstance(place.value, str):
                yield place.value
            elif isinstance(place, ast.JoinedStr):
                yield "".join(_piece(value) for value in place.values)


def _piece(value: ast.expr) -> str:
    if isinstance(value, ast.FormattedValue):
        return "{" + ast.unparse(value.value).split(".")[0] + "}"
    assert isinstance(value, ast.Constant)
    return str(value.value)


def functions(file: str, wanted: str) -> Iterator[ast.AST]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and re.fullmatch(wanted, node.name)]
    assert found
    yield from found


def test_every_metric_of_phase_3_is_explained():
    written: set[str] = set()
    for file, names in (
        ("train_phase3_starpo.py", "main|validate|suites"),
        ("posttrain/starpo/monitoring/episodes.py", "describe|describe_evaluation|costs"),
        ("posttrain/starpo/monitoring/collapse.py", "thoughts_and_prompts"),
        ("posttrain/starpo/monitoring/updates.py", "policy|critic|teacher|row|advantage_figures"),
        ("posttrain/starpo/monitoring/monitor.py", "react|compare_with_best"),
        ("posttrain/starpo/rollout_worker.py", "staleness"),
        ("posttrain/starpo/level_choice.py", "record_levels"),
    ):
        for function in functions(file, names):
            written |= {key for key in written_keys(function) if "/" in key or key == "memory"}
    written.add("tokens")
    (aggregate,) = functions("posttrain/starpo/monitoring/episodes.py", "aggregate")
    written |= {f"rollout/{key}" for key in written_keys(aggregate)}
    (measure,) = functions("posttrain/evaluation/while_training.py", "measure")
    texts = {node.value for node in ast.walk(measure) if isinstance(node, ast.Constant)}
    figures = texts & {"accuracy", "n", "low", "high"}
    written |= {f"evaluation/SUITE/{figure}" for figure in figures} | {"evaluation/repetition/seq_rep_4"}
    written |= {f"evaluation/instructions/{key}" for key in MEASURED["instructions"][1:]}
    written |= {key.replace("{suite}", "SUITE") for key in written_keys(measure) if "change" in key}
    keys = {key.replace("{env}", "ENV").replace("{failure}", "FAILURE") for key in written}
    keys = {key.replace("{k}", "K").replace("_{name}", "_NAME") for key in keys}
    for name in ("evaluation", "final"):
        keys |= {key.replace("{name}", name) for key in keys if "{name}" in key}
    keys = {key for key in keys if "{" not in key}
    assert {"rollout/ENV/success", "policy/entropy", "final/ENV/low", "seconds/update"} <= keys
    assert keys == explained("Phase 3")


def test_every_metric_of_phases_1_and_2_is_explained():
    read = Shell.source
    keys = {"step", "seconds"} | set(re.findall(r'logs\["(\w+)"\]', read("transformers", "trainer.py")))
    keys.discard("num_input_tokens_seen")  # only with a setting that no config here has
    for trainer in ("sft_trainer.py", "dpo_trainer.py"):
        keys |= set(re.findall(r'_metrics\[mode\]\["([^"]+)"\]', read("trl", f"trainer/{trainer}")))
    assert {"loss", "entropy", "rewards/margins", "aux_loss"} <= keys
    assert keys == {key for key in explained("Phases 1 and 2") if not key.startswith("eval_")}


def test_every_figure_of_results_json_is_explained():
    keys: set[str] = set()
    for function in functions("posttrain/evaluation/figures.py", r"\w+_figures|_with_settings|_share|compare"):
        keys |= set(written_keys(function))
    for function in functions("posttrain/metrics.py", "repetition"):
        keys |= set(written_keys(function))
    assert {"accuracy", "success", "margin", "seq_rep_4", "before"} <= keys
    assert not keys - explained("results.json")
