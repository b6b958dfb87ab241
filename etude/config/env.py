"""The process environment: the one file that reads it."""

from __future__ import annotations

import os

__all__ = ["required_components"]


def required_components() -> frozenset[str]:
    """The components that must be present (`ETUDE_REQUIRE`, comma-separated): their tests fail instead of skipping."""
    return frozenset(word.strip() for word in os.environ.get("ETUDE_REQUIRE", "").split(",") if word.strip())
