"""Kill runs fifty times and more, and print what became of each story: `python -m tests.chaos.table`.

First runs of the embedded engine, which must be bit for bit the run that nobody killed; then runs of agents, with
runners on threads and in processes, which must train the same tasks at the same steps and lose nothing that anybody was
told was written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.agents import Company, some_acts
from tests.chaos.scenario import POINTS, Life, Story, Theatre, make_world, some_ends

__all__ = ["main"]


def main() -> int:
    """Play the stories, print the tables; returns 0 if every one of them ended as the run that nobody killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many kills there must be of each kind of run")
    parser.add_argument("--seed", type=int, default=0, help="what the random times are derived from")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        world = make_world(Path(place) / "world")
        engine = _engine(Path(place) / "engine", world, arguments.kills, arguments.seed)
        agents = _agents(Path(place) / "agents", world, arguments.kills, arguments.seed)
    return 0 if engine and agents else 1


def _engine(place: Path, world: Path, wanted: int, seed: int) -> bool:
    """Runs of the embedded engine."""
    table = Table("story", "kills", "trained tasks", "weights", "seconds", title="Killed and resumed")
    theatre = Theatre()
    whole = theatre.play(place / "whole", world, [])
    kills, good, story = 0, True, 0
    while kills < wanted:
        name, ends = _story(story, seed, whole)
        began = time.perf_counter()
        result = theatre.play(place / str(story), world, ends)
        same = (result.tasks == whole.tasks and result.issued == whole.issued, result.weights == whole.weights)
        good &= all(same)
        kills, story = kills + result.kills, story + 1
        cells = ("the same" if same[0] else "OTHERS", "bit for bit" if same[1] else "OTHERS")
        table.add_row(name, str(result.kills), *cells, f"{time.perf_counter() - began:.1f}")
    table.add_row("all", str(kills), f"{len(whole.tasks)} tasks, each once", "", "")
    Console().print(table)
    return good


def _agents(place: Path, world: Path, wanted: int, seed: int) -> bool:
    """Runs of agents, on threads and in processes in turn. What breaks a law there is an error, which ends this."""
    columns = ("story", "kills", "of runners", "trained tasks", "attempts", "answers told", "seconds")
    table = Table(*columns, title="Runs of agents, killed and resumed")
    company = Company()
    place.mkdir()
    whole = company.perform(place / "whole", world, [])
    kills, good, story = 0, True, 0
    while kills < wanted:
        strategy = ("shm", "cs")[story % 2]
        began = time.perf_counter()
        acts = some_acts(12, seed + story, whole, falls=strategy == "cs")
        result = company.perform(place / str(story), world, acts, **{"agent.strategy": strategy})
        same = (result.rows, result.steps) == (whole.rows, whole.steps)
        good &= same
        kills, story = kills + result.kills + result.falls, story + 1
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.attempts.items()))
        cells = ("the same" if same else "OTHERS", ended, "all written", f"{time.perf_counter() - began:.1f}")
        name = "on threads" if strategy == "shm" else "in processes"
        table.add_row(name, str(result.kills), str(result.falls), *cells)
    table.add_row("all", str(kills), "", f"{len(whole.rows)} tasks, each once", "", "", "")
    Console().print(table)
    return good


def _story(number: int, seed: int, whole: Story) -> tuple[str, list[Life | float]]:
    """First each named point on its own, twice in a row; then points and random times mixed."""
    if number < len(POINTS):
        return f"twice at `{POINTS[number]}`", [Life(POINTS[number], 2), Life(POINTS[number], 3)]
    return "points and random times in turn", some_ends(16, seed + number, whole)


if __name__ == "__main__":
    raise SystemExit(main())
