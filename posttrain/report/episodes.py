"""What did an episode look like?  Acted out again from its transcript, as an animated picture."""

from __future__ import annotations

import io
from collections.abc import Sequence

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
            assert taken == left[: len(taken)], "the actions of a transcript follow from its text"
            del left[: len(taken)]
            for action in taken:
                world.step(action)
                frames.append(world.render())
            turns.append((message["content"], taken))
    return frames, turns


def gif(frames: Sequence[np.ndarray]) -> bytes:
    """An endless animation that rests on its last frame."""
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames]
    scale = SIDE / max(pictures[0].size)
    size = (round(pictures[0].width * scale), round(pictures[0].height * scale))
    pictures = [picture.resize(size, Image.Resampling.LANCZOS).quantize(96) for picture in pictures]
    out, pace = io.BytesIO(), [FRAME] * (len(pictures) - 1) + [LAST_FRAME]
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=pace, loop=0, optimize=True)
    return out.getvalue()
