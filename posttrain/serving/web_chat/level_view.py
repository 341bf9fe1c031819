"""How does a level look while it is played?  Its pictures and turns, for the player of posttrain/report."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import gradio

from envs import TextEnv
from posttrain.report import Pictures, browser_row, describe_end, list_moments
from posttrain.serving.playing import SPLIT, PlayedLevel

COLOURS = """
--line: var(--border-color-primary); --edge: var(--neutral-400); --code: var(--background-fill-secondary);
--ink: var(--body-text-color); --muted: var(--body-text-color-subdued);
--good: #0b6340; --bad: #a92726; --a: #1f6ab5;
color: var(--ink);
.dark & { --edge: var(--neutral-500); --good: #4fc896; --bad: #f28b8b; --a: #72b2f0; }
.scene:not(.text) { grid-template-columns: minmax(0, 320px) minmax(0, 1fr); }
@media (max-width: 640px) { .scene:not(.text) { grid-template-columns: minmax(0, 1fr); } }
h2 { font-size: 1.05rem; font-weight: 600; margin: 0 0 10px; }
h2 small { font-size: 0.85rem; }
.badge { display: inline-block; font-size: 0.78rem; font-weight: 600; padding: 1px 9px; border-radius: 99px; }
.badge.yes { color: var(--good); background: color-mix(in srgb, var(--good) 12%, transparent); }
.badge.no { color: var(--bad); background: color-mix(in srgb, var(--bad) 12%, transparent); }
.badge:empty { display: none; }
.meta .bad { color: var(--bad); }
summary { cursor: pointer; color: var(--a); }
select { appearance: auto; background-image: none; }
button:hover { border-color: var(--ink); }
"""


def player() -> gradio.HTML:
    """Return the component that shows a level: the report's player, with its script and its style."""
    report, here = resources.files("posttrain.report"), Path(__file__).parent
    script = (report / "player.js").read_text("utf-8") + (here / "level_view.js").read_text("utf-8")
    style = (report / "player.css").read_text("utf-8") + COLOURS
    return gradio.HTML(
        None, html_template='<div class="place"></div>', css_template=style, js_on_load=script,
        apply_default_css=False, elem_id="level-view",
    )  # fmt: skip


class LevelView:
    """The pictures and turns of a level so far. again: the environment once more, to be drawn; None draws nothing.

    A turn may take several actions, and the level that is played is drawn after the last one at the earliest.
    """

    def __init__(self, number: int, level: PlayedLevel, again: TextEnv | None) -> None:
        self.number, self.level, self.again = number, level, again
        self.turns: list[tuple[str, list[str]]] = []  # what the model wrote, and its actions
        self.pictures, self.frames = Pictures(), []
        if again is not None:
            again.render_mode = "rgb_array"
            again.reset(seed=level.episode.seed, options={"split": SPLIT})
            self._draw()

    def _draw(self) -> None:
        assert self.again is not None
        self.frames += self.pictures.add([self.again.render()])

    def add(self, text: str, actions: list[str]) -> None:
        """Add a turn that was played."""
        self.turns.append((text, actions))
        if self.again is None:
            return
        for action in actions:
            self.again.step(action)
            self._draw()

    def state(self, opened: int) -> dict[str, Any]:
        """Return what `showLevel` of level_view.js takes. opened: the number of the level among those of the page."""
        level, played = self.level, self.level.game.trajectory
        episode = level.episode
        result = {"success": played.success, "failure": played.failure, "crashed": played.crashed}
        row = browser_row(
            result
            | {
                "level": self.number, "index": self.number, "env": episode.env.title, "messages": episode.messages,
                "turn_rewards": played.turn_rewards, "turn_penalties": played.turn_penalties,
            }
        )  # fmt: skip
        ended = {"won": bool(played.success), "end": describe_end(result, played.success)}
        row |= ended if level.over else {"won": None, "end": ""}
        row["actions"] = [actions for _, actions in self.turns]
        row["moments"] = list_moments(self.turns) if self.frames else [[turn, 0] for turn in range(len(self.turns))]
        row |= {"frames": self.frames} if self.frames else {}
        return {"number": opened, "row": row, "pictures": self.pictures.coded}
