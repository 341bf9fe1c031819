"""Chat with a model in the terminal or the browser, print one answer, compare presets, or watch the model play.

    python inference_with_improved_settings.py                                  the result of the reference run
    python inference_with_improved_settings.py --config configs/quickstart/chat.yaml
    python inference_with_improved_settings.py --prompt "Tom has 3 apples and buys 4. How many?" > answer.txt
    python inference_with_improved_settings.py --compare                        every answer under each preset
    python inference_with_improved_settings.py --play frozen_lake --episodes 3
    python inference_with_improved_settings.py --web --beside runs/phase2/final

Answers go to stdout, everything else to stderr. The same seed gives the same answers.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# A package loads a module when one of its names is first used, so --help and mistakes answer before torch is loaded.
from posttrain import models, plan, serving
from posttrain.config import ChatRun, SamplingSection, hint, load, run
from posttrain.files import keep_standard_streams
from posttrain.runtime import runlog
from posttrain.serving import (
    Answering,
    Conversation,
    DamagedModel,
    Generator,
    ctrl_c_keeps_what_was_typed,
    describe_preset,
    describe_sampling,
    escape_control_characters,
    never,
    next_message,
    note,
    one_ctrl_c,
    playing,
    show_beside,
    stream,
)
from posttrain.types import UserError, derive_seed, short_name

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message; without TEXT remove it
/preset NAME    answer with another preset; without NAME list them
/save FILE      write the conversation as a row of JSON that phase 1 can train on (kind: messages)
/help           this list
/quit           leave; so does Ctrl-D
Ctrl-C stops an answer, clears a half-typed line, and leaves when it is pressed twice at an empty one.
A message that begins with / needs a space before it.
Several lines that are pasted are one message."""
COMMANDS = [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]


def main(argv: list[str] | None = None) -> None:
    # 1. Read the options.
    cfg, flags = load(ChatRun, "configs/chat.yaml", argv, add_flags, __doc__)
    check(cfg, flags)
    seed = cfg.seed if flags.seed is None else flags.seed
    cfg = cfg.model_copy(update={"seed": seed, "preset": flags.preset or cfg.preset})
    env = playing.open_played_env(cfg, flags.play) if flags.play else None
    tools = serving.open_tools(cfg.tools)
    page = open_page(flags) if flags.web else None

    # 2. Check and load the models.
    runlog.keep_private(Path("runs"))

    sections = [cfg.model]
    if flags.beside:
        other = {"name_or_path": flags.beside, "revision": None, "trust_remote_code": False}
        sections.append(cfg.model.model_copy(update=other))
    for section in sections:
        plan.check_run(cfg.model_copy(update={"model": section}))
    generators = {
        section.name_or_path: Generator(
            *models.load(section, device=cfg.device, chat_template=cfg.chat.template, training=False)
        )
        for section in sections
    }
    generator, *_ = generators.values()

    # 3. Chat or play.
    if tools and env is None:
        for each in generators.values():
            each.chat.check_tools([tool.schema for tool in tools])
    if page is not None:
        page(generators, cfg)
        return
    if env is not None:
        # As in the rollouts: a repetition penalty would punish what a map must repeat.
        setting = cfg.presets[cfg.preset] if flags.preset else SamplingSection()
        playing.show_levels(generator, env, cfg, setting, flags.episodes or 1, flags.delay or 0.0)
        return
    conversation = Conversation(generator.chat, generator.context, cfg.max_new_tokens, cfg.system, tools=tools)
    if flags.prompt is not None:
        reply(generator, conversation, cfg, flags.prompt, 0, compare=flags.compare)
    else:
        converse(generator, conversation, cfg, compare=flags.compare)


def add_flags(parser: argparse.ArgumentParser) -> None:
    def at_least(minimum: int) -> Callable[[str], int]:
        def number(text: str) -> int:
            if not text.isdecimal() or len(text) > 18 or int(text) < minimum:
                raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer from {minimum} with up to 18 digits")
            return int(text)

        return number

    def seconds(text: str) -> float:
        if not text.replace(".", "", 1).isdecimal() or float(text) > 3600:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds up to 3600")
        return float(text)

    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="answer this and stop; the answer alone goes to stdout")
    what.add_argument("--play", metavar="ENV", help="watch the model act in an environment, e.g. frozen_lake")
    what.add_argument("--web", action="store_true", help="chat, and watch it play, in the browser")
    parser.add_argument(
        "--preset", metavar="NAME", help="the preset of the answers (default of --play: the sampling of phase 3)"
    )
    parser.add_argument("--compare", action="store_true", help="show every answer under each preset, with figures")
    parser.add_argument("--episodes", type=at_least(1), metavar="N", help="levels to --play (default: 1)")
    parser.add_argument("--delay", type=seconds, metavar="SECONDS", help="pause after each turn of --play (default: 0)")
    parser.add_argument("--seed", type=at_least(0), metavar="N", help="same as seed=N")
    parser.add_argument("--beside", metavar="MODEL", help="a second model for --web, for example the phase before")
    parser.add_argument("--host", help="address of --web (default: 127.0.0.1, only this machine)")
    parser.add_argument("--port", type=at_least(0), help="port of --web; 0 takes a free one (default: 7860)")
    parser.add_argument(
        "--password",
        action="store_true",
        help="protect --web with the password in CHAT_PASSWORD, or one typed at the start",
    )


def check(cfg: ChatRun, flags: argparse.Namespace) -> None:
    """Raise UserError for flags that contradict the config or each other."""
    if flags.preset is not None and flags.preset not in cfg.presets:
        raise UserError(unknown_preset(cfg, flags.preset))
    if flags.prompt is not None and not flags.prompt.strip():
        raise UserError(
            '--prompt is empty. Write the message behind it, e.g. --prompt "Hello"; without --prompt messages are read'
            " from the terminal or from a pipe."
        )
    if cfg.tools and flags.compare:
        raise UserError("tools are called in the answer of one preset: leave out --compare, or tools.")
    if flags.compare and flags.web:
        raise UserError("--compare is for the terminal. On the page of --web tick `Side by side` in its settings.")
    if (flags.beside or flags.host or flags.port is not None or flags.password) and not flags.web:
        raise UserError("--beside, --host, --port and --password belong to --web.")
    if flags.beside == cfg.model.name_or_path:
        raise UserError(
            f"--beside {flags.beside} is the first model too. Name another one; for two settings of one model leave"
            " --beside out and tick `Side by side` on the page."
        )
    if flags.compare and flags.play:
        raise UserError("--compare shows answers side by side; --play has only one game. Leave one out.")
    if flags.compare and len(cfg.presets) < 2:
        raise UserError(
            f"--compare needs two presets, but the config has only `{cfg.preset}`. Add one to the section `presets`, "
            "e.g. presets.plain.temperature=1.0."
        )
    if (flags.episodes or flags.delay) and not flags.play:
        raise UserError("--episodes and --delay belong to --play ENV, e.g. --play frozen_lake --episodes 3.")


def open_page(flags: argparse.Namespace) -> Callable[[dict[str, Generator], ChatRun], None]:
    """Return a function that shows the page of --web; address and password are checked before models are loaded."""
    serving.require_gradio()
    password = serving.chosen_password() if flags.password else None
    listening = serving.listen(flags.host or "127.0.0.1", 7860 if flags.port is None else flags.port)
    return lambda generators, cfg: serving.serve_page(generators, cfg, listening, password)


def unknown_preset(cfg: ChatRun, name: str) -> str:
    """Return the message for a preset that does not exist."""
    return f"There is no preset `{name}`, only {', '.join(cfg.presets)}{hint(name, list(cfg.presets))}"


# ----------------------------------------------------------------------------------------------------------------- chat


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
    """Answer one message on stdout. number: of the message, for its seed."""
    before = conversation.forgotten
    ids = conversation.prompt(text)
    if conversation.forgotten > before:
        note(
            f"[the context of {conversation.context} tokens is full: of the {len(conversation.exchanges)} turns so "
            f"far the model sees the last {len(conversation.exchanges) - conversation.forgotten}]"
        )
    seed = derive_seed(cfg.seed, "chat", number)  # the same for each preset: only the settings differ
    chosen = Answering(generator, conversation, ids, cfg.presets[cfg.preset].params, seed, cfg)
    try:
        write_answer(chosen, compare=compare, stopped=stopped)
    except KeyboardInterrupt:  # the second Ctrl-C keeps what is written, too
        chosen.keep(text)
        raise
    chosen.keep(text)


def write_answer(chosen: Answering, *, compare: bool, stopped: Callable[[], bool]) -> None:
    """Print an answer while it is written, with the results of its calls, and notes about it."""
    cfg = chosen.cfg
    if compare:
        others = {
            name: chosen.generator.answer(chosen.ids, setting.params(chosen.budget), chosen.seed)
            for name, setting in cfg.presets.items()
            if name != cfg.preset
        }
        show_beside({cfg.preset: chosen.current} | others, cfg, stopped)
    else:
        began = time.monotonic()
        stream(chosen.current, stopped)
        if sys.stderr.isatty():
            count = len(chosen.current.ids)
            note(f"[{count} tokens, {count / max(time.monotonic() - began, 1e-9):.0f} a second]")
        if not chosen.current.finished and not stopped():
            limit = "max_new_tokens" if chosen.budget == cfg.max_new_tokens else "the end of the model's context"
            note(f"[cut after {chosen.budget} tokens: {limit}]")
    while not stopped() and (results := chosen.proceed()):
        for result in results:
            note(f"[{result['name']}: {result['content']}]")
        stream(chosen.current, stopped)


def converse(generator: Generator, conversation: Conversation, cfg: ChatRun, *, compare: bool) -> None:
    """Answer messages and commands to the end of the input."""
    by_hand = sys.stdin.isatty()
    if by_hand:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  input() then knows arrow keys and earlier lines
        greet(cfg)
    number, rest = 0, ""
    with ctrl_c_keeps_what_was_typed():
        while True:
            try:
                text, rest = rest or next_message(by_hand), ""
            except EOFError:
                break
            if text.startswith("/"):
                if not text.startswith("/system "):  # a message of several lines may follow a command
                    text, _, rest = text.partition("\n")
                if (after := handle_command(text, conversation, cfg)) is None:
                    break
                cfg = after
            elif text.strip():
                with one_ctrl_c() as stopped:
                    if by_hand and not compare:
                        print(f"{escape_control_characters(short_name(cfg.model.name_or_path))}> ", end="", flush=True)
                    try:
                        reply(generator, conversation, cfg, text, number, compare=compare, stopped=stopped)
                    except DamagedModel:
                        raise
                    except UserError as problem:  # about this message; the next one may work
                        note(str(problem))
                    except KeyboardInterrupt:  # the answer alone ends, where the first Ctrl-C took too long
                        if not by_hand:
                            raise
                        print()
                    if stopped():
                        note("[stopped]")
                number += 1


def greet(cfg: ChatRun) -> None:
    """Print the model, its settings and examples."""
    setting = describe_sampling(cfg.presets[cfg.preset])
    note(f"{cfg.model.name_or_path}, {setting}. /help lists the commands, /quit leaves.")
    if cfg.examples:
        note("\n  ".join(["For example:", *cfg.examples]))


# ------------------------------------------------------------------------------------------------------------- commands


def handle_command(line: str, conversation: Conversation, cfg: ChatRun) -> ChatRun | None:
    """Carry out a command; return the config for the following messages, or None for /quit."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/quit":
            return None
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
            note("\n".join(("* " if name == cfg.preset else "  ") + describe_preset(cfg, name) for name in cfg.presets))
        case "/preset" if rest not in cfg.presets:
            note(unknown_preset(cfg, rest))
        case "/preset":
            cfg = cfg.model_copy(update={"preset": rest})
            note(f"[{describe_preset(cfg, rest)}]")
        case "/save":
            save(rest, conversation) if rest else note("Name the file: /save FILE")
        case _:
            note(f"There is no command {command}{hint(command, COMMANDS) or '.'} /help lists them.")
    return cfg


def save(file: str, conversation: Conversation) -> None:
    """Write the conversation to a new file; an existing file is not changed."""
    try:
        with Path(file).expanduser().open("x", encoding="utf-8") as out:
            tools = {"tools": conversation.schemas} if conversation.tools else {}
            out.write(json.dumps({"messages": conversation.messages(), **tools}, ensure_ascii=False) + "\n")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~NOBODY; ValueError: a zero byte
        note(f"Not saved: {file}: {getattr(error, 'strerror', None) or error}. Name another file.")
    else:
        note(f"[{len(conversation.exchanges)} turns written to {file}]")


if __name__ == "__main__":
    keep_standard_streams()
    for pipe in (sys.stdin, sys.stdout, sys.stderr):
        pipe.reconfigure(errors="replace")  # type: ignore[union-attr]  no byte of input or output may stop the chat
    if hasattr(signal, "SIGPIPE") and "--web" not in sys.argv:  # a visitor who disconnects must not end it
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this quietly
    run(main)
