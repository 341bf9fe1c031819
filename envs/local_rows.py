"""How is a local file of rows read?  JSON Lines, a JSON array or CSV, also packed; errors name the place of damage.

`datasets` could read them as well, but gives all rows one schema: texts become dates or numbers, and values of several
types JSON. It also names no line, and writes a copy to its cache.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import reprlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

Placed = tuple[str, dict[str, Any]]  # a row's place in its file, "line 3" or "row 3", and the row
Content = IO[bytes] | gzip.GzipFile
KINDS = (".jsonl", ".json", ".csv")
LONGEST_LINE = 2**28  # bytes: a packed file may unfold to any length
LONGEST_ARRAY = 2**31
TEXTS_TOO = ("prompt", "completion", "chosen", "rejected")  # columns of texts or messages
MESSAGES = ("messages", "conversations", "conversation", *TEXTS_TOO)
ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "developer": "system",  # OpenAI's present name
}
CALLERS = ("function_call", "tool_call")  # roles of ShareGPT's messages
RESULTS = ("function", "observation", "tool_response")  # roles that are called tool here
ROLES = ("system", "user", "assistant", "tool", *ROLE_NAMES, *CALLERS, *RESULTS)


class BrokenRows(ValueError):
    """What is wrong in a file, where, and what to do: BrokenRows("line 3", "is not JSON", "Repair or delete it.").

    place: empty for the whole file.
    """

    def __init__(self, place: str, problem: str, remedy: str = ""):
        problem = " ".join(problem.split())
        super().__init__(f"{place} {problem}".strip())
        self.place, self.problem, self.remedy = place, problem, remedy


def kind_of_file(name: str) -> str:
    """Return which of `KINDS` a file of this name is, also a packed one; empty for another."""
    kind = Path(name.removesuffix(".gz")).suffix
    return kind if kind in KINDS else ""


def rows_in(file: Path) -> Iterator[Placed]:
    """Yield the rows of a file as they are written there. A cell of CSV is a text, that of messages JSON.

    Raises:
        BrokenRows: a part of it is not a row.
        OSError, EOFError, zlib.error: it cannot be opened or unpacked.
    """
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as content:
        match kind_of_file(file.name):
            case ".jsonl":
                yield from _json_lines(content)
            case ".json":
                yield from _json(content)
            case _:
                yield from _csv(content)


def brief(value: object) -> str:
    """Return the beginning of a value, however deep it is nested."""
    return reprlib.repr(value)[:120]


def _json_lines(file: Content) -> Iterator[Placed]:
    """Yield a row for each line. Only a line feed ends a line: texts may hold U+2028 and similar separators."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        where, remedy = f"line {number}", "Repair or delete it."
        if len(line) > LONGEST_LINE:
            raise BrokenRows(where, f"has more than {LONGEST_LINE:,} bytes", remedy)
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BrokenRows(
                where,
                f"is not UTF-8 text (byte {line[error.start]:#04x} at place {error.start + 1})",
                "Save the file as UTF-8, or repair or delete the line.",
            ) from None
        if not text.strip():
            continue
        try:
            row = json.loads(text.rstrip())
        except json.JSONDecodeError as error:  # which counts lines within this one
            raise BrokenRows(where, f"is not JSON: {error.msg}, column {error.colno}", remedy) from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, endless nesting
            raise BrokenRows(where, f"is not JSON: {error}", remedy) from None
        yield where, _object(row, where)


def _json(file: Content) -> Iterator[Placed]:
    """Yield the rows of an array. Many files of this name are JSON Lines, which begin with another character."""
    content = file.read(LONGEST_ARRAY + 1)
    if len(content) > LONGEST_ARRAY:
        raise BrokenRows("", f"has more than {LONGEST_ARRAY:,} bytes", "Save it as .jsonl, a row a line.")
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
        yield from _json_lines(io.BytesIO(content))
        return
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, and names the byte
        raise BrokenRows("", f"is not a JSON array of rows ({error})", "Repair the file.") from None
    for number, row in enumerate(rows, 1):
        yield f"row {number}", _object(row, f"row {number}")


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BrokenRows(where, f"is {brief(row)}, not a JSON object {{...}}", "Repair it.")
    return row


def _csv(file: Content) -> Iterator[Placed]:
    """Yield the rows below a header."""
    csv.field_size_limit(sys.maxsize)  # 131,072 characters are a long answer, not an error
    reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(header) != len(set(header)):
            raise BrokenRows("its header", f"names a column twice: {', '.join(header)[:300]}", "Rename one.")
        for cells in reader:
            if not cells:
                continue
            where = f"line {reader.line_num}"
            if len(cells) != len(header):
                raise BrokenRows(
                    where,
                    f"has {len(cells)} cells, its header {len(header)} ({', '.join(header)[:300]})",
                    "Columns are separated by commas, and a text with a comma, a quotation mark or a line break must be"
                    " quoted. Repair the file, or save it as .jsonl.",
                )
            yield where, {name: _cell(name, text) for name, text in zip(header, cells, strict=True)}
    except UnicodeDecodeError as error:
        raise BrokenRows(
            "",
            f"is not UTF-8 text (byte {error.object[error.start]:#04x} behind line {reader.line_num})",
            "Save the file as UTF-8.",
        ) from None
    except csv.Error as error:
        raise BrokenRows(f"line {reader.line_num}", f"is not CSV ({error})", "Repair the file.") from None


def _cell(name: str, text: str) -> Any:
    """Return a cell as messages where the column has them: a prompt or an answer may be a text that is JSON.

    A message alone, not in a list, may be `chosen` or `rejected`, as LLaMA-Factory writes them.
    """
    if name in MESSAGES and text.startswith(("[{", '{"')):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        several = value if isinstance(value, list) else [value] if name in ("chosen", "rejected") else []
        if name not in TEXTS_TOO or any(map(_is_message, several)):
            return value
    return text


def _is_message(value: Any) -> bool:
    """Return whether this has the keys of a message and a known role; further keys are named by whoever reads it."""
    keys: set[str] = set(value) if isinstance(value, dict) else set()
    roles = [value[key] for key in ("role", "from") if key in keys]
    return any(role in ROLES for role in roles) and bool(keys & {"content", "value", "tool_calls", "function_call"})
