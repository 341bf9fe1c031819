"""What did the user mean?  An option, a key or a file that does not fit, and what to write instead of it."""

from __future__ import annotations

import difflib
import shlex
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from posttrain.config.chat import ChatRun
from posttrain.config.data import Source
from posttrain.config.dpo import DPORun
from posttrain.config.evaluation import Endpoint, EvaluateRun
from posttrain.config.pairs import PairsRun
from posttrain.config.reference import command, find_config
from posttrain.config.sft import SFTRun
from posttrain.config.shared import EnvSection, Section
from posttrain.config.starpo import StarPORun
from posttrain.config.trl_fields import TRLFields
from posttrain.config.yaml_file import parse_yaml, read_yaml
from posttrain.files import DATA_FILES
from posttrain.types import HUB_NAME, short_name

# Names in other trainers. Of several keys, the first that a script has counts; some stand for a key with its value.
_MODEL = ("model.name_or_path", "checkpoints")
_ROWS = ("data", "sources", "distillation.sources")
_LENGTH = ("data.max_length", "rollout.max_context", "max_length")
_BATCH = ("trainer.per_device_train_batch_size", "batch_size", "rollout.groups")
ALIASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "model_name", "model_path", "model_id", "base_model", "pretrained", "ckpt"), _MODEL),
    **dict.fromkeys(("dataset", "dataset_name", "dataset_path", "data_path", "data_files", "train_file"), _ROWS),
    **dict.fromkeys(("lora", "use_lora", "peft", "use_peft"), ("model.tuning=lora",)),
    **dict.fromkeys(("qlora", "use_qlora", "load_in_4bit"), ("model.tuning=qlora",)),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), ("model.lora.r",)),
    **dict.fromkeys(("lora_target", "lora_target_modules"), ("model.lora.target_modules",)),
    "lora_alpha": ("model.lora.alpha",),
    "lora_dropout": ("model.lora.dropout",),
    "lr": ("trainer.learning_rate",),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), ("trainer.num_train_epochs",)),
    **dict.fromkeys(("steps", "num_steps", "iterations"), ("trainer.max_steps",)),
    **dict.fromkeys(("batch_size", "train_batch_size", "bs"), _BATCH),
    **dict.fromkeys(("grad_accum", "gradient_accumulation"), ("trainer.gradient_accumulation_steps",)),
    **dict.fromkeys(("warmup", "warmup_ratio"), ("trainer.warmup_steps",)),
    **dict.fromkeys(("optimizer", "optimiser"), ("trainer.optim",)),
    **dict.fromkeys(("scheduler", "lr_scheduler"), ("trainer.lr_scheduler_type",)),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "seq_len", "cutoff_len", "max_length", "block_size"), _LENGTH),
    **dict.fromkeys(("max_tokens", "max_new_tokens"), ("max_new_tokens", "rollout.max_completion_length")),
    **dict.fromkeys(("torch_dtype", "precision"), ("model.dtype", "dtype")),
    **dict.fromkeys(("output", "out", "out_dir", "save_dir", "output_path"), ("output_dir",)),
    **dict.fromkeys(("env", "env_name", "environment", "environments"), ("envs", "suites.envs.envs")),
    **dict.fromkeys(("group_size", "rollout_n", "n_samples"), ("rollout.num_generations",)),
    "env_groups": ("rollout.groups",),
    **dict.fromkeys(("algo", "advantage_estimator"), ("algorithm.advantage",)),
    **dict.fromkeys(("kl_coef", "kl_beta"), ("algorithm.beta", "trainer.beta")),
    **dict.fromkeys(("teacher", "teacher_model", "teacher_model_name_or_path"), ("distillation.teacher",)),
    **dict.fromkeys(("wandb", "use_wandb"), ("report_to=wandb",)),
    **dict.fromkeys(("name", "exp_name", "experiment_name"), ("run_name",)),
    **dict.fromkeys(("gpu", "cuda", "use_gpu"), ("device=cuda",)),
    **dict.fromkeys(("cpu", "no_cuda", "use_cpu"), ("device=cpu",)),
    "system_prompt": ("system",),
}
# The key that a single value for a section means.
MAIN_KEY = {"model": "name_or_path", "chat": "template", "algorithm": "preset"}
KINDS = {SFTRun: "messages", DPORun: "preferences"}  # of a user's own file; other scripts read its prompts
SCRIPTS: dict[type[Section], str] = {
    SFTRun: "train_phase1_sft",
    DPORun: "train_phase2_dpo",
    StarPORun: "train_phase3_starpo",
    EvaluateRun: "evaluate_model",
    ChatRun: "inference_with_improved_settings",
    PairsRun: "posttrain pairs",
}


class Key(typing.NamedTuple):
    """A dotted key and its type: Key("model.lora.r", int, None)."""

    path: str
    annotation: Any
    inside: Any  # the section, the section of a list's entries, or TRL's fields; None for a plain value


def inside(annotation: Any) -> Any:
    """Return the section, list item or TRLFields in an annotation like `list[Source] | None`; else None."""
    if isinstance(annotation, TRLFields) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return annotation
    return next((section for part in typing.get_args(annotation) if (section := inside(part)) is not None), None)


def field_inside(field: Any) -> Any:
    return next((mark for mark in field.metadata if isinstance(mark, TRLFields)), None) or inside(field.annotation)


def places(schema: Any, values: Any = None, start: str = "") -> Iterator[Key]:
    """Yield every key of a schema in the form that the command line takes.

    For lists and free names that is the first entry in the file `given`, if it has one: `data.sources.0.path`,
    `presets.improved.temperature`; without a file, `data.sources.0.path` and `presets.NAME.temperature`.
    """
    for name, field in schema.model_fields.items():
        section, here = field_inside(field), values.get(name) if isinstance(values, dict) else None
        yield Key(start + name, field.annotation, section)
        if isinstance(section, TRLFields):
            yield from (Key(f"{start}{name}.{key}", kind, None) for key, kind in section.allowed().items())
        elif section is not None:
            below = f"{start}{name}."
            if is_list(field.annotation) or is_dict(field.annotation):
                entries: dict[Any, Any]
                entries = dict(enumerate(here)) if isinstance(here, list) else here if isinstance(here, dict) else {}
                first = next(iter(entries), 0 if is_list(field.annotation) else "NAME")
                if values is not None and (not entries or (section is Endpoint and isinstance(entries[first], str))):
                    continue
                below, here = f"{below}{first}.", entries.get(first)
            yield from places(section, None if values is None else here if isinstance(here, dict) else {}, below)


def is_list(annotation: Any) -> bool:
    return _holds(annotation, list)


def is_dict(annotation: Any) -> bool:
    return _holds(annotation, dict)


def _holds(annotation: Any, kind: type) -> bool:
    """Return whether values of this type, or of one of its alternatives, are such containers."""
    if (typing.get_origin(annotation) or annotation) is kind:
        return True
    return not isinstance(annotation, type) and any(
        _holds(part, kind) for part in typing.get_args(annotation) if typing.get_origin(annotation) not in (list, dict)
    )


def meant(schema: Any, name: str, values: Any = None) -> str | None:
    """Return the dotted key (with `=VALUE` where only one value makes sense) that a user's name for it means, or None.

    It is the key itself, an alias, the end of a key (`lora.r`), or the most similar last name; of several, the one in
    the fewest sections.
    """
    known = {place.path: place for place in sorted(places(schema, values), key=lambda place: place.path.count("."))}
    if name in known and name not in ALIASES:
        return name
    last = name.rpartition(".")[2]
    for alias in ALIASES.get(name) or ALIASES.get(last, ()):
        if alias.partition("=")[0] in known:
            return alias
    if name in known:
        return name
    if ends := [path for path in known if path.endswith(f".{name}")]:
        return ends[0]
    lasts: dict[str, str] = {}
    for path in known:
        lasts.setdefault(path.rpartition(".")[2], path)
    close = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8)
    return lasts[close[0]] if close else None


def like(name: str, keys: Sequence[str]) -> str | None:
    """Return a key with a similar spelling, or with all words of this one: `name_or_path` for `name`."""
    if close := difflib.get_close_matches(name, keys, n=1):
        return close[0]
    words = set(name.split("_"))
    longer = [key for key in keys if words <= set(key.split("_"))]
    return longer[0] if len(longer) == 1 else None


def override(schema: Any, config: Any, name: str, values: Sequence[str]) -> str | None:
    """Return the override that an option means, quoted for the shell: `trainer.learning_rate=1e-5` for `--lr 1e-5`.

    None where no key is like it.
    """
    key = meant(schema, name, config)
    if key is None or "=" in key:
        return key
    place = next(place for place in places(schema, config) if place.path == key)
    if not values:
        return f"{key}={'true' if _holds(place.annotation, bool) else 'VALUE'}"
    if new := for_values(schema, place, [_value(text) for text in values]):
        return shlex.quote("=".join(new))
    if place.inside is None and not is_dict(place.annotation):
        return shlex.quote(f"{key}={values[0]}")
    return f"{key}{'.0' if is_list(place.annotation) else ''}.KEY=VALUE"


def for_values(schema: Any, place: Key, values: Sequence[Any]) -> tuple[str, str] | None:
    """Return key and value, as YAML, where plain values stand for a section or a list: ("envs", "[frozen_lake]"),
    ("model.name_or_path", "some/model"); None where they are not enough."""
    path, new = place.path, None
    names = place.inside.model_fields if isinstance(place.inside, type) else {}
    if is_list(place.annotation) and (place.inside is None or issubclass(place.inside, EnvSection)):
        new = list(values)
    elif place.inside is Source:
        new = [{"kind": KINDS.get(schema, "prompts"), "path": value} for value in values]
    elif "sources" in names and names["sources"].annotation == list[Source]:
        path, new = f"{path}.sources", [{"kind": KINDS.get(schema, "prompts"), "path": value} for value in values]
    elif place.inside is Endpoint and is_dict(place.annotation):
        new = {short_name(str(value)): value for value in values}
    elif path in MAIN_KEY and len(values) == 1:
        path, new = f"{path}.{MAIN_KEY[path]}", values[0]
    if new is None or not all(isinstance(value, str | int | float) for value in values):
        return None
    flow = yaml.safe_dump(new, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return path, flow.removesuffix("\n").removesuffix("...").strip()


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def argument(schema: Any, config: Any, text: str) -> str | None:
    """Return what an argument that is not KEY=VALUE probably means: a config file, data, or a model."""
    if text.endswith((".yaml", ".yml")):
        return f"--config {shlex.quote(text)}"
    if text.endswith(DATA_FILES):
        return override(schema, config, "dataset", [text])
    if Path(text).is_dir() or HUB_NAME.fullmatch(text):
        return override(schema, config, "model", [text])
    return None


def instead(schema: Any, config: Any, path: str, value: Any, typed: bool) -> str:
    """Return what to write where a plain value stands for a section or a list: "; write envs=[frozen_lake]".

    typed: on the command line, not in a file.
    """
    place = next((place for place in places(schema, config) if place.path == path), None)
    if place is None or value is None or isinstance(value, list | dict):
        return ""
    meant = ALIASES.get(path.rpartition(".")[2], ("",))[0]
    replacement = for_values(schema, place, [value])
    if value is True and "=" in meant:
        key, _, text = meant.partition("=")
        return f"; write {meant}" if typed else f"; write `{key.rpartition('.')[2]}: {text}`"
    if replacement is None:
        names = list(place.inside.model_fields) if isinstance(place.inside, type) else []
        return f" (its keys: {', '.join(names)})" if names else ""
    key, new = replacement
    if typed:
        return f"; write {shlex.quote(f'{key}={new}')}"
    name, below = path.rpartition(".")[2], key.removeprefix(path).lstrip(".")
    return f"; write `{name}: {f'{{{below}: {new}}}' if below else new}`"


def other_script(schema: Any, file: str | Path) -> str | None:
    """Return an error message where the keys of a config file fit another script far better; otherwise None."""
    values = read_yaml(find_config(file))

    def problems(of: type[Section]) -> list[str]:
        try:
            of.model_validate(values)
        except ValidationError as error:
            return [each["type"] for each in error.errors()]
        return []

    mine = problems(schema)
    if all(kind == "missing" for kind in mine):
        return None
    others = {each: len(problems(each)) for each in SCRIPTS if each is not schema}
    best = min(others, key=others.__getitem__)
    if others[best] >= len(mine) / 2:
        return None
    how = SCRIPTS[best] if best is PairsRun else command(SCRIPTS[best])
    return f"{file} is a config of {how.removeprefix('python ')}. Write: {how} --config {shlex.quote(str(file))}"
