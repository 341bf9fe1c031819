"""Is there a loadable model in a folder, or under a Hub name?  If not, it is refused before it is built."""

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

# Limits of config.json: transformers makes a name for each label, and a list or a module for each part.
MOST_LABELS, MOST_PARTS, LARGEST = 1_000_000, 100_000, 2**31
MOST_LETTERS = 1000  # that a tokenizer may make of one, and tokens that it may put around a text
_PARTS = re.compile(r"(n|num)_\w*(layer|block|expert|head|stage)s?|\w*_(layers|blocks|experts|heads)|depth")
_SIZE = re.compile(r"num_.*|n_(layer|head|embd|inner)|.*_(size|dim|heads|layers)")  # keys of a config.json


def check_source(model: ModelSection, key: str = "model.name_or_path") -> None:
    """Check that a local folder is a checkpoint, or a Hub name looks like one; without a request to the Hub.

    key: which names it.
    """
    if model.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", model.revision or ""):
        raise UserError(
            f"model.trust_remote_code=true runs code that {model.name_or_path} brings along, so it has to be pinned: "
            "write model.revision=<the full 40-digit commit you have read>, or leave trust_remote_code off."
        )
    name, folder = model.name_or_path, Path(model.name_or_path)
    if os.path.isfile(name):
        words = f"{key}={name} is a file. Name the folder that holds config.json and the weights."
        if folder.suffix.lower() == ".gguf":
            words += f" `posttrain gguf {shlex.quote(name)} FOLDER` makes such a folder of it."
        raise UserError(words)
    if os.path.isdir(name):
        _must_be_no_adapter(model, key)
        if not os.path.isfile(folder / "config.json"):
            if os.path.isfile(folder / "final" / "config.json"):
                raise UserError(f"{key}={name} is a run's folder. Name its result: {folder / 'final'}.")
            raise UserError(
                f"{key}={name} is not a checkpoint: it has no config.json. A phase saves the folder "
                "`final` inside its output_dir when it ends (finish it with --resume)."
            )
        for file in (folder / "config.json", *checkpoint.weight_files(folder)):
            files.must_be_readable(file, f"{key}={name}")
        checkpoint.verify_if_sealed(folder, weights=False)
        return
    if not HUB_NAME.fullmatch(name) or folder.parts[-1] == "final" or os.path.isdir(folder.parent):
        raise UserError(
            f"{key}={name} does not exist. "
            + (
                f"`python -m posttrain.data.embedded --out {name}` makes it, the quickstart's base model. Or name"
                if folder.parts[-2:] == ("quickstart", "base")
                else "It would be the folder of the previous phase's result: run that phase first, or name"
                if key == "model.name_or_path"
                else "Name"
            )
            + f" another checkpoint folder or a Hub model ({key}=...)."
        )


@contextlib.contextmanager
def named_by(key: str) -> Iterator[None]:
    """Name this key in refusals of a model, which name `model.name_or_path`."""
    try:
        yield
    except UserError as problem:
        raise UserError(str(problem).replace("model.name_or_path", key)) from problem


def _must_be_no_adapter(model: ModelSection, key: str = "model.name_or_path") -> None:
    """Raise UserError for the folder or the Hub name of a PEFT adapter, even where a model lies beside it.

    transformers would load the base model that the adapter names instead of the folder's.
    """
    with errors_in_words(f"{model.name_or_path} is not a checkpoint that can be loaded"):
        file = find_adapter_config_file(model.name_or_path, revision=model.revision)
    if file is None:
        return
    merged = Path(model.name_or_path).with_name("final")
    base = files.read_json(Path(file), "Get a whole copy of the model.").get("base_model_name_or_path")
    remedy = f"Name the folder in which it is merged: {merged}."
    if not os.path.isfile(merged / "config.json"):
        remedy = (
            f"Merge it into its base model ({base!s:.200}) with peft (PeftModel.from_pretrained, merge_and_unload),"
            " save that and the tokenizer with save_pretrained, and name that folder."
        )
        if os.path.isfile(Path(model.name_or_path) / "config.json"):
            remedy += " If you mean the model in the same folder, remove the adapter's files."
    raise UserError(
        f"{key}={model.name_or_path} is an adapter: it contains {Path(file).name}. An adapter only changes a model."
        f" {remedy}"
    )


def load_config(model: ModelSection) -> PreTrainedConfig:
    """Return the architecture and its sizes, without the weights."""
    file = Path(model.name_or_path) / "config.json"
    if file.is_file():
        content = files.read_json(file, "Get a whole copy of the model.")
    else:
        _must_be_no_adapter(model)
        with errors_in_words(f"{model.name_or_path} is not a checkpoint that can be loaded"):
            content, _ = PreTrainedConfig.get_config_dict(model.name_or_path, revision=model.revision)
    _check_numbers(str(file) if file.is_file() else f"config.json of {model.name_or_path}", content)
    with errors_in_words(f"{model.name_or_path} is not a checkpoint that can be loaded"):
        return AutoConfig.from_pretrained(
            model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )


def _check_numbers(where: str, content: dict[str, Any]) -> None:
    """Raise UserError for a number that no model has: transformers would count up to it before anything is compared."""
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
    """Raise UserError where the rules in tokenizer.json may make a text much longer.

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
    """Return how many letters a tokenizer's step makes of `letters`, at most: _letters({"type": "Fuse"}, 3.0) -> 3.0.

    Only the rules in the file count, not the fixed ones of tokenizers (NFKC makes up to 18 letters of one).
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
    """Return how many tokens a post-processor of a tokenizer puts around a text."""
    if step is None:
        return 0
    many = sum(map(_tokens_around, step.get("processors", ())))
    for part in step["single"] if step["type"] == "TemplateProcessing" else ():
        if "SpecialToken" in part:
            many += len(step["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    return many


def load_weights(model: ModelSection, dtype: torch.dtype, **more: Any) -> PreTrainedModel:
    """Load a model from its files and check every tensor; `more` goes to `from_pretrained`."""
    if os.path.isdir(model.name_or_path):
        checkpoint.verify_if_sealed(Path(model.name_or_path))
    config = load_config(model)
    if os.path.isdir(model.name_or_path):
        _check_sizes(model, config)
    with errors_in_words(f"{model.name_or_path} is not a checkpoint that can be loaded"):
        try:
            with no_bars() if os.path.isdir(model.name_or_path) else contextlib.nullcontext():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    model.name_or_path,
                    config=config,
                    revision=model.revision,
                    trust_remote_code=model.trust_remote_code,
                    attn_implementation=model.attn_implementation,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # they are reported below
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
                f"model.attn_implementation={model.attn_implementation} does not exist for {config.model_type}: write"
                " model.attn_implementation=eager."
            ) from error
    net, info = loaded
    _check_weights(model.name_or_path, net, info)
    say_what_is_tied(model.name_or_path, net, model.trust_remote_code)
    return net


def _check_sizes(model: ModelSection, config: PreTrainedConfig) -> None:
    """Raise UserError where config.json describes a far larger model than the weight files hold.

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


def _check_weights(name: str, net: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise UserError unless the files hold every tensor of the model, and no others.

    transformers would fill what is missing with random numbers. `info` lists neither tied weights that are stored once
    nor what an architecture declares to be ignored.
    """
    shapes = [f"{key} ({list(there)} instead of {list(expected)})" for key, there, expected in info["mismatched_keys"]]
    wrong = [
        f"{len(keys)} {words}: {', '.join(sorted(keys)[:3])}{', ...' if len(keys) > 3 else ''}"
        for keys, words in (
            (set(info["missing_keys"]) - {key for key, *_ in info["mismatched_keys"]}, "missing"),
            (info["unexpected_keys"], "without a place in the model"),
            (shapes, "of another shape"),
            (info["error_msgs"], "not loaded"),
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
    """Correct `tie_word_embeddings` where the files hold different tensors for output layer and embedding.

    transformers loads both but leaves `tie_word_embeddings: true` in the config, so that the output layer would be lost
    when the model is saved and loaded again, or gets more rows.

    Raises:
        UserError: the architecture computes something else without tied weights.
    """
    layer, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    if layer is None or layer.weight is embedding.weight or not net.config.tie_word_embeddings:
        return
    tied = _without_memory(net.config, trust_remote_code)
    for config in (net.config, net.config.get_text_config()):
        config.tie_word_embeddings = False
    untied = _without_memory(net.config, trust_remote_code)
    if tied is not None and untied is not None and _shapes(tied) != _shapes(untied):
        raise UserError(
            f"{name}: in config.json the output layer is the embedding (tie_word_embeddings: true), but the weight"
            f" files hold another output layer, for which {type(net).__name__} has no place. Get a whole copy of the"
            " model."
        )


def _shapes(net: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in net.named_parameters(remove_duplicate=False)}


def _without_memory(config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:  # some architectures cannot be built without memory; other errors show at loading
        return None


def learned_positions(config: PreTrainedConfig, trust_remote_code: bool = False) -> int | None:
    """Return the number of position embeddings, which limits the tokens of a row; None without any."""
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
    """Turn any error that a damaged folder causes in transformers and the libraries below it into a UserError.

    The device's own failures are not the folder's fault and pass unchanged.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # hides its table of tensors; one paragraph names the problem
    try:
        yield
    except (UserError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise UserError(f"{what}: {one_line(error)}") from error
    except BaseException as error:  # a panic is not an Exception
        if not compat.is_rust_panic(error):
            raise
        raise UserError(f"{what}: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Show no bar for reading or writing a few files of this disk; downloads keep theirs."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def weights_held(folder: Path) -> tuple[int, int]:
    """Return the count of numbers in a folder's weight files, and of tensors, from their headers."""
    numbers = tensors = 0
    for file in checkpoint.weight_files(folder):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in list(weights.keys()):
                    numbers += torch.Size(weights.get_slice(name).get_shape()).numel()
                    tensors += 1
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is not a weight file that can be loaded: {one_line(error)}") from error
    return numbers, tensors
