"""What did the model write?  Whole episodes as JSON lines and pictures, and messages about what went wrong in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from envs.process_state import keep_process_state
from posttrain.config import StarPORun
from posttrain.report import frames_of, gif
from posttrain.rollout import RAISED
from posttrain.runtime import Dashboards, runlog
from posttrain.starpo.monitoring.token_figures import TokenFigures
from posttrain.starpo.run_state import RunState
from posttrain.types import Record, Trajectory, one_line

KEPT = (
    "env group level_key level_seed noise_seed success failure crashed truncated invalid_turns actions turn_rewards"
    " turn_penalties reward_parts extra messages"
).split()
COUNT = 4  # episodes that are written each time; at any step as many whose environment raised


def record_step(
    cfg: StarPORun,
    groups: list[list[Trajectory]],
    step: int,
    state: RunState,
    boards: Dashboards,
    say: Callable[[str], None],
    tokens: list[list[TokenFigures]] | None = None,
) -> None:
    """Write the transcripts and pictures of a step.

    Of the first group every `transcripts.every` steps, of a group without a finished episode when `due`, of crashed
    episodes always. tokens: figures of the `written_episodes`.
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
        t, differing = unfinished[0][0], " if their rewards differ" if cfg.rewarded else ""
        trained = "not trained on:" if cfg.algorithm.mask_truncated_completions else f"trained on{differing};"
        say(
            f"step {step}: in {len(unfinished)} of {len(groups)} groups no episode was finished, see transcripts; the"
            f" first: {t.env} (level seed {t.level_seed}). These groups are {trained}"
            " algorithm.mask_truncated_completions leaves such episodes out. `rollout/truncated_groups` counts them;"
            " this message is not repeated."
        )
    if not runlog.is_main_process():
        return
    to_read, more = _chosen(cfg, groups, step)
    written = write_transcripts(out / "transcripts.jsonl", step, to_read + more, tokens)
    pictures = [
        None if t.crashed else save_picture(cfg, out / "episodes" / f"step-{step}-{number}.gif", t, say)
        for number, t in enumerate(to_read)
    ]
    boards.show("training", *_with_picture(written, pictures), step)


def show_validation(
    cfg: StarPORun, played: Sequence[Trajectory], step: int, boards: Dashboards, say: Callable[[str], None]
) -> None:
    """Show how the model plays the validation levels, on the dashboards."""
    if not boards.each:
        return
    folder, whole = Path(cfg.output_dir) / "episodes", [t for t in played if not t.crashed]
    pictures = [
        save_picture(cfg, folder / f"validation-{step}-{number}.gif", t, say, split="validation")
        for number, t in enumerate(whole)
    ]
    boards.show("validation", *_with_picture(_rows(step, whole), pictures), step)


def _with_picture(rows: list[Record], pictures: list[Path | None]) -> tuple[list[Record], list[Path]]:
    shown = [(row, picture) for row, picture in zip(rows, pictures, strict=False) if picture]
    return [row for row, _ in shown], [picture for _, picture in shown]


def written_episodes(cfg: StarPORun, groups: list[list[Trajectory]], step: int) -> list[Trajectory]:
    """Return the episodes of a step that are written, in their order; the same on every process."""
    to_read, more = _chosen(cfg, groups, step)
    return to_read + more


def _chosen(cfg: StarPORun, groups: list[list[Trajectory]], step: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the episodes that are shown with pictures, and those that crashed or were not finished."""
    crashed = [trajectory for group in groups for trajectory in group if trajectory.crashed]
    to_read = groups[0][:COUNT] if step % cfg.transcripts.every == 0 else []
    more = crashed[:COUNT] + [group[0] for group in _unfinished(cfg, groups, step)[:1]]
    return to_read, [each for each in more if not any(each is other for other in to_read)]


def _unfinished(cfg: StarPORun, groups: list[list[Trajectory]], step: int) -> list[list[Trajectory]]:
    """Return the groups without a finished episode, if due."""
    if not due(cfg.transcripts.every, step):
        return []
    return [group for group in groups if all(t.truncated and not t.crashed for t in group)]


def due(every: int, step: int) -> bool:
    """Return whether this is the first step or a multiple of `every`; never with 0."""
    return every > 0 and (step == 1 or step % every == 0)


def write_transcripts(
    path: Path, step: int, trajectories: list[Trajectory], tokens: list[list[TokenFigures]] | None = None
) -> list[Record]:
    """Append whole episodes as JSON lines; seeds and actions are enough to play one again."""
    rows = _rows(step, trajectories)
    with path.open("a", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            with_tokens = row if tokens is None else row | {"tokens": tokens[number]}
            file.write(json.dumps(with_tokens, default=str) + "\n")
    return rows


def _rows(step: int, trajectories: Sequence[Trajectory]) -> list[Record]:
    return [{"step": step} | {key: getattr(t, key) for key in KEPT} for t in trajectories]


def save_picture(
    cfg: StarPORun, path: Path, t: Trajectory, say: Callable[[str], None], split: str = "train"
) -> Path | None:
    """Write an animated picture of an episode, played again from its seeds and actions; return its path.

    None if its environment has no pictures or raises.
    """
    section = next(env for env in cfg.envs if env.title == t.env)
    try:
        reset_options = {"split": split} | ({} if t.noise_seed is None else {"noise_seed": t.noise_seed})
        with keep_process_state(t.env):
            frames = frames_of(section.name, section.options, t.level_seed, reset_options, t.actions)
        if not frames:
            return None
        picture = gif(frames)
    except RAISED as error:  # an environment may raise here alone
        say(f"no picture of {path.stem}: {t.env} (level seed {t.level_seed}) raised {one_line(error)}")
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    return path
