"""Does StarPO learn, resume exactly, run on several processes as on one, and refuse what cannot work?"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from recording import ListRecorder
from safetensors.torch import load_file, save_file
from tiny_runs import python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import envs
import train_phase3_starpo as phase3
from envs.math_judge import MathJudge
from envs.players import demonstrate
from envs.protocol import Protocol
from posttrain.config.evaluation import EvaluateRun
from posttrain.config.loading import resolve
from posttrain.config.shared import EnvSection
from posttrain.config.starpo import StarPORun
from posttrain.evaluation.figures import env_figures
from posttrain.evaluation.scoring import Loaded, run_task
from posttrain.evaluation.tasks import build_tasks
from posttrain.models import loading as models
from posttrain.models.chat import Chat
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.plan.episodes import MOST_TOKENS
from posttrain.rollout.engines.graphs import GraphSampler
from posttrain.runtime import checkpoint
from posttrain.runtime.dashboards import Dashboards
from posttrain.starpo.experience import Batch, Measured
from posttrain.starpo.learner import schedule
from posttrain.starpo.monitoring import transcripts, watch
from posttrain.starpo.monitoring.episodes import describe
from posttrain.starpo.monitoring.monitor import Monitor
from posttrain.starpo.run import Crashed, environments_of_groups, refuse_crashes
from posttrain.starpo.run_state import RunState
from posttrain.types import Segment, Trajectory, UserError

LAKE: dict[str, Any] = {"name": "frozen_lake", "options": {"size": 3, "observation": "neighbours"}}
LIMITS: dict[str, Any] = {"max_turns": 3, "max_actions": 3, "style": "compact"}  # words that a tiny model learns


def taught(folder: Path, tokenizer: PreTrainedTokenizerFast, steps: int, layers: int = 1) -> Path:
    """A tiny ConvGPT that has read flawed policies on 3x3 lakes for `steps` batches: the format, hardly any skill."""
    torch.manual_seed(0)
    protocol, options = Protocol(**LIMITS), LAKE["options"]
    mix = {"nearer": 0.35, "safe": 0.35, "random": 0.3}
    seen = [demonstrate(envs.make("frozen_lake", **options), protocol, i, "train", mix) for i in range(512)]
    words = tokenizer.train_new_from_iterator([m["content"] for messages in seen for m in messages], 600)
    chat = Chat.load(words, None)
    config = ConvGPTConfig(
        vocab_size=len(chat.tokenizer), hidden_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, intermediate_size=128, initializer_range=0.06, rope_theta=100.0,
        tie_word_embeddings=False, pad_token_id=chat.pad_id, eos_token_id=chat.stop_id, max_position_embeddings=512,
    )  # fmt: skip
    model = ConvGPTForCausalLM(config)
    rows = chat.encode_batch(seen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = [rows[(step * 4 + i) % len(rows)] for i in range(4)]
        width = max(len(row.ids) for row in batch)
        ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch])
        on = torch.tensor([row.mask + [False] * (width - len(row.ids)) for row in batch])
        model(input_ids=ids, labels=ids.masked_fill(~on, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def write(out: Path) -> None:
        model.save_pretrained(out)
        chat.save(out)

    return checkpoint.save(folder, write, phase="phase2", chat_template_sha256=chat.hash)


def settings(file: Path, player: Path, **sections: Any) -> Path:
    config: dict[str, Any] = {
        "output_dir": str(file.with_name("run")),
        "device": "cpu",
        "report_to": "none",
        "model": {"name_or_path": str(player)},
        "envs": [LAKE],
        "protocol": LIMITS,
        "rollout": {"groups": 4, "num_generations": 4, "max_completion_length": 32, "max_context": 512},
        "algorithm": {"num_iterations": 2, "minibatches": 2},
        "trainer": {"max_steps": 4, "learning_rate": 1e-3, "micro_batch_tokens": 2048, "bf16": False},
        "evaluation": {"every": 2, "episodes": 8, "final_episodes": 8, "temperature": 1.0},
        "checkpoint": {"every": 1, "keep": 9},
        "transcripts": {"every": 2},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section} if isinstance(section, dict) else section
    file.write_text(yaml.safe_dump(config))
    return file


def train(file: Path, *more: str) -> None:
    phase3.main(["--config", str(file), *more])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the clock."""
    table = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key and key != "memory"} for row in table]


@pytest.fixture(scope="module")
def whole(player: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nothing interrupted."""
    file = settings(tmp_path_factory.mktemp("whole") / "run.yaml", player)
    train(file)
    return file.with_name("run")


def test_a_run_saves_a_model_and_its_numbers(whole: Path, tiny_chat: Chat) -> None:
    meta = checkpoint.verify(whole / "final")["meta"]
    assert meta["phase"] == "phase3" and meta["chat_template_sha256"] == tiny_chat.hash
    (best,) = whole.glob(f"best-{meta['step']}")
    assert weights(best).keys() == weights(whole / "final").keys()
    assert isinstance(AutoModelForCausalLM.from_pretrained(whole / "final"), ConvGPTForCausalLM)
    table = rows(whole)
    assert [row["step"] for row in table if "rollout/reward" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in table if "evaluation/success" in row] == [0, 2, 4]
    assert sum("final/success" in row for row in table) == 1
    best = meta["step"]
    assert best in (0, 2, 4) and sum("evaluation/over_best_error" in row for row in table) == 2
    won = json.loads((whole / f"best-{best}" / "state.json").read_text())["best_won"]["frozen_lake"]
    (chosen,) = [row for row in table if row["step"] == best and "evaluation/success" in row]
    assert sum(won) / len(won) == chosen["evaluation/frozen_lake/success"] and len(won) == 8
    trained = [row for row in table if "policy/loss" in row]
    assert trained and all(row["policy/sampler_gap"] < 1e-4 for row in trained)
    episodes = [json.loads(line) for line in (whole / "transcripts.jsonl").read_text().splitlines()]
    steps = [episode["step"] for episode in episodes]
    assert steps == sorted(steps) and {step: steps.count(step) in (4, 5) for step in (2, 4)} == {2: True, 4: True}
    assert {message["role"] for message in episodes[0]["messages"]} == {"system", "user", "assistant"}
    counted = []
    for turns, texts, rewards in ((e["tokens"], said(e), e["turn_rewards"]) for e in episodes):
        assert len(turns) == len(texts) == len(rewards)
        for turn, text in zip(turns, texts, strict=True):
            assert text and "".join(turn["text"]).startswith(text), "the stop token may follow"
            assert len({len(column) for column in turn.values()}) == 1
            assert all(-50 < value <= 0 for value in turn["logprob"]) and min(turn["entropy"]) > 0
            counted += zip(turn["advantage"], turn["loss"], strict=True)
    assert all((advantage is not None) == bool(loss) for advantage, loss in counted)
    assert (whole / "alarms.jsonl").is_file()
    pictures = sorted(file.name for file in (whole / "episodes").iterdir())
    assert pictures == [f"step-{step}-{number}.gif" for step in (2, 4) for number in range(4)]


def test_a_run_with_graphs_records_no_step_twice(player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its evaluations play half as many episodes as its rollouts have, the first of them before step 1."""
    made: list[GraphSampler] = []

    def opened(model: Any, stop_ids: list[int], pad_id: int, *given: Any) -> GraphSampler:
        _, longest, _, _, conversations = given
        made.append(GraphSampler(model, stop_ids, pad_id, longest, ListRecorder(), conversations=conversations))
        return made[-1]

    monkeypatch.setattr("posttrain.rollout.episodes.open_engine", opened)
    monkeypatch.setattr("posttrain.rollout.engines.graphs.POSITIONS", 64)
    train(settings(tmp_path / "run.yaml", player, trainer={"max_steps": 2}))
    (sampler,) = made
    sizes = [size for static in sampler._static.values() for size in static.graphs]
    assert {rows for rows, _ in sizes} == {8, 16} and sampler.recorded == len(sizes)
    assert sampler._sizes() == (16, 512), "the cache that the memory plan counts"


def said(episode: dict[str, Any]) -> list[str]:
    return [message["content"] for message in episode["messages"] if message["role"] == "assistant"]


def test_samples_share_the_level_and_other_groups_do_not(player: Path, tmp_path: Path) -> None:
    from posttrain.config.shared import ModelSection
    from posttrain.models.loading import load
    from posttrain.rollout.episodes import open_sampler

    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, envs=[{"name": "frozen_lake"}]))
    model, chat = load(ModelSection(name_or_path=str(player)), device="cpu", chat_template=None)
    groups = phase3.rollout(cfg, open_sampler(model, chat), chat, 1)
    again = phase3.rollout(cfg, open_sampler(model, chat), chat, 1)
    later = phase3.rollout(cfg, open_sampler(model, chat), chat, 2)
    for group, samples in enumerate(groups):
        assert len({t.state_keys[0] for t in samples}) == 1 and len(samples) == 4
        assert [t.segments for t in samples] == [t.segments for t in again[group]]
        assert len({t.seed for t in samples}) == 4
    firsts = [samples[0].state_keys[0] for samples in groups]
    assert len(set(firsts)) > 1 and firsts != [samples[0].state_keys[0] for samples in later]


def test_figures_of_tokens_are_those_of_the_update(player: Path, tmp_path: Path) -> None:
    """Of two groups one is filtered out; of the other, one episode was cut and is masked."""
    from posttrain.config.shared import ModelSection
    from posttrain.models.loading import load
    from posttrain.rollout.episodes import open_sampler
    from posttrain.starpo.monitoring.token_figures import token_figures
    from posttrain.starpo.run import make_learner

    file = settings(tmp_path / "run.yaml", player, rollout={"groups": 2}, algorithm={"minibatches": 1})
    cfg = resolve(StarPORun, file, ["algorithm.filter={strategy: top_k_abs, value: 1}"])
    model, chat = load(ModelSection(name_or_path=str(player)), device="cpu", chat_template=None)
    learner = make_learner(cfg, model, chat)
    groups = phase3.rollout(cfg, open_sampler(model, chat), chat, 1)
    groups[1][0].turn_rewards[-1] += 1.0  # a difference to learn from, in this group alone
    groups[1][1].truncated = True
    scored = phase3.score_and_filter(cfg, groups)
    assert scored.kept == [1]
    scored.trains[1][1] = False
    experience = phase3.collect(cfg, learner, groups, scored)
    episodes = [t for group in groups for t in group]
    found = token_figures(learner, chat, episodes, experience)
    for number, (t, turns) in enumerate(zip(episodes, found, strict=True)):
        flat = {key: [value for turn in turns for value in turn[key]] for key in turns[0]}
        assert flat["logprob"] == pytest.approx(t.sampled_logprobs, abs=1e-4)
        mean = learner.mean_entropies([t]).item()
        assert sum(flat["entropy"]) / t.tokens == pytest.approx(mean, abs=1e-3)
        assert set(flat["loss"]) == {int(number in (4, 6, 7))}
    advantages = [value for turns in found[4:] for turn in turns for value in turn["advantage"]]
    assert advantages == pytest.approx(experience.advantages_S.tolist(), abs=1e-4)
    assert {value for turns in found[:4] for turn in turns for value in turn["advantage"]} == {None}
    without = token_figures(learner, chat, episodes[:1], None)
    assert {value for turn in without[0] for value in turn["advantage"]} == {None}


def test_resuming_changes_nothing(whole: Path, player: Path, tmp_path: Path) -> None:
    """Cut off at a checkpoint, the rest of the run is the same to the last bit: weights, optimizer, numbers."""
    file = settings(tmp_path / "run.yaml", player)
    run = tmp_path / "run"
    run.mkdir()
    for cut in (1, 3):
        subprocess.run(["cp", "-r", *map(str, whole.glob("*")), str(run)], check=True)
        for later in [f"checkpoint-{step}" for step in range(cut + 1, 5)] + ["final"]:
            subprocess.run(["rm", "-r", str(run / later)], check=True)
        train(file, "--resume")
        for name, tensor in weights(whole / "checkpoint-4").items():
            assert torch.equal(tensor, weights(run / "checkpoint-4")[name]), name
        moments = [torch.load(r / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"] for r in (whole, run)]
        for index, state in moments[0].items():
            assert all(torch.equal(value, moments[1][index][key]) for key, value in state.items())
        assert rows(run) == rows(whole)
        for log in ("transcripts.jsonl", "alarms.jsonl"):
            assert (run / log).read_bytes() == (whole / log).read_bytes()
        subprocess.run(["rm", "-r", *map(str, run.glob("*"))], check=True)


@pytest.mark.thorough
def test_compiled_layers_update_as_the_layers_do_and_resume_in_another_process(
    whole: Path, player: Path, tmp_path: Path
) -> None:
    file = settings(tmp_path / "run.yaml", player, trainer={"max_steps": 2, "torch_compile": True})
    run, again = tmp_path / "run", tmp_path / "again"
    train(file)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    norms = [next(row["policy/grad_norm"] for row in rows(each) if "policy/grad_norm" in row) for each in (run, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoint-2")
    shutil.rmtree(again / "final")
    command = ["train_phase3_starpo.py", "--config", str(file), f"output_dir={again}", "--resume"]
    subprocess.run([sys.executable, *command], check=True, cwd=Path(__file__).parents[2])
    for name, tensor in weights(run / "checkpoint-2").items():
        assert torch.equal(tensor, weights(again / "checkpoint-2")[name]), name


def test_a_resumed_run_keeps_what_the_plan_chose(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In other micro-batches sums would round otherwise, and the machine may have less memory by now."""
    file = settings(tmp_path / "run.yaml", player, trainer={"max_steps": 1, "micro_batch_tokens": None})
    train(file)
    began = capsys.readouterr()
    chosen = "memory as planned, GiB (16 conversations at a time, micro-batches of 2048 tokens)"
    assert chosen in began.err and re.search(r"Memory: at most [\d.]+ GiB; planned [\d.]+ GiB", began.out)
    state = json.loads((tmp_path / "run" / "checkpoint-1" / "state.json").read_text())
    assert state["plan"] == {
        "rollout.slots": 16,
        "trainer.micro_batch_tokens": 2048,
        "trainer.gradient_checkpointing": False,
        "rollout.cuda_graphs": False,
    }
    assert yaml.safe_load((tmp_path / "run" / "run_config.yaml").read_text())["rollout"]["slots"] is None
    monkeypatch.setitem(MOST_TOKENS, "cpu", 600)
    subprocess.run(["rm", "-r", str(tmp_path / "run" / "final")], check=True)
    train(file, "--resume")
    assert chosen in capsys.readouterr().err


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = settings(tmp_path / "run.yaml", player)
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000, total=10_000))
        patch.setattr(models, "load", lambda *args, **kwargs: pytest.fail("the model is loaded"))
        with pytest.raises(UserError, match="does not fit"):
            train(file)
    checkpoint.in_use(tmp_path / "run", resume=False)  # nothing is there that another try would overwrite


@pytest.mark.slow
def test_a_run_cut_before_its_first_checkpoint_begins_anew(player: Path, tmp_path: Path) -> None:
    """What it had called its best is of no run any more, and must not outlive the best of this one."""
    changes = {"trainer": {"learning_rate": 1e-12}, "checkpoint": {"every": 4}}
    file = settings(tmp_path / "run.yaml", player, **changes)
    train(file)
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(run / "best-0"), str(run / "best-3")], check=True)
    subprocess.run(["rm", "-r", str(run / "checkpoint-4"), str(run / "final")], check=True)
    train(file, "--resume")
    assert checkpoint.verify(run / "final")["meta"]["step"] == 0
    assert [folder.name for folder in run.glob("best-*")] == ["best-0"]


def begun_again(whole: Path, run: Path, *without: str) -> Path:
    """A copy of a finished run from which some folders are gone."""
    shutil.copytree(whole, run)
    for name in ("final", *without):
        shutil.rmtree(run / name)
    return run


def test_a_damaged_best_is_found_when_the_run_is_resumed(
    whole: Path, player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that knows another best is taken instead; where none does, the newest one stands in for it."""
    file, run = settings(tmp_path / "run.yaml", player), begun_again(whole, tmp_path / "run")
    known = {n: json.loads((run / f"checkpoint-{n}" / "state.json").read_text())["best_step"] for n in range(1, 5)}
    damaged = run / f"best-{known[4]}" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"\x00" * 9)
    train(file, "--resume")
    told = capsys.readouterr().err
    older = [n for n in known if known[n] != known[4]]
    assert f"Skipped checkpoint-4: {damaged.parent} is damaged" in told
    assert f"Resuming from {run / f'checkpoint-{max(older, default=4)}'}." in told
    assert ("stands in for it" in told) == (not older)
    checkpoint.verify(run / "final")
    assert (rows(run) == rows(whole)) or not older

    shutil.rmtree(run / "final")
    for folder in run.glob("best-*"):
        (folder / "config.json").write_text("{}")
    train(file, "--resume")
    assert "best-4 stands in" not in (told := capsys.readouterr().err) and "stands in for it until" in told
    assert checkpoint.verify(run / "final")["meta"]["step"] == 4
    stand_in = json.loads((run / "best-4" / "state.json").read_text())
    assert stand_in["best_success"] == -1.0 and stand_in["best_won"] == {}  # any evaluation is better


def test_what_else_lies_in_a_run_is_left_alone(whole: Path, player: Path, tmp_path: Path) -> None:
    """Somebody's copies of checkpoints, and weights that no manifest names: neither read nor removed."""
    file, run = settings(tmp_path / "run.yaml", player), begun_again(whole, tmp_path / "run", "checkpoint-4")
    for copied in ("checkpoint-old", "best-old", "checkpoint-99-copy"):
        shutil.copytree(run / "checkpoint-3", run / copied)
    extra = {name: torch.zeros_like(tensor) for name, tensor in weights(run / "checkpoint-3").items()}
    for folder in run.glob("*-[0-9]"):
        save_file(extra, folder / "model_zz.safetensors")
    train(file, "--resume")
    assert rows(run) == rows(whole)
    for name, tensor in weights(whole / "final").items():
        assert torch.equal(tensor, weights(run / "final")[name]), name
    assert all((run / name).is_dir() for name in ("checkpoint-old", "best-old", "checkpoint-99-copy"))


def test_a_link_named_like_a_later_checkpoint_is_removed_and_not_followed(tmp_path: Path) -> None:
    from posttrain.starpo import run_state

    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-9").symlink_to(kept)
    run_state.drop_later(tmp_path / "run", 3)
    assert kept.is_dir() and not (tmp_path / "run" / "checkpoint-9").is_symlink()


def test_a_signal_in_the_closing_evaluation_stops_it_and_resume_closes_the_run(
    whole: Path, player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = settings(tmp_path / "run.yaml", player), begun_again(whole, tmp_path / "run")
    evaluate = phase3.evaluate

    def interrupted(*given: Any, **named: Any) -> phase3.Evaluation:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(phase3, "evaluate", interrupted)
        with pytest.raises(SystemExit) as left:
            train(file, "--resume")
    assert left.value.code == 143 and not (run / "final").exists()
    assert "Stopped in the closing evaluation. Continue with the same command and --resume." in capsys.readouterr().err
    train(file, "--resume")
    assert rows(run) == rows(whole)
    checkpoint.verify(run / "final")


def test_damaged_logs_are_said_before_any_work(
    whole: Path, player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = settings(tmp_path / "run.yaml", player), begun_again(whole, tmp_path / "run")
    monkeypatch.setattr(phase3, "evaluate", lambda *args, **kwargs: pytest.fail("work has begun"))
    for name, damage, words in (
        ("metrics.jsonl", b"\x00" * 512, "metrics.jsonl is damaged in line 1"),
        ("transcripts.jsonl", b'{"step": 2, "env": "\xff"}', "transcripts.jsonl is damaged in line 1"),
        ("run_config.yaml", b"\x00\x01: [", "run_config.yaml, which holds the settings of the run"),
    ):
        kept = (run / name).read_bytes()
        (run / name).write_bytes(damage + b"\n" + kept)
        with pytest.raises(UserError, match=words):
            train(file, "--resume")
        assert (run / name).read_bytes() == damage + b"\n" + kept
        (run / name).write_bytes(kept)


@pytest.mark.thorough
def test_a_signal_leaves_a_checkpoint_to_resume_from(player: Path, tmp_path: Path) -> None:
    file = settings(tmp_path / "run.yaml", player, trainer={"max_steps": 500}, checkpoint={"every": 400})
    program = """
import os, signal, sys
import train_phase3_starpo as phase3

rollout = phase3.rollout
def played(cfg, engine, chat, step, *more):
    if step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return rollout(cfg, engine, chat, step, *more)

phase3.rollout = played
phase3.main(sys.argv[1:])
"""
    assert python("-c", program, "--config", str(file)).returncode == 143
    assert checkpoint.latest_good(tmp_path / "run") is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"tuning": "lora", "lora": {"r": 4, "alpha": 8}}},
        {
            "algorithm": {"advantage": "bilevel_gae", "filter": {"strategy": "top_k", "value": 0.5}},
            "rollout": {"context": "last_k", "context_turns": 2},
        },
        {
            "algorithm": {
                "advantage": "gigpo",
                "loss_type": "gspo",
                "aggregation": "sequence_mean",
                "epsilon": 0.02,
                "epsilon_high": 0.03,
            },
            "rollout": {"max_context": 160},
        },
    ],
    ids=["full", "lora", "critic and windows", "episodes and overflow"],
)
def test_two_processes_are_one(player: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    file = settings(tmp_path / "run.yaml", player, **changes)
    train(file, f"output_dir={tmp_path / 'one'}")
    done = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "train_phase3_starpo.py", "--config", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stderr
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "run"), strict=True):
        assert one["step"] == two["step"]
        for key in ("rollout/reward", "rollout/kept_groups", "rollout/tokens", "evaluation/success"):
            assert one.get(key) == two.get(key), (one["step"], key)
    for name, tensor in weights(tmp_path / "one" / "final").items():
        apart = (tensor - weights(tmp_path / "run" / "final")[name]).abs()
        # Adam divides by a gradient's own size: where it is next to nothing, rounding shows
        assert apart.max() < 1e-4 and (apart > 1e-5).float().mean() < 1e-3, name


def trajectory(
    reward: float, tokens: int = 3, crashed: str = "", truncated: bool = False, penalty: float = 0.0, turns: int = 1
) -> Trajectory:
    """An episode of one segment a turn, `tokens` sampled in each, all of the reward and penalty in the last."""
    mask = [False] * 2 + [True] * tokens
    before = [0.0] * (turns - 1)
    return Trajectory(
        segments=[
            Segment([5] * len(mask), list(mask), [0.0] * len(mask), turn, [turn], [2], [len(mask)])
            for turn in range(turns)
        ],
        turn_rewards=[*before, reward], turn_penalties=[*before, penalty], crashed=crashed, truncated=truncated,
        env="frozen_lake",
    )  # fmt: skip


def test_scoring_uses_raw_rewards_and_leaves_crashed_environments_out(player: Path, tmp_path: Path) -> None:
    file = settings(tmp_path / "run.yaml", player, algorithm={"filter": {"strategy": "top_k", "value": 0.5}})
    cfg = resolve(StarPORun, file)
    groups = [
        [trajectory(1.0), trajectory(0.0), trajectory(0.0, crashed="ValueError: no"), trajectory(1.0)],
        [trajectory(0.2), trajectory(0.2), trajectory(0.2), trajectory(0.2)],
        [trajectory(10.0), trajectory(0.0), trajectory(5.0, truncated=True), trajectory(5.0)],
    ]
    scored = phase3.score_and_filter(cfg, groups)
    assert scored.kept == [2]  # half of three groups is one: the largest std of raw rewards
    assert scored.trains[0] == [True, True, False, True] and scored.trains[2] == [True] * 4
    assert scored.std[0] == pytest.approx(3**-0.5)  # of 1, 0 and 1
    assert describe(groups, scored.std, scored.kept)["rollout/crashed"] == 1
    masked = resolve(StarPORun, file, ["algorithm.mask_truncated_completions=true"])
    assert phase3.score_and_filter(masked, groups).trains[2] == [True, True, False, True]


def test_an_episode_counts_once_in_however_many_contexts_it_was_sampled(player: Path, tmp_path: Path) -> None:
    """Statistics are of episodes, and penalties are in them; a row per turn must not multiply anything."""
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player))
    groups = [[trajectory(1.0, turns=3), trajectory(0.0), trajectory(0.0, penalty=-0.5), trajectory(0.0, penalty=-0.5)]]
    scored = phase3.score_and_filter(cfg, groups)
    std = (4 / 3 * (1 + 0 + 0.5) / 4) ** 0.5
    rewards = [1.0, 0.0, -0.5, -0.5]
    assert scored.std == pytest.approx([std])
    batch = Batch.of(groups[0])
    everything = torch.ones(4, dtype=torch.bool)
    value_S, _ = phase3.advantages(cfg, batch, Measured(None, None), [1.0], everything)
    assert batch.episode_S.bincount().tolist() == [9, 3, 3, 3]
    assert value_S[[0, 9, 12, 15]].tolist() == pytest.approx([r / (std + 1e-4) for r in rewards])
    told = describe(groups, scored.std, scored.kept)
    assert told["rollout/reward"] == 0.0 and told["rollout/turns"] == 1.5 and told["rollout/context_tokens"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("context", [{"context": "last_k", "context_turns": 2}, {"max_context": 160}])
def test_resuming_changes_nothing_in_contexts_of_several_segments(
    player: Path, tmp_path: Path, context: dict[str, Any]
) -> None:
    """With a forced tag: the same weights and numbers."""
    changes: dict[str, Any] = {
        "rollout": {**context, "max_completion_length": 24},
        "protocol": {"force_think": True},
        "checkpoint": {"every": 2},
    }
    straight, broken = tmp_path / "a", tmp_path / "b"
    train(settings(tmp_path / "a.yaml", player, output_dir=str(straight), **changes))
    file = settings(tmp_path / "b.yaml", player, output_dir=str(broken), **changes)
    subprocess.run(["cp", "-r", str(straight), str(broken)], check=True)
    subprocess.run(["rm", "-r", str(broken / "checkpoint-4"), str(broken / "final")], check=True)
    train(file, "--resume")
    assert rows(broken) == rows(straight)
    assert (broken / "transcripts.jsonl").read_bytes() == (straight / "transcripts.jsonl").read_bytes()
    for episode in map(json.loads, (straight / "transcripts.jsonl").open()):
        for turn, text in zip(episode["tokens"], said(episode), strict=True):
            assert "".join(turn["text"]).startswith(text), "the tag is part of what was said"
            forced = [value is None for value in turn["logprob"]]
            assert forced[0] and forced == sorted(forced, reverse=True) and not forced[-1]
            assert all(not loss for loss, tag in zip(turn["loss"], forced, strict=True) if tag)
    for name, tensor in weights(straight / "checkpoint-4").items():
        assert torch.equal(tensor, weights(broken / "checkpoint-4")[name]), name
    table = [row for row in rows(straight) if "rollout/reward" in row]
    assert len(table) == 4 and all(row["policy/sampler_gap"] < 1e-4 for row in table if "policy/loss" in row)


def test_all_evaluations_agree_on_the_same_weights(whole: Path, tmp_path: Path) -> None:
    """The closing one of phase 3, its card, and evaluate_model.py: level by level, at temperature 1."""
    suite = {
        "envs": [LAKE], "episodes": 8, "protocol": LIMITS, "settings": ["sampled"],
        "max_completion_length": 32, "max_context": 512,
    }  # fmt: skip
    given = {
        "output_dir": str(tmp_path / "out"), "device": "cpu", "dtype": "float32", "workers": 1,
        "checkpoints": {"final": str(whole / "final"), "start": str(whole / "best-0")},
        "settings": [{"name": "sampled", "temperature": 1.0}], "suites": {"envs": suite},
    }  # fmt: skip
    found, loaded = {}, Loaded(MathJudge())
    for split, name in (("test", "final"), ("validation", "start")):
        suite["split"] = split
        (tmp_path / "evaluate.yaml").write_text(yaml.safe_dump(given))
        cfg = resolve(EvaluateRun, tmp_path / "evaluate.yaml")
        (task,) = build_tasks(cfg)
        found[split] = env_figures(run_task(cfg, name, task, lambda count: None, loaded))
    (closing,) = [row for row in rows(whole) if "final/success" in row]
    measured = found["test"]
    for key in ("success", "low", "high", "levels", "turns"):
        assert measured[key] == closing[f"final/frozen_lake/{key}"], key
    assert measured["episodes"] == 8 and 0 < measured["success"] < 1, "else it says little"
    record = checkpoint.read_manifest(whole / "final")["meta"]["history"][-1]
    card = next(result for result in record["results"] if result["name"].startswith("frozen_lake, test levels"))
    assert [card[key] for key in ("value", "low", "high", "items")] == [
        measured[key] for key in ("success", "low", "high", "levels")
    ]
    first = next(row for row in rows(whole) if "evaluation/success" in row)
    assert found["validation"]["success"] == first["evaluation/frozen_lake/success"]


@pytest.mark.thorough
def test_an_environment_that_raises_is_told_and_the_run_goes_on(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from envs.frozen_lake import FrozenLake

    original, count = FrozenLake.step, iter(range(10**9))

    def fragile(self: FrozenLake, action: str) -> Any:
        if next(count) % 4 == 3:
            raise RuntimeError("thin ice")
        return original(self, action)

    monkeypatch.setattr(FrozenLake, "step", fragile)
    train(settings(tmp_path / "run.yaml", player, trainer={"max_steps": 3}, transcripts={"every": 99}))
    table = [row for row in rows(tmp_path / "run") if "rollout/reward" in row]
    assert [row["step"] for row in table] == [1, 2, 3] and all(row["rollout/crashed"] > 2 for row in table)
    assert any("policy/loss" in row for row in table)
    episodes = [json.loads(line) for line in (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()]
    episodes = [episode for episode in episodes if episode["crashed"]]  # the others are of a group that was cut
    counts = [sum(episode["step"] == row["step"] for episode in episodes) for row in table]
    assert counts == [min(transcripts.COUNT, row["rollout/crashed"]) for row in table]
    assert all(episode["crashed"] == "RuntimeError: thin ice" for episode in episodes)
    shown = capsys.readouterr()
    told = shown.err
    assert re.search(r"of \d+ episodes, [1-9]\d* of which raised", shown.out)
    for episode in episodes:  # level seed, noise seed and actions are enough to play it again
        again = envs.make(episode["env"], size=3)
        again.reset(seed=episode["level_seed"], options={"split": "train", "noise_seed": episode["noise_seed"]})
        assert again.level_key() == episode["level_key"]
    assert all(f"step {row['step']}: {row['rollout/crashed']} of 16 episodes crashed" in told for row in table)
    for first in {episode["step"]: episode for episode in episodes[::-1]}.values():
        assert f"frozen_lake raised RuntimeError: thin ice (level seed {first['level_seed']})" in told


@pytest.mark.parametrize("error", [RuntimeError("thin ice"), SystemExit(0)])
def test_an_environment_that_always_raises_ends_the_run_before_anything_is_trained(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Any
) -> None:
    def broken(self: Any, action: str) -> Any:
        raise error

    monkeypatch.setattr("envs.frozen_lake.FrozenLake.step", broken)
    words = rf"frozen_lake has crashed in every episode .*{type(error).__name__}: .*env check frozen_lake"
    with pytest.raises(UserError, match=words):
        train(settings(tmp_path / "run.yaml", player))
    assert not (tmp_path / "run" / "final").exists() and rows(tmp_path / "run") == []
    assert "levels" not in capsys.readouterr().err.replace("held-out levels", ""), "they are not what is wrong"


@pytest.mark.thorough
def test_an_environment_that_raises_from_then_on_ends_the_run_with_a_checkpoint(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was trained in two steps; the same command goes on after the last one, once the environment is mended."""
    from envs.frozen_lake import FrozenLake

    real, real_rollout, broken = FrozenLake.step, phase3.rollout, [2]

    def step(self: FrozenLake, action: str) -> Any:
        if broken[-1] == 0:
            sys.exit(0)
        return real(self, action)

    def rollout(*given: Any, **named: Any) -> Any:
        played = real_rollout(*given, **named)
        broken[-1] -= broken[-1] > 0
        return played

    monkeypatch.setattr(FrozenLake, "step", step)
    monkeypatch.setattr(phase3, "rollout", rollout)
    changes = {"trainer": {"max_steps": 7}, "algorithm": {"max_empty_steps": 3}, "checkpoint": {"every": 99}}
    file = settings(tmp_path / "run.yaml", player, evaluation={"every": 99}, **changes)
    with pytest.raises(UserError, match=r"in every episode of 3 steps.*SystemExit: 0 .*--resume goes on after step 4"):
        train(file)
    run = tmp_path / "run"
    assert not (run / "final").exists() and checkpoint.read_manifest(run / "checkpoint-4")["meta"]["step"] == 4
    said = capsys.readouterr().err
    assert "ALARM" not in said and "too hard" not in said
    broken.append(99)
    train(file, "--resume")
    assert (run / "final").exists()
    assert [row["step"] for row in rows(run) if "rollout/reward" in row] == [1, 2, 3, 4, 5, 6, 7]


def test_one_environment_of_two_that_always_raises_is_named(player: Path, tmp_path: Path) -> None:
    envs = [LAKE, {"name": "sokoban", "label": "boxes"}]
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, envs=envs, algorithm={"max_empty_steps": 2}))
    state, never = RunState(), trajectory(0.0)

    def group(env: str, *episodes: Trajectory) -> list[Trajectory]:
        return [dataclasses.replace(t, env=env) for t in episodes]

    well, ill = dataclasses.replace(never, actions=["Up"]), trajectory(0.0, crashed="OSError: no")
    for boxes in ((ill, ill), (well, ill), (ill, never), (never, never)):  # the last says nothing of the environment
        refuse_crashes(cfg, state, [group("frozen_lake", well, ill), group("boxes", *boxes)])
    with pytest.raises(UserError, match=r"boxes has crashed in every episode of 2 steps.*env check sokoban"):
        refuse_crashes(cfg, state, [group("frozen_lake", well, ill), group("boxes", ill, ill)])
    assert state.crashed_steps == {}, "a resumed run counts anew"


def test_a_check_that_cannot_show_a_crash_is_not_named() -> None:
    """It has no tools and starts no program, so it gives reward functions other completions, or none."""
    told = [
        str(Crashed(EnvSection.model_validate({"name": "prompts", **more}), "of 3 steps", "ValueError: no"))
        for more in ({}, {"tools": ["examples.own_tool:calculate"]}, {"options": {"agent": ["python"]}})
    ]
    assert "`posttrain env check prompts` plays it" in told[0]
    assert all(each.endswith("the last time with ValueError: no. Correct the reward function.") for each in told[1:])


def test_a_step_in_which_every_environment_crashed_teaches_nothing(player: Path, tmp_path: Path) -> None:
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player))
    groups = [[trajectory(0.0, crashed="ValueError: no")] * 2] * 2
    scored = phase3.score_and_filter(cfg, groups)
    assert scored.kept == [] and scored.trains == [[False, False]] * 2
    row = describe(groups, scored.std, scored.kept)
    assert row["rollout/crashed"] == 4 and "rollout/frozen_lake/in_group_std" not in row  # it would read as a collapse
    never_begun = [[Trajectory(env="frozen_lake", crashed="OSError: no")] * 2] * 2
    assert describe(never_begun, scored.std, scored.kept)["rollout/turns"] == 0


def test_an_episode_is_written_once_whatever_the_reasons(player: Path, tmp_path: Path) -> None:
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, transcripts={"every": 1}))
    groups = [[trajectory(0.0, crashed="ValueError: no"), trajectory(1.0)], [trajectory(0.0, crashed="ValueError: no")]]
    written = transcripts.written_episodes(cfg, groups, 1)
    assert [id(each) for each in written] == [id(each) for group in groups for each in group]


@pytest.mark.parametrize("masked", [False, True])
def test_a_group_that_nobody_finished_is_told(
    player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], masked: bool
) -> None:
    cut = [trajectory(1.0, truncated=True), trajectory(0.0, truncated=True)]
    cut[0].level_seed = 77
    changes = {"transcripts": {"every": 2}, "algorithm": {"mask_truncated_completions": masked}}
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, **changes))
    state = RunState()
    cfg = cfg.model_copy(update={"output_dir": str(tmp_path)})
    for step in (1, 2, 3):
        groups = [[trajectory(1.0), trajectory(0.0, truncated=True)], cut]
        transcripts.record_step(cfg, groups, step, state, Dashboards([], tmp_path), print)
        assert state.unfinished_reported
    told = [line for line in capsys.readouterr().out.splitlines() if "no episode was finished" in line]
    assert [line.split(":")[0] for line in told] == ["step 1"], "once"
    assert "in 1 of 2 groups" in told[0] and "frozen_lake (level seed 77)" in told[0]
    trained = "These groups are trained on if their rewards differ; algorithm.mask_truncated_completions leaves such"
    left_out = "These groups are not trained on: algorithm.mask_truncated_completions leaves such"
    assert (trained in told[0], left_out in told[0]) == (not masked, masked)
    episodes = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines()]
    cut_short = [(episode["step"], episode["level_seed"]) for episode in episodes if episode["level_seed"]]
    assert cut_short == [(1, 77), (2, 77)]


def test_a_run_in_which_all_is_won_is_over(player: Path, tmp_path: Path) -> None:
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, algorithm={"max_empty_steps": 3}))
    assert watch.solved(cfg, RunState(empty_steps=3), 0.97)
    assert not watch.solved(cfg, RunState(empty_steps=2), 0.97)
    assert not watch.solved(cfg, RunState(empty_steps=3), 0.5), "that is an alarm"


def test_a_loss_that_is_called_success_is_none(player: Path, tmp_path: Path) -> None:
    lost = trajectory(0.0)
    lost.failure = "success"
    row = describe([[trajectory(1.0), lost]], [0.7], [0])
    assert row["rollout/frozen_lake/success"] == row["rollout/success"]


def test_groups_without_a_token_to_train_are_not_kept(player: Path, tmp_path: Path) -> None:
    """Every episode of the group with the largest std was cut: masked, there is nothing in it to train."""
    file = settings(tmp_path / "run.yaml", player, algorithm={"mask_truncated_completions": True, "minibatches": 1})
    cfg = resolve(StarPORun, file, ["algorithm.filter={strategy: top_k_abs, value: 1}"])
    cut = [trajectory(1.0, truncated=True), trajectory(0.0, truncated=True)]
    groups = [cut, [trajectory(1.0), trajectory(0.9, truncated=True)]]
    assert phase3.score_and_filter(cfg, groups).kept == [1]
    assert phase3.score_and_filter(cfg, [cut]).kept == []


@pytest.mark.parametrize(("masked", "played"), [(False, 2), (True, 4)])
def test_further_groups_replace_those_without_a_token_to_train(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool, played: int
) -> None:
    """Rewards differ in all groups; those of the first two levels are cut off."""

    def play_all(cfg: Any, sampler: Any, chat: Any, episodes: Sequence[Any], *more: Any) -> list[Trajectory]:
        drawn.append(len(episodes) // 2)
        cut = len(drawn) == 1
        ends = [trajectory(1.0, truncated=cut), trajectory(0.0, truncated=cut)]
        return [copy.copy(t) for _ in range(len(episodes) // 2) for t in ends]

    drawn: list[int] = []
    monkeypatch.setattr(phase3.starpo, "play_all", play_all)
    rollout = {"groups": 2, "num_generations": 2, "refill": 9}
    algorithm = {"mask_truncated_completions": masked, "minibatches": 1}
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, rollout=rollout, algorithm=algorithm))
    sampler: Any = None
    groups = phase3.rollout(cfg, sampler, sampler, 1, RunState())
    assert len(groups) == played and len(phase3.score_and_filter(cfg, groups).kept) == 2


def test_pictures_numbers_and_keys_of_a_strange_environment(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts in NumPy, cannot be drawn, and some of its levels have no key: the run goes on."""
    from envs.frozen_lake import FrozenLake

    step, key, count = FrozenLake.step, FrozenLake.level_key, iter(range(10**9))

    def counted(self: FrozenLake, action: str) -> Any:
        observation, paid, over, cut, info = step(self, action)
        told = {name: np.bool_(value) if isinstance(value, bool) else value for name, value in info.items()}
        return observation, np.float32(paid), np.bool_(over), np.bool_(cut), told

    def keyless(self: FrozenLake) -> str:
        if next(count) % 5 == 4:
            raise RuntimeError("no key")
        return key(self)

    def blind(self: FrozenLake) -> Any:
        raise OSError("no light")

    for name, function in (("step", counted), ("level_key", keyless), ("render", blind)):
        monkeypatch.setattr(FrozenLake, name, function)
    train(settings(tmp_path / "run.yaml", player, trainer={"max_steps": 2}, transcripts={"every": 1}))
    table = [row for row in rows(tmp_path / "run") if "rollout/reward" in row]
    assert len(table) == 2 and all(0 < row["rollout/crashed"] < 16 for row in table)
    told = capsys.readouterr().err
    assert "OSError: no light" in told and "16 episodes crashed and are left out" in told
    assert len((tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()) >= 2


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("no water"), r"it raised OSError: no water\. See .*env check"),
        (ValueError("\x1b[31mred\nand blue"), r"\\x1b\[31mred and blue"),
        (Mute(), r"it raised Mute: \(without words: its __str__ raised\)\. See .*env check"),
    ],
)
def test_an_environment_that_never_begins_is_refused_in_words(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    from envs.frozen_lake import FrozenLake

    def broken(self: FrozenLake, **_: Any) -> Any:
        raise error

    monkeypatch.setattr(FrozenLake, "reset", broken)
    with pytest.raises(UserError, match=rf"envs\.0 \(frozen_lake\): {words}") as told:
        train(settings(tmp_path / "run.yaml", player))
    assert str(told.value).isprintable()


def test_environments_share_the_groups_by_weight(player: Path, tmp_path: Path) -> None:
    file = settings(tmp_path / "run.yaml", player, envs=[LAKE, {"name": "sokoban", "weight": 2.0}])
    cfg = resolve(StarPORun, file)
    names = [env.name for step in (1, 2, 3) for env in environments_of_groups(cfg.envs, 4, step)]
    assert names.count("sokoban") == 8 and names.count("frozen_lake") == 4
    for step in range(1, 9):  # weights that add up to the groups are numbers of groups
        shares = [{**LAKE, "weight": 3.0}, {"name": "sokoban", "weight": 5.0}]
        fixed = resolve(StarPORun, settings(file, player, envs=shares)).envs
        names = [env.name for env in environments_of_groups(fixed, 8, step)]
        assert (names.count("frozen_lake"), names.count("sokoban")) == (3, 5)


@pytest.mark.slow
def test_an_environment_joins_once_the_one_before_it_is_won(
    player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    easy = {**LAKE, "label": "easy"}
    hard = {"name": "frozen_lake", "label": "hard", "options": {"size": 4}, "after": "easy", "after_success": 0.01}
    never = {"name": "frozen_lake", "label": "never", "options": {"size": 5}, "after": "hard", "after_success": 1.0}
    small: dict[str, Any] = {
        "rollout": {"num_generations": 2, "groups": 3},
        "evaluation": {"episodes": 16, "final_episodes": 2},
    }
    small["algorithm"] = {"num_iterations": 1, "minibatches": 1, "filter": {"strategy": "none", "keep_zero": True}}
    file = settings(tmp_path / "run.yaml", player, envs=[easy, hard, never], **small)
    train(file, f"output_dir={tmp_path / 'whole'}")
    assert "hard joins" in "".join(capsys.readouterr())
    found = rows(tmp_path / "whole")
    by_step = {row["step"]: row for row in found if "rollout/reward" in row}
    joined = min(row["step"] for row in found if row.get("evaluation/easy/success", 0) >= 0.01)
    assert all(("rollout/hard/success" in row) == (step > joined) for step, row in by_step.items())
    assert all("rollout/easy/success" in row and "rollout/never/success" not in row for row in by_step.values())
    assert any("final/never/success" in row for row in found)  # what is not yet trained in is evaluated
    # a run that is cut and resumed is the same one
    train(file, "trainer.max_steps=4", f"output_dir={tmp_path / 'cut'}")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-4")
    train(file, "--resume", f"output_dir={tmp_path / 'cut'}")
    assert rows(tmp_path / "cut") == found


def test_a_curriculum_begins_somewhere(player: Path, tmp_path: Path) -> None:
    for envs_given, words in (
        (
            [{**LAKE, "after": "sokoban"}, "sokoban"],
            r"envs\.0\.after is sokoban, which is not an environment",
        ),
        ([LAKE, {**LAKE, "options": {"size": 4}}], "envs has frozen_lake twice.*label"),
        ([LAKE, {"name": "sokoban", "after": "frozen_lak"}], "did you mean `frozen_lake`"),
    ):
        with pytest.raises(UserError, match=words):
            resolve(StarPORun, settings(tmp_path / "run.yaml", player, envs=envs_given))


def test_the_learning_rate_follows_its_schedule(player: Path, tmp_path: Path) -> None:
    trainer = {"max_steps": 12, "warmup_steps": 2, "learning_rate": 1.0, "lr_scheduler_type": "linear"}
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, trainer=trainer))
    rates = [cfg.learning_rate * schedule(cfg, step) for step in range(1, 13)]
    assert rates == pytest.approx([0.5, 1.0, *(1 - n / 10 for n in range(10))])
    trainer["lr_scheduler_type"] = "warmup_stable_decay"
    cfg = resolve(StarPORun, settings(tmp_path / "run.yaml", player, trainer=trainer))
    assert [schedule(cfg, step) for step in range(1, 13)] == pytest.approx([0.5, *[1.0] * 9, 2 / 3, 1 / 3])


def test_groups_that_score_alike_stop_the_run(player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = settings(
        tmp_path / "run.yaml", player, algorithm={"max_empty_steps": 2}, protocol={"format_penalty": 0.0},
        envs=[{"name": "frozen_lake", "options": {"size": 12, "corners": True}}],
    )  # fmt: skip
    train(file, "diagnostics.early_stop=false", "trainer.max_steps=9")
    table = rows(tmp_path / "run")
    assert [row["step"] for row in table if "rollout/reward" in row] == [1, 2]
    assert not any("policy/loss" in row for row in table)
    assert checkpoint.verify(tmp_path / "run" / "final")["meta"]["step"] == 0
    told = capsys.readouterr().err
    assert "No group passed the filter for 2 steps" in told and "stopped early" in told
    assert "phase 3: stopped at step 2 of 9, " in told and "100 %" not in told
    assert [row["step"] for row in table if "evaluation/success" in row] == [0, 2]
    assert [row["step"] for row in table if "final/success" in row] == [2]


@pytest.mark.thorough
def test_what_was_learned_before_an_early_stop_is_exported(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm ends the run in step 3, between two evaluations, when the policy wins far more than at the start."""
    real, stopped = phase3.evaluate, [0]

    def evaluate(*given: Any, **named: Any) -> phase3.Evaluation:
        return real(*given, **named)._replace(won={"frozen_lake": [stopped[0] > 0] * 8})

    def stop_early(self: Monitor, state: RunState, success: float) -> None:
        state.stopped_early = state.step == 3
        stopped[0] += state.stopped_early

    monkeypatch.setattr(phase3, "evaluate", evaluate)
    monkeypatch.setattr(Monitor, "stop_early", stop_early)
    file = settings(tmp_path / "run.yaml", player, trainer={"max_steps": 9}, evaluation={"every": 9})
    train(file)
    run = tmp_path / "run"
    assert checkpoint.verify(run / "final")["meta"]["step"] == 3
    assert [row["step"] for row in rows(run) if "evaluation/success" in row] == [0, 3]
    assert json.loads((run / "checkpoint-3" / "state.json").read_text())["best_step"] == 3
    before = rows(run)
    shutil.rmtree(run / "final")
    train(file, "--resume")
    assert rows(run) == before and checkpoint.verify(run / "final")["meta"]["step"] == 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("levels_won", "chosen"),
    [
        pytest.param([2, 6, 2], 0, marks=pytest.mark.slow),  # equal policies gain four with a chance of 1 in 16
        ([2, 3, 7], 3),  # and five with 1 in 32, which is evidence, in the last step as in the one before
        ([2, 7, 7], 2),  # a tie
        pytest.param([2, 1, 0], 0, marks=pytest.mark.slow),
    ],
)
def test_the_best_policy_wins_more_of_the_same_levels(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels_won: list[int], chosen: int
) -> None:
    """Also in a run that is resumed from its first checkpoint."""
    real = phase3.evaluate
    begun: list[int] = []

    def evaluate(*given: Any, **named: Any) -> phase3.Evaluation:
        result = real(*given, **named)
        if named.get("name") == "final":
            return result
        count = levels_won[begun.pop(0)]
        shares = {"evaluation/success": count / 8, "evaluation/frozen_lake/success": count / 8}
        return result._replace(metrics=result.metrics | shares, won={"frozen_lake": [n < count for n in range(8)]})

    monkeypatch.setattr(phase3, "evaluate", evaluate)
    every = {"trainer": {"max_steps": 3}, "evaluation": {"every": 2}, "transcripts": {"every": 9}}
    file = settings(tmp_path / "run.yaml", player, **every)
    begun[:] = [0, 1, 2]
    train(file)
    run, table = tmp_path / "run", rows(tmp_path / "run")
    assert checkpoint.verify(run / "final")["meta"]["step"] == chosen
    if levels_won == [2, 7, 7]:
        for later in ("checkpoint-2", "checkpoint-3", "final"):
            shutil.rmtree(run / later)
        begun[:] = [1, 2]
        train(file, "--resume")
        assert rows(run) == table and begun == []
        assert checkpoint.verify(run / "final")["meta"]["step"] == chosen


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rewarded", "wins", "rewards", "chosen"),
    [
        (True, [0, 0, 0], [0.0, 0.5, 0.9], 2),  # graded rewards below `success`
        (False, [6, 4, 0], [0.0, 0.0, 0.0], 1),  # a teacher alone: four are not fewer than six, and none is
    ],
)
def test_what_is_chosen_without_a_gain_in_success(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    rewarded: bool, wins: list[int], rewards: list[float], chosen: int,
) -> None:  # fmt: skip
    """Also in a run that is resumed from its first checkpoint."""
    real, begun = phase3.evaluate, [0, 1, 2]

    def evaluate(*given: Any, **named: Any) -> phase3.Evaluation:
        result = real(*given, **named)
        if named.get("name") == "final":
            return result
        count, reward = wins[begun[0]], rewards[begun.pop(0)]
        metrics = result.metrics | {"evaluation/success": count / 8}
        won, earned = {"frozen_lake": [n < count for n in range(8)]}, {"frozen_lake": [reward] * 8}
        return result._replace(metrics=metrics, won=won, earned=earned)

    monkeypatch.setattr(phase3, "evaluate", evaluate)
    taught = {} if rewarded else {"distillation": {"teacher": str(player), "reward": False}}
    every = {"trainer": {"max_steps": 2}, "evaluation": {"every": 1}, "transcripts": {"every": 9}}
    file = settings(tmp_path / "run.yaml", player, **every, **taught)
    train(file)
    run, table = tmp_path / "run", rows(tmp_path / "run")
    assert checkpoint.verify(run / "final")["meta"]["step"] == chosen
    for later in ("checkpoint-2", "final"):
        shutil.rmtree(run / later)
    begun[:] = [2]
    train(file, "--resume")
    assert rows(run) == table and begun == []
    assert checkpoint.verify(run / "final")["meta"]["step"] == chosen


@pytest.mark.thorough
@pytest.mark.parametrize("updates", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_diverges_fails_with_its_best_policy_saved(
    player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], updates: int
) -> None:
    """After a single update no loss has been broken yet, only what the policy samples next."""
    parts = {"num_iterations": 1, "minibatches": 1} if updates == 1 else {}
    file = settings(tmp_path / "run.yaml", player, algorithm=parts)
    changes = ["trainer.learning_rate=1e30", "trainer.max_steps=9"]
    failed = rf"The run failed: since step {2 if updates == 1 else 1} .*not.*finite.*final was made from best-0"
    with pytest.raises(UserError, match=failed):
        train(file, *changes)
    run, told = tmp_path / "run", capsys.readouterr()
    assert "Saved" in told.out and "Next:" not in told.out and "stopped early" in told.err
    assert max(row["step"] for row in rows(run) if "rollout/reward" in row) < 9
    for name, tensor in weights(run / "final").items():
        assert torch.equal(tensor, weights(player)[name]), name
    finished = rows(run)
    with pytest.raises(UserError, match=failed):
        train(file, *changes, "--resume")
    assert rows(run) == finished


def test_a_run_whose_last_update_breaks_the_policy_fails(player: Path, tmp_path: Path) -> None:
    """Its rows of training are all finite: the evaluation of the last step tells."""
    file = settings(tmp_path / "run.yaml", player, algorithm={"num_iterations": 1, "minibatches": 1})
    with pytest.raises(UserError, match=r"failed: since step 1 .*evaluation/frozen_lake/logprob.*made from best-0"):
        train(file, "trainer.learning_rate=1e30", "trainer.max_steps=1")
    assert checkpoint.verify(tmp_path / "run" / "final")["meta"]["step"] == 0


def test_a_model_that_computes_no_numbers_is_not_trained(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(player)
    for weight in model.model.layers[0].mlp.parameters():
        weight.data.fill_(1e38)  # finite by itself

    def write(out: Path) -> None:
        model.save_pretrained(out)
        Chat.load(PreTrainedTokenizerFast.from_pretrained(player), None).save(out)

    meta = checkpoint.verify(player)["meta"]
    broken = checkpoint.save(tmp_path / "broken", write, **meta)
    with pytest.raises(UserError, match="numbers that are not finite"):
        train(settings(tmp_path / "run.yaml", broken))
    real = phase3.evaluate
    broke = {"evaluation/frozen_lake/logprob": math.nan}
    monkeypatch.setattr(
        phase3, "evaluate", lambda *given, **named: (r := real(*given, **named))._replace(metrics=r.metrics | broke)
    )
    with pytest.raises(UserError, match=r"final cannot be trained: since step 0 .*evaluation/frozen_lake/logprob"):
        train(settings(tmp_path / "other.yaml", player, output_dir=str(tmp_path / "other")))
    assert not list(tmp_path.glob("*/best-*"))


@pytest.mark.slow
def test_all_processes_of_a_run_that_diverges_fail(player: Path, tmp_path: Path) -> None:
    done = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "train_phase3_starpo.py", "--config", str(settings(tmp_path / "run.yaml", player)),
        "trainer.learning_rate=1e30",
    )  # fmt: skip
    assert done.returncode != 0 and done.stderr.count("error: The run failed: since step 1") == 2
    assert "Traceback" not in done.stderr.split("error: The run failed")[0]
    assert checkpoint.verify(tmp_path / "run" / "final")["meta"]["step"] == 0


def test_lora_trains_an_adapter_and_saves_whole_weights(player: Path, tmp_path: Path) -> None:
    adapter = {"tuning": "lora", "lora": {"r": 4, "alpha": 8}}
    file = settings(tmp_path / "run.yaml", player, model=adapter, trainer={"max_steps": 2})
    train(file)
    run = tmp_path / "run"
    assert (run / "checkpoint-2" / "adapter_model.safetensors").exists()
    merged, before = weights(run / "final"), weights(player)
    assert merged.keys() == before.keys()
    table = rows(run)
    train(file, "--resume")  # a finished run is finished again, from its last checkpoint
    assert rows(run) == table
    train(file, f"output_dir={tmp_path / 'twin'}")
    assert rows(tmp_path / "twin") == table, "the adapter is born from the seed"


def test_a_mistake_found_late_leaves_the_name_free(player: Path, tmp_path: Path) -> None:
    file = settings(tmp_path / "run.yaml", player, trainer={"max_steps": 1})
    with pytest.raises(UserError, match="max_context"):
        train(file, "rollout.max_context=32")
    train(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.name_or_path=runs/nowhere/final", "previous phase"),
        ("envs.0.name=frozen_lak", "did you mean"),
        ("envs.0.options={sizes: 4}", "sizes"),
        ("rollout.groups=0", "rollout.groups"),
        ("algorithm.preset=starpo_s", "did you mean"),
        ("device=cuda", "CUDA"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(player: Path, tmp_path: Path, change: str, words: str) -> None:
    file = settings(tmp_path / "run.yaml", player)
    with pytest.raises(UserError, match=f"(?i){words}"):
        train(file, change)
    assert not (tmp_path / "run").exists()


def test_a_mistake_on_the_command_line_is_a_paragraph_and_code_2(player: Path, tmp_path: Path) -> None:
    done = python("train_phase3_starpo.py", "--config", str(settings(tmp_path / "run.yaml", player)), "trainer.lr=1")
    assert done.returncode == 2 and "learning_rate" in done.stderr and "Traceback" not in done.stderr


def test_a_run_in_use_is_left_alone(whole: Path, player: Path, tmp_path: Path) -> None:
    before = rows(whole)
    with pytest.raises(UserError, match="resume"):
        train(settings(tmp_path / "again.yaml", player, output_dir=str(whole)))
    assert rows(whole) == before
