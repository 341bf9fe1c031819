"""Write a trained model in a form that other programs run.

    posttrain export runs/mine/phase3 --to gguf --type q8_0   # one file: llama.cpp, LM Studio
    posttrain export runs/mine/phase3 --to ollama             # a folder: ollama create mine -f FOLDER/Modelfile
    posttrain export runs/mine/phase1 --to merged             # a folder: transformers, vLLM
    posttrain export runs/mine/phase1 --to adapter            # a folder: peft

RUN is a phase's folder, its folder `final`, the folder of phase1, phase2 and phase3, or a folder with an adapter, which
is merged into its base model; a tokenizer beside the adapter is taken before that of the base model.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from posttrain.config import ModelSection, run
from posttrain.files import read_json, write_whole
from posttrain.runtime import checkpoint, runlog
from posttrain.types import UserError, one_line

FORMS = ("gguf", "ollama", "merged", "adapter")
KINDS = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}  # bytes of a number
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # peft reads either
# Beside the weights, which `checkpoint.weight_files` knows: the model card, and code of models that bring their own.
BESIDE_WEIGHTS = ("README.md", "*.py")
WITH_TOKENS = ("tokenizer.json", "vocab.*", "*.model")  # one of them holds the tokens of a tokenizer
TOKENIZER_FILES = (
    *WITH_TOKENS,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
ADAPTER_FILES = ("adapter_*", "README.md", *TOKENIZER_FILES)
# Names of embeddings in an adapter's file: alone, below LoRA, and below tokens that are trained by themselves.
SAVED_EMBEDDINGS = ("weight", "base_layer.weight", "token_adapter.base_layer.weight")


def export_run(source: Path, form: str, out: Path, kind: str = "f16") -> Path:
    """Write the model of a run and return what was written: a file for "gguf", else a folder.

    Args:
        source: a run, the folder of a model or that of an adapter.
        form: one of `FORMS`.
        out: where; nothing may be there.
        kind: of the matrices in a GGUF file, one of `KINDS`.

    Raises:
        UserError: there is no such model, it does not have this form, its weight files are not whole, its weights are
            not finite (GGUF, or once an adapter is merged), something is at `out`, or nothing can be written there.
    """
    if out.exists():
        raise UserError(f"{out} already exists and is not changed. Write --out with another path.")
    from posttrain.serving.publish.content import model_of

    is_adapter, place = (source / ADAPTER).is_file(), source.resolve()
    # A run's own adapter alone: a checkpoint beside `final` is of another step.
    own = is_adapter and place.name == "adapter"
    if own and form != "adapter" and (place.with_name("final") / "config.json").is_file():
        source, is_adapter = place.with_name("final"), False  # merged, with tokens and template of training
    if form == "adapter":
        return _copy_adapter(source if is_adapter else _adapter_of(source), out)
    if form == "merged":
        return _merge(source, out) if is_adapter else _copy_model(model_of(source), out)

    from posttrain.models import gguf_writer
    from posttrain.serving import ollama

    name, model = _name(source), _base_of(source) if is_adapter else str(model_of(source))
    section, adapter = ModelSection(name_or_path=model), source if is_adapter else None
    config, tokenizer = load_tokens(section, adapter)
    if reason := gguf_writer.reason_against(config, tokenizer):
        raise UserError(f"{name} cannot be written as GGUF: {reason}.")
    make_room(out)
    net = _weights(section, adapter, config, tokenizer)
    checkpoint.needs_free_space(out, round(KINDS[kind] * net.num_parameters()))
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    file = part / "model.gguf"
    try:
        gguf_writer.write_gguf(net, tokenizer, file, kind, name)
        if form == "gguf":
            os.replace(file, out)
        else:
            write_whole(part / "Modelfile", ollama.modelfile(tokenizer, config.max_position_embeddings))
            os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _name(source: Path) -> str:
    """Return a name for the model: of the folders above `final` and the phases."""
    parts = [part for part in source.resolve().parts if part not in ("final", "adapter")]
    return "-".join(parts[-2:]) if parts[-1].startswith("phase") else parts[-1]


def make_room(out: Path) -> None:
    """Make the folder that `out` will lie in, before a model is loaded."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out.parent):  # a folder may exist in which nothing can be created
            pass
    except OSError as error:
        raise UserError(
            f"Nothing can be written at {out} ({one_line(error)}). Write --out with another path."
        ) from None


def listed_files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return files of a folder by their names in it, with the chat templates in `checkpoint.CHAT_TEMPLATES`.

    Other folders below it are left out: an earlier export may lie there.
    """
    files = {each.name: each for each in sorted(folder.iterdir()) if each.is_file()}
    found = {name: file for name, file in files.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    return found | {
        f"{checkpoint.CHAT_TEMPLATES}/{each.name}": each
        for each in sorted((folder / checkpoint.CHAT_TEMPLATES).glob("*.jinja"))
    }


def _copy(
    folder: Path, files: Mapping[str, Path], out: Path, add: Callable[[Path], None] | None = None, **more: Any
) -> Path:
    """Copy files to these names and seal them with the values that the folder's own manifest holds.

    add: writes further files into the new folder. more: further values for its manifest.
    """
    checkpoint.verify_if_sealed(folder)
    for file in files.values():
        if file.suffix == ".safetensors":
            _check_whole(file)
    meta: dict[str, Any] = {"phase": "base", "source": folder.name}
    if (folder / checkpoint.MANIFEST).exists():
        meta = checkpoint.read_manifest(folder)["meta"]
    make_room(out)
    checkpoint.needs_free_space(out, sum(file.stat().st_size for file in files.values()))

    def write(made: Path) -> None:
        for name, file in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, made / name)
        if add is not None:
            add(made)

    return checkpoint.save(out, write, **meta | more)


def _check_whole(file: Path) -> None:
    """Raise UserError unless a weight file has a header and as many bytes as it says; a manifest may be missing."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is not a weight file that can be loaded: {one_line(error)}. Get a whole copy of it."
        ) from None


def _copy_model(folder: Path, out: Path) -> Path:
    """Copy what `publish` takes of a model, and no other weights: a checkpoint may also hold those of a critic.

    What only `final` has is added to a checkpoint: the code of a ConvGPT and the model card.
    """
    from posttrain import models
    from posttrain.models import model_card
    from posttrain.serving.publish import content

    files = listed_files(folder, (*content.MODEL, *BESIDE_WEIGHTS))
    others = {name: file for name, file in files.items() if not name.endswith(".safetensors")}
    records = model_card.history(str(folder))
    meta: dict[str, Any] = {"history": records} if records else {}

    def add(made: Path) -> None:
        models.add_code(made)
        _write_card(made, folder, records)

    return _copy(folder, {file.name: file for file in checkpoint.weight_files(folder)} | others, out, add, **meta)


def _copy_adapter(folder: Path, out: Path) -> Path:
    """Copy an adapter with its tokenizer: that of a run lies in `final` beside it, with the template of training."""
    files, final = listed_files(folder, ADAPTER_FILES), folder.resolve().with_name("final")
    if not any(name in files for name in ADAPTER_WEIGHTS):
        raise UserError(
            f"{folder} holds no weights of an adapter ({ADAPTER_WEIGHTS[0]}). Get a whole copy of the adapter."
        )
    if folder.resolve().name == "adapter" and not _has_tokenizer(folder) and final.is_dir():
        checkpoint.verify_if_sealed(final, weights=False)
        files = listed_files(final, TOKENIZER_FILES) | files
    return _copy(folder, files, out)


def _adapter_of(source: Path) -> Path:
    """Return the adapter beside the model of a run."""
    from posttrain.serving.publish.content import model_of

    final = model_of(source).resolve()
    folder = final.with_name("adapter")
    if final.name != "final" or not (folder / ADAPTER).is_file():
        raise UserError(f"{source} holds no adapter: model.tuning was full. --to merged writes its whole model.")
    return folder


def _base_of(adapter: Path) -> str:
    """Return the path or the Hub name of the model that an adapter was trained on."""
    base = read_json(adapter / ADAPTER, "Get a whole copy of the adapter.").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{adapter / ADAPTER} does not name its base model (base_model_name_or_path).")
    return base


def _has_tokenizer(adapter: Path | None) -> bool:
    """Return True where training has saved its tokenizer and template beside the adapter, as TRL does."""
    return adapter is not None and (adapter / "tokenizer_config.json").is_file()


def load_tokens(section: ModelSection, adapter: Path | None) -> tuple[Any, Any]:
    """Return config and tokenizer: the adapter's own tokenizer, if it has one, with a vocabulary that it fits in."""
    from transformers import AutoTokenizer

    from posttrain.models import model_files

    model_files.check_source(section)
    config = model_files.load_config(section)
    own = _has_tokenizer(adapter)
    if adapter is not None and own and not any(file for pattern in WITH_TOKENS for file in adapter.glob(pattern)):
        raise UserError(
            f"{adapter} has a tokenizer_config.json, but no vocabulary (tokenizer.json, vocab.json or tokenizer.model)."
            " Get a whole copy of the adapter."
        )
    place = ModelSection(name_or_path=str(adapter)) if own else section
    model_files.check_tokenizer(place)
    with model_files.errors_in_words(f"The tokenizer of {place.name_or_path} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(place.name_or_path)
    if own:
        text = config.get_text_config()
        text.vocab_size = max(text.vocab_size, len(tokenizer))
    return config, tokenizer


def _saved_embeddings(net: Any, adapter: Path) -> int | None:
    """Return how many tokens have embeddings in the file of an adapter, or None if it holds no embeddings."""
    from safetensors import safe_open

    if not (adapter / ADAPTER_WEIGHTS[0]).is_file():
        return None
    name = next(name for name, module in net.named_modules() if module is net.get_input_embeddings())
    with safe_open(adapter / ADAPTER_WEIGHTS[0], "pt") as file:
        for key in list(file.keys()):
            if key.rpartition(f".{name}.")[2] in SAVED_EMBEDDINGS:
                return file.get_slice(key).get_shape()[0]
    return None


def _weights(section: ModelSection, adapter: Path | None, config: Any, tokenizer: Any) -> Any:
    """Return the model in float32, with the adapter merged into it, and as many embeddings as the adapter has.

    Where the adapter holds no embeddings, `config` says how many there are.
    """
    import torch

    from posttrain.models import model_files

    net: Any = model_files.load_weights(section, torch.float32)
    if adapter is None:
        return net

    from peft import PeftModel

    checkpoint.verify_if_sealed(adapter)
    base, refused = net.get_input_embeddings().weight.shape[0], f"The adapter {adapter} cannot be merged into"
    with model_files.errors_in_words(f"{refused} {section.name_or_path}"):
        saved = _saved_embeddings(net, adapter)
    if saved is not None and saved < len(tokenizer):
        raise UserError(
            f"{adapter} has embeddings of {saved} tokens, and its tokenizer has {len(tokenizer)}. Get a whole copy of"
            " the adapter, with the tokenizer that it was trained with."
        )
    tokens = saved or max(base, config.get_text_config().vocab_size)
    if tokens != base:
        net.resize_token_embeddings(tokens)
    random = net.get_input_embeddings().weight[base:].detach().clone()
    with model_files.errors_in_words(f"{refused} {section.name_or_path}"):
        net = PeftModel.from_pretrained(net, str(adapter)).merge_and_unload()
    if len(random) and torch.equal(net.get_input_embeddings().weight[base:], random):
        raise UserError(
            f"{adapter} has no embeddings of the {len(random)} tokens that its tokenizer has and {section.name_or_path}"
            " lacks. They would be random numbers. Get a whole copy of the adapter."
        )
    broken = next((name for name, weight in net.named_parameters() if not torch.isfinite(weight).all()), None)
    if broken:
        raise UserError(
            f"{broken} holds numbers that are not finite once {adapter} is merged into {section.name_or_path}. Name"
            " another checkpoint of the run."
        )
    return net


def _merge(adapter: Path, out: Path) -> Path:
    from posttrain import models
    from posttrain.models import model_card

    section = ModelSection(name_or_path=_base_of(adapter))
    config, tokenizer = load_tokens(section, adapter)
    make_room(out)
    net = _weights(section, adapter, config, tokenizer)
    if _has_tokenizer(adapter):
        _stop_after_answers(net, tokenizer)
    records = model_card.history(str(adapter))
    meta: dict[str, Any] = {"history": records} if records else {}

    def write(made: Path) -> None:
        with models.no_bars():
            net.save_pretrained(made)
        models.add_code(made)
        tokenizer.save_pretrained(made)
        _write_card(made, adapter, records)

    return checkpoint.save(out, write, phase="base", source=adapter.name, **meta)


def _write_card(made: Path, source: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the card of a checkpoint, which has none of its own, and the settings of its run, which the card names."""
    from posttrain.models import model_card
    from posttrain.serving.publish import content

    if not records or (made / content.CARD).exists():
        return
    kind = str(read_json(made / "config.json", "Use another checkpoint.").get("model_type"))
    (made / content.CARD).write_text(model_card.render_card(records, kind), encoding="utf-8")
    settings = source.resolve().with_name(checkpoint.RUN_CONFIG)
    if settings.is_file() and not (made / checkpoint.RUN_CONFIG).exists():
        shutil.copyfile(settings, made / checkpoint.RUN_CONFIG)


def _stop_after_answers(net: Any, tokenizer: Any) -> None:
    """Add the token that the template writes after an answer to those of the base model, which may not know it."""
    from posttrain.models import gguf_writer

    stops = net.generation_config.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    stop = gguf_writer.stop_of(tokenizer)
    if stop is not None and stop not in stops:
        net.generation_config.eos_token_id = [stop, *stops]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run, the folder of a model or that of an adapter")
    parser.add_argument("--to", required=True, choices=FORMS, help="what to write")
    parser.add_argument("--type", choices=KINDS, help="of the matrices in a GGUF file (default f16)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="where (default: export/ in the folder of the run)")
    given = parser.parse_args(argv)
    if given.type and given.to not in ("gguf", "ollama"):
        parser.error(f"--type is of the matrices in a GGUF file, and --to {given.to} writes none: leave out --type")
    kind = given.type or "f16"
    given.run = given.run.resolve()  # "." has no name
    runlog.keep_private(given.run)
    name = f"{_name(given.run)}-{kind}.gguf" if given.to == "gguf" else given.to
    above = given.run.parent if given.run.name in ("final", "adapter") else given.run
    written = export_run(given.run, given.to, given.out or above / "export" / name, kind)
    print(f"Written: {written}")
    if given.to == "ollama":
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", _name(given.run)).strip("-._") or "model"
        print(f"ollama create {model} -f {shlex.quote(str(written / 'Modelfile'))}")


if __name__ == "__main__":
    run(main)
