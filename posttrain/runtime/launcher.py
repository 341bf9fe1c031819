"""How were these processes started, and which sharding does the launcher ask for?  Read from the environment.

`accelerate launch` and torchrun describe a run to its processes in environment variables. What is not supported is
refused here, with an explanation, before anything is read or written.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from posttrain.types import UserError

Sharding = Literal["none", "fsdp2", "zero1", "zero2", "zero3"]
# What `accelerate launch` sets where its config file or its flags ask for a sharded model, beside FSDP and DeepSpeed.
OTHERS = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
SWITCHED_ON = ("1", "true", "t", "yes", "y", "on")  # the values that accelerate and transformers accept
FILES = "configs/accelerate"
ONE_PROCESS = "rollout.engine=vllm runs in a single process: write rollout.engine=auto for several."


def processes() -> int:
    """Return how many processes the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_on(variable: str, default: str = "") -> bool:
    return os.environ.get(variable, default).lower() in SWITCHED_ON


def sharding() -> Sharding:
    """Return how the launcher shards the model over the processes; "none": a copy in each, or one process."""
    if processes() == 1:
        return "none"
    if is_on("ACCELERATE_USE_FSDP"):
        return "fsdp2"
    if is_on("ACCELERATE_USE_DEEPSPEED"):
        match os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"):
            case "1":
                return "zero1"
            case "2":
                return "zero2"
            case "3":
                return "zero3"
            case other:
                raise UserError(f"DeepSpeed's zero_stage is {other}. Write 1, 2 or 3 ({FILES}/zero3.yaml).")
    return "none"


def check_launch(cfg: Any) -> None:
    """Raise UserError for a launch with too few processes, or with a sharding that this config does not support.

    Args:
        cfg: the config of a phase.
    """
    _check_processes()
    for variable in OTHERS:
        if is_on(variable):
            raise UserError(
                f"The launcher asks for a way of sharding that no phase supports ({variable}=true). Take FSDP2"
                f" ({FILES}/fsdp2.yaml) or, in phases 1 and 2, DeepSpeed's ZeRO ({FILES}/zero2.yaml, zero3.yaml)."
            )
    kind = sharding()
    if kind == "none":
        return
    if hasattr(cfg, "algorithm"):
        _check_starpo(kind)
    if whole := not_sharded(cfg):
        raise UserError(f"The launcher asks for a sharded model ({kind}). {whole}")
    _check_fsdp() if kind == "fsdp2" else _check_deepspeed(kind)


def not_sharded(cfg: Any) -> str:
    """Return why a run with this config cannot shard its model, and what to write instead; empty where it can."""
    trainer = cfg.trainer if isinstance(cfg.trainer, dict) else cfg.trainer.model_dump()
    if cfg.model.tuning == "qlora":
        return (
            "model.tuning=qlora keeps 4-bit weights, which are not sharded. Write model.tuning=lora, or start a copy on"
            f" each GPU ({FILES}/multi_gpu.yaml)."
        )
    if "8bit" in str(trainer.get("optim")):
        return (
            f"The optimizer is sharded with the model, and trainer.optim={trainer['optim']} of bitsandbytes cannot be."
            " Write trainer.optim=adamw_torch."
        )
    if sharding().startswith("zero") and trainer.get("torch_compile"):
        return "DeepSpeed's hooks inside a layer cannot be compiled: leave trainer.torch_compile out."
    return ""


def servers_for(processes: int, servers: list[str]) -> str:
    """Return why there are too few vLLM servers for this many processes; "" if there are enough."""
    if not servers or len(servers) >= processes:
        return ""
    return (
        f"rollout.servers names {len(servers)} servers for {processes} processes, each of which needs one of its own:"
        " start more servers, or fewer processes."
    )


def _check_processes() -> None:
    """Raise UserError where accelerate has started ONE process on CPUs, whatever `--num_processes` says."""
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ
    address = os.environ.get("MASTER_ADDR", "")  # set for several processes, and by some clusters for every job
    if by_accelerate and address and (is_on("ACCELERATE_USE_CPU") or address == "127.0.0.1"):
        raise UserError(
            "`accelerate launch` was to start several processes and has started one: with --cpu, use_cpu: true or"
            f" MULTI_CPU it starts no others. Use --config_file {FILES}/two_cpu.yaml (distributed_type: MULTI_GPU only"
            " chooses the launcher) with device=cpu, or torchrun --nproc_per_node N. If you want one process, unset"
            " MASTER_ADDR."
        )


def _check_starpo(kind: Sharding) -> None:
    if kind != "fsdp2":
        raise UserError(
            f"The launcher asks for DeepSpeed ({kind}), which phases 1 and 2 take. Phase 3 shards with FSDP2:"
            f" accelerate launch --config_file {FILES}/fsdp2.yaml train_phase3_starpo.py."
        )
    if is_on("FSDP_OFFLOAD_PARAMS"):
        raise UserError("Phase 3 keeps its shards on the device: write fsdp_offload_params: false.")


def _check_fsdp() -> None:
    """Raise UserError for settings of accelerate's FSDP under which checkpoints are not whole or loading goes wrong."""
    version, saved = os.environ.get("FSDP_VERSION", "1"), os.environ.get("FSDP_STATE_DICT_TYPE", "")
    wrong = []
    if version != "2":
        wrong.append(f"fsdp_version: 2 (it is {version}; the first version keeps no parameters of its own)")
    if saved != "FULL_STATE_DICT":
        wrong.append(f"fsdp_state_dict_type: FULL_STATE_DICT (it is {saved or 'not set'}; checkpoints here are whole)")
    if os.environ.get("FSDP_AUTO_WRAP_POLICY") != "TRANSFORMER_BASED_WRAP":
        wrong.append("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP (otherwise all layers are gathered at once)")
    if is_on("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        wrong.append("fsdp_cpu_ram_efficient_loading: false (every process checks the weights that it has read)")
    if is_on("FSDP_ACTIVATION_CHECKPOINTING"):
        wrong.append("fsdp_activation_checkpointing: false (it is `trainer.gradient_checkpointing` of the run)")
    _say(wrong, "fsdp2.yaml")


def _check_deepspeed(kind: Sharding) -> None:
    wrong = []
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
        wrong.append("no deepspeed_config_file (batch size, precision and clipping are the run's own)")
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto") != "auto":
        wrong.append("gradient_accumulation_steps: auto (it is a key of the run)")
    if kind == "zero3":
        if is_on("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true"):
            wrong.append("zero3_init_flag: false (every process checks the weights that it has read)")
        if not is_on("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"):
            wrong.append("zero3_save_16bit_model: true (checkpoints here are whole)")
    _say(wrong, f"{kind}.yaml" if kind != "zero1" else "zero2.yaml")


def _say(wrong: list[str], file: str) -> None:
    if wrong:
        raise UserError(f"accelerate's config file ({FILES}/{file} is a right one) should say {'; '.join(wrong)}.")
