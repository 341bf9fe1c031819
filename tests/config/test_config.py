"""Is every config file right, every mistake explained, and every answer quick?"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from open_envs import open_or_skip
from pydantic import BaseModel
from tiny_runs import unheard

import envs
from envs.protocol import Protocol
from envs.wording import system_text
from posttrain import config
from posttrain.config import suggestions
from posttrain.config.chat import ChatRun
from posttrain.config.dpo import DPORun
from posttrain.config.evaluation import EvaluateRun
from posttrain.config.pairs import PairsRun
from posttrain.config.sft import SFTRun
from posttrain.config.shared import PRESETS, TrainingRun
from posttrain.config.starpo import StarPORun
from posttrain.config.trl_fields import DPO_LOSSES, SET_BY_SCRIPTS, fields_of_trl
from posttrain.config.yaml_file import read_yaml
from posttrain.types import SamplingParams, UserError, one_line

ROOT = Path(__file__).parents[2]
RUNS: dict[str, Any] = {
    "phase1_sft": SFTRun,
    "phase2_dpo": DPORun,
    "phase3_starpo": StarPORun,
    "evaluate": EvaluateRun,
    "chat": ChatRun,
}
FOLDERS = {"envs": StarPORun}
SCRIPTS = {
    "train_phase1_sft": "phase1_sft",
    "train_phase2_dpo": "phase2_dpo",
    "train_phase3_starpo": "phase3_starpo",
    "evaluate_model": "evaluate",
    "inference_with_improved_settings": "chat",
}
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
PROTOCOLS = [file for file in FILES if file.parent.name == "protocols"]
RUN_FILES = [file for file in FILES if file.parent.name not in ("presets", "protocols", "accelerate")]


def schema_of(file: Path) -> Any:
    if file.parent.name == "models":  # a base model begins with phase 1, one that talks may begin with phase 3
        return StarPORun if "envs" in read_yaml(file) else SFTRun
    others = {"variants": EvaluateRun, "pairs": PairsRun, "answers": PairsRun}
    others |= {"mixture": StarPORun, "own_environment": StarPORun, "gsm8k": StarPORun}
    return FOLDERS.get(file.parent.name) or (RUNS | others)[file.stem]


def named(file: Path) -> str:
    return str(file.relative_to(ROOT / "configs"))


def sft(tmp_path: Path, text: str = "", **changes: object) -> Path:
    """A small valid file for phase 1, with changes; `text` replaces it."""
    given = {
        "output_dir": "runs/x",
        "model": {"name_or_path": "a/b"},
        "data": {"sources": [{"kind": "capybara", "path": "embedded", "rows": 10}]},
        "trainer": {"learning_rate": 1e-5},
    }
    file = tmp_path / "run.yaml"
    file.write_text(text or yaml.safe_dump(given | changes))
    return file


def complaint(schema: type, file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config.resolve(schema, file, list(overrides))
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ the files of configs/


@pytest.mark.parametrize("file", RUN_FILES, ids=named)
def test_every_config_file_is_valid_says_what_it_is_for_and_survives_being_printed(file, tmp_path):
    cfg = config.resolve(schema_of(file), file)
    printed = tmp_path / "printed.yaml"
    printed.write_text(config.dump(cfg))
    assert config.resolve(schema_of(file), printed) == cfg
    assert cfg.hardware
    expected = "cpu" if file.parent.name in ("quickstart", "smollm2", "real") else "cuda"
    assert cfg.device == expected or (schema_of(file) is ChatRun and cfg.device == "auto")
    assert re.match(r"# .+\n(#.*\n)*#   (python \w+\.py|posttrain pairs)", file.read_text()), (
        "the file opens with what it is and its command"
    )


@pytest.mark.parametrize("file", RUN_FILES, ids=named)
def test_the_environments_a_file_names_exist_and_take_its_options(file):
    cfg = config.resolve(schema_of(file), file)
    played = getattr(cfg, "envs", None) or []
    if isinstance(cfg, EvaluateRun) and cfg.suites.envs:
        played = cfg.suites.envs.envs
    for env in played:
        local = {"path": str(ROOT / "tests/fixtures/gsm8k/rows.jsonl"), "config": None} if file.stem == "gsm8k" else {}
        assert open_or_skip(env.name, **env.options | local).name == env.name
    for source in cfg.data.sources if isinstance(cfg, SFTRun) else []:
        for env in source.envs or []:
            assert open_or_skip(env.name, **env.options).name == env.name


def test_every_environment_has_a_file_that_writes_out_its_options():
    """Of the project's own: a file that a user puts into envs/ is not in docs/environments.md."""
    described = re.findall(r"^## (\w+)$", (ROOT / "docs" / "environments.md").read_text(), re.MULTILINE)
    own = [name for name in envs.names() if name in described]
    assert len(own) >= 12
    for name in own:
        (env,) = config.resolve(StarPORun, ROOT / "configs" / "envs" / f"{name}.yaml").envs
        assert env.name == name
        assert set(env.options) == inspect.signature(envs._ENVS[name]).parameters.keys() - {"render_mode"}


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name == "accelerate"], ids=named)
def test_accelerate_files_have_keys_that_accelerate_knows(file):
    from accelerate.commands.config.config_args import ClusterConfig

    given = read_yaml(file)
    assert set(given) <= {field.name for field in dataclasses.fields(ClusterConfig)}
    assert ClusterConfig.from_yaml_file(yaml_file=str(file)).num_processes == given["num_processes"]


@pytest.mark.thorough
def test_two_cpu_processes_really_are_two(tmp_path):
    script = tmp_path / "who.py"
    script.write_text(
        "from pathlib import Path\n"
        "from accelerate import PartialState\n"
        "state = PartialState(cpu=True)\n"
        f"Path({str(tmp_path)!r}, f'{{state.process_index}}.txt')"
        ".write_text(f'{state.num_processes} on {state.device.type}')\n"
    )
    file = ROOT / "configs" / "accelerate" / "two_cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    subprocess.run([*launch, "--config_file", str(file), str(script)], capture_output=True, timeout=300, check=True)
    said = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    assert said == {"0.txt": "2 on cpu", "1.txt": "2 on cpu"}


def test_each_phase_reads_the_folder_of_the_one_before():
    for folder in (ROOT / "configs", ROOT / "configs" / "quickstart", ROOT / "configs" / "smollm2"):
        one, two, three, table, chat = (config.resolve(RUNS[name], folder / f"{name}.yaml") for name in RUNS)
        assert two.model.name_or_path == f"{one.output_dir}/final"
        assert three.model.name_or_path == f"{two.output_dir}/final"
        assert chat.model.name_or_path == f"{three.output_dir}/final"
        handed_over = [one.model.name_or_path, *(f"{run.output_dir}/final" for run in (one, two, three))]
        assert [(name, path) for name, path in table.checkpoints.items() if name != "coin"] == list(
            zip(["base", "phase1", "phase2", "phase3"], handed_over, strict=True)
        )


def test_the_reference_run_is_the_published_one():
    one = config.resolve(SFTRun, ROOT / "configs" / "phase1_sft.yaml")
    assert one.model.name_or_path == "mkurman/ConvGPT-0.2B-SYNTH-250B-EC" and one.data.max_length == 2048
    assert {source.kind: source.rows for source in one.data.sources} == {
        "openmathinstruct": 40_000,
        "capybara": 12_000,
        "demonstrations": 4000,
    }
    wanted = {
        "learning_rate": 2e-5,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    }
    assert wanted.items() <= one.trainer.items()
    two = config.resolve(DPORun, ROOT / "configs" / "phase2_dpo.yaml")
    wanted = {
        "learning_rate": 1e-6,
        "beta": 0.1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
    }
    assert wanted.items() <= two.trainer.items()
    chat = config.resolve(ChatRun, ROOT / "configs" / "chat.yaml")
    improved = chat.presets["improved"].params(8)
    assert improved == SamplingParams(8, temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.15)


# ------------------------------------------------------------------------------------------------------- the schemas


def sections() -> set[type[BaseModel]]:
    def inside(annotation: object) -> set[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return {annotation}.union(*(inside(field.annotation) for field in annotation.model_fields.values()))
        return set(itertools.chain.from_iterable(map(inside, typing.get_args(annotation))))

    return set().union(*map(inside, RUNS.values()))


def test_every_key_has_a_description():
    found = sections()
    assert len(found) > 20
    assert [
        f"{s.__name__}.{name}" for s in found for name, field in s.model_fields.items() if not field.description
    ] == []


def leaves(schema: type[BaseModel], start: str = "", said: str = "") -> dict[str, str]:
    """Every key that holds a value, and what it and the sections around it are said to be."""
    found: dict[str, str] = {}
    for name, field in schema.model_fields.items():
        inside, words = suggestions.field_inside(field), f"{said} {field.description}"
        section = isinstance(inside, type)
        if section and "names" not in str(field.description):  # only "under TRL's names" speaks for every key inside
            words = said
        found |= leaves(inside, f"{start}{name}.", words) if section else {start + name: words}
    return found


def keys_written(value: object, start: str = "") -> set[str]:
    """Every dotted key of a YAML file, sections included."""
    if isinstance(value, list):
        return set().union(*(keys_written(each, start) for each in value))
    if not isinstance(value, dict):
        return set()
    keys = {f"{start}{key}" for key in value}
    return keys.union(*(keys_written(each, f"{start}{key}.") for key, each in value.items()))


OTHER_SCRIPTS = ("evaluation.suites.", "distillation.sources.")  # whose keys these are; each counts as one


def test_a_key_of_phase_3_is_set_in_a_file_or_names_its_source():
    """An option that no file uses and that neither a paper nor RAGEN, verl-agent or TRL has helps nobody."""
    files = [*PRESETS.glob("*.yaml"), *(file for file in RUN_FILES if schema_of(file) is StarPORun)]
    written = set().union(*(keys_written(yaml.safe_load(file.read_text())) for file in files))
    written |= set().union(*(keys_written(yaml.safe_load(file.read_text()), "protocol.") for file in PROTOCOLS))
    source = re.compile(r"RAGEN|TRL|verl|GRPO|arXiv")
    keys = {key: said for key, said in leaves(StarPORun).items() if not key.startswith(OTHER_SCRIPTS)}
    assert len(keys) > 50
    assert [key for key, said in keys.items() if key not in written and not source.search(said)] == []


def test_phase_3_has_at_most_99_keys_of_its_own():
    keys = {key for key in leaves(StarPORun) if key.partition(".")[0] not in TrainingRun.model_fields}
    keys -= leaves(SFTRun).keys()  # all phases measure suites
    own = {key for key in keys if not key.startswith(OTHER_SCRIPTS)} | set(OTHER_SCRIPTS)
    assert len(own) <= 99


def test_every_section_is_strict():
    for section in sections():
        assert section.model_config.get("extra") == "forbid" and section.model_config.get("strict") is True


def test_the_protocol_section_is_the_protocol():
    env = envs.make("frozen_lake")
    assert Protocol.of(env, **config.ProtocolSection().arguments()) == Protocol.of(env) == Protocol()
    written = Protocol(max_turns=3, max_actions_per_turn=2, max_actions=5, think=False, format_penalty=-1.0)
    section = config.ProtocolSection.model_validate(dataclasses.asdict(written))
    assert Protocol.of(env, **section.arguments()) == written


def test_an_episode_takes_its_limits_from_the_environment_where_the_config_has_none():
    env = envs.make("frozen_lake")
    env.max_turns = 20
    assert Protocol.of(env, max_actions_per_turn=3) == Protocol(max_turns=20, max_actions_per_turn=3, max_actions=60)
    assert Protocol.of(env, max_turns=5) == Protocol(max_turns=5, max_actions=5)
    assert Protocol.of(env, max_actions=7) == Protocol(max_turns=20, max_actions=7)


@pytest.mark.parametrize("schema", [SFTRun, DPORun])
def test_the_trainer_section_has_exactly_the_fields_of_trl(schema):
    import trl

    name = {SFTRun: "trl/trainer/sft_config.py:SFTConfig", DPORun: "trl/trainer/dpo_config.py:DPOConfig"}[schema]
    theirs = {field.name for field in dataclasses.fields(getattr(trl, name.split(":")[1]))}
    ours = set(fields_of_trl(name))
    assert ours == theirs
    assert set(SET_BY_SCRIPTS) <= set(fields_of_trl("trl/trainer/sft_config.py:SFTConfig")) | set(
        fields_of_trl("trl/trainer/dpo_config.py:DPOConfig")
    )


def accepts(schema: type[BaseModel], key: str, value: object) -> bool:
    try:
        schema.model_fields["trainer"].metadata[-1]._check({key: value})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schema, trl_class", [(SFTRun, "SFTConfig"), (DPORun, "DPOConfig")])
def test_the_defaults_of_trl_have_the_types_read_for_them(schema, trl_class):
    """If the source were misread, TRL's own values would be refused."""
    import trl

    defaults = getattr(trl, trl_class)(output_dir="x", use_cpu=True)
    allowed = schema.model_fields["trainer"].metadata[-1].allowed()
    values = {key: getattr(getattr(defaults, key), "value", getattr(defaults, key)) for key in allowed}
    # an object that __post_init__ makes out of the dict a person would write
    assert [key for key, value in values.items() if not accepts(schema, key, value)] == ["accelerator_config"]
    wrong = {"learning_rate": "fast", "max_steps": 1.5, "bf16": 1, "lr_scheduler_type": "sine", "save_strategy": "step"}
    assert [key for key, value in wrong.items() if accepts(schema, key, value)] == []


def test_phase_3_uses_the_names_of_trl_where_it_means_the_same():
    theirs = fields_of_trl("trl/trainer/grpo_config.py:GRPOConfig")
    same = ["num_generations", "temperature", "max_completion_length"], ["epsilon", "epsilon_high", "beta", "loss_type"]
    assert set(same[0]) <= set(config.RolloutSection.model_fields) & set(theirs)
    assert set(same[1]) | {"num_iterations", "entropy_coef"} <= set(config.AlgorithmSection.model_fields) & set(theirs)
    assert set(config.StarPOTrainerSection.model_fields) - set(theirs) == {"micro_batch_tokens"}


# ------------------------------------------------------------------------------------------- YAML, overrides, presets


def test_yaml_reads_what_a_person_means(tmp_path):
    text = (
        "a: 2e-5\nb: 1_000\nc: no\nd: 010\ne: 2026-11-20\nf: 1:30\ng: true\nh: ~\ni: -.5\nj: 1e3\nk: '2'\nl: 12e03x\n"
    )
    file = tmp_path / "x.yaml"
    file.write_text(text)
    expected = [2e-5, 1000, "no", 10, "2026-11-20", "1:30", True, None, -0.5, 1000.0, "2", "12e03x"]
    read = list(read_yaml(file).values())
    assert read == expected and [type(value) for value in read] == [type(value) for value in expected]


def test_overrides_win_over_the_file_and_are_typed(tmp_path):
    cfg = config.resolve(
        SFTRun,
        sft(tmp_path),
        ["trainer.learning_rate=2e-5", "model.tuning=lora", "data.sources.0.rows=7", "model.lora.r=4", "run_name=a=b"],
    )
    assert cfg.trainer["learning_rate"] == 2e-5 and cfg.model.tuning == "lora" and cfg.model.lora.r == 4
    assert cfg.data.sources[0].rows == 7 and cfg.run_name == "a=b"
    assert config.resolve(SFTRun, sft(tmp_path, run_name="x"), ["run_name="]).run_name is None


def test_presets_lie_under_the_file_and_the_overrides():
    file = ROOT / "configs" / "phase3_starpo.yaml"
    default = config.resolve(StarPORun, file)
    assert default.algorithm.epsilon_high == 0.28 and default.algorithm.filter.strategy == "top_k"
    vanilla = config.resolve(StarPORun, file, ["algorithm.preset=starpo"])
    assert vanilla.algorithm.epsilon_high == 0.2 and vanilla.algorithm.filter.strategy == "none"
    mixed = config.resolve(
        StarPORun, file, ["algorithm.preset=starpo", "algorithm.epsilon_high=0.3", "rollout.groups=4"]
    )
    assert (mixed.algorithm.epsilon_high, mixed.rollout.groups, mixed.rollout.num_generations) == (0.3, 4, 16)
    assert mixed.rollout.max_completion_length == 96  # the file's own keys stay


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name == "presets"], ids=named)
def test_every_preset_can_be_chosen(file):
    """On the command line a preset is what it says, whatever estimator or filter the file had; overrides still win."""
    published = read_yaml(file)
    assert published["trainer"]["learning_rate"] is None
    published["trainer"]["learning_rate"] = 1e-6  # of model.tuning: full
    for run in ("phase3_starpo.yaml", "envs/frozen_lake.yaml", "quickstart/phase3_starpo.yaml"):
        cfg = config.resolve(
            StarPORun, ROOT / "configs" / run, ["trainer.max_steps=3", f"algorithm.preset={file.stem}"]
        )
        assert cfg.algorithm.preset == file.stem and cfg.trainer.max_steps == 3
        published["trainer"]["max_steps"] = 3
        found = cfg.model_dump()
        for section, keys in published.items():
            for key, value in keys.items():
                if isinstance(value, dict):
                    assert value.items() <= found[section][key].items(), (run, section, key)
                else:
                    assert found[section][key] == value, (run, section, key)


def test_an_environment_may_be_its_name_alone(tmp_path):
    file = ROOT / "configs" / "envs" / "sokoban.yaml"
    assert config.resolve(StarPORun, file, ["envs=[sokoban]"]).envs == [config.TrainingEnvSection(name="sokoban")]


# ---------------------------------------------------------------------------------------------------------- mistakes


def test_all_mistakes_come_at_once_with_their_paths(tmp_path):
    file = sft(
        tmp_path,
        modle={},
        model={"name_or_path": "a/b", "tunning": "lora", "dtype": "bf16", "trust_remote_code": "yes"},
        data={"sources": [{"kind": "capybara", "path": "embedded", "rows": 4e4}], "eval_rows": 0},
        trainer={
            "learnig_rate": 1e-5,
            "seed": 3,
            "bf16": "yes",
            "optim": "adamw_8bti",
            "num_train_epochs": "x",
            "zzzz": 1,
            "max_lenght": 7,
            "warmup_ratio": 0.1,
        },
    )
    message = complaint(SFTRun, file, "sead=1", "run_name=7", "nothing", "output_dir.x=1", "data.sources.3.rows=1")
    for line in (
        "modle: unknown key; did you mean `model`?",
        "model.tunning: unknown key; did you mean `model.tuning`?",
        "model.dtype: 'bf16' is not one of auto, float32, bfloat16, float16; did you mean `bfloat16`?",
        "model.trust_remote_code: should be true or false, but is 'yes'",
        "data.sources.0.rows: should be a whole number, but is 40000.0",
        "data.eval_rows: should be greater than or equal to 1, but is 0",
        "trainer.learnig_rate: unknown key; did you mean `trainer.learning_rate`?",
        "trainer.seed: not set here: it is the key `seed` at the top level",
        "trainer.bf16: should be true or false, but is 'yes'",
        "; did you mean `adamw_8bit`?",
        "trainer.num_train_epochs: should be a number, but is 'x'",
        "trainer.zzzz: unknown key; SFTConfig of the installed TRL has no such field",
        "trainer.max_lenght: unknown key here; did you mean `data.max_length`?",
        "trainer.warmup_ratio: unknown key; did you mean `trainer.warmup_steps`?",
        "sead (on the command line): unknown key; did you mean `seed`?",
        "run_name (on the command line): should be text, but is 7 (in quotes it is text",
        "`nothing` is not an override: write KEY=VALUE",
        "`output_dir.x=1`: output_dir is 'runs/x' and has no keys",
        "`data.sources.3.rows=1`: data.sources is a list of 1, so `3` must be a number below 1",
    ):
        assert line in message, f"{line}\nis not in\n{message}"
    assert message.count("\n") == 19 and "\n\n" not in message


def test_an_environment_by_its_name_alone_has_no_keys_yet():
    quickstart = ROOT / "configs" / "quickstart" / "phase3_starpo.yaml"
    message = complaint(StarPORun, quickstart, "envs=[frozen_lake, sokoban]", "envs.0.weight=2")
    assert "has no keys. Write `envs.0={name: frozen_lake, weight: ...}`." in message
    written = config.resolve(StarPORun, quickstart, ["envs=[{name: frozen_lake, weight: 2}, sokoban]"])
    assert [env.weight for env in written.envs] == [2, 1]


@pytest.mark.parametrize("file", PROTOCOLS, ids=named)
def test_a_protocol_preset_is_under_the_keys_that_are_written(file):
    section = config.ProtocolSection.model_validate({"preset": file.stem, "max_turns": 3})
    assert section.max_turns == 3
    given = {key: value for key, value in section.arguments().items() if key != "max_turns"}
    env = envs.make("frozen_lake")
    assert given | yaml.safe_load(file.read_text()) == given | {"max_turns": 5}
    text = system_text(env, Protocol.of(env, max_turns=3, **given))
    assert env.rules() in text and "up to 5 actions in a turn" in text
    told = complaint(StarPORun, ROOT / "configs" / "phase3_starpo.yaml", "protocol.preset=verl")
    assert "protocol.preset (on the command line): 'verl' is not one of ragen" in told


@pytest.mark.parametrize(
    "schema, file, section",
    [
        (StarPORun, "phase3_starpo.yaml", "protocol"),
        (StarPORun, "models/qwen2.5-0.5b.yaml", "protocol"),
        (StarPORun, "envs/frozen_lake.yaml", "protocol"),  # whose templates are written as null
        (EvaluateRun, "variants.yaml", "suites.envs.protocol"),
        (ChatRun, "quickstart/chat.yaml", "protocol"),
    ],
)
def test_a_protocol_preset_on_the_command_line_is_what_it_says(schema, file, section):
    def found(*overrides):
        cfg = config.resolve(schema, ROOT / "configs" / file, [f"{section}.preset=ragen", *overrides])
        for key in section.split("."):
            cfg = getattr(cfg, key)
        return cfg

    preset = config.ProtocolSection.model_validate({"preset": "ragen"})
    assert found() == preset
    assert found(f"{section}.max_turns=3") == preset.model_copy(update={"max_turns": 3})
    assert found(f"{section}.preset=null") == config.ProtocolSection()


def test_a_protocol_preset_replaces_no_other_section_and_keeps_its_templates_beside_null():
    file = ROOT / "configs" / "phase3_starpo.yaml"
    changed = config.resolve(StarPORun, file, ["protocol.preset=ragen"]).model_dump() | {"protocol": None}
    assert changed == config.resolve(StarPORun, file).model_dump() | {"protocol": None}
    section = config.ProtocolSection.model_validate({"preset": "ragen", "system": None, "max_turns": None})
    assert "You're a helpful assistant" in (section.system or "") and section.max_turns is None


@pytest.mark.parametrize(
    "schema, file, override, words",
    [
        (StarPORun, "gsm8k.yaml", "protocol.system=Think.", "`protocol.system` is shown by no environment"),
        (
            EvaluateRun,
            "variants.yaml",
            "suites.envs={envs: [prompts], protocol: {feedback: x}}",
            "`suites.envs.protocol.feedback` is shown by no environment",
        ),
        (
            StarPORun,
            "phase3_starpo.yaml",
            "protocol={preset: ragen, style: compact}",
            "`protocol.preset: ragen` is in the words of `style: plain`",
        ),
    ],
)
def test_words_that_no_environment_would_show_are_refused(schema, file, override, words):
    assert words in complaint(schema, ROOT / "configs" / file, override)


def test_a_source_may_be_a_path_alone_and_has_the_kind_that_its_phase_reads() -> None:
    sources = "[mine.jsonl, {path: a.csv, weight: 2}, {kind: auto, path: openai/gsm8k}]"
    cfg = config.resolve(SFTRun, ROOT / "configs" / "phase1_sft.yaml", [f"data.sources={sources}"])
    found = [(source.kind, source.path, source.weight) for source in cfg.data.sources]
    assert found == [("messages", "mine.jsonl", 1), ("messages", "a.csv", 2), ("gsm8k", "openai/gsm8k", 1)]
    cfg = config.resolve(DPORun, ROOT / "configs" / "phase2_dpo.yaml", ["data.sources=pairs.jsonl"])
    assert [(source.kind, source.path) for source in cfg.data.sources] == [("preferences", "pairs.jsonl")]
    cfg = config.resolve(StarPORun, ROOT / "configs" / "phase3_starpo.yaml", ["distillation.sources=[a.jsonl]"])
    assert cfg.distillation is not None and cfg.distillation.sources[0].kind == "prompts"
    cfg = config.resolve(PairsRun, ROOT / "configs" / "pairs.yaml", ["sources=[a.jsonl]", "output_dir=runs/x"])
    assert cfg.sources[0].kind == "prompts"
    message = complaint(SFTRun, ROOT / "configs" / "phase1_sft.yaml", "data.sources=[a.jsonl]", "data.sources.0.rows=5")
    assert "Write `data.sources.0={path: a.jsonl, rows: ...}`." in message
    for wrong in ("[3]", "3", "[{kind: auto}]", "[{path: 3}]", "[[a.jsonl]]", "[{kind: [], path: a}]"):
        complaint(SFTRun, ROOT / "configs" / "phase1_sft.yaml", f"data.sources={wrong}")


@pytest.mark.parametrize(
    "change, remedy",
    [
        ("model=", "model (on the command line): should be a section, but is empty"),
        ("model.name_or_path=", "model.name_or_path (on the command line): should be text, but is empty"),
        ("data.sources=[]", "data.sources (on the command line): must not be empty"),
        ("model.lora.target_modules=3", "should be text, but is 3"),
        ("learning_rate=1e-5", "unknown key here; did you mean `trainer.learning_rate`?"),
        ("model.dtype=bfloat16", "an update is smaller than the gap to the next such number. Leave model.dtype out"),
        ("model.dtype=float16", "or write `model.tuning: lora`, whose adapter is float32"),
        ("trainer.fsdp=true", "sharding is chosen where processes are started: `accelerate launch --config_file"),
        ("trainer.fsdp_config={}", "configs/accelerate/fsdp2.yaml"),
        ("trainer.deepspeed=zero3.json", "zero2.yaml and zero3.yaml for DeepSpeed (phases 1 and 2)"),
        ("trainer.push_to_hub=true", "`hf upload NAME/MODEL OUTPUT_DIR/final`"),
        ("trainer.bf16_full_eval=true", "it would round the trained weights for good"),
        ("model.trust_remote_code=true", "write the 40-digit commit"),
        ("data.sources.0.kind=ultrafeedback", "this phase reads openmathinstruct, gsm8k, capybara, messages"),
        ("data.sources.0.code=mask", "`code` belongs to the kind openmathinstruct, not to capybara"),
        ("data.sources.0.kind=demonstrations", "name the environments that are demonstrated"),
        ("trainer.output_dir=x", "it is the key `output_dir` at the top level"),
        ("trainer.max_length=5", "it is `data.max_length`"),
        ("seed=-1", "seed (on the command line): should be greater than or equal to 0, but is -1"),
        (
            "trainer.learning_rate=.nan",
            "trainer.learning_rate (on the command line): should be a number, but is '.nan'",
        ),
        ("hardware=[", "The value of `hardware=[` is not YAML"),
        ("hardware=" + 5000 * "[", "nested too deep"),
        ("hardware=&a [*a]", "an alias (`*name`) is not read here"),
        ("seed=" + 5000 * "9", "is not YAML: Exceeds the limit"),
        (f"seed={10**23}", "seed (on the command line): should be at most 2147483647, but has 24 digits"),
        ("data.seed=2147483648", "should be at most 2147483647, but has 10 digits"),
        ("trainer.learning_rate=1e300", "learning_rate (on the command line): should be at most 1e+30, but is 1e+300"),
        ("data.sources.0.weight=1e9", "should be less than or equal to 1000, but is 1000000000.0"),
        ("run_name=" + 300 * "x", "run_name (on the command line): String should have at most 128 characters"),
        ('run_name="a\\0b"', "without zero bytes, but is 'a\\x00b'"),
        ('hardware="\\uD800"', "text of whole characters"),
        (".".join("abcdefghijklmnopqrstuvwxyz") + "=1", "is not an override"),
        ("data.sources.²=1", "`²` must be a number below 1"),
    ],
)
def test_a_mistake_names_its_remedy(tmp_path, change, remedy):
    assert remedy in complaint(SFTRun, sft(tmp_path), change)


@pytest.mark.parametrize(
    "change, remedy",
    [
        ("rollout.groups=999999999999999999999", "rollout.groups (on the command line): should be less than or equal"),
        ("rollout={groups: 65536, num_generations: 64}", "4194304 episodes in a step: at most 1048576"),
        ("envs.0.options={size: 1.0e+300}", "'size' should be at most 1e+30"),
        (
            "algorithm.preset=starpos",
            "there is no preset `starpos`, only gigpo, ragen2, starpo, starpo-s; did you mean",
        ),
        ("algorithm.gamma_high=0.9", "`gamma_high` belongs to gigpo and bilevel_gae, and this run has"),
        ("algorithm.critic.clip=0.2", "`critic` belongs to gae and bilevel_gae, and this run has `advantage: grpo`"),
        ("algorithm.gamma=0.5", "`gamma` belongs to gae and bilevel_gae, and this run has"),
        (
            "algorithm={advantage: rloo, advantage_std: false}",
            "`advantage_std` belongs to grpo and brpo and gigpo",
        ),
        ("algorithm={loss_type: cispo, epsilon: 0.1, epsilon_high: 5}", "`epsilon` belongs to ppo_clip and gspo, and"),
        ("algorithm={loss_type: cispo, epsilon_high: 5, delta: 7}", "`delta` belongs to ppo_clip, and this run has"),
        ("algorithm.step_weight=0.5", "`step_weight` belongs to gigpo"),
        ("rollout.env_groups=8", "unknown key; did you mean `rollout.groups`?"),
        ("env_groups=8", "unknown key here; did you mean `rollout.groups`?"),
        ("algorithm.importance=truncate", "unknown key; did you mean `algorithm.importance_sampling_clip_max`?"),
        ("algorithm.mask_truncated=true", "unknown key; did you mean `algorithm.mask_truncated_completions`?"),
        ("algorithm.advantage=maxrl", "'maxrl' is not one of grpo, rloo, brpo, arpo, reinforce_pp"),
        ("algorithm.filter={strategy: soft, value: 0.9}", "`filter.value` belongs to top_k and top_k_abs and top_p"),
        ("algorithm.filter={strategy: none, value: 0.9}", "and this run has `filter.strategy: none`: leave it out"),
        ("algorithm.filter={strategy: none, largest: false}", "`filter.largest` belongs to top_k and"),
        ("algorithm.minibatches=5", "(5) is more than the groups that a step can keep (4)"),
        ("algorithm={preset: starpo, minibatches: 9}", "(9) is more than the groups that a step can keep (8)"),
        (
            "algorithm={advantage: gae, critic: {warmup_steps: 200}}",
            "(200) leaves no step to the policy: write less than",
        ),
        (
            "algorithm={loss_type: gspo, epsilon: 3e-4, epsilon_high: 4e-4}",
            "would weigh a sequence by its length: write `aggregation: sequence_mean`",
        ),
        ("algorithm.delta=1.1", "must lie above 1 + epsilon_high"),
        ("algorithm.loss_type=cispo", "bounds the ratio itself: write a number above 1, e.g. 5"),
        ("algorithm.loss_type=gspo", "write a small `epsilon` and `epsilon_high`, e.g. 3e-4 and 4e-4"),
        ("algorithm={loss_type: gspo, epsilon: 3e-4}", "write a small `epsilon` and `epsilon_high`"),
        ("algorithm.filter={strategy: soft, metric: length}", "`metric: reward_std`"),
        ("algorithm.filter={strategy: top_k_abs, value: 99}", "(99) is more groups than are played"),
        ("algorithm.filter={strategy: top_k_abs, value: 1}", "is fewer groups than there are environments (2)"),
        ("algorithm.filter={strategy: top_k_abs, value: 0.5}", "is a number of groups for top_k_abs"),
        ("algorithm.filter={strategy: top_p, value: 2}", "is a share for top_p"),
        ("algorithm.filter={strategy: top_p, value: 0.9, metric: reward}", "write top_p_softmax"),
        ("rollout.max_completion_length=4096", "must be smaller than max_context"),
        ("rollout.num_generations=1", "`rollout.num_generations: 1` makes groups of one: play at least 2"),
        ("envs=[]", "envs (on the command line): must not be empty"),
        ("envs=[sokoban, sokoban]", "envs has sokoban twice"),
        ("rollout.context_turns=3", "context is full: leave it out or change context"),
        ("rollout.context=last_k", "write context_turns, how many turns it shows"),
        ("rollout.context=single_turn", "write context_turns, how many turns it shows"),
        ("rollout.context=last", "did you mean `last_k`?"),
        ("trainer.lerning_rate=1", "did you mean `trainer.learning_rate`?"),
        ("lerning_rate=1", "did you mean `trainer.learning_rate`?"),  # not the critic's
        ("model.dtype=bfloat16", "an update is smaller than the gap to the next such number. Leave model.dtype out"),
        ("trainer.fsdp=full_shard", "sharding is chosen where processes are started"),
        ("trainer.deepspeed=zero3.json", "sharding is chosen where processes are started"),
        ("trainer.push_to_hub=true", "`hf upload NAME/MODEL OUTPUT_DIR/final`"),
    ],
)
def test_mistakes_of_phase_3(change, remedy):
    assert remedy in complaint(StarPORun, ROOT / "configs" / "phase3_starpo.yaml", change)


@pytest.mark.parametrize(
    ("schema", "file", "key", "value"),
    [
        (ChatRun, "chat.yaml", "presets.improved.temperature", "{}"),
        (EvaluateRun, "evaluate.yaml", "settings.0.temperature", "{}"),
        (PairsRun, "pairs.yaml", "temperatures", "[0, {}]"),
        (StarPORun, "phase3_starpo.yaml", "rollout.temperature", "{}"),
        (StarPORun, "phase3_starpo.yaml", "evaluation.temperature", "{}"),
    ],
)
def test_a_temperature_that_makes_logits_infinite_is_refused(schema, file, key, value):
    path = ROOT / "configs" / file
    for cold in ("1e-300", "1e-6"):
        message = complaint(schema, path, f"{key}={value.format(cold)}")
        assert "divides logits until they are infinite: the smallest temperature above 0 is 1e-05" in message
    config.resolve(schema, path, [f"{key}={value.format('1e-5')}"])


# ------------------------------------------------------------------------------------------- learning rates, options

REFERENCE = {SFTRun: "phase1_sft", DPORun: "phase2_dpo", StarPORun: "phase3_starpo"}


@pytest.mark.parametrize(
    ("schema", "full", "adapter"), [(SFTRun, 2e-5, 2e-4), (DPORun, 1e-6, 1e-5), (StarPORun, 1e-6, 1e-5)]
)
def test_the_learning_rate_follows_from_the_tuning(schema, full, adapter):
    file = ROOT / "configs" / f"{REFERENCE[schema]}.yaml"
    for tuning, rate in {"full": full, "lora": adapter, "qlora": adapter}.items():
        for unwritten in ([], ["trainer.learning_rate=null"]):
            cfg = config.resolve(schema, file, [f"model.tuning={tuning}", *unwritten])
            assert cfg.learning_rate == rate and cfg.low_rate() is None
            assert yaml.safe_load(config.dump(cfg))["trainer"]["learning_rate"] == rate  # what --print-config shows
        written = config.resolve(schema, file, [f"model.tuning={tuning}", f"trainer.learning_rate={rate / 9}"])
        assert written.learning_rate == rate / 9 and written.low_rate() is None
        low = config.resolve(schema, file, [f"model.tuning={tuning}", f"trainer.learning_rate={rate / 10}"])
        assert f"so low for model.tuning={tuning} that almost nothing will be learned" in (low.low_rate() or "")


def test_a_preset_on_an_adapter_has_an_adapters_learning_rate():
    file = ROOT / "configs" / "quickstart" / "phase3_starpo.yaml"
    cfg = config.resolve(StarPORun, file, ["algorithm.preset=ragen2", "model.tuning=lora"])
    assert cfg.learning_rate == 1e-5


@pytest.mark.parametrize("schema", RUNS.values())
def test_no_config_changes_once_it_is_made(schema):
    name = next(name for name, known in RUNS.items() if known is schema)
    cfg = config.resolve(schema, ROOT / "configs" / f"{name}.yaml")
    for section, key in [(cfg, "seed"), (cfg.chat, "template")]:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, key, getattr(section, key))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frozen_weights_may_be_half_precision(dtype):
    for schema, name in REFERENCE.items():
        file = ROOT / "configs" / f"{name}.yaml"
        for tuning in ("lora", "qlora"):
            assert config.resolve(schema, file, [f"model.tuning={tuning}", f"model.dtype={dtype}"])


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        ("--learning_rate 1e-5", "`trainer.learning_rate=1e-5`"),
        ("--learning-rate=1e-5 seed=1", "`trainer.learning_rate=1e-5`"),
        ("seed=1 --bf16", "`trainer.bf16=true`"),
        ("--bf16 seed=1", "`trainer.bf16=true`"),
        ("--seed 3", "`seed=3`"),
        ("--model_name_or_path some/model", "`model.name_or_path=some/model`"),
        ("--push_to_hub", "`hf upload NAME/MODEL OUTPUT_DIR/final`"),
        ("--print_config", "did you mean `--print-config`?"),
        ("--wibble", "--help lists them"),
    ],
)
def test_an_option_of_other_trainers_names_the_key(argv, remedy):
    for schema, name in REFERENCE.items():
        with pytest.raises(UserError) as error:
            config.load(schema, ROOT / "configs" / f"{name}.yaml", argv.split())
        assert remedy in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("script", "argv", "remedy"),
    [
        ("phase1_sft", "--model X --lora --lr 1", "`model.name_or_path=X model.tuning=lora trainer.learning_rate=1`"),
        ("phase1_sft", "--lora_r 8", "`model.lora.r=8`"),
        ("phase1_sft", "--data mine.jsonl", "`'data.sources=[{kind: messages, path: mine.jsonl}]'`"),
        ("phase2_dpo", "--dataset mine.jsonl", "`'data.sources=[{kind: preferences, path: mine.jsonl}]'`"),
        ("phase3_starpo", "--envs frozen_lake sokoban", "`'envs=[frozen_lake, sokoban]'`"),
        ("phase3_starpo", "--evaluation.temperature 0.5", "`evaluation.temperature=0.5`"),
        ("phase3_starpo", "--batch_size 8", "`rollout.groups=8`"),
        ("evaluate", "--model runs/mine/final", "`'checkpoints={mine: runs/mine/final}'`"),
        ("chat", "--model runs/mine/final", "`model.name_or_path=runs/mine/final`"),
        ("chat", "--temperature 0.5", "`presets.improved.temperature=0.5`"),
        ("phase1_sft", "--lr", "`trainer.learning_rate=VALUE`"),
        (
            "phase1_sft",
            "--lr 1 --wibble",
            "`trainer.learning_rate=1`. There is no key like --wibble; --help lists them.",
        ),
        ("phase1_sft", "mine.yaml", "write --config mine.yaml"),
        ("phase1_sft", "mine.jsonl", "write 'data.sources=[{kind: messages, path: mine.jsonl}]'"),
        ("phase1_sft", "some/model", "write model.name_or_path=some/model"),
        ("phase1_sft", "lr=1e-5", "did you mean `trainer.learning_rate`?"),
        ("phase1_sft", "lora=true", "did you mean `model.tuning=lora`?"),
        ("phase1_sft", "model.lora=true", "write model.tuning=lora"),
        ("phase1_sft", "model=X", "should be a section, but is 'X'; write model.name_or_path=X"),
        ("phase1_sft", "model.name=X", "did you mean `model.name_or_path`?"),
        ("phase1_sft", "trainer=5", "should be a section, but is 5"),
        ("phase1_sft", "model_name=X", "did you mean `model.name_or_path`?"),
        ("phase1_sft", "data=mine.jsonl", "write 'data.sources=[{kind: messages, path: mine.jsonl}]'"),
        ("phase3_starpo", "envs=frozen_lake", "should be a list, but is 'frozen_lake'; write 'envs=[frozen_lake]'"),
        ("phase3_starpo", "env=frozen_lake", "did you mean `envs`?"),
        ("evaluate", "checkpoints=runs/mine", "write 'checkpoints={mine: runs/mine}'"),
        ("evaluate", "suites.math.sources=gsm8k", "write 'suites.math.sources=[gsm8k]'"),
        ("evaluate", "checkpoints={mine: runs/mine}", "write suites.preferences.reference=mine, or another"),
        ("evaluate", "suites.math.headline=warm", "the setting `warm`, which `settings` does not list: write one of"),
    ],
)
def test_every_dead_end_names_what_works(script, argv, remedy):
    with pytest.raises(UserError) as error:
        config.load(RUNS[script], ROOT / "configs" / f"{script}.yaml", shlex.split(argv) if "{" not in argv else [argv])
    assert remedy in str(error.value)


def written_value(annotation: Any) -> str:
    """Some value of this type, as it is typed."""
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is typing.Literal:
            return str(typing.get_args(part)[0])
        if part in (bool, int, float, str):
            return {bool: "true", int: "3", float: "0.5", str: "x"}[part]
    return "x"


@pytest.mark.parametrize(
    "script", [next(iter(RUNS)), *(pytest.param(s, marks=pytest.mark.thorough) for s in [*RUNS][1:])]
)
def test_any_key_as_an_option_is_answered_with_an_override_that_is_read(script):
    """Whether written in full or by its last name; what stays wrong is the value alone."""
    schema, file = RUNS[script], ROOT / "configs" / f"{script}.yaml"
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    wrong = []
    for place in suggestions.places(schema, given):
        for name in (place.path, place.path.rpartition(".")[2]):
            (text,) = shlex.split(suggestions.override(schema, given, name, [written_value(place.annotation)]) or "")
            if text.endswith("KEY=VALUE"):  # a section: one value does not say which of its keys is meant
                assert name != place.path or place.inside or suggestions.is_dict(place.annotation)
                continue
            try:
                config.resolve(schema, file, [text])
            except UserError as problem:
                message = str(problem)
                if re.search(
                    "unknown key|should be a (section|list)|has no keys|not an override|is a list of", message
                ):
                    wrong.append((name, text, message))
    assert not wrong


def test_a_config_of_another_script_is_told_by_its_name(tmp_path):
    for schema, name in REFERENCE.items():
        for file in [*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/quickstart/*.yaml")]:
            if file.name == "variants.yaml":
                continue
            others = {"mixture": "phase3_starpo", "own_environment": "phase3_starpo", "gsm8k": "phase3_starpo"}
            others["answers"] = "pairs"
            own = others.get(file.stem, file.stem)
            if own == name:
                continue
            script = {each: f"python {each}.py" for each in SCRIPTS}
            wanted = next((script[each] for each in SCRIPTS if SCRIPTS[each] == own), "posttrain pairs")
            assert f"Write: {wanted} --config {file}" in complaint(schema, file)

    # with a mistake of its own, too; but a file that lacks something, or has mistakes alone, is nobody else's
    file = tmp_path / "mine.yaml"
    given = yaml.safe_load((ROOT / "configs/phase2_dpo.yaml").read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump(given | {"sed": 1}), encoding="utf-8")
    assert "train_phase2_dpo.py" in complaint(SFTRun, file)
    for text in ("{}", "sed: 1", "data: {sources: [{kind: messages, path: a.jsonl}]}", "model: {name_or_path: a/b}"):
        file.write_text(text, encoding="utf-8")
        message = complaint(SFTRun, file)
        assert "Write: " not in message and "output_dir: missing; write `output_dir: ...`" in message
    file.write_text("model: a/b\ndata: mine.jsonl", encoding="utf-8")
    assert "model: should be a section, but is 'a/b'; write `model: {name_or_path: a/b}`" in complaint(SFTRun, file)
    assert "write `data: {sources: [{kind: messages, path: mine.jsonl}]}`" in complaint(SFTRun, file)


def test_four_bit_weights_are_neither_vllms_nor_a_second_critic():
    reference = ROOT / "configs" / "phase3_starpo.yaml"
    separate = "algorithm={advantage: gae, critic: {kind: separate}}"
    assert "`algorithm.critic.kind: shared`" in complaint(StarPORun, reference, separate, "model.tuning=qlora")
    found = complaint(StarPORun, reference, "rollout.engine=vllm", "model.tuning=qlora")
    assert "`rollout.engine: vllm` is not given four-bit weights: write `rollout.engine: auto`" in found


@pytest.mark.parametrize("script", ["phase1_sft", "phase2_dpo", "phase3_starpo"])
def test_suites_have_a_budget_in_all_phases_where_none_is_written(script):
    file = ROOT / "configs" / "quickstart" / f"{script}.yaml"
    assert "budget" not in read_yaml(file).get("evaluation", {})
    assert config.resolve(RUNS[script], file, []).evaluation.budget == 0.1


FILTERED = "algorithm.filter={strategy: none, keep_zero: true}"


@pytest.mark.parametrize(
    "advantage, fits",
    [(name, False) for name in ("grpo", "rloo", "reinforce_pp_baseline", "gigpo")]
    + [(name, True) for name in ("brpo", "arpo", "reinforce_pp", "gae", "bilevel_gae")],
)
def test_who_compares_within_a_group_needs_groups_of_two(advantage, fits):
    file = ROOT / "configs" / "phase3_starpo.yaml"
    changes = ["rollout.num_generations=1", FILTERED, f"algorithm.advantage={advantage}"]
    if fits:
        assert config.resolve(StarPORun, file, changes).algorithm.advantage == advantage
    else:
        assert f"`algorithm.advantage: {advantage}` compares the episodes" in complaint(StarPORun, file, *changes)


@pytest.mark.parametrize(
    "changes",
    [
        ["algorithm.filter={strategy: none}"],  # the preset's `value` is still there
        ["algorithm.filter.strategy=soft"],
        ["algorithm.preset=starpo", "algorithm.beta=0"],
        [
            "algorithm.preset=starpo",
            "algorithm.advantage=rloo",
            "algorithm.loss_type=cispo",
            "algorithm.epsilon_high=5",
        ],
        ["algorithm.preset=ragen2", "rollout.groups=2"],  # and its `minibatches`
        ["algorithm.preset=ragen2", "algorithm.filter={strategy: top_k, value: 0.25}"],
        # defaults
        ["algorithm.gamma=1", "algorithm.delta=null", "algorithm.filter={strategy: none, value: 0.5}"],
    ],
)
def test_what_a_preset_or_a_default_says_is_never_refused(changes, tmp_path):
    cfg = config.resolve(StarPORun, ROOT / "configs" / "phase3_starpo.yaml", changes)
    printed = tmp_path / "printed.yaml"
    printed.write_text(config.dump(cfg))
    assert config.resolve(StarPORun, printed) == cfg


@pytest.mark.parametrize(
    "change, remedy",
    [
        ("suites.math.settings=[gready]", "suites.math names the setting `gready`, which `settings` does not list"),
        ("suites.envs.context_turns=2", "suites.envs: context_turns counts the turns of last_k and single_turn"),
        ("suites.recall.headline=none", "suites.recall names the setting `none`"),
        ("suites.preferences.reference=phase9", "is `phase9`, which is not among the checkpoints base, phase1"),
        ("checkpoints={}", "checkpoints (on the command line): must not be empty"),
        ("settings=[{name: a}, {name: a}]", "two of the settings have the same name"),
        ("checkpoints.base=3", "checkpoints.base (on the command line): should be text, but is 3"),
    ],
)
def test_mistakes_of_the_evaluator(change, remedy):
    assert remedy in complaint(EvaluateRun, ROOT / "configs" / "evaluate.yaml", change)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ("trainer.loss_type=[sigmod, sft]", "'sigmod' is not one of"),
        ("trainer.loss_type=sigmod", "did you mean `sigmoid`"),
        ("trainer.beta=-1", "trainer.beta (on the command line): should be above 0, but is -1"),
        ("trainer.learning_rate=-1.0", "should be above 0"),
        ("trainer.num_train_epochs=0", "should be above 0"),
        ("trainer.per_device_train_batch_size=0", "should be at least 1"),
        ("trainer.ddp_timeout=0", "should be at least 1"),
        ("trainer.logging_steps=0", "should be above 0"),
    ],
)
def test_figures_that_trl_takes_without_looking(change, remedy):
    assert remedy in complaint(DPORun, ROOT / "configs" / "phase2_dpo.yaml", change)


def test_the_losses_are_those_that_trl_compares_with():
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "trainer" / "dpo_trainer.py").read_text()
    assert set(re.findall(r'loss_type == "(\w+)"', source)) == set(DPO_LOSSES)


def test_the_chat_needs_a_preset_that_exists():
    message = complaint(ChatRun, ROOT / "configs" / "chat.yaml", "preset=wild")
    assert "`wild` is not a preset: write one of improved, plain" in message
    assert "did you mean `improved`" in complaint(ChatRun, ROOT / "configs" / "chat.yaml", "preset=impruved")


@pytest.mark.parametrize("blank", ["''", "' '"])
def test_the_chat_offers_no_empty_example(blank):
    message = complaint(ChatRun, ROOT / "configs" / "chat.yaml", f"examples=[a, {blank}, b]")
    assert "examples.1 (on the command line): an example is empty: write a message, or leave it out" in message


# ------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2\n", "`seed` is written twice"),
        ("a: [1, 2\n", "is not YAML"),
        ("- 1\n", "lines of `key: value`"),
        ("\n", "lines of `key: value`"),
        ("a: " + 5000 * "[", "nested too deep"),
        ("".join(f"{depth * ' '}k:\n" for depth in range(5000)), "nested too deep"),
        ("a: &x [1, 1]\nb: *x\n", "an alias (`*name`) is not read here: write its value"),
        ("? [a]\n: 1\n", "unhashable key"),
        ("a: \x00", "is not YAML"),
        (f"a: {5000 * '9'}", "Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_yaml(tmp_path, text, words):
    assert words in complaint(SFTRun, sft(tmp_path, text))


@pytest.mark.thorough
def test_a_file_of_many_keys_is_read_at_once(tmp_path):
    """A hundred thousand keys were compared with one another, which took minutes."""
    file = tmp_path / "many.yaml"
    file.write_text("".join(f"k{n}: 1\n" for n in range(30_000)))
    assert len(read_yaml(file)) == 30_000


def test_a_name_that_is_no_file(tmp_path):
    for name in ("a\0b", 300 * "x", str(tmp_path), str(tmp_path / "none.yaml")):
        assert re.search("there is no such file|cannot be read", complaint(SFTRun, Path(name)))


def full(kind: str, place: Path) -> None:
    """What the libraries raise when the disk is full, each in its own words."""
    import safetensors.torch
    import torch

    tensor = torch.zeros(100_000)
    if kind == "text":
        with Path("/dev/full").open("a") as out:
            out.write("a row\n")
    elif kind == "safetensors":
        safetensors.torch.save_file({"a": tensor}, place / "a.safetensors")
    elif kind == "torch":
        torch.save(tensor, place / "a.pt")
    elif kind == "pairs":
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"a": list(range(100_000))}).save_to_disk(place / "pairs")
    elif kind == "reraised":
        try:
            full("text", place)
        except OSError as error:
            raise RuntimeError("something else failed") from error


@pytest.mark.parametrize("kind", ["text", "safetensors", "torch", "pairs", "reraised"])
def test_a_full_disk_is_one_paragraph_whoever_wrote(tmp_path, capsys, kind):
    """RLIMIT_FSIZE stands in for the full disk where it must be a real file: writes beyond it fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SystemExit) as left:
            config.run(lambda: full(kind, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("error: Nothing more could be written") and said.count("\n") == 1
    assert "--resume" in said


def asks_for_too_much(kind: str) -> None:
    """What is raised where there is no more memory; more than any machine has is asked for."""
    import torch

    if kind == "python":
        bytearray(2**60)
    elif kind == "torch":
        torch.empty(2**50)
    elif kind == "gpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif kind == "library":  # as `ulimit -v` lets the import of torch fail
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
    elif kind == "reraised":
        try:
            asks_for_too_much("torch")
        except RuntimeError as error:
            raise ValueError("something else failed") from error


@pytest.mark.parametrize("kind", ["python", "torch", "gpu", "library", "reraised"])
def test_no_more_memory_is_one_paragraph_whoever_asked(capsys, kind):
    with pytest.raises(SystemExit) as left:
        config.run(lambda: asks_for_too_much(kind))
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("error: There was no more memory (") and said.count("\n") == 1
    assert "per_device_train_batch_size" in said and "--resume" in said


# -- standard streams ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("script", [name for name in SCRIPTS if not name.startswith("inference")])
def test_scripts_start_with_closed_streams_and_unread_ones(script):
    for how in ("closed", "unread"):
        assert unheard(how, f"{script}.py", "--print-config") == 0
    assert unheard("closed", f"{script}.py", "sead=1") == 2


def test_so_does_the_chat():
    """It takes the default of SIGPIPE, which ends it as it does any program of Unix."""
    start = f"{sys.executable} inference_with_improved_settings.py --print-config"
    line = f"{start} <&- >&- 2>&-; echo $?; {start} 2>&1 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=60)
    closed, unread = map(int, done.stdout.split())
    assert closed == 0 and unread in (0, 128 + signal.SIGPIPE)


STREAMS = """
import os, subprocess, sys
from posttrain.files import keep_standard_streams
keep_standard_streams()
opened = os.open(os.devnull, os.O_RDONLY)
child = [sys.executable, "-c", "import sys; print(sys.stdout is None, sys.stderr is None)"]
"""


def shell(line: str, program: Path, body: str) -> subprocess.CompletedProcess[str]:
    """`line`, in which $PROGRAM is a Python program of these lines."""
    program.write_text(STREAMS + body)
    variables = {**os.environ, "PROGRAM": f"{sys.executable} {program}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, env=variables)


def test_a_closed_stream_takes_what_is_written_and_no_file_gets_its_number(tmp_path):
    body = "print('lost', flush=True); print(opened, file=sys.stderr); subprocess.run(child, stdout=sys.stderr)"
    number, inherited = shell("$PROGRAM >&- <&-", tmp_path / "a.py", body).stderr.splitlines()
    assert int(number) > 2 and inherited == "False False"


@pytest.mark.parametrize("buffered", ["", "PYTHONUNBUFFERED=1 "])
def test_what_nobody_reads_any_more_is_lost_and_nothing_else(tmp_path, buffered):
    """By Python, by the number of the stream, and by another process."""
    body = """
print("heard", sys.stdout.isatty(), sys.stdout.encoding, flush=True)
sys.stdin.read()  # until the reader has gone
print("ä" * 100_000)
sys.stdout.flush()
os.write(1, b"lost")
print(subprocess.run(child).returncode, file=sys.stderr)
"""
    pipes = f"mkfifo {tmp_path}/gone; {buffered}$PROGRAM <{tmp_path}/gone | (exec 9>{tmp_path}/gone; head -1)"
    done = shell(pipes, tmp_path / "a.py", body)
    assert (done.stdout, done.stderr, done.returncode) == ("heard False utf-8\n", "0\n", 0)


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        config.run(lambda: print(1 // 0))
    with pytest.raises(FileNotFoundError):
        config.run(lambda: print(Path("/no/such/file").read_text()))


def test_what_the_system_refuses_is_one_paragraph(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        config.run(lambda: print(tmp_path.read_text()))
    assert left.value.code == 2 and "The system refused" in capsys.readouterr().err


def test_run_prints_one_paragraph_and_exits_with_2(capsys):
    """A terminal obeys nothing in it, whatever the words of somebody's exception are."""

    def fails() -> None:
        raise UserError("This is wrong: \x1b[31mwrite\tthät.")

    with pytest.raises(SystemExit) as left:
        config.run(fails)
    assert left.value.code == 2 and capsys.readouterr().err == "error: This is wrong: \\x1b[31mwrite\\tthät.\n"


def test_an_exception_without_words_is_a_part_of_a_sentence_as_well():
    class Mute(Exception):
        __str__ = None  # pyright: ignore[reportAssignmentType]

    assert one_line(Mute()) == "Mute: (without words: its __str__ raised)"
    assert one_line(ValueError("\x1b[31ma\nb")) == "ValueError: \\x1b[31ma b"


def test_run_leaves_bugs_alone_and_passes_interruptions_on():
    def bug() -> None:
        raise ZeroDivisionError

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError):
        config.run(bug)
    with pytest.raises(SystemExit) as left:
        config.run(interrupted)
    assert left.value.code == 130


def test_load_takes_flags_of_the_script_between_overrides(tmp_path):
    cfg, args = config.load(
        SFTRun,
        sft(tmp_path),
        ["seed=1", "--resume", "model.tuning=lora"],
        lambda parser: parser.add_argument("--resume", action="store_true"),
    )
    assert (cfg.seed, cfg.model.tuning, args.resume) == (1, "lora", True)


def test_print_config_prints_yaml_that_can_be_used(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        config.load(SFTRun, sft(tmp_path), ["--print-config", "seed=5"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert left.value.code == 0 and config.resolve(SFTRun, printed).seed == 5


def test_help_shows_sections_and_fields(capsys):
    with pytest.raises(SystemExit) as left:
        config.load(StarPORun, ROOT / "configs" / "phase3_starpo.yaml", ["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert "  rollout:  how episodes are sampled\n    groups: whole number  levels played in one step [32]\n" in said
    assert "configs/phase3_starpo.yaml" in said and "  envs: (list)  " in said


# What the scripts may load before they answer: a fraction of a second; torch, transformers or trl take seconds.
FAST_PACKAGES = {
    "annotated_types", "cython_runtime", "envs", "lazy_loader", "numpy", "posttrain", "pydantic", "pydantic_core",
    "rich", "safetensors", "typing_extensions", "typing_inspection", "yaml",
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("arguments", [["--print-config"], ["--help"], ["sead=1"]], ids=["print", "help", "mistake"])
def test_scripts_answer_without_loading_anything_slow(script, arguments, tmp_path):
    path = ROOT / f"{script}.py"
    watch = tmp_path / "watch.py"
    watch.write_text(
        "import atexit, runpy, sys\n"
        "started = set(sys.modules)\n"  # by .pth files of the environment
        f"fast = {FAST_PACKAGES} | set(sys.stdlib_module_names)\n"
        "loaded = lambda: {name.partition('.')[0] for name in set(sys.modules) - started}\n"
        "atexit.register(lambda: print('LOADED', sorted(name for name in loaded() - fast if name[0] != '_')))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"sys.argv = [{str(path)!r}, *{arguments!r}]\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, str(watch)], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout[-300:] + done.stderr
    assert "Traceback" not in done.stderr
    if arguments == ["sead=1"]:
        assert done.returncode == 2 and "sead (on the command line): unknown key; did you mean `seed`?" in done.stderr
    else:
        assert done.returncode == 0 and not done.stderr
    if arguments == ["--print-config"]:
        text = done.stdout.rsplit("LOADED", 1)[0]
        printed = tmp_path / "printed.yaml"
        printed.write_text(text)
        schema, file = RUNS[SCRIPTS[script]], ROOT / "configs" / f"{SCRIPTS[script]}.yaml"
        assert config.resolve(schema, printed) == config.resolve(schema, file)
