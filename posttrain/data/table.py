"""What happened to the rows?  How many were read, how many each filter dropped, and how many are left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from posttrain.data.local import printable
from posttrain.types import UserError

MOST_REASONS = 40
MOST_COLUMNS = 8
UNWRITTEN = "not written by the chat template"
RECOGNISED = ("messages", "preferences", "prompts")  # kinds whose rows come in several formats


@dataclass
class SourceReport:
    """One source: SourceReport("trl-lib/Capybara", "capybara", "Apache-2.0", read=15806, dropped={"uses code": 3}).

    `formats` counts the rows of each format, and `unread` are the unused columns. `unwritten` is why the template
    cannot write the first row of that reason. `cut` rows lost a last turn of the user without an answer, `truncated`
    ones what was too long.

    `train` and `held_out` are different rows; `per_epoch`, `tokens` and `trained_tokens` count what one epoch sees, so
    with weight 2 each training row twice. `examples` are first messages of generated rows, for the chat to offer.
    """

    path: str
    kind: str
    licence: str
    read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    unwritten: str = ""
    cut: int = 0
    truncated: int = 0
    train: int = 0
    held_out: int = 0
    per_epoch: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    examples: list[str] = field(default_factory=list)

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count dropped rows under this reason; beyond `MOST_REASONS`, all reasons are counted together."""
        if rows:
            reason = reason if reason in self.dropped or len(self.dropped) < MOST_REASONS else "other reasons"
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def drop_unwritten(self, why: UserError) -> None:
        """Count a row that the chat template cannot write, and keep the first reason."""
        self.drop(UNWRITTEN)
        self.unwritten = self.unwritten or str(why)

    def recognised(self, form: str, unread: Iterable[str]) -> None:
        """Count a row of this format; `unread` are its unused columns."""
        self.formats[form] = self.formats.get(form, 0) + 1
        if len(self.unread) < MOST_REASONS:
            self.unread += sorted(set(map(printable, unread)) - set(self.unread))

    def summary(self) -> str:
        """Return one line: "4 rows read from a.jsonl, dropped: 3 empty content, 1 uses code"."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return f"{self.read} rows read from {self.path}, dropped: {dropped}"

    def note(self) -> str:
        """Return a note: "messages: a.jsonl, licence: your own file; ShareGPT, 1,204 rows; columns not read: id"."""
        note = f"{self.kind}: {self.path}, licence: {self.licence}"
        if self.kind in RECOGNISED:
            note += "".join(f"; {name}, {rows:,} row{'s' * (rows != 1)}" for name, rows in self.formats.items())
            more = [f"{len(self.unread) - MOST_COLUMNS} more"] if len(self.unread) > MOST_COLUMNS else []
            note += f"; columns not read: {', '.join(self.unread[:MOST_COLUMNS] + more)}" if self.unread else ""
        return note


@dataclass
class FilterTable:
    """All sources side by side; `rich.print(table)` shows it."""

    sources: list[SourceReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    title: str = "Training data"
    trained: str = "of them trained"  # the label of `trained_tokens`

    @property
    def trained_tokens(self) -> int:
        return sum(source.trained_tokens for source in self.sources)

    def for_card(self) -> list[dict[str, Any]]:
        """Return the model card's facts about each source."""
        keys = ("path", "kind", "licence", "train", "held_out", "examples")
        facts = [{key: getattr(source, key) for key in keys} for source in self.sources]
        return [{key: fact for key, fact in each.items() if fact != []} for each in facts]

    def __rich__(self) -> Group:
        table = Table(title=self.title, title_justify="left")
        table.add_column("rows", no_wrap=True)
        for number in range(1, len(self.sources) + 1):
            table.add_column(escape(f"[{number}]"), justify="right")
        table.add_column("all", justify="right")

        def line(label: str, counts: list[int], style: str = "") -> None:
            table.add_row(escape(label), *(f"{n:,}" if n else "-" for n in counts), f"{sum(counts):,}", style=style)

        line("read", [source.read for source in self.sources])
        for reason in dict.fromkeys(reason for source in self.sources for reason in source.dropped):
            line(f"- {reason}", [source.dropped.get(reason, 0) for source in self.sources], "dim")
        line("left to train on", [source.train for source in self.sources], "bold")
        line("left, held out by question", [source.held_out for source in self.sources])
        if any(source.cut for source in self.sources):
            line("  of them cut: a last turn has no answer", [source.cut for source in self.sources])
        line("  of them cut: too long", [source.truncated for source in self.sources])
        table.add_section()
        line("rows per epoch", [source.per_epoch for source in self.sources])
        line("tokens per epoch", [source.tokens for source in self.sources])
        line(f"  {self.trained}", [source.trained_tokens for source in self.sources], "bold")
        notes = [f"[{n}] {one.note()}" for n, one in enumerate(self.sources, 1)]
        notes += [
            f"[{n}] the first row that is {UNWRITTEN}: {one.unwritten}"
            for n, one in enumerate(self.sources, 1)
            if one.unwritten
        ]
        return Group(table, *map(Text, [*notes, *self.notes]))
