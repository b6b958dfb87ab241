"""Predictions of `etude simulate` for runs of agents, beside the runs: it replays the run without staleness.

    python -m bench.simulated [--steps 16] [--staleness 1 4] [--case few] [--wait 0.3] [--json FILE]

An agent calls a small model three times, and waits after each call as for a tool. The waits are the same with every
bound. The cases differ in how many of the 64 rollouts of a step its runners play at a time:

    few     16, on threads of the run: rollouts wait for a runner, with every bound
    half    32, in two processes
    many    96, in two processes: more than a step has, and fewer than may be on their way with a larger bound

    measured     mean seconds of a step, the first one left out
    predicted    the same, by `etude simulate` from the journal of the run with `max_staleness=0`
    off          the difference, as a share of what was measured. Over 15 %, the command ends with status 1
    no limit     what it would predict if it did not know how many rollouts the runners play at a time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

import etude
from bench.common import written
from etude.agents import LLM
from etude.config.compose import compose
from etude.observe import make_console, progress
from etude.recipes.run.config import Run
from etude.recipes.run.loop import train
from etude.records import Task
from etude.tools.simulate.search import replay
from etude.tools.simulate.trace import read_trace
from tests.worlds import make_model

TURNS = 3
TASKS, GROUP = 8, 8
CLOSE = 0.15
CASES: dict[str, dict[str, Any]] = {
    "few": {"agent.strategy": "shm", "agent.runners": 1, "agent.max_concurrency": 16},
    "half": {"agent.strategy": "cs", "agent.runners": 2, "agent.max_concurrency": 16},
    "many": {"agent.strategy": "cs", "agent.runners": 2, "agent.max_concurrency": 48},
}


@dataclass(frozen=True)
class Predicted:
    """One run, and what was predicted of it."""

    case: str
    staleness: int
    measured: float
    predicted: float
    unlimited: float
    """The prediction without the limit of the runners."""

    @property
    def off(self) -> float:
        """The difference of the prediction, as a share of the measured seconds."""
        return self.predicted / self.measured - 1


@etude.agent
async def waiting_agent(task: Task, llm: LLM) -> float:
    """Call the model, wait as for a tool, and return the share of digits."""
    text = ""
    waits: Any = task["waits"]
    for seconds in waits:
        response = await llm.async_client.completions.create(model=llm.model, prompt=f"{task['prompt']}{text[-4:]}")
        text = str(response.choices[0].text)
        await asyncio.sleep(seconds)
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def make_world(world: Path, wait_s: float) -> None:
    """Write the model, and tasks with the waits of their rollouts. wait_s: their mean."""
    make_model(world / "model", layers=2, hidden=128, heads=4, kv_heads=2)
    chance = random.Random(0)
    rows = [
        {
            "prompt": f"{chance.randint(0, 9)}+{chance.randint(0, 9)}=",
            "waits": [chance.expovariate(1 / wait_s) for _ in range(TURNS)],
        }
        for _ in range(64)
    ]
    (world / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_once(world: Path, directory: Path, case: str, staleness: int, steps: int) -> float:
    """Train, and return the mean seconds of a step."""
    options: dict[str, Any] = {
        "model.path": world / "model",
        "data.train": f"[{world / 'tasks.jsonl'}]",
        "data.max_prompt_length": 16,
        "reward": "environment",
        "agent.path": f"{__name__ if __name__ != '__main__' else 'bench.simulated'}:waiting_agent",
        "sampling.max_tokens": 8,
        "collect.tasks": TASKS,
        "collect.group_size": GROUP,
        "correction.weight": "truncate",
        "placement.layout": "split",
        "max_staleness": staleness,
        "train.precision": "fp32",
        "train.learning_rate": 0.0001,
        "threads": 1,  # so that the engine has as many with every bound
        "steps": steps,
        "observe.console": "off",
        "observe.level": "warning",
        "directory": directory,
    }
    train(compose(Run, [f"{name}={value}" for name, value in (options | CASES[case]).items()]))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return mean(line["time/step"] for line in lines if line["step"] > 1)


def predict(directory: Path, staleness: int, *, limited: bool = True) -> float:
    """Return the mean seconds of a step with another bound, from the run without staleness."""
    trace = read_trace(directory)
    trial = replay(trace if limited else replace(trace, attempts=None), [0, staleness])[-1]
    return mean(trial.step_s[1:])


def main(words: Sequence[str] | None = None) -> list[Predicted]:
    """Print the table, and return every run with its prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--wait", type=float, default=0.3, help="mean seconds of a wait")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    console, found = make_console(), list[Predicted]()
    bounds = [0, *sorted(set(options.staleness) - {0})]
    with tempfile.TemporaryDirectory() as place, progress("training", len(options.case) * len(bounds), console) as bar:
        world = Path(place)
        make_world(world, options.wait)
        for case in options.case:
            for staleness in bounds:
                measured = run_once(world, world / f"{case}-{staleness}", case, staleness, options.steps)
                base = world / f"{case}-0"
                unlimited = predict(base, staleness, limited=False)
                found.append(Predicted(case, staleness, measured, predict(base, staleness), unlimited))
                bar.advance()
    console.print(
        to_table(found, f"{options.steps} steps of {TASKS * GROUP} rollouts, {TURNS} waits of {options.wait:g} s")
    )
    if options.json:
        ratios = {f"{run.case}, max_staleness={run.staleness}: predicted": 1 + run.off for run in found}
        written(options.json, [asdict(run) for run in found], ratios)
    return found


def to_table(found: Sequence[Predicted], title: str) -> Table:
    """Return the runs as a table."""
    table = Table(box=SIMPLE_HEAD, title=title)
    for column in ("case", "max_staleness", "measured", "faster", "predicted", "off", "no limit"):
        table.add_column(column, justify="left" if column == "case" else "right")
    base = {run.case: run.measured for run in found if run.staleness == 0}
    for run in found:
        table.add_row(
            run.case,
            str(run.staleness),
            f"{run.measured:.2f}",
            f"{base[run.case] / run.measured:.2f}",
            f"{run.predicted:.2f}",
            f"{run.off:+.0%}",
            f"{run.unlimited:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(any(abs(run.off) > CLOSE for run in main()))
