"""What became of the rows?  How many were read, what each filter took, and what is left to train on."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text


@dataclass
class SourceReport:
    """One source: SourceReport("trl-lib/Capybara", "capybara", "Apache-2.0", read=15806, dropped={"uses code": 3}).

    `train` and `held_out` are different rows; `per_epoch`, `tokens` and `trained_tokens` count what one epoch sees, so
    with weight 2 each training row twice.
    """

    path: str
    kind: str
    licence: str
    read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    train: int = 0
    held_out: int = 0
    per_epoch: int = 0
    tokens: int = 0
    trained_tokens: int = 0

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count rows that go, for this reason."""
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def summary(self) -> str:
        """One line: "4 rows read from a.jsonl, dropped: 3 empty content, 1 uses code"."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return f"{self.read} rows read from {self.path}, dropped: {dropped}"


@dataclass
class FilterTable:
    """All sources side by side; `rich.print(table)` shows it."""

    sources: list[SourceReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    title: str = "Training data"
    trained: str = "of them trained"  # what `trained_tokens` are, in words

    @property
    def trained_tokens(self) -> int:
        return sum(source.trained_tokens for source in self.sources)

    def for_card(self) -> list[dict[str, str | int]]:
        """What the model card says of each source."""
        keys = ("path", "kind", "licence", "train", "held_out")
        return [{key: getattr(source, key) for key in keys} for source in self.sources]

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
        line("  of them cut after a whole turn", [source.truncated for source in self.sources])
        table.add_section()
        line("rows per epoch", [source.per_epoch for source in self.sources])
        line("tokens per epoch", [source.tokens for source in self.sources])
        line(f"  {self.trained}", [source.trained_tokens for source in self.sources], "bold")
        notes = [f"[{n}] {one.kind}: {one.path}, licence: {one.licence}" for n, one in enumerate(self.sources, 1)]
        return Group(table, *map(Text, [*notes, *self.notes]))
