"""What did an episode look like?  Acted out again from its transcript, as pictures that can be stepped through."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.report.tables import Results, Row

SIDE = 208  # pixels
FRAME, LAST_FRAME = 800, 2200  # milliseconds


def replay(results: Results, row: Row) -> tuple[list[np.ndarray], list[tuple[str, list[str]]]]:
    """Pictures (the start, then one per action) and turns (what the model wrote, the actions that came of it).

    Worlds are pure: the level's seed and the actions give the episode that was played.
    """
    from envs import make
    from envs.protocol import Protocol, parse

    suite = results["config"]["suites"]["worlds"]
    options = next(world["options"] for world in suite["worlds"] if world["name"] == row["part"])
    protocol, world = Protocol(**suite["protocol"]), make(row["part"], **options)
    world.reset(seed=row["seed"], options={"split": suite["split"]})
    frames, turns, left = [world.render()], [], list(row["actions"])
    for message in row["messages"]:
        if message["role"] == "assistant":
            taken = parse(message["content"], protocol, world.actions).actions[: len(left)]
            if taken != left[: len(taken)]:
                raise ValueError("the actions of a transcript do not follow from its text")
            del left[: len(taken)]
            for action in taken:
                world.step(action)
                frames.append(world.render())
            turns.append((message["content"], taken))
    return frames, turns


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
    return picture.resize(size, Image.Resampling.LANCZOS).quantize(96)


def gif(frames: Sequence[np.ndarray]) -> bytes:
    """An endless animation that rests on its last frame."""
    pictures = [_picture(frame) for frame in frames]
    out, pace = io.BytesIO(), [FRAME] * (len(pictures) - 1) + [LAST_FRAME]
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=pace, loop=0, optimize=True)
    return out.getvalue()
