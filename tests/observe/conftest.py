"""Fixtures that restore Python's logging after every test of this folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from etude.observe.log import configure_logging


@pytest.fixture(autouse=True)
def configured_log() -> Iterator[None]:
    """Log to standard error, as a command does, during one test."""
    root = logging.getLogger("etude")
    before = (list(root.handlers), root.level, root.propagate)
    root.handlers = []
    configure_logging("info")
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level, root.propagate = before
