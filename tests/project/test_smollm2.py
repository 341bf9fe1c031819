"""Do `make smollm2` and `make real` tell their scripts what they understand, and does the chain run to its report?"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_gsm8k import split
from tiny_runs import ROOT, taught, tiny_base

from envs.demos import parser
from posttrain import config
from posttrain.config.dpo import DPORun
from posttrain.config.evaluation import EvaluateRun
from posttrain.config.pairs import PairsRun
from posttrain.config.sft import SFTRun
from posttrain.config.starpo import StarPORun

SCHEMAS: dict[str, Any] = {
    "train_phase1_sft.py": SFTRun,
    "pairs": PairsRun,
    "train_phase2_dpo.py": DPORun,
    "train_phase3_starpo.py": StarPORun,
    "evaluate_model.py": EvaluateRun,
}
REPORT = "runs/smollm2/report.html"
SMALL = {  # what makes each command take seconds
    "train_phase1_sft.py": "data.decontaminate=false data.eval_rows=4 trainer.max_steps=4 trainer.bf16=false",
    "answers.yaml": "decontaminate=false sources.0.rows=6 num_generations=8 temperatures=[1.0] max_new_tokens=48"
    " min_repetition=0.01 min_length_ratio=0.1",
    "pairs.yaml": "decontaminate=false sources.0.rows=4 sources.1.rows=6 num_generations=8 temperatures=[1.0]"
    " max_new_tokens=48 min_repetition=0.01 min_length_ratio=0.1",
    "train_phase2_dpo.py": "data.eval_rows=1 trainer.max_steps=2 trainer.bf16=false",
    "train_phase3_starpo.py": "protocol.max_turns=2 rollout.groups=2 rollout.num_generations=2 trainer.max_steps=1"
    " trainer.bf16=false algorithm.minibatches=1 algorithm.filter={strategy:\\ none,\\ keep_zero:\\ true}"
    " distillation.decontaminate=false distillation.sources.0.rows=4 distillation.sources.1.rows=4"
    " distillation.batch_size=2 distillation.max_new_tokens=8 distillation.eval_rows=1 evaluation.episodes=2"
    " evaluation.final_episodes=2 evaluation.suites.math.n=2 evaluation.suites.repetition.n=2 diagnostics.every=0",
    "evaluate_model.py": "workers=1 dtype=float32 suites.math.n=3 suites.repetition.n=3 suites.envs.episodes=2"
    " suites.envs.protocol.max_turns=2 bootstrap_samples=100",
    "envs.demos": "--n 12",
}


def make(folder: Path, *options: str, report: str = REPORT, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-f", str(ROOT / "Makefile"), report, *options]
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # of `make test`: a make inside another also prints its folder
    env = {name: value for name, value in os.environ.items() if name not in outer} | env
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)


def commands(folder: Path, *options: str, report: str = REPORT) -> list[list[str]]:
    """What would be run, from the base model to the report."""
    said = make(folder, "-n", "VENV=v", *options, report=report)
    assert said.returncode == 0, said.stderr
    return [shlex.split(line) for line in said.stdout.replace("\\\n", " ").splitlines()]


def test_every_command_is_understood(tmp_path: Path):
    (tmp_path / "rows.jsonl").touch()
    given = [f"GSM8K={tmp_path / 'rows.jsonl'}", "MODEL=some/model", "CORES=3"]
    for options in ([], given):
        found = [[word for word in command if word != "v/bin/python"] for command in commands(tmp_path, *options)]
        runs = []
        for words in found:
            script = next((word for word in words if word in SCHEMAS), None)
            if "envs.demos" in words:
                parser().parse_args(words[words.index("envs.demos") + 1 :])
            elif script is not None:
                assert words[0] == f"OMP_NUM_THREADS={3 if options else 2}" or script == "evaluate_model.py"
                file = ROOT / words[words.index("--config") + 1]
                overrides = [word for word in words[words.index("--config") + 2 :] if not word.startswith("--")]
                runs.append(config.resolve(SCHEMAS[script], file, overrides))
        answers, phase1, pairs, phase2, phase3, coin, evaluation = runs
        assert answers.model == phase1.model and phase1.data.sources[2].path == f"{answers.output_dir}/best.jsonl"
        assert phase2.data.sources[0].path == f"{pairs.output_dir}/pairs.jsonl"
        assert coin.data.flip_labels and coin.data.sources == phase2.data.sources and coin.trainer == phase2.trainer
        made = [phase1.model.name_or_path, *(f"{run.output_dir}/final" for run in (phase1, coin, phase2, phase3))]
        assert list(evaluation.checkpoints.values()) == made
        told = [run.sources[0].path for run in (phase1.data, pairs, phase3.distillation)]
        asked = [run.math.sources for run in (phase3.evaluation.suites, evaluation.suites)]
        if options:
            assert phase1.model.name_or_path == "some/model" and "pip" not in str(found)
            assert told == [str(tmp_path / "rows.jsonl")] * 3
            assert asked == [[f"gsm8k_held_out={tmp_path / 'rows.jsonl'}"]] * 2
        else:
            assert phase1.model.name_or_path == "runs/smollm2/base" and "pip" in str(found)
            assert told == ["openai/gsm8k"] * 3 and asked == [["gsm8k_held_out"]] * 2


def test_what_is_finished_is_left_and_what_was_begun_goes_on(tmp_path: Path):
    for begun in ("phase1/final", "pairs"):
        (tmp_path / "runs/smollm2" / begun).mkdir(parents=True)
    (tmp_path / "runs/smollm2/answers").mkdir()
    for made in ("demos.jsonl", "answers/best.jsonl"):
        (tmp_path / "runs/smollm2" / made).touch()
    (tmp_path / "runs/smollm2/phase1/final/manifest.json").touch()
    (tmp_path / "runs/smollm2/pairs/answers.jsonl").touch()
    left = commands(tmp_path, "MODEL=some/model")
    assert [word for command in left for word in command if word in SCHEMAS] == [
        "pairs",
        "train_phase2_dpo.py",
        "train_phase3_starpo.py",
        "train_phase2_dpo.py",
        "evaluate_model.py",
    ]
    assert ["--resume" in command for command in left] == [True, False, False, False, False]


@pytest.mark.parametrize("model", [None, "models/some"])
def test_reinforcement_alone_is_evaluated_beside_the_model_it_began_with(tmp_path: Path, model: str | None):
    given = [] if model is None else [f"MODEL={model}"]
    phase3, evaluation = commands(tmp_path, *given, report="runs/real/report.html")
    assert phase3[2] == "train_phase3_starpo.py" and evaluation[2] == "evaluate_model.py"

    def resolved(schema: Any, words: list[str]) -> Any:
        return config.resolve(schema, ROOT / words[4], [word for word in words[5:] if not word.startswith("--")])

    trained, measured = resolved(StarPORun, phase3), resolved(EvaluateRun, evaluation)
    began = trained.model.name_or_path
    assert began == (model or "Qwen/Qwen2.5-0.5B-Instruct")
    assert measured.checkpoints == {"base": began, "rl": f"{trained.output_dir}/final"}
    played, *others = measured.suites.envs.envs
    assert played.model_dump() == {key: getattr(trained.envs[0], key) for key in played.model_dump()} and others
    assert measured.suites.envs.protocol.max_turns == trained.protocol.max_turns
    (tmp_path / "runs/real/neighbours").mkdir(parents=True)
    assert "--resume" not in phase3
    (tmp_path / "runs/real/neighbours/metrics.jsonl").touch()
    assert "--resume" in commands(tmp_path, *given, report="runs/real/report.html")[0]


def test_a_missing_file_of_questions_is_refused_before_hours_of_work(tmp_path: Path):
    refused = make(tmp_path, "-n", "VENV=v", "GSM8K=none.jsonl")
    assert refused.returncode == 2 and "GSM8K=none.jsonl is not a file" in refused.stderr and not refused.stdout


@pytest.mark.slow
def test_the_chain_runs_and_goes_on_where_it_was_stopped(tmp_path: Path, tiny_tokenizer: Any):
    base = tiny_base(tmp_path / "base", tiny_tokenizer)
    taught(base, tiny_tokenizer)
    rows, _ = split(tmp_path / "rows.jsonl")
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in ("configs", "envs", "posttrain"))]:
        (tmp_path / path.name).symlink_to(path)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    lines = ["#!/bin/sh", 'case "$*" in']
    lines += [f'*"{name}"*) set -- "$@" {words} ;;' for name, words in SMALL.items()]
    lines += ["esac", 'case "$*" in *"$STOP"*) exit 3 ;; esac', f'exec {sys.executable} "$@"']
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    given = (f"VENV={tmp_path / 'venv'}", f"MODEL={base}", f"GSM8K={rows}", "CORES=1")
    stopped = make(tmp_path, *given, STOP="train_phase3")
    assert stopped.returncode == 2 and "Error 3" in stopped.stderr, stopped.stderr[-3000:]
    assert (tmp_path / "runs/smollm2/phase2/final/manifest.json").exists()
    done = make(tmp_path, *given, STOP="train_phase1")  # it is not run again
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "runs/smollm2/results.json").read_text())
    assert list(results["checkpoints"]) == ["base", "phase1", "coin", "phase2", "phase3"]
    for figures in results["checkpoints"].values():
        assert set(figures) == {"math", "repetition", "envs"} and figures["math"]["gsm8k_held_out"]["n"] == 3
    assert re.search("coin", (tmp_path / REPORT).read_text())
