"""How does the model play before and after training?  One animation of the same test levels, for the README.

    posttrain report runs/quickstart --gif docs/quickstart.gif

It is made from results.json and transcripts.jsonl of the evaluator. It shows the first levels of the evaluation, which
are not chosen by their outcome.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from posttrain.report.answers import legible
from posttrain.report.episodes import acted_out, describe_end, evaluation_stage, list_moments, played
from posttrain.report.tables import Results
from posttrain.types import Record, UserError

SIDE, WIDTH, MARGIN, LINE = 168, 224, 12, 15  # pixels: a picture, a column, the space around it, a line of text
LINES = 2  # of the model's text
INK, QUIET, PAPER, WON, LOST = "#1b1f24", "#6b7280", "#ffffff", "#1a7f37", "#b42318"
PACE, LAST = 650, 2200  # milliseconds of a picture, and of the last one of a level
HEADINGS = {
    "base": "base model",
    "phase1": "after SFT",
    "phase2": "after SFT and DPO",
    "phase3": "after reinforcement learning",
}
Episodes = dict[tuple[str, str, int], Record]


class Panel(NamedTuple):
    """A moment of an episode: its picture, the text of the turn, and at the end the outcome."""

    frame: np.ndarray
    text: str
    end: str


def panels(results: Results, row: Record) -> list[Panel]:
    """Return the moments of an episode, at least one for each turn; bytes that are no text are not drawn."""
    frames, turns = acted_out(evaluation_stage(results, row), row)
    texts = [" ".join(legible(text).split()) for text, _ in turns]
    moments = [Panel(frames[at], texts[turn] if turn >= 0 else "", "") for turn, at in list_moments(turns)]
    return [*moments[:-1], moments[-1]._replace(end=describe_end(row, row["success"]))]


def animate(results: Results, rows: Sequence[Record], checkpoints: Sequence[str], levels: int = 6) -> bytes:
    """Return an animation as a GIF: a row for each environment, a column for each checkpoint, level after level.

    Args:
        results: of an evaluation.
        rows: of transcripts.jsonl.
        checkpoints: columns, by name.
        levels: number of levels of each environment.
    """
    shown = list(pictures(results, shown_episodes(results, rows, checkpoints, levels), checkpoints))
    if not shown:
        raise UserError(f"There are no episodes of {', '.join(checkpoints)}: evaluate them with suites.envs.")
    palette = shown[-1][0].quantize(64, Image.Quantize.MAXCOVERAGE)  # else small things get colours of large ones
    first, *others = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture, _ in shown]
    out, pace = io.BytesIO(), [duration for _, duration in shown]
    first.save(out, "GIF", save_all=True, append_images=others, duration=pace, loop=0, optimize=True)
    return out.getvalue()


def shown_episodes(results: Results, rows: Sequence[Record], checkpoints: Sequence[str], levels: int) -> Episodes:
    """Return the rows of transcripts.jsonl that are shown, by environment, checkpoint and level."""
    return {
        (env, name, level): row
        for name in checkpoints
        for env in figures_by_env(results, name)
        for level, row in played(results, rows, name, env).items()
        if level < levels
    }


def figures_by_env(results: Results, checkpoint: str) -> dict[str, Any]:
    """Return a checkpoint's figures by environment."""
    return results["checkpoints"][checkpoint].get("envs", {})


def pictures(results: Results, episodes: Episodes, checkpoints: Sequence[str]) -> Iterator[tuple[Image.Image, int]]:
    """Draw every picture of the animation; yield it with its duration in milliseconds."""
    names = list(dict.fromkeys(env for env, _, _ in episodes))
    for level in sorted({number for _, _, number in episodes}):
        grid = {
            (env, name): panels(results, episodes[env, name, level])
            for env in names
            for name in checkpoints
            if (env, name, level) in episodes
        }
        steps = max(map(len, grid.values()))
        for step in range(steps):
            now = {place: moments[min(step, len(moments) - 1)] for place, moments in grid.items()}
            yield picture_of(results, now, names, checkpoints), LAST if step == steps - 1 else PACE


def picture_of(
    results: Results, now: dict[tuple[str, str], Panel], names: Sequence[str], checkpoints: Sequence[str]
) -> Image.Image:
    """Draw one picture: a row for each environment, a column for each checkpoint."""
    height = SIDE + (LINES + 2) * LINE + MARGIN
    size = (MARGIN + len(checkpoints) * (WIDTH + MARGIN), 2 * LINE + MARGIN + len(names) * height + 2 * LINE)
    picture = Image.new("RGB", size, PAPER)
    canvas = ImageDraw.Draw(picture)
    title, small = font("DejaVuSans-Bold.ttf", 12), font("DejaVuSansMono.ttf", 10)
    for column, name in enumerate(checkpoints):
        x = MARGIN + column * (WIDTH + MARGIN)
        canvas.text((x, MARGIN), HEADINGS.get(name, name), INK, title)
        for line, env in enumerate(names):
            y = 2 * LINE + MARGIN + line * height
            if (panel := now.get((env, name))) is None:
                continue
            frame = Image.fromarray(panel.frame).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            picture.paste(frame, (x, y))
            for number, part in enumerate(wrapped(panel.text, small)):
                canvas.text((x, y + SIDE + 4 + number * LINE), part, QUIET, small)
            share = figures_by_env(results, name)[env]["success"]
            canvas.text((x, y + SIDE + 6 + LINES * LINE), f"{share:.0%} of {env} levels", INK, small)
            colour = WON if panel.end == "solved" else LOST
            for number, part in enumerate(panel.end.split()):
                canvas.text((x + SIDE + 6, y + 2 + number * LINE), part, colour, title)
    setting = ", ".join(
        sorted({entry["setting"] for name in checkpoints for entry in figures_by_env(results, name).values()})
    )
    note = f"the first test levels, {setting}, seed {results['config']['seed']}, commit {results['commit'][:7]}"
    canvas.text((MARGIN, size[1] - 2 * LINE), note, QUIET, small)
    return picture


def wrapped(text: str, face: ImageFont.FreeTypeFont) -> list[str]:
    """Return at most LINES lines of WIDTH pixels; the rest of the text is left out."""
    wide = int(WIDTH // face.getlength("m"))
    lines = [text[start : start + wide] for start in range(0, len(text), wide)]
    return lines if len(lines) <= LINES else [*lines[: LINES - 1], lines[LINES - 1][: wide - 3] + "..."]


def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a font that comes with matplotlib."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)
