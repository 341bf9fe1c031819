"""How does a conversation look in the browser?  One or two answers side by side, their settings and figures."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gradio
from pydantic import ValidationError

from envs.tools import Tool
from posttrain.config import ChatRun, SamplingSection
from posttrain.serving.conversation import Answering, Conversation, open_tools
from posttrain.serving.display import describe_sampling, repetition_figures
from posttrain.serving.generation import Answer, Generator
from posttrain.serving.web_chat.events import ONE_AT_A_TIME, PAUSE, QUICK, html_table, page_error, wait_until_idle
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
        messages = [each for each in talk.messages() if each["role"] != "system"] if talk else []
        if self.waiting:
            messages.append({"role": "user", "content": self.pending})
            for each in list(self.answering.values())[number : number + 1]:
                messages += each.before
                messages += [{"role": "assistant", "content": each.current.text}] if each.current.ids else []
        # gradio reads every text as HTML, whatever `render_markdown` is: a model's <img> would be loaded. It would also
        # remove the indentation of a plain string.
        return [
            {"role": role, "content": [{"type": "text", "text": html.escape(text, quote=False)}]}
            for role, text in map(_as_said, messages)
        ]


class ChatTab:
    """The tab and its events. generators: one or two models by name."""

    def __init__(self, generators: dict[str, Generator], cfg: ChatRun) -> None:
        self.generators, self.cfg, self.tools = generators, cfg, open_tools(cfg.tools)

    def build(self) -> None:
        cfg, names = self.cfg, list(self.generators)
        self.talk = gradio.State(Talk())
        with gradio.Row():
            self.chatbots = [self.chatbot(letter, visible=letter == "A" or len(names) > 1) for letter in "AB"]
        self.message = gradio.Textbox(
            label="Message", show_label=False, placeholder="Write a message; Enter sends it", submit_btn=SEND,
            elem_id="message", autofocus=True, max_lines=12,
        )  # fmt: skip
        self.sent = gradio.Textbox(visible=False)
        with gradio.Row():
            self.new = gradio.Button("New conversation")
            self.export = gradio.Button("Export")
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
                others = [name for name in cfg.presets if name != cfg.preset]
                second = cfg.preset if len(names) > 1 or not others else others[0]
                self.settings = [self.setting("A", names[0], cfg.preset), self.setting("B", names[-1], second)]
        self.connect()

    def chatbot(self, letter: str, *, visible: bool) -> gradio.Chatbot:
        """Return a chatbot that shows plain text, without Markdown, HTML or pictures from other addresses."""
        return gradio.Chatbot(
            label=letter, visible=visible, height=420, render_markdown=False, buttons=[], layout="bubble",
            min_width=300, elem_id=f"side-{letter}",
        )  # fmt: skip

    def setting(self, letter: str, model: str, preset: str) -> list[Any]:
        """Return the components of one side: model, preset, and the SLIDERS."""
        presets = self.cfg.presets

        def values(name: str) -> list[float]:
            return [getattr(each, name) for each in presets.values()]

        with gradio.Column(min_width=260, visible=letter == "A" or len(self.generators) > 1) as column:
            gradio.Markdown(f"### {letter}")
            choices = gradio.Dropdown(list(self.generators), value=model, label=f"Model {letter}", interactive=True)
            choices.visible = len(self.generators) > 1
            chosen = gradio.Dropdown([*presets, OWN], value=preset, label=f"Preset {letter}", interactive=True)
            heat, top_p, top_k, penalty = self.slid(preset)
            sliders = [
                gradio.Slider(0, max(2.0, *values("temperature")), heat, step=0.05, label=f"Temperature {letter}"),
                gradio.Slider(min(0.01, *values("top_p")), 1, top_p, step=0.01, label=f"Top-p {letter}"),
                gradio.Slider(0, max(200, *values("top_k")), top_k, step=1, label=f"Top-k {letter} (0: all)"),
                gradio.Slider(
                    1, max(2.0, *values("repetition_penalty")), penalty, step=0.01, label=f"Repetition penalty {letter}"
                ),
            ]
        if letter == "B":
            self.second = column
        return [choices, chosen, *sliders]

    def connect(self) -> None:
        view = [*self.chatbots, self.figures]
        inputs = [self.beside, self.system, self.longest, *self.settings[0], *self.settings[1]]
        begun = self.message.submit(
            self.begin, [self.message, self.talk, *inputs], [self.message, self.sent, *view], **QUICK
        )
        answered = begun.success(
            self.answer, [self.sent, self.talk, *inputs], view, api_name="chat", show_progress_on=self.chatbots,
            **ONE_AT_A_TIME,
        )  # fmt: skip
        for over in (answered.then, answered.failure):  # gradio calls `then` after a success and after a stop
            over(self.settle, self.talk, [self.message, *view], **QUICK).then(
                None, None, None, js=FOCUS, api_visibility="private"
            )
        self.message.stop(None, None, None, cancels=[answered], api_visibility="private")
        models = [setting[0] for setting in self.settings]
        gradio.on(
            [self.new.click, self.beside.input, *(each.clear for each in self.chatbots), *(m.input for m in models)],
            self.reset, [self.talk, self.beside], [self.message, *view, self.second], cancels=[answered], **QUICK,
        )  # fmt: skip
        self.export.click(self.exported, [self.talk, *models], self.rows, **QUICK).success(
            None, self.rows, None, js=DOWNLOAD, api_visibility="private"
        )
        for _, preset, *sliders in self.settings:
            preset.input(self.slid, preset, sliders, **QUICK)
            gradio.on([slider.input for slider in sliders], lambda: OWN, None, preset, **QUICK)

    def begin(self, text: str, talk: Talk, *inputs: Any) -> tuple[Any, ...]:
        """Show the message at once, also while other pages are answered."""
        if not (text or "").strip():
            raise page_error("Write a message first.")
        request = self.read_settings(*inputs)
        talk.pending, talk.waiting, talk.answering = text, True, {}
        labelled: list[Any] = [gradio.skip(), gradio.skip()]
        for side, (name, how) in enumerate(request.sides):
            talk.side(side, self.generators[name], request)
            labelled[side] = gradio.Chatbot(talk.shown(side), label=f"{'AB'[side]}: {name}, {describe_sampling(how)}")
        waiting = gradio.Textbox("", submit_btn=False, stop_btn=STOP, interactive=False)
        return waiting, text, *labelled, self.figured(talk)

    def answer(self, text: str, talk: Talk, *inputs: Any) -> Iterator[tuple[Any, ...]]:
        """Write a token on each side in turn, until the answers end, are stopped, or the page is closed."""
        request = self.read_settings(*inputs)
        talk.pending, talk.waiting, talk.busy, talk.seconds = text, True, True, {}
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

    def reset(self, talk: Talk, beside: bool) -> tuple[Any, ...]:
        """Start a new conversation, on one side or on both."""
        talk.discarded = True
        wait_until_idle(talk)
        vars(talk).update(vars(Talk()))
        first = gradio.Chatbot([], label="A"), gradio.Chatbot([], label="B", visible=beside)
        typing = gradio.Textbox("", submit_btn=SEND, stop_btn=False, interactive=True)
        return typing, *first, self.figured(talk), gradio.Column(visible=beside)

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
        half, sides = len(settings) // 2, []
        for model, _, *values in (settings[:half], settings[half:])[: 1 + beside]:
            if model not in self.generators:
                raise page_error("Choose a model.")
            try:
                sides.append((model, SamplingSection(**dict(zip(SLIDERS, values, strict=True)))))
            except ValidationError as error:  # a program can send any value
                words = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
                raise page_error(f"These settings cannot be used: {words}.") from error
        return MessageSettings(sides, (system or "").strip() or None, int(longest), self.tools)

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
        rows = [("", list(answers)), *repetition_figures(answers), ("tokens a second", speed)]
        rows += [("turns out of the model's context", forgotten)] if any(map(int, forgotten)) else []
        return html_table([[label, *values] for label, values in rows])


def _as_said(message: dict[str, Any]) -> tuple[str, str]:
    """Return the role and the text of a message as gradio shows them, which knows no role of tools."""
    if message["role"] != "tool":
        return message["role"], message["content"]
    return "assistant", f"[{message['name']}: {message['content']}]"
