"""Training an agent from a program, in a few lines.

    trainer = etude.Trainer(algorithm=etude.RL("grpo", {"model.path": "Qwen3-0.6B", "steps": 100}), n_runners=2)
    trainer.fit(solver, train, val)
    trainer.dev(solver, tasks)

What is here decides nothing of its own: an algorithm is given the agent, the tasks and the strategy, and does what it
does. `RL` is `etude train` with an agent; `Baseline` serves a model, collects and reports, and learns nothing.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.text import Text

from etude.agents.agent import Agent, as_agent
from etude.config.compose import compose
from etude.errors import ConfigError
from etude.observe import make_console
from etude.recipes import folder
from etude.recipes.build import build
from etude.recipes.collecting import Groups
from etude.recipes.loop import practise
from etude.recipes.parts import Parts
from etude.recipes.presets import PRESETS
from etude.recipes.run import Run
from etude.store.desk import Desk

__all__ = ["RL", "Algorithm", "Baseline", "Tasks", "Trainer"]

Tasks: TypeAlias = "str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]"
"""Files of tasks, or tasks as mappings."""


@dataclass(frozen=True)
class Given:
    """What a trainer gives its algorithm beside the tasks."""

    agent: Agent
    options: Mapping[str, Any]


@dataclass
class Algorithm(ABC):
    """What is done with an agent and its tasks. Derive from it for one of your own."""

    given: Given | None = field(default=None, init=False, repr=False)

    @abstractmethod
    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Do it, and return what came of it."""

    def get_client(self) -> Desk:
        """The desk at which rollouts are asked for, while it runs."""
        raise ConfigError(f"{type(self).__name__} has no desk now: it has one while it runs.")


@dataclass
class RL(Algorithm):
    """Reinforcement learning: the loop of `etude train`, with rollouts that the agent makes."""

    preset: str | None = None
    """A published recipe: `grpo`, `dapo`, …"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run by their names: `{"model.path": "Qwen3-0.6B", "steps": 100}`."""
    directory: Path | None = None
    """Where the run lies; one that is there is taken up. By default a new one in `runs`."""

    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Train, and return the last step's numbers."""
        if train is None:
            raise ConfigError("There is nothing to train on: give tasks, `trainer.fit(agent, train=tasks)`.")
        with self._parts(train, val) as parts:
            practise(parts)
            written = (parts.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        told: dict[str, float] = json.loads(written[-1])
        return told

    def try_out(self, tasks: Tasks, count: int, console: Console) -> None:
        """Have a few tasks played, and show what was said, what it earned, and what would be learned from it."""
        few = {"collect.tasks": count, "collect.group_size": 2, "collect.retries": 0, "observe.console": "off"}
        with TemporaryDirectory() as place, self._parts(tasks, None, Path(place) / "dev", few) as parts:
            parts.publish(parts.checkpoint.step)
            shown(parts, parts.source.next(1), console)

    def _parts(
        self, train: Tasks, val: Tasks | None, directory: Path | None = None, more: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[Parts]:
        assert self.given is not None, "a trainer gives an agent"
        directory = directory or self.directory or folder.new_directory(Path("runs"), "train")
        options = {**self.options, **self.given.options, **(more or {}), "directory": directory}
        options["data.train"] = _files(train, directory / "tasks" / "train.jsonl")
        if val is not None:
            options["data.val"] = _files(val, directory / "tasks" / "val.jsonl")
        run = compose(Run, [f"{name}={_word(value)}" for name, value in options.items()], preset=_preset(self.preset))
        return build(run, agent=self.given.agent)


@dataclass
class Baseline(RL):
    """Serves the model, has every task of `val` (or of `train`) played, and reports. Nothing is learned."""

    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Collect, and return the scores."""
        tasks = val if val is not None else train
        if tasks is None:
            raise ConfigError("There is nothing to play: give tasks, `trainer.fit(agent, val=tasks)`.")
        with self._parts(tasks, tasks) as parts:
            parts.publish(parts.checkpoint.step)
            found = parts.evaluate.maybe_run(parts.checkpoint.steps)
            parts.evaluate.raise_failed()
        return dict(found.reduce())


class Trainer:
    """Brings together an agent, an algorithm, and where the agent runs."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        strategy: Literal["shm", "cs"] = "shm",
        n_runners: int = 1,
        max_concurrency: int = 16,
    ) -> None:
        """strategy: runners as threads of this process (`shm`), or as processes of their own (`cs`). max_concurrency:
        attempts that each runner has under way."""
        self.algorithm = algorithm
        self._options = {"agent.strategy": strategy, "agent.runners": n_runners, "agent.at_once": max_concurrency}

    def fit(self, agent: Any, train: Tasks | None = None, val: Tasks | None = None) -> dict[str, float]:
        """Have the algorithm do its work with this agent and these tasks."""
        self.algorithm.given = self._given(agent)
        try:
            return self.algorithm.run(train, val)
        finally:
            self.algorithm.given = None

    def dev(self, agent: Any, tasks: Tasks, count: int = 2) -> None:
        """Have the agent play a few tasks twice each, and print each conversation, its tokens, what it earned, and what
        would be learned from it. Nothing is trained, and nothing is kept."""
        if not isinstance(self.algorithm, RL):
            raise ConfigError(f"{type(self.algorithm).__name__} has no way to try an agent out; RL and Baseline have.")
        self.algorithm.given = self._given(agent)
        try:
            self.algorithm.try_out(tasks, count, make_console())
        finally:
            self.algorithm.given = None

    def _given(self, agent: Any) -> Given:
        made = as_agent(agent, "The agent")
        return Given(made, self._options | {"agent.path": made.title})


def shown(parts: Parts, groups: Groups, console: Console) -> None:
    """Rollouts for a person to read."""
    for rollout in groups.rollouts:
        samples = [sample for sample in groups.samples if sample.rollout == rollout.id]
        task = parts.store.task(rollout.task)
        console.rule(f"task {rollout.task}, row {task.row}")
        for turn in parts.store.turns(rollout.id):
            said = turn.completion
            console.print(f"[dim]turn {turn.index}: {len(turn.prompt)} tokens read, {len(said.ids)} written[/]")
            console.print(Text(parts.text(turn.prompt), style="cyan"), Text(said.text), soft_wrap=True, sep="")
        named = ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items())
        console.print(Text(f"reward {rollout.reward:g}{f' ({named})' if named else ''}"))
        for number, sample in enumerate(samples, start=1):
            learned = int(sample.action.sum())
            console.print(Text(f"row {number} of {len(samples)}: {len(sample.ids)} tokens, {learned} learned from"))


def _preset(name: str | None) -> Path | None:
    if name is not None and name not in PRESETS:
        raise ConfigError(f"There is no preset '{name}'. There are: {', '.join(PRESETS)}.")
    return None if name is None else PRESETS[name]


def _files(tasks: Tasks, place: Path) -> list[str]:
    """Tasks as files: those that are none yet are written to one, so that a run can be taken up."""
    if isinstance(tasks, str | Path):
        return [str(tasks)]
    rows = list(tasks)
    if rows and all(isinstance(row, str | Path) for row in rows):
        return [str(row) for row in rows]
    if not rows:
        raise ConfigError("The list of tasks is empty.")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return [str(place)]


def _word(value: Any) -> str:
    """A value as an override writes it."""
    return json.dumps(value) if isinstance(value, list | str | bool) or value is None else str(value)
