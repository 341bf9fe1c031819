"""Which private data must not be published?  Paths are cut to their last part; a secret stops the command."""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import get_token

from posttrain.types import UserError

# Random characters, unlike words, names and numbers: "posttrain-phase-3", "a/ConvGPT-0.2B", 1.5e-05
IN_VALUE = r"[A-Za-z0-9_+/=.~-]"
WORD = r"(?>\d++[A-Za-z]?(?![A-Za-z0-9])|[A-Za-z]{0,31}+(?!\d)|[A-Za-z]{0,23}+\d{1,4}+[A-Za-z]?+)"
CHOSEN = rf"(?!(?:{WORD}[_+/=.~-]){{0,50}}+{WORD}(?!{IN_VALUE})){IN_VALUE}"
IS = r"[\"']?[ \t]*[:=][ \t]*[\"']?"
FORMS = {
    "a token of the Hub": r"\b(?:hf|api_org)_(?:[a-z]+_)?[A-Za-z0-9]{20,}",
    "an API key": (
        r"\b(?:sk-|xai-|nvapi-|pypi-|pplx-|tvly-|gsk_|npm_|r8_|[sr]k_(?:live|test)_|ya29\.|wandb_v\d_"
        r"|tgp_v\d_|dop_v\d_|shpat_|lin_api_)[\w-]{16,}|\bdapi[0-9a-f]{32}"
    ),
    "a token of GitHub or GitLab": r"\b(?:gh[pousr]_|gl(?:pat|rt)-)[\w-]{20,}",
    "an access token": r"\b[a-z]+_pat_[\w-]{20,}|\bSG\.[\w-]{16,}\.[\w-]{16,}",
    "a key of a cloud": r"\b(?:A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35})\b",
    "a token of Slack": r"\bx(?:ox[a-z]|app-\d)-[\w-]{10,}|hooks\.slack\.com/services/\w+",
    "a web token": r"(?<![A-Za-z0-9])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
    "a password in an address": rf"://[^/\s:@]*:[^/\s:@]+@|://{CHOSEN}{{16,}}@",
}
NAMED = {
    "a password of .netrc": r"\blogin\s+\S+\s+password\s+\S+",
    "a password": (
        rf"(?i)(?:passw(?:or)?d{IS}(?=\S{{0,99}}\d)[^\s\"',<>()\[\]{{}}]{{6,}}"
        # neither a number nor a folder (PWD)
        rf"|(?<![a-z])(?:pass(?:phrase)?|pwd){IS}(?![/~$%.\\-]|[a-z]:|\d[\d.e+-]*\b)"
        rf"(?=\S{{0,99}}\d)[^\s\"',<>()\[\]{{}}]{{8,}})"
    ),
    "a secret after its name": (
        rf"(?i)(?:(?:token|secret|credentials?|wandb){IS}{CHOSEN}{{16,}}|key(?:[_-]base)?{IS}{CHOSEN}{{8,}}"
        rf"|(?:\bbearer|authorization{IS}(?:basic|token))[ \t]+{CHOSEN}{{16,}})"
    ),
}
NAMES_A_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|_PWD|CREDENTIAL", re.I)  # PWD is a folder
CHUNK, OVERLAP = 1 << 26, 1 << 12  # of a large file, in bytes
VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")  # their words may look like paths
END = r"[^\s\"'`<>|,:;*?()\[\]{}\\/]+"
POSIX = rf"(?:file:/*/|(?<![\w./~:)\]}}])/+|(?<=:)/(?!/)){END}(?:/+{END})+/?"
HOMES = (
    rf"(?<![\w./])~(?:[a-z][\w-]*/(?:{END}/*)*|/(?:{END}/*)+)"
    rf"|(?<![\w./-])(?:\w[\w.-]*/+){{0,20}}(?:\.\./+)+(?:{END}/*)+"  # also runs/../../ana
    rf"|(?<![\w.@-])[\w.-]{{1,64}}@[\w.-]{{1,99}}:/*(?:{END}/+)+{END}"  # of another host: ana@host:work/rows.jsonl
)
# Names in a user's folder may have spaces: all words up to the next slash belong to a name.
SPACED = rf"(?:{END}(?: (?!~){END}){{1,3}}(?=[\\/])|{END})"
USERS = (
    # A path starts at the first of several slashes, or at the second after a name: a try at each slash would take
    # quadratic time.
    rf"(?:\b[A-Za-z]:|(?<=(?<![\w-])-[A-Za-z])|(?<![A-Za-z0-9_.~)\]}}/-])|(?<=[A-Za-z0-9_.~)\]}}-]/))"
    rf"/++(?:home\w*|Users)(?:/+{SPACED})+/?"
    rf"|\b[A-Za-z]:[\\/]+Users(?:[\\/]+{SPACED})+"
)
# Two backslashes: in text that is not JSON a single one may be a line break ("Q:\nWho?")
WINDOWS = r"\b[A-Za-z]:(?:\\+|/)[^\s\"'<>|]+|(?<![\w\\])\\\\[\w.-]+\\+[^\s\"'<>|]+"
PATHS = re.compile(f"{USERS}|{POSIX}|{HOMES}|{WINDOWS}")
IN_CODE = re.compile(f"{USERS}|{POSIX}|{HOMES}")  # there "Q:\n" has a line break
# Addresses of machines and people: s3://bucket/rows, ssh://ana@gpu7/data, http://gpu7:8000, 10.0.0.3, fe80::1,
# gpu7.intern:8000, ana@clinic.de. Not 127.0.0.1, nor the example names of RFC 2606.
NUMBER = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"(?!127\.|0\.0\.0\.0)(?:{NUMBER}\.){{3}}{NUMBER}(?![\w-]|\.\d)"
IPV6 = r"(?:[23][0-9A-Fa-f]{3}|[Ff][CcDd][0-9A-Fa-f]{2}|[Ff][Ee][89ABab][0-9A-Fa-f])(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])"
RESERVED = r"(?:example|test|invalid|localhost)(?![\w-]|\.\w)|(?:[\w-]{1,63}\.){0,8}example\.(?:com|net|org)(?![\w-])"
INSIDE = (
    r"(?:[\w-]{1,63}\.){1,8}(?:local|localdomain|lan|intern|internal|intranet|corp|home|private|arpa)(?![\w-]|\.\w)"
)
REST = r"(?:[^\s\"'<>`|)\]}]*[^\s\"'<>`|)\]}.,:;])?"  # without the full stop of a sentence
STORES = re.compile(rf"(?<![\w+.-])(?!(?i:https?|hf|file)://)[A-Za-z][A-Za-z0-9+.-]{{1,20}}://(?=[\w\[]){REST}")
SERVERS = re.compile(
    rf"\b[Hh][Tt][Tt][Pp][Ss]?://(?:[^\s/@\"'<>]{{1,99}}@)?(?!{RESERVED})"
    rf"(?:{IPV4}|\[(?!::1\])[0-9A-Fa-f:.]{{3,45}}\]|{INSIDE}|[\w-]{{1,63}}(?![\w-]|\.\w)){REST}"
)
HOSTS = re.compile(
    rf"(?<![\w.@/-]){INSIDE}:\d{{1,5}}(?!\w)|(?<![\w.:-]){IPV4}(?::\d{{1,5}}(?!\w))?|(?<![\w:.]){IPV6}"
    rf"|(?<![\w.+-])[\w.+-]{{1,64}}@(?!{RESERVED})(?:[A-Za-z0-9-]{{1,63}}\.){{1,8}}[A-Za-z]{{2,24}}(?![\w-])"
)
PATH, LINK = "a path of a machine", "an address of a machine or a person"
ADDRESS = "(address)"  # replaces an address
PUBLIC = re.compile(r"https://(?:[\w-]+\.)?huggingface\.co(?:/|$)")
ADDRESS_KEYS = ("url", "urls", "endpoint", "address", "server", "host")  # settings that name a server
# Settings that a person may have written, to be checked by a reader.
FREE_KEYS = ("output_dir", "hardware", "system", "title", "path", "name_or_path", "base", "template", "licence")
PLAIN = re.compile(r"[a-z0-9_.+-]{0,80}")
WHOLE = re.compile(r"(?:file:/*)?/[^/\s][^/]*/.|~[\w.-]*/|\.\./|[A-Za-z]:[\\/]|\\\\\w")
HOME = re.compile(
    r"(?:file:/*|[A-Za-z]:)?(?:/(?:[\w.-]+/)*(?:home\w*|Users)/[^/]+/?|~[\w.-]*/?|[A-Za-z]:[\\/]+Users[\\/]+[^\\/]+[\\/]*)"
)


def _own() -> list[str]:
    """Return folders of this machine that may name people or projects; not a single word such as /root."""
    known = {Path.home(), Path.cwd(), Path(tempfile.gettempdir())}
    return sorted((str(path) for path in known if len(path.parts) > 2), key=len, reverse=True)


def _secrets() -> Iterator[tuple[str, str]]:
    """Yield the secrets of this process: the Hub's token, and environment variables that are named like a secret."""
    token = get_token()
    if token:
        yield "the token of the Hub that is saved here", token
    for name, value in os.environ.items():
        if NAMES_A_SECRET.search(name) and len(value) >= 8:
            yield f"the value of the variable {name}", value


def cut_paths(text: str) -> str:
    """Cut every path of a machine to its last part: "/home/ana/rows.jsonl" becomes "rows.jsonl".

    So is a path of a store (s3://bucket/rows.jsonl); other addresses of machines and people become "(address)".
    """
    for own in _own():
        text = re.sub(rf"{re.escape(own)}(?:/(?=[\w.-]))?", "", text)
    text = STORES.sub(lambda match: _stored(match[0]), text)
    text = PATHS.sub(lambda match: _last(match[0]), SERVERS.sub(ADDRESS, text))
    return HOSTS.sub(ADDRESS, text)


def _stored(address: str) -> str:
    """Return the last part of s3://bucket/folder/rows.jsonl; ADDRESS for s3://bucket."""
    path = address.partition("://")[2].rstrip("/.,:;").partition("/")[2]
    return path.rpartition("/")[2] or ADDRESS


def _last(path: str) -> str:
    """Return the last part of a path; `home` for a user's folder."""
    if HOME.fullmatch(path):  # its last part is a person's name
        return "home"
    stripped = path.rstrip("/\\.:")
    return re.split(r"[/\\]", stripped)[-1] + path[len(stripped) :].replace("/", "").replace("\\", "")


def cut_values(value: Any) -> Any:
    """Cut every string in a JSON value; a string that is a whole path may have spaces.

    The value of a key that names a server, such as `url`, becomes empty. `output_dir` keeps its last part and
    `run_name` nothing: both may name people.
    """
    if isinstance(value, str):
        return _last(value) if WHOLE.match(value) and "\n" not in value else cut_paths(value)
    if isinstance(value, dict):
        return {cut_values(key): _cut_setting(key, inner) for key, inner in value.items()}
    return [cut_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def _cut_setting(key: Any, value: Any) -> Any:
    if key == "servers" and isinstance(value, list):
        return []
    if isinstance(value, str):
        if key in ADDRESS_KEYS and not PUBLIC.match(value):
            return ""
        if key in ("output_dir", "run_name"):
            return _last(value) if key == "output_dir" else None
    return cut_values(value)


def free_text(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) of the strings in settings that a person may have written."""
    if isinstance(value, str):
        if value and (key in FREE_KEYS or not PLAIN.fullmatch(value)):
            yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from free_text(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from free_text(inner, key)


def refuse_secrets(name: str, content: bytes | Path) -> None:
    """Raise UserError if a file holds a secret. Of weights only the header is read."""
    forms = FORMS if Path(name).name in VOCABULARY else FORMS | NAMED  # in a vocabulary a number follows each word
    known = [(what, re.escape(secret)) for what, secret in _secrets()]
    patterns = [(what, re.compile(pattern)) for what, pattern in (*known, *forms.items())]
    for text in _texts(content):
        for part, line in ((text, 1), *_values(name, text)[0]):
            for what, pattern in patterns:
                if match := pattern.search(part):
                    start = line or line_of(text, part)
                    raise UserError(_refusal(name, start + part.count("\n", 0, match.start()), what))


def refuse_private(name: str, content: bytes | Path) -> None:
    """Raise UserError if a file holds a secret, a path or an address."""
    refuse_secrets(name, content)
    for text in _texts(content):
        places = [text.index(own) for own in _own() if own in text]
        if places:
            raise UserError(_refusal(name, 1 + text.count("\n", 0, min(places)), PATH))
        if Path(name).name in VOCABULARY or not is_utf8(content):
            continue
        values, whole = _values(name, text)  # without the escapes of JSON, which can hide a path or look like one
        first = next(((value, line) for value, line in values if cut_values(value) != value), None)
        lines = [(first[1] or line_of(text, first[0]), _kind(first[0]))] if first else []
        if not whole:
            paths = IN_CODE if Path(name).suffix in (".py", ".jinja") else PATHS
            for form, what in ((paths, PATH), (STORES, LINK), (SERVERS, LINK), (HOSTS, LINK)):
                match = form.search(text)
                lines += [(1 + text.count("\n", 0, match.start()), what)] if match else []
        if lines:
            raise UserError(_refusal(name, *min(lines)))


def _kind(text: str) -> str:
    """Return what a text that `cut_paths` changes holds: a path or an address."""
    return LINK if any(form.search(text) for form in (STORES, SERVERS, HOSTS)) else PATH


def is_utf8(content: bytes | Path) -> bool:
    """Return whether a file is UTF-8 text, as the header of weights is."""
    if isinstance(content, Path):
        return content.suffix == ".safetensors" or is_utf8(content.read_bytes())
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _values(name: str, text: str) -> tuple[list[tuple[str, int]], bool]:
    """Return each string of JSON, JSON lines or YAML with its line, and whether the text holds nothing else.

    The line is 0 if `line_of` has to search for it: a vocabulary has too many strings to search for each.
    """
    values, rest = [], False
    for number, line in enumerate(text.split("\n"), 1):
        try:
            values += [(value, number) for value in _strings(json.loads(line))] if line.strip() else []
        except (ValueError, RecursionError):
            rest = True
    if not rest:
        return values, True
    is_yaml = Path(name).suffix in (".yaml", ".yml")  # which has comments
    try:
        return [(value, 0) for value in _strings(yaml.safe_load(text) if is_yaml else json.loads(text))], not is_yaml
    except (ValueError, RecursionError, yaml.YAMLError):
        return values, False


def line_of(text: str, value: str) -> int:
    """Return the first line with this string in one of the forms of JSON; 1 without one."""
    written = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], value)
    places = [text.index(one) for one in written if one in text]
    return 1 + text.count("\n", 0, min(places, default=0))


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value:
            yield from _strings(inner)


def _refusal(name: str, line: int, what: str) -> str:
    return (
        f"Nothing is published: {name} holds {what} (line {line}). Take it out of the file or leave the file out; a "
        "secret that may have been seen should be revoked."
    )


def _texts(content: bytes | Path) -> Iterator[str]:
    """Yield a file as text, a large one in pieces that overlap."""
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
