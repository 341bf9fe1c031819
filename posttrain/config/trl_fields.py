"""Which keys may the section `trainer` hold?  TRL's field names and types, read from its source, never imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from posttrain.types import UserError

# No unknown keys, no silent conversion (`4e4` is not a whole number, `yes` not a boolean), no nan, no later change.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

# Keys that no config file has, and what to do instead.
_BY_LAUNCHER = (
    "sharding is chosen where processes are started: `accelerate launch --config_file configs/accelerate/fsdp2.yaml"
    " train_phaseN_....py` (all phases), or zero2.yaml and zero3.yaml for DeepSpeed (phases 1 and 2)"
)
_UPLOADED_LATER = (
    "nothing is uploaded during training. When the phase is done, upload what it saves: "
    "`hf upload NAME/MODEL OUTPUT_DIR/final`"
)
NOT_SUPPORTED = dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config"), _BY_LAUNCHER) | dict.fromkeys(
    (
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
        "hub_revision",
    ),
    _UPLOADED_LATER,
)  # fmt: skip
# Keys of TRL's dataclass that a script sets itself, and what to write instead.
SET_BY_SCRIPTS = NOT_SUPPORTED | {
    "output_dir": "it is the key `output_dir` at the top level",
    "seed": "it is the key `seed` at the top level",
    "data_seed": "it follows from the key `seed` at the top level",
    "run_name": "it is the key `run_name` at the top level",
    "report_to": "it is the key `report_to` at the top level",
    "project": "the script names the project",
    "disable_tqdm": "the scripts have a progress bar of their own",
    "use_cpu": "write `device: cpu` at the top level",
    "max_length": "it is `data.max_length`",
    "truncation_mode": "long rows are cut or dropped while the data is read, see `data.max_length`",
    "trust_remote_code": "it is `model.trust_remote_code`",
    "model_init_kwargs": "the keys are in the section `model`",
    "chat_template_path": "it is `chat.template`",
    "eos_token": "the stop token belongs to the chat template, see `chat.template`",
    "pad_token": "the padding token belongs to the tokenizer",
    "assistant_only_loss": "only the assistant's tokens are trained, always",
    "completion_only_loss": "only the assistant's tokens are trained, always",
    **dict.fromkeys(
        ("dataset_text_field", "dataset_kwargs", "dataset_num_proc"),
        "the data is tokenised before TRL sees it; its columns are in the section `data`",
    ),
    **dict.fromkeys(
        ("torch_compile_backend", "torch_compile_mode"),
        "the decoder's layers are compiled, each by itself, with torch's own backend, see `torch_compile`",
    ),
    "remove_unused_columns": "the script knows which columns it needs",
    **dict.fromkeys(
        ("precompute_ref_log_probs", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        "phase 2 always takes the reference from the policy in memory",
    ),
    "resume_from_checkpoint": "use the flag --resume",
    "bf16_full_eval": "it would round the trained weights for good; evaluation computes as training does, see `bf16`",
    "fp16_full_eval": "it would round the trained weights for good; evaluation computes as training does, see `fp16`",
    "logging_nan_inf_filter": "a loss that is not finite ends the run, so there is nothing to hide from the log",
    "do_train": "the script trains",
    "do_eval": "evaluation is on whenever `eval_strategy` is not `no`",
    "do_predict": "evaluate_model.py does that",
}
# Limits that the dataclasses do not check: the least value, and whether it is allowed itself.
LEAST = {
    "learning_rate": (0, False),
    "beta": (0, False),
    "num_train_epochs": (0, False),
    "per_device_train_batch_size": (1, True),
    "per_device_eval_batch_size": (1, True),
    "gradient_accumulation_steps": (1, True),
    "logging_steps": (0, False),
    "eval_steps": (0, False),
    "save_steps": (0, False),
    "max_grad_norm": (0, True),
    "weight_decay": (0, True),
    "warmup_steps": (0, True),
    "ddp_timeout": (1, True),
}
LARGEST_WHOLE_NUMBER = 2**31 - 1  # numpy and several libraries of the Hub count and seed in 32 bits
LARGEST_NUMBER = 1e30  # float32 ends at 3.4e38
# The names that TRL's DPOTrainer compares with, which its config does not list.
DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
    "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
# What TRL's dataclasses inherit from, the base class first; later fields replace earlier ones, as in Python.
_BASES = ("transformers/training_args.py:TrainingArguments", "trl/trainer/base_config.py:_BaseConfig")
_ENUM_FILES = ("transformers/trainer_utils.py", "transformers/training_args.py")


@functools.cache
def fields_of_trl(source: str) -> dict[str, Any]:
    """Return field name -> type of a TRL config such as "trl/trainer/sft_config.py:SFTConfig", without importing TRL.

    A type this reader does not know becomes Any; an enum or a field with `choices` becomes the Literal of its values.
    """
    enums = {
        node.name: Literal[tuple(v for stmt in node.body if (v := _constant(stmt)) is not None)]  # type: ignore[misc]
        for file in _ENUM_FILES
        for node in _parse(file).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "ExplicitEnum" for base in node.bases)
    }
    known = {"str": str, "int": int, "float": float, "bool": bool, "None": None, "dict": dict, "list": list} | enums
    fields: dict[str, Any] = {}
    for place in (*_BASES, source):
        file, name = place.split(":")
        body = next(node.body for node in _parse(file).body if isinstance(node, ast.ClassDef) and node.name == name)
        for stmt in body:
            if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
                fields[stmt.target.id] = _choices(stmt.value) or _type(stmt.annotation, known)
    return fields


@functools.cache
def _parse(file: str) -> ast.Module:
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)  # finds a top-level package without running it
    if spec is None or spec.origin is None:
        raise UserError(
            f"The package `{package}` is not installed, so the section `trainer` cannot be checked: run `make setup`."
        )
    return ast.parse((Path(spec.origin).parent / rest).read_text(encoding="utf-8"))


def _constant(stmt: ast.stmt) -> Any:
    return stmt.value.value if isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Constant) else None


def _choices(value: ast.expr | None) -> Any:
    """Return the Literal of `field(default=..., metadata={"choices": [...]})` and of its default, or None."""
    keywords = {word.arg: word.value for word in value.keywords} if isinstance(value, ast.Call) else {}
    metadata, default = keywords.get("metadata"), keywords.get("default")
    for key, choices in zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(choices, ast.List):
            also = [default.value] if isinstance(default, ast.Constant) else []
            return Literal[(*ast.literal_eval(choices), *also)]  # type: ignore[misc]
    return None


def _type(node: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name):
        return known.get(node.id, Any)
    if isinstance(node, ast.BinOp):
        parts = [_type(side, known) for side in (node.left, node.right)]
        if any(typing.get_origin(part) is Literal for part in parts):
            parts = [part for part in parts if part is not str]  # `SchedulerType | str` means a name of SchedulerType
        return typing.Union[tuple(parts)]  # noqa: UP007 - built at run time
    if isinstance(node, ast.Subscript):
        base, inside = ast.unparse(node.value), node.slice
        if base == "list":
            return list[_type(inside, known)]  # type: ignore[misc]
        if base == "Literal":
            return Literal[ast.literal_eval(inside)]  # type: ignore[misc]
        return known.get(base, Any)
    return Any


def unfit(value: Any) -> str | None:
    """Return why a library cannot take a value, or a part of it; None where it can."""
    if isinstance(value, dict):
        problems = ((key, unfit(key) or unfit(part)) for key, part in value.items())
        return next((f"{key!a:.80} {problem}" for key, problem in problems if problem), None)
    if isinstance(value, list):
        return next((problem for part in value if (problem := unfit(part))), None)
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER:
        return f"should be at most {LARGEST_WHOLE_NUMBER}, but has {len(str(abs(value)))} digits"
    if isinstance(value, float) and abs(value) > LARGEST_NUMBER:
        return f"should be at most {LARGEST_NUMBER:g}, but is {value:g}"
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= character <= "\udfff" for character in value)):
        return f"should be text of whole characters, without zero bytes, but is {value!a:.80}"
    return None


def _bounded(name: str, kind: Any) -> Any:
    """Return the type with its largest allowed value, and its least where `LEAST` has one."""
    least, itself = LEAST.get(name, (-math.inf, True))

    def check(value: Any) -> Any:
        if (problem := unfit(value)) is not None:
            raise PydanticCustomError("text", "{text}", {"text": problem})
        if isinstance(value, int | float) and (value < least or (value == least and not itself)):
            bound = "at least" if itself else "above"
            raise PydanticCustomError("text", "{text}", {"text": f"should be {bound} {least}, but is {value}"})
        return value

    return Annotated[kind, AfterValidator(check)]


class TRLFields:
    """Marks a dict whose keys are the fields of one TRL dataclass, e.g. "trl/trainer/dpo_config.py:DPOConfig"."""

    def __init__(self, source: str):
        self.source = source

    def allowed(self) -> dict[str, Any]:
        return {name: kind for name, kind in fields_of_trl(self.source).items() if name not in SET_BY_SCRIPTS}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, values: dict[str, Any]) -> dict[str, Any]:
        allowed = self.allowed()
        allowed["learning_rate"] = float | None  # null takes what fits model.tuning
        allowed["torch_compile"] = allowed["gradient_checkpointing"] = bool | None  # null: what fits the device
        if self.source.endswith(":DPOConfig"):
            allowed["loss_type"] = list[Literal[DPO_LOSSES]] | Literal[DPO_LOSSES]
        fields: dict[str, Any] = {name: (_bounded(name, allowed[name]), ...) for name in values if name in allowed}
        create_model("trainer", __config__=STRICT, **fields).model_validate(values)
        return values
