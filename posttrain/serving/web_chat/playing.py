"""How does a model play in the browser?  A level turn by turn or to its end, shown by the report's player."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gradio

import envs
from posttrain.config import ChatRun, SamplingSection
from posttrain.serving.generation import Generator
from posttrain.serving.playing import PlayedLevel, describe_episode_end, open_played_env
from posttrain.serving.web_chat import level_view
from posttrain.serving.web_chat.about import About
from posttrain.serving.web_chat.events import ONE_AT_A_TIME, PAUSE, QUICK, page_error, wait_until_idle
from posttrain.types import UserError

ROLLOUTS = "as in the rollouts"  # the model's own distribution, as in phase 3 and in --play without a preset
LAST_LEVEL = 10**9  # JavaScript has exact integers up to 2**53


@dataclass
class Seat:
    """The level of an open page; each page has its own."""

    level: PlayedLevel | None = None
    view: level_view.LevelView | None = None  # of the level
    opened: int = 0  # levels so far; each turn belongs to one of them
    turns: list[list[str]] = field(default_factory=list)  # number, answer, result
    busy: bool = False  # while a turn is being played


class PlayTab:
    """The tab and its events. generators: one or two models by name. abouts: how the page calls them."""

    def __init__(self, generators: dict[str, Generator], cfg: ChatRun, abouts: dict[str, About]) -> None:
        self.generators, self.cfg, self.abouts = generators, cfg, abouts

    def build(self, tab: gradio.Tab) -> None:
        chosen = [env.title for env in self.cfg.envs]  # with options of the config
        titles = chosen + [name for name in envs.names() if name not in chosen]
        models = [(about.title, name) for name, about in self.abouts.items()]
        seat, clicks = gradio.State(Seat()), gradio.Number(visible=False)
        with gradio.Row(elem_classes="choices"):
            model = gradio.Dropdown(
                models, value=models[0][1], label="Model", visible=len(models) > 1, min_width=260, interactive=True
            )
            env = gradio.Dropdown(
                titles, value=chosen[0] if chosen else "frozen_lake", label="Environment", min_width=160
            )
            level = gradio.Number(1, label="Level", min_width=100)  # `open` refuses fractions
            preset = gradio.Dropdown([ROLLOUTS, *self.cfg.presets], value=ROLLOUTS, label="Sampling", min_width=220)
        with gradio.Row(elem_classes="actions"):
            play = gradio.Button("Play the level", variant="primary", min_width=130, interactive=False)
            step = gradio.Button("One turn", min_width=90, interactive=False)
            stop = gradio.Button("Stop", interactive=False, min_width=70)
            following = gradio.Button("Next level", min_width=100)
        status = gradio.HTML(elem_id="status")
        shown = level_view.player()

        view, buttons = [shown, status, play, step, stop], [play, step, stop]
        playing = []
        for button, act, name in ((play, self.play, "play"), (step, self.turn, "turn")):
            begun = button.click(self.begin, seat, [clicks, *buttons], **QUICK)
            played = begun.then(act, [seat, clicks], [shown, status], api_name=name, **ONE_AT_A_TIME)
            for over in (played.then, played.failure):
                over(self.view, seat, view, **QUICK)
            playing.append(played)
        settings = [model, env, level, preset]
        gradio.on(  # `input` of a list: see talking.py
            [model.change, env.change, level.input, preset.change],
            self.open, [seat, *settings], view, api_name="open", cancels=playing, trigger_mode="always_last",
            show_progress="hidden",
        ).failure(self.view, seat, view, **QUICK)  # fmt: skip
        following.click(next_level, level, level, **QUICK).then(
            self.open, [seat, *settings], view, api_visibility="private", cancels=playing, show_progress="hidden"
        ).failure(self.view, seat, view, **QUICK)
        tab.select(self.enter, [seat, *settings], view, api_visibility="private", show_progress="hidden")
        stop.click(None, None, None, cancels=playing, api_visibility="private")

    def enter(self, seat: Seat, *settings: Any) -> tuple[Any, ...]:
        """Open the chosen level when the tab is first shown."""
        return (gradio.skip(),) * 5 if seat.level else self.open(seat, *settings)

    def open(self, seat: Seat, model: str, env: str, level: float | None, preset: str) -> tuple[Any, ...]:
        """Show the first state of a level, which has the same number in --play."""
        if level is None:  # a number that is being typed
            return (gradio.skip(),) * 5
        if type(level) not in (int, float) or not 1 <= level <= LAST_LEVEL or level % 1:  # a program can send anything
            raise page_error(f"A level has a whole number from 1 to {LAST_LEVEL:,}.")
        number = int(level)
        if model not in self.generators or not env or preset not in (ROLLOUTS, *self.cfg.presets):
            raise page_error("Choose a model, an environment and a sampling setting.")
        setting = SamplingSection() if preset == ROLLOUTS else self.cfg.presets[preset]
        seat.opened += 1  # before the level: a turn that starts now finds its own level, or is void
        seat.turns, seat.level, seat.view = [], None, None
        try:
            played = open_played_env(self.cfg, env)
            opened = PlayedLevel(self.generators[model], played, self.cfg, setting, number - 1)
            again = open_played_env(self.cfg, env) if played.has("render") else None
            seat.view = level_view.LevelView(number, opened, again)
        except UserError as problem:
            raise page_error(problem) from problem
        seat.level = opened
        return self.view(seat)

    def begin(self, seat: Seat) -> tuple[Any, ...]:
        """Return the number of the level that a turn is for, and the buttons during the turn."""
        return seat.opened, *enabled(play=False, stop=True)

    def play(self, seat: Seat, opened: int | None = None) -> Iterator[tuple[Any, ...]]:
        """Play all turns that are left; one that is stopped is not played. opened: as of `turn`."""
        mine = seat.opened if opened is None else opened
        yield from self.turn(seat, mine)
        while mine == seat.opened and seat.level is not None and not seat.level.over:
            yield from self.turn(seat, mine)

    def turn(self, seat: Seat, opened: int | None = None) -> Iterator[tuple[Any, ...]]:
        """Play one turn; a turn that is stopped is not played.

        opened: the number of the turn's level, from `begin`; None is the open level.
        """
        level, turns, pictured = seat.level, seat.turns, seat.view
        if opened is not None and opened != seat.opened:
            return
        if level is None or pictured is None or level.over:
            raise page_error("Open a level that is not over.")
        drawn, opening = time.monotonic(), level.episode.protocol.opening
        writing, seat.busy, before = level.answer(), True, len(level.episode.actions)
        try:
            for _ in writing:
                if seat.level is not level:
                    return
                if time.monotonic() - drawn > PAUSE:
                    yield gradio.skip(), status_html(seat, opening + writing.text)
                    drawn = time.monotonic()
            result, _ = level.take(writing)
        except UserError as problem:
            raise page_error(problem) from problem
        else:
            turns.append([str(level.game.trajectory.turns), opening + writing.text, result])
            pictured.add(opening + writing.text, level.episode.actions[before:])
        finally:
            seat.busy = False
        if seat.level is level:
            yield pictured.state(seat.opened), status_html(seat)

    def view(self, seat: Seat) -> tuple[Any, ...]:
        """Return the values of the page's components for the level as it is now."""
        wait_until_idle(seat)
        if seat.level is None or seat.view is None:
            return None, "", *enabled(play=False, stop=False)
        return seat.view.state(seat.opened), status_html(seat), *enabled(play=not seat.level.over, stop=False)


def next_level(number: float | None) -> int:
    """Return the number after the one in the box, which may be any number or none."""
    return int(min(max(number or 0, 0), LAST_LEVEL)) + 1


def enabled(*, play: bool, stop: bool) -> tuple[Any, Any, Any]:
    return gradio.Button(interactive=play), gradio.Button(interactive=play), gradio.Button(interactive=stop)


def status_html(seat: Seat, writing: str = "") -> str:
    """Return where the level stands, and the text that is being written, or what came of the last turn."""
    level = seat.level
    if level is None:
        return ""
    played = level.game.trajectory
    limit = (
        "" if level.episode.env.tools else f" of {level.episode.protocol.max_turns}"
    )  # which counts turns with calls
    now = f"Turn {played.turns + 1}{limit}, return so far {round(played.reward, 6):g}."
    if level.over:
        now = describe_episode_end(level).plain
    told = writing or (f"Turn {seat.turns[-1][0]}: {seat.turns[-1][2]}" if seat.turns else "")
    return f"<b>{html.escape(now)}</b> <span>{html.escape(told)}</span>"
