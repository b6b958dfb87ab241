"""A model served to an agent, with runners, for algorithms that do not train the model.

requested rollouts ─► queue ─► runners ─► the agent ─► the model's endpoint
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from etude.agents.agent import Agent
from etude.chat import ChatRenderer
from etude.chat.messages import content_text
from etude.data import Dataset
from etude.data.table import DatasetLike
from etude.errors import EngineError, EtudeError
from etude.recipes.agents.services import AgentServices
from etude.recipes.collect.rollouts import PlayedRollout
from etude.recipes.collect.sampling import derived_seed
from etude.recipes.event_loop import LoopThread
from etude.recipes.hub import locate_data, resolve_hub_names
from etude.recipes.inference import load_for_inference
from etude.recipes.run.builders.collection import RolloutBuilder
from etude.recipes.run.config import Run
from etude.recipes.run.rules import checks
from etude.recipes.servers.reward_models import load_reward_models
from etude.records import Message
from etude.rewards import Judge
from etude.rollout import ServerPool, TorchEngine
from etude.rollout.engine_thread import release_omp_workers
from etude.store import Journal, RolloutState, open_store
from etude.store.journal.states import Status
from etude.store.queue.bounds import MAX_ITEMS
from etude.store.queue.rollout_queue import RolloutPurpose, RolloutQueue, RolloutRequest

MAX_ASKED_TOKENS = 2048
"""The most tokens of an answer to `ask`."""


@dataclass
class ServedModel:
    """A model, its agent and its rollout queue, while they are served."""

    run: Run
    store: Journal
    agents: AgentServices = field(repr=False)
    loop: LoopThread = field(repr=False)
    chat: ChatRenderer = field(repr=False)
    engine: TorchEngine | ServerPool = field(repr=False)
    max_total_tokens: int

    def __post_init__(self) -> None:
        newest = next(self.store.iter_states(RolloutState, backwards=True), None)
        self._ids = count(0 if newest is None else newest.id + 1)

    def play(
        self,
        tasks: DatasetLike,
        resources: Mapping[str, Any] | None = None,
        use: RolloutPurpose = "val",
    ) -> list[PlayedRollout]:
        """Have the agent play each task once, and return the results in the order of the tasks.

        The wait is bounded by `agent.timeout` and `agent.runner_timeout`. tasks: one or several files of tasks, or
        tasks as mappings, as in `fit`. resources: stored first, for agents that read `resources`. These rollouts get
        them, also where another call stores others meanwhile. use: the sampling
        options of the answers: `sampling` for train, `evaluate.sampling` for val.
        """
        dataset = self.load(tasks)
        return self.loop.run(self.play_rows(dataset, range(len(dataset)), resources or {}, use))

    def load(self, tasks: DatasetLike) -> Dataset:
        """Open tasks, for `play_rows`."""
        return Dataset.load(locate_data(tasks, "tasks"), self.run.data.columns, requires_prompt=False)

    async def play_rows(
        self, dataset: Dataset, rows: Sequence[int], resources: Mapping[str, Any], use: RolloutPurpose = "val"
    ) -> list[PlayedRollout]:
        """Have the agent play some rows of tasks. Called on `loop`; the rest as for `play`.

        If the wait is cancelled or fails, the rollouts that have not ended are cancelled too.
        """
        numbered = [(next(self._ids), row) for row in rows]
        wanted = [RolloutRequest(dataset.task(row, id), 0, id, use) for id, row in numbered]
        queue = self.new_client()
        try:
            versions = {name: await queue.put_resource(name, value) for name, value in resources.items()}
        finally:
            await queue.close()
        wanted = [replace(request, resources=versions) for request in wanted]
        try:
            await self.agents.requested.start(wanted)
            return list(await asyncio.gather(*map(self.agents.requested.result, wanted)))
        except BaseException:
            with suppress(EtudeError):  # they may not be in the store, or it may be the cause
                await self._cancel([id for id, _ in numbered], "the program no longer waits for it")
            raise

    async def cancel_unfinished(self) -> None:
        """Cancel the rollouts of a program that ended before they did: nobody waits for them."""
        states = self.store.iter_states(RolloutState)
        unfinished = [state.id for state in states if state.status in (Status.QUEUED, Status.RUNNING)]
        await self._cancel(unfinished, "the program that asked for it has ended")

    async def ask(self, message: str, name: str) -> str:
        """Answer a message with the model, outside any rollout. Called on `loop`.

        name: that of the call. A call of the same name samples with the same seed.
        """
        asked = [Message("user", message)] if self.chat.has_template else message
        prompt = self.chat.render_prompt(asked).ids
        room = min(self.max_total_tokens - len(prompt), MAX_ASKED_TOKENS)
        if room < 1:
            raise EngineError(
                f"A message to the served model has {len(prompt)} tokens, and its context has "
                f"{self.max_total_tokens}. Ask for less at once, or ask another model."
            )
        seed = derived_seed(self.run.seed, f"ask {name}")
        sampling = replace(self.run.sampling.params(), max_tokens=room, seed=seed)
        answered = await self.engine.generate(prompt, sampling)
        return content_text(self.chat.parse(answered.ids, prompt, sampling=sampling).content) or ""

    async def _cancel(self, rollouts: Sequence[int], why: str) -> None:
        queue = self.new_client()
        try:
            for start in range(0, len(rollouts), MAX_ITEMS):
                await queue.cancel(rollouts[start : start + MAX_ITEMS], why)
        finally:
            await queue.close()

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
        served = ServedModel(run, store, agents, loop, chat, engine, max_total_tokens)
        loop.run(served.cancel_unfinished())
        yield served
