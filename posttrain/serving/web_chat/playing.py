"""How does a model play in the browser?  One turn with each click: state, thought, answer and reward."""

from __future__ import annotations

import base64
import copy
import html
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gradio

import envs
from posttrain.config import ChatRun, SamplingSection
from posttrain.report import png
from posttrain.serving.generation import Generator
from posttrain.serving.playing import PlayedLevel, describe_episode_end, open_played_env
from posttrain.serving.web_chat.events import ONE_AT_A_TIME, PAUSE, QUICK, html_table, page_error, wait_until_idle
from posttrain.types import UserError

ROLLOUTS = "as in the rollouts"  # the model's own distribution, as in phase 3 and in --play without a preset


@dataclass
class Seat:
    """The level of an open page; each page has its own."""

    level: PlayedLevel | None = None
    opened: int = 0  # levels so far; each turn belongs to one of them
    turns: list[list[str]] = field(default_factory=list)  # number, answer, result
    busy: bool = False  # while a turn is being played


class PlayTab:
    """The tab and its events. generators: one or two models by name."""

    def __init__(self, generators: dict[str, Generator], cfg: ChatRun) -> None:
        self.generators, self.cfg = generators, cfg

    def build(self) -> None:
        chosen = [env.title for env in self.cfg.envs]  # with options of the config
        titles = chosen + [name for name in envs.names() if name not in chosen]
        models = list(self.generators)
        seat, clicks = gradio.State(Seat()), gradio.Number(visible=False)
        with gradio.Row():
            model = gradio.Dropdown(models, value=models[0], label="Model", visible=len(models) > 1, min_width=280)
            env = gradio.Dropdown(titles, value=chosen[0] if chosen else "frozen_lake", label="Environment")
            level = gradio.Number(1, label="Level", precision=0)
            preset = gradio.Dropdown([ROLLOUTS, *self.cfg.presets], value=ROLLOUTS, label="Sampling", min_width=200)
        with gradio.Row():
            start = gradio.Button("Open the level", min_width=130)
            step = gradio.Button("Next turn", variant="primary", interactive=False, min_width=100)
            stop = gradio.Button("Stop", interactive=False, min_width=60)
        with gradio.Row():
            with gradio.Column(min_width=280):
                state = gradio.HTML(elem_id="state")
                status = gradio.Textbox(label="Status", interactive=False)
            with gradio.Column(min_width=280, scale=2):
                observation = gradio.Textbox(label="Observation", lines=3, max_lines=12, interactive=False)
                thought = gradio.Textbox(label="Thought of the last turn", lines=2, max_lines=8, interactive=False)
                answer = gradio.Textbox(label="Answer of the last turn", lines=1, max_lines=8, interactive=False)
        turns = gradio.HTML(elem_id="turns", elem_classes="figures")

        shown = [state, status, observation, turns, step, stop]
        begun = step.click(self.begin, seat, [clicks, step, stop], **QUICK)
        played = begun.then(self.turn, [seat, clicks], [thought, answer], api_name="turn", **ONE_AT_A_TIME)
        start.click(
            self.open, [seat, model, env, level, preset], [*shown, thought, answer], api_name="open", cancels=[played]
        )
        for over in (played.then, played.failure):
            over(self.view, seat, shown, **QUICK)
        stop.click(None, None, None, cancels=[played], api_visibility="private")

    def open(self, seat: Seat, model: str, env: str, level: int | None, preset: str) -> tuple[Any, ...]:
        """Show the first state of a level, which has the same number in --play."""
        if level is None or level < 1:
            raise page_error("Levels are numbered from 1.")
        if model not in self.generators or not env or preset not in (ROLLOUTS, *self.cfg.presets):
            raise page_error("Choose a model, an environment and a sampling setting.")
        setting = SamplingSection() if preset == ROLLOUTS else self.cfg.presets[preset]
        try:
            opened = PlayedLevel(self.generators[model], open_played_env(self.cfg, env), self.cfg, setting, level - 1)
        except UserError as problem:
            raise page_error(problem) from problem
        seat.opened += 1  # before the level: a turn that starts now finds its own level, or is void
        seat.turns, seat.level = [], opened
        return *self.view(seat), "", ""

    def begin(self, seat: Seat) -> tuple[Any, ...]:
        """Return the number of the level that a turn is for, and the buttons during the turn."""
        return seat.opened, *enabled(step=False, stop=True)

    def turn(self, seat: Seat, opened: int | None = None) -> Iterator[tuple[str, str]]:
        """Play one turn; a turn that is stopped is not played.

        opened: the number of the turn's level, from `begin`; None is the open level.
        """
        level, turns = seat.level, seat.turns
        if opened is not None and opened != seat.opened:
            return
        if level is None or level.over:
            raise page_error("Open a level first.")
        drawn, opening = time.monotonic(), level.episode.protocol.opening
        writing, seat.busy = level.answer(), True
        try:
            for _ in writing:
                if seat.level is not level:
                    return
                if time.monotonic() - drawn > PAUSE:
                    yield split_thought(opening + writing.text)
                    drawn = time.monotonic()
            result, _ = level.take(writing)
        except UserError as problem:
            raise page_error(problem) from problem
        else:
            thought, answer = split_thought(opening + writing.text)
            turns.append([str(level.game.trajectory.turns), answer, result])
        finally:
            seat.busy = False
        if seat.level is level:
            yield thought, answer

    def view(self, seat: Seat) -> tuple[Any, ...]:
        """Return the values of the page's components for the level as it is now."""
        wait_until_idle(seat)
        level = seat.level
        if level is None:
            return "", "", "", "", *enabled(step=False, stop=False)
        env, played = level.episode.env, level.game.trajectory
        limit = "" if env.tools else f" of {level.episode.protocol.max_turns}"  # which leaves out turns with calls
        now = f"Turn {played.turns + 1}{limit}, return so far {round(played.reward, 6):g}"
        if level.over:
            now = describe_episode_end(level).plain
        observation = level.observation if not level.over else env.observe()
        past = html_table([["turn", "answer", "result"], *seat.turns], "words") if seat.turns else ""
        return pictured(level), now, observation, past, *enabled(step=not level.over, stop=False)


def enabled(*, step: bool, stop: bool) -> tuple[Any, Any]:
    return gradio.Button(interactive=step), gradio.Button(interactive=stop)


def split_thought(text: str) -> tuple[str, str]:
    """Return thought and answer of a turn, complete or not; the answer is the text outside of <think>.

    >>> split_thought("<think>left is safe</think><answer>Left</answer>"), split_thought("Left")
    (('left is safe', '<answer>Left</answer>'), ('', 'Left'))
    """
    before, opened, inside = text.partition("<think>")
    if not opened:
        return "", text
    thought, _, behind = inside.partition("</think>")
    return thought, before + behind


def pictured(level: PlayedLevel) -> str:
    """Return the state as a picture, or as text if the environment does not have pictures."""
    env = level.episode.env
    view = copy.copy(env)
    if env.has("render"):
        view.render_mode = "rgb_array"
        data = base64.b64encode(png(view.render())).decode()
        return f'<img alt="{html.escape(env.title)}, the state as a picture" src="data:image/png;base64,{data}">'
    view.render_mode = "ansi"
    return f"<pre>{html.escape(str(view.render()))}</pre>"
