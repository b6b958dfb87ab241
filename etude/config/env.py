"""The process environment: the one file that reads it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory", "required_components"]


def required_components() -> frozenset[str]:
    """The components that must be present (`ETUDE_REQUIRE`, comma-separated): their tests fail instead of skipping."""
    return frozenset(word.strip() for word in os.environ.get("ETUDE_REQUIRE", "").split(",") if word.strip())


def cache_directory() -> Path:
    """Where what can be made again is kept between runs: `etude` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (asked if asked.is_absolute() else Path.home() / ".cache") / "etude"
