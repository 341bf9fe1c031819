"""Does `--plan` say what fits and what it takes, for every config file and without touching a thing?"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings as bounds, strategies as st
from open_envs import MISSING
from test_plan import SHAPE, config
from transformers import AutoConfig, AutoModelForCausalLM

import train_phase1_sft as phase1
import train_phase2_dpo as phase2
import train_phase3_starpo as phase3
from envs.protocol import Protocol
from posttrain import plan
from posttrain.config.dpo import DPORun
from posttrain.config.loading import resolve
from posttrain.config.sft import SFTRun
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun
from posttrain.plan import devices, known_models, parts, report, rows, seconds, work
from posttrain.plan.devices import Device, Fleet
from posttrain.plan.episodes import Place, always, learning
from posttrain.plan.parts import Numbers
from posttrain.plan.shape import Shape
from posttrain.plan.work import DataRows, Episodes
from posttrain.types import UserError

ROOT = Path(__file__).parents[2]
GIB = 2**30
GPU = Device("GPU", memory=24, bandwidth=600, peak=70, single=30, link=32, network=1.5, price=1.0)


def run_of(kind: type[SFTRun] | type[DPORun] = SFTRun, **trainer: Any) -> Any:
    source = {"kind": "messages" if kind is SFTRun else "preferences", "path": "rows.jsonl"}
    given = {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 4}
    data = {"sources": [source], "max_length": trainer.pop("max_length", 512), "eval_rows": 8}
    model = {"name_or_path": "unused", **trainer.pop("model", {})}
    settings = {"output_dir": "unused", "model": model, "data": data, "trainer": given | trainer}
    return kind.model_validate(settings)


# ------------------------------------------------------------------------------------------------ every config file


def training_configs() -> list[tuple[type[SFTRun] | type[DPORun] | type[StarPORun], Path]]:
    found = []
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        content = yaml.safe_load(file.read_text())
        kind = StarPORun if "data" not in content else DPORun if "phase2" in file.name else SFTRun
        if "output_dir" in content and "model" in content and ("algorithm" in content or "trainer" in content):
            found.append((kind, file))
    return found


@pytest.mark.thorough
def test_every_config_file_has_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # as if no phase had run, and nothing may be written
    known, shapes = training_configs(), {}
    count = Shape.of

    def counted_once(of_model: Any, model: Any) -> Shape:
        key = of_model.to_json_string() + model.tuning
        shapes[key] = shapes[key] if key in shapes else count(of_model, model)
        return shapes[key]

    monkeypatch.setattr(Shape, "of", counted_once)
    assert len(known) >= 22
    for kind, file in known:
        rows = ROOT / "tests" / "fixtures" / "gsm8k" / "rows.jsonl"  # in place of the data set on the Hub
        local = [f"envs.0.options.path={rows}", "envs.0.options.config=null"] if file.name == "gsm8k.yaml" else []
        cfg = resolve(kind, file, local)
        if MISSING and any(env.name == "deep_coder" for env in getattr(cfg, "envs", [])):
            continue
        plan.print_plan(cfg, "all", str(file))
        table = capsys.readouterr().out.split("\n\n")[1].splitlines()
        assert len(table) == 1 + 3 * len(devices.DEVICES) and "does not fit" not in table[1], file
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "file", "told"),
    [(phase1, "phase1_sft", "hours"), (phase2, "phase2_dpo", "hours"), (phase3, "phase3_starpo", "rollout s")],
)
def test_the_hours_in_the_config_files_are_those_of_the_plan(
    script: Any, file: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    script.main(["--plan", "A10G", f"output_dir={out}"])
    printed = capsys.readouterr().out
    head, row = printed.split("\n\n")[1].splitlines()
    assert told in head and "at most, at one time" in printed and not out.exists()
    hours, _, known = re.split(r"\s{2,}", row)[-3:]
    assert known == "not this card"
    if script is phase3:  # the example of the documentation
        assert printed.strip() in (ROOT / "docs" / "config.md").read_text()
        (peak,) = re.findall(r"at most, at one time +([\d.]+)", printed)
        assert f"(`--plan A10G`: {float(peak):.1f} GiB)" in (ROOT / "docs" / "results.md").read_text()
    assert f"computed {hours} h" in (ROOT / "configs" / f"{file}.yaml").read_text()


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("{name: prompts, options: {path: no_such.jsonl}}", "there is no file no_such.jsonl"),
        ("{name: frozen_lake, label: ice, options: {size: 1}}", "frozen_lake needs size from 2"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(env: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"envs\.0 \((prompts|ice)\): .*{told}"):
        phase3.main(["--plan", "A10G", f"envs=[{env}]", f"output_dir={tmp_path / 'run'}"])


@pytest.mark.thorough
def test_a_device_on_which_a_run_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = f"output_dir={tmp_path / 'run'}"
    own = ["trainer.auto_find_batch_size=false", "trainer.gradient_checkpointing=false"]
    own.append("trainer.per_device_train_batch_size=64")
    with pytest.raises(
        UserError, match=r"(?s)does not fit on A10G.*per_device_train_batch_size=4 trainer.gradient_acc"
    ):
        phase2.main(["--plan", "A10G", *own, out])
    assert "(not as written)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"A10G: This run does not fit.*What helps: .*model.tuning=lora"):
        phase3.main(["--plan", "A10G", "model.name_or_path=Qwen/Qwen2.5-7B-Instruct", out])
    with pytest.raises(UserError, match=r"The largest that fit are rollout.slots=\d+ "):
        phase3.main(["--plan", "A10G", "rollout.slots=500", "rollout.groups=64", out])
    phase2.main(["--plan", *own, out])  # of all devices some are large enough
    table = capsys.readouterr().out
    assert table.count("(not as written)") < table.count("\n") and not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_what_helps_is_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """28.5 GiB of weights alone: no row is short enough."""
    lora = ["--plan", "A10G", "model.name_or_path=Qwen/Qwen2.5-7B-Instruct", "model.tuning=lora"]
    with pytest.raises(UserError, match=r"What helps: model.tuning=qlora, model.dtype=bfloat16, a smaller model\."):
        phase1.main(lora)
    assert "1 does not fit" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"What helps: trainer\.per_device_train_batch_size=4 "):
        phase1.main([*lora[:-1], "model.tuning=qlora"])
    one = "trainer.per_device_train_batch_size=1 trainer.gradient_accumulation_steps=64"
    with pytest.raises(UserError, match=rf"What helps: {one}, "):
        phase1.main([*lora, "model.dtype=bfloat16"])
    phase1.main([*lora, "model.dtype=bfloat16", *one.split()])


def test_devices_that_have_nothing_to_play_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    phase3.main(["--plan", "8xH100", "rollout.groups=3"])
    assert "3 of 8 play" in capsys.readouterr().out
    phase3.main(["--plan", "8xH100"])
    assert " play" not in capsys.readouterr().out.split("\n\n")[1]


def test_reading_the_history_in_every_turn_takes_longer() -> None:
    kept, again = (
        report.plan(SHAPE, config(rollout={"engine": engine}, trainer={"bf16": True}), Fleet(devices.DEVICES[0]))
        for engine in ("slots", "replay")
    )
    assert kept.seconds and again.seconds and kept.seconds.parts["rollout"] < again.seconds.parts["rollout"]
    assert kept.seconds.parts["update"] == again.seconds.parts["update"]


def test_a_number_of_another_phase_or_above_the_longest_row_is_refused() -> None:
    with pytest.raises(UserError, match="`new` is not a number of this phase, which has rows, tokens, trained"):
        phase1.main(["--plan", "A10G:new=3"])
    with pytest.raises(UserError, match="`rows` is not a number of this phase, which has prompt, new, reply"):
        phase3.main(["--plan", "all:rows=3"])
    with pytest.raises(UserError, match="no row is longer than 2048 tokens"):
        phase1.main(["--plan", "A10G:tokens=2049"])


@pytest.mark.parametrize("asked", ["A10", "x8xH100", "0xH100", "H100:price", "H100:prise=2", "T4:memory=16", "all:x"])
def test_what_is_no_device_is_said_in_words(asked: str) -> None:
    with pytest.raises(UserError, match=r"^--plan .*(A100-80|KEY=NUMBER)"):
        devices.fleets(asked)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        *((f"{key}=0", "above 0") for key in ("memory", "bandwidth", "peak", "single", "link", "network", "matmul")),
        ("matmul=1.01", "at most 1"), ("kept=2", "at most 1"), ("turns=0.5", "1 or more"), ("rows=0", "1 or more"),
        ("price=1,price=2", "twice"),
    ],
)  # fmt: skip
def test_a_fact_that_cannot_be_is_refused(written: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^--plan A10G:.*{words}"):
        devices.fleets(f"A10G:{written}")
    (free,) = devices.fleets("A10G:price=0,padding=0,prompt=0,reply=0,stream=1")
    assert free.price == 0


@pytest.mark.parametrize("script", [phase1, phase2, phase3])
@pytest.mark.parametrize("asked", [["--plan", ""], ["--plan="]])
def test_an_empty_plan_starts_no_run(script: Any, asked: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--plan \(empty\) names no device"):
        script.main([*asked, f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_devices_by_name_number_and_facts() -> None:
    assert len(devices.fleets("all")) == 18
    (two,) = devices.fleets("2x8xH100:price=2.5,new=30")
    assert (two.name, two.count, two.price, two.known["new"]) == ("2x8xH100", 16, 40.0, 30)
    assert two.wire < devices.fleets("8xh100")[0].wire
    (own,) = devices.fleets("RTX4090:memory=24,bandwidth=1008,peak=165")
    assert own.device.bandwidth == 1008 and own.price is None


def test_this_machine_is_measured_and_float32_has_a_peak_of_its_own() -> None:
    (here,) = devices.fleets("2xcpu:memory=8")
    limits = here.device
    assert here.count == 2 and limits.waits and limits.memory == 8 and limits.price is None
    assert limits.bandwidth > 0.1 and 0 < limits.operation < 0.01 and limits.peak > 0.0001 and limits.single > 0.0001
    half, whole = (seconds.Cost(SHAPE, Numbers(4, size, "full", False, False), Fleet(GPU)) for size in (2, 4))
    assert half.flops / whole.flops == pytest.approx(GPU.peak / GPU.single)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mkurman/ConvGPT-0.2B-SYNTH-250B-EC", 163_952_769),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("google/gemma-3-270m-it", 268_098_176),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("microsoft/Phi-4-mini-instruct", 3_836_021_760),
        ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624),
        ("openai-community/gpt2", 124_439_808),
        ("state-spaces/mamba-130m-hf", 129_135_360),
    ],
)
def test_published_models_have_as_many_parameters_as_their_cards_say(name: str, parameters: int) -> None:
    kind, sizes = known_models.PUBLISHED[name]
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).num_parameters() == parameters


def test_an_unknown_model_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no config file says which model"):
        phase3.main(["--plan", f"model.name_or_path={tmp_path}/phase2/final"])


@pytest.mark.parametrize(
    "beside", ["output_dir: {saved}", "output_dir: {saved}\nmodel: null", "model: 3\noutput_dir: []"]
)
def test_files_beside_a_config_that_name_no_model_are_passed_over(tmp_path: Path, beside: str) -> None:
    (tmp_path / "phase2.yaml").write_text(beside.format(saved=tmp_path / "phase2"))
    file = tmp_path / "phase3.yaml"
    model = {"name_or_path": f"{tmp_path}/phase2/final"}
    file.write_text(yaml.safe_dump({"output_dir": "x", "envs": ["frozen_lake"], "model": model}))
    with pytest.raises(UserError, match="no config file says which model"):
        phase3.main(["--plan", "--config", str(file)])


def test_an_environment_that_raises_in_a_step_does_not_stop_the_plan() -> None:
    def broken(_: str) -> None:
        raise OSError("gone")

    episode: Any = SimpleNamespace(env=SimpleNamespace(actions=["Left"]), protocol=Protocol(), step=broken)
    assert work._reply(episode, 7.0) == 7.0


# ------------------------------------------------------------------------------------------------------ properties


@bounds(max_examples=40, deadline=None)
@given(
    st.sampled_from([SFTRun, DPORun]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([128, 512, 2048]),
    st.integers(1, 100), st.sampled_from(["full", "lora"]), st.sampled_from([1, 2, 8]), st.booleans(),
)  # fmt: skip
def test_more_rows_or_longer_ones_take_more_and_more_memory_takes_more_rows(
    kind: Any, batch: int, longest: int, memory: int, tuning: str, processes: int, cuda: bool
) -> None:
    shape = SHAPE._replace(adapter=8_000_000 if tuning == "lora" else 0)
    cfg = run_of(kind, max_length=longest, model={"tuning": tuning}, gradient_accumulation_steps=batch)
    longer = run_of(kind, max_length=2 * longest, model={"tuning": tuning}, gradient_accumulation_steps=batch)
    place = Place(memory * GIB, cuda=cuda, processes=processes)

    def taken(cfg: Any, count: int, place: Place) -> int:
        return plan.peak_bytes(rows.rows_memory(shape, cfg, place, count))

    assert taken(cfg, batch, place) <= min(taken(cfg, 2 * batch, place), taken(longer, batch, place))
    best, more = (rows.largest_batch(shape, cfg, place._replace(free=each * GIB)) for each in (memory, 2 * memory))
    assert best is None or (more is not None and more >= best)
    assert best is None or taken(cfg, best, place) <= (1.0 if best == 1 else 0.85) * memory * GIB
    if processes > 1:
        assert taken(cfg, batch, place._replace(sharded=True)) < taken(cfg, batch, place) or tuning == "lora"


@bounds(max_examples=40, deadline=None)
@given(
    st.floats(50, 5000), st.floats(1, 4), st.floats(50, 2000), st.floats(1, 4), st.integers(1, 8), st.booleans(),
    st.integers(16, 200),
)  # fmt: skip
def test_a_faster_device_is_never_slower_and_more_tokens_never_faster(
    bandwidth: float, wider: float, peak: float, stronger: float, each: int, checkpointing: bool, new: int
) -> None:
    slow = Fleet(GPU._replace(memory=200, bandwidth=bandwidth, peak=peak, single=peak / 8), each=each)
    fast = slow._replace(device=slow.device._replace(bandwidth=bandwidth * wider, peak=peak * stronger))
    fast = fast._replace(device=fast.device._replace(single=fast.device.peak / 8))
    cfg = config(
        rollout={"groups": 8, "num_generations": 4, "max_context": 1024},
        trainer={"bf16": True, "gradient_checkpointing": checkpointing, "max_steps": 10},
    )
    work = Episodes(8, 4, turns=3, prompt=200, new=new, reply=30, longest=1024)
    chosen = plan.choose(SHAPE, cfg, Place(200 * GIB, processes=each))

    def hours(fleet: Fleet, work: Episodes) -> float:
        return seconds.of_episodes(SHAPE, cfg, fleet, work, chosen, 1).run

    assert hours(fast, work) <= hours(slow, work) <= hours(slow, work._replace(new=new + 16))
    sft, data = run_of(gradient_checkpointing=checkpointing), DataRows(10_000, 100 + new)

    def of_rows(fleet: Fleet, data: DataRows) -> float:
        return seconds.of_rows(SHAPE, sft, fleet, data, 1, 1).run

    assert of_rows(fast, data) <= of_rows(slow, data) <= of_rows(slow, data._replace(tokens=200 + new))
    assert of_rows(slow, data) <= of_rows(slow, data._replace(rows=20_000))


def test_what_is_sharded_is_divided_and_activations_are_not() -> None:
    cfg = config(rollout={"groups": 16}, algorithm={"beta": 0.1}, trainer={"bf16": True})
    whole, shared = always(SHAPE, cfg), always(SHAPE, cfg, 8)
    assert sum(shared.values()) == pytest.approx(sum(whole.values()) / 8, rel=1e-6)
    alone, divided = (learning(SHAPE, cfg, 4096, True, shards) for shards in (1, 8))
    assert divided["gradients"] == pytest.approx(alone["gradients"] / 8, rel=1e-6)
    assert divided["activations"] == alone["activations"] and divided["gathered weights"] > 0
    sft = run_of()
    place = Place(24 * GIB, processes=8)
    copied, shards = (
        rows.rows_memory(SHAPE, sft, place, 4),
        rows.rows_memory(SHAPE, sft, place._replace(sharded=True), 4),
    )
    for name in ("weights", "optimizer"):
        assert shards["always"][name] == pytest.approx(copied["always"][name] / 8, rel=1e-6)
    assert (
        copied["always"]["buckets of DDP"] == copied["learning"]["gradients"] and not shards["always"]["buckets of DDP"]
    )
    assert shards["learning"]["activations"] == copied["learning"]["activations"]


@pytest.mark.parametrize(
    ("each", "told"), [(1, "16 x 4, at most 64"), (3, "7 x 3, at most 21, 63 a step"), (8, "8 x 1")]
)
def test_a_batch_that_devices_cannot_divide_is_named(each: int, told: str) -> None:
    cfg = run_of(max_length=128, bf16=None, per_device_train_batch_size=16, gradient_accumulation_steps=4)
    found = report.plan(SHAPE, cfg, Fleet(devices.DEVICES[4], each=each))
    assert found.settings == told


def test_a_model_too_large_for_one_device_is_sharded_over_eight() -> None:
    model = known_models.config_of(resolve(StarPORun, ROOT / "configs/models/qwen2.5-0.5b.yaml").model, ROOT)
    assert model.num_hidden_layers == 24
    cfg = run_of(max_length=1024, bf16=None, gradient_checkpointing=True, per_device_train_batch_size=8)
    large = SHAPE._replace(parameters=7_600_000_000, blocks=6_500_000_000, layers=28, hidden=3584, states=3584)
    one, eight = (report.plan(large, cfg, Fleet(devices.DEVICES[4], each=each)) for each in (1, 8))
    assert one.seconds is None and one.problem and eight.sharded and eight.seconds is not None and not eight.problem
    assert one.settings == "1 does not fit"
    whole = cfg.model_copy(update={"trainer": cfg.trainer | {"optim": "adamw_8bit"}})  # which cannot be sharded
    eight = report.plan(large._replace(parameters=30_000_000_000), whole, Fleet(devices.DEVICES[4], each=8))
    assert not eight.sharded and "optim=adamw_8bit of bitsandbytes cannot be" in eight.problem


def test_what_several_processes_cannot_do_is_not_planned_for_them() -> None:
    cfg = config(rollout={"engine": "vllm"}, trainer={"bf16": True})
    one, eight = (report.plan(SHAPE, cfg, Fleet(devices.DEVICES[4], each=each)) for each in (1, 8))
    assert one.seconds is not None and not one.problem
    assert eight.seconds is None and "runs in a single process" in eight.problem
    assert "cannot run" in report.table([eight], cfg)
    cfg = config(rollout={"engine": "vllm_server", "servers": ["http://a:1"]}, trainer={"bf16": True})
    eight = report.plan(SHAPE, cfg, Fleet(devices.DEVICES[4], each=8))
    assert eight.seconds is None and "names 1 servers for 8 processes" in eight.problem


def test_servers_play_side_by_side_and_ahead_of_the_learner() -> None:
    def planned(**rollout: Any) -> report.Planned:
        clip = {"importance_sampling_clip_max": 2.0}
        cfg = config(rollout={"groups": 8, **rollout}, algorithm=clip, trainer={"max_steps": 10, "bf16": True})
        return report.plan(SHAPE, cfg, Fleet(devices.DEVICES[4]))

    two: Any = {"engine": "vllm_server", "servers": ["http://a:1", "http://b:1"]}
    alone, served, ahead = planned(), planned(**two), planned(**two, max_staleness=1)
    assert alone.seconds and served.seconds and ahead.seconds and "KV cache" not in served.parts["playing"]
    sent = 2 * 4 * SHAPE.parameters / (devices.DEVICES[4].network * 1e9)
    assert sent < served.seconds.parts["rollout"] <= alone.seconds.parts["rollout"] + sent
    evaluating = [each.run - 10 * sum(each.parts.values()) for each in (served.seconds, alone.seconds)]
    assert 0 < evaluating[0] < evaluating[1]  # two servers evaluate as well
    assert ahead.seconds.run < served.seconds.run
    for each, devices_paid in ((alone, 1), (served, 3)):
        assert each.hours and each.dollars
        assert each.dollars == pytest.approx([hours * 4.5 * devices_paid for hours in each.hours])


def test_the_seconds_of_a_plain_case() -> None:
    """Decoding reads two bytes of every weight and of the cache; a forward pass takes two operations a weight."""
    numbers = Numbers(4, 2, "full", False, False, compiled=True)
    cost = seconds.Cost(SHAPE, numbers, Fleet(GPU._replace(operation=0.0)))
    read = 2 * 64 * 1600 * SHAPE.cache / 300e9
    read += (2 * (SHAPE.blocks + SHAPE.top) + 32 * 64 * SHAPE.vocabulary) / 420e9
    assert cost.decodes(100, 64, 1600) == pytest.approx(100 * read)
    moved = 2 * 1000 * cost.moved / 420e9
    assert cost.reads(1000, 0, 0) == pytest.approx(1000 * 2 * SHAPE.blocks / 42e12 + moved)
    waiting, kernels = seconds.Cost(SHAPE, cost.numbers, Fleet(GPU)), seconds.DECODING[SHAPE.family] * 24
    assert waiting.decodes(1, 1, 100, launched=True) == pytest.approx(kernels * GPU.operation)
    assert waiting.decodes(1, 1, 100) == pytest.approx(kernels * seconds.REPLAYED)  # of a graph
    one_by_one = seconds.Cost(SHAPE, numbers._replace(compiled=False), Fleet(GPU))
    for tokens in (8, 100_000):  # launches, and bytes
        assert one_by_one.learns(tokens, 0, 0) > 1.2 * waiting.learns(tokens, 0, 0)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mkurman/ConvGPT-0.2B-SYNTH-250B-EC", "convgpt"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "simple"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "simple"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("google/gemma-3-270m-it", ""),
    ],
)
def test_an_adapter_is_launched_and_keeps_the_family(name: str, family: str) -> None:
    kind, sizes = known_models.PUBLISHED[name]
    made = AutoConfig.for_model(kind, **sizes)
    full, lora = (Shape.of(made, ModelSection(name_or_path="unused", tuning=tuning)) for tuning in ("full", "lora"))
    outside = 3 if family == "convgpt" else 0  # linear layers between its embedding, its blocks and its output layer
    assert full.family == lora.family == family
    assert full.adapted == 0 and lora.adapted == 7 * lora.layers + outside
    for compiled, adapter in ((False, seconds.ADAPTED), (True, seconds.ADAPTED_COMPILED)):
        alone, adapted = (
            seconds.Cost(shape, Numbers(4, 2, shape_tuning, False, False, compiled=compiled), Fleet(GPU))
            for shape, shape_tuning in ((full, "full"), (lora, "lora"))
        )
        own = seconds.COMPILED.plus(seconds.CALLED, 1) if compiled else seconds.EAGER[family]
        launches = own.both * lora.layers + adapter.both * lora.adapted
        assert adapted.learns(1, 0, 0) == pytest.approx(launches * GPU.operation) and launches > 60 * lora.layers
        assert adapted.learns(1, 0, 0) > 1.3 * alone.learns(1, 0, 0)
        again = seconds.Cost(lora, Numbers(4, 2, "lora", True, False, compiled=compiled), Fleet(GPU))
        repeated = own.again * lora.layers + adapter.again * lora.adapted
        more = repeated * GPU.operation * (1 if compiled else seconds.RECOMPUTED)
        assert again.learns(1, 0, 0) - adapted.learns(1, 0, 0) == pytest.approx(more)
        kernels = seconds.DECODING[family] * lora.layers + seconds.DECODING_ADAPTED * lora.adapted
        assert adapted.decodes(1, 1, 1, launched=True) == pytest.approx(kernels * GPU.operation)
    cpu = Fleet(GPU._replace(waits=True))  # whose time of a layer is measured without adapters
    assert seconds.Cost(lora, Numbers(4, 4, "lora", False, False), cpu).launches == seconds.ON_CPU


def test_vllm_decodes_with_the_adapter_merged() -> None:
    adapted = SHAPE._replace(adapter=8_000_000, adapted=7 * SHAPE.layers, family="simple")
    work = Episodes(8, 4, turns=3, prompt=200, new=50, reply=30, longest=1024)

    def planned(engine: str, shape: Shape) -> float:
        cfg = config(model={"tuning": "lora"}, rollout={"engine": engine}, trainer={"bf16": True})
        chosen = plan.choose(shape, cfg, Place(200 * GIB))
        return seconds.of_episodes(shape, cfg, Fleet(GPU), work, chosen, 1).parts["rollout"]

    for engine, equal in (("slots", False), ("vllm", True)):
        assert (planned(engine, adapted) == planned(engine, adapted._replace(adapted=0))) is equal


def test_passes_of_the_reference_are_planned_without_the_adapter() -> None:
    adapted = SHAPE._replace(adapter=8_000_000, adapted=7 * SHAPE.layers, family="simple")
    work = Episodes(8, 4, turns=3, prompt=200, new=50, reply=30, longest=1024)

    def reference(shape: Shape) -> float:
        found: list[float] = []
        for beta in (0.0, 0.1):
            cfg = config(model={"tuning": "lora"}, algorithm={"beta": beta}, trainer={"bf16": True})
            chosen = plan.choose(shape, cfg, Place(200 * GIB))
            found.append(seconds.of_episodes(shape, cfg, Fleet(GPU), work, chosen, 1).parts["update"])
        return found[1] - found[0]

    planned = reference(adapted)
    assert planned > 0 and planned == pytest.approx(reference(adapted._replace(adapted=0)))


def test_a_range_is_what_was_measured_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """By kind of device and of work; a card that nobody has measured says so."""
    work = {seconds.PLAYING: 100.0, seconds.LEARNING: 10.0}
    card, cpu = (seconds.Range.of(work, GPU._replace(waits=waits)) for waits in (False, True))
    for found, kind in ((card, "gpu"), (cpu, "cpu")):
        played, learned = (seconds.LIKELY[kind, name] for name in work)
        assert found == pytest.approx([100 * played[end] + 10 * learned[end] for end in (0, 1)])
    told = [str(seconds.Range(*ends)) for ends in ((2.66, 5.02), (0.17, 0.966), (0.0013, 0.0027), (30.2, 57), (2, 2))]
    assert told == ["2.7-5.0", "0.17-0.97", "<0.01", "30-57", "2.0"]
    phase1.main(["--plan", "all"])
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    known = {line.split()[0]: re.split(r"\s{2,}", line)[-1] for line in table[1:]}
    assert {name for name, where in known.items() if where != "not this card"} >= {"H100", "H200"}
    assert known["A10G"] == "not this card" and known["8xH100"] == "H100"


def test_compiled_layers_keep_less_and_move_fewer_bytes() -> None:
    """An H100 held 41.1 GiB where layers were compiled and 60.3 where they were not (benchmarks/results)."""
    eager, compiled = (Numbers(4, 2, "full", False, False, compiled=on) for on in (False, True))
    one_by_one, at_once = (parts.OfAToken.of(SHAPE, numbers) for numbers in (eager, compiled))
    assert 0.5 * one_by_one.kept < at_once.kept < 0.7 * one_by_one.kept and at_once.moved == one_by_one.moved
    assert parts.kernels(eager, cuda=False) > parts.kernels(eager, cuda=True) == 0
    assert parts.kernels(eager._replace(computed=4), cuda=False) == 0
