"""Are the figures of lm-evaluation-harness those of a slow reference, and does no code of a task run unasked?

What needs the harness is skipped where it is not installed: it is an extra of 300 MB.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from test_evaluate import saved_model

import evaluate_model
from posttrain.config.shared import ModelSection
from posttrain.evaluation import harness
from posttrain.evaluation.store import digest
from posttrain.models import loading as models
from posttrain.models.chat import Chat
from posttrain.runtime import compat
from posttrain.types import UserError

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (requirements-extras.txt)"
)
CHOICES = ["yes", "no", "the whole of it"]
TOKENS = 6


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Chat) -> Path:
    return saved_model(tmp_path_factory.mktemp("harness") / "phase3" / "final", tiny_chat)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, no list of this machine's packages (it takes ten seconds), and a cache of data sets that goes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def task(folder: Path, items: list[dict[str, Any]], kind: str, **changes: Any) -> Path:
    """A YAML task over a local file, as a user writes it."""
    data = folder / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    shared: dict[str, Any] = {
        "task": kind,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{question}}",
        "metadata": {"version": 2.5},
    }
    if kind == "multiple_choice":
        asked: dict[str, Any] = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
        names = ["acc", "acc_norm"]
    else:
        asked = {"doc_to_target": "{{answer}}"}
        asked["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": TOKENS, "do_sample": False}
        names = ["exact_match"]
    asked["metric_list"] = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(shared | asked | changes))
    return file


class Reference:
    """One forward pass for each token, no batch, no cache, no harness."""

    def __init__(self, final: Path, chat_template: bool) -> None:
        section = ModelSection(name_or_path=str(final), dtype="float32")
        self.net, self.chat = models.load(section, device="cpu", chat_template=None, training=False)
        self.tokenizer: Any = self.chat.tokenizer
        self.templated = chat_template

    def prompt(self, question: str) -> list[int]:
        if self.templated:
            return self.chat.prompt([{"role": "user", "content": question}])
        return self.tokenizer.encode(question, add_special_tokens=False)

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        return self.net(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)

    def loglikelihood(self, question: str, choice: str) -> float:
        """The harness counts white space at the end of a prompt, such as the template's line break, with the answer."""
        ids, total, before = self.prompt(question), 0.0, " "
        if self.templated:
            before = self.tokenizer.decode(ids.pop())
            assert before == "\n"
        for token in self.tokenizer.encode(before + choice, add_special_tokens=False):
            total += float(self.logprobs(ids)[token])
            ids.append(token)
        return total

    def greedy(self, question: str) -> str:
        ids, said = self.prompt(question), []
        while len(said) < TOKENS and "\n" not in self.tokenizer.decode(said):
            said.append(int(self.logprobs(ids + said).argmax()))
            if said[-1] == self.chat.stop_id:
                break
        return self.tokenizer.decode(said, skip_special_tokens=True).split("\n")[0]


def figures(entry: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {found["metric"]: (found["value"], found["stderr"]) for found in entry["metrics"]}


def share(right: list[bool]) -> tuple[Any, Any]:
    error = stdev(map(float, right)) / math.sqrt(len(right))
    return pytest.approx(fmean(right)), pytest.approx(error)


@needs_harness
@pytest.mark.parametrize("chat_template", [False, True])
def test_both_kinds_of_task_have_the_figures_of_a_slow_reference(
    final: Path, tmp_path: Path, chat_template: bool
) -> None:
    slow = Reference(final, chat_template)
    questions = [f"{n} + {n % 3} = ?" for n in range(9)]
    chosen = [{"question": q, "choices": CHOICES, "label": n % 3} for n, q in enumerate(questions)]
    wanted = [{"question": q, "answer": slow.greedy(q) if n % 2 else "?"} for n, q in enumerate(questions)]
    files = [task(tmp_path, chosen, "multiple_choice"), task(tmp_path, wanted, "generate_until")]
    options = ["--out", str(tmp_path / "out"), "--dtype", "float32", "--device", "cpu", "--batch-size", "4"]
    options += ["--chat-template"] if chat_template else []
    harness.main([str(final), "--tasks", *map(str, files), *options])

    measured = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["phase3"]
    assert measured["digest"] == digest(str(final))
    found = measured["tasks"]
    sums = [[slow.loglikelihood(question, choice) for choice in CHOICES] for question in questions]
    best = [max(range(3), key=row.__getitem__) for row in sums]
    lengths = [len(choice) for choice in CHOICES]
    best_norm = [max(range(3), key=lambda k, row=row: row[k] / lengths[k]) for row in sums]
    right = [guess == n % 3 for n, guess in enumerate(best)]
    right_norm = [guess == n % 3 for n, guess in enumerate(best_norm)]
    assert figures(found["multiple_choice"]) == {"acc": share(right), "acc_norm": share(right_norm)}
    assert figures(found["generate_until"])["exact_match"] == share([bool(n % 2) for n in range(9)])

    rows = [json.loads(line) for line in (tmp_path / "out/benchmarks/phase3-multiple_choice.jsonl").open()]
    told = [[answer[0] for answer in row["filtered_resps"]] for row in rows]
    assert torch.allclose(torch.tensor(told), torch.tensor(sums), atol=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "out/benchmarks/phase3-generate_until.jsonl").open()]
    assert [row["filtered_resps"][0] for row in rows] == [slow.greedy(question) for question in questions]
    for entry in found.values():
        assert (entry["version"], entry["n"], entry["of"], entry["fewshot"]) == (2.5, 9, 9, 0)
        assert entry["harness"].startswith("0.4.") and entry["chat_template"] is chat_template
        assert entry["dtype"] == "float32"
        assert entry["data_set"] == {"path": "json", "name": None, "split": "test", "hub": False, "rows": 9}


def test_an_entry_says_whether_its_items_are_the_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder here may have a name of the form OWNER/NAME, a split may be a slice, and a task may drop items."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "mine").mkdir(parents=True)
    rows = {"test": [1, 2, 3], "test[:2]": [1, 2]}
    for path, split, files, wanted in (
        ("openai/gsm8k", "test", None, (True, 3)),
        ("openai/gsm8k", "test[:2]", None, (True, 2)),
        ("openai/gsm8k", "test", {"data_files": {"test": "mine.jsonl"}}, (False, 3)),
        ("data/mine", "test", None, (False, 3)),
        ("json", "test", None, (False, 3)),
    ):
        about = {"dataset_path": path, "test_split": split, "validation_split": None, "dataset_kwargs": files}
        about |= {"custom_dataset": None}
        leaf = SimpleNamespace(task_name="t", config=SimpleNamespace(**about), dataset=rows)
        group = SimpleNamespace(get_all_tasks=lambda leaf=leaf: [leaf])
        assert harness.origins(leaf) == harness.origins(group) == {"t": {"hub": wanted[0], "rows": wanted[1]}}
        assert harness.data_set([about, about], [*harness.origins(leaf).values()] * 2) == {
            **{"path": path, "split": split, "name": None, "hub": wanted[0], "rows": 2 * wanted[1]}
        }
    bare = SimpleNamespace(task_name="t", config=None)  # a class of its own
    assert harness.origins(bare) == {"t": {"hub": False, "rows": None}}


def test_figures_stand_beside_those_of_the_evaluation(final: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"digests": {"mine": digest(str(final))}, "config": {"seed": 3}}))
    assert harness.keep(file, str(final), digest(str(final)), {"a": {"n": 1}}) == "mine"
    assert harness.keep(file, str(final), digest(str(final)), {"b": {"n": 2}}) == "mine"
    written = json.loads(file.read_text())
    assert written["config"] == {"seed": 3} and set(written["benchmarks"]["mine"]["tasks"]) == {"a", "b"}
    assert harness.keep(file, str(final), "other weights", {"c": {"n": 3}}) == "phase3"
    assert harness.keep(file, "elsewhere/phase3/final", "newer weights", {"d": {"n": 4}}) == "elsewhere/phase3/final"
    assert harness.keep(file, str(final), "other weights", {"e": {"n": 5}}) == "phase3"
    assert harness.keep(file, "a/mine", "weights of a folder called mine", {}) == "a/mine"  # as the evaluation's "mine"
    again = harness.keep(file, "elsewhere/phase3/final", "trained anew there", {"d": {"n": 6}})
    assert again == "elsewhere/phase3/final (trained )"
    written = json.loads(file.read_text())["benchmarks"]
    assert {name: set(found["tasks"]) for name, found in written.items()} == {
        **{"mine": {"a", "b"}, "phase3": {"c", "e"}, "elsewhere/phase3/final": {"d"}, "a/mine": set(), again: {"d"}}
    }
    same = evaluate_model.benchmarks(file, {"mine": digest(str(final)), "phase3": "trained anew"})
    assert set(same) == {*written} - {"phase3"}  # a new evaluation keeps what still holds

    file.write_text(json.dumps(json.loads(file.read_text()) | {"digests": {"phase3": "newer weights"}}))
    assert harness.keep(file, str(final), "newer weights", {"f": {"n": 7}}) == "phase3"
    written = json.loads(file.read_text())["benchmarks"]
    assert set(written["phase3"]["tasks"]) == {"d", "f"} and "elsewhere/phase3/final" not in written
    assert set(written["phase3 (other we)"]["tasks"]) == {"c", "e"}
    file.write_text("[")
    assert evaluate_model.benchmarks(file, {}) == evaluate_model.benchmarks(tmp_path / "none.json", {}) == {}


@needs_harness
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"doc_to_text": "!function planted.text"}, "names the Python function planted.text"),
        ({"class": "!function planted.Task"}, "names the Python function planted.Task"),
        ({"doc_to_text": "{{ cycler.__init__.__globals__.os.system('touch PLANTED') }}"}, "SecurityError"),
        ({"unsafe_code": True}, "runs what the model writes as a program"),
        (
            {"metric_list": [{"metric": "planted", "aggregation": "mean", "higher_is_better": True}]},
            "script from the Hub",
        ),
        ({"generation_kwargs": {"custom_generate": ".", "trust_remote_code": True}}, "sets custom_generate in"),
    ],
)
def test_no_code_of_a_task_runs_unasked(
    final: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text(
        "from pathlib import Path\nPath('PLANTED').touch()\ndef text(doc):\n    return doc['question']\nTask = text\n"
    )
    (tmp_path / "custom_generate").mkdir()
    code = (tmp_path / "planted.py").read_text() + "def generate(model, input_ids, **_):\n    return input_ids\n"
    (tmp_path / "custom_generate" / "generate.py").write_text(code)
    file = task(tmp_path, [{"question": "a", "answer": "b"}], "generate_until", **changes)
    file.write_text(file.read_text().replace("'!function planted.text'", "!function planted.text"))
    file.write_text(file.read_text().replace("'!function planted.Task'", "!function planted.Task"))
    command = [str(final), "--tasks", str(file), "--out", str(tmp_path / "out"), "--device", "cpu"]
    with pytest.raises(UserError, match=words):
        harness.main(command)
    assert not (tmp_path / "PLANTED").exists() and not (tmp_path / "out").exists()
    if words.endswith("planted.text") or "program" in words or "generate" in words:
        harness.main([*command, "--run-task-code"])
        assert (tmp_path / "PLANTED").exists() == ("program" not in words)
        assert (tmp_path / "out" / "results.json").exists()


@needs_harness
def test_no_file_of_a_user_reaches_code_of_the_harness_and_no_task_of_its_own_runs_answers(tmp_path: Path) -> None:
    """A file may set what the functions of a task of the harness work on; one of them evaluates text."""
    from lm_eval import tasks  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import _yaml_loader  # pyright: ignore[reportMissingImports]

    folder = Path(tasks.__file__).parent
    for included in ("longproc/countdown_0.5k.yaml", "humaneval/humaneval.yaml", "ifeval/ifeval.yaml"):
        fallback = "<Solution>\n__import__('os')=0\n</Solution>"
        steps = [{"function": "regex", "regex_pattern": "Z", "fallback": fallback}, {"function": "take_first"}]
        changes = {"unsafe_code": False, "include": str(folder / included)}
        changes["filter_list"] = [{"name": "none", "filter": steps}]
        file = task(tmp_path, [{"question": "a", "answer": "b"}], "generate_until", **changes)
        with pytest.raises(UserError, match=r"it includes a file of the harness that names .* --run-task-code"):
            harness.load_tasks([str(file)], code=False)
    inner = task(tmp_path, [{"question": "a", "answer": "b"}], "generate_until")
    outer = tmp_path / "outer.yaml"
    outer.write_text(f"include: {inner.name}\ntask: outer\n")  # one that holds data alone is welcome
    assert harness.load_tasks([str(outer)], code=False)[1][0].task_name == "outer"

    for name in ("longproc/countdown_0.5k", "cruxeval/cruxeval_input", "score/math/math_non_greedy"):
        found = sorted(folder.glob(f"{name}*.yaml")) or sorted((folder / name).parent.glob("*.yaml"))
        refused = pytest.raises(UserError, match="runs what the model writes")
        with compat.no_task_code(False, harness.RUN_ANSWERS), refused:
            for file in found:
                _yaml_loader.load_yaml(file)


@needs_harness
def test_the_list_of_tasks_that_run_answers_is_whole() -> None:
    from lm_eval import tasks  # pyright: ignore[reportMissingImports]

    folder, runs = Path(tasks.__file__).parent, set()
    listed = "|".join(harness.RUN_ANSWERS).replace("/", ".")
    called = re.compile(
        r"(?<![\w.])(?:eval|exec|compile|parse_expr|sympify|__import__)\(|[\"']code_eval[\"']|subprocess\.|os\.system"
        rf"|parse_expr,|Popen\(|find_spec\(|pickle\.|lm_eval\.tasks\.(?:{listed})\b"
    )
    for file in folder.rglob("*/*.py"):
        if called.search(file.read_text(encoding="utf-8")):
            runs.add(file.relative_to(folder).as_posix())
    assert len(runs) > 5
    assert {name for name in runs if not name.startswith(tuple(f"{known}/" for known in harness.RUN_ANSWERS))} == set()


def test_mistakes_are_told_in_a_paragraph(final: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*argv: str) -> str:
        with pytest.raises(UserError) as caught:
            harness.main(list(argv))
        return str(caught.value)

    found = importlib.util.find_spec
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    assert "pip install '.[harness]'" in refused(str(final), "--tasks", "gsm8k")
    assert 'harness = ["lm-eval' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: True)
    assert "There is no folder" in refused(str(tmp_path / "nothing"), "--tasks", "gsm8k")
    assert "--out is missing" in refused(str(final), "--tasks", "gsm8k")
    with pytest.raises(SystemExit):
        harness.main([str(final), "--tasks", "gsm8k", "--device", "abacus"])
    assert "--out is missing" in refused(str(final), "--tasks", "gsm8k", "--device", "mps")
    assert "--limit 0 is too small" in refused(str(final), "--tasks", "gsm8k", "--limit", "0")
    assert "add --chat-template" in refused(str(final), "--tasks", "gsm8k", "--system", "Be brief.")
    (tmp_path / "run").mkdir()
    shutil.copytree(final.parent, tmp_path / "run" / "phase3")
    (tmp_path / "run" / "results.json").write_text("{}")
    given = harness.argparse.Namespace(
        model=str(tmp_path / "run/phase3/final"), fewshot=None, limit=None, batch_size=1, system=None, out=None
    )
    assert harness.check_harness(given) == (tmp_path / "run").resolve()


@needs_harness
def test_a_group_stands_with_its_tasks(final: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are found by name; this one stands for a group of the harness itself."""
    for count, name in ((6, "one"), (2, "two")):
        items = [{"question": f"{n} + 1 = ?", "choices": CHOICES, "label": n % 3} for n in range(count)]
        (tmp_path / name).mkdir()
        task(tmp_path / name, items, "multiple_choice", task=name)
    means = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    group = {"group": "both", "task": ["one", "two"], "aggregate_metric_list": means, "metadata": {"version": 7}}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_defaults=False, include_path=tmp_path)
    loaded: Any = manager.load(["both"]).get("groups", {})["both"]
    monkeypatch.setattr(harness, "load_tasks", lambda names, code: (manager, [loaded]))
    harness.main([str(final), "--tasks", "both", "--out", str(tmp_path / "out"), "--limit", "5", "--device", "cpu"])
    found = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["phase3"]["tasks"]
    assert {name: (entry["n"], entry["of"], entry["part_of"]) for name, entry in found.items()} == {
        "both": (7, 8, None),
        "one": (5, 6, "both"),
        "two": (2, 2, "both"),
    }
    one, two, both = (figures(found[name])["acc"] for name in ("one", "two", "both"))
    assert both[0] == pytest.approx((5 * one[0] + 2 * two[0]) / 7) and both[1] > 0
    assert str(found["both"]["version"]) == "7" and found["both"]["data_set"]["path"] == "json"


@needs_harness
def test_a_task_that_is_none_is_told(final: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    with pytest.raises(UserError, match="There is no file"):
        harness.main([str(final), "--tasks", str(tmp_path / "no.yaml"), *out])
    (tmp_path / "bad.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match=r"bad\.yaml cannot be loaded"):
        harness.main([str(final), "--tasks", str(tmp_path / "bad.yaml"), *out])
    long = task(tmp_path, [{"question": "a " * 3000, "answer": "b"}], "generate_until")
    long.write_text(long.read_text().replace(f"max_gen_toks: {TOKENS}", "max_gen_toks: 4096"))
    with pytest.raises(UserError, match=r"could not be measured: AssertionError.*maximum sequence length"):
        harness.main([str(final), "--tasks", str(long), *out])
