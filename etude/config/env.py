"""The process environment: the one file that reads it."""

from __future__ import annotations

import os

from etude.errors import ConfigError

__all__ = ["flag", "require", "required_components", "text"]

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


def text(name: str, default: str = "") -> str:
    """The value of a variable, or `default` where it is not set."""
    return os.environ.get(name, default)


def flag(name: str) -> bool:
    """Whether a variable says yes; unset means no."""
    value = text(name).strip().lower()
    if value not in _YES | _NO:
        raise ConfigError(
            f"The environment variable {name} expects 1 or 0, and is set to something else. Set it to one."
        )
    return value in _YES


def require(name: str) -> str:
    """The value of a variable that must be set."""
    value = text(name)
    if not value:
        raise ConfigError(f"The environment variable {name} is needed and not set. Set it and try again.")
    return value


def required_components() -> frozenset[str]:
    """The components that must be present (`ETUDE_REQUIRE`, comma-separated): their tests fail instead of skipping."""
    return frozenset(word.strip() for word in text("ETUDE_REQUIRE").split(",") if word.strip())
