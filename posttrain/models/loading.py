"""How does a folder or a Hub name become a model that can be trained, and a trained model a folder again?"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from posttrain.config import ModelSection, TrainingRun
from posttrain.files import read_json
from posttrain.models import convgpt, model_card
from posttrain.models.chat import Chat
from posttrain.models.model_files import (
    check_source,
    check_tokenizer,
    errors_in_words,
    load_config,
    load_weights,
    no_bars,
)
from posttrain.runtime import checkpoint, compat, hardware, launcher, parallel, runlog, sharding
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from peft import LoraConfig

CODE = "modeling_convgpt.py"  # the copy of posttrain/models/convgpt.py beside the weights


def load(
    model: ModelSection, *, device: str, chat_template: str | None, training: bool = True
) -> tuple[PreTrainedModel, Chat]:
    """Load the model onto its device, and its chat.

    Args:
        model: which model, its tuning and dtype. "auto" is float32 whatever the checkpoint holds, so that training has
            full master weights (autocast supplies bfloat16). For tuning=qlora the weights are 4-bit; `peft_config`
            gives the adapter.
        device: "auto", "cpu", "cuda" or "mps".
        chat_template: path of a template, or None for the model's own.
        training: False makes dtype "auto" bfloat16 where the hardware has it.

    Raises:
        UserError: the model is missing, damaged or not supported, or has another template.
    """
    place = hardware.resolve_device(device)
    if place.type == "cpu" and not torch.cuda.is_available():
        hardware.keep_freed_memory()
    chat = load_chat(model, chat_template)
    if launcher.sharding() == "zero3":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # or every process would get a part; Trainer sets it again
    dtype = torch.float32 if model.dtype == "auto" else getattr(torch, model.dtype)
    if model.dtype == "auto" and not training and hardware.has_bf16(place):
        dtype = torch.bfloat16
    quantised: dict[str, Any] = {}
    if training and model.tuning == "qlora":
        quantised = {"quantization_config": _four_bit(place), "device_map": {"": place}}
    net: Any = load_weights(model, dtype, **quantised)
    if broken := parameters_not_finite(net):
        raise UserError(
            f"{model.name_or_path} holds weights that are not finite numbers: {broken}. The run that wrote them went "
            "wrong: name another checkpoint (model.name_or_path=...)."
        )
    if quantised and place.type == "cpu":
        compat.keep_four_bit_layout(net)
    if len(chat.tokenizer) > net.get_input_embeddings().weight.shape[0]:
        net.resize_token_embeddings(len(chat.tokenizer))
    if not model.trust_remote_code and hasattr(net.config, "auto_map"):
        del net.config.auto_map  # it names code files that are neither run here nor saved with the weights
    _own_special_tokens(net, chat)
    net = net if quantised else net.to(place)
    check_it_runs(model.name_or_path, net)
    return net, chat


def load_chat(model: ModelSection, chat_template: str | None) -> Chat:
    """Return tokenizer and template.

    Raises:
        UserError: a previous phase trained with another template.
    """
    check_source(model)
    config = load_config(model)  # the tokenizer's loader reads it as well, and would take the blame
    check_tokenizer(model)
    with errors_in_words(f"The tokenizer of {model.name_or_path} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        _check_ids(model.name_or_path, tokenizer, config)
        previous = _previous_template(model)
        chat = Chat.load(tokenizer, chat_template, previous)  # what its settings hold may show only when it is used
    chat.require_same_template(previous, model.name_or_path)
    return chat


def _check_ids(name: str, tokenizer: Any, config: Any) -> None:
    """Raise UserError for a token without a row in the embedding: it would fail in the middle of a run."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if rows is not None and largest >= max(rows, len(tokenizer)):
        raise UserError(
            f"The tokenizer of {name} does not fit the model: token {token!r:.60} has the number {largest}, there are "
            f"{rows} rows of embeddings. tokenizer.json is damaged or of another model: take the model's own."
        )


def other_tokens(own: Chat, other: Chat) -> str:
    """Return in words how the tokens of another model's chat differ from one's own; "" where both read the same ids."""
    ours, theirs = own.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    if apart := sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[::-1]):
        token = apart[0][0]
        return (
            f"{len(theirs):,} tokens instead of {len(ours):,}, and {token!r:.60} is number"
            f" {theirs.get(token, 'none')} instead of {ours.get(token, 'none')}"
        )
    if other.added_tokens:
        return f"its last {other.added_tokens} tokens were added for the chat template, and it was not trained on them"
    if apart := sorted(own.control_ids ^ other.control_ids):
        return f"{own.tokenizer.convert_ids_to_tokens(apart[0])!r:.60} is a control token for one of them alone"
    if own.stop_id != other.stop_id:
        ends = [str(chat.tokenizer.convert_ids_to_tokens(chat.stop_id)) for chat in (other, own)]
        return f"a turn ends with {ends[0]!r:.60} instead of {ends[1]!r:.60}"
    return ""


def peft_config(model: ModelSection, net: Any = None, chat: Chat | None = None) -> LoraConfig | None:
    """Return peft's settings for tuning=lora or qlora; None for full fine-tuning.

    Args:
        model: which tuning.
        net: the loaded model.
        chat: its chat. Tokens that the chat had to add have no trained embedding yet: their rows are trained as well.
    """
    if model.tuning == "full":
        return None
    from peft import LoraConfig

    compat.ignore_renamed_argument()
    rows = None
    if chat is not None and chat.added_tokens:
        ids = list(range(len(chat.tokenizer) - chat.added_tokens, len(chat.tokenizer)))
        heads = [net.get_input_embeddings()]
        heads += [] if net.config.tie_word_embeddings else [net.get_output_embeddings()]
        rows = {name: ids for name, module in net.named_modules() if any(module is head for head in heads)}
        compat.pass_on_bias()
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=model.lora.r,
        lora_alpha=model.lora.alpha,
        lora_dropout=model.lora.dropout,
        target_modules=model.lora.target_modules,
        trainable_token_indices=rows,
    )
    if net is not None:
        _must_be_mergeable(model, settings, net)
    return settings


def _must_be_mergeable(model: ModelSection, settings: LoraConfig, net: Any) -> None:
    """Raise UserError for an adapter that cannot be merged: on a tied embedding, or one with trained rows.

    Merging adds what one layer has learnt to the weights of both, so that what is saved is another model.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    heads = [net.get_input_embeddings(), net.get_output_embeddings()]
    names = [name for name, module in net.named_modules() if any(module is head for head in heads)]
    layers = [name for name in names if check_target_module_exists(settings, name)]
    if net.config.tie_word_embeddings:
        why = "the output layer is the embedding, and merging an adapter on one of them changes both"
    else:
        why = "rows of tokens that the chat template adds are trained there, and peft combines this with no adapter"
        layers = [name for name in layers if name in (settings.trainable_token_indices or {})]
    if layers:
        raise UserError(
            f"model.lora.target_modules={model.lora.target_modules} puts an adapter on {' and '.join(layers)}, but"
            f" {why}. Leave {'it' if len(layers) == 1 else 'them'} out."
        )


def adapters_in_float32(net: Any) -> None:
    """Convert trained parameters to float32, in place, before an optimizer holds them.

    TRL rounds the adapter of a 4-bit model to bfloat16, where small updates are lost: the number after .01 is .01006,
    and a step of Adam at a learning rate of 1e-5 moves a weight by about .00001.
    """
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def parameters_not_finite(net: Any) -> str:
    """Return the parameters that hold inf or nan, e.g. "model.norm.weight (2 of 64)"; "" if all are finite.

    Where the model is sharded, all processes must call it: each looks at its own part.
    """
    counts: dict[str, int] = {}
    for name, parameter in net.named_parameters():
        own = sharding.held(parameter).detach()
        if own.is_floating_point() and (count := int((~torch.isfinite(own)).sum())):
            counts[name] = count
    if sharding.is_sharded(net):
        parts, counts = parallel.gather(list(counts.items())), {}
        for name, count in parts:
            counts[name] = counts.get(name, 0) + count
    of = {name: getattr(parameter, "ds_numel", parameter.numel()) for name, parameter in net.named_parameters()}
    described = [f"{name} ({count} of {of[name]})" for name, count in counts.items()]
    more = f" and {len(described) - 3} more" if len(described) > 3 else ""
    return ", ".join(described[:3]) + more


def whole_again(net: Any, cfg: TrainingRun, chat: Chat) -> Any:
    """Return an ordinary model on the CPU with the weights of a sharded one, in the first process; None in the others.

    All processes must call it. It loads the model again, with its adapter, and copies the weights.
    """
    weights = sharding.whole_weights(net)
    if not runlog.is_main_process():
        return None
    made, _ = load(cfg.model, device="cpu", chat_template=cfg.chat.template)
    if (adapter := peft_config(cfg.model, made, chat)) is not None:
        from peft import get_peft_model

        made = get_peft_model(made, adapter)
        adapters_in_float32(made)
    made.load_state_dict(weights)
    return made


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
    """Write a phase's result: whole weights, tokenizer, template, the config that made them, model card, manifest.

    A LoRA adapter is merged into the weights (into the float32 weights of `source` where those in memory have 4 or 16
    bits, which would round the result) and also saved in `adapter/` beside the folder.

    Args:
        folder: the result's folder, as runs/mine/final.
        net: the trained model.
        chat: its chat.
        config: the run's config as values of JSON.
        source: the model that the phase started from.
        history: `model_card.phase_record` of the phases that made the model; without them there is no card.
        **meta: values to store in the manifest, as `phase` and `step`.

    Raises:
        UserError: a weight is not finite; nothing is written then.
    """
    _require_finite(folder, net)
    net_type = net.config.model_type
    if source.tuning != "full":
        from peft import PeftModel

        adapter = net

        def write_adapter(out: Path) -> None:
            adapter.save_pretrained(out)
            if history:
                (out / "README.md").write_text(
                    model_card.render_card(history, net_type, adapter=True), encoding="utf-8"
                )

        checkpoint.save(Path(folder).with_name("adapter"), write_adapter, **meta)
        if source.tuning == "qlora" or source.dtype in ("bfloat16", "float16"):
            whole: Any = load_weights(source, torch.float32)
            if len(chat.tokenizer) > whole.get_input_embeddings().weight.shape[0]:
                whole.resize_token_embeddings(len(chat.tokenizer))
            net = PeftModel.from_pretrained(whole, str(Path(folder).with_name("adapter"))).merge_and_unload()
        else:
            net = adapter.merge_and_unload()
        _require_finite(folder, net)
    _own_special_tokens(net, chat)
    for config_of in (net.config, net.config.get_text_config()):
        config_of.use_cache = True  # transformers' Trainer turns it off, in the model's config

    def write(out: Path) -> None:
        with no_bars():
            net.save_pretrained(out)
        add_code(out)
        chat.save(out)
        (out / "run_config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        if history:
            (out / "README.md").write_text(model_card.render_card(history, net_type), encoding="utf-8")

    meta |= {"history": list(history)} if history else {}
    return checkpoint.save(folder, write, chat_template_sha256=chat.hash, **meta)


def add_code(folder: Path) -> None:
    """Write the file that computes a ConvGPT beside its weights, named in config.json under `auto_map`.

    Elsewhere `trust_remote_code=True` loads the model with it; here nothing of it is run. The folder's manifest holds
    its checksum. A folder that has the file, and one of another architecture, stays as it is.
    """
    place = folder / "config.json"
    config = read_json(place, "Use another checkpoint.")
    if config.get("model_type") != convgpt.ConvGPTConfig.model_type or (folder / CODE).exists():
        return
    shutil.copyfile(convgpt.__file__, folder / CODE)
    classes = {
        "AutoConfig": convgpt.ConvGPTConfig,
        "AutoModel": convgpt.ConvGPTModel,
        "AutoModelForCausalLM": convgpt.ConvGPTForCausalLM,
    }
    config["auto_map"] = {auto: f"{Path(CODE).stem}.{own.__name__}" for auto, own in classes.items()}
    place.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _require_finite(folder: Path, net: Any) -> None:
    if broken := parameters_not_finite(net):
        raise UserError(
            f"{folder} is not written, because weights are not finite numbers: {broken}. Start again with a smaller "
            "trainer.learning_rate, or with trainer.bf16=false, trainer.fp16=false."
        )


def _previous_template(model: ModelSection) -> str | None:
    """Return the sha256 of the template that a phase of ours trained this checkpoint with; None for any other model."""
    folder = Path(model.name_or_path)
    if not (folder / checkpoint.MANIFEST).exists():
        return None
    meta = checkpoint.read_manifest(folder)["meta"]
    return None if meta.get("phase") == "base" else meta.get("chat_template_sha256")


def _four_bit(place: torch.device) -> Any:
    from transformers import BitsAndBytesConfig

    # on a CPU trainer.bf16=false means float32
    compute = torch.bfloat16 if place.type == "cuda" and hardware.has_bf16(place) else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def _own_special_tokens(net: Any, chat: Chat) -> None:
    """Give the model the padding and stop tokens of the chat, and drop its maker's sampling settings."""
    net.config.pad_token_id, net.config.eos_token_id = chat.pad_id, chat.stop_id
    net.generation_config = GenerationConfig(
        bos_token_id=net.config.bos_token_id, pad_token_id=chat.pad_id, eos_token_id=chat.stop_id
    )


def describe_training(cfg: TrainingRun, net: Any, device: torch.device) -> str:
    """Return e.g. "0.21 M parameters (all trained), cpu, 1 process, float32, learning rate 2e-05".

    A second sentence warns of a learning rate that is too low for this tuning.
    """
    parameters = list(net.parameters())
    count, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    share = "all trained" if trained == count else f"{trained / 1e6:.2f} M trained"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = cfg.trainer if isinstance(cfg.trainer, dict) else cfg.trainer.model_dump()
    computes = "bfloat16" if trainer.get("bf16") else "float16" if trainer.get("fp16") else "float32"
    line = (
        f"{count / 1e6:.2f} M parameters ({share}), {device}, {processes} process{'es' if processes > 1 else ''}, "
        f"{computes}, learning rate {cfg.learning_rate:g}"
    )
    warning = cfg.low_rate()
    return f"{line}\nWARNING: {warning}" if warning else line


@torch.no_grad()
def check_it_runs(name: str, model: PreTrainedModel) -> None:
    """Raise UserError where a model can be loaded but not run: a config.json may hold anything."""
    try:
        ids = torch.arange(2, device=model.device)[None]
        finite = torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of its code for a value that does not fit
        raise UserError(
            f"{name} can be loaded, but does not run ({one_line(error)}). A value of its config.json does not fit:"
            " get a whole copy of the model."
        ) from error
    if not finite:
        raise UserError(
            f"{name} answers with numbers that are not finite. Its weights or its config.json are damaged, or too large"
            " for this precision (model.dtype=float32): get a whole copy of the model."
        )
