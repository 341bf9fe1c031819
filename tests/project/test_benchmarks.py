"""Do the benchmarks run, compare equal work, and write the figures they print?"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_packed
import test_row_attention
import torch
import yaml
from recording import ListRecorder
from tiny_runs import python, tiny_base
from transformers.integrations import flex_attention
from transformers.utils import import_utils

import envs
from benchmarks import _measure as measure
from envs.protocol import Protocol
from posttrain.config.dpo import DPORun
from posttrain.config.loading import resolve
from posttrain.config.sft import SFTRun
from posttrain.config.starpo import StarPORun
from posttrain.data.embedded.conversations import without_answer
from posttrain.models import row_attention
from posttrain.plan import seconds as planned_seconds
from posttrain.rollout.engines.replay import ReplaySampler
from posttrain.rollout.episodes import play, set_up
from posttrain.types import Completion, SamplingParams, derive_seed

FILE = Path(__file__).parents[2] / "benchmarks" / "rollout.py"
SIZES = "--conversations 3 --new-tokens 3 --turns 2 3 --repeats 2".split()
NARROW = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NARROW |= {"intermediate_size": 32, "initializer_range": 0.2, "max_position_embeddings": 1024}
NARROW |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FILE.parent), *sys.path])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return loaded(FILE)


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{file.stem}_benchmark", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_bench_runs_every_script_and_each_does_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    told = subprocess.run(["make", "-n", "bench"], cwd=FILE.parent.parent, capture_output=True, text=True, check=True)
    scripts = sorted(set(re.findall(r"benchmarks/(\w+)\.py", told.stdout)))
    assert scripts == sorted(file.stem for file in FILE.parent.glob("[a-z]*.py") if "def main" in file.read_text())
    monkeypatch.setattr(sys, "path", [str(FILE.parent), *sys.path])
    parse_args = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *_: object) -> None:
        parse_args(parser, [])
        raise EOFError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for script in scripts:
        with pytest.raises(EOFError):
            loaded(FILE.parent / f"{script}.py").main()


def test_no_script_has_the_name_of_a_package_that_transformers_looks_for() -> None:
    """A script's folder comes first in the path: transformers would import benchmarks/kernels.py for `kernels`."""
    source = Path(import_utils.__file__).read_text(encoding="utf-8")
    looked_for = set(re.findall(r'_is_package_available\("(\w+)', source))
    assert len(looked_for) > 50 and not looked_for & {file.stem for file in FILE.parent.rglob("*.py")}


def test_rollout_measures_engines_on_equal_work(rollout, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FILE), *SIZES, "--engines", "generate", "--json", str(tmp_path / "f.json")])
    rollout.main()
    results = json.loads((tmp_path / "f.json").read_text())
    assert {"commit", "machine", "threads", "load", "dtype"} <= results.keys()
    assert [(row["model"], row["turns"]) for row in results["rows"]] == [
        ("convgpt", 2),
        ("convgpt", 3),
        ("llama", 2),
        ("llama", 3),
    ]
    for row in results["rows"]:
        assert row["seconds"].keys() == {"slots", "generate"}
        assert all(len(times) == 2 and min(times) > 0 for times in row["seconds"].values())
        for turns, seconds in zip(row["turn_seconds"], row["seconds"]["slots"], strict=True):
            assert len(turns) == row["turns"] and 0 < sum(turns) < seconds
        assert all(0 < share < 1 for share in row["outside"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2 * len(results["rows"]) + 2 + len(results["rows"])
    assert [line.count("|") for line in table] == [10] * (2 + 2 * 4) + [7] * (2 + 4)


@pytest.mark.slow
def test_every_engine_writes_the_same_tokens_after_the_same_contexts(rollout):
    model, chat = measure.model_of("llama", NARROW).eval(), measure.words(512)
    said = rollout.script(3, 3)
    engines = ["slots", "generate", "replay", "continuous-batching", "trl-environment", "trl-rollout-func"]
    made = rollout.contestants(model, chat, said, 4, engines)
    played = {name: contestant(SamplingParams(4, temperature=0.0)) for name, contestant in made.items()}
    assert rollout.unequal(played) == []
    assert all(len(ids) == 12 for ids in played["slots"].sampled)
    written = [chat.prompt([{"role": "user", "content": text}]) for text in said.prompts]
    written += [chat.extend(text) for texts in said.replies for text in texts]
    assert played["slots"].context == sum(map(len, written)) + 3 * 12
    drawn = {name: made[name](SamplingParams(4)) for name in engines}
    assert {own.context for own in drawn.values()} == {played["slots"].context}
    assert all(len(ids) == 12 for own in drawn.values() for ids in own.sampled)
    assert all(own.sampled != played[name].sampled for name, own in drawn.items())


def test_turns_of_unequal_length_are_the_same_for_every_engine(rollout):
    model, chat = measure.model_of("llama", NARROW).eval(), measure.words(512)
    said = rollout.script(9, 4)
    with rollout.ragged(model, 24):
        engines = ["slots", "generate", "replay", "trl-environment", "trl-rollout-func"]
        made = rollout.contestants(model, chat, said, 24, engines, rollout.STOP)
        played = {name: contestant(SamplingParams(24, temperature=0.0)) for name, contestant in made.items()}
    assert rollout.unequal(played) == []
    turns = [" ".join(map(str, ids)).split(f"{rollout.STOP}") for ids in played["slots"].sampled]
    lengths = [len(turn.split()) + 1 for each in turns for turn in each[:-1]]
    assert all(len(each) == 5 and each[-1] == "" for each in turns)
    assert len(set(lengths)) > 8 and max(lengths) <= 24


@pytest.mark.parametrize("turns", [2, 5])
def test_a_gpu_records_before_it_is_timed(rollout, monkeypatch, turns):
    """What is timed are replays: no graph is recorded there, and the cache stays where it is."""
    monkeypatch.setattr("posttrain.rollout.engines.graphs.CudaRecorder", ListRecorder)
    model, chat = measure.model_of("llama", NARROW).eval(), measure.words(512)
    said = rollout.script(9, turns)
    made = rollout.contestants(model, chat, said, 24, ["slots", "graphs"])
    sampler, graphs = inspect.signature(made["graphs"]).parameters["s"].default, made["graphs"]
    recorded, sizes = [0], set()

    def watched(params: SamplingParams) -> Any:
        played = graphs(params)
        recorded.append(sampler.recorded)
        sizes.add(sampler._sizes())
        return played

    made["graphs"] = watched
    seconds, work = rollout.timed(made, SamplingParams(24), 2, "cuda")
    assert len(seconds["graphs"]) == 2 and len(made["slots"].turns) == len(made["slots"].outside) == 2
    assert work["graphs"] == work["slots"] and len(recorded) == 1 + 1 + 2
    assert 0 < recorded[1] == recorded[-1] and sampler._recorder is not None and len(sizes) == 1
    assert work["slots"][0] / 9 <= sampler.longest <= sizes.pop()[1]
    rollout.timed(made, SamplingParams(24), 1, "cpu")
    assert len(recorded) == 4 + 1, "on a CPU nothing is played but what is timed"


def test_nothing_is_timed_when_the_engines_differ(rollout, tmp_path, monkeypatch):
    honest = rollout.GenerateSampler.sample

    def wrong(self, handles, params, seeds):
        return [
            rollout.Completion([token ^ 1 for token in c.ids], [], False) for c in honest(self, handles, params, seeds)
        ]

    monkeypatch.setattr(rollout.GenerateSampler, "sample", wrong)
    options = [*SIZES, "--engines", "generate", "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr(sys, "argv", [str(FILE), *options])
    with pytest.raises(SystemExit, match="generate and slots differ"):
        rollout.main()
    assert not (tmp_path / "figures.json").exists()


def test_both_updates_have_the_same_gradient(rollout):
    update = loaded(FILE.parent / "update.py")
    episodes = update.conversations(8, 3, 8, 100)
    ours = update.ours(update.model_of(100, "cpu"), episodes, 512)()
    assert ours > 0 and update.theirs(update.model_of(100, "cpu"), episodes, 4)() == pytest.approx(ours, rel=1e-4)


def test_the_episodes_of_trl_are_ours(rollout, tiny_chat):
    cfg = resolve(StarPORun, FILE.parent.parent / "configs/quickstart/phase3_starpo.yaml", ["envs=[frozen_lake]"])
    levels, actions = [derive_seed("level", n) for n in range(40)], envs.make("frozen_lake").actions or ()

    def write(context):
        """A move that the context decides; every fifth answer is cut short."""
        choice = derive_seed(*context) % 5
        if choice == 4:
            return tiny_chat.content_ids("<think>so")
        text = f"<think>so</think><answer>{actions[choice]}</answer>"
        return [*tiny_chat.content_ids(text), tiny_chat.stop_id]

    class Player(ReplaySampler):  # no model: it writes what `write` says
        def sample(self, handles, params, seeds):
            new_BN = [write(self._ids[handle]) for handle in handles]
            for handle, new in zip(handles, new_BN, strict=True):
                self.append(handle, new)
            return [Completion(new, [0.0] * len(new), new[-1] == tiny_chat.stop_id) for new in new_BN]

    protocol = Protocol.of(envs.make("frozen_lake"), **cfg.protocol.arguments())
    episodes = [set_up(envs.make("frozen_lake"), protocol, level, "train") for level in levels]
    no_model: Any = None
    ours = play(Player(no_model, [], 0), tiny_chat, episodes, SamplingParams(40), [0] * 40)
    trainer = SimpleNamespace(
        eos_token_ids=[tiny_chat.stop_id],
        _generate_single_turn=lambda contexts, *_, num_generations: ([write(ids) for ids in contexts], None),
    )
    theirs = measure.rollout_func(cfg, tiny_chat)([str(level) for level in levels], trainer)
    assert {t.turns for t in ours} >= {1, 8} and {t.success for t in ours} == {True, False}
    for row, t in enumerate(ours):
        prompt, answer, mask = (theirs[key][row] for key in ("prompt_ids", "completion_ids", "env_mask"))
        assert prompt + answer == t.segments[0].ids
        assert [0] * len(prompt) + mask == [int(on) for on in t.segments[0].mask]
        assert theirs["reward"][row] == pytest.approx(t.reward)


def test_both_iterations_play_and_learn_from_the_same_number_of_tokens(rollout):
    iteration = loaded(FILE.parent / "iteration.py")
    cfg, chat = iteration.config(2, 2, 2, 3), measure.words(512)
    models = [measure.model_of("llama", NARROW) for _ in range(2)]
    before = models[0].lm_head.weight.clone()
    play = iteration.ours(cfg, models[0], chat)
    ours = [play(step) for step in (1, 2)]
    theirs = iteration.theirs(cfg, models[1], chat, 2, 2)
    assert [each[2:] for each in ours] == [each[2:] for each in theirs]
    assert all(each.rollout > 0 and each.update > 0 for each in ours + theirs)
    assert ours[0].turns == 2 * 2 * 2 and ours[0].sampled == 3 * ours[0].turns
    assert all((model.lm_head.weight != before).any() for model in models)


@pytest.mark.parametrize("turns", [2, 5])
def test_a_fitted_context_holds_the_longest_episode(rollout, turns):
    iteration = loaded(FILE.parent / "iteration.py")
    cfg, chat = iteration.config(2, 2, turns, 24), measure.words(512)
    fitted = iteration.fitted(cfg, chat, 2)
    play = iteration.ours(fitted, measure.model_of("llama", NARROW), chat)
    for step in (1, 2):
        played = play(step)
        assert played.turns == 4 * turns and played.sampled == 24 * played.turns, "no episode was cut"
        assert 0 <= fitted.rollout.max_context - played.context / 4 < 256
    changed = fitted.rollout.model_copy(update={"max_context": cfg.rollout.max_context})
    assert fitted.model_copy(update={"rollout": changed}) == cfg


def test_iterations_of_unequal_work_are_not_compared(rollout, tmp_path, monkeypatch, capsys):
    iteration = loaded(FILE.parent / "iteration.py")
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["iteration.py", "--repeats=2", f"--json={file}"])

    def process(script, options):
        slow = 3 if "--only=trl" in options else 1
        turns = {"turns": 640, "sampled": 15360 - missing * slow, "context": 40000}
        return {"iterations": [{"rollout": 2.0 * slow, "update": slow, **turns}], "peak": 1.0, "parameters": 10**6}

    monkeypatch.setattr(iteration._measure, "alone", process)
    missing = 1
    with pytest.raises(SystemExit, match="not the same work"):
        iteration.main()
    assert not file.exists()
    missing = 0
    iteration.main()
    assert [row["model"] for row in json.loads(file.read_text())["rows"]] == ["convgpt", "llama"]
    line = "| 1.0M | 2.00 + 1.00 | 6.00 + 3.00 | **3.0x** (3.0-3.0) | 1.00 | 1.00 | 1.00 |"
    lines = [line.replace("1.0M", f"{model} 1.0M") for model in ("convgpt", "llama")]
    assert capsys.readouterr().out.splitlines()[-2:] == lines


def test_an_exponent_is_the_slope_on_two_logarithmic_scales(rollout):
    scaling = loaded(FILE.parent / "scaling.py")
    xs = [2, 4, 8, 16]
    slope, low, high = scaling.exponent(xs, [[3 * x**1.5, 3 * x, 3 * x**2] for x in xs])
    assert (slope, low, high) == (pytest.approx(1.5), pytest.approx(1.0), pytest.approx(2.0))


@pytest.mark.thorough
def test_scaling_varies_one_thing_at_a_time(rollout, tmp_path, monkeypatch, capsys):
    scaling = loaded(FILE.parent / "scaling.py")
    asked = []

    def prepared(point, new_tokens):
        def iteration(step):
            asked.append(point)
            return scaling.iteration.Iteration(point.turns * point.vocabulary / 512, 2.0, 1, 1, 1)

        return iteration, 1000 * point.width**2

    monkeypatch.setattr(scaling, "prepared", prepared)
    files = [f"--plot={tmp_path / 'plot.png'}", f"--json={tmp_path / 'figures.json'}"]
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--repeats=2", *files])
    scaling.main()
    base = scaling.Point()
    assert all(sum(a != b for a, b in zip(point, base, strict=True)) <= 1 for point in asked)
    assert len(set(asked)) == 13 and len(asked) == 13 * 3  # the base is in all four sweeps
    sweeps = {sweep["axis"]: sweep for sweep in json.loads((tmp_path / "figures.json").read_text())["sweeps"]}
    assert sweeps["turns"]["xs"] == [2, 4, 8, 16]
    assert sweeps["parameters"]["xs"] == [1000 * width**2 for width in (64, 128, 256, 512)]
    for axis, slope in {"turns": 1, "conversations": 0, "parameters": 0, "vocabulary": 1}.items():
        assert sweeps[axis]["exponents"]["rollout"][0] == pytest.approx(slope, abs=1e-9)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert capsys.readouterr().out.splitlines()[-4].startswith("| turns | 2 to 16 | **1.00** (1.00 to 1.00) |")

    drawn = (tmp_path / "plot.png").read_bytes()
    figures = json.loads((tmp_path / "figures.json").read_text())
    for changed, same in (({}, True), ({"seed": 1}, False), ({"commit": "0123abcdef"}, False)):
        (tmp_path / "again.json").write_text(json.dumps(figures | changed))
        again = [f"--redraw={tmp_path / 'again.json'}", f"--plot={tmp_path / 'again.png'}"]
        monkeypatch.setattr(sys, "argv", ["scaling.py", *again])
        scaling.main()
        assert ((tmp_path / "again.png").read_bytes() == drawn) == same, "the figure tells commit and seed"


def test_scaling_plays_what_a_point_says(rollout):
    scaling = loaded(FILE.parent / "scaling.py")
    play, parameters = scaling.prepared(scaling.Point(turns=2, conversations=8, width=64, vocabulary=600), 3)
    found = play(1)
    assert found.turns == 16 and found.sampled == 48
    assert parameters == 600 * 64 + 4 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64) + 64


@pytest.mark.thorough
def test_both_runs_to_the_target_pay_for_training_alone(rollout, monkeypatch):
    target = loaded(FILE.parent / "long" / "target.py")
    small = ["rollout={groups: 4, num_generations: 2, max_completion_length: 3}", "protocol.max_turns=2"]
    small += ["envs=[frozen_lake]", "evaluation={every: 2, episodes: 2}", "algorithm.minibatches=2"]
    cfg = resolve(StarPORun, target.CONFIG, [*small, "trainer.max_steps=6", "trainer.warmup_steps=3"])
    chat, rates, clock = measure.words(512), [], [0.0]
    honest, score = measure.grpo_trainer, target.phase3.score_and_filter

    def trainer(*given, optimizers, **more):
        def stepped(optimizer, *_):
            rates.append(optimizer.param_groups[0]["lr"])
            clock[0] += 1

        optimizers[0].register_step_pre_hook(stepped)
        return honest(*given, optimizers=optimizers, **more)

    def scored(*given):
        clock[0] += 1
        return score(*given)

    def evaluate(*_):
        clock[0] += 100
        return SimpleNamespace(metrics={"evaluation/success": 0.1 * len(race.curve)})

    monkeypatch.setattr(measure, "grpo_trainer", trainer)
    monkeypatch.setattr(target.phase3, "score_and_filter", scored)
    monkeypatch.setattr(target.phase3, "evaluate", evaluate)
    now = SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: clock[0])
    monkeypatch.setattr(target, "time", now)
    for contestant, more, cost in ((target.ours, {}, 1), (target.theirs, {"batch_size": 4}, 4)):
        race = target.Race(cfg, chat, target=0.2)
        contestant(cfg, measure.model_of("llama", NARROW), chat, race, **more)
        assert [row["step"] for row in race.curve] == [0, 2, 4]
        assert [row["cpu"] for row in race.curve] == [row["wall"] for row in race.curve] == [0, 2 * cost, 4 * cost]
    assert rates == [pytest.approx(cfg.learning_rate * min(1, step / 3)) for step in (1, 2, 3, 4) for _ in range(4)]


def test_the_time_to_the_target_is_compared_where_ours_arrives() -> None:
    target = loaded(FILE.parent / "long" / "target.py")
    where = {"commit": "c", "machine": "m", "threads": 1, "load": 0.0, "torch": "t", "transformers": "t"}

    def row(who, seed, minutes, success):
        last = {"step": 10, "success": success, "cpu": 60 * minutes, "wall": 90 * minutes}
        curve = [{"step": 0, "success": 0.2, "cpu": 0.0, "wall": 0.0}, last]
        return where | {"who": who, "seed": seed, "target": 0.65, "curve": curve}

    rows = [row("ours", 0, 2, 0.7), row("trl", 0, 12, 0.66), row("ours", 1, 3, 0.6), row("trl", 1, 50, 0.7)]
    lines = target.markdown(rows).splitlines()
    assert "| ours | 0 | 10 | 2.0 | 3.0 | 0.20 | 0.70 |" in lines
    assert "| ours | 1 | not in 10 | 3.0 | 4.5 | 0.20 | 0.60 |" in lines
    assert lines[-3] == "TRL takes **6.0x** (6.0-6.0) of our CPU time (1 of 2 seeds)."
    assert "takes" not in target.markdown(rows[2:])
    rows[2:] = [row("ours", 1, 3, 0.7), row("trl", 1, 50, 0.5)]
    assert "TRL takes at least **12.4x** (6.0-16.7) of our time (2 of 2 seeds)." in target.markdown(rows)


@pytest.mark.slow
def test_the_plan_is_compared_with_published_figures(rollout, tmp_path, monkeypatch, capsys):
    plan, figures = loaded(FILE.parent / "plan.py"), tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["plan.py", "published", "--json", str(figures)])
    plan.main()
    found = json.loads(figures.read_text())
    rows = {row["what"]: row for row in found["rows"]}
    cache = rows["KV cache of a token, Qwen2.5-0.5B, bfloat16"]
    assert cache["predicted"] == pytest.approx(12.288) and cache["found"] == 12.25
    saved = rows["checkpoint of PPO's actor, 3B, 8 shards (RAGEN v2)"]
    assert saved["predicted"] == pytest.approx(saved["found"], rel=0.1)
    off = [row for row in rows.values() if not 0.75 <= row["predicted"] / row["found"] <= 1.33]
    assert off and all(row["why"] for row in off)  # what is off is explained
    told, text = capsys.readouterr().out, (FILE.parent / "README.md").read_text(encoding="utf-8")
    assert all(table.strip() in text for table in told.split("\n\n"))  # what it prints stands there


def test_the_plan_is_compared_with_the_results_of_this_folder(rollout, tmp_path, monkeypatch, capsys):
    plan, figures = loaded(FILE.parent / "plan.py"), tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["plan.py", "results", "--json", str(figures)])
    plan.main()
    assert capsys.readouterr().out.strip() in (FILE.parent / "README.md").read_text(encoding="utf-8")
    rows = json.loads(figures.read_text())["rows"]
    memory = [row["predicted"] / row["found"] for row in rows if row["unit"] == "GiB"]
    assert all(0.97 <= ratio <= 1.5 for ratio in memory)  # a plan may promise too much, not too little
    times = [row for row in rows if row["unit"] != "GiB"]
    assert len(times) >= 35
    for row in times:  # the range that the plan prints
        kind = "gpu" if row["unit"] == "ms" or row["what"].endswith(("H100", "H200")) else "cpu"
        work = "playing" if row["what"].startswith(("rollout", "a decoding step")) else "learning"
        low, high = plan.seconds.LIKELY[kind, work]
        assert low <= round(row["found"] / row["predicted"], 1) <= high, row["what"]
        assert 0.7 <= row["predicted"] / row["found"] <= 1.5, row["what"]
    found = {name: [] for name in ("a micro-batch", "a decoding step", "its peak")}  # on an H100
    for row in rows:
        if (name := row["what"].partition(",")[0]) in found:
            found[name].append(row["found"] / row["predicted"])
    micro = [f"{ratio:.1f}".lstrip("0") for ratio in sorted(found["a micro-batch"])]
    steps = [f"{ratio:.1f}".lstrip("0") for ratio in sorted(found["a decoding step"])]
    peaks = sorted(1 / ratio for ratio in found["its peak"])
    said = f"micro-batches took {micro[0]} to {micro[-1]} times as long as planned, decoding steps {steps[0]} to"
    said += f" {steps[-1]} times, and their memory was planned {peaks[0]:.2f} to {peaks[-1]:.2f} times as large as it"
    assert said in " ".join((FILE.parents[1] / "docs/results.md").read_text(encoding="utf-8").split())


def test_the_plan_is_compared_with_a_run(rollout, tmp_path, monkeypatch, capsys):
    plan, run = loaded(FILE.parent / "plan.py"), tmp_path / "phase3"
    run.mkdir()
    content = yaml.safe_load((FILE.parent.parent / "configs/quickstart/phase3_starpo.yaml").read_text())
    (run / "run_config.yaml").write_text(yaml.safe_dump(content))
    row = {"rollout/turns": 5.0, "rollout/response_tokens": 12.0, "rollout/context_tokens": 300, "memory": 0.9}
    row |= {"rollout/kept_groups": 16, "seconds/rollout": 2.0, "seconds/update": 4.0}
    lines = [{"step": 0}] + [{"step": step, **row} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    slow = "CPU:memory=16,bandwidth=10,peak=0.1"
    monkeypatch.setattr(sys, "argv", ["plan.py", "runs", str(run), "--device", slow])
    plan.main()
    told = capsys.readouterr().out
    assert "| phase3: rollout of a step |" in told and "| 2.00 s |" in told and "| 0.90 GiB |" in told


@pytest.mark.thorough
def test_a_device_is_measured_beside_its_own_limits(rollout, tmp_path, monkeypatch, capsys):
    device = loaded(FILE.parent / "device.py")
    monkeypatch.setattr(device._measure, "alone", lambda _, options: device.one(*device.arguments(options)))
    sizes = "--conversations 4 --samples 2 --turns 2 --prompt 12 --new 4 --reply 4 --repeats 2".split()
    monkeypatch.setattr(sys, "argv", ["device.py", *sizes, "--json", str(tmp_path / "figures.json")])
    device.main()
    results = json.loads((tmp_path / "figures.json").read_text())
    (row,) = results["rows"]
    assert row["bandwidth"] > 1e8 and row["flops"] > 1e8 and row["slots"] == 4
    assert 0 < row["update_share"] < 1
    assert {name: len(times) for name, times in row["seconds"].items()} == {"rollout": 2, "update": 2}
    assert all(map(math.isfinite, row["predicted"].values()))  # a difference of times may be anything on a busy machine
    assert results["work"]["prompt"] == 12 and capsys.readouterr().out.count("\n| ") == 3


@pytest.mark.thorough
def test_a_gpu_is_measured_by_the_code_that_a_cpu_can_try(rollout, tmp_path, monkeypatch):
    """Every part with two layers; what fails becomes a row with an error, so none may be there."""
    gpu = loaded(FILE.parent / "gpu.py")
    shape = dict(hidden_size=256, head_dim=16, intermediate_size=32)
    monkeypatch.setattr(gpu, "MODELS", {"convgpt": ("convgpt", shape)})
    monkeypatch.setattr(gpu, "compile_layers", lambda *_, **__: None)  # takes a minute
    monkeypatch.setattr(gpu, "layers_are_compiled", lambda _: True)
    monkeypatch.setattr(gpu._measure, "limits", lambda *_, **__: measure.Limits(1e13, 1e13))
    taken = itertools.cycle([2.0, 1.0])  # many tokens, then one: no clock, whose noise exceeds steps of two layers
    monkeypatch.setattr(gpu, "seconds_of", lambda action, *_: action() or next(taken))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "A", "--models", "convgpt", "--out", str(tmp_path)])
    gpu.main()
    results = json.loads((tmp_path / "A.json").read_text())
    rows = results["rows"]
    assert {"commit", "machine", "torch", "trl", "python", "GB_s", "TFLOP_s"} <= results.keys()
    assert not [row for row in rows if "error" in row]
    decoded = [row for row in rows if row["what"] == "decode"]
    assert [row["way"] for row in decoded] == ["eager", "graph"]
    for row in decoded:
        assert row["ms_a_step"] == pytest.approx(1e3 / (gpu.NEW_TOKENS - 1))
        assert row["tokens_per_s"] == pytest.approx(row["rows"] * (gpu.NEW_TOKENS - 1)) and 0 < row["bandwidth"] < 1
    ways = {(row["way"], row["recomputed"]) for row in rows if row["what"] == "train"}
    assert ways == {("eager", True), ("eager", False), ("compiled", False), ("compiled", True)}
    assert sum(row["what"] == "profile" for row in rows) == 2


def test_what_is_neither_compiled_nor_replayed_is_a_row_with_an_error(rollout, tmp_path, monkeypatch):
    gpu = loaded(FILE.parent / "gpu.py")

    def refuse(self: Any, step: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu, "MODELS", dict.fromkeys(("smol", "convgpt"), ("llama", NARROW)))
    monkeypatch.setattr(gpu, "compile_layers", partial(gpu.compile_layers, backend=refuse))
    monkeypatch.setattr(gpu.TimedRecorder, "record", refuse)
    taken = itertools.cycle([2.0, 1.0])
    monkeypatch.setattr(gpu, "seconds_of", lambda action, *_: action() or next(taken))
    report = gpu.Report(480.0, tmp_path / "A.json")
    gpu.decode(report, 1e13, "smol")
    gpu.train(report, 1e13, "smol")
    gpu.profile_steps(report)
    failed = [row for row in report.results["rows"] if row.get("way") in ("graph", "compiled")]
    assert [row["what"] for row in failed] == ["decode", "train", "profile"]
    assert all("error" in row and not row.keys() & {"ms", "ms_a_step", "captures"} for row in failed)
    assert "cannot be recorded" in failed[0]["error"] and "not compiled" in failed[1]["error"]
    assert not [row for row in report.results["rows"] if row["way"] == "eager" and "error" in row]


def test_trl_loads_convgpt_by_the_name_of_its_folder(rollout, tmp_path, monkeypatch):
    from trl.trainer.utils import create_model_from_path

    phases = loaded(FILE.parent / "phases.py")
    shape = dict(NARROW, hidden_size=256, head_dim=16, num_key_value_heads=2)
    phases.ConvGPTForCausalLM(phases.ConvGPTConfig(**shape)).save_pretrained(tmp_path)
    monkeypatch.setattr(phases.ConvGPTConfig, "auto_map", None, raising=False)  # so that it is taken away afterwards
    phases.let_trl_load_convgpt()
    assert type(create_model_from_path(str(tmp_path))) is phases.ConvGPTForCausalLM


def test_what_cannot_be_measured_is_said_before(rollout, monkeypatch, capsys):
    for script, options in {
        "update": ["--conversations", "4"],
        "iteration": ["--groups", "1", "--num-generations", "4"],
        "device": ["--new", "1"],
        "rollout": ["--ragged", "--engines", "continuous-batching"],
    }.items():
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
        with pytest.raises(SystemExit, match="2"):
            loaded(FILE.parent / f"{script}.py").main()
        assert f"{script}.py: error: --" in capsys.readouterr().err


@pytest.mark.thorough
def test_an_update_computes_activations_again_where_its_settings_say_so(rollout):
    update = loaded(FILE.parent / "update.py")
    model, episodes = update.model_of(100, "cpu"), update.conversations(8, 3, 8, 100)
    plain = update.ours(model, episodes, 512)()
    again = update.ours(model, episodes, 512, gradient_checkpointing=True)()
    assert model.is_activation_checkpointing and again == pytest.approx(plain, rel=1e-3)


def test_a_decoded_token_takes_few_operations(rollout, tmp_path, monkeypatch, capsys):
    """ConvGPT of 32 layers, from models of one layer and of two: at most 60 % of 1,565 and of 1,202 (float32)."""
    launches = loaded(FILE.parent / "launches.py")
    shape = dict(hidden_size=256, head_dim=16, intermediate_size=32)
    sizes = {f"{layers} layers": ("convgpt", shape | dict(num_hidden_layers=layers)) for layers in (1, 2)}
    monkeypatch.setattr(launches, "SHAPES", sizes)
    monkeypatch.setattr(sys, "argv", ["launches.py", "--json", str(tmp_path / "figures.json")])
    launches.main()
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    taken = {(row["tuning"], row["precision"], row["layers"]): row["kernels"]["all"] for row in rows}
    for precision, most in (("float32", 0.6 * 1202), ("bfloat16 autocast", 0.6 * 1565)):
        one, two = taken["full", precision, 1], taken["full", precision, 2]
        assert one < two and one + 31 * (two - one) <= most
    assert all(row["dispatched"]["all"] > row["kernels"]["all"] for row in rows)
    alone = [row for row in rows if row["tuning"] == "full"]
    assert all(row["kernels"]["each"]["rms_norm"] == 3 * row["layers"] + 1 for row in alone)
    # the plan's kernels of a layer, in whose place an adapter's weights are not merged
    family, lora = planned_seconds.DECODING["convgpt"], taken["lora", "bfloat16 autocast", 2]
    assert lora - taken["lora", "bfloat16 autocast", 1] == pytest.approx(
        family + 7 * planned_seconds.DECODING_ADAPTED, abs=5
    )
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows) and len({line.count("|") for line in table}) == 1


def test_where_figures_cannot_be_written_nothing_is_measured(rollout, tmp_path, monkeypatch, capsys):
    kernels = loaded(FILE.parent / "kernel_counts.py")
    for words, refused in (
        (["--json", str(tmp_path / "none" / "x.json")], "x.json cannot be written"),
        (["--tokens", "0"], "--tokens: at least 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["kernel_counts.py", *words])
        with pytest.raises(SystemExit, match="2"):
            kernels.main()
        assert refused in capsys.readouterr().err


def test_a_layer_of_convgpt_trains_with_few_kernels(rollout, tmp_path, monkeypatch):
    """In bfloat16, without casts that are undone: at most 95 of the 109 that it took, and 450 KB a token of the 802."""
    kernels = loaded(FILE.parent / "kernel_counts.py")
    monkeypatch.setattr(sys, "argv", ["kernel_counts.py", "--tokens", "8", "--json", str(tmp_path / "figures.json")])
    kernels.main()
    (counted,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    results = FILE.parent / "results"
    measured, before = (
        json.loads((results / f"kernel_counts{each}.json").read_text())["rows"][0] for each in ("", "-before")
    )
    assert counted["kernels"] == measured["kernels"] <= 95 and counted["each"] == measured["each"]
    assert measured["KB_a_token_with_products"] <= 450
    for error in ("error_of_states", "error_of_gradients"):
        assert 0.003 < counted[error] <= 1.1 * before[error] and counted[error] == pytest.approx(
            measured[error], rel=0.1
        )
    # heads of queries, heads of keys and values, the MLP; each product is one forward and two backward, in bfloat16
    outside = [2048, 2048, 1024, 1024, 3072, 3072, 3072]
    for figures, tokens in ((counted, 8), (measured, 1024)):
        bytes_a_token = sum(3 * 2 * (144 + width + 144 * width / tokens) for width in outside)
        of_products = figures["KB_a_token_with_products"] - figures["KB_a_token_without_products"]
        assert of_products == pytest.approx(bytes_a_token / 1000)


@pytest.mark.slow
def test_phases_do_the_same_work_as_trl_and_read_less_padding(rollout, tmp_path, monkeypatch, capsys):
    from transformers import LlamaModel

    phases = loaded(FILE.parent / "phases.py")
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: False)  # ours changes it for its process
    monkeypatch.setitem(phases.SHAPES, "tiny", phases.SHAPES["tiny"] | dict(hidden_size=32, intermediate_size=32))
    read: dict[str, int] = {}
    decode = LlamaModel.forward

    def decode_counted(self, input_ids, **more):
        read["now"] += input_ids.numel()
        return decode(self, input_ids=input_ids, **more)

    def contestant(name, phase, folder, given):
        read["now"] = 0
        figures = phases.figures_of(name, phase, folder, given)
        read[f"{phase} {name}"] = read["now"]
        return figures

    monkeypatch.setattr(LlamaModel, "forward", decode_counted)
    monkeypatch.setattr(phases, "contestant", contestant)
    sizes = "--rows 6 --vocabulary 100 --repeats 1 --epochs 1".split()
    monkeypatch.setattr(sys, "argv", ["phases.py", *sizes, "--json", str(tmp_path / "figures.json")])
    phases.main()
    results = json.loads((tmp_path / "figures.json").read_text())
    assert [(row["phase"], row["epochs"]) for row in results["rows"]] == [("sft", 1), ("dpo", 1)]
    for row in results["rows"]:
        ours, theirs = row["ours"][0], row["trl"][0]
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-6)
        assert (theirs["tokens"], theirs["trained"]) == (ours["tokens"], ours["trained"])
        assert theirs["seconds"] > 0 and ours["seconds"] > ours["ahead"] >= 0
        # The pass that compares the losses, the training, and in DPO the reference (TRL asks it in both passes).
        passes = (2, 2) if row["phase"] == "sft" else (3, 4)
        wide = [
            read[f"{row['phase']} {name}"] / n / row["tokens"] for name, n in zip(("ours", "trl"), passes, strict=True)
        ]
        assert 1 <= wide[0] < 1.3 < wide[1]
    assert results["rows"][1]["ours"][0]["ahead"] > 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table] == ["| phase", "| ---", "| sft", "| dpo"]
    assert len({line.count("|") for line in table}) == 1

    first = {name: dict(results["rows"][1][name][0]) for name in phases.CONTESTANTS}
    phases.require_equal_work("dpo", first, "cpu")
    for figure, wrong in (("trained", 1), ("logps/chosen", 0.1), ("loss", 0.01)):
        changed = first | {"trl": first["trl"] | {figure: first["trl"][figure] + wrong}}
        with pytest.raises(SystemExit, match=figure):
            phases.require_equal_work("dpo", changed, "cpu")


def test_environments_are_timed_beside_the_games_they_are_made_of(rollout, tmp_path, monkeypatch, capsys):
    environments = loaded(FILE.parent / "envs.py")
    monkeypatch.setattr(environments.envs, "names", lambda: ["bandit", "frozen_lake", "sokoban"])
    sizes = ["--levels", "3", "--steps", "20", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["envs.py", *sizes, "--json", str(tmp_path / "figures.json")])
    try:
        environments.main()
    finally:
        sys.modules.pop("pkg_resources", None)  # which gym-sokoban asks for
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(row["env"], row["what"], row["count"]) for row in rows] == [
        (env, what, count)
        for env in ("bandit", "frozen_lake", "sokoban")
        for what, count in (("levels", 3), ("steps", 20))
    ]
    assert all("ours" in row["seconds"] and len(row["seconds"]) == 1 + (row["env"] != "bandit") for row in rows)
    assert capsys.readouterr().out.count("\n| ") == 2 + len(rows)


@pytest.mark.thorough
def test_the_share_of_an_environment_is_part_of_an_iteration(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FILE.parent), *sys.path])
    environments, player = loaded(FILE.parent / "envs.py"), tiny_base(tmp_path / "player", tiny_tokenizer)
    file = tmp_path / "small.yaml"
    file.write_text(
        "device: cpu\nrollout: {groups: 32, num_generations: 2, max_completion_length: 4}\nenvs: [frozen_lake]\n"
        "trainer: {bf16: false}\nevaluation: {suites: {}}\ndistillation: null\n"
    )
    for env in ("frozen_lake", "bandit"):
        found = environments.share(player, file, env)
        assert 0 < found["envs"] < found["iteration"]


def test_chance_and_the_expert_stand_side_by_side(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["baselines.py", "frozen_lake", "--episodes", "20", "--json", str(tmp_path / "figures.json")]
    )
    loaded(FILE.parent / "baselines.py").main()
    found = json.loads((tmp_path / "figures.json").read_text())["envs"]["frozen_lake"]
    assert found["expert"] == {"won": 20, "of": 20, "reward": 1.0} and 0 < found["random"]["won"] < 20
    assert "| frozen_lake | 8 | " in capsys.readouterr().out


def test_every_arm_of_the_learning_benchmark_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    learning = loaded(FILE.parent / "long" / "learning.py")
    for arm, changes in learning.ARMS.items():
        for env in [*learning.ENVS.values(), *learning.EASY_FIRST.values()]:
            cfg = resolve(StarPORun, learning.CONFIG, [*learning.SMALL, *changes, *env])
            assert cfg.algorithm.critical == (arm in ("starpo-s", "ppo", "bilevel-gae"))
    row = {"env": "sokoban", "arm": "ppo", "before": 0.2, "after": 0.4, "low": 0.3, "high": 0.5, "minutes": 2.0}
    row["reward"] = [n / 20 for n in range(20)]
    cheap = row | {"arm": "grpo", "seed": 0, "minutes": 1.0}
    learning.show([row | {"seed": 1}, row | {"seed": 0, "after": 0.6}, cheap])
    table = capsys.readouterr().out.splitlines()
    assert table[-2] == "| sokoban | grpo | 0.40 [0.30, 0.50] | 0.400 | 1.0 | 20.0 | 0.78 |"
    assert table[-1] == "| sokoban | ppo | 0.60 [0.30, 0.50], 0.40 [0.30, 0.50] | 0.500 | 2.0 | 15.0 | 0.28 |"


def test_both_runs_of_gsm8k_are_one_config_and_stand_side_by_side(tmp_path: Path) -> None:
    beside = loaded(FILE.parent / "long" / "gsm8k_trl.py")
    data = tmp_path / "gsm8k.jsonl"
    data.write_text('{"question": "What is 2 + 3?", "answer": "#### 5"}\n')
    given = argparse.Namespace(
        model="folder", data=data, system='Put it into "\\boxed{}".', device="cpu", seed=1, groups=4, num_generations=2,
        new_tokens=16, steps=6, every=3, questions=8, learning_rate=5e-5,
    )  # fmt: skip
    cfg = resolve(StarPORun, beside.CONFIG, beside.changes(given))
    assert cfg.envs[0].options["system"] == given.system and cfg.envs[0].options["path"] == str(data)
    assert cfg.model.tuning == "lora" and cfg.learning_rate == 5e-5 and cfg.rollout.refill == 0
    metrics = {f"evaluation/gsm8k/{name}": value for name, value in (("success", 0.5), ("low", 0.2), ("high", 0.8))}
    rows = [beside.row_of(given, whose, 3, seconds, metrics) for whose, seconds in (("ours", 60.0), ("trl", 180.0))]
    later = beside.row_of(given, "ours", 6, 120.0, metrics)
    first, second = beside.markdown([*rows, later]).splitlines()[2:]
    assert first.endswith("| 1 | 3 | 50 % [20, 80] | 60 | 50 % [20, 80] | 180 |")
    assert second.endswith("| 1 | 6 | 50 % [20, 80] | 120 |  |  |")


def test_every_method_of_the_forgetting_benchmark_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    forgetting = loaded(FILE.parent / "long" / "forgetting.py")
    for arm, changes in forgetting.ARMS.items():
        cfg = resolve(StarPORun, forgetting.CONFIG, [*changes, forgetting.SUITES])
        assert cfg.distillation is not None and (cfg.distillation.coef > 0) == (
            arm in ("distillation", "replay", "reverse KL")
        )
    before = {"math": 0.5, "recall": 0.8, "pairs": 0.9, "repetition": 0.03, "kl": 0.0}
    after = {"math": 0.25, "recall": 0.8, "pairs": 0.9, "repetition": 0.05, "kl": 0.01}
    row = {"arm": "none", "seed": 1, "before": before, "after": after, "minutes": 6.0}
    row["play"] = {"frozen_lake": 0.8, "sokoban": 0.5}
    forgetting.show([row, row | {"seed": 0, "after": before}])
    told = "| none | 2 | 75, 100, 100 | 92 [100, 83] | 3.0 to 4.0 % | 0.0050 | 80 [80, 80] | 50 [50, 50] | 6.0 |"
    assert capsys.readouterr().out.splitlines()[-1] == f"{told} - |"
    forgetting.show([row, row | {"seed": 0, "after": before}], [row | {"steps": 12, "seconds": 1.26}])
    assert capsys.readouterr().out.splitlines()[-1] == f"{told} 1.3 |"

    results = FILE.parent / "results"
    forgetting.show(*(forgetting.read_rows(results / name) for name in ("forgetting.jsonl", "forgetting-alone.jsonl")))
    assert capsys.readouterr().out in (FILE.parent / "README.md").read_text(encoding="utf-8")


def test_the_conversations_of_the_quickstart_are_counted_by_their_answers(tiny_chat: Any) -> None:
    asked = loaded(FILE.parent / "long" / "quickstart_chat.py")
    for kind, make in asked.KINDS.items():
        for seed in range(20):
            turns = make(random.Random(seed))
            assert turns[-1][1] is not None, kind
            for message, expected in turns:
                if re.fullmatch(r"[\d+]+\?", message) and expected not in (None, asked.NO_ANSWER):
                    assert expected == asked.boxed(sum(map(int, message[:-1].split("+"))))
    in_the_data = {without_answer(random.Random(seed))[0] for seed in range(3000)}
    assert in_the_data.isdisjoint(asked.UNKNOWN)
    told, five, question = asked.asked_later(random.Random(0), "city", 1)
    answers: list[str] = []
    stub = SimpleNamespace(chat=tiny_chat, context=4096, answer=lambda *_, **__: Spoken(answers.pop(0)))
    for last, right in ((question[1], True), ("Your city is nowhere.", False)):
        answers[:] = ["Hello.", "Hello.", last]
        assert asked.right(stub, [told, five, question]) is right and not answers


class Spoken:
    """An answer of a model, in one piece."""

    finished = True

    def __init__(self, text: str) -> None:
        self.text, self.written = text, [1]

    def __iter__(self) -> Iterator[str]:
        yield self.text


@pytest.mark.parametrize(
    "text, told",
    [("", "has no rows"), ('{"arm"\n{}\n', "is damaged in line 1"), (None, "cannot be read")],
)
def test_a_file_without_rows_is_refused_in_words(
    text: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    for name in ("learning", "forgetting", "ragen_levels"):
        script = loaded(FILE.parent / "long" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--table", str(file)])
        with pytest.raises(SystemExit, match="2"):
            script.config.run(script.main)
        assert told in capsys.readouterr().err


def test_the_plan_has_the_kernels_that_were_counted(rollout) -> None:
    """By family, alone and with an adapter on the seven linear layers of a layer."""
    results = FILE.parent / "results"
    families = {"convgpt": "convgpt", "smol": "simple", "qwen": "simple", "qwen3": "qwen3"}
    rows = json.loads((results / "kernel_counts.json").read_text())["rows"]
    assert len(rows) == 8
    alone = {row["model"]: row for row in rows if row["tuning"] == "full"}
    for row in rows:
        family = families[row["model"]]
        more = 7 * planned_seconds.ADAPTED.both if row["tuning"] == "lora" else 0
        assert row["kernels"] == pytest.approx(planned_seconds.EAGER[family].both + more, rel=0.08), row["model"]
        if more:
            forward = row["forward"] - alone[row["model"]]["forward"]
            assert forward == pytest.approx(7 * planned_seconds.ADAPTED.forward, abs=6), row["model"]
    for row in json.loads((results / "launches.json").read_text())["rows"]:
        if row["precision"] == "float32":
            continue
        family = {"convgpt-164m": "convgpt", "qwen3-0.6b": "qwen3"}.get(row["model"], "simple")
        planned = planned_seconds.DECODING_FUSED if family == "convgpt" else planned_seconds.DECODING[family]
        if row["tuning"] == "lora":
            planned = planned_seconds.DECODING[family] + 7 * planned_seconds.DECODING_ADAPTED
        assert row["kernels"]["all"] / row["layers"] == pytest.approx(planned, rel=0.06), (row["model"], row["tuning"])


@pytest.mark.parametrize(
    "file",
    ["learning.jsonl", "learning-choices.jsonl", "learning-spa-cues.jsonl", "learning-spa-next-state.jsonl"],
)
def test_the_tables_of_the_learning_benchmark_are_those_of_its_rows(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = FILE.parent
    learning = loaded(folder / "long" / "learning.py")
    monkeypatch.setattr(sys, "argv", ["learning.py", "--table", str(folder / "results" / file)])
    learning.main()
    text = (folder / "README.md").read_text(encoding="utf-8")
    success, collapse = capsys.readouterr().out.split("| environment | algorithm | seed |")
    assert success.strip() in text
    assert collapse.strip() in text or file != "learning.jsonl"  # that table is shown once


@pytest.mark.parametrize(
    ("script", "file"),
    [("rollout", f"rollout{size}") for size in ("", "-vllm", "-trl", "-ragged", "-40m", "-40m-20", "-164m")]
    + [("iteration", f"iteration{size}") for size in ("", "-40m", "-smollm2")]
    + [(script, script) for script in ("update", "phases", "scaling", "device", "envs", "memory", "alarms")]
    + [("phases", "phases-65k"), ("phases", "phases-dpo-h100"), ("gpu", "gpu-h100")]
    + [
        ("launches", "launches-before"),
        ("launches", "launches"),
        ("kernel_counts", "kernel_counts-before"),
        ("kernel_counts", "kernel_counts"),
    ],
)
def test_the_tables_of_the_results_are_those_of_their_figures(
    script: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(FILE.parent), *sys.path])
    figures = json.loads((FILE.parent / "results" / f"{file}.json").read_text(encoding="utf-8"))
    table = loaded(FILE.parent / f"{script}.py").markdown(figures).strip()
    assert table in (FILE.parent / "RESULTS.md").read_text(encoding="utf-8")


def test_the_aim_of_operations_has_the_shares_of_its_figures() -> None:
    def counted(name: str) -> dict[str, dict[str, Any]]:
        rows = json.loads((FILE.parent / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        whole = [row for row in rows if row["model"] == "convgpt-164m" and row.get("tuning", "full") == "full"]
        return {row["precision"]: row for row in whole}

    before, after = counted("launches-before"), counted("launches")
    shares = {
        what: [f"{100 * after[each][what]['all'] / before[each][what]['all']:.0f} %" for each in sorted(after)]
        for what in ("kernels", "dispatched")
    }
    told = "kernels on CUDA {} (bfloat16) and {} (float32)".format(*shares["kernels"])
    told += ", operations {} and {}".format(*shares["dispatched"])
    row = f"| operations of a decoded token, ConvGPT-164M: at most 60 % of what they were | {told} | reached |"
    assert row in (FILE.parent / "RESULTS.md").read_text(encoding="utf-8")


def test_the_table_of_zero_shot_play_is_that_of_its_rows(rollout) -> None:
    module = loaded(FILE.parent / "long" / "zero_shot.py")
    assert module.markdown(module.read_rows(module.RESULTS)).strip() in (FILE.parent / "README.md").read_text()


def test_the_table_of_real_iterations_is_that_of_its_figures() -> None:
    figures = json.loads((FILE.parent / "results" / "scale-out-check.json").read_text(encoding="utf-8"))
    table = loaded(FILE.parent / "scale_out.py").checked(figures).split("\n\n")[-1]
    assert table in (FILE.parent.parent / "docs" / "results.md").read_text(encoding="utf-8")


def test_the_table_of_phase_3_on_pretrained_models_is_that_of_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = loaded(FILE.parent / "long" / "phase3_runs.py")
    monkeypatch.setattr(sys, "argv", ["phase3_runs.py"])
    script.main()
    assert capsys.readouterr().out.strip() in (FILE.parent / "README.md").read_text(encoding="utf-8")

    run, results = tmp_path / "run", tmp_path / "rows.jsonl"
    (run / "best-5").mkdir(parents=True)
    (run / "run_config.yaml").write_text(
        "{seed: 3, model: {name_or_path: models/Small/final}, evaluation: {episodes: 32, final_episodes: 100},"
        " envs: [{name: sokoban}, {name: prompts, label: sums}]}"
    )
    won = {"success": 0.5, "low": 0.4, "high": 0.6}
    better = won | {"success": 0.51}  # not by enough to be the best
    measured = [(5, "evaluation", won), (10, "evaluation", better), (10, "final", won | {"success": 0.75})]
    lines = [{"step": 4, "loss": 1.0}]
    lines += [
        {"step": step} | {f"{kind}/{env}/{key}": value for env in ("sokoban", "sums") for key, value in figures.items()}
        for step, kind, figures in measured
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    older = {"model": "Small", "start": "games", "seed": 3, "env": "sokoban", "step": 0, "split": "test"}
    results.write_text(f"{json.dumps(older)}\n")
    monkeypatch.setattr(script, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", ["phase3_runs.py", "--add", str(run), "--start", "games"])
    for _ in range(2):  # the second time nothing is new
        script.main()
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        assert [(row["env"], row["step"], row["split"], row["levels"]) for row in rows] == [
            (env, step, split, levels)
            for step, split, levels in ((5, "validation", 32), (10, "validation", 32), (5, "test", 100))
            for env in ("sokoban", "sums")
        ]
        expected = "| Small | games | 3 | sums | 5: 50 %, 10: 51 % | 5 | 75 % [40, 60] of 100 |"
        assert expected in capsys.readouterr().out
    (run / "best-5").rmdir()
    with pytest.raises(script.UserError, match="has not been evaluated yet"):
        script.main()


def test_the_tables_of_readme_and_results_are_those_of_the_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = loaded(FILE.parent / "tables.py")
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    root, places = FILE.parent.parent, ("README.md", "docs/results.md", "benchmarks/RESULTS.md")
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in places)
    found = capsys.readouterr().out.strip().split("\n\n")
    assert len(found) == len(tables.TABLES)
    assert all(f"\n\n{table}\n\n" in text for table in found)
    monkeypatch.setattr(sys, "argv", ["tables.py", "other"])
    with pytest.raises(SystemExit):
        tables.main()


def test_the_results_say_which_of_them_are_of_a_gpu() -> None:
    head, *sections = (FILE.parent / "RESULTS.md").read_text(encoding="utf-8").split("\n## ")
    assert [section for section in sections if "NVIDIA" in section] == sections[-3:]
    assert "All of it is of CPUs, but for the last three sections." in " ".join(head.split())


def test_what_came_first_in_a_collapse(capsys: pytest.CaptureFixture[str]) -> None:
    learning = loaded(FILE.parent / "long" / "learning.py")
    std = [0.4] * 10 + [0.1] * 20
    reward = [0.5] * 20 + [0.1] * 10
    row = {"env": "sokoban", "arm": "bonus", "seed": 3, "std": std, "reward": reward}
    row |= {"alarms": ["step 17: one", "step 14: another"]}
    steady = row | {"std": [0.4] * 30, "reward": [0.5] * 30}
    rising = row | {"reward": [n / 30 - 1 for n in range(30)], "alarms": []}
    learning.show_collapse([row, steady, rising])
    table = capsys.readouterr().out.splitlines()
    assert table[2] == "| sokoban | bonus | 3 | 0.50 | 0.10 | 24 | 14 | 14 |"
    assert table[4:] == ["1 of the 2 runs that did not lose half their reward raised an alarm."]


@pytest.mark.slow
def test_a_run_stays_as_light_as_it_began(tmp_path):
    """Sixty iterations, stopped and resumed twice, under the bounds of the long soak."""
    script = FILE.parent / "long" / "soak.py"
    done = python(str(script), "--out", str(tmp_path), "--steps", "60", "--json", str(tmp_path / "f.json"), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "f.json").read_text())
    assert (
        found["figures"]["steps"] >= 50 and found["figures"]["resume_cpu_seconds"]
    )  # the last stretch may be too short
    assert found["figures"]["handles"] <= 0 and found["figures"]["threads"] <= 0 and found["broken"] == []
    lighter = loaded(script).broken(found["figures"] | {"memory_mib": 65.0, "threads": 1})
    assert [words.split()[0] for words in lighter] == ["memory_mib", "threads"]


def test_the_reference_run_keeps_batches_lengths_and_rollouts_of_its_configs(rollout, tmp_path, tiny_chat):
    reference = loaded(FILE.parent / "long" / "reference.py")
    for phase, (kind, name) in enumerate(((SFTRun, "1_sft"), (DPORun, "2_dpo"), (StarPORun, "3_starpo")), 1):
        file = FILE.parent.parent / "configs" / f"phase{name}.yaml"
        cfg: Any = resolve(kind, file, reference.changes(phase, tmp_path, 8))
        own: Any = resolve(kind, file)
        assert cfg.model.tuning == own.model.tuning and cfg.device == "cuda"
        if phase == 3:
            assert cfg.rollout == own.rollout and cfg.protocol == own.protocol and cfg.envs == own.envs
            continue
        assert cfg.data.max_length == own.data.max_length == reference.LENGTHS[phase]
        same = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim")
        assert all(cfg.trainer[key] == own.trainer[key] for key in same)
        row = reference.row(phase, 1, tiny_chat)
        lengths = [len(tiny_chat.encode(said).ids) for said in row.values() if isinstance(said, list)]
        assert all(0.95 * own.data.max_length < length <= own.data.max_length for length in lengths)


def test_ways_of_attention_do_equal_work(rollout, tmp_path, monkeypatch):
    """With stand-ins for the kernels that a CPU lacks. What fails becomes a row with an error, so none may be there."""
    attention = loaded(FILE.parent / "attention.py")
    small = dict(NARROW, num_key_value_heads=1, hidden_size=256, head_dim=16, vocab_size=1024)
    monkeypatch.setattr(attention, "TRAINING", {"convgpt": (2, 24)})
    monkeypatch.setattr(attention.gpu, "model_of", lambda name: measure.model_of("convgpt", small))
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", test_packed.dense)
    monkeypatch.setattr(row_attention, "varlen_attn", test_row_attention.either)
    monkeypatch.setattr(sys, "argv", ["attention.py", "--json", str(tmp_path / "figures.json")])
    attention.main()
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert not [row for row in rows if "error" in row]
    for first, *others in (
        [row["norm"] for row in rows if row["what"] == "decode" and row["model"] == "smol"],
        [row["loss"] for row in rows if row["what"] == "train"],
        [row["norm"] for row in rows if row["what"] == "update"],
    ):
        assert others and others == pytest.approx([first] * len(others), rel=1e-2)
