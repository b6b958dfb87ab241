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


def count_slips(written: str, meant: str) -> int:
    """Return the fewest letters to insert, leave out, replace or swap with the next one, from one name to another."""
    before: list[int] = []
    row = list(range(len(meant) + 1))
    for i, letter in enumerate(written, start=1):
        above = before
        before = row
        row = [i]
        for j, other in enumerate(meant, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == meant[j - 2] and written[i - 2] == other:
                row[j] = min(row[j], above[j - 2] + 1)
    return row[-1]
