"""The agent services of a run: the rollout queue over its journal, the model endpoint, their server, and the runners.

    journal ◄─ queue ◄─ server ─► endpoint ─► engine
                ▲                   ▲
              runners ──► agents ───┘

With a remote store (`agent.store`) the queue is the store's, and the server here has only the endpoint. All services
start before the first rollout is requested, and stop in the reverse order when the run is over.
"""

from __future__ import annotations

import asyncio
import gc
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from etude.agents.agent import Agent, is_importable
from etude.agents.execution.processes import ProcessRunners
from etude.agents.execution.threads import ThreadRunners
from etude.agents.hubs.agent import HubAgent
from etude.agents.hubs.pool import HubPool
from etude.agents.proxy.app import create_router
from etude.agents.proxy.endpoint import ModelEndpoint
from etude.agents.proxy.endpoint_config import EndpointConfig
from etude.agents.proxy.external import external_models
from etude.agents.proxy.request import PromptScorer, Upstream
from etude.agents.proxy.sampling_rules import make_seed_function
from etude.agents.runner import RunnerTimeouts
from etude.agents.source_agents import AGENTS_RESOURCE, describe_agents, join_names, load_agents
from etude.chat import ChatRenderer
from etude.config.env import etude_command
from etude.errors import NotFoundError
from etude.observe import Last, Metrics, get_logger
from etude.recipes.agents.hub_runner import HUB_RESOURCE, describe_hub
from etude.recipes.agents.remote_store import (
    MirroredRolloutQueue,
    acquire_lease,
    check_store_not_left,
    load_owner,
    read_admin_key,
    release_lease,
    renew_lease,
)
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.agent_runners import AgentRunners
from etude.recipes.collect.agent_statistics import AgentStatistics
from etude.recipes.collect.evaluation_player import seed_number
from etude.recipes.collect.newest_version import newest_version
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.sampling import SamplingConfig
from etude.recipes.event_loop import LoopThread
from etude.recipes.run.config import Run
from etude.records import SamplingParams
from etude.rewards import Judge, RewardFunction
from etude.rollout import ServerPool
from etude.store import Journal, RolloutState
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.http.server import serve
from etude.store.http.server_thread import reachable_url
from etude.store.queue.keys import RUNNER_KEY, Keyring
from etude.store.queue.local_queue import LocalRolloutQueue, open_own_queue
from etude.store.queue.rollout_queue import RolloutLimits, RolloutPurpose, RolloutQueue

STOPPED_S = 24 * 3600.0
"""Seconds for which a run may be stopped, as by Ctrl-Z, before the runner processes that it started count it as gone.
If it ends, they end with it."""


class AgentServices(NamedTuple):
    """The services of a run's agents, while they are open."""

    requested: RequestedRollouts
    new_client: Callable[[], RolloutQueue]
    """Makes another client of the rollout queue, for any event loop."""


@contextmanager
def agent_services(
    run: Run,
    chat: ChatRenderer,
    engine: Upstream,
    judge: Judge,
    journal: Journal,
    directory: Path,
    max_total_tokens: int,
    loop: LoopThread,
    agent: Agent | None = None,
    hubs: Collection[HubPool] = (),
    *,
    code_changed: bool = False,
) -> Iterator[AgentServices]:
    """Start all agent services, and yield what requests rollouts from agents.

    loop: the run's own event loop. agent: the agent to run, instead of those that the options name. hubs: the guests
    that the agent calls. code_changed: failures of the rollouts so far do not count.
    """
    options, cursor = run.agent, journal.position if run.agent.store is None else 0
    agent = agent or load_agents(options.path, options.sources)
    host, port = options.address
    with ExitStack() as stack, freeze_gc():
        keyring, queue, requested, renewers = _open_queues(options.store, journal, directory, stack, loop)
        scoring = run.evaluate.sampling.fill_from(run.sampling)
        config = EndpointConfig(
            max_running=options.max_calls,
            max_waiting=8 * options.max_calls,
            timeout_s=options.timeout,
            parameters=options.parameters,
            strict=options.strict,
            image_hosts=options.image_hosts,
            max_images=run.vision.max_images,
            external=external_models(options.external),
        )
        notified = isinstance(queue, LocalRolloutQueue)
        endpoint = build_endpoint(
            queue,
            keyring,
            chat,
            engine,
            max_total_tokens,
            train=run.training_params(),
            val=scoring.params(),
            seed=run.seed,
            config=config,
            notified=notified,
            max_tokens_of=_length_limits(journal, {"train": run.sampling, "val": scoring}),
        )
        if isinstance(queue, LocalRolloutQueue):
            queue.on_attempts_ended(endpoint.forget_attempts)
        routers = [create_router(endpoint)]
        serving = stack.enter_context(
            serve(queue, keyring, host=host, port=port, routers=routers, lifespans=[endpoint, *renewers])
        )
        url = own_url = serving.url
        if options.store is not None:
            url, own_url = options.store, reachable_url(serving.url, str(urlsplit(options.store).hostname))
        address = {"base_url": f"{reachable_url(own_url)}/v1", "model": endpoint.model}
        asyncio.run(_put_resource(queue, "endpoint", address))
        asyncio.run(_put_agents(queue, _describe_players(run)))
        if isinstance(agent, HubAgent):
            asyncio.run(_put_resource(queue, HUB_RESOURCE, describe_hub(agent.spec)))
        check = _start_runners(options, agent, queue, keyring, url, directory, stack)
        checks = [*(pool.check for pool in hubs), check]
        limits = RolloutLimits(options.timeout, options.heartbeat_timeout, max_attempts=1 + run.collect.retries)
        rollouts = RequestedRollouts(
            requested,
            journal,
            judge,
            AgentRunners(requested, options, cursor, partial(_check_all, checks)),
            {"train": limits, "val": limits},
            failed_reward=options.failed_reward,
            code_changed=code_changed,
            statistics=AgentStatistics(
                _chosen_reward(run.reward),
                lambda: Metrics({name: Last.of(value) for name, value in endpoint.metrics().items()}),
            ),
        )
        yield AgentServices(rollouts, partial(RemoteRolloutQueue, url, keyring.admin))


def _length_limits(
    journal: Journal, sampling: Mapping[RolloutPurpose, SamplingConfig]
) -> Callable[[RolloutState], int | None] | None:
    """Return what finds the length limit of a rollout's data source; None without such limits."""
    if not any(each.max_tokens_of for each in sampling.values()):
        return None
    return lambda rollout: sampling[rollout.use].max_tokens_of.get(journal.task(rollout.task).source)


def _check_all(checks: Sequence[Callable[[], None]]) -> None:
    for check in checks:
        check()


def _describe_players(run: Run) -> dict[str, Any]:
    """Return the value of the resource that says which data sources have agents, or environments that agents play."""
    agent = run.agent
    if not run.env.has_programs:
        return describe_agents(agent.sources, others=agent.path is not None)
    sources = [*agent.sources, *run.env.sources]
    return describe_agents(sources, others=agent.path is not None or run.env.names_one, only_here=True)


def _chosen_reward(reward: RewardFunction) -> str:
    """Return the name of a reward that judges answers and is not the default; empty if there is none."""
    is_default = reward == Run.model_fields["reward"].default
    return "" if is_default or not reward.scores_answers else reward.title


def build_endpoint(
    queue: RolloutQueue,
    keyring: Keyring,
    chat: ChatRenderer,
    engine: Upstream,
    max_total_tokens: int,
    *,
    train: SamplingParams,
    val: SamplingParams,
    seed: int,
    config: EndpointConfig,
    notified: bool = True,
    scorer: PromptScorer | None = None,
    max_tokens_of: Callable[[RolloutState], int | None] | None = None,
) -> ModelEndpoint:
    """Build the model endpoint of a run's model. train, val: the sampling parameters for training and validation.
    scorer, max_tokens_of: see `ModelEndpoint`."""
    return ModelEndpoint(
        queue,
        keyring,
        chat,
        engine,
        context=max_total_tokens,
        train=train,
        val=val,
        seeds=make_seed_function(seed, seed_number),
        config=config,
        notified=notified,
        newest_version=newest_version(engine),
        holds_grammars=not isinstance(engine, ServerPool) or bool(engine.servers[0].backend.grammar_end_ids),
        scorer=scorer,
        max_tokens_of=max_tokens_of,
    )


def _start_runners(
    config: AgentConfig,
    agent: Agent | None,
    queue: RolloutQueue,
    keyring: Keyring,
    url: str,
    directory: Path,
    stack: ExitStack,
) -> Callable[[], None]:
    """Start the runners of the agent here, or log how others may join; return the check that they are alive."""
    if agent is not None and config.runners:
        count = config.runners
        most = config.max_concurrency
        logs = directory / "runners"
        if config.strategy == "shm":
            return stack.enter_context(ThreadRunners(queue, agent, count, max_concurrency=most, store_url=url)).check
        timeouts = RunnerTimeouts(patience_s=STOPPED_S)
        processes = ProcessRunners(
            agent, url, keyring.runner, count, logs=logs, max_concurrency=most, timeouts=timeouts
        )
        return stack.enter_context(processes).check
    key = f"$(cat {shlex.quote(str(directory / RUNNER_KEY))})" if config.store is None else "…"
    agent_name = shlex.join(join_names(config.path, config.sources))
    if not all(map(is_importable, config.names)):
        agent_name = "AGENT"
    if isinstance(agent, HubAgent):
        agent_name = HUB_RESOURCE
    message = "Runners may join: ETUDE_STORE_KEY=%s %s runner %s --url %s"
    get_logger("recipes").info(message, key, etude_command(), agent_name, reachable_url(url))
    return lambda: None  # no runner was started here that could end


class _Queues(NamedTuple):
    keyring: Keyring
    served: RolloutQueue
    """The queue that is served here, and that the endpoint writes to."""
    requested: RolloutQueue
    """The queue in which the run requests rollouts: the same one, or a remote store."""
    renewers: Sequence[AbstractAsyncContextManager[None]] = ()
    """Renews the lease of a remote store."""


def _open_queues(url: str | None, journal: Journal, directory: Path, stack: ExitStack, loop: LoopThread) -> _Queues:
    """Open the queue, local or remote, and acquire its lease, so that assignments of an earlier epoch end."""
    if url is None:
        check_store_not_left(directory, journal)
        keyring = Keyring.load_or_create(directory)
        queue = stack.enter_context(open_own_queue(journal, keyring))
        return _Queues(keyring, queue, queue)
    keyring = Keyring(admin=read_admin_key(url))
    remote, owner = RemoteRolloutQueue(url, keyring.admin), load_owner(directory, journal)
    epoch = asyncio.run(acquire_lease(remote, owner))
    stack.callback(lambda: asyncio.run(release_lease(url, keyring.admin, owner, epoch)))
    mirrored = MirroredRolloutQueue(url, keyring.admin, journal, epoch)
    stack.callback(lambda: loop.run(mirrored.close()))
    return _Queues(keyring, remote.with_epoch(epoch), mirrored, [renew_lease(url, keyring.admin, owner, epoch)])


async def _put_agents(queue: RolloutQueue, agents: Mapping[str, Any]) -> None:
    """Tell runners which data sources have agents. A run without a mix only corrects what an earlier one said."""
    try:
        changed = (await queue.get_resource(AGENTS_RESOURCE)).value != agents
    except NotFoundError:
        changed = bool(agents["sources"])
    if changed:
        await queue.put_resource(AGENTS_RESOURCE, agents)
    if isinstance(queue, RemoteRolloutQueue):
        await queue.close()  # its connections belong to this event loop


async def _put_resource(queue: RolloutQueue, name: str, value: Mapping[str, Any]) -> None:
    """Tell runners something, such as the address of the model endpoint."""
    await queue.put_resource(name, value)
    if isinstance(queue, RemoteRolloutQueue):
        await queue.close()  # its connections belong to this event loop


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude all current objects from garbage collection.

    Otherwise each full collection would go through the model's libraries. It comes after so many calls to the endpoint,
    and every agent would wait for a third of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
