"""Average the weights of models that were trained from the same one: checkpoints of a run, or phases.

    posttrain merge runs/mine/phase2 runs/mine/phase3 --out runs/mine/average
    posttrain merge runs/mine/phase2 runs/mine/phase3 --method slerp --weights 0.3 0.7 --out runs/mine/average
    posttrain merge runs/mine/phase1/checkpoint-* --out runs/mine/phase1/average

RUN is as for `posttrain export`: a phase's folder, its folder `final`, a checkpoint, the folder of a model, or one with
an adapter, which is merged into its base model first. The result is a folder that every script loads. Config, tokenizer
and the type of the numbers are those of the first RUN.

`slerp` takes two models and moves each tensor along the arc between them (Shoemake 1985, Animating rotation with
quaternion curves).
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import ModelSection, run
from posttrain.runtime import checkpoint, runlog
from posttrain.serving import export
from posttrain.types import UserError

if TYPE_CHECKING:
    import torch

METHODS = ("linear", "slerp")
# Where the cosine of two tensors is this near to 1, both methods give the same numbers in float32; near -1 there is no
# single arc between them.
PARALLEL = 1e-6
BLOCK = 1 << 24  # numbers that are in float64 at a time
# Entries of config.json that say nothing about the architecture.
NOT_COMPARED = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def merge_models(
    sources: Sequence[Path], out: Path, method: str = "linear", weights: Sequence[float] | None = None
) -> Path:
    """Write an average of models of one architecture and tokenizer, and return its folder.

    No more than one file of weights is in memory, and a tensor of each model.

    Args:
        sources: runs, folders of models or those of adapters.
        out: the folder to write; nothing may be there.
        method: one of `METHODS`.
        weights: of the models, for example [1, 3] for a quarter and three quarters; None weights all alike.

    Raises:
        UserError: a model is missing, damaged or does not fit the first one, the weights do not fit, something is at
            `out`, or nothing can be written there.
    """
    shares = _shares(len(sources), method, weights)
    if out.exists():
        raise UserError(f"{out} already exists and is not changed. Write --out with another path.")
    from posttrain.models import model_card

    export.make_room(out)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        places = [_whole_model(source, Path(scratch) / str(number)) for number, source in enumerate(sources)]
        names = [
            str(source if place.is_relative_to(scratch) else place)
            for source, place in zip(sources, places, strict=True)
        ]
        _must_fit(places, names)
        first, kept = places[0], {}
        if (first / checkpoint.MANIFEST).exists():
            kept = checkpoint.read_manifest(first)["meta"]
        records = [*_phases(places), model_card.merge_record(names, shares, method)]
        meta: dict[str, Any] = {"phase": "merge", "history": records}
        if kept.get("phase") != "base" and "chat_template_sha256" in kept:
            meta["chat_template_sha256"] = kept["chat_template_sha256"]
        checkpoint.needs_free_space(out, sum(file.stat().st_size for file in checkpoint.weight_files(first)))

        made = Path(scratch) / "made"  # of which nothing is left where a tensor is refused
        made.mkdir()
        with checkpoint.full_disk_in_words(out.parent):
            _write_average(made, places, names, shares, method)
            _write_the_rest(made, first, records)

        def write(folder: Path) -> None:
            for each in list(made.iterdir()):
                each.rename(folder / each.name)

        return checkpoint.save(out, write, **meta)


def average_tensors(tensors: Sequence[torch.Tensor], shares: Sequence[float], method: str = "linear") -> torch.Tensor:
    """Return the average of tensors of floating-point numbers, in the dtype of the first.

    It is computed in float64 and rounded once, so that an average of equal tensors is equal to them.

    Args:
        tensors: of one shape.
        shares: of the tensors; they sum to 1.
        method: one of `METHODS`; "slerp" takes two tensors.
    """
    import torch

    if method == "slerp":
        shares = _on_the_arc(tensors[0], tensors[1], shares)
    used = [(each.reshape(-1), share) for each, share in zip(tensors, shares, strict=True) if share]
    flat = torch.zeros(tensors[0].numel(), dtype=tensors[0].dtype)
    for begin in range(0, len(flat), BLOCK):
        parts = [each[begin : begin + BLOCK].double() * share for each, share in used]
        flat[begin : begin + BLOCK] = sum(parts[1:], parts[0])
    return flat.reshape(tensors[0].shape)


def _on_the_arc(one: torch.Tensor, other: torch.Tensor, shares: Sequence[float]) -> Sequence[float]:
    """Return the factors of two tensors in their spherical interpolation; the shares where they are nearly parallel."""
    lengths = math.sqrt(_dot(one, one) * _dot(other, other))
    cosine = _dot(one, other) / lengths if lengths else 1.0
    if not abs(cosine) < 1 - PARALLEL:
        return shares
    angle = math.acos(cosine)
    return [math.sin(share * angle) / math.sin(angle) for share in shares]


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.reshape(-1), other.reshape(-1)
    parts = (slice(begin, begin + BLOCK) for begin in range(0, len(one), BLOCK))
    return math.fsum(float(one[part].double() @ other[part].double()) for part in parts)


def _shares(count: int, method: str, weights: Sequence[float] | None) -> list[float]:
    """Return the weights of the models, divided by their sum."""
    if count < 2:
        raise UserError("A merge needs two models or more: posttrain merge runs/mine/phase2 runs/mine/phase3 ...")
    if method == "slerp" and count != 2:
        raise UserError(f"--method slerp merges exactly two models, not {count}. Write --method linear, or name two.")
    weights = [1.0] * count if weights is None else weights
    if len(weights) != count:
        raise UserError(f"--weights has {len(weights)} numbers for {count} models. Write one for each model.")
    if not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < math.inf:
        raise UserError(
            f"--weights {' '.join(f'{weight:g}' for weight in weights)}: weights are numbers from 0 on, and one of them"
            " is above 0. They are divided by their sum."
        )
    return [weight / sum(weights) for weight in weights]


def _whole_model(source: Path, scratch: Path) -> Path:
    """Return the folder of a model; an adapter is merged into its base model, in `scratch`."""
    from posttrain.serving.publish.content import model_of

    return export.export_run(source, "merged", scratch) if (source / export.ADAPTER).is_file() else model_of(source)


def _phases(places: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the records of the phases that made the models, each once.

    Of the checkpoints of one phase, it is the record that has results, or else that of the last step.
    """
    from posttrain.models import model_card

    records: list[dict[str, Any]] = []
    for record in chain.from_iterable(model_card.history(str(place)) for place in places):
        twin = next((number for number, each in enumerate(records) if _of_one_phase(each, record)), None)
        if twin is None:
            records.append(record)
        else:
            records[twin] = max(records[twin], record, key=lambda each: (bool(each["results"]), each["step"]))
    return records


def _of_one_phase(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True for equal records, and for those of a checkpoint and its run, which differ in step and results."""
    if one["results"] and other["results"]:
        return one == other
    return {**one, "step": 0, "results": []} == {**other, "step": 0, "results": []}


def _must_fit(places: Sequence[Path], names: Sequence[str]) -> None:
    """Raise UserError for a model whose weights mean something else than those of the first one.

    names: of the models in the message.
    """
    read = [export.load_tokens(ModelSection(name_or_path=str(place)), None) for place in places]
    configs, tokenizers = [config.to_dict() for config, _ in read], [tokenizer for _, tokenizer in read]
    vocabulary = set(tokenizers[0].get_vocab().items())
    for place, name, tokenizer, config in zip(places, names, tokenizers, configs, strict=True):
        checkpoint.verify_if_sealed(place)
        if "quantization_config" in config:
            raise UserError(f"{name} holds quantized weights, which have no average. Name the model before that step.")
        refused = f"{names[0]} and {name} cannot be merged:"
        for key in sorted(configs[0].keys() | config.keys(), key=lambda key: (key != "model_type", key)):
            here, there = configs[0].get(key), config.get(key)
            if here != there and key not in NOT_COMPARED and not key.startswith("_"):
                raise UserError(
                    f"{refused} they do not have one architecture. In config.json {key} is {here!s:.100} in the first,"
                    f" and {there!s:.100} in the other. Name models that were trained from the same one."
                )
        if apart := sorted(vocabulary ^ set(tokenizer.get_vocab().items()), key=lambda item: item[::-1]):
            raise UserError(
                f"{refused} their vocabularies differ, the first time in {apart[0][0]!r:.60}, token number"
                f" {apart[0][1]}. Name models with one tokenizer, such as the phases of one run."
            )
        if tokenizers[0].chat_template != tokenizer.chat_template:
            raise UserError(
                f"{refused} they have different chat templates. Name models that were trained with one template, such"
                " as the phases of one run."
            )


def _opened(place: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the name of each tensor of a model, with the open file that holds it."""
    from safetensors import safe_open

    files = [stack.enter_context(safe_open(file, framework="pt")) for file in checkpoint.weight_files(place)]
    return {name: file for file in files for name in list(file.keys())}


def _write_average(
    made: Path, places: Sequence[Path], names: Sequence[str], shares: Sequence[float], method: str
) -> None:
    """Write files of weights that are named and divided like those of the first model."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from posttrain.models import model_files

    with ExitStack() as stack, model_files.errors_in_words(f"{', '.join(names)} cannot be merged"):
        opened = [_opened(place, stack) for place in places]
        for name, held in zip(names, opened, strict=True):
            if apart := sorted(opened[0].keys() ^ held.keys()):
                raise UserError(
                    f"{names[0]} and {name} cannot be merged: only one of them has a tensor {apart[0]} in its files. If"
                    " both are whole, one was saved under other names: load it with transformers'"
                    " AutoModelForCausalLM.from_pretrained and save it with save_pretrained and its tokenizer."
                )
        for file in checkpoint.weight_files(places[0]):
            with safe_open(file, framework="pt") as own:
                tensors, metadata = list(own.keys()), own.metadata()
            merged = {key: _merged(key, [held[key] for held in opened], names, shares, method) for key in tensors}
            save_file(merged, made / file.name, metadata)


def _merged(key: str, files: Sequence[Any], names: Sequence[str], shares: Sequence[float], method: str) -> torch.Tensor:
    """Return the average of one tensor of all models; numbers that are not trained must be the same in all."""
    import torch

    tensors = [file.get_tensor(key) for file in files]
    first = tensors[0]
    for name, tensor in zip(names, tensors, strict=True):
        refused = f"{names[0]} and {name} cannot be merged: {key}"
        if tensor.shape != first.shape:
            raise UserError(f"{refused} has the shape {list(first.shape)} in the first, {list(tensor.shape)} here.")
        exact = not (tensor.is_floating_point() and first.is_floating_point())
        if exact and (tensor.dtype != first.dtype or not torch.equal(tensor, first)):
            raise UserError(f"{refused} holds integers, which have no average, and they are not the same in both.")
    if not first.is_floating_point():
        return first
    average = average_tensors(tensors, shares, method)
    if not torch.isfinite(average).all():
        broken = [name for name, tensor in zip(names, tensors, strict=True) if not torch.isfinite(tensor).all()]
        where = f"in {broken[0]}" if broken else f"as {first.dtype}, the type of {names[0]}"
        raise UserError(f"{key} holds numbers that are not finite {where}. Leave that model out, or name another one.")
    return average


def _write_the_rest(made: Path, first: Path, records: Sequence[dict[str, Any]]) -> None:
    """Copy config, tokenizer, templates and code of the first model, and write the model card."""
    from posttrain import models
    from posttrain.models import model_card, model_files
    from posttrain.serving.publish import content

    files = export.listed_files(first, (*content.MODEL, "*.py"))
    for name, file in files.items():
        if not name.endswith(".safetensors") and name != checkpoint.RUN_CONFIG:  # those are of training alone
            (made / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, made / name)
    models.add_code(made)  # a checkpoint of a ConvGPT has none
    kind = model_files.load_config(ModelSection(name_or_path=str(first))).model_type
    (made / content.CARD).write_text(model_card.render_card(records, kind), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="two or more runs, models or adapters")
    parser.add_argument("--method", choices=METHODS, default="linear", help="how (default linear)")
    parser.add_argument(
        "--weights", type=float, nargs="+", metavar="W", help="one for each RUN, divided by their sum (default: equal)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where")
    given = parser.parse_args(argv)
    runlog.keep_private(given.out)
    print(f"Written: {merge_models(given.runs, given.out, given.method, given.weights)}")


if __name__ == "__main__":
    run(main)
