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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.agents.agent import Agent, as_agent, spec_of
from etude.config.compose import compose
from etude.config.env import role
from etude.config.plugin import being_run
from etude.errors import CollectionError, ConfigError, UnknownChoiceError
from etude.observe import make_console
from etude.recipes import folder
from etude.recipes.agents import ADDED
from etude.recipes.build import build
from etude.recipes.collecting import Groups
from etude.recipes.loop import practise
from etude.recipes.parts import Parts
from etude.recipes.presets import PRESETS
from etude.recipes.roles import plays_instead
from etude.recipes.run import Run
from etude.store.desk import Desk

__all__ = ["RL", "Algorithm", "Baseline", "Tasks", "Trainer"]

Tasks: TypeAlias = "str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]"
"""Files of tasks, or tasks as mappings."""
STRATEGIES = ("shm", "cs")
WIDE = 200
"""Letters of a field of a task that are shown."""


@dataclass(frozen=True)
class Given:
    """What a trainer gives its algorithm beside the tasks."""

    agent: Agent
    options: Mapping[str, Any]


@dataclass
class Algorithm(ABC):
    """What is done with an agent and its tasks. Derive from it for one of your own."""

    given: Given | None = field(default=None, init=False, repr=False)
    desks: Callable[[], Desk] | None = field(default=None, init=False, repr=False)
    """What makes desks at its rollouts, while it runs."""

    @abstractmethod
    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Do it, and return what came of it."""

    def get_client(self) -> Desk:
        """A desk at which rollouts are wanted, waited for and read, while it runs. It is the caller's to close."""
        if self.desks is None:
            raise ConfigError(f"{type(self).__name__} has no desk now: it has one while it runs.")
        return self.desks()


@dataclass
class RL(Algorithm):
    """Reinforcement learning: the loop of `etude train`, with rollouts that the agent makes."""

    preset: str | None = None
    """A published recipe: `grpo`, `dapo`, …"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run by their names: `{"model.path": "Qwen3-0.6B", "steps": 100}`."""
    directory: Path | str | None = None
    """Where the run lies; one that is there is taken up. By default a new one in `runs`."""

    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Train, and return the last step's numbers."""
        if train is None:
            raise ConfigError("There is nothing to train on: give tasks, `trainer.fit(agent, train=tasks)`.")
        with self._parts(train, val) as parts:
            practise(parts)
            return folder.read_metrics(parts.directory)[-1]

    def try_out(self, tasks: Tasks, count: int, console: Console) -> None:
        """Have a few tasks played, and show what was said, what it earned, and what would be learned from it."""
        few: dict[str, Any] = {"collect.tasks": count, "collect.group_size": 2, "collect.retries": 0}
        few |= {"observe.console": "off", "observe.level": "error"}
        few |= {"agent.store": None, "agent.listen": "127.0.0.1:0"}  # a store is for a run, and would keep what is not
        with TemporaryDirectory() as place, self._parts(tasks, None, Path(place) / "dev", few) as parts:
            parts.publish(parts.checkpoint.step)
            try:
                groups = parts.source.next(1)
            except CollectionError:
                failed(parts, (), console)
                raise
            shown(parts, groups, console)
            failed(parts, [rollout.id for rollout in groups.rollouts], console)
            console.print(Text("Nothing was trained, and nothing is kept."))

    @contextmanager
    def _parts(
        self, train: Tasks, val: Tasks | None, directory: Path | None = None, more: Mapping[str, Any] | None = None
    ) -> Iterator[Parts]:
        assert self.given is not None, "a trainer gives an agent"
        named = directory or self.directory or self.options.get("directory")
        directory = Path(named) if named else folder.new_directory(Path("runs"), "train")
        options = {**self.options, **self.given.options, **(more or {}), "directory": directory}
        written: dict[str, str] = {}
        for name, tasks in {"train": train, "val": val}.items():
            if tasks is not None:
                files, text = _files(tasks, directory / folder.TASKS / f"{name}.jsonl")
                options[f"data.{name}"] = files
                written |= {} if text is None else {name: text}
        run = compose(Run, [f"{name}={_word(value)}" for name, value in options.items()], preset=_preset(self.preset))
        with build(run, agent=self.given.agent, tasks=written) as parts:
            self.desks = parts.client
            try:
                yield parts
            finally:
                self.desks = None


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
            found = dict(parts.evaluate.maybe_run(parts.checkpoint.steps).reduce())
            parts.evaluate.raise_failed()
            if self.options.get("observe.console") != "off":
                _report(found, parts.directory, make_console())
        return found


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
        """strategy: runners as threads of this process (`shm`), or as processes of their own (`cs`). n_runners: how
        many are started; 0 waits for some to join from elsewhere. max_concurrency: attempts that each has under
        way."""
        told: Any = strategy
        counts: list[tuple[str, Any, int]] = [("n_runners", n_runners, 0), ("max_concurrency", max_concurrency, 1)]
        if told not in STRATEGIES:
            raise UnknownChoiceError(
                f"There is no strategy {told!r}: runners are threads of this process, `shm`, or processes of their "
                "own, `cs`."
            )
        for name, value, least in counts:
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it is a whole number, {least} or more.")
        self.algorithm = algorithm
        self._at_once, self._runners = max_concurrency, n_runners
        self._options: dict[str, Any] = {
            "agent.strategy": strategy,
            "agent.runners": n_runners,
            "agent.at_once": max_concurrency,
        }

    def fit(self, agent: Any, train: Tasks | None = None, val: Tasks | None = None) -> dict[str, float]:
        """Have the algorithm do its work with this agent and these tasks.

        Started with ETUDE_ROLE=runner, the same program is a runner of the store that ETUDE_STORE_URL names, until it
        is told to stop; with ETUDE_ROLE=train it starts no runners, and waits for those.
        """
        _not_while_loaded()
        if plays_instead(as_agent(agent, "The agent"), self._at_once):
            return {}
        self.algorithm.given = self._given(agent, {"agent.runners": 0} if role() == "train" else {})
        try:
            return self.algorithm.run(_kept(train), _kept(val))
        finally:
            self.algorithm.given = None

    def dev(self, agent: Any, tasks: Tasks, count: int = 2) -> None:
        """Have the agent play a few tasks twice each, and print each conversation, its tokens, what it earned, and what
        would be learned from it. Nothing is trained, and nothing is kept."""
        _not_while_loaded()
        if not isinstance(self.algorithm, RL):
            raise ConfigError(f"{type(self.algorithm).__name__} has no way to try an agent out; RL and Baseline have.")
        if not self._runners:
            raise ConfigError("`dev` plays on this machine, and `n_runners=0` starts nobody here: give it 1.")
        self.algorithm.given = self._given(agent, {})
        try:
            self.algorithm.try_out(tasks, count, make_console())
        finally:
            self.algorithm.given = None

    def _given(self, agent: Any, options: Mapping[str, Any]) -> Given:
        made = as_agent(agent, "The agent")
        return Given(made, {**self._options, **options, "agent.path": spec_of(agent)})


def _not_while_loaded() -> None:
    """Refuse to train because somebody looks for an agent in the file that trains it."""
    file = being_run()
    if file is not None:
        raise ConfigError(
            f"{file} trains as soon as it is loaded, and was loaded for an agent in it. Put what trains under "
            "`if __name__ == '__main__':`."
        )


def shown(parts: Parts, groups: Groups, console: Console) -> None:
    """Rollouts for a person to read: what was said, what it earned, and what would be learned from it."""
    learners = parts.learners
    batch = learners.crew.fetch(learners.estimate(learners.annotate(parts.collate(groups)), 1))
    advantage, rows, ends = batch.need("advantage"), batch.unit_rows.tolist(), batch.offsets.tolist()
    for place, rollout in enumerate(groups.rollouts):
        fields = parts.store.task(rollout.task).fields
        asked = ", ".join(f"{name}={_short(value)}" for name, value in fields.items() if name not in ADDED)
        console.rule(Text(f"task {rollout.task}, try {rollout.id % 2 + 1}", style="bold"))
        console.print(Text(asked, style="dim"), soft_wrap=True)
        _conversation(parts, rollout.id, console)
        named = ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items())
        console.print(Text(f"reward {rollout.reward:g}{f' ({named})' if named else ''}", style="bold"))
        first, last = rows[place], rows[place + 1]
        for row in range(first, last):
            learned = int(batch.action[ends[row] : ends[row + 1]].sum())
            told = f"{ends[row + 1] - ends[row]} tokens, {learned} of them written by the model"
            console.print(Text(f"row {row - first + 1} of {last - first}: {told}"))
        whole = slice(ends[first], ends[last])
        console.print(Text(_lesson(advantage[whole][batch.action[whole]].tolist())))


def failed(parts: Parts, others: Collection[int], console: Console) -> None:
    """The tries that came to nothing, as far as they came. others: those that are shown already."""
    for state in parts.store.rollouts():
        if state.id not in others and state.last is not None:
            console.rule(Text(f"task {state.task}, try {state.id % 2 + 1}: {state.last.status}", style="bold red"))
            _conversation(parts, state.id, console)
            why = state.last.error or "nothing would be learned from it"
            console.print(Text(why, style="red"), soft_wrap=True)


def _report(found: Mapping[str, float], directory: Path, console: Console) -> None:
    """The scores, and where what was said lies."""
    table = Table("score", "value")
    for name, value in found.items():
        if not name.startswith("eval/engine/"):
            table.add_row(name, f"{value:.4g}")
    console.print(table)
    console.print(Text(f"answers  {directory / 'evaluations'}"), soft_wrap=True)


def _conversation(parts: Parts, rollout: int, console: Console) -> None:
    """Turn by turn what the model read that was new to it, and what it wrote."""
    before: list[int] = []
    for turn in parts.store.turns(rollout):
        prompt, said = turn.prompt.tolist(), turn.completion
        goes_on = bool(before) and prompt[: len(before)] == before
        new = prompt[len(before) :] if goes_on else prompt
        told = f"{len(new)} more tokens" if goes_on else f"{len(new)} tokens"
        begun = "" if goes_on or not before else ", begun anew: the agent rewrote its history"
        console.print(Text(f"turn {turn.index}: {told} read{begun}", style="dim"))
        console.print(
            Text(parts.text(turn.prompt[-len(new) :] if new else turn.prompt[:0]), style="cyan"), soft_wrap=True
        )
        console.print(Text(f"{len(said.ids)} tokens written ({said.finish})", style="dim"))
        console.print(Text(said.text, style="green"), soft_wrap=True)
        before = [*prompt, *said.ids.tolist()]


def _lesson(advantages: Sequence[float]) -> str:
    """What an update would do with a rollout."""
    if not advantages:
        return "nothing would be learned from it: the model wrote nothing"
    mean = sum(advantages) / len(advantages)
    if not any(advantages):
        return "nothing would be learned from it: the tries at this task earned the same"
    return f"advantage {mean:+.3g}: what it wrote would become {'likelier' if mean > 0 else 'less likely'}"


def _short(value: Any) -> str:
    told = json.dumps(value, ensure_ascii=False, default=str)
    return told if len(told) <= WIDE else told[:WIDE] + "…"


def _preset(name: str | None) -> Path | None:
    if name is not None and name not in PRESETS:
        raise ConfigError(f"There is no preset '{name}'. There are: {', '.join(PRESETS)}.")
    return None if name is None else PRESETS[name]


def _files(tasks: Tasks, place: Path) -> tuple[list[str], str | None]:
    """Tasks as files: those that are none yet become one, so that a run can be taken up; and what that is to hold."""
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
        odd = next(row for row in rows if not isinstance(row, Mapping))
        raise ConfigError(
            f"Tasks are mappings, such as `{{'question': '2+2', 'answer': '4'}}`, or files of them; a "
            f"{type(odd).__name__} was given."
        )
    return [str(place)], "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _kept(tasks: Tasks | None) -> Tasks | None:
    """Tasks that can be gone through more than once."""
    return tasks if tasks is None or isinstance(tasks, str | Path | Sequence) else list(tasks)


def _word(value: Any) -> str:
    """A value as an override writes it."""
    return json.dumps(value) if isinstance(value, list | str | bool) or value is None else str(value)
