"""Where agents are at work for a run: the desk over its journal, the model endpoint, their server, and the runners.

    journal ◄─ desk ◄─ server ─► endpoint ─► engine
                ▲                   ▲
              runners ──► agents ───┘

Where a store elsewhere keeps the rollouts (`agent.store`), the desk is its, and the server here is for the endpoint.
All of it is there before the first rollout is asked for, and gone, in the reverse order, when the run is over.
"""

from __future__ import annotations

import asyncio
import gc
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from etude.agents.agent import Agent, load_agent, named
from etude.agents.execution.processes import ProcessRunners
from etude.agents.execution.threads import ThreadRunners
from etude.agents.proxy.app import router
from etude.agents.proxy.endpoint import Endpoint, EndpointConfig
from etude.agents.proxy.external import external_models
from etude.agents.proxy.policy import seeds_of
from etude.agents.proxy.upstream import Upstream
from etude.chat import Chat
from etude.config.env import etude_command
from etude.observe import Last, Metrics, get_log
from etude.recipes.agents import AgentConfig, place_of
from etude.recipes.joining import FarDesk, Keeping, keeper_of, kept_by, key_of, left, refuse_alone
from etude.recipes.run import Run
from etude.records import SamplingParams
from etude.store import Journal
from etude.store.client import RemoteDesk
from etude.store.desk import Desk, Keeper
from etude.store.keys import RUNNER_KEY, Keyring
from etude.store.local_desk import LocalDesk
from etude.store.server import serve
from etude.store.serving import reached_at

__all__ = ["Agency", "agency", "endpoint_of", "swept"]

HERE = Keeper("this run", "here")
"""Who keeps the desk over a run's own journal, wherever that lies: whoever may write to it."""


@dataclass
class Agency:
    """What a run has of it."""

    desk: Desk
    """Where the run asks for rollouts."""
    endpoint: Endpoint
    url: str
    check: Callable[[], None]
    client: Callable[[], RemoteDesk]
    """Another desk at the same rollouts, for whoever wants some besides the run."""

    def metrics(self) -> Metrics:
        """How the endpoint does."""
        return Metrics({name: Last.of(value) for name, value in self.endpoint.metrics().items()})


@contextmanager
def agency(
    run: Run,
    chat: Chat,
    engine: Upstream,
    journal: Journal,
    directory: Path,
    longest: int,
    loop: asyncio.Runner,
    agent: Agent | None = None,
) -> Iterator[Agency]:
    """Everything that agents need, at work. loop: the run's own. agent: who plays, where it is not to be loaded by
    `agent.path`."""
    asked = run.agent
    if agent is None and asked.path is not None:
        agent = load_agent(asked.path)
    host, _, port = asked.listen.rpartition(":")
    with ExitStack() as stack, swept():
        keyring, desk, wanted, keeping = _desks(run, journal, directory, stack, loop)
        val = run.evaluate.sampling.beside(run.sampling).params(0)
        config, told = _endpoint_config(asked), asked.store is None
        endpoint = endpoint_of(run, desk, keyring, chat, engine, longest, val=val, config=config, told=told)
        if isinstance(desk, LocalDesk):
            desk.tell(endpoint.over)
        serving = stack.enter_context(
            serve(desk, keyring, host=host, port=int(port), routers=[router(endpoint)], beside=[endpoint, *keeping])
        )
        url = asked.store or serving.url
        here = serving.url if asked.store is None else reached_at(serving.url, str(urlsplit(asked.store).hostname))
        asyncio.run(_introduced(desk, {"base_url": f"{reached_at(here)}/v1", "model": endpoint.model}))
        check = _runners(run, agent, desk, keyring, url, directory, stack)
        yield Agency(wanted, endpoint, url, check, partial(RemoteDesk, url, keyring.admin))


def endpoint_of(
    run: Run,
    desk: Desk,
    keyring: Keyring,
    chat: Chat,
    engine: Upstream,
    longest: int,
    *,
    val: SamplingParams,
    config: EndpointConfig,
    told: bool = True,
) -> Endpoint:
    """The model endpoint of a run's model. val: the parameters by which answers are drawn in validation; in training it
    is by the run's own."""
    return Endpoint(
        desk,
        keyring,
        chat,
        engine,
        context=longest,
        train=_unseeded(run.sampling.params(0)),
        val=_unseeded(val),
        seeds=lambda rollout, *which: seeds_of(run.seed)(place_of(rollout), *which),
        config=config,
        told=told,
    )


def _runners(
    run: Run, agent: Agent | None, desk: Desk, keyring: Keyring, url: str, directory: Path, stack: ExitStack
) -> Callable[[], None]:
    """Start the runners that play the agent here, or say how others may join; return the check that they are alive."""
    asked = run.agent
    if agent is not None and asked.runners and asked.strategy == "shm":
        threads = ThreadRunners(desk, agent, asked.runners, max_concurrency=asked.at_once, store_url=url)
        return stack.enter_context(threads).check
    if agent is not None and asked.runners:
        logs = directory / "runners"
        processes = ProcessRunners(agent, url, keyring.runner, asked.runners, logs=logs, max_concurrency=asked.at_once)
        return stack.enter_context(processes).check
    key = f"$(cat {shlex.quote(str(directory / RUNNER_KEY))})" if asked.store is None else "…"
    who = shlex.quote(asked.path) if asked.path is not None and named(asked.path) else "AGENT"
    message = "Runners may join: ETUDE_STORE_KEY=%s %s runner %s --url %s"
    get_log("recipes").info(message, key, etude_command(), who, reached_at(url))
    return _nothing


def _endpoint_config(asked: AgentConfig) -> EndpointConfig:
    """The endpoint's options, by those of the run's agents."""
    return EndpointConfig(
        max_running=asked.calls,
        max_waiting=8 * asked.calls,
        timeout_s=asked.timeout,
        parameters=asked.parameters,
        strict=asked.strict,
        external=external_models(asked.external),
    )


class _Desks(NamedTuple):
    keyring: Keyring
    served: Desk
    """The desk that is served here, and written to by the endpoint."""
    asked: Desk
    """The desk where the run asks: the same one, or a store that is elsewhere."""
    keeping: Sequence[Keeping] = ()
    """Says there that the run is here."""


def _desks(run: Run, journal: Journal, directory: Path, stack: ExitStack, loop: asyncio.Runner) -> _Desks:
    """The desk, here or elsewhere, taken up by this run: nothing is lent any more that an earlier life of it left."""
    url = run.agent.store
    if url is None:
        refuse_alone(directory, journal)
        keyring = Keyring.kept(directory)
        desk = LocalDesk(journal, keyring)
        stack.callback(lambda: asyncio.run(desk.close()))
        asyncio.run(desk.keep(HERE))
        return _Desks(keyring, desk, desk)
    keyring = Keyring(admin=key_of(url))
    there, keeper = RemoteDesk(url, keyring.admin), keeper_of(directory, journal)
    life = asyncio.run(kept_by(there, keeper))
    stack.callback(lambda: asyncio.run(left(url, keyring.admin, keeper, life)))
    far = FarDesk(url, keyring.admin, journal, life)
    stack.callback(lambda: loop.run(far.close()))
    return _Desks(keyring, there.in_life(life), far, [Keeping(url, keyring.admin, keeper, life)])


async def _introduced(desk: Desk, endpoint: dict[str, str]) -> None:
    """Tell whoever plays where the model is."""
    await desk.put("endpoint", endpoint)
    if isinstance(desk, RemoteDesk):
        await desk.close()  # its connections are this loop's


@contextmanager
def swept() -> Iterator[None]:
    """Have the garbage collector leave alone what is there now: to go through a model's libraries each time, as it does
    after so many calls to the endpoint, would have every agent wait for a third of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _nothing() -> None:
    """Nobody was started here whose end could be told."""


def _unseeded(params: SamplingParams) -> SamplingParams:
    return replace(params, seed=None)
