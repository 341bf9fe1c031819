"""Which answers earn what, and which calls fail?  For runs of `prompts`, tools and agents: values for the templates.

The rows are those of `episodes.browser_row`, in the order of the checkpoints or steps that they come from.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from posttrain.metrics import seq_rep_n
from posttrain.report.messages import EXAMPLE, NO_TEXT, beside_calls, is_legible
from posttrain.report.tables import percent
from posttrain.types import Record

SHOWN_CHARACTERS = 420  # of one answer
OPENING_CHARACTERS = 160  # of an answer, shown before it is unfolded
MOST_PIECES = 12  # of an answer: what was said, called and read
MOST_BINS = 6  # of the rewards
MOST_COLUMNS = 4  # of the steps of a run
MOST_OF_A_PROMPT = 6  # answers
GROUPS = 2  # prompts that are shown


class Piece(NamedTuple):
    """A part of an answer: Piece("result", "7", "", 'calculate(expression="4 + 3")', False)."""

    kind: str  # said by the model, the result of a tool, or read from the environment or program
    opening: str
    rest: str  # of the text, folded
    call: str
    failed: bool


class ShownAnswer(NamedTuple):
    """An answer to a prompt, ready to be shown."""

    title: str  # which one it is among others
    row: Record
    prompt: str
    pieces: list[Piece]
    left_out: int  # pieces
    facts: str  # what was expected, and what each reward function gave


def shorten(words: str) -> str:
    """Return the beginning of a long text with visible line breaks, since some models write a page of them."""
    words = words.replace("\n", " ↵ ")
    return words if len(words) <= SHOWN_CHARACTERS else words[:SHOWN_CHARACTERS] + " …"


def folded(words: str) -> tuple[str, str]:
    """Return the visible beginning of a text and its folded rest."""
    return words[:OPENING_CHARACTERS], words[OPENING_CHARACTERS:]


def legible(words: str) -> str:
    """Return a text, or words in its place if it holds bytes that are no text."""
    return words if is_legible(words) else f"({NO_TEXT})"


def shown_answer(row: Record, title: str = "") -> ShownAnswer:
    """Return the answer of a row: what the model said after the prompt, what it called, and what it was told."""
    messages = row["messages"]
    first = next((place for place, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    pieces = list[Piece]()
    for message, following in itertools.pairwise([*messages[first:], {"role": ""}]):
        text, call = message["content"], ""
        if message["role"] == "assistant":
            kind, text = "said", beside_calls(text) if following["role"] == "tool" and following["call"] else text
            if not text and following["role"] == "tool":
                continue  # the call is shown with its result
        elif message["role"] == "tool":
            kind, call = "result", message["call"] or "a call that cannot be read"
        else:
            kind = "read"
        pieces.append(Piece(kind, *folded(shorten(legible(text))), call, bool(message.get("failed"))))
    facts = [fact for fact in row["facts"].split(" · ") if not fact.startswith(("setting ", "group "))]
    return ShownAnswer(
        title, row, prompt_of(row), pieces[:MOST_PIECES], max(0, len(pieces) - MOST_PIECES), " · ".join(facts)
    )


def prompt_of(row: Record) -> str:
    """Return what the model was asked: the last message of the user before it wrote."""
    asked = itertools.takewhile(lambda message: message["role"] != "assistant", row["messages"])
    last = [message["content"] for message in asked if message["role"] not in ("system", EXAMPLE)]
    return last[-1] if last else ""


def worth_of(row: Record) -> float | None:
    """Return what an answer is worth: its reward, or 1 for a right one."""
    if row["reward"] is not None:
        return row["reward"]
    return None if row["won"] is None else float(row["won"])


def good_and_bad(rows: Sequence[Record]) -> list[ShownAnswer]:
    """Return one of the best answers and one that is worth less, to the same prompt if there is one; [] without both.

    Answers with bytes that are no text are left out. The best ones of the last checkpoint or step come first. Of those
    to the same kind of item one that does not repeat itself is taken, and the shortest of these.
    """
    valued = [(value, row) for row in rows if (value := worth_of(row)) is not None and row["readable"] and row["turns"]]
    if not valued or len({value for value, _ in valued}) < 2:
        return []
    best = max(value for value, _ in valued)
    last = valued[-1][1]["from"]
    top = [row for value, row in valued if value == best and row["won"] is not False]
    top = top or [row for value, row in valued if value == best]
    top.sort(key=lambda row: row["from"] != last)
    worse = [(value, row) for value, row in valued if value < best and row["won"] is not True]
    worse = worse or [(value, row) for value, row in valued if value < best]
    by_prompt: dict[str, list[tuple[float, Record]]] = {}
    for value, row in worse:
        by_prompt.setdefault(prompt_of(row), []).append((value, row))
    top = [row for row in top if prompt_of(row) in by_prompt] or top
    good = min((row for row in top if (row["from"], row["env"]) == (top[0]["from"], top[0]["env"])), key=_awkwardness)
    bad = min(by_prompt.get(prompt_of(good), worse), key=lambda each: each[0])[1]
    right = good["won"] is not False
    titles = ("A good answer", "A bad answer") if right else ("The highest reward", "A lower reward")
    return [shown_answer(good, titles[0]), shown_answer(bad, titles[1])]


def _awkwardness(row: Record) -> tuple[bool, float, int]:
    """Return whether an answer is given more than once, how much of it is repeated, and its length."""
    text = "\n".join(message["content"] for message in row["messages"] if message["role"] == "assistant")
    return text.count(r"\boxed") > 1, seq_rep_n(list(map(hash, text.split()))), len(text)


# ------------------------------------------------------------------------------------------------ answers by reward


def columns_of(rows: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Return (title, rows) of each checkpoint, or of up to MOST_COLUMNS parts of the steps."""
    by_source: dict[str, list[Record]] = {}
    for row in rows:
        by_source.setdefault(row["from"] or "all", []).append(row)
    sources = list(by_source)
    if not all(source.startswith("step ") for source in sources):
        return list(by_source.items())
    size = max(1, -(-len(sources) // MOST_COLUMNS))
    parts = [sources[at : at + size] for at in range(0, len(sources), size)]
    return [
        (
            part[0] if len(part) == 1 else f"steps {part[0][5:]} to {part[-1][5:]}",
            [r for s in part for r in by_source[s]],
        )
        for part in parts
    ]


def reward_counts(rows: Sequence[Record]) -> Record:
    """Return how many answers of each column earned what, the highest rewards first; {} without rewards."""
    values = sorted({row["reward"] for row in rows if row["reward"] is not None}, reverse=True)
    if not values:
        return {}
    if len(values) <= MOST_BINS:
        bins = [(f"{value:.3g}", value, value) for value in values]
    else:
        low, width = values[-1], (values[0] - values[-1]) / MOST_BINS
        ends = [low + width * number for number in range(MOST_BINS + 1)]
        pairs = list(itertools.pairwise([*ends[:-1], values[0]]))
        bins = [(f"{start:.3g} to {end:.3g}", start, end) for start, end in reversed(pairs)]
    table, means = [], list[str]()
    columns = [(title, [r["reward"] for r in part if r["reward"] is not None]) for title, part in columns_of(rows)]
    left = {title: list(rewards) for title, rewards in columns}
    for label, start, _ in bins:  # from the top: a value at a limit belongs to the higher bin
        cells = []
        for title, rewards in columns:
            count = sum(reward >= start for reward in left[title])
            left[title] = [reward for reward in left[title] if reward < start]
            cells.append((count, count / len(rewards) if rewards else 0.0))
        table.append((label, cells))
    for _, rewards in columns:
        means.append(f"{sum(rewards) / len(rewards):.3g}" if rewards else "none")
    return {"heads": [(title, len(rewards)) for title, rewards in columns], "rows": table, "means": means}


def prompt_groups(rows: Sequence[Record], besides: str) -> list[tuple[str, str, list[ShownAnswer]]]:
    """Return (step, prompt, its answers by reward) of prompts whose answers earned different rewards.

    Of a run in training they are samples of one step, from its first and its last steps that are recorded. Otherwise
    the prompt `besides` is left out, if there are others.
    """
    by_task: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        source = str(row["from"] or "")
        place = (source if source.startswith("step ") else "", row["env"], prompt_of(row))
        by_task.setdefault(place, []).append(row)
    several = [(place, found) for place, found in by_task.items() if len(found) > 1]
    differ = [each for each in several if len({row["reward"] for row in each[1]}) > 1] or several
    if differ and not differ[0][0][0]:
        shown = ([each for each in differ if each[0][2] != besides] or differ)[:GROUPS]
    else:
        shown = differ if len(differ) <= GROUPS else [differ[0], differ[-1]]
    return [
        (
            place[0].capitalize(),
            shorten(place[2]),
            [shown_answer(row) for row in sorted(found, key=lambda row: -(row["reward"] or 0.0))[:MOST_OF_A_PROMPT]],
        )
        for place, found in shown
    ]


# ------------------------------------------------------------------------------------------------ calls and results


def calls_table(
    rows: Sequence[Record], programs: bool = False
) -> list[tuple[str, list[tuple[str, int, str, str]], str]]:
    """Return (column, [(tool, calls, failed, its most frequent error)], what calls are worth); [] without calls.

    programs: the rows are episodes of agent programs, whose requests are counted as well.
    """
    table = []
    for title, part in columns_of(rows):
        results = [message for row in part for message in row["messages"] if message["role"] == "tool"]
        tools = list[tuple[str, int, str, str]]()
        for tool in dict.fromkeys(message["call"].split("(")[0] for message in results):
            mine = [message for message in results if message["call"].split("(")[0] == tool]
            errors = Counter(shorten(message["content"])[:OPENING_CHARACTERS] for message in mine if message["failed"])
            failed = f"{errors.total()} ({percent(errors.total() / len(mine))})" if errors else "none"
            tools.append((tool or "cannot be read", len(mine), failed, errors.most_common(1)[0][0] if errors else ""))
        if programs:
            crashed = sum(row["end"] == "crashed" for row in part)
            failed = f"{crashed} of {len(part)} programs crashed" if crashed else "none"
            tools.insert(0, ("requests of the program", sum(row["turns"] for row in part), failed, ""))
        table.append((title, tools, _worth(part) if results or not programs else _requests(part)))
    return table if any(tools for _, tools, _ in table) else []


def _worth(rows: Sequence[Record]) -> str:
    """Return how many of the answers with and without a call succeeded."""
    words = list[str]()
    for with_calls in (True, False):
        mine = [row["won"] for row in rows if any(m["role"] == "tool" for m in row["messages"]) == with_calls]
        judged = [won for won in mine if won is not None]
        if judged:
            kind = "with a call" if with_calls else "without a call"
            words.append(f"{sum(judged)} of {len(judged)} answers {kind} are right")
    return "; ".join(words)


def _requests(rows: Sequence[Record]) -> str:
    """Return how many requests programs made whose answer is right, and the others."""
    words = list[str]()
    for won, kind in ((True, "right"), (False, "wrong")):
        turns = [row["turns"] for row in rows if row["won"] is won and row["end"] != "crashed"]
        if turns:
            words.append(f"{sum(turns) / len(turns):.1f} requests for an answer that is {kind} ({len(turns)})")
    return "; ".join(words)


def by_reward(rows: Sequence[Record], examples: Sequence[ShownAnswer]) -> dict[str, Any]:
    """Return what the section of answers by reward shows; {} without any. examples: shown above it."""
    table = reward_counts(rows)
    return {"table": table, "groups": prompt_groups(rows, examples[0].prompt if examples else "")} if table else {}
