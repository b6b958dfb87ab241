"""A model served to an agent, with runners that play, for algorithms that do not train it.

rollouts asked for ─► queue ─► runners ─► the agent ─► the model's endpoint
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from etude.agents.agent import Agent
from etude.data import Dataset
from etude.data.table import Source
from etude.recipes import checks
from etude.recipes.agents import Agents
from etude.recipes.ask import loaded
from etude.recipes.build import agents_of
from etude.recipes.device import device_of
from etude.recipes.hub import data_at, located
from etude.recipes.play import Played
from etude.recipes.run import Run
from etude.recipes.scoring import live
from etude.records import Task
from etude.rewards import Judge
from etude.store import Journal, RolloutState, open_store
from etude.store.desk import Desk

__all__ = ["Hosted", "hosted"]


@dataclass
class Hosted:
    """A model that is served to an agent, while it is."""

    run: Run
    store: Journal
    agents: Agents = field(repr=False)
    loop: asyncio.Runner = field(repr=False)

    def __post_init__(self) -> None:
        newest = next(self.store.listed(RolloutState, backwards=True), None)
        self._ids = count(0 if newest is None else newest.id + 1)

    def play(
        self,
        tasks: Source,
        resources: Mapping[str, Any] | None = None,
        use: Literal["train", "val"] = "val",
    ) -> list[Played]:
        """Have the agent play each task once; how each rollout ended, in the order of the tasks. The wait is bounded by
        `agent.timeout` and `agent.patience`.

        tasks: one or several files of tasks, or tasks as mappings, as in `fit`. resources: put first, for agents that
        name `resources`. use: by which sampling answers are drawn: `sampling`, or `evaluate.sampling`.
        """
        dataset = Dataset.load(data_at(tasks, "tasks"), self.run.data.columns, prompted=False)
        named = [(next(self._ids), row) for row in range(len(dataset))]
        return self.loop.run(self._played([(id, dataset.task(row, id)) for id, row in named], resources or {}, use))

    async def _played(
        self, tasks: Sequence[tuple[int, Task]], resources: Mapping[str, Any], use: Literal["train", "val"]
    ) -> list[Played]:
        desk = self.client()
        try:
            for name, value in resources.items():
                await desk.put(name, value)
        finally:
            await desk.close()
        await self.agents.ask([(id, task, 0) for id, task in tasks], use)
        return list(await asyncio.gather(*(self.agents.played(id, task) for id, task in tasks)))

    @property
    def client(self) -> Callable[[], Desk]:
        """Makes further clients of the rollout queue."""
        return self.agents.client


@contextmanager
def hosted(run: Run, agent: Agent, directory: Path | None = None) -> Iterator[Hosted]:
    """Serve the model of a run's options to an agent. directory: where the journal and the logs of runners are kept;
    None keeps nothing."""
    checks.of_agents(run)
    run = located(run)
    with ExitStack() as stack:
        place = directory or Path(stack.enter_context(TemporaryDirectory(prefix="etude-")))
        place.mkdir(parents=True, exist_ok=True)
        _, chat, engine, longest = stack.enter_context(loaded(run, best=False))
        judge = stack.enter_context(Judge(live(run.reward, device_of(run)), run.judging))
        loop = stack.enter_context(asyncio.Runner())
        store = stack.enter_context(closing(open_store(place / "journal.sqlite")))
        agents = agents_of(run, chat, engine, judge, store, place, longest, stack, loop, agent)
        yield Hosted(run, store, agents, loop)
