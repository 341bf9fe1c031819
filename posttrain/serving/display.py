"""How does an answer look on the terminal?  Text as it is written, several answers side by side, notes about them.

Answers go to stdout, notes to stderr. Nothing that a model or an environment writes controls the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from posttrain.config import ChatRun, SamplingSection
from posttrain.runtime import runlog

if TYPE_CHECKING:
    from posttrain.serving.generation import Answer

NARROW = 36  # columns of the terminal for each of several answers
# Characters that a terminal obeys instead of showing: control characters, and those that change the text's direction.
_ESCAPED = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_ESCAPED |= {code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)}
_ESCAPED |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def escape_control_characters(text: str) -> str:
    """Return a text without control characters: "␛[2J" for "\\x1b[2J"."""
    return text.translate(_ESCAPED)


def never() -> bool:
    return False


def stream(answer: Answer, stopped: Callable[[], bool] = never) -> None:
    """Print an answer while it is written, until `stopped()`."""
    for piece in answer:
        print(escape_control_characters(piece), end="", flush=True)
        if stopped():
            break
    print()


def describe_preset(cfg: ChatRun, name: str) -> str:
    """Return `improved: temperature 0.7, top-p 0.9, top-k 50, repetition penalty 1.15`."""
    return f"{name}: {describe_sampling(cfg.presets[name])}"


def describe_sampling(setting: SamplingSection) -> str:
    """Return `temperature 0.7, top-p 0.9` or `greedy`."""
    parts = [f"temperature {setting.temperature:g}" if setting.temperature else "greedy"]
    parts += [f"top-p {setting.top_p:g}"] if setting.top_p < 1 else []
    parts += [f"top-k {setting.top_k}"] if setting.top_k else []
    parts += [f"repetition penalty {setting.repetition_penalty:g}"] if setting.repetition_penalty > 1 else []
    return ", ".join(parts)


def note(text: str) -> None:
    """Print a line about the answer, on stderr."""
    err = Console(stderr=True, markup=False, highlight=False, emoji=False)
    err.print(Text(escape_control_characters(text), "dim"), soft_wrap=not err.is_terminal)


def answer_console() -> Console:
    """Return a console for stdout without markup, which breaks lines only in a terminal."""
    return runlog.console(markup=False, highlight=False, emoji=False)


def show_beside(answers: dict[str, Answer], cfg: ChatRun, stopped: Callable[[], bool]) -> None:
    """Print all answers, side by side or, on a narrow terminal, one after another; then their figures."""
    out = answer_console()
    if out.is_terminal and out.width >= NARROW * len(answers):
        in_columns(out, answers, cfg, stopped)
    else:
        for name, answer in answers.items():
            print(f"--- {describe_preset(cfg, name)}")
            stream(answer, stopped)
            print()
    out.print(repetition_table(answers))


def in_columns(out: Console, answers: dict[str, Answer], cfg: ChatRun, stopped: Callable[[], bool]) -> None:
    """Write each answer in its column, one token of each in turn."""
    texts = dict.fromkeys(answers, "")
    writing = {name: iter(answer) for name, answer in answers.items()}

    def columns(rows: int) -> Table:
        """Return the last `rows` lines of each answer: what is above the terminal cannot be drawn again."""
        table = Table(box=box.SIMPLE_HEAD, expand=True)
        for name in answers:
            table.add_column(
                Text(f"{name}\n").append(describe_sampling(cfg.presets[name]), "dim"), ratio=1, overflow="fold"
            )
        width = out.width // len(answers) - 4
        table.add_row(*(Text("\n").join(Text(text).wrap(out, width)[-rows:]) for text in texts.values()))
        return table

    rows = max(1, out.height - 8)
    with Live(columns(rows), console=out, auto_refresh=False) as live:
        drawn = time.monotonic()
        while writing and not stopped():
            for name in list(writing):
                piece = next(writing[name], None)
                if piece is None:
                    del writing[name]
                else:
                    texts[name] += escape_control_characters(piece)
            if time.monotonic() - drawn > 0.1:
                live.update(columns(rows), refresh=True)
                drawn = time.monotonic()
        live.update(columns(sys.maxsize), refresh=True)


def repetition_table(answers: dict[str, Answer]) -> Table:
    table = Table("", box=box.SIMPLE_HEAD)
    for name in answers:
        table.add_column(name, justify="right")
    for label, values in repetition_figures(answers):
        table.add_row(label, *values)
    return table


def repetition_figures(answers: dict[str, Answer]) -> list[tuple[str, list[str]]]:
    """Return figures of answers, also unfinished ones: [("tokens", ["74", "31"]), ("finished", ["no", "yes"]), ...]."""
    from posttrain import metrics

    repetition = [metrics.repetition([answer.written], [answer.finished]) for answer in answers.values()]
    return [
        ("tokens", [f"{of['tokens']:.0f}" for of in repetition]),
        ("finished", ["no" if of["never_stops"] else "yes" for of in repetition]),
        ("seq-rep-4: repeated 4-grams", [f"{of['seq_rep_4']:.1%}" for of in repetition]),
        ("distinct-1: different tokens", [f"{of['distinct_1']:.2f}" for of in repetition]),
        ("distinct-2: different pairs", [f"{of['distinct_2']:.2f}" for of in repetition]),
        ("longest repeated span, tokens", [f"{of['longest_repeat']:.0f}" for of in repetition]),
    ]
