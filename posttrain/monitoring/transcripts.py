"""What did the model write?  Whole episodes as JSON lines, pictures of them, and a word on what went wrong in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain import runlog
from posttrain.config import StarPORun
from posttrain.monitoring.token_figures import Turn
from posttrain.report.episodes import frames_of, gif
from posttrain.run_state import RunState
from posttrain.runlog import Tracker
from posttrain.types import Trajectory, one_line

KEPT = (
    "env group level_key level_seed noise_seed success failure crashed truncated invalid_turns actions turn_rewards"
    " turn_penalties messages"
).split()
COUNT = 4  # whole episodes that are written each time; at any step as many whose environment raised


def record(
    cfg: StarPORun,
    groups: list[list[Trajectory]],
    step: int,
    state: RunState,
    tracker: Tracker,
    say: Callable[[str], None],
    tokens: list[list[Turn]] | None = None,
) -> None:
    """Transcripts and pictures of the first group and a group that nobody finished, where due; crashes, always.

    tokens: figures of the episodes that are `chosen`.
    """
    out = Path(cfg.output_dir)
    crashed = [trajectory for group in groups for trajectory in group if trajectory.crashed]
    if crashed:
        t, of = crashed[0], sum(map(len, groups))
        say(
            f"step {step}: {len(crashed)} of {of} episodes crashed and are left out, see transcripts; the first:"
            f" {t.env} raised {t.crashed} (level seed {t.level_seed})"
        )
    unfinished = _unfinished(cfg, groups, step)
    if unfinished and not state.unfinished_reported:
        state.unfinished_reported = True
        t = unfinished[0][0]
        say(
            f"step {step}: in {len(unfinished)} of {len(groups)} groups nobody finished, see transcripts; the first:"
            f" {t.env} (level seed {t.level_seed}). They teach what their rewards tell apart;"
            " algorithm.mask_truncated_completions leaves them out. Said once: `rollout/truncated_groups` goes on"
            " counting."
        )
    if not runlog.is_main_process():
        return
    to_read, more = _chosen(cfg, groups, step)
    written = write_transcripts(out / "transcripts.jsonl", step, to_read + more, tokens)
    shown, pictures = [], []
    for number, (episode, t) in enumerate(zip(written, to_read, strict=False)):
        picture = None if t.crashed else save_picture(cfg, out / "episodes" / f"step-{step}-{number}.gif", t, say)
        if picture:
            shown.append(episode)
            pictures.append(picture)
    if shown:
        tracker.show(shown, pictures, step)


def chosen(cfg: StarPORun, groups: list[list[Trajectory]], step: int) -> list[Trajectory]:
    """The episodes of a step that are written, in their order; every process chooses the same."""
    to_read, more = _chosen(cfg, groups, step)
    return to_read + more


def _chosen(cfg: StarPORun, groups: list[list[Trajectory]], step: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """Those that are shown with pictures, and those that something is wrong with."""
    crashed = [trajectory for group in groups for trajectory in group if trajectory.crashed]
    to_read = groups[0][:COUNT] if step % cfg.transcripts.every == 0 else []
    unfinished = [group[0] for group in _unfinished(cfg, groups, step)[:1] if group[0] not in to_read]
    return to_read, crashed[:COUNT] + unfinished


def _unfinished(cfg: StarPORun, groups: list[list[Trajectory]], step: int) -> list[list[Trajectory]]:
    """The groups in which nobody came to an end, where due."""
    if not due(cfg.transcripts.every, step):
        return []
    return [group for group in groups if all(t.truncated and not t.crashed for t in group)]


def due(every: int, step: int) -> bool:
    """The first step and every so many; never with 0."""
    return every > 0 and (step == 1 or step % every == 0)


def write_transcripts(
    path: Path, step: int, trajectories: list[Trajectory], tokens: list[list[Turn]] | None = None
) -> list[dict[str, Any]]:
    """Whole episodes as JSON lines, to be read by people; seeds and actions are enough to play one again."""
    rows = [{"step": step} | {key: getattr(t, key) for key in KEPT} for t in trajectories]
    with path.open("a", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            with_tokens = row if tokens is None else row | {"tokens": tokens[number]}
            file.write(json.dumps(with_tokens, default=str) + "\n")
    return rows


def save_picture(cfg: StarPORun, path: Path, t: Trajectory, say: Callable[[str], None]) -> Path | None:
    """An animated picture of an episode, played again from its seeds and actions.

    None where its environment has no pictures, or raises.
    """
    section = next(env for env in cfg.envs if env.title == t.env)
    try:
        reset_options = {"split": "train", "noise_seed": t.noise_seed}
        frames = frames_of(section.name, section.options, t.level_seed, reset_options, t.actions)
        if not frames:
            return None
        picture = gif(frames)
    except Exception as error:  # an environment may raise here alone
        say(f"no picture of {path.stem}: {t.env} (level seed {t.level_seed}) raised {one_line(error)}")
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    return path
