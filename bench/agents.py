"""Time agents against Agent Lightning, and alone: rollouts, the endpoint, the start, a large store, and kills.

    python -m bench.agents [--rounds 5] [--cases compared endpoint start growth kills] [--json FILE]

In `compared` both play the same number of rollouts of an agent that only returns 1, with equal numbers of runners:

    cs     two runner processes that connect to a server; Etude's store is a file and acknowledges after the commit,
           Agent Lightning's is in memory
    shm    one runner on a thread; both stores are in memory

Each runs in its own process. Agent Lightning has its own environment, which is built the first time. A runner of Etude
plays up to 32 attempts of a coroutine at once; one of Agent Lightning plays one, by its design. They alternate, each
newly started and warmed up by one run. A ratio is the median over the rounds of Etude's rollouts a second, divided by
Agent Lightning's. Etude's rollouts a second are then timed over more rollouts.

    endpoint   calls a second on one core, with keys, exact continuation and recording in a file, over an engine that
               takes no time; and the latency at half that rate
    start      the time from `import etude.agents` in a new process to the first claim
    growth     the cost of a rollout with 100,000 stored rollouts, relative to 1,000
    kills      a store killed three times under load: every acknowledged write must be there
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench import agents_cases
from bench.common import machine, versions
from bench.workers import Worker
from etude.observe import make_console, progress
from etude.rollout.python_environments import ensure_environment, load_pins

ROLLOUTS = {"cs": 800, "shm": 1500}
"""Rollouts of each side in a round."""
MORE = {"cs": 4000, "shm": 6000}
"""Rollouts of Etude alone in a round."""
AT_ONCE = 32
"""Concurrent attempts of a runner of Etude."""
AIMS = {"cs_vs_agl": 15.0, "shm_vs_agl": 6.0}
"""The aims for the ratios of rollouts a second."""
CASES = ("compared", "endpoint", "start", "growth", "kills")
WINDOWS, STARTS, TURNS, KILLS = 9, 5, 15, 3


@dataclass(frozen=True)
class Figure:
    """A measured figure and its aim."""

    name: str
    value: float
    unit: str
    aim: float
    most: bool = False
    """True if the aim is a maximum, else it is a minimum."""

    @property
    def met(self) -> bool:
        """True if the figure meets its aim."""
        return self.value <= self.aim if self.most else self.value >= self.aim


@dataclass
class Compared:
    """A strategy, and the rollouts a second of both under it, one entry a round; `more` is Etude's over more."""

    strategy: str
    etude: list[float]
    agl: list[float]
    more: list[float]

    @property
    def name(self) -> str:
        """The name of its ratio."""
        return f"{self.strategy}_vs_agl"

    def ratio(self) -> float:
        """The ratio of Etude's rollouts a second to Agent Lightning's."""
        return median(ours / theirs for ours, theirs in zip(self.etude, self.agl, strict=True))


@contextmanager
def start_worker(name: str, command: Sequence[str], log: Path) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """Start a worker; yield it once it is ready, with its versions."""
    worker = Worker(name, command, log)
    try:
        yield worker, worker.hear()
    finally:
        worker.close()


def rate(worker: Worker, count: int) -> float:
    """Return rollouts a second, over this many."""
    worker.tell(str(count))
    return count / float(worker.hear()["seconds"])


def compared(rounds: int, agl: Path, folder: Path, console: Console) -> tuple[list[Compared], dict[str, Any]]:
    """Time both strategies of both sides in turns; return the peer's versions too. agl: Agent Lightning's Python."""
    results = [Compared(strategy, [], [], []) for strategy in ROLLOUTS]
    peers: dict[str, Any] = {}
    with progress("rollouts", 2 * len(results) * rounds, console) as bar:
        for number in range(rounds):
            for result in results:
                count = ROLLOUTS[result.strategy]
                with start_worker(
                    "agl", [str(agl), "-m", "bench.agents_agl", result.strategy], folder / f"agl-{result.strategy}.log"
                ) as (worker, peers):
                    result.agl.append(rate(worker, count))
                    worker.process.kill()  # its shutdown waits for half a minute
                bar.advance()
                own = folder / f"etude-{result.strategy}-{number}"
                own.mkdir()
                command = [sys.executable, "-m", "bench.agents_etude", result.strategy, str(own), str(AT_ONCE)]
                with start_worker("etude", command, own / "worker.log") as (worker, _):
                    result.etude.append(rate(worker, count))
                    result.more.append(rate(worker, MORE[result.strategy]))
                bar.advance()
    return results, peers


def alone(cases: Sequence[str], folder: Path, console: Console) -> list[Figure]:
    """Measure the figures of Etude alone."""
    figures: list[Figure] = []
    if "endpoint" in cases:
        with progress("calls", WINDOWS + 1, console) as bar:
            result = agents_cases.endpoint(folder / "endpoint", WINDOWS, bar.advance)
        figures.append(Figure("endpoint, calls a second", result["rate"], "/s", 800))
        half = f"at {result['asked']:.0f} calls a second"
        figures.append(
            Figure(f"endpoint, p99 {half} (p50 {1e3 * result['p50']:.1f} ms)", 1e3 * result["p99"], "ms", 25, True)
        )
    if "start" in cases:
        with progress("starts", STARTS, console) as bar:
            took = agents_cases.started(folder / "start", STARTS, bar.advance)
        figures.append(Figure("import etude.agents to the first claim", took, "s", 0.5, True))
    if "growth" in cases:
        with progress("rollouts stored", None, console) as bar:
            result = agents_cases.grown(folder / "growth", TURNS, bar.advance)
        costs = f"{1e6 * result['large']:.0f} µs, beside {1e6 * result['small']:.0f} µs"
        figures.append(Figure(f"cost of a rollout, 100,000 stored ({costs})", result["ratio"], "times", 1.3, True))
    if "kills" in cases:
        with progress("kills", KILLS, console) as bar:
            lost = agents_cases.killed(folder / "kills", KILLS, bar.advance)
        told_of = f"{lost['acknowledged']:,} ends acknowledged, {lost['kills']} kills"
        figures.append(Figure(f"{told_of}: lost", lost["lost"], "", 0, True))
    return figures


def of_compared(results: Sequence[Compared]) -> list[Figure]:
    """Return the rollouts a second of Etude alone."""
    least = {"cs": 600, "shm": 3000}
    names = {"cs": "cs, 2 runner processes, store in a file", "shm": "shm, 1 runner, store in memory"}
    return [
        Figure(names[result.strategy], median(result.more), "rollouts/s", least[result.strategy]) for result in results
    ]


def beside(results: Sequence[Compared]) -> Table:
    """Return the table of the comparison; missed aims are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for title in ("Etude, rollouts/s", "Agent Lightning", "Etude is faster by", "aim", ""):
        table.add_column(title, justify="right")
    for result in results:
        ratio, aim = result.ratio(), AIMS[result.name]
        cells = [f"{median(result.etude):,.0f}", f"{median(result.agl):,.0f}", f"{ratio:.1f}", f"{aim:g}"]
        missed = ratio < aim
        table.add_row(result.strategy, *cells, "misses" if missed else "", style="yellow" if missed else "")
    return table


def shown(figures: Sequence[Figure]) -> Table:
    """Return the table of the figures; missed aims are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("measured")
    for title in ("", "aim", ""):
        table.add_column(title, justify="right")
    for figure in figures:
        value = f"{figure.value:,.0f}" if figure.value >= 100 or figure.unit == "" else f"{figure.value:.2f}"
        aim = f"{'at most' if figure.most else 'at least'} {figure.aim:g}"
        style = "" if figure.met else "yellow"
        table.add_row(figure.name, f"{value} {figure.unit}".strip(), aim, "" if figure.met else "misses", style=style)
    return table


def as_tree(results: Sequence[Compared], figures: Sequence[Figure], peers: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements, with machine and versions."""
    return {
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions() | {"peers": dict(peers)},
        "cases": [asdict(result) | {"name": result.name} for result in results]
        + [asdict(e) | {"met": e.met} for e in figures],
        "ratios": {result.name: result.ratio() for result in results},
        "limits": AIMS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often both play in turns; medians are shown")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the workers are ended as well
    console = make_console()
    results: list[Compared] = []
    peers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "compared" in arguments.cases:
            agl = ensure_environment(load_pins("agentlightning"), console=console).python
            results, peers = compared(arguments.rounds, agl, Path(folder), console)
        figures = of_compared(results) + alone(arguments.cases, Path(folder), console)
    if results:
        console.print(f"A trivial agent, median of {arguments.rounds} rounds.")
        console.print(beside(results))
    console.print(shown(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_tree(results, figures, peers), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
