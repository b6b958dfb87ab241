"""Kill runs fifty times and more, and print the results: `python -m tests.chaos.table`.

The first runs use the embedded engine and must equal the uninterrupted run bit for bit. The next ones make rollouts
while the policy trains: they must keep their bound, lose no task, and train to the weights that follow from their
journal, bit for bit. The others are runs of agents, with runners on threads and in processes. They must train the same
tasks at the same steps, and lose no acknowledged write.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos import stale
from tests.chaos.agents import AgentRunKiller, random_plans
from tests.chaos.scenario import POINTS, KillPoint, RunKiller, RunResult, make_world, random_kills

__all__ = ["main"]


def main() -> int:
    """Run all, print the tables; return 0 if every run ended as the uninterrupted one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many kills there must be of each kind of run")
    parser.add_argument("--seed", type=int, default=0, help="what the random times are derived from")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        world = make_world(Path(place) / "world")
        engine = _engine(Path(place) / "engine", world, arguments.kills, arguments.seed)
        _stale(Path(place) / "stale", world, arguments.kills, arguments.seed)
        agents = _agents(Path(place) / "agents", world, arguments.kills, arguments.seed)
    return 0 if engine and agents else 1


def _engine(place: Path, world: Path, wanted: int, seed: int) -> bool:
    """Kill runs of the embedded engine."""
    table = Table("story", "kills", "trained tasks", "weights", "seconds", title="Killed and resumed")
    killer = RunKiller()
    uninterrupted = killer.run_to_end(place / "whole", world, [])
    kills, good, number = 0, True, 0
    while kills < wanted:
        name, kill_times = _plan(number, seed, uninterrupted)
        began = time.perf_counter()
        result = killer.run_to_end(place / str(number), world, kill_times)
        same = (
            result.tasks == uninterrupted.tasks and result.issued == uninterrupted.issued,
            result.weights == uninterrupted.weights,
        )
        good &= all(same)
        kills, number = kills + result.kills, number + 1
        cells = ("the same" if same[0] else "OTHERS", "bit for bit" if same[1] else "OTHERS")
        table.add_row(name, str(result.kills), *cells, f"{time.perf_counter() - began:.1f}")
    table.add_row("all", str(kills), f"{len(uninterrupted.tasks)} tasks, each once", "", "")
    Console().print(table)
    return good


def _stale(place: Path, world: Path, wanted: int, seed: int) -> None:
    """Kill runs that make rollouts while the policy trains. A broken promise raises an error."""
    bounds = (1, 4)
    columns = ("story", "kills", *(f"max_staleness={bound}" for bound in bounds), "seconds")
    table = Table(*columns, title="Killed and resumed: staleness, and the weights that follow from the journal")
    killer, began = RunKiller(), time.perf_counter()
    place.mkdir()
    assert killer.run_once(place / "whole", world, KillPoint(), **stale.stale(4))
    seconds = time.perf_counter() - began
    kills, number = 0, 0
    while kills < wanted:
        name, began, cells, killed = "points and random times in turn", time.perf_counter(), list[str](), 0
        for bound in bounds:
            plan = stale.random_stale_kills(16, seed + number, seconds)
            if number < len(stale.POINTS):
                point = stale.POINTS[number]
                name, plan = f"twice at `{point}`", [KillPoint(point, 2), KillPoint(point, 4)]
            done, staleness = stale.run_killed(killer, place / f"{number}-{bound}", world, bound, plan)
            killed += done
            cells.append(f"{staleness} at most, bit for bit")
        kills, number = kills + killed, number + 1
        table.add_row(name, str(killed), *cells, f"{time.perf_counter() - began:.1f}")
    table.add_row("all", str(kills), "no task lost, none trained twice", "", "")
    Console().print(table)


def _agents(place: Path, world: Path, wanted: int, seed: int) -> bool:
    """Kill runs of agents, on threads and in processes in turn. A broken promise raises an error."""
    columns = ("run", "kills", "of runners", "trained tasks", "attempts", "answers", "seconds")
    table = Table(*columns, title="Runs of agents, killed and resumed")
    killer = AgentRunKiller()
    place.mkdir()
    uninterrupted = killer.run_agents(place / "whole", world, [])
    kills, good, number = 0, True, 0
    while kills < wanted:
        strategy = ("shm", "cs")[number % 2]
        began = time.perf_counter()
        plans = random_plans(12, seed + number, uninterrupted, kill_runners=strategy == "cs")
        result = killer.run_agents(place / str(number), world, plans, (), **{"agent.strategy": strategy})
        same = (result.rows, result.steps) == (uninterrupted.rows, uninterrupted.steps)
        good &= same
        kills, number = kills + result.kills + result.runner_kills, number + 1
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.attempts.items()))
        cells = ("the same" if same else "OTHERS", ended, "all written", f"{time.perf_counter() - began:.1f}")
        name = "on threads" if strategy == "shm" else "in processes"
        table.add_row(name, str(result.kills), str(result.runner_kills), *cells)
    table.add_row("all", str(kills), "", f"{len(uninterrupted.rows)} tasks, each once", "", "", "")
    Console().print(table)
    return good


def _plan(number: int, seed: int, uninterrupted: RunResult) -> tuple[str, list[KillPoint | float]]:
    """Return each named point on its own, twice in a row; afterwards, points and random times mixed."""
    if number < len(POINTS):
        return f"twice at `{POINTS[number]}`", [KillPoint(POINTS[number], 2), KillPoint(POINTS[number], 3)]
    return "points and random times in turn", random_kills(16, seed + number, uninterrupted)


if __name__ == "__main__":
    raise SystemExit(main())
