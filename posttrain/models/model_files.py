"""Is what lies in a folder, or under a Hub name, a model that can be loaded?  Refused in words before it is built."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

import posttrain.models.convgpt  # noqa: F401  registers ConvGPT with the Auto classes
from posttrain import files
from posttrain.config import ModelSection
from posttrain.runtime import checkpoint, compat
from posttrain.types import HUB_NAME, UserError, one_line

# What config.json may ask for at most: transformers makes a name for each label, and a list or a module of each part.
MOST_LABELS, MOST_PARTS, LARGEST = 1_000_000, 100_000, 2**31
MOST_LETTERS = 1000  # that a tokenizer may make of one, and tokens that it may put around a text
_PARTS = re.compile(r"(n|num)_\w*(layer|block|expert|head|stage)s?|\w*_(layers|blocks|experts|heads)|depth")
_SIZE = re.compile(r"num_.*|n_(layer|head|embd|inner)|.*_(size|dim|heads|layers)")  # keys of a config.json


def check_source(model: ModelSection) -> None:
    """A local folder must be a checkpoint, a Hub name must look like one; the Hub itself is not asked."""
    if model.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", model.revision or ""):
        raise UserError(
            f"model.trust_remote_code=true runs code that {model.name_or_path} brings along, so it has to be pinned: "
            "write model.revision=<the full 40-digit commit you have read>, or leave trust_remote_code off."
        )
    name, folder = model.name_or_path, Path(model.name_or_path)
    if os.path.isfile(name):
        words = f"model.name_or_path={name} is a file. Name the folder that holds config.json and the weights."
        if folder.suffix.lower() == ".gguf":
            words += f" `posttrain gguf {shlex.quote(name)} FOLDER` makes such a folder of it."
        raise UserError(words)
    if os.path.isdir(name):
        _must_be_no_adapter(model)
        if not os.path.isfile(folder / "config.json"):
            if os.path.isfile(folder / "final" / "config.json"):
                raise UserError(f"model.name_or_path={name} is a run's folder. Name its result: {folder / 'final'}.")
            raise UserError(
                f"model.name_or_path={name} is no checkpoint: it has no config.json. A phase saves the folder "
                "`final` inside its output_dir; an unfinished phase has none yet (finish it with --resume)."
            )
        for file in (folder / "config.json", *checkpoint.weight_files(folder)):
            files.must_be_readable(file, f"model.name_or_path={name}")
        checkpoint.verify_if_sealed(folder, weights=False)
        return
    if not HUB_NAME.fullmatch(name) or folder.parts[-1] == "final" or os.path.isdir(folder.parent):
        raise UserError(
            f"model.name_or_path={name} does not exist. It is where the previous phase's result would lie: run that "
            "phase first, or name another checkpoint folder or a Hub model (model.name_or_path=...)."
        )


def _must_be_no_adapter(model: ModelSection) -> None:
    """UserError for the folder or the Hub name of a PEFT adapter, also where a model lies beside it.

    transformers would load the base model that the adapter names instead of what lies in the folder.
    """
    with errors_in_words(f"{model.name_or_path} is no checkpoint that can be loaded"):
        found = find_adapter_config_file(model.name_or_path, revision=model.revision)
    if found is None:
        return
    merged = Path(model.name_or_path).with_name("final")
    base = files.read_json(Path(found), "Get a whole copy of the model.").get("base_model_name_or_path")
    remedy = f"Name the folder in which it is merged: {merged}."
    if not os.path.isfile(merged / "config.json"):
        remedy = (
            f"Merge it into its base model ({base!s:.200}) with peft (PeftModel.from_pretrained, merge_and_unload),"
            " save that and the tokenizer with save_pretrained, and name that folder."
        )
        if os.path.isfile(Path(model.name_or_path) / "config.json"):
            remedy += " If you mean the model that lies beside it, take the adapter's files away."
    raise UserError(
        f"{model.name_or_path} is an adapter: {Path(found).name} lies there. An adapter changes a model and is not one"
        f" itself. {remedy}"
    )


def load_config(model: ModelSection) -> PreTrainedConfig:
    """The architecture and its sizes, without the weights."""
    file = Path(model.name_or_path) / "config.json"
    if file.is_file():
        content = files.read_json(file, "Get a whole copy of the model.")
    else:
        _must_be_no_adapter(model)
        with errors_in_words(f"{model.name_or_path} is no checkpoint that can be loaded"):
            content, _ = PreTrainedConfig.get_config_dict(model.name_or_path, revision=model.revision)
    _check_numbers(str(file) if file.is_file() else f"config.json of {model.name_or_path}", content)
    with errors_in_words(f"{model.name_or_path} is no checkpoint that can be loaded"):
        return AutoConfig.from_pretrained(
            model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )


def _check_numbers(where: str, content: dict[str, Any]) -> None:
    """UserError for a number that no model has: transformers would count up to it before anything is compared."""
    inner = [content]
    while inner:
        for key, value in inner.pop().items():
            if isinstance(value, dict):
                inner.append(value)
            most = MOST_LABELS if key == "num_labels" else MOST_PARTS if _PARTS.fullmatch(key) else LARGEST
            counted = key == "num_labels" or _PARTS.fullmatch(key) or _SIZE.fullmatch(key)
            if counted and isinstance(value, int | float) and value > most:
                raise UserError(
                    f"{where} is damaged: {key} is {f'{value:,}'[:40]}, and no model has more than {most:,}. Get a"
                    " whole copy of the model."
                )


def check_tokenizer(model: ModelSection) -> None:
    """UserError where the rules in tokenizer.json may make much more of a text than was there.

    Forty rules that replace "a" by "aa" make 2^40 letters of one. They are counted before the tokenizer is loaded,
    because loading applies them to the added tokens.
    """
    with errors_in_words(f"The tokenizer of {model.name_or_path} cannot be loaded"):
        file = cached_file(
            model.name_or_path, "tokenizer.json", revision=model.revision, _raise_exceptions_for_missing_entries=False
        )
        if file is None:
            return
        rules = files.read_json(Path(file), "Get a whole copy of the model.")
        for key in ("normalizer", "decoder"):
            if (letters := _letters(rules.get(key), 1.0)) > MOST_LETTERS:
                raise UserError(
                    f"The tokenizer of {model.name_or_path} cannot be used: the {key} in tokenizer.json may make"
                    f" {letters:.3g} letters of one. Take the model's own."
                )
        if (tokens := _tokens_around(rules.get("post_processor"))) > MOST_LETTERS:
            raise UserError(
                f"The tokenizer of {model.name_or_path} cannot be used: it puts {tokens:,} tokens around every text."
                " tokenizer.json is damaged or of another model: take the model's own."
            )


def _letters(step: Any, letters: float) -> float:
    """How many letters a step of a tokenizer makes of so many, at most: _letters({"type": "Fuse"}, 3.0) -> 3.0.

    Counted is what a file says, not the fixed rules of tokenizers (NFKC makes up to 18 of one).
    """
    if step is None:
        return letters
    for part in [*step.get("normalizers", ()), *step.get("decoders", ())]:
        letters = _letters(part, letters)
    if step["type"] == "Prepend":
        return letters + len(step["prepend"])
    if step["type"] == "Replace":
        pattern, content = step["pattern"].get("String"), len(step["content"])
        return letters * (max(1.0, content / len(pattern)) if pattern else 1.0 + content)
    return letters


def _tokens_around(step: Any) -> int:
    """How many tokens a post-processor of a tokenizer puts around a text."""
    if step is None:
        return 0
    many = sum(map(_tokens_around, step.get("processors", ())))
    for part in step["single"] if step["type"] == "TemplateProcessing" else ():
        if "SpecialToken" in part:
            many += len(step["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    return many


def load_weights(model: ModelSection, dtype: torch.dtype, **more: Any) -> PreTrainedModel:
    """The model as its files say, every tensor checked; `more` goes to `from_pretrained`."""
    if os.path.isdir(model.name_or_path):
        checkpoint.verify_if_sealed(Path(model.name_or_path))
    config = load_config(model)
    if os.path.isdir(model.name_or_path):
        _check_sizes(model, config)
    with errors_in_words(f"{model.name_or_path} is no checkpoint that can be loaded"):
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
        except ValueError as error:
            if "does not support" not in str(error) or "attention" not in str(error).lower():
                raise
            raise UserError(
                f"model.attn_implementation={model.attn_implementation} is nothing that {config.model_type} has: write"
                " model.attn_implementation=eager."
            ) from error
    net, found = loaded
    _check_weights(model.name_or_path, net, found)
    say_what_is_tied(model.name_or_path, net, model.trust_remote_code)
    return net


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
    net = _without_memory(config, model.trust_remote_code)
    if net is None:
        return
    described = sum(parameter.numel() for parameter in net.parameters())
    if described > 16 * numbers:  # packed weights hold up to 8 in a number
        raise UserError(
            f"{model.name_or_path}: config.json describes {described:,} parameters, but the weight files hold "
            f"{numbers:,}. {remedy}"
        )


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


def say_what_is_tied(name: str, net: Any, trust_remote_code: bool = False) -> None:
    """Let the config say that the output layer is not the embedding, where the files hold two different tensors.

    transformers then loads both and leaves `tie_word_embeddings: true` in the config. Whoever believes it when the
    model is saved and loaded again, or gets more rows, drops the output layer. UserError for an architecture that is
    another one without the tie.
    """
    layer, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    if layer is None or layer.weight is embedding.weight or not net.config.tie_word_embeddings:
        return
    as_said = _without_memory(net.config, trust_remote_code)
    for config in (net.config, net.config.get_text_config()):
        config.tie_word_embeddings = False
    as_held = _without_memory(net.config, trust_remote_code)
    if as_said is not None and as_held is not None and _shapes(as_said) != _shapes(as_held):
        raise UserError(
            f"{name}: config.json says that the output layer is the embedding (tie_word_embeddings: true), but the"
            f" weight files hold another output layer, which {type(net).__name__} has no place for beside such an"
            " embedding. Get a whole copy of the model."
        )


def _shapes(net: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in net.named_parameters(remove_duplicate=False)}


def _without_memory(config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:  # some architectures cannot be built without memory; whatever else is wrong is said when it loads
        return None


def learned_positions(config: PreTrainedConfig, trust_remote_code: bool = False) -> int | None:
    """How many positions the model has an embedding for, and no more tokens can stand in a row; None without such."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    net = _without_memory(config, trust_remote_code)
    if net is None:
        return None
    tables = [layer for layer in net.modules() if isinstance(layer, torch.nn.Embedding)]
    others = [layer.num_embeddings for layer in tables if layer is not net.get_input_embeddings()]
    return most if any(most <= count <= most + 2 for count in others) else None  # OPT has two rows for padding


@contextlib.contextmanager
def errors_in_words(what: str) -> Iterator[None]:
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
    except BaseException as error:  # a panic is no Exception
        if not compat.is_rust_panic(error):
            raise
        raise UserError(f"{what}: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """No bar for reading or writing a few files of this disk; downloads keep theirs."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


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
