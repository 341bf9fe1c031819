"""Is the documentation a site?  Every document is a page, every link leads somewhere, and no other host is asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_every_document_is_a_page_and_nothing_is_loaded_from_other_hosts(tmp_path: Path) -> None:
    run = build(ROOT / "website" / "mkdocs.yml", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    pages = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.html")}
    documents = [path.relative_to(ROOT) for folder in ("docs", "benchmarks") for path in (ROOT / folder).glob("*.md")]
    wanted = [path.with_suffix(".html").as_posix() for path in documents if path.name != "README.md"]
    assert {*wanted, "index.html", "benchmarks/index.html", "api.html"} <= pages
    home = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    menu = home[: home.index("<article")]
    assert [page for page in wanted if f'href="{page}"' not in menu] == []
    for page in pages:
        html = (tmp_path / "out" / page).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(\w+://[^\" >]+)", html)
        loaded += re.findall(r"<link[^>]* href=\"?(\w+://[^\" >]+)[^>]* rel=\"?(?:stylesheet|preconnect)", html)
        assert loaded == [], page
        body = html[html.index("<article") : html.index("</article>")]
        elements = set(re.findall(r"<([a-z][\w-]*)", body)) - KNOWN
        assert elements == set(), f"{page}: a text between angle brackets is lost outside of code"


def test_the_api_has_signatures_and_arguments(tmp_path: Path) -> None:
    assert build(ROOT / "website" / "mkdocs.yml", tmp_path / "out").returncode == 0
    html = (tmp_path / "out" / "api.html").read_text(encoding="utf-8")
    named = re.findall(r"^::: (\S+)", (ROOT / "website" / "pages" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) >= 10 and [name for name in named if f'id="{name}"' not in html] == []
    assert "key_of" in html and "Raises:" in html and "ppo_clip" in html


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
