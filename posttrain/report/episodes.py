"""What did an episode look like?  It is played again from its transcript, as pictures and as a row for the browser.

Rows of every transcripts.jsonl have the same form in the browser:

    {"from": "phase3", "at": "level 4", "env": "frozen_lake", "won": true, "end": "solved", "reward": 1.0, "turns": 3,
     "length": 36, "invalid": 0, "facts": "...", "messages": [...], "readable": true, "actions": [["Up"], ...],
     "rewards": [0.0, ...], "penalties": [...], "moments": [[-1, 0], [0, 1], ...], "frames": [17, 18, ...],
     "tokens": [{...}, ...]}
`messages` are as messages.py describes them. `readable` says whether all that the model wrote is text. `moments` are
pairs of a turn and a picture, `frames` places among the page's pictures, `tokens` the figures that
monitoring/token_figures.py recorded.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from posttrain.report.messages import is_readable, messages_of
from posttrain.report.tables import Results
from posttrain.types import Record

SIDE = 208  # pixels
FRAME, LAST_FRAME = 800, 2200  # milliseconds
OUTCOMES = ("success", "accuracy")  # keys: an episode was won, an answer is right
FACTS = (  # further keys of a row, and how they are shown
    ("answer", "expected: {}"),
    ("setting", "setting “{}”"),
    ("group", "group {}"),
    ("seq_rep_4", "repeated 4-grams: {:.1%}"),
    ("margin", "chosen answer likelier by {:.1f} nats"),
)
TOKEN_FIGURES = ("logprob", "entropy", "advantage", "loss")


def frames_of(
    name: str, options: Mapping[str, Any], seed: int, reset_options: dict[str, Any], actions: Sequence[str]
) -> list[np.ndarray]:
    """Play an episode again and return its pictures.

    Args:
        name: of the environment.
        options: of the environment.
        seed: of the level.
        reset_options: options of `reset`, as {"split": "test"}.
        actions: that were played.

    Returns:
        RGB frames (uint8, height x width x 3): the start and one per action; [] without a renderer.
    """
    import envs

    # a results file must not choose a module to import
    if ":" in name or not envs.make(name, **options).has("render"):
        return []
    env = envs.make(name, **{**options, "render_mode": "rgb_array"})
    env.reset(seed=seed, options=reset_options)
    frames = [env.render()]
    for action in actions:
        env.step(action)
        frames.append(env.render())
    return frames


class Stage(NamedTuple):
    """How an episode was set up: Stage("frozen_lake", {"size": 4}, {"max_turns": 8}, 12, {"split": "test"})."""

    name: str
    options: Mapping[str, Any]
    protocol: Mapping[str, Any]
    seed: int
    reset_options: dict[str, Any]


def evaluation_stage(results: Results, row: Record) -> Stage:
    """Return the stage of an episode of the evaluator."""
    suite = results["config"]["suites"]["envs"]
    name, options = _section(suite["envs"], row["part"])
    return Stage(name, options, suite["protocol"], row["seed"], {"split": suite["split"]})


def training_stage(config: Record, row: Record) -> Stage:
    """Return the stage of an episode of phase 3. config: its run_config.yaml."""
    name, options = _section(config["envs"], row["env"])
    reset_options = {"split": "train", "noise_seed": row["noise_seed"]}
    return Stage(name, options, config["protocol"], row["level_seed"], reset_options)


def _section(envs: Sequence[Record], title: str) -> tuple[str, Mapping[str, Any]]:
    return next((env["name"], env["options"]) for env in envs if title in (env.get("label"), env["name"]))


def played(results: Results, transcripts: Sequence[Record], name: str, env: str) -> dict[int, Record]:
    """Return level -> a checkpoint's episode under the headline setting, without crashed ones."""
    setting = results["checkpoints"][name]["envs"][env]["setting"]
    place = (name, "envs", env, setting)
    return {
        row["index"]: row
        for row in transcripts
        if (row["checkpoint"], row["suite"], row["part"], row["setting"]) == place and not row["crashed"]
    }


def acted_out(stage: Stage, row: Record) -> tuple[list[np.ndarray], list[tuple[str, list[str]]]]:
    """Return the pictures of `frames_of`, and the turns: (text of the model, its actions).

    Environments are deterministic: the level's seed and the actions give the episode that was played.
    """
    from envs import make
    from envs.protocol import Protocol

    env = make(stage.name, **stage.options)
    protocol = Protocol.of(env, **{name: value for name, value in stage.protocol.items() if name != "preset"})
    env.reset(seed=stage.seed, options=stage.reset_options)  # the list of actions may depend on the level
    turns, left = [], list(row["actions"])
    for message, following in pairwise([*row["messages"], {}]):
        if message["role"] == "assistant":
            calls = following.get("role") == "tool"  # such a turn does not act
            taken = [] if calls else protocol.read(message["content"], env.actions).actions[: len(left)]
            if taken != left[: len(taken)]:
                raise ValueError("the actions of a transcript do not match its text")
            del left[: len(taken)]
            turns.append((message["content"], taken))
    if left:
        raise ValueError(f"{len(left)} actions of a transcript belong to none of its turns")
    played = [action for _, taken in turns for action in taken]
    return frames_of(stage.name, stage.options, stage.seed, stage.reset_options, played), turns


def png(frame: np.ndarray) -> bytes:
    """Encode one frame as a small PNG."""
    out = io.BytesIO()
    _picture(frame).save(out, "PNG", optimize=True)
    return out.getvalue()


def _picture(frame: np.ndarray) -> Any:
    """Scale a frame to SIDE, in few colours."""
    from PIL import Image

    picture = Image.fromarray(frame)
    scale = SIDE / max(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    return picture.resize(size, Image.Resampling.BOX).quantize(96, Image.Quantize.FASTOCTREE)


def gif(frames: Sequence[np.ndarray]) -> bytes:
    """Encode an endless animation with a longer last frame."""
    pictures = [_picture(frame) for frame in frames]
    out, pace = io.BytesIO(), [FRAME] * (len(pictures) - 1) + [LAST_FRAME]
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=pace, loop=0, optimize=True)
    return out.getvalue()


# ---------------------------------------------------------------------------------- rows for the browser


class Pictures:
    """The pictures of a page, each encoded once."""

    def __init__(self) -> None:
        self.places: dict[bytes, int] = {}  # digest of a picture -> its place
        self.coded: list[str] = []

    def add(self, frames: Iterable[np.ndarray]) -> list[int]:
        """Add pictures; return their places."""
        places = []
        for frame in frames:
            digest = hashlib.sha256(repr(frame.shape).encode() + frame.tobytes()).digest()
            if digest not in self.places:
                self.places[digest] = len(self.coded)
                self.coded.append(base64.b64encode(png(frame)).decode())
            places.append(self.places[digest])
        return places


def browser_row(row: Record) -> Record:
    """Return a row of a transcripts.jsonl in the browser's form; missing values are None."""
    messages = messages_of(row)
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
    shown = {
        "from": str(row.get("checkpoint", f"step {row['step']}" if "step" in row else "")) or None,
        "at": f"level {row['index']}" if "level" in row else f"item {row['index']}" if "index" in row else "",
        "env": str(row.get("env") or ", ".join(filter(None, (row.get("suite"), row.get("part")))) or "episode"),
        "won": won,
        "end": describe_end(row, won),
        "reward": _number(reward),
        "turns": turns,
        "length": length if isinstance(length, int) else None,
        "invalid": _number(row.get("invalid_turns")),
        "facts": " · ".join(_facts(row)),
        "messages": messages,
        "readable": all(is_readable(each["content"]) for each in messages if each["role"] == "assistant"),
        "rewards": _numbers(rewards),
        "penalties": _numbers(penalties),
        "tokens": tokens,
        "moments": [[turn, 0] for turn in range(turns)] if turns > 1 else [],
    }
    if reward is not None and shown["reward"] is None:
        shown["facts"] = " · ".join(filter(None, (shown["facts"], "the reward is not a finite number")))
    shown["at"] = " ".join(filter(None, (shown["from"], shown["at"]))) or shown["env"]
    return shown


def with_pictures(row: Record, stage: Stage, pictures: Pictures) -> Record:
    """Return the row of an episode for the browser, with pictures if its environment has them."""
    shown = browser_row(row)
    # A results file must not choose a module to import, as a path or an option of prompts, which has no pictures.
    if row.get("crashed") or ":" in stage.name or stage.name == "prompts":
        return shown
    frames, turns = acted_out(stage, row)
    shown["actions"] = [taken for _, taken in turns]
    if frames:
        shown["frames"], shown["moments"] = pictures.add(frames), list_moments(turns)
    return shown


def list_moments(turns: Sequence[tuple[str, list[str]]]) -> list[tuple[int, int]]:
    """Return (turn, picture) of each step: the start, then one per action, and one for a turn without actions."""
    moments, picture = [(-1, 0)], 0
    for number, (_, actions) in enumerate(turns):
        for _ in range(max(1, len(actions))):
            picture += bool(actions)
            moments.append((number, picture))
    return moments


def _facts(row: Record) -> list[str]:
    """Return further keys of a row in words, and what reward functions gave (where there are several) and recorded."""
    parts = row.get("reward_parts")
    given = (
        [f"{name} {value + 0.0:g}" for name, value in parts.items()]
        if isinstance(parts, dict) and len(parts) > 1
        else []
    )
    extra = row.get("extra")
    recorded = [f"{name} {value}" for name, value in extra.items()] if isinstance(extra, dict) else []
    return [words.format(row[key]) for key, words in FACTS if row.get(key) not in (None, "")] + given + recorded


def _tokens(row: Record, turns: int) -> list[Record] | None:
    turns_shown = row.get("tokens")
    if not isinstance(turns_shown, list) or len(turns_shown) != turns:
        return None
    if any(len(turn[figure]) != len(turn["text"]) for turn in turns_shown for figure in TOKEN_FIGURES):
        return None
    return [
        {"text": list(map(str, turn["text"]))} | {k: _numbers(turn[k]) for k in TOKEN_FIGURES} for turn in turns_shown
    ]


def describe_end(row: Record, won: bool | None) -> str:
    """Return how an episode or an answer ended: solved, hole, crashed, right."""
    if row.get("crashed"):
        return "crashed"
    if won is None:
        return ""
    if "success" in row:
        return "solved" if won else (row.get("failure") or "not solved").replace("_", " ")
    return "right" if won else "wrong"


def _number(value: Any) -> float | None:
    """Return a number; None if it is not finite, since a browser cannot read it."""
    return value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _sum(values: Iterable[Any]) -> float:
    """Return the sum; infinity if an integer is larger than any float."""
    try:
        return sum(values)
    except OverflowError:
        return math.inf


def _numbers(values: Any) -> list[float | None] | None:
    return list(map(_number, values)) if isinstance(values, list) else None


def without_infinite(data: Any) -> Any:
    """Return the data with None for each number that is not finite."""
    if isinstance(data, dict):
        return {key: without_infinite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_infinite(value) for value in data]
    return _number(data) if isinstance(data, float) else data
