"""`etude.Trainer`: train an agent from a program, in a few lines.

    trainer = etude.Trainer(algorithm=etude.RL("grpo", {"model.path": "Qwen3-0.6B", "steps": 100}), n_runners=2)
    trainer.fit(solver, train, val)
    trainer.dev(solver, tasks)

The trainer hands the agent, the tasks and the runner settings to an algorithm, which does the rest. `RL` is `etude
train` with an agent. `Baseline` serves a model, runs the agent and reports its scores, without training.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.agents.agent import Agent, as_agent, get_agent_spec
from etude.agents.execution.runner_process import serve_if_runner
from etude.config.compose import compose
from etude.config.env import read_role
from etude.config.plugin import current_file
from etude.config.suggestions import suggest_name
from etude.errors import CollectionError, ConfigError, UnknownChoiceError
from etude.observe import make_console
from etude.recipes.presets import PRESETS
from etude.recipes.run.build import build
from etude.recipes.run.components import RunComponents
from etude.recipes.run.config import Run
from etude.recipes.run.dev_report import show_failed, show_scored
from etude.recipes.run.directory import TASKS_FOLDER, new_directory, read_metrics
from etude.recipes.run.event_loop import run_outside_event_loop
from etude.recipes.run.loop import run_loop
from etude.recipes.servers.served_model import ServedModel, serve_to_agent
from etude.store.rollout_queue import RolloutQueue

Tasks: TypeAlias = "str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]"
"""Files of tasks, or tasks as mappings."""
STRATEGIES = ("shm", "cs")


@dataclass(frozen=True)
class TrainerContext:
    """The agent and the run options that a trainer passes to its algorithm."""

    agent: Agent
    options: Mapping[str, Any]

    def merge_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the algorithm's options with the trainer's; refuse an option that is in both."""
        refuse_duplicates(dict.fromkeys(self.options, "an argument of `etude.Trainer`, or its agent,"), options)
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
        overrides |= {
            "agent.store": None,
            "agent.listen": "127.0.0.1:0",
        }  # a shared store would record these rollouts
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
        chosen = directory or self.directory or self.options.get("directory")
        directory = Path(chosen) if chosen else new_directory(Path("runs"), "train")
        options = {**self.context.merge_options(self.options), **(overrides or {}), "directory": directory}
        written: dict[str, str] = {}
        for name, tasks in {"train": train, "val": val}.items():
            if tasks is not None:
                path = directory / TASKS_FOLDER / f"{name}.jsonl"
                options[f"data.{name}"], text = tasks_as_files(tasks, path)
                written |= {} if text is None else {name: text}
        preset = preset_path(self.preset)
        run = compose(Run, values=options, preset=preset).with_preset(preset)
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
        counts: list[tuple[str, Any, int]] = [("n_runners", n_runners, 0), ("max_concurrency", max_concurrency, 1)]
        if chosen not in STRATEGIES:
            raise UnknownChoiceError(
                f"There is no strategy {chosen!r}: runners are threads of this process, `shm`, or processes of their "
                "own, `cs`."
            )
        for name, value, least in counts:
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it is a whole number, {least} or more.")
        self.algorithm = algorithm
        self._max_concurrency, self._runners = max_concurrency, n_runners
        self._options: dict[str, Any] = {
            "agent.strategy": strategy,
            "agent.runners": n_runners,
            "agent.max_concurrency": max_concurrency,
        }

    def fit(self, agent: Any, train: Tasks | None = None, val: Tasks | None = None) -> dict[str, float]:
        """Run the algorithm with this agent and these tasks, and return its metrics.

        With ETUDE_ROLE=runner the same program is a runner: it serves the store at ETUDE_STORE_URL until a signal stops
        it. With ETUDE_ROLE=train the program starts no runners, and waits for such runners.
        """
        _refuse_during_load()
        if serve_if_runner(as_agent(agent, "The agent"), self._max_concurrency):
            return {}
        self.algorithm.context = self._make_context(agent, {"agent.runners": 0} if read_role() == "train" else {})
        try:
            return run_outside_event_loop(lambda: self.algorithm.run(_materialize(train), _materialize(val)))
        finally:
            self.algorithm.context = None

    def dev(self, agent: Any, tasks: Tasks, count: int = 2) -> None:
        """Run the agent twice on each of a few tasks, and print each conversation, its tokens, its reward and its
        training rows. Nothing is trained, and nothing is stored."""
        _refuse_during_load()
        if not isinstance(self.algorithm, RL):
            raise ConfigError(f"{type(self.algorithm).__name__} has no way to try an agent out; RL and Baseline have.")
        if not self._runners:
            raise ConfigError(
                "`dev` runs the agent on this machine, and `n_runners=0` starts no runner here: give it 1."
            )
        self.algorithm.context = self._make_context(agent, {})
        try:
            algorithm = self.algorithm
            run_outside_event_loop(lambda: algorithm.try_out(tasks, count, make_console()))
        finally:
            self.algorithm.context = None

    def _make_context(self, agent: Any, options: Mapping[str, Any]) -> TrainerContext:
        runnable = as_agent(agent, "The agent")
        return TrainerContext(runnable, {**self._options, **options, "agent.path": get_agent_spec(agent)})


def _refuse_during_load() -> None:
    """Refuse to train while a runner or a worker process imports this file to find the agent."""
    file = current_file()
    if file is not None:
        raise ConfigError(
            f"{file} trains as soon as it is imported, and was imported to load an agent. Put the training under "
            "`if __name__ == '__main__':`."
        )


def _print_scores(scores: Mapping[str, float], directory: Path, console: Console) -> None:
    """Print the scores, and the directory of the answers."""
    table = Table("score", "value")
    for name, value in scores.items():
        if not name.startswith("eval/engine/"):
            table.add_row(name, f"{value:.4g}")
    console.print(table)
    console.print(Text(f"answers  {directory / 'evaluations'}"), soft_wrap=True)


def preset_path(name: str | None) -> Path | None:
    """Return the file of a preset; None for no preset."""
    if name is not None and name not in PRESETS:
        hint = " Options are given by their names: `steps=3`, or in `options`." if "=" in name else ""
        raise UnknownChoiceError(
            f"There is no preset '{name}'.{suggest_name(name, PRESETS)}{hint} The presets are {', '.join(PRESETS)}."
        )
    return None if name is None else PRESETS[name]


def refuse_duplicates(arguments: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse an option that is also given as an argument. arguments: the argument's name, by option."""
    by_option = {option.removesuffix(".name"): option for option in options}
    for option, name in arguments.items():
        if option in by_option:
            raise ConfigError(f"`{by_option[option]}` is in `options`, and is given as {name} too. Give it once.")


def tasks_as_files(tasks: Tasks, path: Path) -> tuple[list[str], str | None]:
    """Return the files of the tasks, and the text to write if the tasks are mappings.

    Mappings go to one file, `path`, so that a run can resume. The text is None if the tasks are files already.
    """
    if isinstance(tasks, str | Path):
        return [str(tasks)], None
    rows = list(tasks)
    if rows and all(isinstance(row, str | Path) for row in rows):
        return [str(row) for row in rows], None
    if not rows:
        raise ConfigError(
            "The list of tasks is empty. Give at least one, such as `[{'question': '2+2', 'answer': '4'}]`."
        )
    if not all(isinstance(row, Mapping) for row in rows):
        wrong = next(row for row in rows if not isinstance(row, Mapping))
        raise ConfigError(
            f"Tasks are mappings, such as `{{'question': '2+2', 'answer': '4'}}`, or files of them; a "
            f"{type(wrong).__name__} was given."
        )
    return [str(path)], "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _materialize(tasks: Tasks | None) -> Tasks | None:
    """Return tasks that can be iterated more than once."""
    return tasks if tasks is None or isinstance(tasks, str | Path | Sequence) else list(tasks)
