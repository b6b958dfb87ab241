"""The integration tests in parts of about equal seconds: `make integration PART=2/4` runs the second of four.

Usage: python -m tests.parts COUNT

This prints the part that continuous integration runs at the checked-out commit, for example 2/4. It follows from the
number of commits, so that as many landings as there are parts run all tests.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.durations import Record, key_of
from tests.tiers import fixtures_of, unit_of

ROOT = Path(__file__).parents[1]
QUICK_S = 0.1
"""The seconds of a test that is not recorded."""


@dataclass(frozen=True)
class Part:
    """One of several parts, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read a part such as 2/4."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        part = cls(int(found[1]), int(found[2])) if found else None
        if part is None or not 1 <= part.number <= part.count:
            raise pytest.UsageError(
                f"PART={text} is no part of the tests. Give its number and how many there are: PART=2/4."
            )
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def select(self, seconds: Mapping[str, float]) -> set[str]:
        """Return this part's units, given the seconds of all: the longest first, each to the part with the least."""
        parts = [(0.0, number) for number in range(1, self.count + 1)]
        chosen = set()
        for unit in sorted(seconds, key=lambda unit: (-seconds[unit], unit)):
            total, number = heapq.heappop(parts)
            heapq.heappush(parts, (total + seconds[unit], number))
            chosen |= {unit} if number == self.number else set()
        return chosen


class OnePart:
    """The pytest plug-in that runs one part of the selected tests. A file or a group is never divided."""

    def __init__(self, part: Part, record: Record) -> None:
        self.part, self.record = part, record

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the other parts, of the tests that marker and keyword expressions have left."""
        units = self.part.select(seconds_of_units(items, self.record))
        config.hook.pytest_deselected(items=[item for item in items if unit_of(item) not in units])
        items[:] = [item for item in items if unit_of(item) in units]


def seconds_of_units(items: Iterable[pytest.Item], record: Record) -> dict[str, float]:
    """Return the recorded seconds of each unit: of its tests, and once of each shared fixture."""
    seconds: dict[str, float] = defaultdict(float)
    fixtures: dict[str, set[str]] = defaultdict(set)
    for item in items:
        unit = unit_of(item)
        seconds[unit] += record.tests.get(key_of(item.nodeid), QUICK_S)
        fixtures[unit].update(fixtures_of(item))
    return {unit: seconds[unit] + sum(record.fixtures.get(name, 0.0) for name in fixtures[unit]) for unit in seconds}


def part_of_commit(count: int, folder: Path = ROOT) -> Part:
    """Return the part whose turn it is at the checked-out commit.

    A shallow clone does not know how many commits there are, so the commit's hash decides: the part is the same each
    time, but successive commits may have the same. A folder without git has the first part.
    """
    number = _git(folder, "rev-list", "--count", "HEAD")
    if _git(folder, "rev-parse", "--is-shallow-repository") == "true":
        number = str(int(_git(folder, "rev-parse", "HEAD"), 16))
    return Part(int(number or 0) % count + 1, count)


def _git(folder: Path, *words: str) -> str:
    """Return the output of a command of git; empty if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main(words: Sequence[str]) -> None:
    """Print the part of the checked-out commit."""
    print(part_of_commit(int(words[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
