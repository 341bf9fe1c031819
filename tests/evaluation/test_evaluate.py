"""Is every checkpoint measured alike, and do the figures follow from what it wrote?  On tiny random models."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import psutil
import pytest
import torch
import yaml
from tiny_runs import python, unheard
from waiting import wait_until

import evaluate_model
from envs import make
from envs.episode import Episode
from envs.math_judge import MathJudge
from envs.protocol import Protocol
from posttrain import config, metrics
from posttrain.config.evaluation import EvaluateRun
from posttrain.config.shared import EnvSection, ModelSection, ProtocolSection
from posttrain.data import embedded
from posttrain.evaluation import figures, scoring, store, tasks, workers
from posttrain.evaluation.scoring import Loaded
from posttrain.evaluation.tasks import Task
from posttrain.evaluation.workers import run_tasks
from posttrain.models import loading
from posttrain.models.chat import Chat
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.rollout.episodes import new_episode
from posttrain.runtime import checkpoint, hardware
from posttrain.types import Completion, SamplingParams, Trajectory, UserError, derive_seed

ROOT = Path(__file__).parents[2]
NAMES = ("base", "same", "other")  # `same` has the weights of `base`


def tiny_model(chat: Chat, seed: int) -> ConvGPTForCausalLM:
    shape = ConvGPTConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=chat.pad_id,
        bos_token_id=None,
        eos_token_id=chat.stop_id,
    )
    torch.manual_seed(seed)
    return ConvGPTForCausalLM(shape).eval()


def saved_model(folder: Path, tiny_chat: Chat) -> Path:
    """The folder of such a model, as a phase saves it."""
    chat = copy.deepcopy(tiny_chat)
    return loading.save(folder, tiny_model(chat, 0), chat, {}, source=ModelSection(name_or_path="x"))


PAIR = {
    side: [{"role": "user", "content": "a"}, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")
}
ONE_PAIR = Task("preferences", "", "", "", None, [PAIR], [0])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Chat) -> dict[str, str]:
    folder, chat = tmp_path_factory.mktemp("checkpoints"), copy.deepcopy(tiny_chat)
    for name, seed in zip(NAMES, (0, 0, 1), strict=True):
        model = tiny_model(chat, seed)

        def write(out: Path, model: ConvGPTForCausalLM = model) -> None:
            model.save_pretrained(out)
            chat.save(out)

        checkpoint.save(folder / name, write, chat_template_sha256=chat.hash, phase="base")
    return {name: str(folder / name) for name in NAMES}


def settings(folder: Path, checkpoints: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "device": "cpu",
        "workers": 1,
        "batch_size": 8,
        "dtype": "float32",  # rows are the same in any batch, on any CPU
        "bootstrap_samples": 200,
        "checkpoints": checkpoints,
        "settings": [
            {"name": "greedy", "temperature": 0.0},
            {"name": "t05", "temperature": 0.5},
            {"name": "chat", "repetition_penalty": 1.15, "temperature": 0.7, "top_p": 0.9, "top_k": 50},
        ],
        "suites": {
            "math": {"n": 4, "n_others": 2, "max_new_tokens": 6, "headline": "t05"},
            "repetition": {"n": 4, "n_others": 3, "max_new_tokens": 12},
            "recall": {"n": 3, "max_new_tokens": 4, "settings": ["greedy"]},
            "preferences": {"n": 5, "reference": "base"},
            "envs": {
                "envs": ["frozen_lake", "sokoban"],
                "episodes": 3,
                "episodes_others": 2,
                "protocol": {"max_turns": 2},
                "max_completion_length": 5,
                "max_context": 2000,
                "settings": ["greedy", "t05"],
                "headline": "t05",
            },
        },
        **changes,
    }


def resolved(folder: Path, checkpoints: dict[str, str], **changes: Any) -> EvaluateRun:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "evaluate.yaml"
    file.write_text(yaml.safe_dump(settings(folder, checkpoints, **changes), sort_keys=False))
    return config.resolve(EvaluateRun, file)


def evaluate(folder: Path, checkpoints: dict[str, str], *flags: str, **changes: Any) -> Path:
    resolved(folder, checkpoints, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate_model.py", "--config", str(folder / "evaluate.yaml"), *flags])
        evaluate_model.main()
    return folder / "out"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str]) -> Path:
    return evaluate(tmp_path_factory.mktemp("measured"), checkpoints)


@pytest.fixture(scope="module")
def results(measured: Path) -> dict[str, Any]:
    return json.loads((measured / "results.json").read_text())


@pytest.fixture(scope="module")
def rows(measured: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (measured / "transcripts.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ end to end


def test_results_have_their_schema(results: dict[str, Any]) -> None:
    wanted = {"checkpoints", "failed", "differences", "baselines", "digests", "commit", "versions", "config", "seeds"}
    assert set(results) == wanted and results["failed"] == {}
    assert len(results["digests"]["base"]) == 64 and set(results["digests"]) == set(NAMES)
    assert list(results["checkpoints"]) == list(NAMES)
    for entry in results["checkpoints"].values():
        assert list(entry) == ["math", "repetition", "recall", "preferences", "envs"]
        assert list(entry["envs"]) == ["frozen_lake", "sokoban"]
        assert list(entry["math"]) == ["embedded"]
        sums = entry["math"]["embedded"]
        assert set(sums["parts"]) == {"unseen_questions", "unseen_operands"}
        assert {part["n"] for part in sums["parts"].values()} == {4}
        for found, n in ((sums, 8), (entry["recall"], 3), (entry["preferences"], 5)):
            assert found["n"] == n
            assert 0 <= found["low"] <= found["accuracy"] <= found["high"] <= 1
            assert (found["low"], found["high"]) == metrics.wilson(round(found["accuracy"] * n), n)
        for found in entry["envs"].values():
            assert found["episodes"] == 3
            assert 0 <= found["low"] <= found["success"] <= found["high"] <= 1
            assert {"return", "failures", "turns", "invalid_turns", "crashed", "levels"} <= set(found)
        figures = "seq_rep_4 seq_rep_4_first distinct_1 distinct_2 longest_repeat never_stops tokens low high n".split()
        assert set(figures) <= set(entry["repetition"])
        assert set(sums["settings"]) == {"greedy", "t05", "chat"}
        assert sums["setting"] == "t05" and sums["accuracy"] == sums["settings"]["t05"]["accuracy"]
        assert set(entry["envs"]["sokoban"]["settings"]) == {"greedy", "t05"}
    assert set(results["versions"]) >= {"python", "torch", "transformers", "trl"}
    assert results["config"]["suites"]["math"]["n"] == 4 and results["seeds"]["run"] == 0


def test_reward_accuracy_is_measured_against_the_reference(results: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    pairs = {name: [r for r in rows if r["suite"] == "preferences" and r["checkpoint"] == name] for name in NAMES}
    better = [new["margin"] > old["margin"] for new, old in zip(pairs["other"], pairs["base"], strict=True)]
    found = results["checkpoints"]["other"]["preferences"]
    assert found["reward_accuracy"] == sum(better) / 5 and found["reference"] == "base"
    assert "reward_accuracy" not in results["checkpoints"]["base"]["preferences"]


def test_every_generation_is_kept(rows: list[dict[str, Any]]) -> None:
    each = {"math": 2 * (4 + 2 + 2), "repetition": 4 + 3 + 3, "recall": 3, "preferences": 5, "envs": 2 * (3 + 2)}
    for name in NAMES:
        for suite, count in each.items():
            found = [row for row in rows if row["checkpoint"] == name and row["suite"] == suite]
            assert len(found) == count
            assert all("text" in row or "messages" in row or "chosen" in row for row in found)
    for row in (row for row in rows if row["suite"] == "envs"):
        assert len(row["turn_rewards"]) == len(row["turn_penalties"]) == row["turns"]
        assert (sum(row["turn_rewards"]), sum(row["turn_penalties"])) == (row["return"], row["penalties"])


def test_same_prompts_and_seeds_for_every_checkpoint(rows: list[dict[str, Any]], results: dict[str, Any]) -> None:
    by_name = {name: [row for row in rows if row["checkpoint"] == name] for name in NAMES}
    for mine, twin, other in zip(*by_name.values(), strict=True):
        assert twin | {"checkpoint": ""} == mine | {"checkpoint": ""}  # same weights, same everything
        for key in ("suite", "part", "setting", "index", "answer", "seed", "level", "chosen"):
            assert mine.get(key) == other.get(key)
        opening = 2 if mine["suite"] == "envs" else None  # system and first state
        assert mine.get("messages", [])[:opening] == other.get("messages", [])[:opening]
    assert any(
        mine.get("text") != other.get("text") for mine, other in zip(by_name["base"], by_name["other"], strict=True)
    )
    for difference in results["differences"]:
        if (difference["from"], difference["to"]) == ("base", "same"):
            assert difference["low"] <= difference["value"] == 0 <= difference["high"]


def test_differences_follow_from_the_rows(results: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    pairs = [(d["from"], d["to"]) for d in results["differences"]]
    assert list(dict.fromkeys(pairs)) == [("base", "same"), ("same", "other"), ("base", "other")]
    for difference in results["differences"]:
        assert difference["low"] <= difference["value"] <= difference["high"]
        assert difference["value"] == pytest.approx(difference["after"] - difference["before"])
    wanted = {"from": "base", "to": "other", "suite": "repetition", "setting": "t05", "metric": "equal_length"}
    (found,) = [d for d in results["differences"] if wanted.items() <= d.items()]
    ids = {
        name: [r["ids"] for r in rows if (r["checkpoint"], r["suite"], r["setting"]) == (name, "repetition", "t05")]
        for name in NAMES
    }
    cut = [(a[: min(len(a), len(b))], b[: min(len(a), len(b))]) for a, b in zip(ids["base"], ids["other"], strict=True)]
    assert found["before"] == pytest.approx(sum(metrics.seq_rep_n(a) for a, _ in cut) / 3)
    assert found["after"] == pytest.approx(sum(metrics.seq_rep_n(b) for _, b in cut) / 3)


@pytest.mark.parametrize(
    ("text", "answer", "recalled"),
    [
        ("我住在东京。", "东京", True),
        ("あなたの町は東京です。", "東京", True),
        ("당신은 서울에 삽니다.", "서울", True),
        ("คุณอยู่กรุงเทพฯ", "กรุงเทพ", True),
        ("iPhone手机", "iPhone", True),
        ("Cafe\u0301 Roma", "Caf\u00e9", True),
        ("Cafe\u0301s", "Caf\u00e9", False),
        ("Cafe\u0301", "Cafe", False),
        ("ＶＩＥＮＮＡ", "Vienna", True),
        ("STRASSE", "Straße", True),
        ("आप दिल्ली में रहते हैं।", "दिल्ली", True),
        ("दिल्ली", "दिल", False),
        ("Your city is Vienna.", " Vienna ", True),
        ("Vienna's", "Vienna", True),
        ("You live in Viennaville.", "Vienna", False),
        ("Viennaville, no, Vienna", "Vienna", True),
        ("a_Vienna", "Vienna", False),
        ("It is C++.", "C++", True),
        ("C++11", "C++", False),
        ("anything", "", False),
        ("C++, of course", "C++", True),
        ("You like teamwork.", "tea", False),
    ],
)
def test_an_answer_is_recalled_as_a_word_of_its_own(text: str, answer: str, recalled: bool) -> None:
    assert scoring.recalls(text, answer) is recalled


@pytest.mark.slow
def test_number_of_workers_changes_nothing(
    measured: Path, tmp_path: Path, checkpoints: dict[str, str], results: dict[str, Any]
) -> None:
    out = evaluate(tmp_path, checkpoints, workers=2)
    assert (out / "transcripts.jsonl").read_bytes() == (measured / "transcripts.jsonl").read_bytes()
    again = json.loads((out / "results.json").read_text())
    for key in ("checkpoints", "differences", "baselines", "seeds"):
        assert again[key] == results[key]


def test_batch_size_changes_nothing_that_is_written(
    rows: list[dict[str, Any]], tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    out = evaluate(tmp_path, {"base": checkpoints["base"]}, batch_size=3, report=False, suites={"recall": {"n": 3}})
    again = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
    before = [row for row in rows if row["checkpoint"] == "base" and row["suite"] == "recall"]
    settings_of = {"messages", "answer", "index", "part", "suite"}
    for old, new in zip(before, (row for row in again if row["setting"] == "greedy"), strict=True):
        assert {key: old[key] for key in settings_of} == {key: new[key] for key in settings_of}
        assert new["text"].startswith(old["text"]) or old["text"].startswith(new["text"])  # another budget, same start
    assert not (out / "report.html").exists()


def test_all_files_are_there(measured: Path) -> None:
    for name in ("results.json", "results.md", "transcripts.jsonl", "report.html", "plots/headline.png"):
        assert (measured / name).stat().st_size > 0
    assert not list(measured.glob("*.partial"))
    assert (measured / "results.md").read_text().startswith("# Results")


# ------------------------------------------------------------------------------------------------ before any work


def test_all_that_is_wrong_is_said_before_any_work(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    broken = Path(shutil.copytree(checkpoints["base"], tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    unsealed = shutil.copytree(broken, tmp_path / "unsealed", ignore=shutil.ignore_patterns("manifest.json"))
    wrong = {
        "base": checkpoints["base"],
        "absent": str(tmp_path / "absent" / "final"),
        "broken": str(broken),
        "unsealed": str(unsealed),
        "empty": str(tmp_path),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_model, "run_task", lambda *_: pytest.fail("work began"))
        patch.setattr(evaluate_model, "play_baselines", lambda *_: pytest.fail("work began"))
        with pytest.raises(UserError) as problem:
            evaluate(tmp_path, wrong)
    for name in ("absent", "broken", "unsealed", "empty"):
        assert f"checkpoints.{name}:" in str(problem.value)
    assert "checkpoints.base" not in str(problem.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_parser_that_is_not_there_is_said_before_any_work(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    few = {"envs": ["frozen_lake"], "episodes": 1, "protocol": {"parser": "nowhere:f"}}
    resolved(tmp_path, checkpoints, suites={"envs": few})
    done = python("evaluate_model.py", "--config", str(tmp_path / "evaluate.yaml"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "suites.envs: `protocol.parser: nowhere:f` cannot be used: there is no module nowhere" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_without_a_network_all_names_are_told_at_once(tmp_path: Path) -> None:
    unplugged = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = python("evaluate_model.py", "device=cpu", f"output_dir={tmp_path}/out", env=unplugged)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "Retrying" not in done.stderr
    assert "cannot be reached" in done.stderr and "ConvGPT-0.2B" in done.stderr and "openai/gsm8k" in done.stderr


@pytest.mark.thorough
def test_variants_of_an_environment_stand_in_one_table(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    symbols = {"player": "A", "hole": "H"}
    variants = [
        {"name": "frozen_lake", "options": {"size": 3}},
        {"name": "frozen_lake", "label": "larger", "options": {"size": 5}},
        {"name": "frozen_lake", "label": "new symbols", "options": {"observation": "grid", "symbols": symbols}},
    ]
    suite = {"envs": variants, "episodes": 2, "max_completion_length": 4, "max_context": 2000, "settings": ["greedy"]}
    out = evaluate(
        tmp_path,
        dict([*checkpoints.items()][:1]),
        suites={"envs": suite},
        settings=[{"name": "greedy", "temperature": 0.0}],
    )
    found = json.loads((out / "results.json").read_text())["checkpoints"]["base"]["envs"]
    assert set(found) == {"frozen_lake", "larger", "new symbols"}
    told = {
        row["part"]: [m["content"] for m in row["messages"]]
        for row in map(json.loads, (out / "transcripts.jsonl").open())
    }
    sides = {part: len(texts[1].partition("\n\n")[0].splitlines()) for part, texts in told.items()}
    assert sides == {"frozen_lake": 3, "larger": 5, "new symbols": 4} and "H is a hole" in told["new symbols"][0]
    page = (out / "report.html").read_text()
    assert "larger" in page and "new symbols" in page


def test_levels_repeat_only_where_an_environment_has_no_more(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    small = {"name": "frozen_lake", "options": {"size": 2}}
    cfg = resolved(tmp_path, checkpoints, suites={"envs": {"envs": [small], "episodes": 12, "settings": ["greedy"]}})
    (task,) = tasks.build_tasks(cfg)
    assert len({item["seed"] for item in task.items}) == 12
    game = make("frozen_lake", size=2)
    keys = [game.reset(seed=i["seed"], options={"split": "test"}) and game.level_key() for i in task.items]
    different = len(set(keys))
    assert different < 12 and len(set(keys[:different])) == different

    assert cfg.suites.envs
    (small_section,) = cfg.suites.envs.envs
    seeds = tasks.held_out_levels(small_section, "test", 12)
    counts = Counter(game.reset(seed=seed, options={"split": "test"}) and game.level_key() for seed in seeds).values()
    assert len(set(seeds)) == 12 and max(counts) - min(counts) <= 1, "none counts more than another"


def test_levels_are_different_and_the_first_are_those_of_a_shorter_evaluation() -> None:
    for name in ("frozen_lake", "sokoban"):
        section, game = EnvSection(name=name), make(name)
        seeds = tasks.held_out_levels(section, "test", 100)
        assert len({game.reset(seed=seed, options={"split": "test"}) and game.level_key() for seed in seeds}) == 100
        assert tasks.held_out_levels(section, "test", 30) == seeds[:30]
        assert not set(seeds) & set(tasks.held_out_levels(section, "test", 100, seed=1))
        assert tasks.held_out_levels(EnvSection(name=name, label="b", weight=2.0), "test", 100) == seeds
    sampled = [tasks.sampling_seed(env, i) for env in ("frozen_lake", "sokoban") for i in range(50)]
    assert len(set(sampled)) == 100


def test_a_level_that_cannot_be_drawn_has_a_place_and_its_episode_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from envs import base

    real, broken = base.draw_level, derive_seed(5, "frozen_lake", 2)

    def draw(env: type[base.TextEnv], config: Any, seed: int, split: str) -> Any:
        if seed == broken:
            sys.exit(0)
        return real(env, config, seed, split)

    monkeypatch.setattr(base, "draw_level", draw)
    section = EnvSection(name="frozen_lake")
    assert broken in tasks.held_out_levels(section, "test", 8, seed=5)
    episode = new_episode(section, ProtocolSection(), broken, "test")
    assert isinstance(episode, Trajectory) and episode.crashed == "SystemExit: 0"


class Costly:
    """An environment in TRL's style whose `reset` may start a container."""

    begun = 0

    def reset(self, **row: Any) -> str | None:
        Costly.begun += 1
        return None

    def get_reward(self) -> float:
        return 1.0


def test_levels_are_chosen_without_beginning_any(
    tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Hello {n}."}) + "\n" for n in range(200)))
    options = {"path": str(rows), "environment": f"{__name__}:Costly"}
    monkeypatch.setattr(Costly, "begun", 0)
    assert len(set(tasks.held_out_levels(EnvSection(name="prompts", options=options), "test", 8))) == 8
    assert Costly.begun == 0
    suites = {"envs": {"envs": [{"name": "prompts", "options": options}], "episodes": 8, "settings": ["greedy"]}}
    cfg = resolved(tmp_path, checkpoints, suites=suites)
    (task,) = tasks.build_tasks(cfg)
    assert scoring.play_baselines(cfg, task) == {} and Costly.begun == 2, "one to see that it begins, one for players"


@pytest.mark.parametrize(
    ("suites", "words"),
    [
        ({}, "no suite is set"),
        ({"envs": {"envs": [{"name": "frozen_lake", "options": {"sizes": 4}}], "episodes": 2}}, "size"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, checkpoints: dict[str, str], suites: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        evaluate(tmp_path, checkpoints, suites=suites)


def test_an_environment_that_raises_when_it_is_made_is_told_before_any_work(
    tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("no such board")

    monkeypatch.setattr("posttrain.rollout.episodes.open_env", broken)
    with pytest.raises(UserError, match="frozen_lake raised RuntimeError: no such board"):
        evaluate(tmp_path, checkpoints, suites={"envs": {"envs": [{"name": "frozen_lake"}], "episodes": 2}})


def test_a_template_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = ROOT / "configs" / "quickstart" / "evaluate.yaml"
    cfg = config.resolve(EvaluateRun, file, ["chat.template=posttrain/models/chatml.jinja"])
    task: Any = SimpleNamespace(suite="recall", part="recall")
    assert "im_start" in store.conditions(cfg, task, local=True)["chat"]


def test_results_are_never_clobbered(measured: Path, checkpoints: dict[str, str]) -> None:
    before = {path.name: path.read_bytes() for path in measured.iterdir() if path.is_file()}
    with pytest.raises(UserError, match="--overwrite"):
        evaluate(measured.parent, checkpoints)
    assert {path.name: path.read_bytes() for path in measured.iterdir() if path.is_file()} == before


def test_results_are_replaced_on_request(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("old")
    suites = {"recall": {"n": 1, "max_new_tokens": 2, "settings": ["greedy"]}}
    out = evaluate(tmp_path, checkpoints, "--overwrite", suites=suites)
    assert json.loads((out / "results.json").read_text())["checkpoints"]["base"]["recall"]["n"] == 1


@pytest.mark.thorough
def test_messages_from_the_shell(tmp_path: Path) -> None:
    command = ["evaluate_model.py", f"output_dir={tmp_path / 'out'}", "device=cpu"]
    done = python(*command, f"checkpoints={{base: {tmp_path / 'none' / 'final'}}}", "suites={recall: {n: 2}}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "checkpoints.base" in done.stderr
    code = "import sys, evaluate_model; assert not {'torch', 'transformers', 'gymnasium'} & set(sys.modules)\n"
    code += "import posttrain.evaluation.endpoint; assert 'openai' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# ------------------------------------------------------------------------- shared out, interrupted, failed


SMALL = {"recall": {"n": 2, "max_new_tokens": 2, "settings": ["greedy", "t05"]}, "preferences": {"n": 2}}


def said(cfg: Any, name: str, task: Task, tick: Any, loaded: Loaded) -> list[dict[str, Any]]:
    """Stands for `measure`: what a checkpoint of this name does."""
    if name == "raises":
        raise ZeroDivisionError("of its own")
    if name == "refuses":
        raise UserError("The weights w hold NaN or infinity.")
    if name == "full":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    tick(len(task.items))
    return [
        {"checkpoint": name, "part": task.part, "setting": task.setting, "index": i, "pid": os.getpid()}
        for i in range(len(task.items))
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_what_fails_costs_its_own_rows_alone(tmp_path: Path, checkpoints: dict[str, str], workers: int) -> None:
    broken = ["raises", "refuses", "full"] + ["dies"] * (workers > 1)
    cfg = resolved(tmp_path, {name: checkpoints["base"] for name in ["fine", *broken, "good"]}, suites=SMALL)
    cfg = cfg.model_copy(update={"workers": workers})
    asked_for = tasks.build_tasks(cfg)
    found = run_tasks(cfg, asked_for, said)
    assert set(found.failed) == set(broken)
    assert "ZeroDivisionError: of its own (test_evaluate.py, line" in found.failed["raises"]
    assert "hold NaN" in found.failed["refuses"] and "batch_size" in found.failed["full"]
    assert workers == 1 or "exit code -9" in found.failed["dies"]
    for name in ("fine", "good"):
        assert [row["index"] for row in found.of(name, asked_for)] == [0, 1] * 3


def test_finished_parts_are_kept_only_where_everything_is_the_same(
    tmp_path: Path, checkpoints: dict[str, str], tiny_chat: Chat
) -> None:
    asked: list[tuple[str, str]] = []

    def measure(cfg: Any, name: str, task: Task, *_: Any) -> list[dict[str, Any]]:
        asked.append((name, task.setting))
        return [{"index": i} for i in range(len(task.items))]

    def run(**changes: Any) -> list[tuple[str, str]]:
        asked.clear()
        cfg = resolved(
            tmp_path, {name: checkpoints[name] for name in ("base", "other")}, **{"suites": SMALL, **changes}
        )
        run_tasks(cfg, tasks.build_tasks(cfg), measure)
        return list(asked)

    every = [(name, setting) for name in ("base", "other") for setting in ("greedy", "t05", "")]
    assert run() == every
    assert run() == [] == run(batch_size=3, workers=1, bootstrap_samples=300, report=False)
    assert run(seed=1) == every  # other seeds, other prompts
    assert run(dtype="bfloat16") == every
    longer = {**SMALL, "recall": {**SMALL["recall"], "max_new_tokens": 3}}
    assert run(suites=longer) == [one for one in every if one[1]]
    cfg = resolved(tmp_path, {"base": checkpoints["base"]}, suites=SMALL)
    paths = [store.Store(cfg, tasks.build_tasks(cfg)).path(store.Unit("base", n)) for n in range(3)]
    for damage in (b"", b"{}\n", b"\xff\n\n", b"[" * 9999, b"[1]\n[2]\n"):
        paths[0].write_bytes(damage)
        assert run() == [("base", "greedy")]
    paths[0].write_bytes(paths[0].read_bytes().replace(b'"index": 1', b'"index": 2'))
    assert run() == [("base", "greedy")]
    weights = Path(checkpoints["other"])
    assert store.store_fingerprint(cfg, "base") == store.store_fingerprint(cfg, "base")
    both = resolved(tmp_path, {"base": checkpoints["base"], "other": str(weights)}, suites=SMALL)
    assert store.store_fingerprint(both, "other") != store.store_fingerprint(both, "base")
    copy_of = tmp_path / "copy"  # without a manifest: by its files
    shutil.copytree(weights, copy_of, ignore=shutil.ignore_patterns("manifest.json"))
    plain = resolved(tmp_path, {"plain": str(copy_of)}, suites=SMALL)
    before = store.store_fingerprint(plain, "plain")
    (copy_of / "config.json").write_text((copy_of / "config.json").read_text() + " ")
    assert store.store_fingerprint(plain, "plain") != before


@pytest.mark.thorough
def test_an_evaluation_that_dies_is_resumed(
    tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after some parts, refused without a flag, and resumed to the very bytes of one that never stopped."""
    whole = evaluate(tmp_path / "whole", checkpoints, suites=SMALL, report=False)
    true_run, done = evaluate_model.run_task, []

    def interrupted(cfg: Any, name: str, task: Task, *others: Any) -> list[dict[str, Any]]:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append((name, task.setting))
        return true_run(cfg, name, task, *others)

    monkeypatch.setattr(evaluate_model, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "cut", checkpoints, suites=SMALL, report=False)
    out = tmp_path / "cut" / "out"
    assert not (out / "results.json").exists() and len(list((out / "evaluation_rows").iterdir())) == 4
    with pytest.raises(UserError, match=r"unfinished evaluation: continue it .--resume."):
        evaluate(tmp_path / "cut", checkpoints, suites=SMALL, report=False)
    again: list[Any] = []
    monkeypatch.setattr(evaluate_model, "run_task", lambda *given: again.append(given[1]) or true_run(*given))
    evaluate(tmp_path / "cut", checkpoints, "--resume", suites=SMALL, report=False)
    assert len(again) == 3 * 3 - 4
    assert (out / "transcripts.jsonl").read_bytes() == (whole / "transcripts.jsonl").read_bytes()
    assert not (out / "evaluation_rows").exists()
    with pytest.raises(UserError, match=r"nothing to resume: .*results.json is complete"):
        evaluate(tmp_path / "cut", checkpoints, "--resume", suites=SMALL, report=False)


def test_a_broken_checkpoint_is_named_and_the_exit_code_tells(
    tmp_path: Path, checkpoints: dict[str, str], tiny_chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN in the weights: results.json holds the other checkpoints and no NaN; repaired, only its rows are measured."""
    model = tiny_model(tiny_chat, 5)
    with torch.no_grad():
        model.get_input_embeddings().weight[7, 3] = float("nan")  # type: ignore[index]
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    copy.deepcopy(tiny_chat).save(broken)
    names = {"base": checkpoints["base"], "broken": str(broken), "other": checkpoints["other"]}
    with pytest.raises(UserError, match=r"(?s)1 of 3 checkpoints could not be.*broken: .*not finite.*--resume"):
        evaluate(tmp_path, names, suites=SMALL)
    text = (tmp_path / "out" / "results.json").read_text()
    results = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert list(results["checkpoints"]) == ["base", "other"] and list(results["failed"]) == ["broken"]
    assert {(d["from"], d["to"]) for d in results["differences"]} == {("base", "other")}
    assert "not measured" in (tmp_path / "out" / "report.html").read_text() and "broken" in capsys.readouterr().out
    model.get_input_embeddings().weight.data.nan_to_num_(0.0)  # type: ignore[union-attr]
    model.save_pretrained(broken)
    evaluate(tmp_path, names, "--resume", suites=SMALL, report=False)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["checkpoints"]) == list(names) and results["failed"] == {}


def test_scores_that_are_not_finite_are_a_failure(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.models import forward

    def broken(_: Any, rows: Any, masks: Any) -> Any:
        return torch.full((sum(map(sum, masks)),), float("nan")), None

    monkeypatch.setattr(forward, "token_logprobs", broken)
    with pytest.raises(ValueError, match="NaN"):
        scoring.score_pairs(tiny_model(tiny_chat, 0), tiny_chat, ONE_PAIR, lambda _: None)


def test_pairs_are_scored_in_float32(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """Whatever the dtype of everything else: bfloat16 moves a sequence's log-prob as much as DPO does."""
    suites = {"recall": SMALL["recall"], "preferences": {"n": 4}}
    loaded, rows = Loaded(MathJudge()), {}
    for dtype in ("bfloat16", "float32"):
        cfg = resolved(tmp_path, checkpoints, suites=suites, dtype=dtype)
        for task in tasks.build_tasks(cfg):
            with torch.autocast("cpu", torch.bfloat16):
                found = scoring.run_task(cfg, "base", task, lambda _: None, loaded)
            assert loaded.model is not None
            assert loaded.model.dtype == (torch.float32 if task.suite == "preferences" else getattr(torch, dtype))
            rows[dtype, task.suite, task.setting] = found
    assert rows["bfloat16", "preferences", ""] == rows["float32", "preferences", ""]


def test_pairs_are_scored_in_float32_while_phase_3_computes_in_bfloat16(tiny_chat: Chat) -> None:
    model = tiny_model(tiny_chat, 0)
    plain = scoring.score_pairs(model, tiny_chat, ONE_PAIR, lambda _: None)
    with torch.autocast("cpu", torch.bfloat16):
        assert scoring.score_pairs(model, tiny_chat, ONE_PAIR, lambda _: None) == plain


@pytest.mark.thorough
def test_two_evaluators_never_share_a_folder(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    resolved(tmp_path, checkpoints, suites=SMALL)
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = python("evaluate_model.py", "--config", str(tmp_path / "evaluate.yaml"), "--overwrite")
    assert done.returncode == 2 and "Another process is writing to output_dir" in done.stderr
    assert "Traceback" not in done.stderr and [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["closed", pytest.param("unread", marks=pytest.mark.slow)])
def test_an_evaluation_that_nobody_reads_goes_on(tmp_path: Path, checkpoints: dict[str, str], how: str) -> None:
    resolved(tmp_path, checkpoints, suites=SMALL, workers=2)
    assert unheard(how, "evaluate_model.py", "--config", str(tmp_path / "evaluate.yaml")) == 0
    assert set(json.loads((tmp_path / "out" / "results.json").read_text())["checkpoints"]) == set(checkpoints)


@pytest.mark.slow
def test_every_visible_gpu_has_a_process_of_its_own(
    tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workers.visible_gpus() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5f, 6")
    assert workers.visible_gpus() == ["4", "GPU-5f", "6"]
    monkeypatch.setattr(hardware, "resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f,6")
    cfg = resolved(tmp_path, {name: checkpoints["base"] for name in "abc"}, suites=SMALL)
    asked_for = tasks.build_tasks(cfg)
    found = run_tasks(cfg, asked_for, seen)
    processes = {(row["pid"], row["gpu"]) for rows in found.rows.values() for row in rows}
    assert len(processes) == 2 and {gpu for _, gpu in processes} == {"GPU-5f", "6"}
    assert found.failed == {} and len(found.rows) == 3 * len(asked_for)


def seen(cfg: Any, name: str, task: Task, tick: Any, loaded: Loaded) -> list[dict[str, Any]]:
    row = {"pid": os.getpid(), "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
    started = Path(cfg.output_dir).parent / "started"
    started.mkdir(exist_ok=True)
    (started / row["gpu"]).touch()
    wait_until(lambda: len(list(started.iterdir())) == 2, 120)  # or one process might do it all
    assert "LOCAL_RANK" not in os.environ
    return [row for _ in task.items]


def test_ranks_share_the_units_out() -> None:
    params = SamplingParams(max_new_tokens=100)
    asked_for = [Task("math", "", str(n), "", params, [{}] * size, []) for n, size in enumerate((1300, 250, 250, 60))]
    units = [store.Unit(name, number) for name in "abcd" for number in range(len(asked_for))]
    for size in (1, 2, 3, 5, 30):
        given = workers.shares(units, asked_for, size)
        assert sorted(unit for share in given for unit in share) == sorted(units) and len(given) == size
        costs = [sum(asked_for[unit.number].cost for unit in share) for share in given]
        assert max(costs) <= sum(costs) / size + max(task.cost for task in asked_for)


def test_next_unit_stays_with_the_checkpoint_that_is_loaded() -> None:
    params = SamplingParams(max_new_tokens=10)
    asked_for = [Task("math", "", str(n), "", params, [{}] * size, []) for n, size in enumerate((9, 1))]
    waiting = [store.Unit(name, number) for name, number in (("a", 1), ("b", 0), ("b", 1))]
    assert workers.next_unit(waiting, asked_for, "a") == ("a", 1)
    assert workers.next_unit(waiting, asked_for, "a") == ("b", 0)
    assert workers.next_unit(waiting, asked_for, "b") == ("b", 1) and not waiting


@pytest.mark.slow
def test_torchrun_shares_the_work_out(measured: Path, tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """Two ranks write what one process writes, and one of them refuses for both."""
    resolved(tmp_path, checkpoints)
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "evaluate_model.py"]
    command += ["--config", str(tmp_path / "evaluate.yaml")]
    done = python(*command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "transcripts.jsonl").read_bytes() == (measured / "transcripts.jsonl").read_bytes()
    assert not (tmp_path / "out" / "evaluation_rows").exists()
    done = python(*command)
    assert done.returncode != 0 and "results.json exists" in done.stderr


def test_rows_at_a_time_follow_from_the_memory(
    tmp_path: Path, checkpoints: dict[str, str], tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = resolved(tmp_path, checkpoints, batch_size=None)
    section, loaded = scoring.section(cfg, "base"), Loaded(MathJudge())
    loaded.get(section, "cpu", None)
    needed = {}
    for free in (32, 64, 128):
        memory = SimpleNamespace(available=free << 20)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        needed[free], _ = scoring.answers_at_once(cfg, section, loaded, 1024, 64)
    assert 1 <= needed[32] < needed[64] < needed[128] <= scoring.MOST_ROWS
    loaded.processes = 2
    assert scoring.answers_at_once(cfg, section, loaded, 1024, 64) == (needed[64], False)
    assert scoring.answers_at_once(cfg, section, loaded, 64, 8) == (scoring.MOST_ROWS, False)
    few = cfg.model_copy(update={"batch_size": 2})
    assert scoring.answers_at_once(few, section, loaded, 1024, 64) == (2, False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(UserError, match="Not even one conversation of 1024 tokens"):
        scoring.answers_at_once(cfg, section, loaded, 1024, 64)


# ---------------------------------------------------------------------------------------------------------- the tasks


def test_test_sets_of_the_hub(tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {
        "openai/gsm8k": [{"question": "How many?", "answer": "6*200=<<6*200=1200>>1200\n#### 1,200"}],
        "HuggingFaceH4/ultrafeedback_binarized": list(embedded.preference_pairs(2, 0)),
        "HuggingFaceH4/MATH-500": [{"problem": "Half?", "solution": "...", "answer": "\\frac{1}{2}"}],
    }

    def fake(name: str, config: str | None, *, split: str, **_: Any) -> datasets.Dataset:
        assert split == ("test_prefs" if "ultra" in name else "test")
        return datasets.Dataset.from_list(asked[name] * 3)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    suites = {"math": {"sources": ["gsm8k", "math500"], "n": 2, "instruction": "Box it."}}
    asked_for = tasks.build_tasks(resolved(tmp_path, checkpoints, suites=suites))
    parts = [(task.part, task.setting, len(task.items)) for task in asked_for[::3]]
    assert parts == [("gsm8k", "greedy", 2), ("math500", "greedy", 2)]
    assert asked_for[0].items[0] == {"messages": [{"role": "user", "content": "How many? Box it."}], "answer": "1200"}
    assert asked_for[3].items[0]["answer"] == "\\frac{1}{2}"

    tied = asked["HuggingFaceH4/ultrafeedback_binarized"][0]
    tied["score_rejected"] = tied["score_chosen"]
    pairs = {"preferences": {"source": "ultrafeedback", "n": 5}}
    (task,) = tasks.build_tasks(resolved(tmp_path, checkpoints, suites=pairs))
    assert len(task.items) == 3 and all(set(item) == {"chosen", "rejected"} for item in task.items)

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"suites\.math\.sources"):
        tasks.build_tasks(resolved(tmp_path, checkpoints, suites=suites))


def test_local_files_of_questions(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1?", "answer": 2}\n\n{"question": "2+2?", "answer": 4}\n')
    suites = {"math": {"sources": [str(file)], "n": 9, "settings": ["greedy"]}}
    (task,) = tasks.build_tasks(resolved(tmp_path, checkpoints, suites=suites))
    assert (task.part, [item["answer"] for item in task.items]) == ("mine", ["2", "4"])
    for content, message in (
        ('{"question": "1+1?"}\n', "needs question, answer"),
        ("[1]\n", "line 1"),
        ("{\n", r"line 1 of .* is not JSON: .*, column 2\b"),
        ("", "is empty"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            tasks.build_tasks(resolved(tmp_path, checkpoints, suites=suites))
    suites["math"]["sources"] = ["gsm9k"]
    with pytest.raises(UserError, match=r"suites\.math\.sources=gsm9k is neither"):
        tasks.build_tasks(resolved(tmp_path, checkpoints, suites=suites))


def test_two_files_of_one_name_stay_apart(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    files = [tmp_path / folder / "mine.jsonl" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"question": "1+1?", "answer": 2}\n')
    suites: dict[str, Any] = {"math": {"sources": [str(file) for file in files], "n": 9, "settings": ["greedy"]}}
    asked_for = tasks.build_tasks(resolved(tmp_path, checkpoints, suites=suites))
    assert [task.source for task in asked_for] == [str(file) for file in files]
    suites["math"]["sources"] = ["embedded", "embedded"]
    with pytest.raises(UserError, match="names a source twice"):
        resolved(tmp_path, checkpoints, suites=suites)


def test_seeds_are_derived_from_the_place(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    asked_for = tasks.build_tasks(resolved(tmp_path, checkpoints))
    sampled = [task for task in asked_for if task.setting]
    seeds = [seed for task in sampled for seed in task.seeds]
    played = {task.setting: task.seeds for task in sampled if task.suite == "envs"}
    assert len({tuple(each[:2]) for each in played.values()}) == 1  # an episode is the same under every setting
    others = [seed for task in sampled if task.suite != "envs" for seed in task.seeds]
    assert len(set(others)) == len(others) and not set(others) & {seed for each in played.values() for seed in each}
    assert asked_for == tasks.build_tasks(resolved(tmp_path, checkpoints))
    other = tasks.build_tasks(resolved(tmp_path, checkpoints, seed=1))
    assert not set(seeds) & {seed for task in other for seed in task.seeds if task.setting}
    longer = resolved(
        tmp_path, checkpoints, suites={"math": {"n": 6, "n_others": 2, "max_new_tokens": 6, "headline": "t05"}}
    )
    first = next(s for s in tasks.build_tasks(longer) if s.setting == "t05")
    before = next(s for s in asked_for if (s.suite, s.setting) == ("math", "t05"))
    assert first.items[:4] == before.items and first.seeds[:4] == before.seeds


# ------------------------------------------------------------------------------------------------------ judging


@pytest.fixture
def judged(tiny_chat: Chat) -> Any:
    """judge(suite, text, answer, finished) -> the row of a model that said exactly this."""

    def judge(suite: str, text: str, answer: str = "7", finished: bool = True) -> dict[str, Any]:
        ids = tiny_chat.content_ids(text) + ([tiny_chat.stop_id] if finished else [])
        completions = [Completion(ids, [0.0] * len(ids), finished)]
        item = {"messages": [{"role": "user", "content": "?"}], "answer": answer}
        task = Task(suite, "", "", "greedy", SamplingParams(max_new_tokens=99), [item], [0])
        with MathJudge() as worker:
            (row,) = scoring.score_answers(task, completions, tiny_chat, worker, equal_length=60)
        return row

    return judge


def test_math_is_judged_by_the_last_box_and_recall_by_the_word(judged: Any) -> None:
    right = judged("math", r"\boxed{3}, no: \boxed{7.0}.")
    assert right["accuracy"] and right["boxed"] and not right["never_stops"]
    assert not judged("math", r"\boxed{7}, no: \boxed{3}.")["accuracy"]
    bare = judged("math", "It is 7.", finished=False)
    assert not bare["accuracy"] and not bare["boxed"] and bare["never_stops"]
    assert (
        judged("recall", "Your city is oslo.", "Oslo")["accuracy"] and not judged("recall", "Oslow", "Oslo")["accuracy"]
    )


def test_repetition_leaves_the_stop_token_out(judged: Any, tiny_chat: Chat) -> None:
    row = judged("repetition", "go on " * 10)
    ids = tiny_chat.content_ids("go on " * 10)
    assert row["ids"] == ids and row["tokens"] == len(ids)
    assert row["seq_rep_4"] == metrics.seq_rep_n(ids) > 0.5
    cut = judged("repetition", "go on " * 10, finished=False)
    assert cut["ids"] == ids and cut["never_stops"]


def test_pairs_are_weighed_by_the_last_answer_alone(tiny_chat: Chat) -> None:
    model = tiny_model(tiny_chat, seed=2)
    roles = ("user", "assistant", "user", "assistant")
    items = [
        {
            side: [
                {"role": role, "content": text} for role, text in zip(roles, ("one", "first", "two", last), strict=True)
            ]
            for side, last in (("chosen", words), ("rejected", "no"))
        }
        for words in ("yes", "a rather longer answer than the other ones")
    ]
    ticks: list[int] = []
    rows = scoring.score_pairs(model, tiny_chat, Task("preferences", "", "", "", None, items, [0, 0]), ticks.append)
    assert ticks == [2]
    for item, row in zip(items, rows, strict=True):
        for side in ("chosen", "rejected"):
            prompt = tiny_chat.prompt(item[side][:-1])
            answer = [*tiny_chat.content_ids(item[side][-1]["content"]), tiny_chat.stop_id]
            with torch.no_grad():
                logits_1TV = model(input_ids=torch.tensor([[*prompt, *answer]])).logits
            logprobs_TV = logits_1TV[0].log_softmax(-1)
            by_hand = sum(logprobs_TV[len(prompt) + n - 1, token].item() for n, token in enumerate(answer))
            assert row[f"{side}_logprob"] == pytest.approx(by_hand, abs=1e-4)
        assert row["accuracy"] == (row["chosen_logprob"] > row["rejected_logprob"])


def test_players_stand_beside_the_model_on_the_same_levels(
    results: dict[str, Any], tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    assert {env: players["random"]["episodes"] for env, players in results["baselines"].items()} == {
        "frozen_lake": 3,
        "sokoban": 3,
    }
    suites = {"envs": {"envs": ["frozen_lake", "sokoban"], "episodes": 60, "settings": ["greedy"]}}
    cfg = resolved(tmp_path, checkpoints, suites=suites)
    asked_for = tasks.build_tasks(cfg)
    assert cfg.suites.envs is not None
    for name, task in tasks.headline_levels(cfg, asked_for).items():
        found = scoring.play_baselines(cfg, task)
        assert {"random", "expert", "optimum"} < set(found) == set(results["baselines"][name])
        assert found["expert"]["success"] == found["optimum"]["success"] > 0.9
        assert found["random"]["high"] < found["expert"]["low"]
        assert found["random"]["episodes"] == 60
        game = make(name)
        assert (
            len({game.reset(seed=i["seed"], options={"split": "test"}) and game.level_key() for i in task.items}) == 60
        )
        # an episode through the protocol goes the same way
        protocol = Protocol.of(game, **cfg.suites.envs.protocol.arguments())
        wins = 0
        for item in task.items:
            episode = Episode(make(name), protocol, item["seed"], "test")
            while not episode.done:
                episode.step(f"<think></think><answer>{episode.env.players()['random']}</answer>")
            wins += episode.success
        assert wins / 60 == found["random"]["success"]


def test_crashed_and_failed_episodes_are_counted_apart() -> None:
    row = {"success": False, "failure": "", "return": 0.0, "turns": 2, "penalties": -0.1, "invalid_turns": 1}
    row |= {"unfinished_turns": 1, "crashed": "", "level": "a"}
    rows = [
        row,
        row | {"success": True, "return": 1.0, "level": "b"},
        row | {"failure": "hole"},
        row | {"crashed": "Boom"},
    ]
    measured = figures.env_figures(rows)
    assert measured["success"] == 0.25 and measured["episodes"] == 4 and measured["levels"] == 2
    assert measured["failures"] == {"hole": 1} and measured["crashed"] == 1
    assert measured["invalid_turns"] == 0.5 and measured["return"] == pytest.approx(1 / 3)  # crashed ones have none
    assert (measured["low"], measured["high"]) == metrics.wilson(0.5, 2)  # levels, not episodes
    before = [row | {"suite": "envs", "failed": False, "source": "", "part": "", "setting": ""} for row in rows]
    after = [row | {"success": True} for row in before]
    cfg: Any = SimpleNamespace(seed=0, bootstrap_samples=100)
    (found,) = [each for each in figures.compare(cfg, {"a": before, "b": after}) if each["metric"] == "success"]
    assert (found["before"], found["after"], found["n"]) == (0.5, 1.0, 2)
