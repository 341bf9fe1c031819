"""What does the model say?  Chat in the terminal, one answer for a pipe, two samplings compared, or the model at play.

    python inference_with_improved_settings.py                                  the result of the reference run
    python inference_with_improved_settings.py --config configs/quickstart/chat.yaml
    python inference_with_improved_settings.py --prompt "Tom has 3 apples and buys 4. How many?" > answer.txt
    python inference_with_improved_settings.py --compare                        every answer under each preset
    python inference_with_improved_settings.py --play frozen_lake --episodes 3

What the model says goes to stdout, everything about it to stderr. The same seed gives the same answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from posttrain import runlog
from posttrain.config import ChatRun, SamplingSection, hint, load, run
from posttrain.types import Completion, SamplingParams, UserError, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from envs import TextEnv
    from envs.protocol import Episode
    from posttrain.chat import Chat

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message; without TEXT there is none
/preset NAME    answer with another preset; without NAME they are listed
/save FILE      write the conversation as one row of JSON, which phase 1 can train on (kind: messages)
/help           this list
/quit           leave; so does Ctrl-D
Ctrl-C stops an answer, and leaves where there is none. A message that begins with / needs a space before it.
Several lines that are pasted are one message."""
COMMANDS = [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]

NARROW = 36  # columns of the terminal that an answer needs to stand beside another
SPLIT = "test"  # levels that no training and no choice of a checkpoint has seen
# How a cell of an environment's grid looks, by the name the environment gives it.
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


def main(argv: list[str] | None = None) -> None:
    # 1. What to do. Heavy imports wait until all of it makes sense, so that --help and every mistake answer at once.
    cfg, flags = load(ChatRun, "configs/chat.yaml", argv, add_flags)
    check(cfg, flags)
    cfg.seed = cfg.seed if flags.seed is None else flags.seed
    cfg.preset = flags.preset or cfg.preset
    env = open_env(cfg, flags.play) if flags.play else None

    # 2. Can it be done?
    runlog.keep_private(Path("runs"))

    from posttrain import models
    from posttrain.preflight import preflight

    preflight(cfg)
    model, chat = models.load(cfg.model, device=cfg.device, chat_template=cfg.chat.template, training=False)
    generator = Generator(model, chat)

    # 3. Do it.
    if env is not None:
        # The chat's settings change the sampling distribution and punish what a map must repeat: play as the rollouts
        # did.
        setting = cfg.presets[cfg.preset] if flags.preset else SamplingSection()
        play(generator, env, cfg, setting, flags.episodes or 1, flags.delay or 0.0)
        return
    conversation = Conversation(chat, generator.context, cfg.max_new_tokens, cfg.system)
    if flags.prompt is not None:
        reply(generator, conversation, cfg, flags.prompt, 0, compare=flags.compare)
    else:
        converse(generator, conversation, cfg, compare=flags.compare)


def add_flags(parser: argparse.ArgumentParser) -> None:
    def at_least(minimum: int) -> Callable[[str], int]:
        def number(text: str) -> int:
            if not text.isdecimal() or len(text) > 18 or int(text) < minimum:
                raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number of at least {minimum} in 18 digits")
            return int(text)

        return number

    def seconds(text: str) -> float:
        if not text.replace(".", "", 1).isdecimal() or float(text) > 3600:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds up to 3600")
        return float(text)

    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="answer this and stop; the answer alone goes to stdout")
    what.add_argument("--play", metavar="ENV", help="watch the model act in an environment, e.g. frozen_lake")
    parser.add_argument(
        "--preset", metavar="NAME", help="the preset that answers (--play samples as phase 3 did unless this is given)"
    )
    parser.add_argument("--compare", action="store_true", help="show every answer under each preset, with figures")
    parser.add_argument("--episodes", type=at_least(1), metavar="N", help="levels to --play (default: 1)")
    parser.add_argument("--delay", type=seconds, metavar="SECONDS", help="pause after each turn of --play (default: 0)")
    parser.add_argument("--seed", type=at_least(0), metavar="N", help="same as seed=N")


def check(cfg: ChatRun, flags: argparse.Namespace) -> None:
    """Flags that contradict the config or each other."""
    if flags.preset is not None and flags.preset not in cfg.presets:
        raise UserError(unknown_preset(cfg, flags.preset))
    if flags.prompt is not None and not flags.prompt.strip():
        raise UserError(
            '--prompt is empty. Write the message behind it, e.g. --prompt "Hello"; without --prompt messages are read'
            " from the terminal or from a pipe."
        )
    if flags.compare and flags.play:
        raise UserError("--compare shows answers side by side; with --play there is only one game. Leave one out.")
    if flags.compare and len(cfg.presets) < 2:
        raise UserError(
            f"--compare needs two presets, but the config has only `{cfg.preset}`. Add one to the section `presets`, "
            "e.g. presets.plain.temperature=1.0."
        )
    if (flags.episodes or flags.delay) and not flags.play:
        raise UserError("--episodes and --delay belong to --play ENV, e.g. --play frozen_lake --episodes 3.")


def unknown_preset(cfg: ChatRun, name: str) -> str:
    return f"There is no preset `{name}`, only {', '.join(cfg.presets)}{hint(name, list(cfg.presets))}"


# ------------------------------------------------------------------------------------------------------ one answer


class DamagedModel(UserError):
    """The model computes no probabilities, so no other message will help."""


@dataclass(frozen=True)
class Generator:
    """A model that answers token by token."""

    model: PreTrainedModel
    chat: Chat

    @property
    def context(self) -> int:
        """Tokens of a whole conversation that the model was built for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def answer(self, ids: list[int], params: SamplingParams, seed: int) -> Answer:
        return Answer(self.chat, self.write(ids, params, seed))

    def write(self, ids: list[int], params: SamplingParams, seed: int) -> Iterator[int]:
        """The tokens that follow `ids`, one by one, up to the stop token: those `rollout.complete` gives at once."""
        import torch

        from posttrain.sampler.draw import draw, uniforms

        unread, cache, seen_1V = ids, None, None
        seed_1 = torch.tensor([seed], device=self.model.device)
        for step in range(params.max_new_tokens):
            unread_1Q = torch.tensor([unread], device=self.model.device)
            with torch.no_grad():
                output = self.model(input_ids=unread_1Q, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits_1V = output.logits[:, -1]
            seen_1V = torch.zeros_like(logits_1V, dtype=torch.bool) if seen_1V is None else seen_1V
            seen_1V[0, unread_1Q[0]] = True
            token_1, logprob_1 = draw(logits_1V, params, uniforms(seed_1, step), seen_1V)
            if math.isnan(logprob_1.item()):
                raise DamagedModel(
                    "The model gives probabilities that are no numbers (NaN), so its weights are damaged: a training"
                    " that diverged leaves such ones. Name an earlier checkpoint (model.name_or_path=...)."
                )
            token = int(token_1)
            yield token
            if token == self.chat.stop_id:
                return
            unread, cache = [token], output.past_key_values


class Answer:
    """An answer while it is written: `for piece in answer` gives its text as it comes.

    ids       the tokens sampled so far, the stop token included
    finished  whether the stop token came; False for an answer that the budget or the user cut short
    """

    def __init__(self, chat: Chat, tokens: Iterator[int]) -> None:
        self.chat, self.tokens = chat, tokens
        self.ids: list[int] = []
        self.finished = False

    @property
    def written(self) -> list[int]:
        """The ids without the stop token."""
        return self.ids[:-1] if self.finished else self.ids

    @property
    def text(self) -> str:
        return self.chat.decode(self.written)

    def __iter__(self) -> Iterator[str]:
        """One piece a token; empty while a character of several tokens is not whole yet."""
        start = end = 0  # ids[start:end] is text that was given out, as context for what comes next
        for token in self.tokens:
            self.ids.append(token)
            self.finished = token == self.chat.stop_id
            whole = self.chat.decode(self.written[start:])
            if whole.endswith("\ufffd") and not self.finished:
                yield ""
                continue
            yield whole[len(self.chat.decode(self.written[start:end])) :]
            start, end = end, len(self.ids)
        if not self.finished:
            yield self.chat.decode(self.ids[start:])[len(self.chat.decode(self.ids[start:end])) :]


# Whatever a terminal would obey instead of showing: control characters and those that turn the direction of text.
_ESCAPED = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_ESCAPED |= {code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)}
_ESCAPED |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def escape_control_characters(text: str) -> str:
    """Text that a terminal only shows: "\\x1b[2J" comes out as "␛[2J"."""
    return text.translate(_ESCAPED)


def never() -> bool:
    return False


def stream(answer: Answer, stopped: Callable[[], bool] = never) -> None:
    """Print an answer while it is written, until `stopped()`."""
    for piece in answer:
        print(escape_control_characters(piece), end="", flush=True)
        if stopped():
            break
    print()


# ---------------------------------------------------------------------------------------------------- conversation


@dataclass
class Exchange:
    """One message and the tokens of its answer: Exchange("Hi", [40, 7, 2], finished=True)."""

    asked: str
    ids: list[int]
    finished: bool
    text: str


@dataclass
class Conversation:
    """What was said so far. The model's own tokens are kept as they were sampled; nothing is tokenised twice."""

    chat: Chat
    context: int
    max_new_tokens: int
    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    forgotten: int = 0  # exchanges at the start that the model no longer sees

    def prompt(self, text: str) -> list[int]:
        """The ids up to the answer to `text`: as many of the latest whole turns as leave room for that answer."""
        room = min(self.max_new_tokens, self.context // 2)
        for start in range(self.forgotten, len(self.exchanges) + 1):
            ids = self._ids(start, text)
            if len(ids) + room <= self.context:
                self.forgotten = start
                return ids
        raise UserError(
            f"This message is too long: it takes {len(ids)} tokens, and {room} of the model's {self.context} are kept "
            "for the answer. Shorten it (or the system message), or write a smaller max_new_tokens."
        )

    def _ids(self, start: int, text: str) -> list[int]:
        seen = self.exchanges[start:]
        asked = [exchange.asked for exchange in seen] + [text]
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = self.chat.prompt([*system, {"role": "user", "content": asked[0]}])
        for exchange, following in zip(seen, asked[1:], strict=True):
            ids += exchange.ids + self.chat.extend(following, finished=exchange.finished)
        return ids

    def messages(self) -> list[dict[str, str]]:
        """All of it, as data: also what the model no longer sees."""
        said = [("system", self.system)] if self.system else []
        for exchange in self.exchanges:
            said += [("user", exchange.asked), ("assistant", exchange.text)]
        return [{"role": role, "content": content} for role, content in said]


def reply(
    generator: Generator,
    conversation: Conversation,
    cfg: ChatRun,
    text: str,
    number: int,
    *,
    compare: bool,
    stopped: Callable[[], bool] = never,
) -> None:
    """Answer one message on stdout; `number` counts the messages, so that each has a seed of its own."""
    before = conversation.forgotten
    ids = conversation.prompt(text)
    if conversation.forgotten > before:
        note(
            f"[the context of {conversation.context} tokens is full: of the {len(conversation.exchanges)} turns so "
            f"far the model sees the last {len(conversation.exchanges) - conversation.forgotten}]"
        )
    budget = min(cfg.max_new_tokens, conversation.context - len(ids))
    names = [cfg.preset, *(name for name in cfg.presets if compare and name != cfg.preset)]
    seed = derive_seed(cfg.seed, "chat", number)  # the same for each preset: what differs is the setting
    answers = {name: generator.answer(ids, cfg.presets[name].params(budget), seed) for name in names}
    if compare:
        show_beside(answers, cfg, stopped)
    else:
        began = time.monotonic()
        stream(answers[cfg.preset], stopped)
        if sys.stderr.isatty():
            count = len(answers[cfg.preset].ids)
            note(f"[{count} tokens, {count / max(time.monotonic() - began, 1e-9):.0f} a second]")
        if not answers[cfg.preset].finished and not stopped():
            limit = "max_new_tokens" if budget == cfg.max_new_tokens else "the end of the model's context"
            note(f"[cut after {budget} tokens: {limit}]")
    if (chosen := answers[cfg.preset]).ids:
        conversation.exchanges.append(Exchange(text, chosen.ids, chosen.finished, chosen.text))


def converse(generator: Generator, conversation: Conversation, cfg: ChatRun, *, compare: bool) -> None:
    """Messages and commands until the end of the input: line by line, or in a terminal as they are typed or pasted."""
    by_hand = sys.stdin.isatty()
    if by_hand:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  input() then knows arrow keys and earlier lines
        note(f"{cfg.model.name_or_path}, {described(cfg, cfg.preset)}. /help lists the commands, /quit leaves.")
    number, rest = 0, ""
    with ctrl_c_keeps_what_was_typed():
        while True:
            try:
                text, rest = rest or next_message(by_hand), ""
            except EOFError:
                break
            except KeyboardInterrupt:
                print()
                raise
            if text.startswith("/"):
                if not text.startswith("/system "):  # a message of several lines may follow a command
                    text, _, rest = text.partition("\n")
                if not handle_command(text, conversation, cfg):
                    break
            elif text.strip():
                if by_hand and not compare:
                    print(f"{cfg.preset}> ", end="", flush=True)
                with one_ctrl_c() as stopped:
                    try:
                        reply(generator, conversation, cfg, text, number, compare=compare, stopped=stopped)
                    except DamagedModel:
                        raise
                    except UserError as problem:  # about this message; the next one may do
                        note(str(problem))
                    if stopped():
                        note("[stopped]")
                number += 1


def next_message(by_hand: bool) -> str:
    """The next line; in a terminal with all lines that came at once, as they do when a text is pasted."""
    if not by_hand:
        return input()
    text = input("\nyou> ")
    if more := pending():
        text = f"{text}\n{more}".rstrip("\n")
        note(f"[{len(text.splitlines())} lines are taken as one message]")
    return text


def pending() -> str:
    """What a terminal holds that nobody has read yet: a paste comes faster than anybody types."""
    if os.name != "posix":  # elsewhere a terminal cannot be asked
        return ""
    found, descriptor = b"", sys.stdin.fileno()
    while select.select([descriptor], [], [], 0.05)[0] and (piece := os.read(descriptor, 65536)):
        found += piece
    return found.decode(sys.stdin.encoding, errors="replace")


@contextmanager
def ctrl_c_keeps_what_was_typed() -> Iterator[None]:
    """Within it Ctrl-C does not empty the terminal's queue, so lines that wait for their turn are still answered."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    kept = before[:]
    kept[3] |= termios.NOFLSH  # the local modes
    termios.tcsetattr(descriptor, termios.TCSANOW, kept)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def handle_command(line: str, conversation: Conversation, cfg: ChatRun) -> bool:
    """Carry out a command; False when it is the one to leave."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/quit":
            return False
        case "/help":
            note(HELP)
        case "/reset":
            conversation.exchanges.clear()
            conversation.forgotten = 0
            note("[forgotten; the system message stays]" if conversation.system else "[forgotten]")
        case "/system":
            conversation.system = rest or None
            note("[the system message is set]" if rest else "[no system message]")
        case "/preset" if not rest:
            note("\n".join(("* " if name == cfg.preset else "  ") + described(cfg, name) for name in cfg.presets))
        case "/preset" if rest not in cfg.presets:
            note(unknown_preset(cfg, rest))
        case "/preset":
            cfg.preset = rest
            note(f"[{described(cfg, rest)}]")
        case "/save":
            save(Path(rest).expanduser(), conversation) if rest else note("Name the file: /save FILE")
        case _:
            note(f"There is no command {command}{hint(command, COMMANDS) or '.'} /help lists them.")
    return True


def save(file: Path, conversation: Conversation) -> None:
    """Write the conversation to a new file; one that exists is left alone."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(json.dumps({"messages": conversation.messages()}, ensure_ascii=False) + "\n")
    except OSError as error:
        note(f"Not saved: {file}: {error.strerror}. Name another file.")
    else:
        note(f"[{len(conversation.exchanges)} turns written to {file}]")


@contextmanager
def one_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within it the first Ctrl-C only makes `stopped()` true, the second one interrupts as ever."""
    pressed: list[int] = []

    def note_it(number: int, _: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


# -------------------------------------------------------------------------------------------------------- in words


def described(cfg: ChatRun, name: str) -> str:
    """`improved: temperature 0.7, top-p 0.9, top-k 50, repetition penalty 1.15`."""
    return f"{name}: {in_words(cfg.presets[name])}"


def in_words(setting: SamplingSection) -> str:
    parts = [f"temperature {setting.temperature:g}" if setting.temperature else "greedy"]
    parts += [f"top-p {setting.top_p:g}"] if setting.top_p < 1 else []
    parts += [f"top-k {setting.top_k}"] if setting.top_k else []
    parts += [f"repetition penalty {setting.repetition_penalty:g}"] if setting.repetition_penalty > 1 else []
    return ", ".join(parts)


def note(text: str) -> None:
    """A line about the answer rather than of it."""
    err = Console(stderr=True, markup=False, highlight=False, emoji=False)
    err.print(Text(escape_control_characters(text), "dim"), soft_wrap=not err.is_terminal)


def console() -> Console:
    """stdout, where nothing in a text is taken for markup; a line is broken for the eye only, never in a file."""
    return runlog.console(markup=False, highlight=False, emoji=False)


# ------------------------------------------------------------------------------------------------------- comparing


def show_beside(answers: dict[str, Answer], cfg: ChatRun, stopped: Callable[[], bool]) -> None:
    """All answers, in columns that grow together or, where there is no room, one below the other; then the figures."""
    out = console()
    if out.is_terminal and out.width >= NARROW * len(answers):
        in_columns(out, answers, cfg, stopped)
    else:
        for name, answer in answers.items():
            print(f"--- {described(cfg, name)}")
            stream(answer, stopped)
            print()
    out.print(figures(answers))


def in_columns(out: Console, answers: dict[str, Answer], cfg: ChatRun, stopped: Callable[[], bool]) -> None:
    """Each answer in its column, a token each in turn."""
    said = dict.fromkeys(answers, "")
    writing = {name: iter(answer) for name, answer in answers.items()}

    def columns(rows: int) -> Table:
        """The last `rows` lines of each answer: what is higher than the terminal can't be drawn again."""
        table = Table(box=box.SIMPLE_HEAD, expand=True)
        for name in answers:
            table.add_column(Text(f"{name}\n").append(in_words(cfg.presets[name]), "dim"), ratio=1, overflow="fold")
        width = out.width // len(answers) - 4
        table.add_row(*(Text("\n").join(Text(text).wrap(out, width)[-rows:]) for text in said.values()))
        return table

    room = max(1, out.height - 8)
    with Live(columns(room), console=out, auto_refresh=False) as live:
        drawn = time.monotonic()
        while writing and not stopped():
            for name in list(writing):
                piece = next(writing[name], None)
                if piece is None:
                    del writing[name]
                else:
                    said[name] += escape_control_characters(piece)
            if time.monotonic() - drawn > 0.1:
                live.update(columns(room), refresh=True)
                drawn = time.monotonic()
        live.update(columns(sys.maxsize), refresh=True)


def figures(answers: dict[str, Answer]) -> Table:
    """How much each answer repeats itself."""
    from posttrain import metrics

    table = Table("", box=box.SIMPLE_HEAD)
    found = []
    for name, answer in answers.items():
        table.add_column(name, justify="right")
        found.append(metrics.repetition([answer.written], [answer.finished]))
    for label, value in (
        ("tokens", lambda of: f"{of['tokens']:.0f}"),
        ("finished", lambda of: "no" if of["never_stops"] else "yes"),
        ("seq-rep-4: repeated 4-grams", lambda of: f"{of['seq_rep_4']:.1%}"),
        ("distinct-1: different tokens", lambda of: f"{of['distinct_1']:.2f}"),
        ("distinct-2: different pairs", lambda of: f"{of['distinct_2']:.2f}"),
        ("longest repeated span, tokens", lambda of: f"{of['longest_repeat']:.0f}"),
    ):
        table.add_row(label, *map(value, found))
    return table


# --------------------------------------------------------------------------------------------------------- playing


def open_env(cfg: ChatRun, name: str) -> TextEnv:
    """The environment to play, with the options that the config gives it."""
    import envs

    options = next((env.options for env in cfg.envs if env.name == name), {})
    try:
        return envs.make(name, **options)
    except (ValueError, TypeError) as error:  # TypeError: an option of the wrong type, size=big
        raise UserError(f"--play {name}: {error}") from error


def play(
    generator: Generator, env: TextEnv, cfg: ChatRun, setting: SamplingSection, episodes: int, delay: float
) -> None:
    """Levels of the evaluator, one after the other: what the model sees, thinks and does, and what comes of it."""
    from envs.protocol import Episode, Protocol
    from posttrain import metrics

    out, won, protocol = console(), 0, Protocol(**cfg.protocol.model_dump())
    note(f"{cfg.model.name_or_path} plays {env.name}, {SPLIT} levels; {in_words(setting)}")
    for number in range(episodes):
        seed = derive_seed(cfg.seed, env.name, number)
        episode = Episode(env, protocol, seed, SPLIT)
        if number == 0:
            out.print(
                Text(escape_control_characters(episode.messages[0]["content"]), "dim"), soft_wrap=not out.is_terminal
            )
        total = play_episode(generator, episode, cfg, setting, out, f"level {number + 1}", delay)
        won += episode.success
        out.print(outcome(episode, total), soft_wrap=True)
    if episodes > 1:
        low, high = metrics.wilson(won, episodes)
        out.print(f"\n{won} of {episodes} levels solved ({won / episodes:.0%}; 95 % interval {low:.0%} to {high:.0%})")


def play_episode(
    generator: Generator,
    episode: Episode,
    cfg: ChatRun,
    setting: SamplingSection,
    out: Console,
    title: str,
    delay: float,
) -> float:
    """One episode, token in, token out, as in the rollouts of phase 3; returns the sum of its rewards and penalties."""
    from posttrain.rollout import Game

    env, budget = episode.env, cfg.max_completion_length
    game, going = Game(generator.chat, episode), True
    played = game.trajectory
    while going and game.look(generator.context - budget, cfg.context, cfg.context_turns):
        out.print(Text(f"\n{title}, turn {episode.turns + 1}", "bold"))
        told = episode.messages[-1]["content"]
        out.print(beside(env, episode.summary(game.segment.first_turn) if cfg.context == "single_turn" else told))
        answer = generator.answer(
            game.segment.ids, setting.params(budget), derive_seed(episode.seed, "turn", episode.turns)
        )
        print(episode.protocol.opening, end="")
        stream(answer)
        acted = len(episode.actions)
        going = game.take_turn(Completion(answer.ids, [0.0] * len(answer.ids), answer.finished))
        if played.crashed:
            raise UserError(f"{env.name} raised {played.crashed} on level seed {episode.seed}: fix the environment.")
        valid = episode.past[-1].valid
        did = ", ".join(episode.actions[acted:]) or "no action"
        cut = "" if answer.finished else f", cut after {budget} tokens"
        invalid = "" if valid else f", invalid answer: {played.turn_penalties[-1]:g}"
        style = "bold" if valid else "yellow"
        out.print(Text(f"-> {did}, reward {played.turn_rewards[-1]:g}{invalid}{cut}", style))
        time.sleep(delay)
    out.print(Text(), beside(env, ""), sep="\n")
    return played.reward


def outcome(episode: Episode, total: float) -> Text:
    turns = f"after {episode.turns} turn{'' if episode.turns == 1 else 's'}, return {round(total, 6):g}"
    if episode.success:
        return Text(f"Solved {turns}.", "bold green")
    limit = "out of turns or actions" if episode.truncated else "the model's context is full"
    return Text(f"Not solved ({episode.failure or ('over' if episode.terminated else limit)}) {turns}.", "bold red")


def beside(env: TextEnv, text: str) -> Table:
    """The map, where the environment has one, and what the model is told."""
    table = Table.grid(padding=(0, 3))
    view = grid(env)
    table.add_row(*([view] if view is not None else []), Text(escape_control_characters(text), "dim", overflow="fold"))
    return table


def grid(env: TextEnv) -> Text | None:
    """The environment as a coloured map, whatever the model is shown; None for an environment without a grid."""
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


if __name__ == "__main__":
    for pipe in (sys.stdin, sys.stdout, sys.stderr):
        pipe.reconfigure(errors="replace")  # type: ignore[union-attr]  no byte that comes or goes is a reason to stop
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this quietly
    run(main)
