"""What is in a file of rows, and what would a phase train on?  Nothing is trained, and no weights are read.

    posttrain data mine.jsonl
    posttrain data mine.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct
    posttrain data pairs.parquet --kind preferences --model runs/phase1/final --max-length 1024
    posttrain data prompts.jsonl --kind prompts prompt=question 'rewards=["my_rewards:polite"]'

It prints the format, how many rows are dropped and why, three rows as the model will see them, with what is trained
between [[ and ]], and how long the rows are. The tokenizer and the chat template are those of --model; without one, the
template is ChatML and lengths are counted in bytes. Of prompts for phase 3 (--kind prompts, with options of that
environment) it prints the first ones, the rows that cannot be used or repeat a prompt, and what rewards are given.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import DPO_KINDS, HUB_KINDS, SFT_KINDS, DataSection, Source, run
from posttrain.runtime import runlog
from posttrain.types import HUB_NAME, UserError

if TYPE_CHECKING:
    from posttrain.models import Chat

SHOWN_ROWS, SHOWN_CHARACTERS = 3, 3000
QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
LONGEST_IN_BYTES = 1_000_000


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="FILE", help="a file of rows, or the name of a set on the Hub")
    parser.add_argument("options", metavar="NAME=VALUE", nargs="*", help="options of the environment prompts")
    parser.add_argument(
        "--kind",
        choices=("auto", *SFT_KINDS, *DPO_KINDS, "prompts"),
        default="auto",
        help="as in data.sources (default: by a row)",
    )
    parser.add_argument("--model", metavar="NAME", help="Hub id or folder, for its tokenizer and chat template")
    parser.add_argument("--template", metavar="FILE", help="another chat template (chat.template)")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="data.max_length (default: 2048)")
    parser.add_argument("--rows", type=int, metavar="N", help="number of kept rows to read (default: all)")
    arguments = parser.parse_intermixed_args(argv)
    for name in ("max_length", "rows"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 8:
            parser.error(f"--{name.replace('_', '-')} should be at least 8")
    if arguments.options and arguments.kind != "prompts":
        parser.error(f"{arguments.options[0]} is an option of --kind prompts")
    if arguments.max_length and arguments.kind == "prompts":
        parser.error("--max-length is for rows that are trained on; rollout.max_context limits prompts")
    runlog.keep_private(Path("runs"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # rows may hold what the terminal cannot write

    from posttrain.data import reading
    from posttrain.data.loading import load_preferences, load_sft

    kind: Any = arguments.kind
    if kind == "auto":
        kind = HUB_KINDS.get(arguments.path) or reading.kind_of(arguments.path, "data.sources.0")
    chat = _chat_of(arguments.model, arguments.template) if arguments.model else _chat_of_bytes(arguments.template)
    unit = "tokens" if arguments.model else "bytes (tokens with --model)"
    if kind == "prompts":
        return _show_prompts(arguments, chat, unit)
    longest = arguments.max_length or (2048 if arguments.model else LONGEST_IN_BYTES)
    source = Source(kind=kind, path=arguments.path, rows=arguments.rows)
    data = DataSection(sources=[source], max_length=longest, decontaminate=False, eval_fraction=1e-9)
    prepared: Any = (load_preferences if kind in DPO_KINDS else load_sft)(data, chat)
    for row in prepared.train.select(range(min(SHOWN_ROWS, len(prepared.train)))):
        print(f"\n{_as_seen(row, chat)}".rstrip("\n"))
    _show_lengths(unit, _lengths(prepared.train))


def _show_prompts(arguments: argparse.Namespace, chat: Chat, unit: str) -> None:
    """Print what the environment `prompts` makes of the rows; UserError at the end where it refuses them."""
    from envs import option
    from posttrain.data.own_prompts import own_prompts

    try:
        options = dict(map(option, arguments.options))
    except ValueError as problem:
        raise UserError(str(problem)) from None
    found = own_prompts(arguments.path, options if arguments.rows is None else options | {"rows": arguments.rows})
    print("\n".join(found.lines))
    prompts = [chat.prompt(each.prompt) for each in found.conversations]
    for ids, conversation in zip(prompts[:SHOWN_ROWS], found.conversations, strict=False):
        later = (f"\nthen, after each answer, the user: {text}" for text in conversation.later)
        print(f"\n{_middle_left_out(_text(ids, chat))}".rstrip("\n") + "".join(later))
    if prompts:
        _show_lengths(unit, {"a prompt": [len(ids) for ids in prompts]})
    if found.problem:
        raise UserError(found.problem)


def _chat_of(name: str, template: str | None) -> Chat:
    """Return the tokenizer and template of a model, for which no weights are needed."""
    from transformers import AutoTokenizer

    from posttrain.models import Chat, errors_in_words

    if not Path(name).is_dir() and not HUB_NAME.fullmatch(name):
        raise UserError(f"--model {name} is neither a folder nor a name on the Hugging Face Hub (owner/name).")
    with errors_in_words(f"The tokenizer of {name} cannot be loaded"):
        return Chat.load(AutoTokenizer.from_pretrained(name), template)


def _chat_of_bytes(template: str | None) -> Chat:
    """Return a tokenizer with a token for each byte, in ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from posttrain.models import Chat

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Chat.load(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"), template)


def _as_seen(row: dict[str, Any], chat: Chat) -> str:
    """Return the text of a row's tokens with [[what is trained]] marked; for a pair, the prompt and both answers."""
    if "input_ids" not in row:
        answers = (f"{name}:\n[[{_text(row[f'{name}_ids'], chat)}]]" for name in ("chosen", "rejected"))
        return "\n".join([f"prompt:\n{_text(row['prompt_ids'], chat)}", *answers])
    spans: list[tuple[int, list[int]]] = []
    for token, trained in zip(row["input_ids"], row["assistant_masks"], strict=True):
        if not spans or spans[-1][0] != trained:
            spans.append((trained, []))
        spans[-1][1].append(token)
    return _middle_left_out("".join(f"[[{_text(ids, chat)}]]" if on else _text(ids, chat) for on, ids in spans))


def _text(ids: list[int], chat: Chat) -> str:
    """Return the text of tokens, control tokens included, with unprintable characters escaped."""
    text = chat.decode([*ids, chat.stop_id])  # which leaves out the last one
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def _middle_left_out(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters are left out here ...\n{text[-half:]}"


def _show_lengths(unit: str, lengths: dict[str, list[int]]) -> None:
    print(f"\n{unit:32}" + "".join(f"{name:>12}" for name in QUANTILES))
    for label, numbers in lengths.items():
        print(f"{label:32}" + "".join(f"{value:>12,}" for value in _quantiles(numbers)))


def _lengths(rows: Any) -> dict[str, list[int]]:
    if "input_ids" in rows.column_names:
        trained = [sum(mask) for mask in rows["assistant_masks"]]
        return {"a row": [len(ids) for ids in rows["input_ids"]], "  of it trained": trained}
    names = {"prompt_ids": "a prompt", "chosen_ids": "  a chosen answer", "rejected_ids": "  a rejected answer"}
    return {label: [len(ids) for ids in rows[name]] for name, label in names.items()}


def _quantiles(lengths: list[int]) -> list[int]:
    """Return the lengths at `QUANTILES`."""
    ordered = sorted(lengths)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES.values()]


if __name__ == "__main__":
    run(main)
