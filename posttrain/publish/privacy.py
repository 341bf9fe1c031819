"""What may not leave this machine?  Paths of it are cut to their last part, secrets stop everything."""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from posttrain.types import UserError

# First parts of a path on some machine, beside those that this one has
USUAL = "home root Users tmp var mnt data opt srv media scratch workspace content work usr etc nfs private Volumes fsx"
SECRETS = {
    "a token of the Hub": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "an API key": r"\bsk-[\w-]{20,}",
    "a token of GitHub or GitLab": r"\b(?:gh[pousr]_|github_pat_|glpat-)[\w-]{20,}",
    "a key of a cloud": r"\b(?:AKIA[0-9A-Z]{16}|AIza[\w-]{35})\b",
    "a token of Slack": r"\bxox[a-z]-[\w-]{10,}",
    "a web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in an address": r"://[^/\s:@]+:[^/\s:@]+@",
}
NAMES_A_SECRET = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:$|_)")
CHANGED = {".json", ".jsonl", ".yaml", ".yml", ".md", ".txt", ".csv"}  # texts whose paths may be cut
CHUNK, OVERLAP = 1 << 26, 1 << 12  # of a binary file, in bytes
VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")  # words of theirs may look like a path


@cache
def _paths() -> re.Pattern[str]:
    roots = "|".join(sorted({re.escape(name) for name in (*USUAL.split(), *os.listdir("/"))}))
    end = r"[^\s\"'`<>|,:;*?()\[\]{}\\]+"
    absolute = rf"(?:file://|(?<![\w./~]))/(?:{roots})/{end}"
    others = rf"(?<![\w./])~(?:[a-z][\w-]*)?/{end}|(?<![\w./])(?:\.\./)+{end}"
    return re.compile(rf"{absolute}|{others}|\b[A-Za-z]:\\+Users\\+[^\s\"'<>|]+")


def _own() -> list[str]:
    """Folders of this machine that say who works on it and on what; none that is a single word such as /root."""
    known = {Path.home(), Path.cwd(), Path(tempfile.gettempdir())}
    return sorted((str(path) for path in known if len(path.parts) > 2), key=len, reverse=True)


def _secrets() -> Iterator[tuple[str, str]]:
    """What this process could give away by heart: the Hub's token, and variables that are named like one."""
    token = get_token()
    if token:
        yield "the token of the Hub that is saved here", token
    for name, value in os.environ.items():
        if NAMES_A_SECRET.search(name) and len(value) >= 8:
            yield f"the value of the variable {name}", value


def cut(text: str) -> str:
    """A text in which every path of a machine is its last part: "/home/ana/rows.jsonl" becomes "rows.jsonl"."""
    for own in _own():
        text = re.sub(rf"{re.escape(own)}(?:/(?=[\w.-]))?", "", text)
    return _paths().sub(lambda found: _last(found[0]), text)


def _last(path: str) -> str:
    stripped = path.rstrip("/\\.:")
    return re.split(r"[/\\]", stripped)[-1] + path[len(stripped) :].replace("/", "").replace("\\", "")


def cut_values(value: Any) -> Any:
    """`cut` for every string in what JSON can hold; one that is a path as a whole may have spaces in it."""
    if isinstance(value, str):
        whole = _paths().match(value)
        return _last(value) if whole and "\n" not in value and re.match(r"(?:/|~|\.\./)", value) else cut(value)
    if isinstance(value, dict):
        return {cut_values(key): cut_values(inner) for key, inner in value.items()}
    return [cut_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def refuse_secrets(name: str, content: bytes | Path) -> None:
    """UserError where a file holds a secret. Of weights the header is read: tensors are numbers."""
    for text in _texts(content):
        for what, secret in _secrets():
            if secret in text:
                raise UserError(_refusal(name, text.index(secret), text, what))
        for what, pattern in SECRETS.items():
            if found := re.search(pattern, text):
                raise UserError(_refusal(name, found.start(), text, what))


def check(name: str, content: bytes | Path) -> None:
    """UserError where a file that is to be published holds a secret, or a path that could not be cut."""
    refuse_secrets(name, content)
    for text in _texts(content):
        places = [text.index(own) for own in _own() if own in text]
        if _has_words(name) and (found := _paths().search(text)):
            places.append(found.start())
        if places:
            raise UserError(_refusal(name, min(places), text, "a path of a machine"))


def _refusal(name: str, place: int, text: str, what: str) -> str:
    line = text.count("\n", 0, place) + 1
    return (
        f"Nothing is published: {name} holds {what} (line {line}). Take it out of the file or leave the file out; a "
        "secret that may have been seen should be revoked."
    )


def _has_words(name: str) -> bool:
    """Whether what looks like a path in a file is one: not in vocabularies and binary files."""
    return Path(name).name not in VOCABULARY and Path(name).suffix in CHANGED | {".jinja", ".py", ".safetensors"}


def _texts(content: bytes | Path) -> Iterator[str]:
    """A file as text, a large one in pieces that overlap."""
    if isinstance(content, bytes):
        yield content.decode("utf-8", errors="replace")
    elif content.suffix == ".safetensors":
        with content.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        yield "\n".join([*(f"{key} {value}" for key, value in header.get("__metadata__", {}).items()), *header])
    else:
        with content.open("rb") as file:
            before = b""
            while piece := file.read(CHUNK):
                yield (before + piece).decode("utf-8", errors="replace")
                before = (before + piece)[-OVERLAP:]
