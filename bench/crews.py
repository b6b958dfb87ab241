"""What the controller adds to a step: its calls to ranks that have nothing to compute.

    python -m bench.crews [--steps 50] [--json FILE]

Each step makes the calls that a step of `etude train` makes, with the batch of a small one (96 rollouts, about 12,000
tokens): annotate and estimate, whose batch is cut, shared out and put together or held; update, with what came of them;
publish, and what is measured. What the ranks do with it takes no time, so what is left is packing, sending, waking up
and joining. Alone in this process, as two processes, and as two Ray actors; the median step counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import machine, versions
from bench.crews_worker import Idle
from etude.batch import Batch
from etude.data.share import shares
from etude.dispatch import CrewConfig, LocalCrew, crew_of
from etude.observe import make_console
from etude.protocols import Crew
from etude.records import Rollout, Sample

AIMS = {"local": 1.0, "processes": 10.0, "ray": 30.0}
"""Milliseconds a step."""
GROUPS, GROUP_SIZE, TOKENS = 12, 8, 128
WARMING = 5


def main() -> None:
    """Time them, one after the other."""
    arguments = argparse.ArgumentParser(description="What the controller adds to a step.")
    arguments.add_argument("--steps", type=int, default=50, help="steps that are timed (50)")
    arguments.add_argument("--json", type=Path, help="a file to write the numbers to")
    asked = arguments.parse_args()
    batch = _batch()
    found = {name: _timed(start, batch, asked.steps) for name, start in _kinds().items()}
    table = Table(title="What the controller adds to a step", box=SIMPLE_HEAD, title_justify="left")
    for column in ("crew", "ranks", "ms a step", "aim"):
        table.add_column(column, justify="left" if column == "crew" else "right")
    for name, milliseconds in found.items():
        table.add_row(name, "1" if name == "local" else "2", f"{milliseconds:.2f}", f"≤ {AIMS[name]:g}")
    make_console("auto").print(table)
    if asked.json:
        told: dict[str, Any] = {"machine": machine(), "versions": versions(), "ms": found}
        asked.json.write_text(json.dumps(told, indent=2))


def _batch() -> Batch:
    rng = np.random.default_rng(0)
    rollouts = [Rollout(u, u // GROUP_SIZE, u, 0.0) for u in range(GROUPS * GROUP_SIZE)]
    rows = [
        Sample(
            rng.integers(0, 1000, TOKENS).astype(np.int32),
            np.arange(TOKENS) >= TOKENS // 2,
            np.zeros(TOKENS, np.float32),
            np.zeros(TOKENS, np.int32),
            np.zeros(TOKENS, np.int32),
            rollout=u,
        )
        for u in range(len(rollouts))
    ]
    return Batch.from_records(rows, rollouts)


def _kinds() -> dict[str, Callable[[Path], Crew]]:
    common: dict[str, Any] = {"ranks": 2, "share": shares, "config": CrewConfig(timeout=600, silence=120)}
    return {
        "local": lambda _: LocalCrew(Idle()),
        "processes": lambda logs: crew_of("local")(Idle, logs=logs, **common),
        "ray": lambda logs: crew_of("ray")(Idle, logs=logs, **common),
    }


def _timed(start: Callable[[Path], Crew], batch: Batch, steps: int) -> float:
    """Milliseconds of the median step."""
    seconds = []
    with tempfile.TemporaryDirectory() as logs, closing(start(Path(logs))) as crew:
        for step in range(WARMING + steps):
            began = time.perf_counter()
            held = crew.hold(Idle.estimate, crew.hold(Idle.annotate, batch))
            crew.call(Idle.update, held.split(1, by="group"))
            crew.call(Idle.publish, step)
            crew.call(Idle.measure)
            crew.call(Idle.measure)
            seconds.append(time.perf_counter() - began)
    return 1000 * median(seconds[WARMING:])


if __name__ == "__main__":
    main()
