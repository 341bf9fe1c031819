"""How does a GGUF file become a model folder that the scripts can train?

    posttrain gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2

transformers reads the file: weights (dequantized), config, tokenizer and chat template. Any architecture that it reads
from GGUF works. The folder holds ordinary float32 safetensors, so it loads like any other model. What quantization has
rounded stays rounded: use this where the original weights cannot be downloaded.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import run
from posttrain.runtime import checkpoint
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
LONGEST = 2**24  # tokens of context; more than any model has
PROBES = ("12 + 345 = 6789, isn't it?", "The end.\n\n\tif x:  # straße 東京", "<|im_start|>user\nGo left.<|im_end|>\n")


def convert(file: str | Path, folder: str | Path) -> Path:
    """Write the model of a GGUF file to `folder` as safetensors, config, tokenizer and manifest; returns the folder.

    UserError where the file is missing, damaged, or of an architecture that transformers does not read from GGUF, and
    where the folder is already there.
    """
    file, folder = Path(file), Path(folder)
    _check(file, folder)  # before libraries are loaded, which takes seconds

    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain.models import model_files

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        wrong = wrong_number(GGUFReader(file))
        if wrong:
            raise UserError(f"{file} is damaged: {wrong}. Get it again, or take the model's safetensors.")
        tokenizer = AutoTokenizer.from_pretrained(**source)
        kind: Any = AutoModelForCausalLM
        net, loading_info = kind.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    except UserError:
        raise
    except Exception as error:  # a damaged file makes the reader raise nearly anything
        raise UserError(
            f"transformers cannot read {file}: {one_line(error)}. The file may be damaged (compare its size and"
            " checksum with where it came from), or of an architecture that transformers does not read from GGUF: then"
            " take the model's safetensors."
        ) from error
    lacking = sorted(loading_info["missing_keys"]) + sorted(map(str, loading_info["mismatched_keys"]))
    if lacking:
        raise UserError(
            f"{file} lacks weights that its architecture ({net.config.model_type}) has: {', '.join(lacking[:5])}"
            f"{', ...' if len(lacking) > 5 else ''}. They would be random. Take the model's safetensors."
        )
    if not all(bool(torch.isfinite(weight).all()) for weight in net.parameters()):
        raise UserError(f"{file} holds weights that are not finite: it is damaged. Get it again.")
    model_files.say_what_is_tied(str(file), net)
    # The weights are ordinary float32 now; with these left in place, the folder would be read as a GGUF model again.
    del net.config.quantization_config
    net.hf_quantizer, net.is_quantized = None, False
    net.config.name_or_path = ""
    tokenizer.model_max_length = net.config.max_position_embeddings  # the file has it for the model only

    def write(out: Path) -> None:
        with model_files.no_bars():
            net.save_pretrained(out)
        tokenizer.save_pretrained(out)
        _same_tokens(tokenizer, out)

    return checkpoint.save(folder, write, phase="base", source=file.name)


def wrong_number(reader: GGUFReader) -> str | None:
    """Return what is impossible in the numbers of a file, before a model is built; None where they fit its tensors.

    Building a model of 200,000 blocks takes minutes, and only then would missing weights show.
    """
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    kind = fields.get("general.architecture")
    blocks = {int(match[1]) for each in reader.tensors if (match := re.search(r"(?:^|\.)blk\.(\d+)\.", each.name))}
    widths = [int(each.shape[0]) for each in reader.tensors if each.name == "token_embd.weight"]
    for name, there in (("block_count", [max(blocks, default=-1) + 1]), ("embedding_length", widths)):
        stated = fields.get(f"{kind}.{name}")
        if stated is not None and there and (type(stated) is not int or stated != there[0]):
            return f"its {name} is {stated!r:.50}, that of its tensors {there[0]}"
    length = fields.get(f"{kind}.context_length")
    if length is not None and not (type(length) is int and 0 < length <= LONGEST):
        return f"its context_length is {length!r:.50}, not a whole number from 1 to {LONGEST:,}"
    for name, value in fields.items():
        positive = isinstance(value, float) and math.isfinite(value) and value > 0
        if name.startswith(f"{kind}.") and name.endswith(("_epsilon", ".freq_base")) and not positive:
            return f"its {name.partition('.')[2]} is {value!r:.50}, not a finite number above 0"
    return None


def _same_tokens(tokenizer: Any, folder: Path) -> None:
    """Raise UserError where transformers reads another tokenizer from the folder than from the file.

    It has a tokenizer class of its own for some architectures, whose rules for splitting words replace the file's.
    """
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(folder)
    if any(again(text)["input_ids"] != tokenizer(text)["input_ids"] for text in PROBES):
        raise UserError(
            f"The tokenizer of this file splits text in another way than transformers' {type(again).__name__}, which"
            " it uses for every model of this architecture. Take the original model folder."
        )


def _check(file: Path, folder: Path) -> None:
    if not file.is_file():
        raise UserError(f"The file {file} does not exist. Name a .gguf file.")
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{file} is not a GGUF file: it does not start with the letters GGUF.")
    if shard := re.search(r"-(\d{5})-of-(\d{5})\.gguf$", file.name):
        raise UserError(
            f"{file} is part {int(shard[1])} of {int(shard[2])} of a model. Join the parts first"
            " (`llama-gguf-split --merge`), or take a file that holds the whole model."
        )
    if above := next((parent for parent in folder.parents if parent.exists() and not parent.is_dir()), None):
        raise UserError(f"{folder} cannot be made, because {above} is a file. Choose another folder.")
    if folder.exists():
        raise UserError(f"{folder} already exists and is not changed. Choose another folder.")
    checkpoint.needs_free_space(folder, 8 * file.stat().st_size)  # from four bits a weight to 32


def main() -> None:
    parser = argparse.ArgumentParser(prog="posttrain gguf", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help="a .gguf file that holds a whole model")
    parser.add_argument("folder", help="where the model folder is written")
    arguments = parser.parse_args()
    folder = convert(arguments.file, arguments.folder)
    print(f"Written: {folder}. Use it as model.name_or_path={folder}")


if __name__ == "__main__":
    run(main)
