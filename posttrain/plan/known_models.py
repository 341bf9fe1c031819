"""Which model will a run train, where its folder or the Hub cannot be read yet?

A phase reads the folder that the one before will have saved: the config files say which that is, down to a published
model, whose sizes stand here as its config.json has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from posttrain.config import CONFIGS, ModelSection, find_config, read_yaml
from posttrain.data import SHAPE, VOCABULARY
from posttrain.models import convgpt, model_files
from posttrain.types import HUB_NAME, UserError

QUICKSTART = (convgpt.ConvGPTConfig.model_type, SHAPE | {"vocab_size": VOCABULARY})
QWEN = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}
SMOLLM2 = {"vocab_size": 49152, "tie_word_embeddings": True}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "mkurman/ConvGPT-0.2B-SYNTH-250B-EC": (convgpt.ConvGPTConfig.model_type, {}),
    "runs/quickstart/base": QUICKSTART,  # as posttrain.data.embedded makes it
    "runs/mixture/phase1/final": QUICKSTART,
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        "llama",
        SMOLLM2
        | dict(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
        ),
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": (
        "qwen2",
        QWEN | dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": (
        "qwen2",
        QWEN | dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    ),
    "Qwen/Qwen2.5-3B-Instruct": (
        "qwen2",
        QWEN | dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
    ),
    "Qwen/Qwen3-0.6B": (
        "qwen3",
        dict(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    "google/gemma-3-270m-it": (
        "gemma3_text",
        dict(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
        ),
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
    ),
    "microsoft/Phi-4-mini-instruct": (
        "phi3",
        dict(
            vocab_size=200064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=24,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        "smollm3",
        dict(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
    ),
    "openai-community/gpt2": ("gpt2", {}),
    "state-spaces/mamba-130m-hf": ("mamba", dict(vocab_size=50280, hidden_size=768, num_hidden_layers=24)),
    "Qwen/Qwen2.5-7B-Instruct": (
        "qwen2",
        dict(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
    ),
}
PUBLISHED["runs/smollm2/base"] = PUBLISHED["HuggingFaceTB/SmolLM2-135M-Instruct"]  # `make smollm2` unpacks it there


def config_of(model: ModelSection, beside: Path) -> PreTrainedConfig:
    """The config of the model that a run trains, without weights. `beside`: the run's config file.

    UserError where nobody can say which model it will be.
    """
    name, seen = model.name_or_path, []
    while not Path(name).is_dir() and name not in PUBLISHED and name not in seen:
        seen.append(name)
        before = _phase_that_saves(name, beside)
        if before is None:
            break
        name = before
    if not Path(name).is_dir() and name in PUBLISHED:
        kind, sizes = PUBLISHED[name]
        return AutoConfig.for_model(kind, **sizes)
    found = model.model_copy(update={"name_or_path": name}) if seen else model
    if Path(name).is_dir() or (HUB_NAME.fullmatch(name) and not _is_of_a_phase(name)):
        model_files.check_source(found)
        return model_files.load_config(found)
    raise UserError(
        f"--plan: model.name_or_path={model.name_or_path} does not exist yet, and no config file says which model will"
        " be saved there. Name the model that the run will begin with, e.g."
        " model.name_or_path=Qwen/Qwen2.5-0.5B-Instruct: the plan depends on its sizes alone."
    )


def _is_of_a_phase(name: str) -> bool:
    return Path(name).name == "final"


def _phase_that_saves(folder: str, beside: Path) -> str | None:
    """The model that the phase begins with which saves this folder, by the config files beside and those that come
    with the project."""
    if not _is_of_a_phase(folder):
        return None
    files = [*sorted(find_config(beside).parent.glob("phase*.yaml")), *sorted(CONFIGS.rglob("phase*.yaml"))]
    for file in files:
        content = read_yaml(file)
        model, saved = content.get("model"), content.get("output_dir")
        begins_with = model.get("name_or_path") if isinstance(model, dict) else None
        if isinstance(begins_with, str) and isinstance(saved, str) and Path(saved) == Path(folder).parent:
            return begins_with
    return None
