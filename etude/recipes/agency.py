"""Where agents are at work for a run: the desk over its journal, the model endpoint, their server, and the runners.

    journal ◄─ desk ◄─ server ─► endpoint ─► engine
                ▲                   ▲
              runners ──► agents ───┘

All of it is there before the first rollout is asked for, and gone, in the reverse order, when the run is over.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from etude.agents.agent import Agent, load_agent
from etude.agents.execution.processes import ProcessRunners
from etude.agents.execution.threads import ThreadRunners
from etude.agents.proxy.app import router
from etude.agents.proxy.endpoint import Endpoint, EndpointConfig
from etude.agents.proxy.external import external_models
from etude.agents.proxy.policy import seeds_of
from etude.agents.proxy.upstream import Upstream
from etude.chat import Chat
from etude.observe import Last, Metrics, get_log
from etude.recipes.agents import place_of
from etude.recipes.run import Run
from etude.records import SamplingParams
from etude.store import Journal
from etude.store.keys import Keyring
from etude.store.local_desk import LocalDesk
from etude.store.server import serve

__all__ = ["Agency", "agency", "swept"]

SECRET, RUNNER_KEY = "keys.secret", "runner.key"
"""Files in a run's directory: what its keys are made of, so that all of them stay good over a restart; and the key that
runners elsewhere join with. Nobody else may read them."""


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
    kept = directory / SECRET
    secret = kept.read_text(encoding="utf-8").strip() if kept.exists() else _write(kept, secrets.token_urlsafe(32))
    keyring = Keyring(secret.encode())
    _write(directory / RUNNER_KEY, keyring.runner)
    with ExitStack() as stack:
        stack.enter_context(swept())
        desk = LocalDesk(journal, keyring, anew=True)
        stack.callback(lambda: asyncio.run(desk.close()))
        endpoint = Endpoint(
            desk,
            keyring,
            chat,
            engine,
            context=longest,
            train=_unseeded(run.sampling.params(0)),
            val=_unseeded(run.evaluate.sampling.beside(run.sampling).params(0)),
            seeds=lambda rollout, *which: seeds_of(run.seed)(place_of(rollout), *which),
            config=EndpointConfig(
                max_running=asked.calls,
                max_waiting=8 * asked.calls,
                timeout_s=asked.timeout,
                parameters=asked.parameters,
                external=external_models(asked.external),
            ),
        )
        desk.tell(endpoint.over)
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
            told = "Runners may join: `etude runner %s --url %s`, with what is in %s as their ETUDE_STORE_KEY."
            get_log("recipes").info(told, asked.path or "AGENT", serving.url, directory / RUNNER_KEY)
        yield Agency(desk, endpoint, serving.url, check)


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


def _write(path: Path, text: str) -> str:
    """Have a file hold this that only its owner reads: whole, or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.rename(path)
    return text
