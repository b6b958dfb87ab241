"""A browser, and the viewer over the directory of runs that a module's fixture `root` makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.view.browser import Browser, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    from etude.view.server import start_viewer

    server, address = start_viewer(root)
    with server:
        yield address


@pytest.fixture
def without_problems(browser: Browser, address: str) -> Iterator[None]:
    """After a test: no script failed, no policy was broken, and nothing was asked of another server."""
    browser.problems.clear()
    browser.requested.clear()
    yield
    assert not browser.problems
    foreign = [url for url in browser.requested if not url.startswith((address, "about:", "data:"))]
    assert not foreign
