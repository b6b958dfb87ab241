"""A runner on another machine for a run whose rollouts a hub's program plays: the command `etude runner hub`.

The run writes what it plays into its store as the resource `hub`. The Python that plays it is this machine's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.agents.execution.runner_process import RunnerSpec, resolve_store, run_spec
from etude.agents.hubs.agent import HubAgent
from etude.agents.hubs.pool import HubPool
from etude.agents.hubs.process import HubSpec
from etude.agents.runner import RunnerTimeouts
from etude.errors import ConfigError, NotFoundError
from etude.recipes.collect.hub_python import hub_python
from etude.store.http.remote_queue import RemoteRolloutQueue

HUB_RESOURCE = "hub"


def describe_hub(spec: HubSpec) -> dict[str, Any]:
    """Return the value of the resource that tells runners what to play."""
    return {"hub": spec.hub, "what": spec.what, "options": dict(spec.options), "max_turns": spec.max_turns}


def join_hub(url: str = "", *, python: Path | None = None, workers: int = 1, name: str = "", n: int = 8) -> None:
    """Play rollouts of a run by guests on this machine, until SIGINT or SIGTERM.

    url: address of the store, by default `ETUDE_STORE_URL`. python: the one that has the hub's package, by default that
    of `etude env install`. workers: the number of guests. n: the attempts at the same time.
    """
    url, key = resolve_store("a hub", url)
    played = asyncio.run(_read_hub(url, key))
    spec = HubSpec(**played, python=python or hub_python(played["hub"]))
    with HubPool(spec, workers) as pool:
        run_spec(RunnerSpec(HubAgent(pool), url, key, name, n, RunnerTimeouts()))


async def _read_hub(url: str, key: str) -> Mapping[str, Any]:
    """Return what the run of a store plays."""
    queue = RemoteRolloutQueue(url, key)
    try:
        value: Mapping[str, Any] = (await queue.get_resource(HUB_RESOURCE)).value
        return value
    except NotFoundError as error:
        raise ConfigError(
            f"The store at {url} has no run whose rollouts a hub's program plays, such as `env.hub=verifiers:…`. Start "
            "such a run first, or give the agent: `etude runner my_agent.py:solve`."
        ) from error
    finally:
        await queue.close()
