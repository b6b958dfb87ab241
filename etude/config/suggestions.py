"""Suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def find_closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name nearest to one, ignoring case; None if none is near."""
    by_letters = {known.lower(): known for known in names}
    swapped = [known for known in by_letters if sorted(known) == sorted(name.lower())]
    near = swapped or get_close_matches(name.lower(), by_letters, n=1)
    return by_letters[near[0]] if near else None


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Return ` Did you mean grpo?`, to append to a sentence that refuses a name; empty if no name is near."""
    near = find_closest(name, names)
    return f" Did you mean {near}?" if near else ""
