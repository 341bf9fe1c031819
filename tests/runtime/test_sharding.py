"""Do several processes, each with a share of the model, compute what one computes?  And is what cannot be done told?

The figures of docs/config.md ("Several GPUs"):
    python -m pytest tests/runtime/test_sharding.py -m "" -k "equal or goes_on" -rP
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import test_phase3
import torch
import yaml
from safetensors.torch import load_file
from tiny_runs import ROOT, conversations, preferences, python, rows_of, settings, tiny_base
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from waiting import wait_until

import train_phase1_sft
import train_phase2_dpo
from posttrain.config.sft import SFTRun
from posttrain.runtime import checkpoint, hardware, launcher, parallel, run_identity
from posttrain.types import UserError

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
LORA = {"tuning": "lora", "lora": {"r": 4, "alpha": 8}}
SCRIPTS = {"sft": train_phase1_sft, "dpo": train_phase2_dpo}
PHASES = {"sft": "phase 1", "dpo": "phase 2"}
ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "True",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("sharding")
    return SimpleNamespace(
        base=tiny_base(folder / "base", tiny_tokenizer, 16),
        sft=conversations(folder / "rows.jsonl"),
        dpo=preferences(folder / "pairs.jsonl"),
    )


def config_in(folder: Path, files: SimpleNamespace, phase: str, model: dict[str, Any], **trainer: Any) -> Path:
    """Five steps of eight rows on one process."""
    kind, data = ("messages", files.sft) if phase == "sft" else ("preferences", files.dpo)
    steps = {"max_steps": 5, "save_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    steps |= {"per_device_eval_batch_size": 3}  # eight rows are held out
    file = settings(folder / f"{phase}.yaml", kind, files.base, data, **(steps | trainer))
    config = yaml.safe_load(file.read_text())
    config["model"] |= model
    file.write_text(yaml.safe_dump(config))
    return file


def script(phase: str) -> str:
    return f"{SCRIPTS[phase].__name__}.py"


def launched(count: int, *command: str, env: dict[str, str] = FSDP2) -> Any:
    """A script in `count` processes, as `accelerate launch` starts it."""
    return python("tests/ranks.py", str(count), *(f"{key}={value}" for key, value in env.items()), *command)


def succeeds(count: int, *command: str, env: dict[str, str] = FSDP2) -> Any:
    done = launched(count, *command, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def remove(run: Path, *folders: str) -> None:
    for folder in folders:
        shutil.rmtree(run / folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint.weight_files(folder) for name, tensor in load_file(file).items()}


def equal(what: str, one: Path, other: Path, figures: tuple[str, ...] = ("loss", "grad_norm")) -> None:
    """Figures of every step and the weights at the end agree within 1e-5; prints the line of the table."""
    apart = []
    for figure in figures:
        here, there = rows_of(one, figure), rows_of(other, figure)
        assert here.keys() == there.keys() and here
        apart.append(max(abs(here[step] - there[step]) for step in here))
    before, after = weights(one / "final"), weights(other / "final")
    assert before.keys() == after.keys()
    apart.append(max((before[name] - after[name]).abs().max().item() for name in before))
    print(f"| {what} | {' | '.join(f'{value:.1e}' for value in apart)} |")
    assert max(apart) < 1e-5
    assert rows_of(other, "eval_loss") == pytest.approx(rows_of(one, "eval_loss"), abs=1e-5)


# -------------------------------------------------------------------------------------------------- phases 1 and 2


def on_one_and_several(
    tmp_path: Path, files: SimpleNamespace, phase: str, tuning: str, count: int, env: dict[str, str]
) -> list[str]:
    """A run on one process, in one/, and the same on several, in run/; returns the command of the second."""
    file = config_in(tmp_path, files, phase, LORA if tuning == "lora" else {})
    SCRIPTS[phase].main(["--config", str(file), f"output_dir={tmp_path}/one"])
    command = [script(phase), "--config", str(file), f"trainer.gradient_accumulation_steps={4 // count}"]
    succeeds(count, *command, env=env)
    return command


@pytest.mark.thorough
@pytest.mark.parametrize("tuning", ["full", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp2_equal_to_one_process(
    tmp_path: Path, files: SimpleNamespace, phase: str, tuning: str, count: int
) -> None:
    """With whole checkpoints and an ordinary final/."""
    on_one_and_several(tmp_path, files, phase, tuning, count, FSDP2)
    equal(f"{PHASES[phase]}, {tuning}, FSDP2 | {count}", tmp_path / "one", tmp_path / "run")
    run = tmp_path / "run"
    kept = weights(run / "final")
    assert AutoModelForCausalLM.from_pretrained(run / "final").state_dict().keys() >= kept.keys()
    assert json.loads((run / "checkpoint-2" / "counts.json").read_text())["sharding"] == "fsdp2"
    if tuning == "full":
        AutoModelForCausalLM.from_pretrained(run / "checkpoint-2")  # whole as well


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "tuning", "sharded", "before", "after"),
    [("sft", "full", sharded, *counts) for sharded, *counts in
     ((False, 2, 1), (False, 1, 2), (False, 2, 4), (True, 2, 2), (True, 2, 4))]
    + [("sft", "lora", True, 2, 4), ("dpo", "full", True, 2, 4), ("dpo", "lora", True, 2, 4)],
)  # fmt: skip
def test_resumed_equal_to_one_process(
    tmp_path: Path, files: SimpleNamespace, phase: str, tuning: str, sharded: bool, before: int, after: int
) -> None:
    """The accumulation makes up for the processes: each step has the rows that it would have had."""
    env = FSDP2 if sharded else {}
    command = on_one_and_several(tmp_path, files, phase, tuning, before, env)
    remove(tmp_path / "run", "checkpoint-4", "checkpoint-5", "final")
    done = succeeds(after, *command, "--resume", env=env)
    told = f"now on {after}: with gradient_accumulation_steps={4 // after} a step has the same 8 rows"
    assert "checkpoint-2" in done.stdout and (told in done.stdout) == (after != before)
    what = f"{PHASES[phase]}, {tuning}, {'FSDP2' if sharded else 'copies'}, resumed at step 2"
    equal(f"{what} | {before}, then {after}", tmp_path / "one", tmp_path / "run")


@pytest.mark.slow
def test_grouped_rows_equal_to_one_process(tmp_path: Path, files: SimpleNamespace) -> None:
    """`group_by_length`, the reference configs' order; resumed in the second epoch on one process, then on two."""
    steps = {"max_steps": 12, "save_steps": 10}  # nine of them are an epoch
    file = config_in(tmp_path, files, "sft", {}, train_sampling_strategy="group_by_length", **steps)
    train_phase1_sft.main(["--config", str(file), f"output_dir={tmp_path}/one"])
    command = [script("sft"), "--config", str(file), "trainer.gradient_accumulation_steps=2"]
    succeeds(2, *command, env={})
    for processes in (1, 2):
        remove(tmp_path / "run", "checkpoint-12", "final")
        succeeds(processes, *command, "--resume", env={})
        equal(f"phase 1, full, copies, grouped by length | 2, then {processes}", tmp_path / "one", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "tuning"), [("sft", "full"), ("sft", "lora"), ("dpo", "full")])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_deepspeed_equal_to_one_process(
    tmp_path: Path, files: SimpleNamespace, phase: str, tuning: str, stage: int, count: int
) -> None:
    pytest.importorskip("deepspeed")
    env = ZERO3 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage), "DS_ACCELERATOR": "cpu"}
    command = on_one_and_several(tmp_path, files, phase, tuning, count, env)
    what = f"{PHASES[phase]}, {tuning}, ZeRO {stage}"
    equal(f"{what} | {count}", tmp_path / "one", tmp_path / "run")
    remove(tmp_path / "run", "checkpoint-4", "checkpoint-5", "final")
    succeeds(count, *command, "--resume", env=env)
    equal(f"{what}, resumed at step 2 | {count}", tmp_path / "one", tmp_path / "run")
    done = launched(6 - count, *command, "--resume", env=env)
    assert done.returncode == 2 and "DeepSpeed's checkpoints hold one file for each process" in done.stderr


# --------------------------------------------------------------------------------------------------------- phase 3

UPDATES = {
    "full": {"algorithm": {"minibatches": 2}},
    "tied": {"algorithm": {}, "tied": True},
    "lora": {"algorithm": {"beta": 0.1}, "tuning": "lora"},
    "reference": {"algorithm": {"beta": 0.1}},
    "shared critic": {"algorithm": {"advantage": "gae", "critic": {"kind": "shared"}}},
    "separate critic": {"algorithm": {"advantage": "gae", "critic": {"kind": "separate", "warmup_steps": 1}}},
    "recomputed layers": {"algorithm": {}, "trainer": {"gradient_checkpointing": True}},
    "compiled layers": {"algorithm": {}, "trainer": {"torch_compile": True}},
    "distillation": {"algorithm": {}, "distillation": True},
    "lora, distillation": {"algorithm": {}, "distillation": True, "tuning": "lora"},
    "teacher": {"algorithm": {"minibatches": 2}, "teacher": True},
    "lora, teacher": {"algorithm": {}, "teacher": True, "tuning": "lora"},
    "uneven": {
        "algorithm": {"loss_type": "gspo", "aggregation": "sequence_mean", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "groups": 5,
        "members": 3,
    },
    "nothing for some": {"algorithm": {}, "groups": 1, "members": 2, "trainer": {"micro_batch_tokens": 4096}},
}


def updated(folder: Path, count: int, asked: dict[str, Any]) -> dict[str, Any]:
    """tests/sharded_updates.py in `count` processes; one is a plain run."""
    asked = {"groups": 3, "members": 4, "trainer": {"micro_batch_tokens": 48}} | asked
    asked["trainer"] = {"micro_batch_tokens": 48} | asked["trainer"]
    file = folder / f"{count}.pt"
    succeeds(count, "tests/sharded_updates.py", str(file), json.dumps(asked), env=FSDP2 if count > 1 else {})
    return torch.load(file, weights_only=True)


def most(one: Any, other: Any) -> float:
    """The largest difference between two equal trees of tensors and numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((most(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list):
        assert len(one) == len(other)
        return max((most(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        return (one - other).abs().max().item()
    return abs(one - other)


def equal_updates(folder: Path, name: str, count: int) -> None:
    one, several = (updated(folder, each, UPDATES[name]) for each in (1, count))
    assert several["resumed"] and one["resumed"]
    assert several["share"] <= 1 / count + 0.05, "each process holds its share alone"
    assert len(one["gradients"]) >= 5
    apart = [most(one[key], several[key]) for key in ("figures", "gradients", "weights", "played")]
    print(f"| phase 3, {name}, FSDP2 | {count} | {' | '.join(f'{value:.1e}' for value in apart[:3])} |")
    assert max(apart) < 1e-5


@pytest.mark.thorough
def test_a_sharded_update_with_nothing_for_some_processes_is_equal_to_that_of_one(tmp_path: Path) -> None:
    equal_updates(tmp_path, "nothing for some", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("count", [2, 4])
def test_a_sharded_update_is_equal_to_that_of_one_process(tmp_path: Path, name: str, count: int) -> None:
    equal_updates(tmp_path, name, count)


@pytest.mark.slow
def test_a_sharded_run_of_phase_3_is_equal_to_one_process(tmp_path: Path, player: Path) -> None:
    """Rollouts, evaluations and checkpoints; half of the run is sharded on two, and one process goes on unsharded."""
    file = test_phase3.settings(tmp_path / "run.yaml", player)
    test_phase3.train(file, f"output_dir={tmp_path / 'one'}")
    succeeds(2, "train_phase3_starpo.py", "--config", str(file))
    remove(tmp_path / "run", "checkpoint-3", "checkpoint-4", "final")
    test_phase3.train(file, "--resume")
    for one, two in zip(test_phase3.rows(tmp_path / "one"), test_phase3.rows(tmp_path / "run"), strict=True):
        assert one["step"] == two["step"]
        for key in ("rollout/reward", "rollout/kept_groups", "rollout/tokens", "evaluation/success"):
            assert one.get(key) == two.get(key), (one["step"], key)
    for step in (2, 4):
        found = [weights(tmp_path / name / f"checkpoint-{step}") for name in ("one", "run")]
        assert most(*found) < 1e-5


# ------------------------------------------------------------------------------------------- processes that are lost


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_process_that_loses_another_says_so_in_bounded_time(way: str) -> None:
    began = time.monotonic()
    done = launched(2, "PATIENCE=3", "tests/lost_process.py", way, env={})
    assert time.monotonic() - began < 30
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "error: Process 0 of 2 has lost the others: one has ended" in done.stderr
    assert "trainer.ddp_timeout" in done.stderr and "--resume" in done.stderr


def lose_the_second(command: list[str], saved: Path, number: int) -> None:
    """Two processes, of which the second gets this signal after this checkpoint: the first says so, and ends soon."""
    run = subprocess.Popen(
        [sys.executable, "tests/ranks.py", "2", *command],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: run.poll() is not None or (saved / checkpoint.MANIFEST).exists(), 120)
    assert run.poll() is None
    max(psutil.Process(run.pid).children(), key=psutil.Process.create_time).send_signal(number)
    began = time.monotonic()
    said = run.communicate(timeout=120)[1]
    assert time.monotonic() - began < 60 and run.returncode != 0
    assert re.search("error: Process [01] of 2 has lost the others", said) and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, FSDP2], ids=["copies", "fsdp2"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_phase_3_ends_that_loses_a_process_and_goes_on(
    player: Path, tmp_path: Path, number: int, env: dict[str, str]
) -> None:
    trainer = {"max_steps": 12, "ddp_timeout": 10}
    file = test_phase3.settings(tmp_path / "run.yaml", player, trainer=trainer, checkpoint={"every": 2})
    command = ["train_phase3_starpo.py", "--config", str(file)]
    settings = [f"{key}={value}" for key, value in (env | {"PATIENCE": "5"}).items()]
    lose_the_second([*settings, *command], tmp_path / "run" / "checkpoint-2", number)
    succeeds(2, *command, "--resume", env=env)
    trained = [row["step"] for row in test_phase3.rows(tmp_path / "run") if "policy/loss" in row]
    assert trained == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_run_ends_that_loses_a_process_and_goes_on(tmp_path: Path, files: SimpleNamespace, number: int) -> None:
    """After the first checkpoint one of two processes is gone; --resume comes to the end that would have been."""
    file = config_in(tmp_path, files, "sft", {}, ddp_timeout=10, max_steps=60, save_steps=20)
    train_phase1_sft.main(["--config", str(file), f"output_dir={tmp_path}/one"])
    command = [script("sft"), "--config", str(file), "trainer.gradient_accumulation_steps=2"]
    settings = [f"{key}={value}" for key, value in (FSDP2 | {"PATIENCE": "5"}).items()]
    lose_the_second([*settings, *command], tmp_path / "run" / "checkpoint-20", number)
    succeeds(2, *command, "--resume")
    equal(f"phase 1, full, FSDP2, a process that {'dies' if number == signal.SIGKILL else 'hangs'} | 2",
          tmp_path / "one", tmp_path / "run")  # fmt: skip


# ------------------------------------------------------------------------------------------------------- bad input


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def some_run(**changes: Any) -> SFTRun:
    section: dict[str, Any] = {"output_dir": "x", "model": {"name_or_path": "a/b"}, "device": "cpu"}
    section["data"] = {"sources": [{"kind": "capybara", "path": "embedded"}]}
    for name, change in changes.items():
        section[name] = {**section.get(name, {}), **change}
    return SFTRun.model_validate(section)


@pytest.mark.parametrize("name", ["fsdp2", "two_nodes", "zero2", "zero3"])
def test_the_files_of_accelerate_ask_for_what_is_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As `accelerate launch` turns them into variables; a change of any setting that matters is refused."""
    file = ROOT / "configs" / "accelerate" / f"{name}.yaml"
    set_variables(monkeypatch, variables_of(file) | {"WORLD_SIZE": "8"})
    launcher.check_launch(some_run())
    assert launcher.sharding() == ("fsdp2" if name == "two_nodes" else name)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launcher.sharding() == "none"


def variables_of(file: Path) -> dict[str, str]:
    from accelerate.commands import launch
    from accelerate.utils import launch as environment

    args = launch.launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    args, *_ = launch._validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        made = environment.prepare_deepspeed_cmd_env(args)[1]
    else:
        made = environment.prepare_multi_gpu_env(args)
    return {key: value for key, value in made.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.mark.parametrize(
    ("right", "variable", "value", "words"),
    [
        (FSDP2, "FSDP_VERSION", "1", "fsdp_version: 2"),
        (FSDP2, "FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", "fsdp_state_dict_type: FULL_STATE_DICT"),
        (FSDP2, "FSDP_AUTO_WRAP_POLICY", "NO_WRAP", "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
        (FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "fsdp_cpu_ram_efficient_loading: false"),
        (FSDP2, "FSDP_ACTIVATION_CHECKPOINTING", "true", "trainer.gradient_checkpointing"),
        (FSDP2, "ACCELERATE_USE_MEGATRON_LM", "yes", "ACCELERATE_USE_MEGATRON_LM=true.*fsdp2.yaml"),
        (FSDP2, "ACCELERATE_USE_PARALLELISM_CONFIG", "1", "ACCELERATE_USE_PARALLELISM_CONFIG=true.*fsdp2.yaml"),
        (ZERO3, "ACCELERATE_DEEPSPEED_ZERO_STAGE", "0", "zero_stage is 0. Write 1, 2 or 3"),
        (ZERO3, "ACCELERATE_DEEPSPEED_ZERO3_INIT", "true", "zero3_init_flag: false"),
        (ZERO3, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false", "zero3_save_16bit_model: true"),
        (ZERO3, "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json", "no deepspeed_config_file"),
        (ZERO3, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps: auto"),
    ],
)
def test_what_the_launcher_may_not_ask_for(
    monkeypatch: pytest.MonkeyPatch, right: dict[str, str], variable: str, value: str, words: str
) -> None:
    set_variables(monkeypatch, right | {"WORLD_SIZE": "2", variable: value})
    with pytest.raises(UserError, match=words) as error:
        hardware.settle(some_run())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"name_or_path": "a/b", "tuning": "qlora"}}, "4-bit weights, which are not sharded.*tuning=lora"),
        ({"trainer": {"optim": "adamw_8bit"}}, "trainer.optim=adamw_8bit.*adamw_torch"),
    ],
)
def test_what_a_sharded_model_cannot_be(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str) -> None:
    cfg = some_run(**change)
    launcher.check_launch(cfg)
    set_variables(monkeypatch, FSDP2 | {"WORLD_SIZE": "2"})
    with pytest.raises(UserError, match=words):
        launcher.check_launch(cfg)


def test_fewer_processes_than_asked_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `accelerate launch --cpu --num_processes 2` leaves to the one process that it starts."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    words = ["--cpu", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no", "train.py"]
    args = launch.launch_command_parser().parse_args(words)
    args, *_ = launch._validate_launch_command(args)
    made = prepare_simple_launcher_cmd_env(args)[1]
    set_variables(monkeypatch, {key: made[key] for key in set(made) - set(os.environ)})
    with pytest.raises(UserError, match=r"was to start several processes and has started one.*two_cpu.yaml"):
        hardware.settle(some_run())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    with pytest.raises(UserError, match="started one"):  # a machine without a GPU, --cpu forgotten
        hardware.settle(some_run())
    monkeypatch.setenv("MASTER_ADDR", "node17")  # one was asked for, in a job of a cluster
    hardware.settle(some_run())
    monkeypatch.delenv("MASTER_ADDR")
    hardware.settle(some_run())


def test_more_processes_than_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert hardware.resolve_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UserError, match=r"started 4 processes on this machine.*finds 2 GPUs.*--nproc_per_node 2"):
        hardware.resolve_device("cuda")


def test_a_resumed_run_keeps_its_batches_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(processes: int, sharding: str) -> None:
        (tmp_path / "checkpoint-4").mkdir(exist_ok=True)
        counts = {"num_tokens": 9, "processes": processes, "sharding": sharding}
        (tmp_path / "checkpoint-4" / run_identity.COUNTS).write_text(json.dumps(counts))

    six = some_run(trainer={"gradient_accumulation_steps": 3})
    assert run_identity.same_batches(tmp_path, six) is six, "nothing was begun"
    begun(2, "none")
    for now, steps in ((1, 6), (2, 3), (3, 2), (6, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(now))
        assert run_identity.same_batches(tmp_path, six).trainer["gradient_accumulation_steps"] == steps
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        UserError, match=r"started on 2 processes.*6 micro-batches a step.*cannot be shared by 4.*torchrun"
    ):
        run_identity.same_batches(tmp_path, six)
    monkeypatch.setenv("WORLD_SIZE", "1")
    begun(2, "fsdp2")
    with pytest.raises(UserError, match=r"sharding fsdp2 and would continue with none.*fsdp2.yaml --num_processes 2"):
        run_identity.same_batches(tmp_path, six)


def test_a_port_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        set_variables(monkeypatch, rank)
        with pytest.raises(UserError, match=rf"Port {port}, at which the processes.*in use.*--main_process_port"):
            parallel.join(torch.device("cpu"), timeout=5)
        with pytest.raises(SystemExit) as end:
            parallel.launch(
                ["--master_addr", "127.0.0.1", "--master_port", str(port), "--nproc_per_node", "2", "none.py"]
            )
        assert end.value.code == 2


@pytest.mark.parametrize("given, seconds", [([], parallel.SHUTDOWN), (["--shutdown-timeout", "5"], 5)])
def test_processes_have_long_to_end_unless_the_command_line_says_otherwise(
    given: list[str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import run

    asked: list[Any] = []
    monkeypatch.setattr(run, "run", asked.append)
    with pytest.raises(SystemExit):
        parallel.launch([*given, "--nproc_per_node", "1", "none.py"])
    assert asked[0].shutdown_timeout == seconds
