"""The runners of agents, as their run sees them: it reads the ends of rollouts from the queue, and notes if no runner
is left."""

from __future__ import annotations

import math
from collections.abc import Callable

from etude.errors import CollectionError
from etude.observe import format_seconds, get_logger
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.requested import RequestedRollouts
from etude.running_time import running_time
from etude.store.queue.rollout_queue import RolloutQueue

POLL_INTERVAL_S = 5.0
"""Seconds between two checks that runners are alive."""


class AgentRunners:
    """Runners that claim rollouts from the queue, in this process or anywhere.

    Waits for the queue while rollouts are awaited. Raises `CollectionError` if there is no runner for
    `agent.runner_timeout` seconds.
    """

    def __init__(
        self, queue: RolloutQueue, config: AgentConfig, cursor: int = 0, check: Callable[[], None] = lambda: None
    ) -> None:
        """cursor: the current position of the queue; rollouts that ended before it are looked up when they are
        requested. check: raises the error that ended the runners, if none of those that the run started is left."""
        self._queue = queue
        self._config = config
        self._cursor = cursor
        self._check = check

    async def run(self, requested: RequestedRollouts) -> None:
        """Report rollouts as they end, until none is awaited."""
        alone = running_time()
        warned = False
        while requested.awaited:
            self._cursor, ended = await self._queue.wait(self._cursor, POLL_INTERVAL_S)
            self._check()
            for state in ended:
                requested.report(state)
            silences = [runner.silent_s for runner in await self._queue.runners()]
            if ended or min(silences, default=math.inf) < self._config.heartbeat_timeout:
                alone = running_time()
                warned = False
                continue
            silent = max(running_time() - alone, min(silences, default=0.0))
            if silent > self._config.runner_timeout:
                raise CollectionError(
                    f"No runner has sent a heartbeat for {format_seconds(silent)}, and {requested.awaited} rollouts "
                    "wait for one. Start some with `etude runner`, or have the run start them: `agent.runners=1`."
                )
            if silent > 2 * POLL_INTERVAL_S and not warned:
                warned = True
                get_logger("recipes").warning(
                    "No runner is connected: %d rollouts wait for one, for %s at most.",
                    requested.awaited,
                    format_seconds(self._config.runner_timeout),
                )
