"""How does a conversation look in the browser?  One or two answers side by side, their settings and figures."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gradio
from pydantic import ValidationError

from envs.tools import Tool
from posttrain.config import ChatRun, SamplingSection
from posttrain.serving.conversation import Answering, Conversation, open_tools
from posttrain.serving.display import describe_sampling, repetition_figures
from posttrain.serving.generation import Answer, Generator
from posttrain.serving.web_chat.about import About, about_html
from posttrain.serving.web_chat.events import (
    ONE_AT_A_TIME,
    PAUSE,
    QUICK,
    REFUSES,
    html_table,
    page_error,
    wait_until_idle,
)
from posttrain.types import UserError, derive_seed

OWN = "own settings"  # shown in the list of presets after a slider was moved
SLIDERS = ("temperature", "top_p", "top_k", "repetition_penalty")  # of SamplingSection
SEND, STOP = "Send", "Stop"
DOWNLOAD = """(rows) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([rows], { type: "application/jsonl" }));
  link.download = "chat.jsonl";
  link.click();
  URL.revokeObjectURL(link.href);
}"""
FOCUS = """() => {
  if (document.activeElement === document.body) document.querySelector("#message textarea").focus();
}"""
PLAIN = re.compile(r"[^\W_]+([_-][^\W_]+)*")  # text without Markdown
Shown = list[Any]  # messages as gradio takes them


@dataclass(frozen=True)
class MessageSettings:
    """The settings of a message, an entry for each side: MessageSettings([("a", SamplingSection())], "Be brief", 9)."""

    sides: list[tuple[str, SamplingSection]]
    system: str | None
    longest: int
    tools: list[Tool] = field(default_factory=list)


@dataclass
class Talk:
    """The conversations of an open page; each page has its own."""

    sides: list[Conversation | None] = field(default_factory=lambda: [None, None])
    answering: dict[str, Answering] = field(default_factory=dict)  # the last answers
    number: int = 0  # of messages; each has its own seed, the same as in the terminal
    pending: str = ""  # a message without an answer
    waiting: bool = False  # while it may still get an answer
    settings: list[list[str]] = field(default_factory=lambda: [[], []])  # of each answer in `sides`
    names: list[str] = field(default_factory=list)  # of the sides with the last answers
    seconds: dict[str, float] = field(default_factory=dict)  # of each of the last answers
    busy: bool = False  # while an answer is being written
    discarded: bool = False  # `reset` ends it

    @property
    def answers(self) -> dict[str, Answer]:
        """The last turns, for the table of figures."""
        return {name: each.current for name, each in self.answering.items()}

    def side(self, number: int, generator: Generator, request: MessageSettings) -> Conversation:
        """Return the conversation of a side; another system message or model starts a new one."""
        talk = self.sides[number]
        if talk is None or talk.chat is not generator.chat or talk.system != request.system:
            talk = Conversation(generator.chat, generator.context, request.longest, request.system, tools=request.tools)
            self.sides[number], self.settings[number] = talk, []
        talk.max_new_tokens = request.longest
        return talk

    def shown(self, number: int) -> Shown:
        """Return the messages of a side, with the answer that is being written."""
        talk = self.sides[number]
        messages: list[Any] = [each for each in talk.messages() if each["role"] != "system"] if talk else []
        if self.waiting:
            messages.append({"role": "user", "content": self.pending})
            for each in list(self.answering.values())[number : number + 1]:
                messages += each.before
                messages += [{"role": "assistant", "content": each.current.text}] if each.current.ids else []
        return [_shown(message, following) for message, following in pairwise([*messages, {}])]


class ChatTab:
    """The tab and its events. generators: one or two models by name. abouts: what the page says about each."""

    def __init__(self, generators: dict[str, Generator], cfg: ChatRun, abouts: dict[str, About]) -> None:
        self.generators, self.cfg, self.abouts, self.tools = generators, cfg, abouts, open_tools(cfg.tools)

    def build(self) -> None:
        cfg, names = self.cfg, list(self.generators)
        others = [name for name in cfg.presets if name != cfg.preset]
        second = cfg.preset if len(names) > 1 or not others else others[0]
        self.chosen = [(names[0], cfg.preset), (names[-1], second)]  # at first, of each side
        self.talk = gradio.State(Talk())
        with gradio.Row(elem_classes="sides"):
            self.columns, self.headers, self.chatbots = zip(*map(self.side, range(2)), strict=True)
        self.message = gradio.Textbox(
            label="Message", show_label=False, placeholder="Write a message; Enter sends it", submit_btn=SEND,
            elem_id="message", autofocus=True, max_lines=12,
        )  # fmt: skip
        self.sent = gradio.Textbox(visible=False)
        with gradio.Row(elem_classes="actions"):
            self.new = gradio.Button("New conversation", size="sm", min_width=130)
            self.export = gradio.Button("Export", size="sm", min_width=80)
            self.rows = gradio.Textbox(visible=False)
        self.figures = gradio.HTML(elem_id="figures", elem_classes="figures")
        with gradio.Accordion("Settings", open=False):
            self.beside = gradio.Checkbox(
                len(names) > 1, label="Side by side", info="Two answers to each message; starts a new conversation."
            )
            self.system = gradio.Textbox(
                cfg.system or "", label="System message", lines=2,
                info="A change starts a new conversation with the next message.",
            )  # fmt: skip
            longest = min(max(2048, cfg.max_new_tokens), *(each.context for each in self.generators.values()), 1 << 20)
            self.longest = gradio.Slider(
                1, longest, min(longest, cfg.max_new_tokens), step=1, label="Longest answer, in tokens"
            )
            with gradio.Row():
                self.settings = [self.setting(side) for side in range(2)]
        self.connect()

    def side(self, number: int) -> tuple[gradio.Column, gradio.HTML, gradio.Chatbot]:
        """Return the column of a side, what it says about its model, and its messages.

        The chatbot shows plain text, without Markdown, HTML or pictures from other addresses.
        """
        beside, (name, preset) = len(self.generators) > 1, self.chosen[number]
        with gradio.Column(visible=number == 0 or beside, min_width=300, elem_classes="side") as column:
            header = gradio.HTML(
                self.header(name, self.cfg.presets[preset], beside=beside), elem_id=f"about-{number}",
                js_on_load=Path(__file__).with_name("names.js").read_text(encoding="utf-8"),
            )  # fmt: skip
            chatbot = gradio.Chatbot(
                label=self.abouts[name].title, show_label=False, height="min(52svh, 540px)", render_markdown=False,
                buttons=[], layout="bubble", elem_id=f"side-{number}", examples=self.examples(name),
            )  # fmt: skip
        return column, header, chatbot

    def header(self, name: str, how: SamplingSection, *, beside: bool) -> str:
        """Return what a side says about its model, with the model's name where there are two sides."""
        return about_html(self.abouts[name], "h2" if beside else "", describe_sampling(how))

    def examples(self, name: str) -> list[Any]:
        return [{"text": text} for text in self.abouts[name].examples]

    def setting(self, side: int) -> list[Any]:
        """Return the components of one side: model, preset, and the SLIDERS."""
        presets, several, (model, preset) = self.cfg.presets, len(self.generators) > 1, self.chosen[side]

        def values(name: str) -> list[float]:
            return [getattr(each, name) for each in presets.values()]

        with gradio.Column(min_width=260, visible=side == 0 or several) as column:
            models = [(about.title, name) for name, about in self.abouts.items()]
            choices = gradio.Dropdown(models, value=model, label="Model", interactive=True, visible=several)
            chosen = gradio.Dropdown([*presets, OWN], value=preset, label="Preset", interactive=True)
            heat, top_p, top_k, penalty = self.slid(preset)
            sliders = [
                gradio.Slider(0, max(2.0, *values("temperature")), heat, step=0.05, label="Temperature"),
                gradio.Slider(min(0.01, *values("top_p")), 1, top_p, step=0.01, label="Top-p"),
                gradio.Slider(0, max(200, *values("top_k")), top_k, step=1, label="Top-k (0: all)"),
                gradio.Slider(
                    1, max(2.0, *values("repetition_penalty")), penalty, step=0.01, label="Repetition penalty"
                ),
            ]
        if side == 1:
            self.second = column
        return [choices, chosen, *sliders]

    def connect(self) -> None:
        view = [*self.chatbots, self.figures]
        inputs = [self.beside, self.system, self.longest, *self.settings[0], *self.settings[1]]
        asked = [self.message.submit, *(each.example_select(picked, None, self.message, **QUICK).then
                                        for each in self.chatbots)]  # fmt: skip
        answers = []
        for ask in asked:
            begun = ask(
                self.begin,
                [self.message, self.talk, *inputs],
                [self.message, self.sent, *view, *self.headers],
                **REFUSES,
            )
            answered = begun.success(
                self.answer, [self.sent, self.talk, *inputs], view, show_progress_on=self.chatbots, **ONE_AT_A_TIME,
                **({"api_visibility": "private"} if answers else {"api_name": "chat"}),
            )  # fmt: skip
            for over in (answered.then, answered.failure):  # gradio calls `then` after a success and after a stop
                over(self.settle, self.talk, [self.message, *view], **QUICK).then(
                    None, None, None, js=FOCUS, api_visibility="private"
                )
            answers.append(answered)
        self.message.stop(None, None, None, cancels=answers, api_visibility="private")
        models = [setting[0] for setting in self.settings]
        gradio.on(  # `change` of a list: gradio sends its `input` also when it loses the focus with the value it had
            [self.new.click, self.beside.input, *(model.change for model in models)],
            self.reset, [self.talk, *inputs],
            [self.message, *view, *self.headers, self.columns[1], self.second], cancels=answers, **REFUSES,
        )  # fmt: skip
        self.export.click(self.exported, [self.talk, *models], self.rows, **REFUSES).success(
            None, self.rows, None, js=DOWNLOAD, api_visibility="private"
        )
        for _, preset, *sliders in self.settings:
            preset.change(self.slid, preset, sliders, **QUICK)
            gradio.on([slider.input for slider in sliders], lambda: OWN, None, preset, **QUICK)

    def begin(self, text: str, talk: Talk, *inputs: Any) -> tuple[Any, ...]:
        """Show the message at once, also while other pages are answered."""
        if not (text or "").strip():
            raise page_error("Write a message first.")
        request = self.read_settings(*inputs)
        talk.pending, talk.waiting, talk.answering = text, True, {}
        shown: list[Any] = [gradio.skip(), gradio.skip()]
        headers = list(shown)
        for side, (name, how) in enumerate(request.sides):
            talk.side(side, self.generators[name], request)
            shown[side] = talk.shown(side)
            headers[side] = self.header(name, how, beside=len(request.sides) > 1)
        waiting = gradio.Textbox("", submit_btn=False, stop_btn=STOP, interactive=False)
        return waiting, text, *shown, self.figured(talk), *headers

    def answer(self, text: str, talk: Talk, *inputs: Any) -> Iterator[tuple[Any, ...]]:
        """Write a token on each side in turn, until the answers end, are stopped, or the page is closed."""
        request = self.read_settings(*inputs)
        talk.pending, talk.waiting, talk.busy, talk.seconds = text, True, True, {}
        talk.names = self.names(request.sides)
        # the same for both sides: they differ in the model or the settings
        seed = derive_seed(self.cfg.seed, "chat", talk.number)
        began = drawn = time.monotonic()
        answers: list[Answering] = []
        try:
            for side, (name, how) in enumerate(request.sides):
                generator = self.generators[name]
                conversation = talk.side(side, generator, request)
                ids = conversation.prompt(text)
                answers.append(Answering(generator, conversation, ids, how.params, seed, self.cfg))
            talk.answering = dict(zip("AB", answers, strict=False))
            writing = {side: iter(answer) for side, answer in talk.answering.items()}
            while writing and not talk.discarded:
                for side in list(writing):
                    if next(writing[side], None) is None:
                        del writing[side]
                    talk.seconds[side] = time.monotonic() - began
                if time.monotonic() - drawn > PAUSE:
                    yield self.view(talk)
                    drawn = time.monotonic()
        except UserError as problem:
            raise page_error(problem) from problem
        finally:
            writing = {}
            for side, written in enumerate(answers):
                written.current.stop()
                if written.keep(text):
                    talk.settings[side].append(describe_sampling(request.sides[side][1]))
                    talk.pending, talk.waiting = "", False
            talk.number += 1
            talk.busy = False
        yield self.view(talk)

    def settle(self, talk: Talk) -> tuple[Any, ...]:
        """Show the page after an answer; a message without an answer goes back into its text box."""
        wait_until_idle(talk)
        if talk.discarded:  # `reset` shows an empty page; this view could arrive after it
            return (gradio.skip(),) * 4
        talk.waiting = False
        return gradio.Textbox(talk.pending, submit_btn=SEND, stop_btn=False, interactive=True), *self.view(talk)

    def reset(self, talk: Talk, beside: bool, *inputs: Any) -> tuple[Any, ...]:
        """Start a new conversation, on one side or on both."""
        talk.discarded = True
        wait_until_idle(talk)
        vars(talk).update(vars(Talk()))
        sides = self.read_settings(True, *inputs).sides
        empty = [gradio.Chatbot([], label=self.abouts[name].title, examples=self.examples(name)) for name, _ in sides]
        headers = [self.header(name, how, beside=beside) for name, how in sides]
        typing = gradio.Textbox("", submit_btn=SEND, stop_btn=False, interactive=True)
        column = gradio.Column(visible=beside)
        return typing, *empty, self.figured(talk), *headers, column, gradio.Column(visible=beside)

    def exported(self, talk: Talk, *models: str) -> str:
        """Return a line of JSON for each side: a row of kind `messages` for phase 1, with each answer's settings."""
        rows = [
            {"model": model, "settings": settings, "messages": conversation.messages()}
            | ({"tools": conversation.schemas} if conversation.tools else {})
            for model, settings, conversation in zip(models, talk.settings, talk.sides, strict=True)
            if conversation and conversation.exchanges
        ]
        if not rows:
            raise page_error("Nothing to export yet: no message has an answer.")
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def slid(self, preset: str) -> list[Any]:
        """Return the values of the sliders for a preset."""
        if preset == OWN:
            return [gradio.skip()] * len(SLIDERS)
        return [getattr(self.cfg.presets[preset], name) for name in SLIDERS]

    def read_settings(self, beside: bool, system: str | None, longest: float, *settings: Any) -> MessageSettings:
        if not isinstance(beside, bool):  # a program can send any value
            raise page_error("`Side by side` is true or false.")
        half, sides = len(settings) // 2, []
        for model, _, *values in (settings[:half], settings[half:])[: 1 + beside]:
            if model not in self.generators:
                raise page_error("Choose a model.")
            try:
                sides.append((model, SamplingSection(**dict(zip(SLIDERS, values, strict=True)))))
            except ValidationError as error:
                words = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
                raise page_error(f"These settings cannot be used: {words}.") from error
        return MessageSettings(sides, (system or "").strip() or None, int(longest), self.tools)

    def names(self, sides: list[tuple[str, SamplingSection]]) -> list[str]:
        """Return what tells the sides apart: the models, or else the settings."""
        titles = [self.abouts[name].title for name, _ in sides]
        settings = [describe_sampling(how) for _, how in sides]
        for names in (titles, settings):
            if len(set(names)) == len(sides):
                return names
        return ["first", "second"]

    def view(self, talk: Talk) -> tuple[Any, ...]:
        """Return the values of both chatbots and of the figures."""
        return talk.shown(0), talk.shown(1), self.figured(talk)

    def figured(self, talk: Talk) -> str:
        """Return the table of figures of the last answers."""
        answers = {name: answer for name, answer in talk.answers.items() if answer.ids}
        if not answers:
            return ""
        speed = [f"{len(answer.ids) / max(talk.seconds[side], 1e-9):.0f}" for side, answer in answers.items()]
        forgotten = [str(side.forgotten) for side in talk.sides if side]
        rows = [("", talk.names[: len(answers)]), *repetition_figures(answers), ("tokens a second", speed)]
        rows += [("turns out of the model's context", forgotten)] if any(map(int, forgotten)) else []
        return html_table([[label, *values] for label, values in rows])


def picked(event: gradio.SelectData) -> str:
    """Return the example that was clicked."""
    return event.value["text"]


def _shown(message: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    """Return a message as gradio takes it; calls of tools and their results are steps that can be unfolded.

    gradio reads every text as HTML, whatever `render_markdown` is: a model's <img> would be loaded. It would also drop
    the indentation of a plain string.
    """
    role = "user" if message["role"] == "user" else "assistant"
    shown = {"role": role, "content": [{"type": "text", "text": html.escape(message["content"], quote=False)}]}
    tool = following if following.get("role") == "tool" and message["role"] != "tool" else message
    if tool["role"] != "tool":
        return shown
    # A title is Markdown, and a model may call whatever it likes.
    name = tool["name"] if PLAIN.fullmatch(tool["name"]) else "a tool that does not exist"
    return shown | {"metadata": {"title": f"{'Result of' if tool is message else 'Calls'} {name}", "status": "done"}}
