"""Do the pages work where people open them?  In headless Chromium: clicked, by keyboard, on a phone, in the dark.

Skipped where there is no Chromium. Every test fails on an error in the console and on any request to the network.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from contrast import CHROMIUM, CONTRAST
from test_answers import answered, called, training_run
from test_report import build_run, hostile_pages

from envs import make
from envs.episode import Episode
from envs.protocol import Protocol, format_response
from posttrain import report
from posttrain.report import comparison
from posttrain.report.page import build_transcripts
from posttrain.report.rendering import KINDS
from posttrain.report.training_page import build_training

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (on Debian: apt-get install chromium)"
)

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'></script><b>bold</b>"
LAKE = {"name": "frozen_lake", "options": {}, "label": None}


def trained_episode(step: int, sample: int) -> dict[str, Any]:
    """A row of phase 3's transcripts.jsonl, with made-up figures of its tokens."""
    rng = random.Random(f"{step} {sample}")
    protocol = Protocol.of(make("frozen_lake"), think=True)
    episode = Episode(make("frozen_lake"), protocol, step, "train", noise_seed=sample)
    rewards, tokens = [], []
    while not episode.done:
        right = sample != 3 and rng.random() < 0.8
        action = episode.env.expert() if right else episode.env.players()["random"]
        said = HOSTILE if sample == 3 else format_response(episode.env.thought(), [action], protocol)
        rewards.append(episode.step(said).reward)
        text = [said[at : at + 4] for at in range(0, len(said), 4)]
        column = lambda low, high: [round(rng.uniform(low, high), 4) for _ in text]  # noqa: E731, B023
        turn = {"text": text, "logprob": column(-3, 0), "entropy": column(0, 2), "advantage": column(-1, 1)}
        tokens.append(turn | {"loss": [0] + [1] * (len(text) - 1)})
    return {
        "step": step, "env": "frozen_lake", "group": 0, "level_key": episode.level_key, "level_seed": step,
        "noise_seed": sample, "success": episode.success, "failure": episode.failure, "crashed": "",
        "truncated": False, "invalid_turns": episode.invalid_turns, "actions": episode.actions,
        "turn_rewards": rewards, "turn_penalties": [0.0] * len(rewards), "messages": episode.messages,
        "tokens": tokens,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated run with what phase 3 leaves: recorded episodes, alarms, its config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plots", lambda *_: None)
        folder = build_run(tmp_path_factory.mktemp("browser") / "made_up", episodes=10, with_report=False)
    rows = [trained_episode(step, sample) for step in (10, 20) for sample in range(4)]
    (folder / "phase3" / "transcripts.jsonl").write_text(jsonl(*rows))
    config = {"envs": [LAKE], "protocol": {"think": True}}
    (folder / "phase3" / "run_config.yaml").write_text(yaml.safe_dump(config))
    alarm = {"step": 30, "name": "entropy_collapse", "severity": "warn", "message": "It fell <b>.", "remedy": "Look."}
    (folder / "phase3" / "alarms.jsonl").write_text(jsonl(alarm))
    source = {"path": "a.jsonl", "kind": "messages", "licence": "", "read": 1200, "dropped": {"empty <content>": 3}}
    (folder / "phase1" / "rows").mkdir()
    table = [source | {"train": 1100, "held_out": 97}]
    (folder / "phase1" / "rows" / "table.json").write_text(json.dumps(table))
    report.build(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file, waits until it is complete; when the test ends, nothing may have been said or asked for."""
    trouble, contexts = [], []

    def on_request(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            trouble.append(f"asked for {request.url}")

    def open_page(
        path: Path, width: int = 1200, scheme: str = "light", motion: str = "reduce", folded: bool = False
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion, has_touch=width < 500
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("request", on_request)
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("body[data-ready]")
        if not folded:
            page.evaluate("document.querySelectorAll('.fold').forEach((each) => (each.open = true))")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def slider(place: Any) -> str:
    return place.locator(".controls output").first.inner_text()


# ----------------------------------------------------------------------------------------------------------- report


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")])
def test_the_report_is_readable_on_any_screen(visit: Callable[..., Any], run: Path, width: int, scheme: str) -> None:
    page = visit(run / "report.html", width, scheme)
    page.locator("#recorded select[aria-label='shade tokens by']").select_option("advantage")
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    page.locator("section[id^=s]").nth(1).evaluate("each => each.scrollIntoView()")
    page.wait_for_selector("nav a[aria-current]", state="attached")  # on a ground of its own
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 500 and found["poor"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1200, 390])
def test_the_report_is_short_and_a_link_unfolds_a_section(visit: Callable[..., Any], run: Path, width: int) -> None:
    page = visit(run / "report.html", width, folded=True)
    assert page.evaluate("document.documentElement.scrollHeight") <= 6000
    links, menu = page.locator("nav a"), page.locator("nav button")
    assert links.count() == page.locator("section[id^=s]").count() > 8
    assert menu.is_visible() == (width < 500)
    curves = page.locator("section").filter(has=page.locator("h2", has_text="Learning curves"))
    assert not curves.locator(".chart").first.is_visible() and links.first.is_visible() == (width > 500)
    for _ in range(2):  # also when it is where the page already is
        if width < 500:
            menu.click()
        links.filter(has_text="Curves").click()
        assert curves.locator(".chart").first.is_visible()
        playwright.expect(curves.locator("h2")).to_be_in_viewport()
        playwright.expect(page.locator("nav a[aria-current]")).to_have_text("Curves")
        playwright.expect(menu).to_have_text("Sections: Curves")
        shown = menu if width < 500 else links.first
        playwright.expect(shown).to_be_in_viewport()  # it stays at the top
        heading, bar = curves.locator("h2").bounding_box(), page.locator("nav").bounding_box()
        assert heading["y"] >= bar["y"] + bar["height"], "nothing lies under the bar"
        curves.locator("summary").first.click()
        assert not curves.locator(".chart").first.is_visible()
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    assert curves.locator(".chart").first.is_visible()


@pytest.mark.thorough
def test_the_menu_of_a_phone_by_touch_and_keyboard(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html", width=390, folded=True)
    menu, links = page.locator("nav button"), page.locator("nav a")
    assert menu.get_attribute("aria-expanded") == "false" and not links.first.is_visible()
    menu.tap()
    assert menu.get_attribute("aria-expanded") == "true"
    heights = [link.bounding_box()["height"] for link in links.all()]
    assert min(heights) >= 40, "a finger meets it"
    page.touchscreen.tap(195, 890)  # beside it
    assert not links.first.is_visible()
    menu.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == links.first.inner_text() == "Summary"
    page.keyboard.press("Escape")
    assert not links.first.is_visible() and page.evaluate("document.activeElement.tagName") == "BUTTON"


def test_the_first_thing_seen_is_the_model_before_and_after(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    top = page.locator("section").first
    assert top.locator("h2").inner_text() == "Before and after"
    pictures = top.locator("img")
    assert pictures.count() == 6 and top.locator("figcaption b").all_inner_texts()[0] == "0 %"
    first = pictures.nth(2).get_attribute("src")
    assert slider(top).startswith("0 / ")
    top.get_by_label("one step on").click()
    assert slider(top).startswith("1 / ") and pictures.nth(2).get_attribute("src") != first
    top.get_by_label("one step back").click()
    assert pictures.nth(2).get_attribute("src") == first
    count = int(slider(top).split("/")[1])
    top.locator("input[type=range]").fill(str(count))
    assert top.locator("#stage .badge").count() == 6, "each says how it ended"
    top.get_by_label("test level").select_option("1")
    assert slider(top).startswith("0 / ")
    top.get_by_label("one step on").click()
    words = top.locator(".words1").all_inner_texts()
    assert words[0] == "no valid action" and words[2] in ("Up", "Down", "Left", "Right"), "no tags, no bytes"
    good, bad = top.locator(".told").all()
    assert good.locator("h3").inner_text().split("\n")[0].startswith("A good answer")
    assert good.locator(".badge").inner_text() == "right" and bad.locator(".badge").inner_text() == "wrong"


def test_a_film_plays_pauses_and_rests_at_its_end(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    page.clock.install()
    top = page.locator("section").first
    top.get_by_label("play", exact=True).click()
    page.clock.run_for(1700)
    assert slider(top).startswith("2 / ")
    top.get_by_label("pause", exact=True).click()
    page.clock.run_for(5000)
    assert slider(top).startswith("2 / ")
    top.get_by_label("play", exact=True).click()
    page.clock.run_for(60_000)
    count = slider(top).split(" / ")[1]
    assert slider(top) == f"{count} / {count}" and top.get_by_label("play", exact=True).count() == 1


def test_the_top_plays_by_itself_unless_motion_is_unwanted(visit: Callable[..., Any], run: Path) -> None:
    assert visit(run / "report.html", motion="no-preference").get_by_label("pause", exact=True).count() == 1
    assert visit(run / "report.html", motion="reduce").get_by_label("pause", exact=True).count() == 0


def test_turns_and_pictures_of_an_episode_are_linked(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    page.get_by_role("option").filter(has_text="turns").first.click()
    shown = page.locator("#recorded .shown")
    turns, picture = shown.locator(".turns > li"), shown.locator("img")
    assert turns.count() >= 2
    for number in (1, 0):
        shown.get_by_role("button", name=f"turn {number + 1}", exact=True).click()
        assert [turn.get_attribute("aria-current") == "step" for turn in turns.all()].index(True) == number
        assert picture.get_attribute("alt").startswith(f"frozen_lake, picture {number + 1} of")
    shown.locator(".turns").focus()
    page.keyboard.press("ArrowRight")
    assert turns.nth(1).get_attribute("aria-current") == "step"
    page.keyboard.press("ArrowLeft")
    assert turns.nth(0).get_attribute("aria-current") == "step"
    words = turns.nth(0).locator(".meta").inner_text()
    assert "reward" in words and turns.nth(0).locator(".thought, .words").first.inner_text()


def test_tokens_are_shaded_by_each_of_their_figures(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    choose = page.locator("#recorded").get_by_label("shade tokens by")
    row = trained_episode(10, 0)
    said = next(message["content"] for message in row["messages"] if message["role"] == "assistant")
    first = row["tokens"][0]
    words = page.locator("#recorded .words").first
    seen = set()
    for kind in ("logprob", "entropy", "advantage", "loss"):
        choose.select_option(kind)
        tokens = words.locator(".token")
        assert tokens.all_text_contents() == first["text"] and "".join(first["text"]) == said
        colours = tokens.evaluate_all("all => all.map((one) => one.style.background)")
        assert all(colours)
        seen.add(tuple(colours))
        assert re.search("loss mask|from", page.locator(".shading output").inner_text())
    assert len(seen) == 4
    assert "not in the loss" in words.locator(".token").first.get_attribute("title")
    words.locator(".token").nth(1).click()
    told = page.locator("#recorded .shading output").inner_text()
    assert f"advantage {first['advantage'][1]:.3f}" in told and "counts in the loss" in told
    choose.select_option("")
    assert words.locator(".token").count() == 0 and words.text_content() == said


def test_the_figures_of_tokens_are_reached_by_keyboard(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    shown = page.locator("#recorded")
    shown.get_by_label("shade tokens by").select_option("entropy")
    first = trained_episode(10, 0)["tokens"][0]
    told, tokens = shown.locator(".shading output"), shown.locator(".words").first.locator(".token")
    assert shown.get_by_role("listbox", name="tokens of turn 1").get_by_role("option").count() == len(first["text"])

    def focused() -> int:
        return tokens.evaluate_all("all => all.indexOf(document.activeElement)")

    def facts(number: int) -> str:
        return f"“{first['text'][number]}”: log-prob {first['logprob'][number]:.3f}, entropy "

    shown.locator(".turns").focus()
    for _ in range(3):  # the rules it was told, what it read, the tokens
        if focused() < 0:
            page.keyboard.press("Tab")
    last = len(first["text"]) - 1
    for key, place in (("", 0), ("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", last), ("Home", 0)):
        page.keyboard.press(key or "ArrowLeft")
        assert focused() == place
        assert told.inner_text().startswith(facts(place)) and "the loss" in told.inner_text()
        assert tokens.nth(place).get_attribute("aria-label") == told.inner_text()
        assert tokens.evaluate_all("all => all.filter((one) => one.tabIndex === 0).length") == 1
        assert shown.locator(".turns [aria-selected=true]").count() == 1
    assert slider(shown).startswith("0 / "), "the film stands still"
    page.keyboard.press("Tab")
    assert focused() == -1


def test_the_shading_is_kept_from_one_episode_to_the_next(visit: Callable[..., Any], run: Path) -> None:
    page = visit(build_transcripts(run / "phase3" / "transcripts.jsonl"))
    page.get_by_label("shade tokens by").select_option("logprob")
    for number in (1, 2):
        page.locator(".row").nth(number).click()
        assert page.get_by_label("shade tokens by").input_value() == "logprob"
        assert page.locator(".words").first.locator(".token").count() > 1
        assert page.locator(".shading output").inner_text().startswith("log-prob: the darker")
    page.get_by_label("shade tokens by").select_option("")
    page.locator(".row").nth(0).click()
    assert page.locator(".token").count() == 0


def test_a_tap_on_a_curve_shows_its_values_and_keeps_them(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html", width=390)
    chart = page.locator(".chart").filter(has=page.locator("figcaption", has_text="Entropy")).last
    chart.scroll_into_view_if_needed()
    told, box = chart.locator("figcaption output"), chart.locator("svg .plot").bounding_box()
    for share in (0.5, 0.25):
        page.touchscreen.tap(box["x"] + box["width"] * share, box["y"] + 20)
        playwright.expect(told).to_contain_text(f"step {60 * share:.0f}")
        expected = 0.6 / (1 + 60 * share / 20)
        assert float(chart.locator(".legend b").inner_text()) == pytest.approx(expected, rel=0.01)
    assert chart.locator(".first").text_content() == "step 0", "a tap does not zoom"
    page.touchscreen.tap(5, 5)
    playwright.expect(told).to_have_text("")


def test_curves_have_values_zoom_and_alarms(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    chart = page.locator(".chart").filter(has=page.locator("figcaption", has_text="Entropy")).last
    chart.scroll_into_view_if_needed()
    assert chart.locator(".alarm").count() == 1
    assert page.locator(".alarms li").inner_text() == "Step 30: entropy collapse. It fell <b>. Look."
    told, frame = chart.locator("figcaption output"), chart.locator("svg").first
    last = chart.locator(".legend b").inner_text()
    box = chart.locator("svg .plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    assert told.inner_text() == "step 30, ⚠ entropy collapse"
    assert float(chart.locator(".legend b").inner_text()) == pytest.approx(0.6 / (1 + 30 / 20), rel=0.01)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 30, steps=3)
    page.mouse.up()
    assert chart.locator(".first").text_content() == "step 30" and chart.locator(".last").text_content() == "45"
    page.mouse.move(2, 2)
    assert told.inner_text() == "" and chart.locator(".legend b").inner_text() == last
    chart.get_by_role("button", name="whole run").click()
    assert chart.locator(".first").text_content() == "step 0"
    frame.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert told.inner_text() == "step 59"
    page.keyboard.press("+")
    assert chart.locator(".first").text_content() == "step 44"
    page.keyboard.press("Escape")
    assert chart.locator(".first").text_content() == "step 0" and chart.get_by_role("button").count() == 0


def test_the_table_says_which_way_is_better_and_who_is(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    rows = page.locator("table.headline tr").all()[1:]
    for row in rows:
        assert "is better" in row.locator("th").inner_text() and "items" in row.locator("th").inner_text()
        changes = row.locator(".change").all_inner_texts()
        assert len(changes) == 3 and {words.split("\n")[1] for words in changes} <= {*KINDS}
    data = page.locator("table.data").inner_text()
    assert "1,200" in data and "3 empty <content>" in data
    assert "phase3" in page.locator("section").filter(has_text="What it cost").inner_text()


def test_every_control_is_reached_and_named(visit: Callable[..., Any], run: Path) -> None:
    page = visit(run / "report.html")
    nameless = page.locator("button, select, input, a").evaluate_all(
        """all => all.filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
          .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("img:not([alt])").count() == 0
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName"))
    assert {"A", "SELECT", "BUTTON", "INPUT", "OL"} <= reached


# ------------------------------------------------------------------------------------ runs of prompts, tools, agents


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of training runs that are not evaluated: of prompts, of a tool, of an agent program."""
    folder = tmp_path_factory.mktemp("asked")
    rows = [answered(f"It is {7 + n % 2}. {HOSTILE}", 1.0 - n % 2, step) for step in (1, 2) for n in range(4)]
    calls = [called("7", 1.0), called("Error: no number " * 9, 0.0), called("8", 0.0, 2), called("7", 1.0, 2)]
    program = answered("Final: 7", 1.0) | {"actions": ["Ask 4 + 3", "Final: 7"], "turn_rewards": [0.0, 1.0]}
    said = [("user", "1 + 1?"), ("assistant", "Final: 2"), ("user", "What is 4 + 3?")]
    said += [("assistant", "Ask 4 + 3"), ("user", "Result: 7"), ("assistant", "Final: 7")]
    program["messages"] = [{"role": role, "content": content} for role, content in said]
    programs = [program, answered("Final: 9", 0.0)]
    agent = {"options": {"agent": ["python", "agent.py"]}}
    return {
        "prompts": build_training(training_run(folder / "prompts", *rows)),
        "tools": build_training(training_run(folder / "tools", *calls, env={"tools": ["my_tools:calculate"]})),
        "agent": build_training(training_run(folder / "agent", *programs, env=agent)),
    }


@pytest.mark.parametrize("kind", ["prompts", "tools", "agent"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_training_run_is_readable_on_any_screen(
    visit: Callable[..., Any], asked: dict[str, Path], kind: str, width: int, scheme: str
) -> None:
    page = visit(asked[kind], width, scheme, folded=True)
    assert page.evaluate("document.documentElement.scrollHeight") <= 6000
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 60 and found["poor"] == []
    assert page.evaluate("window.hacked") is None


def test_answers_by_reward(visit: Callable[..., Any], asked: dict[str, Path]) -> None:
    page = visit(asked["prompts"])
    good, bad = page.locator("#top .told").all()
    assert "reward 1" in good.inner_text() and "It is 7." in good.inner_text()
    assert "reward 0" in bad.inner_text() and "It is 8." in bad.inner_text()
    section = page.locator("section").filter(has=page.locator("h2", has_text="Answers by reward"))
    assert section.locator("table.rewards td").all_inner_texts() == ["2 50 %"] * 4 + ["0.5"] * 2
    earned = section.locator(".samples").first.locator(".earned").all_inner_texts()
    assert earned == ["reward 1", "reward 1", "reward 0", "reward 0"]
    order = page.get_by_label("order")
    assert order.input_value() == "highest reward first"
    assert "reward +1" in page.locator(".row").first.inner_text()
    order.select_option("lowest reward first")
    assert "reward 0" in page.locator(".row").first.inner_text()
    page.get_by_role("button", name="show all").click()
    playwright.expect(order).to_have_value("highest reward first")


def test_calls_stand_beside_their_results(visit: Callable[..., Any], asked: dict[str, Path]) -> None:
    page = visit(asked["tools"])
    call = page.locator("#top .told").first.locator(".call")
    assert call.inner_text().split("→")[0].strip() == 'calculate(expression="4 + 3")'
    assert call.locator(".result").inner_text() == "7"
    shown = page.locator("#recorded .shown")
    assert shown.locator(".call code").inner_text() == 'calculate(expression="4 + 3")'
    page.get_by_label("order").select_option("lowest reward first")
    page.locator(".row").filter(has_text="step 1").first.click()
    assert shown.locator(".call.failed .result").inner_text().startswith("Error: no number")
    table = page.locator("table.calls").inner_text()
    assert "1 (50 %)" in table and "Error: no number" in table


def test_what_a_program_sends_is_told_from_what_the_model_says(
    visit: Callable[..., Any], asked: dict[str, Path]
) -> None:
    page = visit(asked["agent"])
    assert page.locator("#top .told").first.locator(".call.read .result").inner_text() == "Result: 7"
    shown = page.locator("#recorded .shown")
    assert shown.locator(".turns > li").count() == 2 and shown.locator(".words").all_inner_texts() == [
        "Ask 4 + 3",
        "Final: 7",
    ]
    assert "an answer in the prompt: Final: 2" in shown.locator(".seen").all_inner_texts()
    assert "requests of the program" in page.locator("table.calls").inner_text()


# -------------------------------------------------------------------------------------------------- comparison.html


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_a_comparison_is_read_and_stepped_on_any_screen(
    visit: Callable[..., Any], run: Path, width: int, scheme: str
) -> None:
    page = visit(comparison.build_comparison([f"{run}:base", str(run), f"{run}:phase1"]), width, scheme)
    assert page.locator(".verdict b").all_inner_texts() == ["Better", "Better"]
    assert page.locator("table.headline .change").count() == 2 * 6
    page.locator("summary", has_text="Sokoban: made_up:base and made_up:phase3").click()
    shown = page.locator("details[open]", has_text="Sokoban").locator(".episode").nth(1)
    before = shown.locator("img").get_attribute("src")
    shown.get_by_label("one step on").click()
    assert shown.locator("img").get_attribute("src") != before
    assert shown.locator("[aria-current=step]").count() == 1 and shown.locator(".badge").inner_text() == "solved"
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 200 and found["poor"] == []


# ------------------------------------------------------------------------------------------------- transcripts.html


def many(count: int) -> Iterator[dict[str, Any]]:
    """Rows of both kinds, as phase 3 and the evaluator write them; one of them is worth finding."""
    for number in range(count):
        rng = random.Random(number)
        turns, won = rng.randrange(1, 9), rng.random() < 0.4
        said = "needle <script>" if number == 7777 else "<think>goal Up</think><answer>Up</answer>"
        messages = [{"role": "system", "content": "Walk over the frozen lake. " * 12}]
        for _ in range(turns):
            messages += [{"role": "user", "content": "Reward 0\nGoal Up 2"}, {"role": "assistant", "content": said}]
        yield {
            "step": number // 40, "env": rng.choice(["frozen_lake", "sokoban", "bandit"]), "success": won,
            "failure": "" if won else rng.choice(["hole", ""]), "crashed": "", "invalid_turns": number % 3,
            "turn_rewards": [0.0] * (turns - 1) + [float(won)],
            "turn_penalties": [-0.1 * (number % 3)] + [0.0] * (turns - 1),
            "messages": messages,
        }  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("large") / "transcripts.jsonl"
    file.write_text(jsonl(*many(10_000)))
    return build_transcripts(file)


def test_of_ten_thousand_episodes_only_those_in_sight_are_elements(visit: Callable[..., Any], large: Path) -> None:
    assert large.stat().st_size < 3_000_000
    page = visit(large)
    rows, count = page.locator(".row"), page.locator(".count")
    assert 0 < rows.count() < 40 and count.inner_text() == "10,000 of 10,000"
    page.locator(".rows").evaluate("list => { list.scrollTop = 480_000; list.dispatchEvent(new Event('scroll')); }")
    assert 0 < rows.count() < 40 and int(rows.last.get_attribute("aria-posinset")) > 9000
    page.get_by_label("text").fill("needle")
    playwright.expect(count).to_have_text("1 of 10,000")
    assert page.locator(".words").first.text_content() == "needle <script>"


def test_each_filter_of_the_viewer(visit: Callable[..., Any], large: Path) -> None:
    rows = list(many(10_000))
    page = visit(large)

    def count() -> int:
        return int(page.locator(".count").inner_text().split(" of ")[0].replace(",", ""))

    def reset() -> None:
        page.get_by_role("button", name="show all").click()
        playwright.expect(page.locator(".count")).to_have_text("10,000 of 10,000")

    page.get_by_label("environment").select_option("sokoban")
    assert count() == sum(row["env"] == "sokoban" for row in rows)
    page.get_by_label("outcome").select_option("solved")
    assert count() == sum(row["env"] == "sokoban" and row["success"] for row in rows)
    reset()
    page.get_by_label("outcome").select_option("hole")
    assert count() == sum(row["failure"] == "hole" for row in rows)
    reset()
    page.get_by_label("invalid turns, least").fill("2")
    assert count() == sum(row["invalid_turns"] >= 2 for row in rows)
    page.get_by_label("turns, most", exact=True).fill("1")
    assert count() == sum(row["invalid_turns"] >= 2 and len(row["messages"]) == 3 for row in rows)
    reset()
    page.get_by_label("reward, least").fill("0.9")
    assert count() == sum(sum(row["turn_rewards"]) + sum(row["turn_penalties"]) >= 0.9 for row in rows)
    page.get_by_label("text").fill("no such word")
    assert count() == 0 and "No episode passes" in page.locator(".shown").inner_text()


def test_episodes_by_reward(visit: Callable[..., Any], large: Path) -> None:
    rewards = [sum(row["turn_rewards"]) + sum(row["turn_penalties"]) for row in many(10_000)]
    page = visit(large)
    for name, best in (("highest reward first", max(rewards)), ("lowest reward first", min(rewards))):
        page.get_by_label("order").select_option(name)
        assert f"reward {best:+g}".replace("-", "−") in page.locator(".row").first.inner_text().replace("-", "−")


def test_the_viewer_by_keyboard(visit: Callable[..., Any], large: Path) -> None:
    page = visit(large)
    page.locator(".rows").focus()
    heading = page.locator(".shown h3")
    for key, step in (("ArrowDown", 0), ("End", 249), ("ArrowUp", 249), ("Home", 0)):
        page.keyboard.press(key)
        assert heading.inner_text().startswith(f"step {step} ")
        chosen = page.locator('.row[aria-selected="true"]')
        assert chosen.count() == 1 and chosen.is_visible()
        assert chosen.get_attribute("id") == page.locator(".rows").get_attribute("aria-activedescendant")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (390, "light")])
def test_the_viewer_is_readable_on_any_screen(visit: Callable[..., Any], large: Path, width: int, scheme: str) -> None:
    page = visit(large, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 30 and found["poor"] == []


@pytest.mark.thorough
def test_hostile_files_are_shown_and_nothing_in_them_runs(
    visit: Callable[..., Any], browser: Any, run: Path, tmp_path: Path
) -> None:
    for file in hostile_pages(run, tmp_path / "hostile")[::2]:  # the report, and episodes with tokens
        page = visit(file)
        assert page.locator("hostile, [hostile], [onhostile]").count() == 0
        if page.get_by_label("shade tokens by").count():
            page.get_by_label("shade tokens by").first.select_option("advantage")
            assert page.locator(".token").count() == 1 and page.locator("hostile").count() == 0
    page = browser.new_page()  # should a place ever be forgotten: neither handlers nor scripts run
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    page.evaluate("""() => {
      const handlers = `<img src="data:," onerror="window.hacked = 1"><b onclick="window.hacked = 1"></b>`;
      document.body.insertAdjacentHTML("beforeend", handlers);
      document.body.lastElementChild.click();
      document.body.append(Object.assign(document.createElement("script"), { textContent: "window.hacked = 1" }));
    }""")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    page.close()


def test_a_missing_number_is_shown_as_missing(visit: Callable[..., Any], tmp_path: Path) -> None:
    row = {"env": "x", "success": True, "messages": [{"role": "assistant", "content": "ab"}], "turn_penalties": [0.0]}
    token = {"text": ["ab"], "logprob": [float("-inf")], "entropy": [None], "advantage": [0.1], "loss": [1]}
    rows = [row | {"turn_rewards": [float("nan")], "tokens": [token]}, row | {"turn_rewards": [0.5]}]
    (tmp_path / "transcripts.jsonl").write_text(jsonl(*rows))
    page = visit(build_transcripts(tmp_path / "transcripts.jsonl"))
    assert page.locator(".meta").inner_text() == "reward not a finite number"
    assert page.locator(".shown h3 small").inner_text() == "the reward is not a finite number"
    page.get_by_label("shade tokens by").select_option("advantage")
    assert "log-prob none, entropy none, advantage 0.100" in page.locator(".token").get_attribute("title")
    page.locator(".row").nth(1).click()
    assert page.locator(".meta").inner_text() == "reward +0.5"


def test_what_a_model_wrote_is_never_html(visit: Callable[..., Any], run: Path) -> None:
    """In the evaluator's transcripts, in those of phase 3, and on the report: the words are shown, nothing runs."""
    for file in (run / "transcripts.jsonl", run / "phase3" / "transcripts.jsonl"):
        page = visit(build_transcripts(file))
        page.get_by_label("text").fill("<script>")
        assert not page.locator(".count").inner_text().startswith("0 ")
        assert "<script>" in page.locator(".words").first.text_content()
    page = visit(run / "report.html")
    page.get_by_label("text").fill("onerror")
    words = page.locator("#recorded .words").first
    assert words.text_content() == HOSTILE
    page.get_by_label("shade tokens by").select_option("entropy")
    assert words.text_content() == HOSTILE and words.locator("img, script, b").count() == 0
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script[src], main iframe").count() == 0
