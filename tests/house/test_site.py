"""The documents as a site: it builds without a warning, each link leads somewhere, and nothing is fetched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.house.documents import ROOT
from tests.pages.site import rewritten
from tests.view.browser import chromium

FETCHED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.places.add(value)
            elif (tag, name) in FETCHED and value and ("rel", "canonical") not in attributes:
                self.loaded.add(value)
            elif tag == "a" and name == "href" and value:
                self.links.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site, built as `make docs` builds it."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return {path: Page(path) for path in place.rglob("*.html")}


def test_every_page_is_on_the_site(site: dict[Path, Page]) -> None:
    names = {path.name for path in site}
    assert names >= {f"{path.stem}.html" for path in (ROOT / "docs").rglob("*.md")}
    assert names >= {"index.html", "contributing.html", "changelog.html", "loop.py.html"}


def test_the_list_for_programs_leads_to_pages_of_the_site(site: dict[Path, Page]) -> None:
    (home,) = (path.parent for path in site if path.name == "404.html")
    named = re.findall(r"\]\(([^)]+)\)", (home / "llms.txt").read_text(encoding="utf-8"))
    assert len(named) > 50 and {home / name for name in named} <= site.keys()


def test_every_link_of_the_site_leads_somewhere(site: dict[Path, Page]) -> None:
    broken = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path not in ("", ".") else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                broken.append(f"{path.name} links to {link}")
            elif parts.fragment and target in site and unquote(parts.fragment) not in site[target].places:
                broken.append(f"{path.name} links to {link}, where no such place is")
    assert not broken


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, Page]) -> None:
    assert not {url for page in site.values() for url in page.loaded if re.match(r"(https?:)?//", url)}


@pytest.fixture(scope="module")
def index(site: dict[Path, Page]) -> list[dict[str, Any]]:
    """The entries of the search."""
    (root,) = {path.parent for path in site if path.name == "404.html"}
    entries: list[dict[str, Any]] = json.loads((root / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    return entries


def test_each_option_of_a_run_is_searched_by_its_name_at_its_own_place(
    site: dict[Path, Page], index: list[dict[str, Any]]
) -> None:
    entries = {entry["title"]: entry for entry in index if "boost" in entry}
    rate = entries["train.learning_rate"]
    assert rate["location"] == "reference/configuration/training.html#train.learning_rate" and "AdamW" in rate["text"]
    assert entries.keys() >= {"max_staleness", "agent.timeout", "kl.coefficient", "loss.clip_high"}
    assert "critic.train.learning_rate" not in entries and "function" not in entries
    (root,) = {path.parent for path in site if path.name == "404.html"}
    places = {name: page.places for path, page in site.items() for name in [path.relative_to(root).as_posix()]}
    for entry in index:
        page, _, place = entry["location"].partition("#")
        assert not place or place in places[page], entry["location"]


def test_pages_that_list_tests_are_not_searched(index: list[dict[str, Any]]) -> None:
    pages = {entry["location"].partition("#")[0] for entry in index}
    assert not pages & {"reference/claims.html", "reference/mutations.html"} and "reference/metrics.html" in pages


FIRST_HITS = {
    "learning rate": "reference/configuration/training.html#train.learning_rate",
    "resume": "guides/runs.html",
    "reward function": "guides/rewards.html",
    "out of memory": "guides/troubleshooting.html#memory-runs-out",
    "vllm": "guides/engines.html",
    "staleness": "internals/staleness.html",
    "lora": "guides/models.html",
    "agent timeout": "reference/configuration/rollouts.html#agent.timeout",
    "checkpoint": "internals/journal.html",
    "kl": "reference/algorithms/kl.html",
}
"""The page that the search finds first for words, or the first section below it."""


@pytest.mark.integration
def test_the_search_finds_the_best_place_first(site: dict[Path, Page], tmp_path: Path) -> None:
    (page,) = (path for path in site if path.match("reference/algorithms/losses.html"))
    found = {}
    with chromium(tmp_path) as browser:
        for words in FIRST_HITS:
            browser.open(page.as_uri())
            browser.until("document.querySelector('.md-search__input')")
            type_in = f"input.focus(), input.value = {words!r}, input.dispatchEvent(new Event('keyup'))"
            first = "document.querySelector('.md-search-result__item')"
            browser.until(f"(input => ({type_in}, {first}))(document.querySelector('.md-search__input'))")
            links = browser.evaluate(f"[...{first}.querySelectorAll('a')].slice(0, 2).map(link => link.href)")
            found[words] = [unquote(str(link).partition("?")[0]) for link in links]
    wrong = {
        words: found[words] for words, place in FIRST_HITS.items() if not any(place in link for link in found[words])
    }
    assert not wrong


@pytest.mark.integration
@pytest.mark.parametrize("width", [400, 1300])
def test_no_line_of_code_is_cut_at_its_column(site: dict[Path, Page], tmp_path: Path, width: int) -> None:
    cut = "[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1).length"
    shown = ("guides/training.html", "start/coming-from-verl.html", "contributing.html")
    pages = {name: path for path in site for name in shown if path.as_posix().endswith(f"/{name}")}
    with chromium(tmp_path) as browser:
        for page in pages.values():
            browser.open(page.as_uri(), width=width)
            browser.until("document.querySelector('pre > code')")
            assert browser.evaluate(cut) == 0, page.name


@pytest.mark.integration
def test_the_search_works_without_a_server(site: dict[Path, Page], tmp_path: Path) -> None:
    (page,) = (path for path in site if path.match("reference/algorithms/losses.html"))
    result = """'.md-search-result__item a[href*="guides/async.html#windowed-order"]'"""
    type_in = "input.focus(), input.value = 'windowed order', input.dispatchEvent(new Event('keyup'))"
    with chromium(tmp_path) as browser:
        browser.open(page.as_uri())
        browser.until("document.querySelector('.md-search__input')")
        browser.until(
            f"(input => ({type_in}, document.querySelector({result})))(document.querySelector('.md-search__input'))"
        )
        assert not browser.problems and all(url.startswith(("file:", "data:")) for url in browser.requested)


def test_pages_on_how_it_works_have_pictures_with_measured_figures() -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/internals").glob("*.md")}
    assert {name for name, text in pages.items() if "\n![" not in text} == set()
    picture = (ROOT / "docs/pictures/speedups.svg").read_text(encoding="utf-8")
    drawn = set(re.findall(r">(\d+\.\d+)<", picture))
    assert len(drawn) == 10 and drawn <= set(re.findall(r"\*\*([\d.]+)\*\*", pages["measurements"]))


def test_links_are_rewritten_for_the_site() -> None:
    text = (
        "[a](../../README.md#train-yours) [b](sync.md) [c](../../etude/errors.py) [d](#here) [e](https://x.org/etude)\n"
        "```\n[f](../README.md)\n```\n[g](../../tests/conformance) [h](nowhere.md)"
    )
    assert rewritten(text, "internals/tour.md") == (
        "[a](../index.md#train-yours) [b](sync.md) [c](../source/etude/errors.py.md) [d](#here) [e](https://x.org/etude)\n"
        "```\n[f](../README.md)\n```\n[g](../source/tests/conformance.md) [h](nowhere.md)"
    )
    brought = rewritten("[a](docs/internals/tour.md) [b](LICENSE)", "index.md")
    assert brought == "[a](internals/tour.md) [b](source/LICENSE.md)"


def test_every_page_is_in_the_navigation_and_is_found_without_a_server() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    listed = set(re.findall(r"^ +- (?:.+: )?(\S+\.md)$", config.partition("\nnav:\n")[2], flags=re.MULTILINE))
    assert {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} <= listed
    assert re.search(r"^  - offline$", config, flags=re.MULTILINE)


def test_the_command_that_makes_the_site_stops_at_a_warning() -> None:
    """`--quiet` keeps warnings from being counted, and `--strict` would find none."""
    command = re.search(r"mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert command is not None and "--strict" in command[0] and "--quiet" not in command[0]
