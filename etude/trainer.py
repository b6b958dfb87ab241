"""`etude.Trainer`: train an agent from a program, in a few lines.

    trainer = etude.Trainer(algorithm=etude.RL("grpo", {"model.path": "Qwen3-0.6B", "steps": 100}), n_runners=2)
    trainer.fit(solver, train, val)
    trainer.dev(solver, tasks)

The trainer hands the agent, the tasks and the runner settings to an algorithm, which does the rest. `RL` is `etude
train` with an agent. `Baseline` serves a model, runs the agent and reports its scores, without training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.agents.agent import Agent, as_agent, get_agent_spec
from etude.agents.execution.runner_process import serve_if_runner
from etude.agents.source_agents import SourceAgents
from etude.config.compose import compose
from etude.config.env import read_role
from etude.config.plugin import current_file
from etude.errors import CollectionError, ConfigError, UnknownChoiceError
from etude.launch import Tasks, compose_with_tasks, preset_path, refuse_duplicates
from etude.observe import make_console
from etude.recipes.event_loop import run_outside_event_loop
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import run_loop
from etude.recipes.run.steps.components import RunComponents
from etude.recipes.run.steps.dev_report import show_failed, show_scored
from etude.recipes.served_model import ServedModel, serve_to_agent
from etude.store.queue.rollout_queue import RolloutQueue


@dataclass(frozen=True)
class TrainerContext:
    """The agent and the run options that a trainer passes to its algorithm."""

    agent: Agent
    options: Mapping[str, Any]

    def merge_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the algorithm's options with the trainer's; refuse an option that is in both."""
        given = [*self.options, *(name for name in options if name.startswith("agent.sources."))]
        refuse_duplicates(dict.fromkeys(given, "an argument of `etude.Trainer`, or its agent,"), options)
        return {**options, **self.options}


@dataclass
class Algorithm(ABC):
    """A program that works with an agent and its tasks. Subclass it to write your own:

    class BestPrompt(etude.Algorithm):
        def run(self, train, val):
            with self.serving({"model.path": "Qwen3-0.6B"}) as served:
                for prompt in PROMPTS:
                    played = served.play(train, {"prompt": prompt})   # the agent reads `resources["prompt"]`
                    scores[prompt] = mean(rollout.total for rollout in played)
    """

    context: TrainerContext | None = field(default=None, init=False, repr=False)
    """The agent and the options of the trainer, while `run` is called."""
    open_queue: Callable[[], RolloutQueue] | None = field(default=None, init=False, repr=False)
    """A function that opens the rollout queue, while a model is served."""

    @abstractmethod
    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Run the algorithm, and return its metrics."""

    @contextmanager
    def serving(
        self, options: Mapping[str, Any], directory: Path | str | None = None, *, preset: str | None = None
    ) -> Iterator[ServedModel]:
        """Serve a model to the trainer's agent, and run its runners, inside the `with` block.

        options: options of a run by their names, with `model.path`. directory: the directory that stores the rollouts;
        None stores none.
        """
        if self.context is None:
            raise ConfigError(
                f"{type(self).__name__} has no agent to serve a model to: `etude.Trainer(…).fit` passes one, and calls "
                "`run`."
            )
        merged = self.context.merge_options(options)
        run = compose(Run, values=merged, preset=preset_path(preset))
        with serve_to_agent(run, self.context.agent, None if directory is None else Path(directory)) as served:
            self.open_queue = served.new_client
            try:
                yield served
            finally:
                self.open_queue = None

    def get_client(self) -> RolloutQueue:
        """Return a new client of the rollout queue, while a model is served. The caller closes it."""
        if self.open_queue is None:
            raise ConfigError(
                f"{type(self).__name__} has no rollout queue now. It has one inside "
                "`with self.serving({'model.path': …}):`; RL and Baseline have one while they run."
            )
        return self.open_queue()


@dataclass
class RL(Algorithm):
    """Reinforcement learning: the loop of `etude train`, with the agent's rollouts."""

    preset: str | None = None
    """A preset, which is a published recipe: `grpo`, `dapo`, …"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run by their names: `{"model.path": "Qwen3-0.6B", "steps": 100}`."""
    directory: Path | str | None = None
    """The directory of the run; an existing run is resumed. None creates a new one in `runs`."""

    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Train, and return the metrics of the last step."""
        if train is None:
            raise ConfigError("There is nothing to train on: give tasks, `trainer.fit(agent, train=tasks)`.")
        tasks = {"data.train": "tasks of `fit`"} | ({} if val is None else {"data.val": "tasks of `fit`"})
        refuse_duplicates(tasks, self.options)
        with self._components(train, val) as parts:
            run_loop(parts)
            return read_metrics(parts.directory)[-1]

    def try_out(self, tasks: Tasks, count: int, console: Console) -> None:
        """Run the agent on a few tasks, and print the conversations, the rewards and the training rows."""
        overrides: dict[str, Any] = {"collect.tasks": count, "collect.group_size": 2, "collect.retries": 0}
        overrides |= {"observe.console": "off", "observe.level": "error"}
        overrides |= {"agent.store": None, "agent.listen": "127.0.0.1:0"}  # a shared store would record these rollouts
        with (
            TemporaryDirectory() as temporary,
            self._components(tasks, None, Path(temporary) / "dev", overrides) as parts,
        ):
            parts.publish(parts.checkpoint.step)
            parts.source.disable_refill()
            try:
                groups = parts.source.next(1)
            except CollectionError:
                show_failed(parts, (), console)
                raise
            show_scored(parts, groups, console)
            show_failed(parts, [rollout.id for rollout in groups.rollouts], console)
            console.print(Text("Nothing was trained, and nothing was stored."))

    @contextmanager
    def _components(
        self, train: Tasks, val: Tasks | None, directory: Path | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Iterator[RunComponents]:
        assert self.context is not None, "a trainer gives an agent"
        if self.directory is not None:
            refuse_duplicates({"directory": f"`directory` of {type(self).__name__}"}, self.options)
        options = {**self.context.merge_options(self.options), **(overrides or {})}
        tasks = {"train": train, "val": val}
        run, written = compose_with_tasks(options, tasks, self.preset, directory or self.directory)
        with build(run, agent=self.context.agent, tasks=written) as parts:
            self.open_queue = parts.new_client
            try:
                yield parts
            finally:
                self.open_queue = None


@dataclass
class Baseline(RL):
    """Serve the model, run the agent on every task of `val` (or of `train`), and report the scores, without
    training."""

    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Run the agent on the tasks, and return the scores."""
        tasks = val if val is not None else train
        if tasks is None:
            raise ConfigError("There is nothing to play: give tasks, `trainer.fit(agent, val=tasks)`.")
        with self._components(tasks, tasks) as parts:
            parts.publish(parts.checkpoint.step)
            scores = dict(parts.evaluate.maybe_run(parts.checkpoint.steps).reduce())
            parts.evaluate.raise_failed()
            if self.options.get("observe.console") != "off":
                _print_scores(scores, parts.directory, make_console())
        return scores


class Trainer:
    """The combination of an agent, an algorithm, and the runners that execute the agent."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        strategy: Literal["shm", "cs"] = "shm",
        n_runners: int = 1,
        max_concurrency: int = 16,
    ) -> None:
        """strategy: runners as threads of this process (`shm`), or as separate processes (`cs`). n_runners: number of
        runners to start; 0 waits for runners of other machines. max_concurrency: attempts that one runner runs at the
        same time; larger needs more memory."""
        chosen: Any = strategy
        counts: dict[str, tuple[Any, int]] = {"n_runners": (n_runners, 0), "max_concurrency": (max_concurrency, 1)}
        if chosen not in ("shm", "cs"):
            raise UnknownChoiceError(
                f"There is no strategy {chosen!r}: runners are threads of this process, `shm`, or processes of their "
                "own, `cs`."
            )
        for name, (value, least) in counts.items():
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it is a whole number, {least} or more.")
        self.algorithm = algorithm
        self._max_concurrency = max_concurrency
        self._runners = n_runners
        self._options: dict[str, Any] = {
            "agent.strategy": strategy,
            "agent.runners": n_runners,
            "agent.max_concurrency": max_concurrency,
        }

    def fit(self, agent: Any, train: Tasks | None = None, val: Tasks | None = None) -> dict[str, float]:
        """Run the algorithm with this agent and these tasks, and return its metrics. In a mix, `agent` is a mapping
        from data source to agent; tasks of other sources are answered once.

        With ETUDE_ROLE=runner the same program is a runner: it serves the store at ETUDE_STORE_URL until a signal stops
        it. With ETUDE_ROLE=train the program starts no runners, and waits for such runners.
        """
        _refuse_during_load()
        if serve_if_runner(_as_one(agent), self._max_concurrency):
            return {}
        with self._context(agent, {"agent.runners": 0} if read_role() == "train" else {}):
            return run_outside_event_loop(lambda: self.algorithm.run(_materialize(train), _materialize(val)))

    def dev(self, agent: Any, tasks: Tasks, count: int = 2) -> None:
        """Run the agent twice on each of a few tasks, and print each conversation, its tokens, its reward and its
        training rows. Nothing is trained, and nothing is stored."""
        _refuse_during_load()
        algorithm = self.algorithm
        if not isinstance(algorithm, RL):
            raise ConfigError(f"{type(algorithm).__name__} has no way to try an agent out; RL and Baseline have.")
        if not self._runners:
            raise ConfigError(
                "`dev` runs the agent on this machine, and `n_runners=0` starts no runner here: give it 1."
            )
        with self._context(agent, {}):
            run_outside_event_loop(lambda: algorithm.try_out(tasks, count, make_console()))

    @contextmanager
    def _context(self, agent: Any, options: Mapping[str, Any]) -> Iterator[None]:
        """Give the algorithm the agent and the options."""
        is_mix = isinstance(agent, Mapping)
        named: dict[str, Any] = {"agent.path": None if is_mix else get_agent_spec(agent)}
        named["agent.sources"] = {source: get_agent_spec(each) for source, each in agent.items()} if is_mix else {}
        self.algorithm.context = TrainerContext(_as_one(agent), {**self._options, **options, **named})
        try:
            yield
        finally:
            self.algorithm.context = None


def _as_one(agent: Any) -> Agent:
    """Return the agent, or one that plays with several: the agent of each data source."""
    if not isinstance(agent, Mapping):
        return as_agent(agent, "The agent")
    return SourceAgents({source: as_agent(each, f"The agent of {source}") for source, each in agent.items()})


def _refuse_during_load() -> None:
    """Refuse to train while a runner or a worker process imports this file to find the agent."""
    file = current_file()
    if file is not None:
        raise ConfigError(
            f"{file} trains as soon as it is imported, and was imported to load an agent. Put the training under "
            "`if __name__ == '__main__':`."
        )


def _print_scores(scores: Mapping[str, float], directory: Path, console: Console) -> None:
    table = Table("score", "value")
    for name, value in scores.items():
        if not name.startswith("eval/engine/"):
            table.add_row(name, f"{value:.4g}")
    console.print(table)
    console.print(Text(f"answers  {directory / 'evaluations'}"), soft_wrap=True)


def _materialize(tasks: Tasks | None) -> Tasks | None:
    """Return tasks that can be iterated more than once."""
    return tasks if tasks is None or isinstance(tasks, str | Path | Sequence) else list(tasks)
