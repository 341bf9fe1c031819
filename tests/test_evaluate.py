"""Is every checkpoint measured alike, and do the figures follow from what it wrote?  On tiny random models."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from tiny_runs import python

import evaluate_model
from envs import make
from envs.protocol import Episode, Protocol
from posttrain import checkpoint, config, embedded, metrics, rollout
from posttrain.chat import Chat
from posttrain.config import EvaluateRun
from posttrain.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.types import Completion, SamplingParams, UserError

ROOT = Path(__file__).parent.parent
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
        "report_to": "none",
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
            "worlds": {
                "worlds": ["frozen_lake", "sokoban"],
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
    wanted = {"checkpoints", "differences", "baselines", "commit", "versions", "config", "seeds"}
    assert set(results) == wanted
    assert list(results["checkpoints"]) == list(NAMES)
    for entry in results["checkpoints"].values():
        assert list(entry) == ["math", "repetition", "recall", "preferences", "worlds"]
        assert list(entry["worlds"]) == ["frozen_lake", "sokoban"]
        assert set(entry["math"]["parts"]) == {"unseen_questions", "unseen_operands"}
        assert {part["n"] for part in entry["math"]["parts"].values()} == {4}
        shares = [
            (entry["math"], "accuracy", 8),
            (entry["recall"], "accuracy", 3),
            (entry["preferences"], "accuracy", 5),
        ]
        for found, key, n in shares:
            assert found["n"] == n
            assert 0 <= found["low"] <= found[key] <= found["high"] <= 1
            assert (found["low"], found["high"]) == metrics.wilson(round(found[key] * n), n)
        for found in entry["worlds"].values():
            assert found["episodes"] == 3
            assert 0 <= found["low"] <= found["success"] <= found["high"] <= 1
            assert {"return", "failures", "turns", "invalid_turns", "crashed", "levels"} <= set(found)
        figures = {
            "seq_rep_4",
            "seq_rep_4_first",
            "distinct_1",
            "distinct_2",
            "longest_repeat",
            "never_stops",
            "tokens",
        }
        assert figures | {"low", "high", "n"} <= set(entry["repetition"])
        assert set(entry["math"]["settings"]) == {"greedy", "t05", "chat"}
        assert (
            entry["math"]["setting"] == "t05"
            and entry["math"]["accuracy"] == entry["math"]["settings"]["t05"]["accuracy"]
        )
        assert set(entry["worlds"]["sokoban"]["settings"]) == {"greedy", "t05"}
    assert set(results["versions"]) >= {"python", "torch", "transformers", "trl"}
    assert results["config"]["suites"]["math"]["n"] == 4 and results["seeds"]["run"] == 0


def test_reward_accuracy_is_measured_against_the_reference(results: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    pairs = {name: [r for r in rows if r["suite"] == "preferences" and r["checkpoint"] == name] for name in NAMES}
    better = [new["margin"] > old["margin"] for new, old in zip(pairs["other"], pairs["base"], strict=True)]
    found = results["checkpoints"]["other"]["preferences"]
    assert found["reward_accuracy"] == sum(better) / 5 and found["reference"] == "base"
    assert "reward_accuracy" not in results["checkpoints"]["base"]["preferences"]


def test_every_generation_is_kept(rows: list[dict[str, Any]]) -> None:
    each = {"math": 2 * (4 + 2 + 2), "repetition": 4 + 3 + 3, "recall": 3, "preferences": 5, "worlds": 2 * (3 + 2)}
    for name in NAMES:
        for suite, count in each.items():
            found = [row for row in rows if row["checkpoint"] == name and row["suite"] == suite]
            assert len(found) == count
            assert all("text" in row or "messages" in row or "chosen" in row for row in found)


def test_same_prompts_and_seeds_for_every_checkpoint(rows: list[dict[str, Any]], results: dict[str, Any]) -> None:
    by_name = {name: [row for row in rows if row["checkpoint"] == name] for name in NAMES}
    for mine, twin, other in zip(*by_name.values(), strict=True):
        assert twin | {"checkpoint": ""} == mine | {"checkpoint": ""}  # same weights, same everything
        for key in ("suite", "part", "setting", "index", "answer", "seed", "level", "chosen"):
            assert mine.get(key) == other.get(key)
        opening = 2 if mine["suite"] == "worlds" else None  # system and first state
        assert mine.get("messages", [])[:opening] == other.get("messages", [])[:opening]
    assert any(
        mine.get("text") != other.get("text") for mine, other in zip(by_name["base"], by_name["other"], strict=True)
    )
    for difference in results["differences"]:
        if (difference["from"], difference["to"]) == ("base", "same"):
            assert difference["value"] == difference["low"] == difference["high"] == 0


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
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(checkpoints["base"]).iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[:-100] if file.suffix == ".safetensors" else content)
    unsealed = tmp_path / "unsealed"
    unsealed.mkdir()
    for file in broken.iterdir():
        if file.name != "manifest.json":
            (unsealed / file.name).write_bytes(file.read_bytes())
    wrong = {
        "base": checkpoints["base"],
        "absent": str(tmp_path / "absent" / "final"),
        "broken": str(broken),
        "unsealed": str(unsealed),
        "empty": str(tmp_path),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_model, "measure", lambda *_: pytest.fail("work began"))
        patch.setattr(evaluate_model, "play_baselines", lambda *_: pytest.fail("work began"))
        with pytest.raises(UserError) as problem:
            evaluate(tmp_path, wrong)
    for name in ("absent", "broken", "unsealed", "empty"):
        assert f"checkpoints.{name}:" in str(problem.value)
    assert "checkpoints.base" not in str(problem.value)
    assert not (tmp_path / "out").exists()


def test_without_a_network_all_names_are_told_at_once(tmp_path: Path) -> None:
    unplugged = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = python("evaluate_model.py", "device=cpu", f"output_dir={tmp_path}/out", env=unplugged)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "Retrying" not in done.stderr
    assert "cannot be reached" in done.stderr and "ConvGPT-0.2B" in done.stderr and "openai/gsm8k" in done.stderr


def test_levels_repeat_only_where_a_world_has_no_more(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    small = {"name": "frozen_lake", "options": {"size": 2}}
    cfg = resolved(
        tmp_path, checkpoints, suites={"worlds": {"worlds": [small], "episodes": 12, "settings": ["greedy"]}}
    )
    (sitting,) = evaluate_model.set_exam(cfg)
    assert len({item["seed"] for item in sitting.items}) == 12
    game = make("frozen_lake", size=2)
    keys = [game.reset(seed=i["seed"], options={"split": "test"}) and game.level_key() for i in sitting.items]
    different = len(set(keys))
    assert different < 12 and len(set(keys[:different])) == different


def test_a_world_that_does_not_exist_is_refused(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    suites = {"worlds": {"worlds": [{"name": "frozen_lake", "options": {"sizes": 4}}], "episodes": 2}}
    with pytest.raises(UserError, match="size"):
        evaluate(tmp_path, checkpoints, suites=suites)


def test_an_empty_exam_is_refused(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    with pytest.raises(UserError, match="nothing is asked"):
        evaluate(tmp_path, checkpoints, suites={})


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


def test_messages_from_the_shell(tmp_path: Path) -> None:
    command = [sys.executable, "evaluate_model.py", f"output_dir={tmp_path / 'out'}", "device=cpu"]
    command += [f"checkpoints={{base: {tmp_path / 'none' / 'final'}}}", "suites={recall: {n: 2}}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "checkpoints.base" in done.stderr
    code = "import sys, evaluate_model; assert not {'torch', 'transformers', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_process_that_dies_is_reported(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    cfg = resolved(tmp_path, checkpoints, workers=2)
    crash = evaluate_model.Sitting("recall", "", "greedy", SamplingParams(max_new_tokens=2), [{"messages": 7}], [0])
    with pytest.raises(UserError, match="exit code 1"):
        evaluate_model.sit_in_parallel(cfg, [crash], lambda _: None)
    missing = cfg.model_copy(update={"checkpoints": {"a": str(tmp_path / "x" / "final"), "b": checkpoints["base"]}})
    with pytest.raises(UserError, match="does not exist"):
        evaluate_model.sit_in_parallel(missing, [], lambda _: None)


# ------------------------------------------------------------------------------------------------------ the exam


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
    exam = evaluate_model.set_exam(resolved(tmp_path, checkpoints, suites=suites))
    assert [(s.part, s.setting, len(s.items)) for s in exam[::3]] == [("gsm8k", "greedy", 2), ("math500", "greedy", 2)]
    assert exam[0].items[0] == {"messages": [{"role": "user", "content": "How many? Box it."}], "answer": "1200"}
    assert exam[3].items[0]["answer"] == "\\frac{1}{2}"

    tied = asked["HuggingFaceH4/ultrafeedback_binarized"][0]
    tied["score_rejected"] = tied["score_chosen"]
    pairs = {"preferences": {"source": "ultrafeedback", "n": 5}}
    (sitting,) = evaluate_model.set_exam(resolved(tmp_path, checkpoints, suites=pairs))
    assert len(sitting.items) == 3 and all(set(item) == {"chosen", "rejected"} for item in sitting.items)

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"suites\.math\.sources"):
        evaluate_model.set_exam(resolved(tmp_path, checkpoints, suites=suites))


def test_local_files_of_questions(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1?", "answer": 2}\n\n{"question": "2+2?", "answer": 4}\n')
    suites = {"math": {"sources": [str(file)], "n": 9, "settings": ["greedy"]}}
    (sitting,) = evaluate_model.set_exam(resolved(tmp_path, checkpoints, suites=suites))
    assert (sitting.part, [item["answer"] for item in sitting.items]) == ("mine", ["2", "4"])
    parquet = tmp_path / "mine.parquet"
    datasets.Dataset.from_list([{"prompt": "Tell me."}]).to_parquet(str(parquet))
    assert evaluate_model.read_rows(str(parquet), ("prompt",)) == [{"prompt": "Tell me."}]
    for content, message in (
        ('{"question": "1+1?"}\n', "expected are the columns question, answer"),
        ("[1]\n", "Row 1"),
        ("{\n", "one JSON object a line"),
        ("", "is empty"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            evaluate_model.read_rows(str(file), ("question", "answer"))
    with pytest.raises(UserError, match="neither"):
        evaluate_model.read_rows("gsm9k", ("question",))


def test_seeds_are_addressed(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    exam = evaluate_model.set_exam(resolved(tmp_path, checkpoints))
    sampled = [sitting for sitting in exam if sitting.setting]
    seeds = [seed for sitting in sampled for seed in sitting.seeds]
    assert len(set(seeds)) == len(seeds)
    assert exam == evaluate_model.set_exam(resolved(tmp_path, checkpoints))
    other = evaluate_model.set_exam(resolved(tmp_path, checkpoints, seed=1))
    assert not set(seeds) & {seed for sitting in other for seed in sitting.seeds if sitting.setting}
    longer = resolved(
        tmp_path, checkpoints, suites={"math": {"n": 6, "n_others": 2, "max_new_tokens": 6, "headline": "t05"}}
    )
    first = next(s for s in evaluate_model.set_exam(longer) if s.setting == "t05")
    before = next(s for s in exam if (s.suite, s.setting) == ("math", "t05"))
    assert first.items[:4] == before.items and first.seeds[:4] == before.seeds


# ------------------------------------------------------------------------------------------------------ judging


@pytest.fixture
def judged(tmp_path: Path, checkpoints: dict[str, str], tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> Any:
    """judge(suite, text, answer, finished) -> the row of a model that said exactly this."""
    cfg = resolved(tmp_path, checkpoints)

    def judge(suite: str, text: str, answer: str = "7", finished: bool = True) -> dict[str, Any]:
        ids = tiny_chat.content_ids(text) + ([tiny_chat.stop_id] if finished else [])
        completions = [Completion(ids, [0.0] * len(ids), finished)]
        monkeypatch.setattr(rollout, "complete", lambda *_, **__: completions)
        item = {"messages": [{"role": "user", "content": "?"}], "answer": answer}
        sitting = evaluate_model.Sitting(suite, "", "greedy", SamplingParams(max_new_tokens=99), [item], [0])
        with metrics.MathJudge() as worker:
            (row,) = evaluate_model.answer(cfg, Any, tiny_chat, sitting, worker, lambda _: None)  # type: ignore[arg-type]
        return row

    return judge


def test_math_is_judged_by_the_last_box(judged: Any) -> None:
    right = judged("math", r"\boxed{3}, no: \boxed{7.0}.")
    assert right["accuracy"] and right["boxed"] and not right["never_stops"]
    assert not judged("math", r"\boxed{7}, no: \boxed{3}.")["accuracy"]
    bare = judged("math", "It is 7.", finished=False)
    assert not bare["accuracy"] and not bare["boxed"] and bare["never_stops"]


def test_recall_wants_the_word(judged: Any) -> None:
    assert judged("recall", "Your city is oslo.", "Oslo")["accuracy"]
    assert not judged("recall", "You like teamwork.", "tea")["accuracy"]
    assert evaluate_model.recalls("C++, of course", "C++")


def test_repetition_leaves_the_stop_token_out(judged: Any, tiny_chat: Chat) -> None:
    row = judged("repetition", "go on " * 10)
    ids = tiny_chat.content_ids("go on " * 10)
    assert row["ids"] == ids and row["tokens"] == len(ids)
    assert row["seq_rep_4"] == metrics.seq_rep_n(ids) > 0.5
    cut = judged("repetition", "go on " * 10, finished=False)
    assert cut["ids"] == ids and cut["never_stops"]


def test_pairs_are_weighed_by_the_last_answer_alone(tiny_chat: Chat) -> None:
    model = tiny_model(tiny_chat, seed=2)
    start = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
    ]
    items = [
        {
            "chosen": [*start, {"role": "assistant", "content": words}],
            "rejected": [*start, {"role": "assistant", "content": "no"}],
        }
        for words in ("yes", "a rather longer answer than the other ones")
    ]
    ticks: list[int] = []
    rows = evaluate_model.weigh_pairs(
        model, tiny_chat, evaluate_model.Sitting("preferences", "", "", None, items, [0, 0]), ticks.append
    )
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
    assert {world: players["random"]["episodes"] for world, players in results["baselines"].items()} == {
        "frozen_lake": 3,
        "sokoban": 3,
    }
    suites = {"worlds": {"worlds": ["frozen_lake", "sokoban"], "episodes": 60, "settings": ["greedy"]}}
    cfg = resolved(tmp_path, checkpoints, suites=suites)
    exam = evaluate_model.set_exam(cfg)
    assert cfg.suites.worlds is not None
    for name, sitting in evaluate_model.headline_levels(cfg, exam).items():
        found = evaluate_model.play_baselines(cfg, sitting)
        assert {"random", "expert", "optimum"} < set(found) == set(results["baselines"][name])
        assert found["expert"]["success"] == found["optimum"]["success"] > 0.9
        assert found["random"]["high"] < found["expert"]["low"]
        assert found["random"]["episodes"] == 60
        game = make(name)
        assert (
            len({game.reset(seed=i["seed"], options={"split": "test"}) and game.level_key() for i in sitting.items})
            == 60
        )
        # an episode through the protocol goes the same way
        protocol = Protocol(**cfg.suites.worlds.protocol.model_dump())
        wins = 0
        for item in sitting.items:
            episode = Episode(make(name), protocol, item["seed"], "test")
            while not episode.done:
                episode.step(f"<think></think><answer>{episode.world.players()['random']}</answer>")
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
    figures = evaluate_model._world_figures(rows)
    assert figures["success"] == 0.25 and figures["episodes"] == 4 and figures["levels"] == 2
    assert figures["failures"] == {"hole": 1} and figures["crashed"] == 1
    assert figures["invalid_turns"] == 0.5 and figures["return"] == 0.25
