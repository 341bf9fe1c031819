"""How does the model play?  Episodes of an environment turn by turn: observation, answer, action and map."""

from __future__ import annotations

import copy
import itertools
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.config import ChatRun, EnvSection, SamplingSection
from posttrain.serving import display
from posttrain.serving.display import describe_sampling, escape_control_characters, note, stream
from posttrain.types import Completion, UserError, derive_seed, one_line

if TYPE_CHECKING:
    from envs import TextEnv
    from posttrain.serving.generation import Answer, Generator

SPLIT = "test"  # levels that neither training nor the choice of a checkpoint uses
# Styles of the cells of a grid, by their names in `symbols`.
COLOURS = {
    "player": "bold black on bright_cyan",
    "player_on_target": "bold black on bright_cyan",
    "arrived": "bold black on bright_green",
    "dead": "bold white on red",
    "goal": "bold black on green",
    "target": "bold black on green",
    "hole": "bright_white on blue",
    "box": "bold black on yellow",
    "box_on_target": "bold black on bright_green",
    "wall": "bright_black on bright_black",
    "ice": "grey58 on grey93",
    "floor": "grey58 on grey93",
}


def open_played_env(cfg: ChatRun, name: str) -> TextEnv:
    """Return the environment to play, with the options that the config gives it.

    Raises:
        UserError: there is no such environment, or it cannot be played with `protocol.parser`.
    """
    from posttrain.config import check_parser
    from posttrain.rollout import has_agent, open_env

    section = next((env for env in cfg.envs if env.title == name), EnvSection(name=name))
    try:
        env = open_env(section)
    except (ValueError, TypeError) as error:  # TypeError: an option of the wrong type, size=big
        raise UserError(f"--play {name}: {error}") from error
    if has_agent(env):
        raise UserError(f"--play {name}: a program plays it. Run that program itself, with `posttrain serve`.")
    check_parser(cfg.protocol, env)
    return env


class PlayedLevel:
    """A level of the evaluator that a model plays, token in, token out, as in the rollouts of phase 3.

    `answer` a turn and `take` the answer until it is `over`.
    """

    def __init__(self, generator: Generator, env: TextEnv, cfg: ChatRun, setting: SamplingSection, number: int) -> None:
        from envs.episode import Episode
        from envs.protocol import Protocol
        from posttrain.rollout import RAISED, Context, Game

        self.generator, self.setting, self.budget = generator, setting, cfg.max_completion_length
        seed = derive_seed(cfg.seed, env.name, number)
        try:
            self.episode = Episode(env, Protocol.of(env, **cfg.protocol.arguments()), seed, SPLIT)
        except RAISED as error:
            raise UserError(f"{env.name} could not open level {number + 1}: {one_line(error)}") from error
        context = Context(cfg.context, cfg.context_turns, generator.context)
        self.game = Game(generator.chat, self.episode, context, self.budget)
        self.over = not self.game.look()
        if self.over:
            self._end()

    @property
    def observation(self) -> str:
        """Return the text that the model reads before the coming turn."""
        if self.game.context.kind == "single_turn":
            return self.episode.summary(self.game.segment.first_turn)
        results = list(itertools.takewhile(lambda message: message["role"] == "tool", self.episode.messages[::-1]))
        return "\n".join(each["content"] for each in results[::-1]) or self.episode.messages[-1]["content"]

    def answer(self) -> Answer:
        """Return the coming turn, which is written while it is read."""
        seed = derive_seed(self.episode.seed, "turn", self.game.trajectory.turns)
        return self.generator.answer(self.game.segment.ids, self.setting.params(self.budget), seed)

    def take(self, answer: Answer) -> tuple[str, bool]:
        """Play the turn; return its result in words, and whether the answer was valid."""
        episode, played, acted = self.episode, self.game.trajectory, len(self.episode.actions)
        going = self.game.take_turn(Completion(answer.ids, [0.0] * len(answer.ids), answer.finished))
        if played.crashed:
            raise UserError(
                f"{episode.env.name} raised {played.crashed} on level seed {episode.seed}: fix the environment."
            )
        calls = self.game.said.calls
        valid = bool(calls) or episode.past[-1].valid
        did = ", ".join(episode.actions[acted:] or [f"calls {call.name or 'nothing'}" for call in calls]) or "no action"
        cut = "" if answer.finished else f", cut after {self.budget} tokens"
        invalid = "" if valid else f", invalid answer: {played.turn_penalties[-1]:g}"
        self.over = not (going and self.game.look())
        if self.over:
            self._end()
        gained = f"no reward: {played.crashed}" if played.crashed else f"reward {played.turn_rewards[-1]:g}"
        return f"{did}, {gained}{invalid}{cut}", valid

    def _end(self) -> None:
        """Record how the level ended, with the reward that an environment gives after the last turn."""
        from envs.web import NoAnswer
        from posttrain.rollout import score_late

        self.game.finish()
        try:
            score_late([self.game.trajectory])
        except NoAnswer as problem:  # the page needs it as a UserError
            raise UserError(str(problem)) from problem


def show_levels(
    generator: Generator, env: TextEnv, cfg: ChatRun, setting: SamplingSection, episodes: int, delay: float
) -> None:
    """Play levels of the evaluator and show observations, answers, rewards and results.

    Args:
        generator: the model.
        env: the environment.
        cfg: config of the chat.
        setting: sampling of the model.
        episodes: number of levels.
        delay: seconds between turns.
    """
    from posttrain import metrics

    out, won = display.answer_console(), 0
    note(f"{cfg.model.name_or_path} plays {env.name}, {SPLIT} levels; {describe_sampling(setting)}")
    for number in range(episodes):
        level = PlayedLevel(generator, env, cfg, setting, number)
        if number == 0:
            rules = level.episode.messages[0]["content"]
            out.print(Text(escape_control_characters(rules), "dim"), soft_wrap=not out.is_terminal)
        play_level(level, out, f"level {number + 1}", delay)
        won += level.game.trajectory.success
        out.print(describe_episode_end(level), soft_wrap=True)
    if episodes > 1:
        low, high = metrics.wilson(won, episodes)
        out.print(f"\n{won} of {episodes} levels solved ({won / episodes:.0%}; 95 % interval {low:.0%} to {high:.0%})")


def play_level(level: PlayedLevel, out: Console, title: str, delay: float) -> None:
    """Play a level to its end, on the terminal."""
    env = level.episode.env
    while not level.over:
        out.print(Text(f"\n{title}, turn {level.game.trajectory.turns + 1}", "bold"))
        out.print(beside(env, level.observation))
        answer = level.answer()
        print(level.episode.protocol.opening, end="")
        stream(answer)
        result, valid = level.take(answer)
        out.print(Text(f"-> {escape_control_characters(result)}", "bold" if valid else "yellow"))
        time.sleep(delay)
    out.print(Text(), beside(env, ""), sep="\n")


def describe_episode_end(level: PlayedLevel) -> Text:
    """Return how a level ended: `Solved after 3 turns, return 1.`"""
    played = level.game.trajectory
    turns = f"after {played.turns} turn{'' if played.turns == 1 else 's'}, return {round(played.reward, 6):g}"
    if played.success:
        return Text(f"Solved {turns}.", "bold green")
    limit = "the model's context is full" if played.out_of_context else "out of turns or actions"
    reason = played.crashed or played.failure or ("over" if played.terminated else limit)
    return Text(f"Not solved ({escape_control_characters(reason)}) {turns}.", "bold red")


def beside(env: TextEnv, text: str) -> Table:
    """Return the observation, with the map beside it if the environment has one."""
    table = Table.grid(padding=(0, 3))
    view = grid(env)
    table.add_row(*([view] if view is not None else []), Text(escape_control_characters(text), "dim", overflow="fold"))
    return table


def grid(env: TextEnv) -> Text | None:
    """Return a coloured map of the environment, whatever its observations are; None if it does not have a grid."""
    if not env.symbols:
        return None
    view = copy.copy(env)
    view.render_mode = "ansi"
    cell_of = {symbol: cell for cell, symbol in view.symbols.items()}
    width = max(map(len, cell_of))
    rows = [
        Text.assemble(*((f" {symbol:^{width}} ", COLOURS.get(cell_of[symbol], "")) for symbol in row.split(" ")))
        for row in view.render().splitlines()
    ]
    return Text("\n").join(rows)
