"""What a rollout costs a run beside its engine and its judge: the queue, the journal and its requests.

    python -m bench.rollout_queue [--rollouts 1024] [--step 256] [--tokens 64] [--rounds 7] [--json FILE]

A player that answers at once makes the rollouts of a run, a step's worth at a time, as a run without staleness requests
them. The journal is a file, or in memory.

    wall   microseconds of a rollout, from the request to its end in the journal
    CPU    the same, of the time of all threads
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import written
from etude.observe import make_console, progress
from etude.recipes.collect.engine_runner import EngineRunner, engine_limits
from etude.recipes.collect.player import EnginePlayer, TurnSeeds
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Completion, SamplingParams, Task, Turn
from etude.rewards import Judge, NoReward, Verdict
from etude.store import Journal, open_store
from etude.store.queue.local_queue import open_own_queue
from etude.store.queue.rollout_queue import RolloutRequest

GROUP = 8
PLACES = ("file", "memory")


@dataclass(frozen=True)
class Cost:
    """What one rollout took in one round, in microseconds."""

    place: str
    wall: float
    cpu: float


class AtOnce:
    """A player whose answer is always the same, and needs no time."""

    def __init__(self, tokens: int) -> None:
        ids = np.arange(tokens, dtype=np.int32)
        versions = np.zeros(tokens, np.int32)
        completion = Completion(ids, np.zeros(tokens, np.float32), versions, "stop", "x" * tokens)
        self._played = PlayedRollout((Turn(np.arange(32, dtype=np.int32), completion, 0),), Verdict(1.0), finish="stop")

    async def play(self, task: Task, sampling: SamplingParams, seeds: TurnSeeds) -> PlayedRollout:  # noqa: ARG002
        """Return the answer."""
        await asyncio.sleep(0)
        return self._played


async def make_rollouts(requested: RequestedRollouts, rollouts: int, step: int) -> None:
    """Request the rollouts a step at a time, and wait for each step."""
    for first in range(0, rollouts, step):
        wanted = [
            RolloutRequest(Task(id // GROUP, {"prompt": "2+2=", "row": id // GROUP}, "sums"), id % GROUP, id)
            for id in range(first, min(first + step, rollouts))
        ]
        await requested.start(wanted)
        await asyncio.gather(*map(requested.result, wanted))
    await requested.close()


def measure(place: str, journal: Journal, rollouts: int, step: int, tokens: int) -> Cost:
    """Return what a rollout takes over this journal."""
    player = cast(EnginePlayer, AtOnce(tokens))
    with open_own_queue(journal) as queue, Judge(NoReward()) as judge:
        runner = EngineRunner(queue, {"train": (player, SamplingParams(max_tokens=tokens))}, seed=1)
        requested = RequestedRollouts(queue, journal, judge, runner, engine_limits(retries=1))
        began, used = time.perf_counter(), time.process_time()
        asyncio.run(make_rollouts(requested, rollouts, step))
        scale = 1e6 / rollouts
        return Cost(place, (time.perf_counter() - began) * scale, (time.process_time() - used) * scale)


def run_rounds(rounds: int, rollouts: int, step: int, tokens: int) -> list[Cost]:
    """Measure both places in each round."""
    costs: list[Cost] = []
    with progress("making rollouts", rounds * len(PLACES)) as bar:
        for _ in range(rounds):
            for place in PLACES:
                with tempfile.TemporaryDirectory() as directory:
                    where = Path(directory) / "journal.sqlite" if place == "file" else None
                    with closing(open_store(where)) as journal:
                        costs.append(measure(place, journal, rollouts, step, tokens))
                bar.advance()
    return costs


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=1024, help="rollouts of one round")
    parser.add_argument("--step", type=int, default=256, help="rollouts that are requested at a time")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, with a file and in memory in turn")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write a JSON file where one is named."""
    options = parse_arguments(arguments)
    costs = run_rounds(options.rounds, options.rollouts, options.step, options.tokens)
    table = Table(
        box=SIMPLE_HEAD, title=f"{options.rollouts} rollouts of {options.tokens} tokens, {options.step} a step"
    )
    for heading in ("journal", "wall, median", "wall, best", "CPU, median", "CPU, best"):
        table.add_column(heading, justify="left" if heading == "journal" else "right")
    ratios: dict[str, Any] = {}
    for place in PLACES:
        walls = [cost.wall for cost in costs if cost.place == place]
        cpus = [cost.cpu for cost in costs if cost.place == place]
        figures = [median(walls), min(walls), median(cpus), min(cpus)]
        table.add_row(place, *(f"{figure:,.0f} µs" for figure in figures))
        ratios[f"{place} wall"] = median(walls)
        ratios[f"{place} CPU"] = median(cpus)
    make_console().print(table)
    if options.json is not None:
        written(options.json, cases=[asdict(cost) for cost in costs], ratios=ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
