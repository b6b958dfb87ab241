"""Where agents are at work for a run: the desk over its journal, the model endpoint, their server, and the runners.

    journal ◄─ desk ◄─ server ─► endpoint ─► engine
                ▲                   ▲
              runners ──► agents ───┘

All of it is there before the first rollout is asked for, and gone, in the reverse order, when the run is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from etude.agents.agent import Agent, load_agent
from etude.agents.execution.processes import ProcessRunners
from etude.agents.execution.threads import ThreadRunners
from etude.agents.proxy.app import router
from etude.agents.proxy.endpoint import Endpoint, EndpointConfig
from etude.agents.proxy.policy import seeds_of
from etude.agents.proxy.upstream import Upstream
from etude.chat import Chat
from etude.observe import Last, Metrics, get_log
from etude.recipes.run import Run
from etude.records import SamplingParams
from etude.store import Journal
from etude.store.keys import RUNNER_KEY, Keyring
from etude.store.local_desk import LocalDesk
from etude.store.server import serve

__all__ = ["Agency", "agency"]


@dataclass
class Agency:
    """What a run has of it."""

    desk: LocalDesk
    endpoint: Endpoint
    url: str
    check: Callable[[], None]

    def metrics(self) -> Metrics:
        """How the endpoint does."""
        return Metrics({name: Last.of(value) for name, value in self.endpoint.metrics().items()})


@contextmanager
def agency(
    run: Run, chat: Chat, engine: Upstream, journal: Journal, directory: Path, longest: int, agent: Agent | None = None
) -> Iterator[Agency]:
    """Everything that agents need, at work. agent: who plays, where it is not to be loaded by `agent.path`."""
    asked = run.agent
    if agent is None and asked.path is not None:
        agent = load_agent(asked.path)
    host, _, port = asked.listen.rpartition(":")
    keyring = Keyring.kept(directory)
    with ExitStack() as stack:
        desk = LocalDesk(journal, keyring)
        stack.callback(lambda: asyncio.run(desk.close()))
        endpoint = Endpoint(
            desk,
            keyring,
            chat,
            engine,
            context=longest,
            train=_unseeded(run.sampling.params(0)),
            val=_unseeded(run.evaluate.sampling.beside(run.sampling).params(0)),
            seeds=seeds_of(run.seed),
            config=EndpointConfig(
                max_running=asked.calls,
                max_waiting=8 * asked.calls,
                timeout_s=asked.timeout,
                parameters=asked.parameters,
            ),
        )
        serving = stack.enter_context(
            serve(desk, keyring, host=host, port=int(port), routers=[router(endpoint)], beside=[endpoint])
        )
        asyncio.run(desk.put("endpoint", {"base_url": f"{serving.url}/v1", "model": endpoint.model}))
        check = _nothing
        if agent is not None and asked.runners and asked.strategy == "shm":
            threads = ThreadRunners(desk, agent, asked.runners, max_concurrency=asked.at_once, store_url=serving.url)
            check = stack.enter_context(threads).check
        elif agent is not None and asked.runners:
            logs = directory / "runners"
            processes = ProcessRunners(
                agent, serving.url, keyring.runner, asked.runners, logs=logs, max_concurrency=asked.at_once
            )
            check = stack.enter_context(processes).check
        else:
            told = "Runners may join: ETUDE_STORE_KEY=$(cat %s) etude runner %s --url %s"
            get_log("recipes").info(told, directory / RUNNER_KEY, asked.path or "AGENT", serving.url)
        yield Agency(desk, endpoint, serving.url, check)


def _nothing() -> None:
    """Nobody was started here whose end could be told."""


def _unseeded(params: SamplingParams) -> SamplingParams:
    return replace(params, seed=None)
