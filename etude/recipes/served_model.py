"""A model served to an agent, with runners, for algorithms that do not train the model.

requested rollouts ─► queue ─► runners ─► the agent ─► the model's endpoint
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from etude.agents.agent import Agent
from etude.data import Dataset
from etude.data.table import DatasetLike
from etude.recipes.agents.services import AgentServices
from etude.recipes.collect.rollouts import PlayedRollout
from etude.recipes.event_loop import LoopThread
from etude.recipes.hub import locate_data, resolve_hub_names
from etude.recipes.inference import load_for_inference
from etude.recipes.run.builders.collection import RolloutBuilder
from etude.recipes.run.config import Run
from etude.recipes.run.rules import checks
from etude.recipes.servers.reward_models import load_reward_models
from etude.rewards import Judge
from etude.rollout.engine_thread import release_omp_workers
from etude.store import Journal, RolloutState, open_store
from etude.store.queue.rollout_queue import RolloutQueue, RolloutRequest


@dataclass
class ServedModel:
    """A model, its agent and its rollout queue, while they are served."""

    run: Run
    store: Journal
    agents: AgentServices = field(repr=False)
    loop: LoopThread = field(repr=False)

    def __post_init__(self) -> None:
        newest = next(self.store.iter_states(RolloutState, backwards=True), None)
        self._ids = count(0 if newest is None else newest.id + 1)

    def play(
        self,
        tasks: DatasetLike,
        resources: Mapping[str, Any] | None = None,
        use: Literal["train", "val"] = "val",
    ) -> list[PlayedRollout]:
        """Have the agent play each task once, and return the results in the order of the tasks.

        The wait is bounded by `agent.timeout` and `agent.runner_timeout`. tasks: one or several files of tasks, or
        tasks as mappings, as in `fit`. resources: stored first, for agents that read `resources`. These rollouts get
        them, also where another call stores others meanwhile. use: the sampling
        options of the answers: `sampling` for train, `evaluate.sampling` for val.
        """
        dataset = Dataset.load(locate_data(tasks, "tasks"), self.run.data.columns, requires_prompt=False)
        rollouts = [(next(self._ids), row) for row in range(len(dataset))]
        return self.loop.run(
            self._play_all([RolloutRequest(dataset.task(row, id), 0, id, use) for id, row in rollouts], resources or {})
        )

    async def _play_all(self, wanted: Sequence[RolloutRequest], resources: Mapping[str, Any]) -> list[PlayedRollout]:
        queue = self.new_client()
        try:
            versions = {name: await queue.put_resource(name, value) for name, value in resources.items()}
        finally:
            await queue.close()
        wanted = [replace(request, resources=versions) for request in wanted]
        await self.agents.requested.start(wanted)
        return list(await asyncio.gather(*map(self.agents.requested.result, wanted)))

    @property
    def new_client(self) -> Callable[[], RolloutQueue]:
        """Makes further clients of the rollout queue."""
        return self.agents.new_client


@contextmanager
def serve_to_agent(run: Run, agent: Agent, directory: Path | None = None) -> Iterator[ServedModel]:
    """Serve the model of a run's options to an agent. directory: keeps the journal and the logs of runners; None keeps
    nothing."""
    checks.check_agents(run)
    run = resolve_hub_names(run)
    with ExitStack() as stack:
        directory_used = directory or Path(stack.enter_context(TemporaryDirectory(prefix="etude-")))
        directory_used.mkdir(parents=True, exist_ok=True)
        _, chat, engine, max_total_tokens = stack.enter_context(load_for_inference(run, best=False))
        judge = stack.enter_context(Judge(load_reward_models(run.reward, run.compute_device()), run.judging))
        loop = stack.enter_context(LoopThread(release_omp_workers))
        store = stack.enter_context(closing(open_store(directory_used / "journal.sqlite")))
        rollouts = RolloutBuilder(run, chat, engine, judge, loop, max_total_tokens, {})
        agents = rollouts.start_agents(directory_used, store, stack, agent)
        yield ServedModel(run, store, agents, loop)
