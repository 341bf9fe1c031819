"""What did an episode look like?  Acted out again from its transcript, as pictures that can be stepped through."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain.report.tables import Results
from posttrain.types import Record

SIDE = 208  # pixels
FRAME, LAST_FRAME = 800, 2200  # milliseconds


def frames_of(
    name: str, options: Mapping[str, Any], seed: int, reset_options: dict[str, Any], actions: Sequence[str]
) -> list[np.ndarray]:
    """Pictures of an episode that is played again: the start, then one per action; none where there are no pictures."""
    import envs

    if not envs.make(name, **options).has("render"):
        return []
    env = envs.make(name, **{**options, "render_mode": "rgb_array"})
    env.reset(seed=seed, options=reset_options)
    frames = [env.render()]
    for action in actions:
        env.step(action)
        frames.append(env.render())
    return frames


class Stage(NamedTuple):
    """Where an episode was played: Stage("frozen_lake", {"size": 4}, {"max_turns": 8}, 12, {"split": "test"})."""

    name: str
    options: Mapping[str, Any]
    protocol: Mapping[str, Any]
    seed: int
    reset_options: dict[str, Any]


def evaluation_stage(results: Results, row: Record) -> Stage:
    """Of an episode of the evaluator."""
    suite = results["config"]["suites"]["envs"]
    name, options = _section(suite["envs"], row["part"])
    return Stage(name, options, suite["protocol"], row["seed"], {"split": suite["split"]})


def training_stage(config: Record, row: Record) -> Stage:
    """Of an episode of phase 3; config: its run_config.yaml."""
    name, options = _section(config["envs"], row["env"])
    reset_options = {"split": "train", "noise_seed": row["noise_seed"]}
    return Stage(name, options, config["protocol"], row["level_seed"], reset_options)


def _section(envs: Sequence[Record], title: str) -> tuple[str, Mapping[str, Any]]:
    return next((env["name"], env["options"]) for env in envs if title in (env.get("label"), env["name"]))


def replay(results: Results, row: Record) -> tuple[list[np.ndarray], list[tuple[str, list[str]]]]:
    """As `acted_out`, of an episode of the evaluator."""
    return acted_out(evaluation_stage(results, row), row)


def acted_out(stage: Stage, row: Record) -> tuple[list[np.ndarray], list[tuple[str, list[str]]]]:
    """Pictures as of `frames_of`, and turns (what the model wrote, the actions that came of it).

    Environments are pure: the level's seed and the actions give the episode that was played.
    """
    from envs import make
    from envs.protocol import Protocol

    env = make(stage.name, **stage.options)
    protocol = Protocol.of(env, **stage.protocol)
    env.reset(seed=stage.seed, options=stage.reset_options)  # its list of actions may be of the level
    turns, left = [], list(row["actions"])
    for message in row["messages"]:
        if message["role"] == "assistant":
            taken = protocol.read(message["content"], env.actions).actions[: len(left)]
            if taken != left[: len(taken)]:
                raise ValueError("the actions of a transcript do not follow from its text")
            del left[: len(taken)]
            turns.append((message["content"], taken))
    if left:
        raise ValueError(f"{len(left)} actions of a transcript are in none of its turns")
    played = [action for _, taken in turns for action in taken]
    return frames_of(stage.name, stage.options, stage.seed, stage.reset_options, played), turns


def png(frame: np.ndarray) -> bytes:
    """One frame, small."""
    out = io.BytesIO()
    _picture(frame).save(out, "PNG", optimize=True)
    return out.getvalue()


def _picture(frame: np.ndarray) -> Any:
    """A frame scaled to SIDE, in few colours."""
    from PIL import Image

    picture = Image.fromarray(frame)
    scale = SIDE / max(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    return picture.resize(size, Image.Resampling.BOX).quantize(96, Image.Quantize.FASTOCTREE)


def gif(frames: Sequence[np.ndarray]) -> bytes:
    """An endless animation that rests on its last frame."""
    pictures = [_picture(frame) for frame in frames]
    out, pace = io.BytesIO(), [FRAME] * (len(pictures) - 1) + [LAST_FRAME]
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=pace, loop=0, optimize=True)
    return out.getvalue()
