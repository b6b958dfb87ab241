"""Measure how fast the viewer answers on a large run, and how much memory it takes.

    python -m bench.view [--steps 1000] [--tokens 200] [--directory DIRECTORY] [--json FILE]

The run has 512 rollouts a step, in groups of eight, and one group in 64 was dropped. Its journal is written as a run
writes it, which takes minutes; with `--directory` it stays there and is used again. The viewer is a process of its own.
It is asked for the page of the run once, for the first time, and for other pages at random places many times.

`wall` is what a browser waits for. `CPU` is the processor time of the viewer, which other programs do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import machine, versions
from etude.integrity import write_text
from etude.observe import JsonlSink, RunInfo, make_console, progress
from etude.records import Completion, Outcome, Turn
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    Event,
    RolloutQueued,
    RolloutsAdmitted,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    open_store,
)

GROUPS, SIZE = 64, 8
METRICS = 80
"""Metrics of a step."""
ROUNDS = 40
"""Requests of each kind at random places."""
OPEN_S, ANSWER_S, MEMORY_MIB = 1.0, 0.2, 300
"""The bounds: of the first page, of the 95th percentile of the others, and of the memory."""


@dataclass(frozen=True)
class Asked:
    """A kind of request, timed."""

    name: str
    wall: float
    """Seconds: of the first page, or the 95th percentile."""
    cpu: float
    """Seconds of the processor for one request, on average."""
    bytes: int
    """Size of the largest reply."""


def write_run(directory: Path, steps: int, tokens: int) -> None:
    """Write a run of this many steps, with answers of about this many tokens."""
    directory.mkdir(parents=True)
    write_text(directory / "run.yaml", f"recipe: train\nsteps: {steps}\n")
    sink = JsonlSink()
    sink.open(RunInfo("bench", directory))
    console, draw = make_console(), np.random.default_rng(0)
    with closing(open_store(directory / "journal.sqlite")) as store, progress("writing", steps, console) as bar:
        for step in range(1, steps + 1):
            store.append(list(_events_of(step, tokens, draw)))
            values = {f"metric/{number}": float(draw.random()) for number in range(METRICS)}
            times = {"time/step": 2.0, "time/collect": 1.0, "time/update": 0.5}
            sink.log(step, {"reward": step / steps, **values, **times})
            bar.advance()
    sink.close()


def _events_of(step: int, tokens: int, draw: np.random.Generator) -> Iterator[Event]:
    first_task, trained = GROUPS * (step - 1), list[int]()
    for task in range(first_task, first_task + GROUPS):
        prompt = "What is the sum of these numbers? " + " ".join(map(str, range(task, task + 20)))
        yield TaskIssued(task, task, "sums", {"prompt": prompt, "ground_truth": str(task)})
        for sample in range(SIZE):
            rollout = SIZE * task + sample
            count = int(draw.integers(tokens // 2, tokens * 3 // 2 + 1))
            ids, sampled_by = draw.integers(0, 32_000, count, np.int32), np.full(count, step - 1, np.int32)
            completion = Completion(ids, -draw.random(count, np.float32), sampled_by, "stop", "word " * count)
            at = 10.0 * step
            yield RolloutQueued(rollout, task, sample)
            yield AttemptStarted(rollout, 0, at=at)
            yield TurnRecorded(rollout, 0, Turn(np.arange(60, dtype=np.int32), completion, 0), at=at + 3, began=at)
            yield AttemptRewarded(rollout, 0, float(sample % 2), {"right": float(sample % 2)})
            yield AttemptEnded(rollout, 0, Outcome.SUCCEEDED, at=at + 3)
            trained += [rollout] if task > first_task else []
    yield TaskDropped(first_task, step, "all rewards are equal")
    yield RolloutsAdmitted(step, tuple(trained), first_task + GROUPS, step - 1)


class Viewer:
    """A viewer in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], client: httpx2.Client, address: str, run: str) -> None:
        self._process, self._client, self._address, self._run = process, client, address, run

    def ask(self, name: str, **parameters: float | str) -> tuple[float, int]:
        """Return the seconds that a query takes, and the bytes of its reply."""
        began = time.perf_counter()
        reply = self._client.get(f"{self._address}api/{name}", params={"run": self._run, **parameters})
        seconds = time.perf_counter() - began
        assert reply.status_code == 200, reply.text
        return seconds, len(reply.content)

    def cpu(self) -> float:
        """Return the processor time of the viewer so far, in seconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Return the peak memory of the viewer, in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@contextmanager
def viewer(directory: Path) -> Iterator[Viewer]:
    """Yield a viewer of a directory with one run."""
    words = [sys.executable, "-m", "etude", "view", str(directory), "--listen", "127.0.0.1:0", "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+/", process.stdout.readline())
        assert found is not None
        try:
            with httpx2.Client(timeout=60.0) as client:
                yield Viewer(process, client, found[0], directory.resolve().name)
        finally:
            process.terminate()


def measure(opened: Viewer, steps: int, rounds: int = ROUNDS) -> list[Asked]:
    """Return the times of the first page, and of each kind of request at random places."""
    before = opened.cpu()
    seconds, size = opened.ask("run")
    measured = [Asked("first page", seconds, opened.cpu() - before, size)]
    chance = random.Random(0)
    step: Callable[[], int] = lambda: chance.randint(1, steps)  # noqa: E731
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "run": dict,
        "curves": dict,
        "times": dict,
        "steps": dict,
        "lanes": lambda: {"last": step()},
        "store": dict,
        "step": lambda: {"step": step()},
        "task": lambda: {"task": chance.randrange(GROUPS * steps)},
        "search": lambda: {"q": f"step={step()} reward>0.5 word", "seconds": 0.1},
        "group": lambda: {"task": chance.randrange(GROUPS * steps)},
        "rollout": lambda: {"rollout": chance.randrange(GROUPS * SIZE * steps)},
        "tokens": lambda: {"rollout": chance.randrange(GROUPS * SIZE * steps)},
    }
    for name, parameters in kinds.items():
        before = opened.cpu()
        answers = [opened.ask(name, **parameters()) for _ in range(rounds)]
        wall = float(np.percentile([seconds for seconds, _ in answers], 95))
        measured.append(Asked(name, wall, (opened.cpu() - before) / rounds, max(size for _, size in answers)))
    return measured


def shown(measured: Sequence[Asked], memory: int) -> Table:
    """Return the table of all requests."""
    title = f"peak memory {memory / 2**20:.0f} MiB, at most {MEMORY_MIB} wanted"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=title)
    for heading in ("query", "wall, ms (p95)", "CPU, ms", "at most, ms", "KiB"):
        table.add_column(heading, justify="left" if heading == "query" else "right")
    for asked in measured:
        bound = OPEN_S if asked.name == "first page" else ANSWER_S
        numbers = (1e3 * asked.wall, 1e3 * asked.cpu, 1e3 * bound, asked.bytes / 2**10)
        table.add_row(asked.name, *(f"{number:,.0f}" for number in numbers))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the run")
    parser.add_argument("--tokens", type=int, default=200, help="mean tokens of an answer")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="requests of each kind")
    parser.add_argument("--directory", type=Path, help="where the run is written, or is from an earlier call")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        directory = given.directory or Path(folder) / "run"
        if not directory.exists():
            write_run(directory, given.steps, given.tokens)
        with viewer(directory) as opened:
            measured = measure(opened, given.steps, given.rounds)
            memory = opened.memory()
        size = (directory / "journal.sqlite").stat().st_size / 2**30
    console = make_console()
    console.print(f"{given.steps} steps of {GROUPS * SIZE} rollouts; a journal of {size:.1f} GiB")
    console.print(shown(measured, memory))
    if given.json:
        cases = [asdict(asked) for asked in measured]
        whole = {"machine": machine(), "versions": versions(), "cases": cases, "memory": memory}
        given.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
