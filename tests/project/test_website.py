"""Is the documentation a site?  Every document is a page, every link leads somewhere, and no other host is asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contrast import CHROMIUM, CONTRAST

KNOWN = set(
    "a abbr article blockquote br button circle code dd del details div dl dt em figure form g h1 h2 h3 h4 h5 h6 hr i"
    " img input label li nav ol p path pre s script small span strong sub summary sup svg table tbody td th thead tr u"
    " ul".split()
)
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("mkdocs", path=Path(sys.executable).parent) is None, reason="needs mkdocs"),
]


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", config, "-d", out]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "out"
    run = build(ROOT / "website" / "mkdocs.yml", out)
    assert run.returncode == 0, run.stderr
    return out


def test_every_document_is_a_page_and_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    documents = [path.relative_to(ROOT) for folder in ("docs", "benchmarks") for path in (ROOT / folder).glob("*.md")]
    wanted = [path.with_suffix(".html").as_posix() for path in documents if path.name != "README.md"]
    assert {*wanted, "index.html", "benchmarks/index.html", "api.html"} <= pages
    home = (site / "index.html").read_text(encoding="utf-8")
    menu = home[: home.index("<article")]
    assert [page for page in wanted if f'href="{page}"' not in menu] == []
    for page in pages:
        html = (site / page).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(\w+://[^\" >]+)", html)
        loaded += re.findall(r"<link[^>]* href=\"?(\w+://[^\" >]+)[^>]* rel=\"?(?:stylesheet|preconnect)", html)
        assert loaded == [], page
        body = html[html.index("<article") : html.index("</article>")]
        elements = set(re.findall(r"<([a-z][\w-]*)", body)) - KNOWN
        assert elements == set(), f"{page}: a text between angle brackets is lost outside of code"


def test_the_api_has_signatures_and_arguments(site: Path) -> None:
    html = (site / "api.html").read_text(encoding="utf-8")
    named = re.findall(r"^::: (\S+)", (ROOT / "website" / "pages" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) >= 10 and [name for name in named if f'id="{name}"' not in html] == []
    assert "key_of" in html and "Raises:" in html and "ppo_clip" in html


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, file: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """A page that is opened as a file, and what it has said or asked other places for."""
    page, trouble = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme), list[str]()
    page.set_default_timeout(10_000)
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or trouble.append(asked.url))
    page.goto(file.as_uri())
    page.wait_for_selector("html.js")
    return page, trouble


WORDS_OF_SEARCH = "document.querySelector('.md-search-result__meta').textContent"


@pytest.mark.parametrize("place", ["index.html", "docs/results.html"])
def test_the_search_works_in_pages_that_are_opened_as_files(browser: Any, site: Path, place: str) -> None:
    page, trouble = opened(browser, site / place, 1280, "light")
    page.click("input[name=query]")  # the index is read now; what is typed before it is there waits for the next key
    page.wait_for_function(f"{WORDS_OF_SEARCH}.includes('Type to start')")
    page.keyboard.type("gigpo")
    page.wait_for_selector(".md-search-result__link")
    assert "matching documents" in page.locator(".md-search-result__meta").inner_text() and trouble == []
    page.locator(".md-search-result__link").first.click()
    page.wait_for_url(re.compile(r"\.html\?h="))
    assert page.locator("article").inner_text() and trouble == []
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_every_text_has_contrast_and_figures_stay_in_one_line(
    browser: Any, site: Path, width: int, scheme: str
) -> None:
    for place in ("index.html", "docs/results.html", "api.html"):
        page, trouble = opened(browser, site / place, width, scheme)
        page.wait_for_timeout(500)  # colours change slowly at the start
        found = page.evaluate(CONTRAST)
        assert found["seen"] > 200 and found["poor"] == [] and trouble == [], place
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{place} scrolls sideways"
        page.close()
    page, _ = opened(browser, site / "docs" / "results.html", width, scheme)
    lines = "each => { const all = new Range(); all.selectNodeContents(each); return all.getClientRects().length }"
    assert page.locator("article td", has_text="3.4 % [2, 5]").evaluate(lines) == 1
    beyond = "each => each.scrollWidth - each.clientWidth"
    cut = page.locator("article .md-typeset__scrollwrap").first.evaluate(beyond)
    assert (cut > 0) == (width < 500), "on a wide screen the last column is cut"
    page.close()


@pytest.mark.parametrize("link", ["config.md#no-such-part", "no-such-page.md"])
def test_a_link_that_leads_nowhere_fails_the_build(link: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("website", "docs", "benchmarks", "examples", "configs", "posttrain", "envs"):
        ignored = shutil.ignore_patterns("build", "__pycache__", "images", "results")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy / name)
    with (copy / "docs" / "own.md").open("a", encoding="utf-8") as file:
        file.write(f"\n[a link]({link})\n")
    run = build(copy / "website" / "mkdocs.yml", tmp_path / "out")
    assert run.returncode == 1 and f"'{link}'" in run.stderr
