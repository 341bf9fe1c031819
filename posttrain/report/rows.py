"""What of an episode does the browser get?  Rows of any transcripts.jsonl in one form, and pictures of some.

    {"from": "phase3", "at": "level 4", "env": "frozen_lake", "won": true, "end": "solved", "reward": 1.0, "turns": 3,
     "length": 36, "invalid": 0, "facts": "...", "messages": [...], "actions": [["Up"], ...], "rewards": [0.0, ...],
     "penalties": [...], "moments": [[-1, 0], [0, 1], ...], "frames": [17, 18, ...], "tokens": [{...}, ...]}
`moments` are pairs of a turn and a picture, `frames` places among the page's pictures, `tokens` the figures that
monitoring/token_figures.py recorded.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from posttrain.report.episodes import Stage, acted_out, png
from posttrain.types import Record

OUTCOMES = ("success", "accuracy")  # the keys that say whether an episode was won or an answer is right
FACTS = (  # what else is told of a row, and in which words
    ("answer", "expected: {}"),
    ("setting", "setting “{}”"),
    ("group", "group {}"),
    ("seq_rep_4", "repeated 4-grams: {:.1%}"),
    ("margin", "chosen answer likelier by {:.1f} nats"),
)
TOKEN_FIGURES = ("logprob", "entropy", "advantage", "loss")


class Pictures:
    """The pictures of a page, each kept and encoded once."""

    def __init__(self) -> None:
        self.found: dict[bytes, int] = {}  # digest of a picture -> its place
        self.coded: list[str] = []

    def add(self, frames: Iterable[np.ndarray]) -> list[int]:
        places = []
        for frame in frames:
            digest = hashlib.sha256(repr(frame.shape).encode() + frame.tobytes()).digest()
            if digest not in self.found:
                self.found[digest] = len(self.coded)
                self.coded.append(base64.b64encode(png(frame)).decode())
            places.append(self.found[digest])
        return places


def entry(row: Record) -> Record:
    """A row of a transcripts.jsonl, of phase 3 or of the evaluator; what it does not have is null."""
    messages = _messages(row)
    turns = sum(message["role"] == "assistant" for message in messages)
    rewards, penalties = row.get("turn_rewards"), row.get("turn_penalties")
    tokens = _tokens(row, turns)
    reward = None
    if row.get("return") is not None:
        reward = _sum([row["return"], row.get("penalties", 0.0)])
    elif isinstance(rewards, list):
        reward = _sum([*rewards, *(penalties or ())])
    length = row.get("tokens")
    if tokens is not None:
        length = sum(value is not None for turn in tokens for value in turn["logprob"])
    won = next((bool(row[key]) for key in OUTCOMES if key in row), None)
    found = {
        "from": str(row.get("checkpoint", f"step {row['step']}" if "step" in row else "")) or None,
        "at": f"level {row['index']}" if "level" in row else f"item {row['index']}" if "index" in row else "",
        "env": str(row.get("env") or ", ".join(filter(None, (row.get("suite"), row.get("part")))) or "episode"),
        "won": won,
        "end": _end(row, won),
        "reward": _number(reward),
        "turns": turns,
        "length": length if isinstance(length, int) else None,
        "invalid": _number(row.get("invalid_turns")),
        "facts": " · ".join(words.format(row[key]) for key, words in FACTS if row.get(key) not in (None, "")),
        "messages": messages,
        "rewards": _numbers(rewards),
        "penalties": _numbers(penalties),
        "tokens": tokens,
        "moments": [[turn, 0] for turn in range(turns)] if turns > 1 else [],
    }
    if reward is not None and found["reward"] is None:
        found["facts"] = " · ".join(filter(None, (found["facts"], "the reward is not a finite number")))
    found["at"] = " ".join(filter(None, (found["from"], found["at"]))) or found["env"]
    return found


def with_pictures(row: Record, stage: Stage, pictures: Pictures) -> Record:
    """The entry of an episode that is played again, if its environment can be drawn."""
    found = entry(row)
    if row.get("crashed") or ":" in stage.name:  # no module is imported because a file of results names it
        return found
    frames, turns = acted_out(stage, row)
    found["actions"] = [taken for _, taken in turns]
    if frames:
        found["frames"], found["moments"] = pictures.add(frames), moments(turns)
    return found


def moments(turns: Sequence[tuple[str, list[str]]]) -> list[tuple[int, int]]:
    """(turn, picture) of each step of the film: the start, then one for each action, and one for a turn without any."""
    found, picture = [(-1, 0)], 0
    for number, (_, actions) in enumerate(turns):
        for _ in range(max(1, len(actions))):
            picture += bool(actions)
            found.append((number, picture))
    return found


def _messages(row: Record) -> list[Record]:
    """The conversation, with the answer of a row that keeps it apart, and both answers of a preference pair."""
    if "chosen" in row and "rejected" in row:
        pair = [[{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in
                (row["chosen"], row["rejected"])]  # fmt: skip
        return [*pair[0], *(message for message in pair[1] if message["role"] == "assistant")]
    messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in row.get("messages", [])]
    if isinstance(row.get("text"), str):
        messages.append({"role": "assistant", "content": row["text"]})
    return messages


def _tokens(row: Record, turns: int) -> list[Record] | None:
    found = row.get("tokens")
    if not isinstance(found, list) or len(found) != turns:
        return None
    if any(len(turn[figure]) != len(turn["text"]) for turn in found for figure in TOKEN_FIGURES):
        return None
    return [{"text": list(map(str, turn["text"]))} | {k: _numbers(turn[k]) for k in TOKEN_FIGURES} for turn in found]


def _end(row: Record, won: bool | None) -> str:
    if row.get("crashed"):
        return "crashed"
    if won is None:
        return ""
    if "success" in row:
        return "solved" if won else (row.get("failure") or "not solved").replace("_", " ")
    return "right" if won else "wrong"


def _number(value: Any) -> float | None:
    """None for what is no finite number: a browser could neither read nor draw it."""
    return value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _sum(values: Iterable[Any]) -> float:
    """Infinite where an integer is beyond any float."""
    try:
        return sum(values)
    except OverflowError:
        return math.inf


def _numbers(values: Any) -> list[float | None] | None:
    return list(map(_number, values)) if isinstance(values, list) else None


def _finite(data: Any) -> Any:
    """The data with null for each number that is not finite, as token_figures.py writes them."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return _number(data) if isinstance(data, float) else data


def packed(name: str, data: Any) -> str:
    """Data for `unpack` of player.js, gzipped: thousands of episodes are a small page, and no text ends the script."""
    try:
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN or infinity, which a browser's JSON does not know
        text = json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    code = base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{code}</script>'
