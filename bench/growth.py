"""Measure how time and memory of a whole GRPO step grow with its tokens and with the vocabulary.

    python -m bench.growth [--rounds 3] [--only tokens vocabulary] [--json FILE]

A step uses one small model in the precision that `train.precision=auto` chooses, with eight answers of 64 tokens to
each prompt of 64. It samples, judges and trains like `etude train`. Each point has its own process, and the points of a
line run in turns:

    tokens        16,384 to 262,144 tokens a step: prompts and answers, as in the batch
    vocabulary    a vocabulary of 1,024 to 150,000 tokens, 16,384 tokens a step

Time should grow linearly with the tokens, and with the vocabulary, because only the head depends on it. Memory is the
peak of a process. It should not grow with a step's tokens, because a micro-batch has 4,096. With the vocabulary it
grows by the rows of embedding and head, and by the fragmentation of memory that the process keeps
(docs/internals/measurements.md).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.common import machine, precision, versions
from bench.words import write_model, write_tasks
from bench.workers import Worker
from etude.observe import make_console, progress

BODY = {"layers": 3, "hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 640}
PROMPT = NEW = 64
GROUP_SIZE = 8
TOKENS = GROUP_SIZE * (PROMPT + NEW)
"""Tokens of one group in a batch."""
STATE = {"bf16": 20, "fp32": 16}
"""Bytes a parameter: 4 for master weights, 8 for AdamW's means, 4 for the gradient; in bf16 also 2 to compute with, and
2 packed for the engine."""
WARMING = 1
"""Warm-up steps of each point."""


@dataclass
class Point:
    """A size of step, and its measurements."""

    line: str
    tokens: int
    vocabulary: int
    seconds: list[float] = field(default_factory=list)
    parameters: int = 0
    highest: int = 0
    """The peak memory of the process, in bytes."""

    @property
    def name(self) -> str:
        """The name of the point."""
        return f"{self.line} {self.tokens if self.line == 'tokens' else self.vocabulary}"

    @property
    def time(self) -> float:
        """The seconds of the median step."""
        return median(self.seconds)

    @property
    def state(self) -> int:
        """Bytes of the weights, the gradient and the optimizer."""
        return STATE[precision()] * self.parameters

    @property
    def rest(self) -> int:
        """Bytes of everything else: a step's computation, and the program itself."""
        return self.highest - self.state


LINES = {
    "tokens": [Point("tokens", tokens, 4096) for tokens in (16_384, 65_536, 262_144)],
    "vocabulary": [Point("vocabulary", 16_384, words) for words in (1024, 50_000, 100_000, 150_000)],
}


def specification(point: Point, folder: Path) -> dict[str, Any]:
    """Return the specification for the worker."""
    name = point.name.replace(" ", "-")
    model, tasks = folder / f"{name}-model", folder / f"{name}.jsonl"
    point.parameters = write_model(model, {"vocab_size": point.vocabulary, **BODY})
    write_tasks(tasks, point.vocabulary, PROMPT)
    return {
        "model": str(model),
        "tasks": str(tasks),
        "prompt": PROMPT,
        "new": NEW,
        "groups": point.tokens // TOKENS,
        "group_size": GROUP_SIZE,
        "learning_rate": 1e-6,
        "precision": precision(),
        "directory": str(folder / name),
        "etude": {"rollout.max_num_seqs": 128, "rollout.kv_gib": 0.25, "train.max_tokens_per_micro_batch": 4096},
    }


def highest(worker: Worker) -> int:
    """Return the peak memory of a worker's process, in bytes."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text(encoding="utf-8")
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def timed(points: Sequence[Point], rounds: int, folder: Path, console: Console) -> None:
    """Time the steps of the points in turns."""
    with ExitStack() as ends:
        workers: list[Worker] = []
        for point in points:
            file = folder / f"{point.name.replace(' ', '-')}.json"
            with progress(f"starting {point.name}", None, console):
                file.write_text(json.dumps(specification(point, folder)))
                command = [sys.executable, "-m", "bench.grpo_worker", "etude", str(file)]
                workers.append(Worker(point.name, command, file.with_suffix(".log")))
                ends.callback(workers[-1].close)
                workers[-1].hear()
        with progress(points[0].line, (rounds + WARMING) * len(points), console) as bar:
            for turn in range(rounds + WARMING):
                for point, worker in zip(points, workers, strict=True):
                    worker.tell("step")
                    answer = worker.hear()
                    point.seconds += [answer["seconds"]] if turn >= WARMING else []
                    bar.advance()
        for point, worker in zip(points, workers, strict=True):
            point.highest = highest(worker)


def ratios(points: Sequence[Point]) -> dict[str, float]:
    """Return the slope of a line's last part relative to its first: 1 for linear growth or constant memory."""
    first, second, before, last = points[0], points[1], points[-2], points[-1]
    line = first.line
    if line == "tokens":
        grown = (last.time / last.tokens) / (first.time / first.tokens)
    else:
        rise = [(b.time - a.time) / (b.vocabulary - a.vocabulary) for a, b in ((first, second), (before, last))]
        grown = rise[1] / rise[0]
    return {f"{line}: time": grown, f"{line}: memory": last.rest / first.rest}


def shown(points: Sequence[Point]) -> Table:
    """Return the table of a line."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("tokens a step", "words", "s", "µs a token", "weights and optimizer, MiB", "the rest, MiB"):
        table.add_column(title, justify="right")
    for point in points:
        cells = [f"{point.tokens:,}", f"{point.vocabulary:,}", f"{point.time:.2f}"]
        cells += [f"{1e6 * point.time / point.tokens:.0f}", f"{point.state / 2**20:,.0f}"]
        table.add_row(*cells, f"{point.rest / 2**20:,.0f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how many steps are timed; medians are shown")
    parser.add_argument("--only", nargs="+", default=list(LINES), choices=list(LINES), help="these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the workers are ended as well
    console, all_ratios = make_console(), dict[str, float]()
    for line in given.only:
        with tempfile.TemporaryDirectory() as folder:
            timed(LINES[line], given.rounds, Path(folder), console)
        console.print(f"In {precision()}:", shown(LINES[line]))
        all_ratios |= ratios(LINES[line])
    console.print("The last stretch beside the first: " + ", ".join(f"{n} {v:.2f}" for n, v in all_ratios.items()))
    if given.json:
        cases = [asdict(point) for line in given.only for point in LINES[line]]
        whole = {"machine": machine(), "versions": versions(), "cases": cases, "ratios": all_ratios}
        given.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
