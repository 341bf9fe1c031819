"""Which model does a run train if its folder does not exist yet, or the Hub cannot be reached?

A phase loads the folder that the previous phase saves. The config files lead from there to a published model, whose
sizes are listed here as in its config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from posttrain.config import CONFIGS, ModelSection, find_config, read_yaml
from posttrain.data import SHAPE, VOCABULARY
from posttrain.models import convgpt, model_files
from posttrain.types import HUB_NAME, UserError


def _decoder(
    kind: str,
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    key_value_heads: int,
    **more: Any,
) -> tuple[str, dict[str, Any]]:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    return kind, sizes | {"num_hidden_layers": layers} | heads_of | more


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
QUICKSTART = (convgpt.ConvGPTConfig.model_type, SHAPE | {"vocab_size": VOCABULARY})
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {  # name -> model type and sizes
    "mkurman/ConvGPT-0.2B-SYNTH-250B-EC": (convgpt.ConvGPTConfig.model_type, {}),
    "runs/quickstart/base": QUICKSTART,  # as posttrain.data.embedded makes it
    "runs/mixture/phase1/final": QUICKSTART,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _decoder("llama", 49152, 576, 1536, 30, 9, 3, **TIED),
    "Qwen/Qwen2.5-0.5B-Instruct": _decoder("qwen2", 151936, 896, 4864, 24, 14, 2, **TIED),
    "Qwen/Qwen2.5-1.5B-Instruct": _decoder("qwen2", 151936, 1536, 8960, 28, 12, 2, **TIED),
    "Qwen/Qwen2.5-3B-Instruct": _decoder("qwen2", 151936, 2048, 11008, 36, 16, 2, **TIED),
    "Qwen/Qwen3-0.6B": _decoder("qwen3", 151936, 1024, 3072, 28, 16, 8, head_dim=128, **TIED),
    "google/gemma-3-270m-it": _decoder("gemma3_text", 262144, 640, 2048, 18, 4, 1, head_dim=256),
    "meta-llama/Llama-3.2-1B-Instruct": _decoder("llama", 128256, 2048, 8192, 16, 32, 8, **TIED),
    "microsoft/Phi-4-mini-instruct": _decoder("phi3", 200064, 3072, 8192, 32, 24, 8, **TIED),
    "HuggingFaceTB/SmolLM3-3B": _decoder("smollm3", 128256, 2048, 11008, 36, 16, 4, **TIED),
    "openai-community/gpt2": ("gpt2", {}),
    "state-spaces/mamba-130m-hf": ("mamba", dict(vocab_size=50280, hidden_size=768, num_hidden_layers=24)),
    "Qwen/Qwen2.5-7B-Instruct": _decoder("qwen2", 152064, 3584, 18944, 28, 28, 4, **UNTIED),
}
PUBLISHED["runs/smollm2/base"] = PUBLISHED["HuggingFaceTB/SmolLM2-135M-Instruct"]  # `make smollm2` unpacks it there


def config_of(model: ModelSection, beside: Path, key: str = "model.name_or_path") -> PreTrainedConfig:
    """Return the config of the model that a run trains, without weights.

    beside: the config file of the run, in whose folder those of the other phases are. key: which names the model.

    Raises:
        UserError: it is not known which model it will be.
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
    section = model.model_copy(update={"name_or_path": name}) if seen else model
    if Path(name).is_dir() or (HUB_NAME.fullmatch(name) and not _is_of_a_phase(name)):
        model_files.check_source(section)
        return model_files.load_config(section)
    raise UserError(
        f"--plan: {key}={model.name_or_path} does not exist yet, and no config file says which model will"
        " be saved there. Name the model that the run will start from, e.g."
        f" {key}=Qwen/Qwen2.5-0.5B-Instruct: the plan depends on its sizes alone."
    )


def _is_of_a_phase(name: str) -> bool:
    return Path(name).name == "final"


def _phase_that_saves(folder: str, beside: Path) -> str | None:
    """Return the model from which the phase that saves this folder starts; None if no config file says it.

    The config files in the run's folder are read before those of the project.
    """
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
