"""Time whole GRPO steps against TRL's GRPOTrainer: the same models, tasks, rewards, sizes and optimizer.

    python -m bench.grpo_vs_trl [--rounds 5] [--cases a b c learn] [--as-it-comes] [--json FILE]

Each trainer runs in its own process. TRL has its own environment, which is built the first time. Both train the same
random Qwen3-shaped model in the precision that `train.precision=auto` chooses, in bf16 with float32 weights for AdamW:
eight answers to a task at temperature 1, compared within their group, one update a step, no reference, and the same
reward of the answer's text:

    a        3 million parameters, 64 answers of up to 64 tokens to prompts of 64
    b        75 million, the same
    c        75 million, prompts of 512 tokens, eight answers to each, 32 new tokens
    learn    whether both learn: a small model, equal numbers of steps, and the rewards of the last ones

Etude's process keeps freed memory (`models/allocator.py`). TRL gets the same settings by environment variables, because
it gains as much from them; `--as-it-comes` leaves them out.

A step is everything from its start to its metrics: sampling, rewards, the update. The trainers alternate, with two
warm-up steps each. A ratio is the median over the rounds of TRL's time divided by Etude's. The phases of Etude come
from its metrics. The ceiling is the machine's matrix product in that precision, timed in the same round: two operations
a parameter for each sampled token and each prompt token, six for each trained token. A shared prompt counts once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.common import machine, matrix_rate, precision, versions
from bench.rollout import MODELS
from bench.words import write_model, write_tasks
from bench.workers import Worker
from etude.models import create, tiny_config
from etude.observe import make_console, progress
from etude.rollout.python_environments import ensure_environment, load_pins

LIMITS = {"a": 1.7, "b": 1.4, "c": 7.0}
"""Limits: the smallest speedups of Etude over TRL."""
WARMING = 2
"""Warm-up steps of each trainer."""
TRAINERS = ("etude", "trl")
RETAINING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Settings with which glibc keeps freed memory."""


@dataclass(frozen=True)
class Case:
    """The work of both trainers in a step."""

    name: str
    model: str
    prompt: int = 64
    new: int = 64
    groups: int = 8
    group_size: int = 8
    learning_rate: float = 1e-6
    accumulate: int = 1
    """The number of parts in which TRL computes an update, so that it fits into memory."""

    @property
    def rollouts(self) -> int:
        """Answers of a step."""
        return self.groups * self.group_size

    def operations(self, parameters: int, answers: float) -> float:
        """Return the operations of a step's products, for answers of this mean length."""
        tokens = self.rollouts * answers + self.groups * self.prompt
        return (2 + 6) * parameters * tokens


CASES = [
    Case("a", "3m"),
    Case("b", "75m"),
    Case("c", "75m", prompt=512, new=32, accumulate=4),
    Case("learn", "tiny", prompt=8, new=16, learning_rate=3e-3),
]
LEARN_STEPS = 40


@dataclass
class Timed:
    """A case with its measurements; one entry a round."""

    case: Case
    parameters: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TRAINERS})
    rewards: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TRAINERS})
    phases: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each phase of Etude's step."""
    rates: list[float] = field(default_factory=list)
    """Floating-point operations a second of the matrix product."""

    def ratio(self) -> float:
        """The speedup of Etude over TRL."""
        return median(theirs / ours for ours, theirs in zip(*(self.seconds[name] for name in TRAINERS), strict=True))

    def ceiling(self, trainer: str) -> float:
        """The share of the ceiling, with answers of maximum length."""
        work = self.case.operations(self.parameters, self.case.new)
        return median(work / spent / rate for spent, rate in zip(self.seconds[trainer], self.rates, strict=True))

    def spent(self) -> dict[str, float]:
        """The median seconds of each of Etude's phases."""
        names = sorted({name for phases in self.phases for name in phases})
        return {name.removeprefix("time/"): median(phases.get(name, 0.0) for phases in self.phases) for name in names}


@contextmanager
def started(
    case: Case, pythons: Mapping[str, Path], given: Mapping[str, str], folder: Path, console: Console
) -> Iterator[tuple[dict[str, Worker], dict[str, Any]]]:
    """Start a worker for each trainer; return them with their versions. given: TRL's environment."""
    peers: dict[str, Any] = {}
    with ExitStack() as ends:
        workers: dict[str, Worker] = {}
        for name, python in pythons.items():
            file = folder / f"{case.name}-{name}.json"
            own = {"model": str(folder / case.model), "tasks": str(folder / f"{case.name}.jsonl")}
            own |= {"precision": precision(), "directory": str(folder / f"{case.name}-{name}")}
            file.write_text(json.dumps(asdict(case) | own))
            with progress(f"starting {name} on {case.name}", None, console):
                command = [str(python), "-m", "bench.grpo_worker", name, str(file)]
                more = given if name == "trl" else {}
                workers[name] = Worker(name, command, file.with_suffix(".log"), more)
                ends.callback(workers[name].close)
                peers[name] = workers[name].hear()
        yield workers, peers


def timed(
    case: Case, pythons: Mapping[str, Path], given: Mapping[str, str], rounds: int, folder: Path, console: Console
) -> tuple[Timed, Any]:
    """Run a case on both trainers in turns. given: TRL's environment."""
    if not (folder / case.model).exists():
        write_model(folder / case.model, MODELS[case.model])
    parameters = sum(p.numel() for p in create(tiny_config(context=1024, **MODELS[case.model]), seed=0).parameters())
    write_tasks(folder / f"{case.name}.jsonl", MODELS[case.model]["vocab_size"], case.prompt)
    result = Timed(case, parameters)
    steps = LEARN_STEPS if case.name == "learn" else rounds + WARMING
    with (
        started(case, pythons, given, folder, console) as (workers, peers),
        progress(f"steps of {case.name}", steps * len(workers), console) as bar,
    ):
        for step in range(steps):
            rate = matrix_rate()
            for name, worker in workers.items():
                worker.tell("step")
                answer = worker.hear()
                bar.advance()
                result.rewards[name].append(answer["reward"])
                if step >= WARMING:
                    result.seconds[name].append(answer["seconds"])
                    result.phases += [answer["phases"]] if "phases" in answer else []
            result.rates += [rate] if step >= WARMING else []
    return result, peers


def shown(measured: Sequence[Timed]) -> Table:
    """Return the table of the results; missed limits are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("case")
    for title in ("Etude, s", "of the ceiling", "TRL, s", "of the ceiling", "Etude is faster by", "limit", ""):
        table.add_column(title, justify="right")
    for case in measured:
        ours, theirs = (median(case.seconds[name]) for name in TRAINERS)
        limit = LIMITS.get(case.case.name)
        missed = limit is not None and case.ratio() < limit
        cells = [f"{ours:.2f}", f"{case.ceiling('etude'):.0%}", f"{theirs:.2f}", f"{case.ceiling('trl'):.0%}"]
        cells += [f"{case.ratio():.2f}", "" if limit is None else f"{limit:g}", "misses" if missed else ""]
        table.add_row(case.case.name, *cells, style="yellow" if missed else "")
    return table


def where(measured: Timed) -> str:
    """Return the shares of the phases of Etude's step."""
    whole = median(measured.seconds["etude"])
    spent = sorted(measured.spent().items(), key=lambda phase: -phase[1])
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in spent if seconds > 0.01 * whole)
    return f"Where Etude's time goes in {measured.case.name}: {shares}."


def learned(measured: Timed) -> str:
    """Return the rewards of the last five steps of each trainer, and of the first."""
    parts = []
    for name in TRAINERS:
        rewards = measured.rewards[name]
        parts.append(f"{name} from {fmean(rewards[:3]):.3f} to {fmean(rewards[-5:]):.3f}")
    return f"Learning, {LEARN_STEPS} steps: {', '.join(parts)}."


def as_tree(measured: Sequence[Timed], peers: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements, with machine and versions."""
    return {
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions() | {"peers": {"trl": peers["trl"]}},
        "cases": [asdict(case) | {"spent": case.spent()} for case in measured],
        "ratios": {case.case.name: case.ratio() for case in measured if case.case.name in LIMITS},
        "limits": LIMITS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how many steps are timed; medians are shown")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, help="these alone")
    parser.add_argument("--as-it-comes", action="store_true", help="leave TRL's memory to the C library's defaults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    given = {} if arguments.as_it_comes else RETAINING
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the trainers are ended as well
    console = make_console()
    pythons = {"etude": Path(sys.executable), "trl": ensure_environment(load_pins("trl"), console=console).python}
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in CASES if case.name in arguments.cases]
        results = [timed(case, pythons, given, arguments.rounds, Path(folder), console) for case in cases]
    measured, peers = [result for result, _ in results], results[0][1]
    console.print(
        f"64 answers a step in {precision()}, {machine()['threads']} threads, median of {arguments.rounds} rounds; "
        f"a matrix product runs at {median(rate for result in measured for rate in result.rates) / 1e9:,.0f} GFLOP/s.",
        soft_wrap=True,
    )
    console.print(shown(measured))
    for result in measured:
        console.print(where(result), soft_wrap=True)
        if result.case.name == "learn":
            console.print(learned(result), soft_wrap=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_tree(measured, peers), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
