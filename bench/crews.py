"""Time the controller's overhead of a step: calls to ranks that compute nothing, and requests to their engines.

    python -m bench.crews [--steps 50] [--only local processes] [--json FILE]

Each step makes the calls of a step of `etude train`, with the batch of a small one (96 rollouts, about 12,000 tokens).
These calls are annotate and estimate, whose batch is split, sent, and gathered or kept; update, with its metrics;
publish; and the metrics of the step. Before that, the training data of each rollout is stored where ranks read it, and
a batch is built of them. With engines in the ranks every answer is a separate request: 96 are sent at once through
the run's router, each as long as such a rollout. The ranks compute nothing, so the time is packing, sending, waking up
and gathering. The crews are this process alone, two processes, and two Ray actors; the table has the median step.

The aim holds for the calls. The other times are for information: most of that work is done while the model samples
other answers.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import written
from bench.crews_worker import Idle
from etude.batch import Batch
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, LocalCrew, crew_of
from etude.errors import MissingPackageError
from etude.images import PromptImages
from etude.observe import make_console
from etude.protocols import Crew, Ids, TokenGenerator
from etude.recipes.collect.rollouts import ScoredRollout
from etude.recipes.run.steps.components import Learners
from etude.records import Completion, Rollout, Sample, SamplingParams
from etude.rollout.router import Router

AIMS = {"local": 1.0, "processes": 10.0, "ray": 30.0}
"""Aims, in milliseconds a step."""
CALLS, LAID, ANSWERS = "calls of a step", "96 rollouts put together", "96 answers"
GROUPS, GROUP_SIZE, TOKENS = 12, 8, 128
WARMING = 5
SAMPLING = SamplingParams(max_tokens=TOKENS // 2)


@dataclass(frozen=True)
class Timed:
    """One kind of work over one kind of crew."""

    name: str
    ranks: int
    what: str
    milliseconds: float
    """Milliseconds of the median step."""
    aim: float
    """Milliseconds of a step that the controller may take."""

    @property
    def ratio(self) -> float:
        """The time relative to the aim."""
        return self.milliseconds / self.aim

    @property
    def met(self) -> bool | None:
        """True if the time is within the aim; None without an aim."""
        return self.ratio <= 1 if self.what == CALLS else None


class Engine:
    """The engine of one rank of a crew, or the one in this process, called as `rank_engines` calls it."""

    def __init__(self, crew: Any, rank: int) -> None:
        self._crew, self._rank = crew, rank

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return an answer to one request."""
        reply = self._crew.submit(self._rank, Idle.generate, prompt, sampling, images, on_start=on_start)
        answer: Completion = await asyncio.wrap_future(reply)
        return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Time the crews one after another, and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=50, help="steps that are timed (50)")
    arguments.add_argument("--only", nargs="*", choices=AIMS, default=list(AIMS), help="time these alone")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    options = arguments.parse_args(argv)
    console, records, kinds = make_console("auto"), _records(), _kinds()
    result: list[Timed] = []
    for name in options.only:
        try:
            result += _timed(name, kinds[name], *records, options.steps)
        except MissingPackageError as error:
            console.print(f"{name} is left out. {error}", soft_wrap=True)
    table = Table(title="What the controller adds to a step", box=SIMPLE_HEAD, title_justify="left")
    for column in ("crew", "ranks", "", "ms a step", "aim"):
        table.add_column(column, justify="right" if column in ("ranks", "ms a step", "aim") else "left")
    for timed in result:
        aim = "" if timed.met is None else f"≤ {timed.aim:g}" + ("" if timed.met else ", misses")
        table.add_row(timed.name, str(timed.ranks), timed.what, f"{timed.milliseconds:.2f}", aim)
    console.print(table)
    if options.json:
        cases = [{**asdict(timed), "ratio": timed.ratio, "met": timed.met} for timed in result]
        ratios = {f"{timed.name}: {timed.what}": timed.ratio for timed in result}
        written(options.json, cases, ratios, {"steps": options.steps})
    return 0


def _records() -> tuple[list[Sample], list[Rollout]]:
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
    return rows, rollouts


def _kinds() -> dict[str, Callable[[Path], Crew]]:
    common: dict[str, Any] = {
        "ranks": 2,
        "share": partition_rollouts,
        "config": CrewConfig(timeout=600, heartbeat_timeout=120),
    }
    return {
        "local": lambda _: LocalCrew(Idle()),
        "processes": lambda logs: crew_of("local")(Idle, logs=logs, **common),
        "ray": lambda logs: crew_of("ray")(Idle, logs=logs, **common),
    }


def _timed(
    name: str, start: Callable[[Path], Crew], samples: Sequence[Sample], rollouts: Sequence[Rollout], steps: int
) -> list[Timed]:
    """Return the median step of each kind of work."""
    durations: dict[str, list[float]] = {CALLS: [], LAID: [], ANSWERS: []}
    prompts = [sample.ids[: TOKENS // 2] for sample in samples[::GROUP_SIZE]]
    with tempfile.TemporaryDirectory() as logs, closing(start(Path(logs))) as crew, asyncio.Runner() as runner:
        ranks = 1 if isinstance(crew, LocalCrew) else 2
        engine: TokenGenerator = Idle() if ranks == 1 else Router([Engine(crew, rank) for rank in range(ranks)])
        for step in range(WARMING + steps):
            began = time.perf_counter()
            pairs = zip(samples, rollouts, strict=True)
            scored = [ScoredRollout.from_samples([sample], rollout, crew.put) for sample, rollout in pairs]
            batch = Learners(crew, frozenset(), 1, "group").annotate(scored, step)
            durations[LAID].append(time.perf_counter() - began)
            durations[CALLS].append(_seconds(lambda batch=batch, step=step: _call(crew, batch, step)))  # type: ignore[misc]
            durations[ANSWERS].append(_seconds(lambda: runner.run(_ask(engine, prompts))))
    return [
        Timed(name, ranks, what, 1000 * median(seconds[WARMING:]), AIMS[name]) for what, seconds in durations.items()
    ]


def _call(crew: Crew, batch: Batch, step: int) -> None:
    """Make the calls of a step."""
    held = crew.call_for_ref(Idle.estimate, crew.call_for_ref(Idle.annotate, batch))
    crew.call(Idle.update, held.split(1, by="group"))
    crew.call(Idle.publish, step)
    crew.call(Idle.measure)
    crew.call(Idle.measure)


async def _ask(engine: TokenGenerator, prompts: Sequence[Ids]) -> None:
    """Request the answers of a step; those of a group have one prompt."""
    started: list[int] = []
    requests = [
        engine.generate(prompt, SAMPLING, on_start=lambda: started.append(1))
        for prompt in prompts
        for _ in range(GROUP_SIZE)
    ]
    answers = await asyncio.gather(*requests)
    assert len(started) == len(answers) and all(len(answer.ids) == TOKENS // 2 for answer in answers)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
