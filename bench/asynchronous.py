"""Time of training while rollouts wait: in turns with sampling, and at the same time (`max_staleness`).

    python -m bench.asynchronous [--rounds 3] [--steps 40] [--staleness 0 1 4] [--wait 2.0] [--target 2.9] [--json FILE]

A small model learns in an environment that waits before each observation, as a tool does. The waits are drawn from an
exponential distribution, and are the same with every bound. `--wait` is their mean, as a multiple of the seconds in
which the engine draws an answer. Each round runs every bound, in turn, for the same number of steps.

    seconds       wall time of all steps
    faster        against `max_staleness=0` of the same round, as the median of the rounds
    to target     seconds until the mean reward of three steps reaches `--target`; 3 is the highest reward
    predicted     what `etude simulate` expects from the journal of the run without staleness
    reward        the mean of the last quarter of the steps: it must not fall
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import written
from etude.config.compose import compose
from etude.observe import make_console, progress
from etude.protocols import Observation
from etude.recipes.run.config import Run
from etude.recipes.run.loop import train
from etude.records import Message, Task
from etude.tools.simulate.search import replay
from etude.tools.simulate.trace import read_trace
from tests.worlds import make_model, make_tasks

TURNS = 3
TASKS, GROUP = 8, 4
WINDOW = 3


@dataclass(frozen=True)
class Timed:
    """One run."""

    staleness: int
    seconds: float
    to_target: float | None
    """Seconds until the target was reached; None if it was not."""
    predicted: float
    reward: float


class WaitingEnv:
    """An environment that waits before each observation, and pays for digits."""

    def __init__(self, seconds: float) -> None:
        """seconds: the mean of the waits."""
        self._mean = seconds
        self._turns = 0

    def reset(self, task: Task) -> Observation:
        """Begin a rollout; its waits depend on its task alone."""
        self._chance = random.Random(task.ordinal)
        return Observation()

    async def step(self, answer: Message) -> Observation:
        """Wait as a tool does, and pay."""
        await asyncio.sleep(self._chance.expovariate(1 / self._mean) if self._mean else 0.0)
        self._turns += 1
        text = str(answer.content)
        reward = sum(letter.isdigit() for letter in text) / max(len(text), 1)
        return Observation(":", reward=reward, done=self._turns == TURNS)


def run_once(world: Path, directory: Path, staleness: int, wait_s: float, steps: int) -> list[dict[str, float]]:
    """Train, and return the metrics of each step."""
    options: dict[str, Any] = {
        "model.path": world / "model",
        "data.train": f"[{world / 'tasks.jsonl'}]",
        "reward": "environment",
        "env.path": f"{__name__}:WaitingEnv",
        "env.kwargs": f"{{seconds: {wait_s}}}",
        "env.max_turns": TURNS,
        "sampling.max_tokens": 8,
        "data.max_prompt_length": 16,
        "collect.tasks": TASKS,
        "collect.group_size": GROUP,
        "correction.weight": "truncate",
        "placement.layout": "split",
        "max_staleness": staleness,
        "train.precision": "fp32",
        "train.learning_rate": 0.001,
        "threads": 2,
        "steps": steps,
        "observe.console": "off",
        "observe.level": "warning",
        "directory": directory,
    }
    train(compose(Run, [f"{name}={value}" for name, value in options.items()]))
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["step"] > 0]


def seconds_to(target: float, steps: Sequence[dict[str, float]]) -> float | None:
    """Return the seconds until the mean reward of three steps in a row reached the target, if it did."""
    seconds = 0.0
    for number, step in enumerate(steps, 1):
        seconds += step["time/step"]
        if number >= WINDOW and mean(near["reward"] for near in steps[number - WINDOW : number]) >= target:
            return seconds
    return None


def answer_seconds(world: Path, directory: Path) -> float:
    """Return the seconds in which the engine draws an answer, where nothing waits."""
    steps = run_once(world, directory, 0, 0.0, 4)[1:]
    return median(step["time/collect"] for step in steps) / TURNS


def main(words: Sequence[str] | None = None) -> list[Timed]:
    """Print the table, and return every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--wait", type=float, default=2.0, help="mean wait, in times of an answer")
    parser.add_argument("--target", type=float, default=2.9, help="reward of three steps in a row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    console, rounds = make_console(), list[dict[int, Timed]]()
    with tempfile.TemporaryDirectory() as place:
        world = Path(place)
        make_model(world / "model", layers=4, hidden=256, heads=4, kv_heads=2)
        make_tasks(world / "tasks.jsonl", 64)
        wait_s = options.wait * answer_seconds(world, world / "trial")
        with progress("training", options.rounds * len(options.staleness), console) as bar:
            for number in range(options.rounds):
                found: dict[int, Timed] = {}
                for staleness in sorted(options.staleness):
                    directory = world / f"run-{number}-{staleness}"
                    steps = run_once(world, directory, staleness, wait_s, options.steps)
                    trial = replay(read_trace(world / f"run-{number}-{min(options.staleness)}"), [staleness])[0]
                    last = steps[-(len(steps) // 4 or 1) :]
                    found[staleness] = Timed(
                        staleness,
                        sum(step["time/step"] for step in steps),
                        seconds_to(options.target, steps),
                        trial.mean_step_s * len(steps),
                        mean(step["reward"] for step in last),
                    )
                    bar.advance()
                rounds.append(found)
    title = f"{options.steps} steps of {TASKS * GROUP} rollouts, {TURNS} waits of {wait_s:.2g} s on average each"
    console.print(to_table(rounds, title))
    runs = [timed for found in rounds for timed in found.values()]
    if options.json:
        names = {"faster": "seconds", "faster to the target": "to_target"}
        ratios = {
            f"max_staleness={staleness}: {name}": median(found)
            for staleness in rounds[0]
            for name, field in names.items()
            if (found := ratios_of(rounds, staleness, field))
        }
        written(options.json, [asdict(run) for run in runs], ratios)
    return runs


def ratios_of(rounds: Sequence[dict[int, Timed]], staleness: int, field: str) -> list[float]:
    """Return how many times as fast as with the lowest bound each round was, where both have a time."""
    pairs = [(getattr(found[min(found)], field), getattr(found[staleness], field)) for found in rounds]
    return [base / mine for base, mine in pairs if base and mine]


def to_table(rounds: Sequence[dict[int, Timed]], title: str) -> Table:
    """Return the medians of the rounds as a table."""
    table = Table(box=SIMPLE_HEAD, title=title)
    for column in ("max_staleness", "seconds", "faster", "to target", "faster", "predicted", "reward"):
        table.add_column(column, justify="right")
    for staleness in rounds[0]:
        mine = [found[staleness] for found in rounds]
        reached = [run.to_target for run in mine if run.to_target is not None]
        figures = (
            ([run.seconds for run in mine], ".1f"),
            (ratios_of(rounds, staleness, "seconds"), ".2f"),
            (reached, ".1f"),
            (ratios_of(rounds, staleness, "to_target"), ".2f"),
            ([run.predicted for run in mine], ".1f"),
            ([run.reward for run in mine], ".3f"),
        )
        table.add_row(str(staleness), *(format(median(values), spec) if values else "-" for values, spec in figures))
    return table


if __name__ == "__main__":
    main()
