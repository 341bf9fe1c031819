"""Does the chat in the browser do what the terminal's does, for many at once?  In headless Chromium.

What needs a browser is skipped where there is none. Each of those tests fails on an error in the console and on any
request to another address; the server's own connections are watched as well.
"""

from __future__ import annotations

import copy
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio
import httpx
import pytest
import test_browser
import uvicorn
from test_browser import CHROMIUM, CONTRAST
from test_evaluate import tiny_model
from tiny_runs import ROOT, python
from waiting import wait_until

import envs
import inference_with_improved_settings as script
from envs.episode import Episode
from envs.guard import patient_protocol
from envs.protocol import Protocol
from posttrain import config
from posttrain.config.chat import ChatRun
from posttrain.config.data import Source
from posttrain.config.shared import EnvSection, ModelSection
from posttrain.data.filters import keep_dialogue
from posttrain.data.reading import read_rows
from posttrain.models import loading as models
from posttrain.models.chat import Chat
from posttrain.serving.conversation import Conversation, Exchange
from posttrain.serving.display import repetition_figures
from posttrain.serving.generation import Generator
from posttrain.serving.serve import listen
from posttrain.serving.web_chat import about, guard, playing, server, talking
from posttrain.types import SamplingParams, UserError, derive_seed

playwright = pytest.importorskip("playwright.sync_api")
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (on Debian: apt-get install chromium)"
)
expect = playwright.expect
expect.set_options(timeout=20_000)  # other tests share the machine
HTTP = httpx.Client(verify=False)  # nothing here is encrypted, and reading the certificates takes its time
WHITE_SPACE = """(message) => {
  const texts = document.createTreeWalker(message, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) if (texts.currentNode.data.includes("def"))
    return getComputedStyle(texts.currentNode.parentElement).whiteSpace;
}"""
SETTING = "temperature 0.7, top-p 0.9, top-k 50, repetition penalty 1.15"  # the preset of configs/chat.yaml
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> ![x](http://evil.invalid/x.png)"


@dataclass
class Script:
    """What a model is to write, and how slowly; what it was asked. Without a text it writes what it would."""

    text: Callable[[], str] | None = lambda: "yes"
    pause: float = 0.0
    begun: list[str] = field(default_factory=list)  # the prompts, as text
    ended: list[int] = field(default_factory=list)  # the tokens written, of each answer that is over
    params: list[SamplingParams] = field(default_factory=list)


@dataclass(frozen=True)
class Scripted(Generator):
    """A model that writes what a test wants."""

    script: Script = field(default_factory=Script)

    def write(self, ids: list[int], params: SamplingParams, seed: int) -> Iterator[int]:
        script, count = self.script, 0
        script.begun.append(self.chat.decode(ids))
        script.params.append(params)
        told = [*self.chat.content_ids(script.text()), self.chat.stop_id] if script.text else None
        try:
            for token in super().write(ids, params, seed) if told is None else told[: params.max_new_tokens]:
                time.sleep(script.pause)
                count += 1
                yield token
        finally:
            script.ended.append(count)


@pytest.fixture(scope="module")
def cfg() -> ChatRun:
    return config.resolve(ChatRun, ROOT / "configs" / "chat.yaml", ["max_new_tokens=40"])


@pytest.fixture(scope="module")
def both(tiny_chat: Chat) -> list[Scripted]:
    """Two models; all tests share their pages, for a browser takes seconds to read a page for the first time."""
    chats = [copy.deepcopy(tiny_chat) for _ in range(2)]
    return [Scripted(tiny_model(chat, 0), chat) for chat in chats]


@pytest.fixture
def model(both: list[Scripted]) -> Script:
    """What the first model is to write in this test; the second one says `yes`."""
    for each in both:
        vars(each.script).update(vars(Script()))
    return both[0].script


@pytest.fixture(scope="module", autouse=True)
def outside() -> Iterator[list[Any]]:
    """Nothing in this process, gradio included, may connect to another machine or ask for its address."""
    asked: list[Any] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def watched(self: socket.socket, address: Any) -> Any:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            asked.append(address)
        return connect(self, address)

    def looked_up(host: Any, *rest: Any, **more: Any) -> Any:
        if host not in ("127.0.0.1", "::1", "localhost", None):
            asked.append(host)
        return look_up(host, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", watched)
        patch.setattr(socket, "getaddrinfo", looked_up)
        yield asked
    assert asked == []


@contextmanager
def in_thread(app: Any) -> Iterator[str]:
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, http=patient_protocol())
    running = uvicorn.Server(config)
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_until(lambda: running.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def alone(cfg: ChatRun, both: list[Scripted]) -> Iterator[str]:
    """The address of a page with one model."""
    with in_thread(server.build_page({"model 1": both[0]}, cfg, None)) as address:
        yield address


@pytest.fixture(scope="module")
def pair(cfg: ChatRun, both: list[Scripted]) -> Iterator[str]:
    """The address of a page with two."""
    named: dict[str, Generator] = {f"model {number}": each for number, each in enumerate(both, 1)}
    with in_thread(server.build_page(named, cfg, None)) as address:
        yield address


chromium = test_browser.browser  # a fixture


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page; when the test ends, nothing may have gone wrong in it, nor been asked of anybody else."""
    trouble, contexts = [], []

    def open_page(address: str, width: int = 1200, scheme: str = "light", allowed: str = "nothing") -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        mine = (address, "data:", "blob:")
        page.on("request", lambda asked: None if asked.url.startswith(mine) else trouble.append(asked.url))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda said: trouble.append(said.text) if told(said, allowed) else None)
        page.goto(address)
        return page

    def told(said: Any, allowed: str) -> bool:
        return said.type in ("error", "warning") and allowed not in said.text

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def send(page: Any, text: str) -> None:
    page.get_by_placeholder("Write a message").fill(text)
    page.keyboard.press("Enter")


def longest_answer(page: Any, tokens: str) -> None:
    """Set in the settings, again where a page that was still being built has put its own number back."""
    page.get_by_text("Settings").click()
    for _ in range(3):
        page.get_by_label("number input for Longest answer, in tokens").fill(tokens)
        page.keyboard.press("Tab")
        page.wait_for_timeout(200)
        if page.get_by_label("range slider for Longest answer, in tokens").input_value() == tokens:
            return
    raise AssertionError("the page does not take the number")


def said(page: Any, side: int = 0, who: str = "bot") -> Any:
    """The messages of a side."""
    return page.locator(f"#side-{side}").get_by_test_id(who)


def figure(page: Any, label: str) -> list[str]:
    """The figures in one row of the table."""
    return page.locator("#figures tr", has=page.get_by_text(label, exact=True)).locator("td").all_inner_texts()


class Client:
    """A program that uses the chat's one endpoint, with the settings that the page has at first."""

    def __init__(self, address: str) -> None:
        self.http = httpx.Client(base_url=f"{address}/gradio_api", timeout=60)

    def submit(self, text: str, session: str | None = None) -> str:
        """Puts a message into the queue; the number that its answer has, or why it was refused."""
        asked = self.http.get("/info").json()["named_endpoints"]["/chat"]["parameters"]
        data = [text, *(each["parameter_default"] for each in asked[1:])]
        answer = self.http.post("/call/chat", json={"data": data, "session_hash": session}).json()
        return answer.get("event_id") or answer["detail"]

    def result(self, number: str) -> str:
        events = self.http.get(f"/call/chat/{number}").text.split("event: ")
        assert events[-1].startswith("complete\ndata: ")
        return json.loads(events[-1].partition("data: ")[2])[0][-1]["content"][0]["text"]


SETTING_OF_A_SIDE = ("model", "plain", 1.0, 1.0, 0, 1.0)


def chat_tab(generators: dict[str, Generator], cfg: ChatRun) -> talking.ChatTab:
    return talking.ChatTab(generators, cfg, about.describe_models(generators, cfg))


def play_tab(generators: dict[str, Generator], cfg: ChatRun) -> playing.PlayTab:
    return playing.PlayTab(generators, cfg, about.describe_models(generators, cfg))


def at_rest(page: Any) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def lists(page: Any) -> Any:
    """The lists with choices, each of them by its text box."""
    return page.locator("[role=combobox]").locator("visible=true")


def choose(page: Any, label: str, value: str) -> None:
    page.get_by_label(label, exact=True).locator("visible=true").first.click()
    page.get_by_role("option", name=value, exact=True).click()


def pass_every_control(page: Any, first: Any) -> None:
    """Tab from the control on through the page, then open each list, leave it and choose its value again."""
    opened, passed = page.get_by_role("listbox").locator("visible=true"), set()
    first.focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        passed.add(page.evaluate("document.activeElement.ariaLabel"))
    assert passed >= set(lists(page).evaluate_all("all => all.map((one) => one.ariaLabel)"))
    page.evaluate("document.activeElement.blur()")
    expect(opened).to_have_count(0)
    for each in lists(page).all():
        each.click()
        expect(opened).to_have_count(1)
        page.keyboard.press("Escape")
        page.keyboard.press("Shift+Tab")
        page.evaluate("document.activeElement.blur()")
        expect(opened).to_have_count(0)
        each.click()
        page.locator("[role=option][aria-selected=true]").click()
        expect(opened).to_have_count(0)


@contextmanager
def asks_nothing(page: Any) -> Iterator[None]:
    """The page sends nothing that could change a conversation or a level."""
    asked: list[str] = []

    def note(request: Any) -> None:
        if request.method == "POST":
            asked.append(f"{request.url} {request.post_data}")

    page.on("request", note)
    yield
    page.wait_for_timeout(300)
    page.remove_listener("request", note)
    assert asked == []


# ------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.thorough
@in_browser
def test_a_conversation_by_keyboard_is_that_of_the_terminal(
    alone: str, visit: Callable[..., Any], model: Script, both: list[Scripted], cfg: ChatRun
) -> None:
    """Same tokens, same seeds, same figures, the history in context."""
    model.text = None
    real = Generator(both[0].model, both[0].chat)
    page = visit(alone)
    page.get_by_placeholder("Write a message").focus()
    talk = Conversation(real.chat, real.context, cfg.max_new_tokens)
    for number, text in enumerate(("Which way?", "And then?")):
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        expect(said(page)).to_have_count(number + 1)
        at_rest(page)
        params = cfg.presets[cfg.preset].params(cfg.max_new_tokens)
        answer = real.answer(talk.prompt(text), params, derive_seed(cfg.seed, "chat", number))
        list(answer)
        talk.exchanges.append(Exchange(text, answer.ids, answer.finished, answer.text))
        expect(said(page).nth(number)).to_have_text(answer.text, use_inner_text=True)
        expect(said(page, who="user").nth(number)).to_have_text(text)
        for label, values in repetition_figures({"A": answer}):
            assert figure(page, label) == values
        expect(page.get_by_placeholder("Write a message")).to_be_focused()
    assert int(figure(page, "tokens a second")[0]) > 0
    page.get_by_role("button", name="New conversation").click()
    expect(said(page)).to_have_count(0)
    assert page.locator("#figures table").count() == 0


@pytest.mark.thorough
@in_browser
def test_it_streams_stops_and_goes_on(alone: str, visit: Callable[..., Any], model: Script) -> None:
    model.text, model.pause = lambda: "apples and " * 200, 0.03
    page = visit(alone)
    longest_answer(page, "900")
    send(page, "Count.")
    expect(said(page, who="user")).to_have_text("Count.")
    seen = set()
    while len(seen) < 4:
        seen.add((said(page).first.inner_text() if said(page).count() else "", *figure(page, "tokens")[:1]))
    assert not model.ended and page.get_by_placeholder("Write a message").is_disabled()
    page.get_by_role("button", name="Stop", exact=True).locator("visible=true").click()
    at_rest(page)
    assert len(model.ended) == 1 and 3 <= model.ended[0] < 400
    assert figure(page, "finished") == ["no"]
    shown = said(page).inner_text()
    assert shown and ("apples and " * 200).startswith(shown)
    send(page, "Again.")
    expect(said(page)).to_have_count(2)
    page.get_by_role("button", name="New conversation").click()  # it ends the answer as well
    wait_until(lambda: len(model.ended) == 2)
    assert model.ended[1] < 400
    assert f"{shown}" in model.begun[1], "what was stopped stands in the history"
    expect(said(page)).to_have_count(0)


def test_an_answer_that_a_new_conversation_ends_shows_nothing_more(both: list[Scripted], cfg: ChatRun) -> None:
    """Whichever of the two waits for its end wakes up first: the page may get what this one shows after the other's."""
    tab, talk = chat_tab({"model": both[0]}, cfg), talking.Talk(busy=True)
    conversation = talk.side(0, both[0], talking.MessageSettings([], None, 40))
    found: list[Any] = []
    waits = threading.Thread(target=lambda: found.extend(tab.settle(talk)))
    reset = threading.Thread(target=lambda: tab.reset(talk, False, "", 40, *SETTING_OF_A_SIDE * 2))
    honest = talking.wait_until_idle

    def late(what: Any) -> None:
        honest(what)
        if threading.current_thread() is reset:
            waits.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talking, "wait_until_idle", late)
        for thread in (reset, waits):
            thread.start()
        wait_until(lambda: talk.discarded)
        conversation.exchanges.append(Exchange("Count.", [5], False, "one"))
        talk.busy = False
        reset.join()
    assert not talk.sides[0] and all(each == gradio.skip() for each in found) and len(found) == 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"temperature": 1e-300}, "temperature: .*the smallest temperature above 0 is 1e-05"),
        ({"top_p": 0}, "These settings cannot be used: top_p"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"model": None}, "Choose a model"),
    ],
)
def test_settings_that_no_slider_has_are_refused_in_words(
    both: list[Scripted], cfg: ChatRun, changed: dict[str, Any], words: str
) -> None:
    """The model is not blamed for them, nor does the log get a traceback."""
    tab = chat_tab({"model": both[0]}, cfg)
    given = {"model": "model", "preset": "greedy", "temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1}
    for call in (tab.begin, lambda *inputs: next(tab.answer(*inputs))):
        with pytest.raises(gradio.Error, match=words) as told:
            call("Hi", talking.Talk(), False, None, 20.0, *(given | changed).values(), *given.values())
        assert not told.value.print_exception
    (shown, *_) = list(tab.answer("Hi", talking.Talk(), False, None, 1.0, *given.values(), *given.values()))[-1]
    assert len(shown) == 2


@pytest.mark.parametrize("beside", ["yes", None, 1.5, -1])
def test_a_program_that_asks_for_no_number_of_sides_is_told(both: list[Scripted], cfg: ChatRun, beside: Any) -> None:
    tab = chat_tab({"model": both[0]}, cfg)
    for call in (tab.begin, lambda *inputs: next(tab.answer(*inputs))):
        with pytest.raises(gradio.Error, match="`Side by side` is true or false"):
            call("Hi", talking.Talk(), beside, None, 20, *SETTING_OF_A_SIDE * 2)


@in_browser
@pytest.mark.slow
def test_presets_sliders_and_system_message_are_what_is_sampled_with(
    alone: str, visit: Callable[..., Any], model: Script
) -> None:
    page = visit(alone)
    page.get_by_text("Settings").click()
    page.get_by_label("System message").fill("Speak slowly.")
    page.get_by_label("Preset").locator("visible=true").click()
    page.get_by_role("option", name="plain").click()
    heat = page.get_by_label("number input for Temperature").first
    expect(heat).to_have_value("1")
    send(page, "Hi")
    expect(said(page)).to_have_count(1)
    at_rest(page)
    page.get_by_label("range slider for Temperature").first.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(heat).to_have_value("1.2")
    expect(page.get_by_label("Preset").first).to_have_value("own settings")
    send(page, "Hi")
    expect(said(page)).to_have_count(2)
    at_rest(page)
    assert model.params == [SamplingParams(40), SamplingParams(40, temperature=1.2)]
    assert all("Speak slowly." in prompt for prompt in model.begun)
    expect(page.locator("#about-0")).to_contain_text("Sampling: temperature 1.2")


@in_browser
@pytest.mark.slow
def test_two_models_side_by_side_and_the_exported_file(
    pair: str, visit: Callable[..., Any], model: Script, both: list[Scripted], tmp_path: Path
) -> None:
    texts = ["left", "right, which is longer"]
    for each, text in zip(both, texts, strict=True):
        each.script.text = lambda text=text: text
    page = visit(pair)
    send(page, "Who?")
    expect(said(page, 0)).to_have_text("left")
    expect(said(page, 1)).to_have_text("right, which is longer")
    at_rest(page)
    counts = [len(each.chat.content_ids(text)) for each, text in zip(both, texts, strict=True)]
    assert figure(page, "tokens") == [str(count) for count in counts]
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "chat.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    asked = {"role": "user", "content": "Who?"}
    assert download.value.suggested_filename == "chat.jsonl" and rows == [
        {"model": "model 1", "settings": [SETTING], "messages": [asked, {"role": "assistant", "content": "left"}]},
        {"model": "model 2", "settings": [SETTING], "messages": [asked, {"role": "assistant", "content": texts[1]}]},
    ]
    page.get_by_text("Settings").click()
    page.get_by_label("Side by side").uncheck()
    expect(page.locator("#side-1")).to_be_hidden()
    expect(said(page)).to_have_count(0)
    send(page, "Alone?")
    expect(said(page)).to_have_text("left")
    at_rest(page)
    assert [len(each.script.begun) for each in both] == [2, 1]


@pytest.mark.thorough
@in_browser
def test_what_a_model_writes_is_never_html_and_errors_are_shown(
    alone: str, visit: Callable[..., Any], model: Script
) -> None:
    model.text = lambda: HOSTILE
    page = visit(alone, allowed="too long")
    longest_answer(page, "900")
    send(page, HOSTILE)
    expect(said(page)).to_have_text(HOSTILE)
    expect(said(page, who="user")).to_have_text(HOSTILE)
    at_rest(page)
    assert page.evaluate("window.hacked") is None and page.locator("#side-0 :is(img, script)").count() == 0
    send(page, "word " * 3000)
    expect(page.get_by_text("This message is too long")).to_be_visible()
    expect(page.get_by_placeholder("Write a message")).to_have_value("word " * 3000)  # to be shortened
    expect(said(page)).to_have_count(1)


@pytest.mark.thorough
@in_browser
def test_what_the_page_refuses_is_said_on_it(
    pair: str, visit: Callable[..., Any], model: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    """An empty message, an export of nothing: no error in the console nor in the log."""
    page = visit(pair)
    words = page.get_by_text("Write a message first.")
    page.get_by_placeholder("Write a message").focus()
    page.keyboard.press("Enter")
    expect(words).to_have_count(1)
    page.get_by_role("button", name="Send").click()
    expect(words).to_have_count(2)
    send(page, "   ")
    expect(words).to_have_count(3)
    page.get_by_role("button", name="Export").click()
    expect(page.get_by_text("Nothing to export yet: no message has an answer.")).to_be_visible()
    assert model.begun == []
    send(page, "Hi")
    expect(said(page)).to_have_text("yes")
    at_rest(page)
    assert capfd.readouterr().err == ""


@in_browser
@pytest.mark.slow
def test_texts_are_shown_as_they_were_written(alone: str, visit: Callable[..., Any], model: Script) -> None:
    code = "\n  def f(x):\n    if x:\n\treturn  1\n    return 0\n\n"
    model.text = lambda: code
    page = visit(alone)
    send(page, code)
    expect(said(page)).to_have_count(1)
    at_rest(page)
    for who in ("user", "bot"):
        shown = said(page, who=who)
        assert code in shown.text_content()
        assert shown.evaluate(WHITE_SPACE) == "pre-wrap"


@pytest.mark.thorough
@in_browser
def test_settings_that_do_not_change_keep_the_conversation(pair: str, visit: Callable[..., Any], model: Script) -> None:
    """Every control passed by Tab, and every value chosen again, also during an answer; another model starts anew."""
    model.text, model.pause = lambda: "apples and " * 12, 0.3
    page = visit(pair)
    page.get_by_text("Settings").click()
    expect(lists(page)).to_have_count(4)
    send(page, "Count.")
    expect(page.get_by_role("button", name="Stop", exact=True).locator("visible=true")).to_be_visible()
    first = page.get_by_label("Side by side")
    with asks_nothing(page):
        choose(page, "Model", "model 1")
        first.focus()
        for _ in range(12):
            page.keyboard.press("Tab")
    assert not model.ended, "this was during the answer"
    model.pause = 0
    expect(said(page, 1)).to_have_text("yes")
    at_rest(page)
    expect(said(page)).to_have_text(("apples and " * 12).strip())
    model.text = lambda: "yes"
    heat = page.get_by_label("number input for Temperature").first
    heat.fill("1.3")
    expect(lists(page).nth(1)).to_have_value("own settings")
    page.wait_for_timeout(300)
    with asks_nothing(page):
        pass_every_control(page, first)
    expect(said(page)).to_have_count(1)
    expect(heat).to_have_value("1.3")
    expect(lists(page).nth(1)).to_have_value("own settings")
    choose(page, "Preset", "plain")
    expect(heat).to_have_value("1")
    expect(said(page)).to_have_count(1)
    choose(page, "Model", "model 2")
    expect(said(page)).to_have_count(0)
    send(page, "Who?")
    expect(said(page)).to_have_text("yes")
    at_rest(page)
    lists(page).first.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(lists(page).first).to_have_value("model 1")
    expect(said(page)).to_have_count(0)


def test_an_export_holds_messages_and_settings(
    cfg: ChatRun, both: list[Scripted], model: Script, tmp_path: Path
) -> None:
    """The system message of each answer, its setting, and whether it was cut short; phase 1 takes what is whole."""
    tab, talk = chat_tab({"model 1": both[0]}, cfg), talking.Talk()
    model.text = lambda: "a b c"

    def ask(text: str, system: str = "", longest: int = 40) -> None:
        """Two settings of one model, the second one hotter with each message."""
        second = ["model 1", "own settings", 1.0 + talk.number, 1.0, 0, 1.0]
        inputs = [True, system, longest, "model 1", "plain", 1.0, 1.0, 0, 1.0, *second]
        tab.begin(text, talk, *inputs)
        list(tab.answer(text, talk, *inputs))

    ask("Who are you?", "You are A.")
    ask("And you?", "You are B.")
    assert "And you?" in model.begun[2] and "Who are you?" not in model.begun[2]
    ask("More?", "You are B.")
    ask("All of it!", "You are B.", longest=2)
    exported = tab.exported(talk, "model 1", "model 1")
    first, second = map(json.loads, exported.splitlines())
    assert first["settings"] == ["temperature 1"] * 3
    assert second["settings"] == ["temperature 2", "temperature 3", "temperature 4"]
    whole = [{"role": "system", "content": "You are B."}]
    for text in ("And you?", "More?"):
        whole += [{"role": "user", "content": text}, {"role": "assistant", "content": "a b c"}]
    cut = {"role": "assistant", "content": talk.answers["A"].text, "finished": False}
    assert first["messages"] == second["messages"] == [*whole, {"role": "user", "content": "All of it!"}, cut]
    (file := tmp_path / "chat.jsonl").write_text(exported)
    source = Source(kind="messages", path=str(file))
    for row in read_rows(source, "data.sources.0", 0):
        example = keep_dialogue(row, source, None)  # type: ignore[arg-type]
        assert not isinstance(example, str) and example.dialogues == [whole]
    row = {"messages": [whole[0], whole[1], cut]}
    assert keep_dialogue(row, source, None) == "an answer that was cut short"  # type: ignore[arg-type]


def test_tools_are_called_and_calls_results_and_errors_are_shown(
    cfg: ChatRun, both: list[Scripted], model: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generator, "context", 8192)
    with_tools = cfg.model_copy(
        update={"tools": ["examples.own_tool:calculate"], "max_calls": 2, "max_new_tokens": 400}
    )
    tab, talk = chat_tab({"model 1": both[0]}, with_tools), talking.Talk()

    def call(expression: str) -> str:
        arguments = json.dumps({"expression": expression})
        return f'<tool_call>\n{{"name": "calculate", "arguments": {arguments}}}\n</tool_call>'

    turns = iter([call("2+3"), call("<img>"), "It is 5.", "Bye."])
    model.text = lambda: next(turns)
    setting = ["model 1", "plain", 1.0, 1.0, 0, 1.0]
    for text in ("What is 2+3?", "Thanks."):
        inputs = [False, "", 400, *setting, *setting]
        tab.begin(text, talk, *inputs)
        (*_, (shown, *_)) = tab.answer(text, talk, *inputs)
    said = [(each["role"], each["content"][0]["text"]) for each in shown]
    assert [role for role, _ in said] == ["user", *["assistant"] * 5, "user", "assistant"]
    assert said[1][1].startswith("&lt;tool_call&gt;") and said[2][1] == "5"
    assert said[4][1].startswith("Error: ") and "&lt;img&gt;" in said[3][1]
    titles = [each.get("metadata", {}).get("title") for each in shown]
    assert titles == [None, *["Calls calculate", "Result of calculate"] * 2, None, None, None]
    assert [text for _, text in said[5:]] == ["It is 5.", "Thanks.", "Bye."]
    (file := tmp_path / "chat.jsonl").write_text(tab.exported(talk, "model 1", "model 1"))
    (row,) = read_rows(Source(kind="messages", path=str(file)), "data.sources.0", 0)
    whole = both[0].chat.encode(row["messages"], row["tools"]).ids
    ids = talk.sides[0].prompt("And?") if talk.sides[0] else []
    assert ids[: len(whole) - 1] == whole[:-1]  # the line feed behind the last answer aside


# ------------------------------------------------------------------------------------------------------------- play


def open_play(page: Any) -> Any:
    """Open the tab, which opens the first level; the list of the turns."""
    page.get_by_role("tab", name="Play").click()
    expect(page.locator("#level-view .turns")).to_be_visible()
    return page.locator("#level-view .turns > li")


@pytest.mark.thorough
@in_browser
def test_it_plays_a_level_to_the_end_one_turn_a_click(
    alone: str, visit: Callable[..., Any], model: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Any] = []  # of each level the one that is played, and the one that is drawn

    def opened(cfg: ChatRun, name: str) -> Any:
        played.append(envs.make("frozen_lake"))
        return played[-1]

    monkeypatch.setattr(playing, "open_played_env", opened)
    model.text = lambda: f"<think>so I must</think><answer>{played[-2].expert()}</answer>"
    page = visit(alone)
    turns = open_play(page)
    page.get_by_role("button", name="Next level").click()
    game = Episode(envs.make("frozen_lake"), Protocol(), derive_seed(0, "frozen_lake", 1), "test")
    picture = page.locator("#level-view img")
    expect(page.locator("#level-view h2")).to_contain_text("level 2")
    expect(turns.last.locator(".seen").last).to_have_text(game.messages[-1]["content"], use_inner_text=True)
    frames, total = {picture.get_attribute("src")}, 0.0
    while not game.done:
        turn = game.step(f"<think></think><answer>{game.env.expert()}</answer>")
        total += turn.reward
        page.get_by_role("button", name="One turn").click()
        row = turns.nth(game.turns - 1)
        expect(row.locator(".chosen")).to_have_text(game.actions[-1])
        expect(row.locator(".thought")).to_have_text("so I must")
        expect(row.locator(".meta")).to_contain_text(f"reward {'+' * (turn.reward > 0)}{turn.reward:g}")
        expect(picture).to_have_attribute("alt", f"frozen_lake, picture {game.turns} of {game.turns}")
        frames.add(picture.get_attribute("src"))
    outcome = f"Solved after {game.turns} turn{'s' * (game.turns > 1)}, return {round(total, 6):g}."
    expect(page.locator("#status b")).to_have_text(outcome)
    assert game.success and len(frames) == game.turns + 1
    expect(page.locator("#level-view .badge")).to_have_text("solved")
    for name in ("One turn", "Play the level"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    assert model.params[0] == SamplingParams(64), "as in the rollouts"


@pytest.mark.thorough
@in_browser
def test_a_whole_level_plays_itself_and_goes_back_by_the_slider(
    alone: str, visit: Callable[..., Any], model: Script
) -> None:
    """The player follows the level; its slider goes back, and its speed is chosen."""
    model.text = lambda: "<think>" + "x" * len(model.begun) + "</think><answer>Left</answer>"
    page = visit(alone)
    turns = open_play(page)
    expect(page.get_by_label("speed")).to_be_hidden()  # there is one picture
    page.get_by_role("button", name="Play the level").click()
    page.get_by_label("speed").select_option("4")
    expect(page.locator("#level-view .badge")).not_to_be_empty()
    count = len(model.begun)
    assert turns.count() == count > 1 and page.get_by_label("speed").input_value() == "4"
    place = page.locator("#level-view output")
    expect(place).to_have_text(f"{count} / {count}")
    page.get_by_label("moment").focus()
    page.keyboard.press("Home")
    expect(place).to_have_text(f"0 / {count}")
    page.get_by_label("play", exact=True).click()
    expect(place).to_have_text(f"{count} / {count}")
    page.get_by_role("button", name=f"turn {count - 1}", exact=True).click()
    expect(turns.nth(count - 2)).to_have_attribute("aria-current", "step")
    page.get_by_label("Level").fill("3")
    expect(page.locator("#level-view h2")).to_contain_text("level 3")
    expect(page.get_by_role("button", name="Play the level")).to_be_enabled()
    assert page.locator("#level-view .words").count() == 0


@in_browser
@pytest.mark.slow
def test_a_turn_that_is_stopped_was_not_played(alone: str, visit: Callable[..., Any], model: Script) -> None:
    model.text, model.pause = lambda: "<think>" + "so " * 60, 0.05
    page = visit(alone)
    open_play(page)
    page.get_by_label("Environment").click()
    page.get_by_role("option", name="countdown").click()
    expect(page.locator("#level-view .seen").last).to_contain_text("The numbers are")
    assert page.locator("#level-view img").count() == 0
    page.get_by_role("button", name="Play the level").click()
    expect(page.locator("#status span")).to_contain_text("so so so")
    page.get_by_role("button", name="Stop").locator("visible=true").click()
    expect(page.get_by_role("button", name="One turn")).to_be_enabled()
    expect(page.locator("#status b")).to_contain_text("Turn 1 of")
    assert len(model.ended) == 1 and page.locator("#level-view .words").count() == 0


@in_browser
@pytest.mark.slow
def test_a_turn_belongs_to_the_level_it_was_asked_for(
    alone: str, visit: Callable[..., Any], model: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another level is opened while the turn is written, and while it waits."""
    model.text, model.pause = lambda: "<think>" + "so " * 60, 0.05
    page, other = visit(alone), Client(alone)
    open_play(page)
    level, step = page.get_by_label("Level"), page.get_by_role("button", name="One turn")

    def open_another(number: int) -> None:
        game = Episode(envs.make("frozen_lake"), Protocol(), derive_seed(0, "frozen_lake", number - 1), "test")
        level.fill(str(number))
        expect(page.locator("#level-view h2")).to_contain_text(f"level {number}")
        expect(page.locator("#level-view .seen").last).to_have_text(game.messages[-1]["content"], use_inner_text=True)
        expect(step).to_be_enabled()

    step.click()
    expect(page.locator("#status span")).to_contain_text("so so so")
    open_another(7)
    wait_until(lambda: model.ended)
    assert model.ended[0] < 60
    model.text = lambda: "ever " * 35
    waits = other.submit("first")
    wait_until(lambda: len(model.begun) == 2)
    step.click()
    expect(page.get_by_text("queue: 1/1").first).to_be_visible()
    open_another(9)
    model.pause = 0
    other.result(waits)
    other.result(other.submit("last"))  # whatever had waited before it is over
    assert len(model.begun) == 3 and "last" in model.begun[2]
    expect(page.locator("#status b")).to_contain_text("Turn 1 of")
    expect(page.locator("#status span")).to_have_text("")
    assert page.locator("#level-view .words").count() == 0
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
@in_browser
def test_choices_that_do_not_change_keep_the_level(pair: str, visit: Callable[..., Any], model: Script) -> None:
    """Every control passed by Tab, and every value chosen again, also during a turn; a real choice opens a level."""
    model.text, model.pause = lambda: "<think>" + "so " * 24 + "</think><answer>Left</answer>", 0.3
    page = visit(pair)
    open_play(page)
    expect(lists(page)).to_have_count(3)
    turn, first = page.locator("#status b"), page.get_by_role("tab", name="Play")
    page.get_by_role("button", name="One turn").click()
    expect(page.locator("#status span")).to_contain_text("so so")
    with asks_nothing(page):
        for label, value in (("Model", "model 1"), ("Sampling", playing.ROLLOUTS)):
            choose(page, label, value)
        first.focus()
        for _ in range(6):
            page.keyboard.press("Tab")
    assert not model.ended, "this was during the turn"
    model.pause = 0
    expect(turn).to_contain_text("Turn 2 of")
    expect(page.get_by_role("button", name="One turn")).to_be_enabled()
    with asks_nothing(page):
        pass_every_control(page, first)
    expect(turn).to_contain_text("Turn 2 of")
    for label, value in (("Environment", "sokoban"), ("Sampling", "greedy"), ("Model", "model 2")):
        choose(page, label, value)
        expect(turn).to_contain_text("Turn 1 of")
        page.get_by_role("button", name="One turn").click()
        expect(turn).not_to_contain_text("Turn 1 of")
        expect(page.get_by_role("button", name="Stop").locator("visible=true")).to_be_disabled()
    page.get_by_label("Level").fill("3")
    expect(page.locator("#level-view h2")).to_contain_text("level 3")


@pytest.mark.thorough
@in_browser
@pytest.mark.parametrize("key", ["Tab", "Shift+Tab"])
def test_a_list_closes_when_it_loses_the_focus(pair: str, visit: Callable[..., Any], model: Script, key: str) -> None:
    page = visit(pair)
    open_play(page)
    opened = page.get_by_role("listbox").locator("visible=true")
    (lists(page).first if key == "Tab" else page.get_by_role("button", name="Play the level")).focus()
    for _ in range(5):
        page.keyboard.press(key)
        page.wait_for_timeout(250)
        expect(opened).to_have_count(int(page.evaluate("document.activeElement.role") == "combobox"))
    expect(page.locator("[role=combobox][aria-expanded=true]")).to_have_count(opened.count())


@pytest.mark.thorough
@in_browser
def test_numbers_that_are_no_levels_are_refused_in_words(
    alone: str, visit: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    page = visit(alone)
    open_play(page)
    level, shown = page.get_by_label("Level"), page.locator("#level-view h2")
    following = page.get_by_role("button", name="Next level")
    words = page.get_by_text("A level has a whole number from 1 to 1,000,000,000.")

    def refused() -> None:
        expect(words).to_have_count(1)
        page.locator(".toast-close").click()
        expect(words).to_have_count(0)

    for number, after in (("0", 1), ("-3", 1), ("1.5", 2), ("1e30", None), ("1000000000", None)):
        level.fill("7")
        expect(shown).to_contain_text("level 7")
        level.fill(number)
        if number == "1000000000":
            expect(shown).to_contain_text("level 1000000000")
        else:
            refused()
            expect(shown).to_contain_text("level 7")
        following.click()
        if after is None:
            refused()
        else:
            expect(shown).to_contain_text(f"level {after}")
            expect(level).to_have_value(str(after))
    assert capfd.readouterr().err == ""


def test_a_turn_that_comes_too_late_to_be_cancelled_is_void() -> None:
    """The page may ask for a turn just after it has opened another level, too late for gradio to cancel it."""
    seat = playing.Seat(opened=2)
    assert list(playing.PlayTab.turn(SimpleNamespace(), seat, 1)) == []  # type: ignore[arg-type]


@pytest.fixture
def own_prompts(tmp_path: Path) -> EnvSection:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n} + {5 - n}", "answer": "5"}) + "\n" for n in range(40)))
    return EnvSection(name="prompts", options={"path": str(file), "rewards": ["exact_match"]})


def test_own_prompts_are_scored_in_the_browser_too(
    cfg: ChatRun, both: list[Scripted], model: Script, own_prompts: EnvSection
) -> None:
    tab, seat = play_tab({"model 1": both[0]}, cfg.model_copy(update={"envs": [own_prompts]})), playing.Seat()
    for said, reward, status in (("5", 1, "Solved"), ("6", 0, "Not solved (wrong answer)")):
        model.text = lambda said=said: said
        tab.open(seat, "model 1", "prompts", 1, playing.ROLLOUTS)
        list(tab.turn(seat))
        assert seat.turns == [["1", said, f"{said}, reward {reward}"]]
        assert f"<b>{status} after 1 turn, return {reward}.</b>" in tab.view(seat)[1]


def test_tools_are_called_in_the_browser(
    cfg: ChatRun, both: list[Scripted], model: Script, own_prompts: EnvSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generator, "context", 8192)
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2+3"}}\n</tool_call>'
    env = own_prompts.model_copy(update={"tools": ["examples.own_tool:calculate"]})
    update = {"envs": [env], "max_completion_length": 200}
    tab, seat = play_tab({"model 1": both[0]}, cfg.model_copy(update=update)), playing.Seat()
    tab.open(seat, "model 1", "prompts", 1, playing.ROLLOUTS)
    model.text = lambda: call
    list(tab.turn(seat))
    shown, status, *_ = tab.view(seat)
    assert "<b>Turn 2, return so far 0.</b>" in status
    result = {"role": "tool", "content": "5", "call": 'calculate(expression="2+3")', "failed": False}
    assert shown["row"]["messages"][-1] == result and shown["row"]["won"] is None
    model.text = lambda: "5"
    list(tab.turn(seat))
    assert seat.turns == [["1", call, "calls calculate, reward 0"], ["2", "5", "5, reward 1"]]
    assert "<b>Solved after 2 turns, return 1.</b>" in tab.view(seat)[1]
    row = tab.view(seat)[0]["row"]
    assert (row["end"], row["moments"], row["actions"]) == ("solved", [[0, 0], [1, 0]], [[], ["5"]])
    with pytest.raises(gradio.Error, match="not over"):
        next(tab.play(seat))


def test_every_action_of_a_turn_is_a_picture_of_the_level_that_is_played(
    cfg: ChatRun, both: list[Scripted], model: Script
) -> None:
    options = {"max_turns": 2, "max_actions_per_turn": 3}
    two = cfg.model_copy(update={"protocol": cfg.protocol.model_copy(update=options)})
    tab, seat = play_tab({"model 1": both[0]}, two), playing.Seat()
    model.text = lambda: "<think></think><answer>Left || Left</answer>"
    shown, *_ = tab.open(seat, "model 1", "frozen_lake", 1, playing.ROLLOUTS)
    assert shown["row"]["moments"] == [(-1, 0)] and len(shown["pictures"]) == 1
    assert seat.view is not None and seat.level is not None
    list(tab.turn(seat))
    row = seat.view.state(1)["row"]
    done = len(row["actions"][0])
    assert done >= 1 and row["actions"][0] == ["Left"] * done and len(row["frames"]) == 1 + done
    assert row["moments"] == [(-1, 0), *((0, number) for number in range(1, 1 + done))]
    drawn = envs.make("frozen_lake", render_mode="rgb_array")
    drawn.reset(seed=seat.level.episode.seed, options={"split": "test"})
    for action in row["actions"][0]:
        drawn.step(action)
    assert seat.view.pictures.add([drawn.render()]) == [row["frames"][-1]]


@pytest.mark.parametrize("level", ["2", "two", [1], {"level": 1}, True, float("nan")])
def test_a_level_that_is_no_number_is_refused_in_words(both: list[Scripted], cfg: ChatRun, level: Any) -> None:
    tab = play_tab({"model 1": both[0]}, cfg)
    with pytest.raises(gradio.Error, match="A level has a whole number from 1"):
        tab.open(playing.Seat(), "model 1", "frozen_lake", level, playing.ROLLOUTS)


def test_a_level_that_cannot_be_opened_leaves_none(cfg: ChatRun, both: list[Scripted]) -> None:
    tab, seat = play_tab({"model 1": both[0]}, cfg), playing.Seat()
    tab.open(seat, "model 1", "frozen_lake", 1, playing.ROLLOUTS)
    with pytest.raises(gradio.Error, match="--play nothing_like_it"):
        tab.open(seat, "model 1", "nothing_like_it", 1, playing.ROLLOUTS)
    assert tab.view(seat)[:2] == (None, "")
    assert all(each == gradio.skip() for each in tab.open(seat, "model 1", "frozen_lake", None, playing.ROLLOUTS))


# ------------------------------------------------------------------------------------------------------ many, and few


def test_ten_at_once_are_answered_in_the_order_they_came(alone: str, model: Script) -> None:
    model.text, model.pause = lambda: "a b c", 0.02
    clients = [Client(alone) for _ in range(10)]
    numbers = [client.submit(f"I am {number}.") for number, client in enumerate(clients)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(Client.result, clients, numbers))
    assert answers == ["a b c"] * 10
    assert [re.findall(r"I am (\d)", prompt) for prompt in model.begun] == [[str(number)] for number in range(10)]


def test_nobody_takes_ten_places(alone: str, model: Script) -> None:
    """One answer that is being written and one message that waits; then it is the other's turn."""
    model.text, model.pause = lambda: "a b c", 0.1
    client = Client(alone)
    client.submit("first", "many")
    wait_until(lambda: model.begun)
    client.submit("second", "many")
    for _ in range(8):
        assert "in the queue already" in client.submit("more", "many")
    assert client.result(client.submit("other")) == "a b c"
    assert [re.findall("first|second|more|other", prompt)[-1] for prompt in model.begun] == ["first", "second", "other"]


@pytest.mark.thorough
@in_browser
def test_a_closed_tab_frees_its_slot_and_its_place_in_the_queue(
    alone: str, visit: Callable[..., Any], model: Script
) -> None:
    model.text, model.pause = lambda: "on " * 1000 if len(model.begun) == 1 else "done", 0.05
    busy, waiting, last = (visit(alone) for _ in range(3))
    longest_answer(busy, "1000")
    send(busy, "first")
    wait_until(lambda: model.begun)
    for page, text in ((waiting, "second"), (last, "third")):
        send(page, text)
        expect(said(page, who="user")).to_have_text(text)
    expect(last.get_by_text("queue: 2/2")).to_be_visible()
    waiting.close()
    last.wait_for_timeout(2000)  # the server has noticed that before the slot is free
    busy.close()
    expect(said(last)).to_have_text("done")
    at_rest(last)
    assert model.ended[0] < 500 and len(model.begun) == 2 and "third" in model.begun[1]


# ---------------------------------------------------------------------------------------------- strangers on the web


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another server of this machine
        ({"Host": "evil.example"}, 403),  # whose name leads to 127.0.0.1
        ({"Host": "127.0.0.1.evil.example:7860", "Origin": "http://127.0.0.1.evil.example:7860"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "[::1]:7860", "Origin": "http://[::1]:7860"}, 200),
        ({"Host": "localhost:7860", "Origin": "http://localhost:7860"}, 200),
    ],
)
def test_another_website_is_refused(alone: str, headers: dict[str, str], status: int) -> None:
    for path in ("config", "gradio_api/info"):
        answer = HTTP.get(f"{alone}/{path}", headers=headers)
        assert answer.status_code == status and "access-control" not in str(answer.headers).lower()
    asked = {**headers, "Access-Control-Request-Method": "POST"}
    answer = HTTP.options(f"{alone}/gradio_api/queue/join", headers=asked)
    assert (answer.status_code == 403) is (status == 403) and "access-control" not in str(answer.headers).lower()


def test_a_password_is_guessed_once_a_second_and_its_cookie_stays_here(
    cfg: ChatRun, both: list[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a server with TLS the page has any name; its password keeps a website that took the name out."""
    monkeypatch.setattr(guard, "WRONG", 0.1)
    named = {"Host": "chat.example", "Origin": "https://chat.example"}
    with in_thread(server.build_page({"model 1": both[0]}, cfg, "right")) as address:
        assert HTTP.get(f"{address}/config", headers=named).status_code == 401
        assert HTTP.get(f"{address}/openapi.json", headers=named).status_code in (401, 404)
        told = HTTP.get(f"{address}/manifest.json", headers=named)
        assert told.status_code == 200 and "model 1" not in told.text
        assert "model 1" not in HTTP.get(address, headers=named).text

        def guess(password: str) -> httpx.Response:
            typed = {"username": "me", "password": password}
            return HTTP.post(f"{address}/login", data=typed, headers=named, timeout=60)

        began = time.monotonic()
        with ThreadPoolExecutor(20) as pool:
            statuses = [answer.status_code for answer in pool.map(guess, map(str, range(40)))]
        read = statuses.count(400)
        assert read >= guard.MOST_GUESSES and read + statuses.count(429) == 40
        assert time.monotonic() - began > read * 0.1
        answer = guess("right")
        assert answer.status_code == 200
        assert [re.findall("(?i)samesite=([a-z]+)", cookie) for cookie in answer.headers.get_list("set-cookie")] == [
            ["lax"]
        ] * 2
        named["Origin"] = "https://evil.example"
        assert guess("right").status_code == 403


def test_nothing_is_read_of_who_has_not_logged_in(
    cfg: ChatRun, both: list[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "WRONG", 0.1)
    app = server.build_page({"model 1": both[0]}, cfg, "right")
    with in_thread(app) as address, httpx.Client(base_url=address, timeout=60) as visitor:
        places = ("queue/join", "run/chat", "call/chat", "cancel", "reset", "component_server", "upload", "stream/a")
        for place in places:
            answer = visitor.post(f"/gradio_api/{place}", content=b'{"data": ["' + b"x" * 5_000_000)
            assert (answer.status_code, answer.json()) == (401, {"detail": "Log in first."})
        for path in ("/login", "/login/"):
            answer = visitor.post(path, data={"username": "me", "password": "x" * 20_000})
            assert answer.status_code == 413
        assert visitor.post("/login", content=b"\xff" * 100).status_code in (400, 422)
        assert visitor.post("/login", data={"username": "me", "password": "right"}).status_code == 200
        cancel = {"session_hash": "a", "fn_index": 0, "event_id": "b"}
        assert visitor.post("/gradio_api/cancel", json=cancel).status_code == 200
        assert visitor.post("/gradio_api/queue/join", content=b"[" * 2_000_000).status_code == 413
        visitor.get("/logout")
        assert visitor.post("/gradio_api/cancel", json=cancel).status_code == 401


@pytest.mark.slow
def test_a_visitor_who_hangs_up_does_not_end_it(both: list[Scripted], tmp_path: Path) -> None:
    """Before the answers to several requests are written."""
    folder = models.save(tmp_path / "a", both[0].model, both[0].chat, {}, source=ModelSection(name_or_path="nothing"))
    command = [sys.executable, str(ROOT / "inference_with_improved_settings.py")]
    command += ["--config", str(ROOT / "configs/quickstart/chat.yaml"), f"model.name_or_path={folder}"]
    with subprocess.Popen([*command, "--web", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            address = page.stdout.readline().split()[-1]
            host, _, port = address.removeprefix("http://").partition(":")
            for number in range(20):
                with socket.create_connection((host, int(port))) as visitor:
                    visitor.sendall(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode() * 8)
                    time.sleep(0.003 * number)
            page.send_signal(signal.SIGPIPE)  # as a write to such a connection does
            assert httpx.get(address, timeout=60).status_code == 200 and page.poll() is None
        finally:
            page.terminate()


# ---------------------------------------------------------------------------------------------------------- the page


@pytest.mark.thorough
@in_browser
@pytest.mark.parametrize(("width", "scheme"), [pytest.param(1200, "light", marks=pytest.mark.slow), (390, "dark")])
def test_the_page_is_readable_on_any_screen(
    pair: str, visit: Callable[..., Any], model: Script, width: int, scheme: str
) -> None:
    page = visit(pair, width, scheme)
    send(page, "Hi")
    expect(said(page, 1)).to_have_text("yes")
    at_rest(page)
    if width < 500:  # both answers and the message are in sight at once
        page.evaluate("scrollTo(0, 0)")
        for each in (said(page, 0), said(page, 1), page.get_by_role("button", name="Send")):
            expect(each).to_be_in_viewport()
    page.get_by_text("Settings").click()
    expect(page.get_by_label("Preset").last).to_be_visible()
    readable(page, width)
    turns = open_play(page)
    page.get_by_role("button", name="One turn").click()
    expect(page.locator("#level-view .words")).to_have_count(1)
    expect(turns).to_have_count(2)  # the second one is what the model reads next
    readable(page, width)


@pytest.mark.thorough
@in_browser
def test_on_a_phone_every_example_of_two_models_is_in_sight(pair: str, visit: Callable[..., Any]) -> None:
    page = visit(pair, 390)
    for side in range(2):
        examples = page.locator(f"#side-{side} .example")
        expect(examples).to_have_count(6)
        for each in examples.all():
            expect(each).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
    readable(page, 390)


@pytest.mark.thorough
@in_browser
def test_the_page_names_its_models_and_an_example_is_sent(
    pair: str, visit: Callable[..., Any], model: Script, both: list[Scripted]
) -> None:
    page = visit(pair)
    expect(page).to_have_title("Chat with model 1 and model 2")
    expect(page.get_by_role("heading", level=1)).to_have_text("model 1 and model 2")
    for side, name in enumerate(("model 1", "model 2")):
        header = page.locator(f"#about-{side}")
        expect(header.get_by_role("heading", level=2)).to_have_text(name)
        expect(header).to_contain_text("million parameters. Its folder does not name its training.")
        expect(page.locator(f"#side-{side} .example")).to_have_count(6)
    wanted = page.locator("#side-1 .example").nth(3)
    text = wanted.inner_text()
    wanted.focus()
    page.keyboard.press("Enter")
    for side in range(2):
        expect(said(page, side)).to_have_text("yes")
        expect(said(page, side, "user")).to_have_text(text)
        expect(said(page, side)).to_have_attribute("aria-label", f"model {side + 1}'s message: yes")
        expect(page.locator(f"#side-{side}").get_by_role("log")).to_have_accessible_name(
            f"Conversation with model {side + 1}"
        )
    at_rest(page)
    assert page.locator("#figures tr").first.inner_text().split() == ["model", "1", "model", "2"]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#side-1 .example")).to_have_count(6)


@pytest.mark.thorough
@in_browser
def test_a_screen_reader_hears_the_name_of_the_model(alone: str, visit: Callable[..., Any], model: Script) -> None:
    """And every text as it was written: gradio's labels have it as HTML."""
    model.text, model.pause = lambda: "bot's message: apples < pears &amp; <img src=x>", 0.05
    page = visit(alone)
    log = page.get_by_role("log", name="Conversation with model 1", exact=True)
    expect(log).to_be_visible()
    for number in range(2):
        send(page, "2 < 3 && &lt;b>")
        expect(said(page)).to_have_count(number + 1)
        at_rest(page)
        expect(said(page, who="user").last).to_have_attribute("aria-label", "Your message: 2 < 3 && &lt;b>")
        expect(said(page).last).to_have_attribute("aria-label", f"model 1's message: {model.text()}")  # type: ignore
    page.get_by_role("button", name="New conversation").click()
    expect(said(page)).to_have_count(0)
    expect(log).to_be_visible()


@in_browser
@pytest.mark.slow
def test_calls_of_tools_are_steps_that_unfold(
    cfg: ChatRun, both: list[Scripted], model: Script, visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in them is shown as it was written, and so is the name of a tool that does not exist."""
    monkeypatch.setattr(Generator, "context", 8192)
    update = {"tools": ["examples.own_tool:calculate"], "max_new_tokens": 400}
    calls = [{"name": name, "arguments": {"expression": HOSTILE}} for name in ("calculate", "**b** <img src=x>")]
    turns = iter([*(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls), "It is 5."])
    model.text = lambda: next(turns)
    with in_thread(server.build_page({"model 1": both[0]}, cfg.model_copy(update=update), None)) as address:
        page = visit(address)
        send(page, "What is 2+3?")
        expect(page.locator("#side-0").get_by_text("It is 5.")).to_be_visible()
        at_rest(page)
        steps = page.locator("#side-0 .thought-group")
        names = ["calculate", "a tool that does not exist"]
        expect(steps).to_have_count(4)
        for number, title in enumerate(f"{what} {name}" for name in names for what in ("Calls", "Result of")):
            expect(steps.nth(number).get_by_text(title)).to_be_visible()
        expect(page.get_by_text("<tool_call>")).to_have_count(0)
        for number in range(4):
            steps.nth(number).locator(".title").focus()
            page.keyboard.press("Enter")
        expect(steps.nth(0)).to_contain_text("<script>window.hacked = 1")
        expect(steps.nth(2)).to_contain_text("**b** <img src=x>")
        assert page.evaluate("window.hacked") is None and page.locator("#side-0 :is(img, script, strong)").count() == 0


def test_what_the_page_says_about_models(
    cfg: ChatRun, both: list[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generated = {"path": "embedded", "kind": "capybara", "train": 1200, "examples": ["<b>Hello</b>", "Tell me more."]}
    mine = {"path": "/home/ana/rows.jsonl", "kind": "messages", "train": 30}
    history = [
        {"phase": "phase1", "data": [generated], "results": []},
        {"phase": "phase2", "data": [mine], "results": []},
        {"phase": "phase3", "data": [], "results": [{"name": "frozen_lake, test levels: success"}]},
    ]
    name = "runs/mine/phase3/final"
    models.save(Path(name), both[0].model, both[0].chat, {}, source=ModelSection(name_or_path="x"))
    monkeypatch.setattr(about.model_card, "history", lambda place: history if place == name else [])
    with_own = cfg.model_copy(update={"examples": ["My own?"]})
    ours, hub = about.describe_models({name: both[0], "owner/Name-1B": both[1]}, with_own).values()
    assert (ours.title, hub.title) == ("mine/phase3", "Name-1B")
    told = "SFT on 1,200 generated rows (capybara); DPO on 30 pairs of rows.jsonl; StarPO in frozen_lake."
    assert ours.trained.endswith(f"million parameters. {told}")
    assert ours.examples == ["My own?", *generated["examples"]]
    assert hub.trained.endswith("Its training is described on its card.")
    assert hub.card == "https://huggingface.co/owner/Name-1B" and hub.examples == list(about.GENERAL)
    shown = about.about_html(hub, "h2", "greedy")
    assert shown.startswith("<h2>Name-1B</h2>") and f'href="{hub.card}"' in shown
    assert "<b>" not in about.about_html(about.About("<b>", "<b>", "", []), "h2", "<b>")
    (alone,) = about.describe_models({"elsewhere/mine": both[0]}, with_own).values()
    assert alone.examples == ["My own?", *about.GENERAL[:5]]
    same = about.describe_models({"a/mine": both[0], "b/mine": both[1]}, cfg)
    assert [each.title for each in same.values()] == ["a/mine", "b/mine"]


def test_two_settings_of_one_model_are_told_apart(cfg: ChatRun, both: list[Scripted]) -> None:
    tab = chat_tab({"model": both[0]}, cfg)
    greedy, plain = cfg.presets["greedy"], cfg.presets["plain"]
    assert tab.names([("model", greedy), ("model", plain)]) == ["greedy", "temperature 1"]
    assert tab.names([("model", greedy), ("model", greedy)]) == ["first", "second"]
    assert tab.names([("model", greedy)]) == ["model"]


def readable(page: Any, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 15 and found["poor"] == []
    nameless = (
        page.locator("button, select, input, textarea, a")
        .locator("visible=true")
        .evaluate_all(
            """all => all.filter((one) => !(one.textContent.trim() || one.ariaLabel || one.title || one.labels?.length))
          .map((one) => one.outerHTML)"""
        )
    )
    assert nameless == []


# --------------------------------------------------------------------------------------------------- the command line


@pytest.mark.thorough
@in_browser
def test_the_script_opens_a_page_that_asks_for_a_password(
    visit: Callable[..., Any], both: list[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two models, a password from the environment, localhost; it ends when it is told to."""
    running: list[uvicorn.Server] = []
    start = uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **more: (running.append(self), start(self, **more)))
    monkeypatch.setattr(guard, "WRONG", 0.2)
    monkeypatch.setenv(server.PASSWORD, "open sesame")
    source = ModelSection(name_or_path="nothing")
    places = [models.save(tmp_path / name, both[0].model, both[0].chat, {}, source=source) for name in ("a", "b")]
    line = ["--config", str(ROOT / "configs/quickstart/chat.yaml"), f"model.name_or_path={places[0]}"]
    line += ["--web", "--beside", str(places[1]), "--port", "0", "--password"]
    thread = threading.Thread(target=script.main, args=(line,))
    thread.start()
    wait_until(lambda: running and running[0].started, 60)
    told = capfd.readouterr().out.strip()
    found = re.fullmatch(rf"Chat with {places[0]}, {places[1]} at (http://127\.0\.0\.1:\d+)", told)
    assert found
    for path in ("config", "gradio_api/info", "gradio_api/queue/data?session_hash=a"):
        assert httpx.get(f"{found[1]}/{path}").status_code == 401
    page = visit(found[1], allowed="400")
    for typed in ("open", "open sesame"):
        began = time.monotonic()
        page.get_by_label("username").fill("anybody")
        page.get_by_label("password").fill(typed)
        page.get_by_role("button", name="Login").click()
        if typed == "open":
            expect(page.get_by_text("Incorrect")).to_be_visible()
            assert time.monotonic() - began > 0.2
    send(page, "Hi")
    for side, place in enumerate(places):
        expect(said(page, side)).to_have_count(1)
        expect(page.locator(f"#about-{side} h2")).to_have_text(place.name)
        expect(page.locator(f"#about-{side}")).to_contain_text("Sampling: greedy")
    at_rest(page)
    running[0].should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--web", "--compare"], "--compare is for the terminal"),
        (["--port", "8000"], "belong to --web"),
        (["--password"], "belong to --web"),
        (["--web", "--episodes", "2"], "belong to --play"),
        (["--web", "--preset", "imporved"], "no preset `imporved`.*improved"),
        (["--web", "--beside", "x", "model.name_or_path=x"], "is the first model too"),
        (["--web", "--port", "70000"], "--port 70000 is not a port"),
        (["--web", "--password"], "set the environment variable CHAT_PASSWORD"),
    ],
)
def test_a_mistake_is_one_paragraph(flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server.PASSWORD, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UserError, match=words):
        script.main(flags)


def test_a_missing_gradio_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as refused:
        script.main(["--web", "--play", "frozen_lake"])
    assert refused.value.code == 2
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r"needs the package gradio.*pip install \."):
        script.main(["--web"])


def test_the_password_is_typed_where_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server.PASSWORD, raising=False)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("getpass.getpass", lambda prompt: "typed")
    assert server.chosen_password() == "typed"
    monkeypatch.setenv(server.PASSWORD, "set")
    assert server.chosen_password() == "set"


def test_the_terminal_does_not_load_gradio() -> None:
    told = python("-c", "import inference_with_improved_settings, sys; print('gradio' in sys.modules)")
    assert told.stdout == "False\n"
