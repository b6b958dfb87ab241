"""Kill a run fifty times and more, and print what became of each story: `python -m tests.chaos.table`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.scenario import POINTS, Life, Story, Theatre, make_world, some_ends

__all__ = ["main"]


def main() -> int:
    """Play the stories, print the table; returns 0 if every one of them ended as the run that nobody killed."""
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("--kills", type=int, default=50, help="how many kills there must be in all")
    told.add_argument("--seed", type=int, default=0, help="what the random times are derived from")
    arguments = told.parse_args()
    table = Table("story", "kills", "trained tasks", "weights", "seconds", title="Killed and resumed")
    with tempfile.TemporaryDirectory() as place:
        world, theatre = make_world(Path(place) / "world"), Theatre()
        whole = theatre.play(Path(place) / "whole", world, [])
        kills, good, story = 0, True, 0
        while kills < arguments.kills:
            name, ends = _story(story, arguments.seed, whole)
            began = time.perf_counter()
            found = theatre.play(Path(place) / str(story), world, ends)
            same = (found.tasks == whole.tasks and found.issued == whole.issued, found.weights == whole.weights)
            good &= all(same)
            kills, story = kills + found.kills, story + 1
            cells = ("the same" if same[0] else "OTHERS", "bit for bit" if same[1] else "OTHERS")
            table.add_row(name, str(found.kills), *cells, f"{time.perf_counter() - began:.1f}")
    table.add_row("all", str(kills), _sum(whole), "", "")
    Console().print(table)
    return 0 if good else 1


def _story(number: int, seed: int, whole: Story) -> tuple[str, list[Life | float]]:
    """First each named point on its own, twice in a row; then points and random times mixed."""
    if number < len(POINTS):
        return f"twice at `{POINTS[number]}`", [Life(POINTS[number], 2), Life(POINTS[number], 3)]
    return "points and random times in turn", some_ends(16, seed + number, whole)


def _sum(whole: Story) -> str:
    return f"{len(whole.tasks)} tasks, each once"


if __name__ == "__main__":
    raise SystemExit(main())
