"""How does a folder or a Hub name become a model that can be trained, and a trained model a folder again?

Also `preflight`: everything that can be known to go wrong before a run starts, in one message.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import yaml
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

import posttrain.convgpt  # noqa: F401  registers ConvGPT with the Auto classes
from posttrain import checkpoint, files, model_card
from posttrain.chat import Chat
from posttrain.config import ModelSection, TrainingRun
from posttrain.config.trl_fields import NOT_SUPPORTED
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from peft import LoraConfig

TrainingConfig = TypeVar("TrainingConfig", bound=TrainingRun)

# What `accelerate launch` sets in the environment where its config file or its flags ask for a sharded model.
SHARDING = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
TRUE = ("1", "true", "t", "yes", "y", "on")  # what accelerate and transformers take for it
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_device(device: str) -> torch.device:
    """ "auto", "cpu" or "cuda" as this process's own device (torchrun numbers the GPUs of a machine in LOCAL_RANK)."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but torch finds no CUDA GPU here. Write device=cpu (slow for a real model), or check "
            "`nvidia-smi` and that torch was installed with CUDA."
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device("cpu")


def keep_freed_memory() -> None:
    """Let glibc hand out again what this process has freed, instead of giving it back to the system.

    Each training step needs the memory of the last one. Virtual machines in particular take long to provide it.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4  # as in malloc.h
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, -1)  # never give anything back
        mallopt(mmap_max, 0)  # nor take large pieces straight from the system, which go back when they are freed


def has_bf16(device: torch.device) -> bool:
    """True where bfloat16 is multiplied in hardware; every other device takes it too, but slower than float32.

    Of CPUs those with AVX512-BF16 or AMX, by the flags that Linux lists.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.mkldnn.is_available() and not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_flags())


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def settle(cfg: TrainingConfig) -> TrainingConfig:
    """The config of a phase with what only this machine can say: trainer.bf16 where it is left open.

    UserError where a launcher asks for a sharded model: `trainer.fsdp` and the like are refused by the config itself.
    """
    sharded = [name for name in SHARDING if os.environ.get(name, "").lower() in TRUE]
    if sharded:
        raise UserError(
            f"The launcher asks for a sharded model ({sharded[0]}=true, as `accelerate launch` sets it). "
            f"{NOT_SUPPORTED['fsdp']}. Choose `distributed_type: MULTI_GPU` in accelerate's config file "
            "(configs/accelerate), or launch with torchrun."
        )
    if trainer_field(cfg, "bf16") is not None:
        return cfg
    try:
        bf16 = has_bf16(resolve_device(cfg.device)) and not trainer_field(cfg, "fp16")
    except UserError:  # `preflight` says it together with everything else that is wrong
        return cfg
    trainer: Any = cfg.trainer
    update = {"bf16": bf16}
    return cfg.model_copy(
        update={"trainer": trainer | update if isinstance(trainer, dict) else trainer.model_copy(update=update)}
    )


def load(
    model: ModelSection, *, device: str, chat_template: str | None, training: bool = True
) -> tuple[PreTrainedModel, Chat]:
    """The model on its device, and the chat that speaks to it.

    dtype "auto" is float32 whatever the checkpoint holds, so that training has full master weights (autocast supplies
    bfloat16); without `training` it is bfloat16 where the hardware has it. For tuning=qlora the weights are 4-bit; the
    adapter comes from `peft_config`.
    """
    place = resolve_device(device)
    if place.type == "cpu":
        keep_freed_memory()
    chat = load_chat(model, chat_template)
    dtype = torch.float32 if model.dtype == "auto" else getattr(torch, model.dtype)
    if model.dtype == "auto" and not training and has_bf16(place):
        dtype = torch.bfloat16
    quantised: dict[str, Any] = {}
    if training and model.tuning == "qlora":
        quantised = {"quantization_config": _four_bit(place), "device_map": {"": place}}
    if os.path.isdir(model.name_or_path):
        _verify_if_sealed(Path(model.name_or_path))
    net: Any = _load_weights(model, dtype, **quantised)
    if broken := not_finite(net):
        raise UserError(
            f"{model.name_or_path} holds weights that are not finite numbers: {broken}. The run that wrote them went "
            "wrong: name another checkpoint (model.name_or_path=...)."
        )
    for layer in net.modules() if quantised and place.type == "cpu" else ():
        # On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights in the first evaluation, and the kernel for
        # that layout has no gradient: everything trained afterwards would silently get a wrong one.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    if len(chat.tokenizer) > net.get_input_embeddings().weight.shape[0]:
        net.resize_token_embeddings(len(chat.tokenizer))
    if not model.trust_remote_code and hasattr(net.config, "auto_map"):
        del net.config.auto_map  # it names code files that are neither run here nor saved with the weights
    _own_special_tokens(net, chat)
    net = net if quantised else net.to(place)
    _check_it_runs(model.name_or_path, net)
    return net, chat


@torch.no_grad()
def _check_it_runs(name: str, net: Any) -> None:
    """UserError where a model can be loaded and not computed with: a config.json may hold anything."""
    try:
        ids = torch.arange(2, device=net.device)[None]
        finite = torch.isfinite(net(input_ids=ids, use_cache=False).logits).all()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever its code does with a value that does not fit
        raise UserError(
            f"{name} can be loaded, but not computed with ({one_line(error)}). A value of its config.json does not fit:"
            " get a whole copy of the model."
        ) from error
    if not finite:
        raise UserError(
            f"{name} answers with numbers that are not finite. Its weights or its config.json are damaged, or too large"
            " for this precision (model.dtype=float32): get a whole copy of the model."
        )


def load_chat(model: ModelSection, chat_template: str | None) -> Chat:
    """Tokenizer and template; UserError when a previous phase trained with another template."""
    check_source(model)
    load_config(model)  # the tokenizer's loader reads it as well, and would take the blame
    with _read_in_words(f"The tokenizer of {model.name_or_path} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        chat = Chat.load(tokenizer, chat_template)  # what its settings hold may show only when it is used
    chat.require_same_template(_previous_template(model), model.name_or_path)
    return chat


def peft_config(model: ModelSection, net: Any = None, chat: Chat | None = None) -> LoraConfig | None:
    """What peft needs for tuning=lora or qlora; None for full fine-tuning.

    Tokens that the chat had to add have no trained embedding yet: given net and chat, their rows are trained as well.
    """
    if model.tuning == "full":
        return None
    from peft import LoraConfig

    rows = None
    if chat is not None and chat.added_tokens:
        ids = list(range(len(chat.tokenizer) - chat.added_tokens, len(chat.tokenizer)))
        heads = [net.get_input_embeddings()]
        heads += [] if net.config.tie_word_embeddings else [net.get_output_embeddings()]
        rows = {name: ids for name, module in net.named_modules() if any(module is head for head in heads)}
        _pass_on_bias()
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=model.lora.r,
        lora_alpha=model.lora.alpha,
        lora_dropout=model.lora.dropout,
        target_modules=model.lora.target_modules,
        trainable_token_indices=rows,
    )


def adapters_in_float32(net: Any) -> None:
    """Whatever is trained becomes float32, in place, before an optimizer knows it.

    TRL rounds the adapter of a 4-bit model to bfloat16, where small updates are lost: the number after .01 is .01006,
    and a step of Adam at a learning rate of 1e-5 moves a weight by about .00001.
    """
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def not_finite(net: Any) -> str:
    """The parameters that hold inf or nan, in words, e.g. "model.norm.weight (2 of 64)"; "" where there are none."""
    found = []
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point() and not torch.isfinite(parameter).all():
            found.append(f"{name} ({int((~torch.isfinite(parameter)).sum())} of {parameter.numel()})")
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _pass_on_bias() -> None:
    """peft's wrapper around a layer with trained rows passes its weight on, but not the bias a fused head reads."""
    from peft.utils.other import TrainableTokensWrapper

    def bias(wrapper: Any) -> torch.Tensor | None:
        return getattr(wrapper.__dict__["_modules"].get("original_module"), "bias", None)

    TrainableTokensWrapper.bias = property(bias)  # pyright: ignore[reportAttributeAccessIssue]


def save(
    folder: Path,
    net: Any,
    chat: Chat,
    config: dict[str, Any],
    *,
    source: ModelSection,
    history: Sequence[dict[str, Any]] = (),
    **meta: Any,
) -> Path:
    """Hand a phase's result over: whole weights, tokenizer, template, the config that made them, model card, manifest.

    `history` are the records of the phases that made it (posttrain/model_card.py); without them there is no card.

    A LoRA adapter is merged into the weights (into the float32 weights of `source` where those in memory have 4 or 16
    bits, which would round the result) and kept by itself in `adapter/` beside the folder. UserError, and nothing is
    written, where weights are not finite.
    """
    _require_finite(folder, net)
    net_type = net.config.model_type
    if source.tuning != "full":
        from peft import PeftModel

        adapter = net

        def write_adapter(out: Path) -> None:
            adapter.save_pretrained(out)
            if history:
                (out / "README.md").write_text(model_card.render(history, net_type, adapter=True), encoding="utf-8")

        checkpoint.save(Path(folder).with_name("adapter"), write_adapter, **meta)
        if source.tuning == "qlora" or source.dtype in ("bfloat16", "float16"):
            whole: Any = _load_weights(source, torch.float32)
            if len(chat.tokenizer) > whole.get_input_embeddings().weight.shape[0]:
                whole.resize_token_embeddings(len(chat.tokenizer))
            net = PeftModel.from_pretrained(whole, str(Path(folder).with_name("adapter"))).merge_and_unload()
        else:
            net = adapter.merge_and_unload()
        _require_finite(folder, net)
    _own_special_tokens(net, chat)

    def write(out: Path) -> None:
        with no_bars():
            net.save_pretrained(out)
        chat.save(out)
        (out / "run_config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        if history:
            (out / "README.md").write_text(model_card.render(history, net_type), encoding="utf-8")

    meta |= {"history": list(history)} if history else {}
    return checkpoint.save(folder, write, chat_template_sha256=chat.hash, **meta)


def _require_finite(folder: Path, net: Any) -> None:
    if broken := not_finite(net):
        raise UserError(
            f"{folder} is not written, because weights are not finite numbers: {broken}. Start again with a smaller "
            "trainer.learning_rate, or with trainer.bf16=false, trainer.fp16=false."
        )


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """No bar for reading or writing a few files of this disk; downloads keep theirs."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def trainer_field(cfg: Any, name: str) -> Any:
    """A key of the section `trainer`, which is TRL's dict in phases 1 and 2 and our own section in phase 3."""
    return cfg.trainer.get(name) if isinstance(cfg.trainer, dict) else getattr(cfg.trainer, name, None)


def _previous_template(model: ModelSection) -> str | None:
    """The sha256 of the template that a phase of ours trained this checkpoint with; None for any other model."""
    folder = Path(model.name_or_path)
    if not (folder / checkpoint.MANIFEST).exists():
        return None
    meta = checkpoint.read_manifest(folder)["meta"]
    return None if meta.get("phase") == "base" else meta.get("chat_template_sha256")


def _verify_if_sealed(folder: Path) -> None:
    """A checkpoint of ours must be whole; one that came from elsewhere has no manifest to check."""
    if (folder / checkpoint.MANIFEST).exists():
        checkpoint.verify(folder)


def check_source(model: ModelSection) -> None:
    """A local folder must be a checkpoint, a Hub name must look like one; the Hub itself is not asked."""
    if model.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", model.revision or ""):
        raise UserError(
            f"model.trust_remote_code=true runs code that {model.name_or_path} brings along, so it has to be pinned: "
            "write model.revision=<the full 40-digit commit you have read>, or leave trust_remote_code off."
        )
    name, folder = model.name_or_path, Path(model.name_or_path)
    if os.path.isfile(name):
        raise UserError(f"model.name_or_path={name} is a file. Name the folder that holds config.json and the weights.")
    if os.path.isdir(name):
        if not os.path.isfile(folder / "config.json"):
            raise UserError(
                f"model.name_or_path={name} is no checkpoint: it has no config.json. A phase saves the folder "
                "`final` inside its output_dir; an unfinished phase has none yet (finish it with --resume)."
            )
        for file in (folder / "config.json", *checkpoint.weight_files(folder)):
            files.must_be_readable(file, f"model.name_or_path={name}")
        if os.path.exists(folder / checkpoint.MANIFEST):
            checkpoint.verify(folder, weights=False)
        return
    if not HUB_NAME.fullmatch(name) or folder.parts[-1] == "final" or os.path.isdir(folder.parent):
        raise UserError(
            f"model.name_or_path={name} does not exist. It is where the previous phase's result would lie: run that "
            "phase first, or name another checkpoint folder or a Hub model (model.name_or_path=...)."
        )


def load_config(model: ModelSection) -> PreTrainedConfig:
    """The architecture and its sizes, without the weights."""
    file = Path(model.name_or_path) / "config.json"
    if file.is_file():
        content = files.read_json(file, "Get a whole copy of the model.")
        labels = content.get("num_labels")
        if isinstance(labels, int) and labels > MOST_LABELS:  # transformers would make a name for each
            raise UserError(f"{file} is damaged: num_labels is {labels:,}. Get a whole copy of the model.")
    with _read_in_words(f"{model.name_or_path} is no checkpoint that can be loaded"):
        return AutoConfig.from_pretrained(
            model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )


MOST_LABELS = 1_000_000
_SIZE = re.compile(r"num_.*|n_(layer|head|embd|inner)|.*_(size|dim|heads|layers)")  # keys of a config.json


def _check_sizes(model: ModelSection, config: PreTrainedConfig) -> None:
    """UserError where config.json describes a far larger model than the weight files hold.

    transformers would build it first, which takes any amount of memory and time, and then find the weights missing.
    """
    numbers, tensors = weights_held(Path(model.name_or_path))
    remedy = "Its config.json is damaged or belongs to other weights: get a whole copy of the model."
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and not isinstance(longest, int):
        raise UserError(f"{model.name_or_path}: max_position_embeddings is {longest!r}, no number of tokens. {remedy}")
    for key, value in config.get_text_config().to_dict().items():
        most = tensors if key in ("num_hidden_layers", "n_layer") else numbers
        if isinstance(value, int) and _SIZE.fullmatch(key) and value > most:
            held = f"{numbers:,} numbers in {tensors} tensors"
            raise UserError(f"{model.name_or_path}: {key} is {value:,}, but the weight files hold {held}. {remedy}")
    try:
        with torch.device("meta"):
            net = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    except Exception:  # some architectures cannot be built without memory; whatever else is wrong is said when it loads
        return
    described = sum(parameter.numel() for parameter in net.parameters())
    if described > 16 * numbers:  # packed weights hold up to 8 in a number
        raise UserError(
            f"{model.name_or_path}: config.json describes {described:,} parameters, but the weight files hold "
            f"{numbers:,}. {remedy}"
        )


def _load_weights(model: ModelSection, dtype: torch.dtype, **more: Any) -> PreTrainedModel:
    config = load_config(model)
    if os.path.isdir(model.name_or_path):
        _check_sizes(model, config)
    with _read_in_words(f"{model.name_or_path} is no checkpoint that can be loaded"):
        try:
            with no_bars() if os.path.isdir(model.name_or_path) else contextlib.nullcontext():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    model.name_or_path,
                    config=config,
                    revision=model.revision,
                    trust_remote_code=model.trust_remote_code,
                    attn_implementation=model.attn_implementation,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # they are an error all the same, in our words
                    output_loading_info=True,
                    dtype=dtype,
                    **more,
                )
        except ImportError as error:
            raise UserError(
                f"model.attn_implementation={model.attn_implementation} cannot be used here: {one_line(error)}"
            ) from error
    net, found = loaded
    _check_weights(model.name_or_path, net, found)
    return net


def _check_weights(name: str, net: PreTrainedModel, found: dict[str, Any]) -> None:
    """UserError unless every tensor of the model came from the files, and every one in the files was wanted.

    transformers fills what is missing with random numbers and goes on. Tied weights that are stored once are not
    missing, and what an architecture declares to be ignored is not unexpected: `found` holds neither.
    """
    shapes = [f"{key} ({list(there)} instead of {list(wanted)})" for key, there, wanted in found["mismatched_keys"]]
    wrong = [
        f"{len(keys)} {words}: {', '.join(sorted(keys)[:3])}{', ...' if len(keys) > 3 else ''}"
        for keys, words in (
            (set(found["missing_keys"]) - {key for key, *_ in found["mismatched_keys"]}, "missing"),
            (found["unexpected_keys"], "without a place in the model"),
            (shapes, "of another shape"),
            (found["error_msgs"], "not loaded"),
        )
        if keys
    ]
    if wrong:
        raise UserError(
            f"The weight files of {name} do not fit its config.json ({type(net).__name__}). Tensors {'; '.join(wrong)}."
            " What is missing would be random numbers. Get a whole copy of the model (download it again, or take"
            " another checkpoint), or the config.json that belongs to these weights."
        )


@contextlib.contextmanager
def _read_in_words(what: str) -> Iterator[None]:
    """transformers and the libraries below it raise all kinds of errors on a damaged folder; each becomes a UserError.

    The device's own failures are no fault of the folder and pass as they are.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of tensors; what is wrong is said in one paragraph
    try:
        yield
    except (UserError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise UserError(f"{what}: {one_line(error)}") from error
    except BaseException as error:  # a panic of the libraries written in Rust is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _four_bit(place: torch.device) -> Any:
    from transformers import BitsAndBytesConfig

    # on a CPU whoever asks for float32 (trainer.bf16=false) gets it
    compute = torch.bfloat16 if place.type == "cuda" and has_bf16(place) else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def _own_special_tokens(net: Any, chat: Chat) -> None:
    """Model and chat agree on padding and stop; the sampling habits of the model's maker are not carried along."""
    net.config.pad_token_id, net.config.eos_token_id = chat.pad_id, chat.stop_id
    net.generation_config = GenerationConfig(
        bos_token_id=net.config.bos_token_id, pad_token_id=chat.pad_id, eos_token_id=chat.stop_id
    )


def weights_held(folder: Path) -> tuple[int, int]:
    """How many numbers a folder's weight files hold, and how many tensors, by their headers."""
    numbers = tensors = 0
    for file in checkpoint.weight_files(folder):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in list(weights.keys()):
                    numbers += torch.Size(weights.get_slice(name).get_shape()).numel()
                    tensors += 1
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is no weight file that can be loaded: {one_line(error)}") from error
    return numbers, tensors
